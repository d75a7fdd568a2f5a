"""`sampling_params.logprobs = none`: the engine's log-probabilities are in no row, and nothing compares with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyrl.config.checks.algorithm import loss_needs_engine_logprobs
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.errors import ConfigError
from skyrl.inference.torch.engine import TorchEngine
from skyrl.rollout.transcript import Transcript
from tests.inference.nano import nano_model, nano_tokenizer, request
from tests.nano_run import all_metrics, config, train

NONE: dict[str, Any] = {
    "generator__sampling_params__logprobs": None,
    "generator__eval_sampling_params__logprobs": None,
}
DIFFERENCE = "policy/rollout_train_logprobs_abs_diff_mean"


def test_a_run_without_them_learns_the_same_and_compares_nothing(nano: Path, tmp_path: Path) -> None:
    records = []
    for name, changes in (("with", {}), ("without", NONE)):
        train(nano, tmp_path / name, trainer__max_training_steps=2, **changes)
        records.append(all_metrics(tmp_path / name)[-1])
    plain, without = records
    assert DIFFERENCE in plain and DIFFERENCE not in without
    assert without["policy/final_loss"] == plain["policy/final_loss"]


@pytest.mark.parametrize("reader", [{"policy_loss_type": "rollout_is"}, {"old_logprobs": "engine"}])
def test_what_reads_them_is_refused(nano: Path, tmp_path: Path, reader: dict[str, Any]) -> None:
    changes = {f"trainer__algorithm__{name}": value for name, value in reader.items()}
    with pytest.raises(ConfigError, match=r"generator\.sampling_params\.logprobs .*is none"):
        config(nano, tmp_path, **NONE, **changes)


def test_a_correction_has_them_returned(nano: Path, tmp_path: Path) -> None:
    correction = {"trainer__algorithm__off_policy_correction__tis_ratio_type": "token"}
    assert config(nano, tmp_path, **NONE, **correction).generator.sampling_params.logprobs == 1


def test_without_such_a_reader_they_may_be_left_out(nano: Path, tmp_path: Path) -> None:
    run: SkyRLTrainConfig = config(nano, tmp_path, **NONE)
    assert list(loss_needs_engine_logprobs(run)) == []


async def test_a_row_without_them_is_otherwise_the_same() -> None:
    engine = TorchEngine(nano_model(), nano_tokenizer(), max_num_seqs=2)
    (plain,), (bare,) = [await engine.generate(request((1, 2, 3), logprobs=logprobs)) for logprobs in (1, None)]
    await engine.close()
    assert bare.logprobs == ()
    rows = []
    for completion, with_logprobs in ((plain, True), (bare, False)):
        transcript = Transcript((1, 2, 3), with_logprobs=with_logprobs)
        transcript.sample(completion)
        transcript.place((9, 9))
        transcript.withdraw(1)
        rows.append(transcript.step())
    one, other = rows
    assert other.rollout_logprobs == ()
    assert (one.response_ids, one.loss_mask) == (other.response_ids, other.loss_mask)
    assert len(one.rollout_logprobs) == len(one.response_ids)
