"""Limits on requests and connections."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

from triforce.engine import MAX_ITL, MAX_ROWS
from triforce.errors import RequestError
from triforce.interface.sampling_params import MAX_LOGPROBS
from triforce.server.request_base import MAX_PROMPTS

COMPLETION_TOKENS = 16
"""Default limit of new tokens of a completion, as in OpenAI's interface."""
ANSWER_TOKENS = 2048
"""Default limit of new tokens of a chat or a response."""
MIN_KV_TOKENS = 65_536
"""Minimum of the default KV capacity in tokens, for models with a short context."""
LARGE_INPUT = 2**18
"""Size of the largest body in bytes, or text in characters, that is read without waiting for a slot."""
MAX_CONTAINERS = 10_000
"""Maximal number of objects and arrays in a body longer than `LARGE_INPUT`."""
MAX_VALUES = 500_000
"""Maximal number of values of any kind in a body longer than `LARGE_INPUT`."""
MAX_MESSAGES = 4096
"""Maximal number of messages or input items."""
MAX_PARTS = 1024
"""Maximal number of parts of a message."""
MAX_CALLS = 128
"""Maximal number of tool calls in a message."""
MAX_ECHOED = 2**18
"""Maximal number of log-probabilities of an echo, over prompts and choices, including alternatives."""
CONNECTIONS = 1024
"""Default limit of open connections, where the process may have enough descriptors."""


def connection_limit(requested_connections: int | None) -> int:
    """Return the limit of open connections: at most three quarters of the descriptors that this process may have.

    The rest is for models, KV files and the process's own pipes and sockets. Raises RequestError for a larger request.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_connections = sys.maxsize if descriptors == resource.RLIM_INFINITY else descriptors * 3 // 4
    if requested_connections is None:
        return min(CONNECTIONS, max_connections)
    if requested_connections > max_connections:
        raise RequestError(
            f"--max-connections {requested_connections} needs more file descriptors than this process "
            f"may have: {descriptors}; raise that (ulimit -n), or give {max_connections} at most"
        )
    return requested_connections


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the server. A request beyond a bound gets an error that names it."""

    connections: int = CONNECTIONS
    """Connections open at a time."""
    connections_per_address: int | None = None
    """Connections from one address; None: half of `connections`."""
    header_seconds: float = 10.0
    """Seconds to receive a request's headers, from the start of the connection or the end of the last answer."""
    stall_seconds: float = 60.0
    """Seconds after which a client that reads nothing is disconnected."""
    body_bytes: int = 16 * 2**20
    body_seconds: float = 60.0
    """Seconds to receive a body."""
    seconds: float = 600.0
    """Seconds in the queue, between two pieces of a stream, and from the first to the last token of a whole answer."""
    waiting: int = 64
    """Prompts that may wait in the queue. Prompts in rows are not counted."""
    rows: int = MAX_ROWS
    """Sequences decoded at a time."""
    max_itl: float = MAX_ITL
    """Limit of the inter-token latency in seconds, while prompts of other requests are prefilled."""
    grammars: int = 32
    """Grammars of one key that are being compiled, or wait for it."""
    prompts: int = MAX_PROMPTS
    """Prompts of one request."""
    kv_tokens: int | None = None
    """KV capacity in tokens, which also bounds the rows of one prompt; None: see `kv_capacity`."""
    n: int = 16
    logprobs: int = MAX_LOGPROBS
    stop_characters: int = 1000
    characters_per_token: int = 32
    """Characters per token of the context, beyond which a text is refused before tokenization."""

    @property
    def connections_of_one_address(self) -> int:
        return self.connections_per_address or max(1, self.connections // 2)

    def kv_capacity(self, context: int) -> int:
        """Return the KV capacity in tokens for a model with this context."""
        return self.kv_tokens or max(context, MIN_KV_TOKENS)

    def __post_init__(self) -> None:
        """Raise RequestError for a bound that is not positive."""
        positive = (
            "kv_tokens",
            "connections_per_address",
            "body_bytes",
            "seconds",
            "max_itl",
            "rows",
            "connections",
        )
        values = {name: getattr(self, name) for name in positive} | {"waiting": self.waiting + 1}
        if invalid := [name for name, value in values.items() if value is not None and not value > 0]:
            raise RequestError(
                f"the limit {invalid[0]} of the server is {getattr(self, invalid[0])}; give a positive number"
            )
