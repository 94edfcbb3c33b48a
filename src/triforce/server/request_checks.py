"""Checks of requests against the limits, beside those of their schema and of `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from triforce.engine.inputs import known
from triforce.engine.modes import DRAFTED
from triforce.errors import RequestError, argument
from triforce.interface.grammar import Grammar
from triforce.interface.sampling_params import SamplingParams
from triforce.server.errors import TOO_LONG, about, wrong
from triforce.server.limits import MOST_ECHOED, Limits
from triforce.server.sampling_fields import SamplingFields
from triforce.server.schemas import CompletionFields

NO_LIMIT = -1
"""What other servers take for an answer of any length."""


def check_fields(body: CompletionFields, logprobs: int | None, limits: Limits) -> None:
    """Raise ApiError for values beyond the limits, and for fields that need another one."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if body.n is not None and not 1 <= body.n <= limits.n:
        raise wrong("n", f"n must be from 1 to {limits.n}")
    if logprobs is not None and not 0 <= logprobs <= limits.logprobs:
        name = body.sent_as.get("logprobs", "logprobs")
        raise wrong(name, f"{name} must be from 0 to {limits.logprobs}")
    if any(len(stop) > limits.stop_characters for stop in stops):
        raise wrong("stop", f"a stop string may have {limits.stop_characters} characters; shorten it")
    if body.stream_options and not body.stream:
        raise wrong("stream_options", "stream_options needs stream: true")
    if body.trace and not body.stream:
        raise wrong("trace", "trace needs stream: true")


def checked_params(body: SamplingFields, values: Mapping[str, Any], grammar: Grammar | None) -> SamplingParams:
    """Return the parameters of a request. Raises ApiError, which names the field of the body that was sent."""
    with about("grammar", body.sent_as):
        return SamplingParams(**values, grammar=grammar)


def check_limit(body: SamplingFields, limit: int | None, context: int) -> None:
    """Raise ApiError for a limit that other servers take for none."""
    if limit == NO_LIMIT:
        field = body.sent_as.get("max_tokens", "max_tokens")
        text = f"{field} must be at least 1, and {NO_LIMIT} is no word for any length here; leave it out, or send "
        raise wrong(field, f"{text}{context}, the context, which ends a text anyway")


def held_to_room(
    params: SamplingParams, body: SamplingFields, prompt: int, context: int, limits: Limits
) -> SamplingParams:
    """Return the parameters for a prompt of so many tokens: a limit that was not sent is what there is room for.

    Raises ApiError where there is no room.
    """
    rows, room, most = min(params.n, limits.rows), min(params.max_tokens, context - prompt), limits.room(context)
    if rows * (prompt + room) <= most:
        return params
    server = f"the {most} tokens that this server has room for (--max-kv-tokens)"
    if prompt >= most:
        text = f"the prompt of {prompt} tokens and an answer need more than {server}; shorten it"
        raise wrong(body.prompt_field, text, TOO_LONG)
    field, left = body.sent_as.get("max_tokens", "max_tokens"), most // rows - prompt
    if getattr(body, field) is None and left > 0:
        return replace(params, max_tokens=left)
    if rows > 1:
        text = f"{rows} texts of {prompt} + {room} tokens need more than {server}; lower n"
        raise wrong("n", f"{text} or {field}" if left > 0 else text)
    raise wrong(field, f"{prompt} + {room} tokens need more than {server}; lower {field} to {left}, or leave it out")


def check_echo(tokens: int, characters: int, params: SamplingParams, limits: Limits) -> None:
    """Raise ApiError where an echo of prompts would be too large an answer."""
    told = tokens * params.n * (1 + params.prompt_logprobs) if params.prompt_logprobs is not None else 0
    if told > MOST_ECHOED:
        raise wrong("logprobs", f"an echo of {tokens} tokens and {params.prompt_logprobs} alternatives to each tells "
                    f"{told} log-probabilities; {MOST_ECHOED} are the most. Send less, or lower logprobs")  # fmt: skip
    if (most := limits.body_bytes) < characters * params.n:
        raise wrong("echo", f"{params.n} echoes of {characters} characters are more than {most}; lower n")


def mode_of(name: str, modes: Sequence[str]) -> str:
    """Return a mode that the models here can run. Raises RequestError."""
    if name in DRAFTED and name not in modes:
        raise RequestError(f"{argument('mode')} {name!r} needs a draft model, which this server has none of; "
                           f"choose from {', '.join(modes)}")  # fmt: skip
    return known(argument("mode"), name, modes)


def biases(given: Mapping[str, Any] | None) -> dict[int, Any] | None:
    """Convert keys to integers, which JSON does not have as keys. Raises ApiError."""
    if given is None:
        return None
    unknown = next((key for key in given if not (key.isascii() and key.isdecimal() and len(key) < 19)), None)
    if unknown is not None:
        raise wrong("logit_bias", f"logit_bias names {unknown[:30]!r}, which is no token id; keys are integers")
    return {int(key): value for key, value in given.items()}
