"""Models and adapters that runs leave behind, loaded by those they are for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from skyrl.checkpoint.store import CheckpointStore
from skyrl.config import InferenceEngineConfig
from skyrl.errors import ResumeError, UserError
from skyrl.inference.vllm.environment import import_vllm, set_variables
from skyrl.tools.exporting import export
from tests.inference.vllm_host import Host
from tests.nano_run import metrics, train

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
LORA: dict[str, Any] = {
    "trainer__policy__model__lora__rank": 4,
    "trainer__policy__model__lora__alpha": 8,
    "trainer__policy__optimizer_config__lr": 2e-2,
    "trainer__eval_interval": -1,
}


@pytest.fixture(scope="module")
def run_with_adapter(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps that train an adapter. Not to be written to."""
    out = tmp_path_factory.mktemp("adapter")
    train(nano, out, **LORA, trainer__hf_save_interval=3)
    return out


def logits(folder: Path) -> torch.Tensor:
    model_logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(IDS).logits
    return model_logits.detach()


def with_peft(base: Path, adapter: Path) -> torch.Tensor:
    from peft import PeftModel

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model_logits: torch.Tensor = PeftModel.from_pretrained(model, adapter).eval()(IDS).logits
    return model_logits.detach()


@pytest.mark.long
def test_an_export_from_a_checkpoint_is_the_model_that_the_run_left(nano: Path, tmp_path: Path) -> None:
    train(nano, tmp_path, trainer__hf_save_interval=2)
    step, folder = export(tmp_path / "run")
    assert (step, folder) == (6, tmp_path / "exports" / "global_step_6" / "policy")
    exported, trained = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "run" / "model"))
    assert exported.keys() == trained.keys()
    assert all(torch.equal(exported[name], trained[name]) for name in exported)
    step, folder = export(tmp_path / "run", step=4, to=tmp_path / "four")
    torch.testing.assert_close(
        logits(folder), logits(tmp_path / "exports" / "global_step_4" / "policy"), rtol=0, atol=0
    )
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert GenerationConfig.from_pretrained(folder).eos_token_id is not None


def test_an_export_that_cannot_be_says_why(nano: Path, tmp_path: Path) -> None:
    train(nano, tmp_path, trainer__max_training_steps=2, trainer__eval_interval=-1)
    with pytest.raises(ResumeError, match=r"no checkpoint of step 1 in .*; available steps: 2"):
        export(tmp_path / "run", step=1)
    with pytest.raises(UserError, match=r"trained all weights .*it has no adapter"):
        export(tmp_path / "run", adapter=True)
    with pytest.raises(ResumeError, match="there is no checkpoint in .*--checkpoints"):
        export(tmp_path / "run", checkpoints=tmp_path / "exports")


@pytest.mark.long
def test_an_adapter_learns_and_the_base_stays_as_it_was(nano: Path, run_with_adapter: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32).state_dict()
    latest = CheckpointStore(run_with_adapter / "checkpoints").latest()
    assert latest is not None
    kept = latest.models["policy"]
    frozen = {name: tensor for name, tensor in kept.items() if name.endswith("base_layer.weight")}
    assert len(frozen) == 14
    for name, tensor in frozen.items():
        assert torch.equal(tensor, base[name.removeprefix("model.").replace(".base_layer.", ".")])
    learned = [name for name in kept if name.startswith("optimizer.") and name.endswith("exp_avg")]
    assert len(learned) == 28
    assert all("lora_" in name for name in learned)
    rows = [row for row in metrics(run_with_adapter) if row["step"]]
    assert max(row["policy/rollout_train_logprobs_abs_diff_max"] for row in rows) < 1e-4  # engines have it merged


@pytest.mark.long
def test_peft_and_transformers_load_what_the_run_left_and_compute_the_same(nano: Path, run_with_adapter: Path) -> None:
    run = run_with_adapter / "run"
    assert (logits(run / "model") - logits(nano / "model")).abs().max() > 1e-2
    torch.testing.assert_close(with_peft(nano / "model", run / "adapter"), logits(run / "model"), rtol=1e-4, atol=1e-4)
    early = run_with_adapter / "exports" / "global_step_3"
    torch.testing.assert_close(
        with_peft(nano / "model", early / "adapter"), logits(early / "policy"), rtol=1e-4, atol=1e-4
    )


@pytest.mark.long
def test_model_and_adapter_of_a_checkpoint_are_those_of_the_run(
    nano: Path, run_with_adapter: Path, tmp_path: Path
) -> None:
    run = run_with_adapter / "run"
    _, folder = export(run, to=tmp_path / "adapter", adapter=True)
    exported, trained = (load_file(path / "adapter_model.safetensors") for path in (folder, run / "adapter"))
    assert exported.keys() == trained.keys()
    assert all(torch.equal(exported[name], trained[name]) for name in exported)
    _, merged = export(run, to=tmp_path / "model")
    torch.testing.assert_close(logits(merged), logits(run / "model"), rtol=0, atol=0)


@pytest.mark.long
def test_a_run_with_dropout_in_its_adapter_repeats_itself(nano: Path, tmp_path: Path) -> None:
    dropout = {**LORA, "trainer__policy__model__lora__dropout": 0.3, "trainer__max_training_steps": 3}
    ends = []
    for name, changes in {"one": {}, "again": {}, "none": {"trainer__policy__model__lora__dropout": 0.0}}.items():
        train(nano, tmp_path / name, **(dropout | changes))
        ends.append(logits(tmp_path / name / "run" / "model"))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


@pytest.mark.long
@pytest.mark.xdist_group("vllm")
def test_vllm_serves_an_exported_model_and_an_exported_adapter(host: Host, nano: Path, tmp_path: Path) -> None:
    base = that_vllm_takes(nano, tmp_path / "base")
    values = {**LORA, "trainer__policy__model__path": str(base), "trainer__max_training_steps": 2}
    train(nano, tmp_path, **values)
    run = tmp_path / "run"
    torch.testing.assert_close(with_peft(base, run / "adapter"), logits(run / "model"), rtol=1e-4, atol=1e-4)
    served = host.run(serve, base, run / "adapter", run / "model")
    expected = [logits(base), with_peft(base, run / "adapter"), logits(run / "model")]
    for logprob, expected_logits in zip(served, expected, strict=True):
        assert logprob == pytest.approx(expected_logits[0].log_softmax(-1).max(-1).values[-1].item(), abs=1e-3)
    assert abs(served[0] - served[1]) > 1e-3


def that_vllm_takes(nano: Path, folder: Path) -> Path:
    """A model with heads of 32 dimensions, and the nano model's tokenizer."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(nano / "model", **sizes)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(nano / "model").save_pretrained(folder)
    return folder


async def serve(base: Path, adapter: Path, model: Path) -> list[float]:
    """Log-probability of the likeliest next token: of the base, of the base with the adapter, of the merged model."""
    set_variables(InferenceEngineConfig(async_engine=False), "cpu")
    vllm = import_vllm()
    from vllm.lora.request import LoRARequest

    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 64,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 64 << 20,
        "max_num_seqs": 2,
    }
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=1, logprobs=1)
    prompt = {"prompt_token_ids": IDS[0].tolist()}

    def likeliest(engine: Any, request: Any = None) -> float:
        (answer,) = engine.generate(prompt, sampling, lora_request=request, use_tqdm=False)
        (token,) = answer.outputs[0].logprobs
        return float(max(candidate.logprob for candidate in token.values()))

    both = vllm.LLM(str(base), enable_lora=True, max_lora_rank=8, **settings)
    logprobs = [likeliest(both), likeliest(both, LoRARequest("trained", 1, str(adapter)))]
    del both
    return [*logprobs, likeliest(vllm.LLM(str(model), **settings))]
