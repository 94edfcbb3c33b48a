"""Models of strangers: configs beyond their tensors, names that terminals obey, and pickles that ask for much.

Each case is opened in a fork, with limits on time and memory: one line, exit code 2.
"""

from __future__ import annotations

import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.forked_case import Limits, run_case
from tests.helpers.forked_trial import forked
from tests.helpers.fuzz_kinds import eagle_folder, pickle_weights
from tests.helpers.fuzz_kinds.config_json import ASKED, copied, generated
from tests.helpers.gguf_models import write_model
from tests.helpers.safetensors_bytes import parts, write
from tests.helpers.tiny_checkpoint import edit
from triforce.checkpoint import passed_trials, pickle_file
from triforce.checkpoint.hub import SHIPPED
from triforce.checkpoint.weight_files import open_archives
from triforce.cli import main
from triforce.engine.model_loader import load
from triforce.errors import ModelError, TriforceError, escaped
from triforce.llm import LLM

LIMITS = Limits(seconds=10, bytes=128 << 20)
MOST = (1 << 31) - 1
ESCAPES = "a\nb\x1b[2J\u202e\ud800"


def said_of(folder: Path, open_case: Callable[[Path], int]) -> str:
    """The one line of a refusal."""
    outcome = run_case(0, folder, open_case, LIMITS)
    assert not outcome.fault and outcome.code == 2, outcome
    return outcome.said


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
    family, changes, said = CONFIGS[case]
    edit(copied(family, tmp_path) / "config.json", **changes)
    assert re.search(said, said_of(tmp_path, command))


@pytest.mark.parametrize("family", ["llama-biases", "mistral-window", "gemma-3"])
def test_positions_and_windows_without_end_take_no_memory(family: str, tmp_path: Path) -> None:
    """Of what a text does not reach nothing is made; a server, which keeps room for all of it, is refused."""
    window = {} if family == "llama-biases" else {"sliding_window": 1 << 29}
    edit(copied(family, tmp_path) / "config.json", max_position_embeddings=MOST, **window)
    assert not run_case(0, tmp_path, asked, LIMITS)._replace(said="").fault
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
    data, key = file.read_bytes(), b"llama.rope.dimension_count"
    for number, said in ((MOST - 1, "key_length = 2147483646 is not supported"), (4096, "q_proj.weight has shape")):
        other = b"llama.attention.key_length"  # as long as the other key
        assert len(other) == len(key)
        at = data.index(key)
        file.write_bytes(
            data[:at]
            + other
            + data[at + len(key) : at + len(key) + 4]
            + number.to_bytes(4, "little")
            + data[at + len(key) + 8 :]
        )
        assert said in said_of(file, asked)


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
    "float8": (spoil_tensor("fc.weight", lambda fc: fc.to(torch.float8_e4m3fn)), "fc.weight is torch.float8_e4m3fn"),
    "complex": (spoil_tensor("norm.weight", lambda norm: norm.to(torch.complex64)), "norm.weight is torch.complex64"),
}


@pytest.mark.parametrize("case", DRAFTS)
def test_feature_draft_that_is_spoiled_is_one_line(case: str, tmp_path: Path) -> None:
    spoil, said = DRAFTS[case]
    spoil(Path(shutil.copytree(eagle_folder.whole() / "published", tmp_path / "draft")))
    assert said in said_of(tmp_path, eagle_folder.open_case)


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
    assert len(long) < 2100 and long.endswith("; download it again")


def pickled(folder: Path, state: Any) -> Path:
    """A folder with such a pickle in the place of its weights."""
    weights = copied("llama-biases", folder) / "model.safetensors"
    tensors = load_file(weights)
    weights.unlink()
    torch.save(state(tensors), folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


Q = "model.layers.0.self_attn.q_proj.weight"
PICKLES: dict[str, tuple[Callable[[dict[Any, Any]], Any], str]] = {
    "a number for a name": (lambda state: state | {7: state[Q]}, "has '7' for a tensor's name, which is no text"),
    "mixed names": (lambda state: {None: state[Q], ("a", 1): state[Q]}, "which is no text"),
    "escapes in a name": (lambda state: state | {ESCAPES: state[Q]}, r"tensor a\nb\x1b[2J\u202e"),
    "sparse": (
        lambda state: state | {Q: state[Q].to_sparse()},
        f"tensor {Q} is no plain tensor of numbers (sparse_coo",
    ),
    "meta": (lambda state: state | {Q: state[Q].to("meta")}, "is no plain tensor of numbers (strided on meta)"),
    "expanded": (lambda state: state | {Q: torch.ones(1).expand(1 << 20, 1 << 20)}, "more numbers than the file"),
    "the same often": (
        lambda state: {f"{n}": torch.ones(1 << 16) for n in range(1)} | dict.fromkeys(map(str, range(9)), BLOCK),
        "twice the bytes",
    ),
}
BLOCK = torch.ones(1 << 16)


@pytest.mark.parametrize("case", PICKLES)
def test_pickle_of_what_are_no_weights_is_one_line(case: str, tmp_path: Path) -> None:
    make, said = PICKLES[case]
    pickled(tmp_path, make)
    assert said in said_of(tmp_path, pickle_weights.open_case)


def replace_program(file: Path, program: bytes) -> None:
    with zipfile.ZipFile(file) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, program if name.endswith("data.pkl") else data)


def test_pickle_that_asks_for_memory_is_refused_by_its_trial(tmp_path: Path) -> None:
    """In a process of its own: 64 GiB, of which a reader that fills them would take each byte."""
    file = pickled(tmp_path, lambda state: state)
    replace_program(file, b"\x80\x02c__builtin__\nbytearray\n\x8a\x05\x00\x00\x00\x00\x10\x85R.")
    with pytest.raises(ModelError, match=r"pytorch_model.bin takes more memory than a file .*safetensors"):
        open_archives(tmp_path)


def test_pickle_that_keeps_its_reader_busy_is_refused_by_its_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickle_file, "SECONDS", 1)
    monkeypatch.setattr(passed_trials, "tried", forked)
    monkeypatch.setattr("torch.load", busy)
    pickled(tmp_path, lambda state: state)
    with pytest.raises(
        ModelError, match=r"the weights are not opened: it takes more than 1 s or 10\d\d MiB.*safetensors"
    ):
        open_archives(tmp_path)


def busy(*_: object, **__: object) -> None:
    while True:
        pass


def test_pickle_that_passed_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trials = list[Any]()
    monkeypatch.setattr(passed_trials, "tried", lambda *given: trials.append(given) or forked(*given))
    file = pickled(tmp_path / "model", lambda state: state)
    for _ in range(2):
        open_archives(file.parent)
    assert len(trials) == 1
    torch.save(torch.load(file) | {"more": torch.ones(1)}, file)
    open_archives(file.parent)
    assert len(trials) == 2


def test_shipped_pair_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(*given: object) -> None:
        raise AssertionError("a trial takes a second")

    monkeypatch.setattr(passed_trials, "tried", tried)
    monkeypatch.setattr("subprocess.Popen", tried)
    for folder in SHIPPED:
        load(folder, device="cpu")
