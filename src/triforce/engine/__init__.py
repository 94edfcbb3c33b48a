"""Engine: admission, prefill and decoding of many sequences at a time, and the text that comes of them."""
