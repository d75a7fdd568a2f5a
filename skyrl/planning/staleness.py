"""The number of groups that a run may start sampling, so that none is trained on too late."""

from __future__ import annotations


def room_for_groups(*, concurrency: int, running: int, accepted: int, version: int, staleness: int, batch: int) -> int:
    """Groups that may be started now; 0 or less where none may.

    `min(concurrency - running, (staleness + version + 1) * batch - (accepted + running))`: with `version` the number of
    updates that the engines' weights have behind them, `accepted` every group that was ever kept, trained on or not,
    and `batch` the groups of a training step. AReaL, arXiv:2505.24298, equation 3; SkyRL counts steps from 1, which is
    the same.
    """
    return min(concurrency - running, (staleness + version + 1) * batch - (accepted + running))
