"""The response cache's options in the forms Triton takes, and one sentence for every other (K1)."""

from __future__ import annotations

import pytest

from charonia.errors import StartupError
from charonia.options import parse, render
from charonia.standalone.cache_options import cache_size_bytes


def size(*argv: str) -> int:
    return cache_size_bytes(parse("gateway", list(argv), {}, {}))


@pytest.mark.parametrize(
    ("argv", "bytes_"),
    [
        ([], 0),
        (["--cache-config=local,size=1048576"], 1_048_576),
        (["--cache-config", "local,size=5", "--cache-directory=/opt/caches"], 5),
        (["--cache-config=local,size=5", "--cache-config=local,size=7"], 7),
        (["--cache-config=local,size=0"], 0),
        (["--response-cache-byte-size=9"], 9),
        (["--response-cache-byte-size=0"], 0),
    ],
)
def test_sizes(argv: list[str], bytes_: int) -> None:
    assert size(*argv) == bytes_


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (
            ["--cache-config=local,size=5", "--cache-config=redis,host=h"],
            "found multiple cache configurations, but only a single cache is currently supported",
        ),
        (
            ["--cache-config=local,size=5", "--response-cache-byte-size=5"],
            "--response-cache-byte-size is the old spelling of --cache-config; give one of them",
        ),
        (["--cache-config=local"], "--cache-config must be <cache>,<key>=<value>, got 'local'"),
        (["--cache-config=size=5"], "--cache-config must be <cache>,<key>=<value>, got 'size=5'"),
        (["--cache-config=,size=5"], "--cache-config must be <cache>,<key>=<value>, got ',size=5'"),
        (["--cache-config=local,size"], "--cache-config must be <cache>,<key>=<value>, got 'local,size'"),
        (["--cache-config=local,=5"], "--cache-config must be <cache>,<key>=<value>, got 'local,=5'"),
        (["--cache-config=local,size=big"], "the size in --cache-config local must be a number of bytes, got 'big'"),
        (["--cache-config=local,size=-1"], "the size in --cache-config local must be a number of bytes, got '-1'"),
        (["--cache-config=local,colour=5"], "unknown setting 'colour' in --cache-config local: there is size"),
        (["--cache-config=disk,size=5"], "unknown cache 'disk' in --cache-config: there is local"),
        (["--response-cache-byte-size=-1"], "--response-cache-byte-size must be at least 0, got '-1'"),
    ],
)
def test_one_sentence(argv: list[str], sentence: str) -> None:
    with pytest.raises(StartupError) as caught:
        size(*argv)
    assert str(caught.value) == sentence


def test_serve_hands_them_on() -> None:
    values = parse("serve", ["--cache-config=local,size=5", "--model-repository=m"], {}, {})
    assert "--cache-config=local,size=5" in render("gateway", values)
