"""Laws of which checkpoints stay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from skyrl.checkpoint.store import Retention

STEPS = st.lists(st.integers(1, 200), min_size=1, max_size=30, unique=True)
RULES = st.builds(
    Retention,
    last=st.one_of(st.just(-1), st.integers(1, 5)),
    every=st.one_of(st.just(-1), st.integers(1, 40)),
    best=st.one_of(st.just(-1), st.integers(1, 5)),
    metric=st.just("score"),
    larger_is_better=st.booleans(),
)
VALUES = st.dictionaries(st.integers(1, 200), st.floats(-1, 1), max_size=40)


@given(STEPS, RULES, VALUES)
def test_the_newest_always_stays(steps: list[int], rules: Retention, values: dict[int, float]) -> None:
    assert max(steps) in rules.steps_to_keep(steps, values)


@given(STEPS, RULES, VALUES)
def test_what_one_rule_keeps_all_together_keep(steps: list[int], rules: Retention, values: dict[int, float]) -> None:
    kept = rules.steps_to_keep(steps, values)
    assert kept <= set(steps)
    assert set(sorted(steps)[-rules.last :] if rules.last > 0 else steps) <= kept
    assert {step for step in steps if rules.every > 0 and step % rules.every == 0} <= kept
    if rules.last > 0 and rules.best > 0:
        existing = [step for step in steps if step in values]
        left_out = [values[step] for step in existing if step not in kept]
        stayed = sorted((values[step] for step in existing if step in kept), reverse=rules.larger_is_better)
        if left_out:
            worst_of_best = stayed[rules.best - 1]
            assert worst_of_best >= max(left_out) if rules.larger_is_better else worst_of_best <= min(left_out)


@given(STEPS, RULES, VALUES)
def test_deleting_again_deletes_nothing_more(steps: list[int], rules: Retention, values: dict[int, float]) -> None:
    kept = rules.steps_to_keep(steps, values)
    assert rules.steps_to_keep(sorted(kept), values) == kept
