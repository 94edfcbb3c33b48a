"""Balance of this machine as measured: kept beside the profiles, so that all who ask for a break-even are told one.

`triforce info` measures it each time, and `demo` and `serve` where nobody has: it takes a part of a second.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from triforce.backends.dispatch import suits_native
from triforce.model.config import ModelConfig
from triforce.planner.break_even import Balance
from triforce.planner.cost_model import kernel_level, machine_file
from triforce.planner.tier_work import BALANCES, usual_machine
from triforce.whole_file import whole_file

CODED_WEIGHTS, CODED_KV = "int16", "int8 KV"
"""Products with weights of few bits as they are, and attention over int8 KV; others are called by their type."""
CPU = torch.device("cpu")


def measured() -> dict[str, float]:
    """Return the balances that were kept, by name; {} where none were."""
    found: dict[str, float] = {}
    with suppress(OSError, ValueError, AttributeError, TypeError):  # whatever is wrong: it is as if none were
        path = _path()
        saved = json.loads(path.read_text(encoding="utf-8")) if path else {}
        found = {name: float(value) for name, value in saved.items() if 0 < float(value) < float("inf")}
    return found


def keep(balances: Mapping[str, float]) -> None:
    """Keep balances by name for all processes; a folder that cannot be written to is ignored."""
    if path := _path():
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as partial:
                partial.write_text(json.dumps(dict(balances)), encoding="utf-8")


def balance_of(coded: bool, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[Balance, str]:
    """Return how many operations a byte a device does, and how that is known: measured, where kernels are native.

    coded: products are those of weights of few bits, as they are. GPUs are not measured: they do most of all.
    """
    name = str(dtype).removeprefix("torch.")
    wanted = CODED_WEIGHTS if coded else name, CODED_KV if config.kv_int8 else name
    if suits_native(config, dtype, device):
        kept = measured()
        if kept.keys() >= set(wanted):
            return Balance(*(kept[each] for each in wanted)), "measured here"
    usual = usual_machine(kernel_level(device))[0] if device.type == "cpu" else BALANCES[-1]
    return Balance(usual, usual), "as usual, not measured"


def _path() -> Path | None:
    return machine_file("balance", [], [kernel_level(CPU)], CPU)
