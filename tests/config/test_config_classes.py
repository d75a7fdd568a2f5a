"""The configuration classes: documented, exact, frozen all the way down, stored and extended without loss."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import attrs
import cattrs
import pytest
from omegaconf import DictConfig, OmegaConf

from skyrl.config import (
    AlgorithmConfig,
    DataConfig,
    DeepSpeedConfig,
    FSDPConfig,
    GeneratorConfig,
    MegatronConfig,
    OffPolicyCorrectionConfig,
    OptimizerConfig,
    PolicyConfig,
    SamplingParams,
    SkyRLLoraConfig,
    SkyRLTrainConfig,
    TrainerConfig,
    build_nested_dataclass,
    compose,
    load,
    make_config,
)
from skyrl.config.cluster import ContainerConfig
from skyrl.errors import ConfigError
from skyrl.tree import evolve_at, field, fingerprint, frozen, get_at
from skyrl.tree.classes import class_name, docs_of, fields_of, leaf_paths, resume_role, table_paths
from skyrl.tree.types import config_class
from skyrl.tree.validators import positive
from tests.config.leaves import each


def classes(cls: type[Any] = SkyRLTrainConfig) -> set[type[Any]]:
    """Every configuration class that the tree is made of."""
    nested = (config_class(attribute.type) for attribute in fields_of(cls).values())
    return {cls}.union(*(classes(table) for table in nested if table is not None))


ALL = sorted(classes(), key=lambda cls: cls.__name__)
FIELDS = [(cls, name) for cls in ALL for name in fields_of(cls)]


@frozen
class Bonus(AlgorithmConfig):
    bonus: float = field(default=0.5, validator=positive)
    """A field that the library does not know."""


@frozen
class TwoStage(TrainerConfig):
    stages: int = 2
    """Another one."""


class Undecorated(AlgorithmConfig):
    remembered: int = 1


# Docs and types


def test_every_class_and_every_field_is_documented() -> None:
    assert [cls.__name__ for cls in classes() if not cls.__doc__] == []
    assert [f"{cls.__name__}.{name}" for cls, name in FIELDS if not docs_of(cls).get(name)] == []


@each(FIELDS)
def test_a_value_of_no_type_is_refused_by_every_field_in_its_own_name(field: tuple[type[Any], str]) -> None:
    cls, name = field
    with pytest.raises(ConfigError) as caught:
        cls(**{name: object()})
    assert [problem.path for problem in caught.value.problems] == [name]


def test_a_wrong_type_is_told_in_python_as_in_a_file() -> None:
    wrong: Any = "fast"
    with pytest.raises(ConfigError, match="'fast' is not a number"):
        OptimizerConfig(lr=wrong)


@pytest.mark.parametrize(
    ("cls", "wrong"),
    [
        (OptimizerConfig, {"lr": -1e-6}),
        (OptimizerConfig, {"adam_betas": (0.9, 1.0)}),
        (OptimizerConfig, {"adam_betas": (0.9,)}),
        (OptimizerConfig, {"scheduler": "cosin"}),
        (SamplingParams, {"temperature": -0.1}),
        (SamplingParams, {"top_p": 0.0}),
        (SamplingParams, {"logprobs": 2}),
        (SkyRLLoraConfig, {"init_method": "pissa_niter_0"}),
        (FSDPConfig, {"fsdp_size": 0}),
        (FSDPConfig, {"reshard_after_forward": 0}),
        (TrainerConfig, {"max_ckpts_to_keep": 0}),
        (TrainerConfig, {"ckpt_interval": -2}),
        (TrainerConfig, {"max_training_steps": 0}),
        (TrainerConfig, {"resume_mode": "lastest"}),
        (DeepSpeedConfig, {"gradient_clipping": 1.0}),
        (ContainerConfig, {"mounts": ("data",)}),
        (ContainerConfig, {"mounts": ("/data:/inside:rx",)}),
        (ContainerConfig, {"mounts": ("/data\n",)}),
        (DataConfig, {"answer_column": ""}),
    ],
)
def test_a_value_out_of_range_is_refused(cls: type[Any], wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        cls(**wrong)
    assert [problem.path for problem in caught.value.problems] == list(wrong)


@pytest.mark.parametrize(
    ("cls", "edge"),
    [
        (OptimizerConfig, {"lr": 0, "max_grad_norm": 0}),
        (SamplingParams, {"temperature": 0, "top_k": 0, "logprobs": None}),
        (SkyRLLoraConfig, {"init_method": "pissa_niter_16", "target_modules": ["q_proj", "v_proj"]}),
        (FSDPConfig, {"reshard_after_forward": 8, "fsdp_size": 8}),
        (TrainerConfig, {"epochs": 0, "eval_interval": 0, "ckpt_interval": -1, "resume_mode": None}),
        (TrainerConfig, {"logger": ["console", "wandb"]}),
        (AlgorithmConfig, {"value_clip": None, "tis_imp_ratio_cap": 2.0}),
    ],
)
def test_a_value_at_the_edge_is_taken(cls: type[Any], edge: dict[str, Any]) -> None:
    built = cls(**edge)
    assert {name: getattr(built, name) for name in edge} == {
        name: tuple(value) if isinstance(value, list) else value for name, value in edge.items()
    }


def test_clipping_under_deepspeed_says_where_it_is_set() -> None:
    with pytest.raises(ConfigError, match=r"set optimizer_config\.max_grad_norm"):
        DeepSpeedConfig(gradient_clipping=1.0)


# Freezing


def test_a_source_that_changes_later_changes_nothing() -> None:
    source: dict[str, Any] = {"rope_parameters": {"factors": [1.0, 2.0]}}
    policy = PolicyConfig(model_config_kwargs=source)
    before = hash(policy)
    source["rope_parameters"]["factors"].append(3.0)
    source["new"] = 1
    assert policy.model_config_kwargs == {"rope_parameters": {"factors": (1.0, 2.0)}}
    assert hash(policy) == before


def test_nothing_can_be_assigned() -> None:
    run: Any = SkyRLTrainConfig()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        run.trainer.epochs = 2
    with pytest.raises(TypeError):
        run.trainer.policy.model_config_kwargs["new"] = 1


def test_megatron_tables_are_filled_up_and_written_entries_win() -> None:
    megatron = MegatronConfig(
        transformer_config_kwargs={"recompute_granularity": None, "num_layers_in_last_pipeline_stage": 13},
        optimizer_config_kwargs={"optimizer_cpu_offload": True},
    )
    assert megatron.transformer_config_kwargs == {
        "recompute_granularity": None,
        "recompute_modules": ("core_attn",),
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "num_layers_in_last_pipeline_stage": 13,
    }
    assert megatron.optimizer_config_kwargs["optimizer_cpu_offload"] is True
    assert megatron.optimizer_config_kwargs["optimizer_offload_fraction"] == 0.0


# Storing


def test_the_default_tree_comes_back_from_json() -> None:
    run = SkyRLTrainConfig()
    stored = json.loads(json.dumps(cattrs.unstructure(run), allow_nan=False))
    assert cattrs.structure(stored, SkyRLTrainConfig) == run


@pytest.mark.parametrize("cls", ALL, ids=class_name)
def test_every_class_comes_back_alone(cls: type[Any]) -> None:
    assert cattrs.structure(cattrs.unstructure(cls()), cls) == cls()
    assert pickle.loads(pickle.dumps(cls())) == copy.deepcopy(cls()) == cls()


def test_every_leaf_can_be_left_to_a_role() -> None:
    roles = {path: resume_role(attribute) for path, attribute in leaf_paths(SkyRLTrainConfig)}
    assert {roles[path] for path in roles if path.endswith(("model.path", "_data", "env_class"))} == {"identity"}
    assert {roles[path] for path in roles if path.endswith(("_interval", "_name", "_port"))} == {"free"}
    assert roles["trainer.policy.optimizer_config.lr"] == roles["trainer.train_batch_size"] == "numerics"


def test_only_what_changes_numbers_changes_the_fingerprint() -> None:
    longer = SkyRLTrainConfig(trainer=TrainerConfig(epochs=7, run_name="other", max_training_steps=3, ckpt_interval=1))
    faster = SkyRLTrainConfig(trainer=TrainerConfig(policy=PolicyConfig(optimizer_config=OptimizerConfig(lr=1e-5))))
    assert fingerprint(longer) == fingerprint(SkyRLTrainConfig()) != fingerprint(faster)


# Extending


def test_a_class_of_ones_own_takes_the_place_of_its_base() -> None:
    root = make_config(algorithm_cls=Bonus)
    run = cattrs.structure({"trainer": {"algorithm": {"bonus": 2.0, "gamma": 0.9}}}, root)
    assert isinstance(run, SkyRLTrainConfig)
    assert isinstance(run.trainer, TrainerConfig)
    assert isinstance(run.trainer.algorithm, Bonus)
    assert (run.trainer.algorithm.bonus, run.trainer.algorithm.gamma) == (2.0, 0.9)
    with pytest.raises(ConfigError, match="is not positive"):
        cattrs.structure({"trainer": {"algorithm": {"bonus": -1.0}}}, root)


def test_all_tables_can_be_replaced_at_once() -> None:
    @frozen
    class Data(DataConfig):
        cache: bool = True

    @frozen
    class Generator(GeneratorConfig):
        retries: int = 3

    root = make_config(algorithm_cls=Bonus, trainer_cls=TwoStage, data_cls=Data, generator_cls=Generator)
    added = {"trainer.stages": 2, "trainer.algorithm.bonus": 0.5, "data.cache": True, "generator.retries": 3}
    assert {path: get_at(root(), path) for path in added} == added
    known = {path for path, _ in leaf_paths(SkyRLTrainConfig)}
    assert {path for path, _ in leaf_paths(root)} == known | added.keys()
    assert set(table_paths(root)) == set(table_paths(SkyRLTrainConfig))


def test_an_extended_tree_is_stored_documented_and_pickled_like_ours() -> None:
    root = make_config(algorithm_cls=Bonus)
    run = cattrs.structure({"trainer": {"algorithm": {"bonus": 2.0}}}, root)
    assert cattrs.structure(cattrs.unstructure(run), root) == run
    assert pickle.loads(pickle.dumps(run)) == copy.deepcopy(run) == run
    assert docs_of(type(run.trainer.algorithm))["bonus"] == "A field that the library does not know."
    assert docs_of(type(run.trainer)) == docs_of(TrainerConfig)


def test_the_same_classes_give_the_same_root() -> None:
    assert make_config(algorithm_cls=Bonus) is make_config(algorithm_cls=Bonus)
    assert make_config(algorithm_cls=Bonus) is not make_config(trainer_cls=TwoStage)
    assert make_config() is SkyRLTrainConfig


def test_a_subclass_without_the_decorator_is_a_configuration_class_too() -> None:
    run = load([], {"trainer.algorithm.remembered": 2}, make_config(algorithm_cls=Undecorated)).config
    assert run.trainer.algorithm == Undecorated(remembered=2)
    with pytest.raises(ConfigError, match="'two' is not a whole number"):
        Undecorated(remembered="two")  # type: ignore[arg-type]  # the mistake


def test_a_root_as_the_design_writes_it_takes_overrides() -> None:
    class MySkyRLConfig(SkyRLTrainConfig):
        newfield1: str = "newvalue1"

    assert MySkyRLConfig.from_cli_overrides(["newfield1=other"]).newfield1 == "other"


FORMS = """
class MyTrainerConfig(TrainerConfig):
	newfield1: str = "newvalue1"

class MySkyRLConfig(SkyRLConfig):
	trainer: MyTrainerConfig

class MyAlgorithm(AlgorithmConfig):
    bonus: float = 0.5

class Deeper(TrainerConfig):
    algorithm: MyAlgorithm

class Several(SkyRLConfig):
    trainer: Deeper
    data: DataConfig

@frozen
class Table(BaseConfig):
    sampling: SamplingParams

class Supervised(SFTConfig):
    optimizer_config: OptimizerConfig
"""
"""Tables without defaults. The first two classes are those of the design of SkyRL's configuration, word for word."""


@pytest.fixture(params=["", "from __future__ import annotations\n"], ids=["evaluated", "postponed"])
def forms(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of these classes."""
    name = f"forms_{len(request.param)}"
    (tmp_path / f"{name}.py").write_text(
        f"{request.param}from skyrl.config import *\nfrom skyrl.tree import frozen\n{FORMS}"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module(name)


def test_a_root_in_the_second_form_of_the_design_takes_overrides(forms: Any) -> None:
    root = forms.MySkyRLConfig
    assert root().trainer == forms.MyTrainerConfig()
    run = root.from_cli_overrides(["trainer.newfield1=other", "trainer.epochs=3"])
    assert (run.trainer.newfield1, run.trainer.epochs) == ("other", 3)
    assert cattrs.structure(cattrs.unstructure(run), root) == run == pickle.loads(pickle.dumps(run))
    assert cattrs.structure({}, root) == root()


def test_a_table_without_a_default_takes_that_of_its_class(forms: Any) -> None:
    assert forms.Several().trainer.algorithm == forms.MyAlgorithm()
    assert load([], {"trainer.algorithm.bonus": 2}, forms.Several).config.trainer.algorithm.bonus == 2.0
    assert forms.Several().data == DataConfig()
    assert forms.Table().sampling == SamplingParams()
    assert forms.Table(sampling=SamplingParams(top_k=3)).sampling.top_k == 3
    assert inspect.signature(forms.Table).parameters["sampling"].default == SamplingParams()
    assert forms.Supervised().optimizer_config == OptimizerConfig()


def test_what_is_no_table_or_may_be_none_needs_a_default() -> None:
    with pytest.raises(TypeError, match=r"Leaf\.epochs needs a default: write epochs: int = "):

        class Leaf(TrainerConfig):
            epochs: int

    with pytest.raises(TypeError, match=r"Optional\.eval_sampling_params needs a default"):

        class Optional(GeneratorConfig):
            eval_sampling_params: SamplingParams | None


@pytest.mark.parametrize(
    ("build", "path"),
    [
        (lambda: AlgorithmConfig(use_kl_loss=True, use_kl_in_reward=True), "use_kl_in_reward"),
        (lambda: OptimizerConfig(warmup_steps_proportion=0.1, num_warmup_steps=5), "warmup_steps_proportion"),
        (lambda: DataConfig(train_data=("a", "b"), train_weights=(1.0,)), "train_weights"),
        (lambda: OffPolicyCorrectionConfig(geo_mask_low=1.0, geo_mask_high=0.5), "geo_mask_low"),
        (lambda: attrs.evolve(AlgorithmConfig(), use_kl_in_reward=True), "use_kl_in_reward"),
    ],
)
def test_a_component_that_is_built_alone_is_checked(build: Callable[[], Any], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    assert [problem.path for problem in caught.value.problems] == [path]


def test_what_does_not_go_together_in_a_file_is_one_problem_among_the_others_at_its_place() -> None:
    loaded = load([], {"trainer.algorithm.use_kl_in_reward": True})
    assert loaded.config.trainer.algorithm.use_kl_loss
    with pytest.raises(ConfigError) as caught:
        compose([], {"trainer.algorithm.use_kl_in_reward": True, "trainer.epochs": "two"})
    paths = [problem.path for problem in caught.value.problems]
    assert {"trainer.algorithm.use_kl_in_reward", "trainer.epochs"} <= set(paths)
    assert paths.count("trainer.algorithm.use_kl_in_reward") == 1


def test_a_misspelled_argument_names_the_near_field() -> None:
    wrong: Any = OptimizerConfig
    with pytest.raises(TypeError) as caught:
        wrong(weight_decy=1, lr="fast")
    assert isinstance(caught.value, ConfigError)
    assert "did you mean weight_decay?" in str(caught.value)
    assert "'fast' is not a number" in str(caught.value)


def test_type_checkers_know_what_evolving_takes() -> None:
    """mypy reads this file, and needs every ignore in it."""
    trainer: TrainerConfig = attrs.evolve(SkyRLTrainConfig().trainer, epochs=2)
    run: SkyRLTrainConfig = evolve_at(SkyRLTrainConfig(), "trainer.epochs", 2)
    assert trainer.epochs == run.trainer.epochs == 2
    with pytest.raises(ConfigError):
        attrs.evolve(trainer, epochs="two")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(TypeError):
        attrs.evolve(trainer, epoch=2)  # type: ignore[call-arg]  # wrong on purpose


# OmegaConf


def test_a_dict_config_is_read_with_its_interpolations() -> None:
    values = OmegaConf.create({"lr": 1e-5, "weight_decay": "${lr}", "adam_betas": [0.9, 0.95]})
    expected = OptimizerConfig(lr=1e-5, weight_decay=1e-5, adam_betas=(0.9, 0.95))
    assert OptimizerConfig.from_dict_config(values) == expected
    assert build_nested_dataclass(OptimizerConfig, values) == expected
    nested = OmegaConf.create({"trainer": {"epochs": 3, "run_name": "of-${trainer.epochs}"}})
    assert SkyRLTrainConfig.from_dict(nested).trainer.run_path == "runs/of-3"


@pytest.mark.parametrize("text", ["lr: ???", "lr: ${gone}", "lr: ${oc.env:NO_SUCH_VARIABLE_HERE}"])
def test_a_dict_config_that_cannot_be_resolved_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OptimizerConfig.from_dict_config(cast("DictConfig", OmegaConf.create(text)))
    assert [problem.path for problem in caught.value.problems] == ["lr"]


def test_a_class_of_another_table_is_refused() -> None:
    wrong: Any = DataConfig
    with pytest.raises(TypeError, match="DataConfig cannot be the table generator"):
        make_config(generator_cls=wrong)
