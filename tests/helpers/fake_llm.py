"""A fake LLM that gives one answer, and records its calls."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from triforce.interface.explain import BreakEvenPoint, TierStats
from triforce.interface.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from triforce.interface.sampling_params import SamplingParams, chat_defaults


class Characters:
    """A tokenizer whose tokens are characters."""

    chats = False

    class Stream:
        def step(self, token: int) -> str:
            return chr(token)

    def stream(self, prefix_ids: object = ()) -> Stream:
        return self.Stream()

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode("".join(f"{message['role']}: {message['content']}" for message in messages))


class Piece:
    def __init__(self, text: str, origins: list[str]) -> None:
        self.text = text
        self.token_ids = [ord(c) for c in text]
        self.origins = origins


def answer(text: str, n: int = 1, **changes: Any) -> RequestOutput:
    tiers = [TierStats("draft", 4, 3, 2, 0.1), TierStats("full", 5, 5, 2, 0.4)]
    outputs = [
        CompletionOutput(
            i, text, [ord(c) for c in text], "length", changes.get("logprobs"), ["full"] * len(text), 7, tiers
        )
        for i in range(n)
    ]
    return RequestOutput([1, 2], None, outputs, "triforce", "seeded", "bitwise", 1.0, 0.5)


class NoGrammars:
    """Grammars that accept no text."""

    def compile(self, grammar: object) -> NoGrammars:
        return self

    def accepts(self, ids: object) -> bool:
        return False


class FakeLLM:
    """Answers "héllo", as from two passes."""

    made: dict[str, Any]
    called: dict[str, Any]
    fault: Exception | None = None
    tokenizer = Characters()
    grammars = NoGrammars()
    target = SimpleNamespace(config=SimpleNamespace(context=131_072))

    def __init__(self, model: str | None, **settings: Any) -> None:
        type(self).made = {"model": model} | settings

    def encode(self, prompt: str) -> list[int]:
        return self.tokenizer.encode(prompt)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.tokenizer.chat(messages)

    sampling_defaults: Mapping[str, Any] = {}
    load_seconds = 1.25

    def sampling_params(self, *, chat: bool = False, **changes: Any) -> SamplingParams:
        defaults = chat_defaults(self.sampling_defaults) if chat else self.sampling_defaults
        return SamplingParams(**{**defaults, **changes})

    def break_even(self) -> BreakEvenPoint:
        return BreakEvenPoint(4096, "pays from 4,096 tokens on", "as this one says")

    def generate(self, prompt: str | list[int], params: SamplingParams, **settings: Any) -> list[RequestOutput]:
        text = prompt if isinstance(prompt, str) else "".join(map(chr, prompt))
        type(self).called = {"prompt": text, "params": params} | settings
        if self.fault:
            raise self.fault
        logprobs = (
            [TokenLogprobs(Logprob(1, -0.5, "h"), (Logprob(2, -math.inf, "j"),))]
            if params.logprobs is not None
            else None
        )
        return [answer("héllo", params.n, logprobs=logprobs)]

    def stream(self, prompt: list[int], params: SamplingParams, **settings: Any) -> Iterator[Piece | RequestOutput]:
        self.generate(prompt, params, **settings)
        settings["on_prefill"](1, 2)
        settings["on_prefill"](2, 2)
        yield Piece("hé", ["draft", "full"])
        yield Piece("llo", ["draft", "draft", "full"])
        yield answer("héllo")
