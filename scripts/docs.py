"""Writes what is generated of README.md and docs/: python -m scripts.docs [--check].

Tables of docs/data and benchmarks/results, pictures of docs/data, and the reference, from argparse, pydantic and
docstrings. Tables and the reference stand between comments that name their source. --check writes nothing, and fails
where something is stale.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from statistics import median
from typing import Any

from scripts import docs_models, docs_pictures, docs_reference
from scripts.docs_reference import code, filled, table
from triforce.bench.compare.on_file_tables import TITLES

ROOT = Path(__file__).resolve().parents[1]


def layers(data: dict[str, Any]) -> list[list[str]]:
    rows = [["level", "modules", "what"]]
    for level, row in enumerate(data["levels"]):
        shown = [code(name.removeprefix("triforce.")) for name in row["modules"]]
        rows.append([str(level), ", ".join(shown), row["what"]])
    return rows


def kernel_errors(data: dict[str, Any]) -> list[list[str]]:
    rows = [[k["name"], k["unit"], f"2^{k['float32']}", f"2^{k['bfloat16']}"] for k in data["kernels"]]
    return [["kernel", "error, in units of", "float32", "bfloat16"], *rows]


LEVELS = {"all": "all levels", "fused": "those with a fused multiply-add"}


def level_bits(data: dict[str, Any]) -> list[list[str]]:
    rows = [[k["name"], LEVELS[k["bfloat16"]], LEVELS[k["float32"]]] for k in data["kernels"]]
    return [["one result at", "bfloat16", "float32"], *rows]


def gguf_types(data: dict[str, Any]) -> list[list[str]]:
    rows = [[t["name"], str(t["bits"]), t["scales"], str(t["file"]), str(t["packed"])] for t in data["types"]]
    return [["type", "bits of a code", "scales", "bytes of 256 weights in the file", "packed"], *rows]


def gpu_runs(data: dict[str, Any]) -> list[list[str]]:
    runs = enumerate(data["runs"])
    rows = [[str(n), run["what"], ", ".join(map(code, run["commands"])), run["minutes"]] for n, run in runs]
    return [["#", "what", "command", "minutes"], *rows]


def gpu_kernels(data: dict[str, Any]) -> list[list[str]]:
    rows = [["kernel", "launched by", "compiled for", "programs", "warps", "registers", "spilled", "shared, KiB"]]
    for k in data["kernels"]:
        counts = [", ".join(f"{n:,}" for n in k[name]) for name in ("programs", "warps")]
        needed = [str(k["registers"]), str(k["spills"]), f"{k['shared'] / 1024:.1f}"]
        rows.append([code(k["kernel"]), k["case"], ", ".join(k["archs"]), *counts, *needed])
    return rows


RESULTS = "benchmarks/results"
CELLS = {
    "128k-b1-t0-books": "128K tokens, greedy",
    "32k-b1-t0.6-books": "32K tokens, T = 0.6",
    "8k-b1-t1.2-books": "8K tokens, T = 1.2",
    "512-b1-t1.2-copy": "512 tokens, T = 1.2",
}
"""Cells of `bench speed` that README shows, a losing one among them."""


def numbers(root: Path) -> list[list[str]]:
    """README's rows, of recorded results: plain decoding (or what it is compared with), triforce, and their ratio."""
    rows = [["what", "baseline", "with it", "ratio", "command"]]
    cells = {(row["cell"], row["mode"]): row for row in recorded(root, "speed")}
    for cell, said in CELLS.items():
        plain, auto = (cells[cell, mode] for mode in ("ar", "auto"))
        rates = [f"{row['tokens_per_second']:,.0f}" for row in (plain, auto)]
        rows.append([said, *rates, f"{auto['speedup']:.2f}", code(f"speed {cell}")])
    rows[-1][3] += f" (mode `triforce` {cells[cell, 'triforce']['speedup']:.2f})"
    every = [row["speedup"] for row in cells.values() if row["mode"] == "auto"]
    rows.append([f"mean of {len(every)} cells", "", "", f"{sum(every) / len(every):.2f}", code("make bench")])
    others = [row for row in recorded(root, "compare") if row["context"] == 32768 and row.get("accepted")]
    best = max((row for row in others if row["engine"] != "triforce"), key=lambda row: row["tokens_per_second"])
    ours = next(row for row in others if (row["engine"], row["variant"]) == ("triforce", "auto"))
    both = [row["tokens_per_second"] for row in (best, ours)]
    name = f"32K, best of {len({row['engine'] for row in others}) - 1} other engines"
    rows.append([name, *(f"{x:.0f}" for x in both), f"{both[1] / both[0]:.2f}", code("triforce bench compare")])
    bus = {
        row["mode"]: row for row in recorded(root, "offload_cpu") if row["what"] == "bus" and row.get("kv") != "int8"
    }
    rates = [f"{bus[mode]['tokens_per_second']:.0f}" for mode in ("ar", "triforce")]
    ratio = f"{bus['triforce']['speedup']:.2f}"
    rows.append(["32K, KV read at 2 GB/s", *rates, ratio, code("py -m benchmarks.offload")])
    asked = next(row for row in recorded(root, "documents_cpu") if row["context"] == 16384)
    first, second = (median(asked[which]) for which in ("first", "second"))
    times = f"{first:.1f} s", f"{second:.2f} s", f"{first / second:.0f}"
    rows.append(["16K, 2nd question, first token", *times, code("py -m benchmarks.documents")])
    return rows + on_one_file(root)


def on_one_file(root: Path) -> list[list[str]]:
    """README's rows on one GGUF file: its prompt, and sampled text of a book behind it, by the fastest other engine."""
    report = json.loads((root / RESULTS / "compare_file.json").read_text(encoding="utf-8"))
    cells = {
        (row["what"], row["context"], row.get("workload"), row.get("temperature")): row for row in report["summary"]
    }
    prompt, text = cells["prefill", 7168, None, None], cells["decoding", 7168, "books", 0.6]
    rows = []
    for said, cell, ours in (("`smollm2`, 7K read", prompt, "ar"), ("T = 0.6 behind it", text, "auto")):
        rates = cell["tokens_per_second"]
        theirs = max((name for name in rates if name.split()[0] != "triforce"), key=rates.get)
        shown = [f"{rates[name]:,.0f}" for name in (theirs, f"triforce {ours}")]
        ratio, command = f"{cell['over'][ours][theirs]:.2f}", code("triforce bench compare smollm2 --draft none")
        rows.append([f"{said}, {TITLES[theirs.split()[0]].split()[0]}", *shown, ratio, command])
    return rows


def recorded(root: Path, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((root / RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    return rows


PAGES = {
    layers: "docs/contributing/layout.md",
    level_bits: "docs/concepts/exactness.md",
    kernel_errors: "docs/results/kernels.md",
    gguf_types: "docs/design/backends.md",
    gpu_runs: "docs/gpu.md",
    gpu_kernels: "docs/contributing/gpu-kernels.md",
    docs_models.models: "docs/results/models.md",
}
"""What makes each table, and its page; its file in docs/data/ has the same name."""


def pages(root: Path) -> dict[Path, str]:
    """Return README and pages with the tables of the data."""
    texts = {"README.md": filled(_text(root / "README.md"), RESULTS, table(numbers(root)))}
    for rows, page in PAGES.items():
        source = f"data/{rows.__name__}.toml"
        made = table(rows(tomllib.loads(_text(root / "docs" / source))))
        texts[page] = filled(texts.get(page) or _text(root / page), source, made)
    return {root / page: text for page, text in texts.items()}


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def stale(root: Path = ROOT) -> dict[Path, str]:
    """Return files that are missing or not what they should be, and what that is."""
    files = pages(root) | docs_pictures.files(root) | docs_reference.files(root)
    return {file: text for file, text in files.items() if not file.exists() or file.read_text("utf-8") != text}


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where something is stale")
    check = parser.parse_args(arguments).check
    files = stale(root)
    for file, text in files.items():
        print(f"{file.name} is stale: python -m scripts.docs" if check else f"{file.name} is written")
        if not check:
            file.write_text(text, encoding="utf-8")
    return int(check and bool(files))


if __name__ == "__main__":
    raise SystemExit(main())
