"""Accepts connections while there are places and descriptors, and none beyond an address's share.

asyncio's own way of accepting has no bounds, and where descriptors run out it logs thousands of lines a second.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from ipaddress import IPv6Address, IPv6Network, ip_address

from triforce.server.connections import Connection, Connections, raw
from triforce.server.errors import RETRY_SECONDS, ApiError

MOMENT = 0.1
"""Seconds that accepting pauses where nothing can be done, before it looks again."""
_USED_UP = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def network(host: str) -> str:
    """Return the address that a connection counts for: an IPv4 address, or the /64 of an IPv6 address.

    A /64 is the least that a customer or a machine is given of IPv6, so that one client has 2**64 addresses in it. IPv4
    addresses that arrive on an IPv6 socket (::ffff:192.0.2.1) count as what they are.
    """
    address = ip_address(host.partition("%")[0])
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is None:
            return str(IPv6Network((address, 64), strict=False))
        address = address.ipv4_mapped
    return str(address)


async def accept(sock: socket.socket, connections: Connections, protocol: Callable[[str], Connection]) -> None:
    """Accept until cancelled; `protocol` makes the protocol of a connection from an address."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            client, (host, *_) = await loop.sock_accept(sock)
        except OSError as error:
            if error.errno in _USED_UP:
                connections.note("no_descriptors")
                await _room(connections)
            else:  # it befell one client before it was accepted
                await asyncio.sleep(MOMENT)
            continue
        await _let_in(client, network(host), connections, protocol)


async def _let_in(
    client: socket.socket, address: str, connections: Connections, protocol: Callable[[str], Connection]
) -> None:
    with suppress(OSError):  # it may be gone
        try:
            admitted = not connections.full(address) or connections.make_room(address)
            await asyncio.sleep(0)  # what gave way leaves, and others have their turn
            if not admitted:
                connections.note("refused")
                return _refuse(client)
            while connections.full():
                await _room(connections)
            await asyncio.get_running_loop().connect_accepted_socket(partial(protocol, address), client)
        except BaseException:
            client.close()
            raise


async def _room(connections: Connections) -> None:
    """Close an idle connection, or pause for a moment where all are being answered."""
    if connections.make_room():
        return await asyncio.sleep(0)
    connections.note("paused")
    await asyncio.sleep(MOMENT)


def _refuse(client: socket.socket) -> None:
    """Answer before a request has come. Pending bytes are read, or the answer would be lost with them."""
    with client:
        client.send(_FULL)
        with suppress(BlockingIOError):
            client.recv(2**16)


_FULL = raw(ApiError(429, "your address has all the connections open that it may have, each with a request; "
                    "close some, or start the server with a larger --max-connections-per-address",
                    code="too_many_connections", headers={"Retry-After": str(RETRY_SECONDS)}))  # fmt: skip
