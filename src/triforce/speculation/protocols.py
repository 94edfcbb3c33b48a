"""Protocols of the algorithm: caches, proposers and samplers.

Shape suffixes: B rows, T tokens fed in one pass, K drafted tokens, J = K + 1, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, Self

from triforce.arrays import Array
from triforce.ragged import Bools, Ints
from triforce.speculation.draft import Counters, Draft, SequenceState
from triforce.speculation.verification import Verification


class Cache(Protocol):
    """The KV that a tier's model reads; see triforce.kvcache."""

    @property
    def lengths_B(self) -> Ints:
        """Cached tokens, by row."""

    def rewind(self, lengths_B: Ints) -> None:
        """Forget all tokens of each row after the first `lengths_B`."""

    def resume(self, length: int) -> tuple[int, int]:
        """Return the next tokens [start, stop) to feed until `length` tokens are cached. For a view of one row.

        If the view skips tokens before `start`, because it will never read them, they count as cached. start == stop:
        nothing is left to feed.
        """

    def row(self, b: int) -> Self:
        """Return a view of row b alone, on the same storage."""

    def fork(self, source: int, row: int) -> None:
        """Give `row`, which is new, the cached tokens of row `source`."""

    def swap_out(self, b: int) -> Any:
        """Return the state of row b, for `swap_in` of another view of the same memory."""

    def swap_in(self, b: int, swapped_row: Any) -> None:
        """Continue in row b, which is new, with the state of a row that was swapped out."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order. The memory of all other rows is freed."""

    def join(self, other: Self) -> None:
        """Append the rows of `other`, a view of the same memory that must not be used afterwards."""


Grant = Callable[[str, int], int]
"""Takes the name of a tier, and the largest size of its next prefill pass in tokens. Returns the granted size."""


def grant_all(tier: str, tokens: int) -> int:
    """Grant all tokens: for callers without other texts that wait for the end of the pass."""
    return tokens


class Proposer(Protocol):
    """Proposes tokens, each with the distribution that it was drawn from: a tier, or n-grams."""

    counters: Counters
    gamma: int
    level: int
    name: str

    @property
    def below(self) -> Proposer | None: ...

    def propose(self, prefix: SequenceState, sampling: TokenSampler, live_B: Bools) -> Draft:
        """Propose tokens that may follow the texts of the live rows."""

    def record_verdict(self, draft: Draft, accepted_B: Ints, live_B: Bools) -> None:
        """Record that the tier above accepted the first `accepted_B` tokens of a proposal."""

    def rewind(self, prefix: SequenceState) -> None: ...

    def prefill(self, prefix: SequenceState, b: int, length: int, *, grant: Grant = grant_all) -> Iterator[int]: ...

    def swap_out(self, b: int) -> tuple[Any, ...]: ...

    def swap_in(self, b: int, swapped_row: tuple[Any, ...]) -> None: ...

    def select(self, rows: Sequence[int]) -> None: ...

    def join(self, other: Self) -> None: ...


class TokenSampler(Protocol):
    """Samples tokens for the rows of a batch, each row by its own parameters."""

    @property
    def coupling(self) -> Verification: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def probs_size(self) -> int:
        """Number of probabilities that a draft keeps of a token (see `Draft.probs_BKV`): 0 or the vocabulary's size."""

    def verify(self, draft: Draft, logits_BJV: Array, prefix: SequenceState, live_B: Bools, tier: int) -> Draft:
        """Return the accepted draft tokens and one more, as samples of `logits_BJV`. Column j follows j draft tokens.

        Raises ModelError if logits are not finite.
        """
