"""``gpuspawner image``: what guests boot from."""

from __future__ import annotations

import json as json_module
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from gpuspawner.cli.common import Json, ago, ask, fail, settings, show_json, show_table

app = typer.Typer(help="Images that guests boot from.", no_args_is_help=True)

DEFAULT_CACHE = Path("/var/cache/gpuspawner")


@app.command("list")
def list_images(
    local: Annotated[
        bool, typer.Option("--local", help="Read the images folder; ask no allocator.")
    ] = False,
    json: Json = False,
) -> None:
    """Show the images, and which hosts have them."""
    if local:
        _list_local(json)
        return
    images = ask(lambda client: client.images())
    if json:
        show_json(images)
        return
    show_table(
        ("image", "role", "title", "MiB", "built", "kernel", "hosts", "digest"),
        (
            (
                image.name,
                image.role,
                image.title,
                image.bytes >> 20,
                ago(image.built_at),
                image.kernel_release,
                " ".join(
                    [*sorted(image.hosts), *(f"{h} {p}%" for h, p in sorted(image.copying.items()))]
                ),
                image.digest.removeprefix("sha256:")[:12],
            )
            for image in images
        ),
        "No images. Build them with 'gpuspawner image build lab' and 'gpuspawner image build "
        "service'.",
    )


def _list_local(json: bool) -> None:
    manifests = read_manifests(settings().images_path())
    if json:
        show_json(list(manifests.values()))
        return
    show_table(
        ("image", "role", "title", "built", "kernel", "digest"),
        (
            (
                name,
                manifest.get("role"),
                manifest.get("title"),
                manifest.get("built_at"),
                manifest.get("kernel_release"),
                str(manifest.get("digest", "")).removeprefix("sha256:")[:12],
            )
            for name, manifest in manifests.items()
        ),
        f"No images in {settings().images_path()}.",
    )


def read_manifests(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> manifest of the built images in ``folder``. One that cannot be read has the entry
    ``error`` instead, a sentence."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*/manifest.json")):
        try:
            manifest = json_module.loads(path.read_text())
            lacking = [
                entry["file"]
                for entry in manifest["files"].values()
                if not _whole(path.parent / entry["file"], entry["bytes"])
            ]
            if lacking:
                manifest["error"] = f"{', '.join(lacking)} is missing or cut off"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            manifest = {"error": f"{path} cannot be read ({type(error).__name__})"}
        found[path.parent.name] = manifest
    return found


def _whole(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


@app.command()
def build(
    name: Annotated[
        Literal["lab", "service"],
        typer.Argument(help="lab: JupyterLab for users; service: diagnoses GPUs between users."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for it (default: the configured images folder).")
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="What builds keep for the next one (default: GPUSPAWNER_CACHE)."),
    ] = None,
    progress: Annotated[Literal["auto", "plain", "bar", "json"], typer.Option()] = "auto",
) -> None:
    """Build an image on this machine; needs root for the JupyterLab image."""
    out = out or settings().images_path()
    cache = cache or Path(os.environ.get("GPUSPAWNER_CACHE") or DEFAULT_CACHE)
    try:
        made = build_image(name, out, cache, progress)
    except ImportError as error:
        fail(f"The builder is not installed ({error.name}): pip install 'gpuspawner[images]'.")
    typer.echo(str(made))


def build_image(name: str, out: Path, cache: Path, progress: str) -> Path:
    """Build ``name`` below ``out`` from the cache or anew; its folder.

    A build that fails ends the command with the builder's sentence and hint. The builders are
    imported here: they need packages that a machine without them can do without.
    """
    from images.build import NAMES, build
    from images.errors import ImageError
    from images.progress import Progress, sink_for

    sink = sink_for(progress)
    try:
        if name in NAMES:
            return out / build(name, out, cache, sink).name
        from images.base import BASE_STAGES
        from service_vm.build import STAGES
        from service_vm.build import build as build_service

        return build_service(out, cache, Progress((*BASE_STAGES, *STAGES), sink))
    except ImageError as error:
        fail(str(error))
