"""Message types of the allocator's API and of the service VM.

The API's OpenAPI description is made from these types, so what is written here is what a client
reads. Memory is in MiB, durations are in seconds, times are UTC in ISO 8601.
"""

from __future__ import annotations

import ipaddress
from datetime import datetime
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from gpuspawner.hardware import HostHardware

LeaseId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")]
StartId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{8,64}$")]
HostName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]
PciAddress = Annotated[
    str, StringConstraints(pattern=r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
]
# Names and sentences that people write: anything but control characters. PostgreSQL stores no NUL,
# and a line break in a name would forge a line of the log.
_PLAIN = r"^[^\x00-\x1f\x7f]*$"
GroupName = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=_PLAIN)]
UserName = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=_PLAIN)]
ServerName = Annotated[str, StringConstraints(max_length=255, pattern=_PLAIN)]
Why = Annotated[str, StringConstraints(max_length=500, pattern=_PLAIN)]
ImageName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]


class Strict(BaseModel):
    """Unknown fields and wrong types are refused, so that a typing mistake never passes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Reply(BaseModel):
    """What the allocator sends. Clients must ignore fields that they do not know."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class LeaseRequest(Strict):
    """What a server needs."""

    gpus: int = Field(ge=0, le=16, description="How many whole GPUs")
    gpu_model: str | None = Field(
        default=None,
        max_length=120,
        pattern=_PLAIN,
        description="Model as the pool names it; any if absent",
    )
    cores: int = Field(ge=1, le=1024, description="Whole physical cores, SMT siblings included")
    memory_mib: int = Field(ge=256, le=16 * 1024 * 1024, description="Memory of the VM, in MiB")
    policy: Literal["strict", "split"] = Field(
        default="strict",
        description="All on one NUMA node, or each GPU with its share of cores and memory on its "
        "own node",
    )
    image: ImageName = Field(description="Name of the image to boot")
    home_mib: int = Field(
        default=10240, ge=64, le=64 * 1024 * 1024, description="Size of a new home, in MiB"
    )


class BootPayload(Strict):
    """What the guest needs to start the server. Holds the hub token: it is never stored, logged
    or shown, and goes only into the seed disk."""

    argv: list[str] = Field(min_length=1, max_length=64)
    env: dict[str, str] = Field(max_length=512)
    files: dict[str, str] = Field(default_factory=dict, max_length=32)
    port: int = Field(default=8888, ge=1, le=65535)
    user: str = Field(default="jovyan", pattern=r"^[a-z_][a-z0-9_-]{0,31}$")
    uid: int = Field(default=1000, ge=1000, le=65533)
    sudo: bool = True

    @field_validator("argv", "env", "files")
    @classmethod
    def _can_be_passed_on(cls, value: Any) -> Any:
        """Words and variables go through ``execve``, which ends them at a NUL."""
        words = [*value, *value.values()] if isinstance(value, dict) else value
        if any("\0" in word for word in words):
            raise ValueError("holds a NUL character, which no program can be given")
        return value

    @field_validator("env")
    @classmethod
    def _are_variables(cls, value: dict[str, str]) -> dict[str, str]:
        if any(not name or "=" in name for name in value):
            raise ValueError("a variable's name is empty or holds '='")
        return value


class AcquireLease(Strict):
    """``POST /leases``: a lease for one server. The same key (hub, user, server name) with the
    same ``start_id`` and the same body is the same lease."""

    username: UserName
    server_name: ServerName = ""
    start_id: StartId
    groups: list[GroupName] = Field(
        default_factory=list, max_length=1000, description="The user's JupyterHub groups"
    )
    request: LeaseRequest
    payload: BootPayload
    ready_path: str = Field(
        max_length=8192,
        pattern=r"^/[!-~]*$",
        description="Path, escaped as in a URL, on the guest that answers 200 when JupyterLab does",
    )


class ReleaseLease(Strict):
    """``POST /leases/release``: end a lease by its key and start, also before it was acquired."""

    username: UserName
    server_name: ServerName = ""
    start_id: StartId


LeaseStateName = Literal["queued", "placed", "starting", "running", "stopping", "ended"]
GpuStateName = Literal[
    "new", "used", "diagnosing", "unassigned", "reserved", "assigned",
    "quarantined", "failed", "lost", "retired",
]  # fmt: skip


class Lease(Reply):
    """One lease as the API shows it."""

    id: str
    hub_id: str
    username: str
    server_name: str
    start_id: str
    state: LeaseStateName
    reason: str | None = Field(default=None, description="Why it ended, as a fixed word")
    message: str | None = Field(default=None, description="Why it ended, for people")
    request: LeaseRequest
    host: str | None = None
    node: int | None = Field(default=None, description="NUMA node, when all of it is on one")
    gpus: list[str] = Field(default_factory=list, description="PCI addresses")
    gpu_models: list[str] = Field(default_factory=list)
    cpus: list[int] = Field(default_factory=list)
    image_digest: str | None = None
    address: str | None = Field(default=None, description="The guest's address")
    port: int | None = None
    created_at: datetime
    running_at: datetime | None = None
    ended_at: datetime | None = None
    payload_needed: bool = Field(
        default=False, description="The boot payload was lost: send it again"
    )


class LeaseEvent(Reply):
    """One line of a lease's story; ``id`` grows and is the SSE id."""

    id: int
    lease_id: str
    at: datetime
    kind: Literal["state", "progress", "payload-needed", "error"]
    state: LeaseStateName
    progress: int = Field(ge=0, le=100)
    message: str
    reason: str | None = None


class GpuCount(Reply):
    """How many GPUs of one model the pool has, by what may be done with them."""

    model: str
    emulated: bool
    memory_mib: int
    total: int = Field(description="All that may ever be given out")
    free: int
    in_use: int
    coming: int = Field(description="Being wiped and diagnosed")
    out: int = Field(description="Failed, lost, quarantined, held or on a drained host")


class GpuCounts(Reply):
    """``GET /gpus/counts``: what is free, for the form."""

    at: datetime
    models: list[GpuCount]


class Diagnosis(Reply):
    """One run of the service VM on one GPU."""

    id: str
    host: str
    gpu: str
    state: Literal["running", "done"]
    outcome: Literal["pass", "fail", "lost", "inconclusive"] | None = None
    reasons: list[str] = Field(default_factory=list)
    attempt: int
    started_at: datetime
    ended_at: datetime | None = None
    policy_version: int
    image_digest: str | None = None
    checks: list[dict[str, Any]] = Field(default_factory=list)
    witness: dict[str, Any] = Field(default_factory=dict)
    progress: str | None = None


class Gpu(Reply):
    """One GPU as the API shows it."""

    host: str
    address: str
    model: str
    node: int
    emulated: bool
    memory_mib: int
    functions: list[str]
    state: GpuStateName
    since: datetime
    reason: str | None = None
    serial: str | None = None
    dirty: bool
    maintenance: bool = False
    holds: list[str] = Field(default_factory=list)
    attempt: int = 0
    retry_at: datetime | None = None
    lease_id: str | None = None
    username: str | None = None
    diagnosis_id: str | None = None
    problems: list[str] = Field(default_factory=list)


class Node(Reply):
    """One NUMA node of a host, with what leases hold of it."""

    id: int
    cores: int
    free_cores: int
    memory_mib: int
    reserve_mib: int
    free_mib: int


class Host(Reply):
    """One host as the API shows it."""

    name: str
    uri: str
    kind: Literal["libvirt", "emulated"]
    state: Literal["new", "ready", "unreachable"]
    reason: str | None = None
    drained: bool
    accel: str | None = None
    boot_id: str | None = None
    cidr: str
    nodes: list[Node] = Field(default_factory=list)
    gpus: int = 0
    images: list[str] = Field(default_factory=list)


def _here(uri: str) -> bool:
    """Whether a libvirt URI names the machine that it is used on."""
    try:
        return urlsplit(uri).hostname in (None, "localhost", "127.0.0.1", "::1")
    except ValueError:  # libvirt says better what is wrong with it
        return True


class AddHost(Strict):
    """``POST /hosts``: a host joins the pool. ``emulated`` is the text of the YAML file that
    declares an emulated host; without it the host's own hardware is surveyed, as ``hardware``
    says."""

    name: HostName
    uri: str = Field(default="qemu:///system", max_length=1024)
    shell: list[str] | None = Field(
        default_factory=list,
        max_length=32,
        description="How to run a command there: [] is this machine, else an ssh command line; "
        "null if there is no way, and then the host is shown and nothing of it is given out",
    )
    cidr: str = Field(
        default="10.201.0.0/24", pattern=r"^[0-9.]+/[0-9]+$", description="Guests' addresses"
    )
    network: Literal["nat", "bridge"] = "nat"
    bridge: str | None = Field(default=None, pattern=r"^[a-zA-Z0-9_.-]{1,15}$")
    accel: Literal["auto", "kvm", "tcg"] = "auto"
    emulated: str | None = Field(default=None, max_length=65536)
    hardware: HostHardware = Field(default_factory=HostHardware)

    @model_validator(mode="after")
    def _declares_once(self) -> AddHost:
        if self.emulated is not None and self.hardware != HostHardware():
            raise ValueError(
                "an emulated host declares its own hardware; leave out hardware or emulated"
            )
        return self

    @model_validator(mode="after")
    def _shell_is_the_hosts(self) -> AddHost:
        """Or the allocator's own hardware would be taken for that host's."""
        if self.emulated is None and self.shell == [] and not _here(self.uri):
            raise ValueError(
                f"{self.uri} is another machine: shell must be a command that reaches it, such as "
                "'ssh -o BatchMode=yes root@HOST', or none if there is no way"
            )
        return self

    @field_validator("cidr")
    @classmethod
    def _is_a_range(cls, value: str) -> str:
        try:
            network = ipaddress.IPv4Network(value, strict=False)
        except ValueError:
            network = None
        if network is None or not 8 <= network.prefixlen <= 30:
            raise ValueError("is no IPv4 range for guests; write one such as 10.201.0.0/24")
        return value

    @field_validator("uri", "shell")
    @classmethod
    def _can_be_passed_on(cls, value: Any) -> Any:
        if any("\0" in word for word in ([value] if isinstance(value, str) else value or ())):
            raise ValueError("holds a NUL character")
        return value


class ChangeHost(Strict):
    """``PATCH /hosts/NAME``."""

    drained: bool
    reason: Why = Field(default="", description="For the audit")


class GpuAction(Strict):
    """``POST /gpus/HOST/ADDRESS/action``: what an admin does with a GPU, and why."""

    action: Literal["enroll", "retest", "retire", "hold", "unhold"]
    reason: Why = ""
    hold: Why | None = Field(
        default=None, description="Which hold ``unhold`` takes away; all of them if absent"
    )


class Limit(Reply):
    """How many GPUs somebody may hold at once: everyone (``default``), one user, or all members
    of a group together."""

    kind: Literal["default", "user", "group"]
    name: str = Field(description="User or group; empty for the default")
    gpus: int = Field(ge=0)


class SetLimit(Strict):
    """``PUT /limits/KIND/NAME``. ``gpus`` of null takes the limit away."""

    gpus: int | None = Field(ge=0, le=100_000)
    why: Why = Field(min_length=1, description="For the audit")


class AuditEntry(Reply):
    """One thing that an admin did: who, when, what, why. ``old`` and ``new`` are a limit's
    values; null is no limit."""

    id: int
    at: datetime
    who: str
    what: str
    old: int | None
    new: int | None
    why: str


class EndLease(Strict):
    """``POST /leases/ID/end``: an admin ends a lease."""

    reason: Why = ""


class ImageInfo(Reply):
    """One image, and the hosts that have it."""

    name: str
    role: Literal["lab", "service", "probe"]
    title: str
    digest: str
    built_at: datetime | None = None
    kernel_release: str | None = None
    min_memory_mib: int = 0
    bytes: int = 0
    hosts: list[str] = Field(default_factory=list)
    copying: dict[str, int] = Field(default_factory=dict, description="Percent, by host")


class Refusal(Reply):
    """The body of every error: what happened, why, what to do next."""

    status: int
    message: str
    reason: str = Field(description="A fixed word for programs and metrics")
    constraint: str | None = None
    details: list[dict[str, Any]] = Field(default_factory=list)
    retry_after_s: int | None = None


class Health(Reply):
    """``GET /health``."""

    ok: bool
    version: str
    epoch: int
    hosts: dict[str, str]


# ------------------------------------------------------------------ the service VM's messages
# One JSON object a line over a virtio-serial port. The guest measures; nothing in these messages
# is a verdict, and every text in them comes from a machine that a tenant's GPU may have attacked.

ShortText = Annotated[str, StringConstraints(max_length=256)]
CheckName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,40}$")]
Metric = int | float | ShortText


class ServiceMessage(BaseModel):
    """What every line of the service VM carries. Unknown fields are ignored, so that a newer
    image can say more."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    v: Literal[1]
    run: LeaseId
    nonce: str = Field(pattern=r"^[0-9a-f]{32}$")
    seq: int = Field(ge=0, le=100_000)


class ServiceHello(ServiceMessage):
    """The program runs."""

    t: Literal["hello"]
    image: ShortText = ""
    agent: ShortText = ""
    boot_s: float = Field(default=0, ge=0, le=86400)


class ServiceFunction(BaseModel):
    """One PCI function as the guest sees it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    guest_address: ShortText = ""
    pci: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{4}:[0-9a-f]{4}$")]


class ServiceDevice(BaseModel):
    """One GPU as the guest sees it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    kind: ShortText
    functions: list[ServiceFunction] = Field(max_length=16)
    serial: ShortText = ""
    uuid: ShortText = ""
    model: ShortText = ""
    vbios: ShortText = ""
    memory_mib: int = Field(default=0, ge=0, le=1 << 24)


class ServiceIdentity(ServiceMessage):
    """Which GPUs the guest has."""

    t: Literal["identity"]
    devices: list[ServiceDevice] = Field(max_length=16)


class ServiceProgress(ServiceMessage):
    """A sign of life within a check."""

    t: Literal["progress"]
    check: CheckName
    pct: float = Field(ge=0, le=100)


class ServiceResult(ServiceMessage):
    """One check has ended."""

    t: Literal["result"]
    check: CheckName
    status: Literal["pass", "fail", "degraded", "skip", "timeout", "error"]
    seconds: float = Field(default=0, ge=0, le=86400)
    metrics: dict[CheckName, Metric] = Field(default_factory=dict, max_length=64)
    codes: list[ShortText] = Field(default_factory=list, max_length=16)


class ServiceFinal(ServiceMessage):
    """Nothing comes after this."""

    t: Literal["final"]
    ended: Literal["complete", "aborted"]
    checks: int = Field(ge=0, le=1000)


AnyServiceMessage = Annotated[
    ServiceHello | ServiceIdentity | ServiceProgress | ServiceResult | ServiceFinal,
    Field(discriminator="t"),
]
