"""A whole pass in one call against the same kernels called one by one: the same bits.

Shape suffixes as in backends/kernel_api.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.helpers.paged_kv import PAGE, native
from triforce.backends.kernel_api import ForwardBatch, PageTable
from triforce.backends.torch.model import forward_layerwise
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
DRAW = torch.Generator().manual_seed(3)


def parts(dtype: torch.dtype, tied: bool = True, int8: bool = False) -> tuple[NativeModel, NativeKV]:
    """Return a random model, and a memory of random tokens."""
    draw = torch.Generator().manual_seed(1)
    config, model = random_model(draw, dtype, tied, 8 * int8)
    memory = NativeKV(config, PAGES, dtype, int8)
    everywhere_N = torch.arange(PAGE, (PAGES + 1) * PAGE)
    for index in range(L):
        memory.write(index, everywhere_N, *(torch.randn(G, len(everywhere_N), D, generator=draw) for _ in range(2)))
    return model, memory


def some_pages(*shape: int) -> Tensor:
    """Return page numbers (..., rows, pages). No two rows share one."""
    return (
        (torch.randperm(PAGES, generator=DRAW)[: shape[-2] * shape[-1]] + 1)
        .int()
        .view(shape[-2:])
        .expand(shape)
        .contiguous()
    )


def by_head(rows: int, pages: int, layers: int) -> Tensor:
    """Each layer and KV head sees the pages of a row in its own order, but for the last two."""
    units_LBGU = some_pages(rows, pages)[:, None].repeat(layers, 1, G, 1)
    for units_U in units_LBGU.view(-1, pages):
        units_U[:-2] = units_U[torch.randperm(pages - 2, generator=DRAW)]
    return units_LBGU


IDS_BT = torch.arange(5).repeat(2, 1)
FULL = ForwardBatch([37, 20], [(L, PageTable(some_pages(2, 5), [37, 20], [5, 2]))], observe=True, return_mass=True)
WINDOW = ForwardBatch([300, 60], [(L, PageTable(some_pages(2, 4), [50, 30], [5, 5], sinks=16, window=21))])
SOME = ForwardBatch([90, 91], [(L, PageTable(by_head(2, 6, L), [75, 70], [5, 0], coarse=[70, 64]))])
MIXED = ForwardBatch([75], [(1, PageTable(some_pages(1, 8), [75], [5])), (2, PageTable(by_head(1, 8, 2), [75], [5]))])
MIXED.views[1][1].units[..., -4:] = MIXED.views[0][1].units[:, None, -4:]  # new tokens have one slot in all layers


@pytest.mark.parametrize("at", [None, [[4], [1]], [[0, 2], [1, 0]]])
@pytest.mark.parametrize("batch", [FULL, WINDOW, SOME, MIXED], ids=["full", "window", "some", "mixed"])
@pytest.mark.parametrize(("tied", "int8"), [(True, False), (False, False), (True, True), (False, True)])
def test_decoder_pass_equals_separate_kernels(
    batch: ForwardBatch, at: list[list[int]] | None, tied: bool, int8: bool, dtype: torch.dtype
) -> None:
    results = []
    for forward in (NativeModel.forward, forward_layerwise):
        model, memory = parts(dtype, tied, int8)
        B = len(batch.positions)
        at_BJ = None if at is None else torch.tensor(at[:B])
        ids_BT = torch.randint(V, (B, 5), generator=torch.Generator().manual_seed(2))
        results.append((forward(model, ids_BT, memory, batch, at_BJ), memory))
    (got, ours), (separate, theirs) = results
    for b, count in enumerate(batch.views[0][1].counts):
        real = [j for j in range(got.logits_BJV.shape[1]) if (at[b][j] if at else j) < count]
        assert torch.equal(got.logits_BJV[b, real], separate.logits_BJV[b, real])
        if batch.observe and count:
            assert torch.equal(got.queries_LBTHD[:, b, :count], separate.queries_LBTHD[:, b, :count])
            assert torch.equal(got.mass_LBGU[:, b], separate.mass_LBGU[:, b])
    everywhere_N = torch.arange(PAGE, (PAGES + 1) * PAGE)
    for layer in range(L):
        pairs = zip(ours.read(layer, everywhere_N), theirs.read(layer, everywhere_N), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


def test_pass_without_scored_columns_returns_empty(dtype: torch.dtype) -> None:
    """The tokens are written to memory all the same."""
    passes = []
    for at_BJ in (None, torch.empty(2, 0, dtype=torch.long)):
        model, memory = parts(dtype)
        outcome = model.forward(torch.arange(10).view(2, 5), memory, FULL, at_BJ)
        passes.append((memory.read(L - 1, torch.arange(PAGE, 100)), outcome))
    (scored_kv, a), (unscored_kv, b) = passes
    assert all(torch.equal(*pair) for pair in zip(scored_kv, unscored_kv, strict=True))
    assert b.logits_BJV.shape == (2, 0, V) and torch.equal(a.mass_LBGU, b.mass_LBGU)


@pytest.mark.parametrize(
    "change",
    [
        dict(positions=[37]), dict(positions=[-1, 20]), dict(positions=[5000, 20]), dict(views=[]),
        dict(views=FULL.views * 2), dict(views=[(2, FULL.views[0][1])]),
        dict(views=[(L, replace(FULL.views[0][1], starts=[90, 20]))]),
        dict(views=[(2, SOME.views[0][1]), (1, FULL.views[0][1])]),
        dict(views=[(L, replace(FULL.views[0][1], units=some_pages(2, 5) + PAGES))]),
        dict(views=[(L, replace(FULL.views[0][1], units=some_pages(2, 5).long()))]),
        dict(views=[(L, replace(FULL.views[0][1], sinks=3))]),
        dict(views=[(L, replace(FULL.views[0][1], coarse=[37]))]),
        dict(views=[(L, replace(FULL.views[0][1], coarse=[38, 20]))]),
    ],
)  # fmt: skip
def test_decoder_bad_arguments_raise(change: dict[str, object], dtype: torch.dtype) -> None:
    model, memory = parts(dtype, int8=True)
    tables = (torch.zeros(64, memory.config.head_dim // 2),) * 2
    memory.config.rope.tables = lambda starts, count: tables  # for any positions
    with pytest.raises((ValueError, IndexError)):
        model.forward(torch.ones(2, 5, dtype=torch.long), memory, replace(FULL, **change), None)
    for ids_BT, at_BJ in ((torch.full((2, 5), V), None), (torch.full((2, 5), -1), None), (IDS_BT, IDS_BT + 1)):
        with pytest.raises(ValueError):
            model.forward(ids_BT, memory, FULL, at_BJ)


LONG = ForwardBatch([37], [(L, PageTable(some_pages(1, 20), [37], [200]))], states=(1, 2))
SLIDING = ForwardBatch([300], [(L, PageTable(some_pages(1, 18), [60], [200], sinks=16, window=21))])


@pytest.mark.parametrize(("layers", "tokens"), [(L, 200), (2, 200), (1, 64), (1, 200)])
@pytest.mark.parametrize("batch", [LONG, SLIDING], ids=["full", "window"])
def test_pass_in_parts_equals_one_call(
    batch: ForwardBatch, layers: int, tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts take some layers, or some tokens through a layer, and leave the same KV and states."""
    monkeypatch.setattr(cpu_model, "part_of_pass", lambda *arguments: (layers, tokens))
    ids_1T = torch.randint(V, (1, 200), generator=torch.Generator().manual_seed(2))
    model, memory = parts(dtype)
    part_model, part_memory = parts(dtype)
    reference = model.forward(ids_1T, memory, batch, torch.empty(1, 0, dtype=torch.long))
    steps = cpu_model.parts(part_model, part_memory, ids_1T, batch)
    progress = list[int]()
    while True:
        try:
            progress.append(next(steps))
        except StopIteration as end:
            output = end.value
            break
    assert progress == sorted(progress) and progress[-1] == 200 and len(progress) == -(-L // layers) * -(-200 // tokens)
    if batch.states:
        assert torch.equal(output.states_SBTC, reference.states_SBTC)
    slots_N = torch.arange(PAGE, (PAGES + 1) * PAGE)
    for layer in range(L):
        for whole_pass_rows, part_rows in zip(
            memory.read(layer, slots_N), part_memory.read(layer, slots_N), strict=True
        ):
            assert torch.equal(whole_pass_rows, part_rows)


def test_part_of_pass_is_bounded_by_its_operations() -> None:
    """The pass of a small model is one call, of a larger one some layers, of a huge one some tokens through a layer."""
    small, middle, large = (
        shapes.parts(name, 64, device="meta")[0] for name in ("30m", "llama-3.2-1b", "llama-3.1-8b")
    )
    assert cpu_model.part_of_pass(small, 0, 512) == (small.layers, 512)
    assert cpu_model.part_of_pass(middle, 0, 512) == (1, 512)
    assert cpu_model.part_of_pass(large, 0, 512) == (1, 128)
    layers, tokens = cpu_model.part_of_pass(middle, 60_000, 512)
    assert layers == 1 and 128 <= tokens < 512 and tokens % PAGE == 0
