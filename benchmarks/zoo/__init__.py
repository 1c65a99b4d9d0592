"""Defences that are known to be broken, small and trained on digits, to test the sanity checks."""
