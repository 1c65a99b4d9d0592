"""Copies with all activations in bf16: which operations are, and models that need care."""

import platform
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from demur.attacks.attack_model import checked
from demur.engine.any_module import (
    GPU_SETTINGS,
    PURE_BF16_SETTINGS,
    _check_agreement,
    _expected,
    _settings,
)
from demur.engine.copies import FastCopy
from tests.test_any_module import conv_net, seeded

aten = torch.ops.aten
DIM, CLASSES = 32, 4


class Transformer(nn.Module):
    """A ViT with a class token, a position embedding and a normalisation of pixels."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.4914]).view(1, 1, 1, 1))
        self.patches, self.head = nn.Conv2d(1, DIM, 2, 2), nn.Linear(DIM, CLASSES)
        self.token = nn.Parameter(torch.randn(1, 1, DIM))
        self.position = nn.Parameter(torch.randn(1, 17, DIM))
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(3))
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def attention(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed: Tensor = functional.scaled_dot_product_attention(*parts)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches((x - self.mean) / 0.25).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.position
        x = x + self.attention(self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        out: Tensor = self.head(self.norms[2](x)[:, 0])
        return out


class FunctionalNorm(Transformer):
    """Calls layer norm as a function, with parameters and constants made in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(DIM)), nn.Parameter(torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + torch.linspace(-1, 1, DIM, device=x.device)
        x = x + self.mlp(functional.layer_norm(x, (DIM,), self.scale, bias=self.shift))
        out: Tensor = self.head(x.mean(1))
        return out


class Encoder(nn.Module):
    """torch's own encoder layer, whose attention keeps a parameter for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(1, DIM, 2, 2), nn.Linear(DIM, CLASSES)
        self.layer = nn.TransformerEncoderLayer(DIM, 2, 64, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.patches(x).flatten(2).transpose(1, 2)).mean(1))
        return out


def group_norms() -> nn.Module:
    return conv_net(nn.Conv2d(8, 8, 3, 1, 1), nn.GroupNorm(2, 8), nn.ReLU())


MODELS = {
    "vit": Transformer,
    "functional": FunctionalNorm,
    "encoder": Encoder,
    "group": group_norms,
    "rms": lambda: conv_net(nn.Flatten(2), nn.RMSNorm(64), nn.Unflatten(2, (8, 8))),
}


class NormDtypes(TorchDispatchMode):
    """Collect the dtypes of all norms and sums of tokens."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.norms, self.sums = set[torch.dtype](), set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (aten.native_layer_norm, aten.native_group_norm):
            self.norms |= {part.dtype for part in args if isinstance(part, Tensor)}
        if func.overloadpacket is aten.add and result.ndim == 3:
            self.sums.add(result.dtype)
        return result


@pytest.fixture(scope="module")
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(16, 1, 8, 8, generator=generator)
    return x, torch.randint(0, CLASSES, (16,), generator=generator)


@pytest.mark.skipif(
    torch.__version__.startswith("2.8.") and platform.machine() == "aarch64",
    reason="torch 2.8 ends with a segmentation fault in bf16 gradients on this processor",
)
@pytest.mark.parametrize("settings", PURE_BF16_SETTINGS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_pure_bf16_copy_agrees_with_the_model(
    name: str, settings: Any, batch: tuple[Tensor, Tensor]
) -> None:
    net = seeded(MODELS[name])
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with checked(net, *batch) as (model, x, y):
        fast = FastCopy(net, settings, x[:2])
        _check_agreement(fast, _expected(model, x, y), x, y)
        found = fast(x).logits
    assert not torch.equal(found, found.bfloat16().float())  # the head computes in fp32
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


@pytest.mark.parametrize("name", ["vit", "encoder"])
def test_norms_and_residual_sums_are_narrow_and_the_pixels_are_not(
    name: str, batch: tuple[Tensor, Tensor]
) -> None:
    net = seeded(MODELS[name])
    fast = FastCopy(net, PURE_BF16_SETTINGS[0], batch[0][:2])
    with NormDtypes() as seen, torch.no_grad():
        fast(batch[0])
    assert seen.norms == seen.sums == {torch.bfloat16}
    assert all(buffer.dtype == torch.float32 for buffer in fast.net.buffers())
    assert fast.net.get_parameter("patches.weight").dtype == torch.bfloat16
    assert fast.net.get_parameter("head.weight").dtype == torch.float32


def test_only_models_with_such_parameters_are_tried_narrow() -> None:
    assert _settings(seeded(conv_net), on_gpu=True) == GPU_SETTINGS
    assert _settings(seeded(Transformer), on_gpu=True) == (*PURE_BF16_SETTINGS, *GPU_SETTINGS)
    assert not any(settings.pure_bf16 for settings in _settings(seeded(Transformer), on_gpu=False))
