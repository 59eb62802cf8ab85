from __future__ import annotations

from charonia.metrics.part_health import Health, leased


def test_a_part_is_ready_between_its_start_and_its_drain() -> None:
    fresh, taking = True, ""
    health = Health("it starts", leased(lambda: fresh))
    health.add(lambda: taking)
    assert health.unready() == "it starts"
    health.serves()
    assert health.unready() == ""
    taking = "it is taking over model 'a'"
    assert health.unready() == taking
    fresh = False
    assert health.unready() == "its lease in the event log has ended: is the log reachable?"
    fresh, taking = True, ""
    assert health.unready() == ""
    health.drains()
    assert health.unready() == "it drains"
