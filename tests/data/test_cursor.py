from __future__ import annotations

from collections.abc import Sequence

import pytest
from attrs import evolve

from skyrl.data.cursor import PromptCursor, Tail, batches, batches_before, ends_before
from skyrl.data.prompt_facts import facts_of
from skyrl.errors import ResumeError
from skyrl.trajectory import Prompt


def prompts(count: int) -> list[Prompt]:
    return [Prompt(id=str(n), messages=(), token_ids=(n,), env_class="gsm8k") for n in range(count)]


def ids(cursor: PromptCursor, batches: int) -> list[list[str]]:
    return [[prompt.id for prompt in cursor.take()] for _ in range(batches)]


def test_an_epoch_takes_each_prompt_at_most_once_and_fills_every_batch() -> None:
    cursor = PromptCursor(prompts(10), batch_size=3, seed=1)
    names = [name for batch in ids(cursor, 3) for name in batch]
    assert len(names) == len(set(names)) == 9
    assert cursor.epoch == 1


def test_epochs_differ_in_order_and_seeds_do_too() -> None:
    first = PromptCursor(prompts(12), batch_size=12, seed=1)
    assert ids(first, 1) != ids(first, 1)
    assert ids(PromptCursor(prompts(12), 12, seed=1), 1) != ids(PromptCursor(prompts(12), 12, seed=2), 1)


def test_a_cursor_goes_on_where_another_stopped() -> None:
    uninterrupted, stopped = PromptCursor(prompts(10), 3, seed=5), PromptCursor(prompts(10), 3, seed=5)
    expected = ids(uninterrupted, 8)
    ids(stopped, 4)
    resumed = PromptCursor(prompts(10), 3, seed=5)
    resumed.load_state(stopped.state())
    assert ids(resumed, 4) == expected[4:]


def test_a_cursor_does_not_go_on_through_other_data() -> None:
    cursor = PromptCursor(prompts(10), 3, seed=5)
    cursor.take()
    with pytest.raises(ResumeError, match="the training data is not what it was"):
        PromptCursor(list(reversed(prompts(10))), 3, seed=5).load_state(cursor.state())


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (prompts(99), r"There were 100 prompts, and now there are 99\. Restore"),
        ((*prompts(100)[:50], prompts(1)[0], *prompts(100)[51:]), r"among those from 48 to 51\. Restore"),
        (list(reversed(prompts(100))), r"among those from 0 to 3, and in 24 more of 25 parts\. Restore"),
    ],
)
def test_what_changed_in_the_data_is_said(now: Sequence[Prompt], message: str) -> None:
    with pytest.raises(ResumeError, match=message):
        PromptCursor(now, 3, seed=5).load_state(PromptCursor(prompts(100), 3, seed=5).state())


def test_an_epoch_that_carries_its_tail_over_leaves_nothing_out() -> None:
    cursor = PromptCursor(prompts(10), batch_size=4, seed=1, tail="carry")
    names = [name for batch in ids(cursor, 5) for name in batch]  # two epochs
    assert sorted(names[:10]) == sorted(names[10:]) == sorted(map(str, range(10)))
    assert (cursor.epoch, cursor.left_out) == (2, 0)


def test_the_last_batch_of_an_epoch_may_be_short() -> None:
    cursor = PromptCursor(prompts(10), batch_size=4, seed=1, tail="short")
    names = ids(cursor, 4)
    assert [len(batch) for batch in names] == [4, 4, 2, 4]
    assert sorted(name for batch in names[:3] for name in batch) == sorted(map(str, range(10)))
    assert (cursor.epoch, cursor.left_out, batches(10, 4, 3, "short")) == (1, 0, (9, 0))


def test_batches_within_a_number_of_samples_end_before_it() -> None:
    assert [batches_before(samples, 10, 4, "short") for samples in (3, 8, 9, 10, 13, 14, 20)] == [0, 2, 2, 3, 3, 4, 6]
    assert [batches_before(samples, 10, 4, "drop") for samples in (8, 9, 20)] == [2, 2, 5]


def test_what_epochs_leave_out_is_counted() -> None:
    cursor = PromptCursor(prompts(10), batch_size=4, seed=1)
    counts = []
    for _ in range(5):
        cursor.take()
        counts.append(cursor.left_out)
    assert counts == [0, 2, 2, 4, 4]
    assert batches(10, 4, 3, "drop") == (6, 6)
    assert batches(10, 4, 3, "carry") == (7, 2)


def test_a_label_that_was_changed_is_other_data() -> None:
    one = prompts(3)
    other = [evolve(one[0], extras={"reward_spec": {"ground_truth": "5"}}), *one[1:]]
    assert facts_of(one).content == facts_of(prompts(3)).content
    assert facts_of(one).content != facts_of(other).content


@pytest.mark.parametrize(
    ("most", "epochs", "tail", "text"),
    [
        (80, 1, "drop", "64 of the 80 steps: the data ends after epochs = 1 (1,030 rows / 16)"),
        (80, 1, "short", "65 of the 80 steps: the data ends after epochs = 1 (1,030 rows / 16)"),
        (80, 2, "drop", ""),
        (64, 1, "drop", ""),
        (None, 1, "drop", ""),
        (80, 0, "drop", ""),
    ],
)
def test_steps_that_the_data_does_not_last_for_are_told(most: int | None, epochs: int, tail: Tail, text: str) -> None:
    assert ends_before(most, 1_030, 16, ("epochs", epochs), tail) == text
