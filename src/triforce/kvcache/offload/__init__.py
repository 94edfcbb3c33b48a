"""KV pages in host memory or in a file: how many stay, and where the others lie."""
