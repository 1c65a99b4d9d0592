"""demur distortion."""

import json
from functools import partial
from typing import Annotated

import typer

from demur.cli.app import AsJson, DataFolder, Device, Engine, FirstN, app
from demur.cli.evaluate import RunName, record_of, source_of


@app.command()
def distortion(
    run: RunName,
    attacks: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ATTACK]...",
            help="NAME or NAME:key=value,...",
            show_default="C&W in both norms, normal and adaptive",
        ),
    ] = None,
    n: FirstN = None,
    as_json: AsJson = False,
    device: Device = "auto",
    data: DataFolder = None,
    engine: Engine = "auto",
) -> None:
    """How far images must be moved to be wrong, and to be wrong and accepted.

    Example: demur distortion digits-pgdat-rr --n 100
    """
    from demur.attacks import Clean
    from demur.cli.progress import quiet_unless_leading
    from demur.device import device_named
    from demur.evaluate import Order
    from demur.evaluate.distortion import distances, judged, least_change, usual
    from demur.report.distortion import show_distances
    from demur.world import current, joined

    with joined(device_named(device)) as place:
        quiet_unless_leading()
        source = source_of(run, str(place), data, engine)
        recipe = source.run.recipe
        meant = {text: least_change(text, recipe) for text in attacks or usual(recipe)}
        make = partial(record_of, source, order=Order(n=n))
        before = make("clean", Clean()).correct
        found = [judged(make(text, cw), cw, source.clean, before) for text, cw in meant.items()]
        if not current().leads:
            return
    lines = distances(found, recipe.rejectors())
    if as_json:
        typer.echo(json.dumps({"distances": [line.plain() for line in lines]}, indent=2))
    else:
        show_distances(lines)
