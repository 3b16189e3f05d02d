"""A Bayesian model as a frozen value, a prior and a likelihood, and what follows from these."""

from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.bayes.predictive import PosteriorPredictive

__all__ = ["Coordinates", "PosteriorPredictive"]
