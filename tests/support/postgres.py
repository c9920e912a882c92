"""A PostgreSQL server of its own for tests, where Debian's `postgresql` is installed."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def missing() -> str:
    """Why there can be none here; empty where there can."""
    if _program("initdb") is None:
        return "PostgreSQL is not installed: apt install postgresql"
    if os.geteuid() == 0 and _owner() is None:
        return "PostgreSQL does not run as root, and there is no user postgres"
    return ""


@contextmanager
def server() -> Iterator[str]:
    """What to connect with. It listens on a socket in its own folder, and on no port."""
    initdb, postgres = _program("initdb"), _program("postgres")
    assert initdb is not None and postgres is not None, "asked for where it is missing"
    folder = Path(tempfile.mkdtemp(prefix="holdfast-postgres-"))
    owner = _owner() if os.geteuid() == 0 else None
    try:
        if owner is not None:
            shutil.chown(folder, owner, owner)
        data = str(folder / "data")
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "user": owner, "cwd": "/"}
        subprocess.run([initdb, "-D", data, "-U", "tester", "-A", "trust", "--no-sync"], check=True, **quiet)  # type: ignore[call-overload]
        settings = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={folder}", "-c", "fsync=off"]
        process = subprocess.Popen([postgres, "-D", data, *settings], **quiet)  # type: ignore[call-overload]
        try:
            yield f"host={folder} user=tester dbname=postgres"
        finally:
            process.terminate()
            process.wait(60)
    finally:
        shutil.rmtree(folder)


def _program(name: str) -> str | None:
    """Debian keeps them out of the path."""
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(places[-1]) if places else shutil.which(name)


def _owner() -> str | None:
    return "postgres" if any(user.pw_name == "postgres" for user in pwd.getpwall()) else None
