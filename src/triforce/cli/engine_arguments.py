"""Engines and sampling parameters from the arguments of a command."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from triforce.backends.torch_import import import_torch
from triforce.cli.options import DEFAULTS, draft_named
from triforce.cli.progress import loading
from triforce.cli.text_files import read_text
from triforce.distributed.group import TPGroup
from triforce.interface.grammar import Grammar
from triforce.interface.sampling_params import SamplingParams

if TYPE_CHECKING:
    from triforce.llm import LLM

DISK_CACHE = ("disk_cache", "disk_cache_size", "disk_cache_network")
PLACEMENT = ("device", "dtype", "kv_dtype", "context")
SPECULATION = (
    "mode", "coupling", "draft_tokens", "speculative_tokens", "retrieval_budget", "retrieval_chunk",
    "retrieval_policy", "retrieval_refresh", "searched_layers", "lower_tiers",
    "kv_offload", "kv_memory", "kv_resident_layers",
)  # fmt: skip


def load(options: Namespace, ranks: TPGroup | None = None) -> LLM:
    """Return the engine that the arguments describe; `ranks` share it."""
    with loading(options):
        import_torch()
        from triforce.llm import LLM

        return LLM(**settings(options) | ({"ranks": ranks} if ranks else {}))


def settings(options: Namespace) -> dict[str, Any]:
    """Return the keyword arguments of LLM."""
    given = {name: getattr(options, name) for name in PLACEMENT + SPECULATION}
    kept = {name: getattr(options, name) for name in DISK_CACHE} if getattr(options, "disk_cache", None) else {}
    return {"model": options.model, "draft": draft_named(options)} | given | kept


def sampling(options: Namespace) -> dict[str, Any]:
    """The sampling parameters in the arguments, for `LLM.sampling_params`.

    Raises RequestError naming the one that is out of range.
    """
    values = {name: value for name in DEFAULTS if (value := getattr(options, name, None)) is not None}
    if options.json_schema:
        values["grammar"] = Grammar.json(read_text(options.json_schema))
    elif options.regex is not None:
        values["grammar"] = Grammar.regex(options.regex)
    elif options.choice:
        values["grammar"] = Grammar.choices(options.choice)
    values |= {"logit_bias": dict(options.logit_bias) or None, "stop_token_ids": options.stop_token_id}
    SamplingParams(**values)
    return values
