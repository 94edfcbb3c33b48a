"""A trial runs once for the same bytes, and again if it has failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from triforce.checkpoint import passed_trials
from triforce.checkpoint.passed_trials import require_pass
from triforce.sandbox import TrialError, TrialLimits


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    tasks: list[str] = []

    def tried(function: str, task: str, limits: TrialLimits) -> None:
        tasks.append(task)
        if task == "bad":
            raise TrialError("bad")

    monkeypatch.setattr(passed_trials, "run_trial", tried)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tasks


def test_passed_bytes_are_not_tried_again(calls: list[str]) -> None:
    for sha256, function in (("a", "m:f"), ("a", "m:f"), ("b", "m:f"), ("a", "m:g"), ("a", "m:g")):
        require_pass(function, f"{function} {sha256}", sha256, ("torch",), TrialLimits())
    assert calls == ["m:f a", "m:f b", "m:g a"]


def test_failed_bytes_are_tried_again(calls: list[str]) -> None:
    for _ in range(2):
        with pytest.raises(TrialError):
            require_pass("m:f", "bad", "c", (), TrialLimits())
    assert calls == ["bad", "bad"]


def test_folder_that_cannot_be_written_changes_nothing(
    calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "triforce").write_text("in the way")
    for _ in range(2):
        require_pass("m:f", "good", "d", (), TrialLimits())
    assert calls == ["good", "good"]
