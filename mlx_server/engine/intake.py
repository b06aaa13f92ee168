"""How the requests of one call (several prompts, or several answers to one) enter the scheduler's queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from mlx_server.batching.scheduler import ContinuousBatchingScheduler
from mlx_server.engine.request_stream import RequestStream
from mlx_server.errors import QueueFullError, QuotaExceededError
from mlx_server.outputs import RequestOutput
from mlx_server.request import Request, RequestStatus

_SHARE = 16
"""One in this many places of the queue is for one call: 64 by default, as many as there are seats, so that on an idle
server a call takes all seats at once."""

_TURN = 64
"""So many calls at most have a turn after a step. Where the queue is full, a thousand would take 10 ms each time."""


class _Call:
    """The streams of one call: those `left` have not entered the queue, `entered` ones are in the scheduler."""

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self.left = deque(streams)
        self.entered: list[RequestStream] = []

    def next(self) -> RequestStream | None:
        """The stream that is to enter next. It stays; those before it that have been aborted are forgotten."""
        while self.left and self.left[0].is_complete:
            self.left.popleft()
        return self.left[0] if self.left else None

    def settle(self) -> bool:
        """Forgets streams that have ended, and says whether there are others."""
        self.entered = [stream for stream in self.entered if not stream.is_complete]
        return self.next() is not None or bool(self.entered)


class Intake:
    """Lets the requests of a call into the queue. The first one decides: if it is refused, the call is, and nothing has
    changed. The others follow, in their order, while few of the call wait and there is room; they displace a waiting
    request of another client only if none of their call waits. So one call never fills the queue, and none is refused
    after it has displaced others.

    A request counts as arrived when it enters, so those of a long call neither age nor time out before. One that is
    displaced enters again later if others of its call are in the scheduler; else the call ends with its error.

    Event-loop thread only.
    """

    def __init__(self, scheduler: ContinuousBatchingScheduler, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._calls: deque[_Call] = deque()  # of more than one request
        self._is_due = False

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    def begin(self, streams: Sequence[RequestStream]) -> list[RequestOutput]:
        """Accepts a call. Returns the last outputs of the requests that it has displaced. Raises what
        `ContinuousBatchingScheduler.add_request` raises, and then no request has entered."""
        for stream in streams[1:]:
            self._scheduler.check(stream.request)
        displaced = self._enter(streams[0])
        if len(streams) > 1:
            call = _Call(streams[1:])
            call.entered.append(streams[0])
            self._calls.append(call)
            self._fill(call, displaces=False)
        return displaced

    def fill_soon(self, fill: Callable[[], None]) -> None:
        """Has `fill` called in the event loop's next turn, once for all who ask until then, if there are calls."""
        if self._calls and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(fill)

    def fill(self) -> list[RequestOutput]:
        """Lets requests of accepted calls enter, of up to `_TURN` calls in turn. Returns the last outputs of those that
        they have displaced.

        Only one call in a turn looks for requests to displace in vain, since that means to look at the whole queue."""
        self._is_due, displaces = False, True
        displaced: list[RequestOutput] = []
        for _ in range(min(len(self._calls), _TURN)):
            call = self._calls.popleft()
            if call.settle():
                displaced += self._fill(call, displaces=displaces)
                displaces = displaces and (not call.left or bool(_waiting(call)))
                self._calls.append(call)
        if len(self._calls) <= _TURN:
            self._calls.rotate(-1)  # else another one comes first anyway
        return displaced

    def takes_back(self, output: RequestOutput) -> bool:
        """Whether a request that was ended with an error enters again later. If not, the error also ends those of its
        call that have not entered."""
        for call in self._calls:
            ended = next((stream for stream in call.entered if stream.request_id == output.request_id), None)
            if ended is None:
                continue
            call.entered.remove(ended)
            if isinstance(output.error, QueueFullError) and any(not stream.is_complete for stream in call.entered):
                call.left.appendleft(ended)
                return True
            rest, call.left = call.left, deque()
            for stream in rest:
                stream.abort(output.error)
        return False

    def _fill(self, call: _Call, *, displaces: bool) -> list[RequestOutput]:
        displaced: list[RequestOutput] = []
        while (stream := call.next()) is not None:
            waiting = _waiting(call)
            if waiting and not self._is_small(waiting, stream.request):
                break
            try:
                displaced += self._enter(stream, displaces=displaces and not waiting)
            except (QueueFullError, QuotaExceededError):
                break
            call.entered.append(call.left.popleft())
        return displaced

    def _enter(self, stream: RequestStream, *, displaces: bool = True) -> list[RequestOutput]:
        stream.request.arrival_s = self._clock()
        return self._scheduler.add_request(stream.request, displaces=displaces)

    def _is_small(self, waiting: Sequence[Request], request: Request) -> bool:
        """Whether a call may have one more request waiting."""
        num_tokens = sum(other.num_tokens for other in waiting) + request.num_tokens
        limits = [self._scheduler.limits.queue, self._scheduler.limits.tiers.get(request.tier)]
        return all(
            limit is None
            or (len(waiting) < limit.max_num_waiting // _SHARE and num_tokens <= limit.max_queued_tokens // _SHARE)
            for limit in limits
        )


def _waiting(call: _Call) -> list[Request]:
    requests = (stream.request for stream in call.entered)
    return [request for request in requests if request.status is RequestStatus.WAITING]
