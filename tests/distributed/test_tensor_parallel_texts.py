"""Ranks that share a model give the text of one process in every mode, and detect disagreement."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.mutants.registry import caught_in
from tests.helpers.thread_ranks import together
from tests.helpers.tiny_checkpoint import tiny_pair
from triforce.backends import dispatch
from triforce.distributed.group import ALONE, TPGroup
from triforce.errors import RankError, RequestError, TriforceError
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM
from triforce.planner import CostModel

PROMPTS = [[2 + (7 * i * i + step) % 290 for i in range(150)] for step in (0, 11)]
NATIVE = pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pair(tmp_path_factory.mktemp("pair"), 512)


def make_llm(pair: Path, ranks: TPGroup, **settings: Any) -> LLM:
    return LLM(pair / "target", pair / "draft", retrieval_budget=64, searched_layers="none", ranks=ranks, **settings)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.8, "seed": 5, "max_tokens": 24, "ignore_eos": True} | changes))


def same(outputs: list[RequestOutput], other_outputs: list[RequestOutput]) -> bool:
    pairs = zip(outputs, other_outputs, strict=True)
    return all([o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs] for a, b in pairs)


@NATIVE
@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("mode", ["ar", "triforce", "retrieval", "streaming", "draft-ngram"])
def test_sharded_texts_equal_one_process(pair: Path, mode: str, temperature: float) -> None:
    one_process = make_llm(pair, ALONE).generate(PROMPTS, params(temperature=temperature), mode=mode)
    for outputs in together(
        2, lambda ranks: make_llm(pair, ranks).generate(PROMPTS, params(temperature=temperature), mode=mode)
    ):
        assert same(outputs, one_process) and all(output.exactness == "bitwise" for output in outputs)


@NATIVE
@pytest.mark.parametrize(
    "changes",
    [{"coupling": "rejection"}, {"lower_tiers": "int8"}, {"dtype": "float32"}, {"kv_dtype": "int8"}],
    ids=str,
)
def test_sharded_settings_keep_texts(pair: Path, changes: dict[str, str]) -> None:
    """Noise depends on the seed alone and logits have the same bits, so `rejection` gives one text, too."""

    def texts(ranks: TPGroup) -> list[RequestOutput]:
        return make_llm(pair, ranks, **changes).generate(PROMPTS, params(n=2, logprobs=2), mode="triforce")

    one_process = texts(ALONE)
    for outputs in together(2, texts):
        assert same(outputs, one_process)
        assert outputs[1].outputs[1].logprobs == one_process[1].outputs[1].logprobs


@pytest.mark.parametrize("mode", ["ar", "triforce"])
def test_summed_shards_are_not_called_bitwise(pair: Path, mode: str) -> None:
    rank_outputs = together(2, lambda ranks: make_llm(pair, ranks).generate(PROMPTS, params(), mode=mode), exact=False)
    assert same(*rank_outputs) and all(
        output.exactness == "distribution" for outputs in rank_outputs for output in outputs
    )


def test_drawn_seed_is_one_for_all_ranks(pair: Path) -> None:
    first_outputs, second = together(2, lambda ranks: make_llm(pair, ranks).generate(PROMPTS[:1], params(seed=None)))
    assert same(first_outputs, second) and first_outputs[0].outputs[0].seed == second[0].outputs[0].seed


def llm_with_rank_costs(pair: Path, ranks: TPGroup) -> LLM:
    """Return a model with other costs by rank: the full tier is dear to rank 0 and cheap to the others."""
    llm = make_llm(pair, ranks)
    llm.reset_prefix_cache()
    llm.engines.parts = replace(llm.engines.parts, costs=CostModel())
    for step in range(40):
        for tier in ("full", "retrieval", "draft", "ngram"):
            llm.engines.parts.costs.passes.observe(
                tier, 1 + step % 7, 1, 150, 1.0 if (tier == "full") == (ranks.rank == 0) else 1e-3
            )
    return llm


def test_differing_clocks_keep_plans_equal(pair: Path) -> None:
    """A text's plan may or may not change, by the clock, so there are several texts."""
    changed = 0
    for _ in range(4):
        first_outputs, second = together(
            2, lambda ranks: llm_with_rank_costs(pair, ranks).generate(PROMPTS[0], params(), mode="auto")
        )
        assert same(first_outputs, second) and first_outputs[0].outputs[0].plans == second[0].outputs[0].plans
        changed += len(first_outputs[0].outputs[0].plans) > 1
    assert changed


def test_planner_mutant_is_noticed(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (mutant,) = caught_in("test_planner_mutant_is_noticed")
    mutant.apply(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, TriforceError)):
        together(2, lambda ranks: llm_with_rank_costs(pair, ranks).generate(PROMPTS[0], params(), mode="auto"))


@pytest.mark.parametrize("mode", ["ar", "triforce"])
def test_rank_drawing_other_tokens_is_detected(pair: Path, mode: str) -> None:
    def run(ranks: TPGroup) -> object:
        llm = make_llm(pair, ranks)
        head = llm.models.target.model.head
        if ranks.rank:
            llm.models.target.model.head = lambda x_NC: -head(x_NC)  # type: ignore[method-assign]
        return llm.generate(PROMPTS[0], params(temperature=0), mode=mode)

    with pytest.raises(RankError, match="the tokens differ"):
        together(2, run)


@pytest.mark.parametrize("changes", [{"seed": 6}, {"max_tokens": 25}])
def test_rank_with_other_request_is_detected(pair: Path, changes: dict[str, int]) -> None:
    def run(ranks: TPGroup) -> object:
        return make_llm(pair, ranks).generate(PROMPTS[0], params(**(changes if ranks.rank else {})))

    with pytest.raises(RankError, match="requests differ"):
        together(2, run)


def test_rank_with_other_settings_is_detected(pair: Path) -> None:
    with pytest.raises(RankError, match="settings"):
        together(2, lambda ranks: make_llm(pair, ranks, draft_tokens=2 + ranks.rank))


def test_single_process_eagle_head_raise(pair: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="saved KV cache needs a single process"):
        together(2, lambda ranks: make_llm(pair, ranks).generate(PROMPTS[0], params(), save_cache=tmp_path / "kv"))
