"""Rates of this machine for the break-even point of `info`, `demo` and `serve`: measured once, saved for all three."""

from __future__ import annotations

from triforce.bench.roofline import NUMBERS, coded_attention, type_of_products
from triforce.cli.bench.setup import measured_roofline
from triforce.planner import break_even


def measure_balances() -> None:
    """Measure how many operations this machine does while it reads a byte, per type of product, and save the rates."""
    mixes = {name: {type_of_products(False, name): 1} for name in NUMBERS}
    mixes |= {break_even.QUANTIZED_WEIGHTS: {type_of_products(True, ""): 1}}
    mixes |= {break_even.INT8_KV: coded_attention(2)}
    balances = {name: measured_roofline().balance(mix) for name, mix in mixes.items()}
    break_even.save_balances({name: value for name, value in balances.items() if value})


def require_balances() -> None:
    """Measure the rates unless a process has saved them."""
    if not break_even.saved_balances():
        measure_balances()
