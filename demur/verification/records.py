"""Checks of one record: against itself, the clean records, the data set and the weights.

Each check returns a problem, "" if there is none, or None if the record has nothing to check. It
raises BadInput if it cannot tell.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from demur.attacks import Clean
from demur.attacks.balls import L2, Linf
from demur.data import Images
from demur.errors import BadInput
from demur.evaluate.binding import resolve_thresholds
from demur.evaluate.record_scores import tcon_of, values
from demur.evaluate.recording import LoadedRun, RecordOptions, final_outputs
from demur.output import prediction
from demur.recipes import VOCABULARY
from demur.rejectors import Con, ImageRejector
from demur.rejectors.rule import Score
from demur.runs import Record
from demur.runs.record import TRUE, attack_of, identity, norm_problem
from demur.spec import digest, older_version, read, show

ROUNDING = 1e-4  # relative, of values that another device computes
EXACT = 1e-6  # of probabilities that come from one array
EXAMPLES = 32  # stored adversarial examples that are evaluated again
INPUTS = (
    "attack", "thresholds", "fitted", "weights", "data", "split", "source", "precision", "model",
    "user_code",
)  # fmt: skip
Check = Callable[..., str | None]


class StoredRun(LoadedRun):
    """A run whose clean records are read and never made: verifying writes nothing."""

    records: tuple[Record, ...] = ()

    def clean(self, split: str, *rejectors: ImageRejector) -> Record:
        """The clean record of a whole split; older runs do not say which one is whole."""
        known = {"split": split, "attack": digest(Clean())}
        if whole := self.run.checkpoint.get("data", {}).get(split):
            known["data"] = whole
        whole_records = (r for r in self.records if "first_of" not in r.metadata)
        found = [r for r in whole_records if known.items() <= r.metadata.items()]
        if not found:
            raise BadInput(f"there is no clean {split} record")
        return max(found, key=lambda r: (len(r.y), bool(r.metadata["features"])))


def _identity(record: Record, loaded: StoredRun) -> str:
    """The digests of the record and of its attack, from what they are made of."""
    known, made_as = record.metadata, record.digest
    if known["weights"] != loaded.run.checkpoint["weights"]:
        return "the record is of other weights than its run"
    older = _older_version(record)
    if digest(attack_of(known["spec"])) != known["attack"] and not older:
        return "the digest of the attack is not that of its spec"
    if "first_of" in known:  # a pack
        made_as = known["first_of"]
        if record.digest != identity(first=known["n"], of=made_as):
            return "the digest is not that of the first images of a record"
    inputs = {key: known[key] for key in INPUTS if key in known}
    options = [(known["features"], known["images"])]
    if known.get("archive"):  # it has dropped what the two count; any number of images may be kept
        numbers = dict.fromkeys((0, min(256, known["n"]), known["n"], *range(4096)))
        options = [(features, images) for images in numbers for features in (False, True)]
    if any(identity(**inputs, features=f, images=i) == made_as for f, i in options):
        if older:
            raise BadInput(older)
        return ""
    return "the digest does not follow from the attack, thresholds, weights and images"


def _older_version(record: Record) -> str:
    """Which older version of its attack a record is of; empty for one of today's."""
    known = record.metadata
    return older_version(attack_of(known["spec"]), known["attack"])


def _norms(record: Record, loaded: StoredRun) -> str:
    """Perturbations inside the ball, and Linf and L2 norms that one image can have."""
    attack, pixels = attack_of(record.metadata["spec"]), loaded.run.recipe.data.domain.shape
    linf, l2 = (record.arrays.get(f"size_{name}", torch.zeros(1)) for name in ("linf", "l2"))
    if min(float(linf.min()), float(l2.min())) < 0:
        return "a norm is negative"
    wrong = (l2 - linf < -ROUNDING) | (l2 > linf * math.prod(pixels) ** 0.5 + ROUNDING)
    if {"size_linf", "size_l2"} <= set(record.arrays) and wrong.any():
        return "size_l2 and size_linf are not the norms of one image"
    if isinstance(attack, Clean):
        return norm_problem(record.arrays, Linf(0)) or norm_problem(record.arrays, L2(0))
    if len(balls := attack.balls()) != 1:
        raise BadInput(f"{type(attack).__name__} has no ball, or several")
    return norm_problem(record.arrays, balls.pop())


def _scores(record: Record, loaded: StoredRun) -> str | None:
    """Stored scores against the outputs; without these, Con and T-Con against `correct`."""
    stored, computed = record.stored_scores, 0
    if record.scores_only:
        con, true = stored.get(show(Con(), full=True)), stored.get(TRUE)
        if con is None or true is None:
            return None
        same, below = (con - true).abs() <= EXACT, true <= con.clamp(max=0.5) + EXACT
        agree = torch.where(torch.from_numpy(record.correct), same, below)
        return "" if agree.all() else "`correct` contradicts Con and T-Con"
    for text, score in stored.items():
        rejector = None if text == TRUE else read(text, VOCABULARY)
        if rejector is None or isinstance(rejector, Score):  # others are fitted to features
            found = tcon_of(record) if rejector is None else values(rejector, record)
            computed += 1
            if not torch.allclose(score.double(), torch.from_numpy(found), ROUNDING, ROUNDING):
                return f"the stored score {text} is not that of the outputs"
    return "" if computed else None


def _thresholds(record: Record, loaded: StoredRun) -> str | None:
    """Thresholds of the attack against those of the clean records."""
    stored, fitted = record.metadata["thresholds"], record.metadata["fitted"]
    bound = resolve_thresholds(attack_of(record.metadata["spec"]), loaded.clean, loaded.device)
    if (set(stored), set(fitted)) != (set(bound.thresholds), set(bound.fitted)):
        return "the thresholds are not those of the criteria of the attack"
    for text, value in bound.thresholds.items():
        if not math.isclose(stored[text], value, rel_tol=ROUNDING, abs_tol=ROUNDING):
            return f"{text} has the threshold {stored[text]:.6g}, but {value:.6g} on clean images"
    return "" if stored else None


def _images(record: Record, loaded: StoredRun, count: int) -> Images:
    """The first images of the split of a record; BadInput if the data set cannot be read."""
    return loaded.images(RecordOptions(record.metadata["split"], n=count))


def _labels(record: Record, loaded: StoredRun) -> str:
    """Labels, positions and digest of the images against the data set."""
    split, count = loaded.split_by_name(record.metadata["split"]), len(record.y)
    if count > len(loaded.splits[split]):
        return f"the record has more images than the {split} split"
    images = _images(record, loaded, count)
    if not torch.equal(images.index.cpu(), record.arrays["index"]):
        return "the positions are not those of the first images of the split"
    if not torch.equal(images.y.cpu(), record.y):
        return "the labels are not those of the data set"
    is_same = "first_of" in record.metadata or images.digest() == record.metadata["data"]
    return "" if is_same else "data is not the digest of the images"


def _examples(record: Record, loaded: StoredRun) -> str | None:
    """Stored adversarial examples against images, norms and, with weights, outputs."""
    if (x_adv := record.arrays.get("x_adv")) is None:
        return None
    if len(x_adv) != record.metadata["images"] or len(x_adv) > len(record.y):
        return "the number of adversarial examples is not that of the metadata"
    x = _images(record, loaded, len(x_adv)).batch(slice(None))[0].cpu()
    if x.shape != x_adv.shape or not attack_of(record.metadata["spec"]).inside(x, x_adv).all():
        return "an adversarial example is outside the ball of the attack"
    for name, ball in (("size_linf", Linf(0)), ("size_l2", L2(0))):
        if not torch.allclose(ball.norm(x_adv - x), record.arrays[name][: len(x)], atol=ROUNDING):
            return f"{name} is not the norm of the adversarial examples"
    if not loaded.run.has_weights:
        return ""
    out = final_outputs(loaded.net, x_adv[:EXAMPLES], loaded.device)
    return "the weights give other outputs for the adversarial examples" * _far(out.logits, record)


def _far(logits: Tensor, record: Record) -> bool:
    """Whether logits of the first images differ from the stored ones by more than rounding."""
    stored = record.arrays["logits"][: len(logits)]
    within = 10 * ROUNDING * (1 + float(stored.abs().max()))
    return stored.shape != logits.shape or bool(((logits.cpu() - stored).abs() > within).any())


CHECKS: dict[str, Check] = {
    "identity": _identity, "norms": _norms, "stored scores": _scores, "thresholds": _thresholds,
    "labels in the data set": _labels, "adversarial examples": _examples,
}  # fmt: skip


def attacked_again(record: Record, loaded: StoredRun, n: int) -> str:
    """Attack the first n images again and compare which predictions are correct."""
    if record.metadata.get("probe", {}).get("random_outputs"):
        raise BadInput("the outputs of the net are random")
    if older := _older_version(record):
        raise BadInput(older)
    images = _images(record, loaded, count := min(n, len(record.y)))
    bound = resolve_thresholds(attack_of(record.metadata["spec"]), loaded.clean, loaded.device)
    x_adv = loaded.craft(bound.spec, images, slice(0, count), count).cpu()
    out = final_outputs(loaded.net, x_adv, loaded.device)
    if isinstance(bound.spec, Clean) and not record.scores_only and _far(out.logits, record):
        return "the weights give other outputs for the clean images"
    right = (prediction(out).cpu() == images.y.cpu()).numpy()
    other = int((right != record.correct[:count]).sum())
    same_device = str(record.metadata.get("device", "")).startswith(loaded.device.type)
    if other <= max(1, count // (20 if same_device else 4)):  # rounding may turn an image
        return ""
    return f"{other} of {count} images have another outcome when they are attacked again"
