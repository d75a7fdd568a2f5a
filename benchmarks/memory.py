"""Memory that `skyrl plan` estimates for a learner, beside the peak that is measured. A table, and one JSON line.

    python benchmarks/memory.py [name ...]

Two Qwen2 with random weights, of 3 and 68 million parameters, on one and two ranks on CPUs: bytes of tensors at the
peak of each phase, in megabytes, and by how much the estimate is off. Peaks are those of the rank that has more. Takes
about half a minute for each setting.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.memory_peaks import PHASES, Measured, estimated, measured
from skyrl.config import MixedPrecisionConfig

_QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 512,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
SMALL = _QWEN2 | {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
LARGE = _QWEN2 | {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 12}

FOUR_ROWS = {"micro_train_batch_size_per_gpu": 4, "micro_forward_batch_size_per_gpu": 4}
RECOMPUTED = FOUR_ROWS | {"recompute_activations": True}
PADDED = FOUR_ROWS | {"use_sample_packing": False}
_ZERO = "policy.deepspeed_config.zero_optimization."


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    """DeepSpeed in this stage, with a small bucket: the default one is larger than these models."""
    return FOUR_ROWS | {
        "strategy": "deepspeed",
        f"{_ZERO}stage": stage,
        f"{_ZERO}reduce_bucket_size": 1_000_000,
        **{_ZERO + name: value for name, value in settings.items()},
    }


def _setting(model: Mapping[str, Any], changes: Mapping[str, Any], ranks: int = 1) -> Measured:
    return Measured(model=model, changes=changes, ranks=ranks)


SETTINGS: Mapping[str, Measured] = {
    "3M": _setting(SMALL, FOUR_ROWS),
    "3M, recomputed": _setting(SMALL, RECOMPUTED),
    "3M, LoRA": _setting(SMALL, FOUR_ROWS | {"policy.model.lora.rank": 8}),
    "3M, prompts not shared": _setting(SMALL, FOUR_ROWS | {"share_group_prompts": False}),
    "3M, padded": _setting(SMALL, PADDED),
    "3M, FSDP2": _setting(SMALL, FOUR_ROWS, 2),
    "3M, ZeRO-2": _setting(SMALL, zero(2), 2),
    "3M, ZeRO-3": _setting(SMALL, zero(3), 2),
    "3M, 2 ranks share sequences": _setting(SMALL, FOUR_ROWS | {"policy.sequence_parallel_size": 2}, 2),
    "3M, 2 ranks share keys": _setting(SMALL, FOUR_ROWS | {"policy.context_parallel_size": 2}, 2),
    "3M, 2 ranks cut matrices": _setting(SMALL, FOUR_ROWS | {"policy.tensor_parallel_size": 2}, 2),
    **{
        f"3M, ZeRO-{stage}, 2 ranks cut matrices": _setting(SMALL, zero(stage) | {"policy.tensor_parallel_size": 2}, 2)
        for stage in (0, 2, 3)
    },
    "68M": _setting(LARGE, FOUR_ROWS),
    "68M, recomputed": _setting(LARGE, RECOMPUTED),
    "68M, LoRA": _setting(LARGE, FOUR_ROWS | {"policy.model.lora.rank": 16}),
    "68M, one row": _setting(LARGE, {"micro_forward_batch_size_per_gpu": 8}),
    "68M, padded, bfloat16": _setting(LARGE, PADDED | {"compute_dtype": "bfloat16"}),
    "68M, FSDP2": _setting(LARGE, FOUR_ROWS, 2),
    "68M, FSDP2, recomputed": _setting(LARGE, RECOMPUTED, 2),
    "68M, FSDP2, padded, bfloat16": _setting(LARGE, PADDED | {"compute_dtype": "bfloat16"}, 2),
    "68M, FSDP2, padded, gathered in bfloat16": _setting(
        LARGE, PADDED | {"policy.fsdp_config.mixed_precision": MixedPrecisionConfig(param_dtype="bf16")}, 2
    ),
    "68M, FSDP2, LoRA": _setting(LARGE, FOUR_ROWS | {"policy.model.lora.rank": 16}, 2),
    "68M, FSDP2, on the host": _setting(LARGE, FOUR_ROWS | {"policy.fsdp_config.cpu_offload": True}, 2),
    "68M, FSDP2, kept gathered": _setting(LARGE, FOUR_ROWS | {"policy.fsdp_config.reshard_after_forward": False}, 2),
    "68M, ZeRO-2": _setting(LARGE, zero(2), 2),
    "68M, ZeRO-3": _setting(LARGE, zero(3), 2),
    "68M, ZeRO-3, recomputed": _setting(LARGE, zero(3) | {"recompute_activations": True}, 2),
    "68M, ZeRO-3, offloaded": _setting(
        LARGE, zero(3, **{"offload_param.device": "cpu", "offload_optimizer.device": "cpu"}), 2
    ),
}


def main(names: list[str]) -> None:
    """Print a row as soon as it is measured, then everything as JSON."""
    print(f"{'megabytes, measured / estimated':32}" + "".join(f"{phase:>26}" for phase in PHASES))
    ratios = {}
    for name in names or SETTINGS:
        peaks, guesses = measured(SETTINGS[name]), estimated(SETTINGS[name])
        ratios[name] = {phase: round(guesses[phase] / peaks[phase], 3) for phase in PHASES}
        cells = (
            f"{peaks[phase] / 1e6:>9.1f} /{guesses[phase] / 1e6:>7.1f} ({ratios[name][phase] - 1:+.0%})"
            for phase in PHASES
        )
        print(f"{name:32}" + "".join(f"{cell:>26}" for cell in cells), flush=True)
    print(json.dumps({"benchmark": "memory", "estimated_over_measured": ratios}))


if __name__ == "__main__":
    main(sys.argv[1:])
