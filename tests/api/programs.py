"""Programs that tests run to their end: clients in other languages, and agents."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

_MAX_S = 120
"""More than any takes on a busy machine."""


async def output_of(
    *command: str | Path, cwd: Path, env: Mapping[str, str] | None = None, given: bytes | None = None
) -> str:
    """What a program prints that is `given` so much on its standard input. It must end well, and soon."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env=env,
        stdin=asyncio.subprocess.DEVNULL if given is None else asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, errors = await asyncio.wait_for(process.communicate(given), _MAX_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, out.decode() + errors.decode()
    return out.decode()
