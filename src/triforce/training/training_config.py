"""TrainingConfig: every number of a training."""

from __future__ import annotations

from dataclasses import dataclass

from triforce.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """Lengths are tokens.

    rows: texts of an update, read side by side. width: what is read of each. groups: so many times as many texts
    are an episode, fewer of them where they are longer. deepest: how long the longest texts are. again: each
    episode is trained on once more so many episodes later, as the target's reading of it costs more than the
    update. steps: guesses in a row that are trained; decay: weight of each, times that of the one before. anchors:
    share of the places where guesses go on behind the first. greedy: share of the target's most probable token (of
    those proposed) in what is taught, beside its law. own_every: each so many episodes are half the target's own.
    temperatures: of these, by turns. choices: share of the vocabulary that is proposed, but no less than
    least_choices. learning_rate: after `warmup` updates; it falls linearly to `last_rate` of it. check_every:
    updates between two looks at the held-out texts.
    """

    rows: int = 4
    groups: int = 8
    width: int = 512
    deepest: int = 8192
    again: tuple[int, ...] = (2, 5)
    steps: int = 4
    decay: float = 0.25
    anchors: float = 0.125
    greedy: float = 0.4
    own_every: int = 3
    temperatures: tuple[float, ...] = (0.0, 0.6, 0.8, 1.0)
    choices: float = 0.25
    least_choices: int = 4096
    learning_rate: float = 2.5e-3
    last_rate: float = 0.05
    warmup: int = 10
    check_every: int = 64
    heldout_rows: int = 4
    seed: int = 1

    def lengths(self, available: int) -> list[int]:
        """Lengths of texts, of which so many tokens are there: doubled from the width to the deepest."""
        doubled_lengths = [self.width]
        while doubled_lengths[-1] * 2 <= min(self.deepest, available):
            doubled_lengths.append(doubled_lengths[-1] * 2)
        return doubled_lengths

    def rate(self, updates: int, done: float) -> float:
        """Return the learning rate behind so many updates, where this share of the time is spent."""
        return self.learning_rate * (1 - (1 - self.last_rate) * done) * min(1.0, (updates + 1) / self.warmup)

    def due(self, number: int) -> list[int]:
        """Return the episodes that are trained on when an episode is read: itself, and earlier ones again."""
        return [number - past for past in (0, *self.again) if past <= number]

    def choices_of(self, target: ModelConfig) -> int:
        """Count the tokens that a draft for this target proposes."""
        return min(target.vocab_size, max(self.least_choices, int(target.vocab_size * self.choices)))
