"""The logits processor against a slow reference in plain Python, for one row and one column."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from triforce.backends.torch import logits_processor
from triforce.backends.torch.logits_processor import LogitsProcessor
from triforce.errors import ModelError, RequestError
from triforce.interface.sampling_params import SamplingParams

NOTHING = torch.zeros(1, 0, dtype=torch.int64)


def reference(logits: list[float], history: list[int], prompt: int, params: SamplingParams) -> list[float]:
    """Return the probabilities of the token after `history`, whose first `prompt` tokens are the prompt."""
    output = Counter(history[prompt:])
    x = list(logits)
    for token in set(history):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token, count in output.items():
        x[token] -= params.presence_penalty + count * params.frequency_penalty
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    best_first = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if params.temperature == 0:
        return [float(token == best_first[0]) for token in range(len(x))]
    peak = x[best_first[0]]
    weights = [math.exp((score - peak) / params.temperature) for score in x]
    kept_tokens = [token for token in best_first if weights[token] >= params.min_p]
    kept_tokens = kept_tokens[: params.top_k or None]
    if params.top_p < 1:
        total = sum(weights[token] for token in kept_tokens)
        mass_before = np.cumsum([0.0] + [weights[token] / total for token in kept_tokens[:-1]])
        kept_tokens = [token for token, mass in zip(kept_tokens, mass_before, strict=True) if mass < params.top_p]
    total = math.fsum(weights[token] for token in kept_tokens)
    return [weights[token] / total if token in kept_tokens else 0.0 for token in range(len(x))]


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 7, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.37, 1e-9]),
    min_p=st.sampled_from([0.0, 0.11, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.31, -0.2]),
    logit_bias=st.sampled_from([None, {2: 1.7, 5: -50.0}]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_warper_equals_reference(params: list[SamplingParams], columns: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = len(params)
    vocab_size = 11
    capacity = 16
    logits = torch.from_numpy(rng.normal(size=(rows, columns, vocab_size)).astype(np.float32)) * 3
    lengths = rng.integers(0, capacity - columns + 2, rows)
    prompts = [int(rng.integers(0, length + 1)) for length in lengths]
    ids = rng.integers(0, vocab_size, (rows, capacity))
    original_logits = logits.clone()
    probs = LogitsProcessor(params, prompts, vocab_size)(logits, torch.from_numpy(ids), torch.from_numpy(lengths))
    assert probs.dtype == torch.float64 and torch.equal(logits, original_logits)
    for b, (row, length) in enumerate(zip(params, lengths, strict=True)):
        for j in range(columns):
            expected = reference(logits[b, j].tolist(), ids[b, : length + j].tolist(), prompts[b], row)
            np.testing.assert_allclose(probs[b, j].numpy(), expected, rtol=1e-11, atol=1e-14)


def probabilities(logits: list[float] | Tensor, **params: object) -> list[float]:
    """Return the probabilities of one row and one column, without history."""
    x = torch.as_tensor(logits)
    processor = LogitsProcessor([SamplingParams(**params)], [0], len(x))  # type: ignore[arg-type]
    probs: list[float] = processor(x[None, None], NOTHING, torch.zeros(1, dtype=torch.int64))[0, 0].tolist()
    return probs


EQUAL = [1.0, 2.0, 2.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("params", "kept_tokens"),
    [
        ({"temperature": 0}, [1]),
        ({"top_k": 2}, [1, 2]),
        ({"top_p": 0.5}, [1, 2]),
        ({"top_p": 1e-300}, [1]),
        ({"min_p": 1.0}, [1, 2, 3]),
        ({"min_p": 1.0, "top_k": 1, "top_p": 1e-9}, [1]),
        ({"temperature": 5e-324}, [1, 2, 3]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_p": 1 - 2**-53}, [0, 1, 2, 3, 4]),
        ({"temperature": 0, "logit_bias": {4: 2.0}}, [1]),
        ({"temperature": 0, "logit_bias": {0: 1.0}}, [0]),
    ],
)
def test_warper_ties_keep_lowest_ids(params: dict[str, object], kept_tokens: list[int]) -> None:
    probs = probabilities(EQUAL, **params)
    assert [token for token, p in enumerate(probs) if p > 0] == kept_tokens
    assert sum(probs) == pytest.approx(1, abs=1e-15)


def test_warper_greedy_separates_equal_probabilities() -> None:
    logits = torch.tensor([[[1e-30, 2e-30, 0.0]]]).repeat(2, 1, 1)
    params = [SamplingParams(temperature=0), SamplingParams()]
    probs = LogitsProcessor(params, [0, 0], 3)(logits, NOTHING.repeat(2, 1), torch.zeros(2, dtype=torch.int64))
    assert probs[0, 0].tolist() == [0, 1, 0]


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.1}, {"temperature": 0}, {"top_k": 4}])
def test_warper_impossible_tokens_stay_impossible(params: dict[str, object]) -> None:
    probs = probabilities([-math.inf, 1.0, -math.inf, 0.5, -math.inf], **params)
    assert probs[0] == probs[2] == probs[4] == 0 and sum(probs) == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize("temperature", [1e-300, 1e-3, 1e3, 1e300])
def test_warper_extreme_scores_sum_to_one(temperature: float) -> None:
    assert sum(probabilities([3e38, -3e38, 0.0, 2.9e38], temperature=temperature, top_p=0.9)) == pytest.approx(
        1, abs=1e-15
    )


@pytest.mark.parametrize(
    ("bad", "fault"), [([0.0, math.nan], "NaN"), ([math.inf, 0.0], "inf"), ([-math.inf] * 2, "all -inf")]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_warper_bad_logits_raise(bad: list[float], fault: str, temperature: float) -> None:
    logits = torch.tensor([[[0.0, 1.0]] * 2, [[0.0, 1.0], bad]])
    processor = LogitsProcessor([SamplingParams(temperature=temperature)] * 2, [0, 0], 2)
    with pytest.raises(ModelError, match=f"{fault}.*row 1, column 1"):
        processor(logits, NOTHING.repeat(2, 1), torch.zeros(2, dtype=torch.int64))


def test_warper_bias_outside_vocabulary_raises() -> None:
    with pytest.raises(RequestError, match=r"token 8, but the vocabulary ends at 7"):
        LogitsProcessor([SamplingParams(logit_bias={8: 1.0})], [0], 8)


def test_warper_ignores_text_beyond_column() -> None:
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5)
    ids, logits = torch.tensor([[3, 1, 2, 2, 0, 0, 0]]), torch.linspace(-1, 1, 5).expand(1, 3, 5)
    scratch = ids.clone()
    scratch[:, 4:] = torch.tensor([-1, 10**9, -(10**9)])
    results = [LogitsProcessor([params], [2], 5)(logits, text, torch.tensor([2])) for text in (ids, scratch)]
    assert torch.equal(*results)


@pytest.mark.parametrize("vocab_size", [300, 5000, 40_001])
def test_warper_bits_independent_of_batch(vocab_size: int) -> None:
    rows = [
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(top_k=40, top_p=0.8),
        SamplingParams(temperature=0),
        SamplingParams(temperature=5.0, top_p=0.95),  # a nucleus beyond the first tokens by rank
        SamplingParams(top_k=100, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={1: 3.0}),
        SamplingParams(min_p=0.02),
    ]
    torch.manual_seed(0)
    logits = torch.randn(len(rows), 3, vocab_size) * 4
    ids = torch.randint(vocab_size, (len(rows), 20))
    lengths = torch.arange(5, 5 + len(rows))
    prompts = [4] * len(rows)
    together = LogitsProcessor(rows, prompts, vocab_size)(logits, ids, lengths)
    for b, row in enumerate(rows):
        for j in range(3):
            row_processor = LogitsProcessor([row], [4], vocab_size)
            row_probs = row_processor(logits[b : b + 1, j : j + 1], ids[b : b + 1], lengths[b : b + 1] + j)
            assert torch.equal(row_probs[0, 0], together[b, j])


def test_warper_short_head_equals_full_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    logits = (torch.randn(4000) * 3).round(decimals=1)  # many equal scores
    short = probabilities(logits, top_p=0.9)
    monkeypatch.setattr(logits_processor, "_HEAD", 10**9)
    assert probabilities(logits, top_p=0.9) == short and 1 < sum(p > 0 for p in short) < 1024


@pytest.mark.parametrize("name", ["sort", "topk", "softmax", "cumsum", "scatter_add_"])
def test_warper_computes_only_what_rows_use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_token(*_: object, **__: object) -> Tensor:
        raise AssertionError(f"{name} was called")

    params = [SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.1)] * 2
    processor = LogitsProcessor(params, [0, 0], 8)
    monkeypatch.setattr(torch.Tensor, name, without_token)
    probs = processor(torch.arange(16.0).view(2, 1, 8), NOTHING.repeat(2, 1), torch.zeros(2, dtype=torch.int64))
    assert probs[:, 0, 7].tolist() == [1, 1]
