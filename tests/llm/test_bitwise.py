"""The law of the native kernels: a token's logits depend on the tokens before it alone, bit for bit.

They do not depend on the cut into passes (prefill, verification, decoding), nor on batch mates, padding or threads.
Shape suffixes: B rows, T tokens of a pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.helpers.slow_parameters import slow
from triforce.arrays import to_host
from triforce.backends import dispatch
from triforce.backends.decoder import Decoder
from triforce.backends.kernel_api import pages_for
from triforce.kvcache import FullView, PagePool
from triforce.llm import LLM
from triforce.ragged import ints

Logits = NDArray[np.float32]
LENGTH = 700
if dispatch.native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return LLM(None, None, dtype=request.param).target.decoder


@pytest.fixture(scope="module")
def ids(decoder: Decoder) -> list[int]:
    llm = LLM(None, None)
    text = (resources.files("triforce") / "assets" / "dracula.txt").read_text(encoding="utf-8")
    assert llm.tokenizer is not None
    return llm.tokenizer.encode(text[:8000])[:LENGTH]


@pytest.fixture(scope="module")
def expected_TV(decoder: Decoder, ids: list[int]) -> Logits:
    """Return logits (T, V) after each token, with all tokens fed one at a time."""
    return passes(decoder, [ids], [[1] * len(ids)])[0]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    previous_threads = dispatch.native.threads()
    yield
    dispatch.native.set_threads(previous_threads)


def passes(decoder: Decoder, texts: list[list[int]], widths: list[list[int]], padding: int = 0) -> list[Logits]:
    """Return logits (T, V) of texts that are fed together, row b in passes of `widths[b]` tokens."""
    pool = PagePool(decoder.config, len(texts), sum(pages_for(len(text)) for text in texts), decoder.dtype)
    for b, text in enumerate(texts):
        pool.reserve(b, len(text))
    full = FullView(pool)
    fed_tokens = [0] * len(texts)
    logits: list[list[Logits]] = [[] for _ in texts]
    for turn in range(max(map(len, widths))):
        counts = [row[turn] if turn < len(row) else 0 for row in widths]
        width = max(counts) + padding
        fed = [
            text[at : at + count] + [0] * (width - count)
            for text, at, count in zip(texts, fed_tokens, counts, strict=True)
        ]
        logits_BTV = to_host(decoder(np.array(fed), ints(counts), full))
        for b, count in enumerate(counts):
            logits[b].append(logits_BTV[b, :count])
            fed_tokens[b] += count
    return [np.concatenate(row) for row in logits]


def cut(length: int, chance: Random, widest: int) -> list[int]:
    """Return random widths that add up to `length`."""
    widths: list[int] = []
    while (remaining := length - sum(widths)) > 0:
        widths.append(min(remaining, chance.choice([1, 2, 7, 8, 9, 15, 16, 17, chance.randint(1, widest)])))
    return widths


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3)])
def test_logits_of_any_passes_are_bitwise_equal(
    decoder: Decoder, ids: list[int], expected_TV: Logits, seed: int, count: int
) -> None:
    dispatch.native.set_threads(count)
    widths = cut(len(ids), Random(seed), widest=[16, 64, 200, 512][seed])
    (got_TV,) = passes(decoder, [ids], [widths], padding=seed)
    assert np.array_equal(got_TV, expected_TV)


def test_logits_of_one_prefill_are_bitwise_equal(decoder: Decoder, ids: list[int], expected_TV: Logits) -> None:
    assert np.array_equal(passes(decoder, [ids], [[len(ids)]])[0], expected_TV)


@pytest.mark.parametrize("seed", [0, *slow(1)])
def test_logits_of_ragged_batches_are_bitwise_equal(
    decoder: Decoder, ids: list[int], expected_TV: Logits, seed: int
) -> None:
    chance = Random(seed)
    texts = [ids[: chance.randint(1, len(ids))] for _ in range(8)]
    together = passes(decoder, texts, [cut(len(text), chance, 90) for text in texts], padding=seed)
    for text, got_TV in zip(texts, together, strict=True):
        assert np.array_equal(got_TV, expected_TV[: len(text)])


def test_logits_after_other_tokens_differ(decoder: Decoder, ids: list[int], expected_TV: Logits) -> None:
    (other_TV,) = passes(decoder, [[ids[0] ^ 1, *ids[1:]]], [[len(ids)]])
    assert not np.array_equal(other_TV[-1], expected_TV[-1])


@pytest.mark.slow
def test_logits_of_torch_path_are_not_bitwise_equal(ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: products whose split depends on the width have other bits."""
    monkeypatch.setattr(dispatch, "native", None)
    plain = LLM(None, None, dtype="bfloat16").target.decoder
    one_by_one, at_once = (passes(plain, [ids], [widths])[0] for widths in ([1] * len(ids), [len(ids)]))
    assert not np.array_equal(one_by_one, at_once)
    np.testing.assert_allclose(one_by_one, at_once, atol=0.5, rtol=0.1)
