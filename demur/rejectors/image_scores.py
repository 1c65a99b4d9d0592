"""Rejectors that see the images and query the net; consistency under small PGD steps.

Attacks, records and guards read scores off an `Output`. `with_columns` therefore replaces each such
rejector in a spec by an `ImageColumn`, and `ImageScoreModel` appends its values to the auxiliary
output of the model.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from demur.errors import BadInput, NoGradientError, blamed
from demur.output import Output, as_output, label_entry, log_probabilities, mask_label, prediction
from demur.rejectors.output_scores import OutputScore
from demur.rejectors.rule import Rejector, Score, Unresolved
from demur.spec import replace_specs, show, specs_in
from demur.spec.code_digest import score_key
from demur.spec.field_types import NonNegativeInt, Positive, PositiveInt, UnitInterval

T = TypeVar("T")
Query = Callable[[Tensor], Output]  # images to the output of the net
FitImages = tuple[Query, Tensor, Output, Tensor]  # the net, clean images, their output and labels


@dataclass(frozen=True)
class ImageRejector(Score, Rejector, ABC):
    """A rejector whose score sees the images and may query the net.

    A subclass is a frozen dataclass with a method `score`. If its score has no useful gradient, it
    also has a method `surrogate`, whose gradient attacks use instead.

    Example:
        >>> import torch
        >>> from dataclasses import dataclass
        >>> from demur import ImageRejector, Output
        >>> @dataclass(frozen=True)
        ... class Flipped(ImageRejector):
        ...     def score(self, model, images: torch.Tensor, output: Output) -> torch.Tensor:
        ...         return -(model(images.flip(-1)).logits - output.logits).abs().amax(-1)
    """

    @abstractmethod
    def score(self, model: Query, images: Tensor, output: Output) -> Tensor:
        """Return the score of each image, N; higher means accept.

        Args:
            model: The net: images to an `Output`. Gradients are enabled.
            images: N, C, H, W in [0, 1].
            output: The output of the net for these images.
        """

    def surrogate(self, model: Query, images: Tensor, output: Output) -> Tensor | None:
        """Return a differentiable form of the score, N; None attacks the score itself."""
        return None

    def fit_images(self, model: Query, images: Tensor, output: Output, y: Tensor) -> Self:
        """Return a copy whose fields are fitted to the clean images of the fit split."""
        return self

    def fit(self, out: Output, y: Tensor) -> Self:
        return self

    def __call__(self, out: Output) -> Tensor:
        raise Unresolved(
            f"{show(self)} sees images, not only an output; call score(model, images, output), or "
            "attack, record and guard the net with it"
        )

    @property
    def key(self) -> str:
        """Name of the score in records: the full spec and the digest of the user's code."""
        return score_key(self)

    @classmethod
    def baselines(cls, data: object) -> dict[str, Rejector]:
        return {}  # it costs queries, so it is computed where it is named


@dataclass(frozen=True)
class ImageColumn(OutputScore):
    """The values of an image rejector in the auxiliary output, counted from its end."""

    rejector: str
    place: NonNegativeInt

    def __call__(self, out: Output) -> Tensor:
        return as_output(out).aux[:, -2 - self.place]  # the last one is the net's, as before


class ImageScoreModel(nn.Module):
    """A model whose auxiliary output also holds the values of image rejectors."""

    def __init__(self, model: Any, rejectors: Sequence[ImageRejector]) -> None:
        super().__init__()
        self.model, self.rejectors = model, tuple(rejectors)
        self.training = isinstance(model, nn.Module) and model.training

    def forward(self, x: Tensor) -> Output:
        """Return the model's output with one more column for each rejector, and its last one."""
        out = as_output(self.model(x.clone()), len(x))
        columns = [values_on_images(one, self.model, x, out) for one in self.rejectors]
        return add_columns(out, columns)


def image_rejectors(*values: Any) -> list[ImageRejector]:
    """The different image rejectors in some specs, in order."""
    found = (spec for value in values for spec in specs_in(value))
    return list(dict.fromkeys(one for one in found if isinstance(one, ImageRejector)))


def with_columns(value: T) -> tuple[T, list[ImageRejector]]:
    """The spec with an `ImageColumn` for each image rejector, and these rejectors in order."""
    rejectors = image_rejectors(value)
    columns = {one: ImageColumn(show(one), place) for place, one in enumerate(rejectors)}
    return replace_specs(value, columns), rejectors


def add_columns(out: Output, columns: Sequence[Tensor]) -> Output:
    """The output with the values of image rejectors, and its last auxiliary column once more.

    `ModelScore` reads the last column and R-Con the first, so both stay where they are.
    """
    if not columns:
        return out
    last = out.aux[:, -1:] if out.aux.shape[-1] else torch.zeros_like(out.logits[:, :1])
    values = [column.to(out.logits)[:, None] for column in reversed(columns)]
    return out._replace(aux=torch.cat([out.aux, *values, last], 1))


def values_on_images(
    rejector: ImageRejector, model: Callable[[Tensor], Any], x: Tensor, out: Output
) -> Tensor:
    """The score of each image, N, with the gradient of the surrogate where there is one.

    Raises BadInput, with the line, for an error of the rejector or a wrong number of values.
    """
    wanted = torch.is_grad_enabled()

    def query(images: Tensor) -> Output:
        return as_output(model(images.clone()), len(images))

    try:
        with torch.enable_grad():  # for rejectors that need a gradient of their own
            value = rejector.score(query, x, out)
            stand_in = rejector.surrogate(query, x, out) if wanted else None
    except (BadInput, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise BadInput(blamed(error, f"the rejector {type(rejector).__name__}")) from error
    for given in (value, stand_in):
        shape = getattr(given, "shape", type(given).__name__)  # a user returns anything
        if given is not None and shape != x.shape[:1]:
            raise BadInput(
                f"the rejector {type(rejector).__name__} must return one value per image, a tensor "
                f"of shape ({len(x)},), not {shape}"
            )
    if not wanted:
        return value.detach()
    guide = value if stand_in is None else stand_in
    if x.requires_grad and not guide.requires_grad:

        def raise_if_used(grad: Tensor) -> None:
            if grad.any():  # the attack goes through the score
                raise NoGradientError(
                    f"the score of {type(rejector).__name__} has no gradient with respect to the "
                    "images; remove detach and no_grad from it, give it a method surrogate, or use "
                    "Square"
                )

        guide = guide + 0 * x.flatten(1).sum(1)
        guide.register_hook(raise_if_used)
    # Adds zero to the value and the surrogate's gradient to the gradient.
    return guide if stand_in is None else value.detach() + (guide - guide.detach())


def fit_on_images(value: T, images: Callable[[], FitImages]) -> T:
    """The spec with those of its image rejectors fitted that have a method `fit_images`."""
    fitted: dict[ImageRejector, Rejector] = {}
    for one in image_rejectors(value):
        fits = type(one).fit_images is not ImageRejector.fit_images
        with torch.enable_grad():
            fitted[one] = one.fit_images(*images()) if fits else one
    return replace_specs(value, fitted)


# ------------------------------------------------ consistency under small steps


@dataclass(frozen=True)
class Consistency(ImageRejector):
    """The probability of the prediction after PGD steps away from it in a small ball, as a logit.

    Args:
        radius: Linf radius of the ball.
        steps: PGD steps; the iterate with the largest cross entropy counts.
        step_size: Size of a step.
        gradient: What an attack differentiates: "straight-through" treats the shift by the steps as
            a constant, "unrolled" differentiates the steps, with a linear form of their sign.

    Example:
        >>> import torch
        >>> from demur import Consistency
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> guarded = demur.guard(
        ...     net,
        ...     torch.rand(40, 1, 8, 8),
        ...     torch.arange(40) % 10,
        ...     rejector=Consistency(radius=0.05, step_size=0.01),
        ... )
    """

    radius: UnitInterval = 0.0055
    steps: PositiveInt = 10
    step_size: Positive = 0.001
    gradient: Literal["straight-through", "unrolled"] = "straight-through"

    def score(self, model: Query, images: Tensor, output: Output) -> Tensor:
        label = prediction(output)
        logs = log_probabilities(self.after_steps(model, images, label))
        return label_entry(logs, label) - mask_label(logs, label).logsumexp(-1)

    def after_steps(self, model: Query, images: Tensor, label: Tensor) -> Output:
        """Return the output of the net after the steps away from the label."""
        unrolled = self.gradient == "unrolled" and images.requires_grad
        moved, best, highest = images, images, torch.full_like(images[:, 0, 0, 0], -torch.inf)
        for step in range(self.steps + 1):
            at = moved if unrolled else moved.detach().requires_grad_()
            loss = cross_entropy(model(at).logits, label, reduction="none")
            better = loss.detach() > highest
            best = torch.where(better[:, None, None, None], at, best)
            highest = torch.where(better, loss.detach(), highest)
            if step < self.steps:
                (slope,) = torch.autograd.grad(loss.sum(), at, create_graph=unrolled)
                moved = self._step(images, at, slope)
        return model(best if unrolled else images + (best - images).detach())

    def _step(self, images: Tensor, at: Tensor, slope: Tensor) -> Tensor:
        linear = slope / slope.abs().mean((1, 2, 3), keepdim=True).clamp_min(1e-12)
        sign = linear + (slope.sign() - linear).detach()
        shift = (at + self.step_size * sign - images).clamp(-self.radius, self.radius)
        return (images + shift).clamp(0, 1)


@dataclass(frozen=True)
class CPR(Consistency):
    """1 where the prediction stays the same after PGD steps away from it, else 0.

    Consistent prediction-based rejection (Chen et al. 2023, arXiv 2305.01139). Attacks use the
    gradient of the margin of the prediction after the steps. The fields are those of `Consistency`,
    with the radius of the authors for CIFAR-10.

    Example:
        >>> import torch
        >>> from demur import CPR
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> x = torch.rand(4, 1, 8, 8)
        >>> from demur.output import as_output
        >>> CPR().score(lambda images: as_output(net(images)), x, as_output(net(x))).shape
        torch.Size([4])
    """

    def score(self, model: Query, images: Tensor, output: Output) -> Tensor:
        label = prediction(output)
        logits = self.after_steps(model, images, label).logits
        margin = label_entry(logits, label) - mask_label(logits, label).amax(-1)
        return margin + ((margin >= 0).to(margin) - margin).detach()
