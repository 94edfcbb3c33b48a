"""Rates of this machine for the break-even of `info`, `demo` and `serve`: measured here, kept for all of them."""

from __future__ import annotations

from triforce.bench.roofline import NUMBERS, coded_attention, type_of_products
from triforce.cli.bench.setup import measured_roofline
from triforce.planner import break_even


def measure_balances() -> None:
    """Measure what operations this machine does while it reads a byte, and keep it."""
    mixes = {name: {type_of_products(False, name): 1} for name in NUMBERS}
    mixes |= {break_even.CODED_WEIGHTS: {type_of_products(True, ""): 1}}
    mixes |= {break_even.CODED_KV: coded_attention(2)}
    found = {name: measured_roofline().balance(mix) for name, mix in mixes.items()}
    break_even.save_balances({name: value for name, value in found.items() if value})


def require_balances() -> None:
    """Do so where no process has done it before."""
    if not break_even.saved_balances():
        measure_balances()
