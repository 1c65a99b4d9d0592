"""Reports of the scripts here: printed, and written to a JSON file part by part."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from demur.errors import BadInput
from demur.files.checked_files import write_text
from demur.files.output_paths import is_stream, output_file
from demur.progress import ignore

OutFile = Annotated[
    str | None,
    typer.Option(
        "--out", "-o", callback=output_file("json"), help="Also write the report to this JSON file."
    ),
]


@dataclass(frozen=True)
class Reports:
    """Saves a growing report and resumes from an earlier one."""

    keep: Callable[[dict[str, Any]], object] = ignore
    earlier: dict[str, Any] = field(default_factory=dict)

    def known(self, report: dict[str, Any], parts: str) -> Any:
        """The entry `parts` of the earlier report, or None if there is none.

        Raises:
            BadInput: The two reports differ in anything but `parts`.
        """
        if not self.earlier:
            return None
        header = {name: value for name, value in report.items() if name != parts}
        if names := _differing_names(header, self.earlier):
            raise BadInput(
                f"the existing report has another {', '.join(names)} and is not overwritten; "
                "name another file with --out, or delete it"
            )
        return self.earlier.get(parts)


def _differing_names(report: dict[str, Any], earlier: dict[str, Any]) -> list[str]:
    """The keys whose values differ; for nested dictionaries, the inner keys."""
    names = []
    for name, value in report.items():
        earlier_value = earlier.get(name)
        if isinstance(value, dict) and isinstance(earlier_value, dict):
            names += _differing_names(value, earlier_value)
        elif value != earlier_value:
            names.append(name)
    return names


def print_report(
    report: dict[str, Any], show: Callable[[dict[str, Any]], None], out: str | None, as_json: bool
) -> None:
    """Print the report, then write it to the file `out`: it is shown even if writing fails."""
    if as_json:
        typer.echo(_text(report))
    else:
        show(report)
    if out:
        _write(report, out)


def _text(report: dict[str, Any]) -> str:
    return json.dumps(report, indent=2)


def _write(report: dict[str, Any], out: str) -> None:
    write_text(Path(out), _text(report) + "\n")


def open_reports(out: str | None, parts: str) -> Reports:
    """Return a report that is written part by part; parts that the file holds are not redone."""
    if not out or is_stream(Path(out)):
        return Reports()  # a pipe gets the finished report only
    earlier: Any = {}
    if Path(out).is_file():
        with suppress(ValueError):
            earlier = json.loads(Path(out).read_text(encoding="utf-8"))
        if not isinstance(earlier, dict) or parts not in earlier:
            raise BadInput(f"{out} is not a report of this command; name another file with --out")
    return Reports(lambda report: _write_part(report, out), earlier)


def _write_part(report: dict[str, Any], out: str) -> None:
    """Write the report so far; print a warning and continue if that fails."""
    try:
        _write(report, out)
    except OSError as error:
        typer.echo(f"demur: {out} could not be written: {error.strerror}; continuing", err=True)
