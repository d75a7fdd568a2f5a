"""Where each value came from: the whole chain, the winner last."""

from __future__ import annotations

from pathlib import Path

from skyrl.tree.arguments import read_argument
from skyrl.tree.builder import TreeBuilder
from skyrl.tree.files import read_file
from skyrl.tree.origins import DEFAULT, KeyLines, Origin, dotted, place_of, written_paths
from tests.tree.trees import Model, Optimizer, Run, arguments, toml, values


def places(builder: TreeBuilder[Run], path: str) -> list[str]:
    """Where a path was written, winner last."""
    return [origin.location for origin in builder.origins.get(path, ())]


def test_the_chain_of_a_value_has_every_file_and_argument_that_set_it(tmp_path: Path) -> None:
    for number, text in enumerate(("seed = 1", "\nseed = 2"), start=1):
        (tmp_path / f"{number}.toml").write_text(text)
    builder = TreeBuilder(Run())
    builder.assign_all(
        [read_file(f"{tmp_path}/1.toml")[0], read_file(f"{tmp_path}/2.toml")[0], read_argument("seed=3", 1)]
    )
    assert places(builder, "seed") == [f"{tmp_path}/1.toml:1", f"{tmp_path}/2.toml:2", "argument 1"]
    assert builder.build().seed == 3


def test_every_key_of_a_table_has_its_own_line(tmp_path: Path) -> None:
    builder = toml(tmp_path, "[options]\na = 1\n[options.in]\nb = 2\nc.d = 3")
    assert {path: chain[-1].location[-1] for path, chain in builder.origins.items()} == {
        "options.a": "2",
        "options.in.b": "4",
        "options.in.c.d": "5",
    }


def test_a_table_that_is_absent_by_default_is_absent_again_once_all_that_was_written_in_it_is_forgotten() -> None:
    builder = arguments("judge.path=x", "policy.optimizer.lr=1", "~judge.path", "~policy.optimizer")
    assert builder.build() == Run()
    assert builder.origins.keys() == {"judge.path", "policy.optimizer"}
    assert builder.written == ["judge.path", "policy.optimizer.lr", "judge.path", "policy.optimizer"]


def test_an_item_of_a_list_in_a_free_form_table_is_traced_at_its_list() -> None:
    builder = arguments("options.list=[1, 2]", "options.list.0=3")
    assert builder.build().options == {"list": (3, 2)}
    assert places(builder, "options.list") == ["argument 1", "argument 2"]


def test_a_refused_value_has_no_origin() -> None:
    assert arguments("seed=x").origins == {}


def test_what_was_written_inside_a_replaced_table_is_gone() -> None:
    builder = arguments("judge.path=a", "judge=null", "judge.optimizer.lr=1")
    assert set(builder.origins) == {"judge", "judge.optimizer.lr"}
    builder = arguments("options.a.b=1", "options.a=2")
    assert set(builder.origins) == {"options.a"}


def test_an_instance_has_written_what_it_does_not_have_from_its_class() -> None:
    builder = values(critic=Model(path="x", optimizer=Optimizer(decay=0.5)))
    assert set(builder.origins) == {"critic", "critic.path", "critic.optimizer.decay"}
    assert "critic.optimizer" in written_paths(builder.origins)
    assert "critic.optimizer.lr" not in written_paths(builder.origins)


def test_written_means_by_a_person_at_the_path_or_inside_it() -> None:
    rule = Origin(kind="rule", where="a_rule")
    origins = {"a.b": (DEFAULT, rule), "a.c": (Origin(kind="argument", where="1"), rule), "ab": (rule,)}
    assert "a" in written_paths(origins)
    assert "a.c" in written_paths(origins)
    assert "a.b" not in written_paths(origins)
    assert "ab" not in written_paths(origins)
    assert "a.c.d" not in written_paths(origins)


def test_the_place_of_a_table_is_that_of_what_is_in_it_and_of_a_field_that_of_the_table_around_it() -> None:
    origins = {"a.b": (Origin(kind="argument", where="1"),), "c": (Origin(kind="file", where="run.toml"),)}
    assert place_of("a.b", origins) == place_of("a", origins) == "argument 1"
    assert place_of("c.d.e", origins) == "run.toml"
    assert place_of("a.x", origins) == place_of("b", origins) == ""


def test_a_place_is_told_as_a_person_would() -> None:
    assert Origin(kind="rule", where="a_rule").location == "derived by a_rule"
    assert Origin(kind="python").location == "Python"
    assert Origin(kind="file", where="run.toml").location == "run.toml"
    assert DEFAULT.location == ""


def test_a_dotted_path_quotes_what_has_to_be_quoted() -> None:
    assert dotted(("a", "b-c", "d")) == "a.b-c.d"
    assert dotted(("a", "b.c", "", 'd"e', "f g")) == 'a."b.c"."".' + r'"d\"e"' + '."f g"'


def test_an_item_has_the_line_of_the_list_around_it() -> None:
    lines = KeyLines(lambda: {("a",): 3, ("a", "b"): 4})
    line_numbers = [lines.line_of(path) for path in [("a", "b"), ("a", "b", "0"), ("a", "c"), ("d",), ()]]
    assert line_numbers == [4, 4, 3, None, None]
