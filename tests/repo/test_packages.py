"""The project's packages: listed, typed, and importable from the wheel alone."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
FOLDERS: dict[str, str] = SETUPTOOLS["package-dir"]
TOP_FOLDERS = {
    "client": "holdfast.client",
    "cluster": "holdfast.cluster",
    "jepsen-like": "holdfast.jepsen",
    "storage": "holdfast.storage",
}


def packages_on_disk() -> dict[str, str]:
    found = {}
    for top, name in TOP_FOLDERS.items():
        for init in (ROOT / top).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / top)
            found[".".join([name, *inner.parts])] = init.parent.relative_to(ROOT).as_posix()
    return found


def test_every_package_on_disk_is_listed() -> None:
    assert packages_on_disk().items() <= FOLDERS.items()


def test_every_listed_package_is_on_disk() -> None:
    assert FOLDERS.items() <= packages_on_disk().items()


def test_every_mapped_folder_is_a_package_that_is_built() -> None:
    assert sorted(SETUPTOOLS["packages"]) == sorted(FOLDERS)


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {
        module.parent.relative_to(ROOT).as_posix() for top in TOP_FOLDERS for module in (ROOT / top).rglob("*.py")
    }
    assert folders <= set(FOLDERS.values())


def test_every_package_says_that_it_is_typed() -> None:
    assert [folder for folder in FOLDERS.values() if not (ROOT / folder / "py.typed").is_file()] == []


def test_the_wheel_alone_holds_every_package(tmp_path: Path) -> None:
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(build_wheel(tmp_path)) as wheel:
        wheel.extractall(unpacked)
    files = [path for path in (unpacked / "holdfast").rglob("*") if path.is_file()]
    assert {path.relative_to(unpacked).as_posix() for path in files} == files_that_should_ship()

    # -I keeps out the current folder and the environment. The editable install of the same
    # interpreter still answers for `holdfast`, so its finder is taken away before the first import.
    program = """
import importlib, pathlib, sys
unpacked, *names = sys.argv[1:]
sys.meta_path[:] = [each for each in sys.meta_path if "__editable__" not in getattr(each, "__module__", "")]
sys.path.insert(0, unpacked)
for name in names:
    file = importlib.import_module(name).__file__
    assert pathlib.Path(file).is_relative_to(unpacked), f"{name} came from {file}"
"""
    subprocess.run([sys.executable, "-I", "-c", program, str(unpacked), *sorted(FOLDERS)], check=True)


def build_wheel(tmp_path: Path) -> Path:
    """Build from a copy, for setuptools leaves folders of its own beside what it builds."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for top in TOP_FOLDERS:
        shutil.copytree(ROOT / top, source / top, ignore=shutil.ignore_patterns("__pycache__"))
    # Without isolation nothing is fetched: setuptools is the one of this environment.
    options = ["--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    command = [sys.executable, "-m", "build", *options, str(source)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    [wheel] = tmp_path.glob("*.whl")
    return wheel


def files_that_should_ship() -> set[str]:
    return {
        f"{name.replace('.', '/')}/{file.name}"
        for name, folder in FOLDERS.items()
        for file in (ROOT / folder).iterdir()
        if file.suffix == ".py" or file.name == "py.typed"
    }
