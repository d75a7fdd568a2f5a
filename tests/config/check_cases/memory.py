"""Cases of the checks in `skyrl.config.checks.memory`."""

from __future__ import annotations

from typing import Any

LARGE: dict[str, Any] = {"trainer.policy.model.path": "Qwen/Qwen2.5-72B-Instruct", "trainer.device": "cuda"}
KIND = "trainer.placement.gpu_kind"

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "run_fits_gpu_memory": [({**LARGE, KIND: "H100-80"}, "generator.inference_engine.max_num_seqs")],
}

SILENT: dict[str, dict[str, Any]] = {"run_fits_gpu_memory": LARGE}
