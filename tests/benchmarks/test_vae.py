"""The benchmark of the VAE at a size that measures nothing."""

import importlib.util
import json
import pathlib
import sys

import pytest

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def benchmark():
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "vae.py"
    spec = importlib.util.spec_from_file_location("benchmarks_vae", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")  # The script sets it for its own run.
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


@pytest.mark.slow
def test_quick_run(benchmark, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(benchmark.tf.get_logger(), "level", 0)  # Likewise.
    benchmark.main(["--quick", "--output", str(tmp_path)])
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == json.loads((tmp_path / "vae.json").read_text())
    assert printed["failed"] == {}
    # Without TensorFlow Privacy, which the current TensorFlow does not have, its ratio is None.
    missing = (
        set() if benchmark.harness.HAS_TENSORFLOW_PRIVACY else {"tensorflow_privacy_over_private"}
    )
    measured = set(benchmark.RATIOS) - missing
    assert all(printed[name] > 0 for name in [*measured, "memory_over_nonprivate_at_4096"])
    assert all(printed[name] is None for name in missing)
    assert set(printed["spread"]) == measured
    assert printed["quick"]
    assert (tmp_path / "vae.png").stat().st_size > 10_000


def test_ratios_are_of_the_rounds_that_have_both(benchmark):
    medians, spreads = benchmark.ratios(
        {
            "non-private": [1.0, 2.0, 4.0],
            "private": [2.0, 2.0, 6.0],
            "TensorFlow Privacy": [20.0, 40.0],
        }
    )
    assert medians["private_over_nonprivate"] == 1.0
    assert spreads["private_over_nonprivate"]["all"] == [2.0, 1.0, 1.5]
    assert medians["tensorflow_privacy_over_private"] == 15.0
    assert medians["vectorized_over_private"] is None
    assert "vectorized_over_private" not in spreads
