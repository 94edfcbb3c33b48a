"""Environment variables that Ray reads when it is first imported; so nothing of Ray is imported here."""

from __future__ import annotations

import os
import secrets


def prepare(address: str | None) -> None:
    """Set variables for a Ray at `address`, or for one of our own: on loopback only, and with a token."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would tell its makers of every start
    # How busy a replica is counts as known for so long. Nobody else sends to ours, so what is counted here stays true.
    os.environ["RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S"] = "1e9"
    if address is None:
        # Whatever it says, it works on Linux: nodes are then known as 127.0.0.1, and nothing listens elsewhere.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        # Other users of this machine reach loopback, too, and who reaches Ray may run anything. Children inherit it.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
