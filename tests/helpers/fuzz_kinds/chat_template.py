"""Cases of chat templates: random programs, spoiled real templates, and known attacks."""

from __future__ import annotations

import json
import shutil
from functools import cache, partial
from pathlib import Path
from random import Random

import pytest

from tests.helpers.forked_folder import made_apart
from tests.helpers.forked_templates import ForkedTemplates
from tests.helpers.hostile_templates import HOSTILE
from tests.helpers.tiny_checkpoint import tiny_tokenizer
from triforce.checkpoint import template_process, template_worker
from triforce.checkpoint.tokenizer import Tokenizer
from triforce.cli import exit_code

LAYOUT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role != 'system' %}<|{{ m.role }}|>{{ m.content | trim }}</s>"
    "{% elif loop.first %}{% set ns = namespace(system=m.content) %}{{ ns.system }}{% endif %}{% endfor %}"
    "{% if tools %}{{ tools | tojson(indent=4) }}{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NUMBERS = ["0", "1", "-1", "3", "99999", "1000000000", "5000000000", "(10 ** 20)", "1e308", "(2 ** 64)"]
NAMES = ["messages", "tools", "x", "y", "ns", "m", "loop", "bos_token", "dict", "namespace", "range", "self", "varargs"]
FILTERS = [
    "length", "string", "list", "trim", "tojson", "tojson(indent=N)", "center(N)", "indent(N)", "join(E)", "first",
    "replace('', E)", "wordwrap(N)", "urlize", "batch(N)", "slice(N)", "sort", "unique|list", "format(E)", "int", "abs",
    "map('string')|list", "select|list", "groupby('role')", "dictsort", "reverse", "xmlattr", "truncate(N)", "round(N)",
    "attr('__class__')", "map(attribute='__class__')|list", "sum(start=E)", "random", "pprint", "filesizeformat",
    "batch(N, E)|list",
]  # fmt: skip
METHODS = ["upper()", "ljust(N)", "zfill(N)", "format(E)", "join(E)", "replace(E, E)", "expandtabs(N)", "split(E)",
           "items()", "append(E)", "__class__", "mro()", "encode()", "translate(E)"]  # fmt: skip


def expression(random: Random, depth: int = 0) -> str:
    if depth > 3 or random.random() < 0.25:
        return random.choice([random.choice(NUMBERS), random.choice(NAMES), "'cat'", "'%s'", "'{:N}'", "[]", "none"])
    lhs, rhs = (expression(random, depth + 1) for _ in range(2))
    match random.randrange(8):
        case 0 | 1:
            return f"({lhs} {random.choice(['+', '-', '*', '/', '//', '%', '**', '~', '<', '==', 'in', 'and'])} {rhs})"
        case 2:
            return f"({lhs})|{filled(random, random.choice(FILTERS), depth)}"
        case 3:
            return f"({lhs}).{filled(random, random.choice(METHODS), depth)}"
        case 4:
            return f"[{lhs}, {rhs}]"
        case 5:
            return f"{{'a': {lhs}, {rhs}: 'b'}}"
        case 6:
            return f"range({random.choice(NUMBERS)})"
        case _:
            return f"({lhs} if {rhs} else {expression(random, depth + 1)})"


def filled(random: Random, form: str, depth: int) -> str:
    return form.replace("N", random.choice(NUMBERS)).replace("E", expression(random, depth + 2))


def statement(random: Random, depth: int = 0) -> str:
    value = expression(random)
    name = random.choice(["x", "y", "m", "i"])
    inner = "".join(statement(random, depth + 1) for _ in range(random.randrange(3))) if depth < 4 else "cat"
    forms = [
        f"{{{{ {value} }}}}", f"{{% set {name} = {value} %}}", f"{{% for {name} in {value} %}}{inner}{{% endfor %}}",
        f"{{% for {name} in range({random.choice(NUMBERS)}) %}}{inner}{{% endfor %}}",
        f"{{% if {value} %}}{inner}{{% else %}}cat{{% endif %}}", f"{{% set {name} %}}{inner}{{{{ x }}}}{{% endset %}}",
        f"{{% macro f({name}) %}}{inner}{{{{ f({name}) }}}}{{% endmacro %}}{{{{ f({value}) }}}}",
        f"{{% set ns = namespace(x={value}) %}}{{% set ns.x = {value} %}}{inner}",
        f"{{% filter {filled(random, random.choice(FILTERS).partition('|')[0], 0)} %}}{inner}{{% endfilter %}}",
        "{% generation %}" + inner + "{% endgeneration %}", "{% break %}", "{{ raise_exception('no\\n\\x1b[31m') }}",
    ]  # fmt: skip
    return random.choice(forms)


@cache
def tokenizer_files() -> Path:
    return made_apart(lambda folder: tiny_tokenizer().save_pretrained(folder))


def write_case(template: str, folder: Path) -> None:
    shutil.copytree(tokenizer_files(), folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


TEMPLATES = ForkedTemplates()
WHOLES = [partial(write_case, LAYOUT)]


def make_case(random: Random, folder: Path) -> None:
    match random.randrange(6):
        case 0:
            template = random.choice(list(HOSTILE.values()))
        case 1 | 2:
            template = LAYOUT
            for _ in range(random.randrange(1, 4)):
                at, end = sorted(random.randrange(len(template)) for _ in range(2))
                template = template[:at] + random.choice(["", template[at:end] * 2, statement(random)]) + template[end:]
        case _:
            template = "".join(statement(random) for _ in range(random.randrange(1, 6)))
    write_case(template, folder)


def open_case(folder: Path) -> int:
    """Render two conversations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_process, "PROCESS", TEMPLATES)
        patch.setattr(template_worker, "SECONDS", 0.1)
        return exit_code(partial(_chat, Tokenizer.load(folder)))


def _chat(tokenizer: Tokenizer) -> int:
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hat \u202e 東京"}]
    tools = [{"type": "function", "function": {"name": "size", "parameters": json.loads('{"type": "object"}')}}]
    tokenizer.chat(talk)
    tokenizer.chat(talk * 3, tools)
    return 0
