from __future__ import annotations

import doctest
from functools import partial

import pytest
import torch

from skyrl.batch import RowTensors
from skyrl.errors import NonFiniteError, ProcessError
from skyrl.processes import handles
from skyrl.processes.handles import Group, Processes
from skyrl.processes.in_process import InProcess
from tests.learners.rows import batch
from tests.processes.conftest import SharedCluster
from tests.processes.objects import Counter, Counts, Prepared, total, unmakeable

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module", params=["in process", "on Ray"])
def processes(request: pytest.FixtureRequest) -> Processes:
    if request.param == "in process":
        return InProcess()
    shared: SharedCluster = request.getfixturevalue("shared_cluster")
    return shared.processes()


@pytest.fixture(scope="module")
def counters(processes: Processes) -> Group[Counter]:
    return processes.start("counter", [partial(Counter, 5)])


@pytest.mark.long
def test_a_group_has_a_handle_with_a_name_for_each_maker(counters: Group[Counter]) -> None:
    assert [handle.name for handle in counters.handles] == ["counter-0"]


async def test_an_object_keeps_its_state_between_calls(counters: Group[Counter]) -> None:
    (before,) = await counters.call(total)
    assert await counters.call(Counter.add, 2) == [before + 2]
    assert await counters.call(Counter.add, number=3) == [before + 5]


async def test_a_coroutine_is_awaited(counters: Group[Counter]) -> None:
    (before,) = await counters.call(total)
    assert await counters.handles[0].call(Counter.add_later, 1) == before + 1


def test_the_example_of_the_documentation_runs() -> None:
    failed, examples = doctest.testmod(handles)
    assert (failed, examples) == (0, 6)


async def test_a_batch_arrives_with_what_its_rows_carry(counters: Group[Counter]) -> None:
    rows = batch(3).carrying(images=RowTensors.of([torch.ones(2, 4), torch.empty(0, 4), torch.full((1, 4), 0.5)]))
    [arrived] = await counters.deal(Counter.answer, [rows])
    assert torch.equal(arrived.input_ids, rows.input_ids)
    assert torch.equal(arrived.extras["images"].values, rows.extras["images"].values)
    assert arrived.extras["images"].counts.tolist() == [2, 0, 1]


async def test_each_rank_gets_its_share(counters: Group[Counter]) -> None:
    (before,) = await counters.call(total)
    assert await counters.deal(Counter.add, [4]) == [before + 4]


async def test_a_method_of_a_protocol_means_the_one_of_the_object(counters: Group[Counter]) -> None:
    (before,) = await counters.call(total)
    assert await counters.handles[0].call(Counts.add, 1) == before + 1


async def test_an_exception_of_ours_arrives_as_it_was(counters: Group[Counter]) -> None:
    with pytest.raises(NonFiniteError, match=r"^the loss is NaN in step 3$"):
        await counters.call(Counter.refuse)


async def test_an_object_goes_on_after_an_exception(counters: Group[Counter]) -> None:
    with pytest.raises(NonFiniteError):
        await counters.call(Counter.refuse)
    assert await counters.call(Counter.add, 0)


async def test_a_handle_with_another_deadline_is_the_same_object(counters: Group[Counter]) -> None:
    (before,) = await counters.call(total)
    assert await counters.handles[0].with_deadline(30.0).call(Counter.add, 1) == before + 1


@pytest.mark.sampled(2)
def test_what_a_maker_raises_is_raised_by_start(processes: Processes) -> None:
    with pytest.raises(NonFiniteError, match=r"^no model here$"):
        processes.start("broken", [unmakeable])


@pytest.mark.long
def test_a_start_says_what_it_waits_for(shared_cluster: SharedCluster) -> None:
    processes, waits = shared_cluster.processes(), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes.progress, "on_end", lambda span: waits.append(span.target))
        processes.start("said", [Counter])
    assert waits == ["the start of said-0", "said-0 to import packages and load what it needs"]


@pytest.mark.sampled(2)
async def test_an_object_is_made_where_its_maker_was_prepared(processes: Processes) -> None:
    processes.prepare("ahead", [partial(Prepared, 3, other=4)])
    started = processes.start("ahead", [partial(Prepared, 3, other=4)])
    assert await started.call(Prepared.look) == [None if isinstance(processes, InProcess) else (3, 4)]


@pytest.mark.sampled(2)
async def test_an_object_is_made_although_preparing_failed(processes: Processes) -> None:
    processes.prepare("late", [partial(Prepared, 3, other=-1)])
    assert await processes.start("late", [partial(Prepared, 3, other=-1)]).call(Prepared.look) == [None]


@pytest.mark.sampled(2)
def test_what_a_maker_raises_after_preparing_is_raised_by_start(processes: Processes) -> None:
    processes.prepare("early", [unmakeable])
    with pytest.raises(NonFiniteError, match=r"^no model here$"):
        processes.start("early", [unmakeable])


async def test_what_has_no_name_to_import_is_refused(counters: Group[Counter]) -> None:
    with pytest.raises(TypeError, match="methods are sent by name"):
        await counters.call(lambda counter: counter.total)


async def test_calls_are_typed(counters: Group[Counter]) -> None:
    numbers: list[int] = await counters.call(Counter.add_later, 1)  # mypy reads this file, and needs every ignore in it
    number: int = await counters.handles[0].call(Counter.add, 1)
    with pytest.raises(
        (TypeError, ProcessError), match=r"^unsupported operand|^counter-\d .* failed in Counter.add: TypeError"
    ):
        await counters.call(Counter.add, "one")  # type: ignore[call-overload]  # wrong on purpose
    assert number > numbers[0]
