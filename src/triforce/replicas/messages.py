"""Messages of a replica about a request."""

from __future__ import annotations

from dataclasses import dataclass

from triforce.server.engine_client import Event


@dataclass(frozen=True, slots=True)
class ReplicaMessage:
    """A message about a request; the first says only that it has arrived. Foreseen errors are sent, not raised."""

    replica: str
    kv_tokens: int
    """Tokens whose K and V the replica holds."""
    event: Event | Exception | None = None
    waited: float = 0.0
    """Seconds in the replica's own queue."""
