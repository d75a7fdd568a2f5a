"""Probes of `sampling_params`, by what the torch engine draws from the nano model, and of `eval_sampling_params`, by
what an evaluation asks an engine for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from skyrl.config import SamplingParams
from skyrl.experiments.factories import engine_makers
from skyrl.inference.engine import GenerationRequest, SampleKey
from skyrl.inference.vllm.sampling_arguments import check_sampling, sampling_arguments
from tests.effects.observables import problems
from tests.effects.probe import Probe, Scene, observable
from tests.effects.rollouts import evaluation

TRAINING, EVALUATION = "generator.sampling_params.", "generator.eval_sampling_params."
VLLM: Mapping[str, Any] = {"generator.inference_engine.backend": "vllm", "trainer.deterministic": False}
ENDS = list(range(200))
"""Most tokens, so that answers are short."""


@observable("the samples that the engine draws for a prompt of `trainer.max_prompt_length` tokens")
def drawn(scene: Scene) -> object:
    (make,) = engine_makers(scene.run)
    keys = tuple(SampleKey(run_seed=0, weight_version=0, prompt_id="0:0", sample_index=index) for index in range(2))
    prompt = tuple(range(scene.run.trainer.max_prompt_length))
    request = GenerationRequest(prompt_ids=prompt, sampling=scene.run.generator.sampling_params, keys=keys)

    async def draw() -> object:
        engine = make()
        try:
            return await engine.generate(request)
        finally:
            await engine.close()

    return asyncio.run(draw())


@observable("the sampling arguments that vLLM receives")
def arguments(scene: Scene) -> object:
    key = SampleKey(run_seed=0, weight_version=0, prompt_id="0:0", sample_index=0)

    def given(sampling: SamplingParams) -> object:
        check_sampling(sampling)
        return sampling_arguments(sampling, key, limit=8, eos_ids=(0,))

    return [given(scene.run.generator.sampling_params), given(scene.run.generator.eval_sampling_params)]


VALUES: Mapping[str, Any] = {
    "max_generate_length": 3,
    "max_tokens": 17,
    "temperature": 0.5,
    "logprobs": None,
    "repetition_penalty": 1.5,
    "frequency_penalty": 1.0,
    "stop": list("abcdefghijklmnopqrstuvwxyz"),
    "stop_token_ids": ENDS,
}

CUTS: Mapping[str, Any] = {"top_p": 0.2, "min_p": 0.5, "top_k": 2}
DRAWS = {f"{EVALUATION}temperature": 1.0}

PROBES: tuple[Probe, ...] = (
    *(Probe(f"{TRAINING}{name}", value, drawn) for name, value in {**VALUES, **CUTS}.items()),
    Probe(f"{TRAINING}min_new_tokens", 3, drawn, {f"{TRAINING}stop_token_ids": ENDS}),
    Probe(f"{TRAINING}greedy", True, problems),
    *(Probe(f"{EVALUATION}{name}", value, evaluation) for name, value in {**VALUES, "min_new_tokens": 3}.items()),
    *(Probe(f"{EVALUATION}{name}", value, evaluation, DRAWS) for name, value in {**CUTS, "greedy": True}.items()),
    *(
        Probe(f"{table}additional_kwargs", {"presence_penalty": 0.5}, arguments, VLLM)
        for table in (TRAINING, EVALUATION)
    ),
)
