"""`Study`: the model that hospitals share, and its posterior as a TFP distribution."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import inspect
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi import surrogates
from tfp_dpvi._tf import Structure, keras, tf, tfd
from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.bayes.predictive import PosteriorPredictive, posterior_draws
from tfp_dpvi.calibrated.mixture import gaussian_prior
from tfp_dpvi.calibrated.posterior import FAILURES
from tfp_dpvi.data import Schema, make_records
from tfp_dpvi.data.records import by_column, check_max_weight
from tfp_dpvi.federated.calibrated import Released, StudyPosterior, combine
from tfp_dpvi.federated.columns import Columns, Rows
from tfp_dpvi.federated.effects import Local
from tfp_dpvi.federated.factors import Factor, guard
from tfp_dpvi.federated.messages import TRUSTED_SUM, StudyTerms
from tfp_dpvi.federated.trusted import AgreedSum, TrustedSum
from tfp_dpvi.federated.weights import MOST_HELD
from tfp_dpvi.federated.window import SHARE, CannotCalibrateError, PublicPoint
from tfp_dpvi.optimizers import (
    DPOptimizer,
    InformationOptimizer,
    ScoringOptimizer,
    TermwiseOptimizer,
)

_PRIOR_DRAWS = 4000
_SITE_STEPS = 100
_NUM_INPUTS = 512  # Of a schema.
_EXAMPLES = 4  # Records at which likelihoods are compared.
_SEEN_TOGETHER = (
    "the hospitals' sums are seen added up alone: whether hospitals are unlike cannot be told"
)


class StudyColumns(Protocol):
    """Turns hospitals' tables into the arrays of a study, see `Columns`."""

    @property
    def schema(self) -> Schema:
        """The public columns."""

    @property
    def outcome(self) -> str | None:
        """The name of the column that is y."""

    @property
    def outside(self) -> str:
        """The rule for numbers outside of their bounds: "refuse" or "clip"."""

    def arrays(self, x: Structure, y: Structure | None) -> Rows:
        """Returns x and y of a hospital's records.

        Args:
          x: A table, or what else the study takes.
          y: Their outcomes; None if they are a column of x.
        """

    def public_inputs(self, num: int) -> np.ndarray:
        """Returns invented inputs.

        Args:
          num: The number of rows.
        """

    def example(self) -> Rows:
        """Returns a few invented records."""


class Study:
    """A model that several hospitals fit together, and how they work; all of it public.

    Args:
      prior: TFP distribution over the parameters; the same at every hospital.
      likelihood: As of `DPVI`.
      optimizer: `InformationOptimizer` for steps that are as long as the records' information
        says; or another DP-Keras optimizer, whose steps are as long as its rate says, so that a few
        hospitals of unlike records may not settle. It has the clip. Each hospital starts its own
        from its configuration in each round.
      name: Name of the study.
      family: "mean_field" or "full_rank": normals over the unconstrained parameters, independent or
        with all covariances.
      local_steps: Steps of a hospital in each round.
      batch_size: Expected number of records in a step; None takes all records in every step.
      initial_stddev: The largest standard deviation that a hospital starts from. Large ones make
        first gradients that are clipped at random points of the prior.
      clipping: "flat" or "paired", see `DPVI`. Either way the posterior is the raw surrogate.
      privacy: "worker" adds noise in every step of a hospital; "messages" adds it to its messages
        alone, which needs many hospitals or shards. The next three go with it.
      message_clip: The bound C on the norm of one shard's change.
      num_shards: Number of parts into which a hospital divides its records at random.
      num_hospitals: How many take part, by which hospitals judge whether noise drowns the signal.
      most_change: See `StudyTerms`.
      schema: The public columns of the records. x is then a table of them, or an array of them in
        this order, and the likelihood gets an array; values outside their bounds, as other units
        have, are refused. Numbers and binary columns alone.
      outcome: Name of the schema's column that is y; None for whole records.
      example: `(x, y)` of a few public or invented records, instead of a schema; y is None for
        whole records.

      calibrated: Whether each hospital releases, after the rounds, sums at the posterior's mean,
        from which a posterior is computed whose spread includes the noise; two thirds of its
        budget are for them. None does so where the model can: it needs `public_inputs`, a schema or
        an example, a clip, privacy "worker", and a likelihood whose outcomes can be drawn.
      public_inputs: Public or invented x like the hospitals' records, for the coordinates of these
        sums; the same at every hospital. None for inputs of the schema's centres and spreads, or
        standard ones.
      local: Names of parameters that differ between hospitals, such as "b" or "w[0]": hospital
        effects. Those of a hospital are normal about the shared value on the real line, with a
        standard deviation that is learned; its prior is half-normal with the scale given by name,
        by default the prior's standard deviation of the parameter. They are of the calibrated
        posterior alone, which is computed after the last phase: hospitals need not agree on them.
      max_rows_per_unit: Protects persons with several rows instead of rows: the public largest
        number of a person's rows that are used. Hospitals then pass `unit_ids`. Public inputs are
        taken as persons of 1 to so many rows.
      trusted_sum: That the hospitals' sums of the last phase are only ever seen added up, by whom,
        and how much noise each then adds; see `TrustedSum`. They go to an `Aggregation` instead of
        the server. None if no guarantee is to rest on what adds up.
      max_weight: The public largest survey weight. Hospitals then pass `weights`, and estimates are
        those of the weighted population, as with `max_weight` of `DPModel.fit`.

    Studies are compared by their terms, and a schema or an example lets them compare what the
    likelihood computes. Without one they compare its source text.

    Attributes:
      terms: The numbers that a server needs.
      bayesian_model: Prior and likelihood.
      normal_prior: True if the prior is a normal of the family over the unconstrained parameters.
        If not, a factor stands for it that the server refines, see `refine_prior`.
      point: The sums of the last phase, or None without one.
      not_calibrated: Why there is no last phase; empty if there is one.
      local: The coordinates that differ between hospitals, or None.
      agreed_sum: The noise agreed on for a trusted sum, with its prices, or None.
      weights: The column of survey weights in hospitals' tables; None if they are no column.

    Raises:
      TypeError: The optimizer is no DP-Keras optimizer, or one for groups of records.
      ValueError: A value is unknown or out of its range, or `calibrated=True` cannot be.

    ```python
    >>> from tfp_dpvi._tf import tfd
    >>> from tfp_dpvi.optimizers import DPKerasAdamOptimizer
    >>> study = Study(
    ...     tfd.Normal(0.0, 2.0),
    ...     lambda mean: tfd.Normal(mean, 1.0),
    ...     DPKerasAdamOptimizer(l2_norm_clip=1.0, learning_rate=0.05),
    ...     initial_stddev=0.05,
    ...     most_change=1e4,
    ... )
    >>> study.normal_prior, study.terms.prior.stddev.round(3).tolist()
    (True, [2.0])

    ```
    """

    weights: str | None = None

    def __init__(
        self,
        prior: tfd.Distribution,
        likelihood: Callable[..., Any],
        optimizer: DPOptimizer,
        *,
        name: str = "study",
        family: str = "mean_field",
        local_steps: int = 10,
        batch_size: int | None = None,
        initial_stddev: float = 0.1,
        clipping: str = "flat",
        privacy: str = "worker",
        message_clip: float | None = None,
        num_shards: int = 1,
        num_hospitals: int = 1,
        most_change: float = 1e7,
        schema: Schema | None = None,
        outcome: str | None = None,
        example: tuple[Structure, Structure | None] | None = None,
        calibrated: bool | None = None,
        public_inputs: Structure | None = None,
        local: Mapping[str, float | None] | Sequence[str] | None = None,
        max_rows_per_unit: int | None = None,
        trusted_sum: TrustedSum | None = None,
        max_weight: float | None = None,
    ) -> None:
        self.family = check.one_of("family", family, ("mean_field", "full_rank"))
        self.full_rank = family == "full_rank"
        self.clipping = check.one_of("clipping", clipping, ("flat", "paired"))
        self.by_information = isinstance(optimizer, InformationOptimizer)
        _check_optimizer(optimizer, family, clipping)
        self.bayesian_model = BayesianModel(prior, likelihood)
        self.prior, self.likelihood = prior, likelihood
        self.optimizer = optimizer
        self.batch_size = None if batch_size is None else check.count("batch_size", batch_size, 1)
        self.initial_stddev = check.positive("initial_stddev", initial_stddev)
        self.num_shards = check.count("num_shards", num_shards, 1)
        self.num_hospitals = check.count("num_hospitals", num_hospitals, 1)
        self.max_weight = check_max_weight(max_weight, ())
        _check_privacy(privacy, message_clip, max_rows_per_unit, max_weight)
        self.message_clip = (
            None if message_clip is None else check.positive("message_clip", message_clip)
        )
        self.coordinates = Coordinates(prior)
        self._log_prior = self.coordinates.log_density
        factor, self.normal_prior = self._prior_factor()
        bound = optimizer.clip.finite_bound
        self.information = self._information(0.25 * (bound or 0.0) ** 2 / factor.num)
        self.columns = None if schema is None else self.make_columns(schema, outcome)
        if schema is not None and example is not None:
            raise ValueError("example and schema are both given; pass one of them.")
        if self.columns is not None:
            example = self.columns.example()
        self.example = example
        self._public_inputs = public_inputs
        self.max_rows_per_unit = (
            None
            if max_rows_per_unit is None
            else check.count("max_rows_per_unit", max_rows_per_unit, 1)
        )
        self.point, self.not_calibrated = self._calibrate(calibrated, privacy)
        self.local = self._local(local)
        self.agreed_sum = self._agree(trusted_sum)
        self.terms = StudyTerms(
            name,
            factor,
            local_steps,
            privacy,
            most_change,
            settings=self.agreed_settings(),
            schema="" if schema is None else schema.to_json(),
            likelihood=() if example is None else self._values(factor, *example),
            clip=bound,
            start_precision=0.0 if self.by_information else self.initial_stddev**-2,
            sums={} if self.point is None else self.point.shapes,
        )

    def _information(self, from_clip: float) -> float:
        """Returns that of a record about one coordinate, as far as is known in advance."""
        known: float = getattr(self.optimizer, "information", None) or from_clip
        # How small weights are beside the largest one is not public: of too much, steps are short.
        return known if self.max_weight is None else known / MOST_HELD

    def make_columns(self, schema: Schema, outcome: str | None) -> StudyColumns:
        """Returns what turns a hospital's table into the study's arrays.

        Args:
          schema: The public columns.
          outcome: The name of the one that is y, or None.
        """
        return Columns(schema, outcome)

    def _calibrate(self, calibrated: bool | None, privacy: str) -> tuple[PublicPoint | None, str]:
        """Returns the last phase where there is one, and else why there is none."""
        if calibrated is False:
            return None, "calibrated=False"
        try:
            return self._public_point(privacy), ""
        except FAILURES as reason:
            if not calibrated and self._public_inputs is None:
                return None, check.first_line(reason)
            if not isinstance(reason, CannotCalibrateError):
                raise
            raise ValueError(
                f"calibrated=True does not apply: {reason}.\n"
                "Leave calibrated and public_inputs out for intervals without the noise."
            ) from reason

    def _public_point(self, privacy: str) -> PublicPoint:
        """Returns the sums of the last phase; raises `CannotCalibrateError` if there are none."""
        if privacy != "worker":
            raise CannotCalibrateError("the noise is on messages, not in each step")
        if self.optimizer.clip.finite_bound is None:
            raise CannotCalibrateError("the optimizer has no clip, so that nothing is private")
        example, inputs = self.example, self._public_inputs
        if example is None:
            raise CannotCalibrateError(
                "nothing says what records are like: pass a schema, or an example"
            )
        if inputs is None and self.columns is not None:
            inputs = self.columns.public_inputs(_NUM_INPUTS)
        return PublicPoint(
            self.bayesian_model,
            self.coordinates,
            example,
            inputs,
            max_rows_per_unit=self.max_rows_per_unit,
            max_weight=None if self.max_weight is None else MOST_HELD,
        )

    def column_of_weights(self, x: Structure) -> np.ndarray | None:
        """Returns the weights that a hospital's table has; None where they are an argument.

        Args:
          x: The table.
        """
        del x
        return None

    def _local(self, local: Mapping[str, float | None] | Sequence[str] | None) -> Local | None:
        """Returns the coordinates that differ between hospitals, or None."""
        if local is None:
            return None
        if isinstance(local, str):
            raise TypeError(f"local={local!a:.99} is a text: pass names, such as [{local!a:.99}].")
        if self.point is None:
            raise ValueError(
                f"local={check.shown(local)} needs the last phase: {self.not_calibrated}."
            )
        scales = local if isinstance(local, Mapping) else dict.fromkeys(local)
        scoring = self.point.scoring
        names = [scoring.pairing.coordinates.names[place] for place in scoring.pairing.index]
        return Local.of_names(scales, names, 1.0 / np.sqrt(np.diag(scoring.prior.precision)))

    def _agree(self, trusted_sum: TrustedSum | None) -> AgreedSum | None:
        """Returns the noise of a trusted sum, or None without one."""
        if trusted_sum is None:
            return None
        if not isinstance(trusted_sum, TrustedSum):
            raise TypeError(f"trusted_sum={check.shown(trusted_sum)} is no TrustedSum; pass one.")
        if self.point is None:
            raise ValueError(
                "trusted_sum needs the last phase, whose messages are sums: "
                f"{self.not_calibrated}.\n"
                "The changes of rounds are no sums of records: each has noise of its own."
            )
        if self.local is not None:
            raise ValueError(
                "local with trusted_sum: effects are read from each hospital's own sums; leave one "
                "of them out."
            )
        return trusted_sum.agree(self.point.draft, SHARE)

    def agreed_settings(self) -> dict[str, str]:
        """Returns the settings that hospitals must share, as texts."""
        names = ("family", "clipping", "batch_size", "initial_stddev", "message_clip", "num_shards")
        settings = {name: str(getattr(self, name)) for name in names}
        kept = keras.utils.serialize_keras_object(self.optimizer)
        settings["optimizer"] = json.dumps(kept, sort_keys=True, default=str)
        if self.columns is not None and self.columns.outcome is not None:
            settings["outcome"] = self.columns.outcome
        if self._public_inputs is not None:
            settings["public_inputs"] = _digest_of(self._public_inputs)
        if self.max_rows_per_unit is not None:
            settings["max_rows_per_unit"] = str(self.max_rows_per_unit)
        if self.max_weight is not None:
            settings["max_weight"] = f"{self.max_weight:.9g}"
        if self.agreed_sum is not None:
            settings[TRUSTED_SUM] = self.agreed_sum.to_text()
        if self.example is None:
            settings["code"] = _source(self.likelihood)
        return settings

    def _values(self, prior: Factor, x: Structure, y: Structure | None) -> tuple[float, ...]:
        """Returns log densities of public records at two values of the parameters."""
        model = self.bayesian_model
        records = make_records(
            by_column("x", x), by_column("y", y), None, dtype=model.dtype, validate=True
        )
        values: list[float] = []
        for phase in (0.0, 1.0):
            # Fixed points rather than draws, which other versions may make otherwise.
            away = np.cos(phase + np.arange(1.0, prior.num + 1.0))
            point = prior.mean + 0.5 * away * np.minimum(prior.stddev, 1.0)
            params = self.coordinates.bijector.forward(tf.constant(point, self.coordinates.dtype))
            densities = model.log_prob(params, records.x, records.y).numpy()[:_EXAMPLES]
            if not np.isfinite(densities).all():
                raise ValueError(
                    "example has records that the likelihood finds impossible: pass others."
                )
            values += [float(f"{value:.6g}") for value in densities]
        return tuple(values)

    # ------------------------------------------------------------------ the prior

    def _prior_factor(self) -> tuple[Factor, bool]:
        """Returns the prior as a factor, and whether it is exact.

        A prior that is no normal of the family over the unconstrained parameters is replaced by the
        normal of its mean and variances.
        """
        draws = self.coordinates.prior_draws(_PRIOR_DRAWS)
        # A draw at the edge of the support lies at infinity.
        draws = draws[np.isfinite(draws).all(axis=1)]
        normal = gaussian_prior(self._log_prior, draws)
        if normal is not None:
            precision = _rounded(normal[0], np.abs(normal[0]).max())
            diagonal = np.diag(precision)
            shift = _rounded(normal[1], np.sqrt(diagonal))
            if self.full_rank:
                return Factor(shift, precision), True
            if not (precision - np.diag(diagonal)).any():
                return Factor(shift, diagonal), True
        mean = _rounded(draws.mean(0), draws.std(0))
        variances = _rounded(draws.var(0), draws.var(0))
        return Factor.normal(mean, np.diag(variances) if self.full_rank else variances), False

    def refine_prior(self, cavity: Factor, present: Factor) -> Factor:
        """Refines the factor that stands for a prior which is not normal (site 0).

        It takes natural-gradient steps on KL(q || prior x cavity) from q = `cavity * present`, with
        fixed draws, and touches no record. At the optimum the factor's precision is the mean
        negative Hessian of the log prior under q, here the slope of its gradients over the draws
        (Khan and Rue 2023, arXiv:2107.04562).

        Args:
          cavity: The product of the hospitals' factors.
          present: The factor that stands for the prior so far.

        Returns:
          The refined factor.
        """
        num = present.num
        noise = np.random.default_rng(0).normal(size=(max(128, 2 * num), num))
        noise = np.concatenate([noise, -noise])
        for _ in range(_SITE_STEPS):
            q = cavity * present
            root = np.linalg.cholesky(q.covariance) if self.full_rank else np.diag(q.stddev)
            away = noise @ root.T
            try:
                with np.errstate(all="ignore"):
                    change = (self._site(q, away) / present) ** 0.5
            except ValueError:  # A gradient overflowed: the factor so far is a valid one.
                break
            present *= change ** guard(q, change, q.precision / 2.0)
            if change.norm <= 1e-6 * q.norm:
                break
        return present

    def _site(self, q: Factor, away: np.ndarray) -> Factor:
        """Returns the factor of the prior's mean gradients and their slope.

        They are taken at draws that lie `away` from the mean of `q`.
        """
        gradients = self._log_prior(q.mean + away)[1]
        if self.full_rank:
            slope = np.linalg.lstsq(away, gradients, rcond=None)[0]
            precision = -(slope + slope.T) / 2.0
            return Factor(gradients.mean(0) + precision @ q.mean, precision)
        precision = -(away * gradients).mean(0) / (away**2).mean(0)
        return Factor(gradients.mean(0) + precision * q.mean, precision)

    # ------------------------------------------------------------------ the posterior

    def calibrated_posterior(
        self,
        released: Released,
        *,
        weights: str = "sum",
    ) -> StudyPosterior:
        """Returns the posterior of the sums of the last phase; it touches no record.

        It warns of what its checks say.

        Args:
          released: The study's server, or its history.
          weights: "sum" adds the hospitals' sums as they are: right for every division of the
            records. "precision" gives less weight to hospitals with more noise, if a test does not
            find that their records are unlike; else it adds, and says so.

        Raises:
          ValueError: The study has no last phase, no hospital gave its sums, or they give no
            posterior.
        """
        if self.point is None:
            raise ValueError(
                f"the study has no calibrated posterior: {self.not_calibrated}. "
                "Make it with calibrated=True."
            )
        if released.place is None or not released.sums:
            by = "" if self.agreed_sum is None else ", and pass its Aggregation after the total"
            raise ValueError(f"no hospital gave its sums yet: play the study to its end{by}.")
        sums = dict(sorted(released.sums.items()))
        if self.agreed_sum is not None and weights != "sum":
            raise ValueError(f"weights={weights!r} needs each hospital's sums: leave it out.")
        if self.max_weight is not None and weights != "sum":
            raise ValueError(
                f"weights={weights!r} with max_weight: sums of survey weights are added as they "
                "are; leave it out."
            )
        posterior = combine(
            self.point, released.place.mean, sums, weights=weights, local=self.local
        )
        if self.agreed_sum is None:
            return posterior
        return dataclasses.replace(posterior, notes=(*posterior.notes, _SEEN_TOGETHER))

    def posterior(self, factor: Factor) -> tfd.Distribution:
        """Returns a proper factor, such as `history.posterior`, as a TFP distribution.

        It has the prior's structure.
        """
        scale = np.linalg.cholesky(factor.covariance) if self.full_rank else factor.stddev
        kind = tfd.MultivariateNormalTriL if self.full_rank else tfd.MultivariateNormalDiag
        dtype = surrogates.float_dtype(self.prior).as_numpy_dtype
        normal = kind(factor.mean.astype(dtype), scale.astype(dtype))
        return tfd.TransformedDistribution(normal, self.coordinates.bijector, name="posterior")

    def predictive(
        self, factor: Factor, x: Structure, *, num_draws: int = 200, seed: int = 0
    ) -> PosteriorPredictive:
        """Returns the posterior predictive distribution of y.

        Args:
          factor: A proper factor, such as `history.posterior`.
          x: Public inputs of n records.
          num_draws: Number of draws from the posterior.
          seed: Seed of the draws.
        """
        draws = posterior_draws(self.posterior(factor), num_draws, seed)
        return PosteriorPredictive(lambda params: self.likelihood(params, x), draws, num_draws)

    def mean_log_likelihood(
        self, factor: Factor, x: Structure, y: Structure, *, num_draws: int = 200
    ) -> float:
        """Returns the mean posterior predictive log density, for `simulate(evaluate=)`.

        Args:
          factor: A proper factor, such as `history.posterior`.
          x: Inputs of public records.
          y: Their outcomes.
          num_draws: Number of draws from the posterior.
        """
        return float(tf.reduce_mean(self.predictive(factor, x, num_draws=num_draws).log_prob(y)))


def _check_optimizer(optimizer: check.Unchecked, family: str, clipping: str) -> None:
    """Refuses an optimizer that no hospital can run, or not with this family and clip."""
    of_other_models = isinstance(optimizer, TermwiseOptimizer | ScoringOptimizer)
    if not isinstance(optimizer, DPOptimizer) or of_other_models:
        raise TypeError(
            f"optimizer={check.shown(optimizer)} is no DP-Keras optimizer for single records; "
            "pass for instance DPKerasAdamOptimizer."
        )
    is_plain = family == "mean_field" and clipping == "flat"
    if isinstance(optimizer, InformationOptimizer) and not is_plain:
        raise ValueError(
            f"family={family!r}, clipping={clipping!r}: InformationOptimizer goes with "
            "'mean_field' and 'flat' alone; pass DPKerasAdamOptimizer."
        )


def _check_privacy(
    privacy: str, message_clip: float | None, most_rows: int | None, most_weight: float | None
) -> None:
    """Refuses arguments that do not go with the place of the noise."""
    if (message_clip is None) == (privacy == "messages"):
        raise ValueError(
            f"message_clip={check.shown(message_clip)} with privacy={privacy!r}: it goes with "
            "'messages' alone; pass both."
        )
    if most_weight is not None and privacy == "messages":
        raise ValueError(
            "max_weight with privacy='messages': its clip is of a shard, not of a weighted record; "
            "pass privacy='worker'."
        )
    if most_rows is not None and privacy == "messages":
        raise ValueError(
            "max_rows_per_unit with privacy='messages': its shards are of single records; pass "
            "privacy='worker'."
        )


def _digest_of(structure: Structure) -> str:
    """Returns a digest of public arrays; of other objects, which have no digest, their names."""
    arrays = (
        np.asarray(getattr(part, "__qualname__", type(part).__name__))
        if np.asarray(part).dtype == object
        else np.asarray(part)
        for part in tf.nest.flatten(structure)
    )
    parts = (f"{array.dtype}{array.shape}".encode() + array.tobytes() for array in arrays)
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def _source(function: Callable[..., Any]) -> str:
    """Returns a digest of a function's source text, or its name where there is none.

    It has the constants that the text names, and the texts of functions beside it.
    """
    if isinstance(function, functools.partial):
        return f"{_source(function.func)} {_digest_of((function.args, function.keywords))}"
    try:
        text = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(function))))
        read = inspect.getclosurevars(function)
    except (OSError, TypeError, SyntaxError, ValueError):
        return str(getattr(function, "__qualname__", type(function).__name__))
    constants = {
        name: inspect.getsource(value) if inspect.isfunction(value) else value
        for name, value in {**read.globals, **read.nonlocals}.items()
        if isinstance(value, int | float | str | np.ndarray | tf.Tensor)
        or (inspect.isfunction(value) and value.__module__ == function.__module__)
    }
    return hashlib.sha256(text.encode()).hexdigest()[:16] + _digest_of(constants)


def _rounded(values: np.ndarray, unit: np.ndarray | float) -> np.ndarray:
    """Returns numbers at nearly float32's precision, zeros as zeros: the same on all machines."""
    kept = np.where(np.abs(values) < 1e-5 * unit, 0.0, values)
    return np.asarray(np.vectorize(lambda value: float(f"{value:.6g}"))(kept))
