"""Images of requests: fetched or read, and decoded in threads.

Nothing is fetched and no file is read unless the server's settings allow it. An allowed host must not become a way into
the server's own network: its name must not lead to a private address, and a redirect must stay on the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import ssl
import stat
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import httpx

from mlx_server.config import ServerConfig
from mlx_server.engine.fair_slots import FairSlots, Requester, Slot, in_daemon_thread, in_executor, shielded
from mlx_server.engine.vision.decoding import MAX_BYTES, UnreadableImageError, read_base64
from mlx_server.engine.vision.families import PreparedImage
from mlx_server.engine.vision.parts import ImageParts, Pictures, TooManyImagesError
from mlx_server.engine.vision.seeing import SeeingModel
from mlx_server.environment import expanded
from mlx_server.errors import ContextLengthError, InvalidRequestError, OverloadedError, QueueTimeoutError
from mlx_server.setting import parse_hosts

FETCH_S = 10.0
"""The longest that fetching one image may take, redirects included."""

ALL_FETCHES_S = 30.0
"""The same for all images of a request together."""

MAX_WAIT_S = 30.0
"""The longest that an image waits for a slot to be fetched, and for a slot to be decoded."""

MAX_REDIRECTS = 3
MAX_PREPARED_BYTES = 1024 * 2**20
"""The most bytes of inputs made from one request's images, which stay in memory while it waits."""

MAX_HELD_BYTES = 3072 * 2**20
"""The most bytes of inputs from images of all open requests. A key's next image is refused while those that it has take
more than twice of what is left: one key alone has at most 2 GiB, a second one then 2/3 GiB."""

_HELD_RETRY_S = 5.0
_NUM_THREADS = 4
_NUM_FETCHES = 8
_MAX_SHOWN_CHARS = 100
_MAX_PORT = 65535

_UNICAST = ipaddress.IPv6Network("2000::/3")
"""All addresses of IPv6 that are given out on the internet."""

_WITH_IPV4 = (ipaddress.IPv6Network("::ffff:0:0/96"), ipaddress.IPv6Network("64:ff9b::/96"))
"""Mapped addresses and those of NAT64, which lead to the IPv4 address in their last 32 bits."""


class RequestImages:
    """The images of one request that were prepared, or could not be read, by source; and the time in seconds that is
    left for fetching. It runs only while an image is fetched, not while one waits for a slot. If the request `may_cut`,
    an unreadable image is no error until the chat with it is used: `error` is that of the chat prepared last."""

    def __init__(self, *, may_cut: bool = False) -> None:
        self.by_source: dict[str, PreparedImage | UnreadableImageError] = {}
        self.left_s = ALL_FETCHES_S
        self.may_cut = may_cut
        self.error: InvalidRequestError | None = None

    @contextlib.asynccontextmanager
    async def fetching(self) -> AsyncIterator[None]:
        """Around one fetch. Raises `TimeoutError`."""
        time = asyncio.get_running_loop().time
        start_s = time()
        try:
            async with asyncio.timeout(min(self.left_s, FETCH_S)):
                yield
        finally:
            self.left_s -= time() - start_s


class ImageLoader:
    """The images of one server's requests. Event-loop thread only."""

    def __init__(self, server: ServerConfig) -> None:
        self._hosts = frozenset(parse_hosts(server.allowed_media_domains))
        self._folder = None if server.allowed_media_path is None else expanded(server.allowed_media_path)
        self._max_pixels = server.max_image_pixels
        self._slots = FairSlots(_NUM_THREADS)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="images")
        self._fetches = FairSlots(_NUM_FETCHES)
        self._look_ups = asyncio.Semaphore(_NUM_FETCHES)
        self._tls: ssl.SSLContext | None = None
        self._held = HeldArrays()

    async def prepare(
        self, model: SeeingModel, parts: ImageParts, requester: Requester, max_model_len: int, known: RequestImages
    ) -> Pictures:
        """Prepares the images of `parts` for the model, one after the other, except `known` ones; skips unreadable ones
        that a note may replace. Raises `InvalidRequestError` with the image's path, `ContextLengthError` once they
        cannot fit, and `OverloadedError` while the images of other requests take all the memory for images."""
        prepared: dict[int, PreparedImage] = {}
        num_tokens = num_bytes = 0
        for index, part in enumerate(parts.found):
            num_left, num_own = MAX_HELD_BYTES - self._held.num_bytes, self._held.of(requester.key)
            if num_own > 2 * num_left:
                raise OverloadedError(
                    f"Images of this key's open requests take {num_own:,} bytes as models' inputs, more than twice "
                    f"what is left of the {MAX_HELD_BYTES:,} for all keys. Try again when some requests have ended.",
                    _HELD_RETRY_S,
                )
            if part.source not in known.by_source:
                known.by_source[part.source] = await self._prepared(model, part.source, requester, known)
            image = known.by_source[part.source]
            if isinstance(image, UnreadableImageError):
                if not part.is_noted:
                    known.error = known.error or InvalidRequestError(
                        f"{part.where} is an image that {image}.", part.where
                    )
                    if not known.may_cut:
                        raise known.error from image
                continue
            prepared[index] = image
            self._held.add(image, requester.key)
            num_tokens, num_bytes = num_tokens + image.num_tokens, num_bytes + image.num_bytes
            if num_tokens >= max_model_len:
                raise ContextLengthError.of_prompt(
                    f"at least {num_tokens}",
                    max_model_len,
                    f"Already its first {len(prepared)} images have so many. Send fewer or smaller images.",
                )
            if num_bytes > MAX_PREPARED_BYTES:
                raise TooManyImagesError(
                    f"The first {len(prepared)} images take {num_bytes:,} bytes as the model's inputs; one request "
                    f"may have {MAX_PREPARED_BYTES:,}. Send fewer or smaller images.",
                    part.where,
                )
        return Pictures(model, parts, prepared)

    async def _prepared(
        self, model: SeeingModel, source: str, requester: Requester, known: RequestImages
    ) -> PreparedImage | UnreadableImageError:
        scheme = source[:8].lower()
        fetched: bytes | None = None

        def work() -> PreparedImage:
            data = fetched
            if data is None:
                data = _read_file(source, self._folder) if scheme.startswith("file:") else read_base64(source)
            return model.prepare(data, self._max_pixels, requester.key)

        try:
            if scheme.startswith(("http:", "https:")):
                fetched = await self._fetch(source, requester, known)
            slot = await _turn(self._slots, requester, "decoded")
            return await in_executor(self._threads, work, slot.release)
        except UnreadableImageError as error:
            return error

    async def _fetch(self, url: str, requester: Requester, known: RequestImages) -> bytes:
        slot = await _turn(self._fetches, requester, "fetched")
        try:
            if self._tls is None:  # reads all authorities' certificates, which takes a tenth of a second and more
                self._tls = await asyncio.to_thread(httpx.create_ssl_context, trust_env=False)
            async with known.fetching():
                return await fetch(url, self._hosts, self._tls, self._look_up)
        except TimeoutError:
            raise UnreadableImageError(
                f"took more than {FETCH_S:g} s to fetch, or {ALL_FETCHES_S:g} s with those before it. Send it as a "
                "data URL"
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise UnreadableImageError(
                f"could not be fetched ({type(error).__name__}). Check the URL, or send it as a data URL"
            ) from error
        finally:
            slot.release()

    async def _look_up(self, host: str, port: int) -> list[str]:
        """The addresses of a host. Nothing can end a look-up, which may take half a minute: so it goes on if its client
        leaves, without the threads that everything else needs and without delaying the process's end, and only
        `_NUM_FETCHES` run at a time."""
        await self._look_ups.acquire()
        ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        looking = asyncio.ensure_future(in_daemon_thread(ask))
        looking.add_done_callback(lambda _: self._look_ups.release())
        return [str(sockaddr[0]) for *_, sockaddr in await shielded(looking)]


class HeldArrays:
    """Counts the bytes of arrays that are still in use, by owner, each array once even if several requests share it.
    `add` is for one thread; arrays may be freed in any."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[str, int]] = {}  # by `id` of the array, which is used again once it is freed
        self._gone: deque[int] = deque()
        self._num_bytes: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """Of all owners."""
        self._forget()
        return self._num_bytes.total()

    def of(self, owner: str) -> int:
        """The bytes of one owner's arrays."""
        self._forget()
        return self._num_bytes[owner]

    def add(self, image: PreparedImage, owner: str) -> None:
        self._forget()
        for array in (array for piece in image.pieces for array in piece.inputs.values()):
            if id(array) not in self._sizes:
                self._sizes[id(array)] = (owner, array.nbytes)
                self._num_bytes[owner] += array.nbytes
                weakref.finalize(array, self._gone.append, id(array)).atexit = False

    def _forget(self) -> None:
        while self._gone:
            owner, num_bytes = self._sizes.pop(self._gone.popleft())
            self._num_bytes[owner] -= num_bytes
            if not self._num_bytes[owner]:
                del self._num_bytes[owner]


async def _turn(slots: FairSlots, requester: Requester, what: str) -> Slot:
    """A slot for the requester. Raises `QueueTimeoutError` after `MAX_WAIT_S`."""
    try:
        async with asyncio.timeout(MAX_WAIT_S):
            return await slots.acquire(requester)
    except TimeoutError:
        raise QueueTimeoutError(
            f"An image has waited {MAX_WAIT_S:g} s to be {what}, the longest allowed; {slots.num_waiting} images of "
            "other requests are waiting. Try again later.",
            retry_after_s=MAX_WAIT_S / 3,
        ) from None


def _read_file(url: str, folder: Path | None) -> bytes:
    """The bytes of a regular file within `folder`; links are resolved first."""
    if folder is None:
        raise UnreadableImageError(
            "is a file of this machine, which the server's settings do not allow. Send it as a data URL, or start the "
            "server with --allowed-media-path"
        )
    host, slash, name = url[len("file:") :].removeprefix("//").partition("/")
    path = Path(unquote(slash + name))
    try:
        root, real = folder.resolve(), path.resolve()
        if host not in ("", "localhost") or not real.is_relative_to(root):
            raise UnreadableImageError(
                f"is not in the folder that files may be read from (--allowed-media-path): {url[:_MAX_SHOWN_CHARS]!r}. "
                "Put it there, or send it as a data URL"
            )
        return _read_regular(real)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        raise UnreadableImageError(f"cannot be read from {url[:_MAX_SHOWN_CHARS]!r}. Check the path") from error


def _read_regular(path: Path) -> bytes:
    """Refuses devices, which might never end, and large files."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableImageError("is no file. Check the path")
        if status.st_size > MAX_BYTES:
            raise _too_large(status.st_size)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(MAX_BYTES)
    finally:
        os.close(descriptor)


def _too_large(num_bytes: int) -> UnreadableImageError:
    return UnreadableImageError(f"has {num_bytes:,} bytes or more; {MAX_BYTES:,} are read at most. Send it smaller")


LookUp = Callable[[str, int], Awaitable[list[str]]]
"""Finds the addresses of a host for a port. Raises `OSError`."""


async def fetch(url: str, hosts: Collection[str], tls: ssl.SSLContext, look_up: LookUp) -> bytes:
    """The bytes at a URL of one of `hosts`, after redirects on that host. Raises `UnreadableImageError`, and what httpx
    and `look_up` raise."""
    parsed = _checked(httpx.URL(url), hosts)
    async with httpx.AsyncClient(verify=tls, trust_env=False, timeout=FETCH_S) as client:
        for _ in range(MAX_REDIRECTS + 1):
            request = await _request(client, parsed, look_up)
            response = await client.send(request, stream=True)
            try:
                if not response.has_redirect_location:
                    return await _body(response)
                # Not `response.next_request`, whose host is the address that was connected to.
                target = parsed.join(response.headers["location"])
            finally:
                await response.aclose()
            if target.host != parsed.host or (parsed.scheme, target.scheme) == ("https", "http"):
                raise UnreadableImageError(
                    f"is redirected from {parsed.host} to {target.scheme}://{target.host[:_MAX_SHOWN_CHARS]}; "
                    "redirects must stay on their host. Send the last address"
                )
            parsed = _checked(target, hosts)
    raise UnreadableImageError(f"is redirected more than {MAX_REDIRECTS} times. Send the last address")


def _checked(url: httpx.URL, hosts: Collection[str]) -> httpx.URL:
    host = url.raw_host.decode("ascii").lower()
    if url.scheme not in ("http", "https") or host not in hosts:
        shown = ", ".join(sorted(hosts)) or "none"
        raise UnreadableImageError(
            f"is at {host[:_MAX_SHOWN_CHARS]!r}, and images are fetched from these hosts only: {shown}. Send it as a "
            "data URL, or start the server with --allowed-media-domains"
        )
    if (url.port or 0) > _MAX_PORT:
        raise UnreadableImageError(f"is at port {url.port}; the highest is {_MAX_PORT}. Check the URL")
    return url


async def _request(client: httpx.AsyncClient, url: httpx.URL, look_up: LookUp) -> httpx.Request:
    """To an address that was looked up and checked here, since a second look-up might give another."""
    address = await _address(url, look_up)
    headers = {"host": url.netloc.decode("ascii"), "accept": "image/*", "accept-encoding": "identity"}
    return client.build_request(
        "GET", url.copy_with(host=address), headers=headers, extensions={"sni_hostname": url.raw_host.decode("ascii")}
    )


async def _address(url: httpx.URL, look_up: LookUp) -> str:
    """The host's first address. Raises `UnreadableImageError` if one of its addresses is not public. An allowed host
    that is itself an address, or is localhost, may be private."""
    if url.host == "localhost" or _is_address(url.host):
        return "127.0.0.1" if url.host == "localhost" else url.host
    addresses = await look_up(url.host, url.port or (443 if url.scheme == "https" else 80))
    private = [address for address in addresses if not _is_public(ipaddress.ip_address(address.partition("%")[0]))]
    if private or not addresses:
        raise UnreadableImageError(
            f"is at {url.host}, which is {private[0] if private else 'nowhere'}: names must lead to public addresses. "
            "Name the address itself with --allowed-media-domains, or send it as a data URL"
        )
    return addresses[0]


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether a host of the internet may have the address. IPv4 addresses within IPv6 ones are judged by their own."""
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not address.is_multicast
    if any(address in network for network in _WITH_IPV4):
        return _is_public(ipaddress.IPv4Address(address.packed[-4:]))
    if (inner := address.sixtofour) is not None:
        return _is_public(inner)
    return address in _UNICAST and address.is_global


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _body(response: httpx.Response) -> bytes:
    if response.status_code != 200:
        raise UnreadableImageError(f"was answered with status {response.status_code}. Check the URL")
    if response.headers.get("content-encoding", "identity") != "identity":  # a few bytes may expand to gigabytes
        raise UnreadableImageError("is sent compressed, although that was not asked for. Send it as a data URL")
    declared = response.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BYTES:
        raise _too_large(int(declared))
    pieces, num_bytes = [], 0
    async for piece in response.aiter_raw():
        num_bytes += len(piece)
        if num_bytes > MAX_BYTES:
            raise _too_large(num_bytes)
        pieces.append(piece)
    return b"".join(pieces)
