"""A model checker for the ledger: random interleavings of objects, threads, forks and crashes on one SQLite file.

Between a reservation's price and its write, other actions run, to any depth. What callers were granted, less what they gave
back, is counted beside the ledger, which must never hold less, nor ever be over its budget.
"""

import json
import os
import pathlib
import random
import signal
import sqlite3
import threading
from collections import Counter

from tfp_dpvi.privacy import BudgetExhaustedError, FullBatch, PrivacyLedger, PrivacyPlan

PLANS = [PrivacyPlan(FullBatch(), z, 1) for z in (4.0, 6.0, 9.0)]
BUDGET = (2.5, 1e-5)  # About 4, 10 or 22 releases.


class Interleaved(PrivacyLedger):
    """A ledger that lets others act between the price of a reservation and its write."""

    between = None

    def _charge(self, state, kind, steps):
        if self.between is not None:
            action, self.between = self.between, None
            action()
        return super()._charge(state, kind, steps)


class WithoutVersionCheck(Interleaved):
    """What the model checker must catch: the reservation is written whatever happened since its price."""

    def _charge(self, state, kind, steps):
        if self.between is not None:
            action, self.between = self.between, None
            action()
        return super()._charge(self._state(), kind, steps)


class ForgetsOnFork(Interleaved):
    """What the model checker must catch: a child goes on from the figures that its parent had."""

    home = None

    def _state(self):
        self.home = self.home or os.getpid()
        known = self._reader.known
        return super()._state() if os.getpid() == self.home or known is None else known

    def _charge(self, state, kind, steps):
        return super()._charge(state if os.getpid() == self.home else super()._state(), kind, steps)


class GivesBackTwice(Interleaved):
    """What the model checker must catch: a confirmation that is not closed."""

    def confirm(self, reservation, steps_run=None):
        super().confirm(reservation, steps_run)
        with self._database.write() as connection:
            connection.exec_driver_sql("UPDATE charges SET steps = max(0, steps - 1)")


def _kill_at_statement(number):
    """Makes this process die before its `number`-th statement from here on, commits included."""
    left = [number]
    connect = sqlite3.connect

    def count(statement):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def traced(*args, **kwargs):
        connection = connect(*args, **kwargs)
        connection.set_trace_callback(count)
        return connection

    sqlite3.connect = traced


class Run:
    """One random interleaving; `AssertionError` says where the ledger held too little or too much."""

    def __init__(self, path, seed, ledger=Interleaved, template=None):
        self.path, self.ledger, self.rng = pathlib.Path(path), ledger, random.Random(seed)
        if template is not None:
            self.path.write_bytes(template)
        self.open = [ledger(self.path) for _ in range(2)]
        self.granted = Counter()  # What callers hold, by plan.
        self.unknown = Counter()  # What a crashed process may have been granted.
        self.reservations = []  # (object, id, plan, steps)

    def go(self, actions):
        for _ in range(actions):
            self.act(depth=0)
            self.check()
        fresh = self.ledger(self.path)
        for one in self.open:  # What an object knows from its own changes is what the tables hold.
            assert one._state() == fresh._state()
            one.close()
        self.open = [fresh]
        self.check()
        self.open[0].close()

    def check(self):
        ledger = self.rng.choice(self.open)
        charged = Counter()
        for entry in ledger.entries:
            charged[PLANS.index(entry.plan)] += entry.steps
        for plan in range(len(PLANS)):
            low = self.granted[plan]
            assert low <= charged[plan] <= low + self.unknown[plan], (
                plan,
                low,
                charged[plan],
                self.unknown[plan],
            )
        assert ledger.epsilon(BUDGET[1]) <= BUDGET[0] * (1 + 1e-9), ledger.epsilon(BUDGET[1])
        # A crashed reservation stays charged, or never was.
        self.granted, self.unknown = charged, Counter()

    def act(self, depth):
        rng = self.rng
        name = rng.choice(
            ["reserve"] * 6 + ["confirm"] * 3 + ["crash", "crash", "fork", "threads", "reopen"]
        )
        if depth > 2 and name != "confirm":
            return
        getattr(self, name)(depth)

    def reserve(self, depth):
        index = self.rng.randrange(len(self.open))
        ledger, plan, steps = (
            self.open[index],
            self.rng.randrange(len(PLANS)),
            self.rng.randint(1, 4),
        )
        inner = self.rng.choice([0, 0, 1, 2])

        def others():
            for _ in range(inner):
                self.act(depth + 1)

        ledger.between = others
        try:
            token = ledger.reserve(
                PLANS[plan], steps, budgets=[BUDGET] if self.rng.random() < 0.3 else []
            )
        except BudgetExhaustedError:
            return
        finally:
            ledger.between = None
        self.granted[plan] += steps
        self.reservations.append((token, plan, steps))

    def confirm(self, depth):
        if not self.reservations:
            return
        token, plan, steps = self.reservations.pop(self.rng.randrange(len(self.reservations)))
        run = self.rng.choice([steps, steps, self.rng.randint(0, steps)])
        self.rng.choice(self.open).confirm(token, steps_run=run)
        self.granted[plan] -= steps - run

    def reopen(self, depth):
        if depth == 0:
            index = self.rng.randrange(len(self.open))
            self.open[index].close()
            self.open[index] = self.ledger(self.path)

    def threads(self, depth):
        """Two threads reserve at the same time, on one object or on two."""
        wishes = [
            (self.rng.choice(self.open), self.rng.randrange(len(PLANS)), self.rng.randint(1, 3))
            for _ in range(2)
        ]
        barrier, errors, got = threading.Barrier(2), [], []

        def work(ledger, plan, steps):
            try:
                barrier.wait()
                got.append((ledger.reserve(PLANS[plan], steps), plan, steps))
            except BudgetExhaustedError:
                pass
            except BaseException as error:
                errors.append(error)

        if depth == 0:
            workers = [threading.Thread(target=work, args=wish) for wish in wishes]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            assert not errors, errors
            for token, plan, steps in got:
                self.granted[plan] += steps
                self.reservations.append((token, plan, steps))

    def crash(self, depth):
        """A child reserves and dies before one of its statements, or right after."""
        self._child(kill_at=self.rng.randrange(30))

    def fork(self, depth):
        """A child reserves, confirms and ends."""
        self._child(kill_at=None)

    def _child(self, kill_at):
        inherited = self.rng.choice([*self.open, None])
        wishes = [
            (self.rng.randrange(len(PLANS)), self.rng.randint(1, 3))
            for _ in range(self.rng.randint(1, 2))
        ]
        run = [self.rng.randint(0, steps) for _, steps in wishes]
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                if kill_at is not None:
                    _kill_at_statement(kill_at)
                ledger = self.ledger(self.path) if inherited is None else inherited
                ledger.between = None
                for (plan, steps), confirmed in zip(wishes, run, strict=True):
                    try:
                        token = ledger.reserve(PLANS[plan], steps)
                    except BudgetExhaustedError:
                        continue
                    os.write(send, f"[{plan}, {steps}]\n".encode())
                    # Before it is done: from here on fewer may be charged.
                    os.write(send, f"[{plan}, {confirmed - steps}]\n".encode())
                    ledger.confirm(token, steps_run=confirmed)
                os._exit(0)
            finally:
                os._exit(1)
        os.close(send)
        with os.fdopen(receive) as file:
            told = [json.loads(line) for line in file]
        status = os.waitpid(child, 0)[1]
        killed = os.WIFSIGNALED(status)
        assert killed or os.waitstatus_to_exitcode(status) == 0, status
        for plan, change in told:
            self.granted[plan] += change
            if killed and change < 0:  # Whether it was given back is not known.
                self.unknown[plan] -= change
        if killed:
            for plan, steps in wishes[sum(change > 0 for _, change in told) :]:
                self.unknown[plan] += steps
