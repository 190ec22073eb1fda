"""`python -m unmask` is the `unmask` command."""

from unmask.cli.main import main

if __name__ == "__main__":
    main()
