"""Measurements of speed: decoding modes against plain decoding, and kernels against the memory bandwidth.

A ratio compares two modes whose turns alternate in one process. It is the median over several turns, with their
spread.
"""
