"""Triton kernels and CUDA graphs as a backend."""
