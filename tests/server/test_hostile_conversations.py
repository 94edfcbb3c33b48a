"""Hostile conversations keep the laws of `conversation_laws`, with the chat template of each family."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.asgi_client import ask
from tests.helpers.conversation_laws import ServedTemplate, status_of
from tests.helpers.hostile_conversations import CHAT, RESPONSES
from tests.helpers.templated_app import templated_app
from tests.helpers.written_templates import WRITTEN
from tests.server.test_call_families import FAMILIES, Family, served_chain
from tests.server.test_tool_calls import CALLS, TURNS
from triforce.checkpoint.control_tokens import HiddenTokens
from triforce.server.answers.marks import Marks
from triforce.server.doors.chat import ChatWriter

CHATML = Family(
    'So: <tool_call>\n{"name": "size", "arguments": {"of": "cat <b>", "cm": 30}}\n</tool_call>',
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    '{{ tools | tojson }}{# "arguments" #}<|im_start|>assistant',
    marks=("<|im_start|>", "<|im_end|>"),
    plain_marks=("<tool_call>", "</tool_call>"),
)
UNTRAINED = "untrained"
"""Name of a model of random weights, which writes any text."""


def written(name: str, family: Family, plain_marks: tuple[str, ...] = ()) -> Family:
    """Return one of the templates that lay out calls, results and thoughts, too."""
    return Family(family.text, WRITTEN[name].text, WRITTEN[name].control_tokens, plain_marks)


TEMPLATES = {
    **FAMILIES,
    "ChatML": CHATML,
    UNTRAINED: Family("", TURNS.replace("CALL", CALLS["qwen"]) + "<s>assistant: ", plain_marks=CHATML.plain_marks),
    "written ChatML": written("ChatML", CHATML, CHATML.plain_marks),
    "written Llama 3": written("Llama 3", FAMILIES["llama"]),
    "written Mistral": written("Mistral", FAMILIES["mistral"]),
}
COUNT = 7
"""Conversations of each template in a quick run."""
LONG_COUNT = 500
"""Conversations of each template in a long run."""


@pytest.fixture(scope="module", params=TEMPLATES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(name: str, pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedTemplate]:
    yield from serving(name, pair, tmp_path_factory.mktemp("chain"))


@pytest.fixture(scope="module")
def served_mistral(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedTemplate]:
    yield from serving("mistral", pair, tmp_path_factory.mktemp("chain"))


def serving(name: str, pair: Path, folder: Path) -> Iterator[ServedTemplate]:
    """Yield the server of a template. pair: the untrained model."""
    family = TEMPLATES[name]
    apps = templated_app(pair, family.template) if name == UNTRAINED else served_chain(folder, family, family.text)
    for app in apps:
        yield ServedTemplate(app, ("<s>", "</s>", *family.marks), family.plain_marks)


def statuses(served: ServedTemplate, first_seed: int, count: int) -> Counter[int]:
    """Return how often conversations got each status. Raises AssertionError with all that broke a law."""
    counts = Counter[int]()
    faults = []
    for seed in range(first_seed, first_seed + count):
        try:
            counts[status_of(served, seed)] += 1
        except AssertionError as error:
            faults.append(str(error))
    assert not faults, "\n\n".join([f"{len(faults)} of {count} conversations", *faults[:5]])
    return counts


def test_hostile_conversations_keep_laws(served: ServedTemplate, name: str) -> None:
    """Over all templates 140 conversations; each template has its own."""
    counts = statuses(served, 1000 * list(TEMPLATES).index(name), COUNT)
    assert counts[200] > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_hostile_conversations_keep_laws(served: ServedTemplate, name: str) -> None:
    assert LONG_COUNT * len(TEMPLATES) >= 10_000
    counts = statuses(served, 1_000_000 * (1 + list(TEMPLATES).index(name)), LONG_COUNT)
    print(f"{name}: {dict(counts)}")
    assert counts[200] > LONG_COUNT / 4


def unhidden(hidden: HiddenTokens, value: Any) -> Any:
    """Leave control tokens in people's text as they are."""
    return value


def without_pieces(writer: ChatWriter, prompt: int, piece: Any) -> Iterator[bytes]:
    """Stream nothing."""
    yield from ()


def raising(marks: Marks, text: str) -> str:
    raise RuntimeError("broken")


SPOILED = {
    "control tokens": (HiddenTokens, "replaced", unhidden),
    "stream": (ChatWriter, "piece", without_pieces),
    "error": (Marks, "restored", raising),
}


@pytest.mark.parametrize("part", SPOILED)
def test_broken_server_is_detected(served_mistral: ServedTemplate, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*SPOILED[part])
    with pytest.raises(AssertionError, match="of 40 conversations"):
        statuses(served_mistral, 0, 40)


def test_half_of_character_in_a_tool_is_told_back(served_mistral: ServedTemplate) -> None:
    """Tools that may not be called are not in the prompt, which would refuse the text, but in the answer."""
    tool = {"type": "function", "name": "size", "description": "\ud83d"}
    body = {"input": "the cat", "max_output_tokens": 2, "tools": [tool], "tool_choice": "none"}
    content = json.dumps(body).encode()
    response = ask(served_mistral.app, RESPONSES, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 200 and response.json()["tools"][0]["description"] == "\ud83d"


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_unknown_stop_id_of_stream_is_refused_before_it_begins(served_mistral: ServedTemplate, path: str) -> None:
    """A stream is refused as the whole answer is, with 400."""
    turns = [{"role": "user", "content": "the cat"}]
    body = {"messages" if path == CHAT else "input": turns, "stop_token_ids": [10**6]}
    assert ask(served_mistral.app, path, body).status_code == 400
    assert ask(served_mistral.app, path, body | {"stream": True}).status_code == 400
