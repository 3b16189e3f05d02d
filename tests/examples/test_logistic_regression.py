"""The study of Adult and Abalone at a small size."""

import importlib.util
import json
import os
import pathlib
import sys

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

pytestmark = pytest.mark.skipif(
    not pathlib.Path(os.environ.get("TFP_DPVI_DATA", ""), "adult").is_dir(),
    reason="no real data: TFP_DPVI_DATA names no folder with them",
)


@pytest.fixture(scope="module")
def study():
    path = pathlib.Path(__file__).parents[2] / "examples" / "logistic_regression.py"
    spec = importlib.util.spec_from_file_location("examples_logistic_regression", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # Dataclasses look their module up.
        spec.loader.exec_module(module)
        yield module


@pytest.mark.slow
def test_quick_run(study, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(study.tf.get_logger(), "level", 0)  # The script lowers it for its own run.
    result = study.main(["--quick", "--data", "abalone", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "Figure 1: accuracy over epsilon" in printed
    assert "non-private: scikit-learn 0." in printed
    written = json.loads((tmp_path / "logistic_regression.json").read_text())
    assert written["settings"] == result["settings"]
    assert set(written["figures"]) == {"epsilon", "sampling", "clip"}
    for figure in written["figures"].values():
        for point in figure["abalone"]:
            assert 0.9 < point["epsilon_spent"] <= point["epsilon"] == 1.0
            assert 0.4 < point["mean"] <= 1.0
            assert point["standard_error"] >= 0.0
            assert len(point["scores"]) == 2
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "figure_1_epsilon.png",
        "figure_2_sampling.png",
        "figure_3_clip.png",
    ]


@pytest.mark.parametrize(
    ("data", "width"), [("adult_ordinal", 14), ("adult_one_hot", 108), ("abalone", 8)]
)
def test_splits(study, data, width):
    x, y, x_test, y_test = study.load(data, 0)
    table = study.read(data)
    assert x.shape[1] == x_test.shape[1] == width
    assert len(y) == int(0.8 * len(table.y))
    assert len(y) + len(y_test) == len(table.y)
    assert y.sum() + y_test.sum() == table.y.sum()
    numeric = np.array(["=" not in name for name in table.feature_names])
    np.testing.assert_allclose(x[:, numeric].mean(axis=0), 0.0, atol=1e-2)
    np.testing.assert_allclose(x[:, numeric].std(axis=0), 1.0, rtol=1e-3)
    assert set(np.unique(x[:, ~numeric])) <= {0.0, 1.0}
    assert not np.array_equal(y, study.load(data, 1)[1])


def test_points_of_the_paper(study):
    adult = study.PAPER["epsilon"]["adult_ordinal"]
    assert (0.1459, 0.1459, 0.7478) in adult
    assert (0.2770, 0.2770, 0.8079) in adult
    assert (0.1683, 5.0, 0.7476) in study.PAPER["clip"]["abalone"]
    for figure in study.PAPER.values():
        for points in figure.values():
            assert all(0.7 < score < 0.83 for _, _, score in points)
