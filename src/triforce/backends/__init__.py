"""Kernels: one interface, and a set of kernels each for PyTorch, CPUs and CUDA devices."""
