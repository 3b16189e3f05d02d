"""The signatures of an exported `DPVAE`: reconstructions, codes and synthetic records."""

from __future__ import annotations

from tfp_dpvi._tf import Structure, tf, tfp
from tfp_dpvi.bayes.predictive import mean_of
from tfp_dpvi.export import ExportedFunction
from tfp_dpvi.models.exporting import draw_signature, named, record_signature
from tfp_dpvi.networks.autoencoder import Autoencoder


def autoencoder_signatures(
    autoencoder: Autoencoder, inputs: dict[str, Structure]
) -> list[ExportedFunction]:
    """Returns the functions of an exported `DPVAE`.

    Args:
      autoencoder: The trained networks.
      inputs: Specs of a batch of records, {"x": ...} with "y" if the model is of p(x | y).

    Returns:
      `sample_predictive`, `predict`, `encode` and `decode`.
    """

    def sample_predictive(
        num: tf.Tensor, seed: tf.Tensor, y: Structure | None = None
    ) -> dict[str, tf.Tensor]:
        code_seed, record_seed = tf.unstack(tfp.random.split_seed(seed, n=2))
        distribution = autoencoder.synthetic_distribution(num, y, code_seed)
        return named(distribution.sample(seed=record_seed), "x")

    def predict(records: dict[str, Structure]) -> dict[str, tf.Tensor]:
        return named(autoencoder.reconstruct(records["x"], records.get("y")), "mean")

    def encode(records: dict[str, Structure]) -> dict[str, tf.Tensor]:
        posterior = autoencoder.encode(records["x"], records.get("y"))
        try:
            return {"mean": mean_of(posterior), "stddev": posterior.stddev()}
        except NotImplementedError:
            return {"mean": mean_of(posterior)}

    def decode(codes: dict[str, Structure]) -> dict[str, tf.Tensor]:
        return named(mean_of(autoencoder.decode(codes["z"], codes.get("y"))), "mean")

    record = tf.nest.map_structure(lambda spec: tf.zeros([1, *spec.shape[1:]], spec.dtype), inputs)
    posterior = autoencoder.encode(record["x"], record.get("y"))
    latent = tf.TensorSpec([None, *posterior.event_shape], posterior.dtype)
    beside_x = {name: spec for name, spec in inputs.items() if name != "x"}
    synthetic = "synthetic records: draws from the prior, decoded"
    if "y" in inputs:
        synthetic += ", given `y` with one row for each of the `num` records or one for all"
    return [
        draw_signature("sample_predictive", sample_predictive, synthetic, inputs.get("y")),
        record_signature(
            "predict",
            predict,
            inputs,
            "reconstruction of each record: the decoder's mean at the encoder's mean. "
            "It reveals the record.",
        ),
        record_signature(
            "encode",
            encode,
            inputs,
            "the encoder's mean of each record's code, and its standard deviation, if any. "
            "They reveal the record.",
        ),
        record_signature(
            "decode",
            decode,
            {**beside_x, "z": latent},
            "the decoder's mean at each code z, in the shape of records.",
        ),
    ]
