"""The leaderboard: entries, their figures, verification, and the site."""

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from demur.attacks import APGD, PGD, Attack, MinMargin, RejectionObjective, WorstScore
from demur.attacks.attack import AcceptedError, Rejected
from demur.attacks.balls import Linf
from demur.calibrate import TPR
from demur.errors import BadInput
from demur.evaluate import LoadedRun, run_attack
from demur.files.checked_files import write_json
from demur.leaderboard import entry as board
from demur.leaderboard.entry import (
    Entry,
    attack_set,
    bits,
    figures,
    make_entry,
    problems,
    write_site,
)
from demur.rejectors import Con, Energy
from demur.rejectors.rule import Rejector
from demur.report.explorer import packed
from demur.runs import Run
from tests.conftest import Command

ROOT = Path(__file__).parents[1]
SCHEMA = json.loads(Path(board.__file__).with_name("entry.schema.json").read_text())
LARGEST = 600_000  # bytes of all entries
BALL = Linf(0.15)


def short_attacks(rejector: Rejector) -> list[tuple[str, float | None, Attack]]:
    """Attacks of each kind, of few steps."""
    aim, rejected = AcceptedError(rejector, TPR(0.95)), Rejected(rejector, TPR(0.95))
    search: Any = {"objective": MinMargin(aim), "criterion": aim}
    forced = APGD(BALL, steps=4, objective=RejectionObjective(rejected), criterion=rejected)
    return [
        (board.WORST, None, WorstScore(BALL, rejector, steps=4, targets=1)),
        (board.ERRORS, 0.95, APGD(BALL, steps=4, **search)),
        ("selective-pgd", 0.95, PGD(BALL, steps=4, keep="success", **search)),
        (board.FORCED, 0.95, forced),
    ]


@pytest.fixture(scope="module")
def entries(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three entries of one net: two rejectors, and one image."""
    folder = tmp_path_factory.mktemp("leaderboard")
    own = Run(Path(shutil.copytree(tiny_run.path, folder / "run")))  # others count its records
    loaded = LoadedRun(own, "cpu")
    given: dict[str, tuple[Rejector, int]] = {
        "con": (Con(), 6), "energy": (Energy(), 6), "one": (Con(), 1)
    }  # fmt: skip
    for name, (rejector, n) in given.items():
        made = make_entry(loaded, name, rejector, short_attacks(rejector), n, run_attack)
        made["net"]["name"] = str(own.path)
        write_json(folder / f"{name}.json", made, indent=0)
    return {name: folder / f"{name}.json" for name in given}


def drawn(worst: list[float], correct: list[bool], name: str = "net") -> Entry:
    """An entry with these worst scores, clean scores 0.1, 0.2 ... and one attack."""
    n = len(worst)
    spec = "WorstScore(Linf(0.15), Con(tau=1.0))"
    entry: Entry = {
        "schema": 1,
        "net": {"name": name, "weights": "0" * 64, "recipe": ""},
        "data": {"name": "Digits", "spec": "Digits()", "split": "test", "n": n, "digest": "0" * 64},
        "threat": {"norm": "Linf", "eps": 0.15},
        "rejector": {"name": "Con", "spec": "Con(tau=1.0)"},
        "thresholds_from": "9 clean cal images",
        "thresholds": [0.15, 0.25, 0.35],
        "images": {
            "index": packed(np.arange(n), "<f4"), "correct": bits(np.array(correct)),
            "clean": packed(np.arange(1, n + 1) / 10, "<f4"),
            "worst": packed(np.array(worst), "<f4"),
        },
        "attacks": [
            {"name": board.WORST, "tpr": None, "spec": spec, "seconds": None, "hits": "0" * n}
        ],
        "date": "2026-01-01", "device": "cpu", "code": "0", "verification": [],
    }  # fmt: skip
    return entry | {"figures": figures(entry)}


def leaves(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all numbers and verdicts in a JSON value."""
    if isinstance(value, dict):
        return [end for key, one in value.items() for end in leaves(one, (*way, key))]
    if isinstance(value, list):
        return [end for key, one in enumerate(value) for end in leaves(one, (*way, key))]
    return [way] if isinstance(value, int | float) or set(str(value)) <= {"0", "1"} else []


def change(entry: Entry, way: tuple[Any, ...]) -> None:
    """Change one number, or the first verdict of several."""
    for key in way[:-1]:
        entry = entry[key]
    old = entry[way[-1]]
    flipped = "01"[old[0] == "0"] + old[1:] if isinstance(old, str) else old * 1.01 + 1
    entry[way[-1]] = flipped


def test_figures_count_images_and_lift_scores_to_the_thresholds_of_other_attacks() -> None:
    entry = drawn([-np.inf, 0.2, 0.9, -np.inf], [True, True, False, True])
    one = entry["attacks"][0]
    entry["attacks"] += [one | {"name": board.ERRORS, "tpr": 0.8, "hits": "1010"}]
    entry["attacks"] += [one | {"name": "check", "tpr": 0.8, "hits": "1101"}]
    made = figures(entry)
    assert [level["worst_score"] for level in made["levels"]] == [2, 1, 1]
    assert [level["errors"] for level in made["levels"]] == [3, 2, 2]
    assert [level["coverage"] for level in made["levels"]] == [0.75, 0.5, 0.25]
    assert made["levels"][2]["reject_autoattack"] == 2
    assert made["levels"][2]["more"] == {"check": 2}
    assert made["levels"][0]["more"] == {}
    assert made["correct"] == 3
    # the mean over clean scores .1 .2 .3 .4 of the images that reach them: .35, .2, .9
    assert made["augrc"] == pytest.approx((3 + 3 + 2 + 1) / 16)
    assert [count for *_, count in made["curve"]] == [1, 2, 3, 3]


@pytest.mark.parametrize(("worst", "correct"), [(-np.inf, True), (0.9, False)])
def test_a_net_with_nothing_wrong_and_one_with_nothing_right(worst: float, correct: bool) -> None:
    entry = drawn([worst] * 4, [correct] * 4)
    jsonschema.validate(entry | {"metadata_digest": "0" * 64}, SCHEMA)
    assert problems(entry) == []
    shares = {level["share"] for level in entry["figures"]["levels"]}
    assert shares == {0.0 if correct else 1.0}


def test_three_entries_pass_and_their_images_are_broken_again(
    entries: dict[str, Path], command: Command
) -> None:
    for path in entries.values():
        entry = json.loads(path.read_text())
        jsonschema.validate(entry, SCHEMA)
        assert problems(entry) == []
        code, out, err = command("leaderboard", "verify", str(path), "--n", "2")
        n = min(2, entry["data"]["n"])
        assert (code, f"{n} were attacked again" in out) == (0, True), err


def test_a_changed_number_anywhere_is_found(
    entries: dict[str, Path], tmp_path: Path, command: Command
) -> None:
    text, path = entries["con"].read_text(), tmp_path / "changed.json"
    ways = [way for way in leaves(json.loads(text)) if way[0] != "metadata_digest"]
    assert len(ways) > 50
    for way in ways:
        entry = json.loads(text)
        change(entry, way)
        path.write_text(json.dumps(entry))
        with pytest.raises(BadInput, match=r"version|is damaged"):
            board.read_entry(path)
        if way[0] in ("figures", "images", "data") or way[-1] == "eps":  # a digest made to fit
            assert problems(entry), way
    code, _, err = command("leaderboard", "verify", str(path))
    assert (code, err.count("\n")) == (2, 1)


def test_a_change_with_figures_and_digest_made_to_fit_is_found_by_the_attack(
    entries: dict[str, Path], tmp_path: Path, command: Command
) -> None:
    entry, path = json.loads(entries["con"].read_text()), tmp_path / "forged.json"
    del entry["metadata_digest"]
    entry["images"]["worst"] = packed(np.full(6, -np.inf), "<f4")
    entry["thresholds"][0] -= 0.2
    entry["figures"] = figures(entry)
    write_json(path, entry)
    assert problems(entry) == []
    code, _, err = command("leaderboard", "verify", str(path), "--n", "6")
    assert code == 2
    assert "worst: " in err
    assert "images differ when they are attacked again" in err
    assert "thresholds: " in err


def test_a_verification_is_noted(
    entries: dict[str, Path], tmp_path: Path, command: Command
) -> None:
    path = tmp_path / "noted.json"
    path.write_text(entries["one"].read_text())
    assert command("leaderboard", "verify", str(path), "--n", "1", "--by", "me")[0] == 0
    entry = board.read_entry(path)
    assert [(one["who"], one["n"]) for one in entry["verification"]] == [("me", 1)]
    jsonschema.validate(json.loads(path.read_text()), SCHEMA)


def test_the_site_escapes_names_and_leaves_out_broken_files(
    entries: dict[str, Path], tmp_path: Path, command: Command
) -> None:
    source, site = tmp_path / "entries", tmp_path / "site"
    source.mkdir()
    for path in entries.values():
        (source / path.name).write_text(path.read_text())
    name = "</script><script>alert('1')</script>&"
    write_json(source / "markup.json", drawn([0.5], [True], name))
    (source / "broken.json").write_text('{"schema": 1,')
    write_json(source / "newer.json", drawn([0.5], [True]) | {"schema": 2})
    write_json(source / "odd.json", drawn([0.5], [True]) | {"verification": [{"who": "me"}]})
    code, out, err = command("leaderboard", "build", "--entries", str(source), "-o", str(site))
    assert (code, err.count("\n")) == (2, 1)
    assert "(4 entries)" in out, err
    for words in ("broken.json", "has version 2", "install a newer one", "odd.json"):
        assert words in err
    pages = {path.name: path.read_text() for path in site.glob("*.html")}
    assert set(pages) == {"index.html", *(f"{one}.html" for one in (*entries, "markup"))}
    for page in pages.values():
        assert "alert('1')" not in page
        assert "<script src" not in page
        assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "&lt;/script&gt;" in pages["index.html"]
    assert write_site(source, site)[0] == 4  # its own folder is replaced


def test_a_folder_of_something_else_is_not_replaced(
    entries: dict[str, Path], tmp_path: Path, command: Command, tiny_run: Run
) -> None:
    (tmp_path / "index.html").write_text("<p>mine")
    folder = str(entries["con"].parent)
    for place in (tmp_path, tiny_run.path):
        code, _, err = command("leaderboard", "build", "--entries", folder, "-o", str(place))
        assert code == 2
        assert "is in the way" in err
    assert (tmp_path / "index.html").read_text() == "<p>mine"
    code, _, err = command("leaderboard", "build", "--entries", "none", "-o", str(tmp_path / "new"))
    assert (code, "holds no entry" in err) == (2, True)


def test_wrong_requests_are_one_sentence(command: Command, tiny_run: Run) -> None:
    given = {
        ("my_nets:load", "--rejector", "Con"): "demur retrofit my_nets:load",
        (str(tiny_run.path), "--rejector", "Con,Energy"): "an entry has one",
        (str(tiny_run.path), "--rejector", "Con", "--norm", "L3"): "Linf, L2 or L1",
        ("nothing", "--rejector", "Con"): "there is no run",
    }
    for words, sentence in given.items():
        code, out, err = command("leaderboard", "add", *words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert sentence in err


def test_the_attacks_of_an_entry_are_in_its_ball_and_at_three_thresholds() -> None:
    for quick in (False, True):
        planned = attack_set(BALL, Con(), "cal", quick)
        assert all(attack.balls() == {BALL} for _, _, attack in planned)
        assert [tpr for name, tpr, _ in planned if name == board.ERRORS] == [0.95, 0.9, 0.8]
        assert {name for name, _, _ in planned} == {
            board.WORST, board.ERRORS, board.FORCED, "selective-pgd", "orthogonal-apgd"
        }  # fmt: skip


def test_every_entry_of_the_repository_follows_from_its_images() -> None:
    paths = sorted((ROOT / "leaderboard").glob("*.json"))
    assert sum(path.stat().st_size for path in paths) <= LARGEST
    for path in paths:
        jsonschema.validate(json.loads(path.read_text()), SCHEMA)
        assert problems(board.read_entry(path)) == []
