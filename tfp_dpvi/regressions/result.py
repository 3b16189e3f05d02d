"""The result of a regression, in the user's units."""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import os
import re
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi import export
from tfp_dpvi.bayes import inference_data
from tfp_dpvi.checking import CheckTable, PrivateChecks
from tfp_dpvi.data import Schema, describe
from tfp_dpvi.data.columns import Numeric
from tfp_dpvi.models import DPVI, load_model
from tfp_dpvi.privacy import PersonUnit, PrivacyLedger, PrivacyReport
from tfp_dpvi.regressions import plots
from tfp_dpvi.regressions.checking import column_bins, identifiers, outcome_values
from tfp_dpvi.regressions.design import Design, Rows, is_wide
from tfp_dpvi.regressions.families import NUM_POINTS, Layout, outcome_levels, standard_intercepts
from tfp_dpvi.regressions.measured import undescribed, unresolved
from tfp_dpvi.regressions.outcomes import Outcome, predicted
from tfp_dpvi.regressions.parts import Parts
from tfp_dpvi.regressions.population import (
    Outcomes,
    Strata,
    check_estimate,
    estimates,
    make_strata,
    table,
)
from tfp_dpvi.regressions.serving import predict_signature
from tfp_dpvi.regressions.words import NO_POSTERIOR, NOT_KNOWN, in_own_words

if TYPE_CHECKING:
    import pandas

    from tfp_dpvi.data.schema import TableData

_NUM_DRAWS = 4000
_NUM_PREDICTIVE = 1000
# Effects are shown up to so many typical deviations from the typical value.
_REACH = 3.0
_SHARES = ("noise", "data", "prior")
# How the model's caveat of each warning begins.
_DO_NOT_TRUST = "do not trust the posterior's intervals: "


class Regression:
    """A fitted regression: everything it returns is released, and costs no more privacy.

    `dpvi.regression` makes it; `print` shows warnings first. `docs/regression.md` shows its use.

    Args:
      design: The design.
      parts: The model's description.
      model: The fitted model.

    Attributes:
      design: The design of the formula.
      parts: The model's description, on its own scale.
      model: The `DPVI` behind it.

    ```python
    >>> from tfp_dpvi.regressions import Regression
    >>> Regression.load("none.zip")
    Traceback (most recent call last):
    ...
    ValueError: path='none.zip' is no file that Regression.save wrote.

    ```
    """

    def __init__(self, design: Design, parts: Parts, model: DPVI) -> None:
        self.design = design
        self.parts = parts
        self.model = model

    @functools.cached_property
    def _draws(self) -> dict[str, np.ndarray]:
        draws = self.model.posterior_sample(_NUM_DRAWS, seed=0)
        return {name: np.asarray(part, np.float64) for name, part in dict(draws).items()}

    @functools.cached_property
    def _few_draws(self) -> dict[str, np.ndarray]:
        """The draws that predictions and exports are made of."""
        return {name: part[:_NUM_PREDICTIVE] for name, part in self._draws.items()}

    @functools.cached_property
    def draws(self) -> dict[str, np.ndarray]:
        """Posterior draws of coefficients in the units of the formula, each of shape [4000]."""
        return self.parts.in_units(self._draws, self.design)

    @functools.cached_property
    def _posterior_summary(self) -> Any:
        return self.model.posterior_summary()

    @property
    def warnings(self) -> list[str]:
        """Sentences on what is wrong, or may be, with the intervals, and what to do."""
        checks = self._posterior_summary.checks
        if checks is None:
            return [NO_POSTERIOR]
        schema = self.design.schema
        unknown = ", ".join([*undescribed(schema), *unresolved(schema, self.parts.measured)])
        return [
            *(self._in_own_words(each) for each in checks.warnings),
            *(
                [f"typical values of {unknown} {NOT_KNOWN}, or take a larger epsilon"]
                if unknown
                else []
            ),
        ]

    def _in_own_words(self, sentence: str) -> str:
        """Returns a warning of the model in the words of a formula."""
        names = self.parts.names_of_model(self.design)
        person = self._person
        may_be_alike = person is not None and person.max_rows > 1 and not self.parts.layout.unit
        return in_own_words(
            sentence,
            self.parts.family,
            names,
            is_censored=self.design.limit is not None,
            may_be_alike=may_be_alike,
        )

    @property
    def _person(self) -> PersonUnit | None:
        plan = self.model.privacy_account.plan
        return None if plan is None else plan.person

    def _own_caveat(self, caveat: str) -> str:
        sentence = caveat.removeprefix(_DO_NOT_TRUST)
        if sentence == caveat:
            return caveat
        return f"{_DO_NOT_TRUST}{self._in_own_words(sentence.removesuffix('.'))}."

    def summary(self, level: float = 0.94) -> pandas.DataFrame:
        """Returns a table of coefficients in the units of the formula.

        Args:
          level: The probability of the intervals, which are central.

        Returns:
          A pandas DataFrame with the columns "mean", "sd", the interval's ends, and "noise", "data"
          and "prior", the shares of the variance; a row each coefficient.
        """
        import pandas

        level = check.probability("level", level)
        tail = (1.0 - level) / 2.0
        summary = self._posterior_summary
        shares = {}
        if "noise" in summary.columns:
            stacked = zip(*(summary.columns[name] for name in _SHARES), strict=True)
            shares = dict(zip(summary.names, stacked, strict=True))
        inner = self.parts.names_of_model(self.design)
        rows = {}
        for name, draws in self.draws.items():
            low, high = np.quantile(draws, [tail, 1.0 - tail])
            share = shares.get(inner.get(name, ""), (np.nan,) * 3)
            ends = {f"eti_{100 * tail:g}%": low, f"eti_{100 * (1 - tail):g}%": high}
            named = dict(zip(_SHARES, share, strict=True))
            rows[name] = {"mean": draws.mean(), "sd": draws.std(), **ends, **named}
        return pandas.DataFrame.from_dict(rows, orient="index")

    def choices(self) -> list[str]:
        """Returns each choice that was made, as sentences."""
        parts, design = self.parts, self.design
        sentences = [f"family {parts.family}, link {parts.kind.link}"]
        if parts.kind.is_scaled:
            sentences.append(
                f"outcome scaled by the schema: ({design.outcome_text} - "
                f"{parts.outcome.location:.4g}) / {parts.outcome.scale:.4g}"
            )
        sentences += design.transformed
        sentences += self._priors_of_coefficients()
        trials = design.schema.columns.get(str(design.trials))
        if isinstance(trials, Numeric):
            sentences.append(
                f"trials: {design.trials}, at most {trials.upper:g}, given and not modelled"
            )
        if design.limit is not None:
            sentences.append(design.limit.in_words)
        sentences += self._priors_of_scales()
        if parts.measured:
            sentences.append(
                f"typical values of {', '.join(parts.measured)}: released from the records for "
                f"{parts.share:.0%} of epsilon and delta"
            )
        if parts.weights:
            sentences.append(
                f"weights: {parts.weights}, at most {parts.max_weight:g}; the estimates are those "
                "of the same regression on the whole population"
            )
        checks = self._posterior_summary.checks
        sentences += checks.notes if checks else []
        person = self._person
        if person is not None:
            sentences.append(f"persons: {person.in_words}; public persons have 1 to m rows alike")
            if not parts.layout.unit:
                sentences.append("rows of a person: independent given the covariates")
        if design.missing is not None:
            sentences.append("missing covariates: typical value and an indicator")
        if design.outside == "clip":
            sentences.append("numbers outside of their bounds: clipped to them")
        public = "invented records of the schema, columns independent"
        if parts.num_public:
            public = f"{parts.num_public} records of public_data"
        return [*sentences, f"public inputs: {public}"]

    def _priors_of_coefficients(self) -> list[str]:
        parts, design = self.parts, self.design
        unit = parts.outcome.scale
        sentences = []
        names = design.parameters
        columns = zip(names, parts.location, parts.scale, parts.coefficients, strict=True)
        for label, location, scale, (mean, deviation) in columns:
            if label not in (*design.labels, *design.monotone):
                continue  # A share, on no scale of the formula.
            prior = f"normal({mean * unit / scale:.3g}, {deviation * unit / scale:.3g})"
            scaled = "" if scale == 1.0 else f", scaled as ({location:.4g}, {scale:.4g})"
            steps = ", in steps whose shares are alike a priori" if label in design.monotone else ""
            sentences.append(f"prior of {label}: {prior}{scaled}{steps}")
        mean, deviation = parts.intercept
        if parts.family == "ordinal":
            sentences.append(f"prior of the first threshold: normal({mean:.3g}, {deviation:.3g})")
        elif parts.layout.has_intercept:
            sentences.append(
                f"prior of the intercept at typical covariates: normal("
                f"{parts.base + mean * unit:.3g}, {deviation * unit:.3g})"
            )
        return sentences

    def _priors_of_scales(self) -> list[str]:
        """Returns the priors of the family's own parameters and of effects' deviations."""
        unit = self.parts.outcome.scale
        effects = [
            f"prior of sd({group.name}): halfnormal({unit / group.scale:.3g})"
            for group in self.design.groups
        ]
        if self.parts.layout.unit:
            effects.append(f"prior of sd(1|{self.parts.layout.unit}): halfnormal({unit:.3g})")
        if cors := self.parts.correlations(self.design):
            effects.append(f"prior of {', '.join(cors)}: LKJ(1), uniform over correlation matrices")
        at = [
            f"effects {group.intercepts}: those where {group.name.rpartition('|')[0]} is "
            f"{group.location:.4g}, its typical value"
            for group in self.design.groups
            if group.location
        ]
        return [*self.parts.kind.choices(unit), *effects, *at]

    def report(self) -> str:
        """Returns the warnings, every choice and the privacy report with the schema, as text."""
        return "\n\n".join([self._heading(), *self._described(), str(self.privacy_report())])

    def privacy_report(self, delta: float | None = None) -> PrivacyReport:
        """Returns the report of the model's ledger, with the schema of the formula's columns.

        Args:
          delta: As in `DPModel.privacy_report`.
        """
        report = self.model.privacy_report(delta)
        caveats = tuple(self._own_caveat(caveat) for caveat in report.caveats)
        lines = self.design.schema.lines.items()
        schema = "\n".join(self._described_column(name, line) for name, line in lines)
        return dataclasses.replace(report, caveats=caveats, schema=schema)

    def _described_column(self, name: str, line: str) -> str:
        """Returns the line of a column's description; what was measured was not declared."""
        column = self.design.schema.columns[name]
        needed = describe.questions(name, column)
        if name in self.parts.measured:
            needed = {part: needed[part] for part in needed if part not in describe.MEASURABLE}
            if is_wide(column):
                line += " (a release from the records showed no more)"
            else:
                line = re.sub(r" \((shares )?given\)", "", line) + " (released from the records)"
        return describe.with_sources(line, needed)

    def _described(self) -> list[str]:
        """Returns the paragraphs of a report that are not about privacy."""
        return [
            "Warnings: " + ("; ".join(self.warnings) or "none") + ".",
            "Choices:\n" + "\n".join(f"- {choice}" for choice in self.choices()),
            *([] if self.private_checks is None else [str(self.private_checks)]),
        ]

    def _heading(self) -> str:
        report = self.model.privacy_report()
        unit = self.parts.layout.unit
        formula = self.design.formula + (f" + (1 | {unit})" if unit else "")
        return (
            f"{formula}   ({self.parts.family}, {report.num_records} {report.unit}s, "
            f"epsilon {report.epsilon:.2g}, delta {report.delta:.2g})"
            f"{'' if report.private else ' NOT PRIVATE'}"
        )

    def __repr__(self) -> str:
        table = self.summary().to_string(float_format=lambda value: f"{value:.3g}", na_rep="-")
        lines = [self._heading(), *(f"WARNING: {text}." for text in self.warnings)]
        return "\n".join([*lines, table, "noise, data, prior: shares of the variance."])

    def _repr_html_(self) -> str:
        table = self.summary().to_html(float_format=lambda value: f"{value:.3g}", na_rep="-")
        warned = "".join(
            f"<p><strong>Warning:</strong> {html.escape(text)}.</p>" for text in self.warnings
        )
        return f"<p>{html.escape(self._heading())}</p>{warned}{table}"

    # ------------------------------------------------------------------ checks

    @property
    def private_checks(self) -> PrivateChecks | None:
        """The last private checks, of `check` or `regression(checks=)`; None without any."""
        return self.model.private_checks

    def check(
        self,
        data: TableData,
        *,
        epsilon: float,
        columns: Sequence[str] | None = None,
        level: float = 0.05,
        ledger: PrivacyLedger | None = None,
        unit: str | None = None,
    ) -> PrivateChecks:
        """Releases private checks of the regression, see `DPVI.check` and `docs/guides/checks.md`.

        Args:
          data: The private records of the fit, or others of their own `ledger`.
          epsilon: The cost of this release alone.
          columns: The covariates whose residuals are released, by bins that follow from the schema;
            by default all numbers. Each makes all noise larger.
          level: The probability that any test fails although the model is right, at most.
          ledger: By default that of the fit.
          unit: The column of persons, if the fit had one.

        Returns:
          Released values with tests, a verdict in words and a picture.

        Raises:
          ValueError, TypeError, BudgetExhaustedError: An argument is wrong, or a budget is used up;
            no privacy was spent.
        """
        design = self.design
        plan = self.model.privacy_account.plan
        person = None if plan is None else plan.person
        persons: dict[str, Any] = {}
        if person is not None or unit is not None:
            name = unit or self.parts.layout.unit
            if person is None or not name:
                raise ValueError(
                    f"unit={check.shown(unit)}: pass the column of persons exactly if the fit had "
                    "one."
                )
            persons = {
                "unit_ids": identifiers(data, name),
                "max_rows_per_unit": person.max_rows,
                "rows_beyond": person.rows_beyond,
            }
        return self.model.check(
            self.parts.inputs(design.rows(data)),
            outcome_values(design, self.parts.family, self.parts.outcome, data),
            epsilon=epsilon,
            columns=column_bins(design, columns, data),
            level=level,
            ledger=ledger,
            **persons,
        )

    def check_table(self) -> CheckTable:
        """Returns all checks in one table, the free ones first. It costs no privacy."""
        return self.model.check_table()

    # ------------------------------------------------------------------ predictions

    def predict(self, data: TableData, level: float = 0.94, seed: int = 0) -> pandas.DataFrame:
        """Returns expected outcomes of new records, with intervals.

        Args:
          data: A data set with the covariates' columns, and that of trials if it is one.
          level: The probability of the intervals, which are central.
          seed: The seed of the draws of outcomes.

        Returns:
          A pandas DataFrame with a row each record, and the index of a pandas `data`: "mean",
          "mean_low" and "mean_high" of the expected outcome (of successes among trials their
          number, of censored outcomes those that no limit hides, which need no limits), "low" and
          "high" of outcomes;
          for categorical and ordinal families the mean and the ends of each level's probability.
        """
        import pandas

        tail = (1.0 - check.probability("level", level)) / 2.0
        rows = self.design.rows(data, with_limits=False)
        means, outcomes = self._predicted(rows, check.count("seed", seed))
        index = data.index if isinstance(data, pandas.DataFrame) else None
        if means.ndim == 3:
            levels = outcome_levels(self.design.schema.columns[self.design.outcome])
            low, high = np.quantile(means, [tail, 1.0 - tail], axis=0)
            columns = {}
            for place, name in enumerate(levels):
                columns[name] = means[:, :, place].mean(axis=0)
                columns[f"{name} low"] = low[:, place]
                columns[f"{name} high"] = high[:, place]
            return pandas.DataFrame(columns, index)
        ends = [tail, 1.0 - tail]
        mean_low, mean_high = np.quantile(means, ends, axis=0)
        low, high = np.quantile(outcomes, ends, axis=0)
        return pandas.DataFrame(
            {
                "mean": means.mean(axis=0),
                "mean_low": mean_low,
                "mean_high": mean_high,
                "low": low,
                "high": high,
            },
            index,
        )

    def _score(self, rows: Rows) -> np.ndarray:
        """Returns draws of the linear predictor on the model's scale, [S, n] or [S, n, blocks]."""
        inputs = self.parts.inputs(rows).astype(np.float64)
        draws, layout = self._few_draws, self.parts.layout
        num = layout.num_common
        offset = inputs[:, num]
        slopes = self.parts.slopes(draws)
        size, blocks = slopes.shape[:2]
        score = np.einsum("sbp,np->snb", slopes, inputs[:, :num]) + offset[None, :, None]
        if layout.has_intercept:
            score += draws["intercept"].reshape(size, 1, blocks)
        if layout.group_sizes:
            score += (draws["group"] @ rows.groups.astype(np.float64).T)[:, :, None]
        return score

    def _own(self) -> dict[str, np.ndarray]:
        """Returns draws of what a family's distribution has besides scores."""
        return {name: self._few_draws[name] for name in self.parts.own_names}

    def _predicted(self, rows: Rows, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns draws of expected outcomes (or probabilities) and of outcomes."""
        parts, outcome = self.parts, self.parts.outcome
        own, scores = self._own(), self._score(rows)
        trials = rows.trials[:, 0] if parts.layout.has_trials else None
        if not parts.layout.unit:
            return predicted(parts.kind, scores, own, outcome, seed, trials)
        # Of persons who are not known: over the intercepts that they may have.
        sd = self._few_draws["unit_sd"][:, None, None]
        mean = sum(
            weight * predicted(parts.kind, scores + sd * point, own, outcome, seed, trials)[0]
            for point, weight in zip(*standard_intercepts(), strict=True)
        )
        drawn = scores + sd * np.random.default_rng(seed).normal(size=scores.shape)
        return np.asarray(mean), predicted(parts.kind, drawn, own, outcome, seed, trials)[1]

    def population(
        self,
        counts: TableData,
        *,
        by: Sequence[str] | str = (),
        count: str = "count",
        estimate: str = "mean",
        at: float | None = None,
        level: float = 0.94,
        seed: int = 0,
    ) -> pandas.DataFrame:
        """Returns estimates of a finite population or of its areas: post-stratification.

        It is a function of the posterior and of the public table, and costs no privacy.

        Args:
          counts: A public table with the covariates' columns and a column of how many persons of
            the population have these values: the whole population, the sample included.
          by: Columns of the table; there is an estimate for each combination of their values, such
            as each county. By default one for all.
          count: The column of numbers of persons.
          estimate: "mean" (of Bernoulli outcomes the share, of categorical and ordinal ones that of
            each level), "total", "share" of outcomes of at most `at`, or "quantile" `at`.
          at: The value of a share, or the probability of a quantile.
          level: The probability of the intervals, which are central.
          seed: The seed of the draws of persons' outcomes.

        Returns:
          A pandas DataFrame with a row each area: the columns of `by`, "count", "estimate", "sd"
          and the interval's ends, in the units of the formula's outcome; with a row each level, and
          its name in "level", for categorical and ordinal families.

        Raises:
          ValueError: Columns or counts do not fit.
        """
        import pandas

        level = check.probability("level", level)
        check_estimate(estimate, at, self.parts.family)
        num_records = self.model.privacy_account.num_records
        strata = make_strata(counts, count, by, num_records)
        generator = np.random.default_rng(check.count("seed", seed))
        rows = self.design.rows(counts, with_limits=False)
        strata, outcomes = self._population(strata, rows, generator)
        draws = estimates(outcomes, strata, estimate, at, generator)
        names = None
        if draws.ndim == 3:
            names = outcome_levels(self.design.schema.columns[self.design.outcome])
        return pandas.DataFrame(table(draws, strata, level, names))

    def _population(
        self, strata: Strata, rows: Rows, generator: np.random.Generator
    ) -> tuple[Strata, Outcomes]:
        """Returns strata with distributions of outcomes.

        Persons with intercepts of their own fall into classes of these, as many as quadrature has.
        """
        draws = self._few_draws
        scores, numbers = self._score(rows), strata.counts
        if self.parts.layout.unit:
            points, weights = standard_intercepts()
            shape = (len(scores), len(numbers))
            whole = np.broadcast_to(numbers, shape).astype(np.int64)
            numbers = generator.multinomial(whole, weights).reshape(shape[0], -1)
            intercepts = draws["unit_sd"][:, None, None, None] * points
            scores = (scores[..., None] + intercepts).swapaxes(2, 3)
            scores = scores.reshape(shape[0], -1, scores.shape[3])
            counts = np.repeat(strata.counts / NUM_POINTS, NUM_POINTS)
            strata = Strata(counts, np.repeat(strata.area, NUM_POINTS), strata.labels)
        mean = predicted(self.parts.kind, scores, self._own(), self.parts.outcome, 0)[0]
        spread = np.full([len(mean), 1], np.inf)
        if self.parts.family == "normal":
            spread = draws["sigma"][:, None] * self.parts.outcome.scale
        elif self.parts.family == "negative_binomial":
            spread = 1.0 / draws["alpha"][:, None]
        return strata, Outcomes(self.parts.family, numbers, mean, spread)

    def effects(
        self,
        name: str,
        num: int = 50,
        level: float = 0.94,
        at: Mapping[str, float | str] | None = None,
    ) -> pandas.DataFrame:
        """Returns expected outcomes as one covariate varies and others have typical values.

        The typical value of a category is its first level, and of a binary column 0.

        Args:
          name: The covariate.
          num: The number of values of a numeric covariate, between its bounds; where its typical
            values are known, not beyond three deviations from them.
          level: The probability of the intervals.
          at: Values of other covariates instead of their typical ones, such as those at which an
            interaction is to be seen.

        Returns:
          As `predict`, with the covariate's values in the first column.

        Raises:
          ValueError: A name is no covariate, or a value of `at` is not allowed by the schema.
        """
        others = self.design.covariates
        if name not in others:
            raise ValueError(f"name={name!r} is no covariate: use one of {', '.join(others)}.")
        column = others.pop(name)
        num = check.count("num", num, 1)
        fixed = at or {}
        if not isinstance(fixed, Mapping) or any(map(np.ndim, fixed.values())):
            raise TypeError("at must be a dict of one value each, such as {'ward': 'A'}.")
        if unknown := [each for each in fixed if each not in others]:
            raise ValueError(
                f"at has {unknown}, which are no other covariates: use {', '.join(others)}."
            )
        values: Any
        if isinstance(column, Numeric):
            values = np.linspace(*_range(column), num)
            values = np.unique(np.round(values)) if column.step else values
        else:
            values = column.values(np.arange(column.num_levels), np.random.default_rng(0))
        records = {other: _typical(each, len(values)) for other, each in others.items()}
        for other, value in fixed.items():
            records[other] = np.full(len(values), value)
        records[name] = values
        table = self.predict(records, level)
        table.insert(0, name, values)
        return table

    def plot(self, name: str | None = None, ax: Any = None) -> Any:
        """Draws intervals of the coefficients, or the effect of a covariate with its band.

        Args:
          name: None for the coefficients, or a covariate.
          ax: Axes of matplotlib; None for new ones.

        Returns:
          The axes.
        """
        outcome = self.design.outcome_text
        if name is None:
            inner = self.parts.names_of_model(self.design)
            beside = ("intercept", *self.parts.own_names)
            hidden = [each for each, of in inner.items() if of.partition("[")[0] in beside]
            return plots.forest(self.draws, outcome, ax, hidden)
        return plots.effect(self.effects(name), self.design.schema.columns[name], outcome, ax)

    # ------------------------------------------------------------------ other forms

    def to_inference_data(self) -> Any:
        """Returns ArviZ's data of the coefficients in the units of the formula (extra `arviz`)."""
        chains = {name: draws.reshape(4, -1) for name, draws in self.draws.items()}
        return inference_data.from_groups(inference_data.import_arviz(), {"posterior": chains})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the regression with its model and ledger to one file, a zip archive.

        Args:
          path: The file's path.
        """
        design = self.design
        described = {
            "formula": design.formula,
            "schema": design.schema.to_dict(),
            "missing": design.missing,
            "outside": design.outside,
            "constants": {
                name: np.asarray(value).tolist() for name, value in design.constants.items()
            },
            "parts": dataclasses.asdict(self.parts),
        }
        text = json.dumps(described)
        with tempfile.TemporaryDirectory() as folder:
            inner = os.path.join(folder, "model.keras")
            self.model.save(inner)
            with zipfile.ZipFile(os.fspath(path), "w") as archive:
                archive.write(inner, "model.keras")
                archive.writestr("regression.json", text)

    def export(
        self, path: str | os.PathLike[str], *, level: float = 0.94, overwrite: bool = False
    ) -> None:
        """Writes a SavedModel of `predict` that needs TensorFlow alone, with its privacy report.

        Its `predict` takes the covariates' columns by name, in the units of the schema, and returns
        "mean", "mean_low" and "mean_high" of the expected outcome: those of `Regression.predict`.
        Beside it are a model card (`README.md`), the privacy report
        (`assets.extra/privacy_report.json`), and coefficients, schema and every choice
        (`assets.extra/regression.txt`).

        Args:
          path: The folder to write, new or empty.
          level: The probability of the intervals, which are central.
          overwrite: Whether to replace an earlier export.

        Raises:
          ValueError: The path is taken or not writable, or the formula has terms that TensorFlow
            alone does not compute: others than columns, categories, `np.exp`, `np.log`, `np.log1p`,
            `np.sqrt`, `np.square`, and their products.

        #### Formal guarantee

        The folder is a function of the released posterior, the schema and the formula. It has no
        record, identifier, ledger or key, and not the data set's name.
        """
        level = check.probability("level", level)
        export.write(
            path,
            [predict_signature(self.design, self.parts, self._few_draws, level)],
            self.privacy_report(),
            title=self._heading(),
            overwrite=overwrite,
            texts={"regression.txt": "\n\n".join([repr(self), *self._described()]) + "\n"},
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Regression:
        """Returns the regression that `save` wrote.

        Args:
          path: The file's path.

        Raises:
          ValueError: The file is none of `save`.
        """
        path = os.fspath(path)
        try:
            with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
                described = json.loads(archive.read("regression.json"))
                model = load_model(archive.extract("model.keras", folder))
        except (OSError, zipfile.BadZipFile, KeyError, json.JSONDecodeError):
            raise ValueError(f"path={path!r} is no file that Regression.save wrote.") from None
        fields = described["parts"]
        fields["outcome"] = Outcome(
            **{**fields["outcome"], "cuts": tuple(fields["outcome"]["cuts"])}
        )
        sizes = tuple(fields["layout"]["group_sizes"])
        places = {
            name: tuple(map(tuple, fields["layout"].get(name, ())))
            for name in ("monotone", "correlated")
        }
        fields["layout"] = Layout(**{**fields["layout"], "group_sizes": sizes, **places})
        fields["coefficients"] = tuple(tuple(pair) for pair in fields["coefficients"])
        for name in ("intercept", "location", "scale", "measured"):
            fields[name] = tuple(fields[name])
        design = Design(
            described["formula"],
            Schema.from_dict(described["schema"]),
            missing=described["missing"],
            outside=described["outside"],
            constants=described["constants"],
        )
        return cls(design, Parts(**fields), model)


def _range(column: Numeric) -> tuple[float, float]:
    """Returns between which values effects are shown: where records may be expected."""
    if column.typical is None:
        return column.lower, column.upper
    reach = _REACH * column.deviation
    lower = max(column.lower, column.location - reach)
    return lower, min(column.upper, column.location + reach)


def _typical(column: Any, num: int) -> np.ndarray:
    if isinstance(column, Numeric):
        value = round(column.location) if column.step else column.location
        return np.full(num, value)
    return column.values(np.zeros(num, np.int64), np.random.default_rng(0))
