"""TLS and mTLS, with certificates that change while the server runs."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import Mock

import aiohttp
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from py_scheduler.adapters.loop_clock import LoopClock
from py_scheduler.api.generation_http import GenerationHttp
from py_scheduler.client import ClientTls, SchedulerClient
from py_scheduler.config import GatewaySettings, TlsSettings
from py_scheduler.errors import ConfigError, InvalidArgumentError, ServerError
from tests.contract.conftest import serve
from tests.support.servers.certificates import Certificates
from tests.support.servers.fake_engine import FakeEngine
from tests.support.servers.grpc_calls import tasks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.contract.conftest import Served


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


def tls_of(certificates: Certificates, *, client_ca: str = "") -> TlsSettings:
    return TlsSettings(certificate=str(certificates.certificate), key=str(certificates.key), client_ca=client_ca)


@pytest.fixture
async def encrypted(certificates: Certificates) -> AsyncIterator[Served]:
    running = await serve(FakeEngine(), tls=tls_of(certificates))
    yield running
    await running.server.stop()


@pytest.fixture
async def mutual(certificates: Certificates) -> AsyncIterator[Served]:
    running = await serve(FakeEngine(), tls=tls_of(certificates, client_ca=str(certificates.ca)))
    yield running
    await running.server.stop()


async def call(address: str, tls: ClientTls | None) -> None:
    async with SchedulerClient(address, reconnect_seconds=0.0, tls=tls) as client:
        await client.submit(tasks(1), 7)


async def test_a_client_that_trusts_the_authority_gets_through(encrypted: Served, certificates: Certificates) -> None:
    await call(encrypted.address, ClientTls(ca=str(certificates.ca)))
    assert encrypted.engine.submits


async def test_plain_text_and_another_authority_get_nowhere(encrypted: Served, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Certificates(tmp_path / "other")
    for tls in (None, ClientTls(ca=str(other.ca))):
        with pytest.raises(ServerError, match="lets nobody in like this"):
            await call(encrypted.address, tls)
    assert not encrypted.engine.submits


async def test_mtls_lets_in_only_who_has_a_certificate(
    mutual: Served, certificates: Certificates, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = Certificates(tmp_path / "other")
    ca = str(certificates.ca)
    for certificate, key in ((None, None), (other.client_certificate, other.client_key)):
        tls = ClientTls(ca=ca, certificate=str(certificate or ""), key=str(key or ""))
        with pytest.raises(ServerError):
            await call(mutual.address, tls)
    assert not mutual.engine.submits
    own = ClientTls(ca=ca, certificate=str(certificates.client_certificate), key=str(certificates.client_key))
    await call(mutual.address, own)


async def served_certificate(address: str, certificates: Certificates) -> bytes:
    """What a new connection is shown."""
    context = ssl.create_default_context(cafile=str(certificates.ca))
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    _reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return shown


async def test_a_renewed_certificate_is_shown_to_new_connections(
    encrypted: Served, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    tls = ClientTls(ca=str(certificates.ca))
    async with SchedulerClient(encrypted.address, reconnect_seconds=0.0, tls=tls) as before:
        await before.submit(tasks(1), 7)
        old = await served_certificate(encrypted.address, certificates)
        certificates.issue("server")
        new = await served_certificate(encrypted.address, certificates)
        assert new != old
        await before.submit(tasks(1), 8)
    certificates.key.write_text("no key")
    assert await served_certificate(encrypted.address, certificates) == new
    assert "the certificates stay as they were" in caplog.text


async def test_a_key_that_can_be_opened_again_is_taken_although_no_file_was_written_to(
    encrypted: Served, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read while it could not be: out of file descriptors, or replaced at that very moment."""
    old = await served_certificate(encrypted.address, certificates)
    certificates.issue("server")
    with monkeypatch.context() as context:
        context.setattr(Path, "read_bytes", Mock(side_effect=OSError(24, "Too many open files")))
        assert await served_certificate(encrypted.address, certificates) == old
    assert await served_certificate(encrypted.address, certificates) != old


async def test_half_of_a_renewal_changes_nothing_and_the_whole_of_it_counts(
    encrypted: Served, certificates: Certificates
) -> None:
    old = await served_certificate(encrypted.address, certificates)
    key, certificate = certificates.key.read_bytes(), certificates.certificate.read_bytes()
    certificates.issue("server")
    renewed = certificates.key.read_bytes()
    certificates.key.write_bytes(key)
    assert await served_certificate(encrypted.address, certificates) == old
    certificates.key.write_bytes(renewed[: len(renewed) // 2])
    assert await served_certificate(encrypted.address, certificates) == old
    certificates.key.write_bytes(renewed)
    assert await served_certificate(encrypted.address, certificates) != old
    certificates.certificate.unlink()
    assert await served_certificate(encrypted.address, certificates) != old
    certificates.key.write_bytes(key)
    certificates.certificate.write_bytes(certificate)
    assert await served_certificate(encrypted.address, certificates) == old


@pytest.mark.parametrize("whose", ["server", "client"])
async def test_an_expired_certificate_lets_nobody_through(certificates: Certificates, whose: str) -> None:
    certificates.issue(whose, is_expired=True)
    served = await serve(FakeEngine(), tls=tls_of(certificates, client_ca=str(certificates.ca)))
    tls = ClientTls(
        ca=str(certificates.ca),
        certificate=str(certificates.client_certificate),
        key=str(certificates.client_key),
    )
    with pytest.raises(ServerError):
        await call(served.address, tls)
    certificates.issue(whose)
    await call(served.address, tls)
    assert len(served.engine.submits) == 1
    await served.server.stop()


async def test_a_key_with_a_password_is_an_error_and_no_question_at_the_terminal(certificates: Certificates) -> None:
    key = load_pem_private_key(certificates.key.read_bytes(), None)
    secret = BestAvailableEncryption(b"secret")
    certificates.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, secret))
    with pytest.raises(ConfigError, match=r"server\.tls\.certificate"):
        await serve(FakeEngine(), tls=tls_of(certificates))


async def test_files_that_do_not_belong_together_are_an_error_at_the_start(certificates: Certificates) -> None:
    faulty = TlsSettings(certificate=str(certificates.certificate), key=str(certificates.client_key))
    with pytest.raises(ConfigError, match=r"server\.tls\.certificate: .* no certificate and its key"):
        await serve(FakeEngine(), tls=faulty)
    with pytest.raises(ConfigError, match=r"server\.tls\.client_ca"):
        await serve(FakeEngine(), tls=tls_of(certificates, client_ca=str(certificates.key)))


def test_a_client_names_the_file_that_it_cannot_read() -> None:
    with pytest.raises(InvalidArgumentError, match=r"tls\.ca: cannot read"):
        ClientTls(ca="/no/such/file").credentials()


async def test_the_generation_front_speaks_https(certificates: Certificates) -> None:
    settings = GatewaySettings(listen="127.0.0.1:0", tls=tls_of(certificates))
    front = GenerationHttp(settings, {}, LoopClock())
    (url,) = front.bind()
    assert url.startswith("https://127.0.0.1:")
    context = ssl.create_default_context(cafile=str(certificates.ca))
    async with front, aiohttp.ClientSession() as session:
        async with session.get(f"{url}/models", ssl=context) as reply:
            assert reply.status == 401
        address = url.removeprefix("https://").removesuffix("/v1")
        old = await served_certificate(address, certificates)
        certificates.issue("server")
        assert await served_certificate(address, certificates) != old
