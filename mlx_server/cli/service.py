"""The launchd agent of this user: where it is, how launchctl names it, and how it ends."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

LABEL = "io.mlx-serve.server"

_END_TIMEOUT_S = 60.0
_POLL_S = 0.2


def agent_path() -> Path:
    return Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"


def launchctl(action: str) -> list[str]:
    """The command that starts (`bootstrap`), ends (`bootout`) or shows (`print`) the agent in the user's own
    session."""
    domain = f"gui/{os.getuid()}"
    return ["launchctl", action, *([domain, str(agent_path())] if action == "bootstrap" else [f"{domain}/{LABEL}"])]


def end_agent() -> None:
    """Ends the agent where it runs. launchd only asks it to, and takes no new one until the old one has drained its
    streams, so this waits for that."""
    subprocess.run(launchctl("bootout"), check=False, capture_output=True)
    deadline = time.monotonic() + _END_TIMEOUT_S
    while _is_known() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _is_known() -> bool:
    return subprocess.run(launchctl("print"), check=False, capture_output=True).returncode == 0
