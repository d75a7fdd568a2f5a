"""`skyrl serve-training` as its users meet it: the command, the real client, a model that learns and is sampled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from skyrl.config import SkyRLTrainConfig, compose
from skyrl.errors import ConfigError
from skyrl.experiments.training_service import PREFLIGHT, ranks_share_sequences_alone
from skyrl.tree import evolve_at
from tests.training_service.running import KEY, client_of

LETTERS = [ord(letter) for letter in "abcdefgh"]


@contextmanager
def service(folder: Path, nano: Path, *changes: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The command in a process of its own, and its address."""
    command = [sys.executable, "-m", "skyrl", "serve-training", f"trainer.run_path={folder}", "trainer.device=cpu"]
    command += [f"trainer.policy.model.path={nano / 'model'}", "generator.inference_engine.backend=torch"]
    command += ["trainer.max_prompt_length=32", "generator.sampling_params.max_generate_length=16"]
    process = subprocess.Popen(
        [*command, "training_service.port=0", *changes],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    if " at http" not in line:
        raise AssertionError(line + process.stderr.read())
    try:
        yield line.rpartition(" at ")[2].strip(), process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)


def chain(length: int = 12) -> types.Datum:
    """Letters in order, each of which predicts the next."""
    tokens = [LETTERS[position % len(LETTERS)] for position in range(length + 1)]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:])),
            "weights": types.TensorData.from_numpy(np.ones(length, np.float32)),
        },
    )


def learned(model: tinker.TrainingClient, steps: int = 12) -> list[float]:
    """Losses of some steps on the chain."""
    losses = []
    for _ in range(steps):
        passed, stepped = (
            model.forward_backward([chain()], "cross_entropy"),
            model.optim_step(types.AdamParams(learning_rate=2e-2)),
        )
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return losses


def name_of(url: str, key: str = KEY) -> str:
    """Name of the base model."""
    rest = tinker.RestClient(base_url=url, api_key=key)
    name = rest.get_server_capabilities().result().supported_models[0].model_name
    assert name is not None
    return name


def drawn(sampler: tinker.SamplingClient, letter: str = "a") -> list[int]:
    """The likeliest continuation of a letter."""
    limits = types.SamplingParams(max_tokens=6, temperature=0.0)
    return list(
        sampler.sample(types.ModelInput.from_ints([ord(letter)]), 1, sampling_params=limits)
        .result()
        .sequences[0]
        .tokens
    )


@pytest.mark.long
def test_models_learn_side_by_side_are_sampled_and_go_on_after_a_kill(tmp_path: Path, nano: Path) -> None:
    folder = tmp_path / "service"
    with service(folder, nano) as (url, process):
        client = tinker.ServiceClient(base_url=url, api_key=KEY)
        base = name_of(url)
        assert base == str(nano / "model")
        one = client.create_lora_training_client(base_model=base, rank=8, seed=1).result()
        two = client.create_lora_training_client(base_model=base, rank=4, seed=2).result()
        losses = learned(one)
        assert losses[-1] < losses[0] / 3
        before, after = (training.save_weights_and_get_sampling_client().result() for training in (two, one))
        assert drawn(after) == LETTERS[1:7]
        assert drawn(before) != LETTERS[1:7]
        scored = after.compute_logprobs(types.ModelInput.from_ints(LETTERS)).result()
        expected = one.forward([chain(7)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
        assert scored[0] is None
        assert scored[1:] == pytest.approx(expected, abs=1e-4)
        path = one.save_state("kept").result().path
        process.kill()
        process.wait()
    with service(folder, nano, f"training_service.port={url.rpartition(':')[2]}") as (new_url, _):
        assert new_url == url
        assert one.forward([chain(7)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist() == expected
        assert drawn(after) == LETTERS[1:7]
        copy = client.create_training_client_from_state_with_optimizer(path).result()
        assert learned(copy, 2) == learned(one, 2)
        client.close("success").result()


@pytest.mark.long
def test_all_weights_of_one_model_are_trained_where_that_is_configured(tmp_path: Path, nano: Path) -> None:
    changes = "training_service.train_all_weights=true"
    with service(tmp_path / "service", nano, changes) as (url, _), client_of(url) as client:
        model = client.create_lora_training_client(base_model=name_of(url), rank=8).result()
        losses = learned(model)
        assert losses[-1] < losses[0] / 3
        assert drawn(model.save_weights_and_get_sampling_client().result()) == LETTERS[1:7]


def called(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "skyrl", *words], capture_output=True, text=True, check=False)


@pytest.mark.long
def test_clients_with_tokens_and_what_watch_shows(tmp_path: Path, nano: Path) -> None:
    folder = tmp_path / "service"
    result = called("serve-training", f"trainer.run_path={folder}", "--add-client", "ada")
    token = result.stdout.strip()
    assert token.startswith("tml-"), result.stderr
    assert token not in "".join(file.read_bytes().decode("latin-1") for file in folder.rglob("*") if file.is_file())
    with service(folder, nano) as (url, _):
        with pytest.raises(Exception, match="401|token"):
            name_of(url)
        with client_of(url, token) as client:
            base = name_of(url, token)
            learned(client.create_lora_training_client(base_model=base, rank=2).result(), 2)
            while "2 steps" not in (output := called("watch", str(folder), "--once").stdout):
                pass
            assert "of ada: rank 2, 2 steps, loss" in output
            status = json.loads(called("watch", str(folder), "--once", "--json").stdout)
            assert status["result"]["models"][0]["steps"] == 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("trainer.policy.model.lora.rank", 4, "clients of a training service choose the ranks"),
        ("trainer.policy.sequence_parallel_size", 2, "ranks of a training service compute on different sequences"),
        ("trainer.logger", "swanlab", "swanlab"),
        ("generator.inference_engine.backend", "sglang", "set it to torch or vllm"),
        ("generator.inference_engine.rollout_dtype", "int8", "engines take no adapters"),
        ("training_service.port", 70000, "a port (0 to 65535"),
    ],
)
def test_a_service_that_cannot_start_says_why(nano: Path, path: str, value: object, message: str) -> None:
    written = {
        "trainer.policy.model.path": str(nano / "model"),
        "trainer.device": "cpu",
        "generator.inference_engine.backend": "torch",
        path: value,
    }
    with pytest.raises(ConfigError) as refused:
        compose([], written, also=lambda kind: PREFLIGHT)
    assert message in str(refused.value)


@pytest.mark.long
def test_all_weights_are_trained_by_one_rank() -> None:
    two_ranks = evolve_at(SkyRLTrainConfig(), "trainer.placement.policy_num_gpus_per_node", 2)
    run = evolve_at(two_ranks, "training_service.train_all_weights", True)
    [problem] = ranks_share_sequences_alone(run)
    assert problem.message == "2 ranks, but all weights of a model are trained by one"


TWO_RANKS = (
    "trainer.placement.executor=ray",
    "trainer.placement.policy_num_gpus_per_node=2",
    "trainer.placement.colocate_all=false",
    "trainer.placement.colocate_policy_ref=false",
)


@pytest.mark.long
@pytest.mark.parametrize("fsdp_size", [-1, 1])
def test_models_learn_on_two_ranks_and_are_sampled(tmp_path: Path, nano: Path, fsdp_size: int) -> None:
    changes = (*TWO_RANKS, f"trainer.policy.fsdp_config.fsdp_size={fsdp_size}")
    with service(tmp_path / "service", nano, *changes) as (url, _), client_of(url) as client:
        model = client.create_lora_training_client(base_model=name_of(url), rank=8, seed=1).result()
        losses = learned(model)
        assert losses[-1] < losses[0] / 3
        assert drawn(model.save_weights_and_get_sampling_client().result()) == LETTERS[1:7]


@pytest.mark.long
def test_another_base_is_refused(tmp_path: Path, nano: Path) -> None:
    folder = tmp_path / "service"
    with service(folder, nano):
        pass
    stored = json.loads((folder / "base.json").read_text())
    (folder / "base.json").write_text(json.dumps(dict.fromkeys(stored, "0")))
    result = called(
        *("serve-training", f"trainer.run_path={folder}", f"trainer.policy.model.path={nano / 'model'}"),
        *("generator.inference_engine.backend=torch", "trainer.device=cpu", "training_service.port=0"),
        *("trainer.max_prompt_length=32", "generator.sampling_params.max_generate_length=16"),
    )
    assert "trained on another base model" in result.stderr
