"""The response cache's options in the forms Triton takes, and one sentence for every other (K1)."""

from __future__ import annotations

import pytest

from charonia.errors import StartupError
from charonia.options.cache_options import UNBOUNDED, CacheOptions, cache_options
from charonia.options.values import parse, render


def options(*argv: str, **environment: str) -> CacheOptions:
    return cache_options(parse("gateway", list(argv), {}, {}), environment)


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
    assert options(*argv) == CacheOptions(bytes_)


@pytest.mark.parametrize(
    ("settings", "environment", "expected"),
    [
        ("host=cache", {}, CacheOptions(UNBOUNDED, "redis://cache:6379/0")),
        ("host=::1,port=7,db=3,size=9,pool_size=4", {}, CacheOptions(9, "redis://[::1]:7/3")),
        ("host=h,user=a/b,password=p@:w", {}, CacheOptions(UNBOUNDED, "redis://a%2Fb:p%40%3Aw@h:6379/0")),
        (
            "host=h",
            {"TRITONCACHE_REDIS_USERNAME": "u", "TRITONCACHE_REDIS_PASSWORD": "p"},
            CacheOptions(UNBOUNDED, "redis://u:p@h:6379/0"),
        ),
        (
            "host=h,password=mine",
            {"TRITONCACHE_REDIS_PASSWORD": "p"},
            CacheOptions(UNBOUNDED, "redis://:mine@h:6379/0"),
        ),
        (
            "host=h,tls_enabled=true,cacert=/a b.pem,cert=c,key=k",
            {},
            CacheOptions(UNBOUNDED, "rediss://h:6379/0?ssl_ca_certs=%2Fa+b.pem&ssl_certfile=c&ssl_keyfile=k"),
        ),
    ],
)
def test_a_server_of_its_own(settings: str, environment: dict[str, str], expected: CacheOptions) -> None:
    assert options(f"--cache-config=redis,{settings}", **environment) == expected
    # as Triton's documents write it, one setting at a time
    parts = [f"--cache-config=redis,{setting}" for setting in settings.split(",")]
    assert options(*parts, **environment) == expected


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
        (["--cache-config=local,size=big"], "the size in --cache-config local must be a whole number, got 'big'"),
        (["--cache-config=local,size=-1"], "the size in --cache-config local must be a whole number, got '-1'"),
        (["--cache-config=local,colour=5"], "unknown setting 'colour' in --cache-config local: there is size"),
        (["--cache-config=disk,size=5"], "unknown cache 'disk' in --cache-config: there are local and redis"),
        (["--cache-config=redis,port=1"], "--cache-config redis needs the setting host"),
        (["--cache-config=redis,host=h,port=x"], "the port in --cache-config redis must be a whole number, got 'x'"),
        (
            ["--cache-config=redis,host=h,tls_enabled=maybe"],
            "the tls_enabled in --cache-config redis must be true or false, got 'maybe'",
        ),
        (["--cache-config=redis,host=h,cert=c"], "certificates in --cache-config redis need tls_enabled=true"),
        (["--cache-config=redis,password"], "--cache-config must be <cache>,<key>=<value>, got 'redis'"),
        (["--response-cache-byte-size=-1"], "--response-cache-byte-size must be at least 0, got '-1'"),
    ],
)
def test_one_sentence(argv: list[str], sentence: str) -> None:
    with pytest.raises(StartupError) as caught:
        options(*argv)
    assert str(caught.value) == sentence


def test_serve_hands_them_on() -> None:
    values = parse("serve", ["--cache-config=local,size=5", "--model-repository=m"], {}, {})
    assert "--cache-config=local,size=5" in render("gateway", values)
