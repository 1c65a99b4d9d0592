"""A two-layer net on digits, whose gradient takes a twentieth of the time of a ResNet-8's.

The fixture `quick_net` is one; tests of what an attack does with any net use it.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from demur.data import Digits
from demur.nets.net import LogitsOnly
from demur.output import Output

EPS = 0.1


class QuickNet(nn.Module):
    """Logits and an auxiliary logit from one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.classify, self.aux = (
            nn.Linear(64, 48),
            nn.Linear(48, 10),
            nn.Linear(48, 1),
        )

    def forward(self, x: Tensor) -> Output:
        feature = relu(self.hidden(x.flatten(1)))
        return Output(self.classify(feature), feature, self.aux(feature))

    def classifier(self) -> nn.Module:
        return LogitsOnly(self)


def trained_quick_net() -> QuickNet:
    """Return the net after 300 steps of FGSM training, somewhat robust at EPS."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        net = QuickNet()
    x, y = Digits().load()["fit"].batch(slice(None))
    optimiser = torch.optim.Adam([*net.hidden.parameters(), *net.classify.parameters()], 0.01)
    for step in range(300):
        rows = torch.arange(128 * step, 128 * (step + 1)) % len(x)
        images = x[rows].requires_grad_()
        (grad,) = torch.autograd.grad(cross_entropy(net(images).logits, y[rows]), images)
        adversarial = (images + EPS * grad.sign()).clamp(0, 1).detach()
        optimiser.zero_grad()
        cross_entropy(net(adversarial).logits, y[rows]).backward()
        optimiser.step()
    optimiser.zero_grad()
    return net.eval()
