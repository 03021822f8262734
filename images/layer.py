"""More Debian packages on top of the base, as a cached layer of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from images import apt
from images.base import SUITE, BaseImage, load_base, run_tool
from images.cache import digest_of, entry, prune, require_space
from images.progress import Progress

_RECIPE = 1
_SPACE_MIB = 4000

#: Nothing is started while packages are installed.
_POLICY = "#!/bin/sh\nexit 101\n"


def layer_tree(
    base: BaseImage, packages: Sequence[str], cache: Path, progress: Progress
) -> BaseImage:
    """`base` with `packages` and what they depend on; from the cache or made now.

    The stage of the progress is called "layer".

    :raises ImageError: a package does not exist, a tool is missing, or there is no space.
    """
    digest = digest_of({"recipe": _RECIPE, "base": base.digest, "packages": sorted(packages)})
    name = digest[:24]
    root = cache / "layer"
    root.mkdir(parents=True, exist_ok=True)
    with entry(root, name) as (directory, ready):
        if ready:
            progress.skip("layer", "from the cache")
        else:
            require_space(root, _SPACE_MIB, "Adding Debian packages to the base")
            with progress.stage("layer") as stage:
                work = directory / "root"
                base.extract(work)
                stage.at(0.1, "installing")
                _install(work, packages)
                stage.at(0.9, "packing")
                tar = ["tar", "--numeric-owner", "--sort=name", "-cf", str(directory / "root.tar")]
                run_tool([*tar, "-C", str(work), "."], "tar")
                shutil.rmtree(work)
    prune(root, keep=3)
    return load_base(root / name, digest)


def _install(root: Path, packages: Sequence[str]) -> None:
    """apt-get install in the tree, with this machine's mirrors and proxies for the moment."""
    lent = {
        "run/build-apt.conf": "\n".join(
            [
                *apt.host_reach_options(),
                'Dir::Etc::sourcelist "/run/build.list";',
                'Dir::Etc::sourceparts "/run/none";',
                'Dir::Etc::trustedparts "/usr/share/keyrings";',
                'APT::Install-Recommends "false";',
                'APT::Sandbox::User "root";',
                "",
            ]
        ),
        "run/build.list": "".join(f"{source.line()}\n" for source in apt.host_sources(SUITE)),
        "run/resolv.conf": Path("/etc/resolv.conf").read_text(),
        "usr/sbin/policy-rc.d": _POLICY,
    }
    resolv = root / "etc/resolv.conf"
    for path, text in lent.items():
        (root / path).write_text(text)
    (root / "usr/sbin/policy-rc.d").chmod(0o755)
    resolv.unlink(missing_ok=True)
    resolv.symlink_to("/run/resolv.conf")
    env = {
        **os.environ,
        "APT_CONFIG": "/run/build-apt.conf",
        "DEBIAN_FRONTEND": "noninteractive",
        "LC_ALL": "C.UTF-8",
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    }
    try:
        for command in (["update", "-q"], ["install", "-q", "-y", *packages], ["clean"]):
            run_tool(["chroot", str(root), "apt-get", *command], "coreutils", env)
    finally:
        for path in lent:
            (root / path).unlink(missing_ok=True)
        resolv.unlink(missing_ok=True)
    shutil.rmtree(root / "var/lib/apt/lists", ignore_errors=True)
    (root / "var/lib/apt/lists/partial").mkdir(parents=True)
    for log in (root / "var/log").glob("*.log"):
        log.unlink()
