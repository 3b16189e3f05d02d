"""What a model's export computes: functions of its released variables and of their arguments, as a graph."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

from tfp_dpvi import _random, export
from tfp_dpvi._tf import tf, tfp
from tfp_dpvi.export import ExportedFunction
from tfp_dpvi.models.predictive import PosteriorPredictive, mean_of, over_draws

_SEED = tf.TensorSpec([2], tf.int32)
_NUM = tf.TensorSpec([], tf.int32)
_SEEDED = "`seed` makes the draws: other numbers, other draws; the same, the same."


def export_model(model: Any, path: str | os.PathLike[str], *, delta: float | None, overwrite: bool) -> None:
    """Writes what `model.export_functions()` gives; see `DPModel.export`."""
    state = model._dp
    if state.inputs is None or state.ledger.num_releases == 0:
        raise RuntimeError(
            f"{type(model).__name__}.export before fit: nothing was learned, and there is nothing to report. Call fit first. "
            "(Weights that were loaded into a new model come without its books: use model.save and load_model.)"
        )
    if delta is None and (state.target is None or state.target.delta is None):
        raise ValueError("delta is not known, and the export holds the privacy report: say export(path, delta=1e-5).")
    report = model.privacy_report(delta)
    export.write(path, model.export_functions(state.inputs), report, title=f"Model `{model.name}`", overwrite=overwrite)


def specs_of(records: Any) -> dict[str, Any]:
    """The shapes and dtypes of records, {"x": ..., "y": ...}, with None for their number."""

    def spec(part: Any) -> Any:
        return tf.TensorSpec([None, *part.shape[1:]], part.dtype)

    parts = {"x": records.x} if records.y is None else {"x": records.x, "y": records.y}
    return {name: tf.nest.map_structure(spec, part) for name, part in parts.items()}


def _arguments(specs: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Flat arguments for structures, and the way back."""
    flat: dict[str, Any] = {}
    places: dict[str, list[str]] = {}
    for name, structure in specs.items():
        names = export.flat_names(structure, name)
        names = [f"{name}_{part}" if part in flat else part for part in names]
        places[name] = names
        flat.update(zip(names, tf.nest.flatten(structure), strict=True))

    def packed(given: dict[str, Any]) -> dict[str, Any]:
        return {
            name: tf.nest.pack_sequence_as(structure, [given[part] for part in places[name]])
            for name, structure in specs.items()
        }

    return flat, packed


def _call(flat: dict[str, Any]) -> str:
    return ", ".join(f"{name}={name}" for name in flat)


def _named(structure: Any, names: list[str]) -> dict[str, Any]:
    return dict(zip(names, tf.nest.flatten(structure), strict=True))


def mean_function(function: Callable[[Any], Any], inputs: Any, meaning: str) -> ExportedFunction:
    """`predict`, from a function of x."""
    flat, packed = _arguments({"x": inputs})

    def predict(**given: Any) -> dict[str, Any]:
        mean = function(packed(given)["x"])
        return _named(mean, export.flat_names(mean, "mean"))

    return ExportedFunction("predict", predict, flat, meaning, _call(flat))


def of_posterior(model: Any, inputs: dict[str, Any]) -> list[ExportedFunction]:
    """Of `DPVI`: draws, and the predictive distribution's mean, samples and density.

    `predict` and `log_prob` have the draws that `DPVI.predict` has, from a fixed and public seed.
    """
    surrogate, parts, num_draws = model.surrogate_posterior, model._model, model.num_predictive_draws
    fixed = _random.tfp_seed(_random.new_key(0)).numpy()  # No key: 62 of its bits, as constants of the graph.
    names = export.flat_names(model.prior.dtype, "params")

    def draws_of(num: Any, seed: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Saw Tensor seed")  # As in `posterior_draws`.
            return surrogate.sample(num, seed=seed)

    def sample_posterior(num: Any, seed: Any) -> dict[str, Any]:
        flat = tf.nest.flatten(draws_of(num, seed))
        shapes = tf.nest.flatten(model.prior.event_shape_tensor())
        return {
            name: tf.ensure_shape(part, [None, *tf.get_static_value(shape)])
            for name, part, shape in zip(names, flat, shapes, strict=True)
        }

    def mean(x: Any) -> Any:
        means = over_draws(lambda params: mean_of(parts.at(params, x)), draws_of(num_draws, fixed))
        return tf.reduce_mean(means, axis=0)

    flat, packed = _arguments(inputs)

    def log_prob(**given: Any) -> dict[str, Any]:
        records = packed(given)
        logs = over_draws(
            lambda params: model._log_prob(params, records["x"], records.get("y")), draws_of(num_draws, fixed)
        )
        return {"log_prob": tf.reduce_logsumexp(logs, axis=0) - tf.math.log(tf.cast(num_draws, logs.dtype))}

    def sample_predictive(num: Any, seed: Any) -> dict[str, Any]:
        draw_seed, record_seed = tf.unstack(tfp.random.split_seed(seed, n=2))
        draws = draws_of(num_draws, draw_seed)
        drawn = PosteriorPredictive(lambda params: parts.at(params, None), draws, num_draws).sample(
            num, seed=record_seed
        )
        return _named(drawn, export.flat_names(drawn, "x"))

    posterior = ExportedFunction(
        "sample_posterior",
        sample_posterior,
        {"num": _NUM, "seed": _SEED},
        f"draws of the parameters from the learned posterior. {_SEEDED}",
        "num=100, seed=[1, 2]",
    )
    density = ExportedFunction(
        "log_prob",
        log_prob,
        flat,
        f"log density of each record under the posterior predictive distribution, over {num_draws} fixed draws.",
        _call(flat),
    )
    if parts.generative:
        records = ExportedFunction(
            "sample_predictive",
            sample_predictive,
            {"num": _NUM, "seed": _SEED},
            f"synthetic records, each from its own pick among {num_draws} draws of the posterior. {_SEEDED}",
            "num=100, seed=[1, 2]",
        )
        return [records, posterior, density]
    meaning = f"posterior predictive mean of each record (class probabilities of a categorical one), over {num_draws} fixed draws."
    return [mean_function(mean, inputs["x"], meaning), posterior, density]


def of_autoencoder(model: Any, inputs: dict[str, Any]) -> list[ExportedFunction]:
    """Of `DPVAE`: reconstructions and synthetic records."""

    def sample_predictive(num: Any, seed: Any) -> dict[str, Any]:
        code_seed, record_seed = tf.unstack(tfp.random.split_seed(seed, n=2))
        drawn = model.decode(model.prior.sample(num, seed=code_seed)).sample(seed=record_seed)
        return _named(drawn, export.flat_names(drawn, "x"))

    records = ExportedFunction(
        "sample_predictive",
        sample_predictive,
        {"num": _NUM, "seed": _SEED},
        f"synthetic records: draws from the prior, decoded. {_SEEDED}",
        "num=100, seed=[1, 2]",
    )
    meaning = "reconstruction of each record: the decoder's mean at the encoder's mean. It is that record's own."
    return [records, mean_function(model.call, inputs["x"], meaning)]
