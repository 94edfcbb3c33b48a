"""Memory of loading a GGUF file: its packed weights, and little beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from tests.helpers.gguf_blocks import random_blocks
from tests.helpers.gguf_files import write_gguf
from tests.helpers.gguf_models import MIXED, metadata, write_model
from tests.helpers.slow_parameters import slow
from triforce.backends import dispatch
from triforce.checkpoint.gguf.weights import FAMILIES

MB, LAYERS = 1 << 20, 13
MODELS: dict[str, tuple[int, str, dict[str, str], int]] = {
    "Q4_K": (1024, "Q4_K", MIXED, 0),
    "Q4_K, lower tiers": (1024, "Q4_K", MIXED, 4),
    "F16": (512, "F16", {}, 0),
    "BF16": (512, "BF16", {}, 0),
    "F32 and F16": (512, "F32", {"ffn_up": "F16"}, 0),
}
"""Hidden size, type, other types of some tensors, bits of lower tiers. Few matrices have 2 MB, which is a huge page."""
WATCHED = """
import json, sys
from pathlib import Path
from triforce.engine.model_loader import load, trim_heap

def status(name):
    (line,) = (each for each in open("/proc/self/status") if each.startswith(name))
    return int(line.split()[1]) << 10

small = load(sys.argv[1], device="cpu")
trim_heap()
empty = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
large = load(sys.argv[2], device="cpu", bits=int(sys.argv[3]))
peak = status("VmHWM")
trim_heap()
print(json.dumps([status("VmRSS") - empty, peak - empty]))
"""


def write_large(file: Path, C: int, default_kind: str, kinds: dict[str, str]) -> Path:
    """Write a model of 49 MB or more. `kinds` gives the types of tensors whose type is not `default_kind`."""
    inner = C * 3 // 2
    P = C // 2
    shapes = {"attn_k": (P, C), "attn_v": (P, C), "ffn_gate": (inner, C), "ffn_up": (inner, C), "ffn_down": (C, inner)}
    matrices = [name for name in FAMILIES["llama"] if "norm" not in name and name.endswith("weight")]
    names = {f"blk.{i}.{name}": shapes.get(name.split(".")[0], (C, C)) for i in range(LAYERS) for name in matrices}
    names |= {"token_embd.weight": (300, C), "output.weight": (300, C)}
    tensors: dict[str, Any] = {}
    for name, shape in names.items():
        kind = kinds.get(name.split(".")[-2], default_kind)
        tensors[name] = GGMLQuantizationType[kind], random_blocks(kind, *shape, size=1e-4).blocks.numpy()
    norms = ["output_norm.weight", *(f"blk.{i}.{part}_norm.weight" for i in range(LAYERS) for part in ("attn", "ffn"))]
    config = SimpleNamespace(
        hidden_size=C, intermediate_size=inner, num_hidden_layers=LAYERS, num_attention_heads=C // 64,
        num_key_value_heads=P // 64, head_dim=64, max_position_embeddings=128, vocab_size=300,
    )  # fmt: skip
    return write_gguf(file, metadata(config), tensors | {name: np.ones(C, np.float32) for name in norms})


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="this system does not tell a peak")
@pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built")
@pytest.mark.parametrize("model", ["Q4_K", *slow(*(name for name in MODELS if name != "Q4_K"))])
def test_gguf_load_takes_memory_of_packed_weights(tmp_path: Path, model: str) -> None:
    """Any number of tiers reads the same weights.

    The slack is for tables of a process and for pages that are not full.
    """
    *what, bits = MODELS[model]
    small = write_model(tmp_path / "small", "Q4_K").gguf
    large = write_large(tmp_path / "large.gguf", *what)
    command = [sys.executable, "-c", WATCHED, str(small), str(large), str(bits)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    loaded_bytes, peak = json.loads(done.stdout)
    packed = large.stat().st_size
    slack = 2 * MB
    print(f"{packed / MB:.1f} MB packed, {loaded_bytes / MB:.1f} after loading, {peak / MB:.1f} at the most")
    assert packed > 49 * MB
    assert packed * 0.95 < loaded_bytes < 1.1 * packed + slack
    assert peak < 1.3 * packed + slack
