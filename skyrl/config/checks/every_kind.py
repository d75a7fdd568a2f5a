"""Checks of the settings that every kind of run has. Each names fields by their paths in the tree of that kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from skyrl.config.settings.alarms import DEFAULT_ALARMS
from skyrl.config.settings.generator import CHAT_TEMPLATES, ChatTemplateConfig
from skyrl.errors import Problem
from skyrl.planning.topology import MOST_PROCESSES, Sizes
from skyrl.tree import get_at

if TYPE_CHECKING:
    from skyrl.config.settings.root import SkyRLTrainConfig
    from skyrl.config.settings.supervised_root import SupervisedConfig

    Run: TypeAlias = SkyRLTrainConfig | SupervisedConfig


def attention_suits_device(run: Run) -> Iterator[Problem]:
    """FlashAttention has kernels for CUDA only."""
    trainer = run.trainer
    if trainer.attention == "flash_attention_2" and trainer.device != "cuda":
        message = f"flash_attention_2 needs the device cuda, but the device is {trainer.device}"
        hint = "set it to sdpa, or the device to cuda for a machine with GPUs"
        yield Problem(path=trainer.path_of("attention"), message=message, hint=hint)


def alarms_are_valid(run: Run) -> Iterator[Problem]:
    """Each alarm names a metric or changes a default alarm, and no two have the same name."""
    path, seen = run.trainer.path_of("alarms"), set[str]()
    for number, alarm in enumerate(run.trainer.alarms):
        name = alarm.name or alarm.metric
        if not alarm.metric and alarm.name not in DEFAULT_ALARMS:
            message = f"alarm {number} names neither a metric nor a default alarm"
            yield Problem(path=path, message=message, hint=f"default alarms: {', '.join(DEFAULT_ALARMS)}")
        elif name in seen:
            yield Problem(path=path, message=f"two alarms are called {name}", hint="give one of them another name")
        seen.add(name)


def recover_mode_matches_resuming(run: Run) -> Iterator[Problem]:
    """`recover_mode` does not contradict the field that selects the checkpoint to resume from."""
    trainer, field = run.trainer, run.trainer.path_of("resume_mode")
    agree = {None: (trainer.resume_mode,), "disabled": ("latest", "none", None), "fault": ("latest", "none", None)}
    if trainer.resume_mode not in agree.get(trainer.recover_mode, ("latest",)):
        value = get_at(run, field)
        written = f"{field} = {'none' if value is None else value or 'empty'}"
        message = f"{trainer.recover_mode} decides where the run begins, but {written} contradicts it"
        yield Problem(path=trainer.path_of("recover_mode"), message=message, hint="leave one of them out")


def processes_fit_cluster(sizes: Sizes, path: str) -> Iterator[Problem]:
    """A run has no more processes than the largest clusters have GPUs. `path` is the path of the placement."""
    if sizes.processes > MOST_PROCESSES:
        message = f"the sizes of models and engines ask for {sizes.processes} GPUs, but at most {MOST_PROCESSES} are"
        hint = "lower the numbers of nodes, of GPUs per node or of engines, or the parallel sizes of engines"
        yield Problem(path=path, message=f"{message} supported", hint=hint)


def named_template_exists(template: ChatTemplateConfig, path: str) -> Iterator[Problem]:
    """A chat template that is not built in comes from a file. `path` is that of its table."""
    if template.source == "name" and template.name_or_path not in (None, *CHAT_TEMPLATES):
        yield Problem(
            path=f"{path}.name_or_path",
            message=f"there is no built-in template {template.name_or_path!r}; available: {', '.join(CHAT_TEMPLATES)}",
            hint=f"for a file, set {path}.source = file",
        )
