"""Keeps a Serve replica's own servers on loopback when its node is. Knows nothing of what the replica does."""

from __future__ import annotations

import ipaddress
from typing import Any

import ray


def keep_on_loopback() -> None:
    """Call this in a replica's constructor, before Serve opens the replica's servers.

    Serve binds the gRPC server to every interface, whatever the node's address, and has no setting for it (2.60), and
    the HTTP server, to which HAProxy sends, to the interface of the public one; everything else in Ray follows the
    node's address. On a node whose address is not loopback this changes nothing.
    """
    host = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(host).is_loopback:
        return
    from ray.serve._private import replica

    bind, start = replica.add_port_to_grpc_server, replica.start_asgi_http_server

    def start_here(app: Any, options: Any, **more: Any) -> Any:
        return start(app, options.model_copy(update={"host": host}), **more)

    replica.add_port_to_grpc_server = lambda server, address: bind(server, address.replace("[::]", host))
    replica.start_asgi_http_server = start_here
