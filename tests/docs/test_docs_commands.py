"""Shell blocks of pages run, except those that need what a test does not have."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import pytest

from tests.helpers import page_shell, pages
from tests.helpers.pages import MARKS, ROOT, RUN_AS_SERVER, RUN_SLOWLY, Block

PAGES = {
    page.relative_to(ROOT).as_posix(): list(pages.blocks(page.read_text(encoding="utf-8"))) for page in pages.pages()
}
SHELL = {name: [block for block in blocks if page_shell.runs_in_shell(block)] for name, blocks in PAGES.items()}
QUICK = [name for name, blocks in SHELL.items() if any(block.mark != RUN_SLOWLY for block in blocks)]
SLOW = [name for name, blocks in SHELL.items() if any(block.mark == RUN_SLOWLY for block in blocks)]

NOT_RUN = {
    "a model that is not shipped": r"\bsmollm2\b|path/to/|\bDRAFT\b",
    "installation, or targets of make that run these tests or more": r"pip install|^make ",
    "packages that are not installed": "--replicas",
    "many minutes, or hours": r"--minutes|bench (speed|lossless)",
    "a port that other machines reach": r"--host 0\.0\.0\.0",
    "an operator's tools, or a service that runs": r"\b(sudo|podman|journalctl|openssl)\b|until curl",
    "a GPU": r"doctor --gpu|benchmarks\.gpu",
}
"""Reasons why a shell block has no mark, with the pattern of commands that have the reason."""


def without_curl(blocks: list[Block]) -> bool:
    return shutil.which("curl") is None and any("curl" in block.code for block in blocks)


def reasons(block: Block) -> list[str]:
    return [reason for reason, pattern in NOT_RUN.items() if re.search(pattern, block.code, re.MULTILINE)]


@pytest.mark.parametrize("name", QUICK)
def test_commands_of_page_run(name: str, tmp_path: Path) -> None:
    if without_curl(SHELL[name]):
        pytest.skip("there is no curl here")
    page_shell.run_page(SHELL[name], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SLOW)
def test_slow_commands_of_page_run(name: str, tmp_path: Path) -> None:
    page_shell.run_page(SHELL[name], tmp_path, slow=True)


def test_marks_of_pages_are_known() -> None:
    marked = {f"{name}:{block.line}": block.mark for name, blocks in PAGES.items() for block in blocks if block.mark}
    assert {where: mark for where, mark in marked.items() if mark not in MARKS} == {}
    assert sum(map(len, SHELL.values())) >= 20 and len(QUICK) >= 6


def test_unmarked_shell_blocks_have_reasons() -> None:
    unmarked = {
        f"{name}:{block.line}": reasons(block)
        for name, blocks in PAGES.items()
        for block in blocks
        if block.language == "sh" and not block.mark
    }
    assert [where for where, found in unmarked.items() if not found] == [], "mark these, or name what they need"
    used = {reason for found in unmarked.values() for reason in found}
    assert used == NOT_RUN.keys()


def run(page: str, folder: Path, slow: bool = False) -> None:
    page_shell.run_page(list(pages.blocks(page)), folder, slow)


def sh(code: str, mark: str = "run") -> str:
    return f"<!-- {mark} -->\n```sh\n{code}\n```\n"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("false", "exit code 1"),
        ("false\ntrue", "exit code 1"),
        ("false | true", "exit code 1"),
        ("echo $UNKNOWN_NAME", "UNKNOWN_NAME"),
        (".venv/bin/triforce generate --nothing", "exit code 2"),
        (".venv/bin/triforce generate nowhere/at-all Hello", "exit code [12]"),
        ("curl http://127.0.0.1:8000/health", "no server runs"),
    ],
)
def test_failing_command_of_page_is_found(code: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=message):
        run(sh("true") + sh(code), tmp_path)


def test_long_command_of_page_is_ended(tmp_path: Path) -> None:
    begin = time.monotonic()
    with page_shell.page_shell(tmp_path) as shell, pytest.raises(AssertionError, match=r"none after 0\.5 s"):
        shell.run("sleep 120 & sleep 120", seconds=0.5)
    assert time.monotonic() - begin < 60


def test_blocks_of_page_share_files_and_leave_the_users_alone(tmp_path: Path) -> None:
    run(sh("echo one > ~/made.txt\nsleep 120 &") + sh("false", "run slowly") + sh("grep one made.txt"), tmp_path)
    assert (tmp_path / "made.txt").read_text() == "one\n"
    with page_shell.page_shell(tmp_path / "second") as shell:
        assert shell.run("echo $XDG_CACHE_HOME; test -e README.md").strip() == os.environ["XDG_CACHE_HOME"]


def test_slow_blocks_of_page_run_where_asked(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="exit code 1"):
        run(sh("false", "run slowly"), tmp_path, slow=True)


PYTHON = """<!-- run -->
```python
from pathlib import Path
from urllib.request import urlopen

Path("health.json").write_bytes(urlopen("http://127.0.0.1:8000/health").read())
```
"""


def test_server_of_page_answers_its_requests(tmp_path: Path) -> None:
    """An HTTP error fails, and the blocks before it have had their answers."""
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    server = sh(".venv/bin/triforce serve", RUN_AS_SERVER)
    asked = sh("curl http://127.0.0.1:8000/health > by_curl.json")
    with pytest.raises(AssertionError, match=r"v1/nothing(.|\n)*404"):
        run(server + asked + PYTHON + sh("curl http://localhost:8000/v1/nothing"), tmp_path)
    assert (tmp_path / "by_curl.json").read_text() == (tmp_path / "health.json").read_text() != ""


def test_server_of_page_that_does_not_start_is_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"no server(.|\n)*--nothing"):
        run(sh(".venv/bin/triforce serve --nothing", RUN_AS_SERVER), tmp_path)


def test_python_block_with_address_of_server_runs_in_shell() -> None:
    python, other, mistyped = pages.blocks(
        '<!-- run -->\n```python\nurl = "http://127.0.0.1:8000/v1"\n```\n'
        "<!-- run -->\n```python\nprint(1)\n```\n<!-- run soon -->\n```sh\ntrue\n```\n"
    )
    assert page_shell.runs_in_shell(python) and not page_shell.runs_in_shell(other)
    assert mistyped.mark not in MARKS and (python.line, other.line) == (2, 6)
