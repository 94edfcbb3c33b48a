"""Engine: admission, prefill and decoding of many sequences at a time, and the text that comes of them."""

MOST_ROWS = 8
"""Sequences that are decoded together; others wait until one of these is done."""
MAX_ITL = 0.2
"""Inter-token latency in seconds, up to which prompts are read between two steps of texts."""
