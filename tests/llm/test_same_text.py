"""The promise: greedy and `seeded` texts are those of plain decoding, token for token, whatever the mode and the batch.

With the native kernels no difference is allowed. On the torch path a first difference counts as a tie if the scores of
the two picks, noise included, differ by less than 1e-4; ties are printed, and at most one text in twenty may have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

import numpy as np
import pytest

from tests.helpers.extras import needs_torch
from triforce.arrays import to_host
from triforce.backends import dispatch
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_batch import SequenceBatch
from triforce.engine.sequence_group import prefill_batch
from triforce.engine.tier_builder import MODES, SpeculativeConfig, ar
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM

TIE = 1e-4
LENGTHS = [17 + 29 * i for i in range(50)]
TEMPERATURES = [0.0, 0.8]
SEED = 11


@pytest.fixture(scope="module")
def llm() -> LLM:
    """Return the shipped pair, with a budget that most of the prompts exceed."""
    return LLM(retrieval_budget=256)


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    text = (resources.files("triforce") / "assets" / "dracula.txt").read_text(encoding="utf-8")
    ids = llm.tokenizer.encode(text[:200_000]) if llm.tokenizer else []
    starts = np.linspace(0, len(ids) - LENGTHS[-1] - 1, len(LENGTHS)).astype(int).tolist()
    return [ids[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]


def texts(llm: LLM, prompts: list[list[int]], mode: str, params: SamplingParams, rows: int) -> list[list[int]]:
    """Return new tokens of each prompt, decoded in batches of `rows`."""
    batches = [prompts[i : i + rows] for i in range(0, len(prompts), rows)]
    return [output.outputs[0].token_ids for batch in batches for output in llm.generate(batch, params, mode=mode)]


def margin(llm: LLM, text: list[int], params: SamplingParams, tokens: Sequence[int], prompt_length: int) -> float:
    """Return the distance of plain decoding's scores of two tokens after `text`: log-probability plus Gumbel noise."""
    sequence = TokenSequence(text, params, params.seed or 0)
    batch = SequenceBatch(llm.models, ar, SpeculativeConfig(), "seeded", [sequence])
    batch.top.keeps_logits = True
    for _ in prefill_batch(batch):
        pass
    batch.step()
    assert batch.top.logits_BJV is not None
    scores = to_host(batch.top.logits_BJV)[0, 0, list(tokens)].astype(np.float64)
    if params.temperature:
        from triforce.backends.torch.noise import Noise

        race = Noise([sequence.seed], [0]).exponentials(np.array([[len(text)]]), llm.target.config.vocab_size)[0, 0]
        scores = scores / params.temperature - np.log(race.numpy()[list(tokens)])
    return float(abs(scores[0] - scores[1]))


def ties(
    llm: LLM, prompts: list[list[int]], plain: list[list[int]], compared: list[list[int]], params: SamplingParams
) -> int:
    """Return how many texts differ by a tie. Fail on any other difference."""
    count = 0
    for prompt, a, b in zip(prompts, plain, compared, strict=True):
        if a == b:
            continue
        at = next(i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1])
        score_gap = margin(llm, prompt + a[:at], params, (a[at], b[at]), len(prompt))
        print(f"prompt of {len(prompt)} tokens: token {at} differs, {a[at]} or {b[at]}, scores {score_gap:.1e} apart")
        assert score_gap < TIE
        count += 1
    return count


PLAIN: dict[tuple[float, int, int], list[list[int]]] = {}
"""Plain decoding of the prompts by temperature, number and tokens: run once, for the comparison of all modes."""


def check(llm: LLM, prompts: list[list[int]], mode: str, temperature: float, tokens: int, rows: int) -> None:
    params = SamplingParams(temperature=temperature, seed=SEED, max_tokens=tokens, ignore_eos=True)
    case = (temperature, len(prompts), tokens)
    if case not in PLAIN:
        PLAIN[case] = texts(llm, prompts, "ar", params, 1)
    plain = PLAIN[case]
    assert all(len(text) == tokens for text in plain)
    allowed = 0 if llm.target.decoder.model.width_independent else max(1, len(prompts) // 20)
    assert ties(llm, prompts, plain, texts(llm, prompts, mode, params, rows), params) <= allowed


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("mode", MODES)
def test_few_texts_equal_plain_decoding(llm: LLM, prompts: list[list[int]], mode: str, temperature: float) -> None:
    check(llm, [prompts[4], prompts[17], prompts[31]], mode, temperature, tokens=32, rows=3)


@pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built")
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("mode", ["retrieval", "triforce"])
def test_few_int8_texts_equal_plain_decoding(prompts: list[list[int]], mode: str, temperature: float) -> None:
    check(
        LLM(retrieval_budget=256, lower_tiers="int8"), [prompts[17], prompts[31]], mode, temperature, tokens=32, rows=2
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(
    ("mode", "rows"), [(mode, rows) for mode in MODES for rows in (1, 8)][1:]
)  # ar is not compared with itself
def test_many_texts_equal_plain_decoding(
    llm: LLM, prompts: list[list[int]], mode: str, temperature: float, rows: int
) -> None:
    check(llm, prompts, mode, temperature, tokens=512, rows=rows)


@needs_torch
def test_differing_texts_are_detected(llm: LLM, prompts: list[list[int]]) -> None:
    """Negative control: another seed, and a changed token, are not ties."""
    params = SamplingParams(temperature=0.8, seed=SEED, max_tokens=8, ignore_eos=True)
    plain = texts(llm, prompts[:2], "ar", params, 1)
    spoilt = [[*text[:3], text[3] ^ 1, *text[4:]] for text in plain]
    with pytest.raises(AssertionError):
        ties(llm, prompts[:2], plain, spoilt, params)
