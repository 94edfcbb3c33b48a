"""The law of the server: whatever one client sends, `/health`, short completions and running streams go on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest

from tests.helpers.bystanders import HEADERS, Bystanders
from tests.helpers.hostile_requests import HOSTILE, MEBIBYTES, HostileRequest
from tests.helpers.server_process import served, wait_until_idle
from tests.helpers.tiny_checkpoint import tiny_pair

TEMPLATE = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
FEW = 6
SMALL = 1 << 20
FEW_GROUPS = 4
"""Requests of each kind that are sent together for a small load."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pair = tiny_pair(tmp_path_factory.mktemp("wide"), positions=8192, chat_template=TEMPLATE)
    with served(pair) as (process, url):
        httpx.post(f"{url}/v1/completions", json={"prompt": "the cat"}, headers=HEADERS, timeout=60)
        yield url
        wait_until_idle(url)
        assert process.poll() is None


def sent_together(
    url: str, hostiles: Mapping[str, HostileRequest], size: int
) -> tuple[dict[str, Counter[int]], dict[str, float]]:
    """Send all requests of some kinds at once. Returns their statuses by kind, 0 for a connection
    that was closed, and bystanders' waits.

    Bodies are made before: what this process does is not to be counted as the server's.
    """
    bodies = [
        (name, hostile.body(number, size)) for name, hostile in hostiles.items() for number in range(hostile.count)
    ]
    headers = HEADERS | {"content-type": "application/json"}

    def send(request: tuple[str, bytes]) -> int:
        name, body = request
        try:
            return web.post(hostiles[name].path, content=body, timeout=hostiles[name].patience).status_code
        except httpx.ReadTimeout:
            return 0

    limits = httpx.Limits(max_connections=len(bodies))
    with (
        httpx.Client(base_url=url, headers=headers, limits=limits) as web,
        ThreadPoolExecutor(len(bodies)) as several,
        Bystanders(url) as bystanders,
    ):
        statuses = list(several.map(send, bodies))
    by_kind = {name: Counter[int]() for name in hostiles}
    for (name, _), status in zip(bodies, statuses, strict=True):
        by_kind[name][status] += 1
    return by_kind, bystanders.report()


@pytest.mark.parametrize("kinds", [list(HOSTILE)[begin::FEW_GROUPS] for begin in range(FEW_GROUPS)], ids=", ".join)
def test_bystanders_wait_briefly_beside_hostile_requests(url: str, kinds: list[str]) -> None:
    """Hostile requests of all kinds are sent together, which is harder than one kind after the other.

    The bounds are far from what is measured, as other work may be going on here, and far below what came before.
    """
    few_requests = {
        name: replace(HOSTILE[name], count=min(HOSTILE[name].count, FEW), patience=min(HOSTILE[name].patience, 2.0))
        for name in kinds
    }
    statuses, waits = sent_together(url, few_requests, SMALL)
    for name, kind in few_requests.items():
        assert set(statuses[name]) <= {*kind.statuses, 0}, name
    assert waits["median"] < 0.5 and waits["health"] < 3 and waits["gap"] < 3 and waits["completion"] < 6, waits


@pytest.fixture(scope="module")
def quiet(url: str) -> dict[str, float]:
    """Return waits without hostile requests: noise of the machine."""
    with Bystanders(url) as bystanders:
        time.sleep(20)
    return bystanders.report()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", HOSTILE)
def test_law_of_bystanders_holds_for_largest_requests(url: str, quiet: dict[str, float], name: str) -> None:
    statuses, waits = sent_together(url, {name: HOSTILE[name]}, MEBIBYTES << 20)
    assert set(statuses[name]) <= {*HOSTILE[name].statuses, *([0] if HOSTILE[name].patience < 10 else [])}
    beyond = {kind: waits[kind] - quiet[kind] for kind in waits}
    assert beyond["health"] < 0.2 and beyond["gap"] < 1 and beyond["completion"] < 1, (waits, quiet)
