"""`Synthesizer`: a private synthetic copy of a table."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from dp_accounting import NeighboringRelation

from tfp_dpvi import _deprecation, _random, surrogates
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import tf
from tfp_dpvi.data.columns import Numeric
from tfp_dpvi.data.schema import Described, Layout, Schema, TableData
from tfp_dpvi.models.saving import load_model
from tfp_dpvi.privacy import BudgetExhaustedError, PrivacyLedger, PrivacyPlan, PrivacyReport
from tfp_dpvi.privacy.plan import plan_counts
from tfp_dpvi.synthetic import grouping, mixture, planning, reading
from tfp_dpvi.synthetic.estimates import Estimates
from tfp_dpvi.synthetic.mixture import Params, Segments
from tfp_dpvi.synthetic.model import TableModel
from tfp_dpvi.synthetic.pairs import NoisyPairs, Pairs
from tfp_dpvi.synthetic.releases import CountReleases
from tfp_dpvi.synthetic.rules import Drawn, Rule, check_rules, drawn_until_kept
from tfp_dpvi.training.budget import SPENT_FRACTION, PrivacyTarget

# The share of records in merged categories from which a fit warns.
_MUCH_MERGED = 0.1


@dataclasses.dataclass
class _Paid:
    """The noisy counts of a fit that was interrupted, for the next one of the same records.

    Attributes:
      settings: The settings of the fit, with a digest of the records.
      pairs: What it counts last.
      expected: What the noise drowns of it.
      plans: The plans of its releases.
      released: Its releases so far.
    """

    settings: tuple[Any, ...] = ()
    pairs: Pairs = dataclasses.field(default_factory=lambda: Pairs(Segments((), ())))
    expected: planning.TablePlan = dataclasses.field(
        default_factory=lambda: planning.TablePlan(1, {}, 0.0)
    )
    plans: Sequence[PrivacyPlan] = ()
    released: list[np.ndarray] = dataclasses.field(default_factory=list)


class Synthesizer:
    """Fits a mixture model to a described table privately, and samples synthetic tables from it.

    ```python
    >>> import numpy as np
    >>> import tfp_dpvi as dpvi
    >>> schema = dpvi.Schema({"smokes": dpvi.data.Binary(), "ill": dpvi.data.Binary()})
    >>> records = {"smokes": np.arange(90) % 2, "ill": np.arange(90) % 3 == 0}
    >>> synthesizer = dpvi.Synthesizer(schema, num_components=2, concentration=1.0)
    >>> synthesizer = synthesizer.fit(records, epsilon=1.0, delta=1e-5, steps=5)
    >>> len(synthesizer.sample()["ill"])
    90

    ```

    Of a DataFrame, samples are DataFrames with the same columns and dtypes. `estimate` has means,
    regressions and the like from the released counts. `sample_many` is for `dpvi.synthetic.rubin`,
    and `save` and `Synthesizer.load` keep model and ledger in one file.

    `fit` releases, from one budget, histograms of the columns whose levels it chooses (numbers with
    `bins=16`), then noisy counts of all pairs of columns, or of triples with a `target`.
    Variational inference that models the noise fits the mixture to these counts. `.model` has the
    posterior of this mixture, whose prior and likelihood are `dpvi.synthetic.make_prior` and
    `make_likelihood`, and `.model.probable` the mean of the most probable mixtures from four
    starts, of which `sample` draws. Defaults were chosen on public data (Adult).

    Args:
      schema: The public description of the columns, a `Schema` or what `Schema.from_dict` takes.
      num_components: The number K of components; under a small budget, some stay small or alike.
      target: A column that the synthetic records should predict, over whose levels components are
        initially spread. If it has two, and the noise allows it, pairs of other columns are counted
        within each: from such triples records predict it better, but the noise of these pairs is
        sqrt(2) times as large. Otherwise its own pairs are counted twice as precisely. None where
        all columns matter alike.
      rules: What synthetic records keep, such as `dpvi.synthetic.AtMost("admitted", "discharged")`
        `OnlyWhere("pregnant", [1], {"sex": ["F"]})` or `Equal("born", "birthday")`: public
        knowledge, which the records obey. `estimate` knows nothing of rules.
      concentration: The concentration of the Dirichlet priors.
      seed: Makes initial values, noise and fit repeatable and hence *not private*; see `DPModel`.

    Raises:
      TypeError: `schema` is no `Schema`.
      ValueError: `target` or a rule's column is no column of it, a rule cannot be saved or fails on
        drawn values, or a number is out of range.

    #### Formal guarantee

    Every release is reserved in the ledger before it happens (contract 6). Histograms and counts
    have Gaussian noise calibrated to the norm of a record's contribution (`Pairs.counts`,
    `histograms`); all else is post-processing. Names, order and dtypes of columns and the number of
    records (unless `num_records` is declared) are considered public; the check of values against
    the description is outside the guarantee.
    """

    @_deprecation.renamed_argument("table", "schema")
    def __init__(
        self,
        schema: Described,
        num_components: int = 64,
        *,
        target: str | None = None,
        rules: Sequence[Rule] = (),
        concentration: float = 0.5,
        seed: int | None = None,
    ) -> None:
        schema = Schema.of(schema)
        num = check.count("num_components", num_components, 1)
        check_rules(rules, schema)
        coded = _uninformed(schema)
        start = mixture.starting_point(coded, num, target=target, seed=seed)
        make_prior = functools.partial(mixture.make_prior, coded, num, concentration=concentration)
        surrogate = surrogates.mean_field(make_prior(), initial_loc=start, initial_scale=0.05)
        self.schema = schema
        self.target = target
        self.model = TableModel(coded, make_prior, surrogate, target=target, rules=rules, seed=seed)
        self._paid = _Paid()

    @property
    def table(self) -> Schema:
        """The old name of `schema`."""
        _deprecation.warn("Synthesizer.table", "Synthesizer.schema")
        return self.schema

    @staticmethod
    def plan(
        schema: Described,
        num_records: int,
        epsilon: float,
        delta: float | None = None,
        *,
        target: str | None = None,
    ) -> planning.TablePlan:
        """Returns what a fit would release, beside its noise: without data, at no cost.

        Args:
          schema: As in `Synthesizer`.
          num_records: The public number of records.
          epsilon: The budget of the fit.
          delta: The delta of the budget, by default the smaller of 1e-5 and 0.1 / num_records.
          target: As in `Synthesizer`.

        Returns:
          The expected records of each level, the noise, the columns that drown, and what to change.

        Raises:
          TypeError: `schema` is no `Schema`.
          ValueError: A number is out of range, or `target` is no column.
        """
        schema = Schema.of(schema)
        num = check.count("num_records", num_records, 1)
        epsilon = check.epsilon(epsilon)
        delta = min(1e-5, 0.1 / num) if delta is None else check.delta(delta)
        if target is not None and target not in schema.columns:
            raise ValueError(f"target={check.shown(target)} is no column of the schema.")
        place = None if target is None else schema.names.index(target)
        pairs = Pairs(Segments.of(_uninformed(schema)), place)
        listed = planning.releases_of(schema, pairs)

        def at(budget: float) -> planning.TablePlan:
            plan = plan_counts(listed, epsilon=budget, delta=delta, num_records=num)[-1]
            return planning.table_plan(schema, pairs, plan, num)

        plan = dataclasses.replace(at(epsilon), epsilon=epsilon, delta=delta)
        return planning.with_sufficient(plan, epsilon, at)

    def fit(
        self,
        data: TableData | Iterable[TableData],
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        ledger: PrivacyLedger | None = None,
        num_records: int | None = None,
        steps: int = 4000,
        neighboring_relation: NeighboringRelation | str | None = None,
        accountant: str = "pld",
        noise_multiplier: float | None = None,
    ) -> Synthesizer:
        """Fits the model to private records; returns itself.

        After an interruption, the same call takes over the counts that are paid for.

        Args:
          data: A DataFrame of pandas, polars or Arrow, or a dict of one-dimensional arrays, with
            exactly the described columns. Of a table that is larger than memory, an iterable of
            such parts, as `pandas.read_csv(path, chunksize=100_000, dtype=...)`: of each part only
            the levels are kept, 4 bytes a value and 8 at the peak. A second call needs a new one.
          epsilon: The lifetime total for these data, with `delta`; it includes earlier releases in
            the ledger.
          delta: See `epsilon`.
          ledger: The data's `PrivacyLedger`; by default a new one.
          num_records: The public number of records, by default `len(data)`.
          steps: The number of steps of the variational inference, and of the search for the most
            probable mixture, which cost no privacy.
          neighboring_relation: As in `DPModel.compile`, but by default the ledger's.
          accountant: As in `DPModel.compile`.
          noise_multiplier: Instead of `epsilon`: that of one release with the cost of all counts.

        Raises:
          ValueError: An argument or the data are refused. No privacy was spent.
          TypeError: Likewise.
          BudgetExhaustedError: The budget does not allow the fit. No privacy was spent, except for
            the histograms if another fit spends a shared ledger's budget between the two releases.
        """
        model = self.model
        steps = check.count("steps", steps, 1)
        declared = num_records is not None
        ledger = model.privacy_ledger if ledger is None else ledger
        for warning in planning.check_dates(self.schema):
            warnings.warn(warning, stacklevel=2)
        # The only time that records are encoded: all that is counted follows from finest levels.
        layout, codes = reading.encoded(self.schema, model.rules, data)
        num = check.count("num_records", num_records, 1) if declared else len(codes)
        settings = (
            self.target,
            epsilon,
            delta,
            num,
            noise_multiplier,
            accountant,
            str(neighboring_relation),
            hashlib.sha256(codes.tobytes()).digest(),
        )
        paid = self._paid if self._paid.settings == settings else _Paid(settings)
        if not paid.released:
            _check_budget(ledger, epsilon, delta, noise_multiplier, accountant)
        noise = (
            None
            if noise_multiplier is None
            else check.non_negative("noise_multiplier", noise_multiplier)
        )
        relation = (
            neighboring_relation
            or getattr(ledger, "neighboring_relation", None)
            or "add_or_remove_one"
        )
        target = PrivacyTarget(
            epsilon=epsilon,
            delta=delta,
            noise=noise,
            accountant=accountant,
            neighboring_relation=check.relation(relation),
        )
        model.set_privacy(target, ledger)
        self._paid = paid
        releases = CountReleases(model.privacy_ledger, target, model.seed)
        self._learn(codes, releases, layout, num, steps, declared=declared)
        self._paid = _Paid()
        return self

    def _learn(
        self,
        codes: np.ndarray,
        releases: CountReleases,
        layout: Layout,
        num: int,
        steps: int,
        *,
        declared: bool,
    ) -> None:
        """Fits the model to noisy counts of pairs, and describes it by the chosen levels."""
        names, model = self.schema.names, self.model
        target = None if self.target is None else names.index(self.target)
        if not self._paid.released:
            pairs = Pairs(Segments.of(model.schema), target)
            plan = releases.plans(planning.releases_of(self.schema, pairs), num)[-1]
            self._paid.expected = self._expected(pairs, plan, releases, num)
            self._paid.pairs = pairs.where_clear(num, plan.deviation)
            listed = planning.releases_of(self.schema, self._paid.pairs)
            self._paid.plans = releases.plans(listed, num)
        pairs, plan = self._paid.pairs, self._paid.plans[-1]
        expected = self._paid.expected
        if expected.warning:
            warnings.warn(expected.warning, stacklevel=3)
        schema = self._with_levels(codes, releases)
        counts = pairs.counts(grouping.grouped_codes(schema, codes))
        noisy = NoisyPairs.of(
            pairs, self._release(releases, counts, len(self._paid.plans) - 1), plan.deviation, num
        )
        schema = self._with_ends(schema, noisy)
        model.learn(noisy, plan, steps=steps, declared=declared)
        # After the weights, which an interrupted fit keeps, and before warnings, which may raise.
        model.describe(schema, layout, noisy)
        for place, (name, column) in enumerate(schema.columns.items()):
            bounds = grouping.crowded(column, noisy.column(place))
            if bounds is not None and name not in expected.drowned:
                warnings.warn(
                    f"column {name!r}: most records lie in one bin, from {bounds[0]:g} to "
                    f"{bounds[1]:g}, and differences within it are lost: narrow its bounds by "
                    "public knowledge, or pass scale='log', spikes= or inner edges as bins=.",
                    stacklevel=3,
                )
            merged = grouping.merged_categories(column, noisy.column(place))
            if merged is not None and merged.share > _MUCH_MERGED:
                warnings.warn(
                    f"column {name!r}: {merged.num} of {merged.of} categories, with "
                    f"{merged.share:.0%} of the records, are merged, and what tells them apart is "
                    "lost: raise max_levels, or pass parents= to merge within public groups.",
                    stacklevel=3,
                )

    def _expected(
        self, pairs: Pairs, plan: PrivacyPlan, releases: CountReleases, num: int
    ) -> planning.TablePlan:
        """Returns what `plan` would say of this fit, in addition to all that is in the ledger."""
        listed = planning.releases_of(self.schema, pairs)

        def at(epsilon: float) -> planning.TablePlan:
            target = dataclasses.replace(releases.target, epsilon=epsilon)
            other = dataclasses.replace(releases, target=target).plans(listed, num)[-1]
            return planning.table_plan(self.schema, pairs, other, num)

        expected = planning.table_plan(self.schema, pairs, plan, num)
        epsilon = releases.target.epsilon
        return expected if epsilon is None else planning.with_sufficient(expected, epsilon, at)

    def _release(self, releases: CountReleases, counts: np.ndarray, number: int) -> np.ndarray:
        """Returns one of a fit's releases, charged now or taken over."""
        plans, released = self._paid.plans, self._paid.released
        if number == len(released):
            released.append(releases.release(counts, plans[number], number))
        return released[number]

    def _with_levels(self, codes: np.ndarray, releases: CountReleases) -> Schema:
        """Releases the histograms, if any, and returns the schema with the chosen levels."""
        schema = self.schema
        if not schema.open:
            return schema
        counts = {
            name: grouping.histograms(column, levels)
            for (name, column), levels in zip(schema.columns.items(), codes.T, strict=True)
            if name in schema.open
        }
        parts = [part for tree in counts.values() for part in tree]
        noisy = self._release(releases, np.concatenate(parts), 0)
        pieces = iter(np.split(noisy, np.cumsum([len(part) for part in parts])[:-1]))
        released = {name: [next(pieces) for _ in tree] for name, tree in counts.items()}
        return _grouped(schema, released, self._paid.plans[0].deviation)

    def _with_ends(self, schema: Schema, released: NoisyPairs) -> Schema:
        """Returns the schema with distributions at the ends of its columns of numbers."""
        generator = np.random.default_rng(self.model.seed)
        columns = dict(schema.columns)
        for place, (name, column) in enumerate(schema.columns.items()):
            if isinstance(column, grouping.Grouped) and isinstance(column.column, Numeric):
                counts = released.column(place)[: column.num_levels]
                coarse, fine = self._paid.plans[0].deviation, self._paid.plans[-1].deviation
                columns[name] = grouping.with_ends(column, counts, coarse, fine, generator)
        return Schema(columns)

    def sample(self, num_rows: int | None = None, *, seed: int | None = None) -> TableData:
        """Returns one synthetic table, whose records come from the most probable mixtures.

        They are those of `model.probable`; a file of 0.5 and before has none, and gives a table of
        one posterior draw. Several of such tables do not differ by the noise for privacy: for
        standard errors by `dpvi.synthetic.rubin` use `sample_many`. The report says which columns
        may have records far from all others that noise hides, and that samples do not have.

        Args:
          num_rows: The number of its records, by default the public number.
          seed: Makes the table repeatable, which costs no privacy: the model has been released.

        Returns:
          A table with the columns and dtypes of `fit`'s data.

        Raises:
          RuntimeError: The synthesizer is not fitted, or hardly any of its records keeps the rules.
        """
        return self._table(num_rows, seed, self.model.probable)

    def _table(self, num_rows: int | None, seed: int | None, params: Params | None) -> TableData:
        """Returns a synthetic table of a mixture, or of a posterior draw."""
        layout, num = self._fitted("sample")
        num = num if num_rows is None else check.count("num_rows", num_rows, 1)
        generator = np.random.default_rng(seed)
        if params is None:
            drawn = self.model.posterior_sample(1, seed=int(generator.integers(2**63)))
            params = tf.nest.map_structure(lambda part: part[0], drawn)
        schema, record = self.model.schema, self.model.likelihood(params)

        def records(some: int) -> dict[str, Drawn]:
            key = _random.new_key(int(generator.integers(2**63)))
            codes = record.sample(some, seed=_random.tfp_seed(key)).numpy()
            return schema.values(codes, generator)

        return layout.restore(schema, drawn_until_kept(records, num, self.model.rules))

    def sample_many(
        self, num_sets: int, num_rows: int | None = None, *, seed: int | None = None
    ) -> list[TableData]:
        """Returns synthetic tables for multiple imputation, each from its own posterior draw.

        Args:
          num_sets: The number m of tables, for `dpvi.synthetic.rubin`.
          num_rows: The number of records of each, by default the public number.
          seed: Makes the tables repeatable.

        Raises:
          RuntimeError: The synthesizer is not fitted.
        """
        seeds = np.random.default_rng(seed).integers(
            2**63, size=check.count("num_sets", num_sets, 1)
        )
        return [self._table(num_rows, int(set_seed), None) for set_seed in seeds]

    @property
    def estimate(self) -> Estimates:
        """Means, shares, cross-tables, correlations and least squares, with standard errors.

        They are functions of the released counts, whose noise is known, without the mixture model:
        post-processing, at no cost. `Estimates` lists them, such as `estimate.mean("age")`.

        Raises:
          RuntimeError: The synthesizer is not fitted, or its file was written before counts were
            saved.
        """
        self._fitted("estimate")
        released = self.model.released
        if released is None:
            raise RuntimeError(
                "estimate: this file has no released counts: fit again to have them."
            )
        return Estimates(self.model.schema, released)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves model, schema and ledger in one `.keras` file, without records.

        See `DPModel.save`.
        """
        self._fitted("save")
        self.model.save(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Synthesizer:
        """Loads a synthesizer that `save` wrote, with its ledger.

        It can sample, report and fit again.
        """
        model = load_model(path)
        if not isinstance(model, TableModel) or model.layout is None:
            raise ValueError(
                f"path={os.fspath(path)!r} holds no fitted Synthesizer: use dpvi.load_model."
            )
        self = cls.__new__(cls)
        columns = model.schema.columns.items()
        self.schema = Schema({name: column.description for name, column in columns})
        self.target, self.model = model.target, model
        self._paid = _Paid()
        return self

    def privacy_report(self, delta: float | None = None) -> PrivacyReport:
        """Returns the model's report with the schema and the rules; see `DPModel.privacy_report`.

        Each line of them asks for public sources. Its remarks say where noise may hide records that
        are far from all others, as no sample is.
        """
        rules = [f"rule: {rule.described}. Public source?" for rule in self.model.rules]
        declared = "\n".join([self.schema.asked, *rules])
        return dataclasses.replace(self.model.privacy_report(delta), schema=declared)

    def _fitted(self, call: str) -> tuple[Layout, int]:
        layout, num = self.model.layout, self.model.privacy_account.num_records
        if layout is None or num is None:
            raise RuntimeError(
                f"Synthesizer.{call} was called before fit: call fit(data, epsilon=1.0, "
                "delta=1e-5)."
            )
        return layout, num


def _uninformed(schema: Schema) -> Schema:
    """Returns the schema with as many levels as after a fit, independent of records."""
    nothing = np.zeros(0, np.int32)
    empty = {name: grouping.histograms(schema.columns[name], nothing) for name in schema.open}
    return _grouped(schema, empty, 0.0)


def _grouped(schema: Schema, counts: dict[str, list[np.ndarray]], deviation: float) -> Schema:
    chosen = {
        name: grouping.group(schema.columns[name], tree, deviation) for name, tree in counts.items()
    }
    return Schema({**schema.columns, **chosen})


def _check_budget(
    ledger: check.Unchecked,
    epsilon: check.Unchecked,
    delta: check.Unchecked,
    noise: check.Unchecked,
    accountant: str,
) -> None:
    if epsilon is None and noise is None:
        raise ValueError(
            "epsilon is missing: pass fit a budget, such as fit(data, epsilon=1.0, delta=1e-5)."
        )
    if epsilon is None:
        return
    epsilon = check.epsilon(epsilon)
    if delta is None:
        raise ValueError(
            f"epsilon={epsilon!r} needs a delta below 1/N: fit(data, epsilon={epsilon!r}, "
            "delta=1e-5)."
        )
    if isinstance(ledger, PrivacyLedger) and ledger.num_releases:
        spent = ledger.epsilon(check.delta(delta), accountant)
        if spent >= SPENT_FRACTION * epsilon:
            raise BudgetExhaustedError(
                f"epsilon={epsilon:g} is the lifetime total for these data, and {spent:.4g} of it "
                f"is spent at delta={delta:g}: sample from the fitted model, or call fit with a "
                "larger epsilon."
            )
