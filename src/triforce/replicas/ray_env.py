"""Environment variables of Ray. Ray reads them at its first import, so this module imports nothing of Ray."""

from __future__ import annotations

import os
import secrets


def prepare(address: str | None) -> None:
    """Set variables for the Ray at `address`; None is a local one, on loopback only and with a token."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # by default Ray reports every start to its makers
    # Lifetime of cached queue lengths. Only this process sends to the replicas, so its counts stay exact.
    os.environ["RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S"] = "1e9"
    if address is None:
        # Despite its name this variable works on Linux: nodes are known as 127.0.0.1, and nothing listens elsewhere.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        # Other users of this machine reach loopback, too, and Ray runs any code. Children inherit the token.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
