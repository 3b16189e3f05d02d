"""A private synthetic version of Adult, good enough to train a classifier on.

    python examples/synthetic_adult.py [--epsilon 1] [--delta 1e-5] [--repeats 1] [--sets 5] [--quick]
                                       [--output outputs/synthetic_adult]

A mixture is fitted to noisy counts of all pairs of columns of the 32,561 training records of UCI Adult, within each level of the
income label, and tables are sampled from it, each from its own posterior draw. A plain logistic regression is trained on them and
tested on the 16,281 real test records, and compared with one trained on synthetic records of the same mixture without privacy and
one trained on the real records. Pictures show the columns' marginals and the dependence of pairs of columns.

The description of the table is public: bounds and categories come from the code book. A private histogram chooses bins within
the same budget; comparisons and classifiers use public round numbers (`measured_by`). Two attributes are left out: fnlwgt, the
survey's weights, and education-num, which repeats education. "?" in the files is a missing value here.

Rubin's rules give intervals for estimates from several synthetic tables; the script prints how many contain the real value.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pathlib
import platform
import time
from typing import Any

import numpy as np
from data import load_adult

import tfp_dpvi as dpvi
from tfp_dpvi._tf import keras, tf, tfp
from tfp_dpvi.data import Binary, Categorical, Integer, Schema

NUM_TRAIN = 32561  # The published split: adult.data, then adult.test.
LEFT_OUT = ("fnlwgt", "education-num")
LABEL = "over-50K"

NUMBERS = {
    "age": Integer(17, 90),
    "capital-gain": Integer(0, 99999),
    "capital-loss": Integer(0, 4999),
    "hours-per-week": Integer(1, 99),
}
MEASURED_BY = {
    "age": Integer(17, 90, bins=15),
    "capital-gain": Integer(0, 99999, bins=[1, 2000, 4000, 5000, 7000, 10000, 15000]),
    "capital-loss": Integer(0, 4999, bins=[1, 1500, 1800, 2000, 2500]),
    "hours-per-week": Integer(1, 99, bins=[15, 25, 35, 40, 41, 50, 51, 60, 61, 80]),
}

SETTINGS: dict[
    str, Any
] = {}  # The defaults, which were chosen on these records; they are public, so that cost no budget.
QUICK = {"num_components": 8, "steps": 200}
QUICK_RECORDS = 8000


def load() -> tuple[Schema, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns the description, the training records and the test records, as dicts of columns."""
    ordinal, one_hot = load_adult(), load_adult("one_hot")
    names = [name.partition("=") for name in one_hot.feature_names]
    columns: dict[str, Any] = {}
    data: dict[str, np.ndarray] = {}
    for place, name in enumerate(ordinal.feature_names):
        if name in LEFT_OUT:
            continue
        values = ordinal.x[:, place]
        if name in NUMBERS:
            columns[name], data[name] = NUMBERS[name], values.astype(np.int64)
            continue
        published = [category for column, _, category in names if column == name]
        categories = [category for category in published if category != "?"]
        coded = np.array([None if category == "?" else category for category in published], object)
        columns[name], data[name] = (
            Categorical(categories, missing="?" in published),
            coded[values.astype(int)],
        )
    columns[LABEL], data[LABEL] = Binary(), ordinal.y.astype(bool)
    train = {name: column[:NUM_TRAIN] for name, column in data.items()}
    test = {name: column[NUM_TRAIN:] for name, column in data.items()}
    return Schema(columns), train, test


def measured_by(schema: Schema) -> Schema:
    """Returns the schema with the public bins by which tables are compared."""
    return Schema({name: MEASURED_BY.get(name, column) for name, column in schema.columns.items()})


def as_frame(data: dict[str, np.ndarray]) -> Any:
    """Returns a pandas DataFrame if pandas is installed, else a dict of columns."""
    try:
        import pandas
    except ImportError:
        return data
    return pandas.DataFrame(data)


def fit(schema: Schema, data: Any, **settings: Any) -> dpvi.Synthesizer:
    settings = dict(settings)
    synthesizer = dpvi.Synthesizer(schema, settings.pop("num_components", 64), target=LABEL)
    return synthesizer.fit(data, **settings)


# ---------------------------------------------------------------------- a classifier


def design(schema: Schema, data: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns indicators of each column's level, [n, levels] (all zero for missing values), and labels [n]."""
    codes = schema.encode(data)
    parts = [
        codes[:, place, None] == np.arange(column.num_levels)
        for place, (name, column) in enumerate(schema.columns.items())
        if name != LABEL
    ]
    return np.concatenate(parts, axis=1).astype("float32"), codes[:, schema.names.index(LABEL)]


def train_classifier(schema: Schema, data: Any, epochs: int) -> Any:
    """Trains a plain logistic regression in Keras; returns weights [levels, 1] and the intercept [1]."""
    x, y = design(schema, data)
    model = keras.Sequential(
        [keras.Input([x.shape[1]]), keras.layers.Dense(1, activation="sigmoid")]
    )
    steps = epochs * math.ceil(len(x) / 256)
    rate = keras.optimizers.schedules.CosineDecay(0.02, steps)
    model.compile(keras.optimizers.Adam(rate), "binary_crossentropy")
    model.fit(x, y, batch_size=256, epochs=epochs, verbose=0)
    return model.get_weights()


def test_accuracy(schema: Schema, data: Any, test: Any, epochs: int) -> float:
    """Returns the accuracy on real test records of a classifier trained on `data`."""
    x, y = design(schema, test)
    weights, intercept = train_classifier(schema, data, epochs)
    return float(np.mean(((x @ weights + intercept)[:, 0] > 0.0) == y))


# ---------------------------------------------------------------------- comparison of tables


def counts(schema: Schema, data: Any) -> dict[str, np.ndarray]:
    """Returns, for each column, the fractions of its levels and of missing values."""
    codes = schema.encode(data)
    shares = {}
    for place, (name, column) in enumerate(schema.columns.items()):
        levels = column.num_levels
        found = np.bincount(
            np.where(codes[:, place] < 0, levels, codes[:, place]), minlength=levels + 1
        )
        shares[name] = found / len(codes)
    return shares


def joint_shares(schema: Schema, data: Any, order: int = 2) -> dict[tuple[str, ...], np.ndarray]:
    """Returns, for each pair of columns, the fractions of pairs of levels; of triples for `order` 3."""
    codes = schema.encode(data)
    levels = [column.num_levels + 1 for column in schema.columns.values()]
    codes = codes % levels  # -1 is the last level.
    shares = {}
    for places in itertools.combinations(range(len(levels)), order):
        shape = [levels[place] for place in places]
        flat = np.ravel_multi_index([codes[:, place] for place in places], shape)
        found = np.bincount(flat, minlength=math.prod(shape)).reshape(shape)
        shares[tuple(schema.names[place] for place in places)] = found / len(codes)
    return shares


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the total variation distance."""
    return float(0.5 * np.abs(one - other).sum())


def dependence(schema: Schema, data: Any) -> np.ndarray:
    """Returns Cramér's V of each pair of columns: 0 for independent ones, 1 if one determines the other."""
    found = np.eye(len(schema.names))
    for (one, other), shares in joint_shares(schema, data).items():
        expected = np.outer(shares.sum(1), shares.sum(0))
        chi2 = np.sum((shares - expected)[expected > 0] ** 2 / expected[expected > 0])
        ranks = min(np.count_nonzero(shares.sum(1)), np.count_nonzero(shares.sum(0))) - 1
        i, j = schema.names.index(one), schema.names.index(other)
        found[i, j] = found[j, i] = math.sqrt(chi2 / max(1, ranks))
    return found


def zeros(data: Any) -> float:
    """Returns the fraction of records without capital gain."""
    return float(np.mean(np.asarray(data["capital-gain"]) == 0))


def likeness(schema: Schema, real: Any, synthetic: Any) -> dict[str, float]:
    """Returns total variation (mean and maximum over columns, mean over pairs and triples) and the error of zeros."""
    marginals, others = counts(schema, real), counts(schema, synthetic)
    found = [distance(marginals[name], others[name]) for name in marginals]
    result = {"marginals": float(np.mean(found)), "worst_marginal": max(found)}
    if "capital-gain" in schema.names:
        result["zeros"] = zeros(synthetic) - zeros(real)
    for name, order in (("pairs", 2), ("triples", 3)):
        shares = joint_shares(schema, real, order)
        other = joint_shares(schema, synthetic, order)
        result[name] = float(np.mean([distance(shares[key], other[key]) for key in shares]))
    return result


def shuffled(data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the real columns, shuffled independently: exact marginals without dependence."""
    generator = np.random.default_rng(0)
    return {name: generator.permutation(column) for name, column in data.items()}


def estimates(data: Any) -> dict[str, tuple[float, float]]:
    """Returns estimates from a table and their variances."""
    column = {
        name: np.asarray(data[name])
        for name in ("sex", "age", "hours-per-week", "education", "marital-status")
    }
    rich = np.asarray(data[LABEL]).astype(float)
    women, bachelors = column["sex"] == "Female", column["education"] == "Bachelors"
    samples = {
        "over 50K": rich,
        "over 50K, women": rich[women],
        "over 50K, Bachelors": rich[bachelors],
        "Bachelors": bachelors.astype(float),
        "married": (column["marital-status"] == "Married-civ-spouse").astype(float),
        "mean age": column["age"].astype(float),
        "mean hours a week": column["hours-per-week"].astype(float),
    }
    return {
        name: (float(values.mean()), float(values.var() / len(values)))
        for name, values in samples.items()
    }


def combine(real: Any, sets: list[Any]) -> dict[str, dict[str, Any]]:
    """Applies Rubin's rules to synthetic tables; also returns the real value."""
    of_sets = [estimates(one) for one in sets]
    rows = {}
    for name, (value, _) in estimates(real).items():
        of_name = np.transpose([one[name] for one in of_sets])
        found = dpvi.synthetic.rubin(*of_name, means_or_shares=True)
        low, high = (float(end) for end in found.interval())
        rows[name] = {
            "real": value,
            "synthetic": float(found.estimate),
            "interval": [low, high],
            "holds": low <= value <= high,
        }
    return rows


# ---------------------------------------------------------------------- pictures


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw_marginals(schema: Schema, tables: dict[str, Any], title: str, path: Any) -> None:
    plt = _pyplot()
    shares = {label: counts(schema, data) for label, data in tables.items()}
    figure, axes = plt.subplots(4, 4, figsize=(15, 11), layout="constrained")
    for axis in axes.flat[len(schema.names) :]:
        axis.axis("off")
    for axis, (name, column) in zip(axes.flat, schema.columns.items(), strict=False):
        real = next(iter(shares.values()))[name]
        if isinstance(column, Categorical):
            order = np.argsort(-real[: column.num_levels])[:10]
            labels = [str(column.categories[level])[:14] for level in order]
        else:
            order = np.arange(column.num_levels)
            labels = (
                ["no", "yes"]
                if isinstance(column, Binary)
                else [f"{edge:g}" for edge in column.edges[:-1]]
            )
        if column.missing:
            order, labels = np.append(order, column.num_levels), [*labels, "missing"]
        width = 0.8 / len(shares)
        for number, (label, found) in enumerate(shares.items()):
            places = np.arange(len(order)) + (number - (len(shares) - 1) / 2) * width
            axis.bar(
                places, found[name][order], width, label=label, color=("0.6", "C0", "C1")[number]
            )
        axis.set_xticks(np.arange(len(order)), labels, rotation=60, ha="right", fontsize=7)
        more = (
            ""
            if not isinstance(column, Categorical) or column.num_levels <= 10
            else " (10 most frequent)"
        )
        axis.set_title(name + more, fontsize=10)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    axes.flat[-1].legend(handles, labels, loc="center", frameon=False, fontsize=12)
    figure.suptitle(title)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def draw_pairs(schema: Schema, tables: dict[str, Any], title: str, path: Any) -> None:
    plt = _pyplot()
    figure, axes = plt.subplots(1, len(tables), figsize=(16, 6), layout="constrained", sharey=True)
    for axis, (label, data) in zip(axes, tables.items(), strict=True):
        found = dependence(schema, data)
        image = axis.imshow(
            np.where(np.eye(len(found), dtype=bool), np.nan, found),
            vmin=0,
            vmax=0.6,
            cmap="viridis",
        )
        axis.set_xticks(range(len(schema.names)), schema.names, rotation=60, ha="right", fontsize=9)
        axis.set_yticks(range(len(schema.names)), schema.names, fontsize=9)
        axis.set_title(label)
    figure.colorbar(image, ax=axes, label="Cramér's V", shrink=0.8)
    figure.suptitle(title)
    figure.savefig(path, dpi=90)
    plt.close(figure)


# ---------------------------------------------------------------------- all of it


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        help="private fits, each with fresh noise, to see the spread",
    )
    parser.add_argument(
        "--sets", type=int, default=5, help="synthetic tables of each fit, at least 2"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few records, steps and components, to see that it runs",
    )
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("outputs/synthetic_adult")
    )
    options = parser.parse_args(arguments)
    begin = time.perf_counter()
    settings = {**SETTINGS, **QUICK} if options.quick else dict(SETTINGS)
    sets, epochs = (2, 3) if options.quick else (options.sets, 10)

    described, train, test = load()
    schema = measured_by(described)
    if options.quick:
        train = {name: column[:QUICK_RECORDS] for name, column in train.items()}
    num = len(train[LABEL])
    train, test = as_frame(train), as_frame(test)
    real = test_accuracy(schema, train, test, epochs)
    majority = 1.0 - float(np.mean(test[LABEL]))
    print(
        f"{NUM_TRAIN} training records, {len(schema.names)} columns; the larger class has {majority:.4f} of the test"
    )
    print(f"Trained on the real records: {real:.4f} on the real test records\n")

    fits, accuracies, combined = [], [], []
    for number in range(max(1, options.repeats)):
        started = time.perf_counter()
        synthesizer = fit(
            described, train, epsilon=options.epsilon, delta=options.delta, **settings
        )
        fit_seconds = time.perf_counter() - started
        synthetic = synthesizer.sample_many(sets)
        found = [test_accuracy(schema, one, test, epochs) for one in synthetic]
        fits.append((synthesizer, synthetic))
        accuracies.append(found)
        combined.append(combine(train, synthetic))
        print(
            f"Private fit {number + 1} ({fit_seconds:.0f} s): {', '.join(f'{a:.4f}' for a in found)} from each synthetic set"
        )
    started = time.perf_counter()
    without = fit(described, train, **settings, noise_multiplier=0.0)
    non_private = [test_accuracy(schema, one, test, epochs) for one in without.sample_many(sets)]
    print(
        f"Non-private ({time.perf_counter() - started:.0f} s): {', '.join(f'{a:.4f}' for a in non_private)}\n"
    )

    synthesizer, synthetic = fits[0]
    likenesses = {
        "private": likeness(schema, train, synthetic[0]),
        "non-private": likeness(schema, train, without.sample()),
        "columns shuffled": likeness(
            schema,
            train,
            as_frame(shuffled({name: np.asarray(train[name]) for name in schema.names})),
        ),
    }
    print(
        "Mean total variation to the real records, of columns, of pairs and of triples of columns"
    )
    for label, found_likeness in likenesses.items():
        shown = (f"{found_likeness[name]:.4f}" for name in ("marginals", "pairs", "triples"))
        print(f"  {label:<17} {'   '.join(shown)}")
    print(f"\nEstimates from {sets} synthetic tables, by Rubin's rules (95 % intervals)")
    for name, row in combined[0].items():
        low, high = row["interval"]
        print(
            f"  {name:<20} real {row['real']:8.4f}   synthetic {row['synthetic']:8.4f}   ({low:.4f} to {high:.4f})"
        )
    holding = float(np.mean([row["holds"] for rows in combined for row in rows.values()]))
    print(f"  {holding:.2f} of the intervals of all private fits contain the real value\n")
    report = synthesizer.privacy_report()
    print(f"{report}\n")

    options.output.mkdir(parents=True, exist_ok=True)
    named = {
        "real": train,
        f"synthetic, epsilon {options.epsilon:g}": synthetic[0],
        "synthetic, non-private": without.sample(),
    }
    draw_marginals(
        schema,
        named,
        f"Adult: marginals at epsilon {options.epsilon:g}, delta {options.delta:g}",
        options.output / "marginals.png",
    )
    draw_pairs(
        schema,
        named,
        "Adult: how strongly pairs of columns depend on each other",
        options.output / "pairs.png",
    )
    seconds = time.perf_counter() - begin
    private = float(np.mean(accuracies))
    result = {
        "private": private,
        "private_of_each_fit_and_set": accuracies,
        "non_private": float(np.mean(non_private)),
        "non_private_of_each_set": non_private,
        "real": real,
        "majority": majority,
        "epsilon": report.epsilon,
        "delta": report.delta,
        "seconds": seconds,
        "seconds_of_a_private_fit": fit_seconds,
        "total_variation": likenesses,
        "estimates": combined,
        "intervals_that_hold_the_real_value": holding,
        "settings": {
            **settings,
            "sets": sets,
            "repeats": options.repeats,
            "records": num,
            "classifier_epochs": epochs,
        },
        "privacy_report": report.to_json(),
        "versions": {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "tfp": tfp.__version__,
            "tfp_dpvi": dpvi.__version__,
        },
    }
    (options.output / "synthetic_adult.json").write_text(json.dumps(result, indent=1) + "\n")
    if hasattr(synthetic[0], "to_csv"):
        synthetic[0].to_csv(options.output / "synthetic_adult.csv", index=False)
    print(
        f"Pictures and figures: {options.output}/marginals.png, pairs.png, synthetic_adult.json, and one table as .csv"
    )
    print(
        f"synthetic_adult: private {private:.4f} non-private {result['non_private']:.4f} real {real:.4f} "
        f"epsilon {report.epsilon:.4f} delta {report.delta:g} seconds {seconds:.1f}"
    )
    return result


if __name__ == "__main__":
    main()
