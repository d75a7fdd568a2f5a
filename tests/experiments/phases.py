"""A run that tells which phase it is in, and is killed or signalled there: each process on its own.

The environment variable `FAULT` says where and how, so that it reaches the actors of Ray, too.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from attrs import asdict, frozen

from skyrl.experiments.ppo import BasePPOExp
from skyrl.experiments.preference import PreferenceExp
from skyrl.experiments.sft import RewardModelExp, SFTExp
from skyrl.learners.data_parallel import DataParallel
from skyrl.learners.workers.group import LearnerGroup
from skyrl.learners.workers.learning_worker import LearningWorker
from skyrl.learners.workers.roles import PolicyWorker, PreferenceWorker, RewardModelWorker, SFTWorker
from skyrl.processes.orphans import RUN, folder_of_this_process, tagged
from skyrl.storage.disk import Bytes, Disk
from tests.megatron_shim import ON_ANY_DEVICE, HostPolicyWorker

T = TypeVar("T")

PHASES = ("start", "generation", "reward", "forward", "backward", "optimizer", "sync", "save", "writing")
PRODUCTS = re.compile(r"/run/\.?(model|adapter|reward_curve)\b")
CHANGES_OF_FILES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}
OF_THE_CLOCK = {"generate": "generation", "sync_weights": "sync", "eval": "evaluation", "save_checkpoints": "save"}


@frozen(kw_only=True)
class Fault:
    """What happens the `nth` time (from 1) that a process enters the phase, `delay` seconds later."""

    phase: str
    nth: int = 1
    does: Literal[
        "kill",
        "kill gcs_server",
        "kill raylet",
        "SIGTERM",
        "SIGHUP",
        "SIGINT",
        "SIGINT again and again",
        "ENOSPC",
        "raise",
        "nothing",
    ] = "kill"
    delay: float = 0.0
    hangs: float = 0.0
    """Seconds that the phase then takes."""

    seen: str = ""
    """A file that is made once it has happened."""

    def in_environment(self) -> dict[str, str]:
        return {"FAULT": json.dumps(asdict(self))}


_entered: dict[str, int] = {}


def enter(phase: str) -> None:
    """The process has begun something of this phase."""
    _entered[phase] = _entered.get(phase, 0) + 1
    written = os.environ.get("FAULT")
    fault = Fault(**json.loads(written)) if written else None
    if fault is None or fault.phase != phase or _entered[phase] != fault.nth:
        return
    if fault.delay:
        threading.Timer(fault.delay, _happen, [fault]).start()
    else:
        _happen(fault)
    if fault.seen:
        Path(fault.seen).touch()
    if fault.hangs:
        time.sleep(fault.hangs)


def _happen(fault: Fault) -> None:
    if fault.does == "nothing":
        return
    if fault.does == "raise":
        raise ValueError(f"a mistake in {fault.phase}")
    if fault.does == "ENOSPC":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if fault.does == "SIGINT again and again":
        threading.Thread(target=_press_again_and_again, args=(int(os.environ["DRIVER"]),), daemon=True).start()
        return
    if fault.does in ("kill gcs_server", "kill raylet"):
        for pid in tagged(RUN, os.environ[RUN] if RUN in os.environ else folder_of_this_process(Path()).name):
            if Path(f"/proc/{pid}/exe").resolve().name == fault.does.removeprefix("kill "):
                os.kill(pid, signal.SIGKILL)
        return
    if fault.does != "kill":
        os.kill(int(os.environ["DRIVER"]), getattr(signal, fault.does))
        return
    run = os.environ.get(RUN)
    for pid in [int(os.environ["DRIVER"]), *(tagged(RUN, run) if run else ()), os.getpid()]:
        with suppress(ProcessLookupError):  # it ended when the driver did
            os.kill(pid, signal.SIGKILL)


def _press_again_and_again(driver: int) -> None:
    """Ctrl-C until the run is gone, however slow it is to hear the first."""
    with suppress(ProcessLookupError):
        while True:
            os.kill(driver, signal.SIGINT)
            time.sleep(0.05)


def tell_of_writing() -> None:
    """Every file of a checkpoint that this process writes, most of them while the run goes on."""
    write = Disk.write
    if write.__name__ != "phased_write":

        def phased_write(self: Disk, name: str, content: Sequence[Bytes]) -> None:
            enter("writing")
            write(self, name, content)

        Disk.write = phased_write  # type: ignore[method-assign]  # replaced for the test


def tell_of_products() -> None:
    """Every change of a file or folder among what a run makes at its end: model, adapter and curve."""

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CHANGES_OF_FILES or (event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        if any(PRODUCTS.search(os.fspath(argument)) for argument in arguments if _is_path(argument)):
            enter("product")

    sys.addaudithook(heard)


def _is_path(argument: object) -> bool:
    return isinstance(argument, str | os.PathLike) and isinstance(os.fspath(argument), str)


def _telling(phase: str, function: Callable[..., T]) -> Callable[..., T]:
    def phased(*args: Any, **kwargs: Any) -> T:
        enter(phase)
        return function(*args, **kwargs)

    return phased


class Phased(LearningWorker):
    """Tells of each forward and backward pass, and of each optimizer step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        enter("start")
        tell_of_writing()
        if os.environ["DRIVER"] != str(os.getpid()):  # a process of Ray
            tell_of_products()
        super().__init__(*args, **kwargs)
        strategy: Any = self.strategy
        if isinstance(self.strategy, DataParallel):
            strategy.backward = _telling("backward", strategy.backward)
        else:  # Megatron-core's schedule goes backward by itself once it has a loss
            accumulate = strategy.accumulate
            strategy.accumulate = lambda rows, read, loss_of: accumulate(rows, read, _telling("backward", loss_of))
        strategy.step = _telling("optimizer", strategy.step)

    def _forward(self, model: Any, batch: Any) -> Any:
        enter("forward")
        return super()._forward(model, batch)


class PhasedPolicyWorker(Phased, PolicyWorker):
    """Phases of a reinforcement-learning run."""


class PhasedHostPolicyWorker(Phased, HostPolicyWorker):
    """Phases of a run under Megatron, which takes the CPU for CUDA."""


class PhasedSFTWorker(Phased, SFTWorker):
    """Phases of supervised fine-tuning."""


class PhasedPreferenceWorker(Phased, PreferenceWorker):
    """Phases of a preference run."""


class PhasedRewardModelWorker(Phased, RewardModelWorker):
    """Phases of the training of a reward model."""


def tell_of_the_clock(experiment: Any) -> None:
    """What the experiment measures the time of is a phase, too."""
    os.environ["DRIVER"] = str(os.getpid())
    tell_of_writing()
    tell_of_products()
    around = experiment.clock._around

    @contextmanager
    def phased(name: str) -> Iterator[None]:
        with around(name):
            enter(OF_THE_CLOCK.get(name, name))
            yield

    experiment.clock._around = phased


class PhasedExp(BasePPOExp):
    """`BasePPOExp` that tells of its phases."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        tell_of_the_clock(self)

    def get_policy(self) -> LearnerGroup[PolicyWorker]:
        from skyrl.experiments import ppo as models

        is_megatrons = self.cfg.trainer.strategy == "megatron"
        worker = PhasedHostPolicyWorker if is_megatrons else PhasedPolicyWorker
        models.PolicyWorker = worker  # type: ignore[attr-defined]  # replaced for the test
        return super().get_policy()


class PhasedSFTExp(SFTExp):
    """`SFTExp` that tells of its phases."""

    worker = PhasedSFTWorker

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        tell_of_the_clock(self)


class PhasedPreferenceExp(PreferenceExp):
    """`PreferenceExp` that tells of its phases."""

    worker = PhasedPreferenceWorker

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        tell_of_the_clock(self)


class PhasedRewardModelExp(RewardModelExp):
    """`RewardModelExp` that tells of its phases."""

    worker = PhasedRewardModelWorker

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        tell_of_the_clock(self)


def in_ascii(completion: str, ground_truth: str, **others: Any) -> float:
    """The reward of `nano/reward.py`, which tells that it is asked for."""
    enter("reward")
    return float(bool(completion) and completion.isascii())


def command(words: list[str], environment: dict[str, str], folder: Path, verbs: tuple[str, ...] = ("run",)) -> None:
    """`skyrl run`, or another command, in this process, with the variables, in the folder; output goes to the file
    `said` there, or with the variable NOBODY_READS into a pipe that nobody reads.
    """
    os.environ.update(environment)
    output = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    if "NOBODY_READS" in environment:
        read, output = os.pipe()
        os.close(read)
    os.dup2(output, 1)
    os.dup2(output, 2)
    from skyrl.cli.main import main
    from skyrl.config.settings import strategies
    from skyrl.experiments import ppo, preference, sft

    strategies.STRATEGIES = {**strategies.STRATEGIES, "megatron": ON_ANY_DEVICE}
    ppo.BasePPOExp = PhasedExp  # type: ignore[misc]  # replaced for the test
    sft.SFTExp = PhasedSFTExp  # type: ignore[misc]  # replaced for the test
    preference.PreferenceExp = PhasedPreferenceExp  # type: ignore[misc]  # replaced for the test
    sft.RewardModelExp = PhasedRewardModelExp  # type: ignore[misc]  # replaced for the test
    main([*verbs, *words])
