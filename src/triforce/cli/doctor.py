"""`triforce doctor`: checks of a machine, one line each, in order, up to the first check that fails.

All figures go to one file. Exit code 1 if a check fails, 2 if --gpu is given and there is no GPU.
"""

from __future__ import annotations

import traceback
from argparse import Namespace
from time import perf_counter
from typing import Any

from triforce import __version__
from triforce.backends import dispatch
from triforce.bench.checkup import Check, Checkup
from triforce.cli.bench.setup import about, machine, own_texts, write
from triforce.cli.text_files import BOOK, require_writable
from triforce.engine.model_loader import resolve_device
from triforce.errors import RequestError, TriforceError, as_option, printable


def run(options: Namespace) -> int:
    """Run the checks, and write the file however they end. Raises RequestError for --gpu without a GPU."""
    require_writable(options.out, "--out")
    name = "cuda" if options.gpu else "cpu"
    report: dict[str, Any] = {"triforce": __version__, "device": name, "checks": []}
    try:
        device = _device(name)
    except TriforceError as error:
        write(options.out, report | {"error": error.message_text(as_option)})
        raise
    report["device"] = device
    processor = Check("processor", lambda: (machine(), {}), "make native")
    passed = True
    for n, check in enumerate([processor, *Checkup(device, own_texts()[BOOK]).checks()], 1):
        passed = _passes(n, check, report["checks"])
        report |= about(device=device) if passed else {}
        write(options.out, report)
        if not passed:
            print(f"stopped at this check. Report {printable(options.out)}; to find the cause: {check.advice}")
            break
    print(f"figures: {printable(options.out)}")
    return 0 if passed else 1


def _device(name: str) -> str:
    """Return the device of this name. Raises RequestError for `cuda` without a GPU, and ModelError."""
    if name == "cuda" and (reason := _missing_gpu_reason()):
        raise RequestError(f"there is no GPU to check: {reason}; without --gpu the processor is checked")
    return resolve_device(name)


def _passes(number: int, check: Check, rows: list[dict[str, Any]]) -> bool:
    """Whether a check passes. Prints its line, and appends its figures or its error to `rows`."""
    began = perf_counter()
    row = {"name": check.name, "passed": True}
    try:
        line, figures = check.run()
        row |= {"found": line, "figures": figures}
    except Exception as error:  # a driver, a compiler or a kernel may raise anything, and the check reports it
        first_line = (str(error).splitlines() or [""])[0]
        line = f"FAILED: {type(error).__name__}: {first_line}"
        row |= {"passed": False, "found": line, "traceback": traceback.format_exc()}
    print(f"{number:>2} {check.name:<13} {line}", flush=True)
    rows.append(row | {"seconds": perf_counter() - began})
    return bool(row["passed"])


def _missing_gpu_reason() -> str:
    """Return why torch has no GPU; an empty text if it has one."""
    if not dispatch.has_torch():
        return "torch is not installed; pip install 'triforce[gpu]'"
    import torch

    if torch.cuda.is_available():
        return ""
    if not (torch.version.cuda or torch.version.hip):
        return f"torch {torch.__version__} was built without CUDA; install the build for it (pytorch.org)"
    return f"torch {torch.__version__} finds none; see nvidia-smi, and CUDA_VISIBLE_DEVICES"
