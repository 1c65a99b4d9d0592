"""demur attack, demur score and demur export --archive."""

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from demur.cli.app import (
    AsJson,
    DataFolder,
    Device,
    Engine,
    FirstN,
    TableFormat,
    Verify,
    app,
    option,
    rejectors_option,
    split_names,
)
from demur.errors import BadInput, suggestion
from demur.files.output_paths import output_folder

if TYPE_CHECKING:
    from demur.attacks import Attack
    from demur.evaluate import LoadedRun, Protocol, RecordOptions, RejectorEvaluation, ScoredRecord
    from demur.evaluate.accepted_errors import ScoredWorstCase, WorstCaseRow
    from demur.evaluate.certificates import IssuedCertificate, Retest
    from demur.rejectors import Rejector
    from demur.runs import Record, Run


NO_CAL = (
    "no cal images were held out for this run, so no threshold can be deployed; train with "
    "split=held-out, or use --protocol paper"
)
THRESHOLDS_FROM_CAL = (
    "thresholds are chosen on the cal images, so cal scores say nothing about them; use --protocol "
    "paper, or score the test images"
)
SignKey = Annotated[str | None, option("Sign with this private key (PEM).", shown="unsigned")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name in runs/.")]


@app.command()
def attack(
    run: RunName,
    attacks: Annotated[
        list[str], typer.Argument(metavar="ATTACK...", help="NAME, NAME:key=value,... or @FILE.")
    ],
    split: Annotated[str, option("fit, val, cal or test.")] = "test",
    n: FirstN = None,
    batch_size: Annotated[int | None, option("Images per batch.", shown="by device")] = None,
    keep_images: Annotated[int, option("Adversarial examples to store.")] = 256,
    keep_features: Annotated[bool, option("Store features, which many rejectors need.")] = True,
    rejector: Annotated[
        list[str] | None, rejectors_option("Aim at it, and store its scores")
    ] = None,
    device: Device = "auto",
    data: DataFolder = None,
    engine: Engine = "auto",
    verify: Verify = False,
) -> None:
    """Attack a trained run and store one record per attack; resumes where it was stopped.

    corruptions stands for the 15 corruptions of CIFAR-10-C.

    Example: demur attack digits-pgdat-rr clean pgd-20 pgd-20:eps=0.2,restarts=5
    """
    from demur.evaluate import RecordOptions
    from demur.recipes import rejectors_named
    from demur.rejectors.image_scores import image_rejectors

    with load_run_by_rank(run, device, data, engine, verify) as loaded:
        named = rejectors_named(rejector or (), loaded.run.recipe)
        own = tuple(image_rejectors(*map(loaded.fitted, named.values())))
        options = RecordOptions(split, n, batch_size, keep_images, keep_features, own)
        attack_all(loaded, attacks, options, list(named.values()))


@contextmanager
def load_run_by_rank(
    run: str, device: str, data: str | None, engine: str, verify: bool = False
) -> Iterator["LoadedRun"]:
    """Open a run in each process that torchrun started; only rank 0 prints."""
    from demur.cli.progress import silence_other_ranks
    from demur.distributed import init_distributed
    from demur.numerics import device_by_name

    with init_distributed(device_by_name(device)) as rank_device:
        silence_other_ranks()
        yield load_run(run, str(rank_device), data, engine, verify)


def load_run(
    run: str, device: str, data: str | None, engine: str = "auto", verify: bool = False
) -> "LoadedRun":
    """Open a finished run for evaluation; raise BadInput for an unfinished or damaged one."""
    from demur.cli.progress import on_message
    from demur.evaluate import LoadedRun
    from demur.numerics import device_by_name
    from demur.runs import Run

    opened = Run.open(run)
    check_finished(opened, data)
    _ = opened.checkpoint  # raises for a damaged file, before any work
    for path in opened.orphan_arrays():
        on_message(f"{path} is ignored: its metadata file {path.stem}.json is missing")
    if getattr(opened.recipe.data, "duplicates", "") == "keep":
        on_message(f"{opened.name} keeps images in several splits: test images may be trained on")
    where = Path(data) if data else None
    if verify:
        opened.recipe.data.verify(where)
    return LoadedRun(opened, device_by_name(device), where, engine, on_message)


def check_finished(run: "Run", data: str | None = None) -> None:
    """Raise BadInput for an unfinished run, with the command that resumes its training."""
    from demur.report.terminal import train_command

    if not run.trained:
        option = f" --data {shlex.quote(data)}" if data else ""
        raise run.unfinished(train_command(run) + option)


def attack_all(
    loaded: "LoadedRun", attacks: list[str], options: "RecordOptions",
    rejectors: "Sequence[Rejector]" = (),
) -> dict[str, "Record"]:  # fmt: skip
    """Make the record of each attack, by its label; wrong names raise before any work.

    An attack is aimed at each of the given rejectors, unless its text names its own.
    """
    from demur.recipes import aimed_at, attack_group
    from demur.recipes import attack as attack_named

    specs = [
        aimed
        for name in attacks
        for text in attack_group(name)
        for aimed in aimed_at(text, attack_named(text, loaded.run.recipe), rejectors)
    ]
    return {label: attack_and_report(loaded, label, spec, options) for label, spec in specs}


def attack_and_report(
    loaded: "LoadedRun", label: str, attack: "Attack", options: "RecordOptions"
) -> "Record":
    """Return the record of an attack: read where it exists, else made with a progress bar."""
    from demur.attacks import Clean
    from demur.cli.progress import CountBar, on_message
    from demur.evaluate import run_attack
    from demur.rejectors import Rejector
    from demur.report.terminal import percent
    from demur.spec import specs_in

    with CountBar(f"attack {label}", "images") as bar:
        record = run_attack(loaded, label, attack, options, bar.on_progress)
    accepts = any(isinstance(part, Rejector) for part in specs_in(attack))
    note = " before rejection; demur score shows accepted errors" * accepts
    on_message(
        f"{loaded.run.name}, {label}: {percent(record.correct.mean())}% of {len(record.y)} images "
        f"correct{note}; record {record.digest[:12]}"
    )
    if isinstance(attack, Clean):
        warn_at_chance(loaded, record)
    return record


def warn_at_chance(loaded: "LoadedRun", clean: "Record") -> None:
    """Print what to try if the predictions for clean images are not above chance."""
    from demur.calibrate import ChanceTest
    from demur.cli.progress import on_message

    classes, right = loaded.run.recipe.data.domain.classes, int(clean.correct.sum())
    test = ChanceTest.of(right, clean.y.numpy(), classes, clean.metadata["split"])
    if not test.passed:
        on_message(f"{loaded.run.name}: {test.sentence}")


@app.command()
def score(
    run: RunName,
    protocol: Annotated[str, option("paper, deploy or both.")] = "both",
    split: Annotated[str, option("test; or val, to select a rejector.")] = "test",
    show_all: Annotated[
        bool, option("Every rejector, not only Con and the head's own.", "--all")
    ] = False,
    rejector: Annotated[list[str] | None, rejectors_option("Score it too")] = None,
    form: TableFormat = "text",
    as_json: AsJson = False,
    device: Device = "auto",
    data: DataFolder = None,
    verify: Verify = False,
) -> None:
    """Score the rejectors of a run on every record, in both protocols.

    Example: demur score digits-pgdat-rr --protocol deploy --all
    """
    from demur.evaluate.certificates import retests
    from demur.recipes import rejectors_named
    from demur.report import terminal
    from demur.report.scored_runs import show_retests
    from demur.sanity import run_checks

    protocols = parse_protocols(protocol)
    recipe = (loaded := load_run(run, device, data, verify=verify)).run.recipe
    named = rejectors_named(rejector or (), recipe)
    rejectors = recipe.rejectors() | named
    evaluation, scored = score_run(loaded, rejectors, split)
    protocols = available_protocols(evaluation, protocols, split)
    worst = score_worst_cases(loaded, evaluation, split)
    records = [*(one.record for one in scored), *(one.record for one in worst)]
    certificates = retests(loaded, evaluation.scores, records)
    sanity = terminal.Sanity.of(run_checks(records, evaluation), loaded.run, records)
    worst_rows = [entry.row for entry in worst]
    if as_json or form == "json":
        entries = _as_json(scored, protocols, certificates, worst_rows) | sanity.to_json()
        typer.echo(json.dumps(entries, indent=2))
        return
    main, names = scored, [*main_rejectors(loaded), *named]
    if not show_all:
        main = [replace(s, rows=[row for row in s.rows if row.rejector in names]) for s in scored]
    hidden = sum(len(entry.rows) for entry in scored) - sum(len(entry.rows) for entry in main)
    with terminal.tables_as(form):
        terminal.show_scores(main, protocols)
        terminal.show_worst_cases(worst_rows)
        if hidden:
            terminal.terminal().print(f"{hidden} more lines of other rejectors: add --all")
        show_retests(certificates)
        terminal.show_sanity(sanity)


def main_rejectors(loaded: "LoadedRun") -> list[str]:
    """Return the names of Con and of the rejectors that the recipe's head is trained for."""
    return ["Con", *loaded.run.recipe.method.head.rejectors()]


def _as_json(
    scored: list["ScoredRecord"], protocols: tuple["Protocol", ...],
    certificates: list[tuple["IssuedCertificate", list["Retest"]]], worst: list["WorstCaseRow"],
) -> dict[str, Any]:  # fmt: skip
    return {
        "attacks": [entry.summary.to_json() for entry in scored],
        "rows": [r.to_json() for one in scored for r in one.rows if r.protocol in protocols],
        "certificates": [
            {"certificate": made.metadata, "retests": [test.to_json() for test in tests]}
            for made, tests in certificates
        ],
        "worst_case": [row.to_json() for row in worst],
    }


def parse_protocols(name: str) -> tuple["Protocol", ...]:
    """Return the protocol of that name, or both; raise BadInput for another name."""
    from demur.evaluate import PROTOCOLS

    if name == "both":
        return PROTOCOLS
    if name not in PROTOCOLS:
        known = suggestion(name, (*PROTOCOLS, "both"))
        raise BadInput(f"no protocol is called {name!r}; {known}")
    return (name,)


def available_protocols(
    evaluation: "RejectorEvaluation", asked: tuple["Protocol", ...], split: str = "test"
) -> tuple["Protocol", ...]:
    """Return the protocols that can be shown, with a warning where deploy cannot.

    deploy needs thresholds from held-out cal images and another split to score. Raises BadInput
    where deploy alone was asked for.
    """
    if (evaluation.thresholds and split != "cal") or "deploy" not in asked:
        return asked
    reason = THRESHOLDS_FROM_CAL if evaluation.thresholds else NO_CAL
    if asked == ("deploy",):
        raise BadInput(reason)
    typer.echo(f"demur: {reason}", err=True)
    return tuple(protocol for protocol in asked if protocol != "deploy")


def warn_missing_rejectors(evaluation: "RejectorEvaluation", scored: list["ScoredRecord"]) -> None:
    """Print which rejectors are not shown, and why."""
    from demur.rejectors import ImageRejector

    for reason in sorted(set(evaluation.unavailable.values())):
        names = [name for name, why in evaluation.unavailable.items() if why == reason]
        typer.echo(f"demur: without {', '.join(names)}: {reason}", err=True)
    for entry in scored:
        if missing := entry.missing_rejectors:
            where = f"{entry.summary.attack} (n={entry.summary.n})"
            reason = "the record has no features"
            if entry.record.scores_only:
                reason = "only other scores are stored"
            elif any(isinstance(evaluation.scores[n], ImageRejector) for n in missing):
                reason = "the record has not all images; make it again with demur attack --rejector"
            typer.echo(f"demur: {where} without {', '.join(missing)}: {reason}", err=True)


def _with_confidence(
    records: Sequence["Record"], evaluation: "RejectorEvaluation"
) -> list["Record"]:
    """Return the records that have confidence, which other scores are compared with.

    Print the number of the others; raise BadInput if there is no record left.
    """
    from demur.evaluate import BASELINE
    from demur.evaluate.record_scores import can_score

    known = BASELINE in evaluation.scores
    found = [r for r in records if known and can_score(evaluation.score_for(BASELINE, r), r)]
    left_out = f"{len(records) - len(found)} of {len(records)} records"
    advice = "archived without confidence; demur paper table 3 --from DIR reads them"
    if not found:
        raise BadInput(f"there is nothing to score: {left_out} are {advice}")
    if len(found) < len(records):
        typer.echo(f"demur: without {left_out}: {advice}", err=True)
    return found


def _no_record_message(run: "Run", split: str, attack: str) -> str:
    """Return the message that there is nothing to score, and what to run instead."""
    from demur.report.terminal import run_argument

    scorable = [name for name in run.recipe.data.splits if name != "fit" and run.records(name)]
    where = "" if split == "test" else f" --split {split}"
    name = shlex.quote(run_argument(run))
    ways = [f"score those of {name} images with --split {name}" for name in scorable]
    if run.has_weights or not ways:
        ways.insert(0, f"make one with demur attack {name} {attack}{where}")
    images = f"of {split} images " if scorable else ""
    return f"{run.name} has no record {images}yet; {', or '.join(ways)}"


def score_run(
    loaded: "LoadedRun", rejectors: "dict[str, Rejector] | None" = None, split: str = "test"
) -> tuple["RejectorEvaluation", list["ScoredRecord"]]:
    """Return the scorer of a run and its scored records of one split; raise BadInput for none.

    Worst-score records are not among them: `score_worst_cases` scores those.
    """
    from demur.cli.progress import CountBar
    from demur.data import OwnImages
    from demur.evaluate import RejectorEvaluation
    from demur.evaluate.accepted_errors import aimed_rejector

    found = loaded.usable_records(loaded.split_by_name(split))
    others = [record for record in found if not aimed_rejector(record)]
    if not others:
        raise BadInput(_no_record_message(loaded.run, split, "clean" if found else "pgd-20"))
    if loaded.run.has_weights and isinstance(loaded.run.recipe.data, OwnImages):
        loaded.checked_split(split)  # published images never change, and archives have none
    evaluation = RejectorEvaluation.of(loaded, rejectors=rejectors, records=found)
    records = _with_confidence(others, evaluation)
    scored = []
    with CountBar(f"score {loaded.run.name}", "records") as bar:
        bar.on_progress(0, len(records))
        for record in records:
            scored.append(evaluation.score_record(record))
            bar.on_progress(len(scored), len(records))
    warn_missing_rejectors(evaluation, scored)
    return evaluation, scored


def score_worst_cases(
    loaded: "LoadedRun", evaluation: "RejectorEvaluation", split: str = "test"
) -> list["ScoredWorstCase"]:
    """Return the figures of the worst-score records of a split; print why one has none."""
    from demur.cli.progress import on_message
    from demur.evaluate.accepted_errors import worst_cases

    return worst_cases(evaluation, loaded, loaded.usable_records(split), on_message)


@app.command("export --archive", hidden=True)
def archive(
    run: RunName,
    out: Annotated[str, option("A new folder.", "-o", "--out", callback=output_folder())],
    only: Annotated[
        str, option("Store only these scores, such as R-Con, beside Con and T-Con.")
    ] = "",
    features: Annotated[
        int | None, option("Keep the features of the first N images, and no others.", shown="none")
    ] = None,
    sign: SignKey = None,
    device: Device = "auto",
    data: DataFolder = None,
) -> None:
    """Copy a run without weights, features and images; demur score reads the copy.

    With --features the copy is a pack on which new rejectors can be fitted and scored.

    Example: demur export digits-pgdat-rr --archive -o results/digits
    """
    from demur.cli.progress import CountBar, on_message
    from demur.evaluate import archive as archive_run
    from demur.evaluate import pack

    if only and features is not None:
        raise BadInput("--only keeps scores and --features what they come from; leave out one")
    loaded = load_run(run, device, data)
    with CountBar(f"archive {loaded.run.name}", "records") as bar:
        if features is None:
            copy = archive_run(loaded, Path(out), split_names(only), bar.on_progress, sign=sign)
        else:
            copy = pack(loaded, Path(out), features, bar.on_progress, sign)
    size = sum(path.stat().st_size for path in copy.path.rglob("*") if path.is_file())
    where = "" if copy.records("test") else " --split cal"
    on_message(f"{out}: {size / 1e6:.1f} MB; demur score {shlex.quote(out)}{where} reads it")
