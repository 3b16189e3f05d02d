"""`lower_bound`: the epsilon that a model's own step has at least, from what canaries show."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import special, stats

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.audit import bounds
from tfp_dpvi.audit.bounds import Errors, Guesses
from tfp_dpvi.audit.canaries import (
    Contributions,
    Rows,
    as_persons,
    candidates,
    contributions,
    convert_rows,
    join_rows,
    rows_of,
    select_rows,
)
from tfp_dpvi.audit.observed import ObservedStep, Setting, num_rows
from tfp_dpvi.data.units import person_numbers
from tfp_dpvi.models import DPModel
from tfp_dpvi.privacy import NeighboringRelation, PrivacyPlan
from tfp_dpvi.training import new_key

# The share of the runs that choose the threshold.
_TRAINING_SHARE = 0.25
_DELTA = 1e-5


@dataclasses.dataclass(frozen=True, eq=False)
class LowerBound:
    """A lower bound of the epsilon of a model's step, from an attack on it.

    Attributes:
      epsilon: A lower bound of epsilon at `delta`, for a mechanism of the plan's shape with an
        unknown amount of noise.
      epsilon_of_any: A lower bound for any mechanism, from a single pair of epsilon and delta; it
        holds at the same confidence.
      claimed: The epsilon that the plan claims for `num_steps` steps.
      contradicted: Whether the errors of the attack are too few for the claimed trade-off curve.
        This assumes nothing.
      delta: The delta of all epsilons.
      confidence: The probability with which each bound holds.
      method: "repeated" or "one_run".
      num_steps: The number of steps of a run.
      num_runs: The number of runs with the canary, and of runs without it; 1 for "one_run".
      outcome: The attack's errors for "repeated", its guesses for "one_run".
      reach: The canary's contribution over the stated sensitivity. A bound can come near the truth
        only if it is near 1.
      present: The scores of runs or canaries that took part, without those that the threshold was
        chosen on.
      absent: The scores of those that did not, likewise.
      thresholds: The scores at or above which, and below which, the attack guesses that a canary
        took part or did not.

    ```python
    >>> import numpy as np
    >>> bound = LowerBound(
    ...     epsilon=0.5, epsilon_of_any=0.3, claimed=1.0, contradicted=False, delta=1e-5,
    ...     confidence=0.95, method="one_run", num_steps=1, num_runs=1,
    ...     outcome=Guesses(canaries=100, guesses=50, correct=32), reach=1.0,
    ...     present=np.ones(3), absent=np.zeros(3), thresholds=(1.0, 0.0),
    ... )
    >>> print(str(bound).splitlines()[0])
    Audit of 1 step by canaries (one run, 100 canaries, 32 of 50 guesses right):

    ```
    """

    epsilon: float
    epsilon_of_any: float
    claimed: float
    contradicted: bool
    delta: float
    confidence: float
    method: str
    num_steps: int
    num_runs: int
    outcome: Errors | Guesses
    reach: float
    present: np.ndarray
    absent: np.ndarray
    thresholds: tuple[float, float]

    @property
    def guesses(self) -> Guesses | None:
        """The guesses of "one_run", or None."""
        return self.outcome if isinstance(self.outcome, Guesses) else None

    @property
    def errors(self) -> Errors | None:
        """The errors of "repeated", or None."""
        return self.outcome if isinstance(self.outcome, Errors) else None

    def __str__(self) -> str:
        """Returns the result as plain text."""
        steps = "1 step" if self.num_steps == 1 else f"{self.num_steps} steps"
        verdict = (
            "which CONTRADICTS the claim" if self.contradicted else "no contradiction of the claim"
        )
        return (
            f"Audit of {steps} by canaries ({self._summary}):\n"
            f"  epsilon >= {self.epsilon:.3g} at delta = {self.delta:g}, "
            f"{verdict} of {self.claimed:.3g};\n"
            f"  for a mechanism of any shape: epsilon >= {self.epsilon_of_any:.3g}.\n"
            f"  Each bound holds with a probability of {100 * self.confidence:.10g} %. "
            f"The canary reached {100 * self.reach:.3g} % of the stated sensitivity.\n"
            "  The attack knew all other records' exact sums: the result is not private itself, "
            "which does not matter for\n"
            "  simulated or public records. Do not publish the result of an audit on private ones."
        )

    @property
    def _summary(self) -> str:
        """The attack and its outcome in a few words."""
        outcome = self.outcome
        if isinstance(outcome, Guesses):
            return (
                f"one run, {outcome.canaries} canaries, "
                f"{outcome.correct} of {outcome.guesses} guesses right"
            )
        return (
            f"{self.num_runs} runs with one and {self.num_runs} without, "
            f"{outcome.false_positives} of {outcome.without} and "
            f"{outcome.false_negatives} of {outcome.present} guesses wrong"
        )

    def plot(self, ax: Any = None) -> Any:
        """Draws the scores with and without canaries, and the thresholds.

        Needs matplotlib, of the extra "examples".

        Args:
          ax: Matplotlib's axes to draw on, or None for new ones.

        Returns:
          Matplotlib's axes.
        """
        if ax is None:
            from matplotlib import pyplot

            _, ax = pyplot.subplots(layout="constrained")
        scores = np.concatenate([self.present, self.absent])
        edges = np.linspace(float(scores.min()), float(scores.max()) + 1e-9, 41)
        for scores, label in ((self.absent, "without"), (self.present, "with")):
            ax.hist(scores, edges, alpha=0.6, label=f"{label} canary")
        for threshold in sorted(set(self.thresholds)):
            ax.axvline(threshold, color="black", linewidth=1)
        ax.set_xlabel("score of the attack")
        ax.set_ylabel("canaries" if self.guesses is not None else "runs")
        sign = "contradicts" if self.contradicted else "does not contradict"
        ax.set_title(
            f"epsilon ≥ {self.epsilon:.2f} ({100 * self.confidence:.4g} %)\n"
            f"{sign} the claim of {self.claimed:.2f}",
            fontsize="medium",
        )
        ax.legend()
        return ax


def lower_bound(
    model: DPModel,
    x: Structure,
    y: Structure | None = None,
    sample_weight: np.ndarray | None = None,
    *,
    method: str = "repeated",
    num_runs: int = 1000,
    num_steps: int = 1,
    canaries: dict[str, Structure] | None = None,
    num_canaries: int = 100,
    num_guesses: int | None = None,
    delta: float | None = None,
    confidence: float = 0.95,
    seed: int | None = None,
    **settings: Setting,
) -> LowerBound:
    """Attacks the model's own step, and returns the lower bound of epsilon that follows.

    Canaries are records whose clipped contribution is as large as the clip allows. The attacker
    sees all that the step releases, noisy gradient and joint releases, knows all other records'
    exact sums, and guesses whether a canary took part. Differential privacy bounds how often such
    guesses can be right, so that too many right ones contradict the claim.

    "repeated" runs the steps many times with one canary and without it. "one_run" adds many
    canaries to one run, each by the toss of a coin (Steinke et al. 2023); it is weaker, and needs a
    model with more parameters than canaries. All steps are made at the model's present variables,
    which do not change, and nothing is charged to the ledger.

    ```python
    model.compile(optimizer, epsilon=1.0, delta=1e-5)
    result = dpvi.audit.lower_bound(model, x, y)
    print(result)
    result.plot()
    ```

    Args:
      model: A compiled model, fitted or not. With `compile(epsilon=...)` and before a fit, the
        noise is that of `num_steps` steps.
      x: Simulated or public records as for `fit`. On private records the attack shows as much, but
        neither its result nor its picture is private: do not publish them.
      y: Their outcomes, likewise.
      sample_weight: Their weights, likewise.
      method: "repeated" or "one_run".
      num_runs: For "repeated", the number of runs with the canary, and of runs without it. A
        quarter of them choose the threshold.
      num_steps: The number of steps of a run, which the claim covers.
      canaries: Records to choose canaries from, `{"x": ..., "y": ..., "sample_weight": ...}`. By
        default extreme records: a few of `x` enlarged, and vectors with one large entry.
      num_canaries: For "one_run", the largest number of canaries. They are chosen to be nearly
        orthogonal.
      num_guesses: For "one_run", the number of canaries to guess, half of them as present; by
        default half of the canaries.
      delta: The delta of all epsilons; by default that of `compile`, or 1e-5.
      confidence: The probability with which each of the bounds holds, by itself.
      seed: The seed of the draws; None for fresh ones.
      **settings: Arguments of `model.make_data`: `batch_size`, `num_records`, `sampling`. By
        default every step takes all records, for which one canary gives the attacker the most. With
        `unit_ids` and `max_rows_per_unit` a canary is a person of that many equal rows.

    Returns:
      The bounds beside the claim, with a plain-text form and a picture.

    Raises:
      ValueError: An argument is out of range, or no canary contributes anything.
    """
    check.one_of("method", method, ("repeated", "one_run"))
    check.count("num_steps", num_steps, 1)
    check.count("num_runs", num_runs, 20)
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence={confidence!r} must lie between 0 and 1, such as 0.95.")
    num = num_rows(x)
    if settings.get("unit_ids") is not None:
        persons = person_numbers(settings["unit_ids"], num)
        # The same rows in all runs.
        settings = {"rows_beyond": "first", **settings, "unit_ids": persons}
        num = int(persons.max()) + 1
    whole: dict[str, Any] = {"num_records": num, **settings}
    whole = {"batch_size": whole["num_records"], **whole}
    key = new_key(seed)
    rows = rows_of(model, x, y, sample_weight)
    extreme = candidates(rows) if canaries is None else convert_rows(model, "canaries", canaries)
    tf.nest.assert_same_structure(rows, extreme)
    names = ("num_records", "max_weight", "max_rows_per_unit")
    public = {name: whole[name] for name in names if name in whole}
    added = contributions(model, extreme, key, **public)
    if not added.norms.max() > 0.0:
        raise ValueError(
            "canaries: none of them moves a sum; pass records with a gradient, canaries={'x': ...}."
        )
    attack = _Attack(model, rows, added, key, num_steps, delta, confidence, whole)
    if method == "repeated":
        return attack.repeated(num_runs)
    return attack.one_run(num_canaries, num_guesses)


@dataclasses.dataclass(frozen=True, eq=False)
class _Attack:
    """An attack on the steps of a model on records, by canaries of known contributions."""

    model: DPModel
    rows: Rows
    added: Contributions
    key: np.ndarray
    num_steps: int
    delta: float | None
    confidence: float
    settings: dict[str, Any]

    def _step(self, canaries: list[int]) -> ObservedStep:
        """Returns the step on the records and these canaries, which come last."""
        settings = self.settings
        num, most = num_rows(self.rows["x"]), settings.get("max_rows_per_unit")
        rows = join_rows(self.rows, as_persons(select_rows(self.added.rows, canaries), most))
        if most is not None:
            others = settings["unit_ids"]
            num = int(others.max()) + 1
            new = np.repeat(np.arange(num, num + len(canaries)), most)
            settings = {**settings, "unit_ids": np.concatenate([others, new])}
        if self._replaces():
            # A canary is among the fixed number of records.
            num += len(canaries)
            full = settings["batch_size"] >= settings["num_records"]
            size = num if full else settings["batch_size"]
            settings = {**settings, "num_records": num, "batch_size": size}
        return ObservedStep(
            self.model,
            rows["x"],
            rows.get("y"),
            rows.get("sample_weight"),
            num_steps=self.num_steps,
            **settings,
        )

    def _keep(self, step: ObservedStep, present: Sequence[bool] | np.ndarray) -> np.ndarray:
        """Returns which records take part, given which canaries do."""
        others = np.ones(num_rows(self.rows["x"]), bool)
        most = self.settings.get("max_rows_per_unit") or 1
        return step.keeping(np.concatenate([others, np.repeat(present, most)]))

    def _replaces(self) -> bool:
        """Returns whether neighboring data sets differ in the values of a record."""
        relation = (self.model.get_compile_config() or {})["neighboring_relation"]
        return str(relation).lower() == NeighboringRelation.REPLACE_ONE.name.lower()

    def _plan(self, step: ObservedStep) -> tuple[PrivacyPlan, float]:
        """Returns the claim, and its delta."""
        stated = (self.model.get_compile_config() or {}).get("delta")
        delta = check.delta(self.delta if self.delta is not None else (stated or _DELTA))
        return step.mechanism.plan(self.num_steps), delta

    # ------------------------------------------------------------------ many runs, one canary

    def repeated(self, num_runs: int) -> LowerBound:
        """Attacks runs with and without the strongest canary.

        Under replace-one, the latter have an opposite canary in its place.
        """
        canary = self.added.strongest()
        step = self._step([canary])
        last = self._keep(step, [False])
        mean = self.added.shares[canary] * self.added.means[canary]
        without: dict[str, Any] = {"keep": last}
        if self._replaces():
            other = self.added.farthest_from(canary)
            without = {"tensors": self._step([other]).tensors}
            mean = mean - self.added.shares[other] * self.added.means[other]
        size = float(np.linalg.norm(mean))
        direction = mean / size
        plan, delta = self._plan(step)
        share = float(self.added.shares[canary]) * _rate(step)

        def scores(number: int, records: dict[str, Any]) -> np.ndarray:
            """Returns a likelihood ratio for each run.

            It is of noise around the canary against noise around zero.
            """
            key = self.key + np.array([0, (number + 1) << 40])
            count = num_runs * self.num_steps
            blocks = zip(
                step.values(key, count, **records),
                step.values(key, count, noise=0.0, **without),
                strict=True,
            )
            along = [(noisy - exact) @ direction for (noisy, _), (exact, _) in blocks]
            whole = size / float(self.added.shares[canary])
            ratio = (whole * np.concatenate(along) - whole**2 / 2.0) / step.noise**2
            ratio = np.clip(ratio, -700.0, 700.0)
            mixed = ratio if share == 1.0 else np.log1p(share * np.expm1(ratio))
            return mixed.reshape(num_runs, self.num_steps).sum(axis=1)

        present = scores(0, {})
        absent = scores(1, without)
        split = int(num_runs * _TRAINING_SHARE)
        for_curve, for_pair = _thresholds(present[:split], absent[:split], self.confidence)
        present = present[split:]
        absent = absent[split:]

        def errors_at(threshold: float) -> Errors:
            return Errors(
                false_positives=int(np.sum(absent >= threshold)),
                without=len(absent),
                false_negatives=int(np.sum(present < threshold)),
                present=len(present),
            )

        errors = errors_at(for_curve)

        def rejects(tradeoff: bounds.Tradeoff) -> bool:
            return bounds.repeated_rejects(errors, tradeoff, self.confidence)

        stated = step.mechanism.sensitivity
        return LowerBound(
            epsilon=bounds.largest_rejected(plan, delta, rejects),
            epsilon_of_any=bounds.repeated_epsilon(errors_at(for_pair), delta, self.confidence),
            claimed=plan.epsilon(delta),
            contradicted=rejects(bounds.tradeoff_of(plan)),
            delta=delta,
            confidence=self.confidence,
            method="repeated",
            num_steps=self.num_steps,
            num_runs=num_runs,
            outcome=errors,
            reach=size / (stated.replace if self._replaces() else stated.add_or_remove),
            present=present,
            absent=absent,
            thresholds=(for_curve, for_curve),
        )

    # ------------------------------------------------------------------ one run, many canaries

    def one_run(self, most: int, num_guesses: int | None) -> LowerBound:
        """Attacks one run that has each of many canaries by the toss of a coin."""
        if self._replaces():
            raise ValueError(
                "method='one_run' adds canaries, so it needs "
                "neighboring_relation='add_or_remove_one': use 'repeated'."
            )
        chosen = self.added.apart(check.count("num_canaries", most, 1))
        num = len(chosen)
        asked = max(2, num // 2) if num_guesses is None else num_guesses
        if not 2 <= check.count("num_guesses", asked, 2) <= num:
            raise ValueError(
                f"num_guesses={asked}, but {num} canaries are nearly orthogonal: pass fewer, "
                "or use method='repeated'."
            )
        step = self._step(chosen)
        inside = np.random.default_rng(np.abs(self.key)).random(num) < 0.5
        keep = self._keep(step, inside)
        without = self._keep(step, np.zeros(num, bool))
        means = self.added.shares[chosen, None] * self.added.means[chosen]
        total = np.zeros(means.shape[1])
        key = self.key + np.array([0, 3 << 40])
        for (noisy, _), (exact, _) in zip(
            step.values(key, self.num_steps, keep=keep),
            step.values(key, self.num_steps, noise=0.0, keep=without),
            strict=True,
        ):
            total += (noisy - exact).sum(axis=0)
        # Half of the canaries are there: the others' mean is taken off each score.
        total -= 0.5 * self.num_steps * _rate(step) * means.sum(axis=0)
        norms = np.linalg.norm(means, axis=1)
        scores = means @ total / norms
        order = np.argsort(scores)
        guessed_out = order[: asked // 2]
        guessed_in = order[-(asked - asked // 2) :]
        correct = int(np.sum(~inside[guessed_out]) + np.sum(inside[guessed_in]))
        guesses = Guesses(num, asked, correct)
        plan, delta = self._plan(step)

        def rejects(tradeoff: bounds.Tradeoff) -> bool:
            return bounds.one_run_rejects(guesses, tradeoff, self.confidence)

        return LowerBound(
            epsilon=bounds.largest_rejected(plan, delta, rejects),
            epsilon_of_any=bounds.one_run_epsilon(guesses, delta, self.confidence),
            claimed=plan.epsilon(delta),
            contradicted=rejects(bounds.tradeoff_of(plan)),
            delta=delta,
            confidence=self.confidence,
            method="one_run",
            num_steps=self.num_steps,
            num_runs=1,
            outcome=guesses,
            reach=float(norms.mean()) / step.mechanism.sensitivity.add_or_remove,
            present=scores[inside],
            absent=scores[~inside],
            thresholds=(float(scores[guessed_in].min()), float(scores[guessed_out].max())),
        )


def _rate(step: ObservedStep) -> float:
    """Returns the stated probability that a step takes a record."""
    mechanism = step.mechanism
    return min(1.0, mechanism.expected_batch_size / mechanism.num_records)


def _thresholds(present: np.ndarray, absent: np.ndarray, confidence: float) -> tuple[float, float]:
    """Returns thresholds with good bounds on training runs.

    The first is for a trade-off curve, the second for a single pair of epsilon and delta. The
    bounds are those that the training runs themselves allow: few of them, so that rare errors count
    for little. Of the thresholds whose bound for the curve is within two standard errors of the
    best, the middle one is taken: the best itself is often so by chance.
    """
    scores = np.unique(np.concatenate([present, absent]))
    places = np.concatenate([scores[:1], (scores[1:] + scores[:-1]) / 2.0, scores[-1:] + 1.0])
    risk = (1.0 - confidence) / 2.0
    num = len(absent)
    wrong = np.stack(
        [
            num - np.searchsorted(np.sort(absent), places),
            np.searchsorted(np.sort(present), places),
        ]
    )
    rates = np.where(wrong < num, stats.beta.isf(risk, wrong + 1, np.maximum(num - wrong, 1)), 1.0)
    curve = -special.ndtri(rates).sum(axis=0)
    good = np.flatnonzero(curve >= curve.max() - 2.0 / math.sqrt(num))
    pairs = np.log(np.maximum(1.0 - rates[::-1], 1e-300) / rates).max(axis=0)
    return float(places[good[len(good) // 2]]), float(places[np.argmax(pairs)])
