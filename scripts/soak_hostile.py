"""A client of a soak that sends what would stop all others of a server that works on it in their way."""

from __future__ import annotations

import random

import httpx

from tests.helpers.hostile_requests import HOSTILE

JSON = {"content-type": "application/json"}
BYTES = 400_000
"""Of a body: more than is parsed at once, less than the server of a soak takes."""


async def hostile(web: httpx.AsyncClient, chance: random.Random) -> int:
    """Send one request of any kind. Returns its status: 599 for one that the law does not know, 0 if it hung up."""
    kind = HOSTILE[chance.choice(list(HOSTILE))]
    body = kind.body(chance.randrange(1000), BYTES)
    answer = await web.post(kind.path, content=body, headers=JSON, timeout=kind.patience)
    return answer.status_code if answer.status_code in kind.statuses else 599
