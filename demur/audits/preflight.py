"""Checks of a model before it is attacked: warnings that the result may mean little.

    for sentence in preflight_warnings(model, chain, x, y): ...

Attacks by gradients on a model with random outputs or zero gradients overestimate its robustness.
"""

from collections.abc import Iterator, Sequence
from math import comb

import torch
from torch import Tensor

from demur.attacks import AcceptedError, SingleMargin
from demur.attacks.attack_model import Model, NoGradientError, attack_model
from demur.attacks.autoattack import Chain
from demur.attacks.objectives.rejector import ANY
from demur.evaluate.recording import probe
from demur.metrics import BoolArray, FloatArray, auroc, auroc_interval
from demur.output import as_output
from demur.rejectors.rule import Rule

LOW_COVERAGE = 0.05  # share of clean images up to which accepting them is an exception
MIN_FOR_CHANCE, CHANCE_LEVEL = 10, 0.05  # images, and probability of so many hits by chance


def preflight_warnings(model: Model, chain: Chain, x: Tensor, y: Tensor) -> Iterator[str]:
    """Yield one sentence for each problem found on clean images x (N, C, H, W) and labels y (N)."""
    if getattr(model, "training", False):
        yield "the model is in train mode; call model.eval() first"
    with torch.no_grad():
        logits = as_output(model(x)).logits
    right, classes = int((logits.argmax(-1) == y).sum()), logits.shape[-1]
    if len(x) >= MIN_FOR_CHANCE and _by_chance(right, len(x), classes) > CHANCE_LEVEL:
        yield (
            f"the model gets {right} of {len(x)} clean images right, no better than chance for "
            f"{classes} classes; check its weights, the normalisation, the order of the classes "
            "and which output holds the logits"
        )
    sums = logits.sum(-1)
    if logits.min() >= 0 and torch.allclose(sums, torch.ones_like(sums), atol=1e-4):
        yield "the model returns probabilities; return logits instead"
    counts = probe(model, x, y)
    averaged = any(attack.gradients_per_step > 1 for attack in chain.attacks)
    if counts["random_outputs"] and not averaged:
        yield (
            "the model's outputs are random; average the gradient over several passes with "
            "eot_iter=20 or version='rand'"
        )
    if counts["zero_gradients"]:
        yield (
            f"the gradient is zero for {counts['zero_gradients']} of {len(x)} images; gradient "
            "attacks overestimate robustness here, so rely on Square"
        )
    if isinstance(chain.criterion, AcceptedError):
        yield from _zero_score_gradients(model, chain.criterion, x, y)


def _by_chance(right: int, n: int, classes: int) -> float:
    """Return the probability that guessing gets at least so many of n images right."""
    p = 1 / classes
    return sum(comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(right, n + 1))


def rejector_warnings(
    rule: Rule, scores: Sequence[FloatArray], accepted: BoolArray, right: BoolArray
) -> Iterator[str]:
    """Yield one sentence for each problem of a rejector on clean images.

    Args:
        rule: The rejector with its thresholds.
        scores: One array for each score of the rule, N.
        accepted: The images that the rule accepts, N.
        right: The correct predictions, N.
    """
    names = [type(score).__name__ for score, _ in rule.pairs]
    for name, (_, t), values in zip(names, rule.pairs, scores, strict=True):
        if (values < t).all():
            yield (
                f"no clean image reaches the threshold {t:.7g} of {name}: the largest score is "
                f"{values.max():.7g}, so every image is rejected and no error can be accepted"
            )
            return
    if accepted.mean() <= LOW_COVERAGE:
        yield (
            f"the rejector accepts {int(accepted.sum())} of {len(accepted)} clean images: few "
            "accepted errors then say little; report the coverage with them"
        )
    for name, values in zip(names, scores, strict=True):
        if auroc_interval(values, right, level=0.99).hi < 0.5:
            yield (
                f"{name} has the wrong sign: on clean images it is higher where the prediction is "
                f"wrong (AUROC {auroc(values, right):.2f}); higher scores must mean accept"
            )


def _zero_score_gradients(
    model: Model, criterion: AcceptedError, x: Tensor, y: Tensor
) -> Iterator[str]:
    """Yield a sentence for each score of the criterion whose gradient is zero for most images."""
    count = len(criterion.accept_rule.pairs)
    inputs = torch.full_like(y, ANY), x.new_ones(len(x), 1 + count)
    for position in range(1, 1 + count):
        try:
            margin = SingleMargin(criterion, position)
            grad = attack_model(model).gradient(margin, x, y, *inputs).grad
        except NoGradientError:  # the score does not depend on the pixels
            grad = torch.zeros_like(x)
        flat = int((grad.flatten(1).abs().amax(1) == 0).sum())
        if flat > len(x) / 2:
            yield (
                f"the score has no gradient for {flat} of {len(x)} images; pass a differentiable "
                "one as ModelWithScore(model, score, surrogate=...)"
            )
