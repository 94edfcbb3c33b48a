"""One dispatch of the kernels that decoding needs. Today every call takes the torch path, on any device."""

from triforce.kernels.reference import attend, attend_causal, gather_slots

__all__ = ["attend", "attend_causal", "gather_slots"]

WIDTH_INDEPENDENT = False
"""Whether a row's result has the same bits however many rows and columns a pass has. torch does not promise it."""
