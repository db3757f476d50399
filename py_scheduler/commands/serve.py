"""`py-scheduler serve`: the server, until a signal ends it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from py_scheduler.config import load_config
from py_scheduler.knobs import CONFIG, add_flags, overrides_of, variables_alone

if TYPE_CHECKING:
    import argparse


def add(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"{parser.epilog}. Variables without a flag: {', '.join(variables_alone())}; see `knobs`."
    config = os.environ.get(CONFIG.variable)
    parser.add_argument(
        CONFIG.flag,
        type=Path,
        default=config and Path(config),
        required=not config,
        metavar=CONFIG.metavar,
        help=f"{CONFIG.help} ({CONFIG.variable})",
    )
    add_flags(parser)


def run(options: argparse.Namespace) -> int:
    config_file: Path = options.config
    config = load_config(config_file, overrides_of(vars(options), os.environ))
    # gRPC's core writes to stderr about what is an ordinary answer here, a port in use for one.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from py_scheduler import app  # noqa: PLC0415 - after the file, so that its faults show at once

    app.run(config, config_file)
    return 0
