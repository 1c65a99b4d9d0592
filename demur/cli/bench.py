"""demur bench."""

import json
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from demur.cli.app import AsJson, Device, app, split_names
from demur.errors import BadInput
from demur.files.output_paths import is_stream, output_file

if TYPE_CHECKING:
    from demur.training.engine_check import Reports

TIMINGS = {"eager", "plain", "fast", "eval", "overhead", "large", "attack"}  # of the script
OutFile = Annotated[
    str | None,
    typer.Option(
        "--out", "-o", callback=output_file("json"), help="Also write the report to this JSON file."
    ),
]


@app.command(context_settings={"allow_extra_args": True})
def bench(
    ctx: typer.Context,
    check: Annotated[bool, typer.Option("--check", hidden=True)] = False,
    only: Annotated[
        str, typer.Option(help="Some frameworks, heads and precisions, such as pgdat,rr,fp32.")
    ] = "",
    steps: Annotated[int | None, typer.Option(hidden=True)] = None,
    out: OutFile = None,
    as_json: AsJson = False,
    device: Device = "auto",
) -> None:
    """Check that the fast engine trains the same weights as the plain engine on this machine.

    Example: demur bench --only pgdat,rr -o check.json
    """
    from demur.cli.progress import on_message
    from demur.numerics import device_by_name

    names = split_names(only)
    if ctx.args or steps is not None or (not check and TIMINGS.intersection(names)):
        words = [word for word in sys.argv[2:] if word != "--check"]
        script = shlex.join(["python", "benchmarks/speed.py", *words])
        raise BadInput(
            f"this command only compares the engines; to time them in a checkout, run {script}"
        )
    report = _run_check(device_by_name(device), on_message, names, out)
    print_report(report, _show_check, out, as_json)
    if not (report["noise_is_equal"] and all(pair["holds"] for pair in report["pairs"])):
        typer.echo(
            "demur: the fast engine differs from the plain one; use --engine plain", err=True
        )
        raise typer.Exit(1)


def print_report(
    report: dict[str, Any],
    show: Callable[[dict[str, Any]], None],
    out: str | None,
    as_json: bool,
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
    from demur.files.atomic import write_text

    write_text(Path(out), _text(report) + "\n")


def _run_check(
    device: Any, on_message: Any, only: tuple[str, ...], out: str | None
) -> dict[str, Any]:
    """Return the equality check; it is stored after every pair and resumes where it was stopped."""
    from demur.training.engine_check import check

    compiler: Any = "inductor" if device.type == "cuda" else "aot_eager"
    return check(device, compiler, on_message, only, open_reports(out, "pairs"))


def open_reports(out: str | None, parts: str) -> "Reports":
    """Return a report that is written part by part; parts that the file holds are not redone."""
    from demur.training.engine_check import Reports

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


def _show_check(report: dict[str, Any]) -> None:
    """Print one line per pair of engines."""
    for pair in report["pairs"]:
        distance, in_one_step = pair["distance_to_plain"], pair["distance_in_one_step"]
        verdict = "same" if pair["holds"] else "DIFFERENT"
        how = "captured" if pair["captured"] else "eager"
        typer.echo(
            f"{verdict:9} {pair['precision']}  distance {distance:.1e} of {pair['tolerance']:.1e}, "
            f"in one step {in_one_step:.1e} of {pair['tolerance_in_one_step']:.1e}, "
            f"{how}: {pair['framework']}, {pair['head']} {pair['wrapped']} {pair['failure']}"
        )
    typer.echo(f"noise is the same on CPU and device: {report['noise_is_equal']}")
