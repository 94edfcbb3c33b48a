"""The tables of docs/tutorial/choosing-a-model.md: models that are read, known drafts, measured times of prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from scripts.docs_reference import code, filled, table
from scripts.docs_results import RESULTS, Rows, report, size
from triforce.checkpoint.gguf.config import ARCHITECTURES
from triforce.checkpoint.gguf.file import READABLE
from triforce.checkpoint.hub import DRAFTS_BY_TARGET
from triforce.checkpoint.model_families import FAMILIES

PAGE = "docs/tutorial/choosing-a-model.md"
MIN_TOKENS = 4096
"""Least length of a prompt in the table. Shorter prompts take a second or less."""
TEMPERATURE = 1.0
"""Temperature of the rows to show: the machine in the head of a file is that of these rows."""
LEVELS = {"": "AVX512-BF16", "_avx2": "AVX2"}
MODELS = {"smollm2": "`smollm2`, 135M", "pair": "shipped pair, 6.8M"}
"""Files of `triforce bench speed`: one for each model and level of the kernels."""


def readable_models(root: Path) -> Rows:
    """Return the accepted values of the fields that identify a model's kind."""

    def listed(values: Iterable[str]) -> str:
        return ", ".join(map(code, values))

    return [
        ["where", "field", "values that are read"],
        ["`config.json` of a folder", code("model_type"), listed(FAMILIES)],
        ["metadata of a GGUF file", code("general.architecture"), listed(ARCHITECTURES)],
        ["tensors of a GGUF file", "type", listed(READABLE)],
    ]


def known_drafts(root: Path) -> Rows:
    """Return the drafts that `--draft auto` uses, each with its targets on the hub."""
    targets: dict[str, list[str]] = {}
    for target, draft in DRAFTS_BY_TARGET.items():
        targets.setdefault(draft, []).append(code(target))
    return [["draft", "targets"], *([code(draft), ", ".join(names)] for draft, names in targets.items())]


def reading_times(root: Path) -> Rows:
    """Return tokens per second and seconds of prefill, for the longest prompts of each file."""
    rows = [["kernels", "model", "tokens of the prompt", "tokens/s", "seconds", "file"]]
    for model, model_name in MODELS.items():
        for level, level_name in LEVELS.items():
            name = f"{model}_speed{level}"
            rates = {
                row["prompt_tokens"]: row["prefill_tokens_per_second"]
                for row in report(root, name)["rows"]
                if (row["mode"], row["workload"], row["temperature"]) == ("ar", "books", TEMPERATURE)
                and row["prompt_tokens"] >= MIN_TOKENS
            }
            for tokens, rate in sorted(rates.items()):
                cells = [size(tokens), f"{rate:,.0f}", f"{tokens / rate:.1f}", code(f"{name}.json")]
                rows.append([level_name, model_name, *cells])
    return rows


TABLES: dict[str, Callable[[Path], Rows]] = {
    "triforce.checkpoint": readable_models,
    "triforce.checkpoint.hub": known_drafts,
    f"{RESULTS}/*_speed*.json": reading_times,
}
"""The function that makes each table of the page, by its source."""


def files(root: Path) -> dict[Path, str]:
    """Return the page with its tables."""
    page = root / PAGE
    text = page.read_text(encoding="utf-8")
    for source, rows in TABLES.items():
        text = filled(text, source, table(rows(root)))
    return {page: text}
