"""Laws of the order of prompts: nothing is lost, shares are kept, and a resumed run goes on exactly."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from skyrl.data.cursor import PromptCursor, Tail, batches
from skyrl.data.order import Mixed, Shuffled, apportioned
from skyrl.errors import DataError
from skyrl.trajectory import Prompt

TAILS: tuple[Tail, ...] = ("drop", "carry")
SEEDS = st.integers(0, 2**32 - 1)
WEIGHTS = st.lists(st.floats(0.05, 20), min_size=1, max_size=5)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(id=str(n), messages=(), token_ids=(n,), env_class="e") for n in range(count)]


@st.composite
def cursors(draw: st.DrawFn) -> tuple[PromptCursor, PromptCursor]:
    """Two alike."""
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    count, seed = sum(sizes), draw(SEEDS)
    size, tail = draw(st.integers(1, count)), draw(st.sampled_from(TAILS))
    weights = draw(st.none() | st.lists(st.floats(0.5, 2), min_size=len(sizes), max_size=len(sizes)))
    assume(weights is None or 0 not in apportioned(count, weights))

    def made() -> PromptCursor:
        order = None if weights is None else Mixed(sizes, weights, seed)
        return PromptCursor(prompts(count), size, seed, order=order, tail=tail)

    return made(), made()


@given(cursors(), st.integers(0, 12), st.integers(0, 12))
def test_a_resumed_run_takes_the_batches_that_were_to_come(
    two: tuple[PromptCursor, PromptCursor], count: int, more: int
) -> None:
    original, resumed = two
    for _ in range(count):
        original.take()
    resumed.load_state(original.state())
    assert [resumed.take() for _ in range(more)] == [original.take() for _ in range(more)]
    assert (resumed.epoch, resumed.left_out) == (original.epoch, original.left_out)


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 4), SEEDS, st.sampled_from(TAILS))
def test_every_prompt_is_taken_once_in_an_epoch_or_counted(
    count: int, size: int, epochs: int, seed: int, tail: Tail
) -> None:
    assume(size <= count)
    cursor = PromptCursor(prompts(count), size, seed, tail=tail)
    steps, left_out = batches(count, size, epochs, tail)
    counts = Counter(prompt.id for _ in range(steps) for prompt in cursor.take())
    assert sum(counts.values()) + left_out == epochs * count
    assert max(counts.values()) <= epochs
    if tail == "drop":
        assert cursor.left_out == left_out
    else:
        assert min(counts[str(n)] for n in range(count)) >= epochs - 1
        assert left_out < size


@given(st.lists(st.integers(1, 15), min_size=2, max_size=4), st.data(), SEEDS, st.integers(1, 5))
def test_sources_keep_their_shares_and_repeat_nothing_before_all_was_taken(
    sizes: list[int], data: st.DataObject, seed: int, epochs: int
) -> None:
    weights = data.draw(st.lists(st.floats(0.2, 5), min_size=len(sizes), max_size=len(sizes)))
    assume(0 not in apportioned(sum(sizes), weights))
    order = Mixed(sizes, weights, seed)
    drawn = [index for epoch in range(epochs) for index in order.epoch(epoch).tolist()]
    assert len(drawn) == epochs * sum(sizes)
    first = 0
    for size, share in zip(sizes, order.shares, strict=True):
        own = Counter(index for index in drawn if first <= index < first + size)
        assert own.total() == epochs * share
        times = [own[index] for index in range(first, first + size)]
        assert max(times) - min(times) <= 1
        first += size


@given(st.integers(1, 10_000), WEIGHTS)
def test_parts_add_up_and_are_off_by_less_than_one(total: int, weights: list[float]) -> None:
    parts = apportioned(total, weights)
    assert sum(parts) == total
    assert all(abs(part - total * w / sum(weights)) < 1 for part, w in zip(parts, weights, strict=True))


@given(st.integers(2, 40), SEEDS)
def test_an_epoch_is_a_permutation_that_its_number_decides(count: int, seed: int) -> None:
    order = Shuffled(count, seed)
    assert sorted(order.epoch(3).tolist()) == list(range(count))
    assert order.epoch(3).tolist() == Shuffled(count, seed).epoch(3).tolist()


def test_a_source_that_could_never_be_drawn_is_refused() -> None:
    with pytest.raises(DataError, match="source 1 gets none of the 4 prompts"):
        Mixed([2, 2], [1000.0, 1.0], 0)
    with pytest.raises(DataError, match="source 0 of data.train_data has no prompt"):
        Mixed([0, 2], [1.0, 1.0], 0)
