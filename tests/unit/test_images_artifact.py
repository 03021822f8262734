"""Manifests, the build cache, apt settings and progress."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from images.apt import host_sources
from images.artifact import (
    SourceFile,
    content_digest,
    list_images,
    load_manifest,
    publish,
    verify,
)
from images.base import base_inputs
from images.build import image_digest
from images.cache import digest_of, entry, prune, require_space
from images.errors import ImageError
from images.progress import Event, Progress, Stage, json_sink, plain_sink


def published(tmp_path: Path, out: Path, text: str = "kernel") -> str:
    source = tmp_path / "vmlinuz.src"
    source.unlink(missing_ok=True)
    source.write_text(text)
    manifest = publish(
        "tiny",
        "probe",
        {"kernel": SourceFile(source, "vmlinuz")},
        "console=ttyS0",
        out=out,
        title="Tiny guest",
        kernel_release="6.1",
        min_memory_mib=128,
        packages={"b": "2", "a": "1"},
    )
    return manifest.digest


def test_manifest_round_trip(tmp_path: Path) -> None:
    out = tmp_path / "images"
    digest = published(tmp_path, out)
    manifest = load_manifest(out / "tiny")
    assert manifest.digest == digest == content_digest(manifest.files, manifest.cmdline)
    raw = json.loads((out / "tiny/manifest.json").read_text())
    assert raw == manifest.to_json()
    assert raw["v"] == 1
    assert set(raw["files"]["kernel"]) == {"file", "sha256", "bytes"}
    assert verify(out / "tiny") == []
    assert [item.name for item in list_images(out)] == ["tiny"]


def test_publishing_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "images"
    (out / ".tmp-tiny").mkdir(parents=True)  # a killed run's
    (out / ".tmp-tiny/half").write_text("x")
    first = published(tmp_path, out)
    second = published(tmp_path, out, "another kernel")
    assert first != second
    assert load_manifest(out / "tiny").digest == second
    assert sorted(item.name for item in out.iterdir()) == [".lock-tiny", "tiny"]


def test_a_changed_file_is_found(tmp_path: Path) -> None:
    published(tmp_path, tmp_path / "images")
    (tmp_path / "images/tiny/vmlinuz").write_text("kernem")
    assert verify(tmp_path / "images/tiny") == [
        f"{tmp_path}/images/tiny/vmlinuz is not what the manifest says"
    ]


@pytest.mark.parametrize(
    ("text", "what"),
    [("{", "is not JSON"), ('{"v": 2}', "of version 2"), ('{"v": 1}', "is incomplete")],
)
def test_manifest_errors_say_what_to_do(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ImageError, match=what) as caught:
        load_manifest(tmp_path)
    assert "Build" in caught.value.hint


def test_missing_manifest(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="does not exist"):
        load_manifest(tmp_path / "nothing")


def test_digest_is_stable_and_sees_changes() -> None:
    assert digest_of({"a": 1, "b": [2]}) == digest_of({"b": [2], "a": 1})
    assert digest_of({"a": "1"}) != digest_of({"a": 1})
    assert image_digest() == image_digest()
    assert digest_of({**base_inputs(), "suite": "trixie"}) != digest_of(base_inputs())


def fail_halfway(root: Path) -> None:
    with entry(root, "k") as (directory, ready):
        assert not ready
        (directory / "half").write_text("x")
        raise ImageError("it broke", "mend it")


def test_cache_entry_appears_only_when_done(tmp_path: Path) -> None:
    with pytest.raises(ImageError):
        fail_halfway(tmp_path)
    assert [item.name for item in tmp_path.iterdir()] == [".lock-k"]
    (tmp_path / ".tmp-k").mkdir()
    (tmp_path / ".tmp-k/stale").write_text("x")
    (tmp_path / ".tmp-other").mkdir()
    with entry(tmp_path, "k") as (directory, ready):
        assert not (tmp_path / ".tmp-other").exists()
        assert not list(directory.iterdir())
        (directory / "done").write_text("x")
    with entry(tmp_path, "k") as (directory, ready):
        assert ready
        assert directory == tmp_path / "k"
    for number in range(3):
        with entry(tmp_path, f"later{number}") as (directory, _):
            (directory / "done").write_text("x")
    prune(tmp_path, keep=2)
    assert len([item for item in tmp_path.iterdir() if item.is_dir()]) == 2


def test_space_is_checked_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="MiB are free"):
        require_space(tmp_path, 1 << 40, "A test")


def test_progress_is_of_the_whole_and_never_falls() -> None:
    events: list[Event] = []
    told = Progress((Stage("a", "A", 30), Stage("b", "B", 60), Stage("c", "C", 10)), events.append)
    told.skip("a", "cached")
    with told.stage("b") as stage:
        stage.at(0.5)
        stage.at(0.4)
    with told.stage("c"):
        pass
    percents = [event.percent for event in events]
    assert percents == sorted(percents)
    assert [round(event.percent) for event in events if event.state == "at"] == [43, 43]
    assert percents[-1] == 100


def test_sinks_write_lines() -> None:
    stream = io.StringIO()
    event = Event("a", "Doing A", 12.3, "detail", "begin", 4.0)
    json_sink(stream)(event)
    plain_sink(stream)(event)
    first, second = stream.getvalue().splitlines()
    assert json.loads(first)["percent"] == 12.3
    assert "Doing A" in second


def machine(etc: Path, codename: str) -> None:
    (etc / "apt/sources.list.d").mkdir(parents=True)
    (etc / "os-release").write_text(f'PRETTY_NAME="x"\nVERSION_CODENAME={codename}\n')


def test_mirrors_of_the_machine_are_used(tmp_path: Path) -> None:
    machine(tmp_path, "trixie")
    (tmp_path / "apt/sources.list").write_text(
        "# deb http://commented.example/ trixie main\n"
        "deb [signed-by=/usr/share/keyrings/other.gpg] http://other.example/ trixie main\n"
        "deb [arch=amd64] http://mirror.example/debian trixie main contrib\n"
    )
    (tmp_path / "apt/sources.list.d/sec.sources").write_text(
        "Types: deb deb-src\nURIs: http://sec.example/debian-security\n"
        "Suites: trixie-security\nComponents: main\n\n"
        "Enabled: no\nTypes: deb\nURIs: http://off.example/\nSuites: trixie\nComponents: main\n"
    )
    lines = [source.line() for source in host_sources("bookworm", tmp_path)]
    assert lines == [
        "deb [arch=amd64] http://mirror.example/debian bookworm main",
        "deb http://sec.example/debian-security bookworm-security main",
    ]


def test_without_a_debian_mirror_the_public_one_is_used(tmp_path: Path) -> None:
    machine(tmp_path, "noble")
    sources = host_sources("bookworm", tmp_path)
    assert {source.suite for source in sources} == {
        "bookworm",
        "bookworm-updates",
        "bookworm-security",
    }
