"""`python -m sglang.launch_server`: the stand-in of SGLang's server, over the torch engine, started by a command."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

OPTIONS = (
    *("model-path", "host", "port", "device", "dtype", "random-seed", "context-length", "tp-size"),
    *("max-running-requests", "mem-fraction-static", "chunked-prefill-size", "max-lora-rank", "schedule-policy"),
)
SWITCHES = (
    "disable-radix-cache",
    "disable-cuda-graph",
    "enable-deterministic-inference",
    "enable-metrics",
    "enable-lora",
)
"""Options of SGLang's server that a run may give; another one ends it, as it ends SGLang's."""


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in OPTIONS:
        parser.add_argument(f"--{name}")
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--lora-target-modules", nargs="*")
    given = parser.parse_args()
    serve(given)


def serve(given: argparse.Namespace) -> None:
    import torch  # after the command line was read: a wrong one ends at once
    from transformers import AutoModelForCausalLM

    from skyrl.inference.torch.engine import TorchEngine
    from skyrl.models.files.loading import load_tokenizer
    from tests.inference.sglang_stand_in import SGLangStandIn

    assert (given.host, given.device, given.tp_size) == ("127.0.0.1", "cpu", "1")
    model = AutoModelForCausalLM.from_pretrained(given.model_path, dtype=getattr(torch, given.dtype))
    engine = TorchEngine(
        model,
        load_tokenizer(given.model_path),
        max_num_seqs=int(given.max_running_requests),
        max_model_len=int(given.context_length),
    )
    with SGLangStandIn(engine, Path(given.model_path), enable_lora=given.enable_lora, port=int(given.port)):
        threading.Event().wait()


if __name__ == "__main__":
    main()
