"""Which addresses a page may be fetched from: the public internet, and nothing behind it.

A model chooses the URLs, and pages choose their links and redirects. So each request is checked
at the last moment, on the address that is then connected to: a name is looked up once, all its
addresses must be public, and the connection goes to a checked address and not to the name. A
name that gives another answer a second later (DNS rebinding) gains nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence

import httpx

from mempo.core import ToolError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Lookup = Callable[[str, int], Awaitable[list[str]]]
"""Host and port to addresses as text."""

SCHEMES = {"http": 80, "https": 443}
GLOBAL_IPV6 = ipaddress.IPv6Network("2000::/3")
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class UnsafeUrlError(ToolError):
    """A URL leads, or may lead, to something that is not a public web page."""


def is_public(address: Address) -> bool:
    """Whether an address is on the public internet.

    Not so are private, loopback, link-local, shared, reserved, multicast and unspecified ones, and
    IPv6 addresses that stand for an IPv4 address (mapped, 6to4, Teredo, NAT64): none of them is
    needed, and each is a way around a check of the plain form.

    >>> [is_public(ipaddress.ip_address(text)) for text in ("93.184.215.14", "2606:2800::1")]
    [True, True]
    >>> [is_public(ipaddress.ip_address(text)) for text in ("10.1.2.3", "169.254.169.254", "::ffff:8.8.8.8", "::")]
    [False, False, False, False]
    """
    if isinstance(address, ipaddress.IPv6Address) and (
        address not in GLOBAL_IPV6 or address.sixtofour is not None or address.teredo is not None
    ):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def check_url(url: str) -> httpx.URL:
    """The URL, where it is http(s), has a host and no user name, and writes addresses plainly.

    Raises UnsafeUrlError. Where its name leads is not looked at here.

    >>> str(check_url("https://example.org/page?x=1"))
    'https://example.org/page?x=1'
    >>> check_url("http://2130706433/")
    Traceback (most recent call last):
    mempo.retrieval.safety.UnsafeUrlError: refused: '2130706433' is an address in disguise, write it as a.b.c.d
    """
    try:
        parsed = httpx.URL(url)
        host = parsed.host  # decoded only here: `http://xn--/` is a URL until then
    except (httpx.InvalidURL, UnicodeError) as error:
        raise UnsafeUrlError(f"refused: not a URL ({error})") from error
    if parsed.scheme not in SCHEMES:
        raise UnsafeUrlError(f"refused: only http:// and https:// pages can be fetched, not {parsed.scheme!r}")
    if not host:
        raise UnsafeUrlError("refused: the URL has no host")
    if parsed.port is not None and not 0 < parsed.port < 2**16:
        raise UnsafeUrlError(f"refused: no port has the number {parsed.port}")
    if parsed.userinfo:
        raise UnsafeUrlError("refused: the URL holds a user name or password")
    host = host.rstrip(".")
    if _address(host) is None and _is_numeric(host):
        raise UnsafeUrlError(f"refused: {host!r} is an address in disguise, write it as a.b.c.d")
    return parsed


async def system_lookup(host: str, port: int) -> list[str]:
    """The addresses of a name, as the operating system knows them."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(sockaddr[0]) for *_, sockaddr in found]


async def safe_address(
    host: str, port: int, *, allow: Sequence[Network] = (), lookup: Lookup = system_lookup
) -> Address:
    """An address of `host` that may be connected to.

    Raises UnsafeUrlError where any of its addresses is neither public nor in one of the networks
    `allow`, ToolError where it has none.
    """
    literal = _address(host)
    try:
        answers = [str(literal)] if literal is not None else await lookup(host, port)
    except (OSError, UnicodeError) as error:
        raise ToolError(f"cannot find the host {host!r} ({error})") from error
    addresses = [ipaddress.ip_address(answer) for answer in answers]
    if not addresses:
        raise ToolError(f"cannot find the host {host!r}")
    for address in addresses:
        if not is_public(address) and not any(address in network for network in allow):
            raise UnsafeUrlError(f"refused: {host} leads to {address}, which is not a public address")
    return addresses[0]


class SafeTransport(httpx.AsyncBaseTransport):
    """Sends requests to public addresses only, and to the very address that was checked.

    The Host header and the name in the TLS handshake (and so on the certificate) stay the URL's.
    Connections are not kept: two names may share an address, and the second must not talk
    through the first one's certificate.
    """

    def __init__(self, *, allow: Sequence[Network] = (), lookup: Lookup = system_lookup) -> None:
        self._allow = allow
        self._lookup = lookup
        self._transport = httpx.AsyncHTTPTransport(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = check_url(str(request.url))
        port = url.port or SCHEMES[url.scheme]
        address = await safe_address(url.host, port, allow=self._allow, lookup=self._lookup)
        pinned = httpx.Request(
            method=request.method,
            url=url.copy_with(host=str(address)),
            headers=request.headers,
            stream=request.stream,
            extensions={**request.extensions, "sni_hostname": url.raw_host.decode("ascii")},
        )
        return await self._transport.handle_async_request(pinned)

    async def aclose(self) -> None:
        await self._transport.aclose()


def _address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_numeric(host: str) -> bool:
    """Whether the C library reads the host as an IPv4 address in another notation (127.1, 0x7f.1, 017700000001)."""
    try:
        socket.inet_aton(host)
    except (OSError, UnicodeError):
        return False
    return True
