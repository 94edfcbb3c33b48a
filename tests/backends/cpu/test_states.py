"""Passes that return hidden states: the states equal those of single layers, and the rest of the pass is unchanged.

Shape suffixes as in backends/kernel_api.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.gguf_models import MIXED, write_model
from tests.helpers.paged_kv import PAGE, native
from triforce.arrays import DType
from triforce.backends.kernel_api import ForwardBatch, PageTable
from triforce.backends.layerwise import forward_layerwise

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
from tests.helpers.random_model import C, L, V, random_model
from triforce.backends.cpu.kv import NativeKV
from triforce.backends.cpu.model import NativeModel
from triforce.engine.model_loader import load

torch.set_num_threads(1)
PAGES = 12
BATCH = ForwardBatch(
    [37, 20],
    [(L, PageTable(np.arange(1, 9, dtype=np.int32).reshape(2, 4), [37, 20], [5, 2]))],
    observe=True,
    return_mass=True,
)
IDS_BT = torch.randint(V, (2, 5), generator=torch.Generator().manual_seed(2)).numpy()


def memory_of(model: NativeModel, dtype: DType) -> NativeKV:
    """Return a memory of random tokens."""
    draw = torch.Generator().manual_seed(1)
    kv = NativeKV(model.config, PAGES, dtype)
    everywhere_N = np.arange(PAGE, (PAGES + 1) * PAGE)
    heads = model.config.kv_heads, len(everywhere_N), model.config.head_dim
    for layer in range(model.config.layers):
        kv.write(layer, everywhere_N, *(torch.randn(heads, generator=draw).numpy() for _ in range(2)))
    return kv


@pytest.mark.parametrize("bits", [0, 8])
@pytest.mark.parametrize("states", [(1,), (2, 1)])
@pytest.mark.parametrize("at", [None, [[4], [1]], [[], []]])
def test_pass_with_states_keeps_all_other_bits(
    states: tuple[int, ...], at: list[list[int]] | None, bits: int, dtype_name: DType
) -> None:
    _, model = random_model(torch.Generator().manual_seed(1), dtype_name, bits=bits)
    at_BJ = None if at is None else np.array(at, np.int64)
    passes = []
    for batch in (BATCH, replace(BATCH, state_layers=states)):
        kv = memory_of(model, dtype_name)
        output = model.forward(IDS_BT, kv, batch, at_BJ)
        kv_arrays = [part for layer in range(L) for part in kv.read(layer, np.arange(PAGE, PAGES * PAGE))]
        passes.append((output, kv_arrays))
    (plain, plain_kv), (with_states, states_kv) = passes
    assert plain.states_SBTC is None and with_states.states_SBTC is not None
    for b, count in enumerate(BATCH.views[0][1].counts):
        real = slice(count if at is None else None)
        assert np.array_equal(plain.logits_BJV[b, real], with_states.logits_BJV[b, real])
        assert np.array_equal(plain.queries_LBTHD[:, b, :count], with_states.queries_LBTHD[:, b, :count])
    assert np.array_equal(plain.mass_LBGU, with_states.mass_LBGU)
    assert all(map(np.array_equal, plain_kv, states_kv))


@pytest.mark.parametrize("states", [(1,), (1, 2), (2, 1), (1, L)])
def test_states_of_one_call_equal_those_of_layers(states: tuple[int, ...], dtype_name: DType) -> None:
    call_states = []
    for forward in (NativeModel.forward, forward_layerwise):
        _, model = random_model(torch.Generator().manual_seed(1), dtype_name)
        output = forward(model, IDS_BT, memory_of(model, dtype_name), replace(BATCH, state_layers=states), None)
        assert output.states_SBTC.shape == (len(states), 2, 5, C) and output.states_SBTC.dtype == np.float32
        call_states.append(output.states_SBTC)
    for b, count in enumerate(BATCH.views[0][1].counts):
        assert np.array_equal(call_states[0][:, b, :count], call_states[1][:, b, :count])


def test_states_of_other_layers_raise(dtype_name: DType) -> None:
    """States behind the last layer exist where a column is scored."""
    _, model = random_model(torch.Generator().manual_seed(1), dtype_name)
    nothing_BJ = np.zeros((2, 0), np.int64)
    for states, at_BJ in (((0,), None), ((L + 1,), None), ((-1,), None), ((L,), nothing_BJ), ((1, L), nothing_BJ)):
        with pytest.raises(ValueError, match="layers that are finished"):
            model.forward(IDS_BT, memory_of(model, dtype_name), replace(BATCH, state_layers=states), at_BJ)


def test_packed_weights_give_states_and_head_rows(tmp_path: Path) -> None:
    """Low-bit weights have the states that their products have, too."""
    written = write_model(tmp_path, "Q4_1", MIXED)
    model = load(written.gguf, device="cpu", dtype="bfloat16").decoder
    ids_BT = np.arange(3, 8)[None]
    lists = PageTable(np.ones((1, 1), np.int32), [0], [5])
    batch = ForwardBatch([0], [(model.config.layers, lists)], state_layers=(1,))
    outputs = []
    for forward in (NativeModel.forward, forward_layerwise):
        kv = NativeKV(model.config, PAGES, "bfloat16")
        outputs.append(forward(model.model, ids_BT, kv, batch, None))
    assert np.array_equal(outputs[0].states_SBTC, outputs[1].states_SBTC)
    numbers_VC = load(written.folder, device="cpu", dtype="float32").decoder.head_rows(np.arange(290))
    np.testing.assert_allclose(model.head_rows(np.array([7, 0, 289])), numbers_VC[[7, 0, 289]], atol=1e-6, rtol=0)
