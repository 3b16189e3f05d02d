"""The private step of a model, made observable.

It shows what the step releases with and without a record, with and without noise.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi import _validate as check
from tfp_dpvi._keystream import SECURE, Keystream
from tfp_dpvi._tf import Structure, function_of_model, tf
from tfp_dpvi.data.records import by_column
from tfp_dpvi.gradients import ClippedSum
from tfp_dpvi.models import DPModel
from tfp_dpvi.models.arguments import is_batches
from tfp_dpvi.optimizers import DPOptimizer, PrivatizedGradients
from tfp_dpvi.privacy import PrivacyLedger, SamplingScheme
from tfp_dpvi.sampling import Sampler
from tfp_dpvi.sampling.base import Body, Carry
from tfp_dpvi.training import Mechanism, initial_state
from tfp_dpvi.training.step import make_steps

Setting: TypeAlias = Any
"""An argument of `make_data`, such as `batch_size`, `sampling` or `unit_ids`."""

# Released numbers that are kept on the device in a call.
_MOST_VALUES = 2**23


def num_rows(x: Structure) -> int:
    """Returns the number of records.

    Raises:
      TypeError: These are batches, whose records cannot be left out.
    """
    if is_batches(x):
        raise TypeError(f"x is a {type(x).__name__}: an audit leaves out records, so pass arrays.")
    return len(tf.nest.flatten(by_column("x", x))[0])


class _Kept(Sampler):
    """A sampler that leaves records out by a mask, so that the others keep their draws."""

    def __init__(self, inner: Sampler, keep: tf.Variable, seen: tf.Variable) -> None:
        self.num_available = inner.num_available
        self.physical_batch_size = inner.physical_batch_size
        self._inner = inner
        self._keep = keep
        self._seen = seen

    @property
    def num_words(self) -> int:
        return self._inner.num_words

    @property
    def scheme(self) -> SamplingScheme:
        return self._inner.scheme

    @property
    def identity(self) -> Hashable:
        return ("kept", self._inner.identity)

    def for_each_batch(self, key: tf.Tensor, body: Body[Carry], initial: Carry) -> Carry:
        def kept(carry: Carry, indices: tf.Tensor, mask: tf.Tensor) -> Carry:
            self._seen.scatter_nd_add(indices[:, None], tf.cast(mask, tf.int32))
            return body(carry, indices, mask & tf.gather(self._keep, indices))

        return self._inner.for_each_batch(key, kept, initial)


class _Recorder:
    """Stands in for the optimizer: keeps what the optimizer releases, and changes no variable."""

    def __init__(self, optimizer: DPOptimizer, seen: tf.Variable, values: tf.Variable) -> None:
        self._optimizer = optimizer
        self._seen = seen
        self._values = values
        self._counts = tf.Variable(tf.zeros([values.shape[0], seen.shape[0]], tf.int32))
        self._at = tf.Variable(0, dtype=tf.int64)

    def build(self, variables: Sequence[tf.Variable]) -> None:
        """Creates no slots: nothing is updated."""

    def privatize(self, clipped: ClippedSum, **settings: Any) -> PrivatizedGradients:
        private = self._optimizer.privatize(clipped, **settings)
        parts = [tf.cast(part, self._values.dtype) for part in (*private.mean, *private.joint)]
        row = tf.concat([tf.reshape(part, [-1]) for part in parts], axis=0)
        # The place of the row, as an index of shape [1, 1].
        at = self._at[None, None]
        self._values.scatter_nd_update(at, row[None])
        self._counts.scatter_nd_update(at, self._seen[None])
        self._seen.assign(tf.zeros_like(self._seen))
        self._at.assign_add(1)
        return private

    def apply_gradients(
        self, pairs: Iterable[tuple[tf.Tensor, tf.Variable]], **options: bool
    ) -> None:
        """Applies nothing."""

    def rewind(self) -> None:
        """Forgets what was kept."""
        self._at.assign(0)

    def read(self, num: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the released values of the last `num` steps and the records that they visited."""
        return self._values[:num].numpy(), self._counts[:num].numpy()


@dataclasses.dataclass(frozen=True)
class Part:
    """A sum that a step releases: the gradient, or a joint release.

    Attributes:
      name: "gradient", or the name of the joint release.
      columns: Its place among the released values.
      sensitivity: The most that a record's presence moves it, in units of `ObservedStep.values`.
      replace: The most that a record's replacement moves it, in the same units.
    """

    name: str
    columns: slice
    sensitivity: float
    replace: float


class ObservedStep:
    """The step of `fit` on records that can be left out.

    It has the model's sampler, clip, sums, noise and joint releases. The variables stay as they
    are, so that every step is a release at the same parameters. Nothing is charged to the ledger:
    an audit is no release, and its result is not private.

    Args:
      model: A compiled model.
      x: Records as for `fit`, in arrays.
      y: Outcomes as for `fit`, in arrays.
      sample_weight: Weights as for `fit`, an array.
      num_steps: The number of steps to calibrate the noise for, if `compile` has an epsilon and no
        fit has run; None for steps without noise alone.
      **settings: Arguments of `make_data`: `batch_size`, `num_records`, `sampling`.

    Raises:
      TypeError: The model is no `DPModel`, or the records are batches.
      ValueError: The model has several replicas, or its clip is off.
    """

    def __init__(
        self,
        model: DPModel,
        x: Structure,
        y: Structure | None = None,
        sample_weight: np.ndarray | None = None,
        *,
        num_steps: int | None = 1,
        **settings: Setting,
    ) -> None:
        if not isinstance(model, DPModel):
            raise TypeError(f"model must be a compiled DPModel, got {type(model).__name__}.")
        if model.distribute_strategy.num_replicas_in_sync > 1:
            raise ValueError("model: an audit runs on one device; build it outside the strategy.")
        num_rows(x)
        data = model.make_data(x, y, sample_weight, validate=False, stream=False, **settings)
        self.mechanism = model.mechanism(data)
        if num_steps is not None:
            self.mechanism = _with_noise(model, self.mechanism, num_steps)
        if self.mechanism.gradient.clip.is_off:
            raise ValueError("model: its clip is off, so there is no claim to audit.")
        self.model = model
        self.num_rows = data.sampler.num_available
        self.tensors = data.tensors
        self.grouping = data.records.units
        self._compile(model)

    def _compile(self, model: DPModel) -> None:
        mechanism = self.mechanism
        shapes: list[list[int]] = []
        dtypes: list[tf.DType] = []

        def note(key: tf.Tensor) -> tf.Tensor:
            for part in mechanism.gradient.draw(key).released:
                shapes.append(part.shape.as_list())
                dtypes.append(part.dtype)
            return key

        function_of_model(note).get_concrete_function(tf.TensorSpec([2], tf.int64))
        joint = [list(release.shape) for release in mechanism.joint]
        sizes = [int(np.prod(shape)) for shape in (*shapes, *joint)]
        self.dtype = dtypes[0].as_numpy_dtype
        self._scales = np.repeat(_noise_scales(mechanism, len(shapes)), sizes)
        self._parts = _parts(mechanism, sizes, len(shapes))
        self._most = max(1, min(4096, _MOST_VALUES // max(sum(sizes), self.num_rows)))
        self._keep = tf.Variable(tf.ones([self.num_rows], tf.bool), trainable=False)
        seen = tf.Variable(tf.zeros([self.num_rows], tf.int32), trainable=False)
        values = tf.Variable(tf.zeros([self._most, sum(sizes)], dtypes[0]), trainable=False)
        self._recorder = _Recorder(model.optimizer, seen, values)
        kept = dataclasses.replace(mechanism, sampler=_Kept(mechanism.sampler, self._keep, seen))
        # Not compiled here but below: batches then keep their padding, so that a record that is
        # left out moves no other.
        steps = make_steps(kept, self._recorder, model.trainable_variables, run_eagerly=True)
        compile_config = model.get_compile_config() or {}
        self._steps = function_of_model(
            lambda *arguments: steps(*arguments).step,
            jit_compile=bool(compile_config.get("jit_compile")),
        )
        self._initial_state = lambda first, num: initial_state(kept, first, num)
        self._num_words = _random.num_words(mechanism.sampler.num_words, sum(sizes))

    def keeping(self, rows: np.ndarray) -> np.ndarray:
        """Returns which records have kept rows alone, a bool array of shape [num_rows].

        A record may be a person with several rows, or by a fault a part of a person.

        Args:
          rows: Bool, True for each row that is kept.
        """
        if self.grouping is None:
            return rows
        return (rows[self.grouping.places] | ~self.grouping.mask).all(axis=1)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The released sums, in the order of the columns of `values`."""
        return self._parts

    @property
    def noise(self) -> float:
        """The standard deviation that the noise is stated to have in every column of `values`."""
        return float(self.mechanism.noise)

    @property
    def units(self) -> np.ndarray:
        """The unit of each column of `values`, of shape [D].

        It is the noise's standard deviation over the noise multiplier.
        """
        return self._scales

    def values(
        self,
        key: np.ndarray,
        num_steps: int,
        *,
        noise: float | None = None,
        keep: np.ndarray | None = None,
        tensors: dict[str, Structure] | None = None,
        first: int = 0,
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the released sums of blocks of steps.

        The units are those in which the stated noise has the same deviation everywhere.

        Args:
          key: An int64 array of shape [2]. It and a step's number determine all its draws, by way
            of words of AES if the model was compiled with `randomness="secure"`.
          num_steps: The number of steps.
          noise: The noise multiplier, by default the mechanism's; 0 for the exact sums, which are
            *not private*.
          keep: A bool array of shape [num_rows], False for records to leave out; by default all are
            there.
          tensors: Records of the same shapes in place of those of the constructor.
          first: The number of the first step.

        Yields:
          Pairs of released values, float64 of shape [k, D], and of how often each record was
          visited, int of shape [k, num_rows].
        """
        keep = np.ones(self.num_rows, bool) if keep is None else keep
        level = tf.constant(self.noise if noise is None else noise, tf.float64)
        records = self.tensors if tensors is None else tensors
        unit = self.mechanism.expected_batch_size / self._scales
        key_of = self._keys(key, min(num_steps, self._most))
        for begin in range(0, num_steps, self._most):
            num = min(self._most, num_steps - begin)
            # Assigned for each block, since two of these iterators may run side by side.
            self._keep.assign(keep)
            self._recorder.rewind()
            state = self._initial_state(first + begin, num)
            words = key_of(first + begin)
            self._steps(state, tf.constant(num, tf.int64), records, words, level)
            released, visits = self._recorder.read(num)
            yield released.astype(np.float64) * unit, visits

    def _keys(self, key: np.ndarray, most: int) -> Callable[[int], tf.Tensor]:
        """Returns a function from a step's number to the key of at most `most` steps from there."""
        if self.mechanism.randomness != SECURE:
            fixed = tf.constant(key)
            return lambda first: fixed
        # Derived, not drawn: an audit runs the same steps again.
        stream = Keystream(hashlib.sha256(key.tobytes()).digest(), self._num_words)
        return lambda first: tf.constant(stream.rows(first, most))

    def all_values(self, key: np.ndarray, num_steps: int, **options: Any) -> np.ndarray:
        """Returns the released sums of all steps at once.

        Args:
          key: See `values`.
          num_steps: See `values`.
          **options: Further arguments of `values`.

        Returns:
          A float64 array of shape [num_steps, D].
        """
        return np.concatenate([released for released, _ in self.values(key, num_steps, **options)])


def _with_noise(model: DPModel, mechanism: Mechanism, num_steps: int) -> Mechanism:
    """Returns the mechanism with the noise of the optimizer, of the last fit, or of these steps."""
    check.count("num_steps", num_steps, 1)
    target = model.get_compile_config() or {}
    if target["epsilon"] is None:
        return mechanism
    if model.privacy_plan is not None:
        return mechanism.with_noise_of(model.privacy_plan)
    return mechanism.calibrated(
        PrivacyLedger(), epsilon=target["epsilon"], delta=target["delta"], num_releases=num_steps
    )


def _noise_scales(mechanism: Mechanism, num_gradient: int) -> np.ndarray:
    """Returns the noise's standard deviation over the noise multiplier, for each released tensor.

    Those of the gradient come first, then the joint releases.
    """
    gradient = mechanism.gradient
    scales = gradient.noise_scales or [1.0] * num_gradient
    own = [gradient.clip.bound * scale for scale in scales]
    joint = [release.noise_ratio * release.sensitivity.add_or_remove for release in mechanism.joint]
    return np.array([*own, *joint], np.float64)


def _parts(mechanism: Mechanism, sizes: list[int], num_gradient: int) -> tuple[Part, ...]:
    """Returns the released sums, from the sizes of all released tensors."""
    end = sum(sizes[:num_gradient])
    stated = mechanism.gradient.sensitivity
    parts = [Part("gradient", slice(0, end), stated.add_or_remove, stated.replace)]
    for release, size in zip(mechanism.joint, sizes[num_gradient:], strict=True):
        own = release.sensitivity
        unit = release.noise_ratio * own.add_or_remove
        columns = slice(end, end + size)
        parts.append(Part(release.name, columns, own.add_or_remove / unit, own.replace / unit))
        end += size
    return tuple(parts)
