"""The bytes of a model's GGUF file, and the parts of its header."""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFReader

from tests.helpers.gguf_models import MIXED, write_model

Span = tuple[int, int]
"""Start and end of a part in a file."""
HEAD = [(0, 4), (4, 8), (8, 16), (16, 24)]
"""Bytes of magic, version, and two counts."""
SIZES = dict(intermediate_size=256, num_hidden_layers=1, max_position_embeddings=128)


def write_mixed(folder: Path) -> Path:
    """Write a model of one layer whose tensors have several types, and return its file."""
    return write_model(folder, "Q4_K", MIXED, **SIZES).gguf


class GgufParts:
    """A valid file, and the places of its header's parts."""

    def __init__(self, file: Path) -> None:
        reader = GGUFReader(file)
        self.data, self.header = file.read_bytes(), int(reader.data_offset)
        origin = reader.data.__array_interface__["data"][0]
        self.entries: list[list[Span]] = []
        """Parts of each metadata entry and each tensor description: lengths, names, types, values."""
        for field in [*reader.fields.values(), *(tensor.field for tensor in reader.tensors)]:
            places = [part.__array_interface__["data"][0] - origin for part in field.parts]
            spans = [(at, at + part.nbytes) for at, part in zip(places, field.parts, strict=True) if part.nbytes]
            self.entries.append([(at, end) for at, end in spans if 0 <= at < self.header])
        self.tensors = [
            (int(tensor.data_offset), int(tensor.data_offset + tensor.n_bytes)) for tensor in reader.tensors
        ]
