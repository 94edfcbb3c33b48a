"""The certificate: texts equal those of plain decoding, token by token, and a row of a batch equals the row alone.

Under `seeded` that holds at any temperature. Under the other couplings only the distribution of texts is equal, which
two texts cannot show (tests/laws proves it). They are compared at temperature 0, where there is only one text.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from triforce.bench.prompts import PromptCache, Sources, generate_batch, prompts, variant_of
from triforce.disk_cache.prompt_file import SavedCache
from triforce.engine.sequence_group import OnPrefill
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM
from triforce.tables import Table

Row = dict[str, Any]
PLAIN = "ar"
SAME_AT_ANY_TEMPERATURE = "seeded"


@dataclass(frozen=True)
class LosslessConfig:
    """Settings of the comparisons of each mode, under each coupling, with plain decoding."""

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
    config: LosslessConfig,
    on_prefill: Callable[[], OnPrefill],
    compared: Container[str] = (),
) -> Iterator[list[Row]]:
    """Yield the rows of each cell, that is of a context, a workload and a temperature.

    compared: names of cells to leave out. Raises RequestError for texts that are too short.
    """
    lower_tiers = llm.speculation.lower_tiers
    for context, workload in product(config.contexts, config.workloads):
        length = min(context, llm.target.config.context - config.tokens)
        cells = {t: f"{lower_tiers}-{length}-{workload}-{t:g}" for t in config.temperatures}
        open_cells = {t: cell for t, cell in cells.items() if cell not in compared}
        if not open_cells:
            continue
        texts = prompts(sources, workload, length, max(config.batches))
        with tempfile.TemporaryDirectory() as folder:
            saved_prompt, _ = PromptCache(llm, Path(folder), on_prefill).load(workload, texts[0])
            for temperature, cell in open_cells.items():
                cell_fields = {"cell": cell, "context": length, "workload": workload, "temperature": temperature}
                cell_fields["lower_tiers"] = lower_tiers
                yield [cell_fields | row for row in _comparisons(llm, texts, temperature, config, saved_prompt)]


def _comparisons(
    llm: LLM, texts: list[list[int]], temperature: float, config: LosslessConfig, saved_prompt: SavedCache
) -> Iterator[Row]:
    params = SamplingParams(temperature, top_p=0.95, seed=11, max_tokens=config.tokens, ignore_eos=True)
    seeded_llm = variant_of(llm, coupling=SAME_AT_ANY_TEMPERATURE)
    single_texts = _texts(seeded_llm, texts[:1], params, PLAIN, saved_prompt)
    for batch in config.batches:
        plain_texts = _texts(seeded_llm, texts[:batch], params, PLAIN, saved_prompt)
        if batch > 1:
            yield {
                "mode": PLAIN,
                "coupling": "",
                "batch": batch,
                "with": "alone",
                **_difference(plain_texts[:1], single_texts),
            }
        for mode, coupling in product(config.modes, config.couplings):
            if temperature == 0 or coupling == SAME_AT_ANY_TEMPERATURE:
                mode_texts = _texts(variant_of(llm, coupling=coupling), texts[:batch], params, mode, saved_prompt)
                comparison_fields = {"mode": mode, "coupling": coupling, "batch": batch, "with": "plain decoding"}
                yield comparison_fields | _difference(mode_texts, plain_texts)


def _texts(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, mode: str, saved_prompt: SavedCache
) -> list[list[int]]:
    return [output.token_ids for output in generate_batch(llm, prompts, params, mode, saved_prompt).outputs]


def _difference(texts: list[list[int]], reference_texts: list[list[int]]) -> Row:
    """Return the number of `differing` texts, and the `first` position that differs in any of them (None: none)."""
    positions = [
        next((n for n in range(max(len(a), len(b))) if a[n : n + 1] != b[n : n + 1]), None)
        for a, b in zip(texts, reference_texts, strict=True)
    ]
    differing_positions = [position for position in positions if position is not None]
    tokens = sum(map(len, texts))
    return {
        "texts": len(texts),
        "tokens": tokens,
        "differing": len(differing_positions),
        "first": min(differing_positions, default=None),
    }


def certificate(comparisons: Sequence[Row]) -> Row:
    """Return the verdict over all comparisons."""
    texts, tokens, differing = (sum(row[name] for row in comparisons) for name in ("texts", "tokens", "differing"))
    return {
        "lossless": bool(comparisons) and differing == 0,
        "comparisons": len(comparisons),
        "texts": texts,
        "tokens": tokens,
        "differing": differing,
        "where": [row for row in comparisons if row["differing"]],
    }


def tables(comparisons: Sequence[Row]) -> list[Table]:
    """Return a table of the comparisons by mode and coupling."""
    kinds = list(dict.fromkeys((row["mode"], row["coupling"], row["with"]) for row in comparisons))
    lines = []
    for kind in kinds:
        kind_rows = [row for row in comparisons if (row["mode"], row["coupling"], row["with"]) == kind]
        counts = [sum(row[name] for row in kind_rows) for name in ("texts", "tokens", "differing")]
        temperatures = ", ".join(f"{t:g}" for t in sorted({row["temperature"] for row in kind_rows}))
        name = f"{kind[0]}, {kind[1]}" if kind[1] else f"{kind[0]}, in a batch"
        lines.append([name, kind[2], temperatures, *(f"{count:,}" for count in counts)])
    note = (
        "Texts compared token by token with those of plain decoding with the same seeds, and a row of a batch with "
        "that row alone. Rejection and block are compared at temperature 0: above it they keep the distribution only."
    )
    header = ["mode", "compared with", "temperatures", "texts", "tokens", "differing"]
    return [Table("The certificate", note, header, lines)]
