"""Fields of answers as JSON: log-probabilities, usage, traces, and the frames of a stream."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi.responses import JSONResponse

from triforce.checkpoint.tokenizer import Tokenizer
from triforce.engine.engine import OutputChunk
from triforce.interface.explain import TierStats, total
from triforce.interface.outputs import Logprob, RequestOutput, TokenLogprobs
from triforce.interface.repeated_grams import repeated_share
from triforce.server.engine_client import Event

DONE = b"data: [DONE]\n\n"
"""The last event of completions and of chats."""
EVENT_STREAM = "text/event-stream"
"""Media type of server-sent events."""
COMMENT = b": the answer is not ready yet\n\n"
"""A comment of a stream, which clients skip."""
MIN_LOGPROB = -9999.0
"""Logarithm of a probability of zero in answers, as JSON has no infinity."""


class TextLogprobs:
    """`logprobs` of text completions, for one choice from its first token to its last."""

    def __init__(self, tokenizer: Tokenizer, prefix_ids: Sequence[int]) -> None:
        """Start after the tokens `prefix_ids`. Offsets count characters from there."""
        self._tokenizer = tokenizer
        self._stream = tokenizer.stream(prefix_ids)
        self._offset = 0

    def add(self, ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Return the entries of the next tokens. The first token of a prompt has the entry None."""
        offsets = []
        texts = [self._tokenizer.text_of(token_id) for token_id in ids]
        for token_id, text in zip(ids, texts, strict=True):
            new_text = self._stream.step(token_id)
            # U+FFFD of an incomplete character comes with the next token, in front of that token's own text.
            earlier_characters = len(new_text) - len(text) if new_text.endswith(text) else 0
            offsets.append(self._offset + earlier_characters)
            self._offset += len(new_text)
        return {
            "tokens": texts,
            "token_logprobs": [entry and _finite_logprob(entry.chosen.logprob) for entry in entries],
            "top_logprobs": [entry and self._alternatives(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float]:
        logprob_by_text: dict[str, float] = {}
        for alternative in (
            *entry.top,
            entry.chosen,
        ):  # best first, so equal texts are listed once, with their best value
            logprob_by_text.setdefault(alternative.text, _finite_logprob(alternative.logprob))
        return logprob_by_text


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Return `logprobs` of a chat choice."""

    def logprob_fields(token: Logprob) -> dict[str, Any]:
        return {
            "token": token.text,
            "logprob": _finite_logprob(token.logprob),
            "bytes": list(tokenizer.bytes_of(token.token_id)),
        }

    content = [
        logprob_fields(entry.chosen) | {"top_logprobs": [logprob_fields(alternative) for alternative in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def usage(
    outputs: Sequence[RequestOutput], with_tiers: bool, prefixes: Sequence[str] = ("prompt", "completion")
) -> dict[str, Any]:
    """Return the numbers of prompt and new tokens.

    with_tiers: whether to add counts by tier and repetition by text. prefixes: beginnings of the names of both counts.
    """
    prompt_tokens = sum(o.prompt_tokens for o in outputs)
    new_tokens = sum(o.completion_tokens for o in outputs)
    counts: dict[str, Any] = {
        f"{prefixes[0]}_tokens": prompt_tokens,
        f"{prefixes[1]}_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }
    details = {"cached_tokens": sum(o.cached_tokens for o in outputs)}
    counts |= {f"{prefixes[0]}_tokens_details": details}
    if with_tiers:
        completions = [choice for output in outputs for choice in output.outputs]
        counts |= {
            "tiers": _tiers(total(choice.tiers for choice in completions)),
            "reread": [o.reread for o in outputs],
        }
        counts["repeated_8_grams"] = [round(repeated_share(choice.token_ids), 4) for choice in completions]
    return counts


def without_text(event: Event) -> Event:
    """Return an event without its new token: the engine samples at least one, even if the request asks for none."""
    empty_fields = dict[str, Any](text="", token_ids=[], origins=[])
    if isinstance(event, OutputChunk):
        finish = event.finish_reason and "length"
        return replace(event, **empty_fields, finish_reason=finish, logprobs=event.logprobs and [], trace=None)
    if isinstance(event, RequestOutput):
        empty_fields["finish_reason"] = "length"
        completions = [replace(choice, **empty_fields, logprobs=choice.logprobs and []) for choice in event.outputs]
        return replace(event, outputs=completions)
    return event


def decoding_trace(piece: OutputChunk) -> dict[str, Any]:
    """Return the fields of a chunk's trace; empty without one."""
    snapshot = piece.trace
    if snapshot is None:
        return {}
    trace_fields = {
        "tokens": snapshot.tokens,
        "seconds": round(snapshot.seconds, 4),
        "seen": snapshot.seen,
        "tiers": _tiers(snapshot.tiers),
    }
    return {"token_characters": piece.characters, "trace": trace_fields}


def _tiers(stats: Sequence[TierStats]) -> list[dict[str, Any]]:
    return [{key: getattr(tier, key) for key in ("name", "proposed", "accepted", "passes")} for tier in stats]


def _finite_logprob(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


class EncodableResponse(JSONResponse):
    """JSON in UTF-8. Where a client sent half of a character as an escape, which UTF-8 cannot hold, it is in ASCII."""

    def render(self, content: Any) -> bytes:
        try:
            return super().render(content)
        except UnicodeEncodeError:
            return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def frame(data: Mapping[str, Any], event: str | None = None) -> bytes:
    """Return one server-sent event."""
    name = f"event: {event}\n" if event else ""
    # ASCII, as some clients split lines at every Unicode line separator.
    return f"{name}data: {json.dumps(data, allow_nan=False)}\n\n".encode()
