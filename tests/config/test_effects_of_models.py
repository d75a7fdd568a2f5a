"""A setting of a model that does nothing is told, for each model of each kind of run; one that acts is not."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from skyrl.config import load
from skyrl.config.derive.rl_models import RL_ROLES
from skyrl.config.derive.supervised_rules import MODEL
from skyrl.config.effects.models import model_effects
from skyrl.config.loading.check import without_effect
from skyrl.config.loading.resolve import resolve_with_origins
from tests.config.leaves import RUNNABLE, each

Values = dict[str, Any]

MODELS = ("policy", "critic", "ref", "teacher")
FROZEN = ("trainer.ref", "trainer.teacher")
BASE: Values = {"trainer.critic.model.path": "critic", "trainer.teacher.model.path": "teacher", **RUNNABLE}
SFT: Values = {"kind": "sft", "model.path": "m", "train_datasets": ["rows"], "device": "cpu"}

ZERO = "{m}deepspeed_config.zero_optimization."
DEEPSPEED: Values = {"{t}strategy": "deepspeed"}
CUDA: Values = {"{t}device": "cuda"}
SEVERAL: Values = {"{ranks}": 2}


def stage(number: int) -> Values:
    """DeepSpeed at this stage."""
    return {**DEEPSPEED, f"{ZERO}stage": number}


@attrs.frozen
class Case:
    """A field with a value, where it acts, and changes of that after which it does not."""

    field: str
    value: Any
    acts: Values
    idle: tuple[Values, ...] = ()
    learns: bool = False
    """A reference or a teacher never has a use for it."""


BY_FSDP: Values = {"{t}strategy": "deepspeed"}
ADAPTER: Values = {"{m}model.lora.rank": 4}
SCHEDULE = "{m}optimizer_config."
MUON: Values = {f"{SCHEDULE}optimizer": "muon"}
FLAT: Values = {f"{SCHEDULE}scheduler": "constant"}
WARM: Values = {f"{SCHEDULE}num_warmup_steps": 2}
HALF: Values = {"{m}fsdp_config.mixed_precision.param_dtype": "fp16"}
IN_BFLOAT16: Values = {"{m}fsdp_config.mixed_precision.param_dtype": "bf16"}
SUMMED_IN_HALF: Values = {"{m}fsdp_config.mixed_precision.reduce_dtype": "float16"}
ALONE: Values = {"{ranks}": 1}
ON_CPU: Values = {"{t}device": "cpu"}
KEPT: Values = {f"{ZERO}offload_optimizer.device": "none"}

CASES = (
    *(
        Case(f"model.lora.{name}", value, ADAPTER, ({"{m}model.lora.rank": 0},), learns=learns)
        for name, value, learns in (
            ("alpha", 3, False),
            ("path", "stored", False),
            ("dropout", 0.5, True),
            ("target_modules", ["q_proj"], False),
            ("exclude_modules", ["q_proj"], False),
            ("init_method", "gaussian", True),
        )
    ),
    Case("model.lora.init_method", "gaussian", ADAPTER, ({"{m}model.lora.path": "stored"},), learns=True),
    Case("optimizer_config.min_lr_ratio", 0.5, {f"{SCHEDULE}scheduler": "cosine"}, (FLAT,), learns=True),
    Case("optimizer_config.num_decay_steps", 3, {f"{SCHEDULE}scheduler": "warmup_stable_decay"}, (FLAT,), learns=True),
    Case("optimizer_config.warmup_start_ratio", 0.5, WARM, (FLAT, {f"{SCHEDULE}num_warmup_steps": 0}), learns=True),
    Case("optimizer_config.weight_decay_on", "matrices", {}, ({f"{SCHEDULE}weight_decay": 0.0},), learns=True),
    Case("optimizer_config.adam_betas", [0.5, 0.5], {}, ({f"{SCHEDULE}optimizer": "sgd"},), learns=True),
    Case("optimizer_config.adam_eps", 0.5, {}, ({f"{SCHEDULE}optimizer": "sgd"},), learns=True),
    Case("optimizer_config.muon_momentum", 0.5, MUON, ({f"{SCHEDULE}optimizer": "adamw"},), learns=True),
    *(
        Case(f"optimizer_config.{name}", value, HALF, (IN_BFLOAT16, BY_FSDP), learns=True)
        for name, value in (
            ("initial_loss_scale", 2.0),
            ("min_loss_scale", 2.0),
            ("loss_scale_window", 5),
            ("hysteresis", 1),
        )
    ),
    Case("optimizer_config.hysteresis", 1, {**SUMMED_IN_HALF, **SEVERAL}, (ALONE,), learns=True),
    Case("optimizer_config.num_warmup_steps", 3, {}, (FLAT,), learns=True),
    Case("optimizer_config.warmup_steps_proportion", 0.5, {}, (FLAT,), learns=True),
    Case("fsdp_config.cpu_offload", True, {**SEVERAL, **CUDA}, (ALONE, ON_CPU, BY_FSDP)),
    Case("fsdp_config.reshard_after_forward", False, SEVERAL, (ALONE, BY_FSDP)),
    Case("fsdp_config.fsdp_size", 1, SEVERAL, (ALONE, BY_FSDP)),
    Case("fsdp_config.wrap_policy", {"transformer_layer_cls_to_wrap": "x"}, SEVERAL, (ALONE, BY_FSDP)),
    Case("fsdp_config.mixed_precision.reduce_dtype", "bf16", SEVERAL, (ALONE, BY_FSDP), learns=True),
    Case("fsdp_config.mixed_precision.param_dtype", "fp16", {}, (BY_FSDP,)),
    Case("fsdp_config.mixed_precision.buffer_dtype", "fp16", {}, (BY_FSDP,)),
    Case("deepspeed_config.communication_data_type", "fp16", DEEPSPEED, ({"{t}strategy": "fsdp"},), learns=True),
    Case("deepspeed_config.wall_clock_breakdown", True, DEEPSPEED, ({"{t}strategy": "fsdp"},), learns=True),
    Case("deepspeed_config.prescale_gradients", True, stage(0), (stage(1), stage(3)), learns=True),
    Case("deepspeed_config.zero_optimization.stage", 1, DEEPSPEED, ({"{t}strategy": "fsdp2"},)),
    Case(f"{ZERO}zero_hpz_partition_size", 2, {**stage(3), **SEVERAL}, (stage(2), ALONE), learns=True),
    Case(f"{ZERO}zero_quantized_weights", True, stage(3), (stage(2),)),
    Case(f"{ZERO}zero_quantized_gradients", True, stage(3), (stage(2),), learns=True),
    Case(f"{ZERO}round_robin_gradients", True, {**stage(1), **SEVERAL}, (stage(3), stage(0), ALONE), learns=True),
    Case(f"{ZERO}reduce_bucket_size", 8, stage(1), (stage(0),), learns=True),
    Case(f"{ZERO}allgather_bucket_size", 8, {**stage(2), **SEVERAL}, (stage(3), ALONE), learns=True),
    Case(f"{ZERO}sub_group_size", 8, stage(3), (stage(2),), learns=True),
    *(
        Case(f"{ZERO}stage3_{name}", 8, stage(3), (stage(2),))
        for name in (
            "max_live_parameters",
            "max_reuse_distance",
            "prefetch_bucket_size",
            "param_persistence_threshold",
        )
    ),
    Case(f"{ZERO}overlap_comm", False, {**stage(3), **CUDA}, (ON_CPU, stage(0))),
    Case(f"{ZERO}overlap_comm", False, stage(1), (stage(3),), learns=True),
    Case(
        f"{ZERO}contiguous_gradients",
        False,
        {**stage(2), **KEPT},
        (stage(0), {f"{ZERO}offload_optimizer.device": "cpu"}),
        learns=True,
    ),
    Case(f"{ZERO}contiguous_gradients", False, {**stage(3), f"{ZERO}offload_optimizer.device": "cpu"}, learns=True),
    *(
        case
        for part, early, learns in (("offload_param", stage(2), False), ("offload_optimizer", stage(0), True))
        for case in (
            Case(f"{ZERO}{part}.device", "cpu", {**stage(3), **CUDA}, (early, ON_CPU), learns=learns),
            Case(f"{ZERO}{part}.device", "nvme", stage(3), (early,), learns=learns),
            Case(
                f"{ZERO}{part}.pin_memory",
                True,
                {**stage(3), **CUDA, f"{ZERO}{part}.device": "cpu"},
                (early, ON_CPU, {f"{ZERO}{part}.device": "none"}),
                learns=learns,
            ),
            Case(
                f"{ZERO}{part}.nvme_path",
                "/drive",
                {**stage(3), f"{ZERO}{part}.device": "nvme"},
                (early, {f"{ZERO}{part}.device": "cpu"}),
                learns=learns,
            ),
        )
    ),
)
"""In every model. `{m}` is its table, `{t}` that of the trainer, `{ranks}` the number of its GPUs on a node."""

PLACES: dict[str, tuple[Values, dict[str, str]]] = {
    **{
        f"trainer.{name}": (
            BASE,
            {"{m}": f"trainer.{name}.", "{t}": "trainer.", "{ranks}": f"trainer.placement.{name}_num_gpus_per_node"},
        )
        for name in MODELS
    },
    "": (SFT, {"{m}": "", "{t}": "", "{ranks}": "placement.num_gpus_per_node"}),
}
NEVER = f"{ZERO}stage3_gather_16bit_weights_on_model_save"
MEGATRON: Values = {"{t}strategy": "megatron"}
BY_OTHERS: Values = {"{t}strategy": "fsdp2"}
WITH_MEGATRON = (
    Case("megatron_config.tensor_model_parallel_size", 2, MEGATRON, (BY_OTHERS,)),
    Case("megatron_config.ddp_config", {"overlap_grad_reduce": True}, MEGATRON, (BY_OTHERS,), learns=True),
    Case(
        "megatron_config.moe_token_dispatcher_type",
        "allgather",
        {**MEGATRON, "{m}megatron_config.expert_model_parallel_size": 2},
        ({"{m}megatron_config.expert_model_parallel_size": 1},),
    ),
    Case("megatron_config.optimizer_config_kwargs", {"loss_scale": 1}, MEGATRON, (BY_OTHERS,), learns=True),
    Case("megatron_config.torch_profiler_config", {"enable": True}, MEGATRON, (BY_OTHERS,), learns=True),
    Case("megatron_config.empty_cuda_cache", False, {**MEGATRON, **CUDA}, (ON_CPU, BY_OTHERS), learns=True),
    Case(
        "megatron_config.lora_config",
        {"lora_type": "canonical_lora"},
        {**MEGATRON, **ADAPTER},
        ({"{m}model.lora.rank": 0}, BY_OTHERS),
        learns=True,
    ),
    Case("model_config_kwargs", {"rms_norm_eps": 0.5}, BY_OTHERS, (MEGATRON,)),
)
"""In every model, under Megatron."""

IN_EVERY_PLACE = [(section, case) for section in PLACES for case in (*CASES, *WITH_MEGATRON)]


def named(section: str, field: str) -> str:
    """The path of a field of the model."""
    _, names = PLACES[section]
    field = field if "{" in field or field.startswith("trainer.") else "{m}" + field
    for short, name in names.items():
        field = field.replace(short, name)
    return field


def is_told(section: str, field: str, value: Any, *contexts: Values) -> bool:
    """Whether the field, or a table that it is in, is said to do nothing."""
    base, _ = PLACES[section]
    path = named(section, field)
    values: Values = {named(section, name): setting for context in contexts for name, setting in context.items()}
    loaded = load([], base | values | {path: value})
    config, origins, _ = resolve_with_origins(loaded.config, loaded.origins)
    return any(f"{path}.".startswith(f"{problem.path}.") for problem in without_effect(config, origins))


@each(IN_EVERY_PLACE)
def test_a_setting_that_acts_is_not_told(at: tuple[str, Case]) -> None:
    section, case = at
    if section in FROZEN and case.field.startswith("optimizer_config"):
        return
    assert is_told(section, case.field, case.value, case.acts) == (case.learns and section in FROZEN)


@each(IN_EVERY_PLACE)
def test_a_setting_that_does_nothing_is_told(at: tuple[str, Case]) -> None:
    section, case = at
    if section in FROZEN and case.field.startswith("optimizer_config"):
        return
    for context in case.idle:
        assert is_told(section, case.field, case.value, case.acts, context), context


@pytest.mark.parametrize("section", PLACES)
def test_megatrons_checkpoints_are_loaded_by_any_number_of_ranks_anyway(section: str) -> None:
    assert is_told(section, "megatron_config.dist_ckpt_optim_fully_reshardable", True, MEGATRON)


def test_settings_of_an_adapter_act_from_rank_one() -> None:
    assert not is_told("trainer.policy", "model.lora.alpha", 8, {"model.lora.rank": 1})
    assert is_told("trainer.policy", "model.lora.alpha", 8, {"model.lora.rank": 0})


@pytest.mark.parametrize("section", PLACES)
def test_a_model_that_deepspeed_does_not_save_is_told_so(section: str) -> None:
    assert is_told(section, NEVER, True, stage(3))


SHARED: Values = {"trainer.device": "cuda", "trainer.placement.colocate_all": True}


@pytest.mark.parametrize("model", ["policy", "critic"])
def test_offloading_between_phases_makes_room_for_those_who_share_the_gpu(model: str) -> None:
    section, field = f"trainer.{model}", "optimizer_config.offload_after_step"
    assert not is_told(section, field, False, SHARED)
    assert is_told(section, field, False, SHARED, {"trainer.device": "cpu"})
    apart: Values = {"trainer.placement.colocate_all": False, "trainer.placement.colocate_policy_ref": False}
    assert is_told(section, field, False, SHARED, apart)


def test_an_optimizer_that_is_offloaded_all_the_time_does_not_move_between_phases() -> None:
    section, field = "trainer.policy", "optimizer_config.offload_after_step"
    assert is_told(section, field, False, SHARED, SEVERAL, {"{m}fsdp_config.cpu_offload": True})
    assert not is_told(section, field, False, SHARED, {"{m}fsdp_config.cpu_offload": True})  # one rank offloads nothing
    assert not is_told(section, field, False, SHARED, stage(2))
    assert not is_told(section, field, False, SHARED, stage(2), {f"{ZERO}offload_param.device": "cpu"})
    for elsewhere in (stage(0), {**stage(1), f"{ZERO}offload_optimizer.device": "cpu"}):
        assert is_told(section, field, False, SHARED, elsewhere)
    assert is_told(section, field, False, SHARED, {**stage(3), f"{ZERO}offload_param.device": "cpu"})


@pytest.mark.parametrize("model", ["policy", "critic"])
def test_updates_are_left_out_unless_a_run_aborts(model: str) -> None:
    section, field = f"trainer.{model}", "optimizer_config.max_skipped_updates"
    assert not is_told(section, field, 1)
    assert is_told(section, field, 1, {"trainer.faults.on_non_finite": "abort"})


@pytest.mark.parametrize("model", ["policy", "critic"])
def test_the_unit_of_a_schedule_matters_where_a_training_step_has_several_updates(model: str) -> None:
    section, field = f"trainer.{model}", "optimizer_config.schedule_unit"
    assert is_told(section, field, "training_step")  # the rate is the same all the time
    assert not is_told(section, field, "training_step", WARM)
    one_update: Values = {"trainer.train_batch_size": 256, f"trainer.{model}_mini_batch_size": 256}
    assert is_told(section, field, "training_step", WARM, one_update)
    assert is_told("", field, "training_step", WARM)


@pytest.mark.parametrize("switch", ["trainer.placement.colocate_all", "trainer.placement.colocate_policy_ref"])
def test_who_shares_gpus_matters_where_there_are_several_places(switch: str) -> None:
    apart: Values = {"trainer.placement.executor": "ray", "trainer.placement.colocate_all": False}
    assert not is_told("trainer.policy", switch, False, apart)
    assert is_told("trainer.policy", switch, False)


def test_models_share_gpus_with_the_engines_whether_they_share_them_among_each_other_or_not() -> None:
    switch = "trainer.placement.colocate_policy_ref"
    assert is_told("trainer.policy", switch, False, {"trainer.placement.executor": "ray"})
    one_model: Values = {
        "trainer.placement.executor": "ray",
        "trainer.placement.colocate_all": False,
        "trainer.critic.model.path": None,
        "trainer.teacher.model.path": None,
        "trainer.algorithm.use_kl_loss": False,
    }
    assert is_told("trainer.policy", switch, False, one_model)


CRITIC_TABLES = ("optimizer_config.lr", "fsdp_config.cpu_offload", "deepspeed_config.prescale_gradients")


@pytest.mark.parametrize("field", [*CRITIC_TABLES, "model.lora.rank"])
def test_settings_of_a_critic_that_is_not_there_are_told_once(field: str) -> None:
    path = f"trainer.critic.{field}"
    value = {"lr": 0.5, "rank": 4}.get(field.rpartition(".")[2], True)
    loaded = load([], RUNNABLE | {path: value})
    config, origins, _ = resolve_with_origins(loaded.config, loaded.origins)
    [problem] = without_effect(config, origins)
    assert f"{path}.".startswith(f"{problem.path}.")
    assert "there is a critic" in problem.message


def test_every_condition_of_a_model_has_a_case() -> None:
    expected = {effect.path for model in (*RL_ROLES.values(), MODEL) for effect in model_effects(model)}
    tested = {named(section, case.field) for section, case in IN_EVERY_PLACE} | {
        named(section, NEVER) for section in PLACES
    }
    tables = {"lora", "optimizer_config", "fsdp_config", "deepspeed_config", "megatron_config"}
    tables |= {"offload_param", "offload_optimizer"}
    tested_elsewhere = {
        *tables,
        "schedule_unit",
        "lora_sync_path",
        "dist_ckpt_optim_fully_reshardable",
    }  # tested by themselves
    assert {path for path in expected - tested if path.rpartition(".")[2] not in tested_elsewhere} == set()
