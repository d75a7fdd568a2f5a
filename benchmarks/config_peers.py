"""The same tree in other configuration libraries, for `benchmarks/config.py`: its source, and programs that build it.

Types that a library lacks are widened for it (a Literal is text, a union anything), which spares it work.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

import attrs

from skyrl.config import SkyRLTrainConfig
from skyrl.tree import thaw
from skyrl.tree.classes import fields_of
from skyrl.tree.types import Secret, bare, config_class, is_list, is_mapping, is_union, item_kind

OVERRIDES = (
    "trainer.device=cpu", "trainer.logger=console", "trainer.epochs=20", "trainer.train_batch_size=512",
    "trainer.policy_mini_batch_size=256", "trainer.max_prompt_length=1024", "trainer.run_name=benchmark",
    "trainer.policy.model.path=a/b", "trainer.policy.optimizer_config.lr=2e-6",
    "trainer.policy.optimizer_config.max_grad_norm=0.5", "trainer.critic.optimizer_config.weight_decay=0.2",
    "trainer.algorithm.use_kl_loss=true", "trainer.algorithm.kl_loss_coef=0.002",
    "trainer.algorithm.eps_clip_high=0.28", "trainer.ckpt_interval=20", "trainer.eval_interval=10",
    "generator.n_samples_per_prompt=8", "generator.sampling_params.temperature=0.9",
    "generator.sampling_params.max_generate_length=2048", "generator.inference_engine.backend=torch",
)  # fmt: skip

PROGRAMS = {
    "skyrl": "from skyrl.config import compose; compose([], {overrides})",
    "omegaconf": "import dataclass_tree as t; from omegaconf import OmegaConf as O\n"
    "O.to_object(O.merge(O.structured(t.SkyRLTrainConfig), O.from_dotlist({overrides})))",
    "hydra": "import dataclass_tree as t; from hydra import compose, initialize; from hydra.core.config_store import "
    "ConfigStore\nConfigStore.instance().store(name='run', node=t.SkyRLTrainConfig)\n"
    "with initialize(version_base=None): compose('run', overrides={overrides})",
    "pydantic": "import pydantic_tree as t; t.SkyRLTrainConfig.model_validate({tables})",
    "tyro": "import dataclass_tree as t, tyro; tyro.cli(t.SkyRLTrainConfig, args={flags})",
    "draccus": "import dataclass_tree as t, draccus; draccus.parse(t.SkyRLTrainConfig, args={dashed})",
}
"""Each builds the tree with the overrides; skyrl's also resolves and checks it."""


def programs() -> dict[str, str]:
    """Those whose library is installed."""
    words = [override.partition("=") for override in OVERRIDES]
    tables: dict[str, Any] = {}
    for path, _, text in words:
        *parents, name = path.split(".")
        table = tables
        for parent in parents:
            table = table.setdefault(parent, {})
        table[name] = text
    flags: list[str] = []
    for path, _, text in words:
        flag = f"--{path.replace('_', '-')}"
        flags += [flag] if text == "true" else [flag, text]
    values = {
        "overrides": list(OVERRIDES),
        "tables": tables,
        "flags": flags,
        "dashed": [f"--{override}" for override in OVERRIDES],
    }
    return {
        name: program.format(**{key: repr(value) for key, value in values.items()})
        for name, program in PROGRAMS.items()
        if importlib.util.find_spec(name)
    }


def dataclass_tree() -> str:
    """The tree in standard dataclasses."""
    lines = ["from dataclasses import dataclass, field", "from typing import Any, Dict, List, Optional", ""]
    for cls in dict.fromkeys(classes(SkyRLTrainConfig)):
        lines += ["", "@dataclass", f"class {cls.__name__}:"]
        lines += [
            f"    {name}: {simple(attribute.type)} = {default(attribute.default)}"
            for name, attribute in fields_of(cls).items()
        ]
    return "\n".join(lines) + "\n"


def pydantic_tree() -> str:
    """The tree in pydantic, frozen and refusing unknown names, as ours does."""
    lines = ["from typing import Any, Dict, List, Optional", "from pydantic import BaseModel, ConfigDict, Field", ""]
    for cls in dict.fromkeys(classes(SkyRLTrainConfig)):
        lines += ["", f"class {cls.__name__}(BaseModel):"]
        lines.append("    model_config = ConfigDict(frozen=True, extra='forbid', protected_namespaces=())")
        for name, attribute in fields_of(cls).items():
            value = default(attribute.default).replace("field(default_factory", "Field(default_factory")
            lines.append(f"    {name}: {simple(attribute.type)} = {value}")
    return "\n".join(lines) + "\n"


def classes(cls: type[Any]) -> Iterator[type[Any]]:
    """Those that a class is made of, before itself."""
    for attribute in fields_of(cls).values():
        nested = config_class(attribute.type) or config_class(item_kind(attribute.type))
        if nested is not None:
            yield from classes(nested)
    yield cls


def simple(kind: Any) -> str:
    """A type that every library has."""
    nested, kind = config_class(kind), bare(kind)
    if nested is not None:
        return f"Optional[{nested.__name__}]" if is_union(kind) else nested.__name__
    if get_origin(kind) is Literal:
        return "str" if all(isinstance(argument, str) for argument in get_args(kind)) else "Any"
    if is_union(kind):
        arms = [arm for arm in get_args(kind) if arm is not type(None)]
        inner = simple(arms[0]) if len(arms) == 1 else "Any"
        return inner if inner == "Any" or len(arms) == len(get_args(kind)) else f"Optional[{inner}]"
    if is_list(kind):
        return f"List[{simple(get_args(kind)[0])}]"
    if kind is Secret:
        return "str"
    return "Dict[str, Any]" if is_mapping(kind) else str(kind.__name__)


def default(value: Any) -> str:
    """A default; what can be changed is made by a factory."""
    if isinstance(value, Mapping | tuple | list):
        return f"field(default_factory=lambda: {thaw(value)!r})"
    if attrs.has(type(value)):
        plain = type(value)()
        changed = [name for name in fields_of(type(value)) if getattr(value, name) != getattr(plain, name)]
        inside = ", ".join(f"{name}={_inner(getattr(value, name))}" for name in changed)
        return f"field(default_factory=lambda: {type(value).__name__}({inside}))"
    return repr(value)


def _inner(value: Any) -> str:
    text = default(value)
    return text.removeprefix("field(default_factory=lambda: ")[:-1] if text.startswith("field(") else text
