"""Writes a model's answers to prompts, without rewards, as JSON lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyrl.experiments.sampling import read_prompts
from skyrl.experiments.standalone import StandaloneSampling
from skyrl.inference.engine import Completion, GenerationRequest, SampleKey
from skyrl.processes.gather_or_cancel import gather_or_cancel
from skyrl.tools.sampling_target import Target
from skyrl.tracking.jsonlines import JsonLines
from skyrl.trajectory import Prompt
from skyrl.tree import required

NO_ENVIRONMENT = "none"
"""Environment name of prompts whose answers are not scored."""


ANSWERS = "answers.jsonl"


def generate(target: Target, sampling: StandaloneSampling) -> int:
    """Sample `eval_n_samples_per_prompt` answers to each prompt under `eval_sampling_params`, without an environment.

    Returns the number of answers. They are written to `answers.jsonl` in the sampling's folder in the order of the
    prompts, one batch at a time. Raises `DataError`.
    """
    run = sampling.cfg
    rows = read_prompts(run, run.data.val_data, sampling.tokenizer, env_class=NO_ENVIRONMENT).prompts
    lines, size = JsonLines(sampling.folder.path / ANSWERS), run.trainer.eval_batch_size

    async def work() -> int:
        count = 0
        for start in range(0, len(rows), size):
            for prompt, completions in await _answers(target, sampling, rows[start : start + size]):
                for number, completion in enumerate(completions):
                    lines.append(_record(prompt, number, completion))
                    count += 1
        return count

    return sampling.sample(work)


async def _answers(
    target: Target, sampling: StandaloneSampling, prompts: Sequence[Prompt]
) -> list[tuple[Prompt, tuple[Completion, ...]]]:
    run = sampling.cfg
    sampling_params = required(run.generator.eval_sampling_params, "generator.eval_sampling_params")
    requests = [
        GenerationRequest(
            prompt_ids=prompt.token_ids,
            sampling=sampling_params,
            keys=tuple(
                SampleKey(
                    run_seed=run.trainer.seed,
                    weight_version=target.step,
                    prompt_id=prompt.id,
                    sample_index=number,
                    purpose="eval",
                )
                for number in range(run.generator.eval_n_samples_per_prompt)
            ),
        )
        for prompt in prompts
    ]
    completions = await gather_or_cancel([sampling.client.generate(request) for request in requests])
    return list(zip(prompts, completions, strict=True))


def _record(prompt: Prompt, number: int, completion: Completion) -> dict[str, Any]:
    return {
        "prompt_id": prompt.id,
        "sample": number,
        "prompt": [dict(message) for message in prompt.messages],
        "response": completion.text,
        "stop_reason": completion.stop_reason,
        "response_ids": list(completion.token_ids),
        "logprob": sum(completion.logprobs) if completion.logprobs else None,
    }
