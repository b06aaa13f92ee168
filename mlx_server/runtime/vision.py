"""Images in a ragged batch: the vision encoder makes the embeddings of each image once; they replace the embeddings of
its placeholders, and rows get positions in three axes if the model has them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_server.outputs import ImageJob, NewRequestData, ScheduledChunk
from mlx_server.request import PromptImage
from mlx_server.runtime.attention.interface import IntArray
from mlx_server.runtime.layers.taps import Taps

IMAGE_SHARE = 1 / 32
"""The share of the memory for K/V that embeddings of images may use."""


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An encoded image: embeddings `[n, D]` for its placeholders, and `[n, D]` for each of the first layers to add to
    their output (Qwen3-VL's deepstack)."""

    embeddings: mx.array
    deepstack: tuple[mx.array, ...]

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (self.embeddings, *self.deepstack)

    @property
    def num_bytes(self) -> int:
        return int(sum(array.nbytes for array in self.arrays))

    def rows(self, start: int, stop: int) -> EncodedImage:
        return EncodedImage(self.embeddings[start:stop], tuple(layer[start:stop] for layer in self.deepstack))


@dataclass(frozen=True, slots=True)
class ImageRows:
    """What images change in a step: the rows `[n]` of the batch, counted over all its tokens, which get the embeddings
    of `images` in sequence; the positions `[3, T]` of all rows, None if they are those of text; and `spans` `[S, 2]`,
    the first and last rows (exclusive) of images whose rows see each other both ways, in all layers or only
    `in_windows`, in those with a sliding window."""

    rows: IntArray
    images: EncodedImage | None
    positions: IntArray | None
    spans: IntArray = field(default_factory=lambda: np.zeros((0, 2), np.int32))
    in_windows: bool = False

    def cut(self, first: int, last: int) -> ImageRows:
        """The same for the step's rows [first, last), counted from `first`."""
        start, stop = np.searchsorted(self.rows, (first, last)).tolist()
        return ImageRows(
            self.rows[start:stop] - first,
            None if self.images is None or start == stop else self.images.rows(start, stop),
            None if self.positions is None else self.positions[:, first:last],
        )

    def put(self, image_rows: mx.array, others: mx.array) -> mx.array:
        """`others` `[B, L, D]` with `image_rows` `[n, D]` at the placeholders."""
        flat = others.reshape(-1, others.shape[-1])
        flat[mx.array(self.rows)] = image_rows.astype(flat.dtype)
        return flat.reshape(others.shape)


class ReadsImages(nn.Module, ABC):  # type: ignore[misc]
    """The base of models with a vision encoder, whose calls take `image_rows`. `module` is mlx-vlm's module for it, and
    `config` mlx-vlm's configuration."""

    module: ModuleType
    model_type: str
    config: Any
    language_model: Any
    spans_in_windows = False
    """Whether images are seen both ways, if at all, only by layers with a sliding window."""

    @property
    @abstractmethod
    def has_positions(self) -> bool:
        """Whether tokens have positions in three axes: time, height and width."""

    @property
    def encoder_parts(self) -> list[nn.Module]:
        """The modules that make embeddings of images."""
        parts = {name: part for name, part in self.children().items() if name not in ("language_model", "model")}
        return [part for _, part in tree_flatten(parts, is_leaf=nn.Module.is_module)]

    @abstractmethod
    def embed_image(self, ids: mx.array, inputs: dict[str, mx.array]) -> EncodedImage:
        """Encodes an image from its placeholders `[1, n]` and the arrays of its processor. Lazy. Raises whatever
        mlx-vlm's code raises."""

    @abstractmethod
    def plain(self) -> Any:
        """mlx-vlm's own model with the same weights, to compare with; None if there is none that is right, or whose
        call takes images as they are here."""


def mrope_positions(images: Sequence[PromptImage], num_tokens: int, merge: int) -> IntArray:
    """Positions `[3, num_tokens]` of a prompt in time, height and width, as Qwen2-VL defines them: text advances in all
    three; an image has one time and spans its height and width; what follows continues after its longest side.

    Example: two text tokens, an image of 2 x 3 (six placeholders), two text tokens:

        time    0 1  2 2 2 2 2 2  5 6
        height  0 1  2 2 2 3 3 3  5 6
        width   0 1  2 3 4 2 3 4  5 6
    """
    positions = np.empty((3, num_tokens), np.int32)
    end = following = 0
    for image in images:
        positions[:, end : image.start] = np.arange(following, following + image.start - end)
        following += image.start - end
        sides = _grid(image, merge)
        positions[:, image.start : image.end] = following + np.indices(sides).reshape(3, -1)
        end, following = image.end, following + max(sides)
    positions[:, end:] = np.arange(following, following + num_tokens - end)
    return positions


def _grid(image: PromptImage, merge: int) -> tuple[int, int, int]:
    times, height, width = np.asarray(image.inputs["image_grid_thw"]).reshape(3).tolist()
    return times, height // merge, width // merge


@dataclass(slots=True)
class _Seen:
    """A running request with images: the images without their arrays, the positions `[3, P]` of its prompt (None if
    they are those of text), and how many of its tokens have been computed."""

    images: tuple[PromptImage, ...]
    positions: IntArray | None
    num_computed: int = 0

    def positions_of(self, start: int, stop: int) -> IntArray | None:
        """The positions of tokens [start, stop), `[3, stop - start]`. Those after the prompt continue from its largest
        position. A request that was preempted may have both in one chunk."""
        if self.positions is None:
            return None
        num_prompt = self.positions.shape[1]
        first = int(self.positions[:, -1].max()) + 1 + max(start - num_prompt, 0)
        rest = np.arange(first, first + stop - max(start, num_prompt), dtype=np.int32)
        return np.concatenate([self.positions[:, start:stop], np.tile(rest, (3, 1))], axis=1)

    @property
    def begun(self) -> list[PromptImage]:
        """Images with some computed and some other placeholders."""
        return [image for image in self.images if image.start < self.num_computed < image.end]


class ImageEncoder:
    """The vision encoder of a model, and a cache of encoded images. MLX thread only.

    An image is here before the step that computes the first of its placeholders. The cache is limited to `max_bytes`:
    the least recently used images are evicted, but none that a running request has partly computed, and not the last
    two before their requests use them. One would be enough: when an image is begun, all steps that use earlier ones are
    launched, and until it is encoded, steps use only images that their requests have partly computed.
    """

    def __init__(self, model: ReadsImages, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._model = model
        self._requests: dict[str, _Seen] = {}
        self._encoded: OrderedDict[bytes, EncodedImage] = OrderedDict()
        self._unused: deque[tuple[bytes, str]] = deque(maxlen=2)  # with the request's id
        # How many patches form one placeholder along each side; None if those of images are numbered as text is.
        merge = getattr(model.config.vision_config, "spatial_merge_size", None) if model.has_positions else None
        self._merge = None if merge is None else int(merge)

    @property
    def num_bytes(self) -> int:
        """The size of the cached images."""
        return sum(image.num_bytes for image in self._encoded.values())

    def begin(self, job: ImageJob) -> ImagePieces | None:
        """The pieces of an image, whose result goes to `keep`; None if it is cached. Raises whatever the model's code
        raises."""
        encoded = self._encoded.get(job.image.digest)
        if encoded is None:
            return ImagePieces(self._model, job.token_ids, job.image.inputs)
        self.keep(job, encoded)
        return None

    def keep(self, job: ImageJob, encoded: EncodedImage) -> None:
        """Caches an image, and keeps it until its request uses it."""
        self._encoded[job.image.digest] = encoded
        self._unused.append((job.image.digest, job.request.request_id))
        self._shrink()

    def add(self, data: NewRequestData) -> None:
        """Adds a request that starts; ignored if it has no images."""
        if not data.images:
            return
        positions = None
        if self._merge is not None:
            positions = mrope_positions(data.images, len(data.prompt_token_ids), self._merge)
        images = tuple(replace(image, inputs={}) for image in data.images)  # a request is dropped by a later step only
        self._requests[data.request_id] = _Seen(images, positions)

    def drop(self, request_id: str) -> None:
        """Call when a request has ended or was preempted."""
        if self._requests.pop(request_id, None) is not None:
            self._shrink()

    def rows(self, chunks: Sequence[ScheduledChunk], positions: IntArray) -> ImageRows | None:
        """What images change in a step whose rows have `positions` `[T]` in their requests; None if nothing does."""
        if not self._requests:
            return None
        rows: list[IntArray] = []
        parts: list[EncodedImage] = []
        moved = None if self._merge is None else np.tile(positions.astype(np.int32), (3, 1))
        spans: list[tuple[int, int]] = []
        first, is_changed = 0, False
        for chunk in chunks:
            seen, start, end = self._requests.get(chunk.request_id), chunk.start, chunk.start + chunk.num_tokens
            if seen is not None:
                seen.num_computed = end
                for image in seen.images:
                    if image.start < end and start < image.end:
                        begin, stop = max(image.start, start), min(image.end, end)
                        if image.is_bidirectional:
                            assert stop == image.end, "a chunk ends within an image that sees both ways"
                            spans.append((first + begin - start, first + stop - start))
                        encoded = self._take(image, chunk.request_id)
                        parts.append(encoded.rows(begin - image.start, stop - image.start))
                        rows.append(np.arange(begin, stop, dtype=np.int32) + np.int32(first - start))
                if moved is not None and (own := seen.positions_of(start, end)) is not None:
                    moved[:, first : first + chunk.num_tokens] = own
                is_changed = True
            first += chunk.num_tokens
        if not is_changed or (not rows and moved is None):
            return None
        self._shrink()
        places = np.concatenate(rows) if rows else np.zeros(0, np.int32)
        both_ways = np.array(spans, np.int32).reshape(-1, 2)
        return ImageRows(places, _joined(parts), moved, both_ways, self._model.spans_in_windows)

    def _take(self, image: PromptImage, request_id: str) -> EncodedImage:
        if (image.digest, request_id) in self._unused:
            self._unused.remove((image.digest, request_id))
        self._encoded.move_to_end(image.digest)
        return self._encoded[image.digest]

    def _shrink(self) -> None:
        """Evicts images beyond the limit."""
        num_bytes = self.num_bytes
        if num_bytes <= self.max_bytes:
            return
        needed = {digest for digest, _ in self._unused}
        needed |= {image.digest for seen in self._requests.values() for image in seen.begun}
        for digest in [digest for digest in self._encoded if digest not in needed]:
            if num_bytes > self.max_bytes:
                num_bytes -= self._encoded.pop(digest).num_bytes


class ImagePieces:
    """The encoding of an image, computed a piece at a time with the bits of the whole. MLX thread only.

    The whole graph is built at first, lazily. What each module of the encoder returns is where a piece may end.
    """

    def __init__(self, model: ReadsImages, token_ids: Sequence[int], inputs: Mapping[str, Any]) -> None:
        """Builds the graph for an image whose placeholders are `token_ids`. Raises whatever the model's code raises."""
        self._outputs: deque[mx.array] = deque()
        modules = {id(module): module for part in model.encoder_parts for module in part.modules()}
        taps = Taps(modules.values(), self._note)
        try:
            arrays = {name: mx.array(value) for name, value in inputs.items()}
            self.encoded = model.embed_image(mx.array([list(token_ids)]), arrays)
        finally:
            taps.remove()

    @property
    def num_left(self) -> int:
        """How many outputs of modules are not submitted."""
        return len(self._outputs)

    def submit(self, num_outputs: int) -> mx.array:
        """Submits what the next outputs of modules need, and with the last ones the rest. Returns an array that is
        evaluated then, for one thread that waits for it."""
        for _ in range(min(num_outputs, len(self._outputs))):
            last = self._outputs.popleft()
        end = mx.stop_gradient(mx.array(0))
        mx.async_eval(*([last] if self._outputs else self.encoded.arrays), end)  # type: ignore[no-untyped-call]
        return end

    def _note(self, _: int, output: Any) -> None:
        self._outputs.extend(array for _, array in tree_flatten(output) if isinstance(array, mx.array))


def _joined(parts: Sequence[EncodedImage]) -> EncodedImage | None:
    if not parts:
        return None
    layers = zip(*[part.deepstack for part in parts])
    return EncodedImage(
        mx.concatenate([part.embeddings for part in parts]), tuple(mx.concatenate(list(layer)) for layer in layers)
    )
