"""The digest that GPUs compute: the same everywhere, and another for everything that differs."""

from __future__ import annotations

import pytest
import torch

from skyrl.weight_receiver import checksums
from skyrl.weight_receiver.checksums import Digests, digest_word, in_hex

WORD = 0x9E3779B97F4A7C15


def device_digest(tensor: torch.Tensor) -> str:
    return in_hex({"weight": digest_word(tensor)})["weight"]


def splitmix64(state: int) -> int:
    """As its authors print it, in integers that do not wrap by themselves."""
    z = state % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_it_is_the_sum_of_splitmix64_over_words_and_their_places() -> None:
    content = bytes(range(250, 256)) + bytes(range(13))  # 19 bytes: two words and three bytes
    words = [int.from_bytes(content[start : start + 8].ljust(8, b"\0"), "little") for start in (0, 8, 16)]
    expected = (19 + sum(splitmix64(word + (n + 1) * WORD) for n, word in enumerate(words))) % 2**64
    assert device_digest(torch.tensor(list(content), dtype=torch.uint8)) == f"{expected:016x}"


def test_how_it_is_cut_into_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(33, 7, dtype=torch.bfloat16)
    expected = device_digest(tensor)
    monkeypatch.setattr(checksums, "_CHUNK_BYTES", 64)
    assert device_digest(tensor) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_every_flipped_bit_and_every_swap_shows(dtype: torch.dtype) -> None:
    tensor = torch.arange(40).to(dtype)
    seen = {device_digest(tensor), device_digest(tensor.flip(0)), device_digest(tensor[:-1])}
    raw = tensor.view(torch.uint8)
    for index in range(raw.numel()):
        for bit in range(8):
            raw[index] ^= 1 << bit
            seen.add(device_digest(tensor))
            raw[index] ^= 1 << bit
    assert len(seen) == 3 + 8 * raw.numel()


@pytest.mark.gpu
def test_a_gpu_computes_the_same() -> None:
    tensor = torch.randn(1000, 333, dtype=torch.bfloat16)
    assert device_digest(tensor.cuda()) == device_digest(tensor)


def test_a_slice_that_begins_inside_a_word_is_hashed_as_its_copy() -> None:
    tensor = torch.arange(64, dtype=torch.uint8)
    assert device_digest(tensor[3:19]) == device_digest(tensor[3:19].clone())


def test_digests_are_read_together_and_nothing_is_looked_at_before() -> None:
    tensors = {"a": torch.randn(5), "b": torch.randn(3, 4)}
    together = in_hex({name: digest_word(tensor) for name, tensor in tensors.items()})
    assert together == {name: device_digest(tensor) for name, tensor in tensors.items()}
    assert in_hex({}) == {}
    assert digest_word(torch.empty(100, device="meta")).shape == ()  # a tensor without values: looking would raise


MANY = {
    "whole words": torch.randn(6, 4),
    "nothing": torch.empty(0),
    "three bytes more": torch.arange(19, dtype=torch.uint8),
    "the same again": torch.arange(19, dtype=torch.uint8),
    "inside a word": torch.arange(64, dtype=torch.uint8)[3:19],
    "transposed": torch.randn(5, 8, dtype=torch.bfloat16).T,
}


@pytest.mark.parametrize("chunk", [2**25, 96, 8])
def test_tensors_that_are_hashed_together_have_the_digests_that_each_has_alone(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {name: device_digest(tensor) for name, tensor in MANY.items()}
    monkeypatch.setattr(checksums, "_CHUNK_BYTES", chunk)
    digests = Digests()
    for name, tensor in MANY.items():
        digests.add(name, tensor)
    assert digests.in_hex() == expected
    assert Digests().in_hex() == {}


def test_a_tensor_that_was_flushed_may_change() -> None:
    digests, tensors = Digests(), [torch.zeros(9), torch.ones(3)]
    for number, tensor in enumerate(tensors):
        digests.add(str(number), tensor)
    digests.flush()
    for tensor in tensors:
        tensor.fill_(5.0)
    assert digests.in_hex() == {"0": device_digest(torch.zeros(9)), "1": device_digest(torch.ones(3))}


@pytest.mark.gpu
def test_a_gpu_hashes_tensors_of_several_streams_together() -> None:
    digests, stream = Digests(), torch.cuda.Stream()
    for number, (name, tensor) in enumerate(MANY.items()):
        with torch.cuda.stream(stream if number % 2 else torch.cuda.current_stream()):
            digests.add(name, tensor.cuda())
    assert digests.in_hex() == {name: device_digest(tensor) for name, tensor in MANY.items()}


def test_a_large_tensor_is_hashed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "_CHUNK_BYTES", 16)
    digests, tensor = Digests(), torch.ones(4)
    digests.add("large", tensor)
    tensor.fill_(5.0)
    assert digests.in_hex() == {"large": device_digest(torch.ones(4))}
