"""Persons with several rows as the unit of privacy: one clip, one twin, one record of the accounting each."""

import contextlib
import dataclasses
import functools
import json
import logging
from unittest import mock

import numpy as np
import pytest
from support.siblings import slow

import tfp_dpvi as dpvi
from tfp_dpvi import audit
from tfp_dpvi._tf import tf, tfp
from tfp_dpvi.calibrated import scored
from tfp_dpvi.data import units

tfd = tfp.distributions


def logistic(params, x):
    return tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"]), dtype=tf.float32)


def linear(params, x):
    return tfd.Normal(tf.linalg.matvec(x, params["w"]), params["scale"])


def linear_intercept(params, x):
    mean = tf.linalg.matvec(x, params["w"])
    return dpvi.local.unit_normal(mean, params["scale"], params["sd"])


def logistic_intercept(params, x):
    score = tf.linalg.matvec(x, params["w"])
    return dpvi.local.unit_quadrature(
        lambda z: tfd.Bernoulli(logits=score[:, None] + params["sd"] * z, dtype=tf.float32),
        num_points=8,
    )


def counts_intercept(params, x):
    score = tf.linalg.matvec(x, params["w"])
    return dpvi.local.unit_quadrature(
        lambda z: tfd.Poisson(log_rate=score[:, None] + params["sd"] * z), num_points=8
    )


LIKELIHOODS = {
    each.__name__: each
    for each in (logistic, linear, linear_intercept, logistic_intercept, counts_intercept)
}


def prior_of(likelihood):
    parts = {"w": tfd.Sample(tfd.Normal(0.0, 1.0), 2)}
    if "linear" in likelihood.__name__:
        parts["scale"] = tfd.HalfNormal(1.0)
    if "intercept" in likelihood.__name__:
        parts["sd"] = tfd.HalfNormal(1.0)
    return tfd.JointDistributionNamed(parts)


def persons(num=12, most=3, seed=0):
    """Inputs, outcomes 0 and 1, and identifiers, in no order."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, most + 2, num)
    ids = rng.permutation(np.repeat(np.arange(num) + 100, sizes))
    x = rng.normal(size=(len(ids), 2)).astype("float32")
    return x, (x[:, 0] > 0).astype("float32"), ids


def compiled(likelihood, optimizer=None, **settings):
    model = dpvi.DPVI(prior_of(likelihood), likelihood, seed=settings.pop("seed", None), **settings)
    model.compile(optimizer, epsilon=1.0, delta=1e-5)
    return model


def sgd():
    return dpvi.optimizers.DPKerasSGDOptimizer(l2_norm_clip=0.5)


# ---------------------------------------------------------------------- what a person can do

ENGINES = {
    "centred": {},
    "paired": {"optimizer": True},
    "flat": {"optimizer": True, "clipping": "flat"},
}


def replay(likelihood="logistic", engine="centred", **settings):
    settings = {"max_rows_per_unit": 3, "seed": 3, "num_steps": 1, **settings}
    options = dict(ENGINES[engine])
    optimizer = sgd() if options.pop("optimizer", False) else None
    model = compiled(LIKELIHOODS[likelihood], optimizer, **options)
    x, y, ids = persons()
    return audit.replay(model, x, y, unit_ids=ids, **settings)


@pytest.mark.parametrize(
    ("likelihood", "engine"),
    [
        ("logistic", "centred"),
        slow("linear", "centred"),
        slow("linear_intercept", "centred"),
        ("logistic_intercept", "centred"),
        slow("counts_intercept", "centred"),
        slow("logistic", "paired"),
        ("logistic", "flat"),
        slow("logistic_intercept", "flat"),
    ],
)
def test_replay_of_neighbours_that_differ_in_a_person(likelihood, engine):
    """C3, C8: all rows of a person removed, and replaced by extreme ones, within the statement."""
    result = replay(likelihood, engine)
    assert result.holds, result
    assert result.attained > 0.5


class Linear(dpvi.DPModel):
    """A linear loss: a row's gradient is the row times its y, if there is one."""

    def __init__(self):
        super().__init__()
        self.v = self.add_weight("v", [2], initializer="zeros")
        self.built = True

    def record_loss(self, x, y=1.0):
        return y * tf.reduce_sum(self.v * x)


@pytest.mark.parametrize("outcomes", [False, True])
def test_a_model_of_ones_own_sums_a_persons_rows_before_the_clip(outcomes):
    """The clipped sum against one person at a time, and the replay: a person moves it by one clip."""
    x, y, ids = persons(num=6)
    rows = (x, y) if outcomes else (x,)
    model = Linear()
    model.compile(sgd(), epsilon=1.0, delta=1e-5)
    settings = {"unit_ids": ids, "max_rows_per_unit": 3, "rows_beyond": "first"}
    step = audit.observed.ObservedStep(model, *rows, num_steps=None, **settings)
    found = step.all_values(np.array([1, 2]), 1, noise=0.0)[0]
    weighted = x * (y[:, None] if outcomes else 1.0)
    expected = np.zeros(2)
    for each in np.unique(ids):
        own = weighted[ids == each][:3].sum(axis=0)
        expected += own * min(1.0, 0.5 / np.linalg.norm(own)) if own.any() else 0.0
    np.testing.assert_allclose(found, expected / 0.5, rtol=1e-5, atol=1e-6)
    result = audit.replay(model, *rows, num_steps=1, **settings)
    assert result.holds, result
    assert result.attained == pytest.approx(1.0, abs=1e-4)


@contextlib.contextmanager
def clipped_by_row():
    """Each row is a record of the clip: a person with 3 rows moves the sum by up to 3 clips."""
    genuine = scored.model_scores

    def by_row(place, records, mask, key, **settings):
        most = records["x"].mask.shape[1]

        def apart(part):
            return tf.reshape(part, [-1, 1, *part.shape[2:]])

        rows = tf.nest.map_structure(apart, records)
        mask = tf.repeat(mask, most) & tf.reshape(records["x"].mask, [-1])
        return genuine(place, rows, mask, key, **settings)

    with mock.patch.object(scored, "model_scores", by_row):
        yield


@contextlib.contextmanager
def in_two_units():
    """Every other row of a person goes to a second unit."""
    genuine = units.person_numbers

    def split(unit_ids, num_rows, name="unit_ids"):
        codes = genuine(unit_ids, num_rows, name)
        return np.unique(2 * codes + np.arange(num_rows) % 2, return_inverse=True)[1]

    with mock.patch.object(units, "person_numbers", split):
        yield


@pytest.mark.parametrize("fault", [clipped_by_row, in_two_units])
def test_a_planted_fault_is_found(fault):
    with fault():
        result = replay()
    assert not result.holds, result


def attacked(**settings):
    x, _, ids = persons()
    model = Linear()
    model.compile(sgd(), epsilon=1.0, delta=1e-5, **settings)
    persons_of = {"unit_ids": ids.astype(str), "max_rows_per_unit": 3}
    return audit.lower_bound(model, x, seed=1, num_runs=3000, **persons_of)


def test_an_attack_on_persons():
    """Canaries are persons with all rows they may have: below epsilon, and above it by a fault."""
    honest = attacked()
    assert honest.reach == pytest.approx(1.0, abs=1e-3)
    assert 0.5 < honest.epsilon < honest.claimed, honest
    with in_two_units():
        result = attacked()
    assert result.contradicted, result
    assert result.reach > 1.5


@pytest.mark.slow
def test_an_attack_on_replaced_persons():
    result = attacked(neighboring_relation="replace_one")
    assert 0.5 < result.epsilon < result.claimed, result


@pytest.mark.slow
def test_an_attack_on_a_calibrated_fit_that_clips_rows():
    x, y, ids = persons()
    settings = {"unit_ids": ids, "max_rows_per_unit": 3, "seed": 1, "num_runs": 3000}
    with clipped_by_row():
        assert audit.lower_bound(compiled(logistic), x, y, **settings).contradicted


def test_a_bad_row_takes_its_person_out():
    """C8: one row that is not finite, and the person contributes exactly zero."""
    model = compiled(logistic)
    x, y, ids = persons()
    values = []
    for bad in (False, True):
        own = ids == ids[0]
        records = x.copy()
        if bad:
            records[np.flatnonzero(own)[:1]] = np.nan
        step = audit.observed.ObservedStep(
            model, records, y, num_steps=None, unit_ids=ids, max_rows_per_unit=9
        )
        keep = np.ones(step.num_rows, bool)
        keep[0] = bad
        values.append(step.all_values(np.array([1, 2]), 1, noise=0.0, keep=keep))
    assert np.array_equal(*values)
    assert np.isfinite(values).all()


# ---------------------------------------------------------------------- accounting and report


@functools.cache
def fitted():
    model = compiled(logistic, seed=1)
    x, y, ids = persons(num=200)
    model.fit(x, y, unit_ids=ids, max_rows_per_unit=3, verbose=0)
    return model


def test_the_report_speaks_of_persons():
    """Unit, m and how rows were chosen; never how many were left out. N is the number of persons."""
    report = fitted().privacy_report()
    saved = json.loads(json.dumps(report.to_json()))
    assert report.num_records == 200
    assert saved["unit"] == "person"
    assert saved["releases"][0]["person"] == {"max_rows": 3, "rows_beyond": "random"}
    text = " ".join(str(report).split())
    for words in (
        "one person, with all rows of this person",
        "at most 3 rows of each person; of persons with more, 3 chosen at random",
        "how many rows were left out is not shown",
        "the number of persons, 200",
        "each person's contribution, of all rows together, clipped",
        "full batches: every person",
        "covariates and number of rows were fixed before the outcomes",
    ):
        assert words in text, words
    left_out = persons(num=200)[2]
    left_out = int(np.maximum(np.unique(left_out, return_counts=True)[1] - 3, 0).sum())
    assert left_out > 0
    assert f" {left_out} " not in text
    replaced = dataclasses.replace(report, neighboring_relation="replace_one")
    assert "one person's whole record, all rows, replaced" in " ".join(str(replaced).split())


def test_persons_and_rows_do_not_share_a_ledger():
    """A row's guarantee and a person's do not compose: the second fit is refused, and nothing is spent."""
    ledger = dpvi.PrivacyLedger()
    x, y, ids = persons()
    model = compiled(logistic, sgd(), clipping="flat")
    model.set_ledger(ledger)
    model.compile(sgd(), epsilon=1.0, delta=1e-5, planned_epochs=2)
    model.fit(x, y, unit_ids=ids, max_rows_per_unit=3, verbose=0)
    spent = ledger.num_releases
    with pytest.raises(dpvi.privacy.UnsupportedPairError, match="unit_ids to all fits"):
        model.fit(x, y, verbose=0)
    assert ledger.num_releases == spent
    again = dpvi.PrivacyPlan.from_json(json.loads(json.dumps(model.privacy_plan.to_json())))
    assert again == model.privacy_plan
    assert again.person == dpvi.privacy.PersonUnit(3)


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unit_ids": "ids"}, "max_rows_per_unit is missing"),
        ({"max_rows_per_unit": 3}, "max_rows_per_unit without unit_ids"),
        ({"unit_ids": "ids", "max_rows_per_unit": 0}, "max_rows_per_unit=0"),
        ({"unit_ids": "floats", "max_rows_per_unit": 3}, "no identifier"),
        ({"unit_ids": "short", "max_rows_per_unit": 3}, "one identifier for each"),
        ({"unit_ids": "ids", "max_rows_per_unit": 3, "rows_beyond": "last"}, "rows_beyond='last'"),
        (
            {"unit_ids": "ids", "max_rows_per_unit": 3, "weight": True},
            "sample_weight with unit_ids",
        ),
        (
            {"unit_ids": "ids", "max_rows_per_unit": 3, "sampling": "poisson_of_shards"},
            "cannot be grouped",
        ),
        (
            {"unit_ids": "ids", "max_rows_per_unit": 3, "public": "rows"},
            "public_unit_ids is missing",
        ),
        ({"public": "persons"}, "public_unit_ids need public_inputs, and unit_ids"),
    ],
)
def test_a_call_that_is_refused_spends_nothing(settings, message):
    x, y, ids = persons()
    settings = dict(settings)
    kinds = {"ids": ids, "floats": ids.astype(float), "short": ids[1:]}
    if "unit_ids" in settings:
        settings["unit_ids"] = kinds[settings["unit_ids"]]
    if settings.pop("weight", False):
        settings["sample_weight"] = np.ones(len(x))
    public = settings.pop("public", None)
    if public:
        settings["public_inputs"] = x
    if public == "persons":
        settings["public_unit_ids"] = ids
    model = compiled(logistic)
    with pytest.raises((ValueError, TypeError), match=message) as error:
        model.fit(x, y, verbose=0, **settings)
    assert len(str(error.value).splitlines()) <= 2
    assert model.num_releases == 0


def test_units_in_validation_data_are_refused():
    x, y, ids = persons()
    model = compiled(logistic, sgd(), clipping="flat")
    with pytest.raises(ValueError, match="validation_data with unit_ids"):
        model.fit(
            x, y, unit_ids=ids, max_rows_per_unit=3, validation_data=(x, y),
            validation_is_public=True, verbose=0,
        )  # fmt: skip
    assert model.num_releases == 0


@pytest.mark.parametrize("most", [3, 1])
def test_streamed_persons_are_those_in_memory(most):
    """Each step gets the same persons with the same rows, and padding counts for nothing."""
    x, y, ids = persons(num=60)
    settings = {"unit_ids": ids, "max_rows_per_unit": most, "batch_size": 8, "verbose": 0}
    weights = []
    for stream in (False, True):
        model = compiled(logistic, sgd(), clipping="flat", seed=5)
        model.fit(x, y, stream=stream, **settings)
        assert model.privacy_report().num_records == 60
        weights.append([variable.numpy() for variable in model.trainable_variables])
    for resident, streamed in zip(*weights, strict=True):
        np.testing.assert_allclose(resident, streamed, rtol=1e-5, atol=1e-7)


def test_datasets_and_whole_records_are_refused():
    """No engine takes rows for persons in silence."""
    x, y, ids = persons()
    settings = {"unit_ids": ids, "max_rows_per_unit": 3, "verbose": 0}
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    public = {"num_records": 12, "steps_per_epoch": 3, "sampling": "each_record_once_per_epoch"}
    with pytest.raises(ValueError, match="a dataset's batches"):
        compiled(logistic, sgd()).fit(dataset, **public, **settings)
    whole = dpvi.DPVI(
        tfd.Sample(tfd.Normal(0.0, 1.0), 2), lambda mean: tfd.MultivariateNormalDiag(mean)
    )
    whole.compile(epsilon=1.0, delta=1e-5)
    with pytest.raises(ValueError, match="whole records"):
        whole.fit(x, **settings)


@pytest.mark.slow
def test_a_pilot_of_rows_is_refused():
    """Its curvature is that of rows: wrong for persons by their number of rows."""
    x, y, ids = persons()
    model = compiled(logistic, sgd())
    dpvi.pilot(model, x, num_records=len(x), epsilon=1.0, delta=1e-5)
    with pytest.raises(ValueError, match="after dpvi"):
        model.fit(x, y, unit_ids=ids, max_rows_per_unit=3, verbose=0)
    assert model.num_releases == 0


def test_a_lagged_outcome_is_refused_where_twins_are_drawn():
    """Nothing is spent; a likelihood without twins takes it, for which it is right."""
    rng = np.random.default_rng(0)
    ids = np.repeat(np.arange(40), 3)
    y = (rng.random(120) < 0.5).astype("float32")
    x = np.stack([np.where(np.arange(120) % 3, np.roll(y, 1), 0.0), rng.normal(size=120)], axis=1)
    settings = {"unit_ids": ids, "max_rows_per_unit": 3, "verbose": 0}
    for model in (compiled(logistic), compiled(logistic, sgd())):
        with pytest.raises(ValueError, match=r"x\[:, 0\] is the outcome of the person's row"):
            model.fit(x, y, **settings)
        assert model.num_releases == 0
    model = compiled(logistic, sgd(), clipping="flat")
    model.fit(x, y, **settings)
    assert model.num_releases > 0


@pytest.mark.slow
def test_a_column_of_the_outcome_before_is_warned_of():
    """Where it is not found: twins keep it, which says something of the record's own latent."""
    generator = np.random.default_rng(0)
    num, most = 5000, 6
    latent, before = 0.8 * generator.normal(size=num), np.zeros(num)
    x, y = np.zeros((num, most, 2), "float32"), np.zeros((num, most), "float32")
    for visit in range(most):
        x[:, visit] = np.stack([generator.normal(size=num), before], axis=1)
        score = latent + x[:, visit] @ [0.5, 1.0]
        y[:, visit] = generator.random(num) < 1.0 / (1.0 + np.exp(-score))
        before = y[:, visit] - 0.5
    prior = {"w": tfd.Sample(tfd.Normal(0.0, 1.0), 2), "sd": tfd.HalfNormal(1.0)}
    model = dpvi.DPVI(tfd.JointDistributionNamed(prior), logistic_intercept)
    model.compile(epsilon=3.0, delta=1e-5)
    ids = np.repeat(np.arange(num), most)
    rows, public = x.reshape(-1, 2), {"public_inputs": x[:1000].reshape(-1, 2)}
    public["public_unit_ids"] = ids[: 1000 * most]
    persons = {"unit_ids": ids, "max_rows_per_unit": most, "validate": False}
    model.fit(rows, y.ravel(), verbose=0, **persons, **public)
    assert model.posterior_summary().checks.warnings


def test_a_shared_latent_needs_persons():
    """Without unit_ids each row would be a person: refused, not silent."""
    x, y, _ = persons()
    with pytest.raises(ValueError, match="unit_ids is missing: the likelihood has a latent"):
        compiled(linear_intercept).fit(x, y, verbose=0)


def test_a_latent_of_each_row_is_no_latent_of_the_person(caplog):
    """With unit_ids a record is a person: who takes quadrature for the person's is told."""

    def of_rows(params, x):
        score = tf.linalg.matvec(x, params["w"])
        return dpvi.local.quadrature(
            lambda z: tfd.Bernoulli(logits=score[:, None] + params["sd"] * z, dtype=tf.float32)
        )

    x, y, ids = persons()
    parts = {"w": tfd.Sample(tfd.Normal(0.0, 1.0), 2), "sd": tfd.HalfNormal(1.0)}
    for likelihood, is_told in ((of_rows, True), (logistic_intercept, False)):
        caplog.clear()
        model = dpvi.DPVI(tfd.JointDistributionNamed(parts), likelihood, clipping="flat")
        model.compile(sgd(), epsilon=1.0, delta=1e-5)
        with caplog.at_level(logging.WARNING):
            model.make_data(x, y, unit_ids=ids, max_rows_per_unit=3)
        assert ("is one of each row" in caplog.text) == is_told


# ---------------------------------------------------------------------- one row a person


@pytest.mark.slow
def test_one_row_a_person_is_the_same_fit():
    """m = 1: the same steps, and the same posterior to the last digit."""
    x, y, ids = persons(num=60)
    _, first = np.unique(ids, return_index=True)
    x, y = x[first], y[first]
    sums = []
    for settings in ({}, {"unit_ids": ids[first], "max_rows_per_unit": 1}):
        model = compiled(logistic, seed=4)
        model.fit(x, y, verbose=0, **settings)
        sums.append(model.posterior_sample(50, seed=0)["w"])
    assert np.array_equal(*sums)


def test_predictions_are_of_rows():
    """A model of persons predicts single rows, and is saved with the shapes of rows."""
    model = fitted()
    x, y, _ = persons(num=5)
    assert model.predict(x).shape == (len(x),)
    assert np.isfinite(model.evaluate(x, y, verbose=0))
    assert model.privacy_account.inputs["x"].shape.as_list() == [None, 2]


# ---------------------------------------------------------------------- what is learned


def simulated(num, most=6, seed=0, sd=0.8):
    """Persons with an intercept each and 1 to 6 rows, normal outcomes: inputs, outcomes, identifiers."""
    rng = np.random.default_rng(seed)
    ids = rng.permutation(np.repeat(np.arange(num), rng.integers(1, most + 1, num)))
    x = rng.normal(size=(len(ids), 2)).astype("float32")
    intercepts = sd * rng.normal(size=num)[ids]
    y = x @ [0.5, -1.0] + intercepts + 0.6 * rng.normal(size=len(ids))
    return x, y.astype("float32"), ids


@pytest.mark.slow
def test_a_random_intercept_is_learned(caplog):
    """Fixed effects and both scales, within four of the posterior's standard deviations."""
    x, y, ids = simulated(800)
    public, _, public_ids = simulated(400, seed=1)
    model = dpvi.DPVI(prior_of(linear_intercept), linear_intercept)
    model.compile(epsilon=3.0, delta=1e-5)
    settings = {"unit_ids": ids, "max_rows_per_unit": 6, "verbose": 0}
    with caplog.at_level(logging.WARNING):
        model.fit(x, y, public_inputs=public, public_unit_ids=public_ids, **settings)
    draws = model.posterior_sample(2000, seed=0)
    truth = {"w": np.array([0.5, -1.0]), "sd": 0.8, "scale": 0.6}
    for name, value in truth.items():
        sd = draws[name].numpy().std(axis=0)
        assert (sd < 0.15).all(), name
        assert (np.abs(draws[name].numpy().mean(axis=0) - value) < 4.0 * sd).all(), name
    assert "Do not trust" not in caplog.text
