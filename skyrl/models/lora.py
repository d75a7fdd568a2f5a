"""Low-rank adapters (LoRA, arXiv:2106.09685): added to a model, merged into exported weights, stored as by PEFT.

PEFT's layers replace the linear layers that they adapt; the model keeps its class. In its state dict, an adapted layer
`X` has three weights:

    X.base_layer.weight         W, which does not change
    X.lora_A.default.weight     A, (rank, in)
    X.lora_B.default.weight     B, (out, rank), zero at the start

Everything outside the learner gets `X.weight` = W + alpha / rank B A, the name in a model without adapters.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from attrs import define
from torch import Tensor, nn

from skyrl.config import SkyRLLoraConfig
from skyrl.config.settings.supervised_root import SCORE
from skyrl.errors import ModelError, UserError
from skyrl.installation import install_command
from skyrl.models.files.expert_names import EXPERT_MATRICES, is_experts
from skyrl.models.files.naming import tied_names
from skyrl.models.files.stored_adapter import read_adapter

_PARTS = re.compile(r"(.+)\.(base_layer|lora_A\.default|lora_B\.default)\.weight")
HEAD = f"{SCORE}.weight"
"""Name of the weight of a reward model's head, which is trained together with the adapters."""

_INITS: Mapping[str, bool | str] = {"kaiming": True, "gaussian": "gaussian", "orthogonal": "orthogonal"}
"""Our names -> PEFT's values of `init_lora_weights`; only values that leave the model's own weights unchanged."""


def with_adapter(model: nn.Module, lora: SkyRLLoraConfig, *, seed: int, field: str) -> nn.Module:
    """The same transformers model, with adapters added as its only trainable weights. A is drawn from `seed`, or loaded
    with B from `lora.path`.

    On the meta device adapters have no values. `field` is the dotted path of the configuration. Raises `ModelError` for
    modules that cannot be adapted and for a stored adapter that does not fit, `UserError` without PEFT.
    """
    peft = import_peft()
    is_empty = next(model.parameters()).device.type == "meta"
    names = [name for name, _ in model.named_modules()]
    _refuse_experts(model, lora, field)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            settings = _settings(lora, initialize=not is_empty)
            settings.target_modules = _layers_outside_experts(model, lora.target_modules) or settings.target_modules
            peft.inject_adapter_in_model(settings, model, low_cpu_mem_usage=is_empty)
        except ValueError as error:
            raise ModelError(f"{field}: no adapter fits this model: {str(error).splitlines()[0]}") from error
    _refuse_names_of_nothing(names, lora, field)
    _refuse_unsuitable(model, field)
    if lora.path is not None and not is_empty:
        read_adapter(model, lora, field)
    return model


def _settings(lora: SkyRLLoraConfig, *, initialize: bool) -> Any:
    return import_peft().LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=_names(lora.target_modules),
        exclude_modules=_names(lora.exclude_modules),
        init_lora_weights=_INITS[lora.init_method] if initialize else False,
        task_type="CAUSAL_LM",
    )


def _layers_outside_experts(model: nn.Module, selection: str | tuple[str, ...]) -> list[str]:
    """Linear layers that an expression or `all-linear` selects in a mixture of experts, in which PEFT would select the
    experts, too; empty for names, and for other models.
    """
    if not isinstance(selection, str) or not any(is_experts(name) for name, _ in model.named_parameters()):
        return []
    transformer: Any = model
    head = transformer.get_output_embeddings()
    linear = [name for name, item in model.named_modules() if is_linear(item) and item is not head]
    return [name for name in linear if selection == "all-linear" or re.fullmatch(selection, name)]


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes a linear layer. Routers of Llama 4 and Phi-3.5-MoE subclass it and return a tuple."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _names(value: str | tuple[str, ...] | None) -> str | list[str] | None:
    return list(value) if isinstance(value, tuple) else value


def _refuse_experts(model: nn.Module, lora: SkyRLLoraConfig, field: str) -> None:
    """Refuse names of experts' matrices: transformers holds a layer's experts in one tensor, not in linear layers."""
    layers = [name for name, _ in model.named_parameters() if is_experts(name)]
    targets = lora.target_modules if isinstance(lora.target_modules, tuple) else ()
    experts = [item for item in targets if item.rpartition(".")[2] in ("experts", *EXPERT_MATRICES)]
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if layers and (
        unsupported := next((expert for expert in experts if expert.rpartition(".")[2] not in linear), None)
    ):
        raise ModelError(
            f"{field}.target_modules: {unsupported!r} belongs to the experts of this model, which get no adapters: all "
            "experts of a layer are one tensor, and adapters are for linear layers; name those of the attention"
        )


def _refuse_names_of_nothing(modules: Sequence[str], lora: SkyRLLoraConfig, field: str) -> None:
    """Refuse a name or an expression that matches no module of the model, which PEFT would ignore."""
    for which in ("target_modules", "exclude_modules"):
        selection = getattr(lora, which)
        if selection is None or selection == "all-linear":
            continue
        for item in (selection,) if isinstance(selection, str) else selection:
            by_name = [name for name in modules if f".{name}".endswith(f".{item}")]
            if not (any(re.fullmatch(item, name) for name in modules) if isinstance(selection, str) else by_name):
                raise ModelError(f"{field}.{which}: no module of this model is called {item!r}")


def _refuse_unsuitable(model: nn.Module, field: str) -> None:
    """Refuse modules that adapters cannot be merged into: only linear layers whose weight is not shared can."""
    tied = tied_names(model)
    shared = {*tied, *tied.values()}
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        if base is None:
            continue
        if not is_linear(base):
            raise ModelError(
                f"{field}.target_modules matches {name}, a {type(base).__name__}: adapters are for linear layers"
            )
        if f"{name}.base_layer.weight" in shared:
            raise ModelError(
                f"{field}.target_modules matches {name}, whose weight is also used elsewhere in this model: leave it "
                "out with exclude_modules"
            )


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within the context, the model computes without its adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    # PEFT's own enable_adapters(False) would also freeze the adapters, which FSDP's parameters cannot take back.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@define
class _Parts:
    """The tensors of one adapted layer found so far."""

    base: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None


def merge_adapters(weights: Iterator[tuple[str, Tensor]], lora: SkyRLLoraConfig) -> Iterator[tuple[str, Tensor]]:
    """Names and values of the equivalent model without adapters; merged weights are in float32.

    `weights` may come in any order; weights without adapters pass unchanged. The matrix of a layer is (out, in), its
    adapter A (rank, in) and B (out, rank).
    """
    for name, parts in _joined(weights):
        if isinstance(parts, Tensor):
            yield name, parts
        else:
            assert parts.base is not None and parts.a is not None and parts.b is not None
            yield name, parts.base.float() + lora.alpha / lora.rank * (parts.b.float() @ parts.a.float())


def merged_shapes(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Names in the order of `merge_adapters`, with tensors of the same shapes; values and types are meaningless."""
    for name, parts in _joined(weights):
        base = parts if isinstance(parts, Tensor) else parts.base
        assert base is not None
        yield name, base


def _joined(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor | _Parts]]:
    layers: dict[str, _Parts] = {}
    for name, tensor in weights:
        match = _PARTS.fullmatch(name)
        if match is None:
            yield name.replace(".base_layer.", "."), tensor  # the bias of an adapted layer, or an unadapted weight
            continue
        parts = layers.setdefault(match[1], _Parts())
        setattr(parts, {"base_layer": "base", "lora_A.default": "a", "lora_B.default": "b"}[match[2]], tensor)
        if parts.base is not None and parts.a is not None and parts.b is not None:
            yield f"{match[1]}.weight", layers.pop(match[1])


def adapter_alone(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """A (rank, in) and B (out, rank) of every adapted layer and the head of a reward model, under the names in PEFT's
    files.
    """
    for name, tensor in weights:
        match = _PARTS.fullmatch(name)
        if match is not None and match[2] != "base_layer":
            part = match[2].removesuffix(".default")
            yield f"base_model.model.{match[1]}.{part}.weight", tensor
        elif name == HEAD:
            yield f"base_model.model.{HEAD}", tensor


def adapter_settings(lora: SkyRLLoraConfig, like: str, names: Collection[str]) -> Any:
    """PEFT's configuration of a stored adapter; `names` are the names of its tensors, `like` is the adapted model.

    The modules are listed one by one, because another model or version of PEFT might interpret `all-linear`
    differently. With the head of a reward model it is an adapter of a sequence classifier.
    """
    adapted = [name for name in names if ".lora_" in name]
    modules = sorted({re.sub(r"^base_model\.model\.|\.lora_[AB]\.weight$", "", name) for name in adapted})
    kinds = sorted({module.rpartition(".")[2] for module in modules})
    settings = _settings(lora, initialize=True)
    settings.target_modules = kinds if lora.target_modules == "all-linear" and not lora.exclude_modules else modules
    settings.exclude_modules = None
    settings.base_model_name_or_path = like
    settings.inference_mode = True
    if len(adapted) < len(names):
        settings.task_type, settings.modules_to_save = "SEQ_CLS", [SCORE]
    return settings


def import_peft() -> ModuleType:
    """Import PEFT. Raises `UserError` if it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise UserError(
            f"model.lora.rank above 0 needs PEFT, which is not installed: {install_command('train')}, or set it to 0"
        ) from error
    return peft
