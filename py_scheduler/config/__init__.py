"""The server's configuration: a typed TOML file, with flags and environment variables (`knobs`) above it.

Every fault names its dotted key (`evaluator[1].resource.gpu`) and the way out, and all that can be found are told
at once. Nothing is imported, opened or started here: `app` does that with what this package returns.
"""

from py_scheduler.config.checks import is_local as is_local
from py_scheduler.config.conversion import collecting as collecting
from py_scheduler.config.conversion import convert_table as convert_table
from py_scheduler.config.loading import convert_config as convert_config
from py_scheduler.config.loading import load_config as load_config
from py_scheduler.config.loading import parse_config as parse_config
from py_scheduler.config.tables import UNIX_PREFIX as UNIX_PREFIX
from py_scheduler.config.tables import ClusterSettings as ClusterSettings
from py_scheduler.config.tables import Config as Config
from py_scheduler.config.tables import EvaluatorSettings as EvaluatorSettings
from py_scheduler.config.tables import GatewaySettings as GatewaySettings
from py_scheduler.config.tables import SchedulerSettings as SchedulerSettings
from py_scheduler.config.tables import ServerSettings as ServerSettings
from py_scheduler.config.tables import TlsSettings as TlsSettings
