"""Thresholds chosen on held-out clean images and frozen before any attacked image is seen.

TPR(0.95).threshold(score, correct)             # keeps 95% of these right answers
certify(score, correct, TPR(0.95))              # keeps 95% of all, with 95% confidence
certify(con_and_rcon, correct, Risk(0.05))      # two thresholds; at most 5% wrong if accepted
"""

from demur.calibrate.binomial import at_least, at_most, lower_bound, upper_bound
from demur.calibrate.certificate import Certificate, certify
from demur.calibrate.guarantee import Guarantee
from demur.calibrate.operating_points import OPERATING_POINTS, TPR, Coverage, Median, Risk
from demur.calibrate.shortfall import Shortfall, Uncertified

__all__ = [
    "OPERATING_POINTS",
    "TPR",
    "Certificate",
    "Coverage",
    "Guarantee",
    "Median",
    "Risk",
    "Shortfall",
    "Uncertified",
    "at_least",
    "at_most",
    "certify",
    "lower_bound",
    "upper_bound",
]  # fmt: skip
