"""Exit codes under every command, with streams that are closed, full or without a reader, and disks that are full.

What is told here stands in docs/reference/errors.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.broken_streams import Came
from tests.helpers.tiny_training import target_folder, text
from triforce.disk_cache.folder import CacheFolder

ROOT = Path(__file__).parents[2]
REQUEST = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"prompt": "the cat", "max_tokens": 2, "seed": 1},
}
PLAIN = "TARGET --draft none --device cpu"
LINES = {
    "help": "generate --help",
    "version": "--version",
    "generate": f"generate {PLAIN} -p cat -n 2 --seed 1",
    "generate to be parsed": f"generate {PLAIN} -p cat -n 2 --seed 1 --json",
    "generate several": f"generate {PLAIN} -p cat -n 2 --seed 1 --n 2",
    "explain": f"explain {PLAIN} -p cat -n 2 --seed 1",
    "chat": f"chat {PLAIN} -n 2 --seed 1",
    "batch": f"batch REQUESTS {PLAIN} --name tiny -o -",
    "info": "info TARGET",
    "models": "models list",
    "cache": "cache list CACHE",
    "eval": "eval TARGET --draft none --texts TEXTS --only positions --max-context 128 -q",
    "train-draft": "train-draft TRAINED --texts TEXTS --minutes 0.001 -o draft",
    "doctor": "doctor",
    "demo": "demo",
    "bench": "bench speed",
}
"""Commands that write to stdout."""
ELSEWHERE = {
    "batch to a file": f"batch REQUESTS {PLAIN} --name tiny -o out.jsonl",
    "watch": f"watch FOLDER -m {PLAIN} --disk-cache kept --once",
}
"""Commands that write to files alone."""
TO_FILES = {
    "batch": (f"batch REQUESTS {PLAIN} --name tiny -o out.jsonl", "out.jsonl"),
    "generate": (f"generate {PLAIN} -p cat -n 2 --seed 1 --save-cache cat.kv", "cat.kv"),
    "eval": ("eval TARGET --draft none --texts TEXTS --only positions --max-context 128 -q --json figures", "figures"),
    "train-draft": ("train-draft TRAINED --texts TEXTS --minutes 0.001 -o draft", "draft"),
}
"""Commands that write a file, and its name."""
TO_DEVICE = {
    "batch": f"batch REQUESTS {PLAIN} --name tiny -o /dev/full",
    "eval": "eval TARGET --draft none --texts TEXTS --only positions --max-context 128 --json /dev/full",
    "generate": f"generate {PLAIN} -p cat -n 2 --save-cache /dev/full",
    "train-draft": "train-draft TRAINED --texts TEXTS --minutes 0.001 -o /dev/full",
}
"""Commands whose file is always full."""
STDIN = {"chat": "cat\n"}
CHANGING = ("chat", "batch", "explain", "generate to be parsed", "info", "eval")
"""Commands whose output tells times or places."""
SLOW = ("train-draft", "doctor", "demo", "bench")
"""Commands that take a minute: another one that prints stands in for them where it is all about streams."""
Run = Callable[..., Came]


@pytest.fixture(scope="module")
def places(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files and folders that words of the lines stand for."""
    folder = tmp_path_factory.mktemp("places")
    (folder / "requests.jsonl").write_text(json.dumps(REQUEST) + "\n")
    for name, words in (("texts", 9000), ("watched", 40)):
        (folder / name).mkdir()
        (folder / name / "a.txt").write_text(text(words))
    CacheFolder(folder / "cache").close()
    return {
        "TARGET": pair / "target",
        "TRAINED": target_folder(folder / "trained"),
        "REQUESTS": folder / "requests.jsonl",
        "TEXTS": folder / "texts",
        "FOLDER": folder / "watched",
        "CACHE": folder / "cache",
    }


@pytest.fixture(scope="module")
def run(places: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a line, and remembers what came of it."""
    command = [sys.executable, "-m", "tests.helpers.broken_streams"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    finished_runs: dict[str, Came] = {}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, cwd=ROOT, text=True, **pipes) as process:
        assert process.stdin and process.stdout

        def go(line: str, name: str = "", **case: Any) -> Came:
            case |= {"line": [str(places.get(word, word)) for word in line.split()], "stdin": STDIN.get(name, "")}
            case |= {"stands_in": name in SLOW}
            asked = json.dumps(case)
            if asked not in finished_runs:
                folder = str(tmp_path_factory.mktemp("case"))
                assert process.stdin and process.stdout
                process.stdin.write(json.dumps(case | {"folder": folder}) + "\n")
                process.stdin.flush()
                finished_runs[asked] = Came(*json.loads(process.stdout.readline()))
            return finished_runs[asked]

        yield go
        process.stdin.close()


@pytest.mark.parametrize("name", LINES | ELSEWHERE)
def test_command_ends_with_0(name: str, run: Run) -> None:
    assert (run_result := run((LINES | ELSEWHERE)[name], name)).code == 0, run_result.err
    assert bool(run_result.out) == (name in LINES)


@pytest.mark.parametrize("fault", ["full", "closed"])
@pytest.mark.parametrize("name", LINES)
def test_output_that_cannot_be_delivered_is_2_and_named(name: str, fault: str, run: Run) -> None:
    code, _, err = run(LINES[name], name, broken={"stdout": fault})
    assert code == 2 and err.count("triforce: error: stdout cannot be written") == 1, (code, err)
    assert "Traceback" not in err and "Exception ignored" not in err
    assert ("it is closed" if fault == "closed" else "No space left on device") in err


def test_server_that_cannot_tell_its_address_ends_in_order(pair: Path) -> None:
    """The engine is closed: otherwise native memory is reported as leaked when the interpreter ends."""
    command = [sys.executable, "-m", "triforce", "serve", str(pair / "target"), "--draft", "none", "--port", "0"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("loading ")]
    assert done.returncode == 2 and len(lines) == 1 and "stdout cannot be written" in lines[0], done.stderr


@pytest.mark.parametrize("name", LINES)
def test_reader_that_went_away_is_141_and_silent(name: str, run: Run) -> None:
    code, _, err = run(LINES[name], name, broken={"stdout": "unread"})
    assert code == 141 and "error" not in err, (code, err)


@pytest.mark.parametrize("fault", ["full", "closed", "unread"])
@pytest.mark.parametrize("name", LINES | ELSEWHERE)
def test_messages_that_cannot_be_shown_change_nothing(name: str, fault: str, run: Run) -> None:
    line = (LINES | ELSEWHERE)[name]
    code, out, _ = run(line, name, broken={"stderr": fault})
    assert code == 0 and bool(out) == (name in LINES)
    assert name in CHANGING or out == run(line, name).out


@pytest.mark.parametrize("fault", ["full", "closed", "unread"])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_stdout_that_is_not_used_may_be_anything(name: str, fault: str, run: Run) -> None:
    assert run(ELSEWHERE[name], name, broken={"stdout": fault}).code == 0


@pytest.mark.parametrize("name", LINES | ELSEWHERE)
def test_closed_stdin_is_an_empty_one(name: str, run: Run) -> None:
    """A chat without questions ends at once."""
    assert run((LINES | ELSEWHERE)[name], name, broken={"stdin": "closed"}).code == 0


@pytest.mark.parametrize("name", TO_FILES)
def test_full_disk_is_2_and_names_the_file(name: str, run: Run) -> None:
    line, file = TO_FILES[name]
    code, _, err = run(line, largest=600 if name == "eval" else 250)
    assert code == 2 and file in err and err.count("triforce: error: ") == 1, (code, err)
    assert "Traceback" not in err


@pytest.mark.parametrize("name", TO_DEVICE)
def test_full_device_is_2_and_named(name: str, run: Run) -> None:
    code, _, err = run(TO_DEVICE[name])
    assert code == 2 and "/dev/full" in err and err.count("triforce: error: ") == 1, (code, err)
    assert "Traceback" not in err
