"""The laws on dependencies, on the environment, and on the length of files, read off the source by ``ast``."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PASS_LINES = 170
MODULE_LINES = 450


def source_files() -> dict[str, Path]:
    """Module name of every source file, the passes under the package's own name for them."""
    files = {}
    for folder, package in ((ROOT / "fxbackend", "fxbackend"), (ROOT / "passes", "fxbackend.passes")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if package == "fxbackend" and parts[0] == "passes":
                continue  # the link: some Pythons follow it, others do not
            name = ".".join((package, *parts)).removesuffix(".__init__")
            files[name] = path
    return files


FILES = source_files()


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but those that only a type checker sees (the body of ``if TYPE_CHECKING``)."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in {
            getattr(child.test, "id", None),
            getattr(child.test, "attr", None),
        }:
            for other in child.orelse:
                yield from runtime_nodes(other)
        else:
            yield from runtime_nodes(child)


def imports(module: str, path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and absolute name of all that ``module`` imports when it runs, at its top or inside a function.

    ``from a import b`` gives ``a.b``: whether b is a module or not, it lies below a.
    """
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in runtime_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join(base + ([node.module] if node.module else []))
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def below(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def import_offences(applies: Callable[[str], bool], forbidden: Callable[[str], bool]) -> list[str]:
    """Where a module that ``applies`` selects imports what is ``forbidden``."""
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for module, path in FILES.items()
        if applies(module)
        for line, name in imports(module, path, parse(path))
        if forbidden(name)
    ]


def test_the_scan_sees_the_source() -> None:
    assert "fxbackend" in FILES
    assert any(below(name, "fxbackend.passes") for name in FILES)


def test_the_scan_sees_every_way_to_import() -> None:
    code = (
        "import a.b\nfrom c import d\nfrom . import e\nfrom ..f import g\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import unseen\nelse:\n    import h\n"
        "def later():\n    import i\n    importlib.import_module('j.k')\n"
    )
    found = [name for _, name in imports("fxbackend.x.y", Path("y.py"), ast.parse(code))]
    expected = ["a.b", "c.d", "fxbackend.x.e", "fxbackend.f.g", "typing.TYPE_CHECKING", "h", "i", "j.k"]
    assert found == expected
    in_package = imports("fxbackend.x", Path("__init__.py"), ast.parse("from . import e"))
    assert [name for _, name in in_package] == ["fxbackend.x.e"]


@pytest.mark.parametrize(("library", "folder"), [("transformers", "fxbackend.hf"), ("vllm", "fxbackend.targets.vllm")])
def test_one_folder_alone_imports(library: str, folder: str) -> None:
    assert not import_offences(lambda module: not below(module, folder), lambda name: below(name, library))


@pytest.mark.parametrize(("one", "other"), [("passes", "targets"), ("targets", "passes")])
def test_passes_and_targets_never_import_each_other(one: str, other: str) -> None:
    assert not import_offences(
        lambda module: below(module, f"fxbackend.{one}"), lambda name: below(name, f"fxbackend.{other}", other)
    )


def test_nothing_imports_the_passes_by_the_name_of_their_folder() -> None:
    assert not import_offences(lambda module: True, lambda name: below(name, "passes"))


def test_ops_program_and_weights_need_torch_only() -> None:
    allowed = {"fxbackend", "torch", *sys.stdlib_module_names}
    assert not import_offences(
        lambda module: below(module, "fxbackend.ops", "fxbackend.program", "fxbackend.weights"),
        lambda name: name.split(".")[0] not in allowed,
    )


def test_the_environment_is_read_in_settings_only() -> None:
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    offences = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for module, path in FILES.items()
        if module != "fxbackend.settings"
        for node in ast.walk(parse(path))
        if (isinstance(node, ast.Attribute) and node.attr in names and getattr(node.value, "id", "") == "os")
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and names & {alias.name for alias in node.names})
    ]
    assert not offences


def test_files_stay_short() -> None:
    too_long = []
    for module, path in FILES.items():
        limit = PASS_LINES if below(module, "fxbackend.passes") else MODULE_LINES
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > limit:
            too_long.append(f"{path.relative_to(ROOT)}: {lines} lines, at most {limit}")
    assert not too_long


def test_import_needs_neither_vllm_nor_transformers() -> None:
    code = "import sys, fxbackend; print(*sorted({'vllm', 'transformers'} & {m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
