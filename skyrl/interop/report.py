"""The conversion report: the outcome of every line of a foreign file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

from attrs import field, frozen

from skyrl.config.foundation.entry import RunConfig
from skyrl.errors import Problem
from skyrl.tree.masking import masked
from skyrl.tree.types import display_value

Outcome = Literal["kept", "renamed", "derived", "needless", "not yet", "refused"]
"""kept: under its own name; renamed: under ours; derived: follows from the rest, so omitted; needless: matches the
built-in behaviour; not yet: needs a missing capability; refused: has no equivalent here, or no valid value."""

_HEADS: dict[Outcome, str] = {
    "kept": "kept",
    "renamed": "renamed",
    "derived": "omitted (derived from other settings)",
    "needless": "omitted (no setting needed)",
    "not yet": "refused (not implemented yet)",
    "refused": "refused",
}

_ONLY_AROUND_THE_TRAINING = (
    # SkyRL
    "hydra.*", "*torch_profiler_config*", "*.record_memory", "trainer.tags", "tags", "*enable_ray_gpu_monitor",
    "trainer.log_example_interval", "trainer.print_example_interval", "trainer.num_logger_*", "logger",
    "*.use_expandable_segments", "*.offload_kv_for_weight_sync", "trainer.dump_*",
    "*run_name", "*project_name",
    # AReaL
    "launcher.*", "scheduler.*", "*scheduling_spec*", "*scheduling_strategy*", "perf_tracer*", "*memory_profiler*",
    "stats_logger*", "*wandb.*", "tensorboard.*", "cpus_per_*", "mem_per_*", "*.log_agent_stats*",
    "rollout.dump_to_file", "rollout.enable_rollout_tracing", "ray_temp_path", "metric_discovery_port", "mode",
    "recover_after", "n_rollout_workers", "*admin_api_key", "enable_offload", "cluster.*",
    # verl
    "*profiler.*", "trainer.logger", "trainer.experiment_name", "*.trace.*", "*.prometheus.*",
    "trainer.default_hdfs_dir",
    # TRL
    "report_to", "trackio_*", "logging_*", "push_to_hub*", "hub_*", "output_dir", "save_total_limit", "save_only_model",
)  # fmt: skip
"""Patterns of foreign settings that define how a run is started, placed or monitored, and do not change what it learns.
"""


@frozen(kw_only=True)
class Line:
    """One setting of the foreign file."""

    outcome: Outcome
    source: str
    """The setting's key in the foreign file."""

    value: Any = None
    targets: tuple[str, ...] = ()
    """Our paths to which its value was written."""

    reason: str = ""

    @property
    def is_refused(self) -> bool:
        """Whether the setting requests something but has no effect in the converted file."""
        return self.outcome in ("not yet", "refused")

    @property
    def changes_training(self) -> bool:
        """Whether the setting may change what is learned; assumed unless it is known to be harmless."""
        key = self.source.lstrip("+~")
        return not any(fnmatchcase(key, pattern) for pattern in _ONLY_AROUND_THE_TRAINING)


@frozen(kw_only=True)
class OtherDefault:
    """A setting that the foreign file omits and whose default differs here."""

    source: str
    """The setting's key in foreign files."""

    source_default: Any
    """The default in the foreign system."""

    path: str
    skyrl_default: Any
    """Our path and its value in the converted run."""


@frozen(kw_only=True)
class Conversion:
    """The result of a conversion: our tables, and the outcome of each foreign setting in the order of the file."""

    root: type[RunConfig]
    """The class of the tree for the kind of run that the file describes."""

    tables: Mapping[str, Any]
    """The content of the TOML file as nested plain data."""

    lines: tuple[Line, ...]
    """One line for each setting."""

    problems: tuple[Problem, ...]
    """Problems that `check` finds in the result, for the user to resolve."""

    cluster: Mapping[str, Any] = field(factory=dict)
    """The content of the description of the cluster (docs/launching.md) as nested plain data. Empty if the foreign file
    has no settings of machines."""

    defaults: tuple[Line, ...] = ()
    """Settings that the file omits, written with the defaults of the foreign system."""

    other_defaults: tuple[OtherDefault, ...] = ()
    """Settings that the file omits, whose default differs here, and that were not written."""

    notice: str = ""
    """A remark that comes first in the report: the program of a script is not known. Empty if there is none."""

    remarks: tuple[str, ...] = ()
    """Remarks on what the foreign system defines outside its files, and what therefore has to be supplied here."""

    def counts(self) -> dict[str, int]:
        """Number of settings with each outcome."""
        counted = Counter(line.outcome for line in self.lines)
        return {outcome: counted[outcome] for outcome in _HEADS if counted[outcome]}

    @property
    def refused(self) -> tuple[Line, ...]:
        """Settings that request something but have no effect in the converted file."""
        return tuple(line for line in self.lines if line.is_refused)

    @property
    def lost(self) -> tuple[Line, ...]:
        """Refused settings that change what is learned: without them the converted run is a different one."""
        return tuple(line for line in self.refused if line.changes_training)

    @property
    def share(self) -> float:
        """Share of the settings requesting something that have their effect in the converted files."""
        asking = [line for line in self.lines if line.outcome != "needless"]
        return 1 - len(self.refused) / len(asking) if asking else 1.0

    def headline(self) -> str:
        """The counts in one sentence."""
        counts = Counter(self.counts())
        refused = counts["refused"] + counts["not yet"]
        parts = [f"{outcome} {counts[outcome]}" for outcome in ("kept", "renamed", "derived", "needless")]
        details = [f"{counts['not yet']} not implemented yet"] if counts["not yet"] else []
        details += [f"{len(self.lost)} may change the training"] if self.lost else []
        return f"{', '.join(parts)}, refused {refused}" + (f" ({', '.join(details)})" if details else "")

    def in_result(self) -> str:
        """The share of settings that have their effect, in one sentence."""
        asking = sum(line.outcome != "needless" for line in self.lines)
        percent = int(self.share * 1000) / 10  # rounded down, so that 100 % means all
        return f"Of the {asking} settings that need a counterpart, {percent:g} % are in the result."

    def report(self) -> str:
        """The report as text: all settings that were not simply kept, grouped by outcome."""
        parts = [*([self.notice, ""] if self.notice else []), self.headline(), self.in_result()]
        sections = {
            head: [_row(line) for line in self.lines if line.outcome == outcome]
            for outcome, head in _HEADS.items()
            if outcome != "kept"
        }
        sections[f"not in the file, written with the original system's defaults ({len(self.defaults)})"] = [
            f"{line.source} = {display_value(line.value)}  ->  {', '.join(line.targets)}" for line in self.defaults
        ]
        sections[f"not in the file, with a different default here ({len(self.other_defaults)})"] = [
            f"{row.source} = {display_value(row.source_default)} there; "
            f"here {row.path} = {display_value(row.skyrl_default)}"
            for row in self.other_defaults
        ]
        for head, rows in sections.items():
            if rows:
                parts += ["", f"{head}:", *(f"  {row}" for row in rows)]
        parts += [line for remark in self.remarks for line in ("", remark)]
        return "\n".join(parts)

    def header(self) -> str:
        """Comment lines for the top of the converted file: the settings that it lacks."""
        rows = [f"#   {_row(line)}" for line in self.refused]
        return "\n".join(["# Refused by the conversion:", *rows, ""]) if rows else ""


def _row(line: Line) -> str:
    value = "" if line.outcome in ("renamed", "kept") else f" = {display_value(masked(line.value, line.source))}"
    targets = f"  ->  {', '.join(line.targets)}" if line.targets and line.outcome == "renamed" else ""
    row = f"{line.source}{value}{targets}" + (f"  ({line.reason})" if line.reason else "")
    return "".join(letter if letter.isprintable() else " " for letter in row)
