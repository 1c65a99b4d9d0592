"""demur compare and demur sweep: tables over pairs of records, and over recipes and seeds."""

import json
from typing import Annotated

import typer

from demur.cli.app import (
    DataFolder,
    Device,
    TableFormat,
    app,
    check_finite,
    rejectors_option,
    unset,
)
from demur.cli.evaluate import RunName, load_run


@app.command()
def compare(
    run: RunName,
    attacks: Annotated[
        list[str], typer.Argument(metavar="ATTACK [ATTACK]", help="Stored attacks, by their names.")
    ],
    rejector: Annotated[
        list[str] | None, rejectors_option("One, or two as A,B, at the same TPR")
    ] = None,
    against: Annotated[str | None, unset("Another run, for a comparison of nets.")] = None,
    tpr: Annotated[
        float, typer.Option(callback=check_finite, help="Of the thresholds, on clean cal images.")
    ] = 0.95,
    split: Annotated[str, typer.Option(help="fit, val, cal or test.")] = "test",
    form: TableFormat = "text",
    device: Device = "auto",
    data: DataFolder = None,
) -> None:
    """Compare two attacks, two rejectors or two nets image by image, from stored records.

    Example: demur compare digits-pgdat-rr pgd-20 adaptive --rejector R-Con
    """
    from demur.evaluate import compare as compare_records
    from demur.report import terminal

    nets = [load_run(one, device, data) for one in (run, against) if one is not None]
    rows = compare_records(nets[0], attacks, rejector or (), *nets[1:], tpr=tpr, split=split)
    if form == "json":
        typer.echo(json.dumps([row.to_json() for row in rows], indent=2))
        return
    with terminal.tables_as(form):
        terminal.show_table(terminal.paired_table(rows))
