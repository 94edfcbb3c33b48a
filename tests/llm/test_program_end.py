"""The end of a program during generation: it has the program's own exit code and prints nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.tiny_checkpoint import tiny_pair

BEGINNING = """
import os, signal, sys, threading
from triforce import LLM, SamplingParams, Session
llm = LLM(sys.argv[1], sys.argv[2], retrieval_budget=64)
long = SamplingParams(max_tokens=600, ignore_eos=True)
begun = threading.Event()

def forever(work):
    while True:
        work()

def behind(work):
    thread = threading.Thread(target=forever, args=(work,), daemon=True)
    thread.start()
    assert begun.wait(60)
    return thread
"""
UNREAD = {
    "closed": "pieces = llm.stream('the cat', long); next(pieces); llm.close()",
    "session": "pieces = Session(llm).ask('the cat', long); next(pieces)",
    "forked": "pieces = llm.stream('the cat', long); next(pieces)\nif os.fork(): os.wait()",
}
BEHIND = {
    "stream": "behind(lambda: [begun.set() for _ in llm.stream('the cat', long)])",
    "engine": """
engine = llm.open()
def step():
    if not engine.busy: engine.submit([llm.request('the cat', long)])
    engine.step()
    begun.set()
behind(step)""",
    "loading": "behind(lambda: (begun.set(), LLM(sys.argv[1], None)))",
    "idle": "behind(lambda: (llm.generate('a', SamplingParams(max_tokens=1)), begun.set(), threading.Event().wait()))",
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pair(tmp_path_factory.mktemp("texts"), positions=640)


def ended(pair: Path, program: str) -> tuple[int, str]:
    """Return the exit code and stderr of a program."""
    line = [sys.executable, "-c", BEGINNING + program, str(pair / "target"), str(pair / "draft")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return done.returncode, done.stderr


@pytest.mark.parametrize("way", UNREAD)
def test_program_end_with_unread_text_has_code_of_program(pair: Path, way: str) -> None:
    assert ended(pair, f"{UNREAD[way]}\nsys.exit(7)") == (7, "")


@pytest.mark.parametrize("way", BEHIND)
def test_program_end_beside_daemon_thread_is_quiet(pair: Path, way: str) -> None:
    assert ended(pair, BEHIND[way]) == (0, "")


def test_program_end_by_interrupt_beside_daemon_thread_is_that_of_python(pair: Path) -> None:
    program = f"thread = {BEHIND['stream']}; os.kill(os.getpid(), signal.SIGINT); thread.join()"
    code, stderr = ended(pair, program)
    assert code == -signal.SIGINT and stderr.strip().endswith("KeyboardInterrupt")
