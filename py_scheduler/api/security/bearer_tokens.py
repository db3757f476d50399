"""The file of bearer tokens: who may call, and in which namespaces.

    # one line a token, as `py-scheduler token new` prints it
    trainer-a = { sha256 = "9f86d0...", namespaces = ["a"], max_queued_tasks = 10_000 }

A token is known by its SHA-256 alone, so the file may be read by whoever may read the configuration. Tokens are random
and long: there is nothing to be guessed, so nothing slower than SHA-256 is needed.

Invariant: what is in force is what the file said when it could last be read as a whole; a file that changed, or could
not be opened, is read again before the next call or frame is let through, so a line that is taken out ends its token at
once.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import stat
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.config import convert_table
from py_scheduler.domain.limits import name_fault
from py_scheduler.domain.quotas import Quota
from py_scheduler.errors import ConfigError, FieldViolation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = logging.getLogger(__name__)

ANY_NAMESPACE = "*"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA256_OF_NOTHING = hashlib.sha256().hexdigest()
_OTHERS_MAY_WRITE = 0o002
_FIELD = "server.tokens_file"


FileStamp = tuple[int, int, int, int]


def file_stamp(path: str | Path) -> FileStamp | None:
    """Whether a file is still the one that was read, without reading it; None while there is no file.

    It differs from an earlier one after every change of content, permissions or name. The change time is in it,
    because the modification time stays as it was when somebody gives a file its permissions back, or copies an older
    file over it with its times.
    """
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_ctime_ns, found.st_mtime_ns, found.st_size, found.st_ino


class Caller(msgspec.Struct, frozen=True):
    """Who calls. controls_engines: may pause generation and change weights, which concerns every namespace."""

    name: str
    namespaces: frozenset[str]
    controls_engines: bool = False
    digest: bytes = b""

    def may_use(self, namespace: str) -> bool:
        return namespace in self.namespaces or ANY_NAMESPACE in self.namespaces


ANYBODY = Caller("anybody", frozenset({ANY_NAMESPACE}), controls_engines=True)
"""Of a server without tokens."""


class TokenLine(Quota, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file says of one token. Its quotas hold for each of its namespaces, whoever brought what they hold."""

    sha256: str
    namespaces: tuple[str, ...]
    controls_engines: bool = False


class BearerTokens:
    """The tokens of a file. Each of `on_change` is called with the quotas of each namespace whenever they were read."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when the file cannot be read as a whole."""
        self._path = path
        self._seen: FileStamp | None = None
        self._told = ""
        self._callers: dict[bytes, Caller] = {}
        self.quotas: dict[str, Quota] = {}
        """The strictest that lines say of each namespace; "*": of all of them."""
        self.on_change: list[Callable[[dict[str, Quota]], None]] = []
        self._read()

    def caller_of(self, secret: str) -> Caller | None:
        """Whose token this is. Compares with every line, in constant time."""
        self.refresh()
        digest = hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
        found = None
        for known in self._callers:
            if hmac.compare_digest(digest, known):
                found = known
        return None if found is None else self._callers[found]

    def is_in_force(self, caller: Caller) -> bool:
        """Whether a caller from before could call now."""
        self.refresh()
        return self._callers.get(caller.digest) == caller

    def refresh(self) -> None:
        """Reads the file again if it changed. One that cannot be read changes nothing, and is logged."""
        if (stamp := file_stamp(self._path)) != self._seen:
            self._take(stamp)

    def reload(self) -> None:
        """Reads the file again, also if it seems to be as it was."""
        self._take(file_stamp(self._path))

    def _take(self, stamp: FileStamp | None) -> None:
        try:
            self._read()
        except ConfigError as error:
            # What was read and is wrong stays wrong until it changes; what could not be opened may be had next time.
            self._seen = None if isinstance(error.__cause__, OSError) else stamp
            if str(error) != self._told:
                self._told = str(error)
                _log.error("the tokens stay as they were: %s", error)
        else:
            self._told = ""
            _log.info("%s: %d tokens are in force", self._path, len(self._callers))
            for tell in self.on_change:
                tell(self.quotas)

    def _read(self) -> None:
        stamp = file_stamp(self._path)
        lines = _lines_of(self._path)
        faults = list(_faults_of(lines))
        if faults:
            raise ConfigError(faults)
        callers = [
            Caller(name, frozenset(line.namespaces), line.controls_engines, bytes.fromhex(line.sha256))
            for name, line in lines.items()
        ]
        self._callers = {caller.digest: caller for caller in callers}
        self._seen = stamp
        self.quotas = {}
        for line in lines.values():
            for namespace in line.namespaces:
                self.quotas[namespace] = line.within(self.quotas.get(namespace, Quota()))


def _lines_of(path: Path) -> dict[str, TokenLine]:
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{path} is no file", _FIELD)
        if mode & _OTHERS_MAY_WRITE:
            raise ConfigError(f"anybody may write {path}, and so let themselves in: chmod o-w", _FIELD)
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = f": `py-scheduler token new NAME --namespace NAMESPACE --to {path}` makes it"
        hint = hint if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"cannot read {path}: {error.strerror}{hint}", _FIELD) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", _FIELD) from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply", _FIELD) from error
    return {name: convert_table(table, TokenLine, f"{_FIELD}: {name}") for name, table in tables.items()}


def _faults_of(lines: dict[str, TokenLine]) -> Iterator[FieldViolation]:
    taken: dict[str, str] = {}
    for name, line in lines.items():
        key = f"{_FIELD}: {name}"
        if fault := name_fault(name):
            yield FieldViolation(key, f"its name {fault}")
        if not _SHA256.fullmatch(line.sha256):
            yield FieldViolation(f"{key}.sha256", "must be 64 hexadecimal digits in lower case")
        elif line.sha256 == _SHA256_OF_NOTHING:
            yield FieldViolation(f"{key}.sha256", "is that of an empty token: make one with `py-scheduler token new`")
        elif line.sha256 in taken:
            yield FieldViolation(f"{key}.sha256", f"is the token of {taken[line.sha256]!r} too: make one for each")
        taken[line.sha256] = name
        if not line.namespaces:
            yield FieldViolation(f"{key}.namespaces", 'is empty: name one, or "*" for all')
        for namespace in line.namespaces:
            if fault := name_fault(namespace):
                yield FieldViolation(f"{key}.namespaces", fault)
