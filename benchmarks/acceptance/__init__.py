"""How much of what a cheap view proposes the exact one keeps: the paper's ablations, measured on given texts."""
