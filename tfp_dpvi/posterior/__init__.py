"""Computes a calibrated posterior from released values: post-processing at no cost, in NumPy alone."""

from tfp_dpvi.posterior.curvature import CurvaturePrior, draw_curvature
from tfp_dpvi.posterior.mixture import (
    MOST_MISMATCH,
    Checks,
    DensityOfChains,
    LogDensity,
    Mixture,
    Terms,
    check,
    exact_mixture,
    gaussian_prior,
    refined_mixture,
    sampled_mixture,
)
from tfp_dpvi.posterior.shares import variance_shares
from tfp_dpvi.posterior.window import BURN_IN, ReleaseNoise, Window, window_of

__all__ = [
    "BURN_IN",
    "MOST_MISMATCH",
    "Checks",
    "CurvaturePrior",
    "DensityOfChains",
    "LogDensity",
    "Mixture",
    "ReleaseNoise",
    "Terms",
    "Window",
    "check",
    "draw_curvature",
    "exact_mixture",
    "gaussian_prior",
    "refined_mixture",
    "sampled_mixture",
    "variance_shares",
    "window_of",
]
