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
import io
import itertools
import json
import logging
import math
import operator
import os
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
import ssl
import stat
import struct
import subprocess
import sys
import tempfile
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
__all__ = ['Client', 'TorcError', 'main']

API_VERSION = '0.23.0'  # of Torc 1.0.0's HTTP contract, which this file speaks

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


class Exit(NamedTuple):
    """One exit code of the program."""
    code: int
    name: str
    meaning: str


EXITS = (
    Exit(0,   'done',        'done'),
    Exit(1,   'failed',      'ran, but jobs did not complete'),
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
    Variable('TORC_USERNAME',               'you',  'owner of new workflows; else USER'),
    Variable('XDG_STATE_HOME',              'you',  "where `serve` keeps torc/torc.db; else ~/.local/state"),
    Variable('NO_COLOR',                    'you',  'no colours on the terminal'),
    Variable('TORC_WORKFLOW_ID',            'torc', 'the workflow'),
    Variable('TORC_RUN_ID',                 'torc', 'its run generation'),
    Variable('TORC_JOB_ID',                 'torc', 'the job (not in run_commands actions)'),
    Variable('TORC_JOB_NAME',               'torc', 'its name (not in run_commands actions)'),
    Variable('TORC_ATTEMPT_ID',             'torc', 'its attempt, from 1 (not in run_commands actions)'),
    Variable('TORC_OUTPUT_DIR',             'torc', "the runner's output directory, absolute"),
    Variable('TORC_WORKFLOW_SUBMISSION_DIR', 'torc', 'directory in which the workflow was created'),
    Variable('TORC_RETURN_CODE',            'torc', "the failed attempt's return code (recovery scripts only)"),
    Variable('TORC_GPU_VISIBLE_DEVICES',    'torc', 'GPU indexes given to the job; CUDA_, HIP_ and ROCR_VISIBLE_DEVICES are the same'),
)

# ---- limits ----
MAX_LIST_ITEMS = 100000             # of one list answer, and of one bulk request
MAX_INSTANCES = 1000000             # that parameters may make; --max-instances lifts it
MAX_SPEC_BYTES = 2 ** 30            # of a workflow file: three million jobs spelled out
MAX_NAME_CHARACTERS = 1000          # of any name; files on disk are named by ids
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

MEMORY_UNITS = {'': 1, 'k': 1024, 'm': 1024 ** 2, 'g': 1024 ** 3, 't': 1024 ** 4}
MEMORY_TEXT = re.compile(r'\s*\+?([0-9]+)([kmgt]?)\s*\Z', re.IGNORECASE)
DURATION_TEXT = re.compile(
    r'P(?=.)(?:([0-9]+)W|(?:([0-9]+)Y)?(?:([0-9]+)M)?(?:([0-9]+)D)?(?:T(?:([0-9]+)H)?(?:([0-9]+)M)?(?:([0-9]+)(?:[.,][0-9]*)?S)?)?)\Z')
DURATION_UNITS_S = (604800, 31557600, 2629800, 86400, 3600, 60, 1)   # week, year, month, day, hour, minute, second, as Torc counts
WALLTIME_TEXT = re.compile(r'(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?\Z')
TIME_TEXT = re.compile(r'([0-9]{4})-([0-9]{2})-([0-9]{2})[Tt ]([0-9]{2}):([0-9]{2}):([0-9]{2})(\.[0-9]+)?(Z|z|[-+][0-9]{2}:?[0-9]{2})?\Z')
UNPRINTABLE = re.compile('[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]')

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
    """Seconds since the epoch -> '2026-11-21T09:28:54.436Z'."""
    whole, milliseconds = divmod(int(round(value_s * 1000)), 1000)
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


def parse_json(text: str) -> Any:
    """Strict JSON -> value. ValueError for what RFC 8259 forbids, duplicate keys, or nesting beyond the stack."""
    try:
        return json.loads(text, object_pairs_hook=unique_pairs, parse_constant=refuse_constant)
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


def open_new_private(path: str, flags: int) -> int:
    """Open a file of our own; if it is new, only the owner may read and write it, whatever the umask. The descriptor."""
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    os.fchmod(descriptor, 0o600)
    return descriptor


def write_atomically(path: str, data: bytes, mode: int = 0o600) -> None:
    """Put a file in place as a whole: readers see the old content or the new, never a part."""
    descriptor, temporary = tempfile.mkstemp(prefix='.' + os.path.basename(path), dir=os.path.dirname(os.path.abspath(path)))
    try:
        with os.fdopen(descriptor, 'wb') as file:
            os.fchmod(descriptor, mode)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


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


