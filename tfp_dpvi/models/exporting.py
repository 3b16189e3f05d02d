"""The functions of an export, which depend only on released variables and their own arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tfp_dpvi._tf import Structure, tf, tfp
from tfp_dpvi.export import ExportedFunction, flat_names
from tfp_dpvi.models.predictive import PosteriorPredictive, mean_of, posterior_draws

if TYPE_CHECKING:
    from tfp_dpvi.data import Records
    from tfp_dpvi.models.dpvae import DPVAE
    from tfp_dpvi.models.dpvi import DPVI


def specs_of(records: Records) -> dict[str, Structure]:
    """Returns the shapes and dtypes of records, {"x": ..., "y": ...}, with None for their number."""
    parts = {"x": records.x} if records.y is None else {"x": records.x, "y": records.y}
    return tf.nest.map_structure(
        lambda part: tf.TensorSpec([None, *part.shape[1:]], part.dtype), parts
    )


def _of_records(
    name: str,
    function: Callable[[dict[str, Structure]], dict[str, tf.Tensor]],
    specs: dict[str, Structure],
    meaning: str,
) -> ExportedFunction:
    """Exports a function of records, {"x": ..., "y": ...}: a signature's arguments are flat."""
    names: list[str] = []
    for part, structure in specs.items():
        names += [f"{one}_{part}" if one in names else one for one in flat_names(structure, part)]

    def of_flat(**given: tf.Tensor) -> dict[str, tf.Tensor]:
        return function(tf.nest.pack_sequence_as(specs, [given[one] for one in names]))

    return ExportedFunction(
        name, of_flat, dict(zip(names, tf.nest.flatten(specs), strict=True)), meaning
    )


def _of_draws(
    name: str,
    function: Callable[..., dict[str, tf.Tensor]],
    meaning: str,
    given: Structure | None = None,
) -> ExportedFunction:
    """Exports a function of a number of draws, a seed and, if the model has one, y with the shapes in `given`."""
    inputs = {"num": tf.TensorSpec([], tf.int32), "seed": tf.TensorSpec([2], tf.int32)}
    names = (
        []
        if given is None
        else [f"{one}_y" if one in inputs else one for one in flat_names(given, "y")]
    )
    specs = dict(zip(names, [] if given is None else tf.nest.flatten(given), strict=True))

    def of_flat(num: tf.Tensor, seed: tf.Tensor, **flat: tf.Tensor) -> dict[str, tf.Tensor]:
        y = (
            ()
            if given is None
            else (tf.nest.pack_sequence_as(given, [flat[one] for one in names]),)
        )
        return function(num, seed, *y)

    return ExportedFunction(
        name, of_flat, inputs | specs, f"{meaning}. The same `seed` gives the same draws."
    )


def _named(structure: Structure, single: str) -> dict[str, tf.Tensor]:
    return dict(zip(flat_names(structure, single), tf.nest.flatten(structure), strict=True))


def mean_function(
    function: Callable[[Structure], Structure], inputs: Structure, meaning: str
) -> ExportedFunction:
    """Returns `predict`, from a function of x."""
    return _of_records(
        "predict", lambda records: _named(function(records["x"]), "mean"), {"x": inputs}, meaning
    )


def of_posterior(model: DPVI, inputs: dict[str, Structure]) -> list[ExportedFunction]:
    """Returns the functions of a `DPVI`: draws, and the predictive distribution's mean, samples and density.

    `predict` and `log_prob` use the draws of `DPVI.predict`, from a fixed and public seed.
    """
    num_draws = model.num_predictive_draws
    names = flat_names(model.prior.dtype, "params")

    def sample_posterior(num: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        flat = tf.nest.flatten(posterior_draws(model.posterior, num, seed))
        shapes = tf.nest.flatten(model.prior.event_shape_tensor())
        return {
            name: tf.ensure_shape(part, [None, *tf.get_static_value(shape)])
            for name, part, shape in zip(names, flat, shapes, strict=True)
        }

    def log_prob(records: dict[str, Structure]) -> dict[str, tf.Tensor]:
        return {"log_prob": -model.test_losses(records["x"], records.get("y"))}

    def sample_predictive(num: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        draw_seed, record_seed = tf.unstack(tfp.random.split_seed(seed, n=2))
        draws = posterior_draws(model.posterior, num_draws, draw_seed)
        predictive = PosteriorPredictive(
            lambda params: model.distribution_at(params, None), draws, num_draws
        )
        return _named(predictive.sample(num, seed=record_seed), "x")

    over = f"over {num_draws} fixed draws"
    if model.generative:
        meaning = (
            f"synthetic records, each from one of {num_draws} posterior draws, picked at random"
        )
        first = _of_draws("sample_predictive", sample_predictive, meaning)
    else:
        meaning = f"posterior predictive mean of each record (class probabilities of a categorical one), {over}."
        first = mean_function(model.call, inputs["x"], meaning)
    density = f"log density of each record under the posterior predictive distribution, {over}."
    return [
        first,
        _of_draws(
            "sample_posterior",
            sample_posterior,
            "draws of the parameters from the learned posterior",
        ),
        _of_records("log_prob", log_prob, inputs, density),
    ]


def of_autoencoder(model: DPVAE, inputs: dict[str, Structure]) -> list[ExportedFunction]:
    """Returns the functions of a `DPVAE`: reconstructions and synthetic records."""

    def sample_predictive(
        num: tf.Tensor, seed: tf.Tensor, y: Structure | None = None
    ) -> dict[str, tf.Tensor]:
        code_seed, record_seed = tf.unstack(tfp.random.split_seed(seed, n=2))
        return _named(model._generated(num, y, code_seed).sample(seed=record_seed), "x")

    def predict(records: dict[str, Structure]) -> dict[str, tf.Tensor]:
        return _named(
            model.call((records["x"], records["y"]) if "y" in records else records["x"]), "mean"
        )

    def encode(records: dict[str, Structure]) -> dict[str, tf.Tensor]:
        posterior = model.encode(*records.values())
        try:
            return {"mean": mean_of(posterior), "stddev": posterior.stddev()}
        except NotImplementedError:
            return {"mean": mean_of(posterior)}

    def decode(given: dict[str, Structure]) -> dict[str, tf.Tensor]:
        return _named(
            mean_of(model.decode(given["z"], *[given[name] for name in given if name != "z"])),
            "mean",
        )

    one = tf.nest.map_structure(lambda spec: tf.zeros([1, *spec.shape[1:]], spec.dtype), inputs)
    codes = model.encode(*one.values())
    latent = tf.TensorSpec([None, *codes.event_shape], codes.dtype)
    beside = {name: spec for name, spec in inputs.items() if name != "x"}
    meaning = "reconstruction of each record: the decoder's mean at the encoder's mean. It reveals the record."
    coded = "the encoder's mean of each record's code, and its standard deviation, if any. They reveal the record."
    decoded = "the decoder's mean at each code z, in the shape of records."
    drawn = "synthetic records: draws from the prior, decoded"
    if "y" in inputs:
        drawn += ", given `y` with one row for each of the `num` records or one for all"
    return [
        _of_draws("sample_predictive", sample_predictive, drawn, inputs.get("y")),
        _of_records("predict", predict, inputs, meaning),
        _of_records("encode", encode, inputs, coded),
        _of_records("decode", decode, {**beside, "z": latent}, decoded),
    ]
