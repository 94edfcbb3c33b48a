"""`triforce serve`: OpenAI's HTTP interface in front of an engine.

Its modules import one way, in the order that docs/data/layers.toml gives.
"""
