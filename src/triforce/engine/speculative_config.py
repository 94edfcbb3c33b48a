"""SpeculativeConfig: how to speculate, as users set it."""

from __future__ import annotations

from dataclasses import dataclass, field

from triforce.errors import RequestError, argument, require_bool, require_integer
from triforce.kvcache import PAGE, OffloadConfig, RetrievalConfig
from triforce.kvcache.selection import POLICIES

LOWER_TIERS = {"same": 0, "int8": 8, "int4": 4}
"""Bits of the weights that lower tiers read; 0: those of the full tier."""

FARTHEST = 8, 16
"""The largest draft_tokens and speculative_tokens that mode `auto` uses."""

STRICT_ROWS = 8
"""Rows of a strict pass at least; where more may be decoded together, so many."""


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Settings of speculation. Raises RequestError for values that cannot be had, alone or together.

    draft_tokens: those that the lowest tier proposes at a time (gamma_1). speculative_tokens: those that the middle one
    gathers for one verification (gamma_2). sinks, window: tokens that the draft sees. lower_tiers: one of
    `LOWER_TIERS`, what lower views of the target read. strict: passes of the full tier have one shape,
    where bits depend on it, and passes of a prompt end at set places.
    """

    draft_tokens: int = 2
    speculative_tokens: int = 6
    retrieval_policy: str = "observed"
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    sinks: int = PAGE
    window: int = 496
    lower_tiers: str = "same"
    strict: bool = False
    offload: OffloadConfig = field(default_factory=OffloadConfig)

    def __post_init__(self) -> None:
        if self.retrieval_policy not in POLICIES:
            raise RequestError(
                f"{argument('retrieval_policy')} {self.retrieval_policy!r} is not known; choose from "
                f"{', '.join(POLICIES)}."
            )
        for name in ("draft_tokens", "speculative_tokens"):
            require_integer(name, getattr(self, name), 1, 32)
        require_bool("strict", self.strict)
        if self.lower_tiers not in LOWER_TIERS:
            known = ", ".join(LOWER_TIERS)
            raise RequestError(f"{argument('lower_tiers')} {self.lower_tiers!r} is not known; choose from {known}.")
        if self.lower_bits and self.retrieval.chunk % PAGE:
            raise RequestError(
                f"{argument('retrieval_chunk')} is {self.retrieval.chunk}; int8 KV is of whole pages: give a multiple "
                f"of {PAGE}."
            )

        if self.offload.kind != "none" and (self.lower_bits or self.retrieval.chunk % PAGE):
            chunk = argument("retrieval_chunk", self.retrieval.chunk)
            given = argument("lower_tiers", self.lower_tiers) if self.lower_bits else chunk
            raise RequestError(
                f"{given} and {argument('kv_offload', self.offload.kind)} cannot be had together; use "
                f"{argument('lower_tiers', 'same')}, a {argument('retrieval_chunk')} that is a multiple of {PAGE}, or "
                f"{argument('kv_offload', 'none')}"
            )

    @property
    def lower_bits(self) -> int:
        """Bits of the weights that lower tiers read; 0: the full tier's own. Unless it is, they read KV as int8."""
        return LOWER_TIERS[self.lower_tiers]

    def least(self, rows: int) -> tuple[int, int]:
        """Rows and columns that passes of the full tier are padded to: those of the widest verification."""
        return (max(rows, STRICT_ROWS), self.reach // 2 - 1) if self.strict else (1, 1)

    @property
    def reach(self) -> int:
        """Positions that the tiers may use beyond the last token of a text."""
        return 2 * (max(self.draft_tokens, FARTHEST[0]) + max(self.speculative_tokens, FARTHEST[1]) + 2)
