"""A taskset of verifiers 0.4 through the adapter: `python tests/envs/verifiers_live.py`, where it is installed.

Its dependencies do not fit beside vLLM's, so that the suite has a stand-in for the package (`test_verifiers.py`). This
script asks the same of the package itself.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import verifiers.v1 as vf

from skyrl.envs.verifiers_task import VerifiersTaskEnv, write_rows
from skyrl.errors import TaskError


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward
    async def short(self, task: SumData, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) <= len(task.answer))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class NeedsRuntime(Sum):
    @vf.reward
    async def ran(self, runtime: vf.Runtime) -> float:
        return 1.0


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self) -> list[Sum]:
        return [Sum(SumData(prompt=f"{n}+{n}?", system_prompt="Only the number.", answer=str(2 * n))) for n in range(3)]


def main() -> None:
    """Asserts, and prints what was scored."""
    tasks = list(Sums(vf.TasksetConfig()))
    with tempfile.TemporaryDirectory() as folder:
        write_rows(tasks, Path(folder) / "train.jsonl")
        rows = [json.loads(line) for line in (Path(folder) / "train.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2]
    for answer, reward in (("4", 3.0), ("5", 1.0), ("It is 4", 0.0)):
        env = VerifiersTaskEnv({}, tasks[2])
        messages, _ = env.init(())
        assert [message["role"] for message in messages] == ["system", "user"]
        step = env.step(answer)
        print(answer, step.reward, env.get_metrics())
        assert (step.reward, step.done, env.get_metrics()["turns"]) == (reward, True, 1.0)
    try:
        VerifiersTaskEnv({}, NeedsRuntime(tasks[0].data))
    except TaskError as error:
        print(error)
    else:
        raise AssertionError("a task that needs a runtime was taken")


if __name__ == "__main__":
    main()
