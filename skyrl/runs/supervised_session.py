"""One session of a supervised run: that of any other, in the words of its own tree."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from skyrl.errors import ConfigError, SkyRLError
from skyrl.models.loading import refuse_small_vocabulary
from skyrl.runs.preflight import say
from skyrl.runs.session import RunSession

if TYPE_CHECKING:
    from skyrl.experiments.sft import SupervisedExp

_WORDS = (
    (re.compile(r"trainer\.(?:policy|critic)\.(?=optimizer_config|model|fsdp_config|deepspeed_config)"), ""),
    (re.compile(r"trainer\.resume_mode = latest"), "resume_from = latest"),
    (re.compile(r"trainer\.resume_path"), "resume_from"),
    (re.compile(r", or look at the rewards and log-probabilities of this step"), ""),
    (re.compile(r"\bthe (?:policy|critic)'s\b"), "the model's"),
    (re.compile(r"\btrainer\."), ""),
)
"""What is said of the RL tree -> of this one: sessions and learners are built from `SupervisedConfig.trainer`."""


class SupervisedSession(RunSession):
    """From the first look at the data to the last file. Single use."""

    def __init__(self, experiment: SupervisedExp) -> None:
        kin: Any = experiment
        super().__init__(kin)
        self._run_of_rows = experiment

    def run(self) -> bool:
        try:
            return super().run()
        except SkyRLError as error:
            if isinstance(error, ConfigError) or len(error.args) != 1:
                raise
            error.args = (in_its_own_words(str(error)),)
            raise

    def _look(self) -> Mapping[str, object] | None:
        """Rows and model, before anything is started."""
        experiment = self._run_of_rows
        refuse_small_vocabulary(experiment.model_path, experiment.tokenizer)
        for name, dataset in {"training": experiment.train_dataset, **experiment.eval_datasets}.items():
            tally = dataset.tally
            if tally.too_long:
                say(f"{tally.too_long} {name} rows are longer than {experiment.max_length} tokens and left out")
            if tally.cut:
                say(f"{tally.cut} {name} rows are longer than {experiment.max_length} tokens, and were cut")
            if tally.behind_other_headers:
                say(
                    f"{tally.behind_other_headers} {name} rows have no thoughts where the chat template's header of an "
                    "answer opens one: they are learned behind another header than sampling asks with (see "
                    "chat_template_kwargs, such as enable_thinking = false)"
                )
            if tally.bad_rows:
                say(f"{len(tally.bad_rows)} {name} rows are bad and left out; the first: {tally.bad_rows[0]}")
        self._look_at_ends()
        rest = len(experiment.train_dataset) % experiment.cfg.batch_size
        if rest:
            say(f"{rest} training rows do not fill a batch and are left out of each epoch")
        return None

    def _look_at_ends(self) -> None:
        """Whether whoever samples from the trained model stops where its turns end."""
        experiment = self._run_of_rows
        match experiment.train_dataset.tally.turn_end:
            case (end, None):
                say(
                    f"the chat template ends turns with the text {end!r}, which is no token: stop sampling at this text"
                )
            case (end, token) if token == experiment.turn_end:
                say(
                    f"the chat template ends turns with {end!r} (token {token}), at which the model's generation does "
                    "not stop: the exported generation_config.json gets it as one more eos_token_id"
                )

    async def _finish(self) -> None:
        """What a run leaves: the model."""
        await self._run_of_rows.export(self._folder.model)


def in_its_own_words(text: str) -> str:
    """A message about the RL tree, about this one."""
    for pattern, said in _WORDS:
        text = pattern.sub(said, text)
    return text
