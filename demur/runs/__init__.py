"""Run folders, records and where they came from."""

from demur.runs.provenance import provenance
from demur.runs.record import Record
from demur.runs.run import Run, run_folder, runs_in

__all__ = ["Record", "Run", "provenance", "run_folder", "runs_in"]
