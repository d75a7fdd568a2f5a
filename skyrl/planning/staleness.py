"""The number of groups that a run may start sampling without exceeding the staleness limit."""

from __future__ import annotations


def room_for_groups(*, concurrency: int, running: int, accepted: int, version: int, staleness: int, batch: int) -> int:
    """Number of groups that may be started now; 0 or less if none may.

    `min(concurrency - running, (staleness + version + 1) * batch - (accepted + running))`, where `version` is the
    number of updates in the engines' weights, `accepted` the number of groups ever kept, trained on or not, and `batch`
    the number of groups in a training step. AReaL, arXiv:2505.24298, equation 3; SkyRL counts steps from 1, which is
    equivalent.
    """
    return min(concurrency - running, (staleness + version + 1) * batch - (accepted + running))
