"""Hospitals in NumPy that refine their factors exactly, and the closed forms that a federation of them must come to."""

from __future__ import annotations

import numpy as np

from tfp_dpvi.federated import Factor, Reply, Server, Synchronous, Task, Terms


class ExactWorker:
    """A hospital of a linear regression with known noise; its likelihood is a normal factor by the coefficients.

    In the full family the best posterior is cavity times likelihood; in the mean-field family it keeps the diagonal of that
    precision and its mean (the optimum of KL(q || p) for a normal p).
    """

    def __init__(self, x, y, noise=1.0):
        self.precision, self.shift = x.T @ x / noise**2, x.T @ y / noise**2

    def refine(self, task):
        cavity = task.cavity
        full = cavity.precision if cavity.full_rank else np.diag(cavity.precision)
        precision, shift = full + self.precision, cavity.shift + self.shift
        if cavity.full_rank:
            best = Factor(shift, precision)
        else:
            diagonal = np.diag(precision)
            best = Factor(np.linalg.solve(precision, shift) * diagonal, diagonal)
        return best / task.posterior


def answer(task, change, **more):
    stated = {"epsilon": 1.0, "delta": 1e-5, **more}
    return Reply(task.study, task.hospital, task.request, task.number, change, **stated).to_bytes()


def play(server, workers, terms):
    """Runs a study to its end; tasks and replies go through bytes."""
    while not server.finished:
        for sent in server.due():
            task = Task.from_bytes(sent.to_bytes(), terms)
            assert server.receive(task.hospital, answer(task, workers[task.hospital].refine(task))), server.refused
    return server


def regression(num_hospitals=5, num=60, width=3, seed=0, correlation=0.0):
    """Returns x, y of each hospital."""
    rng = np.random.default_rng(seed)
    mix = np.eye(width) + correlation * (np.ones((width, width)) - np.eye(width))
    x = rng.normal(size=(num_hospitals, num, width)) @ np.linalg.cholesky(mix).T
    truth = rng.normal(size=width)
    return x, x @ truth + rng.normal(size=(num_hospitals, num))


def prior_of(width, *, full_rank, scale=2.0):
    variances = np.full(width, scale**2)
    return Factor.normal(np.zeros(width), np.diag(variances) if full_rank else variances)


def federation(kind=Server, *, full_rank=True, schedule=None, num_hospitals=5, seed=0, correlation=0.0, width=3):
    """Returns the server at the end of a study of exact workers, its terms, and the pooled posterior in closed form."""
    x, y = regression(num_hospitals, width=width, seed=seed, correlation=correlation)
    terms = Terms("regression", prior_of(width, full_rank=full_rank))
    workers = {f"h{number}": ExactWorker(*both) for number, both in enumerate(zip(x, y, strict=True))}
    server = kind(terms, workers, schedule or Synchronous(rounds=1, damping=1.0))
    play(server, workers, terms)
    flat = x.reshape(-1, width)
    precision = np.eye(width) / 4.0 + flat.T @ flat
    return server, terms, Factor(flat.T @ y.ravel(), precision)
