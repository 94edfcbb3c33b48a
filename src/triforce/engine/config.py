"""How to speculate, as users set it."""

from __future__ import annotations

from dataclasses import dataclass, field

from triforce.errors import RequestError
from triforce.kvcache import PAGE, OffloadConfig, RetrievalConfig
from triforce.kvcache.selection import POLICIES

LOWER_TIERS = ("same", "int8")

FARTHEST = 8, 16
"""The largest draft_tokens and speculative_tokens that mode `auto` goes to."""

STRICT_ROWS = 8
"""Rows of a strict pass, however few there are; where more may be decoded together, so many."""


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How to speculate: the lowest tier proposes `draft_tokens` at a time, the middle one gathers `speculative_tokens`.

    `lower_tiers`: one of `LOWER_TIERS`, how the target's lower views read committed KV: as it is, or as int8.
    `strict`: passes of the full tier have one shape, where bits depend on it, and passes of a prompt end at set places.
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
                f"retrieval_policy {self.retrieval_policy!r} is not known; choose from {', '.join(POLICIES)}."
            )
        for name in ("draft_tokens", "speculative_tokens"):
            if not (isinstance(getattr(self, name), int) and 1 <= getattr(self, name) <= 32):
                raise RequestError(f"{name} is {getattr(self, name)}; give 1 to 32 tokens.")
        if self.lower_tiers not in LOWER_TIERS:
            raise RequestError(f"lower_tiers {self.lower_tiers!r} is not known; choose from {', '.join(LOWER_TIERS)}.")
        if self.int8 and self.retrieval.chunk % PAGE:
            raise RequestError(
                f"retrieval_chunk is {self.retrieval.chunk}; int8 is of whole pages: give a multiple of {PAGE}."
            )

        if self.offload.kind != "none" and (self.int8 or self.retrieval.chunk % PAGE):
            given = "--lower-tiers int8" if self.int8 else f"--retrieval-chunk {self.retrieval.chunk}"
            raise RequestError(
                f"{given} and --kv-offload {self.offload.kind} cannot be had together; use --lower-tiers same, a "
                f"--retrieval-chunk that is a multiple of {PAGE}, or --kv-offload none"
            )

    @property
    def int8(self) -> bool:
        return self.lower_tiers == "int8"

    def least(self, rows: int) -> tuple[int, int]:
        """The shape that passes of the full tier are padded to: the widest verification, plain decoding included."""
        return (max(rows, STRICT_ROWS), self.reach // 2 - 1) if self.strict else (1, 1)

    @property
    def reach(self) -> int:
        """Positions that the tiers may use beyond the last token asked for."""
        return 2 * (max(self.draft_tokens, FARTHEST[0]) + max(self.speculative_tokens, FARTHEST[1]) + 2)
