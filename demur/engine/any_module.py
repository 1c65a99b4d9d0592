"""The fast engine for any module: queries run on a checked copy, the module confirms successes.

On a GPU the copy computes in bf16 and its queries are captured as CUDA graphs. On a CPU a short
trial decides. A model that cannot be copied faithfully is attacked as it is, with one sentence.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from demur.attacks import CE, Attack, UntargetedMargin
from demur.attacks.attack_model import (
    CheckedModel,
    Gradient,
    Model,
    NoGradientError,
    ObjectiveFunction,
    PlainModel,
    checked,
)
from demur.engine.copies import (
    CannotCopy,
    CopySettings,
    FastCopy,
    Query,
    check_copyable,
    pure_bf16_pays,
)
from demur.engine.frozen import CopyModel
from demur.engine.graphs import QueryGraphs, cudnn_benchmark
from demur.engine.plan import MessageCallback
from demur.errors import BadInput, first_line
from demur.images import check_batch
from demur.numerics import deferred_checks, no_autocast, tf32
from demur.output import Output, as_output

ModelEngine = Literal["auto", "plain"]
PURE_BF16_SETTINGS = (  # on a GPU, for models with other norms than batch norm: transformers
    CopySettings("bf16", channels_last=True, pure_bf16=True),
    CopySettings("bf16", channels_last=False, pure_bf16=True),
)
GPU_SETTINGS = (
    CopySettings("bf16", channels_last=True),
    CopySettings("bf16", channels_last=False),
    CopySettings("tf32", channels_last=False),
)
CPU_SETTINGS = (CopySettings("fp32", channels_last=True), CopySettings("fp32", channels_last=False))
CHECKED_IMAGES = 16  # on which a copy must agree with its model
LOGIT_TOLERANCE = {"bf16": 0.05, "tf32": 0.01, "fp32": 1e-3}  # of the largest logit
MIN_COSINE = 0.9  # of the gradients of copy and model, median over images
TRIAL_ROUNDS = 8  # of the trial on a CPU; the first is cold and does not count
MAX_TIME_RATIO = 0.97  # on a CPU a copy must take at most this share of the model's time
MIN_TRIAL_QUERIES = 100  # forward and backward passes below which no trial on a CPU pays
SCRIPT_AFTER = 200  # forward passes on a CPU that take as long as making a TorchScript of them
ROUNDING = 1e-4  # two passes of one model may differ by this share of the largest logit


class FrozenModule(CopyModel):
    """Any module as an AttackModel: gradients and values of the copy, outputs of the module."""

    exact = False

    def __init__(self, model: nn.Module, fast: FastCopy, on_message: MessageCallback) -> None:
        self.model, self.fast = model, fast
        self.graphs = QueryGraphs(on_message, eager_without_memory=True)
        self._values_until_script = SCRIPT_AFTER if fast.device.type == "cpu" else -1
        if fast.device.type == "cpu":
            self.verify_every = 1

    def __call__(self, x: Tensor, /) -> Output | Tensor:
        with tf32("fp32"), no_autocast(x.device):
            out: Output | Tensor = self.model(x)
        return out

    def query(self, objective: ObjectiveFunction, query: Query, *tensors: Tensor) -> Gradient:
        return self.graphs(self.fast.query, objective, query, *tensors)

    def value(self, objective: ObjectiveFunction, *tensors: Tensor) -> tuple[Tensor, Output]:
        self._values_until_script -= 1
        if self._values_until_script == 0 and len(tensors[0]) > 2:
            self.fast.script(tensors[0])
        return super().value(objective, *tensors)


def attack(
    model: Model, attack: Attack, x: Tensor, y: Tensor, engine: str = "auto",
    on_message: MessageCallback = lambda sentence: None,
) -> Tensor:  # fmt: skip
    """Return adversarial examples of an attack on any model, with the fast engine if it can.

    `attack(model, x, y)` of the attack itself is the same with engine="plain".

    Args:
        model: A model from images, N, C, H, W in [0, 1], to logits or an `Output`.
        attack: The attack.
        x: Images, N, C, H, W, in [0, 1].
        y: True labels, N, int64.
        engine: "auto" queries a faster copy of an `nn.Module` where that is possible; the model
            itself confirms every success. "plain" queries the model itself.
        on_message: Called with a sentence for each step that the engine cannot take.

    Returns:
        Adversarial examples, shape of x.

    Example:
        >>> import demur, torch
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> x, y = torch.rand(4, 1, 8, 8), torch.arange(4)
        >>> x_adv = demur.attack(model, demur.PGD(demur.Linf(0.1), steps=3), x, y)
    """
    check_model_engine(engine)
    check_batch(x, y)
    queries = attack.gradient_queries + attack.forward_queries
    if engine == "plain" or (x.device.type == "cpu" and queries < MIN_TRIAL_QUERIES):
        return attack(model, x, y)
    with (
        cudnn_benchmark(False),
        checked(model, x, y) as (checked_model, images, labels),
        accelerated(checked_model, images, labels, len(x), engine, on_message) as fast,
    ):
        x_adv = attack.perturb(fast, images, labels, torch.arange(len(x), device=y.device))
        attack.check_result(images, x_adv)
        return x_adv


def check_model_engine(name: str) -> None:
    """Raise BadInput unless this is the name of an engine for any model."""
    known: tuple[str, ...] = get_args(ModelEngine)
    if name not in known:
        raise BadInput(f"the engine must be {' or '.join(known)}, not {name!r}")


@contextmanager
def accelerated(
    model: CheckedModel, x: Tensor, y: Tensor, batch_size: int, engine: str = "auto",
    on_message: MessageCallback = lambda sentence: None,
) -> Iterator[CheckedModel]:  # fmt: skip
    """Yield the model as attacks should query it, or the model itself for engine="plain".

    The first images test the copy; `batch_size` is the largest one of the attacks. Inside the block
    cuDNN benchmark is off: each new number of surviving images would be tuned. `on_message` is
    called with a sentence for each step that the engine cannot take.
    """
    check_model_engine(engine)
    if engine == "plain":
        yield model
        return
    # CUDA graphs are captured on the current device
    with cudnn_benchmark(False), torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        try:
            frozen = _frozen_module(model, x, y, batch_size, on_message)
        except CannotCopy as reason:
            on_message(f"the fast engine cannot take this model: {reason}; attacking it as it is")
            frozen = None
        yield model if frozen is None else CheckedModel(frozen, model.dtype)


def _frozen_module(
    model: CheckedModel, x: Tensor, y: Tensor, batch_size: int, on_message: MessageCallback
) -> FrozenModule | None:
    """Return the module on its fastest faithful copy; None if no copy is faster on a CPU."""
    if x.dtype != torch.float32 or model.dtype != torch.float32:
        raise CannotCopy("it does not compute in float32")
    module = check_copyable(model.model)
    on_gpu = x.is_cuda
    if not on_gpu and not any(isinstance(part, nn.Conv2d) for part in module.modules()):
        return None
    first = x[:CHECKED_IMAGES], y[:CHECKED_IMAGES]
    expected = _expected(model, *first)
    copies: list[FrozenModule] = []
    for settings in _settings(module, on_gpu):
        try:
            fast = FastCopy(module, settings, first[0][:2])
            _check_agreement(fast, expected, *first)
        except CannotCopy:
            raise
        except Exception as error:  # of the user's code
            on_message(f"a copy in {settings} fails: {first_line(error)}")
            continue
        frozen = FrozenModule(module, fast, on_message)
        if on_gpu:
            frozen.graphs.set_max_batch(min(batch_size, len(x)))
            return frozen
        copies.append(frozen)
    if not copies:
        raise CannotCopy("no copy of it agrees with it")
    return _fastest(copies, model, *first)


def _settings(module: nn.Module, on_gpu: bool) -> tuple[CopySettings, ...]:
    """Return the settings of copies to try, on a GPU the fastest first."""
    if not on_gpu:
        return CPU_SETTINGS
    return (*PURE_BF16_SETTINGS, *GPU_SETTINGS) if pure_bf16_pays(module) else GPU_SETTINGS


def _expected(model: CheckedModel, x: Tensor, y: Tensor) -> Gradient:
    """Return the model's margin, its gradient and output, or raise CannotCopy if it is random."""
    devices = [x.device] if x.is_cuda else []
    state = _random_state(devices)
    with tf32("fp32"), no_autocast(x.device), torch.no_grad():
        outputs = [as_output(model(x)) for _ in range(2)]
    try:
        with tf32("fp32"), no_autocast(x.device):
            expected = model.gradient(UntargetedMargin(), x, y)
    except NoGradientError:
        raise CannotCopy("it has no gradient with respect to the images") from None
    outputs.append(expected.out)
    largest = outputs[0].logits.abs().nan_to_num(0, 0, 0).amax()
    same = [bool(_difference(outputs[0], other) <= ROUNDING * largest) for other in outputs[1:]]
    if not all(same) or state != _random_state(devices):
        raise CannotCopy("it is random")
    return expected


def _random_state(devices: list[torch.device]) -> list[bytes]:
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
    return [state.numpy().tobytes() for state in states]


def _difference(one: Output, other: Output) -> Tensor:
    """Return the largest difference of logits and auxiliary outputs; NaN equals NaN alone."""
    pairs = ((one.logits, other.logits), (one.aux, other.aux))
    parts = [(a - b).abs().masked_fill((a == b) | a.isnan() & b.isnan(), 0) for a, b in pairs]
    return torch.cat(parts, 1).nan_to_num(nan=torch.inf).amax()


def _check_agreement(fast: FastCopy, expected: Gradient, x: Tensor, y: Tensor) -> None:
    """Raise BadInput if the copy's outputs or gradients differ by more than rounding."""
    grad, _, out = fast.query(UntargetedMargin(), "gradient", x, y)
    if any(part.dtype != torch.float32 for part in (out.logits, out.aux)):
        raise BadInput("its logits are rounded to 16 bits")
    precision = fast.settings.precision
    scale = torch.cat((expected.out.logits, expected.out.aux), -1).abs().nan_to_num(0, 0, 0).amax()
    if not bool(_difference(out, expected.out) <= LOGIT_TOLERANCE[precision] * scale):
        raise BadInput("its outputs are not those of the model")
    own, theirs = grad.flatten(1).double(), expected.grad.flatten(1).double()
    cosine = torch.cosine_similarity(own, theirs, 1, eps=1e-300)
    both_zero = (own.norm(dim=1) == 0) & (theirs.norm(dim=1) == 0)
    if not bool(torch.where(both_zero, 1.0, cosine).median() >= MIN_COSINE):
        raise BadInput("its gradients are not those of the model")


def _fastest(
    copies: list[FrozenModule], model: CheckedModel, x: Tensor, y: Tensor
) -> FrozenModule | None:
    """Return the fastest copy in a trial on a CPU, or None if the model itself is about as fast."""
    models: list[PlainModel | FrozenModule] = [PlainModel(model), *copies]
    least = [float("inf")] * len(models)
    with deferred_checks():
        for trial_round in range(TRIAL_ROUNDS):
            for number, queried in enumerate(models):
                # processor time: other processes disturb the wall time
                start = time.process_time()
                queried.gradient(CE(), x, y)
                queried.value(CE(), x, y)
                spent = time.process_time() - start
                if trial_round:
                    least[number] = min(least[number], spent)
    best = min(range(len(copies)), key=lambda number: least[number + 1])
    return copies[best] if least[best + 1] < MAX_TIME_RATIO * least[0] else None
