"""What torch reads when it starts is set by the commands that compute, and by nobody whom the user overrules."""

from __future__ import annotations

import os

import pytest

from skyrl.processes.torch_environment import TORCH_ENVIRONMENT, set_torch_environment


def test_defaults_are_set_and_the_users_own_values_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"OMP_WAIT_POLICY": "ACTIVE"})
    set_torch_environment()
    assert os.environ == {**TORCH_ENVIRONMENT, "OMP_WAIT_POLICY": "ACTIVE"}
