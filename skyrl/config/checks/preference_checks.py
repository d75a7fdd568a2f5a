"""Checks of resolved preference runs, besides those of every supervised run."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.config.foundation.foreign_names import value_elsewhere
from skyrl.config.foundation.import_paths import is_import_path
from skyrl.config.settings.preference_root import PREFERENCE_LOSSES, PreferenceConfig
from skyrl.errors import Problem, UserError
from skyrl.tree.imports import follows, import_object
from skyrl.tree.names import nearest
from skyrl.tree.rules import join_choices


def losses_exist(run: PreferenceConfig) -> Iterator[Problem]:
    """Each loss is a known name or an import path."""
    for name in run.loss_type:
        if name in PREFERENCE_LOSSES:
            continue
        if not is_import_path(name):
            near = nearest(name, tuple(PREFERENCE_LOSSES))
            meant = f"did you mean {near}? " if near else ""
            known = f"{meant}Built in: {', '.join(PREFERENCE_LOSSES)}; your own: file.py:name or module:name"
            hint = value_elsewhere("loss_type", name) or known
            yield Problem(path="loss_type", message=f"there is no loss {name!r} here", hint=hint)
        elif follows("all"):
            try:
                import_object(name)
            except UserError as error:
                yield Problem(
                    path="loss_type", message=str(error), hint="see docs/preferences.md for a loss of your own"
                )


def losses_have_weights(run: PreferenceConfig) -> Iterator[Problem]:
    """Each loss has a weight."""
    weights = run.loss_weights
    if weights is not None and len(weights) != len(run.loss_type):
        message = f"{len(weights)} weights for {len(run.loss_type)} losses (loss_type)"
        yield Problem(path="loss_weights", message=message, hint="give each loss one, or leave them out")


def most_labels_are_right(run: PreferenceConfig) -> Iterator[Problem]:
    """Label smoothing is the share of wrong labels, and exo_pair takes its logarithm."""
    if run.label_smoothing >= 0.5:
        message = f"{run.label_smoothing} says that most pairs are labelled the wrong way round"
        yield Problem(path="label_smoothing", message=message, hint="choose a number from 0 to below 0.5")
    if "exo_pair" in run.loss_type and run.label_smoothing == 0:
        yield Problem(
            path="label_smoothing", message="0 makes the loss of exo_pair infinite", hint="its paper uses 0.001"
        )


def divergences_suit_losses(run: PreferenceConfig) -> Iterator[Problem]:
    """Losses of single log-ratios are derived from the reverse KL divergence alone."""
    named = dict(zip(run.loss_type, run.facts, strict=True))
    others = [name for name, loss in named.items() if loss.reference and not loss.divergence]
    if run.f_divergence_type != "reverse_kl" and others:
        able = ", ".join(name for name, loss in PREFERENCE_LOSSES.items() if loss.divergence)
        yield Problem(
            path="f_divergence_type",
            message=f"{join_choices(others, 'and')} {'are' if len(others) > 1 else 'is'} defined for reverse_kl only",
            hint=f"losses that take others: {able}",
        )


def losses_read_the_same_rows(run: PreferenceConfig) -> Iterator[Problem]:
    """A row is a pair or a single answer, and the KL term of kto needs answers of other rows."""
    unpaired = [name for name, facts in zip(run.loss_type, run.facts, strict=True) if facts.unpaired]
    if unpaired and len(run.loss_type) > 1:
        message = (
            f"{join_choices(unpaired, 'and')} {'are' if len(unpaired) > 1 else 'is'} for single answers with labels"
        )
        yield Problem(path="loss_type", message=message, hint=f"set it to {unpaired[0]} alone, or leave it out")
    if "kto" in run.loss_type and run.batch_size == 1:
        message = "kto pairs answers with other prompts of the batch, and a batch of 1 has no other"
        yield Problem(path="batch_size", message=message, hint="choose 2 or more, such as 32")
    if "kto" in run.loss_type and run.precompute_ref_log_probs:
        message = "kto pairs prompts with answers of other rows of the batch, which change with every epoch"
        yield Problem(path="precompute_ref_log_probs", message=message, hint="set it to false")


def sorted_batches_have_pairs(run: PreferenceConfig) -> Iterator[Problem]:
    """Losses that sort the batch compare pairs of different rows, which have no weight and no list."""
    named = zip(run.loss_type, run.facts, strict=True)
    sorting = [name for name, facts in named if facts.whole_batch]
    if sorting and run.num_answers > 2:
        message = f"{join_choices(sorting, 'and')} sort{'s' * (len(sorting) == 1)} the pairs of a batch"
        yield Problem(path="num_answers", message=message, hint="set it to 2: the best and the worst answer of a list")
    if sorting and run.use_weighting:
        message = f"{join_choices(sorting, 'and')} pair{'s' * (len(sorting) == 1)} answers of different rows"
        yield Problem(path="use_weighting", message=message, hint="set it to false, or choose another loss_type")


def references_move_or_are_stored(run: PreferenceConfig) -> Iterator[Problem]:
    """Stored log-probabilities are those of a reference that does not change."""
    if run.compares and run.sync_ref_model and run.precompute_ref_log_probs:
        message = "the reference changes while the run trains (sync_ref_model)"
        yield Problem(path="precompute_ref_log_probs", message=message, hint="set it, or sync_ref_model, to false")


def answers_are_not_truncated(run: PreferenceConfig) -> Iterator[Problem]:
    """A pair whose answers are cut is another pair."""
    if run.too_long == "truncate":
        message = "truncate would compare parts of answers"
        yield Problem(path="too_long", message=message, hint="set it to skip, which counts the pairs that are left out")


def precomputed_rows_are_loaded(run: PreferenceConfig) -> Iterator[Problem]:
    """The reference scores all rows before training, which streamed rows cannot be."""
    if run.precompute_ref_log_probs and run.streaming:
        message = "streamed rows are not known in advance"
        yield Problem(path="precompute_ref_log_probs", message=message, hint="set it to false, or streaming to false")
