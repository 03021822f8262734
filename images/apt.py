"""What the machine's apt is told: mirrors and proxies, for building an image through them.

An image is built with the settings of the machine that builds it, and carries none of them.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

#: Parts of apt's configuration that say how to reach a mirror, and nothing else.
_REACH = re.compile(
    r"^Acquire::(?:(?:http|https|ftp)::|Check-Valid-Until|Check-Date|Retries|ForceIPv[46])"
)
_DEBIAN_KEYRING = "debian-archive-keyring"

#: What the finished image's apt uses.
PUBLIC_SOURCES = """\
Types: deb
URIs: http://deb.debian.org/debian
Suites: {suite} {suite}-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://deb.debian.org/debian-security
Suites: {suite}-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""


@dataclass(frozen=True)
class Source:
    """One suite of one mirror: `uri`, `suite`, and the options of its line ("trusted=yes")."""

    uri: str
    suite: str
    options: tuple[str, ...] = ()

    def line(self) -> str:
        """The entry in the one-line format of sources.list(5), with component main only."""
        options = f"[{' '.join(self.options)}] " if self.options else ""
        return f"deb {options}{self.uri} {self.suite} main"


def _from_lines(text: str) -> list[Source]:
    found = []
    for line in text.splitlines():
        match = re.match(r"^deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)\s+(.*)$", line.split("#")[0])
        if match and "main" in match[4].split():
            found.append(Source(match[2], match[3], tuple((match[1] or "").split())))
    return found


def _from_deb822(text: str) -> list[Source]:
    found = []
    for block in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        name = ""
        for line in block.splitlines():
            if line.startswith("#"):
                continue
            if line[:1] in (" ", "\t"):
                fields[name] = f"{fields.get(name, '')} {line.strip()}"
            elif ":" in line:
                name, _, value = line.partition(":")
                name = name.strip().lower()
                fields[name] = value.strip()
        if fields.get("enabled", "yes").lower() == "no":
            continue
        if "deb" not in fields.get("types", "").split():
            continue
        if "main" not in fields.get("components", "").split():
            continue
        options = []
        signed = fields.get("signed-by", "")
        if signed:
            options.append(f"signed-by={signed}")
        if fields.get("trusted", "").lower() == "yes":
            options.append("trusted=yes")
        for uri in fields.get("uris", "").split():
            for suite in fields.get("suites", "").split():
                found.append(Source(uri, suite, tuple(options)))
    return found


def _is_debian(source: Source) -> bool:
    """Whether the entry is of Debian itself: signed by its keyring, or by the default ones."""
    signed = [option for option in source.options if option.lower().startswith("signed-by=")]
    return all(_DEBIAN_KEYRING in option for option in signed)


def host_sources(suite: str, etc: Path = Path("/etc")) -> list[Source]:
    """Debian's mirrors as this machine has them, for `suite`.

    A machine that runs another release of Debian has the same mirrors with its own suite's
    name; that name is replaced.  Where nothing fits, the public mirror is used.  Entries signed
    by another keyring are not Debian and are left out.
    """
    release = etc / "os-release"
    words = dict(
        line.split("=", 1)
        for line in (release.read_text() if release.is_file() else "").split()
        if "=" in line
    )
    codename = words.get("VERSION_CODENAME", suite).strip('"')
    entries: list[Source] = []
    files = [etc / "apt/sources.list", *sorted((etc / "apt/sources.list.d").glob("*.list"))]
    for path in files:
        if path.is_file():
            entries += _from_lines(path.read_text())
    for path in sorted((etc / "apt/sources.list.d").glob("*.sources")):
        entries += _from_deb822(path.read_text())
    parts = ("", "-updates", "-security")
    wanted = {f"{name}{part}": f"{suite}{part}" for part in parts for name in (suite, codename)}
    chosen = [
        Source(entry.uri, wanted[entry.suite], entry.options)
        for entry in entries
        if entry.suite in wanted and _is_debian(entry)
    ]
    if any(source.suite == suite for source in chosen):
        return list(dict.fromkeys(chosen))
    return _from_deb822(PUBLIC_SOURCES.format(suite=suite))


def host_reach_options() -> list[str]:
    """The machine's apt settings that decide how a mirror is reached (proxies, certificates)."""
    dump = subprocess.run(["apt-config", "dump"], check=True, capture_output=True, text=True).stdout
    return [line for line in dump.splitlines() if _REACH.match(line) and not line.endswith('"";')]
