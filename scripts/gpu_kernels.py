"""Writes compilers' figures of kernels for GPUs to docs/data/gpu_kernels.toml: python -m scripts.gpu_kernels [ARCH ...]

Without ARCH the figures are for all architectures. An architecture that is not in build/compiled takes a minute or two.
`python -m scripts.docs` makes the table of docs/contributing/gpu-kernels.md from this file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from tests.helpers.cuda.compiled import SHARED, TABLE, all_faults, digest, kept

MODEL = "Llama-3.1-8B"
DRAFT = "Llama-68M, drafting"
SAMPLING = "vocabulary of 128,256"
SHOWN: dict[str, tuple[str, ...]] = {
    **{f"{MODEL}, width {width}": ("_splits", "_merge", "_weigh") for width in (1, 8)},
    DRAFT: ("_splits", "_go_on"),
    **{f"{MODEL}, width {width}, int8 KV": ("_splits",) for width in (1, 8)},
    **{f"weights of type {kind}": ("_times",) for kind in ("Q4_0", "Q4_K", "Q6_K")},
    SAMPLING: (
        "_peaks", "_shortlist", "_join", "_cut", "race_parts", "close_race", "share_parts", "judge_parts",
    ),
}  # fmt: skip
"""The shown kernels of each case."""


def kernels(rows: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the rows of the table, from the rows of `compile_all` by architecture.

    If a kernel is launched in several ways, its figures are the maxima over the launches.
    """
    kernel_rows = []
    for case, names in SHOWN.items():
        for name in names:
            case_rows = [row for arch in rows for row in rows[arch] if (row["case"], row["kernel"]) == (case, name)]
            row_head = {"kernel": name.lstrip("_"), "case": case}
            kernel_rows += [row_head | _maxima(kind) for kind in _by_kind(case_rows) if kind]
    return kernel_rows


def _by_kind(rows: list[dict[str, Any]]) -> Sequence[list[dict[str, Any]]]:
    """Return the rows of NVIDIA's architectures, and those of AMD's, whose registers are not comparable."""
    return [[row for row in rows if row["arch"].startswith(kind)] for kind in ("sm_", "gfx")]


def _maxima(rows: list[dict[str, Any]]) -> dict[str, Any]:
    programs, warps, archs = (sorted({row[name] for row in rows}) for name in ("programs", "warps", "arch"))
    maxima = {name: max(row[name] for row in rows) for name in ("registers", "spills", "shared")}
    return {"archs": archs, "programs": programs, "warps": warps, **maxima}


def toml(rows: list[dict[str, Any]], sources: dict[str, Any]) -> str:
    """Return TOML with a table for `sources`, and one for each row. JSON's strings, numbers and lists are TOML's."""
    parts = ["# What compilers say of kernels as they are launched: python -m scripts.gpu_kernels"]
    for name, row in [("[sources]", sources), *(("[[kernels]]", row) for row in rows)]:
        parts.append("\n".join([name, *(f"{key} = {json.dumps(value)}" for key, value in row.items())]))
    return "\n\n".join(parts) + "\n"


def text(archs: Sequence[str]) -> str:
    """Return the text of the data file, from the current sources of the kernels."""
    rows = {arch: kept(arch) for arch in archs}
    faultless = [arch for arch in archs if not all_faults(rows[arch])]
    return toml(kernels(rows), {"digest": digest(), "archs": faultless})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archs", nargs="*", metavar="ARCH", help=f"of {', '.join(SHARED)}")
    archs = parser.parse_args().archs or list(SHARED)
    if unknown := [arch for arch in archs if arch not in SHARED]:
        parser.error(f"{unknown[0]} is not one of {', '.join(SHARED)}")
    TABLE.write_text(text(archs), encoding="utf-8")
    print(f"{TABLE.name} is written")


if __name__ == "__main__":
    main()
