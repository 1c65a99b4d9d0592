"""Run folders, records and where they came from."""

from demur.runs.provenance import code_version, provenance
from demur.runs.record import Record
from demur.runs.run import Run, run_folder

__all__ = ["Record", "Run", "code_version", "provenance", "run_folder"]
