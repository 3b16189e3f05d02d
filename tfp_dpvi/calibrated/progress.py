"""The length of scoring steps, from what the last ones released."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

# Steps are judged by scores of so many times their noise.
_CLEAR = 3.0
# A longer score is gone back from, one that turned is followed by shorter steps, and one that did
# not by longer ones.
_WORSE = 1.5
_STRAIGHT = 0.5
_LEAST_SHARE = 0.02
# Steps that go on straight are far from their end, and no shorter than the first ones.
_MOST_SHARE = 4.0
_RECOVERY = 1.25
# In the search each step is of twice as many Newton steps as the last one, up to so many.
_MOST_NEWTON = 8.0
# A score that begins a search in one of many coordinates, over its noise, and one that goes on.
_SURE = 4.0
_GOES_ON = 1.5
# From a noise of so many lengths of a score on, in each of d coordinates over sqrt(d), the score of
# a scale that is far too large is not clear in these calls.
_MOST_NOISE = 0.16
# The score of a scale that is far too large is bounded: by .71 of its standard deviations, for the
# logarithm of a normal's. That of one which is too small, or beside a location that is off, is not,
# and a search would not come back.
_BOUNDED = 1.0
# Of the planned step, twice the last one: the longest step forward and back.
_MORE = 1.5
_BACK = 0.25
# Calls after which scores that stay hidden by the noise are no longer waited for.
_PATIENCE = 3


class Progress(NamedTuple):
    """The releases of some steps, as far as the next ones depend on them.

    Attributes:
      pull: The mean score of a record with the prior's part, in whitened coordinates, shape [d].
      place: The mean of the parameters, shape [d].
      noise: The standard deviation of the noise on each coordinate of `pull`.
    """

    pull: np.ndarray
    place: np.ndarray
    noise: float


class Search:
    """The first steps, from a vague prior's mean: scales move, and nothing else.

    A scale may be a thousand times too large there, or a precision too small. Its score is clear
    and bounded, and is followed in ever longer steps. A step in the other coordinates would be
    noise in units of that scale, from which there is no way back. The search ends where no scale's
    score goes straight on.

    Args:
      is_scale: Whether a coordinate is that of a number with a constraint, such as a scale, shape
        [d].
      noise: The standard deviation of the noise on a coordinate of a score between two calls. Where
        it would hide that of a scale which is far too large, there is no search.

    Attributes:
      is_on: Whether some scale still goes straight on.
      steps: Newton steps to make in each coordinate, shape [d].
      pull: The last score, which these steps are meant for, shape [d].
    """

    def __init__(self, is_scale: np.ndarray, noise: float) -> None:
        self._is_scale = is_scale
        self.is_on = bool(is_scale.any() and noise * math.sqrt(len(is_scale)) < _MOST_NOISE)
        self.steps = np.zeros(len(is_scale))
        self.pull = np.zeros(len(is_scale))
        self._next = np.ones(len(is_scale))
        self._direction = np.zeros(len(is_scale))
        self._looks = np.zeros(len(is_scale))

    def judge(self, progress: Progress) -> None:
        """Sets `steps` and `is_on`.

        A score that the noise hides is looked at again before it ends the search: of eight clear
        ones in a row, one is hidden by chance in one search of twenty.

        Args:
          progress: Of the last steps.
        """
        self._looks += 1.0
        self.pull = self.pull + (progress.pull - self.pull) / self._looks
        noise = progress.noise / np.sqrt(self._looks)
        has_begun = self._direction != 0.0
        # A score that was clear need not be as clear again.
        along = np.where(has_begun, self._direction * self.pull / _GOES_ON, abs(self.pull) / _SURE)
        is_far = abs(self.pull) - noise < _BOUNDED / math.sqrt(len(self.pull))
        can_go = self._is_scale & is_far & (self._looks <= _PATIENCE)
        goes_on = can_go & (along > noise)
        waits = can_go & (self._looks < _PATIENCE) & (along > -noise)
        self.is_on = bool(np.any(goes_on | waits))
        self.steps = np.where(goes_on, self._next, 0.0)
        self._direction = np.where(goes_on, np.sign(self.pull), self._direction)
        self._next = np.minimum(self._next * np.where(goes_on, 2.0, 1.0), _MOST_NEWTON)
        self._looks = np.where(goes_on, 0.0, self._looks)

    def bounds(self, newton: np.ndarray) -> np.ndarray:
        """Returns the least and the largest change of each coordinate in the next step, [2, d].

        Its score may have turned: a step back is no longer than half of the last one.

        Args:
          newton: The Newton step for `pull`, shape [d].
        """
        planned = self.steps * newton
        return np.sort([_MORE * planned, -_BACK * planned], axis=0)


class Caution:
    """A trust region from released values: the last steps' scores say whether they were too long.

    Args:
      share: By how much the first steps are shorter than planned.

    Attributes:
      share: By how much a step is shorter than planned, or longer.
    """

    def __init__(self, share: float = 1.0) -> None:
        self.share = max(share, _LEAST_SHARE)
        self._last: Progress | None = None

    def judge(self, progress: Progress) -> np.ndarray | None:
        """Changes `share`, and returns the parameters to go back to, or None.

        Args:
          progress: Of the last steps.
        """
        last, self._last = self._last, progress
        here = float(np.linalg.norm(progress.pull))
        before = 0.0 if last is None else float(np.linalg.norm(last.pull))
        hidden = _CLEAR * progress.noise * math.sqrt(len(progress.pull))
        if last is None or min(here, before) < hidden:
            self.share = min(max(1.0, self.share / _RECOVERY), _RECOVERY * self.share)
            return None
        turn = float(progress.pull @ last.pull) / (before * here)
        # A score that grows on its way is that of a scale that shrinks.
        if here > _WORSE * before and turn < 0.0:
            self.share = max(self.share / 4.0, _LEAST_SHARE)
            # The score there is looked at anew: it was a mean over steps to and fro, or noise.
            self._last = None
            return last.place
        if turn < 0.0:
            self.share = max(self.share / 2.0, _LEAST_SHARE)
        elif turn > _STRAIGHT:
            self.share = min(_MOST_SHARE, 1.5 * self.share)
        return None
