"""Ranks as processes: what they tell each other, how `--tp` and torchrun start them, and how they end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.helpers.tiny_checkpoint import tiny_pair
from triforce.cli import RANK_LOST, main
from triforce.cli.tensor_parallel import verdict
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM

ROOT = Path(__file__).parents[2]
ONE = ROOT / "tests" / "helpers" / "processes" / "one_rank.py"
PATH = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
ENVIRONMENT = os.environ | {"PYTHONPATH": PATH}
PROMPT = "the cat sat on the mat, the hat and the cat. " * 6
SECOND_RANK_TELLS = {
    "differ": "the sevens of rank 1 differ from those of rank 0",
    "part": "ranks have diverged: one rank has made 5 broadcasts and 2 votes, rank 1 4 and 3",
}
LONG = 6000  # tokens: nobody waits for the last of them


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pair(tmp_path_factory.mktemp("pair"), 8192)


def command(pair: Path, *arguments: str, prompt: str = PROMPT) -> list[str]:
    models = (str(pair / "target"), prompt, "--draft", str(pair / "draft"), "--retrieval-budget", "64", "--seed", "5")
    return ["generate", *models, "--ignore-eos", *arguments]


@contextmanager
def python(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run Python in a process that is killed at the end."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, *arguments], text=True, env=ENVIRONMENT | environment, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("die", "another rank has ended, or did not answer"),
        ("die-in-gather", "another rank has ended, or did not answer"),
        ("hang", "did not answer for 2 seconds"),
        ("differ", SECOND_RANK_TELLS["differ"]),
        ("part", "ranks have diverged: one rank has made 4 broadcasts and 3 votes, rank 0 5 and 3"),
    ],
)
def test_socket_group_operations_agree(tmp_path: Path, end: str, told: str) -> None:
    meeting = (tmp_path / "meeting").as_uri()
    with (
        python(str(ONE), "0", "2", meeting, end) as first,
        python(str(ONE), "1", "2", meeting, end) as second,
    ):
        said, errors = first.communicate(timeout=240)
        assert said.startswith("all right\n") and told in said, said + errors
        if end in SECOND_RANK_TELLS:
            assert SECOND_RANK_TELLS[end] in second.communicate(timeout=60)[0]


def test_lost_rank_is_noticed_by_all_others(tmp_path: Path) -> None:
    """Rank 2 dies while ranks 0 and 1 wait for it. Nobody waits for the end of its patience."""
    meeting = (tmp_path / "meeting").as_uri()
    with (
        python(str(ONE), "0", "3", meeting, "die-in-gather") as first,
        python(str(ONE), "1", "3", meeting, "die-in-gather") as second,
        python(str(ONE), "2", "3", meeting, "die-in-gather"),
    ):
        for process in (first, second):
            said, errors = process.communicate(timeout=50)
            assert "another rank has ended" in said, said + errors


def text_of(pair: Path, tokens: int, mode: str | None = None) -> list[int]:
    params = SamplingParams(seed=5, max_tokens=tokens, ignore_eos=True)
    llm = LLM(pair / "target", pair / "draft", retrieval_budget=64)
    return llm.generate(PROMPT, params, mode=mode)[0].outputs[0].token_ids


def test_tp_text_equals_one_process(pair: Path) -> None:
    with python(
        "-m", "triforce", *command(pair, "--max-tokens", "60", "--json", "--tp", "2", "--mode", "triforce")
    ) as process:
        said, errors = process.communicate(timeout=240)
    assert process.returncode == 0 and not errors, errors
    answer = json.loads(said)
    assert answer["ranks"] == 2 and answer["exactness"] == "bitwise" and answer["mode"] == "triforce"
    assert answer["token_ids"] == text_of(pair, 60)


@pytest.mark.slow
def test_externally_started_ranks_agree(pair: Path) -> None:
    """As torchrun does: it sets these variables. The prompt is what rank 0 reads on stdin."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    arguments = command(pair, "--max-tokens", "30", "--json", "--mode", "ar", prompt="")
    del arguments[2]
    met = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with python("-m", "triforce", *arguments, "--prompt-file", __file__, RANK="1", LOCAL_RANK="1", **met) as second:
        first = subprocess.run(
            [sys.executable, "-m", "triforce", *arguments],
            **{"env": ENVIRONMENT | met | {"RANK": "0", "LOCAL_RANK": "0"}, "timeout": 240},
            **{"input": PROMPT, "capture_output": True, "text": True},
        )
        assert first.returncode == 0, first.stderr
        assert json.loads(first.stdout)["token_ids"] == text_of(pair, 30, "ar")
        assert second.communicate(timeout=60) == ("", "") and second.returncode == 0


@pytest.mark.slow
def test_torchrun_text_equals_one_process(pair: Path) -> None:
    arguments = command(pair, "--max-tokens", "30", "--json")
    with python("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "triforce", *arguments) as process:
        said, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert json.loads(said)["token_ids"] == text_of(pair, 30) and json.loads(said)["ranks"] == 2


def started(process: subprocess.Popen[str]) -> dict[str, psutil.Process]:
    """The ranks of a command that has begun to print its text."""
    assert process.stdout and process.stdout.read(20), process.stderr and process.stderr.read()
    return {child.environ()["RANK"]: child for child in psutil.Process(process.pid).children()}


def gone(ranks: dict[str, psutil.Process]) -> bool:
    """No rank is left, neither alive nor as a zombie."""
    return not psutil.wait_procs(list(ranks.values()), timeout=30)[1]


@pytest.mark.slow
def test_killed_rank_ends_command(pair: Path) -> None:
    with python("-m", "triforce", *command(pair, "--max-tokens", str(LONG), "--tp", "2")) as process:
        ranks = started(process)
        began = time.monotonic()
        ranks["1"].kill()
        _, errors = process.communicate(timeout=120)
        assert time.monotonic() - began < 100, "the pipes were left open"
        assert process.returncode == 2 and gone(ranks)
    assert "rank 1 of 2 was killed by SIGKILL" in errors and "Traceback" not in errors


@pytest.mark.slow
def test_killed_first_rank_ends_command(pair: Path) -> None:
    with python("-m", "triforce", *command(pair, "--max-tokens", str(LONG), "--tp", "2")) as process:
        ranks = started(process)
        ranks["0"].kill()
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 2 and gone(ranks)
    assert "rank 0 of 2 was killed by SIGKILL" in errors and "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda how: how.name)
def test_ranks_end_with_their_launcher(pair: Path, how: signal.Signals) -> None:
    if signal.getsignal(how) is signal.SIG_IGN:
        pytest.skip("these tests run where this signal is ignored, and what they start inherits that")
    with python("-m", "triforce", *command(pair, "--max-tokens", str(LONG), "--tp", "2")) as process:
        ranks = started(process)
        process.send_signal(how)
        process.wait(60)
        assert gone(ranks)


def test_mistake_is_reported_by_one_rank(pair: Path) -> None:
    """Heads that cannot be shared: each rank finds that out."""
    with python("-m", "triforce", *command(pair, "--tp", "3")) as process:
        said, errors = process.communicate(timeout=240)
    assert process.returncode == 2 and not said
    assert errors.count("2 KV heads cannot be shared evenly by 3 processes; use --tp 1 or 2") == 1


@pytest.mark.parametrize(
    ("codes", "code", "told"),
    [
        ([0, 0], 0, ""),
        ([0, None], 0, ""),
        ([2, 2], 2, ""),  # the same mistake, and rank 0 has told it
        ([141, RANK_LOST], 141, ""),  # whoever read the text has closed the pipe
        ([RANK_LOST, RANK_LOST], 2, ""),  # they do not agree, and rank 0 has told it
        ([RANK_LOST, -9], 2, "rank 1 of 2 was killed by SIGKILL; so the others were ended, too\nwhat 1 said"),
        ([-11, RANK_LOST], 2, "rank 0 of 2 was killed by SIGSEGV"),
        ([None, 2], 2, "rank 1 of 2 ended with code 2; so the others were ended, too\nwhat 1 said"),
        ([RANK_LOST, None], 2, "rank 1 of 2 no longer answers"),
    ],
)
def test_exit_codes_of_ranks_give_verdict(
    codes: list[int | None], code: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        (tmp_path / f"rank-{rank}").write_text(f"what {rank} said\n" if rank else "")
    assert verdict(codes, tmp_path) == code
    said = capsys.readouterr().err
    assert told in said if told else not said


@pytest.mark.parametrize(
    ("arguments", "variables", "told"),
    [
        (["generate", "x y", "--tp", "0"], {}, "--tp is 0; give 1 to 64 processes"),
        (["generate", "x y", "--tp", "3"], {"WORLD_SIZE": "2"}, "but 2 processes were started; leave out --tp"),
        (["generate", "x y", "--device", "cuda:1"], {"WORLD_SIZE": "2"}, "use --device cuda"),
        (["generate", "x y", "--tp-all-reduce"], {}, "such as --tp 2"),
        (["serve", "--replicas", "2"], {"WORLD_SIZE": "2"}, "start it without torchrun"),
        (["batch", "x", "--tp", "65"], {}, "--tp is 65; give 1 to 64 processes"),
        (["chat", "model", "--tp-all-reduce"], {}, "such as --tp 2"),
    ],
)
def test_tp_impossible_settings_raise(
    arguments: list[str],
    variables: dict[str, str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in (variables | {"RANK": "0", "MASTER_ADDR": "127.0.0.1"}).items():
        monkeypatch.setenv(name, value)
    assert main(arguments) == 2
    assert told in capsys.readouterr().err
