from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

import pytest

from skyrl.config import ChatTemplateConfig, SkyRLGymConfig
from skyrl.envs import Env, EnvStep, register
from skyrl.envs.reward_functions import RewardFunctionEnv
from skyrl.errors import RewardError, RunError, SkipSample
from skyrl.inference.engine import Completion
from skyrl.rollout.measures import measure
from skyrl.rollout.threads import KeptThreads
from skyrl.training.trainer import RolloutPosition
from skyrl.trajectory import Trajectory
from tests.rollout.chats import Counts, Says, chat_tokenizer, generator, play, prompt

TOKENIZER = chat_tokenizer()
made: list[Env] = []


def kept(extras: Any) -> Counts:
    made.append(Counts(extras))
    return made[-1]  # type: ignore[return-value]  # just appended


register("tests-counts", kept)


def sampled(trajectory: Trajectory) -> str:
    """The text of the tokens that may be trained on."""
    ids = [token for token, mask in zip(trajectory.response_ids, trajectory.loss_mask, strict=True) if mask]
    return str(TOKENIZER.decode(ids))


async def one(*turns: str, **config: Any) -> Trajectory:
    engine = Says(TOKENIZER, turns, stop_reason=config.pop("stop_reason", "stop"))
    (group,) = await play(generator(engine, TOKENIZER, **config), prompt(TOKENIZER, "tests-counts"))
    (trajectory,) = group.trajectories
    assert isinstance(trajectory, Trajectory)
    return trajectory


async def test_a_conversation_is_what_the_template_writes_of_it_and_only_sampled_tokens_are_trained_on() -> None:
    trajectory = await one("a<|im_end|>", "b<|im_end|>", "c<|im_end|>")
    assert TOKENIZER.decode(trajectory.response_ids) == (
        "a<|im_end|>\n<|im_start|>user\nsaw a<|im_end|>\n<|im_start|>assistant\n"
        "b<|im_end|>\n<|im_start|>user\nsaw b<|im_end|>\n<|im_start|>assistant\n"
        "c<|im_end|>"
    )
    assert sampled(trajectory) == "a<|im_end|>b<|im_end|>c<|im_end|>"


async def test_each_turn_starts_from_exactly_the_tokens_before_it() -> None:
    engine = Says(TOKENIZER, ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"])
    (group,) = await play(generator(engine, TOKENIZER), prompt(TOKENIZER, "tests-counts"))
    (row,) = group.trajectories
    tokens = row.prompt_ids + row.response_ids
    assert [tokens[: len(request.prompt_ids)] for request in engine.requests] == [r.prompt_ids for r in engine.requests]
    assert [request.keys[0].turn for request in engine.requests] == [0, 1, 2]


async def test_sampled_tokens_keep_their_logprobs_and_the_others_have_zero() -> None:
    row = await one("ab<|im_end|>", "c<|im_end|>", "d<|im_end|>")
    assert row.rollout_logprobs[:3] == (-0.01, -0.02, -0.03)
    assert all((logprob != 0) == bool(mask) for logprob, mask in zip(row.rollout_logprobs, row.loss_mask, strict=True))
    assert set(row.weight_versions) == {4}


async def test_each_turn_is_rewarded_on_its_last_token() -> None:
    row = await one("a<|im_end|>", "bb<|im_end|>", "c<|im_end|>")
    assert [turn.reward for turn in row.rewards] == [1.0, 2.0, 3.0]
    assert [row.response_ids[turn.token] for turn in row.rewards] == [TOKENIZER.eos_token_id] * 3
    assert row.rewards[-1].token == len(row.response_ids) - 1


async def test_a_token_that_was_sampled_is_never_tokenized_again() -> None:
    """The policy writes two tokens where the tokenizer would write other ones: both stay."""

    class Odd(Says):
        def completion(self, text: str) -> Completion:
            ids = (*TOKENIZER.encode("é")[:1], TOKENIZER.eos_token_id)  # half a character
            return Completion(
                token_ids=ids, text="?", logprobs=(-1.0, -1.0), weight_versions=(4, 4), stop_reason="stop"
            )

    (group,) = await play(generator(Odd(TOKENIZER, "abc"), TOKENIZER), prompt(TOKENIZER, "tests-counts"))
    (row,) = group.trajectories
    ids = [token for token, mask in zip(row.response_ids, row.loss_mask, strict=True) if mask]
    assert ids == [TOKENIZER.encode("é")[0], TOKENIZER.eos_token_id] * 3


async def test_a_turn_that_a_stop_text_ended_is_closed_without_training_on_the_end() -> None:
    row = await one("a</s>", "b</s>", "c</s>")
    assert sampled(row) == "a</s>b</s>c</s>"
    assert TOKENIZER.decode(row.response_ids).startswith("a</s><|im_end|>\n<|im_start|>user")
    assert (row.response_ids[-1], row.loss_mask[-1]) == (TOKENIZER.eos_token_id, 0)
    assert TOKENIZER.decode([row.response_ids[row.rewards[0].token]]) == ">"


async def test_a_stopped_turn_can_be_left_open() -> None:
    row = await one("a</s>", "b</s>", "c</s>", append_eos_token_after_stop_str_in_multi_turn=False)
    assert TOKENIZER.decode(row.response_ids).startswith("a</s>\n<|im_start|>user")
    assert TOKENIZER.decode(row.response_ids).endswith("c</s>")


async def test_a_turn_that_was_cut_off_is_closed_and_the_conversation_goes_on() -> None:
    row = await one("aaa", "bbb", "ccc", stop_reason="length")
    assert TOKENIZER.decode(row.response_ids).startswith("aaa<|im_end|>\n<|im_start|>user")
    assert row.stop_reason == "length"
    assert len(row.rewards) == 3


async def test_one_message_holds_answers_and_observations_and_an_early_end_is_withdrawn() -> None:
    row = await one("a<|im_end|>", "b<|im_end|>", "c<|im_end|>", use_conversation_multi_turn=False)
    assert TOKENIZER.decode(row.response_ids) == "asaw absaw bc<|im_end|>"
    assert sampled(row) == "abc<|im_end|>"
    assert [TOKENIZER.decode([row.response_ids[turn.token]]) for turn in row.rewards] == ["a", "b", "<|im_end|>"]


async def test_max_turns_ends_a_conversation_that_would_go_on() -> None:
    row = await one("a<|im_end|>", "b<|im_end|>", max_turns=2)
    assert [turn.reward for turn in row.rewards] == [1.0, 2.0]
    assert row.metrics == {"steps": 2.0}
    assert sampled(row).endswith("b<|im_end|>")


async def test_a_conversation_that_became_too_long_ends_before_its_next_turn() -> None:
    engine = Says(TOKENIZER, ["a<|im_end|>", "b<|im_end|>"])
    task_prompt = prompt(TOKENIZER, "tests-counts")
    (group,) = await play(generator(engine, TOKENIZER, max_input_length=len(task_prompt.token_ids) + 4), task_prompt)
    (row,) = group.trajectories
    assert (TOKENIZER.decode(row.response_ids), row.stop_reason) == ("a<|im_end|>", "context")
    assert row.metrics == {"steps": 1.0}
    assert len(engine.requests) == 1


MODES: dict[str, dict[str, Any]] = {
    "messages": {},
    "left open": {"append_eos_token_after_stop_str_in_multi_turn": False},
    "one answer": {"use_conversation_multi_turn": False},
    "step-wise": {"step_wise_trajectories": True},
    "merged": {"step_wise_trajectories": True, "merge_stepwise_output": True},
    "history": {"chat_template": ChatTemplateConfig(name_or_path="qwen3_without_thinking")},
}


class Goes(Env):
    """Says what its row tells it to, and never ends."""

    def step(self, action: str) -> EnvStep:
        return EnvStep(reward=1.0, done=False, observations=({"role": "user", "content": self.extras["said"]},))


register("tests-goes", Goes)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("reply", ["", "x", "saw all of it"])
@pytest.mark.parametrize("end", ["<|im_end|>", "</s>", ""], ids=["token", "text", "nothing"])
@pytest.mark.parametrize("mode", MODES)
async def test_at_the_limit_a_conversation_ends_with_the_tokens_that_were_sampled(
    mode: str, end: str, reply: str
) -> None:
    task_prompt = prompt(TOKENIZER, "tests-goes", said=reply)
    lengths = set()
    for limit in range(len(task_prompt.token_ids), len(task_prompt.token_ids) + 60, 3):
        turns = [f"{turn}{end}" for turn in ("four", "b", "ccc", "d")]
        engine = Says(TOKENIZER, turns, stop_reason="stop" if end else "length")
        (group,) = await play(
            generator(engine, TOKENIZER, max_turns=4, max_input_length=limit, **MODES[mode]), task_prompt
        )
        (row,) = group.trajectories
        played = len(engine.requests)
        drawn = engine.completion(turns[played - 1]).token_ids
        if played == 4:
            continue
        lengths.add(played)
        assert row.stop_reason == "context"
        assert row.prompt_ids + row.response_ids == engine.requests[-1].prompt_ids + drawn
        assert row.loss_mask[-len(drawn) :] == (1,) * len(drawn)
        assert row.rollout_logprobs[-len(drawn) :] == engine.completion(turns[played - 1]).logprobs
        assert row.rewards[-1].token == len(row.response_ids) - 1
        assert len(row.loss_mask) == len(row.weight_versions) == len(row.response_ids)
    assert 1 in lengths


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "one answer"])
async def test_a_conversation_measures_the_same_however_it_is_cut_into_rows(mode: str) -> None:
    turns = ["abcdabcd<|im_end|>", "abcd" * 3 + "<|im_end|>", "c<|im_end|>"]
    measured = []
    for settings in ({}, MODES[mode]):
        task_prompt = prompt(TOKENIZER, "tests-counts")
        groups = await play(generator(Says(TOKENIZER, turns), TOKENIZER, **settings), task_prompt)
        counted: Any = RolloutPosition(None, None)  # type: ignore[arg-type]  # both are for its other methods
        counted.count(groups, 0)
        numbers = {name: value for name, value in measure(groups).items() if not name.endswith(("_rows", "env_run"))}
        assert numbers["generate/repeated_ratio"] > 0
        timed = {name for name in numbers if "_time_" in name}
        measured.append((counted.tokens_seen, numbers.keys() - timed, numbers))
        for name in timed:
            del numbers[name]
    assert measured[0] == measured[1]
    assert measured[0][0] == measured[0][2]["generate/num_tokens"]


async def test_a_trajectory_that_did_not_stop_by_itself_can_lose_all_its_rewards_and_its_tokens() -> None:
    row = await one("a", "b", "c", stop_reason="length", zero_reward_on_non_stop=True, apply_overlong_filtering=True)
    assert row.reward == 0.0
    assert set(row.loss_mask) == {0}


async def test_the_first_turn_of_all_samples_is_one_request_and_later_turns_are_their_own() -> None:
    engine = Says(TOKENIZER, *[["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"]] * 4)
    await play(generator(engine, TOKENIZER), prompt(TOKENIZER, "tests-counts"), samples=4)
    assert [len(request.keys) for request in engine.requests] == [4] + [1] * 8


async def test_an_environment_plays_one_episode_and_is_closed_once() -> None:
    made.clear()
    engine = Says(TOKENIZER, *[["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"]] * 3)
    await play(generator(engine, TOKENIZER), prompt(TOKENIZER, "tests-counts"), samples=3)
    assert [(len(env.seen), env.closed) for env in made if isinstance(env, Counts)] == [(3, 1)] * 3


class Opens(Env):
    """Puts a message of its own before the prompt."""

    def init(self, prompt: Any) -> Any:
        return ({"role": "system", "content": f"turns: {self.extras['max_turns']}"}, *prompt), {}

    def step(self, action: str) -> EnvStep:
        return EnvStep(reward=1.0, done=True)


register("tests-opens", Opens)


async def test_the_conversation_starts_from_what_init_returns() -> None:
    engine = Says(TOKENIZER, ["a<|im_end|>"])
    (group,) = await play(generator(engine, TOKENIZER), prompt(TOKENIZER, "tests-opens"))
    assert TOKENIZER.decode(group.trajectories[0].prompt_ids) == (
        "<|im_start|>system\nturns: 5<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_prompt_that_is_too_long_from_the_start_samples_nothing() -> None:
    engine = Says(TOKENIZER, ["a<|im_end|>"])
    (group,) = await play(generator(engine, TOKENIZER, max_input_length=3), prompt(TOKENIZER, "tests-opens"))
    assert (group.trajectories[0].response_ids, group.trajectories[0].stop_reason) == ((), "context")
    assert engine.requests == []


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"logprobs": (float("nan"),)}, "log-probability"),
        ({"token_ids": (1, 1), "weight_versions": (1, 1), "logprobs": (-1.0, float("nan"))}, "log-probability"),
        ({"token_ids": (1, 1), "weight_versions": (1, 1), "logprobs": (-1.0, float("-inf"))}, "log-probability"),
        ({"token_ids": (1, 1), "weight_versions": (1, 1), "logprobs": (-1.0, 0.5)}, "log-probability"),
        ({"logprobs": ()}, "1 tokens with 0 log-probabilities"),
        ({"weight_versions": (1, 1)}, "2 weight versions"),
    ],
)
async def test_an_answer_of_the_engine_that_is_not_whole_reaches_no_batch(broken: Any, message: str) -> None:
    class Broken(Says):
        def completion(self, text: str) -> Completion:
            defaults = {
                "token_ids": (1,),
                "text": "a",
                "logprobs": (-1.0,),
                "weight_versions": (1,),
                "stop_reason": "stop",
            }
            return Completion(**{**defaults, **broken})

    with pytest.raises(RunError, match=message):
        await play(generator(Broken(TOKENIZER, ["a"]), TOKENIZER), prompt(TOKENIZER, "tests-counts"))


OVER = Event()
"""Environments that hang come back when it is set."""


@pytest.fixture(autouse=True)
def nothing_hangs_after_a_test() -> Iterator[None]:
    OVER.clear()
    yield
    OVER.set()


class Fails(Env):
    """Fails as its answer says."""

    def step(self, action: str) -> EnvStep:
        if action == "hang":
            OVER.wait()
        if action == "raise":
            raise ValueError("no")
        if action == "skip":
            raise SkipSample("no answer is known.")
        if action == "exit":
            raise SystemExit(1)
        if action in ("type", "text"):
            return "no step" if action == "type" else EnvStep(reward=0.0, done=False, observations=("hm",))  # type: ignore[arg-type, return-value]  # wrong on purpose
        if action == "too much":
            return EnvStep(reward=0.0, done=False, observations=({"role": "user", "content": "x" * (1 << 24)},))
        return EnvStep(reward=float("nan") if action == "nan" else 1.0, done=True)


register("tests-fails", Fails)


async def group_of(*answers: str, **gym: Any) -> Any:
    class Draws(Says):
        """A sample that is drawn again gets the last answer."""

        async def generate(self, request: Any) -> tuple[Completion, ...]:
            texts = [self.turns[0][-1 if key.attempt else key.sample_index] for key in request.keys]
            return tuple(self.completion(text) for text in texts)

    settings = SkyRLGymConfig(**{"max_failed_share": 1.0, **gym})
    engine = Draws(TOKENIZER, answers)
    (group,) = await play(
        generator(engine, TOKENIZER, settings), prompt(TOKENIZER, "tests-fails"), samples=len(answers)
    )
    return group


async def test_a_sample_whose_environment_fails_is_drawn_again_and_counted() -> None:
    group = await group_of("raise", "nan", "good")
    assert group.rewards == (1.0, 1.0, 1.0)
    assert [[failure.kind for failure in row.failures] for row in group.trajectories] == [
        ["raised"],
        ["not_finite"],
        [],
    ]
    assert not group.dropped


async def test_every_kind_of_failure_is_counted_beside_good_samples() -> None:
    bad = ("hang", "raise", "exit", "type", "text", "nan", "too much")
    group = await group_of(*bad, "good", step_timeout_seconds=3.0)
    kinds = [failure.kind for row in group.trajectories for failure in row.failures]
    assert kinds == ["timeout", "raised", "raised", "wrong_type", "wrong_type", "not_finite", "too_large"]
    assert group.rewards == (1.0,) * 8


async def test_a_group_without_one_of_its_samples_is_dropped_whole() -> None:
    group = await group_of("raise", "good", max_attempts=1)
    assert group.dropped
    assert [row.failed for row in group.trajectories] == [True, False]
    assert not any(mask for row in group.trajectories for mask in row.loss_mask)


async def test_a_call_that_hangs_fails_at_its_deadline_and_holds_up_nobody() -> None:
    group = await group_of("hang", "good", step_timeout_seconds=3.0, max_env_workers=2)
    assert group.rewards == (1.0, 1.0)
    assert group.trajectories[0].failures[0].kind == "timeout"


@pytest.mark.parametrize("workers", [1, 3])
async def test_as_many_environments_run_at_a_time_as_there_are_workers(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads run here, one after the other, each when nothing else can begin; no call is quick."""
    started: deque[Callable[[], None]] = deque()
    at_once = most = 0

    def start(_: KeptThreads, work: Callable[[], None]) -> None:
        nonlocal at_once, most
        at_once, most = at_once + 1, max(most, at_once + 1)
        started.append(work)

    monkeypatch.setattr("skyrl.rollout.threads.PATIENCE", -1.0)
    monkeypatch.setattr(KeptThreads, "run", start)
    gym_generator = generator(Says(TOKENIZER, *[["good"]] * 6), TOKENIZER, SkyRLGymConfig(max_env_workers=workers))
    playing = asyncio.create_task(play(gym_generator, prompt(TOKENIZER, "tests-fails"), samples=6))
    while not playing.done():
        for _ in range(50):  # turns of the event loop
            await asyncio.sleep(0)
        if started:
            started.popleft()()
            at_once -= 1
    assert playing.result()[0].rewards == (1.0,) * 6
    assert most == workers


async def test_a_trajectory_has_a_deadline_too() -> None:
    group = await group_of("hang", "good", trajectory_timeout_seconds=0.2)
    assert "trajectory_timeout_seconds" in group.trajectories[0].failures[0].reason


async def test_all_attempts_at_a_sample_share_its_deadline() -> None:
    group = await group_of("hang", "hang", "good", "hang", trajectory_timeout_seconds=3.0)  # drawn again, it hangs, too
    assert [len(row.failures) for row in group.trajectories] == [1, 1, 0, 1]
    assert group.dropped


async def test_only_the_failures_of_the_policy_are_drawn_again() -> None:
    group = await group_of("raise", "nan", "good", retried_failures=("not_finite",))
    assert [row.failed for row in group.trajectories] == [True, False, False]
    assert [len(row.failures) for row in group.trajectories] == [1, 1, 0]


async def test_another_sample_of_the_group_can_stand_in_for_one_that_failed() -> None:
    group = await group_of("raise", "good", "nan", "good", max_attempts=1, failed_samples="fill")
    assert group.rewards == (1.0,) * 4
    assert not group.dropped
    assert [row.filled for row in group.trajectories] == [True, False, True, False]
    assert [row.sample_index for row in group.trajectories] == [0, 1, 2, 3]
    assert [failure.kind for row in group.trajectories for failure in row.failures] == ["raised", "not_finite"]
    assert all(row.trained for row in group.trajectories)
    assert measure([group])["rollout/filled_samples"] == 2


async def test_where_every_sample_failed_nothing_stands_in() -> None:
    group = await group_of("raise", "nan", max_attempts=1, failed_samples="fill")
    assert group.dropped


async def test_too_many_failures_stop_the_run_with_the_first_reasons() -> None:
    with pytest.raises(RewardError, match=r"3 times among 4 samples(.|\n)*ValueError: no"):
        await group_of("raise", "raise", "raise", "good", max_attempts=2, max_failed_share=0.25)


async def test_a_batch_can_be_sampled_whole_before_the_first_answer_is_judged() -> None:
    judged_after: list[int] = []
    engine = Says(TOKENIZER, ["a<|im_end|>"])

    class Looks(Env):
        def step(self, action: str) -> EnvStep:
            judged_after.append(len(engine.requests))
            return EnvStep(reward=1.0, done=True)

    register("tests-looks", Looks)
    prompts = [prompt(TOKENIZER, "tests-looks") for _ in range(5)]
    await play(generator(engine, TOKENIZER, max_turns=1, batched=True), *prompts)
    assert judged_after == [5] * 5


async def test_no_more_trajectories_are_in_flight_than_allowed() -> None:
    made.clear()
    alive: list[int] = []
    engine = Says(TOKENIZER, *[["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"]] * 2)

    class Alive(Counts):
        def step(self, action: str) -> EnvStep:
            alive.append(sum(isinstance(env, Counts) and not env.closed for env in made))
            return super().step(action)

    def keep(extras: Any) -> Alive:
        made.append(Alive(extras))
        return made[-1]  # type: ignore[return-value]  # just appended

    register("tests-alive", keep)
    prompts = [prompt(TOKENIZER, "tests-alive") for _ in range(6)]
    await play(generator(engine, TOKENIZER, max_trajectories_in_flight=4), *prompts, samples=2)
    assert max(alive) <= 4


async def test_a_sample_that_is_not_judged_is_neither_a_failure_nor_a_reward() -> None:
    group = await group_of("skip", "good", "good", max_failed_share=0.0)
    assert group.dropped
    assert [row.skipped[-19:] for row in group.trajectories] == ["no answer is known.", "", ""]
    assert not any(row.failures or row.failed for row in group.trajectories)
    assert not any(row.trained for row in group.trajectories)
    counted = measure([group])
    assert (counted["rollout/skipped_samples"], counted["rollout/dropped_groups"]) == (1, 1)
    assert counted["rollout/failures"] == 0


async def test_another_sample_can_stand_in_for_one_that_is_not_judged() -> None:
    group = await group_of("skip", "good", "raise", max_attempts=1, failed_samples="fill")
    assert (group.dropped, group.rewards) == (False, (1.0, 1.0, 1.0))
    assert [row.filled for row in group.trajectories] == [True, False, True]
    counted = measure([group])
    assert (counted["rollout/skipped_samples"], counted["rollout/filled_samples"]) == (1, 2)
    assert counted["rollout/replaced_samples"] == 0


async def test_a_reward_function_and_the_start_of_an_environment_may_skip_a_sample() -> None:
    def unknown(completion: str, **columns: Any) -> float:
        raise SkipSample("unknown")

    class Unknown(Env):
        def init(self, prompt: Any) -> Any:
            raise SkipSample("unknown")

    register("tests-unknown", lambda extras: RewardFunctionEnv(extras, unknown))
    register("tests-unknown-start", Unknown)
    for name in ("tests-unknown", "tests-unknown-start"):
        (group,) = await play(generator(Says(TOKENIZER, ["a"]), TOKENIZER), prompt(TOKENIZER, name))
        assert group.trajectories[0].skipped.endswith("skips it: unknown")


async def test_an_environment_that_does_not_close_is_left_behind_when_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hangs = Event()

    class Open(Env):
        def step(self, action: str) -> EnvStep:
            return EnvStep(reward=1.0, done=True)

        def close(self) -> None:
            hangs.wait()

    register("tests-open", Open)
    monkeypatch.setattr("skyrl.rollout.attempts.CLOSING_SECONDS", 0.1)
    gym = SkyRLGymConfig(
        trajectory_timeout_seconds=0.1, step_timeout_seconds=None, max_attempts=1, max_failed_share=1.0
    )
    (group,) = await play(generator(Says(TOKENIZER, ["a"]), TOKENIZER, gym), prompt(TOKENIZER, "tests-open"))
    hangs.set()
    (failure,) = group.trajectories[0].failures
    assert (failure.kind, group.dropped, group.rewards) == ("close", False, (1.0,))


async def test_an_engine_that_is_late_is_no_fault_of_the_environment() -> None:
    class Late(Says):
        async def generate(self, request: Any) -> tuple[Completion, ...]:
            if request.keys[0].turn:
                raise TimeoutError("the engine gave nothing")
            return await super().generate(request)

    engine = Late(TOKENIZER, ["a<|im_end|>", "b<|im_end|>"])
    with pytest.raises(TimeoutError, match="the engine gave nothing"):
        await play(generator(engine, TOKENIZER), prompt(TOKENIZER, "tests-counts"))
