"""`python -m unmask` is the `unmask` command."""

import atexit
import os
import sys

from unmask.cli.main import main

if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            raise
        # Started by torchrun. While the interpreter ends, a thread of gloo can abort the process, and a run that has
        # finished is reported as failed.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)
