"""Certificates of authorities that tests make."""

import datetime
import ipaddress
import ssl
from pathlib import Path

import httpx
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from baton.http.tls import TlsFiles

DAY = datetime.timedelta(days=1)


class Authority:
    """Writes certificates into a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.key = folder, name, ec.generate_private_key(ec.SECP256R1())
        self.ca = str(folder / f"{name}-ca.pem")
        self.cert = self._sign(name, self.key, 1, is_ca=True)
        Path(self.ca).write_bytes(self.cert.public_bytes(serialization.Encoding.PEM))

    def _sign(
        self, name: str, key: ec.EllipticCurvePrivateKey, days: int, *, is_ca: bool
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        host: x509.GeneralName = x509.DNSName(name)
        if name[0].isdigit():
            host = x509.IPAddress(ipaddress.ip_address(name))
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.name)])
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        own_identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        made = (
            x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - 10 * DAY)
            .not_valid_after(now + days * DAY)
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([host]), critical=False)
            .add_extension(identifier, critical=False)
            # Strict verification, the default since Python 3.13, needs both of an authority.
            .add_extension(own_identifier, critical=False)
            .add_extension(_usage(is_ca=is_ca), critical=True)
        )
        return made.sign(self.key, hashes.SHA256())

    def issue(self, name: str, *, days: int = 1, file: str = "server") -> TlsFiles:
        key = ec.generate_private_key(ec.SECP256R1())
        cert, path = self._sign(name, key, days, is_ca=False), self.folder / f"{self.name}-{file}"
        Path(f"{path}.pem").write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        Path(f"{path}.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
        return TlsFiles(cert=f"{path}.pem", key=f"{path}.key")


def _usage(*, is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def context_of(ca: str, own: TlsFiles | None = None) -> ssl.SSLContext:
    """TLS context of a client that trusts `ca` only; `own` is the client's certificate."""
    context = ssl.create_default_context(cafile=ca)
    if own is not None:
        context.load_cert_chain(own.cert, own.key)
    return context


def client(ca: str, own: TlsFiles | None = None) -> httpx.AsyncClient:
    return httpx.AsyncClient(verify=context_of(ca, own), trust_env=False, timeout=None)
