"""Acceptance of retrieval on given texts: the paper's ablations."""
