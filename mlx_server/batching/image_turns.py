"""Which image is encoded next, and how much of a prompt is computed before that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_server.batching.aged_share import SHARE
from mlx_server.batching.refusals import unseen
from mlx_server.batching.request_table import RequestTable
from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import ImageJob, ImageResult
from mlx_server.request import PromptImage, Request, RequestStatus


def with_whole_images(request: Request, num_tokens: int) -> int:
    """How many tokens a request gets instead of `num_tokens`, so that the chunk does not end within an image that must
    be computed whole: the tokens before the image, or, if the image comes next, all of it, which may be more.

    An image at tokens 10 to 50 of a prompt that begins: 30 tokens become 10, and the 1 after them becomes 40.
    """
    start = request.num_computed_tokens
    for image in request.images:
        if image.is_bidirectional and max(image.start, start) < start + num_tokens < image.end:
            return (image.start if image.start > start else image.end) - start
    return num_tokens


@dataclass(slots=True)
class _Encoded:
    """The last encoded image, for its request. Once that `has_begun` it, the encoder keeps it for this request alone,
    and may forget it when it has computed all of it or has left."""

    job: ImageJob
    has_begun: bool = False

    def settle(self) -> None:
        """A step was composed."""
        self.has_begun |= self.job.request.num_computed_tokens > self.job.image.start

    @property
    def is_needed(self) -> bool:
        num_computed, image = self.job.request.num_computed_tokens, self.job.image
        return self.job.is_wanted and (not self.has_begun or image.start < num_computed < image.end)


class ImageTurns:
    """The vision encoder takes one image at a time, in pieces between steps. A waiting request that could start is
    parked until its next image is ready, so it holds no seat and no blocks meanwhile, and others start before it. A
    running one is computed up to its next image.

    The next image is that of the request whose turn it is. It is not begun before the request of the last encoded one
    has computed that, so that embeddings are kept for few requests; unless the next one comes before it, or runs while
    the last one does not find its seat or blocks, which the running one may hold.

        encoded     1 of A    2 of B            3 of A, begun when B has computed all of 2
        steps       text      text, A up to 3   text, B

    An image that is begun is given up for one of a better tier, and begun again later: what half an image keeps in
    memory is not booked beside another. It is not if its request has aged past the other one, so it is not given up
    for ever. For the same reason, one image in eight is of the request that has aged past all better ones.
    """

    def __init__(self, table: RequestTable) -> None:
        self.is_active = False  # whether `begin` has anything to do
        self._table = table
        self._waiting = table.waiting
        self._held: list[Request] = []
        self._encoding: ImageJob | None = None
        self._last: _Encoded | None = None
        self._num_before_aged = 0  # images that have gone before a request that has aged past theirs

    def cut(self, request: Request, start: int, num_tokens: int) -> int:
        """How many of `num_tokens` from token `start` on come before an image that is not ready."""
        ahead = (image for image in request.images if image.end > start and not self._is_ready(request, image))
        image = next(ahead, None)
        return num_tokens if image is None else min(num_tokens, max(image.start - start, 0))

    def hold(self, prefilling: list[Request]) -> list[Request]:
        """Those of the running requests with prompt left that are not at an image that is not ready; a step begins."""
        self._held = [one for one in prefilling if one.images and self._is_held(one)]
        self.is_active |= bool(self._held)
        return [one for one in prefilling if one not in self._held] if self._held else prefilling

    def why_held(self, request: Request) -> str | None:
        """Why a running request is not given tokens; None if not for an image."""
        return "its next image is not encoded yet" if self._is_held(request) else None

    def parks(self, request: Request) -> bool:
        """Parks a waiting request that could start otherwise, if its next image is not ready. Whether it is parked."""
        image = self._next(request)
        if image is None or self._is_ready(request, image):
            return False
        self._waiting.park_for_image(request, image.digest)
        self.is_active = True
        return True

    def begin(self) -> ImageJob | None:
        """The image to encode now, if any; call after each `schedule` while it `is_active`. `end` follows."""
        if self._last is not None:
            self._last.settle()
            self._last = self._last if self._last.is_needed else None
        self._held = [one for one in self._held if one.status is RequestStatus.RUNNING and self._is_held(one)]
        candidates = [*self._held, *self._waiting.parked_for_images()]
        self.is_active = bool(candidates) or self._last is not None or self._encoding is not None
        able = [request for request in candidates if self._may_follow(request)]
        if self._encoding is not None:
            self._encoding.is_given_up |= any(self._displaces(request, self._encoding) for request in able)
            return None
        request = self._choose(able)
        image = None if request is None else self._next_of(request)
        if request is None or image is None:
            return None
        self._last, self._encoding = None, ImageJob(request, image)
        return self._encoding

    def end(self, result: ImageResult) -> None:
        """The image that was begun is encoded, has failed, which ends its request, or was given up."""
        job, self._encoding = self._encoding, None
        assert job is not None, "no image was begun"
        self._table.counters.num_images_encoded += result.was_run
        self._last = _Encoded(job) if result.is_encoded else None
        if result.error is not None and job.is_wanted:
            self._table.failed.append(self._table.fail(job.request, unseen(result.error)))
        self._waiting.unpark_for_image(job.image.digest)

    def _is_held(self, request: Request) -> bool:
        return not self.cut(request, request.num_computed_tokens, 1)

    def _next_of(self, request: Request) -> PromptImage | None:
        """The image for which a request is held or parked, even if others have computed it meanwhile."""
        digest = self._waiting.parked_at(request)
        if digest is None:
            return self._next(request)
        return next(image for image in request.images if image.digest == digest)

    def _next(self, request: Request) -> PromptImage | None:
        """The first image that a running request has not computed, or that a waiting one would compute now."""
        start = request.num_computed_tokens
        if request.status is RequestStatus.WAITING:  # `work` may take more for cached than what it would start with
            start = len(self._table.blocks.find_prefix(request)) * BLOCK_SIZE
        return next((image for image in request.images if image.end > start), None)

    def _is_ready(self, request: Request, image: PromptImage) -> bool:
        if image.start < request.num_computed_tokens:
            return True
        last = self._last
        if last is None or last.has_begun or last.job.image.digest != image.digest:
            return False
        # After a preemption, an earlier place of the same image in the same prompt would use it up.
        return request is not last.job.request or image.start >= last.job.image.start

    def _may_follow(self, request: Request) -> bool:
        """Whether the next image may be that of `request`, by the last one. The last one's own request may need another
        again, because it was preempted meanwhile, or be parked for a prefix that takes long to compute. A running one
        that has aged past `request` has its image until its share of the tokens is enough to begin it."""
        if self._last is None or self._waiting.parked_at(last := self._last.job.request) is not None:
            return True
        if request is last or (last.status is RequestStatus.WAITING and request.status is RequestStatus.RUNNING):
            return True
        has_aged = last.priority > request.priority and self._waiting.age(last) < self._waiting.age(request)
        keeps = has_aged and last.status is RequestStatus.RUNNING and not self._last.has_begun
        return not keeps and self._turn(request) < self._turn(last)

    def _choose(self, able: list[Request]) -> Request | None:
        """The request whose turn it is, or the most urgent one by age, if seven have gone before it."""
        if not able:
            return None
        first, oldest = min(able, key=self._turn), min(able, key=self._waiting.age)
        if oldest.priority <= first.priority:
            self._num_before_aged = 0
            return first
        self._num_before_aged = (self._num_before_aged + 1) % SHARE
        return first if self._num_before_aged else oldest

    def _displaces(self, request: Request, job: ImageJob) -> bool:
        """Whether the image of `job` is given up for the next one of `request`, which is another."""
        begun, image = job.request, self._next_of(request)
        is_better = request.priority < begun.priority and self._waiting.age(request) < self._waiting.age(begun)
        return is_better and not begun.is_promoted and image is not None and image.digest != job.image.digest

    def _turn(self, request: Request) -> tuple[Any, ...]:
        return not request.is_promoted, *self._waiting.turn(request)
