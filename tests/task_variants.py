"""Tasks for tests, from functions instead of a class."""

from typing import Any

from unmask.tasks import Task


def task_of(**fields: Any) -> Task:
    """A task with these attributes, and these functions as its methods."""
    return Task().variant(**fields)
