"""YAML, JSON, files that extend others, and what a user's own words may reach."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from skyrl.errors import ConfigError, Problem
from skyrl.tree import Secret, evolve_at, field, frozen, to_dict
from skyrl.tree.arguments import read_argument, read_python
from skyrl.tree.builder import ReadContext, TreeBuilder
from skyrl.tree.files import read_file
from skyrl.tree.imports import import_object
from skyrl.tree.migrations import Migration
from skyrl.tree.origins import Assignment
from skyrl.tree.types import MOST_VALUES, Gigabytes, Seconds, WholeSeconds
from skyrl.tree.yaml_file import yaml_text
from tests.tree.trees import Optimizer, Run, built, only_problem

OPEN = ReadContext(
    environ={"STEPS": "7", "RATE": "fast", "NAMES": '["a", "b"]'},
    presets={"short": {"steps": 3, "policy": {"path": "small"}}},
    migrations=(
        Migration(old="policy.rate", new="policy.optimizer.lr", since="1.0"),
        Migration(old="policy.opt", new="policy.optimizer"),
        Migration(old="loud", new="mode", convert=lambda value: "latest" if value else "none"),
        Migration(old="gone", since="2.0", reason="nobody used it", harmless=(False, 0)),
    ),
    is_open=True,
)


def from_files(folder: Path, *names: str, context: ReadContext = OPEN) -> TreeBuilder[Run]:
    builder = TreeBuilder(Run(), context)
    for name in names:
        builder.assign_all(read_file(str(folder / name), context.presets))
    return builder


def words(*args: str, context: ReadContext = OPEN) -> TreeBuilder[Run]:
    builder = TreeBuilder(Run(), context)
    builder.assign_all(read_argument(word, number) for number, word in enumerate(args, start=1))
    return builder


def write(folder: Path, **texts: str) -> None:
    """`run_toml="..."` writes run.toml."""
    for name, text in texts.items():
        (folder / name.replace("_", ".")).write_text(text, encoding="utf-8")


def refusal(folder: Path, name: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        read_file(str(folder / name), OPEN.presets)
    [problem] = caught.value.problems
    return problem


# Languages


def test_the_three_languages_say_the_same(tmp_path: Path) -> None:
    write(
        tmp_path,
        a_toml='steps = "none"\nstop = ["x"]\n[policy.optimizer]\nlr = 1e-6\n[policy.extra]\nno = "on"',
        b_yaml="steps: null\nstop: [x]\npolicy:\n  optimizer: {lr: 1e-6}\n  extra: {no: on}",
        c_json='{"steps": null, "stop": ["x"], "policy": {"optimizer": {"lr": 1e-6}, "extra": {"no": "on"}}}',
    )
    trees = [built(from_files(tmp_path, name)) for name in ("a.toml", "b.yaml", "c.json")]
    assert trees[0] == trees[1] == trees[2]
    assert to_dict(trees[1])["policy"]["extra"] == {"no": "on"}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-6", 1e-6), ("no", "no"), ("on", "on"), ("0x10", 16), ("0o17", 15), ("~", None), ("1_0", "1_0"),
     ("2020-01-01", "2020-01-01"), ("!!str 5", "5"), ("'5'", "5"), (".5", 0.5), ("True", True), ("12:30", "12:30")],
)  # fmt: skip
def test_yaml_scalars_are_those_of_version_1_2(text: str, value: Any, tmp_path: Path) -> None:
    write(tmp_path, run_yaml=f"policy: {{extra: {{x: {text}}}}}")
    got = to_dict(built(from_files(tmp_path, "run.yaml")))["policy"]["extra"]["x"]
    assert (type(got), got) == (type(value), value)


@pytest.mark.parametrize(
    ("text", "message", "location"),
    [
        ("seed: 1\nseed: 2", "the key 'seed' appears twice", ":2:1"),
        ("seed: !!python/object:os.system x", "cannot be read as plain data", ":1:7"),
        ("a: &a [*a]", "the alias *a does not refer to a value that ends before it", ":1:8"),
        ("a: *b", "the alias *b does not refer to a value", ":1:4"),
        ("a: &b 1\nc: &b 2", "the anchor &b is defined twice", ":2:4"),
        ("1: x", "is not text: put it in quotes", ":1:1"),
        ("a: {<<: {b: 1}}", "no merge key", ":1:5"),
        ("a: [", "did not find", ":2:1"),
        ("--- a\n--- b", "a second document", ":2:1"),
        ("a: \x01", "special characters|control characters", ""),
    ],
)
def test_yaml_that_is_refused(text: str, message: str, location: str, tmp_path: Path) -> None:
    write(tmp_path, run_yaml=text)
    problem = refusal(tmp_path, "run.yaml")
    assert any(part in problem.message for part in message.split("|"))
    assert problem.location == f"{tmp_path}/run.yaml{location}"


def test_aliases_that_unfold_without_end_are_refused_at_once(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    assert 9**9 > MOST_VALUES
    write(tmp_path, run_yaml="\n".join(lines))
    assert "has more than 50000 values" in refusal(tmp_path, "run.yaml").message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "appears twice"),
        ('{"a": NaN}', "the constant NaN is not a JSON number"),
        ("{", "expecting property name"),
    ],
)
def test_json_that_is_refused(text: str, message: str, tmp_path: Path) -> None:
    write(tmp_path, run_json=text)
    assert message in refusal(tmp_path, "run.json").message


@pytest.mark.parametrize(
    ("name", "text"),
    [("run.yaml", "seed: 1\npolicy:\n  optimizer:\n    lr: fast"),
     ("run.json", '{"seed": 1,\n "policy": {\n "optimizer": {\n "lr": "fast"}}}'),
     ("run.toml", 'seed = 1\n[policy]\n[policy.optimizer]\nlr = "fast"')],
)  # fmt: skip
def test_a_wrong_value_is_told_with_its_line_in_every_language(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    problem = only_problem(from_files(tmp_path, name))
    assert (problem.path, problem.location) == ("policy.optimizer.lr", f"{tmp_path}/{name}:4")


@pytest.mark.parametrize("value", ["1e-6", "no", "null", "", "0x1", ".5", "12:30", "<<", "=", "\x85\u2028", "é\t#:"])
def test_text_that_looks_like_something_else_survives_yaml(value: str, tmp_path: Path) -> None:
    write(tmp_path, run_yaml=yaml_text({"policy": {"extra": {"x": value, "y": [value]}}}))
    assert built(from_files(tmp_path, "run.yaml")).policy.extra == {"x": value, "y": (value,)}


# extends


def test_a_file_is_written_on_top_of_what_it_extends(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "base.yaml").write_text("extends: preset:short\nname: base\nseed: 1")
    write(tmp_path, run_toml='extends = "inner/base.yaml"\nseed = 2')
    builder = from_files(tmp_path, "run.toml")
    run = built(builder)
    assert (run.steps, run.policy.path, run.name, run.seed) == (3, "small", "base", 2)
    locations = [origin.location for origin in builder.origins["seed"]]
    assert locations == [f"{tmp_path}/inner/base.yaml:3", f"{tmp_path}/run.toml:2"]
    assert builder.origins["steps"][-1].location == "preset short"


def test_several_bases_count_in_their_order(tmp_path: Path) -> None:
    write(tmp_path, a_toml="seed = 1\nsteps = 1", b_toml="seed = 2", c_toml='extends = ["a.toml", "b.toml"]')
    run = built(from_files(tmp_path, "c.toml"))
    assert (run.seed, run.steps) == (2, 1)


@pytest.mark.parametrize(
    ("base", "message"),
    [('"run.toml"', "circular reference: run.toml extends this file"), ('"gone.toml"', "no such file"),
     ('"preset:shrt"', "no such preset"), ("5", "5 is neither a file nor a list of files")],
)  # fmt: skip
def test_a_base_that_cannot_be_used_is_told_where_it_is_named(base: str, message: str, tmp_path: Path) -> None:
    write(tmp_path, run_toml=f"seed = 1\nextends = {base}" if base != "5" else "seed = 1\nextends = 5")
    problem = refusal(tmp_path, "run.toml")
    assert message in problem.message
    assert problem.location == f"{tmp_path}/run.toml:2"


# Words


def test_a_path_goes_back_to_its_default() -> None:
    builder = words(
        "seed=1", "policy.optimizer.lr=1", "policy.extra.a=1", "~seed", "~policy.optimizer", "~policy.extra.a"
    )
    assert built(builder) == Run()
    assert [origin.location for origin in builder.origins["seed"]] == ["argument 4"]
    assert builder.origins["seed"][0].kind == "default"


def test_an_item_that_is_there_is_replaced() -> None:
    assert built(words("policy.optimizer.betas.1=0.5")).policy.optimizer.betas == (0.9, 0.5)
    assert built(words('policy.extra.a=["x", "y"]', "policy.extra.a.0=z")).policy.extra == {"a": ("z", "y")}


TABLES = 'policy.extra.a=[{"b": [1], "c": 3}, [1, 2], 5]'


@pytest.mark.parametrize(
    ("word", "items"),
    [
        ("policy.extra.a.0.c=4", ({"b": (1,), "c": 4}, (1, 2), 5)),
        ("policy.extra.a.0.d.e=4", ({"b": (1,), "c": 3, "d": {"e": 4}}, (1, 2), 5)),
        ('policy.extra.a.0={"c": 4}', ({"b": (1,), "c": 4}, (1, 2), 5)),
        ("policy.extra.a.0.b+=2", ({"b": (1, 2), "c": 3}, (1, 2), 5)),
        ("~policy.extra.a.0.c", ({"b": (1,)}, (1, 2), 5)),
        ("policy.extra.a.1.0=7", ({"b": (1,), "c": 3}, (7, 2), 5)),
        ("policy.extra.a.1+=[3, 4]", ({"b": (1,), "c": 3}, (1, 2, 3, 4), 5)),
        ('policy.extra.a.2={"c": 4}', ({"b": (1,), "c": 3}, (1, 2), {"c": 4})),
        ('policy.extra.a.1={"c": 4}', ({"b": (1,), "c": 3}, {"c": 4}, 5)),
    ],
)
def test_what_is_inside_of_an_item_is_written_like_what_is_inside_of_a_table(word: str, items: object) -> None:
    builder = words(TABLES, word)
    assert built(builder).policy.extra == {"a": items}
    assert [origin.location for origin in builder.origins["policy.extra.a"]][-1] == "argument 2"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("policy.extra.a.2.b=1", "item 2 is neither a table nor a list: it has no b"),
        ("policy.extra.a.3.b=1", "there is no item 3; existing items: 0 to 2"),
        ("policy.extra.a.1.2=1", "there is no item 2; existing items: 0 to 1"),
        ("policy.extra.a.2+=1", "is not a list"),
        ("~policy.extra.a.1", "a list item cannot be removed"),
        ("~policy.extra.a.7.b", "there is no item 7"),
    ],
)
def test_writes_into_items_that_are_refused(word: str, message: str) -> None:
    assert message in only_problem(words(TABLES, word)).message


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("policy.optimizer.betas.2=0.5", "there is no item 2; existing items: 0 to 1"),
        ("stop.0=x", "there is no item 0; existing items: none"),
        ("policy.optimizer.betas.x=1", "there is no item x"),
        ("seed+=1", "+= works only on lists; this is a whole number"),
        ("policy+=1", "is a table; += works only on lists"),
        ("~sed", "did you mean seed?"),
        ("policy.optimizer.betas+=x", "'x' is not a number"),
    ],
)
def test_words_that_are_refused(word: str, message: str) -> None:
    assert message in only_problem(words(word)).message


def test_items_are_added_to_lists() -> None:
    assert built(words("stop+=a", 'stop+=["b", "c"]')).stop == ("a", "b", "c")
    assert built(words("modules+=x")).modules == ("all", "x")
    assert built(words("policy.extra.a+=1", "policy.extra.a+=2")).policy.extra == {"a": (1, 2)}


def test_a_table_is_taken_from_a_file(tmp_path: Path) -> None:
    write(tmp_path, part_toml="lr = 0.5\ndecay = 0.25")
    builder = words(f"critic.optimizer=@{tmp_path}/part.toml")
    assert built(builder).critic.optimizer == Optimizer(lr=0.5, decay=0.25)
    assert builder.origins["critic.optimizer.decay"][-1].location == f"{tmp_path}/part.toml:2"
    assert built(words("name=@part.toml")).name == "@part.toml"
    missing = only_problem(words("critic.optimizer=@gone.toml"))
    assert (missing.path, missing.message) == ("gone.toml", "cannot be read: no such file")


# Environment


def test_a_variable_is_read_as_on_a_command_line(tmp_path: Path) -> None:
    write(tmp_path, run_toml='steps = "env:STEPS"\nstop = "env:NAMES"')
    builder = from_files(tmp_path, "run.toml")
    run = built(builder)
    assert (run.steps, run.stop) == (7, ("a", "b"))
    assert builder.origins["steps"][-1].location == f"{tmp_path}/run.toml:1 (env:STEPS)"


def test_a_variable_that_is_missing_or_wrong_is_told(tmp_path: Path) -> None:
    assert "is not set" in only_problem(words("steps=env:GONE")).message
    wrong = only_problem(words("policy.optimizer.lr=env:RATE"))
    assert (wrong.message, wrong.location) == ("'fast' is not a number", "argument 1")
    without = only_problem(words("steps=env:STEPS", context=ReadContext(is_open=True)))
    assert "none were passed" in without.message


@pytest.mark.parametrize("later", ["steps=5", "~steps", "steps=env:STEPS"])
def test_a_variable_is_missed_only_where_no_later_layer_gives_the_value(later: str) -> None:
    assert built(words("steps=env:GONE", later)).steps == {"steps=5": 5, "~steps": Run().steps}.get(later, 7)
    assert "env:GONE" in only_problem(words(later, "steps=env:GONE")).message


def test_references_are_followed_in_free_form_tables_and_not_in_stored_trees() -> None:
    builder = words("policy.extra.a=env:STEPS")
    assert built(builder).policy.extra == {"a": 7}
    assert builder.origins["policy.extra.a"][-1].location == "argument 1 (env:STEPS)"
    assert built(words("name=env:STEPS", context=ReadContext())).name == "env:STEPS"


# Older names


def test_an_old_name_is_followed_with_a_warning(tmp_path: Path) -> None:
    write(tmp_path, run_toml="[policy]\nrate = 0.5\n[policy.opt]\ndecay = 0.25")
    builder = from_files(tmp_path, "run.toml")
    run = builder.build()
    assert run.policy.optimizer == Optimizer(lr=0.5, decay=0.25)
    assert [(problem.path, problem.severity, problem.location[-1]) for problem in builder.problems] == [
        ("policy.rate", "warning", "2"),
        ("policy.opt", "warning", "3"),
    ]
    assert "is called policy.optimizer.lr in skyrl (since 1.0)" in builder.problems[0].message
    assert builder.origins["policy.optimizer.lr"][-1].location == f"{tmp_path}/run.toml:2"


def test_two_values_under_two_names_of_one_field_are_refused_in_one_file_and_layered_in_two(tmp_path: Path) -> None:
    write(tmp_path, old_toml="[policy]\nrate = 0.5", new_toml="[policy.optimizer]\nlr = 0.25")
    write(tmp_path, both_toml="[policy]\nrate = 0.5\n[policy.optimizer]\nlr = 0.25")
    write(tmp_path, same_toml="[policy]\nrate = 0.5\n[policy.optimizer]\nlr = 0.5")
    assert from_files(tmp_path, "old.toml", "new.toml").build().policy.optimizer.lr == 0.25
    assert from_files(tmp_path, "same.toml").build().policy.optimizer.lr == 0.5
    builder = from_files(tmp_path, "both.toml")
    builder.build()
    [_, refused] = builder.problems
    assert (refused.path, refused.severity, refused.location) == ("policy.rate", "error", f"{tmp_path}/both.toml:2")
    assert refused.message == "0.5 contradicts policy.optimizer.lr = 0.25: both names are the same field"


def test_a_value_is_converted_to_what_the_new_name_takes() -> None:
    assert [words(f"loud={text}").build().mode for text in ("true", "false")] == ["latest", "none"]


def test_what_is_gone_is_refused_with_the_reason_unless_it_asked_for_nothing() -> None:
    refused = only_problem(words("gone=5"))
    assert (refused.severity, refused.hint) == ("error", "nobody used it")
    left_out = only_problem(words("gone=false"))
    assert (left_out.severity, left_out.path) == ("warning", "gone")
    assert only_problem(words("gone=false", context=ReadContext())).severity == "error"


# Classes of one's own


def test_a_class_is_imported_where_a_users_own_word_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = "from skyrl.tree import frozen\nfrom tests.tree.trees import Optimizer\n"
    write(
        tmp_path,
        mine_py=f"{source}@frozen\nclass Mine(Optimizer):\n    extra: int = 1\nclass Bare(Optimizer):\n    x: int = 2",
    )
    write(tmp_path, run_toml='[policy.optimizer]\nclass = "mine.py:Mine"\nextra = 5\nlr = 0.5')
    optimizer = built(from_files(tmp_path, "run.toml")).policy.optimizer
    assert (type(optimizer).__name__, to_dict(optimizer)["extra"], optimizer.lr) == ("Mine", 5, 0.5)
    assert (
        "no such field; did you mean policy.optimizer.extra?"
        in only_problem(words("policy.optimizer.class=mine.py:Mine", "policy.optimizer.extr=5")).message
    )
    assert "lacks the decorator @frozen" in only_problem(words("policy.optimizer.class=mine.py:Bare")).message
    assert "there is no file gone.py" in only_problem(words("policy.optimizer.class=gone.py:Mine")).message


def test_an_instance_of_a_class_from_a_file_reaches_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = "from skyrl.tree import frozen\nfrom tests.tree.trees import Optimizer\n"
    write(tmp_path, other_py=f"{source}@frozen\nclass Other(Optimizer):\n    extra: int = 1\n")
    run = built(words("policy.optimizer.class=other.py:Other", "policy.optimizer.extra=5"))
    (tmp_path / "run.pickle").write_bytes(pickle.dumps(run))
    program = "import pickle; print(pickle.load(open('run.pickle', 'rb')).policy.optimizer.extra)"
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout == "5\n"
    assert pickle.loads(pickle.dumps(run)) == run


def test_a_file_is_imported_once_and_another_of_its_name_beside_it(tmp_path: Path) -> None:
    for folder, number in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same_name.py").write_text(f"class Thing:\n    number = {number}\n")
    first, second = (import_object(f"{tmp_path}/{folder}/same_name.py:Thing") for folder in ("a", "b"))
    assert (first.number, second.number) == (1, 2)
    assert import_object(f"{tmp_path}/a/../a/same_name.py:Thing") is first
    assert first.__module__ == "skyrl_user_same_name" != second.__module__


@pytest.mark.parametrize("name", ["nowhere:Mine", "json:JSONDecoder", "tests.tree.trees:Run", "Mine", "5"])
def test_what_is_no_subclass_is_refused(name: str) -> None:
    problem = only_problem(words(f"policy.optimizer.class={name}"))
    assert "is not a subclass" in problem.message or "the module nowhere cannot be found" in problem.message


def test_a_stored_tree_imports_nothing() -> None:
    builder = TreeBuilder(Run(), ReadContext())
    builder.assign_all(read_python({"policy.optimizer.class": "this:Zen"}))
    assert "is not an imported subclass" in only_problem(builder).message
    assert "this" not in sys.modules


# Units


@frozen
class Timed:
    timeout: Seconds = 60.0
    whole: WholeSeconds = 30
    size: Gigabytes | None = None


def timed(text: str) -> TreeBuilder[Timed]:
    builder = TreeBuilder(Timed())
    builder.assign(read_argument(text, 1))
    return builder


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [("timeout=90s", "timeout", 90.0), ("timeout=10m", "timeout", 600.0), ("timeout=1.5h", "timeout", 5400.0),
     ("timeout=250ms", "timeout", 0.25), ("timeout=5", "timeout", 5.0), ("whole=2m", "whole", 120),
     ("size=512MB", "size", 0.512), ("size=1GiB", "size", 1.073741824), ("size=null", "size", None)],
)  # fmt: skip
def test_numbers_may_have_a_unit(word: str, name: str, value: Any) -> None:
    got = getattr(timed(word).build(), name)
    assert (type(got), got) == (type(value), value)
    if isinstance(value, float):
        assert getattr(Timed(**{name: word.partition("=")[2]} if word[-1].isalpha() else {name: value}), name) == value


def test_another_unit_and_a_part_of_a_second_are_refused() -> None:
    [problem] = timed("timeout=5GB").problems
    assert (problem.message, "units: ms, s" in problem.hint) == ("'5GB' is not a number of seconds", True)
    [problem] = timed("whole=250ms").problems
    assert "is not a whole number" in problem.message


# Secrets


@frozen
class Judge:
    token: Secret | None = field(default=None)
    name: str = "judge"


def test_a_secret_is_a_reference_that_shows_as_stars() -> None:
    judge = Judge(token="env:JUDGE_TOKEN")  # type: ignore[arg-type]  # converted or refused
    stored = json.loads(json.dumps(to_dict(judge)))
    assert stored["token"] == "*** (env:JUDGE_TOKEN)"
    assert "***" in repr(judge)
    restored = evolve_at(Judge(), "token", stored["token"])
    assert restored == judge == pickle.loads(pickle.dumps(judge))
    assert hash(restored) == hash(judge)
    assert judge.token is not None
    assert judge.token.reveal({"JUDGE_TOKEN": "sk-1"}) == "sk-1"
    with pytest.raises(ConfigError, match="is not set"):
        judge.token.reveal({})


def test_a_secret_that_stands_in_the_configuration_is_refused_and_never_repeated() -> None:
    builder = TreeBuilder(Judge(), OPEN)
    builder.assign(read_argument("token=sk-very-secret", 1))
    problem = only_problem(builder)
    assert "sk-very-secret" not in f"{problem}"
    assert problem.hint == 'write "env:NAME" to read it from a variable'
    with pytest.raises(ConfigError) as caught:
        Judge(token="sk-very-secret")  # type: ignore[arg-type]  # converted or refused
    assert "sk-very-secret" not in str(caught.value)


def test_a_chain_of_origins_has_the_value_of_each_step() -> None:
    builder = words("steps=1", "steps=env:STEPS")
    built(builder)
    assert [(origin.kind, origin.value) for origin in builder.origins["steps"]] == [("argument", 1), ("environment", 7)]


def test_an_assignment_may_be_moved_below_a_path() -> None:
    [assignment] = read_python({"a": 1})
    moved: Assignment = assignment.below(("x", "y"))
    assert moved.path == ("x", "y", "a")
    assert isinstance(OPEN.presets, Mapping)


def test_text_is_written_in_quotes_where_it_needs_them_alone() -> None:
    assert yaml_text({"plain": "two words", "escaped": "a\rb"}) == 'plain: two words\nescaped: "a\\rb"\n'


def test_what_is_inside_a_field_that_is_no_table_is_refused_with_the_fields_whole_name() -> None:
    message = only_problem(words("policy.path.x=1")).message
    assert message.startswith("no such field: policy.path is ")


def test_a_module_of_the_folder_that_the_command_runs_in_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", ".")])
    write(tmp_path, besidethecommand_py="answer = 42\n")
    assert import_object("besidethecommand:answer") == 42
