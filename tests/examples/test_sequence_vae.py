"""`examples/sequence_vae.py` at a small size."""

from __future__ import annotations

import importlib.util
import json
import pathlib

import pytest

PATH = pathlib.Path(__file__).parents[2] / "examples" / "sequence_vae.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("sequence_vae_example", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_text_becomes_tokens_and_back(example):
    tokens = example.as_tokens(["Return it!", "a very long line"], 8)
    assert example.as_text(tokens) == ["eturn it", "a very l"]
    assert len(example.docstrings(50)) == 50


@pytest.mark.slow
def test_it_trains_and_says_what_was_spent(example, capsys):
    result = example.main(["--quick"])
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1]) == result
    assert 7.9 <= result["epsilon"] <= 8.0
    assert 0 < result["negative_elbo"] < 100
    assert len(result["drawn"]) == 4
