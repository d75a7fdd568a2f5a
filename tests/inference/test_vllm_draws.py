from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor

from skyrl.inference.draws import uniforms
from skyrl.inference.sampling import draw
from skyrl.inference.vllm.keyed_draws import SEED, KeyedDraws, keyed_arguments

VOCABULARY = 11


class Runner:
    """vLLM's model runner: each row is a request with a seed or None, a prompt of three tokens, and drawn tokens."""

    def __init__(self, **rows: tuple[int | None, int]) -> None:
        self.become(**rows)

    def become(self, **rows: tuple[int | None, int]) -> None:
        seeds = {name: seed for name, (seed, _) in rows.items()}
        self.requests: dict[str, Any] = {
            name: SimpleNamespace(sampling_params=SimpleNamespace(extra_args=None if seed is None else {SEED: seed}))
            for name, seed in seeds.items()
        }
        padding = [0, 0]  # vLLM's arrays are as long as the largest batch
        self.input_batch = SimpleNamespace(
            req_ids=list(rows),
            sampling_metadata=object(),
            num_prompt_tokens=numpy.array([3] * len(rows) + padding, dtype=numpy.int32),
            num_tokens_no_spec=numpy.array([3 + drawn for _, drawn in rows.values()] + padding, dtype=numpy.int32),
        )


def by_vllm(logits: Tensor, generators: object, k: object, p: object) -> tuple[Tensor, Tensor]:
    """Draws token 7 for every row, and spoils the logits."""
    logits.fill_(-torch.inf)
    return torch.full((len(logits),), 7), logits


def keyed(runner: Runner) -> KeyedDraws:
    return KeyedDraws(runner, by_vllm, lambda logits, k, p: logits)


def logits(rows: int) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(3))


def expected(row: Tensor, seed: int, position: int) -> int:
    return int(draw(row.unsqueeze(0), uniforms(torch.tensor([seed]), torch.tensor([position]))))


def test_a_row_draws_what_the_torch_engine_draws_for_its_seed_and_position() -> None:
    scores = logits(3)
    tokens, cut = keyed(Runner(a=(5, 0), b=(-9, 4), c=(5, 1)))(scores.clone(), {}, None, None)
    assert tokens.tolist() == [expected(scores[0], 5, 0), expected(scores[1], -9, 4), expected(scores[2], 5, 1)]
    torch.testing.assert_close(cut, scores)


def test_rows_without_a_key_are_vllms_and_do_not_change_the_others() -> None:
    scores = logits(2)
    tokens, cut = keyed(Runner(a=(None, 0), b=(5, 2)))(scores.clone(), {}, None, None)
    assert tokens.tolist() == [7, expected(scores[1], 5, 2)]
    torch.testing.assert_close(cut, scores)
    assert keyed(Runner(a=(None, 0), b=(None, 2)))(scores.clone(), {}, None, None)[0].tolist() == [7, 7]


def test_rows_that_come_and_go_keep_their_numbers() -> None:
    runner, scores = Runner(a=(5, 0), b=(6, 0)), logits(2)
    draws = keyed(runner)
    draws(scores.clone(), {}, None, None)
    runner.input_batch.num_tokens_no_spec[:2] += 1  # the next token of the same rows
    assert draws(scores.clone(), {}, None, None)[0].tolist() == [expected(scores[0], 5, 1), expected(scores[1], 6, 1)]
    runner.become(b=(6, 2), c=(7, 0))
    assert draws(scores.clone(), {}, None, None)[0].tolist() == [expected(scores[0], 6, 2), expected(scores[1], 7, 0)]


def test_more_rows_than_requests_are_vllms() -> None:
    assert keyed(Runner(a=(5, 0)))(logits(2), {}, None, None)[0].tolist() == [7, 7]


def test_the_seed_goes_where_vllm_makes_no_generator_and_other_arguments_stay() -> None:
    assert keyed_arguments({"seed": 4, "top_p": 0.5, "extra_args": {"of_a_user": 1}}) == {
        "top_p": 0.5,
        "extra_args": {"of_a_user": 1, SEED: 4},
    }
    assert keyed_arguments({"seed": 4}) == {"extra_args": {SEED: 4}}
