"""What keeps a step to one image: its vision encoder runs in the step that computes its first placeholder, and streams
wait for that."""

from __future__ import annotations

from collections.abc import Iterable

from mlx_server.batching.request_table import Step
from mlx_server.request import Request, RequestStatus

_ONE_IMAGE = "one image is encoded a step, and another request has it"


def cut_at_second_image(request: Request, num_tokens: int) -> int:
    """As many of the request's next `num_tokens` as have placeholders of one image at most.

    Images at tokens 10 to 50 and 60 to 100, and 20 tokens computed: of the next 64 tokens 40 may come, up to the second
    image.
    """
    start = request.num_computed_tokens
    ahead = [image.start for image in request.images if image.end > start]
    return min(num_tokens, ahead[1] - start) if len(ahead) > 1 else num_tokens


def with_whole_images(request: Request, num_tokens: int) -> int:
    """How many of its next tokens a request is given in the place of `num_tokens`, so that no image is cut that must be
    computed whole: those before it, or all of it where it comes next, which may be more.

    An image at tokens 10 to 50: of a prompt that begins, 30 tokens become 10, and then 1 becomes 40.
    """
    start = request.num_computed_tokens
    for image in request.images:
        if image.is_bidirectional and max(image.start, start) < start + num_tokens < image.end:
            return (image.start if image.start > start else image.end) - start
    return num_tokens


class ImageTurns:
    """Whose image a step may encode: that of a request which is in the middle of one, so that embeddings are kept for
    few; else of the first that comes to one, unless another of its tier or a better one, or one that has aged past it,
    was held up at its image in the step before. So two that come to images step by step take turns, and short prompts
    with images hold up no long one for ever.

        step 1  B, short, has the step's image; A, the oldest, computes its text up to its own image
        step 2  it is A's turn: A has the image, C, short, waits
        step 3  it is C's turn
    """

    def __init__(self) -> None:
        self._next: Request | None = None
        self._held_up: list[Request] = []

    def begin(self, prefilling: Iterable[Request]) -> None:
        """A step is composed, in which those run who have prompt to compute."""
        first = [request for request in prefilling if _is_within_image(request)] or self._held_up
        self._next = min(first, key=lambda other: (other.priority, other.arrival_s)) if first else None
        self._held_up = []

    def pass_turn(self, step: Step) -> bool:
        """Whether the step, which is empty, may be shared out again: whose turn it was takes nothing, since it has
        ended or cannot start, and others have asked. Who runs comes first, since it can go on."""
        asked = [request for request in self._held_up if request is not self._next]
        if self._next is None or not asked:
            return False
        self._next = min(asked, key=lambda other: (other.status is RequestStatus.WAITING, other.arrival_s))
        self._held_up = []
        if step.closed_because is _ONE_IMAGE:
            step.closed_because = step.closed_by = None
        return True

    def allow(self, step: Step, request: Request, num_tokens: int) -> int:
        """As many of the request's next tokens as may come, of up to `num_tokens` more than the step gives it already.
        Of one that waits it is not known yet which of its images are cached: it starts when the step's image is free,
        and nobody starts in front of it."""
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
    """Tokens before the next placeholder that is not computed; all that it may ever have if there is none."""
    start = request.num_computed_tokens
    nearest = next((image.start for image in request.images if image.end > start), request.max_total_tokens)
    return max(nearest - start, 0)
