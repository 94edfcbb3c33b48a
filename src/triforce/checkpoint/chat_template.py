"""Chat templates: Jinja programs that lay out a conversation as text. They come with a model and run in a sandbox.

Names and settings are Hugging Face's, for which models publish their templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Return the text of a conversation. Raises the template's own exceptions."""
    return _compiled(template).render(**variables)


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    names = {"raise_exception": _refuse, "strftime_now": _now, "dict": _dict, "namespace": _Namespace}
    environment.globals.update(names)
    return environment.from_string(template)


class _Generation(Extension):
    """Tag `{% generation %}`: it marks the assistant's text for training. It renders as its body."""

    tags = {"generation"}  # noqa: RUF012  as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """Variables that a loop can change. Names with a leading underscore are refused: they would be Python's own."""

    def __init__(self, /, *values: Any, **named: Any) -> None:
        for name in dict(*values, **named):
            _require_plain(name)
        super().__init__(*values, **named)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_plain(name)
        super().__setitem__(name, value)


def _require_plain(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a template may not set {name}, as its name begins with an underscore")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON. Jinja's own filter escapes it for HTML pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _dict(*values: Any, **named: Any) -> dict[str, Any]:
    return dict(*values, **named)
