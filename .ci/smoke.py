"""Run with an installed wheel, away from the repository: does the package stand on its own?"""

import importlib
import importlib.metadata
import pkgutil
import re
from pathlib import Path

import py_scheduler
from py_scheduler import NodeResource, PlacementPool, Resource

OPTIONAL = {
    re.split(r"[^\w-]", requirement, maxsplit=1)[0].replace("-", "_")
    for requirement in importlib.metadata.requires("py-scheduler") or ()
    if "extra ==" in requirement
} - {"py_scheduler"}
"""The packages of the extras, one of which is made of others."""


def import_everything() -> int:
    """Every module imports; only an extra's own package may be missing."""
    count = 0
    for module in pkgutil.walk_packages(py_scheduler.__path__, "py_scheduler."):
        if module.name.endswith(".__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL:
                raise
        count += 1
    return count


def load_every_public_name() -> int:
    """Without an extra."""
    return len([getattr(py_scheduler, name) for name in py_scheduler.__all__])


def acquire_and_release() -> None:
    pool = PlacementPool([NodeResource(node_ip="10.0.0.1", gpus=[0], cpu=8, memory_gb=32)])
    share = Resource(gpu=0.5, cpu=1, memory_gb=1)
    budget = Resource(gpu=1, cpu=2, memory_gb=2, concurrency=2)
    lease = pool.try_acquire_batch(budget, share, 2)
    assert lease is not None
    assert [token.node_ip for token in lease.tokens] == ["10.0.0.1"] * 2
    assert pool.try_acquire_batch(budget, share, 2) is None
    lease.release()
    assert pool.try_acquire_batch(budget, share, 2) is not None


if __name__ == "__main__":
    assert "site-packages" in Path(py_scheduler.__file__).parts, py_scheduler.__file__
    acquire_and_release()
    names = load_every_public_name()
    print(f"the installed package works: {names} public names, {import_everything()} modules imported")
