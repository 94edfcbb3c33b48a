"""Int8 KV in the Triton kernels: codes are those of `kv_rows`, and attention reads the values of the codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from tests.helpers.cuda import stub
from tests.helpers.cuda.coded_scene import BOUND, CodedScene, agree
from tests.helpers.cuda.prompts import ids
from tests.helpers.cuda.scene import DEVICE, Case
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from tests.helpers.slow_parameters import slow
from tests.helpers.small_decoder import feed, small_decoder, text
from triforce.backends import dispatch
from triforce.backends import dispatch as backends_dispatch
from triforce.backends.cuda import triton as triton_kernels
from triforce.backends.cuda.kv import TritonKV
from triforce.backends.cuda.kv_pages import as_numbers, read_rows, write_rows
from triforce.backends.cuda.triton import multiplied_as, pointwise
from triforce.backends.cuda.triton.attention import DevicePageTable
from triforce.backends.kernel_api import pages_for
from triforce.backends.torch.int8_rows import numbers, rotated_head, rounded
from triforce.backends.torch.kv import TorchKV
from triforce.engine.model_loader import with_kv_dtype
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import FullView, PagePool
from triforce.llm import LLM
from triforce.model.kv_rows import hadamard_block

LARGE: dict[str, Any] = dict(
    D=128, G=1, group=8, T=3, starts=[2100], counts=[3], by_head=False, sinks=0, window=0, turned=False
)


@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize(
    "change", [{}, {"by_head": False, "D": 24, "group": 3, "rotated": True}, {"unit": 8}, {"unit": 1}], ids=str
)
def test_triton_attention_over_codes_equals_float64(change: dict[str, Any], dtype: torch.dtype) -> None:
    agree(replace(Case(), **change, dtype=dtype))


def test_triton_attention_over_thousands_of_codes_equals_float64() -> None:
    agree(Case(**LARGE, dtype=torch.bfloat16))


def test_triton_attention_over_codes_in_float16_keeps_small_weights() -> None:
    """Thousands of small values count, too: on a GPU weights times their scales would underflow in float16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_kernels, "interpreted", lambda: False)
        assert multiplied_as(torch.empty(1, dtype=torch.float16), coded=True) == tl.bfloat16
    scene = CodedScene(Case(**LARGE, dtype=torch.float16))
    scene.queries = scene.q, scene.q_sinks = scene.q * 0.01, scene.q * 0.01  # so that all keys count alike
    small = numbers(rounded(torch.full_like(scene.k, 2e-3))).to(scene.k.dtype)
    scene.plain = scene.k, scene.v = scene.k, small
    write_rows(scene.coded[1], torch.arange(small.shape[1]), rounded(small))
    attn_out, _ = scene.by_kernel()
    reference, _ = scene.by_the_book()
    assert scene.error(attn_out, reference) <= 4 * BOUND[torch.float16]


def test_triton_query_over_codes_that_is_no_number_gives_none() -> None:
    """No other query changes."""
    scene = CodedScene(Case(by_head=False))
    scene.q[0, 1, 2, 3] = torch.nan
    attn_out = scene.by_kernel()[0]
    nan_mask = attn_out.isnan()
    assert nan_mask[0, 1, 2].all() and nan_mask.sum() == attn_out.shape[-1]


def write_by_kernel(x_BTGD: Tensor, codes: bool, together: int = 1) -> tuple[Tensor, ...]:
    """Return what the kernel writes for keys and values at places 14 to 18 of a list, as rows (G, T, R)."""
    _, T, G, D = x_BTGD.shape
    memory = tuple(torch.zeros(G, 64, D + 2, dtype=torch.int8, device=DEVICE) for _ in range(2))
    tables = torch.ones(40, D // 2, device=DEVICE), torch.zeros(40, D // 2, device=DEVICE)  # no rotation
    at = torch.tensor([14], device=DEVICE)
    counts = torch.tensor([T], device=DEVICE)
    page_table = DevicePageTable(torch.tensor([[2, 1, 3]], dtype=torch.int32, device=DEVICE), at, counts, 16)
    x_BTGD = x_BTGD.to(DEVICE)
    q_BTGD, _ = pointwise.rotate_and_write((x_BTGD, x_BTGD, 2 * x_BTGD), at, tables, page_table, memory, together)
    wanted_BTGD = rotated_head(x_BTGD).to(x_BTGD.dtype) if together > 1 else x_BTGD
    step = torch.finfo(x_BTGD.dtype).eps if together > 1 else 0  # the interpreter does not round to the nearest
    if x_BTGD.isfinite().all():
        torch.testing.assert_close(q_BTGD, wanted_BTGD, rtol=step, atol=0)
    slots_T = torch.tensor([46, 47, 16, 17, 18], device=DEVICE)
    if codes:
        return tuple(read_rows(tensor, slots_T).cpu() for tensor in memory)
    return tuple(tensor.cpu() for tensor in as_numbers((memory[0], memory[1]), slots_T, x_BTGD.dtype))


def random_rows(dtype: torch.dtype, dim: int = 24) -> Tensor:
    """Return rows (1, 5, 2, D), one of them of zeros and one of a single number."""
    x_BTGD = torch.randn(1, 5, 2, dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    x_BTGD[0, 3] = 0
    x_BTGD[0, 4, :, 1:] = 0
    return x_BTGD


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_codes_are_those_of_torch(dtype: torch.dtype) -> None:
    """Each row is near its values under either rounding."""
    x_BTGD = random_rows(dtype)
    for factor, got, expected in zip(
        (1, 2), write_by_kernel(x_BTGD, codes=True), write_by_kernel(x_BTGD, codes=False), strict=True
    ):
        x_GTD = factor * x_BTGD[0].transpose(0, 1)
        assert torch.equal(got, rounded(x_GTD))
        step_GT1 = x_GTD.float().abs().amax(-1, keepdim=True) / 127
        assert bool(((numbers(got) - x_GTD.float()).abs() <= 0.505 * step_GT1).all())
        assert torch.equal(expected, numbers(got).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [24, 64, 80, 128])
def test_triton_codes_of_rotated_heads_are_those_of_torch(dim: int, dtype: torch.dtype) -> None:
    """Blocks have 8 channels for heads of 24, and 16 for 80, and lie across the halves of RoPE."""
    x_BTGD = random_rows(dtype, dim)
    for factor, got in zip((1, 2), write_by_kernel(x_BTGD, codes=True, together=hadamard_block(dim)), strict=True):
        x_GTD = rotated_head(factor * x_BTGD[0].transpose(0, 1))
        assert torch.equal(got, rounded(x_GTD))
        step_GT1 = x_GTD.abs().amax(-1, keepdim=True) / 127
        assert bool(((numbers(got) - x_GTD).abs() <= 0.505 * step_GT1).all())


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("odd", [torch.inf, torch.nan])
def test_triton_codes_of_odd_rows_are_nan(odd: float) -> None:
    x_BTGD = random_rows(torch.float32)
    x_BTGD[0, 1, 0, 3] = odd
    for rows_GTR in write_by_kernel(x_BTGD, codes=True):
        lost_GT = numbers(rows_GTR).isnan().all(-1)
        assert lost_GT.sum() == 1 and lost_GT[0, 1]


def check_of_rows() -> None:
    x_BTGD = random_rows(torch.float32)
    for factor, got in zip((1, 2), write_by_kernel(x_BTGD, codes=True, together=8), strict=True):
        assert torch.equal(got, rounded(rotated_head(factor * x_BTGD[0].transpose(0, 1))))


CHECKS: dict[str, Callable[[], None]] = {
    "attention": lambda: agree(Case(by_head=False)),
    "one unit": lambda: agree(Case(by_head=False, starts=[4], counts=[3])),
    "odd units": lambda: agree(Case(by_head=False, unit=1)),
    "rotated back": lambda: agree(Case(by_head=False, D=24, group=3, rotated=True)),
    "no number": test_triton_query_over_codes_that_is_no_number_gives_none,
    "rows": check_of_rows,
}
"""Checks by the names in `Mutant.checks`."""


@pytest.mark.parametrize("mutant", caught_in("test_codes_mutant_fails_its_check"), ids=str)
def test_codes_mutant_fails_its_check(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch, tmp_path)
    (check,) = mutant.checks
    with pytest.raises(AssertionError):
        CHECKS[check]()


def logits(widths: tuple[int, ...], hadamard: bool = True) -> Tensor:
    """Return the logits of a text over int8 KV, in passes of these widths."""
    decoder = small_decoder(dtype="float32")
    ids_T = text(sum(widths))
    pass_logits = list[Tensor]()
    at = 0
    decoder.config = replace(decoder.config, kv_int8=True, hadamard=hadamard)
    pool = PagePool(decoder.config, 1, pages_for(len(ids_T)), decoder.dtype, decoder.device)
    assert isinstance(pool.kv, TritonKV) == (backends_dispatch.requested == "triton")
    pool.reserve(0, len(ids_T))
    view = FullView(pool)
    for width in widths:
        pass_logits.append(feed(decoder, view, [ids_T[at : at + width]])[0])
        at += width
    return torch.cat(pass_logits)


@pytest.mark.parametrize("hadamard", [True, False], ids=["rotated", "plain"])
def test_triton_passes_over_codes_equal_torch(hadamard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch attends to the prompt; narrow passes follow."""
    monkeypatch.setattr(backends_dispatch, "native", None)
    logits_by_kernels = []
    for name in ("torch", "triton"):
        monkeypatch.setattr(backends_dispatch, "requested", name)
        logits_by_kernels.append(logits((90, 1, 5), hadamard))
    reference, got = logits_by_kernels
    # A code differs by one step where a key's last bit decides it.
    assert (got - reference).abs().max() < 0.01 * reference.abs().max()


HOW: list[dict[str, Any]] = [{}, {"kv_offload": "host", "kv_memory": "64MiB", "kv_resident_layers": 0}]


@pytest.fixture
def decode(folder: Path, by_name: None) -> Callable[..., list[int]]:
    def run(mode: str, prompt: int = 70, **options: Any) -> list[int]:
        llm = LLM(
            folder / "target", folder / "draft", dtype="float32", kv_dtype="int8", retrieval_budget=32,
            speculative_tokens=3, searched_layers="none", **options,
        )  # fmt: skip
        params = SamplingParams(temperature=0.8, seed=3, max_tokens=5, ignore_eos=True)
        return llm.generate([ids(prompt)], params, mode=mode)[0].outputs[0].token_ids

    return run


def test_triton_text_over_codes_with_small_chunks_is_that_of_plain_decoding(decode: Callable[..., list[int]]) -> None:
    """Units of the lists are parts of pages, in prompts too."""
    assert decode("retrieval", retrieval_chunk=8, prompt=100) == decode("ar", prompt=100)


@pytest.mark.parametrize("options", [HOW[0], *slow(*HOW[1:])], ids=["resident", "offloaded"])
def test_triton_text_over_codes_is_that_of_plain_decoding(
    decode: Callable[..., list[int]], options: dict[str, Any]
) -> None:
    assert decode("triforce", **options) == decode("ar")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is made up here")
@pytest.mark.parametrize(("suits", "capability"), [(False, (9, 0)), (True, (7, 5))], ids=["no Triton", "an old GPU"])
def test_int8_kv_on_gpu_that_triton_does_not_suit_is_torchs(
    suits: bool, capability: tuple[int, int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before compute capability 8.0 Triton has no integer products and no bfloat16."""
    monkeypatch.setattr(backends_dispatch, "suits_triton", lambda *_: suits)
    config = LLM(folder / "target", dtype="float32").target.config
    with stub.machine(capability=capability):
        coded = with_kv_dtype(config, "int8", "float32")
        kv = dispatch.memory(coded, 4, "float32", "cuda")
    assert type(kv) is TorchKV and coded.rotates_heads and kv.keys_LGSD.dtype == torch.int8
