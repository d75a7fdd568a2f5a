"""An `InferenceEngine` over a server that already runs elsewhere, and that others may use as well.

    GenerationRequest --> one HTTP request per sample --ServerApi--> DrawnSample --checked--> Completion

The server is not trusted: its answers are compared with the requests, the weight version of each token with the
versions that it was given, and its log-probabilities, by the canary, with the learner's. An answer that does not match
its request, or refuses it, is requested again with the same seed. An answer that takes far longer than any before it is
requested again, too, here and from another engine. A server that keeps giving such answers, or none, leaves service
with `ProcessError`. Every call ends when the server gives no sign of life.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from attrs import evolve, frozen

from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.errors import (
    ModelError,
    NonFiniteError,
    ProcessError,
    RunError,
    ServerRefusal,
    UserError,
    WeightSyncError,
)
from skyrl.inference.adapters import refuse_foreign
from skyrl.inference.draws import sample_seed
from skyrl.inference.engine import (
    Completion,
    EngineLoad,
    GenerationRequest,
    InFlight,
    completion_limit,
    empty_completions,
    refuse_adapter,
    temperature_of,
)
from skyrl.inference.gate import Gate
from skyrl.inference.servers.answers import NotFinite, OtherWeights, RequestedSample, completion
from skyrl.inference.servers.server_api import ServerApi
from skyrl.inference.vllm.model import expected_weights, model_facts, refuse_unfit
from skyrl.models.files.loading import load_tokenizer
from skyrl.processes.answers import BadAnswer
from skyrl.processes.gather_or_cancel import gather_or_cancel
from skyrl.tree import FrozenDict
from skyrl.weight_receiver.incoming_weights import Adapter, IncomingWeights

T = TypeVar("T")

ATTEMPTS = 3
"""Largest number of requests for one sample, while the answers do not match."""

FAR_LONGER = 4.0
"""A sample is asked for again if it takes this many times as long as the longest one of its server so far."""

CLOSING_SECONDS = 10.0
"""Longest time, in seconds, for which the end of a run waits for a server."""

_IMPLAUSIBLE = math.log(1e-9)
"""Log-probability of equal answers to one prompt below which they are one answer, sent twice."""

_log = logging.getLogger(__name__)


@frozen(eq=False)
class _Flight:
    """A sample that a server is drawing, and the versions of the weights that may draw it."""

    versions: set[int]


class Pulse:
    """Ends every guarded call if the server gives no sign of life. Used on one event loop."""

    def __init__(
        self,
        name: str,
        sign: Callable[[float], Awaitable[object]],
        *,
        seconds: float,
        has_started: Callable[[], bool] = lambda: True,
    ) -> None:
        """`sign` asks the server for a sign of life, within the number of seconds that it is given: `seconds`. It is
        called at intervals of a quarter of `seconds`, and counts once the server `has_started`.
        """
        self._name, self._sign, self._seconds, self._has_started = name, sign, seconds, has_started
        self._calls = 0
        self._watch: asyncio.Task[None] | None = None

    async def guard(self, call: Coroutine[Any, Any, T]) -> T:
        """The call's result. Raises `ProcessError` if the server gives no sign of life meanwhile."""
        self._calls += 1
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._watch_signs())
        watch, task = self._watch, asyncio.ensure_future(call)
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                watch.result()
            return await task
        finally:
            self._calls -= 1
            if not self._calls:
                self._watch.cancel()
                self._watch = None  # the cancelled task ends only later, and would end a call that begins meanwhile
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch_signs(self) -> None:
        while True:
            await asyncio.sleep(self._seconds / 4)
            try:
                await self._sign(self._seconds)
            except ProcessError as error:
                if not self._has_started():
                    continue
                raise ProcessError(
                    f"the inference server {self._name} gave no sign of life for {self._seconds:g} s: {error}"
                ) from error


class HttpEngine:
    """An `InferenceEngine` over one server. All calls must be made on one event loop.

    It connects at its first call, and again by `rejoin`; then it serves or is paused, until it is closed. After weights
    that the server loaded halfway it is broken, and only `close` has an effect.

    Example: `HttpEngine(VLLMServer(connection, connection, ServerDeadlines()), model_path="Qwen/Qwen3-0.6B")`
    """

    def __init__(
        self,
        server: ServerApi,
        *,
        model_path: str,
        heartbeat: float = 60.0,
        max_model_len: int | None = None,
        needed: int = 0,
        tokenizer: ChatTokenizer | None = None,
        overrides: Mapping[str, Any] = FrozenDict(),
        takes_weights: bool = True,
        served_model_name: str | None = None,
    ) -> None:
        """`heartbeat` is the number of seconds of silence, while samples are drawn, after which the server counts as
        hung. Without `takes_weights`, the server keeps its own weights, of a model that it calls `model_path` or
        `served_model_name`. `max_model_len` is in tokens; None is the length that the model supports. A smaller limit
        that the server reports takes precedence; there is a warning if it is below `needed`, the longest sequence of
        the run.
        """
        facts = model_facts(model_path, overrides=overrides)
        self._vocabulary, self._max_model_len = facts.vocabulary, max_model_len or facts.positions
        self._needed = needed
        self._names = {model_path, served_model_name}
        self._tokenizer = copy.deepcopy(tokenizer or load_tokenizer(model_path))
        self._ends = frozenset({*facts.eos_ids, self._tokenizer.eos_token_id} - {None})
        self._expected = expected_weights(model_path, overrides=overrides) if takes_weights else None
        self._server, self._heartbeat = server, heartbeat
        self._pulse = Pulse(server.url, server.check_health, seconds=heartbeat, has_started=lambda: server.has_answered)
        self._longest_sample, self._warned_of_copies = 0.0, False
        self._gate, self._connecting = Gate(), asyncio.Lock()
        self._flights: set[_Flight] = set()
        self.weight_version = 0
        """Version of the weights that the engine samples from; 0 until weights are loaded."""
        self._in_flight: InFlight = "finish"
        self._connected, self._paused, self._closed, self._broken = False, False, False, ""

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        """One completion per key, in order. Raises `RunError` for a prompt that is empty or longer than the model.

        Raises `ProcessError` if the server is silent, gone, or keeps giving answers that do not match the request.
        """
        if request.adapter is not None:
            refuse_adapter(request.adapter)
        if request.end_ids is not None or request.top_logprobs or request.prompt_top_logprobs:
            raise UserError("an inference server draws without `end_ids` and reports no likeliest tokens")
        self._refuse_if_out_of_service()
        await self._connect()
        remedy = _longer(len(request.prompt_ids) + request.sampling.max_generate_length)
        note = f" of the inference server {self._server.url}. {remedy}"
        limit = completion_limit(request, self._max_model_len or 0, note)
        if limit == 0:
            return empty_completions(request)
        async with self._gate:
            self._refuse_if_out_of_service()
            samples = [self._sample(request, index, limit) for index in range(len(request.keys))]
            completions = tuple(await gather_or_cancel(samples))
        self._warn_of_copies(request, completions)
        return completions

    async def rejoin(self) -> None:
        """Wait until a server that had failed answers again, and prepare it for the run as at its start. Raises
        `ProcessError`.
        """
        self._connected, self._paused, self.weight_version = False, False, 0
        self._gate = Gate()  # the old one may hold requests that are still being cancelled
        try:
            await self._connect()
        except UserError as error:
            raise ProcessError(str(error)) from error

    async def pause(self, in_flight: InFlight = "finish") -> None:
        """Returns when nothing is running. Requests made from now on wait for `resume`."""
        await self._connect()
        await self._gate.shut(keep=in_flight != "finish")
        # Before the call, which may fail halfway: from here on, `close` lets the server go on.
        self._paused, self._in_flight = True, in_flight
        if self._expected is not None:
            await self._call_server(self._server.pause(in_flight))

    async def resume(self) -> None:
        """Takes work again."""
        await self._connect()
        if self._expected is not None:
            await self._call_server(self._server.resume())
        self._paused = False
        self._gate.open()

    async def load_weights(self, incoming: IncomingWeights, version: int) -> bool:
        """Replaces the weights and adopts `version`; see `InferenceEngine.load_weights`.

        Names, shapes and the version that the server holds are checked before anything is sent: another client may have
        given it weights.
        """
        if not self._paused:
            raise WeightSyncError(f"weights of version {version} came before the engine was paused and idle")
        self._refuse_if_out_of_service()
        if self._expected is None:
            raise WeightSyncError(
                f"the inference server {self._server.url} keeps its own weights and takes no new ones"
            )
        if isinstance(incoming, Adapter):
            refuse_foreign(incoming, self._expected.matrices)
        else:
            refuse_unfit(self._expected, incoming)
        server_version = await self._call_server(self._server.version())
        if server_version != self.weight_version:
            raise WeightSyncError(
                f"the inference server {self._server.url} reports weights of version {server_version} at "
                f"{self._server.version_route}, and this run gave it version {self.weight_version}: does another run "
                "use it?"
            )
        if isinstance(incoming, Adapter):
            problem = await self._call_server(self._server.load_adapter(incoming, version, self._in_flight))
        else:
            loading = self._server.load_weights(incoming, version, self._expected, self._in_flight)
            problem = await self._call_server(loading)
        if problem:
            self._broken = (
                f"the inference server {self._server.url} is out of service: loading weights of version "
                f"{version} stopped halfway: {problem}"
            )
            raise WeightSyncError(self._broken)
        self.weight_version = version
        for flight in self._flights:
            flight.versions.add(version)
        _log.info("weights of version %d at %s", version, self._server.url)
        return self._server.verifies_loads and not isinstance(incoming, Adapter)

    async def add_adapter(self, name: str, adapter: Adapter) -> None:
        """Raises `UserError`: adapters of a server are given when it starts."""
        raise UserError(
            f"the inference server {self._server.url} takes no adapter {name} while it runs: use engines of the run"
        )

    async def remove_adapter(self, name: str) -> None:
        """Raises `UserError`: there are no published adapters."""
        refuse_adapter(name)

    async def current_load(self) -> EngineLoad | None:
        """The load according to the server's metrics; None if it reports none, or cannot be reached now."""
        try:
            return await self._server.load()
        except (BadAnswer, ProcessError, UserError):
            return None  # a server that failed is noticed by the requests that it has

    async def sleep(self) -> bool:
        """Frees memory of the server's GPU. Returns whether the weights were discarded."""
        return await self._call_server(self._server.sleep())

    async def wake(self) -> None:
        """Allocates the memory again."""
        await self._call_server(self._server.wake())

    async def close(self) -> None:
        """Finishes running requests, and refuses waiting and later ones. The server keeps running."""
        if self._closed:
            return
        self._closed = True
        # A paused server is resumed first: its running requests could not end otherwise, and others may use it. Only
        # then does the gate open for the waiting ones, which are refused, and shut once the running ones have ended.
        try:
            if self._paused and not self._broken:
                async with asyncio.timeout(CLOSING_SECONDS):
                    await self._server.resume()
        except (ProcessError, UserError, TimeoutError) as error:
            reason = str(error) or f"it did not answer within {CLOSING_SECONDS:g} s"
            _log.warning("the inference server %s was left paused: %s", self._server.url, reason)
        finally:
            self._gate.open()
            await self._gate.shut()
            await self._server.close()

    async def _connect(self) -> None:
        async with self._connecting:
            if self._connected or self._closed:
                return
            facts = await self._pulse.guard(self._server.connect(claim=self._expected is not None))
            if self._expected is None and not self._names & set(facts.models):
                raise UserError(
                    f"the inference server {self._server.url} serves {facts.models[-1]}, but trainer.policy.model.path "
                    "names another model: if they are the same, set generator.inference_engine.served_model_name to "
                    "the name that the server uses"
                )
            if self._expected is not None and not facts.is_versioned:
                raise UserError(
                    f"the inference server {self._server.url} takes no weights, or does not report their version at "
                    f"{self._server.version_route}: {self._server.version_remedy}, or use it with "
                    "weight_sync_backend = none, for skyrl eval and skyrl generate"
                )
            if facts.max_model_len and facts.max_model_len < self._needed:
                _log.warning(
                    "the inference server %s takes sequences of at most %d tokens, and this run has some of up to %d: "
                    "longer prompts end the run, and longer answers are cut. %s",
                    self._server.url,
                    facts.max_model_len,
                    self._needed,
                    _longer(self._needed),
                )
            known = [length for length in (facts.max_model_len, self._max_model_len) if length]
            if not known:
                raise ModelError("neither the model nor the server states a context length: set max_model_len")
            self._max_model_len, self._connected = min(known), True

    async def _sample(self, request: GenerationRequest, index: int, limit: int) -> Completion:
        flight = _Flight(set() if self._expected is None else {self.weight_version})
        self._flights.add(flight)
        requested = RequestedSample(
            request=request,
            index=index,
            limit=limit,
            vocabulary=self._vocabulary,
            ends=self._ends | set(request.sampling.stop_token_ids or ()),
            versions=flight.versions,
        )
        session = f"{sample_seed(evolve(requested.key, turn=0)) % 2**64:016x}"
        try:
            return await self._pulse.guard(self._answered(requested, session))
        finally:
            self._flights.discard(flight)

    async def _answered(self, requested: RequestedSample, session: str) -> Completion:
        """Draws the sample, and asks for it again when it takes far longer than those before it, here and elsewhere:
        the answer may be lost. The pauses double. The first answer counts; all are of one seed. A streamed answer is
        heard from its beginning again.

        Raises the error of the first request if all fail.
        """
        now, seconds = asyncio.get_running_loop().time, self._server.deadlines.call
        began, draw_elsewhere = now(), requested.request.draw_elsewhere
        patience = min(max(self._heartbeat, FAR_LONGER * self._longest_sample), seconds / 2)
        attempts: list[asyncio.Task[Completion]] = []
        try:
            while True:
                if attempts and draw_elsewhere is not None:
                    attempts.append(asyncio.ensure_future(asyncio.wait_for(draw_elsewhere(requested.index), seconds)))
                attempts.append(asyncio.create_task(self._fitting(requested, session, seconds)))
                pending, wait = set(attempts), patience if patience < seconds else None
                while pending:
                    done, pending = await asyncio.wait(pending, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                    for attempt in done:
                        if attempt.exception() is None:
                            if attempt is attempts[0]:  # only an answer that was not lost shows how long they take
                                self._longest_sample = max(self._longest_sample, now() - began)
                            return attempt.result()
                    if not done and not self._paused:
                        break
                else:
                    return attempts[0].result()
                if requested.request.on_tokens is not None:
                    await _cancelled(attempts)
                    attempts.clear()
                    began = now()
                seconds, patience = seconds - patience, 2 * patience
        finally:
            await _cancelled(attempts)

    async def _fitting(self, requested: RequestedSample, session: str, seconds: float) -> Completion:
        """Draws the sample. Raises `ProcessError` if no attempt gives an answer that matches the request,
        `NonFiniteError` if the last one has log-probabilities that are not finite, and `WeightSyncError` for tokens of
        other weights.
        """
        until = asyncio.get_running_loop().time() + seconds
        for attempt in range(1, ATTEMPTS + 1):
            left = until - asyncio.get_running_loop().time()
            try:
                drawn = await self._server.draw(requested, session, min(seconds, max(left, self._heartbeat)))
                return completion(drawn, requested, self._tokenizer)
            except OtherWeights as error:
                raise self._server.other_weights(error, self._server.route) from error
            except BadAnswer as error:
                kind = NonFiniteError if isinstance(error, NotFinite) else ProcessError
                last: RunError = kind(
                    f"the inference server {self._server.url} answers {error}, {attempt} times at {self._server.route}"
                )
            except ServerRefusal as error:
                last = ProcessError(f"{error}, {attempt} times")
        raise last

    def _warn_of_copies(self, request: GenerationRequest, completions: Sequence[Completion]) -> None:
        """Warns once if samples of one prompt are equal that are too improbable to be drawn twice."""
        sampling = request.sampling
        cut = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0 or sampling.additional_kwargs
        if cut or not temperature_of(sampling) or self._warned_of_copies:
            return
        answers = Counter((item.token_ids, item.logprobs) for item in completions if item.logprobs)
        for (_, logprobs), count in answers.items():
            if (count - 1) * sum(logprobs) + math.log(math.comb(len(completions), count)) < _IMPLAUSIBLE:
                self._warned_of_copies = True
                _log.warning(
                    "the inference server %s gave %d equal answers of %d tokens to prompt %r, which are too improbable "
                    "to be drawn so often: does it, or a proxy in front of it, answer from a cache?",
                    *(self._server.url, count, len(logprobs), request.keys[0].prompt_id),
                )
                return

    async def _call_server(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a call to a server that was connected before: one that refuses it now has failed."""
        try:
            return await self._pulse.guard(call)
        except ServerRefusal as error:
            raise ProcessError(str(error)) from error

    def _refuse_if_out_of_service(self) -> None:
        if self._closed:
            raise RunError("this inference engine was closed")
        if self._broken:
            raise WeightSyncError(self._broken)


async def _cancelled(tasks: Collection[asyncio.Task[Completion]]) -> None:
    """Cancels the tasks; returns when they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _longer(tokens: int) -> str:
    """Advice for a server whose sequences are shorter than a run's."""
    return (
        f"Start it with room for {tokens} (vLLM: --max-model-len, SGLang: --context-length, skyrl serve: "
        "trainer.max_prompt_length and generator.sampling_params.max_generate_length), or lower these two fields here"
    )
