"""A node's configuration: one frozen value, read once, checked once, with errors that name the key.

Flags win over the environment (`HOLDFAST_` and the key in capitals), the environment over the file, the file over the
defaults. Limits and defaults that the rules read are not here: they live in replicated state.
"""

import ipaddress
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from holdfast.client.protocol.errors import BadValue

SECRET_BYTES_MIN = 16  # shorter ones can be guessed by whoever hears one handshake
MEMBERS_MAX = 9
CONNECTIONS_MAX = 65_536

_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,253}")  # what a resolver can be asked for
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it; a name that is no address counts as reachable from outside."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What one node is told at its start."""

    node: str = "n1"
    data: Path = Path("holdfast-data")
    listen: Address = Address("127.0.0.1", 7401)
    peer_listen: Address = Address("127.0.0.1", 7421)
    peers: tuple[tuple[str, Address], ...] = ()  # the others of a cluster at its founding, by name
    secret_file: Path | None = None
    http: Address | None = None
    fsync: Literal["always", "os"] = "always"
    max_connections: int = 4_096  # of clients
    disk_reserve_bytes: int = 268_435_456  # with less left, messages are refused; settling goes on
    keep_log: bool = False  # never let go of applied entries: for the fault harness
    trace: Path | None = None  # messages sent and syncs done, in order: for the fault harness
    insecure_plaintext: bool = False  # listen beyond loopback without TLS

    def __post_init__(self) -> None:
        _check_node("node", self.node)
        names = [name for name, _ in self.peers]
        for name in names:
            _check_node("peers", name)
        if len(set(names)) != len(names):
            raise BadValue(field="peers", problem="names a node twice")
        if len(set(names) | {self.node}) > MEMBERS_MAX:
            raise BadValue(field="peers", problem=f"has more than {MEMBERS_MAX} nodes")
        if names and self.secret_file is None:
            raise BadValue(
                field="secret_file", problem="is missing; nodes with peers prove to each other that they share it"
            )
        if self.fsync not in ("always", "os"):
            raise BadValue(field="fsync", problem=f"is {self.fsync!r}; always or os is allowed")
        if not 1 <= self.max_connections <= CONNECTIONS_MAX:
            problem = f"is {self.max_connections}; 1 to {CONNECTIONS_MAX} is allowed"
            raise BadValue(field="max_connections", problem=problem)
        if self.disk_reserve_bytes < 0:
            raise BadValue(field="disk_reserve_bytes", problem="is negative")
        if not self.insecure_plaintext:
            self._refuse_outside()

    @property
    def others(self) -> dict[str, Address]:
        """The other nodes; a list of peers may hold this node too, so that all can have the same list."""
        return {name: address for name, address in self.peers if name != self.node}

    def secret(self) -> bytes:
        """The cluster's secret. Raises BadValue where it cannot be read, is short, or is open to others."""
        if self.secret_file is None:
            return b""
        try:
            data = self.secret_file.read_bytes().strip()
            mode = self.secret_file.stat().st_mode
        except OSError as error:
            raise BadValue(field="secret_file", problem=f"cannot be read: {error.strerror}") from None
        if len(data) < SECRET_BYTES_MIN:
            raise BadValue(
                field="secret_file", problem=f"has {len(data)} bytes; at least {SECRET_BYTES_MIN} are needed"
            )
        if mode & 0o077:
            raise BadValue(field="secret_file", problem="is readable by others; chmod 600 it")
        return data

    def _refuse_outside(self) -> None:
        outside = [("listen", self.listen), ("peer_listen", self.peer_listen), ("http", self.http)]
        for field, address in outside:
            if address is not None and not address.is_loopback:
                problem = f"is {address}, beyond loopback, without TLS; use --insecure-plaintext if that is meant"
                raise BadValue(field=field, problem=problem)


KEYS = {field.name for field in fields(Config)}


def load(flags: Mapping[str, str], environment: Mapping[str, str], file: Path | None = None) -> Config:
    """The configuration of these sources. Raises BadValue with the key that is wrong, and where it came from."""
    values: dict[str, Any] = {}
    if file is not None:
        values |= _parsed(_from_file(file), f"in {file}")
    named = {key: environment[f"HOLDFAST_{key.upper()}"] for key in KEYS if f"HOLDFAST_{key.upper()}" in environment}
    values |= _parsed(named, "in the environment")
    values |= _parsed(flags, "in the flags")
    return replace(Config(), **values)


def _from_file(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise BadValue(field="config", problem=f"{file} cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise BadValue(field="config", problem=f"{file} is no TOML: {error}") from None


def _parsed(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    parsed = {}
    for key, value in values.items():
        if key not in KEYS:
            raise BadValue(field=key, problem=f"{where} is no setting; these are: {', '.join(sorted(KEYS))}")
        try:
            parsed[key] = _PARSERS[key](value)
        except (TypeError, ValueError) as error:
            raise BadValue(field=key, problem=f"{where} is {value!r}: {error}") from None
    return parsed


def parse_address(value: object) -> Address:
    """`HOST:PORT`, an IPv6 host in brackets."""
    if not isinstance(value, str):
        raise TypeError("HOST:PORT is wanted")
    host, colon, port = value.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an IPv6 host stands in brackets")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 <= int(port) <= 65_535:
        raise ValueError("HOST:PORT is wanted, with a port from 0 to 65535")
    if not _HOST.fullmatch(host):
        raise ValueError("a host is an address or a name in ASCII; an international one is written as xn--…")
    return Address(host, int(port))


def parse_peers(value: object) -> tuple[tuple[str, Address], ...]:
    """`n1=HOST:PORT,n2=HOST:PORT`, or a table of the file."""
    if isinstance(value, dict):
        return tuple((str(name), parse_address(address)) for name, address in value.items())
    if not isinstance(value, str):
        raise TypeError("n1=HOST:PORT,n2=HOST:PORT is wanted")
    found = []
    for part in filter(None, (part.strip() for part in value.split(","))):
        name, equals, address = part.partition("=")
        if not equals:
            raise ValueError(f"{part!r} has no name; n1=HOST:PORT is wanted")
        found.append((name.strip(), parse_address(address.strip())))
    return tuple(found)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a text is wanted")
    return value


def _path(value: object) -> Path:
    text = _text(value)
    if not text:
        raise ValueError("a path is wanted")
    return Path(text)


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError("a whole number is wanted")
    return int(value)


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("true", "1", "yes"):
        return True
    if value in ("false", "0", "no"):
        return False
    raise ValueError("true or false is wanted")


_PARSERS: dict[str, Any] = {
    "node": _text,
    "data": _path,
    "listen": parse_address,
    "peer_listen": parse_address,
    "peers": parse_peers,
    "secret_file": _path,
    "http": parse_address,
    "fsync": _text,
    "max_connections": _number,
    "disk_reserve_bytes": _number,
    "keep_log": _flag,
    "trace": _path,
    "insecure_plaintext": _flag,
}


def _check_node(field: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        problem = f"has {name!r}; a node's name is up to 63 letters, digits and . _ -"
        raise BadValue(field=field, problem=problem)
