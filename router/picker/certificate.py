"""Make a self-signed certificate for the picker's port.

Gateways of the Inference Extension want TLS from endpoint pickers, and check neither name nor issuer.
"""

from __future__ import annotations

import datetime
import ipaddress
import socket

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

LIFETIME = datetime.timedelta(days=3650)


def make_self_signed_certificate(host: str) -> tuple[bytes, bytes]:
    """Return a TLS certificate for `host`, this machine's name and localhost, and its private key, both as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "blockcast endpoint picker")])
    hosts: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.DNSName(socket.gethostname())]
    try:
        hosts.append(x509.IPAddress(ipaddress.ip_address(host)))
    except ValueError:
        hosts.append(x509.DNSName(host))
    # The clock of the other side may be behind this machine's.
    valid_from = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=1)
    builder = x509.CertificateBuilder(
        issuer_name=name,
        subject_name=name,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=valid_from,
        not_valid_after=valid_from + LIFETIME,
    )
    builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    certificate_pem = builder.sign(key, SHA256()).public_bytes(Encoding.PEM)
    return certificate_pem, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
