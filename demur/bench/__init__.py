"""Benchmarks on the current machine: speed and equality of the engines, peer comparisons."""
