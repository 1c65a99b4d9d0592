"""Validation during training: accuracy under an attack, computed by the engine that trains.

The fast engine attacks a FrozenModel in the precision of the training. Predictions for the
adversarial examples always come from the net itself in fp32, whichever engine made them.
"""

import torch
from torch import nn

from demur.attacks import Attack
from demur.data import Images
from demur.engine import FrozenModel
from demur.methods import attack_mode
from demur.output import prediction
from demur.precision import tf32, use_precision
from demur.training.state import TrainState

BATCH = 250


class Validator:
    """Accuracy of the net that a TrainState would save, in eval mode."""

    def __init__(self, train_state: TrainState, engine: str) -> None:
        self.train_state = train_state
        net = train_state.eval_net
        fast = engine == "fast" and next(net.parameters()).is_cuda
        self.frozen_model = FrozenModel(net, train_state.precision, fixed=BATCH) if fast else None

    def accuracy(self, attack: Attack, images: Images) -> float:
        """Return the fraction of images that are classified correctly under the attack.

        The batches are divided between the processes.
        """
        net, world = self.train_state.eval_net, self.train_state.world
        model: nn.Module = net
        if self.frozen_model is not None:
            self.frozen_model.refresh()
            model = self.frozen_model.eval()
        correct = torch.zeros((), dtype=torch.int64, device=images.y.device)
        with attack_mode(net, "eval"):
            for piece in list(images.slices(BATCH))[world.rank :: world.size]:
                x, y = images.batch(piece)
                x = x.to(self.train_state.dtype)
                with use_precision(self.train_state.precision, x.device):
                    x_adv = attack.perturb(model, x, y, images.index[piece])
                with torch.no_grad(), tf32("fp32"):
                    correct += (prediction(net(x_adv)) == y).sum()
        world.all_reduce([correct])
        return int(correct) / len(images)
