"""Runs in Placement's own environment: claims k of 8 GPUs, and says what it took.

A case, one for each process: ``gpus`` to claim, ``claims`` how often. The answer: CPU and wall
seconds of each claim, from the question for candidates to the allocation that is written.
"""

import json
import logging
import os
import sys
import tempfile
import time

from oslo_config import cfg
from oslo_utils import uuidutils
from placement import conf, direct

logging.disable(logging.CRITICAL)


def configured(folder):
    """An empty SQLite database, made at start."""
    os.environ["OS_PLACEMENT_DATABASE__CONNECTION"] = f"sqlite:///{folder}/placement.db"
    os.environ["OS_PLACEMENT_DATABASE__SYNC_ON_STARTUP"] = "True"
    options = cfg.ConfigOpts()
    conf.register_opts(options)
    options([], default_config_files=[], default_config_dirs=[])
    return options


def put(client, path, body, *right):
    """PUT or fail."""
    answer = client.put(path, json=body)
    assert answer.status_code in right, answer.text


def add_provider(client, name, inventories, parent=None):
    """A resource provider; its UUID."""
    made = uuidutils.generate_uuid()
    body = {"name": name, "uuid": made}
    if parent:
        body["parent_provider_uuid"] = parent
    answer = client.post("/resource_providers", json=body)
    assert answer.status_code in (200, 201), answer.text
    inventory = {"resource_provider_generation": 0, "inventories": inventories}
    put(client, f"/resource_providers/{made}/inventories", inventory, 200)
    return made


def claim(client, gpus):
    """One claim of so many GPUs, written; its consumer."""
    groups = "".join(f"&resources_G{n}=CUSTOM_GPU:1" for n in range(gpus))
    query = "/allocation_candidates?limit=1&group_policy=none&resources=VCPU:8,MEMORY_MB:65536"
    answer = client.get(query + groups)
    assert answer.status_code == 200, answer.text
    body = dict(answer.json()["allocation_requests"][0])
    body.update(consumer_generation=None, project_id="p", user_id="u", consumer_type="TEST")
    consumer = uuidutils.generate_uuid()
    put(client, f"/allocations/{consumer}", body, 204)
    return consumer


def measured(gpus, claims):
    """So many claims, one after the other, each given back before the next."""
    with (
        tempfile.TemporaryDirectory() as folder,
        direct.PlacementDirect(configured(folder), latest_microversion=True) as client,
    ):
        put(client, "/resource_classes/CUSTOM_GPU", {}, 201, 204)
        whole = {"VCPU": {"total": 128}, "MEMORY_MB": {"total": 1048576}}
        host = add_provider(client, "host", whole)
        for number in range(8):
            one = {"CUSTOM_GPU": {"total": 1, "max_unit": 1}}
            add_provider(client, f"gpu{number}", one, host)
        taken = []
        for _ in range(claims):
            cpu, wall = time.process_time(), time.perf_counter()
            consumer = claim(client, gpus)
            taken.append({"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall})
            assert client.delete(f"/allocations/{consumer}").status_code == 204
        return taken


case = json.loads(sys.stdin.readline())
print(json.dumps(measured(case["gpus"], case["claims"])), flush=True)
