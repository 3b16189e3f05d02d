"""Checks the structure of `tfp_dpvi` from its source, prints the figures and draws the packages.

    python .ci/structure.py            the figures, and what is over a limit; then the status is 1
    python .ci/structure.py --places   the places behind every figure too
    python .ci/structure.py --write    writes the drawing into docs/architecture.md

A figure is met by the thing, not by its name: bases of classes and imports are resolved across
files, and what a local variable is called plays no part.

`tests/test_structure.py` runs the same checks, and follows one record through a real `fit`.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import doctest
import functools
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tfp_dpvi"
DRAWING = ROOT / "docs" / "architecture.md"
MARKS = ("<!-- drawing: begin, written by .ci/structure.py -->", "<!-- drawing: end -->")

STATE_ROOMS = ("training", "calibrated", "models", "networks")
INFINITIES = ("math.inf", "np.inf", "numpy.inf", "float('inf')", "inf")

# Each package or module of the top level imports from those before it only.
ORDER = (
    "_deprecation",
    "_validate",
    "privacy",
    "_tf",
    "_random",
    "_keystream",
    "serialization",
    "divergences",
    "surrogates",
    "_quadrature",
    "_unit_latents",
    "local",
    "sampling",
    "gradients",
    "ghost",
    "optimizers",
    "metrics",
    "callbacks",
    "data",
    "bayes",
    "training",
    "preprocessing",
    "export",
    "calibrated",
    "checking",
    "models",
    "regressions",
    "rehearsal",
    "selection",
    "networks",
    "synthetic",
    "audit",
    "federated",
    "cli",
)
# Rooms below that are none of a room's business all the same: these know nothing of privacy.
STRANGERS = {
    "divergences": ("privacy",),
    "local": ("privacy",),
    "_quadrature": ("privacy",),
    "_unit_latents": ("privacy",),
    "surrogates": ("privacy",),
    "_tf": ("privacy",),
    "_random": ("privacy",),
    "_keystream": ("privacy",),
}
# Private attributes of libraries that are neither TensorFlow nor Keras.
OF_OTHERS = {
    "_dp_sum_query": "TensorFlow Privacy, whose optimizers are recognised by their attributes",
    "_l2_norm_clip": "TensorFlow Privacy",
    "_noise_multiplier": "TensorFlow Privacy",
    "_num_microbatches": "TensorFlow Privacy",
    "_stddev": "TensorFlow Privacy",
    "_rdp": "dp_accounting",
    "_mmap": "numpy.memmap",
}
# Methods that TensorFlow Probability asks a distribution to define, private by its own convention.
EXTENSION_POINTS = {"_batch_shape", "_batch_shape_tensor", "_event_shape", "_event_shape_tensor"}
TENSORFLOW = ("tensorflow", "tensorflow_probability", "keras", "tf_keras")

# Each figure with its reason. Where a limit says "aim", it is today's value and may only fall.
LIMITS = {
    # A reader holds a file, and a function, in the head; comments and docstrings help, and may grow.
    "lines of code in the longest file": 600,
    "lines of the longest function": 80,
    # Code that says the same in fewer statements is easier to keep: who adds some says what for.
    # 900 for the centred clip in whitened coordinates: its clip and releases 130, scores of outcomes
    # 150, coordinates 110, scoring steps 140, a fit's state and posterior 110, a fit between calls
    # of Keras 60, evidence for the curvature's prior, what would halve an interval, and checks 200.
    # 230 for the diagonal of the curvature of many coefficients, ranks among twins and cautious steps.
    # 590 for frames of three libraries and dtypes that are checked by building their values (270),
    # the ends of columns (150), and the plan of a table without data (140), and scales (20).
    # 1,010 for formulas: public columns 150, design rows 290, families 125, the call 100, results 345.
    # 540 for estimates from counts of tables: values of levels 170, moments and their errors 110,
    # the analyses and their refusals 220, and counts that are saved 40.
    # 100 for warnings in the words of a formula (20), typical values from the records (50), the number
    # of coefficients (15), and draws from one kernel each (15).
    # 160 for a wider clip, ranks by a second order, and what they say.
    # 730 for federations: a server's state, page and late replies 300, terms and columns 170,
    # steps by information 90, a guard and caps for each hospital 100, workers' files and faults 70.
    # 450 for persons with several rows: grouping and identifiers 70, likelihoods of persons and their
    # latents 140, the fit's arguments and public persons 50, report and ledger 60, replay 15,
    # intercepts of persons in formulas 60.
    # 150 for rules between columns (100), public parents of categories and merged shares (50).
    # 60 for what the posterior's checks share by Holm's procedure, and how far a posterior reaches.
    # 250 for eight more families of outcomes: a class each 190, counts with zeros of their own 60.
    # 1,090 for what comes before and between fits: replicates 115, simulated data sets and truths 125,
    # the call and its file 205, tables, curves and power 200, truths in units of formulas 135; private
    # scores 55, comparison 100, tuning 140, and the price of random trials 25.
    # 980 for private checks: bounded sums and their release 120, outcomes among predicted ones 60,
    # what is declared 130, tests and words 150, results and pictures 90, the table with the free
    # checks 70, planning and charging them with a fit or after it 170, of regressions 90, replay 90.
    # 500 for survey weights: their scores, releases and clip 150, curvature and variance apart 60,
    # arguments, records of persons and checks 90, populations by counts 150, a formula's column 30.
    # 790 for Keras's habits: records in files 320, trials of callbacks 120, networks that end in a
    # distribution and terms of no record 70, texts 60, weights that change in a fit 50, complete
    # errors of compile 50, validation splits 40, errors in one line and without dumps 50.
    # 200 for the command line: its arguments 60, commands 90, files 50.
    # 530 for the last phase of federations: its messages and checks 100, the release 150, pricing it
    # with the rounds 60, the server's part 50, the posterior, weights and unlike hospitals 130.
    # 150 for the search of scales and ranks by a cdf 100, errors of other libraries 40.
    # 40 for successes among trials of each record, and outcomes that no family fits.
    # 80 for ends of synthetic columns whose counts are noise 60, and networks that mix records 20.
    # 620 for hospitals' effects: their posterior 150, its draws and words 110, expected scores 60,
    # persons at a hospital 50, regressions as a study's model 100, rehearsals of one 110, words 40.
    # 40 for evidence of the curvature kept apart from its draws, and rows tried nearer to a middle.
    # 10 for copies of some rows of files, effects that are not added, and rows whose densities are
    # flat.
    # 170 for regressions that TensorFlow alone serves: a formula's columns from factors 80, checks of
    # values 40, predictions 50; and 5 for effects at values of other covariates.
    # 282 for sums that are only seen added up: prices 45, the report 20, what a consortium declares
    # 45, the aggregation 50, a hospital's plans and prices 67, studies, terms and simulation 55.
    # 177 for censored outcomes: their distribution 45, reading their limits 60, rows with limits
    # 35, what is refused and advised 20, and exponential times 10.
    # 166 for what scoring steps leave and ignore, and for jumps beside a gradient.
    # 30 for fits whose parameters overflow on the way, and geometric middles of bounds.
    # 21 for fits that start anew, for public inputs that hold for another kind of records and outlive
    # refused ones, and for files whose writing warns of nothing that nobody read.
    # 35 for the adaptive quadrature of persons' latents: fixed points were off by nats.
    # 145 for that of records' latents (65), whose points move by Newton steps: where a start is far
    # off, scores were off by orders of magnitude (65); and for rounded densities of huge counts (10).
    # 84: 45 for what is one step, and a likelihood with its scores, in files of their own; 29 for
    # windows that begin later and columns of other scales; 10 for outcomes that would broadcast and
    # for sums that a dropped hospital had kept out. 133: a curvature of which few columns are unlike
    # the public ones: intervals of a rare value covered half. 5 for terms of a study without sums.
    # 28 for coordinates that are formed anew where a column is weak, and not beyond what noise asks.
    # 15 for refusals of layers that draw random signs and of weights in `compile`, and for what to
    # do with a table for a network of one input. 49 for public inputs that are weighted like private
    # ones: intervals of a very rare value were three times as wide. 4 for the last digit of densities.
    # 26 for convolutions of which each record has its own kernel: TensorFlow ran a loop over records.
    # 13 for rows of mapped files that are read a few at a time: a batch mapped a whole file.
    # 9 for padding of float64, which XLA fills with garbage at times.
    # 115 for public inputs of which many are weighted by all released products, and a direction that
    # noise hides: of textbook tables intervals were five times too wide, or wrong without a word.
    # 40 for slopes of groups, (x | g): users of brms and Bambi had to write interactions.
    # 19 for workers that each read a shard of their own. 21 for hooks of callbacks that take other
    # arguments, or read a log by `get`: they ended a fit after its first epoch.
    # 9 for convolutions in groups, whose loop over records failed on CPUs.
    # 60 for formulas that formulae would read in silence as something else (outcomes with a state,
    # second arguments, offsets within terms, comparisons with no level), and arguments by name.
    # 22 for validation that no epoch, or not each, has: it ended fits, or nobody noticed; and for
    # eighty lines of TensorFlow's where a layer has no gradient. 14 for layers that were adapted:
    # a vocabulary ended fits, and statistics of private records were in the model without a word;
    # and for texts of which some are missing. 7 for what rounding does at rates of 1e10, which was
    # taken for a jump of the likelihood, and for adapted layers that a likelihood calls. 3 for one
    # trace of the trial of rows, and for a name of a bad seed. 9 for the command line's weights,
    # checks, constants and priors. 83 for monotone effects of ordered levels, as in brms. 14 for
    # ends of columns whose wide cells were taken for heaps, and tripled means; for correlations
    # without a standard error; for decimals of all widths and dates of all lengths, whose advice was
    # wrong or none; for hospitals that simulate with a table alone, and for the advice to use an
    # optimizer that is in use. 11 for operators that formulae reads in another order than Python,
    # which changed signs, and for slopes of persons. 4 for a typical count that is not the middle of
    # 0 and 200, from where few fits came down to counts near 1. 27 for information that a few extreme
    # public inputs have, by which intervals were a fifth as wide as they had to be, in silence. 6 for
    # a fit that ended with its budget spent where released values gave no coordinates. 45 for
    # survey weights: alike ones that were not narrowed intervals or hid a bias, and weights that
    # noise hides did, in silence; and weights of zero and areas without names were accepted.
    # 181 for typical values that are released where a schema has bounds alone, which by far too
    # wide ones made intervals wrong by fifty of their standard deviations, and rehearsals of these.
    # 18 to say that all values are in the finest part, with which a slope was 118 deviations off,
    # and to refuse shares that leave nothing for the fit.
    # 181 for hospitals that agree on typical values by counts, without which a study of far bounds
    # was wrong by up to 75 deviations, and for its warnings and draws in the formula's words. 155
    # for correlations of a group's slopes. 109 for survey weights at hospitals. 90 for units of what
    # is centred and scaled, which bounds and other columns decided in silence; for persons at a
    # worker; and for refusals before typical values are paid for. 16 for overdispersed successes.
    # 10 for hospitals' effects from weighted sums, and 11 for naming hospitals whose weights noise
    # hides: their effects were four deviations off in silence.
    # 91 for values in which scores are linear: intervals of small shares lay above them.
    # 13 for products of blocks in float32: weights made a step of 20 coefficients 1.2 times as long.
    # 5 for areas in a column named as an estimate, which lost their names, and for units as weights.
    # 188 for persons: networks' layers 45, streams 30, earlier outcomes among inputs, which biased
    # estimates in silence, 40, attacks 35, identifiers that split or join persons 15, places of
    # public persons that nobody fills 5, a latent of each row 7, norms that other groups do not
    # change 3. 2 for replays that tried nothing. 2 for outcomes that do not change within a person:
    # that a column is the outcome of another row was the wrong reason. 3 for the curvature in blocks
    # of float32 with weights, whose second matrix made a step of 50 coefficients 1.16 times as long.
    # 128 for the third order of likelihoods: where 40 records inform each group, its slopes' mean
    # and deviations were a standard deviation off in silence; 19 for noting where it is cut or hidden.
    # 20 for records that count for nothing, as where scores overflow, and for scores of unlike
    # public inputs, by which intervals had a third of their width in silence. 7 for a last phase that waits
    # below its quorum, and for nodes that fail: sums that were paid for and kept were lost. 18 for tasks
    # that wait for their node to join, whose hospital's sums were lost, and for late errors; 3 for
    # saying that a study waits. 2 for a worker's own reason to refuse. 7 for full batches,
    # which are not gathered: a tenth of a small step. 3 for families by Bambi's and brms' names.
    # 49 for changes that hospitals have paid for and kept when a study ends while they are away, or
    # below its quorum. 128 for quantiles of released counts, with intervals that cover; 7 for tables
    # of many posterior draws, which the noise moves less. 31 for the most probable mixture and
    # fits that end half-way, 18 for levels that are joined if they may fall from what is beside.
    # 9 for XLA where samplers do not reject: a rehearsal of counts takes half of its time without.
    # 78 for expected scores where noise hides most of a posterior: 30 coefficients of 500 records
    # were covered .80 in silence.
    # 52 for pairs counted within a target's levels, from which classifiers learn what two columns
    # say together: their counts, their shares of a mixture and the rule 35, plans and files 17.
    # 93 for what far records that noise hides would change, as no interval includes them, and for
    # the noise of histograms within levels: of far groups, intervals of means covered .15 to .78.
    # 35 for what they would change in quantiles, which missed in silence, and in samples.
    # 28 for noise that hides whether columns are correlated, as the public ones are not: ten of them
    # with 300 records covered .74 in silence; and for chains that fail, beside which a line is kept.
    # 30 for public data in place of invented records, on which intervals of few rest, and 5 for
    # refusing those in which a term does not vary: its interval had half of its width in silence.
    # 8 for a lack of fit that noise hides: counts of 300 records may vary twice as much in silence.
    # 11 for persons' binary outcomes, of which one log density is enough: steps are 1.8 times as fast.
    # 31 for numbers that were cut at a bound, whose mean and deviation were too small in silence,
    # and for heaps in ends that fall. 58 for far ends, whose levels are at doubled distances, and
    # correlations within outermost levels: slopes on a small group with the largest numbers were
    # covered in none of eight tables.
    # 137 for what a report asks of each public choice 45, copies of a column and rules that cannot be
    # saved or fail after a release 60, decimals, times and days in numbers that came back as others
    # in silence 22, and one text of a fit's warning and a plan 10.
    # 28 for fitted ends beside a spike at a bound, reports without what nobody declared, and circles
    # of rules. 26 for the size of far records in coefficients, 44 for tables in parts, and 18 for
    # ends with a second group beyond a gap, which were fitted in silence.
    # 25 for ends that are cut at doubled distances: counts of empty levels said nothing of tails, and
    # the mean of heaped numbers was inside in 80 of 100.
    # 5 for persons whose rows are alike: another family was what a warning advised.
    # 10 for what noise hides before a near bound, as a part of a mean's interval.
    # 1 for the share of a column's variance that a few records have.
    "statements": 28_566,
    # A type that says nothing finds no error; `tfd: Any` hides one at each use. Aim: protocols.
    # 42 for formulae, pandas and matplotlib, which ship no types; 11 for identifiers of any type;
    # 3 for configurations of released counts; 18 for truths of any structure, pictures, and JSON.
    # 18 more for keys of columns, JSON of results and matplotlib of checks.
    # 11 for columns of counts and settings of fits.
    # 81 for pyarrow and h5py, which ship no types, and for callbacks' code and arguments of Keras.
    # 6 for priors and constants of a study's formula, and truths of its rehearsal.
    # 2 for calls in a formula. 2 for what a likelihood's partial fixes.
    "`Any` and `object` annotations": 482,
    # Noise follows from a bound that one object states, so few places may name the two numbers.
    "files that name l2_norm_clip": 8,
    "files that name noise_multiplier": 12,  # TensorBoard shows it.
    "functions that read l2_norm_clip": 0,
    "functions that read noise_multiplier": 3,  # The optimizer's, a plan's, and TensorBoard.
    # What an infinite bound means is decided once, in `Clip.is_off`; the rest asks that.
    "places that test whether a clip is infinite": 1,
    "files that ask whether a clip is off": 6,
    # An auditor reads these, and no other, to see what happens to a record. More than 8, since rows,
    # pair, twin, density, sum, moments, clip, total, mean and noise are an idea each.
    "files on a record's path": 10,
    # Who understands a file needs those below it, and no other; a type is understood as well.
    "imports against the order": 0,
    "circles": 0,
    # Of a file that no other looks into, everything but the public names may change.
    "private names of other files": 0,
    # Those change without notice; `_tf.py` alone has some, each with a test that says when it goes.
    "private names of TensorFlow and Keras": 0,
    # What a method does is read on every rung.
    "classes on the ladder of DPVI": 4,
    "classes on the ladder of DPVAE": 4,
    # What can change together must be thought of together.
    "mutable fields of one object": 8,
    # One thought a line, and lines that fit beside another page.
    "lines over 100 columns": 0,
    "assignments of more than two names": 0,
    # A value that cannot be missing has a type that says so.
    "asserts that something is not None": 0,
    # A caller must not read the code to learn what to pass.
    "public functions without Args": 0,
    # What no user is shown, no user needs: it gets an example, guide or benchmark, or goes.
    "names and options without an example": 0,
    # Users read the words of the field.
    "words against the style": 0,
}
# See "Words" in CONTRIBUTING.md: docstrings begin with verbs or noun phrases, and use terms of the
# field.
OPENINGS = ("What", "Whether", "Of", "As", "How", "Where", "Why")
IMAGES = re.compile(
    r"\b(the books|begun|ways? out|made[- ]up|somebody|nobody|is had|out of sight"
    r"|(nothing|no steps) (was|were) (spent|granted))\b",
    re.IGNORECASE,
)

# The files that compute between a record and the update of `DPVI` with the clip that it has by
# default, in order; a test follows them in the traced graphs.
RECORD_PATH = (
    "training/distribution.py",
    "calibrated/pairing.py",
    "calibrated/twins.py",
    "bayes/model.py",
    "gradients/vmap.py",
    "calibrated/clip.py",
    "gradients/clip.py",
    "training/mechanism.py",
    "optimizers/dp_keras.py",
    "_random.py",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A source file.

    Attributes:
      path: relative to the package, with slashes.
      name: as imported.
      lines: of text.
      tree: its syntax.
    """

    path: str
    name: str
    lines: list[str]
    tree: ast.Module

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree, walked once for all figures."""
        return list(ast.walk(self.tree))

    @property
    def room(self) -> str:
        """The package or module of the top level that has it; empty for the package's own face."""
        return self.name.split(".")[1] if "." in self.name else ""

    def at(self, line: int) -> str:
        """Returns where something is, for a report."""
        return f"{self.path}:{line}"


Finding = tuple[str, str]
"""Where, and what."""


def modules(package: pathlib.Path = PACKAGE) -> list[Module]:
    """Reads every source file of a package."""
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = (package.name, *path.relative_to(package).with_suffix("").parts)
        text = path.read_text(encoding="utf-8")
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(
            Module(path.relative_to(package).as_posix(), name, text.splitlines(), ast.parse(text))
        )
    return found


# ------------------------------------------------------------------ imports


@functools.cache
def imports(module: Module) -> list[tuple[int, str, str | None]]:
    """Returns line, module and name of each import, lazy ones too.

    The name is None for `import module`.
    """
    return list(_imports(module))


def _imports(module: Module) -> Iterator[tuple[int, str, str | None]]:
    here = module.name.split(".")
    here = here if module.path.endswith("__init__.py") else here[:-1]
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, source, alias.name
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value, None


def _own_imports(module: Module, package: str) -> Iterator[tuple[int, str, str]]:
    """Yields line, full name and room of each import from the same package."""
    for line, source, name in imports(module):
        full = f"{source}.{name}" if name else source
        if source.split(".")[0] == package and full != f"{package}.__version__":
            yield line, full, full.split(".")[1] if "." in full else ""


def against_order(found: list[Module]) -> list[Finding]:
    """Returns imports of what is not below, and of libraries that only `_tf.py` imports.

    The package's own face is below nothing.
    """
    package, rank = found[0].name.split(".")[0], {room: place for place, room in enumerate(ORDER)}
    wrong = []
    for module in found:
        if not module.room:
            continue
        if module.room not in rank:
            wrong.append((module.at(1), f"{module.room} has no place in ORDER"))
            continue
        for line, full, other in _own_imports(module, package):
            if other not in rank:
                wrong.append((module.at(line), f"imports {full}, which has no place in ORDER"))
            elif rank[other] > rank[module.room] or other in STRANGERS.get(module.room, ()):
                wrong.append(
                    (module.at(line), f"{module.room} imports {full}, which is not below it")
                )
        for line, source, name in imports(module):
            full = f"{source}.{name or ''}"
            if source.split(".")[0] == "tensorflow_privacy":
                wrong.append((module.at(line), "imports TensorFlow Privacy, which is not needed"))
            elif source.split(".")[0] in TENSORFLOW and module.room != "_tf":
                wrong.append(
                    (
                        module.at(line),
                        f"imports {full.rstrip('.')}: take tf, tfp and keras from tfp_dpvi._tf",
                    )
                )
        for node in module.nodes:
            if (
                module.room != "_tf"
                and isinstance(node, ast.Attribute)
                and ast.unparse(node) == "tf.keras"
            ):
                wrong.append(
                    (module.at(node.lineno), "names tf.keras: take keras from tfp_dpvi._tf")
                )
    return wrong


def circles(found: list[Module]) -> list[Finding]:
    """Returns sets of modules that import one another, imports for types and lazy ones too.

    The package's own face is left out: it imports everything, for types and on first use.
    """
    package, names = found[0].name.split(".")[0], {module.name for module in found}
    graph: dict[str, set[str]] = {}
    for module in found:
        targets = (full for _, full, _ in _own_imports(module, package) if module.room)
        graph[module.name] = {
            full if full in names else full.rpartition(".")[0] for full in targets
        } - {module.name}
    reached = {name: _reached(graph, name) for name in graph}
    knots = {
        tuple(sorted(other for other in reached[name] if name in reached.get(other, ())))
        for name in graph
    }
    return [
        (knot[0], f"{len(knot)} modules: {' -> '.join(_round_trip(graph, knot[0]))}")
        for knot in sorted(knots)
        if knot
    ]


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """Returns all that lies behind the arrows from a start; the start itself only on a circle."""
    reached: set[str] = set()
    rest = list(graph[start])
    while rest:
        name = rest.pop()
        if name not in reached:
            reached.add(name)
            rest.extend(graph.get(name, ()))
    return reached


def _round_trip(graph: dict[str, set[str]], start: str) -> tuple[str, ...]:
    """Returns a shortest way from a module on a circle back to itself."""
    trails = [(start,)]
    for trail in trails:  # Grows while it is read: breadth first.
        for other in sorted(graph.get(trail[-1], ())):
            if other == start:
                return (*trail, start)
            if other not in trail:
                trails.append((*trail, other))
    raise AssertionError(f"{start} is on no circle")


# ------------------------------------------------------------------ private names


def _is_private(name: str) -> bool:
    return (
        name.startswith("_")
        and not name.startswith("__")
        and name not in ("_", "_fields", "_asdict", "_replace")
    )


def _private_uses(module: Module) -> Iterator[tuple[ast.AST, str, str]]:
    """Yields node, owner and name of each private attribute that is read or written.

    Names in strings count: those of `getattr(x, "_name")`, `vars(x)["_name"]` and
    `x.__dict__.get("_name")`.
    """
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            yield node, ast.unparse(node.value), node.attr
        for part in _strings_that_name_attributes(node):
            if isinstance(part, ast.Constant) and _is_private(str(part.value)):
                yield part, "", str(part.value)


def _strings_that_name_attributes(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        if called in ("getattr", "setattr", "hasattr", "delattr"):
            return list(node.args[1:2])
        if called.endswith(("attrgetter", "methodcaller", "__dict__.get", "__dict__.pop")):
            return list(node.args)
    if isinstance(node, ast.Subscript) and re.search(r"__dict__$|^vars\(", ast.unparse(node.value)):
        return [node.slice]
    return []


@dataclasses.dataclass(frozen=True, eq=False)
class Class:
    """A class of the package.

    Attributes:
      module: where it is defined.
      node: its definition.
      names: of its methods and fields, and of what its methods assign to `self`.
    """

    module: Module
    node: ast.ClassDef
    names: frozenset[str]

    @property
    def place(self) -> str:
        """Returns where it is, with its name."""
        return f"{self.module.path} {self.node.name}"


class Classes:
    """Every class of a package, with its bases of the package, resolved across files."""

    def __init__(self, found: list[Module]) -> None:
        self._modules = {module.name: module for module in found}
        self.by_node: dict[ast.ClassDef, Class] = {
            node: Class(module, node, frozenset(_names_of_class(node)))
            for module in found
            for node in module.nodes
            if isinstance(node, ast.ClassDef)
        }
        self._bound = {module.name: dict(_bindings(module)) for module in found}
        self._bases = {
            own: [self._resolve(own.module.name, base) for base in own.node.bases]
            for own in self.by_node.values()
        }

    def _resolve(self, module: str, expression: ast.AST, depth: int = 0) -> Class | str:
        """Returns the package's class that an expression names, or the expression in words."""
        words = ast.unparse(expression)
        if isinstance(expression, ast.Subscript):  # Generic[X].
            return self._resolve(module, expression.value, depth)
        first, _, rest = words.partition(".")
        bound = self._bound.get(module, {}).get(first)
        if bound is None or depth > 20:
            return words
        if isinstance(bound, ast.ClassDef):
            return self.by_node[bound] if not rest else words
        if isinstance(bound, ast.AST):  # X = Y.
            whole = ast.parse(f"{ast.unparse(bound)}.{rest}" if rest else ast.unparse(bound))
            return self._resolve(module, whole.body[0].value, depth + 1)
        path = [part for part in (*bound.split("."), *rest.split(".")) if part]
        for cut in range(len(path) - 1, 0, -1):
            source = ".".join(path[:cut])
            if source in self._modules:
                inner = ast.parse(".".join(path[cut:])).body[0].value
                return self._resolve(source, inner, depth + 1)
        return ".".join(path)

    def ladder(self, own: Class) -> list[Class]:
        """Returns a class and its ancestors within the package."""
        rungs = [own]
        for rung in rungs:  # Grows while it is read.
            above = [base for base in self._bases[rung] if isinstance(base, Class)]
            rungs.extend(base for base in above if base not in rungs)
        return rungs

    def foreign_bases(self, own: Class) -> list[str]:
        """Returns the bases of a class and its ancestors that the package does not define."""
        return [
            base for rung in self.ladder(own) for base in self._bases[rung] if isinstance(base, str)
        ]

    def named(self, name: str) -> list[Class]:
        """Returns the classes of a name."""
        return [own for own in self.by_node.values() if own.node.name == name]


def _bindings(module: Module) -> Iterator[tuple[str, ast.AST | str]]:
    """Yields names of a module's top level with classes, assigned values, and paths of imports."""
    rest: list[ast.AST] = list(module.tree.body)
    while rest:
        node = rest.pop(0)
        if isinstance(node, ast.ClassDef):
            yield node.name, node
        elif isinstance(node, (ast.If, ast.Try)):
            rest[:0] = [*node.body, *node.orelse]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if ast.unparse(node.value) != node.targets[0].id:
                yield node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield ast.unparse(node.target), node.value
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from _bound_by_import(module, node)


def _bound_by_import(
    module: Module, node: ast.Import | ast.ImportFrom
) -> Iterator[tuple[str, str]]:
    sources = {line: source for line, source, _ in imports(module)}
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, f"{sources[node.lineno]}.{alias.name}"
        else:
            whole = alias.name if alias.asname else alias.name.split(".")[0]
            yield alias.asname or whole, whole


def _names_of_class(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield statement.name
        else:
            for part in ast.walk(statement):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    yield part.id
    yield from (part.attr for part in ast.walk(node) if _is_stored_on_self(part))


def _is_stored_on_self(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) in ("self", "cls")
    )


def _private_definitions(module: Module) -> set[str]:
    """Returns private names of functions, classes, fields and variables of a file."""
    names: set[str] = set()
    for node in module.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif _is_stored_on_self(node):
            names.add(node.attr)
    return set(filter(_is_private, names))


def private_names(found: list[Module]) -> tuple[list[Finding], list[Finding]]:
    """Returns private names that a file uses of other files, each once, and those of TensorFlow.

    A private name belongs to the file that defines it. `self._x` belongs to the class and to its
    relatives of the same file, so that neither a base class reads what a subclass of another file
    defines, nor the other way round, nor does a subclass override it. A private *module* belongs to
    its folder: `tfp_dpvi._tf` is everybody's within `tfp_dpvi`.
    """
    package, classes = found[0].name.split(".")[0], Classes(found)
    defined = {module.path: _private_definitions(module) for module in found}
    reached, foreign = _private_imports(found, package)
    known: set[tuple[str, str]] = set()
    for module in found:
        enclosing = _enclosing_classes(module, classes)
        for node, owner, name in _private_uses(module):
            if module.room == "_tf" or name in OF_OTHERS:
                continue
            own = enclosing.get(node) if owner in ("self", "cls", "super()") else None
            here = _names_of_family(own, classes) if own is not None else defined[module.path]
            owners = [path for path, names in defined.items() if name in names]
            others = [path for path in owners if path != module.path]
            place = module.at(getattr(node, "lineno", 1))
            if name not in here and others and (module.path, name) not in known:
                known.add((module.path, name))
                reached.append((place, f"uses {name}, of {' or '.join(others)}"))
            elif name not in here and not owners and not isinstance(node, ast.Constant):
                foreign.append((place, f"uses .{name}"))
    for own in classes.by_node.values():
        for base in classes.ladder(own)[1:]:
            shared = filter(_is_private, own.names & base.names - EXTENSION_POINTS)
            for name in sorted(shared if base.module is not own.module else ()):
                place = own.module.at(own.node.lineno)
                reached.append((place, f"overrides {name}, of {base.module.path}"))
    return reached, foreign


def _private_imports(found: list[Module], package: str) -> tuple[list[Finding], list[Finding]]:
    modules_of_package = {module.name for module in found}
    reached, foreign = [], []
    for module in found:
        folder = (
            module.name if module.path.endswith("__init__.py") else module.name.rpartition(".")[0]
        )
        for line, source, name in imports(module):
            full = f"{source}.{name}" if name else source
            parts = full.split(".")
            if parts[0] != package:
                if module.room != "_tf" and (
                    parts[:2] == ["tensorflow", "python"] or any(map(_is_private, parts))
                ):
                    foreign.append((module.at(line), f"imports {full}"))
                continue
            hidden = next((i for i, part in enumerate(parts) if _is_private(part)), None)
            if hidden is None:
                continue
            home = ".".join(parts[:hidden])
            is_module = ".".join(parts[: hidden + 1]) in modules_of_package
            is_near = is_module and f"{folder}.".startswith(f"{home}.")
            if not is_near or any(map(_is_private, parts[hidden + 1 :])):
                reached.append((module.at(line), f"imports {full}"))
    return reached, foreign


def _enclosing_classes(module: Module, classes: Classes) -> dict[ast.AST, Class]:
    """Returns the innermost class of each node that lies in one."""
    enclosing: dict[ast.AST, Class] = {}
    for node in module.nodes:  # Breadth first, so that inner classes come after outer ones.
        if isinstance(node, ast.ClassDef):
            enclosing |= dict.fromkeys(ast.walk(node), classes.by_node[node])
    return enclosing


def _names_of_family(own: Class, classes: Classes) -> frozenset[str]:
    """Returns the names of a class and of its relatives in the same file."""
    relatives = [
        other
        for other in classes.by_node.values()
        if other.module is own.module
        and (own in classes.ladder(other) or other in classes.ladder(own))
    ]
    return frozenset().union(*(other.names for other in relatives))


# ------------------------------------------------------------------ sizes and names


@functools.cache
def functions(
    module: Module,
) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, list[ast.AST]]]:
    """Returns qualified name, definition and nodes of every function.

    The nodes are those that lie in no function within it.
    """

    def walk(
        node: ast.AST, prefix: str, owner: list[ast.AST]
    ) -> Iterator[tuple[str, ast.FunctionDef, list[ast.AST]]]:
        for child in ast.iter_child_nodes(node):
            owner.append(child)
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                own: list[ast.AST] = []
                yield from walk(child, f"{prefix}{child.name}.", own)
                yield f"{prefix}{child.name}", child, own
            else:
                yield from walk(
                    child,
                    f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix,
                    owner,
                )

    return list(walk(module.tree, "", []))


def _length(node: ast.AST) -> int:
    """Counts the lines of a function without its docstring, which is to say more, not less."""
    first = node.body[0]
    said = (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )
    docstring = (first.end_lineno or 0) - first.lineno + 1 if said else 0
    return (node.end_lineno or 0) - node.lineno + 1 - docstring


def code_lines(module: Module) -> int:
    """Counts lines that are not blank, nor comments, nor docstrings."""
    quoted: set[int] = set()
    for node in module.nodes:
        first = (
            node.body[0]
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and node.body
            else None
        )
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            quoted |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    plain = (line for number, line in enumerate(module.lines, 1) if number not in quoted)
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in plain)


def vague_types(module: Module) -> int:
    """Counts every `Any` outside import lines, and every `object` in an annotation.

    What `tfd: Any = tfp.distributions` hides counts too: each use of such a name.
    """
    hiding = _names_of_any(module)
    count = 0
    for node in module.nodes:
        if isinstance(node, ast.Name):
            count += node.id == "Any" or (node.id in hiding and isinstance(node.ctx, ast.Load))
        notes = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        for note in filter(None, notes):
            count += sum(
                isinstance(part, ast.Name) and part.id == "object" for part in ast.walk(note)
            )
    return count


def _names_of_any(module: Module) -> set[str]:
    """Returns names of a module's top level that are declared `Any`, or stand for part of TFP."""
    names = set()
    for node in module.tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "Any":
            names.add(ast.unparse(node.target))
        elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("tfp."):
            names.add(ast.unparse(node.targets[0]))
    return names


def naming_files(found: list[Module], wanted: str) -> list[Finding]:
    """Returns files in which a name is an identifier, argument, attribute, keyword or field."""

    def names(node: ast.AST) -> bool:
        return wanted in (getattr(node, field, None) for field in ("id", "arg", "attr", "name"))

    return [(module.path, wanted) for module in found if any(map(names, module.nodes))]


def readers(found: list[Module], wanted: str) -> list[Finding]:
    """Returns functions outside `privacy` that read a value's attribute to compute with it.

    An object's own methods (`self.noise_multiplier`) and the configurations that are saved are left
    out; so is `privacy`, which prices and reports what it is told.
    """
    result = []
    for module in found:
        for name, function, nodes in functions(module):
            reads = any(
                isinstance(node, ast.Attribute)
                and node.attr == wanted
                and isinstance(node.ctx, ast.Load)
                and ast.unparse(node.value) != "self"
                for node in nodes
            )
            if reads and module.room != "privacy" and not name.endswith("get_config"):
                result.append((module.at(function.lineno), f"{name} reads .{wanted}"))
    return result


def wordy(found: list[Module]) -> list[Finding]:
    """Returns docstrings that open with one of `OPENINGS`, and lines with one of `IMAGES`."""
    wrong = []
    for module in found:
        for node in module.nodes:
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                first = (ast.get_docstring(node) or "-").split()[0]
                if first.rstrip(",.:") in OPENINGS:
                    wrong.append(
                        (module.at(getattr(node, "lineno", 1)), f"the docstring opens with {first}")
                    )
        for number, line in enumerate(module.lines, 1):
            if found_image := IMAGES.search(line):
                wrong.append((module.at(number), f"has {found_image[0]!r}"))
    return wrong


# ------------------------------------------------------------------ a model and its state


def rungs(found: list[Module], name: str) -> list[Finding]:
    """Returns the package's classes on the ladder of a class, and Keras's Model at its foot."""
    classes = Classes(found)
    [own] = classes.named(name)
    places = [(rung.module.path, rung.node.name) for rung in classes.ladder(own)]
    keras = [base for base in classes.foreign_bases(own) if base.endswith(".Model")]
    return places + [("keras", "Model") for _ in keras[:1]]


def mutable_fields(found: list[Module]) -> list[tuple[int, str, str]]:
    """Returns number, place and class of the fields that change, of each object of a model's state.

    The state is every class of STATE_ROOMS that is no Keras class. All fields of a dataclass that is
    not frozen count; of another class, those that are assigned after `__init__`, from outside too.
    """
    classes = Classes(found)
    counted = []
    assigned_elsewhere = {
        node.attr
        for module in found
        for node in module.nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and not _is_stored_on_self(node)
    }
    for own in classes.by_node.values():
        foreign = " ".join(classes.foreign_bases(own))
        if own.module.room not in STATE_ROOMS or "Model" in foreign or "Layer" in foreign:
            continue
        names = set().union(*(_fields(rung, assigned_elsewhere) for rung in classes.ladder(own)))
        place = own.module.at(own.node.lineno)
        counted.append((len(names), place, f"{own.node.name}: {', '.join(sorted(names))}"))
    return sorted(counted, reverse=True)


def _fields(own: Class, assigned_elsewhere: set[str]) -> set[str]:
    """Returns the fields of one class that change after it was made."""
    decorators = [ast.unparse(decorator) for decorator in own.node.decorator_list]
    dataclass = next((text for text in decorators if "dataclass" in text), None)
    if dataclass is not None:
        declared = (node for node in own.node.body if isinstance(node, ast.AnnAssign))
        fields = {
            ast.unparse(n.target) for n in declared if "ClassVar" not in ast.unparse(n.annotation)
        }
        return set() if "frozen=True" in dataclass else fields
    changed, made = set(), set()
    for method in own.node.body:
        if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
            stored = {part.attr for part in ast.walk(method) if _is_stored_on_self(part)}
            made |= stored
            changed |= stored if method.name != "__init__" else set()
    return changed | (made & assigned_elsewhere)


def tests_of_the_clip(found: list[Module]) -> list[Finding]:
    """Returns places that compare a clip's bound with infinity, whatever it is called there."""
    wrong = []
    for module in found:
        for name, function, nodes in functions(module):
            clips = _values_of_a_clip(function, nodes)
            for node in nodes:
                if any(_is_of_a_clip(part, clips) for part in _compared_with_infinity(node)):
                    wrong.append((module.at(node.lineno), f"{name}: {ast.unparse(node)}"))
    return wrong


def asking_files(found: list[Module]) -> list[Finding]:
    """Returns files that ask in any way whether a clip is off."""
    places = tests_of_the_clip(found)
    for module in found:
        for node in module.nodes:
            if isinstance(node, ast.Attribute) and node.attr == "is_off":
                places.append((module.at(node.lineno), "is_off"))
    paths = sorted({place.partition(":")[0] for place, _ in places})
    return [(path, f"{sum(p.startswith(f'{path}:') for p, _ in places)} places") for path in paths]


_CLIP = re.compile(r"(^|_)clip(_bound)?$|^bound$|l2_norm_clip")


def _is_of_a_clip(expression: ast.AST, clips: set[str]) -> bool:
    return any(
        _CLIP.search(getattr(part, "attr", getattr(part, "id", "")) or "")
        or (isinstance(part, ast.Name) and part.id in clips)
        for part in ast.walk(expression)
    )


def _values_of_a_clip(function: ast.AST, nodes: list[ast.AST]) -> set[str]:
    """Returns local names that a clip's bound was assigned to, alone or in a tuple."""
    clips: set[str] = set()
    for node in nodes:
        if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                plain = value.args[0] if isinstance(value, ast.Call) and value.args else value
                if isinstance(plain, (ast.Name, ast.Attribute)) and _is_of_a_clip(plain, clips):
                    clips.add(ast.unparse(name))
    return clips


def _compared_with_infinity(node: ast.AST) -> list[ast.AST]:
    """Returns what a node compares with infinity."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1].lower() in (
        "isinf", "isfinite", "is_inf", "is_finite", "isposinf",
    ):  # fmt: skip
        return list(node.args)
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        infinite = [ast.unparse(side) in INFINITIES for side in sides]
        return [
            side for side, is_it in zip(sides, infinite, strict=True) if not is_it and any(infinite)
        ]
    return []


# ------------------------------------------------------------------ air


def statements(module: Module) -> int:
    """Counts statements, docstrings left out: they are to grow."""
    quoted = sum(
        ast.get_docstring(node, clean=False) is not None
        for node in module.nodes
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    )
    return sum(isinstance(node, ast.stmt) for node in module.nodes) - quoted


def wide_lines(found: list[Module]) -> list[Finding]:
    """Returns lines of code, comments and docstrings over 100 columns."""
    return [
        (module.at(number), f"{len(line)} columns")
        for module in found
        for number, line in enumerate(module.lines, 1)
        if len(line) > 100
    ]


def crowded_assignments(found: list[Module]) -> list[Finding]:
    """Returns assignments of more than two names at once."""
    wrong = []
    for module in found:
        for node in module.nodes:
            for target in node.targets if isinstance(node, ast.Assign) else ():
                if _num_names(target) > 2:
                    wrong.append((module.at(node.lineno), ast.unparse(target)))
    return wrong


def asserted_values(found: list[Module]) -> list[Finding]:
    """Returns assertions that something is not None."""
    wrong = []
    for module in found:
        for node in module.nodes:
            tests = ast.walk(node.test) if isinstance(node, ast.Assert) else ()
            for test in tests:
                is_none = isinstance(test, ast.Compare) and any(
                    isinstance(each, ast.Constant) and each.value is None
                    for each in test.comparators
                )
                if is_none:
                    wrong.append((module.at(node.lineno), ast.unparse(test)))
    return wrong


def _num_names(target: ast.AST) -> int:
    if isinstance(target, (ast.Tuple, ast.List)):
        return sum(map(_num_names, target.elts))
    return 1


def public_functions(module: Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yields functions and methods of public classes whose names have no underscore in front."""
    for name, function, _ in functions(module):
        owners = name.split(".")[:-1]
        inside = any(
            isinstance(node, ast.FunctionDef) and node.name in owners for node in module.nodes
        )
        if not any(part.startswith("_") for part in name.split(".")) and not inside:
            yield name, function


def parameters(function: ast.FunctionDef) -> list[str]:
    """Returns the names of a function's parameters without `self`."""
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    stars = [star for star in (function.args.vararg, function.args.kwarg) if star is not None]
    return [part.arg for part in (*every, *stars) if part.arg not in ("self", "cls")]


def without_args(found: list[Module]) -> list[Finding]:
    """Returns public functions of more than one parameter whose docstring has no `Args:` section.

    Left out are methods that say whose they override ("See `DPModel.compile`.") and overloads.
    """
    wrong = []
    for module in found:
        for name, function in public_functions(module):
            said = ast.get_docstring(function) or ""
            refers = said.startswith("See `")
            refers |= any("over" in ast.unparse(part) for part in function.decorator_list)
            if len(parameters(function)) > 1 and "Args:" not in said and not refers:
                wrong.append((module.at(function.lineno), name))
    return wrong


# ------------------------------------------------------------------ what users are shown


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Exported(NamedTuple):
    """A public name.

    Attributes:
      place: The file and line of its definition.
      options: Its parameters with a default, of a function or of a class's constructor or fields.
      has_fields: Whether they are the fields of a dataclass.
      has_example: Whether its own docstring has an example that runs.
    """

    place: str
    options: list[str]
    has_fields: bool
    has_example: bool


def exported(found: list[Module]) -> dict[str, Exported]:
    """Returns the names that packages export in `__all__`.

    Modules of the top level do so too; one without `__all__` exports all that it defines without an
    underscore in front.
    """
    classes, by_name = Classes(found), {module.name: module for module in found}
    result: dict[str, Exported] = {}
    for module in found:
        if module.name.count(".") != 1 or module.room.startswith("_"):
            continue
        for name in _all_of(module) or _defined_by(module):
            home, node = _definition(module, name, by_name)
            if node is not None:
                has_fields = isinstance(node, ast.ClassDef) and _is_dataclass(classes.by_node[node])
                documented = isinstance(node, _DOCUMENTED)
                said = (ast.get_docstring(node) or "") if documented else ""
                result[f"{module.name}.{name}"] = Exported(
                    home.at(node.lineno), _options(node, classes), has_fields, ">>> " in said
                )
    return result


def _all_of(module: Module) -> list[str]:
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def _defined_by(module: Module) -> list[str]:
    return [
        node.name
        for node in module.tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    ]


def _definition(
    module: Module, name: str, by_name: dict[str, Module]
) -> tuple[Module, ast.AST | None]:
    """Returns the file and the definition that a module's name leads to, through imports."""
    for node in module.tree.body:
        if getattr(node, "name", None) == name:
            return module, node
        targets = [*getattr(node, "targets", ()), getattr(node, "target", None)]
        if name in [ast.unparse(target) for target in targets if target is not None]:
            return module, node
    for _, source, imported in imports(module):
        if imported == name and source in by_name and source != module.name:
            return _definition(by_name[source], name, by_name)
    return module, None


def _options(node: ast.AST, classes: Classes) -> list[str]:
    if isinstance(node, ast.ClassDef):
        options = []
        for rung in classes.ladder(classes.by_node[node]):
            for statement in rung.node.body:
                if getattr(statement, "name", "") == "__init__":
                    return options + _options(statement, classes)
                if isinstance(statement, ast.AnnAssign) and statement.value is not None:
                    is_field = "ClassVar" not in ast.unparse(statement.annotation)
                    options += [ast.unparse(statement.target)] * (is_field and _is_dataclass(rung))
        return [name for name in options if not name.startswith("_")]
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return []
    every = [*node.args.posonlyargs, *node.args.args]
    with_default = every[len(every) - len(node.args.defaults) :]
    keywords = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    return [part.arg for part in (*with_default, *(k for k, default in keywords if default))]


def _is_dataclass(own: Class) -> bool:
    return any("dataclass" in ast.unparse(part) for part in own.node.decorator_list)


def doctest_code(text: str) -> str:
    """Returns the code lines of a text's doctests; prose and results are left out."""
    parser = doctest.DocTestParser()
    return "".join(example.source for example in parser.get_examples(text))


def examples_in_docstrings(found: list[Module]) -> str:
    """Returns the code of all examples in docstrings, which tests/test_doctests.py runs."""
    return "".join(
        doctest_code(ast.get_docstring(node) or "")
        for module in found
        for node in ast.walk(module.tree)
        if isinstance(node, _DOCUMENTED)
    )


@functools.cache
def shown_to_users() -> str:
    """Returns guides, examples and benchmarks as one text; lists of all names are left out."""
    pages = [
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "docs").rglob("*.ipynb")),
        ROOT / "README.md",
        *sorted((ROOT / "examples").rglob("*.py")),
        *sorted((ROOT / "benchmarks").rglob("*.py")),
    ]
    lists = (ROOT / "docs" / "api.md", DRAWING)
    return "\n".join(page.read_text(encoding="utf-8") for page in pages if page not in lists)


def unshown(found: list[Module], shown: str | None = None) -> list[Finding]:
    """Returns exported names and options that no guide, benchmark or runnable example has.

    A name counts as a word, or if its own docstring has an example; an option where it is set (`seed=`) or named as code. The fields of a
    dataclass are options if something shown constructs it: others the library constructs itself,
    and hands out to be read.
    """
    text = (shown_to_users() if shown is None else shown) + "\n" + examples_in_docstrings(found)
    words = set(re.findall(r"\w+", text))
    constructed = set(re.findall(r"(\w+)\(", text))
    settings = set(re.findall(r"(?<!\w)(\w+) ?=(?!=)", text)) | set(
        re.findall(r"[`'\"](\w+)[`'\"=]", text)
    )
    wrong = {}
    for name, public in exported(found).items():
        last = name.rpartition(".")[2]
        if last not in words and not public.has_example:
            wrong[public.place, last] = (public.place, name)
        if public.has_fields and last not in constructed:
            continue
        for option in public.options:
            if option not in settings:
                wrong[public.place, option] = (public.place, f"{name}({option}=)")
    return list(wrong.values())


# ------------------------------------------------------------------ the table


def measure(found: list[Module]) -> dict[str, tuple[int, list[Finding]]]:
    """Returns each figure of LIMITS, with the places that it counts (or those over the limit)."""
    sizes = sorted(((code_lines(module), module.path) for module in found), reverse=True)
    lengths = sorted(
        (
            (_length(node), module.at(node.lineno), name)
            for module in found
            for name, node, _ in functions(module)
        ),
        reverse=True,
    )
    vague = sorted(((vague_types(module), module.path) for module in found), reverse=True)
    private, foreign = private_names(found)
    longest = LIMITS["lines of code in the longest file"]
    function_limit = LIMITS["lines of the longest function"]
    fields = mutable_fields(found)
    figures: dict[str, tuple[int, list[Finding]]] = {
        "lines of code in the longest file": (
            sizes[0][0],
            [(p, f"{n} lines") for n, p in sizes if n > longest],
        ),
        "lines of the longest function": (
            lengths[0][0] if lengths else 0,
            [
                (place, f"{name} has {size} lines")
                for size, place, name in lengths
                if size > function_limit
            ],
        ),
        "statements": (
            sum(map(statements, found)),
            sorted((module.path, str(statements(module))) for module in found),
        ),
        "`Any` and `object` annotations": (
            sum(n for n, _ in vague),
            [(p, str(n)) for n, p in vague if n],
        ),
        "mutable fields of one object": (
            max((count for count, _, _ in fields), default=0),
            [(place, f"{count}, {what}") for count, place, what in fields if count],
        ),
        "files on a record's path": _counted([(path, "") for path in RECORD_PATH]),
        "imports against the order": _counted(against_order(found)),
        "circles": _counted(circles(found)),
        "private names of other files": _counted(private),
        "private names of TensorFlow and Keras": _counted(foreign),
        "places that test whether a clip is infinite": _counted(tests_of_the_clip(found)),
        "files that ask whether a clip is off": _counted(asking_files(found)),
        "lines over 100 columns": _counted(wide_lines(found)),
        "assignments of more than two names": _counted(crowded_assignments(found)),
        "asserts that something is not None": _counted(asserted_values(found)),
        "public functions without Args": _counted(without_args(found)),
        "names and options without an example": _counted(unshown(found)),
        "words against the style": _counted(wordy(found)),
    }
    for name in ("l2_norm_clip", "noise_multiplier"):
        figures[f"files that name {name}"] = _counted(naming_files(found, name))
        figures[f"functions that read {name}"] = _counted(readers(found, name))
    for name in ("DPVI", "DPVAE"):
        figures[f"classes on the ladder of {name}"] = _counted(rungs(found, name))
    return {name: figures[name] for name in LIMITS}


def _counted(places: list[Finding]) -> tuple[int, list[Finding]]:
    return len(places), places


# ------------------------------------------------------------------ the drawing


def draw(found: list[Module]) -> str:
    """Returns the packages as rows, each above its imports, with those that it has at first hand."""
    package = found[0].name.split(".")[0]
    below: dict[str, set[str]] = {module.room: set() for module in found if module.room}
    for module in found:
        if module.room:
            below[module.room] |= {other for _, _, other in _own_imports(module, package)} - {
                module.room,
                "",
            }
    reach: Callable[[str], set[str]] = lambda room: below.get(room, set()).union(  # noqa: E731
        *map(reach, below.get(room, ()))
    )
    width = max(map(len, below))
    lines = []
    for room in sorted(
        below, key=lambda room: ORDER.index(room) if room in ORDER else -1, reverse=True
    ):
        direct = below[room] - set().union(*map(reach, below[room]))
        shown = ", ".join(
            sorted(
                direct, key=lambda other: ORDER.index(other) if other in ORDER else -1, reverse=True
            )
        )
        lines.append(f"| {room:<{width}} |" + (f" --> {shown}" if shown else ""))
    rule = f"+{'-' * (width + 2)}+"
    return "\n".join([rule, *lines, rule])


def with_drawing(text: str, drawing: str) -> str:
    """Returns a page with the drawing between its marks."""
    begin, rest = text.split(MARKS[0])
    _, end = rest.split(MARKS[1])
    return f"{begin}{MARKS[0]}\n\n```text\n{drawing}\n```\n\n{MARKS[1]}{end}"


def main() -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="write the drawing into docs/architecture.md"
    )
    parser.add_argument("--places", action="store_true", help="list the places behind every figure")
    options = parser.parse_args()
    found = modules()
    if options.write:
        DRAWING.write_text(
            with_drawing(DRAWING.read_text(encoding="utf-8"), draw(found)), encoding="utf-8"
        )
    figures = measure(found)
    for name, (value, _) in figures.items():
        over = "   over" if value > LIMITS[name] else ""
        print(f"{name:<45} {value:>7,}  of {LIMITS[name]:>7,}{over}")
    print(f"{'of the lines, code':<45} {sum(map(code_lines, found)):>7,}")
    for name, (value, places) in figures.items():
        if places and (options.places or value > LIMITS[name]):
            print(f"\n{name}:")
            for place, what in places:
                print(f"  {place}  {what}")
    return int(any(value > LIMITS[name] for name, (value, _) in figures.items()))


if __name__ == "__main__":
    sys.exit(main())
