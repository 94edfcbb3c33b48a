"""Chat templates for models without one: from a file, or one of the common forms by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from triforce.errors import ModelError, RequestError, argument

if TYPE_CHECKING:  # the command line reads the names without the tokenizer library
    from triforce.checkpoint.tokenizer import Tokenizer

TEMPLATE_NAMES = ("chatml", "gemma", "llama3", "mistral", "plain")
"""Names of the templates in `assets/chat_templates`, which were written for triforce with the marks of each family."""
_TEMPLATES = Path(__file__).parents[1] / "assets" / "chat_templates"
MAX_BYTES = 1 << 20
"""Maximal size of a template's file."""
_TRIAL = ({"role": "user", "content": "Hello"},)


def read_chat_template(source: str | Path) -> str:
    """Return the template of a name of `TEMPLATE_NAMES`, or of a file. Raises ModelError."""
    is_name = str(source) in TEMPLATE_NAMES
    file = _TEMPLATES / f"{source}.jinja" if is_name else Path(source)
    shown = argument("chat_template", str(source))
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ModelError(f"{shown} is larger than {MAX_BYTES:,} bytes; give a file with a chat template")
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{shown} is not UTF-8 ({error}); convert the file") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        advice = f"give a file, or one of {', '.join(TEMPLATE_NAMES)}"
        raise ModelError(f"{shown} is no file that can be read ({reason}); {advice}") from error


def template_fault(tokenizer: Tokenizer) -> str:
    """Return why a tokenizer's chat template does not format a conversation of one question; empty if it does."""
    try:
        tokenizer.chat(_TRIAL)
    except RequestError as error:
        return str(error)
    return ""


def set_chat_template(tokenizer: Tokenizer | None, template: str) -> None:
    """Replace a tokenizer's chat templates. Raises ModelError for a template that does not format a question."""
    if tokenizer is None:
        raise ModelError(f"{argument('chat_template')} needs a tokenizer, and this model has none; leave it out")
    tokenizer.templates = {"default": template}
    if fault := template_fault(tokenizer):
        raise ModelError(f"{argument('chat_template')} cannot be used: {fault}; correct it")
