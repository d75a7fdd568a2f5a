"""Imports Megatron-core, and manages the groups of ranks that it keeps for the whole process."""

from __future__ import annotations

import importlib
import logging
import math
import warnings
from types import ModuleType

from skyrl.errors import ModelError, UserError
from skyrl.installation import install_command
from skyrl.planning.topology import Degrees


def import_megatron(module: str, field: str = "trainer.strategy") -> ModuleType:
    """Import a module that requires Megatron-core. Raises `UserError`, which names `field`, if it is not installed."""
    # warnings about missing packages (Transformer Engine, Apex), its own defaults, and deprecated calls
    warnings.filterwarnings("ignore", module=r"megatron\.")
    logging.getLogger("megatron").setLevel(logging.WARNING)  # it lists every parameter
    warnings.filterwarnings("ignore", message=r"`torch\.distributed", category=FutureWarning)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megatron"):
            raise
        raise UserError(
            f'{field} = "megatron" needs Megatron-core, which is not installed: {install_command("megatron")}, or set '
            f'{field} = "fsdp2"'
        ) from error


_users: list[Degrees] = []
"""Degrees of this process's models under Megatron, all equal because its groups of ranks are global."""


def join_groups(degrees: Degrees, timeout: float) -> None:
    """Make Megatron-core's groups of ranks from the default process group, once for all models of this process. Every
    call needs a `leave_groups`. Raises `ModelError` for degrees that differ from the other models'.
    """
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    if _users and _users[0] != degrees:
        raise ModelError(
            f"models that share processes need the same degrees under Megatron: {degrees} after {_users[0]}; set "
            "megatron_config of critic and ref as trainer.policy.megatron_config, or place them apart"
        )
    if not _users:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=degrees.tensor,
            pipeline_model_parallel_size=degrees.pipeline,
            context_parallel_size=degrees.context,
            expert_model_parallel_size=degrees.expert,
            expert_tensor_parallel_size=degrees.expert_tensor,
            distributed_timeout_minutes=max(1, math.ceil(timeout / 60)),
            create_gloo_process_groups=False,
        )
    _users.append(degrees)


def leave_groups(degrees: Degrees) -> None:
    """Undo one `join_groups`; the last call destroys the groups."""
    _users.remove(degrees)
    if not _users:
        importlib.import_module("megatron.core.parallel_state").destroy_model_parallel()
