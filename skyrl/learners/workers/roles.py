"""The roles: a policy and a critic that learn, and a reference and a teacher that only score. One object is one rank of
one role.

Each worker is built from its own configuration and does not know how batches were generated. The strategies, such as
`fsdp2.py` and `zero/strategy.py`, spread the model; `group.py` lets a driver call all ranks of a role as one learner.
Methods that compute are collective: all ranks are called, each with the same number of rows. At the end are two ways to
call a role: a critic that learns normalized returns, and several teachers on the same ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack, overload

import attrs
import torch
from torch import Tensor, nn

from skyrl.algorithms.critic import ReturnScale, masked
from skyrl.batch import TEACHER_HIDDEN, TrainingBatch
from skyrl.checkpoint.shards import TensorSource
from skyrl.config import (
    PreferenceConfig,
    RewardModelConfig,
    SFTConfig,
    SkyRLLoraConfig,
    SupervisedConfig,
    TrainerConfig,
)
from skyrl.config.derive.model_overrides import learner_overrides
from skyrl.config.settings.learners import LearnerConfig, ShardedModelConfig, TeacherConfig
from skyrl.config.settings.models import ModelConfig
from skyrl.config.settings.run_basics import RunBasics
from skyrl.config.settings.strategies import facts_of
from skyrl.config.settings.supervised_root import SCORE
from skyrl.learners.distillation import TeacherLoss, no_plain_head, stored_output_matrix
from skyrl.learners.forward import ForwardFn, compute_logprobs, read_values
from skyrl.learners.rank_metrics import Metrics
from skyrl.learners.ranks import ALONE, Ranks
from skyrl.learners.row_support import rows_of_run
from skyrl.learners.strategy import ModelSource
from skyrl.learners.workers.group import LearnerGroup
from skyrl.learners.workers.learning_worker import LearningWorker, Objective
from skyrl.learners.workers.model_worker import ModelWorker, Placed
from skyrl.models.files.loading import load_causal_lm, load_config
from skyrl.models.files.meta_model import causal_lm_skeleton, without_numbers
from skyrl.models.files.naming import named_weights
from skyrl.models.files.stored_adapter import merge_adapters
from skyrl.models.files.stored_weights import StoredWeights
from skyrl.models.fused_layers import compile_layers, fuse_layers
from skyrl.models.lora import adapters_off, with_adapter
from skyrl.models.output_head import output_layer
from skyrl.models.value_head import ValueModel
from skyrl.processes.calls import apply
from skyrl.processes.handles import Group, Handle
from skyrl.tree import FrozenDict, required
from skyrl.tree.classes import fields_of


class RefWorker(ModelWorker):
    """A model that does not learn and scores the policy's tokens: pi_ref of the KL penalty."""

    def __init__(self, trainer: TrainerConfig, **placed: Unpack[Placed]) -> None:
        """Loads `trainer.ref.model`; its adapter, if it has one, is merged into its weights."""
        source, read = causal_lm(trainer, trainer.ref), _log_probabilities(trainer)
        super().__init__(trainer, trainer.ref, source, read, role="ref", **placed)


class TeacherWorker(ModelWorker):
    """A model that does not learn and that the policy is distilled from: its scores are log-probabilities of the
    policy's tokens, its hidden states stand for its whole distributions.
    """

    def __init__(self, trainer: TrainerConfig, *, path: str | None = None, **placed: Unpack[Placed]) -> None:
        """Loads the teacher with this path, by default `trainer.teacher.model`; its adapter, if it has one, is merged
        into its weights.
        """
        section = trainer.teacher if path is None else trainer.teacher.of(path)
        source, read = causal_lm(trainer, section), _log_probabilities(trainer)
        super().__init__(trainer, section, source, read, role="teacher", **placed)
        distillation = trainer.algorithm.distillation
        if distillation.type == "loss" and distillation.top_k is None and not self._options.plain_head:
            raise no_plain_head("the teacher" if path is None else f"the teacher {path}")


class PolicyWorker(LearningWorker):
    """The model that is trained and that engines sample from."""

    role = "policy"

    def __init__(self, trainer: TrainerConfig, num_training_steps: int | None = None, **placed: Unpack[Placed]) -> None:
        """Loads `trainer.policy.model`. See `LearningWorker` for the arguments."""
        policy, updates = trainer.policy, _updates(trainer, trainer.policy_mini_batch_size)
        distillation = trainer.algorithm.distillation
        teacher = trainer.teacher
        taught = teacher.local_paths or teacher.endpoint.url or teacher.endpoint.sources or distillation.self_teacher
        distills = bool(taught) and distillation.type == "loss"
        compares_all = distills and distillation.top_k is None
        itself = (TEACHER_HIDDEN,) if distillation.self_teacher else ()
        of_teachers = hidden_of_teachers(teacher) if compares_all and not itself else {}
        matrices = {name: _output_matrix(trainer, teacher.of(path)) for path, name in of_teachers.items()}
        self._teachers = TeacherLoss(distillation, matrices, of_policy=itself) if distills else None
        read = _log_probabilities(trainer, compile_it=_compiles_logits(trainer, policy), teachers=self._teachers)
        source = causal_lm(trainer, policy)
        super().__init__(trainer, policy, source, read, num_training_steps, updates, **placed)
        if compares_all and not self._options.plain_head:
            raise no_plain_head("the policy")
        if compiles_layers(trainer, policy):
            compile_layers(self.model)  # after the passes that probe it, in another type

    async def offload(self, *, model: bool = True, optimizer: bool = True) -> int:
        if model and self._teachers is not None:
            self._teachers.leave_the_device()
        return await super().offload(model=model, optimizer=optimizer)


class TextWorker(LearningWorker):
    """The model that learns from given text; only the log-probabilities of its tokens are measured."""

    role = "policy"

    def __init__(
        self,
        run: SupervisedConfig,
        num_training_steps: int | None = None,
        *,
        teachers: TeacherLoss | None = None,
        **placed: Unpack[Placed],
    ) -> None:
        """Loads `run.model`. See `LearningWorker` for the other arguments."""
        compiled = _compiles_logits(run, run)
        read = partial(compute_logprobs, temperature=1.0, measured=False, compile_it=compiled, teachers=teachers)
        super().__init__(run, run, causal_lm(run, run), read, num_training_steps, 1, **placed)
        if compiles_layers(run, run):
            compile_layers(self.model)  # after the passes that probe it, in another type


class SFTWorker(TextWorker):
    """The model of a supervised run, which may learn from a teacher's distributions, too."""

    def __init__(self, run: SFTConfig, num_training_steps: int | None = None, **placed: Unpack[Placed]) -> None:
        """Loads `run.model`, and of the teacher the output matrix, if all tokens are compared."""
        distillation, teachers = run.distillation, None
        compares_all = distillation.has_teacher and distillation.compares_all
        if distillation.has_teacher:
            matrices = {TEACHER_HIDDEN: _output_matrix(run, teacher_section(run))} if compares_all else {}
            teachers = TeacherLoss(distillation, matrices)
        super().__init__(run, num_training_steps, **placed, teachers=teachers)
        if compares_all and not self._options.plain_head:
            raise no_plain_head("the model")


class SFTTeacherWorker(ModelWorker):
    """The frozen model that a supervised run learns from, on one of the ranks on which the run's model is, too."""

    def __init__(self, run: SFTConfig, **placed: Unpack[Placed]) -> None:
        """Loads `run.distillation.teacher_path`."""
        section = teacher_section(run)
        read = partial(compute_logprobs, temperature=1.0, measured=False)
        super().__init__(run, section, causal_lm(run, section), read, role="teacher", **placed)
        if run.distillation.compares_all and not self._options.plain_head:
            raise no_plain_head("the teacher")


class CriticWorker(LearningWorker):
    """The model that predicts returns: its score is the value of the state in which each token was sampled. It is
    `trainer.critic.model` with a new value head, drawn from `trainer.seed`.
    """

    role = "critic"

    def __init__(self, trainer: TrainerConfig, num_training_steps: int | None = None, **placed: Unpack[Placed]) -> None:
        """Loads `trainer.critic.model`. See `LearningWorker` for the arguments."""
        critic, updates = trainer.critic, _updates(trainer, trainer.critic_mini_batch_size)
        source = _add_value_head(causal_lm(trainer, critic), trainer.algorithm.value_head_prefix, trainer.seed)
        super().__init__(trainer, critic, source, read_values, num_training_steps, updates, **placed)


class RewardModelWorker(LearningWorker):
    """The model that learns which of two chats is better: its score is one number at the end of each."""

    role = "critic"

    def __init__(self, run: RewardModelConfig, num_training_steps: int | None = None, **placed: Unpack[Placed]) -> None:
        """Loads `run.model` with a new head, drawn from `run.seed`. See `LearningWorker` for the arguments."""
        source = _add_value_head(causal_lm(run, run), SCORE, run.seed)
        super().__init__(run, run, source, read_values, num_training_steps, 1, **placed)


class PreferenceWorker(TextWorker):
    """The model that learns from pairs. With a new adapter, it is its own reference without the adapter."""

    def __init__(self, run: PreferenceConfig, num_training_steps: int | None = None, **placed: Unpack[Placed]) -> None:
        """Loads `run.model`. See `LearningWorker` for the arguments."""
        super().__init__(run, num_training_steps, **placed)
        if run.use_weighting:
            self._read = partial(self._read, collisions=True)  # type: ignore[call-arg]  # it is compute_logprobs

    async def score_reference(self, batch: TrainingBatch) -> Tensor:
        """`score` without the adapter."""
        with adapters_off(self.model):
            return await self.score(batch)


class PreferenceLearner(LearnerGroup[PreferenceWorker]):
    """All ranks of the policy of a preference run."""

    async def score_reference(self, batch: TrainingBatch) -> Tensor:
        """`score` without the adapter."""
        return await self.scored_by(PreferenceWorker.score_reference, batch)


class PairReferenceWorker(ModelWorker):
    """The frozen model that the policy is compared with, on one of the ranks on which the policy is, too."""

    def __init__(self, run: PreferenceConfig, **placed: Unpack[Placed]) -> None:
        """Loads the reference of the run; the adapter that training starts from, if there is one, is merged into its
        weights.
        """
        section = section_beside(run, reference_model(run))
        read = partial(compute_logprobs, temperature=1.0, measured=False)
        super().__init__(run, section, causal_lm(run, section), read, role="ref", **placed)


def hidden_of_teachers(teacher: TeacherConfig) -> dict[str, str]:
    """Path of each local teacher -> name of the extras with its hidden states."""
    paths = teacher.local_paths
    return {path: TEACHER_HIDDEN if len(paths) == 1 else f"{TEACHER_HIDDEN}/{path}" for path in paths}


def teacher_section(run: SFTConfig) -> ShardedModelConfig:
    """The table of the teacher beside the model of a supervised run."""
    model = ModelConfig(path=run.distillation.teacher_path)
    return attrs.evolve(section_beside(run, model), model_config_kwargs=FrozenDict())


def section_beside(run: SupervisedConfig, model: ModelConfig) -> ShardedModelConfig:
    """The table of another model that is sharded as the model of a supervised run is."""
    sharding = {name: getattr(run, name) for name in fields_of(ShardedModelConfig)}
    return ShardedModelConfig(**{**sharding, "model": model})


def reference_model(run: PreferenceConfig) -> ModelConfig:
    """The weights of the reference: by default those that training starts from, with its stored adapter."""
    if run.ref_model_path is not None:
        return ModelConfig(path=run.ref_model_path)
    adapter = run.model.lora if run.model.lora.path is not None else SkyRLLoraConfig()
    return attrs.evolve(run.model, lora=adapter)


def _add_value_head(source: ModelSource, name: str, seed: int) -> ModelSource:
    return _changed_source(partial(ValueModel, prefix=name, seed=seed), source)


def _updates(trainer: TrainerConfig, mini_batch_size: int) -> int:
    """Number of optimizer steps of a model in a training step."""
    return trainer.update_epochs_per_batch * max(1, trainer.train_batch_size // mini_batch_size)


def causal_lm(run: RunBasics, section: ShardedModelConfig) -> ModelSource:
    """The model of a table of the configuration, with its adapter: trained where the model learns, else merged."""
    model, table = section.model, run.table_path
    source, overrides = required(model.path, section.path_of("model.path")), learner_overrides(run, section)
    attention: str = required(run.attention, run.path_of("attention"))
    rows = rows_of_run(run, load_config(source, overrides), attention)

    def on_device(loaded: nn.Module) -> nn.Module:
        """The model with the kernels that its device has for its layers."""
        is_fusible = section.tensor_parallel_size == 1 and not facts_of(run).own_modules
        if run.use_liger_kernel and run.device == "cuda" and is_fusible and not compiles_layers(run, section):
            dtype = getattr(torch, required(run.compute_dtype, run.path_of("compute_dtype")))
            fuse_layers(loaded, torch.device("cuda"), dtype, field=run.path_of("use_liger_kernel"))
        return loaded

    def load(device: torch.device) -> nn.Module:
        return on_device(
            load_causal_lm(
                source,
                dtype=torch.float32,
                attention=rows.attention,
                device=device,
                table=table,
                overrides=overrides,
                init_seed=run.seed if model.init_from_scratch else None,
            )
        )

    def meta_model() -> nn.Module:
        return on_device(causal_lm_skeleton(source, attention=rows.attention, overrides=overrides))

    stored = None if model.init_from_scratch else StoredWeights(source, table)
    base = ModelSource(load=load, meta_model=meta_model, rows=rows, stored=stored)
    if not model.lora.rank:
        return base
    adapt = partial(with_adapter, lora=model.lora, seed=run.seed, field=section.path_of("model.lora"))
    if not isinstance(section, LearnerConfig):
        return ModelSource(load=lambda device: merge_adapters(adapt(load(device))), meta_model=meta_model, rows=rows)
    return _changed_source(adapt, base)


def _changed_source(change: Callable[..., nn.Module], source: ModelSource) -> ModelSource:
    """The model of `source` after `change`, which adds weights to it that are not stored with it."""

    def drawn() -> dict[str, Tensor]:
        base = {name for name, _ in named_weights(source.meta_model())}
        changed = named_weights(change(without_numbers(source.meta_model())))
        added = {name: weight for name, weight in changed if base.isdisjoint({name, name.replace(".base_layer.", ".")})}
        return {**source.random_weights(), **added}

    return ModelSource(
        load=lambda device: change(source.load(device)),
        meta_model=lambda: change(source.meta_model()),
        rows=source.rows,
        stored=source.stored,
        random_weights=drawn,
    )


def compiles_layers(run: RunBasics, section: ShardedModelConfig) -> bool:
    """Whether a model's decoder layers are compiled."""
    configured = section.use_torch_compile and section.tensor_parallel_size == 1
    return configured and run.device == "cuda" and facts_of(run).compiles


def _compiles_logits(run: RunBasics, section: ShardedModelConfig) -> bool:
    """Whether the functions of logits are compiled; CUDA has kernels for them."""
    return section.use_torch_compile and run.device != "cuda"


def _output_matrix(run: RunBasics, section: ShardedModelConfig) -> Tensor:
    """The output matrix of a teacher, in the type of the computation; of a model that is stored whole, nothing else is
    read.
    """
    table = run.table_path
    path = required(section.model.path, section.path_of("model.path"))
    if section.model.init_from_scratch or section.model.lora.rank:
        matrix = output_layer(causal_lm(run, section).load(torch.device("cpu"))).weight.detach()
    else:
        attention: str = required(run.attention, run.path_of("attention"))
        meta_model = causal_lm_skeleton(path, attention=attention, overrides=learner_overrides(run, section))
        matrix = stored_output_matrix(meta_model, StoredWeights(path, table))
    dtype: str = required(run.compute_dtype, run.path_of("compute_dtype"))
    return matrix.to(getattr(torch, dtype))


def _log_probabilities(
    trainer: TrainerConfig, *, compile_it: bool = False, teachers: TeacherLoss | None = None
) -> ForwardFn:
    algorithm = trainer.algorithm
    return partial(
        compute_logprobs,
        temperature=required(algorithm.temperature, "trainer.algorithm.temperature"),
        entropy_gradient=algorithm.use_entropy_loss,
        compile_it=compile_it,
        float32_head=trainer.fp32_lm_head,
        teachers=teachers,
    )


VALUES = "critic_values_"
"""Prefix of the metrics that are values of the critic."""


class NormalizedCritic(LearnerGroup[CriticWorker]):
    """All ranks of a critic. Its model predicts (return - mean) / std with running moments of the returns, which are
    part of its state.
    """

    scale = ReturnScale()
    """Moments of the returns so far."""

    _scored_by = scale
    """Moments with which the values of the current batch were computed, to recover the model's own predictions, which
    `value_clip` compares."""

    async def score(self, batch: TrainingBatch) -> Tensor:
        """(B, L) float32: the values of the selected tokens in the units of the returns, 0 elsewhere."""
        self._scored_by = self.scale
        return masked(self.scale.restored(await super().score(batch)), batch.loss_mask)

    async def forward_backward(self, batch: TrainingBatch, objective: Objective) -> Metrics:
        """Add the gradient towards the normalized returns of the batch, which the moments already include."""
        assert batch.returns is not None
        self.scale = self.scale.updated(batch.returns[batch.loss_mask])
        targets = masked(self.scale.normalized(batch.returns), batch.loss_mask)
        old = None if batch.values is None else masked(self._scored_by.normalized(batch.values), batch.loss_mask)
        metrics = await super().forward_backward(batch.with_fields(returns=targets, values=old), objective)
        values = {name: value for name, value in metrics.items() if name.startswith(VALUES)}
        restored = {name: value * self.scale.std + self.scale.mean for name, value in values.items()}
        if f"{VALUES}std" in values:
            restored[f"{VALUES}std"] = values[f"{VALUES}std"] * self.scale.std
        return metrics | restored | {"return_mean": self.scale.mean, "return_std": self.scale.std}

    async def stage(self) -> tuple[dict[str, Any], int]:
        numbers, size = await super().stage()
        return {**numbers, "return_scale": attrs.asdict(self.scale)}, size

    async def load_state(self, source: TensorSource, numbers: Mapping[str, Any]) -> None:
        """Load a staged state. A critic that was stored without moments starts with new ones."""
        await super().load_state(source, numbers)
        stored = numbers.get("return_scale")
        self.scale = self._scored_by = ReturnScale() if stored is None else ReturnScale.of(stored)


P = ParamSpec("P")
R = TypeVar("R")


class TeachersWorker:
    """All teachers of a run on one rank of their role, by path. They share its process group."""

    def __init__(self, trainer: TrainerConfig, *, ranks: Ranks = ALONE) -> None:
        """Loads the models of `trainer.teacher`."""
        paths = trainer.teacher.local_paths
        self._teachers = {path: TeacherWorker(trainer, path=path, ranks=ranks) for path in paths}

    async def ask(self, path: str, method: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        """The result of a method of one of the teachers."""
        result = apply(self._teachers[path], method, args, kwargs)
        return await result if inspect.isawaitable(result) else result


class TeacherHandle:
    """Handle of one of the teachers on a rank."""

    def __init__(self, rank: Handle[TeachersWorker], path: str) -> None:
        self._rank, self._path = rank, path

    @property
    def name(self) -> str:
        return self._rank.name

    def with_deadline(self, seconds: float) -> TeacherHandle:
        return TeacherHandle(self._rank.with_deadline(seconds), self._path)

    @overload
    async def call(
        self, method: Callable[Concatenate[TeacherWorker, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    @overload
    async def call(
        self, method: Callable[Concatenate[TeacherWorker, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    async def call(self, method: Callable[..., object], *args: object, **kwargs: object) -> object:
        return await self._rank.call(TeachersWorker.ask, self._path, method, *args, **kwargs)


def ranks_of_teacher(ranks: Group[TeachersWorker], path: str) -> Group[TeacherWorker]:
    """The ranks of one of the teachers that `ranks` hold."""
    return Group([TeacherHandle(rank, path) for rank in ranks.handles])
