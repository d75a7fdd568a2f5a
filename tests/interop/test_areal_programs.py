"""Scripts that start AReaL's programs: the file they name, its changes, and what the program says of the run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skyrl.config import RewardModelConfig, SFTConfig, SkyRLTrainConfig
from skyrl.config.foundation.entry import RunConfig
from skyrl.envs.registry import find_env
from skyrl.errors import ConfigError
from skyrl.interop.areal.convert import convert_areal
from skyrl.interop.report import Conversion

EXPERIMENT = """
experiment_name: e
trial_name: t
total_train_epochs: 3
cluster: {fileroot: experiments}
actor:
  path: a/b
  backend: fsdp:d4
  kl_ctl: 0.0
  optimizer: {lr: 1.0e-5}
  adv_norm: {mean_level: group, std_level: batch}
gconfig: {n_samples: 4}
rollout: {backend: "vllm:d4"}
train_dataset: {path: x/y, batch_size: 64}
"""
SUPERVISED = """
experiment_name: e
trial_name: t
cluster: {fileroot: experiments}
actor: {path: a/b, backend: "fsdp:d4", optimizer: {lr: 1.0e-5}}
train_dataset: {path: x/y, batch_size: 64}
"""


def convert(folder: Path, text: str, yaml: str = EXPERIMENT, **options: int) -> Conversion:
    """The conversion of a script two folders below the file that it names."""
    (folder / "config.yaml").write_text(yaml)
    script = folder / "examples" / "math" / "run.sh"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(text)
    return convert_areal(str(script), number=options.get("number"))


@pytest.mark.parametrize(
    ("command", "launcher", "is_known"),
    [
        ("python3 -m areal.launcher.local examples/math/gsm8k_grpo.py --config config.yaml", "local", True),
        ("python -m areal.infra.launcher.ray examples/math/gsm8k_rl.py --config=config.yaml", "ray", True),
        ("python3 -m areal.infra.launcher.slurm my/train.py --config config.yaml", "slurm", False),
        ("python3 examples/math/gsm8k_rl.py --config config.yaml scheduler.type=slurm", "slurm", True),
        ("python -m examples.swe.train_swe_rl --config config.yaml mode=local", "local", True),
        ("cd x && PYTHONPATH=. python train.py --config config.yaml", "", False),
    ],
)
def test_the_file_that_a_command_names_is_converted(
    command: str, launcher: str, is_known: bool, tmp_path: Path
) -> None:
    conversion = convert(tmp_path, f"{command} total_train_epochs=5 +seed=7 actor.optimizer.lr=2e-6 ~actor.adv_norm\n")
    trainer = conversion.tables["trainer"]
    assert (trainer["epochs"], trainer["seed"]) == (5, 7)
    assert trainer["policy"]["optimizer_config"]["lr"] == 2e-6
    assert "advantage_norm" not in trainer["algorithm"]
    assert [line for line in conversion.refused if line.source != "mode"] == []
    texts = [*conversion.remarks, *(target for line in conversion.lines for target in line.targets)]
    assert any(f"skyrl launch {launcher}" in text for text in texts) is bool(launcher)
    assert ("is not a known program of AReaL" in conversion.notice) is not is_known


@pytest.mark.parametrize(
    ("program", "root"), [("gsm8k_sft", SFTConfig), ("hhrlhf_rw", RewardModelConfig), ("gsm8k_rl", SkyRLTrainConfig)]
)
def test_the_program_decides_the_kind_of_run(program: str, root: type[RunConfig], tmp_path: Path) -> None:
    yaml = EXPERIMENT if root is SkyRLTrainConfig else SUPERVISED
    yaml = yaml.replace("{path: a/b,", "{path: a/b, is_critic: true,") if root is RewardModelConfig else yaml
    conversion = convert(tmp_path, f"python3 examples/{program}.py --config config.yaml", yaml)
    assert (conversion.root, conversion.refused) == (root, ())


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("vlm/clevr_count_70k_grpo", "reads images"),
        ("vlm/clevr_count_70k_sft", "reads images"),
        ("vlm_npu/geometry3k_grpo", "reads images"),
        ("vlm_npu/virl39k_grpo", "reads images"),
        ("math/gsm8k_eval", "skyrl eval"),
        ("openclaw/start_session", "only talks to a run"),
    ],
)
def test_programs_without_an_equivalent_are_refused_by_their_name(program: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path, f"python3 examples/{program}.py --config config.yaml")


@pytest.mark.parametrize(
    ("program", "remark"),
    [
        ("search_agent/tongyi_deepresearch/train", "search"),
        ("multi_turn_math/gsm8k_rl_mt", "asks again"),
        ("tau2/train", "docs/agents.md"),
        ("tir/train_tir", "call Python"),
        ("scaffolding/search_scaffolding", "controllers"),
    ],
)
def test_code_of_a_programs_own_is_remarked_upon(program: str, remark: str, tmp_path: Path) -> None:
    conversion = convert(tmp_path, f"python3 examples/{program}.py --config config.yaml")
    assert remark in conversion.remarks[0]


@pytest.mark.parametrize(
    ("rows", "model"),
    [("hiyouga/geometry3k", "a/b"), ("BUAADreamer/clevr_count_70k", "a/b"), ("x/y", "Qwen/Qwen2.5-VL-3B-Instruct")],
)
def test_files_with_images_are_refused_without_their_program(rows: str, model: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(EXPERIMENT.replace("x/y", rows).replace("a/b", model))
    with pytest.raises(ConfigError, match="rows with images"):
        convert_areal(str(file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("python3 examples/math/gsm8k_rl.py --config other.yaml", "names other.yaml, which is neither here"),
        ("python3 examples/math/gsm8k_rl.py seed=1", "gives no file after --config"),
        ("python3 examples/math/gsm8k_rl.py --config $(ls *.yaml)", "after --config"),
        ("pip install areal", "starts no program"),
    ],
)
def test_a_script_without_a_file_says_so(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        convert(tmp_path, text)
    assert message in str(raised.value)


def test_a_program_of_python_is_told_from_a_script(tmp_path: Path) -> None:
    file = tmp_path / "gsm8k_rl.py"
    file.write_text("import sys\n")
    with pytest.raises(ConfigError, match="follows --config"):
        convert_areal(str(file))


def test_one_of_several_runs_is_chosen(tmp_path: Path) -> None:
    text = "".join(f"python3 examples/math/gsm8k_rl.py --config config.yaml seed={seed}\n" for seed in (3, 4))
    with pytest.raises(ConfigError, match="starts 2 different runs"):
        convert(tmp_path, text)
    assert convert(tmp_path, text, number=2).tables["trainer"]["seed"] == 4


@pytest.mark.parametrize(
    ("change", "path", "value"),
    [
        ("actor.adv_norm=null", "advantage_norm", None),
        ("actor.adv_norm={mean_level:batch}", "advantage_norm", {"mean_level": "batch"}),
        ("++actor.adv_norm.mean_level=batch", "advantage_norm", {"mean_level": "batch"}),
        ("actor.reward_norm={mean_level:group,std_level:group}", "reward_shaping", {"norm": {"mean_level": "group"}}),
        ("actor.eps_clip=0.3", "eps_clip_low", 0.3),
    ],
)
def test_a_change_merges_as_hydra_merges_it(change: str, path: str, value: object, tmp_path: Path) -> None:
    conversion = convert(tmp_path, f"python3 examples/math/gsm8k_rl.py --config config.yaml '{change}'")
    converted = conversion.tables["trainer"]["algorithm"].get(path)
    if isinstance(value, dict):
        assert converted is not None and {key: converted[key] for key in value if key != "norm"} == {
            key: entry for key, entry in value.items() if key != "norm"
        }
        assert path != "reward_shaping" or converted["norm"]["mean_level"] == "group"
    else:
        assert converted == value


def test_files_that_hydra_reads_first_are_read_first(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(EXPERIMENT)
    file = tmp_path / "a.yaml"
    file.write_text("defaults:\n  - base@_global_\n  - _self_\nactor: {optimizer: {lr: 3.0e-6}, adv_norm: null}\n")
    trainer = convert_areal(str(file)).tables["trainer"]
    assert trainer["policy"]["optimizer_config"]["lr"] == 3e-6 and trainer["epochs"] == 3
    assert "advantage_norm" not in trainer["algorithm"]
    file.write_text("defaults:\n  - other: way\n  - gone\n  - _self_\n" + EXPERIMENT.strip())
    assert [line.value for line in convert_areal(str(file)).refused] == [[{"other": "way"}, "gone"]]


def test_a_reference_to_a_setting_that_is_left_out_has_areals_default(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(EXPERIMENT.replace("  kl_ctl: 0.0", "  kl_ctl: 0.0\n  temperature: ${gconfig.temperature}"))
    conversion = convert_areal(str(file))
    assert conversion.refused == ()
    assert not any(line.source == "gconfig.temperature" for line in conversion.lines)


def test_the_reward_of_the_page_scores_an_answer(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "coming-from" / "areal.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "rewards.py"
    file.write_text(code)
    extras = {"answer": "72", "reward_spec": {"ground_truth": "72"}}
    rewards = []
    for answer in ("it is 72", "it is 7"):
        environment = find_env(f"{file}:gsm8k")(extras)
        environment.init(({"role": "user", "content": "?"},))
        rewards.append(environment.step(answer).reward)
    assert rewards == [1.0, 0.0]


def test_two_trials_never_share_their_checkpoints(tmp_path: Path) -> None:
    checkpoint_paths = []
    for trial in ("one", "two"):
        file = tmp_path / f"{trial}.yaml"
        file.write_text(EXPERIMENT.replace("trial_name: t", f"trial_name: {trial}"))
        checkpoint_paths.append(convert_areal(str(file)).tables["trainer"]["ckpt_path"])
    assert checkpoint_paths == ["experiments/checkpoints/e/one", "experiments/checkpoints/e/two"]
