"""How a run handles interruption, stalls and non-finite values."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from skyrl.config.foundation.entry import BaseConfig
from skyrl.tree import FREE, field, frozen
from skyrl.tree.types import Seconds
from skyrl.tree.validators import non_negative, positive, rule_of_one_field


def _is_time(value: float | str) -> bool:
    if not isinstance(value, str):
        return value > 0
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return False
    return True


@frozen
class FaultsConfig(BaseConfig):
    """Handling of signals, deadlines, stalls and non-finite values; see docs/faults.md."""

    stop_before: Seconds | str | None = field(
        default=None,
        validator=rule_of_one_field(_is_time, 'a time ("3h"), or a moment ("2026-11-22T06:00+01:00")'),
        metadata=FREE,
    )
    """Save and end with exit code 75 before this: a duration from the start of the command, or a point in time in ISO
    8601 (without a zone, in that of the machine). A step that, judged by earlier ones, would not finish in time is not
    started. None: the run ends when it is finished."""

    grace_period_seconds: Seconds = field(default=30.0, validator=positive, metadata=FREE)
    """Seconds that a run asked to stop (SIGTERM, Ctrl-C, `stop_before`) may take to save its state; after that it ends
    with what was saved before. Set it below the time that the queue grants."""

    stall_timeout_seconds: Seconds | None = field(default=1800.0, validator=positive, metadata=FREE)
    """Seconds without progress (no phase, call or sample ends) after which the stacks of all processes are written,
    with what each waits for. None: no watchdog."""

    on_stall: Literal["warn", "stop"] = field(default="warn", metadata=FREE)
    """Action after a stall, besides writing the stacks: a warning, or the end of the run."""

    on_non_finite: Literal["skip", "abort", "roll_back"] = field(default="skip", metadata=FREE)
    """Policy for a reward, log-probability, advantage, loss, gradient, learning rate or weight that is NaN or infinite.
    skip: leave out the step, or only the update, as long as no weight was changed; abort: end the run; roll_back:
    return to the last checkpoint and continue with the prompts after this batch."""

    max_skipped_steps: int = field(default=3, validator=non_negative, metadata=FREE)
    """Maximum number of consecutive steps skipped (`on_non_finite = "skip"`) before the run ends. Updates skipped
    because of their gradient are counted by `optimizer_config.max_skipped_updates`."""

    max_roll_backs: int = field(default=2, validator=positive, metadata=FREE)
    """Maximum number of times that a session rolls back (`on_non_finite = "roll_back"`) before the run ends."""

    on_lost_rank: Literal["stop", "wait", "shrink"] = field(default="stop", metadata=FREE)
    """Policy when a rank of a model or its machine dies, or the last engine does and is not started again
    (`max_engine_restarts`). stop: the run ends; wait: the run restarts from the last checkpoint once the cluster has
    its GPUs again; shrink: the run restarts from the last checkpoint with the next smaller number of ranks that passes
    every check, and with fewer engines where they share GPUs with the models."""

    max_lost_ranks: int = field(default=3, validator=positive, metadata=FREE)
    """Maximum number of restarts of one command after lost ranks (`on_lost_rank`)."""

    lost_rank_timeout_seconds: Seconds = field(default=1800.0, validator=positive, metadata=FREE)
    """Maximum seconds to wait for the GPUs of a lost rank to come back (`on_lost_rank = "wait"`); after that the run
    ends."""
