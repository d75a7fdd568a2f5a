"""Checks of models before a run starts: the folder or hub name, and the files beside the weights. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from skyrl.config import ModelConfig, SkyRLTrainConfig, SupervisedConfig
from skyrl.config.derive.engine_backends import backend_of
from skyrl.config.derive.model_tables import Role
from skyrl.config.derive.rl_models import TEACHER
from skyrl.config.derive.sizes import draws_rollouts, models_of
from skyrl.config.foundation.entry import RunConfig
from skyrl.config.loading.kinds import is_preference_run, reads_chats, roles_of
from skyrl.errors import ConfigError, Problem
from skyrl.models.files.chat_templates import configured_template
from skyrl.models.files.facts import REUSE_PROMPTS, ModelFiles, model_files
from skyrl.models.files.paths import model_failure, tokenizer_failure
from skyrl.planning.batches import uneven_heads, uneven_parts
from skyrl.tree import get_at
from skyrl.tree.access import is_written
from skyrl.tree.rules import Check


def missing_model(field: str, model: ModelConfig, tokenizer: str | None = None) -> Iterator[Problem]:
    """A folder holds a complete model, with a tokenizer unless another one is configured; a hub name exists on the hub
    or in a local copy.
    """
    path = model.path
    try:
        reason = model_failure(path, weights=not model.init_from_scratch) if path else None
    except (OSError, RuntimeError, ValueError) as error:
        reason = f"{str(path)[:80]!r} is not a path here: {error}"
    if reason:
        yield Problem(path=field, message=reason)
    elif path:
        files = model_files(path, tokenizer)
        damage = _unreadable(files) if files else None
        if damage:
            yield Problem(path=field, message=damage)


def missing_tokenizer(field: str, path: str | None) -> Iterator[Problem]:
    """A separately configured tokenizer exists in a folder or on the hub."""
    reason = tokenizer_failure(path) if path else None
    if reason:
        yield Problem(path=field, message=reason)


def models_exist(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Each model that this run loads exists."""
    tokenizer = run.trainer.tokenizer_path
    yield from missing_tokenizer("trainer.tokenizer_path", tokenizer)
    looked_at: list[tuple[str | None, bool]] = []
    for role in models_of(run):
        model: ModelConfig = getattr(run.trainer, role).model
        if (model.path, model.init_from_scratch) not in looked_at:
            looked_at.append((model.path, model.init_from_scratch))
            yield from missing_model(f"trainer.{role}.model.path", model, tokenizer)
    for path in dict.fromkeys(run.trainer.teacher.sources.values() if TEACHER.exists(run) else ()):
        if (path, False) not in looked_at:
            yield from missing_model("trainer.teacher.sources", ModelConfig(path=path), tokenizer)


def sequence_ranks_divide_heads(run: RunConfig) -> Iterator[Problem]:
    """All ranks that share sequences have the same number of attention heads of a model."""
    for role in roles_of(run):
        path, degrees = role.section(run).model.path, role.degrees(run)
        files = readable_files(path)
        sharing, cutting = degrees.sequence, degrees.tensor
        heads = files.heads // cutting if files and files.heads else None
        uneven = uneven_heads(heads, sharing, role.ranks(run) // cutting) if heads and sharing > 1 else None
        if uneven:
            yield Problem(
                path=role.at("sequence_parallel_size"),
                message=f"{sharing} ranks cannot share the {heads} attention heads "
                + (f"that each of {cutting} ranks has " if cutting > 1 else "")
                + f"of the model {path}",
                hint=f"nearest sizes that can: {' and '.join(map(str, uneven.nearest))}",
            )


def tensor_ranks_divide_matrices(run: RunConfig) -> Iterator[Problem]:
    """All ranks that cut matrices have the same number of heads and features of a model."""
    for role in roles_of(run):
        section = role.section(run)
        files, size = readable_files(section.model.path), section.tensor_parallel_size
        yield from _unequal(run, role, "tensor_parallel_size", files.sizes_to_cut if files else {}, size)


def _unequal(run: RunConfig, role: Role, field: str, parts: Mapping[str, int], size: int) -> Iterator[Problem]:
    """The problem of `size` ranks that cannot have equal parts of a model."""
    if result := uneven_parts(parts, size, role.ranks(run)):
        part, uneven = result
        path = role.section(run).model.path
        yield Problem(
            path=role.at(field),
            message=f"{size} ranks cannot share the {uneven.total} {part} of the model {path}",
            hint=f"nearest sizes that can: {' and '.join(map(str, uneven.nearest))}",
        )


def megatron_degrees_divide_model(run: RunConfig) -> Iterator[Problem]:
    """Megatron's ranks have equal numbers of heads, features and experts, and its pipeline stages of layers."""
    for role in roles_of(run):
        section = role.section(run)
        files = readable_files(section.model.path) if role.reads(run, "megatron_config") else None
        if files is None:
            continue
        config = section.megatron_config
        if files.experts is None and config.expert_model_parallel_size > 1:
            yield Problem(
                path=role.at("megatron_config.expert_model_parallel_size"),
                message=f"the model {section.model.path} has no experts that ranks could share",
                hint="set it to 1",
            )
        for name, parts in files.parts_under_megatron.items():
            size = getattr(config, f"{name}_parallel_size") or config.tensor_model_parallel_size
            yield from _unequal(run, role, f"megatron_config.{name}_parallel_size", parts, size)


def expert_ranks_divide_experts(run: RunConfig) -> Iterator[Problem]:
    """All ranks that spread experts have the same number of a layer's experts."""
    for role in roles_of(run):
        name, where = "expert_parallel_size", role.section(run).model.path
        files, size = readable_files(where), role.degrees(run).expert
        if files is None or size == 1 or name not in role.facts(run).degrees.values():
            continue
        if files.experts is None:
            message = f"the model {where} has no experts that {size} ranks could share"
            yield Problem(path=role.at(name), message=message, hint="set it to 1")
        else:
            yield from _unequal(run, role, name, {"experts": files.experts}, size)


_OF_ROUTERS = (
    "trainer.policy.router_aux_loss_coef",
    "trainer.policy.router_z_loss_coef",
    "trainer.policy.moe_enable_routing_replay",
    "generator.inference_engine.enable_return_routed_experts",
)


def router_settings_need_experts(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A model without experts has no routers."""
    model = run.trainer.policy.model.path
    files = readable_files(model)
    if files is None or files.experts is not None:
        return
    for path in _OF_ROUTERS:
        if get_at(run, path):
            message = f"the model {model} has no experts, and so no routers"
            yield Problem(path=path, message=message, hint="leave it out")


def engine_reuses_prompts(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The torch engine reuses the beginnings of prompts for a few architectures alone; prefix caching is on by default,
    so that only a value that was written is warned of.
    """
    path, engine = "generator.inference_engine.enable_prefix_caching", run.generator.inference_engine
    if not (engine.enable_prefix_caching and is_written(run, path) and backend_of(engine).is_embedded):
        return
    model = run.trainer.policy.model.path
    files = readable_files(model) if draws_rollouts(run) else None
    if files is not None and not files.reuses_prompts:
        yield Problem(
            path=path,
            message=f"has no effect: the torch engine reuses prompts of {', '.join(REUSE_PROMPTS)} without sliding "
            f"windows, and the model {model} is {files.config.get('model_type')}",
            hint="leave it out, or use another generator.inference_engine.backend",
            severity="warning",
        )


def policy_has_chat_template(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A chat template writes the prompts."""
    files = readable_files(run.trainer.policy.model.path, run.trainer.tokenizer_path)
    if files is None or not draws_rollouts(run):
        return
    try:
        template = configured_template(run.generator.chat_template)
        if template is None and files.chat_template is None:
            owner = files.tokenizer_folder
            yield Problem(
                path="trainer.policy.model.path",
                message=f"the tokenizer of {owner} has no chat template, so prompts cannot be written for it",
                hint="use the instruct version of the model, put a chat_template.jinja next to it, or set one in "
                "generator.chat_template",
            )
    except ConfigError as error:
        yield from error.problems


def answers_fit(table: Literal["sampling_params", "eval_sampling_params"]) -> Check[SkyRLTrainConfig]:
    """The check that the longest answer by this table of `generator` fits into the positions of the model."""

    def fits(run: SkyRLTrainConfig) -> Iterator[Problem]:
        files = readable_files(run.trainer.policy.model.path, run.trainer.tokenizer_path)
        if files is None or not draws_rollouts(run):
            return
        replaced = run.trainer.policy.model_config_kwargs.get("max_position_embeddings")
        positions = replaced if isinstance(replaced, int) else files.positions
        generator, settings = run.generator, get_at(run.generator, table)
        if positions is None or settings is None:
            return
        answer, room = settings.max_generate_length, f"into the {positions} positions of the model"
        if answer >= positions:
            field, message = f"generator.{table}.max_generate_length", f"{answer} tokens do not fit {room}"
            yield Problem(path=field, message=message, hint="lower it: prompt and answer share them")
        elif generator.max_turns > 1 and (generator.max_input_length or 0) + answer > positions:
            message = f"{generator.max_input_length} tokens plus max_generate_length = {answer} do not fit {room}"
            yield Problem(path="generator.max_input_length", message=message)

    return fits


def model_exists(run: SupervisedConfig) -> Iterator[Problem]:
    """The model exists, and has positions for the longest row."""
    yield from missing_tokenizer("tokenizer_path", run.tokenizer_path)
    yield from missing_model("model.path", run.model, run.tokenizer_path)
    if is_preference_run(run) and run.compares and run.ref_model_path is not None:  # its tokenizer is not read
        yield from missing_model("ref_model_path", ModelConfig(path=run.ref_model_path), run.model.path)
    if reads_chats(run) and run.distillation.teacher_path is not None:
        yield from missing_model("distillation.teacher_path", ModelConfig(path=run.distillation.teacher_path))
    files = readable_files(run.model.path, run.tokenizer_path)
    positions = files.positions if files else None
    if run.max_length is not None and positions is not None and run.max_length > positions:
        yield Problem(path="max_length", message=f"{run.max_length} tokens, but the model has {positions} positions")


def readable_files(path: str | None, tokenizer: str | None = None) -> ModelFiles | None:
    """The model's files, with those of a separate tokenizer; None if another check reports a problem with them."""
    try:
        files = model_files(path, tokenizer) if path else None
    except (OSError, RuntimeError, ValueError):
        return None
    return None if files is None or _unreadable(files) else files


def _unreadable(files: ModelFiles) -> str | None:
    """A sentence about the problem with the files beside the weights; None if they can be read."""
    parts = (
        (files.folder, "config.json", lambda: files.config),
        (files.tokenizer_folder, "tokenizer_config.json", lambda: files.special_tokens),
        (files.tokenizer_folder, "its chat template", lambda: files.chat_template),
    )
    for folder, name, read in parts:
        try:
            read()
        except (OSError, ValueError, RecursionError) as error:
            return f"{name} in {folder} is damaged ({error}): copy it again"
    if not files.has_tokenizer:
        return (
            f"the folder {files.tokenizer_folder} contains no tokenizer: copy tokenizer.json and its other files into "
            "it"
        )
    return None
