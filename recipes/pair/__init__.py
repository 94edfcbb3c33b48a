"""Trains the shipped target and draft from a corpus, in one resumable command: `python -m recipes.pair small`."""
