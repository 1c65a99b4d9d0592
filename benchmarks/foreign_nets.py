"""Models of somebody else's code, in plain PyTorch: they share no class with demur.

model = build("resnet18", tiny=False)          # preact, branching, wideresnet, vit, cnn
fit(model, x, y, epochs=5, eps=8 / 255)        # a little robust, against FGSM
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu


class Normalised(nn.Module):
    """A net behind a normalisation, as RobustBench wraps its models."""

    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1))

    def forward(self, x: Tensor) -> Any:
        return self.net((x - self.mean) / self.std)


class Branching(Normalised):
    """The same with a branch that depends on the pixels: it cannot be captured or compiled."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x if bool((x <= 1).all()) else x / 255)


class PreActBlock(nn.Module):
    """Batch norm, ReLU, convolution, twice, plus a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        if stride != 1 or inner != outer:
            self.shortcut = nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Any:
        out = relu(self.bn1(x))
        skip = self.shortcut(out) if hasattr(self, "shortcut") else x
        out = self.conv1(out)
        out = self.conv2(relu(self.bn2(out)))
        return out + skip


class PreActResNet(nn.Module):
    """Pre-activation ResNet-18, or for three stages WRN-16-4 (Zagoruyko and Komodakis 2016)."""

    def __init__(self, stem: int, widths: tuple[int, ...], depth: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, stem, 3, 1, 1, bias=False)
        blocks, inner = [], stem
        for stage, width in enumerate(widths):
            for number in range(depth):
                blocks.append(PreActBlock(inner, width, 2 if stage and not number else 1))
                inner = width
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(inner)
        self.fc = nn.Linear(inner, 10)

    def forward(self, x: Tensor) -> Any:
        out = relu(self.bn(self.blocks(self.conv(x))))
        out = nn.functional.adaptive_avg_pool2d(out, 1)
        return self.fc(out.view(out.size(0), -1))


class PostActBlock(nn.Module):
    """Convolution, batch norm, ReLU, twice, with the shortcut before the last ReLU."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.shortcut: nn.Module = nn.Sequential()
        if stride != 1 or inner != outer:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Any:
        out = relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return relu(out)


class PostActResNet18(nn.Module):
    """The ResNet-18 of most CIFAR-10 code: post-activation, stem of 3x3."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        layers, inner = [], width
        for stage in range(4):
            for number in range(2):
                layers.append(PostActBlock(inner, width << stage, 2 if stage and not number else 1))
                inner = width << stage
        self.layers = nn.Sequential(*layers)
        self.linear = nn.Linear(inner, 10)

    def forward(self, x: Tensor) -> Any:
        out = self.layers(relu(self.bn1(self.conv1(x))))
        return self.linear(out.mean((2, 3)))


class Attention(nn.Module):
    """Self-attention with one projection for queries, keys and values."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Any:
        n, tokens, dim = x.shape
        parts = self.qkv(x).reshape(n, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(*parts)
        return self.proj(out.transpose(1, 2).reshape(n, tokens, dim))


class SmallCNN(nn.Module):
    """Three convolutions, of which two have stride 2, each with batch norm; 34,000 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU(),
        )  # fmt: skip
        self.fc = nn.Linear(64 * 16, 10)

    def forward(self, x: Tensor) -> Any:
        return self.fc(nn.functional.avg_pool2d(self.features(x), 2).flatten(1))


class VisionTransformer(nn.Module):
    """A small ViT in the style of timm: patches of 4x4 pixels."""

    def __init__(self, dim: int = 256, depth: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, 4)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 64, dim))
        self.blocks = nn.ModuleList(
            nn.ModuleList([
                nn.LayerNorm(dim), Attention(dim, heads), nn.LayerNorm(dim),
                nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)),
            ])
            for _ in range(depth)
        )  # fmt: skip
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)

    def forward(self, x: Tensor) -> Any:
        x = self.patch_embed(x).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            norm1, attention, norm2, mlp = block.children()
            x = x + attention(norm1(x))
            x = x + mlp(norm2(x))
        return self.head(self.norm(x).mean(1))


def build(name: str, tiny: bool) -> nn.Module:
    """Return a model with random weights."""
    torch.manual_seed(0)
    nets: dict[str, Callable[[], nn.Module]] = {
        "resnet18": lambda: PostActResNet18(8 if tiny else 64),
        "preact": lambda: PreActResNet(64, (64, 128, 256, 512), 2),
        "branching": lambda: PreActResNet(64, (64, 128, 256, 512), 2),
        "wideresnet": lambda: PreActResNet(16, (16, 32, 64) if tiny else (64, 128, 256), 2),
        "cnn": SmallCNN,
        "vit": lambda: VisionTransformer(*((32, 2, 2) if tiny else ())),
    }
    kind = Branching if name == "branching" else Normalised
    return kind(nets[name](), (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616))


def load_demur_weights(model: nn.Module, file: Path) -> None:
    """Load a demur ResNet-18 (fp16 safetensors) into the model "preact" or "branching"."""
    stored, renamed = load_file(file), {}
    for key, value in stored.items():
        name = key.removeprefix("trunk.")
        if name.startswith("stages."):
            _, stage, number, *rest = name.split(".")
            name = f"net.blocks.{2 * int(stage) + int(number)}." + ".".join(rest)
            name = name.replace("norm", "bn")
        elif name.startswith("normalise."):
            name = name.removeprefix("normalise.")
        elif name.startswith("aux."):
            continue
        else:
            name = f"net.{name}".replace("stem", "conv").replace("norm", "bn")
            name = name.replace("classify", "fc")
        shaped = value.view(1, 3, 1, 1) if name in ("mean", "std") else value
        renamed[name] = shaped.float() if value.is_floating_point() else value
    model.load_state_dict(renamed)


def fit(model: nn.Module, x: Tensor, y: Tensor, epochs: int, eps: float, batch: int = 256) -> None:
    """Train against FGSM with random starts (Wong et al. 2020), for nets to be a little robust."""
    model.train()
    optimiser: torch.optim.Optimizer
    if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        optimiser, rate = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=5e-4), 0.1
    else:
        optimiser, rate = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.05), 1e-3
    steps = epochs * (len(x) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, max(steps, 1))
    for _ in range(epochs):
        for rows in torch.randperm(len(x), device=x.device)[: len(x) // batch * batch].split(batch):
            part, label = x[rows], y[rows]
            delta = torch.empty_like(part).uniform_(-eps, eps).requires_grad_()
            with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
                loss = cross_entropy(model((part + delta).clamp(0, 1)), label)
            (grad,) = torch.autograd.grad(loss, delta)
            delta = (delta + 1.25 * eps * grad.sign()).detach().clamp(-eps, eps)
            with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
                loss = cross_entropy(model((part + delta).clamp(0, 1)), label)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    model.eval()
