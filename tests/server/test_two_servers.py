"""Two live servers on one disk cache: each takes what the other has read, and both keep its size."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.cache_folders import store_in
from tests.helpers.server_process import KEY, served

SIZE = 2 << 20
DOCUMENTS = [f"{number} days before that " + "it was the worst of times, it was the best. " * 26 for number in range(8)]


def completion_of(url: str, prompt: str, **fields: Any) -> tuple[str, int]:
    """Return the text that follows a prompt, and the count of cached prompt tokens."""
    body = {"prompt": prompt, "max_tokens": 8, "seed": 3, "ignore_eos": True} | fields
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=120)
    answer_json = answer.raise_for_status().json()
    return answer_json["choices"][0]["text"], answer_json["usage"]["prompt_tokens_details"]["cached_tokens"]


def settled(cache: Path) -> None:
    """Wait until entries are there, and no more of them come."""
    count = 0
    until = time.monotonic() + 60
    while not count or count != len(list(cache.glob("*.kv"))):
        assert time.monotonic() < until
        count = len(list(cache.glob("*.kv")))
        time.sleep(0.5)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared") / "cache"


@pytest.fixture
def urls(pair: Path, cache: Path) -> Iterator[list[str]]:
    cache_options = ["--disk-cache", str(cache), "--disk-cache-size", str(SIZE)]
    with served(pair, *cache_options) as (_, first_url), served(pair, *cache_options) as (_, second_url):
        yield [first_url, second_url]


@pytest.mark.slow
def test_servers_take_what_the_other_has_read(urls: list[str], cache: Path) -> None:
    first_url, second_url = urls
    uncached = {prompt: completion_of(first_url, prompt, cache=False)[0] for prompt in DOCUMENTS}
    assert completion_of(first_url, DOCUMENTS[0]) == (uncached[DOCUMENTS[0]], 0)
    settled(cache)
    text, cached = completion_of(second_url, DOCUMENTS[0])
    assert text == uncached[DOCUMENTS[0]] and cached >= 512
    with ThreadPoolExecutor(4) as pool:  # more than there is room for, both at a time
        asked = [(url, prompt) for prompt in DOCUMENTS * 3 for url in urls]
        texts = list(pool.map(lambda request: completion_of(*request)[0], asked))
    assert texts == [uncached[prompt] for _, prompt in asked]
    settled(cache)
    store = store_in(cache)
    entries = store.entries()
    assert 0 < sum(entry.bytes for entry in entries) <= SIZE
    assert not [fault for entry in entries if (fault := store.fault(entry.name))]
