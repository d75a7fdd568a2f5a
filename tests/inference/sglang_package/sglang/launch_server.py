"""`python -m sglang.launch_server`: the stand-in of SGLang's server, over the torch engine, started by a command."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

OPTIONS = (
    *("model-path", "host", "port", "device", "dtype", "random-seed", "context-length", "tp-size"),
    *(
        "log-level-http",
        "max-running-requests",
        "mem-fraction-static",
        "chunked-prefill-size",
        "max-lora-rank",
        "schedule-policy",
    ),
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
    args = parser.parse_args()
    serve(args)


def serve(args: argparse.Namespace) -> None:
    import torch  # after the command line was read: a wrong one ends at once
    from transformers import AutoModelForCausalLM

    from skyrl.inference.torch.engine import TorchEngine
    from skyrl.models.files.loading import load_tokenizer
    from tests.inference.sglang_stand_in import SGLangStandIn

    assert (args.host, args.device, args.tp_size) == ("127.0.0.1", "cpu", "1")
    model = AutoModelForCausalLM.from_pretrained(args.model_path, dtype=getattr(torch, args.dtype))
    engine = TorchEngine(
        model,
        load_tokenizer(args.model_path),
        max_num_seqs=int(args.max_running_requests),
        max_model_len=int(args.context_length),
    )
    with SGLangStandIn(engine, Path(args.model_path), enable_lora=args.enable_lora, port=int(args.port)):
        threading.Event().wait()


if __name__ == "__main__":
    main()
