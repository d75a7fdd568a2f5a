"""Log-probabilities of tokens at a vocabulary of 151,936: memory and time beside the table of logits. One JSON line.

    python benchmarks/linear_logprobs.py [cuda]

Forward and backward in float32 at width 64, so that the numbers are about the table and not about the matrix. Three
ways: `naive` makes the table and `log_softmax` of it; `checkpointed` makes it for 256 tokens at a time and again in
backward, by torch.utils.checkpoint; `fused` is `skyrl.algorithms.linear_logprobs`. Each in a process of its own; peak
is the growth of the resident set over what it was with inputs in place, time process CPU time. Where naive would need
more than `FITS` bytes, its figures are extrapolated from the largest count that was measured, in proportion to the
tokens, and marked so.

On CUDA: bfloat16 at width 2048, seconds of the device, and the growth of what tensors take there. Where liger-kernel is
installed, `liger` is its fused linear cross entropy, which gives the sum of the log-probabilities alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

VOCABULARY = 151_936
WIDTHS = {"cpu": 64, "cuda": 2048}
COUNTS = {"cpu": (1024, 2048, 8192), "cuda": (1024, 8192, 32_768)}
FITS = {"cpu": 6 * 2**30, "cuda": 20 * 2**30}
WAYS = ("naive", "checkpointed", "fused")


def run(method: str, tokens: int, device: str) -> dict[str, float]:
    """Once, in this process."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from skyrl.algorithms.linear_logprobs import linear_logprobs

    torch.manual_seed(0)
    width, dtype = WIDTHS[device], torch.float32 if device == "cpu" else torch.bfloat16
    hidden = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(VOCABULARY, width, device=device, dtype=dtype) / width**0.5).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (tokens,), device=device)

    def table(hidden: Any, targets: Any) -> Any:
        return torch.log_softmax((hidden @ weight.T).float(), -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)

    def logprobs() -> Any:
        if method == "naive":
            return table(hidden, targets)
        if method == "fused":
            return linear_logprobs(hidden, weight, targets, temperature=1.0)[0]
        if method == "liger":
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            return -LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, hidden, targets)
        parts = zip(hidden.split(256), targets.split(256), strict=True)
        return torch.cat([checkpoint(table, chunk, own, use_reentrant=False) for chunk, own in parts])

    (torch.randn(64, 64, device=device) @ torch.randn(64, 64, device=device)).sum().item()  # the library is loaded
    if device == "cuda":
        logprobs().sum().backward()  # and kernels are compiled
        hidden.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
    before, start = _peak(device), _now(device)
    result = logprobs()
    result.sum().backward()
    assert hidden.grad is not None
    return {
        "seconds": _now(device) - start,
        "bytes": _peak(device) - before,
        "sum": result.sum().item(),
        "norm": hidden.grad.norm().item(),
    }


def _peak(device: str) -> int:
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    import torch

    return torch.cuda.max_memory_allocated()


def _now(device: str) -> float:
    """CPU time of the process, or the time when the GPU is done."""
    if device == "cpu":
        return time.process_time()
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


def measure(method: str, tokens: int, device: str) -> dict[str, float]:
    """In a process of its own; small counts twice, of which the faster counts."""
    command = [sys.executable, __file__, method, str(tokens), device]
    repeats = 2 if tokens < 4096 else 1
    results = [json.loads(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(repeats)]
    best: dict[str, float] = min(results, key=lambda result: float(result["seconds"]))
    return best


def main(device: str) -> None:
    """Prints the line."""
    results: dict[int, dict[str, dict[str, Any]]] = {}
    installed = ("liger",) if device == "cuda" and importlib.util.find_spec("liger_kernel") else ()
    for tokens in COUNTS[device]:
        methods = [
            method for method in (*WAYS, *installed) if method != "naive" or 3 * 4 * tokens * VOCABULARY < FITS[device]
        ]
        results[tokens] = {method: measure(method, tokens, device) for method in methods}
        if "naive" not in methods:
            largest = max(
                count for count in results if not results[count].get("naive", {"extrapolated": 1}).get("extrapolated")
            )
            scale = tokens / largest
            known = results[largest]["naive"]
            results[tokens]["naive"] = {"extrapolated": True} | {
                name: known[name] * scale for name in ("seconds", "bytes")
            }
    ratios = {
        str(tokens): {
            "peak_of_naive": round(measurements["fused"]["bytes"] / measurements["naive"]["bytes"], 3),
            "time_of_naive": round(measurements["fused"]["seconds"] / measurements["naive"]["seconds"], 2),
            "peak_of_checkpointed": round(measurements["fused"]["bytes"] / measurements["checkpointed"]["bytes"], 3),
            "time_of_checkpointed": round(
                measurements["fused"]["seconds"] / measurements["checkpointed"]["seconds"], 2
            ),
            **(
                {"time_of_liger": measurements["fused"]["seconds"] / measurements["liger"]["seconds"]}
                if "liger" in measurements
                else {}
            ),
            "naive": "extrapolated" if measurements["naive"].get("extrapolated") else "measured",
        }
        for tokens, measurements in results.items()
    }
    print(json.dumps({"benchmark": "linear_logprobs", "vocabulary": VOCABULARY, "ratios": ratios, "raw": results}))


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(json.dumps(run(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
    else:
        main("cuda" if sys.argv[1:] == ["cuda"] else "cpu")
