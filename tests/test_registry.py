"""Registries: a class in the list of its package is found by commands, readers and docs."""

import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from runpy import run_path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from demur import CE, PGD, Attack, Framework, Head, LoadedRun, Objective, Output, Rejector
from demur.attacks import ATTACKS, OBJECTIVES, AttackBatch, Misclassified
from demur.attacks.balls import Ball, Linf
from demur.data import Digits, Images
from demur.evaluate import run_attack
from demur.methods import FRAMEWORKS, HEADS, BatchOutputs, LabelledOutput, Method, attack_mode
from demur.methods.heads import DenseAux
from demur.nets import RejectingNet, ResNet8
from demur.noise import Stream
from demur.output import ACCEPT, label_entry, log_probabilities, mask_label, prediction
from demur.recipes import NAMED_ATTACKS, RECIPES, VOCABULARY, attack, recipe
from demur.rejectors import REJECTORS, Rectifier
from demur.rejectors.output_scores import LogitScore
from demur.sanity.comparisons import weaker
from demur.spec import Spec, read, show
from tests import test_attacks, test_methods, test_rejectors
from tests.conftest import Command
from tests.objective_examples import objective_example
from tests.quick_net import QuickNet


@dataclass(frozen=True)
class Gini(LogitScore):
    """Sum of the squared class probabilities."""

    def __call__(self, out: Output) -> Tensor:
        return log_probabilities(out, self.tau).exp().square().sum(-1)


@dataclass(frozen=True)
class SoftMargin(Objective):
    """Log-sum-exp of the wrong logits minus the true logit."""

    seeks_misclassification: ClassVar[bool] = True

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return mask_label(out.logits, y).logsumexp(-1) - label_entry(out.logits, y)


@dataclass(frozen=True)
class FGSM(Attack):
    """One step of length eps along the gradient (Goodfellow et al. 2015)."""

    ball: Ball
    objective: Objective = CE()

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        state = batch.prepare(self.objective, batch.x).objective_state
        inputs = self.objective.at_step(state, 0, 1)
        grad = batch.model.gradient_only(self.objective, batch.x, batch.y, *inputs)
        return self.ball.step(batch.x, batch.x, grad, self.ball.eps)


@dataclass(frozen=True)
class Correctness(Head):
    """The auxiliary output predicts whether the prediction is correct."""

    columns = (ACCEPT,)
    weight: float = 1.0

    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        return DenseAux(dims[-1])

    def auxiliary_loss(self, outputs: BatchOutputs) -> Tensor:
        out, y = outputs.attacked.out, outputs.attacked.y
        logit, correct = ACCEPT.of(out), prediction(out) == y
        return self.weight * binary_cross_entropy_with_logits(
            logit, correct.to(logit), reduction="none"
        )

    def rejectors(self) -> dict[str, Rejector]:
        return {"Correctness": Rectifier()}


@dataclass(frozen=True)
class MixedAT(Framework):
    """Cross-entropy on clean images and on adversarial examples, in equal parts."""

    attack: Attack = PGD(Linf(8 / 255), steps=10, step_size=2 / 255)

    def craft(self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: Stream) -> Tensor:
        with attack_mode(net, "eval"):
            return self.attack.perturb(net, x, y, index, stream)

    def outputs(
        self, net: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, clean: bool
    ) -> BatchOutputs:
        return BatchOutputs(LabelledOutput(x_adv, y, net(x_adv)), LabelledOutput(x, y, net(x)))

    def classification_loss(self, outputs: BatchOutputs) -> Tensor:
        clean, attacked = outputs.clean_outputs(), outputs.attacked
        return (CE()(attacked.out, attacked.y) + CE()(clean.out, clean.y)) / 2


ROOT = Path(__file__).parents[1]
ADDED: dict[str, tuple[list[Any], type[Spec]]] = {  # by the kind that `demur list` takes
    "rejectors": (REJECTORS, Gini), "objectives": (OBJECTIVES, SoftMargin),
    "attacks": (ATTACKS, FGSM), "heads": (HEADS, Correctness), "frameworks": (FRAMEWORKS, MixedAT),
}  # fmt: skip
KINDS = {"heads": "methods", "frameworks": "methods"}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    for registry, cls in ADDED.values():
        registry.append(cls)
    yield
    for registry, _ in ADDED.values():
        registry.pop()


def check_contract(contract: type, **values: Any) -> None:
    """Call the tests of a contract that take nothing but these values."""
    called = 0
    for name, test in inspect.getmembers(contract, inspect.isfunction):
        wanted = inspect.signature(test).parameters.keys() - {"self"}
        if name.startswith("test_") and wanted <= values.keys():
            test(contract(), **{parameter: values[parameter] for parameter in wanted})
            called += 1
    assert called >= 2


@pytest.mark.parametrize("kind", ADDED)
def test_each_extension_is_short(kind: str) -> None:
    assert len(inspect.getsource(ADDED[kind][1]).splitlines()) <= 25


@pytest.mark.parametrize("kind", ADDED)
def test_it_is_listed_by_the_command_and_in_the_documentation(kind: str, command: Command) -> None:
    cls, listed = ADDED[kind][1], KINDS.get(kind, kind)
    name = cls.__name__.lower() if kind == "attacks" else cls.__name__
    spec = 'Custom("tests.test_registry:FGSM", Linf(0.15))'
    about = spec if kind == "attacks" else (cls.__doc__ or "").splitlines()[0]
    code, out, _ = command("list", listed)
    assert code == 0
    (line,) = [line for line in out.splitlines() if line.split()[0] == name]
    assert about in line
    on_page_markdown = run_path(str(ROOT / "tools" / "mkdocs_hooks.py"))["on_page_markdown"]
    assert f"| `{name}` | {about} |" in on_page_markdown(f"<!-- list {listed} -->")


@pytest.mark.parametrize("kind", ADDED)
def test_it_is_read_by_its_name_and_written(kind: str) -> None:
    cls = ADDED[kind][1]
    made = FGSM(Linf(0.1)) if kind == "attacks" else cls()
    assert read(f"{cls.__name__}({'Linf(0.1)' if kind == 'attacks' else ''})", VOCABULARY) == made
    assert read(show(made), VOCABULARY) == made


def test_a_rejector_is_scored(scored_source: LoadedRun, command: Command) -> None:
    code, out, err = command("score", str(scored_source.run.path), "--all", "--device", "cpu")
    assert code == 0, err
    assert "Gini" in out
    assert scored_source.run.recipe.find_rejector("gini") == "Gini"


def test_an_attack_has_a_name_and_changes(tiny_net: RejectingNet) -> None:
    assert attack("fgsm:eps=0.1", RECIPES["digits-pgdat-rr"]) == FGSM(Linf(0.1))
    changed = attack("fgsm:objective=SoftMargin", RECIPES["digits-pgdat-rr"])
    assert changed == FGSM(Linf(0.15), SoftMargin())


def test_a_head_and_a_framework_make_a_recipe() -> None:
    made = recipe("digits-pgdat-rr", ["head=Correctness(weight=0.5)", "framework=MixedAT"])
    assert made.method == Method(MixedAT(), Correctness(0.5))
    assert made.head_rejector == ("Correctness", Rectifier())
    assert list(made.rejectors())[:2] == ["Con", "Correctness"]


def test_the_sanity_checks_know_them(own_source: LoadedRun, command: Command) -> None:
    own = FGSM(Linf(0.1), SoftMargin())
    assert own.seeks_misclassification
    assert own.maximised == SoftMargin()
    assert own.success_criterion == Misclassified()
    assert weaker(attack("clean", RECIPES["digits-pgdat-rr"]), own)
    run_attack(own_source, "clean", attack("clean", RECIPES["digits-pgdat-rr"]))
    run_attack(own_source, "fgsm", own)
    run_attack(own_source, "no-step", FGSM(Linf(0.0), SoftMargin()))
    code, out, err = command("score", str(own_source.run.path), "--json", "--device", "cpu")
    assert code == 0, err
    raised = [flag for flag in json.loads(out)["sanity"] if "did not rise" in str(flag)]
    assert ["no-step" in str(flag) for flag in raised] == [True]


def test_contracts(
    quick_net: QuickNet,
    tiny_net: RejectingNet,
    batch: tuple[Tensor, Tensor],
    test_images: Images,
    tiny_source: LoadedRun,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    common: dict[str, Any] = {"tiny_net": tiny_net, "batch": batch, "test_images": test_images}
    monkeypatch.setitem(test_attacks.SHORT, "fgsm", NAMED_ATTACKS["fgsm"](RECIPES["digits-pgdat"]))
    check_contract(test_attacks.TestContract, name="fgsm", quick_net=quick_net, **common)
    example = objective_example(SoftMargin, test_attacks.RULE)
    monkeypatch.setitem(test_attacks.OBJECTIVE_EXAMPLES, "own", example)
    check_contract(test_attacks.TestObjectiveContract, name="own", **common)
    x, y = tiny_source.splits["fit"].batch(slice(0, 500))
    with torch.no_grad():
        fit_split, sample = (tiny_net(x), y), (tiny_net(batch[0]), batch[1])
    (score,) = Gini.baselines(Digits()).values()
    fitted = score.fit(*fit_split)
    check_contract(
        test_rejectors.TestContract,
        score=fitted, fit_split=fit_split, sample=sample, monkeypatch=monkeypatch, **common,
    )  # fmt: skip
    framework = test_methods.with_short_attack(MixedAT())
    net = ResNet8(4).build(Digits().domain, Correctness()).train()
    check_contract(
        test_methods.TestContract, framework=framework, head=Correctness(), net=net, kind="wrong",
        **common,
    )  # fmt: skip


def test_the_documentation_names_every_class_of_the_registry() -> None:
    pages = (ROOT / "docs" / "reference").glob("*.md")
    text = "".join(path.read_text(encoding="utf-8") for path in pages)
    for kind in {KINDS.get(kind, kind) for kind in ADDED}:
        assert f"<!-- list {kind} -->" in text
