"""`dpvi.regression`: a private regression from a formula, a table and an epsilon."""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import tf, tfp
from tfp_dpvi.calibrated.summary import PosteriorSummary
from tfp_dpvi.data import Schema
from tfp_dpvi.data.columns import Categorical, Column, Numeric
from tfp_dpvi.models import DPVI, load_model
from tfp_dpvi.privacy import PrivacyLedger
from tfp_dpvi.regressions.design import Design
from tfp_dpvi.regressions.families import FAMILIES, Family, Params, cutpoints
from tfp_dpvi.serialization import register

tfd: Any = tfp.distributions
_NUM_DRAWS = 4000
_NUM_CURVE = 60
_SYNONYMS = {
    "gaussian": "normal",
    "binomial": "bernoulli",
    "logistic": "bernoulli",
    "negativebinomial": "negative_binomial",
    "cumulative": "ordinal",
}


@functools.lru_cache(maxsize=16)
def _parts(text: str) -> tuple[Design, Family, dict[str, tuple[float, float]]]:
    """Returns what a saved model knows of its regression."""
    values = json.loads(text)
    design = Design(values["formula"], Schema.from_dict(values["schema"]))
    return design, FAMILIES[values["family"]], values["priors"]


def _outcome(design: Design) -> Column:
    return design.schema.columns[design.outcome].description


@register("regression_prior")
def _prior(text: str) -> Any:
    design, family, given = _parts(text)
    return tfd.JointDistributionNamed(family.prior(design, _outcome(design), given))


@register("regression_likelihood")
def _likelihood(params: Params, x: Mapping[str, Any], text: str) -> Any:
    design, family, _ = _parts(text)
    eta = family.predictor(design, _outcome(design), params, x)
    return family.likelihood(params, eta)


def regression(
    formula: str,
    data: Any,
    family: str,
    schema: Schema | Mapping[str, Any],
    *,
    epsilon: float,
    delta: float,
    priors: Mapping[str, tuple[float, float]] | None = None,
    ledger: PrivacyLedger | None = None,
    verbose: int = 0,
) -> Regression:
    """Fits a private Bayesian regression. There is nothing to choose but epsilon.

    Columns are scaled by what the schema says of them, and the estimator is that of `DPVI.compile`
    without an optimizer; its public inputs are records that the schema simulates.

    ```python
    >>> import numpy as np
    >>> from tfp_dpvi.data import Binary, Continuous, Schema
    >>> schema = Schema({"ill": Binary(), "age": Continuous(18, 90, typical=(50, 15))})
    >>> rng = np.random.default_rng(0)
    >>> age = rng.uniform(18, 90, size=2000)
    >>> data = {"age": age, "ill": rng.random(2000) < 1 / (1 + np.exp(4 - 0.08 * age))}
    >>> fit = regression("ill ~ age", data, "bernoulli", schema, epsilon=1.0, delta=1e-5)
    >>> fit.labels
    ['Intercept', 'age']

    ```

    Args:
      formula: A formula as Bambi reads it: "visits ~ age * sex + offset(log_years) + (1 | county)".
        Transforms such as `bs(age, df=4)`, `poly(age, 2)` or `scale(age)` take their parameters
        from the schema. Functions of single values may be used: log, sqrt, exp, abs, where, ....
      data: A frame of pandas, polars or Arrow, or a dict of arrays, one row a person. Their number
        is taken as public.
      family: "normal", "bernoulli", "poisson", "negative_binomial", "categorical" or "ordinal".
      schema: `dpvi.Schema`, or a dict for `Schema.from_dict`, of all columns in the formula.
      epsilon: The budget of the fit.
      delta: The delta of the budget.
      priors: By label, mean and standard deviation of normal priors in the data's units; that of
        "Intercept" holds at typical inputs. Others are weakly informative, see `Family`.
      ledger: The ledger of these data; a new one by default.
      verbose: 1 for a progress bar.

    Returns:
      The fit.

    Raises:
      ValueError: The formula, the schema or the data do not fit together; nothing is spent.

    #### Formal guarantee

    That of `DPVI.fit` with `compile(epsilon=, delta=)`: a row of the design is a function of that
    record and the schema alone, so one record changes one row.
    """
    schema = schema if isinstance(schema, Schema) else Schema.from_dict(schema)
    name = _SYNONYMS.get(family, family)
    check.one_of("family", name, tuple(FAMILIES))
    design = Design(formula, schema)
    _check_outcome(design, FAMILIES[name])
    given = _checked_priors(priors or {}, design)
    text = json.dumps(
        {
            "formula": formula,
            "schema": design.schema.to_dict(),
            "family": name,
            "priors": given,
        }
    )
    x, y = design.inputs(data), design.outcomes(data)
    model = DPVI(
        functools.partial(_prior, text=text),
        functools.partial(_likelihood, text=text),
    )
    model.compile(epsilon=epsilon, delta=delta, ledger=ledger)
    model.fit(x, y, public_inputs=design.public_inputs(), verbose=verbose)
    return Regression(model, text)


def _check_outcome(design: Design, family: Family) -> None:
    column = _outcome(design)
    if not family.outcome(column):
        raise ValueError(
            f"schema: the outcome {design.outcome!r} is {type(column).__name__}, and family "
            f"{family.name!r} needs {family.needs}."
        )
    if design.groups and family.num_predictors(column) > 1:
        raise ValueError("formula: family 'categorical' has no effects of groups: leave them out.")


def _checked_priors(
    priors: Mapping[str, tuple[float, float]], design: Design
) -> dict[str, tuple[float, float]]:
    known = ["Intercept", *design.labels]
    given = {}
    for label, pair in priors.items():
        if label not in known:
            raise ValueError(f"priors: {label!r} is no coefficient: they are {', '.join(known)}.")
        try:
            mean, sd = (float(value) for value in pair)
        except (TypeError, ValueError):
            mean, sd = 0.0, 0.0
        if not (np.isfinite(mean) and np.isfinite(sd) and sd > 0.0):
            raise ValueError(
                f"priors: {label!r} must have a mean and a positive standard deviation, such as "
                "(0, 1)."
            )
        given[label] = (mean, sd)
    return given


class Regression:
    """A private regression: its posterior in the data's units.

    Args:
      model: The fitted model.
      text: What `regression` wrote into it.

    ```python
    >>> fit = Regression.load("visits.keras")  # doctest: +SKIP
    >>> fit.effects("age")["mean"].shape  # doctest: +SKIP
    (60,)

    ```

    Attributes:
      model: The `DPVI` behind it.
      design: The formula with its schema.
      family: The family of outcomes.
      labels: Names of the coefficients and other parameters, in the order of `summary`.
    """

    def __init__(self, model: DPVI, text: str) -> None:
        self.model = model
        self._text = text
        self.design, self.family, self._priors = _parts(text)

    # ------------------------------------------------------------------ the posterior

    @functools.cached_property
    def _draws(self) -> dict[str, np.ndarray]:
        draws: Any = self.model.posterior_sample(_NUM_DRAWS, seed=0)
        return {name: np.asarray(part) for name, part in draws.items()}

    @functools.cached_property
    def _summary(self) -> PosteriorSummary:
        return self.model.posterior_summary()

    @functools.cached_property
    def draws(self) -> dict[str, np.ndarray]:
        """Draws of the posterior in the data's units by label, each of shape [4000]."""
        draws, design = self._draws, self.design
        found: dict[str, np.ndarray] = {}
        slopes = draws.get("slopes", np.zeros([_NUM_DRAWS, 0]))
        several = slopes.ndim == 3
        scale = design.scale[:, None] if several else design.scale
        location = design.location[:, None] if several else design.location
        slopes = slopes / scale
        shift = np.sum(slopes * location, axis=1)
        levels = (
            self._levels()[1:]
            if several or self.family.num_predictors(_outcome(design)) > 1
            else [""]
        )

        def put(label: str, values: np.ndarray) -> None:
            columns = values.reshape(_NUM_DRAWS, -1)
            for level, column in zip(levels, columns.T, strict=True):
                found[f"{label}[{level}]" if level else label] = column

        if "Intercept" in draws:
            put("Intercept", draws["Intercept"] - shift)
        for place, label in enumerate(design.labels):
            put(label, slopes[:, place])
        if self.family.name == "ordinal":
            thresholds = np.asarray(cutpoints(draws)) + shift[:, None]
            names = self._levels()
            for number, column in enumerate(thresholds.T):
                found[f"threshold[{names[number]}|{names[number + 1]}]"] = column
        for name in ("sigma", "size"):
            if name in draws:
                found[name] = draws[name]
        for number, group in enumerate(design.groups):
            found[f"{group.name}_sd"] = draws[f"sd_{number}"] / group.scale
            for level, column in zip(group.levels, draws[f"effects_{number}"].T, strict=True):
                found[f"{group.name}[{level}]"] = column / group.scale
        return found

    def _levels(self) -> list[str]:
        column = _outcome(self.design)
        return [str(level) for level in getattr(column, "categories", ())]

    @property
    def labels(self) -> list[str]:
        """Names of the coefficients and other parameters."""
        return list(self.draws)

    @property
    def warnings(self) -> list[str]:
        """What the checks say against the intervals, a sentence each; empty if nothing."""
        checks = self._summary.checks
        return ["the posterior is not calibrated"] if checks is None else checks.warnings

    def summary(self, groups: bool = False) -> Any:
        """Returns a table of the coefficients in the data's units, as a pandas frame.

        Args:
          groups: Whether to include the effects of single groups.

        Returns:
          A row for each parameter: "mean", "sd", the ends of the 90 % interval "eti_5%" and
          "eti_95%", the shares of the variance by "noise", "data" and "prior", and how many times as
          many records, or as much epsilon, would halve the interval.
        """
        pandas = importlib.import_module("pandas")
        rows = {}
        hidden = {
            f"{group.name}[{level}]" for group in self.design.groups for level in group.levels
        }
        for label, values in self.draws.items():
            if label in hidden and not groups:
                continue
            low, high = np.quantile(values, [0.05, 0.95])
            row = {"mean": values.mean(), "sd": values.std(), "eti_5%": low, "eti_95%": high}
            place = self._place(label)
            for name in ("noise", "data", "prior", "N halves", "eps halves"):
                column = self._summary.columns.get(name)
                row[name] = np.nan if column is None or place is None else column[place]
            rows[label] = row
        return pandas.DataFrame.from_dict(rows, orient="index")

    def _place(self, label: str) -> int | None:
        """Returns the row of the model's own summary whose shares are those of a label."""
        own, level = label, ""
        if (
            label.endswith("]")
            and not label.startswith("threshold")
            and label not in self.design.labels
        ):
            own, level = label[:-1].rsplit("[", 1)
        names, design = self._summary.names, self.design
        several = self.family.num_predictors(_outcome(design)) > 1
        end = f"[{self._levels().index(level) - 1}]" if several and level else ""
        name = None
        if own in design.labels:
            place = design.labels.index(own)
            name = f"slopes[{place},{end[1:]}" if end else f"slopes[{place}]"
        elif own == "Intercept":
            name = f"Intercept{end}"
        elif own in names:
            name = own
        for number, group in enumerate(design.groups):
            if own == f"{group.name}_sd":
                name = f"sd_{number}"
            elif own == group.name and level in group.levels:
                name = f"effects_{number}[{group.levels.index(level)}]"
        return names.index(name) if name in names else None

    def predict(self, data: Any, level: float = 0.9) -> Any:
        """Returns the expected outcomes of records, with intervals, as a pandas frame.

        Args:
          data: Records with the formula's columns but the outcome.
          level: The probability of the intervals.

        Returns:
          "mean", "low" and "high" of the expected outcome; for a categorical or ordinal one those of
          each level's probability, "mean[level]" and so on.
        """
        pandas = importlib.import_module("pandas")
        expected = self._expected(self.design.inputs(data))
        return pandas.DataFrame(self._bands(expected, level))

    def effects(self, column: str, level: float = 0.9) -> Any:
        """Returns how the expected outcome changes with one column, others at typical values.

        Args:
          column: A column of the schema.
          level: The probability of the intervals.

        Returns:
          A pandas frame as of `predict`, with the column's values first.

        Raises:
          ValueError: The formula has no such column.
        """
        design = self.design
        if column not in design.schema.columns or column == design.outcome:
            known = [name for name in design.schema.names if name != design.outcome]
            raise ValueError(f"column={column!r} is not in the formula: it has {', '.join(known)}.")
        values = _grid(design.schema.columns[column].description)
        data = {
            name: np.array([_typical(each.description)] * len(values))
            for name, each in design.schema.columns.items()
        }
        data[column] = values
        table = self.predict(data, level)
        table.insert(0, column, values)
        return table

    def _expected(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns expected outcomes of each draw, shape [draws, n] or [draws, n, levels]."""
        draws = {name: tf.constant(part[:1000]) for name, part in self._draws.items()}
        x = {name: tf.constant(part) for name, part in inputs.items()}

        def of_draw(params: dict[str, tf.Tensor]) -> tf.Tensor:
            distribution = _likelihood(params, x, self._text)
            if self.family.name in ("categorical", "ordinal"):
                if hasattr(distribution, "probs_parameter"):
                    return distribution.probs_parameter()
                return tf.exp(distribution.categorical_log_probs())
            return distribution.mean()

        expected: np.ndarray = tf.map_fn(of_draw, draws, fn_output_signature=tf.float32).numpy()
        return expected

    def _bands(self, expected: np.ndarray, level: float) -> dict[str, np.ndarray]:
        if not 0.0 < level < 1.0:
            raise ValueError(f"level={level!r} must be between 0 and 1.")
        ends = [(1.0 - level) / 2.0, (1.0 + level) / 2.0]
        levels = self._levels() if expected.ndim == 3 else [""]
        parts = np.moveaxis(expected.reshape(*expected.shape[:2], -1), 2, 0)
        table = {}
        for name, part in zip(levels, parts, strict=True):
            end = f"[{name}]" if name else ""
            low, high = np.quantile(part, ends, axis=0)
            table.update({f"mean{end}": part.mean(axis=0), f"low{end}": low, f"high{end}": high})
        return table

    # ------------------------------------------------------------------ what people look at

    def choices(self) -> list[str]:
        """Returns what was chosen for the user, a sentence each."""
        design, column = self.design, _outcome(self.design)
        priors = self.family.prior(design, column, self._priors)
        sentences = [
            f"family {self.family.name}, link {self.family.link}",
            "columns scaled by the schema: "
            + (
                ", ".join(
                    f"({label} - {location:.4g}) / {scale:.4g}"
                    for label, location, scale in zip(
                        design.labels, design.location, design.scale, strict=True
                    )
                    if (location, scale) != (0.0, 1.0)
                )
                or "none"
            ),
        ]
        location, unit = self.family.location_and_scale(column)
        if "Intercept" in priors:
            sentences.append(
                f"prior of the intercept at typical inputs: normal({location:.4g}, "
                f"{2.5 * unit:.4g})"
            )
        sentences.append(
            f"prior of coefficients of scaled columns: normal(0, {self.family.spread * unit:.4g})"
        )
        sentences += [
            f"prior of {label}: normal({mean:g}, {sd:g})"
            for label, (mean, sd) in self._priors.items()
        ]
        sentences.append("public inputs: records simulated from the schema, columns independent")
        return sentences

    def report(self) -> str:
        """Returns the privacy report, what is public and must be answered for, and all choices."""
        lines = [str(self.model.privacy_report()), "", "The schema is public. A curator answers:"]
        lines += [f"* {question}" for question in self.design.schema.questions()]
        lines += ["", "Chosen without the data:"]
        lines += [f"* {choice}" for choice in self.choices()]
        return "\n".join(lines)

    def plot(self, labels: Sequence[str] | None = None, ax: Any = None) -> Any:
        """Draws the coefficients with their 90 % intervals.

        Args:
          labels: Which; all but the intercept and group effects by default.
          ax: Axes of matplotlib; new ones by default.

        Returns:
          The axes.
        """
        if ax is None:
            pyplot = importlib.import_module("matplotlib.pyplot")
            _, ax = pyplot.subplots(figsize=(6.0, 1.0 + 0.3 * len(self.labels)))
        table = self.summary()
        names = list(labels or [name for name in table.index if not name.startswith("Intercept")])
        table = table.loc[names[::-1]]
        places = np.arange(len(table))
        ax.hlines(places, table["eti_5%"], table["eti_95%"], lw=2)
        ax.plot(table["mean"], places, "o")
        ax.axvline(0.0, color="0.7", lw=1, zorder=0)
        ax.set_yticks(places, list(table.index))
        ax.set_xlabel("coefficient, 90 % interval" + (" (see warnings)" if self.warnings else ""))
        return ax

    def plot_effects(self, column: str, ax: Any = None) -> Any:
        """Draws `effects`: the expected outcome over one column with its 90 % band.

        Args:
          column: A column of the schema.
          ax: Axes of matplotlib; new ones by default.

        Returns:
          The axes.
        """
        if ax is None:
            pyplot = importlib.import_module("matplotlib.pyplot")
            _, ax = pyplot.subplots()
        table = self.effects(column)
        described = self.design.schema.columns[column].description
        ends = [name.removeprefix("mean") for name in table.columns if name.startswith("mean")]
        for end in ends:
            low, mean, high = (table[f"{part}{end}"] for part in ("low", "mean", "high"))
            if isinstance(described, Categorical):
                ax.errorbar(table[column].astype(str), mean, [mean - low, high - mean], fmt="o")
            else:
                ax.plot(table[column], mean, label=end.strip("[]") or None)
                ax.fill_between(table[column], low, high, alpha=0.3)
        if len(ends) > 1:
            ax.legend()
        units = getattr(described, "units", "")
        ax.set_xlabel(f"{column} ({units})" if units else column)
        ax.set_ylabel(f"expected {self.design.outcome}")
        return ax

    def to_inference_data(self) -> Any:
        """Returns the posterior in the data's units for ArviZ, one chain of independent draws."""
        arviz = importlib.import_module("arviz")
        posterior = {label: values[None] for label, values in self.draws.items()}
        try:
            return arviz.from_dict(posterior=posterior)
        except TypeError:
            # From version 1 on groups are one dict.
            return arviz.from_dict({"posterior": posterior})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the fit with its ledger to a .keras file.

        Args:
          path: The file's path.
        """
        self.model.save(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Regression:
        """Returns the fit that `save` wrote.

        Args:
          path: The file's path.

        Raises:
          ValueError: The file holds another model.
        """
        model = load_model(path)
        likelihood = getattr(model, "likelihood", None)
        text = getattr(likelihood, "keywords", {}).get("text")
        if not isinstance(text, str):
            raise ValueError(f"path={os.fspath(path)!r} holds no regression: use dpvi.load_model.")
        return cls(model, text)

    def __repr__(self) -> str:
        pandas = importlib.import_module("pandas")
        lines = [f"WARNING: {sentence}." for sentence in self.warnings]
        lines.append(
            f"{self.design.formula}, {self.family.name}, epsilon "
            f"{self.model.privacy_report().epsilon:.3g}"
        )
        with pandas.option_context("display.width", 120, "display.max_columns", 20):
            lines.append(self.summary().to_string(float_format=lambda value: f"{value:.3g}"))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        escape = importlib.import_module("html").escape
        said = "".join(f"<p><b>Warning:</b> {escape(text)}.</p>" for text in self.warnings)
        table = self.summary().to_html(float_format=lambda value: f"{value:.3g}")
        return f"{said}<p>{escape(self.design.formula)}, {self.family.name}</p>{table}"


def _typical(column: Column) -> Any:
    if isinstance(column, Categorical):
        return column.categories[int(np.argmax(column.shares)) if column.shares else 0]
    if isinstance(column, Numeric):
        location = column.location_and_scale[0]
        return round(location) if column.step else location
    return 0.0


def _grid(column: Column) -> np.ndarray:
    if isinstance(column, Categorical):
        values = np.empty(len(column.categories), object)
        values[:] = column.categories
        return values
    if not isinstance(column, Numeric):
        return np.array([0.0, 1.0])
    values = np.linspace(column.lower, column.upper, _NUM_CURVE)
    return np.unique(np.round(values)) if column.step else values
