"""A model to load, and the low-rank adapter that may be trained instead of its weights."""

import re
from typing import ClassVar, Literal

from skyrl.config.foundation.entry import BaseConfig
from skyrl.tree import FREE, IDENTITY, field, frozen
from skyrl.tree.validators import fraction_below_one, non_negative, positive, rule_of_one_field

Dtype = Literal["bfloat16", "bf16", "float16", "fp16", "float32", "fp32"]
"""A floating-point type, in its long or its short spelling."""

_INITS = ("kaiming", "xavier", "normal", "zero", "gaussian", "eva", "olora", "pissa", "corda", "loftq", "orthogonal")
_adapter_init = rule_of_one_field(
    lambda value: value in _INITS or re.fullmatch(r"pissa_niter_[1-9]\d*", value) is not None,
    f"one of: {', '.join(_INITS)}, pissa_niter_<iterations>",
)


@frozen
class SkyRLLoraConfig(BaseConfig):
    """Low-rank adaptation (LoRA, arXiv:2106.09685): W is kept, W + (alpha / rank) B A is used, A and B are trained."""

    rank: int = field(default=0, validator=non_negative, metadata=IDENTITY)
    """Inner dimension of A and B. 0: no adapter, all weights are trained."""

    path: str | None = field(default=None, metadata=IDENTITY)
    """Folder of a stored adapter to start from, with PEFT's `adapter_config.json` and `adapter_model.safetensors`, such
    as the one that a run exports; `rank`, `alpha` and the modules must match it. A reference needs one, which is merged
    into its weights. None: a new adapter."""

    alpha: int = field(default=16, validator=positive)
    """Scale of the adapter: its output is multiplied by `alpha / rank`."""

    dropout: float = field(default=0.0, validator=fraction_below_one)
    """Probability that an input of the adapter is dropped while training. 0: none. Scores are computed without it, so
    that it adds noise to a ratio to old log-probabilities."""

    lora_sync_path: str = field(default="/tmp/skyrl_lora_sync", metadata=FREE)
    """Folder through which the adapter reaches vLLM engines and servers, and the torch engine on Ray where
    `weight_sync_backend` is disk; they read it under the same path. Read for the policy."""

    target_modules: str | tuple[str, ...] = field(default="all-linear", metadata=IDENTITY)
    """Modules that get an adapter: `all-linear` for every linear layer but the head, a regular expression, or names.
    The experts of a mixture of experts are not linear layers and get none, so `all-linear` covers only the attention.
    """

    exclude_modules: str | tuple[str, ...] | None = field(default=None, metadata=IDENTITY)
    """Modules that get no adapter although `target_modules` matches them: a regular expression, or names."""

    init_method: str = field(default="kaiming", validator=_adapter_init)
    """Initialization of A; B starts at zero. kaiming, gaussian or orthogonal (which needs an even rank), drawn from
    `trainer.seed`, as in PEFT's `init_lora_weights`. Other names from PEFT and Megatron are not supported yet."""


@frozen
class ModelConfig(BaseConfig):
    """One set of weights."""

    named_by: ClassVar[str] = "path"

    path: str | None = field(default=None, metadata=IDENTITY)
    """Hugging Face name or folder. None: for the reference, the policy's model; for the critic, no critic."""

    init_from_scratch: bool = field(default=False, metadata=IDENTITY)
    """Draw all weights from `trainer.seed`, as the architecture initializes them, and load none: the folder needs a
    configuration and a tokenizer only. Policy, reference and engines of one path and seed start alike."""

    lora: SkyRLLoraConfig = SkyRLLoraConfig()
    """Adapter on top of the weights: trained for the policy and the critic, stored for the reference."""
