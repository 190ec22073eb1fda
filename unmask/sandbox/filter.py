"""The system calls that the sandbox refuses, as a seccomp program for bubblewrap.

Namespaces, limits and a read-only view already confine a program. The filter removes what they leave: processes
(threads stay, so one address space is all the memory there is), memory that the address-space limit does not count
(shared memory, message queues, anonymous files), sockets, tracing, and kernel features through which sandboxes have
been escaped before: new namespaces, mounts, keys, bpf, io_uring, userfaultfd. `socketpair` stays: asyncio needs it, and
a pair connects the process only with itself.
"""

import struct

# (x86_64, aarch64); None if the architecture does not have the call
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None),
    "vfork": (58, None),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "personality": (135, 92),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "reboot": (169, 142),
}
CLONE = (56, 220)
CLONE3 = (435, 435)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, audit number

LOAD, EQUAL, AT_LEAST, SETS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # operations of classic BPF
ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOSYS = 0x00050001, 0x00050026  # "refuse with this error"
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
CLONE_THREAD = 0x00010000
X32 = 0x40000000  # the second set of x86_64 numbers


def seccomp_program(machine: str) -> bytes:
    """The filter for a machine, named like platform.machine(); ValueError if it is unknown."""
    if machine not in MACHINES:
        raise ValueError(f"the sandbox supports {' and '.join(MACHINES)}, not {machine}")
    column, audit = MACHINES[machine]
    rules = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, audit),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
    ]
    if machine == "x86_64":
        rules += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL)]
    for numbers in REFUSED.values():
        if (number := numbers[column]) is not None:
            rules += [(EQUAL, 0, 1, number), (RETURN, 0, 0, EPERM)]
    rules += [
        (EQUAL, 0, 1, CLONE3[column]),  # its flags are in memory, which a filter cannot read; libc falls back to clone
        (RETURN, 0, 0, ENOSYS),
        (EQUAL, 0, 3, CLONE[column]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (SETS, 1, 0, CLONE_THREAD),  # a thread cannot be in a new namespace, so this is the only flag to check
        (RETURN, 0, 0, EPERM),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *rule) for rule in rules)
