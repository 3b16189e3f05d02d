"""The functions of an exported `DPVAE`: reconstructions and synthetic records."""

from __future__ import annotations

from typing import Any

from tfp_dpvi._tf import Structure, tf, tfp
from tfp_dpvi.bayes.predictive import mean_of
from tfp_dpvi.export import ExportedFunction
from tfp_dpvi.models.exporting import draw_signature, named, record_signature


def of_autoencoder(model: Any, inputs: dict[str, Structure]) -> list[ExportedFunction]:
    """Returns the functions of a `DPVAE`: reconstructions and synthetic records."""

    def sample_predictive(
        num: tf.Tensor, seed: tf.Tensor, y: Structure | None = None
    ) -> dict[str, tf.Tensor]:
        code_seed, record_seed = tf.unstack(tfp.random.split_seed(seed, n=2))
        return named(model._generated(num, y, code_seed).sample(seed=record_seed), "x")

    def predict(records: dict[str, Structure]) -> dict[str, tf.Tensor]:
        return named(
            model.call((records["x"], records["y"]) if "y" in records else records["x"]), "mean"
        )

    def encode(records: dict[str, Structure]) -> dict[str, tf.Tensor]:
        posterior = model.encode(*records.values())
        try:
            return {"mean": mean_of(posterior), "stddev": posterior.stddev()}
        except NotImplementedError:
            return {"mean": mean_of(posterior)}

    def decode(given: dict[str, Structure]) -> dict[str, tf.Tensor]:
        return named(
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
        draw_signature("sample_predictive", sample_predictive, drawn, inputs.get("y")),
        record_signature("predict", predict, inputs, meaning),
        record_signature("encode", encode, inputs, coded),
        record_signature("decode", decode, {**beside, "z": latent}, decoded),
    ]
