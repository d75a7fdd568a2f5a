"""`docs/extending.md` names the files that have to be touched: here things are added to a copy, in exactly these."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest
from attrs import frozen

import skyrl.config.checks
from skyrl.config.derive import every_kind, rules, supervised_rules
from skyrl.config.loading.kinds import KINDS, RL, kind_named
from skyrl.tree.rules import Rule

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


@frozen
class Edit:
    """Code that is put before the first place where `before` stands in a file; at the end of it for an empty one."""

    file: str
    before: str
    code: str


@frozen
class Recipe:
    """What is added, and a program that fails unless it works."""

    most: int
    """Files of skyrl that may be touched."""

    edits: tuple[Edit, ...]
    proof: str


LOSS = Recipe(
    4,
    (
        Edit(
            "skyrl/algorithms/clipped_losses.py",
            "",
            '''

@attrs.frozen(kw_only=True)
class FadedLoss:
    """`"faded"`: -A w tanh((r - 1) / w)."""

    width: float

    def __call__(self, inputs: LossInputs) -> Tensor:
        ratio = importance_ratio(inputs.logprobs, inputs.old_logprobs)
        return -inputs.advantages * self.width * torch.tanh((ratio - 1) / self.width)
''',
        ),
        Edit(
            "skyrl/config/settings/losses.py",
            "@frozen\nclass OffPolicyCorrectionConfig",
            '''@frozen
class FadedConfig:
    """How far the ratio may move; read by `policy_loss_type = "faded"`."""

    width: float = field(default=0.2, validator=positive)
    """Distance from 1 at which a token's influence fades."""


''',
        ),
        Edit(
            "skyrl/config/settings/losses.py",
            '    "importance_sampling": LossFacts(',
            '    "faded": LossFacts(loss_class="clipped_losses:FadedLoss", table="faded", ratio_fields=("width",)),\n',
        ),
        Edit("skyrl/config/settings/algorithm.py", "    GMPOConfig,", "    FadedConfig,\n"),
        Edit(
            "skyrl/config/settings/algorithm.py",
            "    decoupled: DecoupledConfig",
            '    faded: FadedConfig = FadedConfig()\n    """For faded."""\n\n',
        ),
        Edit("skyrl/config/__init__.py", "    GMPOConfig,", "    FadedConfig,\n"),
        Edit("skyrl/config/__init__.py", '    "FullyAsyncConfig",', '    "FadedConfig",\n'),
    ),
    """
from skyrl.algorithms.clipped_losses import FadedLoss
from skyrl.config import FadedConfig, check, load, resolve
from skyrl.training.objective import policy_loss

chosen = load([], {"trainer.algorithm.policy_loss_type": "faded", "trainer.algorithm.faded.width": 0.5})
assert chosen.config.trainer.algorithm.faded == FadedConfig(width=0.5)
assert policy_loss(chosen.config.trainer.algorithm) == FadedLoss(width=0.5)
one_step = {"trainer.train_batch_size": 8, "trainer.policy_mini_batch_size": 8}
chosen = load([], {"trainer.algorithm.policy_loss_type": "faded", "trainer.algorithm.faded.width": 0.5, **one_step})
assert "trainer.algorithm.faded.width" in {each.path for each in check(resolve(chosen.config), chosen.origins)}
idle = load([], {"trainer.algorithm.faded.width": 0.5})
messages = [each.message for each in check(idle.config, idle.origins) if each.path == "trainer.algorithm.faded"]
assert messages == ["has no effect in this run: it acts only when the loss is faded"], messages
""",
)

ESTIMATOR = Recipe(
    3,
    (
        Edit(
            "skyrl/algorithms/advantages.py",
            "def leave_one_out(",
            '''def bare(scores: Tensor, groups: Tensor) -> Tensor:
    """The score itself."""
    return _compared(scores, groups) and scores


''',
        ),
        Edit("skyrl/config/settings/estimators.py", '    "rloo": EstimatorFacts(', '    "bare": EstimatorFacts(),\n'),
        Edit(
            "skyrl/training/advantage.py",
            "from skyrl.algorithms.estimators",
            "from skyrl.algorithms.advantages import bare\n",
        ),
        Edit(
            "skyrl/training/advantage.py",
            '        case "rloo":',
            '        case "bare":\n            return Compared(bare)\n',
        ),
    ),
    """
from skyrl.algorithms.advantages import bare
from skyrl.algorithms.estimators import Compared
from skyrl.config import check, load
from skyrl.training.advantage import Masked, advantage_estimator

run = load([], {"trainer.algorithm.advantage_estimator": "bare", "trainer.algorithm.grpo_norm_by_std": False})
assert advantage_estimator(run.config.trainer.algorithm) == Masked(estimate=Compared(bare))
assert not [each for each in check(run.config, run.origins) if each.path == "trainer.algorithm.advantage_estimator"]
""",
)

TRACKER = Recipe(
    2,
    (
        Edit(
            "skyrl/tracking/offline.py",
            "",
            '''"""Metrics of a run in a list, with the process that calls."""

import json
import os

from skyrl.tracking.services.service import Known


class Offline:
    def __init__(self, run, known):
        self.known = known
        self.file = run.folder / "listed"

    @classmethod
    def of_run(cls, run, known):
        return cls(run, known)

    def describe(self, stored):
        self.note([stored["config"]["trainer"]["seed"]])

    def rewind(self, step):
        return False

    def log(self, step, metrics):
        self.note([step, metrics])

    def table(self, table):
        pass

    def close(self):
        self.note(os.getpid())

    def note(self, what):
        with self.file.open("a") as lines:
            lines.write(json.dumps(what) + "\\n")
''',
        ),
        Edit(
            "skyrl/config/settings/trackers.py",
            '    "mlflow": TrackerFacts(',
            """    **dict.fromkeys(
        ("listed", "noted"),
        TrackerFacts(tracker_class="skyrl.tracking.offline:Offline", package="json", extra="listed"),
    ),
""",
        ),
        Edit(
            "skyrl/config/settings/trackers.py",
            "@frozen\nclass TrackersConfig",
            '''@frozen
class NotedConfig(BaseConfig):
    """Notes, read where `logger` names `noted`."""

    path: str | None = field(default=None, metadata=FREE)
    """File of the notes."""


''',
        ),
        Edit(
            "skyrl/config/settings/trackers.py",
            "    wandb: WandbConfig = ",
            '    noted: NotedConfig = NotedConfig()\n    """Notes."""\n\n',
        ),
    ),
    """
import json, os
from pathlib import Path
from skyrl.cli.results.track import track
from skyrl.config import SFTConfig, check, load, resolve
from skyrl.config.loading.stored import stored_form
from skyrl.tracking.factory import trackers_of
from skyrl.tracking.jsonlines import JsonLines

for root, path in ((None, "trainer.logger"), (SFTConfig, "logger")):
    run = resolve(load([], {path: "listed"}, root).config)
    assert not [each for each in check(run) if each.path == path]
folder = Path("run")
folder.mkdir()
run = resolve(load([], {"trainer.logger": "listed", "trainer.run_path": str(folder)}).config)
(folder / "config.json").write_text(json.dumps(stored_form(run)))
[tracker] = trackers_of(run.trainer, total_steps=3, first_step=0)
JsonLines(folder / "metrics.jsonl").append({"step": 1, "reward/avg_raw_reward": 0.5})
tracker.log(1, {"reward/avg_raw_reward": 0.5})
tracker.close()
*lines, caller = map(json.loads, (folder / "listed").read_text().splitlines())
assert lines == [[42], [1, {"reward/avg_raw_reward": 0.5}]], lines
assert caller != os.getpid()
(folder / "listed").unlink()
track([str(folder), "--to", "listed", "--new"], standalone_mode=False)
*again, caller = map(json.loads, (folder / "listed").read_text().splitlines())
assert again == lines, again
idle = load([], {"trainer.trackers.noted.path": "notes"})
messages = [each.message for each in check(idle.config, idle.origins) if each.path == "trainer.trackers.noted"]
assert messages == ["has no effect in this run: it acts only when logger names noted"], messages
""",
)

ENVIRONMENT = Recipe(
    3,
    (
        Edit(
            "skyrl/envs/builtin/echo.py",
            "",
            '''"""Rewards an answer that repeats the ground truth."""

from skyrl.envs.env import Env, EnvStep


class EchoEnv(Env):
    def __init__(self, extras, settings):
        super().__init__(extras)
        self.wanted = extras["reward_spec"]["ground_truth"] * settings.times

    def step(self, action):
        return EnvStep(reward=float(action == self.wanted), done=True)
''',
        ),
        Edit(
            "skyrl/envs/registry.py",
            "from skyrl.envs.env import Env\n",
            "from skyrl.envs.builtin.echo import EchoEnv\n",
        ),
        Edit(
            "skyrl/envs/registry.py",
            '    "multiply": lambda',
            '    "echo": lambda extras, gym: EchoEnv(extras, gym.echo),\n',
        ),
        Edit(
            "skyrl/config/settings/environment.py",
            "_CODE_FACTS = EnvironmentFacts(",
            '''@frozen
class EchoEnvConfig(BaseConfig):
    """Answers that repeat the ground truth (`env_class = "echo"`)."""

    times: int = field(default=1, validator=positive)
    """Number of repetitions."""


''',
        ),
        Edit(
            "skyrl/config/settings/environment.py",
            '    "multiply": EnvironmentFacts(',
            '    "echo": EnvironmentFacts(table="echo", single_turn=True),\n',
        ),
        Edit(
            "skyrl/config/settings/environment.py",
            "    text2sql: Text2SQLEnvConfig",
            '    echo: EchoEnvConfig = EchoEnvConfig()\n    """Settings of the environment `echo`."""\n\n',
        ),
    ),
    """
from skyrl.config import check, load
from skyrl.envs import EnvStep, find_env

GYM = "environment.skyrl_gym."
chosen = load([], {"environment.env_class": "echo", GYM + "echo.times": 2, "generator.max_turns": 3})
reported = {each.path: each.message for each in check(chosen.config, chosen.origins)}
assert "environment.env_class" not in reported and GYM + "echo" not in reported, reported
assert "takes more than one turn" in reported["generator.max_turns"]
env = find_env("echo", chosen.config.environment.skyrl_gym)({"reward_spec": {"ground_truth": "ab"}})
assert env.step("abab") == EnvStep(reward=1.0, done=True)
idle = load([], {GYM + "echo.times": 2})
messages = [each.message for each in check(idle.config, idle.origins) if each.path == GYM + "echo"]
assert messages == ["has no effect in this run: it acts only when environment.env_class is echo"], messages
""",
)

ENGINE = Recipe(
    4,
    (
        Edit(
            "skyrl/inference/servers/other_server.py",
            "",
            '''"""A server with routes of its own."""


class OtherServer:
    def __init__(self, control, deadlines):
        self.url, self.deadlines = control.url, deadlines

    @classmethod
    def of_engine(cls, config, samples, control, deadlines, workers):
        return cls(control, deadlines)
''',
        ),
        Edit("skyrl/config/settings/engines.py", ', "sglang"] = "vllm"', ', "other"'),
        Edit(
            "skyrl/config/derive/engine_backends.py",
            '    "sglang": attrs.evolve(',
            """    "other": EngineBackend(
        server_api="skyrl.inference.servers.other_server:OtherServer", is_started_by_the_run=False, transports=("disk",)
    ),
""",
        ),
    ),
    """
from skyrl.config import check, load, resolve
from skyrl.experiments.factories import server_api
from skyrl.inference.servers.server_api import ServerDeadlines

ENGINE = "generator.inference_engine."
loaded = load([], {
    "trainer.placement.executor": "ray", "trainer.placement.colocate_all": False, ENGINE + "backend": "other",
    ENGINE + "external_server_urls": ["http://127.0.0.1:7"], ENGINE + "weight_sync_backend": "disk",
    ENGINE + "enforce_eager": True, "trainer.placement.call_timeout_seconds": 7.0,
})
run = resolve(loaded.config)
reported = {each.path for each in check(run, loaded.origins)}
written = {path for path in loaded.origins if path in reported}
assert written == {ENGINE + "enforce_eager"}, (written, check(run, loaded.origins))
engine = run.generator.inference_engine
server = server_api(engine, engine.external_server_urls[0], None, ServerDeadlines(call=7.0), workers=None)
assert (type(server).__name__, server.url) == ("OtherServer", "http://127.0.0.1:7")
assert server.deadlines.call == 7.0
""",
)

KIND = Recipe(
    3,
    (
        Edit(
            "skyrl/experiments/distillation.py",
            "",
            '''"""Distillation."""


class DistillationExp:
    def __init__(self, cfg):
        self.cfg = cfg
''',
        ),
        Edit(
            "skyrl/config/loading/distillation.py",
            "",
            '''"""Distillation: fine-tuning towards what a second model answers."""

from typing import Literal

from attrs import evolve

from skyrl.config.derive.model_tables import Role, grids_of
from skyrl.config.derive.supervised_rules import MODEL
from skyrl.config.loading.supervised_kinds import SFT
from skyrl.config.settings.supervised_root import SFTConfig
from skyrl.planning.topology import Sizes
from skyrl.tree import IDENTITY, field, frozen

TEACHER = Role(
    name="teacher", path="", trainer="", placement="placement.", title="teacher", stored_as="teacher", learns=False
)
ROLES = (MODEL, TEACHER)


@frozen
class DistillationConfig(SFTConfig):
    """One run of distillation."""

    kind: Literal["distillation"] = field(default="distillation", metadata=IDENTITY)
    """Kind of run."""


DISTILLATION = evolve(
    SFT,
    name="distillation",
    root=DistillationConfig,
    experiment="skyrl.experiments.distillation:DistillationExp",
    roles=ROLES,
    sizes=lambda run: Sizes(models=grids_of(run, ROLES), colocate_all=False),
)
''',
        ),
        Edit(
            "skyrl/config/loading/kinds.py",
            '    "sft": f"',
            '    "distillation": "skyrl.config.loading.distillation:DISTILLATION",\n',
        ),
    ),
    """
from skyrl.config import compose
from skyrl.config.loading.distillation import DISTILLATION, DistillationConfig
from skyrl.config.loading.kinds import kind_of, roles_of
from skyrl.config.loading.reference import reference_section
from skyrl.planning.layout import Pool
from skyrl.planning.layout import layout

values = {"model.path": ".", "train_datasets": ["rows.jsonl"], "batch_size": 4}
gpus = {"placement.executor": "ray", "placement.num_gpus_per_node": 4}
run = compose([], {"kind": "distillation", **values, **gpus}).config
assert type(run) is DistillationConfig and kind_of(run) is DISTILLATION
assert kind_of(run).experiment_class().__name__ == "DistillationExp"
assert [role.name for role in roles_of(run)] == ["policy", "teacher"]
pools = layout(kind_of(run).sizes(run)).pools
assert pools == (Pool(name="policy+teacher", nodes=1, gpus_per_node=4),), pools
assert "one of: distillation" in reference_section(run, "kind")
""",
)

CHECK = Recipe(
    1,
    (
        Edit(
            "skyrl/config/checks/sampling.py",
            "def engine_has_sampling_arguments",
            '''def samples_are_not_hot(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Beyond temperature 3 every token is as likely as another."""
    if run.generator.sampling_params.temperature > 3:
        yield Problem(path="generator.sampling_params.temperature", message="is hot", hint="lower it")


''',
        ),
    ),
    """
from skyrl.config import check, load, resolve
from skyrl.config.loading.explain import explain

loaded = load([], {"generator.sampling_params.temperature": 4})
assert "is hot" in [each.message for each in check(loaded.config)]
found = explain("generator.sampling_params.temperature", resolve(loaded.config), loaded.origins).checks
assert "samples_are_not_hot" in [name for name, _ in found]
""",
)

RULE = Recipe(
    1,
    (
        Edit(
            "skyrl/config/derive/rules.py",
            "_OLDER_DEFAULTS: Mapping",
            '''@rule(writes="generator.max_trajectories_in_flight", reads=("generator.n_samples_per_prompt",))
def a_group_is_in_flight(run: SkyRLTrainConfig) -> int:
    """All samples of a prompt are drawn together."""
    return run.generator.n_samples_per_prompt


''',
        ),
    ),
    """
from skyrl.config import load
from skyrl.config.loading.resolve import resolve_with_origins

loaded = load([], {"generator.n_samples_per_prompt": 7})
run, origins, _ = resolve_with_origins(loaded.config, loaded.origins)
assert run.generator.max_trajectories_in_flight == 7
assert origins["generator.max_trajectories_in_flight"][-1].where == "a_group_is_in_flight"
""",
)

RECIPES = {
    "A policy loss": LOSS,
    "An advantage estimator": ESTIMATOR,
    "A tracker": TRACKER,
    "An environment": ENVIRONMENT,
    "An engine over HTTP": ENGINE,
    "A kind of run": KIND,
    "A check": CHECK,
    "A rule": RULE,
}


def files_of(section: str) -> list[str]:
    """The first column of the table of a section."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def apply(edit: Edit, folder: Path) -> None:
    file = folder / edit.file
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    assert edit.before in text, f"{edit.file} has no {edit.before!r} any more"
    at = text.index(edit.before) if edit.before else len(text)
    file.write_text(text[:at] + edit.code + text[at:], encoding="utf-8")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", RECIPES)
def test_what_the_page_lists_is_all_that_it_takes(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    shutil.copytree(ROOT / "skyrl", tmp_path / "skyrl", ignore=shutil.ignore_patterns("__pycache__"))
    for edit in recipe.edits:
        apply(edit, tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", recipe.proof],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    touched = {edit.file for edit in recipe.edits}
    assert touched == set(files_of(name)) and len(touched) <= recipe.most


def test_every_file_that_the_page_names_exists() -> None:
    added = {edit.file for recipe in RECIPES.values() for edit in recipe.edits}
    named = set(re.findall(r"`((?:skyrl|tests|property_tests|docs)/[\w/.]+)`", PAGE))
    assert len(named) > 40
    assert [file for file in sorted(named - added) if not (ROOT / file).exists()] == []


def checks_in(module: str) -> Iterator[str]:
    """Functions of a module from a run to its problems."""
    for name, value in vars(import_module(module)).items():
        if not inspect.isfunction(value) or value.__module__ != module or name.startswith("_"):
            continue
        signature = inspect.signature(value)
        if list(signature.parameters) == ["run"] and signature.return_annotation == "Iterator[Problem]":
            yield name


def test_every_check_that_is_written_is_listed() -> None:
    modules = [module.name for module in iter_modules(skyrl.config.checks.__path__, "skyrl.config.checks.")]
    written = {name for module in (*modules, "skyrl.config.checks.supervised_checks") for name in checks_in(module)}
    listed = {check.__name__ for kind in map(kind_named, KINDS) for check in kind.checks}
    assert len(written) > 60 and written - listed == set()


def test_every_rule_that_is_written_is_listed() -> None:
    values = [value for module in (rules, every_kind, supervised_rules) for value in vars(module).values()]
    written = {value.name for value in values if isinstance(value, Rule)}
    listed = {rule.name for kind in map(kind_named, KINDS) for rule in kind.rules}
    assert len(written) > 20 and written - listed == set()
    assert {rule.name for rule in RL.rules} >= {rule.name for rule in every_kind.EVERY_KIND_RULES}
