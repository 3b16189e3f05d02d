"""What the code of commit 2eb4729 computed and saved, which holds whatever is rebuilt (`support/references.py`)."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from support import references
from support.references import FILES, FOLDER, LEDGER, MODEL_OF_LEDGER, REPORTS, SUMS
from support.siblings import slow

import tfp_dpvi as dpvi

FROZEN = json.loads((FOLDER / f"{references.STACK}.json").read_text(encoding="utf-8"))
SAVED = json.loads((FOLDER / "files.json").read_text(encoding="utf-8"))


def same_figures(found, frozen):
    missing = set(frozen) - set(found)
    assert not missing
    for place, figure in frozen.items():
        assert found[place] == pytest.approx(figure, rel=1e-6), place


#: Engines of whose sums a quick one is nearly the same.
SLOW = (
    "vae vectorized, convolution", "vae ghost, certain, float32", "vi vectorized, mean_field", "vae", "vi vectorized, certain",
    "vi vectorized, full_rank", "vae termwise, one group", "vae vectorized, certain", "record flat, float64", "vae ghost",
    "record normalized", "vi aligned, certain", "termwise", "vae termwise",
    "vae ghost, convolution", "vi aligned, mean_field", "vi aligned, full_rank",
)  # fmt: skip


#: One of each sampling, both relations, after others; the accounting itself in `privacy/`.
PLANS = ("poisson", "poisson, after others", "full batch, replace", "fixed size", "termwise")


def shared_out(names):
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in names]


@pytest.mark.parametrize("name", shared_out(SUMS))
def test_one_clipped_sum_of_each_engine(name):
    """Also against TensorFlow's gradients of one record after another, where no draw comes from the seed."""
    case, frozen = SUMS[name], np.array(FROZEN["sums"][name])
    found, model = references.change(case)
    size = np.abs(frozen).max()
    assert size > 0.01
    np.testing.assert_allclose(found, frozen, rtol=0, atol=case.rtol * size)
    if case.by_hand is not None:
        np.testing.assert_allclose(
            found, references.change_by_hand(case, model), rtol=0, atol=2 * case.rtol * size
        )


def test_every_figure_that_was_frozen_is_compared():
    assert set(FROZEN["sums"]) == set(SUMS)
    assert set(FROZEN["noise"]) == set(references.plans())
    assert set(FROZEN["reports"]) == set(REPORTS)
    assert set(SAVED) == {*FILES, LEDGER}


@pytest.mark.parametrize(
    "name", [name if name in PLANS else slow(name) for name in references.plans()]
)
def test_noise_multipliers(name):
    assert references.calibrated(references.plans()[name]) == pytest.approx(
        FROZEN["noise"][name], rel=3e-3
    )


@pytest.mark.parametrize("name", [slow(name) if name == "two terms" else name for name in REPORTS])
def test_reports_have_the_same_figures(name):
    same_figures(
        references.figures(REPORTS[name]().privacy_report().to_json()), FROZEN["reports"][name]
    )


@pytest.mark.parametrize("name", shared_out(FILES))
def test_a_saved_model_loads_and_goes_on(name):
    frozen = SAVED[name]
    model = dpvi.load_model(FOLDER / f"{name}.keras")
    if isinstance(model, dpvi.DPVI):
        assert model.clipping == "flat"  # These files are older than the paired clip.
    found = references.facts(model)
    np.testing.assert_array_equal(found["weights"], frozen["weights"])
    np.testing.assert_array_equal(found["optimizer"], frozen["optimizer"])
    same_figures(found["figures"], frozen["figures"])
    model.fit(*references.data_of(name), batch_size=4, steps_per_epoch=1, verbose=0)
    report = model.privacy_report()
    assert report.num_releases == frozen["figures"]["/num_releases"] + 1
    assert report.epsilon > frozen["figures"]["/epsilon"]


def test_a_ledger_s_file_opens_and_goes_on_with_its_model(tmp_path):
    shutil.copy(FOLDER / LEDGER, tmp_path / LEDGER)
    frozen = SAVED[LEDGER]["figures"]
    with dpvi.PrivacyLedger(tmp_path / LEDGER) as ledger:
        assert ledger.dataset_id == "references"
        assert ledger.budget == (9.0, 1e-5)
        assert ledger.num_releases == frozen["/num_releases"]
        assert ledger.epsilon(1e-5) == pytest.approx(frozen["/epsilon"], rel=1e-6)
        model = dpvi.load_model(FOLDER / MODEL_OF_LEDGER)
        same_figures(references.figures(model.privacy_report().to_json()), frozen)
        model.compile(references.adam(3.0), delta=1e-5, ledger=ledger, jit_compile=False)
        model.fit(references.X, references.Y, batch_size=4, steps_per_epoch=1, verbose=0)
        assert ledger.num_releases == frozen["/num_releases"] + 1
    with dpvi.PrivacyLedger(tmp_path / LEDGER, read_only=True) as ledger:
        assert ledger.num_releases == frozen["/num_releases"] + 1
