"""unmask schema"""

import typer


def schema() -> None:
    """Print the JSON schema of the configuration of unmask train, with which an editor completes and checks YAML."""
    from unmask.config.published import FILE

    typer.echo(FILE.read_text(), nl=False)
