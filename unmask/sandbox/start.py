"""The first code inside a sandbox: take over the standard streams, set the limits, start the role.

Its first arguments are the compiled files that run inside, including this one, so none of them exists as a file.
"""

import binascii
import marshal
import os
import resource
import sys


def main(wire: str, role: str, memory: int, threads: int, files: int, cpu: int, *fds: int) -> None:
    pipes = [os.dup(0), os.dup(1)]
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    limits = {"AS": memory, "NPROC": threads, "NOFILE": files, "CPU": cpu, "FSIZE": 0, "CORE": 0}
    for name, most in limits.items():
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
    sys.path[:] = [path for path in sys.path if path]
    sys.argv[:] = ["program"]
    for name, code in (("unmask.sandbox.wire", wire), ("unmask.sandbox.role", role)):
        sys.modules[name] = module = type(sys)(name)
        exec(marshal.loads(binascii.a2b_base64(code)), module.__dict__)
    module.serve(*pipes, *fds)


if __name__ == "__main__":
    main(sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))
