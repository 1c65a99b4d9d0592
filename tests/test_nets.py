"""Contracts of every net."""

import pytest
import torch
from torch import Tensor

from demur.data import Digits
from demur.methods import RR, Plain
from demur.nets import NETS, NetSpec, Small
from demur.nets.conv import Conv3x3
from demur.output import Output

DOMAIN = Digits().domain


@pytest.mark.parametrize("kind", NETS)
class TestContract:
    def test_returns_an_output_of_the_right_shapes(
        self, kind: type[NetSpec], batch: tuple[Tensor, Tensor]
    ) -> None:
        x, _ = batch
        for head, width in ((Plain(), 0), (RR(), 1)):
            net = kind().build(DOMAIN, head).eval()
            out = net(x)
            assert isinstance(out, Output)
            assert out.logits.shape == (len(x), DOMAIN.classes)
            assert out.feature.shape == (len(x), net.trunk.dims[-1])
            assert out.aux.shape == (len(x), width)
            assert torch.equal(net.classifier()(x), out.logits)

    def test_the_seed_decides_the_weights_and_the_global_generator_is_untouched(
        self, kind: type[NetSpec]
    ) -> None:
        before = torch.get_rng_state()
        nets = [kind().build(DOMAIN, RR(), seed).state_dict() for seed in (0, 0, 1)]
        assert torch.equal(before, torch.get_rng_state())
        assert all(torch.equal(nets[0][k], nets[1][k]) for k in nets[0])
        assert any(not torch.equal(nets[0][k], nets[2][k]) for k in nets[0])

    def test_normalisation_is_the_first_layer(self, kind: type[NetSpec]) -> None:
        net = kind().build(DOMAIN, Plain())
        mean = torch.full((1, *DOMAIN.shape), DOMAIN.mean[0])
        assert torch.allclose(net.normalise(mean), torch.zeros_like(mean), atol=1e-6)

    def test_an_image_is_answered_the_same_in_any_batch(
        self, kind: type[NetSpec], batch: tuple[Tensor, Tensor]
    ) -> None:
        net = kind().build(DOMAIN, RR()).eval()
        x, _ = batch
        assert torch.allclose(net(x).logits[3:4], net(x[3:4]).logits, atol=1e-5)


def test_small_is_a_resnet_8_of_width_16() -> None:
    net = Small().build(DOMAIN, Plain())
    layers = [m for m in net.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    main = [m for m in layers if not (isinstance(m, torch.nn.Conv2d) and m.kernel_size == (1, 1))]
    assert len(main) == 8
    assert sum(p.numel() for p in net.parameters()) == 77_562  # added up by hand, layer by layer
    assert net.trunk.dims == (16, 32, 64)


def test_the_rr_head_is_the_papers() -> None:
    plain, rr = (Small().build(DOMAIN, head) for head in (Plain(), RR()))
    extra = sum(p.numel() for p in rr.parameters()) - sum(p.numel() for p in plain.parameters())
    assert extra == (64 * 32 + 32) + 2 * 32 + (32 + 1)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("side", [2, 5, 8])
def test_conv3x3_is_the_ordinary_convolution_and_so_are_its_gradients(
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
