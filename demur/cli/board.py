"""demur leaderboard add, build and verify."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from demur.cli.app import DataFolder, Device, FirstN, app, option, unset
from demur.cli.evaluate import RunName, attack_and_report, load_run
from demur.errors import BadInput
from demur.files.output_paths import check_output_file, output_folder

board = typer.Typer(
    name="leaderboard",
    help="Compare models that may reject.\n\nExample: demur leaderboard build -o board",
    no_args_is_help=True,
)
app.add_typer(board)


@board.command()
def add(
    run: RunName,
    rejector: Annotated[str, option("The rejector that decides, such as R-Con.")],
    n: FirstN = None,
    norm: Annotated[str, option("Linf, L2 or L1, at its usual radius.")] = "Linf",
    quick: Annotated[bool, option("Fewer attacks and restarts.", "--quick")] = False,
    out: Annotated[
        str, option("Folder of the entries.", "-o", "--out", callback=output_folder())
    ] = "leaderboard",
    device: Device = "auto",
    data: DataFolder = None,
) -> None:
    """Attack a run and its rejector and write the entry; resumes where it was stopped.

    Example: demur leaderboard add digits-pgdat-small --rejector Con --n 200
    """
    from demur.attacks.balls import ball_by_name
    from demur.files.atomic import write_json
    from demur.leaderboard.entry import attack_set, make_entry
    from demur.leaderboard.site import slug
    from demur.recipes import rejectors_named

    if ":" in run:
        raise BadInput(f"{run} is a model; demur retrofit {run} data=PATH makes a run of it")
    recipe = (loaded := load_run(run, device, data)).run.recipe
    if len(named := rejectors_named(rejector, recipe)) != 1:
        raise BadInput(f"--rejector names {len(named)} rejectors; an entry has one")
    ((name, spec),) = named.items()
    ball = ball_by_name(norm, getattr(recipe.data.threat, norm.lower(), 0.0))
    path = Path(out) / f"{slug(loaded.run.name, name, ball)}.json"
    check_output_file(str(path), "json")
    attacks = attack_set(ball, spec, "cal" if "cal" in recipe.data.splits else "test", quick)
    entry = make_entry(loaded, name, spec, attacks, n, attack_and_report)
    write_json(path, entry, indent=0)
    typer.echo(f"entry: {path}")


@board.command()
def build(
    out: Annotated[str, option("The folder of the site.", "-o", "--out", callback=output_folder())],
    entries: Annotated[str, option("Folder of the entries.")] = "leaderboard",
) -> None:
    """Write the site of all entries: an index with their curves, and a page for each.

    Example: demur leaderboard build -o board
    """
    from demur.leaderboard.site import write_site

    count, faults = write_site(Path(entries), Path(out))
    typer.echo(f"site: {Path(out).resolve() / 'index.html'} ({count} entries)")
    if faults:
        raise BadInput(f"left out: {'; '.join(faults)}")


@board.command()
def verify(
    entry: Annotated[str, typer.Argument(metavar="ENTRY", help="The JSON file of an entry.")],
    n: Annotated[int, option("Images to attack again.", "--n", min=0)] = 50,
    by: Annotated[str | None, unset("Note in the entry who has verified it.", "--by")] = None,
    device: Device = "auto",
    data: DataFolder = None,
) -> None:
    """Compute the figures of an entry again, attack its first images again, and compare.

    Example: demur leaderboard verify leaderboard/digits-pgdat-small-con-linf-0.15.json
    """
    from demur.files.atomic import write_json
    from demur.leaderboard.entry import attacked_again, problems, read_entry

    content = read_entry(path := Path(entry))
    n, found = min(n, content["data"]["n"]), problems(content)
    if not found and n:
        try:
            loaded = load_run(content["net"]["name"], device, data)
        except BadInput as error:
            raise BadInput(f"{error}; with --n 0 no weights are needed") from None
        n = n if loaded.run.has_weights else 0
        found += attacked_again(content, loaded, n, attack_and_report) if n else []
    for problem in found:
        typer.echo(f"{path}: {problem}", err=True)
    if found:
        raise typer.Exit(2)
    typer.echo(f"{path}: every figure follows from its images; {n} were attacked again")
    if by:
        today = datetime.now(UTC).date().isoformat()
        content["verification"].append({"who": by, "date": today, "n": n})
        write_json(path, content, indent=0)
