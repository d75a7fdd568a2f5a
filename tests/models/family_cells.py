"""What each family of models does, measured on a small model of it: the table of `docs/models.md`.

`python -m tests.models.family_cells [FAMILY]...` writes `families.json`, from which `python -m tests.pages` makes the
table. Each number is the largest difference of a log-probability, in nats, or of the gradient, as
a part of its norm, from transformers' `eager` pass of each row alone.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from skyrl.batch import TrainingBatch
from skyrl.config import (
    AlgorithmConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    SamplingParams,
    SkyRLLoraConfig,
    TrainerConfig,
)
from skyrl.config.derive.model_overrides import LONGEST_ROW
from skyrl.errors import ModelError
from skyrl.inference.engine import GenerationRequest, SampleKey
from skyrl.inference.torch.engine import load_torch_engine
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
from tests.learners.pool import Pool
from tests.learners.spreading import changed
from tests.learners.updating import LearnerGroup, PolicyWorker
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
    "lora": "LoRA, merged",
    "export": "export, read back",
    "sharded": "FSDP2, 2 ranks",
    "cut": "TP, 2 ranks",
    "megatron": "Megatron",
}

_GROUPS = ((30, (30, 4, 9)), (5, (3, 14)), (1, (12,)))


def store(family: str, nano: Path, folder: Path) -> str:
    """A model with random weights, and the tokenizer of the nano model."""
    tokenizer: Any = AutoTokenizer.from_pretrained(nano)
    config: Any = FAMILIES[family].config()
    for name in ("vocab_size", "vocab_size_per_layer_input"):
        if hasattr(config, name):
            setattr(config, name, len(tokenizer))
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def rows(vocabulary: int) -> TrainingBatch:
    """Groups of short and long rows, with random tokens and advantages."""
    draws = torch.Generator().manual_seed(0)
    ids, prompts, groups = [], [], []
    for group, (prompt, answers) in enumerate(_GROUPS):
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


def definition(path: str) -> Any:
    """The model as transformers defines it, with the rotary embeddings of the run."""
    config = load_config(path, {LONGEST_ROW: LONGEST})
    return AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def alone(model: Any, batch: TrainingBatch) -> Tensor:
    """(B, L): log-probability of each token, from a pass of its row alone; 0 for the first and for padding."""
    width = batch.input_ids.shape[1]
    columns: list[Tensor] = []
    for row, length in zip(batch.input_ids, batch.lengths.tolist(), strict=True):
        scored = torch.log_softmax(model(input_ids=row[:length].unsqueeze(0), use_cache=False).logits[0].float(), -1)
        taken = scored[:-1].gather(-1, row[1:length].unsqueeze(1)).squeeze(1)
        columns.append(torch.nn.functional.pad(taken, (1, width - length)))
    return torch.stack(columns)


def trainer_of(
    path: str, *, lora: int = 0, lr: float = 1e-3, optimizer: Literal["adamw", "sgd"] = "adamw"
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
        longest_row=LONGEST,
        micro_train_batch_size_per_gpu=16,
        micro_forward_batch_size_per_gpu=16,
    )


def worker(path: str, *, lora: int = 0, lr: float = 1e-3) -> PolicyWorker:
    """The learner in this process."""
    trainer = trainer_of(path, lora=lora, lr=lr)
    return PolicyWorker(trainer, policy_objective(trainer.algorithm))


def cells(family: str, nano: Path, folder: Path, pool: Pool) -> Iterator[tuple[str, str | float]]:
    """Column and content of each cell of the family's row: a difference, or a clause that says what does not work.
    The `pool` has the processes of two ranks.
    """
    path = store(family, nano, folder / "model")
    config = load_config(path, {LONGEST_ROW: LONGEST})
    support = row_support(config, "sdpa", pack=True, share_prompts=True)
    shares = ", shared prompts" if support.share_prompts else ""
    by = "" if support.attention == SEGMENTS else f", {support.attention}"
    yield "rows", f"{'packed' if support.pack else 'unpacked'}{shares}{by}"
    truth, learner = definition(path), worker(path)
    batch = rows(config.get_text_config().vocab_size)
    expected = alone(truth, batch)
    yield "learner", _apart(asyncio.run(learner.score(batch)), expected, batch)
    yield "gradient", _gradient(learner, truth, batch, expected)
    yield "engine", asyncio.run(_sampled(path, truth))
    yield "lora", _trained(path, batch, folder / "lora", lora=4)
    yield "export", _trained(path, batch, folder / "export", lora=0)
    yield "sharded", spread(pool, path, batch, expected, {"strategy": "fsdp2"})
    yield "cut", spread(pool, path, batch, expected, {"policy.tensor_parallel_size": 2})
    yield "megatron", "yes" if config.model_type in ARCHITECTURES and sees_whole_rows(config) else "no converter"


def _apart(found: Tensor, expected: Tensor, batch: TrainingBatch) -> float:
    return float((found - expected.detach())[batch.loss_mask].abs().max())


def _gradient(learner: PolicyWorker, truth: Any, batch: TrainingBatch, expected: Tensor) -> float:
    """Distance of the learner's gradient of one update from that of a plain loop over rows."""
    assert batch.advantages is not None
    (-(batch.advantages * expected)[batch.loss_mask].sum() / batch.loss_mask.sum()).backward()
    wanted = {name: each.grad for name, each in truth.named_parameters() if each.grad is not None}
    found: dict[str, Tensor] = {}
    step = learner.strategy.step

    def taken(settings: StepSettings) -> float:
        found.update(
            {name: each.grad.clone() for name, each in learner.model.named_parameters() if each.grad is not None}
        )
        return step(settings)

    learner.strategy.step = taken  # type: ignore[method-assign]  # the gradient is taken before it is used
    asyncio.run(learner.update(batch.given(old_logprobs=expected.detach())))
    assert wanted.keys() == found.keys()
    return _norm(found[name] - each for name, each in wanted.items()) / _norm(wanted.values())


def _norm(tensors: Any) -> float:
    return float(torch.stack([each.square().sum() for each in tensors]).sum().sqrt())


async def _sampled(path: str, truth: Any) -> float | str:
    """Distance of the log-probabilities of drawn tokens from those of their rows alone."""
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
    sampling = SamplingParams(max_generate_length=24, temperature=1.0)
    prompts = [tuple(range(3, 3 + length)) for length in (1, 5, 36)]
    keys = [SampleKey(run_seed=1, weight_version=0, prompt_id=str(len(ids)), sample_index=0) for ids in prompts]
    requests = [
        GenerationRequest(prompt_ids=ids, sampling=sampling, keys=(key,))
        for ids, key in zip(prompts, keys, strict=True)
    ]
    answers = await asyncio.gather(*(engine.generate(each) for each in requests))
    await engine.close()
    worst, tokens = 0.0, 0
    for ids, [answer] in zip(prompts, answers, strict=True):
        row = torch.tensor([*ids, *answer.token_ids])
        scored = torch.log_softmax(truth(input_ids=row.unsqueeze(0), use_cache=False).logits[0].float(), -1)[:-1]
        expected = scored.gather(-1, row[1:, None]).squeeze(1)[len(ids) - 1 :].detach()
        tokens += len(answer.token_ids)
        worst = max(worst, float((expected - torch.tensor(answer.logprobs)).abs().max()))
    assert tokens > len(prompts), "nothing was decoded"
    return worst


def spread(pool: Pool, path: str, batch: TrainingBatch, expected: Tensor, changes: Mapping[str, Any]) -> float | str:
    """Distance of two ranks from each row alone, and after one update from one rank that made it, too. Their step is
    the gradient itself (SGD).
    """
    plain = trainer_of(path, lr=0.005, optimizer="sgd")
    objective = policy_objective(plain.algorithm)
    old, cut = expected.detach(), changed(plain, dict(changes))
    together = replicas(2, inner=cut.policy.tensor_parallel_size)
    try:
        group = pool.start(partial(PolicyWorker, cut, objective), 2, together)
    except ModelError:
        return "refused"
    alone_in_it = Group([LocalHandle("rank-0", PolicyWorker(plain, objective))])
    found = []
    for learner in (LearnerGroup(alone_in_it, objective), LearnerGroup(group, objective, replicas=together)):
        before = asyncio.run(learner.score(batch))
        asyncio.run(learner.update(batch.given(old_logprobs=old)))
        found.append((before, asyncio.run(learner.score(batch))))
    (_, after), (before, spread) = found
    assert (after - before)[batch.loss_mask].abs().max() > 1e-3, "it has learned nothing"
    return max(_apart(before, old, batch), _apart(spread, after, batch))


def _trained(path: str, batch: TrainingBatch, folder: Path, *, lora: int) -> float | str:
    """Distance of a model that learned once from its export, which transformers reads; merged, if it has an adapter."""
    try:
        learner = worker(path, lora=lora, lr=1e-2)
    except ModelError:
        return "refused"
    old = asyncio.run(learner.score(batch))
    asyncio.run(learner.update(batch.given(old_logprobs=old)))
    found = asyncio.run(learner.score(batch))
    assert (found - old).abs().max() > 1e-3, "it has learned nothing"
    Export(like=path, folder=folder, overrides={LONGEST_ROW: LONGEST})(learner.weights())
    with torch.no_grad():
        return _apart(found, alone(definition(str(folder)), batch), batch)


def state(cell: str | float) -> str:
    """A cell without its digits: `exact`, `off by N nats`, or the clause."""
    if isinstance(cell, str):
        return cell
    return "exact" if cell <= EXACT else f"off by {cell:.1e}"


def stored() -> Mapping[str, Mapping[str, str | float]]:
    """The cells by family and column, as they were measured last."""
    found: Mapping[str, Mapping[str, str | float]] = json.loads(STORED.read_text(encoding="utf-8"))
    return found


def table() -> str:
    """The table of `docs/models.md`."""
    lines = [f"| family | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for family in FAMILIES:
        row = stored()[family]
        shown = [row[name] if isinstance(row[name], str) else f"{row[name]:.0e}" for name in COLUMNS]
        lines.append(f"| {family} | {' | '.join(map(str, shown))} |")
    return "\n".join(lines)


def main() -> None:
    from tests.conftest import _save_model

    torch.set_num_threads(1)
    set_verbosity_error()
    disable_progress_bar()
    measured: dict[str, dict[str, str | float]] = dict(json.loads(STORED.read_text())) if STORED.exists() else {}
    wanted = sys.argv[1:] or [family for family in FAMILIES if family not in measured]
    with tempfile.TemporaryDirectory() as scratch, closing(Pool(2)) as pool:
        _save_model(Path(scratch) / "nano")
        for number, family in enumerate(wanted):
            measured[family] = dict(cells(family, Path(scratch) / "nano", Path(scratch) / str(number), pool))
            print(family, measured[family], flush=True)
            STORED.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
