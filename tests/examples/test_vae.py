"""`examples/vae.py` at a small size."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("vae_example", EXAMPLES / "vae.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "network"), [("mnist", "dense"), ("fashion_mnist", "convolutional")]
)
def test_it_trains_draws_and_says_what_was_spent(example, tmp_path, capsys, data, network):
    result = example.main(
        ["--quick", "--data", data, "--network", network, "--output", str(tmp_path)]
    )
    last = capsys.readouterr().out.strip().splitlines()[-1]
    found = re.fullmatch(
        rf"vae: {data} {network} negative-elbo (\d+\.\d+) non-private (\d+\.\d+) epsilon (\d\.\d+) delta 1e-05 seconds \S+",
        last,
    )
    assert found, last
    saved = json.loads((tmp_path / f"vae_{data}_{network}.json").read_text())
    assert float(found[1]) == pytest.approx(
        saved["scores"]["recommended"]["negative_elbo"], abs=0.006
    )
    assert 1.98 <= saved["report"]["epsilon"] <= 2.0
    assert saved["report"]["private"]
    # Untrained, grey: 784 log 2 = 543 nats.
    assert 50 < float(found[2]) < 543
    assert result["network"] == network
    for picture in ("reconstructions", "samples", "latent"):
        assert (tmp_path / f"{picture}_{data}_{network}.png").read_bytes().startswith(b"\x89PNG")


def test_the_dense_network_is_the_literatures(example):
    encoder, decoder, prior = example.dense_networks()
    assert encoder.count_params() + decoder.count_params() == 688_884
    assert prior.event_shape == [50]


@pytest.mark.slow
def test_the_study_counts_seeds_and_variants(example, tmp_path, capsys):
    example.main(["--study", "--quick", "--output", str(tmp_path)])
    saved = json.loads((tmp_path / "vae_study.json").read_text())["study"]
    assert len(saved["recommended"]["scores"]) == len(saved["d3p"]["scores"]) == 1
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith("vae study: recommended ")
