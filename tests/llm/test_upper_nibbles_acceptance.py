"""The tier below the full one over int8 KV, on a real text: the codes that it reads, and its acceptance.

Shape suffixes: T tokens of a pass, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.helpers.upper_nibbles import HALF, from_upper
from triforce.backends import dispatch
from triforce.backends.kernel_api import ForwardBatch, pages_for
from triforce.kvcache import FullView, PagePool
from triforce.llm import LLM
from triforce.ragged import Ints, ints

if dispatch.native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
KNOWN = 1024
NEW = 64
Probabilities = NDArray[np.float32]
Scene = tuple[Any, FullView, Ints]
"""A decoder, the view of a text's beginning, and its next ids (1, T)."""


class Lower(FullView):
    """A view of all committed KV, as lower tiers read it."""

    def begin(self, counts_B: Ints, width: int) -> ForwardBatch:
        batch = super().begin(counts_B, width)
        return replace(batch, views=[(n, replace(lists, low_precision_ends=lists.starts)) for n, lists in batch.views])


@pytest.fixture(scope="module")
def scene() -> Scene:
    llm = LLM(None, None, dtype="bfloat16", kv_dtype="int8")
    assert llm.tokenizer is not None
    text = (resources.files("triforce") / "assets" / "dracula.txt").read_text(encoding="utf-8")
    ids_1N = np.array([llm.tokenizer.encode(text[:8000])[: KNOWN + NEW]])
    decoder = llm.target.decoder
    pool = PagePool(decoder.config, 1, pages_for(KNOWN + NEW), decoder.dtype, int8=True)
    pool.reserve(0, KNOWN + NEW)
    view = FullView(pool, grain=0)
    decoder(ids_1N[:, :KNOWN], ints([KNOWN]), view)
    return decoder, view, ids_1N[:, KNOWN:]


def probabilities(scene: Scene, view: type[FullView] = FullView) -> Probabilities:
    """Return next-token probabilities (T, V) after each of the next ids."""
    decoder, full, next_1T = scene
    logits_1TV = decoder(next_1T, ints([NEW]), view(full.pool, grain=0))
    full.rewind(ints([KNOWN]))
    weights_TV = np.exp(logits_1TV[0] - logits_1TV[0].max(-1, keepdims=True))
    return weights_TV / weights_TV.sum(-1, keepdims=True)


def without_lower_nibbles(scene: Scene, added: int) -> Probabilities:
    """Return probabilities with `added` in place of lower nibbles. The KV is restored afterwards."""
    pool = scene[1].pool
    original_kv = [tuple(x.copy() for x in pool.span(layer, 0, 0, KNOWN)) for layer in range(pool.config.layers)]
    slots_N = pool.slots(0, 0, KNOWN)
    for layer, rows in enumerate(original_kv):
        pool.kv.write(layer, slots_N, *(from_upper(x_GNR, added) for x_GNR in rows))
    probs = probabilities(scene)
    for layer, rows in enumerate(original_kv):
        pool.kv.write(layer, slots_N, *rows)
    return probs


def accepted(p_TV: Probabilities, q_TV: Probabilities) -> float:
    """Return the share of tokens drawn from q that rejection sampling against p accepts."""
    return float(np.minimum(p_TV, q_TV).sum(-1).mean())


def test_lower_tier_reads_codes_in_their_middle(scene: Scene) -> None:
    """Laws are equal bit for bit, as the text ends where a block of 64 keys does."""
    assert np.array_equal(probabilities(scene, Lower), without_lower_nibbles(scene, HALF))


def test_half_a_step_is_worth_acceptance(scene: Scene) -> None:
    exact_TV = probabilities(scene)
    with_half, without = (accepted(exact_TV, without_lower_nibbles(scene, added)) for added in (HALF, 0))
    assert with_half > 0.9
    assert 1 - without > 1.5 * (1 - with_half)


def test_lower_tiers_over_int8_kv_need_no_copies() -> None:
    """The retrieval tier reads half of each stored code. Copies would need as much memory again."""
    plain, lower = (
        LLM(None, None, dtype="bfloat16", kv_dtype="int8", lower_tiers=name).open(1, 500).core.store.pool
        for name in ("same", "int4")
    )
    assert not plain.kv.int8 and lower.kv.int8
    assert plain.bytes == lower.bytes
    assert plain.config.lower_number_bytes < 0.54
