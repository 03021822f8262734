"""The real hub configuration, with a token by which the tests act as its admin."""

import os
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
TOKEN = os.environ["GPUSPAWNER_TEST_HUB_TOKEN"]

c = get_config()  # noqa: F821
load_subconfig(str(CHECKOUT / "jupyterhub_config.py"))  # noqa: F821
c.JupyterHub.services = [*c.JupyterHub.services, {"name": "tests", "api_token": TOKEN}]
c.JupyterHub.load_roles = [
    *c.JupyterHub.load_roles,
    {
        "name": "tests",
        "services": ["tests"],
        "scopes": ["admin:users", "admin:servers", "tokens", "access:servers", "read:servers"],
    },
]
