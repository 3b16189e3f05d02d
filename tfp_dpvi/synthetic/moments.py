"""Means and covariances of levels' values from noisy shares, and their errors.

Of a column of numbers z with level means v, variances within levels are added to that of v
(Sheppard), and covariances are divided by r = Var(v) / Var(z): within a level, the relation to
another column is taken as linear with the same slope as between levels. That assumption has half of
the correction as its standard error, for each column and partner, so that no correction and twice
as much are the ends of a 95 % interval. Variances within levels have half of themselves. Means
within a level are moved by a line through the densities of its neighbours, in an outermost level by
half of its standard deviation, and in an end by the posterior of its distribution.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping

import numpy as np

from tfp_dpvi.synthetic.levels import LevelValues

# Standard errors of the correction for levels, and of variances within levels, relative to these.
_OF_CORRECTION = 0.5
_OF_WITHIN = 0.5

# The standard error of a correlation within an outermost level, beside what is assumed.
_OF_APART = 0.25

Function = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Estimates of means [d] and covariances [d, d]."""


@dataclasses.dataclass(frozen=True)
class Moments:
    """Means and covariances of levels' values, and what errors of estimates follow from theirs.

    ```python
    >>> import numpy as np
    >>> from tfp_dpvi.synthetic import Binary
    >>> levels = [LevelValues.of(name, Binary(), np.ones(2), 0.0) for name in ("smokes", "ill")]
    >>> half, table = np.full(2, 0.5), np.diag([0.5, 0.5])
    >>> moments = Moments.of(levels, [half, half], [0 * half] * 2, {(0, 1): (table, 0 * table)})
    >>> moments.means.tolist(), moments.covariances.tolist()
    ([0.5, 0.5], [[0.25, 0.25], [0.25, 0.25]])

    ```

    Attributes:
      levels: The values of each column's levels, of d values in all.
      shares: Noisy shares of each column's levels.
      deviations: Standard deviations of their noise.
      tables: By two places of columns, noisy shares of pairs of levels and deviations of the noise.
      owners: The column of each value, int [d].
      means: Means, float64 [d].
      covariances: Covariances, float64 [d, d].
      within: Variances within levels, float64 [d].
      ratios: The part of each variance that is between levels, float64 [d].
    """

    levels: tuple[LevelValues, ...]
    shares: tuple[np.ndarray, ...]
    deviations: tuple[np.ndarray, ...]
    tables: Mapping[tuple[int, int], tuple[np.ndarray, np.ndarray]]
    owners: np.ndarray
    means: np.ndarray
    covariances: np.ndarray
    within: np.ndarray
    ratios: np.ndarray

    @classmethod
    def of(
        cls,
        levels: list[LevelValues],
        shares: list[np.ndarray],
        deviations: list[np.ndarray],
        tables: Mapping[tuple[int, int], tuple[np.ndarray, np.ndarray]],
    ) -> Moments:
        """Returns the moments of noisy shares.

        Args:
          levels: The values of each column's levels.
          shares: Noisy shares of each column's levels.
          deviations: Standard deviations of their noise.
          tables: By two places of columns, noisy shares of pairs of levels and deviations of their
            noise, float64 [levels of the first, levels of the second] each.
        """
        sizes = [part.values.shape[1] for part in levels]
        owners = np.repeat(np.arange(len(levels)), sizes)
        columns = list(zip(levels, shares, strict=True))
        means = np.concatenate([mass @ part.values for part, mass in columns])
        within = np.repeat([mass @ part.within for part, mass in columns], sizes)
        covariances = np.zeros([len(owners)] * 2)
        for place, (part, mass) in enumerate(columns):
            here = owners == place
            centred = part.values - means[here]
            covariances[np.ix_(here, here)] = centred.T @ (mass[:, None] * centred)
        between = np.diag(covariances).copy()
        covariances += np.diag(within)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = between / (between + within)
        found = cls(
            tuple(levels),
            tuple(shares),
            tuple(deviations),
            tables,
            owners,
            means,
            covariances,
            within,
            ratios,
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            for (i, j), (joint, _) in tables.items():
                block = found.scaled(i).T @ joint @ found.scaled(j)
                covariances[np.ix_(owners == i, owners == j)] = block
                covariances[np.ix_(owners == j, owners == i)] = block.T
        return found

    def centred(self, place: int) -> np.ndarray:
        """Returns a column's values less their means.

        Args:
          place: The place of the column.
        """
        return self.levels[place].values - self.means[self.owners == place]

    def scaled(self, place: int) -> np.ndarray:
        """Returns a column's centred values, whose covariances with other columns are corrected.

        Args:
          place: The place of the column.
        """
        return self.centred(place) / self.ratios[self.owners == place]

    def noise(self, gradients: np.ndarray, of_means: np.ndarray) -> np.ndarray:
        """Returns variances of estimates by the noise of the shares (delta method).

        Args:
          gradients: The estimates' gradients in the covariances, symmetric, [estimates, d, d].
          of_means: Those in the means, float64 [estimates, d].

        Returns:
          float64 array of shape [estimates].
        """
        variances = np.zeros(len(gradients))
        variance = np.diag(self.covariances)
        # By a variance within levels, a column's covariances with all others change in proportion.
        diagonal = np.diagonal(gradients, axis1=1, axis2=2)
        others = 2.0 * (np.einsum("tab,ab->ta", gradients, self.covariances) - diagonal * variance)
        for place, shares in enumerate(self.shares):
            here = self.owners == place
            centred = self.centred(place)
            own = gradients[:, here][:, :, here]
            effect = (
                np.einsum("ka,tab,kb->tk", centred, own, centred) + of_means[:, here] @ centred.T
            )
            if self.within[here].any():
                squares = centred[:, 0] ** 2
                whole = squares + self.levels[place].within
                effect += own[:, 0] * self.levels[place].within
                between = float(variance[here][0] * self.ratios[here][0])
                relative = whole / variance[here][0] - squares / between
                effect += others[:, here] * relative
            effect -= (effect @ shares)[:, None]  # Shares are of these counts' total.
            variances += np.sum((self.deviations[place] * effect) ** 2, axis=1)
        for (i, j), (_, deviations) in self.tables.items():
            block = gradients[:, self.owners == i][:, :, self.owners == j]
            effect = 2.0 * np.einsum("ka,tab,lb->tkl", self.scaled(i), block, self.scaled(j))
            variances += np.sum((deviations * effect) ** 2, axis=(1, 2))
        return variances

    def partners(self, gradients: np.ndarray) -> np.ndarray:
        """Returns variances of estimates by slopes within levels that differ from those between.

        Args:
          gradients: The estimates' gradients in the covariances, symmetric, [estimates, d, d].

        Returns:
          float64 array of shape [estimates].
        """
        sizes = (_OF_CORRECTION * (1.0 - self.ratios)) ** 2
        parts = (2.0 * gradients * self.covariances) ** 2 * (sizes[:, None] + sizes)
        parts[:, self.owners[:, None] == self.owners] = 0.0
        variances: np.ndarray = parts.sum(axis=(1, 2)) / 2.0
        for i, j in itertools.permutations(range(len(self.levels)), 2):
            block = gradients[:, self.owners == i][:, :, self.owners == j]
            variances += np.sum((2.0 * block * self._apart(i, j)) ** 2, axis=(1, 2))
        return variances

    def _apart(self, i: int, j: int) -> np.ndarray:
        """Returns what a correlation within the outermost levels of a column adds to covariances.

        A few levels of one mean may hold all that is far out, and of others' values most: those
        of a group that is small and has the largest numbers.

        Args:
          i: The place of a column.
          j: That of its partner.

        Returns:
          One standard error, float64 [values of the column, values of the partner].
        """
        part, partner = self.levels[i], self.levels[j]
        wide = np.flatnonzero(part.within).tolist()
        total = np.zeros([part.values.shape[1], partner.values.shape[1]])
        for level in {*wide[:1], *wide[-1:]}:
            joint = self.tables[i, j][0] if i < j else self.tables[j, i][0].T
            shares = np.maximum(joint[level], 0.0)
            mass = max(float(shares.sum()), 1e-300)
            means = shares @ partner.values / mass
            variances = (shares @ (partner.values - means) ** 2 + shares @ partner.within) / mass
            sizes = max(float(self.shares[i][level]), 0.0) * np.sqrt(part.within[level] * variances)
            total += (_OF_APART * sizes) ** 2
        return np.sqrt(total)

    def model(self, function: Function, gradients: np.ndarray) -> np.ndarray:
        """Returns variances of estimates by what is assumed within levels.

        Args:
          function: The estimates, as a function of means and covariances.
          gradients: Their gradients in the covariances, symmetric, [estimates, d, d].

        Returns:
          float64 array of shape [estimates].
        """
        variances = self.partners(gradients)
        start = function(self.means, self.covariances)
        for place, part in enumerate(self.levels):
            others = [
                dataclasses.replace(part, values=part.values + shift[:, None])
                for shift in part.shifts
                if shift.any()
            ]
            if part.within.any():
                others.append(dataclasses.replace(part, within=(1.0 + _OF_WITHIN) * part.within))
            for other in others:
                levels = [*self.levels[:place], other, *self.levels[place + 1 :]]
                moved = Moments.of(levels, list(self.shares), list(self.deviations), self.tables)
                variances += (function(moved.means, moved.covariances) - start) ** 2
        return variances

    def heteroscedasticity(self, value: int) -> float:
        """Returns how far residuals of the last value vary with another: at least 1.

        It is the factor of the variance of the slope on that value alone.

        Args:
          value: The place of the value.
        """
        i, last = int(self.owners[value]), len(self.levels) - 1
        joint = self.tables[i, last][0]
        x = self.scaled(i)[:, int(np.sum(self.owners[:value] == i))]
        y = self.scaled(last)[:, 0]
        variances = joint.sum(axis=1) @ x**2
        residuals = y - np.outer(x, self.covariances[value, -1] / self.covariances[value, value])
        spread = float(np.sum(joint * residuals**2))
        if spread <= 0.0 or variances <= 0.0:
            return 1.0
        return max(
            1.0, float(np.sum(joint * x[:, None] ** 2 * residuals**2)) / (variances * spread)
        )
