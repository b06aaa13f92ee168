"""HTTPS with a certificate of one's own."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from mlx_server.api.http.connections import READ_BYTES, BoundedProtocol
from mlx_server.api.http.listener import check_tls, local_url
from mlx_server.cli.remote import RemoteError, RemoteServer
from mlx_server.config import ServerConfig
from mlx_server.errors import ConfigError
from tests.api.worlds import World, running
from tests.attack.tiers_world import served

pytestmark = pytest.mark.asyncio(loop_scope="session")


@dataclass(frozen=True)
class Files:
    cert: str
    key: str


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Files]:
    def make(*options: str) -> Files:
        folder = tmp_path_factory.mktemp("tls")
        cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
        what = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-days", "2"]
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-keyout", key, "-out", cert, *what, *options]
        subprocess.run(command, check=True, capture_output=True)
        return Files(cert, key)

    return make


@pytest.fixture(scope="module")
def files(make: Callable[..., Files]) -> Files:
    return make("-nodes")


async def test_answers_are_encrypted(world: World, files: Files):
    async with running(world._site._switch, tls_cert=files.cert, tls_key=files.key) as url:
        secure = url.replace("http:", "https:")
        async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=files.cert)) as http:
            assert (await http.get(f"{secure}/health")).status_code == 200
            text = (await http.post(f"{secure}/v1/completions", json={"prompt": "a", "stream": True})).text
            assert text.endswith("data: [DONE]\n\n")
        async with httpx.AsyncClient() as http:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await http.get(f"{secure}/health")
            with pytest.raises(httpx.HTTPError):
                await http.get(f"{url}/health")


async def test_encrypted_bodies_are_parsed_in_small_pieces(world: World, files: Files, monkeypatch: pytest.MonkeyPatch):
    """So that other connections have their turn between; a record of TLS has up to 16 KiB."""
    sizes: list[int] = []
    receive = BoundedProtocol.data_received

    def recorded(self: BoundedProtocol, data: bytes) -> None:
        sizes.append(len(data))
        receive(self, data)

    monkeypatch.setattr(BoundedProtocol, "data_received", recorded)
    async with (
        running(world._site._switch, tls_cert=files.cert, tls_key=files.key) as url,
        httpx.AsyncClient(verify=ssl.create_default_context(cafile=files.cert)) as http,
    ):
        body = {"prompt": "a", "user": "x" * 2_000_000}
        answer = await http.post(f"{url.replace('http:', 'https:')}/v1/completions", json=body)
    assert answer.status_code == 200
    assert sum(sizes) > 2_000_000
    assert max(sizes) <= 16 * 1024 + READ_BYTES


@pytest.mark.slow
async def test_the_server_says_https_and_the_commands_believe_its_certificate(
    tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch
):
    async with served(tmp_path, f'tls_cert = "{files.cert}"\ntls_key = "{files.key}"') as server:
        assert server.url.startswith("https://127.0.0.1:")
        stranger = RemoteServer(server.url)
        with pytest.raises(RemoteError, match=r"The certificate of https://\S+ is not trusted: .*; SSL_CERT_FILE=cert"):
            await asyncio.to_thread(stranger.request, "GET", "/version")
        monkeypatch.setenv("SSL_CERT_FILE", files.cert)
        remote = RemoteServer(server.url)
        assert "version" in await asyncio.to_thread(remote.request, "GET", "/version")
        remote.close()


def refusal(cert: str | None, key: str | None) -> str:
    with pytest.raises(ConfigError) as caught:
        check_tls(ServerConfig(tls_cert=cert, tls_key=key))
    return caught.value.message


async def test_what_cannot_be_used_is_named(make: Callable[..., Files], files: Files, tmp_path: Path):
    other, locked = make("-nodes"), make("-passout", "pass:secret")
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    assert refusal(files.cert, None) == "tls_cert is set and tls_key is not; give both, or neither for plain HTTP."
    assert refusal(None, files.key) == "tls_key is set and tls_cert is not; give both, or neither for plain HTTP."
    assert refusal(files.cert, "nowhere.pem") == "tls_key: nowhere.pem cannot be read: No such file or directory."
    assert "the key does not belong to the certificate" in refusal(files.cert, other.key)
    assert "cannot be used" in refusal(str(junk), files.key)
    assert "tls_key is encrypted" in refusal(locked.cert, locked.key)
    check_tls(ServerConfig())
    check_tls(ServerConfig(tls_cert=files.cert, tls_key=files.key))


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("192.0.2.1", "http://192.0.2.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
    ],
)
async def test_a_server_on_all_addresses_is_reported_by_one_that_can_be_opened(host: str, url: str) -> None:
    assert local_url(ServerConfig(), host, 80) == url
    assert local_url(ServerConfig(tls_cert="cert.pem"), host, 80) == url.replace("http:", "https:")
