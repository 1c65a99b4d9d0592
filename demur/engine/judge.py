"""Accuracy of the net that a learner would save, under an attack, by the engine that trains."""

import torch
from torch import nn

from demur.attacks import Attack
from demur.data import Images
from demur.engine.crafter import Crafter
from demur.engine.learner import Learner
from demur.methods import crafting
from demur.output import prediction
from demur.precision import arithmetic, rounded

BATCH = 250


class Judge:
    """judge.accuracy(attack, images) in eval mode, shared out between processes."""

    def __init__(self, learner: Learner, engine: str) -> None:
        self.learner = learner
        quick = engine == "fast" and next(learner.judged.parameters()).is_cuda
        self.crafter = Crafter(learner.judged, learner.precision, fixed=BATCH) if quick else None

    def accuracy(self, attack: Attack, images: Images) -> float:
        """The share of images answered rightly under an attack."""
        net, world = self.learner.judged, self.learner.world
        model: nn.Module = net
        if self.crafter is not None:
            self.crafter.refresh()
            model = self.crafter.eval()
        right = torch.zeros((), dtype=torch.int64, device=images.y.device)
        with crafting(net, "eval"):
            for chosen in list(images.slices(BATCH))[world.rank :: world.size]:
                x, y = images.batch(chosen)
                x = x.to(self.learner.dtype)
                with arithmetic(self.learner.precision, x.device):
                    x_adv = attack.perturbed(model, x, y, images.index[chosen])
                with torch.no_grad(), rounded("fp32"):
                    right += (prediction(net(x_adv)) == y).sum()
        world.add_up([right])
        return int(right) / len(images)
