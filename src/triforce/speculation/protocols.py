"""Protocols: caches, models and samplers as the algorithm uses them, and tiers as they use one another.

Shape suffixes: B rows, T tokens fed in one pass, K drafted tokens, J = K + 1, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, Self

from torch import Tensor

from triforce.ragged import Bools, Ints
from triforce.speculation.draft import Counters, Draft, SequenceState
from triforce.speculation.verification import Verification


class Cache(Protocol):
    """The KV that a tier's model sees; see triforce.kvcache."""

    @property
    def lengths_B(self) -> Ints:
        """Tokens seen, per row."""

    def rewind(self, lengths_B: Ints) -> None:
        """Forget all but the first `lengths_B` tokens."""

    def resume(self, length: int) -> tuple[int, int]:
        """Return, for one row, the next tokens [start, stop) to feed on the way to having seen `length` tokens.

        Tokens before `start` count as seen from then on. Nothing is left to feed when start == stop.
        """

    def row(self, b: int) -> Self:
        """Return a view of row b alone, on the same storage."""

    def fork(self, source: int, row: int) -> None:
        """Let a fresh row see what another row has seen."""

    def swap_out(self, b: int) -> Any:
        """Return what a row holds, for `swap_in` of another view of the same memory."""

    def swap_in(self, b: int, held: Any) -> None:
        """Let a fresh row go on as the one that was swapped out."""

    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row `rows[i]` was; the others, and what they hold, are given back."""

    def join(self, other: Self) -> None:
        """Append the rows of another view of the same memory, which is not to be used any more."""


Grant = Callable[[str, int], int]
"""Gets a tier and how many tokens its next pass of prefill could have. Returns how many it may have."""


def grant_all(tier: str, tokens: int) -> int:
    """Grant all tokens, where no other text waits for the pass to end."""
    return tokens


class Proposer(Protocol):
    """A tier, or anything else that proposes tokens and the distribution that each was drawn from."""

    counters: Counters
    gamma: int
    level: int
    name: str

    @property
    def below(self) -> Proposer | None: ...

    def propose(self, prefix: SequenceState, sampling: TokenSampler, live_B: Bools) -> Draft:
        """Propose tokens that may follow the texts of the live rows."""

    def record_verdict(self, guess: Draft, accepted_B: Ints, live_B: Bools) -> None:
        """Record that the tier above accepted the first `accepted_B` tokens of a proposal."""

    def rewind(self, prefix: SequenceState) -> None: ...

    def prefill(self, prefix: SequenceState, b: int, length: int, *, grant: Grant = grant_all) -> Iterator[int]: ...

    def swap_out(self, b: int) -> tuple[Any, ...]: ...

    def swap_in(self, b: int, held: tuple[Any, ...]) -> None: ...

    def select(self, rows: Sequence[int]) -> None: ...

    def join(self, other: Self) -> None: ...


class TokenSampler(Protocol):
    """Samples tokens for the rows of a batch, each by its own parameters."""

    @property
    def coupling(self) -> Verification: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def probs_size(self) -> int:
        """Probabilities of a token that a draft keeps (see `Draft.probs_BKV`): 0 or the vocabulary's size."""

    def verify(self, guess: Draft, logits_BJV: Tensor, prefix: SequenceState, live_B: Bools, tier: int) -> Draft:
        """Return the accepted draft tokens and one more, as samples of these logits. Column j follows j draft tokens.

        Raises ModelError where logits are not finite.
        """
