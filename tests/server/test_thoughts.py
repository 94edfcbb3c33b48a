"""Thoughts in front of an answer: split from it in any pieces, in chats and responses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.types import ASGIApp

from tests.helpers.asgi_client import ask, events, good
from tests.helpers.templated_app import templated_app
from triforce.server.answers.thoughts import ThoughtSplitter

TEXTS = [
    ("<think>\nhm, so\n</think>\n\nA cat.", False, "hm, so", "A cat."),
    ("  <think>hm</think>A cat. ", False, "hm", "A cat. "),
    ("hm\n</think>\nA cat.", True, "hm", "A cat."),
    ("A <think>cat</think>.", False, "", "A <think>cat</think>."),
    ("<thin air", False, "", "<thin air"),
    (" A cat.", False, "", " A cat."),
    ("<think>still on it", False, "still on it", ""),
    ("<think></think>A", False, "", "A"),
    ("<think>a </thin b</think>c <think>d", False, "a </thin b", "c <think>d"),
    ("", True, "", ""),
]


@pytest.mark.parametrize("width", [1, 4, 1000])
@pytest.mark.parametrize(("text", "begun", "thoughts", "answer"), TEXTS)
def test_thoughts_are_split_in_any_pieces(text: str, begun: bool, thoughts: str, answer: str, width: int) -> None:
    splitter = ThoughtSplitter(("<think>", "</think>"), open_at_start=begun)
    pieces = [text[i : i + width] for i in range(0, len(text), width)] or [""]
    parts = [splitter.add(piece, is_final=i == len(pieces)) for i, piece in enumerate(pieces, 1)]
    assert ("".join(part for part, _ in parts), "".join(part for _, part in parts)) == (thoughts, answer)


@pytest.mark.parametrize("text", [text for text, *_ in TEXTS])
def test_model_without_thoughts_keeps_its_text(text: str) -> None:
    assert ThoughtSplitter().add(text, is_final=True) == ("", text)


TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}</s>{% endfor %}bot: <think>{% if no %}</think>{% endif %}"
)


@pytest.fixture(scope="module")
def thinking(pair: Path) -> Iterator[ASGIApp]:
    """A server of a model whose answers begin inside thoughts; a random model never ends them."""
    yield from templated_app(pair, TEMPLATE)


CHAT = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 12, "seed": 3, "ignore_eos": True}


def test_chat_has_thoughts_apart(thinking: ASGIApp) -> None:
    (choice,) = good(ask(thinking, "/v1/chat/completions", CHAT))["choices"]
    thoughts = choice["message"]["reasoning_content"]
    assert thoughts and not choice["message"]["content"] and choice["finish_reason"] == "length"
    chunks = events(ask(thinking, "/v1/chat/completions", CHAT | {"stream": True}))
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == thoughts
    assert not "".join(delta.get("content") or "" for delta in deltas)
    (plain,) = good(ask(thinking, "/v1/chat/completions", CHAT | {"reasoning_format": "none"}))["choices"]
    assert plain["message"]["content"].strip() == thoughts and "reasoning_content" not in plain["message"]


def test_grammar_leaves_no_room_for_thoughts(thinking: ASGIApp) -> None:
    (choice,) = good(ask(thinking, "/v1/chat/completions", CHAT | {
        "response_format": {"type": "regex", "regex": "ab"}, "ignore_eos": False,
    }))["choices"]  # fmt: skip
    assert choice["message"]["content"] == "ab"


def test_response_has_item_of_thoughts(thinking: ASGIApp) -> None:
    body = {"input": "the cat", "max_output_tokens": 12, "seed": 3, "ignore_eos": True}
    whole = good(ask(thinking, "/v1/responses", body))
    (item,) = whole["output"]
    assert item["type"] == "reasoning" and item["summary"][0]["text"]
    streamed = events(ask(thinking, "/v1/responses", body | {"stream": True}))
    kinds = [event["type"].removeprefix("response.") for event in streamed]
    assert kinds[2:4] == ["output_item.added", "reasoning_summary_part.added"]
    assert kinds[-4:] == [
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "incomplete",
    ]
    deltas = [event["delta"] for event in streamed if event["type"].endswith("reasoning_summary_text.delta")]
    assert "".join(deltas) == item["summary"][0]["text"]
    assert [event["sequence_number"] for event in streamed] == list(range(len(streamed)))


def test_replayed_thoughts_reach_template_that_shows_them(thinking: ASGIApp) -> None:
    def tokens(**fields: str) -> int:
        turns = [*CHAT["messages"], {"role": "assistant", "content": "a", **fields}, *CHAT["messages"]]  # type: ignore[misc]
        answer = ask(thinking, "/v1/chat/completions", CHAT | {"messages": turns})
        assert "x-triforce-ignored" not in answer.headers
        return int(good(answer)["usage"]["prompt_tokens"])

    assert tokens(reasoning_content="the hat") > tokens()
