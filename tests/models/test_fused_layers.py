"""Fused kernels take the place of modules that compute the same, and of no others.

On a CPU a stand-in for Liger Kernel computes with torch what its kernels compute on a GPU.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen3 import modeling_qwen3

from skyrl.errors import UserError
from skyrl.installation import install_command
from skyrl.models import fused_layers
from skyrl.models.fused_layers import fuse_layers

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[Any, dict[str, int]]] = {
    "llama": (LlamaForCausalLM(LlamaConfig(**SIZES)), {"norms": 5, "feed-forward layers": 2, "rotations": 2}),
    "mistral": (MistralForCausalLM(MistralConfig(**SIZES)), {"norms": 5, "feed-forward layers": 2, "rotations": 2}),
    "qwen2": (Qwen2ForCausalLM(Qwen2Config(**SIZES)), {"norms": 5, "feed-forward layers": 2, "rotations": 2}),
    "qwen3": (Qwen3ForCausalLM(Qwen3Config(**SIZES)), {"norms": 9, "feed-forward layers": 2, "rotations": 2}),
    "phi3": (Phi3ForCausalLM(Phi3Config(**SIZES)), {"norms": 5, "rotations": 2}),
    "gemma": (GemmaForCausalLM(GemmaConfig(**SIZES)), {"rotations": 2}),
    "gemma2": (Gemma2ForCausalLM(Gemma2Config(**SIZES)), {"rotations": 2}),
}
"""Models by family, and the modules of each kind that have kernels. Gemma's norms add one to the weight, and its
feed-forward layers have another activation."""

IDS = torch.arange(1, 13).unsqueeze(0)


class Kernels:
    """Stand-ins by the names and arguments of `liger_kernel.ops`."""

    calls: dict[str, int]

    def __init__(self) -> None:
        self.calls = {"norm": 0, "gated": 0, "rotation": 0}

    def norm(self, x: Tensor, weight: Tensor, eps: float, offset: float, mode: str, *others: object) -> Tensor:
        assert (offset, mode, others) == (0.0, "llama", (False, None))
        self.calls["norm"] += 1
        return rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype) * weight

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        self.calls["gated"] += 1
        return silu(gate) * up

    def rotation(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        self.calls["rotation"] += 1
        half = q.shape[-1] // 2
        turned = [torch.cat((-tensor[..., half:], tensor[..., :half]), -1) for tensor in (q, k)]
        one, other = (a * cos.unsqueeze(1) + b * sin.unsqueeze(1) for a, b in zip((q, k), turned, strict=True))
        return one, other


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    fakes = Kernels()
    package, ops = ModuleType("liger_kernel"), ModuleType("liger_kernel.ops")
    package.__spec__ = ModuleSpec("liger_kernel", None)
    for name, function in (("RMSNorm", fakes.norm), ("SiLUMul", fakes.gated), ("Rope", fakes.rotation)):
        setattr(ops, f"Liger{name}Function", type(name, (), {"apply": staticmethod(function)}))
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", ops)
    monkeypatch.setattr(fused_layers, "_verdicts", {})
    for model, _ in FAMILIES.values():
        code = sys.modules[type(model).__module__]
        monkeypatch.setattr(code, "apply_rotary_pos_emb", code.apply_rotary_pos_emb, raising=True)
    yield fakes
    for model, _ in FAMILIES.values():
        for module in model.modules():
            vars(module).pop("forward", None)


def fuse(model: Any) -> dict[str, int]:
    return dict(+fuse_layers(model, torch.device("cpu"), torch.float32, field="trainer.use_liger_kernel"))


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_that_compute_the_same_are_fused_and_the_model_computes_as_before(
    family: str, kernels: Kernels
) -> None:
    model, counts = FAMILIES[family]
    before = model(IDS).logits
    assert fuse(model) == counts
    kernels.calls = dict.fromkeys(kernels.calls, 0)
    torch.testing.assert_close(model(IDS).logits, before, atol=1e-5, rtol=1e-5)
    assert kernels.calls["norm"] == counts.get("norms", 0)
    assert kernels.calls["gated"] == counts.get("feed-forward layers", 0)
    assert kernels.calls["rotation"] == 0  # on a GPU only


def test_a_rotation_is_fused_on_a_gpu_while_learning_and_otherwise_transformers_own(kernels: Kernels) -> None:
    fuse(FAMILIES["qwen3"][0])
    rotation = modeling_qwen3.apply_rotary_pos_emb
    assert isinstance(rotation, fused_layers._Rotation)
    query, key, angles = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 3, 8)
    kernels.calls["rotation"] = 0
    torch.testing.assert_close(
        rotation.in_one_kernel(query, key, angles.cos(), angles.sin()), rotation(query, key, angles.cos(), angles.sin())
    )
    assert kernels.calls["rotation"] == 1


def test_a_model_without_values_is_fused_too(kernels: Kernels) -> None:
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    assert fuse(model) == FAMILIES["qwen2"][1]


def test_a_kernel_with_another_gradient_is_left_out(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    def detached(gate: Tensor, up: Tensor) -> Tensor:
        return silu(gate).detach() * up

    monkeypatch.setattr(sys.modules["liger_kernel.ops"].LigerSiLUMulFunction, "apply", staticmethod(detached))
    assert "feed-forward layers" not in fuse(FAMILIES["llama"][0])


class GatedRMSNorm(torch.nn.Module):
    """A norm with an optional gate, which a kernel for norms knows nothing of."""

    variance_epsilon = 1e-6

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, hidden: Tensor, gate: Tensor | None = None) -> Tensor:
        normalized = rms_norm(hidden, (8,), self.weight, self.variance_epsilon)
        return normalized if gate is None else normalized * silu(gate)


class Gated(torch.nn.Module):
    """A gated feed-forward layer that clamps, or whose code fails."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(8, 12, bias=False) for _ in range(2))
        self.down_proj, self.act_fn, self.limit = torch.nn.Linear(12, 8, bias=False), torch.nn.SiLU(), limit

    def forward(self, hidden: Tensor) -> Tensor:
        if self.limit == 0:
            raise RuntimeError("this code needs more than numbers")
        output: Tensor = self.down_proj(
            self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden).clamp(max=self.limit)
        )
        return output


def rotates_one(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    return x * cos.unsqueeze(unsqueeze_dim)


def rotates_in_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    half = cos.shape[-1]
    return q[..., :half] * cos, k[..., half : 2 * half] * sin


@pytest.mark.parametrize(
    "module", [GatedRMSNorm(), Gated(limit=7.0), Gated(limit=0.0)], ids=["optional gate", "clamps", "fails"]
)
def test_a_module_that_computes_something_else_keeps_its_own_code(module: Any, kernels: Kernels) -> None:
    assert fuse(torch.nn.Sequential(module)) == {}
    assert "forward" not in vars(module)


def test_layers_of_one_class_are_judged_by_their_settings(kernels: Kernels) -> None:
    assert fuse(torch.nn.Sequential(Gated(limit=1e9), Gated(limit=7.0))) == {"feed-forward layers": 1}


def test_layers_in_float16_are_compared_on_numbers_whose_products_it_holds(kernels: Kernels) -> None:
    layer = LlamaMLP(LlamaConfig(**SIZES | {"intermediate_size": 4096}))
    changed = fuse_layers(torch.nn.Sequential(layer), torch.device("cpu"), torch.float16, field="")
    assert changed["feed-forward layers"] == 1


@pytest.mark.parametrize("rotation", [rotates_one, rotates_in_halves])
def test_another_rotation_stays_as_it_is(rotation: Any, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", rotation)
    assert "rotations" not in fuse(FAMILIES["qwen3"][0])
    assert modeling_qwen3.apply_rotary_pos_emb is rotation


def test_a_missing_package_is_named_with_the_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = f"trainer.use_liger_kernel = true needs the package liger-kernel: {install_command('liger')}"
    with pytest.raises(UserError, match=re.escape(message)):
        fuse(FAMILIES["llama"][0])


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_kernels_on_a_gpu_compute_what_transformers_computes(family: str) -> None:
    model, counts = FAMILIES[family]
    model, ids = model.cuda().bfloat16(), IDS.cuda()
    results = []
    for fused in (False, True):
        if fused:
            assert dict(+fuse_layers(model, torch.device("cuda"), torch.bfloat16, field="")) == counts
        model.zero_grad()
        logits = model(ids).logits
        logits.float().square().mean().backward()
        results.append([logits, *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*results, strict=True):
        assert (one.float() - other.float()).norm() < 0.05 * other.float().norm()
