"""The paper's tables and figures computed at a scale: needs, jobs, resume, LaTeX, figures."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from demur.errors import Diverged
from demur.evaluate import RecordOptions
from demur.files.tables import escape
from demur.paper import cells
from demur.paper.cells import needs
from demur.paper.figures import FIGURES, figure_needs
from demur.paper.paper_runs import Job, Need, RunSource, compute, nets_of
from demur.paper.published import PAPER_TABLES, TABLES_BY_NUMBER, TEXT_TABLES
from demur.paper.scales import SCALES, SmokeScale, find_field
from demur.recipes import RECIPES, Recipe, attack, recipe, with_changes
from demur.report.plot import drawing, saved
from demur.runs import Record
from tests.conftest import TINIEST, Command
from tests.test_cli import expect_error

ROOT = Path(__file__).parents[1]


def test_the_smoke_scale_covers_every_table_with_a_tenth_of_the_steps() -> None:
    found = list(needs([*PAPER_TABLES.values(), *TEXT_TABLES], "smoke"))
    nets = nets_of(found, Path("nowhere"))
    assert 35 <= len(nets) <= 45
    assert {need.options.n for need in found} == {128}
    for net in nets:
        for need in net.needs:
            assert (find_field(attack(need.attack, net.recipe), "steps") or 0) <= 100
    filled = {cells.cell_recipe(table, row, column, "smoke")
              for table in PAPER_TABLES.values() for row, column, _ in table.cells()}  # fmt: skip
    assert None not in filled


@pytest.mark.parametrize("scale", SCALES)
def test_every_figure_has_recipes_and_known_attacks(scale: str) -> None:
    found = list(figure_needs(FIGURES.values(), scale))
    nets = {need.net.removeprefix(f"{scale}-") for need in found}
    assert nets >= {"standard", "pgdat", "pgdat-rr"}
    assert len([need for need in found if need.attack.startswith("adaptive")]) == 35
    for need in found[:: 1 if scale == "smoke" else 7]:
        attack(need.attack, need.recipe)


def test_scales_choose_their_own_attack_and_stand_ins_are_named() -> None:
    alternatives = ("pgd-100:restarts=10,eps=16/255", "pgd-100:eps=16/255")
    assert SCALES["paper"].choose(alternatives) == alternatives[:1]
    assert SCALES["short"].choose(alternatives) == alternatives[1:]
    digits = RECIPES["digits-pgdat"]
    assert SCALES["smoke"].attack_text(alternatives[1], digits) == "pgd-100:eps=0.3,steps=10"
    assert SCALES["smoke"].attack_text("clean", digits) == "clean"
    gama = SCALES["smoke"].attack_text("gama-pgd:restarts=1", digits)
    assert gama == "gama-pgd:restarts=1,steps=10,decay_steps=(6, 8)"
    assert "WRN-34-10" in SCALES["smoke"].stand_ins(["net=WideResNet()"])
    assert "CIFAR-100" in SCALES["smoke"].stand_ins(["data=CIFAR100()"])
    assert SCALES["paper"].stand_ins(["data=CIFAR100()"]) == ""


@pytest.fixture
def tiny_smoke(few_digits: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The smoke scale with nets that train in a second on few images."""

    def tiny(self: SmokeScale, entry: str, changes: object) -> Recipe:
        small = [change for change in TINIEST if entry != "standard" or change != "attack.steps=1"]
        return with_changes(RECIPES[f"digits-{entry}"], [*small, "selection=test"])

    monkeypatch.setattr(SmokeScale, "_recipe", tiny)
    monkeypatch.setattr(SmokeScale, "images", lambda self, text: 32)
    cells._recipe.cache_clear()
    yield
    cells._recipe.cache_clear()


def test_tables_and_figures_are_computed_once(
    tiny_smoke: None, command: Command, in_empty_folder: Path
) -> None:
    """A second call only reads; formats agree; figures use the same runs."""
    words = ["paper", "table", "1", "--scale", "smoke", "--runs", "here"]
    code, page, err = command(*words, "-o", "page.md")
    assert code == 0, err
    assert "1 of 6: train, smoke-standard-" in err
    assert "12 of 12 cells are measured" in page
    assert "digits in place of CIFAR-10, ResNet-8 in place of ResNet-18, 1 epochs" in page
    assert (in_empty_folder / "page.md").read_text() in page
    code, out, err = command(*words, "--json")
    assert code == 0
    assert "train" not in err
    rows = json.loads(out)
    assert all(row["n"] == 32 and Path(row["record"]).is_file() for row in rows)
    code, latex, _ = command(*words[:5], "--from", "here", "--latex")
    assert code == 0
    _check_latex(latex, [1])
    code, out, err = command("paper", "figure", "5", "--scale", "smoke", "--runs", "here")
    assert code == 0, err
    assert "train" not in err
    assert Path("figures/tau.pdf").read_bytes().startswith(b"%PDF")
    assert "<svg" in Path("figures/tau.svg").read_text()
    assert Path("figures/tau.png").read_bytes()[1:4] == b"PNG"
    assert Path("figures/tau.txt").read_text().strip() in out
    kept = ["--scale", "smoke", "--from", "here", "--format", "svg", "-o", "more"]
    code, out, err = command("paper", "figure", "tsne", "module", *kept)
    assert code == 2
    assert "figure tsne is not drawn: no record with features of clean on standard" in err
    assert sorted(path.name for path in Path("more").iterdir()) == ["module.svg", "module.txt"]


def test_only_some_nets_and_only_cells_that_a_folder_leaves_empty_are_computed(
    tiny_smoke: None, command: Command, in_empty_folder: Path
) -> None:
    words = ["paper", "table", "1", "--scale", "smoke"]
    code, page, err = command(*words, "--runs", "a", "--only", "standard")
    assert code == 0, err
    assert "train, smoke-standard-" in err
    assert "train, smoke-pgdat-" not in err
    assert "6 of 6 cells are measured" in page
    assert "--only standard" in page
    code, page, err = command(*words, "--runs", "b", "--missing-from", "a")
    assert code == 0, err
    assert "train, smoke-pgdat-" in err
    assert "train, smoke-standard-" not in err
    assert "6 of 12 cells are measured" in page
    filled = ["--only", "pgdat", "--missing-from", "b"]
    expect_error(command(*words, *filled), "b fills every cell of these tables")


def test_a_stopped_computation_resumes_and_a_failed_net_stops_no_other(
    few_digits: None, in_empty_folder: Path
) -> None:
    good, bad = recipe("digits-pgdat", TINIEST), recipe("digits-pgdat-rr", TINIEST)
    wanted = [
        Need("pgdat-rr", bad, "clean", RecordOptions(n=16)),
        Need("pgdat", good, "clean", RecordOptions(n=16)),
        Need("pgdat", good, "pgd-10:steps=1", RecordOptions(n=16)),
        Need("pgdat", good, "clean", RecordOptions(n=8)),
    ]
    made = RunSource(None, "cpu", None, "plain").steps()

    def train(spec: Recipe, folder: Path) -> Any:
        if spec == bad:
            raise Diverged("the loss is not finite")
        return made.train(spec, folder)

    def stopped(loaded: Any, label: str, *rest: Any) -> Any:
        if label != "clean":
            raise KeyboardInterrupt
        return made.craft(loaded, label, *rest)

    home, jobs = in_empty_folder / "runs", list[Job]()
    with pytest.raises(KeyboardInterrupt):
        compute(wanted, home, replace(made, train=train, craft=stopped), jobs.append)
    assert [job.name for job in jobs] == ["train", "train", "clean", "pgd-10:steps=1"]
    assert {job.count for job in jobs} == {5}
    assert jobs[-1].seconds_left is not None
    (clean,) = home.glob("*/records/clean-test-*.npz")
    before, jobs = clean.stat().st_mtime_ns, list[Job]()
    failures = compute(wanted, home, replace(made, train=train), jobs.append)
    (failure,) = failures
    assert failure.net.recipe == bad
    assert str(failure.error) == "the loss is not finite"
    assert [job.name for job in jobs] == ["train", "pgd-10:steps=1"]
    assert clean.stat().st_mtime_ns == before


def test_the_last_epoch_is_attacked_too(few_digits: None, in_empty_folder: Path) -> None:
    chosen = recipe("digits-pgdat", [*TINIEST, "epochs=2", "selection=test"])
    made = RunSource(None, "cpu", None, "plain").steps()

    def train(spec: Recipe, folder: Path) -> Any:
        """A training whose first epoch was the better one."""
        run = made.train(spec, folder)
        assert run is not None
        if not (folder / "last").exists():
            made.train(replace(spec, selection="last"), in_empty_folder / "elsewhere")
            (in_empty_folder / "elsewhere").rename(folder / "last")
        return run

    wanted = [Need("pgdat", chosen, "clean", RecordOptions(n=16))]
    jobs: list[Job] = []
    compute(wanted, in_empty_folder / "runs", replace(made, train=train), jobs.append, True)
    assert [job.run.rpartition("/")[2] for job in jobs[1:]][1] == "last"
    assert len(list((in_empty_folder / "runs").glob("*/last/records/clean-test-*.npz"))) == 1


def _check_latex(page: str, numbers: list[int | str]) -> None:
    """Environments are balanced, and every row has as many cells as the table has columns."""
    assert page.count(r"\begin{table}") == page.count(r"\end{table}") == len(numbers)
    assert page.count("{") - page.count(r"\{") == page.count("}") - page.count(r"\}")
    for number, table in zip(numbers, page.split(r"\begin{tabular}")[1:], strict=True):
        columns = re.match(r"\{(l?r*)\}", table)
        assert columns is not None
        rows = [line for line in table.splitlines() if line.endswith(r" \\")]
        assert len(rows) == len(TABLES_BY_NUMBER[number].rows) + 1
        assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {len(columns[1]) - 1}


def test_latex_of_every_table_is_escaped_and_rectangular() -> None:
    from demur.paper.cells import Cell
    from demur.paper.pages import latex_page

    made = [
        Cell(table.number, row.label, column.label, value, value, value, 128, 10,
             "50% of A&B_{x}", "pgd", "")
        for table in TABLES_BY_NUMBER.values()
        for row, column, value in table.cells()
    ]  # fmt: skip
    page = latex_page(made, "demur paper table all\n\\input{x}")
    _check_latex(page, list(TABLES_BY_NUMBER))
    body = "\n".join(line for line in page.splitlines() if not line.startswith("%"))
    assert r"50\% of A\&B\_\{x\}" in body
    assert not re.search(r"(?<!\\)[%#]\w", body)
    assert r"\input" not in body


def test_special_characters_are_escaped() -> None:
    assert escape("C&W, 95% of #1_a {x} ~^") == (
        r"C\&W, 95\% of \#1\_a \{x\} \textasciitilde{}\textasciicircum{}"
    )
    assert escape("\\") == r"\textbackslash{}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table", "1", "--scale", "large"], "there is no scale 'large'"),
        (["table", "1", "verdicts", "--scale", "smoke"], "made alone"),
        (["table", "1", "--scale", "smoke", "--only", "pgdat-x"], "have no net 'pgdat-x'"),
        (["table", "1", "--from", "x", "--missing-from", "y"], "use it with --scale"),
        (["table", "verdict", "--from", "x"], "did you mean verdicts?"),
        (["table", "methods-digits"], "demur paper study recipes methods-digits"),
        (["table", "1", "--from", "x", "--json", "--latex"], "leave out --json or --latex"),
        (["table", "1", "--from", "x", "--runs", "y"], "leave out one"),
        (["table", "1", "--from", " "], "the folder to read is empty"),
        (["table", "1", "--scale", "smoke", "--runs", " "], "the output folder has an empty name"),
        (["figure", "tau"], "demur paper figure tau --from results"),
        (["figure", "9", "--from", "results"], "the paper has no figure '9'"),
        (["figure", "tau", "--from", "x", "--format", "jpg"], "figures have no format 'jpg'"),
    ],
)
def test_a_wrong_request_is_one_sentence(command: Command, words: list[str], message: str) -> None:
    expect_error(command("paper", *words), message)


def test_figures_are_drawn_from_stored_records(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kept results have the outputs of PGD-10 on PGD-AT+RR, which three figures need."""
    monkeypatch.chdir(ROOT)
    code, out, err = command(
        "paper",
        "figure",
        "separability",
        "--from",
        "results",
        "-o",
        str(tmp_path),
        "--format",
        "svg",
    )
    assert code == 0, err
    assert "(110 epochs, best PGD-10 on test, seed 0; 10,000 images.)" in out
    svg = (tmp_path / "separability.svg").read_text()
    assert "R-Con" in svg
    assert len(svg) < 200_000


LABELS = {
    "separability": ["R-Con", "correct", "wrong", "%"],
    "module": ["backbone", "RR module", "T-Con", "no gradient"],
    "temperatures": ["R-Con", "correct", "wrong"],
    "adaptive": ["TPR-95 accuracy (%)", "AUROC", "SNet", "EBD", "confidence"],
    "tau": ["TPR-95 accuracy (%)", "mean value", "T-Con, wrong"],
    "xi": ["confidence", "% above", "correct"],
    "tsne": ["standard training", "adversarial training", "class", "t-SNE 1"],
    "reliability": ["clean: ECE", "PGD-10: ECE", "accuracy", "share of images"],
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_its_axes_and_legends(name: str) -> None:
    """Drawn from random outputs of 60 images."""
    draws = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 10
    logits = torch.randn(60, 10, generator=draws) + 3 * torch.nn.functional.one_hot(y, 10)
    aux = torch.randn(60, 1, generator=draws)
    arrays = {"y": y, "logits": logits, "aux": aux, "feature": logits}
    record = Record(arrays, {"label": "random", "features": True})
    figure, scale = FIGURES[name], SCALES["smoke"]
    recipes = [scale.recipe(one.entry, ()) for one in figure.evidence]
    with drawing(*figure.size) as canvas:
        figure.draw(canvas, [record] * len(recipes), [one for one in recipes if one])
        svg = saved(canvas, "svg").decode()
    for label in LABELS[name]:
        assert label in svg, label
