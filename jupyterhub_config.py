"""JupyterHub on virtual machines with whole GPUs. Works as it stands.

Everything that differs between installations comes from the environment, from files in the state
directory, or from ``gpuspawner_config.py`` (found by ``GPUSPAWNER_CONFIG``, else in
``/etc/gpuspawner``). That file may set anything that this one may, for instance
``c.GPUSpawner.profile_list`` or ``c.GenericOAuthenticator.client_id``; it is read last and wins.

    GPUSPAWNER_HUB_URL         the hub as virtual machines reach it, e.g. http://10.201.0.1:8081
    GPUSPAWNER_HUB_BIND_URL    where the hub listens; default: the same
    GPUSPAWNER_BIND_URL        where the proxy listens for browsers; default http://:8000
    GPUSPAWNER_PROXY_API       the proxy's own API; default http://127.0.0.1:8001
    GPUSPAWNER_PASSWORD        one password for all users (quickstart only)
    GPUSPAWNER_ADMIN_PASSWORD  one for the admins, at least 32 characters
    GPUSPAWNER_ADMINS          names of the admins, with commas; default admin

Instead of the passwords and tokens in the environment there may be files in the state directory:
password, admin.password, service.token, proxy.token. Make tokens with 'gpuspawner token'.
"""

import os
import sys
from pathlib import Path

import gpuspawner
from gpuspawner.config import ConfigError, Installation, load_config

c = get_config()  # noqa: F821  # JupyterHub provides it

shared = load_config()
site = Installation(config=shared)
state_dir = Path(site.state_dir)


def setting(variable: str, default: str = "") -> str:
    """A setting from the environment."""
    return os.environ.get(variable, "").strip() or default


def secret(variable: str, file: str) -> str:
    """A secret from the environment, else from a file in the state directory; may be empty."""
    path = state_dir / file
    try:
        return setting(variable) or (path.read_text().strip() if path.exists() else "")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error


def needed(variable: str, file: str, what: str) -> str:
    """A secret without which the hub cannot work."""
    value = secret(variable, file)
    if not value:
        raise ConfigError(
            f"{what} is missing. Put it into {state_dir / file} (make one with 'gpuspawner token') "
            f"or into the environment as {variable}."
        )
    return value


# -- the hub --------------------------------------------------------------------------------------

hub_url = setting("GPUSPAWNER_HUB_URL", "http://10.201.0.1:8081")
c.JupyterHub.bind_url = setting("GPUSPAWNER_BIND_URL", "http://:8000")
c.JupyterHub.hub_bind_url = setting("GPUSPAWNER_HUB_BIND_URL", hub_url)
c.JupyterHub.hub_connect_url = hub_url
c.JupyterHub.db_url = f"sqlite:///{state_dir / 'jupyterhub.sqlite'}"
c.JupyterHub.cookie_secret_file = str(state_dir / "jupyterhub.cookie_secret")
c.JupyterHub.template_paths = [str(Path(gpuspawner.__file__).parent / "templates")]

# A restart of the hub leaves servers and proxy alone; both are processes of their own.
c.JupyterHub.cleanup_servers = False
c.JupyterHub.cleanup_proxy = False
c.ConfigurableHTTPProxy.should_start = False
c.ConfigurableHTTPProxy.api_url = setting("GPUSPAWNER_PROXY_API", "http://127.0.0.1:8001")
c.ConfigurableHTTPProxy.auth_token = needed(
    "CONFIGPROXY_AUTH_TOKEN", "proxy.token", "The token of the proxy's API"
)
# Servers that do not answer at a restart of the hub are looked at in the background, without
# holding up everyone else.
c.JupyterHub.init_spawners_timeout = 10

# -- servers --------------------------------------------------------------------------------------

c.JupyterHub.spawner_class = "gpu"
c.JupyterHub.allow_named_servers = True
c.JupyterHub.named_server_limit_per_user = 5
# The allocator says what there is room for; this only keeps the hub itself responsive.
c.JupyterHub.concurrent_spawn_limit = 64

c.GPUSpawner.profile_list = [
    {
        "slug": "emulated",
        "display_name": "Emulated GPU",
        "description": "A pretended GPU with real memory, to try everything out without hardware.",
        "default": True,
        "spawner_override": {
            "gpus": 1,
            "cores": 1,
            "memory_mib": 1536,
            "image": "lab",
            "home_mib": 1024,
        },
    },
]

# -- the allocator, an external service -----------------------------------------------------------

c.JupyterHub.services = [
    {
        "name": "gpu",
        "url": site.allocator_url.split("/services/")[0],
        "api_token": needed(
            "GPUSPAWNER_SERVICE_TOKEN", "service.token", "The allocator's hub token"
        ),
        "display": True,
        # A hub that starts waits so long (seconds) for the allocator before it goes on without.
        "timeout": 3,
        "oauth_no_confirm": True,
        "oauth_client_allowed_scopes": [
            "custom:gpu:view",
            "custom:gpu:manage",
            "read:users!user",
            # The stop button on a user's page stops with the user's own rights.
            "delete:servers!user",
        ],
    },
    {
        "name": "idle-culler",
        "command": [
            sys.executable,
            "-m",
            "jupyterhub_idle_culler",
            # Idle for an hour, or older than twelve: the GPU goes to the next one.
            f"--timeout={setting('GPUSPAWNER_IDLE_SECONDS', '3600')}",
            f"--max-age={setting('GPUSPAWNER_LONGEST_SECONDS', '43200')}",
            f"--cull-every={setting('GPUSPAWNER_CULL_EVERY_SECONDS', '120')}",
        ],
    },
]

c.JupyterHub.custom_scopes = {
    "custom:gpu:view": {"description": "See the pool: hosts, GPUs, leases and diagnoses"},
    "custom:gpu:manage": {
        "description": "Manage the pool: hosts, GPUs and other people's leases",
        "subscopes": ["custom:gpu:view"],
    },
}
c.JupyterHub.load_roles = [
    {
        "name": "gpu-allocator",
        "description": "What the allocator needs of the hub",
        "services": ["gpu"],
        "scopes": [
            "list:users",
            "read:users",
            "read:servers",
            "read:groups",
            "list:groups",
            "delete:servers",
        ],
    },
    {
        "name": "gpu-admin",
        "description": "Manages the GPU pool",
        "users": [],
        "groups": ["gpu-admins"],
        "scopes": ["custom:gpu:manage"],
    },
    {
        "name": "idle-culler",
        "services": ["idle-culler"],
        "scopes": [
            "list:users",
            "read:users:activity",
            "read:servers",
            "delete:servers",
        ],
    },
]
# Everyone may open the allocator's pages; what is on them depends on the scopes above.
c.JupyterHub.extra_user_scopes = {"access:services!service=gpu"}

# -- who may log in -------------------------------------------------------------------------------

admins = {name.strip() for name in setting("GPUSPAWNER_ADMINS", "admin").split(",") if name.strip()}
password = secret("GPUSPAWNER_PASSWORD", "password")
admin_password = secret("GPUSPAWNER_ADMIN_PASSWORD", "admin.password")

if password or admin_password:
    # For trying out and for small groups that trust each other: whoever knows the password can
    # log in under any name that is not an admin's.
    c.JupyterHub.authenticator_class = "shared-password"
    c.SharedPasswordAuthenticator.user_password = password or None
    c.SharedPasswordAuthenticator.admin_password = admin_password or None
    c.SharedPasswordAuthenticator.admin_users = admins if admin_password else set()
    c.SharedPasswordAuthenticator.allow_all = True
    c.JupyterHub.load_roles[1]["users"] = sorted(admins) if admin_password else []
elif "authenticator_class" not in shared.get("JupyterHub", {}):
    # Any OpenID Connect provider. gpuspawner_config.py has to set c.GenericOAuthenticator's
    # client_id, client_secret, oauth_callback_url, authorize_url, token_url, userdata_url, and
    # allowed_groups (or allow_all): without it nobody but the admins may log in.
    if "GenericOAuthenticator" not in shared:
        raise ConfigError(
            "Nobody could log in. Set c.GenericOAuthenticator in gpuspawner_config.py, or, to try "
            f"things out, put a password into {state_dir / 'password'}."
        )
    c.JupyterHub.authenticator_class = "generic-oauth"
    c.GenericOAuthenticator.scope = ["openid", "profile", "email"]
    c.GenericOAuthenticator.username_claim = "preferred_username"
    c.GenericOAuthenticator.manage_groups = True
    c.GenericOAuthenticator.auth_state_groups_key = "oauth_user.groups"
    # Nothing of the provider's answer is kept, so no key to encrypt it with is needed; groups are
    # those of the last login.
    c.GenericOAuthenticator.admin_groups = {"gpu-admins"}

c.merge(shared)
