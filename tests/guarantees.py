"""What skyrl promises, and the tests that show it: `docs/guarantees.md` is made from this table and `guarantees.json`.

`pytest --record-guarantees`, as in `make test-long`, stores how many cases of each test passed, and when.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from attrs import frozen

RESULTS = Path(__file__).parent / "guarantees.json"


@frozen
class Guarantee:
    """A promise, and the tests that show it, as `file::function` below `tests/` or `property_tests/`."""

    promise: str
    tests: tuple[str, ...]


GUARANTEES = (
    Guarantee(
        "A run that is killed at any moment and started again ends bit-equal to one that was not.",
        (
            "tests/experiments/test_kills.py::test_a_run_that_is_killed_ends_like_one_that_was_not",
            "tests/experiments/test_kills.py::test_a_run_that_is_killed_at_other_moments_ends_like_one_that_was_not",
            "tests/experiments/test_kills.py::test_a_run_on_ray_that_is_killed_ends_like_one_that_was_not",
            "tests/experiments/test_supervised_kills.py::test_a_supervised_run_that_is_killed_ends_like_one_that_was_not",
            "tests/experiments/test_kills_of_kinds.py::test_a_killed_run_of_each_kind_ends_like_one_that_was_not",
            "tests/experiments/test_rare_settings.py::"
            "test_settings_that_are_seldom_used_together_run_and_go_on_after_a_kill",
        ),
    ),
    Guarantee(
        "A run that is killed while it ends gets its model, adapter and curve at the next start.",
        ("tests/experiments/test_last_files.py::test_each_product_of_a_finished_run_is_made_again",),
    ),
    Guarantee(
        "What a run wrote is durable before the checkpoint of its step; lost lines are counted, damaged ones named.",
        (
            "tests/experiments/test_last_files.py::test_what_a_run_has_written_is_durable_before_its_checkpoint",
            "tests/experiments/test_last_files.py::test_steps_that_metrics_and_samples_have_lost_are_counted_when_the_run_goes_on",
            "tests/tracking/test_damaged_files.py::test_every_reader_of_lines_survives_every_damage",
        ),
    ),
    Guarantee(
        "A command that is killed at any moment leaves its old result or its new one, never a part or a mixture.",
        (
            "tests/cli/test_killed_commands.py::test_a_killed_command_leaves_the_old_result_or_the_new_one",
            "tests/storage/test_atomic.py::test_a_killed_writer_leaves_the_old_or_the_new_and_the_next_one_cleans_up",
        ),
    ),
    Guarantee(
        "An asynchronous run that is killed trains on each prompt of an epoch once.",
        (
            "tests/experiments/test_kills.py::"
            "test_an_asynchronous_run_that_is_killed_trains_on_no_prompt_too_often_or_not_at_all",
            "property_tests/test_stream_laws.py::test_a_resumed_stream_trains_on_what_the_killed_one_did_not",
        ),
    ),
    Guarantee(
        "No group is older than the staleness bound, in any schedule; none is lost or used twice.",
        (
            "tests/experiments/test_async_runs.py::test_samples_get_as_old_as_the_bound_and_no_older",
            "property_tests/test_stream_laws.py::test_every_schedule_ends_within_its_bounds_and_nothing_is_lost_or_doubled",
            "property_tests/test_stream_laws.py::test_ten_thousand_schedules",
        ),
    ),
    Guarantee(
        "Without staleness, an asynchronous run is the synchronous one, token for token.",
        ("tests/experiments/test_async_runs.py::test_without_staleness_a_run_is_the_synchronous_one_token_for_token",),
    ),
    Guarantee(
        "Every way of ending has its exit code and leaves no process, socket, temporary file or lock.",
        (
            "tests/experiments/test_endings.py::test_a_run_ends_with_its_exit_code_and_leaves_nothing",
            "tests/experiments/test_endings.py::test_a_run_that_nobody_reads_any_more_ends_alike",
            "tests/experiments/test_endings.py::test_a_run_on_ray_ends_alike",
            "tests/cli/test_exit_codes.py::test_every_way_to_end_has_its_exit_code_and_says_why",
        ),
    ),
    Guarantee(
        "A save that is killed or refused at any operation leaves the last checkpoint or this one, whole.",
        (
            "tests/checkpoint/test_store.py::test_a_save_that_is_killed_at_any_operation_leaves_the_last_or_this_one_whole",
            "tests/checkpoint/test_store.py::"
            "test_a_save_that_the_disk_refuses_at_any_operation_says_so_and_leaves_the_last_one",
        ),
    ),
    Guarantee(
        "Every flipped bit of a checkpoint is found, and its file named.",
        ("tests/checkpoint/test_store.py::test_every_flipped_bit_is_found_and_its_file_is_named",),
    ),
    Guarantee(
        "Checkpoints, recordings and configurations of earlier releases load.",
        (
            "tests/experiments/test_stored_releases.py::test_a_run_resumes_from_a_checkpoint_of_an_earlier_release",
            "tests/experiments/test_stored_releases.py::test_a_recording_of_an_earlier_release_is_read_and_replayed",
            "tests/experiments/test_stored_releases.py::test_a_stored_configuration_of_an_earlier_release_is_read_by",
        ),
    ),
    Guarantee(
        "A recorded step that is repeated comes out bit-equal.",
        (
            "tests/experiments/test_replay.py::test_every_recorded_step_comes_out_bit_equal",
            "tests/experiments/test_replay.py::test_steps_of_two_ranks_on_ray_come_out_bit_equal",
        ),
    ),
    Guarantee(
        "Engines compute with the weights of the learner: what is missing or changed on its way is refused.",
        (
            "tests/weight_sync/test_publish.py::test_engines_agree_with_the_learner_after_every_update",
            "tests/weight_sync/test_publish.py::test_a_flipped_byte_is_refused_and_the_old_weights_serve_on",
            "tests/weight_sync/test_publish.py::test_a_missing_tensor_is_refused_and_the_old_weights_serve_on",
            "tests/weight_sync/test_canary.py::test_any_engine_that_computes_with_other_weights_is_named",
        ),
    ),
    Guarantee(
        "Losses, advantages and reductions give the results of the reference cases.",
        ("tests/algorithms/test_reference_cases.py::test_a_case_has_the_reference_result",),
    ),
    Guarantee(
        "Cutting, padding or reordering a mini-batch changes neither loss nor gradient.",
        (
            "property_tests/test_loss_laws.py::test_cutting_a_mini_batch_changes_nothing",
            "property_tests/test_loss_laws.py::test_what_stands_outside_the_mask_reaches_nothing",
            "property_tests/test_loss_laws.py::test_the_order_of_rows_does_not_matter_to_an_estimator",
        ),
    ),
    Guarantee(
        "A killed or stopped process of a run on Ray ends it with its name, within a deadline, and leaves nothing.",
        (
            "tests/experiments/test_faults.py::test_a_killed_process_ends_the_run_and_is_named",
            "tests/experiments/test_faults.py::test_a_stopped_process_ends_the_run_within_the_deadline_and_is_named",
            "tests/experiments/test_faults.py::test_a_killed_driver_leaves_nothing",
        ),
    ),
    Guarantee(
        "The death of Ray's own processes is named and the step saved; a finished run still ends with 0.",
        (
            "tests/experiments/test_faults.py::test_the_death_of_ray_itself_is_named_and_the_step_saved",
            "tests/experiments/test_endings.py::test_a_finished_run_ends_with_0_though_ray_has_died",
        ),
    ),
    Guarantee(
        "Each sandbox tier stops what SECURITY.md says; no reward is forged; right programs are rewarded.",
        (
            "tests/sandbox/test_attacks.py::test_each_tier_stops_what_the_table_says_and_nothing_else",
            "tests/sandbox/test_attacks.py::test_what_never_ends_is_ended_and_leaves_nothing_behind",
            "tests/sandbox/test_attacks.py::test_a_reward_cannot_be_forged",
            "tests/sandbox/test_sandbox.py::test_a_right_program_prints_what_it_has_to",
            "tests/sandbox/test_attacks.py::test_an_ordinary_user_has_the_same_results",
        ),
    ),
    Guarantee(
        "Answers and queries that are hostile to graders neither run nor pay.",
        (
            "tests/envs/test_hostile_answers.py::test_hostile_answers_neither_run_nor_pay",
            "tests/envs/test_hostile_answers.py::test_hostile_queries_change_nothing_and_end_in_time",
        ),
    ),
    Guarantee(
        "Secrets are in nothing that a run writes or prints.",
        ("tests/experiments/test_secrets.py::test_a_hundred_secrets_are_nowhere_in_what_a_run_leaves",),
    ),
    Guarantee(
        "A run on local files connects to nobody.",
        ("tests/experiments/test_outside_world.py::test_a_run_on_local_files_looks_up_no_name_and_connects_to_nobody",),
    ),
    Guarantee(
        "No input of the command or of a file ends in a traceback.",
        (
            "property_tests/test_config_doors.py::test_two_hundred_inputs_at_every_door_raise_nothing_but_our_own",
            "property_tests/test_config_doors.py::test_a_hundred_thousand_inputs_at_every_door_raise_nothing_but_our_own",
            "tests/data/test_bounds.py::test_files_with_bytes_changed_give_rows_or_a_sentence_with_the_path",
        ),
    ),
    Guarantee(
        "Every mistake in a configuration is reported with its line, all at once.",
        ("property_tests/test_config_mistakes.py::test_n_mistakes_are_n_problems_on_their_lines",),
    ),
    Guarantee(
        "No override of the SkyRL scripts, and no key of the AReaL files, is lost without a word.",
        (
            "tests/interop/test_skyrl.py::test_no_override_is_lost",
            "tests/interop/test_areal.py::test_every_key_of_every_file_has_a_fate_and_a_loadable_result",
        ),
    ),
)


def record(passed: Iterable[str], not_passed: Collection[str], day: str) -> None:
    """Store the number of passed cases of each test, which are node ids, under the day. A test of which a case did not
    pass is removed.
    """
    results = stored()
    counts = Counter(node.partition("[")[0] for node in passed)
    broken = {node.partition("[")[0] for node in not_passed}
    for test in {test for guarantee in GUARANTEES for test in guarantee.tests}:
        if test in broken:
            results.pop(test, None)
        elif counts[test]:
            results[test] = {"cases": counts[test], "day": day}
    RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n", encoding="utf-8")


def stored() -> dict[str, Mapping[str, object]]:
    """Results of the last recorded run of each test."""
    results: dict[str, Mapping[str, object]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return results


def page() -> str:
    """The table of docs/guarantees.md."""
    results = stored()
    lines = ["| promise | test | cases passed | day |", "|---|---|---|---|"]
    for guarantee in GUARANTEES:
        for index, test in enumerate(guarantee.tests):
            result = results.get(test, {"cases": "not recorded", "day": ""})
            promise = guarantee.promise if index == 0 else ""
            lines.append(f"| {promise} | `{test}` | {result['cases']} | {result['day']} |")
    return "\n".join(lines) + "\n"
