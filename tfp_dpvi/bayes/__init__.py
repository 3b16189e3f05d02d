"""A Bayesian model as a frozen value: a prior, a likelihood, and what can be computed from them without records."""

from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.bayes.predictive import PosteriorPredictive

__all__ = ["Coordinates", "PosteriorPredictive"]
