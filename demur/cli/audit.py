"""demur audit."""

import json
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from demur.cli.app import AsJson, Device, FirstN, app, number, option, unset
from demur.errors import BadInput
from demur.files.output_paths import output_file, output_folder

if TYPE_CHECKING:
    from demur.audits.audit_report import AnyRejector


ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run, a net of demur list models, MODULE:NAME, FILE.onnx, http://ADDRESS, "
        "timm:NAME, transformers:FOLDER or rectified-rejection.",
    ),
]
ImageData = Annotated[
    str | None,
    option(
        "An .npz file with x and y, a folder with one folder per class in the order of their "
        "names, MODULE:NAME of a torch Dataset, or a data set: digits, cifar10, cifar100.",
        shown="the data set of a run",
    ),
]
ImageSize = Annotated[int | None, unset("Side to which images of a folder are resized.")]
Checkpoint = Annotated[str | None, unset("Weights: .safetensors, or a file of torch.save.")]
RejectorText = Annotated[
    str | None, unset("A rejector such as Con(), or MODULE:NAME of a detector.")
]
Threshold = Annotated[float | None, number("Of the rejector.", shown="from --tpr")]
TprLevel = Annotated[float, number("Correct predictions that the threshold accepts.")]
Claim = Annotated[float | None, number("Claimed share that no attack breaks.", shown=False)]
Page = Annotated[
    str | None,
    unset(
        "Write a page; FILE.md or FILE.json write Markdown or JSON.", "-o", "--out",
        callback=output_file("page"),
    ),
]  # fmt: skip
Adapter = Annotated[
    str | None, unset("MODULE:NAME of a function (images, send) to logits, for a service.")
]
Budget = Annotated[int | None, unset("Images that may be asked for, of a black box.")]
Rate = Annotated[float | None, number("Images per second, of a black box.", shown=False)]
EveryThreshold = Annotated[
    bool, option("Also accepted errors at every threshold.", "--worst-score")
]
StateFolder = Annotated[
    str | None,
    unset("Folder of the progress; the same command resumes from it.", callback=output_folder()),
]
ClusterAddress = Annotated[
    str | None, unset("Ray cluster: auto, HOST:PORT or ray://HOST:PORT; a worker per GPU or core.")
]


@app.command()
def audit(
    model: ModelName, data: ImageData = None, checkpoint: Checkpoint = None,
    adapter: Adapter = None, budget: Budget = None, rate: Rate = None,
    rejector: RejectorText = None, threshold: Threshold = None, tpr: TprLevel = 0.95,
    eps: Annotated[str, typer.Option(help="Radius of the ball.")] = "8/255",
    norm: Annotated[str, typer.Option(help="Linf, L2 or L1.")] = "Linf",
    version: Annotated[
        str, typer.Option(help="auto (on a CPU fast, if slow), standard, fast, rand or black-box.")
    ] = "auto",
    n: FirstN = None, size: ImageSize = None,
    batch_size: Annotated[int, typer.Option(help="Images per batch.")] = 250,
    seed: Annotated[int, typer.Option(help="Seed of attacks, split and a random model.")] = 0,
    claim: Claim = None, worst_score: EveryThreshold = False, out: Page = None,
    state: StateFolder = None, cluster: ClusterAddress = None, as_json: AsJson = False,
    device: Device = "auto",
) -> None:  # fmt: skip
    """Audit any image classifier: accuracy, AutoAttack, accepted errors, sanity checks.

    A model is code. MODULE is imported and runs with your rights, so audit only code that you
    trust, or do it in a container. A checkpoint is read as weights only.

    Example: demur audit my_code:make_net --data images.npz --rejector "Con()" -o audit.html
    """
    from demur.attacks.balls import ball_by_name
    from demur.audits import audit as run_audit
    from demur.audits import cluster as on_cluster
    from demur.audits.audit_page import check_format
    from demur.audits.image_parts import audit_images
    from demur.audits.model_loading import load_model
    from demur.audits.queries import Queries
    from demur.metrics.checks import check_share
    from demur.numerics import device_by_name

    radius, at = _radius(eps), device_by_name(device)
    if out is not None:
        check_format(out)  # not after the attacks
    check_share("--tpr", tpr, allow_one=True)
    ball_by_name(norm, radius)
    data = _data_of_run(model) if data is None else data
    images, cal = audit_images(data, n, size)
    is_remote = budget is not None or rate is not None or model.startswith(("http:", "https:"))
    if is_remote and cluster is not None:
        raise BadInput("a service or a black box is asked from one process; leave --cluster out")
    log = f"{state}/queries.db" if state is not None and is_remote else None
    loaded = load_model(model, checkpoint, adapter, Queries(budget, rate, log))
    with on_cluster(cluster):
        report = run_audit(
            loaded, *images, rejector=_rejector(rejector), eps=radius, norm=norm,
            threshold=threshold, tpr=tpr, cal=cal, version=version, bs=batch_size, seed=seed,
            device=at, state_folder=state, verbose=not as_json, name=model, claim=claim,
            data=data, command=shlex.join(["demur", *sys.argv[1:]]), worst_score=worst_score,
        )  # fmt: skip
    if out is not None:
        report.save(out)
    typer.echo(json.dumps(report.to_json(), indent=2) if as_json else str(report))


def _data_of_run(model: str) -> str:
    """Return the name of the data set of a run or of a net of the zoo."""
    from demur.data import OwnImages
    from demur.runs import Run

    try:
        found = Run.open(model).recipe.data
    except BadInput:
        if not (":" in model or model.endswith(".onnx") or model == "rectified-rejection"):
            raise  # it says which name was meant
        found = None
    if found is None or isinstance(found, OwnImages):
        raise BadInput("say which images to attack: --data FILE.npz, a folder or a data set")
    return type(found).__name__.lower()


def _radius(text: str) -> float:
    from fractions import Fraction

    try:
        return float(Fraction(text))
    except (ValueError, ZeroDivisionError, OverflowError):
        raise BadInput(f"--eps is {text!r}; give a number or a fraction, such as 8/255") from None


def _rejector(text: str | None) -> "AnyRejector | None":
    """Return the rejector of a spec such as Con(), or the detector of MODULE:NAME."""
    from demur.audits.model_loading import load_model
    from demur.recipes import as_rejector
    from demur.rejectors.rule import Rejector
    from demur.spec.importing import allow_import, import_object, is_import_path

    if text is None:
        return None
    if is_import_path(text):
        allow_import(text)
        named = import_object(text)
        if not (isinstance(named, type) and issubclass(named, Rejector)):
            detector: Any = load_model(text)
            return detector  # type: ignore[no-any-return]
    return as_rejector(text)
