"""A private PostgreSQL cluster for the tests, started by the first one that needs it and shared by all processes.

`initdb` refuses to run as root, so under root the cluster belongs to the account `postgres`, or to `nobody`.
"""

import fcntl
import glob
import os
import pwd
import shutil
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest

from agentlightning.store import LightningStore

FOLDER_VARIABLE = "AGL_TEST_POSTGRES"
"""Names the folder of the cluster that all processes of a test run share."""
PASSWORD = "s3cret-of-the-tests"
START_SECONDS = 60
STOP_SECONDS = 30

_FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
_TABLES = (
    *("rollouts", "inputs", "attempts", "spans", "open_spans", "sequences", "queue", "resources", "workers", "runs"),
    *("metrics", "settings", "notices"),
)
_EMPTYING = "".join(f"DELETE FROM {table};" for table in _TABLES) + "DELETE FROM outbox WHERE number > 0;"
_ENDING = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
    "AND pid <> pg_backend_pid()"
)
_databases: dict[str, str] = {}  # name -> the test that has it


def binaries() -> Path | None:
    """The folder with `initdb` and `postgres`; None where PostgreSQL is not installed."""
    found = sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"), key=lambda path: int(path.split("/")[4]))
    path = found[-1] if found else shutil.which("initdb")
    return None if path is None else Path(path).resolve().parent


def new_database() -> str:
    """The address of an empty database of the shared cluster; skips the test where there is no PostgreSQL.

    To make one takes a second on a busy machine, so one that an earlier test of this process had is emptied.
    """
    cluster = shared_cluster()
    from agentlightning.store.postgres.database import prepare

    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
    for name, owner in _databases.items():
        if owner != test:
            _databases[name] = test
            cluster.run_sql(f"{_ENDING};{_EMPTYING}", name)
            return cluster.address(name)
    name = f"t{uuid.uuid4().hex}"
    address = cluster.create_database(name)
    prepare(address)
    _databases[name] = test
    return address


def open_postgres(**options: Any) -> LightningStore:
    """A store in a new database."""
    address = new_database()
    from agentlightning.store.postgres import PostgresLightningStore

    return PostgresLightningStore(address, **options)


def shared_cluster() -> "Cluster":
    if binaries() is None:
        pytest.skip("PostgreSQL is not installed (no initdb); `make postgres` installs it on Debian as root")
    pytest.importorskip("psycopg", reason="psycopg is not installed: the extra postgres")
    folder = Path(os.environ[FOLDER_VARIABLE])
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cluster = Cluster(folder / "cluster")
        if not cluster.folder.exists():
            cluster.create(_FAST)
            cluster.start()
    return cluster


def stop_shared_cluster() -> None:
    folder = Path(os.environ.pop(FOLDER_VARIABLE))
    if (folder / "cluster").exists():
        Cluster(folder / "cluster").kill()
    shutil.rmtree(folder, ignore_errors=True)


class Cluster:
    """A cluster in a folder, reached over a Unix socket there and over a port of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._data = folder / "data"
        found = binaries()
        assert found is not None
        self._binaries = found

    def create(self, settings: dict[str, str] | None = None) -> None:
        self.folder.mkdir()
        if os.geteuid() == 0:
            account = _account()
            os.chown(self.folder, account.pw_uid, account.pw_gid)
            os.chmod(self.folder.parent, 0o711)
        password = self.folder / "password"
        password.write_text(PASSWORD)
        # A new connection costs four thousand hashes on either side with SCRAM, and two with MD5.
        options = ["-U", "agl", "-A", "md5", f"--pwfile={password}", "-E", "UTF8", "--locale=C", "--no-sync"]
        self._run([self._binaries / "initdb", "-D", self._data, *options])
        given = {
            "listen_addresses": "'127.0.0.1'",
            "port": str(free_port()),
            "unix_socket_directories": f"'{self.folder}'",
            "max_connections": "400",
            "shared_buffers": "'64MB'",
            **(settings or {}),
        }
        with (self._data / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = {value}\n" for name, value in given.items())

    def start(self) -> None:
        log = self.folder / "log"
        self._run([self._binaries / "pg_ctl", "-D", self._data, "-l", log, "-w", "-t", START_SECONDS, "start"])

    def kill(self) -> None:
        """Stop as in a crash: without a checkpoint, so that the next start recovers from the log."""
        self._run([self._binaries / "pg_ctl", "-D", self._data, "-w", "-t", STOP_SECONDS, "stop", "-m", "immediate"])

    @property
    def port(self) -> int:
        lines = (self._data / "postmaster.pid").read_text().splitlines()
        return int(lines[3])

    def address(self, database: str) -> str:
        return f"postgresql://agl:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    def create_database(self, name: str) -> str:
        self.run_sql(f"CREATE DATABASE {name}")
        return self.address(name)

    def run_sql(self, sql: str, database: str = "postgres") -> None:
        import psycopg

        with psycopg.connect(self.address(database), autocommit=True) as connection:
            connection.execute(sql)

    def _run(self, command: list[object]) -> None:
        """Run one of PostgreSQL's programs, which refuse to run as root, as the cluster's owner."""
        owner = {"user": _account().pw_uid, "group": _account().pw_gid, "extra_groups": []} if os.geteuid() == 0 else {}
        done = subprocess.run(  # its output says more than the exception
            [str(part) for part in command],
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            **owner,
        )
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed: {done.stderr}")


def _account() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def choose_folder() -> None:
    """Called in the first process, before it starts its workers."""
    os.environ.setdefault(FOLDER_VARIABLE, os.path.join(tempfile.gettempdir(), f"agl-pg-{uuid.uuid4().hex[:8]}"))
