"""Our extension of vLLM's workers, beside a transfer over gloo; only vLLM imports this module, in its workers."""

from __future__ import annotations

from skyrl.inference.vllm.worker import WorkerExtension
from tests.weight_sync import gloo_transfer

gloo_transfer.register()


class GlooReceiver(WorkerExtension):
    """`WorkerExtension` where `gloo` is one of vLLM's transfers."""
