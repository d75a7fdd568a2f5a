"""Where a turn ends: ends that are withdrawn or added, measures at the end alone, and answers that did not stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from attrs import evolve

from skyrl.config import SkyRLGymConfig, load, resolve
from skyrl.data.group_lines import as_object, group_of
from skyrl.envs import Env, EnvStep, register
from skyrl.envs.group_rewards import GroupReward
from skyrl.tracking.jsonlines import sample_records
from tests.rollout.chats import Counts, Says, chat_tokenizer, generator, play, prompt

TOKENIZER = chat_tokenizer()


class Measured(Counts):
    """Counts how often it is measured."""

    asked = 0

    def get_metrics(self) -> dict[str, float]:
        self.asked += 1
        return {"asked": float(self.asked)}


class StepsWrongly(Env):
    """Returns a number in the place of a step."""

    def step(self, action: str) -> Any:
        return 1.0


register("tests-measured", Measured)
register("tests-steps-wrongly", StepsWrongly)
register("tests-pays-all-2", GroupReward(lambda completions, **columns: [2.0] * len(completions)))


async def text_of(*turns: str, **config: Any) -> str:
    """What was sampled and placed, as text."""
    (group,) = await play(generator(Says(TOKENIZER, turns), TOKENIZER, **config), prompt(TOKENIZER, "tests-measured"))
    return str(TOKENIZER.decode(group.trajectories[0].response_ids))


@pytest.mark.parametrize(
    ("turns", "text"),
    [
        (("ab<|im_end|>", "c<|im_end|>", "d"), "absaw abcsaw cd"),
        (("ab", "c", "d"), "absaw abcsaw cd"),
        (("ab", "", "d"), "absaw absaw d"),
    ],
)
async def test_in_one_message_an_end_is_withdrawn_and_nothing_else(turns: Sequence[str], text: str) -> None:
    assert await text_of(*turns, use_conversation_multi_turn=False) == text


@pytest.mark.parametrize("most", [2, 3])
async def test_the_last_turn_is_closed_where_a_stop_text_ended_it_however_few_turns_there_are(most: int) -> None:
    assert (await text_of("a", "b", "c", max_turns=most)).endswith("abc"[most - 1] + "<|im_end|>")


async def test_an_environment_is_measured_once_when_the_episode_is_over() -> None:
    engine = Says(TOKENIZER, ["a<|im_end|>"] * 3)
    (group,) = await play(generator(engine, TOKENIZER), prompt(TOKENIZER, "tests-measured"))
    assert (len(engine.requests), group.trajectories[0].metrics) == (3, {"asked": 1.0})


async def test_what_is_no_step_is_shown_though_other_turns_would_follow() -> None:
    gym = SkyRLGymConfig(max_failed_share=1.0, max_attempts=1)
    gym_generator = generator(Says(TOKENIZER, ["a"]), TOKENIZER, gym, max_turns=5)
    (group,) = await play(gym_generator, prompt(TOKENIZER, "tests-steps-wrongly"))
    (failure,) = group.trajectories[0].failures
    assert failure.kind == "wrong_type"
    assert "returned 1.0 from step() instead of an EnvStep" in failure.reason


@pytest.mark.parametrize(
    ("stop_reason", "zeroed", "reward"),
    [("stop", True, 2.0), ("length", True, 0.0), ("length", False, 2.0), ("stop", False, 2.0)],
)
async def test_a_group_reward_is_denied_to_an_answer_that_was_cut_off_where_that_is_asked_for(
    stop_reason: str, zeroed: bool, reward: float
) -> None:
    engine = Says(TOKENIZER, ["a"], ["b"], stop_reason=stop_reason)
    gym_generator = generator(engine, TOKENIZER, max_turns=1, zero_reward_on_non_stop=zeroed)
    (group,) = await play(gym_generator, prompt(TOKENIZER, "tests-pays-all-2"), samples=2)
    assert group.rewards == (reward, reward)


class GoesOn(Env):
    """Never ends, and replies as long as its prompt says."""

    def step(self, action: str) -> EnvStep:
        observations = ({"role": "user", "content": "o" * self.extras["reply"]},)
        return EnvStep(reward=0.0, done=False, observations=observations)


register("tests-goes-on", GoesOn)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("reply", [0, 7, 40])
@pytest.mark.parametrize("answer", [1, 11, 30])
@pytest.mark.parametrize("longest", [64, 100, 200])
@pytest.mark.parametrize("settings", [{}, {"use_conversation_multi_turn": False}, {"step_wise_trajectories": True}])
async def test_no_sequence_of_several_turns_is_longer_than_the_derived_length(
    reply: int, answer: int, longest: int, settings: dict[str, Any]
) -> None:
    lengths = {"generator.max_input_length": longest, "generator.sampling_params.max_generate_length": answer}
    run = resolve(load([], {**lengths, "generator.max_turns": 5}))
    engine = Says(TOKENIZER, ["a" * answer] * 5, stop_reason="length")  # every answer is as long as it may be
    gym_generator = generator(engine, TOKENIZER, max_turns=5, max_input_length=longest, **settings)
    (group,) = await play(gym_generator, prompt(TOKENIZER, "tests-goes-on", reply=reply))
    (trajectory,) = group.trajectories
    samples = [*trajectory.earlier, trajectory]
    sizes = [len(sample.prompt_ids) + len(sample.response_ids) for sample in samples]
    assert run.trainer.algorithm.max_seq_len == longest + answer
    assert max(sizes) <= longest + answer
    assert sum(sum(sample.loss_mask) for sample in samples) >= answer


async def test_an_answer_that_was_never_begun_is_not_compared_with_its_group() -> None:
    gym_generator = generator(Says(TOKENIZER, ["a"]), TOKENIZER, max_turns=1, max_input_length=3)
    (group,) = await play(gym_generator, prompt(TOKENIZER, "tests-pays-all-2"))
    assert (group.rewards, group.trajectories[0].failures, group.dropped) == ((0.0,), (), False)


class Parts(Counts):
    """Reports what each turn was worth, and once what is no number."""

    def step(self, action: str) -> EnvStep:
        part: Any = "much" if action == "bad" else 0.5
        return evolve(super().step(action), components={"turns": part})


register("tests-parts", Parts)


async def test_parts_of_the_reward_are_summed_over_turns_and_stored_with_the_trajectory() -> None:
    engine = Says(TOKENIZER, ["a<|im_end|>"] * 3)
    (group,) = await play(generator(engine, TOKENIZER), prompt(TOKENIZER, "tests-parts"))
    (trajectory,) = group.trajectories
    assert (trajectory.reward, trajectory.components) == (6.0, {"turns": 1.5})
    (record,) = sample_records(1, [group], TOKENIZER.decode)
    assert record["components"] == {"turns": 1.5}
    assert group_of(as_object(group)) == group, "a recording keeps them"


async def test_a_part_of_the_reward_that_is_no_number_is_a_failure() -> None:
    gym = SkyRLGymConfig(max_failed_share=1.0, max_attempts=1)
    gym_generator = generator(Says(TOKENIZER, ["bad<|im_end|>"]), TOKENIZER, gym)
    (group,) = await play(gym_generator, prompt(TOKENIZER, "tests-parts"))
    assert "measured turns = 'much', which is a text, not a finite number" in group.trajectories[0].failures[0].reason
