"""`unshare -rn python -m tests.engine.distributed.switched_off`: two ranks in networks of their own, of which one is
cut off. Prints how the other one notices."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys

from mlx_server.engine.distributed.rank_link import Link, RankLostError, Stop

HERE, THERE = "10.77.0.1", "10.77.0.2"
MAY_MAKE_NETWORKS = (
    shutil.which("ip") is not None
    and shutil.which("unshare") is not None
    and subprocess.run(["unshare", "-rn", "unshare", "-n", "true"], capture_output=True).returncode == 0
)


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)


def other(token: bytes) -> None:
    """The rank that is cut off."""
    sys.stdin.readline()
    ip(f"addr add {THERE}/24 dev there")
    ip("link set there up")
    link = Link(socket.create_connection((HERE, 7777), 30), token, is_leader=False)
    link.receive()
    ip("link set there down")
    with contextlib.suppress(RankLostError):  # it notices, too
        link.receive()


def main() -> None:
    token = secrets.token_bytes(32)
    command = ["unshare", "-n", sys.executable, "-m", __spec__.name, token.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        while os.readlink(f"/proc/{process.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            pass
        ip(f"link add here type veth peer name there netns {process.pid}")
        ip(f"addr add {HERE}/24 dev here")
        ip("link set here up")
        with socket.create_server((HERE, 7777)) as server:
            process.stdin.write("go\n")
            process.stdin.flush()
            link = Link(server.accept()[0], token, is_leader=True)
        link.send(Stop(0))
        try:
            link.receive()
        except RankLostError as lost:
            print(lost)
        process.kill()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        other(bytes.fromhex(sys.argv[1]))
    else:
        main()
