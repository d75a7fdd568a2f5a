"""Cases of the checks of ranks that share sequences, matrices or experts."""

from __future__ import annotations

from typing import Any

from tests.config.check_cases.settings import CRITIC, MEGATRON, NO_KL, gpus

SHARED = {model: f"trainer.{model}.sequence_parallel_size" for model in ("policy", "critic", "ref")}
CUT = {model: f"trainer.{model}.tensor_parallel_size" for model in ("policy", "critic", "ref")}
SPREAD = {model: f"trainer.{model}.expert_parallel_size" for model in ("policy", "critic", "ref")}
PADDED = {"trainer.use_sample_packing": False}
EAGER = {"trainer.attention": "eager"}

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "sequence_parallel_needs_packing": [({**PADDED, **CRITIC, path: 2}, path) for path in SHARED.values()]
    + [({**PADDED, "trainer.ref.context_parallel_size": 2}, "trainer.ref.context_parallel_size")]
    + [
        ({**MEGATRON, **PADDED, path: 2}, path)
        for path in (f"trainer.{role}.megatron_config.context_parallel_size" for role in ("policy", "ref"))
    ],
    "sequence_parallel_needs_torch_attention": [
        ({**EAGER, SHARED["policy"]: 2}, SHARED["policy"]),
        ({"trainer.attention": "flash_attention_2", SHARED["ref"]: 2}, SHARED["ref"]),
    ],
    "attention_suits_device": [({"trainer.attention": "flash_attention_2"}, "trainer.attention")],
    "gathered_attention_has_no_dropout": [
        (
            {**CRITIC, f"trainer.{model}.use_dropout": True, f"trainer.{model}.context_parallel_size": 2},
            f"trainer.{model}.use_dropout",
        )
        for model in ("policy", "critic")
    ],
    "strategy_reads_degrees": [
        ({**MEGATRON, **CRITIC, path: 2}, path) for path in (*SHARED.values(), *CUT.values(), *SPREAD.values())
    ]
    + [({**MEGATRON, "trainer.ref.context_parallel_size": 2}, "trainer.ref.context_parallel_size")]
    + [({"trainer.strategy": "deepspeed", **CRITIC, path: 2}, path) for path in SPREAD.values()],
    "expert_parallel_needs_fsdp": [
        ({**gpus(4, "policy"), CUT["policy"]: 2, SPREAD["policy"]: 2}, SPREAD["policy"]),
        ({**gpus(4, "ref"), "trainer.ref.fsdp_config.fsdp_size": 2, SPREAD["ref"]: 2}, SPREAD["ref"]),
        ({**gpus(6, "policy"), SPREAD["policy"]: 4}, SPREAD["policy"]),
    ],
}

SILENT: dict[str, dict[str, Any]] = {
    "sequence_parallel_needs_packing": {**PADDED, **NO_KL, SHARED["ref"]: 2, SHARED["critic"]: 2},  # neither is there
    "sequence_parallel_needs_torch_attention": {
        **EAGER,
        **MEGATRON,
        SHARED["policy"]: 2,
    },  # which another check tells
    "attention_suits_device": {"trainer.attention": "flash_attention_2", "trainer.device": "cuda"},
    "gathered_attention_has_no_dropout": {
        "trainer.policy.use_dropout": True,
        SHARED["policy"]: 2,
        "trainer.critic.use_dropout": True,
        "trainer.critic.context_parallel_size": 2,  # there is none
    },
    "strategy_reads_degrees": {**MEGATRON, **NO_KL, CUT["ref"]: 2, CUT["critic"]: 2},
    "expert_parallel_needs_fsdp": {
        **gpus(4, "policy"),
        "trainer.policy.fsdp_config.fsdp_size": 4,
        SPREAD["policy"]: 2,
        SPREAD["critic"]: 3,  # there is none
    },
}
