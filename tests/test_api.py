"""The Python API as a user meets it: plain inputs, readable help, and classes of one's own."""

import doctest
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import demur
from demur import (
    PGD,
    AcceptedError,
    AutoAttack,
    BadInput,
    Con,
    Energy,
    Linf,
    LoadedRun,
    MaxLogit,
    Misclassified,
    RCon,
    Rejected,
    Run,
    recipe,
)
from demur.output import Output
from demur.recipes import VOCABULARY
from demur.runs import Record
from demur.spec import check_readable, read, show
from tests import forked
from tests.conftest import Command

LOGITS = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.5]])
Y = torch.tensor([1, 1])


@pytest.mark.parametrize("name", demur.__all__)
def test_every_public_name_is_there_and_described(name: str) -> None:
    assert (getattr(demur, name).__doc__ or "").strip()


EXTENDED = (
    demur.Attack, demur.Objective, demur.Rejector, demur.Score, demur.Head, demur.Framework,
    demur.OneCycle, demur.Piecewise, demur.Uncertified, demur.PGD, demur.APGD, AcceptedError,
    Misclassified, Linf, demur.L2, AutoAttack, demur.RejectAutoAttack, demur.ModelWithScore,
    demur.RejectClassModel, demur.OwnImages, demur.FactoryNet,
)  # fmt: skip


@pytest.mark.parametrize("public", EXTENDED, ids=lambda public: public.__name__)
@pytest.mark.filterwarnings("ignore:the model is in train mode")
def test_examples_of_public_docstrings_run(public: type) -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(public, globs={})
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.parametrize("score", [Con(), Energy(), MaxLogit()], ids=show)
def test_scores_take_whatever_a_model_returns(score: Con | Energy | MaxLogit) -> None:
    none = LOGITS.new_zeros(2, 0)
    expected = score(Output(LOGITS, none, none))
    for returned in (LOGITS, (LOGITS, None), [LOGITS], {"logits": LOGITS}):
        assert torch.equal(score(returned), expected)  # type: ignore[arg-type]


def test_criteria_take_logits() -> None:
    assert Misclassified()(LOGITS, Y).tolist() == [True, False]  # type: ignore[arg-type]
    assert AcceptedError(Con(), 0.6)(LOGITS, Y).tolist() == [True, False]  # type: ignore[arg-type]
    assert Rejected(Con(), 0.6)(LOGITS, Y).tolist() == [False, True]  # type: ignore[arg-type]


def test_what_holds_no_logits_is_refused_in_one_sentence() -> None:
    for returned in (None, torch.zeros(3), {"scores": LOGITS}, "logits"):
        with pytest.raises(BadInput, match="a model must return logits with one row per image"):
            Con()(returned)  # type: ignore[arg-type]


def test_a_record_prints_in_three_lines(scored_source: LoadedRun) -> None:
    record: Record = scored_source.run.records()[0]
    assert len(repr(record).splitlines()) <= 3
    assert max(map(len, repr(record).splitlines())) <= 100


def test_a_device_may_be_a_string(tiny_run: Run) -> None:
    assert LoadedRun(tiny_run, "cpu").device == torch.device("cpu")
    with pytest.raises(BadInput):
        LoadedRun(tiny_run, "gpu9")


def test_one_change_needs_no_list() -> None:
    assert recipe("digits-pgdat-rr", "epochs=3") == recipe("digits-pgdat-rr", ["epochs=3"])


def test_images_that_are_no_tensor_or_count_to_255_are_refused(
    tiny_source: LoadedRun, batch: tuple[torch.Tensor, torch.Tensor]
) -> None:
    x, y = batch
    attack = PGD(Linf(0.1), steps=1)
    with pytest.raises(BadInput, match=r"images must be a torch tensor, not ndarray; use torch"):
        attack(tiny_source.net, x.numpy(), y)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="labels must be a torch tensor, not list"):
        attack(tiny_source.net, x, y.tolist())  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"pixels must lie in \[0, 1\]"):
        attack(tiny_source.net, 255 * x, y)
    with pytest.raises(BadInput, match="this net takes images of shape"):
        tiny_source.net((255 * x).byte())


def test_a_radius_in_levels_is_refused(tiny_source: LoadedRun) -> None:
    with pytest.raises(BadInput, match="write eps=8/255"):
        AutoAttack(tiny_source.net, eps=8)


@pytest.mark.parametrize("spelling", ["R-Con", "RCon", "rcon", "r-con"])
def test_every_spelling_of_a_rejector_means_one(spelling: str) -> None:
    made = recipe("digits-pgdat-rr")
    assert made.find_rejector(spelling) == "R-Con"
    if spelling != "r-con":  # in a spec that is a difference
        assert read(spelling, VOCABULARY) == RCon()


def test_a_spelling_is_understood_on_the_command_line(
    scored_source: LoadedRun, command: Command
) -> None:
    code, out, err = command("calibrate", str(scored_source.run.path), "--tpr", "0.5",
                             "--rejector", "rcon")  # fmt: skip
    assert code == 0, err
    assert out.startswith("R-Con")


OWN_HEAD = '''
"""A head of a user's own."""
from dataclasses import dataclass

from demur import RR


@dataclass(frozen=True)
class MyRR(RR):
    """RR with a field more."""

    boost: float = 2.0

    def auxiliary_loss(self, outputs):
        return self.boost * super().auxiliary_loss(outputs)
'''
TRAIN = """
import sys
from dataclasses import replace
from pathlib import Path
from my_heads import MyRR
from demur import recipe, train
made = recipe("digits-pgdat-rr", ["epochs=1", "net.width=4", "attack.steps=1"])
made = replace(made, method=replace(made.method, head=MyRR(boost=3.0)))
train(made, Path("runs/mine"))
"""


def test_a_head_of_ones_own_is_trained_attacked_and_scored(tmp_path: Path) -> None:
    (tmp_path / "my_heads.py").write_text(OWN_HEAD)
    env = {"PYTHONPATH": str(Path(demur.__file__).parents[1]), "PATH": "", "OMP_NUM_THREADS": "1",
           "DEMUR_MODULES": "my_heads"}  # fmt: skip

    def run(*words: str) -> str:
        done = forked.run(list(words), tmp_path, env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("-c", TRAIN)
    assert 'Custom("my_heads:MyRR"' in (tmp_path / "runs/mine/recipe.txt").read_text()
    run("-c", TRAIN)  # a finished run is found again
    run("-m", "demur", "attack", "mine", "clean", "pgd-10", "--n", "20", "--device", "cpu")
    assert "R-Con" in run("-m", "demur", "score", "mine", "--protocol", "paper", "--device", "cpu")


def test_a_class_that_cannot_be_found_again_is_refused_before_training() -> None:
    class Local(demur.RR):
        pass

    made = recipe("digits-pgdat-rr")
    made = replace(made, method=replace(made.method, head=Local()))
    with pytest.raises(BadInput, match="define it at the top level of a module"):
        check_readable(made)
    with pytest.raises(BadInput, match="allow it with DEMUR_MODULES=nowhere_at_all"):
        read('Custom("nowhere_at_all:Thing")', VOCABULARY)
    with pytest.raises(BadInput, match="allow it with DEMUR_MODULES=os"):
        read('Custom("os:system")', VOCABULARY)


def test_reading_a_recipe_imports_no_module_that_was_not_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "came_with_a_run.py").write_text("raise SystemExit('code was run')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadInput, match="allow it with DEMUR_MODULES=came_with_a_run"):
        read('Custom("came_with_a_run:Head")', VOCABULARY)


def test_score_tables_cut_no_figure(
    scored_source: LoadedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from demur.cli.evaluate import score_run
    from demur.report.terminal import show_scores

    _, scored = score_run(scored_source)
    figures: dict[int, list[str]] = {}
    for width in (60, 80, 100, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        capsys.readouterr()
        show_scores(scored, ["paper", "deploy"])
        shown = capsys.readouterr().out
        tables = [line for line in shown.splitlines() if "95%" not in line]
        assert max(map(len, tables)) <= width
        assert "…" not in shown
        figures[width] = sorted(re.findall(r"[-+]?\d+\.\d+", shown))
    assert figures[60] == figures[80] == figures[100] == figures[200]


def test_the_demo_ends_on_one_screen(scored_source: LoadedRun) -> None:
    from demur.cli.evaluate import main_rejectors, score_run
    from demur.report.terminal import table_width, verdict_table

    _, scored = score_run(scored_source)
    table = verdict_table(scored, main_rejectors(scored_source))
    assert table_width(table) <= 80
    assert 2 + len(table.rows) <= 20
