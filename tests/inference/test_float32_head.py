"""The output head in float32: learner and engine then make the same logits of the same hidden states in 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl.experiments.factories import engine_makers
from skyrl.inference.engine import Completion
from skyrl.inference.torch.causal_lm import CausalLM
from skyrl.learners.data_parallel import computing_in
from skyrl.learners.forward import compute_logprobs, probe_forward
from skyrl.weight_sync.canary import rows
from tests.inference.nano import nano_model
from tests.nano_run import config

PROMPT = (5, 9, 2, 7, 3)
KINDS = ("llama", "qwen2, tied", "qwen3", "qwen2, eager", "mixtral")  # the last two are transformers' own passes


def learners_logprobs(model: Any, *, float32_head: bool) -> Tensor:
    """The learner's log-probability of each token after the first, computed in bfloat16."""
    options = probe_forward(model, pack=False, share_prompts=False, device=torch.device("cpu"))
    batch = rows([(PROMPT[:1], completion(PROMPT[1:]))])
    with torch.no_grad(), computing_in(model, torch.bfloat16):
        micro = options.prepare(batch)
        logprobs = compute_logprobs(model, micro, options, temperature=1.0, float32_head=float32_head)
    return logprobs.values[0, 1:]


def completion(tokens: tuple[int, ...]) -> Completion:
    nothing = (0,) * len(tokens)
    return Completion(token_ids=tokens, text="", logprobs=nothing, weight_versions=nothing, stop_reason="length")


def engines_logits(model: Any, *, float32_head: bool) -> Tensor:
    engine = CausalLM(model.to(torch.bfloat16), float32_head=float32_head)
    with torch.inference_mode():
        prefixes = [engine.prefill([PROMPT[:end]])[0].logits for end in range(1, len(PROMPT))]
    return torch.stack(prefixes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_float32_head_multiplies_16_bit_states_without_rounding(kind: str) -> None:
    plain, exact = (engines_logits(nano_model(kind), float32_head=wide) for wide in (False, True))
    assert (plain.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(exact.bfloat16(), plain.bfloat16())  # the same numbers, before they were rounded
    assert not torch.equal(exact, exact.bfloat16().float())


@pytest.mark.parametrize("kind", KINDS)
def test_the_learner_computes_its_head_as_the_engine_does(kind: str) -> None:
    model = nano_model(kind)
    with torch.no_grad(), computing_in(model, torch.bfloat16):
        states = model.model(torch.tensor([PROMPT[:-1]]), use_cache=False).last_hidden_state[0]
        logits = states.float() @ model.lm_head.weight.float().T
    expected = logits.log_softmax(-1).gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    logprobs, rounded = (learners_logprobs(model, float32_head=wide) for wide in (True, False))
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    assert (rounded - expected).abs().max() > 1e-4


@pytest.mark.parametrize("on", [False, True])
def test_vllm_and_sglang_are_asked_for_it_by_their_own_names(nano: Path, tmp_path: Path, on: bool) -> None:
    def options(kind: str, **own: object) -> Any:
        values = {"generator__inference_engine__backend": kind, "trainer__fp32_lm_head": on}
        run = config(nano, tmp_path, generator__inference_engine__engine_init_kwargs=own, **values)
        maker: Any = engine_makers(run)[0]
        return dict(maker.args[0].engine_init_kwargs)

    head = {"head_dtype": "float32"} if on else {}
    assert options("vllm", hf_overrides={"rope_theta": 5.0}) == {"hf_overrides": {"rope_theta": 5.0, **head}}
    assert options("vllm") == ({"hf_overrides": head} if on else {})
    assert options("sglang") == ({"enable_fp32_lm_head": True} if on else {})
