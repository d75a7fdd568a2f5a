"""The roles: a policy and a critic that learn, and a reference and a teacher that only score. One object is one rank of
one role.

Each worker is built from its own configuration and does not know how batches were generated. The strategies, such as
`fsdp2.py` and `zero/strategy.py`, spread the model; `group.py` lets a driver call all ranks of a role as one learner.
Methods that compute are collective: all ranks are called, each with the same number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs
import torch
from torch import Tensor, nn

from skyrl.batch import TEACHER_HIDDEN
from skyrl.config import RewardModelConfig, SFTConfig, SupervisedConfig, TrainerConfig
from skyrl.config.derive.model_overrides import learner_overrides
from skyrl.config.settings.learners import LearnerConfig, ShardedModelConfig, TeacherConfig
from skyrl.config.settings.models import ModelConfig
from skyrl.config.settings.run_basics import RunBasics
from skyrl.config.settings.strategies import facts_of
from skyrl.config.settings.supervised_root import SCORE
from skyrl.learners.distillation import TeacherLoss, no_plain_head, stored_output_matrix
from skyrl.learners.forward import ForwardFn, compute_logprobs, read_values
from skyrl.learners.offloading import DeviceMover
from skyrl.learners.ranks import ALONE, Ranks
from skyrl.learners.row_support import rows_of_run
from skyrl.learners.strategy import ModelSource
from skyrl.learners.workers.learning_worker import LearningWorker
from skyrl.learners.workers.model_worker import ModelWorker
from skyrl.models.compiled_layers import compile_layers
from skyrl.models.files.loading import load_causal_lm, load_config
from skyrl.models.files.meta_model import causal_lm_skeleton, without_numbers
from skyrl.models.files.naming import named_weights
from skyrl.models.files.stored_adapter import merge_adapters
from skyrl.models.files.stored_weights import StoredWeights
from skyrl.models.fused_layers import fuse_layers
from skyrl.models.lora import with_adapter
from skyrl.models.output_head import output_layer
from skyrl.models.value_head import ValueModel
from skyrl.tree import FrozenDict, required
from skyrl.tree.classes import fields_of


class RefWorker(ModelWorker):
    """A model that does not learn and scores the policy's tokens: pi_ref of the KL penalty."""

    def __init__(self, trainer: TrainerConfig, *, ranks: Ranks = ALONE, mover: DeviceMover | None = None) -> None:
        """Loads `trainer.ref.model`; its adapter, if it has one, is merged into its weights."""
        source, read = causal_lm(trainer, trainer.ref), _log_probabilities(trainer)
        super().__init__(trainer, trainer.ref, source, read, ranks, role="ref", mover=mover)


class TeacherWorker(ModelWorker):
    """A model that does not learn and that the policy is distilled from: its scores are log-probabilities of the
    policy's tokens, its hidden states stand for its whole distributions.
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        *,
        path: str | None = None,
        ranks: Ranks = ALONE,
        mover: DeviceMover | None = None,
    ) -> None:
        """Loads the teacher with this path, by default `trainer.teacher.model`; its adapter, if it has one, is merged
        into its weights.
        """
        section = trainer.teacher if path is None else trainer.teacher.of(path)
        source, read = causal_lm(trainer, section), _log_probabilities(trainer)
        super().__init__(trainer, section, source, read, ranks, role="teacher", mover=mover)
        distillation = trainer.algorithm.distillation
        if distillation.type == "loss" and distillation.top_k is None and not self._options.plain_head:
            raise no_plain_head("the teacher" if path is None else f"the teacher {path}")


class PolicyWorker(LearningWorker):
    """The model that is trained and that engines sample from."""

    role = "policy"

    def __init__(
        self,
        trainer: TrainerConfig,
        num_training_steps: int | None = None,
        *,
        ranks: Ranks = ALONE,
        mover: DeviceMover | None = None,
    ) -> None:
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
        super().__init__(trainer, policy, source, read, num_training_steps, updates, ranks=ranks, mover=mover)
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
        ranks: Ranks = ALONE,
        mover: DeviceMover | None = None,
        teachers: TeacherLoss | None = None,
    ) -> None:
        """Loads `run.model`. See `LearningWorker` for the other arguments."""
        compiled = _compiles_logits(run, run)
        read = partial(compute_logprobs, temperature=1.0, measured=False, compile_it=compiled, teachers=teachers)
        super().__init__(run, run, causal_lm(run, run), read, num_training_steps, 1, ranks=ranks, mover=mover)
        if compiles_layers(run, run):
            compile_layers(self.model)  # after the passes that probe it, in another type


class SFTWorker(TextWorker):
    """The model of a supervised run, which may learn from a teacher's distributions, too."""

    def __init__(
        self,
        run: SFTConfig,
        num_training_steps: int | None = None,
        *,
        ranks: Ranks = ALONE,
        mover: DeviceMover | None = None,
    ) -> None:
        """Loads `run.model`, and of the teacher the output matrix, if all tokens are compared."""
        distillation, teachers = run.distillation, None
        compares_all = distillation.has_teacher and distillation.compares_all
        if distillation.has_teacher:
            matrices = {TEACHER_HIDDEN: _output_matrix(run, teacher_section(run))} if compares_all else {}
            teachers = TeacherLoss(distillation, matrices)
        super().__init__(run, num_training_steps, ranks=ranks, mover=mover, teachers=teachers)
        if compares_all and not self._options.plain_head:
            raise no_plain_head("the model")


class SFTTeacherWorker(ModelWorker):
    """The frozen model that a supervised run learns from, on one of the ranks on which the run's model is, too."""

    def __init__(self, run: SFTConfig, *, ranks: Ranks = ALONE, mover: DeviceMover | None = None) -> None:
        """Loads `run.distillation.teacher_path`."""
        section = teacher_section(run)
        read = partial(compute_logprobs, temperature=1.0, measured=False)
        super().__init__(run, section, causal_lm(run, section), read, ranks, role="teacher", mover=mover)
        if run.distillation.compares_all and not self._options.plain_head:
            raise no_plain_head("the teacher")


class CriticWorker(LearningWorker):
    """The model that predicts returns: its score is the value of the state in which each token was sampled. It is
    `trainer.critic.model` with a new value head, drawn from `trainer.seed`.
    """

    role = "critic"

    def __init__(
        self,
        trainer: TrainerConfig,
        num_training_steps: int | None = None,
        *,
        ranks: Ranks = ALONE,
        mover: DeviceMover | None = None,
    ) -> None:
        """Loads `trainer.critic.model`. See `LearningWorker` for the arguments."""
        critic, updates = trainer.critic, _updates(trainer, trainer.critic_mini_batch_size)
        source = _add_value_head(causal_lm(trainer, critic), trainer.algorithm.value_head_prefix, trainer.seed)
        super().__init__(trainer, critic, source, read_values, num_training_steps, updates, ranks=ranks, mover=mover)


class RewardModelWorker(LearningWorker):
    """The model that learns which of two chats is better: its score is one number at the end of each."""

    role = "critic"

    def __init__(
        self,
        run: RewardModelConfig,
        num_training_steps: int | None = None,
        *,
        ranks: Ranks = ALONE,
        mover: DeviceMover | None = None,
    ) -> None:
        """Loads `run.model` with a new head, drawn from `run.seed`. See `LearningWorker` for the arguments."""
        source = _add_value_head(causal_lm(run, run), SCORE, run.seed)
        super().__init__(run, run, source, read_values, num_training_steps, 1, ranks=ranks, mover=mover)


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
