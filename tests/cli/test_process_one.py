"""`triforce serve` as process 1 of a container, which a namespace of processes stands for."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from triforce.cli.process_one import run_below_process_one

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "src")}
NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc"]


def has_namespaces() -> bool:
    return (
        shutil.which("unshare") is not None and not subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode
    )


needs_namespaces = pytest.mark.skipif(not has_namespaces(), reason="this user may not make namespaces of processes")


def started(*arguments: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    """Start Python as process 1 of a namespace. Returns `unshare`, which ends with its code, and process 1."""
    process = subprocess.Popen([*NAMESPACE, sys.executable, *arguments], env=ENVIRONMENT, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    assert process.stdout
    line = process.stdout.readline()
    assert line, process.communicate()
    (first,) = psutil.Process(process.pid).children()
    return process, first


def command_of(body: str) -> str:
    head = "import os, subprocess, sys, time\nfrom triforce.cli.process_one import run_below_process_one\n"
    function = f"def command():\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"
    return f"{head}{function}sys.exit(run_below_process_one(command))"


def test_other_processes_run_command_themselves() -> None:
    assert run_below_process_one(os.getpid) == os.getpid()


@needs_namespaces
def test_orphans_leave_no_zombies() -> None:
    """The shell ends before its child, so process 1 inherits the child."""
    code = command_of("""
        subprocess.run(["sh", "-c", "sleep 0.1 &"])
        time.sleep(1)
        statuses = [open(f"/proc/{pid}/status").read() for pid in os.listdir("/proc") if pid.isdigit()]
        print(os.getpid() > 1, any("zombie" in status for status in statuses))
        return 7
    """)
    done = subprocess.run([*NAMESPACE, sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("True False\n", 7), done.stderr


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_command_without_handler(number: signal.Signals) -> None:
    """As while a model is loaded."""
    process, first = started("-c", command_of('print("ready", flush=True)\ntime.sleep(60)\nreturn 0'))
    first.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 128 + number


@needs_namespaces
def test_server_drains_after_sigterm() -> None:
    process, first = started("-m", "triforce", "serve", "--port", "0")
    assert process.stderr
    while '"listening"' not in process.stderr.readline():
        pass
    time.sleep(0.5)  # its handlers stand a moment after the line
    first.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and '"stopping"' in err
