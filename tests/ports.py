"""Free ports for programs that cannot choose one themselves."""

from __future__ import annotations

import socket

HOST = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Different free ports. Another program may take one before it is used."""
    probes = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports
