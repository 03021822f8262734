"""The tables. Every change of them is a migration in ``migrations/versions``."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite gives only INTEGER PRIMARY KEY its automatic numbers.
_Serial = BigInteger().with_variant(Integer, "sqlite")

installation = Table(
    "installation",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("instance", String(8), nullable=False),
    # Taken anew at each start of the allocator and compared in every transaction: an allocator
    # that was replaced can write nothing more.
    Column("epoch", BigInteger, nullable=False),
)

hosts = Table(
    "hosts",
    metadata,
    Column("name", String(40), primary_key=True),
    Column("settings", JSON, nullable=False),
    Column("inventory", JSON),
    Column("boot_id", String(64)),
    Column("state", String(16), nullable=False),
    Column("reason", Text),
    Column("drained", Boolean, nullable=False),
    Column("accel", String(8)),
    Column("images", JSON, nullable=False),
    # A new random number with every change of what is free on the host: snapshots are compared by
    # it, and a number from a transaction that was rolled back never comes again.
    Column("generation", BigInteger, nullable=False),
)

gpus = Table(
    "gpus",
    metadata,
    Column("host", String(40), primary_key=True),
    Column("address", String(16), primary_key=True),
    Column("model", String(120), nullable=False),
    Column("state", String(16), nullable=False),
    Column("since_ms", BigInteger, nullable=False),
    Column("reason", Text),
    # Set with the reservation, cleared by a verified wipe only.
    Column("dirty", Boolean, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("retry_ms", BigInteger),
    Column("enrolled", JSON),
    Column("holds", JSON, nullable=False),
    Column("lease_id", String(36)),
    Column("diagnosis_id", String(36)),
)

gpu_history = Table(
    "gpu_history",
    metadata,
    Column("id", _Serial, primary_key=True, autoincrement=True),
    Column("host", String(40), nullable=False),
    Column("address", String(16), nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("old", String(16), nullable=False),
    Column("new", String(16), nullable=False),
    Column("reason", Text),
    Column("owner", String(255)),
    Index(None, "host", "address", "id"),
)

leases = Table(
    "leases",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("hub_id", String(64), nullable=False),
    Column("username", String(255), nullable=False),
    Column("server_name", String(255), nullable=False),
    Column("start_id", String(64), nullable=False),
    Column("body_hash", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    Column("reason", String(32)),
    Column("message", Text),
    Column("request", JSON, nullable=False),
    Column("ready_path", Text, nullable=False),
    Column("port", Integer, nullable=False),
    Column("image_digest", String(80), nullable=False),
    Column("host", String(40)),
    Column("claim", JSON),
    Column("address", String(45)),
    Column("mac", String(17)),
    Column("created_ms", BigInteger, nullable=False),
    Column("wait_until_ms", BigInteger),
    Column("running_ms", BigInteger),
    Column("ended_ms", BigInteger),
    # The user's groups when the lease was asked for: their limits count it.
    Column("groups", JSON, nullable=False, server_default=text("'[]'")),
    # One server has one lease; its predecessor may still be stopping.
    Index(
        "uq_leases_live_key",
        "hub_id",
        "username",
        "server_name",
        unique=True,
        sqlite_where=text("state IN ('queued', 'placed', 'starting', 'running')"),
        postgresql_where=text("state IN ('queued', 'placed', 'starting', 'running')"),
    ),
    UniqueConstraint("hub_id", "username", "server_name", "start_id"),
    Index(None, "state"),
    Index(None, "created_ms"),
    Index(None, "username", "state"),
)

early_releases = Table(
    "early_releases",
    metadata,
    Column("hub_id", String(64), primary_key=True),
    Column("username", String(255), primary_key=True),
    Column("server_name", String(255), primary_key=True),
    Column("start_id", String(64), primary_key=True),
    Column("at_ms", BigInteger, nullable=False),
)

# What leases and diagnoses hold. The primary keys refuse a second owner whatever the code does.
claimed_gpus = Table(
    "claimed_gpus",
    metadata,
    Column("host", String(40), primary_key=True),
    Column("address", String(16), primary_key=True),
    Column("owner", String(36), nullable=False, index=True),
)
claimed_cpus = Table(
    "claimed_cpus",
    metadata,
    Column("host", String(40), primary_key=True),
    Column("cpu", Integer, primary_key=True, autoincrement=False),
    Column("owner", String(36), nullable=False, index=True),
)
claimed_memory = Table(
    "claimed_memory",
    metadata,
    Column("host", String(40), primary_key=True),
    Column("node", Integer, primary_key=True, autoincrement=False),
    Column("owner", String(36), primary_key=True),
    Column("mib", BigInteger, nullable=False),
)
claimed_addresses = Table(
    "claimed_addresses",
    metadata,
    Column("host", String(40), primary_key=True),
    Column("address", String(45), primary_key=True),
    Column("owner", String(36), nullable=False, index=True),
)

events = Table(
    "events",
    metadata,
    Column("id", _Serial, primary_key=True, autoincrement=True),
    Column("lease_id", String(36), nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("state", String(16), nullable=False),
    Column("progress", Integer, nullable=False),
    Column("message", Text, nullable=False),
    Column("reason", String(32)),
    Index(None, "lease_id", "id"),
)

steps = Table(
    "steps",
    metadata,
    Column("owner", String(36), primary_key=True),
    Column("name", String(32), primary_key=True),
    Column("at_ms", BigInteger, nullable=False),
)

diagnoses = Table(
    "diagnoses",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("host", String(40), nullable=False),
    Column("address", String(16), nullable=False),
    Column("nonce", String(32), nullable=False),
    Column("state", String(16), nullable=False),
    Column("outcome", String(16)),
    Column("reasons", JSON, nullable=False),
    Column("report", JSON),
    Column("witness", JSON),
    Column("attempt", Integer, nullable=False),
    Column("policy_version", Integer, nullable=False),
    Column("image_digest", String(80), nullable=False),
    Column("console", Text),
    Column("started_ms", BigInteger, nullable=False),
    Column("ended_ms", BigInteger),
    Index(None, "host", "address", "started_ms"),
    Index(None, "state"),
)

homes = Table(
    "homes",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("hub_id", String(64), nullable=False),
    Column("username", String(255), nullable=False),
    Column("server_name", String(255), nullable=False),
    Column("host", String(40), nullable=False),
    Column("volume", String(128), nullable=False, unique=True),
    Column("size_mib", BigInteger, nullable=False),
    # The guest may format the volume until its first server has answered, never after.
    Column("used", Boolean, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("trashed_ms", BigInteger),
    Index(
        "uq_homes_live_key",
        "hub_id",
        "username",
        "server_name",
        unique=True,
        sqlite_where=text("trashed_ms IS NULL"),
        postgresql_where=text("trashed_ms IS NULL"),
    ),
)

limits = Table(
    "limits",
    metadata,
    Column("kind", String(8), primary_key=True),  # default, user, group
    Column("name", String(255), primary_key=True),
    Column("gpus", Integer, nullable=False),
)

audit = Table(
    "audit",
    metadata,
    Column("id", _Serial, primary_key=True, autoincrement=True),
    Column("at_ms", BigInteger, nullable=False),
    Column("who", String(255), nullable=False),
    Column("what", String(300), nullable=False),
    Column("old", Integer),
    Column("new", Integer),
    Column("why", Text, nullable=False),
)
