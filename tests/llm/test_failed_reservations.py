"""A batch whose second row gets no KV gives back the pages of its first row."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.tiny_llm import ids, llm
from triforce.errors import CacheError
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache.pool import PagePool


@pytest.mark.parametrize("mode", ["ar", "triforce"])
def test_failed_reservation_gives_back_pages(pair: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llm(pair, mode=mode)
    engine = model.open(rows=4, kv_tokens=512)
    pool = engine.core.store.pool
    engine.submit([request := model.request(ids(40), SamplingParams(max_tokens=4))])
    while engine.busy:
        engine.step()
    assert request.done
    free_pages = pool.free_pages
    references = list(pool.allocator.refcounts)
    reserve = PagePool.reserve

    def fail_at_second_row(self: PagePool, b: int, tokens: int) -> None:
        if b == 1:
            raise CacheError("the disk is full")
        reserve(self, b, tokens)

    monkeypatch.setattr(PagePool, "reserve", fail_at_second_row)
    engine.submit([model.request(ids(40), SamplingParams(max_tokens=4, n=2))])
    errors = [event for _, event in engine.step() if isinstance(event, CacheError)]
    assert errors and not engine.busy
    assert pool.free_pages == free_pages and pool.allocator.refcounts == references
    engine.close()
