"""No field does nothing: a component reads it in some run, or the table of what is not implemented yet has it.

Runs in this process show most reads. What is read where processes start is read here by the same functions, without
the processes; `READ_ELSEWHERE` names the few lines that only several ranks or a vLLM engine reach.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import click
import pytest
import torch

from skyrl.config import SkyRLTrainConfig
from skyrl.config.kinds import RL, kind_of
from skyrl.config.losses import POLICY_LOSSES
from skyrl.config.unimplemented import UNIMPLEMENTED
from skyrl.envs.isolated import isolated
from skyrl.envs.llm_judge import LLMJudgeEnv
from skyrl.envs.reward_model import RewardModelEnv
from skyrl.envs.search import ask_retriever
from skyrl.envs.text2sql import Text2SQLEnv
from skyrl.experiments.collaborators import start_processes, weight_road
from skyrl.experiments.ppo import BasePPOExp
from skyrl.inference.vllm_arguments import engine_arguments
from skyrl.inference.vllm_engine import _start as start_vllm
from skyrl.inference.vllm_environment import variables
from skyrl.inference.vllm_model import ModelFacts
from skyrl.learners.fsdp2 import Fsdp2, _shard_modules
from skyrl.learners.ranks import Rendezvous
from skyrl.learners.schedule import learning_rate_schedule
from skyrl.learners.zero_config import engine_config
from skyrl.models.chat_templates import _text as template_text
from skyrl.rollout.chats import MessageChat, chat_of, renders_history
from skyrl.runs.inputs import sandbox_in_force
from skyrl.runs.recovery import attempts
from skyrl.training.advantage import advantage_estimator
from skyrl.training.objective import policy_objective
from skyrl.tree.classes import is_config, leaf_paths
from tests.learners.rows import batch
from tests.nano_run import config

TABLE = 81
"""Leaves in the table. This number may only fall."""

WHOLE = {"param_dtype": "float32", "reduce_dtype": "float32", "buffer_dtype": "float32"}
NVME = {"device": "nvme", "pin_memory": True, "nvme_path": "/tmp"}

COMMON: dict[str, Any] = {
    "trainer__algorithm__use_kl_loss": True,
    "trainer__policy__fsdp_config__mixed_precision": WHOLE,
    "trainer__ref__fsdp_config__mixed_precision": WHOLE,
    "trainer__critic__fsdp_config__mixed_precision": WHOLE,
}

NORM: dict[str, Any] = {"mean_level": "batch", "std_level": "group"}

SCENARIOS: tuple[dict[str, Any], ...] = (
    {
        "trainer__recompute_activations": True,
        "trainer__hf_save_interval": 2,
        "trainer__max_training_steps": 2,
    },
    {"trainer__resume_mode": "from_path", "trainer__max_training_steps": 3},
    {
        "trainer__run_path": "asynchronous",
        "trainer__max_training_steps": 2,
        "trainer__algorithm__policy_loss_type": "decoupled",
        "trainer__fully_async": {"enabled": True},
    },
    {
        "trainer__run_path": "with_a_critic",
        "trainer__max_training_steps": 1,
        "trainer__critic__model__path": "",
        "trainer__critic_mini_batch_size": 4,
        "trainer__policy__model__lora__rank": 2,
        "trainer__critic__model__lora__rank": 2,
        "trainer__algorithm__advantage_estimator": "gae",
        "trainer__algorithm__use_kl_loss": False,
        "trainer__algorithm__use_kl_in_reward": True,
        "trainer__algorithm__kl_ctrl__type": "adaptive",
        "trainer__algorithm__use_entropy_loss": True,
        "trainer__algorithm__zero_variance_filter": True,
        "trainer__algorithm__dynamic_sampling": {"type": "replace", "min_replace_ratio": 0.0, "max_sample_batches": 0},
        "trainer__algorithm__advantage_norm": NORM,
        "trainer__algorithm__reward_shaping": {"norm": NORM, "overlong": {"buffer_len": 2}, "scale": 2.0},
    },
)
"""Runs that together use everything that this version does in one process."""

ELSEWHERE: dict[str, Any] = {
    "trainer__placement__executor": "ray",
    "generator__inference_engine__backend": "vllm",
    "trainer__strategy": "deepspeed",
    **{
        f"trainer__{model}__deepspeed_config__zero_optimization__{offload}": NVME
        for model in ("policy", "ref", "critic")
        for offload in ("offload_param", "offload_optimizer")
    },
}
"""A run whose processes are not started: what they would be told is read."""

_FSDP_READERS: dict[str, Callable[..., Any]] = {
    "reshard_after_forward": Fsdp2._fsdp_options,
    "fsdp_size": Fsdp2._fsdp_options,
    "mixed_precision.reduce_dtype": Fsdp2._fsdp_options,
    "wrap_policy": _shard_modules,
}


def command_of(command: click.Command) -> Callable[..., Any]:
    """The function behind a command."""
    assert command.callback is not None
    return command.callback


READ_ELSEWHERE: dict[str, tuple[Callable[..., Any], str]] = {
    # path: the function that reads it, and how that is written there
    "kind": (kind_of, "run.kind"),
    **{
        f"trainer.{model}.optimizer_config.num_decay_steps": (learning_rate_schedule, "config.num_decay_steps")
        for model in ("policy", "critic")
    },
    "environment.skyrl_gym.reward_model.path": (RewardModelEnv.step, "self._settings.path"),
    "environment.skyrl_gym.reward_model.url": (RewardModelEnv._asked, "self._settings.url"),
    "environment.skyrl_gym.reward_model.timeout": (RewardModelEnv._asked, "self._settings.timeout"),
    **{
        f"trainer.{model}.fsdp_config.{name}": (reader, f"config.{name}")
        for model in ("policy", "ref", "critic")
        for name, reader in _FSDP_READERS.items()
    },
    "generator.step_wise_trajectories": (renders_history, "config.step_wise_trajectories"),
    "generator.merge_stepwise_output": (chat_of, "config.merge_stepwise_output"),
    "generator.chat_template.source": (template_text, "config.source"),
    "generator.use_conversation_multi_turn": (renders_history, "config.use_conversation_multi_turn"),
    "trainer.recover_retries": (attempts, "cfg.recover_retries"),
    "generator.append_eos_token_after_stop_str_in_multi_turn": (
        MessageChat.__init__,
        "config.append_eos_token_after_stop_str_in_multi_turn",
    ),
    "environment.skyrl_gym.text2sql.db_path": (Text2SQLEnv.__init__, "settings.db_path"),
    **{
        f"environment.skyrl_gym.search.{name}": (ask_retriever, f"settings.{name}")
        for name in ("search_url", "topk", "timeout", "log_requests")
    },
    "environment.skyrl_gym.llm_as_a_judge.model": (LLMJudgeEnv._ask, "self._settings.model"),
    "environment.skyrl_gym.llm_as_a_judge.base_url": (LLMJudgeEnv._ask, "self._settings.base_url"),
    "environment.skyrl_gym.sandbox_tier": (sandbox_in_force, "gym.sandbox_tier"),
    "environment.skyrl_gym.user_env_memory_gb": (isolated, "gym.user_env_memory_gb"),
    "generator.inference_engine.async_engine": (start_vllm, "config.async_engine"),
    "generator.inference_engine.weight_transfer_threshold_cuda_ipc_GB": (
        weight_road,
        "engine.weight_transfer_threshold_cuda_ipc_GB",
    ),
}
"""Read where a model is sharded over several ranks, where vLLM starts, where there are GPUs, in a second turn, where a
failed run begins again, or in an environment that asks for it."""

SIZES = "skyrl.config.sizes"
"""The one module of the configuration that counts as a component: it turns fields into the numbers that `layout` and
so every placement group is made from, and nobody else reads those fields."""

Read = tuple[str, str]
"""The module that read, and the path that it read."""

DECIDED_BY_RULES = {
    "trainer.bf16": "trainer.compute_dtype",
    "trainer.flash_attn": "trainer.attention",
    "trainer.gradient_checkpointing": "trainer.recompute_activations",
    "trainer.algorithm.use_tis": "trainer.algorithm.off_policy_correction.tis_ratio_type",
    "trainer.algorithm.tis_imp_ratio_cap": "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high",
}
"""Fields that a derivation rule turns into the one that components read."""


@contextmanager
def recorded(run: SkyRLTrainConfig) -> Iterator[set[Read]]:
    """The dotted paths of `run` that `SIZES`, or code of skyrl outside the configuration rooms, reads in the block."""
    tables = {id(table): path for path, table in tables_of(run, "")}
    reads: set[Read] = set()
    classes = {type(table) for _, table in tables_of(run, "")}
    for cls in classes:
        cls.__getattribute__ = recorder(tables, reads)
    try:
        yield reads
    finally:
        for cls in classes:
            del cls.__getattribute__


def recorder(tables: dict[int, str], reads: set[Read]) -> Any:
    def read(self: Any, name: str) -> Any:
        module = sys._getframe(1).f_globals.get("__name__", "")
        if id(self) in tables and is_component(module):
            reads.add((module, f"{tables[id(self)]}{name}"))
        return object.__getattribute__(self, name)

    return read


def is_component(module: str) -> bool:
    """Is what this module reads used, and not only checked or derived from?"""
    return module == SIZES or (module.startswith("skyrl.") and not module.startswith(("skyrl.config", "skyrl.tree")))


def tables_of(table: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    yield prefix, table
    for attribute in attrs.fields(type(table)):
        value = getattr(table, attribute.name)
        if is_config(type(value)):
            yield from tables_of(value, f"{prefix}{attribute.name}.")


def separate(table: Any) -> Any:
    """A copy in which no two paths share an instance, so that a read tells which path it was."""
    values = {each.name: getattr(table, each.name) for each in attrs.fields(type(table))}
    return type(table)(**{name: separate(value) if is_config(type(value)) else value for name, value in values.items()})


def choose_all_parts(nano: Path, out: Path, seen: set[Read]) -> None:
    """Every loss, estimator and reduction is made from a run that asks for it."""
    losses: list[dict[str, Any]] = [{"policy_loss_type": name} for name in POLICY_LOSSES]
    losses += [{"policy_loss_type": "decoupled", "decoupled__dual_clip": True}]
    losses += [{"loss_reduction": "seq_mean_token_sum_norm"}, {"policy_loss_type": f"{nano / 'reward.py'}:in_ascii"}]
    losses += [{"off_policy_correction__sequence_mask_metric": name} for name in ("geometric", "product")]
    losses += [{"off_policy_correction__tis_ratio_type": "sequence"}]
    losses += [{"advantage_estimator": f"{nano / 'reward.py'}:in_ascii"}]
    for asked in losses:
        values = {f"trainer__algorithm__{name}": value for name, value in asked.items()}
        run = separate(config(nano, out, **values))
        with recorded(run) as here:
            objective = policy_objective(run.trainer.algorithm)
            advantage_estimator(run.trainer.algorithm)
            objective.reduction(batch())
        seen |= here


def tell_the_processes(run: SkyRLTrainConfig, folder: Path) -> None:
    """Everything that is read of the configuration on the way to the processes of a run, which are not started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skyrl.processes.ray_processes.RayProcesses", lambda *_, **__: None)  # else a cluster starts
        start_processes(run)
    with Rendezvous(timeout=10) as rendezvous:
        weight_road(run, rendezvous, folder)
    engine = run.generator.inference_engine
    facts = ModelFacts(head_dim=64, kv_numbers_per_token=256, positions=64, eos_ids=(0,))
    engine_arguments(engine, model_path="model", model=facts, seed=0, device="cpu", max_model_len=64, known=())
    variables(engine, "cpu")
    for model, optimizer in (
        (run.trainer.policy, run.trainer.policy.optimizer_config),
        (run.trainer.ref, None),
        (run.trainer.critic, run.trainer.critic.optimizer_config),
    ):
        engine_config(
            model.deepspeed_config,
            optimizer,
            compute_dtype=torch.float32,
            micro_batch_rows=1,
            device=torch.device("cpu"),
        )


@pytest.fixture(scope="module")
def reads(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> set[Read]:
    """By which module which path is read."""
    out = tmp_path_factory.mktemp("reads")
    seen: set[Read] = set()
    for scenario in SCENARIOS:
        extra = (
            {"trainer__resume_path": str(out / "checkpoints" / "global_step_2")}
            if "trainer__resume_mode" in scenario
            else {}
        )
        if "trainer__run_path" in scenario:  # a run of its own
            folder = out / scenario["trainer__run_path"]
            extra = {f"trainer__{name}_path": str(folder / name) for name in ("run", "ckpt", "export")}
        if "trainer__critic__model__path" in scenario:
            extra |= {"trainer__critic__model__path": str(nano / "model")}
        run = separate(config(nano, out, **(COMMON | scenario | extra)))
        with recorded(run) as here:
            BasePPOExp(run).run()
        seen |= here
    run = separate(config(nano, out, **COMMON, **ELSEWHERE))
    with recorded(run) as elsewhere:
        tell_the_processes(run, out / "weights")
    choose_all_parts(nano, out, seen)
    return seen | elsewhere


def test_every_field_is_read_by_a_component_or_listed_as_not_implemented(reads: set[Read]) -> None:
    listed = set(RL.unimplemented_paths)
    read_paths = {path for _, path in reads} | READ_ELSEWHERE.keys()
    unread = {path for path, _ in leaf_paths(SkyRLTrainConfig)} - read_paths - listed - set(DECIDED_BY_RULES)
    assert not unread
    print(f"{len(listed)} fields are not implemented yet")
    assert len(listed) == TABLE


@pytest.mark.parametrize("path", READ_ELSEWHERE)
def test_what_is_read_elsewhere_is_read_where_it_is_said_to_be(path: str) -> None:
    function, spelling = READ_ELSEWHERE[path]
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    assert spelling in {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert path.endswith(spelling.rpartition(".")[2])


def test_what_is_read_elsewhere_is_not_read_here(reads: set[Read]) -> None:
    assert not READ_ELSEWHERE.keys() & {path for _, path in reads}


def test_nothing_that_is_read_is_still_listed(reads: set[Read]) -> None:
    exact = {entry.path for entry in UNIMPLEMENTED}
    read_paths = {path for module, path in reads if module != SIZES}  # sizes are those of what is to come, too
    assert not {path for path in read_paths if path in exact} - HANDED_ON


HANDED_ON = {
    "trainer.policy.model.lora",  # to the generator and the client, whose signatures have it
    "generator.sampling_params.additional_kwargs",  # looked at by the engine, to refuse them
    "generator.eval_sampling_params.additional_kwargs",
    "generator.inference_engine.fully_sharded_loras",  # looked at by vLLM's arguments, to refuse it
    "generator.inference_engine.served_model_name",  # to vLLM, which serves nobody but the run
}
"""Listed fields that a component sees without doing what they ask for."""
