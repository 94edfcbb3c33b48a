"""TargetStream: texts as the target reads them, chunk after chunk: hidden states and laws, none of which is stored.

Shape suffixes as in model/feature_draft.py; B rows, T tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    law_BTM: Tensor
    """Probability of each token that the draft can propose, to come next: the others have the rest."""
    best_BT: Tensor
    """The most probable token to come next."""
    logits_BTV: Tensor | None = None


class TargetStream:
    """Rows of texts of at most `capacity` tokens, new to the target. whole: chunks have all logits, too."""

    def __init__(
        self, decoder: Decoder, layers: tuple[int, ...], tokens_M: Tensor, rows: int, capacity: int, whole: bool = False
    ) -> None:
        self.decoder, self.layers, self.tokens_M, self.whole = decoder, layers, tokens_M, whole
        self.view = TierBuilder(ModelSet(decoder), SpeculativeConfig(), [capacity] * rows).full()
        size = len(layers) * decoder.config.hidden_size
        self.last_B1X = torch.zeros(rows, 1, size)

    def read(self, ids_BT: Tensor) -> Chunk:
        """Feed the next tokens of each row."""
        (B, T), start = ids_BT.shape, int(self.view.lengths_B[0])
        rows = [self._row(b, ids_BT[b : b + 1]) for b in range(B)]
        states_BTX, law_BTM, best_BT, logits_BTV = (torch.stack(part) for part in zip(*rows, strict=True))
        before_BTX = torch.cat((self.last_B1X, states_BTX[:, :-1]), 1)
        self.last_B1X = states_BTX[:, -1:]
        slots_BT = torch.arange(start, start + T).expand(B, T)
        embeddings_BTC = self.decoder.model.embed(ids_BT.flatten()).float().view(B, T, -1)
        return Chunk(ids_BT, slots_BT, before_BTX, embeddings_BTC, law_BTM, best_BT, logits_BTV if self.whole else None)

    def _row(self, b: int, ids_1T: Tensor) -> tuple[Tensor, ...]:
        """Feed one row: its logits alone may be larger than all else."""
        view, count_1 = self.view.row(b), ints([ids_1T.shape[1]])
        _, output = self.decoder.observe(ids_1T, count_1, view, None, self.layers)
        view.advance(count_1)
        (logits_TV,), states_S1TC = output.logits_BJV, output.states_SBTC
        assert states_S1TC is not None
        law_TM = (logits_TV[:, self.tokens_M] - logits_TV.logsumexp(-1, keepdim=True)).exp()
        states_TX = states_S1TC[:, 0].transpose(0, 1).flatten(1).float()
        return states_TX, law_TM, logits_TV.argmax(-1), logits_TV if self.whole else logits_TV[:0]
