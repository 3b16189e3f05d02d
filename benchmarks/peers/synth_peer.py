"""MST, AIM or DataSynthesizer on coded tables that `benchmarks/synthetic.py` wrote, in an environment of their own.

    python benchmarks/peers/synth_peer.py FOLDER METHOD [--pgm CHECKOUT] [--epsilon 1] [--delta 1e-5] [--repeats 5]
                                          [--limit SECONDS] [--sampled]

METHOD is `mst` or `aim`, by their authors' own code: `mechanisms/` of a checkout of github.com/ryan112358/private-pgm (4d2b3c5)
on its package mbi, 2.0 or 1.1; `mst-smartnoise` or `aim-smartnoise`, of smartnoise-synth; or `datasynthesizer` (its
Bayesian network of degree 2, which has delta 0). Reads FOLDER/codes.csv, in which each column holds levels from 0, and FOLDER/sizes.json. Writes
FOLDER/METHOD-0.csv and so on, and their seconds to FOLDER/METHOD.json. A fit that takes longer than `--limit` seconds by the
clock is stopped, which the output and the file say. Within records of equal parents mbi 1.1.0 puts each column's levels in
the order of the records, so that columns with a common parent depend on each other where the model has them independent
(mbi 2.0.0 shuffles them): `--sampled` draws each record from the model instead, and adds "-sampled" to the files' names.
Requirements: mbi.txt, and synth.txt for smartnoise-synth.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import pathlib
import signal
import sys
import tempfile
import time
import warnings

import pandas

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import harness

PACKAGES = ("smartnoise-synth", "mbi", "jax", "torch", "pandas", "numpy")
SMARTNOISE = ("mst-smartnoise", "aim-smartnoise")


def on_mbi_2() -> None:
    """Gives mbi 2.0 the names of mbi 1.1 that the authors' mechanisms use, in this process."""
    from mbi import Dataset, Domain, MarkovRandomField, estimation

    def mirror_descent(domain, measurements, iters, potentials=None, callback_fn=None):
        how = {"iters": iters, "warm_start": potentials, "callback_fn": callback_fn}
        return estimation.MirrorDescent().estimate(domain, measurements, **how)

    estimation.mirror_descent = mirror_descent
    Domain.attrs = property(lambda domain: domain.attributes)
    MarkovRandomField.cliques = property(lambda model: list(model.potentials.cliques))
    Dataset.df = property(lambda made: pandas.DataFrame(made.to_dict()))


def private_pgm(
    name: str, codes: pandas.DataFrame, options: argparse.Namespace
) -> pandas.DataFrame:
    sys.path.insert(0, str(options.pgm / "mechanisms"))
    from mbi import Dataset, Domain

    if importlib.metadata.version("mbi").startswith("2"):
        on_mbi_2()
    domain = Domain.fromdict(json.loads((options.folder / "sizes.json").read_text()))
    data = Dataset(codes.astype(int), domain)
    if name == "mst":
        import mst

        # mbi 1.1 refuses what pandas makes of numbers that a dictionary maps.
        mst.Dataset = lambda frame, of: Dataset(frame.astype(int), of)
        return mst.MST(data, options.epsilon, options.delta).df
    from aim import AIM

    pairs = [(pair, 1.0) for pair in itertools.combinations(data.domain, 2)]
    limits = {"max_model_size": options.model_mb, "max_iters": options.iterations}
    return AIM(options.epsilon, options.delta, **limits).run(data, pairs)[1].df


def smartnoise(name: str, codes: pandas.DataFrame, options: argparse.Namespace) -> pandas.DataFrame:
    from snsynth import Synthesizer

    name = name.removesuffix("-smartnoise")
    extra = {"max_model_size": options.model_mb} if name == "aim" else {}
    made = Synthesizer.create(name, epsilon=options.epsilon, delta=options.delta, **extra)
    made.fit(codes, preprocessor_eps=0.0, categorical_columns=list(codes.columns))
    return made.sample(len(codes))


def data_synthesizer(codes: pandas.DataFrame, options: argparse.Namespace) -> pandas.DataFrame:
    from DataSynthesizer.DataDescriber import DataDescriber
    from DataSynthesizer.DataGenerator import DataGenerator

    with tempfile.TemporaryDirectory() as folder:
        source, description = f"{folder}/codes.csv", f"{folder}/description.json"
        codes.to_csv(source, index=False)
        describer = DataDescriber(category_threshold=100)
        names = dict.fromkeys(codes.columns, True)
        describer.describe_dataset_in_correlated_attribute_mode(
            source, epsilon=options.epsilon, k=2, attribute_to_is_categorical=names,
            attribute_to_is_candidate_key=dict.fromkeys(codes.columns, False),
        )  # fmt: skip
        describer.save_dataset_description_to_file(description)
        generator = DataGenerator()
        generator.generate_dataset_in_correlated_attribute_mode(len(codes), description)
        return generator.synthetic_dataset


def stop(*_: object) -> None:
    raise TimeoutError


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("method", choices=["mst", "aim", *SMARTNOISE, "datasynthesizer"])
    parser.add_argument("--pgm", type=pathlib.Path, help="checkout of private-pgm, for mst and aim")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--model-mb", type=float, default=80.0, help="AIM's limit on its graphical model"
    )
    parser.add_argument("--iterations", type=int, default=1000, help="of AIM's estimates")
    parser.add_argument("--limit", type=int, default=0, help="seconds of a fit; 0 for no limit")
    parser.add_argument("--sampled", action="store_true", help="draw each record from the model")
    options = parser.parse_args()
    label = options.method
    if options.sampled:
        from mbi import MarkovRandomField

        MarkovRandomField.synthetic_data.__defaults__ = (None, "sample")
        label += "-sampled"
    warnings.filterwarnings("ignore")
    signal.signal(signal.SIGALRM, stop)
    codes = pandas.read_csv(options.folder / "codes.csv", dtype=str)
    result = {
        "fits": [],
        "stopped": [],
        "limit": options.limit,
        "epsilon": options.epsilon,
        "delta": options.delta,
        "model_mb": options.model_mb,
        "iterations": options.iterations,
        "private_pgm": options.pgm and harness.commit(options.pgm),
        "peer_versions": harness.versions(**dict(zip(PACKAGES, PACKAGES, strict=True))),
    }
    for number in range(options.repeats):
        start, used = time.perf_counter(), time.process_time()
        signal.alarm(options.limit)
        try:
            if options.method == "datasynthesizer":
                made = data_synthesizer(codes, options)
            else:
                how = smartnoise if options.method in SMARTNOISE else private_pgm
                made = how(options.method, codes, options)
        except TimeoutError:
            made = None
        signal.alarm(0)
        taken = {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - used,
        }
        if made is None:
            result["stopped"].append(taken)
        else:
            path = options.folder / f"{label}-{len(result['fits'])}.csv"
            made.to_csv(path, index=False)
            result["fits"].append(taken)
        written = json.dumps(result, indent=1)
        (options.folder / f"{label}.json").write_text(written + "\n")
        how_long = f"{taken['seconds']:.1f} s, of processors {taken['cpu_seconds']:.1f} s"
        ended = f", stopped at the limit of {options.limit} s" if made is None else ""
        print(label, number, how_long + ended, flush=True)


if __name__ == "__main__":
    main()
