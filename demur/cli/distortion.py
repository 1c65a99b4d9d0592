"""demur distortion."""

import json
from functools import partial
from typing import Annotated

import typer

from demur.cli.app import AsJson, DataFolder, Device, Engine, FirstN, app
from demur.cli.evaluate import RunName, open_evaluator, record_of


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
    from demur.cli.progress import silence_other_ranks
    from demur.device import device_by_name
    from demur.distributed import current, init_distributed
    from demur.evaluate import AttackOptions
    from demur.evaluate.distortion import distances, distortion_attack, judged, usual
    from demur.report.distortion import show_distances

    with init_distributed(device_by_name(device)) as place:
        silence_other_ranks()
        evaluator = open_evaluator(run, str(place), data, engine)
        recipe = evaluator.run.recipe
        meant = {text: distortion_attack(text, recipe) for text in attacks or usual(recipe)}
        make = partial(record_of, evaluator, options=AttackOptions(n=n))
        before = make("clean", Clean()).correct
        found = [judged(make(text, cw), cw, evaluator.clean, before) for text, cw in meant.items()]
        if not current().is_leader:
            return
    lines = distances(found, recipe.rejectors())
    if as_json:
        typer.echo(json.dumps({"distances": [line.plain() for line in lines]}, indent=2))
    else:
        show_distances(lines)
