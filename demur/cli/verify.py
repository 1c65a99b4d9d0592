"""demur verify."""

import json
from pathlib import Path
from typing import Annotated

import typer

from demur.cli.app import AsJson, DataFolder, Device, app, option


@app.command()
def verify(
    path: Annotated[
        str, typer.Argument(help="A run, archive, guard, record or state, or a folder of these.")
    ],
    n: Annotated[
        int, option("Images of each record to attack again, with weights.", "--n", min=0)
    ] = 8,
    key: Annotated[
        str | None, option("Public key (PEM) of whoever signed it.", shown="no signature")
    ] = None,
    as_json: AsJson = False,
    device: Device = "auto",
    data: DataFolder = None,
) -> None:
    """Check that stored results agree with each other.

    Example: demur verify runs/digits-pgdat-rr --n 20
    """
    from demur.verification import verify as verify_path

    found = verify_path(path, n=n, key=key, device=device, data_folder=Path(data) if data else None)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    for line in [*map(str, found.findings), *found.lines()] if not as_json else ():
        typer.echo(line)
    if found.findings:
        count = len(found.findings)
        typer.echo(f"demur: {count} finding{'s'[: count - 1]} in {path}", err=True)
        raise typer.Exit(2)
