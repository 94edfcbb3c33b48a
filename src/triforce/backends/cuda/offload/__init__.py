"""KV in pinned host memory, layers of which pass through a GPU."""
