"""Random numbers that belong to a sample, not to a stream that samples share.

The uniform behind token t of a sample is a function of (seed, t), and the seed a hash of the sample's key. Which rows
share the batch, in which order they came and how many tokens others have drawn cannot change it.
"""

from __future__ import annotations

import json
from hashlib import blake2b

import attrs
import torch
from torch import Tensor

from skyrl.inference.engine import SampleKey
from skyrl.weight_receiver.checksums import GAMMA, mixed_in_place, shifted


def sample_seed(key: SampleKey) -> int:
    """Seed of a sample, a signed 64-bit number: BLAKE2b of the key's fields as a JSON list, which is unique to the key.

    The occurrence is the last field, and omitted if it is 0, so that seeds equal those of versions without this field.
    """
    fields = attrs.astuple(key, recurse=False)
    text = json.dumps(fields if key.occurrence else fields[:-1], separators=(",", ":"))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1 - 2**-52] per row: output `positions[r]` of a SplitMix64 generator started at `seeds[r]`.

    SplitMix64 is a counter passed through a mixing function (Steele, Lea and Flood, "Fast splittable pseudorandom
    number generators", OOPSLA 2014), so any position is computed directly. Shapes: all (R,); int64 in, float64 out.
    The top 52 bits are kept: with one more, `u * total` could round up to `total`.
    """
    mixed = mixed_in_place(seeds + (positions + 1) * GAMMA)  # int64 wraps modulo 2**64, as uint64 would
    return shifted(mixed, 12).to(torch.float64) * 2.0**-52
