"""From the corpus archives to the shipped target and draft in one resumable command: `python -m recipes.pair small`."""
