"""A log server with the users of `infra/redis/users.acl.template`, each with the password `<role>'s:password`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import log_servers as servers
import redis

REDIS = Path(__file__).resolve().parents[2] / "infra" / "redis"
ROLES = ("gateway", "batcher", "executor", "webhooks", "operator")


def _acl_file(directory: Path) -> Path:
    """The ACL file as the compose stack makes it; the passwords are `<role>'s:password`."""
    for role in ROLES:
        (directory / f"redis_{role}").write_text(f"{role}'s:password\n")
    words = ["sh", str(REDIS / "users.sh"), str(REDIS / "users.acl.template"), str(directory)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    path = directory / "users.acl"
    path.write_text(done.stdout)
    return path


class GuardedServer(servers.LogServer):
    """A log server with the users of the template and one more, `watcher`, who may do everything."""

    def __init__(self, directory: Path, **options: str) -> None:
        acl = _acl_file(directory)
        with acl.open("a") as file:
            file.write("user watcher reset on >watcher ~* +@all\n")
        super().__init__(aclfile=str(acl), acllog_max_len="1000", appendfsync="always", **options)

    def client(self) -> redis.Redis:
        return self.client_of("watcher", "watcher")

    def client_of(self, user: str, password: str = "") -> redis.Redis:
        word = password or f"{user}'s:password"
        return redis.Redis("127.0.0.1", self.port, username=user, password=word, retry=servers.at_once())

    def refusals(self) -> list[str]:
        with self.client() as client:
            return [
                f"{entry['username']} {entry['context']} {entry['reason']} {entry['object']}"
                for entry in client.acl_log()
            ]
