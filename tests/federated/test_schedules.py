"""Schedules with private hospitals, written out in NumPy: the defaults end where they are best, an undamped sequential one does not."""

import pytest
from support.federation import private_study

from tfp_dpvi.federated import Asynchronous, Schedule, Sequential, Synchronous


@pytest.mark.parametrize("schedule", [Synchronous(), Sequential(), Asynchronous()])
def test_the_defaults_do_not_end_worse_than_their_best(schedule):
    """Seeded. The last update's test log-likelihood is within 0.01 nats of the best one's."""
    server, values = private_study(schedule)
    assert len(values) == (20 if isinstance(schedule, Synchronous) else 100)
    assert max(values) - values[-1] <= 0.01, values
    assert values[-1] > -0.45, "better than the prior's -0.69"
    assert server.posterior.exceeds(server.terms.floor)


def test_an_undamped_sequential_schedule_is_seen_to_diverge():
    """The same study and the same check: what the defaults are for."""
    _, values = private_study(Sequential(rounds=10, damping=1.0), steps=20)
    assert max(values) - values[-1] > 0.1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"damping": 1.5}, "at most 1"),
        ({"decay": 0.0}, "decay=0.0"),
        ({"rounds": 0}, "rounds=0"),
        ({"most_ahead": 0}, "most_ahead=0"),
    ],
)
def test_bad_settings_are_refused(change, says):
    with pytest.raises(ValueError, match=says):
        Asynchronous(**change)
    assert [Schedule(rounds=3, damping=0.5, decay=0.25).share(number) for number in range(3)] == [
        0.5,
        0.25,
        0.125,
    ]
