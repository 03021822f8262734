"""``gpuspawner_config.py``: what the hub and the allocator must agree on.

Both read the same file, found by ``GPUSPAWNER_CONFIG``, else ``/etc/gpuspawner``. It is a
traitlets file as JupyterHub's own: ``c.Installation.state_dir = "/var/lib/gpuspawner"``.
"""

from __future__ import annotations

import os
from pathlib import Path

from traitlets import Unicode
from traitlets.config import Config, Configurable
from traitlets.config.loader import PyFileConfigLoader

DEFAULT_PATH = "/etc/gpuspawner/gpuspawner_config.py"


class ConfigError(Exception):
    """The configuration cannot be used; the text says where and what to change."""


def config_path() -> Path:
    """Where the configuration file is looked for."""
    return Path(os.environ.get("GPUSPAWNER_CONFIG") or DEFAULT_PATH)


def load_config(path: Path | None = None) -> Config:
    """Read the file. A missing file is an empty configuration; a broken one is an error."""
    path = path or config_path()
    if not path.exists():
        return Config()
    try:
        config: Config = PyFileConfigLoader(path.name, path=str(path.parent)).load_config()
    except Exception as error:
        raise ConfigError(
            f"{path} cannot be read: {type(error).__name__}: {error}. "
            "Correct the file, then start again."
        ) from error
    return config


class Installation(Configurable):
    """Shared by hub, allocator and command line."""

    state_dir = Unicode(
        "/var/lib/gpuspawner",
        help="Folder for the database, tokens and built images. Only root may read it.",
    ).tag(config=True)

    hub_id = Unicode(
        "hub",
        help="""Name of this hub. Leases and homes are keyed by it, so that two hubs can share one
        pool. Changing it makes every home a new one.""",
    ).tag(config=True)

    allocator_url = Unicode(
        "http://127.0.0.1:8091/services/gpu/",
        help="Where the allocator listens, as the hub reaches it.",
    ).tag(config=True)

    spawner_token_file = Unicode(
        help="""File (mode 0600) with the token by which the hub's spawner is known to the
        allocator. Default: ``spawner.token`` in ``state_dir``.""",
    ).tag(config=True)

    images_dir = Unicode(
        help="Folder with the built images. Default: ``images`` in ``state_dir``.",
    ).tag(config=True)

    def token_path(self) -> Path:
        """The spawner token's file."""
        return Path(self.spawner_token_file or Path(self.state_dir) / "spawner.token")

    def images_path(self) -> Path:
        """The images' folder."""
        return Path(self.images_dir or Path(self.state_dir) / "images")

    def spawner_token(self) -> str:
        """The spawner's token, or an error that says what to do."""
        path = self.token_path()
        try:
            token = path.read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"The spawner's token cannot be read from {path} ({error.strerror}). Make it with "
                "'gpuspawner token' as the user that runs the allocator, readable by the hub's "
                "user alone."
            ) from error
        if len(token) < 32:
            raise ConfigError(
                f"The token in {path} is too short; make one with 'gpuspawner token'."
            )
        return token


def installation(path: Path | None = None) -> Installation:
    """The shared settings from the configuration file."""
    return Installation(config=load_config(path))


def ledger_url(path: Path | None = None) -> str:
    """The allocator's database as the configuration file says."""
    config = load_config(path)
    chosen = config.Allocator.db_url if "db_url" in config.Allocator else ""
    return str(chosen) or f"sqlite:///{Installation(config=config).state_dir}/ledger.sqlite"
