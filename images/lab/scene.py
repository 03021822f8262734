"""The satellite scene of the welcome notebook: one file of one Debian package, by pin and digest.

The package is downloaded with the machine's own mirrors and proxies, and without what it depends
on; the scene and Debian's copyright file are taken out of it and kept in the build cache.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from images import apt
from images.base import SUITE, run_tool
from images.cache import digest_of, entry, prune, sha256_file
from images.errors import ImageError
from images.packages import PrivateApt
from images.progress import Progress, Stage

STAGES = (Stage("scene", "Fetching the sample scene", 6.0),)


@dataclass(frozen=True)
class Scene:
    """Where the scene comes from.

    :ivar package: Debian package of the suite that the images are made from, component main.
    :ivar version: the exact version of the package.
    :ivar member: path of the file inside the package.
    :ivar sha256: of that file, hex.
    """

    package: str
    version: str
    member: str
    sha256: str

    @property
    def file(self) -> str:
        """Its name without directories."""
        return Path(self.member).name


#: Landsat 7 ETM+ around Olinda, Brazil: bands 1-5 and 7, 349 x 352 pixels of 28.5 m.
LANDSAT = Scene(
    package="r-cran-stars",
    version="0.6-0-4",
    member="usr/lib/R/site-library/stars/tif/L7_ETMs.tif",
    sha256="3b722bf4470144b6691bf720bac08f47c99464acff4dd258252891c06312678e",
)

#: Where it lies in the image, beside its README.
DIRECTORY = "usr/share/gpuspawner/landsat7-olinda"

_PIN = "images/lab/scene.py"


def scene_files(
    cache: Path,
    progress: Progress,
    scene: Scene = LANDSAT,
    sources: Sequence[apt.Source] | None = None,
) -> Path:
    """A directory with the scene and the package's `copyright`; from the cache or fetched now.

    :param sources: mirrors to ask; default the machine's own for the suite.
    :raises ImageError: no mirror has this version, it cannot be reached, or the file is another.
    """
    root = cache / "scene"
    root.mkdir(parents=True, exist_ok=True)
    name = digest_of(asdict(scene))[:24]
    with entry(root, name) as (directory, ready):
        if ready:
            progress.skip("scene", "from the cache")
        else:
            with progress.stage("scene"):
                work = directory / "work"
                package = _download(scene, work, sources or apt.host_sources(SUITE))
                _take(scene, package, work / "tree", directory)
                shutil.rmtree(work)
    prune(root, keep=2)
    return root / name


def install(files: Path, root: Path) -> None:
    """Lay what :func:`scene_files` gave into the tree `root`, beside the README that is there."""
    target = root / DIRECTORY
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(files.iterdir()):
        shutil.copyfile(path, target / path.name)
        (target / path.name).chmod(0o644)


def _download(scene: Scene, work: Path, sources: Sequence[apt.Source]) -> Path:
    """The .deb in `work`; apt has checked it against the archive's signature."""
    try:
        mirrors = PrivateApt(work, sources)
        versions = mirrors.versions(scene.package)
        if scene.version in versions:
            (package,) = mirrors.download(f"{scene.package}={scene.version}")
    except ImageError as error:
        raise ImageError(
            f"The sample scene could not be fetched: {error.what}",
            "Check that `apt-get update` works here (mirror, proxy), then build again.\n"
            f"  {error.hint}",
        ) from None
    if scene.version not in versions:
        have = f"only {scene.package} {', '.join(versions)}" if versions else "no such package"
        raise ImageError(
            f"The sample scene is in {scene.package} {scene.version}, and the mirrors have {have}.",
            f"Take the new version: look at its {scene.file}, then set version and sha256 in "
            f"{_PIN}.\n  Or add a mirror that keeps old versions to /etc/apt/sources.list:\n"
            f"  deb [check-valid-until=no] https://snapshot.debian.org/archive/debian/20240101/ "
            f"{SUITE} main",
        )
    return package


def _take(scene: Scene, package: Path, tree: Path, into: Path) -> None:
    """Copy scene and copyright out of the .deb, if the scene is the one that is pinned."""
    run_tool(["dpkg-deb", "--extract", str(package), str(tree)], "dpkg")
    found = tree / scene.member
    digest = sha256_file(found) if found.is_file() else "no file"
    if digest != scene.sha256:
        raise ImageError(
            f"{scene.member} of {scene.package} {scene.version} should have the SHA-256 "
            f"{scene.sha256}, and has: {digest}.",
            f"Do not use it: try another mirror. If the pin in {_PIN} was just changed, look at "
            "the file and set its sha256 there.",
        )
    shutil.copyfile(found, into / scene.file)
    shutil.copyfile(tree / "usr/share/doc" / scene.package / "copyright", into / "copyright")
