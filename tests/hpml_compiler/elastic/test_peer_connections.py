"""Connections to a peer's ends are shut down on both sides; others stay."""
from __future__ import annotations

import socket

from hpml_compiler.elastic.peer_connections import cut_connections, own_endpoints


def test_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours, other = (socket.create_connection(server.getsockname()) for _ in range(2))
        peer, kept = server.accept()[0], server.accept()[0]
        with ours, other, peer, kept:
            assert set(own_endpoints()) >= {ours.getsockname(), other.getsockname()}
            assert cut_connections({peer.getsockname()}) >= 1  # the server's port: both connections of clients
            assert ours.recv(1) == peer.recv(1) == b""
            with socket.create_server(("127.0.0.1", 0)) as third, socket.create_connection(third.getsockname()) as free:
                end, _ = third.accept()
                with end:
                    assert cut_connections({ours.getsockname()}) <= 1
                    end.sendall(b"x")
                    assert free.recv(1) == b"x"
