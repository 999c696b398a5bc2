"""TCP connections between the ranks of a run, which are cut so that no rank goes on waiting in a collective.

gloo's `abort` ends no collective that waits, here or on a peer: each would wait for the timeout of its group. A connection
that is shut down ends them on both sides at once.
"""
from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection
from typing import Any

import psutil

Endpoint = tuple[str, int]


def own_endpoints() -> list[Endpoint]:
    """This process's ends of its TCP connections, and the ports at which it listens: a peer may have connected to one that has
    not been accepted."""
    return sorted({_endpoint(each.laddr) for each in _sockets()})


def ends_of_connections(port: int) -> set[Endpoint]:
    """This process's ends of its connections to a port."""
    return {_endpoint(each.laddr) for each in _sockets() if each.raddr and each.raddr[1] == port}


def cut_connections(peers: Collection[Endpoint] = (), own: Collection[Endpoint] = ()) -> int:
    """Shut down this process's connections to the ends `peers`, and those with the ends `own` here; returns their number."""
    cut = 0
    for each in _sockets():
        if each.raddr and (_endpoint(each.raddr) in peers or _endpoint(each.laddr) in own):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(each.fd)) as connection:  # it may be closed by now
                connection.shutdown(socket.SHUT_RDWR)
                cut += 1
    return cut


def _sockets() -> list[Any]:
    return [each for each in psutil.Process().net_connections(kind="tcp") if each.fd >= 0]


def _endpoint(address: tuple[str, int]) -> Endpoint:
    return address[0].removeprefix("::ffff:"), address[1]
