"""The glossary of a page: every term that it uses, with an anchor to link to."""

import re
from collections.abc import Iterable
from typing import NamedTuple

REJECTORS = {
    "Con": "Confidence (con): the probability of the predicted class, from 0 to 1.",
    "R-Con": "Rectified confidence: con corrected by A, the net's second output (usually their "
    "product). It is trained to predict T-Con without the true label.",
    "Con (trained)": "Confidence at the temperature at which it was trained to predict T-Con.",
    "SNet": "The net's second output: trained to select the images to accept.",
    "ATRO": "The net's second output: trained to trade wrong predictions against rejections.",
    "CARL": "One minus the probability of an extra class, which stands for rejection.",
    "Energy": "The log-sum-exp of the net's logits.",
    "Con+R-Con": "Two conditions in sequence: con must reach 1/2, then R-Con its threshold.",
    "T-Con": "True confidence: the probability of the true class. It needs the label, so it cannot "
    "be used in practice; it is an oracle that shows what is possible.",
    "A": "The net's second output alone, from 0 to 1: how reliable con is.",
    "Margin": "The probability of the predicted class minus that of the second best.",
    "Entropy": "The negative entropy of the predicted probabilities: how concentrated they are.",
    "MaxLogit": "The largest logit of the net.",
    "KD": "Kernel density of correctly classified features of the same class around the image.",
    "LID": "Local intrinsic dimension: how the nearest correctly classified features are spread.",
    "kNN": "The closeness of the k-th nearest correctly classified feature.",
    "GDA": "The closeness to the nearest class mean, with one covariance for all classes.",
    "GDA*": "The same, with a covariance for each class.",
    "GMM": "The same, for the predicted class only.",
    "ViM": "Energy, minus the part of the feature that no class explains.",
}
PAGE_TERMS = {
    "accept": "The net gives its prediction. It does so where every score reaches its threshold.",
    "reject": "The net gives no prediction, because a score is below its threshold.",
    "threshold": "An image is accepted where its score reaches the threshold, and rejected below "
    "it.",
    "coverage": "The accepted share of all images.",
    "risk": "The wrong share of the accepted images.",
    "accepted and wrong": "The share of all images that are accepted although the prediction is "
    "wrong: the error that remains after rejection.",
    "TPR": "The accepted share of the correct predictions. TPR-95 is the threshold that accepts "
    "95% of them.",
    "AUROC": "The probability that a correct prediction scores above a wrong one: 1 is perfect, "
    "0.5 is chance.",
    "ROC": "The curve of the accepted share of correct predictions against that of wrong ones, "
    "over all thresholds. AUROC is the area under it.",
    "xi": "The error of A: how far it is from the A at which R-Con equals T-Con. 0 is exact.",
    "Theorem 1": "Where con is above 1/(2 - xi), R-Con is above 1/2 for a correct prediction and "
    "below 1/2 for a wrong one.",
    "temperature": "The number that logits are divided by before the softmax. It changes Con, "
    "R-Con and T-Con, but no prediction.",
    "interval": "The range beside or under a figure: its 95% confidence interval.",
    "deploy": "The threshold is chosen on clean held-out images, then frozen before any attack, as "
    "in practice.",
    "paper": "The threshold is chosen again on every scored set with its true labels, as in "
    "published tables. This allows comparisons with them, but is impossible in practice.",
    "certificate": "A threshold with a guarantee for future images of the same distribution, "
    "tested on held-out images.",
}


class Term(NamedTuple):
    """A term, the id of its entry and its meaning."""

    name: str
    anchor: str
    meaning: str


def anchor(name: str) -> str:
    """Return the id of a term's entry."""
    words = name.replace("+", " and ").replace("*", " star")
    return "term-" + re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def glossary(rejectors: Iterable[str]) -> list[Term]:
    """Return the terms of a page that shows these rejectors."""
    used = {*rejectors, "Con", "T-Con"}
    shown = [name for name in REJECTORS if name in used]
    meanings = {name: REJECTORS[name] for name in shown} | PAGE_TERMS
    return [Term(name, anchor(name), meaning) for name, meaning in meanings.items()]


def known_anchor(name: str, terms: Iterable[Term]) -> str:
    """Return the anchor of a rejector's name in the glossary; empty if it is not in it."""
    plain = name.removesuffix(" (oracle)")
    return next((term.anchor for term in terms if term.name == plain), "")
