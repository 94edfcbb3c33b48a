"""Laws of answers to conversations: their status, their shape, their stream, and the control tokens of their prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import httpx

from tests.helpers.asgi_client import ask, events, told_refusal
from tests.helpers.door_translation import MESSAGES, OLLAMA
from tests.helpers.hostile_conversations import CHAT, RESPONSES, Conversation, drawn_conversation, harmless
from triforce.server.doors.anthropic import MessagesBody
from triforce.server.doors.chat import ChatBody
from triforce.server.doors.ollama import OllamaChatBody
from triforce.server.doors.responses import ResponsesBody
from triforce.server.schemas import ConversationBody

THOUGHT_MARKS = {"<think>", "</think>"}
FINISHES = {
    CHAT: {"stop", "length", "tool_calls"},
    RESPONSES: {"completed", "incomplete"},
    MESSAGES: {"end_turn", "max_tokens", "stop_sequence", "tool_use"},
    OLLAMA: {"stop", "length"},
}
"""Why an answer may end, by door."""
BODIES: dict[str, type[ConversationBody]] = {
    CHAT: ChatBody,
    RESPONSES: ResponsesBody,
    MESSAGES: MessagesBody,
    OLLAMA: OllamaChatBody,
}


class Answer(NamedTuple):
    """The parts of one answer: text, thoughts, calls with their arguments, and why it ended."""

    text: str
    thoughts: str
    calls: tuple[tuple[str, str], ...]
    finish: str


class ServedTemplate(NamedTuple):
    """A server of a model with a chat template, and the marks of the template.

    special_marks: marks that are special tokens. plain_marks: other tokens, which a text may show where an answer has
    no calls.
    """

    app: Any
    special_marks: Sequence[str]
    plain_marks: Sequence[str]

    @property
    def marks(self) -> list[str]:
        return [*self.special_marks, *self.plain_marks]


def status_of(served: ServedTemplate, seed: int) -> int:
    """Ask for the next turn of the conversation of a seed, whole and as a stream. Return the status.

    Raises AssertionError for a broken law.
    """
    conversation = drawn_conversation(seed, served.marks)
    status = -1
    try:
        status, whole, prompt_tokens = _asked(served.app, conversation, stream=False)
        stream_status, streamed, _ = _asked(served.app, conversation, stream=True)
        assert stream_status == status, f"{status} becomes {stream_status} as a stream"
        assert streamed == whole, f"the stream is\n{streamed}, and the whole answer\n{whole}"
        if status == 200:
            _check_marks(served, conversation, whole)
            _check_control_tokens(served, seed, prompt_tokens)
    except Exception as error:
        raise AssertionError(f"seed {seed}, {status}: {error!r}\n{conversation.content()!r}") from error
    return status


def _asked(app: Any, conversation: Conversation, *, stream: bool) -> tuple[int, list[Answer], int]:
    """Return the status, the answers and the number of the prompt's tokens; of a stream no number.

    Raises AssertionError for a status or a shape that no answer may have.
    """
    content = conversation.content(stream=stream)
    response = ask(app, conversation.path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
    if response.status_code != 200:
        message, _ = told_refusal(response)
        assert message and isinstance(message, str), response.text
        return response.status_code, [], 0
    answers, prompt_tokens = _READERS[conversation.path](response, stream)
    for answer in answers:
        assert answer.finish in FINISHES[conversation.path], answer
        for _, arguments in answer.calls:
            assert isinstance(json.loads(arguments), dict), arguments
    return 200, answers, prompt_tokens


def _read_chat(response: httpx.Response, stream: bool) -> tuple[list[Answer], int]:
    if stream:
        return _streamed_chat(events(response)), 0
    whole = response.json()
    return [_choice(choice) for choice in whole["choices"]], whole["usage"]["prompt_tokens"]


def _read_response(response: httpx.Response, stream: bool) -> tuple[list[Answer], int]:
    if stream:
        return _streamed_response(events(response)), 0
    whole = response.json()
    return [_response(whole)], whole["usage"]["input_tokens"]


def _read_message(response: httpx.Response, stream: bool) -> tuple[list[Answer], int]:
    if not stream:
        whole = response.json()
        usage = whole["usage"]
        return [_message(whole["content"], whole["stop_reason"])], (
            usage["input_tokens"] + usage["cache_read_input_tokens"]
        )
    told = events(response)
    assert told[0]["type"] == "message_start" and told[-1]["type"] == "message_stop", told
    blocks: list[dict[str, Any]] = []
    written = ""
    for event in told:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks), told
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            written += event["delta"]["partial_json"]
        elif event["type"] == "content_block_delta" and event["delta"]["type"] != "signature_delta":
            kind = event["delta"]["type"].removesuffix("_delta")
            blocks[-1][kind] += event["delta"][kind]
        elif event["type"] == "content_block_stop" and blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = json.loads(written)
            written = ""
    (end,) = (event for event in told if event["type"] == "message_delta")
    return [_message(blocks, end["delta"]["stop_reason"])], 0


def _message(blocks: Sequence[dict[str, Any]], finish: str) -> Answer:
    texts, thoughts = ("".join(b[kind] for b in blocks if b["type"] == kind) for kind in ("text", "thinking"))
    calls = [(block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use"]
    return Answer(texts, thoughts, tuple(calls), finish)


def _read_ollama(response: httpx.Response, stream: bool) -> tuple[list[Answer], int]:
    lines = [json.loads(line) for line in response.text.split("\n") if line]
    assert lines[-1]["done"] and not any(line["done"] for line in lines[:-1]), lines
    messages = [line["message"] for line in lines]
    texts, thoughts = ("".join(m.get(kind, "") for m in messages) for kind in ("content", "thinking"))
    functions = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    calls = tuple((function["name"], json.dumps(function["arguments"])) for function in functions)
    return [Answer(texts, thoughts, calls, lines[-1]["done_reason"])], lines[-1]["prompt_eval_count"]


_READERS = {CHAT: _read_chat, RESPONSES: _read_response, MESSAGES: _read_message, OLLAMA: _read_ollama}
"""Readers of whole answers and of streams, by door. Each returns the answers and the number of the prompt's tokens."""


def _choice(choice: dict[str, Any]) -> Answer:
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return Answer(message["content"] or "", message.get("reasoning_content", ""), tuple(calls), choice["finish_reason"])


def _streamed_chat(chunks: Iterable[dict[str, Any]]) -> list[Answer]:
    """Return the choices of a stream, each joined from its increments."""
    answers: dict[int, Answer] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        delta = choice["delta"]
        answer = answers.setdefault(choice["index"], Answer("", "", (), ""))
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in delta.get("tool_calls", ())]
        answers[choice["index"]] = Answer(
            answer.text + (delta.get("content") or ""),
            answer.thoughts + delta.get("reasoning_content", ""),
            (*answer.calls, *calls),
            choice["finish_reason"] or answer.finish,
        )
    return [answer for _, answer in sorted(answers.items())]


def _response(response: dict[str, Any]) -> Answer:
    assert response["status"] in ("completed", "incomplete") and response["error"] is None, response
    items = response["output"]
    texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
    thoughts = [part["text"] for item in items if item["type"] == "reasoning" for part in item["summary"]]
    calls = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
    return Answer("".join(texts), "".join(thoughts), tuple(calls), response["status"])


def _streamed_response(frames: Sequence[dict[str, Any]]) -> list[Answer]:
    """Return the answer of a stream, joined from its increments; its last event must hold the same."""
    by_type: dict[str, list[dict[str, Any]]] = {}
    for event in frames:
        by_type.setdefault(event["type"].removeprefix("response."), []).append(event)
    text, thoughts = (
        "".join(event["delta"] for event in by_type.get(kind, ()))
        for kind in ("output_text.delta", "reasoning_summary_text.delta")
    )
    calls = [(event["name"], event["arguments"]) for event in by_type.get("function_call_arguments.done", ())]
    answer = _response(frames[-1]["response"])
    assert frames[-1]["type"] == f"response.{answer.finish}", frames[-1]
    assert answer == Answer(text, thoughts, tuple(calls), answer.finish), frames
    return [answer]


def _check_marks(served: ServedTemplate, conversation: Conversation, answers: Sequence[Answer]) -> None:
    """Assert that no text shows a mark.

    Marks that are no special tokens are text where no call is offered, and marks of thoughts behind other text.
    """
    body = conversation.body
    offers_calls = bool(body.get("tools")) and body.get("tool_choice") not in ("none", {"type": "none"})
    separates_thoughts = body.get("reasoning_format") != "none"
    hidden_marks = set(served.marks if offers_calls and separates_thoughts else served.special_marks)
    hidden_marks -= set(served.plain_marks) & THOUGHT_MARKS
    for answer in answers:
        shown_marks = [mark for mark in hidden_marks if mark in answer.text + "\n" + answer.thoughts]
        assert not shown_marks, (shown_marks, answer)


def _check_control_tokens(served: ServedTemplate, seed: int, prompt_tokens: int) -> None:
    """Assert that people's texts add no control token to the prompt, and take none away.

    prompt_tokens: the number of the prompt's tokens as the server has told it. A constrained answer of some models has
    an opening, which is told as a part of the prompt.
    """
    parser = served.app.state.service.parser
    tokenizer = parser.tokenizer
    opening = parser.answers.calls.answer_opening if parser.answers.calls else ""
    opening_length = len(tokenizer.encode(opening, add_special=False))
    prompt = prompt_of(served, drawn_conversation(seed, served.marks))
    assert prompt_tokens - len(prompt) in (0, opening_length), f"{len(prompt)} tokens are told as {prompt_tokens}"
    harmless_prompt = prompt_of(served, drawn_conversation(seed, [harmless(mark) for mark in served.marks]))
    hostile_ids, harmless_ids = ([i for i in ids if i in tokenizer.special_ids] for ids in (prompt, harmless_prompt))
    assert hostile_ids == harmless_ids, f"control tokens {hostile_ids} instead of {harmless_ids}"


def prompt_of(served: ServedTemplate, conversation: Conversation) -> Sequence[int]:
    """Return the tokens of a request's prompt."""
    parser = served.app.state.service.parser
    values = json.loads(conversation.content())
    body = BODIES[conversation.path].model_validate(values)
    ids: Sequence[int] = asyncio.run(parser.prompt(body, parser.tools(body), "key"))
    return ids
