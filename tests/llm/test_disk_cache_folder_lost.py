"""Answers go on, and later start from disk again, if the disk cache's folder is deleted, locked or forged."""

from __future__ import annotations

import json
import shutil
from hashlib import blake2b
from pathlib import Path

import pytest

from tests.helpers.disk_llm import PROMPT, WHOLE, answer, started
from tests.helpers.tiny_llm import llm
from triforce.disk_cache import folder as folder_module
from triforce.disk_cache.folder import take_lock


def test_answers_behind_a_deleted_folder_cost_one_warning(
    disk_pair: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = started(disk_pair, cache)
    expected = answer(model, PROMPT).outputs[0].token_ids
    shutil.rmtree(cache)
    for _ in range(3):
        assert answer(model, PROMPT).outputs[0].token_ids == expected
    assert len(caplog.records) == 1 and "was deleted, and is made anew" in caplog.text
    assert answer(started(disk_pair, cache), PROMPT).cached_tokens == WHOLE


def test_answers_beside_a_lock_start_from_disk(
    disk_pair: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folder_module, "LOCK_SECONDS", 0.05)
    answer(started(disk_pair, cache), PROMPT)
    with open(cache / "state", "r+b") as state:
        assert take_lock(state.fileno(), 0)
        model = started(disk_pair, cache)
        assert [answer(model, PROMPT).cached_tokens for _ in range(2)] == [WHOLE] * 2
    assert len(caplog.records) == 1 and "is locked by another process" in caplog.text


@pytest.mark.parametrize("recorded_cost", [None, "soon", "nan", "-inf", "9" * 400])
def test_cost_that_is_none_costs_no_answer(disk_pair: Path, cache: Path, recorded_cost: str | None) -> None:
    """The entries' checksums hold; only the recorded cost is wrong."""
    answer(started(disk_pair, cache), PROMPT, "ar")
    for file in cache.glob("*.kv"):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header["__metadata__"].pop("seconds_per_token", None)
        if recorded_cost:
            header["__metadata__"]["seconds_per_token"] = recorded_cost
        text = json.dumps(header).encode()
        body = len(text).to_bytes(8, "little") + text + data[8 + length : -32]
        file.write_bytes(body + blake2b(body, digest_size=32).digest())
    output = answer(started(disk_pair, cache), PROMPT, "ar")
    assert output.outputs[0].token_ids == answer(llm(disk_pair), PROMPT, "ar").outputs[0].token_ids
