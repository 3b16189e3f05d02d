"""`Synthesizer`: a private synthetic copy of a table."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from dp_accounting import NeighboringRelation

from tfp_dpvi import _random, surrogates
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import tf
from tfp_dpvi.data.schema import Layout, Table, TableData
from tfp_dpvi.models.saving import load_model
from tfp_dpvi.optimizers import DPKerasAdamOptimizer
from tfp_dpvi.privacy import BudgetExhaustedError, PrivacyLedger, PrivacyPlan, PrivacyReport
from tfp_dpvi.synthetic import grouping, mixture
from tfp_dpvi.synthetic.mixture import Segments
from tfp_dpvi.synthetic.model import TableModel
from tfp_dpvi.synthetic.pairs import NoisyPairs, Pairs

_SHARE = 0.1  # Fraction of the budget for the histograms that choose levels.
_OPTIMIZER = {"l2_norm_clip": 1.0}  # Counts need no optimizer, but `compile` does.
_NEARLY = 0.99  # Fraction of a budget at which it counts as spent.


@dataclasses.dataclass
class _Paid:
    """The noisy counts of a fit, which the next one of the same records and settings takes over if it was interrupted."""

    settings: tuple[Any, ...] = ()  # With a digest of the records.
    plans: Sequence[PrivacyPlan] = ()
    released: list[np.ndarray] = dataclasses.field(default_factory=list)


class Synthesizer:
    """Fits a mixture model to a described table privately, and samples synthetic tables from it.

    ```python
    table = dpvi.synthetic.Table({"age": dpvi.synthetic.Integer(17, 90), "sex": dpvi.synthetic.Binary()})
    synthesizer = dpvi.Synthesizer(table).fit(frame, epsilon=1.0, delta=1e-5)
    synthetic = synthesizer.sample()          # a DataFrame with the same columns and dtypes
    sets = synthesizer.sample_many(10)        # for dpvi.synthetic.rubin
    synthesizer.save("table.keras")           # dpvi.Synthesizer.load("table.keras")
    ```

    `fit` releases, from one budget, histograms of the columns whose levels it chooses (numbers with `bins=16`), then noisy counts
    of all pairs of columns. Variational inference that models the noise fits the mixture to these counts. `.model` is a `DPVI` on
    `dpvi.synthetic.make_prior` and `make_likelihood`. Defaults were chosen on public data (Adult).

    Args:
      table: the public description.
      num_components: K; under a small budget, some stay small or alike.
      target: a column that the synthetic records should predict: its pairs are counted twice as precisely, and components are
        initially spread over its levels. None for no such column.
      concentration: concentration of the Dirichlet priors.
      seed: makes initial values, noise and fit repeatable and hence *not private*; see `DPModel`.

    #### Formal guarantee

    Every release is reserved in the ledger before it happens (contract C6). Histograms and pairs have Gaussian noise calibrated
    to the norm of a record's contribution (`Pairs.counts`, `histograms`); all else is post-processing.
    Names, order and dtypes of columns and the number of records (unless `num_records` is declared) are considered public; the
    check of values against the description is outside the guarantee.
    """

    def __init__(
        self,
        table: Table,
        num_components: int = 64,
        *,
        target: str | None = None,
        concentration: float = 0.5,
        seed: int | None = None,
    ) -> None:
        if not isinstance(table, Table):
            raise TypeError(f"table must be a dpvi.synthetic.Table, got {check.shown(table)}.")
        num = check.count("num_components", num_components, 1)
        self.table, self.target = table, target
        # The same number of levels as after a fit, but independent of records.
        empty = {name: np.zeros(0, np.int32) for name in table.open}
        chosen = _grouped(
            table,
            {name: grouping.histograms(table.columns[name], empty[name]) for name in empty},
            0.0,
        )
        start = mixture.starting_point(chosen, num, target=target, seed=seed)
        made = functools.partial(mixture.make_prior, chosen, num, concentration=concentration)
        surrogate = surrogates.mean_field(made(), initial_loc=start, initial_scale=0.05)
        self.model = TableModel(chosen, made, surrogate, target=target, seed=seed)

    _paid = _Paid()

    def fit(
        self,
        data: TableData,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        ledger: PrivacyLedger | None = None,
        num_records: int | None = None,
        steps: int = 2000,
        neighboring_relation: NeighboringRelation | str | None = None,
        accountant: str = "pld",
        noise_multiplier: float | None = None,
    ) -> Synthesizer:
        """Fits the model to private records; returns itself.

        After an interruption, the same call takes over the counts that are paid for.

        Args:
          data: pandas DataFrame, or dict of one-dimensional arrays, with exactly the described columns.
          epsilon: lifetime total for these data, with `delta`; includes earlier releases in the ledger.
          delta: see `epsilon`.
          ledger: the data's `PrivacyLedger`; by default a new one.
          num_records: the public number of records, by default `len(data)`.
          steps: number of steps of the variational inference, which cost no privacy.
          neighboring_relation: as in `DPModel.compile`, but by default the ledger's.
          accountant: as in `DPModel.compile`.
          noise_multiplier: instead of `epsilon`: that of one release with the cost of all counts.

        Raises:
          ValueError, TypeError, BudgetExhaustedError: no privacy was spent. (Except for the histograms, if another fit spends
            a shared ledger's budget between the two releases.)
        """
        model = self.model
        steps = check.count("steps", steps, 1)
        declared = num_records is not None
        ledger = model.privacy_ledger if ledger is None else ledger
        codes, layout = self.table.encode(data), Layout.of(data, self.table)
        num = check.count("num_records", num_records, 1) if declared else len(codes)
        public = (
            self.target,
            epsilon,
            delta,
            num,
            noise_multiplier,
            accountant,
            str(neighboring_relation),
        )
        settings = (*public, self._digest(data, codes))
        paid = self._paid if self._paid.settings == settings else _Paid(settings)
        if not paid.released:
            _check_budget(ledger, epsilon, delta, noise_multiplier, accountant)
        relation = (
            neighboring_relation
            or getattr(ledger, "neighboring_relation", None)
            or "add_or_remove_one"
        )
        model.compile(
            DPKerasAdamOptimizer(**_OPTIMIZER, noise_multiplier=noise_multiplier),
            epsilon=epsilon,
            delta=delta,
            ledger=ledger,
            neighboring_relation=check.relation(relation),
            accountant=accountant,
        )
        self._paid = paid
        table = self._from_pairs(data, num, declared, steps)
        model.describe(
            table, layout
        )  # Set last: an interrupted fit keeps the former levels with the former weights.
        self._paid = _Paid()
        return self

    def _digest(self, data: TableData, codes: np.ndarray) -> bytes:
        fine = (
            self.table.fine.encode({name: data[name] for name in self.table.open})
            if self.table.open
            else codes
        )
        return hashlib.sha256(codes.tobytes() + fine.tobytes()).digest()

    def _release(self, counts: np.ndarray, number: int) -> np.ndarray:
        """Returns one of a fit's releases, charged now or taken over."""
        plans, released = self._paid.plans, self._paid.released
        if number == len(released):
            released.append(self.model.release(counts, plans[number], number))
        return released[number]

    def _from_pairs(self, data: TableData, num: int, declared: bool, steps: int) -> Table:
        """Fits the model to noisy counts of pairs; returns the table with its levels."""
        model, columns = self.model, len(self.table.names)
        pairs = Pairs(
            Segments.of(model.table),
            None if self.target is None else self.table.names.index(self.target),
        )
        first = self._histograms()
        purpose = (
            f"counts of levels of {columns} columns and of their pairs"
            if columns > 1
            else "counts of 1 column"
        )
        if not self._paid.released:
            self._paid.plans = model.plans(
                [*first, (purpose, pairs.norm, 1.0 - _SHARE * len(first))], num
            )
        plan = self._paid.plans[-1]
        table = self._with_levels(data)
        noisy = self._release(pairs.counts(table.encode(data)), len(first))
        released = NoisyPairs.of(pairs, noisy, plan.deviation, num)
        model.learn(released, plan, steps=steps, declared=declared)
        for place, (name, column) in enumerate(table.columns.items()):
            if (bounds := grouping.crowded(column, released.column(place))) is not None:
                warnings.warn(
                    f"column {name!r}: most records lie in one bin, from {bounds[0]:g} to {bounds[1]:g}, and differences within "
                    "it are lost: narrow its bounds by public knowledge, or pass spikes= or inner edges as bins=.",
                    stacklevel=3,
                )
        return table

    def _histograms(self) -> list[tuple[str, float, float]]:
        """Returns purpose, norm and budget share of the histograms that choose levels, if any."""
        columns = [self.table.columns[name] for name in self.table.open]
        norm = math.sqrt(sum(grouping.depths(column) for column in columns))
        named = "1 column" if len(columns) == 1 else f"{len(columns)} columns"
        return (
            [(f"histograms of {named}, by which levels are chosen", norm, _SHARE)]
            if columns
            else []
        )

    def _with_levels(self, data: TableData) -> Table:
        """Releases the histograms, if any, and returns the table with the chosen levels."""
        if not self.table.open:
            return self.table
        fine = self.table.fine
        codes = dict(
            zip(fine.names, fine.encode({name: data[name] for name in fine.names}).T, strict=True)
        )
        counts = {
            name: grouping.histograms(self.table.columns[name], codes[name])
            for name in self.table.open
        }
        parts = [part for of_column in counts.values() for part in of_column]
        noisy = self._release(np.concatenate(parts), 0)
        pieces = iter(np.split(noisy, np.cumsum([len(part) for part in parts])[:-1]))
        released = {name: [next(pieces) for _ in of_column] for name, of_column in counts.items()}
        return _grouped(self.table, released, self._paid.plans[0].deviation)

    def sample(self, num_rows: int | None = None, *, seed: int | None = None) -> TableData:
        """Returns one synthetic table from one posterior draw, with the columns and dtypes of `fit`'s data.

        It has `num_rows` records, by default the public number. A seed costs no privacy: the model has been released.
        """
        layout, num = self._fitted("sample")
        num = num if num_rows is None else check.count("num_rows", num_rows, 1)
        generator = np.random.default_rng(seed)
        draw_seed, sample_seed = (int(part) for part in generator.integers(2**63, size=2))
        draws = self.model.posterior_sample(1, seed=draw_seed)
        mixture = self.model.likelihood(tf.nest.map_structure(lambda part: part[0], draws))
        codes = mixture.sample(num, seed=_random.tfp_seed(_random.new_key(sample_seed))).numpy()
        return self.model.table.decode(codes, layout, generator)

    def sample_many(
        self, num_sets: int, num_rows: int | None = None, *, seed: int | None = None
    ) -> list[TableData]:
        """Returns m synthetic tables for multiple imputation, each from its own draw: see `sample`, `dpvi.synthetic.rubin`."""
        seeds = np.random.default_rng(seed).integers(
            2**63, size=check.count("num_sets", num_sets, 1)
        )
        return [self.sample(num_rows, seed=int(one)) for one in seeds]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves model, description and ledger in one `.keras` file without records; see `DPModel.save`."""
        self._fitted("save")
        self.model.save(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Synthesizer:
        """Loads a synthesizer that `save` wrote, with its ledger; it can sample, report and fit again."""
        model = load_model(path)
        if not isinstance(model, TableModel) or model.layout is None:
            raise ValueError(
                f"path={os.fspath(path)!r} holds no fitted Synthesizer: use dpvi.load_model."
            )
        self = cls.__new__(cls)
        self.table = Table(
            {name: column.description for name, column in model.table.columns.items()}
        )
        self.target, self.model = model.target, model
        return self

    def privacy_report(self, delta: float | None = None) -> PrivacyReport:
        """Returns the model's report; see `DPModel.privacy_report`."""
        return self.model.privacy_report(delta)

    def _fitted(self, call: str) -> tuple[Layout, int]:
        layout, num = self.model.layout, self.model.privacy_account.num_records
        if layout is None or num is None:
            raise RuntimeError(
                f"Synthesizer.{call} was called before fit: call fit(data, epsilon=1.0, delta=1e-5)."
            )
        return layout, num


def _grouped(table: Table, counts: dict[str, list[np.ndarray]], deviation: float) -> Table:
    chosen = {
        name: grouping.group(table.columns[name], of_column, deviation)
        for name, of_column in counts.items()
    }
    return Table({**table.columns, **chosen})


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
            f"epsilon={epsilon!r} needs a delta below 1/N: fit(data, epsilon={epsilon!r}, delta=1e-5)."
        )
    if isinstance(ledger, PrivacyLedger) and ledger.num_releases:
        spent = ledger.epsilon(check.delta(delta), accountant)
        if spent >= _NEARLY * epsilon:
            raise BudgetExhaustedError(
                f"epsilon={epsilon:g} is the lifetime total for these data, and {spent:.4g} of it is spent at delta={delta:g}: "
                "sample from the fitted model, or call fit with a larger epsilon."
            )
