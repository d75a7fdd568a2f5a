"""Agents as environments: what they ask becomes rows, token by token, and their end the reward."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import httpx
import pytest
from attrs import evolve

from skyrl.config.settings.environment import AgentConfig
from skyrl.errors import TaskError
from skyrl.inference.engine import Completion
from skyrl.inference.torch.engine import TorchEngine
from skyrl.rollout.agent_runner import AgentCall, Returned, agent_of, returned_by
from skyrl.rollout.measures import measure
from skyrl.trajectory import Prompt, TrajectoryGroup
from tests.endpoint.serving import TOOLS_CHATML, Script
from tests.inference.nano import full_forward_logprobs, nano_model
from tests.rollout.agent_episodes import CALL, by, play, playing, scripted
from tests.rollout.chats import chat_tokenizer


async def test_a_conversation_is_one_row_of_the_engines_own_tokens() -> None:
    trajectory, script = await scripted([CALL, CALL, "3"], by("talks", reward="environment"))
    tokenizer = script.tokenizer
    assert trajectory.earlier == ()
    assert trajectory.reward == 1.0
    assert trajectory.answer == "3"
    sampled = [i for i, mask in zip(trajectory.response_ids, trajectory.loss_mask, strict=True) if mask]
    assert tokenizer.decode(sampled) == f"{CALL}<|im_end|>{CALL}<|im_end|>3<|im_end|>"
    tool = "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(trajectory.response_ids) == f"{CALL}<|im_end|>{tool}{CALL}<|im_end|>{tool}3<|im_end|>"
    assert trajectory.metrics == {"agent_requests": 3.0, "agent_rows": 1.0, "agent_overruled_settings": 0.0}
    ends = [turn.token for turn in trajectory.rewards]
    assert [tokenizer.decode([trajectory.response_ids[token]]) for token in ends] == ["<|im_end|>"] * 3
    assert [turn.reward for turn in trajectory.rewards] == [0.0, 0.0, 1.0]


async def test_later_requests_start_from_the_ids_that_were_sampled_whatever_their_text_says() -> None:
    script = Script([CALL, "3"])
    odd = script.tokenizer.convert_tokens_to_ids("<|im_start|>")  # left out of the text that the agent sees

    async def generate(request: Any) -> Any:
        (completion,) = await Script.generate(script, request)
        ids = (odd, *completion.token_ids)
        return (
            evolve(completion, token_ids=ids, logprobs=(-0.5, *completion.logprobs), weight_versions=(3,) * len(ids)),
        )

    class Odd:
        pass

    engine = Odd()
    engine.generate = generate  # type: ignore[attr-defined]  # an engine is what it does
    async with playing(engine, script.tokenizer, by("talks", reward="environment")) as generator:
        (trajectory,) = await play(generator)
    first, second = script.requests
    answer = trajectory.response_ids[: trajectory.loss_mask.index(0)]
    assert answer[0] == odd
    assert second.prompt_ids[: len(first.prompt_ids) + len(answer)] == first.prompt_ids + answer


async def test_a_rewritten_history_is_a_row_of_its_own() -> None:
    trajectory, script = await scripted(["a", "b", "c"], by("forgets"))
    (before,) = trajectory.earlier
    assert trajectory.reward == 0.5
    assert [[turn.reward for turn in row.rewards] for row in (before, trajectory)] == [[0.0, 0.0], [0.5]]
    texts = [
        script.tokenizer.decode([i for i, mask in zip(row.response_ids, row.loss_mask, strict=True) if mask])
        for row in (before, trajectory)
    ]
    assert texts == ["a<|im_end|>b<|im_end|>", "c<|im_end|>"]
    assert "summary" in script.tokenizer.decode(trajectory.prompt_ids)


async def test_parallel_calls_are_rows_that_train_on_each_token_once() -> None:
    trajectory, script = await scripted(["a", "b", "c"], by("splits"))
    rows = [
        script.tokenizer.decode([i for i, mask in zip(row.response_ids, row.loss_mask, strict=True) if mask])
        for row in trajectory.token_rows
    ]
    assert sorted(rows) == ["a<|im_end|>b<|im_end|>", "c<|im_end|>"]
    forked = next(row for row, text in zip(trajectory.token_rows, rows, strict=True) if text == "c<|im_end|>")
    assert "a<|im_end|>" in script.tokenizer.decode(forked.prompt_ids)


@pytest.mark.parametrize("name", ["talks", "forgets", "splits"])
async def test_an_agent_has_as_many_turns_as_it_made_requests(name: str) -> None:
    trajectory, _ = await scripted([CALL, CALL, "3"], by(name, reward="environment"))
    group = TrajectoryGroup(
        prompt=Prompt(id="p", messages=(), token_ids=(1,), env_class="e"), trajectories=(trajectory,)
    )
    assert measure([group])["generate/avg_num_turns"] == trajectory.metrics["agent_requests"] == 3


async def test_log_probabilities_of_every_row_are_those_of_a_forward_pass() -> None:
    tokenizer, model = chat_tokenizer(TOOLS_CHATML), nano_model()
    engine = TorchEngine(model, tokenizer, max_num_seqs=8)
    async with playing(engine, tokenizer, by("forgets"), max_model_len=256) as generator:
        trajectories = await play(generator, samples=2)
    await engine.close()
    for row in (row for trajectory in trajectories for row in trajectory.token_rows):
        completion = Completion(
            token_ids=row.response_ids,
            text="",
            logprobs=row.rollout_logprobs,
            weight_versions=row.weight_versions,
            stop_reason="stop",
        )
        ours = full_forward_logprobs(model, row.prompt_ids, completion, 1.0).tolist()
        pairs = [(a, b) for a, b, mask in zip(ours, row.rollout_logprobs, row.loss_mask, strict=True) if mask]
        assert [a for a, _ in pairs] == pytest.approx([b for _, b in pairs], abs=1e-4)
    assert trajectories[0].response_ids != trajectories[1].response_ids


async def test_the_runs_sampling_settings_stand_and_lengths_may_be_shortened() -> None:
    trajectory, script = await scripted(["a"], by("wants_heat"))
    (request,) = script.requests
    assert (request.sampling.temperature, request.sampling.max_generate_length) == (1.0, 2)
    assert trajectory.metrics["agent_overruled_settings"] == 1.0


async def test_an_agent_that_reaches_the_limit_of_requests_is_judged_by_what_it_has() -> None:
    trajectory, _ = await scripted(["a"] * 4, by("never_stops", max_requests=4))
    assert (trajectory.failed, trajectory.stop_reason, trajectory.reward) == (False, "context", 0.0)
    assert sum(trajectory.loss_mask) == 8  # a letter and an end, four times


async def test_an_agent_that_is_cut_off_is_judged_by_the_last_answer_of_the_policy() -> None:
    trajectory, _ = await scripted(["3"], by("never_stops", reward="environment", max_requests=1))
    assert (trajectory.stop_reason, trajectory.answer, trajectory.reward) == ("context", "3", 1.0)


async def test_an_agent_that_returns_nothing_is_judged_by_the_last_answer_of_the_policy(tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(SILENT)
    trajectory, _ = await scripted(["3"], AgentConfig(function=f"{program}:asks", reward="environment"))
    assert (trajectory.stop_reason, trajectory.answer, trajectory.reward) == ("stop", "3", 1.0)


async def test_a_conversation_that_fills_the_model_ends_the_trajectory() -> None:
    trajectory, script = await scripted(["a"] * 9, by("never_stops"), max_model_len=120)
    assert (trajectory.failed, trajectory.stop_reason) == (False, "context")
    assert len(trajectory.prompt_ids) + len(trajectory.response_ids) <= 120
    assert len(script.requests) < 9


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        ("asks_nothing", "raised", "made no request to the policy"),
        ("says_no_number", "wrong_type", "'a lot', which is a text, not a finite number"),
    ],
)
async def test_an_agent_that_cannot_be_trained_on_is_a_failure(function: str, kind: str, message: str) -> None:
    trajectory, _ = await scripted(["a"], by(function))
    assert trajectory.failed
    assert [failure.kind for failure in trajectory.failures] == [kind]
    assert message in trajectory.failures[0].reason


async def test_an_agent_beyond_its_time_is_a_failure_that_is_tried_again() -> None:
    trajectory, _ = await scripted([], by("sleeps", timeout_seconds=0.05), gym={"max_attempts": 2})
    assert [failure.kind for failure in trajectory.failures] == ["timeout", "timeout"]
    assert "environment.agent.timeout_seconds" in trajectory.failures[0].reason


SILENT = """
import openai

def asks(task, base_url, api_key):
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as ask:
        ask.chat.completions.create(model="tiny", messages=task["messages"])
"""
PROGRAM = """
import json, os, sys
import openai
task = json.load(sys.stdin)
client = openai.OpenAI(max_retries=0)  # everything it needs is in its environment
answer = client.chat.completions.create(model=os.environ["MODEL"], messages=task["messages"])
print("looking at", task["data_source"])
{end}
"""


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("reward", "end", "paid", "kind"),
    [
        ("returned", "print(0.25)", 0.25, None),
        ("exit_code", "sys.exit(0)", 1.0, None),
        ("exit_code", "sys.exit(3)", 0.0, None),
        ("returned", "sys.exit('no luck')", 0.0, "raised"),
    ],
)
async def test_a_program_is_an_agent(tmp_path: Path, reward: Any, end: str, paid: float, kind: str | None) -> None:
    program = tmp_path / "agent.py"
    program.write_text(PROGRAM.format(end=end))
    trajectory, _ = await scripted(["3"], AgentConfig(command=(sys.executable, str(program)), reward=reward))
    assert [failure.kind for failure in trajectory.failures] == ([kind] if kind else [])
    assert trajectory.reward == paid
    if kind:
        assert "exit code 1: no luck" in trajectory.failures[0].reason


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (by("wants_more"), "requires budget"),
        (by("missing"), "missing"),
        (AgentConfig(command=("no-such-program",)), "no-such-program"),
    ],
)
def test_an_agent_that_cannot_be_started_is_named(config: AgentConfig, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        agent_of(config, "auto")


async def test_the_key_of_a_trajectory_ends_with_it_and_nobody_else_is_served() -> None:
    script, keys = Script(["a", "b"]), []
    async with playing(script, script.tokenizer, by("wants_heat")) as generator:
        agent = generator._agent
        assert agent is not None
        playing_one = agent.endpoint.trajectories.playing

        def noted(trajectory: Any) -> Any:
            keys.append(trajectory.key)
            return playing_one(trajectory)

        agent.endpoint.trajectories.playing = noted  # type: ignore[method-assign]  # looks on
        await play(generator)
        async with httpx.AsyncClient(base_url=agent.endpoint.url) as http:
            statuses = [
                (await http.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code
                for key in (keys[0], "any")
            ]
    assert statuses == [401, 401]


def test_arguments_that_a_function_does_not_take_are_refused() -> None:
    with pytest.raises(TaskError, match="has no parameter pay$"):
        agent_of(by("pays", kwargs={"pay": 1.0}), "auto")
    with pytest.raises(TaskError, match="api_key is passed to every agent already"):
        agent_of(by("pays", kwargs={"api_key": "mine"}), "auto")


async def test_a_function_is_called_with_its_own_settings() -> None:
    trajectory, _ = await scripted(["3"], by("pays", kwargs={"pays": 0.75}))
    assert trajectory.reward == 0.75


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        ("no-such-agent", "$"),
        ("no-such-agent --fast", r': write each argument as an item, \["no-such-agent", "--fast"\]$'),
    ],
)
def test_a_command_in_one_text_is_told_to_be_a_list(command: str, advice: str) -> None:
    config: Any = {"command": command}
    with pytest.raises(TaskError, match=f"the program {command} does not exist, or cannot be run{advice}"):
        agent_of(AgentConfig(**config), "auto")


@pytest.mark.parametrize(
    ("code", "output", "errors", "value"),
    [(0, b"0.5", b"a warning", "0.5"), (3, b"0.5", b"no luck", "no luck"), (3, b"0.5", b"", "0.5")],
)
def test_what_a_program_prints_is_its_result_unless_it_fails_and_says_why(
    code: int, output: bytes, errors: bytes, value: str
) -> None:
    assert returned_by(code, output, errors) == Returned(value=value, exit_code=code)


async def test_what_a_program_left_running_ends_with_it(tmp_path: Path) -> None:
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    leaves = f"exec 3> '{fifo}'; sleep 100 > /dev/null 2>&1 &"
    ran = agent_of(AgentConfig(command=("sh", "-c", leaves)), "auto")(
        AgentCall(task={}, url="http://127.0.0.1:1", key="k", model="m")
    )
    assert isinstance(ran, Awaitable)
    assert (await ran).exit_code == 0
    ended, _, _ = select.select([reader], [], [], 60)  # nobody has the other end any more
    os.close(reader)
    assert ended
