"""Studies: measurements of the algorithm and of other work, run in a checkout. `python -m benchmarks` lists them."""
