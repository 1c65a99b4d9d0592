"""Verify what a path holds: runs, archives, guards, states of attacks, and folders of these."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from demur.attacks.autoattack import BROKEN_CLEAN
from demur.audits.ensemble_state import PROGRESS, raise_damaged, read_state
from demur.calibrate import ChanceTest
from demur.errors import BadInput, first_line
from demur.evaluate.certificates import REMEDY
from demur.files.checked_files import (
    MAX_JSON,
    SIGNATURE,
    check_signature,
    read_checked,
    read_regular_file,
)
from demur.guards import bundle
from demur.guards.export import model_card
from demur.images import check_images
from demur.numerics import device_by_name
from demur.runs import Record, Run
from demur.runs.metadata import CERTIFICATE, STATE, read_metadata
from demur.runs.record import read_record
from demur.spec import show
from demur.verification.results import (
    CHECKS,
    Check,
    StoredRun,
    attacked_again,
    certificate_problem,
    differs,
    figures_problem,
    read_table,
    table_problem,
)

__all__ = ["Finding", "Verification", "verify"]
MOST_BYTES = 64 << 30  # of a file of tensors


class Finding(NamedTuple):
    """Something wrong: the file or folder, and one sentence about it."""

    path: str
    problem: str

    def __str__(self) -> str:
        return self.problem if self.path in self.problem else f"{self.path}: {self.problem}"


@dataclass
class Verification:
    """What `demur.verify` found, and what that rests on.

    Example:
        >>> from demur import verify
        >>> verify("digits-pgdat-rr", n=2).findings
        []
    """

    findings: list[Finding] = field(default_factory=list)  # what is wrong
    checked: Counter[str] = field(default_factory=Counter)  # how often each check was made
    unchecked: Counter[str] = field(default_factory=Counter)  # what and why, with how often

    def to_json(self) -> dict[str, Any]:
        findings = [one._asdict() for one in self.findings]
        return {"findings": findings, "checked": {**self.checked}, "unchecked": {**self.unchecked}}

    def lines(self) -> list[str]:
        """What was checked, and what was not: one line each."""
        checked = ", ".join(f"{name} ({count})" for name, count in self.checked.items() if count)
        left = [f"not checked: {why} ({count})" for why, count in self.unchecked.items()]
        return [f"checked: {checked or 'nothing'}", *left]

    @contextmanager
    def reading(self, path: Path, name: str) -> Iterator[None]:
        """Count what the block reads; a file that it cannot read is a finding."""
        try:
            yield
            self.checked[name] += 1
        except BadInput as error:
            self.findings.append(Finding(str(path), str(error)))
        except OSError as error:
            self.findings.append(Finding(str(path), f"it cannot be read: {first_line(error)}"))

    def check(self, path: Path, name: str, check: Check, *given: Any) -> None:
        """Make a check, as `records` describes them."""
        try:
            problem = check(*given)
        except BadInput as reason:
            self.unchecked[f"{name}: {reason}"] += 1
            return
        self.checked[name] += problem is not None
        if problem:
            self.findings.append(Finding(str(path), problem))


def verify(
    path: str | Path, *, n: int = 8, key: str | Path | None = None, device: str = "cpu",
    data_folder: Path | None = None,
) -> Verification:  # fmt: skip
    """Check that stored results agree with each other; nothing is written.

    Args:
        path: A run or its name, an archive, a guard, a record, the state of an attack, or a folder
            that holds some of these, such as results/.
        n: Images of each record that are attacked again if the weights are there.
        key: A public key in a PEM file; each run and guard must be signed by its owner.
        device: Device of the attacks: auto, cpu, cuda or cuda:N.
        data_folder: Folder of the data sets.

    Returns:
        The findings, what was checked, and what could not be checked.
    """
    if n < 0:
        raise BadInput(f"n is {n}; give the number of images to attack again, or 0")
    named = (Path(path), Path("runs") / path)
    if (where := next((one for one in named if one.exists()), None)) is None:
        raise BadInput(f"there is no path {path}; name a run, a guard, a record or a folder")
    task = _Task(n, key, device_by_name(device), data_folder)
    (task.folder if where.is_dir() else task.file)(where)
    if not task.found.checked and not task.found.findings:
        raise BadInput(f"{path} holds nothing that demur stores; name a run or a guard")
    return task.found


@dataclass
class _Task:
    """One verification, and what it knows about all records so far."""

    n: int
    key: str | Path | None
    device: torch.device
    data_folder: Path | None
    found: Verification = field(default_factory=Verification)
    labels: dict[str, dict[int, int]] = field(default_factory=dict)  # of images, by data set
    known: dict[str, tuple[Record, StoredRun]] = field(default_factory=dict)

    def file(self, path: Path) -> None:
        """Verify a record with its run, a certificate, a table or the state of an attack."""
        is_record = path.parent.name == "records" and path.suffix in (".json", ".npz")
        if is_record and (path.parents[1] / "recipe.txt").is_file():
            self.run(Run(path.parents[1]), path.stem)
        elif path.suffix == ".npz":
            with self.found.reading(path, "records"):
                read_record(path)
        elif path.suffix == ".json" and (table := read_table(path)) is not None:
            self.found.check(path, "tables", table_problem, table, self.known)
        elif path.suffix == ".json":
            self.certificate(path, None)
        else:
            with self.found.reading(path, "states of attacks"):
                _check_state(path)
            self.found.unchecked["norms: the state of an attack holds no clean images"] += 1

    def folder(self, path: Path) -> None:
        """Verify a run or a guard, or what is below a folder."""
        is_run = (path / "recipe.txt").exists() or (path / "checkpoint.json").exists()
        is_guard = (path / bundle.CONFIG).exists()
        if is_run or is_guard:
            if self.key is not None:
                with self.found.reading(path, "signatures"):
                    check_signature(path, self.key)
            elif (path / SIGNATURE).exists():
                self.found.unchecked[f"{SIGNATURE}: no public key is given"] += 1
            self.run(Run(path)) if is_run else self.guard(path)
        inside = sorted(path.iterdir())
        for one in inside if not (is_run or is_guard) else ():
            if one.is_dir() and not one.is_symlink() and not one.name.startswith("."):
                self.folder(one)
            elif ".state" in one.suffixes or one.suffix == ".npz":
                self.file(one)
        for one in inside:
            if one.suffix == ".json" and read_table(one) is not None:
                self.file(one)
            elif one.suffix in (".md", ".html") and not is_guard:
                self.found.unchecked[f"{one.name}: cells of a page are not computed again"] += 1

    def run(self, run: Run, only: str = "*") -> None:
        """Verify a run, an archive or a pack, with the records of this name."""
        found, loaded = self.found, StoredRun(run, self.device, self.data_folder)
        count = len(found.findings)
        with found.reading(run.path, "runs"):
            if not run.trained:
                return self.unfinished(run)
            _ = run.checkpoint, run.recipe.data.domain
        if len(found.findings) > count:
            return None
        with found.reading(run.path / "metrics.jsonl", "metrics.jsonl"):
            if run.metrics_state == "not verified":
                found.unchecked["metrics.jsonl: the run is older than its digest"] += 1
        weights = self.weights(loaded)
        named = self.records(run, only)
        loaded.records = tuple(named.values())
        for path, record in named.items():
            for name, check in CHECKS.items():
                found.check(path, name, check, record, loaded)
            if weights and self.n:
                found.check(path, "attacked again", attacked_again, record, loaded, self.n)
            found.check(path, "equal labels", self.labels_problem, record, run)
            self.known[record.digest] = record, loaded
        for path in sorted((run.path / "certificates").glob("*.json")):
            self.certificate(path, loaded)
        if (run.path / "last" / "recipe.txt").is_file():
            self.run(Run(run.path / "last"))
        return None

    def records(self, run: Run, only: str) -> dict[Path, Record]:
        read = dict[Path, Record]()
        for path in sorted(run.records_folder.glob(f"{only}.npz")):
            with self.found.reading(path, "records"):
                read[path] = read_record(path)
                run.check_labels(read[path])
        for path in sorted(run.records_folder.glob(f"{only}.json")):
            with self.found.reading(path, "metadata of records"):
                if not path.with_suffix(".npz").exists():
                    read_record(path.with_suffix(".npz"))
        return read

    def weights(self, loaded: StoredRun) -> bool:
        """Verify the weights of a run; return whether it can be attacked again."""
        run, unchecked = loaded.run, self.found.unchecked
        if not run.has_weights:
            unchecked["weights absent: nothing was attacked again"] += 1
            return False
        if not self.n:
            unchecked["n is 0: nothing was attacked again"] += 1
        try:
            run.recipe.net.build(run.recipe.data.domain, run.recipe.method.head)
        except BadInput as reason:  # the code of a user's net is not imported unasked
            unchecked[f"weights: {reason}"] += 1
            return False
        before = len(self.found.findings)
        with self.found.reading(run.path / "model.safetensors", "weights"):
            _ = loaded.net
        return len(self.found.findings) == before

    def labels_problem(self, record: Record, run: Run) -> str:
        """Whether an image has another label here than in a record of the same data set."""
        data = run.recipe.data
        if "split" in {f.name for f in fields(data)}:  # positions are those of the whole data set
            data = replace(data, **{"split": "paper"})
        known = self.labels.setdefault(show(data, full=True), {})
        pairs = zip(record.arrays["index"].tolist(), record.y.tolist(), strict=True)
        other = sum(known.setdefault(index, label) != label for index, label in pairs)
        return f"{other} images have another label than in another record" if other else ""

    def certificate(self, path: Path, loaded: StoredRun | None) -> None:
        with self.found.reading(path, "certificates"):
            values = read_metadata(path, CERTIFICATE, REMEDY)
            self.found.check(path, "counts of certificates", certificate_problem, values)
            if loaded is not None:
                names = "records of certificates"
                self.found.check(path, names, certificate_problem, values, loaded)

    def unfinished(self, run: Run) -> None:
        now = run.path / "state" / "now.json"
        self.found.unchecked["the training has not ended: there are no results yet"] += 1
        if now.exists():
            state = read_metadata(now, STATE, "delete the folder to train from the start")
            for file, digest in (("file", "digest"), ("best_file", "best_digest")):
                read_checked(now.parent / state[file], state[digest], "train again", MOST_BYTES)

    def guard(self, path: Path) -> None:
        """Verify a guard: files, figures, certificate, thresholds and the tables of its card."""
        found, card = self.found, ""
        count = len(found.findings)
        with found.reading(path, "guards"):
            config = bundle.read_config(path)
            for name, digest in config["files"].items():
                if name in {*bundle.FILES} - {bundle.CONFIG, bundle.CARD}:
                    read_checked(path / name, digest, bundle.REMEDY, MOST_BYTES)
            if config["model"]["net"] is not None:
                card = model_card(bundle.load(path, None, str(self.device)), None)
        if len(found.findings) > count:
            return
        for figures in (config["calibration"], *config["figures"]):
            found.check(path / bundle.CONFIG, "figures", figures_problem, figures)
        found.check(path / bundle.CONFIG, "calibration", _calibration_problem, config)
        found.check(path / bundle.CONFIG, "chance", _chance_problem, config["calibration"])
        if card:
            found.check(path / bundle.CARD, "tables", _card_problem, path / bundle.CARD, card)
        else:
            found.unchecked["model: it is made by code outside of the guard"] += 1
        if (path / bundle.ONNX).exists() and bundle.ONNX not in config["files"]:
            found.unchecked[f"{bundle.ONNX}: the guard is older than its digest"] += 1
        found.unchecked["figures of a guard: it holds no images to measure them on"] += 1


def _check_state(path: Path) -> None:
    """Raise BadInput unless a file is the state of an attack whose values are possible."""
    tensors = read_state(path)
    if not set(PROGRESS) <= set(tensors):
        raise_damaged(path)
    x_adv, _, broken_by, tried = (tensors[name] for name in PROGRESS)
    check_images(x_adv)
    same_length = {len(tensors[name]) for name in PROGRESS} == {len(x_adv)}
    if not same_length or ((broken_by < BROKEN_CLEAN) | (tried < 0)).any():
        raise_damaged(path)


def _calibration_problem(config: dict[str, Any]) -> str:
    """The certificate, the sentence and the thresholds of a guard against each other."""
    calibration = config["calibration"]
    certificate, n = calibration["certificate"], calibration["images"]
    if certificate is None:
        return "" if calibration["shortfall"] else "the guard has neither certificate nor shortfall"
    if problem := certificate_problem(certificate):
        return problem
    stated = {key: certificate[key] for key in ("sentence", "confidence")}
    if differs(calibration, stated) or certificate["pilot"] + certificate["n"] != n:
        return "sentence, confidence or number of images are not those of the certificate"
    other = differs([score["threshold"] for score in config["scores"]], certificate["thresholds"])
    return "the thresholds are not those of the certificate" * other


def _chance_problem(calibration: dict[str, Any]) -> str:
    """The sentence about chance against its counts; older guards have neither."""
    stored = calibration.get("chance_test") or {}
    counts: list[Any] = [stored.get(name) for name in ChanceTest._fields]
    whole = all(type(n) is int and n >= (k > 0) for k, n in enumerate(counts[:4]))
    agree = not stored or (whole and ChanceTest(*counts).to_json() == stored)
    return "" if agree else "the sentence about chance is not that of its counts"


def _card_problem(path: Path, card: str) -> str:
    """A row of the card's tables that has other cells than the figures; its text may be edited."""
    text = read_regular_file(path, MAX_JSON, "write one").decode(errors="replace").splitlines()
    rows = {line: line.split("|")[1] for line in card.splitlines() if line.startswith("| ")}
    for line in text:
        name = (line.split("|") if line.startswith("| ") else ["", ""])[1]
        if line not in rows and (name in rows.values() or name.startswith(" test, ")):
            return f"the row{name}of the model card has other cells than the figures"
    return ""
