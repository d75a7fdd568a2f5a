"""Muon: which weights it steps, and that its step is torch's."""

from __future__ import annotations

import torch
from torch import nn

from skyrl.config import OptimizerConfig
from skyrl.learners.muon import Muon, hidden_matrices
from skyrl.learners.schedule import make_optimizer
from tests.inference.nano import nano_model


def test_muon_steps_the_matrices_between_embeddings_and_head() -> None:
    model = nano_model()
    inner = hidden_matrices(model)
    named = {name.split(".", 3)[-1] for name, parameter in model.named_parameters() if parameter in inner}
    projections = {
        *(f"self_attn.{letter}_proj.weight" for letter in "qkvo"),
        *(f"mlp.{kind}_proj.weight" for kind in ("up", "gate", "down")),
    }
    assert named == projections


def test_a_row_is_no_matrix() -> None:
    assert hidden_matrices(nn.Linear(8, 1, bias=False)) == set()


def test_a_step_of_muon_is_that_of_torch() -> None:
    torch.manual_seed(0)
    ours, torchs = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
    torchs.load_state_dict(ours.state_dict())
    config = OptimizerConfig(optimizer="muon", lr=0.01, muon_momentum=0.9, weight_decay=0.1)
    muon = make_optimizer(ours, config)
    peer = torch.optim.Muon(
        torchs.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    assert isinstance(muon, Muon)
    for _ in range(3):
        rows = torch.randn(5, 8)
        for model, optimizer in ((ours, muon), (torchs, peer)):
            optimizer.zero_grad()
            model(rows).square().sum().backward()
            optimizer.step()
        torch.testing.assert_close(ours.weight, torchs.weight, atol=1e-7, rtol=0)
