"""Probes of `megatron_config` of every model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from skyrl.config import MegatronConfig
from skyrl.config.derive.model_tables import Role
from skyrl.learners.megatron.settings import MegatronSettings
from skyrl.learners.strategy import ModelSource, StrategyContext
from skyrl.learners.workers.learning_worker import trace_folder
from tests.effects.boundaries import Reached, Unmet, reached
from tests.effects.models import FROZEN, LEARNING, Place
from tests.effects.observables import plain
from tests.effects.probe import Observable, Probe, Scene

MEGATRON = {"{t}strategy": "megatron"}
TABLE = "megatron_config."
TRACED = {
    f"{{m}}{TABLE}torch_profiler_config.{name}": value
    for name, value in {"enable": True, "ranks": (0,), "save_path": "traces"}.items()
}


ROUTING: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("moe_token_dispatcher_type", "allgather", {f"{{m}}{TABLE}expert_model_parallel_size": 2}),
    ("moe_router_load_balancing_type", "aux_loss", {}),
    ("moe_grouped_gemm", False, {}),
    ("moe_router_score_function", "sigmoid", {}),
    ("moe_router_enable_expert_bias", True, {f"{{m}}{TABLE}moe_router_score_function": "sigmoid"}),
)


class FakePackage:
    """In the place of the module that needs Megatron-core."""

    @staticmethod
    def Megatron(source: ModelSource, config: MegatronConfig, context: StrategyContext) -> None:
        settings = MegatronSettings.of(config, context.degrees, context.optimizer, context.compute_dtype)
        model = source.meta_model().config.to_dict()
        raise Reached(plain([attrs.asdict(settings), {name: str(value) for name, value in model.items()}]))


def given_to_megatron(scene: Scene, model: Role) -> object:
    """Degrees and fields that Megatron-core gets, and the model that it rebuilds; None where it is not called."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skyrl.learners.workers.strategies.import_megatron", lambda *_: FakePackage)
        return reached(scene, model, Unmet(size=model.ranks(scene.run)))


def _traces(scene: Scene, model: Role) -> object:
    return str(trace_folder(scene.run.trainer, model.section(scene.run), 0))


def _probes(place: Place) -> Iterator[Probe]:
    title = place.model.title
    megatron_args = Observable(
        f"what Megatron-core gets for the {title}", lambda it: given_to_megatron(it, place.model)
    )
    for name in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor"):
        yield place.probe(f"{TABLE}{name}_parallel_size", 2, megatron_args, MEGATRON, place.several)
    yield place.probe(f"{TABLE}transformer_config_kwargs", {"recompute_granularity": None}, megatron_args, MEGATRON)
    for name, value, context in ROUTING:
        yield place.probe(TABLE + name, value, megatron_args, MEGATRON, place.several, context)
    yield place.probe(f"{TABLE}model_config_kwargs", {"rms_norm_eps": 0.5}, megatron_args, MEGATRON)


def _learning(place: Place) -> Iterator[Probe]:
    title = place.model.title
    megatron_args = Observable(
        f"what Megatron-core gets for the {title}", lambda it: given_to_megatron(it, place.model)
    )
    overlapping = {f"{{m}}{TABLE}ddp_config.overlap_grad_reduce": True}
    values: tuple[tuple[str, Any, dict[str, Any]], ...] = (
        ("ddp_config.grad_reduce_in_fp32", False, {}),
        ("ddp_config.overlap_grad_reduce", True, {}),
        ("ddp_config.overlap_param_gather", True, overlapping),
        ("ddp_config.average_in_collective", False, {}),
        ("optimizer_config_kwargs", {"optimizer_cpu_offload": True}, {}),
        ("empty_cuda_cache", True, {"{t}device": "cuda", "{t}attention": "sdpa"}),
        ("lora_config.lora_type", "canonical_lora", {"{m}model.lora.rank": 4}),
    )
    for name, value, context in values:
        yield place.probe(TABLE + name, value, megatron_args, MEGATRON, context)
    traces = Observable(
        f"the folder that updates of the {title} are traced into by rank 0", lambda it: _traces(it, place.model)
    )
    for name, other in (("enable", False), ("ranks", (1,)), ("save_path", "elsewhere")):
        yield place.probe(f"{TABLE}torch_profiler_config.{name}", other, traces, MEGATRON, TRACED)


PROBES: tuple[Probe, ...] = (
    *(probe for place in (*LEARNING, *FROZEN) for probe in _probes(place)),
    *(probe for place in LEARNING for probe in _learning(place)),
)
