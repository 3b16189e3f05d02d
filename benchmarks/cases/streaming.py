"""Records on disk beside records on the device: the same VAE on images of random bytes."""

from __future__ import annotations

import atexit
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import vae
from harness import Runner

import tfp_dpvi as dpvi
from tfp_dpvi._tf import keras, tf

BYTES, PIXELS = 4_000_000_000, 784


def random_file(size: int) -> pathlib.Path:
    """A file of random bytes that is deleted at the end."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="tfp_dpvi_benchmark_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "records"
    with path.open("wb") as file:
        for begin in range(0, size, 2**24):
            file.write(np.random.default_rng(begin).bytes(min(2**24, size - begin)))
        file.flush()
        os.fsync(file.fileno())
    return path


def forget(path: pathlib.Path) -> None:
    """Takes a file out of the page cache, where the system lets us."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _model() -> dpvi.DPVAE:
    encoder, decoder, prior = vae.dense_parts()
    inputs = keras.Sequential(
        [keras.Input([PIXELS], dtype="uint8"), keras.layers.Rescaling(1 / 255.0), encoder]
    )

    return dpvi.DPVAE(inputs, Decoder(decoder), prior)


class Decoder(keras.Model):
    """Independent normals around grey values, in units of bytes."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def call(self, z: Any) -> Any:
        logits = self.network(z).distribution.logits_parameter()
        normal = vae.tfd.Normal(255.0 * tf.sigmoid(logits), 80.0)
        return vae.tfd.Independent(normal, 1)


def streaming_makers(quick: bool) -> dict[str, Callable[[], Runner]]:
    """4 GB of random bytes as records of 784, batch 256: a memory map with a cold page cache, and 100,000 in memory."""
    size, batch_size, steps, per_call = (200 * PIXELS, 8, 4, 2) if quick else (BYTES, 256, 100, 25)
    path = random_file(size)
    num = size // PIXELS
    resident = (
        np.random.default_rng(0).integers(0, 256, [min(num, 100_000), PIXELS]).astype("uint8")
    )
    mapped = np.memmap(path, dtype="uint8", mode="r", shape=(num, PIXELS))

    def runner(x: Any, stream: bool) -> Runner:
        model = _model()
        optimizer = dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0)
        model.compile(optimizer, steps_per_execution=per_call)
        run, _ = vae.timed(model, per_call, x, batch_size=batch_size, stream=stream)

        def cold(wanted: int) -> float:
            if stream:
                forget(path)
            return 1e-3 * run(wanted) * max(1, wanted)

        return Runner(cold, steps)

    return {
        "tfp_dpvi": lambda: runner(resident, False),
        "tfp_dpvi, from disk": lambda: runner(mapped, True),
    }
