"""A model as attacks query it: gradient queries and forward passes, and checks of a user's model.

An `AttackModel` may compute gradients and values in bf16; `model(x)` stays exact. `checked` makes a
`CheckedModel`, whose outputs must have one row per image and no NaN.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from demur.errors import BadInput, blamed, first_line, user_frames, user_line
from demur.errors import NoGradientError as NoGradientError  # noqa: PLC0414  (exported)
from demur.images import check_batch, clip_rounding
from demur.numerics import deferred_checks, raise_if_invalid
from demur.output import Output, as_output, check_logits
from demur.rejectors.image_scores import ImageScoreModel, with_columns

S = TypeVar("S")
Model = Callable[[Tensor], Output | Tensor]  # images (N, C, H, W) to an Output or logits (N, K)
ObjectiveFunction = Callable[..., Tensor]  # (out, y, *inputs) -> one value per image, N
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KINDS = {
    "Rejector": "rejector", "Score": "rejector", "Criterion": "criterion",
    "Objective": "objective", "Attack": "attack",
}  # fmt: skip
# Parts of torch's messages about an objective through which no gradient reaches the images.
NO_GRADIENT = ("not require grad", "not have been used in the graph", "Inference tensors cannot")


class Gradient(NamedTuple):
    """The result of one gradient query."""

    grad: Tensor  # gradient of the objective with respect to x; shape of x
    value: Tensor  # value of the objective, N
    out: Output  # output of the model


class AttackModel(ABC):
    """What attacks and training frameworks call on a model.

    `attack_model` makes one from any callable. A class that computes gradients in its own way
    inherits from this one (after nn.Module, if from both) and overrides `gradient`; the other
    methods have defaults.
    """

    exact: bool = True  # whether `gradient` and `value` have the precision of `model(x)`
    verify_every: int = 10  # steps between verifications, each of which makes the host wait

    @abstractmethod
    def __call__(self, x: Tensor, /) -> Output | Tensor:
        """Return the exact output for images N, C, H, W: an Output or logits."""

    def gradient(
        self, objective: ObjectiveFunction, x: Tensor, y: Tensor, /, *inputs: Tensor
    ) -> Gradient:
        """Return the gradient of the objective at each image, its value and the output.

        One forward and one backward pass, which compute no gradient of a weight. `inputs` are
        further tensors that the objective takes, one row per image.
        """
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = as_output(self(x))
            value = objective(out, y, *inputs)  # N
            # Backward passes use the dtypes of the forward pass and must not run under autocast.
            with torch.autocast(x.device.type, enabled=False):
                (grad,) = torch.autograd.grad(value.sum(), x)
        return Gradient(grad, value.detach(), out.detached())

    def gradients(
        self, objectives: Sequence[ObjectiveFunction], x: Tensor, y: Tensor, /, *inputs: Tensor
    ) -> list[Gradient]:
        """Return what `gradient` returns for several objectives with the same inputs.

        A fast model needs one forward pass for all of them.
        """
        return [self.gradient(objective, x, y, *inputs) for objective in objectives]

    def gradient_only(
        self, objective: ObjectiveFunction, x: Tensor, y: Tensor, /, *inputs: Tensor
    ) -> Tensor:
        """Return the gradient of the objective alone."""
        return self.gradient(objective, x, y, *inputs).grad

    def value(
        self, objective: ObjectiveFunction, x: Tensor, y: Tensor, /, *inputs: Tensor
    ) -> tuple[Tensor, Output]:
        """Return the objective (N) and the output, in the precision of the gradient.

        Unless the model is exact, `attacks.driver.verify_success` confirms a success in fp32.
        """
        return exact_value(self, objective, x, y, *inputs)

    def drop_graphs(self) -> None:
        """Free what was captured for the objectives of an attack that has ended."""
        return

    def batch_norms(self) -> list[_BatchNorm]:
        """Return the batch norms whose momentum applies during an attack."""
        return []


class PlainModel(AttackModel):
    """A callable as an AttackModel: its gradients come from autograd."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __call__(self, x: Tensor, /) -> Output | Tensor:
        return self.model(x)

    def batch_norms(self) -> list[_BatchNorm]:
        modules = self.model.modules() if isinstance(self.model, nn.Module) else ()
        return [module for module in modules if isinstance(module, _BatchNorm)]


class QueryModel(AttackModel):
    """A model without gradients: a function of float32 arrays, N, C, H, W, to logits, N, K."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, x: Tensor, /) -> Output | Tensor:
        answer = self.function(x.detach().float().cpu().numpy())
        if isinstance(answer, tuple | list) and any(hasattr(part, "ndim") for part in answer):
            return as_output(tuple(torch.as_tensor(np.array(part)).to(x) for part in answer))
        return torch.as_tensor(np.array(answer)).to(x)

    def gradient(self, objective: ObjectiveFunction, *tensors: Tensor) -> Gradient:
        raise NoGradientError(
            "the model is a function of arrays without a gradient; use Square or "
            "version='black-box'"
        )


def has_no_gradient(model: Any) -> bool:
    """Return whether a model is a QueryModel, inside of any wrappers."""
    while hasattr(model, "model"):
        model = model.model
    return isinstance(model, QueryModel)


def attack_model(model: Model) -> AttackModel:
    """Return the model itself if it is an AttackModel, else a PlainModel of it."""
    return model if isinstance(model, AttackModel) else PlainModel(model)


def exact_value(
    model: Model, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
) -> tuple[Tensor, Output]:
    """Return the objective's value (N) and the output of `model(x)`, the exact forward pass."""
    with torch.no_grad():
        out = as_output(model(x))
        return objective(out, y, *inputs), out


def on_outputs(spec: S, model: Model) -> tuple[S, Model]:
    """The spec with image rejectors as columns of the output, and the model that has these."""
    spec, rejectors = with_columns(spec)
    if not rejectors:
        return spec, model
    if isinstance(model, CheckedModel):
        return spec, CheckedModel(ImageScoreModel(model.model, rejectors), model.dtype)
    return spec, ImageScoreModel(model, rejectors)


# ------------------------------------------------ the border to a user's model


class ModelFailed(BadInput):
    """An exception of the user's code, as one sentence."""


class CheckedModel(AttackModel):
    """A model whose every query is checked; an AttackModel keeps its own gradients.

    The user's model gets images of `dtype`; outputs have the dtype of the attack's images.
    """

    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype
        self._queried = model if isinstance(model, AttackModel) else PlainModel(self.__call__)
        self.exact, self.verify_every = self._queried.exact, self._queried.verify_every

    @property
    def training(self) -> bool:
        return bool(getattr(self.model, "training", False))

    def __call__(self, x: Tensor) -> Output:
        with _explained_failure(x, self.model):
            # A copy, since the model may change its input in place.
            answer: Any = self.model(x.to(self.dtype, copy=True))
            if isinstance(answer, np.ndarray):
                raise ModelFailed("the model returns an array for a tensor; return a tensor")
        out = as_output(answer, rows=len(x))
        out = Output(*(part.to(x.dtype) for part in out))
        check_logits(out)
        return out

    def gradient(
        self, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> Gradient:
        with _explained_failure(x, self.model, objective):
            query = self._queried.gradient(objective, x, y, *inputs)
        return _checked(query)

    def gradients(
        self, objectives: Sequence[ObjectiveFunction], *tensors: Tensor
    ) -> list[Gradient]:
        with _explained_failure(tensors[0], self.model, objectives[-1]):
            found = self._queried.gradients(objectives, *tensors)
        return [_checked(query) for query in found]

    def gradient_only(self, objective: ObjectiveFunction, *tensors: Tensor) -> Tensor:
        with _explained_failure(tensors[0], self.model, objective):
            grad = self._queried.gradient_only(objective, *tensors)
        _check_gradient(grad)
        return grad

    def value(self, objective: ObjectiveFunction, *tensors: Tensor) -> tuple[Tensor, Output]:
        value, out = self._queried.value(objective, *tensors)
        _check_query(value, out)
        return value, out

    def drop_graphs(self) -> None:
        self._queried.drop_graphs()


@contextmanager
def checked(model: Model, x: Tensor, y: Tensor) -> Iterator[tuple[CheckedModel, Tensor, Tensor]]:
    """Yield a checked model, the images in the widest dtype involved and the labels.

    Gradients are off and inference mode is left. The model's buffers and the random states of
    Python, NumPy and torch are restored at the end. BadInput: the images or labels are invalid, the
    model fails on the first image, labels and classes do not match, or a value of the model is NaN.
    """
    if not callable(model):
        raise BadInput(
            f"the model must be a callable such as an nn.Module, not {type(model).__name__}; load "
            "weights into their module first"
        )
    x = clip_rounding(x)
    check_batch(x, y)
    with torch.inference_mode(False), torch.no_grad(), _restored(model, x), deferred_checks():
        x, y = outside_inference_mode(x.detach()), outside_inference_mode(y)
        checked_model, out = _first_query(model, x[:1])
        check_batch(x, y, classes=out.logits.shape[-1])
        widest = torch.promote_types(x.dtype, torch.float32)
        yield checked_model, x.to(torch.promote_types(widest, checked_model.dtype)), y


def outside_inference_mode(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy that autograd can use if it was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


def _first_query(model: Model, x: Tensor) -> tuple[CheckedModel, Output]:
    """Return the model with the first dtype that it takes, and its output for one image.

    A function that does not take tensors is tried as a function of NumPy arrays.
    """
    errors = []
    tensors = (*model.parameters(), *model.buffers()) if isinstance(model, nn.Module) else ()
    own_dtypes = [tensor.dtype for tensor in tensors if tensor.dtype in FLOATS]
    kinds = [(model, dtype) for dtype in dict.fromkeys((x.dtype, *own_dtypes))]
    if not isinstance(model, nn.Module | AttackModel):
        kinds.append((QueryModel(model), torch.float32))
    with _eval_mode(model):
        for kind, dtype in kinds:
            checked_model = CheckedModel(kind, dtype)
            try:
                return checked_model, checked_model(x)
            except ModelFailed as error:
                errors.append(error)
    raise errors[0]


@contextmanager
def _restored(model: Model, x: Tensor) -> Iterator[None]:
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    saved = [
        (module, name, buffer, buffer.clone())
        for module in modules
        for name, buffer in module.named_buffers(recurse=False)
        if not buffer.is_inference()  # torch does not let anyone change these
    ]
    with forked_rng(x):
        try:
            yield
        finally:
            for module, name, buffer, value in saved:
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)
                buffer.copy_(value)


@contextmanager
def forked_rng(x: Tensor, seed: int | None = None) -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch (on x's device); a seed sets them."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        try:
            if seed is not None:
                random.seed(seed)
                np.random.set_state(np.random.RandomState(seed % 2**32).get_state())
                torch.default_generator.manual_seed(seed)
                if x.is_cuda:
                    torch.cuda.default_generators[x.device.index].manual_seed(seed)
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def _eval_mode(model: Model) -> Iterator[None]:
    """Switch the model to eval mode, where batch norm takes a single image, and back."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    in_train_mode = [module for module in modules if module.training]
    # Not model.eval() and model.train(): some submodules may have been frozen one by one.
    for module in in_train_mode:
        module.training = False
    try:
        yield
    finally:
        for module in in_train_mode:
            module.training = True


@contextmanager
def _explained_failure(
    x: Tensor, model: Model, objective: ObjectiveFunction | None = None
) -> Iterator[None]:
    """Turn an exception of the user's code into ModelFailed, or into NoGradientError.

    A forward pass without an objective leaves torch's errors about gradients as they are.
    """
    try:
        yield
    except (BadInput, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and any(part in str(error) for part in NO_GRADIENT):
            if objective is None:
                raise
            raise NoGradientError(
                f"{objective} has no gradient with respect to the images; remove detach, no_grad "
                f"and inference_mode from {_without_gradient(model, x)}, or use Square"
            ) from error
        if objective is not None and user_frames(error):
            raise ModelFailed(blamed(error, _named_in(error, objective))) from error
        shape = " x ".join(map(str, x.shape))
        raise ModelFailed(
            f"the model fails on {shape} pixels of {x.dtype} on {x.device}: {first_line(error)}"
            f"{user_line(error)}; give images of the shape, dtype, device and batch size it takes"
        ) from error


def _named_in(error: Exception, objective: ObjectiveFunction) -> str:
    """The user's object whose code raised the error: the first one that its traceback enters."""
    own = {frame.filename for frame in user_frames(error)}
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code.co_filename in own:
            thing = frame.f_locals.get("self", objective)
            bases = [base.__name__ for base in type(thing).__mro__]
            kind = next((word for name, word in KINDS.items() if name in bases), "model")
            return f"the {kind} {type(thing).__name__}"
    return f"the objective {objective}"


def _without_gradient(model: Model, x: Tensor) -> str:
    """What cuts the gradient: the model, or the score beside it if the logits have one."""
    try:
        with torch.enable_grad():
            logits = as_output(model(x[:1].detach().requires_grad_())).logits
    except RuntimeError:  # weights made in inference mode
        return "the model"
    if not logits.requires_grad:
        return "the model"
    if hasattr(model, "score"):
        name = getattr(model.score, "__name__", type(model.score).__name__)
        return f"the detector {name}, pass a surrogate to ModelWithScore"
    return "it"


def _checked(query: Gradient) -> Gradient:
    _check_query(query.value, query.out)
    _check_gradient(query.grad)
    return query


def _check_query(value: Tensor, out: Output) -> None:
    check_logits(out)
    raise_if_invalid("objective", value, "its outputs are unfit for this objective; choose another")


def _check_gradient(grad: Tensor) -> None:
    remedy = "torch.autograd.detect_anomaly names the operation, and Square needs no gradient"
    raise_if_invalid("gradient", grad.amax((1, 2, 3)), remedy)
