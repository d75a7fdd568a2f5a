"""Observables of the learner: what passes through its model, and how large the batches are."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from skyrl.batch import TrainingBatch
from skyrl.config import SkyRLTrainConfig
from skyrl.config.settings.learners import ShardedModelConfig
from skyrl.config.settings.run_basics import RunBasics
from skyrl.errors import DataError, ModelError
from skyrl.experiments.experiment import experiment_class
from skyrl.experiments.factories import engine_makers
from skyrl.inference.engine import GenerationRequest, SampleKey
from skyrl.learners.offloading import HostActivations
from skyrl.learners.workers import roles as workers
from skyrl.learners.workers.objectives import CrossEntropy
from skyrl.training.objective import policy_objective
from skyrl.training.trainer import PPOTrainer
from skyrl.trajectory import TrajectoryGroup
from tests.effects.algorithm import small_batch
from tests.effects.probe import Scene, observable
from tests.learners.updating import PolicyWorker, SFTWorker
from tests.training.test_metrics import answer, group


@observable("the passes through the learner's first layer: shapes, type, attention, recomputation")
def passes(scene: Scene) -> object:
    """One scoring and one update of a batch of eight short rows."""
    trainer, seen = scene.run.trainer, []
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(False)
        rows = trainer.micro_train_batch_size_per_gpu
        worker = PolicyWorker(trainer, policy_objective(trainer.algorithm, micro_batch_rows=rows))

        def look(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
            seen.append((tuple(output.shape), str(output.dtype), torch.is_grad_enabled()))

        next(module for module in worker.model.modules() if isinstance(module, nn.Linear)).register_forward_hook(look)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # of reentrant checkpoints
            asyncio.run(worker.score(small_batch()))
            asyncio.run(worker.update(small_batch()))
        model: Any = worker.model
        return [seen, model.config._attn_implementation, torch.are_deterministic_algorithms_enabled()]
    finally:
        torch.use_deterministic_algorithms(deterministic)


@observable("the log-probabilities that the learner and the engine compute")
def rounding(scene: Scene) -> object:
    scores = asyncio.run(
        PolicyWorker(scene.run.trainer, policy_objective(scene.run.trainer.algorithm)).score(small_batch())
    )
    engine, *_ = engine_makers(scene.run)
    drawn = asyncio.run(engine().generate(asked(scene.run)))
    return scores.tolist(), [completion.logprobs for completion in drawn]


def asked(run: SkyRLTrainConfig) -> GenerationRequest:
    key = SampleKey(run_seed=0, weight_version=0, prompt_id="0", sample_index=0)
    return GenerationRequest(prompt_ids=(5, 6, 7), sampling=run.generator.sampling_params, keys=(key,))


@observable("whether the inputs of recomputed layers may wait on the host")
def waiting_activations(scene: Scene) -> object:
    with noted_activations() as dimensions:
        worker = PolicyWorker(scene.run.trainer, policy_objective(scene.run.trainer.algorithm))
        asyncio.run(worker.update(small_batch()))
    return bool(dimensions)


@contextmanager
def noted_activations() -> Iterator[list[int]]:
    """A block whose learners note the dimensions of what could wait on the host, and keep it where it is."""
    dimensions: list[int] = []

    class Noted(HostActivations):
        def wants(self, tensor: torch.Tensor) -> bool:
            dimensions.append(tensor.dim())
            return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skyrl.learners.workers.learning_worker.HostActivations", Noted)
        yield dimensions


@observable("the type in which the layers of a learner's model are fused")
def fused_layers(scene: Scene) -> object:
    return fusions_of(scene.run.trainer, scene.run.trainer.policy)


def fusions_of(run: RunBasics, section: ShardedModelConfig) -> list[str]:
    """The types of computation that fused kernels are chosen for; none is started."""
    fused: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "fuse_layers", lambda model, device, dtype, field: fused.append(f"{dtype}, {field}"))
        workers.causal_lm(run, section).meta_model()
    return fused


@observable("the functions of logits that `torch.compile` is given in an update")
def compiled_functions(scene: Scene) -> object:
    compiled_names: list[str] = []

    def note(function: Any) -> Any:
        compiled_names.append(function.__name__)
        return function

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skyrl.algorithms.linear_logprobs.compiled", note)
        run, batch = scene.run, small_batch()
        if run.kind == "sft":
            worker: PolicyWorker | SFTWorker = SFTWorker(run, CrossEntropy())
        else:
            worker = PolicyWorker(run.trainer, policy_objective(run.trainer.algorithm))
        asyncio.run(worker.update(batch))
    return compiled_names


@observable("the strategy that holds the learner's model", long=True)
def strategy(scene: Scene) -> object:
    trainer = scene.run.trainer
    worker = PolicyWorker(trainer, policy_objective(trainer.algorithm))
    try:
        return type(worker.strategy).__name__
    finally:
        worker.close()


class Sampled:
    """Rollouts of one group, and engines that take any weights."""

    async def next_batch(self, version: int) -> tuple[TrajectoryGroup, ...]:
        return (group(answer("11", 1.0, rollout_logprobs=(-0.25, -0.5)), answer("1", 0.0, rollout_logprobs=(-1.0,))),)

    def metrics(self) -> dict[str, float]:
        return {}

    async def publish(self, version: int) -> dict[str, float]:
        return {}


class Counting:
    """A learner that notes how many answers each update has."""

    def __init__(self) -> None:
        self.answers: list[int] = []
        self.old: list[object] = []

    async def score(self, batch: TrainingBatch) -> torch.Tensor:
        return torch.zeros(batch.input_ids.shape)

    async def forward_backward(self, batch: TrainingBatch, objective: object) -> dict[str, float]:
        self.answers.append(batch.answers)
        self.old.append(None if batch.old_logprobs is None else batch.old_logprobs.tolist())
        return {}

    async def optimizer_step(self, settings: object) -> dict[str, float]:
        return {"skipped_updates": 0.0}


@observable("the answers in each optimizer step of policy and critic for one batch of eight", refuses=True)
def optimizer_steps(scene: Scene) -> object:
    policy, critic, unused = Counting(), Counting(), None
    parts: dict[str, Any] = dict.fromkeys(
        (
            "rollouts",
            "reference",
            "weights",
            "shape_rewards",
            "estimate_advantages",
            "position",
            "objective",
            "critic_objective",
        ),
        unused,
    )
    trainer = PPOTrainer(
        trainer_cfg=scene.run.trainer, policy=policy, critic=critic, critic_targets=lambda batch: batch.rewards, **parts
    )
    asyncio.run(trainer.improve(small_batch()))
    return policy.answers, critic.answers


@observable("the old log-probabilities that a batch is learned with")
def old_logprobs(scene: Scene) -> object:
    policy = Counting()
    parts: dict[str, Any] = dict.fromkeys(("reference", "critic", "position", "objective", "critic_objective"))
    trainer = PPOTrainer(
        trainer_cfg=scene.run.trainer,
        rollouts=Sampled(),
        policy=policy,
        weights=Sampled(),
        shape_rewards=lambda batch: (batch.rewards, {}),
        estimate_advantages=lambda batch: batch.rewards,
        critic_targets=lambda batch: batch.rewards,
        **parts,
    )
    asyncio.run(trainer.step())
    return policy.old


@observable("the type, attention and recomputation that are derived for the learner")
def derived(scene: Scene) -> object:
    trainer = scene.run.trainer
    return trainer.compute_dtype, trainer.attention, trainer.recompute_activations


@observable("the tokenizer: its implementation, its place and what it makes of a text")
def tokenizer(scene: Scene) -> object:
    experiment: Any = experiment_class(scene.run)(scene.run)
    try:
        tokenizer = experiment.tokenizer
        return tokenizer.is_fast, tokenizer.name_or_path, tokenizer.encode("sort: hgdbha")
    except ModelError as error:
        return str(error)


@observable("the prompts that are read, and how many are left out")
def prompts(scene: Scene) -> object:
    experiment: Any = experiment_class(scene.run)(scene.run)
    try:
        dataset = experiment.eval_dataset
    except DataError as error:
        return str(error)
    return [prompt.id for prompt in dataset.prompts], dataset.too_long


class Asked:
    """A generator that notes how many prompts it is given at a time, and samples none."""

    def __init__(self) -> None:
        self.prompts: list[int] = []

    def tally(self, samples: int) -> None:
        """Nothing fails."""

    async def generate(self, prompts: Sequence[object], **_: object) -> tuple[()]:
        self.prompts.append(len(prompts))
        return ()


@observable("the prompts that are evaluated at a time")
def evaluated(scene: Scene) -> object:
    experiment: Any = experiment_class(scene.run)(scene.run)
    experiment.__dict__["generator"] = generator = Asked()
    evaluation = experiment.get_evaluation()
    asyncio.run(evaluation.run(0))
    return generator.prompts
