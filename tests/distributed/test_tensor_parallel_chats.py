"""An answer that is ended early ends on all ranks at once, and their sessions stay consistent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.thread_ranks import together
from tests.helpers.tiny_checkpoint import tiny_pair
from triforce.backends import dispatch
from triforce.cli.chat.dialogue import answer
from triforce.distributed.group import ALONE, TPGroup
from triforce.engine.engine import OutputChunk
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM
from triforce.session import Session

PROMPT = [2 + (7 * i * i) % 290 for i in range(150)]
MORE = [2 + (5 * i) % 290 for i in range(9)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pair(tmp_path_factory.mktemp("pair"), 512)


def make_llm(pair: Path, ranks: TPGroup) -> LLM:
    return LLM(
        pair / "target", pair / "draft", retrieval_budget=64, searched_layers="none", ranks=ranks, mode="triforce"
    )


@pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built")
@pytest.mark.parametrize("ending_piece", [0, 1, 3])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_ended_answer_ends_on_all_ranks(pair: Path, ending_piece: int, temperature: float) -> None:
    """At `ending_piece` 0 the answer ends while the prompt is read. Only rank 0 decides the end."""
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=24, ignore_eos=True)

    def run_dialogue(ranks: TPGroup) -> tuple[list[int], list[int]]:
        session = Session(make_llm(pair, ranks))
        answer_ids = list[int]()
        pieces = 0

        def ended() -> bool:
            return ranks.rank == 0 and pieces >= ending_piece

        for piece in answer(session, PROMPT, params, ended):
            assert isinstance(piece, OutputChunk)
            pieces += 1
            answer_ids += piece.token_ids
        *_, output = answer(session, PROMPT + answer_ids + MORE, params, lambda: False)
        assert isinstance(output, RequestOutput)
        return answer_ids, output.outputs[0].token_ids

    (ended_ids, again), *other_ranks = together(2, run_dialogue)
    assert other_ranks == [(ended_ids, again)] and bool(ended_ids) == bool(ending_piece) and len(ended_ids) < 24
    (plain_output,) = make_llm(pair, ALONE).generate(PROMPT + ended_ids + MORE, params, mode="ar")
    assert plain_output.outputs[0].token_ids == again
