"""The train function of a private `fit`.

It reserves steps in the ledger, runs them, and returns public logs.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from tfp_dpvi import _keystream, _random
from tfp_dpvi._keystream import SECURE, Keystream, Tapes
from tfp_dpvi._tf import Optimizer, Structure, tf
from tfp_dpvi.data import Data
from tfp_dpvi.metrics import EpsilonSpent, PrivateMetric
from tfp_dpvi.privacy import BudgetExhaustedError, EpsilonCurve, PrivacyLedger, PrivacyPlan
from tfp_dpvi.training.account import Account
from tfp_dpvi.training.budget import PrivacyTarget
from tfp_dpvi.training.compiled import KEY, CompiledSteps
from tfp_dpvi.training.distribution import Workers
from tfp_dpvi.training.mechanism import Mechanism
from tfp_dpvi.training.step import StepState, initial_state

_LOG = logging.getLogger("tfp_dpvi")
# Maximal fraction of time for reservations: more steps are reserved at once where steps are short.
_SHARE_OF_LEDGER = 0.02
# Steps before the first thorough check of divergence; each later one comes after twice as many.
_FIRST_CHECK = 100
# Maximal weight of the initial values in an average of iterates.
_MOST_OF_START = 0.05


@dataclasses.dataclass(frozen=True, eq=False)
class Learner:
    """The model that learns, as values and functions: a fit knows no model.

    Attributes:
      variables: Returns the trainable variables.
      optimizer: The private optimizer.
      strategy: The distribution strategy that the model was built in.
      steps_per_call: Returns the number of steps of one call, which a callback may change.
      fault: Returns a reason to stop, from released values, or None; its argument asks for slower
        checks too.
      logs: Returns logs from accumulators over released values, by name, and their mechanism.
      boundaries: Returns the numbers of steps after which `advance` is called, for a planned number
        of steps.
      advance: `advance(step, num_steps, accumulated, mechanism)` changes variables of the step from
        released values.
      stop: Ends training after this call.
      settings: Names of the model's settings that the traced step has read.
      layer_settings: Returns the layers' settings, by names, which the step has read too.
    """

    variables: Callable[[], Sequence[tf.Variable]]
    optimizer: Optimizer
    strategy: tf.distribute.Strategy
    steps_per_call: Callable[[], int]
    fault: Callable[[bool], str | None]
    logs: Callable[[dict[str, Structure], Mechanism], dict[str, float]]
    boundaries: Callable[[int], Sequence[int]]
    advance: Callable[[int, int, dict[str, Structure], Mechanism], None]
    stop: Callable[[], None]
    settings: frozenset[str]
    layer_settings: Callable[[], dict[tuple[str, str], object]]


class Reservations:
    """Steps of a fit that are charged before their release (contract 6), in growing blocks.

    Args:
      ledger: The ledger that is charged.
      plan: The plan of the fit.
      run: The identifier of the fit, in the ledger.
      seeded: Whether the fit has a seed, in the ledger.
      budgets: Pairs (epsilon, delta) that the ledger's total must meet.
      strict: Whether a block is refused as a whole where the budget allows a part of it.
    """

    def __init__(
        self,
        ledger: PrivacyLedger,
        plan: PrivacyPlan,
        *,
        run: str,
        seeded: bool,
        budgets: Sequence[tuple[float, float]],
        strict: bool,
    ) -> None:
        self._ledger = ledger
        self._strict = strict
        self._reserve = functools.partial(
            ledger.reserve, plan, run=run, seeded=seeded, budgets=budgets
        )
        # The ledger's number of the present block.
        self._open: int | None = None
        self._reserved = 0
        self._used = 0
        # How many steps the next block should have.
        self._at_once = 1
        # When the present block started, and how long it took to reserve it.
        self._started = 0.0
        self._took = 0.0
        # The ledger's releases, as far as they are known here.
        self._known = ledger.num_releases

    @property
    def ahead(self) -> int:
        """The number of reserved steps that have not run."""
        return self._reserved - self._used

    @property
    def ledger_moved(self) -> bool:
        """True if another model has used the ledger since the last reservation."""
        return self._ledger.num_releases != self._known

    def take(self, steps: int, most: int) -> int:
        """Reserves steps, unless the present block has enough.

        Args:
          steps: The number of steps to run next.
          most: The number of steps that the fit may still run.

        Returns:
          How many of them may run now, at least one.

        Raises:
          BudgetExhaustedError: The budget does not allow another step.
        """
        if self.ahead < steps:
            self.close()
            started = time.perf_counter()
            wanted = min(max(steps, self._at_once), most)
            while self._open is None:
                try:
                    self._open = self._reserve(wanted)
                except BudgetExhaustedError:
                    # Another model was faster: fewer steps may still be possible.
                    if wanted == 1 or self._strict:
                        raise
                    wanted //= 2
            self._reserved = wanted
            self._used = 0
            self._known = self._ledger.num_releases
            self._started = time.perf_counter()
            self._took = self._started - started
        steps = min(steps, self.ahead)
        self._used += steps
        return steps

    def close(self) -> None:
        """Refunds reserved steps that did not run."""
        if self._open is None:
            return
        elapsed = time.perf_counter() - self._started
        if self._used and elapsed * _SHARE_OF_LEDGER < self._took:
            self._at_once = 4 * self._reserved
        reservation, self._open = self._open, None
        self._ledger.confirm(reservation, self._used)
        self._known -= self.ahead
        self._reserved = 0
        self._used = 0


class PrivateFit:
    """The train function of a `fit`, which Keras calls for every `steps_per_execution` steps.

    Args:
      learner: The model, as values and functions.
      account: The model's ledger and progress.
      target: The privacy settings of `compile`.
      compiled: The model's compiled steps.
      mechanism: The mechanism of the fit, with its noise multiplier.
      data: The records and their sampler.
      seed: The seed of the fit's key, or None for a fresh key.
      run: The identifier of the fit, in the ledger.
      epsilon: The metric that shows epsilon.
      allowed: The number of steps that the budget allows.
      planned: The number of steps that the fit plans.
      per_call: The number of steps of a call, at the beginning.

    #### Formal guarantee

    A step runs only after the ledger is charged for it, and at most `allowed` steps run. Logs are
    epsilon or the number of steps, privatised metrics, and an exact loss only if the mechanism has
    `unsafe_loss`.
    """

    def __init__(
        self,
        learner: Learner,
        account: Account,
        target: PrivacyTarget,
        compiled: CompiledSteps,
        mechanism: Mechanism,
        data: Data,
        *,
        seed: int | None,
        run: str,
        epsilon: EpsilonSpent,
        allowed: int,
        planned: int,
        per_call: int,
    ) -> None:
        self.learner = learner
        self.mechanism = mechanism
        self._data = data
        self._compiled = compiled
        self._target = target
        self._ledger = account.ledger
        self._progress = account.progress
        self._epsilon = epsilon
        self._allowed = allowed
        self._planned = planned
        self._done = 0
        self._next_check = _FIRST_CHECK
        self._workers = Workers(learner.strategy)
        self._tapes: Tapes | None = None
        # Every fit has a fresh key. One with a seed continues to count steps instead, so that no
        # noise is drawn twice.
        if mechanism.randomness != SECURE:
            self._key = self._workers.key(_random.new_key(seed))
        else:
            with learner.strategy.scope():
                words = mechanism.num_words()
            secret = self._workers.secret(_keystream.new_key())
            self._tapes = Tapes(Keystream(secret, words), min(per_call, planned))
        self.plan = mechanism.plan(planned)
        self._priced_identity = mechanism.identity
        self._reservations = Reservations(
            account.ledger,
            self.plan,
            run=run,
            seeded=seed is not None,
            budgets=target.budgets,
            strict=self._workers.several,
        )
        self.state: StepState = initial_state(mechanism, account.progress.steps, planned)
        self._curve: EpsilonCurve | None = None
        self._curve_from = 0
        self._layer_settings: dict[tuple[str, str], object] = {}

    def prepare(self) -> None:
        """Compiles the step and computes the epsilons to show: errors occur before a charge."""
        self._warn_of_slow_average(self.learner.optimizer)
        self._compiled.steps_for(self.mechanism, self._data.tensors, self._kind_of_key)
        self._make_curve(self.mechanism.plan(self._allowed))
        self._layer_settings = self.learner.layer_settings()

    def _warn_of_slow_average(self, optimizer: Optimizer) -> None:
        """Warns if an average of iterates would still hold much of the initial values."""
        if not getattr(optimizer, "use_ema", False):
            return
        weight = getattr(optimizer, "ema_momentum", 0.0) ** self._planned
        if weight > _MOST_OF_START:
            _LOG.warning(
                "use_ema: after %d steps the initial values still have the weight %.2g in the "
                "average of iterates. Lower ema_momentum, or train longer.",
                self._planned,
                weight,
            )

    def _make_curve(self, plan: PrivacyPlan) -> None:
        """Computes the epsilons to show, none below the exact one, from here to the plan's end."""
        self._curve_from = self._done
        if self._target.delta is not None:
            every = self._data.steps_per_epoch
            checkpoints = range(every, plan.num_releases + 1, every)
            self._curve = EpsilonCurve(plan, self._ledger.events(), self._target.delta, checkpoints)

    @property
    def _kind_of_key(self) -> tf.TensorSpec:
        return KEY if self._tapes is None else self._tapes.spec

    @property
    def num_steps(self) -> int:
        """The number of steps that ran."""
        return self._done

    @property
    def steps_ahead(self) -> int:
        """The number of reserved steps that have not run."""
        return self._reservations.ahead

    @property
    def accumulated(self) -> dict[str, Structure]:
        """The accumulators over released values so far, by the name of the joint release."""
        pairs = zip(self.mechanism.joint, self.state.accumulated, strict=True)
        return {release.name: total for release, total in pairs}

    def close(self) -> None:
        """Refunds reserved steps that did not run, and ends the thread that makes tapes."""
        self._reservations.close()
        if self._tapes is not None:
            self._tapes.close()

    def __call__(self, iterator: object) -> dict[str, float]:
        """Reserves the steps of one execution, runs them, and returns the logs."""
        # Keras counts steps by its iterator; here the ledger does.
        del iterator
        steps = self._reserve()
        before = self.state
        self._run(steps)
        return self._logs(before, steps)

    def _reserve(self) -> int:
        """Reserves steps in the ledger; returns the number to run now."""
        if self.mechanism.identity != self._priced_identity:
            raise RuntimeError(
                "A metric changed since this fit was planned: do not change metrics while it runs."
            )
        if self._compiled.differ(self.learner.variables()):
            raise RuntimeError(
                "trainable: a layer was frozen or added while fit runs, whose compiled step would "
                "ignore it.\nChange layers between two fits, and call compile before the next."
            )
        self._refuse_changed_layers()
        wanted = self.learner.steps_per_call()
        if self.steps_ahead < wanted and self._reservations.ledger_moved:
            self._plan_again()
        left = self._allowed - self._done
        if not left:
            # A callback has reset `stop_training`.
            raise BudgetExhaustedError(
                f"fit: all {self._done} steps that the budget allows have run."
            )
        return self._reservations.take(min(wanted, left), left)

    def _refuse_changed_layers(self) -> None:
        """Raises if a layer's setting changed, such as a rate of dropout."""
        now = self.learner.layer_settings()
        for (layer, name), before in self._layer_settings.items():
            if now.get((layer, name), before) != before:
                raise RuntimeError(
                    f"{layer}.{name} was assigned while fit runs, whose compiled step has read it "
                    "and would ignore the change.\nAssign it between two fits, and call compile "
                    "before the next; the steps so far are kept."
                )

    def _run(self, steps: int) -> None:
        """Runs reserved steps, and stops training after the last or where it diverges."""
        first = self._progress.steps
        start = self._done
        # Counted before they run: a step that fails is charged all the same.
        self._done += steps
        self._progress.steps += steps
        self._progress.epochs += steps / self._data.steps_per_epoch
        boundaries = self.learner.boundaries(self._planned)
        inside = [step for step in boundaries if start <= step < self._done]
        ends = [*(step for step in inside if step > start), self._done]
        for end in ends:
            if start in inside:
                self.learner.advance(start, self._planned, self.accumulated, self.mechanism)
            self._run_steps(first, end - start)
            first += end - start
            start = end
        if self._done == self._allowed < self._planned:
            _LOG.warning(
                "Training stops after %d of %d steps: the budget allows no more.",
                self._allowed,
                self._planned,
            )
            self.learner.stop()
        self._stop_if_diverged()

    def _run_steps(self, first: int, steps: int) -> None:
        """Runs steps, of which the first has this number."""
        key = self._key if self._tapes is None else self._tapes.keystream
        calls = self._data.calls(steps, key, first, self._compiled.uses_xla)
        for num_steps, sampler, tensors in calls:
            mechanism = dataclasses.replace(self.mechanism, sampler=sampler)
            run_steps = self._compiled.steps_for(mechanism, tensors, self._kind_of_key)
            for num_of_key, words in self._keys(first, num_steps):
                num = tf.constant(num_of_key, tf.int64)
                self.state = run_steps(self.state, num, tensors, words, mechanism.noise)
            first += num_steps

    def _keys(self, first: int, steps: int) -> Iterable[tuple[int, tf.Tensor]]:
        """Returns numbers of steps with the argument `key` of their call."""
        return [(steps, self._key)] if self._tapes is None else self._tapes.calls(first, steps)

    def _stop_if_diverged(self) -> None:
        """Stops training if the released variables diverge; such a check costs no privacy."""
        thorough = self._done >= self._next_check
        if thorough:
            self._next_check *= 2
        fault = self.learner.fault(thorough)
        if fault is not None:
            _LOG.warning(
                "Training stops after %d of %d steps: %s. Lower the learning rate or the noise "
                "(larger batches, fewer steps), or use better initial values: surrogates' "
                "initial_loc, initial_scale.",
                self._done,
                self._planned,
                fault,
            )
            self.learner.stop()

    def spent(self) -> str:
        """Returns a sentence on the privacy spent, for the message of a failed step."""
        # Without the steps ahead, which `close` refunds.
        num = self._ledger.num_releases - self.steps_ahead
        return (
            f"This worker's ledger has {num} releases; the steps that failed are charged, "
            "whether they ran or not."
        )

    def _plan_again(self) -> None:
        """Updates budget and epsilons to show after another model has used the ledger."""
        if self._workers.several:
            raise RuntimeError(
                f"ledger: it changed during multi-worker training, after {self._done} of "
                f"{self._planned} steps. Fit one model at a time."
            )
        self._reservations.close()
        rest = self.mechanism.plan(self._planned - self._done)
        most = self._ledger.most_releases(rest, self._target.budgets)
        self._allowed = self._done + most
        if most == 0:
            raise BudgetExhaustedError(
                f"ledger: another model has used up its budget; {self._done} of {self._planned} "
                "steps ran."
            )
        self._make_curve(rest.replace(num_releases=most))

    def _logs(self, before: StepState, steps: int) -> dict[str, float]:
        """Returns the logs of the last steps, from the state before them."""
        logs: dict[str, float] = {}
        if self._curve is not None:
            self._epsilon.value = float(self._curve(max(0, self._done - self._curve_from)))
            logs["epsilon"] = self._epsilon.value
        else:
            logs["steps"] = self._progress.steps
        totals = zip(self.mechanism.joint, self.state.accumulated, before.accumulated, strict=True)
        for release, now, then in totals:
            if isinstance(release, PrivateMetric):
                release.add((float(now) - float(then)) / steps, steps)
                logs[release.name] = release.current()
        logs.update(self.learner.logs(self.accumulated, self.mechanism))
        if self.mechanism.unsafe_loss:
            name = "loss" if self.mechanism.non_private else "unsafe_loss"
            logs[name] = float(self.state.unsafe_loss - before.unsafe_loss) / steps
        return logs
