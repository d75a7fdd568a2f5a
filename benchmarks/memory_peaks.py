"""Peaks of tensor bytes of each rank of a learner on CPUs, by phase: what `skyrl plan` estimates, measured.

Every setting gets fresh processes. torch's profiler reports each allocation and each release, in every thread; weights
that are mapped from a file are added, since the allocator does not see them.
"""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import warnings
from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import accumulate
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from attrs import frozen

PHASES = ("rest", "scoring", "update", "transfer")
"""Phases that are measured, in this order; rest is between two of them."""

WARM_UP = 1
"""Updates before the one that is measured: the first creates the optimizer's state."""

_MARK = "phase "
"""Begins the names of the profiler's events that are phases."""

PATIENCE = 300.0
"""Seconds that a rank may take for all of its phases."""


@frozen(kw_only=True)
class Measured:
    """One model under one configuration."""

    model: Mapping[str, Any]
    """Values of its `config.json`."""

    changes: Mapping[str, Any]
    """Paths below `trainer` -> values."""

    ranks: int = 1
    rows: int = 8
    """Rows of each rank in an optimizer step."""

    prompt: int = 64
    answer: int = 192
    """Tokens of the prompt and of the answer of every row."""

    samples: int = 4
    """Rows with the same prompt."""


R = TypeVar("R")
Work = Callable[[Measured, str, Any], R]
"""A measurement on one rank: its arguments are the setting, the folder of the model and the ranks."""


def measured(setting: Measured) -> dict[str, int]:
    """Phase -> bytes at the peak of the rank that had most: `rest`, `scoring`, `update`, `transfer`."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(setting.model, Path(folder))
        peaks = on_ranks(setting, folder, _phases)
    return {phase: max(rank_peaks[phase] for rank_peaks in peaks) for phase in peaks[0]}


def save_model(values: Mapping[str, Any], folder: Path) -> None:
    """A model with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**values)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def on_ranks(setting: Measured, folder: str, work: Work[R]) -> list[R]:
    """Answer of `work` on each rank, in a process of its own."""
    from skyrl.learners.ranks import Rendezvous

    context = get_context("spawn")
    with Rendezvous(timeout=PATIENCE) as meeting:
        pipes = []
        for ranks in meeting.ranks("measured", setting.ranks):
            parent_end, child_end = context.Pipe(duplex=False)
            process = context.Process(target=_serve, args=(setting, folder, work, ranks, child_end), daemon=True)
            process.start()
            child_end.close()
            pipes.append((process, parent_end))
        return [_answer(process, pipe) for process, pipe in pipes]


def _answer(process: Any, pipe: Any) -> Any:
    if not pipe.poll(PATIENCE):
        process.kill()
        raise TimeoutError(f"a rank gave no answer within {PATIENCE:g} s")
    answer = pipe.recv()
    process.join()
    return answer


def _serve(setting: Measured, folder: str, work: Work[R], ranks: Any, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    pipe.send(work(setting, folder, ranks))


def _phases(setting: Measured, folder: str, ranks: Any) -> dict[str, int]:
    from torch.profiler import ProfilerActivity, profile, record_function

    from skyrl.learners.schedule import StepSettings
    from skyrl.learners.workers.learning_worker import weighed
    from skyrl.learners.workers.model_worker import token_budget
    from skyrl.learners.workers.roles import PolicyWorker
    from skyrl.training.objective import policy_objective

    trainer = trainer_of(setting, folder)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        worker, objective = PolicyWorker(trainer, ranks=ranks), policy_objective(trainer.algorithm)
        [batch] = token_budget(trainer).plan([weighed(objective, batch_of(setting))])

        def update() -> None:
            asyncio.run(worker.forward_backward_share(batch, objective))
            asyncio.run(worker.optimizer_step(StepSettings()))

        for _ in range(WARM_UP):
            update()
        rested = _resting()
        with record_function(_MARK + "scoring"):
            asyncio.run(worker.score(batch))
        with record_function(_MARK + "update"):
            update()
        with record_function(_MARK + "transfer"):
            asyncio.run(worker.export_weights(_consume, dtype="bfloat16"))
    worker.close()
    return _peaks(profiler, rested)


def trainer_of(setting: Measured, folder: str) -> Any:
    """The trainer's configuration, with nothing left to derive."""
    from skyrl.config import ModelConfig, PolicyConfig, TrainerConfig
    from skyrl.tree import evolve_at

    prompts = setting.rows * setting.ranks // setting.samples
    fixed = {
        "algorithm.temperature": 1.0,
        "algorithm.use_kl_loss": False,
        "placement.policy_num_gpus_per_node": setting.ranks,
        "placement.colocate_all": False,
        "train_batch_size": prompts,
        "policy_mini_batch_size": prompts,
        "max_prompt_length": setting.prompt,
    }
    trainer = TrainerConfig(
        policy=PolicyConfig(model=ModelConfig(path=folder)),
        device="cpu",
        compute_dtype="float32",
        attention="sdpa",
        recompute_activations=False,
    )
    for path, value in (fixed | dict(setting.changes)).items():
        trainer = evolve_at(trainer, path, value)
    return trainer


def run_of(setting: Measured) -> Any:
    """The tree that estimates are made from."""
    from skyrl.config import SkyRLTrainConfig
    from skyrl.tree import evolve_at

    run = evolve_at(SkyRLTrainConfig(), "trainer", trainer_of(setting, "unread"))
    run = evolve_at(run, "generator.n_samples_per_prompt", setting.samples)
    return evolve_at(run, "generator.sampling_params.max_generate_length", setting.answer)


def estimated(setting: Measured) -> dict[str, int]:
    """Phase -> bytes of one rank as `skyrl plan` estimates them, what rests on the host included."""
    from skyrl.config.estimates.memory import learner_of
    from skyrl.planning.memory import learner_memory, resting, total
    from skyrl.planning.model_shape import shape_of

    run = run_of(setting)
    shape = shape_of(setting.model)
    assert shape is not None
    learner = learner_of(run, "policy", shape)
    phases = {"rest": resting(learner), **learner_memory(learner)}
    return {phase: total(phases[phase]) for phase in PHASES}


def batch_of(setting: Measured) -> Any:
    """The rows of one rank."""
    import torch

    from skyrl.batch import TrainingBatch

    generator = torch.Generator().manual_seed(0)
    length = setting.prompt + setting.answer
    ids = torch.randint(0, setting.model["vocab_size"], (setting.rows, length), generator=generator)
    ids[:, : setting.prompt] = ids[:: setting.samples, : setting.prompt].repeat_interleave(setting.samples, 0)
    columns = torch.arange(length)
    mask = (columns >= setting.prompt).expand(setting.rows, length)
    return TrainingBatch(
        input_ids=ids,
        lengths=torch.full((setting.rows,), length),
        loss_mask=mask,
        rollout_logprobs=torch.zeros(ids.shape),
        rewards=torch.zeros(ids.shape),
        groups=torch.arange(setting.rows) // setting.samples,
        answer_lengths=torch.full((setting.rows,), setting.answer),
        advantages=torch.ones(ids.shape),
        old_logprobs=torch.zeros(ids.shape),
    )


def _consume(weights: Any) -> None:
    for _ in weights:
        pass


def _resting() -> int:
    """Bytes of all tensors there are, storages counted once. Tensors over ranks count with their own part."""
    import torch
    from torch.distributed.tensor import DTensor

    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about looking at objects that it keeps for old names
        live_tensors = [obj for obj in gc.get_objects() if isinstance(obj, torch.Tensor)]
    tensors = live_tensors + [tensor.grad for tensor in live_tensors if tensor.is_leaf and tensor.grad is not None]
    local = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local}.values())


def _peaks(profiler: Any, rested: int) -> dict[str, int]:
    """The highest level of allocated bytes in each phase, which begins and ends with what `rested`.

    Where the level at the end is higher, gloo released so much in threads that are not profiled: it counts as released
    evenly over the phase.
    """
    events = list(profiler.profiler.kineto_results.events())
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    times = [when for when, _ in changes]
    peaks = {"rest": rested}
    for event in events:
        if event.name().startswith(_MARK):
            start, end = event.start_ns(), event.start_ns() + event.duration_ns()
            inside = changes[bisect_right(times, start) : bisect_right(times, end)]
            peaks[event.name().removeprefix(_MARK)] = rested + _highest([change for _, change in inside])
    return {phase: peaks[phase] for phase in PHASES}


def _highest(changes: list[int]) -> int:
    """The highest sum of the first changes, without the share of the sum of all that is due by then."""
    unseen = sum(changes) / max(1, len(changes))
    return round(max((level - unseen * count for count, level in enumerate(accumulate(changes), start=1)), default=0))
