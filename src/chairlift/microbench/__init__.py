"""Measures the kernels on this machine (`chairlift bench kernels`), and makes models of random weights to measure with.

Imports kernels and models, and of the bench only how results are reported.
"""
