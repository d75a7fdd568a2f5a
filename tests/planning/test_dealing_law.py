"""The law of batch sizes: the checks say yes exactly where a dealer, who knows no arithmetic, gives every rank equal
work.
"""

from __future__ import annotations

import ast
import random
import sys
from functools import cache, reduce
from math import gcd
from pathlib import Path
from typing import Any

import attrs
import pytest

from skyrl.config import CriticConfig, MegatronConfig, ModelConfig, SkyRLTrainConfig
from skyrl.config.checks import batches, checks_in
from skyrl.config.loading.kinds import RL
from tests.planning import dealer
from tests.planning.dealer import Game, Player, fair

PLAIN = SkyRLTrainConfig()
CRITIC = CriticConfig(model=ModelConfig(path="critic"))

Grid = tuple[int, int]


@attrs.frozen(kw_only=True)
class Point:
    """The sizes of one run. No critic: `critic` is None; no reference: `ref` is None."""

    prompts: int
    samples: int
    micro: int
    forward: int
    mini: int
    passes: int
    policy: Grid
    together: tuple[int, ...]
    """Megatron's tensor, pipeline and context sizes, or the ranks that share a sequence."""

    critic: Grid | None
    critic_mini: int
    critic_together: int
    ref: Grid | None
    ref_together: tuple[int, ...]


def possible(rng: random.Random) -> Point:
    """Sizes built up from what one rank gets, so that everything divides, mostly narrowly."""
    megatron = rng.random() < 0.3
    groups, together = rng.choice((1, 2, 3, 4, 6, 8)), _together(rng, megatron)
    samples, micro = rng.randint(1, 8), rng.choice((1, 1, 2, 3, 4))
    micros = rng.randint(1, 3)
    mini = _prompts_of(groups * micro * micros, samples)
    critic_groups, critic_micros = rng.choice((1, 2, 3, 4)), rng.randint(1, 2)
    critic_mini = _prompts_of(critic_groups * micro * critic_micros, samples)
    has_critic = not megatron and rng.random() < 0.4
    step = mini * critic_mini // gcd(mini, critic_mini) if has_critic else mini
    prompts = step * rng.choice((1, 1, 2, 3))
    ref_together = _together(rng, megatron)
    ref_groups = rng.choice([number for number in range(1, 9) if prompts * samples % number == 0])
    critic_together = rng.choice((1, 1, 2))
    return Point(
        prompts=prompts,
        samples=samples,
        micro=micro,
        forward=rng.randint(1, 5),
        mini=mini,
        passes=rng.choice((1, 1, 2)),
        policy=_grid(rng, groups * _product(together)),
        together=together,
        critic=_grid(rng, critic_groups * critic_together) if has_critic else None,
        critic_mini=critic_mini,
        critic_together=critic_together,
        ref=_grid(rng, ref_groups * _product(ref_together)) if rng.random() < 0.6 else None,
        ref_together=ref_together,
    )


def disturbed(rng: random.Random, point: Point) -> Point:
    """The same with one of its sizes a little, or twice, as large."""

    def other(size: int) -> int:
        return max(1, rng.choice((size - 1, size + 1, size * 2, size * 3, size // 2)))

    name = rng.choice(("prompts", "samples", "micro", "mini", "critic_mini", "policy", "critic", "ref", "together"))
    value = getattr(point, name)
    if isinstance(value, int):
        value = other(value)
    elif value is not None:
        position = rng.randrange(len(value))
        value = tuple(other(size) if position == index else size for index, size in enumerate(value))
    return attrs.evolve(point, **{name: value})


def points(number: int, seed: int = 0) -> list[Point]:
    """A part as it should be, the others with one or more sizes disturbed, and always the same ones."""
    rng = random.Random(seed)
    originals = [possible(rng) for _ in range(number)]
    return [
        reduce(lambda point, _: disturbed(rng, point), range(rng.choice((0, 1, 2, 2, 3))), point) for point in originals
    ]


def _together(rng: random.Random, megatron: bool) -> tuple[int, ...]:
    return tuple(rng.choice((1, 1, 2)) for _ in range(3)) if megatron else (rng.choice((1, 1, 1, 2, 3)),)


def _prompts_of(rows: int, samples: int) -> int:
    """The fewest prompts whose samples are a multiple of `rows`."""
    return rows // gcd(rows, samples)


def _grid(rng: random.Random, ranks: int) -> Grid:
    nodes = rng.choice([number for number in (1, 2, 3) if ranks % number == 0])
    return nodes, ranks // nodes


def _product(sizes: tuple[int, ...]) -> int:
    return sizes[0] if len(sizes) == 1 else sizes[0] * sizes[1] * sizes[2]


# The same point as a tree, and as a game of cards


@cache
def _model(role: str, together: tuple[int, ...]) -> Any:
    table = CRITIC if role == "critic" else getattr(PLAIN.trainer, role)
    if len(together) == 1:
        return changed(table, sequence_parallel_size=together[0])
    tensor, pipeline, context = together
    megatron = MegatronConfig(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, context_parallel_size=context
    )
    return changed(table, megatron_config=megatron)


def changed(table: Any, **values: Any) -> Any:
    """A copy of a table of the configuration with other values."""
    return attrs.evolve(table, **values)


def tree(point: Point) -> SkyRLTrainConfig:
    """The configuration that asks for it."""
    trainer: Any = PLAIN.trainer
    grids = {"policy": point.policy, "critic": point.critic or (1, 1), "ref": point.ref or (5, 7)}
    counts = {
        f"{role}_num_{name}": count
        for role, grid in grids.items()
        for name, count in zip(("nodes", "gpus_per_node"), grid, strict=True)
    }
    trainer = changed(
        trainer,
        strategy="megatron" if len(point.together) == 3 else "fsdp2",
        placement=changed(trainer.placement, **counts),
        policy=_model("policy", point.together),
        critic=_model("critic", (point.critic_together,)) if point.critic else trainer.critic,
        ref=_model("ref", point.ref_together),
        algorithm=changed(trainer.algorithm, use_kl_loss=point.ref is not None),
        train_batch_size=point.prompts,
        policy_mini_batch_size=point.mini,
        critic_mini_batch_size=point.critic_mini,
        micro_train_batch_size_per_gpu=point.micro,
        micro_forward_batch_size_per_gpu=point.forward,
        update_epochs_per_batch=point.passes,
    )
    generator = changed(PLAIN.generator, n_samples_per_prompt=point.samples)
    run: SkyRLTrainConfig = changed(PLAIN, trainer=trainer, generator=generator)
    return run


def game(point: Point) -> Game:
    """The same at a table."""
    players = [Player(*point.policy, together=point.together, mini=point.mini)]
    if point.critic:
        players.append(Player(*point.critic, together=(point.critic_together,), mini=point.critic_mini))
    if point.ref:
        players.append(Player(*point.ref, together=point.ref_together))
    return Game(
        prompts=point.prompts,
        samples=point.samples,
        micro=point.micro,
        passes=point.passes,
        players=tuple(players),
    )


def accepts(run: SkyRLTrainConfig) -> bool:
    """Do the checks of batch sizes find nothing?"""
    return not any(list(check(run)) for check in checks_in(batches))


@pytest.mark.parametrize("number", [2_000, pytest.param(20_000, marks=pytest.mark.long)])
def test_the_checks_say_yes_exactly_where_every_rank_gets_equal_work(number: int) -> None:
    counts: dict[bool, int] = {True: 0, False: 0}
    narrowly = 0
    for point in points(number):
        verdict = fair(game(point))
        assert accepts(tree(point)) == verdict, point
        counts[verdict] += 1
        narrowly += verdict and point.micro > 1 and point.policy[0] * point.policy[1] > _product(point.together)
    print(f"{counts[True]} dealt evenly ({narrowly} of them to several ranks in micro-batches), {counts[False]} not")
    assert counts[True] >= 0.4 * number
    assert counts[False] >= 0.4 * number
    assert narrowly >= 0.2 * number


def test_the_law_is_about_checks_that_are_made() -> None:
    assert set(checks_in(batches)) <= set(RL.checks)


def test_the_dealer_knows_nothing_of_the_package() -> None:
    imports = [
        node
        for node in ast.walk(ast.parse(Path(dealer.__file__).read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    modules = names | {str(node.module) for node in imports if isinstance(node, ast.ImportFrom)}
    assert modules <= sys.stdlib_module_names


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        ({}, True),  # 4 prompts x 3 = 12 rows: 6 for each of 2 ranks, in 3 micro-batches of 2
        ({"micro": 3}, True),
        ({"micro": 4}, False),  # 4 + 2
        ({"prompts": 10}, False),  # 4 + 4 + 2
        ({"samples": 2}, True),  # 8 rows: 4 for each
        ({"samples": 1}, True),  # 4 rows: 2 for each
        ({"prompts": 9, "mini": 3}, False),  # 9 rows of a mini-batch for 2 ranks: 5 and 4
    ],
)
def test_the_dealer_decides_as_a_reader_would(other: dict[str, int], verdict: bool) -> None:
    sizes = {"prompts": 8, "samples": 3, "micro": 2, "mini": 4} | other
    player = Player(1, 2, mini=sizes.pop("mini"))
    assert fair(Game(passes=1, players=(player,), **sizes)) == verdict


@pytest.mark.parametrize(("ranks", "verdict"), [(1, True), (2, True), (3, True), (4, True), (5, False), (6, True)])
def test_the_dealer_wants_scoring_to_be_even(ranks: int, verdict: bool) -> None:
    assert fair(Game(prompts=4, samples=3, micro=1, passes=1, players=(Player(1, ranks),))) == verdict


def test_the_dealer_wants_places_to_be_full() -> None:
    assert fair(Game(prompts=4, samples=3, micro=1, passes=1, players=(Player(3, 2, together=(3,)),)))
    assert not fair(Game(prompts=4, samples=3, micro=1, passes=1, players=(Player(3, 2, together=(2, 2)),)))
