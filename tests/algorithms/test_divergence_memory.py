"""Memory of the divergence from a teacher at the vocabulary of a large model, in processes of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

WORDS, WIDTH, TOKENS = 152_064, 32, 4096
FEW = 64, 192

PROGRAM = """
import resource, sys
import torch
from skyrl.algorithms.linear_divergence import linear_divergence

form, beta, tokens, words, width = sys.argv[1], float(sys.argv[2]), *map(int, sys.argv[3:])
numbers = torch.Generator().manual_seed(0)
hidden, states = (torch.randn(tokens, width, generator=numbers) for _ in range(2))
weight, theirs = (torch.randn(words, width, generator=numbers) / width for _ in range(2))
hidden.requires_grad_()
weight.requires_grad_()


def whole_tables():
    logs, wanted = (hidden @ weight.T).log_softmax(-1), (states @ theirs.T).log_softmax(-1)
    if beta == 0:
        return (wanted.exp() * (wanted - logs)).sum(-1)
    if beta == 1:
        return (logs.exp() * (logs - wanted)).sum(-1)
    m = torch.logaddexp(logs + torch.tensor(1 - beta).log(), wanted + torch.tensor(beta).log())
    return (1 - beta) * (logs.exp() * (logs - m)).sum(-1) + beta * (wanted.exp() * (wanted - m)).sum(-1)


before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tiles = form == "tiles"
found = linear_divergence(hidden, weight, states, theirs, beta=beta, temperature=1.0) if tiles else whole_tables()
found.sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def kilobytes(form: str, beta: float, tokens: int) -> int:
    """How far the memory of a process rises in forward and backward."""
    arguments = [form, str(beta), *map(str, (tokens, WORDS, WIDTH))]
    result = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True)
    return int(result.stdout)


@pytest.mark.long
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_divergence_at_152_thousand_words_takes_a_tenth_of_the_memory_of_whole_tables(beta: float) -> None:
    """Whole tables grow with the number of tokens, so that few of them tell how much 4,096 would take."""
    few, many = (kilobytes("tables", beta, tokens) for tokens in FEW)
    tables = (many - few) * TOKENS // (FEW[1] - FEW[0])
    tiles = kilobytes("tiles", beta, TOKENS)
    print(f"beta {beta}: {tiles / 2**20:.2f} GiB in tiles, {tables / 2**20:.2f} GiB in whole tables")
    assert tiles < 0.1 * tables
