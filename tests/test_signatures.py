"""Functions are short, every parameter and result has a type, and few of these types are `Any`."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.syntax import nodes_of, tree_of

pytestmark = pytest.mark.xdist_group("house")

ROOT = Path(__file__).parents[1]
LONGEST = 60
"""Lines of a function, its signature and docstring included."""

MOST_LONG = 2
MOST_ANY = 200
"""Functions with a parameter or a result of type `Any` itself."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.Module) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def parameters(function: Function) -> list[ast.arg]:
    args = function.args
    starred = [parameter for parameter in (args.vararg, args.kwarg) if parameter is not None]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *starred]


def is_long(function: Function) -> bool:
    return (function.end_lineno or 0) - function.lineno + 1 > LONGEST


def is_kernel(function: Function) -> bool:
    """Triton compiles the body of a kernel; its parameters are pointers and numbers without a type in Python."""
    return any(ast.unparse(decorator) == "triton.jit" for decorator in function.decorator_list)


def is_unannotated(function: Function) -> bool:
    if is_kernel(function):
        return False
    bare = [parameter.arg for parameter in parameters(function) if parameter.annotation is None]
    return function.returns is None or bool(set(bare) - {"self", "cls"})


def has_any(function: Function) -> bool:
    """Is a parameter or the result annotated `Any` or `typing.Any`, and nothing more?"""
    annotations = [function.returns, *(parameter.annotation for parameter in parameters(function))]
    return any(ast.unparse(annotation) in ("Any", "typing.Any") for annotation in annotations if annotation is not None)


@pytest.fixture(scope="module")
def written() -> list[tuple[str, str, Function]]:
    """Package, place and node of every function of the library."""
    rows = []
    for file in sorted((ROOT / "skyrl").rglob("*.py")):
        path = file.relative_to(ROOT / "skyrl")
        for function in functions(tree_of(file)):
            rows.append((path.parts[0], f"skyrl/{path}:{function.lineno}: {function.name}", function))
    assert rows
    return rows


def test_functions_are_short(written: list[tuple[str, str, Function]]) -> None:
    long = [location for _, location, function in written if is_long(function)]
    assert len(long) <= MOST_LONG, "\n".join(long)


def test_every_function_is_annotated(written: list[tuple[str, str, Function]]) -> None:
    assert [location for _, location, function in written if is_unannotated(function)] == []


def test_few_functions_have_any_in_their_signature(written: list[tuple[str, str, Function]]) -> None:
    locations = [(package, location) for package, location, function in written if has_any(function)]
    by_package = Counter(package for package, _ in locations).most_common()
    assert len(locations) <= MOST_ANY, "\n".join([f"{by_package}", *(location for _, location in locations)])


def test_no_name_stands_for_any() -> None:
    """An alias would hide it from the count."""
    aliases = []
    for file in sorted((ROOT / "skyrl").rglob("*.py")):
        for node in nodes_of(file):
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            imported = [alias for alias in node.names if alias.asname] if isinstance(node, ast.ImportFrom) else []
            if (isinstance(value, ast.Name) and value.id == "Any") or any(alias.name == "Any" for alias in imported):
                aliases.append(f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}")
    assert aliases == []


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("def f(a: int) -> int: ...", False),
        ("def f(a: Any) -> int: ...", True),
        ("def f(*a: int, **b: typing.Any) -> int: ...", True),
        ("async def f(a: int, *, b: int) -> Any: ...", True),
        ("def f(a: list[Any]) -> Any | None: ...", False),
    ],
)
def test_any_is_counted_where_it_is_the_whole_annotation(text: str, counts: bool) -> None:
    (function,) = functions(ast.parse(text))
    assert has_any(function) is counts


@pytest.mark.parametrize(
    ("text", "misses"),
    [
        ("def f(self, a: int) -> int: ...", False),
        ("def f(self, a) -> int: ...", True),
        ("def f(*a) -> int: ...", True),
        ("def f(a: int): ...", True),
    ],
)
def test_a_missing_annotation_is_found(text: str, misses: bool) -> None:
    (function,) = functions(ast.parse(text))
    assert is_unannotated(function) is misses


def test_a_function_of_61_lines_is_long() -> None:
    (short,), (long,) = (list(functions(ast.parse("def f() -> None:\n" + "    pass\n" * lines))) for lines in (59, 60))
    assert not is_long(short)
    assert is_long(long)
