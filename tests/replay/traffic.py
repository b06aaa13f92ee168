"""Steps as a scheduler makes them: requests that decode, and prompts in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import NewRequestData, ScheduledChunk, SchedulerOutput
from mlx_server.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Traffic:
    """The first of several steps: the context lengths of requests that decode, and the chunks of prompts with the
    number of tokens before them. All requests continue in each further step. If their tokens are `known`, like forced
    ones, a step depends on the one before only through the pools."""

    decodes: tuple[int, ...] = ()
    prompts: tuple[tuple[int, int], ...] = ()
    known: bool = False

    def step(self, index: int, num_groups: int) -> SchedulerOutput:
        """Step number `index`; each request has new blocks in every layer group."""
        spans = [(start + index, 1) for start in self.decodes]
        spans += [(start + index * length, length) for start, length in self.prompts]
        chunks = []
        first_block = 1
        for request, (start, length) in enumerate(spans):
            total = -(-(start + length) // BLOCK_SIZE)
            known = -(-start // BLOCK_SIZE) if index else 0
            blocks = tuple(range(first_block + known, first_block + total))
            first_block += -(-(start + (8 - index) * length) // BLOCK_SIZE) + 1  # the most that the request takes
            is_in_flight = index > 0 and request < len(self.decodes) and not self.known
            chunks.append(
                ScheduledChunk(
                    request_id=str(request),
                    start=start,
                    num_tokens=length,
                    token_ids=None if is_in_flight else (1,) * length,
                    new_block_ids=(blocks,) * num_groups if blocks else (),
                    is_sampling=True,
                    num_output_tokens=index,
                )
            )
        new = [
            NewRequestData(chunk.request_id, (1,) * (chunk.start + 1), (), SamplingParams(), frozenset())
            for chunk in chunks
            if index == 0
        ]
        return SchedulerOutput(index, tuple(chunks), tuple(new))


@dataclass(frozen=True, slots=True)
class Drafting:
    """Requests with these context lengths, for which `depth` tokens are drafted at a time and all accepted: a step of
    one token each, and then rounds of a burst and the step that checks it."""

    requests: tuple[int, ...] = (100, 700)
    depth: int = 4

    def steps(self, num_rounds: int, num_groups: int = 1, num_draft_groups: int = 1) -> Iterator[SchedulerOutput]:
        """For a model and a drafter whose layers are in so many groups."""
        starts = {str(number): start for number, start in enumerate(self.requests)}
        new = tuple(
            NewRequestData(name, (1,) * (start + 1), (), SamplingParams(), frozenset())
            for name, start in starts.items()
        )
        most = max(self.requests) + (num_rounds + 1) * (self.depth + 1)
        per_request = -(-most // BLOCK_SIZE)
        firsts = {name: 1 + number * per_request for number, name in enumerate(starts)}
        later = len(starts) * per_request

        def step(
            index: int, behind: int, count: int, *, groups: int, is_new: bool = False, num_drafts: int = 0
        ) -> SchedulerOutput:
            blocks = {
                name: tuple(tuple(range(first + later * g, first + later * g + per_request)) for g in range(groups))
                for name, first in firsts.items()
            }
            chunks = [
                ScheduledChunk(
                    name,
                    start + behind,
                    max(count, 1),
                    (1,) * count or None,
                    blocks[name] if is_new else (),
                    True,
                    behind,
                    num_drafts=num_drafts,
                )
                for name, start in starts.items()
            ]
            return SchedulerOutput(index, tuple(chunks), new if is_new else ())

        yield step(0, 0, 1, groups=num_groups, is_new=True)
        for number in range(num_rounds):
            first = number * (self.depth + 1)
            burst = [step(-1, first, 1, groups=num_draft_groups, is_new=not number)]
            burst += [step(-1, first + place, 0, groups=num_draft_groups) for place in range(1, self.depth)]
            yield SchedulerOutput(2 * number + 1, (), draft_steps=tuple(burst))
            yield step(2 * number + 2, first + 1, self.depth + 1, groups=num_groups, num_drafts=self.depth)


KINDS = {
    "decode": Traffic(decodes=(1000,) * 8),
    "decode-1": Traffic(decodes=(1000,)),
    "decode-64": Traffic(decodes=(1000,) * 64),
    "prefill": Traffic(prompts=((0, 2048),)),
    "prefill-512": Traffic(prompts=((0, 512),)),
    "prefill-at-30k": Traffic(prompts=((30720, 2048),)),
    "mixed": Traffic(decodes=(1000,) * 8, prompts=((4096, 2040),)),
    "chunks": Traffic(prompts=((512, 512),) * 4),
}
