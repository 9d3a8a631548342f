"""Keeps a Serve replica's own server on loopback when its node is. Knows nothing of what the replica does."""

from __future__ import annotations

import ipaddress

import ray


def keep_on_loopback() -> None:
    """Call this in a replica's constructor, before Serve opens the replica's gRPC server.

    Serve binds that server to every interface, whatever the node's address, and has no setting for it (2.60);
    everything else in Ray follows the node's address. On a node whose address is not loopback this changes nothing.
    """
    host = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(host).is_loopback:
        return
    from ray.serve._private import replica

    bind = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: bind(server, address.replace("[::]", host))
