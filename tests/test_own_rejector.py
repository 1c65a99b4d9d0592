"""A rejector of the user's own, in every command; rejectors that query the net; whose fault."""

import json
import re
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import demur
from demur import (
    CPR,
    PGD,
    TPR,
    AcceptedError,
    BadInput,
    Consistency,
    Coupled,
    Guard,
    ImageRejector,
    Linf,
    LoadedRun,
    ModelScore,
    ModelWithScore,
    Output,
    RejectAutoAttack,
    RejectorEvaluation,
    WorstScore,
    run_attack,
)
from demur.attacks import Objective, ScoreObjective
from demur.evaluate import RecordOptions
from demur.evaluate.record_scores import values
from demur.output import as_output
from demur.recipes import aimed_at, rejectors_named
from demur.recipes import attack as attack_named
from demur.rejectors.image_scores import image_rejectors
from demur.runs.record import attack_of
from demur.spec.code_digest import fingerprint, score_key
from tests.conftest import Command

MODULE = '''
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from demur import ImageRejector, Output
from demur.output import log_probabilities
from demur.rejectors import OutputScore


@dataclass(frozen=True)
class Gini(OutputScore):
    """Sum of powers of the class probabilities."""

    power: float = 2.0

    def __call__(self, out):
        return log_probabilities(out).exp().pow(self.power).sum(-1)


@dataclass(frozen=True)
class Own(ImageRejector):
    """Margin of the prediction after PGD steps away from it."""

    radius: float = 0.05
    steps: int = 3

    def score(self, model, images, output):
        label = output.logits.argmax(-1)
        moved = images.detach()
        for _ in range(self.steps):
            moved = moved.detach().requires_grad_()
            loss = cross_entropy(model(moved).logits, label, reduction="sum")
            (slope,) = torch.autograd.grad(loss, moved)
            moved = moved + self.radius / self.steps * slope.sign()
            moved = moved.clamp(0, 1)
        logits = model(images + (moved - images).detach()).logits
        top = logits.topk(2).values
        margin = top[:, 0] - top[:, 1]
        return torch.where(logits.argmax(-1) == label, margin, -margin)
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of the user's in the folder of the command."""
    name = f"ownrej_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


@dataclass(frozen=True)
class Brightness(ImageRejector):
    """Minus the distance of the mean pixel to that of the fit images."""

    centre: float = -1.0

    def score(self, model: object, images: Tensor, output: Output) -> Tensor:
        return -(images.mean((1, 2, 3)) - self.centre).abs()

    def fit_images(self, model: object, images: Tensor, output: Output, y: Tensor) -> "Brightness":
        assert len(images) == len(y) == len(output.logits)
        return Brightness(round(float(images.mean()), 6))


# ------------------------------------------------ naming


def test_a_rejector_has_one_name_everywhere(own_source: LoadedRun, module: str) -> None:
    recipe = own_source.run.recipe
    __import__(module)
    gini = sys.modules[module].Gini
    texts = (f"{module}:Gini", f"{module}:Gini()", gini, gini(), f'Custom("{module}:Gini")')
    for given in texts:
        assert rejectors_named(given, recipe) == {"Gini": gini()}
    assert rejectors_named(f"{module}:Gini(power=3), R-Con", recipe) == {
        "Gini(power=3.0)": gini(3.0), "R-Con": recipe.rejectors()["R-Con"],
    }  # fmt: skip
    assert list(rejectors_named(["Con,rcon", "Energy(tau=2)"], recipe)) == [
        "Con", "R-Con", "Energy(tau=2.0)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{}:Ginni", "did you mean Gini"),
        ("{}x:Gini", "did you mean {}:Gini"),
        ("{}:cross_entropy", "does not fit; name a subclass"),
        ("Enrgy", "did you mean Energy"),
        ("Linf(0.1)", "is not a rejector"),
        ("{}:Gini(pwer=2)", "did you mean power"),
    ],
)
def test_a_misspelt_name_is_answered_by_the_right_one(
    own_source: LoadedRun, module: str, text: str, sentence: str,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput) as error:
        rejectors_named(text.format(module), own_source.run.recipe)
    assert sentence.format(module) in str(error.value)
    assert "\n" not in str(error.value)


def test_own_rejectors_through_the_command(
    command: Command, own_source: LoadedRun, module: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A rejector that queries the net, written from the guide: attack, score, ... and export."""
    run, own = str(own_source.run.path), f"{module}:Own(steps=1)"
    monkeypatch.chdir(tmp_path)
    attacked = command(
        "attack", run, "clean", "pgd-20:steps=2",
        "reject-autoattack:version=fast,targets=1,eps=0.5",
        "--n", "4", "--rejector", own,
    )  # fmt: skip
    assert attacked[0] == 0, attacked[2]
    scored = command("score", run, "--rejector", f"{own},{module}:Gini", "--json")
    assert scored[0] == 0, scored[2]
    rows = json.loads(scored[1])["rows"]
    names = {(row["rejector"], row["attack"].partition(":")[0]) for row in rows}
    assert {("Own(steps=1)", a) for a in ("clean", "pgd-20", "reject-autoattack")} <= names
    assert ("Gini", "clean") in names
    page = command("report", run, "--rejector", own, "-o", "page.html")
    assert page[0] == 0, page[2]
    assert "Own(steps=1)" in Path("page.html").read_text()
    made = command("calibrate", run, "--coverage", "0.5", "--rejector", own, "--json")
    assert made[0] == 0, made[2]
    assert json.loads(made[1])["rejector"] == "Own(steps=1)"
    shipped = command("export", run, "--rejector", own, "-o", "guard")
    assert shipped[0] == 0, shipped[2]
    x, _ = own_source.splits["test"].batch(slice(0, 4))
    guard = Guard.load("guard")
    expected = {r.label: r for r in own_source.run.records("test")}["clean"].stored_scores
    assert np.allclose(guard.decide(x).scores[:, 0], next(iter(expected.values())), atol=1e-4)
    listed = command("list", "rejectors", module)
    assert f"{module}:Own" in listed[1]
    monkeypatch.setenv("DEMUR_MODULES", module)
    assert f"{module}:Gini" in command("list", "rejectors")[1]
    assert "no ONNX" in command("export", run, "--rejector", own, "-o", "g", "--onnx")[2]


def test_an_attack_keeps_the_rejector_that_its_text_names(own_source: LoadedRun) -> None:
    """--rejector replaced the named one, and an earlier record was shown for the wrong aim."""
    recipe = own_source.run.recipe
    for text in ("worst-score:rejector=Con()", "reject-autoattack:criterion.rejector=Energy()"):
        made = attack_named(text, recipe)
        assert aimed_at(text, made, [Consistency()]) == [(text, made)]
    ((label, made),) = aimed_at("worst-score", attack_named("worst-score", recipe), [CPR()])
    assert (label, image_rejectors(made)) == ("worst-score:rejector=CPR", [CPR()])


# ------------------------------------------------ records


def test_a_wrapped_net_does_not_reuse_the_records_of_the_bare_one(own_source: LoadedRun) -> None:
    """The threshold of a wrapped net was that of the bare net's cached clean record."""
    own_source.clean("cal")  # the bare net's
    wrapped = LoadedRun(own_source.run, "cpu")
    net = wrapped.net
    wrapped.net = ModelWithScore(net, lambda x: x.flatten(1).std(1))  # type: ignore[assignment]
    criterion = AcceptedError(ModelScore(), TPR(0.95))
    found = demur.resolve_thresholds(criterion, wrapped.clean).spec.threshold
    x, y = wrapped.splits["cal"].batch(slice(None))
    with torch.no_grad():
        correct = (net(x).logits.argmax(-1) == y).numpy()
    expected = TPR(0.95).threshold(x.flatten(1).std(1).double().numpy(), correct)
    assert found == pytest.approx(expected, abs=1e-6)
    record = run_attack(wrapped, "pgd", PGD(Linf(0.1), steps=1), RecordOptions(n=8))
    assert record.digest not in {r.digest for r in own_source.run.records("test")}
    assert record.digest in {r.digest for r in own_source.run.records("test", wrapped.model_key)}
    with pytest.raises(BadInput, match="another model"):
        RejectorEvaluation.of(own_source).score_record(record)


def test_the_fingerprint_sees_wrappers_settings_hooks_and_weights(own_source: LoadedRun) -> None:
    net = own_source.net

    def wrap(scale: float) -> nn.Module:
        return ModelWithScore(net, lambda x: scale * x.flatten(1).std(1))

    found = [fingerprint(model) for model in (net, wrap(1.0), wrap(2.0))]
    assert fingerprint(wrap(2.0)) == found[2]  # no address in it
    handle = net.register_forward_hook(lambda *_: None)
    found.append(fingerprint(net))
    handle.remove()
    assert fingerprint(net) == found[0]
    with torch.no_grad():
        next(net.parameters()).add_(1e-3)
    found.append(fingerprint(net))
    assert len(set(found)) == 5


class Slots:
    __slots__ = ("by",)

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: Tensor) -> Tensor:
        return self.by * x


class Holding(nn.Module):
    """A wrapper with something inside."""

    def __init__(self, inside: object) -> None:
        super().__init__()
        self.inside = inside


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x + 1, lambda x: x + 2),
        (partial(torch.add, alpha=1), partial(torch.add, alpha=2)),
        (Slots(1.0), Slots(2.0)),
        (np.ones(3), np.zeros(3)),
        (np.float64(1), np.float64(2)),
        (torch.sin, torch.cos),
        ({"a": (1, lambda: 3)}, {"a": (1, lambda: 4)}),
        (Holding(Holding(1)), Holding(1)),  # wrapped twice
        (slice(1), slice(2)),
    ],
)
def test_the_fingerprint_sees_what_a_wrapper_holds(one: object, other: object) -> None:
    assert fingerprint(Holding(one)) != fingerprint(Holding(other))
    assert fingerprint(Holding(one)) == fingerprint(Holding(deepcopy(one)))


def test_the_key_of_a_score_covers_parameters_helpers_and_the_name_of_the_module(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / f"{module}.py"
    helper = "\n\ndef helper(x):\n    return x + 1\n"
    source.write_text(MODULE + helper)
    own = import_module(module).Own
    keys = {score_key(own()), score_key(own(steps=4)), score_key(own(radius=0.06))}
    source.write_text(MODULE + helper.replace("+ 1", "+ 2"))  # nothing else changed
    keys.add(score_key(own()))
    (tmp_path / f"{module}_renamed.py").write_text(MODULE + helper)
    keys.add(score_key(import_module(f"{module}_renamed").Own()))
    assert len(keys) == 5


def test_a_record_of_another_source_is_not_reused(
    own_source: LoadedRun, module: str, tmp_path: Path
) -> None:
    (one,) = rejectors_named(f"{module}:Own(steps=1)", own_source.run.recipe).values()
    assert isinstance(one, ImageRejector)
    attack = WorstScore(Linf(0.1), one, steps=1, targets=1)
    options = RecordOptions(n=8)
    first = run_attack(own_source, "a", attack, options)
    key = score_key(one)
    assert run_attack(own_source, "a", attack, options).digest == first.digest
    source = tmp_path / f"{module}.py"
    source.write_text("# a comment\n" + MODULE)
    assert score_key(one) == key  # the same code
    source.write_text(MODULE.replace("slope.sign()", "2 * slope.sign()"))
    again = run_attack(own_source, "a", attack, options)
    assert again.digest != first.digest
    with pytest.raises(BadInput, match="does not contain the score"):
        values(one, first)


def test_worst_scores_of_image_rejectors_have_figures(
    own_source: LoadedRun, module: str, command: Command
) -> None:
    own, run = f"{module}:Own(steps=1)", str(own_source.run.path)
    fast = "steps=1,targets=1,rejector="
    two = (f"worst-score:{fast}Consistency(0.02,1,0.02)", f"worst-score:{fast}{own}")
    made = command("attack", run, "clean", *two, "--n", "8")
    assert made[0] == 0, made[2]
    assert made[2].count("correct before rejection; demur score shows accepted errors") == 2
    assert command("calibrate", run, "--risk", "0.9", "--rejector", own)[0] == 0
    named = ("--rejector", f"{own},Consistency(0.02,1,0.02)")
    code, text, error = command("score", run, *named, "--json")
    assert (code, "without figures" in error) == (0, False), error
    table = json.loads(text)
    names = {"Own(steps=1)", "Consistency(radius=0.02, steps=1, step_size=0.02)"}
    assert {row["rejector"] for row in table["worst_case"]} == names
    (entry,) = table["certificates"]
    assert [test["attack"] for test in entry["retests"]] == ["clean", two[1]]
    page = command("report", run, *named)
    assert page[0] == 0, page[2]
    assert "Own(steps=1), worst-score" in (own_source.run.path / "report.html").read_text()


def test_an_attack_on_older_code_is_not_scored_for_newer_code(
    own_source: LoadedRun, module: str, tmp_path: Path, command: Command
) -> None:
    """The images of the record were scored with the new code under the same label."""
    run, own = str(own_source.run.path), f"{module}:Own(steps=1)"
    named = ("--rejector", own)
    attacks = ("reject-autoattack:version=fast,targets=1,eps=0.5", "worst-score:steps=1,targets=1")
    made = command("attack", run, "clean", *attacks, "--n", "8", *named)
    assert made[0] == 0, made[2]
    before = json.loads(command("score", run, *named, "--json")[1])
    assert len(before["attacks"]) == 2 and len(before["worst_case"]) == 1
    (tmp_path / f"{module}.py").write_text(MODULE.replace("margin, -margin", "-margin, margin"))
    code, text, error = command("score", run, *named, "--json")
    assert (code, error.count("Own has changed since this attack")) == (0, 2)
    after = json.loads(text)
    assert [entry["attack"] for entry in after["attacks"]] == ["clean"]
    assert not after["worst_case"]
    assert command("report", run, *named)[0] == 0
    assert "reject-autoattack" not in (own_source.run.path / "report.html").read_text()
    stale = [one for one in own_source.run.records("test") if one.label != "clean"]
    for record in stale:
        with pytest.raises(BadInput, match="has changed since this attack"):
            RejectorEvaluation.of(own_source).score_record(record)
    shipped = command("export", run, *named, "-o", str(tmp_path / "guard"))
    assert "has changed since this attack" in shipped[2]
    card = (tmp_path / "guard" / "README.md").read_text()
    assert "test, clean" in card and "autoattack:" not in card and "worst-score" not in card
    assert f"DEMUR_MODULES={module}" in card


def test_a_record_of_code_that_is_not_imported_is_left_out(
    own_source: LoadedRun, module: str, tmp_path: Path, command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One such record made every other command on the run fail."""
    run = str(own_source.run.path)
    attack = f"worst-score:steps=1,targets=1,rejector={module}:Own(steps=1)"
    assert command("attack", run, "clean", "pgd-20:steps=1", attack, "--n", "8")[0] == 0
    monkeypatch.setattr("demur.spec.importing._TYPED", set())
    sys.modules.pop(module)
    attack_of.cache_clear()
    for words in (("score", run), ("report", run), ("export", run, "-o", str(tmp_path / "guard"))):
        code, _, error = command(*words)
        assert code == 0, error
        assert error.count(f"without {attack} (record ") == 1
        assert f"DEMUR_MODULES={module}" in error


def test_scores_of_image_rejectors_are_added_to_a_record(own_source: LoadedRun) -> None:
    attack, options = PGD(Linf(0.1), steps=2), RecordOptions(n=16, keep_images=0)
    plain = run_attack(own_source, "pgd", attack, options)
    assert not plain.stored_scores
    one = Consistency(radius=0.02, steps=1, step_size=0.02)
    wanted = RecordOptions(n=16, keep_images=0, rejectors=(one,))
    with_score = run_attack(own_source, "other name", attack, wanted)
    assert (with_score.digest, with_score.label) == (plain.digest, "pgd")
    both = run_attack(
        own_source, "pgd", attack, RecordOptions(n=16, keep_images=0, rejectors=(CPR(),))
    )
    assert set(both.stored_scores) == {one.key, CPR().key}
    assert np.array_equal(values(one, both), values(one, with_score))
    assert len(list(own_source.run.records_folder.glob("pgd-*.npz"))) == 1
    # a coupled rejector reads both from the record
    pair = Coupled(gate=CPR(), gate_threshold=0.5, score=one)
    expected = np.where(values(CPR(), both) >= 0.5, values(one, both), -np.inf)
    assert np.array_equal(values(pair, both), expected)


@dataclass(frozen=True)
class Holds(ImageRejector):
    """A score that is no number."""

    def score(self, model: object, images: Tensor, output: Output) -> Tensor:
        return torch.full((len(images),), float("nan"))


def test_a_score_that_is_no_number_is_named(own_source: LoadedRun) -> None:
    with pytest.raises(BadInput, match="the rejector's Holds score is not a number for "):
        own_source.clean("cal", Holds())


def test_an_image_rejector_is_fitted_on_the_fit_split(own_source: LoadedRun) -> None:
    fitted = own_source.fitted(Brightness())
    x, _ = own_source.splits["fit"].batch(slice(None))
    assert fitted.centre == pytest.approx(float(x.mean()), abs=1e-5)
    guard = Guard.from_run(own_source, rejector=Brightness, coverage=0.5)
    assert guard.scores[0].rejector == fitted
    images = own_source.splits["test"].batch(slice(0, 5))[0]
    assert guard.scores[0].name.startswith("Brightness(")
    assert np.allclose(guard.decide(images).scores[:, 0], fitted.score(None, images, None))  # type: ignore[arg-type]


# ------------------------------------------------ attacks


def linear_net(weight: Tensor) -> nn.Module:
    layer = nn.Linear(4, 2, bias=False)
    layer.weight.data = weight
    return nn.Sequential(nn.Flatten(), layer)


def test_consistency_of_a_linear_net_has_a_closed_form() -> None:
    """After k sign steps of a linear net, the margin falls by radius * |w1 - w0|_1."""
    weight = torch.tensor([[1.0, -2.0, 0.5, 0.0], [0.0, 1.0, -1.0, 2.0]])
    net, x = linear_net(weight), 0.3 + 0.4 * torch.rand(16, 1, 2, 2)
    out = as_output(net(x))
    drop = 0.05 * float((weight[1] - weight[0]).abs().sum())
    margin = (out.logits[:, 1] - out.logits[:, 0]).abs() - drop
    for gradient in ("straight-through", "unrolled"):
        one = Consistency(radius=0.05, steps=4, step_size=0.02, gradient=gradient)
        found = one.score(lambda images: as_output(net(images)), x, out)
        assert torch.allclose(found, margin, atol=1e-5)
    accepted = CPR(radius=0.05, steps=4, step_size=0.02).score(lambda i: as_output(net(i)), x, out)
    assert torch.equal(accepted.detach() > 0.5, margin > 0)


def test_unrolled_and_straight_through_gradients_differ_where_the_net_bends() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    grads = []
    for gradient in ("straight-through", "unrolled"):
        x = 0.3 + 0.4 * torch.rand(4, 1, 2, 2, generator=torch.Generator().manual_seed(1))
        x.requires_grad_()
        one = Consistency(radius=0.2, steps=3, step_size=0.05, gradient=gradient)
        value = one.score(lambda images: as_output(net(images)), x, as_output(net(x)))
        grads.append(torch.autograd.grad(value.sum(), x)[0])
    assert all(bool(grad.abs().sum() > 0) for grad in grads)
    assert not torch.allclose(grads[0], grads[1])


@pytest.mark.parametrize("rejector", [Consistency(0.02, 2, 0.02), CPR(0.02, 2, 0.02)])
def test_reject_autoattack_breaks_what_the_rejector_accepts(
    batch: tuple[Tensor, Tensor], rejector: ImageRejector
) -> None:
    torch.manual_seed(0)
    (x, y), layer = batch, nn.Linear(64, 10).requires_grad_(False)
    layer.weight.mul_(10)
    net = nn.Sequential(nn.Flatten(), layer).eval()
    threshold = 0.5 if isinstance(rejector, CPR) else 0.0
    attack = RejectAutoAttack(
        net, AcceptedError(rejector, threshold), eps=0.3, version="fast", verbose=False
    )
    x_adv = attack.run_standard_evaluation(x, y)
    assert isinstance(x_adv, Tensor)
    out = as_output(net(x_adv))
    score = rejector.score(lambda images: as_output(net(images)), x_adv, out)
    slips = (out.logits.argmax(-1) != y) & (score.detach() >= threshold)
    assert slips.float().mean() > 0.5
    worst = WorstScore(Linf(0.3), rejector, steps=5, targets=2)(net, x, y)
    assert worst.shape == x.shape


def test_columns_of_image_rejectors_leave_other_scores_alone(
    tiny_net: nn.Module, batch: tuple[Tensor, Tensor]
) -> None:
    """R-Con reads the first auxiliary output and ModelScore the last, also behind columns."""
    from demur.attacks.attack_model import on_outputs

    x, _ = batch
    model = ModelWithScore(tiny_net, lambda images: images.flatten(1).std(1))
    pair = Coupled(gate=CPR(), gate_threshold=0.5, score=Consistency(0.02, 1, 0.02))
    spec, scored = on_outputs((pair, demur.RCon(), ModelScore()), model)
    before, after = as_output(model(x)), as_output(scored(x))
    for bound, plain in zip(spec[1:], (demur.RCon(), ModelScore()), strict=True):
        assert torch.equal(bound(after), plain(before))
    gate, score = (part(after) for part, _ in spec[0].rule(0.0).pairs)
    assert set(gate.tolist()) <= {0.0, 1.0}
    assert not torch.equal(gate, score)


def test_the_rejectors_of_the_guide_are_scored_and_attacked(batch: tuple[Tensor, Tensor]) -> None:
    guide = (Path(__file__).parents[1] / "docs/guides/extend.md").read_text()
    names: dict[str, Any] = {"__name__": __name__}
    for block in re.findall(r"<!-- run -->\n```python\n(.*?)```", guide, re.S):
        exec(block, names)
    torch.manual_seed(0)
    x, y = batch
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).requires_grad_(False).eval()
    for name in ("Survives", "Squeezed", "Shifted", "Smoothed"):
        attack = PGD(Linf(0.1), steps=3, objective=ScoreObjective(names[name]()))
        before, after = (
            names[name]().score(lambda z: as_output(net(z)), part, as_output(net(part))).mean()
            for part in (x, attack(net, x, y))
        )
        # rounding hides what the straight-through gradient would need, as the guide says
        assert after > before or (name == "Squeezed" and bool(after.isfinite())), name


# ------------------------------------------------ whose fault


@dataclass(frozen=True)
class BadObjective(Objective):
    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        raise KeyError("no such thing")


@dataclass(frozen=True)
class BadScore(ImageRejector):
    def score(self, model: object, images: Tensor, output: Output) -> Tensor:
        return images[:, 0, 0, 99]


@dataclass(frozen=True)
class Detached(ImageRejector):
    def score(self, model: object, images: Tensor, output: Output) -> Tensor:
        return images.detach().mean((1, 2, 3))


@dataclass(frozen=True)
class WrongShape(ImageRejector):
    def score(self, model: object, images: Tensor, output: Output) -> Tensor:
        return output.logits


class BadNet(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError("no net")


def line_of(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{1 + next(k for k, line in enumerate(lines) if text in line)}"


@pytest.mark.parametrize(
    ("objective", "blamed", "innocent"),
    [
        (BadObjective(), ("objective BadObjective", 'KeyError("no such'), "model"),
        (ScoreObjective(BadScore()), ("rejector BadScore", "0, 0, 99]"), "model"),
        (ScoreObjective(Detached()), ("score of Detached",), "from the model"),
        (ScoreObjective(WrongShape()), ("rejector WrongShape", ), "model"),
    ],
)  # fmt: skip
def test_an_error_names_the_object_and_its_line(
    objective: Objective, blamed: tuple[str, ...], innocent: str,
    tiny_net: nn.Module, batch: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    with pytest.raises(BadInput) as error:
        PGD(Linf(0.1), steps=1, objective=objective)(tiny_net, *batch)
    sentence = str(error.value)
    assert blamed[0] in sentence
    assert all(line_of(text) in sentence for text in blamed[1:])
    assert innocent not in sentence


def test_a_net_and_a_detector_are_named(tiny_net: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(BadInput, match="the model fails") as error:
        PGD(Linf(0.1), steps=1)(BadNet(), *batch)
    assert line_of('ZeroDivisionError("no net")') in str(error.value)

    def blind(x: Tensor) -> Tensor:
        return x.detach().flatten(1).std(1)

    attack = PGD(Linf(0.1), steps=1, objective=ScoreObjective(ModelScore()))
    with pytest.raises(BadInput, match="the detector blind") as error:
        attack(ModelWithScore(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), blind), *batch)
    assert "from the model" not in str(error.value)
