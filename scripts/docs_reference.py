"""Parts of docs/reference: commands from argparse, fields from dataclasses and pydantic, methods from signatures.

Help texts and docstrings give their meanings.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import triforce
from triforce import LLM, SamplingParams, Session, errors
from triforce.checkpoint.tokenizer import TextStream, Tokenizer
from triforce.cli.parser import build_parser
from triforce.engine import engine, inputs, sequence_group
from triforce.engine.engine import Request
from triforce.engine.model_loader import Checkpoint
from triforce.interface import messages
from triforce.interface.explain import BreakEvenPoint
from triforce.model.config import ModelConfig
from triforce.server import request_base, schemas
from triforce.server.doors import anthropic, chat, ollama, responses
from triforce.server.metrics import Metrics

BODIES = {
    "/v1/completions": schemas.CompletionBody,
    "/v1/chat/completions": chat.ChatBody,
    "/v1/responses": responses.ResponsesBody,
    "/v1/messages": anthropic.MessagesBody,
    "/api/chat": ollama.OllamaChatBody,
    "/api/generate": ollama.GenerateBody,
    "/tokenize": schemas.TokenizeBody,
    "/detokenize": schemas.DetokenizeBody,
}
REACHED = (Request, BreakEvenPoint, Checkpoint, ModelConfig, Tokenizer, TextStream)
"""Classes that `triforce` does not export, but attributes and methods of its classes return."""
ALIASES: tuple[tuple[ModuleType, str], ...] = (
    (inputs, "Prompt"),
    (messages, "Message"),
    (sequence_group, "OnPrefill"),
    (engine, "Event"),
)
"""Names in signatures that stand for types and are no classes, each with the module that defines it."""
VALUE_COLUMNS = 40
"""Most columns of a default value. Of a longer value only the type is shown."""
SIGNATURE_COLUMNS = 100
"""Most columns of a signature in one line. A longer signature has a line for each parameter."""
Row = tuple[str, str]
"""An argument with its value, and its meaning."""
POSITIONAL = "Positional arguments"
OPTIONS = "Options"
"""Titles that argparse gives to untitled groups."""
COMMON = "Common options"
"""Section of shared options that no command has in a titled group."""
COMMON_COMMANDS = 4
"""Least number of commands with an option of the section `COMMON`."""


class Command(NamedTuple):
    """A command of the program: its rows of arguments by the title of their group."""

    name: str
    description: str
    groups: dict[str, list[Row]]


def commands() -> str:
    """Return every command with its arguments, as sections. Shared options are in separate sections."""
    all_commands = list(_commands(build_parser(), "triforce"))
    shared = shared_options(all_commands)
    section_of = {row: title for title, rows in shared.items() for row in rows}
    parts = [_command(command, shared, section_of) for command in all_commands]
    parts.append("## Shared options\n\nOptions that several commands have, with the same meaning.")
    parts += [f"### {title}\n\n{_argument_table(rows)}" for title, rows in shared.items()]
    return "\n\n".join(parts)


def _commands(parser: argparse.ArgumentParser, name: str) -> Iterator[Command]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub, subparser in action.choices.items():
                yield from _commands(subparser, f"{name} {sub}")
            return
    groups = {}
    positional_names = {str(a.metavar) for a in parser._actions if a.metavar and not a.option_strings}
    for group in parser._action_groups:
        rows = [(_flags(a), _meaning(a, positional_names)) for a in group._group_actions if a.help != argparse.SUPPRESS]
        if rows := [row for row in rows if not row[0].startswith("`-h`")]:
            groups[(group.title or "").capitalize()] = rows
    yield Command(name, parser.description or "", groups)


def _meaning(action: argparse.Action, positional_names: Collection[str]) -> str:
    """Return the help of an argument. An option with the name of a positional argument stands for that argument."""
    for name in positional_names:
        if f"--{name.lower()}" in action.option_strings:
            return f"the argument {code(name)}, as an option"
    return cell((action.help or "").replace("%(default)s", str(action.default)))


def shared_options(all_commands: Sequence[Command]) -> dict[str, list[Row]]:
    """Return options that several commands have with the same help, by section.

    The section of an option is a named group that has it in one of the commands, or else `COMMON`, which has options of
    at least `COMMON_COMMANDS` commands.
    """
    titles: dict[Row, list[str]] = {}
    for command in all_commands:
        for title, rows in command.groups.items():
            for row in rows if title != POSITIONAL else ():
                titles.setdefault(row, []).append(title)
    sections: dict[str, list[Row]] = {COMMON: []}
    for row, row_titles in titles.items():
        named_groups = [title for title in row_titles if title != OPTIONS]
        if len(row_titles) >= (2 if named_groups else COMMON_COMMANDS):
            sections.setdefault(named_groups[0] if named_groups else COMMON, []).append(row)
    return sections


def _command(command: Command, shared: Mapping[str, Sequence[Row]], section_of: Mapping[Row, str]) -> str:
    parts = [f"## {command.name}\n\n{command.description}"]
    for title, rows in command.groups.items():
        if specific_rows := [row for row in rows if row not in section_of]:
            parts.append(f"**{title}**\n\n{_argument_table(specific_rows)}")
    command_rows = [row for rows in command.groups.values() for row in rows]
    references = [_reference(title, rows, command_rows) for title, rows in shared.items()]
    if references := [reference for reference in references if reference]:
        parts.append("**Shared options**\n\n" + "\n".join(f"- {reference}" for reference in references))
    return "\n\n".join(parts)


def _reference(title: str, section_rows: Sequence[Row], command_rows: Sequence[Row]) -> str:
    """Return which options of a section a command has, in words; an empty text if it has none."""
    link = f"[{title}](#{title.lower().replace(' ', '-')})"
    names = [_option_name(row) for row in section_rows if row in command_rows]
    missing_names = [_option_name(row) for row in section_rows if row not in command_rows]
    if not names:
        return ""
    if not missing_names:
        return f"all of {link}"
    if 4 * len(missing_names) <= len(names):
        return f"all of {link} except {', '.join(missing_names)}"
    return f"{', '.join(names)} of {link}"


def _option_name(row: Row) -> str:
    """Return the long name of an option, as code."""
    return next(name for name in row[0].split(", ") if name.startswith("`--")).split(" ")[0]


def _argument_table(rows: Sequence[Row]) -> str:
    return table([["argument", "meaning"], *map(list, rows)])


def _flags(action: argparse.Action) -> str:
    names = [code(name) for name in action.option_strings] or [code(str(action.metavar or action.dest))]
    if not action.option_strings or action.nargs == 0:
        return ", ".join(names)
    value = action.metavar or "|".join(map(str, action.choices or ())) or action.dest.upper()
    several = " ..." if action.nargs == "+" else ""
    value = value if isinstance(value, str) else " ".join(value)
    return f"{', '.join(names)} {code(value.replace('|', ', ') + several)}"


def python() -> str:
    """Return what `triforce` exports, the classes in `REACHED`, and names of types, as sections.

    Errors are on another page.
    """
    exported = [getattr(triforce, name) for name in triforce._MODULE_BY_NAME]
    classes = [kind for kind in exported if isinstance(kind, type) and not issubclass(kind, errors.TriforceError)]
    parts = [_class(kind, constructed=kind in (LLM, Session)) for kind in classes]
    parts += [_function(function) for function in exported if inspect.isfunction(function)]
    parts += [_class(kind, imported=True) for kind in REACHED]
    parts.append(f"## Names of types\n\n{_aliases()}")
    return "\n\n".join(parts)


def _class(kind: type, *, constructed: bool = False, imported: bool = False) -> str:
    """Return the section of a class. constructed: callers construct it. imported: `triforce` does not export it."""
    parts = [f"## {kind.__name__}", *_description(kind)]
    if imported:
        parts.insert(1, f"Module: {code(kind.__module__)}.")
    if constructed:
        parts.insert(1, _signature(kind.__name__, kind))
    if fields := _fields(kind):
        parts.append(_field_table(kind, fields))
    names = (name for base in kind.__mro__ if _is_ours(base) for name in vars(base))
    members = {
        name: inspect.getattr_static(kind, name) for name in names if not name.startswith("_") and name not in fields
    }
    properties = {name: getter for name, member in members.items() if (getter := _getter(member))}
    if properties:
        parts.append(_property_table(properties))
    for name, member in members.items():
        if name not in properties and inspect.isroutine(member):
            parts += [f"### {kind.__name__}.{name}", _signature(name, getattr(kind, name)), *_description(member)]
    return "\n\n".join(parts)


def _function(function: Callable[..., Any]) -> str:
    return "\n\n".join([f"## {function.__name__}", _signature(function.__name__, function), *_description(function)])


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("triforce.")


def _value(default: object) -> str:
    shown = repr(default)
    return f"{type(default).__name__}()" if shown.startswith("<") or len(shown) > VALUE_COLUMNS else shown


def _signature(name: str, function: Callable[..., Any]) -> str:
    """Return the call of a function with types and defaults, and the type that it returns, as a block."""
    signature = inspect.signature(function)
    parameters = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        if parameter.name != "self":
            parameters.append(_parameter(parameter))
    returned = "" if isinstance(function, type) else f" -> {_type_name(signature.return_annotation)}"
    line = f"{name}({', '.join(parameters)}){returned}"
    if len(line) > SIGNATURE_COLUMNS:
        line = "\n".join([f"{name}(", *(f"    {parameter}," for parameter in parameters), f"){returned}"])
    return f"```text\n{line}\n```"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
    default = "" if parameter.default is parameter.empty else f" = {_value(parameter.default)}"
    return f"{stars}{parameter.name}: {_type_name(parameter.annotation)}{default}"


def _type_name(annotation: object) -> str:
    name = annotation.__name__ if type(annotation) is type else getattr(annotation, "__forward_arg__", str(annotation))
    return _plain(str(name))


def _getter(member: object) -> Callable[..., Any] | None:
    """Return the function of a property; None for other members."""
    if isinstance(member, property):
        return member.fget
    return member.func if isinstance(member, cached_property) else None


def _property_table(properties: Mapping[str, Callable[..., Any]]) -> str:
    rows = [["property", "type", "meaning"]]
    for name, getter in properties.items():
        kind = _type_name(inspect.signature(getter).return_annotation)
        rows.append([code(name), code(cell(kind)), cell(inspect.getdoc(getter) or "")])
    return table(rows)


def _aliases() -> str:
    """Return the names in `ALIASES` with their definitions, as a table."""
    rows = [["name", "definition", "meaning"]]
    for module, name in ALIASES:
        source = inspect.getsource(module)
        definition, meaning = re.findall(rf'^{name} = ([^\n]*)\n"""(.*?)"""', source, re.MULTILINE | re.DOTALL)[0]
        rows.append([code(name), code(cell(definition)), cell(meaning)])
    return table(rows)


def _description(thing: object) -> Iterator[str]:
    """Yield a docstring as paragraphs; items that begin with `- name: ` are rows of a table.

    These rows are attributes after a paragraph that begins with "Attributes", and parameters otherwise.
    """
    head = ["parameter", "meaning"]
    for paragraph in (inspect.getdoc(thing) or "").split("\n\n"):
        text = re.sub(r"\n(?!- )\s*", " ", paragraph)
        items = text.split("\n")
        if all(re.match(r"- \w+(, \w+)*: ", item) for item in items):
            yield table([head, *(_row(*item[2:].split(": ", 1)) for item in items)])
        elif text:
            head = ["attribute", "meaning"] if text.startswith("Attributes") else head
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
    """Return fields as a table. Their meanings are their comments and docstrings."""
    notes = _notes(kind)
    rows = [["field", "type", "default", "meaning"]]
    for name, (type_, default) in fields.items():
        shown = "" if default is MISSING else code(_value(default))
        rows.append([code(name), code(cell(_type_name(type_))), shown, cell(notes.get(name, ""))])
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
    """Return the bodies of all endpoints, and then the objects in these bodies, as sections."""
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
    """Return the type of a field in JSON's words. A field that may be omitted may also be null."""
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


def other_fields() -> str:
    """Return fields of other servers, as sections: ignored fields, neutral values, and fields with another name."""
    return "\n\n".join((_ignored_fields(), _neutral_values(), _renamed_fields()))


def _ignored_fields() -> str:
    rows = [["field", "of", f"named in `{request_base.HEADER}`"]]
    for names, is_named in ((request_base.NEUTRAL_FIELDS, "no"), (request_base.IGNORED_FIELDS, "yes")):
        rows.append([_codes(names), "any request", is_named])
    objects = {name for body in BODIES.values() for name in body.model_json_schema().get("$defs", {})}
    objects_by_fields: dict[str, set[str]] = {}
    for body in _bodies(request_base.Body):
        if body.skipped and body.__name__ in objects:
            objects_by_fields.setdefault(_codes(body.skipped), set()).add(body.__name__)
    for fields_, names in sorted(objects_by_fields.items()):
        links = ", ".join(f"[{name}](#{name.lower()})" for name in sorted(names))
        rows.append([fields_, links, "yes"])
    return f"### Ignored\n\n{table(rows)}"


def _neutral_values() -> str:
    rows = [["field", "accepted values", "a field of", "advice on other values"]]
    for name, (values, advice) in sorted(request_base.UNSUPPORTED_FIELDS.items()):
        accepted = ", ".join(code(json.dumps(value)) for value in values) or "`null` only"
        addresses = [address for address, body in BODIES.items() if name in body.model_fields]
        rows.append([code(name), accepted, _codes(addresses, ordered=True), cell(advice)])
    return f"### Accepted at a neutral value\n\n{table(rows)}"


def _renamed_fields() -> str:
    names_by_advice: dict[tuple[str, str], list[str]] = {}
    for name, advice in request_base.FIELD_ADVICE.items():
        names_by_advice.setdefault(("any request", advice), []).append(name)
    for address, body in BODIES.items():
        for name, advice in body.field_advice.items():
            names_by_advice.setdefault((code(address), advice), []).append(name)
    rows = [[_codes(names), where, cell(advice)] for (where, advice), names in names_by_advice.items()]
    return f"### Refused, with advice\n\n{table([['field', 'of', 'advice'], *rows])}"


def _bodies(kind: type[request_base.Body]) -> Iterator[type[request_base.Body]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _bodies(subclass)


def _codes(names: Iterable[str], *, ordered: bool = False) -> str:
    return ", ".join(map(code, names if ordered else sorted(names)))


def metrics() -> str:
    """Return the metrics of a server as a table, and the buckets of histograms as a second one."""
    engine: Any = None  # only values of metrics need an engine
    collectors = Metrics(engine, "").registry._collector_to_names
    rows = [["metric", "type", "labels", "unit", "meaning"]]
    buckets: dict[str, list[str]] = {}
    for metric in collectors:
        name = code(metric._name + "_total" * (metric._type == "counter"))
        unit = metric._documentation.split()[0].lower()
        labels = [label for label in metric._labelnames if label != "model_name"]
        rows.append([name, metric._type, _codes(labels), unit, cell(metric._documentation)])
        if metric._type == "histogram":
            bounds = ", ".join(f"{bound:,g}" if bound < 1 else f"{bound:,.10g}" for bound in metric._upper_bounds[:-1])
            buckets.setdefault(bounds, []).append(name)
    bucket_rows = [[", ".join(names), bounds] for bounds, names in buckets.items()]
    return f"{table(rows)}\n\n## Buckets of histograms\n\n{table([['histograms', 'upper bounds'], *bucket_rows])}"


def exceptions() -> str:
    """Return the exceptions that callers meet, as a table."""
    error_types = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    rows = [[code(e.__name__), " ".join((inspect.getdoc(e) or "").split())] for e in error_types]
    return table([["exception", "meaning"], *rows])


def cell(text: str) -> str:
    """Return text for a cell of a table: in one line, with bars escaped."""
    return " ".join(text.split()).replace("%%", "%").replace("|", "\\|")


PARTS: tuple[tuple[str, str, Callable[[], str]], ...] = (
    ("command-line.md", "triforce.cli", commands),
    ("python.md", "triforce", python),
    ("http.md", "triforce.server.request_base", other_fields),
    ("http.md", "triforce.server.schemas", http),
    ("metrics.md", "triforce.server.metrics", metrics),
    ("errors.md", "triforce.errors", exceptions),
)
"""The page of each generated part, its source, and the function that makes it."""


def code(text: str) -> str:
    return f"`{text}`"


def table(rows: list[list[str]]) -> str:
    header, *body_rows = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([header, "|---" * len(rows[0]) + "|", *body_rows])


def filled(page: str, source: str, text: str) -> str:
    """Return `page` with `text` between the comments that name its source. Raises ValueError without such comments."""
    begin = f"<!-- {source}, by scripts/docs.py -->"
    end = f"<!-- end of {source} -->"
    head = page[: page.index(begin)]
    tail = page[page.index(begin) :]
    return f"{head}{begin}\n\n{text}\n\n{tail[tail.index(end) :]}"


def files(root: Path) -> dict[Path, str]:
    """Return the pages of the reference, with their generated parts made from the code."""
    pages: dict[Path, str] = {}
    for name, source, make in PARTS:
        page = root / "docs" / "reference" / name
        pages[page] = filled(pages.get(page) or page.read_text(encoding="utf-8"), source, make())
    return pages
