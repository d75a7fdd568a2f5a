"""Models that learn on several ranks: equal to one rank, and what a failure on one of them does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl.config import TrainerConfig
from skyrl.errors import PassError, RequestError, RunError
from skyrl.processes.handles import Group
from skyrl.processes.in_process import LocalHandle
from skyrl.training_service.backend import AdamSettings, AdapterSpec, PassResult
from skyrl.training_service.model_bank import BankRanks, ModelBank, dealt
from skyrl.tree import evolve_at
from tests.learners.pool import Pool
from tests.training_service.banks import (
    CRITIC,
    MIXED,
    STEP,
    Short,
    Torn,
    bank_of,
    critic_pass,
    datum,
    held_elements,
    request,
    requests_of,
    result,
)

MODELS = (*MIXED[:4], MIXED[6])  # the last one adapts the output head alone


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    processes = Pool(2)
    yield processes
    processes.close()


WHOLE, SHARDED = 1, -1
"""`fsdp_size` with which each rank holds the whole base, and with which it is sharded over them."""


@pytest.fixture(params=[WHOLE, SHARDED], ids=["whole", "sharded"])
def trainer(trainer: TrainerConfig, request: pytest.FixtureRequest) -> TrainerConfig:
    """The session's table with each way to hold the base."""
    return evolve_at(trainer, "ref.fsdp_config.fsdp_size", request.param)


def alone(trainer: TrainerConfig, **options: Any) -> BankRanks:
    return BankRanks(Group([LocalHandle("models", bank_of(trainer, **options))]))


def on_two(pool: Pool, trainer: TrainerConfig, **options: Any) -> BankRanks:
    return BankRanks(pool.start(partial(bank_of, trainer, **options), 2))


async def course(ranks: BankRanks, folder: Path) -> list[Any]:
    """Losses, outputs, norms of gradients and weights of some models, a critic among them, over three steps."""
    names = [f"m{index}" for index, _ in enumerate(MODELS)]
    for name, spec in zip([*names, "critic"], [*MODELS, CRITIC], strict=True):
        await ranks.call(ModelBank.create, name, spec)
    seen: list[Any] = []
    for round_ in range(3):
        for outcome in await ranks.passes([*requests_of(MODELS, round_), critic_pass("critic", round_)]):
            seen += [result(outcome).metrics["loss:sum"], [list(output.values()) for output in result(outcome).outputs]]
        for name in (*names, "critic"):
            seen.append((await ranks.call(ModelBank.optimizer_step, name, STEP))["grad_norm:mean"])
    for index, _ in enumerate(MODELS):
        await ranks.call(ModelBank.save, f"m{index}", folder / f"m{index}", optimizer=True)
        adapter = await ranks.call(ModelBank.adapter, f"m{index}")
        with adapter.open() as tensors:
            seen += [tensor.clone() for _, tensor in tensors]
    return seen


@pytest.mark.long
@pytest.mark.parametrize("tokens_per_pass", [4096, 60])
def test_two_ranks_learn_what_one_learns(
    pool: Pool, trainer: TrainerConfig, tmp_path: Path, tokens_per_pass: int
) -> None:
    options = {"tokens_per_pass": tokens_per_pass}
    two = on_two(pool, trainer, **options)
    actual = asyncio.run(course(two, tmp_path / "two"))
    expected = asyncio.run(course(alone(trainer, **options), tmp_path / "one"))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    [loaded] = asyncio.run(_loaded_elsewhere(two, tmp_path / "one" / "m0"))
    [local] = asyncio.run(two.passes([request("m0", [datum(8, 5)], backward=False)]))
    torch.testing.assert_close(result(loaded).outputs, result(local).outputs, atol=1e-5, rtol=1e-5)


async def _loaded_elsewhere(ranks: BankRanks, folder: Path) -> list[PassResult | Exception]:
    await ranks.call(ModelBank.create, "copy", MODELS[0])
    await ranks.call(ModelBank.load, "copy", folder, optimizer=True)
    return await ranks.passes([request("copy", [datum(8, 5)], backward=False)])


@pytest.mark.long
def test_a_pass_of_one_sequence_leaves_a_rank_idle(pool: Pool, trainer: TrainerConfig) -> None:
    async def learned(ranks: BankRanks) -> float:
        await ranks.call(ModelBank.create, "m0", MODELS[0])
        [outcome] = await ranks.passes([request("m0", [datum(20, 1)])])
        return (
            result(outcome).metrics["loss:sum"]
            + (await ranks.call(ModelBank.optimizer_step, "m0", STEP))["grad_norm:mean"]
        )

    assert asyncio.run(learned(on_two(pool, trainer))) == pytest.approx(asyncio.run(learned(alone(trainer))), rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("trainer", [WHOLE], indirect=True)
def test_a_failure_of_one_rank_is_one_of_all_and_changes_nothing(pool: Pool, trainer: TrainerConfig) -> None:
    async def work(ranks: BankRanks) -> None:
        for index, spec in enumerate(MODELS[:2]):
            await ranks.call(ModelBank.create, f"m{index}", spec)
        large, small = request("m0", [datum(5, 1), datum(6, 2)]), request("m1", [datum(7, 3)])
        failed, outcome = await ranks.passes([large, small])
        assert "out of memory" in str(failed)
        result(outcome)
        with pytest.raises(RequestError, match="there are no gradients"):
            await ranks.call(ModelBank.optimizer_step, "m0", AdamSettings())
        await ranks.call(ModelBank.optimizer_step, "m1", AdamSettings())

    factory = partial(Short, trainer, trainer.ref, tokens_per_pass=4096)
    asyncio.run(work(BankRanks(pool.start(factory, 2))))


@pytest.mark.long
@pytest.mark.parametrize("trainer", [SHARDED], indirect=True)
def test_a_failure_of_a_rank_that_has_a_shard_ends_the_service(pool: Pool, trainer: TrainerConfig) -> None:
    """The other rank waits until the one that failed leaves."""

    async def work(ranks: BankRanks) -> None:
        await ranks.call(ModelBank.create, "m0", MODELS[0])
        with pytest.raises(PassError, match="the others wait for its shard of the base: out of memory"):
            await ranks.passes([request("m0", [datum(5, 1), datum(6, 2)])])
        await ranks.call(ModelBank.close)

    factory = partial(Short, trainer, trainer.ref, tokens_per_pass=4096)
    asyncio.run(work(BankRanks(pool.start(factory, 2))))


@pytest.mark.long
@pytest.mark.parametrize("trainer", [SHARDED], indirect=True)
def test_each_rank_has_a_part_of_the_base(pool: Pool, trainer: TrainerConfig) -> None:
    ranks = pool.start(partial(bank_of, trainer), 2).handles
    parts = [asyncio.run(rank.call(held_elements)) for rank in ranks]
    assert sum(parts) == held_elements(bank_of(trainer))
    assert max(parts) < 0.6 * sum(parts)


@pytest.mark.long
def test_ranks_that_disagree_end_the_service(pool: Pool, trainer: TrainerConfig, tmp_path: Path) -> None:
    factory = partial(Torn, trainer, trainer.ref, tokens_per_pass=4096)
    ranks = BankRanks(pool.start(factory, 2))
    with pytest.raises(RunError, match="some ranks of the models that learn failed.*no such file here"):
        asyncio.run(ranks.call(ModelBank.load, "m0", tmp_path, optimizer=False))


@pytest.mark.sampled(2)
def test_a_mistake_is_refused_by_all(pool: Pool, trainer: TrainerConfig) -> None:
    with pytest.raises(RequestError, match="no layer to train"):
        asyncio.run(
            on_two(pool, trainer).call(
                ModelBank.create,
                "m0",
                AdapterSpec(rank=4, seed=1, train_attn=False, train_mlp=False, train_unembed=False),
            )
        )


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 100), st.integers(1, 5))
def test_each_row_is_dealt_once_in_order_within_the_bound(lengths: list[int], most: int, ranks: int) -> None:
    shares = dealt(lengths, most, ranks)
    assert len({len(share) for share in shares}) == 1
    assert [row for share in shares for rows in share for row in rows] == list(range(len(lengths)))
    for rows in (rows for share in shares for rows in share if len(rows) > 1):
        assert sum(lengths[row] for row in rows) <= most
    tokens = [sum(lengths[row] for rows in share for row in rows) for share in shares]
    assert max(tokens) - min(tokens) <= 2 * max(lengths)
