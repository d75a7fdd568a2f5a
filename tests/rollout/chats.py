"""A tokenizer with a chat template, an engine that says what it is told to, and environments that talk back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from skyrl.config import GeneratorConfig, InferenceEngineConfig, SamplingParams, SkyRLGymConfig, SkyRLLoraConfig
from skyrl.envs import Env, EnvStep
from skyrl.inference.engine import Completion, GenerationRequest
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.rollout.generator import SkyRLGymGenerator
from skyrl.trajectory import Prompt

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_tokenizer(template: str = CHATML, extra: Sequence[str] = ()) -> Any:
    """One token for each byte and each special token; `<|im_end|>` ends a sequence."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", *extra])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=template)


class Says:
    """An engine that answers turn after turn from a list of texts for each sample; each token has a log-probability of
    its own, by which it is known again.
    """

    def __init__(self, tokenizer: Any, *turns: Sequence[str], stop_reason: Any = "stop") -> None:
        self.tokenizer, self.turns, self.stop_reason = tokenizer, turns, stop_reason
        self.requests: list[GenerationRequest] = []
        self.weight_version = 4

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        self.requests.append(request)
        return tuple(self.completion(self.turns[key.sample_index][key.turn]) for key in request.keys)

    def completion(self, text: str) -> Completion:
        ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        return Completion(
            token_ids=ids,
            text=self.tokenizer.decode(ids, skip_special_tokens=True),
            logprobs=tuple(-0.01 * (index + 1) for index in range(len(ids))),
            weight_versions=(4,) * len(ids),
            stop_reason=self.stop_reason,
        )


class Counts(Env):
    """Wants three turns, says what it saw, and pays one more for each."""

    turns = 3

    def __init__(self, extras: Mapping[str, Any]) -> None:
        super().__init__(extras)
        self.seen: list[str] = []
        self.closed = 0

    def step(self, action: str) -> EnvStep:
        self.seen.append(action)
        done = len(self.seen) == self.turns
        observations = ({"role": "user", "content": f"saw {action}"},)
        return EnvStep(reward=float(len(self.seen)), done=done, observations=() if done else observations)

    def get_metrics(self) -> dict[str, float]:
        return {"steps": float(len(self.seen))}

    def close(self) -> None:
        self.closed += 1


def prompt(tokenizer: Any, env_class: str, content: str = "go", **extras: Any) -> Prompt:
    messages = ({"role": "user", "content": content},)
    ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
    return Prompt(id="p", messages=messages, token_ids=tuple(ids), env_class=env_class, extras=extras)


def generator(engine: Any, tokenizer: Any, gym: SkyRLGymConfig | None = None, **config: Any) -> SkyRLGymGenerator:
    lora = SkyRLLoraConfig()
    client = InferenceEngineClient([engine], tokenizer, "model", lora, InferenceEngineConfig())
    settings = GeneratorConfig(**{"max_turns": 5, **config})
    return SkyRLGymGenerator("model", lora, settings, gym or SkyRLGymConfig(), client, tokenizer)


async def play(generator: SkyRLGymGenerator, *prompts: Prompt, samples: int = 1) -> Any:
    """The groups of these prompts."""
    return await generator.generate(prompts, sampling=SamplingParams(), samples_per_prompt=samples, weight_version=4)
