"""Kernels of EcoSpec: one folder per op, `reference.py` (pure torch) beside faster twins.

Call ops through `ecospec_kernels.dispatch`, which chooses the implementation.
"""
