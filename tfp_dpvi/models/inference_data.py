"""A `DPVI`'s posterior for ArviZ: draws, predictions, and log densities of public records."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tfp_dpvi import _random, export
from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.data import make_records
from tfp_dpvi.models.predictive import outcome_of_each, over_draws, posterior_draws
from tfp_dpvi.privacy import FullBatch, PrivacyPlan

if TYPE_CHECKING:
    from tfp_dpvi.models.dpvi import DPVI

InferenceData: TypeAlias = Any
"""`arviz.InferenceData`; ArviZ is optional."""

_CHAINS = 4
_RANGE, _ERROR = (
    10.0,
    0.05,
)  # Nats: range of clipped log densities and error of their mean, to price a private mean.


def _arviz() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # Importing it announces the next version.
            import arviz
    except ImportError as error:
        raise ImportError(
            "to_inference_data needs ArviZ 0.23: pip install 'tfp-dpvi[arviz]'."
        ) from error
    return arviz


def outcomes(
    model: DPVI,
    draws: Structure,
    num: int,
    x: Structure | None,
    seed: int | None,
    num_records: int | None = None,
) -> Structure:
    """Returns outcomes at `x` (or `num_records` whole records, or one) for each of `num` parameter draws."""
    inputs = model._inputs_of(x)
    shape = () if num_records is None else (num_records,)
    key = _random.tfp_seed(_random.fold_in(tf.constant(_random.new_key(seed)), 1))
    drawn = outcome_of_each(
        lambda params: model.distribution_at(params, inputs), draws, num, key, shape
    )
    return tf.nest.map_structure(lambda part: part.numpy(), drawn)


def to_inference_data(
    model: DPVI,
    x_public: Structure | None,
    y_public: Structure | None,
    unsafe_records: tuple[Structure, ...] | None,
    num_draws: int,
    seed: int,
) -> InferenceData:
    """See `DPVI.to_inference_data`."""
    arviz = _arviz()
    _check(model, x_public, y_public, unsafe_records)
    chains = _CHAINS if num_draws % _CHAINS == 0 and num_draws >= _CHAINS**2 else 1

    def group(structure: Structure, name: str) -> dict[str, np.ndarray]:
        """Returns a group's variables, their first dimension split into chains."""
        parts = [np.asarray(part) for part in tf.nest.flatten(structure)]
        shaped = [part.reshape(chains, num_draws // chains, *part.shape[1:]) for part in parts]
        return dict(zip(export.flat_names(structure, name), shaped, strict=True))

    what = "x" if model.generative else "y"
    observed = x_public if model.generative else y_public
    records = None if observed is None else _records(model, x_public, y_public)
    groups: dict[str, dict[str, np.ndarray]] = {}
    sources = {"posterior": model.posterior, "prior": model.prior}
    draws = {name: posterior_draws(one, num_draws, seed) for name, one in sources.items()}
    for name, of_one in draws.items():
        groups[name] = group(of_one, "parameter")
        if model.generative or x_public is not None:
            inputs = None if model.generative else x_public
            num_records = records.num if records is not None and model.generative else None
            drawn = outcomes(model, of_one, num_draws, inputs, seed, num_records)
            groups[f"{name}_predictive"] = group(drawn, what)
    if records is not None:
        seen = records.x if model.generative else records.y
        groups["observed_data"] = dict(
            zip(export.flat_names(seen, what), map(np.asarray, tf.nest.flatten(seen)), strict=True)
        )
    if unsafe_records is not None:
        model.privacy_ledger.record_exposure(
            "exact log-likelihoods of private records were shown (to_inference_data, unsafe_records)."
        )
        records = _records(model, *unsafe_records)
    if records is not None:
        given = (records.x,) if records.y is None else (records.x, records.y)
        x, y = (*tf.nest.map_structure(tf.convert_to_tensor, given), None)[:2]
        logs = over_draws(lambda params: model._log_prob(params, x, y), draws["posterior"])
        groups["log_likelihood"] = group(logs, what)
    return arviz.from_dict(**groups)


def _records(model: DPVI, x: Structure, y: Structure | None = None) -> Any:
    return make_records(x, y, None, dtype=model.record_dtype, validate=True)


def _check(model: DPVI, x_public: Structure, y_public: Structure, unsafe_records: Any) -> None:
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
            "unsafe_records was passed with public outcomes: pass one, for the group log_likelihood."
        )
    if not isinstance(unsafe_records, tuple) or len(unsafe_records) != (
        1 if model.generative else 2
    ):
        raise ValueError(
            f"unsafe_records must be a tuple {'(x,)' if model.generative else '(x, y)'}."
        )


def loo(
    model: DPVI, x_public: Structure | None, y_public: Structure | None, **settings: Any
) -> Any:
    """See `DPVI.loo`."""
    if (x_public if model.generative else y_public) is None and "unsafe_records" not in settings:
        num, delta = model._dp.num_records or 1000, model.privacy_delta or 1e-5
        given = "x_public" if model.generative else "x_public, y_public"
        price = PrivacyPlan(FullBatch(), _ERROR * num / _RANGE, 1).epsilon(delta)
        raise ValueError(
            f"loo: PSIS-LOO shows exact log densities of records, which no epsilon covers: pass public ones, loo({given}).\n"
            f"Only the mean of {num} private ones, clipped to a range of {_RANGE:g} nats, with a standard error of {_ERROR:g}, would "
            f"cost epsilon {price:.2g} at delta {delta:g}."
        )
    return _arviz().loo(model.to_inference_data(x_public, y_public, **settings))
