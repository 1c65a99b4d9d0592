"""Retrofit: learn an R-Con head on somebody's frozen net and say whether it was worth it.

R-Con is compared with the net's own confidence (Con) on the same test images: clean, under PGD on
the net, and with each score attacked by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from demur.attacks import PGD, AcceptedError, Clean, PlusLogScore
from demur.calibrate import TPR, ChanceTest, upper_bound
from demur.errors import BadInput
from demur.evaluate import (
    LoadedRun,
    accepted,
    paired_shares,
    resolve_thresholds,
    run_attack,
    values,
)
from demur.evaluate.record_scores import to_json
from demur.evaluate.resumable_batches import ProgressCallback
from demur.files.checked_files import write_json
from demur.methods import PGDAT, RR, Method
from demur.metrics import Difference, auroc, auroc_difference
from demur.nets import FactoryNet
from demur.progress import ignore
from demur.recipes import RECIPES, Recipe, with_changes
from demur.rejectors import Con, Rejector
from demur.rejectors.rule import as_score
from demur.runs import Record, Run
from demur.sanity.evidence import MIN_LEFT, Grade, Verdict
from demur.spec import show
from demur.spec.importing import allow_import
from demur.training import train

EPOCHS, STEPS, ADAPTIVE_STEPS = 20, 20, 50
MAX_ACCEPTED = 0.1  # share of accepted errors up to which a head can be worth it
FILE = "retrofit.json"
Outcome = Literal["better", "worse", "no difference shown"]


@dataclass(frozen=True)
class HeadComparison:
    """R-Con beside the net's own confidence, on the same images.

    Attributes:
        images: Which images, in words.
        measure: "AUROC" (higher is better) or "accepted errors" (a share; lower is better).
        rcon: The measure of R-Con.
        con: The measure of the net's own confidence.
        difference: R-Con minus Con, paired by image, with a 95% interval.
        correct: Number of correct predictions; of accepted errors, under the attack on R-Con.
        n: Number of images.
    """

    images: str
    measure: Literal["AUROC", "accepted errors"]
    rcon: float
    con: float
    difference: Difference
    correct: int
    n: int

    @property
    def verdict(self) -> Outcome:
        """Better or worse if the whole interval is on one side of 0."""
        if not (self.difference.lo > 0 or self.difference.hi < 0):
            return "no difference shown"
        return "better" if (self.difference.lo > 0) == (self.measure == "AUROC") else "worse"

    @property
    def sentence(self) -> str:
        """The comparison in one line."""
        gap = self.difference
        if self.measure == "AUROC" and gap.hi - gap.lo == 2:
            rare = "correct" if self.correct < self.n - self.correct else "wrong"
            return (
                f"{self.images}, {self.measure}: too few {rare} predictions to compare "
                f"({self.correct} of {self.n} are correct)"
            )
        return (
            f"{self.images}, {self.measure}: R-Con {self.rcon:.3f}, Con {self.con:.3f}, difference "
            f"{gap.value:+.3f} [{gap.lo:+.3f}, {gap.hi:+.3f}]: {self.verdict}"
        )


@dataclass(frozen=True)
class Retrofit:
    """A run with the frozen net and its new head, and what the head is worth.

    Attributes:
        run: The run; `demur.Guard.from_run` makes a guard of it.
        comparisons: R-Con beside the net's own confidence, clean and under attack.
        verdict: The grade of the net under attack, as in an audit, with its reasons.
        advice: Whether the head is worth it.
    """

    run: Run
    comparisons: tuple[HeadComparison, ...]
    verdict: Verdict
    advice: str

    def to_json(self) -> dict[str, Any]:
        """Comparisons, verdict and advice as JSON values."""
        rows = [{**to_json(one), "verdict": one.verdict} for one in self.comparisons]
        return {"comparisons": rows, "verdict": self.verdict.to_json(), "advice": self.advice}


def retrofit_recipe(model: str, changes: Sequence[str] = (), layer: str = "") -> Recipe:
    """Recipe that trains an R-Con head on the frozen net of a function; see `retrofit`.

    The function is imported, so its name must come from the user and never from a file.
    """
    allow_import(model)
    # clean images too: a net that was not trained under attack is nearly always wrong there
    method = Method(PGDAT(bn="eval"), RR(images="both"))
    net = FactoryNet(model, layer, frozen=True)
    recipe = replace(RECIPES["images-pgdat-rr"], net=net, method=method, epochs=EPOCHS)
    return with_changes(replace(recipe, batch_size=32, precision="fp32"), changes)


def retrofit(
    model: str, data: str, folder: Path, layer: str = "", changes: Sequence[str] = (),
    device: torch.device | None = None,
) -> Retrofit:  # fmt: skip
    """Learn an R-Con head on a frozen net and compare it with the net's own confidence.

    Args:
        model: "module:function", which returns a trained net from images in [0, 1] to logits.
        data: Images, as `OwnImages` reads them; never those that the net was trained on.
        folder: The run folder; a finished run there is used.
        layer: Name of the layer whose output the head reads; empty: the input of the last linear
            layer.
        changes: Changes of the recipe, such as "size=224" and "attack.eps=4/255".
        device: Where to train; None: the CPU.

    Returns:
        The run and the comparisons.

    Raises:
        BadInput: The function or its net does not fit, or the images do not.
    """
    recipe = retrofit_recipe(model, [f"data={data}", *changes], layer)
    run = train(replace(recipe, data=recipe.data.prepared()), folder, device)
    return compare(LoadedRun(run, device or torch.device("cpu")))


def compare(loaded: LoadedRun, on_progress: ProgressCallback = ignore) -> Retrofit:
    """Compare R-Con with Con on the test images of a run and store the result in its folder."""
    recipe = loaded.run.recipe
    rcon = recipe.head_rejector[1]
    ball = training_attack(recipe).ball
    pgd, eps = PGD(ball, steps=STEPS), show(ball)
    attack = partial(run_attack, loaded, on_progress=on_progress)
    found = [
        _ranking("clean images", attack("clean", Clean()), rcon),
        _ranking(f"PGD-{STEPS} on the net, {eps}", attack(f"pgd-{STEPS}", pgd), rcon),
        _attacked_by_themselves(loaded, pgd, rcon, eps, on_progress),
    ]
    verdict = _grade(found, loaded.chance_test())
    result = Retrofit(loaded.run, tuple(found), verdict, _advice(found, verdict.grade))
    stored = {"weights": loaded.run.checkpoint["weights"], **result.to_json()}
    with loaded.run.writing():
        write_json(loaded.run.path / FILE, stored)
    return result


def _grade(found: Sequence[HeadComparison], chance: ChanceTest) -> Verdict:
    """Grade the net under attack by the rule of an audit."""
    clean, attacked, adaptive = found
    left = (
        f"Of {clean.correct} test images that are right without an attack, {attacked.correct} "
        f"are right under {attacked.images}"
    )
    errors = round(adaptive.rcon * adaptive.n)
    accepted = f"{adaptive.images}: {errors} of {adaptive.n} images are wrong and accepted by R-Con"
    if attacked.correct <= MIN_LEFT * clean.correct:
        return Verdict(Grade.BROKEN, (f"{left}; no head can change that.", f"{accepted}."))
    signs = [] if chance.passed else [f"{chance.advice}."]
    if upper_bound(errors, adaptive.n, 0.05) >= MAX_ACCEPTED:
        signs.append(f"{accepted}, not shown to be below {MAX_ACCEPTED:.0%}.")
    if signs:
        return Verdict(Grade.SUSPICIOUS, tuple(signs))
    return Verdict(Grade.NO_SIGN, (f"{left}.", f"{accepted}.", "Not tried: stronger attacks."))


def _advice(found: Sequence[HeadComparison], grade: Grade) -> str:
    """Say whether the head is worth it: better, nowhere worse, and few accepted errors."""
    verdicts = {one.verdict for one in found}
    if {"better", "worse"} <= verdicts:
        return "the head helps in some cases and harms in others; see the lines above"
    if "better" in verdicts and grade == Grade.NO_SIGN:
        return "the head is worth it: better somewhere, nowhere shown to be worse"
    if "better" in verdicts:
        where = " and ".join(one.images for one in found if one.verdict == "better")
        return f"the head is better on {where}, but the net is {grade}: not worth it under attack"
    worse = "worse than" if "worse" in verdicts else "not shown to be better than"
    return (
        f"the head is {worse} the net's own confidence; a guard of that is made by demur export "
        "RUN --rejector Con"
    )


def training_attack(recipe: Recipe) -> PGD:
    """The PGD that training images are attacked with, whose ball the comparison uses."""
    attack = getattr(recipe.method.framework, "attack", None)
    if not isinstance(attack, PGD):
        raise BadInput("a retrofit trains and compares under PGD; use framework=PGDAT()")
    return attack


def _ranking(images: str, record: Record, rcon: Rejector) -> HeadComparison:
    a, b = (values(as_score(one), record) for one in (rcon, Con()))
    correct = record.correct
    return HeadComparison(
        images, "AUROC", auroc(a, correct), auroc(b, correct), auroc_difference(a, b, correct),
        int(correct.sum()), len(correct),
    )  # fmt: skip


def _attacked_by_themselves(
    loaded: LoadedRun, pgd: PGD, rcon: Rejector, eps: str, on_progress: ProgressCallback
) -> HeadComparison:
    """Accepted errors where the attack on each score knows that score and its threshold."""
    errors, right = [], []
    for name, rejector in (("rcon", rcon), ("con", Con())):
        criterion = AcceptedError(rejector, TPR(0.95))
        attack = replace(
            pgd, steps=ADAPTIVE_STEPS, objective=PlusLogScore(rejector, eta=0.1), keep="success",
            criterion=criterion,
        )  # fmt: skip
        record = run_attack(loaded, f"adaptive-{name}", attack, on_progress=on_progress)
        bound = resolve_thresholds(criterion, loaded.clean)
        (threshold,) = bound.thresholds.values()
        rule = as_score(rejector).rule(threshold)
        errors.append(accepted(rule, record) & ~record.correct)
        right.append(int(record.correct.sum()))
    a, b = errors
    return HeadComparison(
        f"PGD-{ADAPTIVE_STEPS} on each score itself, {eps}", "accepted errors", float(a.mean()),
        float(b.mean()), paired_shares(a, b), right[0], len(a),
    )  # fmt: skip
