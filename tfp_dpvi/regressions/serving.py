"""The signature of an exported regression: columns in their own units, without formulae."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tfp_dpvi._tf import tf, tfp
from tfp_dpvi.data import Binary, Categorical, Column, Integer
from tfp_dpvi.data.columns import Numeric
from tfp_dpvi.export import ExportedFunction
from tfp_dpvi.regressions.design import MOST_LEVELS, Design
from tfp_dpvi.regressions.families import outcome_levels, slopes, standard_intercepts
from tfp_dpvi.regressions.outcomes import expected
from tfp_dpvi.regressions.parts import Parts

Factor = Callable[[Mapping[str, tf.Tensor]], tf.Tensor]
"""Takes columns by name, each of shape [n], and returns a float64 tensor of shape [n]."""

_FUNCTIONS = {
    "np.exp": tf.math.exp,
    "np.log": tf.math.log,
    "np.log1p": tf.math.log1p,
    "np.sqrt": tf.math.sqrt,
    "np.square": tf.math.square,
}
# Invented records at which the columns of the export are compared with those of the fit.
_NUM_COMPARED = 200


def predict_signature(
    design: Design, parts: Parts, draws: Mapping[str, np.ndarray], level: float
) -> ExportedFunction:
    """Returns `predict` of columns by name, which computes what `Regression.predict` does.

    Args:
      design: The design.
      parts: The model's description.
      draws: Posterior draws of the model's parameters, in the first dimension.
      level: The probability of the intervals.

    Raises:
      ValueError: A term of the formula is none that TensorFlow alone computes.
    """
    covariates = design.covariates
    _check_covariates(covariates, design)
    common = [_product(label, covariates) for label in design.labels]
    groups = [
        _product(label.partition("|")[2], covariates)
        for group in design.groups
        for label in group.labels
    ]
    _check_same(design, common, groups)
    released = {name: tf.Variable(part, trainable=False) for name, part in draws.items()}
    tail = 50.0 * (1.0 - level)

    def predict(**columns: tf.Tensor) -> dict[str, tf.Tensor]:
        values = {
            name: _checked(name, column, columns[name], design.outside == "clip")
            for name, column in covariates.items()
        }
        scores = _scores(parts, released, _stacked(common, values), _stacked(groups, values))
        trials = values.get(design.trials) if isinstance(design.trials, str) else design.trials
        means = _expected(parts, released, scores, trials)
        ends = tfp.stats.percentile(means, [tail, 100.0 - tail], axis=0, interpolation="linear")
        result = {"mean": tf.reduce_mean(means, axis=0), "mean_low": ends[0], "mean_high": ends[1]}
        return {name: tf.cast(part, tf.float32) for name, part in result.items()}

    levels = ""
    if parts.family in ("categorical", "ordinal"):
        names = ", ".join(outcome_levels(design.schema.columns[design.outcome]))
        levels = f", of each level ({names})"
    meaning = (
        f"the expected {design.outcome_text} of each record{levels}, and the ends of a "
        f"{100.0 * level:g} % interval, which includes the noise for privacy. Columns are in the "
        "units of the schema; values that it does not allow are refused"
        f"{', or clipped to their bounds' if design.outside == 'clip' else ''}."
    )
    specs = {
        name: tf.TensorSpec([None], tf.string if _is_text(column) else tf.float32)
        for name, column in covariates.items()
    }
    return ExportedFunction("predict", predict, specs, meaning)


def _check_covariates(covariates: Mapping[str, Column], design: Design) -> None:
    if not covariates:
        raise ValueError("export needs a covariate: without one, predictions are the summary's.")
    for name, column in covariates.items():
        if not name.isidentifier():
            raise ValueError(
                f"export: the column {name!r} cannot be an argument: rename it, such as a_b."
            )
        if column.missing:
            raise ValueError(
                f"export: {name!r} may have missing values, which an export does not take: fill "
                "them before the fit."
            )
        if not isinstance(column, Categorical) or _is_text(column):
            continue
        if np.asarray(column.categories).dtype.kind not in "iuf":
            raise ValueError(f"export: categories of {name!r} are neither texts nor numbers.")
    if any(group.is_slope for group in design.groups):
        raise ValueError("export: the formula has slopes of groups, which an export does not take.")
    if np.any(design.rows(design.simulated(_NUM_COMPARED)).offset):
        raise ValueError("export: the formula has an offset, which an export does not take.")


def _is_text(column: Column) -> bool:
    if not isinstance(column, Categorical):
        return False
    return all(isinstance(category, str) for category in column.categories)


# ---------------------------------------------------------------------- columns of a design


def _factors(covariates: Mapping[str, Column]) -> dict[str, Factor]:
    """Returns all that a label may be a product of, by their names in formulae's labels."""
    factors: dict[str, Factor] = {}
    for name, column in covariates.items():
        levels: tuple[object, ...] = (0, 1)
        if isinstance(column, Categorical):
            levels = tuple(column.categories)
        else:
            factors[name] = functools.partial(_number, name=name)
            for called, function in _FUNCTIONS.items():
                factors[f"{called}({name})"] = functools.partial(
                    _number, name=name, function=function
                )
            if isinstance(column, Integer) and column.upper - column.lower < MOST_LEVELS:
                levels = tuple(range(int(column.lower), int(column.upper) + 1))
        if not _is_text(column) and len(np.unique(np.asarray(levels, np.float32))) < len(levels):
            continue  # An export takes numbers as float32, which does not tell these apart.
        for level in levels:
            indicator = functools.partial(_indicator, name=name, level=level)
            factors[f"{name}[{level}]"] = factors[f"C({name})[{level}]"] = indicator
        each = [factors[f"{name}[{level}]"] for level in levels]
        for place, level in enumerate(levels):
            factors[f"mo({name})[{level}]"] = functools.partial(_sum_of, factors=each[place:])
    return factors


def _number(
    values: Mapping[str, tf.Tensor], name: str, function: Callable[..., tf.Tensor] = tf.identity
) -> tf.Tensor:
    return function(tf.cast(values[name], tf.float64))


def _indicator(values: Mapping[str, tf.Tensor], name: str, level: object) -> tf.Tensor:
    return tf.cast(tf.equal(values[name], tf.constant(level, values[name].dtype)), tf.float64)


def _sum_of(values: Mapping[str, tf.Tensor], factors: Sequence[Factor]) -> tf.Tensor:
    return tf.add_n([factor(values) for factor in factors])


def _product(label: str, covariates: Mapping[str, Column]) -> list[Factor]:
    """Returns the factors whose product a column of the design is."""
    factors = _factors(covariates)

    def split(rest: str) -> list[Factor] | None:
        if rest in factors:
            return [factors[rest]]
        for name, factor in factors.items():
            # A level may have a colon.
            if rest.startswith(f"{name}:") and (others := split(rest[len(name) + 1 :])):
                return [factor, *others]
        return None

    found = split(label)
    if found is None:
        raise ValueError(
            f"export: TensorFlow alone does not compute the term {label!r}: an export takes "
            "columns,\n"
            f"categories, {', '.join(_FUNCTIONS)}, and their products. Derive a column first."
        )
    return found


def _stacked(columns: list[list[Factor]], values: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Returns columns of the design, float64 [n, p]."""
    if not columns:
        return tf.zeros([tf.shape(next(iter(values.values())))[0], 0], tf.float64)
    products = [
        functools.reduce(tf.multiply, [factor(values) for factor in factors]) for factors in columns
    ]
    return tf.stack(products, axis=1)


def _check_same(design: Design, common: list[list[Factor]], groups: list[list[Factor]]) -> None:
    """Refuses columns that are not those of the fit, at invented records."""
    records = design.simulated(_NUM_COMPARED)
    values = {
        name: tf.constant(array.tolist())
        if _is_text(design.schema.columns[name])
        else tf.constant(np.asarray(array, np.float64))
        for name, array in records.items()
    }
    rows = design.rows(records)
    for columns, wanted in ((common, rows.common), (groups, rows.groups)):
        if not np.allclose(_stacked(columns, values).numpy(), wanted, rtol=1e-9, atol=1e-9):
            raise ValueError(
                "export: TensorFlow alone computes other columns than the formula: write it with "
                "columns, categories and their products alone."
            )


def _checked(name: str, column: Column, values: tf.Tensor, clipped: bool) -> tf.Tensor:
    """Returns allowed values; other ones end the call, and are not shown."""
    message = f"{name} must be {column.described}"
    if isinstance(column, Categorical):
        levels = tf.constant(list(column.categories), values.dtype)
        fine = tf.reduce_any(tf.equal(values[:, None], levels), axis=1)
    elif isinstance(column, Binary):
        fine = tf.equal(values, 0.0) | tf.equal(values, 1.0)
    else:
        assert isinstance(column, Numeric)
        lower, upper = np.float32(column.lower), np.float32(column.upper)
        if clipped:
            values = tf.clip_by_value(values, lower, upper)
        fine = (values >= lower) & (values <= upper)
        if column.step:
            fine &= tf.equal(values, tf.round(values))
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(fine), [message])]):
        return tf.identity(values)


# ---------------------------------------------------------------------- predictions


def _scores(
    parts: Parts, draws: Mapping[str, tf.Tensor], common: tf.Tensor, groups: tf.Tensor
) -> tf.Tensor:
    """Returns draws of linear scores on the model's scale, float64 [S, n, blocks]."""
    layout, size = parts.layout, next(iter(draws.values())).shape[0]
    blocks = parts.outcome.blocks
    # Rounded as the inputs of the fit are.
    inputs = tf.cast((common - np.array(parts.location)) / np.array(parts.scale), tf.float32)
    scores = tf.zeros([size, tf.shape(common)[0], blocks], tf.float64)
    if layout.num_common:
        matrix = tf.reshape(draws["coefficients"], [size, blocks, layout.num_common])
        matrix = slopes(matrix, layout.monotone)
        scores += tf.einsum("sbp,np->snb", matrix, tf.cast(inputs, tf.float64))
    if layout.has_intercept:
        scores += tf.reshape(draws["intercept"], [size, 1, blocks])
    if layout.group_sizes:
        scores += tf.matmul(draws["group"], groups, transpose_b=True)[:, :, None]
    return scores


def _expected(
    parts: Parts,
    draws: Mapping[str, tf.Tensor],
    scores: tf.Tensor,
    trials: tf.Tensor | int | None,
) -> tf.Tensor:
    """Returns draws of expected outcomes in units of the formula, float64 [S, n] or [S, n, levels].

    Those of persons with an intercept each are of a person who is not known.
    """
    own = {name: tf.convert_to_tensor(draws[name]) for name in parts.own_names}
    if trials is not None:
        trials = tf.cast(tf.broadcast_to(trials, tf.shape(scores)[1:2]), tf.float64)
    if not parts.layout.unit:
        return expected(parts.kind, scores, own, parts.outcome, trials)
    total = tf.zeros([], tf.float64)
    for point, weight in zip(*standard_intercepts(), strict=True):
        shifted = scores + (draws["unit_sd"] * point)[:, None, None]
        total += weight * expected(parts.kind, shifted, own, parts.outcome, trials)
    return total
