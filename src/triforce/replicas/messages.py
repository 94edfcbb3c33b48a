"""What a replica says of a request."""

from __future__ import annotations

from dataclasses import dataclass

from triforce.server.engine_client import Event


@dataclass(frozen=True, slots=True)
class ReplicaMessage:
    """The first one says only that the request has arrived. An error that was foreseen is said, and not raised."""

    replica: str
    kv_tokens: int
    """Tokens whose K and V the replica holds."""
    event: Event | Exception | None = None
    waited: float = 0.0
    """Seconds in the replica's own queue."""
