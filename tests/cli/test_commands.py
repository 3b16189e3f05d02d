"""The command line: its results, its exit codes, and that no stream has a private value."""

import json
import re
import shlex
import warnings
from pathlib import Path

import numpy as np
import pytest
from support.siblings import slow

from tfp_dpvi import cli
from tfp_dpvi.privacy import PrivacyLedger

pd = pytest.importorskip("pandas")
for name in ("formulae", "yaml"):
    pytest.importorskip(name)

SECRET = 987654.25
SCHEMA = {
    "visits": {"type": "integer", "lower": 0, "upper": 60},
    "ill": {"type": "binary"},
    "age": {"type": "integer", "lower": 18, "upper": 90},
    "ward": {"type": "categorical", "categories": ["007", "008"]},
}


@pytest.fixture
def case(tmp_path):
    """Files of a table and its schema, and a function that runs a command."""
    generator = np.random.default_rng(0)
    table = pd.DataFrame(
        {
            "visits": generator.poisson(3.0, 400),
            "ill": generator.integers(0, 2, 400),
            "age": generator.integers(18, 91, 400),
            "ward": generator.choice(["007", "008"], 400),
        }
    )
    table.to_csv(tmp_path / "visits.csv", index=False)
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    return tmp_path


def arguments(case, command="fit", data="visits.csv", out="out", epsilon=1.0, **more):
    found = [command, str(case / data), "--schema", str(case / "schema.json")]
    if command == "fit":
        found += ["--formula", "ill ~ age + ward", "--family", "bernoulli"]
    found += ["--epsilon", str(epsilon), "--delta", "1e-5", "--ledger", str(case / "a.ledger")]
    found += ["--out", str(case / out)]
    return found + [str(part) for pair in more.items() for part in (f"--{pair[0]}", pair[1])]


def spent(case, name="a.ledger"):
    path = case / name
    return PrivacyLedger(str(path)).num_releases if path.exists() else 0


@pytest.mark.parametrize("rehearses", [False, slow(True)])
def test_the_commands_of_the_guide_run_and_write_what_it_says(rehearses, case, capsys, monkeypatch):
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "command_line.md").read_text("utf-8")
    (case / "schema.yaml").write_text(re.search(r"```yaml\n(.*?)```", guide, re.S)[1])
    monkeypatch.chdir(case)
    lines = [shlex.split(line) for line in re.findall(r"^tfp-dpvi (.*)$", guide, re.M)]
    assert {line[0] for line in lines} == {"rehearse", "fit", "report", "synthesize", "show"}
    for line in lines[not rehearses :]:
        assert cli.main([part if part != "20" else "2" for part in line]) == 0, (
            capsys.readouterr().err
        )
        assert capsys.readouterr().out
    names = {path.name for path in (case / "posterior").iterdir()}
    assert names == {"regression.zip", "summary.csv", "report.txt", "result.json"}
    for number in (1, 2):
        table = pd.read_csv(case / "tables" / f"table-{number}.csv", dtype={"ward": str})
        assert len(table) == 500
        assert set(table["ward"]) <= {"007", "008"}
    # The ledger remembers: the same budget is exhausted, and says so with a code of its own.
    before = spent(case, "clinic.ledger")
    again = [part if part != "posterior/" else "again/" for part in lines[1]]
    assert cli.main(again) == 3
    assert spent(case, "clinic.ledger") == before
    values = json.loads((case / "posterior" / "result.json").read_text())
    assert list(values["coefficients"]) == ["Intercept", "age", "ward[008]"]
    assert cli.main(["report", "posterior/", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == values
    assert values["privacy"]["epsilon"] == pytest.approx(1.0, abs=0.01)


def test_options_are_the_regressions_arguments(case, monkeypatch):
    given = {}

    def regression(*places, **arguments):
        given.update(arguments, formula=places[0])
        raise ValueError("enough")

    monkeypatch.setattr("tfp_dpvi.regressions.regression", regression)
    line = [*arguments(case, weights="age", checks=0.1), "--constants", "knots=40,", "most=3"]
    assert cli.main([*line, "--priors", "age=0,0.1", "ward[008]=1,2"]) == 1
    assert given["constants"] == {"knots": [40.0], "most": 3.0}
    assert given["priors"] == {"age": [0.0, 0.1], "ward[008]": [1.0, 2.0]}
    assert (given["weights"], given["checks"], given["verbose"]) == ("age", 0.1, 0)


@pytest.mark.parametrize("pair", ["k", "k=a", "=1", "k=1,,2"])
def test_numbers_that_are_none_are_refused(case, capsys, pair):
    assert cli.main([*arguments(case), "--constants", pair]) == 2
    assert f"--constants {pair!r}" in capsys.readouterr().err
    assert spent(case) == 0


def write_strange(case):
    text = (case / "visits.csv").read_text().splitlines()
    text[5] = f"1,1,{SECRET},007"
    (case / "strange.csv").write_text("\n".join(text))


def test_a_value_outside_of_the_schema_is_refused_and_on_no_stream(case, capsys):
    write_strange(case)
    assert cli.main(arguments(case, data="strange.csv")) == 2
    printed = capsys.readouterr()
    assert "'age'" in printed.err
    assert str(SECRET) not in printed.out + printed.err
    assert printed.out == ""
    assert spent(case) == 0


def raise_error():
    raise ValueError(f"the record {SECRET}")


def warn_of_record():
    warnings.warn(f"the record {SECRET}", UserWarning, stacklevel=1)
    raise RuntimeError(f"the record {SECRET}")


@pytest.mark.parametrize("fail", [raise_error, warn_of_record, lambda: int(f"the record {SECRET}")])
def test_what_others_say_of_a_record_is_on_no_stream(case, capsys, monkeypatch, fail):
    monkeypatch.setattr("tfp_dpvi.regressions.regression", lambda *args, **kwargs: fail())
    assert cli.main(arguments(case)) == 1
    printed = capsys.readouterr()
    assert str(SECRET) not in printed.out + printed.err
    assert "Error: please report it" in printed.err


def test_a_conversion_in_the_librarys_own_line_is_no_refusal(case, capsys, monkeypatch):
    # Written in C, it raises from a frame of this library.
    monkeypatch.setattr("tfp_dpvi.cli.commands._folder", int)
    assert cli.main(arguments(case, out=f"the record {SECRET}")) == 1
    assert str(SECRET) not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "none.csv"}, "is no file"),
        ({"data": "schema.json"}, "is no .csv"),
        ({"data": "torn.csv"}, "cannot be read as a table"),
        ({"out": "full"}, "is not empty"),
    ],
)
def test_bad_input_is_refused_with_its_own_code(case, capsys, change, message):
    (case / "full").mkdir()
    (case / "full" / "result.json").write_text("{}")
    (case / "torn.csv").write_text(f'a,b\n1,2,{SECRET},4\n"')
    assert cli.main(arguments(case, **change)) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err.splitlines()) <= 3
    assert str(SECRET) not in printed.err
    assert spent(case) == 0


def test_plan_and_show_are_those_of_privacy(case, capsys):
    plan = ["plan", "--records", "1e5", "--batch-size", "512", "--epochs", "3", "--delta", "1e-6"]
    assert cli.main([*plan, "--epsilon", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == pytest.approx(1.0, abs=0.01)
    assert cli.main(["show", str(case / "none.ledger"), "--delta", "1e-5"]) == 2


def test_help_names_each_command(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert all(
        name in shown for name in ["plan", "show", "fit", "synthesize", "rehearse", "report"]
    )
