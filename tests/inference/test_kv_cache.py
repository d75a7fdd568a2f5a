from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl.inference.torch.kv_cache import PlacedPrompt, RowCache

Layers = list[tuple[Tensor, Tensor]]


def prefix(*ids: int) -> Layers:
    """Two layers, one head of width 2, that hold the ids themselves."""
    states = torch.tensor(ids, dtype=torch.float32)[None, :, None].expand(1, len(ids), 2)
    return [(states, -states), (states + 100, -states)]


def prompt(*ids: int, copies: int = 1) -> PlacedPrompt:
    return PlacedPrompt(ids=ids, layers=prefix(*ids), copies=copies, total=len(ids) + 10)


def admit(cache: RowCache, *ids: int, ahead: int = 10) -> None:
    cache.reserve(1, before=len(ids), ahead=ahead)
    cache.place(prompt(*ids))


def storages(cache: RowCache) -> list[int]:
    layers: list[Any] = list(cache.layers)
    return [layer.keys.data_ptr() for layer in layers]


def step(cache: RowCache, *ids: int) -> tuple[Tensor, Tensor]:
    states = torch.tensor(ids, dtype=torch.float32)[:, None, None, None].expand(-1, 1, 1, 2)
    seen = [cache.update(states + 100 * layer, -states, layer) for layer in range(2)]
    cache.window.end += 1
    return seen[0][0][:, 0, :, 0], seen[1][1][:, 0, :, 0]


def test_every_row_ends_at_the_same_column_and_samples_share_their_prompt() -> None:
    cache = RowCache("cpu")
    cache.reserve(3, before=3, ahead=10)
    assert cache.place(prompt(5)) == 2
    assert cache.place(prompt(7, 8, 9, copies=2)) == 0
    keys, values = step(cache, 1, 2, 3)
    assert keys.tolist() == [[0, 0, 5, 1], [7, 8, 9, 2], [7, 8, 9, 3]]
    assert values.tolist() == [[0, 0, -5, -1], [-7, -8, -9, -2], [-7, -8, -9, -3]]
    assert cache.get_seq_length() == 4


def test_a_token_is_written_without_copying_the_cache() -> None:
    cache = RowCache("cpu")
    admit(cache, 1, 2, 3, ahead=40)
    addresses = storages(cache)
    for token in range(40):
        assert cache.reserve(0, before=0, ahead=40 - token) == 0
        step(cache, token)
    assert storages(cache) == addresses


def test_storage_grows_by_doubling_and_keeps_what_it_held() -> None:
    cache = RowCache("cpu")
    admit(cache, *range(100), ahead=1000)
    sizes = set()
    for token in range(100, 600):
        cache.reserve(0, before=0, ahead=1100 - token)
        keys, _ = step(cache, token)
        sizes.add(cache.tokens.shape[2])
    assert keys.tolist() == [list(range(600))]
    assert sizes == {200, 398, 794}


def test_a_longer_prompt_that_joins_moves_the_others_to_the_right() -> None:
    cache = RowCache("cpu")
    admit(cache, 1, 2)
    step(cache, 3)
    assert cache.reserve(1, before=5, ahead=10) == 2
    assert cache.place(prompt(4, 5, 6, 7, 8)) == 0
    keys, _ = step(cache, 9, 10)
    assert keys.tolist() == [[0, 0, 1, 2, 3, 9], [4, 5, 6, 7, 8, 10]]


def test_rows_that_leave_are_overwritten_by_the_last_ones() -> None:
    cache = RowCache("cpu")
    for token in range(6):
        admit(cache, token, ahead=2)
    assert cache.keep([1, 4, 5]) == [5, 1, 4]
    keys, _ = step(cache, 50, 10, 40)
    assert keys.tolist() == [[5, 50], [1, 10], [4, 40]]
    assert cache.tokens[:3, 0, 0].tolist() == [5, 1, 4]


def test_columns_before_the_longest_live_row_are_given_up_when_storage_is_full() -> None:
    cache = RowCache("cpu")
    admit(cache, *range(60), ahead=64)
    admit(cache, 1, 2, 3, ahead=64)
    cache.keep([1])
    cache.window.start = 57
    for token in range(200):
        cache.reserve(0, before=0, ahead=200 - token)
        keys, _ = step(cache, token)
    assert keys.tolist() == [[1, 2, 3, *range(200)]]
    assert cache.tokens.shape[2] < 260
