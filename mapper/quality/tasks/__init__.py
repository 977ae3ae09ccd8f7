"""Task files: local JSONL items as questions, and how their answers are judged."""

from mapper.quality.tasks.base import Format, Question, Task
from mapper.quality.tasks.formats import FORMATS, read_tasks

__all__ = ["FORMATS", "Format", "Question", "Task", "read_tasks"]
