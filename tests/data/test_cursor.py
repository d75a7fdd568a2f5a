from __future__ import annotations

import pytest

from skyrl.data.cursor import PromptCursor
from skyrl.errors import ResumeError
from skyrl.trajectory import Prompt


def prompts(count: int) -> list[Prompt]:
    return [Prompt(id=str(n), messages=(), token_ids=(n,), env_class="gsm8k") for n in range(count)]


def ids(cursor: PromptCursor, batches: int) -> list[list[str]]:
    return [[prompt.id for prompt in cursor.take()] for _ in range(batches)]


def test_an_epoch_takes_each_prompt_at_most_once_and_fills_every_batch() -> None:
    cursor = PromptCursor(prompts(10), batch_size=3, seed=1)
    taken = [name for batch in ids(cursor, 3) for name in batch]
    assert len(taken) == len(set(taken)) == 9
    assert cursor.epoch == 1


def test_epochs_differ_in_order_and_seeds_do_too() -> None:
    first = PromptCursor(prompts(12), batch_size=12, seed=1)
    assert ids(first, 1) != ids(first, 1)
    assert ids(PromptCursor(prompts(12), 12, seed=1), 1) != ids(PromptCursor(prompts(12), 12, seed=2), 1)


def test_a_cursor_goes_on_where_another_stopped() -> None:
    whole, stopped = PromptCursor(prompts(10), 3, seed=5), PromptCursor(prompts(10), 3, seed=5)
    expected = ids(whole, 8)
    ids(stopped, 4)
    resumed = PromptCursor(prompts(10), 3, seed=5)
    resumed.load_state(stopped.state())
    assert ids(resumed, 4) == expected[4:]


def test_a_cursor_does_not_go_on_through_other_data() -> None:
    taken = PromptCursor(prompts(10), 3, seed=5)
    taken.take()
    with pytest.raises(ResumeError, match="the training data is not what it was"):
        PromptCursor(list(reversed(prompts(10))), 3, seed=5).load_state(taken.state())
