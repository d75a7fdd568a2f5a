"""Parts of checks that all kinds of run share. Each takes the values, and their paths in the tree of that kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from skyrl.config.settings.alarms import DEFAULT_ALARMS, AlarmConfig
from skyrl.config.settings.models import ModelConfig
from skyrl.errors import Problem
from skyrl.planning.topology import MOST_PROCESSES, Sizes


def model_is_named(model: ModelConfig, path: str) -> Iterator[Problem]:
    """The run names a model to train; `path` is the path of the model's table."""
    if not model.path:
        hint = "give a local folder or a hub name, such as Qwen/Qwen2.5-1.5B-Instruct"
        yield Problem(path=f"{path}.path", message="no model to train", hint=hint)


def flash_attention_needs_cuda(attention: str | None, device: str, path: str) -> Iterator[Problem]:
    """FlashAttention has kernels for CUDA only; `path` is the path of `attention`."""
    if attention == "flash_attention_2" and device != "cuda":
        message = f"flash_attention_2 needs the device cuda, but the device is {device}"
        yield Problem(path=path, message=message, hint="set it to sdpa, or the device to cuda for a machine with GPUs")


def processes_fit_cluster(sizes: Sizes, path: str) -> Iterator[Problem]:
    """A run has no more processes than the largest clusters have GPUs. `path` is the path of the placement."""
    if sizes.processes > MOST_PROCESSES:
        message = f"the sizes of models and engines ask for {sizes.processes} GPUs, but at most {MOST_PROCESSES} are"
        hint = "lower the numbers of nodes, of GPUs per node or of engines, or the parallel sizes of engines"
        yield Problem(path=path, message=f"{message} supported", hint=hint)


def alarms_name_metrics(alarms: Sequence[AlarmConfig], path: str) -> Iterator[Problem]:
    """Each alarm names a metric or changes a default alarm, and no two have the same name."""
    seen: set[str] = set()
    for number, alarm in enumerate(alarms):
        name = alarm.name or alarm.metric
        if not alarm.metric and alarm.name not in DEFAULT_ALARMS:
            message = f"alarm {number} names neither a metric nor a default alarm"
            yield Problem(path=path, message=message, hint=f"default alarms: {', '.join(DEFAULT_ALARMS)}")
        elif name in seen:
            yield Problem(path=path, message=f"two alarms are called {name}", hint="give one of them another name")
        seen.add(name)


def recovery_matches_resuming(recover: str | None, resume: str | None, *, path: str, written: str) -> Iterator[Problem]:
    """`recover_mode` may not contradict `resume_mode`. `path` is the path of `recover_mode`; `written` is the text for
    the resume setting in messages, such as `resume_from = empty`.
    """
    agree = {None: (resume,), "disabled": ("latest", "none", None), "fault": ("latest", "none", None)}
    if resume not in agree.get(recover, ("latest",)):
        message = f"{recover} decides where the run begins, but {written} contradicts it"
        yield Problem(path=path, message=message, hint="leave one of them out")
