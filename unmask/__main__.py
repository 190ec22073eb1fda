"""`python -m unmask` is the `unmask` command."""

import atexit
import os
import sys
import threading

from unmask.cli.main import main

if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:
        if os.environ.get("WORLD_SIZE", "1") == "1":
            raise
        # Started by torchrun. A thread of gloo can abort the process during interpreter shutdown; torchrun then reports
        # a finished run as failed. So join threads, run exit handlers, flush, and exit without the rest of shutdown.
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
        threading._shutdown()  # type: ignore[attr-defined]  # joins threads; not in the type stubs
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
