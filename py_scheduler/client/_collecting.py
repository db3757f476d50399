"""Pulling results: the calls by which a trainer takes them, and the same by the names of Trinity's Scheduler."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import TYPE_CHECKING, Any

import grpc.aio
import msgspec

from py_scheduler._generated.rollout_scheduler.v1 import runner_pb2
from py_scheduler.client._backoff import Backoff
from py_scheduler.client._steps import StepClient
from py_scheduler.domain.collecting import DEFAULT_COLLECT_SECONDS, CollectReply, CollectRequest, TaskResult
from py_scheduler.domain.limits import check_collect
from py_scheduler.domain.requests import SubmissionSelector
from py_scheduler.domain.runners.table import runner_state, runner_table
from py_scheduler.errors import InvalidArgumentError, NotFoundError, ServerError
from py_scheduler.wire.collecting import (
    CollectReader,
    encode_ack_request,
    encode_collect_request,
    encode_discard_request,
    encode_drain_request,
)
from py_scheduler.wire.runners import decode_runners

if TYPE_CHECKING:
    from collections.abc import Callable

    from py_scheduler.domain.runners.runner import RunnerView
    from py_scheduler.domain.task import BatchId

_log = logging.getLogger("py_scheduler.client")

StreamCall = grpc.aio.UnaryStreamCall[Any, Any]


class CollectClient(StepClient):
    """The part of SchedulerClient that pulls results of tasks that were submitted with `Delivery.COLLECT`."""

    async def collect(  # noqa: PLR0913 -- the fields of a CollectRequest
        self,
        batch_id: BatchId | None = None,
        *,
        submission_id: str = "",
        namespace: str | None = None,
        request_id: str | None = None,
        min_num: int | None = None,
        max_num: int | None = None,
        timeout_seconds: float = DEFAULT_COLLECT_SECONDS,
        wait_after_min_seconds: float | None = None,
        clear_unfinished: bool = True,
        include_partial: bool = False,
        with_payloads: bool = True,
        acknowledge: bool = True,
    ) -> CollectReply:
        """Waits for results and takes them; see `CollectRequest`. A broken connection loses none of them.

        acknowledge: have the server forget them once all have arrived. Without it the same request_id gives them again
        until `ack_results`. Raises InvalidArgumentError, AlreadyExistsError, ResourceExhaustedError, ServerError.
        """
        request = CollectRequest(
            request_id=request_id or uuid.uuid4().hex,
            batch_id=batch_id,
            submission_id=submission_id,
            namespace=namespace or self._namespace,
            min_num=min_num,
            max_num=max_num,
            timeout_seconds=timeout_seconds,
            wait_after_min_seconds=wait_after_min_seconds,
            clear_unfinished=clear_unfinished,
            include_partial=include_partial,
            with_payloads=with_payloads,
        )
        if violations := tuple(check_collect(request)):
            # Before the timeout becomes what is left of it, which may hide what was wrong with it.
            raise InvalidArgumentError(violations)
        return await self._take(self._collecting(request), request, acknowledge=acknowledge)

    def _collecting(self, request: CollectRequest) -> Callable[[], StreamCall]:
        """Makes calls of it, each with what is left of its timeout."""
        loop = asyncio.get_running_loop()
        until = loop.time() + request.timeout_seconds

        def call_again() -> StreamCall:
            left = msgspec.structs.replace(request, timeout_seconds=max(0.0, until - loop.time()))
            return self._stub.CollectResults(encode_collect_request(left), metadata=self._metadata)

        return call_again

    async def drain(
        self,
        batch_id: BatchId | None = None,
        *,
        submission_id: str = "",
        namespace: str | None = None,
        request_id: str | None = None,
        with_payloads: bool = True,
        acknowledge: bool = True,
    ) -> CollectReply:
        """Takes what is finished now, without a wait. Raises what `collect` raises."""
        request = CollectRequest(
            request_id=request_id or uuid.uuid4().hex,
            batch_id=batch_id,
            submission_id=submission_id,
            namespace=namespace or self._namespace,
            with_payloads=with_payloads,
        )
        message = encode_drain_request(request)

        def call_again() -> StreamCall:
            return self._stub.DrainSubmission(message, metadata=self._metadata)

        return await self._take(call_again, request, acknowledge=acknowledge)

    async def ack_results(self, request_id: str, *, namespace: str | None = None) -> None:
        """The server forgets what it gave under this id. An id that it does not know (any more) is no error."""
        message = encode_ack_request(namespace or self._namespace, request_id)
        await self._call(lambda stub: stub.AckResults, message)

    async def discard(
        self,
        batch_id: BatchId | None = None,
        *,
        submission_id: str = "",
        namespace: str | None = None,
        request_id: str | None = None,
    ) -> None:
        """The server forgets all results that it keeps of a submission; under one request_id once. Raises
        NotFoundError.
        """
        selector = self._selector(batch_id, submission_id, namespace)
        message = encode_discard_request(selector, request_id or uuid.uuid4().hex)
        await self._call(lambda stub: stub.DiscardSubmission, message)

    async def list_runners(self) -> tuple[RunnerView, ...]:
        """Each runner outside the server's own loop, as it stands."""
        return decode_runners(await self._call(lambda stub: stub.ListRunners, runner_pb2.ListRunnersRequest()))

    async def _take(
        self, call_again: Callable[[], StreamCall], request: CollectRequest, *, acknowledge: bool
    ) -> CollectReply:
        reply = await self._read_until_whole(call_again)
        for warning in reply.warnings:
            _log.warning("%s", warning)
        if acknowledge and (reply.results or any(task.is_stopped for task in reply.unfinished)):
            await self.ack_results(request.request_id, namespace=request.namespace)
        return reply

    async def _read_until_whole(self, call_again: Callable[[], StreamCall]) -> CollectReply:
        backoff = Backoff(self._target, self._reconnect_seconds)
        while True:
            call = call_again()
            async with self._one_try(call, backoff):
                # It may be long until there is more to read than that the server has taken the call.
                await call.initial_metadata()
                if not call.done():
                    backoff.connected()
                return await self._read_all(call)

    async def _read_all(self, call: StreamCall) -> CollectReply:
        reader = CollectReader()
        while (message := await self._read(call)) is not None:
            reader.read(message.parts)
        if reader.reply is None:
            raise ServerError("the stream of results ended before its summary", "DATA_LOSS")
        return reader.reply

    def _selector(self, batch_id: BatchId | None, submission_id: str, namespace: str | None) -> SubmissionSelector:
        if (batch_id is None) != bool(submission_id):
            raise InvalidArgumentError("name the submission by exactly one of batch_id and submission_id", "batch_id")
        return SubmissionSelector(
            submission_id=submission_id, batch_id=batch_id, namespace=namespace or self._namespace
        )

    # By the names of Trinity's Scheduler

    async def get_payload_results(
        self,
        batch_id: BatchId,
        min_num: int | None = None,
        timeout: float | None = None,
        clear_timeout_tasks: bool = True,
        return_partial_tasks: bool = False,
    ) -> tuple[list[TaskResult], list[bytes]]:
        """`collect`: the results, and the payloads of all of them in order."""
        reply = await self.collect(
            batch_id,
            min_num=min_num,
            timeout_seconds=DEFAULT_COLLECT_SECONDS if timeout is None else timeout,
            clear_unfinished=clear_timeout_tasks,
            include_partial=return_partial_tasks,
        )
        return list(reply.results), reply.payloads

    async def get_statuses(
        self,
        batch_id: BatchId,
        min_num: int | None = None,
        timeout: float | None = None,
        clear_timeout_tasks: bool = True,
        return_partial_tasks: bool = False,
    ) -> list[TaskResult]:
        """`collect` without samples and payloads, which the server forgets all the same."""
        reply = await self.collect(
            batch_id,
            min_num=min_num,
            timeout_seconds=DEFAULT_COLLECT_SECONDS if timeout is None else timeout,
            clear_unfinished=clear_timeout_tasks,
            include_partial=return_partial_tasks,
            with_payloads=False,
        )
        return list(reply.results)

    async def drain_batch_payload_results(self, batch_id: BatchId) -> tuple[list[TaskResult], list[bytes]]:
        """`drain`: the results that are there, and their payloads."""
        reply = await self.drain(batch_id)
        return list(reply.results), reply.payloads

    async def discard_completed_results(self, batch_id: BatchId) -> None:
        """`discard`; a batch that is not known has nothing to discard."""
        try:
            await self.discard(batch_id)
        except NotFoundError:
            return

    async def get_key_state(self, key: str) -> dict[str, Any]:
        """What each runner that has this key says under it, by runner_id."""
        states = await self.get_all_state()
        return {runner_id: state[key] for runner_id, state in states.items() if key in state}

    async def get_runner_state(self, runner_id: str) -> dict[str, Any]:
        """What one runner is at; {} when it is unknown."""
        return (await self.get_all_state()).get(runner_id, {})

    async def get_all_state(self) -> dict[str, dict[str, Any]]:
        """What every runner is at, by runner_id."""
        return {view.runner_id: runner_state(view) for view in await self.list_runners()}

    async def print_all_state(self) -> None:
        """Prints an aligned table of it."""
        print(runner_table(await self.list_runners()))  # noqa: T201 -- what it is for
