"""demur verify: of stored results, and of the engines."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from demur.cli.app import AsJson, DataFolder, Device, app, split_names
from demur.errors import BadInput
from demur.files.output_paths import is_stream, output_file

if TYPE_CHECKING:
    from demur.training.engine_check import Reports

OutFile = Annotated[
    str | None,
    typer.Option(
        "--out",
        "-o",
        callback=output_file("json"),
        help="With --engine: also write this JSON file.",
    ),
]


@app.command()
def verify(
    path: Annotated[
        str | None,
        typer.Argument(help="A run, archive, guard, record or state, or a folder of these."),
    ] = None,
    n: Annotated[
        int, typer.Option("--n", help="Images of each record to attack again, with weights.", min=0)
    ] = 8,
    key: Annotated[
        str | None,
        typer.Option(help="Public key (PEM) of whoever signed it.", show_default="no signature"),
    ] = None,
    engine: Annotated[
        bool, typer.Option("--engine", help="Check the fast engine on this machine instead.")
    ] = False,
    only: Annotated[
        str, typer.Option(help="With --engine: some frameworks, heads, precisions: pgdat,rr,fp32.")
    ] = "",
    out: OutFile = None,
    as_json: AsJson = False,
    device: Device = "auto",
    data: DataFolder = None,
) -> None:
    """Check that stored results agree with each other; with --engine, that both engines do.

    Example: demur verify runs/digits-pgdat-rr --n 20
    """
    if engine == (path is not None):
        raise BadInput("give a path to verify, or --engine to compare the engines")
    if engine:
        return _verify_engine(only, out, as_json, device)
    if only or out:
        raise BadInput("--only and --out belong to --engine; leave them out")
    from demur.verification import verify as verify_path

    found = verify_path(
        str(path), n=n, key=key, device=device, data_folder=Path(data) if data else None
    )
    if as_json:
        typer.echo(_text(found.to_json()))
    for line in [*map(str, found.findings), *found.lines()] if not as_json else ():
        typer.echo(line)
    if found.findings:
        count = len(found.findings)
        typer.echo(f"demur: {count} finding{'s'[: count - 1]} in {path}", err=True)
        raise typer.Exit(2)
    return None


def _verify_engine(only: str, out: str | None, as_json: bool, device: str) -> None:
    from demur.cli.progress import on_message
    from demur.numerics import device_by_name

    report = _run_check(device_by_name(device), on_message, split_names(only), out)
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
