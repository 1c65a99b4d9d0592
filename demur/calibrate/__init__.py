"""Thresholds of rejectors, chosen on held-out clean images, with and without a guarantee."""

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
