"""Weights with 8 bits a number, a quarter of their size in fp32.

A large tensor becomes int8 with one scale for each output channel, every other one fp16.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

SCALE = ".int8_scale"  # suffix of the name of the scales of a tensor
LARGE = 50_000  # numbers of a tensor from which on it is stored with 8 bits
STEPS = 127


def quantise(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors for `restore`; tensors of integers are left as they are."""
    small: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.ndim > 1 and tensor.numel() >= LARGE:
            scale = tensor.float().flatten(1).abs().amax(1).clamp(min=torch.finfo().tiny) / STEPS
            small[name] = (tensor.float() / _per_channel(scale, tensor)).round().to(torch.int8)
            small[name + SCALE] = scale
        else:
            small[name] = tensor.half() if tensor.is_floating_point() else tensor
    return small


def restore(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with every int8 one that has scales in fp32 again; a copy without the scales."""
    full = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALE)}
    for name, tensor in full.items():
        scale = tensors.get(name + SCALE)
        if scale is not None and scale.shape == tensor.shape[:1]:
            full[name] = tensor.float() * _per_channel(scale, tensor)
    return full


def _per_channel(scale: Tensor, tensor: Tensor) -> Tensor:
    return scale.view(-1, *[1] * (tensor.ndim - 1))
