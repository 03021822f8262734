"""``gpuspawner token``: the secrets by which hub and allocator know each other."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from gpuspawner.cli.common import fail, settings

SERVICE_TOKEN = "service.token"
PROXY_TOKEN = "proxy.token"


def token(
    replace: Annotated[
        bool, typer.Option("--replace", help="Make new ones; restart hub and allocator after.")
    ] = False,
) -> None:
    """Make the token files (mode 0600) that do not exist yet.

    spawner.token is what the hub's spawner and this command show to the allocator; service.token
    is what the allocator shows to the hub; proxy.token is what the hub shows to the proxy.
    """
    config = settings()
    folder = Path(config.state_dir)
    for path in (config.token_path(), folder / SERVICE_TOKEN, folder / PROXY_TOKEN):
        try:
            made = make_token(path, replace)
        except OSError as error:
            fail(f"{path} cannot be written ({error.strerror}): run this as the allocator's user.")
        typer.echo(f"{path}: {'made' if made else 'is there already'}")


def make_token(path: Path, replace: bool = False) -> bool:
    """Write 64 hex digits into ``path``, for its owner alone. False if it was there already.

    :raises OSError: when it cannot be written.
    """
    if path.exists() and not replace:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(secrets.token_hex(32) + "\n")
    draft.replace(path)
    return True
