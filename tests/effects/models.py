"""Probes of the tables of models: policy, critic and reference, and the one model of supervised runs."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch

from skyrl.batch import TrainingBatch
from skyrl.config.derive.model_tables import Role
from skyrl.config.derive.rl_models import CRITIC, POLICY, REFERENCE, TEACHER
from skyrl.config.derive.supervised_rules import MODEL
from skyrl.errors import NonFiniteError, UserError
from skyrl.experiments.experiment import experiment_class
from skyrl.experiments.ppo import BasePPOExp
from skyrl.training.trainer import AS_CONFIGURED
from tests.effects.algorithm import small_batch
from tests.effects.boundaries import STEPS, Reached, given_to_deepspeed, given_to_fsdp, learner_of, worker_of
from tests.effects.observables import plain, problems
from tests.effects.passes import compiled_functions
from tests.effects.probe import Observable, Probe, Scene

Values = dict[str, Any]


def batch_for(scene: Scene) -> TrainingBatch:
    """Some rows that the kind of run learns from."""
    if scene.run.kind == "rl":
        return small_batch()
    experiment: Any = experiment_class(scene.run)(scene.run)
    rows: TrainingBatch = experiment.collate([experiment.train_dataset.rows[number] for number in range(4)])
    return rows


@attrs.frozen
class Sights:
    """What can be seen of one model."""

    model: Role
    kind: str

    def trained(self) -> Observable:
        return self._of("the weights of {} after two optimizer steps, or why there are none", self._trained)

    def rates(self) -> Observable:
        return self._of("the learning rate of {} at each optimizer step", self._rates)

    def scaled(self) -> Observable:
        return self._of("the factors of the loss of {} in three optimizer steps", self._scaled)

    def left_out(self) -> Observable:
        return self._of("the updates of {} that are left out before the run ends", self._left_out)

    def scored(self) -> Observable:
        return self._of("the scores that {} gives to a batch, or why there are none", self._scored)

    def offloaded(self) -> Observable:
        return self._of("the parts of {} that leave a GPU for others", self._offloaded)

    def shared(self) -> Observable:
        return self._of("the ranks among which {} shares sequences", self._shared)

    def cut(self) -> Observable:
        return self._of("the ranks that cut the matrices of {}", self._shared)

    def spread(self) -> Observable:
        return self._of("the ranks that hold different experts of {}", self._shared)

    def fsdp(self) -> Observable:
        return self._of("the arguments of FSDP's `fully_shard` for {}", lambda it: given_to_fsdp(it, self.model))

    def deepspeed(self) -> Observable:
        return self._of("the configuration that DeepSpeed gets for {}", lambda it: given_to_deepspeed(it, self.model))

    def _of(self, shows: str, see: Callable[[Scene], object]) -> Observable:
        """Critic, reward model and preferences are learned by the same code as the others, and are looked at in the
        long suite.
        """
        long = self.model is CRITIC or self.kind in ("reward_model", "preference")
        return Observable(shows.format(f"the {self.model.title}"), see, long=long)

    def _trained(self, scene: Scene) -> object:
        try:
            learner = learner_of(scene, self.model)
        except UserError as error:
            return str(error)
        metrics = [asyncio.run(learner.update(batch_for(scene))) for _ in range(2)]
        weights = {name: _digest(tensor) for name, tensor in learner.weights()}
        return plain([metrics, weights, len(learner.optimizer.param_groups)])

    def _rates(self, scene: Scene) -> object:
        learner, rates = learner_of(scene, self.model), []
        for _ in range(STEPS):
            rates.append(learner.optimizer.param_groups[0]["lr"])
            learner.optimizer.step()
            learner.schedule.step()
        return rates

    def _scaled(self, scene: Scene) -> object:
        learner, batch, scales = learner_of(scene, self.model), batch_for(scene), []
        for _ in range(3):
            try:
                scales.append(asyncio.run(learner.update(batch)).get("loss_scale"))
            except NonFiniteError:
                return [*scales, "ended"]
        return scales

    def _left_out(self, scene: Scene) -> object:
        learner, batch = learner_of(scene, self.model), batch_for(scene)
        broken = learner.objective.weigh(batch)
        assert broken.loss_weights is not None
        broken = broken.with_fields(loss_weights=broken.loss_weights * torch.nan)
        for number in range(9):
            try:
                asyncio.run(learner.forward_backward_share(broken, learner.objective))
                asyncio.run(learner.optimizer_step(AS_CONFIGURED))
            except NonFiniteError:
                return number
        return None

    def _scored(self, scene: Scene) -> object:
        try:
            return plain(asyncio.run(worker_of(scene, self.model).score(batch_for(scene))))
        except UserError as error:
            return str(error)

    def _shared(self, scene: Scene) -> object:
        try:
            worker_of(scene, self.model)
        except Reached as group:
            return group.arguments
        return None

    def _offloaded(self, scene: Scene) -> object:
        experiment = BasePPOExp(scene.run)
        models = {"policy": object(), "reference": object(), "critic": object()}
        for name, model in models.items():
            experiment.__dict__[name] = model  # in place of the models that would be made now
        return experiment.get_time_sharing()._parts


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


APART: Values = {
    "trainer.placement.colocate_all": False,
    "trainer.placement.colocate_policy_ref": False,
    "trainer.micro_train_batch_size_per_gpu": 3,  # of the six samples that each of two ranks learns from
}
CUDA: Values = {"{t}device": "cuda", "{t}attention": "sdpa", "{t}compute_dtype": "float32"}
WHOLE: Values = {f"{{m}}fsdp_config.mixed_precision.{name}_dtype": "fp32" for name in ("param", "reduce", "buffer")}
DEEPSPEED: Values = {"{t}strategy": "deepspeed"}
ZERO = "deepspeed_config.zero_optimization."


def stage(number: int, **more: Any) -> Values:
    """DeepSpeed at this stage, with more of its settings."""
    named = {f"{{m}}{ZERO}{name.replace('__', '.')}": value for name, value in more.items()}
    return {**DEEPSPEED, f"{{m}}{ZERO}stage": number, **named}


@attrs.frozen(kw_only=True)
class Place:
    """A model in a kind of run, and what has to be written so that it is there, alone or on two ranks."""

    kind: str
    model: Role
    there: Values
    several: Values

    @property
    def sights(self) -> Sights:
        """What can be seen of it."""
        return Sights(self.model, self.kind)

    def probe(self, field: str, value: Any, seen_in: Observable, *contexts: Values) -> Probe:
        """A probe of a field of the model's table."""
        where = {self._named(path): setting for context in (self.there, *contexts) for path, setting in context.items()}
        return Probe(self.model.at(field), value, seen_in, where, self.kind)

    def _named(self, path: str) -> str:
        above = f"{self.model.trainer}." if self.model.trainer else ""
        return path.replace("{m}", self.model.at("x")[:-1]).replace("{t}", above)


PATH, SAME_PATH = "{nano}/model", "{nano}/./model"
WITH_CRITIC: Values = {"trainer.critic.model.path": PATH, "trainer.critic_mini_batch_size": 4}
MIXTURE: Values = {"trainer.policy.model.path": "{nano}/mixture"}
RETURNED: Values = {"generator.inference_engine.enable_return_routed_experts": True}
WITH_TEACHER: Values = {"trainer.teacher.model.path": PATH}
WITH_KL: Values = {"trainer.algorithm.use_kl_loss": True}

POLICY_PLACE = Place(
    kind="rl", model=POLICY, there={}, several={**APART, "trainer.placement.policy_num_gpus_per_node": 2}
)
CRITIC_PLACE = Place(
    kind="rl",
    model=CRITIC,
    there=WITH_CRITIC,
    several={**APART, "trainer.placement.critic_num_gpus_per_node": 2},
)
REFERENCE_PLACE = Place(
    kind="rl", model=REFERENCE, there=WITH_KL, several={**APART, "trainer.placement.ref_num_gpus_per_node": 2}
)
TEACHER_PLACE = Place(
    kind="rl", model=TEACHER, there=WITH_TEACHER, several={**APART, "trainer.placement.teacher_num_gpus_per_node": 2}
)
SFT_PLACE = Place(kind="sft", model=MODEL, there={}, several={"placement.num_gpus_per_node": 2})
REWARD_PLACE = Place(kind="reward_model", model=MODEL, there={}, several={"placement.num_gpus_per_node": 2})
PREFERENCE_PLACE = Place(kind="preference", model=MODEL, there={}, several={"placement.num_gpus_per_node": 2})


def optimizer(place: Place) -> Iterator[Probe]:
    """Probes of `optimizer_config` of a model that learns."""
    sights, table = place.sights, "optimizer_config."
    several_updates: Values = {} if place.kind != "rl" else {"trainer.update_epochs_per_batch": 2}
    for name, value in OPTIMIZER.items():
        yield place.probe(table + name, value, sights.trained())
    yield place.probe(table + "muon_momentum", 0.5, sights.trained(), {f"{{m}}{table}optimizer": "muon"})
    for name, (value, context) in LOSS_SCALE.items():
        scaled = {f"{{m}}{table}{path}": v for path, v in context.items()}
        yield place.probe(table + name, value, sights.scaled(), scaled, HALF)
    for name, (value, context) in SCHEDULE.items():
        yield place.probe(
            table + name, value, sights.rates(), {f"{{m}}{table}{path}": v for path, v in context.items()}
        )
    if place.kind == "rl":
        warm = {f"{{m}}{table}num_warmup_steps": 4}
        yield place.probe(table + "schedule_unit", "training_step", sights.rates(), warm, several_updates)
        yield place.probe(table + "offload_after_step", False, sights.offloaded(), CUDA)
        yield place.probe(table + "max_skipped_updates", 1, sights.left_out())
    else:
        yield place.probe(table + "max_skipped_updates", 1, sights.left_out(), {"faults.on_non_finite": "skip"})


OPTIMIZER: Mapping[str, Any] = {
    "optimizer": "sgd",
    "lr": 0.5,
    "adam_betas": (0.5, 0.5),
    "adam_eps": 0.5,
    "weight_decay": 0.5,
    "weight_decay_on": "matrices",
    "max_grad_norm": 0.01,
}
TOO_FAR: Values = {"initial_loss_scale": 2.0**32, "hysteresis": 1}
HALF: Values = {"{m}fsdp_config.mixed_precision.param_dtype": "fp16"}
LOSS_SCALE: Mapping[str, tuple[Any, Values]] = {
    "initial_loss_scale": (2.0, {}),
    "min_loss_scale": (2.0**32, TOO_FAR),
    "loss_scale_window": (1, {"initial_loss_scale": 2.0}),
    "hysteresis": (1, {"initial_loss_scale": 2.0**32}),
}
SCHEDULE: Mapping[str, tuple[Any, Values]] = {
    "scheduler": ("linear", {}),
    "num_warmup_steps": (4, {}),
    "warmup_steps_proportion": (0.5, {}),
    "warmup_start_ratio": (0.5, {"num_warmup_steps": 4}),
    "min_lr_ratio": (0.5, {"scheduler": "cosine"}),
    "num_decay_steps": (3, {"scheduler": "warmup_stable_decay"}),
}


STORED: Values = {
    "{m}model.lora.rank": 4,
    "{m}model.lora.alpha": 8,
    "{m}model.lora.target_modules": ("q_proj",),
    "{m}model.lora.path": "{nano}/adapter",
}


def stored_adapter(place: Place) -> Iterator[Probe]:
    """Probes of `model.lora` of a model that does not learn."""
    seen_in = place.sights.scored()
    for name, value in (
        ("rank", 0),
        ("alpha", 3),
        ("path", "{nano}/none"),
        ("target_modules", ("k_proj",)),
        ("exclude_modules", ("layers.0.self_attn.q_proj",)),
    ):
        yield place.probe(f"model.lora.{name}", value, seen_in, STORED)


def adapter(place: Place) -> Iterator[Probe]:
    """Probes of `model.lora` of a model that learns."""
    seen_in, adapted = place.sights.trained(), {"{m}model.lora.rank": 4}
    yield place.probe("model.lora.rank", 4, seen_in)
    yield place.probe("model.lora.path", "{nano}/none", seen_in, STORED)
    for name, value in (
        ("alpha", 3),
        ("dropout", 0.5),
        ("target_modules", ("q_proj",)),
        ("exclude_modules", ("q_proj",)),
        ("init_method", "gaussian"),
    ):
        yield place.probe(f"model.lora.{name}", value, seen_in, adapted)


def fsdp(place: Place) -> Iterator[Probe]:
    """Probes of `fsdp_config`."""
    sights, table = place.sights, "fsdp_config."
    two = place.several
    yield place.probe(table + "cpu_offload", True, sights.fsdp(), two, CUDA)
    yield place.probe(table + "reshard_after_forward", False, sights.fsdp(), two)
    yield place.probe(table + "fsdp_size", 1, sights.fsdp(), two)
    units = {"transformer_layer_cls_to_wrap": "Qwen2MLP"}
    yield place.probe(table + "wrap_policy", units, sights.fsdp(), two)
    if place.model.learns:
        yield place.probe(table + "mixed_precision.reduce_dtype", "bf16", sights.fsdp(), two, WHOLE)
    yield place.probe(table + "mixed_precision.param_dtype", "bf16", sights.scored(), WHOLE)
    yield place.probe(table + "mixed_precision.buffer_dtype", "bf16", sights.scored(), WHOLE)


def deepspeed(place: Place) -> Iterator[Probe]:
    """Probes of `deepspeed_config`."""
    seen_in, two = place.sights.deepspeed(), place.several
    learning, any_model = _learning_zero(two), _any_zero()
    for name, value, *contexts in (*any_model, *(learning if place.model.learns else [])):
        yield place.probe(name, value, seen_in, *contexts)


def _any_zero() -> list[tuple[Any, ...]]:
    sizes = ("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size", "param_persistence_threshold")
    return [
        (ZERO + "stage", 2, DEEPSPEED),
        *((f"{ZERO}stage3_{name}", 8, stage(3)) for name in sizes),
        (ZERO + "zero_quantized_weights", True, stage(3), CUDA),
        (ZERO + "overlap_comm", False, stage(3), CUDA),
        *_offloads("offload_param", "none"),
    ]


def _learning_zero(two: Values) -> list[tuple[Any, ...]]:
    return [
        ("deepspeed_config.communication_data_type", "fp16", DEEPSPEED),
        ("deepspeed_config.wall_clock_breakdown", True, DEEPSPEED),
        ("deepspeed_config.prescale_gradients", True, stage(0)),
        (ZERO + "zero_hpz_partition_size", 2, stage(3), two),
        (ZERO + "zero_quantized_gradients", True, stage(3), CUDA),
        (ZERO + "round_robin_gradients", True, stage(1), two),
        (ZERO + "reduce_bucket_size", 8, stage(2)),
        (ZERO + "allgather_bucket_size", 8, stage(2), two),
        (ZERO + "sub_group_size", 8, stage(3)),
        (ZERO + "contiguous_gradients", False, stage(2)),
        *_offloads("offload_optimizer", "none"),
    ]


def _offloads(part: str, at_first: str) -> list[tuple[Any, ...]]:
    on_host = stage(3, **{f"{part}__device": "cpu"})
    on_drive = stage(3, **{f"{part}__device": "nvme", f"{part}__nvme_path": "/drive"})
    return [
        (f"{ZERO}{part}.device", "cpu", stage(3, **{f"{part}__device": at_first}), CUDA),
        (f"{ZERO}{part}.pin_memory", True, on_host, CUDA),
        (f"{ZERO}{part}.nvme_path", "/other", on_drive),
    ]


STRETCHED: Values = {
    "trainer.rope_scaling": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 16},
}
"""Where rotary embeddings depend on the length of rows."""

LEARNING = (POLICY_PLACE, CRITIC_PLACE, SFT_PLACE, REWARD_PLACE, PREFERENCE_PLACE)
FROZEN = (REFERENCE_PLACE, TEACHER_PLACE)

HALF_DROPPED: Mapping[str, Values] = {
    "trainer.policy": {"trainer.policy.model_config_kwargs": {"attention_dropout": 0.5}},
    "trainer.critic": {
        "trainer.critic.model_config_kwargs": {"attention_dropout": 0.5},
        "trainer.algorithm.value_clip": None,
    },
    "": {},
}
"""Where a model has dropout. Supervised runs take it as it is stored."""

PROBES: tuple[Probe, ...] = (
    *(
        place.probe(
            "model.path", "{nano}/other", place.sights.trained() if place.model.learns else place.sights.scored()
        )
        for place in (*LEARNING, *FROZEN)
    ),
    *(
        place.probe(
            "model.init_from_scratch",
            True,
            place.sights.trained() if place.model.learns else place.sights.scored(),
            {"trainer.ref.model.path": SAME_PATH} if place is REFERENCE_PLACE else {},
        )
        for place in (*LEARNING, *FROZEN)
    ),
    *(place.probe("use_dropout", True, place.sights.trained(), HALF_DROPPED[place.model.path]) for place in LEARNING),
    SFT_PLACE.probe("use_torch_compile", True, compiled_functions),
    *(place.probe("model_config_kwargs", {"rms_norm_eps": 0.5}, place.sights.trained()) for place in LEARNING),
    REFERENCE_PLACE.probe(
        "model_config_kwargs",
        {"rms_norm_eps": 0.5},
        REFERENCE_PLACE.sights.scored(),
        {"trainer.ref.model.path": SAME_PATH},
    ),
    TEACHER_PLACE.probe("model_config_kwargs", {"rms_norm_eps": 0.5}, TEACHER_PLACE.sights.scored()),
    Probe("trainer.rope_theta", 50.0, POLICY_PLACE.sights.trained()),
    Probe("trainer.rope_scaling", {"rope_type": "linear", "factor": 4.0}, POLICY_PLACE.sights.trained()),
    Probe("trainer.longest_row", 8, POLICY_PLACE.sights.trained(), STRETCHED),
    Probe("generator.rope_theta", 50.0, problems),
    Probe("generator.rope_scaling", {"rope_type": "linear", "factor": 4.0}, problems),
    *(
        probe
        for place in (*LEARNING, *FROZEN)
        for probe in (
            place.probe("sequence_parallel_size", 2, place.sights.shared(), place.several),
            place.probe("context_parallel_size", 2, place.sights.shared(), place.several),
            place.probe("tensor_parallel_size", 2, place.sights.cut(), place.several),
        )
    ),
    *(place.probe("expert_parallel_size", 2, place.sights.spread(), place.several) for place in (*LEARNING, *FROZEN)),
    *(
        POLICY_PLACE.probe(f"router_{name}_loss_coef", 0.5, POLICY_PLACE.sights.trained(), MIXTURE)
        for name in ("aux", "z")
    ),
    POLICY_PLACE.probe("moe_enable_routing_replay", True, POLICY_PLACE.sights.scored(), MIXTURE, RETURNED),
    REFERENCE_PLACE.probe("moe_enable_routing_replay", True, REFERENCE_PLACE.sights.scored(), MIXTURE, RETURNED),
    *(probe for place in FROZEN for probe in stored_adapter(place)),
    *(probe for place in LEARNING for table in (adapter, optimizer) for probe in table(place)),
    *(probe for place in (*LEARNING, *FROZEN) for table in (fsdp, deepspeed) for probe in table(place)),
)
