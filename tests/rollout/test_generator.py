from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from skyrl.config import GeneratorConfig, InferenceEngineConfig, SamplingParams, SkyRLGymConfig, SkyRLLoraConfig
from skyrl.errors import RewardError, TaskError
from skyrl.inference.draws import sample_seed
from skyrl.inference.engine import Completion, GenerationRequest
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.rollout.generator import SkyRLGymGenerator
from skyrl.trajectory import Prompt, TurnReward

SPEC = {"reward_spec": {"ground_truth": "1"}}


class Scripted:
    """An engine that answers each sample of a prompt with the next of its texts."""

    weight_version = 0

    def __init__(self, *texts: str, stop_reason: Any = "stop") -> None:
        self.texts, self.stop_reason = texts, stop_reason
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        self.requests.append(request)
        return tuple(
            Completion(
                token_ids=(7, 8),
                text=self.texts[key.sample_index],
                logprobs=(-0.1, -0.2),
                weight_versions=(3, 3),
                stop_reason=self.stop_reason,
            )
            for key in request.keys
        )


def prompt(env_class: str = "gsm8k", **extras: Any) -> Prompt:
    messages = ({"role": "user", "content": "?"},)
    return Prompt(id="p", messages=messages, token_ids=(1, 2, 3), env_class=env_class, extras=extras or SPEC)


def generator(engine: Scripted, config: GeneratorConfig | None = None, **more: Any) -> SkyRLGymGenerator:
    lora = SkyRLLoraConfig()
    engines: list[Any] = [engine]
    unused: Any = None  # no tokenizer: prompts of one turn come as token ids
    client = InferenceEngineClient(engines, unused, "model", lora, InferenceEngineConfig())
    return SkyRLGymGenerator("model", lora, config or GeneratorConfig(), SkyRLGymConfig(), client, unused, **more)


async def sample(gym_generator: SkyRLGymGenerator, *prompts: Prompt, samples: int = 2) -> Any:
    return await gym_generator.generate(
        prompts, sampling=SamplingParams(), samples_per_prompt=samples, weight_version=3
    )


async def test_a_group_holds_every_sample_as_the_engine_gave_it_with_its_reward() -> None:
    ((first, second),) = [
        group.trajectories for group in await sample(generator(Scripted("#### 1", "#### 2")), prompt())
    ]
    assert (first.reward, second.reward) == (1.0, 0.0)
    assert first.response_ids == (7, 8)
    assert first.rollout_logprobs == (-0.1, -0.2)
    assert first.loss_mask == (1, 1)
    assert first.weight_versions == (3, 3)
    assert first.rewards == (TurnReward(token=1, reward=1.0),)
    assert [first.sample_index, second.sample_index] == [0, 1]


async def test_every_sample_has_a_key_of_its_own_and_evaluation_has_others() -> None:
    engine = Scripted("a", "b")
    gym_generator = generator(engine, seed=11)
    await sample(gym_generator, prompt())
    await gym_generator.generate(
        [prompt()], sampling=SamplingParams(), samples_per_prompt=2, weight_version=3, purpose="eval"
    )
    keys = [key for request in engine.requests for key in request.keys]
    assert len(set(keys)) == 4
    assert {key.run_seed for key in keys} == {11}


async def test_one_request_asks_for_all_samples_of_a_prompt() -> None:
    engine = Scripted("a", "b", "c")
    await sample(generator(engine), prompt(), prompt(), samples=3)
    assert [len(request.keys) for request in engine.requests] == [3, 3]


async def test_a_prompt_that_stands_twice_in_a_batch_is_sampled_twice_with_different_seeds() -> None:
    engine = Scripted("a", "b")
    await sample(generator(engine), prompt(), prompt())
    first, second = sorted((request.keys for request in engine.requests), key=lambda keys: keys[0].occurrence)
    assert [key.occurrence for key in (*first, *second)] == [0, 0, 1, 1]
    assert len({sample_seed(key) for key in (*first, *second)}) == 4


async def test_an_answer_that_was_cut_off_can_be_denied_its_reward() -> None:
    engine = Scripted("#### 1", "#### 1", stop_reason="length")
    (group,) = await sample(generator(engine, GeneratorConfig(zero_reward_on_non_stop=True)), prompt())
    assert group.rewards == (0.0, 0.0)


async def test_overlong_filtering_keeps_an_unfinished_answer_out_of_the_loss_and_its_reward() -> None:
    engine = Scripted("#### 1", "#### 1", stop_reason="length")
    (group,) = await sample(generator(engine, GeneratorConfig(apply_overlong_filtering=True)), prompt())
    assert group.trajectories[0].loss_mask == (0, 0)
    assert group.rewards == (1.0, 1.0)


async def test_an_import_path_in_a_row_of_the_data_is_never_followed(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(f"open({str(tmp_path / 'proof')!r}, 'w')\ndef f(*a, **k): return 1\n", encoding="utf-8")
    with pytest.raises(TaskError, match="from environment.env_class only"):
        await sample(generator(Scripted("a", "b")), prompt(f"{planted}:f"))
    assert not (tmp_path / "proof").exists()


async def test_the_import_path_of_the_configuration_is_followed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def always(completion, **others):\n    return 0.25\n", encoding="utf-8")
    name = f"{file}:always"
    (group,) = await sample(generator(Scripted("a", "b"), user_env_class=name), prompt(name))
    assert group.rewards == (0.25, 0.25)


CLASS = "from skyrl.envs import Env, EnvStep\nclass Task(Env):\n"
STEP = "    def step(self, action): return EnvStep(reward=1, done=True)\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import asyncio\ndef Task(completion, **others): raise asyncio.CancelledError('x')",
            "raised CancelledError: x",
        ),
        ("def Task(completion, **others): raise KeyboardInterrupt", "raised KeyboardInterrupt"),
        ("def Task(completion, **others): raise GeneratorExit", "raised GeneratorExit"),
        (
            "def Task(completion, **others): raise BaseExceptionGroup('g', [KeyboardInterrupt()])",
            "raised BaseExceptionGroup: g",
        ),
        ("def Task(completion, **others): return float('nan')", "gave the reward nan, which is not a finite number"),
        ("def Task(completion, **others): return 'good'", "gave the reward 'good'"),
        ("def Task(completion, **others): return None", "gave the reward None"),
        ("def Task(completion, **others): return {}['x']", "raised KeyError: 'x' ({file}:1, in Task)"),
        ("import sys\ndef Task(completion, **others): sys.exit(0)", "raised SystemExit: 0"),
        (CLASS + "    def __init__(self, extras): 1 / 0\n" + STEP, "raised ZeroDivisionError"),
        (CLASS + "    def step(self, action): return 1.0\n", "returned 1.0 from step()"),
        (CLASS + "    def step(self, action): return EnvStep(reward=1, done=False)\n", "wants another turn"),
        (CLASS + "    def get_metrics(self): return {'depth': 'low'}\n" + STEP, "measured depth = 'low'"),
    ],
)
async def test_a_task_that_fails_too_often_stops_the_run_and_names_the_prompt(
    tmp_path: Path, source: str, message: str
) -> None:
    file = tmp_path / "task.py"
    file.write_text(source, encoding="utf-8")
    name = f"{file}:Task"
    with pytest.raises(RewardError, match=re.escape(message.replace("{file}", str(file)))) as failure:
        await sample(generator(Scripted("the answer", "b"), user_env_class=name), prompt(name))
    assert re.search(r"task.py:Task, (starting on|judging an answer to|closing after) prompt p", str(failure.value))


async def test_any_kind_of_number_is_a_reward(tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    file.write_text("import numpy\ndef half(completion, **others): return numpy.float32(0.5)\n", encoding="utf-8")
    (group,) = await sample(generator(Scripted("a", "b"), user_env_class=f"{file}:half"), prompt(f"{file}:half"))
    assert group.rewards == (0.5, 0.5)


async def test_slow_tasks_are_judged_side_by_side(tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    text = (
        "import threading\n"
        "both = threading.Barrier(2, timeout=60)\n"
        "def meet(completion, **others): both.wait(); return 1\n"
    )
    file.write_text(text, encoding="utf-8")
    (group,) = await sample(generator(Scripted("a", "b"), user_env_class=f"{file}:meet"), prompt(f"{file}:meet"))
    assert group.rewards == (1.0, 1.0)


async def test_one_failure_among_many_is_the_only_thing_that_is_raised(tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    file.write_text("def broken(completion, **others): return None\n", encoding="utf-8")
    gym_generator = generator(Scripted("a", "b"), user_env_class=f"{file}:broken")
    with pytest.raises(RewardError):
        await sample(gym_generator, *[prompt(f"{file}:broken") for _ in range(8)])
    assert asyncio.all_tasks() == {asyncio.current_task()}
