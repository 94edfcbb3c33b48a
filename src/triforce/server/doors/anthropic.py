"""POST /v1/messages: Anthropic's interface, as Claude Code speaks it. Stateless, as the other doors."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from fastapi.responses import Response
from pydantic import AfterValidator, Discriminator, Field, Tag

from triforce.engine.engine import OutputChunk
from triforce.interface.outputs import RequestOutput
from triforce.server.answer_fields import EVENT_STREAM, EncodableResponse, frame
from triforce.server.answers.answer_parts import AnswerParser, AnswerPart, Call, Thoughts
from triforce.server.engine_client import GenerationRequest, PrefillProgress
from triforce.server.errors import ApiError, anthropic_error, field_error
from triforce.server.limits import MAX_MESSAGES, MAX_PARTS
from triforce.server.request_base import FOREIGN_FIELDS, Body, Stops
from triforce.server.request_parser import RequestParser
from triforce.server.schemas import CONTEXT_NOTE, ConversationBody, FlatResponseFormat, FlatSchemaFormat
from triforce.server.service import Service
from triforce.server.tools import MAX_TOOLS, Function, FunctionName, Name, Parameters, check_size
from triforce.server.turns import CalledName, ChatMessage, Message, left_out, told_call, told_turn

BILLING_HEADER = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
"""First line of Claude Code's system text. It differs from request to request, so no cached prompt would hold it."""
BlockEvent = tuple[str, dict[str, Any]]
"""Type of an event, and its fields."""


class Block(Body):
    """A part of a turn. Marks for a cache and other fields of clients are ignored."""

    tolerant: ClassVar[bool] = True


class TextBlock(Block):
    type: Literal["text"]
    text: str


class ToolUseBlock(Block):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: CalledName
    input: Annotated[dict[str, Any], AfterValidator(check_size)] | None = None


class ThinkingBlock(Block):
    """Thoughts of an earlier answer."""

    type: Literal["thinking"]
    thinking: str


class OtherBlock(Block):
    """Another part: a document or a result of a search, whose text is read, or a part without text, as a picture."""

    type: str | None = None
    source: Any = None
    content: Any = None

    @property
    def text(self) -> str | None:
        """The text of the part; None for a part without text."""
        source = self.source if isinstance(self.source, dict) else {}
        if self.type == "document" and isinstance(source.get("data"), str) and source.get("type") == "text":
            return str(source["data"])
        parts = source.get("content") if self.type == "document" else self.content
        if self.type not in ("document", "search_result") or not isinstance(parts, list):
            return parts if self.type == "document" and isinstance(parts, str) else None
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        return "\n".join(text for text in texts if isinstance(text, str))


_KINDS = ("text", "tool_use", "tool_result", "thinking")


def _kind(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return kind if kind in _KINDS else "other"


ResultBlock = Annotated[Annotated[TextBlock, Tag("text")] | Annotated[OtherBlock, Tag("other")], Discriminator(
    lambda block: "text" if _kind(block) == "text" else "other"
)]  # fmt: skip
ResultBlocks = Annotated[list[ResultBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


class ToolResultBlock(Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | ResultBlocks | None = None
    is_error: bool | None = None


TurnBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[OtherBlock, Tag("other")],
    Discriminator(_kind),
]
TurnBlocks = Annotated[list[TurnBlock], Field(max_length=MAX_PARTS, fail_fast=True)]
SystemBlocks = Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


class AnthropicTurn(Body):
    """A turn. A system turn stands where it is sent: in the middle, too."""

    tolerant: ClassVar[bool] = True
    role: Literal["user", "assistant", "system"]
    content: str | TurnBlocks


class AnthropicTool(Body):
    """A function. Tools that Anthropic's servers run, such as web search, are skipped."""

    tolerant: ClassVar[bool] = True
    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: Parameters | None = None


class AnthropicToolChoice(Body):
    """The choice of tools that the answer calls."""

    example: ClassVar[str] = '{"type": "auto"}'
    tolerant: ClassVar[bool] = True
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicThinking(Body):
    """Whether the model thinks before it answers. A budget is not enforced: `max_tokens` is."""

    example: ClassVar[str] = '{"type": "disabled"} or {"type": "enabled"}'
    tolerant: ClassVar[bool] = True
    type: Literal["enabled", "adaptive", "disabled"]


class OutputConfig(Body):
    """Effort and format of the answer."""

    tolerant: ClassVar[bool] = True
    effort: str | None = None
    format: FlatSchemaFormat | None = None


class MessagesBody(ConversationBody):
    """POST /v1/messages. Unknown fields are ignored, and named in a header: clients send fields of their own."""

    tolerant: ClassVar[bool] = True
    skipped: ClassVar[Collection[str]] = FOREIGN_FIELDS
    default_limit: ClassVar[int | None] = None
    thinking_is_hint: ClassVar[bool] = True
    function_kinds: ClassVar[Collection[str]] = ("custom",)
    choice_kinds: ClassVar[Collection[str]] = ("auto", "any", "tool", "none")
    prompt_field: ClassVar[str] = "messages"
    messages: Annotated[list[AnthropicTurn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        description="The whole conversation"
    )
    system: str | SystemBlocks | None = Field(None, description="System message in front of the conversation")
    max_tokens: int | None = Field(None, description=f"Default: the rest of the context. {CONTEXT_NOTE}")
    stop_sequences: Stops | None = None
    tools: Annotated[list[AnthropicTool | None], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description="Functions that the answer may call"
    )
    tool_choice: AnthropicToolChoice | None = Field(
        None, description="auto (default), any: the answer consists of calls, tool: of calls of the named one, or none"
    )
    thinking: AnthropicThinking | None = Field(
        None, description="Whether the model thinks before it answers, where its chat template has a switch"
    )
    output_config: OutputConfig | None = Field(None, description="Effort and format of the answer")

    @property
    def sent_as(self) -> Mapping[str, str]:
        return {"stop": "stop_sequences"}

    @property
    def stop(self) -> list[str] | None:
        """Stop strings, under the name of the other doors."""
        return self.stop_sequences

    @property
    def effort(self) -> tuple[str, str | None]:
        return "output_config.effort", self.output_config.effort if self.output_config else None

    @property
    def output_format(self) -> str | None:
        return None if self.answer_constraint is None else "output_config"

    @cached_property
    def turns(self) -> Sequence[Message]:
        system = self.system if isinstance(self.system, str) else "\n\n".join(b.text for b in self.system or ())
        if header := BILLING_HEADER.match(system):
            system = system[header.end() :]
            self.ignore("system.x-anthropic-billing-header")
        turns: list[Message] = [told_turn("system", system)] if system else []
        for turn in self.messages:
            if turn.role == "assistant":
                turns.append(self._answer(turn.content))
            else:
                turns += self._asked(turn)
        if not turns:
            raise field_error("messages", "messages has no text; send a turn of the user")
        return turns

    def _asked(self, turn: AnthropicTurn) -> list[Message]:
        """Return the turns of a user's or a system turn: results of calls, and the text between them."""
        if isinstance(turn.content, str):
            return [told_turn(turn.role, turn.content)]
        turns: list[Message] = []
        parts = list[dict[str, Any]]()
        for block in turn.content:
            if not isinstance(block, ToolResultBlock):
                parts += [{"type": "text", "text": text} for text in self._texts([block])]
                continue
            if parts:
                turns.append(told_turn(turn.role, parts))
                parts = []
            turns.append(told_turn("tool", self._result(block), tool_call_id=block.tool_use_id))
        if parts or not turns:
            turns.append(told_turn(turn.role, parts))
        return turns

    def _result(self, block: ToolResultBlock) -> str:
        content = block.content or ""
        text = content if isinstance(content, str) else "\n".join(self._texts(content))
        return f"Error: {text}" if block.is_error and not text.lower().startswith("error") else text

    def _answer(self, content: str | Sequence[Block]) -> ChatMessage:
        """Return a turn of the assistant."""
        if isinstance(content, str):
            return told_turn("assistant", content)
        calls = [told_call(b.id, b.name, json.dumps(b.input or {})) for b in content if isinstance(b, ToolUseBlock)]
        thoughts = "\n".join(b.thinking for b in content if isinstance(b, ThinkingBlock))
        text = "".join(self._texts([b for b in content if not isinstance(b, ToolUseBlock | ThinkingBlock)]))
        return told_turn("assistant", text, tool_calls=calls or None, reasoning_content=thoughts or None)

    def _texts(self, blocks: Iterable[Block]) -> list[str]:
        """Return the texts of blocks. What is no text is told to the model, and named in the header."""
        texts = list[str]()
        for block in blocks:
            if isinstance(block, TextBlock):
                texts.append(block.text)
                continue
            if isinstance(block, OtherBlock) and block.text is not None:
                texts.append(block.text)
                continue
            kind = getattr(block, "type", None) or "part"
            self.ignore(f"messages.content.{kind}")
            if not kind.endswith("thinking"):
                texts.append(left_out(kind))
        return texts

    @property
    def functions(self) -> Mapping[str, Function]:
        return {
            f"tools.{i}.input_schema": Function.model_construct(
                name=tool.name, description=tool.description, parameters=tool.input_schema
            )
            for i, tool in enumerate(self.tools or ())
            if tool
        }

    @property
    def function_choice(self) -> str | FunctionName | None:
        choice = self.tool_choice
        names = {function.name for function in self.functions.values()}
        if choice and None in (self.tools or ()) and (choice.name not in names if choice.name else not names):
            self.ignore("tool_choice")  # it names a tool that is skipped
            return None
        if choice is None or choice.type != "tool":
            return {"any": "required"}.get(choice.type, choice.type) if choice else None
        if not choice.name:
            raise field_error("tool_choice", 'tool_choice of type tool needs a name: {"type": "tool", "name": ...}')
        return FunctionName(name=choice.name)

    @property
    def has_several_calls(self) -> bool:
        return not (self.tool_choice and self.tool_choice.disable_parallel_tool_use)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def answer_constraint(self) -> FlatResponseFormat | None:
        return self.output_config.format if self.output_config else None

    @property
    def thinks(self) -> bool | None:
        return None if self.thinking is None else self.thinking.type != "disabled"


class MessagesWriter:
    """Writes answers as a list of blocks, or as a stream of their beginnings, increments and ends."""

    media_type = EVENT_STREAM

    def __init__(self, body: MessagesBody, generations: Sequence[GenerationRequest], service: Service) -> None:
        self._blocks = AnswerBlocks(service.parser.answer_parser(body, generations[0]))
        self._stops = body.stop_sequences or []
        self._prompt_tokens = len(generations[0].prompt)
        self._restored = service.parser.answers.marks.restored
        self._text_of = service.parser.tokenizer.text_of
        self._head = {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "model": service.name}

    def full_answer(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        for _ in self._blocks.add(outputs[0].outputs[0].text, is_final=True):
            pass
        return self._head | {"content": self._blocks.blocks} | self._end(outputs) | {"usage": _usage(outputs)}

    def opening(self) -> Iterable[bytes]:
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        unfinished: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _NOT_CACHED | usage,
        }
        yield _event("message_start", {"message": self._head | unfinished})

    def idle_frame(self) -> bytes:
        return _event("ping", {})

    def prefill_progress(self, prompt: int, progress: PrefillProgress) -> Iterable[bytes]:
        return ()  # this interface has no event for progress, and no field to request it

    def piece(self, prompt: int, piece: OutputChunk) -> Iterable[bytes]:
        for kind, fields in self._blocks.add(piece.text, is_final=piece.finish_reason is not None):
            yield _event(kind, fields)

    def closing(self, outputs: Sequence[RequestOutput]) -> Iterable[bytes]:
        yield _event("message_delta", {"delta": self._end(outputs), "usage": _usage(outputs)})
        yield _event("message_stop", {})

    def failure(self, refusal: ApiError) -> Iterable[bytes]:
        yield frame(anthropic_error(refusal), event="error")

    def _end(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return why the answer has ended."""
        completion = outputs[0].outputs[0]
        if completion.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        last_text = self._text_of(completion.token_ids[-1]) if completion.token_ids else ""
        stop = last_text if completion.stop_string is None else self._restored(completion.stop_string)
        if stop in self._stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        reason = "tool_use" if self._blocks.has_calls else "end_turn"
        return {"stop_reason": "max_tokens" if self._blocks.is_cut else reason, "stop_sequence": None}


class AnswerBlocks:
    """The blocks of one answer. `add` is a generator; iterate over it even where no events are sent."""

    def __init__(self, parser: AnswerParser) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._parser = parser
        self._is_open = False  # whether the last block may grow

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended inside a call."""
        return self._parser.is_cut

    @property
    def has_calls(self) -> bool:
        """Whether a block is a call."""
        return any(block["type"] == "tool_use" for block in self.blocks)

    def add(self, text: str, is_final: bool) -> Iterator[BlockEvent]:
        """Add text of the answer, and yield its events. is_final: whether `text` ends the answer."""
        for part in self._parser.add(text, is_final):
            yield from self._add_part(part)
        if is_final:
            yield from self._close()

    def _add_part(self, part: AnswerPart) -> Iterator[BlockEvent]:
        match part:
            case Call():
                yield from self._close()
                block = {"type": "tool_use", "id": f"toolu_{uuid4().hex}", "name": part.name}
                yield self._begin(block | {"input": {}})
                self.blocks[-1] = block | {"input": part.values()}
                yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})
                yield from self._close()
            case Thoughts():
                yield from self._grow("thinking", part.text, {"signature": ""})
            case str() if part:
                yield from self._grow("text", part, {})

    def _grow(self, kind: str, text: str, other_fields: dict[str, Any]) -> Iterator[BlockEvent]:
        """Add text to the last block if it is of this kind and open, or to a new one."""
        if not (self._is_open and self.blocks[-1]["type"] == kind):
            yield from self._close()
            yield self._begin({"type": kind, kind: ""} | other_fields)
        self.blocks[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _begin(self, block: dict[str, Any]) -> BlockEvent:
        self.blocks.append(block)
        self._is_open = True
        return "content_block_start", {"index": len(self.blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> BlockEvent:
        return "content_block_delta", {"index": len(self.blocks) - 1, "delta": delta}

    def _close(self) -> Iterator[BlockEvent]:
        if not self._is_open:
            return
        self._is_open = False
        if self.blocks[-1]["type"] == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        yield "content_block_stop", {"index": len(self.blocks) - 1}


async def count_tokens(parser: RequestParser, body: MessagesBody, key: str) -> Response:
    """Return the number of tokens of a conversation's prompt. Raises ApiError."""
    ids = await parser.prompt(body, parser.tools(body), key)
    return EncodableResponse({"input_tokens": len(ids)}, headers=body.headers)


_NOT_CACHED = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return the numbers of tokens. `input_tokens` leaves out the cached ones, as in Anthropic's interface."""
    cached_tokens = sum(o.cached_tokens for o in outputs)
    return _NOT_CACHED | {
        "input_tokens": sum(o.prompt_tokens for o in outputs) - cached_tokens,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": sum(o.completion_tokens for o in outputs),
    }


def _event(kind: str, fields: Mapping[str, Any]) -> bytes:
    return frame({"type": kind, **fields}, event=kind)
