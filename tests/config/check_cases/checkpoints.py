"""Cases of the checks in `skyrl.config.checks.checkpoints`."""

from __future__ import annotations

from typing import Any

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "alarms_are_valid": [
        ({"trainer.alarms": [{"name": "mine"}]}, "trainer.alarms"),
        ({"trainer.alarms": [{"metric": "a"}, {"metric": "b", "name": "a"}]}, "trainer.alarms"),
    ],
    "resume_mode_matches_path": [
        ({"trainer.resume_mode": "from_path"}, "trainer.resume_path"),
        ({"trainer.resume_path": "ckpts/global_step_1"}, "trainer.resume_path"),
    ],
    "recover_mode_matches_resuming": [
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
    "best_checkpoints_need_metric": [
        ({"trainer.ckpt_keep_best": 2, "trainer.max_ckpts_to_keep": 1}, "trainer.ckpt_best_metric")
    ],
}

SILENT: dict[str, dict[str, Any]] = {
    "alarms_are_valid": {"trainer.alarms": [{"metric": "a"}, {"metric": "a", "name": "b"}, {"name": "kl_blow_up"}]},
    "resume_mode_matches_path": {"trainer.resume_mode": "from_path", "trainer.resume_path": "ckpts/global_step_1"},
    "recover_mode_matches_resuming": {"trainer.recover_mode": "disabled", "trainer.resume_mode": "none"},
    "best_checkpoints_need_metric": {
        "trainer.ckpt_keep_best": 2,
        "trainer.max_ckpts_to_keep": 1,
        "trainer.ckpt_best_metric": "eval/all/avg_score",
    },
}
