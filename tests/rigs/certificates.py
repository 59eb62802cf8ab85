"""Certificates of an authority of a test's own, made with openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

HAS_OPENSSL = shutil.which("openssl") is not None
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def authority(directory: Path, name: str) -> None:
    """`name`.crt and `name`.key, signed by itself."""
    # Python 3.13 checks certificates as RFC 5280 has them: an authority says its usage, a certificate its authority
    subject = ("-subj", f"/CN={name}", "-days", "2", "-addext", "keyUsage=critical,keyCertSign,cRLSign")
    _openssl(directory, "req", "-x509", *_KEY, *subject, "-keyout", f"{name}.key", "-out", f"{name}.crt")


def certificate(directory: Path, name: str, signer: str) -> None:
    """`name`.crt and `name`.key for localhost and 127.0.0.1, signed by an authority."""
    _openssl(directory, "req", *_KEY, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
    (directory / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
    signing = ("-CA", f"{signer}.crt", "-CAkey", f"{signer}.key", "-CAcreateserial", "-days", "2")
    _openssl(directory, "x509", "-req", "-in", f"{name}.csr", *signing, "-extfile", "names", "-out", f"{name}.crt")


def encrypt(key: Path) -> None:
    """Give the key in a file a passphrase, `secret`."""
    encrypted = key.with_suffix(".encrypted")
    _openssl(key.parent, "pkcs8", "-topk8", "-in", key.name, "-passout", "pass:secret", "-out", encrypted.name)
    encrypted.replace(key)


def _openssl(directory: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=directory, check=True, capture_output=True)
