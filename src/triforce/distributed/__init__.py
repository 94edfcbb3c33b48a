"""Tensor parallelism: processes that share a model."""
