"""The ServerApp: it sees no record and imports no TensorFlow."""

from __future__ import annotations

import json
import pathlib
import sys

from flwr.serverapp import ServerApp

from tfp_dpvi.federated import Server, StudyTerms, Synchronous, write_status
from tfp_dpvi.federated.deployment.flower import FlowerRun

app = ServerApp()


def read_roster(text):
    """Returns {node id: hospital} of "1234:berlin,5678:munich"; the name of a rule as it is."""
    if ":" not in text:
        return text
    pairs = (entry.split(":", 1) for entry in text.split(","))
    return {int(node): hospital for node, hospital in pairs}


def make_server(terms, settings):
    """Returns a new server, or the one that was interrupted, from its folder."""
    schedule = Synchronous(
        rounds=int(settings["rounds"]),
        damping=float(settings["damping"]),
        quorum=int(settings["quorum"]),
    )
    if not settings["state"]:
        return Server(terms, None, schedule)
    folder = pathlib.Path(settings["state"])
    if (folder / "state.json").exists():
        return Server.load(folder, terms)
    return Server(terms, None, schedule, folder=folder)


@app.main()
def main(grid, context):
    settings = context.run_config
    terms = StudyTerms.load(pathlib.Path(__file__).with_name("terms.json"))
    run = FlowerRun(
        grid,
        make_server(terms, settings),
        roster=read_roster(str(settings["roster"])),
        timeout=float(settings["timeout"]),
    )
    run.wait_for(int(settings["num-hospitals"]))

    def show(server):
        if settings["state"]:
            write_status(server, pathlib.Path(settings["state"], "status.html"))
        last = server.history[-1]
        print(
            f"update {last.number}: {', '.join(last.hospitals)}; change {last.change:.4g}, guard {last.guard:g}, "
            f"epsilon {max(last.epsilon.values()):.3f}, mean {last.posterior.mean.round(3)}, {last.seconds:.2f} s",
            flush=True,
        )

    run.play(show)
    for caveat in run.server.caveats:
        print(f"Note: {caveat}", flush=True)
    if settings["output"]:
        rounds = [
            {
                "number": one.number,
                "hospitals": one.hospitals,
                "change": one.change,
                "guard": one.guard,
                "epsilon": one.epsilon,
                "seconds": one.seconds,
                "mean": one.posterior.mean.tolist(),
                "stddev": one.posterior.stddev.tolist(),
            }
            for one in run.server.history
        ]
        free = not [
            name for name in sys.modules if name.split(".")[0] in ("tensorflow", "tf_keras")
        ]
        found = {
            "rounds": rounds,
            "refused": run.server.refused,
            "retired": run.server.retired,
            "caveats": run.server.caveats,
            "no_tensorflow": free,
        }
        pathlib.Path(settings["output"]).write_text(json.dumps(found, indent=1) + "\n")
