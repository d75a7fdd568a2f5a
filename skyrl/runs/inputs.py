"""Checks of a run's inputs, once data and tokenizer are loaded: errors are raised, skipped rows are reported."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl.chats.contents import Blanks
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import EnvironmentConfig, SkyRLTrainConfig
from skyrl.config.derive.engine_backends import backend_of
from skyrl.config.derive.model_overrides import engine_overrides
from skyrl.config.derive.rl_models import has_reference
from skyrl.data.cursor import batches, ends_before
from skyrl.data.prompts import NO_SOURCE, PromptDataset
from skyrl.data.sources import answer_in
from skyrl.envs.mcp.environment import McpTask
from skyrl.envs.registry import ACCEPT_TIER, find_env_of_row, ignored_columns, ignored_columns_warning, sandboxed_parts
from skyrl.envs.rows import ground_truths
from skyrl.errors import DataError, ModelError, SkyRLError
from skyrl.inference.vllm.arguments import refuse_unsuitable
from skyrl.inference.vllm.model import model_facts
from skyrl.models.files.chat_templates import unread_variables
from skyrl.models.files.loading import load_tokenizer, max_positions, refuse_small_vocabulary
from skyrl.sandbox.sandbox import Sandbox, why_weaker
from skyrl.tracking.source_labels import source_labels


def check_data(run: SkyRLTrainConfig, train: PromptDataset | None, evaluation: PromptDataset | None) -> None:
    """Check that every prompt has a task, and report prompts that are left out. Raises `TaskError`. `train` is None if
    nothing is trained.
    """
    for name, dataset in (("training", train), ("evaluation", evaluation)):
        if dataset is None:
            continue
        for env_class in dataset.facts.columns:
            task = find_env_of_row(env_class, run.environment.task, run.environment.skyrl_gym)
            if isinstance(task, McpTask):
                task.offered()
        if dataset.too_long:
            notice(f"{dataset.too_long} {name} prompts are longer than trainer.max_prompt_length and left out")
        for sentence in Blanks(prompts=dataset.facts.empty).sentences(f"{name} rows"):
            notice(sentence)
        if dataset.bad_rows:
            first = "".join(f"\n  {reason}" for reason in dataset.bad_rows[:3])
            counted = f"{len(dataset.bad_rows)} {name} {'row is' if len(dataset.bad_rows) == 1 else 'rows are'}"
            notice(f"{counted} bad and left out (data.bad_rows), the first:{first}")
    if train is not None and not run.data.streaming:
        size, tail = run.trainer.train_batch_size, run.data.epoch_tail
        _, left_out = batches(len(train), size, run.trainer.epochs, tail)
        if left_out and tail == "drop":
            some = f"{len(train) % size} training prompts, others in each epoch,"
            notice(f"{some} do not fill a batch and are left out (data.epoch_tail)")
        elif left_out:
            some = f"{left_out} training prompts, the last ones of the last epoch,"
            notice(f"{some} do not fill a batch and are left out")
        epochs = "trainer.epochs", run.trainer.epochs
        if text := ends_before(run.trainer.max_training_steps, len(train), size, epochs, tail):
            notice(f"warning: trainer.max_training_steps: {text}")
    if evaluation is not None:
        _tell_the_sources(run.data.val_data, evaluation)
    _report_unread_fields(run, [item for item in (train, evaluation) if item])


def _report_unread_fields(run: SkyRLTrainConfig, datasets: Sequence[PromptDataset]) -> None:
    """Report defaults for rows that have no effect because every row has its own value."""
    env_class, column = run.environment.task, run.data.answer_column
    own = sorted({task for dataset in datasets for task in dataset.facts.columns})
    if env_class not in (*own, None, EnvironmentConfig().env_class):
        notice(f"environment.env_class = {env_class} has no effect: every row names its own ({', '.join(own)})")
    for task in own:
        columns = {name for dataset in datasets for name in dataset.facts.columns.get(task, ())}
        if names := ignored_columns(find_env_of_row(task, env_class, run.environment.skyrl_gym), columns):
            notice(ignored_columns_warning(names, task))
    prompts = (prompt for dataset in datasets for prompt in dataset.prompts)
    if column is not None and not any(_has_answer(prompt.extras, column) for prompt in prompts):
        notice(f"data.answer_column = {column} has no effect: every row has a reward_spec of its own")


def _has_answer(row: Mapping[str, Any], column: str) -> bool:
    """Whether the row's ground truth is the value of this column."""
    answer = answer_in(row, column)
    return answer is not None and ground_truths(row).get("reward_spec.ground_truth") == answer


def _tell_the_sources(files: Sequence[str], evaluation: PromptDataset) -> None:
    """Report data sources that are not evaluated under their own name, and several files without a `data_source`."""
    origins = {
        source: dict.fromkeys(files[int(number)] for number in numbers)
        for source, numbers in evaluation.facts.origins.items()
    }
    for source, label in source_labels(origins).items():
        if label != source:
            notice(f"the data_source {source!r:.80} is reported as eval/{label}")
    pooled = [*origins.get(NO_SOURCE, ())]
    if len(pooled) > 1:
        named = ", ".join(pooled[:3]) + (", ..." if len(pooled) > 3 else "")
        notice(f"rows of {named} name no data_source, and are reported together as eval/{NO_SOURCE}")


def sandbox_in_force(run: SkyRLTrainConfig, *datasets: PromptDataset | None) -> Mapping[str, object] | None:
    """Report and return the tier and limits of this run's sandbox; None if nothing runs in a sandbox.

    Raises `UserError` if the machine does not have the requested tier.
    """
    gym = run.environment.skyrl_gym
    tasks = {task for dataset in datasets if dataset is not None for task in dataset.facts.columns}
    sandboxed = sandboxed_parts(run.environment, tasks)
    if not sandboxed:
        return None
    sandbox = Sandbox(gym.sandbox_tier)
    notice(f"{', '.join(sandboxed)}: runs in sandboxes of the tier {sandbox.tier!r} (SECURITY.md)")
    if gym.sandbox_tier == "auto" and (reason := why_weaker(sandbox.tier)):
        notice(f"warning: {reason}; {ACCEPT_TIER.format(tier=sandbox.tier)}")
    return {**sandbox.record(), "environments": sandboxed}


def read_model_configs(
    run: SkyRLTrainConfig, tokenizer: ChatTokenizer, train: PromptDataset | None, evaluation: PromptDataset | None
) -> None:
    """Check that the models know every token, have positions for the longest prompt and answer, and suit the engine.

    Raises `ModelError`, `DataError`, `ConfigError`.
    """
    policy, replaced = str(run.trainer.policy.model.path), engine_overrides(run)
    paths = {policy, str(run.trainer.ref.model.path)} if has_reference(run) else {policy}
    for teacher in run.trainer.teacher.local_paths:
        refuse_other_tokens(tokenizer, load_tokenizer(teacher), policy=policy, teacher=teacher)
        paths |= {teacher}
    for path in sorted(paths):
        refuse_small_vocabulary(path, tokenizer)
    generator = run.generator
    if backend_of(generator.inference_engine).head_sizes_on_a_cpu:
        trusted = bool(generator.inference_engine.engine_init_kwargs.get("trust_remote_code", False))
        refuse_unsuitable(model_facts(policy, trust_remote_code=trusted, overrides=replaced), run.trainer.device)
    positions = max_positions(policy, replaced)
    turns = generator.max_input_length if generator.max_turns > 1 else None  # the longest input of a turn
    for dataset, sampling in ((train, generator.sampling_params), (evaluation, generator.eval_sampling_params)):
        if dataset is None or sampling is None or positions is None:
            continue
        longest = dataset.facts.longest
        if longest + sampling.max_generate_length > positions:
            raise DataError(
                f"the longest prompt ({longest} tokens) and max_generate_length = {sampling.max_generate_length} "
                f"do not fit into the {positions} positions of the model: lower max_generate_length, or leave long "
                "prompts out with trainer.max_prompt_length"
            )
        if turns is not None and turns + sampling.max_generate_length > positions:
            raise DataError(
                f"generator.max_input_length = {turns} and max_generate_length = {sampling.max_generate_length} do not "
                f"fit into the {positions} positions of the model: lower one of them"
            )


def compare_served_tokens(own: ChatTokenizer, path: str, url: str, policy: str) -> None:
    """Compare the policy's tokenizer with that of a served model of this path or name, as far as its files can be read
    here. Raises `ModelError` if they differ.
    """
    try:
        other = load_tokenizer(path)
    except SkyRLError as error:
        notice(f"warning: the tokens of the teacher at {url} cannot be compared with the policy's: {error}")
        return
    refuse_other_tokens(own, other, policy=policy, teacher=f"{path} at {url}")


def refuse_other_tokens(own: ChatTokenizer, other: ChatTokenizer, *, policy: str, teacher: str) -> None:
    """Raises `ModelError` unless two tokenizers number the same tokens alike; a teacher scores the policy's numbers."""
    owns, others = own.get_vocab(), other.get_vocab()
    differing = sorted((number, token) for token, number in owns.items() if others.get(token) != number)
    differing += sorted((number, token) for token, number in others.items() if token not in owns)
    if differing:
        number, token = differing[0]
        whose = policy if owns.get(token) == number else teacher
        raise ModelError(
            f"the teacher {teacher} has another tokenizer than the policy: {len(differing)} tokens differ, such as "
            f"{token!r}, which is number {number} of {whose} alone. Use a teacher with the tokens of {policy}"
        )


def report_unread_variables(path: str, tokenizer: ChatTokenizer, arguments: Mapping[str, Any]) -> None:
    """Report variables, configured at this dotted path, that the chat template does not read."""
    for name in unread_variables(tokenizer, arguments):
        notice(f"{path}.{name} has no effect: the chat template reads no variable of this name")


def notice(text: str) -> None:
    """Print a line about the run to standard error."""
    print(text, file=sys.stderr)
