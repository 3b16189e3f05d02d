"""The harness of the benchmarks on made-up ways, and the whole suite at a size that measures nothing."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import harness
import pytest

pytest.importorskip("matplotlib")

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"

#: Answers like a peer: the first request takes one step, the last line is not finite.
PEER = """
import json, sys
print(json.dumps({"peer": "1.0"}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps({"seconds": 0.5 * request["steps"], "finite": request["case"] != "broken"}), flush=True)
    if request["case"] == "last":
        break
"""


def test_rounds_are_interleaved_and_compiling_is_left_out():
    calls = []

    def way(name, seconds, **settings):
        def run(steps):
            calls.append((name, steps))
            return seconds * steps

        return lambda: harness.Runner(run, 10, **settings)

    times, first, failed = harness.interleaved(
        {"a": way("a", 0.2), "b": way("b", 0.1, repetitions=2)}, 3
    )
    assert calls[:2] == [("a", 0), ("b", 0)]
    assert [name for name, _ in calls[2:]] == ["a", "b", "a", "b", "a"]
    assert times == {"a": pytest.approx([0.2] * 3), "b": pytest.approx([0.1] * 2)}
    assert set(first) == {"a", "b"}
    assert not failed


def test_a_way_that_fails_is_said_and_the_others_go_on(capsys):
    def broken():
        raise RuntimeError("no such library")

    def late(steps):
        if steps:
            raise ValueError("not in the middle")
        return 0.0

    makers = {
        "a": broken,
        "b": lambda: harness.Runner(late, 1),
        "c": lambda: harness.Runner(lambda steps: 1.0, 1),
    }
    times, _, failed = harness.interleaved(makers, 2)
    assert times == {"c": [1.0, 1.0]}
    assert failed == {"a": "RuntimeError: no such library", "b": "ValueError: not in the middle"}
    assert "no such library" in capsys.readouterr().out


def test_ratios_are_of_the_rounds_that_both_have():
    found = harness.ratio(
        {"over": [2.0, 6.0, 9.0, 100.0], "under": [1.0, 2.0, 3.0]}, "over", "under"
    )
    assert found["ratio"] == 3.0
    assert found["rounds"]["all"] == [2.0, 3.0, 3.0]
    assert harness.ratio({"over": [1.0]}, "over", "under") is None


def test_peers(tmp_path):
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    peer = harness.Peer(sys.executable, script)
    assert peer.versions == {"peer": "1.0"}
    assert peer.seconds(0, case="any") == 0.5
    assert peer.seconds(4, case="any") == 2.0
    with pytest.raises(RuntimeError, match=r"broken.*not finite"):
        peer.seconds(1, case="broken")
    peer.seconds(1, case="last")
    with pytest.raises(RuntimeError, match="ended with status 0"):
        peer.seconds(1, case="any")
    peer.close()


def suite(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """In a process of its own, as a user runs it; the script sets up TensorFlow for itself."""
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "suite.py"), *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]
            ),
        },
        capture_output=True,
        text=True,
        check=check,
        timeout=1200,
    )


@pytest.mark.slow  # In a process of its own, which imports every case.
def test_thresholds_and_unknown_cases(tmp_path):
    """One case, measured for real; a reference that it cannot keep ends the run with status 1."""
    driver = tmp_path / "driver.py"
    driver.write_text(
        f"""
import json, pathlib, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import suite
reference = pathlib.Path(sys.argv[1])
reference.write_text(json.dumps({{"thresholds": {{"at_most": 2.0, "at_least": 10.0, "unmeasured": 1.0}}}}))
suite.ROWS = (
    suite.Row("at_most", "c", "a", "b", 1.0),
    suite.Row("at_least", "c", "a", "b", 1.0, False),
    suite.Row("unmeasured", "c", "a", "b", 1.0),
)
good = {{"at_most": {{"ratio": 2.0}}, "at_least": {{"ratio": 10.0}}}}
bad = {{"at_most": {{"ratio": 2.1}}, "at_least": {{"ratio": 9.9}}}}
assert suite.check(good, reference) == []
worse = suite.check(bad, reference)
assert [line.split(":")[0] for line in worse] == ["at_most", "at_least"], worse
assert "above" in worse[0] and "below" in worse[1]
assert suite.ROWS[0].reached(1.0) and not suite.ROWS[0].reached(1.01) and suite.ROWS[0].reached(None) is None
assert suite.ROWS[1].reached(1.0) and not suite.ROWS[1].reached(0.99)
try:
    suite.main(["--cases", "nosuch"])
except SystemExit as error:
    assert error.code == 2
else:
    raise AssertionError("an unknown case was taken")
small = ["--quick", "--gpu", "--cases", "sampler", "--output", str(reference.parent)]
suite.gpus = lambda: []
assert suite.main(small) == dict() and list(reference.parent.glob("suite*")) == []
suite.gpus = lambda: ["H100"]
assert suite.main(small)["machine"]["gpus"] == ["H100"]
assert sorted(path.name for path in reference.parent.glob("suite*")) == ["suite_gpu.json", "suite_gpu.png"]
"""
    )
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
    done = subprocess.run(
        [sys.executable, str(driver), str(tmp_path / "reference.json")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "--cases: nosuch unknown; there are logistic" in done.stderr


@pytest.mark.slow
def test_quick_run(tmp_path):
    """Every case: what this library does ran and gave a time, and the last line is one JSON object of all rows."""
    printed = json.loads(suite("--quick", "--output", str(tmp_path)).stdout.splitlines()[-1])
    written = json.loads((tmp_path / "suite.json").read_text())
    assert written["failed"] == {}
    assert written["quick"]
    assert {key: written[key] for key in printed} == printed
    measured = {name for name, value in printed.items() if value is not None}
    ours = {
        "logistic_private_over_nonprivate",
        "vae_private_over_nonprivate",
        "conv_private_over_nonprivate",
    }
    assert ours | {"sampler_1e9_over_1e4", "streamed_over_resident"} <= measured
    assert (tmp_path / "suite.png").stat().st_size > 10_000


@pytest.mark.slow
def test_quick_run_of_secure_steps(tmp_path):
    import secure

    secure.main(["--quick", "--rounds", "1", "--output", str(tmp_path / "secure.json")])
    found = json.loads((tmp_path / "secure.json").read_text())["cases"]
    assert set(found) == {"logistic", "vae 128"}
    assert all(case["ratio"] > 0 for case in found.values())
