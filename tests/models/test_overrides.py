"""Values of a model's own configuration are replaced for learner, engine and export, rotary embeddings with care."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from transformers import Qwen2Config

from skyrl.batch import TrainingBatch
from skyrl.config import ModelConfig, PolicyConfig, SamplingParams, TrainerConfig
from skyrl.errors import ModelError
from skyrl.inference.engine import GenerationRequest
from skyrl.inference.torch.engine import load_torch_engine
from skyrl.models.files.loading import load_config, max_positions
from skyrl.models.files.overrides import changed_values, with_overrides
from skyrl.models.saving.storing import Export
from skyrl.training.objective import policy_objective
from tests.inference.nano import keys
from tests.learners.updating import PolicyWorker

OWN = Qwen2Config(max_position_embeddings=256, rope_parameters={"rope_type": "default", "rope_theta": 7.0})


def rope(**overrides: Any) -> Any:
    config: Any = with_overrides(OWN, overrides)
    return config.rope_parameters


def test_a_base_alone_and_a_scaling_alone_leave_the_other_as_it_was() -> None:
    """transformers ignores the one, and loses the base with the other."""
    assert rope(rope_theta=50.0) == {"rope_type": "default", "rope_theta": 50.0}
    assert rope(rope_scaling={"rope_type": "linear", "factor": 2.0}) == {
        "rope_type": "linear",
        "factor": 2.0,
        "rope_theta": 7.0,
    }


def test_a_scaling_counts_from_the_positions_that_the_model_had() -> None:
    longer = {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 1024}
    config: Any = with_overrides(OWN, longer)
    assert config.max_position_embeddings == 1024
    assert config.rope_parameters["original_max_position_embeddings"] == 256
    assert changed_values(OWN, longer).keys() == {"max_position_embeddings", "rope_parameters"}
    assert OWN.max_position_embeddings == 256


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_positon_embeddings": 4}, r"has no 'max_positon_embeddings'.* did you mean max_position_embeddings\?"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "of type 'spiral' are not supported; choose from default, linear"),
        ({"rope_scaling": {"rope_type": "yarn"}}, r"need a factor: give trainer\.rope_scaling\.factor"),
    ],
)
def test_what_cannot_be_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        with_overrides(OWN, overrides)


async def test_learner_engine_and_export_have_one_model(nano: Path, tmp_path: Path) -> None:
    path = str(nano / "model")
    kwargs = {"max_position_embeddings": 512}
    trainer = TrainerConfig(
        policy=PolicyConfig(model=ModelConfig(path=path), model_config_kwargs=kwargs),
        rope_theta=20.0,
        device="cpu",
        compute_dtype="float32",
        attention="sdpa",
    )
    trainer = evolve(trainer, algorithm=evolve(trainer.algorithm, temperature=1.0))
    worker = PolicyWorker(trainer, policy_objective(trainer.algorithm))
    replaced = {**kwargs, "rope_theta": 20.0}
    request = GenerationRequest(
        prompt_ids=(5, 6, 7, 8, 9), sampling=SamplingParams(max_generate_length=12), keys=keys("p", 1)
    )
    apart = []
    for overrides in (replaced, {}):
        engine = load_torch_engine(
            path, dtype="float32", attention="sdpa", device="cpu", max_num_seqs=2, overrides=overrides
        )
        [completion] = await engine.generate(request)
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
        mask = torch.arange(ids.shape[1]).unsqueeze(0) >= len(request.prompt_ids)
        rows = TrainingBatch(
            input_ids=ids,
            lengths=torch.tensor([ids.shape[1]]),
            loss_mask=mask,
            rollout_logprobs=torch.zeros(ids.shape),
            rewards=torch.zeros(ids.shape),
            groups=torch.zeros(1, dtype=torch.long),
        )
        scored = (await worker.score(rows))[mask]
        apart.append(float((scored - torch.tensor(completion.logprobs)).abs().max()))
    assert apart[0] < 1e-4 < 1e-2 < apart[1]
    Export(like=path, folder=tmp_path / "model", overrides=replaced)(worker.weights())
    stored: Any = load_config(str(tmp_path / "model"))
    assert stored.rope_parameters["rope_theta"] == 20.0
    assert max_positions(str(tmp_path / "model")) == max_positions(path, replaced) == 512
