"""What a model may be called (R11), and how models of one name are told apart (R2).

With `--model-namespacing` each repository is a namespace: its absolute path or its URL. A model's *key* is then
`<namespace>::<name>`, without it the name alone. Keys say which model is meant everywhere in the log and between the
parts; clients know names. A name has no slash and a namespace has, so that the two forms differ.
"""

from __future__ import annotations

from charonia.errors import InvalidArgument

SEPARATOR = "::"


def check_model_name(name: str) -> None:
    """Raises `InvalidArgument` for an empty name and for one that could leave the repository's directory."""
    if not name.strip():
        raise InvalidArgument("Model name cannot be empty. Please enter a valid name to deploy.")
    if name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise InvalidArgument(f"invalid model name '{name}', model name must not contain path traversal characters")


def can_be_model(name: str) -> bool:
    """Whether `check_model_name` passes a name."""
    try:
        check_model_name(name)
    except InvalidArgument:
        return False
    return True


def model_key(namespace: str, name: str) -> str:
    """The key of a model in a namespace, "" for none."""
    return f"{namespace}{SEPARATOR}{name}" if namespace else name


def is_namespaced(key: str) -> bool:
    return "/" in key


def name_of(key: str) -> str:
    """What clients call a model."""
    return _parts(key)[1]


def namespace_of(key: str) -> str:
    """The namespace of a key, "" for none."""
    return _parts(key)[0]


def can_be_namespace(path: str) -> bool:
    """Whether the keys of models in that path can be taken apart again."""
    last = path.rpartition("/")[2]
    return "/" in path and bool(last) and SEPARATOR not in last and not last.endswith(":")


def _parts(key: str) -> tuple[str, str]:
    parent, slash, last = key.rpartition("/")
    if not slash:
        return "", key
    directory, _, name = last.partition(SEPARATOR)
    return f"{parent}/{directory}", name
