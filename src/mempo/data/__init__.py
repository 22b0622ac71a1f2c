"""Tasks: read from the files of the field, checked, composed into multi-objective ones, written.

>>> from mempo.data import compose
>>> from mempo.core import Objective, Task
>>> items = [Task(str(i), (Objective(f"who is number {i}", (str(i),)),)) for i in range(5)]
>>> [task.question for task in compose(items, 2).tasks]
['who is number 0?; who is number 1?', 'who is number 2?; who is number 3?']
"""

from mempo.data.compose import Composition, LeftOut, compose, interleave
from mempo.data.formats import TaskFormat
from mempo.data.tasks import TaskFile, read_tasks, stream_tasks, write_tasks

__all__ = [
    "Composition",
    "LeftOut",
    "TaskFile",
    "TaskFormat",
    "compose",
    "interleave",
    "read_tasks",
    "stream_tasks",
    "write_tasks",
]
