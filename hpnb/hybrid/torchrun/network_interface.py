"""By which network interface a machine reaches the others.

gloo listens at the address of this machine's host name. On many machines that is the loopback (Debian
writes 127.0.1.1 into /etc/hosts, containers 127.0.0.1), where no other machine arrives. What leads to the
others is known from the routing table: packets to the master leave by it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct

from torch.distributed import Store  # type: ignore[attr-defined]

_ADDRESS_OF = 0x8915  # SIOCGIFADDR of Linux: the IPv4 address of an interface


def name_interface(store: Store, rank: int, world: int) -> None:
    """Tell gloo which interface leads to the other machines, unless GLOO_SOCKET_IFNAME says it. Every rank
    calls it. Where the master's name means the loopback on the master itself, its ranks look for the way to
    the last rank, which is on another machine."""
    address = address_towards(os.environ["MASTER_ADDR"])
    if rank == world - 1:
        store.set("hpnb/address", address or "")
    if address is None or ipaddress.ip_address(address).is_loopback:
        last = store.get("hpnb/address").decode()
        address = address_towards(last) if last else None
    interface = None if address is None else interface_of(address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def address_towards(host: str) -> str | None:
    """Which of its addresses this machine would send to `host` from; None if that is unknown."""
    try:
        candidates = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, place in candidates:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(place)  # of a datagram socket: nothing is sent
                return str(probe.getsockname()[0]).partition("%")[0]
        except OSError:
            continue
    return None


def interface_of(address: str) -> str | None:
    """The interface with this address; None where there is none, or the system is not Linux."""
    if ":" in address:
        return _of_version_6(address)
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                try:
                    answer = fcntl.ioctl(probe, _ADDRESS_OF, struct.pack("256s", name.encode()))
                except OSError:  # it has none
                    continue
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    except (ImportError, OSError):
        pass
    return None


def _of_version_6(address: str) -> str | None:
    wanted = ipaddress.IPv6Address(address).packed.hex()
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as table:
            rows = [line.split() for line in table]
    except OSError:
        return None
    return next((row[5] for row in rows if row[0] == wanted), None)
