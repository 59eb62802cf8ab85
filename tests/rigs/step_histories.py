"""Histories of the scheduler of steps as text: requests that came and went, and what each step computed.

# What it shows, and why.
StepScheduler(blocks=8, max_num_seqs=2)     settings; those of `_USUAL` are left out

add a prompt=12 max_tokens=3                further words: shared (tokens that prompts begin with alike), level,
                                            adapter, answer (tokens of an earlier attempt), scores=1 (the
                                            probabilities of the prompt are wanted)
step                                        the next step; `step 3` makes three
        -> a:12                             so many tokens of a prompt
        -> a b:4                            a name alone is one token after a prompt
        ~ preempted b, loaded x into 0, ended a, 3 blocks free
remove a
"""

from __future__ import annotations

import re

from executors.generation.step_scheduler import SchedulerSettings, StepScheduler

_INDENT = " " * 8
_WORDS = re.compile(r"(\w+)=(\w+)")
_USUAL = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "long_prefill_tokens": 8,
    "max_preemptions": 2,
    "blocks": 64,
    "block_tokens": 4,
    "context": 128,
    "adapter_slots": 0,
}


class _Replay:
    def __init__(self, line: str) -> None:
        values = _USUAL | {name: int(value) for name, value in _WORDS.findall(line)}
        of_model = {name: values.pop(name) for name in ("blocks", "block_tokens", "context", "adapter_slots")}
        self.scheduler = StepScheduler(SchedulerSettings(**values), **of_model)

    def act(self, line: str) -> list[str]:
        """The lines that follow a line of the history."""
        verb, _, rest = line.partition(" ")
        if verb == "step":
            return [line for _ in range(int(rest or 1)) for line in self._step()]
        name = rest.split(" ")[0]
        if verb == "remove":
            found = self.scheduler.find(name.encode())
            assert found is not None
            self.scheduler.remove(found)
            return [f"{_INDENT}~ {self.scheduler.pool.available} blocks free"]
        assert verb == "add", line
        words = dict(_WORDS.findall(rest))
        shared, own = int(words.get("shared", 0)), ord(name[0])
        self.scheduler.add(
            name.encode(),
            [*range(shared), *[own] * (int(words["prompt"]) - shared)],
            max_tokens=int(words["max_tokens"]),
            answer=[0] * int(words.get("answer", 0)),
            adapter=words.get("adapter", ""),
            priority=int(words.get("level", 0)),
            scores_prompt="scores" in words,
        )
        return []

    def _step(self) -> list[str]:
        plan = self.scheduler.plan()
        computed = [one.key.decode() for one in plan.decodes]
        computed += [f"{one.key.decode()}:{count}" for one, count in plan.chunks]
        said = [f"preempted {one.key.decode()}" for one in plan.preempted]
        said += [f"loaded {name} into {slot}" for slot, name in plan.adapters]
        sampling = plan.sampling()
        self.scheduler.complete(plan)
        for one in sampling:
            one.answer.append(0)
            if len(one.answer) == one.max_tokens:
                self.scheduler.remove(one)
                said.append(f"ended {one.key.decode()}")
        if said:
            said.append(f"{self.scheduler.pool.available} blocks free")
        lines = [f"{_INDENT}-> {' '.join(computed) or 'nothing'}"]
        return lines + ([f"{_INDENT}~ {', '.join(said)}"] if said else [])


def replay(text: str) -> str:
    """The history with what the scheduler computes now."""
    lines: list[str] = []
    playing: _Replay | None = None
    for line in text.splitlines():
        if line.startswith(_INDENT):
            continue
        lines.append(line)
        if line.startswith("StepScheduler("):
            playing = _Replay(line)
        elif line and not line.startswith("#"):
            assert playing is not None
            lines += playing.act(line)
    return "\n".join(lines) + "\n"
