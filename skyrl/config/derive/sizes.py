"""The sizes that a tree asks for, as plain numbers, for `check`, `skyrl plan` and the code that starts processes.

Only this module knows which fields hold these sizes; the arithmetic is in `skyrl.planning`.
"""

from __future__ import annotations

from typing import TypeAlias

import attrs

from skyrl.config.derive.algorithm_facts import loss_facts
from skyrl.config.derive.engine_backends import GROUP_TRANSPORTS, backend_of
from skyrl.config.derive.model_tables import grids_of
from skyrl.config.derive.rl_models import RL_ROLES
from skyrl.config.settings.algorithm import AlgorithmConfig
from skyrl.config.settings.losses import asks_for_correction
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.config.settings.trainer import TrainerConfig
from skyrl.planning.batches import Work, data_parallel, work
from skyrl.planning.replicas import Replicas, replicas
from skyrl.planning.topology import Degrees, EngineSizes, Grid, Sizes

Model: TypeAlias = str
"""Name of a role of the run, such as `policy`."""

GPUS_OF_A_MACHINE = 8
"""GPUs that a machine of a GPU cluster usually has; more where a model asks for more on one node."""


def scores_old_logprobs(algorithm: AlgorithmConfig, optimizer_steps: int) -> bool:
    """Whether the policy scores a batch before the first of its `optimizer_steps` optimizer steps.

    A KL term in the reward needs the resulting log-probabilities. Otherwise only a loss or correction that compares
    with them needs them, and only with several of these steps: before the first one, the policy still is the old
    policy. No pass is needed if `old_logprobs` takes them from the engine or interpolates them.
    """
    if algorithm.old_logprobs != "learner":
        return False
    reads = loss_facts(algorithm).reads_old_logprobs or asks_for_correction(algorithm.off_policy_correction)
    return algorithm.use_kl_in_reward or (optimizer_steps > 1 and reads)


def scorings(trainer: TrainerConfig, optimizer_steps: int) -> int:
    """Number of times that the policy scores all rows of a batch with `optimizer_steps` optimizer steps."""
    algorithm = trainer.algorithm
    if loss_facts(algorithm).learns_from_pairs:
        return trainer.update_epochs_per_batch
    times = int(scores_old_logprobs(algorithm, optimizer_steps))
    if algorithm.max_importance_ratio is None or (not times and algorithm.old_logprobs == "learner"):
        return times
    return times + trainer.update_epochs_per_batch


def scored_answers(run: SkyRLTrainConfig) -> int:
    """Answers to a prompt that are scored: all, or with pairs of answers at most those that are in a pair."""
    answers, algorithm = run.generator.n_samples_per_prompt, run.trainer.algorithm
    if loss_facts(algorithm).learns_from_pairs and algorithm.online_dpo.pairs != "all":
        return min(answers, 2)
    return answers


def models_of(run: SkyRLTrainConfig) -> tuple[Model, ...]:
    """The models of the run that have ranks."""
    return tuple(name for name, role in RL_ROLES.items() if role.exists(run))


def trained_models(run: SkyRLTrainConfig) -> tuple[Model, ...]:
    """Models that learn, and so have mini-batches: the policy, and the critic if there is one."""
    return tuple(model for model in models_of(run) if RL_ROLES[model].learns)


def on_ray(run: SkyRLTrainConfig) -> bool:
    """Whether the run starts its processes on Ray."""
    return run.trainer.placement.executor != "in_process"


def draws_rollouts(run: SkyRLTrainConfig) -> bool:
    """Whether the policy samples; False if the run trains on a recording."""
    return run.trainer.rollouts_from is None


def longest_row(run: SkyRLTrainConfig) -> tuple[int, int]:
    """Longest prompt and longest answer of a sample, in tokens; later turns count as the answer."""
    generator, prompt = run.generator, run.trainer.max_prompt_length
    start = prompt if generator.max_turns == 1 else generator.max_input_length or prompt
    return prompt, max(start - prompt, 0) + generator.sampling_params.max_generate_length


def starts_engines(run: SkyRLTrainConfig) -> bool:
    """Whether the run starts engines; False if they run already, or if it needs none."""
    return draws_rollouts(run) and backend_of(run.generator.inference_engine).is_started_by_the_run


def may_restart_engines(run: SkyRLTrainConfig) -> bool:
    """Whether an engine that died can be restarted while the run continues; False if learners then use its memory. A
    server that others operate is asked again.
    """
    shares_gpus = run.trainer.placement.colocate_all and run.trainer.device == "cuda"
    return draws_rollouts(run) and (not starts_engines(run) or (on_ray(run) and not shares_gpus))


def may_change_engines(run: SkyRLTrainConfig) -> bool:
    """Whether engines can be added and drained while the run continues; True only if they have GPUs of their own."""
    return on_ray(run) and starts_engines(run) and not run.trainer.placement.colocate_all


def most_engines(run: SkyRLTrainConfig) -> int:
    """Maximum number of engines that the run may have."""
    engine = run.generator.inference_engine
    return (engine.max_engines or engine.num_engines) if may_change_engines(run) else engine.num_engines


def sends_adapters_alone(run: SkyRLTrainConfig) -> bool:
    """Whether engines get only the trained adapter, not whole weights with the adapter merged in. For that, engines
    must keep the base weights: whole weights are sent for int8, for weights initialized from scratch, to engines that
    give up their weights to sleep, and to servers where samples in flight continue under new weights.
    """
    engine, model = run.generator.inference_engine, run.trainer.policy.model
    able = backend_of(engine)
    gives_up = engine.rollout_dtype == "int8" or (run.trainer.placement.colocate_all and able.sleeps)
    asynchronous = run.trainer.fully_async
    changes = able.samples_keep_adapters and asynchronous.enabled and asynchronous.interrupt_generation
    full_weights = gives_up or changes or model.init_from_scratch
    return bool(draws_rollouts(run) and model.lora.rank and able.adapters) and not full_weights


def joins_servers(run: SkyRLTrainConfig) -> bool:
    """Whether weights are sent to servers that run already through a process group of learner and servers."""
    by_group = run.generator.inference_engine.weight_sync_backend in GROUP_TRANSPORTS
    return draws_rollouts(run) and by_group and not starts_engines(run) and not sends_adapters_alone(run)


def workers_of_an_engine(run: SkyRLTrainConfig) -> int:
    """Number of processes of one engine that receive weights: those that the run starts, or those of each server."""
    engine, started = run.generator.inference_engine, engines_of(run)
    workers = engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size
    return workers if started is None else started.gpus


def sends_adapter_files(run: SkyRLTrainConfig) -> bool:
    """Whether adapters travel alone, as files. The torch engine gets tensors, unless files are configured."""
    engine = run.generator.inference_engine
    by_choice = on_ray(run) and engine.weight_sync_backend == "disk"
    return sends_adapters_alone(run) and (backend_of(engine).adapters == "files" or by_choice)


def grid_of(run: SkyRLTrainConfig, model: Model) -> Grid:
    """Nodes and GPUs of a model."""
    return RL_ROLES[model].grid(run)


def degrees_of(run: SkyRLTrainConfig, model: Model) -> Degrees:
    """Ranks of one replica of the model, by the dimension along which they share it, whatever the strategy."""
    return RL_ROLES[model].degrees(run)


def replicas_of(run: SkyRLTrainConfig, model: Model) -> Replicas:
    """Which ranks of the model compute on the same rows. The tree must have passed `check`."""
    degrees = degrees_of(run, model)
    return replicas(grid_of(run, model).ranks, inner=degrees.inner, stages=degrees.pipeline)


def data_parallel_of(run: SkyRLTrainConfig, model: Model) -> int | None:
    """Groups of ranks of the model that get rows of their own; None where its ranks do not form whole groups."""
    return data_parallel(grid_of(run, model).ranks, degrees_of(run, model).replica)


def engines_of(run: SkyRLTrainConfig) -> EngineSizes | None:
    """The engines that the run starts. An embedded engine computes on one GPU, whatever its parallel sizes are."""
    if not starts_engines(run):
        return None
    engine = run.generator.inference_engine
    if backend_of(engine).is_embedded:
        return EngineSizes(number=engine.num_engines)
    return EngineSizes(
        number=engine.num_engines,
        tensor=engine.tensor_parallel_size,
        pipeline=engine.pipeline_parallel_size,
        data=engine.data_parallel_size,
        on_one_node=engine.distributed_executor_backend == "mp",
    )


def work_of(run: SkyRLTrainConfig, model: Model) -> Work:
    """The share of each data-parallel rank of the model in a batch. The tree must have passed `check`.

    The policy does not score a batch whose old log-probabilities are not used: `scores_old_logprobs`. With
    `max_importance_ratio` it scores every mini-batch before its update, too.
    """
    trainer, learns = run.trainer, model in trained_models(run)
    share = work(
        prompts=trainer.train_batch_size,
        samples=run.generator.n_samples_per_prompt,
        scored=scored_answers(run),
        ranks=data_parallel_of(run, model) or 1,
        forward=trainer.micro_forward_batch_size_per_gpu,
        mini=getattr(trainer, f"{model}_mini_batch_size") if learns else 0,
        micro=trainer.micro_train_batch_size_per_gpu,
        passes=trainer.update_epochs_per_batch,
    )
    times = scorings(trainer, share.optimizer_steps) if model == "policy" else 1
    rows, passes = share.rows_scored * times, share.scoring_micro_batches * times
    return attrs.evolve(share, rows_scored=rows, scoring_micro_batches=passes)


def sizes_of(run: SkyRLTrainConfig, gpus_per_node: int | None = None) -> Sizes:
    """Sizes for `skyrl.planning.layout.layout`, of a resolved tree that has passed `check`.

    `gpus_per_node` are the GPUs of one machine. None: 8, or more where a model asks for more on one node.
    """
    models = grids_of(run, RL_ROLES.values())
    largest = max(grid.gpus_per_node for grid in models.values())
    placement, together = run.trainer.placement, not on_ray(run)  # in one process everything is in one place
    return Sizes(
        models=models,
        engines=engines_of(run),
        colocate_all=placement.colocate_all or together,
        colocate_policy_ref=placement.colocate_policy_ref or together,
        gpus_per_node=gpus_per_node or max(GPUS_OF_A_MACHINE, largest),
    )
