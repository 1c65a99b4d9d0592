"""Thresholds of rejectors, chosen on held-out clean images, with and without a guarantee.

TPR(0.95).threshold(score, correct)             # accepts 95% of the correct predictions given
certify_threshold(score, correct, TPR(0.95))          # 95% of all to come, at 95% confidence
certify_threshold(con_and_rcon, correct, Risk(0.05))  # two thresholds; at most 5% errors
"""

from demur.calibrate.binomial import binomial_cdf, binomial_sf, lower_bound, upper_bound
from demur.calibrate.certificate import (
    Certificate,
    Guarantee,
    Shortfall,
    Uncertified,
    certify_threshold,
)
from demur.calibrate.chance import ChanceTest
from demur.calibrate.operating_points import OPERATING_POINTS, TPR, Coverage, Median, Risk

__all__ = [
    "OPERATING_POINTS", "TPR", "Certificate", "ChanceTest", "Coverage", "Guarantee", "Median",
    "Risk", "Shortfall", "Uncertified", "binomial_cdf", "binomial_sf", "certify_threshold",
    "lower_bound", "upper_bound",
]  # fmt: skip
