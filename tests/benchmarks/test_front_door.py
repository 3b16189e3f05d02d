"""`benchmarks/front_door.py`: its verdicts can fail, and its records are those of its schema."""

import front_door
import pytest

from tfp_dpvi.data import Schema


def seconds(wall, processor=None):
    return {"wall": wall, "processor": wall if processor is None else processor}


def test_the_least_import_and_every_fit_count():
    imports = [[seconds(9.0), seconds(0.2), seconds(1.0)], [seconds(8.0), seconds(0.5), seconds(2)]]
    good = front_door.summary(imports, {"normal": seconds(29.0)})
    assert good["imports"]["package"]["wall"] == 8.0
    assert good["imports"]["door_beyond_it"]["wall"] == 0.2
    assert (good["imports_fast"], good["fits_fast"]) == (True, True)
    fits = {"normal": seconds(29.0), "poisson": seconds(31.0)}
    bad = front_door.summary(imports[1:], fits)
    assert (bad["imports_fast"], bad["fits_fast"]) == (False, False)
    assert not bad["fits_fast_by_processor"]


@pytest.mark.parametrize("family", front_door.OUTCOMES)
def test_the_records_are_those_of_the_schema(family):
    schema = Schema.from_dict({"y": front_door.OUTCOMES[family], **front_door.COVARIATES})
    assert len(schema.encode(front_door.records(family))) == front_door.NUM_ROWS
