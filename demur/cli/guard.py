"""demur guard info, diff and recalibrate: a guard after its first deployment."""

import json
from pathlib import Path
from typing import Annotated

import typer

from demur.cli.app import AsJson, Device, app, option
from demur.cli.evaluate import SignKey
from demur.cli.export import AcceptChance, Bundle, Confidence, Coverage, Risk, Tpr, report_guard
from demur.errors import BadInput
from demur.files.output_paths import output_folder

guards = typer.Typer(
    name="guard",
    no_args_is_help=True,
    help="Look into a guard, compare two, choose thresholds on new images.\n\n"
    "Example: demur guard info guard",
)
app.add_typer(guards, hidden=True)  # demur export and the guides name it


@guards.command()
def info(bundle: Bundle, as_json: AsJson = False) -> None:
    """Show what a guard is: name, version, digests, thresholds, guarantee, rates."""
    from demur.guards import Guard
    from demur.guards.lifecycle import describe

    shown = describe(Guard.load(bundle))
    width = max(map(len, shown))
    lines = "\n".join(f"{name:<{width}}  {text}" for name, text in shown.items())
    typer.echo(json.dumps(shown, indent=2) if as_json else lines)


@guards.command()
def diff(
    first: Bundle,
    second: Annotated[str, typer.Argument(help="Another folder.")],
    as_json: AsJson = False,
) -> None:
    """Show what differs between two guards."""
    from demur.guards import Guard
    from demur.guards.lifecycle import differences

    found = differences(Guard.load(first), Guard.load(second))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    elif not found:
        typer.echo("both guards are equal")
    for name, texts in found.items() if not as_json else ():
        typer.echo(f"{name}\n  - {texts[0]}\n  + {texts[1]}")


@guards.command()
def recalibrate(
    bundle: Bundle,
    data: Annotated[str, option("A folder with new, clean images, one folder per class in it.")],
    out: Annotated[str, option("The new folder.", "-o", "--out", callback=output_folder())],
    risk: Risk = None,
    tpr: Tpr = None,
    coverage: Coverage = None,
    confidence: Confidence = 0.95,
    sign: SignKey = None,
    accept_chance: AcceptChance = False,
    device: Device = "auto",
) -> None:
    """Choose the thresholds of a guard anew on new images and write its next version.

    Example: demur guard recalibrate guard --data new-photos --risk 0.05 -o guard-2
    """
    from demur.cli.progress import on_message
    from demur.guards import Guard
    from demur.guards.bundle import ONNX, check_target, read_config
    from demur.guards.lifecycle import labelled_images, recalibrated

    check_target(Path(out))
    old = Guard.load(bundle, device=device)
    if old.training_images is None:
        on_message("this guard lists no training images, so they are not checked; leave them out")
    x, y, problems = labelled_images(old, Path(data))
    for problem in problems:
        on_message(f"left out: {problem}")
    new = recalibrated(old, x, y, tpr=tpr, coverage=coverage, risk=risk, confidence=confidence)
    chance = new.calibration["chance_test"]
    if not (chance["passed"] or accept_chance):
        raise BadInput(f"{chance['sentence']}; --accept-chance overrides")
    factory = read_config(Path(bundle))["model"]["factory"]
    new.save(out, factory=factory, onnx=(Path(bundle) / ONNX).exists(), sign=sign)
    on_message(f"before: {old.rule_text}; now: {new.rule_text}")
    report_guard(new, Path(out))
