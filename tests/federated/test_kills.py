"""Server, nodes and workers of a federation, killed at random moments: nothing paid for is lost, and no budget is passed."""

from __future__ import annotations

import collections
import time

import numpy as np
import pytest
from support.kills import Books, Federation, Forks, RemoteForks, Settings, check_study


def kill_many(directory, forks, studies, kills, seed, most):
    """Runs studies until so many kills are done; returns the kills and the books."""
    rng, done, books = np.random.default_rng(seed), collections.Counter(), Books()
    number = 0
    while sum(done.values()) < kills:
        left = min(most, kills - sum(done.values()))
        settings = studies[number % len(studies)]
        federation = Federation(directory / str(number), forks, settings, rng, left)
        federation.play()
        done += federation.kills
        books += check_study(federation)
        number += 1
    return done, books, number


def test_six_kills(tmp_path):
    studies = [Settings("Synchronous", rounds=4, quorum=2, allowed=8, hospitals=("h0", "h1"))]
    done, books, _ = kill_many(tmp_path, Forks(), studies, 6, seed=0, most=6)
    assert sum(done.values()) == 6
    assert books.used >= 8
