"""A change of a rule is made to the rule that counts, also while another process writes one."""

from __future__ import annotations

import catalog_facts as facts

from charonia.calls.route_control import RouteControl
from charonia.facts.events import RouteChanged
from charonia.releases.route_change import changed_rule
from charonia.releases.route_rule import RouteRule, route_fact, rule_of


class Rivalled:
    """Control facts of a log in which another writer is first with `before`, and builds on what counts with `after`."""

    def __init__(self, before: list[RouteChanged], after: dict[str, object] | None = None) -> None:
        self.catalog = facts.catalog(facts.joined(), facts.loaded(version=1), facts.loaded(version=2), facts.scanned())
        self._before = before
        self._after = after
        self.written = 0

    async def announce(self, fact: RouteChanged) -> None:
        self.written += 1
        for rival in self._before:
            self.catalog.apply(rival)
        self._before = []
        self.catalog.apply(fact)
        if self._after is not None:
            rule = changed_rule(rule_of(fact), self._after, [1, 2], 5)
            self._after = None
            self.catalog.apply(route_fact("m", fact.revision + 1, rule))

    async def changed(self) -> None:
        raise AssertionError("facts are folded at once here")


async def test_a_change_that_lost_is_made_again_even_if_the_winner_was_changed_meanwhile() -> None:
    control = Rivalled([route_fact("m", 1, RouteRule(2)), route_fact("m", 2, RouteRule(1))])
    rule = await RouteControl(control).change("m", {"shadow": 2})
    assert rule is not None
    assert (rule.present, rule.shadow, control.written) == (1, 2, 2)
    assert control.catalog.routes.rules["m"] == rule


async def test_a_change_that_another_one_followed_has_counted() -> None:
    control = Rivalled([], {"shadow": 2})
    rule = await RouteControl(control).change("m", {"present": 1})
    assert rule is not None
    assert (rule.present, rule.shadow, control.written) == (1, 2, 1)


async def test_a_rule_that_cannot_be_read_is_written_over() -> None:
    control = Rivalled([RouteChanged("m", 1, '{"present":"x"}')])
    rule = await RouteControl(control).change("m", {"present": 1})
    assert rule is not None
    assert (control.catalog.routes.revisions["m"], control.catalog.routes.rules["m"]) == (2, rule)


async def test_a_removal_takes_away_what_another_writer_made_of_the_rule_and_not_a_later_one() -> None:
    first = changed_rule(None, {"present": 1}, [1, 2], 3)
    control = Rivalled([route_fact("m", 2, changed_rule(first, {"shadow": 2}, [1, 2], 4))])
    control.catalog.apply(route_fact("m", 1, first))
    assert await RouteControl(control).change("m", None) is None
    assert (control.written, control.catalog.routes.rules) == (2, {})
    control = Rivalled([], {"present": 2})
    control.catalog.apply(route_fact("m", 1, first))
    later = await RouteControl(control).change("m", None)
    assert later is not None
    assert (later.present, control.written) == (2, 1)
    assert control.catalog.routes.rules == {"m": later}
