"""Where recorded figures come from: rows say it, the history of their files agrees, and commands write it."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch

from tests.helpers import recorded_files
from tests.helpers.provenance_rules import LAST_WITHOUT, RecordedFile
from tests.helpers.recorded_files import ROOT, History
from triforce.bench import results_file
from triforce.bench.results_file import ResultsFile
from triforce.cli.bench.setup import about

RESULTS = "benchmarks/results"
FALSE = "1a0008f8"
"""The commit in which rows of another commit stood under a new one."""

with_history = pytest.mark.skipif(bool(why := recorded_files.lacking(LAST_WITHOUT)), reason=str(why))


@cache
def recorded() -> tuple[History, dict[str, dict[str, Any]]]:
    """The history, and the versions of all results by file and commit."""
    texts = recorded_files.versions(RESULTS)
    return History.read(), {
        path: {commit: json.loads(text) for commit, text in commit_texts.items()}
        for path, commit_texts in texts.items()
    }


def file_at(name: str, commit: str) -> RecordedFile:
    """A file as it was recorded by a commit, behind its earlier versions."""
    history, versions = recorded()
    earlier_commits = history.before(commit) - {commit}
    earlier = {
        ancestor: report for ancestor, report in versions[f"{RESULTS}/{name}"].items() if ancestor in earlier_commits
    }
    return RecordedFile(versions[f"{RESULTS}/{name}"][commit], earlier, history)


@with_history
@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / RESULTS).glob("*.json")))
def test_results_agree_with_their_history(name: str) -> None:
    history, versions = recorded()
    report = json.loads((ROOT / RESULTS / name).read_text(encoding="utf-8"))
    assert not RecordedFile(report, versions.get(f"{RESULTS}/{name}", {}), history).faults()


@with_history
@pytest.mark.parametrize(("name", "numbers"), [
    ("gpu_a.json", {"full pass": "0.02270527935028076", "full pass, width 8": "0.022964447975158692",
                    "retrieval pass": "0.005210208177566528", "draft pass": "0.0001353600025177002"}),
    ("gpu_e.json", {"triforce, 1 rows, ours acceptance": "0.0076080641698109625"}),
])  # fmt: skip
def test_numbers_under_another_commit_are_found(name: str, numbers: dict[str, str]) -> None:
    faults = [fault for fault in file_at(name, FALSE).faults() if fault.startswith("(c)")]
    assert [(fault.split(": ")[0], "stood first under e6f5e933, not b1afd740" in fault) for fault in faults] == [
        (f"(c) {what}", True) for what in numbers
    ]
    assert all(number in fault for number, fault in zip(numbers.values(), faults, strict=True))


@with_history
@pytest.mark.parametrize("name", ["gpu_a.json", "gpu_e.json"])
def test_mended_rows_must_say_so(name: str) -> None:
    history, versions = recorded()
    report = json.loads((ROOT / RESULTS / name).read_text(encoding="utf-8"))
    silent = [{key: value for key, value in row.items() if key != "mended"} for row in report]
    faults_found = RecordedFile(silent, versions[f"{RESULTS}/{name}"], history).faults()
    assert faults_found and all(f"stands under b1afd740 in {FALSE}" in fault for fault in faults_found)


GOOD = {"command": "python -m benchmarks.gpu a", "machine": "this", "level": "sm_90", "commit": "cccccccc", "bench": 2}
TIMES = {"what": "full pass", "seconds": 0.0123456789}


FILES = {
    "benchmarks/gpu.py": "",
    "benchmarks/compare/command.py": "",
    "src/triforce/bench/results_file.py": '"""Docs."""\n\nVERSION: int = 2\n"""."""\n',
}


class MadeHistory(History):
    """Four commits in a row; the third one has the bench and its version."""

    def __init__(self) -> None:
        names = ["dddddddd", "cccccccc", LAST_WITHOUT, "aaaaaaaa"]
        super().__init__({name: names[n + 1 : n + 2] for n, name in enumerate(names)})

    def _text(self, commit: str, path: str) -> str | None:
        return FILES.get(path) if commit == "cccccccc" else None


def faults(row: dict[str, Any], **earlier: dict[str, Any]) -> str:
    """Return the first fault of a row behind earlier versions of it, or an empty text."""
    versions = {commit.strip("_"): [version] for commit, version in earlier.items()}
    return "; ".join(RecordedFile([row], versions, MadeHistory()).faults())


def test_new_row_with_all_fields_passes() -> None:
    assert faults(TIMES | GOOD) == "" == faults(TIMES | GOOD, dddddddd=TIMES | GOOD)
    assert faults(TIMES | GOOD | {"command": "triforce bench compare smollm2"}) == "", "whose module is in the checkout"
    assert faults(TIMES | GOOD | {"commit": "aaaaaaaa+"}) == "", "of a tree that differs from it"
    assert faults({"what": "text", "right": 0.123456789} | GOOD) == "", "where no time was measured"


@pytest.mark.parametrize("name", results_file.FIELDS)
def test_new_row_without_a_field_is_refused(name: str) -> None:
    row = TIMES | {key: value for key, value in GOOD.items() if key != name}
    assert faults(row).startswith(f"(a) full pass: it has no {name}")
    assert faults(row | {name: None}).startswith(f"(a) full pass: it has no {name}")


def test_old_row_must_stand_in_its_history() -> None:
    old = TIMES | {"command": "python -m benchmarks.gpu a"}
    mark = {"recorded_in": LAST_WITHOUT}
    old_versions = {f"_{LAST_WITHOUT}": old}
    assert faults(old | mark, **old_versions) == ""
    assert faults(old | mark | {"seconds": 0.0123456788}, **old_versions).startswith("(a) full pass: it does not stand")
    assert faults(old | {"recorded_in": "dddddddd"}, dddddddd=old).startswith("(a) full pass: it does not stand")
    assert faults(old | GOOD | {"bench": "old bench"}).startswith("(a) full pass: no old bench made it")


def test_commit_that_cannot_have_made_a_row_is_refused() -> None:
    assert "(b) full pass: eeeeeeee did not lead to dddddddd" in faults(TIMES | GOOD | {"commit": "eeeeeeee"})
    late_faults = faults(TIMES | GOOD, aaaaaaaa=TIMES)
    assert late_faults == "(b) full pass: cccccccc did not lead to aaaaaaaa, which recorded it"
    lacking = faults(TIMES | GOOD | {"commit": "dddddddd"})
    assert lacking == "(b) full pass: dddddddd lacks the bench of `python -m benchmarks.gpu a`"
    assert faults(TIMES | GOOD | {"command": "a script"}) == "(b) full pass: cccccccc lacks the bench of `a script`"
    assert faults(TIMES | GOOD | {"bench": 3}) == "(b) full pass: cccccccc lacks version 3 of the benches"


def test_number_under_two_commits_is_refused() -> None:
    again = TIMES | GOOD | {"commit": "dddddddd+"}
    mended_note = {"mended": "dddddddd had it under dddddddd+"}
    first_fault = "0.0123456789 stood first under cccccccc, not dddddddd+"
    for row in (again, again | mended_note):  # the first one is right
        assert f"(c) full pass: {first_fault}" in faults(row, cccccccc=TIMES | GOOD)
    versions = {"cccccccc": TIMES | GOOD, "dddddddd": again}
    assert faults(TIMES | GOOD, **versions) == "(c) full pass: 0.0123456789 stands under dddddddd+ in dddddddd"
    assert faults(TIMES | GOOD | mended_note, **versions) == ""
    both_faults = RecordedFile([TIMES | GOOD, again | {"what": "width 8"}], {}, MadeHistory()).faults()
    assert both_faults == [f"(c) width 8: {first_fault}"]


def test_figures_of_a_command_say_where_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    origin = about("triforce bench speed")
    assert list(origin) == ["command", *results_file.FIELDS] and origin["command"] == "triforce bench speed"
    assert f"kernels {origin['level']}" in origin["machine"] and origin["bench"] == results_file.VERSION
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    on_gpu = results_file.provenance("cuda:1")
    assert on_gpu | {"command": origin["command"]} == origin | {"machine": "GPU cuda:1", "level": "sm_90"}


@pytest.mark.skipif(which("git") is None, reason="there is no git here")
def test_commit_is_that_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit has a plus if measured code differs from it; results and documents do not count."""
    tmp_path = tmp_path.resolve()
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)  # a hook's, say: they name another checkout
    monkeypatch.setattr(results_file, "ROOT", tmp_path)
    assert commit() is None, "no checkout"
    monkeypatch.setattr(recorded_files, "ROOT", tmp_path)
    for folder in ("src", "docs", "benchmarks/results"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "src" / "code.py").write_text("1")
    recorded_files.git("init", "-q")
    assert commit() is None, "no commit"
    recorded_files.git("add", "src")
    settings = "user.name=a", "user.email=a@b", "commit.gpgsign=false"
    recorded_files.git(*(part for setting in settings for part in ("-c", setting)), "commit", "-qm", "one")
    head = recorded_files.git("rev-parse", "HEAD").decode()[:8]
    for path in ("docs/page.md", "benchmarks/results/speed.json"):
        (tmp_path / path).write_text("{}")
    assert commit() == head
    (tmp_path / "src" / "more.py").write_text("")
    assert commit() == f"{head}+"
    (tmp_path / "src" / "more.py").unlink()
    (tmp_path / "src" / "code.py").write_text("2")
    assert commit() == f"{head}+"
    monkeypatch.setattr(results_file, "ROOT", tmp_path / "src")
    assert commit() is None, "a folder within a checkout of something else"


def commit() -> str | None:
    results_file.commit.cache_clear()
    try:
        return results_file.commit()
    finally:
        results_file.commit.cache_clear()


def test_rows_before_a_cut_off_keep_their_source(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    row = {"cell": "a", "seconds": 1.0}
    new_head = {"model": "m"} | GOOD
    for head, kept_source in (
        (new_head, {}),
        (new_head | {"commit": "aaaaaaaa", "level": "sm_80"}, {"commit": "aaaaaaaa", "level": "sm_80"}),
        ({"model": "m", "recorded_in": "aaaaaaaa"}, {**dict.fromkeys(results_file.FIELDS), "recorded_in": "aaaaaaaa"}),
    ):
        file.write_text(json.dumps(head | {"rows": [row]}))
        results = ResultsFile(file, new_head, ["model"])
        results.add([{"cell": "b"}])
        assert json.loads(file.read_text()) == new_head | {"rows": [row | kept_source, {"cell": "b"}]}
        assert ResultsFile(file, new_head | {"commit": "dddddddd"}, ["model"]).rows[0].get("commit", "none") == (
            kept_source.get("commit", "cccccccc")
        ), "what a row says of itself stays"
