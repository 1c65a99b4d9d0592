"""The command line: one module per group of commands.

The modules import torch inside their functions, so that --help stays fast.
"""
