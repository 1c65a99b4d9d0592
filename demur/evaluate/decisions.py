"""Decisions of a model on images: the predicted label, and whether a rejector accepts it."""

from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from demur.attacks.criteria import Criterion, RuleCriterion
from demur.errors import BadInput
from demur.gradient import Model
from demur.output import as_output, prediction


class Decisions(NamedTuple):
    """Decisions on N images, on the CPU. Without a rejector every image is accepted."""

    labels: Tensor  # predictions, N
    accepted: Tensor  # N, bool
    scores: tuple[Tensor, ...] = ()  # of the rejector, N each


def decide(model: Model, criterion: Criterion, x: Tensor, bs: int) -> Decisions:
    """Return the decisions of a model, with the rejector of the criterion if it has one."""
    parts = []
    for images in x.split(bs):
        with torch.no_grad():
            out = as_output(model(images))
            labels = prediction(out)
            if isinstance(criterion, RuleCriterion):
                rule = criterion.accept_rule
                accepted, scores = rule.accepted(out), [score(out) for score, _ in rule.pairs]
            else:
                accepted, scores = torch.ones_like(labels, dtype=torch.bool), []
        parts.append([labels.cpu(), accepted.cpu(), *(score.cpu() for score in scores)])
    labels, accepted, *scores = (torch.cat(column) for column in zip(*parts, strict=True))
    return Decisions(labels, accepted, tuple(scores))


def device_for(
    model: Model, x: Tensor, device: str | torch.device | None = None
) -> str | torch.device:
    """Return the given device, else that of the images; for images on the CPU the model's."""
    if device is not None or x.device.type != "cpu" or not isinstance(model, nn.Module):
        return device or x.device
    tensors = chain(model.parameters(), model.buffers())
    found = next((tensor.device for tensor in tensors), x.device)
    if found.type == "meta":
        raise BadInput("the model has no weights (device meta); load its weights first")
    return found
