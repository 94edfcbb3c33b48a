"""The router and the front, without a Ray that runs: who goes where, and what becomes of who was with one that died."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from triforce.engine.output_stream import OutputChunk
from triforce.errors import RequestError
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams
from triforce.replicas import remote_engine, router
from triforce.replicas.cluster import ClusterPlan, planned
from triforce.replicas.messages import ReplicaMessage
from triforce.replicas.remote_engine import Replicas
from triforce.server.engine_client import GenerationRequest, QueueFull, ReplicaLost, ShuttingDown

DOCUMENT = list(range(5000))


def pending(prompt: list[int], scope: str = "") -> Any:
    return SimpleNamespace(
        args=[GenerationRequest(prompt, SamplingParams(), scope=scope)], routing_context=SimpleNamespace()
    )


def routed(*known: tuple[str, Any]) -> router.PrefixRouter:
    """A router that has sent requests to replicas already."""
    made = object.__new__(router.PrefixRouter)
    made.initialize_state()
    for name, request in known:
        made.on_request_routed(request, name, None)
    return made


def first(made: router.PrefixRouter, request: Any, alive: str = "abc") -> str:
    """The replica that is preferred, if one is."""
    replicas = [SimpleNamespace(replica_id=name) for name in alive]
    ranks = asyncio.run(made.choose_replicas(replicas, request))
    assert sorted(r.replica_id for r in ranks[-1]) == list(alive), "where it is at home there may be no room"
    return "".join(replica.replica_id for replica in ranks[0])


def test_a_shared_document_has_a_home() -> None:
    made = routed(("b", pending([*DOCUMENT, 1])), ("c", pending([*reversed(DOCUMENT)])))
    assert first(made, pending([*DOCUMENT, 2, 3])) == "b"
    assert first(made, pending(DOCUMENT[:1100] + [7] * 900)) == "b", "half of what is shared is seen"
    assert first(made, pending([*reversed(DOCUMENT)])) == "c"
    assert not first(made, pending([9, *DOCUMENT])) and not first(made, pending(DOCUMENT[: router.LEAST - 1]))


def test_the_longest_beginning_counts() -> None:
    """Both documents begin with the same preface; what was sent last is at home with it."""
    one, two = ([*DOCUMENT[:600], *[i] * 2000] for i in (1, 2))
    made = routed(("a", pending(one)), ("b", pending(two)))
    assert [first(made, pending([*each, 5])) for each in (one, two, DOCUMENT[:700])] == ["a", "b", "b"]


def test_a_home_that_died_is_none() -> None:
    made = routed(("a", pending(DOCUMENT[:600])), ("b", pending(DOCUMENT)))
    assert first(made, pending(DOCUMENT), alive="bc") == "b" and not first(made, pending(DOCUMENT), alive="ac")


def test_of_another_key_nothing_can_be_told() -> None:
    made = routed(("b", pending(DOCUMENT, scope="key")))
    assert first(made, pending(DOCUMENT, scope="key")) == "b" and not first(made, pending(DOCUMENT, scope="other"))


def test_what_was_not_met_for_long_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two documents of four beginnings each. Where Ray runs it replaces the class by a copy with globals of its own.
    monkeypatch.setitem(router.PrefixRouter.on_request_routed.__globals__, "REMEMBERED", 8)
    one, two, three = (pending([i, *DOCUMENT]) for i in range(3))
    made = routed(("a", one), ("b", two), ("a", one), ("c", three))
    assert [first(made, request) for request in (one, two, three)] == ["a", "", "c"]


def test_what_was_routed_before_is_sent_first() -> None:
    """Otherwise a burst of requests would all find the same replica the least busy one."""

    async def play() -> None:
        sent: list[int] = []
        asyncio.get_running_loop().call_soon(sent.append, 1)
        await routed().choose_replicas([], pending(DOCUMENT))
        assert sent

    asyncio.run(play())


def test_calls_without_a_prompt_go_anywhere() -> None:
    assert not first(routed(), SimpleNamespace(args=[], routing_context=SimpleNamespace()))


def nodes(*cpus: int, gpus: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    gpus = gpus or (0,) * len(cpus)
    return [{"Alive": True, "Resources": {"CPU": c, "GPU": g}} for c, g in zip(cpus, gpus, strict=True)]


@pytest.mark.parametrize(
    ("machines", "count", "device", "plan"),
    [
        (nodes(8), 1, "auto", ClusterPlan(1, 8, 0)),
        (nodes(8), 3, "cpu", ClusterPlan(3, 2, 0)),
        (nodes(8, 4), 2, "auto", ClusterPlan(2, 4, 0)),
        (nodes(8, 4), 3, "auto", ClusterPlan(3, 4, 0)),
        ([*nodes(1), {"Alive": False, "Resources": {"CPU": 9}}], 1, "auto", ClusterPlan(1, 1, 0)),
        (nodes(16, 4, gpus=(2, 0)), 2, "cuda", ClusterPlan(2, 8, 1)),
        (nodes(16, gpus=(1,)), 2, "cpu", ClusterPlan(2, 8, 0)),
    ],
)
def test_replicas_share_what_there_is(machines: Any, count: int, device: str, plan: ClusterPlan) -> None:
    assert planned(machines, count, device) == plan


def test_ranks_have_a_processor_each_or_a_gpu() -> None:
    assert planned(nodes(8, 3), 3, "cpu", 3) == ClusterPlan(3, 3, 0, 3)
    assert planned(nodes(8, gpus=(4,)), 2, "auto", 2) == ClusterPlan(2, 4, 2, 2)
    with pytest.raises(RequestError, match=r"3 replicas need a GPU and a processor for each of their 2 ranks.*for 2"):
        planned(nodes(8, 1, gpus=(4, 4)), 3, "auto", 2)


@pytest.mark.parametrize(
    ("machines", "count", "device", "says"),
    [
        (nodes(1, 1), 3, "auto", "3 replicas need a processor each, and this Ray has them for 2"),
        (nodes(8, gpus=(1,)), 2, "auto", "2 replicas need a GPU and a processor each, and this Ray has them for 1"),
        (nodes(8, gpus=(2,)), 2, "cuda:1", "use --device cuda"),
        ([], 1, "auto", "this Ray has them for 0"),
    ],
)
def test_what_does_not_fit_is_said(machines: Any, count: int, device: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        planned(machines, count, device)


class Scripted:
    """Stands for Ray's handle. Each call plays the next script; a script is what its replica says, or does."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts, self.calls, self.cancelled, self.answer = list(scripts), 0, 0, self

    def remote(self, ask: GenerationRequest) -> Scripted:
        self.calls += 1
        self.script = self.scripts.pop(0)
        return self

    def cancel(self) -> None:
        self.cancelled += 1

    async def __aiter__(self) -> AsyncIterator[ReplicaMessage]:
        for event in self.script:
            if event is ...:
                await asyncio.Event().wait()
            if isinstance(event, ActorDiedError):
                raise event
            yield ReplicaMessage("a", 7, event)


DIED, ARRIVED, PIECE = ActorDiedError(), None, OutputChunk("x", [1], ["full"], 0)
WHOLE = RequestOutput([1], None, [], "ar", "seeded", "bitwise", 0.0, 0.0)


def told(*scripts: list[Any]) -> tuple[Scripted, list[Any]]:
    """What comes of one request, errors included, and the handle it came from."""

    async def play() -> list[Any]:
        events = []
        (answer,) = front.submit([GenerationRequest([1], SamplingParams())])
        try:
            async for event in answer:
                events.append(event)
        except Exception as error:
            events.append(type(error))
        assert front.load().running == front.load().waiting == front.load().kv_tokens == 0
        await front.close()
        return events

    handle = Scripted(*scripts)
    front = Replicas(handle, 1, lambda: 1, lambda: None)
    return handle, asyncio.run(play())


def test_what_has_not_begun_is_asked_of_another() -> None:
    handle, events = told([ARRIVED, DIED], [DIED], [ARRIVED, PIECE, WHOLE])
    assert events == [PIECE, WHOLE] and handle.calls == 3


def test_what_has_begun_is_lost() -> None:
    handle, events = told([ARRIVED, PIECE, DIED], [ARRIVED, PIECE, WHOLE])
    assert events == [PIECE, ReplicaLost] and handle.calls == 1, "a text that goes on from another one's beginning"


def test_what_ends_every_replica_is_given_up() -> None:
    handle, events = told(*[[ARRIVED, DIED]] * 9)
    assert events == [ReplicaLost] and handle.calls == remote_engine.TRIES


def test_errors_of_the_engine_are_not_asked_again() -> None:
    handle, events = told([ARRIVED, RequestError("no")], [ARRIVED, WHOLE])
    assert events == [RequestError] and handle.calls == 1


def test_a_replica_that_ends_without_an_end_is_lost() -> None:
    assert told([ARRIVED, PIECE])[1] == [PIECE, ReplicaLost]


def scene(act: Callable[[Scripted, Replicas], Any], *scripts: list[Any], most: int = 2) -> Scripted:
    async def play() -> None:
        await act(handle, front)
        await front.close()
        assert front.load().running == front.load().waiting == 0 and not front.alive and left == [1]

    left: list[int] = []
    handle = Scripted(*scripts)
    front = Replicas(handle, most, lambda: 1, lambda: left.append(1))
    asyncio.run(play())
    return handle


def asks(count: int) -> list[GenerationRequest]:
    return [GenerationRequest([1], SamplingParams())] * count


def test_the_queue_is_bounded_and_taken_whole_or_not() -> None:
    async def act(handle: Scripted, front: Replicas) -> None:
        with pytest.raises(QueueFull):
            front.submit(asks(3))
        one, _ = front.submit(asks(2))
        with pytest.raises(QueueFull) as full:
            front.submit(asks(1))
        assert full.value.waiting == 2 and one.waited is None
        one.cancel()  # before it began
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        front.submit(asks(1))

    scene(act, [...], [...], [...])


def test_who_is_cancelled_is_cancelled_there() -> None:
    async def act(handle: Scripted, front: Replicas) -> None:
        (answer,) = front.submit(asks(1))
        assert await anext(aiter(answer)) == PIECE
        assert (front.load().running, front.load().waiting, front.load().kv_tokens) == (1, 0, 7)
        answer.cancel()

    assert scene(act, [ARRIVED, PIECE, ...]).cancelled == 1


def test_to_stop_ends_what_runs() -> None:
    async def act(handle: Scripted, front: Replicas) -> None:
        (answer,) = front.submit(asks(1))
        front.drain()
        with pytest.raises(ShuttingDown):
            front.submit(asks(1))
        front.stop()
        with pytest.raises(ShuttingDown):
            await anext(aiter(answer))

    scene(act, [ARRIVED, ...])


@pytest.mark.parametrize("running", [lambda: 0, lambda: 1 // 0])
def test_without_replicas_it_is_not_well(monkeypatch: pytest.MonkeyPatch, running: Callable[[], int]) -> None:
    monkeypatch.setattr(remote_engine, "LOOK_SECONDS", 0.01)
    front = Replicas(Scripted(), 1, running, lambda: None)
    for _ in range(1000):
        if not front.alive:
            break
        asyncio.run(asyncio.sleep(0.01))
    assert not front.alive
    asyncio.run(front.close())
