"""demur distortion."""

import json
from functools import partial
from typing import Annotated

import typer

from demur.cli.app import AsJson, DataFolder, Device, Engine, FirstN, app
from demur.cli.evaluate import RunName, attack_and_report, load_run


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
    """Measure the smallest change that makes an image wrong, and wrong and accepted.

    Example: demur distortion digits-pgdat-rr --n 100
    """
    from demur.attacks import Clean
    from demur.cli.progress import silence_other_ranks
    from demur.device import device_by_name
    from demur.distributed import current, init_distributed
    from demur.evaluate import RecordOptions
    from demur.evaluate.distortion import (
        default_attacks,
        distances,
        distortion_attack,
        distortion_verdicts,
    )
    from demur.report.distortion import show_distances

    with init_distributed(device_by_name(device)) as rank_device:
        silence_other_ranks()
        loaded = load_run(run, str(rank_device), data, engine)
        recipe = loaded.run.recipe
        specs = {
            text: distortion_attack(text, recipe) for text in attacks or default_attacks(recipe)
        }
        make = partial(attack_and_report, loaded, options=RecordOptions(n=n))
        clean_correct = make("clean", Clean()).correct
        verdicts = [
            distortion_verdicts(make(text, cw), cw, loaded.clean, clean_correct)
            for text, cw in specs.items()
        ]
        if not current().is_leader:
            return
    lines = distances(verdicts, recipe.rejectors())
    if as_json:
        typer.echo(json.dumps({"distances": [line.to_json() for line in lines]}, indent=2))
    else:
        show_distances(lines)
