"""Limits a step to one image: its vision encoder runs in the step that computes its first placeholder, and streams wait
for that."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mlx_server.batching.request_table import Step
from mlx_server.request import Request, RequestStatus

_ONE_IMAGE = "a step encodes one image, and another request has this step's"


def cut_at_second_image(request: Request, num_tokens: int) -> int:
    """How many of the request's next `num_tokens` tokens have placeholders of at most one image.

    Images at tokens 10 to 50 and 60 to 100, 20 tokens computed: of the next 64 tokens 40 may come, up to the second
    image.
    """
    start = request.num_computed_tokens
    ahead = [image.start for image in request.images if image.end > start]
    return min(num_tokens, ahead[1] - start) if len(ahead) > 1 else num_tokens


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


class ImageTurns:
    """Decides whose image a step may encode.

    A request in the middle of an image goes on, so that embeddings are kept for few requests. Otherwise the first
    request that comes to an image has the step's image, unless a request of the same or a better tier, or one promoted
    by age, was held up at its image in the step before. So requests take turns, and short prompts with images do not
    hold up a long one forever.

        step 1  B, short, has the image; A, the oldest, computes its text up to its own image and is held up
        step 2  it is A's turn: A has the image, C, short, is held up
        step 3  it is C's turn
    """

    def __init__(self, turn: Callable[[Request], tuple[int, int, float]]) -> None:
        """`turn` is the order of requests, by tier, client and age."""
        self._turn = turn
        self._next: Request | None = None
        self._held_up: list[Request] = []

    def begin(self, prefilling: Iterable[Request]) -> None:
        """A step begins; `prefilling` are the running requests with prompt left to compute."""
        first = [request for request in prefilling if _is_within_image(request)] or self._held_up
        self._next = min(first, key=self._turn, default=None)
        self._held_up = []

    def pass_turn(self, step: Step) -> bool:
        """Whether an empty step may be shared out again: the request whose turn it was has ended or cannot start, and
        others were held up. A running one comes first, since it can go on."""
        asked = [request for request in self._held_up if request is not self._next]
        if self._next is None or not asked:
            return False
        self._next = min(asked, key=lambda other: (other.status is RequestStatus.WAITING, other.arrival_s))
        self._held_up = []
        if step.closed_because is _ONE_IMAGE:
            step.closed_because = step.closed_by = None
        return True

    def allow(self, step: Step, request: Request, num_tokens: int) -> int:
        """How many of up to `num_tokens` more tokens a request may get in the step. Which images of a waiting request
        are cached is not known yet, so it starts only if the step's image is free, and no other request starts before
        it."""
        given, num_text = step.given[request], _num_text_ahead(request)
        is_waiting = request.status is RequestStatus.WAITING
        if (given + num_tokens <= num_text and not is_waiting) or not self._is_taken(step, request):
            return num_tokens
        if request not in self._held_up:
            self._held_up.append(request)
        if not is_waiting:
            return max(num_text - given, 0)
        if step.closed_because is None:
            step.closed_because, step.closed_by = _ONE_IMAGE, request
        return 0

    def _is_taken(self, step: Step, request: Request) -> bool:
        first = self._next
        if first is not None and first is not request and (first.is_promoted or first.priority <= request.priority):
            return True
        return any(other is not request and given > _num_text_ahead(other) for other, given in step.given.items())


def _is_within_image(request: Request) -> bool:
    return any(image.start < request.num_computed_tokens < image.end for image in request.images)


def _num_text_ahead(request: Request) -> int:
    """Tokens before the next placeholder to compute; all that the request may ever have if there is none."""
    start = request.num_computed_tokens
    nearest = next((image.start for image in request.images if image.end > start), request.max_total_tokens)
    return max(nearest - start, 0)
