"""demur bench and demur bench attacks."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from demur.cli.app import AsJson, DataFolder, Device, FirstN, app, names_in
from demur.cli.evaluate import RunName, open_evaluator
from demur.cli.output_paths import checked_file
from demur.errors import BadInput, suggestion

if TYPE_CHECKING:
    from demur.bench.reports import Reports

USUAL = "speed"  # what is measured where nothing else is named


class UsuallySpeed(TyperGroup):
    """A group of commands one of which need not be named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The words, with the usual command before them if they name none."""
        named = bool(args) and args[0] in self.commands
        if args and not named and not args[0].startswith(("-", "@")):
            _check_recipe(args[0], list(self.commands))
        return super().parse_args(ctx, args if named else [USUAL, *args])


def _check_recipe(word: str, commands: list[str]) -> None:
    """Refuse a word that names neither a recipe nor a bench."""
    from demur.recipes import RECIPES

    if word not in RECIPES:
        known = suggestion(word, [*commands, *RECIPES])
        raise BadInput(f"no bench or recipe is called {word!r}; {known}")


bench_app = typer.Typer(
    name="bench",
    cls=UsuallySpeed,
    help="Measure this machine: our engines beside a plain eager loop, our attacks beside peers'.",
)
app.add_typer(bench_app)
OutFile = Annotated[
    str | None,
    typer.Option(
        "--out", "-o", callback=checked_file, help="Also write the report to this JSON file."
    ),
]


@bench_app.command(USUAL)
def bench(
    recipe: Annotated[
        str | None,
        typer.Argument(help="A recipe.", show_default="cifar10-pgdat-rr; digits on a CPU"),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Prove that the fast step is the plain step.")
    ] = False,
    only: Annotated[
        str,
        typer.Option(
            help="Some of: eager,plain,fast,eval,overhead,large,attack; "
            "with --check frames, heads and precisions: pgdat,rr,fp32."
        ),
    ] = "",
    steps: Annotated[int, typer.Option(min=3, help="Fast steps a measurement takes.")] = 100,
    out: OutFile = None,
    as_json: AsJson = False,
    device: Device = "auto",
) -> None:
    """Measure this machine: our engines beside a plain eager loop; or check their equality.

    demur bench attacks RUN compares our attacks with other libraries', demur bench rejection RUN
    holds the ensemble against models that refuse beside simpler attacks.

    Example: demur bench cifar10-pgdat-rr --only fast,attack
    """
    from demur.cli.progress import say
    from demur.device import device_by_name

    place = device_by_name(device)
    names = names_in(only)
    if check:
        report = _checked(place, say, names, out)
    else:
        report = _measured(recipe, place, names, steps, say)
    tell(report, _show_check if check else _show_speed, out, as_json)
    if check and not (report["noise_is_equal"] and all(p["holds"] for p in report["pairs"])):
        typer.echo("demur: the fast engine is not the plain one here; use --engine plain", err=True)
        raise typer.Exit(1)


@bench_app.command()
def attacks(
    run: RunName,
    n: FirstN = None,
    only: Annotated[
        str, typer.Option(help="Some of the attacks in the table, by name: autoattack,cw-l2.")
    ] = "",
    out: OutFile = None,
    as_json: AsJson = False,
    device: Device = "auto",
    data: DataFolder = None,
) -> None:
    """Compare our attacks with pyautoattack's, torchattacks' and foolbox's on a trained run.

    Example: demur bench attacks digits-pgdat-rr --only autoattack,cw-l2 -o attacks.json
    """
    from demur.bench.peer_attacks import compare_attacks, ground
    from demur.bench.peer_pairs import pairs_by_name
    from demur.cli.progress import say
    from demur.evaluate import AttackOptions
    from demur.report.peer_attacks import show_peer_attacks

    pairs = pairs_by_name(names_in(only))
    evaluator = open_evaluator(run, device, data)
    report = compare_attacks(
        evaluator, evaluator.images(AttackOptions(n=n)), pairs, ground(evaluator), say
    )
    tell(report, show_peer_attacks, out, as_json)


def tell(
    report: dict[str, Any],
    show: Callable[[dict[str, Any]], None],
    out: str | None,
    as_json: bool,
) -> None:
    """Print the report, then write it if a file is named: where that fails, it has been seen."""
    if as_json:
        typer.echo(_text(report))
    else:
        show(report)
    if out:
        _write(report, out)


def _text(report: dict[str, Any]) -> str:
    return json.dumps(report, indent=2)


def _write(report: dict[str, Any], out: str) -> None:
    from demur.runs.files import write_text

    write_text(Path(out), _text(report) + "\n")


def _checked(device: Any, say: Any, only: tuple[str, ...], out: str | None) -> dict[str, Any]:
    """The check, kept after every pair and gone on with where it was stopped."""
    from demur.bench.check import check

    compiler: Any = "inductor" if device.type == "cuda" else "aot_eager"
    return check(device, compiler, say, only, reports_at(out, "pairs"))


def reports_at(out: str | None, parts: str) -> "Reports":
    """A report that grows in a file, if one is named, which may hold some of its parts already."""
    from demur.bench.reports import Reports
    from demur.runs.files import is_stream

    if not out or is_stream(Path(out)):
        return Reports()  # a pipe takes the whole alone
    earlier: Any = {}
    if Path(out).is_file():
        with suppress(ValueError):
            earlier = json.loads(Path(out).read_text(encoding="utf-8"))
        if not isinstance(earlier, dict) or parts not in earlier:
            raise BadInput(f"{out} is not such a report; name another file with --out")
    return Reports(lambda report: _keep(report, out), earlier)


def _keep(report: dict[str, Any], out: str) -> None:
    """Write what there is so far; where that fails the work goes on."""
    try:
        _write(report, out)
    except OSError as error:
        typer.echo(f"demur: {out} could not be written: {error.strerror}; going on", err=True)


def _measured(
    recipe: str | None, device: Any, only: tuple[str, ...], steps: int, say: Any
) -> dict[str, Any]:
    from demur.bench.speed import ON_CPU, ROWS, speed
    from demur.recipes import recipe as recipe_named

    on_gpu = device.type == "cuda"
    chosen = recipe or ("cifar10-pgdat-rr" if on_gpu else "digits-pgdat-rr")
    return speed(recipe_named(chosen), device, steps, only or (ROWS if on_gpu else ON_CPU), say)


def _show_speed(report: dict[str, Any]) -> None:
    from demur.report.speed import show_speed

    show_speed(report)


def _show_check(report: dict[str, Any]) -> None:
    for pair in report["pairs"]:
        verdict = "same" if pair["holds"] else "DIFFERENT"
        how = "captured" if pair["captured"] else "eager"
        typer.echo(
            f"{verdict:9} {pair['precision']}  distance {pair['distance_to_plain']:.1e} of {pair['tolerance']:.1e}, "
            f"in one step {pair['distance_in_one_step']:.1e} of {pair['tolerance_in_one_step']:.1e}, "
            f"{how}: {pair['framework']}, {pair['head']} {pair['wrapped']} {pair['failure']}"
        )
    typer.echo(f"noise is the same on CPU and device: {report['noise_is_equal']}")
