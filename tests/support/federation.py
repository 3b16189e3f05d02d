"""Hospitals in NumPy that refine their factors exactly, and the closed forms that a federation of them must come to."""

from __future__ import annotations

import numpy as np

from tfp_dpvi.federated import Factor, Reply, Server, StudyTerms, Synchronous, Task
from tfp_dpvi.privacy import FullBatch, PrivacyPlan


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
            assert server.receive(
                task.hospital, answer(task, workers[task.hospital].refine(task))
            ), server.refused
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


def federation(
    kind=Server, *, full_rank=True, schedule=None, num_hospitals=5, seed=0, correlation=0.0, width=3
):
    """Returns the server at the end of a study of exact workers, its terms, and the pooled posterior in closed form."""
    x, y = regression(num_hospitals, width=width, seed=seed, correlation=correlation)
    terms = StudyTerms("regression", prior_of(width, full_rank=full_rank))
    workers = {
        f"h{number}": ExactWorker(*both) for number, both in enumerate(zip(x, y, strict=True))
    }
    server = kind(terms, workers, schedule or Synchronous(rounds=1, damping=1.0))
    play(server, workers, terms)
    flat = x.reshape(-1, width)
    precision = np.eye(width) / 4.0 + flat.T @ flat
    return server, terms, Factor(flat.T @ y.ravel(), precision)


class NoisyWorker:
    """A private hospital of a logistic regression, written out in NumPy: clip, noise, Adam, mean-field. Seeded: for tests alone."""

    def __init__(self, x, y, *, noise, rng, bound, clip=2.0, steps=10, rate=0.05):
        self.x, self.y, self.noise, self.rng, self.bound = x, y, noise, rng, bound
        self.clip, self.steps, self.rate = clip, steps, rate

    def refine(self, task):
        q, cavity = task.posterior, task.cavity
        mean, share = q.mean.copy(), np.minimum(np.minimum(q.stddev, 0.1) / self.bound, 0.98)
        raw = np.log(share / (1.0 - share))
        first = second = np.zeros(2 * q.num)
        for step in range(1, self.steps + 1):
            share = 1.0 / (1.0 + np.exp(-raw))
            sd, eta = self.bound * share, self.rng.normal(size=q.num)
            logits = self.x @ (mean + sd * eta)
            gradients = (1.0 / (1.0 + np.exp(-logits)) - self.y)[:, None] * self.x
            norms = np.linalg.norm(gradients, axis=1, keepdims=True)
            total = (gradients * np.minimum(1.0, self.clip / np.maximum(norms, 1e-30))).sum(0)
            total += self.rng.normal(scale=self.noise * self.clip, size=q.num)
            by_mean = total + cavity.precision * mean - cavity.shift
            by_sd = total * eta + cavity.precision * sd - 1.0 / sd
            both = np.concatenate([by_mean, by_sd * sd * (1.0 - share)]) / len(self.x)
            first, second = 0.9 * first + 0.1 * both, 0.999 * second + 0.001 * both**2
            move = (
                self.rate * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-7)
            )
            mean, raw = mean - move[: q.num], raw - move[q.num :]
        return Factor.normal(mean, (self.bound / (1.0 + np.exp(-raw))) ** 2) / q


def private_study(
    schedule, *, num_hospitals=5, num=2000, width=4, epsilon=1.0, seed=0, by_label=False, steps=10
):
    """Runs private hospitals in NumPy; returns the server and the mean test log-likelihood after each update."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num + 2000, width))
    y = rng.random(len(x)) < 1.0 / (1.0 + np.exp(-x @ rng.normal(size=width)))
    where = rng.integers(num_hospitals, size=num)
    if by_label:
        where = np.where(
            rng.random(num) < np.where(y[:num], 0.95, 0.05),
            where // 2,
            num_hospitals - 1 - where // 2,
        )
    plan = PrivacyPlan.calibrate(
        epsilon=epsilon, delta=1e-5, sampling=FullBatch(), num_releases=steps * schedule.rounds
    )
    terms = StudyTerms("private", prior_of(width, full_rank=False))
    settings = {
        "noise": plan.noise_multiplier,
        "steps": steps,
        "rng": rng,
        "bound": np.sqrt(2.0) * terms.prior.stddev,
    }
    workers = {
        f"h{h}": NoisyWorker(x[:num][where == h], y[:num][where == h], **settings)
        for h in range(num_hospitals)
    }
    server = play(Server(terms, workers, schedule), workers, terms)

    def log_likelihood(posterior):
        logits = x[num:] @ posterior.sample(100, np.random.default_rng(1)).T
        return float(
            np.log(
                np.exp(-np.logaddexp(0.0, np.where(y[num:, None], -logits, logits))).mean(1)
            ).mean()
        )

    return server, [log_likelihood(round.posterior) for round in server.history]


class ScoringWorker(NoisyWorker):
    """The same hospital with scoring steps instead of Adam's: `tfp_dpvi.federated.scoring` written out in NumPy."""

    def refine(self, task):
        q, cavity, num = task.posterior, task.cavity, len(self.x)
        own, noise = q.precision - cavity.precision, (self.noise * self.clip) ** 2
        known = np.where(own > 0.0, task.number, 0.0)
        expected = (0.25 * num * self.clip**2 / q.num + known * np.maximum(own, 0.0)) / (known + 1)
        slope, weight, mean, score = expected, 1.0 + known, q.mean, np.zeros(q.num)
        floor = 2.0 / self.bound**2

        def total():
            information = np.maximum(slope, 0.1 * expected)
            return information, np.maximum(cavity.precision + information, 0.51 * floor)

        for step in range(1, self.steps + 1):
            information, precision = total()
            sd, eta = 1.0 / np.sqrt(precision), self.rng.normal(size=q.num)
            logits = self.x @ (mean + sd * eta)
            gradients = (self.y - 1.0 / (1.0 + np.exp(-logits)))[:, None] * self.x
            norms = np.linalg.norm(gradients, axis=1, keepdims=True)
            seen = (gradients * np.minimum(1.0, self.clip / np.maximum(norms, 1e-30))).sum(0)
            seen = seen + self.rng.normal(scale=self.noise * self.clip, size=q.num)
            gain = np.maximum(
                2.0 / (step + 1), np.minimum(information / (information + noise), 0.2)
            )
            at_mean = seen + information * sd * eta
            if step > 1:
                trust = expected**2 / (2.0 * noise * precision + 4.0 * information**2)
                weight = weight + trust * eta**2
                slope = slope + trust / weight * (-(seen - score) * eta / sd - slope * eta**2)
                score = score + gain * (at_mean - score)
            else:
                score = at_mean
            pull = at_mean - cavity.precision * mean + cavity.shift
            move = np.clip(gain * pull / precision, -1.0 / np.sqrt(floor), 1.0 / np.sqrt(floor))
            mean, score = mean + move, score - information * move
        _, precision = total()
        return Factor(mean * precision, precision) / q
