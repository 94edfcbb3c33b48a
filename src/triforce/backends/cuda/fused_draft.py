"""Several tokens of a draft in one graph: each pass, its sampling, and what the next pass reads, without the host.

A captured draft bakes nothing in that changes from draft to draft: texts, lengths, counts of random draws and the laws'
settings lie in buffers, which are filled before it is replayed. It only reads them, as it is called once before it is
captured. What a step works out for the next one is the graph's own memory. Tokens, laws and noise are bit for bit those
of passes and draws one by one.

Shape suffixes as in kernel_api.py; K tokens of the draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from triforce.backends.cuda.graphs import GraphInputs, PassInputs, PassShape, Replay, shape_of
from triforce.backends.cuda.kv import TritonKV
from triforce.backends.cuda.model import TritonModel, run_pass
from triforce.backends.cuda.sampler import DraftDraws
from triforce.backends.cuda.triton.draft_step import go_on
from triforce.backends.cuda.triton.rng import uniforms
from triforce.backends.cuda.triton.sampler import SamplerInputs, by_race, by_rejection
from triforce.backends.current_device import current
from triforce.backends.kernel_api import ForwardBatch, KVBackend, ModelBackend
from triforce.backends.torch.kv import WIDE
from triforce.ragged import Bools, Ints, columns, ints, rows
from triforce.sampling.logits import check


class DraftShape(NamedTuple):
    """All that a draft's launches depend on. tier: of the noise, where draws are not by a race."""

    first: PassShape
    tokens: int
    race: bool
    tier: int


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """Tokens and the bits of their columns' peaks, int64 (2, K, B); each token's law (B, 1, V), unless by a race."""

    drawn_2KB: Tensor
    laws: list[Tensor]


class DraftInputs:
    """Buffers of one shape: of the first pass, and of the sampler for all tokens."""

    def __init__(self, shape: DraftShape, device: torch.device) -> None:
        B = shape.first.rows
        self.shape, self.first = shape, GraphInputs(shape.first, device, more=2)
        self.zeros_B1 = torch.zeros(B, 1, dtype=torch.int64, device=device)
        self.settings_5B = torch.ones(5, B, dtype=torch.float64, device=device)
        self.seeds_B, self.choices_B, self.draws_B = (
            torch.zeros(B, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._held: Tensor | None = None

    def fill(self, batch: ForwardBatch, texts: tuple[Ints, Ints, Bools], draws: DraftDraws) -> None:
        """Take over the texts of a draft, whose shape fits, and its sampler, unless that is the one of before."""
        (ids_BS, lengths_B, live_B), B = texts, self.shape.first.rows
        ids_BT, at_BJ = _unseen(ids_BS, batch)
        places_2B = np.full((2, B), -1)
        places_2B[0, : len(live_B)], places_2B[1, : len(live_B)] = lengths_B, np.where(live_B, 0, -1)
        self.first.fill(ids_BT, at_BJ, batch, places_2B)
        real = slice(len(live_B))
        if draws.settings_5B is not self._held:
            self._held = draws.settings_5B
            self.settings_5B[:, real], self.seeds_B[real] = draws.settings_5B, draws.seeds_B
            self.choices_B[real] = draws.choices_B
        if draws.before_B is not None:
            self.draws_B[real] = draws.before_B


def of(model: ModelBackend, kv: KVBackend, width: int) -> Callable[..., Tensor] | None:
    """Return `fused_draft` of these two, if a first pass of so many tokens a row is one that is captured."""
    if width <= WIDE and isinstance(model, TritonModel) and isinstance(kv, TritonKV):
        return partial(fused_draft, model, kv)
    return None


def fused_draft(
    model: TritonModel, kv: TritonKV, batch: ForwardBatch, texts: tuple[Ints, Ints, Bools], draws: DraftDraws,
    tokens_BK: Ints,
) -> Tensor:  # fmt: skip
    """K tokens behind each text, written to `tokens_BK`; returns the law of each, float64 (B, K, V), V = 0 by a race.

    batch: the first pass, from which the others go on, its counts those of all. texts: ids (B, S), lengths, and which
    rows are live. The host waits once. Raises ModelError where logits are not finite.
    """
    (B, K), (_, lengths_B, live_B) = tokens_BK.shape, texts
    counts_B = (lengths_B - np.array(batch.positions)) * live_B
    (layers, lists), T = batch.views[0], int(counts_B.max())
    batch = replace(batch, views=[(layers, replace(lists, counts=counts_B.tolist()))])
    kv.prepare(batch, T + K - 1)
    shape = DraftShape(shape_of(B, T, 1, batch, padded=True), K, draws.before_B is None, draws.tier)
    with current(kv.device):
        graphs = model.graphs(kv)
        captured: Replay[DraftInputs, DrawnTokens] = graphs.get(shape, lambda: Replay(DraftInputs(shape, kv.device)))
        captured.inputs.fill(batch, texts, draws)
        output = graphs.run(captured, partial(run_draft, model, kv, captured.inputs))
        laws_BKV = torch.cat(output.laws, 1)[:B] if output.laws else torch.empty(B, K, 0, dtype=torch.float64)
        drawn_2KB = output.drawn_2KB.cpu()  # here the host waits
    tokens_KB, peaks_KB = drawn_2KB[:, :, :B]
    for peaks_B in peaks_KB.view(torch.float64):  # the first that is not finite: what follows it means nothing
        check(peaks_B[:, None])
    tokens_BK[:] = tokens_KB.T.numpy()
    return laws_BKV


def run_draft(model: TritonModel, kv: TritonKV, inputs: DraftInputs) -> DrawnTokens:
    """A function of what lies in the inputs."""
    shape, places_2B, laws = inputs.shape, inputs.first.more_XB, list[Tensor]()
    this: PassInputs = inputs.first
    drawn_2KB = places_2B.new_empty(2, shape.tokens, shape.first.rows)
    uniforms_KB: Tensor | None = None
    if not shape.race:
        each_BK = uniforms(inputs.seeds_B, inputs.choices_B, inputs.draws_B, shape.tier, shape.tokens)
        uniforms_KB = each_BK.T.contiguous()
    for step in range(shape.tokens):
        logits_B1V = run_pass(model, kv, this).logits_BJV
        asked = SamplerInputs(logits_B1V, inputs.settings_5B, places_2B)
        if uniforms_KB is None:
            decided_2B1 = by_race(asked, inputs.seeds_B, inputs.choices_B)
        else:
            nothing_B0V = torch.empty_like(logits_B1V[:, :0], dtype=torch.float64)
            decided_2B1, law_B1V = by_rejection(asked, inputs.zeros_B1[:, :0], nothing_B0V, uniforms_KB[step][:, None])
            laws.append(law_B1V)
        after_XB = go_on(decided_2B1, this, places_2B, drawn_2KB, step)
        this, places_2B = _following(this, after_XB, inputs.zeros_B1), after_XB[4:]
    return DrawnTokens(drawn_2KB, laws)


def _following(this: PassInputs, after_XB: Tensor, zeros_B1: Tensor) -> PassInputs:
    """Return the pass of one token a row behind this one."""
    tokens_B, positions_B, counts_B, starts_B, *_ = after_XB
    shape = replace(this.shape, width=1, columns=1)
    return PassInputs(shape, tokens_B[:, None], zeros_B1, positions_B, counts_B, [starts_B], this.units)


def _unseen(ids_BS: Ints, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    """Return ids (B, T) of the tokens that the first pass feeds, and the column (B, 1) of each row's last one."""
    positions_B, counts_B = (ints(each) for each in (batch.positions, batch.views[0][1].counts))
    at_BT = np.minimum(columns(positions_B, int(counts_B.max())), ids_BS.shape[1] - 1)
    ids_BT, at_BJ = ids_BS[rows(len(at_BT)), at_BT], np.maximum(counts_B - 1, 0)[:, None]
    return torch.from_numpy(ids_BT), torch.from_numpy(at_BJ)
