"""Generation backends from the `[generation.ROLE]` tables, and which of them rest on which."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from py_scheduler.config import Config, collecting, convert_table
from py_scheduler.domain.generation import STUDENT
from py_scheduler.domain.limits import ADDRESS_EXAMPLE, is_address
from py_scheduler.domain.ports import CONTROLLED_KINDS_SAID, GenerationControl, base_of
from py_scheduler.errors import ConfigError, FieldViolation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from py_scheduler.domain.ports import GenerationBackend

    Backends = dict[str, GenerationBackend]

_WITH_EXAMPLES = "with_examples"


def build_generation(config: Config, base_dir: Path, faults: list[FieldViolation]) -> dict[str, GenerationBackend]:
    """One backend for each role, bases before what is made of them; `faults` gets what is wrong with the others."""
    backends: dict[str, GenerationBackend] = {}
    for role in _bases_first(config.generation, faults):
        base = base_role(config.generation[role])
        if base is None or base in backends:
            with collecting(faults):
                backends[role] = _build_backend(config.generation[role], f"generation.{role}", base_dir, backends)
    return backends


def check_staleness(config: Config, backends: Backends, faults: list[FieldViolation]) -> None:
    """With a limit of staleness training waits for weights, which not every student can be given."""
    student = backends.get(STUDENT)
    if config.scheduler.staleness and student is not None and not isinstance(base_of(student), GenerationControl):
        reason = (
            "the weights of this student never change, so training would wait for ever: leave it out, or serve the "
            f"student with {CONTROLLED_KINDS_SAID}"
        )
        faults.append(FieldViolation("scheduler.staleness", reason))


def base_role(table: dict[str, Any]) -> str | None:
    """The role whose backend this one asks, if it asks one."""
    base = table.get("base")
    return base if table.get("kind") == _WITH_EXAMPLES and isinstance(base, str) else None


def _bases_first(tables: dict[str, dict[str, Any]], faults: list[FieldViolation]) -> list[str]:
    """The roles in an order in which they can be built; `faults` gets those that rest on nothing or on themselves."""
    bases = {role: base_role(table) for role, table in tables.items()}
    known = ", ".join(tables)
    for name, base in bases.items():
        if base is not None and base not in tables:
            faults.append(FieldViolation(f"generation.{name}.base", f"is {base!r}, must be one of the roles {known}"))
    order: dict[str, None] = {}
    for first in tables:
        chain: list[str] = []
        role: str | None = first
        while role in tables and role not in order and role not in chain:
            chain.append(role)
            role = bases[role]
        if role is None or role in order:
            order.update(dict.fromkeys(reversed(chain)))
        elif role == first == min(chain):
            circle = " -> ".join([*chain, role])
            faults.append(FieldViolation(f"generation.{role}.base", f"leads back to itself: {circle}"))
    return list(order)


def _build_backend(table: dict[str, Any], key: str, base_dir: Path, backends: Backends) -> GenerationBackend:
    """The adapter is imported only when it is asked for: each has optional dependencies of its own."""
    rest = dict(table)
    kind = rest.pop("kind", None)
    build = KINDS.get(kind) if isinstance(kind, str) else None
    if build is None:
        *others, last = (f'"{known}"' for known in KINDS)
        raise ConfigError(f"is {kind!r}, must be {', '.join(others)} or {last}", f"{key}.kind")
    return build(rest, key, base_dir, backends)


def _build_embedded(table: dict[str, Any], key: str, base_dir: Path, _backends: Backends) -> GenerationBackend:
    from py_scheduler.adapters.llama_cpp.backend import LlamaCppBackend, LlamaCppSettings  # noqa: PLC0415

    gguf_path = _gguf_path(table.pop("gguf_path", ""), f"{key}.gguf_path", base_dir)
    return LlamaCppBackend(gguf_path, settings=convert_table(table, LlamaCppSettings, key))


def _build_sglang(table: dict[str, Any], key: str, _base_dir: Path, _backends: Backends) -> GenerationBackend:
    from py_scheduler.adapters.sglang.backend import SglangBackend  # noqa: PLC0415 - like the other adapters
    from py_scheduler.adapters.sglang.fleet import SglangFleet  # noqa: PLC0415
    from py_scheduler.adapters.sglang.settings import SglangSettings  # noqa: PLC0415

    return _build_served(table, key, SglangSettings, SglangBackend, SglangFleet)


def _build_vllm(table: dict[str, Any], key: str, _base_dir: Path, _backends: Backends) -> GenerationBackend:
    from py_scheduler.adapters.http_server.settings import ServerSettings  # noqa: PLC0415 - like the other adapters
    from py_scheduler.adapters.vllm.backend import VllmBackend  # noqa: PLC0415
    from py_scheduler.adapters.vllm.fleet import VllmFleet  # noqa: PLC0415

    return _build_served(table, key, ServerSettings, VllmBackend, VllmFleet)


def _build_served(
    table: dict[str, Any],
    key: str,
    settings_type: type[Any],
    one: Callable[..., GenerationBackend],
    several: Callable[..., GenerationBackend],
) -> GenerationBackend:
    """One server or a router with its workers, as `base_url` says, or as many as `base_urls` says, which can be changed
    while it runs.
    """
    faults: list[FieldViolation] = []
    addresses = {name: table.pop(name) for name in ("base_url", "base_urls", "control_urls") if name in table}
    if "base_urls" in addresses:
        faults += _mixture_faults(addresses, key)
        fleet = table.pop("fleet", {})
    else:
        addresses.setdefault("base_url", None)
    for name, value in addresses.items():
        may_be_empty = name == "base_urls"
        faults += _address_faults(value if name != "base_url" else [value], f"{key}.{name}", may_be_empty=may_be_empty)
    if faults:
        raise ConfigError(faults)
    controls = addresses.get("control_urls", ())
    if "base_urls" in addresses:
        from py_scheduler.adapters.fleet.settings import FleetSettings  # noqa: PLC0415

        with collecting(faults):
            settings = convert_table(table, settings_type, key)
        with collecting(faults):
            fleet = convert_table(fleet, FleetSettings, f"{key}.fleet")
        if faults:
            raise ConfigError(faults)
        return several(addresses["base_urls"], control_urls=controls, settings=settings, fleet=fleet)
    return one(addresses["base_url"], control_urls=controls, settings=convert_table(table, settings_type, key))


def _mixture_faults(addresses: Mapping[Any, Any], key: str) -> list[FieldViolation]:
    """Beside `base_urls`."""
    faults = []
    if "base_url" in addresses:
        faults.append(FieldViolation(f"{key}.base_url", "base_urls are asked directly: leave one of the two out"))
    urls = addresses["base_urls"]
    if "control_urls" in addresses and isinstance(urls, list) and len(urls) != 1:
        said = "are the workers behind one router, and base_urls are asked directly: leave one of the two out"
        faults.append(FieldViolation(f"{key}.control_urls", said))
    return faults


def _address_faults(urls: object, key: str, *, may_be_empty: bool) -> list[FieldViolation]:
    if not isinstance(urls, list) or not (urls or may_be_empty):
        return [
            FieldViolation(
                key, f"must be a list of {'' if may_be_empty else 'one or more '}addresses, {ADDRESS_EXAMPLE}"
            )
        ]
    if bad := [url for url in urls if not is_address(url)]:
        said = "is missing or no address" if bad == [None] else f"{bad[0]!r} is no address"
        return [FieldViolation(key, f"{said}: {ADDRESS_EXAMPLE}")]
    if len({url.rstrip("/") for url in urls}) < len(urls):
        return [FieldViolation(key, "names an address twice")]
    return []


def _build_with_examples(table: dict[str, Any], key: str, base_dir: Path, backends: Backends) -> GenerationBackend:
    from py_scheduler.adapters.with_examples import (  # noqa: PLC0415 - like the other adapters
        WithExamplesBackend,
        WithExamplesSettings,
        load_examples,
    )

    settings = convert_table(table, WithExamplesSettings, key)
    examples = settings.examples
    if isinstance(examples, str):
        examples = load_examples(base_dir / Path(examples).expanduser(), f"{key}.examples")
    if not examples and not settings.instruction:
        raise ConfigError(
            "there are none, and no instruction: the base would answer as it does without", f"{key}.examples"
        )
    return WithExamplesBackend(backends[settings.base], examples=examples, instruction=settings.instruction)


KINDS: dict[str, Callable[[dict[str, Any], str, Path, Backends], GenerationBackend]] = {
    "embedded": _build_embedded,
    "sglang": _build_sglang,
    "vllm": _build_vllm,
    _WITH_EXAMPLES: _build_with_examples,
}
"""Who builds a backend of each `kind`: of the rest of its table, the table's name, the file's folder, and the backends
that are built.
"""


def _gguf_path(value: object, key: str, base_dir: Path) -> Path:
    """The model file that is named, or else the one that `fetch-model` left in the cache."""
    if not isinstance(value, str):
        raise ConfigError("must be the path of a GGUF file", key)
    if value:
        path = base_dir / Path(value).expanduser()
        if not path.is_file():
            raise ConfigError(f"there is no file {path}: correct the path", key)
        return path
    from py_scheduler.adapters.llama_cpp.model_store import SMOLLM2, default_cache_dir  # noqa: PLC0415

    path = default_cache_dir() / Path(SMOLLM2.file).name
    if not path.is_file():
        raise ConfigError(f"is absent, and {path} is not there: run `py-scheduler fetch-model`, or name a file", key)
    return path
