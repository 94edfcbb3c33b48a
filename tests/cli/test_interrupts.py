"""Ctrl-C in the middle of a pass that Python cannot leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORK = """
import ctypes, os, signal
from triforce.cli.interrupts import sigint_callback
sleep = ctypes.CDLL(None).sleep  # as a pass does, it leaves the interpreter to other threads, and hears nothing
def more(): os.write(1, b"heard")
def end(): os._exit(7)
def work():
    signal.signal(signal.SIGINT, lambda *_: None)  # it may come before the first sleep
    print("begun", flush=True)
    for _ in range(100): sleep(1000)
"""


@pytest.mark.parametrize(("first", "times", "code"), [("end", 1, 7), ("more", 2, 130)])
def test_sigint_is_heard_in_the_middle_of_a_pass(first: str, times: int, code: int) -> None:
    signals = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])"  # it interrupts no sleep of the main thread
    body = f"{WORK}\nwith sigint_callback({first}):\n    {signals}\n    work()\n"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", body]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        if times > 1:
            assert process.stdout.read(5) == "heard"
            process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert process.wait(60) == code and time.monotonic() - began < 50


def test_sigint_that_ends_the_block_calls_nothing() -> None:
    code = (
        "import os, signal\nfrom triforce.cli.interrupts import sigint_callback\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background processes ignore it
        "try:\n    with sigint_callback(lambda: os._exit(7)):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n        signal.pause()\n"
        "except KeyboardInterrupt:\n    print('left')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, "left\n")
