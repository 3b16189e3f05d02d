"""What the accounting costs: calibration, the epsilon curve, the ledger, the import.

    python benchmarks/accounting.py [--against-dp-accounting] [--json]

Targets (2 cores, idle): a calibration and a curve under 1 s for up to 1e5 steps, a reservation under 1 ms in memory, the
import under 2.5 s. Ends with status 1 where one is missed by more than half, so that a busy machine does not fail it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import dp_accounting
from dp_accounting import pld

from tfp_dpvi.privacy import EpsilonCurve, PoissonSampling, PrivacyLedger, PrivacyPlan

# (target epsilon, records, batch size, steps)
SETTINGS = (
    (1.0, 48842, 256, 3820),
    (0.1, 48842, 256, 3820),
    (1.0, 10_000, 100, 100_000),
    (8.0, 60_000, 3000, 100_000),
    (1.0, 1_000_000, 100, 100_000),
    (1.0, 569, 64, 180),
)
RELATIONS = ("add_or_remove_one", "replace_one")


def timed(function):
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def plain_search(epsilon, delta, probability, steps):
    """dp_accounting's own calibration of the same plan."""

    def event(noise):
        single = dp_accounting.PoissonSampledDpEvent(probability, dp_accounting.GaussianDpEvent(noise))
        return dp_accounting.SelfComposedDpEvent(single, steps)

    return dp_accounting.calibrate_dp_mechanism(
        pld.PLDAccountant, event, epsilon, delta, dp_accounting.LowerEndpointAndGuess(0.3, 1.0), tol=1e-3
    )


def accounting(against):
    for epsilon, records, batch, steps in SETTINGS:
        for relation in RELATIONS:
            sampling = PoissonSampling(batch / records)
            plan, calibration = timed(
                lambda: PrivacyPlan.calibrate(
                    epsilon=epsilon,  # noqa: B023
                    delta=1e-6,
                    sampling=sampling,  # noqa: B023
                    num_releases=steps,  # noqa: B023
                    neighboring_relation=relation,  # noqa: B023
                )
            )
            _, curve = timed(lambda: EpsilonCurve(plan, (), 1e-6, range(0, steps + 1, -(-records // batch))))  # noqa: B023
            row = {
                "epsilon": epsilon,
                "probability": round(batch / records, 7),
                "steps": steps,
                "relation": relation,
                "noise_multiplier": plan.noise_multiplier,
                "epsilon_found": plan.epsilon(1e-6),
                "calibration_s": round(calibration, 3),
                "curve_s": round(curve, 3),
            }
            if against and relation == "add_or_remove_one":
                noise, seconds = timed(lambda: plain_search(epsilon, 1e-6, batch / records, steps))  # noqa: B023
                row |= {"dp_accounting_s": round(seconds, 3), "dp_accounting_noise_multiplier": noise}
            yield row


def ledger():
    plan = PrivacyPlan(PoissonSampling(0.01), 1.0, 1000)
    with tempfile.TemporaryDirectory() as folder:
        for name, path in (("memory", None), ("file", os.path.join(folder, "ledger"))):
            with PrivacyLedger(path) as book:
                count = 500
                _, seconds = timed(lambda: [book.confirm(book.reserve(plan, 50)) for _ in range(count)])  # noqa: B023
                yield f"reserve_and_confirm_{name}_ms", round(1000 * seconds / count, 4)


def import_seconds():
    code = "import time; t = time.perf_counter(); import tfp_dpvi.privacy; print(time.perf_counter() - t)"
    return min(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against-dp-accounting", action="store_true", help="time its plain search too (minutes)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = list(accounting(options.against_dp_accounting))
    books = dict(ledger())
    imported = round(import_seconds(), 3)
    if options.json:
        print(json.dumps({"accounting": rows, "ledger": books, "import_s": imported}))
    else:
        for row in rows:
            print("  ".join(f"{k} {v:.5g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
        print(books, f"import {imported} s")
    slow = [r for r in rows if max(r["calibration_s"], r["curve_s"]) > 1.5]
    return int(bool(slow) or imported > 3.75 or books["reserve_and_confirm_memory_ms"] > 1.5)


if __name__ == "__main__":
    sys.exit(main())
