"""Words on sampling: the defaults of a model, and how the texts of a command are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from triforce.interface.sampling_params import USUAL_IN_CHATS, SamplingParams, chat_defaults

if TYPE_CHECKING:
    from triforce.checkpoint.model_files import ModelFiles

NEUTRAL = SamplingParams()


def defaults(files: ModelFiles) -> str:
    """Return the defaults that a model's files name, or those in their place."""
    named, usual = files.sampling_defaults(), ""
    if chat_defaults(named) != named:
        usual = f"; in chats {_listed(chat_defaults(named))}, the usual values"
    if named:
        return f"{_listed(named)} by default ({files.sampling_source}){usual}"
    return f"temperature {NEUTRAL.temperature:g} by default{usual}"


def of_chats(named: Mapping[str, Any], given: Mapping[str, Any] | None = None) -> str:
    """Return how chats are sampled, given what a model's files name and what options do."""
    params = SamplingParams(**(chat_defaults(named) | dict(given or {})))
    if not params.temperature:
        return "greedy"
    values = {name: getattr(params, name) for name in (*USUAL_IN_CHATS, "repetition_penalty")}
    told = {name: x for name, x in values.items() if name == "temperature" or x != getattr(NEUTRAL, name)}
    own = named.keys() & USUAL_IN_CHATS.keys()
    source = "those of the model's files" if own else "the usual ones, as the model's files name none"
    return f"{_listed(told)}; defaults are {source}"


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())
