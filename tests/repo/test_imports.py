"""Which way imports point, and where each heavy library lives; read from the sources, not run."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP_FOLDERS = {"client": "client", "cluster": "cluster", "jepsen-like": "jepsen", "storage": "storage"}
SOURCES = sorted(path for top in TOP_FOLDERS for path in (ROOT / top).rglob("*.py"))

# Where a module belongs is the longest of these that its name starts with; it may import what
# belongs to the parts on the right.
ARROWS = {
    "holdfast.client.protocol": {"holdfast.client.protocol"},
    "holdfast.client.cli": {"holdfast.client.protocol", "holdfast.client", "holdfast.client.cli"},
    "holdfast.client.testing": {"holdfast.client.protocol", "holdfast.client", "holdfast.client.testing"},
    "holdfast.client": {"holdfast.client.protocol", "holdfast.client"},
    "holdfast.storage": {"holdfast.client.protocol", "holdfast.storage"},
    "holdfast.cluster": {"holdfast.client.protocol", "holdfast.storage", "holdfast.cluster"},
    "holdfast.jepsen.model": {"holdfast.client.protocol", "holdfast.jepsen.model"},
    # Alone of the harness it meets the node's own parts, and the client's, to run them under a clock and a network of
    # its own; what they then did is judged by the model.
    "holdfast.jepsen.simulation": {
        "holdfast.client.protocol",
        "holdfast.client",
        "holdfast.storage",
        "holdfast.cluster",
        "holdfast.jepsen.model",
        "holdfast.jepsen.simulation",
    },
    # A mutant is a changed rule, so it has to reach the rules.
    "holdfast.jepsen.mutants": {"holdfast.client.protocol", "holdfast.storage", "holdfast.jepsen.mutants"},
    "holdfast.jepsen": {
        "holdfast.client.protocol",
        "holdfast.client",
        "holdfast.jepsen.model",
        "holdfast.jepsen.mutants",
        "holdfast.jepsen",
    },
}
# Inside a function, where only those pay who call it.
LAZY_ARROWS = {
    "holdfast.client.cli": {
        "holdfast.storage",
        "holdfast.cluster",
        "holdfast.jepsen",
        "holdfast.jepsen.model",
        "holdfast.jepsen.mutants",
    },
    "holdfast.client.testing": {"holdfast.cluster"},
}
# A path ending in a slash is a whole folder.
HOMES = {
    "msgpack": ("client/protocol/codec.py",),
    "lmdb": ("storage/lmdb_store.py",),
    "pysyncobj": ("cluster/raft.py",),
    "anyio": ("client/aio.py", "client/aio_producer.py", "client/streams.py", "client/worker_tasks.py"),
    "pyspark": ("client/spark/",),
    "rich": ("client/cli/screen.py",),
    "trio": ("cluster/", "jepsen-like/"),
    "pytest": ("client/testing/fixtures.py",),  # of what we ship: users need it for their tests alone
}


@dataclass(frozen=True)
class Import:
    line: int
    module: str
    lazy: bool


def named(path: Path) -> str:
    """The name under which a source file is imported."""
    top, *inner = path.relative_to(ROOT).with_suffix("").parts
    parts = ["holdfast", TOP_FOLDERS[top], *inner]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str | None:
    homes = [part for part in ARROWS if module == part or module.startswith(f"{part}.")]
    return max(homes, key=len, default=None)


def imports(tree: ast.AST, lazy: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(node.lineno, alias.name, lazy)
            case ast.ImportFrom(module=module, names=names, level=level):
                # `from package import module` names the module only in its second half.
                prefix = "." * level + (f"{module}." if module else "")
                for alias in names:
                    yield Import(node.lineno, f"{prefix}{alias.name}", lazy)
        yield from imports(node, inside)


def complaints(name: str, source: str) -> list[str]:
    """Every import of one module that points against the arrows or by another name than the full one."""
    part = part_of(name)
    assert part is not None
    found = []
    for each in imports(ast.parse(source)):
        first = each.module.split(".")[0]
        allowed = ARROWS[part] | (LAZY_ARROWS.get(part, set()) if each.lazy else set())
        if each.module.startswith(".") or first in {"client", "cluster", "storage", "jepsen"}:
            found.append(f"{name}:{each.line} imports {each.module}: use the full name")
        elif first == "holdfast" and part_of(each.module) not in allowed:
            found.append(f"{name}:{each.line} imports {each.module}")
    return found


def strays(path: str, source: str) -> list[str]:
    """Every import of a heavy library outside its home."""
    return [
        f"{path}:{each.line} imports {each.module}"
        for each in imports(ast.parse(source))
        if not path.startswith(HOMES.get(each.module.split(".")[0], ("",)))
    ]


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_imports_follow_the_arrows(path: Path) -> None:
    assert complaints(named(path), path.read_text()) == []


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_a_heavy_library_is_imported_only_at_its_home(path: Path) -> None:
    assert strays(path.relative_to(ROOT).as_posix(), path.read_text()) == []


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name == "__init__.py"], ids=named)
def test_an_init_is_a_docstring_and_nothing_else(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("holdfast.client.protocol.values", "import holdfast.storage.machine"),
        ("holdfast.client.protocol.values", "from holdfast.client import core"),
        ("holdfast.storage.machine", "from holdfast.cluster.router import route"),
        ("holdfast.storage.machine", "def apply():\n    from holdfast import cluster"),
        ("holdfast.client.core", "def lazily():\n    import holdfast.storage.machine"),
        ("holdfast.client.cli.bench", "from holdfast.storage.machine import apply"),
        ("holdfast.client.testing.broker", "from holdfast.cluster.embedded import Node"),
        ("holdfast.client.testing.broker", "def lazily():\n    from holdfast.storage.machine import apply"),
        ("holdfast.client.blocking", "def lazily():\n    from holdfast.client.testing.broker import Broker"),
        ("holdfast.jepsen.model.queue", "from holdfast.storage import machine"),
        ("holdfast.storage.machine", "from .queues import produce"),
        ("holdfast.storage.machine", "from . import queues"),
        ("holdfast.cluster.node", "import storage.machine"),
    ],
)
def test_an_import_against_the_arrows_is_noticed(name: str, source: str) -> None:
    assert len(complaints(name, source)) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("holdfast.storage.machine", "from holdfast.client.protocol import commands"),
        ("holdfast.client.core", "from holdfast.client.protocol.values import QueueName"),
        ("holdfast.client.cli.bench", "def run():\n    from holdfast.storage.machine import apply"),
        ("holdfast.cluster.node", "import holdfast.storage.lmdb_store"),
        ("holdfast.client.testing.broker", "def run():\n    from holdfast.cluster.embedded import Node"),
    ],
)
def test_an_import_along_the_arrows_is_accepted(name: str, source: str) -> None:
    assert complaints(name, source) == []


def test_a_heavy_library_away_from_home_is_noticed() -> None:
    assert len(strays("storage/machine.py", "import lmdb")) == 1
    assert len(strays("client/core.py", "def later():\n    from trio.abc import Stream")) == 1
    assert strays("storage/lmdb_store.py", "import lmdb") == []
    assert strays("cluster/server.py", "import trio") == []
    assert len(strays("client/testing/broker.py", "import pytest")) == 1
