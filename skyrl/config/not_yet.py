"""What the tree can say and this version cannot do yet. The table may only become shorter.

A field is either read by a component or covered here; a test proves it and prints the count. An entry names the values
that run; any other value that would have an effect is refused with the capability that is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import frozen

from skyrl.config.entry import RunConfig
from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import Problem
from skyrl.tree import FrozenDict, get_at
from skyrl.tree.classes import leaf_paths
from skyrl.tree.plain import shown


@frozen
class NotYet:
    """One path, or every path inside one table, that no component reads yet."""

    path: str
    what: str
    """The capability that is missing."""

    runs: tuple[Any, ...] | None = None
    """Values that run; None where any does, because what it belongs to is refused by another entry or cannot arise."""

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """What the value asks for has a component that does it."""
        if self.runs is None:
            return
        value = get_at(run, self.path)
        if not any(value == runs and type(value) is type(runs) for runs in self.runs):
            yield Problem(
                path=self.path,
                message=f"{shown(value)} does not run in this version, which has not implemented it yet: {self.what}",
                hint=f"what runs: {' or '.join(_spelled(runs) for runs in self.runs)}",
            )


_ENGINE = "generator.inference_engine."
_POLICY = "trainer.policy."

NOT_YET: tuple[NotYet, ...] = (
    # learners
    NotYet("trainer.sequence_parallel_backend", "sequence parallelism"),
    NotYet(_POLICY + "sequence_parallel_size", "sequence parallelism", (1,)),
    NotYet(_POLICY + "model.lora.lora_sync_path", "sending adapters on their own"),
    NotYet(_POLICY + "megatron_config", "Megatron learners"),
    NotYet(_POLICY + "use_torch_compile", "torch.compile", (False,)),
    NotYet(_POLICY + "record_memory", "memory snapshots", (False,)),
    NotYet(_POLICY + "model_config_kwargs", "overriding the model's own configuration", (FrozenDict(),)),
    NotYet("trainer.ref.model.lora", "adapters of a reference"),
    NotYet("trainer.ref.sequence_parallel_size", "sequence parallelism", (1,)),
    NotYet("trainer.ref.megatron_config", "Megatron learners"),
    NotYet("trainer.ref.model_config_kwargs", "overriding the model's own configuration", (FrozenDict(),)),
    NotYet("trainer.critic.model.lora.lora_sync_path", "sending adapters on their own"),
    NotYet("trainer.critic.sequence_parallel_size", "sequence parallelism", (1,)),
    NotYet("trainer.critic.model_config_kwargs", "overriding the model's own configuration", (FrozenDict(),)),
    NotYet("trainer.rope_scaling", "rotary embeddings other than the model's own", (None,)),
    NotYet("trainer.rope_theta", "rotary embeddings other than the model's own", (None,)),
    # the loop
    NotYet("trainer.logger", "trackers other than the console", ("console", ("console",))),
    NotYet("trainer.dump_data_batch", "dumping training batches", (False,)),
    # rollouts
    NotYet("generator.rope_scaling", "rotary embeddings other than the model's own", (None,)),
    NotYet("generator.rope_theta", "rotary embeddings other than the model's own", (None,)),
    NotYet("generator.sampling_params.logprobs", "engines that can leave log-probabilities out"),
    NotYet("generator.eval_sampling_params.logprobs", "engines that can leave log-probabilities out"),
    # engines
    NotYet(_ENGINE + "run_engines_locally", "engines of others", (True,)),
    NotYet(_ENGINE + "external_proxy_url", "engines of others", (None,)),
    NotYet(_ENGINE + "external_server_urls", "engines of others", (None,)),
    NotYet(_ENGINE + "remote_urls", "engines of others", ((),)),
    NotYet(_ENGINE + "enable_http_endpoint", "the HTTP endpoint", (False,)),
    *(
        NotYet(_ENGINE + name, "the HTTP endpoint")
        for name in ("served_model_name", "http_endpoint_host", "http_endpoint_port")
    ),
    NotYet(_ENGINE + "override_existing_update_group", "engines of others"),
    NotYet(_ENGINE + "fully_sharded_loras", "sending adapters on their own", (False,)),
)

VALUES_NOT_YET: tuple[NotYet, ...] = (
    NotYet("trainer.strategy", "Megatron learners", ("fsdp", "fsdp2", "deepspeed")),
    NotYet(_ENGINE + "backend", "engines of others", ("torch", "vllm")),
    NotYet(_ENGINE + "weight_sync_backend", "sending the differences alone", ("nccl", "gloo", "disk")),
)
"""Fields that components read, with values that none does yet."""


SUPERVISED_NOT_YET: tuple[NotYet, ...] = (
    NotYet("model.lora.lora_sync_path", "sending adapters on their own"),
    NotYet("project_name", "trackers other than the console"),
)
"""The same of supervised runs."""


def not_yet_of(root: type[RunConfig]) -> tuple[NotYet, ...]:
    """The table of this kind of run."""
    return NOT_YET if issubclass(root, SkyRLTrainConfig) else SUPERVISED_NOT_YET


def paths_not_read(root: type[RunConfig] = SkyRLTrainConfig) -> tuple[str, ...]:
    """Every leaf of the tree that the table covers."""
    table = not_yet_of(root)
    return tuple(path for path, _ in leaf_paths(root) if any(_covers(entry.path, path) for entry in table))


def _covers(entry: str, path: str) -> bool:
    return path == entry or path.startswith(entry + ".")


def _spelled(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if value in ((), FrozenDict()):
        return "empty"
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)
