"""Attacks that run after a chain where a model may mask its gradients, among them a surrogate.

`flags.masking_checks` finds the signs. None of them proves anything. A sign makes the ensembles run
HopSkipJump, RayS and a surrogate: a student that was trained on the model's decisions (Papernot et
al. 2017), or a given net. Decisions and successes are always those of the model.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from demur import noise, progress
from demur.attacks import APGD, Attack
from demur.attacks.attack import AttackBatch, Criterion, FalseRejection, Rejected, RuleCriterion
from demur.attacks.attack_model import (
    AttackModel,
    CheckedModel,
    Gradient,
    Model,
    ObjectiveFunction,
    attack_model,
)
from demur.attacks.autoattack import NOT_BROKEN, Chain, ChainState, decision_attacks
from demur.attacks.balls import Ball
from demur.attacks.objectives.classification import Objective
from demur.attacks.pgd import PGD
from demur.audits.flags import MASKED_SHARE
from demur.errors import BadInput
from demur.output import Output, as_output, prediction

ROUNDS = 10  # of training and asking
TRAINING_STEPS, TRAINING_BATCH, RATE = 100, 128, 2e-3  # of a round
POINTS = 512  # images that are attacked in a round
REACH = 1.5  # of the radius, up to which the student learns
SMALL_IMAGE = 1024  # numbers of an image for which a dense student is enough
WIDTHS, HIDDEN = (32, 64, 128), 256  # channels of the student, and units of its last layer but one


@dataclass(frozen=True)
class OutcomeMargin(Objective):
    """Largest logit of the outcomes that the criterion wants minus the largest of the others.

    An outcome is a class or, with `rejects`, the rejection, which is the last logit.
    """

    seeks_misclassification: ClassVar[bool] = True

    criterion: Criterion
    rejects: bool = False

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        outcomes = out.logits.shape[-1]
        is_true = one_hot(y, outcomes).bool()
        last = torch.arange(outcomes, device=y.device) == outcomes - 1
        if isinstance(self.criterion, Rejected | FalseRejection):
            wanted = last.expand_as(is_true)
        else:
            wanted = ~is_true & ~last if self.rejects else ~is_true
        best = out.logits.masked_fill(~wanted, -torch.inf).amax(-1)
        return best - out.logits.masked_fill(wanted, -torch.inf).amax(-1)


class SurrogateGradients(AttackModel):
    """A model with the gradients of another net; outputs and decisions are its own."""

    def __init__(self, model: Model, surrogate: Model) -> None:
        self.model, self.surrogate = model, attack_model(surrogate)

    def __call__(self, x: Tensor, /) -> Output | Tensor:
        return self.model(x)

    def gradient(
        self, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> Gradient:
        grad, value, _ = self.surrogate.gradient(objective, x, y, *inputs)
        with torch.no_grad():
            return Gradient(grad, value, as_output(self.model(x)))


def outcomes(model: Model, criterion: Criterion, x: Tensor, bs: int) -> tuple[Tensor, int]:
    """Return the outcome of each image, N, and their number: the classes, and the rejection."""
    found = []
    for images in x.split(bs):
        with torch.no_grad():
            out = as_output(model(images))
        classes, label = out.logits.shape[-1], prediction(out)
        if isinstance(criterion, RuleCriterion):
            label = label.masked_fill(~criterion.accept_rule.accepted(out), classes)
        found.append(label)
    return torch.cat(found), classes + isinstance(criterion, RuleCriterion)


def student_net(shape: torch.Size, outputs: int) -> nn.Module:
    """Return an untrained net for images C, H, W: dense for small ones, else convolutional."""
    layers: list[nn.Module] = []
    if shape.numel() > SMALL_IMAGE:
        for before, after in pairwise((shape[0], *WIDTHS)):
            layers += [nn.Conv2d(before, after, 3, 2, 1), nn.ReLU()]
        layers.append(nn.AdaptiveAvgPool2d(4))
    hidden = nn.Sequential(nn.Flatten(), nn.LazyLinear(HIDDEN), nn.ReLU())
    return nn.Sequential(*layers, hidden, nn.Linear(HIDDEN, outputs))


def distil(
    model: Model, criterion: Criterion, ball: Ball, x: Tensor, seed: int = 0, bs: int = 250
) -> nn.Module:
    """Return a student of the model's decisions in and around the balls of some images.

    Each round trains on all answers so far, then attacks the student and asks the model about the
    results. The criterion of a rejector adds the rejection to the classes.
    """
    answers, count = outcomes(model, criterion, x, bs)
    objective = OutcomeMargin(criterion, rejects=isinstance(criterion, RuleCriterion))
    wide = replace(ball, eps=min(REACH * ball.eps, 1.0))
    attack = PGD(wide, steps=10, objective=objective, seed=seed)
    with torch.random.fork_rng([]), torch.enable_grad():
        torch.default_generator.manual_seed(seed)
        student = student_net(x.shape[1:], count)
        student(x[:1].float().cpu())  # makes the lazy layer
        student.to(x)
        pool, labels = x, answers
        for number in range(ROUNDS):
            _train(student.train(), pool, labels)
            rows = noise.permutation(seed, len(x), number).to(x.device)[:POINTS]
            near = x[rows]
            # For a rejection the class does not matter; for an error it is the one to leave.
            true = answers[rows].clamp(max=count - 1)
            far = attack.perturb(student.eval(), near, true, rows, number)
            part = noise.uniform(seed, rows, number, (1, 1, 1)).to(x)
            new = torch.cat([far, near + part * (far - near)])
            pool = torch.cat([pool, new])
            labels = torch.cat([labels, outcomes(model, criterion, new, bs)[0]])
            progress.report(number + 1, ROUNDS)
        _train(student.train(), pool, labels)
    return student.eval().requires_grad_(False)


def _train(student: nn.Module, x: Tensor, labels: Tensor) -> None:
    """Train the student for one round on images and the model's outcomes."""
    optimiser = torch.optim.Adam(student.parameters(), RATE)
    for _ in range(TRAINING_STEPS):
        rows = torch.randint(len(x), (TRAINING_BATCH,)).to(x.device)
        optimiser.zero_grad()
        cross_entropy(student(x[rows]), labels[rows]).backward()
        optimiser.step()


COMPLETE = ("standard", "plus")  # versions after which the attacks on masking run
SURROGATE = "surrogate"  # the attack with the gradients of another net


class OnMasking:
    """The attacks that run after a chain where gradients may be masked, by name.

    All run after a complete version. SURROGATE uses the gradients of the given net, and then runs
    after every version and without signs, or of a student, which is trained on the first images
    that need it.
    """

    def __init__(
        self, chain: Chain, version: str = "", seed: int = 0, surrogate: Model | None = None
    ) -> None:
        given: Any = surrogate
        if given is not None and not callable(given):
            raise BadInput(f"surrogate must be a net from images to logits, not {given!r}")
        (self.ball,), self.criterion, self.seed = chain.attacks[0].balls(), chain.criterion, seed
        self.rule = self.criterion if isinstance(self.criterion, RuleCriterion) else None
        self.attacks = dict[str, Attack]()
        if version in COMPLETE:
            self.attacks |= decision_attacks(self.ball, self.criterion, seed)
        if version in COMPLETE or given is not None:
            objective = OutcomeMargin(self.criterion, self.rule is not None and given is None)
            self.attacks[SURROGATE] = APGD(
                self.ball, restarts=5, objective=objective, criterion=self.criterion, seed=seed
            )
        self.surrogate, self.student = surrogate, surrogate

    def batch(self, name: str, model: CheckedModel, batch: AttackBatch, bs: int) -> AttackBatch:
        """Return the batch for an attack, for SURROGATE with the gradients of the other net."""
        if name != SURROGATE:
            return batch
        if self.student is None or (self.surrogate is None and int(batch.index[0]) == 0):
            self.student = distil(model, self.criterion, self.ball, batch.x, self.seed, bs)
        return replace(batch, model=SurrogateGradients(batch.model, self.student))


def square_signs(names: list[str], chain_state: ChainState) -> list[str]:
    """Return a sentence if Square broke images that every gradient attack before it left."""
    count = int((chain_state.broken_by == names.index("square")).sum())
    left = count + int((chain_state.broken_by == NOT_BROKEN).sum())
    if count <= max(1, MASKED_SHARE * left):
        return []
    return [f"Square succeeded on {count} of {left} images where every gradient attack failed"]
