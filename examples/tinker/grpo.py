"""GRPO in plain Python against the training service: the loop is here, the model is in `skyrl serve-training`.

The small model of the quick start sorts letters, mostly the wrong way round; here it learns the right one.
"""

from __future__ import annotations

import argparse
import os
import random
from typing import Any

import numpy as np
import tinker
from tinker import types
from transformers import AutoTokenizer

KEY = os.environ.get("TINKER_API_KEY", "tml-local")
"""Token of the client; a service without tokens takes any that begins with tml-."""


def main() -> None:
    """Train, and print the mean reward of each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8010", help="address that the service printed")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=16, help="prompts in a step")
    parser.add_argument("--samples", type=int, default=8, help="answers to each prompt")
    args = parser.parse_args()

    service = tinker.ServiceClient(base_url=args.url, api_key=KEY)
    rest = tinker.RestClient(base_url=args.url, api_key=KEY)
    base = rest.get_server_capabilities().result().supported_models[0].model_name
    assert base is not None
    training = service.create_lora_training_client(base_model=base, rank=16, seed=1).result()
    tokenizer = AutoTokenizer.from_pretrained(base)
    letters = random.Random(1)

    for step in range(args.steps):
        sampler = training.save_weights_and_get_sampling_client().result()
        words = ["".join(letters.choices("abcdefgh", k=letters.randint(3, 7))) for _ in range(args.prompts)]
        prompts = [tokens_of(tokenizer, f"sort: {word}") for word in words]
        limits = types.SamplingParams(max_tokens=12, stop=[tokenizer.eos_token_id], seed=step)
        futures = [
            sampler.sample(types.ModelInput.from_ints(prompt), args.samples, sampling_params=limits)
            for prompt in prompts
        ]
        data, means = [], []
        for word, prompt, future in zip(words, prompts, futures, strict=True):
            answers = future.result().sequences
            texts = [str(tokenizer.decode(answer.tokens, skip_special_tokens=True)) for answer in answers]
            rewards = np.array([float(text == "".join(sorted(word))) for text in texts])
            means.append(rewards.mean())
            for answer, advantage in zip(answers, rewards - rewards.mean(), strict=True):
                if advantage:
                    data.append(datum(prompt, list(answer.tokens), list(answer.logprobs or []), float(advantage)))
        if data:
            learned = training.forward_backward(data, "importance_sampling")
            stepped = training.optim_step(types.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0))
            learned.result(), stepped.result()
        print(f"step {step + 1}: reward {np.mean(means):.2f}, {len(data)} answers with an advantage", flush=True)
    print(training.save_state("trained").result().path)


def tokens_of(tokenizer: Any, question: str) -> list[int]:
    """The chat up to where the answer begins."""
    chat = [{"role": "user", "content": question}]
    tokens: list[int] = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    return tokens


def datum(prompt: list[int], answer: list[int], logprobs: list[float], advantage: float) -> types.Datum:
    """One answer for the loss: at each position the next token, and numbers that are 0 on the prompt."""
    tokens, before = prompt + answer, len(prompt) - 1
    share = advantage / len(answer)  # each answer counts the same, whatever its length
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:])),
            "logprobs": numbers([0.0] * before + logprobs),
            "advantages": numbers([0.0] * before + [share] * len(answer)),
        },
    )


def numbers(values: list[float]) -> types.TensorData:
    """A number for each position."""
    return types.TensorData.from_numpy(np.array(values, dtype=np.float32))


if __name__ == "__main__":
    main()
