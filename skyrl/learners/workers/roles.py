"""The roles: a policy and a critic that learn, and a reference that only scores. One object is one rank of one role.

Each worker is built from its own configuration and does not know how batches were generated. The strategies, such as
`fsdp2.py` and `zero/strategy.py`, spread the model; `group.py` lets a driver call all ranks of a role as one learner.
Methods that compute are collective: all ranks are called, each with the same number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from skyrl.config import ModelConfig, TrainerConfig
from skyrl.config.derive.model_overrides import learner_overrides
from skyrl.config.settings.strategies import facts_of
from skyrl.config.settings.trainer_fields import table_above, trainer_field
from skyrl.learners.forward import ForwardFn, compute_logprobs, read_values
from skyrl.learners.moving import DeviceMover
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
from skyrl.models.value_head import ValueModel
from skyrl.tree import joined, required


class RefWorker(ModelWorker):
    """A model that does not learn and scores the policy's tokens: pi_ref of the KL penalty."""

    def __init__(self, trainer: TrainerConfig, *, ranks: Ranks = ALONE, mover: DeviceMover | None = None) -> None:
        """Loads `trainer.ref.model`; its adapter, if it has one, is merged into its weights."""
        ref = trainer.ref
        source = _causal_lm(trainer, "ref", "trainer.ref")
        super().__init__(
            trainer,
            ref,
            source,
            _log_probabilities(trainer),
            ranks,
            role="ref",
            config_path="trainer.ref",
            mover=mover,
        )


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
        config_path: str = "trainer.policy",
    ) -> None:
        """Loads `trainer.policy.model`. See `LearningWorker` for the arguments."""
        super().__init__(trainer, num_training_steps, ranks=ranks, mover=mover, config_path=config_path)
        if compiles_layers(trainer):
            compile_layers(self.model)  # after the passes that probe it, in another type

    @staticmethod
    def _source(trainer: TrainerConfig, config_path: str) -> ModelSource:
        return _causal_lm(trainer, "policy", config_path)

    @staticmethod
    def _reading(trainer: TrainerConfig) -> ForwardFn:
        return _log_probabilities(trainer, compile_it=_compiles_logits(trainer))


class SFTWorker(PolicyWorker):
    """The model that learns from given text; only the log-probabilities of its tokens are measured."""

    @staticmethod
    def _reading(trainer: TrainerConfig) -> ForwardFn:
        return partial(compute_logprobs, temperature=1.0, measured=False, compile_it=_compiles_logits(trainer))


class CriticWorker(LearningWorker):
    """The model that predicts returns: its score is the value of the state in which each token was sampled. It is
    `trainer.critic.model` with a new value head, drawn from `trainer.seed`.
    """

    role = "critic"

    @staticmethod
    def _source(trainer: TrainerConfig, config_path: str) -> ModelSource:
        head = partial(ValueModel, prefix=trainer.algorithm.value_head_prefix, seed=trainer.seed)
        return _under(head, _causal_lm(trainer, "critic", config_path))

    @staticmethod
    def _reading(trainer: TrainerConfig) -> ForwardFn:
        return read_values


def _causal_lm(trainer: TrainerConfig, role: Literal["policy", "critic", "ref"], config_path: str) -> ModelSource:
    model: ModelConfig = getattr(trainer, role).model
    field, table = joined(config_path, "model"), table_above(config_path)
    source, overrides = required(model.path, f"{field}.path"), learner_overrides(trainer, role)
    attention: str = required(trainer.attention, trainer_field(table, "attention"))
    rows = rows_of_run(trainer, load_config(source, overrides), attention, table)

    def on_device(loaded: nn.Module) -> nn.Module:
        """The model with the kernels that its device has for its layers."""
        whole = getattr(trainer, role).tensor_parallel_size == 1 and not facts_of(trainer).own_modules
        if trainer.use_liger_kernel and trainer.device == "cuda" and whole and not compiles_layers(trainer, role):
            dtype = getattr(torch, required(trainer.compute_dtype, trainer_field(table, "compute_dtype")))
            fuse_layers(loaded, torch.device("cuda"), dtype, field=trainer_field(table, "use_liger_kernel"))
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
                init_seed=trainer.seed if model.init_from_scratch else None,
            )
        )

    def meta_model() -> nn.Module:
        return on_device(causal_lm_skeleton(source, attention=rows.attention, overrides=overrides))

    if not model.lora.rank:
        stored = None if model.init_from_scratch else StoredWeights(source, table)
        return ModelSource(load=load, meta_model=meta_model, rows=rows, stored=stored)
    adapt = partial(with_adapter, lora=model.lora, seed=trainer.seed, field=f"{field}.lora")
    if role == "ref":
        return ModelSource(load=lambda device: merge_adapters(adapt(load(device))), meta_model=meta_model, rows=rows)
    stored = None if model.init_from_scratch else StoredWeights(source, table)
    return _under(adapt, ModelSource(load=load, meta_model=meta_model, rows=rows, stored=stored))


def _under(change: Callable[..., nn.Module], source: ModelSource) -> ModelSource:
    """The model of `source` after `change`, which adds weights to it that are not stored with it."""

    def drawn() -> dict[str, Tensor]:
        base = {name for name, _ in named_weights(source.meta_model())}
        changed = named_weights(change(without_numbers(source.meta_model())))
        added = {name: weight for name, weight in changed if base.isdisjoint({name, name.replace(".base_layer.", ".")})}
        return {**source.drawn(), **added}

    return ModelSource(
        load=lambda device: change(source.load(device)),
        meta_model=lambda: change(source.meta_model()),
        rows=source.rows,
        stored=source.stored,
        drawn=drawn,
    )


def compiles_layers(trainer: TrainerConfig, role: str = "policy") -> bool:
    """Whether a model's decoder layers are compiled."""
    configured = trainer.policy.use_torch_compile and role == "policy" and trainer.policy.tensor_parallel_size == 1
    return configured and trainer.device == "cuda" and facts_of(trainer).compiles


def _compiles_logits(trainer: TrainerConfig) -> bool:
    """Whether the functions of logits are compiled; CUDA has kernels for them."""
    return trainer.policy.use_torch_compile and trainer.device != "cuda"


def _log_probabilities(trainer: TrainerConfig, *, compile_it: bool = False) -> ForwardFn:
    algorithm = trainer.algorithm
    return partial(
        compute_logprobs,
        temperature=required(algorithm.temperature, "trainer.algorithm.temperature"),
        entropy_gradient=algorithm.use_entropy_loss,
        compile_it=compile_it,
        float32_head=trainer.fp32_lm_head,
    )
