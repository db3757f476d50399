"""TLS for the servers, from PEM files that may change while they run: each new connection gets what they hold then.

A file that cannot be read, or a key that is not the certificate's, is an error at the start. Later it is logged, and
what was last good stays in force.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from py_scheduler.api.security.bearer_tokens import FileStamp, file_stamp
from py_scheduler.errors import ConfigError

if TYPE_CHECKING:
    from py_scheduler.config import TlsSettings

_log = logging.getLogger(__name__)

Stamp = tuple[FileStamp | None, ...]


class TlsFiles:
    """The files of a `tls` table. key: the table's own dotted key."""

    def __init__(self, settings: TlsSettings, key: str) -> None:
        """Raises ConfigError."""
        self.settings = settings
        self._key = key
        self._stamp: Stamp | None = self._stamp_now()
        self._told = ""
        self.check()

    def changed(self) -> ssl.SSLContext | None:
        """A context of what they hold, if they differ from the last time and are good; asked for each new connection.

        What could not be opened may be had the next time, and is asked for again.
        """
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return None
        try:
            context = self.check()
        except ConfigError as error:
            if isinstance(error.__cause__, ssl.SSLError):
                self._stamp = stamp
            if str(error) != self._told:
                self._told = str(error)
                _log.error("the certificates stay as they were: %s", error)
            return None
        self._stamp, self._told = stamp, ""
        _log.info("%s: certificates were read again", self._key)
        return context

    def look_again(self) -> None:
        """What `changed` saw could not be used."""
        self._stamp = None

    def check(self) -> ssl.SSLContext:
        """A context made of what the files hold now. Raises ConfigError."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        settings = self.settings
        try:
            # Without a password to try OpenSSL would ask for one at the terminal, and the server would wait.
            context.load_cert_chain(settings.certificate, settings.key, password="none")  # noqa: S106 - it is none
        except (OSError, ssl.SSLError) as error:
            message = f"{settings.certificate} and {settings.key} are no certificate and its key: {_reason(error)}"
            raise ConfigError(message, f"{self._key}.certificate") from error
        if settings.client_ca:
            try:
                context.load_verify_locations(settings.client_ca)
            except (OSError, ssl.SSLError) as error:
                message = f"{settings.client_ca} holds no certificates: {_reason(error)}"
                raise ConfigError(message, f"{self._key}.client_ca") from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _stamp_now(self) -> Stamp:
        return tuple(
            file_stamp(file) for file in (self.settings.certificate, self.settings.key, self.settings.client_ca)
        )


def grpc_credentials(settings: TlsSettings, key: str = "server.tls") -> grpc.ServerCredentials:
    """Of a gRPC server. Raises ConfigError."""
    files = TlsFiles(settings, key)

    def now() -> grpc.ServerCertificateConfiguration:
        pair = (Path(settings.key).read_bytes(), Path(settings.certificate).read_bytes())
        roots = Path(settings.client_ca).read_bytes() if settings.client_ca else None
        return grpc.ssl_server_certificate_configuration([pair], roots)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """gRPC's question at each handshake; None keeps what it has."""
        if files.changed() is None:
            return None
        try:
            return now()
        except OSError:  # Replaced at this very moment.
            files.look_again()
            return None

    is_mutual = bool(settings.client_ca)
    return grpc.dynamic_ssl_server_credentials(now(), fetch, is_mutual)  # type: ignore[arg-type] # None is allowed


def http_context(settings: TlsSettings, key: str = "gateway.tls") -> ssl.SSLContext:
    """Of an HTTP server. Raises ConfigError."""
    files = TlsFiles(settings, key)
    current = files.check()

    def take_current(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Called at each handshake, whether or not the client names the server."""
        nonlocal current
        current = files.changed() or current
        connection.context = current

    first = files.check()
    first.sni_callback = take_current
    return first


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
