"""The service image under plain QEMU: it boots, wipes, and finds what was broken on purpose."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from images.artifact import load_manifest
from tests.vm.bare_qemu import (
    NONCE,
    RUN,
    Message,
    ServiceRun,
    flip,
    gpu_devices,
    make_gpu_memory,
    results,
)

PAGE = 4096
CHECKS = ["identity", "liveness", "known_answer", "dma", "residue", "overwrite", "read_back"]


@pytest.fixture
def image(images_dir: Path) -> Path:
    return images_dir / "service"


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return make_gpu_memory(tmp_path / "gpu0")


def leave_data(memory: Path) -> int:
    """Write one word into every page but the first, as a tenant would; returns their number."""
    pages = memory.stat().st_size // PAGE
    with memory.open("r+b") as handle:
        for page in range(1, pages):
            handle.seek(page * PAGE + 64)
            handle.write(b"secret\0\1")
    return pages - 1


def test_a_used_gpu_is_wiped_and_passes(image: Path, memory: Path, tmp_path: Path) -> None:
    words = leave_data(memory)
    page = memory.read_bytes()[:PAGE]
    minimum = load_manifest(image).min_memory_mib
    with ServiceRun(image, tmp_path, gpu_devices(memory), memory_mib=minimum) as run:
        messages = run.messages()
        run.acknowledge()
        assert run.wait_off() == 0
    assert [message["seq"] for message in messages] == list(range(len(messages)))
    assert {(message["v"], message["run"], message["nonce"]) for message in messages} == {
        (1, RUN, NONCE)
    }
    assert messages[0]["t"] == "hello"
    assert messages[-1] == {**messages[-1], "t": "final", "ended": "complete", "checks": 7}
    found = results(messages)
    assert list(found) == CHECKS
    assert {check: result["status"] for check, result in found.items()} == dict.fromkeys(
        CHECKS, "pass"
    )
    assert found["residue"]["metrics"]["residue_words"] == words
    total = memory.stat().st_size - PAGE
    assert found["read_back"]["metrics"]["bytes_verified"] == total
    assert found["read_back"]["metrics"]["bytes_total"] == total
    content = memory.read_bytes()
    assert content[:PAGE] == page
    assert not any(content[PAGE:])


def test_a_bit_that_flips_between_write_and_read_is_found(
    image: Path, memory: Path, tmp_path: Path
) -> None:
    offset = 5_243_499
    flipped = []

    def inject(message: Message) -> None:
        if message["t"] == "progress" and message["check"] == "read_back" and not flipped:
            flip(memory, offset, 0x10)
            flipped.append(offset)

    with ServiceRun(
        image, tmp_path, gpu_devices(memory), arguments="gpuspawner.pause=read_back:5"
    ) as run:
        found = results(run.messages(inject))
    assert found["read_back"]["status"] == "fail"
    assert found["read_back"]["codes"] == ["MEMORY_ERROR"]
    metrics = found["read_back"]["metrics"]
    assert (metrics["errors"], metrics["first_bad_offset"], metrics["xor"]) == (1, offset, 0x10)
    assert not any(memory.read_bytes()[PAGE:])


def test_dma_that_goes_astray_is_found(image: Path, memory: Path, tmp_path: Path) -> None:
    with ServiceRun(image, tmp_path, gpu_devices(memory, dma_mask=0xFFFF)) as run:
        found = results(run.messages())
    assert found["dma"]["status"] == "fail"
    assert "DMA_MISMATCH" in found["dma"]["codes"]
    others = {result["status"] for check, result in found.items() if check != "dma"}
    assert others == {"pass"}


def test_no_gpu(image: Path, tmp_path: Path) -> None:
    with ServiceRun(image, tmp_path) as run:
        messages = run.messages()
    assert [m["devices"] for m in messages if m["t"] == "identity"] == [[]]
    found = results(messages)
    assert list(found) == CHECKS
    for result in found.values():
        assert (result["status"], result["codes"]) == ("fail", ["DEVICE_ABSENT"])
    assert messages[-1]["ended"] == "complete"


def test_a_gpu_that_is_unplugged_during_the_wipe(image: Path, memory: Path, tmp_path: Path) -> None:
    asked = []
    with ServiceRun(
        image, tmp_path, gpu_devices(memory), arguments="gpuspawner.pause=read_back:15"
    ) as run:

        def unplug(message: Message) -> None:
            if message["t"] == "progress" and message["check"] == "read_back" and not asked:
                run.monitor.command("device_del", id="gpu0control")
                asked.append(True)

        messages = run.messages(unplug)
    found = results(messages)
    assert found["read_back"]["status"] == "fail"
    assert found["read_back"]["codes"] == ["DEVICE_ABSENT"]
    assert messages[-1]["t"] == "final"


def test_without_nonce_it_says_nothing(image: Path, memory: Path, tmp_path: Path) -> None:
    with ServiceRun(
        image, tmp_path, gpu_devices(memory), arguments="gpuspawner.nonce=short"
    ) as run:
        assert run.messages() == []
        assert run.wait_off() == 0
        assert "gpuspawner.nonce" in run.console.read_text()


def test_files_of_the_image_are_small(image: Path) -> None:
    entries = load_manifest(image).files
    assert set(entries) == {"kernel", "initrd"}
    assert os.path.getsize(image / entries["initrd"].file) < 32 << 20
