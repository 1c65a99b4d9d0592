"""Properties of every net, and of the convolutions that replace those of torch."""

import doctest

import pytest
import torch
from torch import Tensor

from demur.data import CIFAR10, Digits
from demur.errors import BadInput
from demur.methods import RR, NoHead
from demur.nets import NETS, FactoryNet, NetSpec, ResNet8, ResNet18, WideResNet, architectures
from demur.nets.net import Conv3x3, _PaddedChannels, conv1x1_matmul
from demur.output import Output

DOMAIN = Digits().domain
EXAMPLES = (ResNet8(), ResNet18(width=4), WideResNet(depth=10, widen=1))


def test_every_net_has_an_example() -> None:
    # a FactoryNet is tested in test_own_images_training.py
    assert (*(type(spec) for spec in EXAMPLES), FactoryNet) == NETS


def test_the_examples_in_docstrings_run() -> None:
    for module in (architectures,):
        failed, attempted = doctest.testmod(module)
        assert attempted and not failed


@pytest.mark.parametrize("spec", EXAMPLES, ids=lambda spec: type(spec).__name__)
class TestEveryNet:
    def test_returns_an_output_of_the_right_shapes(
        self, spec: NetSpec, batch: tuple[Tensor, Tensor]
    ) -> None:
        x, _ = batch
        for head, width in ((NoHead(), 0), (RR(), 1)):
            net = spec.build(DOMAIN, head).eval()
            out = net(x)
            assert isinstance(out, Output)
            assert out.logits.shape == (len(x), DOMAIN.classes)
            assert out.feature.shape == (len(x), net.trunk.dims[-1])
            assert out.aux.shape == (len(x), width)
            assert torch.equal(net.classifier()(x), out.logits)

    def test_the_seed_determines_the_weights_and_the_global_generator_does_not_change(
        self, spec: NetSpec
    ) -> None:
        before = torch.get_rng_state()
        nets = [spec.build(DOMAIN, RR(), seed).state_dict() for seed in (0, 0, 1)]
        assert torch.equal(before, torch.get_rng_state())
        assert all(torch.equal(nets[0][k], nets[1][k]) for k in nets[0])
        assert any(not torch.equal(nets[0][k], nets[2][k]) for k in nets[0])

    def test_normalisation_is_the_first_layer(self, spec: NetSpec) -> None:
        net = spec.build(DOMAIN, NoHead())
        mean = torch.full((1, *DOMAIN.shape), DOMAIN.mean[0])
        assert torch.allclose(net.normalise(mean), torch.zeros_like(mean), atol=1e-6)

    def test_logits_do_not_depend_on_the_other_images_of_the_batch(
        self, spec: NetSpec, batch: tuple[Tensor, Tensor]
    ) -> None:
        net = spec.build(DOMAIN, RR()).eval()
        x, _ = batch
        assert torch.allclose(net(x).logits[3:4], net(x[3:4]).logits, atol=1e-5)


def test_small_is_a_resnet_8_of_width_16() -> None:
    net = ResNet8().build(DOMAIN, NoHead())
    layers = [m for m in net.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    main = [m for m in layers if not (isinstance(m, torch.nn.Conv2d) and m.kernel_size == (1, 1))]
    assert len(main) == 8
    assert sum(p.numel() for p in net.parameters()) == 77_562  # summed by hand, layer by layer
    assert net.trunk.dims == (16, 32, 64)


@pytest.mark.parametrize(
    ("spec", "plain", "rectified", "dim"),
    [(ResNet18(), 11_172_170, 11_304_267, 512), (WideResNet(), 46_160_474, 46_366_555, 640)],
)
def test_the_nets_of_the_paper_have_its_numbers_of_weights(
    spec: NetSpec, plain: int, rectified: int, dim: int
) -> None:
    for head, expected in ((NoHead(), plain), (RR(), rectified)):
        with torch.device("meta"):  # numbers of weights need no weights
            net = spec.build(CIFAR10().domain, head)
        assert sum(p.numel() for p in net.parameters()) == expected
        assert net.trunk.dims[-1] == dim


def test_wide_resnets_are_initialised_as_in_the_reference_code() -> None:
    net = WideResNet(depth=10, widen=4).build(CIFAR10().domain, RR())
    convolution = net.trunk.get_submodule("stages.1.0.conv2")
    assert isinstance(convolution, Conv3x3)
    assert float(convolution.weight.detach().std()) == pytest.approx(
        (2 / (9 * 128)) ** 0.5, rel=0.02
    )
    linear = [m for m in net.modules() if isinstance(m, torch.nn.Linear)]
    assert all(not m.bias.any() for m in linear)
    with pytest.raises(BadInput, match="depth of 6n"):
        WideResNet(depth=30)


def test_a_resnet_18_has_the_activation_of_its_spec() -> None:
    domain, x = CIFAR10().domain, torch.rand(2, 3, 32, 32)
    smooth, usual = (
        spec.build(domain, NoHead()).eval()
        for spec in (ResNet18(4, activation="silu"), ResNet18(4))
    )
    smooth.load_state_dict(usual.state_dict())
    blocks = [block for block in smooth.modules() if isinstance(block, architectures.Block)]
    assert [block.activate for block in blocks] == 8 * [torch.nn.functional.silu]
    assert not torch.allclose(smooth(x).logits, usual(x).logits)


def test_heads_stay_in_fp32_under_autocast() -> None:
    net = ResNet8().build(DOMAIN, RR()).eval()
    x = torch.rand(4, *DOMAIN.shape)
    with torch.autocast("cpu", torch.bfloat16):
        out = net(x)
    assert {part.dtype for part in out} == {torch.float32}
    assert torch.allclose(out.logits, net(x).logits, atol=0.05)


def test_the_rr_head_has_the_layers_of_the_paper() -> None:
    plain, rr = (ResNet8().build(DOMAIN, head) for head in (NoHead(), RR()))
    extra = sum(p.numel() for p in rr.parameters()) - sum(p.numel() for p in plain.parameters())
    assert extra == (64 * 32 + 32) + 2 * 32 + (32 + 1)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("side", [2, 5, 6])
def test_conv3x3_has_the_output_and_gradients_of_the_ordinary_convolution(
    stride: int, side: int
) -> None:
    g = torch.Generator().manual_seed(0)
    layer = Conv3x3(3, 4, stride).double()
    x = torch.randn(2, 3, side, side, generator=g, dtype=torch.float64, requires_grad=True)
    ours, theirs = layer(x), torch.nn.functional.conv2d(x, layer.weight, stride=stride, padding=1)
    weighting = torch.randn(ours.shape, generator=g, dtype=torch.float64)
    assert torch.equal(ours, theirs)
    for one, other in zip(
        torch.autograd.grad((ours * weighting).sum(), (x, layer.weight)),
        torch.autograd.grad((theirs * weighting).sum(), (x, layer.weight)),
        strict=True,
    ):
        assert torch.allclose(one, other, atol=1e-12)
    assert torch.autograd.gradgradcheck(layer, (x,))


def test_padded_channels_and_conv1x1_matmul_equal_the_ordinary_convolutions() -> None:
    """The GPU versions, checked in fp64 on a CPU."""
    g = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True)

    x, weight, weight1x1 = random(2, 3, 6, 5), random(4, 3, 3, 3), random(4, 3, 1, 1)
    pairs = [
        (_PaddedChannels.apply(x, weight), weight, {"padding": 1}),  # type: ignore[no-untyped-call]
        (conv1x1_matmul(x, weight1x1, (2, 1)), weight1x1, {"stride": (2, 1)}),
    ]
    for ours, kernel, options in pairs:
        theirs = torch.nn.functional.conv2d(x, kernel, **options)  # type: ignore[arg-type]
        assert torch.allclose(ours, theirs, atol=1e-12)
        weighting = random(*ours.shape).detach()
        for one, other in zip(
            torch.autograd.grad((ours * weighting).sum(), (x, kernel)),
            torch.autograd.grad((theirs * weighting).sum(), (x, kernel)),
            strict=True,
        ):
            assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.parametrize(("size", "stride"), [((6, 4), 2), ((5, 4), 2), ((5, 3), 1)])
def test_conv3x3_with_a_frozen_weight_has_the_ordinary_gradient(
    size: tuple[int, int], stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = torch.Generator().manual_seed(1)
    layer = Conv3x3(3, 4, stride).double().requires_grad_(False)
    layer.frozen_weight = True
    plain = torch.nn.Conv2d(3, 4, 3, stride, padding=1, bias=False)
    for max_matrix in (0, 2**16):  # as a convolution, and as one matrix product
        monkeypatch.setattr("demur.nets.net.MAX_MATRIX", max_matrix)
        for _ in range(2):  # the matrix must change with the weight
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=g, dtype=torch.float64))
            plain.weight = layer.weight
            x = torch.randn(2, 3, *size, generator=g, dtype=torch.float64, requires_grad=True)
            ours, theirs = layer(x), plain(x)
            assert torch.allclose(ours, theirs, atol=1e-12)
            weighting = torch.randn(ours.shape, generator=g, dtype=torch.float64)
            one, other = (
                torch.autograd.grad((out * weighting).sum(), x)[0] for out in (ours, theirs)
            )
            assert torch.allclose(one, other, atol=1e-12)


def test_the_cached_matrix_of_a_frozen_weight_is_never_stale() -> None:
    layer, x = Conv3x3(3, 4).requires_grad_(False), torch.rand(2, 3, 2, 2)
    layer(x)
    assert layer._cache is None, "no matrix for a weight that may change"
    layer.frozen_weight = True
    with torch.inference_mode():
        layer(x)
    assert torch.autograd.grad(layer(x.requires_grad_()).sum(), x)[0].abs().sum() > 0
    assert list(layer.state_dict()) == ["weight"]
    assert layer(x[:0]).shape == (0, 4, 2, 2)
    before = layer(x)
    layer.weight.data.mul_(2)  # does not change the version counter
    assert torch.allclose(layer(x), 2 * before, atol=1e-6)
    assert layer(torch.rand(1, 3, 3, 3)).shape == (1, 4, 3, 3)
