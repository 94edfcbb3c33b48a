"""Engines and sampling parameters from the arguments of a command."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from triforce.checkpoint.hub import model_name
from triforce.cli.arguments import QUOTES_ADVICE
from triforce.cli.asked_prompt import is_word
from triforce.cli.options import DEFAULTS, draft_named
from triforce.cli.progress import loading
from triforce.cli.text_files import read_text
from triforce.distributed.group import TPGroup
from triforce.errors import RequestError
from triforce.interface.grammar import Grammar
from triforce.interface.sampling_params import SamplingParams

if TYPE_CHECKING:
    from triforce.llm import LLM

DISK_CACHE = ("disk_cache", "disk_cache_size", "disk_cache_network")
PLACEMENT = ("device", "dtype", "kv_dtype", "weight_inputs", "context")
SPECULATION = (
    "mode", "coupling", "draft_tokens", "speculative_tokens", "retrieval_budget", "retrieval_chunk",
    "retrieval_policy", "retrieval_refresh", "searched_layers", "lower_tiers",
    "kv_offload", "kv_memory", "kv_resident_layers",
)  # fmt: skip


def load(
    options: Namespace, ranks: TPGroup | None = None, template_messages: list[dict[str, str]] | None = None
) -> LLM:
    """Return the engine that `options` describe; `ranks` share it.

    template_messages: messages on which the chat template is tried before weights are read. Raises ModelError or
    RequestError.
    """
    with loading(options), _unknown_model_advice(options):
        if template_messages and getattr(options, "chat_template", None) is None:
            _try_template(options.model, template_messages)
        from triforce.llm import LLM

        return LLM(**settings(options) | ({"ranks": ranks} if ranks else {}))


@contextmanager
def _unknown_model_advice(options: Namespace) -> Iterator[None]:
    """Add to the error of an unknown model that its name may be the first word of an unquoted prompt."""
    from triforce.checkpoint.hub import UnknownModel

    try:
        yield
    except UnknownModel as error:
        words = (options.model, getattr(options, "prompt", None) or "")
        if getattr(options, "two_words", False) and all(map(is_word, words)):
            error.args = (f"{error.args[0]}; {words[0]!r} was taken for the MODEL: {QUOTES_ADVICE}",)
        raise


def _try_template(model: str, template_messages: list[dict[str, str]]) -> None:
    """Raise RequestError if the model's chat template is broken or hostile."""
    from triforce.checkpoint.model_files import open_model

    files = open_model(model)
    if files.has_tokenizer and (tokenizer := files.tokenizer()).chats:
        tokenizer.chat(template_messages)


def settings(options: Namespace) -> dict[str, Any]:
    """Return the keyword arguments of LLM."""
    engine_settings = {name: getattr(options, name) for name in PLACEMENT + SPECULATION}
    disk_cache_settings = (
        {name: getattr(options, name) for name in DISK_CACHE} if getattr(options, "disk_cache", None) else {}
    )
    template = getattr(options, "chat_template", None)
    template_settings = {"chat_template": template} if template is not None else {}
    models = {"model": options.model, "draft": draft_named(options)}
    return models | engine_settings | template_settings | disk_cache_settings


def served_name(options: Namespace) -> str:
    """Return the name by which clients call the model. Raises RequestError for an empty name."""
    if options.name is not None and not options.name.strip():
        raise RequestError("--name is empty; give a name, or leave it out")
    return options.name or model_name(options.model)


def sampling(options: Namespace) -> dict[str, Any]:
    """Return the sampling parameters in the arguments, for `LLM.sampling_params`.

    Raises RequestError, which names the parameter that is out of range.
    """
    values = {name: value for name in DEFAULTS if (value := getattr(options, name, None)) is not None}
    if options.json_schema:
        values["grammar"] = Grammar.json(_schema(options.json_schema))
    elif options.regex is not None:
        values["grammar"] = Grammar.regex(options.regex)
    elif options.choice:
        values["grammar"] = Grammar.choices(options.choice)
    values |= {"logit_bias": dict(options.logit_bias) or None, "stop_token_ids": options.stop_token_id}
    SamplingParams(**values)
    return values


def _schema(argument: str) -> str:
    """Return the text of a JSON schema: the argument itself, or the contents of the file of that name.

    An argument that begins with a brace is a schema. Raises RequestError.
    """
    inline = argument.lstrip().startswith("{")
    text = argument if inline else read_text(argument)
    try:
        json.loads(text)
    except ValueError as error:
        source = "the schema of --json-schema" if inline else argument
        raise RequestError(f"{source} is not JSON ({error}); give a JSON schema, or a file that holds one") from error
    return text
