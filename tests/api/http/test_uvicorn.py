"""What our protocol takes from uvicorn's private classes is there, with the signatures that it overrides and calls."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any, get_type_hints

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from mlx_server.api import server
from mlx_server.api.http.connections import BoundedProtocol, _ChunkWriter

CHECK = (
    f"This is uvicorn {uvicorn.__version__}. Compare H11Protocol and FlowControl with BoundedProtocol and _ChunkWriter "
    "in api/http/connections.py, run tests/api/http/test_connections.py, test_slow_clients.py and test_tls*.py, then "
    "correct this test and uvicorn's bounds in pyproject.toml."
)
OVERRIDDEN = {
    "__init__": ["self", "config", "server_state", "app_state", "_loop"],
    "connection_made": ["self", "transport"],
    "connection_lost": ["self", "exc"],
    "data_received": ["self", "data"],
    "handle_events": ["self"],
    "on_response_complete": ["self"],
    "pause_writing": ["self"],
    "resume_writing": ["self"],
    "send_400_response": ["self", "msg"],
    "shutdown": ["self"],
}
OF_A_FLOW = {"read_paused", "write_paused", "drain"}
OF_A_CYCLE = {"response_started", "response_complete"}


def parameters(owner: type, name: str) -> list[str]:
    function = getattr(owner, name, None)
    assert function is not None, f"{owner.__name__} has no {name}. {CHECK}"
    return list(inspect.signature(function).parameters)


def attributes_of(cls: type, owner: str) -> set[str]:
    """The attributes of `owner`, like `self` or `self.flow`, that the class's source reads or writes."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {node.attr for node in nodes if ast.unparse(node.value) == owner}


class Transport:
    """Notes what is written."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def get_extra_info(self, name: str) -> Any:
        return None

    def is_closing(self) -> bool:
        return False


async def with_a_request() -> H11Protocol:
    """uvicorn's own protocol, with a connection and a request that was answered."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["ours"] = True  # a dict for each request
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    config, state = uvicorn.Config(app, log_config=None, interface="asgi3", lifespan="off"), ServerState()
    protocol = H11Protocol(config, state, {})
    protocol.connection_made(Transport())  # type: ignore[arg-type]
    protocol.data_received(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    (task,) = state.tasks
    await task
    protocol._unset_keepalive_if_required()
    return protocol


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_an_overridden_method_has_the_same_parameters(name: str) -> None:
    assert parameters(H11Protocol, name) == OVERRIDDEN[name], CHECK
    ours = inspect.signature(getattr(BoundedProtocol, name))
    ours.bind(*OVERRIDDEN[name])


def test_the_table_has_every_method_that_is_overridden() -> None:
    both = {name for name in vars(BoundedProtocol) if inspect.isroutine(getattr(H11Protocol, name, None))}
    assert both == OVERRIDDEN.keys(), CHECK


async def test_every_attribute_that_is_used_is_there() -> None:
    protocol = await with_a_request()
    own = {*vars(BoundedProtocol), *get_type_hints(BoundedProtocol)}
    assigned = {name for name in attributes_of(BoundedProtocol, "self") if name.startswith("_")}
    inherited = attributes_of(BoundedProtocol, "self") - own - assigned
    assert {"app", "conn", "cycle", "flow", "loop", "transport"} <= inherited
    missing = {name for name in inherited if not hasattr(protocol, name)}
    assert not missing, f"H11Protocol has no {sorted(missing)}. {CHECK}"
    clashes = {name for name in own | assigned if hasattr(protocol, name)} - OVERRIDDEN.keys()
    clashes = {name for name in clashes if not name.startswith("__")}
    assert not clashes, f"H11Protocol has {sorted(clashes)}, too. {CHECK}"


async def test_flows_cycles_and_settings_have_what_is_used() -> None:
    protocol = await with_a_request()
    used = attributes_of(BoundedProtocol, "self.flow") | attributes_of(_ChunkWriter, "self._flow")
    assert used | attributes_of(_ChunkWriter, "flow") == OF_A_FLOW
    assert attributes_of(BoundedProtocol, "cycle") == OF_A_CYCLE
    for subject, names in ((protocol.flow, OF_A_FLOW), (protocol.cycle, OF_A_CYCLE)):
        missing = {name for name in names if not hasattr(subject, name)}
        assert not missing, f"{type(subject).__name__} has no {sorted(missing)}. {CHECK}"
    assert type(protocol.flow) is FlowControl, CHECK
    assert parameters(FlowControl, "drain") == ["self"], CHECK
    assert protocol.scope["state"] == {"ours": True}, CHECK  # where a request finds its writer
    assert protocol.app_state == {}, CHECK


def test_the_server_overrides_what_installs_signal_handlers() -> None:
    ours = {name for name in vars(server._Uvicorn) if not name.startswith("__")}
    assert ours == {"capture_signals"}
    assert parameters(uvicorn.Server, "capture_signals") == ["self"], CHECK
