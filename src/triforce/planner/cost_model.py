"""Costs of forward passes in seconds, acceptance and findings: learnt while decoding, and kept between runs."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from math import log
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from triforce.backends import native_loader
from triforce.installed import version_of
from triforce.planner.acceptance import AcceptanceHistory
from triforce.planner.pass_costs import PassCosts, Seen
from triforce.planner.planner_config import CONFIG
from triforce.planner.searched_layers import Finding
from triforce.planner.tier_work import TierWork
from triforce.user_cache import user_cache
from triforce.whole_file import whole_file

FORM = 2  # of what the file holds; one of another form is not read
OLD_PASSES = 4.0  # that those of the file count as, of a kind


class CostModel:
    """Seconds of `passes`, `acceptance` of draft tokens, and `layers` to search.

    path: their file, if any. level: that of the kernels.
    """

    def __init__(self, path: Path | None = None, works: Mapping[str, TierWork] | None = None, level: str = "") -> None:
        self.path, self.passes = path, PassCosts(dict(works or {}), level)
        self.acceptance = AcceptanceHistory(CONFIG.history_memory, CONFIG.history_limit)
        self.layers: dict[str, Finding] = {}
        self.kinds: dict[tuple[int, int, int], Any] = {}
        """What the latest text of a kind leaves to the next one: choice, account and cadence of its controller."""
        with suppress(OSError, ValueError):  # all of it can be learnt again
            digest, saved = path.read_text(encoding="utf-8").split("\n", 1) if path else ("", "")
            if digest == _digest(saved):  # else it is not what a process of ours wrote
                self._read(json.loads(saved))

    def save(self) -> None:
        """Write the file for the next process; a folder that cannot be written to is ignored.

        Where this process found the machine slower, kinds of passes that it did not run stay as they were read: what is
        thought to take long is not tried, and so is not corrected.
        """
        if self.path is None:
            return
        layers, shift = {case: asdict(found) for case, found in self.layers.items()}, log(self.passes.speed)
        kinds = [(tier, kind, x) for tier, costs in self.passes.tiers.items() for kind, x in costs.seen.items()]
        passes = [
            (tier, *kind, x.count, x.keys, x.log + (shift if x.own else min(shift, 0))) for tier, kind, x in kinds
        ]
        shares = [(*case, *sums) for case, sums in self.acceptance.of.items()]
        saved = json.dumps({"passes": passes, "shares": shares, "layers": layers})
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(self.path) as partial:
                partial.write_text(f"{_digest(saved)}\n{saved}", encoding="utf-8")

    def _read(self, saved: Any) -> None:
        """Take what a file holds."""
        for tier, width, rows, size, count, keys, took in saved["passes"]:
            self.passes.of(tier).seen[width, rows, size] = Seen(min(count, OLD_PASSES), keys, took, own=False)
        for costs in self.passes.tiers.values():
            costs.changed(fit=True)
        for *case, accepted, rejected in saved["shares"]:
            self.acceptance.add(tuple(case), accepted, rejected)
        self.layers |= {case: Finding(**found) for case, found in saved["layers"].items()}


def _digest(saved: str) -> str:
    """Return what a file begins with whose content has this form."""
    return f"{FORM} {crc32(saved.encode())}"


def kernel_level(device: torch.device) -> str:
    """The level of the kernels that compute on a device."""
    native = native_loader.native if device.type == "cpu" else None
    return native.level() if native else "torch"


def costs_path(models: list[str], device: torch.device, dtype: torch.dtype) -> Path | None:
    """The path of the file for some models on a device of this machine, in the cache folder of XDG.

    Its name has the device, the level of the kernels and the dtype; its digest these, the version, the machine, its
    threads and the models. None for a user without a home folder.
    """
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return machine_file("costs", models, [kind, kernel_level(device), str(dtype).removeprefix("torch.")], device)


def machine_file(what: str, about: Sequence[str], names: Sequence[str], device: torch.device) -> Path | None:
    """The path of a file of this version and machine with its threads, about some things; it is called by `names`."""
    native = native_loader.native if device.type == "cpu" else None
    threads = native.threads() if native else torch.get_num_threads()
    installed = version_of("triforce")  # kernels of another one may be faster, and its file may have another form
    facts = [*about, *names, installed, platform.node(), platform.machine(), str(threads)]
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    cache = user_cache()
    return cache / f"{what}-{re.sub(r'[^a-z0-9]+', '-', '-'.join(names).lower())}-{key}.json" if cache else None
