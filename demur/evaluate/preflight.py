"""Sentences about a model that would make an attack on it mean little."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from demur.attacks import AcceptedError, SingleMargin
from demur.attacks.chain import Chain
from demur.attacks.objectives.accepted_error import ANY
from demur.evaluate.model_probe import probe
from demur.gradient import Model, gradient
from demur.images import check_batch
from demur.output import as_output


def preflight_warnings(model: Model, chain: Chain, x: Tensor, y: Tensor) -> Iterator[str]:
    """What a few looks at clean images say against the result to come."""
    if isinstance(model, nn.Module) and model.training:
        yield "the model is in train mode; call model.eval() first"
    with torch.no_grad():
        logits = as_output(model(x)).logits
    check_batch(x, y, logits.shape[-1])
    sums = logits.sum(-1)
    if logits.min() >= 0 and torch.allclose(sums, torch.ones_like(sums), atol=1e-4):
        yield "the model returns probabilities; give it logits instead"
    seen = probe(model, x, y)
    averaged = any(getattr(attack, "eot_iter", 1) > 1 for attack in chain.attacks)
    if seen["random_outputs"] and not averaged:
        yield (
            "the model answers at random; let it average several looks, or use AutoAttack's "
            "version='rand'"
        )
    if seen["zero_gradients"]:
        yield (
            f"the gradient is zero for {seen['zero_gradients']} of {len(x)} images; the result may "
            "be far too good, and Square alone tells something"
        )
    if isinstance(chain.criterion, AcceptedError):
        yield from _flat_scores(model, chain.criterion, x, y)


def _flat_scores(model: Model, rule: AcceptedError, x: Tensor, y: Tensor) -> Iterator[str]:
    """Scores that do not say which way is up."""
    count = len(rule.rule.pairs)
    inputs = torch.full_like(y, ANY), x.new_ones(len(x), 1 + count)
    for place in range(1, 1 + count):
        try:
            grad = gradient(model, SingleMargin(rule, place), x, y, *inputs).grad
        except RuntimeError:  # of autograd: the score is no function of the pixels
            grad = torch.zeros_like(x)
        flat = int((grad.flatten(1).abs().amax(1) == 0).sum())
        if flat > len(x) / 2:
            yield (
                f"the score has no gradient for {flat} of {len(x)} images; give "
                "ModelWithScore(model, score, surrogate=...) a smooth one to climb"
            )
