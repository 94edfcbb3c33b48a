"""The native kernels (csrc/) as a backend."""
