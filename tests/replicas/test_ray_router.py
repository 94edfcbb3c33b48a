"""The router, without a Ray that runs: which replica a request goes to."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from triforce.interface.sampling_params import SamplingParams
from triforce.replicas import remote_engine
from triforce.server.engine_client import GenerationRequest

DOCUMENT = list(range(5000))


def pending(prompt: list[int], scope: str = "") -> Any:
    return SimpleNamespace(
        args=[GenerationRequest(prompt, SamplingParams(), scope=scope)], routing_context=SimpleNamespace()
    )


def routed(*known: tuple[str, Any]) -> remote_engine.PrefixRouter:
    """A router that has sent requests to replicas already."""
    made = object.__new__(remote_engine.PrefixRouter)
    made.initialize_state()
    for name, request in known:
        made.on_request_routed(request, name, None)
    return made


def first(made: remote_engine.PrefixRouter, request: Any, alive: str = "abc") -> str:
    """The replica that is preferred, if one is."""
    replicas = [SimpleNamespace(replica_id=name) for name in alive]
    ranks = asyncio.run(made.choose_replicas(replicas, request))
    assert sorted(r.replica_id for r in ranks[-1]) == list(alive), "where it is at home there may be no room"
    return "".join(replica.replica_id for replica in ranks[0])


def test_ray_shared_document_has_home() -> None:
    made = routed(("b", pending([*DOCUMENT, 1])), ("c", pending([*reversed(DOCUMENT)])))
    assert first(made, pending([*DOCUMENT, 2, 3])) == "b"
    assert first(made, pending(DOCUMENT[:1100] + [7] * 900)) == "b", "half of what is shared is seen"
    assert first(made, pending([*reversed(DOCUMENT)])) == "c"
    assert not first(made, pending([9, *DOCUMENT])) and not first(
        made, pending(DOCUMENT[: remote_engine.MIN_PREFIX_TOKENS - 1])
    )


def test_ray_longest_prefix_wins() -> None:
    """Both documents begin with the same preface; what was sent last is at home with it."""
    one, two = ([*DOCUMENT[:600], *[i] * 2000] for i in (1, 2))
    made = routed(("a", pending(one)), ("b", pending(two)))
    assert [first(made, pending([*each, 5])) for each in (one, two, DOCUMENT[:700])] == ["a", "b", "b"]


def test_ray_dead_home_is_ignored() -> None:
    made = routed(("a", pending(DOCUMENT[:600])), ("b", pending(DOCUMENT)))
    assert first(made, pending(DOCUMENT), alive="bc") == "b" and not first(made, pending(DOCUMENT), alive="ac")


def test_ray_other_key_reveals_nothing() -> None:
    made = routed(("b", pending(DOCUMENT, scope="key")))
    assert first(made, pending(DOCUMENT, scope="key")) == "b" and not first(made, pending(DOCUMENT, scope="other"))


def test_ray_old_prefixes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two documents of four beginnings each. Where Ray runs it replaces the class by a copy with globals of its own.
    monkeypatch.setitem(remote_engine.PrefixRouter.on_request_routed.__globals__, "MAX_PREFIXES", 8)
    one, two, three = (pending([i, *DOCUMENT]) for i in range(3))
    made = routed(("a", one), ("b", two), ("a", one), ("c", three))
    assert [first(made, request) for request in (one, two, three)] == ["a", "", "c"]


def test_ray_routing_lets_earlier_requests_go_first() -> None:
    """Otherwise a burst of requests would all find the same replica the least busy one."""

    async def play() -> None:
        sent: list[int] = []
        asyncio.get_running_loop().call_soon(sent.append, 1)
        await routed().choose_replicas([], pending(DOCUMENT))
        assert sent

    asyncio.run(play())


def test_ray_calls_without_prompt_go_anywhere() -> None:
    assert not first(routed(), SimpleNamespace(args=[], routing_context=SimpleNamespace()))
