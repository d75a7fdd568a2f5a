"""Reads TRL's arguments from a Python program, which is not run, from a command line, or from a YAML file, and tells
which trainer and version they are for, by those that only some trainers and versions have.

The settings are those of a trainer (`GRPOConfig`), `ModelConfig`, `ScriptArguments` and peft's `LoraConfig` by their
own names; the latter's get the names that `ModelConfig` has for them (`lora_r`). `num_processes` is that of `accelerate
launch`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import add, floordiv, mul, sub, truediv
from pathlib import Path
from typing import Any

from skyrl.interop import not_converted
from skyrl.interop.launches import RUNS, PeerPrograms, ProgramFacts, RunCommand, aside, launch_of, unconverted
from skyrl.interop.peer_trees import PeerTree, peer_trees
from skyrl.interop.systems import ProgramValue
from skyrl.interop.values import flat_file, is_script, yaml_value
from skyrl.tree.files import read_text
from skyrl.tree.python_source import parsed_program

PREFERENCES = ("dpo", "kto")
"""Trainers of preferences without a reward model."""

CONVERTED = ("grpo", "rloo", "sft", "reward", *PREFERENCES, "distillation", "gkd")
"""Trainers whose runs are converted, by the names of their commands."""

_OWN = {"gkd": {"lmbda", "seq_kd"}}
"""Trainer that has all arguments of another one -> those that tell it."""


@cache
def _trees(kind: str) -> tuple[PeerTree, ...]:
    """The trees of a trainer: open-r1's, then TRL's, oldest first."""
    return (*peer_trees("trl", f"open_r1_{kind}"), *peer_trees("trl", kind))


def trainers_with(keys: Iterable[str]) -> list[str]:
    """The trainers that know the most of these arguments: one where they tell, several where they do not."""
    written = set(keys)
    known = {
        kind: max((len(written & tree.defaults.keys()) for tree in _trees(kind)), default=0)
        for kind in CONVERTED
        if kind not in _OWN or written & _OWN[kind]
    }
    most = max(known.values())
    return [kind for kind, number in known.items() if number == most]


def kinds_with(key: str) -> list[str]:
    """The trainers that have an argument."""
    return [kind for kind in CONVERTED if any(key in tree.defaults for tree in _trees(kind))]


_VALUES: dict[tuple[str, str], dict[str, tuple[object, ...]]] = {
    ("0.18.0", "grpo"): {"loss_type": ("grpo", "bnpo", "dr_grpo"), "scale_rewards": (True, False)},
}
"""(version, trainer) -> the values that it has for an argument which has others in later versions
(trl/trainer/grpo_trainer.py:1371 of 0.18.0).
"""


def tree_of(kind: str, keys: Mapping[str, Any]) -> tuple[PeerTree, str]:
    """The tree that has the most of the arguments with their values, the newest of several, and a remark that names the
    version unless it is the newest and all versions have them alike.
    """
    trees = _trees(kind)
    known = [_number_known(tree, kind, keys) for tree in trees]
    best = max(range(len(trees)), key=lambda at: (known[at], at))
    among = {tree.version: None for tree, number in zip(trees, known, strict=True) if number == known[best]}
    versions = dict.fromkeys(tree.version for tree in trees)
    if len(among) == len(versions) > 1:
        return trees[best], ""
    recipe = " with those of open-r1" if trees[best].kind.startswith("open_r1_") else ""
    used = "its defaults were used" if len(among) == 1 else f"the defaults of {trees[best].version} were used"
    return trees[best], (
        f"The arguments are those of TRL {' or '.join(among)}{recipe}, as far as versions are known here "
        f"({', '.join(versions)}): {used}."
    )


def _number_known(tree: PeerTree, kind: str, keys: Mapping[str, Any]) -> int:
    """How many of the arguments a tree has, with the values that they have."""
    values = _VALUES.get((tree.version, kind), {})
    return sum(
        name in tree.defaults and (isinstance(value, ProgramValue) or name not in values or value in values[name])
        for name, value in {key.partition(".")[0]: value for key, value in keys.items()}.items()
    )


_PREFERENCES = 'a trainer of preferences that is not converted: write kind = "preference" (docs/preferences.md)'
_ONLINE = (
    'online preference training, which is not converted: write policy_loss_type = "online_dpo" (docs/preferences.md)'
)
_DISTILLATION = "distillation from a teacher by its arguments, which are not converted: see docs/distillation.md"
_IMAGES = "rows with images, which skyrl does not train on yet"
_OWN_PPO = "PPO with a reward model of its own, whose arguments are not converted"
_REFUSED: dict[str, str] = {
    **dict.fromkeys(("bco", "cpo", "orpo", "tpo"), _PREFERENCES),
    **dict.fromkeys(("online_dpo", "nash_md", "xpo", "mpo"), _ONLINE),
    **dict.fromkeys(("gold", "sdft", "sdpo", "ssd"), _DISTILLATION),
    "prm": "a model of rewards for steps, which skyrl does not train",
    "ppo": _OWN_PPO,
    "async_grpo": "asynchronous GRPO, whose arguments are not converted: trainer.fully_async is ours",
}
"""Trainer that is not converted -> why."""

_KINDS: dict[str, ProgramFacts] = {
    **dict.fromkeys(CONVERTED, RUNS),
    **{kind: unconverted(reason) for kind, reason in _REFUSED.items()},
}
"""Subcommand of `trl`, and name of its script -> whether its runs are converted."""

_PROGRAMS = {
    **{kind: kind for kind in CONVERTED},
    **dict.fromkeys(("gspo", "grpo_agent", "grpo_2048", "grpo_continuous_batching"), "grpo"),
    **dict.fromkeys(("sft_gemma3", "sft_gpt_oss", "sft_nemotron_3", "sft_diffusion_gemma"), "sft"),
    "sft_tiny_aya_tool_calling": "sft",
    "reward_modeling": "reward",
}
"""Script of TRL or open-r1 -> the trainer that it runs."""

_KNOWN: dict[str, ProgramFacts] = {
    **{f"trl {kind}": known for kind, known in _KINDS.items()},
    "trl vllm-serve": aside("a server, which trains nothing"),
    "trl env": aside("it only prints versions"),
    **_KINDS,
    **{f"{kind}_vlm": unconverted(_IMAGES) for kind in (*_KINDS, "gspo")},
    **dict.fromkeys(_PROGRAMS, RUNS),
    "sft_vlm_gemma3": unconverted(_IMAGES),
    "ppo.ppo_tldr": unconverted(_OWN_PPO),
}
_MARKS = {
    "num_generations", "max_completion_length", "reward_funcs", "use_vllm", "vllm_mode", "num_iterations", "epsilon",
    "epsilon_high", "importance_sampling_level", "scale_rewards", "mask_truncated_completions", "loss_type", "delta",
    "steps_per_generation", "generation_batch_size", "reward_weights", "top_entropy_quantile", "num_generations_eval",
    "max_prompt_length", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "beta", "temperature",
    "model_name_or_path", "packing", "assistant_only_loss", "completion_only_loss", "center_rewards_coefficient",
    "precompute_ref_log_probs", "f_divergence_type", "desirable_weight", "undesirable_weight", "label_smoothing",
}  # fmt: skip
"""Arguments by which a program that is not known is taken for one of TRL's."""

_CLASSES = {
    "GRPOConfig": "grpo", "RLOOConfig": "rloo", "SFTConfig": "sft", "RewardConfig": "reward", "DPOConfig": "dpo",
    "AsyncGRPOConfig": "async_grpo", "KTOConfig": "kto", "BCOConfig": "bco", "CPOConfig": "cpo", "ORPOConfig": "orpo",
    "TPOConfig": "tpo", "OnlineDPOConfig": "online_dpo", "NashMDConfig": "nash_md", "XPOConfig": "xpo",
    "GKDConfig": "gkd", "GOLDConfig": "gold", "SDFTConfig": "sdft", "SDPOConfig": "sdpo", "SSDConfig": "ssd",
    "DistillationConfig": "distillation", "PRMConfig": "prm", "PPOConfig": "ppo",
}  # fmt: skip
"""Class of a trainer's arguments -> the trainer."""

_ARGUMENTS = ("ModelConfig", "ScriptArguments", "GRPOScriptArguments", "RLOOScriptArguments")
_OF_LORA = {
    "r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save", "task_type": "lora_task_type", "use_rslora": "use_rslora",
    "use_dora": "use_dora", "exclude_modules": "lora_exclude_modules", "bias": "lora_bias",
}  # fmt: skip
_DEFAULTS_OF_LORA = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""Defaults of peft's `LoraConfig`, which differ from TRL's."""

_TRAINER = {"model": "model_name_or_path", "reward_funcs": "reward_funcs", "ref_model": "ref_model",
            "teacher_model": "teacher_model_name_or_path"}  # fmt: skip
_TRAINERS = {"GRPOTrainer": "grpo", "RLOOTrainer": "rloo", "SFTTrainer": "sft", "RewardTrainer": "reward",
             "DPOTrainer": "dpo", "KTOTrainer": "kto", "DistillationTrainer": "distillation",
             "GKDTrainer": "gkd"}  # fmt: skip
_DATASETS = {"train_dataset": "dataset_name", "eval_dataset": "eval_dataset_name"}
_LONGEST = 1_000_000
_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv, ast.FloorDiv: floordiv,
}  # fmt: skip
_IN_PROGRAM = (
    "a function of the program, which importing it would run: move it to a separate file, and set "
    "environment.env_class to FILE.py:NAME"
)


def settings_of(
    name: str, number: int | None = None, kind: str | None = None
) -> tuple[dict[str, Any], RunCommand | None, str]:
    """The settings of a file, the command of a script that gives them, and the trainer that they are for. `number`
    chooses among several commands, and `kind` is the trainer where the file does not name it. Raises `ConfigError` if
    the file cannot be read, or is for a trainer that is not converted.
    """
    if Path(name).suffix.lower() == ".py":
        settings, own = _read_program(read_text(name), name, kind)
        return settings, None, own
    if is_script(name):
        launch = launch_of(read_text(name), name, _LAUNCHER, number)
        settings = dict(_flags(launch.texts)) | _processes([*launch.before, *launch.texts])
        settings = _file_beside(settings.pop("config", None), name) | settings
        launch = launch.without(_stray(launch.words))
        own = _PROGRAMS.get(launch.program.removeprefix("trl ").rpartition(".")[2], "")
        if own and kind and own != kind:
            raise not_converted(name, f"line {launch.line} starts {launch.program}, which trains {own}, not {kind}")
        return settings, launch, own or kind or _recognised(settings, name)
    settings = flat_file(name, of="trl")
    return settings, None, kind or _recognised(settings, name)


def _recognised(settings: Mapping[str, Any], name: str) -> str:
    """The trainer that arguments are for, by those that only it has. Raises `ConfigError` if they do not tell."""
    trainers = trainers_with(key.partition(".")[0] for key in settings)
    if len(trainers) == 1 or {*trainers} <= {"grpo", "rloo"}:
        return trainers[0]  # with rloo alike: the one that most files are for, as the report says
    raise not_converted(
        name,
        f"does not say which of TRL's trainers its arguments are for ({', '.join(trainers)} have them all)",
        f"name it: --kind {'|'.join(CONVERTED)}",
    )


def _read_program(text: str, name: str, kind: str | None) -> tuple[dict[str, Any], str]:
    try:
        tree = parsed_program(text[:_LONGEST])
    except SyntaxError as error:
        raise not_converted(name, f"cannot be read as Python: {error}") from None
    known = _Constants(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    trainers = [*dict.fromkeys(_CLASSES[_called_name(call)] for call in calls if _called_name(call) in _CLASSES)]
    if not trainers:
        raise not_converted(
            name,
            "has no GRPOConfig(...), RLOOConfig(...), SFTConfig(...), RewardConfig(...), DPOConfig(...), "
            "KTOConfig(...), DistillationConfig(...) or GKDConfig(...), whose arguments would be converted",
            "for a program that parses arguments, convert the script that starts it, or its YAML file",
        )
    if len(trainers) > 1 and kind is None:
        raise not_converted(
            name, f"has arguments of several trainers ({', '.join(trainers)})", "choose one: --kind NAME"
        )
    trainer = kind or trainers[0]
    if trainer not in trainers:
        raise not_converted(name, f"has arguments of {', '.join(trainers)}, and none of {trainer}")
    if trainer not in CONVERTED:
        raise not_converted(name, f"has arguments of {trainer}: {_REFUSED[trainer]}")
    if "_vlm" in Path(name).stem or any(map(_is_image, ast.walk(tree))):
        raise not_converted(name, _IMAGES)
    settings: dict[str, Any] = {}
    for call in calls:
        if (_CLASSES | _TRAINERS).get(_called_name(call), trainer) == trainer:
            settings |= known.arguments_of(call)
    return settings, trainer


def _is_image(node: ast.AST) -> bool:
    """Whether it is a part of a message with an image: `{"type": "image", ...}`."""
    if not isinstance(node, ast.Dict):
        return False
    return any(
        isinstance(key, ast.Constant)
        and isinstance(value, ast.Constant)
        and (key.value, value.value) == ("type", "image")
        for key, value in zip(node.keys, node.values, strict=True)
    )


class _Constants:
    """Values of a program's names, as far as they are constants in it; for its arguments, the defaults."""

    def __init__(self, tree: ast.Module) -> None:
        self._values: dict[str, ast.expr] = {}
        self._functions: set[str] = set()
        self._imported: dict[str, str] = {}  # name -> where it is imported from, with dots
        self._arguments: dict[str, ast.expr] = {}  # argument of the program -> its default
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._values[name] = value
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self._values[name] = value
                case ast.FunctionDef(name=name):
                    self._functions.add(name)
                case ast.ImportFrom(module=str(module), names=names, level=0):
                    self._imported |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in names}
                case ast.Call(args=[ast.Constant(value=str(flag)), *_], keywords=keywords) if flag.startswith("--"):
                    default = [keyword.value for keyword in keywords if keyword.arg == "default"]
                    self._arguments |= {flag[2:].replace("-", "_"): item for item in default}

    def arguments_of(self, call: ast.Call) -> dict[str, Any]:
        """The settings that a call gives; none for a call of anything else."""
        name = _called_name(call)
        arguments = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        if name in _CLASSES or name in _ARGUMENTS:
            rest = {
                f"**{ast.unparse(item.value)}": ProgramValue(ast.unparse(item.value))
                for item in call.keywords
                if item.arg is None
            }
            return {key: self.value(node) for key, node in arguments.items()} | rest
        if name == "LoraConfig":
            written = {_OF_LORA.get(key, f"lora_{key}"): self.value(node) for key, node in arguments.items()}
            return {"use_peft": True} | _DEFAULTS_OF_LORA | written
        return dict(self._trainer_settings(arguments)) if name in _TRAINERS else {}

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """The value of an expression of constants; `ProgramValue` for any other."""
        match node:
            case ast.Name(id=name) if name in self._values and depth < 10:
                return self.value(self._values[name], depth + 1)
            case ast.Name(id=name) if name in self._functions:
                return ProgramValue(name, _IN_PROGRAM)
            case ast.Name(id=name) if name in self._imported:
                return self._imported[name]
            case ast.Attribute(value=ast.Name(id="args"), attr=name) if name in self._arguments and depth < 10:
                return self.value(self._arguments[name], depth + 1)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self.value(item, depth + 1) for item in items]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC and depth < 100:
                one, other = self.value(left, depth + 1), self.value(right, depth + 1)
                if isinstance(one, int | float) and isinstance(other, int | float):
                    try:
                        return _ARITHMETIC[type(op)](one, other)
                    except ArithmeticError:  # a division by 0, or a number beyond floats
                        return ProgramValue(ast.unparse(node))
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, RecursionError):
            return ProgramValue(ast.unparse(node))

    def _trainer_settings(self, arguments: Mapping[str, ast.expr]) -> Iterator[tuple[str, Any]]:
        for key, node in arguments.items():
            if key in _TRAINER:
                yield _TRAINER[key], self.value(node)
            elif key in _DATASETS:
                yield from self._dataset(key, node).items()

    def _dataset(self, key: str, node: ast.expr, depth: int = 0) -> dict[str, Any]:
        """Settings from `load_dataset("name", "configuration", split="train")`, or from a name assigned to it."""
        match node:
            case ast.Name(id=name) if name in self._values and depth < 10:
                return self._dataset(key, self._values[name], depth + 1)
            case ast.Call(args=[ast.expr() as first, *others], keywords=keywords) if (
                _called_name(node) == "load_dataset"
            ):
                words = {keyword.arg: self.value(keyword.value) for keyword in keywords}
                config = self.value(others[0]) if others else words.get("name")
                names = [item for item in (self.value(first), config, words.get("split")) if item is not None]
                if all(isinstance(alias, str) for alias in names):
                    return {_DATASETS[key]: ":".join(names)}
        return {_DATASETS[key]: ProgramValue(ast.unparse(node))}


def _called_name(call: ast.Call) -> str:
    """The last name of the called function or class: `GRPOConfig` for `trl.GRPOConfig(...)`."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_argument(word: str) -> bool:
    name = word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else ""
    return name in _MARKS


_LAUNCHER = PeerPrograms(name="TRL", programs=_KNOWN, is_setting=_is_argument, commands=("trl",))


def _stray(words: Sequence[str]) -> list[str]:
    """Words that belong to no option: before the first one, and after `--name=value`."""
    stray_words: list[str] = []
    takes_values = False
    for word in words:
        if word.startswith("--"):
            takes_values = "=" not in word
        elif not takes_values:
            stray_words.append(word)
    return stray_words


def _file_beside(config: object, script: str) -> dict[str, Any]:
    """The settings of the file that a command names with `--config`, if the file exists."""
    candidates = [Path(str(config)), Path(script).parent / str(config)]
    file = next((candidate for candidate in candidates if isinstance(config, str) and candidate.is_file()), None)
    return flat_file(str(file), of="trl") if file else {"config": config} if config else {}


def _processes(command: Sequence[str]) -> dict[str, Any]:
    """The number of processes that `accelerate launch` and the like start."""
    launcher = {"--num_processes", "--num-processes", "--nproc_per_node", "--nproc-per-node"}
    words = [part for word in command for part in (word.split("=", 1) if word.startswith("--") else [word])]
    processes = [words[at + 1] for at, word in enumerate(words[:-1]) if word in launcher]
    return {"num_processes": yaml_value(processes[0])} if processes else {}


def _flags(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Names and values of options: `--name value`, `--name a b`, `--name=value`, and `--name` alone, which is true."""
    names = [at for at, word in enumerate(words) if word.startswith("--") and len(word) > 2]
    for at, end in zip(names, [*names[1:], len(words)], strict=False):
        name, equals, text = words[at][2:].partition("=")
        values = [text] if equals else words[at + 1 : end]
        key = name.replace("-", "_")
        if key in ("num_processes", "nproc_per_node"):
            continue  # of what starts the program
        if not values and key.startswith("no_"):
            yield key.removeprefix("no_"), False
        else:
            yield key, True if not values else _typed(values[0]) if len(values) == 1 else [_typed(v) for v in values]


def _typed(text: str) -> Any:
    """The value of an argument's text; `True` and `False` are read as argparse reads them."""
    return {"True": True, "False": False, "None": None}.get(text, yaml_value(text))
