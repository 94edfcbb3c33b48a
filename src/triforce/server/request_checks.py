"""Checks of requests against the limits, beside those of their schema and of `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triforce.interface.grammar import Grammar
from triforce.interface.sampling_params import SamplingParams
from triforce.server.errors import about, wrong
from triforce.server.limits import MOST_ECHOED, Limits
from triforce.server.sampling_fields import SamplingFields
from triforce.server.schemas import CompletionFields


def check_fields(body: CompletionFields, logprobs: int | None, limits: Limits) -> None:
    """Raise ApiError for values beyond the limits, and for fields that need another one."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    for name, value, most in (
        ("n", body.n or 1, limits.n),
        (body.sent_as.get("logprobs", "logprobs"), logprobs or 0, limits.logprobs),
    ):
        if value > most:
            raise wrong(name, f"{name}: {value} are too many; this server takes at most {most}")
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


def check_echo(tokens: int, characters: int, params: SamplingParams, limits: Limits) -> None:
    """Raise ApiError where an echo of prompts would be too large an answer."""
    told = tokens * params.n * (1 + params.prompt_logprobs) if params.prompt_logprobs is not None else 0
    if told > MOST_ECHOED:
        raise wrong("logprobs", f"an echo of {tokens} tokens and {params.prompt_logprobs} alternatives to each tells "
                    f"{told} log-probabilities; {MOST_ECHOED} are the most. Send less, or lower logprobs")  # fmt: skip
    if (most := limits.body_bytes) < characters * params.n:
        raise wrong("echo", f"{params.n} echoes of {characters} characters are more than {most}; lower n")


def biases(given: Mapping[str, Any] | None) -> dict[int, Any] | None:
    """Convert keys to integers, which JSON does not have as keys. Raises ApiError."""
    if given is None:
        return None
    unknown = next((key for key in given if not (key.isascii() and key.isdecimal() and len(key) < 19)), None)
    if unknown is not None:
        raise wrong("logit_bias", f"logit_bias names {unknown[:30]!r}, which is no token id; keys are integers")
    return {int(key): value for key, value in given.items()}
