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


def routed(*requests: tuple[str, Any]) -> remote_engine.PrefixRouter:
    """A router that has sent requests to replicas already."""
    routes = object.__new__(remote_engine.PrefixRouter)
    routes.initialize_state()
    for name, request in requests:
        routes.on_request_routed(request, name, None)
    return routes


def first(routes: remote_engine.PrefixRouter, request: Any, alive: str = "abc") -> str:
    """The replica that is preferred, if one is."""
    replicas = [SimpleNamespace(replica_id=name) for name in alive]
    ranks = asyncio.run(routes.choose_replicas(replicas, request))
    assert sorted(r.replica_id for r in ranks[-1]) == list(alive), "where it is at home there may be no room"
    return "".join(replica.replica_id for replica in ranks[0])


def test_ray_shared_document_has_home() -> None:
    routes = routed(("b", pending([*DOCUMENT, 1])), ("c", pending([*reversed(DOCUMENT)])))
    assert first(routes, pending([*DOCUMENT, 2, 3])) == "b"
    assert first(routes, pending(DOCUMENT[:1100] + [7] * 900)) == "b", "half of what is shared is seen"
    assert first(routes, pending([*reversed(DOCUMENT)])) == "c"
    assert not first(routes, pending([9, *DOCUMENT])) and not first(
        routes, pending(DOCUMENT[: remote_engine.LEAST - 1])
    )


def test_ray_longest_prefix_wins() -> None:
    """Both documents begin with the same preface; what was sent last is at home with it."""
    first_ids, two = ([*DOCUMENT[:600], *[i] * 2000] for i in (1, 2))
    routes = routed(("a", pending(first_ids)), ("b", pending(two)))
    assert [first(routes, pending([*ids, 5])) for ids in (first_ids, two, DOCUMENT[:700])] == ["a", "b", "b"]


def test_ray_dead_home_is_ignored() -> None:
    routes = routed(("a", pending(DOCUMENT[:600])), ("b", pending(DOCUMENT)))
    assert first(routes, pending(DOCUMENT), alive="bc") == "b" and not first(routes, pending(DOCUMENT), alive="ac")


def test_ray_other_key_reveals_nothing() -> None:
    routes = routed(("b", pending(DOCUMENT, scope="key")))
    assert first(routes, pending(DOCUMENT, scope="key")) == "b" and not first(routes, pending(DOCUMENT, scope="other"))


def test_ray_old_prefixes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two documents of four beginnings each. Where Ray runs it replaces the class by a copy with globals of its own.
    monkeypatch.setitem(remote_engine.PrefixRouter.on_request_routed.__globals__, "REMEMBERED", 8)
    first_request, two, three = (pending([i, *DOCUMENT]) for i in range(3))
    routes = routed(("a", first_request), ("b", two), ("a", first_request), ("c", three))
    assert [first(routes, request) for request in (first_request, two, three)] == ["a", "", "c"]


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
