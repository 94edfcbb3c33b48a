"""A tiny pair, requests on it, and checks of their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from tests.helpers.tiny_llm import ask, ids
from triforce.engine.engine import Engine, Request
from triforce.engine.prefill_pacer import PrefillPacer
from triforce.interface.outputs import CompletionOutput, RequestOutput
from triforce.llm import LLM

ROWS = 4
KV_TOKENS = 700
TOKENS = 20
LATE = 40
CHUNK = 64
READ = 48
"""Tokens of a prompt's chunk, and prefilled tokens per step: so small that prompts take several steps."""


class ByChunks(PrefillPacer):
    """A pacer that ignores time and grants at most one pass more than `READ` tokens per step."""

    def begin(self, running: bool, step_seconds: float = 0.0) -> None:
        super().begin(running=False)
        self.read = 0

    def grant(self, tier: str, tokens: int) -> int:
        self.read += tokens
        return super().grant(tier, tokens)

    def has_time(self) -> bool:
        return self.read < READ


def prompt(length: int) -> list[int]:
    """Return the beginning of one of two texts."""
    return ids(640, seed=length % 2)[:length]


@cache
def alone(
    model: LLM, length: int, temperature: float = 0.8, mode: str = "ar", tokens: int = TOKENS
) -> list[CompletionOutput]:
    """Return the two choices of a request that runs alone."""
    params = ask(temperature=temperature, max_tokens=tokens, n=2)
    return model.generate(prompt(length), params, mode=mode)[0].outputs


def check_same(outputs: Sequence[CompletionOutput], expected_outputs: Sequence[CompletionOutput]) -> None:
    """Compare texts, and each tier's proposals and acceptance: a wrong draft token shows in no text."""
    for completion, expected in zip(outputs, expected_outputs, strict=False):
        assert completion.token_ids == expected.token_ids and completion.origins == expected.origins
        for tier, expected_tier in zip(completion.tiers, expected.tiers, strict=True):
            assert tier.histogram == expected_tier.histogram
            assert (tier.proposed, tier.accepted, tier.passes) == (
                expected_tier.proposed,
                expected_tier.accepted,
                expected_tier.passes,
            )


def request(model: LLM, length: int, mode: str | None = None, scope: str = "", **changes: Any) -> Request:
    return model.request(prompt(length), ask(**({"max_tokens": TOKENS} | changes)), mode, scope)


def finish(engine: Engine) -> dict[Request, RequestOutput]:
    outputs = {}
    while engine.busy:
        for request, event in engine.step():
            assert not isinstance(event, Exception), event
            if isinstance(event, RequestOutput):
                outputs[request] = event
    return outputs


def check_empty(engine: Engine) -> None:
    store = engine.core.store
    assert not engine.core.scheduler.groups and engine.core.kv_tokens == 0
    assert store.pool.free_pages + len(engine.core.prefixes.pages) == store.pages
    engine.close()
    assert store.pool.free_pages == store.pages
    if windows := store.pool.windows:
        assert not windows.allocator.reserved and len(windows.allocator.free) == windows.allocator.pages
    assert "streaming" not in vars(store) or sorted(store.streaming.free_rings) == list(range(store.rows))
