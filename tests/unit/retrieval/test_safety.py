"""No URL that a model or a page may write leads to anything but the public internet."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.services.stubs import Reply, StubServer

from mempo.core import ToolError
from mempo.retrieval.safety import SafeTransport, UnsafeUrlError, check_url, is_public, safe_address

LOOPBACK = ipaddress.ip_network("127.0.0.0/8")


@pytest.mark.parametrize("text", ["8.8.8.8", "93.184.215.14", "172.32.0.1", "2606:4700::1111", "2a00:1450::1"])
def test_public_addresses_are_public(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize(
    "text",
    [
        *("0.0.0.0", "0.1.2.3", "127.0.0.1", "127.255.255.254"),  # this machine
        *("10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1"),  # private and shared
        *("169.254.169.254", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255"),
        *("192.0.2.1", "198.18.0.1", "203.0.113.7"),  # documentation and benchmarks
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fec0::1", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::808:808"),
        *("2002:7f00:1::", "2002:808:808::", "2001:0:1:2:3:4:5:6"),  # 6to4 and Teredo
    ],
)
def test_other_addresses_are_not_public(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_is_not_public_in_any_ipv6_dress(address: ipaddress.IPv4Address) -> None:
    number = int(address)
    for dressed in (number, 0xFFFF << 32 | number, 0x64FF9B << 96 | number, 0x2002 << 112 | number << 80):
        assert not is_public(ipaddress.IPv6Address(dressed))


@pytest.mark.parametrize(
    "url",
    [
        *("file:///etc/passwd", "ftp://example.org/", "gopher://example.org/", "javascript:alert(1)", "data:,x"),
        *(
            "//example.org/",
            "example.org",
            "",
            "http://",
            "http:///path",
            "http://exa\x00mple/",
            "http://[::1",
            "http://xn--/",
        ),
        *("http://user@example.org/", "http://user:pw@example.org/", "http://example.org@127.0.0.1/"),
        *("http://2130706433/", "http://017700000001/", "http://0x7f000001/", "http://0x7f.1/", "http://127.1/"),
        *("http://0177.0.0.1/", "http://127.0.0.1.:99999/", "http://example.org:0/", "http://example.org:65536/"),
    ],
)
def test_urls_that_are_not_plain_web_addresses_are_refused(url: str) -> None:
    with pytest.raises(UnsafeUrlError, match="refused"):
        check_url(url)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "0.0.0.0", "localhost", "169.254.169.254"])
async def test_hosts_of_this_machine_and_network_are_refused(host: str) -> None:
    with pytest.raises(UnsafeUrlError, match="not a public address"):
        await safe_address(host, 80)


async def test_a_name_with_one_private_address_among_public_ones_is_refused() -> None:
    async def lookup(host: str, port: int) -> list[str]:
        return ["93.184.215.14", "10.0.0.1"]

    with pytest.raises(UnsafeUrlError, match=r"mixed\.example leads to 10\.0\.0\.1"):
        await safe_address("mixed.example", 80, lookup=lookup)


async def test_an_unknown_name_is_an_ordinary_failure() -> None:
    async def lookup(host: str, port: int) -> list[str]:
        raise socket.gaierror(-2, "Name or service not known")

    with pytest.raises(ToolError, match=r"cannot find the host 'nowhere\.example'") as caught:
        await safe_address("nowhere.example", 80, lookup=lookup)
    assert not isinstance(caught.value, UnsafeUrlError)


async def test_allowed_networks_are_an_explicit_exception() -> None:
    assert str(await safe_address("127.0.0.1", 80, allow=[LOOPBACK])) == "127.0.0.1"
    with pytest.raises(UnsafeUrlError):
        await safe_address("10.0.0.1", 80, allow=[LOOPBACK])


async def test_the_connection_goes_to_the_checked_address_under_the_urls_name() -> None:
    lookups: list[str] = []

    async def lookup(host: str, port: int) -> list[str]:
        lookups.append(host)
        return ["127.0.0.1"]

    with StubServer(lambda _: Reply(200, b"hello")) as server:
        transport = SafeTransport(allow=[LOOPBACK], lookup=lookup)
        async with httpx.AsyncClient(transport=transport, trust_env=False) as client:
            answer = await client.get(f"http://site.example:{server.port}/page")
    assert answer.text == "hello"
    assert lookups == ["site.example"]  # the operating system, which does not know the name, is never asked
    assert server.requests[0].headers["host"] == f"site.example:{server.port}"


async def test_the_tls_handshake_asks_for_the_urls_name_and_not_for_the_address() -> None:
    asked: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sni_callback = lambda _socket, name, _context: asked.append(name)  # comes before the missing certificate

    async def lookup(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        transport = SafeTransport(allow=[LOOPBACK], lookup=lookup)
        async with httpx.AsyncClient(transport=transport, trust_env=False) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(f"https://site.example:{port}/")
    assert asked == ["site.example"]


async def test_a_name_that_changes_its_answer_cannot_win() -> None:
    """DNS rebinding: the first answer passes the check of one request, the second is caught at the next."""
    answers = iter([["127.0.0.1"], ["127.0.0.2"], ["10.0.0.1"]])

    async def lookup(host: str, port: int) -> list[str]:
        return next(answers)

    only_one = ipaddress.ip_network("127.0.0.1/32")
    with StubServer(lambda _: Reply(200, b"hello")) as server:
        transport = SafeTransport(allow=[only_one], lookup=lookup)
        async with httpx.AsyncClient(transport=transport, trust_env=False) as client:
            url = f"http://rebind.example:{server.port}/"
            assert (await client.get(url)).text == "hello"
            for address in (r"127\.0\.0\.2", r"10\.0\.0\.1"):
                with pytest.raises(UnsafeUrlError, match=address):
                    await client.get(url)
    assert len(server.requests) == 1
