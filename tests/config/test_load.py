"""Files and arguments become a tree; whatever is wrong with them is told, with its place, once."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import attrs
import pytest
import tomli_w

from skyrl.config import (
    AlgorithmConfig,
    OptimizerConfig,
    SamplingParams,
    SkyRLTrainConfig,
    compose,
    load,
    make_config,
)
from skyrl.config.settings.data import DataConfig
from skyrl.errors import ConfigError, Problem
from skyrl.tree import Secret, differences, evolve_at, field, frozen, get_at
from skyrl.tree.classes import leaf_paths, table_paths
from skyrl.tree.dump import flatten
from skyrl.tree.validators import positive
from tests.config.leaves import FIXED, LEAVES, OTHERS, RUNNABLE, each

NO_VALUE = "1979-05-27"
"""A date in TOML, which no field takes."""


@frozen
class Bonus(AlgorithmConfig):
    bonus: float = field(default=0.5, validator=positive)


def refused(files: Any = (), overrides: Any = (), **options: Any) -> tuple[Problem, ...]:
    """The problems that loading ends in."""
    with pytest.raises(ConfigError) as caught:
        load(files, overrides, **options)
    return caught.value.problems


def not_composed(files: Any = (), overrides: Any = ()) -> tuple[Problem, ...]:
    """The problems that composing ends in."""
    with pytest.raises(ConfigError) as caught:
        compose(files, overrides)
    return caught.value.problems


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Dotted paths as tables in tables."""
    tables: dict[str, Any] = {}
    for path, value in values.items():
        *parents, name = path.split(".")
        table = tables
        for parent in parents:
            table = table.setdefault(parent, {})
        table[name] = value
    return tables


def spelled(value: Any) -> str:
    """A value as text for a command line."""
    value = plain(value)
    return value if isinstance(value, str) else json.dumps(value)


def plain(value: Any) -> Any:
    """A value as a file has it: a secret is a reference."""
    return f"env:{value.name}" if isinstance(value, Secret) else value


def written(folder: Path, text: str, name: str = "run.toml") -> str:
    """The name of a file that holds `text`."""
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


# Values


def test_nothing_written_is_the_default_tree() -> None:
    loaded = load()
    assert loaded.config == SkyRLTrainConfig()
    assert loaded.origins == {}


@each(OTHERS)
def test_one_written_leaf_changes_that_leaf_alone_in_every_spelling(path: str, tmp_path: Path) -> None:
    value = OTHERS[path]
    expected = evolve_at(SkyRLTrainConfig(), path, value)
    file = written(tmp_path, tomli_w.dumps(nested({path: plain(value)})))
    assert load([file]).config == expected
    assert load([], [f"{path}={spelled(value)}"]).config == expected
    assert load([], {path: plain(value)}).config == expected
    assert load([], nested({path: plain(value)})).config == expected


@each(sorted(table_paths(SkyRLTrainConfig)))
def test_a_written_leaf_leaves_its_siblings_at_the_defaults_of_the_instance(table: str) -> None:
    default = SkyRLTrainConfig()
    leaf = next(path for path in OTHERS if path.rpartition(".")[0].startswith(table))
    run = load([], {leaf: OTHERS[leaf]}).config
    before, after = flatten(default), flatten(run)
    optional = {path for path in after if path not in before}  # a table that was null has all its leaves now
    assert {path: after[path] for path in before if path in after and path != leaf} == {
        path: value for path, value in before.items() if path in after and path != leaf
    }
    assert all(path.rpartition(".")[0] == leaf.rpartition(".")[0] for path in optional - {leaf})


def test_the_critic_keeps_its_learning_rate_when_its_weight_decay_is_written() -> None:
    run = load([], ["trainer.critic.optimizer_config.weight_decay=0.2"]).config
    assert run.trainer.critic.optimizer_config == OptimizerConfig(lr=5e-6, weight_decay=0.2)


def test_the_policy_keeps_its_model_when_its_adapter_is_written() -> None:
    run = load([], ["trainer.policy.model.lora.rank=32"]).config
    assert run.trainer.policy.model.path == "Qwen/Qwen2.5-1.5B-Instruct"


def test_later_files_and_then_arguments_win(tmp_path: Path) -> None:
    files = [
        written(tmp_path, "[trainer]\nepochs = 1\nseed = 1\nrun_name = 'a'", "1.toml"),
        written(tmp_path, "[trainer]\nepochs = 2\nseed = 2", "2.toml"),
    ]
    loaded = load(files, ["trainer.epochs=3"])
    assert (loaded.config.trainer.epochs, loaded.config.trainer.seed, loaded.config.trainer.run_name) == (3, 2, "a")
    assert [origin.location for origin in loaded.origins["trainer.epochs"]] == [
        f"{files[0]}:2",
        f"{files[1]}:2",
        "argument 1",
    ]


@pytest.mark.parametrize("text", ["1e5", "007", "true", "None", "null", "[a]", "", "a=b"])
def test_text_stays_text(text: str) -> None:
    assert load([], [f"trainer.run_name={text}"]).config.trainer.run_name == text


def test_a_whole_number_is_a_number_and_true_is_none() -> None:
    assert repr(load([], ["trainer.policy.optimizer_config.lr=1"]).config.trainer.policy.optimizer_config.lr) == "1.0"
    [problem] = refused([], {"trainer.policy.optimizer_config.lr": True, "trainer.seed": 1})
    assert problem.message == "true is not a number"


@pytest.mark.parametrize("word", ["null", "none", "None"])
def test_null_on_the_command_line(word: str) -> None:
    run = load([], [f"trainer.algorithm.value_clip={word}", f"generator.eval_sampling_params={word}"]).config
    assert run.trainer.algorithm.value_clip is None
    assert run.generator.eval_sampling_params is None


def test_none_is_a_word_of_its_own_where_the_field_lists_it() -> None:
    assert load([], ["trainer.resume_mode=none"]).config.trainer.resume_mode == "none"
    assert load([], ["trainer.resume_mode=null"]).config.trainer.resume_mode is None


def test_a_file_may_be_a_path_and_a_single_one(tmp_path: Path) -> None:
    file = written(tmp_path, "[trainer]\nepochs = 7")
    for files in ([file], file, Path(file), [Path(file)]):
        assert load(files).config.trainer.epochs == 7


def test_a_single_argument_may_stand_alone() -> None:
    assert load([], "trainer.epochs=7").config.trainer.epochs == 7


def test_an_instance_in_python_takes_the_place_of_a_table() -> None:
    run = load([], {"generator.sampling_params": SamplingParams(temperature=0.5)}).config
    assert run.generator.sampling_params == SamplingParams(temperature=0.5)


def test_a_tree_of_ones_own_classes_is_loaded_like_ours() -> None:
    root = make_config(algorithm_cls=Bonus)
    run = load([], ["trainer.algorithm.bonus=2", "trainer.algorithm.gamma=0.5"], root=root).config
    assert isinstance(run.trainer.algorithm, Bonus)
    assert (run.trainer.algorithm.bonus, run.trainer.algorithm.gamma) == (2.0, 0.5)
    [problem] = refused([], ["trainer.algorithm.bonu=2"], root=root)
    assert problem.message == "no such field; did you mean trainer.algorithm.bonus?"
    [problem] = refused([], ["trainer.algorithm.bonus=0"], root=root)
    assert problem.message == "0.0 is not positive"


# Mistakes


def test_every_wrong_value_is_told_with_its_path_and_line(tmp_path: Path) -> None:
    lines = [f"{path} = {NO_VALUE}" for path in LEAVES]
    random.Random(0).shuffle(lines)
    file = written(tmp_path, "\n".join(lines))
    assert [(problem.path, problem.location) for problem in refused([file])] == [
        (line.partition(" ")[0], f"{file}:{number}") for number, line in enumerate(lines, start=1)
    ]
    assert len(not_composed([file])) == len(LEAVES)


@each(LEAVES, sampled=12)
def test_one_wrong_value_is_one_problem_whatever_depends_on_it(path: str, tmp_path: Path) -> None:
    file = written(tmp_path, f"{path} = {NO_VALUE}")
    others = {other: value for other, value in RUNNABLE.items() if other != path}
    assert [(problem.path, problem.location) for problem in not_composed([file], others)] == [(path, f"{file}:1")]


@each(LEAVES, sampled=12)
def test_one_misspelled_name_is_one_problem_whatever_depends_on_it(path: str) -> None:
    others = {other: value for other, value in RUNNABLE.items() if other != path}
    typo = path[:-1] + "_" + path[-1]
    [problem] = not_composed([], others | {typo: None})
    assert (problem.path, problem.message) == (typo, f"no such field; did you mean {path}?")


@pytest.mark.parametrize("path", RUNNABLE)
def test_one_prefixed_argument_is_one_problem_whatever_depends_on_it(path: str) -> None:
    [problem] = not_composed([], [f"{'+' * (other == path)}{other}={value}" for other, value in RUNNABLE.items()])
    assert problem.path == f"+{path}"


def test_nothing_is_said_about_the_default_of_a_field_whose_argument_cannot_be_read() -> None:
    """256 prompts, which the default is, do not divide a batch of 8."""
    batch = ["trainer.train_batch_size=8", "+trainer.policy_mini_batch_size=8"]
    [problem] = not_composed([], [*(f"{path}={value}" for path, value in RUNNABLE.items()), *batch])
    assert problem.path == "+trainer.policy_mini_batch_size"


def test_arguments_are_told_by_their_number() -> None:
    problems = refused([], ["trainer.epochs=1", "trainer.epochs=two", "trainer.epoch=3", "+trainer.seed=1", "x"])
    assert [(problem.path, problem.location) for problem in problems] == [
        ("trainer.epochs", "argument 2"),
        ("trainer.epoch", "argument 3"),
        ("+trainer.seed", "argument 4"),
        ("x", "argument 5"),
    ]


def test_problems_come_in_the_order_of_their_places(tmp_path: Path) -> None:
    file = written(tmp_path, "\n" * 9 + "a = 1\nb = 2")
    locations = [problem.location for problem in refused([file], [f"x{number}=1" for number in range(11)])]
    assert locations == [f"{file}:10", f"{file}:11", *(f"argument {number}" for number in range(1, 12))]


@pytest.mark.parametrize("name", ["argument x:3", "argument 3", "a:b:²"])
def test_a_file_may_have_any_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "x = 1", name)
    assert [problem.location for problem in refused([name])] == [f"{name}:1"]


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("trainer.epoch=2", "did you mean trainer.epochs?"),
        ("trainer.algoritm.gamma=1", "did you mean trainer.algorithm.gamma?"),
        ("trainer.max_seq_len=1", "use trainer.algorithm.max_seq_len instead"),
        ("n_samples_per_prompt=4", "use generator.n_samples_per_prompt instead"),
        ("generator.logprob_parity_bound=1", "use generator.inference_engine.logprob_parity_bound instead"),
        ("policy.optimizer_config.lr=1", "use trainer.policy.optimizer_config.lr instead"),
        (
            "trainer.lr=1",
            "use trainer.policy.optimizer_config.lr or trainer.critic.optimizer_config.lr instead",
        ),
    ],
)
def test_the_field_that_was_meant_is_suggested(argument: str, sentence: str) -> None:
    [problem] = refused([], [argument])
    assert sentence in (problem.message, problem.hint, problem.message.removeprefix("no such field; "))


def test_an_unknown_table_is_one_problem_at_its_header(tmp_path: Path) -> None:
    file = written(tmp_path, "[trainer]\nepochs = 2\n\n[trainer.algoritm]\ngamma = 1.0\nlambd = 0.9")
    [problem] = refused([file])
    assert (problem.path, problem.location) == ("trainer.algoritm", f"{file}:4")
    assert problem.message == "no such field; did you mean trainer.algorithm?"


def test_unknown_keys_are_told_one_by_one(tmp_path: Path) -> None:
    file = written(tmp_path, "[trainer]\nepoch = 2\nepochs = 3\n'a.b' = 1\n[data]\nfoo = 1")
    assert [(problem.path, problem.location[-1]) for problem in refused([file])] == [
        ("trainer.epoch", "2"),
        ('trainer."a.b"', "4"),
        ("data.foo", "6"),
    ]


def test_a_file_that_cannot_be_read_hides_no_mistake_and_makes_none_up(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.toml")
    problems = not_composed([missing, written(tmp_path, "x = 1")], ["trainer.epochs=two"])
    assert sorted(problem.path for problem in problems) == sorted([missing, "x", "trainer.epochs"])


def test_a_wrong_file_is_told_with_line_and_column(tmp_path: Path) -> None:
    file = written(tmp_path, "[trainer]\nepochs = = 2\n")
    [problem] = not_composed([file])
    assert (problem.path, problem.location) == (file, f"{file}:2:10")
    assert "in one word" not in problem.hint, "the name of the file is no path of a field"


def test_the_kind_of_a_run_stands_at_the_top_alone(tmp_path: Path) -> None:
    inside = {"generator.chat_template_kwargs": {"kind": "sft"}}
    assert load([], inside).config.generator.chat_template_kwargs == inside["generator.chat_template_kwargs"]
    (tmp_path / "run.json").write_text('{"kind": "sft"}', encoding="utf-8")
    supervised: Any = load([tmp_path / "run.json"]).config
    assert supervised.kind == "sft"


def test_what_is_no_text_is_no_argument() -> None:
    overrides: Any = [5, None, b"trainer.epochs=2"]
    assert [problem.location for problem in refused([], overrides)] == ["argument 1", "argument 2", "argument 3"]
    mapping: Any = {5: 1, None: 2}
    assert [problem.path for problem in refused([], mapping)] == ["5", "None"]


def test_overrides_in_python_are_judged_one_by_one() -> None:
    problems = refused([], {"a..b": 1, "trainer.epochs": "two", "trainer": 5})
    assert sorted(problem.path for problem in problems) == ["a..b", "trainer", "trainer.epochs"]


def test_what_a_person_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "[trainer.policy.optimizer_config]\nlr = 'fast'\n[trainer]\ntrain_batch_size = 1024\n[trainer.algoritm]"
    written(tmp_path, text)
    words = [f"{path}={value}" for path, value in RUNNABLE.items()]
    with pytest.raises(ConfigError) as caught:
        compose(["run.toml"], [*words, "trainer.policy_mini_batch_size=300"])
    assert str(caught.value) == (
        "This run cannot start (3 problems):\n"
        "  trainer.policy.optimizer_config.lr  'fast' is not a number                                     run.toml:2\n"
        "  trainer.algoritm                    no such field; did you mean trainer.algorithm?             run.toml:5\n"
        "  trainer.policy_mini_batch_size      300 prompts do not divide "
        "trainer.train_batch_size = 1024  argument 4\n"
        "                                      nearest divisors: 256 and 512"
    )


def test_a_name_out_of_a_file_cannot_act_on_the_terminal(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load([written(tmp_path, '"\\u001b[31mred" = 1')])
    assert "\x1b" not in str(caught.value)
    assert "\\x1b[31mred" in str(caught.value)


# Composing


def test_a_composed_run_is_written_resolved_and_checked() -> None:
    composed = compose([], RUNNABLE)
    assert composed.written == load([], RUNNABLE).config
    assert composed.config.trainer.placement.executor == "in_process"
    assert composed.warnings == ()
    assert composed.origins["trainer.placement.executor"][-1].kind == "rule"


def test_warnings_are_problems_when_one_is_strict() -> None:
    idle = RUNNABLE | {"trainer.algorithm.sapo.tau_pos": 2.0}
    [warning] = compose([], idle).warnings
    assert (warning.path, warning.severity) == ("trainer.algorithm.sapo", "warning")
    assert warning.location.rpartition(":")[0] == __file__
    with pytest.raises(ConfigError) as caught:
        compose([], idle, strict=True)
    [problem] = caught.value.problems
    assert (problem.path, problem.message) == (warning.path, warning.message)


def test_a_source_that_changes_after_loading_changes_nothing() -> None:
    source: dict[str, Any] = {"generator.chat_template_kwargs": {"a": [1]}, "data.train_data": ["x"]}
    run = load([], source).config
    source["generator.chat_template_kwargs"]["a"].append(2)
    source["data.train_data"].append("y")
    assert get_at(run, "generator.chat_template_kwargs") == {"a": (1,)}
    assert run.data.train_data == ("x",)


def test_the_leaves_without_another_value_are_few() -> None:
    assert len(FIXED) == 6
    assert differences(SkyRLTrainConfig(), load([], OTHERS).config).keys() >= OTHERS.keys() - {
        "generator.eval_sampling_params.logprobs"  # null, where a table that was null had it
    }
    assert set(LEAVES) == {path for path, _ in leaf_paths(SkyRLTrainConfig)}


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("data.train_data", "x.jsonl"),
        ("data.val_data", "x.jsonl"),
        ("trainer.trackers.tags", "seeds"),
        ("generator.sampling_params.stop", "</s>"),
        ("generator.inference_engine.external_server_urls", "http://10.0.0.1:8000"),
        ("environment.skyrl_gym.retried_failures", "timeout"),
    ],
)
def test_a_single_text_is_a_list_of_one_from_every_door(path: str, text: str, tmp_path: Path) -> None:
    table, _, name = path.rpartition(".")
    toml = written(tmp_path, f'[{table}]\n{name} = "{text}"', "a.toml")
    json_file = written(tmp_path, json.dumps({table: {name: text}}), "b.json")
    sources: list[tuple[Any, Any]] = [
        ([toml], []),
        ([], [f"{path}={text}"]),
        ([], {path: text}),
        ([], [f"{path}=env:TEXT"]),
    ]
    if "." not in table:
        sources.append(([json_file], []))
    for files, overrides in sources:
        assert get_at(load(files, overrides, environ={"TEXT": text}).config, path) == (text,)


def test_a_single_text_is_a_list_of_one_in_python() -> None:
    path: Any = "x.jsonl"
    changed = attrs.evolve(DataConfig(), train_data=path)
    assert changed.train_data == DataConfig(train_data=path).train_data == ("x.jsonl",)


# Files without an entry


EMPTY_FILES = pytest.mark.parametrize(
    ("name", "text"), [("a.toml", ""), ("a.toml", "# later\n"), ("a.yaml", ""), ("a.yml", "# later"), ("a.json", "{}")]
)


@EMPTY_FILES
@pytest.mark.parametrize("given", ["file", "argument", "table", "extended"])
def test_a_file_without_an_entry_is_told(given: str, name: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    (tmp_path / "run.toml").write_text(f"extends = '{name}'\ntrainer.epochs = 2")
    files = {"file": [file], "extended": [tmp_path / "run.toml"]}.get(given, [])
    words = {"argument": [f"@{file}"], "table": [f"trainer.policy=@{file}"]}.get(given, [])
    message, hint = f"{file} is empty and sets nothing", "write settings into it, or leave it out"
    path = "trainer.policy" if given == "table" else ""
    expected = Problem(path=path, message=message, hint=hint, severity="warning")
    assert load(files, [*words, "trainer.epochs=2"]).warnings == (expected,)


@EMPTY_FILES
@pytest.mark.parametrize("is_argument", [False, True])
def test_a_run_of_which_nothing_is_written_is_refused(name: str, text: str, is_argument: bool, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    [problem] = not_composed(*([[], [f"@{tmp_path / name}"]] if is_argument else [[tmp_path / name]]))
    assert (problem.message, problem.severity) == (f"{tmp_path / name} is empty and sets nothing", "error")
    assert load([tmp_path / name]).config == SkyRLTrainConfig()  # to look at the defaults, it may be empty


def test_a_default_that_cannot_be_used_is_called_so() -> None:
    def refuse(run: SkyRLTrainConfig) -> Any:
        yield Problem(path="data.val_data", message=f"there is no file {run.data.val_data[0]}")

    for words, hint in ([], "this is the default: set data.val_data"), (["data.val_data=b.jsonl"], ""):
        with pytest.raises(ConfigError) as caught:
            compose([], words, also=lambda kind: (refuse,))
        [problem] = [problem for problem in caught.value.problems if problem.path == "data.val_data"]
        assert problem.hint == hint


def test_a_file_that_only_extends_another_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("trainer.epochs = 2")
    (tmp_path / "again.toml").write_text("extends = 'base.toml'")
    (tmp_path / "run.toml").write_text("extends = ['base.toml', 'again.toml']")
    loaded = load(str(tmp_path / "run.toml"))
    assert (loaded.warnings, loaded.config.trainer.epochs) == ((), 2)
