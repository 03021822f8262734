"""The settings of ``GPUSpawner``. Their help texts are its manual."""

from __future__ import annotations

import functools
from typing import Any

from jupyterhub.traitlets import Callable
from traitlets import Bool, Integer, List, Unicode, Union, default
from traitlets.config import Configurable

from gpuspawner.config import Installation, installation


@functools.cache
def shared_settings() -> Installation:
    """``gpuspawner_config.py``, read once per process."""
    return installation()


class GPUSpawnerSettings(Configurable):
    """Traits only; to be mixed in before ``jupyterhub.spawner.Spawner``. What differs from
    JupyterHub's defaults is said in ``@default`` methods, so that ``c.Spawner`` still works for
    all of them."""

    start_timeout: int

    allocator_url = Unicode(
        help="""Where the allocator listens, as the hub reaches it:
        ``http://127.0.0.1:8091/services/gpu/``.

        Default: ``Installation.allocator_url`` from ``gpuspawner_config.py``.""",
    ).tag(config=True)

    spawner_token_file = Unicode(
        help="""File with the token by which the allocator knows this hub's spawner. It is read
        at each use, so a new token needs no restart of the hub.

        Default: as in ``gpuspawner_config.py``, there ``spawner.token`` in ``state_dir``.""",
    ).tag(config=True)

    hub_id = Unicode(
        help="""Name of this hub. The allocator derives it from the token; it is set here only to
        notice that hub and allocator were configured differently.

        Default: ``Installation.hub_id`` from ``gpuspawner_config.py``.""",
    ).tag(config=True)

    profile_list = Union(
        [List(), Callable()],
        help="""What users may choose from, one card of the start form each.

        A list of dicts, or a callable (may be async) that takes the spawner and returns one. The
        keys are those of KubeSpawner's ``profile_list``::

            c.GPUSpawner.profile_list = [
                {
                    "slug": "a100",                     # in links, in the API and in admin lists
                    "display_name": "One A100",
                    "description": "40 GB, for training",
                    "default": True,
                    "allowed_groups": ["sar-lab"],      # absent: everyone
                    "spawner_override": {
                        "gpus": 1,                      # whole GPUs; 0 for none
                        "gpu_model": "NVIDIA A100-PCIE-40GB",   # absent: any
                        "cores": 8,                     # whole physical cores
                        "memory_mib": 65536,
                        "policy": "strict",             # one NUMA node; or "split"
                        "image": "lab",
                        "home_mib": 51200,              # size of a new home
                    },
                    "profile_options": {
                        "image": {
                            "display_name": "Environment",
                            "choices": {
                                "lab": {"display_name": "JupyterLab", "default": True},
                                "geo": {
                                    "display_name": "Satellite data",
                                    "allowed_groups": ["sar-lab"],
                                    "spawner_override": {"image": "geo"},
                                },
                            },
                            "unlisted_choice": {
                                "enabled": True,
                                "display_name": "Another image",
                                "validation_regex": "[a-z0-9-]+",
                                "validation_message": "Small letters, digits and '-'.",
                                "spawner_override": {"image": "{value}"},
                            },
                        },
                    },
                },
            ]

        ``spawner_override`` takes no other keys. Groups are checked for the form, for links and
        for the API alike. A regular expression has to match the whole text.""",
    ).tag(config=True)

    profile_form_template = Unicode(
        help="""Text of a Jinja2 template for the start form, instead of the one that comes with
        gpuspawner (``templates/options_form.html``, a good thing to start from). It gets
        ``form``, a ``gpuspawner.form.Form``; everything is escaped unless marked safe.""",
    ).tag(config=True)

    stop_timeout = Integer(
        210,
        min=10,
        help="""Seconds to wait for a server to be gone. The allocator shuts the virtual machine
        down in an orderly way first and ends it by force after 60 s (120 s where it is emulated
        in software). When this time has passed, JupyterHub is told that the server has stopped,
        and the allocator goes on ending it.""",
    ).tag(config=True)

    allocator_patience = Integer(
        30,
        min=1,
        help="""Seconds for which an allocator that does not answer is asked again, for instance
        because it is being restarted. After it a start fails; a running server is never taken for
        stopped because the allocator is silent.""",
    ).tag(config=True)

    queue_budget = Integer(
        180,
        min=0,
        help="""Seconds that a start may wait for a GPU that is being cleaned and checked. Keep
        it at the allocator's own limit.""",
    ).tag(config=True)

    boot_budget = Integer(
        420,
        min=10,
        help="""Seconds from having a GPU to JupyterLab's first answer. Virtual machines that are
        emulated in software need some minutes, others less than one.

        ``start_timeout`` defaults to ``queue_budget + boot_budget`` and a margin. If you set
        ``start_timeout`` itself, starts end somewhat earlier than that, so that users read a
        reason instead of "Internal Server Error".""",
    ).tag(config=True)

    guest_user = Unicode(
        "jovyan", help="Name of the account in the virtual machine that JupyterLab runs as."
    ).tag(config=True)

    guest_uid = Integer(
        1000,
        min=1000,
        max=65533,
        help="Its user id. Files in homes belong to it: do not change it once there are homes.",
    ).tag(config=True)

    guest_sudo = Bool(
        True,
        help="""Whether users may become root in their own virtual machine. Isolation does not
        rest on it: the host assumes that everyone is root in the guest.""",
    ).tag(config=True)

    @default("allocator_url")
    def _default_allocator_url(self) -> str:
        return str(shared_settings().allocator_url)

    @default("spawner_token_file")
    def _default_spawner_token_file(self) -> str:
        return str(shared_settings().token_path())

    @default("hub_id")
    def _default_hub_id(self) -> str:
        return str(shared_settings().hub_id)

    @default("start_timeout")
    def _default_start_timeout(self) -> int:
        return int(self.queue_budget + self.boot_budget + self.start_margin)

    @default("http_timeout")
    def _default_http_timeout(self) -> int:
        # A hub that restarts ends servers that do not answer within this time, and a guest that
        # swaps in the middle of a long job is slow, not dead.
        return 120

    @default("poll_interval")
    def _default_poll_interval(self) -> int:
        # A poll is one small request to a local service; so a dead guest is noticed soon.
        return 15

    @default("cmd")
    def _default_cmd(self) -> list[str]:
        return ["jupyterhub-singleuser"]

    @default("ip")
    def _default_ip(self) -> str:
        return "0.0.0.0"

    @default("port")
    def _default_port(self) -> int:
        return 8888

    @default("env_keep")
    def _default_env_keep(self) -> list[str]:
        # The hub's environment means nothing in another machine.
        return []

    @property
    def start_margin(self) -> int:
        """Seconds between our own deadline and JupyterHub's, in which a failed start is undone."""
        return 15

    @property
    def start_budget(self) -> float:
        """Seconds that ``start()`` allows itself: below ``start_timeout``, whatever that is."""
        timeout = float(self.start_timeout)
        return max(timeout - self.start_margin, timeout * 0.8)

    def installation(self) -> Installation:
        """The shared settings with this spawner's own put over them."""
        settings: dict[str, Any] = {
            "state_dir": shared_settings().state_dir,
            "allocator_url": self.allocator_url,
            "spawner_token_file": self.spawner_token_file,
            "hub_id": self.hub_id,
        }
        return Installation(**settings)
