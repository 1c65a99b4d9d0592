"""demur verify: what it finds, what it cannot find, and what it says it did not check."""

import json
import os
import re
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from demur import AutoAttack, Linf, verify
from demur.attacks import PGD, AcceptedError, Clean
from demur.calibrate import TPR, Coverage
from demur.errors import BadInput
from demur.evaluate import LoadedRun, RecordOptions, RejectorEvaluation, archive, pack, run_attack
from demur.evaluate.certificates import issue
from demur.guards import Guard
from demur.rejectors import Con, RCon
from demur.runs import Record, Run
from demur.runs.record import check_arrays, check_norms, identity, read_record
from demur.runs.run import BestEpoch, ResumeState, save_state
from demur.verification.results import INPUTS
from tests.conftest import Command
from tests.damages import (
    DAMAGED,
    FILE,
    FORGED,
    Forgery,
    Place,
    arrays,
    claim_robust,
    copy_of,
    edit_json,
    edit_record,
    edit_table,
    nothing,
    put,
    table,
    target,
    write_state,
)
from tests.test_cli import expect_error

ROOT = Path(__file__).parents[1]
EXHAUSTIVE = bool(os.environ.get("DEMUR_EXHAUSTIVE"))
SAMPLE = 1 if EXHAUSTIVE else 9  # every ninth damaged file


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verify") / "all"


@pytest.fixture(scope="module")
def workspace(tiny_run: Run, root: Path) -> Place:
    """A run, archives, a guard, a certificate, the state of an attack and a table."""
    run = Run(Path(shutil.copytree(tiny_run.path, root / "run")))
    loaded = LoadedRun(run, "cpu")
    run_attack(loaded, "clean", Clean(), RecordOptions(keep_images=8))
    loaded.clean("cal")
    run_attack(loaded, "pgd-3", PGD(Linf(0.15), steps=3), RecordOptions(n=200, keep_images=8))
    rejecting = PGD(Linf(0.1), steps=2, criterion=AcceptedError(RCon(), TPR(0.95)))
    run_attack(loaded, "rejecting", rejecting, RecordOptions(n=40, keep_images=0))
    issue(loaded, "R-Con", Coverage(0.7))
    archive(loaded, root / "archive")
    archive(loaded, root / "scores", only=["R-Con"])
    Guard.from_run(loaded, coverage=0.7).save(root / "guard")
    write_state(root / "audit" / "a.state", loaded.splits["test"].batch(slice(0, 20))[0])
    record = read_record(next(run.records_folder.glob("pgd-3-*.npz")))
    rows = RejectorEvaluation.of(loaded, rejectors={"Con": Con()}).score_record(record)
    table = {"attacks": [rows.summary.to_json()], "rows": [row.to_json() for row in rows.rows]}
    (run.path / "scores.json").write_text(json.dumps(table))

    def attacked(folder: str, label: str) -> Path:
        return next((root / folder / "records").glob(f"{label}-test-*.npz"))

    return {
        "run": run.path, "guard": root / "guard", "state": root / "audit" / "a.state",
        "attacked": attacked("run", "pgd-3"), "archive": attacked("archive", "pgd-3"),
        "rejecting": attacked("run", "rejecting"), "scores": attacked("scores", "pgd-3"),
        "certificate": next((run.path / "certificates").glob("*.json")),
        "table": run.path / "scores.json",
    }  # fmt: skip


def whole(place: Place, what: str) -> Path:
    """The run, archive, guard or state that a target belongs to."""
    path = place[what.partition("/")[0].removesuffix(".json")]
    if path.suffix == ".npz" or what == "certificate":
        return path.parents[1]
    return path.parent if what == "table" else path


def test_what_is_whole_has_no_findings(workspace: Place, root: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    found = verify(root, n=4)
    assert found.findings == []
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    assert found.checked["attacked again"] >= 4
    assert {"identity", "norms", "equal labels", "labels in the data set", "thresholds", "guards",
            "counts of certificates", "records of certificates", "states of attacks", "figures",
            "adversarial examples", "stored scores", "tables"} <= set(found.checked)  # fmt: skip
    assert found.unchecked["weights absent: nothing was attacked again"] == 2
    json.dumps(found.to_json())


@pytest.mark.parametrize("forged", FORGED[:: 1 if EXHAUSTIVE else 3], ids=lambda one: one.name)
def test_forged_files_are_found_or_not_as_the_table_says(
    forged: Forgery, workspace: Place, root: Path, tmp_path: Path
) -> None:
    place = copy_of(workspace, root, tmp_path / "copy")
    if forged.what != "table":
        place["table"].unlink()  # its cells take longer than all other checks
    forged.change(place[forged.what])
    found = verify(whole(place, forged.what), n=0)
    assert bool(found.findings) == forged.found, (found.findings, found.unchecked)
    assert not any("\n" in str(finding) for finding in found.findings)


def test_the_table_of_the_reference_is_that_of_the_list() -> None:
    page = (ROOT / "docs" / "reference" / "verify.md").read_text()
    assert "\n".join(table()) in page
    assert len(FORGED) + len(DAMAGED) >= 200


@pytest.mark.parametrize(("file", "damage"), DAMAGED[::SAMPLE])
def test_damaged_files_are_found(
    file: str, damage: str, workspace: Place, root: Path, tmp_path: Path
) -> None:
    """Without a new digest nothing is believed; a card that people may edit is no number."""
    place = copy_of(workspace, root, tmp_path / "copy")
    path = target(place, file)
    place["table"].unlink()
    before = path.read_bytes()
    FILE[damage](path)
    same = path.is_file() and path.read_bytes().split() == before.split()
    try:
        found = verify(whole(place, file), n=0).findings
    except BadInput as error:  # nothing is left that says what the folder was
        assert "\n" not in str(error)
        return
    assert bool(found) or same or "README" in file


def test_a_record_that_was_not_made_by_its_attack_is_found(
    workspace: Place, root: Path, tmp_path: Path
) -> None:
    """Without adversarial examples, only attacking again shows that a record is invented."""
    place = copy_of(workspace, root, tmp_path / "copy")

    def unattacked(record: Record) -> None:
        claim_robust(record)
        record.arrays.pop("x_adv")
        record.metadata["images"] = 0
        made_of = {key: record.metadata[key] for key in (*INPUTS[:6], "features", "images")}
        record.metadata["digest"] = identity(**made_of)

    edit_record(place["attacked"], unattacked)
    place["table"].unlink()
    assert verify(place["run"], n=0).findings == []
    (finding,) = verify(place["run"], n=40).findings
    assert re.search(r"\d+ of 40 images have another outcome", finding.problem)


def test_labels_are_compared_between_runs(workspace: Place, root: Path, tmp_path: Path) -> None:
    place = copy_of(workspace, root, tmp_path / "copy")
    edit_record(place["scores"], arrays(y=lambda y: y.flip(0)))
    problems = [str(one) for one in verify(tmp_path / "copy", n=0).findings]
    assert any("another label than in another record" in one for one in problems)


def test_a_label_that_is_no_class_is_refused_where_records_are_opened(
    workspace: Place, root: Path, tmp_path: Path
) -> None:
    place = copy_of(workspace, root, tmp_path / "copy")
    edit_record(place["scores"], arrays(y=lambda y: y + 7))
    with pytest.raises(BadInput, match="a label that is no class"):
        Run(whole(place, "scores")).records()


@pytest.mark.parametrize(("spec", "refused"), [
    ("PGD(ball=Linf(eps=0.1), steps=3)", True),
    ("PGD(ball=Linf(eps=0.4), steps=3)", False),
    ("PGD(ball=L2(eps=0.1), steps=3)", False),
    ("FAB(ball=Linf(eps=0.1), any_distance=True)", False),
    ("Chain(attacks=(Clean(), PGD(ball=Linf(eps=0.1))))", False),
    ("Both(Linf(eps=0.1), Linf(eps=0.4))", False),
    ("Linf(eps=lambda: 0)", False),
])  # fmt: skip
def test_opening_a_record_compares_norms_with_one_radius(
    spec: str, refused: bool, workspace: Place
) -> None:
    record = read_record(workspace["attacked"])
    sizes = {"size_linf": torch.full((200,), 0.3), "size_l2": torch.full((200,), 0.05)}
    context = pytest.raises(BadInput, match="size_linf is") if refused else nullcontext()
    with context:
        check_arrays(record.arrays | sizes, record.metadata | {"spec": spec})


@pytest.mark.skipif(not EXHAUSTIVE, reason="a measurement; make exhaustive")
def test_checks_of_an_opened_record_cost_little(workspace: Place) -> None:
    record, seconds = read_record(workspace["attacked"]), []
    for function in (
        lambda: read_record(workspace["attacked"]),
        lambda: check_norms(record.arrays, record.metadata["spec"]),
    ):
        begin = time.process_time()
        for _ in range(300):
            function()
        seconds.append(time.process_time() - begin)
    assert seconds[1] < 0.03 * seconds[0]


def test_the_command_prints_findings_and_what_it_rests_on(
    workspace: Place, root: Path, tmp_path: Path, command: Command
) -> None:
    code, out, err = command("verify", str(workspace["scores"].parents[1]))
    assert (code, err) == (0, "")
    assert out.startswith("checked: runs (1), ")
    assert "not checked: weights absent: nothing was attacked again (1)" in out
    place = copy_of(workspace, root, tmp_path / "copy")
    edit_json(place["certificate"], sentence="always right")
    code, out, err = command("verify", str(place["certificate"]), "--json")
    assert (code, err) == (2, f"demur: 1 finding in {place['certificate']}\n")
    assert "does not follow from its counts" in json.loads(out)["findings"][0]["problem"]
    for words, sentence in (
        (("nothing",), "there is no path nothing"), ((str(tmp_path),), "holds nothing that demur"),
    ):  # fmt: skip
        if sentence.startswith("holds"):
            shutil.rmtree(tmp_path / "copy")
        expect_error(command("verify", *words), sentence)


def test_tables_of_audits_follow_from_their_counts(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    attack = AutoAttack(net, eps=0.1, version="custom", attacks_to_run=["apgd-ce"], verbose=False)
    x = torch.rand(4, 1, 8, 8)
    found = attack.evaluate(x, torch.arange(4), sanity=False).to_json()
    path = tmp_path / "audit.json"
    path.write_text(json.dumps({"autoattack": found}))
    assert verify(path).findings == []
    for change in (
        put(0.123, "autoattack", "attacked", "accepted_right", "share"),
        put(4, "autoattack", "unbroken"), put(9, "autoattack", "n"),
        put("many", "autoattack", "clean", "rejected", "count"), put([], "autoattack", "clean"),
    ):  # fmt: skip
        path.write_text(json.dumps({"autoattack": found}))
        edit_table(path, change)
        assert len(verify(path).findings) == 1


def test_an_unfinished_training_and_a_pack_are_verified(
    workspace: Place, root: Path, tmp_path: Path
) -> None:
    loaded = LoadedRun(Run(workspace["run"]), "cpu")
    found = verify(pack(loaded, tmp_path / "pack", 30).path)
    assert found.findings == []
    assert found.checked["identity"] == found.checked["records"] >= 4
    run = Run(tmp_path / "half")
    run.path.mkdir()
    shutil.copy2(workspace["run"] / "recipe.txt", run.path)
    state = ResumeState(1, BestEpoch(1, None), ("{}",))
    save_state(run, state, {"w": torch.zeros(2)}, {"w": torch.zeros(2)}, None)
    assert verify(run.path).unchecked["the training has not ended: there are no results yet"] == 1
    next((run.path / "state").glob("epoch-*")).write_bytes(b"")
    assert len(verify(run.path).findings) == 1


@pytest.mark.parametrize(
    ("stored", "older", "name"),
    [
        ("restarts-cifar10/pgdat-rr-seed0", "2 of RejectAutoAttackEnsemble", "reject-autoattack"),
        ("best-cifar10/long-seed0", "1 of WorstScore", "worst-score"),
    ],
)
def test_a_record_of_an_older_version_of_its_attack_is_named_and_no_finding(
    stored: str, older: str, name: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(ROOT / "results" / stored, run)
    older = f"identity: it is of version {older}, now 3"
    found = verify(run)
    assert found.findings == []
    assert found.unchecked[older] == 2
    path = next((run / "records").glob(f"{name}-*RCon*.npz"))
    edit_record(path, nothing, attack="0" * 64)
    found = verify(run)
    assert "digest of the attack is not that of its spec" in found.findings[0].problem
    assert found.unchecked[older] == 1
