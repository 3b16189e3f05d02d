"""`dpvi.rehearse`: it predicts what real fits give, spends nothing, and goes on where it stopped."""

from __future__ import annotations

import json

import numpy as np
import pytest

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.rehearsal.replicates import Replicate, Replicates
from tfp_dpvi.rehearsal.simulated import Truth, make_inputs

NUM = 1000
BUDGET = {"epsilon": 1.0, "delta": 1e-5}
PUBLIC = np.random.default_rng(0).normal(size=(400, 1)).astype("float32")


def make_model(scale=1.0, **settings):
    prior = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, scale), 1)})
    return dpvi.DPVI(
        prior,
        lambda params, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"]), dtype=tf.float32),
        **settings,
    )


def rehearsed(model=None, **changes):
    settings = {
        "num_records": NUM,
        **BUDGET,
        "truth": {"w[0]": 1.0},
        "num": 7,
        "public_inputs": PUBLIC,
        "verbose": 0,
    }
    return dpvi.rehearse(model or make_model(), PUBLIC, **{**settings, **changes})


@pytest.fixture(scope="module")
def both():
    """One rehearsal with two epsilons, and the model that it was of."""
    model = make_model()
    return model, rehearsed(model, epsilon=[0.1, 1.0])


def real_widths(num):
    """Widths of real fits to data sets of other seeds, one model and one trace for all of them."""
    first = make_model(seed=1)
    first.compile(**BUDGET)
    data = [make_data(seed) for seed in range(100, 100 + num)]
    first.fit(*data[0], public_inputs=PUBLIC, verbose=0)
    model = make_model(seed=2)
    model.compile(noise_multiplier=first.privacy_plan.noise_multiplier, delta=1e-5)
    widths = []
    for x, y in data:
        model.fit(x, y, public_inputs=PUBLIC, verbose=0)
        columns = model.posterior_summary().columns
        widths.append(columns["95%"][0] - columns["5%"][0])
    return np.array(widths)


def make_data(seed):
    generator = np.random.default_rng(seed)
    x = PUBLIC[generator.integers(len(PUBLIC), size=NUM)]
    y = (generator.random(NUM) < 1.0 / (1.0 + np.exp(-x[:, 0]))).astype("float32")
    return x, y


@pytest.mark.slow
def test_it_predicts_the_widths_of_real_fits(both):
    _, rehearsal = both
    widths = real_widths(7)
    predicted = {epsilon: rehearsal.columns(NUM, epsilon)["width"][0] for epsilon in (0.1, 1.0)}
    assert np.median(widths) == pytest.approx(predicted[1.0], rel=0.15)
    # Planted: the noise of another budget is seen.
    assert np.median(widths) != pytest.approx(predicted[0.1], rel=0.15)


@pytest.mark.slow
def test_it_shows_power_and_curves_and_spends_nothing(both):
    model, rehearsal = both
    columns = rehearsal.columns(NUM, 1.0)
    assert columns["truth"].tolist() == [1.0]
    assert 0.15 < columns["width"][0] < 1.5
    assert columns["power"][0] == 1.0
    assert rehearsal.columns(NUM, 0.1)["width"][0] > 1.5 * columns["width"][0]
    assert model.privacy_ledger.num_releases == 0
    table = rehearsal.table()
    assert table.loc[(NUM, 1.0, "w[0]"), "width"] == columns["width"][0]
    assert "1,000 records, epsilon 1, delta 1e-05: 7 simulated data sets" in str(rehearsal)


@pytest.mark.slow
def test_epsilons_share_data_sets_and_a_fit_does_not_depend_on_those_before(both):
    _, rehearsal = both
    rows = rehearsal.rows[NUM, 1.0]
    alone = rehearsed(num=2).rows[NUM, 1.0]
    np.testing.assert_allclose(
        [row["mean"] for row in alone], [row["mean"] for row in rows[:2]], atol=1e-4
    )


def made_up(self, x, y, seed, mechanism=None):
    """A fit in place of a real one: draws that follow from its seed, data and noise."""
    mean = np.mean(x if y is None else y)
    draws = np.random.default_rng(seed).normal(mean, mechanism.noise_multiplier, [50, 1])
    return Replicate(draws, None, 0.0, 0.0)


def test_an_interrupted_rehearsal_goes_on(tmp_path, monkeypatch):
    path, fitted = tmp_path / "rehearsal.json", []

    def interrupted(*arguments):
        if len(fitted) == 3:
            raise KeyboardInterrupt
        fitted.append(arguments)
        return made_up(*arguments)

    monkeypatch.setattr(Replicates, "fit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rehearsed(num=4, epsilon=[0.5, 1.0], path=path)
    kept = json.loads(path.read_text())["rows"]
    assert [len(kept[f"{NUM}, {epsilon}"]) for epsilon in (0.5, 1.0)] == [2, 1]
    monkeypatch.setattr(Replicates, "fit", made_up)
    whole = rehearsed(num=4, epsilon=[0.5, 1.0], path=path).rows
    assert [len(rows) for rows in whole.values()] == [4, 4]
    assert whole[NUM, 0.5][1] == kept[f"{NUM}, 0.5"]["1"]

    def refused(*arguments):
        raise AssertionError("a fit that the file has ran again")

    monkeypatch.setattr(Replicates, "fit", refused)
    assert rehearsed(num=4, epsilon=[0.5, 1.0], path=path).rows == whole
    for change in ({"seed": 1}, {"level": 0.8}, {"truth": {"w[0]": 0.5}}):
        with pytest.raises(ValueError, match="has fits with another"):
            rehearsed(num=3, path=path, **change)
    path.write_text("no JSON")
    with pytest.raises(ValueError, match="no file of a rehearsal"):
        rehearsed(num=3, path=path)


def test_another_model_or_other_inputs_are_not_mixed_into_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(Replicates, "fit", made_up)
    path = tmp_path / "rehearsal.json"
    rehearsed(num=2, path=path)
    for change in ({"model": make_model(2.0)}, {"public_inputs": 2.0 * PUBLIC}):
        with pytest.raises(ValueError, match="another model, inputs or bounds"):
            rehearsed(num=2, path=path, **change)


def test_models_of_whole_records_and_dicts_of_inputs(monkeypatch):
    monkeypatch.setattr(Replicates, "fit", made_up)
    settings = {"num_records": 50, **BUDGET, "num": 2, "verbose": 0}
    whole = dpvi.DPVI(tfd.Normal(0.0, 1.0), lambda params: tfd.Normal(params, 1.0))
    whole.compile(**BUDGET, neighboring_relation="replace_one")
    rehearsal = dpvi.rehearse(whole, truth=0.3, **settings)
    assert rehearsal.fixed == {"parameter": 0.3}
    with pytest.raises(ValueError, match="inputs were passed"):
        dpvi.rehearse(whole, PUBLIC, **settings)
    named = dpvi.DPVI(tfd.Normal(0.0, 1.0), lambda w, x: tfd.Normal(w * x["a"], 1.0))
    rehearsal = dpvi.rehearse(named, {"a": np.ones(30, "float32")}, **settings)
    # A fit without a posterior counts as one that failed.
    assert rehearsal.warned(50, 1.0) == 1.0


def test_what_does_not_fit_is_refused_before_a_fit(tmp_path):
    compiled = make_model()
    compiled.compile("adam", l2_norm_clip=1.0, **BUDGET)
    cases = [
        ({"model": compiled}, "compiled with an optimizer"),
        ({"truth": {"v": 1.0}}, "truth names 'v', which is no parameter: use w"),
        ({"truth": {"w": [1.0, 2.0]}}, "must be 1 finite numbers"),
        ({"num_records": []}, "at least one number"),
        ({"level": 1.0}, "level=1.0 has no finite interval"),
        ({"num": 1}, "num=1 must be at least 2"),
        ({"path": tmp_path / "none" / "file.json"}, "its folder does not exist"),
    ]
    for changes, message in cases:
        with pytest.raises(ValueError, match=message) as raised:
            rehearsed(**changes)
        assert len(str(raised.value).splitlines()) <= 2
    with pytest.raises(TypeError, match="is no DPVI"):
        dpvi.rehearse("model", PUBLIC, num_records=NUM, **BUDGET)


def test_a_truth_of_a_scale_reaches_what_depends_on_it():
    prior = tfd.JointDistributionNamed(
        {
            "scale": tfd.HalfNormal(1.0),
            "group": lambda scale: tfd.Sample(tfd.Normal(0.0, scale), 200),
        }
    )
    seed = np.array([1, 2], np.int32)
    narrow = Truth(prior, {"scale": 1e-3, "group[3]": 5.0})(seed)
    assert float(narrow["scale"]) == pytest.approx(1e-3)
    assert float(narrow["group"][3]) == 5.0
    others = np.delete(np.asarray(narrow["group"]), 3)
    assert 5e-4 < others.std() < 2e-3
    with pytest.raises(ValueError, match="the prior has no density"):
        Truth(prior, {"scale": -1.0})


def test_rows_of_public_inputs_are_drawn_with_replacement():
    inputs = make_inputs({"a": np.arange(5.0), "b": np.arange(5)})
    drawn = inputs(1000, 1)
    np.testing.assert_array_equal(drawn["a"], drawn["b"])
    assert set(drawn["b"].tolist()) == set(range(5))
    with pytest.raises(ValueError, match="same number of rows"):
        make_inputs({"a": np.arange(5.0), "b": np.arange(4)})
