"""Which replica a request goes to: one that has read its beginning and has a row to spare, or the least busy one."""

from __future__ import annotations

from asyncio import sleep
from collections import OrderedDict
from random import sample

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from triforce.server.engine_client import GenerationRequest

LEAST = 512
"""Tokens of the shortest beginning that counts: less is read in a moment, wherever it is."""
REMEMBERED = 1 << 16
"""Beginnings; those that were not met for longest are forgotten."""


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray publishes no types
    """A beginning is remembered at lengths that double, so at least half of what two prompts share is seen to be."""

    def initialize_state(self) -> None:
        """Ray's constructor."""
        self._homes: OrderedDict[int, ReplicaID] = OrderedDict()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The one where it is at home, and then all; of several Ray takes the least busy one, and none that is full."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # to look again at once would be to look all the time
        alive = {replica.replica_id: replica for replica in candidate_replicas}
        homes = (alive.get(self._homes.get(key)) for key in reversed(beginnings(pending_request)))
        home = next((replica for replica in homes if replica), None)
        await sleep(0)  # those that were routed before are sent first, and so counted
        # In any order, as of those that are equally busy the first one is taken.
        return [[home] if home else [], sample(candidate_replicas, len(candidate_replicas))]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """What it begins with is at home there from now on."""
        for key in beginnings(pending_request):
            self._homes[key] = replica_id
            self._homes.move_to_end(key)
        while len(self._homes) > REMEMBERED:
            self._homes.popitem(last=False)


def beginnings(request: PendingRequest) -> list[int]:
    """What stands for a request's beginnings, the shortest first. Those of another scope are others."""
    keys, size = [], LEAST
    for ask in request.args:
        while isinstance(ask, GenerationRequest) and size <= len(ask.prompt):
            keys.append(hash((ask.scope, *ask.prompt[:size])))
            size *= 2
    return keys
