"""Supervised runs on several ranks have the losses, evaluations and models of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from skyrl.config import compose
from skyrl.experiments.experiment import experiment_class
from skyrl.planning.replicas import Replicas
from skyrl.processes.handles import ExitNotice, Group, Handle
from skyrl.processes.progress import Progress
from tests.experiments.test_preferences import labelled, rankings
from tests.learners.pool import Pool
from tests.supervised_run import chats, farthest, pairs, records, settings, train, write

pytestmark = pytest.mark.xdist_group("ranks")

ROWS: dict[str, Callable[..., list[dict[str, Any]]]] = {"sft": chats, "reward_model": pairs, "preference": pairs}


class PoolProcesses:
    """`Processes` whose ranks are those of a pool that is there already."""

    host = "127.0.0.1"

    def __init__(self, pool: Pool, replicas: Replicas, teachers: Pool | None = None) -> None:
        self._pool, self._replicas, self.step, self.progress = pool, replicas, 0, Progress()
        self.exit_notice, self._teachers = ExitNotice(), teachers

    def start(self, role: str, makers: Sequence[Callable[..., Any]]) -> Group[Any]:
        pool = self._teachers if role == "teacher" and self._teachers else self._pool
        return pool.start(makers[0], len(makers), self._replicas)  # which exchanges the ranks for its own

    def restart(self, role: str, rank: int, maker: Callable[[], Any]) -> Handle[Any]:
        raise AssertionError("no learner is started again")

    def dump_stacks(self) -> list[Path]:
        return []

    def close(self) -> None:
        """The pool stays."""


@pytest.fixture(scope="module")
def baselines(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each kind of run in one process."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ROWS}
    for kind, folder in folders.items():
        train(nano, folder, kind, **evaluated(folder, kind))
    return folders


def evaluated(folder: Path, kind: str) -> dict[str, Any]:
    """Evaluation, and an epoch whose last batch has five of eight rows, which do not divide among ranks."""
    held_out = write(folder / "held_out.jsonl", ROWS[kind](13, seed=1))
    rows = write(folder / "rows.jsonl", ROWS[kind](29))
    shared = {"eval_datasets": (held_out,), "eval_interval": 4, "train_datasets": (rows,), "epoch_tail": "short"}
    adapter = {"model__lora__rank": 4} if kind == "preference" else {}  # whose reference is on the same ranks
    return {"num_epochs": 1, **shared, **adapter}


BY_DEFAULT = {
    "sft": ("FSDP2", "two ranks share sequences", "rows are packed over two ranks"),
    "reward_model": ("ZeRO-3",),
    "preference": (),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP2": {},
    "two copies of the weights": {"fsdp_config__fsdp_size": 1},
    "ZeRO-3": {"strategy": "deepspeed"},
    "two ranks share sequences": {"sequence_parallel_size": 2},
    "rows are packed over two ranks": {"max_tokens_per_microbatch": 40},
    "two ranks share keys": {"context_parallel_size": 2},
    "two ranks cut matrices": {"tensor_parallel_size": 2},
    "ZeRO-3, two ranks cut matrices": {"strategy": "deepspeed", "tensor_parallel_size": 2},
    "two ranks share sequences of two that cut matrices": {
        "placement__num_gpus_per_node": 4,
        "sequence_parallel_size": 2,
        "tensor_parallel_size": 2,
    },
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=[pytest.mark.long] * (layout not in BY_DEFAULT[kind]))
        for kind in ROWS
        for layout in LAYOUTS
    ],
)
def test_several_ranks_learn_what_one_process_does(
    nano: Path, tmp_path: Path, pool: Pool, zero_pool: Pool, baselines: dict[str, Path], kind: str, layout: str
) -> None:
    changes = {**evaluated(tmp_path, kind), "placement__num_gpus_per_node": 2, **LAYOUTS[layout]}
    config: Any = compose([], settings(nano, tmp_path, kind, **changes)).config
    assert config.deepspeed_config.zero_optimization.stage == 3
    run_in(config, {"fsdp2": pool, "deepspeed": zero_pool}[config.strategy])
    assert_same_course(tmp_path, baselines[kind])


def run_in(config: Any, pool: Pool, teachers: Pool | None = None) -> None:
    """The run, with the pool's processes as ranks, and with those of `teachers` as the ranks of a teacher."""
    experiment: Any = experiment_class(config)(config)
    experiment.processes = PoolProcesses(pool, experiment.replicas, teachers)
    experiment.run()


def assert_same_course(one: Path, other: Path) -> None:
    """Losses, evaluations, weights."""
    actual, expected = records(one), records(other)
    names = ["train/loss", "train/grad_norm", "train/accuracy", "train/margin", "eval/all/loss"]
    if "train/chosen_reward" in actual[-1]:
        names.remove("train/accuracy")  # rewards beside a reference that is the policy differ by rounding alone
    for name in names:
        values, expected_values = ([record[name] for record in run if name in record] for run in (actual, expected))
        assert values == pytest.approx(expected_values, abs=1e-5, rel=1e-5)
        assert values or name in ("train/accuracy", "train/margin")  # which only pairs have
    learned, expected_weights = (load_file(folder / "run" / "model" / "model.safetensors") for folder in (one, other))
    assert learned.keys() == expected_weights.keys() and farthest(learned, expected_weights) < 1e-4


@pytest.mark.long
@pytest.mark.parametrize("compared", [{}, {"distillation__top_k": 3}], ids=["all tokens", "likely tokens"])
def test_a_teacher_on_several_ranks_teaches_what_one_process_learns(
    compared: dict[str, Any], nano: Path, tmp_path: Path, pool: Pool
) -> None:
    taught = {"distillation__teacher_path": str(nano / "mixture"), "distillation__task_coef": 0.5, **compared}
    train(nano, tmp_path / "alone", "sft", **evaluated(tmp_path, "sft"), **taught)
    spread = {"placement__num_gpus_per_node": 2, **taught}
    (tmp_path / "spread").mkdir()
    config: Any = compose([], settings(nano, tmp_path / "spread", "sft", **evaluated(tmp_path, "sft"), **spread)).config
    teachers = Pool(2)
    try:
        run_in(config, pool, teachers)
    finally:
        teachers.close()
    assert_same_course(tmp_path / "spread", tmp_path / "alone")
    values, expected = (
        [record["train/teacher_divergence"] for record in records(tmp_path / name)[1:]] for name in ("spread", "alone")
    )
    assert values == pytest.approx(expected, abs=1e-5, rel=1e-4) and min(expected) > 0.01


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "rows"),
    [
        ({"loss_type": ["kto"]}, labelled),
        ({"loss_type": ["plackett_luce", "sigmoid"], "num_answers": 4}, rankings),
        ({"loss_type": ["aot", "aot_unpaired", "sft"]}, pairs),
        ({"use_weighting": True}, pairs),
        ({"max_tokens_per_microbatch": 60}, pairs),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value.__name__,
)
def test_preferences_on_two_ranks_are_those_of_one_process(
    nano: Path, tmp_path: Path, pool: Pool, strategy: dict[str, Any], rows: Callable[..., list[dict[str, Any]]]
) -> None:
    run = {**evaluated(tmp_path, "preference"), **strategy}
    run["eval_datasets"] = (write(tmp_path / "held_out.jsonl", rows(14, seed=1)),)
    run["train_datasets"] = (write(tmp_path / "rows.jsonl", rows(30)),)
    train(nano, tmp_path / "alone", "preference", **run)
    (tmp_path / "together").mkdir()
    values = settings(nano, tmp_path / "together", "preference", **run, placement__num_gpus_per_node=2)
    run_in(compose([], values).config, pool)
    assert_same_course(tmp_path / "together", tmp_path / "alone")


@pytest.mark.long
def test_spread_experts_learn_what_one_process_does(nano: Path, tmp_path: Path, pool: Pool) -> None:
    mixture = {"model__path": str(nano / "mixture"), "optimizer_config__adam_eps": 1e-6}
    train(nano, tmp_path / "alone", "sft", **evaluated(tmp_path, "sft"), **mixture)
    spread = {"placement__num_gpus_per_node": 2, "expert_parallel_size": 2, **mixture}
    (tmp_path / "spread").mkdir()
    run_in(compose([], settings(nano, tmp_path / "spread", "sft", **evaluated(tmp_path, "sft"), **spread)).config, pool)
    assert_same_course(tmp_path / "spread", tmp_path / "alone")
    logged = [record for record in records(tmp_path / "spread") if "train/router_max_violation" in record]
    assert logged and all(record["train/router_entropy"] > 0 for record in logged)
