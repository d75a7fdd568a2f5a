"""AdamW by DeepSpeed's vectorized kernel, for optimizer state in CPU memory (arXiv:2101.06840)."""

from __future__ import annotations

import fcntl
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from skyrl.errors import UserError

_KERNEL = "cpu_adam"
"""DeepSpeed's name of the operator, and the name of the folder in which torch compiles it."""

_FAR_AWAY = 2**31
"""A step number that no run reaches."""


def cpu_adamw(groups: list[dict[str, object]], *, lr: float, betas: tuple[float, float], eps: float) -> Optimizer:
    """DeepSpeed's CPUAdam with decoupled weight decay, over `groups` of parameters, with the state of torch's AdamW.

    The first process on a machine compiles the kernel, which takes a minute or two. Raises `UserError` if that fails,
    for example without a C++ compiler.
    """
    adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    try:
        with _compiling_alone():
            optimizer: Optimizer = adam(groups, lr=lr, betas=betas, eps=eps)
    except RuntimeError as error:
        raise UserError(
            "optimizer_config.optimizer = cpu_adamw: DeepSpeed could not compile its kernel "
            f"({error.__cause__ or error}): install g++ and ninja, or set it to adamw"
        ) from error
    optimizer.register_step_pre_hook(_count_by_integers)
    optimizer.register_step_pre_hook(_forget_the_powers)
    optimizer.register_step_post_hook(_count_by_tensors)
    return optimizer


@contextmanager
def _compiling_alone() -> Iterator[None]:
    """Let one process compile at a time. torch's own lock is a file; a killed process leaves it behind, and later
    processes would wait for it forever. It is removed while this lock is held.
    """
    from torch.utils import cpp_extension

    folder = Path(cpp_extension._get_build_directory(_KERNEL, verbose=False))
    path = os.environ.get("PATH", "")
    with open(folder.with_name(f"{_KERNEL}.skyrl.lock"), "w") as own:
        fcntl.flock(own, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), path])  # where pip puts ninja
        try:
            yield
        finally:
            os.environ["PATH"] = path


def _count_by_integers(optimizer: Optimizer, *_: object) -> None:
    """Make step counts integers, which the kernel expects; between steps they are tensors, as in torch's optimizers."""
    for slots in optimizer.state.values():
        if "step" in slots:
            slots["step"] = int(slots["step"])


def _forget_the_powers(optimizer: Optimizer, *_: object) -> None:
    """Make the kernel recompute the powers of the betas in every step, so that a resumed run has the same bits.

    From one step to the next it would update them by a product, which differs from recomputing in the last bit; it
    recomputes them only if the step does not follow the previous one.
    """
    nothing = [torch.zeros(1) for _ in range(4)]  # weight, gradient, and both means
    adam: Any = optimizer
    group = optimizer.defaults
    adam.ds_opt_adam.adam_update(
        adam.opt_id, _FAR_AWAY, group["lr"], *group["betas"], group["eps"], 0.0, True, *nothing
    )


def _count_by_tensors(optimizer: Optimizer, *_: object) -> None:
    for slots in optimizer.state.values():
        slots["step"] = torch.tensor(float(slots["step"]))
