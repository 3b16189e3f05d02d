"""The parts of `fit`: checks, the plan and its noise, and what holds while a private fit runs."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from tfp_dpvi import _validate as check
from tfp_dpvi._keystream import SECURE
from tfp_dpvi._tf import (
    Model,
    forget_bijections,
    keras,
    layers_within,
    refuse_keras_3,
    steps_per_execution,
    tf,
)
from tfp_dpvi.callbacks import PrivateBackupAndRestore, StepsBar
from tfp_dpvi.data import Data
from tfp_dpvi.data.shapes import input_specs
from tfp_dpvi.gradients import StepSpec
from tfp_dpvi.models import arguments, saving, tried
from tfp_dpvi.models.state import Compiled, FitReleases, State
from tfp_dpvi.optimizers import ScoringOptimizer
from tfp_dpvi.privacy import BudgetExhaustedError
from tfp_dpvi.training import Mechanism
from tfp_dpvi.training.budget import calibrate
from tfp_dpvi.training.checkpoint import Checkpoint
from tfp_dpvi.training.distribution import Workers
from tfp_dpvi.training.fit import Learner, PrivateFit

LOG = logging.getLogger("tfp_dpvi")
_STEPS_PER_CALL = 50


def check_precision(model: Model, variables: Sequence[tf.Variable] = ()) -> None:
    """Refuses dtypes other than float32 and float64.

    In float16, rounding lets one record move a sum by many clips.

    Args:
      model: The model, whose layers are checked.
      variables: Variables to check too.

    Raises:
      ValueError: A layer or variable computes in another float type.
    """
    kinds = [
        (layer.name, layer.compute_dtype, layer.dtype_policy.name) for layer in layers_within(model)
    ]
    kinds += [(variable.name, variable.dtype, variable.dtype.name) for variable in variables]
    for name, dtype, shown in kinds:
        if not dtype or not tf.as_dtype(dtype).is_floating:
            continue
        if tf.as_dtype(dtype) not in (tf.float32, tf.float64):
            raise ValueError(
                f"{name!r} computes in {shown}, whose rounding lets one record move a sum by many "
                "clips: use float32 or float64,\nfor instance dtype='float32' or "
                "keras.mixed_precision.set_global_policy('float32'); see docs/sharp_edges.md."
            )


def check_arguments(
    refused: dict[str, Any],
    epochs: int,
    initial_epoch: int,
    callbacks: Sequence[keras.callbacks.Callback],
) -> PrivateBackupAndRestore | None:
    """Checks arguments of `fit`, and lets go of what models before have traced.

    Args:
      refused: Keyword arguments that `fit` does not have.
      epochs: As in `fit`.
      initial_epoch: As in `fit`.
      callbacks: The user's callbacks.

    Returns:
      The backup among the callbacks, or None.

    Raises:
      TypeError, ValueError: An argument that is unknown, not supported or out of range.
    """
    forget_bijections()
    arguments.refuse(refused)
    arguments.check_counts(epochs=epochs)
    if not 0 <= initial_epoch < epochs:
        raise ValueError(
            f"initial_epoch={initial_epoch} must be at least 0 and below epochs={epochs}."
        )
    refuse_keras_3("callbacks", callbacks)
    tried.refuse_what_is_none(callbacks)
    backups = (each for each in callbacks if isinstance(each, PrivateBackupAndRestore))
    return next(backups, None)


def evaluations(
    validation_freq: int | Sequence[int], validation_batch_size: int | None
) -> dict[str, int | list[int]]:
    """Returns Keras's settings of evaluations; it would refuse others after the first epoch.

    Args:
      validation_freq: As in `fit`.
      validation_batch_size: As in `fit`; None is 1024.
    """
    if isinstance(validation_freq, list):
        freq: int | list[int] = validation_freq
    else:
        freq = check.count("validation_freq", validation_freq, 1)
    size = 1024 if validation_batch_size is None else validation_batch_size
    size = check.count("validation_batch_size", size, 1)
    return {"validation_freq": freq, "validation_batch_size": size}


def try_callbacks(
    model: Model,
    compiled: Compiled,
    callbacks: Sequence[keras.callbacks.Callback],
    validation: arguments.Validation | None,
    unsafe: bool,
    epochs: range,
    evaluations: dict[str, int | list[int]],
) -> None:
    """Raises if callbacks or evaluations would fail after an epoch, when privacy has been spent.

    Args:
      model: The model, which is saved and evaluated once.
      compiled: Its settings.
      callbacks: The user's callbacks.
      validation: Validation data, of which a few records are evaluated, or None.
      unsafe: Whether their losses are shown as unsafe.
      epochs: The numbers of the fit's epochs.
      evaluations: Keras's settings of evaluations.
    """
    target = compiled.target
    names = [] if validation is None else model.metrics_names
    freq = evaluations["validation_freq"]
    # As in Keras: after every `freq` epochs, or after those that are listed.
    evaluated = [
        epoch
        for epoch in epochs
        if (epoch + 1 in freq if isinstance(freq, list) else (epoch + 1) % freq == 0)
    ]
    if validation is not None and not evaluated:
        raise ValueError(
            f"validation_freq={freq} evaluates validation_data in none of the epochs "
            f"{epochs.start + 1} to {epochs.stop}: pass 1, or leave out validation_data."
        )
    tried.try_callbacks(
        callbacks,
        model.optimizer,
        of_steps=tried.logs_of_steps(
            [metric.name for metric in compiled.private_metrics],
            has_delta=target.delta is not None,
            calibrated=hasattr(model, "calibration")
            and not isinstance(model.optimizer, ScoringOptimizer),
            exact=_is_exact(model, compiled),
            unsafe=target.unsafe_training_metrics,
        ),
        of_validation=[f"val_unsafe_{name}" if unsafe else f"val_{name}" for name in names],
        each_epoch=len(evaluated) == len(epochs),
        last_epoch=epochs[-1] in evaluated,
        epochs=epochs,
        save=model.save,
    )
    if validation is None:
        return
    few: Any = (validation,)
    settings: dict[str, int] = {}
    if isinstance(validation, tuple):
        # At least one row for each replica; a part of a batch, as in `fit`: one trace.
        few = tf.nest.map_structure(lambda part: None if part is None else part[:16], validation)
        settings = {"batch_size": 32}
    x, y = (*few, None)[:2]
    weight = few[2] if len(few) > 2 else None
    model.evaluate(x, y, sample_weight=weight, steps=1, verbose=0, **settings)


def make_mechanism(model: Model, compiled: Compiled, data: Data) -> Mechanism:
    """Returns the mechanism of each step of a fit.

    Args:
      model: The model, whose clipped gradient is released.
      compiled: Its settings.
      data: The records and their sampler.
    """
    target = compiled.target
    model.optimizer.refuse_other_noise(target.noise)
    spec = StepSpec(data.batch_size, data.num_records)
    return Mechanism(
        data.sampler,
        model.clipped_gradient(spec),
        data.batch_size,
        data.num_records,
        target.noise,
        metrics=compiled.private_metrics,
        neighboring_relation=target.neighboring_relation,
        accountant=target.accountant,
        randomness=target.randomness or "",
        unsafe_loss=target.unsafe_training_metrics or _is_exact(model, compiled),
        person=data.records.person,
    )


def _is_exact(model: Model, compiled: Compiled) -> bool:
    """Returns whether fits have neither noise nor clip, as of simulated records: losses are shown.

    See `Mechanism.non_private`.
    """
    return compiled.target.noise == 0.0 and bool(model.clip.is_off)


@contextlib.contextmanager
def private_fit(
    model: Model,
    state: State,
    compiled: Compiled,
    data: Data,
    *,
    epochs: range,
    backup: PrivateBackupAndRestore | None,
    declared: bool,
) -> Iterator[tuple[PrivateFit | None, int]]:
    """Plans a fit and compiles its step; afterwards refunds reserved steps that did not run.

    Args:
      model: The model that learns.
      state: Its state.
      compiled: Its settings.
      data: The records and their sampler.
      epochs: The numbers of the fit's epochs.
      backup: The callback that resumes interrupted fits, or None.
      declared: Whether the number of records was declared.

    Yields:
      The fit, or None if a resumed one is complete, and its first epoch.
    """
    if not state.lock.acquire(blocking=False):
        raise state.fit_is_running("fit")
    run = None
    counter = steps_per_execution(model)
    before = counter.numpy()
    account = state.account
    try:
        per_call = (
            int(before)
            if compiled.steps_per_execution_is_set
            else min(_STEPS_PER_CALL, data.steps_per_epoch)
        )
        run, initial_epoch = _begin(model, state, compiled, data, epochs, backup, per_call)
        account.inputs = input_specs(data.records)
        account.num_records = data.num_records
        account.num_records_declared = declared
        if run is not None and compiled.target.unsafe_training_metrics:
            account.ledger.record_exposure(
                "exact training losses were shown (unsafe_training_metrics)."
            )
        counter.assign(per_call)
        state.running = run
        model.drop_predictions()
        with model.optimizer.settings_held():
            yield run, initial_epoch
    finally:
        try:
            if run is not None:
                run.close()
        finally:  # Also after an error of the ledger.
            if run is not None:
                model.drop_predictions()
                # Without a step, weights and releases are those of the fit before.
                if run.num_steps:
                    state.released = FitReleases(run.accumulated, run.mechanism)
            state.running = model.train_function = None  # It holds the fit's key and records.
            counter.assign(before)
            state.lock.release()
        model.after_fit()


def _begin(
    model: Model,
    state: State,
    compiled: Compiled,
    data: Data,
    epochs: range,
    backup: PrivateBackupAndRestore | None,
    per_call: int,
) -> tuple[PrivateFit | None, int]:
    """Returns the prepared fit and its first epoch; None if a resumed fit is complete."""
    account, target = state.account, compiled.target
    initial_epoch = epochs.start
    workers = Workers(model.distribute_strategy)
    check_precision(model, model.learned_variables())
    mechanism = make_mechanism(model, compiled, data)
    resumed = None
    if backup is not None:
        if not data.resumable or workers.several:
            raise ValueError(
                "PrivateBackupAndRestore needs a single process and arrays: a dataset gives no new "
                "sample."
            )
        variables = saving.variables_of(model)
        seeded = state.seed is not None
        resumed = Checkpoint(backup, model.optimizer, variables, account, target, seeded=seeded)
        initial_epoch = resumed.first_epoch(epochs.start, epochs.stop)
    planned = (epochs.stop - initial_epoch) * data.steps_per_epoch
    if planned:
        model.before_fit(planned)
    compiled.steps.begin(model.learned_variables(), planned, mechanism.gradient.gains_from_xla)
    plan, weights = mechanism.plan(planned), saving.variables_of(model)
    # Shards have lengths, and hence samplers, of their own.
    in_shards = data.sampler.place[1] > 1
    if in_shards and target.randomness == SECURE:
        raise ValueError(
            'sampling="poisson_of_shards" needs a key for each worker, and '
            'compile(randomness="secure") has one tape for all:\nleave one of them out.'
        )
    public = (target, state.seed, plan.to_json(), in_shards or data.sampler.identity, model.clip)
    workers.check_same(*public, arrays=lambda: [variable.numpy() for variable in weights])

    def noise_and_steps() -> tuple[float, float]:
        """Returns the fit's noise multiplier, and the number of steps that the budgets allow."""
        if resumed is not None and resumed.held is not None:
            priced = resumed.restore(resumed.held, mechanism)
        else:
            settings = (planned, data.steps_per_epoch, account.progress.epochs)
            priced = calibrate(mechanism, account.ledger, target, *settings)
        allowed = account.ledger.most_releases(priced.plan(planned), target.budgets)
        return float(priced.noise), allowed

    noise, allowed = workers.from_chief(noise_and_steps, 2)
    mechanism = mechanism.with_noise(noise)
    if not allowed:
        if resumed is None or resumed.held is None:
            raise BudgetExhaustedError(
                f"budget: epsilon, delta = {account.ledger.budget} of the ledger allows no further "
                "release of this plan.\nRaise it with ledger.set_budget, or use more noise."
            )
        account.plan = mechanism.plan(planned)
        resumed.end(planned)
        return None, initial_epoch
    run = PrivateFit(
        _learner(model),
        account,
        target,
        compiled.steps,
        mechanism,
        data,
        seed=state.seed,
        run=new_run(),
        epsilon=state.metrics.epsilon,
        allowed=int(allowed),
        planned=planned,
        per_call=per_call,
    )
    workers.agree_on(run.prepare)
    account.plan = run.plan
    if resumed is not None:
        resumed.follow(run.plan, initial_epoch)
    return run, initial_epoch


def new_run() -> str:
    """Returns a random name for a fit in the ledger."""
    return uuid.uuid4().hex


def _learner(model: Model) -> Learner:
    def stop() -> None:
        model.stop_training = True

    return Learner(
        variables=model.learned_variables,
        optimizer=model.optimizer,
        strategy=model.distribute_strategy,
        steps_per_call=lambda: int(steps_per_execution(model).numpy()),
        fault=model.fault_of_variables,
        logs=model.released_logs,
        boundaries=model.boundaries,
        advance=model.advance,
        stop=stop,
        # What a callback adds later is no setting.
        settings=frozenset(name for name in vars(model) if not name.startswith("_")),
        layer_settings=lambda: _layer_settings(model),
    )


def _layer_settings(model: Model) -> dict[tuple[str, str], object]:
    """Returns settings of the layers, such as rates and activations, by layer and name."""
    return {
        (layer.name, name): value
        for layer in layers_within(model, include_self=False)
        for name, value in vars(layer).items()
        if (isinstance(value, bool | int | float | str | None) or callable(value))
        and name != "built"
        and name[0] != "_"
    }


@contextlib.contextmanager
def unsafe_validation(model: Model, state: State, is_unsafe: bool) -> Iterator[None]:
    """Marks validation values of private records as unsafe, and records the exposure in the ledger.

    Args:
      model: The model, whose trace of evaluation holds the loss's name.
      state: Its state.
      is_unsafe: Whether the validation records are private.
    """
    if not is_unsafe:
        yield
        return
    state.account.ledger.record_exposure(
        "exact losses of private validation records were shown (unsafe_validation)."
    )
    state.unsafe_validation = True
    model.test_function = None
    try:
        yield
    finally:
        state.unsafe_validation = False
        model.test_function = None


def complete_history(model: Model, epochs: int) -> keras.callbacks.History:
    """Returns the history of a resumed fit that was complete.

    Args:
      model: The model.
      epochs: The number of epochs that have run.
    """
    model.history = keras.callbacks.History()
    model.history.set_model(model)
    model.history.on_train_begin()
    model.history.params = {"epochs": epochs, "verbose": 0}
    return model.history


def order_callbacks(
    callbacks: list[keras.callbacks.Callback],
    backup: PrivateBackupAndRestore | None,
    run: PrivateFit,
    verbose: int | str,
) -> list[keras.callbacks.Callback]:
    """Returns callbacks in an order in which none ends too early.

    The ledger is settled before others end, the bar counts executed steps, and a backup is last.

    Args:
      callbacks: The user's.
      backup: The one among them that resumes fits, or None.
      run: The fit.
      verbose: As in Keras.
    """
    settle = keras.callbacks.LambdaCallback(on_train_end=lambda logs: run.close())
    has_bar = any(isinstance(each, keras.callbacks.ProgbarLogger) for each in callbacks)
    bar = [] if has_bar or not verbose else [StepsBar(lambda: run.num_steps)]
    others = [each for each in callbacks if each is not backup]
    return [settle, *others, *bar, *([] if backup is None else [backup])]
