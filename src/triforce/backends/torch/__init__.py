"""PyTorch's own operations as a backend: right on any device, for any dtype."""
