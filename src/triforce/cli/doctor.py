"""`triforce doctor`: a line for each thing that a machine must have or do, in order, up to the first that it does not.

All figures are in one file. Exit code 1 where a check fails, 2 where there is no GPU and one is to be checked.
"""

from __future__ import annotations

import traceback
from argparse import Namespace
from time import perf_counter
from typing import Any

import torch

from triforce import __version__
from triforce.bench.checkup import Check, Checkup
from triforce.cli.bench.setup import about, machine, own_texts, write
from triforce.cli.text_files import BOOK, require_writable
from triforce.engine.model_loader import resolve_device
from triforce.errors import RequestError, TriforceError, as_option, printable


def run(options: Namespace) -> int:
    """Run the checks, and write the file however they end. Raises RequestError without a GPU that is asked for."""
    require_writable(options.out, "--out")
    name = "cuda" if options.gpu else "cpu"
    report: dict[str, Any] = {"triforce": __version__, "device": name, "checks": []}
    try:
        device = _device(name)
    except TriforceError as error:
        write(options.out, report | {"error": error.worded(as_option)})
        raise
    report["device"] = str(device)
    processor = Check("processor", lambda: (machine(), {}), "make native")
    passed = True
    for n, check in enumerate([processor, *Checkup(device, own_texts()[BOOK]).checks()], 1):
        passed = _passes(n, check, report["checks"])
        report |= about(device=device) if passed else {}
        write(options.out, report)
        if not passed:
            print(f"stopped there; report {printable(options.out)}, and what this says: {check.advice}")
            break
    print(f"figures: {printable(options.out)}")
    return 0 if passed else 1


def _device(name: str) -> torch.device:
    """Return the device of this name. Raises RequestError without a GPU that is asked for, and ModelError."""
    if name == "cuda" and not torch.cuda.is_available():
        raise RequestError(f"there is no GPU to check: {_why_none()}; without --gpu the processor is checked")
    return resolve_device(name)


def _passes(number: int, check: Check, rows: list[dict[str, Any]]) -> bool:
    """Whether a check passes; prints its line, and adds its figures or its error."""
    began = perf_counter()
    row = {"name": check.name, "passed": True}
    try:
        line, figures = check.run()
        row |= {"found": line, "figures": figures}
    except Exception as error:  # whatever a driver, a compiler or a kernel may raise is what is looked for
        first = (str(error).splitlines() or [""])[0]
        line = f"FAILED: {type(error).__name__}: {first}"
        row |= {"passed": False, "found": line, "traceback": traceback.format_exc()}
    print(f"{number:>2} {check.name:<13} {line}", flush=True)
    rows.append(row | {"seconds": perf_counter() - began})
    return bool(row["passed"])


def _why_none() -> str:
    if not (torch.version.cuda or torch.version.hip):
        return f"torch {torch.__version__} was built without CUDA; install the build for it (pytorch.org)"
    return f"torch {torch.__version__} finds none; see nvidia-smi, and CUDA_VISIBLE_DEVICES"
