"""Processes that share a model by tensor parallelism."""
