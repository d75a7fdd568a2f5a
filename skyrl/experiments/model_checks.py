"""Checks of models before a run starts: the folder or hub name, and the files beside the weights. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from skyrl.config import ModelConfig, SkyRLTrainConfig, SupervisedConfig
from skyrl.config.derive.sizes import grid_of, models_of, samples
from skyrl.config.derive.supervised_model import MODEL
from skyrl.config.settings.strategies import facts_of, reads
from skyrl.errors import ConfigError, Problem
from skyrl.models.files.chat_templates import configured_template
from skyrl.models.files.facts import ModelFiles, model_files
from skyrl.models.files.paths import model_failure, tokenizer_failure
from skyrl.planning.batches import uneven_heads, uneven_parts
from skyrl.tree import get_at


def missing_model(field: str, model: ModelConfig, tokenizer: str | None = None) -> Iterator[Problem]:
    """A folder holds a complete model, with a tokenizer unless another one is configured; a hub name exists on the hub
    or in a local copy.
    """
    path = model.path
    try:
        why = model_failure(path, weights=not model.init_from_scratch) if path else None
    except (OSError, RuntimeError, ValueError) as error:
        why = f"{str(path)[:80]!r} is not a path here: {error}"
    if why:
        yield Problem(path=field, message=why)
    elif path:
        files = model_files(path, tokenizer)
        damage = _unreadable(files) if files else None
        if damage:
            yield Problem(path=field, message=damage)


def missing_tokenizer(field: str, path: str | None) -> Iterator[Problem]:
    """A separately configured tokenizer exists in a folder or on the hub."""
    why = tokenizer_failure(path) if path else None
    if why:
        yield Problem(path=field, message=why)


def models_are_where_they_are_said_to_be(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Each model that this run loads exists."""
    tokenizer = run.trainer.tokenizer_path
    yield from missing_tokenizer("trainer.tokenizer_path", tokenizer)
    looked_at: list[tuple[str | None, bool]] = []
    for role in models_of(run):
        model: ModelConfig = getattr(run.trainer, role).model
        if (model.path, model.init_from_scratch) not in looked_at:
            looked_at.append((model.path, model.init_from_scratch))
            yield from missing_model(f"trainer.{role}.model.path", model, tokenizer)


def ranks_that_share_sequences_share_their_heads(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """All ranks that share sequences have the same number of attention heads of a model."""
    for model in models_of(run):
        section = getattr(run.trainer, model)
        if "sequence" in facts_of(run.trainer).degrees:
            yield from _unshared_heads(f"trainer.{model}.", section, section.model.path, grid_of(run, model).ranks)


def ranks_that_cut_matrices_get_equal_parts(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """All ranks that cut matrices have the same number of heads and features of a model."""
    for model in models_of(run):
        section = getattr(run.trainer, model)
        yield from _unequal_parts(f"trainer.{model}.", section, section.model.path, grid_of(run, model).ranks)


class _Degrees(Protocol):
    """A section that says how many ranks share the model's rows and matrices."""

    @property
    def sequence_parallel_size(self) -> int: ...
    @property
    def tensor_parallel_size(self) -> int: ...


def _unshared_heads(prefix: str, degrees: _Degrees, path: str | None, ranks: int) -> Iterator[Problem]:
    files = readable_files(path)
    sharing, cutting = degrees.sequence_parallel_size, degrees.tensor_parallel_size
    heads = files.heads // cutting if files and files.heads else None
    uneven = uneven_heads(heads, sharing, ranks // cutting) if heads else None
    if uneven:
        yield Problem(
            path=f"{prefix}sequence_parallel_size",
            message=f"{sharing} ranks cannot share the {heads} attention heads "
            + (f"that each of {cutting} ranks has " if cutting > 1 else "")
            + f"of the model {path}",
            hint=f"nearest sizes that can: {' and '.join(map(str, uneven.nearest))}",
        )


def _unequal_parts(prefix: str, degrees: _Degrees, path: str | None, ranks: int) -> Iterator[Problem]:
    files, size = readable_files(path), degrees.tensor_parallel_size
    found = uneven_parts(files.sizes_to_cut, size, ranks) if files else None
    if found:
        what, uneven = found
        yield Problem(
            path=f"{prefix}tensor_parallel_size",
            message=f"{size} ranks cannot share the {uneven.whole} {what} of the model {path}",
            hint=f"nearest sizes that can: {' and '.join(map(str, uneven.nearest))}",
        )


def degrees_of_megatron_divide_the_model(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Megatron's ranks have equal numbers of heads, features and experts, and its pipeline stages of layers."""
    if not reads(run.trainer, "megatron_config"):
        return
    for model in models_of(run):
        section = getattr(run.trainer, model)
        files, config = readable_files(section.model.path), section.megatron_config
        if files is None:
            continue
        if files.experts is None and config.expert_model_parallel_size > 1:
            yield Problem(
                path=f"trainer.{model}.megatron_config.expert_model_parallel_size",
                message=f"the model {section.model.path} has no experts that ranks could share",
                hint="set it to 1",
            )
        for name, parts in files.parts_under_megatron.items():
            size = getattr(config, f"{name}_parallel_size") or config.tensor_model_parallel_size
            if found := uneven_parts(parts, size, grid_of(run, model).ranks):
                what, uneven = found
                yield Problem(
                    path=f"trainer.{model}.megatron_config.{name}_parallel_size",
                    message=f"{size} ranks cannot share the {uneven.whole} {what} of the model {section.model.path}",
                    hint=f"nearest sizes that can: {' and '.join(map(str, uneven.nearest))}",
                )


def ranks_that_spread_experts_get_as_many(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """All ranks that spread experts have the same number of a layer's experts."""
    for model in models_of(run):
        section = getattr(run.trainer, model)
        files, size = readable_files(section.model.path), section.expert_parallel_size
        if files is None or size == 1 or "expert_parallel_size" not in facts_of(run.trainer).degrees.values():
            continue
        path, where = f"trainer.{model}.expert_parallel_size", section.model.path
        if files.experts is None:
            message = f"the model {where} has no experts that {size} ranks could share"
            yield Problem(path=path, message=message, hint="set it to 1")
        elif found := uneven_parts({"experts": files.experts}, size, grid_of(run, model).ranks):
            _, uneven = found
            yield Problem(
                path=path,
                message=f"{size} ranks cannot share the {uneven.whole} experts of the model {where}",
                hint=f"nearest sizes that can: {' and '.join(map(str, uneven.nearest))}",
            )


_OF_ROUTERS = (
    "trainer.policy.router_aux_loss_coef",
    "trainer.policy.router_z_loss_coef",
    "trainer.policy.moe_enable_routing_replay",
    "generator.inference_engine.enable_return_routed_experts",
)


def settings_of_routers_are_for_mixtures(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A model without experts has no routers."""
    model = run.trainer.policy.model.path
    files = readable_files(model)
    if files is None or files.experts is not None:
        return
    for path in _OF_ROUTERS:
        if get_at(run, path):
            message = f"the model {model} has no experts, and so no routers"
            yield Problem(path=path, message=message, hint="leave it out")


def the_policy_can_chat(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A chat template writes the prompts, and an answer fits into the positions of the model."""
    files = readable_files(run.trainer.policy.model.path, run.trainer.tokenizer_path)
    if files is None or not samples(run):
        return
    try:
        template = configured_template(run.generator.chat_template)
        if template is None and files.chat_template is None:
            yield no_template("trainer.policy.model.path", files, "generator.chat_template")
    except ConfigError as error:
        yield from error.problems
    replaced = run.trainer.policy.model_config_kwargs.get("max_position_embeddings")
    yield from _answers_that_do_not_fit(run, replaced if isinstance(replaced, int) else files.positions)


def no_template(field: str, files: ModelFiles, setting: str) -> Problem:
    """The problem of a model without a chat template."""
    return Problem(
        path=field,
        message=f"the tokenizer of {files.tokenizer_folder} has no chat template, so prompts cannot be written for it",
        hint=f"use the instruct version of the model, put a chat_template.jinja next to it, or set one in {setting}",
    )


def _answers_that_do_not_fit(run: SkyRLTrainConfig, positions: int | None) -> Iterator[Problem]:
    answer = run.generator.sampling_params.max_generate_length
    if positions is None:
        return
    field = "generator.sampling_params.max_generate_length"
    if answer >= positions:
        message = f"{answer} tokens do not fit into the {positions} positions of the model"
        yield Problem(path=field, message=message, hint="lower it: prompt and answer share them")
    elif run.generator.max_turns > 1 and (run.generator.max_input_length or 0) + answer > positions:
        message = f"{run.generator.max_input_length} tokens plus max_generate_length = {answer} do not fit"
        yield Problem(
            path="generator.max_input_length", message=f"{message} into the {positions} positions of the model"
        )


def the_model_is_there(run: SupervisedConfig) -> Iterator[Problem]:
    """The model exists, and has positions for the longest row."""
    yield from missing_tokenizer("tokenizer_path", run.tokenizer_path)
    yield from missing_model("model.path", run.model, run.tokenizer_path)
    files = readable_files(run.model.path, run.tokenizer_path)
    positions = files.positions if files else None
    if run.max_length is not None and positions is not None and run.max_length > positions:
        yield Problem(path="max_length", message=f"{run.max_length} tokens, but the model has {positions} positions")


def ranks_share_the_model_evenly(run: SupervisedConfig) -> Iterator[Problem]:
    """All ranks that share rows or matrices have the same number of heads and features of the model."""
    ranks = MODEL.ranks(run)
    yield from _unshared_heads("", run, run.model.path, ranks)
    yield from _unequal_parts("", run, run.model.path, ranks)


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
