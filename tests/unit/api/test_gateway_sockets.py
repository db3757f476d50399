"""Where the gateway's HTTP front listens, and whom it keeps out."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from py_scheduler.api.generation_http.sockets import tcp_socket, unix_socket
from py_scheduler.config import parse_config
from py_scheduler.errors import ConfigError

EVALUATOR = '[[evaluator]]\nevaluator_id = "a"\nhandler = "m:C"\nresource = { concurrency = 1 }\n'


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_socket_and_its_new_folder_are_the_servers_own(tmp_path: Path) -> None:
    path = tmp_path / "gateway" / "api.sock"
    with unix_socket(str(path)):
        assert (mode_of(path.parent), mode_of(path)) == (0o700, 0o600)


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"gateway\.socket: others may enter .* 0700"):
        unix_socket(str(tmp_path / "api.sock"))


def test_a_socket_that_was_left_behind_is_replaced_and_one_in_use_is_not(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = str(tmp_path / "api.sock")
    unix_socket(path).close()
    with unix_socket(path) as bound:
        bound.listen()
        with pytest.raises(ConfigError, match="a server is using"):
            unix_socket(path)


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="no socket"):
        unix_socket(str(tmp_path / "notes"))
    with pytest.raises(ConfigError, match="too long"):
        unix_socket(str(tmp_path / ("x" * 108)))
    with pytest.raises(ConfigError, match="cannot listen"):
        unix_socket(str(tmp_path / "notes" / "api.sock"))


def test_a_port_that_is_taken_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"gateway\.listen: cannot listen on"):
            tcp_socket(f"127.0.0.1:{taken.getsockname()[1]}")
    with tcp_socket("127.0.0.1:0") as bound:
        assert bound.getsockname()[1] > 0


@pytest.mark.parametrize(
    ("gateway", "said"),
    [
        ('listen = "0.0.0.0:0"', "gateway.listen: 0.0.0.0 is not loopback"),
        ('listen = "localhost"', "gateway.listen: is 'localhost', must be \"host:port\""),
        ('listen = "unix:/a"', 'gateway.listen: must be "host:port": the path of a unix socket goes to gateway.socket'),
        ("max_body_bytes = 5", "gateway.max_body_bytes"),
        ("port = 5", "gateway.port"),
    ],
)
def test_a_faulty_table_names_its_key(gateway: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(f"[gateway]\n{gateway}\n{EVALUATOR}")
    assert said in str(error.value)


def test_off_loopback_has_to_be_asked_for_and_paths_count_from_the_file() -> None:
    text = '[gateway]\nlisten = "0.0.0.0:8000"\ninsecure_remote = true\nsocket = "run/api.sock"\n'
    gateway = parse_config(text + EVALUATOR).located(Path("/etc/here")).gateway
    assert (gateway.listen, gateway.socket) == ("0.0.0.0:8000", "/etc/here/run/api.sock")
    nowhere = parse_config(EVALUATOR).located(Path("/etc/here")).gateway
    assert (nowhere.listen, nowhere.socket) == ("", "")
