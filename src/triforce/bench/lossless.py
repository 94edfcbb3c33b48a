"""The certificate: texts are those of plain decoding, token by token, and a row's those of the row alone.

Under `seeded` that holds at any temperature. Under the other couplings it is the law of a text that is the same, which
two texts cannot show (tests/laws proves it), so these are compared where there is but one text: at temperature 0.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from triforce.bench.prompts import Prompts, Sources, prompts, together, varied
from triforce.disk_cache.prompt_file import SavedCache
from triforce.engine.sequence_group import OnPrefill
from triforce.eval import Table
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM

Row = dict[str, Any]
PLAIN = "ar"
SAME_AT_ANY_TEMPERATURE = "seeded"


@dataclass(frozen=True)
class LosslessConfig:
    """The comparisons: each mode under each coupling with plain decoding, wherever one text is expected."""

    contexts: Sequence[int]
    temperatures: Sequence[float]
    batches: Sequence[int]
    workloads: Sequence[str]
    modes: Sequence[str]
    couplings: Sequence[str]
    tokens: int = 128


def rows(
    llm: LLM,
    sources: Sources,
    plan: LosslessConfig,
    on_prefill: Callable[[], OnPrefill],
    compared: Container[str] = (),
) -> Iterator[list[Row]]:
    """Yield the rows of each cell: a context, a workload and a temperature. Those in `compared` are left out.

    Raises RequestError for texts that are too short.
    """
    lower = llm.speculation.lower_tiers
    for context, workload in product(plan.contexts, plan.workloads):
        length = min(context, llm.target.config.context - plan.tokens)
        cells = {t: f"{lower}-{length}-{workload}-{t:g}" for t in plan.temperatures}
        left = {t: cell for t, cell in cells.items() if cell not in compared}
        if not left:
            continue
        texts = prompts(sources, workload, length, max(plan.batches))
        with tempfile.TemporaryDirectory() as folder:
            earlier, _ = Prompts(llm, Path(folder), on_prefill).of(workload, texts[0])
            for temperature, cell in left.items():
                about = {"cell": cell, "context": length, "workload": workload, "temperature": temperature}
                about["lower_tiers"] = lower
                yield [about | row for row in _compared(llm, texts, temperature, plan, earlier)]


def _compared(
    llm: LLM, texts: list[list[int]], temperature: float, plan: LosslessConfig, earlier: SavedCache
) -> Iterator[Row]:
    params = SamplingParams(temperature, top_p=0.95, seed=11, max_tokens=plan.tokens, ignore_eos=True)
    seeded = varied(llm, coupling=SAME_AT_ANY_TEMPERATURE)
    alone = _texts(seeded, texts[:1], params, PLAIN, earlier)
    for batch in plan.batches:
        plain = _texts(seeded, texts[:batch], params, PLAIN, earlier)
        if batch > 1:
            yield {"mode": PLAIN, "coupling": "", "batch": batch, "with": "alone", **_difference(plain[:1], alone)}
        for mode, coupling in product(plan.modes, plan.couplings):
            if temperature == 0 or coupling == SAME_AT_ANY_TEMPERATURE:
                made = _texts(varied(llm, coupling=coupling), texts[:batch], params, mode, earlier)
                about = {"mode": mode, "coupling": coupling, "batch": batch, "with": "plain decoding"}
                yield about | _difference(made, plain)


def _texts(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, mode: str, earlier: SavedCache
) -> list[list[int]]:
    return [output.token_ids for output in together(llm, prompts, params, mode, earlier).outputs]


def _difference(texts: list[list[int]], others: list[list[int]]) -> Row:
    """`differing` texts, and the first token that differs in any of them (None: none does)."""
    firsts = [
        next((n for n in range(max(len(a), len(b))) if a[n : n + 1] != b[n : n + 1]), None)
        for a, b in zip(texts, others, strict=True)
    ]
    found = [first for first in firsts if first is not None]
    tokens = sum(map(len, texts))
    return {"texts": len(texts), "tokens": tokens, "differing": len(found), "first": min(found, default=None)}


def certificate(found: Sequence[Row]) -> Row:
    """Return the verdict over all rows."""
    texts, tokens, differing = (sum(row[name] for row in found) for name in ("texts", "tokens", "differing"))
    return {
        "lossless": bool(found) and differing == 0,
        "comparisons": len(found),
        "texts": texts,
        "tokens": tokens,
        "differing": differing,
        "where": [row for row in found if row["differing"]],
    }


def tables(found: Sequence[Row]) -> list[Table]:
    """Return a table by mode and coupling."""
    kinds = list(dict.fromkeys((row["mode"], row["coupling"], row["with"]) for row in found))
    lines = []
    for kind in kinds:
        some = [row for row in found if (row["mode"], row["coupling"], row["with"]) == kind]
        counts = [sum(row[name] for row in some) for name in ("texts", "tokens", "differing")]
        temperatures = ", ".join(f"{t:g}" for t in sorted({row["temperature"] for row in some}))
        name = f"{kind[0]}, {kind[1]}" if kind[1] else f"{kind[0]}, in a batch"
        lines.append([name, kind[2], temperatures, *(f"{count:,}" for count in counts)])
    note = (
        "Texts compared token by token with those of plain decoding with the same seeds, and a row of a batch with "
        "that row alone. Under rejection and block at temperature 0 only: above, the law is the same, not the text."
    )
    header = ["mode", "compared with", "temperatures", "texts", "tokens", "differing"]
    return [Table("The certificate", note, header, lines)]
