"""Tables of engines on a GGUF file, and our speed over theirs. Ratios are those of turns side by side."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.compare.engines import ON_FILE, OURS
from benchmarks.compare.on_file import PLAIN
from triforce.interface.repeated_grams import LOOP_SHARE
from triforce.tables import Table, percent, tokens

Row = dict[str, Any]
TITLES = {OURS: "triforce", **{name: engine.title for name, engine in ON_FILE.items()}}
PROMPTS = (
    "Tokens/s of reading the prompt, with the setting of each engine that was fastest at it, and ours over theirs: the "
    "median of ratios of turns side by side."
)
TEXTS = (
    "Tokens/s of decoding, without the prompt: medians of turns, which all take there and back. Of each engine the "
    "settings stand here that were fastest with this prompt, token by token, with lookup and with a draft model. The "
    "columns named by our "
    "modes are their tokens/s over the row's: below 1 we lose. As plain: the share of tokens before the first that "
    "differs from our plain decoding's. Repeats: the share of 8-grams that stood in the text or in its prompt before."
)


def over(mine: Row | None, theirs: Row) -> float | None:
    """Return the speed of a row over that of another: the median of the ratios of turns side by side."""
    rates: list[list[float]] = [row.get("turns", []) for row in (mine or {}, theirs)]
    ratios = [a / b for a, b in zip(*rates, strict=False) if b]
    return median(ratios) if ratios else None


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return, for each prompt and each text, tokens/s, and our speed over each setting by the names of both."""
    rows_of_summary = []
    for cell in _cells(rows):
        mine = [row for row in cell if row["engine"] == OURS]
        rivals = [row for row in cell if row["engine"] != OURS or row["kind"] == PLAIN]
        ratios = {row["kind"]: {_key(rival): over(row, rival) for rival in rivals if rival is not row} for row in mine}
        row_head = {name: cell[0][name] for name in ("what", "context", "workload", "temperature") if name in cell[0]}
        rates = {_key(row): row["tokens_per_second"] for row in cell if "turns" in row}
        rows_of_summary.append(row_head | {"tokens_per_second": rates, "over": ratios})
    return rows_of_summary


def tables(rows: Sequence[Row]) -> list[Table]:
    """Tables of prompts, of texts after each context, of what is not fair, and of what is not there or failed."""
    contexts = sorted({row["context"] for row in rows if row["what"] == "decoding"})
    noted = dict.fromkeys((TITLES[row["engine"]], row["note"]) for row in rows if row["what"] == "note")
    notes = [list(note) for note in noted]
    unfair = Table("Not a fair comparison", "Figures of these engines are too low.", ["engine", "why"], notes)
    return [
        _prompts(rows), *(_texts(context, rows) for context in contexts), *([unfair] if notes else []), *_failed(rows)
    ]  # fmt: skip


def _cells(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of the same prompt, or of the same text and temperature."""
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["what"] in ("prefill", "decoding"):
            key = (row["what"], row["context"], row.get("workload"), row.get("temperature"))
            cells.setdefault(key, []).append(row)
    return list(cells.values())


def _key(row: Row) -> str:
    return f"{row['engine']} {row['kind']}"


def _name(row: Row) -> str:
    kind = f"lookup: {row['variant']}" if row["kind"] == "lookup" else row["variant"]
    return f"{TITLES[row['engine']]} {row['version']}, {kind}"


def _prompts(rows: Sequence[Row]) -> Table:
    lines = []
    for cell in _cells(rows):
        mine = next((row for row in cell if row["engine"] == OURS), None)
        for row in cell:
            if row["what"] == "prefill" and "turns" in row:
                rate = f"{row['tokens_per_second']:,.0f}"
                lines.append([_name(row), tokens(row["context"]), rate, _ratio(over(mine, row))])
    return Table("Reading the prompt", PROMPTS, ["engine", "tokens", "tokens/s", "triforce over it"], lines)


def _texts(context: int, rows: Sequence[Row]) -> Table:
    lines = []
    modes = dict[str, None]()
    for cell in _cells([row for row in rows if row["what"] == "decoding" and row["context"] == context]):
        mine = {row["kind"]: row for row in cell if row["engine"] == OURS}
        modes |= dict.fromkeys(mine)
        for row in (row for row in cell if "turns" in row):
            ratios = [_ratio(over(our_row, row)) for our_row in mine.values()]
            again = row["repeated_8_grams"]
            lines.append([
                _name(row), row["workload"], f"{row['temperature']:g}", f"{row['tokens_per_second']:,.1f}", *ratios,
                f"{row['busy_cores']:.2f}", percent(row["as_plain"]) or "-",
                f"{again:.0%}{'!' * (again >= LOOP_SHARE)}",
            ])  # fmt: skip
    header = ["engine", "text", "T", "tokens/s", *(f"{mode} over it" for mode in modes), "busy cores", "as plain"]
    note = f"{TEXTS} A ! is behind {LOOP_SHARE:.0%} and more."
    return Table(f"Decoding after {tokens(context)} tokens", note, [*header, "repeats"], lines)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _failed(rows: Sequence[Row]) -> list[Table]:
    """Engines that are not there, and settings that failed; each once."""
    lines = {}
    for row in (row for row in rows if "engine" in row):
        if why := row.get("missing") or row.get("failed"):
            name = ", ".join(filter(None, [TITLES[row["engine"]], row.get("variant")]))
            lines[name, why] = [name, why]
    note = "An engine that is not installed is left out; one that failed says why, and the others went on."
    return [Table("Not compared", note, ["engine", "why"], list(lines.values()))] if lines else []


def line(row: Row) -> str:
    """A row for people, as soon as it is measured."""
    engine = TITLES.get(row.get("engine", ""), "")
    where = [row.get("workload", ""), f"T={row['temperature']:g}" if "temperature" in row else ""]
    name = " ".join([f"{row.get('context', 0):>6,} {row['what']:<9}", *filter(None, [engine, *where])])
    name = ", ".join(filter(None, [name, row.get("variant")]))
    if trouble := row.get("missing") or row.get("failed") or row.get("note"):
        return f"{name}: {trouble}"
    if row["what"] == "text":
        shares = (f"{TITLES[engine_name]} {share:.0%}" for engine_name, share in row["repeated_8_grams"].items())
        return f"{name}: place {row['place']} of the books; 8-grams that repeat: {', '.join(shares)}"
    read = row.get("prefill_tokens_per_second")
    rate = f"{read:,.0f} tokens/s of the prompt" if read else f"{row['tokens_per_second']:,.1f} tokens/s"
    return f"{name}: {rate}" + (f", {row['busy_cores']:.2f} cores busy" if "busy_cores" in row else "")
