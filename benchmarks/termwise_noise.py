"""Total noise variance of the term-wise schemes at equal epsilon: exact arithmetic, no timing.

    python benchmarks/termwise_noise.py [--output docs/figures/termwise_noise]

The network of 688,884 parameters (encoder 354,100), expected batches of 128 records in 16 groups, C1 = 1. A scheme's cost is
the sum over parameters of the noise's variance, at the noise multiplier that gives the same epsilon, over that of the
default. Writes JSON; the last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
from typing import Any, NamedTuple

from tfp_dpvi.privacy import TermwiseNoise, termwise_noise

NUM_ENCODER, NUM_ALL = 784 * 400 + 400 + 400 * 100 + 100, 688_884
BATCH, GROUPS = 128, 16
CLIPS = (0.02, 0.1, 0.5, 2.0)


def total_variance(noise: TermwiseNoise, num_encoder: int, num_rest: int) -> float:
    """Returns the noise's variance summed over all coordinates, in units of (z * `l2_norm_clip`)^2."""
    return num_encoder * noise.encoder_scale**2 + num_rest


def variance_at_equal_privacy(noise: TermwiseNoise, num_encoder: int, num_rest: int) -> float:
    """Returns the total variance that a fixed epsilon costs, up to a factor that all schemes share.

    At equal epsilon z is proportional to A, which the plan prices except for full batches under replace-one.
    """
    return total_variance(noise, num_encoder, num_rest) * noise.sensitivity.add_or_remove**2


class SchemeCost(NamedTuple):
    """A row of `compare_schemes`.

    Attributes:
      scheme: as in `termwise_noise`.
      encoder_scale: rho_e.
      add_or_remove: A.
      replace: D.
      relative_variance: `variance_at_equal_privacy` over that of "blocks"; at least 1.
    """

    scheme: str
    encoder_scale: float
    add_or_remove: float
    replace: float
    relative_variance: float


def compare_schemes(
    *,
    l2_norm_clip: float,
    batch_l2_norm_clip: float,
    expected_batch_size: float,
    num_partitions: int,
    num_encoder: int,
    num_rest: int,
) -> tuple[SchemeCost, ...]:
    """Returns what each scheme costs in one setting, "blocks" first; arguments as `termwise_noise`."""
    rows: list[SchemeCost] = []
    baseline = math.nan
    for scheme in ("blocks", "single", "split"):
        noise = termwise_noise(
            scheme,
            l2_norm_clip=l2_norm_clip,
            batch_l2_norm_clip=batch_l2_norm_clip,
            expected_batch_size=expected_batch_size,
            num_partitions=num_partitions,
            num_encoder=num_encoder,
            num_rest=num_rest,
        )
        cost = variance_at_equal_privacy(noise, num_encoder, num_rest)
        baseline = baseline if rows else cost
        moved = noise.sensitivity
        rows.append(
            SchemeCost(
                scheme, noise.encoder_scale, moved.add_or_remove, moved.replace, cost / baseline
            )
        )
    return tuple(rows)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Prints the table and writes it down."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", default="docs/figures/termwise_noise")
    args = parser.parse_args(argv)
    table: dict[str, dict[str, float]] = {}
    for clip in CLIPS:
        rows = compare_schemes(
            l2_norm_clip=1.0,
            batch_l2_norm_clip=clip,
            expected_batch_size=float(BATCH),
            num_partitions=GROUPS,
            num_encoder=NUM_ENCODER,
            num_rest=NUM_ALL - NUM_ENCODER,
        )
        for row in rows:
            table.setdefault(row.scheme, {})[f"C2={clip:g}"] = row.relative_variance
    columns = [f"C2={clip:g}" for clip in CLIPS]
    print(f"{'scheme':16s}" + "".join(f"{column:>12s}" for column in columns))
    for scheme, costs in table.items():
        print(f"{scheme:16s}" + "".join(f"{costs[column]:12.3f}" for column in columns))
    result = {
        "batch_size": BATCH,
        "num_partitions": GROUPS,
        "num_encoder": NUM_ENCODER,
        "num_all": NUM_ALL,
        "cost": table,
    }
    output = pathlib.Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    (output / "termwise_noise.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
