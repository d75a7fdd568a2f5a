"""`path=value` from a command line."""

from __future__ import annotations

import pytest

from skyrl.errors import ConfigError
from skyrl.tree.arguments import read_argument, read_python, split_path


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("a", ("a",)),
        ("a.b_c.d-e", ("a", "b_c", "d-e")),
        ('a."b.c".d', ("a", "b.c", "d")),
        ('a."x=y"', ("a", "x=y")),
        ('""', ("",)),
        (r'"say \"hi\" \\"', ('say "hi" \\',)),
    ],
)
def test_a_path_is_split_at_its_dots_and_not_in_quotes(path: str, names: tuple[str, ...]) -> None:
    assert split_path(path) == names


@pytest.mark.parametrize("path", ["", ".", "a.", ".a", "a..b", "a b", 'a"b', '"a', '"a"b', "a=b", 'a."b'])
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="is not a dotted path"):
        split_path(path)


def test_the_value_is_everything_after_the_first_sign_of_equality() -> None:
    read = read_argument("a.b=c=d e", 3)
    assert (read.path, read.value, read.is_text, read.origin.location) == (("a", "b"), "c=d e", True, "argument 3")
    assert read_argument("a=", 1).value == ""
    assert read_argument("a=x\ny", 1).value == "x\ny"


def test_a_sign_of_equality_in_a_quoted_name_is_part_of_it() -> None:
    assert read_argument('a."x=y"=1', 1).path == ("a", "x=y")


@pytest.mark.parametrize(
    ("argument", "path", "message"),
    [
        ("+trainer.epochs=2", "+trainer.epochs", "the prefix + is not supported"),
        ("++trainer.epochs=2", "++trainer.epochs", "the prefix + is not supported"),
        ("trainer.epochs", "trainer.epochs", "neither a file nor path=value"),
        ("=2", "=2", "is not a dotted path"),
        ("a..b=2", "a..b", "is not a dotted path"),
        ("a b=2", "a b", "is not a dotted path"),
    ],
)
def test_what_is_no_argument_is_refused_with_its_number(argument: str, path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_argument(argument, 7)
    [problem] = caught.value.problems
    assert problem.path == path
    assert message in problem.message
    assert problem.location == "argument 7"


def test_the_prefix_plus_is_told_how_to_write_it() -> None:
    with pytest.raises(ConfigError, match=r"write trainer\.epochs=2;"):
        read_argument("++trainer.epochs=2", 1)


def test_overrides_in_python_have_the_types_of_python() -> None:
    [read] = read_python({"a.b": "1"})
    assert (read.path, read.value, read.is_text, read.origin.location) == (("a", "b"), "1", False, "Python")
