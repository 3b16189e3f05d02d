"""Seconds that the server of a calibrated study takes, of the clock and of the processor.

    python benchmarks/federated_server.py [--quick] [--output build/federated_server.json]

A logistic regression of 50 coefficients is played by 20 simulated hospitals of 200 records each:
the server sees no record, so that their number does not change its work. Timed is what it does
alone: its study, the tasks that it makes, the replies that it reads, checks and adds, all as bytes,
and the posterior of the sums. Replies are made once, and played again to a new server in each
repetition. The target is five seconds for all of it, with what the first posterior traces.
With `--quick` 3 hospitals and 5 coefficients.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import pathlib
import time
from typing import NamedTuple

import harness
import numpy as np

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.federated import Hospital, Reply, Server, Study, Synchronous
from tfp_dpvi.federated.refiner import Refiner

EPSILON, DELTA = 1.0, 1e-5
NUM_RECORDS = 200
ROUNDS = 3
REPETITIONS = 5
TARGET = 5.0
OUTPUT = pathlib.Path(__file__).parents[1] / "build" / "federated_server.json"


class Seconds(NamedTuple):
    """Seconds of the clock, and of the processor."""

    wall: float
    cpu: float

    def __add__(self, other):
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)


def timed(function):
    """Returns what a function returns, and the seconds that it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    return result, Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def records(num, width, seed):
    generator = np.random.default_rng([45, seed])
    x = generator.normal(size=(num, width)).astype("float32")
    logits = x @ np.linspace(-1.0, 1.0, width) / np.sqrt(width)
    return x, (generator.random(num) < 1.0 / (1.0 + np.exp(-logits))).astype("int32")


def study_of(width):
    """Returns a logistic regression of so many coefficients."""
    return Study(
        tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 1.0), width)}),
        lambda params, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"])),
        dpvi.optimizers.InformationOptimizer(l2_norm_clip=2.0),
        local_steps=2,
        example=records(4, width, 0),
        calibrated=True,
    )


def played(study, answers):
    """Plays a study, and times its server.

    Args:
      study: The study.
      answers: By hospital a function from a task to a reply; neither is timed.

    Returns:
      The server, and its seconds.
    """
    server = Server(study.terms, answers, Synchronous(rounds=ROUNDS))
    total = Seconds(0.0, 0.0)
    while not server.finished:
        tasks, seconds = timed(server.due)
        total += seconds
        for task in tasks:
            message, making = timed(task.to_bytes)
            reply = answers[task.hospital](task, message)
            is_taken, taking = timed(
                lambda task=task, reply=reply: server.receive(task.hospital, reply)
            )
            if not is_taken:
                raise SystemExit(f"The server took no reply of {task.hospital}: {server.refused}.")
            total += making + taking
    return server, total


def measure(num_hospitals, width, repetitions):
    """Returns the seconds of a study's server: of all messages, and of the posterior.

    Args:
      num_hospitals: The number of hospitals.
      width: The number of coefficients.
      repetitions: How often each is timed.
    """
    # The server's own study has traced nothing that hospitals traced.
    (study, making), theirs = timed(lambda: study_of(width)), study_of(width)
    refiner, replies = Refiner(theirs), {}

    def hospital_of(number):
        name = f"hospital {number:02d}"
        hospital = Hospital(
            theirs,
            *records(NUM_RECORDS, width, number + 1),
            name=name,
            epsilon=EPSILON,
            delta=DELTA,
            rounds=ROUNDS,
            seed=number,
            refiner=refiner,
        )

        def answer(task, message):
            # A new server has the same tasks, but for the names of its requests.
            key = (name, task.number, task.last)
            if key not in replies:
                replies[key] = Reply.from_bytes(hospital.answer(message), study.terms)
            return dataclasses.replace(replies[key], request=task.request).to_bytes()

        return name, answer

    answers = dict(hospital_of(number) for number in range(num_hospitals))
    messages, posteriors = [], []
    for _ in range(repetitions):
        server, seconds = played(study, answers)
        messages.append(seconds)
        posterior, seconds = timed(lambda server=server: study.calibrated_posterior(server))
        posteriors.append(seconds)
    return {
        "hospitals": num_hospitals,
        "coefficients": width,
        "replies": len(replies),
        "sums": len(posterior.sums),
        "study": making._asdict(),
        "messages": summarised(messages),
        "posterior": summarised(posteriors),
        "first_study": (making + messages[0] + posteriors[0])._asdict(),
    }


def summarised(seconds):
    """Returns the first call, and least and median of the later ones."""
    later = np.array(seconds[1:])
    return {
        "first": seconds[0]._asdict(),
        "least": Seconds(*later.min(axis=0).tolist())._asdict(),
        "median": Seconds(*np.median(later, axis=0).tolist())._asdict(),
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="3 hospitals and 5 coefficients")
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    logging.getLogger("tfp_dpvi").setLevel(logging.ERROR)
    size = (3, 5, 2) if options.quick else (20, 50, REPETITIONS)
    row = measure(*size)
    settings = {"records": NUM_RECORDS, "rounds": ROUNDS, "epsilon": EPSILON, "target": TARGET}
    harness.write_study("federated_server.py", options.output, arguments, settings, [row], [])
    print(json.dumps(row))


if __name__ == "__main__":
    main()
