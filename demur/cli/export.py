"""demur calibrate, export, predict and serve: from a run to something people use."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from demur.cli.app import (
    AsJson,
    DataFolder,
    Device,
    Engine,
    Verify,
    app,
    number,
    option,
    split_names,
)
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


@app.command()
def calibrate(
    run: RunName,
    risk: Risk = None,
    tpr: Tpr = None,
    coverage: Coverage = None,
    confidence: Confidence = 0.95,
    rejector: Annotated[
        str | None,
        option(
            "A name of demur score, or MODULE:CLASS; Con+R-Con sets both thresholds.",
            shown="the score of the head, Con without one",
        ),
    ] = None,
    under: Under = "clean",
    as_json: AsJson = False,
    device: Device = "auto",
    data: DataFolder = None,
    engine: Engine = "auto",
    verify: Verify = False,
) -> None:
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
    rejector: Annotated[
        str | None,
        option(
            "A name of demur score, or your own MODULE:CLASS.",
            shown="the score of the head, Con without one",
        ),
    ] = None,
    tpr: Tpr = None,
    coverage: Coverage = None,
    risk: Risk = None,
    confidence: Confidence = 0.95,
    class_names: Annotated[
        str, option("Names separated by commas.", shown="those of the data set")
    ] = "",
    under: Under = "clean",
    resize: Annotated[
        bool | None,
        option(
            "Resize images of another size, or report an error.",
            "--resize/--no-resize",
            shown="as the data set did",
        ),
    ] = None,
    accept_chance: Annotated[
        bool, option("Also write a net that is at chance level.", "--accept-chance")
    ] = False,
    onnx: Annotated[bool, option("Write model.onnx too.", "--onnx")] = False,
    sign: SignKey = None,
    device: Device = "auto",
    data: DataFolder = None,
    verify: Verify = False,
) -> None:
    """Write a trained run as a guard: weights, calibrated thresholds and a model card in a folder.

    Example: demur export digits-pgdat-rr --risk 0.05 --onnx -o guard
    """
    from demur.files.signatures import check_private_key
    from demur.guards import Guard
    from demur.guards.bundle import check_target
    from demur.runs import Run

    check_private_key(sign)
    opened, where = Run.open(run), Path(data) if data else None
    folder = Path(out) if out else Path("guards") / opened.name
    check_target(folder)
    if verify:
        opened.recipe.data.verify(where)
    guard = Guard.from_run(
        run, rejector=rejector, tpr=tpr, coverage=coverage, risk=risk, confidence=confidence,
        class_names=split_names(class_names) or None, resize=resize, device=device,
        data_folder=where, under=under, accept_chance=accept_chance,
    )  # fmt: skip
    guard.save(folder, onnx=onnx, sign=sign)
    report_guard(guard, folder)


def report_guard(guard: "Guard", folder: Path) -> None:
    """Print how the thresholds of a new guard were chosen, and what it reaches."""
    from demur.cli.progress import on_message

    on_message(f"{folder}: {guard.calibration['sentence']}. {guard.summary}")
    if guard.certificate is None:
        on_message(f"the thresholds have no guarantee: {guard.calibration['shortfall']}")


@app.command()
def predict(
    bundle: Bundle,
    images: Annotated[
        list[str], typer.Argument(help="Image files, folders (searched below) and globs.")
    ],
    out: Annotated[
        str | None,
        option(
            "The file.",
            "-o",
            "--out",
            callback=output_file("predictions"),
            shown="standard output",
        ),
    ] = None,
    as_json: Annotated[bool, option("Write JSON instead of CSV.", "--json")] = False,
    device: Device = "auto",
) -> None:
    """Classify image files with a guard; a damaged file is reported and the rest go on.

    Example: demur predict guard photos/ "more/*.png" -o predictions.csv
    """
    from demur.cli.progress import CountBar, on_message
    from demur.files.atomic import write_text
    from demur.guards import Guard
    from demur.guards.files import find_images, predict_files, to_csv, to_json

    guard = Guard.load(bundle, device=device)
    paths = find_images(images)
    with CountBar("predict", "images") as bar:
        rows = predict_files(guard, paths, bar.on_progress)
    text = to_json(rows) if as_json else to_csv(rows)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_text(Path(out), text)
    failed = [row for row in rows if row["error"]]
    for row in failed:
        on_message(row["error"])
    accepted = sum(bool(row["accepted"]) for row in rows)
    on_message(f"{accepted} of {len(rows) - len(failed)} predictions accepted")
    if len(failed) == len(rows):
        raise BadInput("no image could be read; give image files")


@app.command()
def serve(
    bundle: Bundle,
    host: Annotated[
        str, option("Address to listen on; 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[int, option("Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    token: Annotated[
        str | None,
        option("Bearer token that requests must carry.", envvar="DEMUR_TOKEN", shown="none"),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        option("Another name of this machine, as in its address; may be repeated."),
    ] = None,
    attack: Annotated[
        bool, option("Let the page attack an image by PGD.", "--attack/--no-attack")
    ] = True,
    max_body: Annotated[float, number("Megabytes of a request.")] = 8.0,
    max_pixels: Annotated[float, number("Megapixels of one image.")] = 16.0,
    max_images: Annotated[int, option("Images of one request.")] = 64,
    max_queue: Annotated[int, option("Images that may wait for the model.")] = 256,
    timeout: Annotated[float, number("Seconds until a request is given up.")] = 10.0,
    require_signature: Annotated[
        str | None, option("Public key (PEM) that must have signed the guard.", shown="none")
    ] = None,
    device: Device = "auto",
) -> None:
    """Serve a guard over HTTP: /predict, /health, /metrics, and a page to try it at /.

    Example: demur serve guard --port 8000
    """
    from demur.cli.progress import on_message
    from demur.guards import Guard

    try:
        from demur.serve import Settings
        from demur.serve.server import serve as serve_guard
    except ImportError as error:
        if error.name is None or error.name.startswith("demur"):
            raise
        raise BadInput(
            f"the service needs {error.name}; install it with pip install 'demur[serve]'"
        ) from None
    settings = Settings(
        max_body=round(max_body * 2**20), max_pixels=round(max_pixels * 1e6),
        max_images=max_images, max_queue=max_queue, timeout=timeout, attack=attack, token=token,
        hosts=tuple(name.lower() for name in allow_host or ()),
    )  # fmt: skip
    guard: Guard = Guard.load(bundle, device=device, public_key=require_signature)
    is_open = host not in ("127.0.0.1", "::1", "localhost") and token is None

    def on_ready(address: str) -> None:
        on_message(f"serving at {address}")
        if not guard.calibration.get("chance_test", {}).get("passed", True):
            on_message(f"warning: {guard.summary}")
        if is_open:
            on_message("warning: other machines can reach this service, and it has no --token")

    serve_guard(guard, settings, host, port, on_ready)
    on_message("stopped")
