"""`triforce batch`: the answers are those of the server, bad lines stop nothing, and a killed run is taken up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from tests.helpers.asgi_client import SAMPLED, ask, good
from tests.helpers.batch_files import answers, arguments, line
from triforce.backends import dispatch
from triforce.cli import main
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM

ROOT = Path(__file__).parents[2]
BODIES = {
    "/v1/completions": {"prompt": "the cat", "n": 2, **SAMPLED},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the hat?"}], **SAMPLED},
    "/v1/responses": {"input": "the mat", "temperature": 0.8, "seed": 5, "max_output_tokens": 24},
}
Run = Callable[..., int]


@pytest.fixture
def run(pair: Path, tmp_path: Path) -> Run:
    """Write lines into in.jsonl, run the batch into out.jsonl, and return the exit code."""

    def go(*lines: str) -> int:
        (tmp_path / "in.jsonl").write_text("".join(lines))
        return main(arguments(pair, tmp_path / "in.jsonl", tmp_path / "out.jsonl"))

    return go


def stable_fields(body: dict[str, Any]) -> Any:
    """Return the fields of an answer that do not change between runs."""
    if "choices" in body:
        return body["choices"], body["usage"]
    return [item["content"] for item in body["output"]], body["usage"]


def test_batch_answers_equal_server(run: Run, app: ASGIApp, tmp_path: Path) -> None:
    assert run(*(line(f"job {url}", url, body) for url, body in BODIES.items()), "\n") == 0
    by_id = {answer["custom_id"]: answer for answer in answers(tmp_path)}
    for url, body in BODIES.items():
        answer = by_id.pop(f"job {url}")
        assert answer.keys() == {"id", "custom_id", "response", "error", "digest"} and answer["error"] is None
        assert answer["response"]["status_code"] == 200 and answer["response"]["request_id"]
        assert stable_fields(answer["response"]["body"]) == stable_fields(good(ask(app, url, body)))
    assert not by_id


@pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built")
def test_batch_with_int8_kv_answers_as_its_model(pair: Path, tmp_path: Path) -> None:
    """Texts with int8 KV equal the model's, and are long enough to differ from texts with unrounded KV."""
    body = BODIES["/v1/completions"] | {"n": 1, "max_tokens": 300, "temperature": 2.0}
    (tmp_path / "in.jsonl").write_text("".join(line(str(n), "/v1/completions", body | {"seed": n}) for n in range(2)))
    source = tmp_path / "in.jsonl"
    output = tmp_path / "out.jsonl"
    assert main(arguments(pair, source, output, "--kv-dtype", "int8")) == 0
    params = [SamplingParams(temperature=2.0, seed=n, max_tokens=300, ignore_eos=True) for n in range(2)]
    rounded, exact = (
        [llm.generate("the cat", sampling, mode="ar")[0].outputs[0].text for sampling in params]
        for llm in (LLM(pair / "target", kv_dtype=kind) for kind in ("int8", "auto"))
    )
    texts_by_id = {
        answer["custom_id"]: answer["response"]["body"]["choices"][0]["text"] for answer in answers(tmp_path)
    }
    assert [texts_by_id["0"], texts_by_id["1"]] == rounded != exact


GOOD = line("good", "/v1/completions", BODIES["/v1/completions"] | {"max_tokens": 3})
BAD = {
    "{": "not JSON",
    "[" * 50_000: "not JSON",
    "[5]": "custom_id",
    '{"custom_id": 5}': "custom_id",
    "\udcff\udcfe": "not JSON",
    '{"custom_id": "caf\udce9"}': "iconv -f LATIN1 -t UTF-8",
    line("a", "/v1/embeddings", {}): "url one of",
    line("b", "/v1/completions", {}, "GET"): "method",
    line("c", "/v1/completions", {"prompt": "x", "stream": True}): "without stream",
    line("d", "/v1/completions", []): "JSON object",  # type: ignore[arg-type]
    GOOD: "already",
}


def test_batch_bad_lines_stop_nothing(pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = [
        line("unserved", "/v1/completions", {"prompt": "x", "surprise": 1}),
        line("nameless", "/v1/completions", {"prompt": "x", "model": "gpt"}),
    ]
    source = tmp_path / "in.jsonl"
    source.write_bytes("".join([GOOD, *refused, *(bad.strip() + "\n" for bad in BAD)]).encode(errors="surrogateescape"))
    source_bytes = source.read_bytes()
    for _ in range(2):  # the second time what is good is there
        assert main(arguments(pair, source, tmp_path / "out.jsonl")) == 1
        lines = answers(tmp_path)
        assert len(lines) == 3 + len(BAD)
    assert source.read_bytes() == source_bytes
    assert "0 answered, 13 refused, 1 skipped" in capsys.readouterr().err
    named = {answer["custom_id"]: answer for answer in lines}
    assert named["good"]["response"]["status_code"] == 200
    assert [named[name]["response"]["status_code"] for name in ("unserved", "nameless")] == [400, 404]
    assert "unknown field" in named["unserved"]["response"]["body"]["error"]["message"]
    errors = [answer["error"] for answer in lines if answer["error"]]
    assert all(error["code"] == "invalid_line" for error in errors)
    for says in BAD.values():
        assert any(says in error["message"] for error in errors), says


def test_batch_refused_lines_name_reason_and_are_retried(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = BODIES["/v1/completions"] | {"max_tokens": 3}
    lines = [line(str(i), "/v1/completions", body | {"model": "gpt"}) for i in range(3)]
    assert run(GOOD, "[5]\n", *lines) == 1
    stderr = capsys.readouterr().err
    assert "1 answered, 4 refused, 0 skipped" in stderr
    assert (
        "3 lines were refused for the commonest reason; the first of them: 0: model 'gpt' is not served here" in stderr
    )
    (good_answer,) = (answer for answer in answers(tmp_path) if answer["custom_id"] == "good")
    assert run(GOOD, *(line(str(i), "/v1/completions", body) for i in range(3))) == 0
    assert "3 answered, 0 refused, 1 skipped" in capsys.readouterr().err
    retried = answers(tmp_path)
    assert sorted(answer["custom_id"] for answer in retried) == ["0", "1", "2", "good"] and good_answer in retried
    assert {answer["response"]["status_code"] for answer in retried} == {200}
    assert not list(tmp_path.glob("*.new"))


def test_batch_killed_run_resumes(pair: Path, run: Run, tmp_path: Path) -> None:
    lines = [
        line(str(i), "/v1/completions", {"prompt": "the cat", **SAMPLED, "seed": i, "max_tokens": 150})
        for i in range(30)
    ]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    output = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "triforce", *arguments(pair, tmp_path / "in.jsonl", output)]
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}) as process:
        while not (output.exists() and output.stat().st_size) and process.poll() is None:
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    output_bytes = output.read_bytes()
    kept_bytes = output_bytes[: output_bytes.rindex(b"\n") + 1] if b"\n" in output_bytes else b""
    assert kept_bytes.count(b"\n") < len(lines), "it was too fast to be killed"
    output.write_bytes(kept_bytes + kept_bytes[:40])  # torn, as a kill may leave it
    assert run(*lines) == 0
    assert output.read_bytes().startswith(kept_bytes)
    answer_lines = answers(tmp_path)
    assert sorted(int(answer["custom_id"]) for answer in answer_lines) == list(range(30))
    assert len({answer["response"]["body"]["choices"][0]["text"] for answer in answer_lines}) > 20


@pytest.mark.parametrize("content", [b"my notes", b"my notes\n", b'{"a": 1}\n', b'{"id": "x"}'])
def test_batch_other_output_is_not_overwritten(run: Run, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "out.jsonl").write_bytes(content)
    assert run(GOOD) == 2
    assert (tmp_path / "out.jsonl").read_bytes() == content


@pytest.mark.parametrize(("source", "output"), [("nothing", "out"), ("", "out"), ("in", "in"), ("in", "no/where")])
def test_batch_unusable_files_are_reported(
    pair: Path, tmp_path: Path, source: str, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_text(GOOD)
    assert main(arguments(pair, tmp_path / source, tmp_path / output)) == 2
    assert (tmp_path / "in").read_text() == GOOD and "triforce: error: " in capsys.readouterr().err
