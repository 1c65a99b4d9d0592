"""demur attack and demur score."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from demur.cli.app import AsJson, DataFolder, Device, Engine, FirstN, app, names_in
from demur.cli.output_paths import checked_folder
from demur.errors import BadInput, suggestion

if TYPE_CHECKING:
    from demur.attacks import Attack
    from demur.evaluate import AttackOptions, Evaluator, Protocol, ScoredRecord, Scorer
    from demur.evaluate.certificates import IssuedCertificate, Retest
    from demur.metrics import FloatArray
    from demur.rejectors import Rejector
    from demur.runs import Record, Run


NO_CAL = (
    "no cal images were held out for this run, so no threshold can be deployed; train with "
    "split=held-out for that, or see the tables of demur score --protocol paper"
)
FROM_CAL = (
    "thresholds are chosen on cal images, which therefore say nothing about them; see --protocol "
    "paper, or score test images"
)
RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name in runs/.")]


@app.command()
def attack(
    run: RunName,
    attacks: Annotated[
        list[str], typer.Argument(metavar="ATTACK...", help="NAME, NAME:key=value,... or @FILE.")
    ],
    split: Annotated[str, typer.Option(help="fit, val, cal or test.")] = "test",
    n: FirstN = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Images at a time.", show_default="as many as suit the device"),
    ] = None,
    keep_images: Annotated[int, typer.Option(help="Attacked images to keep.")] = 256,
    keep_features: Annotated[
        bool, typer.Option(help="Keep features, which many rejectors need.")
    ] = True,
    device: Device = "auto",
    data: DataFolder = None,
    engine: Engine = "auto",
) -> None:
    """Attack a trained run and keep one record an attack; goes on where it was stopped.

    Example: demur attack digits-pgdat-rr clean pgd-20 pgd-20:eps=0.2,restarts=5
    """
    from demur.cli.progress import silence_other_ranks
    from demur.device import device_by_name
    from demur.distributed import init_distributed
    from demur.evaluate import AttackOptions

    with init_distributed(device_by_name(device)) as place:
        silence_other_ranks()
        evaluator = open_evaluator(run, str(place), data, engine)
        options = AttackOptions(split, n, batch_size, keep_images, keep_features)
        attack_all(evaluator, attacks, options)


def open_evaluator(run: str, device: str, data: str | None, engine: str = "auto") -> "Evaluator":
    """A run opened for evaluation."""
    from demur.cli.progress import say
    from demur.device import device_by_name
    from demur.evaluate import Evaluator
    from demur.runs import Run

    found = Run.open(run)
    check_finished(found, data)
    _ = found.checkpoint  # a damaged one is refused before anything else
    for path in found.orphan_arrays():
        say(f"{path} is left out, for {path.stem}.json, which tells what it is, is missing")
    where = Path(data) if data else None
    return Evaluator(found, device_by_name(device), where, engine, say)


def check_finished(run: "Run", data: str | None = None) -> None:
    """Refuse a run that was not trained to the end, with the command that goes on with it."""
    from demur.report.commands import train_command

    if not run.trained:
        place = f" --data {shlex.quote(data)}" if data else ""
        again = train_command(run) + place
        raise BadInput(f"{run.path} is not trained to the end; go on with it by: {again}")


def attack_all(evaluator: "Evaluator", attacks: list[str], options: "AttackOptions") -> None:
    """Make the record of each attack; names are checked before any work."""
    from demur.recipes import attack as attack_named

    meant = [(text, attack_named(text, evaluator.run.recipe)) for text in attacks]
    for label, spec in meant:
        record_of(evaluator, label, spec, options)


def record_of(
    evaluator: "Evaluator", label: str, attack: "Attack", options: "AttackOptions"
) -> "Record":
    """The record of an attack, found or made with a progress bar."""
    from demur.cli.progress import CountBar, say
    from demur.evaluate import run_attack
    from demur.report.text import percent

    with CountBar(f"attack {label}", "images") as bar:
        record = run_attack(evaluator, label, attack, options, bar.watch)
    say(
        f"{label}: {percent(record.correct.mean())}% of {len(record.y)} answered rightly; "
        f"record {record.digest[:12]}"
    )
    return record


@app.command()
def score(
    run: RunName,
    protocol: Annotated[str, typer.Option(help="paper, deploy or both.")] = "both",
    split: Annotated[str, typer.Option(help="test; or val, to choose a rejector by.")] = "test",
    sweep: Annotated[
        bool, typer.Option("--sweep", help="KD and LID at all settings the paper tried.")
    ] = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="Every rejector, not only Con and the head's own.")
    ] = False,
    oracle_probes: Annotated[
        bool, typer.Option("--oracle-probes", help="Also fit probes that are given the labels.")
    ] = False,
    as_json: AsJson = False,
    device: Device = "auto",
    data: DataFolder = None,
) -> None:
    """Score the rejectors of a run on every record, in both protocols.

    Example: demur score digits-pgdat-rr --protocol deploy --all
    """
    from demur.evaluate.certificates import retests
    from demur.rejectors import paper_grid
    from demur.report.certificates import show_retests
    from demur.report.oracle_probes import show_oracle_probes
    from demur.report.sanity import Sanity, show_sanity
    from demur.report.text import show_scores
    from demur.sanity import checked

    asked = protocols_named(protocol)
    if oracle_probes and "paper" not in asked:
        raise BadInput(
            "a probe has no threshold to deploy; use --oracle-probes with --protocol paper"
        )
    evaluator = open_evaluator(run, device, data)
    rejectors = paper_grid(evaluator.run.recipe.data) if sweep else None
    scoring, scored = scored_run(evaluator, rejectors, split, oracle_probes)
    asked = available(scoring, asked, split)
    records = [each.record for each in scored]
    retested_certificates = retests(evaluator, scoring.scores, records)
    sanity = Sanity.of(checked(records, scoring), evaluator.run, records)
    if as_json:
        typer.echo(
            json.dumps(_plain(scored, asked, retested_certificates) | sanity.plain(), indent=2)
        )
        return
    main = scored if show_all or sweep or oracle_probes else main_rows(evaluator, scored)
    show_scores(main, asked)
    if hidden := sum(len(every.rows) for every in scored) - sum(len(some.rows) for some in main):
        typer.echo(f"{hidden} more lines of other rejectors: add --all")
    show_oracle_probes(scored)
    show_retests(retested_certificates)
    show_sanity(sanity)


def main_rejectors(evaluator: "Evaluator") -> list[str]:
    """Return the names of Con and of the rejectors that the recipe's head is trained for."""
    return ["Con", *evaluator.run.recipe.method.head.rejectors()]


def main_rows(evaluator: "Evaluator", scored: list["ScoredRecord"]) -> list["ScoredRecord"]:
    """Return the records with the rows of `main_rejectors` alone."""
    names = main_rejectors(evaluator)
    return [
        replace(record, rows=[row for row in record.rows if row.rejector in names])
        for record in scored
    ]


def _plain(
    scored: list["ScoredRecord"],
    asked: tuple["Protocol", ...],
    retested_certificates: list[tuple["IssuedCertificate", list["Retest"]]],
) -> dict[str, Any]:
    """Return scores and certificates as JSON values."""
    return {
        "attacks": [each.summary.plain() for each in scored],
        "rows": [r.plain() for each in scored for r in each.rows if r.protocol in asked],
        "certificates": [
            {"certificate": made.metadata, "retests": [line.plain() for line in lines]}
            for made, lines in retested_certificates
        ],
    }


def protocols_named(name: str) -> tuple["Protocol", ...]:
    """The protocol of that name, or both."""
    from demur.evaluate import PROTOCOLS

    if name not in (*PROTOCOLS, "both"):
        known = suggestion(name, (*PROTOCOLS, "both"))
        raise BadInput(f"no protocol is called {name!r}; {known}")
    return tuple(protocol for protocol in PROTOCOLS if name in (protocol, "both"))


def available(
    scoring: "Scorer", asked: tuple["Protocol", ...], split: str = "test"
) -> tuple["Protocol", ...]:
    """The protocols that can be shown; deploy needs held-out images, and others to be shown on."""
    if (scoring.thresholds and split != "cal") or "deploy" not in asked:
        return asked
    reason = FROM_CAL if scoring.thresholds else NO_CAL
    if asked == ("deploy",):
        raise BadInput(reason)
    typer.echo(f"demur: {reason}", err=True)
    return tuple(protocol for protocol in asked if protocol != "deploy")


def tell_of_missing(scoring: "Scorer", scored: list["ScoredRecord"]) -> None:
    """Say which rejectors are not shown, and why."""
    reasons = sorted(set(scoring.without.values()))
    for reason in reasons:
        names = [name for name, why in scoring.without.items() if why == reason]
        typer.echo(f"demur: without {', '.join(names)}: {reason}", err=True)
    for each in scored:
        if each.unseen:
            unseen, where = ", ".join(each.unseen), f"{each.summary.attack} (n={each.summary.n})"
            lack = (
                "only others were kept" if each.record.scores_only else "the record has no features"
            )
            typer.echo(f"demur: {where} without {unseen}: {lack}", err=True)


def _probes(record: "Record") -> dict[str, "FloatArray"]:
    """What probes make of a record; nothing where none can be fitted, which is said."""
    from demur.evaluate.oracle_probes import probe_scores, why_unprobed

    if reason := why_unprobed(record):
        where = f"{record.label} (n={len(record.y)})"
        typer.echo(f"demur: {where} without probes: {reason}", err=True)
        return {}
    return probe_scores(record)


def _no_record(run: "Run", split: str) -> str:
    """That there is nothing to score, and what can be done."""
    there = [each for each in run.recipe.data.splits if each != "fit" and run.records(each)]
    where = "" if split == "test" else f" --split {split}"
    ways = [f"score those of {each} images with --split {each}" for each in there]
    if run.finished or not ways:
        ways.insert(0, f"make one with demur attack {run.name} pgd-20{where}")
    images = f"of {split} images " if there else ""
    return f"{run.name} has no record {images}yet; {', or '.join(ways)}"


def scored_run(
    evaluator: "Evaluator",
    rejectors: "dict[str, Rejector] | None" = None,
    split: str = "test",
    oracle_probes: bool = False,
) -> tuple["Scorer", list["ScoredRecord"]]:
    """The run's thresholds, and every record of a split scored, if asked by probes too."""
    from demur.cli.progress import CountBar
    from demur.evaluate import Scorer

    records = evaluator.run.records(evaluator.split_by_name(split))
    if not records:
        raise BadInput(_no_record(evaluator.run, split))
    scoring = Scorer.of(evaluator, rejectors=rejectors, records=records)
    scored = []
    with CountBar(f"score {evaluator.run.name}", "records") as bar:
        for done, record in enumerate(records):
            bar.watch(done, len(records))
            scored.append(scoring.scored(record, _probes(record) if oracle_probes else {}))
        bar.watch(len(records), len(records))
    tell_of_missing(scoring, scored)
    return scoring, scored


@app.command()
def archive(
    run: RunName,
    out: Annotated[
        str,
        typer.Option(
            "-o", "--out", callback=checked_folder, help="A folder that is not there yet."
        ),
    ],
    only: Annotated[
        str, typer.Option(help="Keep no more than these scores, such as Con,R-Con.")
    ] = "",
    device: Device = "auto",
    data: DataFolder = None,
) -> None:
    """Copy a run without weights, features and images; its tables can be made from the copy.

    Example: demur archive digits-pgdat-rr -o results/digits
    """
    from demur.cli.progress import CountBar, say
    from demur.evaluate import archive as slimmed

    evaluator = open_evaluator(run, device, data)
    with CountBar(f"archive {evaluator.run.name}", "records") as bar:
        made = slimmed(evaluator, Path(out), names_in(only), bar.watch)
    size = sum(path.stat().st_size for path in made.path.rglob("*") if path.is_file())
    where = "" if made.records("test") else " --split cal"
    say(f"{out}: {size / 1e6:.1f} MB; demur score {shlex.quote(out)}{where} reads it")
