"""Limits on requests and connections."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

from triforce.engine import MAX_ITL, MOST_ROWS
from triforce.errors import RequestError
from triforce.interface.sampling_params import MOST_LOGPROBS
from triforce.server.request_base import MOST_PROMPTS

COMPLETION_TOKENS = 16
"""New tokens of a completion if the request does not say: OpenAI's default."""
ANSWER_TOKENS = 2048
"""New tokens of a chat's or a response's answer if the request does not say."""
LEAST_KV = 65_536
"""Tokens of KV that there is room for by default, however short the model's context."""
APART = 2**18
"""Bytes of a body, and characters of a text, that are parsed and tokenized at once; longer ones take turns."""
MOST_CONTAINERS, MOST_VALUES = 10_000, 500_000
"""Objects and arrays, and values of any kind, in a body that is longer than that."""
MOST_MESSAGES, MOST_PARTS, MOST_CALLS = 4096, 1024, 128
"""Messages, or items of input; parts of a message; calls of tools in one message."""
MOST_ECHOED = 2**18
"""Log-probabilities that an echo tells of its prompts and choices, alternatives among them."""
CONNECTIONS = 1024
"""Connections open at a time by default, where the process may have so many descriptors."""


def connection_limit(requested_connections: int | None) -> int:
    """Return how many connections may be open: three quarters of the descriptors that this process may have hold them.

    The rest is for models, KV files and what the process talks through. Raises RequestError if more are wanted.
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
    """Bounds of the server. A request beyond one is refused with a text that names it."""

    connections: int = CONNECTIONS
    """Connections open at a time."""
    connections_per_address: int | None = None
    """Connections from one address; None: half of all."""
    header_seconds: float = 10.0
    """Seconds to receive a request's headers, from when the connection is idle."""
    stall_seconds: float = 60.0
    """Seconds in which a client may read nothing of what was sent."""
    body_bytes: int = 16 * 2**20
    body_seconds: float = 60.0
    """Seconds to receive a body."""
    seconds: float = 600.0
    """Seconds from the body to the last token, waiting included."""
    waiting: int = 64
    """Prompts in the queue, not counting as many as there are rows."""
    rows: int = MOST_ROWS
    """Sequences decoded at a time."""
    max_itl: float = MAX_ITL
    """Inter-token latency in seconds, up to which prompts are read between two steps of texts."""
    grammars: int = 32
    """Grammars of one key that are compiled or wait for that."""
    prompts: int = MOST_PROMPTS
    """Prompts of one request."""
    kv_tokens: int | None = None
    """Tokens of KV that there is room for, and so what one prompt's rows may need; None: see `room`."""
    n: int = 16
    logprobs: int = MOST_LOGPROBS
    stop_characters: int = 1000
    characters_per_token: int = 32
    """A text longer than the context times this is refused before it is cut into tokens."""

    @property
    def connections_of_one_address(self) -> int:
        return self.connections_per_address or max(1, self.connections // 2)

    def room(self, context: int) -> int:
        """Tokens of KV that there is room for, with a model of such a context."""
        return self.kv_tokens or max(context, LEAST_KV)

    def __post_init__(self) -> None:
        """Raise RequestError for a bound that nothing fits in."""
        positive = ("kv_tokens", "connections_per_address", "body_bytes", "seconds", "max_itl", "rows", "connections")
        values = {name: getattr(self, name) for name in positive} | {"waiting": self.waiting + 1}
        if wrong := [name for name, value in values.items() if value is not None and not value > 0]:
            raise RequestError(
                f"the limit {wrong[0]} of the server is {getattr(self, wrong[0])}; give a positive number"
            )
