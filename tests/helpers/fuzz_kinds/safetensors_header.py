"""Cases of safetensors: headers with wrong names, types, shapes, offsets or length, alone or with the config."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random

from tests.helpers.fuzz_kinds.config_json import ASKED, copied, generated
from tests.helpers.hostile_values import NUMBERS, hostile_value
from tests.helpers.safetensors_bytes import Header, parts, write

FAMILIES = ["llama-biases", "gpt-oss", "qwen3-moe"]
TYPES = ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E8M0", "F4", "F6_E2M3", "C64", "I64", "U16", "I8", "BOOL", "X", ""]
NAMES = [
    "", "\n", "\x1b]0;owned\x07", "\u202e", "a" * 100_000, "model.layers.99999.mlp.up_proj.weight", "__metadata__",
    "model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj_blocks", "language_model.x",
]  # fmt: skip

WHOLES = [partial(copied, family) for family in FAMILIES]


def make_case(random: Random, folder: Path) -> None:
    copied(random.choice(FAMILIES), folder)
    file = folder / "model.safetensors"
    header, data = parts(file)
    for _ in range(random.choice([1, 1, 2, 3])):
        spoil(random, header, len(data))
    write(file, header, data)
    if random.random() < 0.3:
        spoil_bytes(random, file)


def spoil(random: Random, header: Header, size: int) -> None:
    """Change one thing in a header."""
    name = random.choice([name for name in header if name != "__metadata__"] or [""])
    entry = header.get(name)
    if not isinstance(entry, dict) or "data_offsets" not in entry:
        return
    shape = entry.get("shape")
    shape = shape if isinstance(shape, list) else []  # an earlier change may have spoiled it
    match random.randrange(9):
        case 0:
            header[random.choice(NAMES) or f"{name}\n\x1b[2J"] = header.pop(name)
        case 1:
            header[random.choice(NAMES)] = {
                "dtype": "F32",
                "shape": [random.choice([0, 1 << 40])],
                "data_offsets": [size] * 2,
            }
        case 2:
            entry["dtype"] = random.choice(TYPES)
        case 3:
            entry["dtype"], entry["shape"] = random.choice(TYPES[4:8]), [*shape, 4]
        case 4:
            entry["shape"] = shape[::-1] if random.random() < 0.3 else [1, *shape]
        case 5:
            entry["shape"] = [random.choice(NUMBERS) for _ in range(random.choice([0, 1, 2, 3, 70]))]
        case 6:
            entry["data_offsets"] = [random.choice([*NUMBERS, size]) for _ in range(2)]
        case 7:
            entry[random.choice(["dtype", "shape", "data_offsets"])] = hostile_value(random)
        case 8:
            header["__metadata__"] = hostile_value(random)


def spoil_bytes(random: Random, file: Path) -> None:
    """Cut a file, lengthen it, or change bytes of its header."""
    data = bytearray(file.read_bytes())
    match random.randrange(4):
        case 0:
            del data[random.randrange(len(data)) :]
        case 1:
            data[:8] = random.choice([0, 1, len(data), 1 << 31, (1 << 64) - 1, len(data) - 8]).to_bytes(8, "little")
        case 2:
            data += b"\0" * random.choice([1, 4096])
        case 3:
            for _ in range(random.choice([1, 5, 50])):
                data[random.randrange(min(len(data), 5000))] = random.randrange(256)
    file.write_bytes(data)


def open_case(folder: Path) -> int:
    """Generate a text."""
    return generated([str(folder), "--draft", "none", "--mode", "ar", *ASKED])
