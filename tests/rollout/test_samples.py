"""Samples of a group are played side by side, and keep out of each other's way."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from threading import Event, Lock
from typing import Any

import pytest

from skyrl.config import AlgorithmConfig, GeneratorConfig, InferenceEngineConfig, SamplingParams, SkyRLGymConfig
from skyrl.data.cursor import PromptCursor
from skyrl.envs import Env, EnvStep, register
from skyrl.envs.rows import capped_max_turns, max_turns
from skyrl.errors import RewardError, RunError
from skyrl.rollout.measures import measure
from skyrl.rollout.stream import StreamingRollouts, StreamLimits
from tests.rollout.chats import Counts, Says, chat_tokenizer, generator, play, prompt

TOKENIZER = chat_tokenizer()


class Marks(Env):
    """Changes its row and the first message in place, and pays for what it finds there."""

    def init(self, prompt: Any) -> Any:
        self.extras["table"]["seen"].append(1)
        prompt[0]["content"] += "!"
        return prompt, {}

    def step(self, action: str) -> EnvStep:
        return EnvStep(reward=float(len(self.extras["table"]["seen"])), done=True)


register("tests-marks", Marks)


async def test_what_an_environment_changes_in_its_row_or_prompt_no_other_sample_sees() -> None:
    engine = Says(TOKENIZER, ["a"], ["b"], ["c"])
    task_prompt = prompt(TOKENIZER, "tests-marks", table={"seen": []})
    (group,) = await play(generator(engine, TOKENIZER), task_prompt, samples=3)
    assert group.rewards == (1.0, 1.0, 1.0)
    assert {TOKENIZER.decode(row.prompt_ids).splitlines()[1] for row in group.trajectories} == {"go!<|im_end|>"}
    assert task_prompt.messages[0]["content"] == "go"
    assert task_prompt.extras == {"table": {"seen": []}}


class Together(Env):
    """Counts how many of its kind are at work at the same time."""

    lock, now, most = Lock(), 0, 0
    both = Event()

    def step(self, action: str) -> EnvStep:
        with self.lock:
            Together.now += 1
            Together.most = max(Together.most, Together.now)
            if Together.now == 2:
                self.both.set()
        self.both.wait(60)
        with self.lock:
            Together.now -= 1
        return EnvStep(reward=1.0, done=True)


register("tests-together", Together)


async def test_training_and_evaluation_share_the_workers_of_environments() -> None:
    """Each call has two samples at work: with a limit of their own, four would be at the same time."""
    gym_generator = generator(Says(TOKENIZER, *[["a"]] * 8), TOKENIZER, SkyRLGymConfig(max_env_workers=2))
    task_prompt = prompt(TOKENIZER, "tests-together")

    async def sample(purpose: str) -> None:
        await gym_generator.generate(
            [task_prompt], sampling=SamplingParams(), samples_per_prompt=8, weight_version=4, purpose=purpose
        )

    await asyncio.gather(sample("train"), sample("eval"), sample("baseline"))
    assert Together.most == 2


@pytest.mark.parametrize(
    ("row", "expected"),
    [({}, 4), ({"max_turns": 6}, 4), ({"max_turns": 2}, 2), ({"extra_info": {"max_turns": 6}}, 4)],
)
def test_an_environment_is_told_of_no_more_turns_than_it_has(row: Mapping[str, Any], expected: int) -> None:
    assert max_turns({**row, "max_turns": capped_max_turns(row, 4)}, default=9) == expected


class PaysAtTheEnd(Env):
    """Its only reward comes with the last turn that it was told of."""

    turns = 0

    def step(self, action: str) -> EnvStep:
        self.turns += 1
        done = self.turns == self.extras["max_turns"]
        return EnvStep(reward=float(done), done=done, observations=({"role": "user", "content": "?"},))


register("tests-pays-at-the-end", PaysAtTheEnd)


async def test_the_reward_of_the_last_turn_comes_though_the_row_wants_more_turns_than_there_are() -> None:
    gym_generator = generator(Says(TOKENIZER, ["a<|im_end|>"] * 9), TOKENIZER, max_turns=3)
    (group,) = await play(gym_generator, prompt(TOKENIZER, "tests-pays-at-the-end", max_turns=6))
    assert group.rewards == (1.0,)


class ClosesBadly(Counts):
    turns = 1

    def close(self) -> None:
        raise OSError("the door jams")


register("tests-closes-badly", ClosesBadly)


async def test_a_sample_that_was_judged_keeps_its_reward_though_its_environment_cannot_be_closed() -> None:
    gym_generator = generator(Says(TOKENIZER, ["a"], ["b"]), TOKENIZER)
    (group,) = await play(gym_generator, prompt(TOKENIZER, "tests-closes-badly"), samples=2)
    assert group.rewards == (1.0, 1.0)
    counts = measure([group])
    assert (counts["rollout/failures_close"], counts["rollout/replaced_samples"]) == (2, 0)


async def test_environments_that_can_never_be_closed_stop_the_run() -> None:
    gym_generator = generator(Says(TOKENIZER, *[["a"]] * 4), TOKENIZER)
    with pytest.raises(RewardError, match="closing after prompt p, raised OSError: the door jams"):
        await play(gym_generator, prompt(TOKENIZER, "tests-closes-badly"), samples=4)


class BeginsLate(Env):
    """The second of them begins when the first has been judged."""

    made, judged = 0, Event()

    def init(self, prompt: Any) -> Any:
        BeginsLate.made += 1
        if BeginsLate.made == 2:
            assert self.judged.wait(60), "the other sample waits for this one"
        return prompt, {}

    def step(self, action: str) -> EnvStep:
        self.judged.set()
        return EnvStep(reward=1.0, done=True)


register("tests-begins-late", BeginsLate)


async def test_an_environment_that_is_slow_to_begin_holds_up_no_other_of_its_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("skyrl.rollout.sampling_session.TOGETHER_SECONDS", 0.05)
    gym_generator = generator(Says(TOKENIZER, ["a"], ["b"]), TOKENIZER)
    (group,) = await play(gym_generator, prompt(TOKENIZER, "tests-begins-late"), samples=2)
    assert (group.rewards, [row.failures for row in group.trajectories]) == ((1.0, 1.0), [(), ()])
    assert [row.sample_index for row in group.trajectories] == [0, 1]


@pytest.mark.parametrize(("deterministic", "requests"), [(True, [3]), (False, [1, 1, 1])])
async def test_what_is_sampled_together_depends_on_no_time_where_equal_bits_are_promised(
    deterministic: bool, requests: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl.rollout.sampling_session.TOGETHER_SECONDS", 0.0)  # every environment is late
    engine = Says(TOKENIZER, ["a"], ["b"], ["c"])
    settings = InferenceEngineConfig(deterministic=deterministic)
    gym_generator = generator(engine, TOKENIZER, inference_engine=settings)
    await play(gym_generator, prompt(TOKENIZER, "tests-marks", table={"seen": []}), samples=3)
    assert [len(request.keys) for request in engine.requests] == requests


async def test_a_function_that_accepts_no_group_ends_the_run_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl.rollout.filters.MOST_REFUSED_IN_A_ROW", 8)
    row = prompt(TOKENIZER, "gsm8k", reward_spec={"ground_truth": "1"})
    limits = StreamLimits(batch=1, staleness=0, concurrency=1, queue=1, total=100, stall_seconds=600.0)
    rollouts = StreamingRollouts(
        PromptCursor([row], 1, seed=0),
        generator(Says(TOKENIZER, ["#### 1"]), TOKENIZER),
        GeneratorConfig(n_samples_per_prompt=1),
        AlgorithmConfig(),
        limits,
        accept=lambda group: False,
    )
    with pytest.raises(RunError, match=r"trainer.fully_async.accept refused 30 groups in a row.*rewards \[1.0\]"):
        await rollouts.next_batch(0)
    await rollouts.close()
