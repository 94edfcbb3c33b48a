"""POST /v1/completions: continuation of a text, as in OpenAI's interface and `lm_eval`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from time import time
from typing import Any
from uuid import uuid4

from fastapi.responses import Response

from triforce.engine.engine import OutputChunk
from triforce.engine.inputs import one_or_many
from triforce.interface.outputs import RequestOutput, TokenLogprobs
from triforce.server.answer_fields import (
    COMMENT,
    DONE,
    EVENT_STREAM,
    EncodableResponse,
    TextLogprobs,
    decoding_trace,
    frame,
    usage,
)
from triforce.server.engine_client import GenerationRequest, PrefillProgress
from triforce.server.errors import ApiError, field_error, openai_error
from triforce.server.limits import MAX_VALUES
from triforce.server.request_parser import RequestParser
from triforce.server.schemas import CompletionBody, DetokenizeBody, TokenizeBody
from triforce.server.service import Service


class CompletionWriter:
    """Writes answers. Choices are numbered across prompts: first those of the first prompt, then of the second."""

    media_type = EVENT_STREAM

    def __init__(self, body: CompletionBody, generations: Sequence[GenerationRequest], service: Service) -> None:
        self._generations = generations
        self._n = body.n or 1
        self._tokenizer = service.parser.tokenizer
        self._head = {"id": f"cmpl-{uuid4().hex}", "object": "text_completion", "created": int(time())}
        self._head |= {"model": service.name, "system_fingerprint": service.fingerprint}
        self._tiers = bool(body.tier_stats)
        self._with_ids = bool(body.return_token_ids)
        self._begun = set[int]()  # choices of a stream whose prompt ids have been sent
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        prompts = one_or_many(body.prompt) if body.echo else []
        self._echoes = [p if isinstance(p, str) else self._tokenizer.decode(list(p)) for p in prompts]
        self._logprobs: dict[int, TextLogprobs] = {}  # by choice, each at the end of its text so far

    def full_answer(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = [choice for prompt, output in enumerate(outputs) for choice in self._choices(prompt, output)]
        return self._head | {"choices": choices, "usage": usage(outputs, self._tiers)}

    def opening(self) -> Iterable[bytes]:
        for prompt, echo in enumerate(self._echoes):
            for index in range(self._n):
                yield self._chunk(self._choice(prompt, index, echo, None))

    def prefill_progress(self, prompt: int, progress: PrefillProgress) -> Iterable[bytes]:
        yield self._chunk(self._choice(prompt, 0, "", None), prompt_progress=progress.client_fields())

    def piece(self, prompt: int, piece: OutputChunk) -> Iterable[bytes]:
        choice = self._choice(prompt, piece.index, piece.text, piece.finish_reason)
        prompt_ids = self._generations[prompt].prompt
        is_first = choice["index"] not in self._begun
        self._begun.add(choice["index"])
        choice |= self._report(choice["index"], prompt_ids, piece.token_ids, piece.logprobs, piece.origins)
        choice |= self._ids(piece.token_ids, prompt_ids if is_first else None)
        yield self._chunk(choice | decoding_trace(piece))

    def idle_frame(self) -> bytes:
        return COMMENT

    def failure(self, refusal: ApiError) -> Iterable[bytes]:
        yield frame(openai_error(refusal))

    def closing(self, outputs: Sequence[RequestOutput]) -> Iterable[bytes]:
        if self._with_usage:
            yield frame(self._head | {"choices": [], "usage": usage(outputs, self._tiers)})
        yield DONE

    def _choices(self, prompt: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        echo = ""
        echoed_ids = []
        preceding_ids = output.prompt_token_ids
        if self._echoes:
            echo = self._echoes[prompt]
            echoed_ids = preceding_ids
            preceding_ids = []
        for completion in output.outputs:
            choice = self._choice(prompt, completion.index, echo + completion.text, completion.finish_reason)
            entries = None if completion.logprobs is None else [*(output.prompt_logprobs or ()), *completion.logprobs]
            choice |= self._report(
                choice["index"], preceding_ids, [*echoed_ids, *completion.token_ids], entries, completion.origins
            )
            yield choice | self._ids(completion.token_ids, output.prompt_token_ids)

    def _ids(self, token_ids: Sequence[int], prompt_ids: Sequence[int] | None) -> dict[str, Any]:
        """Return the ids of new tokens and of their prompt, if requested."""
        if not self._with_ids:
            return {}
        return {"token_ids": token_ids} | ({} if prompt_ids is None else {"prompt_token_ids": prompt_ids})

    def _choice(self, prompt: int, index: int, text: str, finish: str | None) -> dict[str, Any]:
        choice = {"index": prompt * self._n + index, "text": text, "logprobs": None, "finish_reason": finish}
        return choice | ({"seed": self._generations[prompt].params.seed} if finish else {})

    def _report(
        self,
        choice: int,
        preceding_ids: Sequence[int],
        ids: Sequence[int],
        entries: Sequence[TokenLogprobs | None] | None,
        origins: Sequence[str],
    ) -> dict[str, Any]:
        """Return the requested log-probabilities and tiers of tokens that follow `preceding_ids`."""
        report: dict[str, Any] = {"token_tiers": origins} if self._tiers else {}
        if entries is not None:
            if choice not in self._logprobs:
                self._logprobs[choice] = TextLogprobs(self._tokenizer, preceding_ids)
            report["logprobs"] = self._logprobs[choice].add(ids, entries)
        return report

    def _chunk(self, choice: dict[str, Any], **extra_fields: Any) -> bytes:
        return frame(self._head | {"choices": [choice]} | ({"usage": None} if self._with_usage else {}) | extra_fields)


async def tokenize(parser: RequestParser, body: TokenizeBody, key: str) -> Response:
    """Return the token ids of a text or a conversation. Raises ApiError."""
    if (body.prompt is None) == (body.messages is None):
        raise field_error("prompt", "send either prompt or messages")
    field = "prompt" if body.messages is None else "messages"
    if body.messages is not None:
        ids = await parser.conversation(body.messages, key, body)
    else:
        ids = await parser.tokens(body.prompt or "", body.add_special_tokens is not False, key)
    if len(ids) > MAX_VALUES:
        raise field_error(
            field, f"the text has {len(ids):,} tokens; at most {MAX_VALUES:,} are returned, so send it in parts"
        )

    def write_answer() -> Response:
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": parser.context, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = [parser.tokenizer.text_of(i) for i in ids]
        return EncodableResponse(answer, headers=body.headers)

    return await parser.in_thread(len(ids), key, write_answer)


async def detokenize(parser: RequestParser, body: DetokenizeBody, key: str) -> Response:
    """Return the text of token ids. Raises ApiError."""
    ids = await parser.ids(body.tokens, key, "tokens") if body.tokens else []
    return await parser.in_thread(len(ids), key, partial(_detokenized, parser, ids, body))


def _detokenized(parser: RequestParser, ids: Sequence[int], body: DetokenizeBody) -> Response:
    return EncodableResponse({"prompt": parser.tokenizer.decode(ids)}, headers=body.headers)
