"""Every script says what it touches, and is complete when it leaves for the server."""

from __future__ import annotations

import re

import pytest

from charonia.eventlog.redis import scripts


@pytest.mark.parametrize("script", scripts.ALL, ids=lambda script: script.digest.decode()[:8])
def test_a_script_is_whole_and_names_what_it_is_given(script: scripts.Script) -> None:
    text = script.text.decode()
    assert text.startswith("#!lua"), "only with a shebang are flags read and keys of two slots refused"
    assert "#include" not in text

    header = re.match(r"(?:(?:#!|--).*\n|--\n)+", text)
    assert header is not None
    body = text[header.end() :]
    for given in set(re.findall(r"(?:KEYS|ARGV)\[\d+\]", body)):
        assert given in header[0], f"the header does not name {given}"
    assert not re.findall(r"call\('(?!MEMORY|TIME)[A-Z]+', *['\"]", body), "a key must come in KEYS"
    if re.search(r"call\([^)]*_in_slot\(", body):
        assert re.search(r"by\s(-- )?name", header[0]), "the header does not say which keys are named in the script"


@pytest.mark.parametrize("script", scripts.ALL, ids=lambda script: script.digest.decode()[:8])
def test_what_leaves_for_the_server_is_code_that_it_takes_before_the_signing_in(script: scripts.Script) -> None:
    lines = script.source.splitlines()
    assert lines[0].startswith(b"#!lua")
    assert not [line for line in lines if not line.strip() or line.lstrip().startswith(b"--")]
    code = [line for line in script.text.splitlines() if line.strip() and not line.lstrip().startswith(b"--")]
    assert lines == code
    assert len(script.source) < 16_384


def test_scripts_are_told_apart() -> None:
    assert len({script.digest for script in scripts.ALL}) == len(scripts.ALL)
