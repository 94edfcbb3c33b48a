"""Readings: episodes as the target read them, kept for as long as they are trained on again.

Shape suffixes as in distillation.py; L tokens of an episode.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from triforce.backends.decoder import Decoder
from triforce.training.episodes import Episodes
from triforce.training.target_stream import Chunk, TargetStream
from triforce.training.training_config import TrainingConfig

Text = list[Chunk]
"""`rows` texts side by side, chunk after chunk; states are bfloat16."""


class Readings:
    """Episodes by their number. layers: whose states are read."""

    def __init__(self, decoder: Decoder, layers: tuple[int, ...], episodes: Episodes, config: TrainingConfig) -> None:
        self.decoder, self.layers, self.episodes, self.config = decoder, layers, episodes, config
        self._kept: dict[int, list[Text]] = {}

    def __call__(self, number: int) -> Iterator[Text]:
        """Yield the texts of an episode. One that is not kept, or not all of it, is read again: it is the same."""
        if number in self._kept:
            yield from self._kept[number]
            return
        last, read = max(self.config.again, default=0), list[Text]()
        self._kept = {old: texts for old, texts in self._kept.items() if old + last >= number}
        for text in self.texts(self.episodes(number)):
            read.append(text)
            yield text
        self._kept[number] = read

    def texts(self, ids_BL: Tensor) -> Iterator[Text]:
        """Let the target read texts, `rows` at a time."""
        for some_BL in torch.split(ids_BL, self.config.rows):
            stream = TargetStream(self.decoder, self.layers, *some_BL.shape)
            parts = torch.split(some_BL, self.config.width, 1)
            yield [stream.read(ids_BT).to(torch.bfloat16) for ids_BT in parts]
