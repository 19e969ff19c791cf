"""A Ray on this machine alone: nothing that it starts can be reached from outside."""

from __future__ import annotations

import os
import tempfile
from typing import Any

# Unless clusters are off, Ray replaces 127.0.0.1 by the machine's address. The variable's name is historic.
CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_ALONE = {CLUSTERS: "0", "RAY_USAGE_STATS_ENABLED": "0"}
_USUAL = {"RAY_AUTH_MODE": "disabled"}  # nobody else can connect
OBJECT_BYTES = 128 << 20  # of Ray's object store: requests and answers are small


def start_local_ray(num_cpus: int | None = None, folder: str | None = None, **options: Any) -> None:
    """Start a Ray that listens on loopback only. Ray must not have been imported before.

    folder: of its sockets, whose name must be short; None: a new one. options: further ones of `ray.init`.
    """
    os.environ.update(_ALONE)
    for name, value in _USUAL.items():
        os.environ.setdefault(name, value)
    import ray

    ray.init(
        _node_ip_address="127.0.0.1",
        _temp_dir=folder or tempfile.mkdtemp(prefix="ray", dir="/tmp"),
        include_dashboard=False,
        num_cpus=num_cpus,
        **{"object_store_memory": OBJECT_BYTES, **options},
    )


def stay_on_loopback() -> None:
    """Bind a replica's port to loopback if this Ray is on one machine.

    Ray Serve binds it to every address, and reads pickles there. Call it before a constructor ends.
    """
    if os.environ.get(CLUSTERS) != "0":
        return
    from ray.serve._private import replica

    bind = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: bind(server, address.replace("[::]", "127.0.0.1"))
