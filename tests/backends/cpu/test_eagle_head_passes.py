"""Native passes of an EAGLE head against the layer in torch, and the bits of a row independent of its batch, by level.

Shape suffixes as in eagle/eagle_draft.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers.paged_kv import PAGE, native
from triforce.arrays import Array, DType, float32
from triforce.backends.kernel_api import ForwardBatch, PageTable
from triforce.eagle.eagle_draft import eagle_head_passes
from triforce.eagle.head import EagleHeadConfig, EagleHeadPasses, EagleHeadWeights, shapes
from triforce.eagle.torch_passes import TorchEagleHeadPasses
from triforce.kvcache import EagleHeadMemory

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
from tests.helpers.random_model import D, G, H, V, random_model
from triforce.eagle.native_passes import NativeEagleHeadPasses

torch.set_num_threads(1)
C, M, PAGES, LENGTHS, FED = 48, 20, 12, [37, 20], [3, 1]
CLOSE = {"float32": dict(atol=1e-4, rtol=1e-4), "bfloat16": dict(atol=0.15, rtol=0.1)}
"""In bfloat16 the native weights have 8 bits."""


class Scene:
    """Two rows with LENGTHS tokens in memory, FED tokens to feed, and a draft.

    published: the draft has none of this project's own parts.
    """

    def __init__(self, dtype: DType, published: bool = False) -> None:
        draw = torch.Generator().manual_seed(3)
        model, target = random_model(draw, dtype, hidden=C)
        ours = not published
        self.config = EagleHeadConfig(
            V, C, 72, H, G, D, 1e-5, (1, 2), M, model.rope, 16, 24, fc_norm=ours, norm_output=ours,
            norm_before_residual=ours, embedding_residual=ours,
        )  # fmt: skip
        named = {
            name: (1 + 0.2 * torch.randn(shape, generator=draw) if "norm" in name
                   else torch.randn(shape, generator=draw) * shape[-1] ** -0.5).numpy()
            for name, shape in shapes(self.config).items()
        }  # fmt: skip
        head_MC = (torch.randn(M, C, generator=draw) * C**-0.5).numpy()
        weights = EagleHeadWeights(**named, tokens_M=np.arange(2, 2 + M), head_MC=head_MC)
        self.weights, self.target = weights, target
        self.native = NativeEagleHeadPasses(self.config, weights, target, dtype)
        self.torch = TorchEagleHeadPasses(self.config, weights, target.embed, "float32")
        self.ids_BT = torch.randint(V, (2, 40), generator=draw).numpy()
        self.states_SBTC = torch.randn(2, 2, 40, C, generator=draw).numpy()

    def run(self, passes: EagleHeadPasses, dtype: DType, rows: list[int]) -> tuple[EagleHeadMemory, Array]:
        """Return what the memory holds, and the logits, after some rows record their texts and feed more tokens."""
        memory = EagleHeadMemory(self.config.layer, PAGES, dtype, "cpu")
        starts = [LENGTHS[b] for b in rows]
        fed = [FED[b] for b in rows]
        for b in rows:
            length = LENGTHS[b] + FED[b] - 1  # only the last fed token is new to the target
            own_N = (1 + 4 * b) * PAGE + np.arange(length)
            slots = np.arange(length), own_N, np.append(0, own_N[:-1])
            passes.record_entries(self.ids_BT[b, :length], memory, slots, b * 40 + np.arange(length), self.states_SBTC)
        lists = np.array([[*range(1 + 4 * b, 5 + 4 * b)] for b in rows], np.int32)
        ids_BT = np.stack([self.ids_BT[b, LENGTHS[b] : LENGTHS[b] + 3] for b in rows])
        view = PageTable(lists, starts, fed, PAGE, self.config.sinks, self.config.window)
        batch = ForwardBatch(starts, [(1, view)], tables=lists.tolist())
        at_BJ = np.array([[0, count - 1] for count in fed])
        return memory, passes.forward(ids_BT, memory, batch, at_BJ)


def slots_of(b: int) -> Array:
    """Return the slots of a row's tokens. Other slots have any content."""
    return (1 + 4 * b) * PAGE + np.arange(LENGTHS[b] + FED[b])


@pytest.mark.parametrize("published", [False, True], ids=["ours", "published"])
def test_native_passes_are_those_of_torch(published: bool, dtype_name: DType) -> None:
    scene = Scene(dtype_name, published)
    (ours, got_BJV), (theirs, wanted_BJV) = (
        scene.run(passes, dtype_name, [0, 1]) for passes in (scene.native, scene.torch)
    )
    np.testing.assert_allclose(got_BJV, wanted_BJV, **CLOSE[dtype_name])
    slots_N = np.concatenate([slots_of(0), slots_of(1)])
    for mine, reference in zip(ours.read(slots_N), theirs.read(slots_N), strict=True):
        np.testing.assert_allclose(float32(mine), float32(reference), **CLOSE[dtype_name])
    assert not ours.states_NC[:PAGE].any(), "the state before a text"


def test_bits_of_a_row_are_its_own(dtype_name: DType) -> None:
    scene = Scene(dtype_name)
    memory, both_BJV = scene.run(scene.native, dtype_name, [0, 1])
    for b in (0, 1):
        single_memory, one_1JV = scene.run(scene.native, dtype_name, [b])
        assert np.array_equal(one_1JV[0], both_BJV[b])
        for mine, batched in zip(single_memory.read(slots_of(b)), memory.read(slots_of(b)), strict=True):
            assert np.array_equal(mine, batched)


def test_slots_and_memory_that_do_not_fit_raise(dtype_name: DType) -> None:
    scene = Scene(dtype_name)
    memory = EagleHeadMemory(scene.config.layer, PAGES, dtype_name, "cpu")
    slot = np.array([3])
    for slots, ids in (((slot, slot, slot), 0), ((slot, slot + 500, slot), 0), ((slot, slot + PAGE, slot), V)):
        with pytest.raises(ValueError, match="must"):
            scene.native.record_entries(np.array([ids]), memory, slots, slot, scene.states_SBTC)
    narrow = EagleHeadMemory(replace(scene.config.layer, kv_heads=1), PAGES, dtype_name, "cpu")
    with pytest.raises(ValueError, match="of the draft's type and shape"):
        scene.native.record_entries(np.array([1]), narrow, (slot, slot + PAGE, slot), slot, scene.states_SBTC)


def test_sinks_of_part_of_a_page_take_torch_passes(dtype_name: DType) -> None:
    """The memory of such a draft is torch's, as native kernels read whole pages."""
    scene = Scene(dtype_name)
    for sinks, kind in ((16, NativeEagleHeadPasses), (4, TorchEagleHeadPasses)):
        config = replace(scene.config, sinks=sinks)
        assert type(eagle_head_passes(config, scene.weights, scene.target, dtype_name, "cpu")) is kind
