"""Host arrays of weights: rounded as torch rounds, checked for numbers that are not finite, without torch or a copy."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.tiny_checkpoint import save, tiny_model
from triforce.arrays import HOST_TYPES, float32, to_host
from triforce.backends import dispatch
from triforce.checkpoint import weight_files
from triforce.checkpoint.weight_files import open_archives
from triforce.checkpoint.weights import PART, SOURCE_DTYPES, all_finite, bit_sum, converted
from triforce.errors import ModelError

ROOT = Path(__file__).parents[2]
CHOICES = ("float32", "bfloat16", "float16")


def numbers(dtype: str) -> torch.Tensor:
    """Return all bfloat16 or float16 numbers, and numbers around and between them in wider types."""
    if dtype in ("bfloat16", "float16"):
        return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(getattr(torch, dtype))
    every = torch.cat([numbers(narrow).to(getattr(torch, dtype)) for narrow in ("bfloat16", "float16")])
    every = every[every.isfinite()]
    beyond = torch.full_like(every, torch.inf)
    around = torch.cat([every, torch.nextafter(every, beyond), torch.nextafter(every, -beyond)])
    return torch.cat([around, (every + torch.nextafter(every.bfloat16().float(), beyond.float())) / 2])


@pytest.mark.parametrize(("source", "target"), [*product(SOURCE_DTYPES, CHOICES)])
def test_numbers_are_rounded_as_torch_rounds(source: str, target: str) -> None:
    source = numbers(source)
    converted_host = converted(to_host(source), target)
    wanted = to_host(source.to(getattr(torch, target)))
    is_nan = np.isnan(to_host(source.float()))
    assert converted_host.dtype == HOST_TYPES[target] and np.array_equal(converted_host[~is_nan], wanted[~is_nan])
    assert np.isnan(float32(converted_host[is_nan])).all()


def test_large_and_woven_arrays_are_converted_in_parts() -> None:
    source = torch.randn(3, PART // 2 + 17)
    host = to_host(source)
    for cut in (slice(None), slice(None, None, 2)):
        converted_host = converted(host[:, cut].T, "bfloat16")
        assert converted_host.flags.c_contiguous and np.array_equal(
            converted_host, to_host(source[:, cut].T.bfloat16().contiguous())
        )
    assert np.shares_memory(converted(host, "float32"), host)
    assert converted(np.empty((0, 5), np.float32), "float16").shape == (0, 5)


@pytest.mark.parametrize("dtype", SOURCE_DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, PART // 2 + 1), (2 * PART,)])
def test_numbers_that_are_not_finite_are_found_anywhere(dtype: str, shape: tuple[int, ...]) -> None:
    torch_dtype = getattr(torch, dtype)
    limits = torch.finfo(torch_dtype)
    source = torch.full(shape, limits.max, dtype=torch_dtype)
    source.view(-1)[::2] = limits.min
    source.view(-1)[::3] = limits.smallest_normal / 2
    assert all_finite(to_host(source))
    for place in {0, source.numel() // 2, source.numel() - 1}:
        for bad in (torch.nan, -torch.nan, torch.inf, -torch.inf):
            spoiled = source.clone()
            spoiled.view(-1)[place] = bad
            assert not all_finite(to_host(spoiled)) and not all_finite(to_host(spoiled).T)


def test_payloads_of_nan_are_found() -> None:
    for bits in (0x7F81, 0x7FFF, 0xFF80, 0xFFC1):
        assert not all_finite(np.array([0, bits], np.uint16))


def test_pickle_without_torch_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(weight_files, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"^/.*pytorch_model.bin is a pickle, .*; pip install 'triforce\[torch\]', or"):
        open_archives(tmp_path)


WEIGHTS_WITHOUT_TORCH = """
import sys
from pathlib import Path
from triforce.checkpoint import weights
from triforce.checkpoint.gguf import weights as gguf_weights
from triforce.checkpoint.hf_config import model_config
from triforce.checkpoint.model_files import open_model
from triforce.eagle import head_files

for folder, dtype in zip(sys.argv[1:], ("bfloat16", "float16", "float32")):
    files = open_model(folder)
    config = model_config(files.config, vocab_size=files.config.vocab_size, context=None)
    archives = files.archives(packed=False)
    read = weights.read_weights(files.path, archives, config, rows=files.config.vocab_size, dtype=dtype)
    print(weights.fingerprint(config, read)[:8], read.dtype, config.rope.tables([0], 9)[0].shape)
print([name for name in ("torch", "transformers", "safetensors") if name in sys.modules])
"""


def test_weights_are_read_without_torch(tmp_path: Path) -> None:
    folders = [str(save(tiny_model(), tmp_path / str(number))) for number in range(3)]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WEIGHTS_WITHOUT_TORCH), *folders], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": path}, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *fingerprints, imported = done.stdout.splitlines()
    assert imported == "[]" and len({line.split()[0] for line in fingerprints}) == 3


def test_bits_of_unsigned_numbers_are_no_weights(tmp_path: Path) -> None:
    """An array of the type would pass for bfloat16."""
    from triforce.engine.model_loader import load

    folder = save(tiny_model(), tmp_path)
    change(folder, lambda tensor: tensor.bfloat16().view(torch.uint16))
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight is U16, which is not supported"):
        load(folder, device="cpu")


def change(folder: Path, function: Callable[[Any], Any]) -> None:
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = function(tensors["model.norm.weight"])
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("kernels", [None, dispatch.native])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.uint16, np.float32])
def test_bit_sum_is_that_of_whole_numbers(monkeypatch: pytest.MonkeyPatch, kernels: Any, dtype: type) -> None:
    """Fingerprints of earlier versions have this sum: bytes count from 0, larger numbers have a sign."""
    monkeypatch.setattr(dispatch, "native", kernels)
    draw = np.random.default_rng(0)
    size = np.dtype(dtype).itemsize
    for count in (0, 1, 31, PART + 5, 3 * PART):
        for begin in (0, 1):  # an address that is not aligned
            data = draw.integers(128, 256, begin + count * size, np.uint8).tobytes()
            expected = sum(int.from_bytes(data[i : i + size], "little") for i in range(begin, len(data), size))
            expected -= count << 8 * size if size > 1 else 0  # all upper bits are set
            assert bit_sum(np.frombuffer(data, dtype, count, begin)) == expected, (count, begin)
