"""A model that several ranks share gives the logits of one process, bit for bit, on every rank.

Shape suffixes: T tokens, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.thread_ranks import together
from tests.helpers.tiny_checkpoint import save, tiny_model
from triforce.backends import dispatch
from triforce.backends.decoder import Decoder
from triforce.backends.torch.tensors import as_tensor
from triforce.distributed.group import ALONE, TPGroup
from triforce.engine.model_loader import load
from triforce.errors import RequestError
from triforce.kvcache import FullView, PagePool
from triforce.ragged import ints

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("Llama", dict(tie_word_embeddings=True)),
    "qwen2, odd sizes": ("Qwen2", dict(vocab_size=101, hidden_size=68, intermediate_size=75, head_dim=16)),
    "qwen3, grouped": ("Qwen3", dict(num_attention_heads=12, num_key_value_heads=6, head_dim=32)),
}
LENGTH = 90
NATIVE = pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, changes = FAMILIES[request.param]
    heads = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=16)
    return save(tiny_model(family, **(heads | changes)), tmp_path_factory.mktemp("model"))


def text() -> list[int]:
    chance = Random(1)
    return [chance.randrange(97) for _ in range(LENGTH)]


def read(decoder: Decoder, widths: list[int]) -> Tensor:
    """Return the logits (T, V) of the text, in passes of these widths."""
    pool = PagePool(decoder.config, 1, 8, decoder.dtype)
    pool.reserve(0, LENGTH)
    full = FullView(pool)
    logits = []
    ids = text()
    for width in widths:
        start = int(full.lengths_B[0])
        logits.append(as_tensor(decoder(ints([ids[start : start + width]]), ints([width]), full))[0])
    return torch.cat(logits)


def shared(folder: Path, dtype: str, widths: list[int], count: int, exact: bool = True, bits: int = 0) -> list[Tensor]:
    """Return the logits of each rank."""

    def run(ranks: TPGroup) -> Tensor:
        checkpoint = load(folder, device="cpu", dtype=dtype, ranks=ranks, bits=bits)
        return read(checkpoint.lower_decoder if bits else checkpoint.decoder, widths)

    return together(count, run, exact)


@NATIVE
@pytest.mark.parametrize("bits", [0, 8, 4], ids=["same", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("count", [2, 4])
def test_sharded_logits_equal_one_process(folder: Path, dtype: str, count: int, bits: int) -> None:
    """Any cuts into passes give equal logits, for the shared model and for its low-bit copy."""
    if (checkpoint := load(folder, device="cpu", dtype=dtype, bits=bits)).config.kv_heads % count:
        count = 3
    alone_TV = read(checkpoint.lower_decoder, [LENGTH])
    for widths in ([LENGTH], [40, 1, 7, 33, 1, 8]):
        for each_TV in shared(folder, dtype, widths, count, bits=bits):
            assert torch.equal(each_TV, alone_TV)


@NATIVE
def test_summed_partial_products_change_bits(folder: Path) -> None:
    """Negative control: partial products over shares of the inputs, added up, have other bits."""
    alone_TV = read(load(folder, device="cpu", dtype="float32").decoder, [LENGTH])
    first_TV, second_TV = shared(folder, "float32", [LENGTH], 2, exact=False)
    assert torch.equal(first_TV, second_TV) and not torch.equal(first_TV, alone_TV)
    torch.testing.assert_close(first_TV, alone_TV, atol=1e-4, rtol=1e-4)


@NATIVE
def test_bfloat16_partial_products_change_bits() -> None:
    """Negative control: with rounding between layers, the logits of a whole model may hide the difference."""
    draw = torch.Generator().manual_seed(1)
    x_NK, weight_XK = (torch.randn(rows, 512, generator=draw).bfloat16() for rows in (8, 32))

    def times(columns: slice, outputs: slice = slice(None)) -> Tensor:
        y_NX = torch.empty(8, len(weight_XK[outputs]))
        matrix = dispatch.native.Matrix(weight_XK[outputs, columns].contiguous())
        matrix.linear(x_NK[:, columns].contiguous(), y_NX)
        return y_NX

    whole_NX = times(slice(None))
    everything = slice(None)
    assert torch.equal(torch.cat([times(everything, slice(20)), times(everything, slice(20, 32))], 1), whole_NX)
    assert not torch.equal(times(slice(256)) + times(slice(256, 512)), whole_NX)


@NATIVE
def test_exactness_reports_bitwise_ranks(folder: Path) -> None:
    def independent(ranks: TPGroup) -> bool:
        return load(folder, device="cpu", dtype="bfloat16", ranks=ranks).decoder.model.width_independent

    assert together(2, independent) == [True, True] and together(2, independent, exact=False) == [False, False]


def test_sharded_torch_path_equals_one_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products may round differently with fewer outputs: logits agree up to their last digits."""
    monkeypatch.setattr(dispatch, "native", None)
    alone_TV = read(load(folder, device="cpu", dtype="float32").decoder, [LENGTH])
    for exact in (True, False):
        first_TV, second_TV = shared(folder, "float32", [60, 30], 2, exact)
        assert torch.equal(first_TV, second_TV)
        torch.testing.assert_close(first_TV, alone_TV, atol=1e-4, rtol=1e-4)


def test_rank_holds_only_its_shard(folder: Path) -> None:
    def sizes(ranks: TPGroup) -> list[int]:
        from triforce.checkpoint.weights import read_weights

        loaded = load(folder, device="cpu", dtype="float32")
        model_config = loaded.config
        archives = loaded.files.archives(packed=False)
        rows = 101 if model_config.vocab_size == 101 else 97
        weights = read_weights(folder, archives, model_config, rows=rows, dtype="float32", ranks=ranks)
        return [tensor.size for tensor in weights.tensors() if tensor.ndim == 2]

    full_sizes, *parts = [sizes(ALONE), *together(2, sizes)]
    assert [sum(pair) for pair in zip(*parts, strict=True)] == full_sizes


@pytest.mark.parametrize("count", [5, 7])
def test_heads_not_divisible_by_ranks_raise(folder: Path, count: int) -> None:
    with pytest.raises(RequestError, match=r"KV heads cannot be shared evenly by . processes; use ranks 1 or 2"):
        together(count, lambda ranks: load(folder, device="cpu", ranks=ranks))
