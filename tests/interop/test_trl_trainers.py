"""What a file of TRL trains is told by its program, its class, its arguments or `--kind`; each becomes its kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyrl.config import ConfigError, PreferenceConfig, RewardModelConfig, SFTConfig, SkyRLTrainConfig, load
from skyrl.envs.env import SampleAwareEnv, SampledAnswer
from skyrl.envs.registry import find_env
from skyrl.interop.peer_trees import PeerTree, peer_trees
from skyrl.interop.report import Conversion
from skyrl.interop.trl.convert import SWITCHES, convert_keys, convert_trl
from skyrl.interop.trl.sources import CONVERTED, tree_of
from tests.interop.test_trl import WHOLE, loaded

TREES = [
    (kind, tree) for kind in CONVERTED for tree in (*peer_trees("trl", kind), *peer_trees("trl", f"open_r1_{kind}"))
]
ROWS = {**WHOLE, "dataset_name": "c"}
TEACHER = {"teacher_model_name_or_path": "a/t"}
TAUGHT: dict[str, dict[str, Any]] = {"distillation": TEACHER, "gkd": {**TEACHER, "lmbda": 0.0}}


@pytest.mark.parametrize(
    ("kind", "tree"), TREES, ids=lambda param: param.version if isinstance(param, PeerTree) else param
)
def test_a_dump_of_the_defaults_converts(kind: str, tree: PeerTree) -> None:
    keys = {**tree.defaults, **WHOLE, **TAUGHT.get(kind, {})}
    conversion = convert_keys(keys, kind=kind)
    assert [(line.source, line.value, line.reason) for line in conversion.refused] == []
    assert {line.source for line in conversion.lines} == {*tree.defaults, *WHOLE}
    assert tree_of(kind, tree.defaults)[0] == tree
    assert f"TRL {tree.version}" in conversion.notice


def test_every_tree_is_one_of_a_known_trainer() -> None:
    assert len(TREES) >= 9
    assert {kind for kind, _ in TREES} == {*CONVERTED}


ON: dict[str, tuple[str, dict[str, Any]]] = {
    "use_peft": ("grpo", {"use_peft": True, "lora_r": 4}),
    "load_in_4bit": ("grpo", {"load_in_4bit": True}),
    "use_vllm": ("grpo", {"use_vllm": True}),
    "vllm_importance_sampling_correction": (
        "grpo",
        {"use_vllm": True, "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "token_mask"},
    ),
    "use_transformers_continuous_batching": ("grpo", {}),  # generation only: engines batch continuously
    "sync_ref_model": ("grpo", {"sync_ref_model": True, "beta": 0.1}),
    "use_adaptive_entropy": ("grpo", {"use_adaptive_entropy": True}),
    "beta": ("grpo", {"beta": 0.1, "use_bias_correction_kl": True}),
    "loss_type": ("grpo", {"loss_type": "vespo"}),
    "packing": ("sft", {"packing": True}),
    "gradient_checkpointing": ("grpo", {"gradient_checkpointing": True}),
    "use_liger_kernel": ("grpo", {"use_liger_kernel": True}),
    "eval_strategy": ("grpo", {"eval_strategy": "steps", "eval_steps": 3}),
}


@pytest.mark.parametrize("key", dict.fromkeys(switch.key for switch in SWITCHES))
def test_a_switch_that_is_on_acts_or_is_refused_by_its_name(key: str) -> None:
    kind, turned = ON[key]
    off, on = convert_keys(WHOLE, kind=kind), convert_keys({**WHOLE, **turned}, kind=kind)
    assert on.refused or on.tables != off.tables or not turned
    assert all(line.source in turned and line.outcome == "not yet" for line in on.refused)


@pytest.mark.parametrize(
    ("name", "text", "root"),
    [
        ("a.sh", "trl sft --model_name_or_path a/b --dataset_name c\n", SFTConfig),
        ("a.sh", "python examples/scripts/sft.py --model_name_or_path a/b --dataset_name c\n", SFTConfig),
        ("a.sh", "trl reward --model_name_or_path a/b --dataset_name c\n", RewardModelConfig),
        ("a.sh", "accelerate launch -m trl.scripts.rloo --model_name_or_path a/b --dataset_name c\n", SkyRLTrainConfig),
        ("a.py", "SFTTrainer('a/b', args=SFTConfig(max_length=9))\n", SFTConfig),
        ("a.py", "RewardTrainer(model='a/b', args=RewardConfig())\n", RewardModelConfig),
        ("a.sh", "trl dpo --model_name_or_path a/b --dataset_name c --loss_type sigmoid sft\n", PreferenceConfig),
        ("a.sh", "accelerate launch examples/scripts/kto.py --model_name_or_path a/b\n", PreferenceConfig),
        ("a.py", "DPOTrainer(model='a/b', ref_model=None, args=DPOConfig(beta=0.2))\n", PreferenceConfig),
        ("a.py", "KTOTrainer(model='a/b', args=KTOConfig(desirable_weight=1.5))\n", PreferenceConfig),
        ("a.py", "DistillationTrainer('a/b', teacher_model='a/t', args=DistillationConfig())\n", SkyRLTrainConfig),
        ("a.sh", "trl distillation --model_name_or_path a/b --teacher_model_name_or_path a/t\n", SkyRLTrainConfig),
        ("a.py", "GKDTrainer('a/b', teacher_model='a/t', args=GKDConfig(lmbda=0.0))\n", SFTConfig),
        ("a.yaml", "model_name_or_path: a/b\nprecompute_ref_log_probs: true\nld_alpha: 0.5\n", PreferenceConfig),
        ("a.yaml", "model_name_or_path: a/b\ndesirable_weight: 2\n", PreferenceConfig),
        ("a.yaml", "model_name_or_path: a/b\npacking: false\n", SFTConfig),
        ("a.yaml", "model_name_or_path: a/b\ncenter_rewards_coefficient: null\n", RewardModelConfig),
        ("a.yaml", "model_name_or_path: a/b\nnum_generations: 4\n", SkyRLTrainConfig),
        ("a.yaml", "model_name_or_path: a/b\nreward_clip_range: null\n", SkyRLTrainConfig),
    ],
)
def test_the_file_says_what_it_trains(name: str, text: str, root: type, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    conversion = convert_trl(str(tmp_path / name))
    assert conversion.root is root
    assert conversion.refused == ()


def test_a_kind_decides_where_the_file_does_not(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("model_name_or_path: a/b\nlearning_rate: 1e-5\ndataset_name: c\n")
    with pytest.raises(ConfigError, match="--kind grpo|rloo|sft|reward|dpo|kto"):
        convert_trl(str(file))
    assert convert_trl(str(file), kind="reward").root is RewardModelConfig
    script = tmp_path / "a.sh"
    script.write_text("trl sft --model_name_or_path a/b\n")
    with pytest.raises(ConfigError, match="starts trl sft, which trains sft, not grpo"):
        convert_trl(str(script), kind="grpo")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("AsyncGRPOConfig()\n", "asynchronous GRPO"),
        ("GRPOConfig()\nmessage = {'type': 'image', 'image': picture}\n", "rows with images"),
        ("GOLDConfig()\n", "distillation from a teacher"),
        ("PRMConfig()\n", "rewards for steps"),
        ("BCOConfig()\n", "a trainer of preferences that is not converted"),
        ("OnlineDPOConfig()\n", 'write policy_loss_type = "online_dpo"'),
    ],
)
def test_a_program_of_another_kind_is_refused_by_its_name(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        convert_trl(str(tmp_path / "a.py"))


def converted(kind: str, **keys: Any) -> Conversion:
    return convert_keys({**ROWS, **keys}, kind=kind)


def test_supervised_rows_are_counted_and_cut_as_in_trl(tmp_path: Path) -> None:
    conversion = converted(
        "sft",
        num_processes=16,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_steps=100,
        save_steps=20,
        eval_strategy="steps",
        eval_steps=10,
        warmup_ratio=0.03,
        use_peft=True,
        attn_implementation="eager",
    )
    run = loaded(conversion, tmp_path)
    assert (run.batch_size, run.micro_train_batch_size_per_gpu, run.num_steps) == (128, 2, 100)
    assert (run.placement.num_nodes, run.placement.num_gpus_per_node, run.device) == (2, 8, "cuda")
    assert (run.max_length, run.too_long, run.epoch_tail) == (1024, "truncate", "short")
    assert (run.optimizer_config.lr, run.optimizer_config.scheduler, run.num_epochs) == (2e-5, "linear", 3)
    assert (run.train_datasets, run.eval_datasets) == (("c:train",), ("c:test",))
    assert (run.ckpt_interval, run.eval_interval, run.attention) == (20, 10, "eager")
    assert (run.model.lora.rank, run.model.lora.alpha) == (16, 32)
    assert conversion.refused == ()


@pytest.mark.parametrize(
    ("keys", "learned"),
    [
        ({}, "all_tokens"),
        ({"assistant_only_loss": False}, "all_tokens"),
        ({"assistant_only_loss": True}, "all_assistant_messages"),
        ({"max_seq_length": 9, "warmup_ratio": 0.1}, "all_tokens"),  # 0.18 has no assistant_only_loss
    ],
)
def test_the_same_tokens_are_learned(keys: dict[str, Any], learned: str, tmp_path: Path) -> None:
    assert loaded(converted("sft", **keys), tmp_path).train_on_what == learned


def test_a_reward_model_leaves_long_pairs_out_as_in_trl(tmp_path: Path) -> None:
    run = loaded(converted("reward", max_length=512), tmp_path)
    assert (run.max_length, run.too_long, run.optimizer_config.lr) == (512, "skip", 1e-4)


@pytest.mark.parametrize(
    ("kind", "keys", "source", "reason"),
    [
        ("sft", {"packing": True}, "packing", "packed blocks"),
        ("sft", {"eval_packing": True}, "eval_packing", "packed blocks"),
        ("sft", {"completion_only_loss": False}, "completion_only_loss", "a loss on prompts"),
        ("sft", {"loss_type": "dft"}, "loss_type", "the loss dft"),
        ("sft", {"truncation_mode": "keep_end"}, "truncation_mode", "cutting off the beginning"),
        ("sft", {"dataset_text_field": "body"}, "dataset_text_field", "another column"),
        ("sft", {"chat_template_path": "a/b"}, "chat_template_path", "chat template of another tokenizer"),
        ("sft", {"router_aux_loss_coef": 0.01}, "router_aux_loss_coef", "load-balancing"),
        ("sft", {"dataset_kwargs": {"skip_prepare_dataset": True}}, "dataset_kwargs", "prepare rows"),
        ("sft", {"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy", "rows in the order"),
        (
            "sft",
            {"average_tokens_across_devices": False, "num_processes": 2},
            "average_tokens_across_devices",
            "each rank averages over its own tokens",
        ),
        ("dpo", {"loss_type": ["sigmoid", "mine"]}, "loss_type", "the loss mine"),
        ("dpo", {"loss_type": ["robust", "sigmoid"], "label_smoothing": 0.1}, "label_smoothing", "beside a sigmoid"),
        ("dpo", {"max_prompt_length": 128, "warmup_ratio": 0.1}, "max_prompt_length", "limits of prompt and answer"),
        ("dpo", {"generate_during_eval": True, "warmup_ratio": 0.1}, "generate_during_eval", "sampling in evaluations"),
        ("kto", {"torch_compile": True}, "torch_compile", "torch.compile"),
        ("reward", {"center_rewards_coefficient": 0.01}, "center_rewards_coefficient", "drawn towards 0"),
        ("reward", {"torch_compile": True}, "torch_compile", "torch.compile"),
        ("rloo", {"num_iterations": 2}, "num_iterations", "ratios of whole answers"),
        ("rloo", {"steps_per_generation": 4}, "steps_per_generation", "ratios of whole answers"),
        ("rloo", {"normalize_advantages": True}, "normalize_advantages", "over answers"),
        ("rloo", {"reward_clip_range": [0, 1]}, "reward_clip_range", "other than -x and x"),
        ("distillation", {}, "teacher_model_name_or_path", "a teacher that is not named"),
        ("gkd", TEACHER, "lmbda", "answers that the model samples for a share lmbda"),
        ("gkd", {**TEACHER, "lmbda": 0.0, "seq_kd": True}, "seq_kd", "answers of the teacher"),
        ("grpo", {"env": {"A": "1"}}, "env", "variables of the environment"),
        ("grpo", {"system_prompt": "a"}, "system_prompt", "a system prompt"),
        ("grpo", {"datasets": [{"path": "c", "fraction": 0.5}]}, "datasets", "fraction"),
    ],
)
def test_what_is_missing_here_is_refused_by_its_name(kind: str, keys: dict[str, Any], source: str, reason: str) -> None:
    [line] = converted(kind, **keys).refused
    assert (line.source, line.outcome) == (source, "not yet")
    assert reason in line.reason


def test_distillation_is_a_divergence_from_a_teacher_on_sampled_answers_without_rewards(tmp_path: Path) -> None:
    settings = {"beta": 0.5, "temperature": 0.7, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}
    run = loaded(converted("distillation", **TEACHER, **settings), tmp_path)
    distillation, sampling = run.trainer.algorithm.distillation, run.generator.sampling_params
    assert run.trainer.teacher.model.path == "a/t"
    assert (distillation.type, distillation.beta, distillation.task_coef) == ("loss", 0.5, 0.0)
    assert (distillation.temperature, sampling.temperature, sampling.max_generate_length) == (0.7, 0.7, 512)
    assert (run.trainer.train_batch_size, run.trainer.policy_mini_batch_size) == (32, 32)
    assert (run.generator.n_samples_per_prompt, run.trainer.algorithm.use_kl_loss) == (1, False)
    assert run.trainer.policy.optimizer_config.lr == 1e-6


def test_gkd_on_given_rows_is_fine_tuning_with_a_teacher_beside_the_model(tmp_path: Path) -> None:
    run = loaded(converted("gkd", **TEACHER, lmbda=0.0, beta=0.3, per_device_train_batch_size=4), tmp_path)
    settings = run.distillation
    assert (settings.teacher_path, settings.beta, settings.temperature, settings.task_coef) == ("a/t", 0.3, 1.0, 0.0)
    assert (run.train_on_what, run.too_long, run.batch_size) == ("last_assistant_message", "truncate", 4)


def test_dpo_keeps_its_losses_its_reference_and_trls_defaults(tmp_path: Path) -> None:
    text = (
        "args = DPOConfig(beta=0.2, loss_type=['sigmoid', 'bco_pair', 'sft'], loss_weights=[0.8, 0.2, 1.0],\n"
        "                 per_device_train_batch_size=4, gradient_accumulation_steps=8, ld_alpha=0.5)\n"
        "DPOTrainer(model='a/b', ref_model='a/sft', args=args, train_dataset=load_dataset('c', split='train'))\n"
    )
    (tmp_path / "a.py").write_text(text)
    conversion = convert_trl(str(tmp_path / "a.py"))
    run = loaded(conversion, tmp_path)
    assert (run.loss_type, run.loss_weights) == (("sigmoid", "bco_pair", "sft"), (0.8, 0.2, 1.0))
    assert (run.beta, run.ld_alpha, run.ref_model_path, run.batch_size) == (0.2, 0.5, "a/sft", 32)
    assert (run.optimizer_config.lr, run.num_epochs, run.max_length, run.too_long) == (1e-6, 3, 1024, "skip")
    assert (run.train_datasets, conversion.refused) == (("c:train",), ())
    assert any("is left out and counted" in remark for remark in conversion.remarks)


def test_weights_and_a_moving_reference_of_dpo_are_kept(tmp_path: Path) -> None:
    settings = {"use_weighting": True, "sync_ref_model": True, "ref_model_mixup_alpha": 0.3, "ref_model_sync_steps": 64}
    run = loaded(converted("dpo", **settings, warmup_ratio=0.1), tmp_path)
    assert {name: getattr(run, name) for name in settings} == settings


def test_the_likelihood_that_trl_0_18_adds_is_a_loss_of_its_own(tmp_path: Path) -> None:
    run = loaded(converted("dpo", rpo_alpha=0.5, warmup_ratio=0.1), tmp_path)
    assert (run.loss_type, run.loss_weights) == (("sigmoid", "sft"), (1.0, 0.5))


def test_label_smoothing_that_trl_ignores_stays_off(tmp_path: Path) -> None:
    assert loaded(converted("dpo", label_smoothing=0.1), tmp_path).label_smoothing == 0
    smoothed = loaded(converted("dpo", label_smoothing=0.1, loss_type=["robust"]), tmp_path)
    assert smoothed.label_smoothing == 0.1


def test_a_reference_that_the_program_makes_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("DPOTrainer('a/b', ref_model=make('a/sft'), args=DPOConfig())\n")
    [line] = convert_trl(str(tmp_path / "a.py")).refused
    assert (line.source, str(line.value)) == ("ref_model", "make('a/sft')")


def test_kto_keeps_its_weights_and_the_order_of_its_rows(tmp_path: Path) -> None:
    run = loaded(converted("kto", desirable_weight=1.33, per_device_train_batch_size=8), tmp_path)
    assert (run.loss_type, run.desirable_weight, run.undesirable_weight) == (("kto",), 1.33, 1.0)
    assert (run.batch_size, run.sampler) == (8, "sequential")
    assert loaded(converted("kto", loss_type="apo_zero_unpaired"), tmp_path).loss_type == ("apo_zero_unpaired",)


def test_rloo_is_its_estimator_with_the_divergence_in_the_reward(tmp_path: Path) -> None:
    run = loaded(converted("rloo", reward_clip_range=[-2, 2], beta=0.05), tmp_path)
    algorithm = run.trainer.algorithm
    assert (algorithm.advantage_estimator, algorithm.policy_loss_type) == ("rloo", "regular")
    assert (algorithm.use_kl_loss, algorithm.use_kl_in_reward, algorithm.kl_estimator_type) == (False, True, "k1")
    assert (algorithm.loss_reduction, algorithm.max_seq_len) == ("seq_mean_token_sum_norm", 1)
    assert (algorithm.reward_shaping.clip, run.generator.n_samples_per_prompt) == (2.0, 2)


@pytest.mark.parametrize(
    ("keys", "env_class", "weights"),
    [
        ({"reward_funcs": ["a.b", "c.d"]}, ("a:b", "c:d"), None),
        ({"reward_funcs": ["a.b", "c.d"], "reward_weights": [1.0, 0.1]}, ("a:b", "c:d"), (1.0, 0.1)),
        ({"reward_funcs": ["a.b"], "reward_weights": [2.0]}, ("a:b",), (2.0,)),
        ({"reward_funcs": ["a.b"], "reward_weights": [1.0]}, "a:b", None),
        (
            {"reward_funcs": ["accuracy", "tag_count"], "reward_weights": [1.0, 1.0]},
            ("open_r1.rewards:accuracy_reward", "open_r1.rewards:tag_count_reward"),
            (1.0, 1.0),
        ),
    ],
)
def test_rewards_keep_their_weights(keys: dict[str, Any], env_class: Any, weights: Any, tmp_path: Path) -> None:
    environment = loaded(converted("grpo", **keys), tmp_path).environment
    assert (environment.env_class, environment.reward_weights) == (env_class, weights)


@pytest.mark.parametrize("kind", ["grpo", "sft"])
@pytest.mark.parametrize(
    "keys",
    [
        {"datasets": [{"path": "a", "name": "b", "split": "dev"}, {"path": "c"}]},
        {"dataset_mixture": {"datasets": [{"id": "a", "config": "b", "split": "dev"}, {"id": "c", "weight": 1.0}]}},
    ],
)
def test_a_mixture_of_datasets_is_a_list_of_sources(kind: str, keys: dict[str, Any], tmp_path: Path) -> None:
    run = loaded(converted(kind, **keys), tmp_path)
    assert (run.data.train_data if kind == "grpo" else run.train_datasets) == ("a:b:dev", "c:train")


def test_tables_in_a_file_are_the_values_of_arguments(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "model_name_or_path: a/b\nmax_prompt_length: 9\nsystem_prompt: null\nwarmup_ratio: 0.1\n"
        "reward_funcs: [format]\n"
        "gradient_checkpointing_kwargs: {use_reentrant: false}\nlr_scheduler_type: cosine_with_min_lr\n"
        "lr_scheduler_kwargs: {min_lr_rate: 0.1}\nbenchmarks: []\ncallbacks: [push_to_hub_revision]\n"
    )
    conversion = convert_trl(str(file))
    run = loaded(conversion, tmp_path)
    assert conversion.refused == ()
    assert "TRL 0.18.0 with those of open-r1" in conversion.notice
    assert run.trainer.policy.optimizer_config.min_lr_ratio == 0.1
    assert (run.generator.sampling_params.temperature, run.trainer.algorithm.loss_reduction) == (
        1.0,
        "token_mean_legacy",
    )


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "coming-from" / "trl.md").read_text()
    program, settings = (page.partition(f"```{language}\n")[2].partition("```")[0] for language in ("python", "toml"))
    (tmp_path / "rewards.py").write_text(program)
    (tmp_path / "run.toml").write_text(settings)
    monkeypatch.chdir(tmp_path)
    run = load(["run.toml"], environ={}).config
    env = find_env(run.environment.task or "")({"solution": "4"})
    assert isinstance(env, SampleAwareEnv)
    env.init(())
    env.set_sampled(SampledAnswer(token_ids=(1, 2)))
    step = env.step("4")
    assert step.reward == pytest.approx(1 - 0.001)
    assert step.components == {"correct": 1.0, "brief": pytest.approx(-0.002)}
