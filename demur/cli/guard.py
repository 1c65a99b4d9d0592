"""demur calibrate, export, predict, guard and serve: from a run to something people use."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from warnings import catch_warnings

import typer

from demur.cli.app import AsJson, DataFolder, Device, Engine, Verify, app, number, option
from demur.cli.evaluate import RunName, SignKey, load_run, warn_at_chance
from demur.errors import BadInput
from demur.files.output_paths import output_file, output_folder, protected_kind

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
    from demur.report.scored_runs import certificate_text

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
    rejector: Rejector = None, tpr: Tpr = None, coverage: Coverage = None, risk: Risk = None,
    confidence: Confidence = 0.95, under: Under = "clean", resize: Resize = None,
    accept_chance: AcceptChance = False,
    onnx: Annotated[bool, option("Write model.onnx too.", "--onnx")] = False,
    name: Annotated[str | None, option("Name of the guard.", shown="that of the run")] = None,
    overwrite: Annotated[bool, option("Replace the guard in the folder.", "--replace")] = False,
    form: Annotated[str, option("guard, or triton: a model repository.", "--format")] = "guard",
    sign: SignKey = None, device: Device = "auto", data: DataFolder = None, verify: Verify = False,
) -> None:  # fmt: skip
    """Write a run as a guard: weights, thresholds and a model card; --archive copies its records.

    Later: demur guard info | diff | recalibrate.

    Example: demur export digits-pgdat-rr --risk 0.05 --onnx -o guard
    """
    from demur.files.checked_files import check_private_key
    from demur.guards import Guard
    from demur.guards.bundle import check_target
    from demur.guards.export import export_triton
    from demur.runs import Run

    if form not in ("guard", "triton"):
        raise BadInput(f"--format {form} is unknown; give guard or triton")
    check_private_key(sign)
    folder = Path(out) if out else Path("guards") / Run.open(run).name
    check_target(folder)
    if not overwrite and protected_kind(folder) == "guard":
        raise BadInput(f"{folder} holds a guard; name a new folder, or give --replace")
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
    risk: Risk = None, tpr: Tpr = None, coverage: Coverage = None, confidence: Confidence = 0.95,
    sign: SignKey = None, accept_chance: AcceptChance = False, device: Device = "auto",
) -> None:  # fmt: skip
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
    levels = {"tpr": tpr, "coverage": coverage, "risk": risk}
    with catch_warnings(record=True) as found:
        try:
            new = recalibrated(
                old, x, y, **levels, confidence=confidence, accept_chance=accept_chance
            )
        finally:  # swapped classes are a reason why a risk cannot be certified
            for one in found:
                on_message(f"warning: {one.message}")
    factory = read_config(Path(bundle))["model"]["factory"]
    new.save(out, factory=factory, onnx=(Path(bundle) / ONNX).exists(), sign=sign)
    on_message(f"before: {old.rule_text}; now: {new.rule_text}")
    report_guard(new, Path(out))


Host = Annotated[str, option("Address to listen on; 0.0.0.0 lets other machines in.")]
Port = Annotated[int, option("Port; 0 takes a free one.", min=0, max=65535)]
Token = Annotated[
    str | None, option("Bearer token that requests must carry.", envvar="DEMUR_TOKEN", shown="none")
]
AllowHost = Annotated[
    list[str] | None, option("Another name of this machine, as in its address; may be repeated.")
]
PublicKey = Annotated[
    str | None, option("Public key (PEM) that must have signed the guard.", shown="none")
]
Attack = Annotated[bool, option("Let the page attack an image by PGD.", "--attack/--no-attack")]
LogLevel = Annotated[str, option("debug, info (predictions), warning (bad requests) or error.")]
AccessLog = Annotated[bool, option("Log requests without images, too.", "--access-log")]


@app.command()
def serve(
    bundle: Bundle, host: Host = "127.0.0.1", port: Port = 8000, token: Token = None,
    allow_host: AllowHost = None, attack: Attack = True,
    max_body: Annotated[float, number("Megabytes of a request.")] = 8.0,
    max_pixels: Annotated[float, number("Megapixels of one image.")] = 16.0,
    max_images: Annotated[int, option("Images of one request.")] = 64,
    max_queue: Annotated[int, option("Images that may wait for the model.")] = 256,
    timeout: Annotated[float, number("Seconds until a request is given up.")] = 10.0,
    require_signature: PublicKey = None,
    workers: Annotated[int, option("Processes that share the port.", min=1)] = 1,
    log_level: LogLevel = "info", log_format: Annotated[str, option("text or json.")] = "text",
    access_log: AccessLog = False, device: Device = "auto",
) -> None:  # fmt: skip
    """Serve a guard over HTTP: /predict, /health, /metrics, and a page to try it at /.

    Example: demur serve guard --port 8000
    """
    from demur.cli.progress import on_message
    from demur.guards import Guard

    try:
        from demur.serve import Settings, server
        from demur.serve.monitoring import LineWriter
    except ImportError as error:
        if error.name is None or error.name.startswith("demur"):
            raise
        raise BadInput(
            f"the service needs {error.name}; install it with pip install 'demur[serve]'"
        ) from None
    settings = Settings(
        max_body=round(max_body * 2**20), max_pixels=round(max_pixels * 1e6),
        max_images=max_images, max_queue=max_queue, timeout=timeout, attack=attack, token=token,
        hosts=tuple(name.lower() for name in allow_host or ()), log_level=log_level,
        log_format=log_format, access_log=access_log,
    )  # fmt: skip
    load = partial(Guard.load, bundle, device=device, public_key=require_signature)
    guard: Guard = load()

    def on_ready(address: str) -> None:
        on_message(f"serving at {address}")
        on_message(f"guard: {guard.identity}")
        if not guard.calibration.get("chance_test", {}).get("passed", True):
            on_message(f"warning: {guard.summary}")
        if host not in ("127.0.0.1", "::1", "localhost") and token is None:
            on_message("warning: other machines can reach this service, and it has no --token")

    if workers > 1:
        server.serve_many(load, settings, host, port, on_ready, workers)
    else:
        server.serve(guard, settings, host, port, on_ready)
    last = LineWriter()
    last.msg("stopped")
    last.close()
