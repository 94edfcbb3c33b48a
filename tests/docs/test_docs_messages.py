"""Messages that pages quote stand in the code, word for word."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.helpers.pages import ROOT
from triforce.errors import as_option

PAGES = ("openai-client.md", "troubleshooting.md")
GAP = "\0"
"""Stands for a part of a message that varies. Pages write it as three dots."""


def quoted(page: str) -> list[str]:
    """Return the messages that a page quotes: the first cells of its tables of messages."""
    tables = re.findall(r"^\| message \|.*\n\|---.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    return [message for rows in tables for message in re.findall(r"^\| `(.*?)` \|", rows, re.MULTILINE)]


def texts(code: str) -> Iterator[str]:
    """Yield the string literals of a module, with gaps for values; arguments stand as on the command line."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%(?:\.\d)?[sdf]", GAP, node.value)
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else value_of(part) for part in node.values)


def value_of(part: ast.expr) -> str:
    """Return an argument with a constant name as an option, and a gap for any other value."""
    call = part.value if isinstance(part, ast.FormattedValue) else part
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "argument":
        words = [word.value if isinstance(word, ast.Constant) else GAP for word in call.args]
        return as_option(str(words[0]), repr(words[1]) if len(words) > 1 else None)
    return GAP


@pytest.fixture(scope="module")
def known_texts() -> str:
    modules = [file.read_text(encoding="utf-8") for file in sorted((ROOT / "src").rglob("*.py"))]
    scripts = [file.read_text(encoding="utf-8") for file in sorted((ROOT / "scripts").glob("*.sh"))]
    return "\n".join([text for code in modules for text in texts(code)] + scripts)


def invented(page: str, known: str) -> list[str]:
    """Return the quoted messages with a part that is in no known text."""
    return [
        message for message in quoted(page) if not all(part.strip() in known for part in message.split("...") if part)
    ]


@pytest.mark.parametrize("name", PAGES)
def test_messages_of_pages_stand_in_code(name: str, known_texts: str) -> None:
    page = (ROOT / "docs" / "tutorial" / name).read_text(encoding="utf-8")
    assert len(quoted(page)) >= 8
    assert invented(page, known_texts) == []


def test_invented_message_is_found() -> None:
    code = 'raise E(f"{argument(\'kv_memory\')} is {size}, too little" "; give more")\nLOG.info("%d of %s", n, x)'
    known = "\n".join(texts(code))
    rows = [f"| `{message}` | x |\n" for message in ("--kv-memory is ..., too little; give more", "... of ...", "less")]
    assert invented(f"| message | cause |\n|---|---|\n{''.join(rows)}\n| `other` |\n", known) == ["less"]
