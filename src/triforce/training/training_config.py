"""TrainingConfig: all numbers of a training."""

from __future__ import annotations

from dataclasses import dataclass

from triforce.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """Numbers of a training. All lengths are in tokens.

    - rows: texts of an update, read side by side.
    - width: tokens of each text in an update.
    - groups: an episode has `rows` * `groups` texts of `width` tokens, or fewer and longer texts.
    - deepest: length of the longest texts.
    - again: distances, in episodes, at which a past episode is repeated for another update. Its chunks are still in
      memory, and the target's prefill of a new episode takes longer than an update. This field keeps its name, because
      a saved training is resumed only with the field names that it was saved with.
    - steps: consecutive draft tokens that are trained. decay: weight of a draft token relative to that of the one
      before it.
    - anchors: share of the positions at which drafting continues after the first draft token.
    - greedy: share of the target's most probable token (among the proposable ones) in the training probabilities; the
      rest is the target's own distribution.
    - own_every: every `own_every`-th episode is half the target's own text.
    - temperatures: of the target's own texts, in turn.
    - choices: share of the vocabulary that the draft proposes, at least `least_choices` tokens.
    - learning_rate: after `warmup` updates. It falls linearly to `last_rate` times its value.
    - check_every: updates between two evaluations on the held-out texts. heldout_rows: texts of each kind in them.
    - seed: of the initial weights, the episodes and the held-out texts.
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
        """Return lengths of texts from `width` to `deepest`, doubling, none longer than the `available` tokens."""
        doubled_lengths = [self.width]
        while doubled_lengths[-1] * 2 <= min(self.deepest, available):
            doubled_lengths.append(doubled_lengths[-1] * 2)
        return doubled_lengths

    def rate(self, updates: int, time_share: float) -> float:
        """Return the learning rate after this number of updates. time_share: spent share of the time, 0 to 1."""
        return self.learning_rate * (1 - (1 - self.last_rate) * time_share) * min(1.0, (updates + 1) / self.warmup)

    def due(self, number: int) -> list[int]:
        """Return the episodes that are trained on with episode `number`: this one, and the earlier ones that repeat."""
        return [number - distance for distance in (0, *self.again) if distance <= number]

    def choices_of(self, target: ModelConfig) -> int:
        """Return the number of tokens that a draft for this target can propose."""
        return min(target.vocab_size, max(self.least_choices, int(target.vocab_size * self.choices)))
