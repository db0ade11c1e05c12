"""A throw-away PostgreSQL cluster from the server's own programs, as a user that may run it."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import psycopg

_SETTINGS = {
    "listen_addresses": "",  # the socket alone: nothing on the network, no port to collide
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "shared_buffers": "32MB",
}


def find_programs() -> Path | None:
    """Folder of initdb and pg_ctl, of the newest version here."""
    on_path = shutil.which("initdb")
    if on_path is not None and shutil.which("pg_ctl") is not None:
        return Path(on_path).parent
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda at: _version(at))
    return next((at for at in reversed(folders) if (at / "initdb").exists()), None)


class Cluster:
    """A running server, reached through a socket in its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = count()

    def url(self, name: str) -> str:
        return f"postgresql://headrace@/{name}?host={self._folder}"

    @contextmanager
    def database(self, template: str = "template1") -> Iterator[str]:
        """URL of a fresh copy of a database, which is dropped at the end."""
        name = f"test_{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")
        yield self.url(name)
        self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def execute(self, statement: str) -> None:
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(statement)  # type: ignore[call-overload]  # names made here


@contextmanager
def running_cluster(programs: Path) -> Iterator[Cluster]:
    """Start a new cluster in a temporary folder; stop and remove it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-pg-"))
    identity = _identity()
    if identity:
        os.chown(folder, identity["user"], identity["group"])
    options: dict[str, Any] = {
        "check": True,
        "cwd": folder,
        "env": {"PATH": os.environ["PATH"], "LC_ALL": "C"},
        "stdout": subprocess.DEVNULL,
        **identity,
    }
    data = str(folder / "data")
    initdb = [str(programs / "initdb"), "--pgdata", data, "--username", "headrace"]
    pg_ctl = [str(programs / "pg_ctl"), "--pgdata", data, "--wait"]
    settings = "".join(f" -c {name}='{value}'" for name, value in _SETTINGS.items())
    try:
        subprocess.run([*initdb, "--auth", "trust", "--encoding", "UTF8", "--no-sync"], **options)
        subprocess.run(
            [*pg_ctl, "--log", str(folder / "log"), "-o", f"-k {folder}{settings}", "start"],
            **options,
        )
        try:
            yield Cluster(folder)
        finally:
            subprocess.run([*pg_ctl, "--mode", "immediate", "stop"], **options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _identity() -> dict[str, Any]:
    """Whom to run as: PostgreSQL refuses root."""
    if os.geteuid() != 0:
        return {}
    names = {entry.pw_name for entry in pwd.getpwall()}
    user = pwd.getpwnam("postgres" if "postgres" in names else "nobody")
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _version(folder: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in folder.parent.name.split(".") if part.isdigit())
