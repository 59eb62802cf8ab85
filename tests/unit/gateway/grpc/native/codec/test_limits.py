"""What wears a connection's patience, and which pings are too many (gRPC proposal A8), over tables of times."""

from __future__ import annotations

import math

import pytest

from gateway.grpc.native.codec.limits import KeepAlive, Patience, PingStrikes


class TestPatience:
    def test_it_is_spent(self) -> None:
        patience = Patience(100.0)
        assert all(patience.spend(1, 100.0) for _ in range(Patience.MOST))
        assert not patience.spend(1, 100.0)

    def test_it_grows_again_and_not_without_end(self) -> None:
        patience = Patience(0.0)
        assert patience.spend(Patience.MOST, 0.0)
        assert patience.spend(Patience.A_SECOND // 2, 0.5)
        assert not patience.spend(1, 0.5)
        assert patience.spend(Patience.MOST, 1e6)
        assert not patience.spend(1, 1e6)

    def test_what_is_overdrawn_counts(self) -> None:
        patience = Patience(0.0)
        assert not patience.spend(Patience.MOST + Patience.A_SECOND, 0.0)
        assert not patience.spend(1, 1.0)
        assert patience.spend(1, 1.002)

    @pytest.mark.parametrize(
        ("cost", "at_once", "a_second"),
        [(Patience.RESET, 1000, 500), (Patience.FRAME, 8000, 2000), (Patience.SETTINGS, 200, 50)],
    )
    def test_what_is_done_in_good_faith(self, cost: int, at_once: int, a_second: int) -> None:
        patience = Patience(0.0)
        assert all(patience.spend(cost, 0.0) for _ in range(at_once))
        assert all(patience.spend(cost, number / a_second) for number in range(1, 100 * a_second))

    @pytest.mark.parametrize("cost", [Patience.RESET, Patience.FRAME, Patience.SETTINGS])
    def test_what_is_not(self, cost: int) -> None:
        patience = Patience(0.0)
        twice_s = cost / Patience.A_SECOND / 2
        assert not all(patience.spend(cost, number * twice_s) for number in range(2 * Patience.MOST // cost + 2))


class TestKeepAlive:
    def test_by_grpcs_names(self) -> None:
        assert KeepAlive.of({}) == KeepAlive()
        assert KeepAlive.of(
            {
                "grpc.keepalive_time_ms": 1500,
                "grpc.keepalive_timeout_ms": 250,
                "grpc.keepalive_permit_without_calls": 1,
                "grpc.http2.max_pings_without_data": 0,
                "grpc.http2.min_ping_interval_without_data_ms": 10,
                "grpc.http2.max_ping_strikes": 5,
                "grpc.max_connection_age_ms": 60_000,
                "grpc.max_connection_age_grace_ms": 2000,
            }
        ) == KeepAlive(1.5, 0.25, True, 0, 0.01, 5, 60.0, 2.0)


CALLS, NONE = True, False
DATA = math.nan  # in place of a time: data went to the client


class TestPings:
    @pytest.mark.parametrize(
        ("keep_alive", "pings", "enough_after"),
        [
            # the third that comes too early, of a client that has calls
            (KeepAlive(), [(0, CALLS), (1, CALLS), (2, CALLS), (3, CALLS)], 4),
            (KeepAlive(), [(number * 299.9, CALLS) for number in range(4)], 4),
            (KeepAlive(), [(number * 300.0, CALLS) for number in range(99)], None),
            # without calls every two hours
            (KeepAlive(), [(number * 300.0, NONE) for number in range(4)], 4),
            (KeepAlive(), [(number * 7200.0, NONE) for number in range(99)], None),
            (KeepAlive(permit_without_calls=True), [(number * 300.0, NONE) for number in range(99)], None),
            # what counts is whether there are calls when the ping comes, not when the one before came
            (KeepAlive(), [(number * 300.0, number % 2 == 1) for number in range(7)], 7),
            (KeepAlive(), [(0, NONE), *((number * 300.0, CALLS) for number in range(1, 99))], None),
            # data in between makes all good
            (
                KeepAlive(),
                [(0, CALLS), (1, CALLS), (2, CALLS), (DATA, CALLS), (3, CALLS), (4, CALLS), (5, CALLS)],
                None,
            ),
            (KeepAlive(), [(0, CALLS), (DATA, CALLS)] * 99, None),
            # strikes stay where nothing is sent
            (KeepAlive(), [(0, CALLS), (1, CALLS), (500, CALLS), (501, CALLS), (900, CALLS), (901, CALLS)], 6),
            (KeepAlive(max_ping_strikes=1), [(0, CALLS), (1, CALLS), (2, CALLS)], 3),
            (KeepAlive(max_ping_strikes=0), [(0, CALLS)] * 99, None),
            (KeepAlive(min_ping_interval_without_data_s=0.0), [(0, CALLS)] * 99, None),
            (KeepAlive(min_ping_interval_without_data_s=10.0), [(0, CALLS), (9, CALLS), (18, CALLS), (27, CALLS)], 4),
        ],
    )
    def test_how_many(self, keep_alive: KeepAlive, pings: list[tuple[float, bool]], enough_after: int | None) -> None:
        strikes, sent_data = PingStrikes(keep_alive), False
        for count, (now_s, has_calls) in enumerate(pings, 1):
            if math.isnan(now_s):
                sent_data = True
                continue
            if strikes.is_enough(now_s, has_calls=has_calls, sent_data=sent_data):
                assert count == enough_after
                return
            sent_data = False
        assert enough_after is None
