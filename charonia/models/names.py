"""What a model may be called (interface item R11)."""

from __future__ import annotations

from charonia.errors import InvalidArgument


def check_model_name(name: str) -> None:
    """Raises `InvalidArgument` for an empty name and for one that could leave the repository's directory."""
    if not name.strip():
        raise InvalidArgument("Model name cannot be empty. Please enter a valid name to deploy.")
    if name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise InvalidArgument(f"invalid model name '{name}', model name must not contain path traversal characters")
