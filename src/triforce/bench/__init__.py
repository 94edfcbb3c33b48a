"""Measurements of speed: decoding modes against plain decoding, and kernels against the bandwidth of the memory.

A ratio comes from one process, from turns that take place one after another; medians of several, and their spread.
"""
