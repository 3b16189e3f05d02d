"""The functions of an export, which depend only on released values and their own arguments."""

from __future__ import annotations

from collections.abc import Callable

from tfp_dpvi._tf import Structure, tf, tfd, tfp
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.bayes.predictive import PosteriorPredictive, posterior_draws
from tfp_dpvi.data.shapes import flat_names
from tfp_dpvi.export import ExportedFunction


def record_signature(
    name: str,
    function: Callable[[dict[str, Structure]], dict[str, tf.Tensor]],
    specs: dict[str, Structure],
    meaning: str,
) -> ExportedFunction:
    """Exports a function of records; a signature's arguments are flat.

    Args:
      name: The signature's name.
      function: Takes records {"x": ..., "y": ...} and returns tensors by name.
      specs: `tf.TensorSpec`s of the records.
      meaning: A sentence for the model card.
    """
    names: list[str] = []
    for part, structure in specs.items():
        for column in flat_names(structure, part):
            names.append(f"{column}_{part}" if column in names else column)

    def flat_function(**columns: tf.Tensor) -> dict[str, tf.Tensor]:
        return function(tf.nest.pack_sequence_as(specs, [columns[column] for column in names]))

    flat_specs = dict(zip(names, tf.nest.flatten(specs), strict=True))
    return ExportedFunction(name, flat_function, flat_specs, meaning)


def draw_signature(
    name: str,
    function: Callable[..., dict[str, tf.Tensor]],
    meaning: str,
    y_specs: Structure | None = None,
) -> ExportedFunction:
    """Exports a function of a number of draws and a seed.

    Args:
      name: The signature's name.
      function: Takes num, int32, seed, int32 [2], and y if the model has one.
      meaning: A phrase for the model card.
      y_specs: `tf.TensorSpec`s of y, or None without one.
    """
    inputs = {"num": tf.TensorSpec([], tf.int32), "seed": tf.TensorSpec([2], tf.int32)}
    names: list[str] = []
    specs: dict[str, tf.TensorSpec] = {}
    if y_specs is not None:
        columns = flat_names(y_specs, "y")
        names = [f"{column}_y" if column in inputs else column for column in columns]
        specs = dict(zip(names, tf.nest.flatten(y_specs), strict=True))

    def flat_function(num: tf.Tensor, seed: tf.Tensor, **flat: tf.Tensor) -> dict[str, tf.Tensor]:
        if y_specs is None:
            return function(num, seed)
        y = tf.nest.pack_sequence_as(y_specs, [flat[column] for column in names])
        return function(num, seed, y)

    sentence = f"{meaning}. The same `seed` gives the same draws."
    return ExportedFunction(name, flat_function, inputs | specs, sentence)


def named(structure: Structure, single: str) -> dict[str, tf.Tensor]:
    """Returns the parts of a structure by name.

    Args:
      structure: Tensors.
      single: The name of a single tensor.
    """
    return dict(zip(flat_names(structure, single), tf.nest.flatten(structure), strict=True))


def mean_signature(
    function: Callable[[Structure], Structure], inputs: Structure, meaning: str
) -> ExportedFunction:
    """Returns the signature `predict`.

    Args:
      function: Takes records x.
      inputs: `tf.TensorSpec`s of x.
      meaning: A sentence for the model card.
    """

    def predict(records: dict[str, Structure]) -> dict[str, tf.Tensor]:
        return named(function(records["x"]), "mean")

    return record_signature("predict", predict, {"x": inputs}, meaning)


def posterior_signatures(
    model: BayesianModel,
    inputs: dict[str, Structure],
    *,
    posterior: Callable[[], tfd.Distribution],
    predict: Callable[[Structure], tf.Tensor],
    losses: Callable[[Structure, Structure | None], tf.Tensor],
    num_draws: int,
) -> list[ExportedFunction]:
    """Returns draws, and the predictive distribution's mean, samples and density.

    `predict` and `log_prob` use the draws of `DPVI.predict`, from a fixed and public seed.

    Args:
      model: Prior and likelihood.
      inputs: `tf.TensorSpec`s of the records' x and, if any, y.
      posterior: Returns the learned posterior.
      predict: Returns the predictive means of a batch of records.
      losses: Returns negative log predictive densities of a batch of records.
      num_draws: The number of posterior draws of a prediction.
    """
    names = flat_names(model.prior.dtype, "params")

    def sample_posterior(num: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        flat = tf.nest.flatten(posterior_draws(posterior(), num, seed))
        shapes = tf.nest.flatten(model.prior.event_shape_tensor())
        return {
            name: tf.ensure_shape(part, [None, *tf.get_static_value(shape)])
            for name, part, shape in zip(names, flat, shapes, strict=True)
        }

    def log_prob(records: dict[str, Structure]) -> dict[str, tf.Tensor]:
        return {"log_prob": -losses(records["x"], records.get("y"))}

    def sample_predictive(num: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        draw_seed, record_seed = tf.unstack(tfp.random.split_seed(seed, n=2))
        draws = posterior_draws(posterior(), num_draws, draw_seed)
        predictive = PosteriorPredictive(
            lambda params: model.distribution_at(params, None), draws, num_draws
        )
        return named(predictive.sample(num, seed=record_seed), "x")

    over = f"over {num_draws} fixed draws"
    if model.generative:
        meaning = (
            f"synthetic records, each from one of {num_draws} posterior draws, picked at random"
        )
        first = draw_signature("sample_predictive", sample_predictive, meaning)
    else:
        meaning = (
            "posterior predictive mean of each record (class probabilities of a categorical one), "
            f"{over}."
        )
        first = mean_signature(predict, inputs["x"], meaning)
    draws_meaning = "draws of the parameters from the learned posterior"
    density = f"log density of each record under the posterior predictive distribution, {over}."
    return [
        first,
        draw_signature("sample_posterior", sample_posterior, draws_meaning),
        record_signature("log_prob", log_prob, inputs, density),
    ]
