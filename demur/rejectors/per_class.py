"""One threshold for each predicted class."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from demur.errors import BadInput
from demur.metrics import threshold_at_tpr
from demur.output import Output, prediction
from demur.rejectors.output_scores import Con, OutputScore
from demur.rejectors.rule import FeatureRejector, Rejector, TooFewImages
from demur.spec import show
from demur.spec.field_types import UnitInterval

MIN_IMAGES = 20  # correct ones of a class


@dataclass(frozen=True)
class PerClass(FeatureRejector):
    """A score minus a threshold of its own for each predicted class.

        value = score(out) - t_k    for the prediction k

    t_k accepts the share `tpr` of the correct fit images of class k. One threshold near 0 then
    rejects all classes alike, also one whose scores are low. It is chosen as for any score, and
    its guarantee is about all classes together.

    Args:
        score: A score that needs no fitting.
        tpr: The share of the correct predictions of each class that scores at least t_k.

    Example:
        >>> import torch
        >>> from demur import Output, PerClass
        >>> z = 4 * torch.eye(2).repeat(50, 1)
        >>> out = Output(z, z[:, :0], z[:, :0])
        >>> PerClass().fit(out, z.argmax(1))(out).amax()
        tensor(0.)
    """

    arrays = ("thresholds",)  # C
    reads_features: ClassVar[bool] = False
    score: Rejector = Con()
    tpr: UnitInterval = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.score, OutputScore):
            raise BadInput(f"PerClass takes a score that needs no fitting, not {show(self.score)}")

    @classmethod
    def baselines(cls, data: object) -> dict[str, Rejector]:
        return {}  # a choice of the user

    def fit_arrays(self, out: Output, y: Tensor) -> tuple[Tensor, ...]:
        found = self.score.fit(out, y)(out)
        values, right = found.double().cpu().numpy(), (prediction(out) == y).cpu().numpy()
        thresholds = []
        for label in range(out.logits.shape[1]):
            correct = right & (y == label).cpu().numpy()
            if correct.sum() < MIN_IMAGES:
                raise TooFewImages(
                    f"PerClass needs {MIN_IMAGES} correct fit images of each class; class {label} "
                    f"has {correct.sum()}"
                )
            thresholds.append(threshold_at_tpr(values, correct, self.tpr))
        return (found.new_tensor(thresholds),)

    def score_features(self, out: Output, *arrays: Tensor) -> Tensor:
        assert isinstance(self.score, OutputScore)
        return self.score(out) - arrays[0].to(out.logits.device)[prediction(out)]
