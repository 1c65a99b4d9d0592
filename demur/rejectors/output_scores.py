"""Scores that are read off the net's output and need no fitting, and combinations of scores."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from demur.errors import BadInput
from demur.metrics import threshold_at_tpr
from demur.output import (
    ABSTAIN,
    ACCEPT,
    SCORE,
    AuxColumn,
    Output,
    as_output,
    label_entry,
    log_probabilities,
    mask_label,
    prediction,
)
from demur.rejectors.certainty import (
    certainty,
    con,
    energy,
    log_certainty,
    log_con,
    log_rcon,
    rcon,
    rectifier_logit,
)
from demur.rejectors.rule import FeatureRejector, Rejector, Rule, Score, TooFewImages, as_score
from demur.spec import show
from demur.spec.field_types import Positive, UnitInterval

MIN_THRESHOLD = 1e-300  # smallest threshold of which a logit is taken


@dataclass(frozen=True)
class OutputScore(Score, Rejector, ABC):
    """A rejector that is its own score: `fit` returns it unchanged."""

    def fit(self, out: Output, y: Tensor) -> Self:
        return self


@dataclass(frozen=True)
class LogitScore(OutputScore, ABC):
    """A score of the logits; `tau` is the softmax temperature."""

    tau: Positive = 1.0


@dataclass(frozen=True)
class SigmoidScore(OutputScore, ABC):
    """A score in (0, 1) that is the sigmoid of a logit."""

    @abstractmethod
    def logit(self, out: Output) -> Tensor:
        """Logit of the score, N."""

    def __call__(self, out: Output) -> Tensor:
        return self.logit(out).sigmoid()

    def log_score(self, out: Output) -> Tensor:
        return logsigmoid(self.logit(out))

    def accept_margin(self, out: Output, t: float, label: Tensor) -> Tensor:
        return self.logit(out) - _logit(t)


@dataclass(frozen=True)
class Con(LogitScore):
    """Confidence: the largest class probability, con = max_l p_l.

    Example:
        >>> import torch
        >>> from demur import Con, Output
        >>> Con()(Output(torch.tensor([[2.0, 0.0]]), torch.zeros(1, 0), torch.zeros(1, 0)))
        tensor([0.8808])
    """

    def __call__(self, out: Output) -> Tensor:
        return con(out, self.tau)

    def log_score(self, out: Output) -> Tensor:
        return log_con(out, self.tau)

    def accept_margin(self, out: Output, t: float, label: Tensor) -> Tensor:
        log_p, log_not_p = _log_p_and_rest(out, self.tau, label)
        return log_p - log_not_p - _logit(t)


@dataclass(frozen=True)
class RCon(LogitScore):
    """Rectified confidence, R-Con = con * A (Eq. 6): an estimate of the true confidence T-Con.

    A is the sigmoid of the first auxiliary output; a net without one raises BadInput.

    Example:
        >>> import torch
        >>> from demur import Output, RCon
        >>> RCon()(Output(torch.tensor([[2.0, 0.0]]), torch.zeros(1, 0), torch.zeros(1, 1)))
        tensor([0.4404])
    """

    column: ClassVar[AuxColumn] = ACCEPT

    def __call__(self, out: Output) -> Tensor:
        return rcon(out, self.tau)

    def log_score(self, out: Output) -> Tensor:
        return log_rcon(out, self.tau)

    def accept_margin(self, out: Output, t: float, label: Tensor) -> Tensor:
        log_p, log_not_p = _log_p_and_rest(out, self.tau, label)
        a = rectifier_logit(out)
        # 1 - p A = (1 - p) + p (1 - A), a sum of positive terms
        log_not_pa = torch.logaddexp(log_not_p, log_p + logsigmoid(-a))
        return log_p + logsigmoid(a) - log_not_pa - _logit(t)


@dataclass(frozen=True)
class Rectifier(SigmoidScore):
    """A alone, the sigmoid of the accept logit."""

    column: ClassVar[AuxColumn] = ACCEPT

    def logit(self, out: Output) -> Tensor:
        return rectifier_logit(out)


@dataclass(frozen=True)
class AcceptProbability(SigmoidScore):
    """One minus the probability of abstaining, whose logit is an auxiliary output (CARL)."""

    column: ClassVar[AuxColumn] = ABSTAIN

    def logit(self, out: Output) -> Tensor:
        return energy(out) - ABSTAIN.of(out)


@dataclass(frozen=True)
class ModelScore(OutputScore):
    """A score that the model computes itself: its last auxiliary output.

    A model without an auxiliary output raises BadInput.

    Example:
        >>> import torch
        >>> from demur import ModelScore, Output
        >>> ModelScore()(Output(torch.zeros(1, 2), torch.zeros(1, 0), torch.tensor([[0.7]])))
        tensor([0.7000])
    """

    column: ClassVar[AuxColumn] = SCORE

    def __call__(self, out: Output) -> Tensor:
        out = as_output(out)
        if out.aux.shape[-1] == 0:
            raise BadInput("the model returns no score; wrap it as ModelWithScore(model, ...)")
        return out.aux[:, SCORE.at]


@dataclass(frozen=True)
class ConMinusRectifier(LogitScore):
    """con - A: the construction of R-Con in the paper's footnote."""

    column: ClassVar[AuxColumn] = ACCEPT

    def __call__(self, out: Output) -> Tensor:
        return certainty(out, "difference", self.tau)

    def log_score(self, out: Output) -> Tensor:
        return log_certainty(out, "difference", self.tau)[0]

    def accept_margin(self, out: Output, t: float, label: Tensor) -> Tensor:
        log_p, _ = _log_p_and_rest(out, self.tau, label)
        return log_p.exp() - rectifier_logit(out).sigmoid() - t


@dataclass(frozen=True)
class SoftmaxMargin(LogitScore):
    """The largest class probability minus the second largest, p_(1) - p_(2).

    Example:
        >>> import torch
        >>> from demur import Output, SoftmaxMargin
        >>> out = Output(torch.tensor([[2.0, 0.0]]), torch.zeros(1, 0), torch.zeros(1, 0))
        >>> SoftmaxMargin()(out)
        tensor([0.7616])
    """

    display_name: ClassVar[str] = "Margin"

    def __call__(self, out: Output) -> Tensor:
        first, second = log_probabilities(out, self.tau).exp().topk(2, dim=-1).values.unbind(-1)
        return first - second

    def accept_margin(self, out: Output, t: float, label: Tensor) -> Tensor:
        p = log_probabilities(out, self.tau).exp()
        return label_entry(p, label) - mask_label(p, label).amax(-1) - t


@dataclass(frozen=True)
class Entropy(LogitScore):
    """Minus the entropy of the class probabilities, sum_l p_l log p_l.

    Example:
        >>> import torch
        >>> from demur import Entropy, Output
        >>> Entropy()(Output(torch.zeros(1, 2), torch.zeros(1, 0), torch.zeros(1, 0)))
        tensor([-0.6931])
    """

    def __call__(self, out: Output) -> Tensor:
        logs = log_probabilities(out, self.tau)
        return (logs.exp() * logs).sum(-1)


@dataclass(frozen=True)
class MaxLogit(LogitScore):
    """The largest logit divided by the temperature, max_l z_l / tau.

    Example:
        >>> import torch
        >>> from demur import MaxLogit, Output
        >>> MaxLogit()(Output(torch.tensor([[2.0, 0.0]]), torch.zeros(1, 0), torch.zeros(1, 0)))
        tensor([2.])
    """

    def __call__(self, out: Output) -> Tensor:
        return as_output(out).logits.amax(-1) / self.tau

    def accept_margin(self, out: Output, t: float, label: Tensor) -> Tensor:
        return label_entry(out.logits, label) / self.tau - t


@dataclass(frozen=True)
class Energy(LogitScore):
    """Negative free energy, tau * logsumexp(z / tau) (Liu et al. 2020).

    Example:
        >>> import torch
        >>> from demur import Energy, Output
        >>> Energy()(Output(torch.tensor([[2.0, 0.0]]), torch.zeros(1, 0), torch.zeros(1, 0)))
        tensor([2.1269])
    """

    def __call__(self, out: Output) -> Tensor:
        return energy(out, self.tau)


@dataclass(frozen=True)
class Coupled(Score, Rejector):
    """`score` where `gate` reaches its threshold, and -inf elsewhere.

        value = score(out) if gate(out) >= gate_threshold else -inf

    The paper's coupled rejection (Theorem 1): where A is xi-accurate and con > 1 / (2 - xi), the
    rule `Coupled(gate_threshold=1 / (2 - xi)).rule(0.5)` accepts every correct prediction and
    rejects every wrong one.

    Args:
        gate: The first score; the paper couples with the confidence.
        gate_threshold: Threshold of the gate; 1/2 is the smallest that Lemma 1 allows.
        score: The second score, which orders the images that pass the gate.

    Example:
        >>> from demur import Con, Coupled, RCon
        >>> rule = Coupled(Con(), gate_threshold=0.6, score=RCon()).rule(0.5)
    """

    gate: Rejector | Score = Con()
    gate_threshold: float = 1 / 2
    score: Rejector | Score = RCon()

    def fit(self, out: Output, y: Tensor) -> Self:
        gate, score = (
            part.fit(out, y) if isinstance(part, Rejector) else part
            for part in (self.gate, self.score)
        )
        return replace(self, gate=gate, score=score)

    def __call__(self, out: Output) -> Tensor:
        passes_gate = as_score(self.gate)(out) >= self.gate_threshold
        return as_score(self.score)(out).masked_fill(~passes_gate, -torch.inf)

    def log_score(self, out: Output) -> Tensor:
        # the shortfall at the gate keeps a gradient where the score itself is -inf
        shortfall = (self.gate_threshold - as_score(self.gate)(out)).clamp_min(0)
        return as_score(self.score).log_score(out) - shortfall

    @classmethod
    def baselines(cls, data: object) -> dict[str, Rejector]:
        return {}  # R-Con needs a head, which names the pair

    def rule(self, t: float) -> Rule:
        return Rule(((as_score(self.gate), self.gate_threshold), (as_score(self.score), t)))


def _log_p_and_rest(out: Output, tau: float, label: Tensor) -> tuple[Tensor, Tensor]:
    """log p_label and log(1 - p_label), N each."""
    logs = log_probabilities(out, tau)
    return label_entry(logs, label), mask_label(logs, label).logsumexp(-1)


def _logit(t: float) -> float:
    """Logit of a threshold, finite also for t <= 0 and t >= 1."""
    # 1 - 2^-25 is the smallest number that rounds to 1 in fp32
    t = max(t, MIN_THRESHOLD) if t < 1 else 1 - 2**-25
    return math.log(t) - math.log1p(-t)


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
