"""Keeps a Mac awake while there is work: when nobody touches it, macOS puts it to sleep in the middle of answers."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
from collections.abc import Callable

from mlx_server.environment import is_mac

logger = logging.getLogger(__name__)

_PROGRAM = "/usr/bin/caffeinate"
_LOOK_S = 1.0
_LINGER_S = 30.0
"""Clients of agents ask again within this time; a Mac sleeps after a minute at the earliest."""


async def keep_awake(is_busy: Callable[[], bool]) -> None:
    """Keeps a Mac from sleeping while `is_busy()`, and for half a minute after. A child process does so, which ends
    with this one. To be run as a task, and cancelled at the end; returns at once elsewhere than on a Mac."""
    if not is_mac():
        return
    command = [_PROGRAM, "-i", "-w", str(os.getpid())]
    loop = asyncio.get_running_loop()
    try:
        while True:
            if not is_busy():
                await asyncio.sleep(_LOOK_S)
                continue
            # Without `close_fds`, Python need not fork a process that has a model in memory.
            with await asyncio.to_thread(subprocess.Popen, command, close_fds=False) as holder:
                try:
                    end_s = loop.time() + _LINGER_S
                    while loop.time() < end_s and holder.poll() is None:
                        await asyncio.sleep(_LOOK_S)
                        end_s = loop.time() + _LINGER_S if is_busy() else end_s
                finally:
                    holder.kill()
    except OSError as error:
        logger.warning("This Mac may sleep while it works: %s cannot be started (%s)", _PROGRAM, error.strerror)
