"""TLS of the fronts (G30, H56): certificates from files, which are read again when they change.

Open connections keep their certificates; a handshake uses the newest files that belong together.
"""

from __future__ import annotations

import logging
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import StartupError, refuse_passphrase
from charonia.options.settings import TlsSettings

_log = logging.getLogger("charonia.gateway.tls")

_CHECK_INTERVAL_NS = 1_000_000_000
"""Files are checked at most this often, and only when a client connects."""

_Stamp = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Certificates:
    """The contents of PEM files; `root` is empty if clients need no certificate."""

    key: bytes
    certificate: bytes
    root: bytes


def certificates(settings: TlsSettings) -> Certificates:
    """Read the certificates. Raises `StartupError` for a file that is missing or cannot be read."""
    front = settings.front
    if not settings.key or not settings.certificate:
        raise StartupError(f"--{front}-use-ssl needs --{front}-server-key and --{front}-server-cert")
    if settings.is_mutual and not settings.root:
        raise StartupError(f"--{front}-use-ssl-mutual needs --{front}-root-cert, which says whose clients are let in")
    return Certificates(
        _read(f"{front}-server-key", settings.key),
        _read(f"{front}-server-cert", settings.certificate),
        _read(f"{front}-root-cert", settings.root) if settings.root else b"",
    )


class ChangingFiles:
    """Detects changes of one front's files."""

    def __init__(self, settings: TlsSettings) -> None:
        self._settings = settings
        self._looked_ns = monotonic_ns()
        self._stamp = self._now()

    def _now(self) -> _Stamp:
        paths = (self._settings.key, self._settings.certificate, self._settings.root)
        found = []
        for path in filter(None, paths):
            status = os.stat(path)
            found.append((status.st_mtime_ns, status.st_ino))
        return tuple(found)

    def changed(self) -> bool:
        """Whether the files differ from those at the last True; checks once a second."""
        now_ns = monotonic_ns()
        if now_ns - self._looked_ns < _CHECK_INTERVAL_NS:
            return False
        self._looked_ns = now_ns
        try:
            stamp = self._now()
        except OSError:  # just being replaced, perhaps
            return False
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        return True

    def doubt(self) -> None:
        """The files did not belong together: report a change at the next check."""
        self._stamp = ()


class ServerTls:
    """The TLS context of a front of our own. Raises `StartupError` for files that do not work."""

    def __init__(self, settings: TlsSettings, protocols: list[str]) -> None:
        self._settings = settings
        self._protocols = protocols
        certificates(settings)  # ssl reads the files itself, and its errors do not name them
        self._files = ChangingFiles(settings)
        self._read_again_s = 0
        """Seconds of the clock; clients with older sessions must show their certificate again."""
        try:
            self._newest = self._made()
        except (ssl.SSLError, OSError) as error:
            front = settings.front
            raise StartupError(
                f"failed to start {front.upper()} service: --{front}-server-cert, --{front}-server-key or "
                f"--{front}-root-cert: {error}"
            ) from None
        self.context = self._made()
        """The context for the listener; each handshake changes to the newest one."""
        self.context.sni_callback = self._handshake

    def _made(self) -> ssl.SSLContext:
        settings = self._settings
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(self._protocols)
        context.load_cert_chain(settings.certificate, settings.key, refuse_passphrase)
        if settings.root:
            context.load_verify_locations(settings.root)
        if settings.is_mutual:
            context.verify_mode = ssl.CERT_REQUIRED
            # a resumed session shows no certificate: it would admit clients of an authority that was removed
            context.options |= ssl.OP_NO_TICKET
            context.num_tickets = 0
        return context

    def _handshake(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> int | None:
        if self._files.changed():
            try:
                self._newest = self._made()
                self._read_again_s = wall_ns() // 1_000_000_000
                _log.info("the certificates of %s were read again", self._settings.front)
            except (ssl.SSLError, OSError) as error:
                self._files.doubt()
                _log.warning("the new certificates of %s cannot be used yet: %s", self._settings.front, error)
        connection.context = self._newest
        resumed = connection.session if self._settings.is_mutual and connection.session_reused else None
        if resumed is not None and resumed.time <= self._read_again_s:  # TLS 1.2 resumes without tickets, too
            return ssl.ALERT_DESCRIPTION_CERTIFICATE_UNKNOWN
        return None


def _read(option: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise StartupError(f"--{option}: '{path}' cannot be read: {error.strerror}") from None
