"""Cases of the checks in `skyrl.config.checks.checkpoints`."""

from __future__ import annotations

from typing import Any

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "alarms_can_be_raised": [
        ({"trainer.alarms": [{"name": "mine"}]}, "trainer.alarms"),
        ({"trainer.alarms": [{"metric": "a"}, {"metric": "b", "name": "a"}]}, "trainer.alarms"),
    ],
    "a_resumed_run_has_a_path": [
        ({"trainer.resume_mode": "from_path"}, "trainer.resume_path"),
        ({"trainer.resume_path": "ckpts/global_step_1"}, "trainer.resume_path"),
    ],
    "recovery_and_resuming_agree": [
        (
            {
                "trainer.recover_mode": mode,
                "trainer.resume_mode": "from_path",
                "trainer.resume_path": "ckpts/global_step_1",
            },
            "trainer.recover_mode",
        )
        for mode in ("auto", "fault")
    ]
    + [({"trainer.recover_mode": "resume", "trainer.resume_mode": "none"}, "trainer.recover_mode")],
    "the_best_checkpoints_have_a_measure": [
        ({"trainer.ckpt_keep_best": 2, "trainer.max_ckpts_to_keep": 1}, "trainer.ckpt_best_metric")
    ],
}

SILENT: dict[str, dict[str, Any]] = {
    "alarms_can_be_raised": {"trainer.alarms": [{"metric": "a"}, {"metric": "a", "name": "b"}, {"name": "kl_blow_up"}]},
    "a_resumed_run_has_a_path": {"trainer.resume_mode": "from_path", "trainer.resume_path": "ckpts/global_step_1"},
    "recovery_and_resuming_agree": {"trainer.recover_mode": "disabled", "trainer.resume_mode": "none"},
    "the_best_checkpoints_have_a_measure": {
        "trainer.ckpt_keep_best": 2,
        "trainer.max_ckpts_to_keep": 1,
        "trainer.ckpt_best_metric": "eval/all/avg_score",
    },
}
