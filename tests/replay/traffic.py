"""Steps as a scheduler would ask for them: requests that decode, and prompts that come in chunks."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import NewRequestData, ScheduledChunk, SchedulerOutput
from mlx_server.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Traffic:
    """The first of some steps: requests that decode with so many tokens before them, and prompts of which so many
    tokens come after so many. In each further step all of them go on; if their tokens are `known`, as forced ones
    are, no step depends on the one before but through the pools."""

    decodes: tuple[int, ...] = ()
    prompts: tuple[tuple[int, int], ...] = ()
    known: bool = False

    def step(self, index: int, num_groups: int) -> SchedulerOutput:
        """Step `index`, each request with new blocks in every layer group."""
        spans = [(start + index, 1) for start in self.decodes]
        spans += [(start + index * length, length) for start, length in self.prompts]
        chunks = []
        first_block = 1
        for request, (start, length) in enumerate(spans):
            total = -(-(start + length) // BLOCK_SIZE)
            known = -(-start // BLOCK_SIZE) if index else 0
            blocks = tuple(range(first_block + known, first_block + total))
            first_block += -(-(start + (8 - index) * length) // BLOCK_SIZE) + 1  # as many as the request ever takes
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
