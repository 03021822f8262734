"""Building images by name; what ``gpuspawner image build`` and ``python -m images`` call."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from images import disk, initramfs, kernel
from images.artifact import Manifest, SourceFile, publish, utc_now
from images.base import BASE_STAGES, base_cached, base_inputs, base_tree
from images.cache import digest_of, entry, prune, require_space
from images.errors import ImageError
from images.kernel import uncompressed
from images.lab import recipe, scene
from images.progress import Progress, Sink, Stage

#: Images that this module builds.
NAMES = ("lab",)

_SPACE_MIB = 9000
_PUBLISH = Stage("publish", "Checking and publishing the image", 3.0)
PLAN = (*BASE_STAGES, *scene.STAGES, *recipe.STAGES, *disk.STAGES, _PUBLISH)


def image_digest() -> str:
    """Digest of everything that decides the JupyterLab image."""
    code = [Path(str(module.__file__)).read_text() for module in (disk, initramfs, kernel)]
    return digest_of({"base": base_inputs(), "lab": recipe.inputs(), "code": code})


def build(name: str, out: Path, cache: Path, progress: Sink, *, refresh: bool = False) -> Manifest:
    """Build the image `name` into `out`/`name`; from the cache in seconds if nothing changed.

    :param out: directory of images; made if need be.
    :param cache: build cache, see :func:`images.cache.default_cache`.
    :param progress: receives the events of the build (:mod:`images.progress`).
    :param refresh: take new Debian packages even if the cache has a base.
    :raises ImageError: with a sentence and a hint.
    """
    if name not in NAMES:
        raise ImageError(f"There is no image {name!r} to build.", f"Known: {', '.join(NAMES)}")
    told = Progress(PLAN, progress)
    root = cache / "lab"
    root.mkdir(parents=True, exist_ok=True)
    key = image_digest()[:24]
    if refresh:
        shutil.rmtree(root / key, ignore_errors=True)
    with entry(root, key) as (directory, ready):
        if ready:
            for stage in PLAN[:-1]:
                told.skip(stage.name, "from the cache")
        else:
            if base_cached(cache) and not refresh:
                told.skip("base", "from the cache")
            require_space(root, _SPACE_MIB, "Building the JupyterLab image")
            _build_lab(directory, cache, told, refresh)
    prune(root, keep=2)
    with told.stage("publish"):
        return _publish_lab(root / key, out)


def _build_lab(directory: Path, cache: Path, progress: Progress, refresh: bool) -> None:
    base = base_tree(cache, progress, refresh=refresh)
    sample = scene.scene_files(cache, progress)
    tree = base.tree()
    (directory / "vmlinux").write_bytes(uncompressed(base.kernel(tree)))
    recipe.initramfs(base, tree).write(directory / "initrd")
    tree.close()
    work = directory / "root"
    recipe.populate(work, base, sample, progress)
    disk.make_disk(work, directory / "root.qcow2", recipe.VIRTUAL_MIB, progress)
    shutil.rmtree(work)
    facts = {"kernel_release": base.kernel_release, "built_at": utc_now()}
    (directory / "facts.json").write_text(json.dumps(facts))


def _publish_lab(source: Path, out: Path) -> Manifest:
    facts = json.loads((source / "facts.json").read_text())
    files = {
        "kernel": SourceFile(source / "vmlinux", "vmlinux"),
        "initrd": SourceFile(source / "initrd", "initrd"),
        "root": SourceFile(source / "root.qcow2", "root.qcow2", recipe.VIRTUAL_MIB, "qcow2"),
    }
    return publish(
        "lab",
        "lab",
        files,
        recipe.CMDLINE,
        out=out,
        title=recipe.TITLE,
        kernel_release=facts["kernel_release"],
        built_at=facts["built_at"],
        min_memory_mib=recipe.MIN_MEMORY_MIB,
        packages=recipe.packages(),
    )
