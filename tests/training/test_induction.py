"""A new draft expects behind a token what stood behind it before, without any training.

Shape suffixes as in training/initial_weights.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers import tiny_training
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from tests.helpers.tiny_training import trainer
from triforce.backends.torch.tensors import as_tensor
from triforce.eagle.head import EagleHeadWeights, shapes
from triforce.eagle.head_files import new_config
from triforce.eagle.torch_passes import EagleHeadLayer
from triforce.model.config import ModelConfig
from triforce.model.rope import Rope
from triforce.training import initial_weights
from triforce.training.distillation import OutputHead, PastEntries, draft_outputs
from triforce.training.episodes import Chunk
from triforce.training.initial_weights import Sample

torch.set_num_threads(1)
C, M, LENGTH = 128, 300, 60
SHAPES = {
    "grouped queries": {"heads": 4, "kv_heads": 2, "head_dim": 32},
    "a KV head each": {"heads": 4, "kv_heads": 4, "head_dim": 32},
    "more channels of heads than of states": {"heads": 4, "kv_heads": 2, "head_dim": 64},
}


class Texts:
    """Tokens at random, whose earliest state is their embedding with noise, and whose latest one is in a subspace."""

    def __init__(self, *, tied: bool) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.embeddings_MC = self._random(M, C)
        self.head_MC = self.embeddings_MC if tied else self._random(M, C)
        self.late_RC = self._random(C // 4, C)

    def sample(self) -> Sample:
        ids_N = torch.randint(M, (2000,), generator=self.generator)
        return Sample(self._states(ids_N), self.embeddings_MC[ids_N], self.embeddings_MC, self.head_MC)

    def twice(self) -> Chunk:
        once_BT = torch.stack([torch.randperm(M, generator=self.generator)[:LENGTH] for _ in range(4)])
        ids_BT, nothing = torch.cat((once_BT, once_BT), 1), torch.zeros(0)
        states_BTX = self._states(ids_BT)
        before_BTX = torch.cat((torch.zeros_like(states_BTX[:, :1]), states_BTX[:, :-1]), 1)
        slots_BT = torch.arange(ids_BT.shape[1]).expand_as(ids_BT)
        return Chunk(ids_BT, slots_BT, before_BTX, self.embeddings_MC[ids_BT], nothing)

    def _states(self, ids: Tensor) -> Tensor:
        early = self.embeddings_MC[ids] + 0.3 * self._random(*ids.shape, C)
        return torch.cat((early, self._random(*ids.shape, len(self.late_RC)) @ self.late_RC), -1)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)


def new_draft(texts: Texts, sizes: dict[str, int]) -> EagleHeadLayer:
    """A draft that but for its attention repeats its latest state."""
    rope = Rope(np.ones(sizes["head_dim"] // 2, np.float32), 1.0)
    config = new_config(ModelConfig(M, C, 96, 3, norm_eps=1e-5, tied=True, context=512, rope=rope, **sizes), M)
    named = {
        name: torch.ones(shape) if "norm" in name else torch.zeros(shape) for name, shape in shapes(config).items()
    }
    named["fc_CX"][:, -C:] = torch.eye(C)
    initial_weights.add_induction(named, config, texts.sample(), 1)
    return EagleHeadLayer(config, EagleHeadWeights(**named, tokens_M=torch.arange(M)))


def check_copies(*, tied: bool, sizes: dict[str, int]) -> None:
    texts = Texts(tied=tied)
    layer, chunk = new_draft(texts, sizes), texts.twice()
    head, at_N = OutputHead(torch.ones(C), 1e-5, texts.head_MC), torch.arange(chunk.ids_BT.shape[1])
    with_BTM = head.logits(next(draft_outputs(layer, chunk, PastEntries(), at_N, 1))[0])
    layer.weights.o_proj_CQ.zero_()
    gains_BTM = with_BTM - head.logits(next(draft_outputs(layer, chunk, PastEntries(), at_N, 1))[0])
    right_BT = (gains_BTM.argmax(-1)[:, :-1] == chunk.ids_BT[:, 1:]).float()
    shares = right_BT[:, LENGTH:].mean(), right_BT[:, : LENGTH - 1].mean()
    assert shares[0] > 0.7 > 0.1 > shares[1], shares


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("sizes", SHAPES)
def test_attention_of_a_new_draft_copies(sizes: str, tied: bool) -> None:
    check_copies(tied=tied, sizes=SHAPES[sizes])


def test_training_begins_with_induction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On states of tokens, and the embeddings of the same."""
    seen: list[Sample] = []

    def spy(weights: Any, config: Any, sample: Sample, seed: int) -> None:
        seen.append(sample)

    monkeypatch.setattr("triforce.training.trainer.add_induction", spy)
    made = trainer(tiny_training.target_folder(tmp_path / "target"), tmp_path / "draft")
    (sample,) = seen
    assert torch.equal(sample.choices_MC, as_tensor(made.decoder.model.embed(made.weights.tokens_M.numpy())).float())
    # What a layer adds is small beside what it is added to: so a state is most like the embedding of its own token.
    states_NC = sample.states_NX[:, : made.draft.hidden_size]
    own, other = (torch.cosine_similarity(states_NC, sample.embeddings_NC.roll(by, 0)).mean() for by in (0, 1))
    assert own > other + 0.1, (own, other)


@pytest.mark.parametrize("mutant", caught_in("test_induction_mutant_is_noticed"), ids=str)
def test_induction_mutant_is_noticed(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises(AssertionError):
        test_attention_of_a_new_draft_copies("grouped queries", tied=False)
        test_training_begins_with_induction(tmp_path, monkeypatch)
