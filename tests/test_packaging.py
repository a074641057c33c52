"""What is built and installed: one package, ``fxbackend``, with the passes inside it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PASSES = sorted(path.name for path in (ROOT / "passes").glob("*.py"))
COPIED = ("pyproject.toml", "README.md", "LICENSE", "fxbackend", "passes")


def run(*command: str, cwd: Path) -> str:
    """Run a command and return its output; a failure shows all of it."""
    done = subprocess.run(command, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, so that a build leaves nothing behind and finds nothing from an earlier one."""
    target = tmp_path_factory.mktemp("tree")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)
    return target


@pytest.fixture(scope="module")
def built(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel built from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree), cwd=out)
    return out


def only(paths: Iterable[Path]) -> Path:
    found = list(paths)
    assert len(found) == 1, found
    return found[0]


def check_contents(names: list[str]) -> None:
    """``names`` are the files below the installation's root."""
    assert {name.split("/")[0] for name in names} == {"fxbackend"}
    assert "fxbackend/py.typed" in names
    assert sorted(name.removeprefix("fxbackend/passes/") for name in names if name.startswith("fxbackend/passes/")) == (
        PASSES
    )
    assert not [name for name in names if "__pycache__" in name]


def test_there_are_passes() -> None:
    assert "__init__.py" in PASSES
    assert (ROOT / "fxbackend" / "passes").is_symlink()
    assert (ROOT / "fxbackend" / "passes").readlink() == Path("../passes")


def test_wheel_contains_every_module_and_one_top_level_name(tree: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(tree), cwd=tmp_path)
    with zipfile.ZipFile(only(tmp_path.glob("*.whl"))) as wheel:
        names = wheel.namelist()
        metadata = wheel.read(next(name for name in names if name.endswith("METADATA"))).decode()
        entry_points = wheel.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    files = [name for name in names if ".dist-info/" not in name]
    check_contents(files)
    modules = {path.relative_to(tree).as_posix() for path in (tree / "fxbackend").rglob("*.py")}
    assert modules <= set(files), "a folder without __init__.py is left out of the wheel"
    assert "License-Expression: Apache-2.0" in metadata
    assert "[vllm.general_plugins]\nfxbackend = fxbackend.targets.vllm.plugin:register" in entry_points
    assert "[console_scripts]\nfxbackend = fxbackend.cli:main" in entry_points


def test_sdist_holds_the_passes_as_plain_files_and_builds_the_same_wheel(built: Path) -> None:
    with tarfile.open(only(built.glob("*.tar.gz"))) as sdist:
        members = {member.name.split("/", 1)[1]: member for member in sdist.getmembers() if "/" in member.name}
    for name in PASSES:
        assert members[f"fxbackend/passes/{name}"].isfile()
    assert not [name for name in members if name.split("/")[0] == "passes"]
    with zipfile.ZipFile(only(built.glob("*.whl"))) as wheel:
        check_contents([name for name in wheel.namelist() if ".dist-info/" not in name])


def test_editable_install_exposes_the_passes_under_the_package_only(tree: Path, tmp_path: Path) -> None:
    backend = f"import setuptools.build_meta as b; b.build_editable({str(tmp_path)!r})"
    run(sys.executable, "-c", backend, cwd=tree)
    site = tmp_path / "site"
    with zipfile.ZipFile(only(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    # Without site: the environment that runs this test may hold an editable install of its own.
    look = (
        "import importlib.util as u, site\n"
        f"site.addsitedir({str(site)!r})\n"
        "print(*u.find_spec('fxbackend').submodule_search_locations)\n"
        "print(u.find_spec('passes'))\n"
    )
    location, top_level = run(sys.executable, "-S", "-c", look, cwd=tmp_path).split()
    assert Path(location) == tree / "fxbackend"
    assert (Path(location) / "passes" / "__init__.py").is_file()
    assert top_level == "None"
