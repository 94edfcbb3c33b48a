"""Parts of docs/reference: commands from argparse, fields from dataclasses and pydantic, methods from signatures.

What is said of them comes from help texts and docstrings.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import triforce
from triforce import LLM, SamplingParams, Session, errors
from triforce.cli.parser import build_parser
from triforce.server import schemas

BODIES = {
    "/v1/completions": schemas.CompletionBody,
    "/v1/chat/completions": schemas.ChatBody,
    "/v1/responses": schemas.ResponsesBody,
    "/tokenize": schemas.TokenizeBody,
    "/detokenize": schemas.DetokenizeBody,
}


def commands() -> str:
    """Return every command with its arguments, as sections."""
    return "\n\n".join(_commands(build_parser(), "triforce"))


def _commands(parser: argparse.ArgumentParser, name: str) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub, subparser in action.choices.items():
                yield from _commands(subparser, f"{name} {sub}")
            return
    yield f"## {name}\n\n{parser.description}"
    for group in parser._action_groups:
        rows = [
            [_flags(a), cell((a.help or "").replace("%(default)s", str(a.default)))]
            for a in group._group_actions
            if a.help != argparse.SUPPRESS
        ]
        rows = [row for row in rows if not row[0].startswith("`-h`")]
        if rows:
            title = (group.title or "").capitalize()
            yield f"**{title}**\n\n{table([['argument', 'meaning'], *rows])}"


def _flags(action: argparse.Action) -> str:
    names = [code(name) for name in action.option_strings] or [code(str(action.metavar or action.dest))]
    if not action.option_strings or action.nargs == 0:
        return ", ".join(names)
    value = action.metavar or "|".join(map(str, action.choices or ())) or action.dest.upper()
    several = " ..." if action.nargs == "+" else ""
    value = value if isinstance(value, str) else " ".join(value)
    return f"{', '.join(names)} {code(value.replace('|', ', ') + several)}"


def python() -> str:
    """Return the classes that `triforce` exports, as sections. Errors have a page of their own."""
    kinds = [getattr(triforce, name) for name in triforce._HOMES]
    shown = [kind for kind in kinds if not issubclass(kind, errors.TriforceError)]
    return "\n\n".join(_class(kind, parameters=kind in (LLM, Session)) for kind in shown)


def _class(kind: type, *, parameters: bool = False) -> str:
    parts = [f"## {kind.__name__}", *_description(kind, ("parameter", "meaning"))]
    if parameters:
        parameters_of = inspect.signature(kind).parameters.items()
        parameter_texts = [name if p.default is p.empty else f"{name}={_value(p.default)}" for name, p in parameters_of]
        parts.insert(
            1,
            "```text\n"
            + fill(f"{kind.__name__}({', '.join(parameter_texts)})", 100, subsequent_indent="    ")
            + "\n```",
        )
    if fields := _fields(kind):
        parts.append(_field_table(kind, fields))
    members = {name: member for base in kind.__mro__ for name, member in vars(base).items() if _is_ours(base)}
    for name, member in members.items():
        method = callable(member) or isinstance(member, classmethod | staticmethod | property)
        if method and not name.startswith("_") and name not in fields:
            parts += _member(kind, name)
    return "\n\n".join(parts)


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("triforce.")


def _value(default: object) -> str:
    shown = repr(default)
    return f"{type(default).__name__}()" if shown.startswith("<") else shown


def _member(kind: type, name: str) -> Iterator[str]:
    member = inspect.getattr_static(kind, name)
    if isinstance(member, property):
        yield f"### {kind.__name__}.{name}"
    else:
        parameter_names = [n for n in inspect.signature(getattr(kind, name)).parameters if n != "self"]
        yield f"### {kind.__name__}.{name}({', '.join(parameter_names)})"
    yield from _description(member.fget if isinstance(member, property) else member, ("parameter", "meaning"))


def _description(thing: object, head: tuple[str, str]) -> Iterator[str]:
    """Yield a docstring as paragraphs; items that begin with `- name: ` are rows of a table."""
    for paragraph in (inspect.getdoc(thing) or "").split("\n\n"):
        text = re.sub(r"\n(?!- )\s*", " ", paragraph)
        items = text.split("\n")
        if all(re.match(r"- \w+(, \w+)*: ", item) for item in items):
            yield table([list(head), *(_row(*item[2:].split(": ", 1)) for item in items)])
        elif text:
            yield text


def _row(names: str, meaning: str) -> list[str]:
    return [", ".join(map(code, names.split(", "))), cell(meaning)]


def _fields(kind: type) -> dict[str, tuple[Any, Any]]:
    """Return the fields of a dataclass or a named tuple: the type of each, and its default."""
    if is_dataclass(kind):
        return {field.name: (field.type, field.default) for field in fields(kind)}
    names: tuple[str, ...] = getattr(kind, "_fields", ())
    return {name: (kind.__annotations__[name], kind._field_defaults.get(name, MISSING)) for name in names}


def _field_table(kind: type, fields: dict[str, tuple[Any, Any]]) -> str:
    """Return fields as a table: their comments and docstrings say what they mean."""
    notes = _notes(kind)
    rows = [["field", "type", "default", "meaning"]]
    for name, (type_, default) in fields.items():
        shown = "" if default is MISSING else code(repr(default))
        kind_ = type_.__name__ if type(type_) is type else getattr(type_, "__forward_arg__", str(type_))
        rows.append([code(name), code(cell(_plain(kind_))), shown, cell(notes.get(name, ""))])
    return table(rows)


def _notes(kind: type) -> dict[str, str]:
    source = inspect.getsource(kind)
    notes = {}
    for name, _, comment in re.findall(
        r'^    (\w+): ([^#\n]*?)(?:  # (.*)|\n    """(?:.*)""")?$', source, re.MULTILINE
    ):
        notes[name] = comment
    for name, note in re.findall(r'^    (\w+): [^\n]*\n    """(.*?)"""', source, re.MULTILINE | re.DOTALL):
        notes[name] = " ".join(note.split())
    return notes


def _plain(kind: str) -> str:
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", kind).replace("'", '"')


def http() -> str:
    """Return the bodies of all endpoints, and then what they are made of, as sections."""
    notes = _notes(SamplingParams)
    parts = []
    objects: dict[str, Any] = {}
    for address, body in BODIES.items():
        schema = body.model_json_schema()
        objects |= schema.get("$defs", {})
        parts.append(f"## POST {address}\n\n{_properties(schema, notes)}")
    parts.append("## Objects")
    for name, schema in sorted(objects.items()):
        description = " ".join(schema.get("description", "").split())
        parts.append("\n\n".join(part for part in (f"### {name}", description, _properties(schema, {})) if part))
    return "\n\n".join(parts)


def _properties(schema: dict[str, Any], notes: dict[str, str]) -> str:
    rows = [["field", "type", "meaning"]]
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        meaning = field.get("description") or notes.get(name, "")
        rows.append([code(name) + (" (required)" if name in required else ""), _type(field), cell(meaning)])
    return table(rows)


def _type(field: dict[str, Any]) -> str:
    """Return the type of a field in JSON's words; null is allowed wherever a field may be left out."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in field or "enum" in field:
        return ", ".join(code(str(value)) for value in field.get("enum", [field.get("const")]))
    if several := field.get("anyOf") or field.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(part) for part in several if part.get("type") != "null"))
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return str(field.get("type", "any"))


def exceptions() -> str:
    """Return the exceptions that callers meet, as a table."""
    error_types = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    rows = [[code(e.__name__), " ".join((inspect.getdoc(e) or "").split())] for e in error_types]
    return table([["exception", "meaning"], *rows])


def cell(text: str) -> str:
    """Return text that a cell of a table can hold: one line, no bars."""
    return " ".join(text.split()).replace("%%", "%").replace("|", "\\|")


PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    "command-line.md": ("triforce.cli", commands),
    "python.md": ("triforce", python),
    "http.md": ("triforce.server.schemas", http),
    "errors.md": ("triforce.errors", exceptions),
}
"""The source of the generated part of each page, and the function that makes it."""


def code(text: str) -> str:
    return f"`{text}`"


def table(rows: list[list[str]]) -> str:
    header, *body_rows = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([header, "|---" * len(rows[0]) + "|", *body_rows])


def filled(page: str, source: str, text: str) -> str:
    """Return `page` with `text` between the comments that name its source. Raises ValueError where they are missing."""
    begin = f"<!-- {source}, by scripts/docs.py -->"
    end = f"<!-- end of {source} -->"
    head = page[: page.index(begin)]
    tail = page[page.index(begin) :]
    return f"{head}{begin}\n\n{text}\n\n{tail[tail.index(end) :]}"


def files(root: Path) -> dict[Path, str]:
    """Return pages with what the code says in their generated part."""
    pages = {root / "docs" / "reference" / name: part for name, part in PARTS.items()}
    return {page: filled(page.read_text(encoding="utf-8"), source, make()) for page, (source, make) in pages.items()}
