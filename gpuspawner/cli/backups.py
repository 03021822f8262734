"""``gpuspawner backup`` and ``gpuspawner restore``: the allocator's database as one file."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated

import typer

from gpuspawner.cli.common import fail, plain, settings
from gpuspawner.client import AllocatorClient, AllocatorError, AllocatorUnreachable
from gpuspawner.config import ConfigError, Installation, ledger_url

File = Annotated[Path, typer.Argument(metavar="FILE", help="The backup.")]


def backup(file: File) -> None:
    """Write the allocator's database into FILE (mode 0600). The allocator may run meanwhile.

    It holds names, leases, limits and diagnoses; no token, and nothing of the homes.
    """
    from gpuspawner.ledger.backup import BackupError
    from gpuspawner.ledger.backup import backup as write

    settings()
    try:
        write(ledger_url(), file)
    except (BackupError, ConfigError) as error:
        fail(plain(error))
    typer.echo(f"{file}: {file.stat().st_size} bytes")


def restore(
    file: File,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Replace the allocator's database by the backup FILE. Stop the allocator before.

    Each GPU that was free is wiped and diagnosed again. A VM that was started after the backup
    belongs to no lease then, and is ended when the allocator starts.
    """
    from gpuspawner.ledger.backup import BackupError
    from gpuspawner.ledger.backup import restore as replace

    config = settings()
    if _answers(config):
        fail(
            f"An allocator still answers at {config.allocator_url}. Stop it, for instance with "
            "'systemctl stop gpuspawner-allocator', then try again."
        )
    if not yes:
        typer.confirm("Replace the allocator's database, and end VMs that it does not know?",
                      abort=True)  # fmt: skip
    try:
        replace(ledger_url(), file, int(time.time() * 1000))
    except (BackupError, ConfigError) as error:
        fail(plain(error))
    typer.echo("restored; start the allocator now. Every GPU is wiped and diagnosed first.")


def _answers(config: Installation) -> bool:
    """Whether anything listens where the allocator does."""

    async def ask() -> bool:
        async with AllocatorClient(config.allocator_url, "-", timeout_s=5) as client:
            try:
                await client.health()
            except AllocatorUnreachable:
                return False
            except AllocatorError:
                return True  # in trouble, but there
            return True

    return asyncio.run(ask())
