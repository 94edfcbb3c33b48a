"""A client of a soak with requests that would block all other clients if the server worked on them at once."""

from __future__ import annotations

import random

import httpx

from tests.helpers.hostile_requests import HOSTILE

JSON = {"content-type": "application/json"}
BYTES = 400_000
"""Size of a body: more than the server parses on its event loop, less than `--max-body` of the soak's server."""


async def hostile(web: httpx.AsyncClient, chance: random.Random) -> int:
    """Send one random hostile request. Returns the status of the answer, or 599 if the status is not an allowed one."""
    kind = HOSTILE[chance.choice(list(HOSTILE))]
    body = kind.body(chance.randrange(1000), BYTES)
    answer = await web.post(kind.path, content=body, headers=JSON, timeout=kind.patience)
    return answer.status_code if answer.status_code in kind.statuses else 599
