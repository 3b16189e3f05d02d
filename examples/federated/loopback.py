"""The whole of `docs/guides/consortium.md` on one machine: TLS, node keys, a SuperLink, and for each hospital a worker and a SuperNode.

    python examples/federated/loopback.py [--hospitals 3] [--rounds 3] [--folder FOLDER] [--kill]
        [--separate-users]

For Flower 1.41 or later. With --kill the last hospital's worker and node are killed with SIGKILL in the second round, and started again.
With --separate-users, as root, workers run as one user and SuperNodes as another, as they must on
real machines: the app that a SuperNode runs cannot read records. Without it everything runs as you,
a rehearsal on simulated records.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import ipaddress
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
# Users and a group without names, for --separate-users.
WORKER, NODE, CLIENTS = 61001, 61002, 61003


def make_certificates(folder):
    """Writes a certificate authority, and a certificate of 127.0.0.1 that it signed."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now = datetime.datetime.now(datetime.timezone.utc)

    def written(name, key, certificate):
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        (folder / f"{name}.key").write_bytes(private)
        (folder / f"{name}.key").chmod(0o600)
        (folder / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def builder(subject, issuer, key):
        names = [
            x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, each)])
            for each in (subject, issuer)
        ]
        made = (
            x509.CertificateBuilder()
            .subject_name(names[0])
            .issuer_name(names[1])
            .public_key(key.public_key())
        )
        made = made.serial_number(x509.random_serial_number()).not_valid_before(
            now - datetime.timedelta(days=1)
        )
        return made.not_valid_after(now + datetime.timedelta(days=30))

    authority, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    top = builder("consortium", "consortium", authority)
    top = top.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    written("ca", authority, top.sign(authority, hashes.SHA256()))
    places = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    one = builder("127.0.0.1", "consortium", server)
    one = one.add_extension(x509.SubjectAlternativeName(places), critical=False)
    written("server", server, one.sign(authority, hashes.SHA256()))


def make_node_key(folder, name):
    """Writes a node's key pair, of which the SuperLink gets the public half."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    (folder / f"{name}.key").write_bytes(private)
    (folder / f"{name}.key").chmod(0o600)
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    (folder / f"{name}.pub").write_bytes(public)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Consortium:
    """All processes; `close` ends those that it started and no others."""

    def __init__(self, folder, num_hospitals, rounds, *, separate_users=False):
        self.folder, self.rounds = folder, rounds
        self.separate_users = separate_users
        self.roster = {}
        self.names = [f"hospital{number}" for number in range(num_hospitals)]
        self.bin = pathlib.Path(sys.executable).parent
        path = [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
        self.environment = {
            **os.environ, **QUIET, "FLWR_HOME": str(folder / "flwr"), "PYTHONPATH": os.pathsep.join(path),
            "PATH": os.pathsep.join([str(self.bin), os.environ.get("PATH", "")]),
        }  # fmt: skip
        self.processes = {}
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"

    def _start(self, name, *command, user=None, home=None):
        rights, environment = {}, self.environment
        if self.separate_users and user is not None:
            rights = {"user": user, "group": user, "extra_groups": [CLIENTS]}
            environment = {**environment, "HOME": str(home), "FLWR_HOME": str(home)}
        log = (self.folder / f"{name}.log").open("ab")
        with log:
            self.processes[name] = subprocess.Popen(
                [str(part) for part in command], cwd=HERE, env=environment, stdout=log, stderr=log,
                start_new_session=True, **rights,
            )  # fmt: skip

    def _make_folder(self, name, user, group=None):
        """Makes a folder for a user alone, or that a group may enter."""
        made = self.folder / name
        made.mkdir(exist_ok=True)
        made.chmod(0o700 if group is None else 0o750)
        if self.separate_users:
            os.chown(made, user, user if group is None else group)
        return made

    def socket_of(self, name):
        return self.folder / "run" / f"{name}.sock"

    def ledger_of(self, name):
        return self.folder / name / "ledger"

    def _run(self, *command, timeout=120):
        found = subprocess.run(
            [str(part) for part in command],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if found.returncode:
            raise RuntimeError(
                f"{' '.join(map(str, command))} failed:\n{found.stdout}\n{found.stderr}"
            )
        return found.stdout

    def begin(self):
        """Makes keys and certificates, and starts the SuperLink and every hospital."""
        make_certificates(self.folder)
        (self.folder / "flwr").mkdir()
        config = f'[superlink]\ndefault = "consortium"\n[superlink.consortium]\naddress = "{self.address}"\n'
        config += f'root-certificates = "{self.folder / "ca.pem"}"\n'
        (self.folder / "flwr" / "config.toml").write_text(config)
        self._start(
            "superlink", self.bin / "flower-superlink", "--ssl-certfile", self.folder / "server.pem",
            "--ssl-keyfile", self.folder / "server.key", "--ssl-ca-certfile", self.folder / "ca.pem",
            "--enable-supernode-auth", "--disable-runtime-dependency-installation",
            "--host", "127.0.0.1", "--port", self.port,
        )  # fmt: skip
        self._await(lambda: self._listening(), "the SuperLink")
        for name in self.names:
            home = self._make_folder(f"{name}-node", NODE)
            make_node_key(home, name)
            if self.separate_users:
                os.chown(home / f"{name}.key", NODE, NODE)
            registered = self._run(
                self.bin / "flwr",
                "supernode",
                "register",
                home / f"{name}.pub",
                "consortium",
                "--format",
                "json",
            )
            self.roster[json.loads(registered)["node-id"]] = name
            self.start_hospital(name)

    def start_hospital(self, name):
        self.start_worker(name)
        settings = f'hospital="{name}" worker="{self.socket_of(name)}"'
        home = self.folder / f"{name}-node"
        self._start(
            # A SuperLink refuses a key for as long as it believes the node that was killed to be there.
            f"{name}-node", "bash", "-c", 'until "$@"; do sleep 2; done', "bash", self.bin / "flower-supernode", "--superlink", self.address,
            "--root-certificates", self.folder / "ca.pem", "--auth-supernode-private-key", home / f"{name}.key",
            "--host", "127.0.0.1", "--port", free_port(), "--node-config", settings, user=NODE, home=home,
        )  # fmt: skip

    def start_worker(self, name):
        home, sock = self._make_folder(name, WORKER), self.socket_of(name)
        self._make_folder("run", WORKER, CLIENTS)
        data = home / "records.npz"
        if not data.exists():
            make = f"import numpy, hospitals.study as s; x, y = s.make_records({name[8:]}); numpy.savez({str(data)!r}, x=x, y=y)"
            self._run(sys.executable, "-c", make, timeout=300)
            data.chmod(0o600)
            if self.separate_users:
                os.chown(data, WORKER, WORKER)
        sock.unlink(missing_ok=True)
        client = ["--socket-group", CLIENTS] if self.separate_users else ["--rehearsal"]
        self._start(
            f"{name}-worker", sys.executable, "-m", "tfp_dpvi.federated.deployment.worker", "--study", "hospitals.study:make_study",
            "--data", data, "--name", name, "--ledger", self.ledger_of(name), "--epsilon", 3, "--rounds",
            self.rounds, "--socket", sock, *client, user=WORKER, home=home,
        )  # fmt: skip
        self._await(sock.exists, f"the worker of {name}")

    def _listening(self):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), timeout=1.0),
        ):
            return True
        return False

    def _await(self, ready, what, at_most=300.0):
        until = time.monotonic() + at_most
        while not ready():
            if time.monotonic() > until:
                raise TimeoutError(
                    f"{what} did not start within {at_most:g} s; see the logs in {self.folder}."
                )
            time.sleep(0.2)

    def kill(self, name):
        """SIGKILL for one process that this object started, with the children in its session."""
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def run(self, output, *, app=HERE, during=None, timeout=900.0):
        """Runs an app until it has written its output.

        `during` is called once, after the server has printed its first update.
        """
        roster = ",".join(f"{node}:{name}" for node, name in self.roster.items())
        settings = f'roster="{roster}" '
        settings += f'output="{output}" num-hospitals={len(self.names)} rounds={self.rounds} timeout={40.0 if during else 120.0}'
        self._start(
            "run",
            self.bin / "flwr",
            "run",
            app,
            "consortium",
            "--stream",
            "--run-config",
            settings,
        )
        until, log = time.monotonic() + timeout, self.folder / "run.log"
        while not pathlib.Path(output).exists():
            if during is not None and "update 1" in log.read_text(errors="replace"):
                during()
                during = None
            if time.monotonic() > until:
                raise TimeoutError(
                    f"the run did not end within {timeout:g} s; see the logs in {self.folder}."
                )
            time.sleep(0.1)
        time.sleep(0.5)
        return json.loads(pathlib.Path(output).read_text())

    def close(self):
        for name in list(self.processes):
            self.kill(name)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hospitals", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--separate-users", action="store_true", help="needs root")
    options = parser.parse_args(arguments)
    folder = (
        pathlib.Path(tempfile.mkdtemp()) if options.folder is None else options.folder.resolve()
    )
    folder.mkdir(parents=True, exist_ok=True)
    if options.separate_users:
        folder.chmod(0o711)  # Other users may pass through, and read nothing.
    consortium = Consortium(
        folder, options.hospitals, options.rounds, separate_users=options.separate_users
    )

    def kill_and_come_back():
        victim = consortium.names[-1]
        time.sleep(random.uniform(0.0, 3.0))
        consortium.kill(f"{victim}-node")
        consortium.kill(f"{victim}-worker")
        consortium.start_hospital(victim)

    try:
        consortium.begin()
        found = consortium.run(
            folder / "history.json", during=kill_and_come_back if options.kill else None
        )
    finally:
        consortium.close()
    print((folder / "run.log").read_text(errors="replace"))
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
