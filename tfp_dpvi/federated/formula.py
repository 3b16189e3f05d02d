"""`RegressionStudy`: a formula and a schema as the model that hospitals share."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Structure
from tfp_dpvi.calibrated.summary import PosteriorSummary, statistics_of
from tfp_dpvi.data import Schema
from tfp_dpvi.federated.calibrated import Released, StudyDraws, StudyPosterior
from tfp_dpvi.federated.study import Study
from tfp_dpvi.optimizers import InformationOptimizer
from tfp_dpvi.regressions.checking import numbers_within, outcome_values
from tfp_dpvi.regressions.design import Design
from tfp_dpvi.regressions.families import likelihood, make_prior
from tfp_dpvi.regressions.fit import described, weight_column
from tfp_dpvi.regressions.measured import undescribed
from tfp_dpvi.regressions.parts import Parts
from tfp_dpvi.regressions.words import NOT_KNOWN, in_own_words

_LOG = logging.getLogger("tfp_dpvi")

_EXAMPLES = 4
_SEED = 7
# Of the length of a record's score. At 1 the rounds of skewed scores, as those of a scale, end
# farther from the posterior than these are linear.
_CLIP = 2.0


class FormulaColumns:
    """Turns a hospital's table into design rows and outcomes, which the schema alone decides.

    It takes the place of `Columns` in a study of a regression.

    Args:
      design: The design of the formula.
      parts: The model's description.

    Attributes:
      schema: The description of the formula's columns.
      outcome: The name of the outcome's column.
      outside: Whether numbers outside of their bounds are refused or clipped to them.
    """

    def __init__(self, design: Design, parts: Parts) -> None:
        self._design, self._parts = design, parts
        self.schema, self.outcome = design.schema, design.outcome
        self.outside = design.outside

    def arrays(self, x: Structure, y: Structure | None) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs [n, columns] and outcomes [n] of a hospital's records.

        Args:
          x: A table with the formula's columns; others are ignored.
          y: None: the outcome is a column.

        Raises:
          ValueError: A column is absent, or has values that the schema does not allow.
        """
        if y is not None:
            raise ValueError(f"y was passed, and {self.outcome!r} is a column of x: leave y out.")
        design, parts = self._design, self._parts
        outcomes = outcome_values(design, parts.family, parts.outcome, x)
        return parts.inputs(design.rows(x)), outcomes

    def public_inputs(self, num: int) -> np.ndarray:
        """Returns inputs of invented records of the schema, float32 [num, columns].

        Args:
          num: The number of rows.
        """
        return self._parts.inputs(self._design.rows(self._design.simulated(num, _SEED)))

    def example(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns invented records: the same on every machine."""
        design = self._design
        invented = design.schema.simulate(_EXAMPLES, _SEED)
        records = {**invented, **design.simulated(_EXAMPLES, _SEED)}
        if design.trials is not None:
            trials = invented[design.trials] if isinstance(design.trials, str) else design.trials
            records[design.outcome] = np.minimum(invented[design.outcome], trials)
        return self.arrays(records, None)


class RegressionStudy(Study):
    """A regression that several hospitals fit together: a `Study` from a formula and a schema.

    `(1 | hospital)` gives each hospital an intercept of its own, around a shared one, and
    `(1 + age | hospital)` a slope too: see `local` of `Study`. No column of hospitals is needed.
    Effects of a hospital are independent, as in `(1 + age || hospital)`, which means the same here.
    Hospitals pass their tables as x, without y.

    Args:
      formula: As of `dpvi.regression`, with common effects for all slopes that differ.
      family: As of `dpvi.regression`.
      schema: The public description of the columns, the same at every hospital.
      hospital: What the formula calls hospitals.
      priors: As of `dpvi.regression`.
      missing: As of `dpvi.regression`.
      outside: As of `dpvi.regression`.
      constants: As of `dpvi.regression`.
      weights: The column of survey weights in hospitals' tables, as of `dpvi.regression`: its
        `upper` in the schema is the public largest weight.
      **settings: Other arguments of `Study`, such as its name.

    Attributes:
      design: The design of the formula, without hospitals' effects.
      parts: The model's description.
      weights: The column of survey weights, or None.

    Raises:
      ImportError: formulae is not installed.
      ValueError: Formula, family and schema do not fit each other.

    ```python
    >>> import numpy as np
    >>> schema = {
    ...     "ill": {"type": "binary"},
    ...     "age": {"type": "continuous", "lower": 18.0, "upper": 90.0},
    ... }
    >>> study = RegressionStudy("ill ~ age + (1 | hospital)", "bernoulli", schema)
    >>> study.local.names
    ('intercept',)

    ```
    """

    def __init__(
        self,
        formula: str,
        family: str,
        schema: Schema | Mapping[str, Any],
        *,
        hospital: str = "hospital",
        priors: Mapping[str, Any] | None = None,
        missing: str | None = None,
        outside: str = "refuse",
        constants: Mapping[str, Any] | None = None,
        weights: str | None = None,
        **settings: Any,
    ) -> None:
        self.weights, self._described = weights, Schema.of(schema)
        if weights is not None:
            settings["max_weight"] = float(weight_column(self._described, weights).upper)
        common, effects = _without_hospitals(formula, hospital)
        self.design, self.parts = described(
            common,
            family,
            schema,
            priors,
            missing=missing,
            outside=outside,
            constants=constants,
        )
        self._formula = formula
        if effects:
            settings["local"] = self._own_names(effects)
        # In scaled columns, about the length of a record's score is the root of their number.
        optimizer = InformationOptimizer(_CLIP * math.sqrt(self.parts.num_coefficients))
        super().__init__(
            make_prior(**self.parts.prior),
            functools.partial(likelihood, **self.parts.likelihood),
            optimizer,
            schema=self.design.schema,
            **settings,
        )

    def make_columns(self, schema: Schema, outcome: str | None) -> FormulaColumns:
        """See `Study.make_columns`: here of design rows."""
        del schema, outcome
        return FormulaColumns(self.design, self.parts)

    def agreed_settings(self) -> dict[str, str]:
        """See `Study.agreed_settings`: hospitals agree on formula and family too."""
        own = {"formula": self._formula, "family": self.parts.family}
        if self.weights is not None:
            own["weights"] = self._described.part([self.weights]).to_json()
        return {**super().agreed_settings(), **own}

    def column_of_weights(self, x: Structure) -> np.ndarray | None:
        """See `Study.column_of_weights`.

        Args:
          x: A hospital's table.
        """
        if self.weights is None:
            return None
        return numbers_within(self._described, self.weights, x, self.design.outside)

    def _own_names(self, effects: list[str]) -> list[str]:
        """Returns the model's names of what differs between hospitals."""
        if self.parts.family == "categorical":
            raise ValueError('family="categorical" has no effects of hospitals: leave them out.')
        intercept = "threshold" if self.parts.family == "ordinal" else "intercept"
        names = []
        for effect in effects:
            if effect == "1":
                names.append(intercept)
                continue
            if effect not in self.design.terms:
                common = ", ".join(self.design.terms) or "none"
                raise ValueError(
                    f"formula lets {effect!a:.99} differ between hospitals, which is no common "
                    f"effect (there are: {common!s:.200}):\n"
                    "add it as a common effect too, and name one effect at a time."
                )
            place = self.design.terms[effect]
            names += [f"coefficients[{number}]" for number in range(place.start, place.stop)]
        return names

    def calibrated_posterior(self, released: Released, *, weights: str = "sum") -> StudyPosterior:
        """See `Study.calibrated_posterior`; columns of which bounds alone are known are a fault.

        Args:
          released: The study's server, or its history.
          weights: As of `Study.calibrated_posterior`.
        """
        posterior = super().calibrated_posterior(released, weights=weights)
        if not (unknown := undescribed(self.design.schema)):
            return posterior
        fault = f"typical values of {', '.join(unknown)} {NOT_KNOWN}, or `count_columns`"
        _LOG.warning("Do not trust the posterior's intervals: %s.", fault)
        return dataclasses.replace(posterior, faults=(*posterior.faults, fault))

    def summary(self, posterior: StudyPosterior, *, seed: int = 0) -> PosteriorSummary:
        """Returns a table of a posterior in the units of the formula.

        "sd of Intercept" is that of hospitals' intercepts at the typical values of the covariates,
        "Intercept at berlin" how far that hospital's lies from the shared one there.

        Args:
          posterior: From `calibrated_posterior` or a history.
          seed: Seed of the draws that it is computed from.
        """
        drawn = posterior.draws(seed=seed)
        named = self._in_units(drawn)
        table = PosteriorSummary(
            list(named),
            statistics_of(np.stack(list(named.values()), axis=1)),
            posterior.calibrated.checks,
            in_words=self._in_own_words,
        )
        rows = self._effects_of(drawn)
        return table.with_rows(rows, (*posterior.faults, *posterior.notes))

    def draws(self, posterior: StudyPosterior, *, seed: int = 0) -> dict[str, np.ndarray]:
        """Returns draws in the units of the formula, each of shape [4000], by the summary's rows.

        Args:
          posterior: As in `summary`.
          seed: Seed of the draws.
        """
        drawn = posterior.draws(seed=seed)
        return {**self._in_units(drawn), **self._effects_of(drawn)}

    def warnings(self, posterior: StudyPosterior) -> list[str]:
        """Returns why not to trust a posterior's intervals, in the words of the formula.

        Args:
          posterior: As in `summary`.
        """
        checks = posterior.calibrated.checks.warnings
        return [*map(self._in_own_words, checks), *posterior.faults]

    def _in_own_words(self, sentence: str) -> str:
        names = self.parts.names_of_model(self.design)
        is_censored = self.design.limit is not None
        return in_own_words(sentence, self.parts.family, names, is_censored=is_censored)

    def _in_units(self, drawn: StudyDraws) -> dict[str, np.ndarray]:
        parameters = dict(drawn.parameters)
        arrays = {name: np.asarray(part, np.float64) for name, part in parameters.items()}
        return self.parts.in_units(arrays, self.design)

    def _effects_of(self, drawn: StudyDraws) -> dict[str, np.ndarray]:
        """Returns draws of the effects and of their standard deviations, in units, by name."""
        # `local` may name other parameters, whose effects are on the real line.
        units = {name: self._units().get(name, (name, 1.0)) for name in drawn.sds}
        rows = {f"sd of {units[name][0]}": units[name][1] * sds for name, sds in drawn.sds.items()}
        for hospital, effects in drawn.effects.items():
            rows |= {
                f"{units[name][0]} at {hospital}": units[name][1] * values
                for name, values in effects.items()
            }
        return rows

    def _units(self) -> dict[str, tuple[str, float]]:
        """Returns the name of each coefficient in the formula, and its unit, by the model's."""
        unit = self.parts.outcome.scale
        slopes = {
            f"coefficients[{place}]": (label, unit / scale)
            for place, (label, scale) in enumerate(
                zip(self.design.labels, self.parts.scale, strict=True)
            )
        }
        return {"intercept": ("Intercept", unit), "threshold": ("threshold", 1.0), **slopes}


def _without_hospitals(formula: str, hospital: str) -> tuple[str, list[str]]:
    """Returns the formula without effects of hospitals, and what these are: "1" and terms."""
    check.text("formula", formula, "pass a formula, such as ill ~ age + (1 | hospital)")
    check.text("hospital", hospital, "pass what the formula calls hospitals")
    term = rf"\(([^()|]*)\|\|?\s*`?{re.escape(hospital)}`?\s*\)"
    if re.search(rf"[^+~\s]\s*{term}|{term}\s*[^-+\s]", formula):
        raise ValueError(
            f"formula={formula!a:.99}: effects of hospitals are added, as in + (1 | {hospital})."
        )
    effects: list[str] = []
    for inner in re.findall(term, formula):
        parts = [part.strip() for part in inner.split("+") if part.strip()]
        if "0" not in parts and "1" not in parts:
            parts.insert(0, "1")
        effects += [part for part in parts if part != "0" and part not in effects]
    common = re.sub(rf"\+\s*{term}|{term}\s*\+|{term}", "", formula)
    if common.rstrip().endswith("~"):
        common += " 1"
    return common.strip(), effects
