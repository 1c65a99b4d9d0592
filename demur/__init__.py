"""Adversarially robust image classifiers that may answer "don't know"."""

__version__ = "0.1.0"
