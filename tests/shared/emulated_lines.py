"""Networks to emulate, for tests."""

from __future__ import annotations

import time

from thinwire.runs.emulator.session import Emulation

SENDER = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for i in range(int(sys.argv[2])):
    s.sendto(bytes(972), (sys.argv[1], 9999))
    time.sleep(0.0005)
"""


RECEIVER = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
s.bind(("", 9999))
s.settimeout(60)
n = 0
print("ready", flush=True)
try:
    while True:
        s.recv(2000)
        n += 1
        s.settimeout(2)
except TimeoutError:
    print(n, flush=True)
"""


STREAM_OUT = """
import socket, sys
with socket.create_connection((sys.argv[1], 9999), timeout=60) as s:
    for i in range(int(sys.argv[2])):
        s.sendall(i.to_bytes(4, "big") * 250000)
"""


STREAM_IN = """
import socket, sys
with socket.create_server(("", 9999)) as server:
    server.settimeout(60)
    print("ready", flush=True)
    s = server.accept()[0].makefile("rb")
    whole = all(s.read(1000000) == i.to_bytes(4, "big") * 250000 for i in range(int(sys.argv[1])))
    print("whole" if whole and not s.read(1) else "damaged", flush=True)
"""


def trip(net: Emulation) -> float:
    """Return how long connecting takes: one round trip."""
    with net.socket(1) as server, net.socket(0) as client:
        server.bind((net.address(1), 0))
        server.listen(1)
        client.settimeout(30)
        begin = time.monotonic()
        client.connect(server.getsockname())
        return time.monotonic() - begin
