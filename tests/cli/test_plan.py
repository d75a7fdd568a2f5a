"""What `skyrl plan` prints, for people and for programs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from skyrl.cli.planning.plan import plan
from skyrl.cli.planning.plan_table import table
from skyrl.cli.planning.rehearse import planned_findings
from skyrl.config import load, resolve
from skyrl.errors import ConfigError, UserError
from skyrl.tools.run_plan import plan_of
from skyrl.tree import get_at
from tests.fresh_process import run_program

PLACEMENT = "trainer.placement."
ENGINE = "generator.inference_engine."
HEAVY = ("torch", "ray", "rich", "yaml", "numpy", "transformers", "vllm", "pyarrow")
RUN = ["trainer.device=cpu", "trainer.logger=console", f"{ENGINE}backend=torch"]


def gpus(number: int, *models: str, nodes: int = 1) -> dict[str, Any]:
    """GPUs and nodes of the models."""
    counts = {f"{PLACEMENT}{model}_num_gpus_per_node": number for model in models}
    return counts | {f"{PLACEMENT}{model}_num_nodes": nodes for model in models}


def planned(values: dict[str, Any], gpus_per_node: int | None = None) -> Any:
    """The plan of a run on GPUs with these values."""
    cuda = {"trainer.device": "cuda", "trainer.logger": "console"}
    return plan_of(resolve(load([], cuda | values)), gpus_per_node)


def where(values: dict[str, Any], gpus_per_node: int | None = None) -> list[str]:
    """The lines about who sits where, without the columns' spaces."""
    lines = table(planned(values, gpus_per_node)).split("\n\n")[1].splitlines()[1:]
    return [" ".join(line.split()) for line in lines]


def test_models_and_engines_on_the_same_gpus() -> None:
    values = {**gpus(8, "policy", "ref", nodes=2), f"{ENGINE}num_engines": 4, f"{ENGINE}tensor_parallel_size": 4}
    assert where(values) == [
        "policy 0-15 nodes 0-1 gpus 0-7",
        "ref 0-15 nodes 0-1 gpus 0-7",
        "engine 0-3 nodes 0-1 gpus 0-3 | 4-7",
    ]


def test_engines_beside_policy_and_reference() -> None:
    values = {
        **gpus(4, "policy", "ref"),
        f"{PLACEMENT}colocate_all": False,
        f"{ENGINE}num_engines": 3,
        f"{ENGINE}tensor_parallel_size": 2,
    }
    assert where(values) == [
        "policy 0-3 node 0 gpus 0-3",
        "ref 0-3 node 0 gpus 0-3",
        "engine 0-1 node 0 gpus 4-5 | 6-7",
        "engine 2 node 1 gpus 0-1",
    ]


def test_every_model_on_gpus_of_its_own() -> None:
    values = {
        **gpus(4, "policy"),
        **gpus(2, "critic", "ref"),
        f"{PLACEMENT}colocate_all": False,
        f"{PLACEMENT}colocate_policy_ref": False,
        "trainer.critic.model.path": "critic",
    }
    assert where(values, 4) == [
        "policy 0-3 node 0 gpus 0-3",
        "critic 0-1 node 1 gpus 0-1",
        "ref 0-1 node 1 gpus 2-3",
        "engine 0 node 2 gpus 0",
    ]


def test_an_engine_larger_than_a_machine_has_several() -> None:
    values = {
        f"{PLACEMENT}colocate_all": False,
        f"{ENGINE}tensor_parallel_size": 4,
        f"{ENGINE}pipeline_parallel_size": 2,
    }
    assert where(values, 4)[-1] == "engine 0 nodes 0-1 gpus 0-3"


def test_engines_of_others_have_no_place() -> None:
    values = {f"{PLACEMENT}colocate_all": False, f"{ENGINE}backend": "http"}
    plan = planned(values)
    assert plan["engines"] is None
    assert table(plan).endswith("The engines are already running elsewhere.")


def test_the_table_says_what_a_rank_does_in_one_training_step() -> None:
    values = {
        **gpus(8, "policy", "ref"),
        f"{ENGINE}num_engines": 8,
        "trainer.micro_train_batch_size_per_gpu": 4,
        "trainer.micro_forward_batch_size_per_gpu": 16,
    }
    # 256 prompts x 5 samples / 8 ranks = 160; 1,024 x 5 / 8 = 640
    assert table(planned(values)).splitlines() == [
        "8 GPUs on 1 node of 8, 24 actors on Ray.",
        "",
        "process  ranks  where",
        "policy   0-7    node 0 gpus 0-7",
        "ref      0-7    node 0 gpus 0-7",
        "engine   0-7    node 0 gpus 0-7",
        "",
        "model   ranks  data parallel  work of each rank in a training step",
        "policy  8      8              4 optimizer steps of 160 samples, each in 40 micro-batches of 4; "
        "scores 640 samples in 40 passes of 16",
        "ref     8      8              scores 640 samples in 40 passes of 16",
        "",
        "8 engines of 1 (tensor 1 x pipeline 1 x data 1); 1024 prompts x 5 = 5120 samples per training step.",
    ]


def test_the_table_says_how_many_ranks_share_a_sequence() -> None:
    values = {
        **gpus(8, "policy", "ref"),
        f"{ENGINE}num_engines": 8,
        "trainer.policy.sequence_parallel_size": 4,
        "trainer.ref.context_parallel_size": 2,
        "trainer.ref.sequence_parallel_size": 2,
        "trainer.ref.tensor_parallel_size": 2,
        "trainer.policy.expert_parallel_size": 8,
        "trainer.attention": "sdpa",
    }
    plan = planned(values)
    policy, reference = table(plan).splitlines()[-4:-2]
    assert policy.startswith(
        "policy  8      2 x sequence 4 (expert 8)              4 optimizer steps of 640 samples"
    )  # 256 x 5 / 2
    assert reference.startswith("ref     8      1 x context 2 x sequence 2 x tensor 2  scores 5120 samples")
    assert (plan["models"][0]["sequence_parallel"], plan["models"][0]["data_parallel"]) == (4, 2)


def test_the_table_says_how_megatron_spreads_a_replica() -> None:
    table_of_megatron = "trainer.policy.megatron_config."
    values = {
        **gpus(8, "policy", "ref"),
        f"{ENGINE}num_engines": 8,
        "trainer.placement.colocate_policy_ref": False,
        "trainer.placement.colocate_all": False,
        "trainer.strategy": "megatron",
        f"{table_of_megatron}tensor_model_parallel_size": 2,
        f"{table_of_megatron}pipeline_model_parallel_size": 2,
        f"{table_of_megatron}expert_model_parallel_size": 4,
        f"{table_of_megatron}expert_tensor_parallel_size": 1,
    }
    plan = planned(values)
    assert "2 x pipeline 2 x tensor 2 (expert 4)" in table(plan)
    assert plan["models"][0]["pipeline_parallel"] == 2


def test_micro_batches_bounded_by_tokens_are_counted_in_tokens() -> None:
    plan = planned({"trainer.max_tokens_per_microbatch": 4096})
    row = table(plan).splitlines()[-5:-2]
    assert "4 optimizer steps of 1280 samples, each in micro-batches of at most 4096 tokens" in row[1]
    assert "scores 5120 samples in passes of at most 4096 tokens" in row[2]
    policy = plan["models"][0]
    assert (policy["tokens_per_micro_batch"], policy["micro_batches"], policy["micro_batch_size"]) == (4096, None, None)


def test_a_policy_that_takes_one_optimizer_step_does_not_score() -> None:
    [policy, reference] = planned({"trainer.policy_mini_batch_size": 1024})["models"]
    assert (policy["optimizer_steps"], policy["rows_scored"], reference["rows_scored"]) == (1, 0, 5120)


@pytest.mark.parametrize(
    ("values", "scored"),
    [
        ({"policy_loss_type": "dppo"}, 0),  # measured against the engine, however many steps
        ({"policy_loss_type": "dppo", "off_policy_correction.tis_ratio_type": "token"}, 5120),
        ({"use_kl_in_reward": True, "use_kl_loss": False}, 5120),
    ],
)
def test_a_policy_scores_what_something_looks_at(values: dict[str, Any], scored: int) -> None:
    own = {f"trainer.algorithm.{name}": value for name, value in values.items()}
    assert planned(own)["models"][0]["rows_scored"] == scored


def test_the_plan_has_the_place_of_every_process() -> None:
    values = {**gpus(2, "policy", "ref"), f"{ENGINE}tensor_parallel_size": 2}
    plan = planned(values)
    assert plan["pools"] == [{"name": "policy+ref+engine", "nodes": [0], "gpus_per_node": 2, "share": 0.3333}]
    assert [(placed["role"], placed["rank"], placed["places"]) for placed in plan["seats"]] == [
        ("policy", 0, [[0, 0]]),
        ("policy", 1, [[0, 1]]),
        ("ref", 0, [[0, 0]]),
        ("ref", 1, [[0, 1]]),
        ("engine", 0, [[0, 0], [0, 1]]),
    ]
    assert (plan["models"][0]["gradient_accumulation"], plan["models"][0]["data_parallel"]) == (640, 2)


def test_a_thousand_gpus_have_a_plan_of_few_lines() -> None:
    values = {
        **gpus(8, "policy", "ref", nodes=64),
        f"{PLACEMENT}colocate_all": False,
        f"{ENGINE}num_engines": 512,
    }
    plan = planned(values)
    assert (plan["gpus"], plan["nodes"], len(plan["seats"])) == (1024, 128, 1536)
    assert where(values)[-1] == "engine 0-511 nodes 64-127 gpus 0-7"


def test_on_a_cpu_the_counts_are_processes() -> None:
    output = table(planned({"trainer.device": "cpu", **gpus(2, "policy", "ref"), f"{ENGINE}num_engines": 2}))
    assert output.splitlines()[:2] == [
        "2 slots on 1 node, 6 actors on Ray.",
        "trainer.device is cpu: slots are counted instead of GPUs, each a place for one process.",
    ]
    assert "gpus" not in output


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"trainer.device": "cpu", f"{ENGINE}backend": "torch"}, "one process on a CPU"),
        ({"trainer.device": "cpu", f"{PLACEMENT}executor": "ray", f"{ENGINE}backend": "torch"}, "1 slot on 1 machine"),
        ({"trainer.device": "cuda", f"{PLACEMENT}executor": "ray"}, "1 GPU on 1 machine of 8"),
        ({**gpus(8, "policy", "ref", nodes=2), f"{ENGINE}num_engines": 16}, "16 GPUs on 2 machines of 8"),
    ],
)
def test_a_rehearsal_counts_gpus_of_runs_that_use_them(values: dict[str, Any], text: str) -> None:
    run = resolve(load([], {"trainer.device": "cuda", "trainer.logger": "console"} | values))
    [placement] = [finding for finding in planned_findings(run, None) if finding.phase == "placement"]
    assert placement.text == text


def test_a_machine_that_is_too_small_is_refused() -> None:
    with pytest.raises(UserError, match="policy needs 8 on one node, but --gpus-per-node is 4"):
        planned({**gpus(8, "policy"), f"{PLACEMENT}colocate_all": False, "trainer.algorithm.use_kl_loss": False}, 4)


def test_the_command_prints_the_table_or_json() -> None:
    result = CliRunner().invoke(plan, RUN, catch_exceptions=False)
    assert result.output.startswith("Everything runs in the command's own process.\n\nmodel ")  # and sits nowhere else
    data = json.loads(CliRunner().invoke(plan, [*RUN, "--json"], catch_exceptions=False).output)["result"]
    assert (data["executor"], data["actors"], data["batch"]["samples"]) == ("in_process", 0, 5120)


def test_the_command_prints_what_each_gpu_holds() -> None:
    words = ["trainer.device=cuda", "trainer.logger=console", "trainer.policy.model.path=Qwen/Qwen2.5-72B"]
    output = CliRunner().invoke(plan, [*words, f"{PLACEMENT}gpu_kind=H100-80"], catch_exceptions=False).stdout
    head, *rows = output[output.index("GiB per GPU") :].splitlines()
    assert head.split()[4:9] == ["total", "parameters", "gradients", "optimizer", "activations"]
    assert [row.split()[:2] for row in rows[:5]] == [
        ["generation", "engine"],
        ["scoring", "policy"],
        ["update", "policy"],
        ["transfer", "policy"],
        ["scoring", "ref"],
    ]
    assert rows[2].split()[3:6] == ["270.9", "270.9", "812.6"]  # 4, 4 and 12 bytes for each of 72.7 billion weights
    assert rows[5].startswith("It does not fit H100-80, of which 75.7 GiB may be used: update of the policy takes ")
    assert rows[6].startswith("Deciding settings: trainer.placement.policy_num_gpus_per_node")
    assert rows[7].startswith("Closest change that fits: ")
    data = json.loads(CliRunner().invoke(plan, [*words, "--json"], catch_exceptions=False).stdout)["result"]["memory"]
    assert (data["fits"], len(data["phases"])) == (None, 5)


def test_a_model_of_unknown_sizes_is_planned_without_memory() -> None:
    output = CliRunner().invoke(plan, [*RUN, "trainer.policy.model.path=somebody/else"], catch_exceptions=False).stdout
    assert "Memory is not estimated: the sizes of somebody/else are unknown" in output


def described(folder: Path, kind: str, **sizes: int) -> list[str]:
    """Arguments of a plan whose model has a folder with this configuration."""
    usual = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {"model_type": kind, "vocab_size": 256, **usual, **sizes}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return [*RUN, f"trainer.policy.model.path={folder}"]


@pytest.mark.parametrize(("kind", "expected"), [("deepseek_v3", True), ("llama", False)])
def test_layers_of_another_kind_are_estimated_without_transformers(
    tmp_path: Path, kind: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "skyrl.models.files.meta_model", None)
    output = CliRunner().invoke(plan, described(tmp_path, kind), catch_exceptions=False).stdout
    assert (f"{tmp_path}: layers of a kind that is not counted" in output) is expected


def test_layers_of_another_kind_are_counted_and_their_rows_tried(tmp_path: Path) -> None:
    words = described(tmp_path, "falcon_mamba", state_size=8)
    output = CliRunner().invoke(plan, words, catch_exceptions=False).stdout
    assert f"{tmp_path}: packed rows would see each other, so rows are padded." in output
    memory = json.loads(CliRunner().invoke(plan, [*words, "--json"], catch_exceptions=False).stdout)["result"]["memory"]
    assert (memory["estimated"], memory["unpacked"]) == ([], [str(tmp_path)])
    # a layer of 96 channels: projections 64 x 192 and 96 x 64, convolution 96 x 4 + 96, x 96 x (4 + 16), dt 4 x 96
    # + 96, A 96 x 8, D 96, norm 64; embedding 256 x 64, last norm 64
    weights = 2 * (12288 + 6144 + 480 + 1920 + 480 + 768 + 96 + 64) + 16384 + 64
    policy = next(phase for phase in memory["phases"] if phase["role"] == "policy")
    assert policy["parts"]["parameters"] == 3 * 4 * weights  # of policy, reference and engine in one process


def test_every_mistake_is_told_as_by_config_check() -> None:
    mistakes = ["trainer.policy_mini_batch_size=300", "trainer.epochs=two", "data.train_data=[]"]
    error = CliRunner().invoke(plan, [*RUN, *mistakes]).exception
    assert isinstance(error, ConfigError)
    assert error.exit_code == 2
    assert [problem.path for problem in error.problems] == [
        "trainer.policy_mini_batch_size",
        "trainer.epochs",
        "data.train_data",
    ]


def test_a_value_without_effect_is_a_warning_beside_the_plan() -> None:
    result = CliRunner().invoke(plan, [*RUN, "trainer.algorithm.sapo.tau_pos=2.0"], catch_exceptions=False)
    assert "has no effect in this run" in result.stderr
    assert result.stdout.startswith("Everything runs")


def test_a_plan_needs_nothing_heavy(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("".join(f'{path} = "{value}"\n' for path, value in (word.split("=") for word in RUN)))
    program = (
        "import sys; from skyrl.cli.planning.plan import plan; plan.main([sys.argv[1]], standalone_mode=False); "
        f"print(*sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)"
    )
    result = run_program(program, file)
    assert result.stderr.strip() == ""
    assert "policy" in result.stdout


FIT = (
    "trainer.device=cuda",
    "trainer.logger=console",
    "trainer.placement.gpu_kind=H100-80",
    "trainer.policy.model.path=Qwen/Qwen2.5-7B",
)


@pytest.mark.long
def test_layouts_are_proposed_with_their_seconds_and_their_reasons() -> None:
    result = CliRunner().invoke(plan, ["--fit", "8", *FIT])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "Layouts on 8 x H100-80, fastest first (estimated):"
    assert lines[2].startswith("1. taking turns on all GPUs: ")
    assert "policy_num_gpus_per_node=8" in result.stdout
    assert result.stderr == ""  # that the run does not fit as it is, is why one asks


@pytest.mark.long
def test_a_proposal_is_written_as_a_layer_that_makes_the_run_fit(tmp_path: Path) -> None:
    layer = tmp_path / "fit.toml"
    result = CliRunner().invoke(plan, ["--fit", "8", *FIT, "--json", "--to", str(layer)])
    changes = json.loads(result.stdout)["result"]["proposals"][0]["changes"]
    run = resolve(load([layer], dict(word.split("=", 1) for word in FIT)))
    assert changes
    assert {path: get_at(run, path) for path in changes} == changes
    fitting = CliRunner().invoke(plan, [*FIT, str(layer)])
    assert "It fits H100-80" in fitting.stdout
    assert "exists" in str(CliRunner().invoke(plan, ["--fit", "8", *FIT, "--to", str(layer)]).exception)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--fit", "8", *FIT, "trainer.device=cpu", f"{ENGINE}backend=torch"], "set trainer.device=cuda"),
        (["--fit", "8", *FIT, "trainer.placement.gpu_kind=null"], "trainer.placement.gpu_kind=H100-80"),
        (
            ["--fit", "8", *FIT, "trainer.placement.gpu_kind=null", "trainer.policy.model.path=nobody/knows"],
            "trainer.placement.gpu_kind=H100-80\n--fit: the sizes of nobody/knows are unknown",
        ),
        (["--fit", "8", *FIT, "trainer.policy.model.path=nobody/knows"], "the sizes of nobody/knows are unknown"),
        (
            ["--fit", "1", *FIT, "trainer.policy.model.path=Qwen/Qwen2.5-72B"],
            "no layout fits 1 x H100-80; 8 would be enough",
        ),
        (["--fit", "8", "kind=sft", "model.path=m", 'train_datasets=["rows.jsonl"]'], "this run has no engines"),
        ([*FIT, "--answer-tokens", "5"], "--answer-tokens needs --fit"),
        ([*FIT, "--to", "x.toml"], "--to needs --fit"),
    ],
)
def test_fit_without_a_proposal_raises_with_the_reason(words: list[str], reason: str) -> None:
    result = CliRunner().invoke(plan, words)
    assert reason in str(result.exception)
