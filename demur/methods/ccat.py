"""Confidence-calibrated adversarial training (Stutz et al. 2020).

    CCAT()                                                          # as its authors have it
    CCAT(rho=1, form="reference", attack=REFERENCE, bn="train")     # as the paper's code has it

The farther an image was moved, the closer the answer to learn comes to "any class". So attacks are
met with little confidence, and beyond the radius, it is hoped, that goes on.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from demur.attacks import CE, PGD, WrongConfidence
from demur.balls import Linf
from demur.field_types import Positive
from demur.methods.batch_norm_mode import BatchNorm, check_keeps_batch, crafting
from demur.methods.frameworks import Framework
from demur.methods.outputs import BatchOutputs, LabelledOutput
from demur.noise import Stream
from demur.output import Output, log_probabilities

# the authors raise the best wrong probability itself: the same signs and the same order
# paper: 8/255 as for every other frame; the authors train with 0.03
OFFICIAL = PGD(
    Linf(8 / 255), steps=40, step_size=0.005, start="mixed", objective=WrongConfidence(), momentum=0.9,
    backtrack=1.5,
)  # fmt: skip
# reference code: steps are taken by the wrong class and taken back by the true one
REFERENCE = PGD(
    Linf(8 / 255), steps=20, step_size=1 / 255, start="coin", objective=WrongConfidence(), momentum=0.9,
    backtrack=1.5, backtrack_objective=CE(),
)  # fmt: skip


@dataclass(frozen=True)
class CCAT(Framework):
    """Attacked images are to be answered the less surely, the farther they were moved.

    official: half of a batch is attacked, the other half is not, and the net looks at both at
    once. reference: the net looks at the whole batch as it is, then at the whole batch attacked.
    `rho` is how fast the target falls from the label to all classes alike.
    """

    rho: Positive = 10.0
    form: Literal["official", "reference"] = "official"
    attack: PGD = OFFICIAL
    bn: BatchNorm = "eval"  # while images are crafted; reference code: train

    def __post_init__(self) -> None:
        super().__post_init__()
        check_keeps_batch(self.attack, self.bn)

    def craft(self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: Stream) -> Tensor:
        """Images among which those of the second half, or all, are attacked."""
        first = len(x) // 2 if self.form == "official" else 0
        with crafting(net, self.bn):
            part = x[first:], y[first:], index[first:]
            return torch.cat([x[:first], self.attack.perturb(net, *part, stream)])

    def outputs(
        self, net: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, clean: bool
    ) -> BatchOutputs:
        """One look at both halves together, or one at the clean batch and one at the attacked."""
        if self.form == "official":
            return _halves(net, x, x_adv, y)
        # reference code: the clean look comes first, before the attack
        clean_outputs = LabelledOutput(x, y, net(x))
        return BatchOutputs(LabelledOutput(x_adv, y, net(x_adv)), clean_outputs, before=x)

    def classification_loss(self, outputs: BatchOutputs) -> Tensor:
        """The mean over it is the loss: of all images of both halves, or of each both ways."""
        clean, attacked = outputs.clean_outputs(), outputs.attacked
        target = self.target(outputs)
        as_they_are = CE()(clean.out, clean.y)
        under_attack: Tensor = -(target * log_probabilities(attacked.out)).sum(-1)
        if self.form == "official":
            return torch.cat([as_they_are, under_attack])
        # reference code: a divergence, less by what no weight can change
        fixed: Tensor = torch.special.entr(target).sum(-1)
        return as_they_are + under_attack - fixed

    def target(self, outputs: BatchOutputs) -> Tensor:
        """What attacked images are to be answered with: probabilities, N, C."""
        assert outputs.before is not None
        gamma = self.transition((outputs.attacked.x - outputs.before).detach())[:, None]
        classes = outputs.attacked.out.logits.shape[-1]
        return (1 - gamma) * one_hot(outputs.attacked.y, classes) + gamma / classes

    def transition(self, delta: Tensor) -> Tensor:
        """How far each target is from the label: 0 for an unmoved image, 1 at the radius."""
        ball = self.attack.ball
        moved = (ball.size(delta) / max(ball.eps, 1e-12)).clamp(max=1)
        return 1 - (1 - moved) ** self.rho

    @property
    def one_loss_per_image(self) -> bool:
        """No: clean images have a loss of their own."""
        return False


def _halves(net: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> BatchOutputs:
    """One look at the first half of the images and the attacked second half.

    In an odd batch the middle image is in both, so both weigh the same and none is ever empty.
    """
    first, half = len(x) // 2, (len(x) + 1) // 2
    clean, attacked = x[:half], x_adv[first:]
    out: Output = net(torch.cat([clean, attacked]))
    return BatchOutputs(
        LabelledOutput(attacked, y[first:], Output(*(part[half:] for part in out))),
        LabelledOutput(clean, y[:half], Output(*(part[:half] for part in out))),
        before=x[first:],
    )
