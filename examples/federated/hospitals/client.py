"""The ClientApp: on a real node a thin way to the hospital's worker; in a simulation the hospital itself."""

from __future__ import annotations

import functools
import pathlib
import tempfile

from tfp_dpvi.federated.deployment.flower import client_app


@functools.cache
def simulated(number, epsilon, rounds, folder):
    import tfp_dpvi as dpvi
    from hospitals.study import make_records, make_study

    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    ledger = dpvi.PrivacyLedger(
        pathlib.Path(folder, f"hospital{number}.ledger")
    )  # Ray moves nodes between its processes.
    budget = {"epsilon": epsilon, "rounds": rounds, "ledger": ledger}
    return dpvi.federated.hospital_of(
        make_study(), *make_records(number), name=f"hospital{number}", **budget
    )


def answer(context):
    node, run = context.node_config, context.run_config
    if "worker" in node:
        from tfp_dpvi.federated.deployment.proxy import ask

        return str(node["hospital"]), lambda message: ask(str(node["worker"]), message)
    number = int(node["partition-id"])
    folder = pathlib.Path(tempfile.gettempdir(), f"tfp_dpvi-simulated-{context.run_id}")
    settings = (number, float(run["epsilon"]), int(run["rounds"]), str(folder))
    return f"hospital{number}", lambda message: simulated(*settings).answer(message)


app = client_app(answer)
