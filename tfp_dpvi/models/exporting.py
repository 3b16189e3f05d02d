"""The functions of an export, which depend only on released variables and their own arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tfp_dpvi._tf import Structure, tf, tfp
from tfp_dpvi.bayes.predictive import PosteriorPredictive, posterior_draws
from tfp_dpvi.data.shapes import flat_names
from tfp_dpvi.export import ExportedFunction

if TYPE_CHECKING:
    from tfp_dpvi.models.dpvi import DPVI


def of_records(
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


def of_draws(
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


def named(structure: Structure, single: str) -> dict[str, tf.Tensor]:
    """Returns the parts of a structure by name; a single tensor is called `single`."""
    return dict(zip(flat_names(structure, single), tf.nest.flatten(structure), strict=True))


def mean_function(
    function: Callable[[Structure], Structure], inputs: Structure, meaning: str
) -> ExportedFunction:
    """Returns `predict`, from a function of x."""
    return of_records(
        "predict", lambda records: named(function(records["x"]), "mean"), {"x": inputs}, meaning
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
        return named(predictive.sample(num, seed=record_seed), "x")

    over = f"over {num_draws} fixed draws"
    if model.generative:
        meaning = (
            f"synthetic records, each from one of {num_draws} posterior draws, picked at random"
        )
        first = of_draws("sample_predictive", sample_predictive, meaning)
    else:
        meaning = f"posterior predictive mean of each record (class probabilities of a categorical one), {over}."
        first = mean_function(model.call, inputs["x"], meaning)
    density = f"log density of each record under the posterior predictive distribution, {over}."
    return [
        first,
        of_draws(
            "sample_posterior",
            sample_posterior,
            "draws of the parameters from the learned posterior",
        ),
        of_records("log_prob", log_prob, inputs, density),
    ]
