"""Other people's models that refuse, made ready for every attack here.

    model = RejectClassModel(net)                          # K + 1 logits, the last for "don't know"
    model = ModelWithScore(net, detector)                  # any callable: images to one value each
    model = ModelWithScore(net, detector, surrogate=soft)  # climb this where the detector is flat
    RejectAutoAttackEnsemble(Linf(8/255), AcceptedError(ModelScore(), 0.5))(model, x, y)

A plain classifier needs no wrapping: a module that returns logits is taken as it is.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from demur.errors import BadInput
from demur.gradient import Model
from demur.output import Output, as_output

ImageScore = Callable[[Tensor], Tensor]  # images to one value per image, higher = more trusted


class WrappedModel(nn.Module):
    """A wrapped model; its weights and its mode are the model's own."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        if isinstance(model, nn.Module):
            self.training = model.training


class RejectClassModel(WrappedModel):
    """A net of K + 1 classes, the last of which is a refusal.

    Its score, `ModelScore`, is the best logit of a real class less that of the refusal: the net answers
    exactly where that is at least 0.
    """

    def forward(self, x: Tensor) -> Output:
        """The logits of the real classes, and how far they are ahead of the refusal."""
        out = as_output(self.model(x))
        if out.logits.shape[-1] < 3:
            raise BadInput("a net with a class for refusals has at least three logits")
        logits, refusal = out.logits[:, :-1], out.logits[:, -1]
        ahead = logits.amax(-1) - refusal
        return Output(logits, out.feature, torch.cat([out.aux, ahead[:, None]], 1))


class ModelWithScore(WrappedModel):
    """A classifier with a score of its own making, read by `ModelScore`.

    A surrogate lends the score its slope: values and verdicts stay those of the score.
    """

    def __init__(
        self, model: Model, score: ImageScore, surrogate: ImageScore | None = None
    ) -> None:
        super().__init__(model)
        self.score, self.surrogate = score, surrogate

    def forward(self, x: Tensor) -> Output:
        """The model's answer, with the score as its last auxiliary output."""
        out = as_output(self.model(x))
        value = _column(self.score(x), x).to(out.logits)
        if self.surrogate is not None:
            gradient_only = _column(self.surrogate(x), x).to(value)
            value = value.detach() + (gradient_only - gradient_only.detach())
        return out._replace(aux=torch.cat([out.aux, value], 1))


def _column(values: Tensor, x: Tensor) -> Tensor:
    """One value per image as a column."""
    if values.numel() != len(x):
        raise BadInput(f"a score must be a tensor with one value per image ({len(x)})")
    return values.reshape(len(x), 1)
