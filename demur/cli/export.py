"""demur calibrate, export and predict: from a run to something people use."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from demur.cli.app import AsJson, DataFolder, Device, Engine, Verify, app, number, option
from demur.cli.evaluate import RunName, SignKey, load_run, warn_at_chance
from demur.errors import BadInput
from demur.files.output_paths import output_file, output_folder

if TYPE_CHECKING:
    from demur.guards import Guard

Bundle = Annotated[str, typer.Argument(help="A folder that demur export wrote.")]
Tpr = Annotated[
    float | None, number("Accept at least this share of the correct predictions (0.95).")
]
Coverage = Annotated[float | None, number("Accept at least this share of all images.")]
Risk = Annotated[float | None, number("At most this share of the accepted images wrong.")]
Under = Annotated[
    str,
    option(
        "Calibrate on images attacked like this, such as worst-score; valid for it only.",
        "--under", "--attack",
    ),
]  # fmt: skip
Confidence = Annotated[float, number("Confidence level of the guarantee.")]
TABLE: dict[str, Any] = {"callback": output_file("predictions")}
AcceptChance = Annotated[
    bool, option("Also write a net that is at chance level.", "--accept-chance")
]
Resize = Annotated[
    bool | None,
    option(
        "Resize images of another size, or report an error.", "--resize/--no-resize",
        shown="as the data set did",
    ),
]  # fmt: skip
Rejector = Annotated[
    str | None,
    option(
        "A name of demur score, or your own MODULE:CLASS; Con+R-Con sets both thresholds.",
        shown="the score of the head, Con without one",
    ),
]


@app.command()
def calibrate(
    run: RunName, risk: Risk = None, tpr: Tpr = None, coverage: Coverage = None,
    confidence: Confidence = 0.95, rejector: Rejector = None, under: Under = "clean",
    as_json: AsJson = False, device: Device = "auto", data: DataFolder = None,
    engine: Engine = "auto", verify: Verify = False,
) -> None:  # fmt: skip
    """Choose thresholds with a statistical guarantee on the cal images and store the certificate.

    Example: demur calibrate digits-pgdat-rr --risk 0.05 --rejector Con+R-Con
    """
    from demur.evaluate.certificates import attack_under, issue
    from demur.guards.calibration import guarantee_of
    from demur.report.certificates import certificate_text

    if (risk, tpr, coverage).count(None) != 2:
        raise BadInput("give exactly one of --risk, --tpr and --coverage, such as --risk 0.05")
    guarantee = guarantee_of(tpr, coverage, risk)
    loaded = load_run(run, device, data, engine, verify)
    name = rejector or next(iter(loaded.run.recipe.method.head.rejectors()), "Con")
    label, spec = attack_under(loaded, under, name)
    certificate = issue(loaded, name, guarantee, confidence, label, spec)
    warn_at_chance(loaded, loaded.clean("cal"))
    as_text = json.dumps(certificate.metadata, indent=2) if as_json else None
    typer.echo(as_text or certificate_text(certificate))


@app.command()
def export(
    run: RunName,
    out: Annotated[
        str | None,
        option("The folder.", "-o", "--out", callback=output_folder("guard"), shown="guards/RUN"),
    ] = None,
    rejector: Rejector = None,
    tpr: Tpr = None,
    coverage: Coverage = None,
    risk: Risk = None,
    confidence: Confidence = 0.95,
    under: Under = "clean",
    resize: Resize = None,
    accept_chance: AcceptChance = False,
    onnx: Annotated[bool, option("Write model.onnx too.", "--onnx")] = False,
    name: Annotated[str | None, option("Name of the guard.", shown="that of the run")] = None,
    form: Annotated[str, option("guard, or triton: a model repository.", "--format")] = "guard",
    sign: SignKey = None,
    device: Device = "auto",
    data: DataFolder = None,
    verify: Verify = False,
) -> None:
    """Write a run as a guard: weights, thresholds and a model card; --archive copies its records.

    Later: demur guard info | diff | recalibrate.

    Example: demur export digits-pgdat-rr --risk 0.05 --onnx -o guard
    """
    from demur.files.signatures import check_private_key
    from demur.guards import Guard
    from demur.guards.bundle import check_target
    from demur.guards.triton import export_triton
    from demur.runs import Run

    if form not in ("guard", "triton"):
        raise BadInput(f"--format {form} is unknown; give guard or triton")
    check_private_key(sign)
    folder = Path(out) if out else Path("guards") / Run.open(run).name
    check_target(folder)
    loaded = load_run(run, device, data, verify=verify)
    guard = Guard.from_run(
        loaded, rejector=rejector, tpr=tpr, coverage=coverage, risk=risk, confidence=confidence,
        resize=resize, under=under, accept_chance=accept_chance,
    )  # fmt: skip
    guard = replace(guard, name=name or guard.name)
    if form == "triton":
        folder = export_triton(guard, folder)
    else:
        guard.save(folder, onnx=onnx, sign=sign)
    report_guard(guard, folder)


def report_guard(guard: "Guard", folder: Path) -> None:
    """Print how the thresholds of a new guard were chosen, and what it reaches."""
    from demur.cli.progress import on_message

    on_message(f"{folder}: {guard.identity}: {guard.guarantee_text}. {guard.summary}")
    if guard.certificate is None:
        on_message(f"the thresholds have no guarantee: {guard.calibration['shortfall']}")


@app.command()
def predict(
    bundle: Bundle,
    images: Annotated[
        list[str], typer.Argument(help="Image files, folders (searched below) and globs.")
    ],
    out: Annotated[
        str | None, option("The file.", "-o", "--out", shown="standard output", **TABLE)
    ] = None,
    rejected: Annotated[
        str | None,
        option("A second file, of the rejected and unreadable images only.", shown="none", **TABLE),
    ] = None,
    as_json: Annotated[bool, option("Write JSON instead of CSV.", "--json")] = False,
    device: Device = "auto",
) -> None:
    """Classify image files with a guard; a damaged file is reported and the rest go on.

    The suffix of the file is its format: .csv, .json or .parquet. The same command resumes.

    Example: demur predict guard photos/ "more/*.png" -o predictions.csv
    """
    from demur.cli.progress import CountBar, on_message
    from demur.guards import Guard
    from demur.guards.predictions import find_images, write_predictions

    guard = Guard.load(bundle, device=device)
    paths = find_images(images)
    with CountBar("predict", "images") as bar:
        counts = write_predictions(
            guard, paths, Path(out) if out else None, bar.on_progress,
            Path(rejected) if rejected else None, as_json, on_message,
        )  # fmt: skip
    read = len(paths) - counts["unreadable"]
    on_message(f"{counts['accepted']} of {read} predictions accepted")
    if read == 0:
        raise BadInput("no image could be read; give image files")
