"""The law of the server: whatever one client sends, `/health`, short completions and running streams go on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest

from tests.helpers.bystanders import HEADERS, Bystanders
from tests.helpers.hostile_requests import HOSTILE, MEBIBYTES, HostileRequest
from tests.helpers.server_process import served, wait_until_idle
from tests.helpers.tiny_checkpoint import tiny_pair

TEMPLATE = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
FEW, SMALL = 6, 1 << 20


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pair = tiny_pair(tmp_path_factory.mktemp("wide"), positions=8192, chat_template=TEMPLATE)
    with served(pair) as (process, url):
        httpx.post(f"{url}/v1/completions", json={"prompt": "the cat"}, headers=HEADERS, timeout=60)
        yield url
        wait_until_idle(url)
        assert process.poll() is None


def tried(url: str, hostile: HostileRequest, size: int) -> tuple[Counter[int], dict[str, float]]:
    """Send all requests of a kind at once. Returns their statuses, 0 for those that hung up, and bystanders' waits.

    Bodies are made before: what this process does is not to be counted as the server's.
    """
    bodies = [hostile.body(number, size) for number in range(hostile.count)]
    headers = HEADERS | {"content-type": "application/json"}

    def send(body: bytes) -> int:
        try:
            return web.post(hostile.path, content=body).status_code
        except httpx.ReadTimeout:
            return 0

    limits = httpx.Limits(max_connections=hostile.count)
    with (
        httpx.Client(base_url=url, headers=headers, timeout=hostile.patience, limits=limits) as web,
        ThreadPoolExecutor(hostile.count) as several,
        Bystanders(url) as bystanders,
    ):
        statuses = Counter(several.map(send, bodies))
    return statuses, bystanders.report()


@pytest.mark.parametrize("name", HOSTILE)
def test_bystanders_wait_briefly_beside_hostile_requests(url: str, name: str) -> None:
    """The bounds are far from what is measured, as other work may be going on here, and far below what came before."""
    few = replace(HOSTILE[name], count=min(HOSTILE[name].count, FEW), patience=min(HOSTILE[name].patience, 2.0))
    statuses, waits = tried(url, few, SMALL)
    assert set(statuses) <= {*few.statuses, 0}
    assert waits["median"] < 0.5 and waits["health"] < 3 and waits["gap"] < 3 and waits["completion"] < 6, waits


@pytest.fixture(scope="module")
def quiet(url: str) -> dict[str, float]:
    """Waits beside nobody: what the machine does besides."""
    with Bystanders(url) as bystanders:
        time.sleep(20)
    return bystanders.report()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", HOSTILE)
def test_law_of_bystanders_holds_for_largest_requests(url: str, quiet: dict[str, float], name: str) -> None:
    statuses, waits = tried(url, HOSTILE[name], MEBIBYTES << 20)
    assert set(statuses) <= {*HOSTILE[name].statuses, *([0] if HOSTILE[name].patience < 10 else [])}
    beyond = {kind: waits[kind] - quiet[kind] for kind in waits}
    assert beyond["health"] < 0.2 and beyond["gap"] < 1 and beyond["completion"] < 1, (waits, quiet)
