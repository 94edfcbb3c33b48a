"""Measurements of speed: decoding modes against plain decoding, and kernels against the memory bandwidth.

A ratio comes from one process, from turns that alternate between what is compared: the median of several, with their
spread.
"""
