#!/usr/bin/env python3
"""torc.py: a workflow manager in one file.

Copy this file onto a cluster and run `python3 torc.py run workflow.yaml`. Nothing else is needed: no
package, no root, no network. The same file is the server, the job runner, and every command.

    spec file --> Formats --> Spec --> Client ==> API --> Service --> Store (SQLite)
                                         ^                   |
                           Runner -------+  <-- claimed jobs-+
                             |
                          Launcher --> processes --> exit records --> completions --> Service

Start:  python3 torc.py help            the commands
        python3 torc.py help spec       every field of a workflow file
        python3 torc.py run FILE        create, run, wait, report

Sections (grep '^# ==' torc.py):
    0. Head
    1. Vocabulary
    2. Errors
    3. Plain tools
    4. Formats
    5. Spec
    6. Schema
    7. Store
    8. Service
    9. API
    10. Server
    11. Client
    13. Launcher
    16. Runner
    19. Rendering
    20. Commands
    21. Main

A name uses names of its own and of earlier sections, never of later ones. Public for those who
import this file: what __all__ lists. Everything else may change.

Licence: BSD 3-Clause, see LICENSE.
"""

# ======== 0. Head: imports and version ========

import base64
import codecs
import collections
import contextlib
import csv
import ctypes
import datetime
import decimal
import difflib
import errno
import functools
import gc
import getpass
import glob
import hashlib
import hmac
import http
import importlib
import io
import itertools
import json
import logging
import math
import operator
import os
import queue
import re
import resource
import secrets
import select
import selectors
import shlex
import shutil
import signal
import socket
import sqlite3
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import unicodedata
import urllib.parse
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

try:
    import tomllib
except ImportError:  # before Python 3.11: TOML files are refused, with the reason
    tomllib = None

__version__ = '0.1.0'
__all__ = ['Client', 'Credentials', 'TorcError', 'BadInput', 'Refused', 'NotFound', 'Conflict', 'Denied', 'Unreachable', 'main']

API_VERSION = '0.23.0'  # of Torc 1.0.0's HTTP contract, which this file speaks

LOG_FORMAT = '%(asctime)s %(levelname)s %(message)s'
log = logging.getLogger('torc')
log.addHandler(logging.NullHandler())


# ======== 1. Vocabulary: the words, limits and defaults that everything else uses ========
#
# workflow     a set of jobs with their files, user data and resources; has an owner
# job          one shell command; belongs to a workflow, has one status at a time
# spec         the file that a user writes; a plan is what is left after expansion and checks
# run          a generation of a workflow (run_id): 1 at the first initialize, +1 at each later one
# attempt      one try of a job in a run (attempt_id): 1, +1 with each retry
# result       what one attempt left: return code, times, memory, status
# prerequisite a job that must finish before another; jobs with the same ones share a dependency set
# kind         what claims look at: resource requirements, priority, scheduler, labels
# claim        taking a ready job for a node (ready -> pending); a claim not started comes back
# node         a compute node: one runner at work, with CPUs, memory and GPUs, and a lease
# slot         a running job's place in the runner's ledger of resources
# allocation   nodes that Slurm has given; a step is one srun in it
# action       commands or allocations that a trigger sets off
# lineage      jobs that a running job spawned, and those that they spawned in turn; each call is a generation
# task         an operation that goes on after its request was answered (202)
# orphan       a job that is running by the records, though nobody runs it


class Status(NamedTuple):
    """One state of a job."""
    code: int           # as stored, and in Torc's database
    name: str           # as spoken, everywhere else
    is_final: bool      # may be posted as the end of an attempt
    is_finished: bool   # dependants stop waiting for it
    is_bad: bool        # ... and are canceled because of it, unless they say otherwise
    is_done: bool       # nothing more of it is to come: counts for the workflow's completion
    is_active: bool     # in a runner's hands
    symbol: str         # in a terminal, one column wide
    colour: str         # ANSI colour number, as text
    meaning: str


STATUSES = (
    #      code  name             final  finished bad    done   active sym  colour meaning
    Status(0,  'uninitialized',  False, False, False, False, False, '.', '90', 'not yet looked at: initialize the workflow'),
    Status(1,  'blocked',        False, False, False, False, False, '|', '33', 'waits for other jobs'),
    Status(2,  'ready',          False, False, False, False, False, 'o', '36', 'may be claimed by a runner'),
    Status(3,  'pending',        False, False, False, False, True,  '>', '36', 'claimed by a runner, not yet started'),
    Status(4,  'running',        False, False, False, False, True,  '*', '34', 'started'),
    Status(5,  'completed',      True,  True,  False, True,  False, '+', '32', 'ended with return code 0'),
    Status(6,  'failed',         True,  True,  True,  True,  False, 'x', '31', 'ended with another return code'),
    Status(7,  'canceled',       True,  True,  True,  True,  False, '-', '35', 'will not run: canceled, or a prerequisite ended badly'),
    Status(8,  'terminated',     True,  True,  True,  True,  False, '!', '31', 'stopped by the runner, for lack of time'),
    Status(9,  'disabled',       False, True,  False, True,  False, '~', '90', 'switched off by the user; dependants go on'),
    Status(10, 'pending_failed', True,  False, False, False, False, '?', '33', 'failed; a person or program is to decide'),
)
UNINITIALIZED, BLOCKED, READY, PENDING, RUNNING, COMPLETED, FAILED, CANCELED, TERMINATED, DISABLED, PENDING_FAILED = (
    row.code for row in STATUSES)
STATUS_CODES = {row.name: row.code for row in STATUSES}
STATUS_NAMES = {row.code: row.name for row in STATUSES}

TRIGGERS = ('on_workflow_start', 'on_workflow_complete', 'on_worker_start', 'on_worker_complete',
            'on_jobs_ready', 'on_jobs_complete')
JOB_TRIGGERS = ('on_jobs_ready', 'on_jobs_complete')
ACTION_TYPES = ('run_commands', 'schedule_nodes')
EXECUTION_MODES = ('direct', 'slurm', 'auto')
STDIO_MODES = ('separate', 'combined', 'no_stdout', 'no_stderr', 'none')
GRANULARITIES = ('summary', 'time_series')
TASK_STATUSES = ('queued', 'running', 'succeeded', 'failed')
SEVERITIES = ('debug', 'info', 'warning', 'error')     # of what is told to readers of events; each one takes in those behind it
GROUP_ROLES = ('member', 'admin')   # a group's admin adds and removes its members
ADMIN_GROUP = 'admin'               # the group of the server's administrators
ANONYMOUS = 'anonymous'             # who asks without a name; owns nothing


class Exit(NamedTuple):
    """One exit code of the program."""
    code: int
    name: str
    meaning: str


EXITS = (
    Exit(0,   'done',        'done'),
    Exit(1,   'failed',      'ran, but jobs of the workflow failed or are left undone, whoever ran them'),
    Exit(2,   'usage',       'wrong usage or workflow file'),
    Exit(3,   'unreachable', 'server unreachable'),
    Exit(4,   'refused',     'refused, conflict or unknown id'),
    Exit(70,  'bug',         'a bug in torc.py: please report the traceback'),
    Exit(130, 'interrupted', 'interrupted'),
    Exit(141, 'pipe',        'the reader of the output went away'),
)


class Variable(NamedTuple):
    """One environment variable."""
    name: str
    set_by: str      # 'you' or 'torc'
    meaning: str


ENVIRONMENT = (
    Variable('TORC_API_URL',                'you',  'server to use, as http://HOST:PORT/torc-service/v1 (also set for jobs)'),
    Variable('TORC_TOKEN_FILE',             'you',  "path of a file that holds the server's token (also set for jobs)"),
    Variable('TORC_TLS_CA_CERT',            'you',  'certificates to believe, for an https URL (also set for jobs)'),
    Variable('TORC_TLS_INSECURE',           'you',  '1 or true: believe any certificate (also set for jobs)'),
    Variable('TORC_TLS_CERT',               'you',  '`serve`: its certificate, for https'),
    Variable('TORC_TLS_KEY',                'you',  '`serve`: the key of its certificate'),
    Variable('TORC_LOG_DIR',                'you',  '`serve`: directory for torc-server.log'),
    Variable('DATABASE_URL',                'you',  '`serve`: its database, as sqlite:PATH'),
    Variable('TORC_SERVER_SNAPSHOT_PATH',   'you',  '`serve`: where SIGUSR1 puts a copy of the database (default ./torc-server-snapshot.db; with --in-memory: its file)'),
    Variable('TORC_SERVER_SNAPSHOT_KEEP',   'you',  '`serve`: how many such copies are kept (default 5)'),
    Variable('TORC_USERNAME',               'you',  'owner of new workflows, and user of TORC_PASSWORD; else USER'),
    Variable('TORC_PASSWORD',               'you',  'password for the server that --url or TORC_API_URL names (kept from jobs)'),
    Variable('TORC_COOKIE_HEADER',          'you',  'Cookie field for that server, where a gateway before it wants one (kept from jobs)'),
    Variable('TORC_AUTH_FILE',              'you',  'password file of `serve`; as --auth-file'),
    Variable('TORC_CREDENTIAL_CACHE_TTL_SECS', 'you', 'as --credential-cache-ttl-secs of `serve`'),
    Variable('TORC_ADMIN_USERS',            'you',  'administrators of `serve`, separated by commas; beside --admin-user'),
    Variable('XDG_STATE_HOME',              'you',  "where `serve` keeps torc/torc.db and registers servers; else ~/.local/state"),
    Variable('NO_COLOR',                    'you',  'no colours on the terminal'),
    Variable('TORC_WORKFLOW_ID',            'torc', 'the workflow'),
    Variable('TORC_RUN_ID',                 'torc', 'its run generation'),
    Variable('TORC_JOB_ID',                 'torc', 'the job (not in run_commands actions)'),
    Variable('TORC_JOB_NAME',               'torc', 'its name (not in run_commands actions)'),
    Variable('TORC_ATTEMPT_ID',             'torc', 'its attempt, from 1 (not in run_commands actions)'),
    Variable('TORC_OUTPUT_DIR',             'torc', "the runner's output directory, absolute"),
    Variable('TORC_WORKFLOW_SUBMISSION_DIR', 'torc', 'directory in which the workflow was created'),
    Variable('TORC_ORCHESTRATOR_LINEAGE_ID', 'torc', 'lineage of a job that another job spawned (those only)'),
    Variable('TORC_RETURN_CODE',            'torc', "the failed attempt's return code (recovery scripts only)"),
    Variable('TORC_GPU_VISIBLE_DEVICES',    'torc', 'GPU indexes given to the job; CUDA_, HIP_ and ROCR_VISIBLE_DEVICES are the same'),
)

# ---- limits ----
MAX_LIST_ITEMS = 100000             # of one list answer, and of one bulk request
MAX_INSTANCES = 1000000             # that parameters may make; --max-instances lifts it
MAX_SPEC_BYTES = 2 ** 30            # of a workflow file: three million jobs spelled out
MAX_NAME_CHARACTERS = 1000          # of any name; files on disk are named by ids
MAX_REASON_CHARACTERS = 500         # of the reason of a failure; the rest is in the job's output
MAX_BODY_BYTES = 2 * 1024 ** 2      # of a request
MAX_BULK_BODY_BYTES = 200 * 1024 ** 2   # of bulk_* and from_spec requests
MAX_INTEGER = 2 ** 63 - 1           # SQLite's
MAX_DEPTH = 100                     # nesting of values in files and requests

# ---- defaults ----
DEFAULT_OUTPUT_DIR = 'torc_output'
DEFAULT_PORT = 8080
API_PREFIX = '/torc-service/v1'
DEFAULT_POLL_INTERVAL_S = 5.0
DEFAULT_CLAIM_BACKOFF_MAX_S = 300.0
CLAIM_GRACE_S = 120                 # a job as long as its allocation must be taken at its start
DEFAULT_REQUIREMENTS = {'name': 'default', 'num_cpus': 1, 'num_gpus': 0, 'num_nodes': 1, 'memory': '1m', 'runtime': 'P0DT1M'}
WORKFLOW_DEFAULTS = {
    'compute_node_wait_for_new_jobs_seconds': 90,
    'compute_node_ignore_workflow_completion': False,
    'compute_node_wait_for_healthy_database_minutes': 20,
    'compute_node_min_time_for_new_jobs_seconds': 300,
    'use_pending_failed': False,
}
EXECUTION_DEFAULTS = {
    'mode': 'auto', 'limit_resources': True, 'termination_signal': 'SIGTERM', 'sigterm_lead_seconds': 30,
    'sigkill_headroom_seconds': 60, 'timeout_exit_code': 152, 'oom_exit_code': 137, 'srun_termination_signal': None,
    'enable_cpu_bind': False, 'srun_mpi': None, 'staggered_start': True, 'stdio': {'mode': 'separate', 'delete_on_success': False},
    'job_stdio_overrides': {},
}
DEFAULT_MAX_RETRIES = 3             # attempts in all, as Torc counts
DEFAULT_MAX_ITERATIONS = 1000       # generations of a lineage of spawned jobs
ORPHAN_RETURN_CODE = -128           # of a job whose runner went away
COMMAND_NOT_FOUND = 127             # POSIX shell


# ======== 2. Errors: what a user or caller can cause or cure ========
#
# One root and six kinds, told apart by what the caller does next. A TorcError is printed as its message, never as
# a traceback; everything else that is raised is a bug. A message says what is wrong, with value and place, then the cure.


class TorcError(Exception):
    """Root of the errors that a user can cause or cure. `exit` is the program's exit code, `http` the answer's status."""
    exit = 4
    http = 422

    def __init__(self, message: str, http: Optional[int] = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details      # further keys of the ErrorResponse
        if http is not None:
            self.http = http


class Problem(NamedTuple):
    """One thing that is wrong with a file or request. Line and column count from 1; 0 where unknown."""
    message: str
    line: int = 0
    column: int = 0
    path: str = ''      # of the file, or ''

    def __str__(self) -> str:
        place = ':'.join(str(part) for part in (self.path, self.line, self.column) if part)
        return f'{place}: {self.message}' if place else self.message


class BadInput(TorcError):
    """Wrong usage, file or request: mend it and ask again. Holds every problem that was found."""
    exit = 2
    http = 422

    def __init__(self, message: str, problems: Sequence[Problem] = (), http: Optional[int] = None, **details: Any) -> None:
        super().__init__(message, http, **details)
        self.problems = list(problems)


class Refused(TorcError):
    """The request is right, but the state of things forbids it."""


class NotFound(TorcError):
    """No such thing: look it up again."""
    http = 404


class Conflict(TorcError):
    """Somebody else was first, or the thing exists already."""
    http = 409


class Denied(TorcError):
    """Not allowed with these credentials."""
    http = 403


class Unreachable(TorcError):
    """The server did not answer: try again later."""
    exit = 3
    http = 503


# ======== 3. Plain tools: text <-> value pairs, files, other programs ========
#
# Small functions that know nothing of workflows. parse_X and format_X are inverse to each other where both exist.
# Their errors are ValueErrors with a message that names the value and the form that is wanted; callers add the place.
#
# Memory, durations and walltimes are stored and sent in Torc's forms, which parse_memory, parse_duration and
# parse_walltime read. What else people write (8GB, 30m, 1:00:00) is rewritten at the edge, by normalize_X.

class Expression:
    """A regular expression, compiled at its first use: all of them would be a tenth of the program's start.

    It has the methods of re's own, each an attribute once it was asked for. Those that a reader of files calls at every
    word stay with re.compile: since Python 3.11 a method of a class is called some nanoseconds faster than an attribute.
    """

    def __init__(self, text: Union[str, bytes], flags: int = 0) -> None:
        self.text, self.flags = text, flags

    def __getattr__(self, name: str) -> Any:
        method = getattr(re.compile(self.text, self.flags), name)
        setattr(self, name, method)
        return method


MEMORY_UNITS = {'': 1, 'k': 1024, 'm': 1024 ** 2, 'g': 1024 ** 3, 't': 1024 ** 4}
MEMORY_TEXT = Expression(r'\s*\+?([0-9]+)([kmgt]?)\s*\Z', re.IGNORECASE)
DURATION_TEXT = Expression(
    r'P(?=.)(?:([0-9]+)W|(?:([0-9]+)Y)?(?:([0-9]+)M)?(?:([0-9]+)D)?(?:T(?:([0-9]+)H)?(?:([0-9]+)M)?(?:([0-9]+)(?:[.,][0-9]*)?S)?)?)\Z')
DURATION_UNITS_S = (604800, 31557600, 2629800, 86400, 3600, 60, 1)   # week, year, month, day, hour, minute, second, as Torc counts
WRITTEN_MEMORY = Expression(r'([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])(?:ib?|b)?|b|bytes?)\Z', re.IGNORECASE)
SPAN_UNITS_S = {    # pattern of a unit's names -> seconds
    'w(?:eeks?)?': 604800, 'd(?:ays?)?': 86400, 'h(?:ours?|rs?)?': 3600, 'm(?:in(?:ute)?s?)?': 60,
    's(?:ec(?:ond)?s?)?': 1}
SPAN_TEXT = Expression(
    r'\s*'.join(r'(?:([0-9]+(?:\.[0-9]+)?)\s*%s)?' % unit for unit in SPAN_UNITS_S) + r'\Z', re.IGNORECASE)
LEAST_PLAUSIBLE_MEMORY = 1024 ** 2  # bytes; of less without a unit, megabytes or gigabytes were meant
WALLTIME_TEXT = Expression(r'(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?\Z')
TIME_TEXT = Expression(r'([0-9]{4})-([0-9]{2})-([0-9]{2})[Tt ]([0-9]{2}):([0-9]{2}):([0-9]{2})(\.[0-9]+)?(Z|z|[-+][0-9]{2}:?[0-9]{2})?\Z')
UNPRINTABLE = Expression('[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]')

# File systems that keep their locks on this host; anything else is treated as a network file system.
LOCAL_FILESYSTEMS = frozenset('ext2 ext3 ext4 xfs btrfs zfs f2fs overlay tmpfs ramfs devtmpfs'.split())


def parse_memory(text: str) -> int:
    """'512m' -> bytes. A whole number and at most one letter k, m, g, t of any case, 1024-based."""
    match = MEMORY_TEXT.match(text)
    if not match:
        raise ValueError(f'{text!r} is not an amount of memory: write a whole number and k, m, g or t, such as 512m or 2g')
    value = int(match.group(1)) * MEMORY_UNITS[match.group(2).lower()]
    if value > MAX_INTEGER:
        raise ValueError(f'{text!r} is more memory than can be counted')
    return value


def format_memory(value_bytes: float) -> str:
    """Bytes -> '12.3MB', for people."""
    for unit, size in (('TB', 1024 ** 4), ('GB', 1024 ** 3), ('MB', 1024 ** 2), ('KB', 1024)):
        if value_bytes >= size:
            return f'{value_bytes / size:.1f}{unit}'
    return f'{int(value_bytes)}B'


def normalize_memory(text: str) -> str:
    """'8GB', '8Gi', '1.5 GiB' -> Torc's form: '8g', '1536m'. Units are 1024-based. Torc's forms stay."""
    if not MEMORY_TEXT.match(text):
        match = WRITTEN_MEMORY.match(text.strip())
        if not match:
            raise ValueError(f'{text!r} is not an amount of memory: write a number and a unit, '
                             'such as 512m, 8g or 1.5GB')
        number, unit = decimal.Decimal(match.group(1)), (match.group(2) or '').lower()
        least = 1024 if unit else 1     # whole kilobytes: a number of bytes would look like a forgotten unit
        value = math.ceil(number * MEMORY_UNITS[unit] / least) * least
        fitting = [f'{value // size}{letter}' for letter, size in MEMORY_UNITS.items() if value % size == 0]
        text = fitting[-1]
    parse_memory(text)
    return text


def doubt_memory(text: str) -> str:
    """What may be wrong with memory in Torc's form: a bare number is bytes, which few people mean; or ''."""
    number = text.strip(' +')
    if not number.isdigit() or not 0 < int(number) < LEAST_PLAUSIBLE_MEMORY:
        return ''
    return f'{number} is {number} bytes: write {number}m for megabytes, {number}g for gigabytes'


def parse_duration(text: str) -> int:
    """ISO 8601 duration such as 'PT1H30M', 'P1D' or 'P2W' -> whole seconds."""
    match = DURATION_TEXT.match(text)
    if not match or not any(match.groups()) and text != 'PT':
        raise ValueError(f'{text!r} is not a duration: write it in ISO 8601, such as PT30M, PT2H or P1DT12H')
    value = sum(int(number) * unit for number, unit in zip(match.groups('0'), DURATION_UNITS_S))
    if value > MAX_INTEGER:
        raise ValueError(f'{text!r} is longer than can be counted')
    return value


def format_duration(value_s: float) -> str:
    """Seconds -> 'PT1H30M'. Fractions are dropped."""
    days, rest = divmod(int(value_s), 86400)
    hours, rest = divmod(rest, 3600)
    minutes, seconds = divmod(rest, 60)
    time_part = ''.join(f'{number}{unit}' for number, unit in ((hours, 'H'), (minutes, 'M'), (seconds, 'S')) if number)
    return 'P' + (f'{days}D' if days else '') + ('T' + time_part if time_part or not days else '') + ('' if time_part or days else '0S')


def parse_span(text: str) -> float:
    """A time as people write it ('90s', '1h30m', '1.5 hours', '1:00:00', '1-12:00:00', 'PT30M') -> seconds.

    What has several meanings is refused: a bare number, and two numbers with a colon.
    """
    word = text.strip()
    units, clock, iso = SPAN_TEXT.match(word), WALLTIME_TEXT.match(word), DURATION_TEXT.match(word.upper())
    if units and any(units.groups()):
        value_s = sum(float(number) * unit for number, unit in zip(units.groups('0'), SPAN_UNITS_S.values()))
    elif clock and (clock.group(1) or clock.group(4)):
        value_s = parse_walltime(word)
    elif clock and ':' in word:
        raise ValueError(f'{text!r} may be hours and minutes or minutes and seconds: '
                         f'write {word}:00 or 0:{word}')
    elif clock:
        raise ValueError(f'{text!r} may be seconds, minutes or hours: write {word}s, {word}m or {word}h')
    elif iso:
        value_s = parse_duration(word.upper())
    else:
        raise ValueError(f'{text!r} is not a duration: write such as 90s, 30m, 1d12h, 1:00:00 or PT30M')
    if value_s > MAX_INTEGER:
        raise ValueError(f'{text!r} is longer than can be counted')
    return value_s


def normalize_duration(text: str) -> str:
    """'30m', '1:00:00' -> Torc's form: 'PT30M', 'PT1H'. ISO 8601 stays; fractions of a second are dropped."""
    value_s = parse_span(text)
    return text if DURATION_TEXT.match(text) else format_duration(value_s)


def normalize_walltime(text: str) -> str:
    """'2h', '1d12h' -> Slurm's form: '02:00:00', '1-12:00:00'. Slurm's forms stay: 45 is 45 minutes."""
    if WALLTIME_TEXT.match(text.strip()):
        return text
    try:
        return format_walltime(parse_span(text))
    except ValueError:
        raise ValueError(f'{text!r} is not a walltime: write HH:MM:SS, D-HH:MM:SS, '
                         'or such as 30m, 2h or 1d12h') from None


def parse_walltime(text: str) -> int:
    """Slurm time: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS -> seconds (sbatch(1), --time)."""
    match = WALLTIME_TEXT.match(text.strip())
    if not match:
        raise ValueError(f'{text!r} is not a walltime: write HH:MM:SS or D-HH:MM:SS')
    days, first, second, third = (None if part is None else int(part) for part in match.groups())
    if days is not None:
        return days * 86400 + first * 3600 + (second or 0) * 60 + (third or 0)
    if second is None:
        return first * 60
    return first * 60 + second if third is None else first * 3600 + second * 60 + third


def format_walltime(value_s: float) -> str:
    """Seconds -> '01:30:00' or '1-12:00:00'."""
    days, rest = divmod(math.ceil(value_s), 86400)
    return (f'{days}-' if days else '') + f'{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}'


def in_unit(parse: Callable[[str], float], unit: float) -> Callable[[str], float]:
    """A parser of a plain number, which is in an option's own unit, or else of a text that says its unit."""
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.inf
        return value if math.isfinite(value) else parse(text) / unit
    return read


parse_seconds, parse_minutes = in_unit(parse_span, 1), in_unit(parse_span, 60)
parse_gigabytes = in_unit(lambda text: parse_memory(normalize_memory(text)), 1024 ** 3)


def parse_whole_seconds(text: str) -> int:
    """Seconds without a fraction."""
    value_s = parse_seconds(text)
    if value_s != int(value_s):
        raise ValueError(f'{text!r} is not a whole number of seconds')
    return int(value_s)


def parse_time(text: str) -> float:
    """RFC 3339 time -> seconds since the epoch. Without a zone it is local time."""
    match = TIME_TEXT.match(text.strip())
    if not match:
        raise ValueError(f'{text!r} is not a time: write it as 2026-11-21T18:30:00Z or with an offset such as +01:00')
    fraction, zone = match.group(7), match.group(8)
    try:
        value = datetime.datetime(*map(int, match.groups()[:6]), tzinfo=datetime.timezone.utc)    # strptime takes ten times as long
        if zone is None:
            seconds = time.mktime(value.timetuple()[:8] + (-1,))
        else:
            zone = '+0000' if zone in 'Zz' else zone.replace(':', '')
            offset_s = (int(zone[1:3]) * 60 + int(zone[3:5])) * 60 * (-1 if zone[0] == '-' else 1)
            seconds = value.timestamp() - offset_s
    except (ValueError, OverflowError):
        raise ValueError(f'{text!r} is not a time that exists') from None
    return seconds + float(fraction or 0)


def format_time(value_s: float) -> str:
    """Seconds since the epoch -> '2026-11-21T09:28:54.436Z'. Beyond the years of four digits: the nearest that has them."""
    whole, milliseconds = divmod(int(round(min(max(value_s, -30610224000), 253402300799) * 1000)), 1000)
    return time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole)) + f'.{milliseconds:03d}Z'


def format_elapsed(value_s: float) -> str:
    """Seconds -> '5s', '3m 07s', '2h 05m', '1d 03h', for people."""
    whole = int(value_s)
    if whole < 60:
        return f'{whole}s'
    if whole < 3600:
        return f'{whole // 60}m {whole % 60:02d}s'
    if whole < 86400:
        return f'{whole // 3600}h {whole // 60 % 60:02d}m'
    return f'{whole // 86400}d {whole // 3600 % 24:02d}h'


def printable(text: str) -> str:
    """Text from a job, file or client, made safe for a terminal, a log line or a table."""
    return UNPRINTABLE.sub(lambda match: '\\x%02x' % ord(match.group()) if ord(match.group()) < 256 else '\\u%04x' % ord(match.group()), text)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """', did you mean ...?' for the choice nearest to a mistyped word, or ''."""
    near = difflib.get_close_matches(word, list(choices), 1, 0.6)
    return f", did you mean '{near[0]}'?" if near else ''


def first_of(words: Sequence[Any], most: int = 10) -> str:
    """The first of many things, for a message: 'a, b and 3 more'."""
    more = f' and {len(words) - most} more' if len(words) > most else ''
    return ', '.join(map(str, words[:most])) + more


def unique_pairs(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
    """object_pairs_hook for json: a key that stands twice is an error."""
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = collections.Counter(key for key, _ in pairs)
        raise ValueError(f'duplicate key {counts.most_common(1)[0][0]!r}')
    return value


def refuse_constant(word: str) -> None:
    """parse_constant for json: NaN and Infinity are not JSON (RFC 8259)."""
    raise ValueError(f'{word} is not allowed')


def parse_integer(text: str) -> int:
    """parse_int for json where int() has no limit of its own, and takes minutes for a million digits (Python before 3.10.7)."""
    if len(text) > 4300:
        raise ValueError(f'a number of {len(text)} digits')
    return int(text)


JSON_INTEGER = None if hasattr(sys, 'get_int_max_str_digits') else parse_integer


def parse_json(text: str) -> Any:
    """Strict JSON -> value. ValueError for what RFC 8259 forbids, duplicate keys, or nesting beyond the stack."""
    try:
        return json.loads(text, object_pairs_hook=unique_pairs, parse_constant=refuse_constant, parse_int=JSON_INTEGER)
    except RecursionError:
        raise ValueError('nested too deeply') from None


def format_json(value: Any) -> str:
    """Value -> compact JSON, as stored and sent."""
    return json.dumps(value, separators=(',', ':'), ensure_ascii=False, allow_nan=False)


def reason_phrase(status: int) -> str:
    """What an HTTP status is called; '' for one that has no name."""
    try:
        return http.HTTPStatus(status).phrase
    except ValueError:
        return ''


def user_name() -> str:
    """Who runs this program: TORC_USERNAME, USER, or the account's name."""
    return os.environ.get('TORC_USERNAME') or os.environ.get('USER') or account_name()


def account_name() -> str:
    """Name of the account, or its number where the account has no name (containers)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # the kinds that getpass raises from 3.6 to 3.13
        return str(os.getuid())


def make_private_directory(path: str) -> None:
    """Make a directory, with its parents, that only the owner may enter. An existing one is left as it is."""
    if not os.path.isdir(path):
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        try:
            os.mkdir(path, 0o700)
            os.chmod(path, 0o700)   # a umask may have taken bits away
        except FileExistsError:
            if not os.path.isdir(path):
                raise


def is_private_group(found: os.stat_result) -> bool:
    """Whether the group that may write is the owner's alone, as RHEL and Debian make one for each user."""
    return not found.st_mode & 0o002 and found.st_gid == found.st_uid == os.geteuid()


def open_new_private(path: str, flags: int) -> int:
    """Open a file of our own; if it is new, only the owner may read and write it, whatever the umask. The descriptor."""
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    os.fchmod(descriptor, 0o600)
    return descriptor


def write_atomically(path: str, data: bytes, mode: int = 0o600, is_new: bool = False) -> None:
    """Put a file in place as a whole: readers see the old content or the new, never a part.

    With `is_new` FileExistsError if there is one: exactly one of several callers succeeds, over NFS too.
    """
    descriptor, temporary = tempfile.mkstemp(prefix='.' + os.path.basename(path), dir=os.path.dirname(os.path.abspath(path)))
    try:
        with os.fdopen(descriptor, 'wb') as file:
            os.fchmod(descriptor, mode)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        if not is_new or not link_new(temporary, path):
            os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def link_new(temporary: str, path: str) -> bool:
    """Move a file to a name that is free, else FileExistsError. False if the name was only reserved."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:     # no hard links (FAT, some FUSE mounts): readers may see an empty file for a moment
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        return False
    os.unlink(temporary)
    return True


def load_ssl() -> Any:
    """The module ssl. Only who speaks https waits for it: it costs 12 ms on Python 3.6, a quarter of all other imports."""
    return importlib.import_module('ssl')


class Reply(NamedTuple):
    """What another program answered."""
    code: int       # exit code; 128+n for a signal
    out: str
    err: str


def ask(argv: Sequence[str], timeout_s: float = 10.0) -> Reply:
    """Run another program and wait for it. A program that cannot be started, or is too slow, answers 127 or 124."""
    try:
        done = subprocess.run(list(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              timeout=timeout_s, encoding='utf-8', errors='replace')
    except subprocess.TimeoutExpired:
        return Reply(124, '', f'{argv[0]}: no answer within {timeout_s:g} s')
    except OSError as error:
        return Reply(COMMAND_NOT_FOUND, '', f'{argv[0]}: {error.strerror}')
    return Reply(done.returncode if done.returncode >= 0 else 128 - done.returncode, done.stdout, done.stderr)


def read_boot_id() -> str:
    """Identity of this boot of this machine, or '' where the kernel does not tell (/proc/sys/kernel/random/boot_id)."""
    try:
        with open('/proc/sys/kernel/random/boot_id') as file:
            return file.read().strip()
    except OSError:
        return ''


def read_process_start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot (proc(5), stat, field 22), or 0 if there is no such process.

    Together with the boot id and the pid it names a process for good: pids are used again.
    """
    try:
        with open(f'/proc/{pid}/stat', 'rb') as file:
            fields = file.read().rpartition(b')')[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b'Z', b'X') else int(fields[19])


def filesystem_type(path: str) -> str:
    """Type of the file system that holds a path, such as 'ext4' or 'nfs4', or '' if unknown (proc(5), mountinfo)."""
    best, kind = '', ''
    path = os.path.realpath(path)
    try:
        with open('/proc/self/mountinfo', encoding='utf-8', errors='surrogateescape') as file:
            lines = file.read().splitlines()
    except OSError:
        return ''
    for line in lines:
        left, _, right = line.partition(' - ')
        mount = re.sub(r'\\([0-7]{3})', lambda match: chr(int(match.group(1), 8)), left.split()[4])
        inside = path == mount or path.startswith(mount.rstrip('/') + '/')
        if inside and len(mount) >= len(best):
            best, kind = mount, right.split()[0]
    return kind


def is_network_path(path: str) -> bool:
    """Whether a path lies on a network file system, where other hosts see the same file."""
    return filesystem_type(path) not in LOCAL_FILESYSTEMS | {''}


def is_deleted(path: str) -> bool:
    """Whether a file was removed. Its directory must be there: the file system may not be mounted now."""
    return os.path.isdir(os.path.dirname(path)) and not os.path.exists(path)


def stdio_paths(output_dir: str, workflow_id: int, job_id: int, run_id: int, attempt_id: int, mode: str) -> Tuple[Optional[str], Optional[str]]:
    """Where an attempt's stdout and stderr go, by stdio mode; None is /dev/null. The two are the same file in mode combined."""
    stem = os.path.join(output_dir, 'job_stdio', f'job_wf{workflow_id}_j{job_id}_r{run_id}_a{attempt_id}')
    return {
        'separate': (stem + '.o', stem + '.e'),
        'combined': (stem + '.log', stem + '.log'),
        'no_stdout': (None, stem + '.e'),
        'no_stderr': (stem + '.o', None),
        'none': (None, None),
    }[mode]


# ======== 4. Formats: text -> plain values ========
#
# Readers of YAML 1.2, JSON, JSON5 and KDL 2 (TOML through the standard library), written from the format
# specifications. All follow one law: a text gives exactly the value that its specification says, or one BadInput
# with line, column, the line itself and the cure. What a reader does not know it refuses; it never guesses.
#
# A reader walks one text with one offset and compiled expressions: no tokens, no list of lines. The expressions that
# take a whole simple line at once carry the speed; everything else may be slow but is never worse than linear.
# Values are dict, list, str, int, float, bool, None. A number whose source text says more than str() would (007,
# 1.10, 0x1F) is an Int or Float that keeps it as `raw`, so that a text field may take it as it was written.
#
# Where a value came from: `positions` maps id(container) -> [offset of the container, offset of its first entry, ...]
# in order of insertion. Lines and columns are counted only when somebody asks.

FORMATS = {'.yaml': 'yaml', '.yml': 'yaml', '.json': 'json', '.json5': 'json5', '.kdl': 'kdl', '.toml': 'toml'}
MAX_NUMBER_CHARACTERS = 1000    # int() takes quadratic time
MAX_ALIASED_VALUES = 5000000    # that the aliases of one text may stand for ("billion laughs")
SHOWN_CHARACTERS = 100          # of a source line, under a message

Positions = Dict[int, List[int]]


class Int(int):
    """A whole number whose source text (`raw`) differs from str()."""
    raw = ''


class Float(float):
    """A fraction whose source text (`raw`) differs from str()."""
    raw = ''


def parse_whole(text: str, digits: str = '', base: int = 10) -> int:
    """A whole number; `digits` is its text without sign, prefix and separators, where it has such."""
    if len(text) > MAX_NUMBER_CHARACTERS:
        raise ValueError(f'a number of {len(text)} characters is too long; put it in quotes if it is meant as text')
    value = int(digits or text, base)
    if digits and text[0] == '-':
        value = -value
    return value if str(value) == text else keep_source(Int(value), text)


def parse_fraction(text: str) -> float:
    """A decimal number with a fraction or an exponent."""
    if len(text) > MAX_NUMBER_CHARACTERS:
        raise ValueError(f'a number of {len(text)} characters is too long; put it in quotes if it is meant as text')
    value = float(text)
    return value if repr(value) == text else keep_source(Float(value), text)


def parse_finite(text: str) -> float:
    """A fraction that a computer can hold: JSON has no infinity, so it must not come in through 1e999."""
    value = parse_fraction(text)
    if math.isinf(value):
        raise ValueError(f'the number {text} is too large')
    return value


def keep_source(number: Any, text: str) -> Any:
    """Note the source text of an Int or Float."""
    number.raw = text
    return number


# -------- places and errors --------

def line_and_column(text: str, offset: int) -> Tuple[int, int]:
    """Offset -> line and column, both from 1."""
    return text.count('\n', 0, offset) + 1, offset - text.rfind('\n', 0, offset)


def show_line(text: str, offset: int) -> str:
    """The source line of an offset with a caret under the place; a window of it where it is long."""
    start = text.rfind('\n', 0, offset) + 1
    end = text.find('\n', offset)
    start = max(start, offset - SHOWN_CHARACTERS // 2)
    end = min(len(text) if end < 0 else end, start + SHOWN_CHARACTERS)
    line = UNPRINTABLE.sub('?', text[start:end].replace('\t', ' '))
    return f"    {line}\n    {' ' * (offset - start)}^"


def problem_at(text: str, offset: int, message: str) -> BadInput:
    """The error for a place in a text: one problem, with the line shown under the message."""
    if len(message) > 300:      # it quotes something absurdly long; the cure stands at its end
        message = f'{message[:140]} ... {message[-140:]}'
    problem = Problem(f'{message}\n{show_line(text, offset)}', *line_and_column(text, offset))
    return BadInput(str(problem), [problem])


class Document:
    """A file's value, and where each part of it stands in the text."""

    def __init__(self, value: Any, format: str, text: str, positions: Positions) -> None:
        self.value = value
        self.format = format
        self.text = text
        self.positions = positions
        self._counted = (0, 1)     # an offset and its line: the next question is mostly about a place nearby

    def place(self, container: Any, key: Any = None) -> Tuple[int, int]:
        """Line and column of an entry of a dict or list; of the whole if the entry is unknown, (0, 0) if that is."""
        if not self.positions and self.format in ('json', 'json5'):
            self.positions.update(find_json_positions(self.text, self.value))
        offsets = self.positions.get(id(container))
        if not offsets:
            return 0, 0
        return self.count_line(offsets[entry_number(container, key, len(offsets))])

    def count_line(self, offset: int) -> Tuple[int, int]:
        """Like line_and_column, but from the last place on."""
        last, line = self._counted
        if offset >= last:
            line += self.text.count('\n', last, offset)
        else:
            line -= self.text.count('\n', offset, last)
        self._counted = (offset, line)
        return line, offset - self.text.rfind('\n', 0, offset)


def entry_number(container: Any, key: Any, known: int) -> int:
    """Which entry of a container, from 1, a key or index names; 0 if none that has a known place."""
    if isinstance(container, dict):
        number = list(container).index(key) + 1 if key in container else 0
    else:
        number = key + 1 if isinstance(key, int) and key >= 0 else 0
    return number if number < known else 0


def normal_text(text: str) -> str:
    """Text without byte-order mark, with \\n for every line end."""
    if text[:1] == '\ufeff':
        text = text[1:]
    return text.replace('\r\n', '\n').replace('\r', '\n') if '\r' in text else text


class TextReader:
    """What the readers share: the text, where its containers stand, how deep they are nested, and how to complain."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.depth = 0
        self.positions = {}         # type: Positions

    def fail(self, at: int, message: str) -> None:
        """Raise the error for a place."""
        if at >= len(self.text):
            at, message = max(len(self.text) - 1, 0), f'{message} (the file ends here)'
        raise problem_at(self.text, at, message)

    def enter(self, at: int, container: Any) -> List[int]:
        """Begin a container, one level deeper; answers its list of offsets, to which each entry adds its own."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail(at, f'nested more than {MAX_DEPTH} levels deep')
        offsets = self.positions[id(container)] = [at]
        return offsets

    def number(self, at: int, parse: Callable[..., Any], *words: Any) -> Any:
        """parse(*words), with the place in its errors."""
        try:
            return parse(*words)
        except ValueError as error:
            return self.fail(at, str(error))


# -------- yaml: expressions --------
#
# ASCII, because YAML's white space is blank and tab only. In block context a plain text ends before ': ' and ' #';
# inside [ ] and { } also before , [ ] { }.

YAML_FORBIDDEN = Expression('[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]')
DOCUMENT_MARK = Expression(r'^(---|\.\.\.)(?=[ \t\n])', re.MULTILINE)
YAML_DIRECTIVE = Expression(r'%YAML +\d+\.\d+(?: +#.*)?[ \t]*\Z', re.ASCII)
BLANK_LINES = re.compile(r'(?:[ \t]*(?:#[^\n]*)?\n)*')
SPACES = re.compile(r' *')
BLANKS = re.compile(r'[ \t]*')
LINE_END = re.compile(r'(?:[ \t]+#[^\n]*|[ \t]*)\n')

SIMPLE_TEXT = r'(?:"([^"\\\n]*)" *|([A-Za-z0-9_./$(][^\n#:]*(?:(?::(?=\S)|(?<=\S)#)[^\n#:]*)*))\n( *)(?=[^\s#])'
SIMPLE_ENTRY = re.compile(r'([A-Za-z_][\w.-]*): +' + SIMPLE_TEXT, re.ASCII)     # and the next line's indentation
SIMPLE_ITEM = Expression(r'- +' + SIMPLE_TEXT, re.ASCII)
ENTRY_START = Expression(r'- +(?=[A-Za-z_][\w.-]*:[ \n])', re.ASCII)
SURELY_TEXT = frozenset('ABCDEGHIJKLMOPQRSUVWXYZabcdeghijklmopqrsuvwxyz_/$(')    # not n, t, f: null, true, false

INDICATORS = r'''\-?:,\[\]{}#&*!|>'"%@`'''
PLAIN_REST = r'(?:[^\s:#]|:(?=\S)|(?<=\S)#|[ \t]+(?=[^\s#:])|[ \t]+:(?=\S))'
PLAIN_START = Expression(r'[^\s' + INDICATORS + r']|[-?:](?=\S)', re.ASCII)
PLAIN_LINE = Expression(PLAIN_REST + '+', re.ASCII)
PLAIN_KEY = re.compile(r'((?:[^\s' + INDICATORS + r']|[-?:](?=\S))' + PLAIN_REST + r'*)[ \t]*:(?=[ \t\n])', re.ASCII)
FLOW_START = Expression(r'[^\s' + INDICATORS + r']|[-?:](?=[^\s,\[\]{}])', re.ASCII)
FLOW_LINE = Expression(
    r'(?:[^\s:#,\[\]{}]|:(?=[^\s,\[\]{}])|(?<=\S)#|[ \t]+(?=[^\s#:,\[\]{}])|[ \t]+:(?=[^\s,\[\]{}]))+', re.ASCII)
DOUBLE_QUOTED = Expression(r'"([^"\\]*(?:\\.[^"\\]*)*)"', re.DOTALL)
SINGLE_QUOTED = Expression(r"'([^']*(?:''[^']*)*)'")
KEY_COLON = Expression(r'[ \t]*:(?=[ \t\n])')
TEXT_HEADER = Expression(r'([|>])(?:([1-9])([-+]?)|([-+])([1-9]?))?(?:[ \t]+#[^\n]*|[ \t]*)\n')
ANCHOR = Expression(r'[&*][^\s,\[\]{}]+', re.ASCII)
TAG = Expression(r'!(?:<[^>\s]*>|[^\s,\[\]{}]*)', re.ASCII)
UNDENTED = Expression(r'\n( *)(?=[^ \n])(?!\t*\n)')
LINE_FOLD = Expression(r'[ \t]*\n[ \t\n]*')
YAML_ESCAPE = Expression(
    r'[ \t]*\n[ \t\n]*|\\(?:\n[ \t\n]*|x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))', re.DOTALL)
YAML_ESCAPES = {
    '0': '\0', 'a': '\a', 'b': '\b', 't': '\t', '\t': '\t', 'n': '\n', 'v': '\v', 'f': '\f', 'r': '\r', 'e': '\x1b',
    ' ': ' ', '"': '"', '/': '/', '\\': '\\', 'N': '\x85', '_': '\xa0', 'L': '\u2028', 'P': '\u2029',
}
SURROGATE = Expression('[\ud800-\udfff]')

YAML_INTEGER = Expression(r'[-+]?[0-9]+\Z')
YAML_FLOAT = Expression(r'[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z')
YAML_BASED = Expression(r'0(?:x([0-9A-Fa-f]+)|o([0-7]+))\Z')
NUMBER_STARTS = frozenset('-+.0123456789')
YAML_WORDS = {
    '': None, '~': None, 'null': None, 'Null': None, 'NULL': None,
    'true': True, 'True': True, 'TRUE': True, 'false': False, 'False': False, 'FALSE': False,
    '.nan': math.nan, '.NaN': math.nan, '.NAN': math.nan,
    '.inf': math.inf, '.Inf': math.inf, '.INF': math.inf, '+.inf': math.inf, '+.Inf': math.inf, '+.INF': math.inf,
    '-.inf': -math.inf, '-.Inf': -math.inf, '-.INF': -math.inf,
}
YAML_TAGS = {       # type that the value must have; None: text
    '!': None, '!!str': None, '!!int': int, '!!float': float, '!!bool': bool, '!!null': type(None),
    '!!map': dict, '!!set': dict, '!!seq': list, '!!omap': list,
}
TAB_INDENT = 'a tab character cannot be used for indentation; use spaces'
NOT_HERE = "a mapping value is not allowed here: put a text that contains ': ' in quotes, or check the indentation"
COMPOUND_KEY = 'a list or mapping cannot be used as a key'


def parse_plain(text: str) -> Any:
    """An unquoted YAML text by the core schema of YAML 1.2: only true and false are booleans, 1:30 is text."""
    if text in YAML_WORDS:
        return YAML_WORDS[text]
    if text[0] not in NUMBER_STARTS:
        return text
    if YAML_INTEGER.match(text):
        return parse_whole(text)
    if YAML_FLOAT.match(text):
        return parse_fraction(text)
    based = YAML_BASED.match(text)
    if based:
        return parse_whole(text, based.group(1) or based.group(2), 16 if based.group(1) else 8)
    return text


def fold_break(match: 're.Match') -> str:
    """One line break becomes a blank; of several, all but the first stay."""
    breaks = match.group().count('\n')
    return ' ' if breaks == 1 else '\n' * (breaks - 1)


def fold_lines(lines: List[str]) -> str:
    """The text of a '>' block: lines are joined, but for blank ones and those that are indented more."""
    folded = []
    was_indented, blank = None, 0
    for line in lines:
        if not line:
            blank += 1
            continue
        is_indented = line[0] in ' \t'
        if was_indented is None:
            folded.append('\n' * blank)
        elif is_indented or was_indented:
            folded.append('\n' * (blank + 1))
        else:
            folded.append('\n' * blank or ' ')
        folded.append(line)
        was_indented, blank = is_indented, 0
    return ''.join(folded)


class Properties(NamedTuple):
    """What may stand before a value: &anchor and !tag, with their place."""
    at: int = 0
    anchor: str = ''
    tag: str = ''


NO_PROPERTIES = Properties()


# -------- yaml: reader --------

class YamlText(TextReader):
    """The parts of a YAML text that are no collections: layout, properties, scalars and keys.

    `at` and `column` are the next content after what has been read, and its column (-1 at the end of the text). The
    parameter `parent` is the indentation of the collection that a value belongs to. The text ends with a line break,
    so that text[at + 1] exists wherever text[at] is not the last one.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.at = 0
        self.column = 0
        self.anchors = {}           # type: Dict[str, Any]
        self.plain_text = None      # type: Optional[str]  # source of the last scalar, if it was plain
        self.sizes = {}             # type: Dict[int, Tuple[int, int, Any]]  # by id: number, depth, itself
        self.aliased = 0            # values that the aliases so far stand for

    def skip_lines(self, start: int) -> None:
        """From the start of a line, go to the next content."""
        text = self.text
        start = BLANK_LINES.match(text, start).end()
        at = SPACES.match(text, start).end()
        if at >= len(text):
            self.at, self.column = at, -1
            return
        if text[at] == '\t':
            tab, at = at, BLANKS.match(text, at).end()
            if text[at] not in '[{]}':
                self.fail(tab, TAB_INDENT)
        self.at, self.column = at, at - start

    def end_line(self, at: int, start: int) -> None:
        """After a value that began at `start`, nothing but a comment may stand on the line."""
        match = LINE_END.match(self.text, at)
        if not match:
            self.fail_after(BLANKS.match(self.text, at).end(), start)
        self.skip_lines(match.end())

    def fail_after(self, at: int, start: int) -> None:
        """Something follows a complete value: say what was probably meant."""
        opening, found = self.text[start], self.text[at]
        if found == ':':
            self.fail(at, COMPOUND_KEY if opening in '[{' else NOT_HERE)
        if opening in '[{*':
            self.fail(start, f'text that starts with {opening} must be in quotes')
        if opening == "'":
            self.fail(at, "text goes on after the closing quote: write '' for a quote inside single quotes")
        if opening == '"':
            self.fail(at, 'text goes on after the closing quote: write \\" for a quote inside double quotes')
        self.fail(at, f'unexpected {found!r} after a complete value')

    def is_indicator(self, at: int, character: str) -> bool:
        """Does '- ', '? ' or ': ' stand here?"""
        return self.text[at] == character and self.text[at + 1] in ' \t\n'

    # -------- anchors, tags, aliases --------

    def read_properties(self, at: int) -> Tuple[Properties, int]:
        """Anchor and tag before a value, in any order; and the offset of what follows them."""
        text, start, anchor, tag = self.text, at, '', ''
        while text[at] in '&!':
            match = (ANCHOR if text[at] == '&' else TAG).match(text, at)
            if not match or (anchor if text[at] == '&' else tag):
                self.fail(at, 'only one anchor and one tag may stand here; put text that starts with & or ! in quotes')
            if text[at] == '&':
                anchor = match.group()[1:]
            else:
                tag = match.group()
            at = BLANKS.match(text, match.end()).end()
            if at == match.end() and text[at] not in '\n,]}':
                self.fail(at, 'expected a blank after the anchor or tag; put text that starts with & or ! in quotes')
        return (Properties(start, anchor, tag) if at > start else NO_PROPERTIES), at

    def apply_properties(self, properties: Properties, value: Any) -> Any:
        """Give a value its tag's type and its anchor."""
        if properties.tag:
            value = self.apply_tag(properties.at, properties.tag, value)
        if properties.anchor:
            self.anchors[properties.anchor] = value
        return value

    def apply_tag(self, at: int, tag: str, value: Any) -> Any:
        """The value as a tag wants it. Tags beyond YAML's core would need code that knows them: refused."""
        if tag.startswith('!<tag:yaml.org,2002:'):
            tag = '!!' + tag[20:-1]
        if tag not in YAML_TAGS:
            self.fail(at, f'the tag {tag} is not supported; put text that starts with ! in quotes')
        wanted = YAML_TAGS[tag]
        if isinstance(value, (dict, list)):
            if tag == '!' or isinstance(value, wanted or ()):
                return value
            self.fail(at, f'the value does not fit the tag {tag}')
        source = value if self.plain_text is None else self.plain_text
        if wanted is None:
            return source
        typed = self.number(at, parse_plain, source) if isinstance(source, str) else source
        if wanted is float and type(typed) in (int, Int):
            typed = float(typed)
        if not isinstance(typed, wanted) or wanted is int and isinstance(typed, bool):
            self.fail(at, f'the value does not fit the tag {tag}')
        return typed

    def find_alias(self, at: int, word: str) -> Any:
        """What '*name' stands for. Aliases share their value, so what they would expand to is counted here."""
        if word[1:] not in self.anchors:
            self.fail(at, f'no anchor &{printable(word[1:])} stands above; put text that starts with * in quotes')
        value = self.anchors[word[1:]]
        if isinstance(value, (dict, list)):
            size, depth = self.measure(value)[:2]
            self.aliased += size
            if self.aliased > MAX_ALIASED_VALUES:
                self.fail(at, f'the aliases stand for more than {MAX_ALIASED_VALUES} values')
            if self.depth + depth > MAX_DEPTH:
                self.fail(at, f'with this alias, values are nested more than {MAX_DEPTH} levels deep')
        return value

    # Sizes are counted once for each container, so that laughing a billion times takes no longer than writing it down.
    def measure(self, value: Any) -> Tuple[int, int, Any]:
        """Number of values in a value, and its depth; with the value, so that it lives as long as its id is known."""
        if not isinstance(value, (dict, list)):
            return 1, 0, value
        if id(value) not in self.sizes:
            inner = [self.measure(child) for child in (value.values() if isinstance(value, dict) else value)]
            size, depth = sum(measure[0] for measure in inner), max([measure[1] for measure in inner] or [0])
            self.sizes[id(value)] = (size + 1, depth + 1, value)
        return self.sizes[id(value)]

    # -------- scalars --------

    def read_plain(self, at: int, parent: int) -> Any:
        """An unquoted text, perhaps on several lines."""
        text = self.text
        if not PLAIN_START.match(text, at):
            self.fail(at, f'text that starts with {text[at]} must be in quotes')
        match = PLAIN_LINE.match(text, at)
        parts = [match.group()]
        while True:
            end = match.end()
            after = BLANKS.match(text, end).end()
            if text[after] == ':':
                self.fail(after, NOT_HERE)
            # A comment ends a plain text even if the next line looks like more of it.
            following = -1 if text[after] == '#' else self.find_continuation(after, parent)
            if following < 0:
                break
            match = PLAIN_LINE.match(text, following)
            if not match:
                self.fail(following, NOT_HERE)
            parts.append('\n' * (text.count('\n', after, following) - 1) or ' ')
            parts.append(match.group())
        self.skip_lines(text.index('\n', end) + 1)
        self.plain_text = ''.join(parts)
        return self.number(at, parse_plain, self.plain_text)

    def find_continuation(self, line_end: int, parent: int) -> int:
        """Where a plain text goes on after a line's end, or -1."""
        text = self.text
        at = line_end
        while at < len(text) and text[at] == '\n':
            start = at + 1
            indent = SPACES.match(text, start).end() - start
            at = BLANKS.match(text, start).end()
        return -1 if at >= len(text) or indent <= parent or text[at] == '#' else at

    def read_text_block(self, at: int, parent: int) -> str:
        """A literal | or folded > text."""
        match = TEXT_HEADER.match(self.text, at)
        if not match:
            self.fail(at, 'only an indentation digit, - or + may follow | or >; the text begins on the next line; '
                          'put text that starts with | or > in quotes')
        digit, chomp = match.group(2) or match.group(5), match.group(3) or match.group(4)
        if digit:
            indent = max(parent, 0) + int(digit)
        else:
            indent = self.find_text_indent(match.end(), parent)
        lines, end = self.read_text_lines(match.end(), indent, parent)
        count = len(lines)
        while lines and not lines[-1]:
            lines.pop()
        value = '\n'.join(lines) if match.group(1) == '|' else fold_lines(lines)
        if chomp != '-' and lines:
            value += '\n'
        if chomp == '+':
            value += '\n' * (count - len(lines))
        self.skip_lines(end)
        self.plain_text = None
        return value

    def find_text_indent(self, start: int, parent: int) -> int:
        """Indentation of a text block: that of its first line which is not blank."""
        text, widest = self.text, 0
        while start < len(text):
            at = SPACES.match(text, start).end()
            if text[at] != '\n':
                if at - start <= parent:
                    break
                if widest > at - start:
                    self.fail(start, 'a blank line above has more spaces than this first line of the text')
                return at - start
            widest, start = max(widest, at - start), at + 1
        return max(widest, parent + 1)

    def read_text_lines(self, start: int, indent: int, parent: int) -> Tuple[List[str], int]:
        """The lines of a text block without their indentation, and the offset of the line after it."""
        text, lines = self.text, []
        match_line = re.compile(' {%d}([^\n]*)\n| *\n' % indent).match
        while start < len(text):
            match = match_line(text, start)
            if not match:
                break
            lines.append(match.group(1) or '')
            start = match.end()
        at = SPACES.match(text, start).end()
        if at < len(text):
            if text[at] == '\t':
                self.fail(at, TAB_INDENT)
            if parent < at - start < indent and text[at] != '#' and lines:
                self.fail(start, 'this line is indented less than the text that it belongs to')
        return lines, start

    def read_quoted(self, at: int, parent: int) -> Tuple[str, int]:
        """Text in quotes, perhaps on several lines, and the offset after it."""
        match = (DOUBLE_QUOTED if self.text[at] == '"' else SINGLE_QUOTED).match(self.text, at)
        if not match:
            self.fail(at, 'text in quotes is not closed')
        for line in UNDENTED.finditer(match.group()):
            if len(line.group(1)) <= parent:
                self.fail(at + line.end(), 'each line of a text in quotes must be indented more than its key; '
                                           'is a quote missing?')
        return self.unquote(at, match.group(1)), match.end()

    def unquote(self, at: int, text: str) -> str:
        """The meaning of what stands between the quotes at `at`."""
        self.plain_text = None
        if self.text[at] == "'":
            text = text.replace("''", "'")
            return LINE_FOLD.sub(fold_break, text) if '\n' in text else text
        if '\\' not in text and '\n' not in text:
            return text
        # Escapes and folded lines in one pass: what an escape makes (a line break, say) must not be folded again.
        text = YAML_ESCAPE.sub(lambda match: self.unescape(at + 1, match), text)
        if SURROGATE.search(text):
            try:
                text = text.encode('utf-16', 'surrogatepass').decode('utf-16')
            except UnicodeDecodeError:
                self.fail(at, 'half of a surrogate pair: write the character itself')
        return text

    def unescape(self, start: int, match: 're.Match') -> str:
        """One escape or line break inside double quotes."""
        found = match.group()
        if found[0] != '\\':
            return fold_break(match)
        if found[1] == '\n':
            return '\n' * (found.count('\n') - 1)
        code = match.group(1) or match.group(2) or match.group(3)
        if code and int(code, 16) <= sys.maxunicode:
            return chr(int(code, 16))
        if code or match.group(4) not in YAML_ESCAPES:
            self.fail(start + match.start(), f'unknown escape {found} in double quotes: '
                                             'write \\\\ for a backslash, or use single quotes')
        return YAML_ESCAPES[match.group(4)]

    # -------- keys --------

    def read_key(self, at: int) -> Optional[Tuple[Any, int]]:
        """A key on one line and the offset after its colon; None where the line holds no key."""
        text = self.text
        properties, start = self.read_properties(at)
        if text[start] == '\n':
            return None
        read = {'"': self.read_quoted_key, "'": self.read_quoted_key, '*': self.read_alias_key}.get(text[start])
        self.plain_text = None
        if read:
            found = read(start, properties)
        elif self.is_indicator(start, ':'):
            found = (None, start + 1)
            self.plain_text = ''
        else:
            match = PLAIN_KEY.match(text, start)
            self.plain_text = match.group(1) if match else None
            found = match and (self.number(start, parse_plain, match.group(1)), match.end())
        if not found:
            return None
        if found[1] - start > 1024:
            self.fail(start, 'a key of more than 1024 characters')
        return self.apply_properties(properties, found[0]), found[1]

    def read_quoted_key(self, at: int, _: Properties) -> Optional[Tuple[str, int]]:
        """A key in quotes; one that spans lines is no key."""
        match = (DOUBLE_QUOTED if self.text[at] == '"' else SINGLE_QUOTED).match(self.text, at)
        colon = match and '\n' not in match.group() and KEY_COLON.match(self.text, match.end())
        return (self.unquote(at, match.group(1)), colon.end()) if colon else None

    def read_alias_key(self, at: int, properties: Properties) -> Optional[Tuple[Any, int]]:
        """'*name :' as a key."""
        match = ANCHOR.match(self.text, at)
        colon = match and properties is NO_PROPERTIES and KEY_COLON.match(self.text, match.end())
        return (self.check_key(at, self.find_alias(at, match.group())), colon.end()) if colon else None

    def check_key(self, at: int, key: Any) -> Any:
        """Keys are scalars."""
        if isinstance(key, (dict, list)):
            self.fail(at, COMPOUND_KEY)
        return key

    def fail_duplicate(self, at: int, key: Any) -> None:
        """A key stands twice."""
        self.fail(at, f'duplicate key {key!r}: remove one, or rename it')


class YamlReader(YamlText):
    """Reads one YAML document by recursive descent."""

    def read(self, start: int, is_inline: bool) -> Any:
        """The document's value. Inline: it may begin on the line of its '---'."""
        if is_inline:
            value = self.read_value(start, -1)
        else:
            self.skip_lines(start)
            value = None if self.column < 0 else self.read_block(self.at, self.column, -1)
        if self.column >= 0:
            self.fail(self.at, 'this does not belong to the value before it: check the indentation')
        return value

    # -------- block collections --------

    def read_block(self, at: int, column: int, parent: int, outer: Properties = NO_PROPERTIES) -> Any:
        """A value that begins a line."""
        if self.is_indicator(at, '-'):
            return self.read_sequence(at, column)
        if self.is_indicator(at, '?'):
            return self.read_mapping(at, column)
        key = self.read_key(at)
        if key:
            return self.read_mapping(at, column, key)
        return self.read_value(at, parent, outer=outer)

    def read_sequence(self, at: int, column: int) -> List[Any]:
        """Items '- value' at one column."""
        items = []      # type: List[Any]
        offsets = self.enter(at, items)
        while True:
            offsets.append(at)
            items.append(self.read_item(at, column))
            at = self.at
            if self.column != column or not self.is_indicator(at, '-'):
                break
        if self.column > column:
            self.fail(at, 'wrong indentation inside a list')
        self.depth -= 1
        return items

    def read_item(self, at: int, column: int) -> Any:
        """One item of a block sequence."""
        simple = SIMPLE_ITEM.match(self.text, at)
        if simple:      # a next line that is indented more would belong to the text: then the slow way decides
            quoted, plain, indent = simple.groups()
            if len(indent) <= column:
                self.at, self.column = simple.end(), len(indent)
                return quoted if plain is None else self.number(at + 2, parse_plain, plain.rstrip(' \t'))
        else:
            entry = ENTRY_START.match(self.text, at)
            if entry:
                return self.read_mapping(entry.end(), column + entry.end() - at)
        return self.read_value(at + 1, column, compact=at - column)

    def read_mapping(self, at: int, column: int, key: Optional[Tuple[Any, int]] = None) -> Dict[Any, Any]:
        """Entries 'key: value' at one column. `key` is the first one where it has been read already."""
        text, match_simple = self.text, SIMPLE_ENTRY.match      # locals: this loop reads most lines of most files
        mapping = {}        # type: Dict[Any, Any]
        offsets = self.enter(at, mapping)
        merge_at = -1
        while True:
            simple = match_simple(text, at)
            if simple and len(simple.group(4)) <= column:
                self.read_simple_entry(mapping, simple)
            else:
                if text.startswith('<<', at):
                    merge_at = at
                self.read_entry(mapping, at, column, key)
            offsets.append(at)
            at, key = self.at, None
            if self.column != column:
                break
        if self.column > column:
            self.fail(at, 'wrong indentation: this line is indented more than the key that it should line up with')
        self.depth -= 1
        if merge_at >= 0 and '<<' in mapping:
            self.merge(mapping, merge_at, offsets)
        return mapping

    def read_simple_entry(self, mapping: Dict[Any, Any], simple: 're.Match') -> None:
        """An entry that stands on one line, already matched together with the next line's indentation."""
        name, quoted, plain, indent = simple.groups()
        key = YAML_WORDS.get(name, name)
        if key in mapping:
            self.fail_duplicate(simple.start(), key)
        if plain is None:
            mapping[key] = quoted
        elif plain[0] in SURELY_TEXT:
            mapping[key] = plain.rstrip(' \t')
        else:
            mapping[key] = self.number(simple.start(3), parse_plain, plain.rstrip(' \t'))
        self.at, self.column = simple.end(), len(indent)

    def read_entry(self, mapping: Dict[Any, Any], at: int, column: int, known: Optional[Tuple[Any, int]]) -> None:
        """Any other entry: '? key' lines, values on several lines, collections."""
        if known is None and self.is_indicator(at, '?'):
            key = self.check_key(at, self.read_value(at + 1, column, compact=at - column))
            if key in mapping:
                self.fail_duplicate(at, key)
            mapping[key] = None
            if self.column == column and self.is_indicator(self.at, ':'):
                mapping[key] = self.read_value(self.at + 1, column, compact=self.at - column)
            return
        key, colon = known or self.read_key(at) or self.fail_no_key(at)
        if key in mapping:
            self.fail_duplicate(at, key)
        mapping[key] = None     # so that '<<' keeps its number among the entries, by which its offset is found
        mapping[key] = self.read_value(colon, column, after_key=True)

    def merge(self, mapping: Dict[Any, Any], at: int, offsets: List[int]) -> None:
        """'<<: *other' takes over the entries that the mapping does not have itself."""
        number = list(mapping).index('<<')
        del offsets[number + 1]
        value = mapping.pop('<<')
        for other in value if isinstance(value, list) else [value]:
            if not isinstance(other, dict):
                self.fail(at, "'<<' needs a mapping, or a list of mappings")
            for key in other:
                mapping.setdefault(key, other[key])

    def fail_no_key(self, at: int) -> None:
        """A line in a mapping that is no entry."""
        line = self.text[at:self.text.find('\n', at)]
        if self.is_indicator(at, '-'):
            self.fail(at, "a list item ('- ') cannot follow a mapping entry at the same indentation")
        if re.match(r'[\w.-]+:\S', line):
            self.fail(at, "expected 'key: value': a blank is missing after the colon")
        self.fail(at, f"expected 'key: value', found {line[:40]!r}")

    # -------- any value --------

    def read_value(self, at: int, parent: int, compact: int = -1, after_key: bool = False,
                   outer: Properties = NO_PROPERTIES) -> Any:
        """The value after an indicator that ends at `at`.

        compact: offset of the line's start where a collection may begin on this line ('- - x', '- a: b'), else -1.
        after_key: a sequence may stand at the parent's own column. outer: properties that stand alone on a line above.
        """
        text = self.text
        first = BLANKS.match(text, at).end()
        if text[first] not in '&!':
            return self.read_bare(at, first, parent, compact, after_key, NO_PROPERTIES)
        properties, start = self.read_properties(first)
        if outer.anchor and properties.anchor or outer.tag and properties.tag:
            self.fail(first, 'two anchors or two tags on one value')
        if text[start] == '*':
            self.fail(start, 'an alias cannot have an anchor or tag')
        return self.apply_properties(properties, self.read_bare(start, start, parent, -1, after_key, properties))

    def read_bare(self, at: int, first: int, parent: int, compact: int, after_key: bool, properties: Properties) -> Any:
        """A value whose properties, if any, have been read. Blanks stand between `at` and `first`."""
        text = self.text
        character = text[first]
        if character == '\n' or character == '#' and text[first - 1] in ' \t\n':
            self.end_line(first if character == '\n' else first - 1, first)
            return self.read_below(parent, after_key, properties)
        if compact >= 0:
            is_collection, value = self.read_compact(at, first, compact)
            if is_collection:
                return value
        elif self.is_indicator(first, '-'):
            self.fail(first, "a list item ('- ') must start on a line of its own")
        if character in '|>':
            return self.read_text_block(first, parent)
        if character in '"\'[{*':
            value, end = self.read_flow(first, parent)
            self.end_line(end, first)
            return value
        return self.read_plain(first, parent)

    def read_compact(self, at: int, first: int, line: int) -> Tuple[bool, Any]:
        """A collection that begins on the line of its parent's '- ', '? ' or ': '."""
        is_sequence, is_explicit = self.is_indicator(first, '-'), self.is_indicator(first, '?')
        key = None if is_sequence or is_explicit else self.read_key(first)
        if not (is_sequence or is_explicit or key):
            return False, None
        if '\t' in self.text[at:first]:
            self.fail(at, TAB_INDENT)
        column = first - line
        return True, self.read_sequence(first, column) if is_sequence else self.read_mapping(first, column, key)

    def read_below(self, parent: int, after_key: bool, properties: Properties) -> Any:
        """A value that starts on a following line, or none."""
        at, column = self.at, self.column
        if column > parent:
            return self.read_block(at, column, parent, properties)
        if after_key and column == parent and self.is_indicator(at, '-'):
            return self.read_sequence(at, column)
        self.plain_text = ''
        return None

    # -------- flow collections --------

    def skip_flow_space(self, at: int, parent: int) -> int:
        """White space, comments and line breaks inside [ ] and { }. Lines must be indented more than the parent."""
        text = self.text
        while True:
            at = BLANKS.match(text, at).end()
            if text[at] == '#' and text[at - 1] in ' \t\n':
                at = text.index('\n', at)
            if text[at] != '\n':
                return at
            start = at + 1
            at = BLANKS.match(text, start).end()
            if at >= len(text):
                self.fail(at, 'a [list] or {mapping} is not closed')
            indent = SPACES.match(text, start).end() - start
            # A closing bracket at the key's own column breaks the rule too, but everybody writes it so.
            if indent <= parent and text[at] not in '\n#]}':
                self.fail(at, 'a line inside [ ] or { } must be indented more than its key; is a bracket missing?')

    def read_flow(self, at: int, parent: int) -> Tuple[Any, int]:
        """A value inside brackets, or one that begins with a quote, bracket or '*'; and the offset after it."""
        text = self.text
        properties, start = self.read_properties(at) if text[at] in '&!' else (NO_PROPERTIES, at)
        start = self.skip_flow_space(start, parent)
        character = text[start]
        if character in '"\'':
            value, end = self.read_quoted(start, parent)
        elif character in '[{':
            value, end = (self.read_flow_list if character == '[' else self.read_flow_mapping)(start, parent)
        elif character == '*':
            match = ANCHOR.match(text, start)
            if not match or properties.at:
                self.fail(start, 'an alias has a name, but no anchor or tag; put text that starts with * in quotes')
            value, end = self.find_alias(start, match.group()), match.end()
        elif properties.at and (character in ',]}' or character == ':' and text[start + 1] in ' \t\n,]}'):
            self.plain_text = ''
            value, end = None, start
        else:
            value, end = self.read_flow_plain(start, parent)
        return self.apply_properties(properties, value), end

    def read_flow_plain(self, at: int, parent: int) -> Tuple[Any, int]:
        """An unquoted text inside brackets."""
        text = self.text
        if not FLOW_START.match(text, at):
            self.fail(at, f'unexpected {text[at]!r} inside [ ] or {{ }}; put text that starts with it in quotes')
        match = FLOW_LINE.match(text, at)
        parts = [match.group()]
        while True:
            end = match.end()
            after = BLANKS.match(text, end).end()
            if text[after] in '{[':
                self.fail(after, f"'{text[after]}' inside a [list] must be in quotes, "
                                 f"for example [\"{text[at:after + 1]}...\"]")
            if text[after] != '\n':
                break
            following = self.skip_flow_space(after, parent)
            is_other = text[following] in ',[]{}' or '#' in text[after:following]
            match = None if is_other else FLOW_LINE.match(text, following)
            if not match:
                break
            parts.append('\n' * (text.count('\n', after, following) - 1) or ' ')
            parts.append(match.group())
        self.plain_text = ''.join(parts)
        return self.number(at, parse_plain, self.plain_text), end

    def read_flow_list(self, at: int, parent: int) -> Tuple[List[Any], int]:
        """[a, b: c, ...]"""
        text, items = self.text, []     # type: str, List[Any]
        offsets = self.enter(at, items)
        at = self.skip_flow_space(at + 1, parent)
        while text[at] != ']':
            offsets.append(at)
            start = at
            key, value, at, is_pair = self.read_flow_entry(at, parent, True)
            if is_pair:
                pair = {self.check_key(start, key): value}
                self.positions[id(pair)] = [start, start]
                items.append(pair)
            else:
                items.append(key)
            if text[at] == ',':
                at = self.skip_flow_space(at + 1, parent)
            elif text[at] != ']':
                self.fail(at, f"expected ',' or ']' in a list, found {text[at]!r}")
        self.depth -= 1
        return items, at + 1

    def read_flow_mapping(self, at: int, parent: int) -> Tuple[Dict[Any, Any], int]:
        """{a: b, c, ...}"""
        text, mapping = self.text, {}   # type: str, Dict[Any, Any]
        offsets = self.enter(at, mapping)
        merge_at = -1
        at = self.skip_flow_space(at + 1, parent)
        while text[at] != '}':
            start = at
            key, value, at, is_pair = self.read_flow_entry(at, parent, False)
            if self.check_key(start, key) in mapping:
                self.fail_duplicate(start, key)
            if not is_pair and re.match(r'[\w.-]+:(?!//)', text[start:start + 200]):
                self.fail(start, f'{key!r} would be a key without a value: '
                                 'a blank is missing after the colon, or put it in quotes')
            if text.startswith('<<', start):
                merge_at = start
            offsets.append(start)
            mapping[key] = value
            if text[at] == ',':
                at = self.skip_flow_space(at + 1, parent)
            elif text[at] != '}':
                self.fail(at, f"expected ',' or '}}' in a mapping, found {text[at]!r}")
        self.depth -= 1
        if merge_at >= 0:
            self.merge(mapping, merge_at, offsets)
        return mapping, at + 1

    def read_flow_entry(self, at: int, parent: int, in_list: bool) -> Tuple[Any, Any, int, bool]:
        """One entry inside brackets: key (or lone value), value, the offset after it, and whether it is a pair."""
        text, start = self.text, at
        is_explicit = self.is_indicator(at, '?')
        if is_explicit:
            at = self.skip_flow_space(at + 1, parent)
        is_quoted = text[at] in '"\'[{'     # after these a colon needs no blank, as in JSON
        if text[at] == ':' and text[at + 1] in ' \t\n,]}' or is_explicit and text[at] in ',]}':
            key, end = None, at
        else:
            key, end = self.read_flow(at, parent)
        at = self.skip_flow_space(end, parent)
        if text[at] != ':' or not (is_quoted or text[at + 1] in ' \t\n,[]{}'):
            return key, None, at, is_explicit
        if in_list and not is_explicit and '\n' in text[start:at]:
            self.fail(start, 'a key inside [ ] must be on one line')
        at = self.skip_flow_space(at + 1, parent)
        if text[at] in ',]}':
            return key, None, at, True
        value, end = self.read_flow(at, parent)
        return key, value, self.skip_flow_space(end, parent), True


# -------- yaml: documents --------

class YamlPart(NamedTuple):
    """Where one document stands in a YAML text."""
    start: int
    end: int
    is_inline: bool     # its value may begin on the line of its '---'


def prepare_yaml(text: str) -> str:
    """YAML text with plain line ends and one at its end; characters that YAML forbids are an error."""
    text = normal_text(text)
    found = YAML_FORBIDDEN.search(text)
    if found:
        raise problem_at(text, found.start(), f'the character {found.group()!r} is not allowed')
    return text if text.endswith('\n') else text + '\n'


def split_yaml(text: str) -> List[YamlPart]:
    """The documents of a prepared YAML text. '---' and '...' end any value that they meet, so they are found first."""
    marks = []      # type: List[Tuple[int, str]]  # found by str first: the expression would cost 10 % of the reading
    if text.startswith(('---', '...')) or '\n---' in text or '\n...' in text:
        marks = [(match.start(), match.group()) for match in DOCUMENT_MARK.finditer(text)]
    parts = []      # type: List[YamlPart]
    position, is_open = 0, False
    for at, mark in marks + [(len(text), '')]:
        if is_open:
            parts.append(YamlPart(position, at, True))
        else:
            position = skip_directives(text, position, at, mark)
            if BLANK_LINES.match(text, position, at).end() < at:
                parts.append(YamlPart(position, at, False))
        is_open, position = mark == '---', at + 3
        if mark == '...':
            match = LINE_END.match(text, position)
            if not match:
                raise problem_at(text, position, "unexpected text after '...'")
            position = match.end()
    return parts


def skip_directives(text: str, start: int, end: int, mark: str) -> int:
    """Go over '%' lines before a document. %YAML is checked and means nothing more; %TAG would change tags: refused."""
    versions = 0
    while True:
        at = BLANK_LINES.match(text, start, end).end()
        if at >= end or text[at] != '%':
            break
        start = text.index('\n', at) + 1
        line = text[at:start - 1]
        if YAML_DIRECTIVE.match(line):
            versions += 1
        elif line.startswith(('%YAML', '%TAG')):
            raise problem_at(text, at, 'this directive is not supported; put text that starts with % in quotes')
        if versions > 1:
            raise problem_at(text, at, 'a second %YAML directive')
    if versions and (at < end or mark != '---'):
        raise problem_at(text, min(at, len(text) - 1), "'---' is missing after the directive")
    return start


def load_yaml(text: str) -> Tuple[Any, str, Positions]:
    """The value of a YAML text with one document, the text as read, and the positions."""
    text = prepare_yaml(text)
    parts = split_yaml(text)
    if len(parts) > 1:
        raise problem_at(text, parts[1].start, f'the file holds {len(parts)} YAML documents, one is expected: split it')
    if not parts:
        return None, text, {}
    reader = YamlReader(text[:parts[0].end])
    return reader.read(parts[0].start, parts[0].is_inline), text, reader.positions


# -------- json and json5 --------

JSON5_SPACE = Expression(
    r'(?:[ \t\n\r\v\f\xa0\ufeff\u2028\u2029\u1680\u2000-\u200a\u202f\u205f\u3000]+|//[^\n\r\u2028\u2029]*|/\*.*?\*/)*', re.DOTALL)
JSON5_NAME = Expression(r'(?:[^\W\d]|[$_]|\\u[0-9A-Fa-f]{4})(?:\w|[$\u200c\u200d]|\\u[0-9A-Fa-f]{4})*')
JSON5_DOUBLE = Expression(r'"([^"\\\n\r]*(?:\\(?:\r\n|.)[^"\\\n\r]*)*)"', re.DOTALL)
JSON5_SINGLE = Expression(r"'([^'\\\n\r]*(?:\\(?:\r\n|.)[^'\\\n\r]*)*)'", re.DOTALL)
JSON5_NUMBER = Expression(
    r'[-+]?(?:0[xX]([0-9A-Fa-f]+)|((?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?)'
    r'|(Infinity|NaN))(?![\w$.])')
JSON5_ESCAPE = Expression(r'\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|(\r\n|[^xu0-9]|0(?![0-9]))|(.))', re.DOTALL)
JSON5_ESCAPES = {'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t', 'v': '\v', '0': '\0',
                 '\r\n': '', '\n': '', '\r': '', '\u2028': '', '\u2029': ''}   # a backslash at a line's end joins lines
JSON_WORDS = {'null': None, 'true': True, 'false': False}


class Json5Reader(TextReader):
    """Reads JSON5 with places. JSON is a part of it, so this reader also finds the places and errors of JSON."""

    def read(self) -> Any:
        """The value of the whole text."""
        value, at = self.read_value(self.skip_space(0))
        at = self.skip_space(at)
        if at < len(self.text):
            self.fail(at, 'unexpected text after the value')
        return value

    def skip_space(self, at: int) -> int:
        """White space and comments."""
        at = JSON5_SPACE.match(self.text, at).end()
        if self.text.startswith('/*', at):
            self.fail(at, 'the comment is not closed')
        return at

    def read_value(self, at: int) -> Tuple[Any, int]:
        """A value and the offset after it."""
        character = self.text[at:at + 1]
        if character == '{':
            return self.read_object(at)
        if character == '[':
            return self.read_array(at)
        if character and character in '"\'':
            return self.read_string(at)
        match = JSON5_NUMBER.match(self.text, at)
        if match:
            return self.read_number(match), match.end()
        match = JSON5_NAME.match(self.text, at)
        if match and match.group() in JSON_WORDS:
            return JSON_WORDS[match.group()], match.end()
        if match:
            self.fail(at, f'expected a value, found {match.group()[:40]!r}: text must be in quotes')
        return self.fail(at, f'expected a value, found {character!r}')

    def read_number(self, match: 're.Match') -> Union[int, float]:
        """A number from its match."""
        text, (digits, decimal_text, word) = match.group(), match.groups()
        if word:
            return float(text)
        if digits:
            return self.number(match.start(), parse_whole, text, digits, 16)
        return self.number(match.start(), parse_whole if decimal_text.isdigit() else parse_finite, text)

    def read_string(self, at: int) -> Tuple[str, int]:
        """Text in single or double quotes."""
        match = (JSON5_DOUBLE if self.text[at] == '"' else JSON5_SINGLE).match(self.text, at)
        if not match:
            self.fail(at, 'text in quotes is not closed on its line')
        value = match.group(1)
        if '\\' in value:
            value = self.unescape(at + 1, value)
        if SURROGATE.search(value):
            self.fail(at, 'half of a surrogate pair: write the character itself')
        return value, match.end()

    def unescape(self, start: int, value: str) -> str:
        """Text with its escapes replaced; two halves of a surrogate pair become one character."""
        value = JSON5_ESCAPE.sub(lambda match: self.replace_escape(start, match), value)
        if SURROGATE.search(value):
            value = value.encode('utf-16', 'surrogatepass').decode('utf-16', 'surrogatepass')
        return value

    def replace_escape(self, start: int, match: 're.Match') -> str:
        """What one escape stands for."""
        byte, code, character, unknown = match.groups()
        if unknown:
            self.fail(start + match.start(), f'unknown escape \\{unknown}: write \\\\ for a backslash')
        return JSON5_ESCAPES.get(character, character) if character else chr(int(byte or code, 16))

    def read_object(self, at: int) -> Tuple[Dict[str, Any], int]:
        """{key: value, ...}"""
        result = {}     # type: Dict[str, Any]
        offsets, at = self.enter(at, result), self.skip_space(at + 1)
        while self.text[at:at + 1] != '}':
            start = at
            key, at = self.read_name(at)
            if key in result:
                self.fail(start, f'duplicate key {key!r}: remove one, or rename it')
            offsets.append(start)
            at = self.skip_space(at)
            if self.text[at:at + 1] != ':':
                self.fail(at, f"expected ':' after the key {key!r}")
            result[key], at = self.read_value(self.skip_space(at + 1))
            at = self.skip_comma(at, '}')
        self.depth -= 1
        return result, at + 1

    def read_array(self, at: int) -> Tuple[List[Any], int]:
        """[value, ...]"""
        result = []     # type: List[Any]
        offsets, at = self.enter(at, result), self.skip_space(at + 1)
        while self.text[at:at + 1] != ']':
            offsets.append(at)
            value, at = self.read_value(at)
            result.append(value)
            at = self.skip_comma(at, ']')
        self.depth -= 1
        return result, at + 1

    def skip_comma(self, at: int, closing: str) -> int:
        """After an entry: a comma, or the closing bracket, which stays."""
        at = self.skip_space(at)
        if self.text[at:at + 1] == ',':
            return self.skip_space(at + 1)
        if self.text[at:at + 1] != closing:
            self.fail(at, f"expected ',' or '{closing}'")
        return at

    def read_name(self, at: int) -> Tuple[str, int]:
        """A key: text in quotes, or a name."""
        if self.text[at:at + 1] in ('"', "'"):
            return self.read_string(at)
        match = JSON5_NAME.match(self.text, at)
        if not match:
            self.fail(at, "expected a key or '}'")
        name = match.group()
        if '\\' in name:
            name = self.unescape(at, name)
            whole = JSON5_NAME.match(name)
            if not whole or whole.end() < len(name):     # an escape that no name may hold
                self.fail(at, 'this key must be in quotes')
        return name, match.end()


def nested_too_deeply(value: Any) -> bool:
    """Are there containers more than MAX_DEPTH levels deep?"""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        children = (item.values() if isinstance(item, dict) else item for item in level)
        level = [child for values in children for child in values if isinstance(child, (dict, list))]
    return bool(level)


def read_strict_json(text: str) -> Any:
    """JSON by the standard library, with our numbers and limits. ValueError without a useful place."""
    try:
        value = json.loads(text, object_pairs_hook=unique_pairs, parse_constant=refuse_constant,
                           parse_int=parse_whole, parse_float=parse_finite)
    except RecursionError:
        raise ValueError('nested too deeply') from None
    if nested_too_deeply(value):
        raise ValueError('nested too deeply')
    # The library lets half of a surrogate pair through, which no file, database or terminal takes later.
    if '\\u' in text and SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        raise ValueError('half of a surrogate pair')
    return value


def load_json(text: str) -> Tuple[Any, str, Positions]:
    """The value of a JSON text. Places are found later, if they are asked for."""
    text = normal_text(text)
    try:
        return read_strict_json(text), text, {}
    except ValueError as error:
        reason, at = getattr(error, 'msg', str(error)), getattr(error, 'pos', 0)
    Json5Reader(text).read()        # raises for almost all, with the place and the cure
    raise problem_at(text, min(at, len(text) - 1), f'this is JSON5, not JSON ({reason}): name the file .json5')


def load_json5(text: str) -> Tuple[Any, str, Positions]:
    """The value of a JSON5 text. Most are plain JSON too, which the standard library reads much faster."""
    text = normal_text(text)
    try:
        return read_strict_json(text), text, {}
    except ValueError:
        reader = Json5Reader(text)
        return reader.read(), text, reader.positions


def find_json_positions(text: str, value: Any) -> Positions:
    """The positions of a value that the standard library has read: the text is read again, both walked side by side."""
    reader = Json5Reader(text)
    pairs = [(value, reader.read())]
    positions = {}      # type: Positions
    while pairs:
        mine, other = pairs.pop()
        if isinstance(mine, dict):
            pairs.extend(zip(mine.values(), other.values()))
        elif isinstance(mine, list):
            pairs.extend(zip(mine, other))
        else:
            continue
        positions[id(mine)] = reader.positions[id(other)]
    return positions


# -------- toml --------

def load_toml(text: str) -> Tuple[Any, str, Positions]:
    """The value of a TOML text, by the standard library; it tells no places. Dates become text."""
    if tomllib is None:
        version = '.'.join(str(number) for number in sys.version_info[:2])
        raise problem_at(text, 0, f'TOML needs Python 3.11 or newer, this is {version}: write YAML, JSON5 or KDL')
    text = normal_text(text)
    try:
        value = tomllib.loads(text, parse_float=parse_fraction)
    except RecursionError:
        raise problem_at(text, 0, f'nested more than {MAX_DEPTH} levels deep') from None
    except ValueError as error:
        place = re.search(r'\(at line ([0-9]+), column ([0-9]+)\)', str(error))
        lines = text.split('\n')
        number, column = (int(place.group(1)), int(place.group(2))) if place else (len(lines), len(lines[-1]) + 1)
        offset = sum(len(line) + 1 for line in lines[:number - 1]) + column - 1
        raise problem_at(text, offset, f'TOML: {error}') from None
    if nested_too_deeply(value):
        raise problem_at(text, 0, f'nested more than {MAX_DEPTH} levels deep')
    return plain_dates(value), text, {}


def plain_dates(value: Any) -> Any:
    """A TOML value with its dates and times as text."""
    if isinstance(value, dict):
        return {key: plain_dates(child) for key, child in value.items()}
    if isinstance(value, list):
        return [plain_dates(child) for child in value]
    return value.isoformat() if isinstance(value, (datetime.date, datetime.time)) else value


# -------- kdl: reader --------
#
# KDL 2.0. Lax reading also takes the forms of KDL 1 that do not clash with it (true, r"raw", line breaks inside "...",
# '\/'): Torc's own files and its exporter mix the two.

KDL_BLANK = '[ \t\xa0\u1680\u2000-\u200a\u202f\u205f\u3000]'
KDL_BREAK = '(?:\r\n|[\r\n\x0b\x0c\x85\u2028\u2029])'
KDL_BLANKS = re.compile(KDL_BLANK + '+')
KDL_LINE_END = re.compile(KDL_BREAK)
KDL_COMMENT = Expression('//[^\r\n\x0b\x0c\x85\u2028\u2029]*')
KDL_COMMENT_MARK = Expression(r'/\*|\*/')
KDL_FORBIDDEN = Expression('[\x00-\x08\x0e-\x1f\x7f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]')
KDL_WORD = Expression(r'[^\s\x0b\x0c\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\\/(){};\[\]"#=\ufeff]+')
KDL_NUMBER = Expression(
    r'[-+]?(?:0x([0-9A-Fa-f][0-9A-Fa-f_]*)|0o([0-7][0-7_]*)|0b([01][01_]*)|([0-9][0-9_]*)(\.[0-9][0-9_]*)?([eE][-+]?[0-9][0-9_]*)?)\Z')
KDL_NUMBER_START = Expression(r'[-+]?\.?[0-9]')
KDL_KEYWORD = Expression(r'#(true|false|null|inf|-inf|nan)(?=[\s\x85\xa0\u1680\u2000-\u200a\u202f\u205f\u3000\\/(){};]|\Z)')
KDL_KEYWORDS = {'true': True, 'false': False, 'null': None, 'inf': math.inf, '-inf': -math.inf, 'nan': math.nan}
KDL_QUOTED = Expression(r'"([^"\\]*(?:\\.[^"\\]*)*)"', re.DOTALL)
KDL_LONG_QUOTED = Expression(r'"""([^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*)"""', re.DOTALL)
KDL_RAW_START = Expression(r'r?(#*)"')
KDL_ESCAPE = Expression(rf'\\(?:u\{{([0-9A-Fa-f]{{1,6}})\}}|((?:{KDL_BLANK}|{KDL_BREAK})+)|(.))', re.DOTALL)
KDL_SPACE_ESCAPE = Expression(rf'\\(\\|(?:{KDL_BLANK}|{KDL_BREAK})+)')
KDL_ESCAPES = {'n': '\n', 'r': '\r', 't': '\t', '\\': '\\', '"': '"', 'b': '\b', 'f': '\f', 's': ' '}


class KdlNode(NamedTuple):
    """One node of a KDL text. `offsets` and `types` are by argument number or property name; types has 'node' by ''."""
    name: str
    args: List[Any]
    props: Dict[str, Any]
    children: List[Any]     # of KdlNode
    offset: int
    offsets: Dict[Union[int, str], int]
    types: Dict[Union[int, str], str]
    has_block: bool         # { } stands, be it empty


class KdlReader(TextReader):
    """Reads a KDL text by recursive descent. Every read_ answers what it read and the offset after it."""

    def __init__(self, text: str, lax: bool) -> None:
        super().__init__(text)
        self.lax = lax

    def skip_space(self, at: int, over_lines: bool) -> int:
        """White space, comments and continued lines; line ends too where asked."""
        text = self.text
        while True:
            match = KDL_BLANKS.match(text, at)
            if not match and over_lines:
                match = KDL_LINE_END.match(text, at) or KDL_COMMENT.match(text, at)
            if match:
                at = match.end()
            elif text.startswith('/*', at):
                at = self.skip_comment(at)
            elif text.startswith('\\', at):
                at = self.skip_continuation(at)
            else:
                return at

    def skip_comment(self, start: int) -> int:
        """/* ... */, which may be nested."""
        at, depth = start + 2, 1
        while depth:
            match = KDL_COMMENT_MARK.search(self.text, at) or self.fail(start, 'the comment is not closed')
            depth += 1 if match.group() == '/*' else -1
            at = match.end()
        return at

    def skip_continuation(self, start: int) -> int:
        """A backslash that joins the next line to this one."""
        at = start + 1
        while True:     # not skip_space: a file of backslashes must not recurse
            match = KDL_BLANKS.match(self.text, at)
            if match:
                at = match.end()
            elif self.text.startswith('/*', at):
                at = self.skip_comment(at)
            else:
                break
        comment = KDL_COMMENT.match(self.text, at)
        at = comment.end() if comment else at
        match = KDL_LINE_END.match(self.text, at)
        if not match and at < len(self.text):
            self.fail(start, 'a \\ outside of quotes may only stand at the end of a line')
        return match.end() if match else at

    def read_nodes(self, at: int, is_inner: bool) -> Tuple[List[KdlNode], int]:
        """The nodes of the whole text, or up to the '}' that closes a block."""
        text, nodes = self.text, []     # type: str, List[KdlNode]
        self.enter(at, nodes)
        while True:
            at = self.skip_space(at, True)
            while self.lax and text.startswith(';', at):
                at = self.skip_space(at + 1, True)
            if at >= len(text) or text[at] == '}':
                break
            is_dropped = text.startswith('/-', at)
            node, at = self.read_node(self.skip_space(at + 2, True) if is_dropped else at)
            if not is_dropped:
                nodes.append(node)
        if (at < len(text)) != is_inner:
            self.fail(at, "'}' is missing" if is_inner else "unexpected '}'")
        self.depth -= 1
        return nodes, at

    def read_node(self, at: int) -> Tuple[KdlNode, int]:
        """A node with its values and block, and the ';' that may end it."""
        text = self.text
        # Three states: values may follow (with a blank before each), a block has been seen, the node has ended.
        kind, at = self.read_type(at)
        name, end = self.read_text(at) or self.fail(at, f'expected the name of a node, found {text[at:at + 1]!r}')
        node = KdlNode(name, [], {}, [], at, {}, {} if kind is None else {'': kind}, False)
        has_block = is_after_block = False
        while True:
            at = self.skip_space(end, False)
            is_dropped = text.startswith('/-', at)
            has_gap = at > end or is_dropped
            at = self.skip_space(at + 2, True) if is_dropped else at
            if text.startswith('{', at):
                if has_block and not is_dropped:
                    self.fail(at, 'a node can have only one { } block')
                has_block, is_after_block = has_block or not is_dropped, True
                end = self.read_block(node, at, is_dropped)
                continue
            if not is_dropped and self.is_node_end(at):
                break
            if is_after_block:
                self.fail(at, 'values must come before the { } block')
            if not has_gap:
                self.fail(at, f'expected a blank before {text[at:at + 1]!r}')
            end = self.read_entry(node, at, is_dropped)
        return node._replace(has_block=has_block), at + text.startswith(';', at)

    def is_node_end(self, at: int) -> bool:
        """Does a node end here?"""
        text = self.text
        return at >= len(text) or text[at] in ';}' or text.startswith('//', at) or bool(KDL_LINE_END.match(text, at))

    def read_block(self, node: KdlNode, at: int, is_dropped: bool) -> int:
        """{ children }"""
        children, end = self.read_nodes(at + 1, True)
        if not is_dropped:
            node.children.extend(children)
        return end + 1

    def read_entry(self, node: KdlNode, at: int, is_dropped: bool) -> int:
        """One argument or property of a node."""
        value, end, kind = self.read_value(at)
        equals = self.skip_space(end, False)
        name = len(node.args)       # type: Union[int, str]
        is_property = self.text.startswith('=', equals)
        if is_property:
            if not isinstance(value, str) or self.text[at] == '(':
                self.fail(at, 'the name of a property must be text')
            name = value
            value, end, kind = self.read_value(self.skip_space(equals + 1, False))
        if is_dropped:
            return end
        if is_property:
            node.props.pop(name, None)      # of two with one name KDL keeps the last
            node.props[name] = value
        else:
            node.args.append(value)
        node.offsets[name] = at
        node.types.pop(name, None)
        if kind is not None:
            node.types[name] = kind
        return end

    def read_type(self, at: int) -> Tuple[Optional[str], int]:
        """A type annotation '(name)', if there is one."""
        if not self.text.startswith('(', at):
            return None, at
        at = self.skip_space(at + 1, False)
        name, at = self.read_text(at) or self.fail(at, 'expected a type in ( )')
        at = self.skip_space(at, False)
        if not self.text.startswith(')', at):
            self.fail(at, "')' is missing")
        return name, self.skip_space(at + 1, False)

    def read_value(self, at: int) -> Tuple[Any, int, Optional[str]]:
        """A value, the offset after it, and its type annotation."""
        kind, at = self.read_type(at)
        match = KDL_KEYWORD.match(self.text, at)
        if match:
            return KDL_KEYWORDS[match.group(1)], match.end(), kind
        value, end = self.read_text(at, True) or self.fail(at, f'expected a value, found {self.text[at:at + 1]!r}')
        return value, end, kind

    def read_text(self, at: int, is_value: bool = False) -> Optional[Tuple[Any, int]]:
        """Text in quotes or a bare word; as a value also a number. None where there is neither."""
        character = self.text[at:at + 1]
        if character == '"':
            return self.read_quoted(at)
        if character == '#' or self.lax and self.text.startswith(('r"', 'r#'), at):
            return self.read_raw(at)
        match = KDL_WORD.match(self.text, at)
        if not match:
            return None
        word, end = match.group(), match.end()
        if self.text[end:end + 1] in ('"', '#'):
            self.fail(end, 'expected a blank before the quote')
        if KDL_NUMBER_START.match(word):
            return self.read_number(at, word, is_value), end
        if word in KDL_KEYWORDS:
            if not (self.lax and is_value and word in JSON_WORDS):
                self.fail(at, f'write #{word}, or "{word}" for text')
            return JSON_WORDS[word], end
        return word, end

    def read_number(self, at: int, word: str, is_value: bool) -> Union[int, float]:
        """A number with optional underscores, decimal or with the prefix 0x, 0o or 0b."""
        match = KDL_NUMBER.match(word)
        if not match or not is_value:
            self.fail(at, f'{printable(word[:40])!r} begins like a number and is none: put it in quotes')
        plain = word.replace('_', '')
        if match.group(5) or match.group(6):
            value = self.number(at, parse_fraction, plain)
            return value if plain == word else keep_source(Float(value), word)
        base = 10 if match.group(4) else 16 if match.group(1) else 8 if match.group(2) else 2
        digits = plain.lstrip('+-')
        return self.number(at, parse_whole, word, digits if base == 10 else digits[2:], base)

    def read_raw(self, at: int) -> Tuple[str, int]:
        """#"raw text"#"""
        match = KDL_RAW_START.match(self.text, at)
        if not match:
            self.fail(at, 'after # comes true, false, null, inf, -inf, nan or a raw text in quotes')
        hashes, start = match.group(1), match.end()
        is_long = self.text.startswith('""', start) and bool(hashes) and not self.text.startswith('"' + hashes, start)
        closing = ('"""' if is_long else '"') + hashes
        start += 2 if is_long else 0
        end = self.text.find(closing, start)
        if end < 0:
            self.fail(at, f'the raw text is not closed: {closing} is missing')
        value = self.text[start:end]
        if is_long:
            value = self.dedent(start, value, False)
        elif not self.lax:
            self.check_one_line(at, value)
        return value, end + len(closing)

    def read_quoted(self, at: int) -> Tuple[str, int]:
        """Text in quotes; in three of them it may have several lines."""
        is_long = self.text.startswith('"""', at)
        match = (KDL_LONG_QUOTED if is_long else KDL_QUOTED).match(self.text, at)
        if not match:
            self.fail(at, 'text in quotes is not closed')
        value, start = match.group(1), match.start(1)
        if is_long:
            value = self.dedent(start, value, True)
        elif not self.lax:
            self.check_one_line(at, KDL_SPACE_ESCAPE.sub('', value))
        if '\\' in value:
            value = KDL_ESCAPE.sub(lambda escape: self.unescape(start, escape), value)
        return value, match.end()

    def check_one_line(self, at: int, value: str) -> None:
        """KDL 2 wants three quotes around text with line breaks."""
        if KDL_LINE_END.search(value):
            self.fail(at, 'text in quotes must be closed on the same line: use """ for several lines')

    def dedent(self, start: int, value: str, has_escapes: bool) -> str:
        """The lines between three quotes, without the indentation of the closing ones."""
        value = KDL_LINE_END.sub('\n', value)
        if has_escapes:     # a backslash and white space join lines before the indentation is looked at
            value = KDL_SPACE_ESCAPE.sub(lambda match: '\\\\' if match.group(1) == '\\' else '', value)
        lines = value.split('\n')
        first, indent = lines[0], lines[-1]
        if first or len(lines) < 2:
            self.fail(start, 'the text must start on the line after the three quotes')
        if KDL_BLANKS.sub('', indent):
            self.fail(start, 'the three closing quotes must be on a line of their own')
        kept = []
        for line in lines[1:-1]:
            # Blank lines need no indentation and lose what they have.
            is_blank = not KDL_BLANKS.sub('', line)
            if not is_blank and not line.startswith(indent):
                self.fail(start, 'a line of this text is indented less than the closing quotes')
            kept.append('' if is_blank else line[len(indent):])
        return '\n'.join(kept)

    def unescape(self, start: int, match: 're.Match') -> str:
        """What one escape stands for."""
        code, space, character = match.groups()
        if space:
            return ''
        if code and int(code, 16) <= sys.maxunicode and not 0xd800 <= int(code, 16) < 0xe000:
            return chr(int(code, 16))
        if code or character not in KDL_ESCAPES and not (self.lax and character == '/'):
            self.fail(start + match.start(), f'unknown escape {printable(match.group())}: '
                                             'write \\\\ for a backslash, or #"..."# for raw text')
        return KDL_ESCAPES.get(character, '/')


def read_kdl_nodes(text: str, lax: bool) -> List[KdlNode]:
    """The nodes of a KDL text with plain line ends."""
    found = KDL_FORBIDDEN.search(text)
    if found:
        raise problem_at(text, found.start(), f'the character {found.group()!r} is not allowed')
    return KdlReader(text, lax).read_nodes(0, False)[0]


# ======== 5. Spec: from a document to a plan ========
#
# Owns what a workflow file may say (FIELDS), in KDL too, how parameters make instances, how names become relations,
# and what is refused. Pure: it reads the tables and lists that a spec names and asks for the times of input files,
# nothing else. read_plan() collects every problem, with its place in the file, before it raises.
#
# Expansion works by columns, not by instances: a template such as 'job_{i}' becomes one list of texts, a template
# without parameters stays one text that all instances share. Names are resolved once per distinct list or regex.
# What is the same for many jobs (prerequisites, kinds) stands once in the plan and is pointed at by index.


class PlannedJob(NamedTuple):
    """One job of a plan, in the order in which it travels as a JSON list. Indexes point into the plan's lists."""
    name: str
    command: str
    invocation_script: Optional[str]
    env: Optional[Dict[str, str]]           # the job's own, without the workflow's
    kind: int                               # resources, priority, scheduler, labels
    dependencies: Optional[int]             # explicit prerequisites: a dependency set
    failure_handler: Optional[int]
    cancel_on_blocking_job_failure: bool
    supports_termination: bool
    input_files: Sequence[int]
    output_files: Sequence[int]
    input_user_data: Sequence[int]
    output_user_data: Sequence[int]


class Plan(NamedTuple):
    """What is left of a spec after expansion and checks."""
    body: Dict[str, Any]        # of POST /workflows/from_spec
    warnings: List[Problem]
    summary: Dict[str, Any]     # what `create --dry-run` tells
    pending: List[Problem]      # one warning of what is not carried out yet, if anything


# -------- fields --------

REQUIRED = '(required)'     # default of a field that has none
ANY = '(any)'


class Field(NamedTuple):
    """One field of a spec."""
    where: str
    name: str
    type: str           # a key of TYPES
    default: Any        # None: nothing; REQUIRED
    is_template: bool   # {parameters} are replaced in it
    help: str
    pending: str = ''   # the value that this version takes without carrying it out; ANY for all but false


BLOCKS = {
    'workflow':              'the file itself',
    'job':                   'jobs: one shell command each',
    'file':                  'files: what jobs read and write, by name',
    'user_data':             'user_data: JSON values that jobs read and write, by name',
    'resource_requirements': 'resource_requirements: what a job needs of a node',
    'failure_handler':       'failure_handlers: when to run a failed job again',
    'rule':                  'rules of a failure handler: the first with the exit code, else one that matches all',
    'slurm_scheduler':       'slurm_schedulers: options of an allocation',
    'action':                'actions: commands or allocations that a trigger sets off',
    'execution_config':      'execution_config: how jobs are started and stopped',
    'stdio':                 'stdio of a job or of execution_config',
    'resource_monitor':      'resource_monitor: what is measured while jobs run',
    'resource_monitor.jobs': 'jobs of resource_monitor',
    'resource_monitor.compute_node': 'compute_node of resource_monitor',
    'dynamic_jobs':          'dynamic_jobs: limits for jobs that make jobs',
}

FIELDS = tuple(Field(*row) for row in (
    # where, name, type, default, whether parameters are replaced in it, help, what is not carried out yet
    ('workflow', 'name',                   'text',           REQUIRED, False, 'name of the workflow; need not be unique'),
    ('workflow', 'user',                   'text',           None,     False, 'owner; else the user who creates it'),
    ('workflow', 'description',            'text',           None,     False, 'one sentence about it'),
    ('workflow', 'project',                'text',           None,     False, 'project that it belongs to'),
    ('workflow', 'metadata',               'metadata',       None,     False, 'anything of your own, as a mapping'),
    ('workflow', 'parameters',             'parameters',     None,     False, 'shared parameters: a job takes them with use_parameters'),
    ('workflow', 'parameters_file',        'text',           None,     False, 'shared table: a job takes it with use_parameters_file'),
    ('workflow', 'variables',              'variables',      None,     False, 'constants: {name} is replaced in every text'),
    ('workflow', 'env',                    'env',            None,     True,  'environment of every job'),
    ('workflow', 'jobs',                   'jobs',           REQUIRED, False, 'the jobs; may be an empty list'),
    ('workflow', 'files',                  'files',          None,     False, 'files that jobs name'),
    ('workflow', 'user_data',              'user_data_list', None,     False, 'JSON values that jobs name'),
    ('workflow', 'resource_requirements',  'requirements',   None,     False, 'resources that jobs name'),
    ('workflow', 'failure_handlers',       'handlers',       None,     False, 'failure handlers that jobs name'),
    ('workflow', 'slurm_schedulers',       'schedulers',     None,     False, 'allocations that jobs and actions name'),
    ('workflow', 'slurm_defaults',         'slurm_defaults', None,     False, 'sbatch long options for every allocation'),
    ('workflow', 'actions',                'actions',        None,     False, 'what triggers set off'),
    ('workflow', 'resource_monitor',       'monitor',        None,     False, 'what is measured; absent or {}: a summary of every job'),
    ('workflow', 'execution_config',       'execution',      None,     False, 'how jobs are started and stopped'),
    ('workflow', 'dynamic_jobs',           'dynamic',        None,     False, 'limits for jobs that make jobs'),
    ('workflow', 'use_pending_failed',     'bool',           False,    False, 'failed jobs that no handler takes wait as pending_failed'),
    ('workflow', 'enable_ro_crate',        'bool',           False,    False, 'record provenance as RO-Crate'),
    ('workflow', 'access_groups',          'names',          None,     False, 'groups that may see it'),
    ('workflow', 'compute_node_wait_for_new_jobs_seconds', 'seconds', 90,       False, 'an idle runner leaves after this'),
    ('workflow', 'compute_node_ignore_workflow_completion', 'bool', False,    False, 'runners stay when the workflow is complete'),
    ('workflow', 'compute_node_wait_for_healthy_database_minutes', 'minutes', 20,       False, 'a runner waits so long for its server'),
    ('workflow', 'compute_node_min_time_for_new_jobs_seconds', 'seconds', 300,      False, 'no new jobs when less time is left'),
    ('workflow', 'compute_node_expiration_buffer_seconds', 'seconds', None,     False, 'has no effect: Torc used it once'),
    ('workflow', 'jobs_sort_method',       'text',           None,     False, 'has no effect: Torc used it once'),

    ('job', 'name',                           'name',    REQUIRED, True,  'unique after expansion'),
    ('job', 'command',                        'command', REQUIRED, True,  'run by bash; may hold ${files.input.NAME} and the like'),
    ('job', 'invocation_script',              'text',    None,     True,  'put before the command: a prefix, or lines of shell'),
    ('job', 'env',                            'env',     None,     True,  'environment, over that of the workflow'),
    ('job', 'depends_on',                     'names',   None,     True,  'jobs that must finish first'),
    ('job', 'depends_on_regexes',             'regexes', None,     True,  'the same, by regexes: searched in the names of jobs'),
    ('job', 'input_files',                    'names',   None,     True,  'files that it reads: their producers must finish first'),
    ('job', 'output_files',                   'names',   None,     True,  'files that it writes: it fails if one is missing'),
    ('job', 'input_file_regexes',             'regexes', None,     True,  'input_files by regular expressions'),
    ('job', 'output_file_regexes',            'regexes', None,     True,  'output_files by regular expressions'),
    ('job', 'input_user_data',                'names',   None,     True,  'user data that it reads: its producers must finish first'),
    ('job', 'output_user_data',               'names',   None,     True,  'user data that it writes'),
    ('job', 'input_user_data_regexes',        'regexes', None,     True,  'input_user_data by regular expressions'),
    ('job', 'output_user_data_regexes',       'regexes', None,     True,  'output_user_data by regular expressions'),
    ('job', 'resource_requirements',          'name',    None,     True,  'what it needs; else 1 CPU, 1m of memory, 1 minute'),
    ('job', 'failure_handler',                'name',    None,     False, 'what happens when it fails'),
    ('job', 'scheduler',                      'name',    None,     True,  'slurm scheduler whose allocations it prefers'),
    ('job', 'cancel_on_blocking_job_failure', 'bool',    True,     False, 'canceled when a job that it waits for ends badly'),
    ('job', 'supports_termination',           'bool',    False,    False, 'has no effect: every job is sent the termination signal'),
    ('job', 'priority',                       'count',   0,        False, 'higher is claimed first'),
    ('job', 'labels',                         'texts',   None,     True,  'only runners with all of these labels take it'),
    ('job', 'stdio',                          'stdio',   None,     False, 'where its output goes, in place of stdio of execution_config'),
) + tuple(
    (where, name, kind, None, False, text)
    for where in ('job', 'file', 'user_data')
    for name, kind, text in (
        ('parameters',          'parameters',     'makes one instance per value, see `help parameters`'),
        ('parameter_mode',      'parameter_mode', 'product (all combinations, the default) or zip (value by value)'),
        ('use_parameters',      'texts',          "names of the workflow's parameters to use as well"),
        ('parameters_file',     'text',           'table (.csv, .json, .jsonl): one instance per row'),
        ('use_parameters_file', 'bool',           "use the workflow's table"),
    )
) + (
    ('file', 'name',       'name',   REQUIRED, True,  'unique after expansion'),
    ('file', 'path',       'path',   REQUIRED, True,  "relative to the runner's directory"),
    ('file', 'identifier', 'text',   None,     True,  'RO-Crate @id of an input file'),
    ('file', 'st_mtime',   'number', None,     False, 'time of last change; else what the file system says, for inputs'),

    ('user_data', 'name',         'name', REQUIRED, True,  'unique after expansion'),
    ('user_data', 'data',         'json', None,     True,  'any JSON value; absent when a job is to write it'),
    ('user_data', 'is_ephemeral', 'bool', False,    False, 'cleared when the workflow is initialized again'),

    ('resource_requirements', 'name',      'name',     REQUIRED, False, 'unique; `default` replaces the implicit one'),
    ('resource_requirements', 'num_cpus',  'positive', 1,        False, 'CPUs (per node)'),
    ('resource_requirements', 'num_gpus',  'count',    0,        False, 'GPUs (per node)'),
    ('resource_requirements', 'num_nodes', 'positive', 1,        False, 'whole nodes when more than 1'),
    ('resource_requirements', 'memory',    'memory',   '1m',     False, 'such as 512m, 8g or 1.5GB (per node); 1k is 1024 bytes'),
    ('resource_requirements', 'runtime',   'duration', 'PT1H',   False, 'longest expected run time, such as 30m, 1d12h or PT30M'),

    ('failure_handler', 'name',  'name',  REQUIRED, False, 'unique'),
    ('failure_handler', 'rules', 'rules', REQUIRED, False, 'what to do for which exit code'),

    ('rule', 'exit_codes',           'codes', None,  False, 'exit codes that it is for'),
    ('rule', 'match_all_exit_codes', 'bool',  False, False, 'it is for every other code'),
    ('rule', 'recovery_script',      'text',  None,  False, 'run before the retry; a failure of it vetoes the retry'),
    ('rule', 'max_retries',          'count', 3,     False, 'attempts in all'),

    ('slurm_scheduler', 'name',                  'name',         REQUIRED,   False, 'unique'),
    ('slurm_scheduler', 'account',               'text',         REQUIRED,   False, 'account to charge'),
    ('slurm_scheduler', 'partition',             'text',         None,       False, 'partition'),
    ('slurm_scheduler', 'qos',                   'text',         None,       False, 'quality of service'),
    ('slurm_scheduler', 'gres',                  'text',         None,       False, 'generic resources, such as gpu:2'),
    ('slurm_scheduler', 'mem',                   'slurm_memory', None,       False, 'memory per node, such as 240G'),
    ('slurm_scheduler', 'tmp',                   'text',         None,       False, 'local disk per node'),
    ('slurm_scheduler', 'extra',                 'text',         None,       False, 'further sbatch options'),
    ('slurm_scheduler', 'nodes',                 'positive',     1,          False, 'nodes of one allocation'),
    ('slurm_scheduler', 'ntasks_per_node',       'positive',     None,       False, 'tasks per node'),
    ('slurm_scheduler', 'walltime',              'walltime',     '01:00:00', False, 'HH:MM:SS or D-HH:MM:SS (12:30 is 12 min 30 s), or such as 2h'),
    ('slurm_scheduler', 'serialize_allocations', 'bool',         False,      False, 'one allocation at a time'),

    ('action', 'trigger_type',              'trigger',        REQUIRED, False, 'what sets it off'),
    ('action', 'action_type',               'action_type',    REQUIRED, False, 'what it does', 'schedule_nodes'),
    ('action', 'jobs',                      'names',          None,     False, 'on_jobs_*: when all of these are ready or have finished'),
    ('action', 'job_name_regexes',          'regexes',        None,     False, 'the same, by regular expressions'),
    ('action', 'commands',                  'texts',          None,     False, 'run_commands: shell commands, one after the other'),
    ('action', 'scheduler',                 'name',           None,     False, 'schedule_nodes: a slurm scheduler'),
    ('action', 'scheduler_type',            'scheduler_type', None,     False, 'schedule_nodes: kind of scheduler'),
    ('action', 'num_allocations',           'positive',       1,        False, 'schedule_nodes: how many'),
    ('action', 'start_one_worker_per_node', 'bool',           False,    False, 'schedule_nodes: a runner on each node (mode direct)'),
    ('action', 'max_parallel_jobs',         'positive',       None,     False, 'schedule_nodes: jobs at a time, whatever they need'),
    ('action', 'persistent',                'bool',           False,    False, 'for each runner, not once'),

    ('execution_config', 'mode',                     'mode',        'auto',    False, 'auto: slurm inside an allocation, else direct', 'slurm'),
    ('execution_config', 'limit_resources',          'bool',        True,      False, 'stop jobs that exceed memory or time (direct)', ANY),
    ('execution_config', 'termination_signal',       'signal',      'SIGTERM', False, 'first signal to a job that must stop (direct)'),
    ('execution_config', 'sigterm_lead_seconds',     'seconds',       30,        False, 'so long before SIGKILL (direct)'),
    ('execution_config', 'sigkill_headroom_seconds', 'seconds',       60,        False, 'SIGKILL so long before the end of the allocation'),
    ('execution_config', 'timeout_exit_code',        'code',        152,       False, 'return code of a job out of time'),
    ('execution_config', 'oom_exit_code',            'code',        137,       False, 'return code of a job out of memory (direct)', ANY),
    ('execution_config', 'srun_termination_signal',  'srun_signal', None,      False, 'srun --signal, such as TERM@120 (slurm)', ANY),
    ('execution_config', 'enable_cpu_bind',          'bool',        False,     False, 'let srun bind jobs to CPUs (slurm)', ANY),
    ('execution_config', 'srun_mpi',                 'mpi',         None,      False, 'srun --mpi for start_one_worker_per_node', ANY),
    ('execution_config', 'staggered_start',          'bool',        True,      False, 'runners of an allocation start one after the other', ANY),
    ('execution_config', 'stdio',                    'stdio',       None,      False, 'where the output of every job goes'),
    ('execution_config', 'job_stdio_overrides',      'stdio_map',   None,      False, 'the same by job name'),

    ('stdio', 'mode',              'stdio_mode', 'separate', False, 'which files are written'),
    ('stdio', 'delete_on_success', 'bool',       False,      False, 'remove them when the job completes'),

    ('resource_monitor', 'sample_interval_seconds', 'interval',       10,        False, 'seconds between samples', ANY),
    ('resource_monitor', 'flush_interval_seconds',  'interval',       300,       False, 'seconds between writes of a time series', ANY),
    ('resource_monitor', 'generate_plots',          'bool',           False,     False, 'draw plots at the end', ANY),
    ('resource_monitor', 'jobs',                    'monitored_jobs', None,      False, 'what is measured of jobs'),
    ('resource_monitor', 'compute_node',            'monitored_node', None,      False, 'what is measured of nodes'),
    ('resource_monitor', 'enabled',                 'bool',           None,      False, 'old form: jobs.enabled', ANY),
    ('resource_monitor', 'granularity',             'granularity',    'summary', False, 'old form: jobs.granularity', ANY),
    ('resource_monitor', 'metrics',                 'json',           None,      False, 'has no effect: Torc used it once'),

    ('resource_monitor.jobs', 'enabled',     'bool',        True,      False, 'measure each job', ANY),
    ('resource_monitor.jobs', 'granularity', 'granularity', 'summary', False, 'peaks only, or every sample', ANY),

    ('resource_monitor.compute_node', 'enabled',     'bool',        False,     False, 'measure each node', ANY),
    ('resource_monitor.compute_node', 'granularity', 'granularity', 'summary', False, 'peaks only, or every sample', ANY),
    ('resource_monitor.compute_node', 'cpu',         'bool',        True,      False, 'its CPUs', ANY),
    ('resource_monitor.compute_node', 'memory',      'bool',        True,      False, 'its memory', ANY),

    ('dynamic_jobs', 'max_iterations', 'positive', None, False, 'generations of one lineage'),
))

# Read, and without effect: (where, name) -> why.
NO_EFFECT = {
    ('job', 'supports_termination'): 'every job is sent the termination signal',
    ('workflow', 'compute_node_expiration_buffer_seconds'): 'see sigkill_headroom_seconds of execution_config',
    ('workflow', 'jobs_sort_method'): 'jobs are claimed by priority, then GPUs, runtime, memory and CPUs',
    ('resource_monitor', 'metrics'): 'CPU and memory are measured, see jobs and compute_node',
}

# Names of earlier years: (where, old name) -> name now.
OLD_NAMES = {
    ('job', 'blocked_by'): 'depends_on',
    ('job', 'label'): 'labels',
}

# Fields that are refused with more than "unknown field": (where, name) -> what to do.
REFUSED_NAMES = {
    ('workflow', 'slurm_config'): 'its fields stand under execution_config now',
}

# sbatch options that only a scheduler may set, by any of their names (sbatch(1)).
SCHEDULER_OPTIONS = frozenset('partition nodes walltime time mem gres name job-name'.split())


# -------- types --------
#
# A reader takes a value as the formats give it and answers the value to keep, or raises ValueError with a message
# that goes on after 'job 'x': command '. Numbers come with their source text (.raw) where text would change it.

IDENTIFIER = Expression(r'[A-Za-z_][A-Za-z0-9_]*\Z')
UNSAFE_TEXT = Expression('[\x00\ud800-\udfff]')     # neither a process, nor UTF-8, nor SQLite can take these
UNSAFE_NAME = Expression('[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]')
SLURM_MEMORY = Expression(r'([0-9]+)([kmgt]?)b?\Z', re.IGNORECASE)
SRUN_SIGNAL = Expression(r'(?:[RB]:)?(?:[0-9]{1,2}|(?:SIG)?[A-Z][A-Z0-9+-]*)(?:@[0-9]+)?\Z')
MPI_KIND = Expression(r'[A-Za-z0-9+_.-]+\Z')


def show_value(value: Any) -> str:
    """A value for messages: what it is, or, where it is short, itself."""
    if isinstance(value, str):
        return f"'{shorten(value)}'"
    if value is None or isinstance(value, (bool, int, float)):
        return shorten(getattr(value, 'raw', '') or json.dumps(value))
    return {dict: 'a mapping', list: 'a list'}.get(type(value), f'a value of the kind {type(value).__name__}')


def shorten(text: str) -> str:
    """A name or value for a message: printable and not too long."""
    return printable(text if len(text) <= 80 else text[:77] + '...')


def read_text(value: Any) -> str:
    """Text; a number gives its source text."""
    if isinstance(value, str):
        unsafe = UNSAFE_TEXT.search(value)
        if unsafe:
            raise ValueError(f'holds the character {unsafe.group()!a}, which cannot be stored: remove it')
        return value
    if isinstance(value, bool) or value is None:
        word = json.dumps(value)
        raise ValueError(f'must be text, not {word}: put it in quotes ("{word}") if you mean the word')
    if isinstance(value, (int, float)):
        if not math.isfinite(value):
            raise ValueError('must be text, not NaN or infinity: put it in quotes if you mean the word')
        return getattr(value, 'raw', '') or repr(value)
    raise ValueError(f'must be text, not {show_value(value)}')


def read_name(value: Any) -> str:
    """A name: text without control characters, not empty, not absurdly long."""
    text = read_text(value)
    fault = name_fault(text)
    if fault:
        raise ValueError(fault)
    return text


def read_command(value: Any) -> str:
    """A shell command; an empty one is a slip: `true` does nothing on purpose."""
    text = read_text(value)
    if not text.strip():
        raise ValueError('must not be empty: write true for a job that does nothing')
    return text


def name_fault(text: str) -> str:
    """Why a text cannot be a name, or ''. Blanks, dots and slashes are fine: files on disk are named by ids."""
    if not text.strip():
        return 'must not be empty'
    if len(text) > MAX_NAME_CHARACTERS:
        return f'is {len(text):,} characters long: {MAX_NAME_CHARACTERS:,} are allowed'
    match = UNSAFE_NAME.search(text)
    return f'holds the control character {match.group()!a}: remove it' if match else ''


def read_path(value: Any) -> str:
    """Path of a file."""
    text = read_text(value)
    if not text:
        raise ValueError('must not be empty')
    return text


def read_integer(value: Any, least: int = -2 ** 31, most: int = MAX_INTEGER) -> int:
    """A whole number within bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        hint = ': write it without quotes' if isinstance(value, str) and re.match(r'-?[0-9]+\Z', value) else ''
        raise ValueError(f'must be a whole number, not {show_value(value)}{hint}')
    if re.match(r'[-+]?0[0-9]', getattr(value, 'raw', '')):
        raise ValueError(f'must be a whole number without leading zeros, not {value.raw}')
    if not least <= value <= most:
        bound = f'at least {least:,}' if value < least else f'at most {most:,}'
        raise ValueError(f'must be {bound}, not {value}')
    return int(value)


def read_number(value: Any) -> float:
    """A number, such as a time in seconds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f'must be a number, not {show_value(value)}')
    if not -1e18 < value < 1e18:
        raise ValueError('must be a number of sane size')
    return float(value)


def read_bool(value: Any) -> bool:
    """true or false, nothing that looks like it."""
    if not isinstance(value, bool):
        raise ValueError(f'must be true or false, not {show_value(value)}')
    return value


def read_json(value: Any) -> Any:
    """Any JSON value, as plain Python values."""
    if isinstance(value, dict):
        return {read_text(key): read_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [read_json(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError('holds NaN or infinity, which JSON cannot: put it in quotes')
        return float(value)
    if isinstance(value, int):
        if abs(value) > MAX_INTEGER:
            raise ValueError('holds a number that is too large for 64 bits: put it in quotes')
        return int(value)
    return read_text(value)


def read_metadata(value: Any) -> Any:
    """A mapping; or text, as Torc's pages show it, which is read as JSON where it is JSON."""
    if isinstance(value, str):
        try:
            return read_json(parse_json(value))
        except ValueError:
            return read_text(value)
    if not isinstance(value, dict):
        raise ValueError(f'must be a mapping, not {show_value(value)}')
    return read_json(value)


def read_normalized(normalize: Callable[[str], str]) -> Callable[[Any], str]:
    """Reader of a text that has a unit, in the form that is kept."""
    return lambda value: normalize(read_text(value))


def read_span(unit: str, unit_s: int, least: int) -> Callable[[Any], int]:
    """Reader of a whole number of seconds or minutes, or a text that says its units, such as 5m."""
    def read(value: Any) -> int:
        if isinstance(value, str) and not re.match(r'\s*-?[0-9]+\s*\Z', value):
            value_s = parse_span(read_text(value))
            if value_s % unit_s:
                raise ValueError(f"must be a whole number of {unit}, not '{shorten(value)}'")
            value = int(value_s // unit_s)
        return read_integer(value, least)
    return read


def read_matching(pattern: Any, wanted: str) -> Callable[[Any], str]:
    """Reader of a text that must match a pattern."""
    def read(value: Any) -> str:
        text = read_text(value)
        if not pattern.match(text):
            raise ValueError(f"must be {wanted}, not '{shorten(text)}'")
        return text
    return read


def read_choice(choices: Sequence[str]) -> Callable[[Any], str]:
    """Reader of one word of a closed set."""
    def read(value: Any) -> str:
        text = read_text(value)
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, not '{shorten(text)}'{did_you_mean(text, choices)}")
        return text
    return read


def read_at_least(least: int, most: int = MAX_INTEGER) -> Callable[[Any], int]:
    """Reader of a whole number within bounds."""
    return lambda value: read_integer(value, least, most)


def read_signal(value: Any) -> str:
    """Name of a signal, with or without SIG."""
    text = read_text(value)
    if 'SIG' + text.replace('SIG', '', 1) not in signal.Signals.__members__:
        raise ValueError(f"must be the name of a signal, such as SIGTERM or SIGUSR1, not '{shorten(text)}'")
    return text


def read_parameter(value: Any) -> Any:
    """Values of a parameter: checked when they are expanded."""
    return read_text(value) if isinstance(value, str) else value


def read_option(value: Any) -> Any:
    """Value of an sbatch option: text, a number's source text, or a switch."""
    return value if isinstance(value, bool) else read_text(value)


def parse_slurm_memory(text: str) -> int:
    """Slurm's memory text, such as 240G or 4096 (megabytes) -> bytes; 0 means all of a node."""
    match = SLURM_MEMORY.match(text.strip())
    if not match:
        raise ValueError(f'{text!r} is not an amount of memory for Slurm: write such as 240G or 4096 (megabytes)')
    return int(match.group(1)) * MEMORY_UNITS[match.group(2).lower() or 'm']


def normalize_slurm_memory(text: str) -> str:
    """'8Gi', '1.5G' -> Slurm's form: '8G', '1536M'. Slurm's forms stay: 4096 is megabytes."""
    if not SLURM_MEMORY.match(text.strip()) and WRITTEN_MEMORY.match(text.strip()):
        kilobytes = math.ceil(parse_memory(normalize_memory(text)) / 1024)
        text = normalize_memory(f'{kilobytes} k').upper()
    parse_slurm_memory(text)
    return text


def parse_regex(text: str) -> Any:
    """Regular expression -> pattern. ValueError with the position of what is wrong."""
    if '[[:' in text:
        raise ValueError(f"'{shorten(text)}' uses a POSIX class such as [[:alpha:]]: write [A-Za-z]")
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        place = f' at character {error.pos + 1}' if getattr(error, 'pos', None) is not None else ''
        fault = getattr(error, 'msg', error)
        raise ValueError(f"'{shorten(text)}' is not a regular expression: {fault}{place}") from None


class Type(NamedTuple):
    """How a field is read."""
    words: str                                  # for help and messages
    shape: str                                  # 'one', 'list', 'map', 'block' or 'blocks'
    read: Optional[Callable[[Any], Any]] = None     # one value or item
    block: str = ''                             # key of BLOCKS
    key: Optional[Callable[[Any], str]] = None  # of a map


READ_VARIABLE_NAME = read_matching(IDENTIFIER, 'a name of letters, digits and _')

TYPES = {
    'text':           Type('text', 'one', read_text),
    'name':           Type('name', 'one', read_name),
    'command':        Type('text', 'one', read_command),
    'path':           Type('path', 'one', read_path),
    'texts':          Type('list of text', 'list', read_text),
    'names':          Type('list of names', 'list', read_name),
    'regexes':        Type('list of regular expressions', 'list', read_text),
    'bool':           Type('true or false', 'one', read_bool),
    'number':         Type('number', 'one', read_number),
    'count':          Type('whole number, 0 or more', 'one', read_at_least(0)),
    'positive':       Type('whole number, 1 or more', 'one', read_at_least(1)),
    'code':           Type('exit code', 'one', read_at_least(-2 ** 31, 2 ** 31 - 1)),
    'codes':          Type('list of exit codes', 'list', read_at_least(-2 ** 31, 255)),     # 8 bits: wait(2)
    'json':           Type('any value', 'one', read_json),
    'metadata':       Type('mapping', 'one', read_metadata),
    'env':            Type('mapping of text', 'map', read_text, '', READ_VARIABLE_NAME),
    'variables':      Type('mapping of text', 'map', read_text, '', READ_VARIABLE_NAME),
    'parameters':     Type('mapping of values', 'map', read_parameter, '', read_name),
    'slurm_defaults': Type('mapping of text', 'map', read_option, '', read_name),
    'memory':         Type('memory', 'one', read_normalized(normalize_memory)),
    'duration':       Type('duration', 'one', read_normalized(normalize_duration)),
    'seconds':        Type('seconds, or a duration', 'one', read_span('seconds', 1, 0)),
    'interval':       Type('seconds, or a duration', 'one', read_span('seconds', 1, 1)),
    'minutes':        Type('minutes, or a duration', 'one', read_span('minutes', 60, 0)),
    'walltime':       Type('Slurm time, or a duration', 'one', read_normalized(normalize_walltime)),
    'slurm_memory':   Type('Slurm memory', 'one', read_normalized(normalize_slurm_memory)),
    'signal':         Type('signal', 'one', read_signal),
    'srun_signal':    Type('signal', 'one', read_matching(SRUN_SIGNAL, 'a signal such as TERM@120')),
    'mpi':            Type('kind of MPI', 'one', read_matching(MPI_KIND, 'a kind of MPI such as pmix')),
    'mode':           Type('|'.join(EXECUTION_MODES), 'one', read_choice(EXECUTION_MODES)),
    'stdio_mode':     Type('|'.join(STDIO_MODES), 'one', read_choice(STDIO_MODES)),
    'granularity':    Type('|'.join(GRANULARITIES), 'one', read_choice(GRANULARITIES)),
    'parameter_mode': Type('product|zip', 'one', read_choice(('product', 'zip'))),
    'trigger':        Type('|'.join(TRIGGERS), 'one', read_choice(TRIGGERS)),
    'action_type':    Type('|'.join(ACTION_TYPES), 'one', read_choice(ACTION_TYPES)),
    'scheduler_type': Type('slurm|local', 'one', read_choice(('slurm', 'local'))),
    'stdio':          Type('mapping', 'block', None, 'stdio'),
    'stdio_map':      Type('mapping of stdio', 'map', None, 'stdio', read_name),
    'execution':      Type('mapping', 'block', None, 'execution_config'),
    'monitor':        Type('mapping', 'block', None, 'resource_monitor'),
    'monitored_jobs': Type('mapping', 'block', None, 'resource_monitor.jobs'),
    'monitored_node': Type('mapping', 'block', None, 'resource_monitor.compute_node'),
    'dynamic':        Type('mapping', 'block', None, 'dynamic_jobs'),
    'jobs':           Type('list', 'blocks', None, 'job'),
    'files':          Type('list', 'blocks', None, 'file'),
    'user_data_list': Type('list', 'blocks', None, 'user_data'),
    'requirements':   Type('list', 'blocks', None, 'resource_requirements'),
    'handlers':       Type('list', 'blocks', None, 'failure_handler'),
    'rules':          Type('list', 'blocks', None, 'rule'),
    'schedulers':     Type('list', 'blocks', None, 'slurm_scheduler'),
    'actions':        Type('list', 'blocks', None, 'action'),
}

FIELDS_OF = {where: {field.name: field for field in FIELDS if field.where == where} for where in BLOCKS}
REQUIRED_OF = {where: [name for name, field in fields.items() if field.default is REQUIRED]
               for where, fields in FIELDS_OF.items()}


def is_pending(field: Field) -> bool:
    """Whether nothing that a field says is carried out yet; a block of such fields is one itself."""
    block = TYPES[field.type].block
    return field.pending == ANY or block in FIELDS_OF and is_pending_block(block)


def is_pending_block(where: str) -> bool:
    """Whether this holds for all fields of a block."""
    return all(is_pending(field) or (where, field.name) in NO_EFFECT for field in FIELDS_OF[where].values())


# -------- kdl: nodes -> spec --------
#
# KDL has nodes where YAML has fields and lists. Which field a node becomes, and how, follows from the field's type:
#     value        one argument; stands once
#     list         all arguments of all such nodes
#     map          a block with any names inside, or one value
#     json         one argument whose text is JSON
#     block KIND   one block of that kind
#     items KIND   a list of blocks of that kind, whose first argument is the name
# A list's node may have the singular as its name. A value or list may also be written as a property (path="x"). What
# no field knows is an error. Types are left to the spec's own checks, which are the same for all formats.

KDL_FORMS = {'one': 'value', 'list': 'list', 'map': 'map', 'block': 'block', 'blocks': 'items'}     # shape of a type -> form
KDL_FORMS_OF_TYPES = {'json': 'json', 'metadata': 'map'}
KDL_OTHER_NAMES = {     # of fields whose singular is not their name without its ending
    'depends_on': ('depends_on_job', 'depends_on_jobs', 'blocked_by', 'blocked_by_job', 'blocked_by_jobs'),
    'depends_on_regexes': ('depends_on_regex', 'depends_on_job_regexes', 'blocked_by_regexes'),
    'resource_requirements': (),
}


def kdl_names(field: str, form: str) -> Tuple[str, ...]:
    """Names of the nodes that become a field."""
    if form not in ('list', 'items'):
        return (field,)
    singular = re.sub('(?<=regex)es$|s$', '', field)
    return (field, *KDL_OTHER_NAMES.get(field, (singular,)))


@functools.lru_cache(maxsize=None)
def kdl_vocabulary(kind: str) -> Dict[str, Tuple[str, str, str]]:
    """Node name -> (field, form, kind of its blocks) inside one kind of block."""
    vocabulary = {}     # type: Dict[str, Tuple[str, str, str]]
    for field in FIELDS_OF[kind].values():
        form = KDL_FORMS_OF_TYPES.get(field.type) or KDL_FORMS[TYPES[field.type].shape]
        vocabulary.update((name, (field.name, form, TYPES[field.type].block)) for name in kdl_names(field.name, form))
    return vocabulary


class KdlSpec(TextReader):
    """Turns the nodes of one text into the value that the same workflow has in YAML."""

    def container(self, value: Any, at: int) -> Any:
        """A new dict or list with its place."""
        self.positions[id(value)] = [at]
        return value

    def add(self, container: Any, key: Any, value: Any, at: int) -> Any:
        """Put an entry with its place into a dict (key) or list (no key)."""
        if isinstance(container, list):
            container.append(value)
        else:
            container[key] = value
        self.positions[id(container)].append(at)
        return value

    def read_workflow(self, nodes: List[KdlNode]) -> Dict[str, Any]:
        """The whole text."""
        workflow = self.container({}, 0)
        for node in nodes:
            self.add_node(workflow, 'workflow', node)
        if 'jobs' not in workflow:      # in KDL an empty list has no form of its own
            self.add(workflow, 'jobs', self.container([], 0), 0)
        return workflow

    def add_node(self, block: Dict[str, Any], kind: str, node: KdlNode) -> None:
        """Put what a node says into the block that it stands in."""
        if node.types:
            self.fail(node.offset, f'a type such as ({next(iter(node.types.values()))}) has no meaning here: remove it')
        field, form, inner_kind = self.find_form(kind, node.name, node.offset)
        if form in ('value', 'list') and (node.props or node.has_block):
            self.fail(node.offset, f'{node.name!r} takes values only, no properties and no {{ }} block')
        if form not in ('list', 'items') and field in block:
            self.fail(node.offset, f'{node.name!r} stands twice: remove one')
        if form == 'list':
            self.add_values(block, field, node)
        elif form == 'items':
            if field not in block:
                self.add(block, field, self.container([], node.offset), node.offset)
            self.add(block[field], None, self.read_block(inner_kind, node), node.offset)
        elif form == 'block':
            self.add(block, field, self.read_block(inner_kind, node), node.offset)
        elif form == 'map' or form == 'json' and node.has_block:
            self.add(block, field, self.read_map(node), node.offset)
        else:
            value = self.one_value(node)
            self.add(block, field, self.read_data(node, value) if form == 'json' else value, node.offset)

    def find_form(self, kind: str, name: str, at: int) -> Tuple[str, str, str]:
        """What a name means inside a kind of block."""
        known = kdl_vocabulary(kind)
        if name not in known:
            cure = did_you_mean(name[:60], known)
            home = ' block of '.join(reversed(kind.split('.')))
            self.fail(at, f'{printable(name[:60])!r} is not known in a {home}{cure or ": remove it"}')
        return known[name]

    def one_value(self, node: KdlNode) -> Any:
        """The only argument of a node."""
        if len(node.args) != 1:
            self.fail(node.offsets.get(1, node.offset), f'{node.name!r} takes one value, here are {len(node.args)}')
        return node.args[0]

    def add_values(self, block: Dict[str, Any], field: str, node: KdlNode) -> None:
        """All arguments of a node, after those of earlier nodes with the same meaning."""
        if not node.args:
            self.fail(node.offset, f'{node.name!r} needs a value')
        if field not in block:
            self.add(block, field, self.container([], node.offset), node.offset)
        for number, value in enumerate(node.args):
            self.add(block[field], None, value, node.offsets[number])

    def read_block(self, kind: str, node: KdlNode) -> Dict[str, Any]:
        """A block of one kind: its name, properties and children."""
        block = self.container({}, node.offset)
        is_named = 'name' in FIELDS_OF[kind]
        if len(node.args) > is_named:
            wanted = 'only its name' if is_named else 'no value'
            self.fail(node.offsets[int(is_named)], f'{node.name!r} takes {wanted} before the {{ }} block')
        if node.args:
            self.add(block, 'name', node.args[0], node.offsets[0])
        for name, value in node.props.items():
            at = node.offsets[name]
            _, form, _ = self.find_form(kind, name, at)
            if form not in ('value', 'list', 'json'):
                self.fail(at, f'{name!r} cannot be a property: write it in the {{ }} block')
            self.add_node(block, kind, KdlNode(name, [value], {}, [], at, {0: at}, {}, False))
        for child in node.children:
            self.add_node(block, kind, child)
        return block

    def read_map(self, node: KdlNode) -> Any:
        """Free names: each child is a key; its value is one argument, a list of several, or a block in turn."""
        if node.types:
            self.fail(node.offset, 'a type has no meaning here: remove it')
        if not (node.has_block or node.props):
            if len(node.args) < 2:
                return self.one_value(node)
            values = self.container([], node.offset)
            for number, value in enumerate(node.args):
                self.add(values, None, value, node.offsets[number])
            return values
        if node.args:
            self.fail(node.offsets[0], f'{node.name!r} takes either values or a {{ }} block')
        mapping = self.container({}, node.offset)
        for name, value in node.props.items():
            self.add(mapping, name, value, node.offsets[name])
        for child in node.children:
            if child.name in mapping:
                self.fail(child.offset, f'{printable(child.name)!r} stands twice: remove one')
            self.add(mapping, child.name, self.read_map(child), child.offset)
        return mapping

    def read_data(self, node: KdlNode, value: Any) -> Any:
        """User data: JSON in a text, as Torc writes it, or a plain number or word."""
        if not isinstance(value, str):
            return value
        try:
            return read_strict_json(value)
        except ValueError as error:
            reason = getattr(error, 'msg', str(error))
            return self.fail(node.offsets[0], f'{node.name!r} must hold JSON ({reason}): write text as "\\"text\\""')


def load_kdl(text: str) -> Tuple[Any, str, Positions]:
    """The value of a workflow in KDL, in the shape that it has in YAML."""
    text = normal_text(text)
    spec = KdlSpec(text)
    return spec.read_workflow(read_kdl_nodes(text, True)), text, spec.positions


# -------- any file --------

READERS = {'json': load_json, 'json5': load_json5, 'yaml': load_yaml, 'kdl': load_kdl, 'toml': load_toml}
TRIED_FORMATS = ('json', 'json5', 'yaml', 'kdl')     # where the name does not tell, as Torc tries them


def decode_document(data: bytes, path: str) -> str:
    """The text of a file; what is no UTF-8 text is an error that says what it is."""
    if not data.strip():
        raise BadInput(f'{path or "the input"} is empty', [Problem('the file is empty', 1, 1, path)])
    if data[:2] in (b'\xff\xfe', b'\xfe\xff'):
        raise BadInput(f'{path}: UTF-16', [Problem('this is UTF-16 text: save it as UTF-8', 1, 1, path)])
    at = data.find(b'\0')
    reason = 'a zero byte: this is a binary file, not a workflow'
    if at < 0:
        try:
            return data.decode('utf-8')
        except UnicodeDecodeError as error:
            at, reason = error.start, f'the byte 0x{data[error.start]:02x} is not UTF-8: save the file as UTF-8'
    line_start = data.rfind(b'\n', 0, at) + 1
    column = len(data[line_start:at].decode('utf-8', 'replace')) + 1
    problem = Problem(reason, data.count(b'\n', 0, at) + 1, column, path)
    raise BadInput(str(problem), [problem])


def read_as(text: str, format: str, path: str) -> Document:
    """Read a text in one format; its error carries the path."""
    try:
        value, text, positions = READERS[format](text)
    except BadInput as error:
        problem = error.problems[0]._replace(path=path)
        raise BadInput(str(problem), [problem]) from None
    if value is None and format == 'yaml':
        problem = Problem('the file holds no value, only blanks and comments', 1, 1, path)
        raise BadInput(str(problem), [problem])
    return Document(value, format, text, positions)


def read_document(data: bytes, path: str = '', format: str = '') -> Document:
    """Read a file's bytes. The format is told, or follows from the path, or is the first that gives a mapping."""
    text = decode_document(data, path)
    format = format or FORMATS.get(os.path.splitext(path)[1].lower(), '')
    if format:
        return read_as(text, format, path)
    furthest = Problem('neither JSON, JSON5, YAML nor KDL: none of them gives a mapping', 1, 1, path)
    for tried in TRIED_FORMATS:
        try:
            document = read_as(text, tried, path)
            if isinstance(document.value, dict):
                return document
        except BadInput as error:
            problem = error.problems[0]
            # The format that gets furthest is the one that was meant.
            if (problem.line, problem.column) > (furthest.line, furthest.column):
                message = f'not readable as JSON, JSON5, YAML or KDL; as {tried.upper()}: {problem.message}'
                furthest = problem._replace(message=message)
    raise BadInput(str(furthest), [furthest])


# -------- reading --------

# {name} or {name:format}, but not ${name}, which is the shell's.
PARAMETER = Expression(r'(?<!\$)\{([^{}:]+)(?::([^{}]*))?\}')


class Reading:
    """One reading of a spec: what all of its steps share, and where problems and warnings gather."""

    def __init__(self, document: Document, directory: str, max_instances: int) -> None:
        self.document = document
        self.directory = directory          # that tables, lists and inputs are relative to
        self.max_instances = max_instances
        self.problems: List[Problem] = []
        self.warnings: List[Problem] = []
        self.pending: List[Problem] = []    # fields that are not carried out yet; the message is their name
        self.variables: Dict[str, str] = {}
        self.tables: Dict[str, 'Instances'] = {}    # by path
        self.is_partial = False     # some names are not known, because of a mistake elsewhere
        self.suggestions_left = 50          # each compares a word with all names: not for 100,000 wrong ones

    def suggest(self, word: str, choices: Iterable[str]) -> str:
        """did_you_mean, within reason."""
        self.suggestions_left -= 1
        choices = list(choices)
        return did_you_mean(word, choices) if self.suggestions_left >= 0 and len(choices) <= 5000 else ''

    def fill(self, value: Any) -> Any:
        """A value with {variables} replaced in every text. One pass: what is put in is not looked at again."""
        if isinstance(value, str):
            return PARAMETER.sub(lambda match: self.variables.get(match.group(1), match.group()), value)
        if isinstance(value, list):
            return [self.fill(item) for item in value]
        if isinstance(value, dict):
            return {key: self.fill(item) for key, item in value.items()}
        return value


class Block(dict):
    """The given fields of one block, read. `raw` is the block in the document, for places."""

    def __init__(self, reading: Reading, where: str, raw: Any = None, entry: Any = '',
                 owner: Optional['Block'] = None) -> None:
        super().__init__()
        self.reading, self.where, self.raw = reading, where, raw
        self.entry = entry      # its number in a list of blocks, from 1, or its key in a mapping of them
        self.owner = owner      # block that it stands in

    def label(self) -> str:
        """How messages call it: job 'x', or job 3 without a name; after the block that it stands in."""
        name = self.raw.get('name') if isinstance(self.raw, dict) else None
        if self.where == 'workflow':
            return self.where
        entry = f"'{shorten(name)}'" if isinstance(name, str) else self.entry
        own = f'{self.where} {entry}'.rstrip()
        outer = self.owner.where if self.owner is not None else 'workflow'
        return own if outer in ('workflow', self.where.partition('.')[0]) else f'{self.owner.label()}: {own}'

    def value(self, name: str) -> Any:
        """A field's value, or its default."""
        return self[name] if name in self else FIELDS_OF[self.where][name].default

    def error(self, message: str, key: Any = None, item: Any = None) -> None:
        """Note a problem with a field of the block, or with an item of a field."""
        self.reading.problems.append(self.problem(message, key, item))

    def warn(self, message: str, key: Any = None, item: Any = None) -> None:
        """Note what may be a mistake."""
        self.reading.warnings.append(self.problem(message, key, item))

    def problem(self, message: str, key: Any, item: Any) -> Problem:
        """A message with the block's name before it, and its place."""
        place = self.reading.document.place
        line, column = place(self.raw, key) if item is None else place(self.raw.get(key), item)
        return Problem(f'{self.label()}: {message}', line, column)


def read_block(reading: Reading, where: str, raw: Any, entry: Any = '',
               owner: Optional[Block] = None) -> Block:
    """Read one block: every field by its type, unknown and missing ones noted."""
    block = Block(reading, where, raw, entry, owner)
    if not isinstance(raw, dict):
        block.error(f'must be a mapping, not {show_value(raw)}')
        return block
    fields = FIELDS_OF[where]
    for key, value in raw.items():
        field = fields.get(key) or old_field(block, key)
        if field is not None and value is not None:
            read_field(block, field, key, [value] if key == 'label' else value)
    for name in REQUIRED_OF[where]:
        if raw.get(name) is None:
            block.error(f'{name} is missing', name)
    return block


def old_field(block: Block, key: Any) -> Optional[Field]:
    """The field that an unknown name meant in earlier years, or None when it is an error."""
    where = block.where
    name = OLD_NAMES.get((where, key))
    if name and name not in block.raw:
        block.warn(f"'{key}' is an old name: write '{name}'", key)
        return FIELDS_OF[where][name]
    key = str(key)
    reason = REFUSED_NAMES.get((where, key)) or (f"write '{name}' only" if name else '')
    if not reason:
        hint = block.reading.suggest(key, FIELDS_OF[where])
        homes = [home for home in BLOCKS if key in FIELDS_OF[home] and home != where]
        reason = hint[2:] if hint else f"it is a field of {' and '.join(homes)}" if homes else ''
    block.error(f"unknown field '{shorten(key)}'" + (f', {reason}' if reason else ''), key)
    return None


def read_field(block: Block, field: Field, key: str, value: Any) -> None:
    """Read one field into its block, or note what is wrong with it."""
    kind, variables = TYPES[field.type], block.reading.variables
    if (field.where, key) in NO_EFFECT:
        block.warn(f'{key} has no effect: {NO_EFFECT[field.where, key]}', key)
    if variables and not kind.block and field.name not in ('variables', 'use_parameters'):
        value = block.reading.fill(value)
        if not field.is_template and kind.shape == 'one' and isinstance(value, str):
            warn_of_braces(block, key, value)
    try:
        block[field.name] = kind.read(value) if kind.shape == 'one' else SHAPES[kind.shape](block, kind, key, value)
    except ValueError as error:
        block.error(f'{field.name} {error}', key)
    if field.pending:
        note_pending(block, field, key)


def note_pending(block: Block, field: Field, key: str) -> None:
    """Note a field whose value asks for what this version does not carry out."""
    is_all, value = field.pending == ANY, block.get(field.name, False)
    if block.raw.get('enabled') is not False and (value is not False if is_all else value == field.pending):
        name, outer = f'{field.where}.{field.name}', field.where.partition('.')[0]
        if not is_all:
            name = f'{field.name}: {value}'
        elif is_pending_block(outer):
            name = outer
        block.reading.pending.append(block.problem('', key, None)._replace(message=name))


def describe_pending(pending: Sequence[Problem]) -> List[Problem]:
    """One warning of all such fields, or none."""
    names = ', '.join(dict.fromkeys(problem.message for problem in pending))
    message = f'accepted, but not in effect in this version: {names}'
    return [pending[0]._replace(message=message)] if names else []


def warn_of_braces(block: Block, key: str, text: str) -> None:
    """Where variables are used, a {name} that is none of them is likely a slip."""
    for match in PARAMETER.finditer(text):
        if IDENTIFIER.match(match.group(1)):
            hint = block.reading.suggest(match.group(1), block.reading.variables)
            block.warn(f"{key} holds '{match.group()}', which is no variable{hint}", key)


def read_list(block: Block, kind: Type, key: str, value: Any) -> Tuple[Any, ...]:
    """A list whose items have one type."""
    if not isinstance(value, list):
        example = f', such as [{shorten(value)}]' if isinstance(value, str) and value else ''
        raise ValueError(f'must be a list{example}, not {show_value(value)}')
    items = []
    for number, item in enumerate(value):
        try:
            items.append(kind.read(item))
        except ValueError as error:
            block.error(f'item {number + 1} of {key} {error}', key, number)
    return tuple(items)


def read_map(block: Block, kind: Type, key: str, value: Any) -> Dict[str, Any]:
    """A mapping whose values have one type."""
    if not isinstance(value, dict):
        raise ValueError(f'must be a mapping, not {show_value(value)}')
    items = {}
    for name, item in value.items():
        try:
            text = kind.key(name)
            items[text] = kind.read(item) if kind.read else \
                read_block(block.reading, kind.block, item, f"'{shorten(text)}'", block)
        except ValueError as error:
            block.error(f"'{shorten(str(name))}' of {key} {error}", key, name)
    return items


def read_blocks(block: Block, kind: Type, key: str, value: Any) -> List[Block]:
    """A list of blocks."""
    if not isinstance(value, list):
        raise ValueError(f'must be a list (each entry begins with "- "), not {show_value(value)}')
    return [read_block(block.reading, kind.block, raw, number, block) for number, raw in enumerate(value, 1)]


def read_inner(block: Block, kind: Type, key: str, value: Any) -> Block:
    """A block in a block."""
    return read_block(block.reading, kind.block, value, '', block)


SHAPES = {'list': read_list, 'map': read_map, 'block': read_inner, 'blocks': read_blocks}


def read_variables(workflow: Block) -> None:
    """Read the constants first: every other text may hold them."""
    variables = workflow.raw.get('variables')
    if not isinstance(variables, dict):     # absent, or wrong: read_block says so
        return
    for name, value in variables.items():
        if not isinstance(value, str):
            workflow.error(f"variable '{shorten(str(name))}' must be text: put it in quotes", 'variables', name)
            continue
        workflow.reading.variables[name] = value
        for match in PARAMETER.finditer(value):
            if IDENTIFIER.match(match.group(1)):
                workflow.error(f"variable '{name}' holds {match.group()}: it cannot refer to others", 'variables', name)


# -------- parameter values --------
#
# The value of a parameter is a native list, or text in Torc's grammar: a range, a list in brackets, @file, or one
# value. Values are int, float or text. What would make no instance at all, or a surprising one, is refused.

INTEGER_TEXT = Expression(r'[-+]?[0-9]{1,40}\Z')
NUMBER_TEXT = Expression(r'[-+]?(?:[0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})(?:[eE][-+]?[0-9]{1,4})?\Z')
LIST_ITEM = Expression(r"""\s*(?:'(.*?)'|"(.*?)"|([^,]*?))\s*(?:,|\Z)""", re.DOTALL)
NUMBER_FORMAT = Expression(r'(?:.?[<>=^])?[-+ ]?#?0?[0-9]{0,3}[,_]?(?:\.[0-9]{1,2})?[bdeEfFgGosxX%]?\Z')
MISSING = object()      # cell of a table whose row does not have the key

Value = Union[int, float, str]


class Axis(NamedTuple):
    """One parameter of some instances: its values, each for so many instances in turn, the whole again and again."""
    values: Sequence[Any]
    repeat: int


class Instances(NamedTuple):
    """Combinations of parameter values."""
    count: int
    axes: Dict[str, Axis]


NO_PARAMETERS = Instances(1, {})
UNKNOWN = Axis(('?',), 1)       # of a parameter with a mistake: the rest is checked all the same


def expand_values(value: Any, directory: str = '', limit: int = MAX_INSTANCES) -> List[Value]:
    """Values of one parameter as it stands in a spec. ValueError for what has none, or more than the limit."""
    if isinstance(value, str):
        return expand_value_text(value.strip(), directory, limit)
    if isinstance(value, list):
        if not value:
            raise ValueError('has no values: an empty list makes no instance')
        return [native_value(item) for item in check_count(value, limit)]
    return [native_value(value)]


def native_value(value: Any) -> Value:
    """One value that is not text in Torc's grammar."""
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        return read_text(value)
    if isinstance(value, (int, float)):
        if not math.isfinite(value):
            raise ValueError('holds NaN or infinity: put it in quotes if you mean the word')
        return int(value) if isinstance(value, int) else float(value)
    hint = ': put it in quotes if you mean the word' if value is None else ''
    raise ValueError(f'must be made of numbers and text, not {show_value(value)}{hint}')


def expand_value_text(text: str, directory: str, limit: int) -> List[Value]:
    """Values of a parameter that is written as text."""
    if not text:
        raise ValueError("is empty: write '' in a list, [''], for one empty text")
    if text[0] == '@':
        return check_count(read_value_list(text[1:].strip(), directory), limit)
    if text[0] == '{' and text[-1] == '}':
        inner = text[1:-1].strip()
        if ':' not in inner or ',' in inner:
            raise ValueError(f"'{shorten(text)}' is not a list of values: write [a, b], or 1:10 for a range")
        text = inner
    if text[0] == '[' and text[-1] == ']':
        return check_count(split_value_list(text), limit)
    return expand_range(text, limit) if ':' in text else [parse_value(text)]


def check_count(values: List[Any], limit: int) -> List[Any]:
    """The same values, unless they are too many."""
    check_instances(len(values), limit)
    return values


def check_instances(count: int, limit: int) -> None:
    """Refuse what would make more instances than the limit, before it makes them."""
    if count > limit:
        raise ValueError(f'would make {count:,} instances, more than the limit of {limit:,}: use fewer values, '
                         'or raise the limit with --max-instances')


def parse_value(text: str) -> Value:
    """One value: whole number, number, else the text. 1_000, 0x10, inf and nan are texts."""
    if INTEGER_TEXT.match(text):
        return int(text)
    if NUMBER_TEXT.match(text):
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(f'{text} is too large a number')
        return value
    return read_text(text)


def split_value_list(text: str) -> List[Value]:
    """'[1, a, "b,c"]' -> values. Quotes protect commas and keep numbers text."""
    inner = text[1:-1].strip()
    if not inner:
        raise ValueError('has no values: an empty list makes no instance')
    values: List[Value] = []
    position = 0
    while position < len(inner):
        match = LIST_ITEM.match(inner, position)
        position = match.end()
        single, double, bare = match.groups()
        if bare is None:
            values.append(read_text(single if single is not None else double))
        elif not bare:
            raise ValueError(f"'{shorten(text)}' has an empty item: write '' for an empty text")
        elif bare[0] in '[{':
            raise ValueError(f"'{shorten(text)}' holds a list or mapping: values are numbers and text")
        else:
            values.append(parse_value(bare))
    return values


def expand_range(text: str, limit: int) -> List[Value]:
    """'start:end' or 'start:end:step', both ends included."""
    parts = [part.strip() for part in text.split(':')]
    if not 2 <= len(parts) <= 3:
        raise ValueError(f"Invalid range format: '{shorten(text)}'. Expected 'start:end' or 'start:end:step', "
                         'or a list in [ ] for text')
    if len(parts) == 2 or not parts[2]:
        parts[2:] = ['1']
    if not all(NUMBER_TEXT.match(part) and math.isfinite(float(part)) for part in parts):
        raise ValueError(f"Invalid range values: '{shorten(text)}'. Could not parse as integer or float range: "
                         "put text with a colon in a list, ['a:b']")
    # Decimal arithmetic, so that 0:1:0.1 gives 0.3 and not 0.30000000000000004.
    start, end, step = (decimal.Decimal(part) for part in parts)
    if step == 0:
        raise ValueError(f"Step cannot be zero: '{shorten(text)}'")
    steps = (end - start) / step
    if steps < 0:
        raise ValueError(f"'{shorten(text)}' has no values: the step leads away from the end")
    if 0 < steps < 1:
        raise ValueError(f"'{shorten(text)}' has one value only: the step {parts[2]} is larger than the range")
    check_instances(int(steps) + 1, limit)
    make = int if all(INTEGER_TEXT.match(part) for part in parts) else float
    return [make(start + step * number) for number in range(int(steps) + 1)]


def read_value_list(path: str, directory: str) -> List[Value]:
    """Values in a file, one a line; blank lines and lines that begin with # do not count."""
    lines = read_table_text(path, directory).splitlines()
    values = [parse_value(line.strip()) for line in lines if line.strip() and not line.lstrip().startswith('#')]
    if not values:
        raise ValueError(f"'{shorten(path)}' has no values")
    return values


def read_table_text(path: str, directory: str) -> str:
    """Text of a file that a spec names, relative to the spec, else to the working directory."""
    try:
        found = os.path.join(directory, path)
        with open(found if os.path.exists(found) else path, encoding='utf-8-sig', newline='') as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise ValueError(f"'{shorten(path)}' cannot be read: {getattr(error, 'strerror', None) or error}") from None


def read_table(path: str, directory: str) -> Instances:
    """One instance per row of a .csv, .json, .jsonl or .ndjson file."""
    extension = os.path.splitext(path)[1].lower()
    if extension not in TABLE_READERS:
        raise ValueError(f"'{shorten(path)}' is not a table: use .csv, .json, .jsonl or .ndjson")
    text = read_table_text(path, directory)
    try:
        rows = TABLE_READERS[extension](text)
    except ValueError as error:
        raise ValueError(f"'{shorten(path)}': {error}") from None
    if not rows:
        raise ValueError(f"'{shorten(path)}' has no rows")
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        check_parameter_name(name)
    return Instances(len(rows), {name: Axis([row.get(name, MISSING) for row in rows], 1) for name in names})


def read_csv_rows(text: str) -> List[Dict[str, Value]]:
    """Rows of comma-separated values with a header."""
    try:
        lines = [row for row in csv.reader(io.StringIO(text, newline=''), strict=True) if row]
    except csv.Error as error:
        raise ValueError(str(error)) from None
    names = [name.strip() for name in lines[0]] if lines else []
    if not all(names) or len(set(names)) < len(names):
        raise ValueError('the header must name every column, each once')
    for number, row in enumerate(lines[1:], 1):
        if len(row) != len(names):
            raise ValueError(f'row {number} has {len(row)} fields, the header has {len(names)}')
    return [{name: parse_value(cell.strip()) for name, cell in zip(names, row)} for row in lines[1:]]


def read_json_rows(text: str) -> List[Dict[str, Value]]:
    """Rows of a JSON list of objects."""
    rows = parse_json(text)
    if not isinstance(rows, list):
        raise ValueError(f'must be a list of objects, not {show_value(rows)}')
    return [json_row(row, number) for number, row in enumerate(rows, 1)]


def read_json_lines(text: str) -> List[Dict[str, Value]]:
    """Rows of a file with one JSON object a line."""
    return [json_row(parse_json(line), number) for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def json_row(row: Any, number: int) -> Dict[str, Value]:
    """One row: numbers and text as they are, anything else as JSON text."""
    if not isinstance(row, dict):
        raise ValueError(f'row {number} must be an object, not {show_value(row)}')
    return {name: native_value(cell) if isinstance(cell, (int, float, str)) else format_json(read_json(cell))
            for name, cell in row.items()}


TABLE_READERS = {'.csv': read_csv_rows, '.json': read_json_rows, '.jsonl': read_json_lines, '.ndjson': read_json_lines}


def check_parameter_name(name: str) -> None:
    """A parameter is named between braces, so its name can hold none."""
    if not name or name != name.strip() or any(character in name for character in '{}:'):
        raise ValueError(f"parameter '{shorten(name)}' must be named without braces, colons and outer blanks")


def combine_values(values: Dict[str, List[Value]], mode: str, limit: int) -> Instances:
    """Combinations of parameters: all of them (the last parameter changes fastest), or zip: value by value."""
    lengths = {name: len(items) for name, items in values.items()}
    if mode == 'zip':
        if len(set(lengths.values())) > 1:
            told = ', '.join(f'{name} has {count}' for name, count in lengths.items())
            raise ValueError(f'parameter_mode zip needs the same number of values for all parameters: {told}')
        return Instances(max(lengths.values()), {name: Axis(items, 1) for name, items in values.items()})
    count = functools.reduce(operator.mul, lengths.values(), 1)
    check_instances(count, limit)
    axes, repeat = {}, count
    for name, items in values.items():
        repeat //= len(items)
        axes[name] = Axis(items, repeat)
    return Instances(count, axes)


def axis_column(axis: Axis, items: Sequence[Any], count: int) -> List[Any]:
    """Something made of each of an axis's values -> the same for each of `count` instances."""
    column = [item for item in items for _ in range(axis.repeat)] if axis.repeat > 1 else list(items)
    return column * (count // len(column))


def expand_parameters(parameters: Dict[str, Any], mode: str = 'product', directory: str = '',
                      limit: int = MAX_INSTANCES) -> List[Dict[str, Value]]:
    """Parameters as in a spec -> one dict of values per instance."""
    values, name = {}, ''
    try:
        for name, value in parameters.items():
            check_parameter_name(name)
            values[name] = expand_values(value, directory, limit)
        instances = combine_values(values, mode, limit) if values else NO_PARAMETERS
    except ValueError as error:
        raise BadInput(f"parameter '{shorten(name)}': {error}") from None
    if not values:
        return [{}]
    columns = [axis_column(axis, axis.values, instances.count) for axis in instances.axes.values()]
    return [dict(zip(values, row)) for row in zip(*columns)]


def format_value(value: Value, spec: str = '') -> str:
    """A parameter's value as text. Floats have their shortest digits, no exponent, no '.0'; or Python's formats."""
    if spec:
        if not NUMBER_FORMAT.match(spec):
            raise ValueError(f"'{shorten(spec)}' is not a format: write such as 03d or .2f")
        try:
            return format(value, spec)
        except ValueError:
            kind = 'text' if isinstance(value, str) else type(value).__name__
            raise ValueError(f"format '{spec}' does not suit the {kind} {shorten(str(value))}") from None
    if isinstance(value, float):
        text = format(decimal.Decimal(repr(value)), 'f')
        return text.rstrip('0').rstrip('.') if '.' in text else text
    return str(value)


def substitute(template: str, values: Dict[str, Value]) -> str:
    """A template with {name} and {name:format} replaced. One pass; ${name} and unknown names stay."""
    def replace(match: Any) -> str:
        name, spec = match.groups()
        return format_value(values[name], spec or '') if name in values else match.group()
    try:
        return PARAMETER.sub(replace, template)
    except ValueError as error:
        raise BadInput(f"'{shorten(template)}': {error}") from None


# -------- expansion --------
#
# A column is either one value that all instances share, or a list with one value for each.

RELATION = Expression(r'\$\{(files|user_data)\.(input|output)\.((?:[^{}]|\{[^{}]*\})*)\}')
REGEX_START = Expression(r'(?:\^((?:(?:[^\\.^$*+?{}\[\]|()]|\\[^A-Za-z0-9])(?![*?{]))*))?')    # literal, after ^
Column = Union[List[Any], Any]


def spread(column: Column, count: int) -> List[Any]:
    """A column as a list of `count` values."""
    return column if isinstance(column, list) else [column] * count


def zip_columns(columns: Sequence[Column], count: int) -> Column:
    """Columns side by side: one tuple, or a list of tuples when any of them varies."""
    if list in map(type, columns):
        return list(zip(*(spread(column, count) for column in columns)))
    return tuple(columns)


class Expansion:
    """One template block and its instances. Problems are noted once per template, not once per instance."""

    def __init__(self, block: Block, instances: Instances = NO_PARAMETERS, shared: Iterable[str] = ()) -> None:
        self.block = block
        self.instances = instances
        self.count = instances.count
        self.shared = shared        # names of the workflow's parameters: an unused one in a template is an error
        self.columns: Dict[Tuple[str, str, bool], List[str]] = {}

    def text(self, template: str, key: str, is_regex: bool = False) -> Column:
        """Column of a template. Values that go into a regular expression are escaped."""
        if '{' not in template:
            return template
        parts, columns, position = [], [], 0
        for match in PARAMETER.finditer(template):
            name, spec = match.groups()
            if name in self.instances.axes:
                parts.append(template[position:match.start()])
                columns.append(self.values(name, spec or '', is_regex, key))
                position = match.end()
            else:
                self.note_leftover(match.group(), name, key)
        parts.append(template[position:])
        return join_column(parts, columns)

    def values(self, name: str, spec: str, is_regex: bool, key: str) -> List[str]:
        """Column of one parameter's texts."""
        if (name, spec, is_regex) not in self.columns:
            axis = self.instances.axes[name]
            try:
                texts = format_values(axis.values, spec) if axis is not UNKNOWN else list(axis.values)
            except ValueError as error:
                self.block.error(f"parameter '{name}' in {key}: {error}", key)
                texts = ['?'] * len(axis.values)
            if is_regex:
                texts = [re.escape(text) for text in texts]
            self.columns[name, spec, is_regex] = axis_column(axis, texts, self.count)
        return self.columns[name, spec, is_regex]

    def note_leftover(self, token: str, name: str, key: str) -> None:
        """A {name} that is no parameter here. A declared parameter's is an error; awk, bash and JSON use braces too."""
        if name in self.shared:
            self.block.error(f"{key} holds {token}, but '{name}' is not used here: add it to use_parameters, "
                             'or declare it under parameters', key)
        elif IDENTIFIER.match(name):
            hint = self.block.reading.suggest(name, list(self.instances.axes) + list(self.block.reading.variables))
            self.block.warn(f'{key} holds {token}, which is no parameter and stays as it is{hint}', key)

    def texts(self, templates: Iterable[str], key: str) -> Column:
        """Column of tuples, from a list of templates."""
        return zip_columns([self.text(template, key) for template in templates], self.count)

    def mapping(self, templates: Dict[str, str], key: str) -> Column:
        """Column of dicts, from a mapping of templates."""
        columns = {name: self.text(template, key) for name, template in templates.items()}
        if not any(isinstance(column, list) for column in columns.values()):
            return columns
        rows = zip(*(spread(column, self.count) for column in columns.values()))
        return [dict(zip(columns, row)) for row in rows]

    def json(self, value: Any, key: str) -> Column:
        """Column of a JSON value in whose texts parameters are replaced. One that is shared comes in a 1-tuple."""
        if self.instances is NO_PARAMETERS:
            return (value,)
        columns: List[Column] = []

        def outline(part: Any) -> Any:
            if isinstance(part, str):
                columns.append(self.text(part, key))
                return part
            return [outline(item) for item in part] if isinstance(part, list) else \
                {name: outline(item) for name, item in part.items()} if isinstance(part, dict) else part

        def rebuild(part: Any, texts: Iterator[str]) -> Any:
            if isinstance(part, str):
                return next(texts)
            return [rebuild(item, texts) for item in part] if isinstance(part, list) else \
                {name: rebuild(item, texts) for name, item in part.items()} if isinstance(part, dict) else part

        outline(value)
        rows = zip_columns(columns, self.count)
        return [(rebuild(value, iter(row)),) for row in rows] if isinstance(rows, list) else (value,)


def join_column(parts: List[str], columns: List[List[str]]) -> Column:
    """Texts made of fixed parts with a column between each two."""
    if not columns:
        return parts[0]
    if len(columns) == 1:
        before, after = parts
        return [before + text + after for text in columns[0]]
    form = '%s'.join(part.replace('%', '%%') for part in parts)
    return [form % row for row in zip(*columns)]


def format_values(values: Sequence[Any], spec: str) -> List[str]:
    """Texts of a parameter's values."""
    missing = next((number for number, value in enumerate(values, 1) if value is MISSING), None)
    if missing:
        raise ValueError(f'row {missing} of the table has no such key')
    if not spec and isinstance(values[0], int) and isinstance(values[-1], int):
        return [str(value) if type(value) is int else format_value(value) for value in values]
    return [format_value(value, spec) for value in values]


def find_instances(block: Block, workflow: Block) -> Instances:
    """Which instances a block makes: by its own and the used parameters, by a table, or just one."""
    tables = [name for name in ('parameters_file', 'use_parameters_file') if block.get(name)]
    if not tables and not block.get('parameters') and not block.get('use_parameters'):
        return NO_PARAMETERS
    try:
        if not tables:
            return find_combinations(block, workflow)
        others = [name for name in ('parameters', 'parameter_mode', 'use_parameters') if name in block] + tables[1:]
        if others:
            raise ValueError(f'a table cannot be combined with {others[0]}')
        path = block.get('parameters_file') or workflow.get('parameters_file')
        if not path:
            raise ValueError('use_parameters_file needs parameters_file in the workflow')
        return find_table(block.reading, path)
    except ValueError as error:
        block.error(str(error), next(name for name in tables + ['parameters', 'use_parameters'] if name in block))
        block.reading.is_partial = True
        homes = (block.get('parameters', ()), block.get('use_parameters', ()), workflow.get('parameters', ()))
        return Instances(1, dict.fromkeys(itertools.chain(*homes), UNKNOWN))


def find_table(reading: Reading, path: str) -> Instances:
    """A table, read once."""
    if path not in reading.tables:
        reading.tables[path] = read_table(path, reading.directory)
    check_instances(reading.tables[path].count, reading.max_instances)
    return reading.tables[path]


def find_combinations(block: Block, workflow: Block) -> Instances:
    """Instances of a block's own parameters and those of the workflow that it uses; its own win."""
    reading = block.reading
    sources = {name: (value, block) for name, value in block.get('parameters', {}).items()}
    shared = workflow.get('parameters', {})
    for name in block.get('use_parameters', ()):
        if name not in shared:
            hint = reading.suggest(name, shared)
            raise ValueError(f"use_parameters names '{shorten(name)}', which is no parameter of the workflow{hint}")
        sources.setdefault(name, (shared[name], workflow))
    values = {}
    for name, (value, home) in sources.items():
        try:
            check_parameter_name(name)
            values[name] = expand_values(value, reading.directory, reading.max_instances)
        except ValueError as error:
            reading.is_partial = True
            home.error(f"parameter '{shorten(name)}' {error}", 'parameters', name)
    if len(values) < len(sources):
        return Instances(1, dict.fromkeys(sources, UNKNOWN))
    return combine_values(values, block.get('parameter_mode', 'product'), reading.max_instances)


# -------- planning --------


RELATED = (     # what, direction, fields of names and of regular expressions: jobs, then in the order of PlannedJob
    ('job',       'input',  'depends_on',       'depends_on_regexes'),
    ('file',      'input',  'input_files',      'input_file_regexes'),
    ('file',      'output', 'output_files',     'output_file_regexes'),
    ('user_data', 'input',  'input_user_data',  'input_user_data_regexes'),
    ('user_data', 'output', 'output_user_data', 'output_user_data_regexes'),
)


class Planner:
    """A plan in the making: name tables, shared sets, and the lists of the plan's body."""

    def __init__(self, reading: Reading, workflow: Block) -> None:
        self.reading = reading
        self.workflow = workflow
        self.names: Dict[str, Dict[str, int]] = {}      # 'job', 'file', ... -> name -> index
        self.files: List[Dict[str, Any]] = []
        self.user_data: List[Dict[str, Any]] = []
        self.jobs: List[PlannedJob] = []
        self.stdio: Dict[str, Dict[str, Any]] = {}      # by job name
        self.sets: Dict[Tuple[int, ...], int] = {}      # dependency sets
        self.kinds: Dict[Tuple[Any, ...], int] = {}
        self.kind_columns: Dict[Tuple[Any, ...], Column] = {}       # by the fields as they are written
        self.matches: Dict[Tuple[str, str], Tuple[int, ...]] = {}   # (noun, regex) -> indexes
        self.sorted_names: Dict[str, List[str]] = {}
        self.templates: List[Block] = []                # of jobs
        self.starts: List[int] = []                     # index of each template's first job
        self.shared = set(workflow.get('parameters', {}))           # that a template may use, if it says so
        self.declared = set(self.shared)                # names of all parameters

    def expand(self, where: str) -> List[Tuple[Expansion, Column]]:
        """Expand the names of all blocks of a kind, and index them."""
        expansions, names, counted = [], [], 0
        for block in self.workflow.get(LISTS[where], ()):
            instances = find_instances(block, self.workflow)
            self.declared.update(instances.axes)
            counted += instances.count if instances.axes else 0
            limit = self.reading.max_instances
            if counted > limit:
                self.workflow.error(f'{LISTS[where]} would make {counted:,} instances or more: the limit is {limit:,}. '
                                    'Use fewer values, or raise the limit with --max-instances', LISTS[where])
                break
            expansion = Expansion(block, instances, self.shared)
            column = expansion.text(block.get('name', ''), 'name')
            names += spread(column, expansion.count)
            expansions.append((expansion, column))
        self.names[where] = self.index(names, [(expansion.count, expansion.block) for expansion, _ in expansions])
        return expansions

    def index(self, names: List[str], templates: List[Tuple[int, Block]]) -> Dict[str, int]:
        """Names -> indexes. Notes those that cannot be, and those that stand twice."""
        index = dict(zip(names, range(len(names))))
        longest = max(map(len, names), default=0)
        if len(index) < len(names) or longest > MAX_NAME_CHARACTERS or UNSAFE_NAME.search(''.join(names)):
            first, seen = 0, {}
            for count, block in templates:
                self.check_names(names[first:first + count], block, seen)
                first += count
        return index

    def check_names(self, names: List[str], block: Block, seen: Dict[str, Block]) -> None:
        """Note the first name of a template that is a duplicate, and the first that is none."""
        bad = next((name for name in names if name and name_fault(name)), None)
        if bad and len(names) > 1:      # a single one has been noted by read_name
            block.error(f"the name '{shorten(bad)}' {name_fault(bad)}", 'name')
        twice = next((name for name in names if name and name in seen), None)
        if len(set(names)) < len(names):
            twice = collections.Counter(names).most_common(1)[0][0]
            block.error(f"parameters make several with the name '{shorten(twice)}': put every parameter into the name, "
                        'or collect with depends_on_regexes or input_file_regexes instead of parameters', 'name')
        elif twice is not None:
            line = self.reading.document.place(seen[twice].raw, 'name')[0]
            told = f', in line {line}' if line else ''
            block.error(f"the name '{shorten(twice)}' is taken{told}: give each its own", 'name')
        seen.update(dict.fromkeys(names, block))

    def index_declared(self, where: str) -> List[Block]:
        """Index the blocks of a kind that has no parameters."""
        blocks = self.workflow.get(LISTS[where], [])
        self.names[where] = self.index([block.get('name', '') for block in blocks], [(1, block) for block in blocks])
        return blocks

    # -- files and user data --

    def plan_files(self) -> None:
        """Expand the files."""
        for expansion, names in self.expand('file'):
            block = expansion.block
            columns = {'name': names, 'path': expansion.text(block.get('path', ''), 'path')}
            if 'identifier' in block:
                columns['identifier'] = expansion.text(block['identifier'], 'identifier')
            if 'st_mtime' in block:
                columns['st_mtime'] = block['st_mtime']
            self.files += self.records(columns, expansion.count)

    def plan_user_data(self) -> None:
        """Expand the user data."""
        for expansion, names in self.expand('user_data'):
            columns = {'name': names, 'is_ephemeral': expansion.block.value('is_ephemeral')}
            if 'data' in expansion.block:
                data = expansion.json(expansion.block['data'], 'data')
                columns['data'] = [value for value, in spread(data, expansion.count)]
            self.user_data += self.records(columns, expansion.count)

    @staticmethod
    def records(columns: Dict[str, Column], count: int) -> Iterator[Dict[str, Any]]:
        """One dict per instance."""
        return (dict(zip(columns, row)) for row in zip(*(spread(column, count) for column in columns.values())))

    # -- names to indexes --

    def find(self, expansion: Expansion, noun: str, names: Column, key: str) -> Column:
        """Column of names -> column of indexes. The first unknown name is noted, with how many more there are."""
        index = self.names[noun]
        if not isinstance(names, list):
            found = index.get(names)
            unknown = [names] if found is None else []
        else:
            found = list(map(index.get, names))
            unknown = [name for name, place in zip(names, found) if place is None] if None in found else []
        if unknown:
            self.note_unknown(expansion, noun, unknown, key)
            return ()
        return [(place,) for place in found] if isinstance(found, list) else (found,)

    def note_unknown(self, expansion: Expansion, noun: str, unknown: List[str], key: str) -> None:
        """A name that is declared nowhere."""
        if self.reading.is_partial:
            return
        hint = self.reading.suggest(unknown[0], self.names[noun])
        if not hint and PARAMETER.search(unknown[0]):
            hint = '; a template cannot be named: name its instances, or match them with a regular expression'
        more = f' (and {len(unknown) - 1:,} more)' if len(unknown) > 1 else ''
        expansion.block.error(f"{key}: there is no {noun} '{shorten(unknown[0])}'{more}{hint}", key)

    def find_matches(self, expansion: Expansion, noun: str, template: str, key: str) -> Column:
        """Column of a regular expression -> column of tuples of indexes."""
        patterns = expansion.text(template, key, is_regex=True)
        try:
            if not isinstance(patterns, list):
                return self.match(noun, patterns)
            return [self.match(noun, pattern) for pattern in patterns]
        except ValueError as error:
            expansion.block.error(f'{key}: {error}', key)
            return ()

    def match(self, noun: str, pattern: str) -> Tuple[int, ...]:
        """Indexes of the names in which a regular expression is found. Searched once, however many jobs have it."""
        if (noun, pattern) not in self.matches:
            search, index = parse_regex(pattern).search, self.names[noun]
            found = [index[name] for name in self.likely(noun, pattern) if search(name)]
            self.matches[noun, pattern] = tuple(sorted(found))
        if not self.matches[noun, pattern] and not self.reading.is_partial:
            raise ValueError(f"'{shorten(pattern)}' did not match any {noun} name")
        return self.matches[noun, pattern]

    def likely(self, noun: str, pattern: str) -> Iterable[str]:
        """Names that a regex may match, by its literal beginning: many regexes over many names stay cheap."""
        is_plain = '|' not in pattern and '(?' not in pattern
        start = re.sub(r'\\(.)', r'\1', REGEX_START.match(pattern).group(1) or '') if is_plain else ''
        if not start:
            return self.names[noun]
        if noun not in self.sorted_names:
            self.sorted_names[noun] = sorted(self.names[noun])
        names = self.sorted_names[noun]
        return names[first_from(names, start):first_from(names, start + chr(sys.maxunicode))]

    def relate(self, expansion: Expansion, noun: str, given: str, regexes: str, tokens: Sequence[Column]) -> Column:
        """Column of the indexes that a job's list, its regular expressions and its command name together."""
        block = expansion.block
        parts = [self.find(expansion, noun, expansion.text(name, given), given) for name in block.get(given, ())]
        parts += [self.find_matches(expansion, noun, regex, regexes) for regex in block.get(regexes, ())]
        return unite(parts + list(tokens), expansion.count)

    # -- jobs --

    def plan_jobs(self) -> None:
        """Expand the jobs; names first, since any job may name any other."""
        for expansion, names in self.expand('job'):
            self.templates.append(expansion.block)
            self.starts.append(len(self.jobs))
            self.plan_job(expansion, names)

    def plan_job(self, expansion: Expansion, names: Column) -> None:
        """One template's jobs."""
        block, count = expansion.block, expansion.count
        tokens: Dict[Tuple[str, str], List[Column]] = {}
        command = self.command(expansion, 'command', tokens)
        script = self.command(expansion, 'invocation_script', tokens) if 'invocation_script' in block else None
        env = expansion.mapping(block['env'], 'env') if block.get('env') else None
        related = [self.relate(expansion, noun, given, regexes, tokens.get((noun, way), ()))
                   if tokens or given in block or regexes in block else () for noun, way, given, regexes in RELATED]
        columns = (names, command, script, env, self.kind(expansion), self.intern(related[0], self.sets, sort=True),
                   self.named(expansion, 'failure_handler', 'failure_handler'),
                   block.value('cancel_on_blocking_job_failure'), block.value('supports_termination'), *related[1:])
        rows = zip_columns(columns, count)
        self.jobs += map(PlannedJob._make, spread(rows, count))
        if 'stdio' in block:
            self.stdio.update((name, dict(block['stdio'])) for name in spread(names, count))

    def command(self, expansion: Expansion, key: str, tokens: Dict[Tuple[str, str], List[Column]]) -> Column:
        """Column of a command in which ${files.input.NAME} and the like are replaced; each adds a relation."""
        template = expansion.block.get(key, '')
        if '${' not in template:
            return expansion.text(template, key)
        pieces: List[Column] = []
        position = 0
        for match in RELATION.finditer(template):
            pieces.append(expansion.text(template[position:match.start()], key))
            noun = 'file' if match.group(1) == 'files' else 'user_data'
            found = self.find(expansion, noun, expansion.text(match.group(3), key), key)
            tokens.setdefault((noun, match.group(2)), []).append(found)
            pieces.append(self.token_text(expansion, noun, found, key))
            position = match.end()
        pieces.append(expansion.text(template[position:], key))
        joined = zip_columns(pieces, expansion.count)
        return [''.join(row) for row in joined] if isinstance(joined, list) else ''.join(joined)

    def token_text(self, expansion: Expansion, noun: str, found: Column, key: str) -> Column:
        """What stands in a command for a file (its path) or user data (its value as JSON)."""
        def text(place: int) -> str:
            if noun == 'file':
                return self.files[place]['path']
            record = self.user_data[place]
            if 'data' not in record:
                raise ValueError(f"{key}: user_data '{shorten(record['name'])}' has no data to put here: list it under "
                                 'input_user_data or output_user_data, and read or write it while the job runs')
            return format_json(record['data'])
        try:
            return [text(place) for place, in found] if isinstance(found, list) else text(found[0]) if found else ''
        except ValueError as error:
            expansion.block.error(str(error), key)
            return ''

    def kind(self, expansion: Expansion) -> Column:
        """Column of indexes into the kinds of jobs."""
        block = expansion.block
        key = (block.get('resource_requirements'), block.get('priority'), block.get('scheduler'), block.get('labels'))
        if key not in self.kind_columns or expansion.instances is not NO_PARAMETERS:
            self.kind_columns[key] = self.find_kind(expansion)
        return self.kind_columns[key]

    def find_kind(self, expansion: Expansion) -> Column:
        """The same, for fields that have not been seen yet."""
        block = expansion.block
        resources = self.named(expansion, 'resource_requirements', 'resource_requirements')
        scheduler = self.named(expansion, 'slurm_scheduler', 'scheduler')
        labels = self.labels(expansion)
        if labels and 'scheduler' in block:
            expansion.block.error('a job with labels cannot name a scheduler: remove one', 'scheduler')
        columns = (resources, block.value('priority'), scheduler, labels)
        return self.intern(zip_columns(columns, expansion.count), self.kinds)

    def named(self, expansion: Expansion, noun: str, key: str) -> Column:
        """Column of indexes (or None) for a field that holds one name."""
        if key not in expansion.block:
            return None
        name = expansion.block[key]
        names = expansion.text(name, key) if FIELDS_OF['job'][key].is_template else name
        if noun == 'resource_requirements' and names == DEFAULT_REQUIREMENTS['name'] and names not in self.names[noun]:
            return None
        found = self.find(expansion, noun, names, key)
        return [place for place, in found] if isinstance(found, list) else found[0] if found else None

    def labels(self, expansion: Expansion) -> Column:
        """Column of sorted labels, or None."""
        def tidy(labels: Tuple[str, ...]) -> Optional[Tuple[str, ...]]:
            for label in labels:
                if not label or label != label.strip() or ',' in label or name_fault(label):
                    raise ValueError(f"label '{shorten(label)}' must be a word without commas and outer blanks")
            return tuple(sorted(set(labels))) or None
        try:
            labels = expansion.texts(expansion.block.get('labels', ()), 'labels')
            return [tidy(row) for row in labels] if isinstance(labels, list) else tidy(labels)
        except ValueError as error:
            expansion.block.error(str(error), 'labels')
            return None

    def intern(self, column: Column, store: Dict[Tuple[Any, ...], int], sort: bool = False) -> Column:
        """Column of tuples -> column of their numbers in a store; the empty set of prerequisites has none."""
        def number(row: Tuple[Any, ...]) -> Optional[int]:
            if sort:
                row = tuple(sorted(row))
            return store.setdefault(row, len(store)) if row else None
        return [number(row) for row in column] if isinstance(column, list) else number(column)

    def job_block(self, place: int) -> Block:
        """The template of a job."""
        return self.templates[first_from(self.starts, place + 1) - 1]


def first_from(items: Sequence[Any], item: Any) -> int:
    """Index of the first of some sorted items that is not less than this one."""
    low, high = 0, len(items)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if items[middle] < item else (low, middle)
    return low


LISTS = {TYPES[field.type].block: name
         for name, field in FIELDS_OF['workflow'].items() if TYPES[field.type].shape == 'blocks'}


def unite(parts: Sequence[Column], count: int) -> Column:
    """Columns of tuples -> one column of tuples without repeats, in order."""
    if len(parts) < 2:
        return parts[0] if parts else ()
    if not any(isinstance(part, list) for part in parts):
        return tuple(dict.fromkeys(itertools.chain.from_iterable(parts)))
    rows = zip(*(spread(part, count) for part in parts))
    return [tuple(dict.fromkeys(itertools.chain.from_iterable(row))) for row in rows]


# -------- checks --------


def check_producers(planner: Planner) -> None:
    """A file has one producer; and one path has one record, since jobs are linked by record."""
    producers: Dict[str, int] = {}
    for place, job in enumerate(planner.jobs):
        for file in job.output_files:
            first = producers.setdefault(planner.files[file]['path'], place)
            if first != place:
                name, other = shorten(planner.files[file]['name']), shorten(planner.jobs[first].name)
                planner.job_block(place).error(f"file '{name}' is written by both '{other}' and '{shorten(job.name)}': "
                                               'give each its own file')
    paths: Dict[str, str] = {}
    for file in planner.files:
        other = paths.setdefault(file['path'], file['name'])
        if other != file['name']:
            planner.workflow.warn(f"files '{shorten(other)}' and '{shorten(file['name'])}' have the same path: "
                                  'jobs are linked by the name of a file only', 'files')


def check_cycles(planner: Planner) -> None:
    """Note circles of jobs that wait for each other, through names, regexes, files and user data alike."""
    jobs, sets = planner.jobs, list(planner.sets)
    producers = find_producers(jobs)
    if not sets and not producers:
        return
    last = [members[-1] for members in sets]
    last_producer = {key: max(places) for key, places in producers.items()}

    # Most specs name a job after those that it waits for: then there can be no circle.
    if all((job.dependencies is None or last[job.dependencies] < place) and
           all(last_producer.get(key, -1) < place for key in input_keys(job)) for place, job in enumerate(jobs)):
        return

    def waits_for(node: Any) -> Iterable[Any]:
        if isinstance(node, int):
            named = jobs[node].dependencies
            return ([] if named is None else [('set', named)]) + input_keys(jobs[node])
        return sets[node[1]] if node[0] == 'set' else producers.get(node, ())

    for circle in find_circles(range(len(jobs)), waits_for, 10):
        names = [shorten(jobs[node].name) for node in circle if isinstance(node, int)]
        told = names if len(names) <= 20 else names[:19] + ['...']
        first = next(node for node in circle if isinstance(node, int))
        planner.job_block(first).error(f"waits for itself: {' -> '.join(told + names[:1])}")


def input_keys(job: PlannedJob) -> List[Tuple[str, int]]:
    """What a job reads."""
    return [('file', file) for file in job.input_files] + [('user_data', record) for record in job.input_user_data]


def find_producers(jobs: Sequence[PlannedJob]) -> Dict[Tuple[str, int], List[int]]:
    """('file' or 'user_data', index) -> jobs that write it."""
    producers: Dict[Tuple[str, int], List[int]] = {}
    for place, job in enumerate(jobs):
        for file in job.output_files:
            producers.setdefault(('file', file), []).append(place)
        for record in job.output_user_data:
            producers.setdefault(('user_data', record), []).append(place)
    return producers


def find_circles(nodes: Iterable[Any], waits_for: Callable[[Any], Iterable[Any]], most: int) -> List[List[Any]]:
    """Circles of a graph, at most so many: each as its nodes, the first waiting for the second."""
    circles: List[List[Any]] = []
    done: Set[Any] = set()
    told: Set[Any] = set()      # of entangled circles, one is told
    for start in nodes:
        trail, ahead = ([], []) if start in done else ([start], [iter(waits_for(start))])
        on_trail = set(trail)
        while trail:
            following = next(ahead[-1], None)
            if following is None:
                ahead.pop()
                done.add(trail[-1])
                on_trail.discard(trail.pop())
            elif following in on_trail:
                circle = trail[trail.index(following):]
                if told.isdisjoint(circle):
                    circles.append(circle)
                    told.update(circle)
                if len(circles) >= most:
                    return circles
            elif following not in done:
                trail.append(following)
                on_trail.add(following)
                ahead.append(iter(waits_for(following)))
    return circles


def check_fit(planner: Planner, skip_checks: bool) -> None:
    """Jobs whose resources fit no scheduler would wait for ever. Without the checks it is a warning."""
    schedulers = planner.workflow.get('slurm_schedulers', [])
    first_jobs: Dict[int, int] = {}
    for place, job in enumerate(planner.jobs if schedulers else ()):
        first_jobs.setdefault(job.kind, place)
    for (resources, _, scheduler, _), place in zip(planner.kinds, map(first_jobs.get, range(len(first_jobs)))):
        if resources is not None:
            requirements = planner.workflow['resource_requirements'][resources]
            candidates = schedulers if scheduler is None else [schedulers[scheduler]]
            faults = [misfit(requirements, candidate) for candidate in candidates]
            if all(faults):
                block = planner.job_block(place)
                told = '; '.join(faults[:3]) + ('; ...' if len(faults) > 3 else '')
                note = block.warn if skip_checks else block.error
                note(f'fits no scheduler: {told}: change the one or the other, or use --skip-checks',
                     'resource_requirements')


def misfit(requirements: Block, scheduler: Block) -> str:
    """Why a job with these resources cannot run in a scheduler's allocations, with both numbers, or ''."""
    name = f"'{shorten(scheduler.get('name', ''))}'"
    runtime, walltime = requirements.value('runtime'), scheduler.value('walltime')
    if parse_duration(runtime) > parse_walltime(walltime):
        return f'runtime {runtime} is longer than walltime {walltime} of {name}'
    memory, available = requirements.value('memory'), scheduler.get('mem')
    if available and 0 < parse_slurm_memory(available) < parse_memory(memory):
        return f'memory {memory} is more than mem {available} of {name}'
    gpus, gres = requirements.value('num_gpus'), (scheduler.get('gres') or '').strip()
    if gres and gpus > count_gpus(gres):
        return f'num_gpus {gpus} is more than gres {gres} of {name}'
    nodes, given = requirements.value('num_nodes'), scheduler.value('nodes')
    return f'num_nodes {nodes} is more than nodes {given} of {name}' if nodes > given else ''


def count_gpus(gres: str) -> int:
    """GPUs in Slurm's gres text: 'gpu', 'gpu:2', 'gpu:a100:4' (sbatch(1), --gres)."""
    match = re.search(r'(?:^|,)gpu(?::[A-Za-z][^:,]*)?(?::([0-9]+))?(?=$|,|\()', gres)
    return int(match.group(1) or 1) if match else 0


def check_node_counts(planner: Planner, skip_checks: bool) -> None:
    """A multi-node job takes whole allocations of the scheduler that it names and that an action starts."""
    workflow = planner.workflow
    started = {action.get('scheduler') for action in workflow.get('actions', ())
               if action.get('action_type') == 'schedule_nodes'}
    for resources, _, scheduler, _ in planner.kinds:
        if resources is None or scheduler is None:
            continue
        requirements, allocation = workflow['resource_requirements'][resources], workflow['slurm_schedulers'][scheduler]
        nodes, given = requirements.value('num_nodes'), allocation.value('nodes')
        if 1 < nodes < given and allocation.get('name') in started:
            note = requirements.warn if skip_checks else requirements.error
            note(f"num_nodes {nodes} is neither 1 nor nodes {given} of scheduler '{shorten(allocation['name'])}': "
                 'make them equal, or use --skip-checks', 'num_nodes')


# (field of execution_config, mode that refuses it, the value that it refuses or None: any)
EXECUTION_RULES = (
    ('limit_resources',         'slurm',  False),
    ('termination_signal',      'slurm',  None),
    ('sigterm_lead_seconds',    'slurm',  None),
    ('oom_exit_code',           'slurm',  None),
    ('srun_termination_signal', 'direct', None),
    ('enable_cpu_bind',         'direct', True),
)


def check_execution(workflow: Block) -> None:
    """Fields of execution_config that do not go with the mode, or with the actions."""
    config = workflow.get('execution_config') or Block(workflow.reading, 'execution_config', {})
    mode = config.get('mode', 'auto')
    effective = mode if mode != 'auto' else 'slurm' if workflow.get('slurm_schedulers') else 'direct'
    why = f'mode {mode}' if mode == effective else f'mode auto, which is {effective} here'
    for name, refusing, value in EXECUTION_RULES:
        if name in config and effective == refusing and (value is None or config[name] is value):
            shown = f'{name}: {json.dumps(value)}' if value is not None else name
            other = 'direct' if refusing == 'slurm' else 'slurm'
            config.error(f'{shown} does not go with {why}: remove it, or set mode: {other}', name)
    each_node = [action for action in workflow.get('actions', ()) if action.get('start_one_worker_per_node')]
    for action in each_node:
        if config.get('mode', 'direct') != 'direct':
            action.error(f'start_one_worker_per_node needs mode direct in execution_config, not {mode}',
                         'start_one_worker_per_node')
    if 'srun_mpi' in config and not any(action.get('action_type') == 'schedule_nodes' for action in each_node):
        config.error('srun_mpi needs a schedule_nodes action with start_one_worker_per_node: true', 'srun_mpi')


RESERVED_IDENTIFIERS = ('#torc-', '#software-', '#job-')


def check_identifiers(planner: Planner) -> None:
    """RO-Crate identifiers: of input files only, each once."""
    files = planner.files
    if not any('identifier' in file for file in files):
        return
    outputs = {file for job in planner.jobs for file in job.output_files}
    inputs = {file for job in planner.jobs for file in job.input_files}
    paths = {file['path']: place for place, file in enumerate(files)}
    seen: Dict[str, str] = {}
    for place, file in enumerate(files):
        if 'identifier' in file:
            fault = identifier_fault(file['identifier'], seen, paths.get(file['identifier'], place) != place)
            if not planner.workflow.value('enable_ro_crate'):
                fault = 'needs enable_ro_crate: true in the workflow'
            elif place in outputs:
                fault = 'is for input files only, and a job writes this one'
            elif place not in inputs and 'st_mtime' not in file:
                fault = 'is for input files only, and no job reads this one'
            if fault:
                planner.workflow.error(f"file '{shorten(file['name'])}': identifier {fault}", 'files')
            seen[file['identifier']] = file['name']


def identifier_fault(identifier: str, seen: Dict[str, str], is_path: bool) -> str:
    """Why a text cannot identify a file in an RO-Crate, or ''."""
    if not identifier.strip():
        return 'must not be empty'
    if identifier in ('ro-crate-metadata.json', './') or identifier.startswith(RESERVED_IDENTIFIERS):
        return f"'{shorten(identifier)}' is reserved"
    if identifier in seen:
        return f"'{shorten(identifier)}' is also that of file '{shorten(seen[identifier])}'"
    return f"'{shorten(identifier)}' is the path of another file" if is_path else ''


# -------- the plan's body --------


def plan_action(planner: Planner, action: Block) -> Dict[str, Any]:
    """One action."""
    trigger = action.get('trigger_type')
    expansion = Expansion(action)
    places = planner.relate(expansion, 'job', 'jobs', 'job_name_regexes', ())
    if trigger in JOB_TRIGGERS and not action.get('jobs') and not action.get('job_name_regexes'):
        expansion.block.error(f'{trigger} needs jobs or job_name_regexes', 'trigger_type')
    if trigger in TRIGGERS and trigger not in JOB_TRIGGERS and places:
        action.warn(f'{trigger} does not look at jobs: they have no effect', 'trigger_type')
    is_commands = action.get('action_type') == 'run_commands'
    return {'trigger_type': trigger, 'action_type': action.get('action_type'),
            'action_config': plan_commands(action) if is_commands else plan_allocation(planner, expansion),
            'job_indexes': sorted(places) if trigger in JOB_TRIGGERS else None,
            'persistent': action.value('persistent')}


SCHEDULE_FIELDS = ('scheduler', 'scheduler_type', 'num_allocations', 'start_one_worker_per_node', 'max_parallel_jobs')


def plan_commands(action: Block) -> Dict[str, Any]:
    """Settings of a run_commands action."""
    if not action.get('commands'):
        action.error('run_commands needs commands', 'action_type')
    for name in SCHEDULE_FIELDS:
        if name in action:
            action.warn(f'{name} has no effect in run_commands', name)
    return {'commands': list(action.get('commands', ()))}


def plan_allocation(planner: Planner, expansion: Expansion) -> Dict[str, Any]:
    """Settings of a schedule_nodes action."""
    action = expansion.block
    if action.get('action_type') == 'schedule_nodes':
        for name in ('scheduler', 'scheduler_type'):
            if not action.raw.get(name):
                expansion.block.error(f'schedule_nodes needs {name}', 'action_type')
        if 'commands' in action:
            action.warn('commands has no effect in schedule_nodes', 'commands')
    scheduler = None
    if action.get('scheduler_type') == 'slurm' and 'scheduler' in action:
        found = planner.find(expansion, 'slurm_scheduler', action['scheduler'], 'scheduler')
        scheduler = found[0] if found else None
    config = {'scheduler': scheduler, **{name: action.value(name) for name in SCHEDULE_FIELDS[1:]}}
    return {name: value for name, value in config.items() if value is not None or name == 'scheduler'}


def complete(block: Block) -> Dict[str, Any]:
    """A block with its defaults."""
    values = {name: block.value(name) for name in FIELDS_OF[block.where]}
    return {name: value for name, value in values.items() if value is not None}


def plan_monitor(monitor: Optional[Block]) -> Dict[str, Any]:
    """Complete settings of the monitor. Absent or empty is on; the old form counts only without `jobs`."""
    if not monitor:
        return {**complete(Block(None, 'resource_monitor')), 'enabled': True, 'compute_node': None,
                'jobs': complete(Block(None, 'resource_monitor.jobs'))}
    settings = {name: monitor.value(name) for name in FIELDS_OF['resource_monitor']
                if ('resource_monitor', name) not in NO_EFFECT}
    for name in ('jobs', 'compute_node'):
        part = monitor.get(name)
        settings[name] = None if part is None else {field: part.value(field) for field in FIELDS_OF[part.where]}
    if settings['enabled'] is None and settings['jobs'] is None and 'granularity' not in monitor:
        settings['jobs'] = complete(Block(None, 'resource_monitor.jobs'))
        settings['enabled'] = True
    if settings['enabled'] is None:
        settings['enabled'] = settings['jobs'] is None
    return settings


def plan_rules(handler: Block) -> str:
    """Rules of a failure handler as JSON text."""
    rules = []
    for rule in handler.get('rules', ()):
        given = {name: rule[name] for name in FIELDS_OF['rule'] if rule.get(name)}
        rules.append({**given, 'max_retries': rule.value('max_retries')})
    return format_json(rules)


def plan_workflow(planner: Planner, workflow: Block) -> Dict[str, Any]:
    """The workflow itself."""
    copied = ('name', 'user', 'description', 'project', 'metadata', 'dynamic_jobs', 'access_groups')
    body = {name: workflow[name] for name in copied if name in workflow}
    body.update((name, workflow.value(name)) for name in WORKFLOW_DEFAULTS)
    if workflow.value('enable_ro_crate'):
        body['enable_ro_crate'] = True
    if workflow.get('env'):
        body['env'] = plan_workflow_env(planner)
    if workflow.get('slurm_defaults'):
        body['slurm_defaults'] = workflow['slurm_defaults']
    config = dict(workflow.get('execution_config', {}))
    if planner.stdio or config.get('job_stdio_overrides'):
        config['job_stdio_overrides'] = {**config.get('job_stdio_overrides', {}), **planner.stdio}
    if config:
        body['execution_config'] = config
    body['resource_monitor_config'] = plan_monitor(workflow.get('resource_monitor'))
    return body


def plan_workflow_env(planner: Planner) -> Dict[str, str]:
    """The workflow's environment; a {parameter} with one value gives it, one with more gives its text as written."""
    reading, workflow = planner.reading, planner.workflow
    axes = {}
    for name, value in workflow.get('parameters', {}).items():
        try:
            values = expand_values(value, reading.directory, reading.max_instances)
        except ValueError:
            values = []     # noted where the parameter is used; unused ones do no harm
        axes[name] = Axis(values if len(values) == 1 else [value if isinstance(value, str) else format_json(value)], 1)
    expansion = Expansion(workflow, Instances(1, axes))
    return {name: spread(expansion.text(text, 'env'), 1)[0] for name, text in workflow['env'].items()}


def find_times(planner: Planner) -> None:
    """Times of the files that jobs read, as seen from the working directory, where the spec does not tell them."""
    for place in {file for job in planner.jobs for file in job.input_files}:
        record = planner.files[place]
        if 'st_mtime' not in record:
            try:
                record['st_mtime'] = os.stat(record['path']).st_mtime
            except (OSError, ValueError):
                pass    # it is not there yet, or (ValueError) no file can have this path


def check_workflow(workflow: Block, declared: Iterable[str]) -> None:
    """What concerns the workflow as a whole."""
    for name in sorted(set(workflow.reading.variables).intersection(declared)):
        workflow.error(f"'{name}' is both a variable and a parameter: rename one", 'variables', name)
    if 'parameters' in workflow and 'parameters_file' in workflow:
        workflow.error('parameters and parameters_file cannot be combined', 'parameters_file')
    for name in workflow.get('slurm_defaults', ()):
        if name.lower() in SCHEDULER_OPTIONS:
            workflow.error(f"slurm_defaults cannot set '{name}': set it in slurm_schedulers", 'slurm_defaults', name)
    groups = workflow.get('access_groups', ())
    if len(set(groups)) < len(groups):
        workflow.error('access_groups names a group twice', 'access_groups')
    for requirements in workflow.get('resource_requirements', ()):
        doubt = doubt_memory(requirements.get('memory', ''))
        if doubt:
            requirements.warn(f'memory {doubt}', 'memory')
    for handler in workflow.get('failure_handlers', ()):
        for rule in handler.get('rules', ()):
            if not rule.get('exit_codes') and not rule.get('match_all_exit_codes'):
                rule.warn('never applies: give it exit_codes, or match_all_exit_codes: true')


def read_plan(document: Document, directory: str = '', max_instances: int = MAX_INSTANCES,
              skip_checks: bool = False) -> Plan:
    """Check and expand a spec. Raises BadInput with everything that is wrong, each problem with its place."""
    reading = Reading(document, directory, max_instances)
    raw = document.value
    if not isinstance(raw, dict):
        message = f'a workflow must be a mapping with name and jobs, not {show_value(raw)}'
        raise BadInput(message, [Problem(message, 1, 1)])
    read_variables(Block(reading, 'workflow', raw))
    workflow = read_block(reading, 'workflow', raw)
    planner = Planner(reading, workflow)
    requirements = planner.index_declared('resource_requirements')
    schedulers = planner.index_declared('slurm_scheduler')
    handlers = planner.index_declared('failure_handler')
    planner.plan_files()
    planner.plan_user_data()
    planner.plan_jobs()
    body = {
        'workflow': plan_workflow(planner, workflow),
        'files': planner.files,
        'user_data': planner.user_data,
        'resource_requirements': [complete(block) for block in requirements],
        'slurm_schedulers': [complete(block) for block in schedulers],
        'failure_handlers': [{'name': block.get('name'), 'rules': plan_rules(block)} for block in handlers],
        'kinds': [[*kind[:3], list(kind[3]) if kind[3] else None] for kind in planner.kinds],
        'dependency_sets': [list(members) for members in planner.sets],
        'jobs': planner.jobs,
        'actions': [plan_action(planner, action) for action in workflow.get('actions', ())],
    }
    check_workflow(workflow, planner.declared)
    check_execution(workflow)
    check_identifiers(planner)
    check_producers(planner)
    check_cycles(planner)
    if not reading.problems:
        check_fit(planner, skip_checks)
        check_node_counts(planner, skip_checks)
    summary = summarize(planner)
    if reading.problems:
        raise_problems(reading, summary)
    find_times(planner)
    return Plan(body, reading.warnings, summary, describe_pending(reading.pending))


def raise_problems(reading: Reading, summary: Dict[str, Any]) -> None:
    """Raise what is wrong with a spec, in the order of the file, each once."""
    problems = sorted(dict.fromkeys(reading.problems), key=lambda problem: (problem.line, problem.column))
    message = str(problems[0]) if len(problems) == 1 else f'{len(problems):,} problems in the workflow file'
    raise BadInput(message, problems, warnings=reading.warnings, summary=summary)


def summarize(planner: Planner) -> Dict[str, Any]:
    """What `create --dry-run` tells about a spec."""
    workflow = planner.workflow
    schedulers, actions = workflow.get('slurm_schedulers', []), workflow.get('actions', [])
    return {
        'workflow_name': workflow.get('name', ''),
        'workflow_description': workflow.get('description'),
        'job_count': len(planner.jobs),
        'job_count_before_expansion': len(workflow.get('jobs', [])),
        'file_count': len(planner.files),
        'file_count_before_expansion': len(workflow.get('files', [])),
        'user_data_count': len(planner.user_data),
        'resource_requirements_count': len(workflow.get('resource_requirements', [])),
        'slurm_scheduler_count': len(schedulers),
        'action_count': len(actions),
        'has_schedule_nodes_action': any(action.get('action_type') == 'schedule_nodes' for action in actions),
        'job_names': [job.name for job in planner.jobs],
        'scheduler_names': [scheduler.get('name', '') for scheduler in schedulers],
    }


# -------- execution plan --------


class Allocation(NamedTuple):
    """A schedule_nodes action, as the execution plan sees it."""
    trigger_type: str
    jobs: Optional[Sequence[int]]   # that on_jobs_ready waits for, all of them
    told: Dict[str, Any]            # scheduler, scheduler_type, num_allocations


def execution_plan(job_names: Sequence[str], prerequisites: Sequence[Iterable[int]],
                   allocations: Sequence[Allocation]) -> Dict[str, Any]:
    """In which order jobs become ready: one event for each distinct set of prerequisites, the start first.

    Jobs of a circle never become ready and are in no event. An action fires when the last of its jobs is ready.
    """
    groups: Dict[Tuple[int, ...], List[int]] = {}
    for place, members in enumerate(prerequisites):
        groups.setdefault(tuple(sorted(members)), []).append(place)
    order = order_events(groups)
    ids = name_events(order, job_names)
    event_of = {place: event for event, members in enumerate(order) for place in groups[members]}
    events = []
    for event, members in enumerate(order):
        before = sorted({event_of[place] for place in members})
        finished, ready = ([job_names[place] for place in places] for places in (members, groups[members]))
        events.append(make_event(ids[event], finished, ready, [ids[number] for number in before]))
        for number in before:
            events[number]['unlocks_events'].append(ids[event])
    for allocation in allocations:
        fires = find_firing(allocation, event_of)
        if fires is not None and fires < len(events):
            gates = allocation.jobs or groups[order[fires]]
            ready = [job_names[place] for place in groups[order[fires]] if place in gates]
            events[fires]['scheduler_allocations'].append(dict(allocation.told, job_names=ready))
    return {'total_events': len(events), 'total_jobs': len(job_names),
            'root_events': [event['id'] for event in events if not event['depends_on_events']],
            'leaf_events': [event['id'] for event in events if not event['unlocks_events']], 'events': events}


def order_events(groups: Dict[Tuple[int, ...], List[int]]) -> List[Tuple[int, ...]]:
    """Sets of prerequisites in the order in which they are met, breadth first; those that never are, left out."""
    missing = {members: len(members) for members in groups}
    waiting: Dict[int, List[Tuple[int, ...]]] = {}
    for members in groups:
        for place in members:
            waiting.setdefault(place, []).append(members)
    order = [members for members in groups if not members]
    for members in order:   # grows while it is walked
        for place in groups[members]:
            for later in waiting.get(place, ()):
                missing[later] -= 1
                if not missing[later]:
                    order.append(later)
    return order


def name_events(order: Sequence[Tuple[int, ...]], job_names: Sequence[str]) -> List[str]:
    """Ids of events as Torc makes them, each once."""
    ids: Dict[str, int] = {}
    for members in order:
        names = [job_names[place] for place in members]
        prefix = os.path.commonprefix(names).rstrip('_0123456789')
        stem = 'start' if not names else f'after_{names[0]}' if len(names) == 1 else \
            f'after_{prefix}_jobs' if len(prefix) >= 3 else f'after_{names[0]}_and_{len(names) - 1}_more'
        number, name = 1, stem
        while name in ids:
            number += 1
            name = f'{stem}_{number}'
        ids[name] = number
    return list(ids)


def make_event(name: str, finished: List[str], ready: List[str], before: List[str]) -> Dict[str, Any]:
    """One event."""
    trigger, told = {'type': 'WorkflowStart'}, 'Workflow Start'
    if finished:
        trigger = {'type': 'JobsComplete', 'data': {'jobs': finished}}
        told = f"'{finished[0]}' completes" if len(finished) == 1 else \
            f"{len(finished)} jobs complete: {', '.join(finished[:3])}{', ...' if len(finished) > 3 else ''}"
    return {'id': name, 'trigger': trigger, 'trigger_description': told, 'scheduler_allocations': [],
            'jobs_becoming_ready': ready, 'depends_on_events': before, 'unlocks_events': []}


def find_firing(allocation: Allocation, event_of: Dict[int, int]) -> Optional[int]:
    """The event in which an allocation is made, or None."""
    if allocation.trigger_type == 'on_workflow_start':
        return 0
    if allocation.trigger_type != 'on_jobs_ready' or not allocation.jobs:
        return None
    events = [event_of.get(place) for place in allocation.jobs]
    return None if None in events else max(events)


# -------- help --------


PARAMETER_HELP = """\
Parameters make many jobs (files, user data) from one entry:

    jobs:
      - name: "train_{lr}_{seed:02d}"
        command: "train --lr {lr} --seed {seed}"
        parameters:
          lr: [0.1, 0.01]
          seed: "1:5"

makes ten jobs: all combinations, in the order in which the parameters stand, the last one changing fastest.

Values
    [1, 2.5, adam]      a list; 'quoted' items stay text and may hold commas
    1:10   0:1:0.25     a range, with or without a step; both ends are included; text with a colon goes into a list
    @names.txt          one value a line; blank lines and lines that begin with # do not count
    5   abc             one value
In text
    {name}              the value; {name:03d} {name:.2f} {name:>8} format it as Python does
    ${name}             is the shell's and stays; so do other braces; values in regular expressions are escaped
    {...} works in      {templates}
Combinations
    parameter_mode: zip             value by value instead of all combinations; the lists must be equally long
    use_parameters: [seed]          takes parameters of the workflow; a parameter of the job itself wins
    parameters_file: runs.csv       one instance per row of a table: .csv with a header, .json (list of objects), .jsonl
    use_parameters_file: true       takes the table of the workflow
Collecting
    Do not parameterise a job that waits for all others: give it depends_on_regexes or input_file_regexes.

More than {limit} instances are refused, unless --max-instances N lifts the limit.
"""


def format_parameter_help() -> str:
    """Text of `help parameters`."""
    templates = ', '.join(dict.fromkeys(field.name for field in FIELDS if field.is_template))
    lines = [line.rstrip() for line in re.findall(r'\S.{0,75}(?:\s|\Z)', templates)]
    text = PARAMETER_HELP.replace('{templates}', ('\n' + ' ' * 24).join(lines))
    return text.replace('{limit}', f'{MAX_INSTANCES:,}')


def format_default(field: Field) -> str:
    """A field's default for people: 'required', '', or the value as in a spec."""
    if field.default in (None, REQUIRED):
        return '' if field.default is None else 'required'
    return field.default if isinstance(field.default, str) else json.dumps(field.default)


def describe_field(field: Field) -> str:
    """What a field means, and what of it is not in effect yet."""
    if is_pending(field):
        return f'{field.help}; not in effect yet'
    return f'{field.help}; not in effect yet: {field.pending}' if field.pending else field.help


def format_field_help() -> str:
    """Text of `help spec`: every field of a workflow file."""
    lines = ['A workflow file is YAML, JSON, JSON5, KDL or TOML. Its fields (* required, {} takes parameters):']
    for where, title in BLOCKS.items():
        lines += ['', title]
        for field in FIELDS_OF[where].values():
            marks = ('*' if field.default is REQUIRED else ' ') + (' {}' if field.is_template else '   ')
            default = format_default(field) if field.default is not REQUIRED else ''
            meaning = describe_field(field) + (f' [{default}]' if default else '')
            lines.append(f'  {field.name:28} {marks} {meaning}')
            kind = TYPES[field.type]
            if '|' in kind.words:
                lines.append(f'      {kind.words}')
    return '\n'.join(lines) + '\n'


# ======== 6. Schema: the tables, as SQL text ========
#
# The nouns are Torc's. A column's declared type says how its value is stored and spoken: JSON TEXT (any JSON value;
# SQL NULL is JSON null), BOOL INTEGER (0 or 1), STATUS INTEGER (a code of STATUSES, spoken as its name). The Store
# reads columns and types back from the database, so that there is no second list of them in Python.
#
# Who waits for whom is kept in sets: jobs with the same prerequisites point at one dep_set, which counts how many of
# its members are unfinished. Finishing a job touches the sets that it is a member of, never the jobs that wait: a
# barrier of 1,000 x 1,000 jobs is 1,000 members and one counter. What claims look at is kept in job_kind, so that a
# claim looks at kinds (few), never at all ready jobs (many).

SCHEMA_VERSION = 5

SCHEMA = """
CREATE TABLE workflow (
    id                      INTEGER PRIMARY KEY AUTOINCREMENT,
    name                    TEXT NOT NULL,
    user                    TEXT NOT NULL,              -- the owner
    description             TEXT,
    project                 TEXT,
    metadata                JSON TEXT,
    timestamp               TEXT NOT NULL,              -- of creation, RFC 3339
    submission_directory    TEXT,                       -- of the client that created it; relative paths start there
    env                     JSON TEXT,                  -- for all its jobs
    execution_config        JSON TEXT,
    resource_monitor_config JSON TEXT,
    slurm_defaults          JSON TEXT,
    dynamic_jobs            JSON TEXT,
    use_pending_failed      BOOL INTEGER NOT NULL DEFAULT 0,
    enable_ro_crate         BOOL INTEGER,
    compute_node_expiration_buffer_seconds         INTEGER,        -- accepted, without effect
    compute_node_wait_for_new_jobs_seconds         INTEGER NOT NULL DEFAULT 90,   -- a runner without work leaves after it
    compute_node_ignore_workflow_completion        BOOL INTEGER NOT NULL DEFAULT 0,
    compute_node_wait_for_healthy_database_minutes INTEGER NOT NULL DEFAULT 20,
    compute_node_min_time_for_new_jobs_seconds     INTEGER NOT NULL DEFAULT 300,
    run_id                  INTEGER NOT NULL DEFAULT 0, -- run generation: 0 until the first initialize
    is_canceled             BOOL INTEGER NOT NULL DEFAULT 0,
    is_archived             BOOL INTEGER NOT NULL DEFAULT 0,
    is_run_zero             BOOL INTEGER NOT NULL DEFAULT 0  -- its run was begun by no reset: 0 means it too
);
CREATE INDEX workflow_by_name ON workflow (name);
CREATE INDEX workflow_by_user ON workflow (user);

CREATE TABLE resource_requirements (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    workflow_id  INTEGER NOT NULL REFERENCES workflow (id) ON DELETE CASCADE,
    name         TEXT NOT NULL,
    num_cpus     INTEGER NOT NULL DEFAULT 1,            -- CPUs, GPUs and memory are per node
    num_gpus     INTEGER NOT NULL DEFAULT 0,
    num_nodes    INTEGER NOT NULL DEFAULT 1,
    memory       TEXT NOT NULL DEFAULT '1m',
    runtime      TEXT NOT NULL DEFAULT 'PT1M',
    memory_bytes INTEGER NOT NULL,                      -- memory and runtime as numbers
    runtime_s    INTEGER NOT NULL,
    is_implicit  BOOL INTEGER NOT NULL DEFAULT 0        -- the placeholder 'default' that every workflow has: never a limit
);
CREATE INDEX resource_requirements_of ON resource_requirements (workflow_id, name);

CREATE TABLE slurm_scheduler (
    id                    INTEGER PRIMARY KEY AUTOINCREMENT,
    workflow_id           INTEGER NOT NULL REFERENCES workflow (id) ON DELETE CASCADE,
    name                  TEXT,
    account               TEXT NOT NULL,
    gres                  TEXT,
    mem                   TEXT,
    nodes                 INTEGER NOT NULL DEFAULT 1,
    ntasks_per_node       INTEGER,
    partition             TEXT,
    qos                   TEXT,
    tmp                   TEXT,
    walltime              TEXT NOT NULL DEFAULT '01:00:00',
    extra                 TEXT,
    serialize_allocations BOOL INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX slurm_scheduler_of ON slurm_scheduler (workflow_id);

CREATE TABLE local_scheduler (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    workflow_id INTEGER NOT NULL REFERENCES workflow (id) ON DELETE CASCADE,
    name        TEXT,
    memory      TEXT,
    num_cpus    INTEGER
);
CREATE INDEX local_scheduler_of ON local_scheduler (workflow_id);

CREATE TABLE scheduled_compute_node (
    id                  INTEGER PRIMARY KEY AUTOINCREMENT,
    workflow_id         INTEGER NOT NULL REFERENCES workflow (id) ON DELETE CASCADE,
    scheduler_id        INTEGER NOT NULL,               -- the Slurm job
    scheduler_config_id INTEGER NOT NULL,               -- the slurm_scheduler it was made from
    scheduler_type      TEXT NOT NULL,
    status              TEXT NOT NULL                   -- pending, active, complete, canceled
);
CREATE INDEX scheduled_compute_node_of ON scheduled_compute_node (workflow_id, status);

CREATE TABLE failure_handler (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    workflow_id INTEGER NOT NULL REFERENCES workflow (id) ON DELETE CASCADE,
    name        TEXT NOT NULL,
    rules       TEXT NOT NULL,                          -- JSON, kept as the text it came as
    UNIQUE (workflow_id, name)
);

CREATE TABLE compute_node (
    id                  INTEGER PRIMARY KEY AUTOINCREMENT,
    workflow_id         INTEGER NOT NULL REFERENCES workflow (id) ON DELETE CASCADE,
    hostname            TEXT NOT NULL,
    pid                 INTEGER NOT NULL,               -- of the runner
    start_time          TEXT NOT NULL,
    end_time            TEXT,                           -- when its allocation ends
    duration_seconds    REAL,
    is_active           BOOL INTEGER,
    num_cpus            INTEGER NOT NULL,
    memory_gb           REAL NOT NULL,
    num_gpus            INTEGER NOT NULL,
    num_nodes           INTEGER NOT NULL,
    time_limit          TEXT,
    scheduler_config_id INTEGER,
    compute_node_type   TEXT NOT NULL,
    scheduler           JSON TEXT,
    labels              JSON TEXT,
    sample_count        INTEGER,
    peak_cpu_percent    REAL,
    avg_cpu_percent     REAL,
    peak_memory_bytes   INTEGER,
    avg_memory_bytes    INTEGER,
    identity            TEXT,                           -- boot id and start ticks of the runner's process: tells a reused pid
    lease_until         REAL                            -- silent beyond this time, the node counts as gone; NULL: never
);
CREATE INDEX compute_node_of ON compute_node (workflow_id);
CREATE INDEX compute_node_active ON compute_node (lease_until) WHERE is_active = 1;

CREATE TABLE job_kind (
    id                       INTEGER PRIMARY KEY AUTOINCREMENT,
    workflow_id              INTEGER NOT NULL REFERENCES workflow (id) ON DELETE CASCADE,
    resource_requirements_id INTEGER NOT NULL REFERENCES resource_requirements (id),   -- which stay while jobs need them
    priority                 INTEGER NOT NULL DEFAULT 0,
    scheduler_id             INTEGER,                   -- the slurm_scheduler that its jobs are bound to
    labels                   JSON TEXT                  -- sorted, unique; NULL is none
);
CREATE INDEX job_kind_of ON job_kind (workflow_id, resource_requirements_id, priority);
CREATE INDEX job_kind_requirements ON job_kind (resource_requirements_id);

CREATE TABLE dep_set (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    workflow_id INTEGER NOT NULL REFERENCES workflow (id) ON DELETE CASCADE,
    digest      TEXT NOT NULL,                          -- SHA-256 of the sorted member ids
    pending     INTEGER NOT NULL DEFAULT 0,             -- members that have not finished
    failed      INTEGER NOT NULL DEFAULT 0,             -- members that have finished badly
    UNIQUE (workflow_id, digest)
);

CREATE TABLE job (
    id                             INTEGER PRIMARY KEY AUTOINCREMENT,
    workflow_id                    INTEGER NOT NULL REFERENCES workflow (id) ON DELETE CASCADE,
    name                           TEXT NOT NULL,
    command                        TEXT NOT NULL,
    invocation_script              TEXT,
    env                            JSON TEXT,           -- the workflow's, overlaid by its own
    status                         STATUS INTEGER NOT NULL DEFAULT 0,
    kind_id                        INTEGER NOT NULL,    -- job_kind; unchecked, so that it needs no index of all jobs
    failure_handler_id             INTEGER REFERENCES failure_handler (id) ON DELETE SET NULL,
    explicit_set_id                INTEGER,             -- dep_set as asked for
    dep_set_id                     INTEGER,             -- dep_set with what files and user data imply, made by initialize
    cancel_on_blocking_job_failure BOOL INTEGER NOT NULL DEFAULT 1,
    supports_termination           BOOL INTEGER NOT NULL DEFAULT 0,
    attempt_id                     INTEGER NOT NULL DEFAULT 1,
    origin                         TEXT,                -- NULL, retry, spawn
    start_time                     TEXT,
    compute_node_id                INTEGER REFERENCES compute_node (id) ON DELETE SET NULL,
    input_hash                     TEXT                 -- of what the last claim handed out
);
CREATE INDEX job_by_status ON job (workflow_id, status);
CREATE INDEX job_ready ON job (kind_id, id) WHERE status = 2;   -- the order of claims
CREATE INDEX job_waiting ON job (dep_set_id) WHERE dep_set_id IS NOT NULL;
CREATE INDEX job_by_explicit_set ON job (explicit_set_id) WHERE explicit_set_id IS NOT NULL;
CREATE INDEX job_by_node ON job (compute_node_id) WHERE compute_node_id IS NOT NULL;
CREATE INDEX job_by_handler ON job (failure_handler_id) WHERE failure_handler_id IS NOT NULL;

CREATE TABLE dep_member (
    dep_set_id INTEGER NOT NULL REFERENCES dep_set (id) ON DELETE CASCADE,
    job_id     INTEGER NOT NULL REFERENCES job (id) ON DELETE CASCADE,
    PRIMARY KEY (dep_set_id, job_id)
) WITHOUT ROWID;
CREATE INDEX dep_member_by_job ON dep_member (job_id);

CREATE TABLE spawn (                                    -- jobs that another job made while it ran
    job_id      INTEGER PRIMARY KEY REFERENCES job (id) ON DELETE CASCADE,
    workflow_id INTEGER NOT NULL REFERENCES workflow (id) ON DELETE CASCADE,
    caller_id   INTEGER NOT NULL REFERENCES job (id) ON DELETE CASCADE,
    lineage     TEXT NOT NULL,
    generation  INTEGER NOT NULL                        -- from 1 within the lineage; one for each call
);
CREATE INDEX spawn_of ON spawn (workflow_id, lineage);
CREATE INDEX spawn_by_caller ON spawn (caller_id);

CREATE TABLE file (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    workflow_id INTEGER NOT NULL REFERENCES workflow (id) ON DELETE CASCADE,
    name        TEXT NOT NULL,
    path        TEXT NOT NULL,
    st_mtime    REAL,                                   -- as last seen; NULL: not seen
    identifier  TEXT                                    -- RO-Crate @id
);
CREATE INDEX file_of ON file (workflow_id, name);

CREATE TABLE user_data (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    workflow_id  INTEGER NOT NULL REFERENCES workflow (id) ON DELETE CASCADE,
    name         TEXT NOT NULL,
    is_ephemeral BOOL INTEGER NOT NULL DEFAULT 0,       -- cleared when the jobs that make it are to run again
    data         JSON TEXT
);
CREATE INDEX user_data_of ON user_data (workflow_id, name);

CREATE TABLE job_input_file (
    job_id  INTEGER NOT NULL REFERENCES job (id) ON DELETE CASCADE,
    file_id INTEGER NOT NULL REFERENCES file (id) ON DELETE CASCADE,
    PRIMARY KEY (job_id, file_id)
) WITHOUT ROWID;
CREATE INDEX job_input_file_by_file ON job_input_file (file_id);

CREATE TABLE job_output_file (
    job_id  INTEGER NOT NULL REFERENCES job (id) ON DELETE CASCADE,
    file_id INTEGER NOT NULL REFERENCES file (id) ON DELETE CASCADE,
    PRIMARY KEY (job_id, file_id)
) WITHOUT ROWID;
CREATE INDEX job_output_file_by_file ON job_output_file (file_id);

CREATE TABLE job_input_user_data (
    job_id       INTEGER NOT NULL REFERENCES job (id) ON DELETE CASCADE,
    user_data_id INTEGER NOT NULL REFERENCES user_data (id) ON DELETE CASCADE,
    PRIMARY KEY (job_id, user_data_id)
) WITHOUT ROWID;
CREATE INDEX job_input_user_data_by_record ON job_input_user_data (user_data_id);

CREATE TABLE job_output_user_data (
    job_id       INTEGER NOT NULL REFERENCES job (id) ON DELETE CASCADE,
    user_data_id INTEGER NOT NULL REFERENCES user_data (id) ON DELETE CASCADE,
    PRIMARY KEY (job_id, user_data_id)
) WITHOUT ROWID;
CREATE INDEX job_output_user_data_by_record ON job_output_user_data (user_data_id);

CREATE TABLE workflow_action (
    id                INTEGER PRIMARY KEY AUTOINCREMENT,
    workflow_id       INTEGER NOT NULL REFERENCES workflow (id) ON DELETE CASCADE,
    trigger_type      TEXT NOT NULL,                    -- one of TRIGGERS
    action_type       TEXT NOT NULL,                    -- one of ACTION_TYPES
    action_config     JSON TEXT NOT NULL,
    trigger_count     INTEGER NOT NULL DEFAULT 0,       -- due when it reaches required_triggers
    required_triggers INTEGER NOT NULL DEFAULT 1,
    executed          BOOL INTEGER NOT NULL DEFAULT 0,  -- taken by a node
    executed_at       TEXT,
    executed_by       INTEGER,                          -- that node
    is_reported       BOOL INTEGER NOT NULL DEFAULT 0,  -- that node has told how it ended
    persistent        BOOL INTEGER NOT NULL DEFAULT 0,  -- once for every node instead of once
    is_recovery       BOOL INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX workflow_action_of ON workflow_action (workflow_id, trigger_type);

CREATE TABLE action_job (
    action_id  INTEGER NOT NULL REFERENCES workflow_action (id) ON DELETE CASCADE,
    job_id     INTEGER NOT NULL REFERENCES job (id) ON DELETE CASCADE,
    is_counted BOOL INTEGER NOT NULL DEFAULT 0,         -- a job counts once, however often it gets ready or ends
    PRIMARY KEY (action_id, job_id)
) WITHOUT ROWID;
CREATE INDEX action_job_by_job ON action_job (job_id);

CREATE TABLE action_execution (
    action_id       INTEGER NOT NULL REFERENCES workflow_action (id) ON DELETE CASCADE,
    compute_node_id INTEGER NOT NULL,                   -- a node that has taken a persistent action
    is_reported     BOOL INTEGER NOT NULL DEFAULT 0,    -- ... and has told how it ended
    PRIMARY KEY (action_id, compute_node_id)
) WITHOUT ROWID;

CREATE TABLE result (
    id                INTEGER PRIMARY KEY AUTOINCREMENT,
    workflow_id       INTEGER NOT NULL REFERENCES workflow (id) ON DELETE CASCADE,
    job_id            INTEGER NOT NULL REFERENCES job (id) ON DELETE CASCADE,
    run_id            INTEGER NOT NULL,
    attempt_id        INTEGER NOT NULL DEFAULT 1,
    compute_node_id   INTEGER NOT NULL,                 -- a node's results outlive the node
    return_code       INTEGER NOT NULL,
    exec_time_minutes REAL NOT NULL,
    completion_time   TEXT NOT NULL,
    status            STATUS INTEGER NOT NULL,
    peak_memory_bytes INTEGER,
    avg_memory_bytes  INTEGER,
    peak_cpu_percent  REAL,
    avg_cpu_percent   REAL,
    is_current        BOOL INTEGER NOT NULL DEFAULT 1,  -- the job's latest, and not undone by a reset
    reason            TEXT,                             -- of a failure, for people
    is_interrupted    BOOL INTEGER NOT NULL DEFAULT 0,  -- stopped because its runner was: spends no retry
    UNIQUE (job_id, run_id, attempt_id)
);
CREATE INDEX result_of ON result (workflow_id);

CREATE TABLE event (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    workflow_id INTEGER NOT NULL REFERENCES workflow (id) ON DELETE CASCADE,
    timestamp   INTEGER NOT NULL,                       -- milliseconds since the epoch
    data        JSON TEXT NOT NULL
);
CREATE INDEX event_of ON event (workflow_id, timestamp);

CREATE TABLE slurm_stats (
    id                   INTEGER PRIMARY KEY AUTOINCREMENT,
    workflow_id          INTEGER NOT NULL REFERENCES workflow (id) ON DELETE CASCADE,
    job_id               INTEGER NOT NULL REFERENCES job (id) ON DELETE CASCADE,
    run_id               INTEGER NOT NULL,
    attempt_id           INTEGER NOT NULL DEFAULT 1,
    slurm_job_id         TEXT,
    max_rss_bytes        INTEGER,                       -- the rest is what sacct knew; NULL: nothing
    max_vm_size_bytes    INTEGER,
    max_disk_read_bytes  INTEGER,
    max_disk_write_bytes INTEGER,
    ave_cpu_seconds      REAL,
    node_list            TEXT,
    UNIQUE (job_id, run_id, attempt_id)
);
CREATE INDEX slurm_stats_of ON slurm_stats (workflow_id);

CREATE TABLE remote_worker (
    workflow_id INTEGER NOT NULL REFERENCES workflow (id) ON DELETE CASCADE,
    worker      TEXT NOT NULL,                          -- [user@]host[:port]
    PRIMARY KEY (workflow_id, worker)
) WITHOUT ROWID;

CREATE TABLE ro_crate_entity (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    workflow_id INTEGER NOT NULL REFERENCES workflow (id) ON DELETE CASCADE,
    file_id     INTEGER REFERENCES file (id) ON DELETE SET NULL,
    entity_id   TEXT NOT NULL,                          -- @id within the crate
    entity_type TEXT NOT NULL,
    metadata    JSON TEXT NOT NULL,
    UNIQUE (workflow_id, entity_id)
);
CREATE UNIQUE INDEX ro_crate_entity_of_file ON ro_crate_entity (workflow_id, file_id) WHERE file_id IS NOT NULL;

CREATE TABLE task (
    id             INTEGER PRIMARY KEY AUTOINCREMENT,
    workflow_id    INTEGER NOT NULL REFERENCES workflow (id) ON DELETE CASCADE,
    operation      TEXT NOT NULL,                       -- name of the operation that runs on its own
    request        JSON TEXT NOT NULL,                  -- its parameters
    status         TEXT NOT NULL,                       -- queued, running, succeeded, failed
    requested_by   TEXT NOT NULL,
    created_at_ms  INTEGER NOT NULL,                    -- milliseconds since the epoch
    started_at_ms  INTEGER,
    finished_at_ms INTEGER,
    error          TEXT
);
CREATE UNIQUE INDEX task_active ON task (workflow_id) WHERE status IN ('queued', 'running');    -- one at a time
CREATE INDEX task_of ON task (workflow_id);

CREATE TABLE access_group (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    name        TEXT NOT NULL UNIQUE,
    description TEXT,
    created_at  TEXT NOT NULL,
    is_system   BOOL INTEGER NOT NULL DEFAULT 0         -- the group of the administrators, filled by the server's options
);
INSERT INTO access_group (name, description, created_at, is_system)
    VALUES ('admin', 'System administrators', strftime('%Y-%m-%dT%H:%M:%fZ', 'now'), 1);

CREATE TABLE user_group_membership (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    group_id   INTEGER NOT NULL REFERENCES access_group (id) ON DELETE CASCADE,
    user_name  TEXT NOT NULL,
    role       TEXT NOT NULL DEFAULT 'member',          -- one of GROUP_ROLES
    created_at TEXT NOT NULL,
    UNIQUE (group_id, user_name)
);
CREATE INDEX user_group_membership_of ON user_group_membership (user_name);

CREATE TABLE workflow_access_group (
    workflow_id INTEGER NOT NULL REFERENCES workflow (id) ON DELETE CASCADE,
    group_id    INTEGER NOT NULL REFERENCES access_group (id) ON DELETE CASCADE,
    created_at  TEXT NOT NULL,
    PRIMARY KEY (workflow_id, group_id)
) WITHOUT ROWID;
CREATE INDEX workflow_access_group_by_group ON workflow_access_group (group_id);

CREATE TABLE admin_audit_log (                          -- outlives the workflows that it speaks of
    id               INTEGER PRIMARY KEY AUTOINCREMENT,
    user_name        TEXT NOT NULL,
    timestamp        INTEGER NOT NULL,                  -- milliseconds since the epoch
    sql_text         TEXT NOT NULL,
    is_write         BOOL INTEGER NOT NULL,
    allow_full_table BOOL INTEGER NOT NULL,
    rows_affected    INTEGER,
    committed        BOOL INTEGER NOT NULL,
    success          BOOL INTEGER NOT NULL,
    error            TEXT
);

CREATE TABLE identity (                                 -- one row, made with the database and never changed
    id TEXT NOT NULL                                    -- tells this database and its copies from all others
);
INSERT INTO identity (id) VALUES (lower(hex(randomblob(16))));

CREATE VIEW job_view AS
    SELECT job.id AS id, job.workflow_id AS workflow_id, job.name AS name, job.command AS command,
           ifnull(job.invocation_script, '') AS invocation_script, job.env AS env, job.status AS status,
           job.cancel_on_blocking_job_failure AS cancel_on_blocking_job_failure,
           job.supports_termination AS supports_termination,
           job_kind.resource_requirements_id AS resource_requirements_id,
           ifnull(job_kind.scheduler_id, 0) AS scheduler_id, ifnull(job.failure_handler_id, 0) AS failure_handler_id,
           job.attempt_id AS attempt_id, job_kind.priority AS priority, job.origin AS origin,
           job_kind.labels AS labels, job.start_time AS start_time, job.compute_node_id AS compute_node_id
    FROM job CROSS JOIN job_kind ON job_kind.id = job.kind_id;

CREATE VIEW result_view AS
    SELECT result.*, job.name AS job_name FROM result CROSS JOIN job ON job.id = result.job_id;
"""

# Version -> the SQL that leads to it from the version before.
MIGRATIONS = {
    2: 'ALTER TABLE result ADD COLUMN reason TEXT;',
    3: 'ALTER TABLE result ADD COLUMN is_interrupted BOOL INTEGER NOT NULL DEFAULT 0;',
    4: """CREATE TABLE identity (id TEXT NOT NULL);
          INSERT INTO identity (id) VALUES (lower(hex(randomblob(16))));""",
    5: 'ALTER TABLE workflow ADD COLUMN is_run_zero BOOL INTEGER NOT NULL DEFAULT 0;',
}


# ======== 7. Store: the only code that speaks to the workflow database ========
#
# One process opens the database, through one connection, in one thread; a second opener is refused. Whatever is
# answered to a caller is on disk before: WAL with synchronous=FULL, which costs one fsync a transaction (TRUNCATE
# where a file system refuses WAL). Every change happens inside transaction(); a verb that fails inside a savepoint()
# leaves nothing behind. Rows come back as dicts in which NULL columns are left out.
#
# What happened is also told to those who listen: verbs append to Store.news, a savepoint or transaction that fails takes
# its part back, and the server takes the list after the commit. It is empty as long as nobody listens.
#
# An administrator's own SQL runs in execute_foreign(), between two savepoints and under an authorizer, which SQLite asks while
# it compiles a statement. What it refuses, and the words that admin_sql() refuses before, keep our transaction ours.

PRAGMAS = (
    ('locking_mode', 'EXCLUSIVE'),  # before the first access: no shared memory file, no second process
    ('journal_mode', 'WAL'),
    ('synchronous', 'FULL'),        # an answer means: on disk
    ('foreign_keys', 'ON'),
    ('secure_delete', 'OFF'),       # EL 8 builds zero-fill freed pages; we store no secrets
    ('temp_store', 'MEMORY'),
    ('trusted_schema', 'OFF'),      # a file from elsewhere calls no function with effects; since SQLite 3.31, passed over before
    ('cache_size', '-65536'),       # KiB
    ('wal_autocheckpoint', '4000'), # pages: a fourth of the checkpoints, a tenth of a completion's time; 16 MB beside the database
)
# How many jobs of each status a workflow has: runners ask in every turn. Counted once, then kept up to date
# by temporary triggers, in memory: databases without runners pay nothing, and a rollback undoes it too.
JOB_COUNTERS = (
    'CREATE TEMP TABLE job_count (workflow_id INTEGER, status INTEGER, count INTEGER NOT NULL, '
    'PRIMARY KEY (workflow_id, status)) WITHOUT ROWID',
    'CREATE TEMP TRIGGER job_count_added AFTER INSERT ON main.job BEGIN '
    'UPDATE job_count SET count = count + 1 WHERE workflow_id = new.workflow_id AND status = new.status; END',
    'CREATE TEMP TRIGGER job_count_removed AFTER DELETE ON main.job BEGIN '
    'UPDATE job_count SET count = count - 1 WHERE workflow_id = old.workflow_id AND status = old.status; END',
    'CREATE TEMP TRIGGER job_count_moved AFTER UPDATE OF status ON main.job WHEN new.status <> old.status '
    'BEGIN '
    'UPDATE job_count SET count = count - 1 WHERE workflow_id = old.workflow_id AND status = old.status; '
    'UPDATE job_count SET count = count + 1 WHERE workflow_id = new.workflow_id AND status = new.status; END',
)
BUSY_TIMEOUT_S = 0.2                # a longer wait is the caller's choice
FOREIGN_SQL_S = 5.0                 # an administrator's statement may hold up everybody so long; one call of a function of SQLite, longer
FOREIGN_SQL_STEPS = 10000           # of SQLite's machine between looks at the clock
MAX_FOREIGN_BYTES = 64 * 1024 ** 2  # of one answer, about
MAX_NEWS = 4000                     # of one transaction, fewer than a feed keeps; of more only the number is kept
READING_ACTIONS = frozenset([20, 21, 31, 33])   # READ, SELECT, FUNCTION, RECURSIVE (sqlite.org/c3ref/c_alter_table.html)
WRITING_ACTIONS = frozenset([9, 18, 23])        # DELETE, INSERT, UPDATE
FORBIDDEN_FUNCTIONS = frozenset(['load_extension', 'fts3_tokenizer'])
CELL_KINDS = {'INTEGER': ('integer',), 'STATUS': ('integer',), 'BOOL': ('integer',), 'REAL': ('real', 'integer')}     # others: text
CELL_TYPES = {'env': dict, 'labels': list, 'action_config': dict, 'request': dict}     # of JSON that verbs look into
MOST_FOREIGN_ID = 2 ** 53           # SQLite gives ids above the highest: after its last one, nothing could be added
PRIVATE_COLUMNS = frozenset(['identity', 'lease_until', 'is_implicit', 'memory_bytes', 'runtime_s', 'is_current',
                             'is_interrupted', 'is_reported', 'identifier', 'request', 'requested_by',
                             'is_system', 'is_run_zero'])


class TableColumn(NamedTuple):
    """One column of a table or view, as the database describes it."""
    name: str
    codec: str      # first word of the declared type: JSON, BOOL, STATUS, or an SQL type


def decode_cell(codec: str, value: Any) -> Any:
    """A stored value as it is spoken."""
    if value is None:
        return None
    if codec == 'JSON':
        return json.loads(value)
    if codec == 'BOOL':
        return bool(value)
    if codec == 'STATUS':
        return STATUS_NAMES[value]
    return value


def encode_cell(codec: str, value: Any) -> Any:
    """A spoken value as it is stored."""
    if value is None:
        return None
    if codec == 'JSON':
        return format_json(value)
    if codec == 'BOOL':
        return int(value)
    if codec == 'STATUS':
        return STATUS_CODES[value]
    return value


class News(NamedTuple):
    """Something that happened to a workflow, for those who listen."""
    workflow_id: int
    event_type: str
    severity: str           # one of SEVERITIES
    timestamp: int          # milliseconds since the epoch
    data: Dict[str, Any]


class ForeignAnswer(NamedTuple):
    """What an administrator's statement brought."""
    columns: List[str]
    rows: List[Tuple]
    changed: int                # rows that it changed itself
    tables: Set[str]            # that it wrote to


class Store:
    """The workflow database. All verbs of the Service run on one."""

    def __init__(self, path: str, now: Callable[[], float] = time.time) -> None:
        """Open the database file, or make it. BadInput if it is something else, Conflict if another process has it."""
        self.path = path
        self.file_path = os.path.abspath(path)  # of the database file; another one if `path` is in memory
        self.snapshots = None               # type: Any  # the SnapshotWriter of a database in memory
        self.now = now                      # the clock; seconds since the epoch
        self.caller = ''                    # who asks, for events and new workflows; set for each request
        self.is_admin = True                # ... may use what is for administrators; whoever opens the file may
        self.knows_users = False            # callers are told apart: groups are managed by those who may
        self.enforces_access = False        # who is no administrator sees workflows of his own and of his groups only
        self.reload_users = None            # type: Optional[Callable[[], int]]  # read the password file again; how many users
        self.allows_sql = self.allows_sql_writes = True     # ... of which SQL, and SQL that changes something
        self.watched = frozenset()          # type: Any  # ids of the workflows whose news somebody wants; anything with `in`
        self.news = []                      # type: List[Union[News, int]]  # of this transaction; int: a workflow's, beyond MAX_NEWS
        self.traffic = None                 # type: Any  # what the server counts, if one serves this store
        self._guard = None                  # type: Optional[ForeignGuard]
        self._depth = 0                     # of savepoints
        self._columns = {}                  # type: Dict[str, List[TableColumn]]
        self._descriptor = -1               # of the main file, for copies
        prepare_database_file(path)
        self._file = file_identity(path)    # before it is opened: it may be replaced until it is locked
        self._db = open_database(path)
        try:
            self._db.execute('BEGIN IMMEDIATE')     # takes the lock that holds until close()
            self._db.execute('COMMIT')
            prepare_schema(self._db, path)
        except sqlite3.Error as error:
            self._db.close()
            raise explain_database_error(error, path) from None
        except TorcError:
            self._db.close()
            raise

    def close(self) -> None:
        """Give the database back, with everything in its main file."""
        self._db.close()
        if self._descriptor >= 0:   # last: closing any descriptor of a file drops its locks (fcntl(2))
            os.close(self._descriptor)
            self._descriptor = -1

    def copy_to(self, path: str) -> None:
        """Write the whole database, as it is now, to another file. Between transactions only."""
        os.close(open_new_private(path, os.O_WRONLY | os.O_TRUNC))
        if sqlite3.sqlite_version_info >= (3, 27):
            self._db.execute('VACUUM INTO ?', (path,))
        else:
            keep_copy(self._db, path)

    @property
    def changes(self) -> int:
        """A number that grows with each change."""
        return self._db.total_changes + self.value('PRAGMA schema_version')

    def main_file(self) -> int:
        """Descriptor of the main file, to be read only; it stays good when the file is removed."""
        if self._descriptor < 0:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptor

    def freeze(self) -> bool:
        """Checkpoint, and keep the main file as it is until thaw(): changes go to the write-ahead log.

        Between transactions only. False where there is no such log: the next transaction changes the file.
        """
        self._db.execute('PRAGMA wal_autocheckpoint = 0')
        is_busy, pages, _ = self._db.execute('PRAGMA wal_checkpoint(TRUNCATE)').fetchone()
        if is_busy:
            self.thaw()
            raise sqlite3.OperationalError('the write-ahead log is in use')
        return pages >= 0

    def thaw(self) -> None:
        """End freeze()."""
        self._db.execute('PRAGMA wal_autocheckpoint = %s' % dict(PRAGMAS)['wal_autocheckpoint'])

    def check_in_place(self) -> None:
        """Conflict if the file was removed or replaced under us: what is written to it would be lost without a word."""
        if file_identity(self.path) != self._file:
            raise Conflict(f'the database {self.path} was removed or replaced while it was in use; nothing more can be stored in it')

    # ---- transactions ----

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All of the block or none of it, on disk at the end."""
        self.check_in_place()
        self._db.execute('BEGIN IMMEDIATE')
        told = len(self.news)
        try:
            yield
        except BaseException:
            del self.news[told:]
            if self._db.in_transaction:     # SQLite has rolled back by itself when the disk is full
                self._db.execute('ROLLBACK')
            raise
        try:
            self._db.execute('COMMIT')
        except sqlite3.Error as error:
            del self.news[told:]
            if self._db.in_transaction:
                self._db.execute('ROLLBACK')
            raise explain_database_error(error, self.path) from None

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """A view of one moment, for a block that changes nothing."""
        self._db.execute('BEGIN')
        try:
            yield
        finally:
            self._db.execute('ROLLBACK')

    @contextlib.contextmanager
    def savepoint(self, keeps: bool = True) -> Iterator[None]:
        """Inside a transaction: all of the block or none of it, while the transaction goes on. Without `keeps`: none of it."""
        self._db.execute('SAVEPOINT verb')
        self._depth += 1
        told = len(self.news)
        try:
            yield
        except BaseException:
            del self.news[told:]
            if self._db.in_transaction:     # a full disk may have rolled everything back already
                self._db.execute('ROLLBACK TO verb')
                self._db.execute('RELEASE verb')
            raise
        finally:
            self._depth -= 1
        if not keeps:
            del self.news[told:]
            self._db.execute('ROLLBACK TO verb')
        self._db.execute('RELEASE verb')

    def take_news(self) -> List[Union[News, int]]:
        """What was announced and has been committed."""
        news, self.news = self.news, []
        return news

    # ---- statements ----

    def run(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Execute one statement; the number of rows that it changed."""
        return self._db.execute(sql, parameters).rowcount

    def run_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """Execute one statement for each row of parameters."""
        self._db.executemany(sql, rows)

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> List[Tuple]:
        """All rows of a query, as tuples."""
        return self._db.execute(sql, parameters).fetchall()

    def one(self, sql: str, parameters: Sequence[Any] = ()) -> Optional[Tuple]:
        """First row of a query, or None."""
        return self._db.execute(sql, parameters).fetchone()

    def value(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        """First cell of a query, or None."""
        row = self._db.execute(sql, parameters).fetchone()
        return None if row is None else row[0]

    def ids(self, sql: str, parameters: Sequence[Any] = ()) -> List[Any]:
        """First column of a query."""
        return [row[0] for row in self._db.execute(sql, parameters)]

    # ---- counters of jobs ----

    def job_counts(self, workflow_id: int) -> Dict[int, int]:
        """Status code -> number of jobs of a workflow. Only the first call counts them."""
        if not self.one("SELECT 1 FROM sqlite_temp_master WHERE name = 'job_count'"):   # a rollback undoes it
            for statement in JOB_COUNTERS:
                self._db.execute(statement)
        counts = dict(self.rows('SELECT status, count FROM job_count WHERE workflow_id = ?', (workflow_id,)))
        if not counts:
            sql = 'SELECT status, count(*) FROM job WHERE workflow_id = ? GROUP BY status'
            counts = {**dict.fromkeys(STATUS_NAMES, 0), **dict(self.rows(sql, (workflow_id,)))}
            cells = ((workflow_id, status, count) for status, count in counts.items())
            self.run_many('INSERT INTO job_count VALUES (?, ?, ?)', cells)
        return counts

    def forget_job_counts(self) -> None:
        """Let the next call count anew."""
        for kind, name in self.rows("SELECT type, name FROM sqlite_temp_master WHERE name LIKE 'job_count%' "
                                    "ORDER BY type = 'table'"):
            self._db.execute(f'DROP {kind} temp.{name}')

    # ---- an administrator's SQL ----

    def execute_foreign(self, sql: str, writes: bool, limit: int) -> ForeignAnswer:
        """Execute one statement that a person wrote; at most `limit` rows of what it brings. Refused for all that goes wrong.

        Callers have looked at its words, hold a savepoint around it, and have done nothing before in this transaction: SQLite
        gives the whole transaction up when a statement that writes is interrupted, and it begins here anew.
        """
        if self._guard is None:
            self._guard = ForeignGuard()
            self._db.set_authorizer(self._guard.judge)  # for good: before Python 3.11 it cannot be taken off
        if writes:      # REPLACE deletes rows without firing triggers, and the guard refuses what ours write
            self.forget_job_counts()
        depth, before = self._depth, self._db.total_changes
        with contextlib.closing(self._db.cursor()) as cursor:
            try:
                with self._guarding(self._guard, writes):
                    cursor.execute(f'/* {self._guard.count} */ {sql}')
                    rows = fetch_bounded(cursor, limit)
                changed = self.value('SELECT changes()') if self._db.total_changes > before else 0
            except (sqlite3.Error, sqlite3.Warning, OverflowError) as error:
                raise Refused(self._guard.explain(error)) from None
            finally:
                if not self._db.in_transaction:
                    self._db.execute('BEGIN IMMEDIATE')
                    for _ in range(depth):
                        self._db.execute('SAVEPOINT verb')
            return ForeignAnswer([row[0] for row in cursor.description or ()], rows, changed, set(self._guard.tables))

    @contextlib.contextmanager
    def _guarding(self, guard: 'ForeignGuard', writes: bool) -> Iterator[None]:
        """While the block runs, statements are judged, timed, and may bring text that is not UTF-8."""
        guard.begin(writes)
        try:
            if not writes:      # whatever the guard might overlook
                self._db.execute('PRAGMA query_only = ON')
            self._db.text_factory = decode_leniently
            self._db.set_progress_handler(guard.interrupter, FOREIGN_SQL_STEPS)
            guard.is_on = True
            yield
        finally:
            guard.is_on = False
            self._db.set_progress_handler(None, 0)
            self._db.text_factory = str
            self._db.execute('PRAGMA query_only = OFF')

    def check_cells(self, table: str) -> None:
        """Refused if a table holds what no verb could read: after foreign SQL has written to it."""
        for column in self.columns(table):
            kinds = CELL_KINDS.get(column.codec, ('text',))
            allowed = ', '.join(f"'{kind}'" for kind in ('null', *kinds))
            condition = f'typeof({column.name}) NOT IN ({allowed})'
            if column.codec == 'STATUS':
                condition += f' OR {column.name} NOT BETWEEN 0 AND {len(STATUSES) - 1}'
            elif column.codec == 'REAL':
                condition += f' OR abs({column.name}) > 1e15'       # nor may a sum of them be infinite: JSON knows no such number
            elif column.name == 'id':
                condition += f' OR id NOT BETWEEN 1 AND {MOST_FOREIGN_ID}'
            if self.one(f'SELECT 1 FROM {table} WHERE {condition} LIMIT 1'):
                raise Refused(f'{table}.{column.name} would hold what it is not for; its type is {column.codec}')
            try:
                for cell in self._db.execute(f'SELECT DISTINCT {column.name} FROM {table}') if kinds == ('text',) else ():
                    value = decode_cell(column.codec, cell[0])
                    format_json(value).encode()
                    wanted = CELL_TYPES.get(column.name) if cell[0] is not None else None
                    if wanted and not (isinstance(value, wanted) and all(isinstance(item, str) for item in value)):     # labels, keys
                        raise ValueError(f'{format_json(value)[:60]} is no {wanted.__name__}, or not one of texts')
            except (sqlite3.OperationalError, ValueError, RecursionError) as error:
                raise Refused(f'{table}.{column.name} would hold what cannot be read: {printable(str(error))[:200]}') from None

    # ---- rows as dicts ----

    def columns(self, table: str) -> List[TableColumn]:
        """Columns of a table or view, read back from the database."""
        if table not in self._columns:
            described = self._db.execute(f'PRAGMA table_info({table})')
            self._columns[table] = [TableColumn(row[1], (row[2].split() or [''])[0]) for row in described]
        return self._columns[table]

    def select(self, table: str, where: str = '', parameters: Sequence[Any] = ()) -> List[Dict[str, Any]]:
        """Rows of a table or view as dicts; `where` may go on with ORDER BY and LIMIT."""
        columns = [column for column in self.columns(table) if column.name not in PRIVATE_COLUMNS]
        names = ', '.join(column.name for column in columns)
        found = self._db.execute(f'SELECT {names} FROM {table} {where}', parameters)
        return [{column.name: decode_cell(column.codec, cell) for column, cell in zip(columns, row) if cell is not None}
                for row in found]

    def insert(self, table: str, values: Dict[str, Any]) -> int:
        """Add a row; keys that are no columns are passed over, and so is `id`: ids are ours to give. The new one."""
        cells = {column.name: encode_cell(column.codec, values[column.name])
                 for column in self.columns(table) if column.name != 'id' and values.get(column.name) is not None}
        names, marks = ', '.join(cells), ', '.join('?' * len(cells))
        return self._db.execute(f'INSERT INTO {table} ({names}) VALUES ({marks})', list(cells.values())).lastrowid

    def insert_rows(self, table: str, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Add many rows of already encoded cells."""
        marks = ', '.join('?' * len(names))
        self._db.executemany(f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks})", rows)

    def update(self, table: str, row_id: int, values: Dict[str, Any]) -> None:
        """Change columns of one row; None stores NULL, keys that are no columns are passed over."""
        cells = {column.name: encode_cell(column.codec, values[column.name])
                 for column in self.columns(table) if column.name in values and column.name != 'id'}
        if cells:
            names = ', '.join(f'{name} = ?' for name in cells)
            self._db.execute(f'UPDATE {table} SET {names} WHERE id = ?', [*cells.values(), row_id])

    def next_id(self, table: str) -> int:
        """The id that the next row of a table would get."""
        return (self.value('SELECT seq FROM sqlite_sequence WHERE name = ?', (table,)) or 0) + 1

    def add_event(self, workflow_id: int, data: Dict[str, Any]) -> int:
        """Record something that happened to a workflow."""
        return self.insert('event', {'workflow_id': workflow_id, 'timestamp': int(self.now() * 1000), 'data': data})


class ForeignGuard:
    """Judges an administrator's statements while it is on: SQLite's authorizer and progress handler. Otherwise lets all pass."""

    def __init__(self) -> None:
        self.is_on = self.writes = False
        self.refused = ''                   # what the statement must not do, if it was refused
        self.tables = set()                 # type: Set[str]  # that it writes to
        self.deadline = math.inf            # monotonic
        self.count = 0                      # of statements: no two have the same text, so that each is compiled, and judged
        # One object for good: of several that are equal, Python 3.6 keeps the first alive and calls the last.
        self.interrupter = self.look_at_clock

    def begin(self, writes: bool) -> None:
        """Get ready for a statement."""
        self.writes, self.refused, self.tables, self.deadline = writes, '', set(), time.monotonic() + FOREIGN_SQL_S
        self.count += 1

    def judge(self, action: int, one: Optional[str], two: Optional[str], place: Optional[str], _: Optional[str]) -> int:
        """SQLite's question, for each thing that a statement is going to do: 0 to allow, 1 to refuse."""
        if not self.is_on:
            return 0
        if action in READING_ACTIONS and (two or '').lower() not in FORBIDDEN_FUNCTIONS:
            return 0
        if action in WRITING_ACTIONS and self.writes and place == 'main' and is_open_table(one or ''):
            self.tables.add(one or '')
            return 0
        self.refused = self.refused or (f'write to {one}' if action in WRITING_ACTIONS else f'do what it wants with {one or two or "this"}')
        return 1

    def look_at_clock(self) -> int:
        """Whether to interrupt the statement."""
        return int(time.monotonic() > self.deadline)

    def explain(self, error: Exception) -> str:
        """Why a statement failed, in words for users."""
        if self.refused:
            return f'this statement must not {self.refused}'
        if 'interrupted' in str(error):
            return f'the statement took longer than {FOREIGN_SQL_S:g} s and was given up: it would hold up everybody'
        return f'SQLite refuses the statement: {printable(str(error))[:200]}'


def is_open_table(table: str) -> bool:
    """Whether an administrator may write to a table with SQL."""
    return not table.lower().startswith('sqlite_') and table.lower() not in ('admin_audit_log', 'identity')


def decode_leniently(data: bytes) -> str:
    """Text of a foreign statement, which may have made it of any bytes."""
    return data.decode('utf-8', 'replace')


def fetch_bounded(cursor: sqlite3.Cursor, limit: int) -> List[Tuple]:
    """The first rows of a foreign statement. Refused if they are too large to be sent."""
    rows, size = [], 0
    for row in itertools.islice(cursor, limit):
        size += sum(len(cell) if isinstance(cell, (str, bytes)) else 16 for cell in row)
        if size > MAX_FOREIGN_BYTES:
            raise Refused(f'the answer has more than {MAX_FOREIGN_BYTES // 1024 ** 2} MiB; ask for less, or give a limit')
        rows.append(row)
    return rows


def file_identity(path: str) -> Tuple[int, int]:
    """What tells a file from another one of the same name; (0, 0) if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0)
    return found.st_dev, found.st_ino


def prepare_database_file(path: str) -> None:
    """Make the file if there is none, and see that it is private."""
    try:
        # Only a new file is made here: closing any descriptor of a database drops the locks that this process has on it.
        if not os.path.exists(path):
            os.close(open_new_private(path, os.O_RDWR))
        check_database_file(path)
    except OSError as error:
        raise BadInput(f'cannot open the database {path}: {error.strerror}; give another place with --db') from None


def open_database(path: str) -> sqlite3.Connection:
    """Connect, with all pragmas set."""
    try:
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    except sqlite3.Error as error:
        raise explain_database_error(error, path) from None
    try:
        for name, wanted in PRAGMAS:
            answer = connection.execute(f'PRAGMA {name} = {wanted}').fetchone()
            if name == 'journal_mode' and answer[0] != 'wal':
                connection.execute('PRAGMA journal_mode = TRUNCATE')
        connection.create_function('has_member', 3, has_member)
    except sqlite3.Error as error:
        connection.close()
        raise explain_database_error(error, path) from None
    return connection


known_json = functools.lru_cache(maxsize=64, typed=True)(format_json)


def has_member(text: Optional[str], key: str, value: Any) -> bool:
    """has_member(json, key, value) in SQL: whether a JSON object holds just this. SQLite 3.26 may be built without JSON."""
    if text is None or known_json(value) not in text:       # most rows need no parsing: the store writes JSON in one way only
        return False
    found = json.loads(text)
    return isinstance(found, dict) and type(found.get(key)) is type(value) and found[key] == value


def check_database_file(path: str) -> None:
    """Refuse a database that others may change, or that has two names; make one that others may read private.

    What SQLite puts beside it gets its mode.
    """
    found = os.stat(path)
    if found.st_uid != os.geteuid() or found.st_mode & 0o022 and not is_private_group(found):
        raise Denied(f'other users may change the database {path}: it must be yours, `chmod go-w {shlex.quote(path)}`')
    if found.st_nlink > 1:
        raise Denied(f'the database {path} has another name too (a hard link), under which it could be changed: copy it')
    if found.st_mode & 0o077:
        os.chmod(path, 0o600)


def explain_database_error(error: sqlite3.Error, path: str) -> TorcError:
    """What SQLite refused, as an error for users."""
    text = str(error)
    if 'locked' in text or 'busy' in text:
        return Conflict(f'the database {path} is in use by another torc.py; stop it, or give another place with --db')
    if 'not a database' in text or 'malformed' in text:
        return BadInput(f'{path} is not a torc.py database ({text}); give another place with --db')
    if 'full' in text:
        return TorcError(f'no space left for the database {path}; nothing of this request was stored', http=503)
    return TorcError(f'the database {path} cannot be used: {text}', http=503)


def keep_copy(connection: sqlite3.Connection, path: str) -> None:
    """Copy a whole database to another file, through its connection: reading the file itself would drop our locks on it."""
    os.close(open_new_private(path, os.O_WRONLY | os.O_TRUNC))
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as copy:
        copy.executescript('\n'.join(connection.iterdump()))   # Connection.backup came with Python 3.7
        copy.execute(f"PRAGMA user_version = {connection.execute('PRAGMA user_version').fetchone()[0]}")


def prepare_schema(connection: sqlite3.Connection, path: str) -> None:
    """Make the tables in a new database, or bring an older one up to date with a copy kept beside it."""
    version = connection.execute('PRAGMA user_version').fetchone()[0]
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if version > SCHEMA_VERSION:
        raise BadInput(f'{path} was made by a newer torc.py (schema {version}, this one knows {SCHEMA_VERSION}); use that one')
    if version == 0 and '_sqlx_migrations' in tables:
        raise BadInput(f"{path} is a database of Torc's own server: export the workflow there and import it here, "
                       'or give another place with --db')
    if version == 0 and tables:
        raise BadInput(f'{path} is a database of another program; give another place with --db')
    if version == SCHEMA_VERSION:
        return
    if version:
        keep_copy(connection, f'{path}.v{version}')
    steps = [SCHEMA] if version == 0 else [MIGRATIONS[step] for step in range(version + 1, SCHEMA_VERSION + 1)]
    script = ''.join(steps)
    connection.executescript(f'BEGIN IMMEDIATE; {script} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;')


# ======== 8. Service: the rules of a workflow ========
#
# Plain verbs over a Store, with the same names as the operations of the API. They start no process, open no socket and
# know no clock but the Store's. The caller holds a transaction, so that every verb happens whole or not at all.
#
# Run generation. A workflow's run_id is 0 until the first initialize, and grows with every reset. Starts, completions
# and retries carry it; a stale one changes nothing. An attempt is named by (job, run, attempt) and has one result, also when
# its job is taken from the runner's hands: so the name is never given again.
#
# Completion. Of the current run and attempt, once, whether a node holds the job or nobody has claimed it;
# never of what another node holds, or of what has finished. In one transaction: the result row, the job's
# status, the counters of the sets that it is a member of, the jobs that this makes ready or cancels, and so
# on until nothing changes, and the actions that all of this triggers. So no state needs a second look, and a
# restart of the server changes no outcome. An attempt that ended as pending_failed holds its dependants until
# it is run again, or a second completion says how it ends after all.
# One that was stopped only because its runner was interrupted makes its job ready again, and spends no retry.
#
# Prerequisites. A waiting job is released when its set has no pending member. If a member ended badly, a job with
# cancel_on_blocking_job_failure is canceled, and counts as a bad member in turn.
#
# News. Verbs say with announce() and record_event() what happened, for those who listen. It is told after the commit.
#
# Claims. Looked at by kind, in order of priority, GPUs, runtime, memory, CPUs (largest first), then id; so the cost
# grows with the number of kinds and of jobs returned, not with the number of jobs that are ready.

FINISHED = tuple(row.code for row in STATUSES if row.is_finished)
BAD = tuple(row.code for row in STATUSES if row.is_bad)
UNFINISHED = tuple(row.code for row in STATUSES if not row.is_finished)
NOT_DONE = tuple(row.code for row in STATUSES if not row.is_done)
ACTIVE = tuple(row.code for row in STATUSES if row.is_active)
OPEN = tuple(row.code for row in STATUSES if not (row.is_final or row.is_done))    # the attempt may still end


def sql_list(codes: Iterable[int]) -> str:
    """'(1, 2)' for IN; only for integers of our own."""
    return '(' + ', '.join(str(int(code)) for code in codes) + ')'


def chunks(items: Sequence[Any], size: int = 500) -> Iterator[Sequence[Any]]:
    """Pieces that fit the number of parameters that any SQLite takes (999)."""
    for start in range(0, len(items), size):
        yield items[start:start + size]


def rows_by_ids(store: Store, sql: str, ids: Sequence[Any]) -> List[Tuple]:
    """Rows of a query that ends in IN, for any number of ids or names."""
    return [row for piece in chunks(ids) for row in store.rows(f"{sql} ({', '.join('?' * len(piece))})", piece)]


def run_by_ids(store: Store, sql: str, ids: Sequence[int]) -> None:
    """A statement that ends in IN, for any number of ids."""
    for piece in chunks(ids):
        store.run(f"{sql} ({', '.join('?' * len(piece))})", piece)


# -------- looking things up --------

class WorkflowState(NamedTuple):
    """What most rules ask of a workflow."""
    id: int
    run_id: int
    is_canceled: bool
    is_archived: bool
    is_run_zero: bool


def workflow_state(store: Store, workflow_id: int) -> WorkflowState:
    """The workflow's state. NotFound if there is none."""
    row = store.one('SELECT id, run_id, is_canceled, is_archived, is_run_zero FROM workflow WHERE id = ?',
                    (workflow_id,))
    if row is None:
        raise NotFound(f'there is no workflow {workflow_id}')
    return WorkflowState(row[0], row[1], *map(bool, row[2:]))


def check_run(state: WorkflowState, run_id: int) -> None:
    """Refuse what belongs to another run generation. 0 also names the first, unless a reset began it."""
    if run_id != state.run_id and not (run_id == 0 and state.is_run_zero):
        raise Refused(f'run {run_id} of workflow {state.id} is over: the current one is {state.run_id}')


class JobState(NamedTuple):
    """What most rules ask of a job."""
    id: int
    workflow_id: int
    name: str
    status: int
    attempt_id: int
    compute_node_id: Optional[int]


def job_state(store: Store, job_id: int) -> JobState:
    """The job's state. NotFound if there is none."""
    row = store.one('SELECT id, workflow_id, name, status, attempt_id, compute_node_id FROM job WHERE id = ?', (job_id,))
    if row is None:
        raise NotFound(f'there is no job {job_id}')
    return JobState(*row)


def get_row(store: Store, table: str, row_id: int) -> Dict[str, Any]:
    """One row of a table or view as a dict. NotFound if there is none."""
    found = store.select(table, 'WHERE id = ?', (row_id,))
    if not found:
        noun = table.replace('_view', '').replace('_', ' ')
        raise NotFound(f'there is no {noun} {row_id}')
    return found[0]


def is_complete(store: Store, workflow_id: int) -> bool:
    """Whether no job of the workflow has anything left to do."""
    return not store.one(f'SELECT 1 FROM job WHERE workflow_id = ? AND status IN {sql_list(NOT_DONE)} LIMIT 1', (workflow_id,))


def check_owned(store: Store, table: str, workflow_id: int, ids: Iterable[int]) -> None:
    """Refuse ids that do not exist or belong to another workflow."""
    wanted = sorted(set(ids))
    owned = {row[0] for row in rows_by_ids(store, f'SELECT id FROM {table} WHERE workflow_id = {int(workflow_id)} AND id IN', wanted)}
    missing = [row_id for row_id in wanted if row_id not in owned]
    if missing:
        raise Refused(f"workflow {workflow_id} has no {table.replace('_', ' ')} {missing[0]}")


REFERENCES = (      # field of a body, table, whether a row that is gone may be named: results outlive their nodes
    ('job_id',              'job',             False),
    ('file_id',             'file',            False),
    ('compute_node_id',     'compute_node',    True),
    ('scheduler_config_id', 'slurm_scheduler', True),
)


def check_references(store: Store, workflow_id: int, values: Dict[str, Any]) -> None:
    """Refuse fields that name a thing of another workflow."""
    for field, table, may_be_gone in REFERENCES:
        if values.get(field) is not None:
            owner = store.value(f'SELECT workflow_id FROM {table} WHERE id = ?', (values[field],))
            if owner != workflow_id and not (owner is None and may_be_gone):
                raise Refused(f"{field}: workflow {workflow_id} has no {table.replace('_', ' ')} {values[field]}", field=field)


def check_stays(workflow_id: int, body: Dict[str, Any]) -> None:
    """Refuse a change that would move a thing to another workflow."""
    if body.get('workflow_id') not in (None, workflow_id):
        raise Refused(f"workflow_id is {body['workflow_id']}: what is of workflow {workflow_id} stays there", field='workflow_id')


# -------- telling those who listen --------

def announce(store: Store, workflow_id: int, event_type: str, data: Dict[str, Any], severity: str = 'info') -> None:
    """Say what happened to a workflow. It is told after the commit, if anybody listens; otherwise this costs nothing."""
    if workflow_id in store.watched:
        store.news.append(News(workflow_id, event_type, severity, int(store.now() * 1000), data)
                          if len(store.news) < MAX_NEWS else workflow_id)


def announce_start(store: Store, job: JobState, run_id: int) -> None:
    """Say that a node has started a job."""
    announce(store, job.workflow_id, 'job_started', {
        'job_id': job.id, 'job_name': job.name, 'compute_node_id': job.compute_node_id, 'run_id': run_id})


# On the stream, as Torc's; and of the stored event of a failed attempt.
END_SEVERITIES = {'failed': 'error', 'terminated': 'warning', 'canceled': 'warning'}
FAILURE_LEVELS = {'failed': 'error', 'pending_failed': 'error', 'terminated': 'warning'}


def announce_end(store: Store, workflow_id: int, job_id: int, job_name: str, status: str, **more: Any) -> None:
    """Say that a job has ended."""
    announce(store, workflow_id, f'job_{status}', dict(more, job_id=job_id, job_name=job_name, status=status), END_SEVERITIES.get(status, 'info'))


def announce_canceled(store: Store, workflow_id: int, job_ids: Sequence[int]) -> None:
    """Say that jobs were canceled, however many they are."""
    if workflow_id in store.watched:
        room = max(0, MAX_NEWS - len(store.news))
        for job_id, name in rows_by_ids(store, 'SELECT id, name FROM job WHERE id IN', job_ids[:room]):
            announce_end(store, workflow_id, job_id, name, 'canceled', return_code=None)
        store.news += [workflow_id] * len(job_ids[room:])


def record_event(store: Store, workflow_id: int, data: Dict[str, Any], severity: str = 'info') -> None:
    """Say what happened, and keep it among the workflow's events."""
    store.add_event(workflow_id, data)
    announce(store, workflow_id, data.get('event_type') or data['category'], data, severity)


# -------- who may do what --------
#
# Three kinds of callers. Administrators (the owner of the server, who shows its token, and the members of the group
# `admin`, which only the server's options fill) may do everything. Where access is enforced, everybody else reads,
# changes and deletes the workflows that are his own or linked to one of his groups, with all that belongs to them, and
# is told of others neither that they exist nor that they do not. Where it is not enforced, all workflows are open; but
# as soon as callers have names, groups are managed by those only whom the rules below allow.

MAY_USE = ('(user = ? OR EXISTS (SELECT 1 FROM workflow_access_group JOIN user_group_membership USING (group_id) '
           'WHERE workflow_id = workflow.id AND user_name = ?))')     # a workflow; parameters: names_of() the caller
GROUPS_OF_WORKFLOW = 'id IN (SELECT group_id FROM workflow_access_group WHERE workflow_id = ?)'
GROUPS_OF_USER = 'id IN (SELECT group_id FROM user_group_membership WHERE user_name = ?)'


def check_admin(store: Store) -> None:
    """Refuse callers who are neither the server's owner nor one of its administrators."""
    if not store.is_admin:
        raise Denied(f'this is for administrators, and {printable(store.caller)} is none: show the token of the server, or log in as a user whom `serve --admin-user` names')


def is_limited(store: Store) -> bool:
    """Whether the caller may use some workflows only."""
    return store.enforces_access and not store.is_admin


def names_of(user: str) -> List[Optional[str]]:
    """Parameters of MAY_USE. NULL, which equals nothing, for those without a name."""
    return [None if user == ANONYMOUS else user] * 2


def may_use(store: Store, workflow_id: int, user: str) -> bool:
    """Whether a workflow is a user's own, or one of his groups'."""
    return store.one(f'SELECT 1 FROM workflow WHERE id = ? AND {MAY_USE}', [workflow_id, *names_of(user)]) is not None


def check_may_use(store: Store, workflow_id: Optional[int], what: str) -> None:
    """Refuse a limited caller what is not his, in the same words as what does not exist. `what`: 'job 7'."""
    if workflow_id is None or not may_use(store, workflow_id, store.caller):
        raise Denied(f'{printable(store.caller)} has no access to {what}, or there is none')


def is_system_admin(store: Store, user: str) -> bool:
    """Whether a user is in the group of the administrators."""
    return store.one('SELECT 1 FROM user_group_membership JOIN access_group ON access_group.id = group_id '
                     'WHERE is_system = 1 AND user_name = ?', (user,)) is not None


def set_administrators(store: Store, users: Iterable[str]) -> None:
    """Let the group of the administrators have these members and no others."""
    wanted = set(users)
    if ANONYMOUS in wanted:
        raise BadInput(f'{ANONYMOUS!r} cannot be an administrator: it is anybody')
    group_id = store.value('SELECT id FROM access_group WHERE is_system = 1')
    group_id = group_id or store.insert('access_group', {'name': ADMIN_GROUP, 'created_at': format_time(store.now()), 'is_system': True})
    if set(store.ids('SELECT user_name FROM user_group_membership WHERE group_id = ?', (group_id,))) != wanted:
        store.run('DELETE FROM user_group_membership WHERE group_id = ?', (group_id,))
        for user in sorted(wanted):
            store.insert('user_group_membership', {'group_id': group_id, 'user_name': user, 'role': 'admin', 'created_at': format_time(store.now())})


def new_owner(store: Store, wanted: Optional[str]) -> str:
    """Owner of a workflow that is being made: limited callers own what they make."""
    if not is_limited(store):
        return wanted or store.caller
    if store.caller == ANONYMOUS:
        raise Denied('a workflow needs an owner: log in to make one')
    return store.caller


def link_groups(store: Store, workflow_id: int, names: List[str]) -> None:
    """Give groups access to a new workflow, by their names."""
    if len(set(names)) < len(names):
        raise Refused('access_groups names a group twice', field='access_groups')
    for name in names:
        group_id = store.value('SELECT id FROM access_group WHERE name = ?', (name,))
        if group_id is None:
            raise Refused(f'there is no access group {printable(name)!r}', field='access_groups')
        store.insert('workflow_access_group', {'workflow_id': workflow_id, 'group_id': group_id, 'created_at': format_time(store.now())})


def add_group_names(store: Store, workflows: List[Dict[str, Any]]) -> None:
    """Fill in the names of the access groups of workflows that have any."""
    by_id = {workflow['id']: workflow for workflow in workflows}
    for workflow_id, name in sorted(rows_by_ids(store, 'SELECT workflow_id, name FROM workflow_access_group JOIN access_group ON id = group_id '
                                                'WHERE workflow_id IN', list(by_id))):
        by_id[workflow_id].setdefault('access_groups', []).append(name)


def check_group_admin(store: Store, group_id: Optional[int] = None) -> None:
    """Refuse those who may not manage groups; with an id, those who may not manage this one. NotFound if there is none."""
    is_open = store.is_admin or not (store.knows_users or store.enforces_access)
    role = store.value('SELECT role FROM user_group_membership WHERE group_id = ? AND user_name = ?', (group_id, store.caller))
    if not is_open and (role != 'admin' or store.caller == ANONYMOUS):
        raise Denied('access groups are managed by administrators' + (', and each by its own admins' if group_id else ''))
    if group_id is not None:
        get_row(store, 'access_group', group_id)


def check_fills_by_hand(store: Store, group_id: int) -> None:
    """Refuse changes of the group of the administrators."""
    if store.value('SELECT is_system FROM access_group WHERE id = ?', (group_id,)):
        raise Denied('the group of the administrators is filled by `serve --admin-user` and TORC_ADMIN_USERS only')


def find_link(store: Store, table: str, group_id: int, other: str, value: Any) -> Optional[Dict[str, Any]]:
    """The row that ties a group to a user (user_name) or a workflow (workflow_id); None if there is none."""
    return next(iter(store.select(table, f'WHERE group_id = ? AND {other} = ?', (group_id, value))), None)


def check_is_self(store: Store, user: str) -> None:
    """Refuse questions about other users, but from administrators and where users have no names."""
    if store.caller != user and not store.is_admin and (store.knows_users or store.enforces_access):
        raise Denied(f'only {printable(user)} and administrators may ask this')


def group_page(store: Store, table: str, where: str, value: Any, offset: int, limit: int) -> Dict[str, Any]:
    """One page of groups or members, in the envelope that these lists have."""
    limit = page_size(offset, limit)
    total = store.value(f'SELECT count(*) FROM {table} WHERE {where}', (value,))
    items = store.select(table, f'WHERE {where} ORDER BY id LIMIT ? OFFSET ?', (value, limit, offset))
    return {'items': items, 'offset': offset, 'limit': limit, 'total_count': total, 'has_more': offset + len(items) < total}


def create_access_group(store: Store, body: Dict[str, Any]) -> Dict[str, Any]:
    """Make a group, without members."""
    check_group_admin(store)
    if store.one('SELECT 1 FROM access_group WHERE name = ?', (body['name'],)):
        raise Conflict(f"there is an access group {printable(body['name'])!r} already")
    values = {'name': body['name'], 'description': body.get('description'), 'created_at': format_time(store.now())}
    return get_row(store, 'access_group', store.insert('access_group', values))


def list_access_groups(store: Store, offset: int = 0, limit: int = MAX_LIST_ITEMS) -> Dict[str, Any]:
    """All groups."""
    check_group_admin(store)
    return group_page(store, 'access_group', 'id > ?', 0, offset, limit)


def get_access_group(store: Store, group_id: int) -> Dict[str, Any]:
    """One group."""
    check_group_admin(store, group_id)
    return get_row(store, 'access_group', group_id)


def delete_access_group(store: Store, group_id: int) -> Dict[str, Any]:
    """Remove a group; its members lose what it gave them."""
    check_group_admin(store)
    group = get_row(store, 'access_group', group_id)
    check_fills_by_hand(store, group_id)
    store.run('DELETE FROM access_group WHERE id = ?', (group_id,))
    return group


def list_group_members(store: Store, group_id: int, offset: int = 0, limit: int = MAX_LIST_ITEMS) -> Dict[str, Any]:
    """Who is in a group."""
    check_group_admin(store, group_id)
    return group_page(store, 'user_group_membership', 'group_id = ?', group_id, offset, limit)


def add_user_to_group(store: Store, group_id: int, body: Dict[str, Any]) -> Dict[str, Any]:
    """Let a user into a group, as one of GROUP_ROLES."""
    check_group_admin(store, group_id)
    check_fills_by_hand(store, group_id)
    user, role = body.get('user_name'), body.get('role') or 'member'
    if not user or user == ANONYMOUS:
        raise Refused(f'user_name: {user!r} is nobody who could be in a group', field='user_name')
    if (body.get('group_id') or group_id) != group_id:
        raise Refused(f"the body is about group {body['group_id']}, the path about {group_id}", field='group_id')
    if find_link(store, 'user_group_membership', group_id, 'user_name', user):
        raise Conflict(f'{printable(user)} is in access group {group_id} already')
    values = {'group_id': group_id, 'user_name': user, 'role': role, 'created_at': format_time(store.now())}
    return get_row(store, 'user_group_membership', store.insert('user_group_membership', values))


def remove_user_from_group(store: Store, group_id: int, user_name: str) -> Dict[str, Any]:
    """Take a user out of a group."""
    check_group_admin(store, group_id)
    check_fills_by_hand(store, group_id)
    found = find_link(store, 'user_group_membership', group_id, 'user_name', user_name)
    if found is None:
        raise NotFound(f'{printable(user_name)} is not in access group {group_id}')
    store.run('DELETE FROM user_group_membership WHERE id = ?', (found['id'],))
    return found


def list_user_groups(store: Store, user_name: str, offset: int = 0, limit: int = MAX_LIST_ITEMS) -> Dict[str, Any]:
    """Groups that a user is in."""
    check_is_self(store, user_name)
    return group_page(store, 'access_group', GROUPS_OF_USER, user_name, offset, limit)


def list_workflow_groups(store: Store, workflow_id: int, offset: int = 0, limit: int = MAX_LIST_ITEMS) -> Dict[str, Any]:
    """Groups whose members may use a workflow."""
    workflow_state(store, workflow_id)
    return group_page(store, 'access_group', GROUPS_OF_WORKFLOW, workflow_id, offset, limit)


def check_may_link(store: Store, workflow_id: int, group_id: int) -> None:
    """Refuse all but a workflow's owner and the group's admins. That the latter may use the workflow was checked before."""
    owner = get_row(store, 'workflow', workflow_id)['user']
    if not (store.knows_users or store.enforces_access) or store.caller == owner != ANONYMOUS:
        get_row(store, 'access_group', group_id)
    else:
        check_group_admin(store, group_id)


def add_workflow_to_group(store: Store, workflow_id: int, group_id: int) -> Dict[str, Any]:
    """Let the members of a group use a workflow."""
    check_may_link(store, workflow_id, group_id)
    if find_link(store, 'workflow_access_group', group_id, 'workflow_id', workflow_id):
        raise Conflict(f'access group {group_id} has access to workflow {workflow_id} already')
    link = {'workflow_id': workflow_id, 'group_id': group_id, 'created_at': format_time(store.now())}
    store.insert('workflow_access_group', link)
    return link


def remove_workflow_from_group(store: Store, workflow_id: int, group_id: int) -> Dict[str, Any]:
    """Take a workflow from the members of a group."""
    check_may_link(store, workflow_id, group_id)
    found = find_link(store, 'workflow_access_group', group_id, 'workflow_id', workflow_id)
    if found is None:
        raise NotFound(f'access group {group_id} has no access to workflow {workflow_id}')
    store.run('DELETE FROM workflow_access_group WHERE workflow_id = ? AND group_id = ?', (workflow_id, group_id))
    return found


def check_workflow_access(store: Store, workflow_id: int, user_name: str) -> Dict[str, Any]:
    """Whether a user may use a workflow where access is enforced, and why."""
    check_is_self(store, user_name)
    owner = store.value('SELECT user FROM workflow WHERE id = ?', (workflow_id,))
    if owner is None and not is_limited(store):
        raise NotFound(f'there is no workflow {workflow_id}')
    reason = ('is anybody' if user_name == ANONYMOUS else 'owns it' if owner == user_name else
              'is in a group that has access' if may_use(store, workflow_id, user_name) else
              'is an administrator' if is_system_admin(store, user_name) else '')
    has_access = bool(reason) and user_name != ANONYMOUS
    return {'has_access': has_access, 'user_name': user_name, 'workflow_id': workflow_id,
            'reason': f"{user_name} {reason or 'neither owns it nor is in a group that has access'}"}


def reload_auth(store: Store) -> Dict[str, Any]:
    """Read the password file again, and forget what was known of passwords."""
    check_admin(store)
    if store.reload_users is None:
        raise Refused('this server has no password file: it was started without --auth-file')
    count = store.reload_users()
    return {'message': f'the password file was read again: {count} users', 'user_count': count}


# -------- dependency sets --------

def find_set(store: Store, workflow_id: int, members: Iterable[int]) -> Optional[int]:
    """Id of the set with just these jobs, made if there is none; None for no jobs."""
    ordered = sorted(set(members))
    if not ordered:
        return None
    digest = members_digest(ordered)
    found = store.value('SELECT id FROM dep_set WHERE workflow_id = ? AND digest = ?', (workflow_id, digest))
    if found is None:
        found = store.insert('dep_set', {'workflow_id': workflow_id, 'digest': digest})
        store.insert_rows('dep_member', ('dep_set_id', 'job_id'), ((found, job_id) for job_id in ordered))
        store.run(RECOUNT + 'id = ?', (found,))
    return found


def members_digest(ordered: Sequence[int]) -> str:
    """What tells one set of jobs from another."""
    return hashlib.sha256(','.join(map(str, ordered)).encode()).hexdigest()


def set_members(store: Store, set_id: Optional[int]) -> List[int]:
    """Ids of the jobs in a set, in order."""
    return [] if set_id is None else store.ids('SELECT job_id FROM dep_member WHERE dep_set_id = ? ORDER BY job_id', (set_id,))


def implied_prerequisites(store: Store, workflow_id: int) -> Dict[int, Set[int]]:
    """Consumer -> producers, through files and user data."""
    found = collections.defaultdict(set)  # type: Dict[int, Set[int]]
    for kind, column in (('file', 'file_id'), ('user_data', 'user_data_id')):
        pairs = store.rows(
            f'SELECT consumer.job_id, producer.job_id FROM {kind} item '
            f'CROSS JOIN job_output_{kind} producer ON producer.{column} = item.id '
            f'CROSS JOIN job_input_{kind} consumer ON consumer.{column} = item.id WHERE item.workflow_id = ?', (workflow_id,))
        for consumer, producer in pairs:
            found[consumer].add(producer)
    return found


def rebuild_dependencies(store: Store, workflow_id: int) -> None:
    """Give every job the set of all its prerequisites: those asked for and those that files and user data imply."""
    store.run('UPDATE job SET dep_set_id = explicit_set_id WHERE workflow_id = ? AND dep_set_id IS NOT explicit_set_id',
              (workflow_id,))
    implied = implied_prerequisites(store, workflow_id)
    explicit = dict(rows_by_ids(store, 'SELECT id, explicit_set_id FROM job WHERE explicit_set_id IS NOT NULL AND id IN', list(implied)))
    consumers = collections.defaultdict(list)  # type: Dict[Tuple[Optional[int], frozenset], List[int]]
    for consumer, producers in implied.items():
        consumers[explicit.get(consumer), frozenset(producers)].append(consumer)
    for (explicit_set, producers), job_ids in consumers.items():
        set_id = find_set(store, workflow_id, producers.union(set_members(store, explicit_set)))
        store.run_many('UPDATE job SET dep_set_id = ? WHERE id = ?', ((set_id, job_id) for job_id in job_ids))
    store.run('DELETE FROM dep_set WHERE workflow_id = ? AND NOT EXISTS (SELECT 1 FROM job WHERE job.dep_set_id = dep_set.id) '
              'AND NOT EXISTS (SELECT 1 FROM job WHERE job.explicit_set_id = dep_set.id)', (workflow_id,))
    refuse_cycles(store, workflow_id)


def refuse_cycles(store: Store, workflow_id: int) -> None:
    """Refuse jobs that wait for each other, by name."""
    waiting = dict(store.rows('SELECT id, dep_set_id FROM job WHERE workflow_id = ? AND dep_set_id IS NOT NULL', (workflow_id,)))
    members = collections.defaultdict(list)  # type: Dict[int, List[int]]
    for set_id, job_id in store.rows('SELECT dep_set_id, job_id FROM dep_member WHERE dep_set_id IN '
                                     '(SELECT id FROM dep_set WHERE workflow_id = ?)', (workflow_id,)):
        if job_id in waiting:       # the others wait for nothing
            members[set_id].append(job_id)
    released = collections.deque(set(waiting.values()) - set(members))
    pending = {set_id: len(job_ids) for set_id, job_ids in members.items()}
    sets_of = invert(members)
    jobs_of = invert({job_id: [set_id] for job_id, set_id in waiting.items()})
    while released:
        for job_id in jobs_of[released.popleft()]:
            for set_id in sets_of.get(job_id, ()):
                pending[set_id] -= 1
                if not pending[set_id]:
                    released.append(set_id)
    stuck = {set_id for set_id, count in pending.items() if count}
    if stuck:
        raise Refused('these jobs wait for each other: ' + name_cycle(store, waiting, members, stuck))


def invert(lists: Dict[int, List[int]]) -> Dict[int, List[int]]:
    """a -> [b] as b -> [a]."""
    inverse = collections.defaultdict(list)  # type: Dict[int, List[int]]
    for key, values in lists.items():
        for value in values:
            inverse[value].append(key)
    return inverse


def name_cycle(store: Store, waiting: Dict[int, int], members: Dict[int, List[int]], stuck: Set[int]) -> str:
    """One cycle among the stuck sets, as 'a -> b -> a', each job waiting for the next."""
    job_id = next(job for job, set_id in waiting.items() if set_id in stuck)
    path = []  # type: List[int]
    while job_id not in path:
        path.append(job_id)
        job_id = next(member for member in members[waiting[job_id]] if waiting[member] in stuck)
    circle = path[path.index(job_id):] + [job_id]
    names = dict(rows_by_ids(store, 'SELECT id, name FROM job WHERE id IN', circle))
    return ' -> '.join(names[member] for member in circle)


MEMBERS_THAT_ARE = ('(SELECT count(*) FROM dep_member CROSS JOIN job ON job.id = dep_member.job_id '
                    'WHERE dep_member.dep_set_id = dep_set.id AND job.status IN {})')
RECOUNT = (f'UPDATE dep_set SET pending = {MEMBERS_THAT_ARE.format(sql_list(UNFINISHED))}, '
           f'failed = {MEMBERS_THAT_ARE.format(sql_list(BAD))} WHERE ')


def recount_sets(store: Store, workflow_id: int) -> None:
    """Make the counters of all sets agree with the statuses of their members."""
    store.run(RECOUNT + 'workflow_id = ?', (workflow_id,))


def settle(store: Store, workflow_id: int, ended: List[Tuple[int, int]]) -> None:
    """Jobs have just ended with these statuses: release or cancel those that wait for them, to the end of the cascade."""
    while ended:
        bad_by_set = collections.Counter()  # type: Dict[int, int]
        all_by_set = collections.Counter()  # type: Dict[int, int]
        for job_id, status in ended:
            for set_id in store.ids('SELECT dep_set_id FROM dep_member WHERE job_id = ?', (job_id,)):
                all_by_set[set_id] += 1
                bad_by_set[set_id] += status in BAD
        store.run_many('UPDATE dep_set SET pending = pending - ?, failed = failed + ? WHERE id = ?',
                       ((count, bad_by_set[set_id], set_id) for set_id, count in all_by_set.items()))
        count_trigger(store, workflow_id, 'on_jobs_complete', [job_id for job_id, _ in ended])
        ended = release_sets(store, workflow_id, list(all_by_set))


def release_sets(store: Store, workflow_id: int, set_ids: Sequence[int]) -> List[Tuple[int, int]]:
    """Let go the jobs that wait for these sets, where no member is pending. The ones that this cancels, with their status."""
    canceled = []   # type: List[Tuple[int, int]]
    ready = []      # type: List[int]
    for set_id, failed in rows_by_ids(store, 'SELECT id, failed FROM dep_set WHERE pending <= 0 AND id IN', set_ids):
        waiting = store.rows(f'SELECT id, cancel_on_blocking_job_failure FROM job WHERE dep_set_id = ? AND status = {BLOCKED}',
                             (set_id,))
        for job_id, cancels in waiting:
            if failed and cancels:
                canceled.append((job_id, CANCELED))
            else:
                ready.append(job_id)
    run_by_ids(store, f'UPDATE job SET status = {READY} WHERE id IN', ready)
    run_by_ids(store, f'UPDATE job SET status = {CANCELED} WHERE id IN', [job_id for job_id, _ in canceled])
    announce_canceled(store, workflow_id, [job_id for job_id, _ in canceled])
    count_trigger(store, workflow_id, 'on_jobs_ready', ready)
    return canceled


# -------- actions --------

def count_trigger(store: Store, workflow_id: int, trigger: str, job_ids: Sequence[int]) -> None:
    """Tell the actions with a job trigger that these jobs are ready, or have ended; each job counts once."""
    if not job_ids or not store.one('SELECT 1 FROM workflow_action WHERE workflow_id = ? AND trigger_type = ? LIMIT 1',
                                    (workflow_id, trigger)):
        return
    gates = rows_by_ids(store, 'SELECT action_id, job_id FROM action_job WHERE is_counted = 0 AND action_id IN '
                        f"(SELECT id FROM workflow_action WHERE workflow_id = {int(workflow_id)} AND trigger_type = '{trigger}') "
                        'AND job_id IN', job_ids)
    store.run_many('UPDATE action_job SET is_counted = 1 WHERE action_id = ? AND job_id = ?', gates)
    counts = collections.Counter(action_id for action_id, _ in gates)
    store.run_many('UPDATE workflow_action SET trigger_count = trigger_count + ? WHERE id = ?',
                   ((count, action_id) for action_id, count in counts.items()))


def satisfy_trigger(store: Store, workflow_id: int, trigger: str) -> None:
    """Make the actions of a workflow or worker trigger due."""
    store.run('UPDATE workflow_action SET trigger_count = required_triggers WHERE workflow_id = ? AND trigger_type = ?',
              (workflow_id, trigger))


def note_if_complete(store: Store, workflow_id: int) -> bool:
    """Whether the workflow is complete; if so, its on_workflow_complete actions are due."""
    complete = is_complete(store, workflow_id)
    if complete:
        satisfy_trigger(store, workflow_id, 'on_workflow_complete')
    return complete


def expect_completion(store: Store, workflow_id: int) -> None:
    """The workflow has something to do again: what is due at its completion is due no longer."""
    store.run("UPDATE workflow_action SET trigger_count = 0 WHERE workflow_id = ? AND trigger_type = 'on_workflow_complete'", (workflow_id,))


def rearm_actions(store: Store, workflow_id: int, is_partial: bool) -> None:
    """At an initialize: recovery actions go, the others are to be executed again, counted anew from the jobs.

    In a partial run what has been done stays done: on_workflow_start, and job triggers whose jobs have all finished.
    """
    store.run('DELETE FROM workflow_action WHERE workflow_id = ? AND is_recovery = 1', (workflow_id,))
    recount_actions(store, workflow_id, '1')
    kept = '0'
    if is_partial:
        kept = ("trigger_type = 'on_workflow_start' OR trigger_type IN ('on_jobs_ready', 'on_jobs_complete') AND NOT EXISTS "
                '(SELECT 1 FROM action_job CROSS JOIN job ON job.id = action_job.job_id '
                f'WHERE action_job.action_id = workflow_action.id AND job.status NOT IN {sql_list(FINISHED)})')
    store.run('UPDATE workflow_action SET executed = 0, executed_at = NULL, executed_by = NULL, is_reported = 0 '
              f'WHERE workflow_id = ? AND NOT ({kept})', (workflow_id,))
    store.run('DELETE FROM action_execution WHERE action_id IN (SELECT id FROM workflow_action WHERE workflow_id = ? AND executed = 0)',
              (workflow_id,))


def recount_actions(store: Store, workflow_id: int, condition: str) -> None:
    """Make the trigger counts of actions agree with the states of their jobs and of the workflow."""
    chosen = f'(SELECT id FROM workflow_action WHERE workflow_id = {int(workflow_id)} AND {condition})'
    store.run(f'UPDATE action_job SET is_counted = (SELECT CASE action.trigger_type '
              f"WHEN 'on_jobs_ready' THEN job.status NOT IN ({UNINITIALIZED}, {BLOCKED}) "
              f'ELSE job.status IN {sql_list(FINISHED)} END '
              'FROM job, workflow_action action WHERE job.id = action_job.job_id AND action.id = action_job.action_id) '
              f'WHERE action_id IN {chosen}')
    store.run("UPDATE workflow_action SET trigger_count = CASE WHEN trigger_type IN ('on_jobs_ready', 'on_jobs_complete') THEN "
              '(SELECT count(*) FROM action_job WHERE action_id = workflow_action.id AND is_counted = 1) '
              "WHEN trigger_type = 'on_workflow_complete' THEN 0 ELSE required_triggers END, "
              "required_triggers = CASE WHEN trigger_type IN ('on_jobs_ready', 'on_jobs_complete') THEN "
              'max(1, (SELECT count(*) FROM action_job WHERE action_id = workflow_action.id)) ELSE required_triggers END '
              f'WHERE id IN {chosen}')


def action_rows(store: Store, where: str, parameters: Sequence[Any]) -> List[Dict[str, Any]]:
    """Actions as WorkflowActionModel, with the ids of the jobs that they wait for."""
    actions = store.select('workflow_action', where, parameters)
    for action in actions:
        gates = store.ids('SELECT job_id FROM action_job WHERE action_id = ? ORDER BY job_id', (action['id'],))
        if gates:
            action['job_ids'] = gates
    return actions


def get_workflow_actions(store: Store, workflow_id: int) -> List[Dict[str, Any]]:
    """All actions of a workflow, by id."""
    workflow_state(store, workflow_id)
    return action_rows(store, 'WHERE workflow_id = ? ORDER BY id', (workflow_id,))


def get_pending_actions(store: Store, workflow_id: int, trigger_type: Sequence[str] = ()) -> List[Dict[str, Any]]:
    """Actions that are due and not taken, of the given triggers or of all."""
    workflow_state(store, workflow_id)
    return action_rows(store, *due_condition(workflow_id, [trigger_type] if isinstance(trigger_type, str) else trigger_type))


def due_condition(workflow_id: int, triggers: Sequence[str], more: str = '') -> Tuple[str, Sequence[Any]]:
    """WHERE clause and its parameters for the actions that are due."""
    triggers = tuple(triggers) or TRIGGERS
    marks = ', '.join('?' * len(triggers))
    return (f'WHERE workflow_id = ? AND executed = 0 AND trigger_count >= required_triggers AND trigger_type IN ({marks}) {more} '
            'ORDER BY id', (workflow_id, *triggers))


def create_workflow_action(store: Store, workflow_id: int, body: Dict[str, Any]) -> Dict[str, Any]:
    """Add an action; a job trigger needs the ids of its jobs."""
    workflow_state(store, workflow_id)
    check_stays(workflow_id, body)
    job_ids = sorted(set(body.get('job_ids') or ()))
    check_action(store, workflow_id, body['trigger_type'], body['action_type'], body['action_config'])
    check_owned(store, 'job', workflow_id, job_ids)
    is_gated = body['trigger_type'] in JOB_TRIGGERS
    values = dict(body, workflow_id=workflow_id, executed=False, trigger_count=0, executed_at=None, executed_by=None,
                  required_triggers=max(1, len(job_ids)) if is_gated else 1)
    action_id = store.insert('workflow_action', values)
    store.insert_rows('action_job', ('action_id', 'job_id'), ((action_id, job_id) for job_id in job_ids))
    if workflow_state(store, workflow_id).run_id:   # it comes late: what it waits for may have been
        recount_actions(store, workflow_id, f'id = {action_id}')
    return action_rows(store, 'WHERE id = ?', (action_id,))[0]


def check_action(store: Store, workflow_id: int, trigger_type: str, action_type: str, config: Any) -> None:
    """Refuse an action that nobody could ever run."""
    if trigger_type not in TRIGGERS:
        raise Refused(f"unknown trigger_type {trigger_type!r}; one of {', '.join(TRIGGERS)}")
    if action_type not in ACTION_TYPES:
        raise Refused(f"unknown action_type {action_type!r}; one of {', '.join(ACTION_TYPES)}")
    commands = config.get('commands') if isinstance(config, dict) else None
    if action_type == 'run_commands' and not (isinstance(commands, list) and commands and all(isinstance(c, str) for c in commands)
                                              and len(config) == 1):
        raise Refused('action_config of run_commands needs "commands", a list of shell commands, and takes nothing else')
    if action_type == 'schedule_nodes':
        check_schedule(store, workflow_id, config)


SCHEDULE_TYPES = {'scheduler_id': int, 'scheduler_type': str, 'num_allocations': int, 'start_one_worker_per_node': bool,
                   'max_parallel_jobs': int}


def check_schedule(store: Store, workflow_id: int, config: Any) -> None:
    """Refuse an action_config of schedule_nodes with unknown keys, values of other types, or another workflow's scheduler."""
    if not isinstance(config, dict):
        raise Refused('action_config of schedule_nodes must be an object')
    for name, value in config.items():
        if name not in SCHEDULE_TYPES:
            raise Refused(f'action_config of schedule_nodes has no key {printable(name)!r}' + did_you_mean(name, SCHEDULE_TYPES))
        if value is not None and type(value) is not SCHEDULE_TYPES[name]:
            raise Refused(f'action_config: {name} must be of type {SCHEDULE_TYPES[name].__name__}, not {printable(repr(value)[:60])}')
    owner = store.value('SELECT workflow_id FROM slurm_scheduler WHERE id = ?', (config.get('scheduler_id'),))
    if config.get('scheduler_type') in (None, 'slurm') and owner not in (None, workflow_id):    # None: it may come later
        raise Refused(f"action_config: workflow {workflow_id} has no slurm scheduler {config['scheduler_id']}")


def get_action(store: Store, workflow_id: int, action_id: int) -> Dict[str, Any]:
    """One action of a workflow. NotFound if it has none of this id."""
    workflow_state(store, workflow_id)
    found = action_rows(store, 'WHERE id = ? AND workflow_id = ?', (action_id, workflow_id))
    if not found:
        raise NotFound(f'workflow {workflow_id} has no action {action_id}')
    return found[0]


def update_workflow_action(store: Store, workflow_id: int, action_id: int, body: Any) -> Dict[str, Any]:
    """Change some keys of an action's action_config; the others stay."""
    action = get_action(store, workflow_id, action_id)
    if not isinstance(body, dict) or not body:
        raise Refused('the body must be an object of the keys of action_config that are to change')
    config = dict(action['action_config'], **body)
    check_action(store, workflow_id, action['trigger_type'], action['action_type'], config)
    store.update('workflow_action', action_id, {'action_config': config})
    return get_action(store, workflow_id, action_id)


def delete_workflow_action(store: Store, workflow_id: int, action_id: int) -> Dict[str, Any]:
    """Remove an action, taken or not."""
    get_action(store, workflow_id, action_id)
    store.run('DELETE FROM workflow_action WHERE id = ?', (action_id,))
    return {'message': f'Deleted action {action_id} of workflow {workflow_id}'}


def claim_action(store: Store, workflow_id: int, action_id: int, body: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
    """Take an action for a node. Conflict if another has it; a persistent one is for every node, once."""
    action = get_action(store, workflow_id, action_id)
    check_references(store, workflow_id, body or {})
    node_id = (body or {}).get('compute_node_id')
    if not take_action(store, action_id, node_id, action['persistent']):
        raise Conflict(f'action {action_id} has already been taken', claimed=False)
    note_action_reported(store, action_id, node_id or 0)     # who claims so never tells how it ended
    return {'success': True, 'action_id': action_id}


def take_action(store: Store, action_id: int, node_id: Optional[int], persistent: bool) -> bool:
    """Mark an action as taken by a node; whether it was free."""
    now = format_time(store.now())
    if persistent:
        taken = store.run('INSERT OR IGNORE INTO action_execution (action_id, compute_node_id) VALUES (?, ?)', (action_id, node_id or 0))
        store.run('UPDATE workflow_action SET executed_at = ? WHERE id = ?', (now, action_id))
    else:
        taken = store.run('UPDATE workflow_action SET executed = 1, executed_at = ?, executed_by = ?, is_reported = 0 '
                          'WHERE id = ? AND executed = 0', (now, node_id, action_id))
    return bool(taken)


def take_due_actions(store: Store, workflow_id: int, node_id: int, triggers: Sequence[str]) -> List[Dict[str, Any]]:
    """The due run_commands actions of these triggers, taken for a node."""
    if not triggers or not store.one('SELECT 1 FROM workflow_action WHERE workflow_id = ? LIMIT 1', (workflow_id,)):
        return []
    due = store.select('workflow_action', *due_condition(workflow_id, triggers, "AND action_type = 'run_commands'"))
    return [action for action in due if take_action(store, action['id'], node_id, action['persistent'])]


def note_action_reported(store: Store, action_id: int, node_id: int) -> None:
    """The node that took an action has said all that it will say of it."""
    store.run('UPDATE workflow_action SET is_reported = 1 WHERE id = ?', (action_id,))
    store.run('UPDATE action_execution SET is_reported = 1 WHERE action_id = ? AND compute_node_id = ?', (action_id, node_id))


# -------- creating --------

def create_workflow(store: Store, body: Dict[str, Any]) -> Dict[str, Any]:
    """Make a workflow without jobs, with the implicit requirements named default."""
    workflow_id = insert_workflow(store, body)
    insert_requirements(store, workflow_id, dict(DEFAULT_REQUIREMENTS, is_implicit=True))
    return get_workflow(store, workflow_id)


def insert_workflow(store: Store, body: Dict[str, Any]) -> int:
    """Check and store the workflow's own fields."""
    check_env(body.get('env'))
    if (body.get('dynamic_jobs') or {}).get('max_iterations', 1) < 1:
        raise Refused('dynamic_jobs: max_iterations must be at least 1')
    values = dict(WORKFLOW_DEFAULTS)
    values.update({key: value for key, value in body.items() if value is not None})
    values.update(timestamp=format_time(store.now()), user=new_owner(store, body.get('user')), run_id=0, is_canceled=False,
                  is_archived=False)
    workflow_id = store.insert('workflow', values)
    link_groups(store, workflow_id, body.get('access_groups') or [])
    return workflow_id


def check_env(env: Optional[Dict[str, str]]) -> None:
    """Refuse names that no shell could use."""
    for name in env or ():
        if not re.match(r'[A-Za-z_][A-Za-z0-9_]*\Z', name):
            raise Refused(f'env: {printable(name)!r} is not a name for an environment variable')


def insert_requirements(store: Store, workflow_id: int, body: Dict[str, Any]) -> int:
    """Check and store resource requirements."""
    values = dict(DEFAULT_REQUIREMENTS, runtime='PT1M')
    values.update({key: value for key, value in body.items() if value is not None})
    values.update(checked_requirements(values), workflow_id=workflow_id)
    return store.insert('resource_requirements', values)


def checked_requirements(values: Dict[str, Any]) -> Dict[str, int]:
    """memory_bytes and runtime_s of requirements; Refused for values that cannot be."""
    for name, least in (('num_cpus', 1), ('num_nodes', 1), ('num_gpus', 0)):
        if values[name] < least:
            raise Refused(f'{name} is {values[name]}; it must be at least {least}', field=name, value=values[name])
    numbers = {}
    for name, key, parse in (('memory', 'memory_bytes', parse_memory), ('runtime', 'runtime_s', parse_duration)):
        try:
            numbers[key] = parse(values[name])
        except ValueError as error:
            raise Refused(f'{name}: {error}', field=name, value=values[name]) from None
    return numbers


def create_workflow_from_spec(store: Store, body: Dict[str, Any]) -> Dict[str, Any]:
    """Make a whole workflow from a plan (see Spec), in one go."""
    try:
        workflow_id = insert_plan(store, body)
    except (KeyError, IndexError, TypeError, ValueError, sqlite3.IntegrityError) as error:
        # a plan that our own Spec made never gets here; in one that another program made an index may lead nowhere
        raise BadInput(f'the body is not a plan of a workflow ({type(error).__name__}: {error}); '
                       'make it with torc.py create') from error
    return {'workflow_id': workflow_id, 'workflow_name': body['workflow']['name'], 'job_count': len(body['jobs'])}


def insert_plan(store: Store, body: Dict[str, Any]) -> int:
    """Store everything that a plan holds. The workflow's id."""
    workflow_id = insert_workflow(store, body['workflow'])
    places = {}  # type: Dict[str, List[int]]
    for table in ('file', 'user_data', 'slurm_scheduler', 'failure_handler'):
        plural = table if table == 'user_data' else table + 's'
        places[table] = [store.insert(table, dict(row, workflow_id=workflow_id)) for row in body[plural]]
    declared = [row['name'] for row in body['resource_requirements']]
    places['resource_requirements'] = [insert_requirements(store, workflow_id, row) for row in body['resource_requirements']]
    default = (places['resource_requirements'][declared.index('default')] if 'default' in declared
               else insert_requirements(store, workflow_id, dict(DEFAULT_REQUIREMENTS, is_implicit=True)))
    places['job_kind'] = [insert_planned_kind(store, workflow_id, row, places, default) for row in body['kinds']]
    first_job = store.next_id('job')
    groups = [tuple(sorted({first_job + index_below(member, len(body['jobs'])) for member in members}))
              for members in body['dependency_sets']]
    set_ids = {group: store.insert('dep_set', {'workflow_id': workflow_id, 'digest': members_digest(group),
                                               'pending': len(group)}) for group in dict.fromkeys(groups)}
    jobs = [row if isinstance(row, PlannedJob) else PlannedJob(*row) for row in body['jobs']]
    insert_planned_jobs(store, workflow_id, jobs, places, [set_ids[group] for group in groups], body['workflow'].get('env'))
    store.insert_rows('dep_member', ('dep_set_id', 'job_id'), (
        (set_id, job_id) for group, set_id in set_ids.items() for job_id in group))
    if groups:
        refuse_cycles(store, workflow_id)
    insert_planned_relations(store, jobs, first_job, places)
    for action in body['actions']:
        insert_planned_action(store, workflow_id, action, places, first_job)
    return workflow_id


def index_below(index: int, count: int) -> int:
    """The index, if it leads to one of so many things. IndexError otherwise: below 0 Python would count from the end."""
    if not 0 <= index < count:
        raise IndexError(f'there is no number {index}')
    return index


def insert_planned_kind(store: Store, workflow_id: int, row: Sequence[Any], places: Dict[str, List[int]], default: int) -> int:
    """Store one kind of a plan: requirements and scheduler by place, priority, labels."""
    requirements, priority, scheduler, labels = row
    check_labels(labels)
    return find_kind(store, workflow_id, (
        default if requirements is None else places['resource_requirements'][requirements],
        priority, None if scheduler is None else places['slurm_scheduler'][scheduler], labels))


def insert_planned_jobs(store: Store, workflow_id: int, jobs: Sequence[Any], places: Dict[str, List[int]], sets: List[int],
                        workflow_env: Optional[Dict[str, str]]) -> None:
    """Store the jobs of a plan, in its order, with consecutive ids."""
    shared_env = format_json(workflow_env) if workflow_env else None
    kinds, handlers = places['job_kind'], places['failure_handler']

    def encoded() -> Iterator[Tuple]:
        for job in jobs:
            env = format_json({**(workflow_env or {}), **job.env}) if job.env else shared_env
            set_id = None if job.dependencies is None else sets[job.dependencies]
            yield (workflow_id, job.name, job.command, job.invocation_script, env, kinds[job.kind],
                   None if job.failure_handler is None else handlers[job.failure_handler], set_id, set_id,
                   int(job.cancel_on_blocking_job_failure), int(job.supports_termination))
    store.insert_rows('job', ('workflow_id', 'name', 'command', 'invocation_script', 'env', 'kind_id', 'failure_handler_id',
                              'explicit_set_id', 'dep_set_id', 'cancel_on_blocking_job_failure', 'supports_termination'), encoded())


JOB_RELATIONS = (   # field of a planned job, field of JobModel, table, column, table of the related thing
    ('input_files',      'input_file_ids',       'job_input_file',       'file_id',      'file'),
    ('output_files',     'output_file_ids',      'job_output_file',      'file_id',      'file'),
    ('input_user_data',  'input_user_data_ids',  'job_input_user_data',  'user_data_id', 'user_data'),
    ('output_user_data', 'output_user_data_ids', 'job_output_user_data', 'user_data_id', 'user_data'),
)


def insert_planned_relations(store: Store, jobs: Sequence[Any], first_job: int, places: Dict[str, List[int]]) -> None:
    """Store which job reads and writes what."""
    for planned, _, table, column, related in JOB_RELATIONS:
        ids = places[related]
        if not any(map(operator.attrgetter(planned), jobs)):    # much faster than the loop below
            continue
        store.insert_rows(table, ('job_id', column), (
            (first_job + place, ids[index]) for place, job in enumerate(jobs) for index in getattr(job, planned)))


def insert_planned_action(store: Store, workflow_id: int, action: Dict[str, Any], places: Dict[str, List[int]], first_job: int) -> None:
    """Store an action of a plan; a scheduler is named by its place in the plan."""
    config = dict(action['action_config'])
    if action['action_type'] == 'schedule_nodes':
        scheduler = config.pop('scheduler', None)
        config['scheduler_id'] = 0 if scheduler is None else places['slurm_scheduler'][scheduler]
    job_ids = [first_job + index for index in action.get('job_indexes') or ()]      # create_workflow_action looks whose they are
    create_workflow_action(store, workflow_id, dict(action, action_config=config, job_ids=job_ids))


def find_kind(store: Store, workflow_id: int, kind: Tuple[int, int, Optional[int], Optional[Sequence[str]]]) -> int:
    """Id of the kind with these requirements, priority, scheduler and labels, made if there is none."""
    requirements, priority, scheduler, labels = kind
    text = format_json(sorted(set(labels))) if labels else None
    found = store.value('SELECT id FROM job_kind WHERE workflow_id = ? AND resource_requirements_id = ? AND priority = ? '
                        'AND scheduler_id IS ? AND labels IS ?', (workflow_id, requirements, priority, scheduler, text))
    if found is None:
        found = store.insert('job_kind', {'workflow_id': workflow_id, 'resource_requirements_id': requirements,
                                          'priority': priority, 'scheduler_id': scheduler, 'labels': json.loads(text) if text else None})
    return found


def check_labels(labels: Optional[Sequence[str]]) -> None:
    """Refuse labels that could not be told apart in a list."""
    for label in labels or ():
        if not label or label != label.strip() or ',' in label:
            raise Refused(f'the label {label!r} must not be empty, hold a comma, or begin or end with a blank', field='labels')


def create_job(store: Store, body: Dict[str, Any]) -> Dict[str, Any]:
    """Add one job, uninitialized."""
    return get_job(store, insert_job(store, body))


def create_jobs(store: Store, body: Dict[str, Any]) -> Dict[str, Any]:
    """Add up to 100,000 jobs of one workflow; their names must differ."""
    check_bulk([job['workflow_id'] for job in body['jobs']], [job['name'] for job in body['jobs']], 'jobs')
    ids = [insert_job(store, job) for job in body['jobs']]
    return {'jobs': [get_job(store, job_id) for job_id in ids]}


def check_bulk(workflow_ids: Sequence[int], names: Sequence[str], noun: str) -> None:
    """Refuse a bulk request of no or too many things, of several workflows, or with a name twice."""
    if not 0 < len(names) <= MAX_LIST_ITEMS:
        raise Refused(f'{len(names)} {noun} in one request; 1 to {MAX_LIST_ITEMS} are possible')
    if len(set(workflow_ids)) > 1:
        raise Refused(f'all {noun} of one request must belong to one workflow')
    if len(set(names)) < len(names):
        twice = collections.Counter(names).most_common(1)[0][0]
        raise Refused(f'the name {twice!r} stands twice among the {noun}')


def insert_job(store: Store, body: Dict[str, Any]) -> int:
    """Check and store one job with its relations. Its id."""
    workflow_id = body['workflow_id']
    workflow_state(store, workflow_id)
    check_env(body.get('env'))
    env = json.loads(store.value('SELECT env FROM workflow WHERE id = ?', (workflow_id,)) or '{}')
    env.update(body.get('env') or {})
    requirements = body.get('resource_requirements_id') or store.value(
        "SELECT id FROM resource_requirements WHERE workflow_id = ? AND name = 'default' ORDER BY id LIMIT 1", (workflow_id,))
    kind = job_kind(store, workflow_id, requirements, body)
    handler = body.get('failure_handler_id') or None
    check_owned(store, 'failure_handler', workflow_id, [handler] if handler else [])
    prerequisites = body.get('depends_on_job_ids') or []
    check_owned(store, 'job', workflow_id, prerequisites)
    set_id = find_set(store, workflow_id, prerequisites)
    values = dict(body, env=env or None, kind_id=kind, failure_handler_id=handler, explicit_set_id=set_id, dep_set_id=set_id,
                  status='uninitialized', attempt_id=1, compute_node_id=None, start_time=None, origin=None)
    job_id = store.insert('job', values)
    for _, field, table, column, related in JOB_RELATIONS:
        ids = sorted(set(body.get(field) or ()))
        check_owned(store, related, workflow_id, ids)
        store.insert_rows(table, ('job_id', column), ((job_id, item) for item in ids))
    return job_id


def job_kind(store: Store, workflow_id: int, requirements: Optional[int], body: Dict[str, Any]) -> int:
    """Kind of a job that a request describes."""
    check_labels(body.get('labels'))
    if (body.get('priority') or 0) < 0:
        raise BadInput(f"priority is {body['priority']}; it must be at least 0")
    scheduler = body.get('scheduler_id') or None
    check_owned(store, 'resource_requirements', workflow_id, [requirements or 0])
    check_owned(store, 'slurm_scheduler', workflow_id, [scheduler] if scheduler else [])
    return find_kind(store, workflow_id, (requirements or 0, body.get('priority') or 0, scheduler, body.get('labels')))


def get_job(store: Store, job_id: int) -> Dict[str, Any]:
    """A job with all that it is related to."""
    job = get_row(store, 'job_view', job_id)
    add_relations(store, [job])
    return job


def add_relations(store: Store, jobs: List[Dict[str, Any]]) -> None:
    """Fill in the id lists of jobs; empty ones are left out."""
    by_id = {job['id']: job for job in jobs}
    query = ' UNION ALL '.join(f"SELECT '{field}' AS field, job_id, {column} AS item FROM {table}" for _, field, table, column, _ in JOB_RELATIONS)
    for field, job_id, item in rows_by_ids(store, f'SELECT field, job_id, item FROM ({query}) WHERE job_id IN', list(by_id)):
        by_id[job_id].setdefault(field, []).append(item)
    sets = dict(rows_by_ids(store, 'SELECT id, dep_set_id FROM job WHERE dep_set_id IS NOT NULL AND id IN', list(by_id)))
    members = {set_id: set_members(store, set_id) for set_id in set(sets.values())}
    for job_id, set_id in sets.items():
        by_id[job_id]['depends_on_job_ids'] = members[set_id]


KIND_FIELDS = ('resource_requirements_id', 'priority', 'scheduler_id', 'labels')
ALWAYS_EDITABLE = KIND_FIELDS + ('cancel_on_blocking_job_failure', 'supports_termination', 'invocation_script')
EDITABLE_WHEN_IDLE = ('name', 'command')        # reinitialize sees the change and runs the job again
EDITABLE_BEFORE_START = ('depends_on_job_ids', 'status')


def update_job(store: Store, job_id: int, body: Dict[str, Any]) -> Dict[str, Any]:
    """Change a job: what it runs only while no runner has it, what it waits for only while it is uninitialized."""
    job = get_job(store, job_id)
    changed = {key: value for key, value in body.items()
               if value is not None and key != 'id' and comparable(key, value) != comparable(key, job.get(key))}
    fixed = [key for key in changed if key not in ALWAYS_EDITABLE + EDITABLE_WHEN_IDLE + EDITABLE_BEFORE_START
             or key in EDITABLE_WHEN_IDLE and STATUSES[STATUS_CODES[job['status']]].is_active]
    early = [key for key in changed if key in EDITABLE_BEFORE_START and job['status'] != 'uninitialized']
    if fixed or early:
        raise Refused(f"{', '.join(fixed + early)} of job {job_id} cannot change" +
                      (' once the job is initialized' if early and not fixed else ''))
    if changed.get('status', 'disabled') != 'disabled':
        raise Refused(f"status of job {job_id} cannot be set to {changed['status']!r}: only 'disabled' can be set")
    if any(key in KIND_FIELDS for key in changed):
        kind = dict({key: job.get(key) for key in KIND_FIELDS}, **changed)
        changed['kind_id'] = job_kind(store, job['workflow_id'], kind['resource_requirements_id'], kind)
    if 'depends_on_job_ids' in changed:
        check_owned(store, 'job', job['workflow_id'], changed['depends_on_job_ids'])
        set_id = find_set(store, job['workflow_id'], changed['depends_on_job_ids'])
        changed.update(explicit_set_id=set_id, dep_set_id=set_id)
    store.update('job', job_id, changed)
    return get_job(store, job_id)


def comparable(key: str, value: Any) -> Any:
    """A job's field in a form that tells a change from a repetition: lists are sets, and missing is empty."""
    return sorted(set(value or ())) if key.endswith('_ids') or key == 'labels' else value or None


def delete_job(store: Store, job_id: int) -> Dict[str, Any]:
    """Remove a job and what belongs to it; those that waited for it wait no longer. Refused while a runner has it."""
    job = get_job(store, job_id)
    if STATUSES[STATUS_CODES[job['status']]].is_active:
        raise Refused(f"job {job_id} is {job['status']}: wait for its end, or cancel the workflow first")
    sets = store.ids('SELECT dep_set_id FROM dep_member WHERE job_id = ?', (job_id,))
    gated = store.ids('SELECT action_id FROM action_job WHERE job_id = ?', (job_id,))
    store.run('DELETE FROM job WHERE id = ?', (job_id,))
    if gated:
        recount_actions(store, job['workflow_id'], f'id IN {sql_list(gated)}')
    if sets:
        recount_sets(store, job['workflow_id'])
        settle(store, job['workflow_id'], release_sets(store, job['workflow_id'], sets))
    return job


# -------- workflows --------

def get_workflow(store: Store, workflow_id: int) -> Dict[str, Any]:
    """One workflow."""
    workflow = get_row(store, 'workflow', workflow_id)
    add_group_names(store, [workflow])
    return workflow


WORKFLOW_FIXED = ('env', 'submission_directory', 'dynamic_jobs', 'access_groups')
WORKFLOW_EDITABLE = (
    'name', 'description', 'project', 'metadata', 'compute_node_expiration_buffer_seconds', 'compute_node_wait_for_new_jobs_seconds',
    'compute_node_ignore_workflow_completion', 'compute_node_wait_for_healthy_database_minutes',
    'compute_node_min_time_for_new_jobs_seconds', 'use_pending_failed', 'enable_ro_crate', 'execution_config',
    'resource_monitor_config', 'slurm_defaults', 'user')


def update_workflow(store: Store, workflow_id: int, body: Dict[str, Any]) -> Dict[str, Any]:
    """Change the fields of a workflow that may change after its creation."""
    current = get_workflow(store, workflow_id)
    given = {key: value for key, value in body.items() if value is not None}
    if given.get('user', current['user']) != current['user'] and is_limited(store) and store.caller != current['user']:
        raise Denied(f"only {printable(current['user'])} and administrators can give workflow {workflow_id} to another user")
    fixed = [key for key in WORKFLOW_FIXED if key in given and (given[key] or None) != current.get(key)]
    if fixed:
        raise Refused(f"{', '.join(fixed)} of workflow {workflow_id} cannot change after its creation")
    store.update('workflow', workflow_id, {key: given[key] for key in WORKFLOW_EDITABLE if key in given})
    return get_workflow(store, workflow_id)


def delete_workflow(store: Store, workflow_id: int) -> Dict[str, Any]:
    """Remove a workflow and everything that belongs to it."""
    workflow = get_workflow(store, workflow_id)
    store.run('DELETE FROM workflow WHERE id = ?', (workflow_id,))
    return workflow


def archive_workflow(store: Store, workflow_id: int, body: Dict[str, Any]) -> Dict[str, Any]:
    """Put a workflow away, or take it back: archived ones are not initialized, reset or listed by default."""
    workflow_state(store, workflow_id)
    store.update('workflow', workflow_id, {'is_archived': body['is_archived']})
    add_user_event(store, workflow_id, 'archive_workflow', is_archived=body['is_archived'])
    return get_workflow(store, workflow_id)


def add_user_event(store: Store, workflow_id: int, action: str, **details: Any) -> None:
    """Record that a user did something to a workflow."""
    record_event(store, workflow_id, dict(details, category='user_action', action=action, user=store.caller, workflow_id=workflow_id))


def cancel_workflow(store: Store, workflow_id: int) -> Dict[str, Any]:
    """Stop a workflow: no job starts any more, and runners stop those that run."""
    state = workflow_state(store, workflow_id)
    store.run('UPDATE workflow SET is_canceled = 1 WHERE id = ?', (workflow_id,))
    stopped = f'workflow_id = ? AND status IN {sql_list((BLOCKED, READY, *ACTIVE))}'
    record_event(store, workflow_id, {'category': 'workflow_canceled', 'message': f'Workflow {workflow_id} canceled',
                                      'workflow_id': workflow_id, 'run_id': state.run_id, 'user': store.caller}, 'warning')
    if workflow_id in store.watched:
        announce_canceled(store, workflow_id, store.ids(f'SELECT id FROM job WHERE {stopped}', (workflow_id,)))
    store.run(f'UPDATE job SET status = {CANCELED} WHERE {stopped}', (workflow_id,))
    recount_sets(store, workflow_id)
    return get_workflow(store, workflow_id)


def is_workflow_complete(store: Store, workflow_id: int) -> Dict[str, Any]:
    """Whether a runner has anything left to wait for."""
    state = workflow_state(store, workflow_id)
    return {'is_complete': state.is_canceled or is_complete(store, workflow_id), 'is_canceled': state.is_canceled}


def is_workflow_uninitialized(store: Store, workflow_id: int) -> Dict[str, Any]:
    """Whether no job has been initialized yet."""
    workflow_state(store, workflow_id)
    touched = store.one(f'SELECT 1 FROM job WHERE workflow_id = ? AND status NOT IN ({UNINITIALIZED}, {DISABLED}) LIMIT 1', (workflow_id,))
    return {'is_uninitialized': touched is None}


def count_by_status(store: Store, workflow_id: int) -> Dict[str, int]:
    """Status name -> number of jobs, zeros included."""
    counts = dict(store.rows('SELECT status, count(*) FROM job WHERE workflow_id = ? GROUP BY status', (workflow_id,)))
    return {row.name: counts.get(row.code, 0) for row in STATUSES}


def get_workflow_status(store: Store, workflow_id: int) -> Dict[str, Any]:
    """One summary: jobs by status, times, nodes, and why ready jobs may be waiting."""
    workflow = get_workflow(store, workflow_id)
    counts = count_by_status(store, workflow_id)
    answer = {'workflow_id': workflow_id, 'workflow_name': workflow['name'], 'workflow_user': workflow['user'],
              'total_jobs': sum(counts.values()), 'jobs_by_status': counts, 'is_canceled': workflow['is_canceled'],
              'is_complete': workflow['is_canceled'] or not any(counts[STATUS_NAMES[code]] for code in NOT_DONE),
              'unserved_ready_labels': count_unserved_labels(store, workflow_id)}
    answer.update(measure_times(store, workflow_id))
    answer['active_compute_nodes'] = store.value('SELECT count(*) FROM compute_node WHERE workflow_id = ? AND is_active = 1', (workflow_id,))
    for status in ('pending', 'active'):
        answer[f'{status}_scheduled_nodes'] = store.value(
            'SELECT count(*) FROM scheduled_compute_node WHERE workflow_id = ? AND status = ?', (workflow_id, status))
    answer.update(measure_blocked_by_time(store, workflow_id))
    return answer


def measure_times(store: Store, workflow_id: int) -> Dict[str, Any]:
    """Time spent in jobs, and from the first start to the last end, of the current results."""
    total, walltime_s = store.one(
        'SELECT total(exec_time_minutes), (max(julianday(completion_time)) - '
        'min(julianday(completion_time) - exec_time_minutes / 1440)) * 86400 '
        'FROM result WHERE workflow_id = ? AND is_current = 1', (workflow_id,))
    return {'total_exec_time_minutes': total, **({} if walltime_s is None else {'walltime_seconds': walltime_s})}


def measure_blocked_by_time(store: Store, workflow_id: int) -> Dict[str, Any]:
    """Ready jobs whose runtime no active node has left; nodes and jobs with labels are left out."""
    nodes = store.rows('SELECT end_time, labels FROM compute_node WHERE workflow_id = ? AND is_active = 1',
                       (workflow_id,))
    left_s = {end: max(0, int(parse_time(end) - store.now())) for end, _ in nodes if end is not None}
    answer = {'runtime_blocked_ready_jobs': 0}
    if left_s:
        answer['max_allocation_remaining_seconds'] = max(left_s.values())
    ends = [end for end, labels in nodes if labels is None]
    if not ends or None in ends:    # nobody is at work, or somebody without an end
        return answer
    kinds = store.rows(
        f'SELECT runtime_s, (SELECT count(*) FROM job WHERE kind_id = kind.id AND status = {READY}) '
        'FROM job_kind kind JOIN resource_requirements needs ON needs.id = resource_requirements_id '
        'WHERE kind.workflow_id = ? AND labels IS NULL', (workflow_id,))
    limit_s = max(left_s[end] for end in ends) + CLAIM_GRACE_S
    ready = [(runtime_s, count) for runtime_s, count in kinds if count]
    answer['runtime_blocked_ready_jobs'] = sum(count for runtime_s, count in ready if runtime_s > limit_s)
    if ready:
        answer['longest_ready_runtime_seconds'] = max(runtime_s for runtime_s, _ in ready)
    return answer


def count_unserved_labels(store: Store, workflow_id: int) -> Dict[str, int]:
    """Label set, joined by commas -> ready jobs that no active node may take."""
    nodes = [set(json.loads(labels)) for labels in store.ids(
        'SELECT labels FROM compute_node WHERE workflow_id = ? AND is_active = 1 AND labels IS NOT NULL', (workflow_id,))]
    unserved = collections.Counter()  # type: Dict[str, int]
    for text, count in store.rows(
            f'SELECT labels, (SELECT count(*) FROM job WHERE job.kind_id = job_kind.id AND status = {READY}) FROM job_kind '
            'WHERE workflow_id = ? AND labels IS NOT NULL', (workflow_id,)):
        labels = json.loads(text)
        if count and not any(node.issuperset(labels) for node in nodes):
            unserved[','.join(labels)] += count
    return dict(unserved)


def list_job_ids(store: Store, workflow_id: int) -> Dict[str, Any]:
    """Ids of all jobs."""
    workflow_state(store, workflow_id)
    ids = store.ids('SELECT id FROM job WHERE workflow_id = ? ORDER BY id', (workflow_id,))
    return {'job_ids': ids, 'count': len(ids)}


def list_required_existing_files(store: Store, workflow_id: int) -> Dict[str, Any]:
    """Files that must exist before the start: inputs that no job makes, and outputs of completed jobs."""
    return {'files': list_required(store, workflow_id, 'file', 'file_id', '1')}


def list_missing_user_data(store: Store, workflow_id: int) -> Dict[str, Any]:
    """User data without a value that should have one: inputs that no job makes, and outputs of completed jobs."""
    return {'user_data': list_required(store, workflow_id, 'user_data', 'user_data_id', 'item.data IS NULL')}


def list_required(store: Store, workflow_id: int, kind: str, column: str, condition: str) -> List[int]:
    """Ids of files or user data that jobs rely on from the start."""
    workflow_state(store, workflow_id)
    return store.ids(
        f'SELECT item.id FROM {kind} item WHERE item.workflow_id = ? AND {condition} AND ('
        f'EXISTS (SELECT 1 FROM job_input_{kind} WHERE {column} = item.id) '
        f'AND NOT EXISTS (SELECT 1 FROM job_output_{kind} WHERE {column} = item.id) '
        f'OR EXISTS (SELECT 1 FROM job_output_{kind} made CROSS JOIN job ON job.id = made.job_id '
        f'WHERE made.{column} = item.id AND job.status = {COMPLETED})) ORDER BY item.id', (workflow_id,))


def page_size(offset: int, limit: int) -> int:
    """How many items of a list to give: not more than MAX_LIST_ITEMS. Refused below 0."""
    for name, value in (('offset', offset), ('limit', limit)):
        if value < 0:
            raise Refused(f'{name} is {value}; it must be at least 0', field=name)
    return min(limit, MAX_LIST_ITEMS)


def get_running_jobs(store: Store, workflow_id: int, offset: int = 0, limit: int = MAX_LIST_ITEMS) -> Dict[str, Any]:
    """Running jobs with their nodes."""
    workflow_state(store, workflow_id)
    limit = page_size(offset, limit)
    total = store.value(f'SELECT count(*) FROM job WHERE workflow_id = ? AND status = {RUNNING}', (workflow_id,))
    rows = store.rows(
        'SELECT job.id, job.name, node.hostname, node.compute_node_type, job.start_time, node.id FROM job '
        f'LEFT JOIN compute_node node ON node.id = job.compute_node_id WHERE job.workflow_id = ? AND job.status = {RUNNING} '
        'ORDER BY job.id LIMIT ? OFFSET ?', (workflow_id, limit, offset))
    slurm_jobs = slurm_jobs_of_nodes(store, workflow_id)
    names = ('job_id', 'job_name', 'compute_node_name', 'scheduler_type', 'start_time', 'scheduler_job_id')
    items = [{key: cell for key, cell in zip(names, (*row[:5], slurm_jobs.get(row[5]))) if cell is not None} for row in rows]
    return list_answer(items, offset, total)


def list_answer(items: List[Any], offset: int, total: int) -> Dict[str, Any]:
    """The envelope of every list."""
    return {'items': items, 'offset': offset, 'max_limit': MAX_LIST_ITEMS, 'count': len(items), 'total_count': total,
            'has_more': offset + len(items) < total}


# -------- initialize and reset --------

def refuse_archived(state: WorkflowState) -> None:
    """Refuse to work on what was put away."""
    if state.is_archived:
        raise Refused(f'workflow {state.id} is archived; take it back first: torc.py workflows archive false {state.id}')


def initialize_jobs(store: Store, workflow_id: int, only_uninitialized: bool = False,
                    clear_ephemeral_user_data: bool = True) -> Dict[str, Any]:
    """Make a workflow ready to run: all of it, or only what is uninitialized or undecided (pending_failed) and what depends on it."""
    state = workflow_state(store, workflow_id)
    refuse_archived(state)
    if not only_uninitialized:
        refuse_active(store, workflow_id, 'initialized')
    if state.run_id == 0:
        store.run('UPDATE workflow SET run_id = 1, is_run_zero = 1 WHERE id = ?', (workflow_id,))
    store.run('UPDATE workflow SET is_canceled = 0 WHERE id = ?', (workflow_id,))
    rebuild_dependencies(store, workflow_id)
    if only_uninitialized:
        uninitialize(store, store.ids(f'SELECT id FROM job WHERE workflow_id = ? AND status = {PENDING_FAILED}', (workflow_id,)))
        uninitialize(store, downstream_of_uninitialized(store, workflow_id))
    else:
        end_in_hand(store, store.ids(f'SELECT id FROM job WHERE workflow_id = ? AND {IN_HAND}', (workflow_id,)))
        store.run(f'UPDATE job SET status = {UNINITIALIZED} WHERE workflow_id = ? AND status NOT IN ({UNINITIALIZED}, {DISABLED})', (workflow_id,))
    take_back_spawned(store, workflow_id)
    start_over(store, workflow_id, clear_ephemeral_user_data)
    rearm_actions(store, workflow_id, only_uninitialized)
    note_if_complete(store, workflow_id)
    if store.value('SELECT enable_ro_crate FROM workflow WHERE id = ?', (workflow_id,)):
        note_provenance(store, workflow_id)
    is_again = only_uninitialized and state.run_id > 0
    kind = 'workflow_reinitialized' if is_again else 'workflow_started'
    message = f"{'Reinitialized' if is_again else 'Initialized'} workflow {workflow_id}"
    announce(store, workflow_id, kind, {'category': 'workflow', 'type': kind, 'user': store.caller, 'message': message})
    return {'message': message}


def note_provenance(store: Store, workflow_id: int) -> None:
    """Describe the workflow, its run, this program and the input files as RO-Crate entities; what others added to them stays."""
    workflow = get_workflow(store, workflow_id)
    run = f"run-id-{workflow['run_id']}"
    plan, software = '#torc-workflow', f'#software-torc.py-{run}'
    for entity_id, entity_type, metadata in (
            (plan, 'prov:Plan', {'name': workflow['name'], 'description': workflow.get('description') or workflow['name']}),
            (software, 'SoftwareApplication', {'name': 'torc.py', 'version': __version__}),
            (f'#torc-{run}', 'prov:Activity', {'name': f"{workflow['name']}, run {workflow['run_id']}", 'startTime': format_time(store.now()),
                                               'prov:hadPlan': {'@id': plan}, 'instrument': {'@id': software}})):
        put_entity(store, workflow_id, None, entity_id, entity_type, metadata)
    for file_id, path, identifier, mtime in store.rows(
            'SELECT id, path, identifier, st_mtime FROM file WHERE workflow_id = ? AND st_mtime IS NOT NULL '
            'AND NOT EXISTS (SELECT 1 FROM job_output_file WHERE file_id = file.id) ORDER BY id', (workflow_id,)):
        metadata = {'name': os.path.basename(path), 'dateModified': format_time(mtime), **({'sameAs': path} if identifier else {})}
        put_entity(store, workflow_id, file_id, identifier or path, 'File', metadata)


def put_entity(store: Store, workflow_id: int, file_id: Optional[int], entity_id: str, entity_type: str, metadata: Dict[str, Any]) -> None:
    """Add an RO-Crate entity, or renew the one of this file or name."""
    known = store.one('SELECT id, metadata FROM ro_crate_entity WHERE workflow_id = ? AND (file_id = ? OR entity_id = ?) '
                      'ORDER BY file_id IS NULL LIMIT 1', (workflow_id, file_id, entity_id))
    if known is not None:
        return store.update('ro_crate_entity', known[0], {'metadata': dict(json.loads(known[1]), **metadata)})
    store.insert('ro_crate_entity', {'workflow_id': workflow_id, 'file_id': file_id, 'entity_id': entity_id, 'entity_type': entity_type,
                                     'metadata': dict({'@id': entity_id, '@type': entity_type}, **metadata)})


def refuse_active(store: Store, workflow_id: int, verb: str) -> None:
    """Refuse while jobs are in runners' hands."""
    active = store.value(f'SELECT count(*) FROM job WHERE workflow_id = ? AND status IN {sql_list(ACTIVE)}', (workflow_id,))
    if active:
        raise Refused(f'workflow {workflow_id} cannot be {verb} while {active} of its jobs are pending or running; '
                      f'cancel it first (torc.py cancel {workflow_id}), or reset it with --force')


def downstream_of_uninitialized(store: Store, workflow_id: int, condition: str = '1') -> List[int]:
    """Jobs that depend, however far, on an uninitialized one; but none that is uninitialized, disabled or active itself."""
    kept = sql_list((UNINITIALIZED, DISABLED, *ACTIVE))
    return store.ids(
        'WITH RECURSIVE downstream (id) AS ('
        f'SELECT id FROM job WHERE workflow_id = ? AND status = {UNINITIALIZED} UNION '
        'SELECT waiting.id FROM downstream CROSS JOIN dep_member ON dep_member.job_id = downstream.id '
        'CROSS JOIN job waiting ON waiting.dep_set_id = dep_member.dep_set_id) '
        f'SELECT id FROM job WHERE id IN (SELECT id FROM downstream) AND status NOT IN {kept} '
        f'AND {condition}',
        (workflow_id,))


IN_HAND = f'(status IN {sql_list(ACTIVE)} OR status = {CANCELED} AND compute_node_id IS NOT NULL)'


def end_in_hand(store: Store, job_ids: Sequence[int]) -> None:
    """Jobs are about to go on without the runners that may have them: those attempts end as canceled, so that their names are used."""
    run_by_ids(
        store, 'INSERT OR IGNORE INTO result (workflow_id, job_id, run_id, attempt_id, compute_node_id, '
        'return_code, exec_time_minutes, completion_time, status, is_current, reason) '
        'SELECT workflow_id, id, (SELECT run_id FROM workflow WHERE workflow.id = workflow_id), attempt_id, '
        f"ifnull(compute_node_id, 0), {ORPHAN_RETURN_CODE}, 0, '{format_time(store.now())}', {CANCELED}, 0, "
        f"'the job was reset while a runner had it' FROM job WHERE {IN_HAND} AND id IN", job_ids)


def uninitialize(store: Store, job_ids: Sequence[int]) -> None:
    """Set jobs back to the state before initialize."""
    end_in_hand(store, job_ids)
    run_by_ids(store, f'UPDATE job SET status = {UNINITIALIZED} WHERE id IN', job_ids)


def start_over(store: Store, workflow_id: int, clear_ephemeral: bool) -> None:
    """Give all uninitialized jobs a first attempt, and make them ready, blocked or canceled."""
    fresh = f'(SELECT id FROM job WHERE workflow_id = {int(workflow_id)} AND status = {UNINITIALIZED})'
    store.run(f'UPDATE result SET is_current = 0 WHERE workflow_id = ? AND is_current = 1 AND job_id IN {fresh}', (workflow_id,))
    if clear_ephemeral:
        store.run('UPDATE user_data SET data = NULL WHERE workflow_id = ? AND is_ephemeral = 1 AND id IN '
                  f'(SELECT user_data_id FROM job_output_user_data WHERE job_id IN {fresh})', (workflow_id,))
    recount_sets(store, workflow_id)
    store.run(f'UPDATE job SET status = CASE WHEN dep_set_id IS NULL THEN {READY} ELSE {BLOCKED} END, attempt_id = 1, start_time = NULL, '
              f'compute_node_id = NULL, origin = nullif(origin, ?) WHERE workflow_id = ? AND status = {UNINITIALIZED}', ('retry', workflow_id))
    number_attempts(store, workflow_id)
    idle_sets = store.ids('SELECT id FROM dep_set WHERE workflow_id = ? AND pending = 0', (workflow_id,))
    settle(store, workflow_id, release_sets(store, workflow_id, idle_sets))


def number_attempts(store: Store, workflow_id: int) -> None:
    """Jobs that run again within a run go on counting: an attempt's name (job, run, attempt) is never used twice."""
    run_id = workflow_state(store, workflow_id).run_id
    ended = ('SELECT {0} FROM result WHERE result.workflow_id = ' + str(int(workflow_id)) + f' AND result.run_id = {run_id}')
    if store.one(ended.format('1') + ' LIMIT 1'):
        store.run(f"UPDATE job SET attempt_id = 1 + ({ended.format('max(result.attempt_id)')} AND result.job_id = job.id) "
                  f"WHERE status IN {sql_list((UNINITIALIZED, BLOCKED, READY))} AND id IN ({ended.format('job_id')})")


def reset_workflow_status(store: Store, workflow_id: int, force: bool = False) -> Dict[str, Any]:
    """Begin a new run generation. With force also while jobs are active: what their runners report is then stale."""
    state = workflow_state(store, workflow_id)
    refuse_archived(state)
    if not force:
        refuse_active(store, workflow_id, 'reset')
        if store.one("SELECT 1 FROM scheduled_compute_node WHERE workflow_id = ? AND status IN ('pending', 'active') LIMIT 1", (workflow_id,)):
            raise Refused(f'workflow {workflow_id} has allocations that wait or run; cancel it first, or reset it with --force')
    store.run(f'UPDATE job SET status = {UNINITIALIZED} WHERE workflow_id = ? AND status IN {sql_list(ACTIVE)}', (workflow_id,))
    store.run(f'UPDATE job SET compute_node_id = NULL WHERE workflow_id = ? AND status = {CANCELED}', (workflow_id,))    # in no hand of the new run
    waiting = f'workflow_id = ? AND status IN ({BLOCKED}, {READY})'
    store.run(f'UPDATE job SET attempt_id = 1 WHERE {waiting} AND attempt_id > 1', (workflow_id,))
    store.run('UPDATE workflow SET is_canceled = 0, run_id = run_id + 1, is_run_zero = 0 WHERE id = ?',
              (workflow_id,))
    add_user_event(store, workflow_id, 'reset_workflow_status', force=force)
    return get_workflow(store, workflow_id)


def reset_job_status(store: Store, workflow_id: int, failed_only: bool = False) -> Dict[str, Any]:
    """Set all jobs, or those that ended badly and all that depend on them, back to uninitialized. Disabled ones stay so."""
    workflow_state(store, workflow_id)
    if not failed_only:
        refuse_active(store, workflow_id, 'reset')
    wanted = (*BAD, PENDING_FAILED) if failed_only else tuple(set(STATUS_NAMES) - {UNINITIALIZED, DISABLED})
    job_ids = store.ids(f'SELECT id FROM job WHERE workflow_id = ? AND status IN {sql_list(wanted)}', (workflow_id,))
    uninitialize(store, job_ids)
    if failed_only:
        uninitialize(store, downstream_of_uninitialized(store, workflow_id))
    recount_sets(store, workflow_id)
    if job_ids:
        expect_completion(store, workflow_id)
    add_user_event(store, workflow_id, 'reset_job_status', failed_only=failed_only, updated_count=len(job_ids))
    answer = {'workflow_id': workflow_id, 'updated_count': len(job_ids), 'status': 'uninitialized'}
    return dict(answer, reset_type='failed_only') if failed_only else answer


# -------- change detection --------

MTIME_TOLERANCE_S = 0.01    # file systems and JSON round


def set_file_times(store: Store, workflow_id: int, body: Dict[str, Any]) -> Dict[str, Any]:
    """Record when files were last changed: file id -> seconds since the epoch, or null for a file that is not there."""
    workflow_state(store, workflow_id)
    times = times_by_id(body['files'])
    check_owned(store, 'file', workflow_id, times)
    store_file_times(store, workflow_id, times)
    return {'count': len(times)}


def store_file_times(store: Store, workflow_id: int, times: Dict[int, Optional[float]]) -> None:
    """The same, passing over files that are gone."""
    store.run_many('UPDATE file SET st_mtime = ? WHERE id = ? AND workflow_id = ?',
                   ((mtime, file_id, workflow_id) for file_id, mtime in times.items()))


def times_by_id(files: Dict[str, Optional[float]]) -> Dict[int, Optional[float]]:
    """File times with the ids as numbers: in JSON they are text."""
    for file_id in files:
        if not re.match(r'[0-9]{1,18}\Z', str(file_id)):
            raise BadInput(f'files: {printable(str(file_id))!r} is not the id of a file', field='files')
    return {int(file_id): mtime for file_id, mtime in files.items()}


def check_changes(store: Store, workflow_id: int, body: Dict[str, Any]) -> Dict[str, Any]:
    """Find the finished jobs whose inputs are no longer what they ran with, or whose outputs are gone; set them back.

    `files` tells the caller's present file times (null: missing). With dry_run nothing changes.
    """
    workflow_state(store, workflow_id)
    times = times_by_id(body.get('files') or {})
    check_owned(store, 'file', workflow_id, times)
    reasons = {}  # type: Dict[int, str]
    note_changed_files(store, workflow_id, times, reasons)
    for job_id in changed_job_inputs(store, workflow_id):
        reasons.setdefault(job_id, 'its command, environment, files or input data changed')
    if not body.get('dry_run'):
        uninitialize(store, list(reasons))
        store_file_times(store, workflow_id, times)
        recount_sets(store, workflow_id)
    downstream = find_downstream(store, workflow_id, reasons)
    names = dict(rows_by_ids(store, 'SELECT id, name FROM job WHERE id IN', [*reasons, *downstream]))
    return {key: [{'job_id': job_id, 'job_name': names[job_id], 'reason': reason}
                  for job_id, reason in sorted(found.items())]
            for key, found in (('changed', reasons), ('downstream_jobs', downstream))}


def find_downstream(store: Store, workflow_id: int, changed: Dict[int, str]) -> Dict[int, str]:
    """What else the next initialize of uninitialized jobs runs again, and why: jobs that were reset before,
    and finished ones that depend, however far, on any of these or of the changed ones."""
    downstream = {}     # type: Dict[int, str]
    for status, reason in ((UNINITIALIZED, 'it was added or set back, and not initialized since'),
                           (PENDING_FAILED, 'it failed, and nobody has decided about it')):
        ids = store.ids('SELECT id FROM job WHERE workflow_id = ? AND status = ?', (workflow_id, status))
        downstream.update((job_id, reason) for job_id in ids if job_id not in changed)
    found = [*changed, *downstream]
    passed, seen = set(found), set()    # type: Set[int], Set[int]
    while found:
        members = rows_by_ids(store, 'SELECT job_id, dep_set_id FROM dep_member WHERE job_id IN', found)
        causes = {set_id: job_id for job_id, set_id in sorted(members, reverse=True) if set_id not in seen}
        seen.update(causes)
        names = dict(rows_by_ids(store, 'SELECT id, name FROM job WHERE id IN', sorted(set(causes.values()))))
        rows = rows_by_ids(store, 'SELECT id, dep_set_id, status FROM job WHERE dep_set_id IN', list(causes))
        found = []
        for job_id, set_id, status in rows:
            if job_id not in passed:
                found.append(job_id)
                if STATUSES[status].is_finished and status != DISABLED:
                    downstream[job_id] = f'it depends on {names[causes[set_id]]}'
        passed.update(found)
    return downstream


def note_changed_files(store: Store, workflow_id: int, times: Dict[int, Optional[float]], reasons: Dict[int, str]) -> None:
    """Add the jobs that read a changed file, and the completed ones that made a file which is gone."""
    finished = sql_list((COMPLETED, FAILED, CANCELED, TERMINATED))
    for file_id, path, known in store.rows('SELECT id, path, st_mtime FROM file WHERE workflow_id = ?', (workflow_id,)):
        if file_id not in times:
            continue
        seen = times[file_id]
        if seen is None:
            for job_id in store.ids('SELECT job.id FROM job_output_file made CROSS JOIN job ON job.id = made.job_id '
                                    f'WHERE made.file_id = ? AND job.status = {COMPLETED}', (file_id,)):
                reasons.setdefault(job_id, f'its output {path} is missing')
        if (seen is None) != (known is None) or seen is not None and abs(seen - known) > MTIME_TOLERANCE_S:
            for job_id in store.ids('SELECT job.id FROM job_input_file used CROSS JOIN job ON job.id = used.job_id '
                                    f'WHERE used.file_id = ? AND job.status IN {finished}', (file_id,)):
                reasons.setdefault(job_id, f'its input {path} changed')


def changed_job_inputs(store: Store, workflow_id: int) -> List[int]:
    """Finished jobs that would be handed out differently now than when they were claimed."""
    finished = sql_list((COMPLETED, FAILED, CANCELED, TERMINATED))
    known = dict(store.rows(f'SELECT id, input_hash FROM job WHERE workflow_id = ? AND input_hash IS NOT NULL AND status IN {finished}',
                            (workflow_id,)))
    return [job_id for job_id, found in hash_inputs(store, list(known)).items() if found != known[job_id]]


def process_changed_job_inputs(store: Store, workflow_id: int, dry_run: bool = False) -> Dict[str, Any]:
    """Set back the finished jobs whose command, environment, relations or input data changed since they ran."""
    workflow_state(store, workflow_id)
    job_ids = changed_job_inputs(store, workflow_id)
    names = [row[0] for row in rows_by_ids(store, 'SELECT name FROM job WHERE id IN', job_ids)]
    if not dry_run:
        uninitialize(store, job_ids)
        recount_sets(store, workflow_id)
        add_user_event(store, workflow_id, 'process_changed_job_inputs', reinitialized_count=len(names), reinitialized_jobs=names)
    return {'reinitialized_jobs': names}


def hash_inputs(store: Store, job_ids: Sequence[int]) -> Dict[int, str]:
    """Job id -> SHA-256 of what the job is given to run: command, script, env, prerequisites, file paths, input data."""
    parts = {row[0]: list(row[1:]) for row in rows_by_ids(
        store, 'SELECT id, command, invocation_script, env, (SELECT digest FROM dep_set WHERE dep_set.id = explicit_set_id) '
        'FROM job WHERE id IN', job_ids)}
    for table, text in (('job_input_file', 'path'), ('job_output_file', 'path')):
        for job_id, name, path in rows_by_ids(
                store, f"SELECT used.job_id, '{table}', file.{text} FROM {table} used CROSS JOIN file ON file.id = used.file_id "
                'WHERE used.job_id IN', job_ids):
            parts[job_id].append(f'{name}:{path}')
    for table, text in (('job_input_user_data', 'data'), ('job_output_user_data', 'name')):
        for job_id, name, content in rows_by_ids(
                store, f"SELECT used.job_id, '{table}', record.name || '=' || ifnull(record.{text}, '') FROM {table} used "
                'CROSS JOIN user_data record ON record.id = used.user_data_id WHERE used.job_id IN', job_ids):
            parts[job_id].append(f'{name}:{content}')
    fixed = 4   # the columns of the job itself; what follows is in no certain order
    return {job_id: hashlib.sha256(format_json(part[:fixed] + sorted(part[fixed:])).encode()).hexdigest() for job_id, part in parts.items()}


# -------- claiming --------

class Kind(NamedTuple):
    """What claims look at, for a group of ready jobs."""
    id: int
    priority: int
    num_gpus: int
    runtime_s: int
    memory_bytes: int
    num_cpus: int
    num_nodes: int
    scheduler_id: Optional[int]
    labels: Optional[str]           # JSON list

    def rank(self) -> Tuple[int, ...]:
        """Jobs with a smaller rank are claimed first."""
        return (-self.priority, -self.num_gpus, -self.runtime_s, -self.memory_bytes, -self.num_cpus)


ALL_KINDS_QUERY = (
    'SELECT kind.id, kind.priority, needs.num_gpus, needs.runtime_s, needs.memory_bytes, needs.num_cpus, needs.num_nodes, '
    'kind.scheduler_id, kind.labels FROM job_kind kind '
    'CROSS JOIN resource_requirements needs ON needs.id = kind.resource_requirements_id '
    'WHERE kind.workflow_id = ?')
KIND_QUERY = (f'{ALL_KINDS_QUERY} AND EXISTS '
              f'(SELECT 1 FROM job WHERE job.kind_id = kind.id AND job.status = {READY})')


def ready_kinds(store: Store, workflow_id: int, labels: Optional[Sequence[str]]) -> List[Kind]:
    """Kinds with ready jobs that a node with these labels may take: it must have all of a job's, and labelled nodes take
    labelled jobs only."""
    check_labels(labels)
    mine = set(labels or ())
    kinds = [Kind(*row) for row in store.rows(KIND_QUERY, (workflow_id,))]
    return [kind for kind in kinds if matches_labels(mine, kind.labels)]


def matches_labels(mine: Set[str], labels: Optional[str]) -> bool:
    """Whether a node with some labels may take jobs with these (JSON, None: without)."""
    return mine.issuperset(json.loads(labels)) if labels else not mine


class Capacity(NamedTuple):
    """Free CPUs, memory in bytes and GPUs of one node."""
    num_cpus: int
    memory_bytes: int
    num_gpus: int

    def count(self, kind: Kind) -> int:
        """How many single-node jobs of a kind fit."""
        fits = [self.num_cpus // kind.num_cpus]
        if kind.memory_bytes:
            fits.append(self.memory_bytes // kind.memory_bytes)
        if kind.num_gpus:
            fits.append(self.num_gpus // kind.num_gpus)
        return max(0, min(fits))

    def less(self, kind: Kind, count: int) -> 'Capacity':
        """What is left after taking so many jobs of a kind."""
        return Capacity(self.num_cpus - count * kind.num_cpus, self.memory_bytes - count * kind.memory_bytes,
                        self.num_gpus - count * kind.num_gpus)


class Packer:
    """Fills the free nodes of one claim, kind by kind. Jobs of several nodes take whole, untouched ones."""

    def __init__(self, capacity: Capacity, num_nodes: int) -> None:
        self.whole = capacity                       # of an untouched node
        self.nodes = [capacity] * max(1, num_nodes)

    def room(self, kind: Kind) -> int:
        """For how many jobs of a kind there is room."""
        if kind.num_nodes > 1:
            return len(self.untouched(kind)) // kind.num_nodes
        return sum(node.count(kind) for node in self.nodes)

    def untouched(self, kind: Kind) -> List[int]:
        """Places of the nodes of which nothing is taken, if a job of the kind fits one."""
        return [place for place, node in enumerate(self.nodes) if node == self.whole] if self.whole.count(kind) else []

    def take(self, kind: Kind, wanted: int) -> int:
        """Reserve room for up to so many jobs of a kind; for how many there was room."""
        if kind.num_nodes > 1:
            return self.take_whole_nodes(kind, wanted)
        taken = 0
        for place, node in enumerate(self.nodes):
            count = min(node.count(kind), wanted - taken)
            self.nodes[place] = node.less(kind, count)
            taken += count
        return taken

    def take_whole_nodes(self, kind: Kind, wanted: int) -> int:
        """The same for jobs that need several nodes each."""
        untouched = self.untouched(kind)
        count = min(wanted, len(untouched) // kind.num_nodes)
        for place in reversed(untouched[:count * kind.num_nodes]):
            del self.nodes[place]
        return count


def take_ready(store: Store, kind_id: int, count: int, after: int = 0) -> List[int]:
    """Ids of the first ready jobs of a kind."""
    return store.ids(f'SELECT id FROM job WHERE kind_id = ? AND status = {READY} AND id > ? ORDER BY id LIMIT ?', (kind_id, after, count))


def claim_by_resources(store: Store, workflow_id: int, want: Dict[str, Any]) -> List[int]:
    """Ready jobs that fit the stated free capacity per node and the remaining time, first those bound to the caller's
    scheduler, then unbound ones, then (unless strict) any. `depth` further rounds of the `total` capacity may be taken ahead."""
    missing = [name for name in ('num_cpus', 'memory_gb', 'num_gpus') if want.get(name) is None]
    if missing:
        raise BadInput(f"a claim by resources needs {', '.join(missing)}")
    limit_s = parse_time_limit(want.get('time_limit'))
    kinds = [kind for kind in ready_kinds(store, workflow_id, want.get('labels')) if limit_s is None or kind.runtime_s <= limit_s]
    kinds = kinds_by_turn(kinds, want)
    chosen = []  # type: List[int]
    last = {}    # type: Dict[int, int]
    for number in range(max(1, want.get('depth') or 1)):
        capacity = want['total'] if number and want.get('total') else want
        packer = Packer(Capacity(int(capacity['num_cpus']), int(capacity['memory_gb'] * 1024 ** 3), int(capacity['num_gpus'])),
                        int(want.get('num_nodes') or 1))
        found = pack_round(store, kinds, packer, want['limit'] - len(chosen), last)
        if not found:
            break
        chosen += found
    return chosen


def claim_turn(kind: Kind, scheduler_id: Optional[int]) -> int:
    """0 for jobs bound to the caller's scheduler, 1 for unbound ones, 2 for those of another."""
    return 1 if kind.scheduler_id is None else 0 if kind.scheduler_id == scheduler_id else 2


def kinds_by_turn(kinds: Sequence[Kind], want: Dict[str, Any]) -> List[List[Kind]]:
    """The kinds in the order in which a caller may take them; those that need the same together."""
    mine = want.get('scheduler_config_id')

    def order(kind: Kind) -> Tuple:
        return (claim_turn(kind, mine), kind.rank(), kind.num_nodes)
    allowed = [kind for kind in kinds if claim_turn(kind, mine) < 2 or not want.get('strict')]
    return [list(group) for _, group in itertools.groupby(sorted(allowed, key=order), key=order)]


def pack_round(store: Store, kinds: Sequence[Sequence[Kind]], packer: Packer, limit: int, last: Dict[int, int]) -> List[int]:
    """Take from each kind what fits, at most `limit`. `last` remembers the last job taken of each kind."""
    chosen = []  # type: List[int]
    for group in kinds:
        room = min(limit - len(chosen), packer.room(group[0]))
        if room > 0:
            ready = sorted((job_id, kind.id) for kind in group for job_id in take_ready(store, kind.id, room, last.get(kind.id, 0)))
            taken = ready[:packer.take(group[0], min(room, len(ready)))]
            last.update((kind_id, job_id) for job_id, kind_id in taken)
            chosen += [job_id for job_id, _ in taken]
    return chosen


def claim_by_queue(store: Store, workflow_id: int, want: Dict[str, Any]) -> List[int]:
    """The next ready jobs by priority and id, whatever they need."""
    kinds = sorted(ready_kinds(store, workflow_id, want.get('labels')), key=lambda kind: -kind.priority)
    chosen = []  # type: List[int]
    for _, group in itertools.groupby(kinds, key=lambda kind: kind.priority):
        room = want['limit'] - len(chosen)
        if room <= 0:
            break
        chosen += sorted(job_id for kind in group for job_id in take_ready(store, kind.id, room))[:room]
    return chosen


CLAIM_STRATEGIES = {'resources': claim_by_resources, 'queue': claim_by_queue}


def parse_time_limit(text: Optional[str]) -> Optional[int]:
    """A claim's time limit in seconds; None: no limit."""
    try:
        return None if text is None else parse_duration(text)
    except ValueError as error:
        raise Refused(f'time_limit: {error}', field='time_limit', value=text) from None


def claim(store: Store, state: WorkflowState, want: Dict[str, Any], node_id: Optional[int]) -> List[int]:
    """Choose ready jobs by the wanted strategy and hand them to a node: ready -> pending."""
    check_references(store, state.id, want)
    if state.is_canceled or want['limit'] <= 0:
        return []
    chosen = CLAIM_STRATEGIES[want['strategy']](store, state.id, want)
    hashes = hash_inputs(store, chosen)
    store.run_many(f'UPDATE job SET status = {PENDING}, compute_node_id = ?, input_hash = ? WHERE id = ?',
                   ((node_id, hashes[job_id], job_id) for job_id in chosen))
    return chosen


def explain_no_jobs(store: Store, state: WorkflowState, want: Dict[str, Any]) -> str:
    """Why a claim brought nothing, in words that a user understands."""
    if state.is_canceled:
        return 'Workflow is canceled'
    if want['limit'] <= 0:
        return 'the limit is 0'
    everything = [Kind(*row) for row in store.rows(KIND_QUERY, (state.id,))]
    if not everything:
        waiting = count_by_status(store, state.id)
        return 'no job is ready: ' + (', '.join(f'{count} {name}' for name, count in waiting.items() if count) or 'there are none')
    kinds = ready_kinds(store, state.id, want.get('labels'))
    misfits = find_misfits(store, state.id, want, KIND_QUERY, f'status = {READY}')
    if misfits and all(lacks_of(kind, want) for kind in kinds):
        return '; '.join(misfits)
    if not kinds:
        return "the ready jobs have labels that this node lacks" if not want.get('labels') else \
            "no ready job has labels that are all among this node's"
    limit_s = parse_time_limit(want.get('time_limit'))
    if limit_s is not None and all(kind.runtime_s > limit_s for kind in kinds):
        shortest_s = min(kind.runtime_s for kind in kinds)
        return f'every ready job needs at least {format_duration(shortest_s)}, and only {format_duration(limit_s)} are left'
    if want.get('strict') and not kinds_by_turn(kinds, want):
        return 'every ready job is bound to another scheduler'
    smallest = min(kinds, key=lambda kind: (kind.num_nodes, kind.num_cpus, kind.memory_bytes, kind.num_gpus))
    return (f'no ready job fits what is free: the smallest needs {smallest.num_cpus} CPUs, {format_memory(smallest.memory_bytes)} and '
            f'{smallest.num_gpus} GPUs on {smallest.num_nodes} nodes')


MISFITS_SHOWN = 5


def lacks_of(kind: Kind, want: Dict[str, Any]) -> List[str]:
    """What jobs of a kind need and a runner of the size `total` will never have, with the option for it.

    A labelled runner passes over jobs of other labels: that is no lack.
    """
    labels = set(json.loads(kind.labels)) if kind.labels else set()
    if want.get('labels') and not (labels and labels.issubset(want['labels'])):
        return []
    lacks = [f"a runner with --label {','.join(sorted(labels))}"] if labels and not want.get('labels') else []
    size = want.get('total') if want['strategy'] == 'resources' else None
    if not size:
        return lacks
    limit_s = parse_time_limit(want.get('time_limit'))
    memory_bytes, num_nodes = int(size['memory_gb'] * 1024 ** 3), want.get('num_nodes') or 1
    left = format_duration(max(0, (limit_s or 0) - CLAIM_GRACE_S))
    return lacks + [f'{needs}, and this runner has {has}' for is_lacking, needs, has in (
        (kind.num_cpus > size['num_cpus'], f'{kind.num_cpus} CPUs', f"{size['num_cpus']} (--num-cpus)"),
        (kind.memory_bytes > memory_bytes, f'{format_memory(kind.memory_bytes)} of memory',
         f'{format_memory(memory_bytes)} (--memory-gb)'),
        (kind.num_gpus > size['num_gpus'], f'{kind.num_gpus} GPUs', f"{size['num_gpus']} (--num-gpus)"),
        (kind.num_nodes > num_nodes, f'{kind.num_nodes} nodes', str(num_nodes)),
        (limit_s is not None and kind.runtime_s > limit_s, f'a runtime of {format_duration(kind.runtime_s)}',
         f'{left} left (--time-limit, --end-time)')) if is_lacking]


def find_misfits(store: Store, workflow_id: int, want: Dict[str, Any], kinds: str,
                 condition: str) -> List[str]:
    """For each reason why jobs will never fit a runner: one of those jobs and the reason, for users.

    `kinds` is the query of the kinds to look at, `condition` an SQL condition for their jobs.
    """
    lacking = collections.defaultdict(list)  # type: Dict[str, List[int]]
    for kind in (Kind(*row) for row in store.rows(kinds, (workflow_id,))):
        lacking['; '.join(lacks_of(kind, want))].append(kind.id)
    lacking.pop('', None)
    found = []
    for reason, kind_ids in list(lacking.items())[:MISFITS_SHOWN]:
        some = sql_list(kind_ids[:500])
        name = store.value(f'SELECT name FROM job WHERE {condition} AND kind_id IN {some} LIMIT 1')
        found += [f'jobs such as {name} cannot run here: they need {reason}'] if name is not None else []
    return found


def claim_jobs_based_on_resources(store: Store, workflow_id: int, limit: int, body: Dict[str, Any],
                                  strict_scheduler_match: bool = False) -> Dict[str, Any]:
    """Claim jobs that fit a node's free resources."""
    state = workflow_state(store, workflow_id)
    check_owned(store, 'compute_node', workflow_id, [body['id']] if body.get('id') else [])
    want = dict(body, strategy='resources', limit=limit, strict=strict_scheduler_match)
    chosen = claim(store, state, want, body.get('id') or None)
    answer = {'jobs': claimed_models(store, chosen)}  # type: Dict[str, Any]
    if not chosen:
        answer['reason'] = explain_no_jobs(store, state, want)
    return answer


def claim_next_jobs(store: Store, workflow_id: int, limit: int = 10, labels: str = '') -> Dict[str, Any]:
    """Claim the next jobs of the queue."""
    state = workflow_state(store, workflow_id)
    if limit < 0:
        raise Refused(f'limit is {limit}; it must be at least 0')
    want = {'strategy': 'queue', 'limit': min(limit, MAX_LIST_ITEMS), 'labels': [label for label in labels.split(',') if label]}
    return {'jobs': claimed_models(store, claim(store, state, want, None))}


def claimed_models(store: Store, job_ids: Sequence[int]) -> List[Dict[str, Any]]:
    """Claimed jobs as JobModel, with the ids of what they write."""
    jobs = {job['id']: job for piece in chunks(job_ids)
            for job in store.select('job_view', f"WHERE id IN ({', '.join('?' * len(piece))})", piece)}
    for _, field, table, column, _ in JOB_RELATIONS:
        if field.startswith('output'):
            for job_id, item in rows_by_ids(store, f'SELECT job_id, {column} FROM {table} WHERE job_id IN', job_ids):
                jobs[job_id].setdefault(field, []).append(item)
    return [jobs[job_id] for job_id in job_ids]


# -------- start, complete, retry --------

def start_job(store: Store, job_id: int, run_id: int, compute_node_id: int) -> Dict[str, Any]:
    """A node has started a claimed job: pending -> running. The same word again is no error."""
    job = job_state(store, job_id)
    check_run(workflow_state(store, job.workflow_id), run_id)
    check_owned(store, 'compute_node', job.workflow_id, [compute_node_id])
    if (job.status, job.compute_node_id) != (RUNNING, compute_node_id):
        if job.status != PENDING:
            raise Refused(f'job {job_id} is {STATUS_NAMES[job.status]}; only a pending one can be started')
        if job.compute_node_id not in (None, compute_node_id):
            raise Refused(f'job {job_id} is in the hands of compute node {job.compute_node_id}')
        mark_started(store, job_id, compute_node_id, format_time(store.now()))
    return get_row(store, 'job_view', job_id)


def mark_started(store: Store, job_id: int, node_id: int, start_time: str) -> None:
    """pending -> running; anything else stays."""
    is_new = store.run(f'UPDATE job SET status = {RUNNING}, start_time = ?, compute_node_id = ? WHERE id = ? AND status = {PENDING}',
                       (start_time, node_id, job_id))
    if is_new and store.watched:
        job = job_state(store, job_id)
        announce_start(store, job, workflow_state(store, job.workflow_id).run_id)


def complete_job(store: Store, job_id: int, status: str, run_id: int, body: Dict[str, Any]) -> Dict[str, Any]:
    """The end of an attempt. The same again gets the same answer; another one for the same attempt is refused."""
    job = job_state(store, job_id)
    check_result(store, body, job_id=job_id, workflow_id=job.workflow_id, status=status, run_id=run_id)
    record_end(store, workflow_state(store, job.workflow_id), body)
    note_if_complete(store, job.workflow_id)
    return get_job(store, job_id)


def check_final(status: str) -> None:
    """Refuse a status that is no end of an attempt."""
    if not STATUSES[STATUS_CODES[status]].is_final:
        raise Refused(f'a job cannot complete as {status!r}')


def check_result(store: Store, result: Dict[str, Any], **asked: Any) -> None:
    """Refuse a result that is not of the job, workflow, status and run of its request."""
    check_final(asked['status'])
    for key, value in asked.items():
        if result[key] != value:
            raise Refused(f'{key} of the result is {result[key]}, and {value} in the request', field=key)
    check_references(store, asked['workflow_id'], result)


def batch_complete_jobs(store: Store, workflow_id: int, body: Dict[str, Any]) -> Dict[str, Any]:
    """The ends of many attempts; each is accepted or refused for itself."""
    state = workflow_state(store, workflow_id)
    completed, errors = [], []
    for entry in body['completions']:
        try:
            check_result(store, entry['result'], job_id=entry['job_id'], workflow_id=workflow_id, status=entry['status'], run_id=entry['run_id'])
            record_end(store, state, entry['result'])
            completed.append(entry['job_id'])
        except TorcError as error:
            errors.append({'job_id': entry['job_id'], 'message': error.message})
    note_if_complete(store, workflow_id)
    return {'completed': completed, 'errors': errors}


def record_end(store: Store, state: WorkflowState, end: Dict[str, Any]) -> str:
    """Take in the end of one attempt, with all that follows from it. The job's status afterwards.

    `end` is a ResultModel, with `retry` if the next attempt is to be made ready, or `interrupted` if it must
    be, since the job was stopped only because its runner was. Raises TorcErrors before it writes.
    """
    job = job_state(store, end['job_id'])
    if job.workflow_id != state.id:
        raise NotFound(f'workflow {state.id} has no job {job.id}')
    check_run(state, end['run_id'])
    end = dict(end, run_id=state.run_id)
    attempt_id = end.get('attempt_id') or job.attempt_id
    if (job.status, job.attempt_id) == (PENDING_FAILED, attempt_id) and end['status'] != 'pending_failed':
        return decide_failure(store, state, job, end)
    if is_known_end(store, job, attempt_id, end):
        return STATUS_NAMES[job.status] if attempt_id == job.attempt_id else 'ready'
    if attempt_id != job.attempt_id:
        raise Refused(f'attempt {attempt_id} of job {job.id} is over: the current one is {job.attempt_id}')
    was_canceled = job.status == CANCELED and job.compute_node_id is not None
    if job.status not in OPEN and not was_canceled:
        raise Refused(f'job {job.id} is already complete, as {STATUS_NAMES[job.status]}')
    if job.status in ACTIVE or was_canceled:
        refuse_other_holder(store, job, end.get('compute_node_id'))
    else:
        note_unclaimed(store, job)
    reason = (end.get('reason') or '')[:MAX_REASON_CHARACTERS]
    store.run('UPDATE result SET is_current = 0 WHERE job_id = ? AND is_current = 1', (job.id,))
    is_interrupted = bool(end.get('interrupted')) and end['status'] == 'terminated' and not was_canceled
    store.insert('result', dict(
        end, workflow_id=state.id, attempt_id=attempt_id, is_current=True, reason=reason or None,
        is_interrupted=is_interrupted, compute_node_id=end.get('compute_node_id') or job.compute_node_id or 0,
        status='canceled' if was_canceled else end['status']))
    if was_canceled:
        return 'canceled'
    record_failure(store, state.id, job, end, reason)
    if state.id in store.watched:
        if job.status == PENDING:       # the runner has not told its start before
            announce_start(store, job, state.run_id)
        more = {'message': reason} if reason else {}
        announce_end(store, state.id, job.id, job.name, end['status'], return_code=end['return_code'], **more)
    may_retry = end.get('retry') and end['status'] in ('failed', 'terminated')
    most = end.get('max_retries') or DEFAULT_MAX_RETRIES
    if is_interrupted or may_retry and has_retries(store, state, job, most):
        return begin_next_attempt(store, state, job)
    status = STATUS_CODES[end['status']]
    store.run('UPDATE job SET status = ?, start_time = NULL WHERE id = ?', (status, job.id))
    if STATUSES[status].is_finished:
        settle(store, state.id, [(job.id, status)])
    return end['status']


def record_failure(store: Store, workflow_id: int, job: JobState, end: Dict[str, Any], reason: str) -> None:
    """Keep an attempt that did not complete among the workflow's events, whether it is retried or not."""
    level = FAILURE_LEVELS.get(end['status'])
    if level:       # announce_end() tells those who listen
        store.add_event(workflow_id, {
            'category': 'job', 'event_type': f"job_{end['status']}", 'level': level,
            'job_id': job.id, 'job_name': job.name, 'run_id': end['run_id'], 'attempt_id': job.attempt_id,
            'return_code': end['return_code'],
            'message': f"{job.name}: {reason or 'return code %d' % end['return_code']}"})


def refuse_other_holder(store: Store, job: JobState, node_id: Optional[int]) -> None:
    """Refuse the end of an attempt that is in the hands of another node, while that one is at work."""
    if node_id is not None and job.compute_node_id not in (None, node_id) and store.value(
            'SELECT is_active FROM compute_node WHERE id = ?', (job.compute_node_id,)):
        raise Refused(f'job {job.id} is in the hands of compute node {job.compute_node_id}')


def note_unclaimed(store: Store, job: JobState) -> None:
    """A job that nobody has claimed ends (by a journal, by a person's word): note what a claim would have."""
    store.run('UPDATE job SET input_hash = ? WHERE id = ?', (hash_inputs(store, [job.id])[job.id], job.id))
    if job.status != READY:
        count_trigger(store, job.workflow_id, 'on_jobs_ready', [job.id])


def is_known_end(store: Store, job: JobState, attempt_id: int, end: Dict[str, Any]) -> bool:
    """Whether this very end was taken in before. Refused if the attempt has ended otherwise."""
    known = store.one('SELECT return_code, status FROM result WHERE job_id = ? AND run_id = ? AND attempt_id = ?',
                      (job.id, end['run_id'], attempt_id))
    if known is None:
        return False
    if known[0] == end['return_code'] and (known[1] == STATUS_CODES[end['status']] or known[1] == CANCELED):
        return True
    raise Refused(f'attempt {attempt_id} of job {job.id} is already complete, as {STATUS_NAMES[known[1]]} '
                  f'with return code {known[0]}')


def decide_failure(store: Store, state: WorkflowState, job: JobState, end: Dict[str, Any]) -> str:
    """A person or program says how a pending_failed attempt ends: its result gets that status, its dependants go on or are canceled."""
    status = STATUS_CODES[end['status']]
    if not store.run('UPDATE result SET status = ? WHERE job_id = ? AND run_id = ? AND attempt_id = ?',
                     (status, job.id, state.run_id, job.attempt_id)):
        raise Refused(f'job {job.id} has no result in run {state.run_id} to decide about; retry it, or reset it')
    store.run('UPDATE job SET status = ? WHERE id = ?', (status, job.id))
    announce_end(store, state.id, job.id, job.name, end['status'], return_code=end['return_code'])
    settle(store, state.id, [(job.id, status)])
    return end['status']


def begin_next_attempt(store: Store, state: WorkflowState, job: JobState) -> str:
    """Make a job ready again, as its next attempt; or blocked, if it had ended before its prerequisites."""
    waits = 'dep_set_id IN (SELECT id FROM dep_set WHERE pending > 0)'
    store.run(f'UPDATE job SET status = CASE WHEN {waits} THEN {BLOCKED} ELSE {READY} END, '
              "attempt_id = ?, origin = ifnull(origin, 'retry'), start_time = NULL, "
              'compute_node_id = NULL WHERE id = ?', (job.attempt_id + 1, job.id))
    expect_completion(store, state.id)
    record_event(store, state.id, {
        'event_type': 'job_retried', 'job_id': job.id, 'job_name': job.name, 'previous_attempt': job.attempt_id,
        'new_attempt': job.attempt_id + 1, 'run_id': state.run_id, 'message': f'Job {job.name} begins attempt {job.attempt_id + 1}'})
    return 'ready'


def has_retries(store: Store, state: WorkflowState, job: JobState, max_retries: int) -> bool:
    """Whether a job may have another attempt after this one. Interrupted ones do not count."""
    return job.attempt_id - count_interruptions(store, state.run_id, [job.id])[job.id] < max_retries


def count_interruptions(store: Store, run_id: int, job_ids: Sequence[int]) -> Dict[int, int]:
    """How many attempts of each of these jobs ended in this run because their runners were interrupted."""
    sql = f'SELECT job_id FROM result WHERE is_interrupted = 1 AND run_id = {int(run_id)} AND job_id IN'
    return collections.Counter(row[0] for row in rows_by_ids(store, sql, job_ids))


def retry_job(store: Store, job_id: int, run_id: int, max_retries: int) -> Dict[str, Any]:
    """Make a running, failed or terminated job ready for its next attempt, if it has one left."""
    job = job_state(store, job_id)
    state = workflow_state(store, job.workflow_id)
    check_run(state, run_id)
    if state.is_canceled:
        raise Refused(f'workflow {state.id} is canceled')
    if job.status not in (RUNNING, FAILED, TERMINATED):
        raise Refused(f'job {job_id} is {STATUS_NAMES[job.status]}; only a running, failed or terminated one can be retried')
    if not has_retries(store, state, job, max_retries):
        raise Refused(f'job {job_id} has used its {max_retries} attempts')
    begin_next_attempt(store, state, job)
    if job.status != RUNNING:
        recount_sets(store, job.workflow_id)
    return get_row(store, 'job_view', job_id)


def manage_status_change(store: Store, job_id: int, status: str, run_id: int) -> Dict[str, Any]:
    """Set a job to a status that is not an end. What depends on a job that is set back is set back too, at the next initialize."""
    job = job_state(store, job_id)
    code = STATUS_CODES[status]
    if STATUSES[code].is_final:
        raise Refused(f'{status} is an end: report it as a completion')
    if code != job.status:
        check_run(workflow_state(store, job.workflow_id), run_id)
        if code not in ACTIVE:
            end_in_hand(store, [job_id])
        store.run('UPDATE job SET status = ? WHERE id = ?', (code, job_id))
        if code not in ACTIVE:
            store.run('UPDATE job SET start_time = NULL, compute_node_id = NULL WHERE id = ?', (job_id,))
            number_attempts(store, job.workflow_id)
        if STATUSES[job.status].is_finished or STATUSES[code].is_finished:
            reverse_or_settle(store, job, code)
            expect_completion(store, job.workflow_id)
            note_if_complete(store, job.workflow_id)
    return get_job(store, job_id)


def reverse_or_settle(store: Store, job: JobState, code: int) -> None:
    """After a job was moved into or out of a finished status by hand."""
    if code == UNINITIALIZED:   # what has ended further down stays, as in Torc, until the next initialize
        near = f'dep_set_id IN (SELECT dep_set_id FROM dep_member WHERE job_id = {job.id})'
        condition = f'(status NOT IN {sql_list(FINISHED)} OR {near})'
        uninitialize(store, downstream_of_uninitialized(store, job.workflow_id, condition))
    recount_sets(store, job.workflow_id)
    sets = store.ids('SELECT dep_set_id FROM dep_member WHERE job_id = ?', (job.id,))
    settle(store, job.workflow_id, release_sets(store, job.workflow_id, sets))
    if STATUSES[code].is_finished:
        count_trigger(store, job.workflow_id, 'on_jobs_complete', [job.id])


def give_back(store: Store, job_ids: Sequence[int]) -> None:
    """Claimed jobs that nobody started: pending -> ready."""
    run_by_ids(store, f'UPDATE job SET status = {READY}, compute_node_id = NULL WHERE status = {PENDING} AND id IN', job_ids)


# -------- why a job failed, or does not run --------
#
# Every answer is bounded, however many jobs there are.

FAILURES_EXPLAINED = 5      # groups of failures, and as many canceled jobs and prerequisites
CAUSE_STEPS = 1000          # from a canceled job up to the failure that was the cause
ENDED_WORDS = {FAILED: 'failed', TERMINATED: 'was terminated', CANCELED: 'was canceled'}
BROKEN = (FAILED, TERMINATED, PENDING_FAILED)
BROKEN_WORDS = tuple(STATUS_NAMES[code] for code in BROKEN)
HOLDING = (RUNNING, PENDING, READY, PENDING_FAILED, UNINITIALIZED)  # what blocked jobs wait for in the end
IDLE_REASONS = {READY: 'waits for a runner', UNINITIALIZED: 'the workflow is not initialized'}
PREREQUISITES = ('FROM job CROSS JOIN dep_member ON dep_member.dep_set_id = job.dep_set_id '
                 'CROSS JOIN job need ON need.id = dep_member.job_id WHERE job.id = ?')


def explain_job(store: Store, job_id: int) -> Dict[str, Any]:
    """Why a job failed or was canceled, or what it waits for; without `reason` if nothing is wrong."""
    job = job_state(store, job_id)
    answer = {'job_id': job.id, 'job_name': job.name, 'status': STATUS_NAMES[job.status]}
    if job.status in BROKEN:
        reason = end_reason(store, job_id)
    elif job.status == CANCELED:
        reason = end_reason(store, job_id) or cancellation_reason(store, job)
    elif job.status == BLOCKED:
        condition = f'need.status IN {sql_list(UNFINISHED)}'
        found = store.rows(f'SELECT need.name, need.status {PREREQUISITES} AND {condition}', (job_id,))
        names = [f'{name} ({STATUS_NAMES[status]})' for name, status in found]
        reason = f'waits for {first_of(names, FAILURES_EXPLAINED)}'
    else:
        reason = IDLE_REASONS.get(job.status)
    return dict(answer, reason=reason) if reason else answer


def end_reason(store: Store, job_id: int) -> Optional[str]:
    """Why a job's last attempt ended badly; None if it left no result."""
    found = store.one('SELECT reason, return_code FROM result WHERE job_id = ? AND is_current = 1', (job_id,))
    return found and (found[0] or f'return code {found[1]}')


def cancellation_reason(store: Store, job: JobState) -> str:
    """Why a job without a result was canceled: the prerequisite that failed, directly or through others."""
    if job.compute_node_id is not None:
        return 'canceled while it ran'
    path = []  # type: List[Tuple]
    job_id = job.id
    while len(path) < CAUSE_STEPS and (not path or path[-1][2] == CANCELED):
        found = store.one(
            f'SELECT need.id, need.name, need.status {PREREQUISITES} AND need.status IN {sql_list(BAD)} '
            f'AND job.cancel_on_blocking_job_failure = 1 ORDER BY need.status = {CANCELED}, need.id LIMIT 1',
            (job_id,))
        if found is None:       # no failure was the cause
            return 'never ran: the workflow was canceled'
        path.append(found)
        job_id = found[0]
    steps = [f'{name} {ENDED_WORDS[status]}' for _, name, status in (path[:1] + path[-1:])[:len(path)]]
    reason = end_reason(store, job_id)
    return f"never ran: its prerequisite {', because '.join(steps)}" + (f': {reason}' if reason else '')


def explain_workflow(store: Store, workflow_id: int, limit: int = FAILURES_EXPLAINED) -> Dict[str, Any]:
    """Why jobs failed, those with the same reason together and the most frequent first; why jobs were
    canceled; and what blocked ones wait for. Each list ends at the limit.
    """
    workflow_state(store, workflow_id)
    limit = page_size(0, limit)
    groups = store.rows(
        'SELECT min(job.id), count(*), result.return_code FROM job '
        'LEFT JOIN result ON result.job_id = job.id AND result.is_current = 1 '
        f'WHERE job.workflow_id = ? AND job.status IN {sql_list(BROKEN)} '
        'GROUP BY result.return_code, result.reason ORDER BY 2 DESC, 1 LIMIT ?', (workflow_id, limit))
    failures = [dict(explain_job(store, job_id), count=count, return_code=code)
                for job_id, count, code in groups]
    canceled = store.ids('SELECT id FROM job WHERE workflow_id = ? AND status = ? ORDER BY id LIMIT ?',
                         (workflow_id, CANCELED, limit))
    blockers = find_blockers(store, workflow_id, limit)
    return {'failures': failures, 'canceled': [explain_job(store, job_id) for job_id in canceled],
            'blockers': [explain_job(store, job_id) for job_id in blockers]}


def find_blockers(store: Store, workflow_id: int, limit: int) -> List[int]:
    """The first jobs that blocked ones wait for and that are not blocked themselves, running ones first."""
    found = []  # type: List[int]
    for status in HOLDING:
        found += store.ids(
            'SELECT id FROM job WHERE workflow_id = ? AND status = ? AND EXISTS (SELECT 1 FROM dep_member '
            'CROSS JOIN job waiting ON waiting.dep_set_id = dep_member.dep_set_id '
            f'WHERE dep_member.job_id = job.id AND waiting.status = {BLOCKED}) ORDER BY id LIMIT ?',
            (workflow_id, status, limit - len(found)))
    return found


WORKFLOW_STATES = (     # the first of which there is a job; a workflow without jobs is uninitialized
    ('running', ACTIVE), ('ready', (READY,)), ('pending_failed', (PENDING_FAILED,)), ('blocked', (BLOCKED,)),
    ('uninitialized', (UNINITIALIZED,)), ('failed', BAD), ('completed', FINISHED))


def list_workflow_statuses(store: Store, ids: Sequence[int]) -> Dict[str, Any]:
    """State of workflows in one word, by id; without those that do not exist or the caller may not see."""
    form = "WHEN EXISTS (SELECT 1 FROM job WHERE workflow_id = workflow.id AND status IN {}) THEN '{}'"
    cases = ' '.join(form.format(sql_list(codes), word) for word, codes in WORKFLOW_STATES)
    case = f"CASE WHEN is_canceled THEN 'canceled' {cases} ELSE 'uninitialized' END"
    rows = rows_by_ids(store, f'SELECT id, {case} FROM workflow WHERE id IN', ids)
    if is_limited(store):
        rows = [row for row in rows if may_use(store, row[0], store.caller)]
    return {'statuses': {str(workflow_id): word for workflow_id, word in rows}}


# -------- jobs that make jobs --------
#
# A running job may spawn others, which wait for it at least. They belong to a lineage (its name unless told otherwise);
# each call that adds jobs is one generation of it, and leaves a user data record __torc_lineage__<lineage>__g<number>
# with what the caller wants to remember. The same call again, from a second attempt say, adds nothing and gets the first
# answer. When a job starts over (initialize, after it was set back), what it had spawned goes, with its records and
# results: it will spawn anew, perhaps something else. So no loop goes on with the jobs of an earlier run, and the cap on
# generations counts those of this run.

LINEAGE_RECORD = '__torc_lineage__{}__'     # followed by g000001, g000002 ... or final


def spawn_jobs(store: Store, job_id: int, body: Dict[str, Any]) -> Dict[str, Any]:
    """Add jobs on behalf of a running one; they wait for its end, and for those that they name. With `state` and no jobs:
    the last word of the lineage."""
    caller = job_state(store, job_id)
    names = [job['name'] for job in body['jobs']]
    if names:
        check_bulk([caller.workflow_id], names, 'jobs')
    if caller.status == PENDING and caller.compute_node_id is not None:     # it runs: its runner's word of it is on the way
        mark_started(store, job_id, caller.compute_node_id, format_time(store.now()))
    elif caller.status != RUNNING:
        raise Refused(f'job {job_id} is {STATUS_NAMES[caller.status]}; only a running job can spawn others')
    lineage = body.get('lineage') or caller.name
    counter = count_generations(store, caller.workflow_id, lineage)
    known = {name: (spawned, generation) for name, spawned, generation in store.rows(
        'SELECT job.name, job.id, spawn.generation FROM spawn CROSS JOIN job ON job.id = spawn.job_id '
        'WHERE spawn.workflow_id = ? AND lineage = ?', (caller.workflow_id, lineage))}
    old = [name for name in names if name in known]
    if names and len(old) == len(names):
        return {'spawned_job_ids': [known[name][0] for name in names], 'iteration': max(known[name][1] for name in names)}
    if old:
        raise Refused(f'lineage {lineage!r} has spawned {old[0]!r} before, but not all jobs of this request')
    spawned = insert_spawned(store, caller, lineage, counter + 1, body['jobs'])
    counter += bool(spawned)
    record_generation(store, caller.workflow_id, lineage, counter, len(spawned), body.get('state'))
    return {'spawned_job_ids': spawned, 'iteration': counter}


def count_generations(store: Store, workflow_id: int, lineage: str) -> int:
    """Number of the newest generation of a lineage, by its records."""
    prefix = LINEAGE_RECORD.format(lineage) + 'g'
    names = store.ids('SELECT name FROM user_data WHERE workflow_id = ? AND name >= ? AND name < ?', (workflow_id, prefix, prefix + ':'))
    return max((int(name[len(prefix):]) for name in names if re.match(r'[0-9]{6,18}\Z', name[len(prefix):])), default=0)


def record_generation(store: Store, workflow_id: int, lineage: str, counter: int, count: int, state: Any) -> None:
    """Leave the record of a generation, or, without jobs, that of the lineage's end; what was said of its end before is over."""
    final = LINEAGE_RECORD.format(lineage) + 'final'
    content = {'generation': counter, 'spawn_count': count, 'state': state}
    if count or state is not None:
        store.run('DELETE FROM user_data WHERE workflow_id = ? AND name = ?', (workflow_id, final))
        store.insert('user_data', {'workflow_id': workflow_id, 'is_ephemeral': True,
                                   'name': LINEAGE_RECORD.format(lineage) + f'g{counter:06}' if count else final,
                                   'data': content if count else dict(content, final=True)})


def insert_spawned(store: Store, caller: JobState, lineage: str, generation: int, jobs: List[Dict[str, Any]]) -> List[int]:
    """Add the jobs of one generation, blocked. Their ids, in the order of the request."""
    if not jobs:
        return []
    limit = (get_workflow(store, caller.workflow_id).get('dynamic_jobs') or {}).get('max_iterations') or DEFAULT_MAX_ITERATIONS
    if generation > limit:
        raise Refused(f'lineage {lineage!r} has spawned {limit} times, which is its limit (dynamic_jobs: max_iterations)')
    refuse_sibling_cycles(jobs)
    by_name = jobs_by_name(store, caller.workflow_id, {name for job in jobs for name in (job['name'], *(job.get('depends_on') or ()))})
    for job in jobs:
        if job['name'] in by_name:
            raise Refused(f"workflow {caller.workflow_id} has a job {job['name']!r} already, which lineage {lineage!r} did not spawn")
    ids = [insert_job(store, spawned_model(store, caller.workflow_id, lineage, job)) for job in jobs]
    by_name.update((job['name'], [job_id]) for job, job_id in zip(jobs, ids))
    sets = [find_set(store, caller.workflow_id, {caller.id, *(find_prerequisite(by_name, job, name) for name in job.get('depends_on') or ())})
            for job in jobs]
    store.run_many(f"UPDATE job SET status = {BLOCKED}, origin = 'spawn', explicit_set_id = ?, dep_set_id = ? WHERE id = ?",
                   zip(sets, sets, ids))
    store.insert_rows('spawn', ('job_id', 'workflow_id', 'caller_id', 'lineage', 'generation'),
                      ((job_id, caller.workflow_id, caller.id, lineage, generation) for job_id in ids))
    run_by_ids(store, RECOUNT + 'id IN', list(set(sets)))
    return ids


def spawned_model(store: Store, workflow_id: int, lineage: str, job: Dict[str, Any]) -> Dict[str, Any]:
    """JobModel of a job that is to be spawned; its requirements are found by their name."""
    name = job.get('resource_requirements') or 'default'
    needs = store.value('SELECT id FROM resource_requirements WHERE workflow_id = ? AND name = ? ORDER BY id LIMIT 1', (workflow_id, name))
    if needs is None:
        raise Refused(f'job {job["name"]!r}: workflow {workflow_id} has no resource requirements {name!r}')
    return dict(job, workflow_id=workflow_id, resource_requirements_id=needs, env={'TORC_ORCHESTRATOR_LINEAGE_ID': lineage})


def jobs_by_name(store: Store, workflow_id: int, names: Set[str]) -> Dict[str, List[int]]:
    """The jobs of a workflow that have one of these names."""
    found = collections.defaultdict(list)  # type: Dict[str, List[int]]
    for name, job_id in rows_by_ids(store, f'SELECT name, id FROM job WHERE workflow_id = {int(workflow_id)} AND name IN', list(names)):
        found[name].append(job_id)
    return found


def find_prerequisite(by_name: Dict[str, List[int]], job: Dict[str, Any], name: str) -> int:
    """The job that a spawned one means in depends_on."""
    found = by_name.get(name, [])
    if len(found) != 1:
        raise Refused(f"job {job['name']!r} depends on {name!r}, " + (f'but {len(found)} jobs are called so' if found else 'which does not exist'))
    return found[0]


def refuse_sibling_cycles(jobs: List[Dict[str, Any]]) -> None:
    """Refuse jobs of one request that wait for each other, by name."""
    needs = {job['name']: set(job.get('depends_on') or ()) for job in jobs}
    waiting = {name: {need for need in names if need in needs} for name, names in needs.items()}
    users = collections.defaultdict(list)  # type: Dict[str, List[str]]
    for name, names in waiting.items():
        for need in names:
            users[need].append(name)
    free = [name for name, names in waiting.items() if not names]
    while free:
        done = free.pop()
        del waiting[done]
        for name in users[done]:
            waiting[name].discard(done)
            if not waiting[name]:
                free.append(name)
    if waiting:
        raise Refused('these jobs wait for each other: ' + ', '.join(sorted(waiting)[:10]))


def take_back_spawned(store: Store, workflow_id: int) -> None:
    """Remove what jobs spawned that are to start over, and what that spawned in turn, with the records; but nothing that a
    runner has in hand."""
    idle = f'job.status NOT IN {sql_list(ACTIVE)}'
    gone = store.ids(
        'WITH RECURSIVE gone (id) AS (SELECT job.id FROM spawn CROSS JOIN job caller ON caller.id = spawn.caller_id '
        'CROSS JOIN job ON job.id = spawn.job_id '
        f'WHERE spawn.workflow_id = ? AND caller.status = {UNINITIALIZED} AND {idle} UNION '
        'SELECT job.id FROM gone CROSS JOIN spawn ON spawn.caller_id = gone.id CROSS JOIN job ON job.id = spawn.job_id '
        f'WHERE {idle}) SELECT id FROM gone', (workflow_id,))
    generations = set(rows_by_ids(store, 'SELECT lineage, generation FROM spawn WHERE job_id IN', gone))
    names = {LINEAGE_RECORD.format(lineage) + last for lineage, generation in generations for last in (f'g{generation:06}', 'final')}
    store.run_many('DELETE FROM user_data WHERE workflow_id = ? AND name = ?', ((workflow_id, name) for name in names))
    run_by_ids(store, 'DELETE FROM job WHERE id IN', gone)


# -------- tasks --------

class Accepted(dict):
    """The answer to an operation that is not done yet (HTTP 202): its task, a TaskModel."""


def initialize_or_begin(store: Store, workflow_id: int, only_uninitialized: bool = False, clear_ephemeral_user_data: bool = True,
                        **more: bool) -> Dict[str, Any]:
    """Initialize a workflow: at once, or, with `async` (a word of Python's), as a task that goes on after this answer."""
    request = {'only_uninitialized': only_uninitialized, 'clear_ephemeral_user_data': clear_ephemeral_user_data}
    if more.get('async'):
        return begin_task(store, workflow_id, 'initialize_jobs', request)
    return initialize_jobs(store, workflow_id, **request)


TASK_VERBS = {'initialize_jobs': initialize_jobs}
TASK_OPEN = "status IN ('queued', 'running')"


def begin_task(store: Store, workflow_id: int, operation: str, request: Dict[str, Any]) -> Accepted:
    """Queue a task. The one that a workflow has at work is the answer if it is the same; otherwise it is a Conflict."""
    workflow_state(store, workflow_id)
    found = store.one(f'SELECT id, operation, request FROM task WHERE workflow_id = ? AND {TASK_OPEN}', (workflow_id,))
    if found is not None and (found[1], json.loads(found[2])) != (operation, request):
        raise Conflict(f'task {found[0]} ({found[1]}) of workflow {workflow_id} is not done yet: wait for it with '
                       f'`torc.py tasks wait {found[0]}`', existing_task_id=found[0], existing_operation=found[1])
    task_id = found[0] if found is not None else store.insert('task', {
        'workflow_id': workflow_id, 'operation': operation, 'request': request, 'status': 'queued',
        'requested_by': store.caller, 'created_at_ms': int(store.now() * 1000)})
    return Accepted(get_task(store, task_id))


def get_task(store: Store, task_id: int) -> Dict[str, Any]:
    """One task."""
    return get_row(store, 'task', task_id)


def get_active_task_for_workflow(store: Store, workflow_id: int) -> Dict[str, Any]:
    """The task that a workflow has at work, or null."""
    workflow_state(store, workflow_id)
    return {'task': next(iter(store.select('task', f'WHERE workflow_id = ? AND {TASK_OPEN}', (workflow_id,))), None)}


def run_tasks(store: Store) -> None:
    """Carry out the tasks that wait, oldest first. A server calls it between requests, others right after the task was made."""
    for task_id, workflow_id, operation, request, store.caller in store.rows(
            f'SELECT id, workflow_id, operation, request, requested_by FROM task WHERE {TASK_OPEN} ORDER BY id'):
        store.update('task', task_id, {'status': 'running', 'started_at_ms': int(store.now() * 1000)})
        end_task(store, task_id, run_task(store, workflow_id, operation, json.loads(request)))


def run_task(store: Store, workflow_id: int, operation: str, request: Dict[str, Any]) -> str:
    """Carry out a task, whole or not at all. Why it failed, or ''."""
    try:
        with store.savepoint():
            TASK_VERBS[operation](store, workflow_id, **request)
    except TorcError as error:
        return error.message
    except sqlite3.OperationalError:
        raise       # a full disk, say: it stays queued, and is tried again
    except Exception:   # border: a bug fails one task, whose waiter is told so
        log.exception('a bug in torc.py: a task of workflow %d failed', workflow_id)
        return "a bug in torc.py; the server's log has the traceback"
    return ''


def end_task(store: Store, task_id: int, error: str) -> None:
    """Record how a task ended."""
    status = 'failed' if error else 'succeeded'
    store.update('task', task_id, {'status': status, 'error': error or None, 'finished_at_ms': int(store.now() * 1000)})
    workflow_id, operation, user = store.one('SELECT workflow_id, operation, requested_by FROM task WHERE id = ?', (task_id,))
    record_event(store, workflow_id, dict({'error': error} if error else {}, category='tasks', event_type='task_completed', task_id=task_id,
                                          operation=operation, status=status, user=user, message=f'Task {task_id} ({operation}) {status}'),
                 'error' if error else 'info')


def fail_open_tasks(store: Store) -> None:
    """After a start: tasks that an earlier process has left have failed."""
    for task_id in store.ids(f'SELECT id FROM task WHERE {TASK_OPEN}'):
        end_task(store, task_id, 'the server ended before the task was done; ask for it again')


# -------- Slurm jobs, remote workers --------

def slurm_jobs_of_nodes(store: Store, workflow_id: int) -> Dict[int, str]:
    """Compute node -> the Slurm job that it runs in, for those that tell."""
    scheduled = dict(store.rows('SELECT id, scheduler_id FROM scheduled_compute_node WHERE workflow_id = ?', (workflow_id,)))
    found = {}
    for node_id, text in store.rows('SELECT id, scheduler FROM compute_node WHERE workflow_id = ? AND scheduler IS NOT NULL', (workflow_id,)):
        scheduler = json.loads(text)
        known = scheduler if isinstance(scheduler, dict) else {}
        number = known.get('slurm_job_id') or scheduled.get(known['scheduler_id'] if isinstance(known.get('scheduler_id'), int) else None)
        if number:
            found[node_id] = str(number)
    return found


def get_slurm_job_correlations(store: Store, workflow_id: int, offset: int = 0, limit: int = MAX_LIST_ITEMS) -> Dict[str, Any]:
    """Which job ran, or runs, in which Slurm job, over all runs; each pair once."""
    workflow_state(store, workflow_id)
    slurm_jobs = slurm_jobs_of_nodes(store, workflow_id)
    pairs = {(job_id, slurm_jobs[node_id]) for job_id, node_id in store.rows(
        'SELECT job_id, compute_node_id FROM result WHERE workflow_id = ?1 UNION '
        'SELECT id, compute_node_id FROM job WHERE workflow_id = ?1', (workflow_id,)) if node_id in slurm_jobs}
    pairs.update(store.rows('SELECT job_id, slurm_job_id FROM slurm_stats WHERE workflow_id = ? AND slurm_job_id IS NOT NULL', (workflow_id,)))
    page = sorted(pairs)[offset:][:page_size(offset, limit)]
    names = dict(rows_by_ids(store, 'SELECT id, name FROM job WHERE id IN', sorted({job_id for job_id, _ in page})))
    return list_answer([{'job_id': job_id, 'job_name': names[job_id], 'slurm_job_id': number} for job_id, number in page], offset, len(pairs))


def get_ready_job_requirements(store: Store, workflow_id: int, scheduler_config_id: Optional[int] = None) -> Dict[str, Any]:
    """What the ready jobs need in all (of one scheduler's, if it is named), the nodes of the widest and the time of the longest."""
    workflow_state(store, workflow_id)
    kinds = [Kind(*row) for row in store.rows(KIND_QUERY, (workflow_id,))]
    counts = {kind: store.value(f'SELECT count(*) FROM job WHERE kind_id = ? AND status = {READY}', (kind.id,)) for kind in kinds
              if scheduler_config_id in (None, kind.scheduler_id)}
    return {'num_jobs': sum(counts.values()), 'num_cpus': sum(kind.num_cpus * count for kind, count in counts.items()),
            'num_gpus': sum(kind.num_gpus * count for kind, count in counts.items()),
            'memory_gb': sum(kind.memory_bytes * count for kind, count in counts.items()) / 1024 ** 3,
            'max_num_nodes': max((kind.num_nodes for kind in counts), default=0),
            'max_runtime': format_duration(max((kind.runtime_s for kind in counts), default=0))}


WORKER_TEXT = Expression(r'(?:[^\s@-][^\s@]*@)?[^\s@-][^\s@]*\Z')      # a word that begins with a dash would be an option of ssh


def create_remote_workers(store: Store, workflow_id: int, body: List[str]) -> List[Dict[str, Any]]:
    """Note the hosts on which a workflow may run; known ones stay. Those that were named."""
    workflow_state(store, workflow_id)
    for worker in body:
        if not WORKER_TEXT.match(worker):
            raise Refused(f'{printable(worker)!r} is not a worker: write [USER@]HOST[:PORT]')
    store.run_many('INSERT OR IGNORE INTO remote_worker (workflow_id, worker) VALUES (?, ?)', ((workflow_id, worker) for worker in body))
    return [{'worker': worker, 'workflow_id': workflow_id} for worker in sorted(set(body))]


def list_remote_workers(store: Store, workflow_id: int) -> List[Dict[str, Any]]:
    """A workflow's remote workers, sorted."""
    workflow_state(store, workflow_id)
    return store.select('remote_worker', 'WHERE workflow_id = ? ORDER BY worker', (workflow_id,))


def delete_remote_worker(store: Store, workflow_id: int, worker: str) -> Dict[str, Any]:
    """Forget a remote worker."""
    workflow_state(store, workflow_id)
    if not store.run('DELETE FROM remote_worker WHERE workflow_id = ? AND worker = ?', (workflow_id, worker)):
        raise NotFound(f'workflow {workflow_id} has no remote worker {printable(worker)!r}')
    return {'worker': worker, 'workflow_id': workflow_id}


# -------- nodes --------

def create_compute_node(store: Store, body: Dict[str, Any]) -> Dict[str, Any]:
    """A runner begins."""
    workflow_state(store, body['workflow_id'])
    check_labels(body.get('labels'))
    check_references(store, body['workflow_id'], body)
    store.job_counts(body['workflow_id'])       # so that no turn of a runner has to count them
    labels = sorted(set(body['labels'])) if body.get('labels') else None
    values = dict(body, is_active=bool(body.get('is_active')), labels=labels)     # who works says so
    if body.get('lease_s') is not None:
        values['lease_until'] = store.now() + body['lease_s']
    node = get_row(store, 'compute_node', store.insert('compute_node', values))
    announce_node(store, 'compute_node_started', node, STARTED_KEYS)
    return node


STARTED_KEYS = ('hostname', 'pid', 'num_cpus', 'memory_gb', 'num_gpus', 'compute_node_type')
STOPPED_KEYS = ('hostname', 'pid', 'duration_seconds', 'compute_node_type')


def announce_node(store: Store, event_type: str, node: Dict[str, Any], keys: Sequence[str]) -> None:
    """Say that a node has begun or ended."""
    announce(store, node['workflow_id'], event_type, dict({key: node.get(key) for key in keys}, compute_node_id=node['id']))


def update_compute_node(store: Store, node_id: int, body: Dict[str, Any]) -> Dict[str, Any]:
    """Change a node; its labels stay. One that ends gives back what it has claimed and not started, and is over for good."""
    before = get_row(store, 'compute_node', node_id)
    check_stays(before['workflow_id'], body)
    check_references(store, before['workflow_id'], body)
    if body.get('is_active') and not before.get('is_active'):
        raise Refused(f'compute node {node_id} has ended or was given up, and its jobs with it; register a new one', field='is_active')
    store.update('compute_node', node_id, {key: value for key, value in body.items() if value is not None and key not in ('workflow_id', 'labels')})
    if before.get('is_active') and body.get('is_active') is False:
        give_back(store, store.ids('SELECT id FROM job WHERE compute_node_id = ?', (node_id,)))     # it knows what it did not start
        release_node(store, node_id)
    node = get_row(store, 'compute_node', node_id)
    if before.get('is_active') and not node.get('is_active'):
        announce_node(store, 'compute_node_stopped', node, STOPPED_KEYS)
    return node


def delete_compute_node(store: Store, node_id: int) -> Dict[str, Any]:
    """Remove a node; what it had in hand is released first. Its results stay."""
    node = get_row(store, 'compute_node', node_id)
    if node.get('is_active'):
        announce_node(store, 'compute_node_stopped', node, STOPPED_KEYS)
    release_node(store, node_id)
    store.run('DELETE FROM compute_node WHERE id = ?', (node_id,))
    return node


def delete_compute_nodes(store: Store, workflow_id: int) -> Dict[str, Any]:
    """Remove all nodes of a workflow."""
    workflow_state(store, workflow_id)
    nodes = store.ids('SELECT id FROM compute_node WHERE workflow_id = ?', (workflow_id,))
    for node_id in nodes:
        delete_compute_node(store, node_id)
    return {'count': len(nodes)}


def release_node(store: Store, node_id: int) -> None:
    """A node went away: its claims come back, its running jobs have failed as orphans, its unreported actions are due again."""
    workflow_id, host = store.one('SELECT workflow_id, hostname FROM compute_node WHERE id = ?', (node_id,))
    store.run('UPDATE compute_node SET is_active = 0, lease_until = NULL WHERE id = ?', (node_id,))
    store.run('UPDATE workflow_action SET executed = 0, executed_by = NULL, executed_at = NULL '
              'WHERE executed_by = ? AND executed = 1 AND is_reported = 0', (node_id,))
    state = workflow_state(store, workflow_id)
    for job_id in store.ids(f'SELECT id FROM job WHERE compute_node_id = ? AND status = {PENDING}', (node_id,)):
        # It may have been started without our being told: what runs now is another attempt.
        begin_next_attempt(store, state, job_state(store, job_id))
    for job_id, start_time in store.rows(f'SELECT id, start_time FROM job WHERE compute_node_id = ? AND status = {RUNNING}', (node_id,)):
        spent_s = store.now() - parse_time(start_time) if start_time else 0.0
        record_end(store, state, {
            'job_id': job_id, 'run_id': state.run_id, 'return_code': ORPHAN_RETURN_CODE, 'status': 'failed',
            'exec_time_minutes': max(0.0, spent_s) / 60, 'completion_time': format_time(store.now()),
            'reason': f'compute node {node_id} ({host}), which ran it, went away'})
        record_event(store, workflow_id, {'category': 'job', 'event_type': 'job_orphaned', 'job_id': job_id, 'compute_node_id': node_id,
                                          'message': f'Job {job_id} was running on node {node_id}, which went away'}, 'warning')
    note_if_complete(store, workflow_id)


def release_lost_nodes(store: Store, is_alive: Callable[[str, int, str], bool]) -> List[int]:
    """Release the active nodes whose lease is over or whose runner is known to be dead. Their ids.

    is_alive(hostname, pid, identity) is asked for every active node; it answers True when it cannot know.
    """
    lost = []
    rows = store.rows('SELECT id, hostname, pid, identity, lease_until FROM compute_node '
                      'WHERE is_active = 1 AND lease_until IS NOT NULL')
    for node_id, hostname, pid, identity, lease_until in rows:
        if lease_until < store.now() or not is_alive(hostname, pid, identity or ''):
            try:
                with store.savepoint():
                    announce_node(store, 'compute_node_stopped', get_row(store, 'compute_node', node_id), STOPPED_KEYS)
                    release_node(store, node_id)
                lost.append(node_id)
            except TorcError as error:      # the other nodes' jobs must not wait for it
                log.error('compute node %d cannot be released: %s', node_id, error.message)
    return lost


# -------- a runner's turn --------

def runner_sync(store: Store, workflow_id: int, body: Dict[str, Any]) -> Dict[str, Any]:
    """Everything that a runner has to say and to ask in one turn of its loop, in one transaction.

    Takes in ends, starts and returned claims; gives work, due actions and the workflow's state.
    """
    state = workflow_state(store, workflow_id)
    check_run(state, body['run_id'])
    node_id = body['compute_node_id']
    renew_lease(store, workflow_id, node_id, body.get('lease_s'))
    answer = {'run_id': state.run_id, 'accepted': [], 'errors': []}  # type: Dict[str, Any]
    for end in body.get('completions') or ():
        take_in_end(store, state, node_id, end, answer)
    for job_id, attempt_id, start_time in body.get('started') or ():
        if store.one('SELECT 1 FROM job WHERE id = ? AND compute_node_id = ? AND attempt_id = ?', (job_id, node_id, attempt_id)):
            mark_started(store, job_id, node_id, start_time)
    give_back(store, [job_id for job_id, _ in body.get('returned') or () if
                      store.value('SELECT compute_node_id FROM job WHERE id = ?', (job_id,)) == node_id])
    for result in body.get('action_results') or ():
        take_in_action(store, workflow_id, node_id, result)
    if body.get('held') is not None:
        take_back_unheard(store, node_id, {job_id for job_id, _ in body['held']}, set(body.get('held_actions') or ()))
    want = body.get('want')
    chosen = claim(store, state, want, node_id) if want else []
    answer.update(describe_claims(store, state.run_id, chosen))
    answer['reason'] = explain_no_jobs(store, state, want) if want and not chosen and body.get('explain') else None
    undone = f'workflow_id = {state.id} AND status IN {sql_list(NOT_DONE)}'
    is_survey = want and body.get('survey')
    answer['notices'] = find_misfits(store, state.id, want, ALL_KINDS_QUERY, undone) if is_survey else []
    note_if_complete(store, workflow_id)
    answer['actions'] = take_due_actions(store, workflow_id, node_id, body.get('actions') or ())
    answer.update(describe_progress(store, state, node_id, is_denied=bool(want) and not chosen))
    if body.get('explain'):
        answer['has_jobs_for_node'] = has_jobs_for_node(store, workflow_id, node_id)
    return answer


def has_jobs_for_node(store: Store, workflow_id: int, node_id: int) -> bool:
    """Whether a job is left that a node may take by its labels, now or later."""
    mine = set(json.loads(store.value('SELECT labels FROM compute_node WHERE id = ?', (node_id,)) or '[]'))
    kinds = store.rows('SELECT id, labels FROM job_kind WHERE workflow_id = ?', (workflow_id,))
    wanted = [kind_id for kind_id, labels in kinds if matches_labels(mine, labels)]
    undone = f'SELECT 1 FROM job WHERE workflow_id = {int(workflow_id)} AND status IN {sql_list(NOT_DONE)}'
    return any(store.one(f'{undone} AND kind_id IN {sql_list(piece)} LIMIT 1') for piece in chunks(wanted))


def renew_lease(store: Store, workflow_id: int, node_id: int, lease_s: Optional[float]) -> None:
    """The node is alive. Refused if it was given up: its jobs may already run elsewhere."""
    row = store.one('SELECT is_active FROM compute_node WHERE id = ? AND workflow_id = ?', (node_id, workflow_id))
    if row is None:
        raise NotFound(f'workflow {workflow_id} has no compute node {node_id}')
    if not row[0]:
        raise Refused(f'compute node {node_id} was given up, because nothing was heard of it; register a new one', gone=True)
    if lease_s is not None:
        store.run('UPDATE compute_node SET lease_until = ? WHERE id = ?', (store.now() + lease_s, node_id))


def take_back_unheard(store: Store, node_id: int, held_jobs: Set[int], held_actions: Set[int]) -> None:
    """After an answer was lost: what the node was given but does not hold goes back, to be given again."""
    claimed = store.ids(f'SELECT id FROM job WHERE compute_node_id = ? AND status = {PENDING}', (node_id,))
    give_back(store, [job_id for job_id in claimed if job_id not in held_jobs])
    taken = store.ids('SELECT id FROM workflow_action WHERE executed_by = ? AND executed = 1 AND is_reported = 0', (node_id,))
    store.run_many('UPDATE workflow_action SET executed = 0, executed_by = NULL, executed_at = NULL WHERE id = ?',
                   ((action_id,) for action_id in taken if action_id not in held_actions))
    persistent = store.ids('SELECT action_id FROM action_execution WHERE compute_node_id = ? AND is_reported = 0', (node_id,))
    store.run_many('DELETE FROM action_execution WHERE action_id = ? AND compute_node_id = ?',
                   ((action_id, node_id) for action_id in persistent if action_id not in held_actions))


def take_in_end(store: Store, state: WorkflowState, node_id: int, end: Dict[str, Any], answer: Dict[str, Any]) -> None:
    """One completion of a runner's turn: into `accepted` or `errors`."""
    try:
        check_final(end['status'])
        times = times_by_id(end.get('file_times') or {})
        status = record_end(store, state, dict(end, run_id=state.run_id, compute_node_id=node_id))
    except TorcError as error:
        answer['errors'].append({'job_id': end['job_id'], 'attempt_id': end['attempt_id'], 'message': error.message})
        return
    answer['accepted'].append([end['job_id'], end['attempt_id'], status])
    if end.get('file_times'):
        store_file_times(store, state.id, times)


def take_in_action(store: Store, workflow_id: int, node_id: int, result: Dict[str, Any]) -> None:
    """How an action ended on the node that took it."""
    if store.value('SELECT workflow_id FROM workflow_action WHERE id = ?', (result['action_id'],)) != workflow_id:
        return      # deleted while it ran
    note_action_reported(store, result['action_id'], node_id)
    event_type, severity = ('action_completed', 'info') if result['success'] else ('action_failed', 'error')
    record_event(store, workflow_id, {'category': 'action', 'event_type': event_type, 'action_id': result['action_id'],
                                      'message': result.get('message') or ''}, severity)


def describe_claims(store: Store, run_id: int, job_ids: Sequence[int]) -> Dict[str, Any]:
    """Claimed jobs with all that is needed to run them; what many share is told once."""
    rows = {row[0]: row for row in rows_by_ids(
        store, 'SELECT id, name, command, invocation_script, env, attempt_id, kind_id, failure_handler_id FROM job WHERE id IN', job_ids)}
    outputs = collections.defaultdict(list)  # type: Dict[int, List[List[Any]]]
    for job_id, file_id, path in rows_by_ids(
            store, 'SELECT made.job_id, file.id, file.path FROM job_output_file made CROSS JOIN file ON file.id = made.file_id '
            'WHERE made.job_id IN', job_ids):
        outputs[job_id].append([file_id, path])
    kinds = list(dict.fromkeys(rows[job_id][6] for job_id in job_ids))
    handlers = list(dict.fromkeys(row[7] for row in rows.values() if row[7]))
    rules = dict(rows_by_ids(store, 'SELECT id, rules FROM failure_handler WHERE id IN', handlers))
    interruptions = count_interruptions(store, run_id, [row[0] for row in rows.values() if row[5] > 1])
    jobs = [{'id': row[0], 'name': row[1], 'command': row[2], 'invocation_script': row[3], 'env': json.loads(row[4]) if row[4] else None,
             'attempt_id': row[5], 'kind': kinds.index(row[6]), 'outputs': outputs.get(row[0], []),
             'failure_handler': handlers.index(row[7]) if row[7] else None,
             'interruptions': interruptions[row[0]]} for row in (rows[job_id] for job_id in job_ids)]
    return {'jobs': jobs, 'kinds': [describe_kind(store, kind) for kind in kinds], 'handlers': [json.loads(rules[h]) for h in handlers]}


def describe_kind(store: Store, kind_id: int) -> Dict[str, Any]:
    """What a job of a kind needs."""
    row = store.one('SELECT needs.name, needs.num_cpus, needs.memory_bytes, needs.num_gpus, needs.num_nodes, needs.runtime_s, '
                    'needs.is_implicit FROM job_kind kind CROSS JOIN resource_requirements needs '
                    'ON needs.id = kind.resource_requirements_id WHERE kind.id = ?', (kind_id,))
    names = ('resource_requirements_name', 'num_cpus', 'memory_bytes', 'num_gpus', 'num_nodes', 'runtime_s', 'is_implicit')
    return dict(zip(names, row), is_implicit=bool(row[-1]))


def describe_progress(store: Store, state: WorkflowState, node_id: int, is_denied: bool) -> Dict[str, Any]:
    """What a runner shows, and what it needs to decide whether to stay. `is_denied`: it got no jobs."""
    counts = store.job_counts(state.id)
    unfinished = sum(counts[code] for code in NOT_DONE)
    # A blocked job waits for one of those that are ready or active, or for a person.
    is_active = any(counts[code] for code in ACTIVE)
    claimable = is_active or counts[READY] and not (is_denied and is_last_node(store, state.id, node_id))
    actions = store.value("SELECT count(*) FROM workflow_action WHERE workflow_id = ? AND executed = 0 AND persistent = 0 "
                          "AND action_type = 'run_commands' "
                          "AND trigger_type IN ('on_jobs_ready', 'on_jobs_complete')", (state.id,))
    return {'is_complete': not unfinished or state.is_canceled, 'is_canceled': state.is_canceled,
            'unfinished': unfinished, 'claimable': bool(claimable), 'pending_actions': actions,
            'jobs_by_status': {STATUS_NAMES[code]: count for code, count in counts.items() if count}}


def is_last_node(store: Store, workflow_id: int, node_id: int) -> bool:
    """Whether no other node works on a workflow or is expected: what this one cannot run, nobody will."""
    active = 'SELECT 1 FROM compute_node WHERE workflow_id = ? AND is_active = 1 AND id <> ? LIMIT 1'
    queued = "SELECT 1 FROM scheduled_compute_node WHERE workflow_id = ? AND status = 'pending' LIMIT 1"
    return not store.one(active, (workflow_id, node_id)) and not store.one(queued, (workflow_id,))


# -------- for administrators --------

SQL_LITERALS = Expression(r"""'(?:[^']|'')*'?|"(?:[^"]|"")*"?|`[^`]*`?|\[[^]]*\]?|--[^\n]*|/\*.*?(?:\*/|\Z)""", re.DOTALL)
SQL_VERB = Expression(r'\b(SELECT|VALUES|INSERT|REPLACE|UPDATE|DELETE)\b(?!\s*(?:AS\b|\)))', re.IGNORECASE)
SQL_READERS = ('SELECT', 'VALUES', 'WITH')
SQL_WRITERS = ('INSERT', 'REPLACE', 'UPDATE', 'DELETE', 'WITH')
COUNTED_TABLES = frozenset(['job', 'dep_set', 'dep_member'])    # what the counters of dependency sets are made from


def check_foreign_sql(sql: str, writes: bool, allows_full_table: bool) -> None:
    """Refuse by its words what must not even be compiled: it would end our transaction, or change a whole table by mistake."""
    bare = SQL_LITERALS.sub(lambda match: '"" ' if match.group()[0] not in '-/' else ' ', sql).strip().rstrip('; \t\r\n')
    first = re.match(r'\w*', bare).group().upper()
    if ';' in bare:
        raise Refused('one statement at a time: there is a semicolon inside')
    allowed = SQL_WRITERS if writes else SQL_READERS
    if first not in allowed:
        hint = '; what changes something needs write' if first in SQL_WRITERS else ''
        what = repr(printable(first[:20])) if first else 'this'
        raise Refused(f"{what} cannot begin a statement here: {', '.join(allowed)} can{hint}")
    if writes and re.search(r'\bOR\s+ROLLBACK\b', bare, re.IGNORECASE):
        raise Refused('OR ROLLBACK is not possible here: it would undo what others have asked for')
    outside = outside_parentheses(bare)
    verb = SQL_VERB.search(outside)
    is_full = verb and verb.group(1).upper() in ('UPDATE', 'DELETE') and not re.search(r'\bWHERE\b', outside, re.IGNORECASE)
    if writes and is_full and not allows_full_table:
        raise Refused(f'this {verb.group(1).upper()} has no WHERE and would change every row: add one, or allow it with allow_full_table')


def outside_parentheses(text: str) -> str:
    """A text without what stands in parentheses; of each pair the second stays."""
    depth, kept = 0, []
    for piece in re.split('([()])', text):
        depth += {'(': 1, ')': -1}.get(piece, 0)
        kept.append('' if depth else piece)
    return ''.join(kept)


def admin_sql(store: Store, body: Dict[str, Any]) -> Any:
    """One SQL statement of an administrator: reads, or with `write` changes something, which is put on record."""
    check_admin(store)
    writes, is_dry = bool(body.get('write')), bool(body.get('dry_run'))
    if not store.allows_sql or writes and not store.allows_sql_writes:
        raise Denied(f"SQL {'that writes ' if store.allows_sql else ''}is switched off on this server")
    check_foreign_sql(body['sql'], writes, bool(body.get('allow_full_table')))
    wanted = body.get('limit')
    limit = MAX_LIST_ITEMS if wanted is None else max(1, min(wanted, MAX_LIST_ITEMS))
    if not writes:
        return foreign_items(store.execute_foreign(body['sql'], False, limit))
    try:
        answer = write_foreign(store, body['sql'], limit, is_dry)
    except Refused as error:
        if is_dry:
            raise
        add_audit(store, body, False, None, error.message)
        return error
    if not is_dry:
        add_audit(store, body, True, answer['rows_affected'], None)
    return answer


def write_foreign(store: Store, sql: str, limit: int, is_dry: bool) -> Dict[str, Any]:
    """Carry out a statement that writes, and see that everything can still be read and that no job waits for nothing."""
    with store.savepoint(keeps=not is_dry):
        found = store.execute_foreign(sql, True, limit)
        for table in sorted(found.tables):
            store.check_cells(table)
        for workflow_id in store.ids('SELECT id FROM workflow WHERE run_id > 0') if found.tables & COUNTED_TABLES else ():
            recount_sets(store, workflow_id)
            idle_sets = store.ids('SELECT id FROM dep_set WHERE workflow_id = ? AND pending = 0', (workflow_id,))
            settle(store, workflow_id, release_sets(store, workflow_id, idle_sets))
    return dict(foreign_items(found), rows_affected=found.changed, committed=not is_dry)


def foreign_items(found: ForeignAnswer) -> Dict[str, Any]:
    """Rows of a foreign statement as AdminSqlResponse: a name that comes again gets _2, blobs are hexadecimal."""
    names = []  # type: List[str]
    for name in found.columns:
        number = 2
        while name in names:
            name, number = f'{found.columns[len(names)]}_{number}', number + 1
        names.append(name)
    items = [dict(zip(names, map(foreign_cell, row))) for row in found.rows]
    return {'columns': names, 'items': items, 'committed': False}


def foreign_cell(value: Any) -> Any:
    """A cell of a foreign statement as JSON can say it."""
    if isinstance(value, bytes):
        return value.hex()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def add_audit(store: Store, body: Dict[str, Any], success: bool, rows_affected: Optional[int], error: Optional[str]) -> None:
    """Put on record what an administrator wrote."""
    store.insert('admin_audit_log', {
        'user_name': store.caller, 'timestamp': int(store.now() * 1000), 'sql_text': body['sql'], 'is_write': True,
        'allow_full_table': bool(body.get('allow_full_table')), 'rows_affected': rows_affected, 'committed': success, 'success': success,
        'error': error})


def list_admin_audit_log(store: Store, offset: int = 0, limit: int = MAX_LIST_ITEMS) -> Dict[str, Any]:
    """What administrators wrote, the newest first."""
    check_admin(store)
    rows = store.select('admin_audit_log', 'ORDER BY id DESC LIMIT ? OFFSET ?', (page_size(offset, limit), offset))
    return list_answer(rows, offset, store.value('SELECT count(*) FROM admin_audit_log'))


class Traffic:
    """How many requests and bytes came and went, for each second of the last hour in which some did."""
    MOST_S = 3600
    KEYS = ('request_count', 'bytes_in', 'bytes_out', 'status_2xx', 'status_4xx', 'status_5xx', 'status_other')

    SLOTS = {b'2': 4, b'4': 5, b'5': 6}     # first digit of a status -> index in a row; others: 7

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.row = [0] * (1 + len(self.KEYS))                               # [second, *KEYS] of this second
        self.rows = collections.deque([self.row], maxlen=self.MOST_S)       # type: collections.deque

    def begin_turn(self) -> None:
        """See whether another second has begun."""
        second = int(self.now())
        if second != self.row[0]:
            self.row = [second] + [0] * len(self.KEYS)
            self.rows.append(self.row)

    def add_answer(self, head: bytes) -> None:
        """A request was answered with what begins so."""
        self.row[1] += 1
        self.row[self.SLOTS.get(head[9:10], 7)] += 1


def get_api_stats(store: Store, window_seconds: int = 3600, interval_seconds: int = 60) -> Dict[str, Any]:
    """Requests and bytes of the last seconds, in buckets that begin at multiples of the interval, the newest first."""
    check_admin(store)
    window = max(1, min(window_seconds, Traffic.MOST_S))
    interval = max(1, min(interval_seconds, window))
    now = store.now()
    buckets = {start: [0] * len(Traffic.KEYS) for start in range(int(now) // interval * interval, int(now) - window, -interval)}
    for second, *counts in store.traffic.rows if store.traffic is not None else ():
        bucket = buckets.get(second // interval * interval)
        if bucket is not None:
            bucket[:] = map(operator.add, bucket, counts)
    return {'now_ms': int(now * 1000), 'interval_seconds': interval, 'window_seconds': window,
            'buckets': [dict(zip(Traffic.KEYS, counts), start_ms=start * 1000) for start, counts in buckets.items()]}


# -------- streams --------

class Subscription(NamedTuple):
    """What the reader of a stream wants to hear."""
    subject: Any        # id of a workflow, or one of API_SUBJECTS
    least: int          # index in SEVERITIES


API_SUBJECTS = ('api', 'api with bodies')


def stream_workflow_events(store: Store, workflow_id: int, level: str = 'info') -> Subscription:
    """What happens to a workflow from now on; of an unknown level: info."""
    workflow_state(store, workflow_id)
    return Subscription(workflow_id, SEVERITIES.index(level if level in SEVERITIES else 'info'))


def stream_api_events(store: Store, include_bodies: bool = False) -> Subscription:
    """Every request that is answered from now on."""
    check_admin(store)
    return Subscription(API_SUBJECTS[include_bodies], 0)


# ======== 9. API: tables that map HTTP to verbs ========
#
# MODELS says what a request's body may hold, RESOURCES what a list may be asked for, ROUTES which verb
# answers. An endpoint is a row. An answer of an official operation has the keys of its model and no others: a
# client may know a key of ours as another name of one of its own. What we add has operations of its own.
# Whatever arrives is checked here, before a verb sees it: types, required fields, ranges, text that SQLite or
# a terminal could not hold. Two doors lead in: answer_request for HTTP (bytes in, status and value out), and
# call_operation for callers in the same process. Both give the same values.
#
# Where access is enforced, call_route() asks before every verb whether the caller has access to the workflow that the
# request is about. An operation about none is refused, unless OPEN_OPERATIONS lists it: what is forgotten is closed.
#
# Nothing that a client can send is answered with a 5xx, but for a full disk: clients of this API repeat their request
# for many minutes after a 5xx, and after an error that holds one of RETRY_WORDS, whatever its status.

ENUMS = {'JobStatus': tuple(STATUS_CODES), 'ExecutionMode': EXECUTION_MODES, 'StdioMode': STDIO_MODES,
         'MonitorGranularity': GRANULARITIES, 'Strategy': tuple(CLAIM_STRATEGIES), 'TaskStatus': TASK_STATUSES,
         'GroupRole': GROUP_ROLES}

# Model -> its fields as name:type, ! where required. Types: those of SCALAR_CHECKS, [list], {map}, {map with nulls?}, @Model or
# enum, ?Model of which any field may be missing. Models of lists are made from RESOURCES.
MODELS = {
    'AccessCheckResponse': 'has_access:bool! reason:str user_name:str! workflow_id:int!',
    'AccessGroupModel': 'created_at:str description:str id:int name:name!',
    'ActiveTaskResponse': 'task:@TaskModel',
    'AdminAuditLogEntry': 'allow_full_table:bool! committed:bool! error:str id:int! is_write:bool! rows_affected:int sql_text:str! '
                          'success:bool! timestamp:int! user_name:str!',
    'AdminSqlRequest': 'allow_full_table:bool dry_run:bool limit:int sql:str! write:bool',
    'ApiStatsBucket': 'bytes_in:int! bytes_out:int! request_count:int! start_ms:int! status_2xx:int! status_4xx:int! status_5xx:int! '
                      'status_other:int!',
    'ApiStatsResponse': 'buckets:[@ApiStatsBucket]! interval_seconds:int! now_ms:int! window_seconds:int!',
    'AdminSqlResponse': 'columns:[str]! committed:bool! items:[object]! rows_affected:int',
    'ArchiveWorkflowRequest': 'is_archived:bool!',
    'BatchCompleteJobsRequest': 'completions:[@JobCompletionEntry]!',
    'BatchCompleteJobsResponse': 'completed:[int]! errors:[@JobCompletionError]!',
    'ChangedJob': 'job_id:int! job_name:str! reason:str!',
    'CheckChangesRequest': 'files:{float?} dry_run:bool',
    'CheckChangesResponse': 'changed:[@ChangedJob]! downstream_jobs:[@ChangedJob]!',
    'ClaimActionRequest': 'compute_node_id:int',
    'ClaimActionResponse': 'action_id:int! success:bool',
    'ClaimJobsBasedOnResources': 'jobs:[@JobModel] reason:str',
    'ClaimNextJobsResponse': 'jobs:[@JobModel]',
    'ComputeNodeModel': 'avg_cpu_percent:float avg_memory_bytes:int compute_node_type:str! duration_seconds:float end_time:time '
                        'hostname:str! id:int is_active:bool labels:[str] memory_gb:float! num_cpus:int! num_gpus:int! '
                        'num_nodes:int! peak_cpu_percent:float peak_memory_bytes:int pid:int! sample_count:int scheduler:any '
                        'scheduler_config_id:int start_time:time! time_limit:str workflow_id:int! identity:str lease_s:float',
    'ComputeNodeMonitorConfig': 'cpu:bool enabled:bool granularity:@MonitorGranularity memory:bool',
    'ComputeNodesResources': 'id:int labels:[str] memory_gb:gigabytes! num_cpus:int! num_gpus:int! num_nodes:nodes! '
                             'scheduler_config_id:int time_limit:str',
    'CreateFilesResponse': 'files:[@FileModel]',
    'CreateJobsResponse': 'jobs:[@JobModel]',
    'CreateUserDataListResponse': 'user_data:[@UserDataModel]',
    'CreatedWorkflow': 'workflow_id:int! workflow_name:str! job_count:int!',
    'DatabaseResponse': 'id:str! path:str! host:str!',
    'DatabaseSnapshotResponse': 'changes:int! saved:int! error:str',
    'DeleteCountResponse': 'count:int!',
    'DeleteRoCrateEntitiesResponse': 'deleted_count:int! message:str!',
    'DynamicJobsConfig': 'max_iterations:int',
    'ErrorResponse': 'code:int error:any! errorMessage:str errorNum:int',
    'EventModel': 'data:any! id:int timestamp:int workflow_id:int!',
    'ExecutionConfig': 'enable_cpu_bind:bool job_stdio_overrides:{@StdioConfig} limit_resources:bool mode:@ExecutionMode '
                       'oom_exit_code:int sigkill_headroom_seconds:int sigterm_lead_seconds:int srun_mpi:str '
                       'srun_termination_signal:str staggered_start:bool stdio:@StdioConfig termination_signal:str timeout_exit_code:int',
    'FailureHandlerModel': 'id:int name:name! rules:rules! workflow_id:int!',
    'FileModel': 'id:int name:name! path:str! st_mtime:float workflow_id:int! identifier:str',
    'FilesModel': 'files:[@FileModel]!',
    'GetReadyJobRequirementsResponse': 'max_num_nodes:int! max_runtime:str! memory_gb:float! num_cpus:int! num_gpus:int! num_jobs:int!',
    'IsCompleteResponse': 'is_canceled:bool! is_complete:bool!',
    'IsUninitializedResponse': 'is_uninitialized:bool!',
    'JobCompletionEntry': 'job_id:int! result:@ResultModel! run_id:int! status:@JobStatus!',
    'JobCompletionError': 'job_id:int! message:str!',
    'JobExplanation': 'job_id:int! job_name:str! status:@JobStatus! reason:str return_code:int count:int',
    'JobDependencyModel': 'depends_on_job_id:int! depends_on_job_name:str! job_id:int! job_name:str! workflow_id:int!',
    'JobFileRelationshipModel': 'consumer_job_id:int consumer_job_name:str file_id:int! file_name:str! file_path:str! '
                                'producer_job_id:int producer_job_name:str workflow_id:int!',
    'JobModel': 'attempt_id:int cancel_on_blocking_job_failure:bool command:str! compute_node_id:int depends_on_job_ids:[int] '
                'env:{str} failure_handler_id:int id:int input_file_ids:[int] input_user_data_ids:[int] invocation_script:str '
                'labels:[str] name:name! origin:str output_file_ids:[int] output_user_data_ids:[int] priority:int '
                'resource_requirements_id:int schedule_compute_nodes:any scheduler_id:int start_time:str status:@JobStatus '
                'supports_termination:bool workflow_id:int!',
    'JobMonitorConfig': 'enabled:bool granularity:@MonitorGranularity',
    'JobStatusCounts': ' '.join(f'{status}:int!' for status in STATUS_CODES),
    'JobUserDataRelationshipModel': 'consumer_job_id:int consumer_job_name:str producer_job_id:int producer_job_name:str '
                                    'user_data_id:int! user_data_name:str! workflow_id:int!',
    'JobsModel': 'jobs:[@JobModel]!',
    'LocalSchedulerModel': 'id:int memory:str name:name num_cpus:int workflow_id:int!',
    'ListJobIdsResponse': 'count:int! job_ids:[int]!',
    'ListMissingUserDataResponse': 'user_data:[int]!',
    'ListRequiredExistingFilesResponse': 'files:[int]!',
    'MessageResponse': 'message:str!',
    'PingResponse': 'status:str!',
    'PlanModel': 'workflow:?WorkflowModel! files:[?FileModel]! user_data:[?UserDataModel]! '
                 'resource_requirements:[?ResourceRequirementsModel]! slurm_schedulers:[?SlurmSchedulerModel]! '
                 'failure_handlers:[?FailureHandlerModel]! kinds:[planned_kind]! dependency_sets:[[int]]! jobs:planned_jobs! '
                 'actions:[@PlannedAction]!',
    'PlannedAction': 'trigger_type:str! action_type:str! action_config:object! job_indexes:[int] persistent:bool',
    'ProcessChangedJobInputsResponse': 'reinitialized_jobs:[str]!',
    'ReloadAuthResponse': 'message:str! user_count:int!',
    'RemoteWorkerModel': 'worker:str! workflow_id:int!',
    'ResetJobStatusResponse': 'reset_type:str status:str! updated_count:int! workflow_id:int!',
    'ResourceMonitorConfig': 'compute_node:@ComputeNodeMonitorConfig enabled:bool flush_interval_seconds:int generate_plots:bool '
                             'granularity:@MonitorGranularity jobs:@JobMonitorConfig sample_interval_seconds:int',
    'ResourceRequirementsModel': 'id:int memory:str name:name! num_cpus:int num_gpus:int num_nodes:int runtime:str workflow_id:int!',
    'ResultModel': 'attempt_id:ordinal avg_cpu_percent:float avg_memory_bytes:int completion_time:time! compute_node_id:int! '
                   'exec_time_minutes:minutes! id:int job_id:int! job_name:str peak_cpu_percent:float peak_memory_bytes:int '
                   'return_code:int! run_id:int! status:@JobStatus! workflow_id:int! reason:str',
    'RoCrateEntityModel': 'entity_id:str! entity_type:str! file_id:int id:int metadata:object! workflow_id:int!',
    'RunnerAction': 'action_id:int! success:bool! message:str',
    'RunnerCapacity': 'num_cpus:int! memory_gb:gigabytes! num_gpus:int!',
    'RunnerEnd': 'job_id:int! attempt_id:int! return_code:int! status:@JobStatus! exec_time_minutes:minutes! completion_time:time! '
                 'peak_memory_bytes:int avg_memory_bytes:int peak_cpu_percent:float avg_cpu_percent:float retry:bool '
                 'max_retries:int interrupted:bool file_times:{float} reason:str',
    'RunnerError': 'job_id:int! attempt_id:int! message:str!',
    'RunnerJob': 'id:int! name:str! command:str! invocation_script:str env:{str} attempt_id:int! kind:int! outputs:[output]! '
                 'failure_handler:int interruptions:int!',
    'RunnerKind': 'resource_requirements_name:str! num_cpus:int! memory_bytes:int! num_gpus:int! num_nodes:int! runtime_s:int! '
                  'is_implicit:bool!',
    'RunnerSyncRequest': 'compute_node_id:int! run_id:int! lease_s:float completions:[@RunnerEnd] started:[start] returned:[attempt] '
                         'want:@RunnerWant actions:[str] action_results:[@RunnerAction] explain:bool '
                         'survey:bool held:[attempt] held_actions:[int]',
    'RunnerSyncResponse': 'run_id:int! accepted:[ended]! errors:[@RunnerError]! jobs:[@RunnerJob]! kinds:[@RunnerKind]! '
                          'handlers:[[object]]! reason:str notices:[str]! actions:[@WorkflowActionModel]! '
                          'is_complete:bool! is_canceled:bool! unfinished:int! claimable:bool! '
                          'pending_actions:int! has_jobs_for_node:bool jobs_by_status:{int}!',
    'RunnerWant': 'strategy:@Strategy! limit:int! num_cpus:int memory_gb:gigabytes num_gpus:int num_nodes:nodes depth:int total:@RunnerCapacity '
                  'time_limit:str scheduler_config_id:int labels:[str] strict:bool',
    'RunningJobModel': 'compute_node_name:str! job_id:int! job_name:str! scheduler_job_id:str scheduler_type:str! start_time:str',
    'ScheduledComputeNodesModel': 'id:int scheduler_config_id:int! scheduler_id:int! scheduler_type:str! status:str! workflow_id:int!',
    'SetFileTimesRequest': 'files:{float?}!',
    'SetFileTimesResponse': 'count:int!',
    'SlurmJobCorrelationModel': 'job_id:int! job_name:str! slurm_job_id:str!',
    'SlurmSchedulerModel': 'account:str! extra:str gres:str id:int mem:str name:name nodes:int! ntasks_per_node:int partition:str '
                           'qos:str serialize_allocations:bool tmp:str walltime:str! workflow_id:int!',
    'SlurmStatsModel': 'attempt_id:int! ave_cpu_seconds:float id:int job_id:int! max_disk_read_bytes:int max_disk_write_bytes:int '
                       'max_rss_bytes:int max_vm_size_bytes:int node_list:str run_id:int! slurm_job_id:str workflow_id:int!',
    'SpawnJobModel': 'cancel_on_blocking_job_failure:bool command:str! depends_on:[str] labels:[str] name:name! priority:int '
                     'resource_requirements:str',
    'SpawnJobsRequest': 'jobs:[@SpawnJobModel]! lineage:name state:any',
    'SpawnJobsResponse': 'iteration:int! spawned_job_ids:[int]!',
    'StdioConfig': 'delete_on_success:bool mode:@StdioMode',
    'TaskModel': 'created_at_ms:int! error:str finished_at_ms:int id:int! operation:str! started_at_ms:int status:@TaskStatus! workflow_id:int!',
    'UserDataListModel': 'user_data:[@UserDataModel]!',
    'UserDataModel': 'data:any id:int is_ephemeral:bool name:name! workflow_id:int!',
    'UserGroupMembershipModel': 'created_at:str group_id:int! id:int role:@GroupRole! user_name:name!',
    'VersionResponse': 'api_version:str! git_hash:str version:str!',
    'WorkflowAccessGroupModel': 'created_at:str group_id:int! workflow_id:int!',
    'WorkflowActionModel': 'action_config:any! action_type:str! executed:bool executed_at:str executed_by:int id:int '
                           'is_recovery:bool job_ids:[int] persistent:bool required_triggers:int trigger_count:int '
                           'trigger_type:str! workflow_id:int!',
    'WorkflowExplanation': 'failures:[@JobExplanation]! canceled:[@JobExplanation]! '
                           'blockers:[@JobExplanation]!',
    'WorkflowModel': 'access_groups:[str] compute_node_expiration_buffer_seconds:int compute_node_ignore_workflow_completion:bool '
                     'compute_node_min_time_for_new_jobs_seconds:int compute_node_wait_for_healthy_database_minutes:int '
                     'compute_node_wait_for_new_jobs_seconds:int description:str dynamic_jobs:@DynamicJobsConfig '
                     'enable_ro_crate:bool env:{str} execution_config:@ExecutionConfig id:int is_archived:bool is_canceled:bool '
                     'metadata:object name:name! project:str resource_monitor_config:@ResourceMonitorConfig run_id:int '
                     'slurm_defaults:object submission_directory:str timestamp:str use_pending_failed:bool user:str!',
    'WorkflowStatusResponse': 'active_compute_nodes:int! active_scheduled_nodes:int! is_canceled:bool! is_complete:bool! '
                              'jobs_by_status:@JobStatusCounts! longest_ready_runtime_seconds:int max_allocation_remaining_seconds:int '
                              'pending_scheduled_nodes:int! runtime_blocked_ready_jobs:int! total_exec_time_minutes:float! total_jobs:int! '
                              'unserved_ready_labels:{int} walltime_seconds:float workflow_id:int! workflow_name:str! workflow_user:str!',
    'WorkflowStatusesResponse': 'statuses:{str}!',
}

STRICT_MODELS = ('SpawnJobsRequest', 'SpawnJobModel')     # a field that they do not know is an error, as in Torc

UNSTORABLE = Expression('[\x00\ud800-\udfff]')
FORBIDDEN_IN_NAME = Expression('[\x00-\x1f\x7f]')


class ModelField(NamedTuple):
    """One field of a model."""
    type: str
    is_required: bool


@functools.lru_cache(maxsize=None)
def model_fields(model: str) -> Dict[str, ModelField]:
    """ModelField name -> type and whether it is required."""
    pairs = (item.split(':', 1) for item in MODELS[model].split())
    return {name: ModelField(kind.rstrip('!'), kind.endswith('!')) for name, kind in pairs}


def wrong_type(place: str, wanted: str, value: Any) -> BadInput:
    """The error for a value of another type."""
    shown = 'null' if value is None else printable(repr(value)[:60])
    return BadInput(f'{place} must be {wanted}, not {shown}', field=place)


def check_int(place: str, value: Any) -> None:
    """Refuse anything but an integer of 64 bits."""
    if type(value) is not int and not (isinstance(value, int) and not isinstance(value, bool)):
        raise wrong_type(place, 'an integer', value)
    if not -MAX_INTEGER - 1 <= value <= MAX_INTEGER:
        raise BadInput(f'{place} is beyond 64 bits', field=place)


def check_float(place: str, value: Any) -> None:
    """Refuse anything but a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong_type(place, 'a number', value)
    if isinstance(value, float) and not math.isfinite(value):
        raise wrong_type(place, 'a finite number', value)
    if isinstance(value, int):
        check_int(place, value)


def check_bool(place: str, value: Any) -> None:
    """Refuse anything but true and false."""
    if not isinstance(value, bool):
        raise wrong_type(place, 'true or false', value)


def check_str(place: str, value: Any) -> None:
    """Refuse anything but text that can be stored."""
    if not isinstance(value, str):
        raise wrong_type(place, 'text', value)
    if UNSTORABLE.search(value):
        raise BadInput(f'{place} holds a character that cannot be stored (NUL or half of a surrogate pair)', field=place)


def check_name(place: str, value: Any) -> None:
    """Refuse anything but printable text of sensible length."""
    check_str(place, value)
    if len(value) > MAX_NAME_CHARACTERS:
        raise BadInput(f'{place} has {len(value)} characters; at most {MAX_NAME_CHARACTERS} are possible', field=place)
    if FORBIDDEN_IN_NAME.search(value):
        raise BadInput(f'{place} {printable(value)!r} holds a control character', field=place)


def check_time(place: str, value: Any) -> None:
    """Refuse anything but a time that can be read back."""
    check_str(place, value)
    try:
        parse_time(value)
    except ValueError as error:
        raise BadInput(f'{place}: {printable(str(error))}', field=place) from None


def check_range(place: str, value: Any, most: float) -> None:
    """Refuse numbers that are negative, or so large that sums of them could not be told."""
    check_float(place, value)
    if not 0 <= value <= most:
        raise BadInput(f'{place} is {value}; it must be between 0 and {most:g}', field=place)


def check_rules(place: str, value: Any) -> None:
    """Refuse rules of a failure handler that no runner could follow: JSON text of a list of objects."""
    check_str(place, value)
    try:
        rules = parse_json(value)
    except ValueError as error:
        raise BadInput(f'{place} is not JSON: {printable(str(error))}', field=place) from None
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise wrong_type(place, 'JSON text of a list of objects', value)
    check_any(place, rules)


def check_row(place: str, value: Any, checks: Sequence[Callable[[str, Any], None]]) -> None:
    """Refuse anything but a list with these types."""
    if not isinstance(value, (list, tuple)) or len(value) != len(checks):
        raise wrong_type(place, f'a list of {len(checks)}', value)
    for check, item in zip(checks, value):
        check(place, item)


def check_any(place: str, value: Any, depth: int = 0) -> None:
    """Refuse JSON values that cannot be stored: too deep, beyond 64 bits, with unstorable text."""
    if depth > MAX_DEPTH:
        raise BadInput(f'{place} is nested more than {MAX_DEPTH} levels deep', field=place)
    if isinstance(value, dict):
        for key, item in value.items():
            check_any(place, key, depth + 1)
            check_any(place, item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            check_any(place, item, depth + 1)
    elif isinstance(value, str):
        if UNSTORABLE.search(value):
            raise BadInput(f'{place} holds a character that cannot be stored (NUL or half of a surrogate pair)', field=place)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        check_float(place, value)


def check_object(place: str, value: Any) -> None:
    """Refuse anything but a JSON object."""
    if not isinstance(value, dict):
        raise wrong_type(place, 'an object', value)
    check_any(place, value)


PLANNED_TYPES = {   # field of PlannedJob -> types that its values may have; list: of indexes
    'name': (str,), 'command': (str,), 'invocation_script': (str, type(None)), 'env': (dict, type(None)), 'kind': (int,),
    'dependencies': (int, type(None)), 'failure_handler': (int, type(None)), 'cancel_on_blocking_job_failure': (bool,),
    'supports_termination': (bool,), 'input_files': (list, tuple), 'output_files': (list, tuple), 'input_user_data': (list, tuple),
    'output_user_data': (list, tuple),
}


def check_planned_jobs(place: str, value: Any) -> None:
    """Refuse jobs of a plan that are not rows as PlannedJob has them. Looks at columns: there may be 100,000 jobs and more."""
    if not isinstance(value, (list, tuple)):
        raise wrong_type(place, 'a list', value)
    if set(map(type, value)) == {PlannedJob}:
        return      # made in this process, by our own Spec: over HTTP they come as lists
    for row in value:
        if not isinstance(row, (list, tuple)) or len(row) != len(PLANNED_TYPES):
            raise wrong_type(place, f'lists of {len(PLANNED_TYPES)}', row)
    for (field, types), column in zip(PLANNED_TYPES.items(), zip(*value)):
        where = f'{place}.{field}'
        if not set(map(type, column)).issubset(types):
            raise wrong_type(where, ' or '.join(kind.__name__ for kind in types), next(x for x in column if type(x) not in types))
        if int in types or list in types:
            check_indexes(where, column)
        elif dict in types:
            for env in filter(None, column):
                check_value(where, '{str}', env)
        elif str in types:
            check_str(where, '\n'.join(filter(None, column)))
    for row in value:
        if len(row[0]) > MAX_NAME_CHARACTERS or FORBIDDEN_IN_NAME.search(row[0]):
            check_name(f'{place}.name', row[0])


def check_indexes(place: str, column: Sequence[Any]) -> None:
    """Refuse anything but numbers from 0, alone or in lists."""
    for item in distinct(item for cell in column for item in (cell if isinstance(cell, (list, tuple)) else (cell,))):
        if item is not None:
            check_int(place, item)
            check_range(place, item, MAX_INTEGER)


def distinct(items: Iterable[Any]) -> Iterable[Any]:
    """Items without repetition, where all of them can be compared."""
    kept = list(items)
    try:
        return set(kept)
    except TypeError:   # lists and the like: some check will refuse them
        return kept


def check_planned_kind(place: str, value: Any) -> None:
    """Refuse a kind of a plan that is not requirements, priority, scheduler, labels."""
    def check_optional(place: str, item: Any) -> None:
        check_indexes(place, [item])

    def check_texts(place: str, item: Any) -> None:
        check_value(place, '[str]', item or [])
    check_row(place, value, (check_optional, functools.partial(check_range, most=MAX_INTEGER), check_optional, check_texts))
    check_int(place, value[1])


SCALAR_CHECKS = {   # type of MODELS -> what refuses other values
    'int': check_int, 'float': check_float, 'bool': check_bool, 'str': check_str, 'any': check_any, 'object': check_object,
    'name': check_name, 'time': check_time, 'rules': check_rules,
    'minutes': functools.partial(check_range, most=1e9), 'gigabytes': functools.partial(check_range, most=1e9),
    'nodes': lambda place, value: (check_int(place, value), check_range(place, value, 1e5)),
    'ordinal': lambda place, value: (check_int(place, value), check_range(place, value, 1e9)),
    'attempt': functools.partial(check_row, checks=(check_int, check_int)),
    'start': functools.partial(check_row, checks=(check_int, check_int, check_time)),
    'ended': functools.partial(check_row, checks=(check_int, check_int, check_str)),
    'output': functools.partial(check_row, checks=(check_int, check_str)),
    'planned_jobs': check_planned_jobs, 'planned_kind': check_planned_kind,
}


def check_value(place: str, kind: str, value: Any) -> Any:
    """Refuse a value that is not of a type of MODELS; the value, without what no model knows."""
    if kind in SCALAR_CHECKS:
        SCALAR_CHECKS[kind](place, value)
        return value
    if kind[0] == '[':
        if not isinstance(value, (list, tuple)):
            raise wrong_type(place, 'a list', value)
        return [check_value(f'{place}[{index}]', kind[1:-1], item) for index, item in enumerate(value)]
    if kind[0] == '{':
        return check_map(place, kind[1:-1], value)
    if kind[1:] in ENUMS:
        if value not in ENUMS[kind[1:]]:
            raise wrong_type(place, 'one of ' + ', '.join(ENUMS[kind[1:]]), value)
        return value
    return check_model(place, kind[1:], value, is_partial=kind[0] == '?')


def check_map(place: str, kind: str, value: Any) -> Dict[str, Any]:
    """The same for an object with any keys; a kind that ends in ? may be null."""
    if not isinstance(value, dict):
        raise wrong_type(place, 'an object', value)
    for key, item in value.items():
        check_str(place, key)
        if item is not None or kind[-1] != '?':
            check_value(f'{place}.{printable(key)}', kind.rstrip('?'), item)
    return value


def check_model(place: str, model: str, value: Any, is_partial: bool = False) -> Dict[str, Any]:
    """Refuse a body that does not fit a model; its known fields. Unknown ones are passed over: newer clients send more."""
    if not isinstance(value, dict):
        raise wrong_type(place or 'the body', 'an object', value)
    unknown = [name for name in value if name not in model_fields(model)] if model in STRICT_MODELS else []
    if unknown:
        field = f'{place}.{printable(unknown[0])}'.lstrip('.')
        raise BadInput(f'there is no field {field}' + did_you_mean(unknown[0], model_fields(model)), field=field)
    known = {}
    for name, field in model_fields(model).items():
        found = value.get(name)
        path = f'{place}.{name}' if place else name
        if found is not None:
            known[name] = check_value(path, field.type, found)
        elif field.is_required and not is_partial:
            raise BadInput(f'{path} is missing', field=path)
        elif name in value:
            known[name] = None
    return known


# -------- lists --------

class Resource(NamedTuple):
    """A noun with the usual operations on rows of one table."""
    table: str
    view: str                   # what is read; usually the table
    model: str                  # of its rows
    plural: str                 # in the name of the model of its lists
    filters: Dict[str, str]     # query parameter -> condition with one ?; other parameters compare for equality


CONTAINS = 'instr(lower({0}), lower(?)) > 0'
RESOURCES = {
    'workflow': Resource('workflow', 'workflow', 'WorkflowModel', 'Workflows', {
        'description': CONTAINS.format('description'),
        'access_group': "id IN (SELECT workflow_id FROM workflow_access_group WHERE instr(?, ',' || group_id || ',') > 0)"}),
    'job': Resource('job', 'job_view', 'JobModel', 'Jobs', {
        'name': CONTAINS.format('name'), 'command': CONTAINS.format('command'),
        'needs_file_id': 'id IN (SELECT job_id FROM job_input_file WHERE file_id = ?)',
        'upstream_job_id': 'id IN (SELECT job.id FROM dep_member JOIN job ON job.dep_set_id = dep_member.dep_set_id WHERE dep_member.job_id = ?)',
        'active_compute_node_id': f'status = {RUNNING} AND compute_node_id = ?',
        'origin_is_set': '(origin IS NOT NULL) = ?', 'labels': "instr(?, char(10) || ifnull(labels, '') || char(10)) > 0"}),
    'file': Resource('file', 'file', 'FileModel', 'Files', {
        'path': CONTAINS.format('path'), 'produced_by_job_id': 'id IN (SELECT file_id FROM job_output_file WHERE job_id = ?)',
        'is_output': '? = 0 OR id IN (SELECT file_id FROM job_output_file)'}),
    'user_data': Resource('user_data', 'user_data', 'UserDataModel', 'UserData', {
        'name': CONTAINS.format('name'),
        'consumer_job_id': 'id IN (SELECT user_data_id FROM job_input_user_data WHERE job_id = ?)',
        'producer_job_id': 'id IN (SELECT user_data_id FROM job_output_user_data WHERE job_id = ?)'}),
    'resource_requirements': Resource('resource_requirements', 'resource_requirements', 'ResourceRequirementsModel', 'ResourceRequirements', {
        'job_id': 'id IN (SELECT job_kind.resource_requirements_id FROM job JOIN job_kind ON job_kind.id = job.kind_id WHERE job.id = ?)',
        'runtime': '? IN (runtime, CAST(runtime_s AS TEXT))'}),
    'failure_handler': Resource('failure_handler', 'failure_handler', 'FailureHandlerModel', 'FailureHandlers', {}),
    'slurm_scheduler': Resource('slurm_scheduler', 'slurm_scheduler', 'SlurmSchedulerModel', 'SlurmSchedulers', {}),
    'local_scheduler': Resource('local_scheduler', 'local_scheduler', 'LocalSchedulerModel', 'LocalSchedulers', {}),
    'scheduled_compute_node': Resource('scheduled_compute_node', 'scheduled_compute_node', 'ScheduledComputeNodesModel', 'ScheduledComputeNodes', {}),
    'compute_node': Resource('compute_node', 'compute_node', 'ComputeNodeModel', 'ComputeNodes', {
        'hostname': CONTAINS.format('hostname'), 'is_active': 'ifnull(is_active, 0) = ?',
        'scheduled_compute_node_id': "has_member(scheduler, 'scheduler_id', ?)"}),
    'result': Resource('result', 'result_view', 'ResultModel', 'Results', {'all_runs': '(? OR is_current = 1)'}),
    'slurm_stats': Resource('slurm_stats', 'slurm_stats', 'SlurmStatsModel', 'SlurmStats', {}),
    'ro_crate_entity': Resource('ro_crate_entity', 'ro_crate_entity', 'RoCrateEntityModel', 'RoCrateEntities', {}),
    'event': Resource('event', 'event', 'EventModel', 'Events', {
        'category': "has_member(data, 'category', ?)", 'after_timestamp': 'timestamp > ?'}),
}
LIST_MODEL = 'count:int! has_more:bool! items:[@{0}]! max_limit:int! offset:int! total_count:int!'
GROUP_LIST_MODEL = 'has_more:bool! items:[@{0}]! limit:int! offset:int! total_count:int!'
MODELS.update({f'List{noun.plural}Response': LIST_MODEL.format(noun.model) for noun in RESOURCES.values()})
MODELS.update({name: shape.format(model) for name, model, shape in (
    ('ListAccessGroupsResponse', 'AccessGroupModel', GROUP_LIST_MODEL),
    ('ListUserGroupMembershipsResponse', 'UserGroupMembershipModel', GROUP_LIST_MODEL),
    ('ListAdminAuditLogResponse', 'AdminAuditLogEntry', LIST_MODEL),
    ('ListJobDependenciesResponse', 'JobDependencyModel', LIST_MODEL),
    ('ListJobFileRelationshipsResponse', 'JobFileRelationshipModel', LIST_MODEL),
    ('ListJobUserDataRelationshipsResponse', 'JobUserDataRelationshipModel', LIST_MODEL),
    ('RunningJobsResponse', 'RunningJobModel', LIST_MODEL),
    ('SlurmJobCorrelationsResponse', 'SlurmJobCorrelationModel', LIST_MODEL))})


def check_sort_field(sort_by: str, names: Sequence[str]) -> None:
    """Refuse a field that a list does not show; '' is the usual order."""
    if sort_by and sort_by not in names:
        raise BadInput(f'sort_by: {printable(sort_by)!r} is no field to sort by' + (did_you_mean(sort_by, names) or '; use ' + ', '.join(names)),
                       field='sort_by')


def list_rows(store: Store, resource: str, offset: int = 0, limit: int = MAX_LIST_ITEMS, sort_by: str = '',
              reverse_sort: bool = False, **filters: Any) -> Dict[str, Any]:
    """One page of a list: filtered, sorted (by id among equals), with the total number of items under the filters."""
    noun = RESOURCES[resource]
    if 'workflow_id' in filters:
        workflow_state(store, filters['workflow_id'])
    limit = page_size(offset, limit)
    if resource in ('job', 'result') and filters.get('status', 'ready') not in STATUS_CODES:
        raise wrong_type('status', 'one of ' + ', '.join(STATUS_CODES), filters['status'])
    names = [column.name for column in store.columns(noun.view) if column.name not in PRIVATE_COLUMNS]
    check_sort_field(sort_by, names)
    conditions = [f'({noun.filters.get(name, name + " = ?")})' for name in filters]
    values = [STATUS_CODES[value] if name == 'status' and resource in ('job', 'result') else value for name, value in filters.items()]
    if is_limited(store):
        conditions.append(f"{'id' if resource == 'workflow' else 'workflow_id'} IN (SELECT id FROM workflow WHERE {MAY_USE})")
        values += names_of(store.caller)
    where = ('WHERE ' + ' AND '.join(conditions)) if conditions else ''
    total = store.value(f'SELECT count(*) FROM {noun.view} {where}', values)
    way = 'DESC' if reverse_sort else 'ASC'
    order = f'{sort_by} {way}, id {way}' if sort_by and sort_by != 'id' else f'id {way}'
    items = store.select(noun.view, f'{where} ORDER BY {order} LIMIT ? OFFSET ?', [*values, limit, offset])
    return list_answer(items, offset, total)


def list_workflows(store: Store, resource: str, access_group: Sequence[str] = (), **query: Any) -> Dict[str, Any]:
    """Workflows; of one of these groups only, if any is named."""
    if access_group:
        names = [access_group] if isinstance(access_group, str) else access_group
        found = rows_by_ids(store, 'SELECT id FROM access_group WHERE name IN', names)
        query['access_group'] = ',' + ''.join(f'{row[0]},' for row in found)
    answer = list_rows(store, resource, **query)
    add_group_names(store, answer['items'])
    return answer


def list_jobs(store: Store, resource: str, include_relationships: bool = False, **query: Any) -> Dict[str, Any]:
    """Jobs; their id lists only if asked for."""
    if 'labels' in query:
        query['labels'] = served_labels(store, query['workflow_id'], set(filter(None, query['labels'].split(','))))
    answer = list_rows(store, resource, **query)
    if include_relationships:
        add_relations(store, answer['items'])
    return answer


def served_labels(store: Store, workflow_id: int, labels: Set[str]) -> str:
    """The label sets of a workflow's jobs that a runner with these labels may take, between line ends: no JSON text holds one."""
    kinds = store.ids('SELECT DISTINCT labels FROM job_kind WHERE workflow_id = ? AND labels IS NOT NULL', (workflow_id,))
    served = [text for text in kinds if labels.issuperset(json.loads(text))] if labels else ['']
    return '\n' + '\n'.join(served) + '\n' if served else ''


def list_results(store: Store, resource: str, all_runs: bool = False, **query: Any) -> Dict[str, Any]:
    """Results: each job's current one, or all of all runs and attempts."""
    return list_rows(store, resource, all_runs=all_runs, **query)


ITEM_RELATIONS = (     # of files or user data: who makes, and who uses them
    'item.name, item.id AS {0}_id, item.name AS {0}_name, {1}made.job_id AS producer_job_id, maker.name AS producer_job_name, '
    'used.job_id AS consumer_job_id, user.name AS consumer_job_name FROM {0} item '
    'LEFT JOIN job_output_{0} made ON made.{0}_id = item.id LEFT JOIN job maker ON maker.id = made.job_id '
    'LEFT JOIN job_input_{0} used ON used.{0}_id = item.id LEFT JOIN job user ON user.id = used.job_id '
    'WHERE item.workflow_id = :workflow AND (made.job_id IS NOT NULL OR used.job_id IS NOT NULL)')
RELATION_QUERIES = {
    'job': ('job.name, job.id AS job_id, job.name AS job_name, need.id AS depends_on_job_id, need.name AS depends_on_job_name '
            'FROM job CROSS JOIN dep_member ON dep_member.dep_set_id = job.dep_set_id CROSS JOIN job need ON need.id = dep_member.job_id '
            'WHERE job.workflow_id = :workflow'),
    'file': ITEM_RELATIONS.format('file', 'item.path AS file_path, '),
    'user_data': ITEM_RELATIONS.format('user_data', ''),
}


def list_relations(store: Store, resource: str, workflow_id: int, offset: int = 0, limit: int = MAX_LIST_ITEMS,
                   sort_by: str = '', reverse_sort: bool = False) -> Dict[str, Any]:
    """Who waits for whom, or which job makes and uses which file or user data; dependency sets spelled out."""
    workflow_state(store, workflow_id)
    query = RELATION_QUERIES[resource]
    names = re.findall(r' AS (\w+)', query)
    check_sort_field(sort_by, [*names, 'workflow_id'])
    limit = page_size(offset, limit)
    total = store.value(f'SELECT count(*) FROM (SELECT {query})', {'workflow': workflow_id})
    way = 'DESC' if reverse_sort else 'ASC'
    first = [sort_by] if sort_by in names else []   # all are of one workflow
    order = ', '.join(f'{column} {way}' for column in first + [name for name in names if name.endswith('_id')])
    rows = store.rows(f'SELECT {query} ORDER BY {order} LIMIT :limit OFFSET :offset',
                      {'workflow': workflow_id, 'limit': limit, 'offset': offset})
    items = [{name: cell for name, cell in zip(names, row[1:]) if cell is not None} for row in rows]
    return list_answer([dict(item, workflow_id=workflow_id) for item in items], offset, total)


# -------- the usual operations --------

def create_row(store: Store, resource: str, body: Dict[str, Any]) -> Dict[str, Any]:
    """Add a row that no special rule holds for."""
    workflow_state(store, body['workflow_id'])
    check_references(store, body['workflow_id'], body)
    values = {key: value for key, value in body.items() if key != 'id'}
    if resource == 'event':
        values['timestamp'] = int(store.now() * 1000)
    try:
        return read_row(store, resource, store.insert(RESOURCES[resource].table, values))
    except sqlite3.IntegrityError as error:
        raise explain_integrity_error(error, resource, body) from None


def explain_integrity_error(error: sqlite3.Error, resource: str, body: Dict[str, Any]) -> TorcError:
    """A row that stands in another's way, or points at nothing."""
    noun = resource.replace('_', ' ')
    if 'UNIQUE' in str(error) and resource == 'ro_crate_entity':
        return Refused('there is an RO-Crate entity with this entity_id, or for this file, already')    # 422, as in Torc
    if 'UNIQUE' in str(error):
        return Conflict(f"there is such a {noun} already" + (f": {body['name']!r}" if 'name' in body else ''))
    return Refused(f'the {noun} refers to something that does not exist')


def create_rows(store: Store, resource: str, body: Dict[str, Any]) -> Dict[str, Any]:
    """Add up to 100,000 files or user data records of one workflow; their names must differ."""
    key = 'user_data' if resource == 'user_data' else resource + 's'
    check_bulk([row['workflow_id'] for row in body[key]], [row['name'] for row in body[key]], key)
    return {key: [create_row(store, resource, row) for row in body[key]]}


def create_requirements(store: Store, resource: str, body: Dict[str, Any]) -> Dict[str, Any]:
    """Add resource requirements; memory and runtime must be readable."""
    workflow_state(store, body['workflow_id'])
    return read_row(store, resource, insert_requirements(store, body['workflow_id'], {k: v for k, v in body.items() if k != 'id'}))


def update_requirements(store: Store, resource: str, row_id: int, body: Dict[str, Any]) -> Dict[str, Any]:
    """Change resource requirements, for all jobs that have them."""
    current = read_row(store, resource, row_id)
    check_stays(current['workflow_id'], body)
    values = {key: value for key, value in body.items() if value is not None and key not in ('id', 'workflow_id')}
    values.update(checked_requirements(dict(current, **values)), is_implicit=False)
    store.update('resource_requirements', row_id, values)
    changed = read_row(store, resource, row_id)
    details = {('resource_requirements_id' if key == 'id' else key): value for key, value in changed.items() if key != 'workflow_id'}
    add_user_event(store, current['workflow_id'], 'update_resource_requirements', **details)
    return changed


def create_user_data(store: Store, resource: str, body: Dict[str, Any], consumer_job_id: Optional[int] = None,
                     producer_job_id: Optional[int] = None) -> Dict[str, Any]:
    """Add user data, and link it to the jobs that use and make it."""
    record = create_row(store, resource, body)
    for table, job_id in (('job_input_user_data', consumer_job_id), ('job_output_user_data', producer_job_id)):
        if job_id is not None:
            check_owned(store, 'job', body['workflow_id'], [job_id])
            store.insert_rows(table, ('job_id', 'user_data_id'), [(job_id, record['id'])])
    return record


def create_result(store: Store, resource: str, body: Dict[str, Any]) -> Dict[str, Any]:
    """Add a result by hand, as the job's current one; the job's status stays."""
    check_references(store, body['workflow_id'], body)
    store.run('UPDATE result SET is_current = 0 WHERE job_id = ? AND is_current = 1', (body['job_id'],))
    return create_row(store, resource, dict(body, attempt_id=body.get('attempt_id') or 1))


def read_row(store: Store, resource: str, row_id: int) -> Dict[str, Any]:
    """One row."""
    return get_row(store, RESOURCES[resource].view, row_id)


def update_row(store: Store, resource: str, row_id: int, body: Dict[str, Any]) -> Dict[str, Any]:
    """Change the given fields of a row; it stays in its workflow."""
    current = read_row(store, resource, row_id)
    values = {key: value for key, value in body.items() if value is not None and key not in ('id', 'workflow_id')}
    check_stays(current['workflow_id'], body)
    check_references(store, current['workflow_id'], body)
    fixed = [name for name in ('job_id', 'run_id', 'attempt_id') if name in values and values[name] != current.get(name)]
    if fixed:
        raise Refused(f"{', '.join(fixed)} of {resource.replace('_', ' ')} {row_id} cannot change")
    if resource == 'file' and 'st_mtime' in body:
        values['st_mtime'] = body['st_mtime']
    try:
        store.update(RESOURCES[resource].table, row_id, values)
    except sqlite3.IntegrityError as error:
        raise explain_integrity_error(error, resource, values) from None
    return read_row(store, resource, row_id)


def update_event(store: Store, resource: str, row_id: int, body: Any) -> Dict[str, Any]:
    """Replace what an event says."""
    read_row(store, resource, row_id)
    data = body.get('data', body) if isinstance(body, dict) else body
    if data is None:
        raise BadInput('data is missing', field='data')
    store.update('event', row_id, {'data': data})
    return read_row(store, resource, row_id)


def delete_row(store: Store, resource: str, row_id: int) -> Dict[str, Any]:
    """Remove a row; what it was is the answer."""
    row = read_row(store, resource, row_id)
    delete_where(store, resource, 'id', row_id)
    return row


def delete_where(store: Store, resource: str, column: str, value: int) -> int:
    """Remove rows, unless others need them; how many."""
    try:
        with store.savepoint():
            if resource == 'resource_requirements':     # kinds that no job is of any more
                store.run('DELETE FROM job_kind WHERE id NOT IN (SELECT kind_id FROM job)')
            return store.run(f'DELETE FROM {RESOURCES[resource].table} WHERE {column} = ?', (value,))
    except sqlite3.IntegrityError:
        raise Refused(f"jobs still need these {resource.replace('_', ' ')}: give the jobs others, or delete them first") from None


def delete_rows(store: Store, resource: str, workflow_id: int) -> Dict[str, Any]:
    """Remove all rows of a workflow."""
    workflow_state(store, workflow_id)
    if resource == 'job':
        refuse_active(store, workflow_id, 'emptied')
    return {'count': delete_where(store, resource, 'workflow_id', workflow_id)}


def delete_ro_crate_entity(store: Store, resource: str, row_id: int) -> Dict[str, Any]:
    """Remove one RO-Crate entity."""
    delete_row(store, resource, row_id)
    return {'message': f'Deleted RO-Crate entity {row_id}'}


def delete_ro_crate_entities(store: Store, resource: str, workflow_id: int) -> Dict[str, Any]:
    """Remove all RO-Crate entities of a workflow."""
    count = delete_rows(store, resource, workflow_id)['count']
    return {'deleted_count': count, 'message': f'Deleted {count} RO-Crate entities of workflow {workflow_id}'}


def ping(store: Store) -> Dict[str, Any]:
    """The server is there."""
    return {'status': 'ok'}


def get_version(store: Store) -> Dict[str, Any]:
    """Versions of the program and of the interface."""
    return {'version': __version__, 'api_version': API_VERSION}


def get_database(store: Store) -> Dict[str, Any]:
    """Which database answers: its identity, and where it is stored."""
    identity = store.value('SELECT id FROM identity')
    return {'id': identity, 'path': store.file_path, 'host': socket.gethostname()}


def snapshot_database(store: Store) -> Dict[str, Any]:
    """Write a database in memory to its file, done when `saved` has reached the `changes` of this answer."""
    changes, snapshots = store.changes, store.snapshots
    if snapshots is None:
        return {'changes': changes, 'saved': changes}
    if snapshots.saved < changes:
        snapshots.ask()
    return dict({'error': snapshots.error} if snapshots.error else {}, changes=changes, saved=snapshots.saved)


def get_openapi(store: Store) -> Dict[str, Any]:
    """What this server offers, as an OpenAPI 3.1 document: for programs that make clients."""
    return describe_interface()


# -------- routes --------

class Route(NamedTuple):
    """One operation."""
    name: str           # as in the official interface and its clients
    method: str
    path: str           # below API_PREFIX, parameters in braces
    verb: Callable[..., Any]
    resource: str = ''  # first argument of the usual operations
    query: str = ''     # name:type of each query parameter, ! where required
    body: str = ''      # model of the body; '?' before it: fields may be missing, '-': any value but null; or a list, as [str]
    returns: str = ''   # type of the answer in the words of MODELS, or STREAM; '': what the usual operation on the resource gives


PAGE = 'offset:int limit:int sort_by:str reverse_sort:bool '
OF = 'workflow_id:int! '
WF = '/workflows/{workflow_id}'
OPENAPI_PATH = '/openapi.json'      # below API_PREFIX, and at the root, where programs look for it
STREAM = 'stream'           # an answer without end: server-sent events (WHATWG HTML, 9.2)
ADMIN_SQL_PATH = '/admin/sql'
ROUTES = (
    Route('ping',        'GET', '/ping',    ping, returns='@PingResponse'),
    Route('get_version', 'GET', '/version', get_version, returns='@VersionResponse'),
    Route('get_openapi', 'GET', OPENAPI_PATH, get_openapi, returns='object'),
    Route('get_database', 'GET', '/database', get_database, returns='@DatabaseResponse'),
    Route('snapshot_database', 'POST', '/database/snapshot', snapshot_database,
          returns='@DatabaseSnapshotResponse'),

    Route('create_workflow',             'POST',   '/workflows',              create_workflow, '', '', 'WorkflowModel', returns='@WorkflowModel'),
    Route('create_workflow_from_spec',   'POST',   '/workflows/from_spec',    create_workflow_from_spec, '', '', 'PlanModel', returns='@CreatedWorkflow'),
    Route('list_workflows',              'GET',    '/workflows',              list_workflows, 'workflow',
          PAGE + 'name:str user:str description:str is_archived:bool access_group:[str]'),
    Route('get_workflow',                'GET',    WF,                        get_workflow, returns='@WorkflowModel'),
    Route('update_workflow',             'PUT',    WF,                        update_workflow, '', '', '?WorkflowModel', returns='@WorkflowModel'),
    Route('delete_workflow',             'DELETE', WF,                        delete_workflow, returns='@WorkflowModel'),
    Route('archive_workflow',            'POST',   WF + '/archive',           archive_workflow, '', '', 'ArchiveWorkflowRequest', returns='@WorkflowModel'),
    Route('cancel_workflow',             'PUT',    WF + '/cancel',            cancel_workflow, returns='@WorkflowModel'),
    Route('get_workflow_status',         'GET',    WF + '/status',            get_workflow_status, returns='@WorkflowStatusResponse'),
    Route('explain_workflow',            'GET',    WF + '/explanation',       explain_workflow,
          query='limit:int', returns='@WorkflowExplanation'),
    Route('list_workflow_statuses',      'GET',    '/workflow_statuses',      list_workflow_statuses,
          query='ids:[int]!', returns='@WorkflowStatusesResponse'),
    Route('is_workflow_complete',        'GET',    WF + '/is_complete',       is_workflow_complete, returns='@IsCompleteResponse'),
    Route('is_workflow_uninitialized',   'GET',    WF + '/is_uninitialized',  is_workflow_uninitialized, returns='@IsUninitializedResponse'),
    Route('initialize_jobs',             'POST',   WF + '/initialize_jobs',   initialize_or_begin, '',
          'only_uninitialized:bool clear_ephemeral_user_data:bool async:bool', returns='@MessageResponse'),
    Route('get_active_task_for_workflow', 'GET',   WF + '/active_task',       get_active_task_for_workflow, returns='@ActiveTaskResponse'),
    Route('reset_workflow_status',       'POST',   WF + '/reset_status',      reset_workflow_status, '', 'force:bool', returns='@WorkflowModel'),
    Route('reset_job_status',            'POST',   WF + '/reset_job_status',  reset_job_status, '', 'failed_only:bool', returns='@ResetJobStatusResponse'),
    Route('process_changed_job_inputs',  'POST',   WF + '/process_changed_job_inputs', process_changed_job_inputs, '', 'dry_run:bool', returns='@ProcessChangedJobInputsResponse'),
    Route('check_changes',               'POST',   WF + '/check_changes',     check_changes, '', '', 'CheckChangesRequest', returns='@CheckChangesResponse'),
    Route('set_file_times',              'POST',   WF + '/set_file_times',    set_file_times, '', '', 'SetFileTimesRequest', returns='@SetFileTimesResponse'),
    Route('list_required_existing_files', 'GET',   WF + '/required_existing_files', list_required_existing_files, returns='@ListRequiredExistingFilesResponse'),
    Route('list_missing_user_data',      'GET',    WF + '/missing_user_data', list_missing_user_data, returns='@ListMissingUserDataResponse'),
    Route('get_running_jobs',            'GET',    WF + '/running_jobs',      get_running_jobs, '', 'offset:int limit:int', returns='@RunningJobsResponse'),
    Route('get_ready_job_requirements',  'GET',    WF + '/ready_job_requirements', get_ready_job_requirements, '', 'scheduler_config_id:int',
          returns='@GetReadyJobRequirementsResponse'),
    Route('get_slurm_job_correlations',  'GET',    WF + '/slurm_job_correlations', get_slurm_job_correlations, '', 'offset:int limit:int',
          returns='@SlurmJobCorrelationsResponse'),
    Route('list_job_ids',                'GET',    WF + '/job_ids',           list_job_ids, returns='@ListJobIdsResponse'),
    Route('list_job_dependencies',       'GET',    WF + '/job_dependencies',  list_relations, 'job', PAGE, returns='@ListJobDependenciesResponse'),
    Route('list_job_file_relationships', 'GET',    WF + '/job_file_relationships', list_relations, 'file', PAGE, returns='@ListJobFileRelationshipsResponse'),
    Route('list_job_user_data_relationships', 'GET', WF + '/job_user_data_relationships', list_relations, 'user_data', PAGE, returns='@ListJobUserDataRelationshipsResponse'),

    Route('claim_jobs_based_on_resources', 'POST', WF + '/claim_jobs_based_on_resources/{limit}', claim_jobs_based_on_resources, '',
          'strict_scheduler_match:bool', 'ComputeNodesResources', returns='@ClaimJobsBasedOnResources'),
    Route('claim_next_jobs',             'POST',   WF + '/claim_next_jobs',   claim_next_jobs, '', 'limit:int labels:str', returns='@ClaimNextJobsResponse'),
    Route('batch_complete_jobs',         'POST',   WF + '/batch_complete_jobs', batch_complete_jobs, '', '', 'BatchCompleteJobsRequest', returns='@BatchCompleteJobsResponse'),
    Route('runner_sync',                 'POST',   WF + '/runner_sync',       runner_sync, '', '', 'RunnerSyncRequest', returns='@RunnerSyncResponse'),

    Route('create_job',           'POST',   '/jobs',          create_job, '', '', 'JobModel', returns='@JobModel'),
    Route('create_jobs',          'POST',   '/bulk_jobs',     create_jobs, '', '', 'JobsModel', returns='@CreateJobsResponse'),
    Route('list_jobs',            'GET',    '/jobs',          list_jobs, 'job', OF + PAGE + 'status:str needs_file_id:int '
          'upstream_job_id:int include_relationships:bool active_compute_node_id:int origin_is_set:bool '
          'name:str command:str labels:str resource_requirements_id:int'),
    Route('get_job',              'GET',    '/jobs/{job_id}', get_job, returns='@JobModel'),
    Route('explain_job',          'GET',    '/jobs/{job_id}/explanation', explain_job,
          returns='@JobExplanation'),
    Route('update_job',           'PUT',    '/jobs/{job_id}', update_job, '', '', '?JobModel', returns='@JobModel'),
    Route('delete_job',           'DELETE', '/jobs/{job_id}', delete_job, returns='@JobModel'),
    Route('delete_jobs',          'DELETE', '/jobs',          delete_rows, 'job', OF),
    Route('start_job',            'PUT',    '/jobs/{job_id}/start_job/{run_id}/{compute_node_id}', start_job, returns='@JobModel'),
    Route('complete_job',         'POST',   '/jobs/{job_id}/complete_job/{status}/{run_id}', complete_job, '', '', 'ResultModel', returns='@JobModel'),
    Route('retry_job',            'POST',   '/jobs/{job_id}/retry/{run_id}', retry_job, '', 'max_retries:int!', returns='@JobModel'),
    Route('manage_status_change', 'PUT',    '/jobs/{job_id}/manage_status_change/{status}/{run_id}', manage_status_change, returns='@JobModel'),
    Route('spawn_jobs',           'POST',   '/jobs/{job_id}/spawn_jobs', spawn_jobs, '', '', 'SpawnJobsRequest', returns='@SpawnJobsResponse'),

    Route('get_task',             'GET',    '/tasks/{task_id}', get_task, returns='@TaskModel'),

    Route('create_file',  'POST',   '/files',          create_row, 'file', '', 'FileModel'),
    Route('create_files', 'POST',   '/bulk_files',     create_rows, 'file', '', 'FilesModel', returns='@CreateFilesResponse'),
    Route('list_files',   'GET',    '/files',          list_rows, 'file', OF + PAGE + 'produced_by_job_id:int name:str path:str is_output:bool'),
    Route('get_file',     'GET',    '/files/{row_id}', read_row, 'file'),
    Route('update_file',  'PUT',    '/files/{row_id}', update_row, 'file', '', '?FileModel'),
    Route('delete_file',  'DELETE', '/files/{row_id}', delete_row, 'file'),
    Route('delete_files', 'DELETE', '/files',          delete_rows, 'file', OF),

    Route('create_user_data',      'POST',   '/user_data',          create_user_data, 'user_data', 'consumer_job_id:int producer_job_id:int', 'UserDataModel'),
    Route('create_user_data_list', 'POST',   '/bulk_user_data',     create_rows, 'user_data', '', 'UserDataListModel', returns='@CreateUserDataListResponse'),
    Route('list_user_data',        'GET',    '/user_data',          list_rows, 'user_data',
          OF + PAGE + 'consumer_job_id:int producer_job_id:int name:str is_ephemeral:bool'),
    Route('get_user_data',         'GET',    '/user_data/{row_id}', read_row, 'user_data'),
    Route('update_user_data',      'PUT',    '/user_data/{row_id}', update_row, 'user_data', '', '?UserDataModel'),
    Route('delete_user_data',      'DELETE', '/user_data/{row_id}', delete_row, 'user_data'),
    Route('delete_all_user_data',  'DELETE', '/user_data',          delete_rows, 'user_data', OF),

    Route('create_resource_requirements', 'POST',   '/resource_requirements',          create_requirements, 'resource_requirements', '', 'ResourceRequirementsModel'),
    Route('list_resource_requirements',   'GET',    '/resource_requirements',          list_rows, 'resource_requirements',
          OF + PAGE + 'job_id:int name:str memory:str num_cpus:int num_gpus:int num_nodes:int runtime:str'),
    Route('get_resource_requirements',    'GET',    '/resource_requirements/{row_id}', read_row, 'resource_requirements'),
    Route('update_resource_requirements', 'PUT',    '/resource_requirements/{row_id}', update_requirements, 'resource_requirements', '', '?ResourceRequirementsModel'),
    Route('delete_resource_requirement',  'DELETE', '/resource_requirements/{row_id}', delete_row, 'resource_requirements'),
    Route('delete_resource_requirements', 'DELETE', '/resource_requirements',          delete_rows, 'resource_requirements', OF),

    Route('create_failure_handler', 'POST',   '/failure_handlers',          create_row, 'failure_handler', '', 'FailureHandlerModel'),
    Route('list_failure_handlers',  'GET',    WF + '/failure_handlers',     list_rows, 'failure_handler', PAGE),
    Route('get_failure_handler',    'GET',    '/failure_handlers/{row_id}', read_row, 'failure_handler'),
    Route('delete_failure_handler', 'DELETE', '/failure_handlers/{row_id}', delete_row, 'failure_handler'),

    Route('create_result',  'POST',   '/results',          create_result, 'result', '', 'ResultModel'),
    Route('list_results',   'GET',    '/results',          list_results, 'result',
          OF + PAGE + 'job_id:int run_id:int return_code:int status:str compute_node_id:int all_runs:bool'),
    Route('get_result',     'GET',    '/results/{row_id}', read_row, 'result'),
    Route('update_result',  'PUT',    '/results/{row_id}', update_row, 'result', '', '?ResultModel'),
    Route('delete_result',  'DELETE', '/results/{row_id}', delete_row, 'result'),
    Route('delete_results', 'DELETE', '/results',          delete_rows, 'result', OF),

    Route('create_event',  'POST',   '/events',          create_row, 'event', '', 'EventModel'),
    Route('list_events',   'GET',    '/events',          list_rows, 'event', OF + PAGE + 'category:str after_timestamp:int'),
    Route('get_event',     'GET',    '/events/{row_id}', read_row, 'event'),
    Route('update_event',  'PUT',    '/events/{row_id}', update_event, 'event', '', '-'),
    Route('delete_event',  'DELETE', '/events/{row_id}', delete_row, 'event'),
    Route('delete_events', 'DELETE', '/events',          delete_rows, 'event', OF),

    Route('create_compute_node',  'POST',   '/compute_nodes',           create_compute_node, '', '', 'ComputeNodeModel', returns='@ComputeNodeModel'),
    Route('list_compute_nodes',   'GET',    '/compute_nodes',           list_rows, 'compute_node',
          OF + PAGE + 'hostname:str is_active:bool scheduled_compute_node_id:int'),
    Route('get_compute_node',     'GET',    '/compute_nodes/{row_id}',  read_row, 'compute_node'),
    Route('update_compute_node',  'PUT',    '/compute_nodes/{node_id}', update_compute_node, '', '', '?ComputeNodeModel', returns='@ComputeNodeModel'),
    Route('delete_compute_node',  'DELETE', '/compute_nodes/{node_id}', delete_compute_node, returns='@ComputeNodeModel'),
    Route('delete_compute_nodes', 'DELETE', '/compute_nodes',           delete_compute_nodes, '', OF, returns='@DeleteCountResponse'),

    Route('create_slurm_scheduler',  'POST',   '/slurm_schedulers',          create_row, 'slurm_scheduler', '', 'SlurmSchedulerModel'),
    Route('list_slurm_schedulers',   'GET',    '/slurm_schedulers',          list_rows, 'slurm_scheduler', OF + PAGE),
    Route('get_slurm_scheduler',     'GET',    '/slurm_schedulers/{row_id}', read_row, 'slurm_scheduler'),
    Route('update_slurm_scheduler',  'PUT',    '/slurm_schedulers/{row_id}', update_row, 'slurm_scheduler', '', '?SlurmSchedulerModel'),
    Route('delete_slurm_scheduler',  'DELETE', '/slurm_schedulers/{row_id}', delete_row, 'slurm_scheduler'),
    Route('delete_slurm_schedulers', 'DELETE', '/slurm_schedulers',          delete_rows, 'slurm_scheduler', OF),

    Route('create_local_scheduler',  'POST',   '/local_schedulers',          create_row, 'local_scheduler', '', 'LocalSchedulerModel'),
    Route('list_local_schedulers',   'GET',    '/local_schedulers',          list_rows, 'local_scheduler', OF + PAGE + 'memory:str num_cpus:int'),
    Route('get_local_scheduler',     'GET',    '/local_schedulers/{row_id}', read_row, 'local_scheduler'),
    Route('update_local_scheduler',  'PUT',    '/local_schedulers/{row_id}', update_row, 'local_scheduler', '', '?LocalSchedulerModel'),
    Route('delete_local_scheduler',  'DELETE', '/local_schedulers/{row_id}', delete_row, 'local_scheduler'),
    Route('delete_local_schedulers', 'DELETE', '/local_schedulers',          delete_rows, 'local_scheduler', OF),

    Route('create_scheduled_compute_node',  'POST',   '/scheduled_compute_nodes',          create_row, 'scheduled_compute_node', '', 'ScheduledComputeNodesModel'),
    Route('list_scheduled_compute_nodes',   'GET',    '/scheduled_compute_nodes',          list_rows, 'scheduled_compute_node',
          OF + PAGE + 'scheduler_id:int scheduler_config_id:int status:str'),
    Route('get_scheduled_compute_node',     'GET',    '/scheduled_compute_nodes/{row_id}', read_row, 'scheduled_compute_node'),
    Route('update_scheduled_compute_node',  'PUT',    '/scheduled_compute_nodes/{row_id}', update_row, 'scheduled_compute_node', '', '?ScheduledComputeNodesModel'),
    Route('delete_scheduled_compute_node',  'DELETE', '/scheduled_compute_nodes/{row_id}', delete_row, 'scheduled_compute_node'),
    Route('delete_scheduled_compute_nodes', 'DELETE', '/scheduled_compute_nodes',          delete_rows, 'scheduled_compute_node', OF),

    Route('create_workflow_action', 'POST', WF + '/actions',                   create_workflow_action, '', '', 'WorkflowActionModel', returns='@WorkflowActionModel'),
    Route('get_workflow_actions',   'GET',  WF + '/actions',                   get_workflow_actions, returns='[@WorkflowActionModel]'),
    Route('get_pending_actions',    'GET',  WF + '/actions/pending',           get_pending_actions, '', 'trigger_type:[str]', returns='[@WorkflowActionModel]'),
    Route('claim_action',           'POST', WF + '/actions/{action_id}/claim', claim_action, '', '', 'ClaimActionRequest', returns='@ClaimActionResponse'),
    Route('update_workflow_action', 'PUT',    WF + '/actions/{action_id}',     update_workflow_action, '', '', '-', returns='@WorkflowActionModel'),
    Route('delete_workflow_action', 'DELETE', WF + '/actions/{action_id}',     delete_workflow_action, returns='@MessageResponse'),

    Route('create_slurm_stats', 'POST', '/slurm_stats', create_row, 'slurm_stats', '', 'SlurmStatsModel'),
    Route('list_slurm_stats',   'GET',  '/slurm_stats', list_rows, 'slurm_stats',
          OF + 'offset:int limit:int job_id:int run_id:int attempt_id:int'),

    Route('create_remote_workers', 'POST',   WF + '/remote_workers',          create_remote_workers, '', '', '[str]', returns='[@RemoteWorkerModel]'),
    Route('list_remote_workers',   'GET',    WF + '/remote_workers',          list_remote_workers, returns='[@RemoteWorkerModel]'),
    Route('delete_remote_worker',  'DELETE', WF + '/remote_workers/{worker}', delete_remote_worker, returns='@RemoteWorkerModel'),

    Route('create_ro_crate_entity',   'POST',   '/ro_crate_entities',          create_row, 'ro_crate_entity', '', 'RoCrateEntityModel'),
    Route('list_ro_crate_entities',   'GET',    WF + '/ro_crate_entities',     list_rows, 'ro_crate_entity', PAGE + 'file_id:int entity_id:str'),
    Route('get_ro_crate_entity',      'GET',    '/ro_crate_entities/{row_id}', read_row, 'ro_crate_entity'),
    Route('update_ro_crate_entity',   'PUT',    '/ro_crate_entities/{row_id}', update_row, 'ro_crate_entity', '', '?RoCrateEntityModel'),
    Route('delete_ro_crate_entity',   'DELETE', '/ro_crate_entities/{row_id}', delete_ro_crate_entity, 'ro_crate_entity', returns='@MessageResponse'),
    Route('delete_ro_crate_entities', 'DELETE', WF + '/ro_crate_entities',     delete_ro_crate_entities, 'ro_crate_entity',
          returns='@DeleteRoCrateEntitiesResponse'),

    Route('stream_workflow_events', 'GET',  WF + '/events/stream',             stream_workflow_events, '', 'level:str', returns=STREAM),
    Route('stream_api_events',      'GET',  '/admin/api-events/stream',        stream_api_events, '', 'include_bodies:bool', returns=STREAM),
    Route('get_api_stats',          'GET',  '/admin/api-stats',                get_api_stats, '', 'window_seconds:int interval_seconds:int', returns='@ApiStatsResponse'),
    Route('list_admin_audit_log',   'GET',  '/admin/audit-log',                list_admin_audit_log, '', 'offset:int limit:int', returns='@ListAdminAuditLogResponse'),
    Route('admin_sql',              'POST', ADMIN_SQL_PATH,                    admin_sql, '', '', 'AdminSqlRequest', returns='@AdminSqlResponse'),

    Route('create_access_group',        'POST',   '/access_groups',                     create_access_group, '', '', 'AccessGroupModel', returns='@AccessGroupModel'),
    Route('list_access_groups',         'GET',    '/access_groups',                     list_access_groups, '', 'offset:int limit:int', returns='@ListAccessGroupsResponse'),
    Route('get_access_group',           'GET',    '/access_groups/{group_id}',          get_access_group, returns='@AccessGroupModel'),
    Route('delete_access_group',        'DELETE', '/access_groups/{group_id}',          delete_access_group, returns='@AccessGroupModel'),
    Route('add_user_to_group',          'POST',   '/access_groups/{group_id}/members',  add_user_to_group, '', '', '?UserGroupMembershipModel', returns='@UserGroupMembershipModel'),
    Route('list_group_members',         'GET',    '/access_groups/{group_id}/members',  list_group_members, '', 'offset:int limit:int', returns='@ListUserGroupMembershipsResponse'),
    Route('remove_user_from_group',     'DELETE', '/access_groups/{group_id}/members/{user_name}', remove_user_from_group, returns='@UserGroupMembershipModel'),
    Route('list_user_groups',           'GET',    '/users/{user_name}/groups',          list_user_groups, '', 'offset:int limit:int', returns='@ListAccessGroupsResponse'),
    Route('list_workflow_groups',       'GET',    WF + '/access_groups',                list_workflow_groups, '', 'offset:int limit:int', returns='@ListAccessGroupsResponse'),
    Route('add_workflow_to_group',      'POST',   WF + '/access_groups/{group_id}',     add_workflow_to_group, returns='@WorkflowAccessGroupModel'),
    Route('remove_workflow_from_group', 'DELETE', WF + '/access_groups/{group_id}',     remove_workflow_from_group, returns='@WorkflowAccessGroupModel'),
    Route('check_workflow_access',      'GET',    '/access_check/{workflow_id}/{user_name}', check_workflow_access, returns='@AccessCheckResponse'),
    Route('reload_auth',                'POST',   '/admin/reload-auth',                 reload_auth, returns='@ReloadAuthResponse'),
)


def answer_type(route: Route) -> str:
    """Type of a route's answer, in the words of MODELS."""
    if route.returns:
        return route.returns
    noun = RESOURCES[route.resource]
    if route.verb is delete_rows:
        return '@DeleteCountResponse'
    return f'@List{noun.plural}Response' if route.name.startswith('list_') else '@' + noun.model


OPERATIONS = {route.name: route for route in ROUTES}
BULK_PATHS = frozenset(API_PREFIX + path for path in ('/bulk_jobs', '/bulk_files', '/bulk_user_data', '/workflows/from_spec'))
TEXT_PARAMETERS = frozenset(['status', 'worker', 'user_name'])    # path parameters that are not integers
# Operations that are not about one workflow: their verbs decide who may. All others need access to the workflow they are about.
OPEN_OPERATIONS = frozenset((
    'ping', 'get_version', 'get_openapi', 'get_database', 'snapshot_database', 'list_workflows',
    'list_workflow_statuses',
    'create_workflow', 'create_workflow_from_spec', 'create_access_group', 'list_access_groups',
    'get_access_group', 'delete_access_group', 'add_user_to_group', 'list_group_members',
    'remove_user_from_group', 'list_user_groups', 'check_workflow_access', 'reload_auth'))
TABLES_BY_PARAMETER = {'job_id': 'job', 'node_id': 'compute_node', 'task_id': 'task'}   # first in a path; row_id: the route's resource


def body_limit(path: str) -> int:
    """How many bytes the body of a request to this path may have."""
    return MAX_BULK_BODY_BYTES if path in BULK_PATHS else MAX_BODY_BYTES


@functools.lru_cache(maxsize=None)
def route_parts(route: Route) -> Tuple[str, ...]:
    """Path of a route, cut at its slashes."""
    return tuple(route.path.strip('/').split('/'))


@functools.lru_cache(maxsize=None)
def routes_by_shape() -> Dict[Tuple[int, str], List[Route]]:
    """(number of parts, first part) -> routes, those with fewer parameters first."""
    shapes = collections.defaultdict(list)  # type: Dict[Tuple[int, str], List[Route]]
    for route in sorted(ROUTES, key=lambda route: route.path.count('{')):
        parts = route_parts(route)
        shapes[len(parts), parts[0]].append(route)
    return dict(shapes)


def find_route(method: str, path: str) -> Tuple[Route, Dict[str, str]]:
    """The route of a request and its path parameters. 404 for an unknown path, 405 for another method."""
    path = API_PREFIX + path if path == OPENAPI_PATH else path
    parts = path[len(API_PREFIX):].strip('/').split('/') if path.startswith(API_PREFIX + '/') else ['']
    route = match_route(method, tuple('0' if part.isdigit() else part for part in parts))
    if route is None:
        allowed = {other for other in ('DELETE', 'GET', 'POST', 'PUT') if match_route(other, tuple(parts))}
        if allowed:
            raise BadInput(f"{printable(path)} takes {', '.join(sorted(allowed))}, not {method}", http=405)
        raise NotFound(f'there is nothing at {printable(path)}')
    return route, {want[1:-1]: urllib.parse.unquote(part, errors='surrogateescape') for want, part in zip(route_parts(route), parts) if want[0] == '{'}


@functools.lru_cache(maxsize=1000)
def match_route(method: str, parts: Tuple[str, ...]) -> Optional[Route]:
    """The route for the parts of a path, in which a number may stand for any other; None if there is none."""
    for route in routes_by_shape().get((len(parts), parts[0]), ()):
        if route.method == method and all(want == part or want[0] == '{' for want, part in zip(route_parts(route), parts)):
            return route
    return None


def parse_parameter(name: str, kind: str, text: str) -> Any:
    """A query or path parameter as a value."""
    if kind == 'str':
        check_str(name, text)
        return text
    if kind == 'bool' and text.lower() in ('true', 'false', '1', '0'):
        return text.lower() in ('true', '1')
    if kind == 'int' and re.match(r'[-+]?[0-9]{1,20}\Z', text):
        check_int(name, int(text))
        return int(text)
    wanted = {'int': 'an integer', 'bool': 'true or false'}[kind]
    raise BadInput(f'{name} must be {wanted}, not {printable(text)[:60]!r}', http=400, field=name)


def parse_query(route: Route, query: str) -> Dict[str, Any]:
    """Query parameters of a request as values; those that the route does not know are passed over, as in Torc."""
    found = urllib.parse.parse_qs(query, keep_blank_values=True, errors='surrogateescape')
    values = {}
    for name, field in query_fields(route).items():
        if name in found:
            is_list = field.type[0] == '['
            parsed = [parse_parameter(name, field.type.strip('[]'), text) for text in found[name]]
            values[name] = parsed if is_list else parsed[-1]
    return values


@functools.lru_cache(maxsize=None)
def query_fields(route: Route) -> Dict[str, ModelField]:
    """Query parameters of a route."""
    pairs = (item.split(':') for item in route.query.split())
    return {name: ModelField(kind.rstrip('!'), kind.endswith('!')) for name, kind in pairs}


@functools.lru_cache(maxsize=None)
def path_parameters(route: Route) -> List[str]:
    """Names of the parameters in a route's path, in their order."""
    return [part[1:-1] for part in route_parts(route) if part[0] == '{']


def name_parameters(route: Route, parameters: Dict[str, Any]) -> Dict[str, Any]:
    """A caller's parameters by the route's names: `id` may stand for the first one in the path. BadInput for unknown ones."""
    in_path = path_parameters(route)
    if 'id' in parameters and in_path:
        parameters = dict(parameters)
        parameters.setdefault(in_path[0], parameters.pop('id'))
    known = [*in_path, *query_fields(route)]
    for name in parameters:
        if name not in known:
            raise BadInput(f'{route.name} has no parameter {name!r}' + did_you_mean(name, known) + '; it takes ' + (', '.join(known) or 'none'))
    missing = [name for name in in_path if parameters.get(name) is None]
    if missing:
        raise BadInput(f"{route.name} needs {', '.join(missing)}")
    return {name: str(value) if name in TEXT_PARAMETERS and name in in_path else value for name, value in parameters.items()}


def call_route(store: Store, route: Route, parameters: Dict[str, Any], body: Any) -> Any:
    """Check what was sent, and let the verb answer."""
    for name, field in query_fields(route).items():
        if field.is_required and parameters.get(name) is None:
            raise BadInput(f'{name} is missing in the query of {route.name}', http=400, field=name)
    arguments = {name: value for name, value in parameters.items() if value is not None}
    for name, value in arguments.items():
        if isinstance(value, str):
            check_str(name, value)
    if route.body:
        is_optional = route.name == 'claim_action' and body is None
        arguments['body'] = body if is_optional else check_body(route.body, body)
    if is_limited(store) and route.name not in OPEN_OPERATIONS:
        check_route_access(store, route, arguments)
    if 'status' in arguments and '{status}' in route.path and arguments['status'] not in STATUS_CODES:
        raise BadInput(f"unknown status {printable(arguments['status'])!r}; one of {', '.join(STATUS_CODES)}", field='status')
    return route.verb(store, route.resource, **arguments) if route.resource else route.verb(store, **arguments)


def check_route_access(store: Store, route: Route, arguments: Dict[str, Any]) -> None:
    """Refuse a limited caller what is about a workflow that he has no access to, or about none that could be told."""
    about = [(arguments['workflow_id'], f"workflow {arguments['workflow_id']}")] if 'workflow_id' in arguments else []
    first = next((part[1:-1] for part in route_parts(route) if part[0] == '{'), '')
    table = RESOURCES[route.resource].table if first == 'row_id' else TABLES_BY_PARAMETER.get(first)
    if table:
        row_id = arguments[first]
        found = store.value(f'SELECT workflow_id FROM {table} WHERE id = ?', (row_id,))
        if table == 'task' and (found is None or not may_use(store, found, store.caller)):
            raise NotFound(f'there is no task {row_id}')    # as in Torc
        about.append((found, f"{table.replace('_', ' ')} {row_id}"))
    about += [(workflow_id, f'workflow {workflow_id}') for workflow_id in named_workflows(arguments.get('body'))]
    for workflow_id, what in about:
        check_may_use(store, workflow_id, what)
    if not about:
        check_admin(store)


def named_workflows(body: Any) -> Set[int]:
    """Ids of the workflows that a checked body names, itself or in its lists."""
    if not isinstance(body, dict):
        return set()
    rows = [body, *(row for value in body.values() if isinstance(value, list) for row in value if isinstance(row, dict))]
    return {row['workflow_id'] for row in rows if type(row.get('workflow_id')) is int}


def check_body(model: str, body: Any) -> Any:
    """What a route's verb gets of a body."""
    if model[0] == '[':
        return check_value('the body', model, body)
    if model != '-':
        return check_model('', model.lstrip('?'), body, is_partial=model[0] == '?')
    if body is None:
        raise wrong_type('the body', 'an object or another value', body)
    check_any('the body', body)
    return body


def format_parameter(value: Any) -> str:
    """A value as text for a path or a query."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_values(route: Route, parameters: Dict[str, Any]) -> Dict[str, Any]:
    """A caller's parameters as if they had come by HTTP: both doors take the same, and refuse the same."""
    kinds = query_fields(route)
    parsed = {}
    for name, value in parameters.items():
        kind = kinds[name].type if name in kinds else 'str' if name in TEXT_PARAMETERS else 'int'
        items = [parse_parameter(name, kind.strip('[]'), format_parameter(item))
                 for item in (value if isinstance(value, (list, tuple)) else [value]) if item is not None]
        if items:
            parsed[name] = items if kind[0] == '[' else items[-1]
    return parsed


def call_operation(store: Store, name: str, parameters: Dict[str, Any], body: Any = None) -> Any:
    """Answer an operation for a caller in this process. The caller holds a transaction. Raises TorcErrors.

    A verb that failed and yet has something to keep returns the error; what it returns is to be raised after the commit.
    """
    route = OPERATIONS[name]
    values = parse_values(route, name_parameters(route, parameters))
    with store.savepoint():
        return call_route(store, route, values, body)


def answer_request(store: Store, method: str, path: str, query: str, body: bytes, caller: str = '', is_owner: bool = True) -> Tuple[int, Any]:
    """Answer a request in a savepoint of its own, within the caller's transaction. (HTTP status, value); never raises.

    `is_owner`: the caller has shown the server's token. He may be an administrator without it.
    """
    try:
        store.caller, store.is_admin = caller, is_owner or is_system_admin(store, caller)
        route, found = find_route(method, path)
        parameters = {name: text if name in TEXT_PARAMETERS else parse_parameter(name, 'int', text) for name, text in found.items()}
        parameters.update(parse_query(route, query))
        value = parse_body(body) if route.body else None
        with store.savepoint():
            answer = call_route(store, route, parameters, value)
        if isinstance(answer, TorcError):
            return answer.http, format_error(answer)
        return 202 if isinstance(answer, Accepted) else 200, answer
    except TorcError as error:
        return error.http, format_error(error)
    except sqlite3.IntegrityError:
        return 422, format_error(Refused('the request refers to something that does not exist, or to what exists already'))
    except sqlite3.Error as error:
        explained = explain_database_error(error, store.path)
        log.error('%s %s: %s', method, printable(path), explained.message)
        return 503, format_error(explained)
    except Exception:  # border: one request; a bug must not take the server and the other requests with it
        log.error('%s %s failed; please report this bug\n%s', method, printable(path), traceback.format_exc())
        return 500, {'error': {'error': 'InternalServerError', 'message': "a bug in torc.py; the server's log has the traceback"}}


def parse_body(body: bytes) -> Any:
    """A request's body as a value; nothing at all is null."""
    if not body.strip():
        return None
    try:
        return parse_json(body.decode('utf-8'))
    except ValueError as error:     # of both: a UnicodeDecodeError is one
        raise BadInput(f'the body is not JSON: {printable(str(error))}', http=400) from None


RETRY_WORDS = Expression('connection|timeout|network|dns|resolve|unreachable', re.IGNORECASE)
SOFT_HYPHEN = '\u00ad'      # no reader sees it


def part_retry_words(text: str) -> str:
    """Text in which Torc's clients find none of the words that make them repeat a request: a job may be called network_test."""
    return RETRY_WORDS.sub(lambda match: match.group()[:2] + SOFT_HYPHEN + match.group()[2:], text)


def format_error(error: TorcError) -> Dict[str, Any]:
    """An error as ErrorResponse."""
    kind = {401: 'Unauthorized', 403: 'Forbidden', 404: 'NotFound', 409: 'Conflict'}.get(error.http, type(error).__name__)
    details = {key: part_retry_words(item) if key == 'value' and isinstance(item, str) else item for key, item in error.details.items()}
    return {'error': dict(details, error=kind, message=part_retry_words(error.message))}


# -------- the interface, described for other programs --------

def describe_row(*schemas: Dict[str, Any]) -> Dict[str, Any]:
    """JSON Schema of a list whose places have a meaning each."""
    return {'type': 'array', 'prefixItems': list(schemas), 'minItems': len(schemas), 'maxItems': len(schemas)}


ANYTHING = {}  # type: Dict[str, Any]
WHOLE = {'type': 'integer', 'format': 'int64'}
TEXT = {'type': 'string'}
TIME = {'type': 'string', 'format': 'date-time'}
AMOUNT = {'type': 'number', 'format': 'double', 'minimum': 0}
SCALAR_SCHEMAS = {  # type of MODELS -> JSON Schema; stream: server-sent events
    'stream': TEXT, 'int': WHOLE, 'float': {'type': 'number', 'format': 'double'}, 'bool': {'type': 'boolean'}, 'str': TEXT, 'any': ANYTHING,
    'object': {'type': 'object'}, 'name': {'type': 'string', 'maxLength': MAX_NAME_CHARACTERS}, 'time': TIME,
    'rules': {'type': 'string', 'contentMediaType': 'application/json'}, 'minutes': AMOUNT, 'gigabytes': AMOUNT,
    'nodes': dict(WHOLE, minimum=0), 'ordinal': dict(WHOLE, minimum=0), 'attempt': describe_row(WHOLE, WHOLE), 'start': describe_row(WHOLE, WHOLE, TIME),
    'ended': describe_row(WHOLE, WHOLE, TEXT), 'output': describe_row(WHOLE, TEXT),
    'planned_jobs': {'type': 'array', 'items': describe_row(*[ANYTHING] * len(PLANNED_TYPES)),
                     'description': 'each a list of: ' + ', '.join(PLANNED_TYPES)},
    'planned_kind': dict(describe_row(*[ANYTHING] * 4), description='resource requirements, priority, scheduler, labels'),
}
TAGS = {    # part of a path -> group of its operations in the official interface, where it is not the first part
    'bulk_jobs': 'jobs', 'bulk_files': 'files', 'bulk_user_data': 'user_data', 'actions': 'workflow_actions',
    'failure_handlers': 'failure_handlers', 'remote_workers': 'remote_workers', 'ro_crate_entities': 'ro_crate_entities',
    'access_groups': 'access_control', 'access_check': 'access_control', 'users': 'access_control', 'admin': 'access_control',
    'ping': 'system', 'version': 'system', 'openapi.json': 'system',
}


def describe_type(kind: str) -> Dict[str, Any]:
    """A type of MODELS as JSON Schema."""
    if kind in SCALAR_SCHEMAS:
        return SCALAR_SCHEMAS[kind]
    if kind[0] == '[':
        return {'type': 'array', 'items': describe_type(kind[1:-1])}
    if kind[0] == '{':
        item = describe_type(kind[1:-1].rstrip('?'))
        return {'type': 'object', 'additionalProperties': allow_null(item) if kind[-2] == '?' else item}
    return {'$ref': '#/components/schemas/' + kind.replace('?', 'Partial').lstrip('@')}


def allow_null(schema: Dict[str, Any]) -> Dict[str, Any]:
    """The same type or null."""
    if 'type' in schema:
        return dict(schema, type=[schema['type'], 'null'])
    return {'anyOf': [schema, {'type': 'null'}]} if schema else schema


def describe_model(model: str, is_partial: bool = False) -> Dict[str, Any]:
    """A model as JSON Schema. What is not required may be null or left out; partial: nothing is required."""
    fields = model_fields(model)
    required = [name for name, field in fields.items() if field.is_required and not is_partial]
    properties = {name: describe_type(field.type) if name in required else allow_null(describe_type(field.type))
                  for name, field in fields.items()}
    return dict({'type': 'object', 'properties': properties}, **({'required': required} if required else {}))


def describe_schemas() -> Dict[str, Any]:
    """All models and enums, and the models of which a part will do."""
    partial = set(re.findall(r'\?(\w+)', ' '.join([*MODELS.values(), *(route.body for route in ROUTES)])))
    schemas = {name: {'type': 'string', 'enum': list(words)} for name, words in ENUMS.items()}  # type: Dict[str, Any]
    schemas.update({name: describe_model(name) for name in MODELS})
    schemas.update({'Partial' + name: describe_model(name, is_partial=True) for name in partial if name in MODELS})
    return schemas


def public_path(route: Route) -> str:
    """Path of a route with the official name of its first parameter."""
    return re.sub(r'\{\w+_id\}', '{id}', route.path, count=1)


def describe_parameters(route: Route) -> List[Dict[str, Any]]:
    """Parameters of a route, in its path and in its query."""
    in_path = [{'name': name, 'in': 'path', 'required': True,
                'schema': describe_type('@JobStatus' if name == 'status' else 'str' if name in TEXT_PARAMETERS else 'int')}
               for name in re.findall(r'\{(\w+)\}', public_path(route))]
    return in_path + [{'name': name, 'in': 'query', 'required': field.is_required, 'schema': describe_type(field.type)}
                      for name, field in query_fields(route).items()]


def describe_content(description: str, kind: str) -> Dict[str, Any]:
    """A body or an answer of a type of MODELS."""
    media = 'text/event-stream' if kind == 'stream' else 'application/json'
    return {'description': description, 'content': {media: {'schema': describe_type(kind)}}}


def describe_operation(route: Route) -> Dict[str, Any]:
    """A route as an operation of OpenAPI."""
    answers = {'200': describe_content('done', answer_type(route)), '4XX': {'$ref': '#/components/responses/refused'},
               '503': {'$ref': '#/components/responses/unavailable'}}
    if 'async' in query_fields(route):
        answers['202'] = describe_content('begun: ask for the task', '@TaskModel')
    tag = next((TAGS[part] for part in route_parts(route) if part in TAGS), route_parts(route)[0])
    operation = {'operationId': route.name, 'tags': [tag], 'summary': route.name.replace('_', ' '),
                 'description': ' '.join((route.verb.__doc__ or '').split()), 'parameters': describe_parameters(route),
                 'responses': answers}
    if route.body:
        kind = 'any' if route.body == '-' else route.body if route.body[0] in '?[' else '@' + route.body
        operation['requestBody'] = dict(describe_content(route.body.lstrip('?-'), kind), required=True)
    return operation


def describe_interface() -> Dict[str, Any]:
    """The tables of this section as an OpenAPI 3.1 document (https://spec.openapis.org/oas/v3.1.0)."""
    paths = collections.defaultdict(dict)  # type: Dict[str, Dict[str, Any]]
    for route in ROUTES:
        paths[public_path(route)][route.method.lower()] = describe_operation(route)
    return {
        'openapi': '3.1.0',
        'info': {'title': 'torc.py', 'version': API_VERSION, 'description': 'Workflows, their jobs, and the runners at work on them.'},
        'servers': [{'url': API_PREFIX}],
        'security': [{'token': []}, {'password': []}],
        'paths': dict(paths),
        'components': {
            'schemas': describe_schemas(),
            'responses': {'refused': describe_content('wrong, not allowed, or not possible as things are: mend it', '@ErrorResponse'),
                          'unavailable': describe_content('not possible now: try again', '@ErrorResponse')},
            'securitySchemes': {'token': {'type': 'http', 'scheme': 'bearer'}, 'password': {'type': 'http', 'scheme': 'basic'}},
        },
    }


# ======== 10. Server: one selector loop, HTTP framing, state files ========
#
# One process, one thread, one database. Each turn of the loop reads what has arrived, runs every complete request
# inside one transaction, commits once, and only then sends the answers: what a client was told is on disk, and under
# load the commits batch themselves. Invariants:
#
#   * A connection has at most one request in a turn and is not read while an answer waits to be sent, so that no
#     client, however slow or greedy, holds more memory than one request and one answer. Pipelined requests wait.
#   * Who may ask is decided on the head alone, before the body is read and before any route is looked at: host and
#     origin, then token or password. Only /healthz goes without. A password takes long to check, on purpose: that is
#     done in one thread beside the loop (Users), while the connection is parked, neither read nor written.
#   * Whatever begins has a deadline, a connection itself too, until its first request was let in; from then on a quiet
#     one has none, for it is how a runner stays. Those not yet let in are few: the oldest make room for the next.
#   * Over TLS the same happens one layer higher. What OpenSSL holds is read at once, for the selector cannot see it; and
#     what it waits for (to read while we send, to send while we read) is what the selector waits for.
#   * A connection's trouble ends that connection, never the loop.
#   * A stream of events is an answer that goes on. Its events stay in a Feed, once for all its readers; a reader has a place
#     in it and one piece at most on the way. Who is too slow for the feed is told how much was missed, who takes nothing
#     at all is given up like any other client. Nothing is sent before the commit, and nothing is kept where nobody listens.
#   * An administrator's SQL has a transaction of its own: whatever it does, it does not touch what others asked for.
#
# Beside a database `torc.db` lie its state files, each 0600: torc.db.token (kept across restarts),
# torc.db.connection (where the living server is; removed at its end), torc.db.lease (on file systems whose
# locks cannot be trusted), torc.db.memory (where a server has it in memory), and torc.db.log (of a server in
# the background). An embedded server is forked by the first client that needs one and leaves when its last
# connection has closed. Which process serves is decided by the database's lock and nothing else.

CLIENT_DEADLINE_S = 30.0            # for a request once begun, and for a client that does not take its answer
SLOWEST_BYTES_PER_S = 2 ** 20       # a long body gets more time, at this rate
DRAIN_S = 2.0                       # reading on after a refusal: to close at once would destroy it (RFC 9112, 9.6)
TICK_S = 5.0                        # between looks for lost nodes, and tries of a task
EMBEDDED_FIRST_S = 10.0             # an embedded server waits so long for its first client
EMBEDDED_GRACE_S = 0.3              # ... and so long after its last
START_DEADLINE_S = 30.0             # for an embedded server to answer
MAX_REQUEST_LINE_BYTES = 16 * 1024
MAX_HEAD_BYTES = 64 * 1024
MAX_FIELDS = 100
RECEIVE_BYTES = 65536               # at once; more costs a mmap() for each small request
SEND_BYTES = 2 ** 18                # at once: to encrypt a long answer in one go would hold up the others
MAX_STRANGERS = 4096                # connections none of whose requests was let in yet
BACKLOG = 1024
KEEP_ALIVE_S = 15.0                 # between signs of life on streams
MAX_FEED_EVENTS = 8192              # kept for slow readers and those who come back; then the older half goes
MAX_FEED_BYTES = 4 * 1024 ** 2      # ... and of them together
PIECE_BYTES = 65536                 # sent to a reader at once, about
RESUME_S = 600.0                    # a feed that nobody reads any more is kept so long, for those who come back
MAX_IDLE_FEEDS = 20                 # ... unless there are more of them
MAX_SHOWN_BODY_BYTES = 2 ** 20      # larger bodies are left out of the stream of requests
SHOWN_BODY_BYTES = 8192             # ... and of others the beginning is shown
MAX_LOG_BYTES = 10 * 2 ** 20        # of torc-server.log; LOGS_KEPT of them
LOGS_KEPT = 5
MAX_EMBEDDED_LOG_BYTES = 2 ** 20    # of an embedded server's log, of which there is one
SNAPSHOTS_KEPT = 5
IN_MEMORY = ':memory:'              # for a database: one that lasts as long as its server
DEFAULT_SNAPSHOT_INTERVAL_S = 300.0     # of a database in memory; Torc writes one at the end only
MEMORY_RESERVE_BYTES = 32 * 2 ** 20     # that must be free in memory beside twice the size of the database
COPY_BYTES = 2 ** 20                # read and written at once
REQUEST_LINE = Expression(r'([A-Z]{1,20}) (/[!-~]*) HTTP/1\.([01])\Z')
FIELD_LINES = Expression(r"(?:\r\n[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~\x80-\xff]*)*\Z")
HOST_TEXT = Expression(r'(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::[0-9]{1,5})?\Z')
SPAN_ID = Expression(r'[0-9A-Za-z_.:-]{1,100}\Z')
SINGLE_FIELDS = frozenset([
    'authorization', 'connection', 'content-length', 'expect', 'host', 'origin', 'sec-fetch-site', 'transfer-encoding'])
STOP_NUMBERS = (0, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)    # bytes on the wakeup descriptor; 0: stop()
LOOPBACK_NAMES = ('127.0.0.1', '::1', 'localhost')
MAX_ATTEMPTS = 64                   # passwords being checked, or found wrong in the last second; others are answered 429
MAX_ATTEMPTS_OF_USER = 16           # ... of one user
WRONG_PASSWORD_S = 1.0              # from a wrong password to its 401, whatever was wrong with it
REFUSALS_TOLD_S = 60.0              # between log lines about wrong tokens and passwords
DEFAULT_KNOWN_S = 60.0              # a right password needs no other check for so long after its last use
MAX_KNOWN_PASSWORDS = 1000          # that were right, and need no other check for a while
WAKE = b'\xff'                      # on the wakeup descriptor: a thread has done its work
ANSWER_FIELDS = 'x-content-type-options: nosniff\r\nx-frame-options: DENY\r\ncache-control: no-store\r\n'


# -------- state files --------

def state_directory() -> str:
    """Where a lasting server keeps its database: $XDG_STATE_HOME/torc, else ~/.local/state/torc."""
    home = os.environ.get('XDG_STATE_HOME', '')
    if not os.path.isabs(home):     # relative ones are to be ignored (XDG Base Directory Specification)
        home = os.path.join(os.path.expanduser('~'), '.local', 'state')
    return os.path.join(home, 'torc')


def default_database() -> str:
    """Database of a lasting server that was told no other."""
    return os.path.join(state_directory(), 'torc.db')


def prepare_database_directory(database: str) -> None:
    """Make the directory of a database, or check that nobody else can replace the files in it."""
    directory = os.path.dirname(os.path.abspath(database))
    try:
        make_private_directory(directory)
        found = os.stat(directory)
    except OSError as error:
        raise BadInput(f'cannot make the directory {directory}: {error.strerror}; '
                       'give another place with --db') from None
    if found.st_uid not in (os.geteuid(), 0):
        raise Denied(f'{directory} belongs to another user, who could replace the database in it; '
                     'give another place with --db')
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX and not is_private_group(found):
        raise Denied(f'other users may write to {directory} and could replace the database in it: '
                     f'`chmod go-w {shlex.quote(directory)}`, or give another place with --db')


def open_private(path: str, flags: int) -> int:
    """Open a state file that is ours and no link, and that nobody else can read. OSError, or Denied."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    found = os.fstat(descriptor)
    is_private = found.st_uid == os.geteuid() and not found.st_mode & 0o077
    if is_private and stat.S_ISREG(found.st_mode) and found.st_nlink < 2:   # 0: replaced since it was opened
        return descriptor
    os.close(descriptor)
    raise Denied(f'{path} is not a private file of yours: it must belong to you, be readable by nobody else, '
                 'and have one name; remove it')


def read_private(path: str) -> str:
    """Text of a private state file. FileNotFoundError if there is none."""
    try:
        with os.fdopen(open_private(path, os.O_RDONLY), encoding='utf-8', errors='replace') as file:
            return file.read(65536)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Denied(f'cannot read {path}: {error.strerror}; it must be a private file of yours') from None


def read_token(path: str) -> str:
    """Token in a token file."""
    try:
        token = read_private(path).strip()
    except FileNotFoundError:
        raise Denied(f'there is no token file {path}: TORC_TOKEN_FILE names that of a running server') from None
    if not re.match(r'[0-9A-Za-z_-]{32,200}\Z', token):
        raise Denied(f'{path} holds no token; `torc.py serve --new-token` makes one')
    return token


def keep_token(path: str, is_new: bool = False) -> str:
    """The token of a database: the one that is there, or a new one. Callers hold the database."""
    if is_new or not os.path.lexists(path):
        write_atomically(path, secrets.token_urlsafe(32).encode() + b'\n')
    return read_token(path)


def describe_process() -> Dict[str, Any]:
    """What names this process for good: host, boot, pid, start."""
    pid = os.getpid()
    return {'host': socket.gethostname(), 'boot_id': read_boot_id(), 'pid': pid,
            'start_ticks': read_process_start_ticks(pid)}


def process_lives(process: Dict[str, Any]) -> Optional[bool]:
    """Whether a process described by describe_process() lives. None if it is of another host."""
    if process.get('host') != socket.gethostname():
        return None
    if process.get('boot_id') != read_boot_id():
        return False
    pid, start_ticks = process.get('pid'), process.get('start_ticks')
    if not isinstance(pid, int) or pid <= 0:
        return False
    if start_ticks:
        return read_process_start_ticks(pid) == start_ticks
    try:    # no /proc here
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:     # it lives, under another user
        pass
    return True


def list_of(value: Any) -> List[Any]:
    """A list as it is, nothing as an empty one, anything else as what no check lets through."""
    return value if isinstance(value, list) else [] if value is None else [None]


def read_server_file(path: str) -> Optional[Dict[str, Any]]:
    """What a connection file says of a server, living or dead. None if there is no such file."""
    try:
        found = parse_json(read_private(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        found = None
    words = [None]      # type: List[Any]
    if isinstance(found, dict):
        words = [found.get(key) or '' for key in ('token_file', 'fingerprint', 'database')]
        words += [found.get('url'), *list_of(found.get('candidates'))]
    if not all(isinstance(word, str) for word in words):
        raise Denied(f'{path} is damaged: remove it')
    return found


def read_living_server(path: str) -> Optional[Dict[str, Any]]:
    """The same. None also if the server is known to be dead."""
    found = read_server_file(path)
    return None if found is None or process_lives(found) is False else found


def read_connection_file(database: str) -> Optional[Dict[str, Any]]:
    """Where a database is served, by its connection file. None if there is none, or its server is dead."""
    return read_living_server(database + '.connection')


# -------- registered servers --------
#
# A lasting server has a second connection file in a directory of the user's state directory, so that commands
# find it wherever its database is stored. A clean end removes it. One that is left means that commands would
# have used a server that was killed: to use another database instead would change what nobody meant, so that
# it is an error until the server is started again, its database is used by name, or the file is removed.

def registration_path(database: str) -> str:
    """File that registers this host's server of a database."""
    key = f'{socket.gethostname()}:{os.path.realpath(database)}'.encode('utf-8', 'surrogateescape')
    return os.path.join(state_directory(), 'servers', hashlib.sha256(key).hexdigest()[:16])


def registration_files() -> List[str]:
    """Paths of all registrations. Another user's are ignored: HOME may be theirs (su, sudo)."""
    try:
        with os.scandir(os.path.join(state_directory(), 'servers')) as entries:
            found = [entry for entry in entries if entry.name[0] != '.']
            own = os.geteuid()
            return sorted(entry.path for entry in found if entry.stat(follow_symlinks=False).st_uid == own)
    except (FileNotFoundError, NotADirectoryError):     # there are none, or a server ends just now
        return []


def list_registrations() -> Dict[str, Dict[str, Any]]:
    """The registered servers, living or dead, by the paths of their files."""
    found = {path: read_server_file(path) for path in registration_files()}
    return {path: server for path, server in found.items() if server is not None and server.get('database')}


def register_server(server: Dict[str, Any]) -> str:
    """Let commands find a lasting server. Path of its file; '' if it could not be written."""
    path = registration_path(server['database'])
    try:
        make_private_directory(os.path.dirname(path))
        write_atomically(path, format_json(server).encode())
        if is_network_path(server['database']):     # another host may have served it before
            for other, old in list_registrations().items():
                if other != path and old['database'] == server['database']:
                    os.unlink(other)
    except (OSError, Denied) as error:
        log.warning('this server cannot be registered: commands find it only with --url or --db (%s)', error)
        return ''
    return path


def unregister_server(path: str, server: Dict[str, Any]) -> None:
    """Remove a connection file, if it is still this server's."""
    with contextlib.suppress(OSError, Denied):      # it was removed already
        if (read_server_file(path) or {}).get('server_id') == server['server_id']:
            os.unlink(path)


def forget_server(database: str) -> None:
    """Remove the registration of a killed server. Callers have the database, so that no server has."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(registration_path(database))
        log.warning('the server of %s was killed earlier and is no longer registered: '
                    'commands find this database only with --db', database)


class Lease:
    """The word that this process serves a database, for file systems whose locks may hold on one host only.

    A file `<database>.lease`, made with O_EXCL and renewed by rename. A lease is taken over at once from a dead
    process of this host, and from another host's when it was not renewed for three periods by our own clock. Its
    holder reads it again before it commits anything a period after its last look, and ends when it has lost it.
    """
    PERIOD_S = 10.0

    def __init__(self, database: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = database + '.lease'
        self.clock = clock
        self.mine = dict(describe_process(), id=secrets.token_hex(8), generation=1, renewals=0)
        self.renewed_at = -math.inf     # by clock

    def take(self, takes_over: bool = False, wait_s: float = 0.0) -> None:
        """Become the holder. Conflict if another one lives, after wait_s of watching it."""
        first, seen_at = self.read(), self.clock()
        while True:
            found = self.read()
            if found is None and self.create():
                return
            if found != first:
                first, seen_at = found, self.clock()
            silent_s = self.clock() - seen_at
            if found is not None and (takes_over or process_lives(found) is False or silent_s >= 3 * self.PERIOD_S):
                return self.replace(found)
            if silent_s >= wait_s:
                raise Conflict(self.describe(found or {}))
            time.sleep(0.2)

    def describe(self, found: Dict[str, Any]) -> str:
        """Who has it, and the cure."""
        return (f'the database is served by process {found.get("pid")} on host {found.get("host")} ({self.path}); '
                'if that one is gone for certain, `torc.py serve --takeover` takes it')

    def read(self) -> Optional[Dict[str, Any]]:
        """The lease as it stands; None if nobody has it."""
        try:
            return json.loads(read_private(self.path))
        except FileNotFoundError:
            return None
        except ValueError:      # made, but not yet written
            return {}

    def create(self) -> bool:
        """Write a lease where there is none. False if somebody was faster."""
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, 'wb') as file:
            file.write(format_json(self.mine).encode())
        self.renewed_at = self.clock()
        return True

    def replace(self, found: Dict[str, Any]) -> None:
        """Take over from a holder that was found dead. One at a time: a second file guards the exchange."""
        guard = self.path + '.takeover'
        try:
            os.close(os.open(guard, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            raise Conflict(f'another process is taking the database over; if none is, remove {guard}') from None
        try:
            if self.read() != found:
                raise Conflict(self.describe(found))
            self.mine['generation'] = int(found.get('generation') or 0) + 1
            self.write()
        finally:
            os.unlink(guard)

    def write(self) -> None:
        """Put our lease in place."""
        self.mine['renewals'] += 1
        write_atomically(self.path, format_json(self.mine).encode())
        self.renewed_at = self.clock()

    def renew(self) -> None:
        """Once a period: see that it is still ours, and say so again. Conflict if it was lost, or may be soon."""
        silent_s = self.clock() - self.renewed_at
        if silent_s < self.PERIOD_S:
            return
        try:
            found = self.read()
            if found is None or found.get('id') != self.mine['id']:
                raise Conflict('another server has taken the database over: ' + self.describe(found or {}))
            self.write()
        except (OSError, Denied) as error:      # a full disk, or a file system that comes back
            if silent_s > 2 * self.PERIOD_S:
                raise Conflict(f'the lease {self.path} could not be renewed, others may take it: {error}') from None

    def release(self) -> None:
        """Give it back, if it is ours."""
        found = self.read()
        if found is not None and found.get('id') == self.mine['id']:
            os.unlink(self.path)


def hold_database(database: str, takes_over: bool = False, wait_s: float = 0.0,
                  in_memory: bool = False) -> Tuple[Store, Optional[Lease]]:
    """Open a database as its only process, or put it in memory. Conflict if another process has it."""
    prepare_database_directory(database)
    lease = None
    if filesystem_type(os.path.dirname(os.path.abspath(database))) not in LOCAL_FILESYSTEMS:
        lease = Lease(database)
        lease.take(takes_over, wait_s)
    with contextlib.ExitStack() as stack:       # for failures
        if lease is not None:
            stack.callback(lease.release)
        store = open_in_memory(database, takes_over) if in_memory else open_on_disk(database, takes_over)
        stack.callback(store.close)
        with store.transaction():
            fail_open_tasks(store)
        stack.pop_all()
        return store, lease


# -------- databases in memory --------
#
# For slow file systems: the live database is a private file in memory (in a new directory of /dev/shm, else
# of $TMPDIR) and `--db` a snapshot of it, replaced now and then and at every end. `torc.db.memory` beside the
# snapshot says which process has the live file, and where. It is written before the first change and removed
# after the last snapshot: while it is there, the snapshot may be behind. The live file outlives a killed
# server; the next process that opens the database on that host continues with it or writes it back. Exclusive
# is who has the lock of the snapshot and then finds no such file, or that of a dead process.
#
# Snapshots do not hold up the loop: a checkpoint makes the main file whole, and while a thread copies it no
# other checkpoint runs, so that all changes go to the write-ahead log (sqlite.org/wal.html). SQLite's backup
# interface would need Python 3.7, and VACUUM INTO SQLite 3.27 and the loop.

def read_memory_file(database: str, takes_over: bool) -> str:
    """Path of the live file that a killed server of a database has left, or ''. Callers have its lock.

    Conflict if that server lives, Refused if the live file is in another host's memory.
    """
    path = database + '.memory'
    try:
        found = parse_json(read_private(path))
        live, own = str(found['path']), str(found['database'])
    except FileNotFoundError:
        return ''
    except (ValueError, KeyError, TypeError):
        raise Denied(f'{path} is damaged: remove it') from None
    if own != os.path.realpath(database) and os.path.exists(own + '.memory'):
        os.unlink(path)     # it came with a copy of the directory
        return ''
    lives, saved_at = process_lives(found), format_time(os.stat(database).st_mtime)
    if lives:
        raise Conflict(f'the database {database} is in use by another torc.py (process {found["pid"]}, '
                       'in memory); stop it, or give another place with --db')
    if lives is None and not takes_over:
        raise Refused(f'the newest state of {database} is in the memory of host {found["host"]}: use it '
                      f'there first; or, if that host was restarted, continue with the snapshot of {saved_at}'
                      f': rm {shlex.quote(path)}')
    if lives is None or not os.path.exists(live):
        log.warning('%s was in memory, which was lost with its server: changes after %s are lost',
                    database, saved_at)
        os.unlink(path)
        return ''
    return live


def open_on_disk(database: str, takes_over: bool = False) -> Store:
    """Open a database in its file. What a killed server has left in memory is written back before."""
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(contextlib.closing(Store(database)))
        live = read_memory_file(database, takes_over)
        if not live:
            stack.pop_all()
            return store
        found = stack.enter_context(contextlib.closing(Store(live)))
        found.freeze()
        replace_database(found.main_file(), database)
        os.unlink(database + '.memory')
    log.warning('%s was in memory when its server was killed: its changes were written back', database)
    shutil.rmtree(os.path.dirname(live), ignore_errors=True)
    return Store(database)      # the file that was opened first was replaced


def open_in_memory(database: str, takes_over: bool = False) -> Store:
    """Put a database in memory and open it there, or continue with the live file of a killed server."""
    with contextlib.ExitStack() as stack:
        saved = stack.enter_context(contextlib.closing(Store(database)))
        live = read_memory_file(database, takes_over)
        if not live:
            live = os.path.join(make_memory_directory(os.fstat(saved.main_file()).st_size), 'torc.db')
            saved.freeze()
            copy_descriptor(saved.main_file(), live)
        with contextlib.ExitStack() as failures:
            store = failures.enter_context(contextlib.closing(Store(live)))
            store.file_path = os.path.abspath(database)
            content = dict(describe_process(), path=live, database=os.path.realpath(database))
            write_atomically(database + '.memory', format_json(content).encode())
            failures.pop_all()
    return store


def make_memory_directory(size_bytes: int) -> str:
    """A private directory where a database of this size has room to double: in memory, else in $TMPDIR."""
    for parent in ('/dev/shm', tempfile.gettempdir()):
        with contextlib.suppress(OSError):      # it is not there, or not writable
            free = os.statvfs(parent)
            if free.f_bavail * free.f_frsize >= 2 * size_bytes + MEMORY_RESERVE_BYTES:
                return tempfile.mkdtemp(prefix='torc-', dir=parent)
    raise BadInput(f'neither /dev/shm nor {tempfile.gettempdir()} has room for a database of '
                   f'{format_memory(size_bytes)}')


def copy_descriptor(descriptor: int, path: str) -> None:
    """Copy a whole file to a private one, on disk at the end."""
    with os.fdopen(open_new_private(path, os.O_WRONLY | os.O_TRUNC), 'wb') as target:
        offset = 0
        for piece in iter(lambda: os.pread(descriptor, COPY_BYTES, offset), b''):
            target.write(piece)
            offset += len(piece)
        target.flush()
        os.fsync(target.fileno())


def replace_database(descriptor: int, database: str) -> None:
    """Replace a database file with a copy of a frozen main file."""
    copy_descriptor(descriptor, database + '.new')
    os.replace(database + '.new', database)


class SnapshotWriter:
    """Writes snapshots of a database in memory to its file: at an interval, and when asked to.

    Everything but work() runs in the server's thread, between transactions.
    """

    def __init__(self, store: Store, interval_s: float, announce: Callable[[str], Any]) -> None:
        self.store = store
        self.interval_s = interval_s
        self.announce = announce    # gets a line for each snapshot
        self.due_at = time.monotonic() + interval_s
        self.saved = -1             # Store.changes that the file holds
        self.saving = -1            # ... and the snapshot that is being written
        self.error = ''             # why the last one failed
        self.thread = None          # type: Optional[threading.Thread]
        self.failure = None         # type: Optional[Exception]  # of the thread
        self.is_over = False        # the thread has done its work
        self.wake = lambda: None    # type: Callable[[], Any]  # called in the thread then
        store.main_file()           # open from now on: the file may be removed (logind.conf(5), RemoveIPC)

    def ask(self) -> None:
        """Write a snapshot as soon as possible."""
        self.due_at = -math.inf

    def next_at(self) -> float:
        """When to act; inf while nothing has changed, or the thread is going to wake us."""
        is_idle = self.due_at > -math.inf and self.saved == self.store.changes
        return math.inf if self.thread is not None or is_idle else self.due_at

    def act(self, now: float) -> None:
        """Do what is due."""
        if self.is_over:
            self.finish()
        if self.next_at() <= now:
            self.begin()

    def begin(self) -> None:
        """Begin a snapshot."""
        self.due_at = time.monotonic() + self.interval_s
        try:
            is_frozen = self.store.freeze()
        except sqlite3.Error as error:
            return self.report(error)
        self.saving = self.store.changes
        self.thread = threading.Thread(target=self.work, name='snapshot', daemon=True)
        self.thread.start()
        if not is_frozen:
            self.finish()

    def work(self) -> None:
        """The thread."""
        try:
            replace_database(self.store.main_file(), self.store.file_path)
        except Exception as error:      # border: reported by finish(), and tried again later
            self.failure = error
        self.is_over = True
        self.wake()

    def finish(self) -> None:
        """Wait for the snapshot that is being written, if there is one."""
        if self.thread is None:
            return
        self.thread.join()
        self.store.thaw()
        failure, self.failure, self.is_over, self.thread = self.failure, None, False, None
        self.report(failure)
        if failure is None:
            self.saved = self.saving

    def report(self, failure: Optional[Exception]) -> None:
        """Say how a snapshot ended."""
        self.error = '' if failure is None else str(failure)
        if failure is not None:
            log.error('the snapshot %s could not be written: %s', self.store.file_path, failure)
        else:
            log.info('the snapshot %s was written', self.store.file_path)
            self.announce(f'TORC_SNAPSHOT_DONE={self.store.file_path}\n')

    def close(self) -> None:
        """Write the last snapshot. If that fails the live file stays, for the next process."""
        try:
            self.finish()
            if self.saved < self.store.changes:
                self.store.freeze()
                replace_database(self.store.main_file(), self.store.file_path)
            os.unlink(self.store.file_path + '.memory')
        except (OSError, sqlite3.Error) as error:
            self.report(error)
            log.error('the newest state of %s stays in %s: the next command that uses it writes it back',
                      self.store.file_path, self.store.path)


def remove_memory_directory(store: Store) -> None:
    """Remove the live file, unless it is still needed."""
    if not os.path.exists(store.file_path + '.memory'):
        shutil.rmtree(os.path.dirname(store.path), ignore_errors=True)


# -------- HTTP framing --------

class Head(NamedTuple):
    """A request without its body."""
    method: str
    path: str                   # as sent: still percent-encoded
    query: str
    fields: Dict[str, str]      # names in lower case
    length: int                 # of the body, bytes
    keeps_alive: bool           # the client wants to ask more


class Caller(NamedTuple):
    """Who asks."""
    name: str
    is_owner: bool      # has shown the server's token


class Request(NamedTuple):
    """A complete request."""
    head: Head
    body: bytes
    caller: Caller


def parse_head(data: bytes) -> Head:
    """Request line and header fields, without the empty line -> Head. BadInput with the HTTP status."""
    line, separator, rest = data.decode('latin-1').partition('\r\n')
    rest = separator + rest
    match = REQUEST_LINE.match(line)
    if not match:
        raise BadInput('the request line is not that of HTTP/1.1', http=400)
    if rest.count('\r\n') > MAX_FIELDS:
        raise BadInput(f'more than {MAX_FIELDS} header fields', http=431)
    if not FIELD_LINES.match(rest):
        raise BadInput('a header field is malformed', http=400)
    fields = parse_fields(rest)
    method, target, minor = match.groups()
    path, _, query = target.partition('?')
    wish = fields.get('connection', '').lower()
    keeps_alive = 'close' not in wish if minor == '1' else 'keep-alive' in wish
    return Head(method, path, query, fields, parse_length(fields), keeps_alive)


def parse_fields(text: str) -> Dict[str, str]:
    """Well-formed header lines -> values by lower-case name. What must not stand twice is refused."""
    fields = {}     # type: Dict[str, str]
    for line in text.split('\r\n')[1:]:
        name, _, value = line.partition(':')
        name = name.lower()
        if name in fields and name in SINGLE_FIELDS:
            raise BadInput(f'the header field {name} stands twice', http=400)
        fields[name] = value.strip(' \t')
    return fields


def parse_length(fields: Dict[str, str]) -> int:
    """Length of the body that follows. Chunked bodies are refused: read as plain they would hide a second request."""
    if 'transfer-encoding' in fields:
        raise BadInput('Transfer-Encoding is not supported: send the body with a Content-Length', http=501)
    text = fields.get('content-length', '0')
    if not re.match(r'[0-9]{1,10}\Z', text):
        raise BadInput('Content-Length is not a number of bytes', http=400)
    return int(text)


def check_head_size(data: bytearray, end: int) -> None:
    """Refuse a head that is too long, or no HTTP at all, whether it is complete (`end` of it) or not yet (-1)."""
    if not 65 <= data[0] <= 90:
        hint = ' but a hello of TLS: write http:// in the address' if data[0] == 22 else ''
        raise BadInput(f'this is not a request of HTTP/1.1{hint}', http=400)
    if data.find(b'\r\n', 0, MAX_REQUEST_LINE_BYTES) < 0 and len(data) > MAX_REQUEST_LINE_BYTES:
        raise BadInput(f'the request line is longer than {MAX_REQUEST_LINE_BYTES} bytes', http=414)
    if (len(data) if end < 0 else end) > MAX_HEAD_BYTES:
        raise BadInput(f'the header fields are longer than {MAX_HEAD_BYTES} bytes', http=431)


def format_answer(status: int, body: bytes, fields: str = '') -> bytes:
    """One whole answer. `fields` are further header lines, each with its line end."""
    if body:
        fields += 'content-type: application/json\r\n'
    reason = reason_phrase(status)
    head = f'HTTP/1.1 {status} {reason}\r\n{ANSWER_FIELDS}{fields}content-length: {len(body)}\r\n\r\n'
    return head.encode('latin-1') + body


def format_refusal(error: TorcError, fields: str = '') -> bytes:
    """The answer to a request that no verb could answer."""
    return format_answer(error.http, format_json(format_error(error)).encode(), fields)


# -------- who may ask --------

def check_access(head: Head, token: bytes, names: Set[str], scheme: str = 'http') -> None:
    """Let a request pass, or raise: its sender must be in order, and its token right. An empty token lets everybody in."""
    check_sender(head, names, scheme)
    offered = offered_token(head.fields.get('authorization', ''))
    if token and head.path != '/healthz' and not hmac.compare_digest(token, offered):
        raise Denied('the token is missing or wrong: send `Authorization: Bearer TOKEN`, '
                     'or any user with the token as password', http=401)


def check_sender(head: Head, names: Set[str], scheme: str = 'http') -> None:
    """Refuse a request whose Host is not ours, or that a page of another origin sends.

    The Host check defeats names that an attacker's DNS points at us; browsers send Origin or Sec-Fetch-Site with
    whatever a page of another site makes them ask.
    """
    host = HOST_TEXT.match(head.fields.get('host', ''))
    if host is None:
        raise BadInput('the header field Host is missing or malformed', http=400)
    if host.group(1).strip('[]').rstrip('.').lower() not in names:
        raise Denied(f'this server is not called {printable(host.group(1))!r}')
    origin = head.fields.get('origin')
    if origin is not None and origin.lower() != f"{scheme}://{head.fields.get('host', '').lower()}":
        raise Denied('requests from pages of another origin are not answered')
    if head.fields.get('sec-fetch-site', 'none') not in ('none', 'same-origin'):
        raise Denied('requests from pages of another site are not answered')


def offered_token(authorization: str) -> bytes:
    """Token in an Authorization field: Bearer TOKEN, or Basic with the token as password. b'' if there is none."""
    scheme, _, value = authorization.partition(' ')
    return value.strip().encode('latin-1') if scheme.lower() == 'bearer' else offered_password(authorization)[1]


def offered_password(authorization: str) -> Tuple[str, bytes]:
    """User and password in an Authorization field of the scheme Basic (RFC 7617); ('', b'') if there are none."""
    scheme, _, value = authorization.partition(' ')
    if scheme.lower() != 'basic':
        return '', b''
    try:
        user, _, password = base64.b64decode(value.strip().encode('latin-1'), validate=True).partition(b':')
    except ValueError:
        return '', b''
    return user.decode('utf-8', 'surrogateescape'), password


def prove_token(token: bytes, challenge: str, port: int) -> str:
    """What only a server on this port that holds the token can answer to a challenge.

    A client asks for it before it shows its token: another user's program may have taken the port since. The port is in
    it, so that such a program cannot fetch the answer from the true server, which may be back on another port.
    """
    return hmac.new(token, f'{challenge} {port}'.encode('latin-1', 'replace'), hashlib.sha256).hexdigest()


# -------- passwords --------
#
# A password file is one of Apache's htpasswd: a line USER:HASH for each user, and comments. HASH is either bcrypt's
# (`$2b$12$...`, also 2a and 2y), checked by the system's libcrypt, or ours: `$scrypt$ln=15,r=8,p=1$SALT$HASH`, where
# ln is the base 2 logarithm of scrypt's N (RFC 7914), SALT and HASH are base64 without padding.

BCRYPT_LINE = Expression(r'\$2[aby]\$(?:0[4-9]|[12][0-9]|3[01])\$[./A-Za-z0-9]{53}\Z')
SCRYPT_LINE = Expression(r'\$scrypt\$ln=([0-9]{1,2}),r=([0-9]{1,2}),p=([0-9]{1,6})\$([A-Za-z0-9+/]+)\$([A-Za-z0-9+/]+)\Z')
BCRYPT_PROOF = b'$2y$05$CCCCCCCCCCCCCCCCCCCCC.E5YPO9kmyuRGyh0XouQYb4YMJKvyOeW'     # of b'U*U', from the tests of crypt_blowfish
BCRYPT_ALPHABET = './ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789'
MOST_SCRYPT_LN = 17                 # 128 MiB
DEFAULT_PASSWORD_COST = 12
MOST_PASSWORD_COST = 16             # some seconds, in which no other password is checked; 31 takes a day


@functools.lru_cache(maxsize=None)
def find_bcrypt() -> Optional[Callable[[bytes, bytes], Optional[bytes]]]:
    """crypt(3), where the system's knows bcrypt; else None. For one thread at a time: its answer lies in a static buffer."""
    for name in ('libcrypt.so.2', 'libcrypt.so.1', None):   # None: musl and the BSDs have it in libc
        try:
            crypt = ctypes.CDLL(name).crypt
        except (OSError, AttributeError):
            continue
        crypt.argtypes, crypt.restype = (ctypes.c_char_p, ctypes.c_char_p), ctypes.c_char_p
        if crypt(b'U*U', BCRYPT_PROOF[:29]) == BCRYPT_PROOF:
            return crypt
    return None


def hash_password(password: bytes, cost: int = DEFAULT_PASSWORD_COST) -> str:
    """What a password file holds of a password: scrypt, or bcrypt where Python has no scrypt. Each cost doubles the work."""
    if hasattr(hashlib, 'scrypt'):      # not with an OpenSSL before 1.1
        salt, ln, p = secrets.token_bytes(16), min(cost, 14) + 3, 2 ** max(0, cost - 14)
        digest = run_scrypt(password, salt, ln, 8, p)
        return f'$scrypt$ln={ln},r=8,p={p}${format_base64(salt)}${format_base64(digest)}'
    crypt = find_bcrypt()
    if crypt is None or len(password) > 72:     # bcrypt looks at no more
        raise BadInput('this Python has no scrypt (its OpenSSL is too old)' + (
            '; the system has no bcrypt either: use another Python' if crypt is None else ', and bcrypt takes at most 72 bytes'))
    salt_text = ''.join(secrets.choice(BCRYPT_ALPHABET) for _ in range(21)) + secrets.choice('.Oeu')   # 128 bits
    return crypt(password, f'$2y${cost:02}${salt_text}'.encode()).decode()


def run_scrypt(password: bytes, salt: bytes, ln: int, r: int, p: int, length: int = 32) -> bytes:
    """RFC 7914, allowed the memory that it needs."""
    return hashlib.scrypt(password, salt=salt, n=2 ** ln, r=r, p=p, maxmem=128 * r * (2 ** ln + p + 4) + 2 ** 20, dklen=length)


def format_base64(data: bytes) -> str:
    """Bytes as base64 without padding."""
    return base64.b64encode(data).decode().rstrip('=')


def parse_base64(text: str) -> bytes:
    """Bytes from base64 without padding."""
    return base64.b64decode(text + '=' * (-len(text) % 4))


def matches_password(stored: str, password: bytes) -> bool:
    """Whether a line's hash is that of a password. Takes as long for a wrong one as for the right one."""
    match = SCRYPT_LINE.match(stored)
    if match:
        ln, r, p, salt, digest = match.groups()
        wanted = parse_base64(digest)
        found = run_scrypt(password, parse_base64(salt), int(ln), int(r), int(p), len(wanted))
    else:
        # 2a and 2b name the algorithm that 2y names; old versions of libcrypt know no 2b, and alter 2a.
        wanted = stored[4:].encode()
        found = (find_bcrypt()(password.partition(b'\0')[0], b'$2y$' + stored[4:29].encode()) or b'')[4:]
    # A NUL ends C's text, and fills up a short key of HMAC, which scrypt is made of: 'x' and 'x\0' would be the same.
    return hmac.compare_digest(found, wanted) and b'\0' not in password


def explain_hash(stored: str) -> str:
    """Why a hash cannot be checked here; '' if it can."""
    match = SCRYPT_LINE.match(stored)
    if match:
        ln, r, p = (int(text) for text in match.groups()[:3])
        if not (1 <= ln <= MOST_SCRYPT_LN and 1 <= r <= 16 and p >= 1) or any(len(text) % 4 == 1 for text in match.groups()[3:]):
            return 'its scrypt is malformed, or takes too much memory'
        if 2 ** ln * r * p > 8 * 2 ** (MOST_PASSWORD_COST + 3):
            return 'its scrypt takes too long'
        return '' if hasattr(hashlib, 'scrypt') else 'this Python has no scrypt (its OpenSSL is too old)'
    if not BCRYPT_LINE.match(stored):
        return 'its hash is neither bcrypt nor scrypt'
    if int(stored[4:6]) > MOST_PASSWORD_COST:
        return f'its bcrypt takes too long: a cost of at most {MOST_PASSWORD_COST} is possible'
    return '' if find_bcrypt() else "the system's libcrypt is missing or knows no bcrypt"


def check_user_name(name: str) -> None:
    """Refuse names that no password file can hold, or that are not a person's."""
    if not name or ':' in name or name[0] == '#' or name != name.strip() or len(name) > MAX_NAME_CHARACTERS or FORBIDDEN_IN_NAME.search(name) or UNSTORABLE.search(name):
        raise BadInput(f'{printable(name)!r} is no user name: it must not be empty, hold a colon, a control character or what is not UTF-8, '
                       'begin with # or have blanks around it')
    if name == ANONYMOUS:
        raise BadInput(f'{ANONYMOUS!r} cannot be a user: it is who asks without a name')


def parse_users(text: str, path: str) -> Dict[str, str]:
    """Text of a password file -> hashes by user. BadInput with every line that cannot be used, and the cure."""
    users, problems = {}, []    # type: Dict[str, str], List[Problem]
    for number, line in enumerate(text.splitlines(), 1):
        user, colon, stored = line.strip().partition(':')
        if not user.strip() or user.startswith('#'):
            continue
        cause = 'it is not USER:HASH' if not colon else 'the user stands in two lines' if user in users else explain_hash(stored)
        if cause:
            problems.append(Problem(f'user {printable(user)!r}: {cause}', number, 0, path))
        users[user] = stored
    cure = f'`torc.py htpasswd add -f {shlex.quote(path)} USER` sets a password'
    if problems:
        raise BadInput(f'{len(problems)} lines of {path} cannot be used; {cure} anew', problems)
    if not users:
        raise BadInput(f'{path} names no user; {cure}')
    for user in users:
        check_user_name(user)
    return users


def read_password_file(path: str) -> str:
    """Text of a password file that nobody but its owner can change. FileNotFoundError if there is none."""
    try:
        with open(path, encoding='utf-8-sig', opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
            found = os.fstat(file.fileno())
            if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o022 and not is_private_group(found) or not stat.S_ISREG(found.st_mode):
                raise Denied(f'other users may change {path}, and let themselves in: it must be a file of yours, '
                             f'`chmod go-w {shlex.quote(path)}`')
            return file.read()
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise BadInput(f'cannot read {path}: {getattr(error, "strerror", None) or error}') from None


def read_users(path: str) -> Dict[str, str]:
    """Hashes by user, from a password file."""
    try:
        return parse_users(read_password_file(path), path)
    except FileNotFoundError:
        raise BadInput(f'there is no password file {path}; `torc.py htpasswd add -f {shlex.quote(path)} USER` makes one') from None


class PasswordCheck(NamedTuple):
    """A password to be checked, or its verdict."""
    digest: bytes       # of user and password, by which those who wait for the verdict are found
    user: str
    stored: str         # the hash that it is compared with; a stranger's is somebody's, for it must take as long
    password: bytes
    is_right: bool = False


class Users:
    """The users of a password file, and one thread that checks their passwords.

    A right password is known for a while after its last use, so that clients who ask often wait for one check only,
    and a flood of wrong ones does not keep them out. Everything but work() runs in the server's thread.
    """

    def __init__(self, path: str, known_s: float) -> None:
        self.path = path
        self.known_s = known_s                      # 0: every request is checked
        self.hashes = read_users(path)              # by user
        self.key = secrets.token_bytes(32)          # of the digests: what is kept of passwords is worth nothing elsewhere
        self.known = collections.OrderedDict()      # type: collections.OrderedDict[bytes, float]  # digest -> when to forget it
        self.wake = lambda: None                    # type: Callable[[], Any]  # called in the thread after each check
        self.verdicts = collections.deque()         # type: collections.deque[PasswordCheck]
        self._queue = queue.Queue()                 # type: queue.Queue[Optional[PasswordCheck]]
        self._thread = None                         # type: Optional[threading.Thread]

    def reload(self) -> int:
        """Read the file again; how many users there are. If it cannot be used, everything stays."""
        self.hashes = read_users(self.path)
        self.known.clear()
        return len(self.hashes)

    def digest(self, user: str, password: bytes) -> bytes:
        """What stands for a user with a password."""
        return hmac.new(self.key, user.encode('utf-8', 'surrogateescape') + b':' + password, hashlib.sha256).digest()

    def knows(self, digest: bytes, now: float) -> bool:
        """Whether user and password were found right not long ago."""
        if self.known.get(digest, -math.inf) <= now:
            return False
        self.learn(digest, now)
        return True

    def learn(self, digest: bytes, now: float) -> None:
        """They are right; forget those that were not used for longest."""
        if self.known_s > 0:
            self.known[digest] = now + self.known_s
            self.known.move_to_end(digest)
            while len(self.known) > MAX_KNOWN_PASSWORDS or next(iter(self.known.values())) <= now:
                self.known.popitem(last=False)

    def begin(self, digest: bytes, user: str, password: bytes) -> None:
        """Have a password checked; its verdict comes later."""
        stored = self.hashes.get(user)
        if stored is None:      # like one of the users, always the same one
            place = int.from_bytes(self.digest(user, b''), 'big')
            stored = sorted(self.hashes.values())[place % len(self.hashes)]
        if self._thread is None:
            self._thread = threading.Thread(target=self.work, name='passwords', daemon=True)
            self._thread.start()
        self._queue.put(PasswordCheck(digest, user, stored, password))

    def work(self) -> None:
        """The thread: one check after the other, until None comes."""
        for check in iter(self._queue.get, None):
            try:
                is_right = matches_password(check.stored, check.password)
            except Exception:   # border: a check that fails is a wrong password, and the next one is made all the same
                log.exception('a password could not be checked')
                is_right = False
            self.verdicts.append(check._replace(is_right=is_right, password=b''))
            self.wake()

    def is_valid(self, verdict: PasswordCheck) -> bool:
        """Whether a verdict lets its user in: the password is right, and the file still says so."""
        return verdict.is_right and self.hashes.get(verdict.user) == verdict.stored

    def close(self) -> None:
        """End the thread, after what it is at."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(5.0)


# -------- streams of events --------

class Opening(NamedTuple):
    """The beginning of an answer that goes on as a stream."""
    head: bytes
    wanted: Optional[Subscription]      # None: the head is all
    request: Request                    # that it answers


class Feed:
    """The latest events on one subject, numbered, for all who read it. An id is EPOCH-NUMBER; no two feeds have one epoch."""

    def __init__(self, subject: Any) -> None:
        self.subject = subject
        self.epoch = secrets.token_hex(6)
        self.first = 1              # number of events[0]
        self.events = []            # type: List[Tuple[int, bytes]]  # severity as index in SEVERITIES, the event as it is sent
        self.size = 0               # of all their bytes
        self.pieces = {}            # type: Dict[Tuple[int, int], Tuple[int, bytes]]  # what piece() gave since the last add()
        self.readers = set()        # type: Set[Connection]
        self.left_at = math.inf     # when the last reader went away (monotonic)

    def end(self) -> int:
        """Number of the next event."""
        return self.first + len(self.events)

    def add(self, severity: int, event_type: str, data: Any) -> None:
        """Keep one more event."""
        self.pieces.clear()
        text = self.format(self.end(), event_type, data)
        self.events.append((severity, text))
        self.size += len(text)
        if len(self.events) >= MAX_FEED_EVENTS or self.size > MAX_FEED_BYTES:
            older = (len(self.events) + 1) // 2
            self.size -= sum(len(text) for _, text in self.events[:older])
            self.first += older
            del self.events[:older]

    def format(self, number: int, event_type: str, data: Any) -> bytes:
        """An event as it is sent. JSON has no line ends, so that one line of data will do."""
        return f'id: {self.epoch}-{number}\nevent: {event_type}\ndata: {format_json(data)}\n\n'.encode('utf-8', 'replace')

    def find(self, last_id: str) -> Tuple[int, bytes]:
        """Where a reader begins, and what it is told first: its place, and whether something was missed that nobody can count."""
        epoch, _, number = last_id.partition('-')
        if epoch == self.epoch and re.match(r'[0-9]{1,15}\Z', number) and int(number) < self.end():
            return int(number) + 1, b''
        if last_id:
            message = 'events were missed: the server was restarted, or too much time has passed'
            return self.end(), self.format(self.end() - 1, 'warning', {'dropped': None, 'message': message})
        return self.end(), f'id: {self.epoch}-{self.end() - 1}\n\n'.encode()     # no event, but a place to come back to

    def piece(self, number: int, least: int) -> Tuple[int, bytes]:
        """What to send to a reader whose next event has this number, and the number that is its next one then."""
        if (number, least) not in self.pieces:      # most readers are at the same place
            if len(self.pieces) > 16:
                self.pieces.clear()
            self.pieces[number, least] = self.cut_piece(number, least)
        return self.pieces[number, least]

    def cut_piece(self, number: int, least: int) -> Tuple[int, bytes]:
        """The same, without looking at what other readers got."""
        parts, size, stop = [], 0, max(number, self.first)
        if number < stop:
            parts.append(self.format(stop - 1, 'warning', {'dropped': stop - number}))
        while stop < self.end() and size < PIECE_BYTES:
            severity, text = self.events[stop - self.first]
            stop += 1
            if severity >= least:
                parts.append(text)
                size += len(text)
        return stop, b''.join(parts)


class Feeds:
    """The feeds that are read, or were a moment ago, by subject: ids of workflows, and API_SUBJECTS."""

    def __init__(self) -> None:
        self.by_subject = {}        # type: Dict[Any, Feed]
        self.idle = {}              # type: Dict[Any, Feed]  # those that nobody reads any more, in the order in which that began
        self.changed = set()        # type: Set[Feed]  # those with events that readers have not been sent

    def join(self, subject: Any, reader: 'Connection') -> Feed:
        """A feed, for one more reader."""
        feed = self.by_subject.get(subject)
        if feed is None:
            feed = self.by_subject[subject] = Feed(subject)
        self.idle.pop(subject, None)
        feed.readers.add(reader)
        return feed

    def leave(self, feed: Feed, reader: 'Connection') -> None:
        """A reader went away."""
        feed.readers.discard(reader)
        if not feed.readers:
            feed.left_at = time.monotonic()
            self.idle[feed.subject] = feed
        if len(self.idle) > MAX_IDLE_FEEDS:
            self.forget(next(iter(self.idle)))

    def forget(self, subject: Any) -> None:
        """Nobody has come back."""
        del self.idle[subject], self.by_subject[subject]

    def add(self, subject: Any, severity: int, event_type: str, data: Any) -> None:
        """Something happened. Nothing is kept if nobody reads of the subject."""
        feed = self.by_subject.get(subject)
        if feed is None:
            return
        if not feed.readers and time.monotonic() - feed.left_at > RESUME_S:
            return self.forget(subject)
        feed.add(severity, event_type, data)
        self.changed.add(feed)

    def add_news(self, news: Sequence[Union[News, int]]) -> None:
        """What a transaction announced."""
        for item in news:
            if not isinstance(item, int):
                value = {'workflow_id': item.workflow_id, 'timestamp': item.timestamp, 'event_type': item.event_type,
                         'severity': item.severity, 'data': item.data}
                self.add(item.workflow_id, SEVERITIES.index(item.severity), item.event_type, value)
        for workflow_id, count in collections.Counter(item for item in news if isinstance(item, int)).items():
            self.add(workflow_id, len(SEVERITIES), 'warning', {'dropped': count})


def show_body(body: bytes) -> Optional[str]:
    """The beginning of a body, for the stream of requests; None if there is none, or it is large."""
    return body[:SHOWN_BODY_BYTES].decode('utf-8', 'replace') if 0 < len(body) <= MAX_SHOWN_BODY_BYTES else None


# -------- TLS --------

def open_tls(certificate: str, key: str) -> Any:
    """What TLS connections are made from (an ssl.SSLContext): a certificate with its chain, and its key, as PEM files.

    TLS 1.2 or newer, with the ciphers that Python thinks safe. BadInput for files that do not fit.
    """
    ssl = load_ssl()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    if hasattr(context, 'minimum_version'):
        context.minimum_version = ssl.TLSVersion.TLSv1_2
    else:       # before Python 3.7
        context.options |= ssl.OP_NO_TLSv1 | ssl.OP_NO_TLSv1_1
    context.options |= getattr(ssl, 'OP_NO_RENEGOTIATION', 0)       # which costs a client nothing and us a signature
    context.options |= getattr(ssl, 'OP_IGNORE_UNEXPECTED_EOF', 0)  # a client that just hangs up is no error: HTTP tells lengths
    check_key_file(key or certificate)
    try:
        context.load_cert_chain(certificate, key or None, functools.partial(refuse_encrypted, key or certificate))
    except ssl.SSLError as error:
        if error.reason == 'KEY_VALUES_MISMATCH':
            raise BadInput(f'the key in {key} is not that of the certificate in {certificate}') from None
        raise BadInput(f'{certificate} and {key or "no --tls-key"} are not a certificate and its key in PEM form') from None
    except OSError as error:
        raise BadInput(f'cannot read {certificate} or {key}: {error.strerror}') from None
    return context


def check_key_file(path: str) -> None:
    """Refuse a private key that everybody can read. A group may: that is how certificates are shared between services."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise BadInput(f'cannot read {path}: {error.strerror}') from None
    if mode & 0o007:
        raise Denied(f'other users can read the key in {path}: `chmod o= {shlex.quote(path)}`; it may be known already')


def refuse_encrypted(path: str) -> str:
    """Called for the password of a key: nobody is there to type it."""
    raise BadInput(f'the key in {path} is encrypted: `openssl pkey -in {shlex.quote(path)}` writes it without a password')


def read_fingerprint(path: str) -> str:
    """SHA-256 of the first certificate in a PEM file that open_tls() has read."""
    with open(path, encoding='latin-1') as file:
        found = re.search(r'-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----', file.read(), re.DOTALL)
    return hashlib.sha256(load_ssl().PEM_cert_to_DER_cert(found.group())).hexdigest() if found else ''


# -------- the loop --------

def is_node_alive(hostname: str, pid: int, identity: str) -> bool:
    """Whether a runner may still live. `identity` is its BOOT_ID/START_TICKS. True when this host cannot know."""
    boot_id, _, start_ticks = identity.partition('/')
    if not start_ticks.isdigit():
        return True
    runner = {'host': hostname, 'boot_id': boot_id, 'pid': pid, 'start_ticks': int(start_ticks)}
    return process_lives(runner) is not False


def tend(store: Store) -> bool:
    """What the server does by itself: the tasks that wait, and a look for lost nodes. True while there are nodes to watch."""
    run_tasks(store)
    return watch_nodes(store)


def watch_nodes(store: Store) -> bool:
    """Take the jobs of lost nodes back. True while there are nodes to watch."""
    release_lost_nodes(store, is_node_alive)
    return store.one('SELECT 1 FROM compute_node WHERE is_active = 1') is not None


class Attempt:
    """A password that is being checked, or was found wrong a moment ago, and the clients that have shown it."""

    def __init__(self, digest: bytes, user: str, now: float) -> None:
        self.digest = digest        # of user and password
        self.user = user
        self.ends_at = now + WRONG_PASSWORD_S   # if it is wrong, this is told then (monotonic)
        self.is_wrong = False
        self.clients = set()        # type: Set[Connection]


class Connection:
    """One client: its socket, what was read and not yet used, and what is still to be sent."""

    def __init__(self, client: socket.socket, step: Callable[['Connection'], Any]) -> None:
        self.socket = client
        self.step = step            # what to do when it can be read
        self.is_tls = False         # the socket is TLS's
        self.is_stranger = True     # no request was let in yet
        self.received = bytearray()
        self.head = None            # type: Optional[Head]  # of the request whose body is coming
        self.unsent = memoryview(b'')
        self.deadline = math.inf    # when to give the client up (monotonic); inf while nothing is under way
        self.mask = selectors.EVENT_READ
        self.caller = None          # type: Optional[Caller]  # of that request
        self.attempt = None         # type: Optional[Attempt]  # ... whose password is being checked, or was wrong
        self.is_queued = False      # a complete request waits for its turn: nothing more is read
        self.is_last = False        # close when everything is sent
        self.is_draining = False    # all is said; read on until the client has closed too
        self.asked_at = 0.0         # when the last request was complete (monotonic)
        self.feed = None            # type: Optional[Feed]  # that it reads, when its answer is a stream
        self.next_event = 0         # ... its place there
        self.least = 0              # ... and the least severity that it wants
        self.request = None         # type: Optional[Request]  # ... what it asked, to see now and then whether it still may
        self.stored = b''           # ... and the hash of its user's password then


class Admission(NamedTuple):
    """Whom a server lets in."""
    token: str = ''                         # the owner's; '': everybody may ask
    names: Iterable[str] = LOOPBACK_NAMES   # that Host may say
    users: Optional[Users] = None           # who may ask with a password, beside the owner
    lets_anonymous: bool = False            # ... and whoever shows neither token nor password


class Server:
    """Answers HTTP on a listening socket, with the verbs on a store. See the section's preface."""

    def __init__(self, store: Store, listener: socket.socket, admission: Admission = Admission(), lease: Optional[Lease] = None,
                 is_embedded: bool = False, tick: Callable[[Store], bool] = tend, tls: Any = None) -> None:
        self.store = store
        self.listener = listener
        self.token = admission.token.encode()
        self.names = {name.lower() for name in admission.names}
        self.users = admission.users
        self.lets_anonymous = admission.lets_anonymous
        self.owner = Caller(user_name(), True) if self.token else Caller(ANONYMOUS, False)    # who asks with the token, or where there is none
        self.lease = lease
        self.tick = tick                        # called now and then inside a transaction; true: call again soon
        self.attempts = {}                      # type: Dict[bytes, Attempt]  # by digest
        self.refusals = 0                       # requests without the right token or password, not yet told
        self.refusals_told_at = -math.inf
        self.feeds = Feeds()                    # what is told to open streams
        self.traffic = store.traffic = Traffic(store.now)
        store.watched = self.feeds.by_subject
        self.keep_alive_at = math.inf           # when streams get their next sign of life
        self.tls = tls                          # an ssl.SSLContext, or None
        self.wants_read = () if tls is None else (load_ssl().SSLWantReadError,)     # what TLS raises to wait for the client
        self.wants_write = () if tls is None else (load_ssl().SSLWantWriteError,)
        self.connections = set()                # type: Set[Connection]
        self.strangers = {}                     # type: Dict[Connection, None]  # of them; the oldest first
        self.timed = set()                      # type: Set[Connection]  # those that have a deadline, or had one
        self.sweep_at = math.inf                # when the first of them is due
        self.complete = []                      # type: List[Tuple[Connection, Request]]  # for this turn or the next
        self.is_leaving = False
        self.is_embedded = is_embedded
        self.leave_at = time.monotonic() + EMBEDDED_FIRST_S if is_embedded else math.inf
        self.tick_at = time.monotonic()
        self.accept_at = math.inf               # when to listen again, after descriptors ran out
        self.reserve = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]    # given up to refuse a client when they do
        self.signal_calls = {}                  # type: Dict[int, Callable[[], Any]]  # further signals, and what they mean
        self.wake_reader, self.wake_writer = socket.socketpair()
        self.selector = selectors.DefaultSelector()
        for sock in (listener, self.wake_reader, self.wake_writer):
            sock.setblocking(False)
        store.knows_users = self.users is not None
        if self.users is not None:
            store.reload_users = self.users.reload
            self.users.wake = self.wake
        self.selector.register(self.wake_reader, selectors.EVENT_READ, self.on_wake)
        self.selector.register(listener, selectors.EVENT_READ, self.on_accept)

    def serve_forever(self) -> None:
        """Answer until stop(), a signal under signals(), or, embedded, until the last client has left."""
        while not self.is_leaving:
            self.turn()
        if self.accept_at == math.inf:
            self.selector.unregister(self.listener)
        deadline = time.monotonic() + DRAIN_S
        while any(connection.unsent and connection.feed is None for connection in self.connections) and time.monotonic() < deadline:
            for key, mask in self.selector.select(0.1):
                if mask & selectors.EVENT_WRITE:
                    key.data(mask)

    def stop(self) -> None:
        """End serve_forever() soon. May be called from any thread."""
        self.wake_writer.send(b'\0')

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """While the block runs, SIGTERM, SIGINT and SIGHUP stop the server. In the main thread only."""
        before = signal.set_wakeup_fd(self.wake_writer.fileno())
        numbers = [number for number in STOP_NUMBERS if number and signal.getsignal(number) != signal.SIG_IGN]
        numbers += self.signal_calls
        # handlers do nothing: it is the wakeup descriptor that tells
        handlers = [(number, signal.signal(number, lambda *_: None)) for number in numbers]
        handlers.append((signal.SIGPIPE, signal.signal(signal.SIGPIPE, signal.SIG_IGN)))
        try:
            yield
        finally:
            for number, handler in handlers:
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)

    def close(self) -> None:
        """Close all sockets. The store is the caller's."""
        if self.users is not None:
            self.users.close()
        for connection in list(self.connections):
            self.drop(connection)
        self.selector.close()
        for descriptor in self.reserve:
            os.close(descriptor)
        for sock in (self.listener, self.wake_reader, self.wake_writer):
            sock.close()

    def turn(self) -> None:
        """Wait for something, read it, answer what is complete."""
        ready = self.selector.select(self.wait_s())
        self.traffic.begin_turn()
        for key, mask in ready:
            key.data(mask)
        if self.complete:
            self.store.check_in_place()
            self.answer_complete()
        self.on_clock(time.monotonic())
        if self.store.news or self.feeds.changed:
            self.publish()

    def wait_s(self) -> Optional[float]:
        """How long nothing needs to be done; None: for ever."""
        if self.complete:
            return 0.0
        now = time.monotonic()
        times = [self.leave_at, self.tick_at, self.accept_at, self.sweep_at, self.keep_alive_at]
        if self.store.snapshots is not None:
            times.append(self.store.snapshots.next_at())
        if self.lease is not None:
            times.append(now + Lease.PERIOD_S / 2)
        first = min(times)
        return None if first == math.inf else max(0.0, first - now)

    def on_wake(self, mask: int) -> None:
        """A signal came, or stop() was called."""
        for number in set(self.wake_reader.recv(4096)):
            if number in self.signal_calls:
                self.signal_calls[number]()
            elif number in STOP_NUMBERS:    # others are those of a program that runs us inside
                log.info('ending: %s', signal.Signals(number).name if number else 'asked to')
                self.is_leaving = True
        while self.users is not None and self.users.verdicts:
            self.on_verdict(self.users.verdicts.popleft())

    def wake(self) -> None:
        """Called in the threads that check passwords and write snapshots, when they have done so."""
        with contextlib.suppress(OSError):      # full: the loop is about to wake anyway; closed: nobody waits any more
            self.wake_writer.send(WAKE)

    def end_with_input(self, descriptor: int) -> None:
        """Stop when a descriptor comes to its end: who started us holds the other side, and has gone."""
        try:
            self.selector.register(descriptor, selectors.EVENT_READ, functools.partial(self.on_input, descriptor))
        except OSError:     # a file, or /dev/null: it is never waited for (epoll_ctl(2), EPERM), and ends at once
            self.is_leaving = True

    def on_input(self, descriptor: int, mask: int) -> None:
        """Something was written to us, which says nothing, or the writer has gone."""
        if not os.read(descriptor, RECEIVE_BYTES):
            log.info('ending: the input has ended')
            self.selector.unregister(descriptor)
            self.is_leaving = True

    def on_accept(self, mask: int) -> None:
        """Take the clients that knock."""
        for _ in range(BACKLOG):
            try:
                client, _ = self.listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                return self.on_exhaustion(error)
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(client, self.on_readable if self.tls is None else self.on_hello)
            self.connections.add(connection)
            self.selector.register(client, selectors.EVENT_READ, functools.partial(self.on_ready, connection))
            self.leave_at = math.inf
            self.strangers[connection] = None
            self.set_deadline(connection, CLIENT_DEADLINE_S)
            if len(self.strangers) > MAX_STRANGERS:
                self.drop_oldest_stranger()

    def drop_oldest_stranger(self) -> None:
        """Make room: who has long been here without a request that was let in may come again."""
        for connection in self.strangers:
            return self.drop(connection)

    def on_exhaustion(self, error: OSError) -> None:
        """No descriptors left: refuse one client with the one in reserve, then let the others knock for a while."""
        log.error('cannot take another client: %s', error.strerror)
        self.drop_oldest_stranger()
        try:
            while self.reserve:
                os.close(self.reserve.pop())
            self.listener.accept()[0].close()
            self.reserve.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            pass    # it has gone, or there is no descriptor even so
        self.selector.unregister(self.listener)     # it stays readable: the loop would spin
        self.accept_at = time.monotonic() + 0.1

    def on_ready(self, connection: Connection, mask: int) -> None:
        """A client sent something, went away, or can take more of its answer."""
        self.attempt(connection, self.on_writable if connection.unsent else connection.step)

    def attempt(self, connection: Connection, step: Callable[..., Any], *arguments: Any) -> None:
        """Do something with a client, whose trouble is its own."""
        try:
            step(connection, *arguments)
        except BlockingIOError:
            pass    # woken for nothing, which select(2) allows
        except self.wants_read:
            self.watch(connection, selectors.EVENT_READ)
        except self.wants_write:
            self.watch(connection, selectors.EVENT_WRITE)
        except OSError:
            self.drop(connection)
        except Exception:   # border: a bug costs one connection, not the server
            log.exception('a bug in torc.py: one client was cut off')
            self.drop(connection)

    def on_hello(self, connection: Connection) -> None:
        """A client's first byte shows whether it speaks TLS; a plain request gets an answer that its sender can read."""
        first = connection.socket.recv(1, socket.MSG_PEEK)
        connection.step = self.on_readable
        if not first:
            self.drop(connection)
        elif first.isalpha():
            self.refuse(connection, BadInput('this port speaks TLS: write https:// in the address', http=400))
        else:
            connection.socket = self.tls.wrap_socket(connection.socket, server_side=True, do_handshake_on_connect=False)
            connection.is_tls = True
            connection.step = self.on_handshake
            self.on_handshake(connection)

    def on_handshake(self, connection: Connection) -> None:
        """Go on with a TLS handshake; when it is done, the first request may be here already."""
        connection.socket.do_handshake()
        connection.step = self.on_readable
        self.watch(connection, selectors.EVENT_READ)
        self.on_readable(connection)

    def on_readable(self, connection: Connection) -> None:
        """Read what a client sent."""
        if connection.is_queued:
            return
        data = connection.socket.recv(RECEIVE_BYTES)
        if connection.is_tls:
            self.watch(connection, selectors.EVENT_READ)
            while connection.socket.pending():      # the selector does not see it
                data += connection.socket.recv(RECEIVE_BYTES)
        self.traffic.row[2] += len(data)
        if not data:
            self.drop(connection)
        elif not connection.is_draining and connection.feed is None:
            connection.received += data
            self.look(connection)

    def look(self, connection: Connection) -> None:
        """See whether a client's request is complete, and whether it may be asked at all."""
        try:
            request = self.take_request(connection)
        except TorcError as error:
            return self.refuse(connection, error)
        if request is not None:
            connection.deadline = math.inf
            connection.asked_at = time.monotonic()
            if connection.is_stranger and request.head.path != '/healthz':
                connection.is_stranger = False
                del self.strangers[connection]
            connection.is_queued = True
            self.complete.append((connection, request))
        elif connection.deadline == math.inf and connection.received:
            self.set_deadline(connection, CLIENT_DEADLINE_S)

    def take_request(self, connection: Connection) -> Optional[Request]:
        """Cut the next complete request from what was read; None if there is none yet."""
        head = connection.head
        if head is None:
            head = connection.head = self.take_head(connection.received)
            if head is None or not self.identify(connection, head):
                return None
            self.await_body(connection, head)
        if len(connection.received) < head.length:
            return None
        with memoryview(connection.received) as view:
            body = bytes(view[:head.length])
        del connection.received[:head.length]
        connection.head = None
        return Request(head, body, connection.caller)

    def await_body(self, connection: Connection, head: Head) -> None:
        """If the body is still to come, ask for it, and give it its time."""
        if len(connection.received) < head.length:
            if 'expect' in head.fields:
                self.send(connection, b'HTTP/1.1 100 Continue\r\n\r\n')
            self.set_deadline(connection, CLIENT_DEADLINE_S + head.length / SLOWEST_BYTES_PER_S)

    def identify(self, connection: Connection, head: Head) -> bool:
        """See who asks. False if that is not known before a password has been checked."""
        connection.caller = self.owner
        if self.users is None or head.path == '/healthz':
            return True
        authorization = head.fields.get('authorization', '')
        if self.token and hmac.compare_digest(self.token, offered_token(authorization)):
            return True
        connection.caller = Caller(ANONYMOUS, False)
        if self.lets_anonymous and not authorization:
            return True
        user, password = offered_password(authorization)
        if not user:
            raise Denied('log in: send a user and a password (Basic), or the token of the server', http=401)
        connection.caller = Caller(user, False)
        digest = self.users.digest(user, password)
        if self.users.knows(digest, time.monotonic()):
            return True
        self.park(connection, digest, user, password)
        return False

    def park(self, connection: Connection, digest: bytes, user: str, password: bytes) -> None:
        """Have a password checked, and leave the client alone meanwhile. All that show the same wait for one check."""
        attempt = self.attempts.get(digest)
        if attempt is None:
            if len(self.attempts) >= MAX_ATTEMPTS or sum(other.user == user for other in self.attempts.values()) >= MAX_ATTEMPTS_OF_USER:
                raise Denied('too many passwords are being checked: try again in a moment', http=429)
            attempt = self.attempts[digest] = Attempt(digest, user, time.monotonic())
            self.users.begin(digest, user, password)
        attempt.clients.add(connection)
        connection.attempt = attempt
        self.set_deadline(connection, CLIENT_DEADLINE_S)
        self.watch(connection, 0)
        if attempt.is_wrong:
            self.refuse_late(connection)

    def refuse_late(self, connection: Connection) -> None:
        """Let on_deadline() say that the password was wrong, when its time has come."""
        self.set_deadline(connection, max(0.0, connection.attempt.ends_at - time.monotonic()))

    def on_verdict(self, verdict: PasswordCheck) -> None:
        """A password has been checked: let in who has shown it, or see that the refusal comes late."""
        attempt = self.attempts[verdict.digest]
        attempt.is_wrong = not self.users.is_valid(verdict)
        if not attempt.is_wrong:
            self.users.learn(verdict.digest, time.monotonic())
        for connection in list(attempt.clients):
            self.attempt(connection, self.refuse_late if attempt.is_wrong else self.on_known)
        if not attempt.clients:
            del self.attempts[verdict.digest]

    def on_known(self, connection: Connection) -> None:
        """A parked client is who it says: go on with its request."""
        connection.attempt.clients.discard(connection)
        connection.attempt = None
        connection.deadline = math.inf
        self.watch(connection, selectors.EVENT_READ)
        self.await_body(connection, connection.head)
        self.look(connection)

    def leave_attempt(self, connection: Connection) -> None:
        """A client no longer waits for what comes of its password."""
        attempt, connection.attempt = connection.attempt, None
        if attempt is not None:
            attempt.clients.discard(connection)
            if attempt.is_wrong and not attempt.clients:
                del self.attempts[attempt.digest]

    def take_head(self, received: bytearray) -> Optional[Head]:
        """Cut the next complete head, and judge it."""
        if received[:2] == b'\r\n':     # left over from a sloppy client's last request (RFC 9112, 2.2)
            del received[:2]
        if not received or received == b'\r':
            return None
        end = received.find(b'\r\n\r\n')
        check_head_size(received, end)
        if end < 0:
            return None
        head = parse_head(bytes(received[:end]))
        scheme = 'http' if self.tls is None else 'https'
        if self.users is None:
            check_access(head, self.token, self.names, scheme)
        else:
            check_sender(head, self.names, scheme)      # who it is comes next, in identify()
        if head.fields.get('expect', '100-continue').lower() != '100-continue':
            raise BadInput('this expectation cannot be met', http=417)
        limit = body_limit(head.path)
        if head.length > limit:
            raise BadInput(f'the body has {head.length} bytes; {limit} are allowed here', http=413)
        del received[:end + 4]
        return head

    def refuse(self, connection: Connection, error: TorcError) -> None:
        """Answer a request that is not even read, and hang up."""
        log.debug('refused with %d: %s', error.http, error.message)
        connection.is_last = True
        self.leave_attempt(connection)
        fields = {401: 'www-authenticate: Basic realm="torc.py"\r\n', 429: 'retry-after: 1\r\n'}.get(error.http, '')
        self.refusals += error.http in (401, 429)
        if self.refusals and time.monotonic() >= self.refusals_told_at + REFUSALS_TOLD_S:
            log.warning('%d requests without the right token or password', self.refusals)
            self.refusals, self.refusals_told_at = 0, time.monotonic()
        answer = format_refusal(error, 'connection: close\r\n' + fields)
        self.traffic.add_answer(answer)
        self.deliver(connection, answer)

    def answer_complete(self) -> None:
        """Run this turn's requests, and when all that they did is on disk, send the answers."""
        batch, self.complete = self.complete, []
        self.tick_at = min(self.tick_at, time.monotonic() + TICK_S)
        answers = self.answer_all([request for _, request in batch])
        for (connection, request), answer in zip(batch, answers):
            connection.is_queued = False
            connection.is_last = not request.head.keeps_alive
            self.note_request(connection, request, answer)
            self.attempt(connection, self.open_stream if isinstance(answer, Opening) else self.deliver, answer)

    def deliver(self, connection: Connection, answer: bytes) -> None:
        """Send an answer, and go on with what the client has sent meanwhile."""
        self.send(connection, answer)
        self.on_sent(connection)

    def answer_all(self, requests: List[Request]) -> List[Union[bytes, Opening]]:
        """Answers to requests that share one transaction. If they cannot, each is tried alone."""
        if self.lease is not None:
            self.lease.renew()
        if len(requests) > 1 and any(ADMIN_SQL_PATH in request.head.path for request in requests):
            return [answer for request in requests for answer in self.answer_all([request])]
        is_reading = all(request.head.method in ('GET', 'HEAD') for request in requests)
        try:
            with self.store.reading() if is_reading else self.store.transaction():
                return [self.answer(request) for request in requests]
        except (sqlite3.Error, TorcError) as error:
            log.error('%d requests could not be carried out: %s', len(requests), error)
            reason = error
        if len(requests) == 1:
            failure = Unreachable(f'the database could not be written ({reason}); nothing was changed')
            return [format_refusal(failure, 'retry-after: 1\r\n')]
        return [answer for request in requests for answer in self.answer_all([request])]

    def answer(self, request: Request) -> Union[bytes, Opening]:
        """Run one request inside the turn's transaction."""
        head = request.head
        status, value = self.ask_verb(head, request.body, request.caller)
        if status == 202:
            self.tick_at = 0.0      # a task waits: it is the next thing, once this turn's answers are sent
        if status == 503:   # the disk is full, say: SQLite may have ended the transaction under us
            raise Unreachable(value['error']['message'])
        if isinstance(value, Subscription):
            return self.answer_stream(request, value)
        try:
            body = b'' if value is None else format_json(value).encode()
        except ValueError:      # infinite, or half of a surrogate pair: no verb should let it in
            log.exception('%s %s: a bug in torc.py: its answer cannot be sent', head.method, head.path)
            status, body = 500, b'{"error":{"error":"InternalServerError","message":"a bug in torc.py"}}'
        log.debug('%s %s %d', head.method, head.path, status)
        fields = '' if head.keeps_alive else 'connection: close\r\n'
        if head.keeps_alive and 'connection' in head.fields:
            fields = 'connection: keep-alive\r\n'      # HTTP/1.0 wants to be told
        if SPAN_ID.match(head.fields.get('x-span-id', '')):
            fields += f'x-span-id: {head.fields["x-span-id"]}\r\n'
        answer = format_answer(status, body, fields)
        return answer[:len(answer) - len(body)] if head.method == 'HEAD' else answer

    def ask_verb(self, head: Head, body: bytes, caller: Caller) -> Tuple[int, Any]:
        """Status and value for one request."""
        method = 'GET' if head.method == 'HEAD' else head.method
        if head.path != '/healthz' or method != 'GET':
            return answer_request(self.store, method, head.path, head.query, body, *caller)
        name, _, challenge = head.query.partition('=')
        if name != 'challenge':
            return 200, {'status': 'ok'}
        return 200, {'status': 'ok', 'proof': prove_token(self.token, challenge, self.listener.getsockname()[1])}

    # ---- streams ----

    def answer_stream(self, request: Request, wanted: Subscription) -> Opening:
        """The head of a stream. Its end is that of the connection: HTTP/1.0 knows no other way, and none is simpler."""
        text = f'HTTP/1.1 200 OK\r\n{ANSWER_FIELDS}content-type: text/event-stream\r\nconnection: close\r\n\r\n'.encode()
        return Opening(text, None if request.head.method == 'HEAD' else wanted, request)

    def open_stream(self, connection: Connection, opening: Opening) -> None:
        """Begin to answer with a stream."""
        if opening.wanted is None:
            connection.is_last = True
            return self.deliver(connection, opening.head)
        connection.received.clear()
        connection.feed = self.feeds.join(opening.wanted.subject, connection)
        connection.least = opening.wanted.least
        connection.request, connection.stored = opening.request, self.stored_hash(opening.request)
        connection.next_event, first = connection.feed.find(opening.request.head.fields.get('last-event-id', ''))
        self.keep_alive_at = min(self.keep_alive_at, time.monotonic() + KEEP_ALIVE_S)
        self.deliver(connection, opening.head + first)

    def pump(self, connection: Connection) -> None:
        """Send a reader what it has not had yet, as soon as it has taken what it was sent before."""
        while connection.feed is not None and not connection.unsent:
            if connection.next_event >= connection.feed.end():
                return
            connection.next_event, data = connection.feed.piece(connection.next_event, connection.least)
            if data:
                self.send(connection, data)

    def publish(self) -> None:
        """Send the readers of streams what has been committed since the last time."""
        self.feeds.add_news(self.store.take_news())
        while self.feeds.changed:
            for connection in list(self.feeds.changed.pop().readers):
                self.attempt(connection, self.pump)

    def keep_alive(self, now: float) -> None:
        """Give all readers a sign of life, which also tells us who is gone."""
        readers = [connection for feed in self.feeds.by_subject.values() for connection in feed.readers]
        self.keep_alive_at = now + KEEP_ALIVE_S if readers else math.inf
        for connection in readers:
            if not self.may_read_on(connection):
                self.drop(connection)
            elif not connection.unsent:
                self.attempt(connection, self.send, b':\n\n')

    def may_read_on(self, connection: Connection) -> bool:
        """Whether the reader of a stream would be let in again: its workflow may be gone by now, or its access, or its password."""
        request = connection.request
        if not hmac.compare_digest(self.stored_hash(request), connection.stored):
            return False
        with self.store.reading():
            return isinstance(self.ask_verb(request.head, b'', request.caller)[1], Subscription)

    def stored_hash(self, request: Request) -> bytes:
        """What the password file holds for who asks; nothing if the token lets him in, or nothing has to."""
        return b'' if self.users is None or request.caller.is_owner else self.users.hashes.get(request.caller.name, '').encode()

    def note_request(self, connection: Connection, request: Request, answer: Union[bytes, Opening]) -> None:
        """Count a request, and tell those who watch them. What proves who asks stands in header fields, which are never told."""
        data = answer.head if isinstance(answer, Opening) else answer
        self.traffic.add_answer(data)
        for subject in API_SUBJECTS if self.feeds.by_subject else ():
            if subject in self.feeds.by_subject:
                event = {'timestamp_ms': int(self.store.now() * 1000), 'method': request.head.method, 'path': request.head.path,
                         'query': request.head.query or None, 'status': int(data[9:12]),
                         'latency_ms': round((time.monotonic() - connection.asked_at) * 1000, 3),
                         'request_id': request.head.fields.get('x-span-id'), 'user': request.caller.name}
                if subject == API_SUBJECTS[True]:
                    event.update(request_body=show_body(request.body), response_body=show_body(data.partition(b'\r\n\r\n')[2]))
                self.feeds.add(subject, 0, 'api', {key: value for key, value in event.items() if value is not None})

    # ---- sending ----

    def send(self, connection: Connection, data: bytes) -> None:
        """Send now what the client takes now, and the rest when it takes more."""
        connection.unsent = memoryview(bytes(connection.unsent) + data if connection.unsent else data)
        self.flush(connection)

    def flush(self, connection: Connection) -> None:
        """Send more of what is unsent. A client that takes nothing for a while is given up."""
        mask = selectors.EVENT_WRITE
        try:
            count = connection.socket.send(connection.unsent[:SEND_BYTES])
            connection.unsent = connection.unsent[count:]
            self.traffic.row[3] += count
        except (BlockingIOError,) + self.wants_write:
            pass    # nothing fits now
        except self.wants_read:
            mask = selectors.EVENT_READ
        if connection.unsent:
            self.set_deadline(connection, CLIENT_DEADLINE_S)
            self.watch(connection, mask)
        else:
            connection.deadline = math.inf
            if connection.is_stranger:
                self.set_deadline(connection, CLIENT_DEADLINE_S)
            self.watch(connection, selectors.EVENT_READ)

    def on_writable(self, connection: Connection) -> None:
        """A client takes more."""
        self.flush(connection)
        self.on_sent(connection)

    def watch(self, connection: Connection, mask: int) -> None:
        """Wait for the client to send, or to receive, or (0) for neither: never both, which bounds what it can make us hold."""
        if connection.mask == mask:
            return
        if connection.mask and mask:
            self.selector.modify(connection.socket, mask, functools.partial(self.on_ready, connection))
        elif mask:
            self.selector.register(connection.socket, mask, functools.partial(self.on_ready, connection))
        else:
            self.selector.unregister(connection.socket)
        connection.mask = mask

    def on_sent(self, connection: Connection) -> None:
        """An answer may be sent as a whole: hang up, or look for the next request."""
        if connection.feed is not None:
            return self.pump(connection)
        if connection.unsent:
            return
        if not connection.is_last:
            if connection.received or connection.head:
                self.look(connection)
            return
        connection.is_draining = True
        self.set_deadline(connection, DRAIN_S)
        self.end_tls(connection)
        connection.socket.shutdown(socket.SHUT_WR)

    def end_tls(self, connection: Connection) -> None:
        """Say in TLS that nothing more comes, so that the client knows it from a cut (close_notify, RFC 8446, 6.1)."""
        if connection.is_tls:
            connection.is_tls = False
            with contextlib.suppress(OSError, ValueError):      # it has not said so itself; or it is gone
                connection.socket.unwrap()

    def set_deadline(self, connection: Connection, wait_s: float) -> None:
        """Give the client so long for what it is at."""
        connection.deadline = time.monotonic() + wait_s
        self.timed.add(connection)
        self.sweep_at = min(self.sweep_at, connection.deadline)

    def drop(self, connection: Connection) -> None:
        """Forget a client."""
        if connection not in self.connections:
            return
        self.connections.discard(connection)
        self.timed.discard(connection)
        if connection.feed is not None:
            self.feeds.leave(connection.feed, connection)
        self.strangers.pop(connection, None)
        self.leave_attempt(connection)
        self.watch(connection, 0)
        self.end_tls(connection)
        connection.socket.close()
        if self.is_embedded and not self.connections:
            self.leave_at = time.monotonic() + EMBEDDED_GRACE_S

    def on_clock(self, now: float) -> None:
        """Do what is due."""
        if self.sweep_at <= now:
            self.sweep(now)
        if self.accept_at <= now:
            self.accept_at = math.inf
            self.selector.register(self.listener, selectors.EVENT_READ, self.on_accept)
        if self.tick_at <= now:
            self.on_tick(now)
        if self.keep_alive_at <= now:
            self.keep_alive(now)
        if self.lease is not None:
            self.lease.renew()
        if self.store.snapshots is not None:
            self.store.snapshots.act(now)
        if self.leave_at <= now:
            self.on_accept(0)       # the last look: who knocked meanwhile is let in
            self.is_leaving = self.leave_at <= now

    def sweep(self, now: float) -> None:
        """See whose time is over."""
        for connection in [connection for connection in self.timed if connection.deadline <= now]:
            self.on_deadline(connection)
        self.timed = {connection for connection in self.timed if connection.deadline < math.inf}
        self.sweep_at = min((connection.deadline for connection in self.timed), default=math.inf)

    def on_deadline(self, connection: Connection) -> None:
        """A client took too long."""
        is_silent = not connection.received and connection.head is None
        if connection.unsent or connection.is_draining or is_silent:
            self.drop(connection)
        else:
            connection.deadline = math.inf
            is_wrong = connection.attempt is not None and connection.attempt.is_wrong
            self.attempt(connection, self.refuse, Denied('user or password is wrong', http=401) if is_wrong else
                         BadInput('the request did not arrive within its time', http=408))

    def on_tick(self, now: float) -> None:
        """Let the service look at its clock."""
        try:
            with self.store.transaction():
                goes_on = self.tick(self.store)
        except Exception:  # border: one look at the clock; the server goes on, and looks again
            log.exception('the look for lost nodes failed')
            goes_on = True
        self.tick_at = now + TICK_S if goes_on else math.inf    # the next request sets it again


# -------- serving a database --------

class ServerOptions(NamedTuple):
    """How a database is served. Paths are absolute: a detached server lives in another directory."""
    database: str                   # or IN_MEMORY
    host: str = '127.0.0.1'
    port: int = DEFAULT_PORT        # 0: any free one
    needs_token: bool = True
    new_token: bool = False
    takes_over: bool = False        # the lease of a server that is gone for certain
    is_embedded: bool = False
    allows_sql: bool = True         # of administrators
    allows_sql_writes: bool = True
    tls_certificate: str = ''       # a PEM file; '': plain HTTP
    tls_key: str = ''               # another one; '': the key is in the certificate's
    ends_with_input: bool = False   # stop when stdin ends
    pid_file: str = ''              # '': none
    snapshot: str = ''              # where SIGUSR1 puts a copy of the database
    snapshots_kept: int = SNAPSHOTS_KEPT
    snapshot_interval_s: Optional[float] = None     # of the database, which is in memory then
    auth_file: str = ''             # of passwords; beside it needs_token says whether the anonymous stay out
    known_s: float = DEFAULT_KNOWN_S    # a right password needs no other check for so long after its last use
    enforces_access: bool = False
    administrators: Sequence[str] = ()

    @property
    def has_token(self) -> bool:
        """Whether there is a token for the owner."""
        return self.needs_token or bool(self.auth_file)


def serve_database(options: ServerOptions, announce: Callable[[str], Any]) -> None:
    """Serve a database until a signal. `announce` gets lines for stdout, the first as soon as the server answers."""
    raise_descriptor_limit()
    users = Users(options.auth_file, options.known_s) if options.auth_file else None
    tls = open_tls(options.tls_certificate, options.tls_key) if options.tls_certificate else None
    with contextlib.ExitStack() as stack:
        if options.database == IN_MEMORY:
            options = options._replace(database=stack.enter_context(memory_database()))
        store, lease = hold_served_database(stack, options, announce)
        store.allows_sql, store.allows_sql_writes = options.allows_sql, options.allows_sql_writes
        listener = open_listener(options.host, options.port, options.needs_token)
        stack.callback(listener.close)
        token = keep_token(options.database + '.token', options.new_token) if options.has_token else ''
        host, port = listener.getsockname()[:2]
        candidates = list_candidates(host, options.host)
        names = {*LOOPBACK_NAMES, *candidates, socket.gethostname()}
        with store.transaction():
            set_administrators(store, options.administrators)
        store.enforces_access = options.enforces_access
        admission = Admission(token, names, users, lets_anonymous=not options.needs_token)
        server = Server(store, listener, admission, lease, options.is_embedded, tls=tls)
        stack.callback(server.close)
        if store.snapshots is not None:
            store.snapshots.wake = server.wake
            server.signal_calls[signal.SIGUSR1] = store.snapshots.ask
        elif options.snapshot:
            server.signal_calls[signal.SIGUSR1] = functools.partial(keep_snapshot, store, options, announce)
        stack.enter_context(server.signals())
        scheme = 'http' if tls is None else 'https'
        urls = [f'{scheme}://{f"[{name}]" if ":" in name else name}:{port}{API_PREFIX}' for name in candidates]
        stack.enter_context(connection_file(options, urls))
        if options.pid_file:
            stack.enter_context(pid_file(options.pid_file))
        log.info('serving %s at %s, for %s', options.database, ' '.join(urls),
                 'this machine only' if is_loopback(host) else 'everybody who reaches this machine and has a token or password')
        announce(f'torc: serving {urls[0]}\nTORC_SERVER_PORT={port}\n')
        if options.ends_with_input:
            server.end_with_input(0)
        server.serve_forever()
        log.info('no longer serving %s', options.database)


def hold_served_database(stack: contextlib.ExitStack, options: ServerOptions,
                         announce: Callable[[str], Any]) -> Tuple[Store, Optional[Lease]]:
    """The database to serve, until the stack ends."""
    wait_s = 0.0 if options.is_embedded else 3 * Lease.PERIOD_S + 1
    in_memory = options.snapshot_interval_s is not None
    store, lease = hold_database(options.database, options.takes_over, wait_s, in_memory)
    if lease is not None:
        stack.callback(lease.release)
    if in_memory:
        stack.callback(remove_memory_directory, store)
    stack.callback(store.close)
    if in_memory:
        store.snapshots = SnapshotWriter(store, options.snapshot_interval_s, announce)
        stack.callback(store.snapshots.close)
    return store, lease


def raise_descriptor_limit() -> None:
    """As many clients as the system allows this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            pass    # macOS names a limit that it then refuses; the soft one will do


def open_listener(host: str, port: int, needs_token: bool) -> socket.socket:
    """A listening socket. Beyond this machine only with a token."""
    if not 0 <= port <= 65535:
        raise BadInput(f'there is no port {port}: --port takes 1 to 65535, or 0 for any free one')
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise BadInput(f'there is no address {host!r} to listen at: {error}; '
                       '--host takes a name or address of this machine') from None
    family, _, _, _, address = min(found, key=lambda row: row[0] != socket.AF_INET)
    if not needs_token and not is_loopback(address[0]):
        raise BadInput(f'--no-auth would let everybody who reaches {host} run commands as you; '
                       'it works on 127.0.0.1 only')
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        cure = '--port 0 takes any free one' if error.errno == errno.EADDRINUSE else '--host and --port choose another'
        raise Conflict(f'cannot listen at {host} port {port}: {error.strerror}; {cure}') from None
    return listener


def is_loopback(address: str) -> bool:
    """Whether an address is reached from this machine only."""
    return address == '::1' or address.startswith('127.')


def list_candidates(address: str, host: str) -> List[str]:
    """Names and addresses of a server that listens at `address`, which was given as `host`; the best first."""
    if address not in ('0.0.0.0', '::'):
        return [address] + ([host] if host != address else [])
    name = socket.gethostname()
    found = [name, socket.getfqdn(), name.partition('.')[0]] + own_addresses()
    return sorted(set(found), key=found.index)


def own_addresses() -> List[str]:
    """Addresses of this machine's interfaces, without loopback and link-local ones (Linux: /proc/net)."""
    try:
        with open('/proc/net/fib_trie') as file:
            found = re.findall(r'\|-- ([0-9.]+)\n\s+/32 host LOCAL', file.read())
        with open('/proc/net/if_inet6') as file:
            rows = [line.split() for line in file]
        found += [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])) for row in rows if row[3] == '00']   # global
    except OSError:
        return []
    return [address for address in sorted(set(found), key=found.index) if not is_loopback(address)]


@contextlib.contextmanager
def connection_file(options: ServerOptions, urls: List[str]) -> Iterator[None]:
    """While the block runs, the files that tell clients where the database is served."""
    database = os.path.abspath(options.database)
    path = database + '.connection'
    content = dict(
        describe_process(), url=urls[0], candidates=urls, server_id=secrets.token_hex(16), database=database,
        token_file=database + '.token' if options.has_token else None, is_embedded=options.is_embedded,
        in_memory=options.snapshot_interval_s is not None,
        fingerprint=read_fingerprint(options.tls_certificate) if options.tls_certificate else None)
    paths = [path, '' if options.is_embedded else register_server(content)]
    try:
        write_atomically(path, format_json(content).encode())
        yield
    finally:
        for path in filter(None, paths):
            unregister_server(path, content)


@contextlib.contextmanager
def pid_file(path: str) -> Iterator[None]:
    """While the block runs, a file that holds our process id."""
    try:
        write_atomically(path, b'%d\n' % os.getpid(), 0o644)
    except OSError as error:
        raise BadInput(f'cannot write the process id to {path}: {error.strerror}; give another place with --pid-file') from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):      # somebody else has removed it
            os.unlink(path)


@contextlib.contextmanager
def memory_database() -> Iterator[str]:
    """A database that lasts as long as the block: a file in memory, where there is such a place."""
    directory = make_memory_directory(0)
    try:
        yield os.path.join(directory, 'torc.db')
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def keep_snapshot(store: Store, options: ServerOptions, announce: Callable[[str], Any]) -> None:
    """Put a copy of the database in place, the older ones beside it as PATH.1, PATH.2 and so on."""
    path = options.snapshot
    try:
        store.copy_to(path + '.tmp')
        push_back(path, options.snapshots_kept)
        os.replace(path + '.tmp', path)
        log.info('the database was copied to %s', path)
        announce(f'TORC_SNAPSHOT_DONE={path}\n')
    except (sqlite3.Error, OSError) as error:
        log.error('the database could not be copied to %s: %s', path, error)


def push_back(path: str, kept: int) -> None:
    """Make room for a new file of a series: PATH becomes PATH.1, that one PATH.2, and so on; `kept` with the new one."""
    names = [path] + [f'{path}.{number}' for number in range(1, kept)]
    for older, newer in zip(names[:0:-1], names[-2::-1]):
        if os.path.lexists(newer):
            os.replace(newer, older)


# -------- log files --------

class LogFile(logging.StreamHandler):
    """Log lines in a private file, which makes room for a new one when it has grown long: FILE.1 is the one before."""

    def __init__(self, path: str, limit_bytes: int = MAX_LOG_BYTES, kept: int = LOGS_KEPT) -> None:
        self.path, self.limit_bytes, self.kept = path, limit_bytes, kept
        super().__init__(self.open())

    def open(self) -> Any:
        """The file, to be written to at its end."""
        descriptor = open_private(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return os.fdopen(descriptor, 'w', encoding='utf-8', errors='backslashreplace')

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        if os.fstat(self.stream.fileno()).st_size > self.limit_bytes:
            with contextlib.suppress(OSError, Denied):      # a full disk, or the directory is gone: the old file goes on
                self.begin_anew()
        super().emit(record)

    def begin_anew(self) -> None:
        """Put the file behind, and open a new one."""
        if self.kept > 1:
            push_back(self.path, self.kept)
        else:
            os.unlink(self.path)
        full, self.stream = self.stream, self.open()
        full.close()

    def close(self) -> None:
        """Close the file, too."""
        self.stream.close()
        super().close()


class JsonLines(logging.Formatter):
    """Log lines as JSON, with the keys of Torc's own."""

    def format(self, record: logging.LogRecord) -> str:
        """A line."""
        trace = '\n' + self.formatException(record.exc_info) if record.exc_info else ''
        return format_json({'timestamp': format_time(record.created), 'level': record.levelname,
                            'fields': {'message': record.getMessage() + trace}, 'target': record.name})


# -------- detached servers --------

def start_embedded_server(database: str, snapshot_interval_s: Optional[float] = None) -> bool:
    """Fork a server for a database. True when it answers; False if another process has the database."""
    database = os.path.abspath(database)
    options = ServerOptions(database, port=0, is_embedded=True, snapshot_interval_s=snapshot_interval_s)
    try:
        start_detached_server(options, LogFile, database + '.log', MAX_EMBEDDED_LOG_BYTES, 1)
    except Conflict:
        return False
    return True


def start_detached_server(options: ServerOptions, *log_to: Any) -> str:
    """Fork a server that outlives us; what it announced. Conflict if another process has the database.

    A fork without exec: nothing is compiled again, and the command line shows no secret. Callers hold no open Store.
    `log_to` makes its logging handler: a class and its arguments.
    """
    if options.database != IN_MEMORY:
        prepare_database_directory(options.database)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        run_detached_server(options, os.fdopen(writer, 'w'), *log_to)
    os.close(writer)
    try:
        os.waitpid(child, 0)    # the first child; the server is the second, and nobody's
    except ChildProcessError:
        pass    # the caller ignores SIGCHLD
    with os.fdopen(reader, encoding='utf-8', errors='replace') as pipe:
        answered, _, _ = select.select([pipe], [], [], START_DEADLINE_S)
        said = pipe.read() if answered else f'no answer within {START_DEADLINE_S:g} s'
    word, _, rest = said.partition(' ')
    if word == 'ready':
        return rest
    if word == 'taken':
        raise Conflict(rest)
    raise Unreachable(f'the server for {options.database} did not start: {said or "it died"}; see {log_to[1]}')


def run_detached_server(options: ServerOptions, pipe: io.TextIOWrapper, *log_to: Any) -> None:
    """In the forked child: leave the caller's session and be the server. Never returns into the caller's code."""
    try:
        os.setsid()
        if os.fork() == 0:
            leave_caller(pipe.fileno(), *log_to)
            if options.is_embedded:
                log.setLevel(logging.INFO)      # whatever the command that needed it tells
            serve_database(options, functools.partial(say_once, pipe, 'ready '))
    except Conflict as error:
        log.info('not needed: %s', error)
        say_once(pipe, 'taken ', error.message)
    except TorcError as error:
        log.error('%s', error)
        say_once(pipe, error.message)
    except BaseException as error:      # border: the caller's own handlers and clean-up must not run here
        log.exception('a bug in torc.py: the server ends')
        say_once(pipe, f'{type(error).__name__}: {error}')
    finally:
        os._exit(0)


def say_once(pipe: io.TextIOWrapper, *texts: str) -> None:
    """Tell the process that waits for us how it went, if it was not told before."""
    if not pipe.closed:
        with contextlib.suppress(OSError):      # nobody waits any more
            pipe.write(''.join(texts))
            pipe.close()


def leave_caller(keep: int, make_handler: Callable[..., Any], *arguments: Any) -> None:
    """Let go of everything that was inherited: signals, directory, umask, terminal, pipes, logging.

    Inherited descriptors are pointed at /dev/null, not closed: objects of the caller's that die in this process close
    their numbers, which might be ours by then.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.chdir('/')
    os.umask(0o077)
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir('/dev/fd'):
        if int(name) not in (keep, null):
            os.dup2(null, int(name), inheritable=int(name) < 3)
    formatters = [handler.formatter for handler in log.handlers if handler.formatter]
    handler = make_handler(*arguments)
    os.dup2(handler.stream.fileno(), 2)
    handler.setFormatter(formatters[-1] if formatters else logging.Formatter(LOG_FORMAT))
    log.handlers, log.propagate = [handler], False


# ======== 11. Client: the verbs of the service from anywhere ========
#
# One class, two transports, the same values. Through HTTP, on one kept-alive connection, when a server is there; and
# directly, on a Store of its own, when there is only a database and nobody else has it: then a command costs no socket
# and no process. Where to look, first found first taken: a URL or database that was named; TORC_API_URL; the lasting
# server that this account has registered, wherever its database is; the embedded database of this directory.
#
# A connection file is believed only after its server has proved that it knows the token, for a port may have changed
# hands. That exchange also makes sure that an embedded server on the point of leaving has let us in: from then on it
# stays until we close. Who knows the user by a password only cannot prove anything: a password goes to a server that was
# named, and to no other. What was sent once is not sent again by itself, unless it only reads: the caller knows better.
# A stream of events takes a connection of its own, and goes on where it left off when that is lost.
#
# Over https a connection file names the one certificate to believe; without one it is as with any other https server.

EMBEDDED_DATABASE = os.path.join(DEFAULT_OUTPUT_DIR, 'torc.db')
CONNECT_DEADLINE_S = 3.0            # for one address to accept
FIND_DEADLINE_S = 10.0              # for a server that just starts or leaves, or another command with the database
NAMED_DEADLINE_S = 1.0              # at first, for an address that was named: it is sooner mistyped than just starting
CALL_DEADLINE_S = 600.0             # for one answer, if the caller names no other; large workflows take their time
SILENCE_S = 45.0                    # a stream gives a sign of life every KEEP_ALIVE_S; after so much silence it is dead
STREAM_PATIENCE_S = 60.0            # for the server of a stream to come back
LEAVE_DEADLINE_S = 2.0              # for an embedded server in memory to end, if we were its last client
LEAVE_PAUSE_S = 0.02
STREAM_PAUSE_S = 0.2                # before the next try, whatever ended the last one
MAX_EVENT_BYTES = 16 * 1024 ** 2
CERTIFICATE_CURES = {       # OpenSSL's verify codes (x509_vfy.h)
    9: 'is not valid yet: is the clock right?',
    10: 'has expired: the server wants a new one',
    62: 'is for another name: write the one that stands in it',
    64: 'is for another address: write a name or address that stands in it',
}
ERROR_KINDS = {kind.__name__: kind for kind in (BadInput, Refused, NotFound, Conflict, Denied, Unreachable)}
ERROR_KINDS_BY_STATUS = {400: BadInput, 401: Denied, 403: Denied, 404: NotFound, 409: Conflict, 413: BadInput}
STATUS_LINE = Expression(rb'HTTP/1\.[01] ([0-9]{3})')
LENGTH_FIELD = Expression(rb'\r\ncontent-length:[ \t]*([0-9]+)[ \t]*(?:\r\n|\Z)', re.IGNORECASE)
CLOSE_FIELD = Expression(rb'\r\nconnection:[ \t]*close', re.IGNORECASE)


class Address(NamedTuple):
    """Where a server is."""
    url: str
    is_tls: bool
    host: str
    port: int
    prefix: str     # of all paths


def parse_url(url: str) -> Address:
    """'http://host:8080/torc-service/v1' -> Address. Without a path the usual one is meant."""
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port or (443 if parts.scheme == 'https' else 80)
    except ValueError:
        parts, port = urllib.parse.urlsplit(''), 0
    if parts.scheme not in ('http', 'https') or not parts.hostname or parts.username or not re.match(r'[!-~]+\Z', url):
        raise BadInput(f'{printable(url)!r} is not the address of a server: write http://HOST:PORT{API_PREFIX}')
    return Address(url, parts.scheme == 'https', parts.hostname, port, parts.path.rstrip('/') or API_PREFIX)


def parse_answer(status: int, body: bytes) -> Any:
    """Value of a good answer; the TorcError of a bad one, of the same kind as where it was raised."""
    try:
        value = json.loads(body.decode('utf-8')) if body else None
    except ValueError:
        value = None
        status = status if status >= 300 else 502
    if status < 300:
        return value
    found = value.get('error') if isinstance(value, dict) else None
    found = found if isinstance(found, dict) else {'message': found} if isinstance(found, str) else {}
    reason = reason_phrase(status)
    message = str(found.get('message') or f'the server answered {status} {reason}'.strip()).replace(SOFT_HYPHEN, '')
    if status >= 500 or status == 429:
        raise Unreachable(f'the server cannot answer now: {message}', http=status)
    kind = ERROR_KINDS_BY_STATUS.get(status) or ERROR_KINDS.get(str(found.get('error')), Refused)
    details = {name: item for name, item in found.items() if name not in ('error', 'message', 'http', 'problems')}
    raise kind(message, http=status, **details)


class StreamEvent(NamedTuple):
    """One event of a stream."""
    id: str
    type: str       # '' if there is nothing but an id, or a sign of life
    data: Any


def parse_event(block: bytes) -> StreamEvent:
    """The lines of one server-sent event -> StreamEvent (WHATWG HTML, 9.2.6). ConnectionError if its data are no JSON."""
    fields = {}     # type: Dict[str, str]
    for line in block.decode('utf-8', 'replace').split('\n'):
        name, _, value = line.partition(':')
        value = value[1:] if value[:1] == ' ' else value
        fields[name] = fields['data'] + '\n' + value if name == 'data' and name in fields else value
    if 'data' not in fields:
        return StreamEvent(fields.get('id', ''), '', None)
    try:
        return StreamEvent(fields.get('id', ''), fields.get('event', 'message'), json.loads(fields['data']))
    except ValueError:
        raise ConnectionError('what came as an event is no JSON') from None


class Credentials(NamedTuple):
    """What a client shows to a server that was named, and to no other."""
    password: str = ''      # of user_name()
    cookie: str = ''        # value of the field Cookie


def check_credentials(url: str, given: Credentials) -> Credentials:
    """What was given, else TORC_PASSWORD and TORC_COOKIE_HEADER; nothing without a URL. BadInput for what no header can hold."""
    if not url:
        if given.password or given.cookie:
            raise BadInput('a password or cookie is shown only to a server that was named: give --url too, or set TORC_API_URL')
        return given
    found = Credentials(given.password or os.environ.get('TORC_PASSWORD', ''), given.cookie or os.environ.get('TORC_COOKIE_HEADER', ''))
    if not re.match(r'[ -~]*\Z', found.cookie):
        raise BadInput('the cookie holds a character that no header field can hold')
    if found.password and ':' in user_name():
        raise BadInput(f'{printable(user_name())!r} cannot log in: a user name holds no colon; set TORC_USERNAME')
    address = parse_url(url)
    if found.password and not address.is_tls and not is_loopback(address.host) and address.host not in LOOPBACK_NAMES:
        log.warning('the password travels to %s unencrypted: others on the way can read it', address.host)
    return found


class Trust(NamedTuple):
    """Which servers are believed over https: by default those that this machine's own list of authorities vouches for."""
    ca_file: str = ''           # certificates to believe instead; ''
    is_insecure: bool = False   # believe any
    fingerprint: str = ''       # SHA-256 of the one certificate to believe, as a connection file has it; ''

    def wrap(self, plain: socket.socket, host: str) -> Any:
        """Make a connected socket speak TLS. OSError, or ValueError, for a server that is not believed."""
        ssl = load_ssl()
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
        except OSError as error:
            raise BadInput(f'cannot use the certificates in {self.ca_file}: {error.strerror or "not in PEM form"}') from None
        is_pinned = bool(self.fingerprint) and not self.ca_file
        if self.is_insecure or is_pinned:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        secured = context.wrap_socket(plain, server_hostname=host)
        if is_pinned and hashlib.sha256(secured.getpeercert(binary_form=True)).hexdigest() != self.fingerprint:
            secured.close()
            raise ConnectionError('its certificate is not that of the server that was started here')
        return secured


class Wire:
    """One HTTP connection, kept alive: a request goes out, its answer comes back. Errors are OSErrors.

    Plain sockets, for http.client takes three times as long for a small answer, mostly in its header parser.
    Proxies named in the environment are not used: they seldom lead to a login node's ports.
    """

    def __init__(self, address: Address, trust: Trust = Trust()) -> None:
        """Connect. OSError if nobody accepts."""
        self.address = address
        name = f'[{address.host}]' if ':' in address.host else address.host
        self.host = f'{name}:{address.port}'
        self.fields = f'host: {self.host}\r\nuser-agent: torc.py/{__version__}\r\n'
        self.is_closed = False
        self.is_waiting = False     # a request is out whose answer has not been read
        self.socket = socket.create_connection((address.host, address.port), CONNECT_DEADLINE_S)
        try:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if address.is_tls:
                self.socket = trust.wrap(self.socket, address.host)
        except BaseException:
            self.close()
            raise

    def show_token(self, token: str) -> None:
        """Send the token with every request from now on."""
        self.fields += f'authorization: Bearer {token}\r\n'

    def show(self, credentials: 'Credentials') -> None:
        """Send these with every request from now on."""
        if credentials.password:
            pair = f'{user_name()}:{credentials.password}'.encode('utf-8', 'surrogateescape')
            self.fields += f'authorization: Basic {base64.b64encode(pair).decode()}\r\n'
        if credentials.cookie:
            self.fields += f'cookie: {credentials.cookie}\r\n'

    def close(self) -> None:
        """Hang up."""
        self.is_closed = True
        self.socket.close()

    def is_alive(self) -> bool:
        """Whether the next request may go out: the server has not hung up, and no answer is still to come."""
        if self.is_closed or self.is_waiting:
            return False
        return not select_readable(self.socket) or self.address.is_tls and self.is_only_tls()

    def is_only_tls(self) -> bool:
        """Whether what can be read is TLS's own (session tickets come after its handshake), not the end, nor rubbish."""
        self.socket.settimeout(0)
        try:
            self.socket.recv(1)
        except OSError as error:
            return isinstance(error, load_ssl().SSLWantReadError)
        return False

    def ask(self, method: str, target: str, body: Optional[bytes] = None,
            deadline_s: float = CALL_DEADLINE_S) -> Tuple[int, bytes]:
        """One request and its answer: (status, body)."""
        self.send(method, target, body, deadline_s)
        return self.read_answer(deadline_s)

    def send(self, method: str, target: str, body: Optional[bytes], deadline_s: float) -> None:
        """Let a request go out; read_answer() is to follow. After an error the wire is closed."""
        fields = self.fields
        if body is not None:
            fields += f'content-type: application/json\r\ncontent-length: {len(body)}\r\n'
        self.is_waiting = True
        gone = (BrokenPipeError, ConnectionResetError) + ((load_ssl().SSLEOFError,) if self.address.is_tls else ())
        try:
            self.socket.settimeout(deadline_s)
            with contextlib.suppress(*gone):    # a refusal may be there to read
                self.socket.sendall(f'{method} {target} HTTP/1.1\r\n{fields}\r\n'.encode('ascii') + (body or b''))
        except BaseException:
            self.close()
            raise

    def read_answer(self, deadline_s: float) -> Tuple[int, bytes]:
        """Status and body of the answer to the request that is out. After an error the wire is closed."""
        try:
            answer = self.receive_answer(time.monotonic() + deadline_s)
        except BaseException:
            self.close()    # what comes later would be taken for the answer to the next request
            raise
        self.is_waiting = False
        return answer

    def receive_answer(self, deadline: float) -> Tuple[int, bytes]:
        """Read an answer off the socket."""
        status, head, data = self.receive_head(deadline)
        length = LENGTH_FIELD.search(head)
        if length:
            body = self.read_body(data, int(length.group(1)), deadline)
        else:
            raise ConnectionError('an answer came without its length')
        if CLOSE_FIELD.search(head):
            self.close()
        return status, body

    def receive_head(self, deadline: float) -> Tuple[int, bytes, bytes]:
        """Status and head of an answer, and what has come of its body."""
        status, head, data = 100, b'', b''
        while status < 200:     # 1xx: the true answer follows
            while b'\r\n\r\n' not in data:
                data += self.receive(deadline)
            head, _, data = data.partition(b'\r\n\r\n')
            match = STATUS_LINE.match(head)
            if not match:
                raise ConnectionError('what answers there does not speak HTTP')
            status = int(match.group(1))
        return status, head, data

    def stream(self, target: str, last_id: str, until: float) -> Iterator[StreamEvent]:
        """Ask for a stream of events; they come until the time is over (monotonic) or the server hangs up. The wire is used up."""
        if last_id:
            self.fields += f'last-event-id: {last_id}\r\n'
        self.send('GET', target, None, SILENCE_S)
        status, head, data = self.receive_head(time.monotonic() + SILENCE_S)
        if b'text/event-stream' not in head:
            length = LENGTH_FIELD.search(head)
            parse_answer(status if status >= 300 else 502, self.read_body(
                data, int(length.group(1)) if length else 0, time.monotonic() + SILENCE_S))
        while True:
            *blocks, data = data.replace(b'\r\n', b'\n').split(b'\n\n')
            yield from map(parse_event, blocks)
            if len(data) > MAX_EVENT_BYTES:
                raise ConnectionError('an event without end')
            try:
                data += self.receive(min(until, time.monotonic() + SILENCE_S))
            except socket.timeout:
                if time.monotonic() < until:
                    raise
                return

    def receive(self, deadline: float, size: int = 65536) -> bytes:
        """More bytes of an answer."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise socket.timeout('no answer within its time')
        self.socket.settimeout(left_s)
        data = self.socket.recv(size)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, 'the server hung up')
        return data

    def read_body(self, data: bytes, length: int, deadline: float) -> bytes:
        """A body of known length, of which some has come."""
        if len(data) >= length:
            return data[:length]
        parts, missing = [data], length - len(data)
        while missing > 0:
            parts.append(self.receive(deadline, min(missing, 2 ** 20)))
            missing -= len(parts[-1])
        return b''.join(parts)


def select_readable(sock: socket.socket) -> bool:
    """Whether something can be read at once; between two requests that is the end, or rubbish."""
    poll = select.poll()    # select() knows no descriptors from 1024 on
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def format_target(route: Route, prefix: str, params: Dict[str, Any]) -> str:
    """Path and query of an operation."""
    params = dict(params)
    path = re.sub(r'\{(\w+)\}', lambda match: urllib.parse.quote(str(params.pop(match.group(1))), safe=''), route.path)
    pairs = []
    for name, value in params.items():
        for item in value if isinstance(value, (list, tuple)) else [value]:
            pairs.append((name, format_parameter(item)))
    return prefix + path + ('?' + urllib.parse.urlencode(pairs) if pairs else '')


class Pending:
    """An operation that was asked for; finish() waits for what came of it. A selector may watch it meanwhile."""

    def __init__(self, value: Any = None, wire: Optional[Wire] = None) -> None:
        self.value = value      # the answer of a direct client
        self.wire = wire        # on which the answer is to come

    def fileno(self) -> int:
        """Descriptor that gets readable with the answer; -1 if the answer is here."""
        return -1 if self.wire is None or self.wire.is_closed else self.wire.socket.fileno()

    def finish(self, deadline_s: float = CALL_DEADLINE_S) -> Any:
        """The answer. Raises what call() raises."""
        if self.wire is None:
            return self.value
        try:
            status, answer = self.wire.read_answer(deadline_s)
        except (OSError, ValueError) as error:
            raise Unreachable(f'no answer from {self.wire.address.url}: {explain(error)}') from None
        return parse_answer(status, answer)


def name_values(route: Route, values: Sequence[Any], params: Dict[str, Any]) -> Dict[str, Any]:
    """Values without a name: first those of the path, in its order, then the body."""
    names = path_parameters(route)[1 if 'id' in params else 0:] + (['body'] if route.body else [])
    names = [name for name in names if name not in params]
    if len(values) > len(names):
        raise BadInput(f"{route.name} takes at most {len(names)} values without a name" + (': ' + ', '.join(names) if names else ''))
    return dict(params, **dict(zip(names, values)))


def client_method(route: Route) -> Callable[..., Any]:
    """The method of a client that carries out an operation, with the rows of the tables as its docstring."""
    def carry_out(self: 'Client', *values: Any, **params: Any) -> Any:
        return self.call(route.name, **name_values(route, values, params))
    carry_out.__name__ = carry_out.__qualname__ = route.name
    query = '\n        '.join(['\n    query:', *route.query.split()]) if route.query else ''
    body = '\n        '.join(['\n    body: ' + route.body, *MODELS.get(route.body.lstrip('?'), '').split()]) if route.body else ''
    carry_out.__doc__ = f'{route.verb.__doc__}\n\n    {route.method} {route.path}{query}{body}\n    answer: {answer_type(route)}'
    return carry_out


Operations = type('Operations', (), {route.name: client_method(route) for route in ROUTES})


class Client(Operations):
    """Every operation of the API by its name, with plain dicts and lists going in and coming out.

        with torc.Client.connect() as client:
            workflow = client.create_workflow({'name': 'study', 'user': 'me'})
            client.create_job({'workflow_id': workflow['id'], 'name': 'first', 'command': 'echo hello'})
            client.initialize_jobs(workflow['id'])
            for job in client.pages('list_jobs', workflow_id=workflow['id']):
                print(job['name'], job['status'])

    Parameters have names; those of the path may stand without, in their order, and then the body. help(client.create_job)
    tells an operation's path, query and body: name:type, with ! where it must be given, and ? before the model of a body
    of which a part will do. A list answers with its first 100,000 items at most; pages() goes through all.

    What the server refuses is a TorcError: `message` tells what and why, `http` the status, `details` the field, say, and
    `exit` how a command would end. Its kinds: BadInput, Refused, NotFound, Conflict, Denied, and Unreachable, which says
    that nobody answered: it may have been done or not.

    Made by connect(). A client that is closed, or whose server went away, finds its way again with the next call. It is
    for one thread at a time, and not for both sides of a fork: make another one there.
    """

    def __init__(self, url: str = '', database: str = '', token_file: str = '', trust: Trust = Trust(),
                 needs_server: bool = False, credentials: Credentials = Credentials()) -> None:
        self.named_url = url                    # the only server that will do; ''
        self.credentials = credentials          # for that one
        self.database = database                # or the database whose server, or whose file, will do
        self.token_file = token_file            # path of the token's file, or ''
        self.trust = trust                      # for https
        self.needs_server = needs_server        # fork an embedded server rather than open the database
        self.snapshot_interval_s = None         # type: Optional[float]  # ... which has it in memory then
        self.in_memory = False                  # the embedded server in use has its database in memory
        self.server_file = ''                   # registration of the lasting server; '': none
        self.servers_started = 0                # embedded ones, by this client
        self.is_lasting = False                 # the database was served by a lasting server: wait for it, fork none
        self._wire = None                       # type: Optional[Wire]
        self._store = None                      # type: Optional[Store]
        self._lease = None                      # type: Optional[Lease]

    @classmethod
    def connect(cls, url: Optional[str] = None, database: Optional[str] = None, token_file: str = '', ca_file: str = '',
                is_insecure: bool = False, needs_server: bool = False, is_reading: bool = False,
                credentials: Credentials = Credentials()) -> 'Client':
        """Find a server or a database: as commands do, unless one is named.

        url           http://HOST:PORT, and token_file, the path of its token's file (else TORC_TOKEN_FILE); ca_file: whose
                      certificates are believed, for https (else TORC_TLS_CA_CERT, else this machine's); is_insecure: believe
                      all (or TORC_TLS_INSECURE)
        database      path of a database: its server if it has one, else the file itself, which nobody else can use then
        needs_server  fork a server, which leaves after us, rather than take the file: runners and other programs can
                      use it at the same time
        is_reading    make no new database
        credentials   password and cookie for the server that url names (else TORC_PASSWORD, TORC_COOKIE_HEADER)
        Without url and database: TORC_API_URL, the lasting server of this account (BadInput if there are
        several, Unreachable if it was killed), torc_output/torc.db.
        """
        trust = Trust(ca_file or os.environ.get('TORC_TLS_CA_CERT', ''),
                      is_insecure or os.environ.get('TORC_TLS_INSECURE', '').lower() in ('1', 'true'))
        token_file = token_file or os.environ.get('TORC_TOKEN_FILE', '')
        url = url or ('' if database else os.environ.get('TORC_API_URL', ''))
        credentials = check_credentials(url, credentials)
        if url:
            known = find_server_file(url, token_file)
            token_file = '' if credentials.password else token_file or known.get('token_file') or ''
            client = cls(url=parse_url(url).url, token_file=token_file, trust=trust._replace(fingerprint=known.get('fingerprint') or ''),
                         credentials=credentials)
        else:
            database, server_file = (os.path.abspath(database), '') if database else find_database()
            if not server_file and is_reading and not os.path.exists(database):
                raise NotFound(f'there is no server and no database {database}: '
                               '`torc.py run FILE` or `torc.py create FILE` makes one')
            client = cls(database=database, needs_server=needs_server, trust=trust)
            client.server_file, client.is_lasting = server_file, bool(server_file)
        client.reconnect(NAMED_DEADLINE_S if url else FIND_DEADLINE_S)
        return client

    @property
    def is_direct(self) -> bool:
        """Whether the verbs run in this process, on the database itself."""
        return self._store is not None

    @property
    def location(self) -> str:
        """Where its workflows are stored, for messages."""
        if self.named_url:
            return f'the server {self.named_url}'
        return f'the database {self.database}' + (f' (served at {self.url})' if self.is_lasting else '')

    @property
    def url(self) -> str:
        """The server's address, for TORC_API_URL; '' if the client is direct."""
        return self._wire.address.url if self._wire is not None else self.named_url

    def call(self, op: str, body: Any = None, deadline_s: Optional[float] = None, **params: Any) -> Any:
        """Carry out an operation: body as the model says, path and query parameters by name. TorcErrors are the verb's.

        `id` stands for the first parameter of the path. Unreachable: nobody answered, and it may have been done or not.
        """
        deadline_s = deadline_s or CALL_DEADLINE_S
        try:
            return self.begin(op, body, deadline_s, **params).finish(deadline_s)
        except Unreachable:
            if OPERATIONS[op].method != 'GET' or self._wire is None or not self._wire.is_closed:
                raise
        return self.begin(op, body, deadline_s, **params).finish(deadline_s)

    def begin(self, op: str, body: Any = None, deadline_s: float = CALL_DEADLINE_S, **params: Any) -> Pending:
        """Ask for an operation, wherever it can be carried out now; its answer may be fetched later, before the next call."""
        route = OPERATIONS.get(op)
        if route is None:
            raise BadInput(f'there is no operation {op!r}' + did_you_mean(op, OPERATIONS))
        if route.returns == STREAM:
            raise BadInput(f'{op} is a stream without end: client.stream({op!r}, ...) gives its events')
        params = name_parameters(route, {name: value for name, value in params.items() if value is not None})
        if self._store is None and (self._wire is None or not self._wire.is_alive()):
            self.reconnect(min(FIND_DEADLINE_S, deadline_s))
        if self._store is not None:
            return Pending(self.call_direct(self._store, route, body, params))
        data = None if body is None else format_body(body)
        wire = self._wire
        target = format_target(route, wire.address.prefix, params)
        try:
            wire.send(route.method, target, data, deadline_s)
        except (OSError, ValueError) as error:
            raise Unreachable(f'no answer from {self.url}: {explain(error)}') from None
        return Pending(wire=wire)

    @staticmethod
    def call_direct(store: Store, route: Route, body: Any, params: Dict[str, Any]) -> Any:
        """Carry out an operation on our own store."""
        try:
            with store.reading() if route.method == 'GET' else store.transaction():
                answer = call_operation(store, route.name, params, body)
            if isinstance(answer, Accepted):    # no server is there to go on with the task
                with store.transaction():
                    run_tasks(store)
                    answer = get_task(store, answer['id'])
        except sqlite3.Error as error:
            raise explain_database_error(error, store.path) from None
        if isinstance(answer, TorcError):
            raise answer
        return answer

    def stream(self, op: str, until: float = math.inf, **params: Any) -> Iterator[StreamEvent]:
        """Events of a stream operation as they come, for ever, or until time.monotonic() says so. Needs a server, and gets one.

        A server that goes away is found again, and goes on where it left off, if it can; what was missed comes as an event of
        type 'warning' whose data tell how many were `dropped`. Unreachable when it stays away for STREAM_PATIENCE_S.
        """
        route = OPERATIONS[op]
        params = name_parameters(route, params)
        self.need_server()
        last_id = ''
        while time.monotonic() < until:
            if self._wire is None or not self._wire.is_alive():
                self.reconnect(min(STREAM_PATIENCE_S, until - time.monotonic()))
            wire, self._wire = self._wire, None     # other calls get another one
            with contextlib.closing(wire), contextlib.suppress(OSError):      # it went away: another try
                for event in wire.stream(format_target(route, wire.address.prefix, params), last_id, until):
                    last_id = event.id or last_id
                    if event.type:
                        yield event
            time.sleep(max(0.0, min(STREAM_PAUSE_S, until - time.monotonic())))

    def pages(self, op: str, **params: Any) -> Iterator[Any]:
        """All items of a list operation from `offset` on, fetched page by page, `limit` at a time."""
        offset = params.pop('offset', 0)
        while True:
            page = self.call(op, offset=offset, **params)
            if not isinstance(page, dict) or not isinstance(page.get('items'), list):
                raise Unreachable(f'what answers at {self.url} is no server of torc.py or Torc')
            yield from page['items']
            offset += len(page['items'])
            if not page['has_more'] or not page['items']:
                return

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f'a client has no operation {name!r}' + did_you_mean(name, OPERATIONS))

    def __enter__(self) -> 'Client':
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def close(self) -> None:
        """Give the connection or the database back. The next call opens it again."""
        wire, store, lease = self._wire, self._store, self._lease
        self._wire = self._store = self._lease = None
        if wire is not None:
            wire.close()
        if store is not None:
            store.close()
        if lease is not None:
            lease.release()

    def leave(self) -> None:
        """Close. An embedded server in memory has written everything to its file before.

        It may be killed as soon as we have left: batch systems do so at the end of a script. If nobody else
        uses it, its end is waited for too.
        """
        if self.in_memory and self._wire is not None:
            try:
                self.await_snapshot()
            except TorcError as error:
                log.warning('the snapshot %s could not be written: %s', self.database, error)
            self.close()
            deadline = time.monotonic() + LEAVE_DEADLINE_S
            while os.path.exists(self.database + '.memory') and time.monotonic() < deadline:
                time.sleep(LEAVE_PAUSE_S)
        self.close()

    def await_snapshot(self) -> None:
        """Wait until the database file holds everything that was done."""
        wanted = answer = self.call('snapshot_database')
        while answer['saved'] < wanted['changes']:
            if answer.get('error'):
                raise Refused(answer['error'])
            time.sleep(LEAVE_PAUSE_S)
            answer = self.call('snapshot_database')

    def need_server(self) -> None:
        """From now on through a server: a direct client gives its database to an embedded one and joins it."""
        if self.database and not self.needs_server:
            self.needs_server = True
            if self.is_direct:
                self.reconnect()

    def reconnect(self, wait_s: float = FIND_DEADLINE_S) -> None:
        """Find the server or the database again; an embedded server that died is started anew.

        Waits for what passes by itself: a server that starts or leaves, another command that has the database.
        """
        self.close()
        deadline, pause_s = time.monotonic() + wait_s, 0.005
        while True:
            try:
                return self.open()
            except (Unreachable, Conflict):
                if time.monotonic() + pause_s > deadline:
                    raise
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.25)

    def open(self) -> None:
        """One try to find what reconnect() wants."""
        if self.named_url:
            wire = self.open_wire([self.named_url])
            wire.show(self.credentials)
            self._wire = self.ask_proof(wire) if self.token_file else wire
            return
        found = read_living_server(self.server_file or self.database + '.connection')
        if found is not None:
            self.is_lasting = not found.get('is_embedded')
            self.in_memory = bool(found.get('in_memory')) and not self.is_lasting
            self.token_file = found.get('token_file') or ''
            self.trust = self.trust._replace(fingerprint=found.get('fingerprint') or '')
            try:
                self._wire = self.open_proven(found)
            except Unreachable as error:
                if not self.server_file or process_lives(found):
                    raise
                reason = f'cannot be reached ({error.message})'
                raise Unreachable(explain_dead_server(self.server_file, found, reason)) from None
        elif self.is_lasting:
            raise Unreachable(f'the server of {self.database} is gone; start it again with '
                              f'`torc.py serve -d {shlex.quote(self.database)}`')
        elif not self.needs_server:
            self._store, self._lease = hold_database(self.database)
            self._store.caller = user_name()
            forget_server(self.database)
        elif start_embedded_server(self.database, self.snapshot_interval_s):
            self.servers_started += 1
            forget_server(self.database)
            self.open()
        else:
            raise Conflict(f'the database {self.database} is in use by another torc.py; stop it, '
                           'or give another place with --db')

    def open_wire(self, urls: Sequence[str]) -> Wire:
        """Connect to the first address that accepts."""
        reasons = []
        for url in urls:
            try:
                return Wire(parse_url(url), self.trust)
            except (OSError, ValueError) as error:      # a wrong certificate is a ValueError before Python 3.7
                reasons.append(f'{url} does not answer: {explain(error)}')
        raise Unreachable('; '.join(reasons) + '; is the server running?')

    def open_proven(self, found: Dict[str, Any]) -> Wire:
        """Connect to the server of a connection file, if it is the one that wrote it: only then it gets the token."""
        urls = found.get('candidates') or [found['url']]
        if process_lives(found) is None:
            urls = [url for url in urls if not is_loopback(parse_url(url).host)]
            if not urls:
                raise Unreachable(f"the server of {self.database} runs on host {found['host']} and answers there only; "
                                  'start it with --host to reach it from here')
        return self.ask_proof(self.open_wire(urls))

    def ask_proof(self, wire: Wire) -> Wire:
        """Let the server prove that it knows the token, then show it ours. Without a token: see that it lets us in."""
        challenge = secrets.token_hex(16)
        try:
            status, body = wire.ask('GET', f'/healthz?challenge={challenge}', deadline_s=FIND_DEADLINE_S)
            if status == 400:       # it says what is wrong: plain HTTP on a port for TLS, say
                parse_answer(status, body)
            proof = json.loads(body.decode()).get('proof')
        except (OSError, ValueError, AttributeError) as error:
            wire.close()
            raise Unreachable(f'no answer from {wire.address.url}: {explain(error)}') from None
        if self.token_file:
            token = read_token(self.token_file)
            if not hmac.compare_digest(str(proof), prove_token(token.encode(), challenge, wire.address.port)):
                wire.close()
                raise Unreachable(f'what answers at {wire.address.url} is not the server of the token in {self.token_file} '
                                  '(through a tunnel, its port must be the same on both sides)')
            wire.show_token(token)
        return wire


def explain(error: Exception) -> str:
    """Why a connection failed, in words."""
    if isinstance(error, socket.timeout):
        return 'too slow'
    reason = getattr(error, 'reason', '')
    if reason == 'CERTIFICATE_VERIFY_FAILED' or type(error).__name__ == 'CertificateError':    # the second before Python 3.7
        code = getattr(error, 'verify_code', 0)
        cure = CERTIFICATE_CURES.get(code, 'is not one that is believed here: give that of its authority with --tls-ca-cert FILE')
        return f'its certificate {cure}' if code else f'{error}: its certificate {cure}, or is for another name, or has expired'
    if reason in ('WRONG_VERSION_NUMBER', 'UNKNOWN_PROTOCOL', 'HTTP_REQUEST', 'RECORD_LAYER_FAILURE'):
        return 'it does not speak TLS: write http:// in the address'
    return getattr(error, 'strerror', None) or str(error) or type(error).__name__


def format_body(body: Any) -> bytes:
    """A request's body. BadInput for what JSON cannot say."""
    try:
        return format_json(body).encode()
    except (TypeError, ValueError, RecursionError) as error:    # of them UnicodeEncodeError: half of a surrogate pair
        raise BadInput(f'the body cannot be sent as JSON: {error}') from None


def find_database() -> Tuple[str, str]:
    """The database that commands use, and the registration of its lasting server; '' if it has none.

    BadInput if several servers are registered, Unreachable if the one that is was killed.
    """
    servers = list_registrations()
    legacy = default_database() + '.connection'     # of a server that an older torc.py started
    found = read_living_server(legacy) if os.path.exists(legacy) else None
    if found is not None and found.get('server_id') not in [old.get('server_id') for old in servers.values()]:
        servers[legacy] = found
    for path, server in list(servers.items()):
        if process_lives(server) is False and is_deleted(server['database']):
            log.warning('the server of %s was killed and the database deleted: it is no longer registered',
                        server['database'])
            os.unlink(path)
            del servers[path]
    if len(servers) > 1:
        described = ''.join(map(describe_server, servers, servers.values()))
        raise BadInput('several servers are registered: choose one with --url URL, TORC_API_URL or --db FILE'
                       f', or the database of this directory with -s:{described}')
    for path, server in servers.items():
        if process_lives(server) is False:
            raise Unreachable(explain_dead_server(path, server, 'was killed, or the machine was restarted'))
        return server['database'], path
    return os.path.abspath(EMBEDDED_DATABASE), ''


def describe_server(path: str, server: Dict[str, Any]) -> str:
    """A line on a registered server."""
    lives = process_lives(server)
    state = f' (killed; to remove it: rm {shlex.quote(path)})' if lives is False else ''
    state = f" (on host {server.get('host')})" if lives is None else state
    return f"\n  {server['url']}  {server['database']}{state}"


def explain_dead_server(path: str, server: Dict[str, Any], reason: str) -> str:
    """Why a registered server cannot be used, and the ways out."""
    database = shlex.quote(server['database'])
    memory = ' --in-memory' if server.get('in_memory') else ''
    return (f"the server of {server['database']} at {server['url']} {reason}\n"
            f'  to start it again:                  torc.py serve -d {database}{memory}\n'
            f'  to use its database without it:     --db {database}\n'
            f'  to use that of this directory:      -s\n'
            f'  to forget the server:               rm {shlex.quote(path)}')


def find_server_file(url: str, token_file: str = '') -> Dict[str, Any]:
    """What the connection file says of the server that answers at a URL: the one beside the token's file, that of the
    embedded server, or a registered one. {} if none names it."""
    beside = [token_file[:-len('.token')]] if token_file.endswith('.token') else []
    databases = beside + [default_database(), os.path.abspath(EMBEDDED_DATABASE)]
    address = parse_url(url)
    for path in [database + '.connection' for database in databases] + registration_files():
        try:
            server = read_living_server(path)
        except (Denied, OSError):
            continue    # not ours to trust
        if server is not None and serves_address(server, address):
            return server
    return {}


def serves_address(server: Dict[str, Any], address: Address) -> bool:
    """Whether an address is a server's: as listed, or, for a server of this host, any name of the host.

    Whoever answers there must still prove that it knows the token before it gets ours.
    """
    known = [parse_url(url) for url in server.get('candidates') or [server['url']]]
    hosts = [other.host for other in known if (other.is_tls, other.port) == (address.is_tls, address.port)]
    return address.host in hosts or bool(hosts and process_lives(server) and is_own_name(address.host))


def is_own_name(host: str) -> bool:
    """Whether a name or address is this host's."""
    try:
        found = {row[4][0] for row in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    return any(map(is_loopback, found)) or not found.isdisjoint(own_addresses())


# ======== 13. Launcher: one job's process, from its command to its last descendant ========
#
# Owns starting, reaping and stopping. Every process is a session of its own with stdin /dev/null. Invariants:
#
# * No process outlives its job. What a job leaves behind is found by its session, by its mark in the environment
#   (TORC_RUN_TAG), or as a descendant of such a process; it gets SIGTERM, soon after SIGKILL. The runner is a
#   subreaper (prctl(2)), so that a daemon becomes its child instead of init's and cannot get lost.
# * No job outlives its runner. The guardian, a forked child in a session of its own, reads what starts and ends from
#   a pipe. End of file without a farewell means that the runner died: it kills all of the above, then leaves.
# * Nobody else's process is ever signalled. A process group is signalled before its leader is reaped, while its
#   number cannot be used again; any other process only when pid and start time still fit.
#
# The usual job, which leaves nothing behind, pays one killpg and one read of the list of children for this.
# Callers do their own waiting: `poll` after SIGCHLD, or at `next_deadline`.
#
# -------- what to run --------

MAX_ARGUMENT_BYTES = 128 * 1024 - 1     # one argv string: MAX_ARG_STRLEN of Linux, less its NUL
PR_SET_CHILD_SUBREAPER = 36             # linux/prctl.h
POSIX_SPAWN_FLAGS = 0x04 | 0x08 | 0x80  # SETSIGDEF | SETSIGMASK | SETSID (glibc 2.26, musl): spawn.h
SPAWN_STRUCTURE_BYTES = 1024            # more than any C library's attributes, file actions or signal set
EXHAUSTION = frozenset((errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE))    # the node's fault, not the job's
SWEEP_INTERVAL_S = 0.05
GUARD_INTERVAL_S = 1.0
LEFTOVER_TERM_S = 2.0                   # from SIGTERM to SIGKILL for what a job has left behind
FAREWELL_WAIT_S = 2.0                   # for the guardian to leave
UNKILLABLE_S = 10.0                     # after SIGKILL; a process in uninterruptible sleep is given up then
RUN_TAG = 'TORC_RUN_TAG'
SECRETS = frozenset(('TORC_PASSWORD', 'TORC_COOKIE_HEADER', 'TORC_TOKEN'))
RESET_SIGNALS = tuple(getattr(signal, name) for name in ('SIGPIPE', 'SIGXFSZ', 'SIGINT', 'SIGQUIT', 'SIGTERM', 'SIGHUP',
                                                         'SIGUSR1', 'SIGUSR2', 'SIGCHLD'))
GUARD_RECORD = struct.Struct('=ii')     # pid, and one of these
ENDED, STARTED, FOREIGN, FAREWELL = range(4)    # FOREIGN: not a job's, leave it alone


def encode_text(text: str) -> bytes:
    """Text as a process gets it: UTF-8, as it stands in a workflow file, whatever the locale (in C, Python 3.6 knows only ASCII).

    Paths and variables of our own may hold bytes that are no text; they come out as they came in.
    """
    return text.encode('utf-8', 'surrogateescape')


def compose_command(script: Optional[str], command: str) -> str:
    """What the shell gets: an invocation script of one line wraps the command, a longer one is its prelude."""
    if not script or not script.strip():
        return command
    if '\n' in script:
        return f'{script.rstrip()}\n{command}'
    return f'{script.strip()} {command}'


def find_shell() -> str:
    """bash where there is one, else sh."""
    return shutil.which('bash') or shutil.which('sh') or '/bin/sh'


def gpu_environment(devices: Sequence[str]) -> Dict[str, str]:
    """Variables that show a job its GPUs; none for a job that asked for none."""
    names = ('CUDA_VISIBLE_DEVICES', 'HIP_VISIBLE_DEVICES', 'ROCR_VISIBLE_DEVICES', 'TORC_GPU_VISIBLE_DEVICES')
    return dict.fromkeys(names, ','.join(devices)) if devices else {}


def open_output(path: Optional[str]) -> int:
    """Open a job's output file for writing, emptied, never through a link or a pipe that lies there. None is /dev/null."""
    if path is None:
        return os.open(os.devnull, os.O_WRONLY)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor   # O_NONBLOCK means nothing to files (open(2))
    os.close(descriptor)
    raise FileExistsError(errno.EEXIST, 'something lies there that is no file', path)


def read_last_line(path: Optional[str]) -> str:
    """Last line of a job's output that is not blank, made printable, at most 300 characters."""
    if path is None:
        return ''
    try:
        with open(path, 'rb') as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            lines = file.read(4096).decode('utf-8', 'replace').split('\n')
    except OSError:
        return ''
    texts = [line.rpartition('\r')[2].strip() for line in lines]     # of a progress bar, what was last seen
    return printable(next((text for text in reversed(texts) if text), '')).replace('\n', ' ')[-300:]


def format_signal(number: int) -> str:
    """9 -> 'SIGKILL'. Real-time signals have no names of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f'signal {number}'


# -------- processes, as /proc shows them --------


class ProcRow(NamedTuple):
    """A living process (proc(5), stat)."""
    parent: int
    session: int
    start_ticks: int


def read_proc_row(pid: int) -> Optional[ProcRow]:
    """One process, or None if it does not live: a zombie cannot be signalled to any effect."""
    try:
        descriptor = os.open(f'/proc/{pid}/stat', os.O_RDONLY)
    except OSError:
        return None
    try:
        fields = os.read(descriptor, 4096).rpartition(b')')[2].split()
    except OSError:     # ESRCH: it ended between open and read
        return None
    finally:
        os.close(descriptor)
    return None if fields[0] in (b'Z', b'X') else ProcRow(int(fields[1]), int(fields[3]), int(fields[19]))


def read_proc_environ(pid: int) -> bytes:
    """Environment with which a process was started, or b'' where it may not be read."""
    try:
        with open(f'/proc/{pid}/environ', 'rb') as file:
            return file.read()
    except OSError:
        return b''


def read_proc_table() -> Dict[int, ProcRow]:
    """All living processes; empty where there is no /proc."""
    try:
        pids = [int(name) for name in os.listdir('/proc') if name.isdigit()]
    except OSError:
        return {}
    rows = ((pid, read_proc_row(pid)) for pid in pids)
    return {pid: row for pid, row in rows if row}


def find_family(sessions: Set[int], marks: Sequence[bytes]) -> Dict[int, int]:
    """Processes of these sessions, those that carry one of the marks, and all their descendants: pid -> start ticks."""
    table = read_proc_table()
    family = {pid for pid, row in table.items()
              if row.session in sessions or any(mark in environ for environ in (read_proc_environ(pid),) for mark in marks)}
    size = -1
    while size != len(family):
        size = len(family)
        family.update(pid for pid, row in table.items() if row.parent in family)
    family.discard(os.getpid())
    return {pid: table[pid].start_ticks for pid in family}


def read_proc_children(pid: int) -> List[int]:
    """Children of a process's first thread, zombies included (proc(5); CONFIG_PROC_CHILDREN)."""
    try:
        with open(f'/proc/{pid}/task/{pid}/children', 'rb') as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def signal_process(pid: int, start_ticks: int, number: int) -> None:
    """Signal a process if it is still the one that was meant."""
    if read_process_start_ticks(pid) == start_ticks:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):   # it ended just now, or has become another user's
            pass


def signal_group(pid: int, number: int) -> bool:
    """Signal a process group; False if it is empty."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:     # only processes of other users (setuid) are left in it
        pass
    return True


# -------- starting --------


class Spawner:
    """The C library's posix_spawn: one call that costs the same whatever the size of this process.

    Measured with two output files a job, own CPU: 0.2 ms on Python 3.6, where subprocess.Popen takes 0.9 ms and fork 0.6;
    within 10 % of Popen (vfork) and os.posix_spawn on 3.11 and later. AttributeError or OSError where it is lacking.
    """

    def __init__(self) -> None:
        self.library = ctypes.CDLL(None)
        self.actions, self.attributes, signals = (ctypes.create_string_buffer(SPAWN_STRUCTURE_BYTES) for _ in range(3))
        self.devnull = os.open(os.devnull, os.O_RDONLY)
        self.library.posix_spawnattr_init(self.attributes)
        self.library.sigemptyset(signals)
        self.library.posix_spawnattr_setsigmask(self.attributes, signals)
        for number in RESET_SIGNALS:
            self.library.sigaddset(signals, number)
        self.library.posix_spawnattr_setsigdefault(self.attributes, signals)
        code = self.library.posix_spawnattr_setflags(self.attributes, ctypes.c_short(POSIX_SPAWN_FLAGS))
        if code:
            raise OSError(code, os.strerror(code))

    def __call__(self, argv: Sequence[bytes], environment: Sequence[bytes], outputs: Sequence[int]) -> int:
        """Start a program in a session of its own; its pid. OSError as for execve(2)."""
        library, actions = self.library, self.actions
        library.posix_spawn_file_actions_init(actions)
        for number, descriptor in enumerate((self.devnull, *outputs)):
            library.posix_spawn_file_actions_adddup2(actions, descriptor, number)
        pid = ctypes.c_int()
        code = library.posix_spawn(ctypes.byref(pid), argv[0], actions, self.attributes,
                                   (ctypes.c_char_p * (len(argv) + 1))(*argv),
                                   (ctypes.c_char_p * (len(environment) + 1))(*environment))
        library.posix_spawn_file_actions_destroy(actions)
        if code:
            raise OSError(code, os.strerror(code), os.fsdecode(argv[0]))
        return pid.value

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.devnull)


class PopenSpawner:
    """The same by subprocess.Popen, for other C libraries."""

    def __call__(self, argv: Sequence[bytes], environment: Sequence[bytes], outputs: Sequence[int]) -> int:
        variables = dict(entry.split(b'=', 1) for entry in environment)
        process = subprocess.Popen(list(argv), env=variables, stdin=subprocess.DEVNULL, stdout=outputs[0], stderr=outputs[1],
                                   start_new_session=True)
        process.returncode = 0      # reaping is ours: Popen's destructor would take the child's status away
        return process.pid

    def close(self) -> None:
        """Nothing is held."""


def make_spawner() -> Callable[..., int]:
    """The fastest way to start a program that this system has."""
    try:
        return Spawner()
    except (AttributeError, OSError):
        return PopenSpawner()


class ProcessEnd(NamedTuple):
    """How a process ended."""
    return_code: int        # 128+n for a signal
    signal_number: int      # that ended it, or 0
    wall_s: float
    cpu_s: float            # of it and of the children that it waited for
    peak_memory_bytes: int  # of the largest of them; 0 if unknown
    at: float               # seconds since the epoch
    has_core: bool = False  # the kernel has written a core dump


class Stranger(NamedTuple):
    """A process that became our child when its parent ended."""
    environment: bytes
    suspects: Set[int]      # jobs that ran when it was first seen: it comes from one of them


class Process:
    """A started command. Held by the Launcher until nothing of it lives."""
    __slots__ = ('pid', 'mark', 'started_at', 'started', 'end', 'script', 'kill_at', 'is_swept', 'is_killed', 'give_up_at')

    def __init__(self, pid: int, mark: bytes, script: Optional[str]) -> None:
        self.pid = pid              # also the number of its session and group
        self.mark = mark            # as it stands in TORC_RUN_TAG
        self.started_at = time.time()
        self.started = time.monotonic()
        self.end: Optional[ProcessEnd] = None
        self.script = script        # file that holds a command too long for argv
        self.kill_at: Optional[float] = None    # monotonic; set by stop
        self.is_swept = False       # what it left behind was asked to end
        self.is_killed = False      # SIGKILL was sent
        self.give_up_at = math.inf  # monotonic; set with SIGKILL

    def close(self, status: int, usage: Any) -> None:
        """Note how it ended, from what wait4(2) told."""
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        code = 128 + number if number else os.WEXITSTATUS(status)
        # ru_maxrss counts KiB on Linux (getrusage(2)). It begins with the size that this process had when it started the
        # other (fs/exec.c, setmax_mm_hiwater_rss), so that for a smaller program it tells nothing.
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak = usage.ru_maxrss * 1024 if usage.ru_maxrss > own else 0
        self.end = ProcessEnd(
            code, number, time.monotonic() - self.started, usage.ru_utime + usage.ru_stime, peak, time.time(),
            bool(number and os.WCOREDUMP(status)))


def explain_end(end: ProcessEnd, stdout: Optional[str], stderr: Optional[str]) -> str:
    """Why a process failed: the signal that killed it, else its last line of output; '' if there is none."""
    line = read_last_line(stderr)
    if end.signal_number:
        core = ' (core dumped)' if end.has_core else ''
        return f'killed by {format_signal(end.signal_number)}{core}' + (f': {line}' if line else '')
    line = line or read_last_line(stdout)
    if not line and 128 < end.return_code <= 128 + 64:      # as a shell reports a child killed by a signal
        return f'killed by {format_signal(end.return_code - 128)}, judging by its return code'
    return line


# -------- the guardian --------


class Guardian:
    """The child that outlives a runner by the time that it takes to clean up. `guard` is its life."""

    def __init__(self, runner: int, tag: bytes) -> None:
        self.runner = runner
        self.tag = tag                  # part of every mark
        self.jobs: Dict[int, int] = {}  # the runner's children, adopted ones too: pid -> start ticks
        self.foreign: Set[int] = {os.getpid()}      # its children that are no jobs

    def guard(self, pipe: int) -> None:
        """Keep track of what runs; when the runner dies without a farewell, kill it."""
        rest = b''
        while True:
            # Once a second: a daemon without mark and session is known only while it is the runner's child.
            ready, _, _ = select.select([pipe], [], [], GUARD_INTERVAL_S if self.jobs else None)
            data = os.read(pipe, 65536) if ready else None
            if data == b'':
                break
            rest += data or b''
            whole = len(rest) - len(rest) % GUARD_RECORD.size
            words = dict(GUARD_RECORD.iter_unpack(rest[:whole]))    # the last word on each pid counts
            if FAREWELL in words.values():
                return
            self.foreign.update(pid for pid, word in words.items() if word == FOREIGN)
            for pid in words:
                self.jobs.pop(pid, None)
            self.note(set(read_proc_children(self.runner)) - self.foreign)
            if not ready:
                self.note_descendants()
            rest = rest[whole:]
            time.sleep(SWEEP_INTERVAL_S)    # so that many short jobs wake it 20 times a second, not 2,000
        kill_orphans(self.jobs, self.tag)

    def note(self, pids: Set[int]) -> None:
        """Note the runner's children, those that it has started and those that it has adopted, while they can be told apart."""
        for pid in pids:
            row = None if pid in self.jobs else read_proc_row(pid)
            if row and row.parent == self.runner:
                self.jobs[pid] = row.start_ticks


    def note_descendants(self) -> None:
        """Note all that has come of the runner's children: of what hides its origin, this is the only trace."""
        self.jobs = {pid: ticks for pid, ticks in self.jobs.items() if read_process_start_ticks(pid) == ticks}
        queue = list(self.jobs)
        while queue:
            for pid in read_proc_children(queue.pop()):
                row = None if pid in self.jobs else read_proc_row(pid)
                if row:
                    self.jobs[pid] = row.start_ticks
                    queue.append(pid)


def kill_orphans(jobs: Dict[int, int], tag: bytes) -> None:
    """SIGKILL whatever is left of the jobs of a runner that is gone, until two looks in a row find nothing."""
    quiet, give_up_at = 0, time.monotonic() + UNKILLABLE_S
    for pid, ticks in jobs.items():
        signal_process(pid, ticks, signal.SIGKILL)
    # A session's number stays taken while it has members; if its leader is another process now, the session is another one.
    sessions = {pid for pid, ticks in jobs.items() if read_process_start_ticks(pid) in (0, ticks)}
    while quiet < 2 and time.monotonic() < give_up_at:
        family = find_family(sessions, (tag,))
        for pid, ticks in family.items():
            signal_process(pid, ticks, signal.SIGKILL)
        quiet = 0 if family else quiet + 1
        time.sleep(SWEEP_INTERVAL_S)


def close_descriptors(kept: int) -> None:
    """Point 0, 1, 2 to /dev/null and close all others but one."""
    devnull = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(devnull, number)
    try:
        numbers = [int(name) for name in os.listdir('/proc/self/fd')]
    except OSError:
        numbers = list(range(3, 1024))
    for number in numbers:
        if number > 2 and number != kept:
            try:
                os.close(number)
            except OSError:     # the one that listdir itself had open
                pass


def start_guardian(tag: bytes, foreign: Iterable[int] = ()) -> Tuple[int, int]:
    """Fork the guardian; its pid and the pipe to it. `foreign`: children that are no jobs."""
    runner = os.getpid()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(reader)
        os.set_blocking(writer, False)
        return pid, writer
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        close_descriptors(reader)
        guardian = Guardian(runner, tag)
        guardian.foreign.update(foreign)
        guardian.guard(reader)
    finally:
        os._exit(0)


# -------- all processes of a runner --------


class Launcher:
    """Starts, reaps and stops the processes of one runner. Not thread-safe: one loop owns it."""

    def __init__(self, script_directory: str) -> None:
        self.tag = secrets.token_hex(8)
        self.script_directory = script_directory
        self.shell = find_shell()
        self.spawn = make_spawner()
        self.running: Dict[int, Process] = {}
        self.sweeping: List[Process] = []           # ended, but something of them may live
        self.strangers: Dict[int, Stranger] = {}    # children that we did not start, by pid
        self.environment = {name: name + b'=' + value for name, value in os.environb.items() if os.fsdecode(name) not in SECRETS}
        self.outer_tag = os.environ.get(RUN_TAG, '')    # of a runner whose job we are: both must find our jobs
        self.next_sweep = math.inf
        self.seal_inherited_descriptors()
        self.guardian, self.pipe = start_guardian(self.tag.encode())
        self.become_subreaper(True)
        self.foreign: Set[int] = {self.guardian}    # never to be touched: children from before
        self.disown_strangers()

    @staticmethod
    def seal_inherited_descriptors() -> None:
        """Keep descriptors that came from our own parent out of the jobs: a lock held for ever is hard to find."""
        try:
            names = os.listdir('/proc/self/fd')
        except OSError:
            return
        for number in map(int, names):
            if number > 2:
                try:
                    os.set_inheritable(number, False)
                except OSError:     # the one that listdir itself had open
                    pass

    @staticmethod
    def become_subreaper(adopts: bool) -> None:
        """Adopt orphaned descendants from now on, or no longer, on Linux."""
        try:
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)
        except AttributeError:  # not Linux: what leaves its session is found by its mark alone
            pass

    def disown_strangers(self) -> None:
        """What is our child now and no job's is to be left alone: a server that was started through us."""
        for pid in read_proc_children(os.getpid()):
            if pid not in self.running and pid not in self.foreign and pid not in self.strangers:
                self.foreign.add(pid)
                self.tell_guardian(pid, FOREIGN)

    # ---- starting ----

    def start(self, command: str, variables: Dict[str, str], outputs: Sequence[int], name: str) -> Process:
        """Start a shell command with these variables over our own environment. `name` makes its mark unique.

        OSError if it cannot be started, ValueError if it cannot even be said to the system (NUL, lone surrogate).
        """
        mark = f'{self.tag}-{name};'
        entries = dict(self.environment)
        for key, value in ((encode_text(key), encode_text(value)) for key, value in variables.items()):
            if b'\0' in value or b'\0' in key or b'=' in key or not key:
                raise ValueError(f'variable {os.fsdecode(key)!r} cannot be passed to a process')
            entries[key] = key + b'=' + value
        entries[RUN_TAG.encode()] = encode_text(f'{RUN_TAG}={self.outer_tag}{mark}')
        argv, script = self.shell_words(command)
        try:
            pid = self.spawn(argv, list(entries.values()), outputs)
        except OSError:
            self.remove_script(script)
            raise
        process = self.running[pid] = Process(pid, mark.encode(), script)
        self.tell_guardian(pid, STARTED)
        return process

    def shell_words(self, command: str) -> Tuple[List[bytes], Optional[str]]:
        """argv for a command, and the file that holds it if it is too long for argv."""
        text = encode_text(command)
        if b'\0' in text:
            raise ValueError('the command contains a NUL character')
        if len(text) <= MAX_ARGUMENT_BYTES:
            return [encode_text(self.shell), b'-c', text], None
        descriptor, path = tempfile.mkstemp(prefix='.command_', suffix='.sh', dir=self.script_directory)
        with os.fdopen(descriptor, 'wb') as file:
            file.write(text + b'\n')
        return [encode_text(self.shell), encode_text(path)], path

    @staticmethod
    def remove_script(path: Optional[str]) -> None:
        """Remove the file of a long command."""
        if path:
            try:
                os.unlink(path)
            except OSError:     # somebody cleaned up before us
                pass

    def tell_guardian(self, pid: int, word: int) -> None:
        """Write a record to the guardian."""
        try:
            os.write(self.pipe, GUARD_RECORD.pack(pid, word))
        except BrokenPipeError:     # it was killed: another one takes its place, and sees our children by itself
            if word != FAREWELL:
                os.close(self.pipe)
                self.guardian, self.pipe = start_guardian(self.tag.encode(), self.foreign)
                self.foreign.add(self.guardian)
        except OSError:     # it is stuck: jobs go on without it
            pass

    # ---- reaping ----

    def poll(self) -> List[Process]:
        """Processes of which nothing lives any more, each once, with `end` set."""
        ended = [process for process in list(self.running.values()) if self.reap(process)]
        if ended or self.strangers:
            self.look_for_strangers(ended)
        done = []
        for process in ended:
            (self.sweeping if self.has_leftovers(process) else done).append(process)
        if self.sweeping:
            done += self.sweep()
        return done

    def reap(self, process: Process) -> bool:
        """Take a process's exit status, if it has one."""
        try:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        except ChildProcessError:   # SIGCHLD is ignored by whoever imports this file: the status is lost
            pid, status, usage = process.pid, signal.SIGKILL, resource.getrusage(resource.RUSAGE_SELF)
        if not pid:
            return False
        process.close(status, usage)
        del self.running[process.pid]
        self.tell_guardian(process.pid, ENDED)
        self.remove_script(process.script)
        return True

    def look_for_strangers(self, ended: Sequence[Process] = ()) -> None:
        """Reap adopted processes that have ended, and note those that are new."""
        for pid in list(self.strangers):
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:   # it was reaped at the last look
                pass
        pids = [pid for pid in read_proc_children(os.getpid()) if pid not in self.running and pid not in self.foreign]
        suspects = set(self.running).union(process.pid for process in ended)
        self.strangers = {pid: self.strangers.get(pid) or Stranger(read_proc_environ(pid), suspects) for pid in pids}
        self.kill_nameless()

    def kill_nameless(self) -> None:
        """Kill the adopted processes that hide their origin (no mark), once every job that they can be from has ended."""
        nameless = [pid for pid, stranger in self.strangers.items()
                    if self.tag.encode() not in stranger.environment and stranger.suspects.isdisjoint(self.running)]
        rows = {pid: read_proc_row(pid) for pid in nameless}
        sessions = {row.session for pid, row in rows.items() if row and row.session == pid}     # of its own making
        family = {pid: row.start_ticks for pid, row in rows.items() if row}
        family.update(find_family(sessions, ()) if sessions else {})
        self.signal_all(family, signal.SIGKILL)

    def has_leftovers(self, process: Process) -> bool:
        """Does anything of an ended process seem to live?"""
        if signal_group(process.pid, 0):
            return True
        return any(process.mark in stranger.environment for stranger in self.strangers.values())

    def sweep(self) -> List[Process]:
        """Signal what ended processes have left behind; those of which nothing is left, or that are given up."""
        now = time.monotonic()
        done = []
        for process in self.sweeping:
            family = find_family({process.pid}, (process.mark,))
            if not family or now >= process.give_up_at:
                done.append(process)
            elif not process.is_swept and not process.is_killed:
                process.is_swept = True
                process.kill_at = min(now + LEFTOVER_TERM_S, math.inf if process.kill_at is None else process.kill_at)
                self.signal_all(family, signal.SIGCONT, signal.SIGTERM)
            elif now >= process.kill_at or process.is_killed:
                self.note_kill(process, now)
                self.signal_all(family, signal.SIGKILL)
        self.sweeping = [process for process in self.sweeping if process not in done]
        self.next_sweep = now + SWEEP_INTERVAL_S if self.sweeping else math.inf
        return done

    @staticmethod
    def signal_all(family: Dict[int, int], *numbers: int) -> None:
        """Signal processes, each after a look at its start time."""
        for pid, ticks in family.items():
            for number in numbers:
                signal_process(pid, ticks, number)

    # ---- stopping ----

    def stop(self, process: Process, number: int, lead_s: float) -> None:
        """Continue a process group and ask it to end; SIGKILL follows after `lead_s` unless it has ended by then."""
        if process.end is None:
            signal_group(process.pid, signal.SIGCONT)
            signal_group(process.pid, number)
        process.kill_at = min(time.monotonic() + max(lead_s, 0), math.inf if process.kill_at is None else process.kill_at)

    def kill_due(self) -> List[Process]:
        """SIGKILL every stopped process whose time is over, with all of its family; those that were killed just now."""
        now = time.monotonic()
        due = [process for process in self.running.values()
               if process.kill_at is not None and now >= process.kill_at and not process.is_killed]
        if due:
            family = find_family({process.pid for process in due}, [process.mark for process in due])
            for process in due:
                self.note_kill(process, now)
                signal_group(process.pid, signal.SIGKILL)
            self.signal_all(family, signal.SIGKILL)
        return due

    @staticmethod
    def note_kill(process: Process, now: float) -> None:
        """SIGKILL is sent: from here on the wait is bounded."""
        if not process.is_killed:
            process.is_killed = True
            process.give_up_at = now + UNKILLABLE_S

    def give_up(self) -> List[Process]:
        """Processes that SIGKILL could not end (uninterruptible sleep), taken as ended."""
        now = time.monotonic()
        lost = [process for process in self.running.values() if now >= process.give_up_at]
        for process in lost:
            del self.running[process.pid]
            self.foreign.add(process.pid)
            process.end = ProcessEnd(128 + signal.SIGKILL, signal.SIGKILL, now - process.started, 0.0, 0, time.time())
        return lost

    def next_deadline(self) -> float:
        """When `kill_due`, `give_up` or `poll` has something to do even if no SIGCHLD comes (monotonic; may be infinite)."""
        times = [process.give_up_at if process.is_killed else process.kill_at
                 for process in self.running.values() if process.kill_at is not None]
        return min(times + [self.next_sweep])

    def close(self) -> None:
        """Kill what is left of anything started here, dismiss the guardian, give everything back."""
        for process in list(self.running.values()):
            self.stop(process, signal.SIGKILL, 0)
        self.look_for_strangers()
        if self.running or self.strangers or self.sweeping:
            kill_orphans({pid: 0 for pid in self.running}, self.tag.encode())
        self.kill_strangers()
        self.poll()
        self.dismiss_guardian()
        self.become_subreaper(False)
        self.spawn.close()

    def kill_strangers(self) -> None:
        """Kill adopted children until none is left: what they leave behind becomes our child in turn."""
        give_up_at = time.monotonic() + UNKILLABLE_S
        self.look_for_strangers()
        while self.strangers and time.monotonic() < give_up_at:
            rows = ((pid, read_proc_row(pid)) for pid in self.strangers)
            self.signal_all({pid: row.start_ticks for pid, row in rows if row}, signal.SIGKILL)
            time.sleep(0.005)       # SIGKILL takes effect when the process is next scheduled
            self.look_for_strangers()

    def dismiss_guardian(self) -> None:
        """Let the guardian go; one that does not listen is killed."""
        self.tell_guardian(0, FAREWELL)
        os.close(self.pipe)
        give_up_at = time.monotonic() + FAREWELL_WAIT_S
        try:
            while os.waitpid(self.guardian, os.WNOHANG)[0] == 0:
                if time.monotonic() > give_up_at:
                    os.kill(self.guardian, signal.SIGKILL)
                    os.waitpid(self.guardian, 0)
                    break
                time.sleep(0.002)
        except ChildProcessError:   # SIGCHLD is ignored by whoever imports this file
            pass


# ======== 16. Runner: a node at work ========
#
# One loop. Each turn, in the order of the page "Job Runners": reap what has ended; stop what must end; one request that
# carries ends and starts to the server and brings work back; start; wait. Rules of the loop:
#
# * Only two things block: the wait, which a child's exit or a signal ends at once, and one request to the server, which
#   has a deadline. Actions and recovery scripts are children like jobs.
# * The server decides who runs what; the ledger guards every start all the same, since jobs may be claimed ahead: short
#   ones for several rounds, so that starting the next never waits for an answer. What was claimed ahead and cannot
#   start within a second goes back.
# * Ends and starts are kept until the server has acknowledged them. It knows them by (job, run, attempt), so that
#   saying them twice does no harm. While it is silent children go on and are reaped; nothing new is started.
# * The runner leaves for one reason: the workflow is over, its time is over, a signal, or idleness. From then on it
#   claims nothing, waits for what it has, reports, and takes itself off the list of nodes.
#
# -------- options and outcome --------

BATCH_S = 0.05              # between two reports while there is work at hand
START_NEWS_S = 0.1          # until a start is reported that nothing else gives reason to report
AHEAD_S = 0.15              # so much work per slot is claimed ahead
MAX_ROUNDS_AHEAD = 64
STALE_AHEAD_S = 1.0         # jobs claimed ahead that could not start for so long go back
ANSWER_DEADLINE_S = 15.0
MAX_COMPLETIONS_PER_REQUEST = 500
IDLE_WAIT_S = 30.0          # the longest wait without children
LATE_ACTION_S = 120.0       # after a local end an action that is not yet triggered may still come
CANCEL_LEAD_S = 2.0         # from SIGTERM to SIGKILL when the workflow is canceled
FAREWELL_S = 10.0           # an interrupted runner tries so long to report to a silent server
READ_DEADLINE_S = 5.0       # for an answer that has begun to come
RECONNECT_S = 1.0           # a silent server is looked for so long at a time: children wait meanwhile
RETRY_FIRST_S = 0.1
RETRY_MAX_S = 30.0
SIGNAL_REASONS = ('interrupt', 'deadline', 'cancel')    # why jobs are stopped


class RunnerOptions(NamedTuple):
    """How a node works. None: measured."""
    output_dir: str = DEFAULT_OUTPUT_DIR
    poll_interval_s: float = DEFAULT_POLL_INTERVAL_S
    num_cpus: Optional[int] = None
    memory_gb: Optional[float] = None
    num_gpus: Optional[int] = None
    max_parallel_jobs: Optional[int] = None     # given: queue strategy
    end_time: Optional[float] = None            # seconds since the epoch
    labels: Sequence[str] = ()
    is_persistent: bool = False
    claim_backoff_max_s: float = DEFAULT_CLAIM_BACKOFF_MAX_S
    log_level: str = 'info'


class RunOutcome(NamedTuple):
    """What a runner did."""
    completed: int
    failed: int             # pending_failed ones too
    terminated: int
    canceled: int
    failed_jobs: List[Tuple[int, str, int, str]]    # job id, name, return code, reason
    is_complete: bool
    is_canceled: bool
    interrupted_by: Optional[int]   # signal number
    reason: str             # why the runner left
    wall_s: float
    jobs_by_status: Dict[str, int] = {}     # of the whole workflow, as last seen


class NodeSize(NamedTuple):
    """What a node has to give."""
    num_cpus: int
    memory_bytes: int
    devices: Tuple[str, ...]    # GPUs, as CUDA_VISIBLE_DEVICES names them


# -------- the owner of an output directory --------
#
# Output files are named by ids, which begin at 1 in every database: two databases would overwrite each
# other's files. So an output directory belongs to one database. Records .torc_database.1, .2, ... name it,
# and the last one counts: number N+1 is made when the database of number N no longer exists, with link(2), so
# that exactly one of several runners succeeds, also over NFS. They hold no secret and are readable for
# whoever may read the directory, since runners of several users of a server share it. A directory without a
# record belongs to the first runner that comes.

def output_record_path(directory: str, number: int) -> str:
    """Path of a record of an output directory's database."""
    return os.path.join(directory, f'.torc_database.{number}')


def read_output_record(directory: str) -> Tuple[int, Dict[str, Any]]:
    """Number and content of the record that counts in an output directory; (0, {}) if there is none."""
    number, found = 0, {}   # type: int, Dict[str, Any]
    while True:
        path = output_record_path(directory, number + 1)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, encoding='utf-8') as file:
                found = parse_json(file.read(65536))
            if [type(found[key]) for key in ('id', 'path', 'host')] != [str] * 3:
                raise ValueError
        except (FileNotFoundError, NotADirectoryError):
            return number, found
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = getattr(error, 'strerror', None) or 'damaged'
            raise Denied(f'{path}, which names the database of this output directory, cannot be read '
                         f'({reason}): remove it, or give another directory with -o DIR') from None
        number += 1


def locate_database(directory: str, database: Dict[str, Any]) -> Dict[str, Any]:
    """What a record says of a database. A path below the directory is relative: both may be moved."""
    base, path = os.path.realpath(directory) + os.sep, os.path.realpath(database['path'])
    is_inside = path.startswith(base) and (database['host'] == socket.gethostname() or is_network_path(path))
    return dict(database, path=path[len(base):] if is_inside else path)


def is_database_gone(directory: str, record: Dict[str, Any], ours: Dict[str, Any]) -> bool:
    """Whether this host can tell that the database of a record was removed, or replaced by ours."""
    path = os.path.join(directory, record['path'])
    is_shared = not os.path.isabs(record['path']) or is_network_path(path)      # the same file for all hosts
    if record['path'] == ours['path'] and (is_shared or record['host'] == ours['host']):
        return True
    return (is_shared or record['host'] == socket.gethostname()) and is_deleted(path)


def refuse_foreign_output(directory: str, record: Dict[str, Any], ours: Dict[str, Any]) -> None:
    """Refused if the files of an output directory are another database's."""
    if record.get('id', ours['id']) == ours['id']:
        return
    theirs, own = os.path.abspath(os.path.join(directory, record['path'])), ours['path']
    if record['host'] != ours['host']:
        theirs, own = f"{theirs} on host {record['host']}", f"{own} on host {ours['host']}"
    raise Refused(f'the output directory {directory} belongs to another database, {theirs}; '
                  f'this one is {own}: give another directory with -o DIR')


def take_output_dir(directory: str, database: Dict[str, Any]) -> str:
    """Make a database the owner of an output directory. Path of the former owner if that is gone, else ''."""
    mode = 0o600 | os.stat(directory).st_mode & 0o044
    while True:
        number, record = read_output_record(directory)
        ours = locate_database(directory, database)
        if record == ours:
            return ''
        is_ours = record.get('id') == ours['id']    # it was moved, or is served from another host
        if record and not is_ours and not is_database_gone(directory, record, ours):
            refuse_foreign_output(directory, record, database)
        path = output_record_path(directory, number if is_ours else number + 1)
        with contextlib.suppress(FileExistsError):      # another runner was faster: look again
            write_atomically(path, format_json(ours).encode(), mode, not is_ours)
            if record and not is_ours:
                return os.path.abspath(os.path.join(directory, record['path']))


# -------- a node's size --------

def measure_node(options: RunnerOptions) -> NodeSize:
    """This node's size, where the options do not say otherwise."""
    if options.num_cpus is not None:
        num_cpus = options.num_cpus
    elif hasattr(os, 'sched_getaffinity'):
        num_cpus = len(os.sched_getaffinity(0))
    else:
        num_cpus = os.cpu_count() or 1
    if options.memory_gb is not None:
        memory_bytes = int(options.memory_gb * 1024 ** 3)
    else:
        memory_bytes = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    return NodeSize(num_cpus, memory_bytes, visible_devices(options.num_gpus))


def visible_devices(num_gpus: Optional[int]) -> Tuple[str, ...]:
    """GPUs that may be used: those of CUDA_VISIBLE_DEVICES, else numbers from 0."""
    words = [word.strip() for word in os.environ.get('CUDA_VISIBLE_DEVICES', '').split(',')]
    visible = [word for word in words if word and word not in ('-1', 'NoDevFiles')]
    if not visible:
        count = len(glob.glob('/dev/nvidia[0-9]*')) if num_gpus is None else num_gpus
        visible = [str(number) for number in range(count)]
    return tuple(visible if num_gpus is None else visible[:num_gpus])


# -------- the ledger --------


class Grant(NamedTuple):
    """What a running job holds."""
    num_cpus: int
    memory_bytes: int
    devices: Tuple[str, ...]
    owned: Tuple[str, ...]      # of the devices, those that nobody else has


class Ledger:
    """CPUs, memory and GPUs of this node, and who holds them. GPUs are handed out least recently used first."""

    def __init__(self, size: NodeSize, max_jobs: Optional[int]) -> None:
        self.size = size
        self.max_jobs = max_jobs        # given: only jobs are counted
        self.num_cpus = size.num_cpus
        self.memory_bytes = size.memory_bytes
        self.devices = collections.deque(size.devices)
        self.num_jobs = 0
        self.shared = 0                 # counts GPUs handed out twice, for the queue strategy

    @property
    def slots(self) -> int:
        """How many of the smallest jobs run at once."""
        return self.size.num_cpus if self.max_jobs is None else self.max_jobs

    @property
    def is_full(self) -> bool:
        """Whether nothing at all can start."""
        return self.num_cpus <= 0 if self.max_jobs is None else self.num_jobs >= self.max_jobs

    def take(self, kind: Dict[str, Any]) -> Optional[Grant]:
        """Room for a job of a kind, or None."""
        if self.is_full:
            return None
        if self.max_jobs is not None:
            self.num_jobs += 1
            return Grant(0, 0, *self.take_devices(kind['num_gpus']))
        # The implicit requirements are a placeholder: one CPU, no limit of memory.
        memory_bytes = 0 if kind.get('is_implicit') else kind['memory_bytes']
        if kind['num_cpus'] > self.num_cpus or memory_bytes > self.memory_bytes or kind['num_gpus'] > len(self.devices):
            return None
        self.num_jobs += 1
        self.num_cpus -= kind['num_cpus']
        self.memory_bytes -= memory_bytes
        return Grant(kind['num_cpus'], memory_bytes, *self.take_devices(kind['num_gpus']))

    def take_devices(self, wanted: int) -> Tuple[Tuple[str, ...], Tuple[str, ...]]:
        """GPUs for a job, and which of them are its own: with too few free, all of them are shared in turn."""
        if wanted <= len(self.devices):
            owned = tuple(self.devices.popleft() for _ in range(wanted))
            return owned, owned
        pool = self.size.devices
        chosen = tuple(pool[(self.shared + place) % len(pool)] for place in range(min(wanted, len(pool))))
        self.shared += len(chosen)
        return chosen, ()

    def release(self, grant: Grant) -> None:
        """A job has ended."""
        self.num_jobs -= 1
        self.num_cpus += grant.num_cpus
        self.memory_bytes += grant.memory_bytes
        self.devices.extend(grant.owned)


# -------- wake-ups and the log --------


class Wakeup:
    """The only wait. SIGCHLD, SIGINT, SIGTERM and SIGHUP end it; their handlers do nothing (signal.set_wakeup_fd).

    Needs the main thread. What was set before is set again by `close`.
    """

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self.writer, False)
        self.old_descriptor = signal.set_wakeup_fd(self.writer)
        self.old_handlers = {}      # type: Dict[int, Any]
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup and `&` in a script ask for these to be ignored; SIGCHLD is ours in any case.
            if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
                self.old_handlers[number] = signal.signal(number, lambda *_: None)
        # Launchers such as srun may start us with signals blocked.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.old_handlers)

    @staticmethod
    def readable(numbers: Sequence[int], timeout_s: float) -> Set[int]:
        """Those of the descriptors from which something can be read, once there is one or the time is over."""
        poll = select.poll()    # select() knows no descriptors from 1024 on
        for number in numbers:
            poll.register(number, select.POLLIN)
        return {number for number, _ in poll.poll(math.ceil(timeout_s * 1000))}

    def has_answer(self, pending: Pending) -> bool:
        """Whether the answer to a request is there, or will never be."""
        return pending.fileno() < 0 or bool(self.readable([pending.fileno()], 0))

    def wait(self, timeout_s: float, pending: Optional[Pending] = None) -> List[int]:
        """Wait for a signal, the answer to a request, or the timeout; which signals came."""
        number = -1 if pending is None else pending.fileno()
        timeout_s = 0 if pending is not None and number < 0 else timeout_s
        if self.reader not in self.readable([self.reader, number] if number >= 0 else [self.reader], timeout_s):
            return []
        try:
            return list(os.read(self.reader, 65536))
        except BlockingIOError:
            return []

    def close(self) -> None:
        """Leave signals as they were."""
        signal.set_wakeup_fd(self.old_descriptor)
        for number, handler in self.old_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        os.close(self.reader)
        os.close(self.writer)


class RunLog:
    """The runner's own log: lines 'TIME LEVEL Message key=value', written once a turn."""
    LEVELS = ('debug', 'info', 'warning', 'error')

    def __init__(self, path: str, level: str) -> None:
        self.lines = []     # type: List[str]
        self.least = self.LEVELS.index(level) if level in self.LEVELS else 1
        self.descriptor = open_new_private(path, os.O_WRONLY | os.O_APPEND)

    def write(self, message: str, level: str = 'info', **values: Any) -> None:
        """Add a line; values that are None are left out."""
        if self.LEVELS.index(level) >= self.least:
            words = ''.join(f' {key}={value}' for key, value in values.items() if value is not None)
            self.lines.append(f'{format_time(time.time())} {level.upper()} {printable(message + words)}\n')

    def flush(self) -> None:
        """Write what has gathered. A full disk costs the lines, not the runner."""
        if self.lines:
            text, self.lines = ''.join(self.lines), []
            try:
                os.write(self.descriptor, text.encode('utf-8', 'replace'))
            except OSError:     # nobody could be told
                pass

    def close(self) -> None:
        """Write the rest and close."""
        self.flush()
        os.close(self.descriptor)


# -------- one job --------


class Task:
    """One attempt of a job in this runner's hands, from claim to acknowledged end."""
    __slots__ = ('id', 'name', 'attempt_id', 'job', 'kind', 'rules', 'grant', 'stdout', 'stderr',
                 'deletes_stdio', 'process', 'stopped_for', 'completion', 'reason')

    def __init__(self, job: Dict[str, Any], kind: Dict[str, Any], rules: Sequence[Dict[str, Any]]) -> None:
        self.id = job['id']             # type: int
        self.name = job['name']         # type: str
        self.attempt_id = job['attempt_id']     # type: int
        self.job = job
        self.kind = kind
        self.rules = rules              # of its failure handler
        self.grant = None               # type: Optional[Grant]
        self.stdout = None              # type: Optional[str]
        self.stderr = None              # type: Optional[str]
        self.deletes_stdio = False      # after success
        self.process = None             # type: Optional[Process]
        self.stopped_for = ''           # '' or one of SIGNAL_REASONS
        self.completion = {}            # type: Dict[str, Any]
        self.reason = ''                # of a failure

    @property
    def key(self) -> List[int]:
        """What the server knows this attempt by, within the run."""
        return [self.id, self.attempt_id]


def open_outputs(task: Task, stem: Sequence[Any], config: Dict[str, Any], outputs: List[int]) -> None:
    """Open a job's output files into `outputs`, by its stdio mode. `stem` is output directory, workflow and run."""
    own = (config['job_stdio_overrides'] or {}).get(task.name)      # as in Torc it inherits nothing
    stdio = dict(EXECUTION_DEFAULTS['stdio'], **((config['stdio'] or {}) if own is None else own))
    directory, workflow_id, run_id = stem
    task.deletes_stdio = bool(stdio.get('delete_on_success'))
    task.stdout, task.stderr = stdio_paths(directory, workflow_id, task.id, run_id, task.attempt_id, stdio['mode'])
    outputs.append(open_output(task.stdout))
    outputs.append(outputs[0] if task.stderr is not None and task.stderr == task.stdout else open_output(task.stderr))


def job_variables(task: Task, common: Dict[str, str]) -> Dict[str, str]:
    """A job's environment over the runner's: its own, its GPUs, and ours; later ones win."""
    return {**(task.job['env'] or {}), **gpu_environment(task.grant.devices), **common, 'TORC_JOB_ID': str(task.id),
            'TORC_JOB_NAME': task.name, 'TORC_ATTEMPT_ID': str(task.attempt_id)}


def common_variables(client: Any, workflow: Dict[str, Any], output_dir: str) -> Dict[str, str]:
    """Environment that every child gets. The token itself never: only where it lies."""
    variables = {'TORC_WORKFLOW_ID': workflow['id'], 'TORC_RUN_ID': workflow.get('run_id') or 0, 'TORC_OUTPUT_DIR': output_dir,
                 'TORC_WORKFLOW_SUBMISSION_DIR': workflow.get('submission_directory'), 'TORC_API_URL': client.url,
                 'TORC_TOKEN_FILE': client.token_file,
                 'TORC_TLS_CA_CERT': client.trust.ca_file and os.path.abspath(client.trust.ca_file),
                 'TORC_TLS_INSECURE': '1' if client.trust.is_insecure else ''}
    return {name: str(value) for name, value in variables.items() if value not in (None, '')}


class Verdict(NamedTuple):
    """What an end means."""
    status: str
    return_code: int
    message: str = ''


def judge_end(end: ProcessEnd, stopped_for: str, sent_signal: int, timeout_exit_code: int,
              interrupted_by: Optional[int] = None) -> Verdict:
    """Status and return code of an attempt, before its output files are looked at."""
    if stopped_for == 'cancel':
        return Verdict('canceled', end.return_code, 'the workflow was canceled')
    if end.return_code == 0:
        return Verdict('completed', 0)
    if stopped_for == 'deadline':
        # A code of its own, such as a checkpoint's, is told; dying of what was sent is a timeout.
        is_own = not end.signal_number and end.return_code != 128 + sent_signal
        return Verdict('terminated', end.return_code if is_own else timeout_exit_code, "stopped: the runner's time is over")
    if stopped_for:
        cause = f' by {signal.Signals(interrupted_by).name}' if interrupted_by else ''
        return Verdict('terminated', end.return_code, f'stopped: the runner was interrupted{cause}')
    return Verdict('failed', end.return_code)


def stat_outputs(outputs: Sequence[Sequence[Any]]) -> Tuple[Dict[str, float], List[str]]:
    """Modification times of declared output files, and the paths of those that are missing."""
    times, missing = {}, []
    for file_id, path in outputs:
        try:
            times[str(file_id)] = os.stat(path).st_mtime
        except (OSError, ValueError):   # ValueError: a NUL in the path
            missing.append(path)
    return times, missing


def is_disk_full(path: str) -> bool:
    """Whether nothing more can be written where a path lies."""
    try:
        found = os.statvfs(path)
    except OSError:     # it is gone altogether; the reason of a failure is told otherwise
        return False
    return found.f_bavail * found.f_frsize < 65536


def find_rule(rules: Sequence[Dict[str, Any]], return_code: int) -> Optional[Dict[str, Any]]:
    """A failure handler's rule for a return code: the first that names it, else the first that matches all."""
    for rule in rules:
        if return_code in (rule.get('exit_codes') or ()):
            return rule
    return next((rule for rule in rules if rule.get('match_all_exit_codes')), None)


# -------- words with the server --------


class Link:
    """What this runner has to tell the server, kept until it is acknowledged, and how long the server has been silent."""

    def __init__(self, client: Any, workflow_id: int, run_id: int, node_id: int) -> None:
        self.client = client
        self.workflow_id = workflow_id
        self.address = {'compute_node_id': node_id, 'run_id': run_id}
        self.completions = []       # type: List[Dict[str, Any]]
        self.started = []           # type: List[List[Any]]
        self.returned = []          # type: List[List[int]]
        self.action_results = []    # type: List[Dict[str, Any]]
        self.silent_since = None    # type: Optional[float]
        self.error = ''
        self.retry_s = RETRY_FIRST_S
        self.is_doubtful = False    # an answer was lost, with what it may have brought
        self.pending = None         # type: Optional[Pending]
        self.sent = {}              # type: Dict[str, List[Any]]

    @property
    def has_news(self) -> bool:
        """Whether there is something to tell, or a word is still out."""
        return bool(self.pending or self.completions or self.started or self.returned or self.action_results)

    def news(self) -> Dict[str, List[Any]]:
        """What a request carries of it."""
        return {'completions': self.completions[:MAX_COMPLETIONS_PER_REQUEST], 'started': self.started[:], 'returned': self.returned[:],
                'action_results': self.action_results[:]}

    def begin(self, request: Dict[str, Any], held: Callable[[], Dict[str, Any]]) -> None:
        """Send one runner_sync with all news. The children need us: the answer is fetched when it is there."""
        self.sent = self.news()
        body = dict(self.address, **self.sent, **request)
        if self.is_doubtful:
            body.update(held())
        try:
            self.pending = self.client.begin('runner_sync', body, RECONNECT_S, workflow_id=self.workflow_id)
        except Unreachable as error:
            self.on_silence(error)

    def finish(self, deadline_s: float) -> Optional[Dict[str, Any]]:
        """The answer, or None if none came in time. Other TorcErrors pass."""
        pending, self.pending = self.pending, None
        try:
            answer = pending.finish(deadline_s)
        except Unreachable as error:
            self.on_silence(error)
            return None
        self.silent_since, self.is_doubtful, self.retry_s = None, False, RETRY_FIRST_S
        for name, items in self.sent.items():
            del getattr(self, name)[:len(items)]    # what came up meanwhile stays
        return answer

    def on_silence(self, error: Unreachable) -> None:
        """Note it, and wake a server of our own that has died."""
        self.is_doubtful = True
        self.error = error.message
        if self.silent_since is None:
            self.silent_since = time.monotonic()
        else:
            self.retry_s = min(2 * self.retry_s, RETRY_MAX_S)
        try:
            self.client.reconnect(RECONNECT_S)
        except (Unreachable, Conflict) as again:
            self.error = again.message


# -------- actions --------


class Actions:
    """run_commands actions: one command at a time as a child of the loop, each action up to its first failure."""

    def __init__(self, runner: 'Runner') -> None:
        self.runner = runner
        self.queue = collections.deque()    # type: collections.deque
        self.current = None                 # type: Optional[Dict[str, Any]]
        self.place = 0                      # of the command in the current action

    @property
    def is_busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self.current or self.queue)

    def ids(self) -> List[int]:
        """Actions in hand."""
        return [action['id'] for action in ([self.current] if self.current else []) + list(self.queue)]

    def add(self, actions: Sequence[Dict[str, Any]]) -> None:
        """Take claimed actions and begin."""
        self.queue.extend(actions)
        if self.current is None:
            self.start_next()

    def start_next(self) -> None:
        """Begin the next action, if there is one."""
        if self.queue:
            self.current, self.place = self.queue.popleft(), 0
            self.runner.log.write('Action started', action_id=self.current['id'], trigger_type=self.current['trigger_type'])
            self.start_command()

    def start_command(self) -> None:
        """Start the current command, or finish the action behind the last one."""
        commands = self.current['action_config'].get('commands') or ()
        if self.place >= len(commands):
            self.finish(True, f'{len(commands)} commands completed')
            return
        try:
            self.runner.start_script(f'cd -- "$TORC_OUTPUT_DIR" || exit 1\n{commands[self.place]}', self.runner.variables,
                                     'actions', f"a{self.current['id']}-{self.place}", self.on_command_end)
        except (OSError, ValueError) as error:
            self.finish(False, f'command {self.place + 1} cannot be started: {error}')

    def on_command_end(self, process: Process) -> None:
        """The next command, unless this one failed."""
        command = self.current['action_config']['commands'][self.place]
        if process.end.return_code:
            self.finish(False, f'command {self.place + 1} ended with return code {process.end.return_code}: {command}')
        else:
            self.place += 1
            self.start_command()

    def finish(self, success: bool, message: str) -> None:
        """Report the current action and go on with the next."""
        action, self.current = self.current, None
        runner = self.runner
        runner.link.action_results.append({'action_id': action['id'], 'success': success, 'message': message})
        runner.log.write(f"Action {'completed' if success else 'failed'}: {message}", 'info' if success else 'error', action_id=action['id'])
        if not success:
            runner.progress.on_message(printable(f"action {action['id']} ({action['trigger_type']}): {message}"))
        runner.report_soon(0)
        self.start_next()


# -------- ends --------


class Ends:
    """Ends of jobs on their way to the server, and what came of them."""

    def __init__(self, runner: 'Runner') -> None:
        self.runner = runner
        self.unreported = {}    # type: Dict[Tuple[int, int], Task]
        self.counts = collections.Counter()     # type: collections.Counter
        self.failed_jobs = []   # type: List[Tuple[int, str, int, str]]

    def report(self, task: Task, end: ProcessEnd, verdict: Verdict, file_times: Dict[str, float]) -> None:
        """Make the completion; where a failure handler wants another attempt, its recovery script runs first."""
        task.completion = completion = {
            'job_id': task.id, 'attempt_id': task.attempt_id, 'return_code': verdict.return_code, 'status': verdict.status,
            'exec_time_minutes': end.wall_s / 60, 'completion_time': format_time(end.at), 'retry': False}
        self.unreported[task.id, task.attempt_id] = task
        if end.peak_memory_bytes:
            completion['peak_memory_bytes'] = end.peak_memory_bytes
        if end.wall_s > 0:
            completion['avg_cpu_percent'] = end.cpu_s / end.wall_s * 100
        if file_times:
            completion['file_times'] = file_times
        if verdict.status != 'completed':
            task.reason = printable(verdict.message) or explain_end(end, task.stdout, task.stderr)
            completion['reason'] = task.reason
        if verdict.status == 'terminated' and task.stopped_for == 'interrupt':
            completion['interrupted'] = True
        if verdict.status in ('failed', 'terminated'):
            if task.stopped_for in ('', 'deadline') and self.tries_again(task):
                return
        self.queue(task)

    def tries_again(self, task: Task) -> bool:
        """Consult the failure handler. True if a recovery script was started, which will go on with the completion."""
        completion = task.completion
        rule = find_rule(task.rules, completion['return_code'])
        if rule is None:
            if self.runner.setting('use_pending_failed'):
                completion['status'] = 'pending_failed'
            return False
        max_retries = DEFAULT_MAX_RETRIES if rule.get('max_retries') is None else rule['max_retries']
        if task.attempt_id - task.job['interruptions'] >= max_retries:
            return False
        completion.update(retry=True, max_retries=max_retries)
        return bool(rule.get('recovery_script')) and self.start_recovery(task, rule['recovery_script'])

    def start_recovery(self, task: Task, script: str) -> bool:
        """Start a recovery script; one that cannot be started vetoes the retry."""
        variables = dict(self.runner.variables, TORC_JOB_ID=str(task.id), TORC_JOB_NAME=task.name,
                         TORC_ATTEMPT_ID=str(task.attempt_id), TORC_RETURN_CODE=str(task.completion['return_code']))

        def on_recovery_end(process: Process) -> None:
            if process.end.return_code:
                self.veto_retry(task, f'the recovery script ended with return code {process.end.return_code}')
            self.queue(task)
        try:
            self.runner.start_script(script, variables, 'recovery', f'{task.id}-{task.attempt_id}-recovery', on_recovery_end)
        except (OSError, ValueError) as error:
            self.veto_retry(task, f'the recovery script cannot be started: {error}')
            return False
        return True

    def veto_retry(self, task: Task, reason: str) -> None:
        """No further attempt, for this reason."""
        task.reason = '; '.join(filter(None, (task.reason, printable(reason))))
        task.completion.update(retry=False, reason=task.reason)
        self.runner.log.write(f'No retry: {reason}', 'warning', **self.names(task))

    def queue(self, task: Task) -> None:
        """Let the next request tell this end: at once where slots would stay empty, else with those that follow."""
        runner, completion = self.runner, task.completion
        runner.link.completions.append(completion)
        runner.log.write('Job completed', **self.names(task), return_code=completion['return_code'], status=completion['status'],
                         exec_time_s=f"{completion['exec_time_minutes'] * 60:.3f}",
                         reason=completion.get('reason'))
        has_work = len(runner.appetite.backlog) >= runner.ledger.slots
        runner.report_soon(max(0.0, runner.sent_at + BATCH_S - time.monotonic()) if has_work else 0.0)

    def names(self, task: Task) -> Dict[str, int]:
        """An attempt, as log lines name it."""
        return {'workflow_id': self.runner.workflow_id, 'job_id': task.id, 'run_id': self.runner.run_id, 'attempt_id': task.attempt_id}

    def on_answer(self, answer: Dict[str, Any]) -> None:
        """The server has taken ends in, or refused them."""
        for job_id, attempt_id, status in answer['accepted']:
            task = self.unreported.pop((job_id, attempt_id), None)
            if task is not None:
                self.on_accepted(task, status)
        for error in answer['errors']:
            self.unreported.pop((error['job_id'], error['attempt_id']), None)
            self.runner.log.write(f"Completion refused: {error['message']}", 'warning', job_id=error['job_id'])

    def on_accepted(self, task: Task, status: str) -> None:
        """Now it counts."""
        if status == 'ready':
            self.counts['terminated'] += bool(task.completion.get('interrupted'))
            self.runner.log.write('Job retried', **self.names(task), new_attempt_id=task.attempt_id + 1)
            return
        self.counts['failed' if status == 'pending_failed' else status] += 1
        if status == 'completed':
            if task.deletes_stdio:
                remove_files(task.stdout, task.stderr)
        elif status != 'canceled':
            code = task.completion['return_code']
            self.failed_jobs.append((task.id, task.name, code, task.reason))
            self.runner.progress.on_failed_job(task.name, code, task.reason)


def remove_files(*paths: Optional[str]) -> None:
    """Remove files that may be gone already."""
    for path in set(paths) - {None}:
        try:
            os.unlink(path)
        except OSError:     # by somebody else
            pass


# -------- claiming --------


class Appetite:
    """How much work to ask for: what is free, or several rounds ahead while jobs are short."""

    def __init__(self, options: RunnerOptions, ledger: Ledger, min_time_s: float) -> None:
        self.options = options
        self.ledger = ledger
        self.min_time_s = min_time_s    # the queue strategy claims nothing when less is left
        self.mean_s = math.inf          # recent run time of a job
        self.backlog = collections.deque()  # type: collections.deque
        self.moved_at = 0.0             # when something was last put into or taken out of the backlog
        self.not_before = 0.0           # the node is exhausted until then
        self.pause_s = 1.0

    def note_end(self, wall_s: float) -> None:
        """Learn from a job's run time."""
        self.mean_s = wall_s if math.isinf(self.mean_s) else 0.8 * self.mean_s + 0.2 * wall_s

    def note_exhaustion(self) -> None:
        """The node could not start a process: try again later, and later each time."""
        self.not_before = time.monotonic() + self.pause_s
        self.pause_s = min(2 * self.pause_s, 60.0)

    def rounds(self) -> int:
        """How many jobs per slot to have at hand; 1 is no more than can start now."""
        return max(1, min(int(AHEAD_S / max(self.mean_s, 1e-6)), MAX_ROUNDS_AHEAD))

    def want(self, remaining_s: float) -> Optional[Dict[str, Any]]:
        """The `want` of a runner_sync, or None."""
        if time.monotonic() < self.not_before:
            return None
        if self.ledger.max_jobs is not None:
            return self.want_by_queue(remaining_s)
        rounds, ledger = self.rounds(), self.ledger
        if rounds == 1 and (self.backlog or ledger.is_full):
            return None
        # Ahead: whole rounds of the node's full size, since the running jobs will have ended by then.
        size = (ledger.size.num_cpus, ledger.size.memory_bytes, len(ledger.size.devices))
        free = size if rounds > 1 else (ledger.num_cpus, ledger.memory_bytes, len(ledger.devices))
        limit = rounds * size[0] - len(self.backlog) if rounds > 1 else free[0]
        if limit <= (rounds * size[0]) // 2 and rounds > 1 or limit <= 0:
            return None
        want = {'strategy': 'resources', 'limit': limit, 'depth': rounds, 'num_nodes': 1, 'labels': list(self.options.labels) or None,
                'time_limit': None, 'scheduler_config_id': None, 'strict': False, 'total': self.capacity(size)}
        want.update(self.capacity(free))
        if not math.isinf(remaining_s):
            want['time_limit'] = format_duration(max(60, remaining_s + CLAIM_GRACE_S))
        return want

    @staticmethod
    def capacity(values: Sequence[int]) -> Dict[str, Any]:
        """CPUs, memory and GPUs as a request states them."""
        return {'num_cpus': values[0], 'memory_gb': values[1] / 1024 ** 3, 'num_gpus': values[2]}

    def is_too_late(self, remaining_s: float) -> bool:
        """Whether nothing more will be claimed, because too little time is left."""
        return self.ledger.max_jobs is not None and remaining_s < self.min_time_s

    def want_by_queue(self, remaining_s: float) -> Optional[Dict[str, Any]]:
        """The same for the queue strategy."""
        limit = self.rounds() * self.ledger.max_jobs - self.ledger.num_jobs - len(self.backlog)
        least = max(1, self.ledger.max_jobs * (self.rounds() - 1) // 2)
        if self.is_too_late(remaining_s) or limit < least:
            return None
        return {'strategy': 'queue', 'limit': limit, 'labels': list(self.options.labels) or None}

    def add(self, tasks: Sequence[Task]) -> None:
        """Claimed jobs, in the server's order."""
        self.backlog.extend(tasks)
        self.moved_at = time.monotonic()

    def startable(self) -> Iterator[Task]:
        """Take from the backlog what there is room for, in order; larger jobs do not hold up smaller ones behind them."""
        passed = []
        try:
            while self.backlog and not self.ledger.is_full:
                task = self.backlog.popleft()
                task.grant = self.ledger.take(task.kind)
                if task.grant is None:
                    passed.append(task)
                    continue
                self.moved_at = time.monotonic()
                yield task
        finally:    # the caller may stop asking
            self.backlog.extendleft(reversed(passed))

    def drop(self) -> List[Task]:
        """Everything in the backlog, to be given back."""
        dropped = list(self.backlog)
        self.backlog.clear()
        return dropped

    def drop_stale(self) -> List[Task]:
        """What was claimed ahead of jobs that turn out to be long."""
        if not self.backlog or time.monotonic() < self.moved_at + STALE_AHEAD_S:
            return []
        self.mean_s = max(self.mean_s, STALE_AHEAD_S)
        return self.drop()


# -------- the loop --------


class Runner:
    """One node's work for one workflow. `run` is its whole life."""

    def __init__(self, client: Any, workflow_id: int, options: RunnerOptions, progress: Any) -> None:
        self.client = client
        self.servers_spared = client.servers_started    # those from before are not our children
        self.workflow_id = workflow_id
        self.options = options
        self.progress = progress
        self.began = time.monotonic()
        self.output_dir = os.path.abspath(options.output_dir)
        self.workflow = client.call('get_workflow', workflow_id=workflow_id)    # type: Dict[str, Any]
        self.run_id = self.workflow.get('run_id') or 0      # type: int
        self.config = execution_settings(self.workflow)
        check_execution_mode(self.config['mode'])
        self.stop_signal = parse_signal(self.config['termination_signal'])
        self.ledger = Ledger(measure_node(options), options.max_parallel_jobs)
        self.appetite = Appetite(options, self.ledger, self.setting('compute_node_min_time_for_new_jobs_seconds'))
        self.tasks = {}             # type: Dict[Process, Task]
        self.owners = {}            # type: Dict[Process, Callable[[Process], None]]
        self.ends = Ends(self)
        self.variables = {}         # type: Dict[str, str]
        self.answer = {'is_complete': False, 'is_canceled': False, 'unfinished': 0,
                       'jobs_by_status': {}}    # type: Dict[str, Any]
        self.answers = 0
        self.told = set()           # type: Set[str]  # why jobs cannot run here, as said, without its numbers
        self.has_survey = False     # the server has said which jobs will never run here
        self.leaving = ''           # why, once it is decided
        self.triggers = ()          # type: Sequence[str]
        self.interrupted_by = None  # type: Optional[int]
        self.is_killed = False      # no more patience: second signal, or the very end
        self.end = math.inf         # monotonic; when the runner must be gone
        self.stop_at = math.inf     # monotonic; when jobs get the termination signal
        self.poll_at = 0.0          # monotonic; the next request by the rules of waiting
        self.report_at = math.inf   # monotonic; the next request because of news
        self.sent_at = 0.0
        self.is_poll = False        # the request that is out is one by the rules of waiting
        self.asks_survey = False    # ... asks which jobs will never run here
        self.backoff_s = options.poll_interval_s
        self.has_progressed = True  # since the last poll
        self.worked_at = time.monotonic()   # last claim or local end: idleness counts from here
        self.ended_at = -math.inf           # last local end

    def setting(self, name: str) -> Any:
        """A workflow's setting, or its default."""
        value = self.workflow.get(name)
        return WORKFLOW_DEFAULTS[name] if value is None else value

    # ---- life ----

    def run(self) -> RunOutcome:
        """Register, work, leave."""
        os.makedirs(os.path.join(self.output_dir, 'job_stdio'), exist_ok=True)
        host = socket.gethostname()
        self.log = RunLog(os.path.join(self.output_dir, f'job_runner_{host}_wf{self.workflow_id}_r{self.run_id}.log'), self.options.log_level)
        self.wakeup = Wakeup()
        try:
            self.launcher = Launcher(os.path.join(self.output_dir, 'job_stdio'))
            try:
                self.set_deadline()
                self.register(host)
                self.actions = Actions(self)
                self.live()
            finally:
                self.spare_server()
                self.launcher.close()
        finally:
            self.wakeup.close()
            self.log.close()
        return self.outcome()

    def live(self) -> None:
        """From the first action to the last."""
        try:
            self.perform('on_workflow_start', 'on_worker_start')
            self.work()
            if self.answer['is_complete'] and not self.answer['is_canceled']:
                self.perform('on_workflow_complete')
            self.perform('on_worker_complete')
        finally:
            self.kill_everything()
            self.deregister()

    def set_deadline(self) -> None:
        """Lay the timeline of the page "Execution Modes" on the monotonic clock."""
        if self.options.end_time is not None:
            self.end = time.monotonic() + self.options.end_time - time.time()
            self.stop_at = self.end - self.config['sigkill_headroom_seconds'] - self.config['sigterm_lead_seconds']

    def register(self, host: str) -> None:
        """Become one of the workflow's compute nodes."""
        size, options = self.ledger.size, self.options
        body = {'workflow_id': self.workflow_id, 'hostname': host, 'pid': os.getpid(), 'start_time': format_time(time.time()),
                'num_cpus': size.num_cpus, 'memory_gb': size.memory_bytes / 1024 ** 3, 'num_gpus': len(size.devices), 'num_nodes': 1,
                'compute_node_type': 'local', 'is_active': True, 'lease_s': self.lease_s(),
                'identity': f'{read_boot_id()}/{read_process_start_ticks(os.getpid())}'}
        if options.end_time is not None:
            body['end_time'] = format_time(options.end_time)
        if options.labels:
            body['labels'] = list(options.labels)
        self.node_id = self.client.call('create_compute_node', body)['id']      # type: int
        self.link = Link(self.client, self.workflow_id, self.run_id, self.node_id)
        self.variables = common_variables(self.client, self.workflow, self.output_dir)
        self.log.write(f'Job runner starting workflow_id={self.workflow_id}', run_id=self.run_id, compute_node_id=self.node_id, hostname=host,
                       output_dir=self.output_dir, num_cpus=size.num_cpus, memory=format_memory(size.memory_bytes),
                       num_gpus=len(size.devices), job_completion_poll_interval=f'{options.poll_interval_s:g}s',
                       claim_backoff_max_secs=f'{options.claim_backoff_max_s:g}s', max_parallel_jobs=options.max_parallel_jobs,
                       end_time=body.get('end_time'), execution_mode='Direct', limit_resources=str(self.config['limit_resources']).lower())

    def lease_s(self) -> float:
        """How long the server should trust us without another word."""
        return 2 * max(self.backoff_s, self.options.poll_interval_s, RETRY_MAX_S) + 2 * ANSWER_DEADLINE_S

    def perform(self, *triggers: str) -> None:
        """Run the due actions of these triggers to their end, claiming no jobs."""
        self.triggers, self.poll_at, answers = triggers, 0.0, self.answers
        while self.leaving != 'unreachable' and not self.is_killed:
            self.turn(claims=False)
            if self.answers > answers and not self.actions.is_busy and not self.link.action_results:
                break
            self.wait()

    def work(self) -> None:
        """Turn after turn, until it is time to leave and nothing is in hand."""
        self.triggers, self.poll_at = JOB_TRIGGERS, 0.0
        while self.leaving != 'unreachable':
            self.turn(claims=not self.leaving)
            self.look_for_the_exit()
            if self.leaving and not (self.owners or self.actions.is_busy or self.link.has_news):
                break
            self.wait()

    def turn(self, claims: bool) -> None:
        """One round of the loop."""
        self.reap()
        self.stop_in_time()
        self.start_jobs()
        now = time.monotonic()
        if self.link.pending is None and now >= min(self.poll_at, self.report_at):
            self.begin_sync(claims)
        if self.link.pending is not None:
            has_answer = self.wakeup.has_answer(self.link.pending)
            if has_answer or now >= self.sent_at + ANSWER_DEADLINE_S:
                self.finish_sync(READ_DEADLINE_S if has_answer else 0.0)
                self.start_jobs()
        self.show()
        self.log.flush()

    def wait(self) -> None:
        """Until a child ends, a signal comes, or one of our times has come."""
        times = [self.launcher.next_deadline(), self.stop_at, math.inf if self.is_killed else self.end]
        times += [self.sent_at + ANSWER_DEADLINE_S] if self.link.pending else [self.poll_at, self.report_at]
        if self.appetite.backlog and not self.actions.is_busy:
            times.append(max(self.appetite.moved_at + STALE_AHEAD_S, self.appetite.not_before))
        for number in self.wakeup.wait(max(0.0, min(min(times) - time.monotonic(), 3600.0)), self.link.pending):
            if number != signal.SIGCHLD:
                self.on_signal(number)

    # ---- words with the server ----

    def report_soon(self, delay_s: float) -> None:
        """There is news: send it within so many seconds. While the server is silent its own pace counts."""
        if self.link.silent_since is None:
            self.report_at = min(self.report_at, time.monotonic() + delay_s)

    def begin_sync(self, claims: bool) -> None:
        """Send one request: all news, the wish for work, due actions."""
        now = time.monotonic()
        self.is_poll = now >= self.poll_at
        want = self.appetite.want(self.end - now) if claims and not self.leaving else None
        self.sent_at, self.report_at = now, math.inf
        is_first_silence = self.link.silent_since is None
        self.asks_survey = want is not None and not self.has_survey
        self.link.begin({'lease_s': self.lease_s(), 'want': want, 'actions': list(self.triggers),
                         'survey': self.asks_survey, 'explain': self.is_poll or not self.owners}, self.held)
        self.spare_server()
        if self.link.pending is None:
            self.on_silence(is_first_silence)

    def finish_sync(self, deadline_s: float) -> None:
        """Fetch the answer to it."""
        silent_before = self.link.silent_since
        answer = self.link.finish(deadline_s)
        if answer is None:
            self.on_silence(silent_before is None)
            return
        if silent_before is not None:
            self.say(f'the server answers again after {format_elapsed(time.monotonic() - silent_before)}')
        self.on_answer(answer)
        self.plan_poll(self.is_poll)
        if self.link.completions:
            self.report_soon(0)

    def spare_server(self) -> None:
        """A server that was started through us has become our child, but it is no job's."""
        if self.client.servers_started != self.servers_spared:
            self.servers_spared = self.client.servers_started
            self.launcher.disown_strangers()

    def held(self) -> Dict[str, Any]:
        """All that we know to have; what else the server thinks that we have was lost with an answer."""
        tasks = list(self.tasks.values()) + list(self.appetite.backlog) + list(self.ends.unreported.values())
        return {'held': [task.key for task in tasks], 'held_actions': self.actions.ids()}

    def on_silence(self, is_new: bool) -> None:
        """No answer: children go on; ask again later; give up when the window is over and no child is left."""
        link, now = self.link, time.monotonic()
        self.spare_server()
        self.poll_at = now + link.retry_s
        if is_new:
            self.say(f'no answer from the server, trying again: {link.error}', 'warning')
        window_s = self.setting('compute_node_wait_for_healthy_database_minutes') * 60
        if self.leaving in SIGNAL_REASONS:
            window_s = min(window_s, FAREWELL_S)
        if not self.owners and now - max(link.silent_since, self.ended_at) >= window_s or now >= self.end:
            self.leaving = 'unreachable'
            self.log.write('Server unreachable past the retry window', 'error', unreported=len(link.completions))

    def on_answer(self, answer: Dict[str, Any]) -> None:
        """Take in what the server says."""
        self.answer = answer
        self.answers += 1
        self.has_survey = self.has_survey or self.asks_survey
        for notice in answer['notices']:
            self.say_once(notice)
        self.ends.on_answer(answer)
        if answer['actions']:
            self.actions.add(answer['actions'])
        if answer['jobs']:
            handlers = answer['handlers']
            self.appetite.add([Task(job, answer['kinds'][job['kind']], handlers[job['failure_handler']] if job['failure_handler'] is not None else ())
                               for job in answer['jobs']])
            self.has_progressed = True
            self.worked_at = time.monotonic()
            if self.leaving:
                self.give_back(self.appetite.drop())
        elif answer.get('reason') and not self.owners and not answer['is_complete']:
            self.say_once(answer['reason'], 'No jobs claimed: ')

    def plan_poll(self, is_poll: bool) -> None:
        """When to ask again if nothing happens: the three regimes of the page "Job Runners"."""
        base_s, now = self.options.poll_interval_s, time.monotonic()
        if self.has_progressed:
            wait_s = self.backoff_s = base_s
        elif not is_poll:
            return      # a report between two polls changes nothing
        else:
            wait_s = self.backoff_s
            self.backoff_s = min(2 * self.backoff_s, max(self.options.claim_backoff_max_s, base_s))
        if not self.owners:
            wait_s = self.backoff_s = min(base_s, IDLE_WAIT_S)
        self.has_progressed = False
        self.poll_at = now + wait_s

    # ---- starting ----

    def start_jobs(self) -> None:
        """Start from the backlog what fits; give back what has waited too long. Actions come first: jobs may count on them."""
        if self.leaving or self.actions.is_busy or time.monotonic() < self.appetite.not_before:
            return
        for task in self.appetite.startable():
            if not self.start_job(task):
                break
        stale = self.appetite.drop_stale()
        if stale:
            self.give_back(stale)

    def start_job(self, task: Task) -> bool:
        """Start one job. False if the node has no room for processes at present."""
        outputs = []    # type: List[int]
        try:
            open_outputs(task, (self.output_dir, self.workflow_id, self.run_id), self.config, outputs)
            task.process = self.launcher.start(compose_command(task.job['invocation_script'], task.job['command']),
                                               job_variables(task, self.variables), outputs, f'{task.id}-{task.attempt_id}')
        except (OSError, ValueError) as error:
            return self.on_start_failure(task, error, outputs)
        finally:
            for descriptor in set(outputs):
                os.close(descriptor)
        self.tasks[task.process] = task
        self.owners[task.process] = self.on_job_end
        self.link.started.append([task.id, task.attempt_id, format_time(task.process.started_at)])
        self.report_soon(START_NEWS_S)
        self.log.write('Job started', workflow_id=self.workflow_id, job_id=task.id, run_id=self.run_id, compute_node_id=self.node_id,
                       attempt_id=task.attempt_id, pid=task.process.pid)
        return True

    def on_start_failure(self, task: Task, error: Exception, outputs: Sequence[int]) -> bool:
        """A start that failed: the node's fault gives the job back, anything else fails this job with the reason."""
        self.ledger.release(task.grant)
        if getattr(error, 'errno', None) in EXHAUSTION:
            self.say(f'no job can be started at present: {error}', 'warning')
            self.appetite.note_exhaustion()
            self.give_back([task] + self.appetite.drop())
            return False
        has_no_shell = len(outputs) == 2 and isinstance(error, FileNotFoundError)
        reason = f'cannot be started: {error}'
        if has_no_shell:
            try:
                os.write(outputs[1], f'torc: {reason}\n'.encode('utf-8', 'replace'))
            except OSError:     # a full disk: the reason stands in the completion too
                pass
        code = COMMAND_NOT_FOUND if has_no_shell else 1
        end = ProcessEnd(code, 0, 0.0, 0.0, 0, time.time())
        self.ends.report(task, end, Verdict('failed', code, reason), {})
        return True

    def give_back(self, tasks: Sequence[Task]) -> None:
        """Claimed jobs that are not started: others may have them."""
        self.link.returned += [task.key for task in tasks]
        if tasks:
            self.report_soon(0)

    def start_script(self, command: str, variables: Dict[str, str], log_name: str, name: str, owner: Callable[[Process], None]) -> None:
        """Start an action's command or a recovery script; its output is added to a log in the output directory."""
        path = os.path.join(self.output_dir, f'{log_name}_wf{self.workflow_id}_r{self.run_id}.log')
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        try:
            process = self.launcher.start(command, variables, (descriptor, descriptor), name)
        finally:
            os.close(descriptor)
        self.owners[process] = owner

    # ---- ends ----

    def reap(self) -> None:
        """Hand everything that has ended to whom it belongs."""
        for process in self.launcher.poll() + self.launcher.give_up():
            self.owners.pop(process)(process)

    def on_job_end(self, process: Process) -> None:
        """A job's process and all that came from it are gone: judge, and report or retry."""
        task, end = self.tasks.pop(process), process.end
        self.ledger.release(task.grant)
        self.appetite.note_end(end.wall_s)
        self.ended_at = self.worked_at = time.monotonic()
        self.has_progressed = True
        verdict = judge_end(end, task.stopped_for, self.stop_signal, self.config['timeout_exit_code'],
                            self.interrupted_by)
        file_times = {}     # type: Dict[str, float]
        if verdict.status == 'completed' and task.job['outputs']:
            file_times, missing = stat_outputs(task.job['outputs'])
            if missing:
                verdict = Verdict('failed', 1, f'declared output files are missing: {first_of(missing)}')
        if verdict.status == 'failed' and not verdict.message and is_disk_full(self.output_dir):
            verdict = verdict._replace(message=f'the disk of the output directory {self.output_dir} is full')
        self.ends.report(task, end, verdict, file_times)

    # ---- leaving ----

    def on_signal(self, number: int) -> None:
        """The first asks jobs to end; a second one kills them."""
        if self.interrupted_by is not None:
            self.say('killing all jobs', 'warning')
            self.is_killed = True
            self.kill_everything()
            return
        self.interrupted_by = number
        self.reap()     # what has ended by itself was not stopped
        name = signal.Signals(number).name
        self.log.write(f'Termination requested ({name} received).', 'warning')
        self.say(f"{name}: stopping {len(self.tasks)} {'job' if len(self.tasks) == 1 else 'jobs'}; again to kill at once", 'warning')
        self.leave('interrupt', self.config['sigterm_lead_seconds'])

    def stop_in_time(self) -> None:
        """Keep the timeline: termination signal before the end, SIGKILL when its time has come."""
        now = time.monotonic()
        if now >= self.stop_at:
            self.say('Direct-mode timeout window reached: the time limit, less sigterm_lead_seconds and sigkill_headroom_seconds, is over')
            self.leave('deadline', self.end - self.config['sigkill_headroom_seconds'] - now)
        if now >= self.end and not self.is_killed:
            self.is_killed = True
            self.kill_everything()
        for process in self.launcher.kill_due():
            task = self.tasks.get(process)
            self.log.write('Job SIGKILL', 'warning', workflow_id=self.workflow_id, job_id=task.id if task else None, pid=process.pid)

    def leave(self, reason: str, lead_s: float = 0.0) -> None:
        """Claim nothing more. For one of SIGNAL_REASONS, stop what runs."""
        self.leaving = reason
        self.give_back(self.appetite.drop())
        if reason not in SIGNAL_REASONS:
            return
        self.stop_at = math.inf
        self.actions.queue.clear()      # not begun: the server has them again as soon as we are off its list
        self.log.write('Jobs terminating', workflow_id=self.workflow_id, count=len(self.tasks))
        name = signal.Signals(self.stop_signal).name
        for process in self.owners:
            task = self.tasks.get(process)
            if task is not None and process.end is None:    # otherwise only its leftovers live
                task.stopped_for = task.stopped_for or reason
                self.log.write(f'Job {name}', workflow_id=self.workflow_id, job_id=task.id)
            self.launcher.stop(process, self.stop_signal, lead_s)
        self.log.write(f'Waiting {max(0.0, lead_s):.0f}s for graceful termination before SIGKILL')

    def kill_everything(self) -> None:
        """SIGKILL all that runs, now."""
        for process in self.owners:
            self.launcher.stop(process, signal.SIGKILL, 0)
        self.launcher.kill_due()

    def look_for_the_exit(self) -> None:
        """Decide whether it is time to leave."""
        if self.leaving:
            return
        if self.answer['is_canceled']:
            self.log.write('Workflow canceled', workflow_id=self.workflow_id)
            self.leave('cancel', min(CANCEL_LEAD_S, self.config['sigterm_lead_seconds']))
        elif self.answer['is_complete'] and not self.setting('compute_node_ignore_workflow_completion'):
            self.log.write('Workflow complete', workflow_id=self.workflow_id)
            self.leave('complete')
        elif not self.owners and not self.appetite.backlog and not self.link.has_news and self.sent_at > self.ended_at:
            self.look_for_idle_exit()

    def look_for_idle_exit(self) -> None:
        """Without children: leave when nothing came for long enough, or nothing can come any more."""
        limit_s, now = self.setting('compute_node_wait_for_new_jobs_seconds'), time.monotonic()
        has_jobs = self.answer['unfinished'] and self.answer.get('has_jobs_for_node', True)
        stays = self.options.is_persistent and has_jobs
        if stays or self.link.silent_since is not None or self.actions.is_busy:
            self.worked_at = now
            return
        pending = self.answer.get('pending_actions') and now - self.ended_at < LATE_ACTION_S
        ignores = self.setting('compute_node_ignore_workflow_completion')
        if self.appetite.is_too_late(self.end - now):
            self.leave('deadline')
            self.say(f'leaving: no job is started when less than {self.appetite.min_time_s} s are left')
        elif not (self.answer.get('claimable', True) or pending or ignores or self.options.is_persistent):
            self.leave('stuck')
            self.say(f"leaving: of the jobs that are left ({self.answer['unfinished']}) none can run here")
        elif limit_s and now - self.worked_at >= limit_s and not pending:
            self.leave('idle')
            self.say(f'No jobs claimed for {now - self.worked_at:.0f} seconds (limit: {limit_s} seconds). Exiting job runner.')

    def deregister(self) -> None:
        """Take ourselves off the list of nodes."""
        body = {'is_active': False, 'duration_seconds': time.monotonic() - self.began}
        self.log.write('Job runner completed', workflow_id=self.workflow_id, run_id=self.run_id, compute_node_id=self.node_id,
                       had_failures=str(self.ends.counts['failed'] > 0).lower(), had_terminations=str(self.ends.counts['terminated'] > 0).lower())
        try:
            self.client.call('update_compute_node', body, node_id=self.node_id)
        except TorcError as error:      # gone with its workflow, or silent: its lease ends by itself
            self.log.write(f'The compute node stays active: {error.message}', 'warning')

    def outcome(self) -> RunOutcome:
        """What to tell the user. Unreachable if the server could not be told."""
        if self.leaving == 'unreachable':
            names = ', '.join(task.name for task in list(self.ends.unreported.values())[:5])
            lost = f' {len(self.ends.unreported)} ended jobs could not be reported: {names}.' if self.ends.unreported else ''
            raise Unreachable(f'{self.link.error}.{lost} See {self.output_dir}')
        counts = self.ends.counts
        return RunOutcome(counts['completed'], counts['failed'], counts['terminated'], counts['canceled'], self.ends.failed_jobs,
                          self.answer['is_complete'], self.answer['is_canceled'], self.interrupted_by, self.leaving,
                          time.monotonic() - self.began, self.answer['jobs_by_status'])

    # ---- telling the user ----

    def say(self, message: str, level: str = 'info') -> None:
        """To the log and to the user."""
        self.log.write(message, level)
        self.progress.on_message(printable(message))

    def say_once(self, message: str, introduction: str = '') -> None:
        """Say it unless it was said before, perhaps with other numbers: the time that is left shrinks."""
        form = re.sub('[0-9]+', '0', message)
        if form not in self.told:
            self.told.add(form)
            self.say(introduction + message)

    def show(self) -> None:
        """How far the whole workflow is, for the progress line, as soon as the server has told it."""
        if not self.answers:
            return
        counts = collections.Counter(self.answer['jobs_by_status'])     # those of other runners too
        self.progress.on_turn({
            'total': sum(counts.values()), 'done': sum(counts[row.name] for row in STATUSES if row.is_done),
            'running': max(counts['running'], len(self.tasks)), 'completed': counts['completed'],
            'failed': counts['failed'] + counts['terminated'] + counts['pending_failed'],
            'canceled': counts['canceled'], 'unfinished': self.answer['unfinished']})


def execution_settings(workflow: Dict[str, Any]) -> Dict[str, Any]:
    """A workflow's execution_config, with all defaults."""
    given = workflow.get('execution_config') or {}
    return dict(EXECUTION_DEFAULTS, **{key: value for key, value in given.items() if value is not None})


def refuse_short_time(workflow: Dict[str, Any], options: RunnerOptions) -> None:
    """BadInput if the runner's time would be over before any job of a workflow could start."""
    left_s = math.inf if options.end_time is None else options.end_time - time.time()
    config, left = execution_settings(workflow), f'the time limit leaves {max(0.0, left_s):.0f} s'
    lead_s, headroom_s = config['sigterm_lead_seconds'], config['sigkill_headroom_seconds']
    if left_s <= lead_s + headroom_s:
        raise BadInput(f'{left}, but jobs are stopped {lead_s + headroom_s} s before its end, so that none '
                       f'could start: allow more time, or lower sigterm_lead_seconds ({lead_s}) and '
                       f'sigkill_headroom_seconds ({headroom_s}) in execution_config')
    name = 'compute_node_min_time_for_new_jobs_seconds'
    least_s = WORKFLOW_DEFAULTS[name] if workflow.get(name) is None else workflow[name]
    if options.max_parallel_jobs is not None and left_s < least_s:
        raise BadInput(f'{left}, but with --max-parallel-jobs no job is started when less than {least_s} s '
                       f"are left: allow more time, or lower the workflow's {name}")


def check_execution_mode(mode: str) -> None:
    """Refuse what cannot be done here. Mode auto is direct outside of an allocation."""
    if mode == 'slurm':
        where = 'there is no Slurm allocation here (SLURM_JOB_ID is not set)' if not os.environ.get('SLURM_JOB_ID') else \
            'this version starts no Slurm steps'
        raise Refused(f"execution_config.mode is 'slurm', but {where}; use mode 'auto' or 'direct'")


def parse_signal(name: str) -> int:
    """'SIGTERM' or 'TERM' -> its number; SIGTERM for what is not a signal's name."""
    word = str(name).upper()
    number = getattr(signal, word if word.startswith('SIG') else 'SIG' + word, None)
    return int(number) if isinstance(number, signal.Signals) else int(signal.SIGTERM)


def run_workflow(client: Any, workflow_id: int, options: RunnerOptions, progress: Any) -> RunOutcome:
    """Work on a workflow's jobs on this machine until it is over, or nothing is left to do here."""
    return Runner(client, workflow_id, options, progress).run()




# ======== 19. Rendering: values -> text for people and programs ========
#
# Owns how things look: tables, CSV, JSON documents, the status report, the progress line. Functions return text and know
# nothing of commands; only Progress writes, to the stream that it was given. Everything that came from a job, a file or
# another user passes printable() before it can reach a terminal. A Style says once what the reader of a stream can show:
# box drawing where the encoding has it, colours and a limited width on a terminal only, so that a pipe always gets the
# whole text.


class Style(NamedTuple):
    """What the reader of a stream can show."""
    is_unicode: bool    # box drawing and symbols beyond ASCII
    is_terminal: bool   # a line may be rewritten in place
    has_colour: bool
    width: int          # columns, 0 = no limit


PLAIN = Style(False, False, False, 0)
ROUNDED = ('╭─┬╮', '├─┼┤', '╰─┴╯', '│')
SQUARE = ('+-++', '+-++', '+-++', '|')
MIN_COLUMN_WIDTH = 8        # a column is not made narrower than this to fit a terminal
TEXT_COLUMN_WIDTH = 20      # a column of text that may be dropped is not made narrower than this
TIME_CELL = Expression(r'([0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2})( [-+][0-9]{4})?\Z')
FAILURES_SHOWN = 4          # groups of failed jobs in a status, which is to fit a terminal of 24 lines
CANCELED_SHOWN = 2
BLOCKERS_SHOWN = 3
PROGRESS_EVERY_S = 10.0     # between lines of progress where there is no terminal
REFRESH_EVERY_S = 0.1       # between updates of the line where there is one
VERDICTS = {    # how a workflow stands: symbol, the same in ASCII, colour
    'complete': ('✓', '+', '32'), 'failed': ('✗', 'x', '31'), 'canceled': ('⊘', '-', '35'), 'running': ('◷', 'o', '36')}


def style_of(stream: Any, environ: Dict[str, str]) -> Style:
    """Style for a stream; `environ` may hold NO_COLOR (no-color.org) and TERM."""
    is_terminal = bool(getattr(stream, 'isatty', None) and stream.isatty())
    is_unicode = (getattr(stream, 'encoding', None) or '').lower().replace('-', '') == 'utf8'
    has_colour = is_terminal and not environ.get('NO_COLOR') and environ.get('TERM') != 'dumb'
    width = shutil.get_terminal_size().columns if is_terminal else 0
    return Style(is_unicode, is_terminal, has_colour, width)


def paint(text: str, colour: str, style: Style) -> str:
    """Text in an ANSI colour, where colours are shown."""
    return f'\x1b[{colour}m{text}\x1b[0m' if style.has_colour and colour else text


# -------- width --------

def character_width(character: str) -> int:
    """Columns that a character takes in a terminal: 0 for what combines, 2 for East Asian wide ones and emoji (UAX 11)."""
    if unicodedata.combining(character) or unicodedata.category(character) in ('Mn', 'Me', 'Cf'):
        return 0
    return 2 if unicodedata.east_asian_width(character) in 'WF' else 1


def text_width(text: str) -> int:
    """Columns that a text takes in a terminal."""
    if len(text.encode('utf-8', 'surrogatepass')) == len(text):     # ASCII; isascii() is 3.7
        return len(text)
    return sum(map(character_width, text))


def cut(text: str, width: int, ellipsis: str = '…') -> str:
    """Text of at most `width` columns; what was longer ends in the ellipsis."""
    if text_width(text) <= width:
        return text
    kept, used = [], text_width(ellipsis)
    for character in text:
        used += character_width(character)
        if used > width:
            break
        kept.append(character)
    return ''.join(kept) + ellipsis


def pad(text: str, width: int, is_number: bool = False) -> str:
    """Text filled with blanks to `width` columns, numbers from the left."""
    blanks = ' ' * (width - text_width(text))
    return blanks + text if is_number else text + blanks


# -------- values --------

def format_cell(value: Any) -> str:
    """A value as one line for a table or CSV: nothing for None, JSON for lists and mappings."""
    if value is None:
        return ''
    if isinstance(value, bool):
        return 'true' if value else 'false'
    if isinstance(value, float):
        return f'{value:.2f}'
    if isinstance(value, (dict, list)):
        return format_json(value)
    return str(value)


def format_local_time(text: Optional[str]) -> str:
    """RFC 3339 text -> local time '2026-11-21 10:28:54 +0100'; a text that is no time stays as it is."""
    try:
        return time.strftime('%Y-%m-%d %H:%M:%S %z', time.localtime(parse_time(text or '')))
    except (ValueError, OverflowError, OSError):
        return text or ''


def format_seconds(value_s: float) -> str:
    """Seconds -> '6.7s' below a minute, else as format_elapsed."""
    return f'{value_s:.1f}s' if value_s < 60 else format_elapsed(value_s)


def format_percent(value: Optional[float]) -> str:
    """98.76 -> '98.8%'."""
    return '' if value is None else f'{value:.1f}%'


def format_memory_cell(value_bytes: Optional[float]) -> str:
    """As format_memory; nothing for None."""
    return '' if value_bytes is None else format_memory(value_bytes)


# -------- tables --------

class Heading(NamedTuple):
    """One column of a list of objects."""
    title: str
    key: str            # of the object; '' gives `show` the whole object
    show: Callable[[Any], str] = format_cell
    rank: int = 0       # 0: always shown; where a terminal is too narrow the highest are dropped first
    is_ours: bool = False   # no column of Torc's CSV, whose readers may count columns


def table_cells(headings: Sequence[Heading], items: Iterable[Dict[str, Any]]) -> List[List[str]]:
    """Objects -> rows of texts."""
    return [[heading.show(item.get(heading.key) if heading.key else item) for heading in headings] for item in items]


def fitting_columns(rows: Sequence[Sequence[str]], ranks: Sequence[int], limit: int) -> List[int]:
    """Indexes of the columns that fit `limit` (0 = any): those of rank 0, then by rank as many as have room.

    Empty columns come last, whatever their rank.
    """
    kept = list(range(len(rows[0])))
    if not limit:
        return kept
    needed, is_empty = [], []
    for column in zip(*rows):
        width = max(map(text_width, column))
        needed.append(3 + (width if is_time(column) else min(width, TEXT_COLUMN_WIDTH)))
        is_empty.append(len(column) > 1 and not any(column[1:]))
    kept.sort(key=lambda index: (is_empty[index], ranks[index]))
    while sum(needed[index] for index in kept) + 1 > limit and (ranks[kept[-1]] or is_empty[kept[-1]]):
        kept.pop()
    return sorted(kept)


def column_widths(rows: Sequence[Sequence[str]], limit: int) -> List[int]:
    """Width of each column; wide ones are narrowed to one width with which the table fits `limit` (0 = any).

    Times are not narrowed: half of one tells nothing.
    """
    columns = list(zip(*rows))
    widths = [max(map(text_width, column)) for column in columns]
    fixed = [bool(limit) and is_time(column) for column in columns]
    flexible = sorted(width for width, stays in zip(widths, fixed) if limit and not stays)
    left = limit - 3 * len(widths) - 1 - (sum(widths) - sum(flexible))
    for index, width in enumerate(flexible):
        share = left // (len(flexible) - index)
        if width > share:
            most = max(share, MIN_COLUMN_WIDTH)
            return [width if stays else min(width, most) for width, stays in zip(widths, fixed)]
        left -= width
    return widths


def is_time(column: Sequence[str]) -> bool:
    """Whether the cells below a column's title are times."""
    return any(column[1:]) and all(TIME_CELL.match(cell) for cell in column[1:] if cell)


def is_number(text: str) -> bool:
    """Whether a cell reads as a number, alone or with a unit, and so stands on the right."""
    return bool(re.match(r'-?[0-9]+(\.[0-9]+)?([KMGT]?B|%|s)?\Z', text))


def format_table(headers: Sequence[str], rows: Sequence[Sequence[Any]], style: Style = PLAIN,
                 ranks: Sequence[int] = ()) -> str:
    """A boxed table. Statuses are coloured where the style has colours.

    Only to fit a terminal, columns are dropped by rank, times lose their zone, and cells are cut.
    """
    cells = [[printable(format_cell(cell)).replace('\n', '\\n').replace('\t', ' ') for cell in row] for row in rows]
    if style.width:
        cells = [[TIME_CELL.sub(r'\1', cell) for cell in row] for row in cells]
    kept = fitting_columns([list(headers)] + cells, ranks or [0] * len(headers), style.width)
    hidden = len(headers) - len(kept)
    if hidden:
        headers, cells = [headers[index] for index in kept], [[row[index] for index in kept] for row in cells]
    widths = column_widths([list(headers)] + cells, style.width)
    numeric = [any(column) and all(is_number(cell) for cell in column if cell) for column in zip(*cells)]
    numeric = numeric or [False] * len(headers)
    top, middle, bottom, wall = ROUNDED if style.is_unicode else SQUARE
    ellipsis = '…' if style.is_unicode else '~'

    def rule(shape: str) -> str:
        left, line, cross, right = shape
        return left + cross.join(line * (width + 2) for width in widths) + right

    def line_of(row: Sequence[str], colours: Dict[str, str]) -> str:
        texts = (paint(pad(cut(cell, width, ellipsis), width, number), colours.get(cell, ''), style)
                 for cell, width, number in zip(row, widths, numeric))
        return f'{wall} ' + f' {wall} '.join(texts) + f' {wall}'

    colours = {status.name: status.colour for status in STATUSES}
    body = [line_of(row, colours) for row in cells]
    lines = [rule(top), line_of(headers, {}), rule(middle)] + body + [rule(bottom)]
    if hidden:
        noun = 'column' if hidden == 1 else 'columns'
        hint = f'{hidden} more {noun} in a wider terminal, or through `| less -S`'
        lines.append(cut(hint, style.width, ellipsis))
    return '\n'.join(lines) + '\n'


def format_csv(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """CSV with a header line, also for no rows. Values are left alone: scripts read them back."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator='\n')
    writer.writerow(headers)
    writer.writerows([format_cell(cell) for cell in row] for row in rows)
    return text.getvalue()


def format_json_document(value: Any, is_ascii: bool = False) -> str:
    """A value as an indented JSON document."""
    return json.dumps(value, indent=2, ensure_ascii=is_ascii, allow_nan=False) + '\n'


def format_record(record: Dict[str, Any]) -> str:
    """One object as aligned 'key: value' lines, without the keys that are empty."""
    shown = [(key, format_cell(value)) for key, value in record.items() if value is not None]
    width = max([len(key) for key, _ in shown] or [0]) + 1
    return ''.join(f'{pad(key + ":", width)} {printable(text)}\n' for key, text in shown)


def format_rows(pairs: Iterable[Tuple[str, str]], indent: str = '  ', limit: int = 34) -> str:
    """Two aligned columns of words and meanings, for help; a word too long for its column stands on its own line."""
    pairs = list(pairs)
    width = min(max([text_width(word) for word, _ in pairs] or [0]), limit)
    lines = []
    for word, meaning in pairs:
        if text_width(word) > width:
            lines.append(f'{indent}{word}')
            word = ''
        lines.append(f'{indent}{pad(word, width)}  {meaning}'.rstrip())
    return ''.join(line + '\n' for line in lines)


# -------- status --------

def verdict_of(status: Dict[str, Any]) -> Tuple[str, str]:
    """Answer of get_workflow_status -> (key of VERDICTS, sentence)."""
    counts = status['jobs_by_status']
    bad = [row.name for row in STATUSES if row.is_bad and counts[row.name]]
    if status['is_canceled']:
        return 'canceled', 'Workflow was canceled'
    if status['is_complete'] and bad:
        return 'failed', f'Workflow ended: {format_counts(counts)}'
    if status['is_complete']:
        return 'complete', 'Workflow is complete: every job ended well'
    if counts['uninitialized'] == status['total_jobs']:
        return 'running', 'Workflow has not been started'
    return 'running', f'Workflow is in progress: {format_counts(counts)}'


def format_counts(counts: Dict[str, int]) -> str:
    """{'completed': 3, 'failed': 1, ...} -> '3 completed, 1 failed', in the order of STATUSES, without zeros."""
    return ', '.join(f'{counts[row.name]} {row.name}' for row in STATUSES if counts.get(row.name)) or 'no jobs'


def explain_failures(groups: Sequence[Dict[str, Any]], counts: Dict[str, int],
                     number: int) -> List[Tuple[str, str]]:
    """(status, line) of groups of failed jobs of workflow `number`, and of how many others there are."""
    lines = []
    for group in groups:
        more = f" and {group['count'] - 1} more" if group['count'] > 1 else ''
        reason, code = group.get('reason', ''), f"return code {group.get('return_code')}"
        code = '' if reason == code or group.get('return_code') is None else f' ({code})'
        lines.append((group['status'], f"{group['job_name']}{more}{code}: {reason}"))
    left = sum(counts[name] for name in BROKEN_WORDS) - sum(group['count'] for group in groups)
    if groups and left > 0:
        lines.append(('failed', f'{left} more: torc.py results list {number} --failed'))
    return lines


def explain_others(why: Dict[str, Any], counts: Dict[str, int], number: int) -> List[Tuple[str, str]]:
    """(status, line) of jobs of workflow `number` that were canceled, and of what others wait for."""
    canceled = why['canceled'][:CANCELED_SHOWN]
    lines = [('canceled', f"{job['job_name']}: {job.get('reason', '')}") for job in canceled]
    left = counts['canceled'] - len(canceled)
    if canceled and left > 0:
        lines.append(('canceled', f'{left} more: torc.py jobs list {number} --status canceled'))
    names = [f"{job['job_name']} ({job['status']})" for job in why['blockers']]
    if names:
        shown = ', '.join(names[:BLOCKERS_SHOWN]) + (' and others' if len(names) > BLOCKERS_SHOWN else '')
        lines.append(('blocked', f"{counts['blocked']} blocked wait for {shown}"))
    return lines


def format_explanation(status: Dict[str, Any], style: Style) -> List[str]:
    """Why jobs failed or were canceled, and what others wait for: few lines, none wider than the terminal."""
    counts, number = status['jobs_by_status'], status['workflow_id']
    why = status.get('explanation')
    found = explain_failures(why['failures'][:FAILURES_SHOWN], counts, number) if why else []
    if why and not status['is_canceled']:
        found += explain_others(why, counts, number)
    if counts['ready'] and not status['is_canceled'] and not status['active_compute_nodes']:
        found.append(('ready', f"{counts['ready']} ready wait for a runner: torc.py run {number}"))
    lines = []
    for name, text in found:
        row, text = STATUSES[STATUS_CODES[name]], printable(text).replace('\n', ' ').replace('\t', ' ')
        text = cut(text, style.width - 4, '…' if style.is_unicode else '~') if style.width else text
        lines.append(f'  {paint(row.symbol, row.colour, style)} {text}')
    return lines


def format_status(status: Dict[str, Any], style: Style = PLAIN) -> str:
    """Answer of get_workflow_status, with its explanation if there is one -> the report of `status`."""
    counts, total = status['jobs_by_status'], status['total_jobs']
    lines = [printable(f"Workflow {status['workflow_id']}: {status['workflow_name']} (user {status['workflow_user']})"), '']
    for row in STATUSES:
        if counts[row.name]:
            bar = row.symbol * max(1, round(30 * counts[row.name] / total))
            lines.append(f'  {row.name:14}{counts[row.name]:>8}  {paint(bar, row.colour, style)}')
    lines += [f"  {'total':14}{total:>8}", '']
    times = f"execution time {format_seconds(status['total_exec_time_minutes'] * 60)}"
    if status.get('walltime_seconds') is not None:
        times = f"wall time {format_seconds(status['walltime_seconds'])}, {times}"
    lines.append('  ' + times[0].upper() + times[1:])
    nodes = [f'{status[key]} {words}' for key, words in NODE_COUNTS if status[key]]
    lines += ([f"  {', '.join(nodes)}"] if nodes else []) + ['']
    explained = format_explanation(status, style)
    lines += explained + [''] if explained else []
    kind, sentence = verdict_of(status)
    mark, ascii_mark, colour = VERDICTS[kind]
    lines.append(paint(f'{mark if style.is_unicode else ascii_mark} {sentence}', colour, style))
    return '\n'.join(lines) + '\n'


NODE_COUNTS = (('active_compute_nodes', 'compute nodes at work'), ('active_scheduled_nodes', 'allocations active'),
               ('pending_scheduled_nodes', 'allocations pending'))


# -------- progress --------

class Progress:
    """What `run` shows while jobs run: on a terminal one line that is rewritten, elsewhere a plain line now and then.

    The Runner calls on_turn, on_failed_job and on_message; only times and counts pass, so that any object with these three can
    stand in. Failed jobs and messages are printed above the line, in both forms.
    """

    def __init__(self, stream: Any, style: Style, is_quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream = stream
        self.style = style
        self.is_quiet = is_quiet
        self.clock = clock
        self.started_at = clock()
        self.shown_at = float('-inf')   # when the last line of progress was written
        self.counts: Dict[str, int] = {}
        self.first_done: Optional[int] = None   # jobs that were done before we started: no part of the rate
        self.has_line = False           # an unfinished line stands on the terminal

    def on_turn(self, counts: Dict[str, int]) -> None:
        """Called once per turn with the workflow's 'total', 'done', 'running', 'failed', 'canceled' jobs."""
        if self.first_done is None:
            self.first_done, self.started_at = counts.get('done', 0), self.clock()
        self.counts = counts
        now = self.clock()
        every_s = REFRESH_EVERY_S if self.style.is_terminal else PROGRESS_EVERY_S
        if not self.is_quiet and now - self.shown_at >= every_s:
            self.shown_at = now
            self._show(format_progress(counts, counts.get('done', 0) - self.first_done, now - self.started_at, self.style))

    def on_failed_job(self, name: str, return_code: int, last_line: str = '') -> None:
        """A job that will not be tried again."""
        detail = f': {last_line}' if last_line else ''
        self.on_message(paint('failed', '31', self.style) + printable(f' {name} (return code {return_code}){detail}'))

    def on_message(self, text: str) -> None:
        """A line above the progress."""
        self.finish()
        if not self.is_quiet:
            self._write(text + '\n')
        self.shown_at = float('-inf') if self.style.is_terminal else self.shown_at

    def finish(self) -> None:
        """Clear the line, so that what follows starts on a clean one."""
        if self.has_line:
            self._write('\r\x1b[K')
            self.has_line = False

    def _show(self, line: str) -> None:
        if self.style.is_terminal:
            self._write('\r' + cut(line, max(self.style.width - 1, 20)) + '\x1b[K')
            self.has_line = True
        else:
            self._write(line + '\n')

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError):   # a closed terminal is no reason to stop jobs
            self.is_quiet = True


def format_rate(jobs: int, elapsed_s: float) -> str:
    """'96.4 jobs/s', '3.0 jobs/min' or '0.5 jobs/h'."""
    for unit_s, unit in ((1, 's'), (60, 'min')):
        if jobs / elapsed_s * unit_s >= 0.1:
            return f'{jobs / elapsed_s * unit_s:.1f} jobs/{unit}'
    return f'{jobs / elapsed_s * 3600:.1f} jobs/h'


def format_progress(counts: Dict[str, int], finished: int, elapsed_s: float, style: Style) -> str:
    """One line: done/total, running, failed, rate, elapsed, left. `finished`: jobs done since the start."""
    done, total = counts.get('done', 0), counts.get('total', 0)
    parts = [f'{done}/{total} done ({100 * done // max(total, 1)}%)', f"{counts.get('running', 0)} running"]
    parts += [f'{counts[name]} {name}' for name in ('failed', 'canceled') if counts.get(name)]
    has_rate = finished > 0 and elapsed_s >= 1
    parts += ([format_rate(finished, elapsed_s)] if has_rate else []) + [format_elapsed(elapsed_s)]
    if has_rate and done < total:
        parts.append(f'{format_elapsed((total - done) * elapsed_s / finished)} left')
    line = ', '.join(parts)
    filled = 20 * done // total if total else 0
    bar = f"[{'#' * filled}{'.' * (20 - filled)}] "
    return bar + line if style.is_terminal and len(bar + line) < style.width else line


# ======== 20. Commands: one function per command ========
#
# A command is a function cmd_NAME(session, args) that returns an exit code; `args` holds exactly the arguments of its row in
# the table of commands (next section) under their keys, None for what was not given. Results go to stdout through
# Session.answer and Session.show_list, in the format that was asked for; everything else that is said goes to stderr
# through Session.tell. Nothing is asked without a terminal: the error names the flag.
#
# Objects that differ in columns only (files, user data, requirements...) are rows of THINGS, served by cmd_list, cmd_get,
# cmd_create, cmd_update and cmd_delete. JSON has the keys of Torc 1.0, CSV its columns; changing them breaks scripts.

CANDIDATES_SHOWN = 10       # workflows named in an error, jobs in a list of failures
PROBLEMS_SHOWN = 20
LOG_PIECE_BYTES = 1 << 20   # of a log that is being printed
ANSWER_FORMATS = ('table', 'json', 'csv')
TASK_PAUSE_S = 1.0          # longest between looks at a task
MEMORY_COMMANDS = ('run', 'exec', 'serve')      # that may have the database in memory
MAKERS = ('run', 'create', 'exec', 'workflows new')     # commands that make a database where there is none

Arguments = Dict[str, Any]


class Session:
    """One call of the program: its options, its streams, and the connection that its steps share."""

    def __init__(self, options: Arguments, out: Any, err: Any, stdin: Any) -> None:
        self.options = options      # of GLOBAL_ARGUMENTS
        self.out = out
        self.err = err
        self.stdin = stdin
        self.command: Any = None    # its row in COMMANDS
        self._client: Optional[Client] = None

    @property
    def format(self) -> str:
        """'table', 'json' or 'csv'."""
        return self.options['format']

    @property
    def client(self) -> Client:
        """Connection to the server, or to the embedded database; made at its first use."""
        if self._client is None:
            interval_s, is_reading = self.snapshot_interval_s, self.command.name not in MAKERS
            self._client = Client.connect(url=self.options['url'], database=self.database, is_reading=is_reading,
                                          ca_file=self.options['tls_ca_cert'] or '', is_insecure=bool(self.options['tls_insecure']),
                                          credentials=self.credentials)
            self._client.snapshot_interval_s = interval_s
        return self._client

    @property
    def snapshot_interval_s(self) -> Optional[float]:
        """Time between snapshots of a database in memory; None without --in-memory."""
        if not self.options['in_memory']:
            if self.options['snapshot_interval_seconds'] is not None:
                raise BadInput('--snapshot-interval-seconds goes with --in-memory')
            return None
        if self.command.name not in MEMORY_COMMANDS:
            raise BadInput(f"--in-memory is for {', '.join(MEMORY_COMMANDS)}")
        if self.command.name != 'serve' and not self.database:
            raise BadInput('--in-memory goes with -s or --db FILE, or with `serve`')
        return self.options['snapshot_interval_seconds'] or DEFAULT_SNAPSHOT_INTERVAL_S

    @property
    def credentials(self) -> Credentials:
        """Password and cookie that were given with the command."""
        password = self.options['password'] or ''
        if password:
            self.tell('warning: others on this machine can see the password on the command line; use TORC_PASSWORD or --prompt-password')
        if self.options['prompt_password']:
            password = self.ask_password(f'Password of {user_name()}: ')
        return Credentials(password, self.options['cookie_header'] or '')

    def ask_password(self, question: str) -> str:
        """A password from the terminal, without showing it; where there is none, a line of stdin."""
        if not self.stdin.isatty():
            return self.stdin.readline().rstrip('\r\n')
        try:
            return getpass.getpass(question)
        except EOFError:
            raise BadInput('no password was given') from None

    @property
    def database(self) -> Optional[str]:
        """The embedded database that was asked for, if any."""
        return self.options['db'] or (EMBEDDED_DATABASE if self.options['standalone'] else None)

    @property
    def is_interactive(self) -> bool:
        """Whether somebody is there to be asked."""
        return bool(self.stdin and self.stdin.isatty() and not self.options['no_prompts'])

    def call(self, op: str, body: Any = None, **params: Any) -> Any:
        """One operation of the API."""
        return self.client.call(op, body, **params)

    def items(self, op: str, limit: Optional[int] = None, offset: int = 0, **params: Any) -> List[Dict[str, Any]]:
        """Items of a list operation, page after page."""
        size = MAX_LIST_ITEMS if limit is None else min(limit, MAX_LIST_ITEMS)
        return list(itertools.islice(self.client.pages(op, offset=offset, limit=size, **params), limit))

    def show(self, text: str) -> None:
        """Text to stdout."""
        try:
            self.out.write(text)
        except UnicodeEncodeError:  # a locale without UTF-8, or half of a surrogate pair
            self.out.write(text.encode(self.out.encoding, 'backslashreplace').decode(self.out.encoding))

    def show_json(self, value: Any) -> None:
        """A JSON document to stdout."""
        self.show(format_json_document(value, not style_of(self.out, os.environ).is_unicode))

    def tell(self, text: str) -> None:
        """A line to stderr."""
        try:
            self.err.write(text + '\n')
        except OSError:     # nobody can be told; what was asked for is done all the same
            pass

    def answer(self, value: Any, text: str) -> None:
        """The result: as a JSON document, or the text for people."""
        if self.format == 'json':
            self.show_json(value)
        else:
            self.show(text)

    def show_list(self, headings: Sequence[Heading], items: List[Dict[str, Any]], what: str) -> None:
        """The result of a list command in the format that was asked for. `what` names the things, such as 'jobs'."""
        if self.format == 'csv':
            headings = [heading for heading in headings if not heading.is_ours]
        titles = [heading.title for heading in headings]
        if self.format == 'json':
            self.show_json({'items': items})
        elif self.format == 'csv':
            self.show(format_csv(titles, table_cells(headings, items)))
        elif items:
            table = format_table(titles, table_cells(headings, items), style_of(self.out, os.environ),
                                 [heading.rank for heading in headings])
            self.show(f'{table}\nTotal: {len(items)} {what}\n')
        else:
            self.show(f'No {what} found\n')

    def confirm(self, question: str) -> bool:
        """Ask before something is lost. --no-prompts and -f json answer yes."""
        if self.options['no_prompts'] or self.format == 'json':
            return True
        if not self.is_interactive:
            raise BadInput(f'this asks "{question}" and there is no terminal to answer on; '
                           'give --no-prompts to go on without asking')
        self.err.write(f'{question} (y/N) ')
        self.err.flush()
        if self.stdin.readline().strip().lower() in ('y', 'yes'):
            return True
        self.tell('Cancelled')
        return False

    def leave(self) -> None:
        """Give the connection back, and see that what was done stays."""
        if self._client is not None:
            self._client.leave()

    def close(self) -> None:
        """Give the connection back."""
        if self._client is not None:
            self._client.close()
            self._client = None


def call_addition(session: Session, op: str, **params: Any) -> Dict[str, Any]:
    """An operation that a server of Torc, or an older one of ours, does not have: {} then."""
    try:
        return session.call(op, **params)
    except NotFound:
        return {}


# -------- which workflow --------

def name_workflow(session: Session, workflow_id: int) -> str:
    """'workflow 1 (hello) of the database /home/ann/torc.db', for questions and answers."""
    workflow = session.call('get_workflow', workflow_id=workflow_id)
    return printable(f"workflow {workflow['id']} ({workflow['name']}) of {session.client.location}")


def choose_workflow(session: Session, args: Arguments) -> int:
    """The workflow that is meant. If no id was given: on a terminal a choice, elsewhere an error that lists the candidates."""
    if args['workflow_id'] is not None:
        return args['workflow_id']
    own = session.items('list_workflows', user=user_name(), is_archived=False)
    if not own:
        raise BadInput('there is no workflow yet: make one with `create` or `run`')
    if not session.is_interactive:
        named = ', '.join(f"{item['id']} ({item['name']})" for item in own[-CANDIDATES_SHOWN:])
        more = f' and {len(own) - CANDIDATES_SHOWN} older ones' if len(own) > CANDIDATES_SHOWN else ''
        raise BadInput(printable(f'a workflow id is required when there is no terminal: {named}{more}'))
    if len(own) == 1:
        return own[0]['id']
    titles = ('ID', 'Name', 'Description', 'Created')
    rows = [(item['id'], item['name'], item.get('description'), format_local_time(item.get('timestamp'))) for item in own]
    session.err.write(format_table(titles, rows, style_of(session.err, os.environ)) + 'Workflow id: ')
    session.err.flush()
    word = session.stdin.readline().strip()
    if word not in {str(item['id']) for item in own}:
        raise BadInput(printable(f'{word!r} is not one of these ids'))
    return int(word)


# -------- objects: list, get, create, update, delete --------

def format_running_time(job: Dict[str, Any]) -> str:
    """How long a job has been running, or has run."""
    if job.get('exec_time_minutes') is not None:
        return format_seconds(job['exec_time_minutes'] * 60)
    if job.get('status', 'running') != 'running' or not job.get('start_time'):
        return ''
    return format_elapsed(max(0.0, time.time() - parse_time(job['start_time'])))


def peak_and_average(peak: str, average: str, show: Callable[[Any], str]) -> Callable[[Dict[str, Any]], str]:
    """A cell made of two keys: 'peak / average'."""
    return lambda node: '' if node.get(peak) is None else f'{show(node[peak])} / {show(node.get(average))}'


def format_event_type(event: Dict[str, Any]) -> str:
    """What an event says that it is."""
    data = event['data'] if isinstance(event.get('data'), dict) else {}
    return ' '.join([str(data[key]) for key in ('category', 'type', 'event_type', 'action') if data.get(key)][:2])


def format_event_message(event: Dict[str, Any]) -> str:
    """What an event says, or else all that it holds."""
    data = event.get('data')
    message = data.get('message') if isinstance(data, dict) else None
    return format_cell(message or data)


def inner_value(key: str, inner: str, default: str = '') -> Callable[[Dict[str, Any]], str]:
    """A cell from free JSON inside an object."""
    return lambda item: format_cell(item[key].get(inner, default)) if isinstance(item.get(key), dict) else default


# How cells are written that format_cell would write badly: by key, from the key's value...
SHOWN_VALUES = {
    'timestamp': format_local_time, 'timestamp_formatted': format_local_time, 'executed_at': format_local_time,
    'completion_time': format_local_time, 'start_time': format_local_time,
    'st_mtime': lambda value: '' if value is None else format_local_time(format_time(value)),
    'exec_time_minutes': lambda value: '' if value is None else format_seconds(value * 60),
    'duration_seconds': lambda value: '' if value is None else format_elapsed(value),
    'peak_memory_bytes': format_memory_cell, 'peak_cpu_percent': format_percent,
    'executed': lambda value: 'executed' if value else 'waiting', 'start_ms': format_local_time,
}
# ... and from the whole object, where no key has the name.
SHOWN_OBJECTS = {
    '(elapsed)': format_running_time,
    '(preview)': lambda item: cut(format_json(item.get('data')), 60),
    '(progress)': lambda action: f"{action.get('trigger_count', 0)}/{action.get('required_triggers', 1)}",
    '(allocations)': inner_value('action_config', 'num_allocations'),
    '(level)': inner_value('data', 'level', 'info'),
    '(type)': format_event_type,
    '(message)': format_event_message,
    '(slurm job)': inner_value('scheduler', 'slurm_job_id'),
    '(cpu)': peak_and_average('peak_cpu_percent', 'avg_cpu_percent', format_percent),
    '(memory)': peak_and_average('peak_memory_bytes', 'avg_memory_bytes', format_memory_cell),
}


def headings_of(text: str) -> Tuple[Heading, ...]:
    """'ID=id, Path=path:2, +Reason=reason' -> headings: title, key, rank; + for a column of ours."""
    headings = []
    for title, key, rank in re.findall(r'([^=]+)=([^:,]+):?([0-9]*)(?:, )?', text):
        show = SHOWN_OBJECTS.get(key) or SHOWN_VALUES.get(key, format_cell)
        field = '' if key in SHOWN_OBJECTS else key
        headings.append(Heading(title.lstrip('+'), field, show, int(rank or 0), title[0] == '+'))
    return tuple(headings)


class Thing(NamedTuple):
    """A kind of object that the API lists, gets, creates, updates and deletes."""
    group: str          # first word of its commands, or the second where the group lists several kinds
    name: str           # one of them, as in create_NAME and get_NAME
    plural: str         # as in list_PLURAL
    key: str            # the parameter of get_NAME that names one
    columns: str        # of its list; the titles are Torc's

    @property
    def words(self) -> str:
        """One of them, for people."""
        return self.name.replace('_', ' ')


THINGS = {row[0]: Thing(*row) for row in (
    ('workflows', 'workflow', 'workflows', 'workflow_id',
     'ID=id, User=user:3, Name=name, +Status=status, Run=run_id:5, Canceled=is_canceled:8, '
     'Archived=is_archived:7, Description=description:2, Project=project:4, Metadata=metadata:9, '
     'Timestamp=timestamp:1'),
    ('jobs', 'job', 'jobs', 'job_id',
     'ID=id, Name=name, Status=status, +Code=return_code, Priority=priority:4, '
     'Compute Node=compute_node_id:3, Elapsed=(elapsed):1, Command=command:2'),
    ('files', 'file', 'files', 'row_id', 'ID=id, Name=name, Path=path, Modified Time=st_mtime:1'),
    ('user-data', 'user_data', 'user_data', 'row_id',
     'ID=id, Name=name, Ephemeral=is_ephemeral:1, Data Preview=(preview)'),
    ('resource-requirements', 'resource_requirements', 'resource_requirements', 'row_id',
     'ID=id, Name=name, CPUs=num_cpus, GPUs=num_gpus:1, Nodes=num_nodes:2, Memory=memory, Runtime=runtime'),
    ('failure-handlers', 'failure_handler', 'failure_handlers', 'row_id', 'ID=id, Name=name, Rules=rules'),
    ('results', 'result', 'results', 'row_id',
     'ID=id:2, Job ID=job_id:4, Job Name=job_name, WF ID=workflow_id:9, Run ID=run_id:6, '
     'Attempt=attempt_id:5, Return Code=return_code, Exec Time=exec_time_minutes:3, '
     'Peak Mem=peak_memory_bytes:7, Peak CPU %=peak_cpu_percent:8, Completion Time=completion_time:6, '
     'Status=status:1, +Reason=reason'),
    ('events', 'event', 'events', 'row_id',
     'Timestamp=timestamp_formatted, Level=(level), Event Type=(type), +Message=(message), Data=data:1'),
    ('compute-nodes', 'compute_node', 'compute_nodes', 'row_id',
     'ID=id, Hostname=hostname, Scheduler=compute_node_type:7, Scheduler Job ID=(slurm job):4, '
     'Labels=labels:5, PID=pid:6, CPUs=num_cpus:2, Memory (GB)=memory_gb:3, GPUs=num_gpus:3, '
     'Active=is_active, Start Time=start_time:1, Duration=duration_seconds:1, CPU peak/avg=(cpu):8, '
     'Mem peak/avg=(memory):9'),
    ('job-job', '', 'job_dependencies', '',
     'Job ID=job_id:1, Job Name=job_name, Blocked By Job ID=depends_on_job_id:2, '
     'Blocked By Job Name=depends_on_job_name'),
    ('job-file', '', 'job_file_relationships', '',
     'File ID=file_id:1, File Name=file_name, '
     'Producer Job ID=producer_job_id:2, Producer Job Name=producer_job_name, '
     'Consumer Job ID=consumer_job_id:2, Consumer Job Name=consumer_job_name'),
    ('job-user-data', '', 'job_user_data_relationships', '',
     'User Data ID=user_data_id:1, User Data Name=user_data_name, '
     'Producer Job ID=producer_job_id:2, Producer Job Name=producer_job_name, '
     'Consumer Job ID=consumer_job_id:2, Consumer Job Name=consumer_job_name'),
)}
ACTION_COLUMNS = ('ID=id, Trigger=trigger_type, Action=action_type, Allocations=(allocations):3, '
                  'Progress=(progress):1, Status=executed, Executed At=executed_at:2, Job IDs=job_ids:4')
RUNNING_COLUMNS = ('Job ID=job_id, Job Name=job_name, Compute Node=compute_node_name, Elapsed=(elapsed), '
                   'Scheduler=scheduler_type:2, Scheduler Job ID=scheduler_job_id:1')
JOB_REQUIREMENT_COLUMNS = ('Job ID=job_id:3, Job Name=job_name, RR ID=rr_id:4, RR Name=rr_name, '
                           'CPUs=num_cpus, GPUs=num_gpus:1, Nodes=num_nodes:2, Memory=memory, '
                           'Runtime=runtime')
JOB_HANDLER_COLUMNS = ('Job ID=job_id:1, Job Name=job_name, Failure Handler ID=failure_handler_id:2, '
                       'Failure Handler Name=failure_handler_name, Rules=rules')


def thing_of(session: Session) -> Thing:
    """The kind of object that the command is about: the group's, or for job-dependencies the one named by the second word."""
    group, _, verb = session.command.name.partition(' ')
    return THINGS[group] if group in THINGS else THINGS[verb]


def dated(event: Any) -> Any:
    """An event with its time in words too; anything else as it is."""
    if isinstance(event, dict) and 'timestamp_formatted' not in event and isinstance(event.get('timestamp'), int):
        return dict(event, timestamp_formatted=format_time(event['timestamp'] / 1000))
    return event


def given(args: Arguments, *but: str) -> Arguments:
    """Arguments that were given, without those named."""
    return {key: value for key, value in args.items() if value is not None and key not in but}


def cmd_list(session: Session, args: Arguments,
             complete: Callable[[Session, List[Dict[str, Any]]], None] = lambda *_: None) -> int:
    """Objects of a workflow; the other arguments are the list operation's own filters."""
    thing = thing_of(session)
    query = given(args, 'workflow_id', 'exclude')
    query['workflow_id'] = choose_workflow(session, args)
    items = [dated(item) for item in session.items(f'list_{thing.plural}', **query)]
    complete(session, items)
    excluded = {word.strip().lower() for words in args.get('exclude') or [] for word in words.split(',')}
    headings = [heading for heading in headings_of(thing.columns) if heading.title.lower() not in excluded]
    session.show_list(headings, items, thing.plural.replace('_', ' '))
    return 0


RELATIONS_SHOWN = 10    # names of each relation of a job
RELATIONS = (           # field of a job, its name in the text, the operation that gets one, its form there
    ('depends_on_job_ids',   'depends_on',       'get_job',       '{name} ({status})'),
    ('input_file_ids',       'input_files',      'get_file',      '{name} ({path})'),
    ('output_file_ids',      'output_files',     'get_file',      '{name} ({path})'),
    ('input_user_data_ids',  'input_user_data',  'get_user_data', '{name}'),
    ('output_user_data_ids', 'output_user_data', 'get_user_data', '{name}'),
)


def cmd_jobs_get(session: Session, args: Arguments) -> int:
    """One job, with why it failed or does not run; for people with names instead of ids, and times."""
    job = session.call('get_job', job_id=args['id'])
    reason = call_addition(session, 'explain_job', job_id=job['id']).get('reason')
    results = session.items('list_results', limit=1, workflow_id=job['workflow_id'], job_id=job['id'])
    if session.format == 'json':
        more = {'reason': reason, 'result': results[0] if results else None}
        session.show_json(dict(job, **{key: value for key, value in more.items() if value is not None}))
        return 0
    record = {key: job[key] for key in ('id', 'workflow_id', 'name', 'command', 'status')}
    record['reason'] = reason
    record.update((key, value) for key, value in job.items() if key not in record and value != '')
    for field, name, op, form in RELATIONS:
        ids = record.pop(field, [])
        shown = [form.format(**session.call(op, id=number)) for number in ids[:RELATIONS_SHOWN]]
        record[name] = first_of(shown + ids[RELATIONS_SHOWN:], RELATIONS_SHOWN) or None
    record['labels'] = ', '.join(job.get('labels') or ()) or None
    record.update(times_of(job, results))
    session.show(format_record(record))
    return 0


def times_of(job: Dict[str, Any], results: Sequence[Dict[str, Any]]) -> Dict[str, Any]:
    """When a job began and ended, and with which code. The server keeps the start of running jobs only."""
    if not results:
        return {'start_time': format_local_time(job.get('start_time')) or None}
    exec_s, end_time = results[0]['exec_time_minutes'] * 60, results[0]['completion_time']
    start_time = job.get('start_time') or format_time(parse_time(end_time) - exec_s)
    return {'start_time': format_local_time(start_time), 'completion_time': format_local_time(end_time),
            'exec_time': format_seconds(exec_s), 'return_code': results[0]['return_code']}


OUTCOMES_ASKED = 20     # results that are asked for one by one; for more of them the list of all is cheaper


def cmd_jobs_list(session: Session, args: Arguments) -> int:
    """Jobs of a workflow, with the return code and the run time of those that have ended."""
    return cmd_list(session, args, add_outcomes)


def add_outcomes(session: Session, jobs: List[Dict[str, Any]]) -> None:
    """Fill in what the current results of jobs say."""
    ended = [job for job in jobs if STATUSES[STATUS_CODES[job['status']]].is_final]
    if not ended:
        return
    queries = [{}]  # type: List[Dict[str, int]]
    if len(ended) <= OUTCOMES_ASKED:
        queries = [{'job_id': job['id']} for job in ended]
    results = {result['job_id']: result for query in queries
               for result in session.items('list_results', workflow_id=ended[0]['workflow_id'], **query)}
    for job in ended:
        if job['id'] in results:
            job.update({key: results[job['id']][key] for key in ('return_code', 'exec_time_minutes')})


def call_on(session: Session, verb: str, number: int, body: Any = None) -> Dict[str, Any]:
    """Get, update or delete one object of the command's kind."""
    thing = thing_of(session)
    op = f'{verb}_{thing.name}'
    if op == 'delete_resource_requirements':    # the plural deletes all of a workflow
        op = 'delete_resource_requirement'
    return dated(session.call(op, body, **{thing.key: number}))


def cmd_get(session: Session, args: Arguments) -> int:
    """One object."""
    record = call_on(session, 'get', args['id'])
    session.answer(record, format_record(record))
    return 0


def cmd_create(session: Session, args: Arguments) -> int:
    """A new object from the arguments that were given."""
    thing = thing_of(session)
    parameters = {key: args[key] for key in ('consumer_job_id', 'producer_job_id') if args.get(key) is not None}
    body = dict(given(args, 'workflow_id', *parameters), workflow_id=choose_workflow(session, args))
    record = dated(session.call(f'create_{thing.name}', body, **parameters))
    session.answer(record, f"Created {thing.words} {record['id']}\n")
    return 0


def cmd_update(session: Session, args: Arguments) -> int:
    """Changes of one object; what is not given stays."""
    changes = {key: value for key, value in args.items() if value is not None and key != 'id'}
    if not changes:
        raise BadInput(f"nothing to change: give one of {', '.join(option_names(session.command))}")
    record = call_on(session, 'update', args['id'], changes)
    session.answer(record, f"Updated {thing_of(session).words} {args['id']}\n")
    return 0


def option_names(command: Any) -> List[str]:
    """Long names of a command's options."""
    return [argument.names.split()[-1] for argument in command.arguments if argument.names.startswith('-')]


def cmd_delete(session: Session, args: Arguments) -> int:
    """Delete one object."""
    record = call_on(session, 'delete', args['id'])
    session.answer(record, f"Deleted {thing_of(session).words} {args['id']}\n")
    return 0


ID_LISTS = {
    'files list-required-existing': ('list_required_existing_files', 'files'),
    'user-data list-missing': ('list_missing_user_data', 'user_data'),
}


def cmd_list_ids(session: Session, args: Arguments) -> int:
    """Ids that an operation answers: files that must exist, user data that has no value."""
    op, key = ID_LISTS[session.command.name]
    ids = session.call(op, workflow_id=choose_workflow(session, args))[key]
    session.answer({key: ids}, ''.join(f'{number}\n' for number in ids) or 'None\n')
    return 0


def cmd_delete_all_user_data(session: Session, args: Arguments) -> int:
    """Delete all user data of a workflow."""
    workflow_id = args['workflow_id']
    if not session.confirm(f'Delete all user data of {name_workflow(session, workflow_id)}?'):
        return 0
    count = session.call('delete_all_user_data', workflow_id=workflow_id)['count']
    message = f'Deleted {count} user data records for workflow {workflow_id}'
    session.answer({'deleted_count': count, 'message': message}, message + '\n')
    return 0


def cmd_create_event(session: Session, args: Arguments) -> int:
    """A new event; the server's clock would do, but the operation wants a time."""
    body = {'workflow_id': choose_workflow(session, args), 'timestamp': int(time.time() * 1000), 'data': args['data']}
    record = dated(session.call('create_event', body))
    session.answer(record, f"Created event {record['id']}\n")
    return 0


def cmd_latest_event(session: Session, args: Arguments) -> int:
    """The newest event of a workflow, or null."""
    workflow_id = choose_workflow(session, args)
    found = session.items('list_events', limit=1, sort_by='timestamp', reverse_sort=True, workflow_id=workflow_id)
    event = dated(found[0]) if found else None
    session.answer(event, format_record(event) if event else 'No events found\n')
    return 0


def stream_values(session: Session, op: str, until: float = math.inf, **params: Any) -> Iterator[Any]:
    """What the events of a stream tell; those that were missed are told on stderr."""
    for event in session.client.stream(op, until, **params):
        if event.type != 'warning':
            yield event.data
            continue
        count = event.data.get('dropped') if isinstance(event.data, dict) else None
        session.tell(f'torc: {count} events were missed' if count is not None else 'torc: events were missed while the server was away')


def cmd_monitor_events(session: Session, args: Arguments) -> int:
    """What happens to a workflow from now on: one JSON document after the other, in the file one a line."""
    workflow_id = choose_workflow(session, args)
    until = math.inf if args['duration'] is None else time.monotonic() + args['duration'] * 60
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open_to_append(args['filename'])) if args['filename'] else None
        for value in stream_values(session, 'stream_workflow_events', until, workflow_id=workflow_id, level=args['level']):
            session.show_json(value)
            session.out.flush()
            if file is not None:
                file.write(format_json(value) + '\n')
                file.flush()
    return 0


def open_to_append(path: str) -> Any:
    """A text file to add to."""
    try:
        return open(path, 'a', encoding='utf-8')
    except OSError as error:
        raise BadInput(f'cannot write to {path}: {error.strerror}') from None


# -------- for administrators --------

AUDIT_COLUMNS = ('ID=id, Time=timestamp:1, User=user_name:2, Committed=committed:5, Success=success:3, '
                 'Full Table=allow_full_table:6, Rows=rows_affected:4, SQL=sql_text, Error=error:2')
STATS_COLUMNS = ('Start=start_ms, Requests=request_count, Bytes In=bytes_in:1, Bytes Out=bytes_out:1, '
                 '2xx=status_2xx, 4xx=status_4xx, 5xx=status_5xx, Other=status_other:2')


def cmd_reload_auth(session: Session, args: Arguments) -> int:
    """Let the server read its users anew."""
    answer = session.call('reload_auth')
    session.answer(answer, answer['message'] + '\n')
    return 0


def cmd_tail_api(session: Session, args: Arguments) -> int:
    """Requests as the server answers them, one JSON line each."""
    for value in stream_values(session, 'stream_api_events', include_bodies=bool(args['include_bodies'])):
        session.show(format_json(value) + '\n')
        session.out.flush()
    return 0


def cmd_api_stats(session: Session, args: Arguments) -> int:
    """Requests and bytes of the last minutes."""
    answer = session.call('get_api_stats', window_seconds=args['window'], interval_seconds=args['interval'])
    busy = [dict(bucket, start_ms=format_time(bucket['start_ms'] / 1000)) for bucket in answer['buckets'] if any(list(bucket.values())[:-1])]
    if session.format == 'json':
        session.show_json(answer)
        return 0
    return show_rows(session, STATS_COLUMNS, busy, 'steps with requests')


def cmd_list_audit_log(session: Session, args: Arguments) -> int:
    """What administrators changed with SQL."""
    answer = session.call('list_admin_audit_log', **given(args))
    if session.format == 'json':
        session.show_json(answer)
        return 0
    return show_rows(session, AUDIT_COLUMNS, [dict(item, timestamp=format_time(item['timestamp'] / 1000)) for item in answer['items']], 'entries')


def cmd_admin_sql(session: Session, args: Arguments) -> int:
    """One SQL statement on the server's database."""
    body = given(args, 'yes')
    if args['write'] and not (args['yes'] or session.options['no_prompts'] or confirm_sql(session, body)):
        return 0
    answer = session.call('admin_sql', body)
    if session.format == 'json':
        session.show_json(answer)
    elif answer['columns'] or session.format == 'csv':
        headings = [Heading(name, '', lambda row, name=name: format_cell(row[name])) for name in answer['columns']]
        session.show_list(headings, answer['items'], 'rows')
    if answer.get('rows_affected') is not None and session.format == 'table':
        session.show(f"{answer['rows_affected']} rows changed\n")
    return 0


def confirm_sql(session: Session, body: Dict[str, Any]) -> bool:
    """Show how many rows a statement would change, and ask."""
    if not session.is_interactive:
        raise BadInput('this changes the database and there is no terminal to ask on; give -y to go on without asking')
    count = session.call('admin_sql', dict(body, dry_run=True)).get('rows_affected')
    session.err.write(f'{count} rows would change. Go on? (y/N) ')
    session.err.flush()
    is_wanted = session.stdin.readline().strip().lower() in ('y', 'yes')
    if not is_wanted:
        session.tell('Cancelled')
    return is_wanted


# -------- files on disk --------

def current_directory() -> str:
    """The current directory, as text that JSON can carry."""
    return printable(os.getcwd())


def base_directory(workflow: Dict[str, Any]) -> str:
    """Where relative paths of a workflow start: the directory of its creation if it is here, else the current one."""
    directory = workflow.get('submission_directory')
    return directory if directory and os.path.isdir(directory) else os.getcwd()


def file_times(session: Session, workflow: Dict[str, Any]) -> Dict[str, Optional[float]]:
    """Time of the last change of every file of a workflow, by its id as text; None for those that are not there."""
    base, times = base_directory(workflow), {}
    for item in session.items('list_files', workflow_id=workflow['id']):
        try:
            times[str(item['id'])] = os.stat(os.path.join(base, item['path'])).st_mtime
        except (OSError, ValueError):
            times[str(item['id'])] = None
    return times


class FileCheck(NamedTuple):
    """What there is on disk before a workflow starts."""
    missing_inputs: List[str]       # that must exist
    existing_outputs: List[str]     # that will be written over
    missing_user_data: List[Any]    # without a value, by id; by name before creation


def check_files(session: Session, workflow: Dict[str, Any]) -> FileCheck:
    """Look for input files that no job makes, output files that exist already, and user data without a value.

    The server also requires what completed jobs have made; what of that is gone is made again, so it is no reason to refuse.
    """
    number, base = workflow['id'], base_directory(workflow)
    outputs = session.items('list_files', workflow_id=number, is_output=True)
    required = set(session.call('list_required_existing_files', workflow_id=number)['files']).difference(item['id'] for item in outputs)
    files = session.items('list_files', workflow_id=number) if required else []
    missing = sorted(item['path'] for item in files if item['id'] in required and not file_exists(base, item['path']))
    existing = sorted(item['path'] for item in outputs if file_exists(base, item['path']))
    empty = session.call('list_missing_user_data', workflow_id=number)['user_data']
    if empty:
        pairs = session.items('list_job_user_data_relationships', workflow_id=number)
        made = {pair['user_data_id'] for pair in pairs if pair.get('producer_job_id') is not None}
        empty = [row_id for row_id in empty if row_id not in made]
    return FileCheck(missing, existing, empty)


def file_exists(base: str, path: str) -> bool:
    """Whether a workflow's file is there."""
    return os.path.exists(os.path.join(base, path))


def refuse_missing_inputs(session: Session, check: FileCheck, is_forced: bool) -> None:
    """Refused where required files or user data are missing; --force turns missing files into a warning."""
    if check.missing_inputs:
        missing = check.missing_inputs
        message = printable(f'{len(missing)} input files that no job makes are missing: {first_of(missing)}')
        if not is_forced:
            raise Refused(f'{message}; make them, or give --force to go on without them')
        session.tell(f'warning: {message}')
    if check.missing_user_data:
        raise Refused(printable(f'user data that no job makes has no value: {first_of(check.missing_user_data)}; '
                                'set it in the file, or with `user-data update ID --data JSON`'))


# -------- workflows --------

def cmd_workflows_new(session: Session, args: Arguments) -> int:
    """An empty workflow, to be filled with `jobs create` and the like."""
    body = dict(given(args), user=user_name(), submission_directory=current_directory())
    workflow = session.call('create_workflow', body)
    session.answer(workflow, f"Created workflow {workflow['id']}\n")
    return 0


def cmd_workflows_list(session: Session, args: Arguments) -> int:
    """Workflows of the user, or of all."""
    query = given(args, 'all_users', 'archived_only', 'include_archived')
    if not args['all_users'] and not args['access_group']:
        query['user'] = user_name()
    if args['archived_only'] or not args['include_archived']:
        query['is_archived'] = bool(args['archived_only'])
    items = session.items('list_workflows', **query)
    statuses = {}  # type: Dict[str, str]
    for piece in chunks([item['id'] for item in items]):
        statuses.update(call_addition(session, 'list_workflow_statuses', ids=piece).get('statuses', {}))
    items = [dict(item, status=statuses.get(str(item['id']))) for item in items]
    hidden = '' if args['all_users'] or args['access_group'] else 'User'
    headings = [heading for heading in headings_of(THINGS['workflows'].columns) if heading.title != hidden]
    session.show_list(headings, items, 'workflows')
    return 0


def cmd_workflows_get(session: Session, args: Arguments) -> int:
    """One workflow."""
    workflow = session.call('get_workflow', workflow_id=choose_workflow(session, args))
    session.answer(workflow, format_record(workflow))
    return 0


def cmd_workflows_update(session: Session, args: Arguments) -> int:
    """Change name, description, owner, project or metadata."""
    workflow_id = choose_workflow(session, args)
    return cmd_update(session, dict({key: value for key, value in args.items() if key != 'workflow_id'}, id=workflow_id))


def cmd_is_complete(session: Session, args: Arguments) -> int:
    """Whether nothing more is to come."""
    answer = session.call('is_workflow_complete', workflow_id=choose_workflow(session, args))
    session.answer(answer, f"complete: {format_cell(answer['is_complete'])}, canceled: {format_cell(answer['is_canceled'])}\n")
    return 0


def cmd_list_actions(session: Session, args: Arguments) -> int:
    """Actions of a workflow and how far their triggers are."""
    actions = session.call('get_workflow_actions', workflow_id=choose_workflow(session, args))
    if session.format == 'json':
        session.show_json({'actions': actions})
    else:
        session.show_list(headings_of(ACTION_COLUMNS), actions, 'actions')
    return 0


def cmd_update_action(session: Session, args: Arguments) -> int:
    """Change keys of an action's configuration; what is not given stays. Options win over --json."""
    if not isinstance(args['json'], (dict, type(None))):
        raise BadInput('--json wants an object, such as \'{"num_allocations": 2}\'')
    changes = dict(args['json'] or {}, **given(args, 'workflow_id', 'action_id', 'json'))
    if not changes:
        raise BadInput(f"nothing to change: give one of {', '.join(option_names(session.command))}")
    action = session.call('update_workflow_action', changes, workflow_id=args['workflow_id'], action_id=args['action_id'])
    session.answer(action, f"Updated action {args['action_id']}\n")
    return 0


def cmd_delete_action(session: Session, args: Arguments) -> int:
    """Delete one action."""
    workflow_id, action_id = args['workflow_id'], args['action_id']
    if not session.confirm(f'Delete action {action_id} of {name_workflow(session, workflow_id)}?'):
        return 0
    session.call('delete_workflow_action', workflow_id=workflow_id, action_id=action_id)
    session.answer({'action_id': action_id, 'deleted': True, 'workflow_id': workflow_id}, f'Deleted action {action_id}\n')
    return 0


def cmd_archive(session: Session, args: Arguments) -> int:
    """Hide workflows from lists, or show them again."""
    done, errors = [], []
    for workflow_id in args['workflow_ids'] or [choose_workflow(session, {'workflow_id': None})]:
        try:
            session.call('archive_workflow', {'is_archived': args['is_archived']}, workflow_id=workflow_id)
            done.append(workflow_id)
        except NotFound as error:
            errors.append({'workflow_id': workflow_id, 'error': error.message})
    status = 'success' if not errors else 'partial_success' if done else 'error'
    answer = {'status': status, 'updated_workflows': done, 'is_archived': args['is_archived']}
    word = 'Archived' if args['is_archived'] else 'Unarchived'
    session.answer(dict(answer, errors=errors) if errors else answer, ''.join(f'{word} workflow {number}\n' for number in done))
    for error in errors:
        session.tell(f"workflow {error['workflow_id']}: {error['error']}")
    return NotFound.exit if errors else 0


def cmd_init(session: Session, args: Arguments) -> int:
    """Make every job ready or blocked anew, in a new run, whatever had been done before."""
    workflow = session.call('get_workflow', workflow_id=choose_workflow(session, args))
    check = check_files(session, workflow)
    if args['dry_run']:
        return answer_file_check(session, workflow['id'], check, {})
    active = active_task(session, workflow)
    if active:
        return answer_task(session, args, active)
    refuse_missing_inputs(session, check, args['force'])
    question = f"Forget all results of {name_workflow(session, workflow['id'])}, and start it again?"
    if workflow.get('run_id') and not session.confirm(question):
        return 0
    if check.existing_outputs:
        session.tell(f'{len(check.existing_outputs)} output files exist already and will be written over')
    session.call('reset_workflow_status', workflow_id=workflow['id'], force=args['force'])
    session.call('reset_job_status', workflow_id=workflow['id'])
    session.call('set_file_times', {'files': file_times(session, workflow)}, workflow_id=workflow['id'])
    return answer_task(session, args, begin_initialize(session, workflow, False))


def cmd_reinit(session: Session, args: Arguments) -> int:
    """Make ready what has to run again because its files, its data or its command changed, and what depends on it."""
    workflow = session.call('get_workflow', workflow_id=choose_workflow(session, args))
    check = check_files(session, workflow)
    if args['dry_run']:
        return answer_file_check(session, workflow['id'], check, find_changes(session, workflow, is_dry_run=True))
    active = active_task(session, workflow)
    if active:
        return answer_task(session, args, active)
    refuse_missing_inputs(session, check, args['force'])
    session.call('reset_workflow_status', workflow_id=workflow['id'], force=args['force'])
    found = find_changes(session, workflow, is_dry_run=False)
    for change in found['changed'] + found['downstream_jobs']:
        session.tell(printable(f"{change['job_name']} will run again: {change['reason']}"))
    return answer_task(session, args, begin_initialize(session, workflow, True))


def find_changes(session: Session, workflow: Dict[str, Any], is_dry_run: bool) -> Dict[str, Any]:
    """Jobs to run again: `changed`, marked as uninitialized unless it is a dry run, and `downstream_jobs`."""
    body = {'files': file_times(session, workflow), 'dry_run': is_dry_run}
    return session.call('check_changes', body, workflow_id=workflow['id'])


def reinitialize(session: Session, workflow: Dict[str, Any]) -> int:
    """Mark what changed, then initialize what is uninitialized. How many jobs run again."""
    found = find_changes(session, workflow, is_dry_run=False)
    session.call('initialize_jobs', workflow_id=workflow['id'], only_uninitialized=True)
    return sum(map(len, found.values()))


def active_task(session: Session, workflow: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    """The task that is at work on a workflow: to begin another would only begin another run."""
    return session.call('get_active_task_for_workflow', workflow_id=workflow['id']).get('task')


def begin_initialize(session: Session, workflow: Dict[str, Any], only_uninitialized: bool) -> Dict[str, Any]:
    """The server's task that makes a workflow ready."""
    return session.call('initialize_jobs', workflow_id=workflow['id'], **{'only_uninitialized': only_uninitialized, 'async': True})


def wait_for_task(session: Session, task: Dict[str, Any], timeout_s: Optional[float], longest_pause_s: float) -> Dict[str, Any]:
    """A task that has ended, or, when the time is over, as it is then."""
    deadline, pause_s = math.inf if timeout_s is None else time.monotonic() + timeout_s, 0.02
    while task['status'] in ('queued', 'running') and time.monotonic() < deadline:
        time.sleep(max(0.0, min(pause_s, deadline - time.monotonic())))
        pause_s = min(pause_s * 1.5, longest_pause_s)
        task = session.call('get_task', task_id=task['id'])
    return task


def explain_task(task: Dict[str, Any]) -> Optional[str]:
    """Why a task that was waited for is no success; None if it is one."""
    if task['status'] == 'succeeded':
        return None
    return task.get('error') or f"task {task['id']} is still {task['status']}: wait on with `torc.py tasks wait {task['id']}`"


def cmd_tasks_wait(session: Session, args: Arguments) -> int:
    """Wait for the end of a task."""
    task = session.call('get_task', task_id=args['id'])
    task = wait_for_task(session, task, args['timeout'], args['poll_fallback_interval'])
    error = explain_task(task)
    session.answer(task, f"Task {task['id']} ({task['operation']} of workflow {task['workflow_id']}): {task['status']}\n")
    if error:
        session.tell(printable(f'torc: {error}'))
    return 1 if error else 0


def answer_task(session: Session, args: Arguments, task: Dict[str, Any]) -> int:
    """What init and reinit say: how the task ended, or, with --async, that there is one."""
    doing, noun = ('Reinitializing', 'Reinitialize') if session.command.name.endswith('reinit') else ('Initializing', 'Initialization')
    workflow_id = task['workflow_id']
    value = {'status': 'success', 'task_id': task['id'], 'task_operation': task['operation'], 'workflow_id': workflow_id}
    if args['async']:
        session.answer(dict(value, message=f'{noun} task created', task_status=task['status']),
                       f"Task {task['id']} initializes workflow {workflow_id}; wait for it with: torc.py tasks wait {task['id']}\n")
        return 0
    task = wait_for_task(session, task, args['wait_timeout'], TASK_PAUSE_S)
    error = explain_task(task)
    value.update(error=error, task_status=task['status'], message=f"{doing} task {'failed' if error else 'completed'}")
    if error:
        session.tell(printable(f'torc: {error}'))
        value['status'] = 'error'
    session.answer(value, '' if error else f'Workflow {workflow_id} is initialized. Run it with: torc.py run {workflow_id}\n')
    return 1 if error else 0


def answer_file_check(session: Session, workflow_id: int, check: FileCheck, found: Dict[str, Any]) -> int:
    """What a dry run of init and reinit says; `found` is what would run again."""
    value = {'existing_output_file_count': len(check.existing_outputs), 'existing_output_files': check.existing_outputs,
             'missing_input_file_count': len(check.missing_inputs), 'missing_input_files': check.missing_inputs,
             'safe': not check.missing_inputs and not check.missing_user_data, 'workflow_id': workflow_id}
    value.update(found)
    changed = [change for changes in found.values() for change in changes]
    lines = [f'missing input: {path}' for path in check.missing_inputs]
    lines += [f'missing user data: id {number}' for number in check.missing_user_data]
    lines += [f'existing output: {path}' for path in check.existing_outputs]
    lines += [f"would run again: {change['job_name']} ({change['reason']})" for change in changed]
    lines.append('Not safe: make what is missing, or give --force' if not value['safe'] else
                 f'{len(changed)} jobs would run again' if changed else 'Safe: nothing is missing')
    session.answer(value, ''.join(printable(line) + '\n' for line in lines))
    return 0 if value['safe'] else Refused.exit


def cmd_reset_status(session: Session, args: Arguments) -> int:
    """Set jobs back to uninitialized: all, or those that did not complete."""
    workflow_id = choose_workflow(session, args)
    which = 'jobs that failed' if args['failed_only'] else 'all jobs'
    if not session.confirm(f'Reset the status of {which} of {name_workflow(session, workflow_id)}?'):
        return 0
    session.call('reset_workflow_status', workflow_id=workflow_id, force=args['force'])
    count = session.call('reset_job_status', workflow_id=workflow_id, failed_only=args['failed_only'])['updated_count']
    messages = [f'Successfully reset workflow status for workflow {workflow_id}',
                f'Successfully reset {count} jobs of workflow {workflow_id}']
    if args['reinitialize']:
        reinitialize(session, session.call('get_workflow', workflow_id=workflow_id))
        messages.append(f'Successfully reinitialized workflow {workflow_id}')
    operations = {'job_reset': True, 'reinitialize': True if args['reinitialize'] else None, 'workflow_reset': True}
    value = {'failed_only': bool(args['failed_only']), 'messages': messages, 'operations': operations, 'status': 'success',
             'workflow_id': workflow_id}
    session.answer(value, ''.join(message + '\n' for message in messages))
    return 0


def cmd_status(session: Session, args: Arguments) -> int:
    """How far a workflow is."""
    status = session.call('get_workflow_status', workflow_id=choose_workflow(session, args))
    status['explanation'] = call_addition(session, 'explain_workflow', workflow_id=status['workflow_id'])
    status.setdefault('unserved_ready_labels', {})
    status['total_exec_time_formatted'] = format_seconds(status['total_exec_time_minutes'] * 60)
    if status.get('walltime_seconds') is not None:
        status['walltime_formatted'] = format_seconds(status['walltime_seconds'])
    session.answer(status, format_status(status, style_of(session.out, os.environ)))
    for labels, count in status['unserved_ready_labels'].items():
        session.tell(printable(f'warning: {count} ready jobs wait for a runner with --label {labels}'))
    if status.get('runtime_blocked_ready_jobs'):
        session.tell(f"warning: {status['runtime_blocked_ready_jobs']} ready jobs need more time than any active node has left")
    return 0


def cmd_cancel(session: Session, args: Arguments) -> int:
    """Stop a workflow: what runs is stopped, what waits never starts."""
    workflow_id = choose_workflow(session, args)
    named = name_workflow(session, workflow_id)
    if not session.confirm(f'Cancel {named}?'):
        return 0
    session.call('cancel_workflow', workflow_id=workflow_id)
    value = {'canceled_slurm_jobs': [], 'errors': None, 'status': 'success', 'workflow_id': workflow_id}
    now = command_line(session, 'run', workflow_id, '--retry-failed')
    later = command_line(session, 'workflows', 'reset-status', workflow_id, '--failed-only', '-r')
    session.answer(value, f'Canceled {named}. To go on with what it left undone: {now}\n'
                          f'(or {later}, and run it later)\n')
    return 0


def cmd_delete_workflows(session: Session, args: Arguments) -> int:
    """Delete workflows and everything that belongs to them, but no file on disk."""
    ids = args['workflow_ids']
    found, code = try_each(session, ids, functools.partial(own_workflow, session))
    names = printable(', '.join(f"{workflow['id']} ({workflow['name']})" for workflow in found))
    question = f'Delete workflow {names} of {session.client.location} with all jobs and results?'
    if found and not session.confirm(question):
        return code
    deleted, later = try_each(session, [workflow['id'] for workflow in found],
                              lambda number: session.call('delete_workflow', workflow_id=number))
    named = [f"workflow {workflow['id']} ({workflow['name']})" for workflow in deleted]
    lines = [printable(f'Deleted {name} of {session.client.location}\n') for name in named]
    session.answer(deleted, ''.join(lines))
    return later or code


def try_each(session: Session, ids: Sequence[int], act: Callable[[int], Any]) -> Tuple[List[Any], int]:
    """What an action returned for each id, and the exit code; the refusal of one does not stop the others."""
    done, code = [], 0
    for number in ids:
        try:
            done.append(act(number))
        except (NotFound, Denied) as error:
            session.tell(f'torc: {error.message}')
            code = error.exit
    return done, code


def own_workflow(session: Session, workflow_id: int) -> Dict[str, Any]:
    """A workflow of the user: another's is not deleted by mistake."""
    workflow = session.call('get_workflow', workflow_id=workflow_id)
    if workflow['user'] != user_name():
        user = workflow['user']
        raise Denied(printable(f'workflow {workflow_id} belongs to {user}, you are {user_name()}: it stays'))
    return workflow


def cmd_ping(session: Session, args: Arguments) -> int:
    """Whether a server answers."""
    session.call('ping')
    if session.client.is_direct:
        raise Unreachable(f'no server is running; commands use the database {session.client.database} directly; '
                          '`torc.py serve` starts a server')
    session.answer({'status': 'Server is running'}, 'Server is running\n')
    return 0


# -------- execution plan --------

def is_id(word: str) -> bool:
    """Whether a word that may be an id or a file is an id: an integer is, whatever files there are."""
    if re.match(r'[0-9]{19,}\Z', word) and int(word) > MAX_INTEGER:
        raise BadInput(f'{word} is not an id: it is too large')
    return bool(re.match(r'[0-9]+\Z', word))


def cmd_execution_plan(session: Session, args: Arguments) -> int:
    """In which order jobs become ready: events, each with what it starts."""
    if is_id(args['target']):
        plan = stored_plan(session, int(args['target']))
    else:
        plan = file_plan(read_spec(session, args['target'], args).body)
    session.answer(dict(plan, status='success'), format_execution_plan(plan))
    return 0


def file_plan(body: Dict[str, Any]) -> Dict[str, Any]:
    """Execution plan of a workflow that is not created yet."""
    jobs, producers = body['jobs'], find_producers(body['jobs'])
    needs = [set(body['dependency_sets'][job.dependencies]) if job.dependencies is not None else set() for job in jobs]
    for need, job in zip(needs, jobs):
        need.update(maker for key in input_keys(job) for maker in producers.get(key, ()))
    told = []
    for action in body['actions']:
        config = action['action_config']
        if action['action_type'] == 'schedule_nodes':
            place = config.get('scheduler')
            name = body['slurm_schedulers'][place].get('name') if isinstance(place, int) else place
            told.append(Allocation(action['trigger_type'], action.get('job_indexes'), allocation_words(config, name)))
    plan = execution_plan([job.name for job in jobs], needs, told)
    return dict(plan, source='spec_file', workflow_name=body['workflow']['name'])


def stored_plan(session: Session, workflow_id: int) -> Dict[str, Any]:
    """Execution plan of a workflow from its jobs as they are stored."""
    workflow = session.call('get_workflow', workflow_id=workflow_id)
    jobs = session.items('list_jobs', workflow_id=workflow_id)
    places = {job['id']: place for place, job in enumerate(jobs)}
    needs: List[Set[int]] = [set() for _ in jobs]
    for op in ('list_job_dependencies', 'list_job_file_relationships', 'list_job_user_data_relationships'):
        for edge in session.items(op, workflow_id=workflow_id):
            first = edge.get('depends_on_job_id', edge.get('producer_job_id'))
            later = edge.get('job_id', edge.get('consumer_job_id'))
            if first is not None and later is not None:
                needs[places[later]].add(places[first])
    names = {item['id']: item.get('name') for item in session.items('list_slurm_schedulers', workflow_id=workflow_id)}
    told = []
    for action in session.call('get_workflow_actions', workflow_id=workflow_id):
        if action['action_type'] == 'schedule_nodes':
            config = action['action_config']
            told.append(Allocation(action['trigger_type'], [places[job_id] for job_id in action.get('job_ids') or ()],
                                   allocation_words(config, names.get(config.get('scheduler_id')))))
    plan = execution_plan([job['name'] for job in jobs], needs, told)
    return dict(plan, source='database', workflow_id=workflow_id, workflow_name=workflow['name'])


def allocation_words(config: Dict[str, Any], scheduler: Optional[str]) -> Dict[str, Any]:
    """What an execution plan tells of a schedule_nodes action."""
    return {'scheduler': scheduler, 'scheduler_type': config.get('scheduler_type', 'slurm'),
            'num_allocations': config.get('num_allocations', 1)}


def format_execution_plan(plan: Dict[str, Any]) -> str:
    """The plan for people: an event, what it waits for, what it starts."""
    lines = [f"Execution plan of {plan['workflow_name']}: {plan['total_jobs']} jobs in {plan['total_events']} events", '']
    for event in plan['events']:
        lines.append(f"{event['id']}: {event['trigger_description']}")
        for allocation in event['scheduler_allocations']:
            lines.append(f"    allocates {allocation['num_allocations']} x {allocation['scheduler']}")
        lines.append(f"    starts {first_of(event['jobs_becoming_ready'])}")
    return ''.join(printable(line) + '\n' for line in lines)


# -------- jobs --------

def cmd_jobs_create_from_file(session: Session, args: Arguments) -> int:
    """A job for each line of a file, all with the same requirements."""
    workflow_id, commands = args['workflow_id'], read_commands(session, args['file'])
    if not commands:
        raise BadInput(f"{args['file']} holds no command: write one on each line")
    count = session.call('list_jobs', workflow_id=workflow_id, limit=1)['total_count']
    wanted = {'num_cpus': args['cpus_per_job'], 'memory': args['memory_per_job'], 'runtime': args['runtime_per_job']}
    wanted.update(workflow_id=workflow_id, name=f'from_file_{count + 1}')
    needs = session.call('create_resource_requirements', wanted)['id']
    jobs = [{'workflow_id': workflow_id, 'name': f'job{number}', 'command': command, 'resource_requirements_id': needs}
            for number, command in enumerate(commands, count + 1)]
    for start in range(0, len(jobs), MAX_LIST_ITEMS):
        session.call('create_jobs', {'jobs': jobs[start:start + MAX_LIST_ITEMS]})
    message = f'Successfully created {len(jobs)} jobs from file'
    value = {'jobs_created': len(jobs), 'message': message, 'status': 'success', 'workflow_id': workflow_id}
    session.answer(value, message + '\n')
    return 0


def read_commands(session: Session, path: str) -> List[str]:
    """Lines of a file of commands, '-' for stdin, without blank ones and comments."""
    text = read_input(session, path).decode('utf-8', 'surrogateescape')
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith('#')]


def cmd_jobs_update(session: Session, args: Arguments) -> int:
    """Change a job; --runtime changes the requirements that it then has, which other jobs may share."""
    changes = {key: value for key, value in args.items() if value is not None and key not in ('id', 'runtime', 'clear_labels')}
    if args['clear_labels']:
        changes['labels'] = []
    if not changes and not args['runtime']:
        raise BadInput(f"nothing to change: give one of {', '.join(option_names(session.command))}")
    job = session.call('get_job', job_id=args['id'])
    if changes:
        job = session.call('update_job', changes, job_id=args['id'])
    if args['runtime']:
        update_runtime(session, job, args['runtime'])
    session.answer(job, f"Updated job {args['id']}\n")
    return 0


def update_runtime(session: Session, job: Dict[str, Any], runtime: str) -> None:
    """Change the runtime of a job's requirements, and say who else has them."""
    needs_id = job['resource_requirements_id']
    needs = session.call('update_resource_requirements', {'runtime': runtime}, row_id=needs_id)
    query = {'workflow_id': job['workflow_id'], 'resource_requirements_id': needs_id}
    count = session.call('list_jobs', limit=1, **query)['total_count']
    if count > 1:
        name = f"resource requirements {needs_id} ({needs['name']})"
        session.tell(printable(f'the runtime of {name} is {runtime} now; {count} jobs share them'))


def cmd_jobs_delete(session: Session, args: Arguments) -> int:
    """Delete jobs: all, or none if one is not there or in a runner's hands."""
    jobs = [session.call('get_job', job_id=job_id) for job_id in dict.fromkeys(args['job_ids'])]
    refuse_active_jobs(jobs)
    deleted = [session.call('delete_job', job_id=job['id']) for job in jobs]
    session.answer({'items': deleted}, ''.join(f"Deleted job {job['id']}\n" for job in deleted))
    return 0


def refuse_active_jobs(jobs: List[Dict[str, Any]], cure: str = 'cancel the workflow') -> None:
    """Refuse while any of these jobs is in a runner's hands."""
    active = [job['name'] for job in jobs if STATUSES[STATUS_CODES[job['status']]].is_active]
    if active:
        names = first_of(active)
        raise Refused(printable(f'jobs are pending or running: {names}; wait for their end, or {cure}'))


def cmd_jobs_delete_all(session: Session, args: Arguments) -> int:
    """Delete every job of a workflow."""
    workflow_id = args['workflow_id']
    if not session.confirm(f'Delete all jobs of {name_workflow(session, workflow_id)}?'):
        return 0
    answer = session.call('delete_jobs', workflow_id=workflow_id)
    session.answer({'count': answer['count']}, f"Deleted {answer['count']} jobs\n")
    return 0


def cmd_jobs_running(session: Session, args: Arguments) -> int:
    """Jobs that run now, and where."""
    jobs = session.items('get_running_jobs', workflow_id=choose_workflow(session, args))
    session.show_list(headings_of(RUNNING_COLUMNS), jobs, 'running jobs')
    return 0


def jobs_with(session: Session, args: Arguments, op: str, key: str) -> Iterator[Tuple[Dict[str, Any], Any]]:
    """Jobs of a workflow, or the one that was named, each with the object of a list that its `key` points at, or None."""
    if args['job_id'] is not None:
        jobs = [session.call('get_job', job_id=args['job_id'])]
    else:
        jobs = session.items('list_jobs', workflow_id=choose_workflow(session, args))
    known = {item['id']: item for item in session.items(op, workflow_id=jobs[0]['workflow_id'])} if jobs else {}
    return ((job, known.get(job.get(key))) for job in jobs)


def cmd_jobs_requirements(session: Session, args: Arguments) -> int:
    """Resource requirements of each job."""
    rows = []
    for job, needs in jobs_with(session, args, 'list_resource_requirements', 'resource_requirements_id'):
        if needs is not None:
            row = dict(needs, job_id=job['id'], job_name=job['name'], rr_id=needs['id'], rr_name=needs['name'])
            del row['id'], row['name']
            rows.append(row)
    return show_rows(session, JOB_REQUIREMENT_COLUMNS, rows, 'jobs')


def cmd_jobs_handlers(session: Session, args: Arguments) -> int:
    """Failure handler of each job that has one."""
    rows = []
    for job, handler in jobs_with(session, args, 'list_failure_handlers', 'failure_handler_id'):
        if handler is not None:
            rows.append({'job_id': job['id'], 'job_name': job['name'], 'failure_handler_id': handler['id'],
                         'failure_handler_name': handler['name'], 'rules': handler['rules'], 'workflow_id': job['workflow_id']})
    return show_rows(session, JOB_HANDLER_COLUMNS, rows, 'jobs with a failure handler')


def show_rows(session: Session, columns: str, rows: List[Dict[str, Any]], what: str) -> int:
    """A list whose JSON is a bare array."""
    if session.format == 'json':
        session.show_json(rows)
    else:
        session.show_list(headings_of(columns), rows, what)
    return 0


def cmd_jobs_reset_status(session: Session, args: Arguments) -> int:
    """Set chosen jobs back to uninitialized; with --reinit they and what depends on them are ready to run again."""
    jobs = choose_jobs(session, args)
    workflow_id = jobs[0]['workflow_id']
    downstream = downstream_jobs(session, jobs)
    if args['dry_run']:
        value = {'downstream_jobs': downstream, 'dry_run': True, 'jobs': [brief(job) for job in jobs],
                 'reinit_requested': bool(args['reinit']), 'workflow_id': workflow_id}
        session.answer(value, ''.join(printable(f"would reset {job['id']} {job['name']} ({job['status']})\n") for job in jobs))
        return 0
    if not args['force']:
        refuse_active_jobs(jobs, 'give --force')
    refuse_at_work(session, args, workflow_id)
    if not session.confirm(f'Reset the status of {len(jobs)} jobs of {name_workflow(session, workflow_id)}?'):
        return 0
    done, failures = reset_jobs(session, jobs)
    if args['reinit']:
        session.call('reset_workflow_status', workflow_id=workflow_id, force=args['force'])
        session.call('initialize_jobs', workflow_id=workflow_id, only_uninitialized=True)
    value = {
        'downstream_jobs': downstream, 'failures': failures, 'next_steps': f"Run 'torc.py run {workflow_id}' to execute.",
        'reinit': {'applied': bool(args['reinit']), 'error': None, 'requested': bool(args['reinit'])},
        'requested_job_ids': [job['id'] for job in jobs], 'reset_count': len(done), 'reset_job_ids': done,
        'status': 'partial_failure' if failures else 'success', 'workflow_id': workflow_id}
    session.answer(value, f"Reset {len(done)} jobs. {value['next_steps']}\n")
    return Refused.exit if failures else 0


def refuse_at_work(session: Session, args: Arguments, workflow_id: int) -> None:
    """Refuse, without --force, while runners or allocations are there: they would not see the jobs before the next initialize."""
    status = session.call('get_workflow_status', workflow_id=workflow_id)
    busy = [f'{status[key]} {words}' for key, words in NODE_COUNTS if status[key]]
    if busy and not args['force']:
        raise Refused(f"workflow {workflow_id} is at work ({', '.join(busy)}); wait for its end, or give --force")


def choose_jobs(session: Session, args: Arguments) -> List[Dict[str, Any]]:
    """Jobs named by ids, by status, or by the return code of their result: exactly one of the three."""
    chosen = [key for key in ('job_ids', 'status', 'return_code') if args[key] not in (None, [])]
    if len(chosen) != 1:
        raise BadInput('give either job ids, or --status, or --return-code')
    if chosen == ['job_ids']:
        jobs = [session.call('get_job', job_id=job_id) for job_id in dict.fromkeys(args['job_ids'])]
        refuse_several_workflows(jobs, args['workflow_id'])
        return jobs
    workflow_id = choose_workflow(session, args)
    if chosen == ['status']:
        jobs = [job for status in dict.fromkeys(args['status'])
                for job in session.items('list_jobs', workflow_id=workflow_id, status=status)]
    else:
        results = session.items('list_results', workflow_id=workflow_id, return_code=args['return_code'])
        jobs = [session.call('get_job', job_id=result['job_id']) for result in results]
    if not jobs:
        words = f"status in [{', '.join(args['status'])}]" if args['status'] else f"return code {args['return_code']}"
        message = f'No jobs in workflow {workflow_id} match {words}.'
        raise Refused(message, reset_count=0, reset_job_ids=[], workflow_id=workflow_id)
    return jobs


def refuse_several_workflows(jobs: List[Dict[str, Any]], workflow_id: Optional[int]) -> None:
    """Refuse jobs of several workflows, or of another one than was named."""
    owners = {job['workflow_id']: job['id'] for job in reversed(jobs)}
    if len(owners) > 1 or workflow_id not in (None, *owners):
        told = ', '.join(f'job {job_id} is of workflow {owner}' for owner, job_id in sorted(owners.items()))
        wanted = 'one workflow' if workflow_id is None else f'workflow {workflow_id}'
        raise Refused(f'{told}: name jobs of {wanted}')


def brief(job: Dict[str, Any]) -> Dict[str, Any]:
    """A job in a list of consequences."""
    return {'job_id': job['id'], 'name': job['name'], 'status': job['status']}


def downstream_jobs(session: Session, jobs: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Jobs that wait for these, however far away."""
    seen, found = {job['id'] for job in jobs}, []
    queue = [job['id'] for job in jobs]
    while queue:
        for job in session.items('list_jobs', workflow_id=jobs[0]['workflow_id'], upstream_job_id=queue.pop()):
            if job['id'] not in seen:
                seen.add(job['id'])
                queue.append(job['id'])
                found.append(brief(job))
    return sorted(found, key=operator.itemgetter('job_id'))


def reset_jobs(session: Session, jobs: List[Dict[str, Any]]) -> Tuple[List[int], List[Dict[str, Any]]]:
    """Set jobs to uninitialized. Returns ids that were, and failures."""
    run_id = session.call('get_workflow', workflow_id=jobs[0]['workflow_id']).get('run_id', 0)
    done, failures = [], []
    for job in jobs:
        try:
            session.call('manage_status_change', job_id=job['id'], status='uninitialized', run_id=run_id)
            done.append(job['id'])
        except (Refused, NotFound, Conflict) as error:
            failures.append({'job_id': job['id'], 'error': error.message})
            session.tell(printable(f"job {job['id']}: {error.message}"))
    return done, failures


# -------- results and logs --------

def cmd_results_list(session: Session, args: Arguments) -> int:
    """Results of the newest attempts; --failed drops those with return code 0 before the limit counts."""
    workflow_id = choose_workflow(session, args)
    query = given(args, 'workflow_id', 'failed', 'include_logs', 'output_dir', 'limit', 'offset')
    offset, limit = args['offset'] or 0, args['limit']
    if args['failed']:
        items = [item for item in session.items('list_results', workflow_id=workflow_id, **query) if item['return_code'] != 0]
        items = items[offset:None if limit is None else offset + limit]
    else:
        items = session.items('list_results', limit, offset, workflow_id=workflow_id, **query)
    if args['include_logs']:
        session.show_json(results_with_logs(session, workflow_id, items, args))
    else:
        session.show_list(headings_of(THINGS['results'].columns), items, 'results')
    return 0


RESULT_KEYS = ('job_id', 'job_name', 'status', 'run_id', 'return_code', 'reason', 'completion_time',
               'exec_time_minutes', 'compute_node_id')


def results_with_logs(session: Session, workflow_id: int, items: List[Dict[str, Any]], args: Arguments) -> Dict[str, Any]:
    """Results with the paths of the files that their jobs wrote."""
    workflow = session.call('get_workflow', workflow_id=workflow_id)
    base = output_directory(session, workflow, args)
    nodes = {node['id']: node for node in session.items('list_compute_nodes', workflow_id=workflow_id)}
    rows = []
    for item in items:
        row = {key: item.get(key) for key in RESULT_KEYS}
        row['job_stdout'], row['job_stderr'] = find_stdio(base, workflow_id, item['job_id'], (item['run_id'], item['attempt_id']))
        node = nodes.get(item.get('compute_node_id'), {})
        row['compute_node_type'] = node.get('compute_node_type')
        row['job_runner_log'] = os.path.join(base, f"job_runner_{node.get('hostname')}_wf{workflow_id}_r{item['run_id']}.log")
        rows.append(row)
    return {'workflow_id': workflow_id, 'workflow_name': workflow['name'], 'workflow_user': workflow['user'],
            'all_runs': bool(args['all_runs']), 'total_results': len(rows), 'items': rows}


def output_directory(session: Session, workflow: Dict[str, Any], args: Arguments) -> str:
    """The directory that runners of a workflow wrote to. Refused if it belongs to another database."""
    directory = os.path.join(base_directory(workflow), args['output_dir'])
    refuse_foreign_output(directory, read_output_record(directory)[1], session.call('get_database'))
    return directory


def find_stdio(output_dir: str, workflow_id: int, job_id: int, attempt: Tuple[int, int]) -> Tuple[Optional[str], Optional[str]]:
    """Paths of an attempt's stdout and stderr that exist, whatever its stdio mode was; None where there is no file."""
    found: List[Optional[str]] = [None, None]
    for mode in STDIO_MODES:
        for place, path in enumerate(stdio_paths(output_dir, workflow_id, job_id, *attempt, mode)):
            if found[place] is None and path and os.path.exists(path):
                found[place] = path
    return found[0], found[1]


FOLLOW_PAUSE_S = 0.5    # between looks at the files that `logs --follow` shows


def cmd_logs(session: Session, args: Arguments) -> int:
    """Print what jobs wrote, each in its newest attempt: those that are named, or all that have run."""
    reader = LogReader(session, args)
    if args['follow'] and session.format == 'json':
        raise BadInput('--follow has no JSON form: leave one of the two out')
    if args['follow']:
        return follow_logs(reader)
    found = reader.newest_of_named() if reader.jobs else reader.newest_of_all()
    if session.format == 'json':
        values = [reader.files_of(attempt) for attempt in found]
        session.show_json(values[0] if len(reader.jobs) == len(values) == 1 else {'items': values})
        return 0
    tail, is_one = Tail(session), len(reader.jobs) == 1
    for attempt in found:
        paths = reader.paths_of(attempt)
        if not is_one:
            tail.show_title(attempt, paths)
        for path in paths:
            tail.show(path, path if len(paths) > 1 else '')
        if is_one:
            tell_end(session, attempt, paths)
    if not reader.jobs:
        tell_what_is_not_shown(reader, found)
    return 0


class LogReader:
    """What `logs` was asked for. An attempt is a result, or looks like one while it runs."""

    def __init__(self, session: Session, args: Arguments) -> None:
        self.session = session
        self.args = args
        self.workflow = session.call('get_workflow', workflow_id=choose_workflow(session, args))
        self.id = self.workflow['id']
        self.output_dir = output_directory(session, self.workflow, args)
        named = [find_job(session, self.id, word, args['follow']) for word in args['jobs']]
        self.jobs = list({job['id']: job for job in named}.values())     # those that were named

    def is_wanted(self, attempt: Dict[str, Any]) -> bool:
        """Whether an attempt is one of those that the options ask for."""
        run_id, attempt_id = self.args['run_id'], self.args['attempt_id']
        return (run_id in (None, attempt['run_id']) and attempt_id in (None, attempt['attempt_id'])
                and (not self.args['failed'] or attempt['status'] in BROKEN_WORDS)
                and (not self.jobs or attempt['job_id'] in {job['id'] for job in self.jobs}))

    def ended(self, **query: Any) -> List[Dict[str, Any]]:
        """Attempts that have ended, in the order of their ends."""
        return self.session.items('list_results', workflow_id=self.id, sort_by='id', **query)

    def active(self, job: Dict[str, Any]) -> Dict[str, Any]:
        """The attempt of a job that runs."""
        return {'workflow_id': self.id, 'job_id': job['id'], 'job_name': job['name'], 'status': job['status'],
                'run_id': self.workflow.get('run_id', 0), 'attempt_id': job.get('attempt_id', 1)}

    def running(self) -> List[Dict[str, Any]]:
        """Attempts that run now."""
        jobs = self.session.items('list_jobs', workflow_id=self.id, status='running')
        return [self.active(job) for job in jobs]

    def newest_of_all(self) -> List[Dict[str, Any]]:
        """Each job's newest attempt that is wanted, by job."""
        is_any = self.args['run_id'] is not None or self.args['attempt_id'] is not None
        attempts = filter(self.is_wanted, self.ended(all_runs=is_any) + self.running())
        found = {attempt['job_id']: attempt for attempt in attempts}
        return [found[job_id] for job_id in sorted(found)]

    def newest_of_named(self) -> List[Dict[str, Any]]:
        """The newest attempt with files of each named job, if it is wanted. Refused if a job has no files."""
        return [attempt for attempt in map(self.newest_with_files, self.jobs) if self.is_wanted(attempt)]

    def newest_with_files(self, job: Dict[str, Any]) -> Dict[str, Any]:
        """A job's newest attempt that left files, or that was asked for."""
        attempts = self.ended(job_id=job['id'], all_runs=True)
        if STATUSES[STATUS_CODES[job['status']]].is_active:
            attempts.append(self.active(job))
        for attempt in sorted(attempts, key=operator.itemgetter('run_id', 'attempt_id'), reverse=True):
            is_asked_for = (self.args['run_id'] in (None, attempt['run_id'])
                            and self.args['attempt_id'] in (None, attempt['attempt_id']))
            if is_asked_for and any(self.stdio_of(attempt)):
                return attempt
        reason = call_addition(self.session, 'explain_job', job_id=job['id']).get('reason')
        start = f"job {job['name']} ({job['status']}) has left no output"
        if not attempts and reason:
            raise Refused(printable(f'{start}: {reason}'))
        why = f' ({reason})' if reason else ''
        raise Refused(printable(f'{start} in {self.output_dir}{why}; {WHERE_OUTPUT_IS}'))

    def stdio_of(self, attempt: Dict[str, Any]) -> Tuple[Optional[str], Optional[str]]:
        """Paths of an attempt's stdout and stderr that exist."""
        key = attempt['run_id'], attempt['attempt_id']
        return find_stdio(self.output_dir, self.id, attempt['job_id'], key)

    def files_of(self, attempt: Dict[str, Any]) -> Dict[str, Any]:
        """An attempt with its files, as JSON has it."""
        value = {key: attempt[key] for key in ('workflow_id', 'job_id', 'job_name', 'run_id', 'attempt_id')}
        value['job_stdout'], value['job_stderr'] = self.stdio_of(attempt)
        return value

    def paths_of(self, attempt: Dict[str, Any]) -> List[str]:
        """Files of an attempt that hold something, of the streams that were asked for."""
        out_path, err_path = self.stdio_of(attempt)
        wanted = [None if self.args['stderr'] else out_path,
                  None if self.args['stdout'] or err_path == out_path else err_path]
        return [path for path in wanted if path and size_of(path)]


WHERE_OUTPUT_IS = 'name the directory that `run` wrote to with -o, or look at the stdio mode of the workflow'


def size_of(path: str) -> int:
    """Size of a file in bytes; 0 if it is gone: a job with delete_on_success has ended."""
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


class Tail:
    """Prints files, and later what they have grown by; titles say whose output it is."""

    def __init__(self, session: Session, is_of_one: bool = False) -> None:
        self.session = session
        self.is_of_one = is_of_one  # the file that comes first needs no title
        self.is_safe = not session.out.isatty()     # a terminal must not obey what a job has written
        self.known = {}             # type: Dict[str, Tuple[int, Any]]  # path -> bytes shown, decoder
        self.last_path = ''         # shown last
        self.ends_line = True       # what was shown last ends in a newline

    def show(self, path: str, title: str) -> None:
        """Print what is new in a file, below its title if another file was shown before."""
        offset, decoder = self.known.get(path) or (0, codecs.getincrementaldecoder('utf-8')('replace'))
        try:
            file = open(path, 'rb')
        except OSError as error:
            self.session.tell(printable(f'torc: cannot read {path}: {error.strerror}'))
            return
        with file:
            file.seek(offset)
            for piece in iter(lambda: file.read(LOG_PIECE_BYTES), b''):
                offset += len(piece)
                if title and path != self.last_path and (self.last_path or not self.is_of_one):
                    self.show_line(title)
                self.last_path = path
                text = decoder.decode(piece)
                self.session.show(text if self.is_safe else printable(text))
                self.ends_line = text.endswith('\n')
        self.known[path] = offset, decoder

    def show_title(self, attempt: Dict[str, Any], paths: Sequence[str]) -> None:
        """Whose output follows, and the reason of a failure; nothing for a good job without output."""
        is_bad = attempt['status'] in BROKEN_WORDS
        if is_bad or paths:
            reason = f': {reason_of(attempt)}' if is_bad else ''
            self.show_line(f"{attempt['job_name']} ({attempt['status']}){reason}")

    def show_line(self, title: str) -> None:
        """A title on a line of its own, as tail(1) writes it."""
        self.session.show(('' if self.ends_line else '\n') + f'==> {printable(title)} <==\n')
        self.ends_line = True


def reason_of(result: Dict[str, Any]) -> str:
    """Why an attempt failed."""
    return result.get('reason') or f"return code {result['return_code']}"


def tell_end(session: Session, attempt: Dict[str, Any], paths: Sequence[str]) -> None:
    """After the output of one job: if there was none, and why it failed, unless that was the last line."""
    words = [] if paths else ['has written nothing']
    if attempt['status'] in BROKEN_WORDS and reason_of(attempt) not in map(read_last_line, paths):
        words.append(f"{attempt['status']}: {reason_of(attempt)}")
    if words:
        session.tell(printable(f"torc: job {attempt['job_name']} {'; '.join(words)}"))


def tell_what_is_not_shown(reader: LogReader, found: List[Dict[str, Any]]) -> None:
    """After the output of all jobs: how many have left no files, and how many have not run."""
    session, args = reader.session, reader.args
    lost = sum(not any(reader.stdio_of(attempt)) for attempt in found)
    if lost:
        where = f'{lost} of {len(found)} jobs have left no output in {reader.output_dir}'
        session.tell(printable(f'torc: {where}; {WHERE_OUTPUT_IS}'))
    if args['failed'] or args['run_id'] is not None or args['attempt_id'] is not None:
        if not found:
            session.tell(f'torc: nothing in workflow {reader.id} is what the options ask for')
        return
    left = session.call('list_jobs', workflow_id=reader.id, limit=1)['total_count'] - len(found)
    if left > 0:
        session.tell(f'torc: {left} jobs have not run; `torc.py status {reader.id}` says why')


def follow_logs(reader: LogReader) -> int:
    """Print what jobs have written and what they write, until they have ended."""
    session, tail = reader.session, Tail(reader.session, len(reader.jobs) == 1)
    count = session.call('list_results', workflow_id=reader.id, all_runs=True, limit=1)['total_count']
    attempts, is_first = reader.newest_of_all(), True
    while True:
        is_over = are_over(session, reader.id, reader.jobs)     # asked first: what ends later is seen later
        ended = reader.ended(all_runs=True, offset=count)
        count += len(ended)
        reader.workflow = session.call('get_workflow', workflow_id=reader.id)   # there may be another run
        attempts = list(filter(reader.is_wanted, attempts + ended + reader.running()))
        for attempt in attempts:
            for path in reader.paths_of(attempt):
                tail.show(path, f"{attempt['job_name']}: {path}")
        session.out.flush()
        if is_over:
            return 0
        if is_first and not any(attempt['status'] == 'running' for attempt in attempts):
            session.tell(printable(f'torc: {describe_wait(reader)}; Ctrl-C ends this'))
        attempts, is_first = [], False
        session.client.need_server()    # a database that this process has for itself would keep runners out
        time.sleep(FOLLOW_PAUSE_S)


def describe_wait(reader: LogReader) -> str:
    """Why there is no output to follow yet."""
    if len(reader.jobs) != 1:
        return 'waiting for jobs to fail' if reader.args['failed'] else 'waiting for jobs to start'
    job = reader.jobs[0]
    reason = call_addition(reader.session, 'explain_job', job_id=job['id']).get('reason')
    return f"waiting for job {job['name']} ({job['status']})" + (f': {reason}' if reason else '')


def are_over(session: Session, workflow_id: int, jobs: Sequence[Dict[str, Any]]) -> bool:
    """Whether nothing more is to come of jobs; of all if none is named."""
    if not jobs:
        return session.call('is_workflow_complete', workflow_id=workflow_id)['is_complete']
    statuses = (session.call('get_job', job_id=job['id'])['status'] for job in jobs)
    return all(STATUSES[STATUS_CODES[status]].is_done for status in statuses)


def find_job(session: Session, workflow_id: int, word: str, follows: bool) -> Dict[str, Any]:
    """A job by its id or, if there is none of that id in the workflow, its name."""
    if is_id(word):
        try:
            job = session.call('get_job', job_id=int(word))
            if job['workflow_id'] == workflow_id:
                return job
        except NotFound:
            pass    # it may be a name made of digits
    word = os.fsencode(word).decode('utf-8', 'surrogateescape')     # in the C locale Python 3.6 knows only ASCII
    named = [job for job in session.items('list_jobs', workflow_id=workflow_id, name=word) if job['name'] == word]
    if named:
        return named[0]
    names = [job['name'] for job in session.items('list_jobs', limit=1000, workflow_id=workflow_id)]
    is_format = follows and word in ANSWER_FORMATS
    hint = f'; here -f follows the output: write `torc.py -f {word} logs`' if is_format else ''
    raise NotFound(printable(f'workflow {workflow_id} has no job {word!r}{did_you_mean(word, names)}{hint}'))


# -------- reading specs --------

def read_input(session: Session, path: str) -> bytes:
    """Content of a file that the user named; '-' is stdin."""
    try:
        if path == '-':
            if session.stdin.isatty():
                session.tell('torc: reading from the terminal; end with Ctrl-D')
            return read_bounded(session.stdin.buffer)
        with open(path, 'rb') as file:
            return read_bounded(file)
    except OSError as error:
        raise BadInput(printable(f'cannot read {path}: {error.strerror}')) from None
    except ValueError:
        raise BadInput('a path cannot hold a null character') from None


def read_bounded(file: Any) -> bytes:
    """All of a file, unless it is larger than any workflow: /dev/zero has no end."""
    data = file.read(MAX_SPEC_BYTES + 1)
    if len(data) > MAX_SPEC_BYTES:
        raise BadInput(f'the input is larger than {format_memory(MAX_SPEC_BYTES)}: it is no workflow file')
    return data


def read_spec(session: Session, path: str, args: Arguments) -> Plan:
    """A workflow file, read, expanded and checked. Its warnings go to stderr."""
    data = read_input(session, path)
    name = '' if path == '-' else path
    directory = os.path.dirname(os.path.abspath(name)) if name else os.getcwd()
    try:
        plan = read_plan(read_document(data, name), directory, args['max_instances'] or MAX_INSTANCES, bool(args['skip_checks']))
    except BadInput as error:
        error.problems = [placed(problem, name) for problem in error.problems]
        raise
    plan = plan._replace(warnings=[placed(warning, name) for warning in plan.pending + plan.warnings])
    for warning in plan.warnings[:PROBLEMS_SHOWN]:
        session.tell(printable(f'warning: {warning}'))
    return complete_plan(plan, bool(args['no_resource_monitoring']))


def placed(problem: Problem, path: str) -> Problem:
    """A problem with the file that it is in."""
    return problem if problem.path else problem._replace(path=path)


def complete_plan(plan: Plan, is_unmonitored: bool) -> Plan:
    """The plan with what only the place of its creation knows: user and directory."""
    workflow = plan.body['workflow']
    workflow['user'] = workflow.get('user') or user_name()
    workflow['submission_directory'] = workflow.get('submission_directory') or current_directory()
    if is_unmonitored:
        workflow['resource_monitor_config'] = {'enabled': False}
    return plan


COUNTED = (     # key of the summary, words for it
    ('job_count', 'jobs'), ('file_count', 'files'), ('user_data_count', 'user data'),
    ('resource_requirements_count', 'resource requirements'), ('slurm_scheduler_count', 'Slurm schedulers'), ('action_count', 'actions'))
EMPTY_SUMMARY = dict(       # of a file that cannot be read: the keys are there all the same
    {key: 0 for key, _ in COUNTED}, workflow_name=None, workflow_description=None, job_count_before_expansion=0,
    file_count_before_expansion=0, has_schedule_nodes_action=False, job_names=[], scheduler_names=[])


def cmd_create_workflow(session: Session, args: Arguments) -> int:
    """Create a workflow from a file; it runs when a runner is started for it."""
    if args['dry_run']:
        return check_spec(session, args)
    plan = read_spec(session, args['spec'], args)
    workflow_id = session.call('create_workflow_from_spec', plan.body)['workflow_id']
    message = f'Workflow created successfully with ID: {workflow_id}'
    session.answer({'message': message, 'status': 'success', 'workflow_id': workflow_id}, f'Created workflow {workflow_id}\n')
    return 0


def check_spec(session: Session, args: Arguments) -> int:
    """Everything that is wrong with a workflow file, at once; nothing is created."""
    try:
        plan = read_spec(session, args['spec'], args)
    except BadInput as error:
        if session.format == 'json':
            errors = [str(problem) for problem in error.problems] or [error.message]
            session.show_json({'valid': False, 'errors': errors, 'warnings': [], 'summary': EMPTY_SUMMARY})
        raise
    warnings = [str(warning) for warning in plan.warnings]
    session.answer({'valid': True, 'errors': [], 'warnings': warnings, 'summary': plan.summary}, format_summary(plan.summary))
    return 0


def format_summary(summary: Dict[str, Any]) -> str:
    """The counts of a dry run, for people."""
    lines = [f"Workflow {summary['workflow_name']}", '']
    for key, word in COUNTED:
        before = summary.get(f'{key}_before_expansion', summary[key])
        lines.append(f'  {word:22}{summary[key]:>8}' + (f'  (expanded from {before})' if before != summary[key] else ''))
    where = 'with allocations of its own' if summary['has_schedule_nodes_action'] else 'wherever a runner is started'
    return ''.join(printable(line) + '\n' for line in lines + ['', f'Ready to run {where}', 'Validation: PASSED'])


# -------- running --------

class Target(NamedTuple):
    """What `run` is to run."""
    workflow_id: int
    is_new: bool        # created by this very command
    retries_failed: bool = False    # what did not complete is to run again


def cmd_run(session: Session, args: Arguments) -> int:
    """Create a workflow from a file, or take one that exists; run its jobs here until nothing is left; report."""
    options = runner_options(args)      # what is wrong with them shows before anything is created
    if is_id(args['target']):
        target = Target(int(args['target']), False, bool(args['retry_failed']))
        return run_to_end(session, target, options, args['force'])
    if args['retry_failed']:
        raise BadInput('--retry-failed goes on with a workflow that exists: give its id in place of the file')
    plan = read_spec(session, args['target'], args)
    refuse_short_time(plan.body['workflow'], options)
    refuse_missing_inputs(session, check_plan_files(plan.body), args['force'])
    prepare_output_dir(session, options)
    workflow_id = session.call('create_workflow_from_spec', plan.body)['workflow_id']
    tell_created(session, workflow_id)
    return run_to_end(session, Target(workflow_id, True), options, args['force'])


def tell_created(session: Session, workflow_id: int) -> None:
    """Say the new id: scripts read it from stdout."""
    message = f'Created workflow {workflow_id}'
    if session.format == 'json':
        session.show(format_json({'workflow_id': workflow_id, 'message': message}) + '\n')
        session.out.flush()
    elif not session.options['quiet']:
        session.tell(message)


def runner_options(args: Arguments) -> RunnerOptions:
    """Options of the runner from the command line. --end-time beats --time-limit."""
    end_time = args['end_time']
    if end_time is None and args['time_limit'] is not None:
        end_time = time.time() + args['time_limit']
    return RunnerOptions(
        output_dir=args['output_dir'], poll_interval_s=args['poll_interval'], num_cpus=args['num_cpus'],
        memory_gb=args['memory_gb'], num_gpus=args['num_gpus'], max_parallel_jobs=args['max_parallel_jobs'], end_time=end_time,
        labels=args['label'] or [], is_persistent=bool(args.get('persistent')),
        claim_backoff_max_s=args['claim_backoff_max_secs'])


def prepare_output_dir(session: Session, options: RunnerOptions) -> None:
    """Make the output directory and see that it is this database's, before anything is created or claimed."""
    try:
        os.makedirs(os.path.join(options.output_dir, 'job_stdio'), exist_ok=True)
        with tempfile.TemporaryFile(dir=options.output_dir):
            pass    # a look at the mode bits would not tell of full, read-only or strange file systems
        database = session.call('get_database')
        gone = take_output_dir(options.output_dir, database)
        if gone and not session.options['quiet']:
            session.tell(printable(f'The output directory {options.output_dir} belonged to the database '
                                   f"{gone}, which no longer exists; it now belongs to {database['path']}"))
    except (OSError, ValueError) as error:
        reason = getattr(error, 'strerror', None) or error
        raise BadInput(printable(f'cannot write to the output directory {options.output_dir}: {reason}; '
                                 'name another one with --output-dir')) from None


def check_plan_files(body: Dict[str, Any]) -> FileCheck:
    """As check_files, for a workflow that is not created yet."""
    jobs, base = body['jobs'], base_directory(body['workflow'])
    made_files = {index for job in jobs for index in job.output_files}
    made_data = {index for job in jobs for index in job.output_user_data}
    needed_files = sorted({index for job in jobs for index in job.input_files} - made_files)
    needed_data = sorted({index for job in jobs for index in job.input_user_data} - made_data)
    paths = [body['files'][index]['path'] for index in needed_files]
    records = [body['user_data'][index] for index in needed_data]
    return FileCheck([path for path in paths if not file_exists(base, path)], [],
                     [record['name'] for record in records if record.get('data') is None])


def run_to_end(session: Session, target: Target, options: RunnerOptions, is_forced: bool) -> int:
    """Initialize if need be, run, report. Returns the exit code."""
    workflow = session.call('get_workflow', workflow_id=target.workflow_id)
    refuse_short_time(workflow, options)
    if target.retries_failed:
        prepare_output_dir(session, options)
        reset_failed(session, workflow, is_forced)
    status = session.call('get_workflow_status', workflow_id=workflow['id'])
    is_uninitialized = status['jobs_by_status']['uninitialized'] > 0
    is_over = not is_uninitialized and (status['is_complete'] or status['is_canceled'])
    if is_over and not options.is_persistent:
        return tell_nothing_left(session, status)
    prepare_output_dir(session, options)
    if is_uninitialized:
        if not target.is_new:
            refuse_missing_inputs(session, check_files(session, workflow), is_forced)
            session.call('set_file_times', {'files': file_times(session, workflow)}, workflow_id=workflow['id'])
        initialize_for_run(session, workflow, status)
    if not target.is_new:       # of a new one the file's warnings say it
        tell_pending(session, workflow)
    session.client.need_server()    # the runner, and others that join it, speak to one
    tell_location(session, workflow)
    style = style_of(session.err, os.environ)
    progress = Progress(session.err, style, session.options['quiet'])
    try:
        outcome = run_workflow(session.client, workflow['id'], options, progress)
    finally:
        progress.finish()
    with contextlib.suppress(TorcError):    # no server any more: what it said last must do
        status = session.call('get_workflow_status', workflow_id=workflow['id'])
        known = {key: status[key] for key in ('jobs_by_status', 'is_complete', 'is_canceled')}
        outcome = outcome._replace(**known)
    tell_outcome(session, workflow, outcome, options)
    return outcome_exit(outcome)


def tell_pending(session: Session, workflow: Dict[str, Any]) -> None:
    """Say once what a stored workflow asks for that this version does not carry out."""
    reading = Reading(Document({}, '', '', {}), '', 0)
    read_block(reading, 'execution_config', workflow.get('execution_config') or {})
    defaults, monitor = plan_monitor(None), workflow.get('resource_monitor_config') or {}
    asked = {key: value for key, value in monitor.items() if value != defaults.get(key)}
    read_block(reading, 'resource_monitor', asked)
    for action in session.call('get_workflow_actions', workflow_id=workflow['id']):
        if not action['executed']:
            read_block(reading, 'action', {'action_type': action['action_type']})
    for problem in describe_pending(reading.pending):
        session.tell(f'warning: {problem}')


def reset_failed(session: Session, workflow: Dict[str, Any], is_forced: bool) -> None:
    """Make ready again what failed or was canceled, and what depends on it, in a new run. All else stays."""
    number = workflow['id']
    session.client.need_server()    # it ends the jobs of runners that were killed
    counts = session.call('get_workflow_status', workflow_id=number)['jobs_by_status']
    if not has_failed(counts):
        return session.tell(f'Workflow {number} has no jobs that failed or were canceled')
    refuse_at_work(session, {'force': is_forced}, number)
    refuse_missing_inputs(session, check_files(session, workflow), is_forced)
    session.call('reset_workflow_status', workflow_id=number, force=is_forced)
    session.call('reset_job_status', workflow_id=number, failed_only=True)
    count = reinitialize(session, workflow)
    session.tell(f'{count} jobs run again: what did not complete or has changed, and what depends on it')


def has_failed(counts: Dict[str, int]) -> bool:
    """Whether any job ended badly, for good or until somebody decides."""
    return any(counts.get(row.name) for row in STATUSES if row.is_bad or row.code == PENDING_FAILED)


def tell_location(session: Session, workflow: Dict[str, Any]) -> None:
    """Say where a workflow is stored, unless that is the embedded database of this directory."""
    client = session.client
    if session.options['in_memory'] and not client.in_memory:
        session.tell(printable(f'warning: {client.location} is served already, and not from memory'))
    is_embedded = not client.named_url and not client.is_lasting
    is_usual = is_embedded and client.database == os.path.abspath(EMBEDDED_DATABASE)
    if not is_usual and not session.options['quiet']:
        named = f"Workflow {workflow['id']} ({workflow['name']})"
        session.tell(printable(f'{named} is stored in {client.location}'))


def initialize_for_run(session: Session, workflow: Dict[str, Any], status: Dict[str, Any]) -> None:
    """Make ready what was never looked at, or what was reset since.

    Only after a reset of all jobs this is a full initialize, which lets every action fire again. A new workflow is
    initialized as a partial one: the same, but for jobs that another runner, started in the same moment, has begun.
    """
    is_all = status['jobs_by_status']['uninitialized'] == status['total_jobs']
    session.call('initialize_jobs', workflow_id=workflow['id'], only_uninitialized=not (is_all and workflow.get('run_id')))


def tell_nothing_left(session: Session, status: Dict[str, Any]) -> int:
    """A finished workflow is not run again unasked."""
    number, code = status['workflow_id'], 0 if verdict_of(status)[0] == 'complete' else 1
    state = 'was canceled' if status['is_canceled'] else 'has nothing left to do'
    session.tell(f"Workflow {number} {state}: {format_counts(status['jobs_by_status'])}")
    if code:
        session.tell(f"To go on from here: {command_line(session, 'run', number, '--retry-failed')}")
    rows = [('what failed:', 'reset-status', ('--failed-only', '-r'))] if code else []
    if not status['is_canceled']:   # init would forget what is done
        rows += [('what changed:', 'reinit', ()), ('everything:', 'init', ())]
    lines = format_rows((words, command_line(session, 'workflows', verb, number, *more))
                        for words, verb, more in rows).rstrip('\n')
    session.tell(f"To run again, before `{command_line(session, 'run', number)}`:\n{lines}")
    return code


def command_line(session: Session, *words: Any) -> str:
    """A command for the user to type, that finds the same server or database as this one."""
    options = ['--standalone'] if session.options['standalone'] else []
    for key in ('url', 'db'):
        options += [f'--{key}', session.options[key]] if session.options[key] else []
    return printable(' '.join(shlex.quote(str(word)) for word in ['torc.py', *options, *words]))


def tell_outcome(session: Session, workflow: Dict[str, Any], outcome: RunOutcome,
                 options: RunnerOptions) -> None:
    """The summary: counts, failed jobs with their last words, what else is not done, the way to go on."""
    if session.options['quiet'] and outcome_exit(outcome) == 0:
        return
    number = workflow['id']
    session.tell(printable(f"Workflow {number} ({workflow['name']}) {describe_end(outcome)}"))
    for _, name, return_code, last_line in outcome.failed_jobs[:CANDIDATES_SHOWN]:
        session.tell(printable(f'  {name} ended with return code {return_code}' + (f': {last_line}' if last_line else '')))
    if len(outcome.failed_jobs) > CANDIDATES_SHOWN:
        session.tell(f'  and {len(outcome.failed_jobs) - CANDIDATES_SHOWN} more')
    if outcome_exit(outcome):
        tell_undone(session, number, outcome)
    if outcome.failed_jobs:
        logs = command_line(session, 'logs', number, outcome.failed_jobs[0][1])
        session.tell(f"See more: {logs}; {command_line(session, 'results', 'list', number, '--failed')}")
    directory = os.path.join(options.output_dir, 'job_stdio')
    session.tell(printable(f"Output: {directory} ({command_line(session, 'logs', number)})"))
    words = words_to_go_on(outcome)
    if words is not None:
        words += [] if options.output_dir == DEFAULT_OUTPUT_DIR else ['-o', options.output_dir]
        is_elsewhere = outcome.reason in ('stuck', 'idle') and outcome_counts(outcome).get('ready')
        where = ', where the rest can run' if is_elsewhere else ' from here'
        session.tell(f"To go on{where}: {command_line(session, 'run', number, *words)}")
    if session.client.database and not os.path.exists(session.client.database):
        session.tell(printable(f'The database {session.client.database} was deleted during the run: its results are lost'))


NAMES_SHOWN = 5     # of the jobs that are not done, for each status


def tell_undone(session: Session, workflow_id: int, outcome: RunOutcome) -> None:
    """Name the jobs that are not done, but for failures that were told; count those lost with runners."""
    told = {job_id for job_id, _, _, _ in outcome.failed_jobs}
    counts, failures = outcome.jobs_by_status, ('failed', 'terminated', 'pending_failed')
    all_told = sum(counts.get(name, 0) for name in failures) <= len(told)
    try:
        for row in STATUSES:
            count = counts.get(row.name, 0) if row.is_bad or not row.is_done else 0
            if count and not (all_told and row.name in failures):
                most = NAMES_SHOWN + len(told)
                jobs = session.items('list_jobs', most, workflow_id=workflow_id, status=row.name)
                names = [job['name'] for job in jobs if job['id'] not in told]
                more = count - len(jobs) + len(names[NAMES_SHOWN:])
                text = ', '.join(names[:NAMES_SHOWN]) + (f' and {more} more' if more else '')
                session.tell(printable(f'  {row.name}: {text}'))
        query = {'workflow_id': workflow_id, 'return_code': ORPHAN_RETURN_CODE, 'limit': 1}
        lost = session.call('list_results', **query)['total_count']
    except TorcError:       # no server any more: nothing more can be said
        return
    if lost:
        session.tell(f'Jobs of other runners were lost with them (return code {ORPHAN_RETURN_CODE}): {lost}')


def words_to_go_on(outcome: RunOutcome) -> Optional[List[str]]:
    """What `run ID` needs beside the id to go on with a workflow; None if there is nothing to go on with."""
    counts = outcome_counts(outcome)
    is_spoiled = outcome.is_canceled or has_failed(counts)
    is_active = any(counts.get(STATUS_NAMES[code]) for code in ACTIVE)  # a reset has to wait for their end
    is_ready = counts.get('ready') or counts.get('uninitialized')
    if not outcome.is_canceled and (is_active or is_ready and (outcome.interrupted_by or not is_spoiled)):
        return []
    return ['--retry-failed'] if is_spoiled else None


REASONS_TO_LEAVE = {'stuck': 'nothing that is left can run here', 'idle': 'no job could be claimed',
                    'deadline': "the runner's time is over"}


def describe_end(outcome: RunOutcome) -> str:
    """How a run ended, with the counts of the whole workflow."""
    if outcome.interrupted_by:
        ended = 'was interrupted'
    elif outcome.is_canceled:
        ended = 'was canceled'
    elif outcome.is_complete:
        ended = 'has ended' if outcome_exit(outcome) else 'is complete'
    else:
        ended = f'is not complete ({REASONS_TO_LEAVE.get(outcome.reason, outcome.reason)})'
    return f'{ended} after {format_seconds(outcome.wall_s)}: {format_counts(outcome_counts(outcome))}'


def outcome_counts(outcome: RunOutcome) -> Dict[str, int]:
    """Jobs of the workflow by status; those of our own, if nothing is known of the others."""
    own = {key: getattr(outcome, key) for key in ('completed', 'failed', 'terminated', 'canceled')}
    return outcome.jobs_by_status or own


def outcome_exit(outcome: RunOutcome) -> int:
    """Exit code of `run`: 1 when any job of the workflow ended badly or is left undone, whoever ran it."""
    if outcome.interrupted_by:
        return 130
    counts = outcome_counts(outcome)
    is_undone = any(counts.get(row.name) for row in STATUSES if row.is_bad or not row.is_done)
    return 1 if outcome.is_canceled or is_undone else 0


def cmd_exec(session: Session, args: Arguments) -> int:
    """Run commands as the jobs of a new workflow, without a file."""
    options = runner_options(args)
    spec = exec_spec(session, args)
    if args['dry_run']:
        session.show_json(spec)
        return 0
    document = read_document(format_json(spec).encode('utf-8', 'surrogateescape'), '', 'json')
    try:
        plan = complete_plan(read_plan(document, os.getcwd()), False)
    except BadInput as error:   # there is no file that it could have a place in
        problems = [problem._replace(line=0, column=0) for problem in error.problems]
        raise BadInput(problems[0].message, problems) from None
    refuse_short_time(plan.body['workflow'], options)
    prepare_output_dir(session, options)
    workflow_id = session.call('create_workflow_from_spec', plan.body)['workflow_id']
    if session.format != 'json':
        tell_created(session, workflow_id)
    code = run_to_end(session, Target(workflow_id, True), options, False)
    if session.format == 'json':
        counts = session.call('get_workflow_status', workflow_id=workflow_id)['jobs_by_status']
        value = {'workflow_id': workflow_id, 'status': 'failed' if code else 'completed', 'had_failures': bool(counts['failed']),
                 'had_terminations': bool(counts['terminated'])}
        session.show(format_json(value) + '\n')
    return code


def exec_spec(session: Session, args: Arguments) -> Dict[str, Any]:
    """The workflow file that the options of `exec` stand for: each command with each combination of parameters."""
    commands = list(args['command'] or [])
    if args['commands_file']:
        commands += read_commands(session, args['commands_file'])
    if not commands and args['words']:
        commands = [' '.join(map(shlex.quote, args['words']))]
    if not commands:
        raise BadInput("nothing to run: give -c 'COMMAND', -C FILE, or -- COMMAND WORDS")
    if not all(command.strip() for command in commands):
        raise BadInput("-c '' is an empty command: give one, such as -c 'echo {i}', or leave the option out")
    parameters = exec_parameters(args['param'] or [])
    warn_of_leftovers(session, commands, parameters)
    instances = expand_parameters(parameters, args['link'])
    texts = [substitute(command, instance) if instance else command for command in commands for instance in instances]
    jobs = [{'name': f'job{number}', 'command': text, 'cancel_on_blocking_job_failure': False, 'supports_termination': False}
            for number, text in enumerate(texts, 1)]
    spec = {'name': args['name'] or time.strftime('exec_%Y%m%d_%H%M%S'), 'user': user_name(), 'jobs': jobs,
            'resource_monitor': exec_monitor(args)}
    if args['description']:
        spec['description'] = args['description']
    if args['stdio']:
        spec['execution_config'] = {'stdio': {'mode': args['stdio'].replace('-', '_')}}
    return spec


def warn_of_leftovers(session: Session, commands: Sequence[str], parameters: Iterable[str]) -> None:
    """Say which {names} in the commands are no parameters; each once."""
    left = {match.group(): match.group(1) for command in commands for match in PARAMETER.finditer(command)
            if IDENTIFIER.match(match.group(1)) and match.group(1) not in parameters}
    for token, name in left.items():
        hint = did_you_mean(name, parameters) or f'; for a parameter give --param {name}=VALUES'
        session.tell(f'warning: {token} is no parameter and stays as it is{hint}')


def exec_parameters(words: Sequence[str]) -> Dict[str, Any]:
    """['i=1:3', 'x=@names'] -> {'i': '1:3', 'x': [...]}."""
    parameters: Dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition('=')
        if not name or not equals:
            raise BadInput(printable(f'--param {word}: write NAME=VALUE, such as i=1:10, x=[a,b] or file=@names.txt'))
        if name in parameters:
            raise BadInput(printable(f'--param {name} stands twice'))
        parameters[name] = value
    return parameters


def exec_monitor(args: Arguments) -> Dict[str, Any]:
    """The resource monitor's settings from the options of `exec`."""
    scopes = {'jobs': args['monitor'] or 'summary', 'compute_node': args['monitor_compute_node'] or 'off'}
    if args['generate_plots'] and 'time-series' not in scopes.values():
        raise BadInput('--generate-plots needs a series to draw: '
                       'give --monitor time-series or --monitor-compute-node time-series')
    monitor = {'enabled': any(word != 'off' for word in scopes.values()),
               'granularity': 'time_series' if args['monitor'] == 'time-series' else 'summary',
               'sample_interval_seconds': args['sample_interval_seconds'] or 10,
               'flush_interval_seconds': 300,
               'generate_plots': bool(args['generate_plots'])}
    for scope, word in scopes.items():
        monitor[scope] = None if word == 'off' else {'enabled': True, 'granularity': word.replace('-', '_')}
    return monitor


# -------- passwords and access groups --------

LEAST_PASSWORD_CHARACTERS = 8


def read_known_s(args: Arguments) -> float:
    """How long a right password needs no other check: option or variable, in seconds."""
    text = os.environ.get('TORC_CREDENTIAL_CACHE_TTL_SECS', '')
    if args['credential_cache_ttl_secs'] is not None or not text:
        return DEFAULT_KNOWN_S if args['credential_cache_ttl_secs'] is None else args['credential_cache_ttl_secs']
    if not re.match(r'[0-9]{1,9}\Z', text):
        raise BadInput(f'TORC_CREDENTIAL_CACHE_TTL_SECS is {printable(text)!r}; it must be a number of seconds')
    return float(text)


def read_administrators(args: Arguments) -> List[str]:
    """Administrators of a server: options and variable."""
    named = list(args['admin_user'] or []) + os.environ.get('TORC_ADMIN_USERS', '').split(',')
    users = list(dict.fromkeys(filter(None, (name.strip() for name in named))))
    for user in users:
        check_user_name(user)
    return users


def new_password(session: Session, args: Arguments, is_new: bool = True) -> bytes:
    """The password that a command is about: -p, or asked for (twice if it is new), or a line of stdin."""
    password = args['password']
    if password is not None:
        session.tell('warning: others on this machine can see a password on the command line; without -p it is asked for')
    else:
        password = session.ask_password('Password: ')
        if is_new and session.stdin.isatty() and session.ask_password('Once more: ') != password:
            raise BadInput('the two passwords differ; nothing was changed')
    if is_new and len(password) < LEAST_PASSWORD_CHARACTERS:
        raise BadInput(f'a password has at least {LEAST_PASSWORD_CHARACTERS} characters')
    if is_new and '\0' in password:
        raise BadInput('a password holds no NUL')
    return password.encode('utf-8', 'surrogateescape')


def change_password_line(path: str, user: str, stored: Optional[str]) -> bool:
    """Put a user's hash into a password file (None: take it out), all other lines as they are. Whether he was in it."""
    try:
        lines = read_password_file(path).splitlines()
    except FileNotFoundError:
        if stored is None:
            raise NotFound(f'there is no password file {path}') from None
        lines = []
    if any(line.count(':') != 1 for line in lines if line.strip() and not line.strip().startswith('#')):
        raise BadInput(f'{path} is no password file: not all of its lines are USER:HASH. It was left as it is; give another one with -f')
    places = [place for place, line in enumerate(lines) if line.strip().partition(':')[0] == user]
    if stored is None and not places:
        raise NotFound(f'{path} has no user {printable(user)!r}')
    kept = [line for place, line in enumerate(lines) if place not in places]
    first = places[0] if places else len(kept)
    kept[first:first] = [] if stored is None else [f'{user}:{stored}']
    text = ''.join(line + '\n' for line in kept)
    try:
        write_atomically(os.path.realpath(path), text.encode('utf-8', 'surrogateescape'))
    except OSError as error:
        raise BadInput(f'cannot write {path}: {error.strerror}') from None
    return bool(places)


def reload_after(session: Session, args: Arguments) -> None:
    """Let a server read its password file again, if --reload-auth asks for it."""
    if args['reload_auth']:
        session.options.update(password=args['server_password'] or session.options['password'])
        session.tell(session.call('reload_auth')['message'])


def cmd_htpasswd_add(session: Session, args: Arguments) -> int:
    """Set a user's password, in a new line or his old one."""
    check_user_name(args['user'])
    stored = hash_password(new_password(session, args), args['cost'])
    was_there = change_password_line(args['file'], args['user'], stored)
    session.show(printable(f"{'Changed' if was_there else 'Added'} user {args['user']} in {args['file']}") + '\n')
    reload_after(session, args)
    return 0


def cmd_htpasswd_hash(session: Session, args: Arguments) -> int:
    """Only say what a password file would hold."""
    if args['user'] is not None:
        check_user_name(args['user'])
    stored = hash_password(new_password(session, args), args['cost'])
    session.show(f"{args['user']}:{stored}\n" if args['user'] is not None else stored + '\n')
    return 0


def cmd_htpasswd_remove(session: Session, args: Arguments) -> int:
    """Take a user out."""
    change_password_line(args['file'], args['user'], None)
    session.show(printable(f"Removed user {args['user']} from {args['file']}") + '\n')
    reload_after(session, args)
    return 0


def cmd_htpasswd_list(session: Session, args: Arguments) -> int:
    """Names of the users."""
    users = list(read_users(args['file']))
    session.answer({'items': users}, printable('\n'.join(users)) + '\n')
    return 0


def cmd_htpasswd_verify(session: Session, args: Arguments) -> int:
    """Whether a password is a user's: exit 0 or 4."""
    stored = read_users(args['file']).get(args['user'])
    if stored is None:
        raise NotFound(f"{args['file']} has no user {printable(args['user'])!r}")
    if not matches_password(stored, new_password(session, args, is_new=False)):
        raise Denied(f"this is not the password of {printable(args['user'])}")
    session.show('The password is right\n')
    return 0


GROUP_COLUMNS = 'ID=id, Name=name, Description=description:1, Created=created_at:2'
MEMBER_COLUMNS = 'User=user_name, Role=role, Added=created_at:1'


def cmd_groups_get(session: Session, args: Arguments) -> int:
    """One access group."""
    group = session.call('get_access_group', group_id=args['group_id'])
    session.answer(group, format_record(group))
    return 0


GROUP_LISTS = {     # command -> its operation, columns, and what the things are called
    'list':                 ('list_access_groups', GROUP_COLUMNS, 'access groups'),
    'list-members':         ('list_group_members', MEMBER_COLUMNS, 'members'),
    'list-user-groups':     ('list_user_groups', GROUP_COLUMNS, 'access groups'),
    'list-workflow-groups': ('list_workflow_groups', GROUP_COLUMNS, 'access groups'),
}


def cmd_groups_list(session: Session, args: Arguments) -> int:
    """Groups (all, a user's or a workflow's), or the members of one."""
    op, columns, what = GROUP_LISTS[session.command.name.split()[1]]
    session.show_list(headings_of(columns), session.items(op, **given(args)), what)
    return 0


GROUP_CHANGES = {   # command -> its operation, and what is said then, of its answer and of its arguments
    'create':          ('create_access_group', 'Created access group {id}'),
    'delete':          ('delete_access_group', 'Deleted access group {group_id}'),
    'add-user':        ('add_user_to_group', '{user_name} is now {role} of access group {group_id}'),
    'remove-user':     ('remove_user_from_group', '{user_name} is no longer in access group {group_id}'),
    'add-workflow':    ('add_workflow_to_group', 'Access group {group_id} has access to workflow {workflow_id}'),
    'remove-workflow': ('remove_workflow_from_group', 'Access group {group_id} no longer has access to workflow {workflow_id}'),
}


def cmd_groups_change(session: Session, args: Arguments) -> int:
    """Change groups: make or remove one, or let a user or workflow in or out."""
    word = session.command.name.split()[1]
    op, text = GROUP_CHANGES[word]
    in_path = path_parameters(OPERATIONS[op])
    body = {key: value for key, value in args.items() if key not in in_path} if OPERATIONS[op].body else None
    answer = session.call(op, body, **{key: args[key] for key in in_path})
    session.answer({'success': True} if word.startswith('remove') else answer, printable(text.format(**dict(answer, **args))) + '\n')
    return 0


# -------- serving --------

def cmd_serve(session: Session, args: Arguments) -> int:
    """Serve a database until a signal."""
    if args['require_auth'] and args['no_auth']:
        raise BadInput('--require-auth and --no-auth contradict each other')
    options = server_options(session, args)
    if options.database == IN_MEMORY and options.snapshot_interval_s is not None:
        raise BadInput('--in-memory writes the database to a file: give one with -d FILE')
    log_dir = args['log_dir'] or os.environ.get('TORC_LOG_DIR', '')
    log_path = prepare_log(log_dir) if log_dir else ''
    if args['json_logs']:
        for handler in log.handlers:
            handler.setFormatter(JsonLines())
    if args['daemon']:
        if not log_path and options.database == IN_MEMORY:
            raise BadInput('--daemon with a database in memory wants --log-dir DIR for its log')
        options = options._replace(ends_with_input=False, auth_file=absolute(options.auth_file))
        session.show(start_detached_server(options, LogFile, log_path or options.database + '.log'))
        return 0
    with contextlib.ExitStack() as stack:
        if log_path:
            stack.enter_context(logging_to_file(log_path))
        serve_database(options, functools.partial(announce_server, session))
    return 0


def server_options(session: Session, args: Arguments) -> ServerOptions:
    """How to serve, from the command line and the environment."""
    certificate, key = (args[name] or os.environ.get('TORC_' + name.upper(), '') for name in ('tls_cert', 'tls_key'))
    if not certificate and (key or args['https']):
        raise BadInput('https needs a certificate: give --tls-cert FILE and --tls-key FILE, both in PEM form')
    kept = os.environ.get('TORC_SERVER_SNAPSHOT_KEEP') or str(SNAPSHOTS_KEPT)
    if not re.match(r'[1-9][0-9]{0,5}\Z', kept):
        raise BadInput(printable(f'TORC_SERVER_SNAPSHOT_KEEP={kept}: write how many copies are kept, from 1'))
    return ServerOptions(
        database=served_database(session, args), host=args['host'], port=args['port'], needs_token=not args['no_auth'],
        new_token=bool(args['new_token']), takes_over=bool(args['takeover']), tls_certificate=absolute(certificate), tls_key=absolute(key),
        ends_with_input=bool(args['shutdown_on_stdin_eof']), pid_file=absolute(args['pid_file']),
        snapshot=absolute(os.environ.get('TORC_SERVER_SNAPSHOT_PATH') or 'torc-server-snapshot.db'), snapshots_kept=int(kept),
        allows_sql=not args['disable_admin_sql'], allows_sql_writes=not args['disable_admin_sql_writes'],
        auth_file=args['auth_file'] or os.environ.get('TORC_AUTH_FILE', ''), known_s=read_known_s(args),
        enforces_access=bool(args['enforce_access_control']), administrators=read_administrators(args),
        snapshot_interval_s=session.snapshot_interval_s)


def absolute(path: Optional[str]) -> str:
    """A path from the root; '' for none."""
    return os.path.abspath(path) if path else ''


def served_database(session: Session, args: Arguments) -> str:
    """The database that `serve` was given, as a path or as sqlite:PATH?PARAMETERS, made absolute; or IN_MEMORY."""
    url = os.environ.get('DATABASE_URL', '')
    path = args['db'] or session.options['db'] or (url if url.startswith('sqlite:') else '') or default_database()
    if path.startswith('sqlite:'):
        path, _, query = path[len('sqlite:'):].partition('?')
        path = IN_MEMORY if 'mode=memory' in query.split('&') else urllib.parse.unquote(path[2:] if path.startswith('//') else path)
    return path if path == IN_MEMORY else absolute(path or IN_MEMORY)


def prepare_log(directory: str) -> str:
    """Path of the log in a directory, which is made if need be."""
    try:
        make_private_directory(directory)
    except OSError as error:
        raise BadInput(f'cannot make the directory {directory}: {error.strerror}; give another place with --log-dir') from None
    return os.path.join(os.path.abspath(directory), 'torc-server.log')


@contextlib.contextmanager
def logging_to_file(path: str) -> Iterator[None]:
    """Log lines go to a file too, in the form of those on stderr."""
    try:
        handler = LogFile(path)
    except OSError as error:
        raise BadInput(f'cannot write the log {path}: {error.strerror}; give another place with --log-dir') from None
    handler.setFormatter(log.handlers[-1].formatter)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


def announce_server(session: Session, text: str) -> None:
    """Lines on stdout that others wait for."""
    session.show(text)
    session.out.flush()


# ======== 21. Main: the table of commands, the manual, and the way from words to exit code ========
#
# COMMANDS is the one place that knows which commands there are: the parser, the manual, README's reference and the tests read it.
#
# The parser is ours, for argparse can't do what is promised here: options of all commands before and after the command,
# the command's own short option winning there; words and options in any order; the same on every Python (without
# abbreviations, argparse of 3.6 no longer knows -p5); each mistake told with its nearest right word. It starts faster, too.
# main() is the border where errors become messages and exit codes: nothing below it ends the program.

# -------- arguments --------

class Argument(NamedTuple):
    """One argument of a command."""
    names: str              # 'WF' for a word in its place; '-o --output-dir' for an option, its key the last name
    value: str              # what stands for an option's value in the help; '' for a switch
    meaning: str
    parse: Callable[[str], Any] = str   # ValueErrors say what is wrong with a value
    # How many. Words: 1, ? (may be missing), * (any), + (at least one), -- (what follows a --). Options: 1 (the last counts),
    # ! (must be given), * (each time one more), + (the same, and all words up to the next option).
    count: str = '1'
    default: Any = None
    key: str = ''           # where it isn't the last name
    is_pending: bool = False    # taken, but not carried out yet


class Command(NamedTuple):
    """One command. Its JSON and CSV are described in README."""
    name: str
    run: Callable[[Session, Arguments], int]
    help: str
    arguments: Sequence[Argument]
    example: str
    has_csv: bool = False


def key_of(argument: Argument) -> str:
    """The key under which a command finds an argument."""
    return argument.key or argument.names.split()[-1].lstrip('-').replace('-', '_').lower()


def parse_number(text: str) -> int:
    """A whole number."""
    if not re.match(r'-?[0-9]{1,18}\Z', text):
        raise ValueError(f'{text!r} is not a whole number')
    return int(text)


def parse_id(text: str) -> int:
    """An id: a whole number from 1."""
    if not re.match(r'[0-9]{1,18}\Z', text) or not int(text):
        raise ValueError(f'{text!r} is not an id: ids are whole numbers from 1')
    return int(text)


def parse_logs_workflow(text: str) -> int:
    """The first word of `logs`: an id, or one of Torc's verbs."""
    cures = {'bundle': f'`tar czf logs.tar.gz {DEFAULT_OUTPUT_DIR}` packs all that jobs and runners wrote',
             'analyze': '`torc.py status WF` and `torc.py logs WF --failed` show what failed, and why'}
    if text in cures:
        raise ValueError(f'`logs {text}` is not there yet: {cures[text]}')
    return parse_id(text)


def parse_ids(text: str) -> List[int]:
    """Ids separated by commas."""
    return [parse_id(word) for word in text.split(',')]


def at_least(least: float, parse: Callable[[str], Any] = parse_number) -> Callable[[str], Any]:
    """A parser of numbers that are not below `least`."""
    def read(text: str) -> Any:
        value = parse(text)
        if value < least:
            raise ValueError(f'{text} is less than {least:g}')
        return value
    return read


def one_of(*choices: str) -> Callable[[str], str]:
    """A parser of one of some words."""
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is none of {', '.join(choices)}{did_you_mean(text, choices)}")
        return text
    return read


def parse_truth(text: str) -> bool:
    """true, yes, 1 or false, no, 0."""
    word = text.lower()
    if word not in ('true', 'yes', '1', 'false', 'no', '0'):
        raise ValueError(f'{text!r} is neither true nor false')
    return word in ('true', 'yes', '1')


def parse_log_level(text: str) -> str:
    """A level of the log; torc-server's names too."""
    level = {'warn': 'warning', 'trace': 'debug'}.get(text.lower(), text.lower())
    return one_of(*LOG_LEVELS)(level)


def parse_server_verb(text: str) -> str:
    """The word `run` of torc-server."""
    cures = {'service': 'start `torc.py serve` from your own unit file, crontab (@reboot) or terminal multiplexer',
             'export': "copy the database: kill -USR1 the server, or copy its file while it doesn't run"}
    if text in cures:
        raise ValueError(f'torc-server\'s {text!r} is not there: {cures[text]}')
    return one_of('run')(text)


def parse_statuses(text: str) -> List[str]:
    """Statuses of jobs, separated by commas."""
    return [one_of(*STATUS_CODES)(word) for word in text.split(',')]


def parse_labels(text: str) -> List[str]:
    """Labels separated by commas."""
    labels = text.split(',')
    if any(not label or label != label.strip() for label in labels):
        raise ValueError(f'{text!r}: a label is not empty and has no blanks around it')
    return labels


def parse_cost(text: str) -> int:
    """Work of a password's hash, as bcrypt counts it."""
    value = parse_number(text)
    if not 4 <= value <= MOST_PASSWORD_COST:
        raise ValueError(f'{text} is not between 4 and {MOST_PASSWORD_COST}')
    return value


LOG_LEVELS = ('debug', 'info', 'warning', 'error', 'off')
MONITOR_WORDS = ('off', 'summary', 'time-series')
STDIO_WORDS = tuple(mode.replace('_', '-') for mode in STDIO_MODES)

ASKED_WF = Argument('WF', '', 'id of the workflow; without it you are asked', parse_id, '?', key='workflow_id')
NEEDED_WF = Argument('WF', '', 'id of the workflow', parse_id, key='workflow_id')
ID = Argument('ID', '', 'id of the object', parse_id)
ACTION_ID = Argument('ID', '', 'id of the action', parse_id, key='action_id')
THE_NAME = Argument('-n --name', 'NAME', 'name', count='!')
NAME = Argument('-n --name', 'NAME', 'new name')
DATA = Argument('-d --data', 'JSON', 'its value, as JSON', parse_json)
DRY_RUN = Argument('--dry-run', '', 'say what would happen, change nothing')
FORCE = Argument('--force', '', 'go on although input files are missing, or jobs or runners are at work')
OUTPUT_DIR = Argument('-o --output-dir', 'DIR', 'where output goes', default=DEFAULT_OUTPUT_DIR)
LIMIT = Argument('-l --limit', 'N', 'at most so many', at_least(1))
OFFSET = Argument('--offset', 'N', 'leave out so many at the start', at_least(0))
SORT = Argument('--sort-by', 'FIELD', 'sort by a field')
REVERSE = Argument('--reverse-sort', '', 'the other way round')
PAGE_OPTIONS = (LIMIT, OFFSET, SORT, REVERSE)
SHORT_PAGE_OPTIONS = (LIMIT, Argument('-o --offset', 'N', 'leave out so many at the start', at_least(0)),
              Argument('-s --sort-by', 'FIELD', 'sort by a field'), Argument('-r --reverse-sort', '', 'the other way round'))
JOB = Argument('-j --job-id', 'JOB', 'of this job only', parse_id)
SPEC_OPTIONS = (
    Argument('--skip-checks', '', 'create it although resources fit no scheduler'),
    Argument('--max-instances', 'N', f'what parameters may make (default {MAX_INSTANCES})', at_least(1)),
    Argument('--no-resource-monitoring', '', 'measure nothing'),
)
RUN_OPTIONS = (
    OUTPUT_DIR,
    Argument('-p --poll-interval', 'SECONDS', 'between looks at the server', at_least(0.01, parse_seconds),
             default=DEFAULT_POLL_INTERVAL_S),
    Argument('--num-cpus', 'N', 'CPUs to use (default: all)', at_least(1)),
    Argument('--memory-gb', 'N', 'memory to use, in GiB, or such as 512m (default: all)',
             at_least(0, parse_gigabytes)),
    Argument('--num-gpus', 'N', 'GPUs to use (default: all)', at_least(0)),
    Argument('-j --max-parallel-jobs', 'N', 'run so many jobs at a time, whatever they need', at_least(1)),
    Argument('--claim-backoff-max-secs', 'SECONDS', 'longest wait while nothing changes',
             at_least(0, parse_seconds), default=DEFAULT_CLAIM_BACKOFF_MAX_S),
    Argument('--time-limit', 'DURATION', 'stop after this time, such as 30m, 2h or PT2H', parse_span),
    Argument('--end-time', 'TIME', 'stop at this time, such as 2026-11-21T18:30:00Z', parse_time),
    Argument('--label', 'LABEL,...', 'take jobs with these labels only', parse_labels, '*'),
)
REQUIREMENT_OPTIONS = (
    Argument('--num-cpus', 'N', 'CPUs', at_least(1)), Argument('--num-gpus', 'N', 'GPUs', at_least(0)),
    Argument('--num-nodes', 'N', 'nodes', at_least(1)),
    Argument('-m --memory', 'MEMORY', 'memory, such as 2g or 512MB', normalize_memory),
    Argument('-r --runtime', 'DURATION', 'longest run time, such as 30m or PT30M', normalize_duration),
)
USER = Argument('USER', '', 'name of the user')
PASSWORD_FILE = Argument('-f --file', 'FILE', 'the password file', count='!')
PASSWORD = Argument('-p --password', 'PW', 'the password; without it you are asked, or stdin is read')
COST = Argument('-c --cost', 'N', f'work of guessing, doubled by each: 4 to {MOST_PASSWORD_COST}', parse_cost, default=DEFAULT_PASSWORD_COST)
RELOAD_OPTIONS = (
    Argument('--reload-auth', '', 'then let the server read its password file again (see --url)'),
    Argument('--server-password', 'PW', 'your own password there, where --url names it'))
GROUP_ID = Argument('GROUP', '', 'id of the access group', parse_id, key='group_id')
GROUP_USER = USER._replace(key='user_name')
GROUP_PAGE_OPTIONS = (LIMIT, Argument('-o --offset', 'N', 'leave out so many at the start', at_least(0)))
INIT_OPTIONS = (
    FORCE, DRY_RUN, Argument('--async', '', 'do not wait for its end (see: tasks wait)'),
    Argument('--wait-timeout', 'SECONDS', 'wait no longer; the server goes on', at_least(0, parse_seconds)),
)
GLOBAL_ARGUMENTS = (
    Argument('-f --format', 'FORMAT', 'table, json or csv', one_of(*ANSWER_FORMATS), default='table'),
    Argument('--url', 'URL', 'server to use (default: TORC_API_URL, else the one that runs, else the embedded database)'),
    Argument('-s --standalone', '', f'use the embedded database {DEFAULT_OUTPUT_DIR}/torc.db, whatever server runs'),
    Argument('--db', 'FILE', 'use this embedded database'),
    Argument('--in-memory', '', '`run` and `exec` with -s or --db, and `serve`: keep the database in memory, '
             'with snapshots in its file'),
    Argument('--snapshot-interval-seconds', 'N', 'between these snapshots '
             f'(default {DEFAULT_SNAPSHOT_INTERVAL_S:g}); one is written at every end', at_least(1)),
    Argument('--torc-server-bin', 'FILE', 'accepted: this file is the server, too'),
    Argument('--password', 'PW', 'your password at the server that --url names (better: TORC_PASSWORD)'),
    Argument('--prompt-password', '', 'ask for that password'),
    Argument('--cookie-header', 'TEXT', 'Cookie field for that server'),
    Argument('--tls-ca-cert', 'FILE', 'certificates to believe, for an https URL (default: TORC_TLS_CA_CERT)'),
    Argument('--tls-insecure', '', 'believe any certificate'),
    Argument('--no-prompts', '', 'ask nothing: the answer is yes'),
    Argument('-q --quiet', '', 'errors only'),
    Argument('--log-level', 'LEVEL', 'debug, info, warning, error or off', one_of(*LOG_LEVELS)),
    Argument('--skip-version-check', '', 'accepted'),
    Argument('-h --help', '', 'help on the command'),
    Argument('-V --version', '', 'version of this file'),
)


# -------- commands --------

def cmd_help(session: Session, args: Arguments) -> int:
    """The manual: a topic, a command, or the list of both."""
    words = ' '.join(args['topic'])
    if not words:
        session.show(format_overview())
    elif words in TOPICS:
        session.show(TOPICS[words].show())
    else:
        session.show(format_command_help(words))
    return 0


COMMANDS = (
    Command('run', cmd_run, 'create a workflow from a file, or take one by its id; run its jobs here; report', (
        Argument('SPEC|ID', '', 'workflow file, - for stdin, or id of a workflow', key='target'), *RUN_OPTIONS,
        Argument('--persistent', '', 'stay when nothing is left to do'),
        Argument('--retry-failed', '',
                 'with an id: run again what failed or was canceled, and what depends on it'),
        FORCE, *SPEC_OPTIONS), 'run examples/hello.yaml'),
    Command('create', cmd_create_workflow, 'create a workflow from a file, for runners to be started later', (
        Argument('SPEC', '', 'workflow file, or - for stdin'), Argument('--dry-run', '', 'only tell everything that is wrong'),
        *SPEC_OPTIONS), 'create --dry-run examples/hello.yaml'),
    Command('exec', cmd_exec, 'run commands as jobs, without a file', (
        Argument('-c --command', 'CMD', 'a command; {name} stands for a parameter', count='*'),
        Argument('-C --command-file --commands-file', 'FILE', 'commands, one a line; - for stdin'),
        Argument('--param', 'NAME=VALUES', 'parameter: 1:10, [a,b], @FILE or one value', count='*'),
        Argument('--link', 'MODE', 'product: all combinations; zip: value by value', one_of('product', 'zip'), default='product'),
        Argument('-n --name', 'NAME', 'name of the workflow'), Argument('--description', 'TEXT', 'description of the workflow'),
        DRY_RUN, *RUN_OPTIONS,
        Argument('--monitor', 'WHAT', 'off, summary or time-series, of jobs (default summary)',
                 one_of(*MONITOR_WORDS), is_pending=True),
        Argument('--monitor-compute-node', 'WHAT', 'the same of nodes (default off)',
                 one_of(*MONITOR_WORDS), is_pending=True),
        Argument('--generate-plots', '', 'draw what was measured', is_pending=True),
        Argument('-i --sample-interval --sample-interval-seconds', 'SECONDS',
                 'between measurements (default 10)', at_least(1, parse_whole_seconds), is_pending=True),
        Argument('--stdio', 'MODE', ', '.join(STDIO_WORDS), one_of(*STDIO_WORDS)),
        Argument('WORD', '', 'one command, as words after --', count='--', key='words')), "exec -c 'echo {i}' --param i=1:10"),
    Command('status', cmd_status, 'how far a workflow is', (ASKED_WF,), 'status 1'),
    Command('cancel', cmd_cancel, 'stop a workflow', (ASKED_WF,), 'cancel 1 --no-prompts'),
    Command('delete', cmd_delete_workflows, 'delete workflows with their jobs and results', (
        Argument('WF', '', 'ids of workflows', parse_id, '+', key='workflow_ids'),
        Argument('--force', '', 'as --no-prompts', key='no_prompts')), 'delete 1 --no-prompts'),
    Command('logs', cmd_logs, 'print what jobs wrote, each in its newest attempt', (
        ASKED_WF._replace(parse=parse_logs_workflow),
        Argument('JOB', '', 'ids or names of jobs; without them all that ran', count='*', key='jobs'),
        Argument('--failed', '', 'of failed jobs only'),
        Argument('-f --follow', '', 'go on while they write, until they have ended'),
        Argument('-o --output-dir', 'DIR', "the runner's", default=DEFAULT_OUTPUT_DIR),
        Argument('--run-id', 'N', 'of this run', at_least(0)), Argument('--attempt-id', 'N', 'of this attempt', at_least(1)),
        Argument('--stdout', '', 'stdout only'), Argument('--stderr', '', 'stderr only')), 'logs 1 greet'),
    Command('serve', cmd_serve, 'be a lasting server for all runners and commands of this account', (
        Argument('run', '', 'accepted, as all of torc-server', parse_server_verb, '?', key='word'),
        Argument('-H -u --url --host', 'HOST', 'address to listen at (default 127.0.0.1)', default='127.0.0.1'),
        Argument('-p --port', 'PORT', f'0: any free one (default {DEFAULT_PORT})', at_least(0), default=DEFAULT_PORT),
        Argument('-d --database --db', 'FILE', "database (default: DATABASE_URL, else torc/torc.db in the user's state directory); "
                 ":memory: for one that ends with the server"),
        Argument('--no-auth', '', 'let in who shows no token or password; on 127.0.0.1 only'), Argument('--new-token', '', 'make a new token'),
        Argument('--takeover', '', 'take the lease of a server that is gone for certain'),
        Argument('--disable-admin-sql', '', 'no `admin sql`'), Argument('--disable-admin-sql-writes', '', 'no `admin sql --write`'),
        Argument('--auth-file', 'FILE', 'let the users of this password file in, beside the token'),
        Argument('--credential-cache-ttl-secs', 'SECONDS',
                 'check a password again after so long without use (default 60; 0: each time)',
                 at_least(0, parse_whole_seconds)),
        Argument('--require-auth', '', 'accepted: it is always on, unless --no-auth is given'),
        Argument('--enforce-access-control', '', 'show users only workflows of their own and of their groups'),
        Argument('--admin-user', 'USER', 'may do what the owner may', count='*'),
        Argument('--tls-cert', 'FILE', 'speak https, with this certificate (PEM; default: TORC_TLS_CERT)'),
        Argument('--tls-key', 'FILE', 'its key (PEM; default: TORC_TLS_KEY)'),
        Argument('--https', '', 'accepted: a certificate is enough'),
        Argument('-l --log-level', 'LEVEL', 'debug, info, warning, error or off', parse_log_level),
        Argument('--log-dir', 'DIR', 'log to DIR/torc-server.log too, five files of 10 MiB (default: TORC_LOG_DIR)'),
        Argument('--json-logs', '', 'log as JSON, an object a line'),
        Argument('--daemon', '', 'go on in the background, as soon as it answers'),
        Argument('--pid-file', 'FILE', 'write the process id there'),
        Argument('--shutdown-on-stdin-eof', '', 'end when stdin ends'),
        Argument('-t --threads', 'N', 'accepted: there is one', at_least(1)),
        Argument('-c --completion-check-interval-secs', 'SECONDS', 'accepted: there is nothing to wait for',
                 at_least(0, parse_seconds))),
        'serve --port 0'),
    Command('ping', cmd_ping, 'whether a server answers', (), 'ping'),
    Command('htpasswd add', cmd_htpasswd_add, "set a user's password in a password file", (
        PASSWORD_FILE, USER, PASSWORD, COST, *RELOAD_OPTIONS), 'htpasswd add -f users.htpasswd -p a-long-word ann'),
    Command('htpasswd hash', cmd_htpasswd_hash, 'print what a password file would hold', (
        Argument('USER', '', 'name, for the whole line', count='?'), PASSWORD, COST), 'htpasswd hash -p a-long-word ann'),
    Command('htpasswd verify', cmd_htpasswd_verify, "whether a password is a user's", (PASSWORD_FILE, USER, PASSWORD),
        'htpasswd verify -f users.htpasswd -p open-sesame you'),
    Command('htpasswd list', cmd_htpasswd_list, 'list the users of a password file', (PASSWORD_FILE,), 'htpasswd list -f users.htpasswd'),
    Command('htpasswd remove', cmd_htpasswd_remove, 'take a user out of a password file', (PASSWORD_FILE, USER, *RELOAD_OPTIONS),
        'htpasswd remove -f users.htpasswd you'),
    Command('help', cmd_help, 'the manual', (Argument('TOPIC', '', 'a topic, or a command', count='*'),), 'help spec'),

    Command('workflows new', cmd_workflows_new, 'make an empty workflow', (
        THE_NAME, Argument('-d --description', 'TEXT', 'one sentence about it')), 'workflows new -n study'),
    Command('workflows list', cmd_workflows_list, 'list your workflows', (
        *PAGE_OPTIONS, Argument('--archived-only', '', 'archived ones'), Argument('--include-archived', '', 'archived ones too'),
        Argument('-a --all-users', '', "other users' too"),
        Argument('-g --access-group', 'NAME', "of this group, whoever's", count='*')), 'workflows list', True),
    Command('workflows get', cmd_workflows_get, 'show a workflow', (ASKED_WF,), 'workflows get 1'),
    Command('workflows update', cmd_workflows_update, 'change a workflow', (
        ASKED_WF, NAME, Argument('-d --description', 'TEXT', 'new description'),
        Argument('--owner-user', 'USER', 'new owner', key='user'),
        Argument('--project', 'NAME', 'new project'), Argument('--metadata', 'JSON', 'new metadata', parse_json)),
        'workflows update 1 -n study'),
    Command('workflows init', cmd_init, 'make all jobs ready or blocked anew, in a new run', (ASKED_WF, *INIT_OPTIONS),
        'workflows init 1 --no-prompts'),
    Command('workflows reinit', cmd_reinit, 'make ready what changed since it ran', (ASKED_WF, *INIT_OPTIONS),
        'workflows reinit 1 --dry-run'),
    Command('workflows reset-status', cmd_reset_status, 'set jobs back to uninitialized', (
        ASKED_WF, Argument('--failed-only', '', 'only those that failed, and what depends on them'),
        Argument('-r --reinitialize', '', 'and make them ready'), Argument('--force', '', 'although jobs are running')),
        'workflows reset-status 1 --failed-only -r --no-prompts'),
    Command('workflows is-complete', cmd_is_complete, 'whether nothing more is to come', (ASKED_WF,), 'workflows is-complete 1'),
    Command('workflows list-actions', cmd_list_actions, 'list actions and how far their triggers are', (ASKED_WF,),
        'workflows list-actions 1', True),
    Command('workflows update-action', cmd_update_action, "change an action's configuration", (
        NEEDED_WF, ACTION_ID, Argument('--scheduler-id', 'N', 'id of the scheduler', parse_id), Argument('--scheduler-type', 'TYPE', 'slurm'),
        Argument('--num-allocations', 'N', 'how many allocations', at_least(0)),
        Argument('--start-one-worker-per-node', 'TRUTH', 'true or false', parse_truth),
        Argument('--max-parallel-jobs', 'N', 'run so many jobs at a time', at_least(1)),
        Argument('--json', 'OBJECT', 'keys and values, as JSON', parse_json)), 'workflows update-action 1 1 --num-allocations 2'),
    Command('workflows delete-action', cmd_delete_action, 'delete an action', (NEEDED_WF, ACTION_ID), 'workflows delete-action 1 1 --no-prompts'),
    Command('workflows execution-plan', cmd_execution_plan, 'in which order jobs become ready', (
        Argument('WF|SPEC', '', 'id of a workflow, or workflow file', key='target'),
        *SPEC_OPTIONS), 'workflows execution-plan examples/diamond.yaml'),
    Command('workflows archive', cmd_archive, 'hide workflows from lists, or show them again', (
        Argument('TRUTH', '', 'true or false', parse_truth, key='is_archived'),
        Argument('WF', '', 'ids of workflows', parse_id, '*', key='workflow_ids')), 'workflows archive true 1'),

    Command('jobs create', cmd_create, 'add a job to a workflow', (
        ASKED_WF, THE_NAME, Argument('-c --command', 'CMD', 'what it runs', count='!'),
        Argument('-r --resource-requirements-id', 'ID', 'what it needs', parse_id),
        Argument('-b --blocking-job-ids', 'ID', 'jobs that must finish first', parse_ids, '+', key='depends_on_job_ids'),
        Argument('-i --input-file-ids', 'ID', 'files that it reads', parse_ids, '+'),
        Argument('-o --output-file-ids', 'ID', 'files that it writes', parse_ids, '+'),
        Argument('--priority', 'N', 'higher is claimed first', parse_number),
        Argument('--label', 'LABEL,...', 'only runners with these labels take it', parse_labels, '*', key='labels')),
        "jobs create 1 -n extra -c 'echo more'"),
    Command('jobs create-from-file', cmd_jobs_create_from_file, 'add a job for each line of a file', (
        NEEDED_WF, Argument('FILE', '', 'commands, one a line; - for stdin'),
        Argument('--cpus-per-job', 'N', 'CPUs of each', at_least(1), default=1),
        Argument('--memory-per-job', 'MEMORY', 'memory of each', normalize_memory, default='1m'),
        Argument('--runtime-per-job', 'DURATION', 'longest run time of each', normalize_duration,
                 default='PT1M')),
        'jobs create-from-file 1 commands.txt'),
    Command('jobs list', cmd_jobs_list, 'list jobs', (
        ASKED_WF, Argument('-s --status', 'STATUS', 'in this status only', one_of(*STATUS_CODES)),
        Argument('--upstream-job-id', 'JOB', 'that wait for this job', parse_id), *PAGE_OPTIONS,
        Argument('--include-relationships', '', 'JSON: with ids of files and prerequisites'),
        Argument('-x --exclude', 'COLUMN', 'without this column', count='*')), 'jobs list 1 --status failed', True),
    Command('jobs get', cmd_jobs_get, 'show a job, and why it failed or does not run', (ID,), 'jobs get 1'),
    Command('jobs running', cmd_jobs_running, 'list jobs that run now', (ASKED_WF,), 'jobs running 1', True),
    Command('jobs update', cmd_jobs_update, 'change a job', (
        ID, NAME, Argument('-c --command', 'CMD', 'what it runs'),
        Argument('--runtime', 'DURATION', 'of its requirements, which others may share', normalize_duration),
        Argument('--resource-requirements-id', 'ID', 'what it needs', parse_id),
        Argument('--priority', 'N', 'higher is claimed first', parse_number),
        Argument('--label', 'LABEL,...', 'only runners with these labels take it', parse_labels, '*', key='labels'),
        Argument('--clear-labels', '', 'without labels')), 'jobs update 1 --priority 5'),
    Command('jobs delete', cmd_jobs_delete, 'delete jobs', (Argument('ID', '', 'ids of jobs', parse_id, '+', key='job_ids'),),
        'jobs delete 1'),
    Command('jobs delete-all', cmd_jobs_delete_all, 'delete all jobs of a workflow', (NEEDED_WF,), 'jobs delete-all 1 --no-prompts'),
    Command('jobs reset-status', cmd_jobs_reset_status, 'set chosen jobs back to uninitialized', (
        Argument('ID', '', 'ids of jobs', parse_id, '*', key='job_ids'),
        Argument('--status', 'STATUS,...', 'jobs in these statuses', parse_statuses, '*'),
        Argument('--return-code', 'N', 'jobs that ended with this code', parse_number),
        Argument('--workflow-id', 'WF', 'workflow of --status and --return-code', parse_id),
        Argument('--force', '', 'although jobs are running'),
        DRY_RUN, Argument('--reinitialize --reinit', '', 'and make them ready')),
        'jobs reset-status --return-code 1 --workflow-id 1 --reinit --no-prompts'),
    Command('jobs list-resource-requirements', cmd_jobs_requirements, 'list what jobs need', (ASKED_WF, JOB),
        'jobs list-resource-requirements 1', True),
    Command('jobs list-failure-handlers', cmd_jobs_handlers, 'list failure handlers of jobs', (ASKED_WF, JOB),
        'jobs list-failure-handlers 1', True),

    Command('files create', cmd_create, 'add a file to a workflow', (
        ASKED_WF, THE_NAME, Argument('-p --path', 'PATH', 'where it is', count='!')), 'files create 1 -n data -p data.csv'),
    Command('files list', cmd_list, 'list files', (
        ASKED_WF, Argument('--produced-by-job-id', 'JOB', 'that this job writes', parse_id), *PAGE_OPTIONS), 'files list 1', True),
    Command('files get', cmd_get, 'show a file', (ID,), 'files get 1'),
    Command('files update', cmd_update, 'change a file', (ID, NAME, Argument('-p --path', 'PATH', 'where it is')),
        'files update 1 -p data.csv'),
    Command('files delete', cmd_delete, 'take a file out of its workflow', (ID,), 'files delete 1'),
    Command('files list-required-existing', cmd_list_ids, 'list files that must exist: no job makes them, or has made them', (ASKED_WF,),
        'files list-required-existing 1'),

    Command('user-data create', cmd_create, 'add user data to a workflow', (
        ASKED_WF, THE_NAME, DATA, Argument('--ephemeral', '', 'forgotten at every initialize', key='is_ephemeral'),
        Argument('--consumer-job-id', 'JOB', 'job that reads it', parse_id),
        Argument('--producer-job-id', 'JOB', 'job that writes it', parse_id)),
        """user-data create 1 -n limits -d '{"low": 1}'"""),
    Command('user-data list', cmd_list, 'list user data', (
        ASKED_WF, Argument('-l --limit', 'N', 'at most so many', at_least(1)),
        Argument('-o --offset', 'N', 'leave out so many at the start', at_least(0)), SORT, REVERSE,
        Argument('--name', 'NAME', 'with this in its name'), Argument('--is-ephemeral', 'TRUTH', 'true or false', parse_truth),
        Argument('--consumer-job-id', 'JOB', 'read by this job', parse_id),
        Argument('--producer-job-id', 'JOB', 'written by this job', parse_id)),
        'user-data list 1', True),
    Command('user-data get', cmd_get, 'show user data', (ID,), 'user-data get 1'),
    Command('user-data update', cmd_update, 'change user data', (
        ID, NAME, DATA, Argument('--ephemeral', 'TRUTH', 'true or false', parse_truth, key='is_ephemeral')),
        "user-data update 1 -d '[1, 2]'"),
    Command('user-data delete', cmd_delete, 'delete user data', (ID,), 'user-data delete 1'),
    Command('user-data delete-all', cmd_delete_all_user_data, 'delete all user data of a workflow', (NEEDED_WF,),
        'user-data delete-all 1 --no-prompts'),
    Command('user-data list-missing', cmd_list_ids, 'list user data that has no value', (NEEDED_WF,), 'user-data list-missing 1'),

    Command('resource-requirements create', cmd_create, 'add resource requirements to a workflow', (
        ASKED_WF, THE_NAME, *REQUIREMENT_OPTIONS), 'resource-requirements create 1 -n big --num-cpus 4 -m 8g -r PT1H'),
    Command('resource-requirements list', cmd_list, 'list resource requirements', (ASKED_WF, *PAGE_OPTIONS),
        'resource-requirements list 1', True),
    Command('resource-requirements get', cmd_get, 'show resource requirements', (ID,), 'resource-requirements get 1'),
    Command('resource-requirements update', cmd_update, 'change resource requirements', (ID, NAME, *REQUIREMENT_OPTIONS),
        'resource-requirements update 1 --memory 16g'),
    Command('resource-requirements delete', cmd_delete, 'delete resource requirements', (ID,), 'resource-requirements delete 1'),

    Command('failure-handlers list', cmd_list, 'list failure handlers', (ASKED_WF, LIMIT, OFFSET), 'failure-handlers list 1', True),
    Command('failure-handlers get', cmd_get, 'show a failure handler', (ID,), 'failure-handlers get 1'),

    Command('results list', cmd_results_list, 'list results of the current run', (
        ASKED_WF, JOB, Argument('-r --run-id', 'N', 'of this run', at_least(0)),
        Argument('--return-code', 'N', 'with this return code', parse_number),
        Argument('--failed', '', 'with a return code other than 0'),
        Argument('-s --status', 'STATUS', 'with this status', one_of(*STATUS_CODES)),
        Argument('--compute-node', 'ID', 'of this compute node', parse_id, key='compute_node_id'),
        Argument('--all-runs', '', 'of earlier runs and attempts too'),
        *PAGE_OPTIONS, Argument('--include-logs', '', 'JSON: with the paths of output files'),
        Argument('-o --output-dir', 'DIR', "the runner's, for --include-logs", default=DEFAULT_OUTPUT_DIR)),
        'results list 1 --failed', True),
    Command('results get', cmd_get, 'show a result', (ID,), 'results get 1'),
    Command('results delete', cmd_delete, 'delete a result', (ID,), 'results delete 1'),

    Command('events create', cmd_create_event, 'add an event',
        (ASKED_WF, Argument('-d --data', 'JSON', 'what happened', parse_json, '!')),
        """events create 1 -d '{"category": "note"}'"""),
    Command('events list', cmd_list, 'list events',
        (ASKED_WF, Argument('-t --type --category', 'TYPE', 'of this category'), *SHORT_PAGE_OPTIONS), 'events list 1', True),
    Command('events get-latest-event', cmd_latest_event, 'show the newest event', (ASKED_WF,), 'events get-latest-event 1'),
    Command('events monitor', cmd_monitor_events, 'show what happens, as it happens', (
        ASKED_WF, Argument('-d --duration', 'MINUTES', 'for so long; else until it is interrupted',
                           at_least(0, parse_minutes)),
        Argument('--level', 'LEVEL', ', '.join(SEVERITIES) + ': this and worse', one_of(*SEVERITIES), default='info'),
        Argument('--filename', 'FILE', 'add them to a file too, one a line')), 'events monitor 1 -d 0'),
    Command('events delete', cmd_delete, 'delete an event', (ID,), 'events delete 1'),

    Command('compute-nodes list', cmd_list, 'list compute nodes', (
        ASKED_WF, *SHORT_PAGE_OPTIONS,
        Argument('--scheduled-compute-node', 'ID', 'of this allocation', parse_id, key='scheduled_compute_node_id')),
        'compute-nodes list 1', True),
    Command('compute-nodes get', cmd_get, 'show a compute node', (ID,), 'compute-nodes get 1'),

    Command('tasks wait', cmd_tasks_wait, 'wait for a task of the server; 1 if it failed', (
        Argument('ID', '', 'id of the task', parse_id),
        Argument('--timeout', 'SECONDS', 'wait no longer', at_least(0, parse_seconds)),
        Argument('--poll-fallback-interval', 'SECONDS', 'longest between looks',
                 at_least(0.01, parse_seconds), default=10)), 'tasks wait 1'),

    Command('job-dependencies job-job', cmd_list, 'list which job waits for which', (ASKED_WF, LIMIT, OFFSET),
        'job-dependencies job-job 1', True),
    Command('job-dependencies job-file', cmd_list, 'list which job makes and reads which file', (ASKED_WF, LIMIT, OFFSET),
        'job-dependencies job-file 1', True),
    Command('job-dependencies job-user-data', cmd_list, 'list which job makes and reads which user data', (ASKED_WF, LIMIT, OFFSET),
        'job-dependencies job-user-data 1', True),

    Command('admin sql', cmd_admin_sql, "carry out an SQL statement on the server's database", (
        Argument('STATEMENT', '', 'SELECT, WITH or VALUES; with --write INSERT, REPLACE, UPDATE or DELETE', key='sql'),
        Argument('--write', '', 'it changes something'),
        Argument('--allow-full-table', '', 'an UPDATE or DELETE may do without WHERE'),
        Argument('-y --yes', '', 'do not ask before a change'),
        Argument('--limit', 'N', 'at most so many rows', at_least(1))), "admin sql 'SELECT id, name FROM workflow'", True),
    Command('admin list-audit-log', cmd_list_audit_log, 'list what was changed with SQL', (
        Argument('--limit', 'N', 'at most so many', at_least(1)), OFFSET), 'admin list-audit-log', True),
    Command('admin api-stats', cmd_api_stats, "count the server's requests", (
        Argument('--window', 'SECONDS', 'of the last so many seconds, at most 3600',
                 at_least(1, parse_whole_seconds), default=3600),
        Argument('--interval', 'SECONDS', 'in steps of so many', at_least(1, parse_whole_seconds),
                 default=60)),
        'admin api-stats --window 120', True),
    Command('admin tail-api', cmd_tail_api, 'show requests as they are answered, one JSON line each', (
        Argument('--include-bodies', '', 'with what was sent and answered'),), 'admin tail-api'),
    Command('admin reload-auth', cmd_reload_auth, 'let the server read its users anew', (), 'admin reload-auth'),

    Command('access-groups create', cmd_groups_change, 'make an access group', (
        Argument('NAME', '', 'its name'), Argument('-d --description', 'TEXT', 'one sentence about it')), 'access-groups create chemists'),
    Command('access-groups list', cmd_groups_list, 'list access groups', GROUP_PAGE_OPTIONS, 'access-groups list', True),
    Command('access-groups get', cmd_groups_get, 'show an access group', (GROUP_ID,), 'access-groups get 1'),
    Command('access-groups delete', cmd_groups_change, 'delete an access group', (GROUP_ID,), 'access-groups delete 2'),
    Command('access-groups add-user', cmd_groups_change, 'let a user into a group', (
        GROUP_ID, GROUP_USER, Argument('-r --role', 'ROLE', ' or '.join(GROUP_ROLES), one_of(*GROUP_ROLES), default='member')),
        'access-groups add-user 2 ann'),
    Command('access-groups remove-user', cmd_groups_change, 'take a user out of a group', (GROUP_ID, GROUP_USER),
        'access-groups remove-user 2 you'),
    Command('access-groups list-members', cmd_groups_list, 'list who is in a group', (GROUP_ID, *GROUP_PAGE_OPTIONS),
        'access-groups list-members 2', True),
    Command('access-groups list-user-groups', cmd_groups_list, 'list the groups that a user is in', (GROUP_USER, *GROUP_PAGE_OPTIONS),
        'access-groups list-user-groups you', True),
    Command('access-groups add-workflow', cmd_groups_change, 'let a group use a workflow', (NEEDED_WF, GROUP_ID),
        'access-groups add-workflow 1 3'),
    Command('access-groups remove-workflow', cmd_groups_change, 'take a workflow from a group', (NEEDED_WF, GROUP_ID),
        'access-groups remove-workflow 1 2'),
    Command('access-groups list-workflow-groups', cmd_groups_list, 'list the groups that may use a workflow', (
        NEEDED_WF, *GROUP_PAGE_OPTIONS), 'access-groups list-workflow-groups 1', True),
)


# -------- help --------

class Topic(NamedTuple):
    """One topic of the manual."""
    show: Callable[[], str]
    help: str


def format_usage(command: Command) -> str:
    """'jobs list [WF] [options]'."""
    forms = {'1': '{}', '?': '[{}]', '*': '[{}...]', '+': '{}...', '--': '[-- {}...]'}
    words = [forms[argument.count].format(argument.names) for argument in command.arguments if not argument.names.startswith('-')]
    options = ['[options]'] if len(words) < len(command.arguments) else []
    place = len(words) - any(word.startswith('[--') for word in words)
    return ' '.join([command.name] + words[:place] + options + words[place:])


def format_arguments(arguments: Sequence[Argument]) -> str:
    """Two columns: names with their value, and meaning."""
    rows = []
    for argument in arguments:
        needed = ' (required)' if argument.count == '!' else ''
        needed += '; not in effect yet' if argument.is_pending else ''
        default = f' (default {argument.default})' if argument.default is not None and 'default' not in argument.meaning else ''
        rows.append((f"{', '.join(argument.names.split())} {argument.value}".strip(), argument.meaning + needed + default))
    return format_rows(rows)


def format_command_help(words: str) -> str:
    """Help on a command, or the commands of a group."""
    found = [command for command in COMMANDS if command.name == words]
    if found:
        command = found[0]
        arguments = '\n' + format_arguments(command.arguments) if command.arguments else ''
        return (f'Usage: torc.py {format_usage(command)}\n\n{sentence(command.help)}\n{arguments}\n'
                f'Example: torc.py {command.example}\nOptions of all commands: torc.py help commands\n')
    group = [command for command in COMMANDS if command.name.startswith(words + ' ')]
    if group:
        return f'Commands of {words}:\n\n' + format_rows((format_usage(command), command.help) for command in group)
    names = [*TOPICS, *(command.name for command in COMMANDS), *GROUPS]
    raise BadInput(printable(f'there is no help on {words!r}{did_you_mean(words, names)} (see: torc.py help)'))


def sentence(text: str) -> str:
    """With a capital and a full stop."""
    return text[0].upper() + text[1:] + '.'


def verbs_of(group: str) -> List[str]:
    """Second words of a group's commands."""
    return [command.name.split()[1] for command in COMMANDS if command.name.startswith(group + ' ')]


def format_overview() -> str:
    """What `help` says alone."""
    plain = [(command.name, command.help) for command in COMMANDS if ' ' not in command.name]
    groups = [(group, ', '.join(verbs_of(group))) for group in GROUPS]
    topics = [(f'help {name}', topic.help) for name, topic in TOPICS.items()] + [('help COMMAND', 'arguments of a command')]
    return ('torc.py: a workflow manager in one file.\n\n    torc.py run FILE        create, run, wait, report\n\n'
            f'Commands:\n{format_rows(plain)}\nGroups:\n{format_rows(groups)}\nManual:\n{format_rows(topics)}')


def format_all_commands() -> str:
    """Topic `commands`: every command, then the options of all."""
    rows = format_rows(((format_usage(command), command.help) for command in COMMANDS), limit=48)
    return f'Commands:\n{rows}\nOptions of all commands, before or after the command:\n{format_arguments(GLOBAL_ARGUMENTS)}'


def format_environment() -> str:
    """Topic `environment`: variables, then exit codes."""
    set_by = {'you': 'You set:', 'torc': 'Set for jobs:'}
    parts = [f'{title}\n' + format_rows((row.name, row.meaning) for row in ENVIRONMENT if row.set_by == who)
             for who, title in set_by.items()]
    return '\n'.join(parts + ['Exit codes:\n' + format_rows((str(row.code), row.meaning) for row in EXITS)])


GROUPS = tuple(dict.fromkeys(command.name.split()[0] for command in COMMANDS if ' ' in command.name))
TOPICS = {
    'spec': Topic(format_field_help, 'every field of a workflow file'),
    'parameters': Topic(format_parameter_help, 'how one job becomes many'),
    'commands': Topic(format_all_commands, 'every command, and options of all'),
    'environment': Topic(format_environment, 'environment variables and exit codes'),
}


# -------- parsing --------

WORDS_OF_COUNT = {'1': (1, 1), '?': (0, 1), '*': (0, math.inf), '+': (1, math.inf)}
JSON_ERRORS = ('ping', 'cancel', 'workflows init', 'workflows reinit', 'workflows archive', 'workflows reset-status', 'jobs reset-status')
NEGATIVE_NUMBER = Expression(r'-[0-9]+\Z')


HELP = next(command for command in COMMANDS if command.run is cmd_help)


class Parsed(NamedTuple):
    """A command line, understood."""
    command: Optional[Command]  # None: only options, such as --version
    args: Arguments             # of the command
    options: Arguments          # of all commands


def is_option(word: str) -> bool:
    """Whether a word is an option: not '-' alone (stdin), nor a negative number."""
    return word.startswith('-') and word != '-' and not NEGATIVE_NUMBER.match(word)


def option_table(arguments: Sequence[Argument]) -> Dict[str, Argument]:
    """Each spelling of each option."""
    return {name: argument for argument in arguments for name in argument.names.split() if name.startswith('-')}


def parse_command_line(words: Sequence[str]) -> Parsed:
    """Words after the program's name -> what is to be done. BadInput for what is not understood."""
    words, rest = list(words), []
    if '--' in words:
        place = words.index('--')
        words, rest = words[:place], words[place + 1:]
    options = {key_of(argument): argument.default for argument in GLOBAL_ARGUMENTS}
    queue = collections.deque(words)
    bare = read_words(queue, option_table(GLOBAL_ARGUMENTS), options, 1)
    if not bare:
        return Parsed(None, {}, options)
    if bare[0] in GROUPS and len(queue) == 1 and queue[0] in ('-h', '--help'):
        return Parsed(HELP, {'topic': bare}, options)
    command = find_command(bare[0], queue, options)
    args = {key_of(argument): argument.default for argument in command.arguments}
    found = {}      # type: Arguments
    table = dict(option_table(GLOBAL_ARGUMENTS), **option_table(command.arguments))
    try:
        bare = read_words(queue, table, found)
        if found.get('help'):
            return Parsed(command, args, dict(options, help=True))
        place_words(command, bare, rest, found)
    except ValueError as error:
        raise BadInput(f'{error}; usage: torc.py {format_usage(command)}') from None
    args.update((key, value) for key, value in found.items() if key in args)
    options.update((key, value) for key, value in found.items() if key in options and key not in args)
    options['no_prompts'] = options['no_prompts'] or bool(found.get('no_prompts'))
    return Parsed(command, args, options)


def find_command(first: str, queue: Any, options: Arguments) -> Command:
    """The row that the first word, or the first two, name."""
    names = {command.name: command for command in COMMANDS}
    if first in names:
        return names[first]
    if first not in GROUPS:
        raise BadInput(printable(f'there is no command {first!r}{did_you_mean(first, [*names, *GROUPS])} (see: torc.py help)'))
    second = read_words(queue, option_table(GLOBAL_ARGUMENTS), options, 1)
    if second and f'{first} {second[0]}' in names:
        return names[f'{first} {second[0]}']
    verbs = verbs_of(first)
    if not second:
        raise BadInput(f"`{first}` wants one of: {', '.join(verbs)}")
    near = did_you_mean(second[0], verbs)
    raise BadInput(printable(f"there is no command '{first} {second[0]}'{near} ({first} has: {', '.join(verbs)})"))


def read_words(queue: Any, table: Dict[str, Argument], found: Arguments, limit: float = math.inf) -> List[str]:
    """Take words off the queue: options into `found`, the others into the answer, until there are `limit` of these."""
    bare = []       # type: List[str]
    while queue and len(bare) < limit:
        word = queue.popleft()
        if is_option(word):
            read_option_word(word, queue, table, found)
        else:
            bare.append(word)
    return bare


def read_option_word(word: str, queue: Any, table: Dict[str, Argument], found: Arguments) -> None:
    """One option with its value: --name value, --name=value, -n value, -nvalue, or several switches such as -ar."""
    if word.startswith('--'):
        name, equals, value = word.partition('=')
    else:
        name, equals, value = word[:2], word[2:], word[2:]
    argument = table.get(name)
    if argument is None:
        raise BadInput(printable(f'there is no option {name}{did_you_mean(name, table)}'))
    if argument.value:
        values = [value] if equals else take_values(name, argument, queue)
        for text in values:
            store_value(argument, name, text, found)
    elif equals and word.startswith('--'):
        raise BadInput(f'{name} takes no value')
    else:
        found[key_of(argument)] = True
        if value:
            read_option_word('-' + value, queue, table, found)


def take_values(name: str, argument: Argument, queue: Any) -> List[str]:
    """The word after an option; for those that take several, all words up to the next option."""
    values = []
    while queue and not is_option(queue[0]) and (not values or argument.count == '+'):
        values.append(queue.popleft())
    if not values and queue and argument.parse is str and argument.count != '+':
        values.append(queue.popleft())      # a command may begin with a dash
    if not values:
        raise BadInput(f'{name} wants a value: {name} {argument.value}')
    return values


def store_value(argument: Argument, name: str, text: str, found: Arguments) -> None:
    """A value under its key; what may stand several times is collected in a list."""
    try:
        value = argument.parse(text)
    except ValueError as error:
        raise BadInput(printable(f'{name}: {error}')) from None
    key = key_of(argument)
    if argument.count in '*+':
        found.setdefault(key, []).extend(value if isinstance(value, list) else [value])
    else:
        found[key] = value


def place_words(command: Command, bare: List[str], rest: List[str], found: Arguments) -> None:
    """Give the words that are no options to the arguments they are meant for, in their order. ValueErrors."""
    for argument in command.arguments:
        key = key_of(argument)
        if argument.names.startswith('-'):
            if argument.count == '!' and key not in found:
                raise ValueError(f'{argument.names.split()[-1]} {argument.value} is missing')
        elif argument.count == '--':
            found[key], rest = rest, []
        else:
            least, most = WORDS_OF_COUNT[argument.count]
            taken, bare = bare[:int(min(most, len(bare)))], bare[int(min(most, len(bare))):]
            if len(taken) < least:
                raise ValueError(f'{argument.names} is missing')
            values = [argument.parse(word) for word in taken]
            found[key] = values if most > 1 else values[0] if values else None
    if bare and command.arguments and command.arguments[-1].count == '--':
        word = printable(bare[0])
        is_spec = os.path.splitext(word)[1].lower() in FORMATS
        raise ValueError(f'{word!r} is a workflow file: run it with `torc.py run {word}`' if is_spec else
                         f'{word!r} is no option: a command stands behind -c, in one word, or behind --')
    if bare or rest:
        raise ValueError(f'{printable((bare + rest)[0])!r} is one word too many')


# -------- the border --------

def run_command(parsed: Parsed, session: Session) -> int:
    """Carry out what was understood."""
    if parsed.options['version']:
        session.show(f'torc {__version__}\n')
        return 0
    if parsed.command is None:
        if parsed.options['help']:
            session.show(format_overview())
            return 0
        session.err.write(format_overview())
        return BadInput.exit
    if parsed.options['help']:
        session.show(format_command_help(parsed.command.name))
        return 0
    if session.format == 'csv' and not parsed.command.has_csv:
        raise BadInput(f'`{parsed.command.name}` has no CSV form: give -f table or -f json')
    session.command = parsed.command
    for doubt in doubt_arguments(parsed.command, parsed.args):
        session.tell(f'warning: {doubt}')
    return parsed.command.run(session, parsed.args)


def doubt_arguments(command: Command, args: Arguments) -> Iterator[str]:
    """Options that do not do what they seem to."""
    found = [(argument, argument.names.split()[-1], args[key_of(argument)]) for argument in command.arguments]
    pending = [name for argument, name, value in found
               if argument.is_pending and value not in (None, False, 'off')]
    if pending:
        yield f"accepted, but not in effect in this version: {', '.join(pending)}"
    for argument, name, value in found:
        doubt = doubt_memory(value or '') if argument.parse is normalize_memory else ''
        if doubt:
            yield f'{name}: {doubt}'


def tell_error(session: Session, error: TorcError) -> int:
    """An error's message and problems on stderr; its exit code."""
    problems = getattr(error, 'problems', [])
    for problem in problems[:PROBLEMS_SHOWN]:
        session.tell(printable(f'error: {problem}'))
    if len(problems) > PROBLEMS_SHOWN:
        session.tell(f'and {len(problems) - PROBLEMS_SHOWN} more')
    if error.message not in [text for problem in problems for text in (problem.message, str(problem), str(problem._replace(path='')))]:
        session.tell(printable(f'torc: {error.message}'))
    if session.command is not None and session.command.name in JSON_ERRORS and session.format == 'json':
        session.show_json(dict(error.details, status='error', error=error.message, message=error.message))
    return error.exit


@contextlib.contextmanager
def logging_to(stream: Any, level: str) -> Iterator[None]:
    """Log lines of this program go to a stream for a while."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.CRITICAL + 1 if level == 'off' else level.upper())
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def log_level(parsed: Parsed) -> str:
    """Level that was asked for; a server tells more than a command."""
    own = parsed.args.get('log_level') or parsed.options['log_level']
    return own or ('info' if parsed.command is not None and parsed.command.name == 'serve' else 'warning')


def main(argv: Optional[Sequence[str]] = None, out: Any = None, err: Any = None) -> int:
    """Carry out a command line (default: this program's) and return its exit code."""
    # A stream that was closed before the start is None.
    out, err, stdin = (stream or open(os.devnull, mode) for stream, mode in ((out or sys.stdout, 'w'), (err or sys.stderr, 'w'), (sys.stdin, 'r')))
    session = Session({key_of(argument): argument.default for argument in GLOBAL_ARGUMENTS}, out, err, stdin)
    try:
        parsed = parse_command_line(sys.argv[1:] if argv is None else argv)
        session.options = parsed.options
        with logging_to(err, log_level(parsed)):
            code = run_command(parsed, session)
            session.leave()
        out.flush()
        return code
    except TorcError as error:
        return tell_error(session, error)
    except KeyboardInterrupt:
        session.tell('Interrupted')
        return 130
    except BrokenPipeError:
        silence(out)
        return 141
    except (OSError, UnicodeEncodeError) as error:
        cause = explain_environment(error)
        if cause:
            session.tell(f'torc: {cause}')
            silence(out)
            return BadInput.exit
        return tell_bug(session)
    except Exception:  # border: what is left is a bug, and the user is told so
        return tell_bug(session)
    finally:
        session.close()


def tell_bug(session: Session) -> int:
    """The traceback of the exception in hand; the exit code."""
    session.tell(traceback.format_exc() + f'torc.py {__version__}: this is a bug, please report the lines above')
    return 70


def explain_environment(error: Exception) -> str:
    """What is wrong around us, if that is what an error comes from; '' if it is a bug."""
    if isinstance(error, UnicodeEncodeError):
        text = printable(str(error.object))[:100]
        return (f'{text!r} cannot be written in the encoding {error.encoding}: it is no text, or the locale is not UTF-8 '
                '(set LC_ALL=C.UTF-8 or another one that ends in UTF-8)')
    if not os.path.isdir('.'):
        return 'the current directory no longer exists: go to another one'
    if error.errno in (errno.ENOSPC, errno.EIO, errno.EBADF, errno.EDQUOT) and error.filename is None:
        return f'cannot write: {error.strerror}'
    return ''


def silence(out: Any) -> None:
    """Point a closed stdout at nothing, or the interpreter complains about it once more at its end (Python's signal documentation)."""
    try:
        number = out.fileno()
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    except (OSError, ValueError):
        pass    # not a file: nothing will be flushed


if __name__ == '__main__':
    gc.set_threshold(100000)    # a large workflow makes many objects and hardly any cycles
    sys.exit(main())
