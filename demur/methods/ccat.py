"""Confidence-calibrated adversarial training (Stutz et al. 2020).

    CCAT()                                                          # the authors
    CCAT(rho=1, form="reference", attack=REFERENCE, bn="train")     # the paper's code

The target of an adversarial example moves from the one-hot label to the uniform distribution as the
perturbation grows. The net then has low confidence under attack, also beyond the training radius.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from demur.attacks import CE, PGD, WrongConfidence
from demur.balls import Linf
from demur.field_types import Positive
from demur.methods.batch_norm_mode import BatchNorm, attack_mode, check_keeps_batch
from demur.methods.frameworks import BatchOutputs, Framework, LabelledOutput
from demur.noise import Stream
from demur.output import Output, log_probabilities

# the authors maximise the largest wrong probability; its log has the same gradient signs and order
# paper: 8/255 as for every other framework; the authors train with 0.03
OFFICIAL = PGD(
    Linf(8 / 255), steps=40, step_size=0.005, start="mixed", objective=WrongConfidence(),
    momentum=0.9, backtrack=1.5,
)  # fmt: skip
# reference code: steps follow the wrong class, backtracking compares the true one
REFERENCE = PGD(
    Linf(8 / 255), steps=20, step_size=1 / 255, start="coin", objective=WrongConfidence(),
    momentum=0.9, backtrack=1.5, backtrack_objective=CE(),
)  # fmt: skip


@dataclass(frozen=True)
class CCAT(Framework):
    """CCAT: the target of an attacked image is the closer to uniform the larger its perturbation.

        gamma = 1 - (1 - min(1, ||delta|| / eps))^rho
        target = (1 - gamma) * one_hot(y) + gamma / C
        loss = CE(f(x), y) and CE(f(x_adv), target)

    Args:
        rho: How fast the target moves from the label to the uniform distribution.
        form: "official" attacks the second half of a batch and classifies both halves in one
            forward pass. "reference" classifies the whole clean batch, then the whole attacked
            one, and adds both losses of each image.
        attack: The attack on training images; its ball gives the norm and eps.
        bn: Batch-norm mode during the attack, as in PGDAT.

    Example:
        >>> from demur import CCAT, RR, Method
        >>> method = Method(CCAT(rho=10.0), RR())
    """

    rho: Positive = 10.0
    form: Literal["official", "reference"] = "official"
    attack: PGD = OFFICIAL
    bn: BatchNorm = "eval"  # reference code: train

    def __post_init__(self) -> None:
        super().__post_init__()
        check_keeps_batch(self.attack, self.bn)

    def craft(self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: Stream) -> Tensor:
        start = len(x) // 2 if self.form == "official" else 0
        with attack_mode(net, self.bn):
            attacked = self.attack.perturb(net, x[start:], y[start:], index[start:], stream)
            return torch.cat([x[:start], attacked])

    def outputs(
        self, net: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, clean: bool
    ) -> BatchOutputs:
        if self.form == "official":
            return _outputs_of_halves(net, x, x_adv, y)
        # reference code: the clean forward pass comes first
        clean_outputs = LabelledOutput(x, y, net(x))
        return BatchOutputs(LabelledOutput(x_adv, y, net(x_adv)), clean_outputs, unperturbed=x)

    def classification_loss(self, outputs: BatchOutputs) -> Tensor:
        """Losses whose mean is the loss: one per clean and per attacked image, or their sums."""
        clean, attacked = outputs.clean_outputs(), outputs.attacked
        target = self.target(outputs)
        clean_loss = CE()(clean.out, clean.y)
        attacked_loss: Tensor = -(target * log_probabilities(attacked.out)).sum(-1)
        if self.form == "official":
            return torch.cat([clean_loss, attacked_loss])
        # reference code: a KL divergence, smaller by the target's entropy, which has no gradient
        entropy: Tensor = torch.special.entr(target).sum(-1)
        return clean_loss + attacked_loss - entropy

    def target(self, outputs: BatchOutputs) -> Tensor:
        """Target probabilities of the attacked images, N, C."""
        assert outputs.unperturbed is not None
        gamma = self.transition((outputs.attacked.x - outputs.unperturbed).detach())[:, None]
        classes = outputs.attacked.out.logits.shape[-1]
        return (1 - gamma) * one_hot(outputs.attacked.y, classes) + gamma / classes

    def transition(self, delta: Tensor) -> Tensor:
        """gamma of each perturbation, N: 0 for none, 1 from the radius on."""
        ball = self.attack.ball
        relative_size = (ball.norm(delta) / max(ball.eps, 1e-12)).clamp(max=1)
        return 1 - (1 - relative_size) ** self.rho

    @property
    def aims_at_robust_accuracy(self) -> bool:
        return False  # it aims at a low confidence under attack

    def without_stats_updates(self) -> "CCAT":
        return replace(self, bn="batch") if self.bn == "train" else self

    @property
    def one_loss_per_image(self) -> bool:
        return False  # clean images have losses too


def _outputs_of_halves(net: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> BatchOutputs:
    """One forward pass of the clean first half and the attacked second half of a batch.

    The middle image of an odd batch is in both halves, so they weigh the same and none is empty.
    """
    start, half = len(x) // 2, (len(x) + 1) // 2
    clean, attacked = x[:half], x_adv[start:]
    out: Output = net(torch.cat([clean, attacked]))
    return BatchOutputs(
        LabelledOutput(attacked, y[start:], Output(*(part[half:] for part in out))),
        LabelledOutput(clean, y[:half], Output(*(part[:half] for part in out))),
        unperturbed=x[start:],
    )
