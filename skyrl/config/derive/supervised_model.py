"""The role of the one model of a supervised run."""

from __future__ import annotations

from functools import partial

from skyrl.config.derive.model_tables import Role

_model = partial(Role, path="", trainer="", placement="placement.", title="model")

MODEL = _model(name="policy", stored_as="policy")
"""The model of a supervised run. One batch is one optimizer step."""

REWARD = _model(name="policy", scores=True, stored_as="critic")
"""The model of a reward-model run."""
