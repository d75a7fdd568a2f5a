"""The stages of a session, most important first, and what each is told."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

if TYPE_CHECKING:
    from benchmarks.gpu_session.shapes import Shape


Result = dict[str, Any]
Parts = Iterable[tuple[str, Callable[[], Result]]]
"""Measurements of a stage: a name, and the function that measures."""


@frozen(kw_only=True)
class Job:
    """What a stage is told."""

    shape_name: str
    device: str
    """`cuda` or `cpu`."""

    work: Path
    """Folder for models and runs, which later stages find again."""

    language_model: Path | None = None
    """Folder that `smollm2.write_folder` wrote. None: a model with random weights takes its place."""

    changes: Mapping[str, Any] = field(factory=dict)
    """Fields of skyrl's configuration that differ from those of the stage: dotted paths and values."""

    @property
    def shape(self) -> Shape:
        """Sizes of model and batch."""
        from benchmarks.gpu_session.shapes import SHAPES

        return SHAPES[self.shape_name]

    @property
    def folder(self) -> Path:
        """Folder with a model of the shape and its data, which is written if it is not there."""
        from benchmarks.gpu_session.shapes import ensure_model

        return ensure_model(self.shape, self.work / self.shape_name, self.device)


@frozen(kw_only=True)
class GpuStage:
    """One process of a session."""

    name: str
    """A dot separates a side from the comparison that it belongs to."""

    function: str
    """`module:function` in `package`; takes a `Job` and returns `Parts`."""

    package: str = "benchmarks.gpu_session"

    limit: float
    """Seconds after which its process is killed."""

    shapes: tuple[str, ...] = ("",)
    """Shapes on CUDA. The empty name stands for none."""

    packages: tuple[str, ...] = ()
    only_on_cuda: bool = False
    needs_language_model: bool = False
    """Left out on CUDA without one."""

    def why_not(self, device: str, language_model: Path | None) -> str | None:
        """Reason to leave it out on this machine."""
        if missing := [package for package in self.packages if importlib.util.find_spec(package) is None]:
            return f"not installed: {', '.join(missing)}"
        if self.only_on_cuda and device != "cuda":
            return "needs CUDA"
        if self.needs_language_model and language_model is None and device == "cuda":
            return "needs --language-model"
        return None


def parts_of(function: str, job: Job) -> Parts:
    """Measurements of `package.module:function`, not yet done."""
    module, _, name = function.partition(":")
    parts: Parts = getattr(import_module(module), name)(job)
    return parts


_VLLM, _TRL, _PYTEST = ("vllm", "ray"), ("trl", "datasets"), ("pytest", "pytest_asyncio", "hypothesis")

STAGES = (
    GpuStage(name="facts", function="facts:facts", limit=60),
    GpuStage(name="smollm2.vllm", function="steps:vllm", limit=240, shapes=("smollm2", "smollm2-long"), packages=_VLLM,
          needs_language_model=True),
    GpuStage(name="smollm2.embedded", function="steps:embedded", limit=120, shapes=("smollm2", "smollm2-long"),
          needs_language_model=True),
    GpuStage(name="smollm2.trl_vllm", function="trl_steps:with_vllm", limit=180, shapes=("smollm2", "smollm2-long"),
          packages=(*_TRL, "vllm"), only_on_cuda=True, needs_language_model=True),
    GpuStage(name="smollm2.trl", function="trl_steps:with_generate", limit=120, shapes=("smollm2", "smollm2-long"),
          packages=_TRL, needs_language_model=True),
    GpuStage(name="tests_vllm", function="checks:with_vllm", limit=180, packages=(*_PYTEST, *_VLLM), only_on_cuda=True),
    GpuStage(name="tests", function="checks:without_vllm", limit=180, packages=_PYTEST),
    GpuStage(name="long_rows", function="learner:long_rows", limit=240, shapes=("0.6b",)),
    GpuStage(name="learner", function="learner:batches", limit=180, shapes=("0.5b", "0.6b-groups")),
    GpuStage(name="step.vllm", function="steps:vllm", limit=240, shapes=("0.5b", "1.5b"), packages=_VLLM),
    GpuStage(name="step.embedded", function="steps:embedded", limit=150, shapes=("0.5b", "1.5b")),
    GpuStage(name="step.trl_vllm", function="trl_steps:with_vllm", limit=180, shapes=("0.5b", "1.5b"),
          packages=(*_TRL, "vllm"), only_on_cuda=True),
    GpuStage(name="step.trl", function="trl_steps:with_generate", limit=150, shapes=("0.5b", "1.5b"), packages=_TRL),
    GpuStage(name="generation", function="generation:generation", limit=180, shapes=("0.5b",)),
    GpuStage(name="strategies.fsdp2", function="steps:fsdp2", limit=120, shapes=("0.5b",), packages=("ray",)),
    GpuStage(name="strategies.deepspeed", function="steps:deepspeed", limit=120, shapes=("0.5b",),
          packages=("ray", "deepspeed")),
    GpuStage(name="strategies.megatron", function="steps:megatron", limit=120, shapes=("0.5b",),
          packages=("ray", "megatron"), only_on_cuda=True),
)  # fmt: skip


KNOWN_SHAPES = {"tiny", *(shape for stage in STAGES for shape in stage.shapes if shape)}


def chosen(only: Iterable[str], shapes: Iterable[str]) -> list[tuple[GpuStage, str]]:
    """Stages and shapes to run, in order: `only` names stages or what stands before their dot, `shapes` the shapes.

    Empty arguments choose all. The shape `tiny` stands for every shape. Raises ValueError for a name that is unknown.
    """
    names, requested = set(only), set(shapes)
    groups = {stage.name.partition(".")[0] for stage in STAGES}
    if unknown := names - {stage.name for stage in STAGES} - groups:
        raise ValueError(f"no stage is called {', '.join(sorted(unknown))}; --list prints them")
    stages = [stage for stage in STAGES if not names or {stage.name, stage.name.partition(".")[0]} & names]
    pairs = []
    for _, group in groupby(stages, lambda stage: stage.name.partition(".")[0]):
        sides = list(group)
        shapes_of_group = ("tiny",) if "tiny" in requested and sides[0].shapes[0] else sides[0].shapes
        pairs += [
            (side, shape)
            for shape in shapes_of_group
            if not requested or not shape or shape in requested
            for side in sides
        ]
    return pairs
