"""A sharded model over NCCL, in captured passes, with one rank, as few machines have two GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.cuda.prompts import ids
from tests.helpers.tiny_checkpoint import save, tiny_model
from triforce.backends.cuda import graphs
from triforce.backends.decoder import Decoder
from triforce.backends.tensor_parallel import ShardedModel
from triforce.distributed.nccl_group import NcclGroup
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL is between GPUs")


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[NcclGroup]:
    ranks = NcclGroup(0, 1, (tmp_path / "meeting").as_uri())
    yield ranks
    graphs.clear_graphs()
    ranks.leave()


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("mode", ["ar", "retrieval"])
def test_nccl_text_equals_unsharded_model(tmp_path: Path, ranks: NcclGroup, mode: str, exact: bool) -> None:
    llm = LLM(
        save(tiny_model(vocab_size=40), tmp_path / "tiny"), dtype="float32", retrieval_budget=32, searched_layers="none"
    )
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
    texts, ranks.exact = [llm.generate([ids(90)], params, mode=mode)], exact
    decoder: Decoder = llm.target.decoder
    unsharded_model: Any = decoder.model
    decoder.model = ShardedModel(decoder.config, unsharded_model, ranks, decoder.dtype, unsharded_model.run)
    texts.append(llm.generate([ids(90)], params, mode=mode))
    assert texts[0][0].outputs[0].token_ids == texts[1][0].outputs[0].token_ids
