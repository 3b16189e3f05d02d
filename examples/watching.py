"""A private fit in TensorBoard: privacy spent, privatised metrics, and the surrogate posterior.

    python examples/watching.py [--logs DIR] [--browser chromium] [--quick]

Bayesian logistic regression on Adult (one-hot) at epsilon 1, delta 1e-5, with `PrivateELBO`, `PrivateClippedFraction` and
`PrivacyTensorBoard`. Then `tensorboard --logdir DIR` shows the run; with `--browser` a headless Chromium takes its pictures.
Columns are standardised with exact statistics of the records, which the report does not cover.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import subprocess
import sys
import time
import urllib.request
from typing import Any

import numpy as np
from data import load_adult

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfp

tfd = tfp.distributions
PORT = 6016
PAGES = {"scalars": 1320, "histograms": 480}  # And their heights.


def load(num: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns Adult with standardised numeric columns."""
    table = load_adult("one_hot")
    numeric = np.array(["=" not in name for name in table.feature_names])
    mean = np.where(numeric, table.x.mean(axis=0), 0.0)
    std = np.where(numeric, table.x.std(axis=0), 1.0)
    return ((table.x - mean) / std).astype("float32")[:num], table.y[:num]


def fit(x: np.ndarray, y: np.ndarray, logs: pathlib.Path, epochs: int) -> tuple[Any, Any]:
    """Returns the model and its history."""
    prior = tfd.JointDistributionNamed(
        {"w": tfd.Sample(tfd.Normal(0.0, 4.0), sample_shape=x.shape[1])}
    )
    model = dpvi.DPVI(
        prior,
        lambda params, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"])),
        clipping="flat",
    )
    model.compile(
        dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0, learning_rate=0.02),
        epsilon=1.0,
        delta=1e-5,
        metrics=[
            dpvi.metrics.PrivateELBO(low=-4.0, high=0.0),
            dpvi.metrics.PrivateClippedFraction(),
        ],
    )
    board = dpvi.callbacks.PrivacyTensorBoard(logs)
    history = model.fit(x, y, batch_size=512, epochs=epochs, verbose=2, callbacks=[board])
    return model, history


def pictures(logs: pathlib.Path, browser: str, folder: pathlib.Path) -> None:
    """Takes pictures of TensorBoard's pages in a headless browser, except the time series, which needs WebGL."""
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        logs.name,
        "--port",
        str(PORT),
        "--load_fast=false",
    ]
    # Started in the folder, since the page shows the path argument.
    server = subprocess.Popen(
        command, cwd=logs.resolve().parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(120):
            try:
                tags = urllib.request.urlopen(
                    f"http://localhost:{PORT}/data/plugin/scalars/tags", timeout=5
                ).read()
                if b"epsilon_spent" in tags:
                    break
            except OSError:
                pass
            time.sleep(1)
        else:
            raise RuntimeError("TensorBoard did not start.")
        for page, height in PAGES.items():
            subprocess.run(
                [
                    browser,
                    "--headless",
                    "--no-sandbox",
                    "--disable-gpu",
                    "--hide-scrollbars",
                    f"--window-size=1400,{height}",
                    "--virtual-time-budget=60000",
                    f"--screenshot={folder / page}.png",
                    f"http://localhost:{PORT}/?_smoothingWeight=0#{page}",
                ],
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
    finally:
        server.terminate()
        server.wait()


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Fits, writes event files and JSON, and takes pictures if it can."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logs", type=pathlib.Path, default=pathlib.Path("logs"))
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("docs/figures/tensorboard")
    )
    parser.add_argument("--browser", help="Chromium's command")
    parser.add_argument(
        "--quick", action="store_true", help="few records and epochs: a test of the script"
    )
    options = parser.parse_args(arguments)
    x, y = load(2000 if options.quick else None)
    model, history = fit(x, y, options.logs, epochs=3 if options.quick else 30)
    report = model.privacy_report()
    print(report)
    result = {
        "history": history.history,
        "privacy_report": report.to_json(),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "system": platform.system(),
        },
        "versions": {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "tfp": tfp.__version__,
        },
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "tensorboard.json").write_text(json.dumps(result, indent=1) + "\n")
    if options.browser:
        pictures(options.logs, options.browser, options.output.resolve())
    print(
        f"watching: epsilon {report.epsilon:.4f} private_elbo {history.history['private_elbo'][-1]:.4f}"
    )
    return result


if __name__ == "__main__":
    main()
