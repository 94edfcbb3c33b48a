"""Usage, log-probabilities and statistics of tiers in the shapes of OpenAI's interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from triforce.checkpoint.tokenizer import Tokenizer
from triforce.engine.output_stream import OutputChunk
from triforce.interface.outputs import Logprob, RequestOutput, TokenLogprobs
from triforce.interface.repeated_grams import repeated
from triforce.interface.stats import TierStats, total
from triforce.server.engine_client import Event

LEAST = -9999.0
"""JSON has no infinity: the logarithm of a probability of zero."""


class TextLogprobs:
    """`logprobs` of text completions, for one choice from its first token to its last."""

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int]) -> None:
        """`after` is what the first token continues. Offsets count characters from there."""
        self._tokenizer, self._stream, self._offset = tokenizer, tokenizer.stream(after), 0

    def add(self, ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Return the entries of the next tokens; there is none for a token with nothing before it."""
        offsets = []
        for token_id in ids:
            offsets.append(self._offset)
            self._offset += len(self._stream.step(token_id))
        return {
            "tokens": [self._tokenizer.text_of(token_id) for token_id in ids],
            "token_logprobs": [entry and _finite(entry.chosen.logprob) for entry in entries],
            "top_logprobs": [entry and self._alternatives(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float]:
        found: dict[str, float] = {}
        for other in (*entry.top, entry.chosen):  # best first: of tokens that read alike the best is listed
            found.setdefault(other.text, _finite(other.logprob))
        return found


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Return `logprobs` of a chat choice."""

    def one(token: Logprob) -> dict[str, Any]:
        return {
            "token": token.text,
            "logprob": _finite(token.logprob),
            "bytes": list(tokenizer.bytes_of(token.token_id)),
        }

    content = [one(entry.chosen) | {"top_logprobs": [one(other) for other in entry.top]} for entry in entries]
    return {"content": content, "refusal": None}


def usage(
    outputs: Sequence[RequestOutput], tiers: bool, names: Sequence[str] = ("prompt", "completion")
) -> dict[str, Any]:
    """Return tokens read and made, and if wanted counts of each tier, and how far each text repeats itself."""
    read, made = sum(o.prompt_tokens for o in outputs), sum(o.completion_tokens for o in outputs)
    counts: dict[str, Any] = {f"{names[0]}_tokens": read, f"{names[1]}_tokens": made, "total_tokens": read + made}
    details = {"cached_tokens": sum(o.cached_tokens for o in outputs)}
    counts |= {f"{names[0]}_tokens_details": details}
    if tiers:
        made_of = [completion for output in outputs for completion in output.outputs]
        counts |= {"tiers": _tiers(total(each.tiers for each in made_of)), "reread": [o.reread for o in outputs]}
        counts["repeated_8_grams"] = [round(repeated(each.token_ids), 4) for each in made_of]
    return counts


def without_text(event: Event) -> Event:
    """Drop the one token of an answer that was drawn only because the engine draws at least one."""
    nothing = dict[str, Any](text="", token_ids=[], origins=[])
    if isinstance(event, OutputChunk):
        finish = event.finish_reason and "length"
        return replace(event, **nothing, finish_reason=finish, logprobs=event.logprobs and [], trace=None)
    if isinstance(event, RequestOutput):
        nothing["finish_reason"] = "length"
        made = [replace(made, **nothing, logprobs=made.logprobs and []) for made in event.outputs]
        return replace(event, outputs=made)
    return event


def decoding_trace(piece: OutputChunk) -> dict[str, Any]:
    """Return the state of the decoding of a text, where the request wants a trace."""
    look = piece.trace
    if look is None:
        return {}
    where = {"tokens": look.tokens, "seconds": round(look.seconds, 4), "seen": look.seen, "tiers": _tiers(look.tiers)}
    return {"token_characters": piece.characters, "trace": where}


def _tiers(stats: Sequence[TierStats]) -> list[dict[str, Any]]:
    return [{key: getattr(tier, key) for key in ("name", "proposed", "accepted", "passes")} for tier in stats]


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
