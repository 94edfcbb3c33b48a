"""Experiments, and the setup that all of them measure with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

from benchmarks.acceptance.measure import Case, acceptance
from benchmarks.acceptance.sweeps import by_unit
from benchmarks.acceptance.teacher_forcing import Walk
from benchmarks.acceptance.workloads import Size, Workload, needle, plain
from triforce import LLM
from triforce.bench.prompts import PromptCache, Sources, prompts, variant_of
from triforce.bench.speed import Cell, SpeedConfig, cell_rows
from triforce.cli.progress import Prefill
from triforce.interface.sampling_params import SamplingParams
from triforce.tables import Table

Row = dict[str, Any]
Lines = tuple[list[str], list[list[str]]]
"""A header, and lines of cells."""

PAPER_PROMPT = 122_880
"""Tokens of the paper's prompts: budgets here are the same share of the context, unless said otherwise."""


@dataclass
class Setup:
    """Models, texts, and how much is measured: prompt tokens, new ones, turns, positions of given texts."""

    llm: LLM
    sources: Sources
    context: int = 32_000
    tokens: int = 256
    repeats: int = 5
    positions: int = 259
    quick: bool = False
    _kept: PromptCache | None = field(default=None, repr=False)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Prompts are read once, and kept meanwhile."""
        with TemporaryDirectory() as folder:
            self._kept = PromptCache(self.llm, Path(folder), Prefill)
            yield

    def share(self, budget: int) -> int:
        """A budget of the paper as the same share of the context here, in pages of 16."""
        return max(32, round(budget * self.context / PAPER_PROMPT / 16) * 16)

    def speed(self, cell: Cell, modes: Sequence[str], tokens: int | None = None, **speculation: Any) -> list[Row]:
        """Rows of modes on one cell, turn by turn with plain decoding; fields of `SpeculativeConfig` may be others."""
        assert self._kept is not None, "within `measuring`"
        plan = SpeedConfig(["ar", *modes], tokens=tokens or self.tokens, repeats=self.repeats, seconds=0)
        length = min(cell.context, self.llm.target.config.context - plan.tokens)
        texts = prompts(self.sources, cell.workload, length, cell.batch)
        earlier, prefill = self._kept.load(f"{cell.workload}-{cell.context}-{cell.batch}", texts[0])
        how = variant_of(self.llm, **speculation) if speculation else self.llm
        ends = perf_counter() + 3600
        return [row for row in cell_rows(how, texts, cell, plan, earlier, prefill, ends) if row["mode"] != "ar"]

    def retrieval(self, **changes: Any) -> Any:
        """A setting of the retrieval view, but for some fields."""
        return replace(self.llm.speculation.retrieval, **changes)

    def works(self, names: Sequence[str], context: int | None = None) -> list[Workload]:
        """Given texts to walk through: `prose`, or `needle`."""
        size = Size(context or self.context, self.positions, 7)
        ids, source, tokenizer = self.sources.prose, self.sources.texts[0].name, self.sources.tokenizer
        return [
            plain(name, source, ids, size)
            if name == "prose"
            else needle(source, ids, size, self.sources.encode, tokenizer.decode)
            for name in names
        ]

    def accepted(self, cases: list[Case], works: Sequence[str]) -> list[Row]:
        """Acceptance of each case on each work."""
        params, rows = SamplingParams(temperature=0.6, top_p=0.9), list[Row]()
        for work in self.works(works):
            for unit, some in by_unit(cases).items():
                if some:
                    walk = Walk(self.llm.models, work, params, unit)
                    rows += [acceptance(walk, case) for case in some]
        return rows


class Experiment(NamedTuple):
    """A table or figure: its title, what differs here, how to measure it, and how to show it beside the paper's."""

    title: str
    differs: str
    measure: Callable[[Setup], list[Row]]
    lines: Callable[[list[Row]], Lines]

    def shown(self, rows: list[Row]) -> Table:
        """Return the rows under the title."""
        return Table(self.title, self.differs, *self.lines(rows))


def each(header: list[str], line: Callable[[Row], list[str]]) -> Callable[[list[Row]], Lines]:
    """Return what makes a line of each row."""
    return lambda rows: (header, [line(row) for row in rows])


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def kept(row: Row) -> float | None:
    """The share of the tokens proposed to the full tier that it kept."""
    shares = [share for share in row["acceptance"].values() if share is not None]
    return shares[-1] if shares else None
