"""Registers the commands of the paper."""

from demur.paper import commands_paper, commands_studies, commands_table

__all__ = ["commands_paper", "commands_studies", "commands_table"]
