"""Low-rank adapters (LoRA, arXiv:2106.09685): added to a model, merged into exported weights, stored as by PEFT.

PEFT's layers replace the linear layers that they adapt; the model keeps its class. In its state dict, an adapted layer
`X` has three weights:

    X.base_layer.weight         W, which does not change
    X.lora_A.default.weight     A, (rank, in)
    X.lora_B.default.weight     B, (out, rank), zero at the start

Everything outside the learner gets `X.weight` = W + alpha / rank B A, the name in a model without adapters.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from skyrl.config import SkyRLLoraConfig
from skyrl.config.settings.supervised_root import SCORE
from skyrl.errors import ModelError, UserError
from skyrl.installation import install_command
from skyrl.models.files.naming import EXPERT_MATRICES, is_experts, tied_names
from skyrl.models.files.stored_adapter import read_adapter
from skyrl.models.onednn import OneDnnLinear

_PARTS = re.compile(r"(.+)\.(base_layer|lora_A\.default|lora_B\.default)\.weight")
HEAD = f"{SCORE}.weight"
"""Name of the weight of a reward model's head, which is trained together with the adapters."""

_INITS: Mapping[str, bool | str] = {"kaiming": True, "gaussian": "gaussian", "orthogonal": "orthogonal"}
"""Our names -> PEFT's values of `init_lora_weights`; only values that leave the model's own weights unchanged."""

Part = Literal["attn", "mlp", "unembed"]
"""Parts of a model, as clients of the training service name them."""

_MIXES_TOKENS = ("attn", "attention", "mixer", "mamba", "conv")
"""Words in the names of blocks in which tokens see each other; every other block is a feed-forward block."""


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


def _layers_outside_experts(model: Any, selection: str | tuple[str, ...]) -> list[str]:
    """Linear layers that an expression or `all-linear` selects in a mixture of experts, in which PEFT would select the
    experts, too; empty for names, and for other models.
    """
    if not isinstance(selection, str) or not any(is_experts(name) for name, _ in model.named_parameters()):
        return []
    head = model.get_output_embeddings()
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


def merge_adapters(weights: Iterator[tuple[str, Tensor]], lora: SkyRLLoraConfig) -> Iterator[tuple[str, Tensor]]:
    """Names and values of the equivalent model without adapters; merged weights are in float32.

    `weights` may come in any order; weights without adapters pass unchanged. The matrix of a layer is (out, in), its
    adapter A (rank, in) and B (out, rank).
    """
    for name, base, factors in _joined(weights):
        if factors is None:
            yield name, base
        else:
            a, b = factors
            yield name, base.float() + lora.alpha / lora.rank * (b.float() @ a.float())


def merged_shapes(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Names in the order of `merge_adapters`, with tensors of the same shapes; values and types are meaningless."""
    return ((name, base) for name, base, _ in _joined(weights))


def _joined(
    weights: Iterator[tuple[str, Tensor]],
) -> Iterator[tuple[str, Tensor, tuple[Tensor, Tensor] | None]]:
    """Name and value of each weight without its adapter, and the adapter's A and B once all three have come."""
    layers: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in weights:
        match = _PARTS.fullmatch(name)
        if match is None:
            yield name.replace(".base_layer.", "."), tensor, None  # the bias of an adapted layer, or unadapted
            continue
        layers[match[1]][match[2]] = tensor
        if len(layers[match[1]]) == 3:
            parts = layers.pop(match[1])
            yield f"{match[1]}.weight", parts["base_layer"], (parts["lora_A.default"], parts["lora_B.default"])


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


def adaptable_layers(model: Any) -> dict[str, tuple[Part, nn.Linear]]:
    """The linear layers of a transformers causal language model and their parts, by name, in the model's order.

    Linear layers of blocks in which tokens see each other are the attention, all others except the output head the
    feed-forward part. Left out is a layer whose weight is also used elsewhere: a head that is tied to the embedding has
    no adapter. The experts of a mixture of experts are no linear layers and have none either.
    """
    head, tied = model.get_output_embeddings(), tied_names(model)
    shared = {*tied, *tied.values()}
    layers: dict[str, tuple[Part, nn.Linear]] = {}
    for name, module in model.named_modules():
        if (is_linear(module) or isinstance(module, OneDnnLinear)) and f"{name}.weight" not in shared:
            mixes = any(word in name.lower() for word in _MIXES_TOKENS)
            layers[name] = ("unembed" if module is head else "attn" if mixes else "mlp"), module
    return layers


def drawn_factors(layers: Mapping[str, nn.Linear], *, rank: int, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """New factors A (rank, in) and B (out, rank) of each layer, in float32 on the host: B is 0, and A is what
    `with_adapter` draws for the same layers and seed.
    """
    factors = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, layer in layers.items():  # PEFT makes both layers, each of which draws, and then draws A again
            a = nn.Linear(layer.in_features, rank, bias=False)
            b = nn.Linear(rank, layer.out_features, bias=False)
            nn.init.kaiming_uniform_(a.weight, a=math.sqrt(5))
            factors[name] = (a.weight.detach(), torch.zeros_like(b.weight.detach()))
    return factors
