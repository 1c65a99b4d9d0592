"""Thresholds of rejectors, chosen on held-out clean images, with and without a guarantee."""

from demur.calibrate.certificate import (
    Certificate,
    Guarantee,
    Shortfall,
    Uncertified,
    certify_threshold,
)
from demur.calibrate.operating_points import OPERATING_POINTS, TPR, Coverage, Median, Risk
from demur.metrics.intervals import ChanceTest, binomial_cdf, binomial_sf, lower_bound, upper_bound

__all__ = [
    "OPERATING_POINTS", "TPR", "Certificate", "ChanceTest", "Coverage", "Guarantee", "Median",
    "Risk", "Shortfall", "Uncertified", "binomial_cdf", "binomial_sf", "certify_threshold",
    "lower_bound", "upper_bound",
]  # fmt: skip
