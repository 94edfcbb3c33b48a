"""How much of what a cheap view proposes the exact one keeps: the paper's ablations, measured on text.

python -m benchmarks.acceptance --quick
"""
