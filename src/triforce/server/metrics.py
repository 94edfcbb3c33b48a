"""Prometheus metrics, with vLLM's names where vLLM has the metric, else with the prefix `triforce:`.

A help text begins with the unit of its metric. docs/reference/metrics.md is made of these texts.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import AsyncGenerator
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from triforce.engine.engine import OutputChunk
from triforce.interface.explain import TierStats
from triforce.interface.outputs import RequestOutput
from triforce.server.engine_client import EngineClient, Event, GenerationStream

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5)
_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))


class Metrics:
    """The metrics of one server; each application has its own registry."""

    def __init__(self, engine: EngineClient, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._gauge("vllm:num_requests_running", "Prompts in prefill or decoding").set_function(
            lambda: engine.load().running
        )
        self._gauge("vllm:num_requests_waiting", "Prompts in the queue").set_function(lambda: engine.load().waiting)
        self._gauge("triforce:kv_tokens", "Tokens in the KV cache of running prompts").set_function(
            lambda: engine.load().kv_tokens
        )
        self.connections = self._gauge("triforce:connections", "Connections that are open")
        self.connection_events = self._counter(
            "triforce:connection_events", "Events of connections at a limit or a deadline", "event"
        )
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens of finished prompts, cached ones included")
        self.new_tokens = self._counter("vllm:generation_tokens", "Tokens generated for finished prompts")
        self.finished = self._counter("vllm:request_success", "Texts that finished", "finished_reason")
        self._kv_dtype = Gauge(
            "triforce:kv_cache_dtype",
            "1 for each type of keys and values that finished prompts had",
            ["model_name", "dtype"],
            registry=self.registry,
        )
        self.cancelled = self._counter("triforce:request_cancelled", "Requests that a disconnect or --timeout ended")
        self.queue_time = self._histogram("vllm:request_queue_time_seconds", "Seconds in the queue", _SECONDS)
        self.prefill_time = self._histogram("vllm:request_prefill_time_seconds", "Seconds of prefill", _SECONDS)
        self.decode_time = self._histogram("vllm:request_decode_time_seconds", "Seconds of decoding", _SECONDS)
        self.first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Seconds from submission to the first token (TTFT)", _SECONDS
        )
        self.request_time = self._histogram(
            "vllm:e2e_request_latency_seconds", "Seconds from submission to the last token", _SECONDS
        )
        self.per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Seconds per token after the first (TPOT)", _PER_TOKEN
        )
        self.prompt_length = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self.new_length = self._histogram(
            "vllm:request_generation_tokens", "Tokens generated for a prompt, in all of its texts", _TOKENS
        )
        self.drafted = self._counter(
            "vllm:spec_decode_num_draft_tokens", "Tokens that the highest tier below the full one proposed"
        )
        self.accepted = self._counter(
            "vllm:spec_decode_num_accepted_tokens",
            "Tokens of the highest tier below the full one that the full tier accepted",
        )
        self.tier_proposed = self._counter(
            "triforce:tier_proposed_tokens", "Tokens that a tier proposed to the tier above", "tier"
        )
        self.tier_accepted = self._counter(
            "triforce:tier_accepted_tokens", "Tokens of a tier that the tier above accepted", "tier"
        )
        self.tier_passes = self._counter("triforce:tier_passes", "Passes of a tier in decoding", "tier")

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def connection_event(self, event: str) -> None:
        self.connection_events.labels(self._model, event).inc()

    async def watch(self, answer: GenerationStream, started: float) -> AsyncGenerator[Event, None]:
        """Yield the events of an answer and record them. started: time of the request by `perf_counter`."""
        first_token_time = None
        is_finished = False
        try:
            async for event in answer:
                if isinstance(event, OutputChunk):
                    first_token_time = first_token_time or perf_counter()
                elif isinstance(event, RequestOutput):
                    is_finished = True
                    self._finish(answer, event, started, first_token_time or perf_counter())
                yield event
        except (GeneratorExit, CancelledError):
            if not is_finished:
                self.cancelled.labels(self._model).inc()
            raise

    def _finish(self, answer: GenerationStream, output: RequestOutput, started: float, first_token_time: float) -> None:
        new_tokens = output.completion_tokens
        end_time = perf_counter()
        self.prompt_tokens.labels(self._model).inc(output.prompt_tokens)
        self.new_tokens.labels(self._model).inc(new_tokens)
        self._kv_dtype.labels(self._model, output.kv_dtype).set(1)
        for completion in output.outputs:
            self.finished.labels(self._model, completion.finish_reason).inc()
        for histogram, value in (
            (self.queue_time, answer.waited or 0.0),
            (self.prefill_time, output.prefill_seconds),
            (self.decode_time, output.decode_seconds),
            (self.first_token, first_token_time - started),
            (self.request_time, end_time - started),
            (self.prompt_length, output.prompt_tokens),
            (self.new_length, new_tokens),
        ):
            histogram.labels(self._model).observe(value)
        if new_tokens > 1:  # chunks of later prompts of a request are read in one burst, hence the maximum
            seconds_per_token = max(
                (end_time - first_token_time) / (new_tokens - 1), output.decode_seconds / new_tokens
            )
            self.per_token.labels(self._model).observe(seconds_per_token)
        self._tiers(output.tiers)

    def _tiers(self, tiers: list[TierStats]) -> None:
        for tier in tiers:
            self.tier_proposed.labels(self._model, tier.name).inc(tier.proposed)
            self.tier_accepted.labels(self._model, tier.name).inc(tier.accepted)
            self.tier_passes.labels(self._model, tier.name).inc(tier.passes)
        for below_full in tiers[-2:-1]:
            self.drafted.labels(self._model).inc(below_full.proposed)
            self.accepted.labels(self._model).inc(below_full.accepted)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ["model_name"], registry=self.registry, buckets=buckets)
