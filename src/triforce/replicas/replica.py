"""An engine in a Ray process; `server.engine_thread` runs one in the server's process."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import ray
from ray import serve

from triforce.backends import dispatch
from triforce.errors import TriforceError
from triforce.llm import LLM
from triforce.replicas.frontend import ReplicaFrontend, ReplicaMessage
from triforce.replicas.tp_workers import start_ranks
from triforce.server.engine_client import GenerationRequest
from triforce.server.engine_thread import Worker
from triforce.server.errors import ReplicaLost, ShuttingDown
from triforce.server.grammar_queue import GrammarPool
from triforce.server.limits import Limits

LOOPBACK = "127.0.0.1"
"""Address of a node whose Ray listens on loopback only (see `ray_env`)."""


class Replica:
    """A replica. It uses `rows` and `kv_tokens` of the limits; prompts wait in the server.

    ranks: number of processes that share the model, and the processors and GPUs of the replica. This process is
    the first. exact: see `TPGroup`. `frontend` returns an error in the settings: if a constructor raises, Ray prints a
    traceback and tries again.
    """

    def __init__(self, settings: dict[str, Any], limits: Limits, ranks: int = 1, exact: bool = True) -> None:
        if ray.util.get_node_ip_address() == LOOPBACK:
            _keep_to_loopback()
        self._name = str(serve.get_replica_context().replica_id.unique_id)
        self._frontend: ReplicaFrontend | TriforceError
        self._worker: Worker | None = None
        try:
            llm = load(settings, limits, ranks, exact)
            self._frontend = ReplicaFrontend.of(llm)
            self._worker = Worker(llm, replace(limits, waiting=limits.rows))
            self._grammars = GrammarPool(llm.grammars, limits.waiting + limits.rows)
        except TriforceError as error:
            self._frontend = error

    def frontend(self) -> ReplicaFrontend | TriforceError:
        """Return the frontend that parses requests, or the error that prevented the engine."""
        return self._frontend

    def check_health(self) -> None:
        """Raise ShuttingDown if the engine has ended. Ray calls this, and replaces the replica after an error."""
        if self._worker and not self._worker.alive:
            raise ShuttingDown

    async def answer(self, generation: GenerationRequest) -> AsyncGenerator[ReplicaMessage, None]:
        """Yield the messages of one request. Closing the generator cancels the request."""
        assert self._worker, "requests come after a valid frontend"
        yield self._message()
        if grammar := generation.params.grammar:  # compiled grammars cannot leave the server's process
            try:
                compiled = await self._grammars.compile(grammar, generation.scope or "")
            except TriforceError as error:
                yield self._message(error)
                return
            generation = replace(generation, compiled=compiled)
        (answer,) = self._worker.submit([generation])
        try:
            async with aclosing(aiter(answer)) as events:  # type: ignore[type-var]
                async for event in events:
                    yield self._message(event, answer.waited or 0.0)
        except (TriforceError, ShuttingDown, ReplicaLost) as error:
            yield self._message(error)
        finally:
            answer.cancel()

    def _message(self, event: Any = None, waited: float = 0.0) -> ReplicaMessage:
        assert self._worker
        return ReplicaMessage(self._name, self._worker.load().kv_tokens, event, waited)


def load(settings: dict[str, Any], limits: Limits, ranks: int, exact: bool) -> LLM:
    """Return the LLM of the first of `ranks` ranks, which share this process's processors. Raises TriforceError."""
    cpu_count = int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1))
    dispatch.use_threads(threads := max(1, cpu_count // ranks))
    return LLM(**settings | (start_ranks(settings, limits, ranks, exact, threads) if ranks > 1 else {}))


def _keep_to_loopback() -> None:
    """Bind the gRPC server of this replica to loopback. Ray opens this unused server to all machines, on any node.

    Ray has no setting for it. In a version of Ray without `add_port_to_grpc_server` this raises, and no replica starts.
    """
    from ray.serve._private import replica

    bind = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: bind(server, address.replace("[::]", LOOPBACK))
