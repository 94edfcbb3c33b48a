"""Lossless long-context speculative decoding in three tiers, after TriForce (Sun et al. 2024, arXiv 2404.11912)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triforce.interface.grammar import Grammar
    from triforce.interface.outputs import RequestOutput
    from triforce.interface.sampling_params import SamplingParams
    from triforce.llm import LLM

__version__ = "0.1.0"

# Loaded when first used: torch takes a second to import, and `triforce --help` needs none of it.
_HOMES = {
    "Grammar": "triforce.interface.grammar",
    "LLM": "triforce.llm",
    "RequestOutput": "triforce.interface.outputs",
    "SamplingParams": "triforce.interface.sampling_params",
}

__all__ = ["LLM", "Grammar", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'triforce' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
