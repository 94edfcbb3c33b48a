"""Tables that are written by hand: names of other engines, and labels of metrics, are those of the code."""

from __future__ import annotations

import re
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

from tests.helpers.pages import ROOT
from triforce import LLM, Grammar, RequestOutput, SamplingParams
from triforce.cli import habits
from triforce.cli.options import KV_DTYPES
from triforce.cli.parser import build_parser
from triforce.server import http_server
from triforce.server.metrics import Metrics

REFERENCE = ROOT / "docs" / "reference"
ENGINES = (REFERENCE / "other-engines.md").read_text(encoding="utf-8")
METRICS = (REFERENCE / "metrics.md").read_text(encoding="utf-8")
UNITS = {"1", "connections", "events", "passes", "prompts", "requests", "seconds", "texts", "tokens"}


def named_here(text: str) -> list[str]:
    """Return what the second cells of the rows of tables write as code."""
    cells = re.findall(r"^\| [^|]*\| ([^|]*)\|", text, re.MULTILINE)
    return re.findall(r"`([^`]+)`", " ".join(cells))


def test_options_named_beside_those_of_other_engines_exist() -> None:
    options = {option for _, parser in build_parser()._leaves() for option in parser._option_string_actions}
    named = {option for cell in named_here(ENGINES) for option in re.findall(r"(?<!\S)--[a-z-]+", cell)}
    assert len(named) > 40 and named - options == set()


def test_arguments_named_beside_those_of_vllm_exist() -> None:
    python = ENGINES[ENGINES.index("### LLM") :]
    known = {*signature(LLM).parameters, *dir(LLM), *dir(Grammar), "grammar", "prompts", "params", "messages"}
    known |= {field.name for kind in (SamplingParams, RequestOutput) for field in fields(kind)} | {*dir(RequestOutput)}
    words = {word for cell in named_here(python) for word in re.findall(r"\w+", cell)}
    assert words - known - {"SamplingParams", "LLM", "Grammar"} == set()


def test_advice_on_other_engines_is_on_their_page() -> None:
    words = set(re.findall(r"[-\w]+", " ".join(re.findall(r"`([^`]+)`", ENGINES))))
    assert [options for options, *_ in habits._HABITS if not words & set(options.split())] == []
    assert set(habits.COMMANDS) - words == set()


def test_help_of_metrics_begins_with_a_unit() -> None:
    engine: Any = None
    families = Metrics(engine, "").registry._collector_to_names
    assert {metric._documentation.split()[0].lower() for metric in families} - UNITS == set()


def test_labels_of_metrics_are_told() -> None:
    source = Path(http_server.__file__).read_text(encoding="utf-8")
    events = set(re.findall(r'count_event\("(\w+)"\)|return "(\w+)" if', source))
    names = {name for pair in events for name in pair if name} | {*KV_DTYPES} - {"auto"}
    assert {"gave_way", "headers_late"} <= names and {name for name in names if f"`{name}`" not in METRICS} == set()
