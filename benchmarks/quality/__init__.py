"""Quality under eviction: decoders that forget, beside one that does not."""
