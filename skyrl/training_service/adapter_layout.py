"""Names, shapes and files of one adapter, whose factors lie one after the other in a single vector; that of a critic
has its value head at the end.

One vector makes a step of Adam, a norm, a move and a sum over ranks one operation each, however many layers there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import torch
from attrs import frozen
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from skyrl.config import SkyRLLoraConfig
from skyrl.errors import ModelError, RequestError
from skyrl.inference.adapters import shared
from skyrl.models.files.stored_adapter import stored_settings, stored_tensors
from skyrl.models.lora import Part, adapter_settings, drawn_factors
from skyrl.storage.modes import save_tensors
from skyrl.training_service.backend import AdapterSpec
from skyrl.weight_receiver.incoming_weights import Adapter

ALPHA = 32
"""Scale of every adapter, which clients cannot choose: an update is multiplied by `ALPHA / rank`. The hosted service's
value, which the learning rates of its cookbook assume."""

FACTORS = "factors"
"""Name of the vector among the tensors of a model."""

_VALUE_HEAD = "value_head.safetensors"
"""File of a critic's head, beside its adapter."""


@frozen(kw_only=True, eq=False)
class AdapterLayout:
    """The layers of one adapter."""

    spec: AdapterSpec
    layers: Mapping[str, nn.Linear]
    """The adapted layers of the base, by name."""

    hidden: int
    """Number of inputs of a value head."""

    @cached_property
    def shapes(self) -> tuple[torch.Size, ...]:
        """Shapes of A, (rank, in), and B, (out, rank), of each layer in turn."""
        rank, layers = self.spec.rank, self.layers.values()
        pairs = ((torch.Size((rank, layer.in_features)), torch.Size((layer.out_features, rank))) for layer in layers)
        return tuple(shape for pair in pairs for shape in pair)

    @property
    def scale(self) -> float:
        """Factor of the updates."""
        return ALPHA / self.spec.rank

    def initial_vector(self) -> Tensor:
        """The vector of a new adapter, in float32 on the host."""
        factors = drawn_factors(self.layers, rank=self.spec.rank, seed=self.spec.seed)
        head = torch.zeros(self.hidden if self.spec.value_head else 0)
        return torch.cat([*(part.flatten() for pair in factors.values() for part in pair), head])

    def factors(self, vector: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name of each layer, A and B, as views of the vector."""
        sizes = [shape.numel() for shape in self.shapes]
        parts = vector[: sum(sizes)].split(sizes)
        views = [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
        yield from zip(self.layers, views[0::2], views[1::2], strict=True)

    def value_head(self, vector: Tensor) -> Tensor | None:
        """The value head (1, hidden), as a view of the vector; None if the model is no critic."""
        return vector[-self.hidden :].view(1, -1) if self.spec.value_head else None

    def named_factors(self, vector: Tensor) -> dict[str, Tensor]:
        """The factors under the names in PEFT's files, as views of the vector."""
        return {
            _stored_name(name, part): factor
            for name, a, b in self.factors(vector)
            for part, factor in (("A", a), ("B", b))
        }

    def adapter(self, vector: Tensor) -> Adapter:
        """A copy of the adapter, for engines. Each factor has memory of its own: of a part, pickle would send all."""
        copies = tuple((name, factor.clone()) for name, factor in self.named_factors(vector).items())
        return shared(copies, rank=self.spec.rank, alpha=ALPHA)

    def write(self, vector: Tensor, folder: Path, like: str) -> None:
        """Store the adapter of the model `like` in PEFT's format."""
        tensors = {name: factor.contiguous() for name, factor in self.named_factors(vector.cpu()).items()}
        lora = SkyRLLoraConfig(rank=self.spec.rank, alpha=ALPHA, target_modules=tuple(self.layers))
        adapter_settings(lora, like, tensors).save_pretrained(str(folder))
        save_tensors(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        if (head := self.value_head(vector.cpu())) is not None:
            save_tensors({"weight": head.contiguous()}, folder / _VALUE_HEAD)

    def read(self, folder: Path) -> Tensor:
        """The vector of the adapter in a folder. Raises `RequestError` if it holds none, or one of another shape."""
        try:
            settings, tensors = stored_settings(folder, "path"), stored_tensors(folder, "path")
        except ModelError as error:
            raise RequestError(str(error)) from error
        if (settings.rank, settings.alpha) != (self.spec.rank, ALPHA):
            raise RequestError(
                f"the adapter in {folder} has rank {settings.rank} and alpha {settings.alpha:g}, this model rank "
                f"{self.spec.rank} and alpha {ALPHA}"
            )
        names = [_stored_name(layer, part) for layer in self.layers for part in "AB"]
        if different := sorted(tensors.keys() ^ set(names)):
            whose = "this model" if different[0] in tensors else "the stored adapter"
            raise RequestError(f"the adapter in {folder} is for other layers: {whose} has no {different[0]}")
        for name, shape in zip(names, self.shapes, strict=True):
            if tensors[name].shape != shape:
                raise RequestError(f"{name} in {folder} has shape {tuple(tensors[name].shape)}, not {tuple(shape)}")
        return torch.cat([*(tensors[name].float().flatten() for name in names), self._stored_head(folder)])

    def _stored_head(self, folder: Path) -> Tensor:
        """(hidden,): the value head in a folder; empty if the model is no critic."""
        file = folder / _VALUE_HEAD
        if file.exists() is not self.spec.value_head:
            whose = ("this model", "the stored one") if self.spec.value_head else ("the stored model", "this one")
            raise RequestError(f"{whose[0]} has a value head, and {whose[1]} has none: {folder}")
        if not self.spec.value_head:
            return torch.empty(0)
        try:
            head: Tensor = load_file(file)["weight"]
        except (OSError, KeyError, SafetensorError) as error:
            raise RequestError(f"{file} holds no value head ({type(error).__name__}: {error})") from error
        if head.shape != (1, self.hidden):
            raise RequestError(f"the value head in {folder} has shape {tuple(head.shape)}, not {(1, self.hidden)}")
        return head.float().flatten()


def adapter_layout(spec: AdapterSpec, adaptable: Mapping[str, tuple[Part, nn.Linear]], *, hidden: int) -> AdapterLayout:
    """The layout of an adapter; `adaptable` are the base's layers, `hidden` is the size of its last hidden states.
    Raises `RequestError` without a layer or a rank.
    """
    if spec.rank < 1:
        raise RequestError(f"rank is {spec.rank}: it must be at least 1", param="lora_config.rank")
    trained: dict[Part, bool] = {"attn": spec.train_attn, "mlp": spec.train_mlp, "unembed": spec.train_unembed}
    trained["unembed"] &= not spec.value_head
    layers = {name: layer for name, (part, layer) in adaptable.items() if trained[part]}
    if not layers:
        trainable = sorted({part for part, _ in adaptable.values()})
        raise RequestError(
            f"the adapter has no layer to train: set {' or '.join(f'train_{part}' for part in trainable)}",
            param="lora_config",
        )
    return AdapterLayout(spec=spec, layers=layers, hidden=hidden)


def _stored_name(layer: str, part: str) -> str:
    return f"base_model.model.{layer}.lora_{part}.weight"
