"""Certificates of an authority that nobody else has."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme


class Certificates:
    """A folder of PEM files: `ca`, the server's for 127.0.0.1 and localhost, and one of a client."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = trustme.CA()
        self.ca = folder / "ca.pem"
        self.authority.cert_pem.write_to_path(str(self.ca))
        self.certificate, self.key = self.issue("server")
        self.client_certificate, self.client_key = self.issue("client")

    def issue(self, name: str, *, is_expired: bool = False) -> tuple[Path, Path]:
        """A certificate and its key, under a name; one that is there is replaced at once."""
        end = datetime.now(UTC) - timedelta(days=1) if is_expired else None
        made = self.authority.issue_cert("127.0.0.1", "localhost", not_after=end)
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        for place, blob in ((key, made.private_key_pem), (certificate, made.cert_chain_pems[0])):
            fresh = place.with_suffix(place.suffix + ".new")
            blob.write_to_path(str(fresh))
            fresh.rename(place)
        return certificate, key
