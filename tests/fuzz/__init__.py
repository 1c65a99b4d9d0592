"""Fuzzing: random and mutated inputs for every reader, under limits of memory and time.

    python -m tests.fuzz --cases 1000 --seed 0 --only spec,json

Each case is a function of (seed, kind, number), so that a failure can be repeated.
"""
