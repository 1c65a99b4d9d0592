"""demur paper study adaptive, distortion, probes and theory: the paper's measurements of a run."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from demur.cli.app import AsJson, DataFolder, Device, Engine, FirstN, check_finite
from demur.cli.evaluate import (
    RunName,
    attack_and_report,
    available_protocols,
    check_finished,
    load_run,
    load_run_by_rank,
    parse_protocols,
    score_run,
)
from demur.errors import BadInput
from demur.paper import check_svg_file

if TYPE_CHECKING:
    from demur.evaluate import LoadedRun, Protocol, RecordOptions
    from demur.paper.adaptive import AdaptivePlan, AdaptiveResults

study_app = typer.Typer(
    name="study",
    help="Run a study of the paper on a run, or compare recipes.\n\n"
    "Example: demur paper study theory digits-pgdat-rr",
    no_args_is_help=True,
)


@study_app.command()
def adaptive(
    run: RunName,
    protocol: Annotated[str, typer.Option(help="paper, deploy or both.")] = "both",
    objectives: Annotated[
        str | None, typer.Option(help="Names, such as ce-log-score,con-rr.", show_default="all")
    ] = None,
    etas: Annotated[str, typer.Option(help="Weights of the rejector's term.")] = (
        "0.1,0.3,1,3,10,30,100"
    ),
    steps: Annotated[int, typer.Option(help="Steps of each attack.")] = 500,
    restarts: Annotated[int, typer.Option(help="Restarts of each attack.")] = 10,
    n: FirstN = None,
    as_json: AsJson = False,
    device: Device = "auto",
    data: DataFolder = None,
    engine: Engine = "auto",
) -> None:
    """Attack the rejector with every adaptive objective of the paper at every weight eta.

    paper: one record per objective and eta. deploy: one record of the worst case of each image.

    Example: demur paper study adaptive digits-pgdat-rr --steps 50 --restarts 2
    """
    from demur.distributed import current
    from demur.evaluate import RecordOptions
    from demur.paper.adaptive import AdaptivePlan, show_adaptive

    protocols = parse_protocols(protocol)
    with load_run_by_rank(run, device, data, engine) as loaded:
        chosen = None if objectives is None else [name.strip() for name in objectives.split(",")]
        plan = AdaptivePlan.of(loaded.run.recipe, chosen, _parse_numbers(etas), steps, restarts)
        if chosen is None and loaded.run.recipe.method.head.attack_objective() is None:
            typer.echo("demur: without L_RR: no second output is trained with it", err=True)
        results = _evaluate(loaded, plan, RecordOptions(n=n), protocols)
        if not current().is_leader:
            return
    if as_json:
        typer.echo(json.dumps(results.as_json(), indent=2))
    else:
        show_adaptive(results)


def _evaluate(
    loaded: "LoadedRun",
    plan: "AdaptivePlan",
    options: "RecordOptions",
    protocols: tuple["Protocol", ...],
) -> "AdaptiveResults":
    """Return the results of the protocols; records that exist are read, the others are made."""
    from demur.evaluate import RejectorEvaluation
    from demur.paper.adaptive import AdaptiveResults, trials
    from demur.recipes import attack as attack_named

    evaluation = RejectorEvaluation.of(loaded, rejectors=plan.rejectors, records=[])
    protocols = available_protocols(evaluation, protocols)
    make = partial(attack_and_report, loaded, options=options)
    plain = evaluation.score_record(
        make(plan.baseline_label, attack_named(plan.baseline_label, plan.recipe))
    )
    tried = trials(plan, make, evaluation) if "paper" in protocols else []
    worst = (
        evaluation.score_record(make(plan.worst_label, plan.worst))
        if "deploy" in protocols
        else None
    )
    return AdaptiveResults(plan.recipe.head_rejector[0], plain, tried, worst)


def _parse_numbers(text: str) -> list[float]:
    """Return the numbers of a comma-separated list; raise BadInput for anything else."""
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise BadInput(f"--etas is {text!r}; give numbers, such as --etas 0.1,1,10") from None


@study_app.command()
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

    Example: demur paper study distortion digits-pgdat-rr --n 100
    """
    from demur.attacks import Clean
    from demur.distributed import current
    from demur.evaluate import RecordOptions
    from demur.paper.studies import (
        default_attacks,
        distances,
        distortion_attack,
        distortion_verdicts,
        show_distances,
    )

    with load_run_by_rank(run, device, data, engine) as loaded:
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


@study_app.command()
def probes(
    run: RunName, as_json: AsJson = False, device: Device = "auto", data: DataFolder = None
) -> None:
    """Fit probes that know the labels to the outputs of every test record of a run.

    They estimate what a rejector with the same inputs could reach.

    Example: demur paper study probes digits-pgdat-rr
    """
    from demur.paper.studies import probe_scores, probe_sentence, why_unprobed
    from demur.report.terminal import show_scores, terminal

    evaluation, scored = score_run(load_run(run, device, data))
    probed = []
    for record in (entry.record for entry in scored):
        if reason := why_unprobed(record):
            where = f"{record.label} (n={len(record.y)})"
            typer.echo(f"demur: {where} without probes: {reason}", err=True)
        else:
            probed.append(evaluation.score_record(record, probe_scores(record)))
    if as_json:
        rows = [row.to_json() for one in probed for row in one.rows if row.protocol == "paper"]
        typer.echo(json.dumps({"rows": rows}, indent=2))
        return
    show_scores(probed, ["paper"])
    for entry in probed:
        terminal().print(probe_sentence(entry), soft_wrap=True)


@study_app.command()
def theory(
    run: RunName,
    gamma: Annotated[
        list[float] | None,
        typer.Option(
            callback=check_finite,
            help="A confidence threshold; repeat for several.",
            show_default="0.55 0.6 0.7 0.8 0.9",
        ),
    ] = None,
    rho: Annotated[
        float, typer.Option(callback=check_finite, help="The rounding error of Theorem 2.")
    ] = 0.01,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", "-o", callback=check_svg_file, help="Also draw a figure into this SVG file."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the paper's theorems on every test record of a run; needs neither weights nor data.

    Example: demur paper study theory digits-pgdat-rr --gamma 0.7 --gamma 0.9
    """
    from demur.paper.theory import GAMMAS
    from demur.paper.theory import theory as theory_of
    from demur.paper.theory_report import show_theory, write_figure
    from demur.runs import Run

    opened = Run.open(run)
    if opened.recipe.has_rectifier:  # without one, more training does not help
        check_finished(opened)
    report = theory_of(opened, tuple(gamma or GAMMAS), rho)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        show_theory(report)
    if out:
        write_figure(report, opened, Path(out))
    if report.violations:
        typer.echo(
            f"demur: {report.violations} cases contradict a theorem: a bug in demur", err=True
        )
        raise typer.Exit(1)
