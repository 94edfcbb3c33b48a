"""Writes the generated parts of README.md and docs/: python -m scripts.docs [--check].

The generated parts are tables from docs/data and benchmarks/results, pictures from docs/data, and the reference from
argparse, pydantic and docstrings. Tables and the reference stand between comments that name their source. --check
writes nothing, and exits with 1 if a part is stale.
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import Any

from scripts import docs_model_choice, docs_models, docs_pictures, docs_reference, docs_results
from scripts.docs_reference import code, filled, table
from scripts.docs_results import RESULTS, report

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


MODELS_SHOWN = {"smollm2": "`smollm2`", "pair": "shipped pair"}
LEVELS_SHOWN = {"": "AVX512-BF16", "_avx2": "AVX2"}
"""Files of `bench speed` that README shows: one for each model and level of the kernels."""

TEMPERATURE_SHOWN = 1.0
"""Temperature of README's cells. At lower temperatures small models repeat themselves."""


def speedups(root: Path) -> list[list[str]]:
    """Return README's table: plain decoding's tokens/s, speedups of `auto` on a book and on code, and repetition."""
    rows = [["kernels", "model", "tokens read", "plain, tokens/s", "book", "code", "8-grams that repeat"]]
    for level, level_name in LEVELS_SHOWN.items():
        for model, model_name in MODELS_SHOWN.items():
            cells = {
                (row["context"], row["workload"], row["mode"]): row
                for row in report(root, f"{model}_speed{level}")["rows"]
                if row["temperature"] == TEMPERATURE_SHOWN
            }
            for context in sorted({context for context, *_ in cells}):
                plain, *auto = (cells[context, *of] for of in (("books", "ar"), ("books", "auto"), ("code", "auto")))
                ratios = [f"{row['speedup']:.2f}" for row in auto]
                repeated = max(row["repeated_8_grams"] for row in auto)
                rate = f"{plain['tokens_per_second']:,.0f}"
                rows.append([level_name, model_name, f"{context:,}", rate, *ratios, f"{repeated:.0%}"])
    return rows


PAGES = {
    layers: "docs/contributing/layout.md",
    level_bits: "docs/concepts/exactness.md",
    kernel_errors: "docs/results/kernels.md",
    gguf_types: "docs/design/backends.md",
    gpu_runs: "docs/contributing/gpu-runs.md",
    gpu_kernels: "docs/contributing/gpu-kernels.md",
    docs_models.models: "docs/results/models.md",
}
"""The function that makes each table, and its page; its file in docs/data/ has the same name."""


def pages(root: Path) -> dict[Path, str]:
    """Return README and pages with the tables of the data."""
    texts = {"README.md": filled(_text(root / "README.md"), RESULTS, table(speedups(root)))}
    for rows, page in PAGES.items():
        source = f"data/{rows.__name__}.toml"
        page_text = table(rows(tomllib.loads(_text(root / "docs" / source))))
        texts[page] = filled(texts.get(page) or _text(root / page), source, page_text)
    return {root / page: text for page, text in texts.items()}


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def stale(root: Path = ROOT) -> dict[Path, str]:
    """Return the generated files that are missing or stale, with their right text."""
    files = pages(root) | docs_pictures.files(root) | docs_reference.files(root) | docs_results.files(root)
    files |= docs_model_choice.files(root)
    return {file: text for file, text in files.items() if not file.exists() or file.read_text("utf-8") != text}


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, and exit with 1 if a part is stale")
    check = parser.parse_args(arguments).check
    files = stale(root)
    for file, text in files.items():
        print(f"{file.name} is stale: python -m scripts.docs" if check else f"{file.name} is written")
        if not check:
            file.write_text(text, encoding="utf-8")
    return int(check and bool(files))


if __name__ == "__main__":
    raise SystemExit(main())
