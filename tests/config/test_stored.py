"""What a run leaves of its configuration, read back as a layer; and the entry points that SkyRL's users know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import yaml
from omegaconf import OmegaConf

from skyrl.config import (
    AlgorithmConfig,
    BaseConfig,
    ConfigError,
    SamplingParams,
    SkyRLTrainConfig,
    compose,
    get_config_as_dict,
    get_config_as_yaml_str,
    load,
    make_config,
    resolve,
)
from skyrl.config.loading.presets import PRESETS
from skyrl.config.loading.resolve import derived, resolve_with_origins
from skyrl.config.loading.stored import stored_form
from skyrl.tree import FrozenDict, evolve_at, fingerprint, frozen, get_at, to_dict
from skyrl.tree.sparse import as_toml_has_it, sparse
from tests.config.leaves import OTHERS, RUNNABLE, each


def stored(folder: Path, run: SkyRLTrainConfig, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(stored_form(run) | changes))
    return folder


def test_a_run_is_read_back_from_its_folder_and_can_be_overridden(tmp_path: Path) -> None:
    run = compose([], RUNNABLE | {"trainer.max_prompt_length": 300, "trainer.seed": 7}).config
    folder = stored(tmp_path, run)
    reloaded = load([folder])
    assert resolve_with_origins(reloaded.config, reloaded.origins)[0] == run
    of_the_machine = {"trainer.logger", "trainer.attention", "trainer.use_liger_kernel"}
    assert set(reloaded.origins) == {*RUNNABLE, *of_the_machine, "trainer.max_prompt_length", "trainer.seed"}
    assert fingerprint(compose([folder]).config) == fingerprint(run)
    changed = compose([folder], ["trainer.max_prompt_length=400"]).config
    assert changed.generator.max_input_length == 400


def test_what_was_derived_is_listed_and_no_more(tmp_path: Path) -> None:
    run = compose([], RUNNABLE | {"trainer.ref.model.path": "another"}).config
    listed = stored_form(run)["derived"]
    assert "generator.max_input_length" in listed
    assert "trainer.ref.model.path" not in listed
    assert not {"trainer.device", "trainer.logger", "trainer.attention"} & {*listed}  # they follow from the machine


def test_leaving_out_what_is_derived_changes_nothing() -> None:
    run = resolve(SkyRLTrainConfig())
    bare = run
    for path in derived(run):
        bare = evolve_at(bare, path, get_at(SkyRLTrainConfig(), path))
    assert resolve(bare) == run


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 99}, "use a newer skyrl"),
        ({"schema_version": "1"}, "was stored with schema version '1'"),
        ({"config": {"trainer": {"epoch": 1}}}, "did you mean trainer.epochs?"),
        ({"config": {"trainer": {"algorithm": {"class": "this:Zen"}}}}, "is not an imported subclass"),
    ],
)
def test_a_stored_run_that_cannot_be_used_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        load([stored(tmp_path, resolve(SkyRLTrainConfig()), **changes)])


@pytest.mark.long
@each(OTHERS)
def test_a_sparse_dump_is_what_was_written(path: str, tmp_path: Path) -> None:
    run = load([], {path: OTHERS[path]}).config
    data = sparse(run)
    assert load([], data).config == run
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(as_toml_has_it(data, SkyRLTrainConfig)))
    assert load([file]).config == run
    leaves = [key for key in json.dumps(data).split('"') if key == path.rpartition(".")[2]]
    assert len(leaves) == 1


def test_a_sparse_dump_differs_from_the_default_instance_not_the_class() -> None:
    run = load([], {"trainer.critic.optimizer_config.lr": 1e-6}).config
    assert sparse(run) == {"trainer": {"critic": {"optimizer_config": {"lr": 1e-6}}}}
    assert sparse(evolve_at(SkyRLTrainConfig(), "trainer.critic.optimizer_config.lr", 5e-6)) == {}


def test_a_sparse_dump_has_what_was_written_even_where_that_is_the_default() -> None:
    run = load([], {"trainer.critic.optimizer_config.lr": 5e-6, "generator.eval_sampling_params.temperature": 1.0})
    assert sparse(run.config) == {
        "trainer": {"critic": {"optimizer_config": {"lr": 5e-6}}},
        "generator": {"eval_sampling_params": {"temperature": 1.0}},
    }


def test_a_null_inside_a_free_form_table_cannot_be_toml() -> None:
    data = sparse(load([], {"generator.chat_template_kwargs": {"a": {"b": None}}}).config)
    with pytest.raises(ConfigError) as caught:
        as_toml_has_it(data, SkyRLTrainConfig)
    [problem] = caught.value.problems
    assert problem.path == "generator.chat_template_kwargs.a.b"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_table_that_fits(name: str) -> None:
    loaded = load([f"preset:{name}"])
    assert loaded.warnings == ()
    assert all(chain[-1].location == f"preset {name}" for chain in loaded.origins.values())


# SkyRL's entry points


def test_overrides_from_a_command_line_and_from_python_give_the_resolved_tree() -> None:
    one = SkyRLTrainConfig.from_cli_overrides(["trainer.epochs=2", "generator.sampling_params.temperature=0.5"])
    other = SkyRLTrainConfig.from_cli_overrides({"trainer.epochs": 2, "generator.sampling_params.temperature": 0.5})
    nested = SkyRLTrainConfig.from_dict({"trainer": {"epochs": 2}, "generator.sampling_params.temperature": 0.5})
    assert one == other == nested
    assert (one.trainer.epochs, one.trainer.algorithm.temperature) == (2, 0.5)


def test_the_tree_as_a_dictionary_and_as_yaml(tmp_path: Path) -> None:
    run = SkyRLTrainConfig.from_cli_overrides(["trainer.run_name=1e5", "trainer.policy.optimizer_config.lr=1e-6"])
    assert get_config_as_dict(run) == to_dict(run)
    file = tmp_path / "run.yaml"
    file.write_text(get_config_as_yaml_str(run))
    assert load([file]).config == run


@pytest.mark.parametrize(
    ("mapping", "plain"),
    [
        ({}, {}),
        ({"a": 1, "b": {"c": [1, None]}}, {"a": 1, "b": {"c": [1, None]}}),
        ({"a": (1, (2,))}, {"a": [1, [2]]}),
        (FrozenDict({"a": {"b": (1,)}}), {"a": {"b": [1]}}),
        ({"table": SamplingParams(top_k=3)}, {"table": to_dict(SamplingParams(top_k=3))}),
        (OmegaConf.create({"lr": 1e-5, "same": "${lr}", "list": [1]}), {"lr": 1e-5, "same": 1e-5, "list": [1]}),
    ],
)
def test_a_mapping_is_a_dictionary_already(mapping: Any, plain: dict[str, Any]) -> None:
    copied = get_config_as_dict(mapping)
    assert (type(copied), copied, json.loads(json.dumps(copied))) == (dict, plain, plain)
    assert copied is not mapping
    assert yaml.safe_load(get_config_as_yaml_str(mapping)) == plain


@frozen
class Bonus(AlgorithmConfig):
    bonus: float = 0.5


def test_a_root_of_ones_own_has_the_entry_points_too() -> None:
    root = make_config(algorithm_cls=Bonus)
    run = root.from_cli_overrides(["trainer.algorithm.bonus=2"])
    assert type(run) is root
    assert get_config_as_dict(run)["trainer"]["algorithm"]["bonus"] == 2.0


@frozen
class Table(BaseConfig):
    size: int = 3


def test_any_table_is_made_from_a_dictionary() -> None:
    assert Table.from_dict_config({"size": 5}) == Table(size=5)
    with pytest.raises(ConfigError, match="did you mean size"):
        Table.from_dict_config({"siz": 5})
