"""What is known of engines' caches, and how many samples they are given."""

from __future__ import annotations

import pytest

from benchmarks.routing import ratios
from skyrl.errors import ProcessError
from skyrl.inference.engine import EngineLoad
from skyrl.inference.pool.admission import ConcurrencyLimit, PrefixRoutes, is_overloaded
from skyrl.inference.servers.answers import load_of_metrics
from skyrl.inference.servers.server_api import ServerDeadlines
from skyrl.inference.servers.sglang_server import SGLangServer
from skyrl.inference.servers.vllm_server import VLLMServer
from skyrl.processes.answers import BadAnswer

LONG = tuple(range(64))


def test_the_longest_beginning_counts_where_it_is_half_of_the_prompt() -> None:
    known: PrefixRoutes[str] = PrefixRoutes()
    known.computed(LONG[:32], "a")
    known.computed(LONG, "b")
    assert known.engines_of(LONG) == ("b",)
    assert known.engines_of((*LONG[:32], 999, *range(20))) == ("a", "b")  # 32 of 53
    assert known.engines_of((*LONG[:32], *range(500, 533))) == ()  # 32 of 65
    assert known.engines_of(LONG[:15]) == ()  # shorter than a block
    assert known.engines_of((1, *LONG)) == ()  # the same tokens elsewhere
    known.clear()
    assert known.engines_of(LONG) == ()


def test_the_least_recently_used_beginnings_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl.inference.pool.admission.MOST_BLOCKS", 4)
    known: PrefixRoutes[str] = PrefixRoutes()
    old, new = tuple(range(32)), tuple(range(100, 132))
    known.computed(old, "a")
    known.computed(new, "b")
    known.computed(old, "a")
    known.computed(tuple(range(200, 232)), "c")
    assert (known.engines_of(old), known.engines_of(new)) == (("a",), ())


def test_an_engine_is_overloaded_beyond_a_share_of_the_mean_and_never_with_a_few_samples() -> None:
    assert [is_overloaded(samples, 0.0) for samples in (16, 17)] == [False, True]
    assert [is_overloaded(samples, 40.0) for samples in (50, 51)] == [False, True]


def test_a_lasting_queue_lowers_the_limit_by_its_length() -> None:
    limit = ConcurrencyLimit(64)
    limit.adapt(EngineLoad(waiting=20), 64)
    assert limit.value == 64  # requests that have just come wait, too
    limit.adapt(EngineLoad(waiting=24), 64)
    assert limit.value == 44
    limit.adapt(EngineLoad(waiting=0), 44)
    assert limit.value == 48  # it binds: a sixteenth of the ceiling more
    limit.adapt(EngineLoad(waiting=0), 10)
    assert limit.value == 48  # it does not bind


def test_a_full_cache_lowers_the_limit_by_a_tenth() -> None:
    limit = ConcurrencyLimit(100)
    limit.adapt(EngineLoad(waiting=0, cache_use=0.95), 100)
    assert limit.value == 100
    limit.adapt(EngineLoad(waiting=0, cache_use=0.96), 50)
    assert limit.value == 45


def test_the_limit_stays_between_floor_and_ceiling() -> None:
    limit = ConcurrencyLimit(64)
    for _ in range(20):
        limit.adapt(EngineLoad(waiting=500), 64)
    assert limit.value == limit.floor == 4
    for _ in range(20):
        limit.adapt(EngineLoad(waiting=0), 64)
    assert limit.value == 64
    assert ConcurrencyLimit(3).floor == 1


METRICS = """# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="a model"} 3.0
vllm:num_requests_waiting{engine="1",model_name="a model"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 90.0
vllm:kv_cache_usage_perc{engine="0",model_name="a model"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a model"} 0.75
sglang:num_queue_reqs 5.0
"""
VLLM = {"waiting": "vllm:num_requests_waiting", "cache_use": "vllm:kv_cache_usage_perc"}


def test_the_load_of_all_copies_is_read_from_metrics() -> None:
    assert load_of_metrics(METRICS, **VLLM) == EngineLoad(waiting=7, cache_use=0.75)
    sglang = load_of_metrics(METRICS, waiting="sglang:num_queue_reqs", cache_use="sglang:token_usage")
    assert sglang == EngineLoad(waiting=5, cache_use=None)
    assert load_of_metrics("", **VLLM) is None
    assert load_of_metrics({"no": "text"}, **VLLM) is None


@pytest.mark.parametrize("value", ["many", "NaN", "+Inf"])
def test_metrics_that_are_no_numbers_are_a_bad_answer(value: str) -> None:
    with pytest.raises(BadAnswer, match="metric"):
        load_of_metrics(f"vllm:num_requests_waiting {value}", **VLLM)


class Metrics:
    """The one route of a server that is asked for its load."""

    url = "http://a-server"

    async def get(self, path: str, *, seconds: float, attempts: int = 1) -> object:
        if path != "/metrics":
            raise ProcessError(path)
        return METRICS


async def test_servers_are_asked_for_their_metrics() -> None:
    connection = Metrics()
    for kind, waiting in ((VLLMServer, 7), (SGLangServer, 5)):
        load = await kind(connection, connection, ServerDeadlines()).load()  # type: ignore[arg-type]  # a stand-in
        assert load is not None
        assert load.waiting == waiting


def test_routing_saves_prompt_tokens_and_steps_of_simulated_engines() -> None:
    """Four engines, see `benchmarks/routing.py`: a third of the prompt tokens and a seventh of the steps."""
    left = ratios(4, 0)
    assert left["prompt_tokens"] < 0.75
    assert left["steps"] < 0.9
