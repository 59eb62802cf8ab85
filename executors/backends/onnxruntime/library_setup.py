"""What all sessions of a process share, from `--backend-config=onnxruntime,...`: a pool of threads, an arena.

`enable-global-threadpool=1` is Triton's: one pool, of `intra_op_thread_count` and `inter_op_thread_count` threads, in
place of one for each session. `cpu_mem_limit` is ours: the bytes that all CPU sessions together may hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from charonia.errors import InvalidArgument

_POOL, _LIMIT = "enable-global-threadpool", "cpu_mem_limit"
_SAME_AS_REQUESTED = 1
_EXISTS = "already been created"


def set_up(ort: Any, settings: Mapping[str, str], cores: int) -> None:
    """Set the library up. Raises `InvalidArgument` for a value that makes no sense; a second call changes nothing."""
    intra, inter = (_integer(settings, key) for key in ("intra_op_thread_count", "inter_op_thread_count"))
    if has_global_threads(settings):
        try:
            ort.set_global_thread_pool_sizes(intra or cores, inter or 1)
        except Exception as error:
            if _EXISTS not in str(error):
                raise
    limit = _integer(settings, _LIMIT)
    if limit:
        arena = ort.OrtArenaCfg({"max_mem": limit, "arena_extend_strategy": _SAME_AS_REQUESTED})
        memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
        ort.create_and_register_allocator(memory, arena)


def has_global_threads(settings: Mapping[str, str]) -> bool:
    """Whether sessions have no threads of their own. Raises `InvalidArgument` for another word than 0 or 1."""
    said = settings.get(_POOL, "0").strip().lower()
    if said not in ("0", "1", "false", "true"):
        raise InvalidArgument(f"--backend-config=onnxruntime,{_POOL} must be 0 or 1, got '{said}'")
    return said in ("1", "true")


def has_shared_arena(settings: Mapping[str, str]) -> bool:
    """Whether CPU sessions take their memory from the arena of the process."""
    return bool(_integer(settings, _LIMIT))


def _integer(settings: Mapping[str, str], key: str) -> int:
    said = settings.get(key, "").strip() or "0"
    if not (said.isascii() and said.isdecimal()):
        raise InvalidArgument(f"--backend-config=onnxruntime,{key} must be an integer of at least 0, got '{said}'")
    return int(said)
