"""What a handler's constructor gets by the name of its parameter, in whichever process it is made.

Not in a composition root, because a child needs it, and would load a whole server with `app`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.errors import ConfigError, SandboxError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from py_scheduler.domain.episodes.sandbox import Sandbox


def make_sandbox(table: object, key: str) -> Sandbox:
    """For handlers that ask for a `sandbox`. Raises ConfigError, also when it cannot be had on this machine."""
    from py_scheduler.adapters.sandbox.sandbox import ProcessSandbox, SandboxSettings  # noqa: PLC0415 - most handlers need none
    from py_scheduler.config import convert_table  # noqa: PLC0415 - likewise

    sandbox = ProcessSandbox(convert_table({} if table is None else table, SandboxSettings, key))
    try:
        sandbox.probe()
    except SandboxError as error:
        raise ConfigError(str(error), key) from error
    return sandbox


HANDLER_PARTS: Mapping[str, Callable[[object, str], object]] = {"sandbox": make_sandbox}
