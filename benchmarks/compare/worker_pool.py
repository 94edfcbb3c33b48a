"""Processes that take turns: engines whose settings are compared, each with the KV of the prompt that it has read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.compare.engines import ON_FILE, OURS, Load
from benchmarks.compare.processes import EngineTrouble, Launcher, WorkerProcess, speeds, task_of, turn_of

Row = dict[str, Any]
DECODING = ("plain", "lookup", "draft")
"""Kinds of ways to make texts: token by token, and with draft tokens by n-gram lookup in the text or by a model."""


@dataclass(frozen=True, eq=False)
class Contender:
    """A setting of an engine that takes part. `kind`: of what it is the best, or a mode of ours."""

    engine: str
    kind: str
    load: Load
    way: str

    @property
    def variant(self) -> str:
        """The name of the setting."""
        return ", ".join(name for name in (self.load.name, self.way) if name)


@dataclass(frozen=True)
class Models:
    """The file, what engines read instead that read folders only, and a draft: ours may be no file."""

    file: Path
    folder: Path
    draft: str | Path | None

    def of(self, engine: str) -> Path:
        return self.folder if engine in ON_FILE and ON_FILE[engine].folder else self.file

    def draft_of(self, engine: str) -> str | Path | None:
        is_file = isinstance(self.draft, Path) and self.draft.is_file()
        return self.draft if engine == OURS or (is_file and ON_FILE[engine].drafts) else None


class WorkerPool:
    """Starts a process when it is first asked, and ends all when it is left. `positions`: of the longest text."""

    def __init__(self, launcher: Launcher, models: Models, positions: int) -> None:
        self._launcher = launcher
        self._models = models
        self._positions = positions
        self._running: dict[tuple[str, str], WorkerProcess] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._running.clear()
        self._stack.close()

    def ask(self, engine: str, load: Load, way: str, ids: list[int], tokens: int, **settings: Any) -> Row:
        """Return what a text came to, and what else the worker says. Raises EngineTrouble."""
        key = engine, repr(load.settings)
        if key not in self._running:
            needs = ON_FILE[engine].needs if engine != OURS else None
            task = task_of(self._models.of(engine), self._models.draft_of(engine), self._positions, load.settings)
            self._running[key] = self._stack.enter_context(self._launcher.running(engine, needs, task))
        result = self._running[key].ask(turn_of(ids, tokens, load.ways[way], **settings))
        return result | speeds(result, len(ids), self._launcher.threads)


@dataclass
class Taken:
    """Turns of a contender, and why it took no more, if it failed."""

    turns: list[Row]
    trouble: Row


def in_turns(
    contenders: Sequence[Contender],
    repeats: int,
    ask: Callable[[Contender, int], Row],
    go_on: Callable[[], bool] = lambda: True,
) -> dict[Contender, Taken]:
    """Let contenders take turns, there and back, so that a machine that changes its speed meets all of them.

    One that fails is left out from then on; the others go on.
    """
    taken = {contender: Taken([], {}) for contender in contenders}
    for turn in range(repeats):
        for contender in contenders[:: 1 if turn % 2 == 0 else -1]:
            mine = taken[contender]
            if not mine.trouble:
                try:
                    mine.turns.append(ask(contender, turn))
                except EngineTrouble as trouble:
                    mine.trouble = trouble.row
        if not go_on():
            break
    return taken


def best(rows: Sequence[Row]) -> Iterator[Contender]:
    """Yield of an engine the settings that were fastest: at prompts, at texts, and at texts with lookup."""
    for kind, name in (("prefill", "prefill_tokens_per_second"), *((kind, "tokens_per_second") for kind in DECODING)):
        kind_rows = [row for row in rows if row["kind"] == kind and name in row]
        if kind_rows:
            fastest = max(kind_rows, key=lambda row: float(row[name]))
            yield Contender(fastest["engine"], kind, fastest["load"], fastest["way"])
