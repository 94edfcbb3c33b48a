"""An engine in a process of Ray's, as `server.engine_thread` is in the server's own."""

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
"""Address of a node whose Ray keeps to it (see `ray_env`)."""


class Replica:
    """A replica. Uses `rows` and `kv_tokens` of the limits; prompts wait in the server.

    It is the first of so many ranks, `exact` as in `TPGroup`, which share the processors and GPUs that it was given.
    A mistake in the settings is returned by `frontend`: where a constructor raises, Ray tries again, with a traceback.
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
        """Return what requests are parsed with, or the error if there is no engine here."""
        return self._frontend

    def check_health(self) -> None:
        """Raise ShuttingDown if the engine has ended. Ray calls this, and then starts another replica."""
        if self._worker and not self._worker.alive:
            raise ShuttingDown

    async def answer(self, generation: GenerationRequest) -> AsyncGenerator[ReplicaMessage, None]:
        """Yield the messages of one request, which is cancelled when nobody reads them any more."""
        assert self._worker, "who asks has seen the frontend"
        yield self._message()
        if grammar := generation.params.grammar:  # compiled ones stay in their process, which is the server's
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
    """Return the first of so many ranks, each with its share of this process's processors. Raises TriforceError."""
    cpu_count = int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1))
    dispatch.use_threads(threads := max(1, cpu_count // ranks))
    return LLM(**settings | (start_ranks(settings, limits, ranks, exact, threads) if ranks > 1 else {}))


def _keep_to_loopback() -> None:
    """Each replica has a server for calls that are not used here, and Ray opens it to all machines whatever its node.

    There is no setting for it. With another Ray that does it elsewhere this raises, and there is no replica.
    """
    from ray.serve._private import replica

    bind = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: bind(server, address.replace("[::]", LOOPBACK))
