"""demur compare and demur sweep: tables over pairs of records, and over recipes and seeds."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from demur.cli.app import (
    DataFolder,
    Device,
    FirstN,
    TableFormat,
    app,
    number,
    option,
    rejectors_option,
    unset,
)
from demur.cli.evaluate import RunName, attack_all, load_run
from demur.cli.train import train_run, with_data
from demur.errors import BadInput


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
    tpr: Annotated[float, number("Of the thresholds, on clean cal images.")] = 0.95,
    split: Annotated[str, option("fit, val, cal or test.")] = "test",
    form: TableFormat = "text",
    device: Device = "auto",
    data: DataFolder = None,
) -> None:
    """Compare two attacks, two rejectors or two nets image by image, from stored records.

    Example: demur compare digits-pgdat-rr pgd-20 adaptive --rejector R-Con
    """
    from demur.evaluate import compare as compare_records
    from demur.report import terminal

    net = load_run(run, device, data)
    other = load_run(against, device, data) if against is not None else None
    rows = compare_records(net, attacks, rejector or (), other, tpr, split)
    with terminal.tables_as(form):
        terminal.show_table(terminal.paired_table(rows))


@app.command()
def sweep(
    recipes: Annotated[
        list[str], typer.Argument(metavar="RECIPE...", help="Names of recipes, or @FILE.")
    ],
    settings: Annotated[
        list[str] | None, unset("Values to try, as KEY=VALUE,VALUE; may be repeated.", "--set")
    ] = None,
    seeds: Annotated[int, option("Trainings per recipe, seeds 0, 1, ...", min=1)] = 1,
    attack: Annotated[
        list[str] | None, option("Attack on each net.", shown="clean and pgd-20")
    ] = None,
    rejector: Annotated[list[str] | None, rejectors_option("Score it too")] = None,
    n: FirstN = None,
    form: TableFormat = "text",
    device: Device = "auto",
    data: DataFolder = None,
) -> None:
    """Train, attack and score recipes with several seeds, in one table; resumes where it stopped.

    Each net has a folder in runs/, named after its recipe and the digest of its settings.

    Example: demur sweep digits-pgdat-rr @mine.txt --set method.tau=0.25,0.5 --seeds 3
    """
    from demur.cli.progress import on_message
    from demur.evaluate import RecordOptions
    from demur.recipes import attack as attack_named
    from demur.recipes import attack_group
    from demur.report import terminal
    from demur.report.sweep import score_net, sweep_entries, sweep_table
    from demur.runs import run_folder

    entries, texts = sweep_entries(recipes, settings or ()), attack or ["clean", "pgd-20"]
    for (_, made), text in product(entries.values(), texts):  # wrong names raise before any work
        _ = [attack_named(one, made) for one in attack_group(text)]
    rows, missing, where = [], list[str](), Path(data) if data else None
    for (name, (source, made)), seed in product(entries.items(), range(seeds)):
        chosen = replace(made, seed=seed)
        folder = run_folder(source, chosen, changed=True)
        on_message(f"{folder.name}: {name}, seed {seed}")
        try:
            train_run(with_data(chosen, where), folder, device, where)
            loaded = load_run(str(folder), device, data)
            records = attack_all(loaded, texts, RecordOptions(n=n))
            found, warnings = score_net(name, seed, loaded, records, rejector or ())
        except BadInput as error:
            found, warnings = [], [str(error)]
            missing.append(f"{folder.name}: {error}")
        rows += found
        for sentence in warnings:
            on_message(f"{folder.name}: {sentence}")
    first, (_, made) = next(iter(entries.items()))
    if rows:
        with terminal.tables_as(form):
            terminal.show_table(sweep_table(rows, (first, made.head_rejector[0])))
    if missing:
        total = len(entries) * seeds
        raise BadInput(f"{len(missing)} of {total} nets have no results; {missing[0]}")
