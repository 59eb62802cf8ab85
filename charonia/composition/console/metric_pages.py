"""Finds and reads the metrics pages that the console shows rates of: `--metrics-url`."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from charonia.errors import ENCODE_CREDENTIALS, StartupError, without_credentials
from charonia.metrics.endpoint import scrape
from charonia.metrics.exposition import merge
from charonia.options.values import Values

from .console_part import as_host

_SCRAPE_TIMEOUT_S = 2.0
_BY_NAME = "dns+"
_PORT = 80

_log = logging.getLogger(__name__)


def metrics_urls(values: Values, told: Mapping[str, str]) -> tuple[str, ...]:
    """Where the metrics are: as the options have it, else as a running `serve` has told. Raises `StartupError`."""
    given: tuple[str, ...] = values["metrics_url"]
    for address in given:
        shown = without_credentials(address)
        if not address.startswith(("http://", "https://", "dns+http://", "unix:")):
            raise StartupError(f"--metrics-url must begin with http://, https://, dns+http:// or unix:, got '{shown}'")
        try:
            _ = address.startswith("unix:") or urlsplit(address).port
        except ValueError:  # its words may quote a password
            raise StartupError(
                f"--metrics-url '{shown}' cannot be read: its port is no number, or {ENCODE_CREDENTIALS}"
            ) from None
    return given or ((f"http://{as_host(told['metrics'])}/metrics",) if "metrics" in told else ())


def metrics_reader(urls: Sequence[str]) -> Callable[[], Awaitable[str]]:
    """Reads the pages at all addresses and adds them up; those that do not answer are left out."""

    async def read() -> str:
        found = await asyncio.gather(*(_pages(url) for url in urls))
        answered = [page for pages in found for page in pages if page]
        return answered[0] if len(answered) == 1 else merge(answered).decode() if answered else ""

    return read


async def _pages(url: str) -> list[str]:
    if url.startswith("unix:"):
        return [await scrape(Path(url.removeprefix("unix:")))]
    if not url.startswith(_BY_NAME):
        return [await _page(url)]
    plain = url.removeprefix(_BY_NAME)
    return list(await asyncio.gather(*(_page(one, urlsplit(plain).netloc) for one in await addresses(plain))))


async def addresses(url: str) -> list[str]:
    """The URL with each address of its host, in order: all replicas behind a name. Of one family, that of IPv4 where
    there is one: a host with both would count twice. None for a name that is not known now.
    """
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_SCRAPE_TIMEOUT_S):
            found = await loop.getaddrinfo(parts.hostname, parts.port or _PORT, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError) as error:
        _log.debug("no address of %s: %s", without_credentials(url), error)
        return []
    families = {family for family, *_ in found}
    wanted = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    hosts = sorted({where[0] for family, _, _, _, where in found if family == wanted})
    return [parts._replace(netloc=as_host(f"{host}:{parts.port or _PORT}")).geturl() for host in map(str, hosts)]


async def _page(url: str, host: str = "") -> str:
    import httpx2

    try:
        async with httpx2.AsyncClient(timeout=_SCRAPE_TIMEOUT_S, trust_env=False) as client:
            answer = await client.get(url, headers={"host": host} if host else None)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        _log.debug("no metrics from %s: %s", without_credentials(url), error)
        return ""
    return answer.text if answer.status_code == 200 else ""
