"""`triforce bench kernels --model`: passes of a model by context and width, beside other engines where they are."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import chain

from triforce.backends import dispatch
from triforce.bench.kernels import WIDEST
from triforce.bench.model_passes import OURS, PassPlan, Row, parts, rows
from triforce.checkpoint.model_files import GGUFModel
from triforce.cli.bench.checkout import find_checkout
from triforce.cli.bench.setup import about, machine, show, write
from triforce.cli.progress import loading
from triforce.eagle.head_files import is_eagle_head
from triforce.engine.inputs import known
from triforce.engine.model_loader import ModelSource, locate_model
from triforce.errors import RequestError, printable
from triforce.llm import LLM
from triforce.model.config import ModelConfig
from triforce.tables import Table, percent, tokens

PEERS = "benchmarks.compare.peer_passes"
"""Module of a checkout: passes of other engines."""
PYTHONS = "benchmarks.compare.command"
"""Module of a checkout that reads --python."""

PROMPTS = (512,)
CONTEXTS = (300, 4096)
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 9, 16)
NOTE = (
    "Milliseconds of a pass over all weights that scores each of its tokens, medians. Of another engine each cell is "
    "of its fastest setting. The bound is the greater of two times: of the bytes at the bandwidth, and of the "
    "operations at the peak, both measured in this run. Parts are timed by themselves; rest is what they leave of a "
    "pass, and may be below 0."
)
PROMPT_NOTE = "Tokens/s, with the first new token."


def run(options: Namespace) -> int:
    """Print a line for each row as it is measured, tables, and a line of JSON. Raises TriforceError."""
    if dispatch.native is None:
        reason = dispatch.missing_reason or f"{dispatch.VARIABLE}={dispatch.requested} turns them off"
        raise RequestError(f"bench kernels {options.model} measures the native kernels, and {reason}")
    if options.shapes:
        raise RequestError(f"--shapes {options.shapes[0]} stands for a model; leave out {options.model}")
    placement = {"device": "cpu", "kv_dtype": options.kv_dtype, "weight_inputs": options.weight_inputs}
    source = locate_model(options.model, dtype="auto", context=None, **placement)
    if is_eagle_head(source.files.path):
        raise RequestError(f"{options.model} is an EAGLE head, whose passes are none of their own; name its target")
    plan = _plan(options, source.config)
    engine_rows = _engine_rows(options, source, plan)
    name = source.files.path.name
    print(f"{printable(name)} on {machine()}")
    measured_rows = list[Row]()
    for row in chain.from_iterable(engine_rows):
        measured_rows.append(row)
        print(_line(row), flush=True)
    show(tables(measured_rows, plan))
    print(json.dumps({"machine": machine(), "rows": measured_rows}))
    write(
        options.json,
        about()
        | {"model": name, "kv_dtype": options.kv_dtype, "weight_inputs": options.weight_inputs, "rows": measured_rows},
    )
    return 0


def _plan(options: Namespace, config: ModelConfig) -> PassPlan:
    """Return what is asked for, checked, with width 1 among the widths. Raises RequestError."""
    widths = sorted({1, *(options.widths or WIDTHS)})
    if not 1 <= widths[0] <= widths[-1] <= WIDEST:
        raise RequestError(f"--widths: give numbers of tokens from 1 to {WIDEST}")
    limit = config.positions - widths[-1]
    lengths = {"--prompts": options.prompts, "--contexts": options.contexts}
    for option, length in ((option, length) for option, asked in lengths.items() for length in asked or ()):
        if not 2 <= length <= limit:
            raise RequestError(f"{option} {length}: give numbers of tokens from 2 to {limit:,} for this model")
    prompts, contexts = ([length for length in default if length <= limit] for default in (PROMPTS, CONTEXTS))
    return PassPlan(options.prompts or prompts, options.contexts or contexts, widths, config.vocab_size)


def _engine_rows(options: Namespace, source: ModelSource, plan: PassPlan) -> list[Iterator[Row]]:
    """Return the rows of triforce, to be measured, and those of other engines. Raises RequestError."""
    is_gguf = isinstance(source.files, GGUFModel)
    peers = import_module(PEERS) if find_checkout(PEERS) else None
    names: list[str] = list(peers.ENGINES) if peers else []
    asked = [known("engine", name, [OURS, *names]) for name in options.engines or [OURS, *names * is_gguf]]
    asked_peers = [name for name in asked if name != OURS]
    if asked_peers and not is_gguf:
        raise RequestError(f"--engines {asked_peers[0]}: other engines are measured on GGUF files")
    measured = [_own_rows(options, source, plan)] if OURS in asked else []
    if peers:
        pythons = import_module(PYTHONS).pythons(options.python)
        measured.append(peers.rows(source.files.path, plan, asked_peers, pythons, _announce))
    return measured


def _own_rows(options: Namespace, source: ModelSource, plan: PassPlan) -> Iterator[Row]:
    with loading(options):
        llm = LLM(options.model, None, device="cpu", kv_dtype=options.kv_dtype, weight_inputs=options.weight_inputs)
    yield from rows(llm, source.weights(), plan, _announce)


def _announce(what: str) -> None:
    if sys.stderr.isatty():
        print(f"{what} ...", file=sys.stderr, flush=True)


def _line(row: Row) -> str:
    """Return a row as text, as soon as it is measured."""
    name = ", ".join(str(row[key]) for key in ("engine", "variant", "kernel", "type") if key in row)
    if trouble := row.get("missing") or row.get("failed") or row.get("note"):
        return f"{name}: {trouble}"
    axes = " ".join(f"{key} {row[key]:,}" for key in ("tokens", "context", "width") if key in row)
    seconds = f"{1e3 * row['seconds']:>10,.2f} ms" if "seconds" in row else ""
    rates = {"tokens_per_second": "tokens/s", "gb_per_second": "GB/s", "gflop_per_second": "GFLOP/s"}
    rate = "".join(f" {row[key]:>8,.1f} {unit}" for key, unit in rates.items() if key in row)
    share = f", {row['fraction']:.0%} of the machine's limit" if "fraction" in row else ""
    return f"{name:<54} {axes:<27} {seconds}{rate}{share}"


def tables(measured_rows: Sequence[Row], plan: PassPlan) -> list[Table]:
    """Return tables of prompts, of passes after each context, and of what was not measured."""
    engines = list(dict.fromkeys(row["engine"] for row in measured_rows if "seconds" in row))
    return [
        _prompt_table(measured_rows, plan, engines),
        *(_pass_table(measured_rows, context, plan.widths, engines) for context in plan.contexts),
        *_trouble_tables(measured_rows),
    ]


def _least(measured_rows: Sequence[Row], engine: str, **fields: object) -> float | None:
    """Return the seconds of an engine's fastest setting; None without a row."""
    fields |= {"engine": engine}
    found = [row["seconds"] for row in measured_rows if all(row.get(name) == fields[name] for name in fields)]
    return min(found, default=None)


def _prompt_table(measured_rows: Sequence[Row], plan: PassPlan, engines: Sequence[str]) -> Table:
    lines = []
    for engine in engines:
        times = {length: _least(measured_rows, engine, kernel="prompt", tokens=length) for length in plan.prompts}
        lines.append([engine, *(f"{length / seconds:,.1f}" if seconds else "-" for length, seconds in times.items())])
    return Table("Prompts", PROMPT_NOTE, ["engine", *map(tokens, plan.prompts)], lines)


def _pass_table(measured_rows: Sequence[Row], context: int, widths: Sequence[int], engines: Sequence[str]) -> Table:
    fields = {"kernel": "pass", "context": context}
    times = {engine: [_least(measured_rows, engine, **fields, width=width) for width in widths] for engine in engines}
    own_rows = [row for row in measured_rows if row["engine"] == OURS]
    own_times = times.get(OURS, [])
    lines = []
    for engine, engine_times in times.items():
        lines.append([engine, *(f"{1e3 * seconds:,.2f}" if seconds else "-" for seconds in engine_times)])
        narrowest = engine_times[0]
        lines.append(["  over width 1", *_ratios(engine_times, [narrowest] * len(widths))])
        if engine != OURS and own_times:
            lines.append([f"  {OURS}'s speed over it", *_ratios(engine_times, own_times)])
        elif engine == OURS:
            bounds = [_bound(own_rows, context, width) for width in widths]
            lines.append(["  bound", *(f"{1e3 * seconds:,.2f}" for seconds in bounds)])
            lines += _part_lines(own_rows, context, widths)
    return Table(f"Passes after {tokens(context)} tokens", NOTE, ["tokens of a pass", *map(str, widths)], lines)


def _bound(own_rows: Sequence[Row], context: int, width: int) -> float:
    (row,) = (
        row for row in own_rows if (row["kernel"], row.get("context"), row.get("width")) == ("pass", context, width)
    )
    bound: float = row["least_seconds"]
    return bound


def _part_lines(own_rows: Sequence[Row], context: int, widths: Sequence[int]) -> list[list[str]]:
    """Return a line of shares of a pass for each part."""
    by_width = [parts(own_rows, context, width) for width in widths]
    return [
        [f"  {name}", *(percent(seconds[name] / sum(seconds.values())) for seconds in by_width)] for name in by_width[0]
    ]


def _ratios(times: Sequence[float | None], divisors: Sequence[float | None]) -> list[str]:
    return [f"{a / b:.2f}" if a and b else "-" for a, b in zip(times, divisors, strict=True)]


def _trouble_tables(measured_rows: Sequence[Row]) -> Iterator[Table]:
    unfair = "Milliseconds of these engines are too high.", ("note",)
    failed = "An engine that is not installed is left out; one that failed says why.", ("missing", "failed")
    for title, (note, fields) in {"Not a fair comparison": unfair, "Not measured": failed}.items():
        troubles = [(row, next((row[name] for name in fields if name in row), "")) for row in measured_rows]
        lines = [[", ".join(filter(None, [row["engine"], row.get("variant")])), why] for row, why in troubles if why]
        if lines:
            yield Table(title, note, ["engine", "why"], lines)
