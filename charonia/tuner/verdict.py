"""Which of two measured configurations is better, which are on the Pareto front, and why the winner won. Pure.

An observation is a document (`trial_measurement` makes it): `targets` has for each model under load the figures of each
level, `memory` the bytes of the server and of its processes, `failed` why there are no figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

RATE, LATENCY, MEMORY = "rate", "latency", "memory"
OBJECTIVES = (RATE, LATENCY, MEMORY)

_FAILED, _BEYOND, _WITHIN = range(3)
_ALL_OF_ROUNDS = 4
"""Up to so many rounds the winner has to be better in each, of more in all but one."""

Observation = Mapping[str, Any]


class Score(NamedTuple):
    """Higher is better. `rank`: failed (0), beyond a limit (1, by how far), within all (2, by the objective)."""

    rank: int
    value: float


@dataclass(frozen=True, slots=True)
class Aim:
    """What is sought: most of `objective` within `latency_us` (of `percentile`) and `memory_bytes`, 0 for no limit."""

    objective: str = RATE
    percentile: int = 99
    latency_us: float = 0.0
    memory_bytes: int = 0


def improves(new: Score, old: Score, gain: float) -> bool:
    """Whether `new` is better by more than noise: a higher rank, or of the same rank the part `gain` more."""
    if new.rank != old.rank:
        return new.rank > old.rank
    return new.value > old.value + gain * abs(old.value)


def score_of(observation: Observation, aim: Aim) -> Score:
    """The score of the best level."""
    levels = levels_of(observation)
    if not levels:
        return Score(_FAILED, 0.0)
    return max(_level_score(observation, at, aim) for at in range(levels))


def best_level(observation: Observation, aim: Aim) -> int:
    """The index of the level that the score is of."""
    return max(range(levels_of(observation)), key=lambda at: _level_score(observation, at, aim))


def levels_of(observation: Observation) -> int:
    """How many levels were measured: none of a configuration that failed."""
    if observation.get("failed"):
        return 0
    return min((len(levels) for levels in observation["targets"].values()), default=0)


def figures(observation: Observation, at: int, target: str = "") -> dict[str, float]:
    """Rate (of several models the geometric mean, so that each counts alike), latency in us (of several the longest)
    and bytes of a level; with `target` rate and latency of that model alone."""
    levels = [levels[at] for name, levels in observation["targets"].items() if target in ("", name)]
    rates = [level["rate"] for level in levels]
    rate = rates[0]
    if len(rates) > 1:
        rate = math.exp(sum(map(math.log, rates)) / len(rates)) if min(rates) > 0 else 0.0
    return {
        "rate": rate,
        "latency_us": max(level["latency_us"]["judged"] for level in levels),
        "memory_bytes": float(observation.get("memory", {}).get("bytes", 0)),
    }


def _level_score(observation: Observation, at: int, aim: Aim) -> Score:
    levels = [levels[at] for levels in observation["targets"].values()]
    found = figures(observation, at)
    if any(sum(level["errors"].values()) for level in levels) or found["rate"] <= 0:
        return Score(_FAILED, 0.0)
    excess = 1.0
    for value, limit in ((found["latency_us"], aim.latency_us), (found["memory_bytes"], aim.memory_bytes)):
        if limit:
            excess = max(excess, value / limit)
    if excess > 1.0:
        return Score(_BEYOND, -excess)
    value = {RATE: found["rate"], LATENCY: -found["latency_us"], MEMORY: -found["memory_bytes"]}[aim.objective]
    return Score(_WITHIN, value)


def is_within(score: Score) -> bool:
    """Whether it has answers and keeps to the limits."""
    return score.rank == _WITHIN


def has_failed(score: Score) -> bool:
    """Whether it has no figures, or requests that failed."""
    return score.rank == _FAILED


def cannot_stay(base: Score) -> str:
    """The sentence that the configuration as written, of this score, is beyond a limit and by how much; or empty."""
    if base.rank != _BEYOND:
        return ""
    return f"The configuration as written cannot stay: it is beyond a limit, at {-base.value * 100:.0f} % of it."


def failure(observation: Observation) -> str:
    """Why a configuration has no figures, or the most frequent error of its requests; empty if nothing failed."""
    if observation.get("failed"):
        return str(observation["failed"])
    errors: dict[str, int] = {}
    for levels in observation["targets"].values():
        for level in levels:
            for said, count in level["errors"].items():
                errors[said] = errors.get(said, 0) + count
    return max(errors, key=lambda said: errors[said], default="")


def ranked(observations: Mapping[str, Observation], aim: Aim) -> list[str]:
    """Keys from the best to the worst, those that failed left out; equals stay in their order."""
    scores = {key: score_of(observation, aim) for key, observation in observations.items()}
    return sorted((key for key in scores if scores[key].rank > _FAILED), key=lambda key: scores[key], reverse=True)


def front(observations: Mapping[str, Observation], aim: Aim) -> list[str]:
    """The Pareto front by rate, latency and memory, by falling rate: keys of those than which none is better in one of
    the three and not worse in the others. Each counts with its best level."""
    points: dict[str, tuple[float, float, float]] = {}
    for key, observation in observations.items():
        if score_of(observation, aim).rank > _FAILED:
            found = figures(observation, best_level(observation, aim))
            points[key] = (found["rate"], -found["latency_us"], -found["memory_bytes"])

    def beaten(point: tuple[float, ...]) -> bool:
        return any(
            other != point and all(mine <= theirs for mine, theirs in zip(point, other, strict=True))
            for other in points.values()
        )

    kept = [key for key, point in points.items() if not beaten(point)]
    return sorted(kept, key=lambda key: points[key], reverse=True)


def confirmed(
    rounds: Sequence[Mapping[str, Observation]], base: str, aim: Aim, gain: float
) -> tuple[str, dict[str, Score]]:
    """The winner of configurations that were measured in turns, and the median score of each.

    The median of each one's scores counts. The configuration as written (`base`) stays unless another is better by
    `gain`, and is better in each round too, of more than four rounds in all but one: a median of three may be luck.
    That does not hold for a `base` that is beyond the limits, which cannot stay.
    """
    scores: dict[str, Score] = {}
    for key in rounds[0]:
        found = sorted(score_of(turn[key], aim) for turn in rounds if key in turn)
        rank = found[(len(found) - 1) // 2].rank
        scores[key] = Score(rank, median(score.value for score in found if score.rank == rank))
    needed = len(rounds) - (len(rounds) > _ALL_OF_ROUNDS) if is_within(scores[base]) else 0
    for key in sorted(scores, key=lambda key: scores[key], reverse=True):
        if improves(scores[key], scores[base], gain) and _rounds_won(rounds, key, base, aim) >= needed:
            return key, scores
    return base, scores


def stays_unheard(rounds: Sequence[Mapping[str, Observation]], base: str, trial: Observation, aim: Aim) -> str:
    """Why the configuration as written stays whatever the turns say: it kept to the limits in its trial and failed in
    a turn, so that it has not been heard in each. Empty if that is not so."""
    lost = sum(has_failed(score_of(turn[base], aim)) for turn in rounds)
    if not lost or not is_within(score_of(trial, aim)):
        return ""
    return (
        f"The configuration as written stays: it kept to the limits alone, and failed in {lost} of {len(rounds)} "
        "rounds of the turns. The same command measures these rounds again."
    )


def _rounds_won(rounds: Sequence[Mapping[str, Observation]], key: str, base: str, aim: Aim) -> int:
    return sum(score_of(turn[key], aim) > score_of(turn[base], aim) for turn in rounds)


def overlap(rounds: Sequence[Mapping[str, Observation]], base: str, winner: str, aim: Aim) -> bool:
    """Whether the best round of `base` was as good as the worst one of the winner; no without rounds."""
    if not rounds:
        return False
    return max(score_of(turn[base], aim) for turn in rounds) >= min(score_of(turn[winner], aim) for turn in rounds)


def with_memory_of(turn: Observation, trial: Observation) -> dict[str, Any]:
    """A turn's observation with the memory of a measurement of the same configuration alone, if that is more.

    Servers side by side share pages of libraries, which the system counts for each in part.
    """
    found = dict(turn)
    if levels_of(turn) and trial.get("memory", {}).get("bytes", 0) > turn.get("memory", {}).get("bytes", 0):
        found["memory"] = trial["memory"]
    return found


def typical_turn(
    turns: Sequence[Mapping[str, Observation]], base: str, winner: str, aim: Aim
) -> Mapping[str, Observation] | None:
    """The turn in which the rates of both had the median ratio; None without one in which both have figures."""
    ratios = []
    for turn in turns:
        if all(score_of(turn[name], aim).rank > _FAILED for name in (base, winner)):
            rates = [figures(turn[name], best_level(turn[name], aim))["rate"] for name in (base, winner)]
            ratios.append((rates[1] / rates[0], turn))
    return sorted(ratios, key=lambda found: found[0])[len(ratios) // 2][1] if ratios else None


def reasons(base: Observation, winner: Observation, changed: Sequence[tuple[str, str, str]], aim: Aim) -> list[str]:
    """Sentences that say what the winner changes and what that did at the server; `changed` are (knob, from, to)."""
    if not changed:
        return [
            "No measured configuration was better than the one as written, by more than the gain that is asked for."
        ]
    said = ["Changed: " + ", ".join(f"{knob} from {before} to {after}" for knob, before, after in changed) + "."]
    if not levels_of(base):
        return [*said, f"The configuration as written could not be measured: {base.get('failed', '')}"]
    levels = best_level(base, aim), best_level(winner, aim)
    was, now = figures(base, levels[0]), figures(winner, levels[1])
    said.append(
        f"Rate {_change(was['rate'], now['rate'])}, p{aim.percentile} latency "
        f"{_change(was['latency_us'], now['latency_us'])}, memory {_change(was['memory_bytes'], now['memory_bytes'])}."
    )
    for target, found in winner["targets"].items():
        before, after = base["targets"][target][levels[0]]["server"], found[levels[1]]["server"]
        for model in after:
            if model in before:
                said += _server_reasons(model, before[model], after[model])
    return said


def _change(before: float, after: float) -> str:
    return f"{(after / before - 1) * 100:+.0f} %" if before else "not known"


def _server_reasons(model: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    said = []
    sizes = [found["inferences"] / found["executions"] if found["executions"] else 0.0 for found in (before, after)]
    if all(sizes) and abs(sizes[1] - sizes[0]) >= 0.05 * sizes[0]:
        said.append(f"{model}: a batch has {sizes[1]:.1f} inferences on average, as written {sizes[0]:.1f}.")
    for name, words in (("queue_us", "waits in the queue"), ("compute_infer_us", "is executed")):
        was, now = before[name] / 1000, after[name] / 1000
        if max(was, now) >= 0.1 and abs(now - was) >= 0.1 * max(was, now):
            said.append(f"{model}: a request {words} for {now:.1f} ms, as written {was:.1f} ms.")
    if before.get("cache_hits", 0) != after.get("cache_hits", 0) and after.get("requests"):
        said.append(
            f"{model}: {after['cache_hits'] / after['requests'] * 100:.0f} % of requests are answered by the cache."
        )
    return said
