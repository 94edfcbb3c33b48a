"""Chooses a replica for a request: one that has its prefix and a free row, or the least busy one."""

from __future__ import annotations

from asyncio import sleep
from collections import OrderedDict
from random import sample

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from triforce.server.engine_client import GenerationRequest

LEAST = 512
"""Tokens of the shortest prefix that counts: less is read in a moment, wherever it is."""
REMEMBERED = 1 << 16
"""Prefixes remembered; the least recently used are dropped."""


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray publishes no types
    """Remembers prefixes at lengths that double, and so finds at least half of what two prompts share."""

    def initialize_state(self) -> None:
        """Ray's constructor."""
        self._homes: OrderedDict[int, ReplicaID] = OrderedDict()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replica that has the prefix, then all. Ray takes the least busy one, and none that is full."""
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
        """Remember that this replica has the request's prefixes."""
        for key in beginnings(pending_request):
            self._homes[key] = replica_id
            self._homes.move_to_end(key)
        while len(self._homes) > REMEMBERED:
            self._homes.popitem(last=False)


def beginnings(request: PendingRequest) -> list[int]:
    """Return hashes of the request's prefixes, shortest first. Other scopes have other hashes."""
    keys, size = [], LEAST
    for generation in request.args:
        while isinstance(generation, GenerationRequest) and size <= len(generation.prompt):
            keys.append(hash((generation.scope, *generation.prompt[:size])))
            size *= 2
    return keys
