"""An engine in a process of Ray's: what `server.worker` is in the server's own."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import ray
from ray import serve

from triforce.backends import native_loader
from triforce.errors import TriforceError
from triforce.llm import LLM
from triforce.replicas.frontend import ReplicaFrontend
from triforce.replicas.messages import ReplicaMessage
from triforce.replicas.tp_workers import accompanied
from triforce.server.engine_client import GenerationRequest, ReplicaLost, ShuttingDown
from triforce.server.engine_thread import Worker
from triforce.server.limits import Limits

LOOPBACK = "127.0.0.1"
"""The address of a node whose Ray keeps to it (see `environment`)."""


class Replica:
    """`settings` are those of LLM; of the limits it keeps `rows` and `kv_tokens`. Prompts wait elsewhere.

    It is the first of so many ranks, `exact` as in `Ranks`, which share the processors and GPUs that it was given.
    A mistake in the settings is said by `desk`: what a constructor raises Ray tries again, and tells with a traceback.
    """

    def __init__(self, settings: dict[str, Any], limits: Limits, ranks: int = 1, exact: bool = True) -> None:
        if ray.util.get_node_ip_address() == LOOPBACK:
            _keep_to_loopback()
        threads = use_share(ranks)
        self._name = str(serve.get_replica_context().replica_id.unique_id)
        self._desk: ReplicaFrontend | TriforceError
        self._worker: Worker | None = None
        try:
            if ranks > 1:
                settings = settings | accompanied(settings, limits, ranks, exact, threads)
            llm = LLM(**settings)
            self._desk = ReplicaFrontend.of(llm)
            self._worker = Worker(llm, replace(limits, waiting=limits.rows))
        except TriforceError as error:
            self._desk = error

    def desk(self) -> ReplicaFrontend | TriforceError:
        """What requests are read with, or why there is no engine here."""
        return self._desk

    def check_health(self) -> None:
        """Ray asks now and then, and starts another replica for one that raises."""
        if self._worker and not self._worker.alive:
            raise ShuttingDown

    async def answer(self, ask: GenerationRequest) -> AsyncGenerator[ReplicaMessage, None]:
        """The events of one request, which is cancelled when nobody takes them any more."""
        assert self._worker, "who asks has seen the desk"
        yield self._word()
        (answer,) = self._worker.submit([ask])
        try:
            async with aclosing(aiter(answer)) as events:  # type: ignore[type-var]
                async for event in events:
                    yield self._word(event, answer.waited or 0.0)
        except (TriforceError, ShuttingDown, ReplicaLost) as error:
            yield self._word(error)
        finally:
            answer.cancel()

    def _word(self, event: Any = None, waited: float = 0.0) -> ReplicaMessage:
        assert self._worker
        return ReplicaMessage(self._name, self._worker.load().kv_tokens, event, waited)


def use_share(ranks: int) -> int:
    """As many threads as each rank has of the processors that this process was given."""
    given = int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1))
    native_loader.use_threads(threads := max(1, given // ranks))
    return threads


def _keep_to_loopback() -> None:
    """Each replica has a server for calls that are not used here, and Ray opens it to all machines whatever its node.

    There is no setting for it. With another Ray that does it elsewhere this raises, and there is no replica.
    """
    from ray.serve._private import replica

    bind = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: bind(server, address.replace("[::]", LOOPBACK))
