"""Writes a model's answers to prompts, without rewards, as JSON lines; with its distributions as parquet, too."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from skyrl.config import SkyRLTrainConfig
from skyrl.config.derive.engine_backends import backend_of
from skyrl.data.stored_distributions import IDS, LOGPROBS, DistributionsFile
from skyrl.errors import ConfigError, Problem, UserError
from skyrl.experiments.sampling import read_prompts
from skyrl.experiments.standalone import StandaloneSampling
from skyrl.inference.engine import Completion, GenerationRequest, SampleKey
from skyrl.processes.gather_or_cancel import gather_or_cancel
from skyrl.tools.sampling_target import Target
from skyrl.tracking.jsonlines import JsonLines
from skyrl.trajectory import Prompt
from skyrl.tree import required

_SAMPLING = "generator.eval_sampling_params"

NO_ENVIRONMENT = "none"
"""Environment name of prompts whose answers are not scored."""


ANSWERS = "answers.jsonl"
DISTRIBUTIONS = "distributions.parquet"


def generate(target: Target, sampling: StandaloneSampling, *, top_logprobs: int = 0) -> int:
    """Sample `eval_n_samples_per_prompt` answers to each prompt under `eval_sampling_params`, without an environment.

    Returns the number of answers. They are written to `answers.jsonl` in the sampling's folder in the order of the
    prompts, one batch at a time. With `top_logprobs`, the answers and as many of the likeliest tokens in place of each
    of theirs are written to `distributions.parquet`, too: see `skyrl.data.stored_distributions`. Raises `DataError`,
    and `ConfigError` for settings under which these are not the model's own.
    """
    run = sampling.cfg
    if top_logprobs:
        _refuse_distributions(run, top_logprobs, len(sampling.tokenizer))
    rows = read_prompts(run, run.data.val_data, sampling.tokenizer, env_class=NO_ENVIRONMENT).prompts
    lines, size = JsonLines(sampling.folder.path / ANSWERS), run.trainer.eval_batch_size

    async def work() -> int:
        count = 0
        stored = DistributionsFile(sampling.folder.path / DISTRIBUTIONS) if top_logprobs else None
        with stored or nullcontext():
            for start in range(0, len(rows), size):
                completions = await _answers(target, sampling, rows[start : start + size], top_logprobs)
                answers = [
                    (prompt, number, sample) for prompt, drawn in completions for number, sample in enumerate(drawn)
                ]
                for answer in answers:
                    lines.append(_record(*answer))
                if stored is not None:
                    stored.write([_taught(*answer) for answer in answers if answer[2].token_ids])
                count += len(answers)
        return count

    return sampling.sample(work)


async def _answers(
    target: Target, sampling: StandaloneSampling, prompts: Sequence[Prompt], top_logprobs: int
) -> list[tuple[Prompt, tuple[Completion, ...]]]:
    run = sampling.cfg
    sampling_params = required(run.generator.eval_sampling_params, _SAMPLING)
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
            top_logprobs=top_logprobs,
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


def _taught(prompt: Prompt, number: int, completion: Completion) -> dict[str, Any]:
    top_logprobs = completion.top_logprobs
    assert top_logprobs is not None
    tokens, answer = list(prompt.token_ids), list(completion.token_ids)
    return {
        "prompt_id": prompt.id,
        "sample": number,
        "input_ids": tokens + answer,
        "loss_mask": [0] * len(tokens) + [1] * len(answer),
        IDS: top_logprobs.token_ids.tolist(),
        LOGPROBS: top_logprobs.logprobs.tolist(),
    }


def _refuse_distributions(run: SkyRLTrainConfig, count: int, vocabulary: int) -> None:
    """Raises `ConfigError` for settings that change the probabilities which engines report, `UserError` for more tokens
    than there are, and `ConfigError` for more than the engine reports.
    """
    sampling = required(run.generator.eval_sampling_params, _SAMPLING)
    unchanged = {"temperature": 1.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "min_new_tokens": 0}
    problems = [
        Problem(
            path=f"{_SAMPLING}.{name}",
            message=f"with {getattr(sampling, name):g} the likeliest tokens of --top-logprobs are not the model's own",
            hint=f"set it to {value:g}",
        )
        for name, value in unchanged.items()
        if getattr(sampling, name) != value
    ]
    if problems:
        raise ConfigError(problems)
    engine = run.generator.inference_engine
    if count > vocabulary:
        raise UserError(f"--top-logprobs {count}: the tokenizer has {vocabulary} tokens")
    most = engine.engine_init_kwargs.get("max_logprobs", backend_of(engine).max_logprobs)
    if most is not None and count > most:
        path = "generator.inference_engine.engine_init_kwargs.max_logprobs"
        message = f"the engine reports {most} log-probabilities at most, and --top-logprobs asks for {count}"
        raise ConfigError([Problem(path=path, message=message, hint=f"set it to {count}")])
