"""`python -m tests.replay MODEL STEP`: the costs of successive steps on a Mac, as rows of a table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from replay.encoder import Limits
from replay.metal import Replay, replay
from replay.models import CONFIGS, config_of
from replay.order import unordered
from replay.record import record
from replay.traffic import KINDS

HEADER = (
    "| model | step | ops, Mi elements a buffer | dispatches | barriers | command buffers | "
    "stalls, first step | host ahead | peak MiB | pool copies | unordered |\n" + "| --- " * 11 + "|"
)


def row(model: str, step: str, limits: Limits, found: Replay) -> str:
    """The counts of the last step, the stalls of the first, and the highest peak."""
    first, last = found.steps[0], found.steps[-1]
    cells = (
        model,
        step,
        f"{limits.num_ops}, {limits.num_elements}",
        last.num_dispatches,
        last.num_barriers,
        last.num_command_buffers,
        first.num_stalls,
        f"{last.lead:.0%}",
        found.peak_bytes >> 20,
        len(found.pool_copies),
        len(unordered(found)),
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.replay", description=__doc__)
    parser.add_argument("model", help=f"one or more of {', '.join(CONFIGS)}, with commas, or all")
    parser.add_argument("step", help=f"one or more of {', '.join(KINDS)}, with commas, or all")
    parser.add_argument("--steps", type=int, default=3, help="steps in a row, each launched before the last has ended")
    parser.add_argument("--layers", type=int, help="as many layers instead of the model's own")
    parser.add_argument("--ops", type=int, default=1000, help="operations at which a command buffer ends")
    parser.add_argument("--mb", type=int, default=96, help="2^20 elements at which it ends; 6 a GiB of memory")
    parser.add_argument("--blocks", type=int, default=4096, help="blocks of the pools")
    parser.add_argument("--memory-limit", type=int, metavar="MIB", help="temporaries at which MLX waits for the GPU")
    options = parser.parse_args()
    print(HEADER)
    memory = None if options.memory_limit is None else options.memory_limit << 20
    limits = Limits(options.ops, options.mb, memory)
    for model in CONFIGS if options.model == "all" else options.model.split(","):
        for step in KINDS if options.step == "all" else options.step.split(","):
            graph = record(
                config_of(model, options.layers),
                KINDS[step],
                num_steps=options.steps,
                num_elements=options.mb,
                num_blocks=options.blocks,
            )
            print(row(model, step, limits, replay(graph, limits)), flush=True)


if __name__ == "__main__":
    main()
