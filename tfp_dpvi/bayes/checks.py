"""Checks of a likelihood before privacy is spent: its shapes, its variables and its support."""

from __future__ import annotations

import logging
import re

import numpy as np

from tfp_dpvi._tf import Structure, layers_of, tf, tfd, variables_among
from tfp_dpvi._unit_latents import RecordLatent
from tfp_dpvi.bayes.model import LIKELIHOOD_ERRORS, BayesianModel, as_event
from tfp_dpvi.bayes.predictive import has_classes, mean_of
from tfp_dpvi.bayes.units import row_distribution
from tfp_dpvi.data import Records, UnitRows
from tfp_dpvi.data.shapes import specs_of
from tfp_dpvi.local import UnitLatent, Variational

LOG = logging.getLogger("tfp_dpvi")
# The number of records that a likelihood is traced on: 1 would hide a shape that broadcasts.
_NUM = 3
# The number of records up to which a parameter of the same length may be a coincidence.
_FEW = 30
# The number of records whose outcomes are checked at once.
_AT_ONCE = 65_536
# TensorFlow's dump of an operation.
_NODE = r"'\{\{node [^}]*\}\} = (\w+)\[.*?\]\(.*?\)'"


def check_likelihood(model: BayesianModel, records: Records) -> None:
    """Traces the likelihood on the records' shapes, see `DPVI.check_records`.

    Args:
      model: Prior and likelihood.
      records: The records, of which only shapes and dtypes are read.

    Raises:
      ValueError: The likelihood fails on a batch, does not return a log density for each record, or
        reads a variable that would be trained.
    """
    specs = specs_of(records, _NUM)
    read: list[tf.Variable] = []

    def probe(x: Structure, y: Structure | None) -> tf.Tensor:
        params = model.prior.sample(seed=tf.constant([0, 0]))
        # Without the prior, whose variables are its own.
        with tf.GradientTape() as tape:
            value = model.log_prob(params, x, y)
        read.extend(tape.watched_variables())
        return value

    try:
        traced = tf.function(probe, autograph=False).get_concrete_function(*specs)
        log_prob = traced.structured_outputs
    except LIKELIHOOD_ERRORS as error:
        shapes = tf.nest.map_structure(
            lambda spec: spec and f"{spec.dtype.name}{spec.shape.as_list()}", specs
        )
        table = " A table is a dict of its columns, x['name']; x.to_numpy() makes one array."
        raise ValueError(
            f"likelihood failed on a batch of {_NUM} records with x, y = {shapes}: "
            f"{type(error).__name__}: "
            + re.sub(_NODE, r"\1", str(error))
            + (table if isinstance(records.x, dict) else "")
        ) from error
    if log_prob.shape.rank is None or log_prob.shape.as_list() != [_NUM]:
        raise ValueError(
            "likelihood returned a distribution whose log_prob has shape "
            f"{log_prob.shape.as_list()} for a batch of {_NUM} records; it must be [{_NUM}]. "
            "Wrap several outputs in tfd.Independent(..., reinterpreted_batch_ndims=1), "
            "and check that y has no extra dimension that broadcasts."
        )
    frozen = {
        variable.ref()
        for layer in layers_of(model.likelihood)
        for variable in variables_among(layer.non_trainable_weights)
    }
    read = [variable for variable in read if variable.ref() not in frozen]
    if read:
        raise ValueError(
            f"likelihood reads the trainable variable {read[0].name!r}, for instance of a Keras "
            "layer, which DPVI would not train.\n"
            "Add its weights to the prior (params), write a DPModel, which trains layers, "
            "or set trainable=False if it is fixed."
        )


def check_no_locals(prior: tfd.Distribution, records: Records) -> None:
    """Checks by its shape that no part of the prior has an entry for each record.

    Args:
      prior: The prior over the parameters.
      records: The records, of which only the number and shapes are read.

    Raises:
      ValueError: A part has as many entries as there are records.
    """
    sizes = {size for part in records.arrays() for size in part.shape[1:]}
    if records.num <= _FEW or records.num in sizes:
        return
    for shape in tf.nest.flatten(tf.nest.map_structure(np.asarray, prior.event_shape_tensor())):
        if records.num in shape.tolist():
            raise ValueError(
                f"prior has a part of shape {shape.tolist()}, one entry for each of the "
                f"{records.num} records: such a latent would be released, but\n"
                "only its own record informs it. Sum it out or fit it in the likelihood with "
                "dpvi.local."
            )


def check_units(model: BayesianModel, records: Records) -> None:
    """Checks that a likelihood whose rows share a latent of their person gets persons.

    Of persons, it warns of a latent that each row has to itself, which may be meant to be shared.

    Args:
      model: Prior and likelihood.
      records: The records, of which only shapes and dtypes are read.

    Raises:
      ValueError: It gets rows, which would be taken for persons of one row.
    """
    of_persons = isinstance(records.x, UnitRows)
    if records.y is None or (records.person is not None and not of_persons):
        return
    found: list[tfd.Distribution] = []

    def probe(x: Structure) -> tf.Tensor:
        params = model.prior.sample(seed=tf.constant([0, 0]))
        found.append(row_distribution(model.distribution_at(params, x)))
        return tf.zeros([])

    try:
        tf.function(probe, autograph=False).get_concrete_function(specs_of(records, _NUM)[0])
    except LIKELIHOOD_ERRORS:  # `check_likelihood` says what is wrong.
        return
    if of_persons and isinstance(found[-1], RecordLatent | Variational):
        LOG.warning(
            "likelihood: its latent (%s) is one of each row, also with unit_ids. One that all rows "
            "of a person share is dpvi.local.unit_quadrature or dpvi.local.unit_normal.",
            type(found[-1]).__name__,
        )
    if isinstance(found[-1], UnitLatent):
        raise ValueError(
            "unit_ids is missing: the likelihood has a latent that all rows of a person share "
            "(dpvi.local.unit_...). Pass unit_ids and max_rows_per_unit."
        )


def check_labels(model: BayesianModel, records: Records) -> None:
    """Checks that outcomes lie in the support of the likelihood.

    The likelihood's own checks decide. Outcomes are refused only if it accepts its own draws.

    Args:
      model: Prior and likelihood.
      records: The records, whose values are read: outside the guarantee.

    Raises:
      ValueError: An outcome lies outside the support.
    """
    observed = records.x if records.y is None else records.y
    if tf.nest.is_nested(observed):
        return
    params = model.prior.sample(seed=tf.constant([0, 1]))
    for first in range(0, records.num, _AT_ONCE):
        rows = slice(first, first + _AT_ONCE)
        x, value = tf.nest.map_structure(
            lambda part: tf.convert_to_tensor(part[rows]),  # noqa: B023
            (records.x, observed),
        )
        try:
            distribution = _strict(model.distribution_at(params, x))
            # Some samplers never terminate at NaN.
            if not np.isfinite(mean_of(distribution)).all():
                return
            shape = [len(value)] if model.generative else []
            distribution.log_prob(distribution.sample(shape, seed=tf.constant([0, 2])))
        except (*LIKELIHOOD_ERRORS, tf.errors.OpError):
            # It refuses its own draws, or has none.
            return
        reason = _refusal(distribution, as_event(value, distribution))
        if reason is not None:
            raise ValueError(
                f"{'x' if records.y is None else 'y'} holds values outside the support of the "
                f"likelihood, {type(distribution).__name__}{reason}.\n"
                "Recode them; fit(validate=False) skips this check, which looks at the data and is "
                "outside the guarantee."
            )


def _refusal(distribution: tfd.Distribution, value: tf.Tensor) -> str | None:
    """Returns why outcomes are outside a distribution's support, without their values; or None."""
    try:
        distribution.log_prob(value)
    except tf.errors.InvalidArgumentError as error:
        # Messages of another form print the values.
        safe = re.search(r"Sample must be [\w\s-]*(`[\d.]+`)?", str(error.message))
        return "" if safe is None else f" ({safe[0].strip()})"
    # TFP does not check the upper end of ordinal outcomes.
    if has_classes(distribution):
        most = mean_of(distribution).shape[-1]
        if bool(tf.reduce_any(value >= tf.cast(most, value.dtype))):
            return f" (classes 0 to {most - 1})"
    return None


def _strict(distribution: tfd.Distribution) -> tfd.Distribution:
    """Returns a distribution that checks its outcomes."""
    if isinstance(distribution, tfd.Independent):
        return distribution.copy(
            distribution=_strict(distribution.distribution), validate_args=True
        )
    return distribution.copy(validate_args=True)


def fall(losses: np.ndarray) -> tuple[float, float]:
    """Returns by how much losses fall along a line through them, and the error of that number.

    Args:
      losses: Shape [n], n at least 3.

    ```python
    >>> fell, error = fall(np.array([4.0, 3.0, 2.0, 1.0]))
    >>> round(fell, 3), round(error, 3)
    (3.0, 0.0)

    ```
    """
    places = np.linspace(-0.5, 0.5, len(losses))
    slope = float(places @ losses / (places @ places))
    rest = losses - losses.mean() - slope * places
    error = float(np.sqrt(rest @ rest / (len(losses) - 2) / (places @ places)))
    return -slope, error
