"""Ctrl-C from the first import on, as the process of a command has it; twice, as a server has it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.server_process import KEY, served
from triforce.server.http_server import SAME_SIGNAL_SECONDS

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "src")}
RUN = """
import importlib, sys, types
command = types.ModuleType("triforce.cli.doctor")
command.run = lambda options: importlib.import_module("moment").run(options)
sys.modules["triforce.cli.doctor"] = command
sys.path.insert(0, sys.argv.pop(1))
from triforce.__main__ import main
sys.exit(main())
"""
"""A command that does what a module `moment` does, in a folder that is named first."""
SELF = "import os, signal, time\n"
KILL = "os.kill(os.getpid(), signal.SIGINT)"
MOMENTS = {
    "an import": f"{KILL}\ntime.sleep(60)\n",
    "an import that renames what is raised": (
        f"class Field:\n    def __set_name__(self, *_):\n        {KILL}\n\nclass Model:\n    field = Field()\n"
        "time.sleep(60)\n"
    ),
    "an import that swallows what is raised": (
        f"class Field:\n    def __del__(self):\n        {KILL}\n\nField()\ntime.sleep(60)\n"
    ),
    "work": f"def run(options):\n    {KILL}\n    time.sleep(60)\n",
    "a finalizer": (
        f"class Model:\n    def __del__(self):\n        {KILL}\n\ndef run(options):\n    Model()\n    time.sleep(60)\n"
    ),
    "its own cleaning": f"def run(options):\n    try:\n        {KILL}\n    finally:\n        {KILL}\n",
    "the end": f"import atexit\natexit.register(lambda: {KILL})\ndef run(options):\n    return 0\n",
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_sigint_at_any_moment_exits_130_without_traceback(moment: str, tmp_path: Path) -> None:
    (tmp_path / "moment.py").write_text(SELF + MOMENTS[moment])
    command = [sys.executable, "-c", RUN, str(tmp_path), "doctor"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\n")


def test_little_is_imported_before_sigint_is_heard() -> None:
    """Python's own traceback is what Ctrl-C gives until then."""
    code = "import sys, triforce.__main__; print(*{'typing', 'contextlib', 'argparse', 're'} & {*sys.modules})"
    command = [sys.executable, "-S", "-c", code]
    assert subprocess.run(command, env=ENVIRONMENT, capture_output=True, check=True).stdout == b"\n"


def test_sigint_ignored_by_parent_ends_command(tmp_path: Path) -> None:
    """Shells ignore SIGINT for `triforce serve &` in a script."""
    (tmp_path / "moment.py").write_text(SELF + MOMENTS["work"])
    command = [sys.executable, "-c", RUN, str(tmp_path), "doctor"]
    shell = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
    assert subprocess.run(shell, env=ENVIRONMENT, capture_output=True, timeout=50).returncode == 130


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["serve", "--port", "0"], ["generate", "a prompt"], ["info"]])
def test_sigint_in_first_second_exits_130(arguments: list[str]) -> None:
    """Not before Python itself has started: no program in Python can have it otherwise."""
    began = time.monotonic()
    delay = 0.2
    while delay < 1.5 and time.monotonic() - began < 120:
        command = [sys.executable, "-m", "triforce", *arguments]
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode in (0, 130) and "Traceback" not in err, (delay, err)
        delay *= 1.2


def test_second_signal_ends_at_once_and_quietly(pair: Path) -> None:
    """An answer is being made. The log says once that the server stops."""
    body = {"prompt": "the cat", "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    with served(pair, "--shutdown-timeout", "500") as (process, url):
        how: dict[str, Any] = {"json": body, "headers": {"authorization": f"Bearer {KEY}"}, "timeout": 60}
        with httpx.stream("POST", f"{url}/v1/completions", **how) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            time.sleep(2 * SAME_SIGNAL_SECONDS)
            process.send_signal(signal.SIGINT)
            assert '"code": "stopping"' in "".join(list(lines)[-3:])
        assert process.wait(timeout=60) == 0
        assert process.stderr
        log = [json.loads(line) for line in process.stderr.read().splitlines()]
        assert [line["event"] for line in log] == ["listening", "stopping", "request"]
