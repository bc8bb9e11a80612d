"""
Seconds between the steps that run batches.

They stand together, in a module of their own, so that tests can shorten them for all modules at once.
"""

from __future__ import annotations

#: Between two looks at the tables, and the longest wait for an event.
POLL = 1.0
#: Between two looks at the tables where PostgreSQL notifies this process of changes.
NOTIFIED_POLL = 5.0
#: Between two looks at the file of changes.
WATCH = 0.2
#: After which lines that cannot start here are given back, so that other processes run them.
GIVE_BACK = 5.0
#: Between two looks at the slots of a model.
SLOTS = 1.0
#: Before what failed because of the disk or the database is tried again.
FAILURE_PAUSE = 2.0
#: For which results are collected before they are written together.
GROUP = 0.2
#: After which lines whose input is still being read leave their places to lines of other batches.
SLOW_READ = 1.0
#: Before a line is tried again for the first time, and at most.
RETRY = 1.0
MAX_RETRY = 60.0
#: After which a model that is away is checked for the first time, and at most.
FIRST_PAUSE = 1.0
MAX_PAUSE = 30.0
#: Between two deletions of expired files.
SWEEP = 600.0
#: For which the lines of a cancelled batch may still run.
CANCEL = 600.0
