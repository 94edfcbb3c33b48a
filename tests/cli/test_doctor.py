"""`triforce doctor`: the order of its checks, where it stops, what it writes; on a CPU, and on a made-up GPU."""

from __future__ import annotations

import gc
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.cuda import stub
from tests.helpers.tiny_checkpoint import tiny_pair
from triforce.backends import dispatch
from triforce.backends.cuda.triton import sampler
from triforce.bench import checkup, roofline
from triforce.checkpoint import hub
from triforce.cli import main
from triforce.engine import model_loader, tier_builder

CHECKS = ["processor", "memory", "kernels", "sampler", "greedy text", "sampled text", "offload", "speed"]
GPU_CHECKS = [*CHECKS[:1], "device", *CHECKS[1:]]


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny pair in the place of the shipped one, and less of everything."""
    folder = tiny_pair(tmp_path, 512)
    pair = folder / "target", folder / "draft"
    for module in (checkup, hub, model_loader):
        monkeypatch.setattr(module, "SHIPPED", pair)
    for name, value in (("PROMPT_TOKENS", 100), ("NEW_TOKENS", 3), ("VOCABULARY", 600)):
        monkeypatch.setattr(checkup, name, value)
    monkeypatch.setattr(tier_builder, "STRICT_ROWS", 1)
    monkeypatch.setattr(tier_builder, "MAX_AUTO_TOKENS", (1, 1))
    monkeypatch.setattr(roofline, "COPY_BYTES", (1 << 12, 1 << 12))
    monkeypatch.setattr(roofline, "MATRIX_SIZE", (16, 16))
    monkeypatch.chdir(tmp_path)


def report(file: str = "triforce-doctor.json") -> dict[str, Any]:
    report_json: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
    return report_json


def named(doctor_report: dict[str, Any]) -> list[str]:
    return [check["name"] for check in doctor_report["checks"]]


def test_doctor_on_cpu_passes_all_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--out", "figures.json"]) == 0
    figures = report("figures.json")
    out = capsys.readouterr().out
    assert named(figures) == CHECKS and all(check["passed"] for check in figures["checks"])
    lines = out.splitlines()
    assert [line[3:16].strip() for line in lines[:-1]] == CHECKS and lines[-1] == "figures: figures.json"
    assert "cores, kernels" in lines[0] and "iB free" in lines[1]
    assert all(error < 1e-3 for error in figures["checks"][2]["figures"].values() if error < 1e-2)
    assert len(figures["checks"][4]["figures"]["token_ids"]) == 3
    assert figures["checks"][7]["figures"].keys() == {"ar_seconds_per_token", "triforce_seconds_per_token"}


needs_kernels = pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built")


@needs_kernels
def test_doctor_without_torch_compares_with_portable_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU cannot be reached without torch."""
    monkeypatch.setattr(dispatch, "has_torch", lambda: False)
    level = dispatch.native.level()
    assert main(["doctor", "--out", "figures.json"]) == 0
    checks = report("figures.json")["checks"]
    assert named({"checks": checks}) == CHECKS and dispatch.native.level() == level
    for check in checks[2:4]:
        assert "as those of portable kernels" in check["found"] and check["figures"]
    capsys.readouterr()
    assert main(["doctor", "--gpu", "--out", "figures.json"]) == 2
    assert "torch is not installed; pip install 'triforce[gpu]'" in capsys.readouterr().err


def test_doctor_without_gpu_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, why in ((None, "was built without CUDA"), ("13.0", "finds none; see nvidia-smi")):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert main(["doctor", "--gpu", "--out", "figures.json"]) == 2
        error = capsys.readouterr().err
        assert why in error and "Traceback" not in error and error.count("\n") == 1
        assert report("figures.json")["error"] in error and report("figures.json")["device"] == "cuda"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is made up here")
def test_doctor_on_gpu_keeps_order(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are left to the slow test."""
    monkeypatch.setattr(checkup, "_driver", lambda: "999.1")
    for name in ("kernels", "same_text", "offloaded", "speed"):
        monkeypatch.setattr(checkup.Checkup, name, lambda self, *_: ("as it should be", {}))
    with stub.machine() as machine:
        assert main(["doctor", "--gpu"]) == 0, capsys.readouterr().out
    figures = report()
    lines = capsys.readouterr().out.splitlines()
    assert named(figures) == GPU_CHECKS and [line[3:16].strip() for line in lines[:-1]] == GPU_CHECKS
    assert figures["device"] == "cuda:0" and {"_peaks", "_cut", "race_parts"} <= {name for name, *_ in machine.launches}
    assert "Made up 0, capability 9.0, driver 999.1" in lines[1] and "70.0GiB of 80.0GiB free" in lines[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is made up here")
def test_doctor_on_gpu_passes_all_checks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are interpreted: texts have two tokens, in short drafts, and one program looks at a column of theirs."""
    monkeypatch.setattr(checkup, "_driver", lambda: "999.1")
    monkeypatch.setattr(checkup, "NEW_TOKENS", 2)
    monkeypatch.setattr(checkup, "LLM", partial(checkup.LLM, speculative_tokens=2))
    for name in ("SINGLE_PROGRAM_INTERPRETED", "BLOCK_INTERPRETED"):
        monkeypatch.setattr(sampler, name, 512)
    with stub.machine() as machine:
        assert main(["doctor", "--gpu"]) == 0, capsys.readouterr().out
        gc.collect()
    figures = report()
    lines = capsys.readouterr().out.splitlines()
    assert named(figures) == GPU_CHECKS and all(check["passed"] for check in figures["checks"])
    assert figures["device"] == "cuda:0"
    assert "Made up 0, capability 9.0, driver 999.1" in lines[1] and "70.0GiB of 80.0GiB free" in lines[2]
    expected = {"_splits", "_go_on", "_decide", "_peaks", "_carry"}
    assert expected <= {name for name, *_ in machine.launches} and machine.captured > 3
    assert "pin with device 0" in machine.log


def is_reference() -> bool:
    """Whether the kernels in use are the reference of others."""
    return dispatch.requested == "torch" if dispatch.has_torch() else dispatch.native.level() == "portable"


def broken_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = checkup.Checkup._logits

    def wrong(self: checkup.Checkup, decoder: Any) -> Any:
        return compute(self, decoder) * (1.0 if is_reference() else 1.1)

    monkeypatch.setattr(checkup.Checkup, "_logits", wrong)


def broken_picks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup.Checkup, "_picks", staticmethod(lambda *_: [int(is_reference())]))


def broken_text(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = checkup.LLM.generate

    def wrong(self: Any, prompt: Any, params: Any, mode: str) -> Any:
        (output,) = generate(self, prompt, params, mode=mode)
        if mode == "retrieval" and params.temperature:
            output.outputs[0].token_ids[2] += 1
        return [output]

    monkeypatch.setattr(checkup.LLM, "generate", wrong)


def broken_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access\nand many lines more")

    monkeypatch.setattr(checkup.Checkup, "speed", fails)


@pytest.mark.parametrize(
    ("fault", "name", "message"),
    [
        (broken_logits, "kernels", "CheckFailed: logits in float32 are 0.1 from those of torch"),
        (broken_picks, "sampler", "CheckFailed: picks are"),
        (broken_text, "sampled text", "CheckFailed: the texts of ar and retrieval differ from token 2 on"),
        (broken_driver, "speed", "RuntimeError: CUDA error: an illegal memory access"),
    ],
)
def test_doctor_stops_at_first_failure(
    fault: Any, name: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fault(monkeypatch)
    assert main(["doctor"]) == 1
    captured = capsys.readouterr()
    figures = report()
    at = CHECKS.index(name)
    assert named(figures) == CHECKS[: at + 1]
    assert [check["passed"] for check in figures["checks"]] == [True] * at + [False]
    lines = captured.out.splitlines()
    assert f"FAILED: {message}" in lines[at] and lines[at + 1].startswith(
        "stopped at this check. Report triforce-doctor.json"
    )
    assert "Traceback" not in captured.out + captured.err and "Traceback" in figures["checks"][at]["traceback"]


@needs_kernels
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (broken_logits, "logits in float32 are 0.1 from those of portable kernels"),
        (broken_picks, "picks are [0], and those of portable kernels [1]"),
    ],
)
def test_doctor_without_torch_finds_wrong_kernels(
    fault: Any, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if dispatch.native.level() == "portable":
        pytest.skip("these kernels are the reference themselves")
    monkeypatch.setattr(dispatch, "has_torch", lambda: False)
    fault(monkeypatch)
    assert main(["doctor"]) == 1
    assert f"FAILED: CheckFailed: {message}" in capsys.readouterr().out
