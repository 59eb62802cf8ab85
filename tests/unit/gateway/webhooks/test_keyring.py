"""Secrets from a file that changes."""

from __future__ import annotations

import base64
import logging
from pathlib import Path

import pytest

from charonia.errors import StartupError
from gateway.webhooks.keyring import Keyring
from gateway.webhooks.signatures import PREFIX

OLD, NEW, ACME = (bytes([n]) * 32 for n in (1, 2, 3))


def render_secret(secret: bytes) -> str:
    return PREFIX + base64.b64encode(secret).decode()


def test_lines_of_secrets_all_sign_for_everybody(tmp_path: Path) -> None:
    path = tmp_path / "secrets"
    path.write_text(f"# the new one first\n{render_secret(NEW)}\n\n  {render_secret(OLD)}\n")
    assert Keyring(str(path)).secrets_of("anybody") == (NEW, OLD)


def test_tenants_have_their_own_or_the_default(tmp_path: Path) -> None:
    path = tmp_path / "secrets.toml"
    path.write_text(
        f'default = ["{render_secret(NEW)}", "{render_secret(OLD)}"]\n[tenants]\n"acme inc" = "{render_secret(ACME)}"\n'
    )
    keyring = Keyring(str(path))
    assert keyring.secrets_of("acme inc") == (ACME,)
    assert keyring.secrets_of("") == (NEW, OLD)


def test_without_a_default_nothing_signs_for_others(tmp_path: Path) -> None:
    path = tmp_path / "secrets.toml"
    path.write_text(f'tenants.acme = "{render_secret(ACME)}"')
    assert Keyring(str(path)).secrets_of("other") == ()


def test_a_changed_file_is_read_again_and_a_broken_one_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "secrets"
    path.write_text(render_secret(OLD))
    keyring = Keyring(str(path))
    path.write_text(render_secret(NEW) + "\n" + render_secret(OLD))
    keyring.refresh()
    assert keyring.secrets_of("") == (NEW, OLD)
    path.write_text("whsec_short")
    with caplog.at_level(logging.ERROR):
        keyring.refresh()
        keyring.refresh()
        path.unlink()
        keyring.refresh()
    assert keyring.secrets_of("") == (NEW, OLD)
    assert len(caplog.records) == 2
    path.write_text(render_secret(ACME))
    keyring.refresh()
    assert keyring.secrets_of("") == (ACME,)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "default = 3",
        "default = []",
        "default = [1]",
        "other = 1",
        "tenants = 1",
        "[tenants]",
        "not toml",
        "whsec_A",
    ],
)
def test_a_file_that_holds_no_secrets_is_refused_at_start(tmp_path: Path, text: str) -> None:
    path = tmp_path / "secrets"
    path.write_text(text)
    with pytest.raises(StartupError, match="webhook secrets"):
        Keyring(str(path))


def test_a_missing_file_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="No such file"):
        Keyring(str(tmp_path / "none"))
