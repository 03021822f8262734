"""The state directory: secrets, configuration, and where everything lies."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy.stack.options import Options
from deploy.stack.say import Problem

MARK = ".gpuspawner-quickstart"
GENERATED = "# Written by deploy/quickstart at every start: changes here are lost.\n"


@dataclass(frozen=True)
class State:
    """Paths below the state directory."""

    root: Path

    @property
    def venv(self) -> Path:
        """The virtual environment."""
        return self.root / "venv"

    @property
    def cache(self) -> Path:
        """What image builds keep for the next one. ``GPUSPAWNER_CACHE`` names another place."""
        return Path(os.environ.get("GPUSPAWNER_CACHE") or self.root / "cache")

    @property
    def images(self) -> Path:
        """The built images."""
        return self.root / "images"

    @property
    def config(self) -> Path:
        """``gpuspawner_config.py``."""
        return self.root / "gpuspawner_config.py"

    @property
    def emulated_host(self) -> Path:
        """The declaration of the emulated host; the reader may edit it."""
        return self.root / "quickstart-host.yaml"

    @property
    def passwords(self) -> Path:
        """User names and passwords, for the reader."""
        return self.root / "passwords.txt"

    def log(self, name: str) -> Path:
        """Log file of a process."""
        return self.root / "logs" / f"{name}.log"

    def check_ours(self) -> None:
        """Modes are changed here, and ``--purge`` deletes all of it.

        :raises Problem: when there is a directory that no quickstart has made.
        """
        if not self.root.exists():
            return
        names = {path.name for path in self.root.iterdir()}
        if names and MARK not in names:
            raise Problem(
                f"{self.root} is not empty and no quickstart has made it.",
                "Name a directory of its own with --state DIR.",
            )

    def make(self) -> None:
        """Make the directory, for root alone but for what QEMU must reach below it."""
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / MARK).touch()
        # QEMU may run as a user of its own (libvirt-qemu) and must pass through to pool/.
        self.root.chmod(0o711)
        (self.root / "pool").mkdir(exist_ok=True)
        (self.root / "pool").chmod(0o711)
        (self.root / "logs").mkdir(exist_ok=True)
        (self.root / "logs").chmod(0o700)

    @contextmanager
    def lock(self) -> Iterator[int]:
        """One quickstart at a time. Gives the descriptor that holds the lock.

        :raises Problem: when another one has this directory.
        """
        with open(self.root / "lock", "a+", encoding="ascii") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                stream.seek(0)
                raise Problem(
                    f"A quickstart runs already on {self.root} (process {stream.read().strip()}).",
                    "Stop it with Ctrl-C first, or name another directory with --state DIR.",
                ) from None
            stream.truncate(0)
            stream.write(f"{os.getpid()}\n")
            stream.flush()
            yield stream.fileno()
            stream.truncate(0)

    def purge(self) -> None:
        """Delete everything, homes too."""
        shutil.rmtree(self.root)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read, never readable by others in between."""
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(text)
    draft.replace(path)


def secret(path: Path, make_text: str = "") -> str:
    """The secret in ``path``; made with mode 0600 when it is not there yet."""
    if path.exists():
        path.chmod(0o600)
        return path.read_text().strip()
    text = make_text or secrets.token_hex(32)
    write_private(path, text + "\n")
    return text


@dataclass(frozen=True)
class Secrets:
    """What the parts of an installation know each other and the users by."""

    user_password: str
    admin_password: str
    proxy_token: str


def make_secrets(state: State) -> Secrets:
    """Made once; later starts find the same."""
    for name in ("spawner.token", "service.token"):
        secret(state.root / name)
    made = Secrets(
        user_password=secret(state.root / "password", secrets.token_urlsafe(9)),
        # JupyterHub refuses a shared admin password of fewer than 32 characters.
        admin_password=secret(state.root / "admin.password", secrets.token_urlsafe(24)),
        proxy_token=secret(state.root / "proxy.token"),
    )
    write_private(
        state.passwords,
        f"user name: any, such as ada\npassword:  {made.user_password}\n\n"
        f"user name: admin\npassword:  {made.admin_password}\n",
    )
    return made


def gpuspawner_config(state: State, options: Options) -> str:
    """The text of ``gpuspawner_config.py``."""
    return (
        GENERATED
        + f"""\
c = get_config()  # noqa: F821

c.Installation.state_dir = {str(state.root)!r}
c.Installation.allocator_url = "http://127.0.0.1:{options.allocator_port}/services/gpu/"
c.Allocator.hub_api_url = "{hub_url(options)}/hub/api"
c.Allocator.pool_dir = {str(state.root / "pool")!r}
"""
    )


def hub_url(options: Options) -> str:
    """Where guests reach the hub: the first address of their network, which is the bridge's."""
    bridge = ipaddress.ip_network(options.network)[1]
    return f"http://{bridge}:{options.hub_port}"


def hub_environment(options: Options) -> dict[str, str]:
    """What ``jupyterhub_config.py`` takes from the environment; its secrets are files."""
    return {
        "GPUSPAWNER_HUB_URL": hub_url(options),
        "GPUSPAWNER_BIND_URL": f"http://{options.host}:{options.port}",
        "GPUSPAWNER_PROXY_API": f"http://127.0.0.1:{options.proxy_api_port}",
    }
