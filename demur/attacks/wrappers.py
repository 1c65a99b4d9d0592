"""Wrappers that prepare other people's rejecting models for the attacks of demur.

A classifier that returns logits needs no wrapper.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from demur.attacks.attack_model import Model
from demur.errors import BadInput, first_line
from demur.output import Output, as_output

ImageScore = Callable[[Tensor], Tensor]  # images to one score per image; accept if it is high


class WrappedModel(nn.Module):
    """A model inside a module; the wrapper starts in the train or eval mode of the model."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.training = isinstance(model, nn.Module) and model.training


class RejectClassModel(WrappedModel):
    """A classifier of K + 1 classes whose last class rejects the input.

    The wrapper returns the K logits of the real classes. Its score, read by `ModelScore`, is the
    largest of them minus the logit of the reject class, so that `ModelScore` with threshold 0
    accepts exactly the images that the classifier does not reject.

    Args:
        model: A model that returns K + 1 >= 3 logits per image; fewer raise BadInput.

    Example:
        >>> import torch
        >>> from demur import ModelScore, RejectClassModel
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 11))
        >>> out = RejectClassModel(net)(torch.rand(4, 1, 8, 8))
        >>> accepted = ModelScore().rule(0.0).accepted(out)
    """

    def forward(self, x: Tensor) -> Output:
        """Return the logits of the K real classes, with the score as last auxiliary output."""
        out = as_output(self.model(x), len(x))
        if out.logits.shape[-1] < 3:
            raise BadInput(
                "a net with a reject class needs at least three logits, "
                f"not {out.logits.shape[-1]}; use the net without RejectClassModel"
            )
        logits, reject_logit = out.logits[:, :-1], out.logits[:, -1]
        score = logits.amax(-1) - reject_logit
        return Output(logits, out.feature, torch.cat([out.aux, score[:, None]], 1))


class ModelWithScore(WrappedModel):
    """A classifier with a separate detector, whose score `ModelScore` reads.

    Args:
        model: A model that returns an Output or logits, N, K.
        score: A callable from images to one score per image; high scores are accepted.
        surrogate: A differentiable stand-in for a score with zero or no gradient (BPDA). Gradients
            come from the surrogate, values and decisions from the score.

    Example:
        >>> import torch
        >>> from demur import ModelWithScore
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> model = ModelWithScore(net, score=lambda x: x.flatten(1).std(1))
        >>> score = model(torch.rand(4, 1, 8, 8)).aux[:, -1]
    """

    def __init__(
        self, model: Model, score: ImageScore, surrogate: ImageScore | None = None
    ) -> None:
        super().__init__(model)
        given: Any = score
        if not callable(given) or isinstance(given, type):
            raise BadInput(
                f"{score!r} is no rejector; pass an object such as demur.Con(), or a function from "
                "images to scores such as lambda x: detector.score_samples(x.detach().flatten(1))"
            )
        self.score, self.surrogate = score, surrogate

    def forward(self, x: Tensor) -> Output:
        """Return the model's output with the score as last auxiliary output."""
        # Copies: what changes its input in place must not change that of the others.
        out = as_output(self.model(x.clone()), len(x))
        value = _as_column(self.score, x.clone()).to(out.logits)
        if self.surrogate is not None:
            stand_in = _as_column(self.surrogate, x).to(value)
            # Adds zero to the value and the surrogate's gradient to the gradient.
            value = value.detach() + (stand_in - stand_in.detach())
        return Output(out.logits, out.feature, torch.cat([out.aux, value], 1))


def _as_column(score: ImageScore, x: Tensor) -> Tensor:
    """Return one value per image with shape N, 1; raise BadInput for another number of values."""
    try:
        found: Any = score(x)
        values = found if isinstance(found, Tensor) else torch.as_tensor(np.asarray(found))
    except (BadInput, RuntimeError):  # of memory and of gradients; the attack explains them
        raise
    except Exception as error:  # of the user's code
        raise BadInput(
            f"the detector fails on images of shape {tuple(x.shape)}: {first_line(error)}"
        ) from error
    if values.numel() != len(x):
        raise BadInput(
            f"a score must return one value per image ({len(x)}), not {values.numel()} values"
        )
    return values.reshape(len(x), 1)
