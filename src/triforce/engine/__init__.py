"""Many sequences at a time: admission, prefill, decoding steps, and the text that comes of them."""
