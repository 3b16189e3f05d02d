"""Trying a model's layers on made-up records, before anything is spent: whether each record's loss is its own."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

from tfp_dpvi._tf import tf
from tfp_dpvi.gradients import LayerGradients, UnsupportedLayerError

_LOG = logging.getLogger("tfp_dpvi")


class LayerTrial:
    """What is known of a model's layers from trying them.

    Attributes:
      changes: how often what is known has changed, -1 before the first trial; a step is traced anew when it does.
    """

    def __init__(self) -> None:
        self.changes = -1
        self._known: LayerGradients | None = None
        self._tried: _Layers | None = None  # As they were when they were tried.
        self._put_off: Callable[[], None] | None = None

    def known(self) -> LayerGradients:
        """How the layers' gradients are had, by the last trial."""
        assert self._known is not None
        return self._known

    def gradients(self) -> LayerGradients:
        """The same, for tracing a step: a trial that was put off is made first."""
        if self._put_off is not None:
            with tf.init_scope():
                self._put_off()
            self._put_off = None
        return self.known()

    def check(
        self,
        layers: Sequence[Any],
        variables: Sequence[Any],
        losses: Callable[[Any], Any],
        x: Any,
        *,
        settings: tuple[Any, ...],
        mapped: bool,
        may_wait: bool,
    ) -> None:
        """Tries the layers.

        That takes as long as tracing a step: where a fit seems to be one more of the same, it waits until Python next runs
        through the layers, which is where a step is traced.

        Args:
          layers: those of the model.
          variables: what is learned.
          losses: of records such as `x`, one for each.
          x: made-up records.
          settings: whatever else the losses depend on, compared by value.
          mapped: see `LayerGradients`.
          may_wait: False where the next step may be traced in the middle of a fit.

        Raises:
          ValueError: records influence each other, or a layer is not supported.
        """

        def trial() -> None:
            self._try(LayerGradients(layers, variables, mapped=mapped), losses, x)

        def now() -> _Layers:
            specs = tuple((tuple(part.shape), part.dtype.name) for part in tf.nest.flatten(x))
            return _Layers((*settings, specs), (*layers, *variables), [dict(vars(layer)) for layer in layers])

        self._put_off = None
        if may_wait and self._tried is not None and self._tried.same_as(now()):
            self._put_off = trial
            return
        self._tried = None
        trial()
        self._tried = now()

    def _try(self, gradients: LayerGradients, losses: Callable[[Any], Any], x: Any) -> None:
        try:
            gradients = gradients.checked(losses, x)
        except UnsupportedLayerError as error:
            raise ValueError(f"This model cannot be made private as it is. {error}") from error
        known = self._known
        self._known = gradients
        if known is not None and known.rows_each == gradients.rows_each and known.notes == gradients.notes:
            return  # What was traced with the old ones is right still.
        for note in gradients.notes:
            _LOG.info("%s", note)
        self.changes += 1


@dataclasses.dataclass(frozen=True)
class _Layers:
    """All that trying the layers looks at: objects themselves, so that nothing new can have an old one's identity.

    Attributes:
      settings: compared by value.
      objects: layers and variables, compared by identity.
      attributes: those of each layer, compared by identity.
    """

    settings: tuple[Any, ...]
    objects: tuple[Any, ...]
    attributes: list[dict[str, Any]]

    def same_as(self, other: _Layers) -> bool:
        if self.settings != other.settings or len(self.objects) != len(other.objects):
            return False
        if any(a is not b for a, b in zip(self.objects, other.objects, strict=True)):
            return False
        pairs = zip(self.attributes, other.attributes, strict=True)
        return all(a.keys() == b.keys() and all(_same_object(a[name], b[name]) for name in a) for a, b in pairs)


def _same_object(one: Any, other: Any) -> bool:
    """One object, or tuples of the same ones: TFP's layers make theirs anew in each call."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
    return one is other
