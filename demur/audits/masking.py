"""Attacks that run after a chain where a model may mask its gradients.

`flags.masking_checks` finds the signs. None of them proves anything. A sign makes the ensembles run
HopSkipJump, RayS and a surrogate.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

from torch import Tensor

from demur.attacks import APGD, Attack, Criterion, Misclassified
from demur.attacks.attack import AttackBatch
from demur.attacks.attack_model import CheckedModel, Model
from demur.attacks.autoattack import NOT_BROKEN, Chain, ChainState, decision_attacks
from demur.attacks.balls import Ball
from demur.attacks.criteria import RuleCriterion
from demur.attacks.surrogate import OutcomeMargin, SurrogateGradients, distil
from demur.audits.flags import MASKED_SHARE, masking_checks
from demur.errors import BadInput
from demur.sanity.evidence import CheckResult

COMPLETE = ("standard", "plus")  # versions after which the attacks on masking run
SURROGATE = "surrogate"  # the attack with the gradients of another net


class OnMasking:
    """The attacks that run after a chain where gradients may be masked, by name.

    The attack SURROGATE uses the gradients of the given net, and then runs without signs too, or of
    a student, which is trained on the first images that need it.
    """

    def __init__(
        self,
        ball: Ball | None = None,
        criterion: Criterion = Misclassified(),
        attacks: Mapping[str, Attack] | None = None,
        surrogate: Model | None = None,
    ) -> None:
        self.ball, self.criterion, self.attacks = ball, criterion, dict(attacks or {})
        self.surrogate, self.student = surrogate, surrogate

    @classmethod
    def after(cls, chain: Chain, version: str, seed: int, surrogate: Model | None) -> Self:
        """Return the attacks after a version: all after a complete one, else a given net's."""
        given: Any = surrogate
        if given is not None and not callable(given):
            raise BadInput(f"surrogate must be a net from images to logits, not {given!r}")
        (ball,), criterion = chain.balls(), chain.criterion
        found = decision_attacks(ball, criterion, seed) if version in COMPLETE else {}
        if version in COMPLETE or given is not None:
            rejects = isinstance(criterion, RuleCriterion) and given is None
            objective = OutcomeMargin(criterion, rejects)
            found[SURROGATE] = APGD(
                ball, restarts=5, objective=objective, criterion=criterion, seed=seed
            )
        return cls(ball, criterion, found, surrogate)

    def checks(self, model: CheckedModel, x: Tensor, y: Tensor) -> list[CheckResult]:
        """Return the checks for masked gradients at clean images."""
        assert self.ball is not None
        rule = self.criterion if isinstance(self.criterion, RuleCriterion) else None
        return masking_checks(model, x, y, self.ball, rule)

    def batch(self, name: str, model: CheckedModel, batch: AttackBatch, bs: int) -> AttackBatch:
        """Return the batch for an attack, for SURROGATE with the gradients of the other net."""
        if name != SURROGATE:
            return batch
        if self.student is None or (self.surrogate is None and int(batch.index[0]) == 0):
            assert self.ball is not None
            seed = self.attacks[name].noise_seed or 0
            self.student = distil(model, self.criterion, self.ball, batch.x, seed, bs)
        return replace(batch, model=SurrogateGradients(batch.model, self.student))


def square_signs(names: list[str], chain_state: ChainState) -> list[str]:
    """Return a sentence if Square broke images that every gradient attack before it left."""
    if "square" not in names[1:]:
        return []
    count = int((chain_state.broken_by == names.index("square")).sum())
    left = count + int((chain_state.broken_by == NOT_BROKEN).sum())
    if count <= max(1, MASKED_SHARE * left):
        return []
    return [f"Square succeeded on {count} of {left} images where every gradient attack failed"]
