"""Checks of a likelihood before privacy is spent: its shapes, the variables that it reads, and its support."""

from __future__ import annotations

import re

import numpy as np

from tfp_dpvi._tf import Structure, layers_of, tf, tfd
from tfp_dpvi.bayes.model import LIKELIHOOD_ERRORS, BayesianModel, as_event
from tfp_dpvi.bayes.predictive import has_classes, mean_of
from tfp_dpvi.data import Records
from tfp_dpvi.data.shapes import specs_of

_NUM = 3  # Records that a likelihood is traced on: 1 would hide a shape that broadcasts.
_FEW = 30  # Records up to which a parameter of the same length may be a coincidence.
_AT_ONCE = 65_536
_NODE = r"'\{\{node [^}]*\}\} = (\w+)\[.*?\]\(.*?\)'"  # TensorFlow's dump of an operation.


def check_likelihood(model: BayesianModel, records: Records) -> None:
    """Traces the likelihood on the records' shapes; see `DPVI.check_records`."""
    specs = specs_of(records, _NUM)
    read: list[tf.Variable] = []

    def probe(x: Structure, y: Structure | None) -> tf.Tensor:
        params = model.prior.sample(seed=tf.constant([0, 0]))
        with tf.GradientTape() as tape:  # Not of the prior, whose variables are its own.
            value = model.log_prob(params, x, y)
        read.extend(tape.watched_variables())
        return value

    try:
        log_prob = (
            tf.function(probe, autograph=False).get_concrete_function(*specs).structured_outputs
        )
    except LIKELIHOOD_ERRORS as error:
        shapes = tf.nest.map_structure(
            lambda spec: spec and f"{spec.dtype.name}{spec.shape.as_list()}", specs
        )
        table = " A table is a dict of its columns, x['name']; x.to_numpy() makes one array."
        raise ValueError(
            f"likelihood failed on a batch of {_NUM} records with x, y = {shapes}: {type(error).__name__}: "
            + re.sub(_NODE, r"\1", str(error))
            + (table if isinstance(records.x, dict) else "")
        ) from error
    if log_prob.shape.rank is None or log_prob.shape.as_list() != [_NUM]:
        raise ValueError(
            f"likelihood returned a distribution whose log_prob has shape {log_prob.shape.as_list()} for a batch of "
            f"{_NUM} records; it must be [{_NUM}]. Wrap several outputs in tfd.Independent(..., "
            "reinterpreted_batch_ndims=1), and check that y has no extra dimension that broadcasts."
        )
    frozen = {
        variable.ref()
        for layer in layers_of(model.likelihood)
        for variable in layer.non_trainable_weights
    }
    read = [variable for variable in read if variable.ref() not in frozen]
    if read:
        raise ValueError(
            f"likelihood reads the trainable variable {read[0].name!r}, for instance of a Keras layer, which DPVI would not train.\n"
            "Add its weights to the prior (params), write a DPModel, which trains layers, or set trainable=False if it is fixed."
        )


def check_no_locals(prior: tfd.Distribution, records: Records) -> None:
    """Raises if a part of the prior has an entry for each record, judging by its shape."""
    sizes = {size for part in records.arrays() for size in part.shape[1:]}
    if records.num <= _FEW or records.num in sizes:
        return
    for shape in tf.nest.flatten(tf.nest.map_structure(np.asarray, prior.event_shape_tensor())):
        if records.num in shape.tolist():
            raise ValueError(
                f"prior has a part of shape {shape.tolist()}, one entry for each of the {records.num} records: such a latent would be "
                "released, but\nonly its own record informs it. Sum it out or fit it in the likelihood with dpvi.local."
            )


def check_labels(model: BayesianModel, records: Records) -> None:
    """Raises if the likelihood's own checks refuse an outcome but accept its own draws."""
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
            if not np.isfinite(mean_of(distribution)).all():
                return  # Some samplers never terminate at NaN.
            shape = [len(value)] if model.generative else []
            distribution.log_prob(distribution.sample(shape, seed=tf.constant([0, 2])))
        except (*LIKELIHOOD_ERRORS, tf.errors.OpError):
            return  # It refuses its own draws, or has none.
        reason = _refusal(distribution, as_event(value, distribution))
        if reason is not None:
            raise ValueError(
                f"{'x' if records.y is None else 'y'} holds values outside the support of the likelihood, {type(distribution).__name__}{reason}.\n"
                "Recode them; fit(validate=False) skips this check, which looks at the data and is outside the guarantee."
            )


def _refusal(distribution: tfd.Distribution, value: tf.Tensor) -> str | None:
    """Returns the reason why outcomes are outside a distribution's support, without their values; or None."""
    try:
        distribution.log_prob(value)
    except tf.errors.InvalidArgumentError as error:
        found = re.search(
            r"Sample must be [\w\s-]*(`[\d.]+`)?", str(error.message)
        )  # Other messages print the values.
        return "" if found is None else f" ({found[0].strip()})"
    if has_classes(distribution):  # TFP does not check the upper end of ordinal ones.
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
