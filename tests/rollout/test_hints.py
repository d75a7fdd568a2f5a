"""Hints: what a teacher reads before an answer, and what stays as the policy sampled it."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from skyrl.batch import TEACHER_PROMPT
from skyrl.config import HintConfig
from skyrl.envs import Env, EnvStep
from skyrl.envs.reward_functions import PlainReward
from skyrl.errors import DataError, RunError
from skyrl.rollout.hints import Hints, with_hints
from skyrl.training.collate import collate
from skyrl.training.teacher import hinted_share, teacher_view
from skyrl.trajectory import TrajectoryGroup
from tests.rollout.chats import Says, chat_tokenizer, generator, play, prompt

TOKENIZER = chat_tokenizer()


class Says7(Env):
    """One turn; it tells a teacher what was wrong, and a right answer nothing."""

    def step(self, action: str) -> EnvStep:
        right = action == "7"
        return EnvStep(reward=float(right), done=True, feedback=None if right else f"{action} is wrong")


def scored(completion: str, ground_truth: str = "", **columns: Any) -> dict[str, Any]:
    return {"reward": 0.5, "length": 1.0, "feedback": f"not {completion}"}


async def group(*answers: str, **extras: Any) -> TrajectoryGroup:
    """One group with these answers, of which 7 is right."""
    engine = Says(TOKENIZER, *([answer] for answer in answers))
    task_prompt = prompt(TOKENIZER, f"{__name__}:Says7", "3+4?", **extras)
    gym_generator = generator(engine, TOKENIZER)
    gym_generator._user_env_class = f"{__name__}:Says7"
    trajectory_group: TrajectoryGroup
    [trajectory_group] = await play(gym_generator, task_prompt, samples=len(answers))
    return trajectory_group


def read(trajectory_group: TrajectoryGroup) -> list[str]:
    """The text that a teacher reads for each row, answer included."""
    batch = teacher_view(collate([trajectory_group]))
    return [TOKENIZER.decode(ids[:length]) for ids, length in zip(batch.input_ids, batch.lengths.tolist(), strict=True)]


def hints(source: Any, **others: Any) -> Hints:
    settings = HintConfig(source=source, column="extra_info.solution", template="{prompt} ({hint})")
    return Hints(settings=settings, tokenizer=TOKENIZER, **others)


async def test_a_hint_of_the_row_stands_in_the_prompt_that_the_teacher_alone_reads() -> None:
    original = await group("7", "12", extra_info={"solution": "count on {prompt} fingers"})
    [hinted_group] = hints("column")([original])
    prompt_text = "<|im_start|>user\n3+4? (count on {prompt} fingers)<|im_end|>\n<|im_start|>assistant\n"
    assert read(hinted_group) == [f"{prompt_text}7<|im_end|>", f"{prompt_text}12<|im_end|>"]
    batch = collate([hinted_group])
    view = teacher_view(batch)
    assert batch.pick(batch.input_ids).tolist() == view.pick(view.input_ids).tolist()  # the same tokens are scored
    assert [row.response_ids for row in hinted_group.trajectories] == [
        row.response_ids for row in original.trajectories
    ]
    assert [row.prompt_ids for row in hinted_group.trajectories] == [row.prompt_ids for row in original.trajectories]
    assert hinted_share(batch) == 1.0


async def test_an_answer_that_failed_is_shown_another_one_that_did_not() -> None:
    [hinted_group] = hints("success")([await group("5", "7", "6")])
    assert ["(7)" in text for text in read(hinted_group)] == [True, False, True]
    assert hinted_share(collate([hinted_group])) == pytest.approx(2 / 3)
    [both] = hints("success")([await group("5", "7", "7")])
    assert all("(7)" in text for text in read(both))  # of two that are right, each sees the other
    [alike] = hints("success")([await group("5", "6")])
    assert hinted_share(collate([alike])) == 0.0


async def test_what_the_environment_says_of_an_answer_is_a_hint() -> None:
    [hinted_group] = hints("feedback")([await group("5", "7")])
    wrong, right = read(hinted_group)
    assert "3+4? (5 is wrong)" in wrong and "(" not in right
    step = PlainReward(scored)({"reward_spec": {"ground_truth": "y"}}).step("x")
    assert (step.reward, step.feedback, step.components) == (0.5, "not x", {"length": 1.0})


async def test_a_hint_that_leaves_no_room_for_the_answer_is_left_out() -> None:
    original = await group("7", extra_info={"solution": "count"})
    row = original.trajectories[0]
    length = len(row.prompt_ids) + len(" (count)") + len(row.response_ids)
    for positions, share in ((length, 1.0), (length - 1, 0.0)):
        [hinted_group] = hints("column", positions=positions)([original])
        assert hinted_share(collate([hinted_group])) == share


@pytest.mark.parametrize("extras", [{}, {"extra_info": {"solution": None}}, {"extra_info": {"solution": ""}}])
async def test_a_row_without_a_hint_is_read_as_it_was_sampled(extras: dict[str, Any]) -> None:
    original = await group("7", **extras)
    [hinted_group] = hints("column")([original])
    assert hinted_share(collate([hinted_group])) == 0.0
    assert hinted_group.trajectories[0].extras[TEACHER_PROMPT].shape == (len(original.trajectories[0].prompt_ids),)


async def test_hints_that_cannot_be_put_in_are_refused_in_words() -> None:
    original = await group("7", extra_info={"solution": ["a"]})
    with pytest.raises(DataError, match=r"prompt p: column extra_info.solution .* is no text, but \['a'\]"):
        hints("column")([original])
    of_system = evolve(original.prompt, messages=({"role": "system", "content": "3+4?"},))
    with pytest.raises(DataError, match="prompt p has no text of the user, into which a hint could be put"):
        hints("success")([evolve(await group("5", "7"), prompt=of_system)])
    other = evolve(original.prompt, messages=({"role": "user", "content": "3 plus 4?"},))
    with pytest.raises(RunError, match="the policy read other tokens than its row has, as an environment that"):
        hints("success")([evolve(await group("5", "7"), prompt=other)])
    with pytest.raises(DataError, match=r"has no column 'extra_info', which .*hint.column names; .* are answer, level"):
        hints("column").refuse_missing([["level"], ["answer"]])
    hints("success").refuse_missing([])


async def test_batches_pass_unchanged_where_the_teacher_reads_what_the_policy_reads() -> None:
    async def next_batch(version: int) -> tuple[TrajectoryGroup, ...]:
        return (await group("7", extra_info={"solution": "count"}),)

    assert with_hints(next_batch, None) is next_batch
    [hinted_group] = await with_hints(next_batch, hints("column"))(0)
    assert hinted_share(collate([hinted_group])) == 1.0
