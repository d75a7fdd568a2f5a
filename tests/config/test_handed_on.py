"""Every kind of run through every door, with the fields whose names look like a secret's: a name hides nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.config import (
    AlgorithmConfig,
    ConfigError,
    OptimizerConfig,
    SamplingParams,
    SkyRLTrainConfig,
    compose,
    load,
    resolve,
)
from skyrl.config.cluster import ClusterConfig
from skyrl.config.derive.rules import RULES
from skyrl.config.loading.kinds import KINDS, kind_of, root_of
from skyrl.config.loading.standalone_file import kept_text
from skyrl.config.loading.stored import stored_form
from skyrl.errors import UserError
from skyrl.launchers.prepared import Prepared
from skyrl.runs.run_lock import RunLock, config_text
from skyrl.sweeps.sweep_file import SweepConfig
from skyrl.sweeps.trials import trials_of
from skyrl.tree import FrozenDict, Secret, differences, evolve_at, get_at, to_dict
from skyrl.tree.access import is_written
from skyrl.tree.classes import leaf_paths
from skyrl.tree.masking import is_secret_name
from skyrl.tree.rules import Rule

NAMES = ("key", "token", "secret", "password", "auth", "cookie", "signature", "credential", "pwd", "webhook")
"""Words by which a name may be taken for a secret's."""


class Judged(AlgorithmConfig):
    """A user's own fields, none of which is a secret, and one that says that it is."""

    answer_key: str = "answer"
    password: str = "a word that passes"
    think_end_token: str = "</think>"
    secretary: str = "Ann"
    judge_token: Secret | None = None
    columns: Mapping[str, Any] = FrozenDict()


RUNS: dict[str, dict[str, Any]] = {
    "rl": {
        "trainer": {
            "device": "cpu",
            "logger": "console",
            "policy": {"model": {"path": "a/b"}},
            "algorithm": {
                "class": f"{__name__}:Judged",
                "answer_key": "key_of_answers",
                "password": "sesame",
                "think_end_token": "</t>",
                "secretary": "Bob",
                "judge_token": "env:JUDGE_TOKEN",
                "columns": {"answer_key": "gold", "max_token": "many", "sort_key": "id"},
            },
        },
        "generator": {
            "inference_engine": {"backend": "torch"},
            "chat_template_kwargs": {"think_end_token": "</t>", "image_key": "pictures", "secretary": "Carl"},
            "eval_sampling_params": {"temperature": 1.0},
        },
        "environment": {"env_class": "gsm8k"},
        "data": {"train_data": ["a.jsonl"], "val_data": ["b.jsonl"]},
    },
    "sft": {"kind": "sft", "device": "cpu", "train_datasets": ["a.jsonl"], "model": {"path": "a/b"}},
    "reward_model": {"kind": "reward_model", "device": "cpu", "train_datasets": ["a.jsonl"], "model": {"path": "a/b"}},
    "preference": {"kind": "preference", "device": "cpu", "train_datasets": ["a.jsonl"], "model": {"path": "a/b"}},
}
"""A file of each kind of run."""


def with_every_key(kind: str) -> dict[str, Any]:
    """The file of a kind, with each text whose name looks like a secret's set to a value of its own."""
    tables: dict[str, Any] = json.loads(json.dumps(RUNS[kind]))
    for path, attribute in leaf_paths(root_of(kind)):
        looks_secret = any(word in path.rpartition(".")[2] for word in NAMES)
        if "." not in path and looks_secret and attribute.type is str:
            tables[path] = f"column_{path}"
    return tables


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for kind in KINDS:
        (tmp_path / f"{kind}.toml").write_text(tomli_w.dumps(with_every_key(kind)))
    return tmp_path


def test_the_files_set_every_field_that_is_called_like_a_key() -> None:
    named = {
        f"{kind}: {path}"
        for kind in KINDS
        for path, attribute in leaf_paths(root_of(kind))
        if path.endswith("_key") and path not in with_every_key(kind)
    }
    assert named == set()
    assert {"messages_key", "tools_key", "system_key"} <= with_every_key("sft").keys()
    assert {"prompt_key", "chosen_key", "rejected_key", "margin_key"} <= with_every_key("reward_model").keys()


# What each door gives to the next reader.


def shown(*options: str, language: str) -> Callable[[str], str]:
    def by_show(kind: str) -> str:
        result = CliRunner().invoke(cli, ["config", "show", f"{kind}.toml", *options, "--format", language])
        assert result.exit_code == 0, result.output
        Path(f"again.{language}").write_text(result.stdout)
        return f"again.{language}"

    return by_show


def stored(kind: str) -> str:
    Path("run").mkdir()
    run = compose([f"{kind}.toml"]).config
    RunLock(Path("run"), "run_path", run).write_config(config_text(run, {}))
    return "run"


def kept(kind: str) -> str:
    loaded = load([f"{kind}.toml"])
    Path("kept.toml").write_text(kept_text(loaded.config, loaded.origins))
    return "kept.toml"


def launched(target: Any) -> Callable[[str], str]:
    def by_launch(kind: str) -> str:
        launch = Prepared(target, [f"{kind}.toml"], [], ClusterConfig(), environ={})
        Path("launched.toml").write_text(launch.text)
        return "launched.toml"

    return by_launch


def swept(kind: str) -> str:
    """The trial whose values are those of the run."""
    trials = trials_of(SweepConfig(run=(f"{kind}.toml",), folder="sweep"), {})
    trials.write()
    return str(trials.trials[0].folder / "run.toml")


DOORS: dict[str, Callable[[str], str]] = {
    **{f"show, {language}": shown(language=language) for language in ("json", "yaml", "toml")},
    **{f"show --sparse, {language}": shown("--sparse", language=language) for language in ("json", "yaml", "toml")},
    **{f"show --written, {language}": shown("--written", language=language) for language in ("json", "yaml", "toml")},
    "run folder": stored,
    "kept text": kept,
    **{f"launch {target}": launched(target) for target in ("local", "slurm", "ray")},
    "sweep": swept,
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("route", DOORS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_leaves_by_a_door_is_checked_and_is_the_same_run(kind: str, route: str, folder: Path) -> None:
    copied = DOORS[route](kind)
    assert "***" not in "".join(_texts(copied)) or "judge_token" in "".join(_texts(copied))
    result = CliRunner().invoke(cli, ["config", "check", copied])
    assert (result.exit_code, result.exception) == (0, None), result.output
    before, after = (resolve(load([source])) for source in (f"{kind}.toml", copied))
    changed = {path.rpartition(".")[2] for path in differences(before, after)}
    assert changed <= ({"run_name", "run_path", "ckpt_path", "export_path", "log_path"} if route == "sweep" else set())


def _texts(path: str) -> list[str]:
    files = [Path(path)] if Path(path).is_file() else sorted(Path(path).glob("config.json"))
    return [file.read_text() for file in files]


@pytest.mark.parametrize("kind", KINDS)
def test_two_files_of_a_kind_differ_in_what_is_changed_and_the_values_are_shown(kind: str, folder: Path) -> None:
    stored(kind)
    assert CliRunner().invoke(cli, ["config", "diff", f"{kind}.toml", "run"]).output == ""
    path = {
        "rl": "trainer.algorithm.answer_key",
        "sft": "messages_key",
        "reward_model": "chosen_key",
        "preference": "chosen_key",
    }[kind]
    (folder / "other.toml").write_text(tomli_w.dumps({"extends": f"{kind}.toml"} | _nested(path, "other")))
    result = CliRunner().invoke(cli, ["config", "diff", "run", "other.toml"])
    value = get_at(load(["run"]).config, path)
    assert (result.exit_code, result.output) == (1, f'{path}  "{value}"  ->  "other"\n')
    explained = CliRunner().invoke(cli, ["config", "explain", path, f"{kind}.toml"]).output
    assert value in explained and "***" not in explained


def _nested(path: str, value: object) -> dict[str, Any]:
    name, _, rest = path.partition(".")
    return {name: _nested(rest, value) if rest else value}


def test_no_field_of_ours_is_called_like_a_credential_unless_it_holds_one() -> None:
    named = {
        path: attribute.type
        for kind in KINDS
        for path, attribute in leaf_paths(root_of(kind))
        if is_secret_name(path.rpartition(".")[2])
    }
    assert all("Secret" in str(kind) for kind in named.values()), named


# Secrets of a file that is handed to a job


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("generator.chat_template_kwargs.hf_token", "abc"),
        ("generator.inference_engine.engine_init_kwargs.headers", {"Authorization": "abc"}),
        ("generator.chat_template_kwargs.credentials", {"of": ["anybody"]}),
        ("environment.skyrl_gym.reward_model.url", "https://user:word@host/score"),
        ("data.train_data", ["https://host/a.parquet?X-Amz-Signature=abcd"]),
        ("trainer.trackers.notes", "made with sk-0123456789abcdefg"),
        ("generator.chat_template_kwargs.nested.api_key", "abc"),
    ],
)
@pytest.mark.parametrize("route", ["launch", "sweep", "kept text"])
def test_a_literal_secret_is_not_handed_on_and_a_reference_is(path: str, value: Any, route: str, folder: Path) -> None:
    (folder / "secret.toml").write_text(tomli_w.dumps({"extends": "rl.toml"} | _nested(path, value)))
    with pytest.raises((ConfigError, UserError), match="env:NAME") as refused:
        hand_on(route, ["secret.toml"], {})
    assert "secret.toml:" in str(refused.value)
    assert not {"abc", "word@", "anybody", "0123456789abcdefg"} & {*str(refused.value).replace('"', " ").split()}
    (folder / "secret.toml").write_text(tomli_w.dumps({"extends": "rl.toml"} | _nested(path, "env:THE_SECRET")))
    environ = {"THE_SECRET": value if isinstance(value, str) else json.dumps(value)}
    text = hand_on(route, ["secret.toml"], environ)
    assert "env:THE_SECRET" in text
    (folder / "again.toml").write_text(text)
    assert get_at(load(["again.toml"], environ=environ).config, path) == get_at(
        load(["secret.toml"], environ=environ).config, path
    )


def hand_on(route: str, files: list[str], environ: Mapping[str, str]) -> str:
    """The text of the file that the job reads."""
    if route == "launch":
        return Prepared("local", files, [], ClusterConfig(), environ=environ).text
    if route == "sweep":
        return trials_of(SweepConfig(run=tuple(files), folder="sweep"), environ).trials[0].text
    loaded = load(files, environ=environ)
    return kept_text(loaded.config, loaded.origins)


def test_a_secret_field_is_handed_on_as_the_reference_that_it_is(folder: Path) -> None:
    text = (folder / kept("rl")).read_text()
    assert 'judge_token = "env:JUDGE_TOKEN"' in text
    assert "***" not in text


TABLE = "generator.chat_template_kwargs"
PARTS: list[tuple[list[str], list[str]]] = [
    # arguments, references that are handed on
    (['data.train_data=["a"]', "data.train_data+=env:LIST"], []),
    (["data.train_data=env:LIST"], ["env:LIST"]),
    ([f"{TABLE}=env:TABLE"], ["env:TABLE"]),
    ([f"{TABLE}=env:TABLE", f"{TABLE}.d=2"], []),
    ([f"{TABLE}=env:TABLE", f"{TABLE}.d=env:TEXT"], ["env:TEXT"]),
    ([f"{TABLE}=env:TABLE", f"{TABLE}=env:MORE"], []),
    ([f"{TABLE}.x=env:TABLE", f"{TABLE}.y=env:MORE"], ["env:TABLE", "env:MORE"]),
    ([f'{TABLE}={{"x": [{{"y": 1}}]}}', f"{TABLE}.x.0.y=env:TEXT"], []),
    ([f'{TABLE}."a.b"=env:TEXT'], ["env:TEXT"]),
]


@pytest.mark.parametrize(("words", "references"), PARTS)
def test_a_variable_is_handed_on_where_it_gives_the_whole_value(
    words: list[str], references: list[str], tmp_path: Path
) -> None:
    environ = {"LIST": '["b", "c"]', "TABLE": '{"a": {"c": 1}}', "MORE": '{"e": 3}', "TEXT": "word"}
    loaded = load([], words, environ=environ)
    assert "env:" not in json.dumps(to_dict(loaded.config))
    (tmp_path / "kept.toml").write_text(text := kept_text(loaded.config, loaded.origins))
    assert load([tmp_path / "kept.toml"], environ=environ).config == loaded.config
    assert sorted(reference.strip('"') for reference in text.split() if "env:" in reference) == sorted(references)


# Written values that equal a default


@pytest.mark.sampled(13)
@pytest.mark.parametrize("rule", [rule for rule in RULES if not rule.placeholder], ids=lambda rule: rule.writes)
def test_a_written_default_is_no_longer_left_to_its_rule(rule: Rule[Any], tmp_path: Path) -> None:
    around: dict[str, Any] = {
        "trainer.run_path": "/x",
        "trainer.device": "cpu",
        "trainer.algorithm.use_tis": True,
        "trainer.algorithm.tis_imp_ratio_cap": 3.0,
        "trainer.placement.allocation": "vllm:d2t2p3+megatron:(attn:d2p2t2c3|ffn:p2t3e2)",
        "trainer.fully_async.enabled": True,
        "trainer.fully_async.clear_kv_cache_on_weight_sync": False,
        "generator.sampling_params.max_generate_length": 77,
        "generator.inference_engine.backend": "vllm",
    }
    loaded = load([], around | {rule.writes: rule.unset})
    run = resolve(loaded)
    assert get_at(run, rule.writes) == rule.unset
    assert resolve(run) == run == resolve(loaded.config)
    (tmp_path / "kept.toml").write_text(kept_text(loaded.config, loaded.origins))
    (tmp_path / "config.json").write_text(json.dumps(stored_form(run)))
    assert resolve(load([tmp_path / "kept.toml"])) == run == resolve(load([tmp_path]))


def test_a_written_value_that_a_rule_would_give_stays_when_a_stored_run_is_changed(tmp_path: Path) -> None:
    written = {"trainer.max_prompt_length": 300, "generator.max_input_length": 300, "trainer.run_name": "mine"}
    run = resolve(load([], written))
    (tmp_path / "config.json").write_text(json.dumps(stored_form(run)))
    changed = resolve(load([tmp_path], ["trainer.max_prompt_length=400"]))
    assert changed.generator.max_input_length == 300
    assert changed == resolve(load([], written | {"trainer.max_prompt_length": 400}))


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.5), {}, {"top_p": 0.5}])
def test_sampling_of_evaluation_is_handed_on_as_it_was_given(params: Any, tmp_path: Path) -> None:
    loaded = load([], {"generator.eval_sampling_params": params})
    (tmp_path / "kept.toml").write_text(kept_text(loaded.config, loaded.origins))
    reloaded = resolve(load([tmp_path / "kept.toml"]))
    assert reloaded == resolve(loaded) == resolve(loaded.config)
    temperature = reloaded.generator.eval_sampling_params
    assert temperature is not None and temperature.temperature == (1.0 if isinstance(params, SamplingParams) else 0.0)


def test_a_run_path_of_null_is_one_that_is_left_out() -> None:
    run = resolve(load([], {"trainer.run_path": None}))
    assert run == resolve(load([], {})) == resolve(run)
    assert run.trainer.ckpt_path == "runs/test_run/checkpoints"


class Warmed(OptimizerConfig):
    """A class in place of one whose default instance differs from its class's defaults."""

    steps: int = 3


def test_a_class_in_place_of_a_table_keeps_a_value_that_is_its_default(tmp_path: Path) -> None:
    path = "trainer.critic.optimizer_config"
    written = {f"{path}.class": f"{__name__}:Warmed", f"{path}.lr": OptimizerConfig().lr}
    assert get_at(SkyRLTrainConfig(), path).lr != OptimizerConfig().lr
    loaded = load([], written)
    run = resolve(loaded)
    (tmp_path / "config.json").write_text(json.dumps(stored_form(run)))
    (tmp_path / "kept.toml").write_text(kept_text(loaded.config, loaded.origins))
    assert resolve(load([tmp_path])) == run == resolve(load([tmp_path / "kept.toml"]))


def test_what_was_written_is_no_part_of_the_tree() -> None:
    default, loaded = SkyRLTrainConfig(), load([], {"trainer.logger": "wandb"}).config
    assert is_written(loaded, "trainer.logger") and not is_written(loaded, "trainer.seed")
    assert not is_written(default, "trainer.logger")
    assert (loaded, hash(loaded), repr(loaded), to_dict(loaded)) == (
        default, hash(default), repr(default), to_dict(default),
    )  # fmt: skip
    assert is_written(evolve_at(loaded, "trainer.epochs", 2), "trainer.logger")


@pytest.mark.parametrize("kind", KINDS)
def test_every_constructor_of_a_run_returns_the_resolved_tree(kind: str) -> None:
    root: Any = root_of(kind)
    device = kind_of(root).path("device")
    by_path = {device: "cpu"}
    runs = [
        root.from_cli_overrides([f"{device}=cpu"]),
        root.from_dict(by_path),
        root.from_dict_config(_nested(device, "cpu")),
    ]
    assert runs == [resolve(load([], by_path, root))] * 3
    assert get_at(runs[2], kind_of(root).path("compute_dtype")) == "float32"
