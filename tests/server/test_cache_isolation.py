"""A client cannot tell that another key has read a document: from text, usage, progress, events and reads of the disk.

Times are not compared: what a machine's load tells is said in docs/design/disk-cache.md.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers.asgi_client import ask, events, good
from tests.helpers.disk_checks import spied_reads
from tests.helpers.disk_llm import written
from tests.helpers.guarded_app import KEY, OTHER
from tests.helpers.tiny_llm import counted
from triforce.disk_cache import prefixes
from triforce.llm import LLM
from triforce.server.app import create_app
from triforce.server.engine_thread import Worker
from triforce.server.limits import Limits

DOCUMENT = "It was the age of wisdom, it was the age of foolishness. " * 22
SAMPLED: dict[str, Any] = {"max_tokens": 6, "temperature": 0.8, "seed": 5, "ignore_eos": True, "tier_stats": True}
STREAM = {"stream": True, "stream_options": {"include_usage": True}, "trace": True, "return_progress": True}
TALK = {"messages": [{"role": "user", "content": DOCUMENT}]}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("/v1/completions", {"prompt": DOCUMENT, "n": 2}),
    "stream": ("/v1/completions", {"prompt": DOCUMENT, **STREAM}),
    "chat": ("/v1/chat/completions", {**TALK, **STREAM}),
    "scores": ("/v1/completions", {"prompt": DOCUMENT, "echo": True, "logprobs": 2, "max_tokens": 1}),
    "the same salt": ("/v1/completions", {"prompt": DOCUMENT, "cache_salt": "a"}),
    "kept out": ("/v1/completions", {"prompt": DOCUMENT, "cache": False}),
    "another beginning": ("/v1/completions", {"prompt": "No. " + DOCUMENT, **STREAM}),
    "more of it": ("/v1/completions", {"prompt": DOCUMENT + "So it was.", **STREAM}),
}
OF_THE_REQUEST = ("id", "created", "time_ms", "seconds")
"""Names of what differs between any two requests."""


class Observation(NamedTuple):
    """The answer that a client gets, tokens that the models were fed for it, and whether each entry was on disk."""

    response: Any
    fed: tuple[int, int]
    disk_reads: list[bool]


def without(value: Any) -> Any:
    """Return a JSON value without what differs between any two requests."""
    if isinstance(value, list):
        return [without(element) for element in value]
    if isinstance(value, dict):
        return {name: without(element) for name, element in value.items() if name not in OF_THE_REQUEST}
    return value


class Host:
    """A server with keys and a disk cache."""

    def __init__(self, pair: Path, cache: Path, **options: Any) -> None:
        how: dict[str, Any] = dict(mode="triforce", retrieval_budget=64, searched_layers="none") | options
        self.llm = LLM(pair / "target", pair / "draft", disk_cache=cache, **how)
        self.worker = Worker(self.llm, Limits())
        self.app = create_app(self.llm, self.worker, "tiny", keys=[KEY, OTHER])

    def ask(self, key: str, path: str, body: dict[str, Any]) -> Any:
        response = ask(self.app, path, SAMPLED | body, headers={"authorization": f"Bearer {key}"})
        if not body.get("stream"):
            return good(response)
        stream_events = events(response)
        reports = [event["prompt_progress"] for event in stream_events if "prompt_progress" in event]
        # How many of them there are depends on the clock.
        progress = sorted({report["cache"] for report in reports}), reports[-1]["processed"]
        text_events = [event for event in stream_events if "prompt_progress" not in event]
        return [*text_events, {"choices": [], "progress": progress}]

    def observe(self, key: str, path: str, body: dict[str, Any]) -> Observation:
        target = self.llm.models.target
        draft = self.llm.models.draft
        assert draft
        with spied_reads() as disk_reads, counted(target) as full, counted(draft) as small:
            stream_events = self.ask(key, path, body)
        return Observation(without(stream_events), (sum(full), sum(small)), disk_reads)

    def stop(self) -> None:
        asyncio.run(self.worker.close())
        written(self.llm)


@pytest.fixture
def host(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Host]]:
    """Makes servers, by the name of their disk cache."""
    monkeypatch.setattr(prefixes, "perf_counter", lambda: 0.0)
    hosts: list[Host] = []

    def make(name: str, **how: Any) -> Host:
        hosts.append(Host(pair, tmp_path / name, **how))
        return hosts[-1]

    yield make
    for created_host in hosts:
        created_host.stop()


def read_by(host: Host, key: str) -> None:
    """Have a key read all that is asked for in this file, and leave it."""
    for path, body in REQUESTS.values():
        host.ask(key, path, body)


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("where", ["in memory", "on disk"])
def test_other_key_cannot_tell_what_was_read(host: Callable[[str], Host], where: str, request_name: str) -> None:
    path, body = REQUESTS[request_name]
    asked = host("read")
    read_by(asked, KEY)
    if where == "on disk":
        asked.stop()
        asked = host("read")
    never = host("never").observe(OTHER, path, body)
    assert asked.observe(OTHER, path, body) == never
    assert not any(never.disk_reads)


def test_other_key_cannot_tell_where_server_learns(host: Callable[..., Host]) -> None:
    """Mode auto and its search of layers learn from another key's texts; text, usage and disk reads do not change."""
    path, body = REQUESTS["stream"]
    learns: dict[str, Any] = dict(mode="auto", searched_layers="auto")
    asked = host("read", **learns)
    read_by(asked, KEY)
    observed = asked.observe(OTHER, path, body)
    never = host("never", **learns).observe(OTHER, path, body)
    assert (text_of(observed), usage_of(observed), observed.disk_reads) == (
        text_of(never),
        usage_of(never),
        never.disk_reads,
    )
    assert not any(observed.disk_reads)


def usage_of(observation: Observation) -> Any:
    """Return the usage of an answer without the tiers."""
    (usage,) = (event["usage"] for event in observation.response if event.get("usage"))
    return {name: value for name, value in usage.items() if name != "tiers"}


def test_own_key_can_tell_what_was_read(host: Callable[[str], Host]) -> None:
    """The key that read a document sees cached tokens and disk reads, so the comparison above detects a leak."""
    path, body = REQUESTS["stream"]
    asked = host("read")
    first_answer = asked.observe(KEY, path, body)
    again = asked.observe(KEY, path, body)
    asked.stop()
    restarted = host("read").observe(KEY, path, body)
    for later_answer in (again, restarted):
        assert later_answer.response != first_answer.response and sum(later_answer.fed) < sum(first_answer.fed)
    assert any(restarted.disk_reads) and text_of(first_answer) == text_of(again) == text_of(restarted)


def text_of(observation: Observation) -> str:
    return "".join(choice.get("text", "") for event in observation.response for choice in event["choices"])


def test_no_answer_to_another_key_names_what_was_read(host: Callable[[str], Host]) -> None:
    """Errors, models, health and metrics contain nothing of another key's document."""
    asked = host("read")
    read_by(asked, KEY)
    headers = {"authorization": f"Bearer {OTHER}"}
    for path in ("/v1/models", "/health", "/metrics"):
        assert "foolishness" not in ask(asked.app, path, headers=headers).text
    wrong = ask(asked.app, "/v1/completions", {"prompt": DOCUMENT, "cache_salt": 5}, headers=headers)
    assert wrong.status_code == 400 and "foolishness" not in json.dumps(wrong.json())
