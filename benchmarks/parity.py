"""Power and false refusals of the canary for engines that only promise to have loaded their weights: one JSON line.

    make demo                                                      the quick start's model and data, once
    python benchmarks/parity.py [--steps 1000] [--sets 20] [--rows 40] [CONFIG] [PATH=VALUE ...]
    python benchmarks/parity.py --steps 30 --prompts 48 my_model.toml trainer.policy.optimizer_config.lr=1e-6

Trains CONFIG (the quick start, computed in bfloat16 as on a GPU), and after every transfer lets the engine continue the
canary's prompts. Of them, `--sets` sets of `--rows` are drawn. For each, the engine of the run is judged at every
version, which must never be refused. Beside it, an engine that stopped at a version is one that repeats its answers:
it must be refused, and no later than the right one is known to have moved. `moved` is how far the learner's
log-probabilities were by then, in nats; `noise` is how far those of the right engine always are.

`--steps 3 --sets 1` is the short form. Values are merged over CONFIG.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

from attrs import evolve, frozen
from torch import Tensor

from skyrl.config import SkyRLTrainConfig, compose
from skyrl.experiments.ppo import BasePPOExp
from skyrl.inference.engine import InferenceEngine
from skyrl.rollout.batches import Rollouts
from skyrl.runs.recorded import NoEngines
from skyrl.weight_sync.canary import Canary, ScoredSample, Verdict, Yardstick, _scored, mean
from skyrl.weight_sync.publish import WeightSync
from skyrl.weight_sync.transports import WeightSource

QUICK_START = "examples/quickstart/grpo.toml"

CHANGES = (
    "trainer.compute_dtype=bfloat16",
    "trainer.epochs=1000",
    "trainer.eval_interval=-1",
    "trainer.eval_before_train=false",
    "trainer.ckpt_interval=-1",
    "trainer.logger=console",
    "generator.inference_engine.logprob_parity_interval=1",
)

KEPT, EVERY, LONGEST = 10, 10, 100
"""An engine that stopped is looked at for the last 10 versions, and, from every tenth one, for 100."""


@frozen
class Version:
    """Answers of the right engine at one version, and the learner's later scores of the answers before it."""

    answers: tuple[ScoredSample, ...]
    rescored: Mapping[int, tuple[Tensor, ...]]
    """Version of the weights -> log-probabilities of the answers that it drew."""


def main() -> None:
    """Trains, judges, and prints what was found."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--sets", type=int, default=20)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("values", nargs="*")
    args = parser.parse_args()
    files = [value for value in args.values if "=" not in value] or [QUICK_START]
    changes = [*CHANGES, f"trainer.max_training_steps={args.steps}", *(value for value in args.values if "=" in value)]
    with tempfile.TemporaryDirectory() as folder:
        config = compose(files, [*changes, f"trainer.run_path={folder}/run"], SkyRLTrainConfig).config
        versions = trained(config, args.prompts)
    drawn, rows = random.Random(0), range(args.prompts)
    sets = [sorted(drawn.sample(rows, min(args.rows, len(rows)))) for _ in range(args.sets)]
    right, stopped = [], []
    for some in sets:
        right += list(judged(versions, some))
        stopped += list(found(versions, some))
    late = sum(stop["versions"] > stop["told"] for stop in stopped if stop["told"])
    print(
        json.dumps(
            {
                "benchmark": "parity",
                "versions": len(versions) - 1,
                "tokens": sum(len(answer.learner) for answer in versions[0].answers) * args.rows // args.prompts,
                "right_engine_judged": len(right),
                "falsely_refused": right.count(Verdict.STAYS),
                "stopped_engines": len(stopped),
                "refused": sum(stop["versions"] > 0 for stop in stopped),
                "refused_later_than_told": late,
                "called_right": sum(stop["called_right"] for stop in stopped),
                **quantiles("versions_lost", [stop["versions"] for stop in stopped if stop["versions"] > 0]),
                **quantiles("moved", [stop["moved"] for stop in stopped if stop["versions"] > 0]),
                **quantiles("noise", [mean([answer.distance for answer in version.answers]) for version in versions]),
            }
        )
    )


def quantiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median and largest."""
    return {f"{name}_median": round(median(values), 5), f"{name}_max": round(max(values), 5)} if values else {}


def trained(config: SkyRLTrainConfig, prompts: int) -> list[Version]:
    """All versions of a run."""
    versions: list[Version] = []

    class Noted(Canary):
        async def compare(
            self, source: WeightSource, engines: Mapping[int, InferenceEngine], version: int, *, promised: bool = False
        ) -> dict[str, float]:
            [engine], now = engines.values(), len(versions)
            requests = [self.request(prompt, number) for number, prompt in enumerate(self.prompts)]
            drawn = await asyncio.gather(*(engine.generate(request) for request in requests))
            pairs = [(prompt, answer) for prompt, (answer,) in zip(self.prompts, drawn, strict=True)]
            kept = [old for old in range(now) if old >= now - KEPT or (old % EVERY == 0 and old >= now - LONGEST)]
            earlier = [(answer.prompt, answer.completion) for old in kept for answer in versions[old].answers]
            scores = await _scored(source, [*pairs, *earlier])
            answers = tuple(
                ScoredSample(prompt=prompt, completion=completion, learner=scores[prompt, completion.token_ids])
                for prompt, completion in pairs
            )
            rescored = {
                old: tuple(scores[answer.prompt, answer.completion.token_ids] for answer in versions[old].answers)
                for old in kept
            }
            versions.append(Version(answers, rescored))
            return {}

    class Watched(BasePPOExp):
        def get_weight_sync(self, rollouts: Rollouts) -> WeightSync | NoEngines:
            sync = super().get_weight_sync(rollouts)
            assert isinstance(sync, WeightSync)
            own = sync._canary
            sync._canary = Noted(
                prompts=own.prompts[:prompts], temperature=own.temperature, bound=own.bound, new_tokens=own.new_tokens
            )
            return sync

    Watched(config).run()
    return versions


def yardstick(versions: Sequence[Version], number: int, rows: Sequence[int]) -> Yardstick:
    """The right engine's answers at a version."""
    return Yardstick(version=number, answers=tuple(versions[number].answers[row] for row in rows))


def judged(versions: Sequence[Version], rows: Sequence[int]) -> Iterator[Verdict]:
    """The verdict on the right engine at each version, each against the last at which it was known to be right."""
    known = 0
    for number in range(1, len(versions)):
        verdict = yardstick(versions, known, rows).verdict([versions[number].answers[row] for row in rows])
        yield verdict
        known = number if verdict is Verdict.FOLLOWS else known


def found(versions: Sequence[Version], rows: Sequence[int]) -> Iterator[dict[str, float]]:
    """For an engine that stopped at every seventh version: after how many `versions` it was refused (0: never), when
    the right one was `told` to have moved, and how far the learner had `moved`.
    """
    for stop in range(0, len(versions) - 1, 7):
        before = yardstick(versions, stop, rows)
        result = {"versions": 0, "told": 0, "moved": 0.0, "called_right": 0}
        for number in range(stop + 1, len(versions)):
            if stop not in versions[number].rescored:
                break
            rescored = [
                evolve(versions[stop].answers[row], learner=versions[number].rescored[stop][row]) for row in rows
            ]
            right = before.verdict([versions[number].answers[row] for row in rows])
            if right is Verdict.FOLLOWS and not result["told"]:
                result["told"] = number - stop
            verdict = before.verdict(rescored)
            result["called_right"] += verdict is Verdict.FOLLOWS
            if verdict is Verdict.STAYS:
                pairs = zip(rescored, before.answers, strict=True)
                moved = mean([(new.learner - old.learner).abs() for new, old in pairs])
                result |= {"versions": number - stop, "moved": moved}
                break
        yield result


if __name__ == "__main__":
    main()
