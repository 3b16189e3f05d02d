"""A regression's model as plain values, and its parameters in the units of the formula."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tfp_dpvi._tf import tf
from tfp_dpvi.regressions.correlated import correlations, pairs
from tfp_dpvi.regressions.design import Design, Rows
from tfp_dpvi.regressions.families import Layout, outcome_levels, slopes
from tfp_dpvi.regressions.outcomes import FAMILIES, Family, Outcome


@dataclasses.dataclass(frozen=True)
class Parts:
    """A regression's model as plain values.

    Attributes:
      family: The family.
      outcome: How the outcome enters.
      layout: The columns of the inputs.
      coefficients: Prior mean and deviation of each coefficient, on the model's scale.
      intercept: Those of the intercept or the first threshold.
      location: What is subtracted from each common column.
      scale: What it is divided by.
      measured: Columns whose typical values or shares were released first.
      share: The share of epsilon and delta for that release.
      weights: The column of weights, or "".
      max_weight: The largest weight, by the schema; 0 without weights.
      num_public: The number of public records that were passed; 0 if they were invented.
    """

    family: str
    outcome: Outcome
    layout: Layout
    coefficients: tuple[tuple[float, float], ...]
    intercept: tuple[float, float]
    location: tuple[float, ...]
    scale: tuple[float, ...]
    measured: tuple[str, ...] = ()
    share: float = 0.0
    weights: str = ""
    max_weight: float = 0.0
    num_public: int = 0

    @property
    def kind(self) -> Family:
        """The family's class."""
        return FAMILIES[self.family]

    @property
    def own_names(self) -> list[str]:
        """The names of the parameters that the family's distribution has besides its score."""
        thresholds = ["threshold"] if self.family == "ordinal" else []
        return [*self.kind.own(self.outcome), *thresholds]

    @property
    def base(self) -> float:
        """The number that the model subtracts from an outcome: 0 if it is not scaled."""
        return self.outcome.location if self.kind.is_scaled else 0.0

    @property
    def prior(self) -> dict[str, Any]:
        """Arguments of `make_prior`."""
        return {
            **self.likelihood,
            "coefficients": [list(pair) for pair in self.coefficients],
            "intercept": list(self.intercept),
        }

    @property
    def likelihood(self) -> dict[str, Any]:
        """Arguments of `likelihood`."""
        outcome, layout = dataclasses.asdict(self.outcome), dataclasses.asdict(self.layout)
        outcome["cuts"] = list(outcome["cuts"])
        layout["group_sizes"] = list(layout["group_sizes"])
        for name in ("monotone", "correlated"):
            layout[name] = [list(places) for places in layout[name]]
        return {"family": self.family, "outcome": outcome, "layout": layout}

    @property
    def num_coefficients(self) -> int:
        """The number of parameters that the likelihood reads."""
        layout = self.layout
        # The first threshold of an ordinal outcome is an intercept.
        own = self.kind.num_own(self.outcome) + (self.family == "ordinal")
        common = self.outcome.blocks * (layout.num_common + layout.has_intercept)
        return common + sum(layout.group_sizes) + own

    def inputs(self, rows: Rows) -> np.ndarray:
        """Returns the model's inputs, float32 [n, columns].

        Args:
          rows: Design rows.
        """
        common = (rows.common - np.array(self.location)) / np.array(self.scale)
        offset = rows.offset[:, None] / self.outcome.scale
        limits = (rows.limits - self.base) / self.outcome.scale
        columns = [common, offset, rows.groups, rows.trials, limits]
        return np.concatenate(columns, axis=1).astype(np.float32)

    def slopes(self, draws: dict[str, np.ndarray]) -> np.ndarray:
        """Returns draws of the slope of each common column on the model's scale.

        Args:
          draws: Draws of the model's parameters, in the first dimension.

        Returns:
          Shape [S, blocks, columns].
        """
        size = len(next(iter(draws.values())))
        shape = [size, self.outcome.blocks, self.layout.num_common]
        coefficients = draws.get("coefficients", np.zeros([size, 0])).reshape(shape)
        monotone = self.layout.monotone
        return np.asarray(slopes(tf.constant(coefficients), monotone)) if monotone else coefficients

    def in_units(self, draws: dict[str, np.ndarray], design: Design) -> dict[str, np.ndarray]:
        """Returns draws of named numbers in the units of the formula, each of shape [S].

        Args:
          draws: Draws of the model's parameters, in the first dimension.
          design: The design.
        """
        unit = self.outcome.scale
        size = len(next(iter(draws.values())))
        slopes = self.slopes(draws) * unit / np.array(self.scale)
        shift = slopes @ np.array(self.location)
        named: dict[str, np.ndarray] = {}
        for block, start in enumerate(self._starts(design)):
            if self.layout.has_intercept:
                intercept = draws["intercept"].reshape(size, self.outcome.blocks)[:, block] * unit
                named[f"{start}Intercept"] = self.base + intercept - shift[:, block]
            for place, label in enumerate(design.labels):
                named[f"{start}{label}"] = slopes[:, block, place]
            for term, (first, last) in design.monotone.items():
                steps = slopes[:, block, first:last]
                named[f"{start}{term}"] = steps.sum(axis=1)
                # An interval of a step would never have 0, whether there is an effect or not.
                for place, label in enumerate(design.labels[first:last]):
                    del named[f"{start}{label}"]
                    named[f"{start}share({label})"] = steps[:, place] / steps.sum(axis=1)
        if self.family == "ordinal":
            levels = outcome_levels(design.schema.columns[design.outcome])
            gaps = draws.get("gaps", np.zeros([size, 0]))
            for place in range(len(levels) - 1):
                cut = draws["threshold"] + gaps[:, :place].sum(axis=1) + shift[:, 0]
                named[f"threshold[{levels[place]}|{levels[place + 1]}]"] = cut
        own = {name: draws[name] for name in self.kind.own(self.outcome)}
        named.update(self.kind.in_units(own, unit))
        if self.layout.correlated:
            found = correlations(draws["group_cor"], self.layout.correlated)
            named.update(zip(self.correlations(design), found.T, strict=True))
        first = 0
        for place, group in enumerate(design.groups):
            named[f"sd({group.name})"] = draws["group_sd"][:, place] * unit / group.scale
            for number, label in enumerate(group.labels):
                named[label] = draws["group"][:, first + number] * unit / group.scale
            first += len(group.labels)
        if self.layout.unit:
            named[f"sd(1|{self.layout.unit})"] = draws["unit_sd"] * unit
        return named

    def _starts(self, design: Design) -> list[str]:
        """Returns what names of coefficients start with: of categories each level but the first."""
        if self.family != "categorical":
            return [""]
        levels = outcome_levels(design.schema.columns[design.outcome])
        return [f"{level}: " for level in levels[1:]]

    def correlations(self, design: Design) -> list[str]:
        """Returns names of the correlations of group effects, such as "cor(1, age|county)".

        Args:
          design: The design.
        """
        names = []
        for block in self.layout.correlated:
            effects = [design.groups[place].name for place in block]
            for first, second in pairs(len(block)):
                names.append(f"cor({effects[first].rpartition('|')[0]}, {effects[second]})")
        return names

    def names_of_model(self, design: Design) -> dict[str, str]:
        """Returns, by the names in the user's units, the names of the model's parameters.

        Args:
          design: The design.
        """
        num = self.layout.num_common
        names: dict[str, str] = {}
        for block, start in enumerate(self._starts(design)):
            entry = f"[{block}]" if self.family == "categorical" else ""
            names[f"{start}Intercept"] = f"intercept{entry}"
            for place, label in enumerate(design.parameters):
                names[f"{start}{label}"] = f"coefficients[{block * num + place}]"
        first = 0
        for place, group in enumerate(design.groups):
            names[f"sd({group.name})"] = f"group_sd[{place}]"
            for number, label in enumerate(group.labels):
                names[label] = f"group[{first + number}]"
            first += len(group.labels)
        for place, name in enumerate(self.correlations(design)):
            names[name] = f"group_cor[{place}]"
        if self.layout.unit:
            names[f"sd(1|{self.layout.unit})"] = "unit_sd"
        return {**names, **{name: name for name in self.kind.own(self.outcome)}}
