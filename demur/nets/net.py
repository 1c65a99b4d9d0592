"""The parts of every net: convolutions, batch norm, trunk, linear classifier and auxiliary head.

A trunk returns the pooled features of each stage, the first stage first. The classifier reads the
last one, the auxiliary head reads all of them. An attack needs the input gradient at every step. On
CPUs without tuned kernels for it (ARM, small maps) it costs up to ten forward passes; here it is a
convolution itself. On a GPU few input channels are padded to eight, and 1x1 convolutions are matrix
products.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d, pad, pixel_shuffle
from torch.nn.grad import conv2d_weight
from torch.nn.modules.batchnorm import _BatchNorm

from demur.errors import BadInput
from demur.images import Domain
from demur.output import Output
from demur.spec import Spec

MIN_CHANNELS = 8  # with fewer input channels a GPU convolution is slow
ALIGNMENT = 8  # GPU matrix products are fast for multiples of this size
MAX_MATRIX = 2**16  # up to this many entries a CPU multiplies faster than it convolves


class Conv3x3(nn.Conv2d):
    """A 3x3 convolution with padding 1 and without bias."""

    def __init__(self, width_in: int, width: int, stride: int = 1) -> None:
        super().__init__(width_in, width, 3, stride, padding=1, bias=False)
        self.frozen_weight = False  # whether training is over
        self._cache: tuple[Tensor, Tensor] | None = None  # a weight and the matrix made from it

    def forward(self, x: Tensor) -> Tensor:
        if self._is_small_matrix(x):
            return self._matrix_product(x)
        on_cpu = x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
        if on_cpu and torch.is_grad_enabled() and x.requires_grad:
            out: Tensor = _Convolution.apply(x, self.weight, self.stride[0], self.frozen_weight)  # type: ignore[no-untyped-call]
            return out
        if x.is_cuda and self.in_channels < MIN_CHANNELS and self.stride == (1, 1):
            padded: Tensor = _PaddedChannels.apply(*autocast_like(x, self.weight))  # type: ignore[no-untyped-call]
            return padded
        return super().forward(x)

    def _is_small_matrix(self, x: Tensor) -> bool:
        """Return whether to compute the convolution as one small matrix product on a CPU."""
        if not self.frozen_weight or torch.compiler.is_compiling() or x.device.type != "cpu":
            return False
        if self.weight.is_inference() or torch.is_autocast_enabled("cpu"):
            return False
        pixels_in = x.shape[2] * x.shape[3]
        pixels_out = -(-x.shape[2] // self.stride[0]) * -(-x.shape[3] // self.stride[1])
        return self.in_channels * pixels_in * self.out_channels * pixels_out <= MAX_MATRIX

    def _matrix_product(self, x: Tensor) -> Tensor:
        """Convolve by a matrix, which is made again only if the weight has changed."""
        count, cache = x.shape[1:].numel(), self._cache
        if cache is None or len(cache[1]) != count or not torch.equal(cache[0], self.weight):
            with torch.inference_mode(False), torch.no_grad():
                basis = torch.eye(count, dtype=x.dtype).view(count, *x.shape[1:])
                matrix = conv2d(basis, self.weight, stride=self.stride, padding=1)
                cache = self._cache = self.weight.detach().clone(), matrix
        matrix = cache[1]
        return (x.flatten(1) @ matrix.flatten(1)).view(len(x), *matrix.shape[1:])


class Conv1x1(nn.Conv2d):
    """A 1x1 convolution without bias."""

    def __init__(self, width_in: int, width: int, stride: int = 1) -> None:
        super().__init__(width_in, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return super().forward(x)
        return conv1x1_matmul(x, self.weight, (self.stride[0], self.stride[1]))


def conv1x1_matmul(x: Tensor, weight: Tensor, stride: tuple[int, int]) -> Tensor:
    """Return a 1x1 convolution, computed as a matrix product."""
    pixels = x[:, :, :: stride[0], :: stride[1]].movedim(1, -1)  # N, H, W, C
    return (pixels @ weight[:, :, 0, 0].t()).movedim(-1, 1)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, frozen: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.frozen = stride, frozen
        return conv2d(x, weight, stride=stride, padding=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (grad,), (x, weight), stride = grads, ctx.saved_tensors, ctx.stride
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            even = stride == 2 and not (x.shape[2] % 2 or x.shape[3] % 2)
            if even and ctx.frozen:  # not in training, whose results must stay bit-identical
                grad_x = _input_gradient_stride2(grad, weight)
            else:
                flipped = weight.flip(2, 3).transpose(0, 1)
                grad_x = conv2d(_dilate(grad, x, stride), flipped, padding=1)
        if ctx.needs_input_grad[1]:
            grad_weight = conv2d_weight(x, weight.shape, grad, stride=stride, padding=1)
        return grad_x, grad_weight, None, None


def _input_gradient_stride2(grad: Tensor, weight: Tensor) -> Tensor:
    """Return the input gradient of a stride-2 convolution without dilating `grad` by zeros.

    An input in an even row meets only the middle row of the kernel, one in an odd row the last and
    the first; columns likewise. So each of the four parities is a 2x2 convolution of `grad`, and
    pixel_shuffle interleaves them.
    """
    row = torch.tensor([[1, 3], [2, 0]], device=weight.device)  # row 3 is the zero padding
    taps = pad(weight, [0, 1, 0, 1])[:, :, row[:, :, None, None], row]  # K, C, 2, 2, 2, 2
    kernels = taps.permute(1, 2, 4, 0, 3, 5).flatten(0, 2)  # 4 C, K, 2, 2
    return pixel_shuffle(conv2d(pad(grad, [0, 1, 0, 1]), kernels), 2)


def _dilate(grad: Tensor, x: Tensor, stride: int) -> Tensor:
    """Return `grad` in the size of x, with zeros between its entries for a stride above 1."""
    if stride == 1:
        return grad
    dilated = grad.new_zeros(*grad.shape[:2], *x.shape[2:])
    dilated[:, :, ::stride, ::stride] = grad
    return dilated


class _PaddedChannels(torch.autograd.Function):
    """A 3x3 convolution of images, with zero channels added up to MIN_CHANNELS.

    The weight gradient is a matrix product with the nine neighbours of each pixel.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        padded = _pad_image_channels(x)
        ctx.save_for_backward(x, padded, weight)
        return conv2d(padded, pad_weight_channels(weight), padding=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,), (x, padded, weight) = grads, ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_padded, _, _ = torch.ops.aten.convolution_backward(
                grad, padded, pad_weight_channels(weight), None, [1, 1], [1, 1], [1, 1], False,
                [0, 0], 1, [True, False, False],
            )  # fmt: skip
            grad_x = grad_padded[:, : x.shape[1]]
        if ctx.needs_input_grad[1]:
            taps = grad.movedim(1, -1).flatten(0, 2).t() @ _neighbours(x).flatten(0, 2)
            grad_weight = taps[:, : 9 * x.shape[1]].unflatten(1, (3, 3, -1)).movedim(-1, 1)
        return grad_x, grad_weight


def _pad_image_channels(x: Tensor) -> Tensor:
    """Return channels_last images with zero channels added up to MIN_CHANNELS."""
    size = (len(x), MIN_CHANNELS, *x.shape[2:])
    padded = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    padded.zero_()[:, : x.shape[1]] = x
    return padded


def pad_weight_channels(weight: Tensor) -> Tensor:
    """Return a channels_last weight with zero input channels added up to MIN_CHANNELS."""
    padded = pad(weight, [0, 0, 0, 0, 0, max(MIN_CHANNELS - weight.shape[1], 0)])
    return padded.contiguous(memory_format=torch.channels_last)


def _neighbours(x: Tensor) -> Tensor:
    """Return the nine neighbours of each pixel, N, H, W, 9 C, padded to a multiple of ALIGNMENT."""
    height, width = x.shape[2:]
    padded = pad(x.movedim(1, -1), [0, 0, 1, 1, 1, 1])
    parts = [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    missing = -9 * x.shape[1] % ALIGNMENT
    return torch.cat([*parts, x.new_zeros(1).expand(len(x), height, width, missing)], -1)


def autocast_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors cast as autocast would, for autograd functions that autocast skips."""
    if not torch.is_autocast_enabled("cuda"):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype("cuda")) for tensor in tensors)


class Norm(_BatchNorm):
    """Batch norm; with momentum 0 it keeps its running statistics."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.momentum != 0:
            return super().forward(x)
        # without running statistics torch.compile drops unused outputs
        return batch_norm(x, None, None, self.weight, self.bias, training=True, eps=self.eps)


class Norm2d(Norm, nn.BatchNorm2d):
    """Batch norm of maps N, C, H, W."""


class Norm1d(Norm, nn.BatchNorm1d):
    """Batch norm of features N, C."""


class AuxiliaryHead(Protocol):
    """A training head, as far as a net needs it: the builder of the auxiliary module."""

    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        """Return a module from the list of pooled stages, of widths `dims`, to (N, A)."""
        ...


class Trunk(nn.Module, ABC):
    """Images to pooled features of each stage; `dims` are their widths."""

    dims: tuple[int, ...]

    @abstractmethod
    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the pooled features of each stage, (N, dims[i])."""


class Normalise(nn.Module):
    """Standardise each channel inside the net, so that images stay in [0, 1] outside of it."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


class RejectingNet(nn.Module):
    """A classifier with an auxiliary output that rejectors can read.

    `trunk` maps images to pooled features, `aux` the list of pooled features to (N, A).
    """

    def __init__(self, domain: Domain, trunk: Trunk, aux: nn.Module) -> None:
        super().__init__()
        self.domain = domain
        self.normalise = Normalise(domain.mean, domain.std)
        self.trunk = trunk
        self.classify = nn.Linear(trunk.dims[-1], domain.classes)
        self.aux = aux
        self.frozen = False

    def forward(self, x: Tensor) -> Output:
        """Return logits (N, K), the last pooled feature (N, D) and the auxiliary output (N, A)."""
        self.check_images(x)
        stages = self.trunk(self.normalise(x))
        with torch.autocast(x.device.type, enabled=False):  # heads are cheap: fp32 at least
            return Output(self.classify(stages[-1]), stages[-1], self.aux(stages))

    def check_images(self, x: Tensor) -> None:
        """Raise BadInput if shape or dtype of the images are not those of the net."""
        if x.shape[1:] != self.domain.shape or x.dtype != self.normalise.mean.dtype:
            raise BadInput(
                f"this net takes images of shape N, {', '.join(map(str, self.domain.shape))} in "
                f"{self.normalise.mean.dtype}, not {tuple(x.shape)} in {x.dtype}"
            )

    def freeze(self) -> None:
        """Freeze trunk and classifier for good; only the auxiliary head trains."""
        self.frozen = True
        self.trunk.requires_grad_(False)
        self.classify.requires_grad_(False)
        self.train(self.training)

    def freeze_for_inference(self) -> None:
        """Freeze all weights, so that convolutions may cache what they derive from them."""
        self.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, Conv3x3):
                module.frozen_weight = True

    def train(self, mode: bool = True) -> "RejectingNet":
        """Set train or eval mode; a frozen trunk stays in eval mode."""
        super().train(mode)
        if self.frozen:
            self.trunk.eval()
        return self

    def classifier(self) -> nn.Module:
        """Return a module from images to logits alone, as other libraries expect it."""
        return LogitsOnly(self)


class LogitsOnly(nn.Module):
    """A net that returns only its logits, (N, K)."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.training = net.training

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x).logits
        return logits


@dataclass(frozen=True)
class NetSpec(Spec, ABC):
    """The specification of a net."""

    @property
    def trains_head_alone(self) -> bool:
        """Whether trunk and classifier come with weights that training leaves alone."""
        return False

    @abstractmethod
    def trunk(self, domain: Domain) -> Trunk:
        """Return a new trunk for images of a domain."""

    def check(self, domain: Domain) -> None:
        """Raise BadInput if the net cannot be built for these images; it always can by default."""

    def build(self, domain: Domain, head: AuxiliaryHead, seed: int = 0) -> RejectingNet:
        """Return a new net for images of a domain; the seed determines its weights.

        The head builds the auxiliary module. The global random state does not change.
        """
        with torch.random.fork_rng(devices=[]):  # layers draw from the global generator only
            torch.default_generator.manual_seed(seed)
            trunk = self.trunk(domain)
            aux = head.build(trunk.dims, domain.classes)
            net = RejectingNet(domain, trunk, aux)
            self.initialise(net)
            return net

    def initialise(self, net: RejectingNet) -> None:
        """Change the initial weights of the layers; does nothing by default."""
