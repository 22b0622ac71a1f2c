"""Web pages as plain text, within limits of size and time, from public addresses only."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import httpx

from mempo.core import ConfigError, MissingExtraError, ToolError
from mempo.retrieval.safety import Lookup, Network, SafeTransport, check_url, system_lookup
from mempo.retrieval.wire import replace_surrogates

HTML_TYPES = ("text/html", "application/xhtml+xml")
USER_AGENT = "mempo (https://github.com/mempo/mempo)"


@dataclass(frozen=True, slots=True)
class Page:
    """The readable text of a web page."""

    url: str
    """Where it was found in the end, after redirects."""
    title: str
    text: str
    truncated: bool = False
    """True where the text was cut to the limit."""


class PageFetcher:
    """Fetches pages and extracts their main text.

    One fetch takes at most `timeout_seconds`, redirects and extraction included, reads at most
    `max_bytes` of a page (a larger page is refused) and gives at most `max_chars` of text (a longer
    one is cut). Each address on the way is checked as `mempo.retrieval.safety` says, so proxies of
    the environment are not used: behind a proxy nobody knows which address is reached.

    `allow` names networks that may be fetched from although they are not public, such as a test
    server's or an intranet's; `lookup` replaces the operating system's name service.
    """

    def __init__(
        self,
        *,
        timeout_seconds: float = 20.0,
        max_bytes: int = 5 * 2**20,
        max_chars: int = 20_000,
        max_redirects: int = 5,
        allow: Sequence[Network] = (),
        lookup: Lookup = system_lookup,
    ) -> None:
        if find_spec("trafilatura") is None:
            raise MissingExtraError("trafilatura", extra="serve")
        for name, limit in {"timeout_seconds": timeout_seconds, "max_bytes": max_bytes, "max_chars": max_chars}.items():
            if not limit > 0:
                raise ConfigError(f"{name} of a page must be positive (got {limit})")
        self.timeout_seconds = timeout_seconds
        self.max_bytes = max_bytes
        self.max_chars = max_chars
        self.max_redirects = max_redirects
        self._allow = allow
        self._lookup = lookup

    async def fetch(self, url: str) -> Page:
        """The page behind a URL.

        Raises UnsafeUrlError where an address is refused, ToolError for every other failure, with
        a message for the model.
        """
        try:
            async with asyncio.timeout(self.timeout_seconds):
                found, kind, content = await self._download(url)
                title, text = await asyncio.to_thread(_extract, kind, content)
        except TimeoutError as error:
            raise ToolError(f"the page did not arrive within {self.timeout_seconds:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # the last two of a redirect's address
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise ToolError(f"the page cannot be fetched ({reason})") from error
        if not text:
            raise ToolError("the page holds no readable text")
        return Page(found, title, text[: self.max_chars], truncated=len(text) > self.max_chars)

    async def _download(self, url: str) -> tuple[str, str, bytes]:
        """Final URL, media type and content."""
        transport = SafeTransport(allow=self._allow, lookup=self._lookup)
        async with httpx.AsyncClient(transport=transport, timeout=None, trust_env=False) as client:
            target = check_url(url)
            for _ in range(self.max_redirects + 1):
                # A fresh request for each hop: no cookies or headers are carried to another host.
                headers = {"user-agent": USER_AGENT, "accept": "text/html, text/plain;q=0.9"}
                async with client.stream("GET", target, headers=headers) as response:
                    if response.next_request is not None:
                        target = check_url(str(response.next_request.url))
                        continue
                    if response.status_code != 200:
                        raise ToolError(f"the page answers with status {response.status_code}")
                    return str(target), _media_type(response), await self._read(response)
        raise ToolError(f"the page redirects more than {self.max_redirects} times")

    async def _read(self, response: httpx.Response) -> bytes:
        body = bytearray()
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > self.max_bytes:
                raise ToolError(f"the page is larger than {self.max_bytes} bytes")
        return bytes(body)


def _media_type(response: httpx.Response) -> str:
    kind = str(response.headers.get("content-type", "text/html")).partition(";")[0].strip().lower()
    if kind not in HTML_TYPES and not kind.startswith("text/"):
        raise ToolError(f"the page is no text but {kind!r}")
    return kind


def _extract(kind: str, content: bytes) -> tuple[str, str]:
    """Title and main text; both empty where there is none."""
    import trafilatura

    if kind not in HTML_TYPES:
        return "", content.decode("utf-8", "replace").strip()
    try:
        document = trafilatura.bare_extraction(content, with_metadata=True, include_comments=False)
    except Exception as error:
        raise ToolError(f"the page cannot be read ({type(error).__name__})") from error
    if document is None:
        return "", ""
    return replace_surrogates(document.title or ""), replace_surrogates(document.text or "").strip()
