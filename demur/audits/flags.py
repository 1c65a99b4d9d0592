"""Sanity checks of a model that is no run of demur: its records are made here, in memory.

    checks = foreign_checks(model, x, y, {"autoattack": (chain, x_adv)}, criterion)

Besides the given attacks they need plain PGD at eps, at eps/2 and at a radius where every image
can be made grey: 60 gradient queries per image, of at most MOST_IMAGES images.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from demur.attacks import PGD, Attack, Clean
from demur.attacks.balls import Ball, Linf
from demur.attacks.checked_model import CheckedModel, NoGradientError
from demur.attacks.criteria import RuleCriterion
from demur.evaluate.recording import probe
from demur.evaluate.score import RejectorEvaluation
from demur.numerics import tf32
from demur.output import outputs_in_batches
from demur.rejectors.rule import as_score
from demur.runs import Record
from demur.sanity import checks_of
from demur.sanity.comparisons import LARGE, TOO_GOOD
from demur.sanity.evidence import CheckResult, Evidence, ParsedRecord
from demur.sanity.single_records import TIED

MOST_IMAGES = 500
STEPS = 20
REJECTOR = "the rejector"
NEED_REJECTOR = (TOO_GOOD, TIED)  # checks that mean nothing for a classifier alone

Attacked = Mapping[str, tuple[Attack, Tensor]]  # attacks and their adversarial examples, by name


def foreign_checks(
    model: CheckedModel,
    x: Tensor,
    y: Tensor,
    attacked: Attacked,
    criterion: RuleCriterion | None = None,
    bs: int = 250,
) -> list[CheckResult]:
    """Run every sanity check on a model and the results of attacks on it.

    Args:
        model: The attacked model.
        x: Clean images, N, C, H, W.
        y: True labels, N.
        attacked: The attacks that were run, with their adversarial examples, N, C, H, W.
        criterion: The rejector and its threshold; None for a classifier.
        bs: Batch size.
    """
    x, y = x[:MOST_IMAGES], y[:MOST_IMAGES]
    metadata: dict[str, object] = {"thresholds": {}, "probe": probe(model, x, y)}
    examples: dict[str, tuple[Attack, Tensor]] = {"clean": (Clean(), x)}
    ball = next(iter(ball for attack, _ in attacked.values() for ball in attack.balls()))
    examples |= {
        name: (attack, x_adv)
        for name, attack in plain_attacks(ball)
        if (x_adv := _craft(attack, model, x, y, bs)) is not None
    }
    examples |= {name: (attack, x_adv[: len(x)]) for name, (attack, x_adv) in attacked.items()}
    records = [
        ParsedRecord(_record(name, model, x_adv, y, bs, metadata), attack, name)
        for name, (attack, x_adv) in examples.items()
    ]
    if criterion is None:
        evidence = Evidence(records, RejectorEvaluation({}, {}, level=1.0, cal_n=0), {})
        return [check for check in checks_of(evidence) if check.kind not in NEED_REJECTOR]
    assert isinstance(criterion.threshold, float)
    evaluation = RejectorEvaluation(
        {REJECTOR: as_score(criterion.rejector)}, {REJECTOR: criterion.threshold}, 1.0, cal_n=0
    )
    return checks_of(Evidence(records, evaluation, {REJECTOR: criterion.rejector}))


def plain_attacks(ball: Ball) -> Iterator[tuple[str, Attack]]:
    """Yield PGD on the cross-entropy at the radii that the checks compare, by name."""
    for name, around in (
        ("", ball),
        (" at eps/2", type(ball)(ball.eps / 2)),
        (" at eps=128/255", Linf(LARGE)),
    ):
        yield f"PGD-{STEPS}{name}", PGD(around, steps=STEPS)


def _craft(attack: Attack, model: CheckedModel, x: Tensor, y: Tensor, bs: int) -> Tensor | None:
    """Return adversarial examples; None for a model without a gradient."""
    try:
        with tf32("fp32"):
            parts = [
                attack.perturb(model, x[rows], y[rows], rows)
                for rows in torch.arange(len(x), device=x.device).split(bs)
            ]
    except NoGradientError:
        return None
    return torch.cat(parts)


def _record(
    label: str, model: CheckedModel, x: Tensor, y: Tensor, bs: int, metadata: dict[str, object]
) -> Record:
    out = outputs_in_batches(model, x, bs, x.device)
    arrays = {
        "y": y.cpu(),
        "index": torch.arange(len(y)),
        "logits": out.logits,
        "aux": out.aux,
        "feature": out.feature,
    }
    return Record(arrays, metadata | {"label": label, "spec": ""})
