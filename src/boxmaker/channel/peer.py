"""Who is at the other end of a unix socket."""

from __future__ import annotations

import socket
import struct

import trio


def peer_uid(stream: trio.SocketStream) -> int:
    """Give the peer's uid when it connected, by SO_PEERCRED."""
    raw = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", raw)
    return int(uid)
