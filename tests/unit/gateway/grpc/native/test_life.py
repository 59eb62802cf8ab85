"""Signs of life and ages (G31, gRPC proposals A8 and A9), in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from virtual_time import VirtualLoop

from gateway.grpc.native import life
from gateway.grpc.native.codec.limits import KeepAlive
from gateway.grpc.native.life import FIRST_WORDS_S, Life


class Peer:
    """A connection as `Life` sees it; `answers` is what the client does about a ping."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.is_open = True
        self.has_calls = True
        self.said: list[tuple[float, str]] = []
        self.answers: Callable[[], None] = lambda: None

    def ping(self) -> None:
        self._say("ping")
        self.answers()

    def leave(self) -> None:
        self._say("leave")

    def abort(self) -> None:
        self._say("abort")

    def _say(self, what: str) -> None:
        self.said.append((round(self._loop.time(), 6), what))


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


@pytest.fixture
def peer(loop: VirtualLoop) -> Peer:
    return Peer(loop)


def begun(loop: VirtualLoop, peer: Peer, keep_alive: KeepAlive) -> Life:
    async def begin() -> Life:
        made = Life(peer, keep_alive)
        made.begin()
        return made

    return loop.run_until_complete(begin())


class TestFirstWords:
    def test_who_says_nothing_is_sent_away(self, loop: VirtualLoop, peer: Peer) -> None:
        peer.is_open = False
        begun(loop, peer, KeepAlive())
        loop.advance(FIRST_WORDS_S - 0.1)
        assert peer.said == []
        loop.advance(0.2)
        assert peer.said == [(FIRST_WORDS_S, "abort")]

    def test_who_speaks_stays(self, loop: VirtualLoop, peer: Peer) -> None:
        peer.is_open = False
        begun(loop, peer, KeepAlive())
        loop.advance(FIRST_WORDS_S - 0.1)
        peer.is_open = True
        loop.advance(1000)
        assert peer.said == []


class TestPings:
    def test_a_client_that_is_gone(self, loop: VirtualLoop, peer: Peer) -> None:
        begun(loop, peer, KeepAlive(time_s=10, timeout_s=3))
        loop.advance(100)
        assert peer.said == [(10, "ping"), (13, "abort")]

    def test_a_client_that_answers_and_sends_nothing_else(self, loop: VirtualLoop, peer: Peer) -> None:
        """Two pings, and no more until it sends something."""
        kept = begun(loop, peer, KeepAlive(time_s=10, timeout_s=3))

        def answer() -> None:
            kept.heard = True

        peer.answers = answer
        loop.advance(100)
        assert peer.said == [(10, "ping"), (23, "ping")]
        kept.heard = True
        loop.advance(60)
        assert [what for _, what in peer.said] == ["ping"] * 4

    def test_one_that_is_heard_is_not_asked(self, loop: VirtualLoop, peer: Peer) -> None:
        kept = begun(loop, peer, KeepAlive(time_s=10, timeout_s=3))
        for _ in range(20):
            kept.heard = True
            loop.advance(9.9)
        assert peer.said == []
        loop.advance(20)
        assert [what for _, what in peer.said] == ["ping", "abort"]

    def test_without_calls_only_where_that_is_permitted(self, loop: VirtualLoop, peer: Peer) -> None:
        peer.has_calls = False
        begun(loop, peer, KeepAlive(time_s=10, timeout_s=3))
        loop.advance(95)
        assert peer.said == []
        peer.has_calls = True
        loop.advance(6)
        assert peer.said == [(100, "ping")]
        other = Peer(loop)
        other.has_calls = False
        begun(loop, other, KeepAlive(time_s=10, timeout_s=3, permit_without_calls=True))
        loop.advance(14)
        assert other.said == [(111, "ping"), (114, "abort")]

    def test_as_many_as_it_takes_without_a_limit(self, loop: VirtualLoop, peer: Peer) -> None:
        kept = begun(loop, peer, KeepAlive(time_s=10, timeout_s=3, max_pings_without_data=0))

        def answer() -> None:
            kept.heard = True

        peer.answers = answer
        loop.advance(134)
        assert [what for _, what in peer.said] == ["ping"] * 10

    def test_none_at_all(self, loop: VirtualLoop, peer: Peer) -> None:
        begun(loop, peer, KeepAlive.of({"grpc.keepalive_time_ms": 2**31 - 1}))
        loop.advance(1e7)
        assert peer.said == []


class TestAge:
    def test_it_ends_about_then(self, loop: VirtualLoop, peer: Peer) -> None:
        for _ in range(50):
            begun(loop, peer, KeepAlive(max_age_s=100, max_age_grace_s=5))
        loop.advance(1000)
        left = [at_s for at_s, what in peer.said if what == "leave"]
        cut = [at_s for at_s, what in peer.said if what == "abort"]
        assert len(left) == 50
        assert 90 <= min(left) < max(left) <= 110
        assert cut == pytest.approx([at_s + 5 for at_s in left])

    def test_without_a_grace_calls_end_by_themselves(
        self, loop: VirtualLoop, peer: Peer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(life, "_JITTER", 0.0)
        begun(loop, peer, KeepAlive(max_age_s=100))
        loop.advance(1e5)
        assert [each for each in peer.said if each[1] != "ping"] == [(100, "leave"), (7220, "abort")]
        # the second is for a client that has not answered a ping in two hours


def test_nothing_happens_after_the_end(loop: VirtualLoop, peer: Peer) -> None:
    peer.is_open = False
    kept = begun(loop, peer, KeepAlive(time_s=10, timeout_s=3, max_age_s=11, max_age_grace_s=1))
    loop.advance(9)
    kept.end()
    loop.advance(1000)
    assert peer.said == []
