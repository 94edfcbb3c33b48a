"""What is wrong with a compiled kernel, by what an architecture has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

SHARED = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_120": 99, "gfx942": 64}
"""KiB of shared memory that a program may have."""


def faults(row: dict[str, Any]) -> Iterator[str]:
    """Of a row of `compile_all`."""
    name = f"{row['kernel']} ({row['case']}, {row['arch']})"
    if row["spills"]:
        yield f"{name}: {row['spills']} bytes of registers are spilled"
    if row["shared"] > SHARED[row["arch"]] << 10:
        yield f"{name}: {row['shared']} bytes of shared memory, more than there are"
    if row["kernel"] == "_splits" and row["bits"] == 16 and row["arch"] != "gfx942":
        if row["copies"] < 16 or row["narrow"]:
            yield f"{name}: {row['narrow']} loads of keys or values are of two bytes, not copies of 16"
        if row["stages"] > 2 and row["ahead"] < 2:
            yield f"{name}: no keys are on their way while others are computed with"
