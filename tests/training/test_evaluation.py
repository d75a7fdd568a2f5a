from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from skyrl.config import GeneratorConfig, SamplingParams, SkyRLGymConfig
from skyrl.envs import Env, EnvStep, register
from skyrl.errors import RewardError
from skyrl.training.describe import Metrics
from skyrl.training.evaluation import Evaluation
from tests.rollout.chats import Says, chat_tokenizer, generator, prompt

TOKENIZER = chat_tokenizer()
FAILED: dict[str, int] = {}


class FailsFirst(Env):
    """Raises for the first `fails` answers to its question, then pays what the answer says."""

    def step(self, action: str) -> EnvStep:
        name = self.extras["name"]
        FAILED[name] = FAILED.get(name, 0) + 1
        if FAILED[name] <= self.extras["fails"]:
            raise OSError("the grader was away")
        return EnvStep(reward=float(action), done=True, answer=action)


register("tests-fails-first", FailsFirst)


async def evaluate(dump: Path | None = None, **fails: int) -> Metrics:
    """Two samples of each prompt, right and wrong, one prompt at a time."""
    FAILED.clear()
    prompts = [prompt(TOKENIZER, "tests-fails-first", name=name, fails=times) for name, times in fails.items()]
    config = GeneratorConfig(eval_n_samples_per_prompt=2, eval_sampling_params=SamplingParams())
    gym_generator = generator(
        Says(TOKENIZER, ["1"], ["0"]), TOKENIZER, SkyRLGymConfig(max_attempts=3, max_failed_share=0.3)
    )
    evaluation = Evaluation(prompts, gym_generator, config, batch_size=1, dump_folder=dump, decode=TOKENIZER.decode)
    return await evaluation.run(4)


async def test_an_environment_that_fails_once_ends_no_small_evaluation_and_is_reported() -> None:
    metrics = await evaluate(a=1, b=0)
    assert metrics["eval/all/avg_score"] == 0.5
    assert (metrics["eval/failures"], metrics["eval/failures_raised"], metrics["eval/replaced_samples"]) == (1, 1, 1)
    assert "eval/dropped_groups" not in metrics


async def test_a_prompt_that_fails_for_good_has_no_score_and_is_counted() -> None:
    metrics = await evaluate(a=6, b=0, c=0, d=0, e=0, f=0, g=0, h=0, i=0, j=0)
    assert metrics["eval/dropped_groups"] == 1
    assert metrics["eval/all/avg_score"] == 0.5


async def test_an_evaluation_draws_as_many_samples_as_its_own_settings_say() -> None:
    """And with its own temperature and length, not those of training."""
    FAILED.clear()
    engine = Says(TOKENIZER, ["1"], ["0"], ["0"])
    config = GeneratorConfig(
        sampling_params=SamplingParams(temperature=1.0, max_generate_length=9),
        n_samples_per_prompt=8,
        eval_n_samples_per_prompt=3,
        eval_sampling_params=SamplingParams(temperature=0.25, max_generate_length=7),
    )
    task_prompt = prompt(TOKENIZER, "tests-fails-first", name="a", fails=0)
    evaluation = Evaluation(
        [task_prompt, task_prompt],
        generator(engine, TOKENIZER),
        config,
        batch_size=2,
        dump_folder=None,
        decode=TOKENIZER.decode,
    )
    metrics = await evaluation.run(4)
    assert metrics["eval/all/avg_score"] == pytest.approx(1 / 3)
    assert metrics["eval/all/pass_at_3"] == 1.0
    drawn = [(request.sampling.temperature, request.sampling.max_generate_length) for request in engine.requests]
    assert set(drawn) == {(0.25, 7)}
    assert sum(len(request.keys) for request in engine.requests) == 6
    assert {key.purpose for request in engine.requests for key in request.keys} == {"eval"}


def test_a_step_that_is_evaluated_again_replaces_what_was_written_of_it(tmp_path: Path) -> None:
    for _ in range(2):
        asyncio.run(evaluate(tmp_path, a=0))
    [results] = tmp_path.rglob("aggregated_results.jsonl")
    assert len(results.read_text(encoding="utf-8").splitlines()) == 1


async def test_an_evaluation_in_which_everything_fails_stops_with_the_reason() -> None:
    failed = r"environments failed [4-8] times among 4 samples"  # how many are tried again by then is a matter of time
    with pytest.raises(RewardError, match=f"{failed}.*\n.*the grader was away"):
        await evaluate(a=9, b=9)


async def test_an_evaluation_is_scored_for_each_source_and_written_down(tmp_path: Path) -> None:
    metrics = await evaluate(tmp_path, a=0, b=0)
    assert metrics["eval/default/pass_at_2"] == metrics["eval/all/best_at_2"] == 1.0
    assert metrics["eval/all/maj_at_2"] == 0.5
    folder = tmp_path / "global_step_4_evals"
    assert json.loads((folder / "aggregated_results.jsonl").read_text()) == metrics
    assert len((folder / "default.jsonl").read_text().splitlines()) == 4
