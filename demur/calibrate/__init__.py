"""Thresholds of rejectors, chosen on held-out clean images, with and without a guarantee.

TPR(0.95).threshold(score, correct)             # accepts 95% of the correct predictions given
certify(score, correct, TPR(0.95))              # accepts 95% of all to come, with 95% confidence
certify(con_and_rcon, correct, Risk(0.05))      # two thresholds; at most 5% errors if accepted
"""

from demur.calibrate.binomial import binomial_sf, binomial_cdf, lower_bound, upper_bound
from demur.calibrate.certificate import Certificate, certify
from demur.calibrate.guarantee import Guarantee
from demur.calibrate.operating_points import OPERATING_POINTS, TPR, Coverage, Median, Risk
from demur.calibrate.shortfall import Shortfall, Uncertified

__all__ = [
    "OPERATING_POINTS", "TPR", "Certificate", "Coverage", "Guarantee", "Median", "Risk",
    "Shortfall", "Uncertified", "binomial_sf", "binomial_cdf", "certify", "lower_bound", "upper_bound",
]  # fmt: skip
