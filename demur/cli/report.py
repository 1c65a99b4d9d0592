"""demur compare, sweep, report, demo and leaderboard: tables and pages about runs."""

from dataclasses import replace
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from demur.cli.app import (
    DataFolder,
    Device,
    FirstN,
    TableFormat,
    Verify,
    app,
    number,
    option,
    rejectors_option,
    unset,
)
from demur.cli.evaluate import (
    RunName,
    attack_all,
    attack_and_report,
    load_run,
    main_rejectors,
    score_run,
    score_worst_cases,
)
from demur.cli.train import train_run, with_data
from demur.errors import BadInput
from demur.files.output_paths import PAGE_OF_RUN, check_output_file, is_stream, output_folder

if TYPE_CHECKING:
    from demur.evaluate import LoadedRun
    from demur.report.scored_runs import ScoredRun


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
    from demur.report.scored_runs import score_net, sweep_entries, sweep_table
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


RunNames = Annotated[
    list[str], typer.Argument(metavar="RUN...", help="One to six run folders, or names in runs/.")
]


@app.command()
def report(
    runs: RunNames,
    out: Annotated[
        str | None,
        option(
            "The HTML file to write.",
            "--out",
            "-o",
            shown="RUN/report.html; report.html for several runs",
        ),
    ] = None,
    rejector: Annotated[list[str] | None, rejectors_option("Show it too")] = None,
    device: Device = "auto",
    data: DataFolder = None,
    verify: Verify = False,
) -> None:
    """Write one self-contained HTML page about all records of one to six runs.

    Example: demur report digits-pgdat-rr -o report.html
    """
    from demur.report.page import check_installed, write_page
    from demur.report.scored_runs import MAX_RUNS

    if len(runs) > MAX_RUNS:
        raise BadInput(f"a page shows at most {MAX_RUNS} runs; name fewer than {len(runs)}")
    check_installed()
    own = [home / run for run in runs for home in (Path(), Path("runs"))]
    check_output_file(out, "page", own)
    loaded = [load_run(run, device, data, verify=verify) for run in runs]
    path = out or str((loaded[0].run.path if len(runs) == 1 else Path()) / PAGE_OF_RUN)
    check_output_file(path, "page", own)
    results = [scored_run(one, rejector) for one in loaded]
    page = write_page(results, Path(path))
    if not is_stream(page):  # a pipe gets the page and nothing else
        typer.echo(f"page: {page.resolve()}")


def scored_run(loaded: "LoadedRun", rejectors: list[str] | None = None) -> "ScoredRun":
    """Return a run with its test records scored; raise BadInput where it has none."""
    from demur.recipes import rejectors_named
    from demur.report.scored_runs import ScoredRun

    recipe = loaded.run.recipe
    every = recipe.rejectors() | rejectors_named(rejectors or (), recipe)
    evaluation, scored = score_run(loaded, every)
    return ScoredRun(loaded, evaluation, scored, score_worst_cases(loaded, evaluation))


RECIPE = "digits-pgdat-rr"
ATTACKS = ["clean", "pgd-20", "adaptive"]
SUMMARY = """\
A net of 80 thousand weights, trained with PGD-AT + RR on 1,150 digits, measured
on 300 test images. Thresholds keep 95% of the correct predictions on 197 clean
images and are frozen before any attack. "adaptive" attacks R-Con itself."""


@app.command()
def demo(
    out: Annotated[str, option("The run folder.", callback=output_folder("run"))] = "runs/demo",
    epochs: Annotated[
        int | None, option("Train for fewer epochs.", min=1, shown="of the recipe")
    ] = None,
    device: Device = "auto",
) -> None:
    """Train, attack, calibrate and report on the embedded digits, in two minutes.

    Example: demur demo --device cpu
    """
    from demur.evaluate import RecordOptions
    from demur.recipes import recipe
    from demur.report.page import write_page
    from demur.report.scored_runs import ScoredRun
    from demur.report.terminal import show_table, verdict_table

    changes = [f"epochs={epochs}"] if epochs else []
    run = train_run(recipe(RECIPE, changes), Path(out), device, None)
    loaded = load_run(str(run.path), device, None)
    attack_all(loaded, ATTACKS, RecordOptions())
    certificate = _certificate(loaded)
    evaluation, scored = score_run(loaded)
    page = "none without the report extra: pip install 'demur[report]'"
    if find_spec("matplotlib") and find_spec("jinja2"):
        page = str(write_page([ScoredRun(loaded, evaluation, scored)], Path(out) / "report.html"))
    typer.echo(f"\n{SUMMARY}")
    names = [name for name in main_rejectors(loaded) if name != "A"]
    show_table(verdict_table(scored, names))
    typer.echo(f"{certificate}\nPage: {page}   All figures: demur score {run.path} --all")


def _certificate(loaded: "LoadedRun") -> str:
    """Return the certificate of a risk of at most 5%, or why there is none."""
    from textwrap import fill

    from demur.calibrate import Risk, Uncertified
    from demur.evaluate.certificates import issue

    try:
        certificate = issue(loaded, "R-Con", Risk(0.05))
    except Uncertified as reason:
        return fill(f"No certificate: {reason}", 80, subsequent_indent="  ")
    return f"Certificate for clean images, R-Con:\n  {certificate.metadata['sentence']}"


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
    from demur.files.checked_files import write_json
    from demur.leaderboard.entry import attack_set, make_entry, slug
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
    from demur.leaderboard.entry import write_site

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
    from demur.files.checked_files import write_json
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
