"""Everything that is tried against each tier, and the table of it in SECURITY.md."""

from __future__ import annotations

from skyrl.sandbox.sandbox import why_unavailable
from skyrl.sandbox.tiers import TIERS
from tests.sandbox.endless import HOARDS, NEVER_END
from tests.sandbox.escapes import ESCAPES
from tests.sandbox.forgeries import CALLED, READING
from tests.sandbox.kernel_escapes import KERNEL_ESCAPES

HERE = [tier for tier in TIERS if not why_unavailable(tier)]
"""The tiers that this machine has: every attack runs over all of them."""

ALL_ESCAPES = {**ESCAPES, **KERNEL_ESCAPES}
FORGERIES = {**CALLED, **READING}

ATTACKS = len(ALL_ESCAPES) + len(HOARDS) + len(NEVER_END) + len(FORGERIES)


def table() -> str:
    """The table as SECURITY.md has it."""
    lines = ["| what a program wants | `process` | `namespace` | `bwrap` |", "|---|---|---|---|"]
    lines += [f"| {escape} | {' | '.join(verdicts)} |" for escape, (_, verdicts) in ALL_ESCAPES.items()]
    lines += [_row(f"more memory than its limit, {where}", "ended") for where in HOARDS]
    lines += [_row("more memory than its limit, for less than 20 ms", "only with a control group")]
    lines += [_row(f"never to end: {kind}", "ended") for kind in NEVER_END]
    lines += [_row(f"a reward for {kind}", "no reward") for kind in FORGERIES]
    return "\n".join(lines)


def _row(escape: str, verdict: str) -> str:
    return f"| {escape} | {' | '.join([verdict] * 3)} |"
