"""How samples are drawn: by which engine, with which parameters, over how many turns."""

from collections.abc import Mapping
from typing import Any, Literal

from skyrl.config.foundation.entry import BaseConfig
from skyrl.config.settings.engines import InferenceEngineConfig
from skyrl.tree import FREE, FrozenDict, field, frozen
from skyrl.tree.validators import (
    between,
    fraction,
    no_empty_text,
    no_negative,
    non_negative,
    positive,
    positive_fraction,
)


@frozen
class SamplingParams(BaseConfig):
    """How one completion is drawn from the policy."""

    max_generate_length: int = field(default=1024, validator=positive)
    """Longest completion of one turn, in tokens, prompt excluded."""

    min_new_tokens: int = field(default=0, validator=non_negative)
    """Minimum number of tokens of a completion: before it is reached, no token that ends a completion can be drawn, and
    no stop text ends it. The learner does not apply it, so ratios of those tokens are off by the probability of ending.
    0: no minimum."""

    max_tokens: int | None = field(default=None, validator=positive)
    """Maximum number of tokens of prompt and completion together; a turn that starts from this many or more ends the
    trajectory. None: the limit of the model."""

    temperature: float = field(default=1.0, validator=non_negative)
    """Softmax temperature, unitless. 0 is greedy, which evaluation may use and training may not."""

    greedy: bool = False
    """Always take the likeliest token, whatever the temperature: for evaluation. False: as `temperature` says."""

    top_p: float = field(default=1.0, validator=positive_fraction)
    """Draw from the likeliest tokens that together have this probability. 1: from all."""

    min_p: float = field(default=0.0, validator=fraction)
    """Draw from tokens at least this likely relative to the likeliest (arXiv:2407.01082). 0: from all."""

    top_k: int = field(default=-1, validator=between(-1, 2**31 - 1))
    """Draw from this many of the likeliest tokens. -1 or 0: from all."""

    repetition_penalty: float = field(default=1.0, validator=positive)
    """Above 1, tokens that occurred before become less likely; below 1, likelier. 1: off. The learner does not apply
    it, so ratios are off by it."""

    frequency_penalty: float = field(default=0.0, validator=between(-2.0, 2.0))
    """Subtracted from a token's logit for each time that it occurred in the completion; below 0, repetition is
    encouraged. 0: off. The learner does not apply it, so ratios are off by it."""

    logprobs: Literal[0, 1] | None = 1
    """The engine returns the log-probability of each drawn token: 0 and 1 mean the same. None: none are kept, which
    rules out losses that need them and omits the metric `policy/rollout_train_logprobs_abs_diff`."""

    stop: tuple[str, ...] | None = field(default=None, validator=no_empty_text)
    """Texts that end a completion; they stay in it. None: only tokens end it."""

    stop_token_ids: tuple[int, ...] | None = field(default=None, validator=no_negative)
    """Tokens that end a completion besides the end-of-sequence tokens; they stay in it, and are trained on. None: no
    others do."""

    additional_kwargs: Mapping[str, Any] | None = None
    """Further sampling parameters, passed to the engine unchanged: vLLM has some, the torch engine none. None: no
    others."""


CHAT_TEMPLATES = ("qwen3_with_thinking", "qwen3_without_thinking")
"""Names of the built-in chat templates."""


@frozen
class ChatTemplateConfig(BaseConfig):
    """A chat template in place of the tokenizer's. With `use_conversation_multi_turn`, it renders the whole
    conversation again for each turn, as later users of the model will; see `docs/turns.md`.
    """

    source: Literal["name", "file"] = "name"
    """Kind of `name_or_path`: a file, or the name of a template (qwen3_with_thinking, qwen3_without_thinking)."""

    name_or_path: str | None = None
    """The name, or the path of a Jinja file of at most 1 MiB, which runs in a sandbox. None: the tokenizer's own."""


@frozen
class GeneratorConfig(BaseConfig):
    """The generating half of a run."""

    inference_engine: InferenceEngineConfig = InferenceEngineConfig()
    """Engines that serve the policy."""

    sampling_params: SamplingParams = SamplingParams()
    """How training samples are drawn."""

    eval_sampling_params: SamplingParams | None = None
    """How evaluation samples are drawn. If not set, `temperature` is 0 (greedy) and `max_generate_length` is that of
    the training samples; the other fields have the defaults of SamplingParams. An instance passed from Python is used
    unchanged."""

    n_samples_per_prompt: int = field(default=5, validator=positive)
    """Samples per training prompt: the size of a group."""

    eval_n_samples_per_prompt: int = field(default=1, validator=positive)
    """Samples per evaluation prompt; with N of them, pass@N is reported."""

    max_turns: int = field(default=1, validator=positive)
    """Maximum number of turns of the policy in one trajectory. Several environments take a single turn (aime, code,
    gsm8k, lcb, llm_as_a_judge, reward_model), and so do reward functions."""

    max_input_length: int | None = field(default=None, validator=positive)
    """Maximum number of tokens that a turn may start from: the prompt and all earlier turns. With more, the trajectory
    ends. None: `trainer.max_prompt_length`, which is the only valid value for a single turn, and too small for several;
    with `environment.agent`, six times `max_generate_length` more: three answers, and the same again from tools."""

    max_trajectories_in_flight: int | None = field(default=None, validator=positive, metadata=FREE)
    """Maximum number of trajectories played at the same time, in whole groups and at least one group; each has an open
    environment. None: all of a batch."""

    batched: bool = False
    """Sample the whole batch before the first answer is judged; single-turn only. False: each trajectory runs on its
    own."""

    use_conversation_multi_turn: bool = True
    """Each turn and each observation is a message of its own, written by the chat template. False: all of them continue
    one assistant message: an observation is text in it, and an end-of-sequence token before it is removed."""

    append_eos_token_after_stop_str_in_multi_turn: bool = True
    """End a turn that a stop text ended with the end-of-sequence token, as the model's chats do; that token is not
    trained on. Read where `use_conversation_multi_turn` is on, a stop text or stop token is given, and the template
    does not render the whole conversation again for each turn."""

    step_wise_trajectories: bool = False
    """Each turn starts from the conversation as the chat template writes it at that point, and is a training sample of
    its own; all turns get the trajectory's advantage. Batch sizes count trajectories."""

    merge_stepwise_output: bool = False
    """Join turns under `step_wise_trajectories`: a turn whose prompt begins with all tokens of the turn before stays in
    the same sample. Less to compute, and the same loss per token."""

    chat_template: ChatTemplateConfig = ChatTemplateConfig()
    """A chat template in place of the tokenizer's."""

    chat_template_kwargs: Mapping[str, Any] = FrozenDict()
    """Variables for the chat template, such as `enable_thinking`."""

    zero_reward_on_non_stop: bool = False
    """Reward 0 for a trajectory that did not end by itself (its stop reason is not `stop`)."""

    apply_overlong_filtering: bool = False
    """Leave trajectories that were cut off at the length limit out of the loss (DAPO, arXiv:2503.14476)."""

    rope_scaling: Mapping[str, Any] | None = None
    """Counterpart of `trainer.rope_scaling` for the engines. None: the trainer's value."""

    rope_theta: float | None = field(default=None, validator=positive)
    """Counterpart of `trainer.rope_theta` for the engines. None: the trainer's value."""
