"""Named starting points: `extends = "preset:dapo"` in a file. Each is a table that a user might have written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # One process, one machine, nothing that needs an account.
    "one-process": {
        "trainer": {"logger": "console", "placement": {"executor": "in_process"}},
        "generator": {"inference_engine": {"backend": "torch"}},
    },
    # Fast settings for CUDA with vLLM engines, where the defaults are conservative: micro-batches counted in tokens
    # instead of one sample at a time, and torch's own attention, which reads a group's prompt once.
    "cuda": {"trainer": {"device": "cuda", "flash_attn": False, "max_tokens_per_microbatch": 16_384}},
    # Group-relative advantages, arXiv:2402.03300: KL in the loss, mean over each answer, then over answers.
    "grpo": {
        "trainer": {
            "algorithm": {
                "advantage_estimator": "grpo",
                "loss_reduction": "sequence_mean",
                "use_kl_loss": True,
                "kl_estimator_type": "k3",
            }
        }
    },
    # arXiv:2503.20783: no division by the deviation, a sum of tokens over a fixed length, no KL.
    "dr-grpo": {
        "trainer": {
            "algorithm": {
                "advantage_estimator": "grpo",
                "grpo_norm_by_std": False,
                "loss_reduction": "seq_mean_token_sum_norm",
                "use_kl_loss": False,
            }
        }
    },
    # arXiv:2503.14476: clip-higher, mean over tokens, uniform groups resampled, truncated answers left out, no KL.
    "dapo": {
        "trainer": {
            "algorithm": {
                "advantage_estimator": "grpo",
                "eps_clip_low": 0.2,
                "eps_clip_high": 0.28,
                "loss_reduction": "token_mean",
                "use_kl_loss": False,
                "dynamic_sampling": {"type": "filter"},
            }
        },
        "generator": {"apply_overlong_filtering": True},
    },
}
