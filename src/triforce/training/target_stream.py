"""TargetStream: texts as the target reads them, chunk after chunk: hidden states, none of which is stored in a file.

Shape suffixes as in model/feature_draft.py; B rows, T tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triforce.backends.decoder import Decoder
from triforce.engine.speculative_config import SpeculativeConfig
from triforce.engine.tier_builder import ModelSet, TierBuilder
from triforce.ragged import ints


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of a chunk, at slots that all rows share, and what the target makes of them."""

    ids_BT: Tensor
    slots_BT: Tensor
    states_BTX: Tensor
    """Behind the token before each: what its entry is made of."""
    embeddings_BTC: Tensor
    final_BTC: Tensor
    """Behind the last layer, of each token itself: what the law of the next one is made of."""
    logits_BTV: Tensor | None = None
    """Where they were asked for."""

    def to(self, dtype: torch.dtype) -> Chunk:
        """Return the chunk with states and embeddings in this type."""
        states = {name: getattr(self, name).to(dtype) for name in ("states_BTX", "embeddings_BTC", "final_BTC")}
        return replace(self, **states)


class TargetStream:
    """Rows of texts of at most `capacity` tokens, new to the target."""

    def __init__(self, decoder: Decoder, layers: tuple[int, ...], rows: int, capacity: int) -> None:
        self.decoder, self.layers = decoder, layers
        self.view = TierBuilder(ModelSet(decoder), SpeculativeConfig(), [capacity] * rows).full()
        self.last_B1X = torch.zeros(rows, 1, len(layers) * decoder.config.hidden_size)

    def read(self, ids_BT: Tensor, *, logits: bool = False) -> Chunk:
        """Feed the next tokens of each row. logits: of all of them, which is many times as much as the states."""
        (B, T), start, counts_B = ids_BT.shape, int(self.view.lengths_B[0]), ints([ids_BT.shape[1]] * len(ids_BT))
        at_BJ = None if logits else torch.full((B, 1), T - 1)  # the last layer is finished where something is scored
        _, output = self.decoder.observe(ids_BT, counts_B, self.view, at_BJ, (*self.layers, self.decoder.config.layers))
        self.view.advance(counts_B)
        assert output.states_SBTC is not None
        *states, final_BTC = output.states_SBTC.float()
        states_BTX = torch.cat(states, -1)
        before_BTX = torch.cat((self.last_B1X, states_BTX[:, :-1]), 1)
        self.last_B1X = states_BTX[:, -1:]
        slots_BT = torch.arange(start, start + T).expand(B, T)
        embeddings_BTC = self.decoder.model.embed(ids_BT.flatten()).float().view(B, T, -1)
        return Chunk(ids_BT, slots_BT, before_BTX, embeddings_BTC, final_BTC, output.logits_BJV if logits else None)
