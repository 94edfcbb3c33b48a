"""What eviction costs: decoders that forget, beside one that does not."""
