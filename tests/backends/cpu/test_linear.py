"""Matrices on every level. Shape suffixes: N rows, K inputs, M outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.paged_kv import native
from tests.helpers.random_tensors import normal
from triforce.arrays import to_host

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("dtype")

SHAPES = [(1, 1), (16, 2), (17, 33), (40, 100), (1000, 48), (200, 1500)]


def linear(matrix: Any, outputs: int, x_NK: Tensor) -> Tensor:
    y_NM = torch.full((len(x_NK), outputs), torch.nan)
    matrix.linear(x_NK.contiguous(), y_NM)
    return y_NM


@pytest.mark.parametrize(("M", "K"), SHAPES)
def test_linear_error_within_bound(M: int, K: int, dtype: torch.dtype) -> None:
    """One chain of sums: at most two roundings for each product, whatever its order."""
    w_MK, x_NK = normal(M, K).to(dtype), normal(25, K, seed=1).to(dtype)
    error = (linear(native.Matrix(w_MK), M, x_NK) - x_NK.double() @ w_MK.double().T).abs()
    assert bool((error <= 2 * K * 2.0**-24 * (x_NK.double().abs() @ w_MK.double().abs().T)).all())


@pytest.mark.parametrize(("M", "K"), [*SHAPES, (72, 2600)])
def test_linear_row_bits_independent_of_batch(M: int, K: int, dtype: torch.dtype) -> None:
    matrix = native.Matrix(normal(M, K).to(dtype))
    x_NK = normal(230, K, seed=1).to(dtype)
    batch_output = linear(matrix, M, x_NK)
    for threads in (1, 2):
        native.set_threads(threads)
        assert torch.equal(batch_output, linear(matrix, M, x_NK))
        for N in (*range(1, 20), 31, 48, 95, 96, 97, 100):
            assert torch.equal(batch_output[N : 2 * N], linear(matrix, M, x_NK[N : 2 * N])), N


def test_linear_split_of_k_changes_bits(dtype: torch.dtype) -> None:
    """The inverse: a kernel that summed halves would fail the law above."""
    w_MK = normal(64, 256).to(dtype)
    x_NK = normal(4, 256, seed=1).to(dtype)
    halves = [linear(native.Matrix(w_MK[:, k].contiguous()), 64, x_NK[:, k]) for k in (slice(128), slice(128, 256))]
    unsplit = linear(native.Matrix(w_MK), 64, x_NK)
    assert torch.allclose(unsplit, halves[0] + halves[1], atol=1e-3)
    assert not torch.equal(unsplit, halves[0] + halves[1])


@pytest.mark.parametrize(("M", "K"), SHAPES)
def test_packed_rows_read_back_unchanged(M: int, K: int, dtype: torch.dtype) -> None:
    w_MK = normal(M, K).to(dtype)
    ids, out = torch.tensor([0, M - 1, M // 2, 0]), torch.empty(4, K)
    native.Matrix(w_MK).rows(ids, out)
    assert torch.equal(out, w_MK[ids].float())


def test_linear_nonfinite_inputs_stay_nonfinite(dtype: torch.dtype) -> None:
    w_MK = torch.eye(16).to(dtype)
    for value in (torch.nan, torch.inf):
        x_NK = torch.zeros(2, 16, dtype=dtype)
        x_NK[0, 3] = value
        y = linear(native.Matrix(w_MK), 16, x_NK)
        assert not y[0, 3].isfinite() and torch.equal(y[1], torch.zeros(16))


def test_host_arrays_equal_tensors(dtype: torch.dtype) -> None:
    """Host arrays may be read-only where they are read. An array of uint16 holds bfloat16 numbers."""
    M, K = 40, 100
    w_MK, x_NK = normal(M, K).to(dtype), normal(7, K, seed=1).to(dtype)
    weight, inputs = to_host(w_MK), to_host(x_NK)
    weight.flags.writeable = inputs.flags.writeable = False
    outputs = np.full((7, M), np.nan, np.float32)
    native.Matrix(weight).linear(inputs, outputs)
    assert np.array_equal(outputs, linear(native.Matrix(w_MK), M, x_NK))
    with pytest.raises(ValueError, match="x must be contiguous"):
        native.Matrix(weight).linear(np.repeat(inputs, 2, axis=1)[:, ::2], outputs)
    for wrong in (inputs.astype(np.float64), inputs.astype(np.int64), inputs.view(np.int16)):
        with pytest.raises(ValueError, match=r"x must be (float32|bfloat16)"):
            native.Matrix(weight).linear(wrong, outputs)


def test_linear_bad_arguments_raise(dtype: torch.dtype) -> None:
    matrix = native.Matrix(normal(32, 64).to(dtype))
    x = torch.zeros(2, 64, dtype=dtype)
    y = torch.zeros(2, 32)
    other_dtype = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    for bad_x, bad_y, message in [
        (x.to(other_dtype), y, "x must be"),
        (x[0], y, "x must be"),
        (x[:, :62].contiguous(), y, r"\(any, 64\), is .* \(2, 62\)"),
        (torch.zeros(2, 128, dtype=dtype)[:, ::2], y, "x must be contiguous"),
        (x, y[:1], r"y must be float32 \(2, 32\), is float32 \(1, 32\)"),
        (x, y.double(), "y must be float32"),
        (x, [1.0], "y must be a tensor"),
    ]:
        with pytest.raises(ValueError, match=message):
            matrix.linear(bad_x, bad_y)
    for ids in ([32], [-1]):
        with pytest.raises(ValueError, match="no row"):
            matrix.rows(torch.tensor(ids), torch.zeros(1, 64))
    for weight in (
        torch.zeros(4, 4, dtype=torch.float16),
        torch.zeros(4, 4, 4, dtype=dtype),
        torch.zeros(0, 4, dtype=dtype),
    ):
        with pytest.raises(ValueError, match="weight"):
            native.Matrix(weight)
