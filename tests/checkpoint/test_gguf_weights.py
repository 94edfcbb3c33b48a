"""Weights of GGUF files: numbers as the format's own library reads them, and the same weights kept packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, dequantize
from numpy.typing import NDArray

from tests.helpers.gguf_blocks import HALVES
from tests.helpers.gguf_files import HEADS
from tests.helpers.gguf_models import MIXED, Written, numbers_of, write_model
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from triforce.arrays import float32
from triforce.backends import dispatch
from triforce.checkpoint.hf_config import model_config
from triforce.checkpoint.model_files import open_model
from triforce.checkpoint.weights import read_weights
from triforce.cli import main
from triforce.engine.model_loader import load
from triforce.errors import ModelError, RequestError
from triforce.model.weights import Matrix, QuantizedWeight, Weights

NATIVE = pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built")
FILES: dict[str, tuple[Any, ...]] = {
    "llama, Q4_0": ("Q4_0",),
    "llama, like Q4_K_M": ("Q4_K", MIXED),
    "llama, norms of few bits": ("Q4_0", {"output_norm": "Q8_0", "attn_norm": "Q4_1", "ffn_norm": "BF16"}),
    "llama, numbers, tied": ("F16", {"attn_v": "BF16", "ffn_down": "F32"}, "llama", True),
    "qwen2, Q5_1, tied": ("Q5_1", {"token_embd": "Q8_0"}, "qwen2", True),
    "qwen3, Q5_0": ("Q5_0", {"attn_q": "Q4_1"}, "qwen3"),
}


def written(folder: Path, kind: str, kinds_by_name: Any = None, family: str = "llama", tied: bool = False) -> Written:
    return write_model(folder, kind, kinds_by_name, family, tie_word_embeddings=tied)


@pytest.fixture(scope="module", params=FILES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return written(tmp_path_factory.mktemp("model"), *FILES[request.param])


def read(path: Path, packed: bool, dtype: str = "float32") -> Weights:
    files = open_model(path)
    config = model_config(files.config, vocab_size=300, context=None)
    return read_weights(path, files.archives(packed=packed), config, rows=300, dtype=dtype)


def as_numbers(weight: Matrix) -> NDArray[np.float32]:
    if not isinstance(weight, QuantizedWeight):
        return float32(weight)
    found: NDArray[np.float32] = numbers_of(GGMLQuantizationType[weight.kind], weight.blocks)
    return found


def count_differing(model: Written, packed: bool) -> int:
    """Return how many tensors of the file differ from the folder's."""
    dtype = "bfloat16" if packed else "float32"
    pairs = zip(read(model.gguf, packed, dtype).tensors(), read(model.folder, False).tensors(), strict=True)
    return sum(not np.array_equal(as_numbers(ours), as_numbers(theirs)) for ours, theirs in pairs)


@pytest.mark.parametrize("packed", [False, True], ids=["numbers", "packed"])
def test_gguf_weights_equal_those_of_folder(model: Written, packed: bool) -> None:
    assert count_differing(model, packed) == 0


@pytest.mark.parametrize("mutant", caught_in("test_gguf_weights_mutant_is_noticed"), ids=str)
def test_gguf_weights_mutant_is_noticed(tmp_path: Path, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [written(tmp_path / family, "Q4_0", family=family) for family in ("llama", "qwen2")]
    mutant.apply(monkeypatch)
    assert sum(count_differing(file, packed) for file in files for packed in (False, True))


def test_gguf_packed_weights_keep_their_types(tmp_path: Path) -> None:
    kinds_by_name = MIXED | {"attn_k": "F16", "attn_q": "BF16", "attn_output": "F32"}
    weights = read(written(tmp_path, "Q4_K", kinds_by_name).gguf, True, "bfloat16")
    layer = weights.layers[1]
    parts = (layer.q_proj_QC, layer.k_proj_PC, layer.v_proj_PC, layer.o_proj_CQ, layer.gate_proj_IC)
    kinds = [
        weight.kind for weight in (weights.embedding_VC, weights.head_VC, *parts) if isinstance(weight, QuantizedWeight)
    ]
    assert kinds == ["Q5_K", "Q6_K", "BF16", "F16", "Q6_K", "F32", "Q4_K"]
    assert {layer.input_norm_C.dtype, layer.post_norm_C.dtype, weights.norm_C.dtype} == {np.dtype(np.float32)}


def test_gguf_rows_are_taken_from_the_file(tmp_path: Path) -> None:
    """The reader is the library's: values lie where it reads them, and rows of queries are interleaved."""
    file = written(tmp_path, "Q4_1").gguf
    layer = read(file, False).layers[1]
    theirs = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in GGUFReader(file).tensors}
    assert np.array_equal(theirs["blk.1.attn_output.weight"], as_numbers(layer.o_proj_CQ))
    q = theirs["blk.1.attn_q.weight"][: HEADS["head_dim"]]
    assert np.array_equal(np.concatenate([q[::2], q[1::2]]), as_numbers(layer.q_proj_QC)[: len(q)])


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_K", "F16"])
def test_gguf_part_is_that_of_its_numbers(tmp_path: Path, kind: str) -> None:
    weight = read(written(tmp_path, kind).gguf, True, "bfloat16").layers[0].down_proj_CI
    assert isinstance(weight, QuantizedWeight)
    part = weight.part(slice(32, 100), slice(256, 512))
    assert part.shape == (68, 256) and np.array_equal(as_numbers(part), as_numbers(weight)[32:100, 256:])
    for cut in (slice(0, weight.block // 2), slice(weight.block // 2, 512), slice(0, 16)) if kind != "F16" else ():
        with pytest.raises(RequestError, match=rf"{kind} are in blocks of {weight.block} .*leave out --tp-all-reduce"):
            weight.part(slice(None), cut)


def test_gguf_fingerprints_differ_by_type_and_value(tmp_path: Path) -> None:
    kinds = ("Q4_0", "Q4_1", "Q4_K", "Q5_K", "F32", "F16")
    files = [written(tmp_path / kind, kind).gguf for kind in kinds]
    changed = written(tmp_path / "changed", "Q4_0").gguf
    data = bytearray(changed.read_bytes())
    data[-2000] ^= 1
    changed.write_bytes(data)
    fingerprints = [load(file, device="cpu").fingerprint for file in (*files, changed)]
    assert len({*fingerprints}) == len(fingerprints)
    assert load(files[0], device="cpu").fingerprint == fingerprints[0] != load(files[0], dtype="float32").fingerprint


def with_bad_scale(file: Path, name: str, kind: str) -> Path:
    """Return the file, with an infinite scale in a block in the middle of a tensor."""
    (tensor,) = (candidate for candidate in GGUFReader(file).tensors if candidate.name == name)
    size = GGML_QUANT_SIZES[tensor.tensor_type][1]
    at = tensor.data_offset + tensor.n_bytes // size // 2 * size + HALVES.get(kind, (0,))[0]
    data = bytearray(file.read_bytes())
    data[at : at + 2] = np.float16(np.inf).tobytes()
    file.write_bytes(data)
    return file


SPOILED = {
    "blk.1.ffn_up.weight": "layer 1: up_proj",
    "blk.0.attn_q.weight": "layer 0: q_proj",
    "output.weight": "the head: weight",
    "token_embd.weight": "the embedding: weight",
}


@NATIVE
@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "F16"])
@pytest.mark.parametrize("name", SPOILED)
def test_gguf_nonfinite_scale_exits_2(tmp_path: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = with_bad_scale(written(tmp_path, kind).gguf, name, kind)
    capsys.readouterr()
    for dtype, tensor_name in (("auto", SPOILED[name]), ("float32", "")):
        assert main(["generate", str(file), "some text", "--dtype", dtype]) == 2
        error = capsys.readouterr().err
        assert error.startswith("triforce: error: ") and error.count("\n") == 1
        assert (
            f"{tensor_name} holds NaN or Inf" in error and str(file) in error and error.endswith("download it again\n")
        )


@pytest.mark.parametrize(
    ("key", "old", "new", "match"),
    [
        ("feed_forward_length", 512, 256, r"mlp.gate_proj.weight has shape \[512, 256\], .* asks for \[256, 256\]"),
        ("attention.head_count_kv", 4, 8, r"attn.k_proj.weight has shape \[64, 256\], .* asks for \[128, 256\]"),
        ("attention.head_count_kv", 4, 2, r"attn.k_proj.weight has shape \[64, 256\], .* asks for \[32, 256\]"),
    ],
)
def test_gguf_tensor_of_wrong_shape_raises(tmp_path: Path, key: str, old: int, new: int, match: str) -> None:
    """All widths are whole blocks. Rows of keys can only be ordered once their number is right."""
    file = written(tmp_path, "Q4_0").gguf
    data = file.read_bytes()
    at = data.index(f"llama.{key}".encode()) + len(f"llama.{key}") + 4
    assert data[at : at + 4] == old.to_bytes(4, "little")
    file.write_bytes(data[:at] + new.to_bytes(4, "little") + data[at + 4 :])
    for dtype in ("auto", "float32"):
        with pytest.raises(ModelError, match=match):
            load(file, device="cpu", dtype=dtype)


def test_gguf_on_torch_path_is_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "native", None)
    file, folder = written(tmp_path, "Q4_K", MIXED)
    ours, theirs = (load(path, device="cpu") for path in (file, folder))
    assert ours.decoder.dtype == "float32" and ours.fingerprint == theirs.fingerprint
