"""No module can reach itself by imports, wherever in a file they stand: at its top, in a function, for types alone."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.syntax import tree_of

pytestmark = pytest.mark.xdist_group("house")

ROOT = Path(__file__).parents[1]

Graph = Mapping[str, set[str]]
"""Module -> modules that it imports."""


def names_of(root: Path) -> dict[str, Path]:
    """Each module of the package `skyrl` below `root`, by its dotted name."""
    files = sorted((root / "skyrl").rglob("*.py"))
    return {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every statement that is not inside of a function."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from statements(node)


def imported(nodes: Iterable[ast.AST], modules: Mapping[str, object]) -> Iterator[str]:
    """Modules that are named in import statements. `from package import name` is the module of that name, if any."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module in modules:
            package = node.module
            inner = [f"{package}.{alias.name}" for alias in node.names]
            yield from (name if name in modules else package for name in inner)


def graph_of(root: Path) -> Graph:
    """Every import of every module, those inside of functions and under TYPE_CHECKING among them.

    Imports inside of functions are left out in `skyrl.cli`: a command imports its parts where it uses them, and they
    import what all commands share, so that `skyrl config check` starts quickly.
    """
    modules, graph = names_of(root), {}
    for name, file in modules.items():
        tree = tree_of(file)
        nodes = statements(tree) if package_of(name) == "skyrl.cli" else ast.walk(tree)
        graph[name] = set(imported(nodes, modules)) - {name}
    return graph


def package_of(module: str) -> str:
    """The part of skyrl that a module belongs to, such as skyrl.config."""
    return ".".join(module.split(".")[:2])


def packages(graph: Graph) -> Graph:
    """The same graph, package by package."""
    imports: dict[str, set[str]] = {}
    for module, others in graph.items():
        package = package_of(module)
        imports.setdefault(package, set()).update(package_of(other) for other in others)
    return {package: others - {package} for package, others in imports.items()}


def reached(graph: Graph, start: str) -> set[str]:
    """Everything that can be reached from `start` by one import or more."""
    reachable: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        module = waiting.pop()
        if module not in reachable:
            reachable.add(module)
            waiting += graph[module]
    return reachable


def in_cycles(graph: Graph) -> list[str]:
    """The modules that reach themselves."""
    return [module for module in graph if module in reached(graph, module)]


def test_no_module_imports_itself_over_others() -> None:
    assert in_cycles(graph_of(ROOT)) == []


def test_no_package_imports_itself_over_others() -> None:
    assert in_cycles(packages(graph_of(ROOT))) == []


def test_an_import_inside_a_function_closes_a_cycle(tmp_path: Path) -> None:
    package = tmp_path / "skyrl"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "upper.py").write_text("from skyrl.lower import load\n")
    (package / "lower.py").write_text("def load():\n    from skyrl import upper\n    return upper\n")
    (package / "apart.py").write_text("import skyrl.upper\n")
    assert in_cycles(graph_of(tmp_path)) == ["skyrl.lower", "skyrl.upper"]


def test_an_import_for_types_alone_closes_a_cycle(tmp_path: Path) -> None:
    package = tmp_path / "skyrl"
    package.mkdir()
    (package / "one.py").write_text("from skyrl.two import Two\n")
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from skyrl.one import One\n"
    (package / "two.py").write_text(typed)
    assert in_cycles(graph_of(tmp_path)) == ["skyrl.one", "skyrl.two"]
