"""`make audit` in tests: each planted fault is found by the audit that is there for it, and the clean step passes."""

import pytest
from support import planted

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fault", planted.FAULTS, ids=lambda fault: f"{fault.name}, {fault.audit}")
def test_a_fault_is_found(fault):
    text, complains = planted.complaint(fault.subject, fault.audit, fault.plant)
    assert complains, text


@pytest.mark.parametrize(("subject", "audit"), planted.CLEAN)
def test_the_clean_step_passes(subject, audit):
    """False alarm: 1e-7 for each."""
    text, complains = planted.complaint(subject, audit)
    assert not complains, text


def test_there_are_faults_enough():
    assert len({fault.name for fault in planted.FAULTS}) >= 20
