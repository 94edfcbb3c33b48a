"""SamplingParams: the sampling parameters of a request, validated by the constructor."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from triforce.errors import RequestError, argument
from triforce.interface.frozen_fields import fields_frozen
from triforce.interface.grammar import Grammar
from triforce.interface.keyword_advice import advised

MAX_MAGNITUDE = 1e9  # of a bias or penalty, so that sums of scores in float64 stay finite

MAX_LOGPROBS = 20

MAX_CHOICES = 128

RANDOM_SEED = -1
"""The seed value that requests a random seed."""

MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters whose defaults a model's files may set."""

CHAT_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""Defaults of chats with models whose files set none of these parameters."""


def random_seed() -> int:
    """Return a random 32-bit seed for a request without one."""
    return secrets.randbits(32)


def chat_defaults(model_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling defaults of a chat. model_params: the defaults that the model's files set."""
    return dict(model_params) if model_params.keys() & CHAT_DEFAULTS.keys() else CHAT_DEFAULTS | dict(model_params)


@advised
@fields_frozen
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request. A parameter of None has its default. Raises RequestError for invalid values.

    They are immutable: `dataclasses.replace(params, temperature=0.3)` returns changed ones.
    Logits are processed in this order: repetition penalty (as in transformers: over prompt and output), presence and
    frequency penalties (as OpenAI's: over the output), logit bias, temperature, min-p, top-k, top-p. A step
    whose parameter is off costs nothing.
    """

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # keep the top_k most probable tokens; 0 is off, and so is -1
    top_p: float = 1.0  # keep the most probable tokens up to this mass; 1 is off
    min_p: float = 0.0  # drop tokens below this share of the most probable one's probability; 0 is off
    repetition_penalty: float = 1.0  # over prompt and output; 1 is off
    presence_penalty: float = 0.0  # over the output; 0 is off
    frequency_penalty: float = 0.0  # over the output; 0 is off
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)  # token id to the bias of its logit
    seed: int | None = None  # None or -1: a random seed, which the output reports
    n: int = 1  # completions
    max_tokens: int = 256  # new tokens at most; fewer where the context ends earlier, with finish_reason "length"
    stop: Sequence[str] = ()  # texts or control tokens before which the output ends; one string is accepted too
    stop_token_ids: Sequence[int] = ()  # beside the model's own end-of-sequence tokens
    ignore_eos: bool = False  # continue after an end-of-sequence token
    logprobs: int | None = None  # alternatives listed at each new token; 0: the token itself only
    prompt_logprobs: int | None = None  # alternatives listed at each prompt token
    grammar: Grammar | None = None  # constraint on the text; it masks logits before the other steps
    trace: bool = False  # report the state of decoding with each chunk of a stream

    if TYPE_CHECKING:  # fields accept None, and then hold their default

        def __init__(
            self,
            temperature: float | None = 1.0,
            top_k: int | None = 0,
            top_p: float | None = 1.0,
            min_p: float | None = 0.0,
            repetition_penalty: float | None = 1.0,
            presence_penalty: float | None = 0.0,
            frequency_penalty: float | None = 0.0,
            logit_bias: Mapping[int, float] | None = None,
            seed: int | None = None,
            n: int | None = 1,
            max_tokens: int | None = 256,
            stop: str | Sequence[str] | None = (),
            stop_token_ids: Sequence[int] | None = (),
            ignore_eos: bool | None = False,
            logprobs: int | None = None,
            prompt_logprobs: int | None = None,
            grammar: Grammar | None = None,
            trace: bool | None = False,
        ) -> None: ...

    def __post_init__(self) -> None:
        """Check and normalise: None to the default, numbers to int and float, `stop` and `stop_token_ids` to tuples.

        Values by which other engines disable a parameter are converted: top_k -1 becomes 0, and seed -1 becomes None.
        """
        for parameter in fields(self):
            if getattr(self, parameter.name) is None:
                object.__setattr__(self, parameter.name, parameter.default)
        for name, (allowed, is_allowed) in _REALS.items():
            object.__setattr__(self, name, _real(argument(name), getattr(self, name), allowed, is_allowed))
        for name, (allowed, in_range, optional) in _INTEGERS.items():
            if not (optional and getattr(self, name) is None):
                object.__setattr__(self, name, _integer(argument(name), getattr(self, name), allowed, in_range))
        for name in ("ignore_eos", "trace"):
            if not isinstance(getattr(self, name), bool):
                raise _value_error(argument(name), "True or False", getattr(self, name))
        if not (self.grammar is None or isinstance(self.grammar, Grammar)):
            raise _value_error(argument("grammar"), "a Grammar, such as Grammar.json(schema), or None", self.grammar)
        if self.grammar and self.ignore_eos:
            raise RequestError(
                f"{argument('ignore_eos')} continues a text after its end, and {argument('grammar')} ends the text; "
                "leave out one of them"
            )
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        object.__setattr__(self, "seed", None if self.seed == RANDOM_SEED else self.seed)
        object.__setattr__(self, "stop", _stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))


def _value_error(name: str, allowed: str, value: object) -> RequestError:
    return RequestError(f"{name} must be {allowed}, not {value!r}")


def _real(name: str, value: object, allowed: str, is_allowed: Callable[[float], bool]) -> float:
    # A string or a bool is a mistake in the caller's program or JSON: refused rather than converted.
    if not isinstance(value, Real) or isinstance(value, bool):
        raise _value_error(name, allowed, value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not is_allowed(number):
        raise _value_error(name, allowed, value)
    return number


def _integer(name: str, value: object, allowed: str, is_allowed: Callable[[int], bool]) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or not is_allowed(int(value)):
        raise _value_error(name, allowed, value)
    return int(value)


def _stop(stop: object) -> tuple[str, ...]:
    stop_texts = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop_texts, Sequence) or not all(isinstance(text, str) and text for text in stop_texts):
        raise _value_error(argument("stop"), "a non-empty string, or a list of them", stop)
    return tuple(stop_texts)


def _token_ids(ids: object) -> tuple[int, ...]:
    name = argument("stop_token_ids")
    allowed = "a list of token ids (integers, at least 0)"
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise _value_error(name, allowed, ids)
    return tuple(_integer(name, token, allowed, lambda i: i >= 0) for token in ids)


def _bias(bias: object) -> dict[int, float] | None:
    if bias is None:
        return None
    name = argument("logit_bias")
    if not isinstance(bias, Mapping):
        raise _value_error(name, "a mapping from token ids to numbers, or None", bias)
    ids = (_integer(f"a token id in {name}", token, "an integer, at least 0", lambda i: i >= 0) for token in bias)
    return {
        i: _real(f"{name}[{i}]", x, "from -1e9 to 1e9", lambda x: abs(x) <= MAX_MAGNITUDE)
        for i, x in zip(ids, bias.values(), strict=True)
    }


_REALS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("a finite number, at least 0 (0 is greedy)", lambda x: 0 <= x < math.inf),
    "top_p": ("above 0 and at most 1 (1 is off)", lambda x: 0 < x <= 1),
    "min_p": ("from 0 (off) to 1", lambda x: 0 <= x <= 1),
    "repetition_penalty": ("above 0, from 1e-9 to 1e9 (1 is off)", lambda x: 1 / MAX_MAGNITUDE <= x <= MAX_MAGNITUDE),
    "presence_penalty": ("from -1e9 to 1e9 (0 is off)", lambda x: abs(x) <= MAX_MAGNITUDE),
    "frequency_penalty": ("from -1e9 to 1e9 (0 is off)", lambda x: abs(x) <= MAX_MAGNITUDE),
}

_INTEGERS: dict[str, tuple[str, Callable[[int], bool], bool]] = {  # last: whether None is allowed
    "top_k": ("an integer from 1 to 2**31 - 1, or 0 or -1 (off)", lambda i: -1 <= i < 2**31, False),
    "n": (f"an integer from 1 to {MAX_CHOICES}", lambda i: 1 <= i <= MAX_CHOICES, False),
    "max_tokens": ("an integer, at least 1", lambda i: i >= 1, False),
    "seed": ("an integer from 0 to 2**64 - 1, or -1 (one is drawn)", lambda i: RANDOM_SEED <= i < 2**64, True),
    "logprobs": (f"an integer from 0 to {MAX_LOGPROBS}", lambda i: 0 <= i <= MAX_LOGPROBS, True),
    "prompt_logprobs": (f"an integer from 0 to {MAX_LOGPROBS}", lambda i: 0 <= i <= MAX_LOGPROBS, True),
}
