"""Lossless long-context speculative decoding in three tiers, after TriForce (Sun et al. 2024, arXiv 2404.11912)."""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # type checkers take it as True; an import of `typing` would delay the handler of Ctrl-C
if TYPE_CHECKING:
    from triforce.engine.engine import OutputChunk
    from triforce.errors import (
        CacheError,
        CacheWarning,
        ContextLengthError,
        ModelError,
        RankError,
        RequestError,
        TriforceError,
    )
    from triforce.interface.explain import (
        Explanation,
        PlanReport,
        PlanSegment,
        TierBelief,
        TierReport,
        TierStats,
        WeighedPlan,
    )
    from triforce.interface.grammar import Grammar
    from triforce.interface.outputs import (
        CompletionOutput,
        DecodingSnapshot,
        Interruption,
        KVMemoryUsage,
        Logprob,
        RequestOutput,
        TokenLogprobs,
    )
    from triforce.interface.sampling_params import SamplingParams
    from triforce.llm import LLM
    from triforce.session import Session
    from triforce.transformers_generation import custom_generate

__version__ = "0.1.0"

# A name is imported when it is first used: torch takes a second to import, and `triforce --help` does not need torch.
_NAMES_BY_MODULE = {
    "triforce.llm": ["LLM"],
    "triforce.session": ["Session"],
    "triforce.transformers_generation": ["custom_generate"],
    "triforce.interface.sampling_params": ["SamplingParams"],
    "triforce.interface.grammar": ["Grammar"],
    "triforce.engine.engine": ["Engine", "OutputChunk"],
    "triforce.interface.outputs": [
        *("RequestOutput", "CompletionOutput", "Logprob", "TokenLogprobs", "KVMemoryUsage", "DecodingSnapshot"),
        "Interruption",
    ],
    "triforce.interface.explain": [
        *("TierStats", "PlanSegment", "PlanReport", "TierBelief", "WeighedPlan", "Explanation", "TierReport"),
    ],
    "triforce.errors": [
        *("TriforceError", "ModelError", "RequestError", "ContextLengthError", "CacheError", "CacheWarning"),
        "RankError",
    ],
}
_MODULE_BY_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = [
    "LLM",
    "CacheError",
    "CacheWarning",
    "CompletionOutput",
    "ContextLengthError",
    "DecodingSnapshot",
    "Engine",
    "Explanation",
    "Grammar",
    "Interruption",
    "KVMemoryUsage",
    "Logprob",
    "ModelError",
    "OutputChunk",
    "PlanReport",
    "PlanSegment",
    "RankError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "Session",
    "TierBelief",
    "TierReport",
    "TierStats",
    "TokenLogprobs",
    "TriforceError",
    "WeighedPlan",
    "__version__",
    "custom_generate",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'triforce' has no attribute {name!r}")
    return getattr(import_module(_MODULE_BY_NAME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
