"""Where the gateway listens. Sockets are bound here and take no connection before somebody listens on them."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from py_scheduler.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAX_PATH_BYTES = 107
_OTHERS = 0o077


def tcp_socket(listen: str) -> socket.socket:
    """Bound to "host:port". Raises ConfigError."""
    host, _, port = listen.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        with _closed_on_error(bound):
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
    except OSError as error:
        message = f"cannot listen on {listen}: {error.strerror}: choose another address, or port 0 for any free one"
        raise ConfigError(message, "gateway.listen") from error
    return bound


def unix_socket(path: str) -> socket.socket:
    """Bound to a path that this user alone can reach: its folder is made, or has to be, 0700. Raises ConfigError."""
    place = Path(path)
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise ConfigError(f"{path} is too long for a socket: at most {_MAX_PATH_BYTES} bytes", "gateway.socket")
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(place.parent)
        _remove_stale(place)
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _closed_on_error(bound):
            bound.bind(path)
            place.chmod(0o600)
    except OSError as error:
        raise ConfigError(f"cannot listen on {path}: {error.strerror}", "gateway.socket") from error
    return bound


def remove_socket(path: str) -> None:
    Path(path).unlink(missing_ok=True)


def _check_private(folder: Path) -> None:
    found = folder.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & _OTHERS:
        raise ConfigError(
            f"others may enter {folder}: name a folder of the server's own, with mode 0700 (one that is not there is "
            "made so)",
            "gateway.socket",
        )


def _remove_stale(place: Path) -> None:
    """What a server that was killed has left; one that lives keeps its socket."""
    try:
        is_socket = stat.S_ISSOCK(place.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise ConfigError(f"{place} is there and no socket: name another path", "gateway.socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(place))
        except ConnectionRefusedError:
            place.unlink()
        else:
            raise ConfigError(f"a server is using {place}: name another path", "gateway.socket")


@contextlib.contextmanager
def _closed_on_error(bound: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        bound.close()
        raise
