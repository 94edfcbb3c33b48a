"""What the algorithm asks of caches, models and samplers, and what tiers ask of one another.

Shape suffixes: B rows, T tokens fed in one pass, K drafted tokens, J = K + 1, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, Self, TypeVar

from torch import Tensor

from triforce.ragged import Bools, Ints
from triforce.speculation.counters import Counters
from triforce.speculation.draft import Draft, SequenceState
from triforce.speculation.verification import Verification


class Cache(Protocol):
    """What a tier's model remembers; see triforce.kvcache."""

    @property
    def lengths_B(self) -> Ints:
        """Tokens seen, per row."""

    def begin(self, counts_B: Ints, width: int) -> None:
        """The next pass feeds `counts_B` tokens (at most `width`, the rest is padding) at `lengths_B` and after."""

    def advance(self, counts_B: Ints) -> None:
        """The tokens of the pass count as seen."""

    def rewind(self, lengths_B: Ints) -> None:
        """See at most `lengths_B` tokens."""

    def resume(self, length: int) -> tuple[int, int]:
        """For one row: the next tokens [start, stop) to feed on the way to having seen `length` tokens.

        Tokens before `start` count as seen from then on. Nothing is left to feed when start == stop.
        """

    def row(self, b: int) -> Self:
        """Row b alone, on the same storage."""

    def fork(self, source: int, row: int) -> None:
        """Let a fresh row see what another row has seen."""

    def aside(self, b: int) -> Any:
        """What a row holds, for `bring_back` of another view of the same memory."""

    def bring_back(self, b: int, held: Any) -> None:
        """Let a fresh row go on as the one that was put aside."""

    def select(self, rows: Sequence[int]) -> None:
        """Row i is from now on what row `rows[i]` was; the others, and what they hold, are given back."""

    def join(self, other: Self) -> None:
        """The rows of another view of the same memory follow these; it is not to be used any more."""


Grant = Callable[[str, int], int]
"""Told of a tier and how many tokens its next pass of prefill could have; returns how many it may have."""


def all_of_it(tier: str, tokens: int) -> int:
    """The grant where no other text waits for the pass to end."""
    return tokens


Seen = TypeVar("Seen", bound=Cache, contravariant=True)


class TierModel(Protocol[Seen]):
    """Scores columns `at_BJ` of the tokens fed, given what the cache has seen."""

    def __call__(self, ids_BT: Tensor, cache: Seen, at_BJ: Tensor) -> Tensor: ...


class Proposer(Protocol):
    """Whatever can guess how a text goes on, and say by which law."""

    counters: Counters
    gamma: int
    level: int

    @property
    def name(self) -> str: ...

    @property
    def below(self) -> Proposer | None: ...

    def propose(self, prefix: SequenceState, sampling: TokenSampler, live_B: Bools) -> Draft: ...

    def judged(self, guess: Draft, kept_B: Ints, live_B: Bools) -> None:
        """The tier above kept the first `kept_B` tokens of what was proposed."""

    def rewind(self, prefix: SequenceState) -> None: ...

    def prefill(self, prefix: SequenceState, b: int, length: int, *, grant: Grant = all_of_it) -> Iterator[int]: ...

    def aside(self, b: int) -> tuple[Any, ...]: ...

    def bring_back(self, b: int, held: tuple[Any, ...]) -> None: ...

    def select(self, rows: Sequence[int]) -> None: ...

    def join(self, other: Self) -> None: ...


class TokenSampler(Protocol):
    """How the rows of a batch want their tokens."""

    @property
    def coupling(self) -> Verification: ...

    @property
    def vocab_size(self) -> int: ...

    def verify(self, guess: Draft, logits_BJV: Tensor, prefix: SequenceState, live_B: Bools, tier: int) -> Draft:
        """The guesses kept and one token more, as samples of the law of these logits. Column j follows j guesses."""
