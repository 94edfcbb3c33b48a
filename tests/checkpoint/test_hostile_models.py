"""Untrusted models: configs beyond their tensors, drafts of other shapes, and names with terminal escapes.

Each case is opened in a fork, with limits on time and memory: one line, exit code 2.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.forked_case import run_case
from tests.helpers.fuzz_kinds import eagle_folder
from tests.helpers.fuzz_kinds.config_json import ASKED, copied, generated
from tests.helpers.gguf_models import write_model
from tests.helpers.one_line import LIMITS, said_of
from tests.helpers.safetensors_bytes import parts, write
from tests.helpers.tiny_checkpoint import edit
from triforce.cli import main
from triforce.errors import ModelError, TriforceError, escaped
from triforce.llm import LLM

MOST = (1 << 31) - 1
ESCAPES = "a\nb\x1b[2J\u202e\ud800"


def asked(folder: Path) -> int:
    return generated([str(folder), "--draft", "none", *ASKED])


CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "head": ("llama-biases", dict(head_dim=MOST - 1), "head_dim = 2147483646 is not supported"),
    "smaller head": ("llama-biases", dict(head_dim=65_536), r"q_proj.weight has shape \[64, 64\]"),
    "heads": ("llama-biases", dict(num_attention_heads=MOST, num_key_value_heads=MOST), "q_proj.weight has shape"),
    "tokens": ("llama-biases", dict(vocab_size=10**9), r"embed_tokens.weight has shape \[300, 64\].*1000000000, 64"),
    "hidden": ("llama-biases", dict(hidden_size=MOST), "embed_tokens.weight has shape"),
    "inner": ("llama-biases", dict(intermediate_size=MOST), "gate_proj.weight has shape"),
    "layers": (
        "llama-biases",
        dict(num_hidden_layers=10_000),
        "asks for 10000 layers, but the weights have 35 tensors",
    ),
    "experts": ("qwen3-moe", dict(num_experts=4096, num_local_experts=4096), "asks for 2 layers of 4096 experts each"),
    "stacked experts": ("gpt-oss", dict(num_local_experts=4096), "gate_up_proj.* has shape .*asks for 4096 experts"),
    "shared experts": ("glm-4.5", dict(n_shared_experts=64), "shared_experts.*has shape"),
    "dense layers": ("glm-4.5", dict(intermediate_size=MOST), "gate_proj.weight has shape"),
}


@pytest.mark.parametrize("command", [asked, lambda folder: main(["info", str(folder)])], ids=["generate", "info"])
@pytest.mark.parametrize("case", CONFIGS)
def test_config_beyond_its_tensors_is_one_line(case: str, command: Callable[[Path], int], tmp_path: Path) -> None:
    family, changes, message = CONFIGS[case]
    edit(copied(family, tmp_path) / "config.json", **changes)
    assert re.search(message, said_of(tmp_path, command))


@pytest.mark.parametrize("family", ["llama-biases", "mistral-window", "gemma-3"])
def test_positions_and_windows_without_end_take_no_memory(family: str, tmp_path: Path) -> None:
    """Memory is not taken for positions that a text does not reach. A server, which reserves all of them, refuses."""
    window = {} if family == "llama-biases" else {"sliding_window": 1 << 29}
    edit(copied(family, tmp_path) / "config.json", max_position_embeddings=MOST, **window)
    assert not run_case(0, tmp_path, asked, LIMITS)._replace(stderr_end="").fault
    assert "KV cache needs" in said_of(tmp_path, opened)


def opened(folder: Path) -> int:
    try:
        LLM(folder, None).open()
    except TriforceError as error:
        print(f"triforce: error: {error}", file=sys.stderr)
        return 2
    return 0


def test_gguf_head_without_end_is_one_line(tmp_path: Path) -> None:
    file = write_model(tmp_path, "Q8_0", {}, num_hidden_layers=1).gguf
    data = file.read_bytes()
    key = b"llama.rope.dimension_count"
    for number, message in ((MOST - 1, "key_length = 2147483646 is not supported"), (4096, "q_proj.weight has shape")):
        other_key = b"llama.attention.key_length"  # as long as the other key
        assert len(other_key) == len(key)
        at = data.index(key)
        file.write_bytes(
            data[:at]
            + other_key
            + data[at + len(key) : at + len(key) + 4]
            + number.to_bytes(4, "little")
            + data[at + len(key) + 8 :]
        )
        assert message in said_of(file, asked)


def spoil_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def spoil(draft: Path) -> None:
        tensors = load_file(draft / "model.safetensors")
        tensors[name] = change(tensors[name])
        save_file(tensors, draft / "model.safetensors")

    return spoil


def spoil_config(**changes: Any) -> Callable[[Path], None]:
    return lambda draft: edit(draft / "config.json", **changes)


DRAFTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "head": (spoil_config(head_dim=MOST - 1), "head_dim = 2147483646"),
    "odd head": (spoil_config(head_dim=17), "head_dim = 17 is not supported"),
    "choices": (spoil_config(draft_vocab_size=10**9), "draft_vocab_size = 1000000000"),
    "choices of as many": (spoil_config(draft_vocab_size=10**9, vocab_size=10**9), "proposes 1000000000 tokens"),
    "inner": (spoil_config(intermediate_size=MOST), "gate_proj.weight has shape"),
    "heads": (spoil_config(num_attention_heads=MOST), "q_proj.weight has shape"),
    "window": (spoil_config(triforce={"window": MOST}), "triforce.window = 2147483647"),
    "offsets in a row": (spoil_tensor("d2t", lambda d2t: d2t[None]), "table d2t does not name"),
    "an offset": (spoil_tensor("d2t", lambda d2t: d2t[0].clone()), "table d2t does not name"),
    "offsets that are no integers": (spoil_tensor("d2t", lambda d2t: d2t.to(torch.complex64)), "table d2t"),
    "choices in a column": (spoil_tensor("t2d", lambda t2d: t2d[:, None].clone()), "table d2t does not name"),
    "fewer choices": (spoil_tensor("t2d", lambda t2d: t2d[:7].clone()), "table d2t does not name"),
    "float8": (spoil_tensor("fc.weight", lambda fc: fc.to(torch.float8_e4m3fn)), "fc.weight is F8_E4M3"),
    "complex": (spoil_tensor("norm.weight", lambda norm: norm.to(torch.complex64)), "norm.weight is C64"),
}


@pytest.mark.parametrize("case", DRAFTS)
def test_eagle_head_that_is_spoiled_is_one_line(case: str, tmp_path: Path) -> None:
    spoil, message = DRAFTS[case]
    spoil(Path(shutil.copytree(eagle_folder.whole() / "published", tmp_path / "draft")))
    assert message in said_of(tmp_path, eagle_folder.open_case)


def test_tensor_name_that_terminals_obey_is_escaped(tmp_path: Path) -> None:
    file = copied("llama-biases", tmp_path) / "model.safetensors"
    header, data = parts(file)
    header[ESCAPES.replace("\ud800", "")] = header.pop("model.norm.weight")
    write(file, header, data)
    edit(tmp_path / "config.json", num_hidden_layers=2)
    assert "lack the tensor model.norm.weight" in said_of(tmp_path, asked)
    write(
        file,
        header
        | {
            "model.norm.weight": header.pop(ESCAPES.replace("\ud800", "")),
            "\x1b[2J\n": EMPTY | {"data_offsets": [len(data)] * 2},
        },
        data,
    )
    assert r"tensor \x1b[2J\n is not part" in said_of(tmp_path, asked)


EMPTY = {"dtype": "F32", "shape": [0]}


def test_error_text_is_one_printable_line() -> None:
    assert str(ModelError(f"tensor {ESCAPES}")) == r"tensor a\nb\x1b[2J\u202e\ud800"
    assert escaped("naïve 東京 🙂\u00a0") == "naïve 東京 🙂\u00a0"
    long = escaped("x" * 10**6 + "; download it again")
    assert len(long) < 910 and long.endswith("; download it again")
    assert len(escaped("\x1b" * 10**6)) < 910
