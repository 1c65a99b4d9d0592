"""Run folders, the records in them, and the provenance of both."""

from demur.runs.metadata import provenance
from demur.runs.record import Record, Records
from demur.runs.run import Run, run_folder, runs_in

__all__ = ["Record", "Records", "Run", "provenance", "run_folder", "runs_in"]
