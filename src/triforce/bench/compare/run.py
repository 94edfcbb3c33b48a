"""The engines, and their rows on prompts: the same token ids, greedy, the same number of new tokens, prefill apart.

Then what they come to, and tables.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

from triforce.eval import Table
from triforce.eval.repetition import repeated
from triforce.eval.tables import percent, tokens
from triforce.ragged import common_prefix

Row = dict[str, Any]
BUSY = 0.85
"""Share of the cores that must have been busy, 1.7 of 2: else something was in the way, or idle."""

LONG = 60.0
"""Seconds after which there is no further try, if one counts."""


class EngineSpec(NamedTuple):
    """A worker, in the order of settings that it is run in; the fastest is its best. `needs`: the extra to install."""

    title: str
    variants: tuple[str, ...]
    needs: str | None = None
    assisted: tuple[str, ...] = ()
    """Settings that need a draft model."""

    @property
    def all(self) -> tuple[str, ...]:
        return self.variants + self.assisted


OURS = "triforce"
PLAIN = (OURS, "ar")
"""The engine and its setting that the texts of all others are compared with."""

ENGINES = {
    OURS: EngineSpec("triforce", ("ar", "retrieval", "auto"), assisted=("triforce",)),
    "transformers": EngineSpec(
        "transformers", ("bf16", "f32", "bf16 lookup", "f32 lookup"), assisted=("bf16 assisted",)
    ),
    "openvino": EngineSpec("OpenVINO GenAI", ("default", "u8", "f16", "lookup"), "compare-openvino"),
    "llamacpp": EngineSpec("llama.cpp", ("no flash attention", "flash attention", "lookup"), "compare-llamacpp"),
    "onnx": EngineSpec("ONNX Runtime GenAI", ("fp32",), "compare-onnx"),
    "vllm": EngineSpec("vLLM, CPU", ("compiled", "eager"), "compare-vllm"),
}


@dataclass(frozen=True)
class CompareConfig:
    """`pythons`: interpreters by engine; `timeout` in seconds for each run; `tries` at most, of each setting."""

    model: Path
    draft: Path | None
    engines: Sequence[str]
    tokens: int
    threads: int
    timeout: float
    pythons: Mapping[str, str]
    work: Path
    tries: int = 3


def rows(prompts: Mapping[int, list[int]], plan: CompareConfig) -> Iterator[Row]:
    """A row for each engine, setting and prompt (by its context); one for an engine that is not there."""
    with _package() as path:
        for context, ids in prompts.items():
            plain = None
            for engine in plan.engines:
                for variant in ENGINES[engine].all if plan.draft else ENGINES[engine].variants:
                    row = _row(engine, variant, ids, plan, path)
                    plain = row.get("ids") if (engine, variant) == PLAIN else plain
                    made = row.pop("ids", None)
                    as_plain = common_prefix(made, plain) / len(made) if made and plain else None
                    again = repeated(made) if made else None
                    about = {"as_plain": as_plain, "repeated_8_grams": again}
                    yield {"engine": engine, "variant": variant, "context": context, **row, **about}
                    if "missing" in row:
                        break


def _row(engine: str, variant: str, ids: list[int], plan: CompareConfig, path: str) -> Row:
    """The median of a few tries that were busy enough, or the busiest; one does that takes long."""
    tried: list[Row] = []
    began = perf_counter()
    while len(tried) < plan.tries and not (perf_counter() - began > LONG and any(row["accepted"] for row in tried)):
        found = _run(engine, variant, ids, plan, path)
        if "busy_cores" not in found:
            return found
        tried.append(found)
    counted = sorted((row for row in tried if row["accepted"]), key=lambda row: float(row["tokens_per_second"]))
    median = counted[len(counted) // 2] if counted else max(tried, key=lambda row: float(row["busy_cores"]))
    return median | {"tries": len(tried)}


def _run(engine: str, variant: str, ids: list[int], plan: CompareConfig, path: str) -> Row:
    task = {
        "model": str(plan.model), "draft": str(plan.draft) if plan.draft else None, "work": str(plan.work),
        "ids": ids, "variant": variant, "tokens": plan.tokens, "threads": plan.threads,
    }  # fmt: skip
    python = plan.pythons.get(engine, sys.executable)
    environment = os.environ | {"OMP_NUM_THREADS": str(plan.threads)}
    if python != sys.executable:
        environment["PYTHONPATH"] = path
    command = [python, "-m", "triforce.bench.compare.workers", engine]
    try:
        done = subprocess.run(
            command, input=json.dumps(task), capture_output=True, text=True, timeout=plan.timeout, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no end after {plan.timeout:.0f} s"}
    except OSError as error:
        return {"failed": f"{python} cannot be run ({error.strerror})"}
    if done.returncode:
        return _trouble(engine, done.stderr)
    return _speeds(json.loads(done.stdout.splitlines()[-1]), len(ids), plan.threads)


def _speeds(result: Row, context: int, threads: int) -> Row:
    decoded, seconds, prefill, busy = (result[name] for name in ("decoded", "seconds", "prefill_seconds", "busy_cores"))
    return {
        "tokens": decoded, "seconds": seconds, "tokens_per_second": decoded / seconds if seconds else 0.0,
        "prefill_seconds": prefill, "prefill_tokens_per_second": context / prefill,
        "busy_cores": busy, "accepted": busy >= BUSY * threads, "version": result["version"], "ids": result["ids"],
    }  # fmt: skip


def _trouble(engine: str, stderr: str) -> Row:
    last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "no message")
    needs = ENGINES[engine].needs
    if needs and ("ModuleNotFoundError" in last or "ImportError" in last):
        return {"missing": f"pip install 'triforce[{needs}]' (here, or where --python {engine}=... points); {last}"}
    return {"failed": last[:300]}


@contextmanager
def _package() -> Iterator[str]:
    """A folder with this package and nothing else: other interpreters must not find this one's packages."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "triforce").symlink_to(Path(__file__).parents[2], target_is_directory=True)
        yield folder


def summary(found: Sequence[Row]) -> list[Row]:
    """Return by context the fastest accepted setting of each engine, and our tokens/s over the best of the others.

    `decode` is of our best mode, `plain` of our plain decoding, `prefill` of tokens/s of prefill; None where there is
    nothing to compare with.
    """
    made = []
    for context in sorted({row["context"] for row in found}):
        counted = [row for row in found if row["context"] == context and row.get("accepted")]
        ours, others = ([row for row in counted if (row["engine"] == OURS) == mine] for mine in (True, False))
        plain = [row for row in ours if (row["engine"], row["variant"]) == PLAIN]
        best = {engine: _most([r for r in counted if r["engine"] == engine], "tokens_per_second") for engine in ENGINES}
        made.append({
            "context": context, "best": {name: most for name, most in best.items() if most},
            "decode": _ratio(ours, others, "tokens_per_second"), "plain": _ratio(plain, others, "tokens_per_second"),
            "prefill": _ratio(ours, others, "prefill_tokens_per_second"),
        })  # fmt: skip
    return made


def _ratio(ours: Sequence[Row], others: Sequence[Row], name: str) -> float | None:
    mine, theirs = _most(ours, name), _most(others, name)
    return mine / theirs if mine and theirs else None


def _most(rows: Sequence[Row], name: str) -> float | None:
    return max((float(row[name]) for row in rows), default=None)


def tables(found: Sequence[Row]) -> list[Table]:
    """A table for each context, and what is missing."""
    made = [_table(context, found) for context in sorted({row["context"] for row in found})]
    absent = {(row["engine"], row["variant"]): row.get("missing") or row.get("failed") for row in found}
    lines = [[f"{ENGINES[engine].title}, {variant}", why] for (engine, variant), why in absent.items() if why]
    note = "An engine without an extra is left out; one that failed says why."
    return [*made, *([Table("Not compared", note, ["engine", "why"], lines)] if lines else [])]


def _table(context: int, found: Sequence[Row]) -> Table:
    rows = [row for row in found if row["context"] == context and "tokens_per_second" in row]
    plain = next((row for row in rows if (row["engine"], row["variant"]) == PLAIN), None)
    lines = []
    for row in rows:
        ratio = f"{row['tokens_per_second'] / plain['tokens_per_second']:.2f}" if plain else "-"
        name = f"{ENGINES[row['engine']].title} {row['version']}, {row['variant']}"
        busy = f"{row['busy_cores']:.2f}" + ("" if row["accepted"] else ", rejected")
        lines.append([
            name, f"{row['prefill_seconds']:.1f}", f"{row['tokens_per_second']:.1f}", ratio, busy,
            percent(row["as_plain"]) or "-", percent(row["repeated_8_grams"]),
        ])  # fmt: skip
    note = (
        "Greedy; seconds to the first token, then tokens/s of the others, and these over our plain decoding's; medians "
        "of three runs, or one of a minute. Rows with too few busy cores (1.7 of 2) are rejected. As plain: the share "
        "of tokens before the first that differs from our plain decoding's; other engines round otherwise, so theirs "
        "may part anywhere. Repeats: the share of 8-grams that the text had before, which lookup lives on."
    )
    header = ["engine", "prefill, s", "tokens/s", "of plain", "busy cores", "as plain", "repeats"]
    return Table(f"Decoding after {tokens(context)} tokens", note, header, lines)
