"""Engine: admission, prefill and decoding of many sequences at a time, and their text."""

MAX_ROWS = 8
"""Sequences that are decoded together, where the caller sets no number. Further sequences wait."""
MAX_ITL = 0.2
"""Largest inter-token latency, in seconds, that prefill between two steps may cause."""
