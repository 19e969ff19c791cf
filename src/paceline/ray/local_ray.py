"""A Ray on this machine alone: nothing that it starts can be reached from outside."""

from __future__ import annotations

import atexit
import os
import signal
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

from paceline.serve.worker.socket_folder import socket_folder

# Unless clusters are off, Ray replaces 127.0.0.1 by the machine's address. The variable's name is historic.
CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_ALONE = {CLUSTERS: "0", "RAY_USAGE_STATS_ENABLED": "0"}
_USUAL = {"RAY_AUTH_MODE": "disabled"}  # nobody else can connect
PREFIX = "paceline-ray-"
MAX_FOLDER_BYTES = 40  # of the path of Ray's folder: names of sockets in it have 64 more
ENDED_S = 5.0  # wait for killed processes to end
OBJECT_BYTES = 128 << 20  # of Ray's object store: requests and answers are small


def start_local_ray(num_cpus: int | None = None, folder: str | None = None, **options: Any) -> None:
    """Start a Ray that listens on loopback only. Ray must not have been imported before.

    folder: of Ray's sockets, with a short path; None: a new one, removed when this process ends. options:
    further ones of `ray.init`.
    """
    if folder is None:
        atexit.register((owned := ExitStack()).close)  # runs after Ray's own exit code, registered later
        folder = str(owned.enter_context(ray_folder()))
    os.environ.update(_ALONE)
    for name, value in _USUAL.items():
        os.environ.setdefault(name, value)
    import ray

    ray.init(
        _node_ip_address="127.0.0.1",
        _temp_dir=folder,
        include_dashboard=False,
        num_cpus=num_cpus,
        **{"object_store_memory": OBJECT_BYTES, **options},
    )


def ray_folder() -> AbstractContextManager[Path]:
    """Make a folder for a Ray, and remove the folders of dead owners."""
    return socket_folder(PREFIX, MAX_FOLDER_BYTES, _end_ray_in)


def _end_ray_in(folder: Path) -> bool:
    """End the processes of the Ray with logs in a folder; return whether all ended."""
    session, end_s = f"{folder.resolve()}/session_", time.monotonic() + ENDED_S
    while found := _writers_in(session):
        if time.monotonic() > end_s:
            return False
        for pid in found:
            with suppress(OSError):  # it has ended, or is another user's
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return True


def _writers_in(session: str) -> list[int]:
    """Return the ids of a Ray's processes; ended ones have no command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            said = (process / "cmdline").read_bytes()
            if (b"ray::" in said or b"/ray/" in said) and any(
                str(file.readlink()).startswith(session) for file in (process / "fd").iterdir()
            ):
                found.append(int(process.name))
    return found


def stay_on_loopback() -> None:
    """Bind a replica's port to loopback if this Ray is on one machine.

    Ray Serve binds the port to every address, and reads pickles there. Call this before a constructor ends.
    """
    if os.environ.get(CLUSTERS) != "0":
        return
    from ray.serve._private import replica

    bind = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: bind(server, address.replace("[::]", "127.0.0.1"))
