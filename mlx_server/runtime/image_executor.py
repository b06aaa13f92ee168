"""A model's vision encoder on the MLX thread, in pieces between steps."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from mlx_server.errors import EngineDeadError
from mlx_server.outputs import ImageJob, ImageResult
from mlx_server.runtime.device_queue import DeviceStep
from mlx_server.runtime.executor import MLXExecutor, MLXThread
from mlx_server.runtime.vision import ImageEncoder, ImagePieces

logger = logging.getLogger(__name__)

_PIECE_S = 0.01
"""The time that a piece should take. Shorter ones would cost the host more than the device; a piece is longer where a
single module is."""


@dataclass(slots=True, eq=False)
class _Encoding:
    """An image on its way, behind the first `num_steps` steps of its model. `num_ahead` is how many outputs of modules
    the next piece has; `num_done` of them took `seconds`."""

    job: ImageJob
    num_steps: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[ImageResult]
    pieces: ImagePieces | None = None
    num_ahead: int = 1
    num_done: int = 0
    seconds: float = 0.0

    def finish(self, error: BaseException | None = None, *, is_encoded: bool = False) -> None:
        """Any thread; the first call counts."""
        message = None if error is None else f"{type(error).__name__}: {error}"
        result, future = ImageResult(is_encoded, self.pieces is not None, message), self.future  # not the pieces
        self._on_loop(lambda: None if future.done() else future.set_result(result))

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        self._on_loop(lambda: self.loop.call_later(seconds, function))

    def _on_loop(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(function)

    def observe(self, num_outputs: int, seconds: float) -> None:
        self.num_done += num_outputs
        self.seconds += seconds
        self.num_ahead = min(2 * self.num_ahead, max(1, int(_PIECE_S * self.num_done / max(self.seconds, 1e-9))))


@dataclass(frozen=True, slots=True)
class _Piece:
    encoding: _Encoding
    num_outputs: int
    is_last: bool


class ImageExecutor:
    """Encodes images of one model, one after the other; `encode` is called on the event loop's thread.

    If others use the device, each piece is followed by a pause of its length, so that streams have half of the time:
    without it the next piece would begin while the host composes their next step. There is no pause while others have
    used the device for a piece longer than the image: after a step of 200 ms, twenty pieces of 10 ms follow each other.
    What has failed fails one image alone, and an image whose request has ended stops at the next piece.

    An image is begun when the steps that were submitted before it are launched, since they may use earlier images, and
    when no piece of an earlier one is on the device, since the memory of one encoder is booked.
    """

    def __init__(self, thread: MLXThread, encoder: ImageEncoder, steps: MLXExecutor) -> None:
        """`steps` runs the steps of the same model."""
        self._thread = thread
        self._steps = steps
        self._device = thread.device
        self._encoder = encoder
        self._waiting: deque[_Encoding] = deque()
        self._launched: deque[_Piece] = deque()
        self._is_pausing = False
        self._charged_s = 0.0  # to all, when the image began, or its last piece ended
        self._behind_s = 0.0  # how much longer than the image others have used the device
        thread.attach(self, beside=steps)

    @property
    def has_work(self) -> bool:
        if not self._waiting or not self._device.has_room or self._is_pausing:
            return False
        encoding = self._waiting[0]
        if encoding.pieces is None:
            return self._steps.num_launched >= encoding.num_steps and not self._launched
        return encoding.pieces.num_left > 0

    def encode(self, job: ImageJob) -> asyncio.Future[ImageResult]:
        """Queues an image; returns a future of the running loop, which has no exception."""
        loop = asyncio.get_running_loop()
        encoding = _Encoding(job, self._steps.num_submitted, loop, loop.create_future())
        if not self._thread.offer(lambda: self._waiting.append(encoding)):
            encoding.finish(EngineDeadError("the MLX thread has stopped"))
        return encoding.future

    def close(self) -> None:
        """Removes the executor from the thread, and drops what it has of images and its model there. A piece may still
        be on the device."""
        self._thread.detach(self)
        self._thread.call(self._let_go)

    def advance(self) -> None:
        """Launches a piece."""
        encoding, started_s = self._waiting[0], self._thread.clock()
        if not encoding.job.is_wanted:
            self._finish()
            return
        try:
            if encoding.pieces is None:
                encoding.pieces = self._encoder.begin(encoding.job)
                self._charged_s, self._behind_s = self._thread.charged_s, 0.0
            pieces = encoding.pieces
            if pieces is None:
                self._finish(is_encoded=True)
                return
            num_before = pieces.num_left
            end = pieces.submit(encoding.num_ahead)
        except Exception as error:  # the model's own code, or no memory for what it makes
            self._fail(error)
            return
        self._launched.append(_Piece(encoding, num_before - pieces.num_left, not pieces.num_left))
        step = DeviceStep(self, started_s, is_awaited=False, is_nearly_over=self._thread.computes_at_launch)
        self._device.push(step, partial(_wait, end))

    def settle(self, step_time_s: float, idle_time_s: float) -> None:
        """The oldest launched piece has ended. For `DeviceQueue`."""
        piece = self._launched.popleft()
        encoding = piece.encoding
        behind_s = self._behind_s + self._thread.charged_s - self._charged_s
        self._behind_s = max(behind_s - step_time_s, 0.0)
        self._thread.charge(self, step_time_s)
        self._charged_s = self._thread.charged_s
        encoding.observe(piece.num_outputs, step_time_s)
        if behind_s > 0.0 and self._behind_s < step_time_s and not piece.is_last:
            self._is_pausing = True
            encoding.call_later(step_time_s, self._go_on)
        if piece.is_last and encoding.pieces is not None and self._is_first(encoding):
            self._encoder.keep(encoding.job, encoding.pieces.encoded)
            self._finish(is_encoded=True)

    def fail(self, error: BaseException) -> None:
        """The oldest launched piece has failed. For `DeviceQueue`."""
        if self._is_first(self._launched.popleft().encoding):
            self._fail(error)

    def distrust(self, error: BaseException) -> None:
        if self._launched and self._is_first(self._launched[0].encoding):
            self._finish(error)

    def abandon(self, error: BaseException) -> None:
        """The thread keeps its queue, which it may be reading now."""
        for encoding in tuple(self._waiting):
            encoding.finish(error)

    def _let_go(self) -> None:
        self._waiting.clear()
        for piece in self._launched:
            piece.encoding.pieces = None
        del self._encoder, self._steps

    def _go_on(self) -> None:
        self._is_pausing = False
        self._thread.notify()

    def _is_first(self, encoding: _Encoding) -> bool:
        """Whether an image has neither failed nor been given up."""
        return bool(self._waiting) and self._waiting[0] is encoding

    def _fail(self, error: BaseException) -> None:
        encoding = self._waiting[0]
        logger.error("An image of %s cannot be encoded: %s", encoding.job.request.request_id, error, exc_info=error)
        self._finish(error)
        self._thread.judge(error)

    def _finish(self, error: BaseException | None = None, *, is_encoded: bool = False) -> None:
        self._waiting.popleft().finish(error, is_encoded=is_encoded)


def _wait(end: mx.array) -> None:
    end.item()  # only waits for its event, and makes no stream
