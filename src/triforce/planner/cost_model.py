"""Costs of forward passes in seconds: learnt from the passes themselves, sampling included, and kept between runs.

A pass over `width` tokens of each row, n tokens of all rows, which read k keys between them, takes about a + b n + c k
+ d width k seconds: a and c k are memory traffic, whatever the width; the others are arithmetic. A fused draft of
`width` tokens counts as one pass: its first token finds the processor's caches full of other weights. The fit
minimizes the relative error, and earlier passes fade.

All tiers share one machine: where passes that earlier ones cover take longer or less long than those, the costs of all
tiers follow, as some may have been observed last while the machine was busy.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from triforce.backends import native_loader
from triforce.planner.acceptance import AcceptanceHistory
from triforce.planner.cadence import Kept
from triforce.planner.pass_fit import BATCH, MIN_FRESH, MIN_PASSES, MIN_SECONDS, PassFit
from triforce.planner.searched_layers import Finding, Findings

CHANGED = 1.4  # times the expected seconds, or one over it: the speed of the machine has changed


class CostModel:
    """Seconds of passes, `acceptance` of draft tokens, and `layers` to search. `path`: their file, if any."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._fits, self.acceptance, self.layers = _read(path)
        self.trust: dict[str, float] = {}
        """Trust in speculation, by kind of texts (`SpeculationFallback.kept`)."""
        self.plain: dict[str, tuple[float, Kept]] = {}
        """By kind of texts that plain decoding was best for: tokens per second of each row, and the cadence
        that the next text goes on with (`Cadence.kept`)."""

    def observe(self, tier: str, width: int, rows: int, keys: float, seconds: float, passes: int = 1) -> None:
        """Note passes that are alike, of `width` tokens of each row, or fused drafts of so many; `keys` of all rows."""
        if tier not in self._fits:
            self._fits[tier] = PassFit()
        self._fits[tier].add(width, rows, keys, seconds, passes)
        if self._fits[tier].fresh >= BATCH:
            self._fit(self._fits[tier])

    def seconds(self, tier: str, width: float, rows: int, keys: float) -> float:
        """The seconds to expect of a pass; next to none where there was no such tier yet, so that it is tried."""
        base, each = self.line(tier, rows, keys)
        return max(base + width * each, MIN_SECONDS)

    def line(self, tier: str, rows: int, keys: float) -> tuple[float, float]:
        """The same as a line: seconds of a pass whatever its width, and seconds that each token of a row adds."""
        fit = self._fits.get(tier)
        if fit is None:
            return MIN_SECONDS, 0.0
        if fit.fresh >= MIN_FRESH or fit.passes < BATCH:
            self._fit(fit)
        return fit.line(rows, keys)

    def covers(self, tier: str, rows: int, keys: float) -> bool:
        """Whether there were enough passes like these, so that their cost is not extrapolated from quite others."""
        return tier in self._fits and self._fits[tier].covers(rows, keys)

    def _fit(self, fit: PassFit) -> None:
        """Fit the latest passes of a tier, and scale those of all tiers if the speed of the machine has changed."""
        ratio = fit.speed()
        if not 1 / CHANGED < ratio < CHANGED:
            for each in self._fits.values():
                each.scale(ratio)
        fit.fit()

    def settle(self) -> None:
        """Keep what was observed so far for good: it had passes of all widths, and later ones may all be alike."""
        for fit in self._fits.values():
            fit.settle()

    def knows(self, *tiers: str) -> bool:
        """Whether there were enough passes of all of these tiers."""
        return all(tier in self._fits and self._fits[tier].passes >= MIN_PASSES for tier in tiers)

    def save(self) -> None:
        """Write the file for the next process; a folder that cannot be written to is ignored."""
        if self.path is None:
            return
        passes = {tier: fit.saved() for tier, fit in self._fits.items()}
        layers = {case: asdict(found) for case, found in self.layers.items()}
        saved = {"passes": passes, "shares": self.acceptance.sums, "layers": layers}
        fresh = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps(saved), encoding="utf-8")
            fresh.replace(self.path)
        except OSError:
            with suppress(OSError):
                fresh.unlink()


def _read(path: Path | None) -> Memory:
    """The file's contents; nothing if it cannot be read, as all of it can be learnt again."""
    if path is None:
        return {}, AcceptanceHistory(), {}
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        fits = {
            str(tier): PassFit(_numbers(sums, 2, 4, 5), _numbers(lasting, 4, 5), int(passes))
            for tier, (sums, lasting, passes) in saved["passes"].items()
        }
        sums = {str(key): _numbers(pair, 2).tolist() for key, pair in saved["shares"].items()}
        layers = {str(case): Finding.read(found) for case, found in saved["layers"].items()}
        return fits, AcceptanceHistory(sums), layers
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError, np.linalg.LinAlgError):
        return {}, AcceptanceHistory(), {}


def _numbers(saved: Any, *shape: int) -> np.ndarray:
    """An array of this shape, finite and nowhere negative. Raises ValueError."""
    array = np.array(saved, float).reshape(shape)
    if not (np.isfinite(array).all() and (array >= 0).all()):
        raise ValueError("not a sum of observations")
    return array


Memory = tuple[dict[str, PassFit], AcceptanceHistory, Findings]


def costs_path(models: list[str], device: torch.device, dtype: torch.dtype) -> Path | None:
    """The path of the file for some models on a device of this machine, in the cache folder of XDG.

    Its name has the device, the level of the kernels and the dtype; its digest these, the version, the machine, its
    threads and the models. None for a user without a home folder.
    """
    native = native_loader.native if device.type == "cpu" else None
    level, threads = (native.level(), native.threads()) if native else ("torch", torch.get_num_threads())
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    names = [kind, level, str(dtype).removeprefix("torch.")]
    try:  # kernels of another version may be faster, and its file may have another form
        installed = version("triforce")
    except PackageNotFoundError:  # run from a folder
        installed = ""
    about = [*models, *names, installed, platform.node(), platform.machine(), str(threads)]
    key = hashlib.sha256("\n".join(about).encode()).hexdigest()[:16]
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return cache / "triforce" / f"costs-{re.sub(r'[^a-z0-9]+', '-', '-'.join(names).lower())}-{key}.json"
