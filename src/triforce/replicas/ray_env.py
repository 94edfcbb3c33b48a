"""What Ray reads from the environment. It does when it is first imported, so this imports nothing of it."""

from __future__ import annotations

import os
import secrets


def prepare(address: str | None) -> None:
    """For a Ray at `address`, or one that is started for this process alone: on loopback only, and behind a token."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would tell its makers of every start
    # How busy a replica is counts as known for so long. Nobody else sends to ours, so what is counted here stays true.
    os.environ["RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S"] = "1e9"
    if address is None:
        # Whatever it says, it works on Linux: nodes are then known as 127.0.0.1, and nothing listens elsewhere.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        # Other users of this machine reach loopback, too, and who reaches Ray may run anything. Children inherit it.
        os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", secrets.token_hex(32)
