"""Converts what TRL's RLOO does in another way than its GRPO (trl/trainer/rloo_trainer.py of TRL 1.16.0).

Advantages are rewards less the mean of the others' (line 1690), and the KL penalty is part of the reward (line 1673).
The loss clips one ratio for a whole answer, the product of its tokens' (lines 1824-1832). skyrl has no such ratio, but
it is 1 where a batch has a single optimizer step: the loss is then the sum over an answer's tokens, averaged over
answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from skyrl.interop.translation import ALGORITHM, Dependent, Translation, Values, number, redundant, unsupported
from skyrl.interop.trl.batches import updates_per_batch

_RATIO = (
    "clipped ratios of whole answers, the product of their tokens'; with one optimizer step per batch there are none"
)


def _divergence(key: str, value: object, values: Values) -> Translation:
    weight = number(value)
    writes: dict[str, Any] = {ALGORITHM + "use_kl_loss": False}
    if weight:
        writes |= {ALGORITHM + "use_kl_in_reward": True, ALGORITHM + "kl_loss_coef": weight}
        writes |= {ALGORITHM + "kl_estimator_type": "k1"}
    return Translation(writes=writes)


def _clip(key: str, value: object, values: Values) -> Translation:
    return redundant("no effect: each batch has one optimizer step, so all ratios are 1")


def _several_updates(key: str, value: object, values: Values) -> Translation | None:
    return unsupported(_RATIO) if value is not None and updates_per_batch(values) > 1 else None


OF_RLOO: dict[str, Dependent] = {
    "beta": _divergence,
    "epsilon": _clip,
    "epsilon_high": _clip,
    **dict.fromkeys(("num_iterations", "steps_per_generation", "generation_batch_size"), _several_updates),
}


def implied_by_rloo() -> Iterator[tuple[str, str, Any]]:
    """Our paths that RLOO implies."""
    yield "rloo", ALGORITHM + "advantage_estimator", "rloo"
    yield "rloo", ALGORITHM + "policy_loss_type", "regular"
    yield "rloo", ALGORITHM + "loss_reduction", "seq_mean_token_sum_norm"
    yield "rloo", ALGORITHM + "max_seq_len", 1  # a sum: the mean over sequences of each one's sum divided by this
