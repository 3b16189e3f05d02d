"""A posterior for ArviZ: draws, predictions, and log densities of public records."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi._tf import Structure, tf, tfd
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.bayes.predictive import outcome_of_each, over_draws, posterior_draws
from tfp_dpvi.data import Records, make_records
from tfp_dpvi.data.shapes import flat_names

InferenceData: TypeAlias = Any
"""`arviz.InferenceData` of ArviZ 0.23, the `xarray.DataTree` of ArviZ 1; ArviZ is optional."""

_CHAINS = 4


def import_arviz() -> ModuleType:
    """Returns the module `arviz`; raises `ImportError` with the way to install it."""
    try:
        with warnings.catch_warnings():
            # Importing it announces the next version.
            warnings.simplefilter("ignore", FutureWarning)
            import arviz
    except ImportError as error:
        raise ImportError(
            "to_inference_data needs ArviZ 0.23 or 1: pip install 'tfp-dpvi[arviz]'."
        ) from error
    return arviz


def outcomes(
    model: BayesianModel,
    draws: Structure,
    num: int,
    inputs: Structure | None,
    seed: int | None,
    num_records: int | None = None,
) -> Structure:
    """Returns outcomes for each of several draws, as NumPy arrays.

    Args:
      model: Prior and likelihood.
      draws: Draws of the parameters, in the first dimension.
      num: The number of draws.
      inputs: The inputs of the outcomes as tensors, or None for a model of whole records.
      seed: The seed of the outcomes, or None for fresh ones.
      num_records: The number of whole records for each draw, or None for a single record.
    """
    shape = () if num_records is None else (num_records,)
    key = _random.tfp_seed(_random.fold_in(tf.constant(_random.new_key(seed)), 1))
    drawn = outcome_of_each(
        lambda params: model.distribution_at(params, inputs), draws, num, key, shape
    )
    return tf.nest.map_structure(lambda part: part.numpy(), drawn)


def to_inference_data(
    model: BayesianModel,
    posterior: tfd.Distribution,
    inputs: Structure | None,
    x_public: Structure | None,
    y_public: Structure | None,
    unsafe_records: tuple[Structure, ...] | None,
    num_draws: int,
    seed: int,
) -> InferenceData:
    """Returns groups of draws, predictions and log densities, see `DPVI.to_inference_data`.

    Args:
      model: Prior and likelihood.
      posterior: A distribution over the prior's parameters.
      inputs: `x_public` as tensors, or None.
      x_public: Records declared public.
      y_public: Their outcomes.
      unsafe_records: Private records, (x, y) or (x,), whose exact log-likelihoods are shown.
      num_draws: The number of draws from each of prior and posterior.
      seed: The seed of the draws.
    """
    arviz = import_arviz()
    chains = _CHAINS if num_draws % _CHAINS == 0 and num_draws >= _CHAINS**2 else 1

    def group(structure: Structure, name: str) -> dict[str, np.ndarray]:
        """Returns a group's variables, their first dimension split into chains."""
        parts = [np.asarray(part) for part in tf.nest.flatten(structure)]
        shaped = [part.reshape(chains, num_draws // chains, *part.shape[1:]) for part in parts]
        return dict(zip(flat_names(structure, name), shaped, strict=True))

    what = "x" if model.generative else "y"
    observed = x_public if model.generative else y_public
    records = None if observed is None else _records(model, x_public, y_public)
    groups: dict[str, dict[str, np.ndarray]] = {}
    sources = {"posterior": posterior, "prior": model.prior}
    draws = {name: posterior_draws(source, num_draws, seed) for name, source in sources.items()}
    for name, params in draws.items():
        groups[name] = group(params, "parameter")
        if model.generative or x_public is not None:
            num_records = records.num if records is not None and model.generative else None
            predicted = outcomes(model, params, num_draws, inputs, seed, num_records)
            groups[f"{name}_predictive"] = group(predicted, what)
    if records is not None:
        parts = records.x if model.generative else records.y
        arrays = map(np.asarray, tf.nest.flatten(parts))
        groups["observed_data"] = dict(zip(flat_names(parts, what), arrays, strict=True))
    if unsafe_records is not None:
        records = _records(model, *unsafe_records)
    if records is not None:
        x = tf.nest.map_structure(tf.convert_to_tensor, records.x)
        y = None
        if records.y is not None:
            y = tf.nest.map_structure(tf.convert_to_tensor, records.y)
        logs = over_draws(lambda params: model.log_prob(params, x, y), draws["posterior"])
        groups["log_likelihood"] = group(logs, what)
    return from_groups(arviz, groups)


def from_groups(arviz: ModuleType, groups: dict[str, dict[str, np.ndarray]]) -> InferenceData:
    """Returns groups of variables in the container of the ArviZ that is installed.

    Names of variables in ArviZ 1 have a division sign, U+2215, in place of a slash, which its
    container keeps for paths.

    Args:
      arviz: The module.
      groups: By the group's name, arrays of shape [chains, draws, ...] by the variable's name;
        those of "observed_data" have neither chains nor draws.
    """
    if int(arviz.__version__.partition(".")[0]) >= 1:
        return arviz.from_dict(
            {
                group: {
                    name.replace("/", "\N{DIVISION SLASH}"): part for name, part in parts.items()
                }
                for group, parts in groups.items()
            }
        )
    return arviz.from_dict(**groups)


def _records(model: BayesianModel, x: Structure, y: Structure | None = None) -> Records:
    return make_records(x, y, None, dtype=model.dtype, validate=True)


def check_public(
    model: BayesianModel,
    x_public: Structure | None,
    y_public: Structure | None,
    unsafe_records: tuple[Structure, ...] | None,
) -> None:
    """Checks that arguments of `to_inference_data` go together.

    Args:
      model: Prior and likelihood.
      x_public: Records declared public.
      y_public: Their outcomes.
      unsafe_records: Private records, (x, y) or (x,).

    Raises:
      ValueError: They do not.
    """
    if y_public is not None and model.generative:
        raise ValueError(
            "y_public was passed, but this model takes whole records: pass them as x_public."
        )
    if y_public is not None and x_public is None:
        raise ValueError(
            "y_public was passed without x_public: also pass the public records of these outcomes."
        )
    if unsafe_records is None:
        return
    if (x_public if model.generative else y_public) is not None:
        raise ValueError(
            "unsafe_records was passed with public outcomes: "
            "pass one, for the group log_likelihood."
        )
    num_parts = 1 if model.generative else 2
    if not isinstance(unsafe_records, tuple) or len(unsafe_records) != num_parts:
        raise ValueError(
            f"unsafe_records must be a tuple {'(x,)' if model.generative else '(x, y)'}."
        )
