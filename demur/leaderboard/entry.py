"""An entry of the leaderboard: made by attacking a run, read, checked, attacked again; the site.

An entry holds for each image the clean score, the highest score of a wrong prediction, and where
each attack succeeded. All its figures are functions of these; entry.schema.json describes it.
"""

import base64
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from demur import attacks as kinds
from demur.attacks import AcceptedError, Attack, Rejected
from demur.attacks.balls import Ball, ball_by_name
from demur.calibrate import TPR
from demur.errors import BadInput, first_line
from demur.evaluate import LoadedRun, RecordOptions, values
from demur.evaluate.accepted_errors import worst_case_of
from demur.evaluate.binding import ThresholdResolver
from demur.files.checked_files import read_json, replace_folder, write_text
from demur.files.output_paths import check_output_folder
from demur.metrics import WorstCase, wilson
from demur.recipes import VOCABULARY
from demur.rejectors.image_scores import image_rejectors
from demur.rejectors.rule import Rejector, as_score
from demur.report.explorer import packed
from demur.report.page import check_installed
from demur.report.terminal import percent
from demur.runs import Record, Run
from demur.spec import digest, read, show, specs_in
from demur.verification.results import WRONG, differs

VERSION = 1  # of the format
LEVELS = (0.95, 0.9, 0.8)  # TPR on clean images
POINTS = 25  # of a stored curve
REMEDY = "restore it, or make it again with demur leaderboard add"
# Names of attacks; those of any other name are checks.
WORST, ERRORS, FORCED = "worst-score", "reject-autoattack", "force-rejection"
SEED = 1  # of the checks: RejectAutoAttack has members like them, with seed 0
CHANGED = {True: 20, False: 4}  # one image in so many may differ, on the same device or another
MARK = '<meta name="generator" content="demur leaderboard">'  # of a page of the site
CLOSE = 0.01  # relative and absolute, of a score or threshold that is found again

Entry = dict[str, Any]
Values = NDArray[Any]
Planned = tuple[str, float | None, Attack]  # name, the TPR that it aims at
MakeRecord = Callable[[LoadedRun, str, Attack, RecordOptions], Record]


def read_entry(path: Path) -> Entry:
    """Read an entry; BadInput if it is damaged, or of a newer version of the format."""
    entry = read_json(path, REMEDY)
    if (version := entry.get("schema")) != VERSION:
        known = f"this demur reads version {VERSION}; install a newer one"
        raise BadInput(f"{path} has version {version} of the format of entries, and {known}")
    return entry


def problems(entry: Entry) -> list[str]:
    """What in an entry contradicts the rest of it, a sentence each."""
    try:
        n, threat, found = entry["data"]["n"], entry["threat"], list[str]()
        if lengths := {len(values) for values in per_image(entry).values()} - {n}:
            return [f"scores or verdicts are of {max(lengths)} images, and n is {n}"]
        for name, value in figures(entry).items():
            if differs(entry["figures"][name], value):
                found.append(f"figures: {name} does not follow from the scores of the images")
        for attack in entry["attacks"]:
            spec: Any = read(attack["spec"], VOCABULARY)
            if spec.balls() != {ball_by_name(**threat)}:
                found.append(f"{attack['name']} is not an attack in {threat}")
            if read(entry["rejector"]["spec"], VOCABULARY) not in specs_in(spec):
                found.append(f"{attack['name']} is not an attack on {entry['rejector']['spec']}")
    except (BadInput, *WRONG) as error:
        return [f"a value is missing or of another kind: {first_line(error)}"]
    return found


def bits(values: Values) -> str:
    """Verdicts as a letter per image, 0 or 1."""
    return "".join("01"[int(value)] for value in values)


def flags(text: str) -> Values:
    """The verdicts of `bits`, N."""
    return np.array([letter == "1" for letter in text])


def per_image(entry: Entry) -> dict[str, Values]:
    """Scores and verdicts of each image by name, N each."""
    found = {"correct": flags(entry["images"]["correct"])}
    for name in ("index", "clean", "worst"):
        found[name] = np.frombuffer(base64.b64decode(entry["images"][name]), "<f4").astype(float)
    verdicts = {f"{one['name']} at TPR {one['tpr']}": one["hits"] for one in entry["attacks"]}
    return found | {name: flags(hits) for name, hits in verdicts.items()}


def figures(entry: Entry) -> dict[str, Any]:
    """Every figure of an entry; accepted errors are those of all attacks but the checks."""
    images, attacks = per_image(entry), entry["attacks"]
    levels, worst = dict(zip(LEVELS, entry["thresholds"], strict=True)), images["worst"]
    for one in attacks:
        if one["name"] == ERRORS:
            reached = np.where(flags(one["hits"]), levels[one["tpr"]], -np.inf)
            worst = np.maximum(worst, reached)
    case, correct = WorstCase.of(images["clean"], worst), images["correct"]
    coverage, share, at = (values.tolist() for values in case.curve)
    shown = sorted({round(k) for k in np.linspace(0, len(at) - 1, POINTS)}) if at else []
    seconds = [one["seconds"] for one in attacks]
    return {
        "correct": int(correct.sum()), "accuracy": float(correct.mean()),
        "levels": [_level(attacks, case, images["worst"], correct, *at) for at in levels.items()],
        "augrc": case.augrc, "augrc_interval": list(case.augrc_interval()),
        "curve": [
            [round(coverage[k], 6), float(f"{at[k]:.6g}"), round(share[k] * len(correct))]
            for k in shown
        ],
        "seconds": None if None in seconds else round(sum(seconds), 1),
    }  # fmt: skip


def _level(
    made: list[Entry], case: WorstCase, worst: Values, correct: Values, tpr: float, at: float
) -> dict[str, Any]:
    """Accepted errors and forced rejections at one threshold; `more` only a check finds."""
    aimed = {one["name"]: flags(one["hits"]) for one in made if one["tpr"] == tpr}
    checks, accepted = sorted(aimed.keys() - {ERRORS, FORCED}), correct & (case.clean >= at)
    forced = int((aimed[FORCED] & accepted).sum()) if FORCED in aimed else None
    return {
        "tpr": tpr, "coverage": float((case.clean >= at).mean()),
        "worst_score": int((worst >= at).sum()),
        "reject_autoattack": int(aimed[ERRORS].sum()) if ERRORS in aimed else None,
        "errors": case.count(at), "share": case.accepted_errors(at),
        "interval": list(case.interval(at)),
        "more": {name: int((aimed[name] & (case.worst < at)).sum()) for name in checks},
        "accepted_correct": int(accepted.sum()), "forced_rejections": forced,
    }  # fmt: skip


def attack_set(
    ball: Ball, rejector: Rejector, split: Literal["cal", "test"], quick: bool = False
) -> list[Planned]:
    """The attacks of an entry; quick ones have fewer members, targets and restarts."""
    fewer: dict[str, Any] = {"targets": 3} if quick else {}
    version: Literal["fast", "standard"] = "fast" if quick else "standard"
    planned: list[Planned] = [(WORST, None, kinds.WorstScore(ball, rejector, **fewer))]
    for tpr in LEVELS:
        aim = AcceptedError(rejector, TPR(tpr, split))
        search: Any = {"criterion": aim, "restarts": 1 if quick else 5, "seed": SEED}
        search["objective"] = kinds.MinMargin(aim)
        planned += [
            (ERRORS, tpr, kinds.RejectAutoAttackEnsemble(ball, aim, version, **fewer)),
            ("selective-pgd", tpr, kinds.PGD(ball, 100, keep="success", **search)),
            ("orthogonal-apgd", tpr, kinds.OrthogonalAPGD(ball, **search)),
        ]
    rejected = Rejected(rejector, TPR(LEVELS[0], split))
    forced: Attack = kinds.ForceRejectionEnsemble(ball, rejected)
    if quick:
        objective = kinds.RejectionObjective(rejected)
        forced = kinds.APGD(ball, objective=objective, criterion=rejected)
    return [*planned, (FORCED, LEVELS[0], forced)]


def make_entry(
    loaded: LoadedRun, name: str, rejector: Rejector, planned: list[Planned], n: int | None,
    make_record: MakeRecord,
) -> Entry:  # fmt: skip
    """Attack the first n test images and return the entry, without verifications.

    An archive has no weights: its entry holds the attacks whose records were kept.
    """
    run, data = loaded.run, loaded.run.recipe.data
    split: Literal["cal", "test"] = "cal" if "cal" in data.splits else "test"
    records = _records(loaded, planned, RecordOptions(n=n, keep_images=0), make_record)
    binder = ThresholdResolver(loaded.clean, loaded.device)
    score = as_score(binder.bound(loaded.fitted(rejector)))
    at = {tpr: binder.choose_threshold(score, TPR(tpr, split)) for tpr in LEVELS}
    first, clean = records[0][1], loaded.clean("test", *image_rejectors(score))
    (ball,), count, about = planned[0][2].balls(), len(first.y), first.metadata
    entry = {
        "schema": VERSION,
        "net": {"name": run.name if run.has_weights else str(run.path)}
        | {"weights": run.checkpoint["weights"], "recipe": show(run.recipe, full=True)},
        "data": {"name": type(data).__name__, "spec": show(data), "split": "test", "n": count}
        | {"digest": about["data"]},
        "threat": {"norm": type(ball).__name__, "eps": ball.eps},
        "rejector": {"name": name, "spec": show(rejector, full=True)},
        "thresholds_from": f"{len(loaded.clean(split).y)} clean {split} images",
        "thresholds": [float(np.float32(at[tpr])) for tpr in LEVELS],
        "images": {
            "index": packed(first.arrays["index"].numpy(), "<f4"),
            "correct": bits(clean.correct[:count]),
            "clean": packed(values(score, clean)[:count], "<f4"),
            "worst": packed(worst_case_of(score, first, clean).worst, "<f4"),
        },
        "attacks": [
            _attack(*pair, values(score, pair[1]) >= at[pair[0][1] or LEVELS[0]])
            for pair in records
        ],
        "date": about["created"][:10], "device": about["device"], "code": about["code"],
        "verification": [],
    }  # fmt: skip
    return entry | {"figures": figures(entry)}


def _records(
    loaded: LoadedRun, planned: list[Planned], options: RecordOptions, make_record: MakeRecord
) -> list[tuple[Planned, Record]]:
    """The record of each attack, made if the run has weights."""
    if loaded.run.has_weights:
        labels = [f"{name}-{tpr}" if tpr else name for name, tpr, _ in planned]
        pairs = zip(labels, planned, strict=True)
        return [(one, make_record(loaded, label, one[2], options)) for label, one in pairs]
    kept = {record.metadata["attack"]: record for record in loaded.usable_records("test")}
    found = [(one, kept[key]) for one in planned if (key := digest(one[2])) in kept]
    if not found or found[0][0] != planned[0]:
        made = f"neither weights nor a record of {show(planned[0][2])}"
        raise BadInput(f"{loaded.run.path} has {made}; name a run with weights")
    return found


def _attack(planned: Planned, record: Record, accepted: Values) -> dict[str, Any]:
    name, tpr, attack = planned
    hits = {WORST: ~record.correct, FORCED: ~accepted}.get(name, ~record.correct & accepted)
    return {
        "name": name, "tpr": tpr, "spec": show(attack, full=name in (WORST, ERRORS, FORCED)),
        "hits": bits(hits), "seconds": record.metadata.get("seconds"),
    }  # fmt: skip


def attacked_again(
    entry: Entry, loaded: LoadedRun, n: int, make_record: MakeRecord
) -> Iterator[str]:
    """What differs from an entry when its first n images are attacked again, a sentence each.

    The attacks run in a copy of the run, which is deleted afterwards.
    """
    planned = [(one["name"], one["tpr"], read(one["spec"], VOCABULARY)) for one in entry["attacks"]]
    rejector, name = read(entry["rejector"]["spec"], VOCABULARY), entry["rejector"]["name"]
    images = loaded.images(RecordOptions(n=entry["data"]["n"]))
    with TemporaryDirectory() as folder:
        copy = Path(folder) / loaded.run.name
        shutil.copytree(loaded.run.path, copy, ignore=shutil.ignore_patterns("records", ".*"))
        again = LoadedRun(Run(copy), loaded.device, loaded.data_folder)
        new = make_entry(again, name, rejector, planned, n, make_record)
    new["data"]["digest"] = images.digest()
    for part, key in (("net", "weights"), ("net", "recipe"), ("data", "spec"), ("data", "digest")):
        if entry[part][key] != new[part][key]:
            yield f"{part}: {key} is not that of {loaded.run.name}"
    if not np.allclose(entry["thresholds"], new["thresholds"], rtol=CLOSE, atol=0):
        yield f"thresholds: {new['thresholds']} follow from {new['thresholds_from']}"
    stored, most = per_image(entry), n // CHANGED[entry["device"] == new["device"]]
    for what, found in per_image(new).items():
        close = 0.0 if what == "index" else CLOSE
        other = ~np.isclose(stored[what][:n], found, rtol=close, atol=close)
        if other.sum() > most:
            yield f"{what}: {other.sum()} of {n} images differ when they are attacked again"


def slug(net: str, rejector: str, ball: Ball) -> str:
    """The name of the file of an entry."""
    text = f"{net}-{rejector}-{type(ball).__name__}-{ball.eps:.3g}"
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:100]


def write_site(source: Path, out: Path) -> tuple[int, list[str]]:
    """Write the site; return the number of entries and why files are left out, a sentence each.
    Raises BadInput for a folder that is there and is no such site.
    """
    check_installed()
    index = Path(check_output_folder(str(out)) or "", "index.html")
    is_site = index.is_file() and MARK in index.read_text(encoding="utf-8", errors="replace")
    if out.is_dir() and any(out.iterdir()) and not is_site:
        raise BadInput(f"{out} is in the way: it is no leaderboard; name a new folder")
    from jinja2 import TemplateError

    pages, entries, faults = dict[str, str](), dict[str, Entry](), list[str]()
    for path in sorted(source.glob("[!.]*.json")):
        try:
            entry, name = read_entry(path), path.stem
            if wrong := problems(entry):
                raise BadInput("; ".join(wrong))
            pages[name], entries[name] = _rendered("entry", {name: entry}), entry
        except (BadInput, TemplateError) as error:  # TemplateError: a part that no figure needs
            faults.append(f"{path.name}: {error}")
    if not entries:
        raise BadInput("; ".join([*faults, f"{source} holds no entry to show; name their folder"]))
    with replace_folder(out) as (half, _):
        write_text(half / "index.html", _rendered("index", entries))
        for name, page in pages.items():
            write_text(half / f"{name}.html", page)
            shutil.copyfile(source / f"{name}.json", half / f"{name}.json")
    return len(entries), faults


def _rendered(page: str, entries: dict[str, Entry]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("demur.leaderboard", "."), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    parts = ("report/page.css", "leaderboard/board.css", "leaderboard/board.js")
    base, own, script = (Markup(files("demur").joinpath(part).read_text("utf-8")) for part in parts)
    return environment.get_template(f"{page}.html.j2").render(
        entries=entries, percent=percent, quote=shlex.quote, wilson=wilson,
        mark=Markup(MARK), css=base + own, script=script,
    )  # fmt: skip
