"""Become a command inside a namespace: ``enter.py NET USER PARENT COMMAND...``, started by ``session``.

NET and USER are inherited descriptors of namespaces, USER -1 where there is none to enter; PARENT is the
process that the command must not outlive. This file is run by its path in a bare interpreter, which takes
milliseconds, so it imports nothing of thinwire.
"""

import ctypes
import os
import signal
import sys

CLONE_NEWUSER, CLONE_NEWNET, PR_SET_PDEATHSIG = 0x10000000, 0x40000000, 1
NOT_FOUND = 127  # as shells say it


def main(net: int, user: int, parent: int, command: list[str]) -> int:
    """Enter the namespaces and execute ``command``; return an exit code only if that fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    for fd, kind in ((user, CLONE_NEWUSER), (net, CLONE_NEWNET)):
        if fd >= 0 and libc.setns(fd, kind):
            sys.stderr.write(f"cannot enter the namespace: {os.strerror(ctypes.get_errno())}\n")
            return NOT_FOUND
    # After the user namespace, whose change of credentials clears it. The kernel sends it when the thread
    # that started this process ends.
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        return -signal.SIGKILL
    try:
        os.execvp(command[0], command)
    except OSError as e:
        sys.stderr.write(f"cannot run {command[0]}: {e.strerror}\n")
    return NOT_FOUND


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
