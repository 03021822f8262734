"""``python -m images``: build and list images."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from images.artifact import list_images, verify
from images.build import NAMES, build
from images.cache import default_cache
from images.errors import ImageError
from images.progress import sink_for


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m images", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    making = verbs.add_parser("build", help="build an image")
    making.add_argument("name", choices=NAMES)
    making.add_argument("--out", type=Path, required=True, help="directory of images")
    making.add_argument("--cache", type=Path, default=default_cache(), help="build cache")
    making.add_argument("--progress", choices=("auto", "plain", "bar", "json"), default="auto")
    making.add_argument("--refresh", action="store_true", help="take new Debian packages")
    for verb, text in (("list", "list images"), ("verify", "read all files of all images")):
        listing = verbs.add_parser(verb, help=text)
        listing.add_argument("--out", type=Path, required=True, help="directory of images")
        listing.add_argument("--json", action="store_true")
    return parser


def _list(out: Path, as_json: bool) -> None:
    for manifest in list_images(out):
        if as_json:
            print(json.dumps(manifest.to_json()))
            continue
        mib = sum(entry.bytes for entry in manifest.files.values()) >> 20
        print(
            f"{manifest.name:12} {manifest.role:8} {manifest.built_at}  {mib:6} MiB"
            f"  {manifest.digest[:19]}  {manifest.title}"
        )


def _verify(out: Path) -> int:
    wrong = [text for manifest in list_images(out) for text in verify(out / manifest.name)]
    for text in wrong:
        print(text, file=sys.stderr)
    return 1 if wrong else 0


def main(argv: list[str] | None = None) -> int:
    """The command; its exit code."""
    options = _parser().parse_args(argv)
    try:
        if options.verb == "list":
            _list(options.out, options.json)
        elif options.verb == "verify":
            return _verify(options.out)
        else:
            sink = sink_for(options.progress)
            made = build(options.name, options.out, options.cache, sink, refresh=options.refresh)
            print(f"{options.out / made.name}  {made.digest}")
    except ImageError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
