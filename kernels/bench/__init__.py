"""Benchmarks of the kernels: a registry of cases (`registry`), a gate before the clock (`measure`), computed floors (`floors`)."""
