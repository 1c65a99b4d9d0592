"""Accuracy of the net that a learner would save, under an attack, by the engine that trains."""

import torch
from torch import nn

from demur.attacks import Attack
from demur.data import Images
from demur.engine.frozen import FrozenModel
from demur.engine.train_state import TrainState
from demur.methods import crafting
from demur.output import prediction
from demur.precision import tf32, use_precision

BATCH = 250


class Validator:
    """judge.accuracy(attack, images) in eval mode, shared out between processes."""

    def __init__(self, train_state: TrainState, engine: str) -> None:
        self.train_state = train_state
        quick = engine == "fast" and next(train_state.judged.parameters()).is_cuda
        self.frozen_model = (
            FrozenModel(train_state.judged, train_state.precision, fixed=BATCH) if quick else None
        )

    def accuracy(self, attack: Attack, images: Images) -> float:
        """The share of images answered rightly under an attack."""
        net, world = self.train_state.judged, self.train_state.world
        model: nn.Module = net
        if self.frozen_model is not None:
            self.frozen_model.refresh()
            model = self.frozen_model.eval()
        right = torch.zeros((), dtype=torch.int64, device=images.y.device)
        with crafting(net, "eval"):
            for chosen in list(images.slices(BATCH))[world.rank :: world.size]:
                x, y = images.batch(chosen)
                x = x.to(self.train_state.dtype)
                with use_precision(self.train_state.precision, x.device):
                    x_adv = attack.perturb(model, x, y, images.index[chosen])
                with torch.no_grad(), tf32("fp32"):
                    right += (prediction(net(x_adv)) == y).sum()
        world.all_reduce([right])
        return int(right) / len(images)
