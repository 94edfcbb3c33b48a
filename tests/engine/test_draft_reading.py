"""A draft model reads the sinks and the last tokens of a text, in mode `auto` behind its first token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.controlled_batch import DEEP, replan_always
from tests.helpers.tiny_checkpoint import save, tiny_model
from tests.helpers.tiny_llm import MODES, ask, counted, ids
from triforce.engine.engine import OutputChunk
from triforce.interface.outputs import RequestOutput
from triforce.kvcache import PAGE
from triforce.llm import LLM
from triforce.planner import PlanController
from triforce.planner.forecast import Choice

CONTEXT = 2048
WINDOW = 16 + 496
"""Sinks and window of a draft."""
LONG = 1500


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Return a tiny pair with a context of four windows of the draft."""
    folder = tmp_path_factory.mktemp("pair")
    save(tiny_model(max_position_embeddings=CONTEXT), folder / "target")
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, head_dim=16)
    save(tiny_model(max_position_embeddings=CONTEXT, **sizes), folder / "draft")
    return LLM(folder / "target", folder / "draft", retrieval_budget=64, speculative_tokens=4, searched_layers="none")


@pytest.fixture
def drafting(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Return the pair, with a plan that wants the draft before the first token."""
    monkeypatch.setattr(PlanController, "choose", lambda *how: Choice(DEEP))
    replan_always(monkeypatch)
    llm.reset_prefix_cache()
    return llm


@pytest.fixture
def fed(llm: LLM) -> Iterator[list[int]]:
    """Yield the tokens of each pass of the draft."""
    assert llm.models.draft
    with counted(llm.models.draft) as widths:
        yield widths


def reading_seconds(output: RequestOutput) -> float:
    """Return the seconds in which the draft read texts; 0: it read none."""
    return next(tier.prefill_seconds for tier in output.tiers if tier.name == "draft")


def test_first_token_comes_before_draft_reads(drafting: LLM, fed: list[int]) -> None:
    chunks = drafting.stream(ids(LONG), ask(max_tokens=12), mode="auto")
    assert isinstance(next(chunks), OutputChunk) and not fed
    *_, output = chunks
    assert isinstance(output, RequestOutput) and "draft" in " ".join(output.outputs[0].plans)
    assert 0 < reading_seconds(output) < output.decode_seconds
    assert output.explain().draft_reading == reading_seconds(output)


@pytest.mark.parametrize("mode", ["auto", "draft", "triforce"])
def test_draft_reads_sinks_and_window_alone(drafting: LLM, fed: list[int], mode: str) -> None:
    for length in (100, WINDOW + 60, LONG):
        fed.clear()
        output = drafting.generate(ids(length), ask(max_tokens=12), mode=mode)[0]
        reading = [width for width in fed if width > 8]  # wider than the passes of drafting
        assert length - 1 - PAGE <= sum(reading) or sum(reading) >= WINDOW
        assert sum(reading) <= min(length + 12, WINDOW + PAGE)
        assert any(tier.proposed for tier in output.outputs[0].tiers if tier.name == "draft")


def test_plan_without_draft_reads_nothing(llm: LLM, fed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlanController, "choose", lambda *how: Choice())
    replan_always(monkeypatch)
    output = llm.generate(ids(LONG), ask(), mode="auto")[0]
    assert not fed and not reading_seconds(output) and not output.explain().draft_reading


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("length", [1, 70, WINDOW + 90, LONG])
def test_texts_equal_plain_decodings_in_all_modes(drafting: LLM, length: int, temperature: float) -> None:
    """The completions of a request copy its prompt, and each draft row reads for itself."""
    params = ask(temperature=temperature, n=2, max_tokens=90)
    expected, *outputs = (drafting.generate(ids(length), params, mode=mode)[0] for mode in MODES)
    for output in outputs:
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in expected.outputs], output.mode


def test_cached_second_turn_is_drafted(drafting: LLM, fed: list[int]) -> None:
    texts = []
    for mode in ("ar", "auto", "triforce"):
        drafting.reset_prefix_cache()
        conversation = ids(LONG)
        for question in ([], ids(60, seed=5)):
            fed.clear()
            conversation = [*conversation, *question]
            output = drafting.generate(conversation, ask(max_tokens=80), mode=mode)[0]
            conversation += output.outputs[0].token_ids
            assert sum(width for width in fed if width > 8) <= WINDOW + PAGE
            assert mode == "ar" or output.outputs[0].tiers[-1].passes < 80
        assert output.cached_tokens > LONG
        texts.append(conversation)
    assert texts[0] == texts[1] == texts[2]


def test_text_that_joins_gets_its_first_token_before_its_draft_reads(drafting: LLM) -> None:
    """Both texts are those of plain decoding, and both are drafted."""
    prompts = [ids(LONG), ids(WINDOW + 200, seed=3)]
    plain = [drafting.generate(prompt, ask(max_tokens=60), mode="ar")[0].outputs[0].token_ids for prompt in prompts]
    drafting.reset_prefix_cache()
    engine = drafting.open(2, 4096)
    requests = [drafting.request(prompt, ask(max_tokens=60), "auto") for prompt in prompts]
    engine.submit(requests[:1])
    outputs: dict[int, RequestOutput] = {}
    steps = 0
    while len(outputs) < 2:
        steps += 1
        if steps == 12:
            engine.submit(requests[1:])
        for request, event in engine.step():
            row = requests.index(request)
            if isinstance(event, RequestOutput):
                outputs[row] = event
            elif row == 1 and len(request.sequences[0].tokens) == 1:
                draft = engine.core.batches["auto"].controller.by_name["draft"]  # type: ignore[union-attr]
                assert draft.cache.lengths_B.tolist()[-1] == 0  # type: ignore[attr-defined]
    engine.close()
    for row, expected in enumerate(plain):
        assert outputs[row].outputs[0].token_ids == expected
        assert any(tier.proposed for tier in outputs[row].outputs[0].tiers if tier.name == "draft")
