"""The tasks of `rooftop train`: built-in tasks by name, and tasks of the user."""

from rooftop.train.tasks.finding import TASKS, find_task
from rooftop.train.tasks.task import Build, Task

__all__ = ["TASKS", "Build", "Task", "find_task"]
