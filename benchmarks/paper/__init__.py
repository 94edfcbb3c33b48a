"""The tables and figures of TriForce (Sun et al. 2024, arXiv 2404.11912) as commands, each beside the paper's figures.

python -m benchmarks.paper table2
"""
