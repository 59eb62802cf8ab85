"""Which versions of a model a change of its files concerns."""

from __future__ import annotations

from executors.repository.model_directory import Fingerprint


def changed_versions(before: Fingerprint, now: Fingerprint) -> set[int]:
    """Versions that were added, removed or changed since `before`: all of them when a shared file changed."""
    either = set(now.versions) | set(before.versions)
    if (now.config, now.shared) != (before.config, before.shared):
        return either
    return {version for version in either if now.versions.get(version) != before.versions.get(version)}
