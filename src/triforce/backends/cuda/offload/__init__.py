"""KV in pinned host memory, whose layers stream through a GPU."""
