"""Checks of resolved preference runs, besides those of every supervised run."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.config.settings.preference_root import PREFERENCE_LOSSES, PreferenceConfig
from skyrl.errors import Problem
from skyrl.tree.rules import listed

HALF = 0.5


def losses_have_weights(run: PreferenceConfig) -> Iterator[Problem]:
    """Each loss has a weight."""
    weights = run.loss_weights
    if weights is not None and len(weights) != len(run.loss_type):
        message = f"{len(weights)} weights for {len(run.loss_type)} losses (loss_type)"
        yield Problem(path="loss_weights", message=message, hint="give each loss one, or leave them out")


def most_labels_are_right(run: PreferenceConfig) -> Iterator[Problem]:
    """Label smoothing is the share of wrong labels, and exo_pair takes its logarithm."""
    if run.label_smoothing >= HALF:
        message = f"{run.label_smoothing} says that most pairs are labelled the wrong way round"
        yield Problem(path="label_smoothing", message=message, hint="choose a number from 0 to below 0.5")
    if "exo_pair" in run.loss_type and run.label_smoothing == 0:
        yield Problem(
            path="label_smoothing", message="0 makes the loss of exo_pair infinite", hint="its paper uses 0.001"
        )


def divergences_suit_losses(run: PreferenceConfig) -> Iterator[Problem]:
    """Losses of single log-ratios are derived from the reverse KL divergence alone."""
    named = {name: PREFERENCE_LOSSES[name] for name in run.loss_type}
    others = [name for name, loss in named.items() if loss.reference and not loss.divergence]
    if run.f_divergence_type != "reverse_kl" and others:
        able = ", ".join(name for name, loss in PREFERENCE_LOSSES.items() if loss.divergence)
        yield Problem(
            path="f_divergence_type",
            message=f"{listed(others, 'and')} {'are' if len(others) > 1 else 'is'} defined for reverse_kl alone",
            hint=f"losses that take others: {able}",
        )


def losses_read_the_same_rows(run: PreferenceConfig) -> Iterator[Problem]:
    """A row is a pair or a single answer, and the KL term of kto needs answers of other rows."""
    alone = [name for name in run.loss_type if PREFERENCE_LOSSES[name].unpaired]
    if alone and len(run.loss_type) > 1:
        message = f"{listed(alone, 'and')} {'are' if len(alone) > 1 else 'is'} for single answers with labels"
        yield Problem(path="loss_type", message=message, hint=f"set it to {alone[0]} alone, or leave it out")
    if "kto" in run.loss_type and run.batch_size == 1:
        message = "kto compares the answers of a batch with each other's prompts, and 1 has no other"
        yield Problem(path="batch_size", message=message, hint="choose 2 or more, such as 32")
    if "kto" in run.loss_type and run.precompute_ref_log_probs:
        message = "kto pairs prompts with answers of other rows of the batch, which change with every epoch"
        yield Problem(path="precompute_ref_log_probs", message=message, hint="set it to false")


def answers_are_not_truncated(run: PreferenceConfig) -> Iterator[Problem]:
    """A pair whose answers are cut is another pair."""
    if run.too_long == "truncate":
        message = "truncate would compare parts of answers"
        yield Problem(path="too_long", message=message, hint="set it to skip, which counts the pairs that are left out")


def precomputed_rows_are_loaded(run: PreferenceConfig) -> Iterator[Problem]:
    """The reference scores all rows before training, which streamed rows cannot be."""
    if run.precompute_ref_log_probs and run.streaming:
        message = "streamed rows are not known before they are trained on"
        yield Problem(path="precompute_ref_log_probs", message=message, hint="set it to false, or streaming to false")
