"""The Triton attention against attention by the book in float64: lists, widths, lengths, layouts of heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tests.helpers.cuda.scene import DEVICE, Case, Scene, by_the_term, cases
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from triforce.backends.cuda.splits import split_of

# bfloat16 and float16 round weights and result by half a step each at most; all else is float32.
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2**-8 + 2**-9, torch.float16: 2**-11 + 2**-12}
MASS = 2e-5


def agree(case: Case) -> None:
    scene = Scene(case)
    attn_out, mass = scene.by_kernel()
    reference, wanted_mass = scene.by_the_book()
    assert attn_out.dtype == case.dtype
    assert scene.error(attn_out, reference) <= BOUND[case.dtype]
    if case.weigh:
        torch.testing.assert_close(mass.double(), wanted_mass, atol=MASS, rtol=MASS)


@given(case=cases())
@settings(max_examples=8, deadline=None, derandomize=True)
def test_triton_attention_random_call_equals_float64(case: Case) -> None:
    agree(case)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@given(case=cases())
@settings(max_examples=300, deadline=None)
def test_triton_attention_long_random_call_equals_float64(case: Case) -> None:
    agree(case)


@pytest.mark.parametrize(
    ("change", "split"),
    [
        ({"T": 1, "group": 1, "by_head": False}, 1024),
        ({"T": 4, "group": 8, "by_head": False}, 1024),
        ({"T": 1, "group": 1, "by_head": True}, 256),
        ({"T": 2, "group": 2, "by_head": True}, 128),
        ({"T": 1, "group": 1, "by_head": False, "sinks": 16, "window": 100, "turned": True}, 64),
    ],
)
def test_triton_attention_default_split_equals_float64(change: dict[str, Any], split: int) -> None:
    """Each kind of list, across a border. Another split has other bits, so the default split is the documented one."""
    T = change["T"]
    start = max(split, 256) - 1
    case = Case(**{"sinks": 0, "window": 0, "turned": False} | change | {"G": 1, "starts": [start], "counts": [T]})
    scene = Scene(case)
    attn_out, mass = scene.by_kernel(split=None)
    reference, wanted_mass = scene.by_the_book()
    assert scene.error(attn_out, reference) <= BOUND[torch.float32]
    torch.testing.assert_close(mass.double(), wanted_mass, atol=MASS, rtol=MASS)
    assert torch.equal(scene.by_kernel(split=split)[0], attn_out)
    assert not torch.equal(scene.by_kernel(split=split // 2 if split > 64 else 128)[0], attn_out)


def test_attention_splits_keep_a_device_busy() -> None:
    """Programs of real shapes on an H100: about two for each multiprocessor."""
    budget = 4096
    window = 16 + 496
    keys = 131_071
    assert keys // split_of(False, 0, 4) * 8 > 264  # Llama-3.1-8B
    assert budget // split_of(True, 0, 4) * 8 >= 256 and budget // split_of(True, 0, 1) * 32 >= 256
    assert window // split_of(False, window, 1) * 12 >= 96  # Llama-68M
    # eight queries of a group of 4; a key and a value
    written_and_read = 2 * 4 * 32 * (128 + 2)
    kv_bytes = 2 * 2 * 128
    assert written_and_read / split_of(False, 0, 4) < kv_bytes / 15


def many_splits_agree(T: int = 1) -> None:
    """Heads of 128, eight queries each, 33 splits: more than a merge reads at once, and more dimensions."""
    agree(Case(D=128, G=1, group=8, T=T, starts=[2099], counts=[T], by_head=False, sinks=0, window=0, turned=False))


@pytest.mark.parametrize("T", [1, 3])  # more than 16 rows are merged in another way
def test_triton_attention_of_many_splits_equals_float64(T: int) -> None:
    many_splits_agree(T)


@pytest.mark.parametrize("mutant", caught_in("test_attention_mutant_fails_its_check"), ids=str)
def test_attention_mutant_fails_its_check(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch, tmp_path)
    with pytest.raises(AssertionError):
        many_splits_agree()


@pytest.mark.parametrize("change", [{}, {"by_head": False, "sinks": 0, "window": 0, "turned": False}])
def test_triton_shifted_query_position_is_detected(change: dict[str, object]) -> None:
    """Negative control: shifted queries fail the comparison."""
    scene = Scene(replace(Case(), **change))
    attn_out, mass = scene.by_kernel(shift=-1)
    reference, wanted_mass = scene.by_the_book()
    assert scene.error(attn_out, reference) > 100 * BOUND[torch.float32]
    assert not torch.allclose(mass.double(), wanted_mass, atol=MASS, rtol=MASS)


def test_triton_attention_bits_depend_on_shape_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """At one width, a query has the same bits at the first place and the last, for any tokens after and beside it."""
    if DEVICE.type == "cpu":  # the interpreter multiplies by a BLAS, whose rows are not alike on every CPU
        monkeypatch.setattr(np, "matmul", by_the_term)
    case = Case(G=1, T=4, starts=[130, 20], counts=[4, 3], by_head=False, sinks=0, window=0, turned=False, spare=9)
    scene = Scene(case)
    attn_out, _ = scene.by_kernel()
    for t in range(4):
        q = torch.full_like(scene.q, torch.nan)
        q[0, 0] = scene.q[0, t]
        single_scene = Scene(replace(case, starts=[130 + t, 0], counts=[1, 0]))
        single_scene.q = q
        assert torch.equal(single_scene.by_kernel()[0][0, 0], attn_out[0, t])
