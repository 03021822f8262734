"""Becomes the session's server: reads server.json as root, then runs its command as the user.

The environment goes from JSON to execve(2) as it is, so that no quoting can change a value.
"""

from __future__ import annotations

import json
import os

TYPE_CHECKING = False  # typing.TYPE_CHECKING without importing typing, which takes its time

if TYPE_CHECKING:
    from typing import Any

SERVER = "/run/gpuspawner/server.json"
SERVED = "/run/gpuspawner/served"
LAB = "/opt/lab/bin"
WELCOME = "welcome/ndvi.ipynb"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def encode(text: str) -> bytes:
    """Text of JSON as the bytes that the process gets; lone surrogates go through as well."""
    return text.encode("utf-8", "surrogatepass")


def environment(server: dict[str, Any]) -> dict[bytes, bytes]:
    """The whole environment of the server as bytes: our defaults, then what the seed says."""
    runtime = f"/run/user/{server['uid']}"
    home = f"/home/{server['user']}"
    env = {
        "HOME": home,
        "USER": server["user"],
        "LOGNAME": server["user"],
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "PATH": f"{LAB}:{SYSTEM_PATH}",
        "XDG_RUNTIME_DIR": runtime,
        # On tmpfs: a full home must not keep the server from starting.
        "JUPYTER_RUNTIME_DIR": f"{runtime}/jupyter",
        "GPUSPAWNER_HOME_STATE": server["home_state"],
        # A module left in ~/.local must not be able to break the server (`pip install --user`).
        "PYTHONNOUSERSITE": "1",
    }
    if server["home_state"] in ("full", "readonly"):
        # What Jupyter and IPython write on their own goes to tmpfs; notebooks stay in the home.
        env["JUPYTER_CONFIG_DIR"] = f"{runtime}/jupyter-config"
        env["JUPYTER_DATA_DIR"] = f"{runtime}/jupyter-data"
        env["IPYTHONDIR"] = f"{runtime}/ipython"
        env["MPLCONFIGDIR"] = f"{runtime}/matplotlib"
        env["XDG_CACHE_HOME"] = f"{runtime}/cache"
    env.update(server["env"])
    clean = {}
    for name, value in env.items():
        if not name or "=" in name or "\0" in name or "\0" in str(value):
            print(f"gpuspawner: variable {name!r} is not possible, left out", flush=True)
            continue
        clean[encode(name)] = encode(str(value))
    return clean


def first_page(env: dict[bytes, bytes], home_state: str) -> dict[bytes, bytes]:
    """What makes JupyterLab open the welcome notebook, where it has never been used.

    It has been used in a home that keeps a workspace, and opens as it was left there. A page or a
    root directory that the hub names is left alone, as is everybody who deleted the notebook.
    """
    if home_state != "ok" or env.get(b"JUPYTERHUB_DEFAULT_URL") or env.get(b"JUPYTERHUB_ROOT_DIR"):
        return {}
    home = env[b"HOME"]
    config = env.get(b"JUPYTER_CONFIG_DIR") or os.path.join(home, b".jupyter")
    kept = env.get(b"JUPYTERLAB_WORKSPACES_DIR") or os.path.join(config, b"lab", b"workspaces")
    try:
        used = any(name.endswith(b".jupyterlab-workspace") for name in os.listdir(kept))
    except FileNotFoundError:
        used = False
    except OSError:
        used = True
    if used or not os.path.isfile(os.path.join(home, WELCOME.encode())):
        return {}
    return {b"JUPYTERHUB_DEFAULT_URL": f"/lab/tree/{WELCOME}".encode()}


def command(argv: list[str]) -> tuple[str, list[str]]:
    """(path, argv): a program without a slash is looked for in /opt/lab/bin, then the system."""
    if "/" in argv[0]:
        return argv[0], argv
    for directory in [LAB, *SYSTEM_PATH.split(":")]:
        path = os.path.join(directory, argv[0])
        if os.access(path, os.X_OK):
            return path, argv
    raise SystemExit(f"gpuspawner: this image has no program {argv[0]!r}")


def groups_of(name: str, primary: int) -> list[int]:
    """Groups of the user out of /etc/group, without importing the C library's lookups."""
    found = [primary]
    with open("/etc/group", encoding="utf-8") as handle:
        for line in handle:
            fields = line.rstrip("\n").split(":")
            if name in fields[3].split(","):
                found.append(int(fields[2]))
    return found


def main() -> None:
    with open(SERVER, "rb") as handle:
        server = json.load(handle)
    env = environment(server)
    with open(SERVED, "w", encoding="ascii"):
        pass  # its time is when the server was started, for after-server
    uid = server["uid"]
    os.setgroups(groups_of(server["user"], uid))
    os.setgid(uid)
    os.setuid(uid)
    os.umask(0o022)
    try:
        os.chdir(env[b"HOME"])
    except OSError:
        os.chdir("/")
    env |= first_page(env, server["home_state"])
    path, argv = command(server["argv"])
    # The allocator looks for this line on the console and tells the user.
    print(f"gpuspawner: starting {argv[0]}", flush=True)
    os.execve(path, [encode(word) for word in argv], env)


if __name__ == "__main__":
    main()
