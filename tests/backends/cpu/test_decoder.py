"""A whole pass in one call against the same kernels called one by one: the same bits.

Shape suffixes as in backends/kernel_api.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers.paged_kv import PAGE, native
from triforce.arrays import Array, DType
from triforce.backends.kernel_api import ForwardBatch, PageTable
from triforce.backends.layerwise import forward_layerwise
from triforce.bench import shapes

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
from tests.helpers.random_model import D, G, L, V, random_model
from triforce.backends.cpu import model as cpu_model
from triforce.backends.cpu.kv import NativeKV
from triforce.backends.cpu.model import NativeModel

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("dtype")
PAGES = 24
EVERYWHERE_N = np.arange(PAGE, (PAGES + 1) * PAGE)
DRAW = torch.Generator().manual_seed(3)


def parts(dtype: DType, tied: bool = True, int8: bool = False) -> tuple[NativeModel, NativeKV]:
    """Return a random model, and a memory of random tokens."""
    draw = torch.Generator().manual_seed(1)
    config, model = random_model(draw, dtype, tied, 8 * int8)
    memory = NativeKV(config, PAGES, dtype, int8)
    for index in range(L):
        keys_values = (torch.randn(G, len(EVERYWHERE_N), D, generator=draw).numpy() for _ in range(2))
        memory.write(index, EVERYWHERE_N, *keys_values)
    return model, memory


def some_pages(rows: int, pages: int) -> Array:
    """Return page numbers (rows, pages). No two rows share one."""
    return (torch.randperm(PAGES, generator=DRAW)[: rows * pages] + 1).int().view(rows, pages).numpy()


def by_head(rows: int, pages: int, layers: int) -> Array:
    """Each layer and KV head sees the pages of a row in its own order, but for the last two."""
    units_LBGU = np.tile(some_pages(rows, pages)[:, None], (layers, 1, G, 1))
    for units_U in units_LBGU.reshape(-1, pages):
        units_U[:-2] = units_U[torch.randperm(pages - 2, generator=DRAW).numpy()]
    return units_LBGU


def some_ids(rows: int, width: int) -> Array:
    return torch.randint(V, (rows, width), generator=torch.Generator().manual_seed(2)).numpy()


def same_kv(memory: NativeKV, compared_memory: NativeKV) -> bool:
    """Whether all slots of two memories have the same bits."""
    return all(
        np.array_equal(*pair)
        for layer in range(L)
        for pair in zip(memory.read(layer, EVERYWHERE_N), compared_memory.read(layer, EVERYWHERE_N), strict=True)
    )


IDS_BT = np.tile(np.arange(5), (2, 1))
FULL = ForwardBatch([37, 20], [(L, PageTable(some_pages(2, 5), [37, 20], [5, 2]))], observe=True, return_mass=True)
WINDOW = ForwardBatch([300, 60], [(L, PageTable(some_pages(2, 4), [50, 30], [5, 5], sinks=16, window=21))])
SOME = ForwardBatch([90, 91], [(L, PageTable(by_head(2, 6, L), [75, 70], [5, 0], low_precision_ends=[70, 64]))])
MIXED = ForwardBatch([75], [(1, PageTable(some_pages(1, 8), [75], [5])), (2, PageTable(by_head(1, 8, 2), [75], [5]))])
MIXED.views[1][1].units[..., -4:] = MIXED.views[0][1].units[:, None, -4:]  # new tokens have one slot in all layers


@pytest.mark.parametrize("at", [None, [[4], [1]], [[0, 2], [1, 0]]])
@pytest.mark.parametrize("batch", [FULL, WINDOW, SOME, MIXED], ids=["full", "window", "some", "mixed"])
@pytest.mark.parametrize(("tied", "int8"), [(True, False), (False, False), (True, True), (False, True)])
def test_decoder_pass_equals_separate_kernels(
    batch: ForwardBatch, at: list[list[int]] | None, tied: bool, int8: bool, dtype_name: DType
) -> None:
    results = []
    for forward in (NativeModel.forward, forward_layerwise):
        model, memory = parts(dtype_name, tied, int8)
        B = len(batch.positions)
        at_BJ = None if at is None else np.array(at[:B])
        results.append((forward(model, some_ids(B, 5), memory, batch, at_BJ), memory))
    (got, ours), (separate, theirs) = results
    for b, count in enumerate(batch.views[0][1].counts):
        real = [j for j in range(got.logits_BJV.shape[1]) if (at[b][j] if at else j) < count]
        assert np.array_equal(got.logits_BJV[b, real], separate.logits_BJV[b, real])
        if batch.observe and count:
            assert np.array_equal(got.queries_LBTHD[:, b, :count], separate.queries_LBTHD[:, b, :count])
            assert np.array_equal(got.mass_LBGU[:, b], separate.mass_LBGU[:, b])
    assert same_kv(ours, theirs)


def test_pass_without_scored_columns_returns_empty(dtype_name: DType) -> None:
    """The tokens are written to memory all the same."""
    passes = []
    for at_BJ in (None, np.empty((2, 0), np.int64)):
        model, memory = parts(dtype_name)
        outcome = model.forward(np.arange(10).reshape(2, 5), memory, FULL, at_BJ)
        passes.append((memory.read(L - 1, np.arange(PAGE, 100)), outcome))
    (scored_kv, a), (unscored_kv, b) = passes
    assert all(np.array_equal(*pair) for pair in zip(scored_kv, unscored_kv, strict=True))
    assert b.logits_BJV.shape == (2, 0, V) and np.array_equal(a.mass_LBGU, b.mass_LBGU)


@pytest.mark.parametrize(
    "change",
    [
        dict(positions=[37]), dict(positions=[-1, 20]), dict(positions=[5000, 20]), dict(views=[]),
        dict(views=FULL.views * 2), dict(views=[(2, FULL.views[0][1])]),
        dict(views=[(L, replace(FULL.views[0][1], starts=[90, 20]))]),
        dict(views=[(2, SOME.views[0][1]), (1, FULL.views[0][1])]),
        dict(views=[(L, replace(FULL.views[0][1], units=some_pages(2, 5) + PAGES))]),
        dict(views=[(L, replace(FULL.views[0][1], units=some_pages(2, 5).astype(np.int64)))]),
        dict(views=[(L, replace(FULL.views[0][1], sinks=3))]),
        dict(views=[(L, replace(FULL.views[0][1], low_precision_ends=[37]))]),
        dict(views=[(L, replace(FULL.views[0][1], low_precision_ends=[38, 20]))]),
    ],
)  # fmt: skip
def test_decoder_bad_arguments_raise(change: dict[str, object], dtype_name: DType) -> None:
    model, memory = parts(dtype_name, int8=True)
    tables = (np.zeros((64, memory.config.head_dim // 2), np.float32),) * 2
    memory.config.rope.tables = lambda starts, count: tables  # for any positions
    with pytest.raises((ValueError, IndexError)):
        model.forward(np.ones((2, 5), np.int64), memory, replace(FULL, **change), None)
    for ids_BT, at_BJ in ((np.full((2, 5), V), None), (np.full((2, 5), -1), None), (IDS_BT, IDS_BT + 1)):
        with pytest.raises(ValueError):
            model.forward(ids_BT, memory, FULL, at_BJ)


LONG = ForwardBatch([37], [(L, PageTable(some_pages(1, 20), [37], [200]))], state_layers=(1, 2))
SLIDING = ForwardBatch([300], [(L, PageTable(some_pages(1, 18), [60], [200], sinks=16, window=21))])


@pytest.mark.parametrize(("layers", "tokens"), [(L, 200), (2, 200), (1, 64), (1, 200)])
@pytest.mark.parametrize("batch", [LONG, SLIDING], ids=["full", "window"])
def test_pass_in_parts_equals_one_call(
    batch: ForwardBatch, layers: int, tokens: int, dtype_name: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts take some layers, or some tokens through a layer, and leave the same KV and states."""
    monkeypatch.setattr(cpu_model, "part_of_pass", lambda *arguments: (layers, tokens))
    ids_1T = some_ids(1, 200)
    model, memory = parts(dtype_name)
    part_model, part_memory = parts(dtype_name)
    reference = model.forward(ids_1T, memory, batch, np.empty((1, 0), np.int64))
    steps = cpu_model.parts(part_model, part_memory, ids_1T, batch)
    progress = list[int]()
    while True:
        try:
            progress.append(next(steps))
        except StopIteration as end:
            output = end.value
            break
    assert progress == sorted(progress) and progress[-1] == 200 and len(progress) == -(-L // layers) * -(-200 // tokens)
    if batch.state_layers:
        assert np.array_equal(output.states_SBTC, reference.states_SBTC)
    assert same_kv(memory, part_memory)


def test_part_of_pass_is_bounded_by_its_operations() -> None:
    """The pass of a small model is one call, of a larger one some layers, of a huge one some tokens through a layer."""
    small, middle, large = (shapes.config_of(name, 64) for name in ("30m", "llama-3.2-1b", "llama-3.1-8b"))
    assert cpu_model.part_of_pass(small, 0, 512) == (small.layers, 512)
    assert cpu_model.part_of_pass(middle, 0, 512) == (1, 512)
    assert cpu_model.part_of_pass(large, 0, 512) == (1, 128)
    layers, tokens = cpu_model.part_of_pass(middle, 60_000, 512)
    assert layers == 1 and 128 <= tokens < 512 and tokens % PAGE == 0
