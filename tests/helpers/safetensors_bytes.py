"""Safetensors as bytes, with headers that its library would not write."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from tests.helpers.hostile_values import as_json

Header = dict[str, Any]


def parts(file: Path) -> tuple[Header, bytes]:
    """Return the header of a file, and its data."""
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write(file: Path, header: Header, data: bytes) -> None:
    """Write a file of a header and data."""
    text = as_json(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
