"""What `rooftop train` trains: tasks by name, and those of users."""

from rooftop.train.tasks.finding import TASKS, find_task
from rooftop.train.tasks.task import Build, Task

__all__ = ["TASKS", "Build", "Task", "find_task"]
