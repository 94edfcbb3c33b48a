"""Engine: admission, prefill and decoding of many sequences at a time, and their text."""

MOST_ROWS = 8
"""Sequences that are decoded together. Further ones wait until one of these is done."""
MAX_ITL = 0.2
"""Largest inter-token latency, in seconds, that reading prompts between two steps may cause."""
