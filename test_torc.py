#!/usr/bin/env python3
"""Tests of torc.py. `python3 test_torc.py` runs everything that this machine can run.

    python3 test_torc.py [-v] [PATTERN...]     tests whose 'Class.test' holds a pattern (* and ? as in file names)
    python3 test_torc.py --python PATH         on another interpreter
    python3 test_torc.py --require shared,python36    a skip of these groups is a failure
    python3 test_torc.py bench [--quick] [--python PATH]    measurements beside this machine's xargs and make
    python3 test_torc.py faults [--quick]      programs killed in the middle of their work
    python3 test_torc.py readme                writes the reference part of README.md anew

The last line is 'N passed, N failed, N skipped'. Standard library only, like torc.py itself. Real processes, real
SQLite, real sockets on port 0; waits are conditions with a deadline, never sleeps.

Sections have torc.py's numbers (grep '^# ==' test_torc.py):
    0. Harness
    1. Vocabulary
    3. Plain tools
    4. Formats
    5. Spec
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
Without a number: End to end, Faults, Laws, Bench, and what runs the tests.
"""

# ======== 0. Harness: a world of its own for every test ========
#
# A World is a directory that only one test knows, with a blank and a quote in its name, a private HOME, and a mark in
# the environment of all that is started from it. When it closes, nothing with this mark may be alive, and this
# process must have the descriptors, threads and children that it had before.
#
# A test whose need is not met here calls `need`, which skips it by the name of a group; --require GROUP makes that a failure.

import argparse
import ast
import atexit
import base64
import collections
import contextlib
import ctypes
import fnmatch
import functools
import gc
import glob
import hashlib
import http.client
import inspect
import io
import itertools
import json
import logging
import math
import operator
import os
import platform
import py_compile
import random
import re
import resource
import select
import shlex
import shutil
import signal
import socket
import sqlite3
import stat
import struct
import subprocess
import symtable
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import types
import unittest
import unittest.mock
import urllib.parse
import warnings
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

HERE = os.path.dirname(os.path.abspath(__file__))
SHARED = os.path.join(os.path.dirname(HERE), 'shared')
TORC = os.path.join(HERE, 'torc.py')
EXAMPLES = os.path.join(HERE, 'examples')
MARK = 'TORC_TEST_WORLD'    # environment variable that marks what a world has started
WORLD_NUMBERS = itertools.count(1)

sys.dont_write_bytecode = True      # the tree stays clean
sys.path.insert(0, HERE)

import torc  # noqa: E402: from the directory of this file, wherever it is run


def need(group: str, condition: Any, what: str) -> None:
    """Skip the test, by its group's name, unless the condition holds. `what` says what the machine would need."""
    if not condition:
        raise unittest.SkipTest(f'{group}: {what}')


def shared(path: str) -> str:
    """Path of a file of ../shared: recorded cases and real inputs that lie beside the clone."""
    full = os.path.join(SHARED, *path.split('/'))
    need('shared', os.path.exists(full), f'{full} is not here: lay the folder shared/ beside the clone')
    return full


def read_shared(path: str) -> Any:
    """Text of a file of ../shared, or its value if it is JSON."""
    with open(shared(path), encoding='utf-8') as file:
        return json.load(file) if path.endswith('.json') else file.read()


def read_text(path: str) -> str:
    """Content of a text file; '' if there is none."""
    try:
        with open(path, encoding='utf-8', errors='replace') as file:
            return file.read()
    except FileNotFoundError:
        return ''


def rows_of(text: str) -> List[Dict[str, str]]:
    """A truth table: an aligned text with a header line -> a dict a line. Two blanks or more end a cell; '-' is ''."""
    lines = [line.strip() for line in textwrap.dedent(text).splitlines() if line.strip() and not line.lstrip().startswith('#')]
    header, cells = re.split(r'\s{2,}', lines[0]), [re.split(r'\s{2,}', line) for line in lines[1:]]
    for line, row in zip(lines[1:], cells):
        assert len(row) == len(header), f'{len(header)} columns are wanted: {line!r}'
    return [{name: '' if cell == '-' else cell for name, cell in zip(header, row)} for row in cells]


def processes_with(mark: str) -> Dict[int, str]:
    """Live processes that carry a world's mark in their environment: pid -> command line (Linux; elsewhere none is seen)."""
    found = {}
    wanted = f'{MARK}={mark}\0'.encode()
    for pid in filter(str.isdigit, os.listdir('/proc') if os.path.isdir('/proc') else []):
        try:
            with open(f'/proc/{pid}/environ', 'rb') as file:
                environment = file.read() + b'\0'
            with open(f'/proc/{pid}/cmdline', 'rb') as file:
                command = file.read()
        except OSError:     # it ended, or is another user's
            continue
        if wanted in environment and int(pid) != os.getpid():
            found[int(pid)] = command.replace(b'\0', b' ').decode('utf-8', 'replace').strip()
    return found


def open_descriptors() -> Dict[str, str]:
    """This process's descriptors: number -> what it is."""
    found = {}
    for number in os.listdir('/proc/self/fd') if os.path.isdir('/proc/self/fd') else []:
        with contextlib.suppress(OSError):      # the one that listed the directory
            found[number] = os.readlink('/proc/self/fd/' + number)
    return found


def own_children() -> Set[int]:
    """Children of this process, the dead and unreaped ones too."""
    found = set()
    for path in glob.glob('/proc/self/task/*/children'):
        with contextlib.suppress(OSError), open(path) as file:
            found.update(map(int, file.read().split()))
    return found


@functools.lru_cache(None)
def stub_path() -> str:
    """A two-line program that imports torc.py, compiled beforehand: compiling it anew would be most of the time of most tests."""
    folder = tempfile.mkdtemp(prefix='torc stub ')
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.symlink(TORC, os.path.join(folder, 'torc.py'))
    py_compile.compile(os.path.join(folder, 'torc.py'), doraise=True)
    with open(os.path.join(folder, 'stub.py'), 'w') as file:
        file.write('import sys, torc\nsys.exit(torc.main())\n')
    return file.name


class Outcome(NamedTuple):
    """What a command left."""
    code: int
    out: str
    err: str

    def json(self) -> Any:
        """The one JSON document on stdout."""
        try:
            return json.loads(self.out)
        except ValueError:
            raise AssertionError(f'not JSON: {self}') from None

    def __str__(self) -> str:
        return f'exit {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}'


class Background:
    """A program that runs beside the test. Its output goes to two files, which can be read at any time."""

    def __init__(self, argv: Sequence[str], directory: str, environment: Dict[str, str], stem: str) -> None:
        self.argv, self.stem = list(argv), stem
        with open(stem + '.out', 'wb') as out, open(stem + '.err', 'wb') as err:
            self.process = subprocess.Popen(self.argv, cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        self.pid = self.process.pid

    @property
    def out(self) -> str:
        """stdout so far."""
        return read_text(self.stem + '.out')

    @property
    def err(self) -> str:
        """stderr so far."""
        return read_text(self.stem + '.err')

    def lines(self) -> List[str]:
        """Whole lines of stdout so far."""
        return self.out[:self.out.rfind('\n') + 1].splitlines()

    def has_ended(self) -> bool:
        """Whether the program is over."""
        return self.process.poll() is not None

    def send(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and reap."""
        if not self.has_ended():
            self.process.kill()
        self.process.wait()

    def finish(self, timeout: float = 60) -> Outcome:
        """Wait for its end."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f'{self} did not end within {timeout:g} s') from None
        return Outcome(code, self.out, self.err)

    def __str__(self) -> str:
        return f'{" ".join(self.argv[1:])} (pid {self.pid}, code {self.process.poll()})\n--- stdout\n{self.out}\n--- stderr\n{self.err}'


class World:
    """One test's directory, environment, commands and servers."""

    def __init__(self) -> None:
        self.mark = f'{os.getpid()}-{next(WORLD_NUMBERS)}'
        self.root = os.path.realpath(tempfile.mkdtemp(prefix="torc's test "))   # the blank and quote are meant
        self.directory = self.path()
        for name in ('work', 'home', 'logs'):
            os.mkdir(os.path.join(self.root, name))
        self.started = []       # type: List[Background]
        self.url = ''           # of the server that `serve` started
        self.before = open_descriptors(), set(threading.enumerate()), own_children()
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(('TORC_', 'SLURM_'))}
        self.environment.update({
            MARK: self.mark, 'HOME': os.path.join(self.root, 'home'), 'XDG_STATE_HOME': os.path.join(self.root, 'home', 'state'),
            'PYTHONDONTWRITEBYTECODE': '1', 'NO_COLOR': '1', 'LC_ALL': 'C.UTF-8', 'USER': 'tester'})

    # -------- files --------

    def path(self, *names: str) -> str:
        """Path in the world's working directory."""
        return os.path.join(self.root, 'work', *names)

    def write(self, name: str, text: Union[str, bytes]) -> str:
        """Write a file in the working directory and return its path."""
        path = self.path(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, 'wb') as file:
            file.write(text if isinstance(text, bytes) else textwrap.dedent(text).encode('utf-8', 'surrogatepass'))
        return path

    def read(self, name: str) -> str:
        """Content of a file in the working directory; '' if there is none."""
        return read_text(self.path(name))

    # -------- commands --------

    def cli(self, *argv: Any, stdin: Optional[str] = None, env: Optional[Dict[str, str]] = None, timeout: float = 60, python: str = '',
            cwd: Optional[str] = None) -> Outcome:
        """Run `torc.py ARGV` as a program, to its end (through stub_path)."""
        process = subprocess.Popen(
            [python or sys.executable, stub_path()] + [str(word) for word in argv], cwd=cwd or self.directory, env=dict(self.environment, **(env or {})),
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            encoding='utf-8', errors='replace')
        try:
            out, err = process.communicate(stdin, timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = self.drain(process)
            raise AssertionError(f'{argv} did not end within {timeout:g} s\n{Outcome(-9, out, err)}') from None
        return Outcome(process.returncode, out, err)

    @staticmethod
    def drain(process: Any) -> Tuple[str, str]:
        """What a killed program had said. A grandchild may still hold its pipes: wait no longer than a second."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=1)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream:
                stream.close()
        return '(its output is still held open)', ''

    def main(self, *argv: Any, env: Optional[Dict[str, str]] = None) -> Outcome:
        """Run `torc.main(ARGV)` in this process, in the world's directory and environment."""
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding='utf-8', errors='replace', write_through=True) for _ in range(2))
        with self.inside(env), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = torc.main([str(word) for word in argv])
        return Outcome(code, *(stream.buffer.getvalue().decode('utf-8', 'replace') for stream in (out, err)))

    @contextlib.contextmanager
    def inside(self, env: Optional[Dict[str, str]] = None) -> Iterator[None]:
        """This process in the world's directory and environment, for a while."""
        directory, environment = os.getcwd(), dict(os.environ)
        os.chdir(self.directory)
        os.environ.clear()
        os.environ.update(self.environment, **(env or {}))
        try:
            yield
        finally:
            os.chdir(directory)
            os.environ.clear()
            os.environ.update(environment)

    def start(self, *argv: Any, env: Optional[Dict[str, str]] = None, cwd: Optional[str] = None) -> Background:
        """Start `torc.py ARGV` beside the test."""
        stem = os.path.join(self.root, 'logs', str(len(self.started)))
        process = Background([sys.executable, stub_path()] + [str(word) for word in argv], cwd or self.directory, dict(self.environment, **(env or {})), stem)
        self.started.append(process)
        return process

    def serve(self, *flags: Any) -> str:
        """Start a lasting server on a free port; returns its URL as soon as it answers. self.server is its process."""
        self.server = self.start('serve', *(flags if '--port' in flags else ('--port', 0) + flags))
        found = self.wait(lambda: re.search(r'^torc: serving (http\S+)$', self.server.out, re.MULTILINE), 20, 'the server', [self.server])
        self.url = found.group(1)
        return self.url

    def connect(self, **how: Any) -> Any:
        """A torc.Client in the world's directory and environment. Close it."""
        with self.inside():
            return torc.Client.connect(**how)

    # -------- waiting --------

    def wait(self, condition: Callable[[], Any], deadline_s: float, what: str, alive: Sequence[Background] = (),
             state: Optional[Callable[[], Any]] = None) -> Any:
        """Wait until the condition is true, and return it. Fails at the deadline, or at once when a process that must be alive has ended."""
        end, pause_s = time.monotonic() + deadline_s, 0.002
        while True:
            value = condition()
            if value:
                return value
            dead = [process for process in alive if process.has_ended()]
            if not dead and time.monotonic() < end:
                select.select([], [], [], pause_s)
                pause_s = min(pause_s * 1.5, 0.1)
                continue
            value = condition()     # it may have come true between the two looks
            if value:
                return value
            last = '' if state is None else f'\nlast state: {state()}'
            told = '\n'.join(map(str, dead or alive or self.started))
            raise AssertionError(f'waited for {what}: ' + ('a process ended' if dead else f'not within {deadline_s:g} s') + f'{last}\n{told}')

    def leave(self, deadline_s: float = 15) -> Dict[int, str]:
        """Wait until no marked process is left; returns those that stay."""
        end, pause_s = time.monotonic() + deadline_s, 0.002
        while True:
            left = processes_with(self.mark)
            if not left or time.monotonic() > end:
                return left
            select.select([], [], [], pause_s)
            pause_s = min(pause_s * 1.5, 0.1)

    # -------- end --------

    def close(self) -> None:
        """End what was started here, then check that nothing is left."""
        for process in self.started:
            if not process.has_ended():
                process.send(signal.SIGTERM)
        for process in self.started:
            try:
                process.process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        left = self.leave()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.root, ignore_errors=True)
        gc.collect()
        descriptors, threads, children = self.before
        now = open_descriptors()
        problems = [f'process {pid} is left: {command}' for pid, command in left.items()]
        problems += [f'descriptor {number} is left: {what}' for number, what in now.items() if descriptors.get(number) != what]
        problems += [f'thread is left: {thread}' for thread in threading.enumerate() if thread not in threads]
        problems += [f'child is left: {pid}' for pid in own_children() - children]
        assert not problems, '\n'.join(problems)


class WorldTest(unittest.TestCase):
    """A test with a world of its own, in self.world."""
    maxDiff = None

    def setUp(self) -> None:
        self.world = World()
        self.addCleanup(self.world.close)

    def assertExit(self, code: int, outcome: Outcome, *texts: str) -> Outcome:
        """The command ended with this code, and said all this on stdout or stderr."""
        self.assertEqual(code, outcome.code, str(outcome))
        for text in texts:
            self.assertIn(text, outcome.out + outcome.err)
        self.assertNotIn('Traceback', outcome.err)
        return outcome


# ======== 1. Vocabulary ========

class VocabularyTest(unittest.TestCase):
    """The tables agree with themselves."""

    def test_statuses_are_what_they_were_when_databases_were_written(self):
        table = rows_of('''
            code  name            final  finished  bad  done  active
            0     uninitialized   -      -         -    -     -
            1     blocked         -      -         -    -     -
            2     ready           -      -         -    -     -
            3     pending         -      -         -    -     yes
            4     running         -      -         -    -     yes
            5     completed       yes    yes       -    yes   -
            6     failed          yes    yes       yes  yes   -
            7     canceled        yes    yes       yes  yes   -
            8     terminated      yes    yes       yes  yes   -
            9     disabled        -      yes       -    yes   -
            10    pending_failed  yes    -         -    -     -
            ''')
        self.assertEqual(len(table), len(torc.STATUSES))
        for wanted, row in zip(table, torc.STATUSES):
            flags = (row.is_final, row.is_finished, row.is_bad, row.is_done, row.is_active)
            self.assertEqual(wanted, dict(zip(wanted, [str(row.code), row.name] + ['yes' if flag else '' for flag in flags])))

    def test_each_status_has_a_symbol_of_its_own(self):
        self.assertEqual(len(torc.STATUSES), len({row.symbol for row in torc.STATUSES}))

    def test_exits_of_errors_stand_in_the_table(self):
        codes = {row.code for row in torc.EXITS}
        kinds = [torc.TorcError, torc.BadInput, torc.Refused, torc.NotFound, torc.Conflict, torc.Denied, torc.Unreachable]
        self.assertLessEqual({kind.exit for kind in kinds}, codes)


# ======== 3. Plain tools ========

class PlainToolsTest(unittest.TestCase):
    """Text and value, there and back."""

    def check(self, parse: Callable[[str], Any], table: str) -> None:
        """Rows of text and value; 'error' where the text is refused."""
        for row in rows_of(table):
            with self.subTest(row['text']):
                if row['value'] == 'error':
                    self.assertRaises(ValueError, parse, row['text'])
                else:
                    self.assertEqual(float(row['value']), parse(row['text']))

    def test_memory(self):
        self.check(torc.parse_memory, '''
            text    value
            0       0
            512     512
            1k      1024
            512m    536870912
            2G      2147483648
            1t      1099511627776
            +3k     3072
            1.5g    error
            4GB     error
            4 g     error
            -1      error
            m       error
            -       error
            9223372036854775808   error
            ''')
        self.assertEqual(['0B', '1023B', '1.0KB', '512.0MB', '1.5GB', '2.0TB'], [
            torc.format_memory(size) for size in (0, 1023, 1024, 512 * 1024 ** 2, 1.5 * 1024 ** 3, 2 * 1024 ** 4)])

    def test_durations(self):
        self.check(torc.parse_duration, '''
            text        value
            PT30S       30
            PT1M        60
            P0DT1M      60
            PT1H30M     5400
            P1DT12H     129600
            P2W         1209600
            P1Y         31557600
            P1M         2629800
            PT          0
            PT1.5S      1
            P           error
            1h          error
            PT1H30      error
            P1H         error
            PT-1S       error
            -           error
            ''')
        for seconds in (0, 1, 59, 60, 3600, 3661, 86400, 90061, 10 ** 7):
            self.assertEqual(seconds, torc.parse_duration(torc.format_duration(seconds)))

    def test_walltimes_are_slurms(self):
        self.check(torc.parse_walltime, '''
            text         value
            5            300
            5:30         330
            01:00:00     3600
            1-0          86400
            1-12         129600
            1-12:30      131400
            1-12:30:15   131415
            1:2:3:4      error
            1h           error
            -            error
            ''')

    def test_times(self):
        self.check(torc.parse_time, '''
            text                             value
            1970-01-01T00:00:00Z             0
            2026-11-21T09:28:54.436Z         1795253334.436
            2026-11-21T10:28:54.436+01:00    1795253334.436
            2026-11-21 04:28:54.436-0500     1795253334.436
            2026-02-30T00:00:00Z             error
            2026-11-21                       error
            yesterday                        error
            ''')
        self.assertEqual('2026-11-21T09:28:54.436Z', torc.format_time(1795253334.436))
        self.assertEqual(1795253334.999, torc.parse_time(torc.format_time(1795253334.999)))

    def test_elapsed_times_for_people(self):
        self.assertEqual(['5s', '3m 07s', '2h 05m', '1d 03h'], [torc.format_elapsed(seconds) for seconds in (5.9, 187, 7500, 97200)])

    def test_text_that_would_act_on_a_terminal_is_made_visible(self):
        self.assertEqual('a\\x1b[31mb\\x07 \\u202e \\ud800 ü', torc.printable('a\x1b[31mb\x07 \u202e \ud800 ü'))
        self.assertEqual('tab\tand\nline', torc.printable('tab\tand\nline'))

    def test_json_is_strict(self):
        self.assertEqual({'a': [1, 2.5, None, True, 'x']}, torc.parse_json('{"a": [1, 2.5, null, true, "x"]}'))
        for text in ('{"a": 1, "a": 2}', 'NaN', '[Infinity]', '{a: 1}', '[1,]', '', '[' * 100000):
            self.assertRaises(ValueError, torc.parse_json, text)
        self.assertRaises(ValueError, torc.format_json, float('nan'))

    def test_a_mistyped_word_gets_its_neighbour(self):
        self.assertEqual(", did you mean 'command'?", torc.did_you_mean('comand', ['command', 'name']))
        self.assertEqual('', torc.did_you_mean('zzz', ['command', 'name']))

    def test_another_program_answers_or_its_absence_does(self):
        self.assertEqual((3, 'out', 'err'), tuple(torc.ask(['sh', '-c', 'printf out; printf err >&2; exit 3'])))
        self.assertEqual(143, torc.ask(['sh', '-c', 'kill -TERM $$']).code)
        self.assertEqual(127, torc.ask(['no_such_program_here']).code)
        self.assertEqual(124, torc.ask(['sh', '-c', 'exec sleep 60'], 0.05).code)

    def test_a_process_is_known_by_its_start(self):
        self.assertGreater(torc.read_process_start_ticks(os.getpid()), 0)
        child = subprocess.Popen(['true'])
        child.wait()
        self.assertEqual(0, torc.read_process_start_ticks(child.pid))


class AtomicWriteTest(WorldTest):
    """Files that are there as a whole or not at all."""

    def test_a_file_is_replaced_as_a_whole_and_private(self):
        path = self.world.write('state', 'old')
        torc.write_atomically(path, b'new')
        self.assertEqual('new', self.world.read('state'))
        self.assertEqual(0o600, stat.S_IMODE(os.stat(path).st_mode))
        self.assertEqual(['state'], os.listdir(self.world.directory))

    def test_a_failure_leaves_the_old_file_and_no_other(self):
        path = self.world.write('state', 'old')
        self.assertRaises(TypeError, torc.write_atomically, path, 'not bytes')
        self.assertEqual('old', self.world.read('state'))
        self.assertEqual(['state'], os.listdir(self.world.directory))

    def test_a_private_directory_is_private_and_an_existing_one_is_left_alone(self):
        path = self.world.path('a', 'b')
        torc.make_private_directory(path)
        self.assertEqual(0o700, stat.S_IMODE(os.stat(path).st_mode))
        os.chmod(path, 0o755)
        torc.make_private_directory(path)
        self.assertEqual(0o755, stat.S_IMODE(os.stat(path).st_mode))


# ======== 4. Formats ========

def plain_keys(value: Any) -> Any:
    """A YAML value as JSON would hold it: keys are text."""
    if isinstance(value, list):
        return [plain_keys(child) for child in value]
    if not isinstance(value, dict):
        return value
    words = {None: 'null', True: 'true', False: 'false'}
    return {words[key] if key is None or isinstance(key, bool) else str(key): plain_keys(child) for key, child in value.items()}


def is_same(one: Any, other: Any) -> bool:
    """Equal in value and in kind: 1 is 1.0, but neither is true or '1'."""
    if isinstance(one, dict) and isinstance(other, dict):
        return set(one) == set(other) and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    kinds = [bool if isinstance(value, bool) else float if isinstance(value, (int, float)) else type(value) for value in (one, other)]
    return kinds[0] is kinds[1] and one == other


def format_kdl(nodes: Sequence[Any], indent: str = '') -> str:
    """KDL nodes in the canonical form of KDL's test suite."""
    lines = []
    for node in nodes:
        words = [format_kdl_type(node.types.get('')) + format_kdl_text(node.name)]
        words += [format_kdl_value(value, node.types.get(number)) for number, value in enumerate(node.args)]
        words += [format_kdl_text(name) + '=' + format_kdl_value(node.props[name], node.types.get(name)) for name in sorted(node.props)]
        block = [' {\n', format_kdl(node.children, indent + '    '), indent, '}'] if node.children else []
        lines.append(indent + ' '.join(words) + ''.join(block) + '\n')
    return ''.join(lines)


def format_kdl_type(kind: Optional[str]) -> str:
    """'(type)' or ''."""
    return '' if kind is None else f'({format_kdl_text(kind)})'


def format_kdl_value(value: Any, kind: Optional[str]) -> str:
    """A KDL value; a fraction as it was written, but for the sign and case of its exponent."""
    if isinstance(value, str):
        word = format_kdl_text(value)
    elif value is None or isinstance(value, bool):
        word = {None: '#null', True: '#true', False: '#false'}[value]
    elif isinstance(value, int):
        word = str(int(value))
    else:
        raw = getattr(value, 'raw', '') or repr(value)
        word = re.sub('E(?=[0-9])', 'E+', raw.replace('_', '').upper()) if raw[-1] not in 'fn' else '#' + raw
    return format_kdl_type(kind) + word


def format_kdl_text(text: str) -> str:
    """A bare word where KDL allows one, else quoted."""
    try:
        if text[:1] not in ('', '"', '#') and torc.KdlReader(text, False).read_text(0) == (text, len(text)):
            return text
    except torc.BadInput:
        pass    # looks like a number or keyword: quotes
    escapes = {'\\': '\\\\', '"': '\\"', '\n': '\\n', '\r': '\\r', '\t': '\\t', '\b': '\\b', '\f': '\\f'}
    return '"' + ''.join(escapes.get(character, character) for character in text) + '"'


class FormatsTest(unittest.TestCase):
    """Text -> values. A text gives what its specification says, or one BadInput with place and cure."""

    def problem(self, text: Union[str, bytes], path: str = 'w.yaml') -> Any:
        """The only problem of a bad file."""
        with self.assertRaises(torc.BadInput) as caught:
            torc.read_document(text if isinstance(text, bytes) else text.encode(), path)
        self.assertEqual(len(caught.exception.problems), 1)
        return caught.exception.problems[0]

    def value(self, text: str, path: str = 'w.yaml') -> Any:
        """The value of a good file."""
        return torc.read_document(text.encode(), path).value

    # -------- conformance --------

    def test_the_yaml_test_suite_has_no_misreading(self):
        exact = rejected = 0
        for case in read_shared('suites/yaml-test-suite.json'):
            try:
                value = plain_keys(torc.parse_yaml_documents(case['yaml']))
            except torc.BadInput:
                rejected += case['error']
                continue
            self.assertFalse(case['error'], case['id'])
            if 'json' in case:
                self.assertTrue(is_same(value, case['json']), (case['id'], value, case['json']))
                exact += 1
        self.assertGreaterEqual(exact, 255)
        self.assertEqual(rejected, 94)

    def test_json5_tests_pass_but_for_duplicate_keys(self):
        for case in read_shared('suites/json5-tests.json'):
            with self.subTest(case['name']):
                if case['valid'] and case['name'] != 'objects/duplicate-keys.json':
                    torc.parse_json5(case['text'])
                else:
                    self.assertRaises(torc.BadInput, torc.parse_json5, case['text'])

    def test_the_json_test_suite_passes_but_for_duplicate_keys(self):
        for case in read_shared('suites/json-test-suite.json'):
            text = case.get('text')
            if text is None:
                text = case['repeat'][0] * case['repeat'][1]
            data = base64.b64decode(text['b64']) if isinstance(text, dict) else text.encode('utf-8', 'surrogatepass')
            with self.subTest(case['name']):
                try:
                    torc.read_document(data, 'x.json')
                    self.assertNotEqual(case['expect'], 'n')
                except torc.BadInput:
                    self.assertTrue(case['expect'] != 'y' or 'duplicated_key' in case['name'])

    def test_the_kdl_test_suite_passes_in_strict_mode(self):
        for case in read_shared('suites/kdl-v2.json'):
            with self.subTest(case['name']):
                if case['expected'] is None:
                    self.assertRaises(torc.BadInput, torc.parse_kdl, case['text'], False)
                else:
                    self.assertEqual(format_kdl(torc.parse_kdl(case['text'], False)).strip(), case['expected'].strip())

    def test_real_workflow_files_give_their_recorded_values_and_places(self):
        names = [name for name in os.listdir(shared('specs')) if name.endswith('.expected.json')]
        self.assertGreater(len(names), 40)
        for name in names:
            source = shared('specs/' + name[:-len('.expected.json')])
            with self.subTest(name), open(source, 'rb') as file:
                document = torc.read_document(file.read(), source)
                self.assertTrue(is_same(document.value, read_shared('specs/' + name)))
                self.check_places(document, document.value)

    def check_places(self, document: Any, value: Any) -> None:
        """Every key of a value stands where the document says."""
        self.assertNotEqual(document.place(value), (0, 0))
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            line, column = document.place(value, key)
            if isinstance(key, str):
                self.assertIn(key, document.text.split('\n')[line - 1][column - 1:column + len(key) + 1])
            if isinstance(child, (dict, list)):
                self.check_places(document, child)

    def test_one_workflow_in_yaml_json_json5_and_kdl_is_one_value(self):
        values = [self.value(text, 'w.' + format) for format, text in SAME_WORKFLOW.items()]
        for value in values[1:]:
            self.assertTrue(is_same(value, values[0]), value)

    # -------- values --------

    def test_yaml_scalars_follow_the_core_schema_of_yaml_1_2(self):
        table = {'1:10': '1:10', 'no': 'no', 'on': 'on', 'true': True, '~': None, '': None, '2024-01-02': '2024-01-02', '1_000': '1_000', '0b11': '0b11',
                 '0o17': 15, '0x1F': 31, '1e-3': 0.001, '+5': 5, '.5': 0.5, '1.': 1.0, 'x#y': 'x#y', 'x # y': 'x', 'a:b': 'a:b', 'job_{i:03d}': 'job_{i:03d}',
                 'b\xa0': 'b\xa0', '"1"': '1', "'it''s'": "it's", '!!str 1.10': '1.10', '!!float 1': 1.0, '>-\n  a\n  b': 'a b', '|\n  #!/bin/sh\n\n  x': '#!/bin/sh\n\nx\n'}
        for text, wanted in table.items():
            with self.subTest(text):
                self.assertTrue(is_same(torc.parse_yaml(f'a: {text}\n'), {'a': wanted}))

    def test_numbers_keep_their_source_text_where_str_would_change_it(self):
        for path, text in (('w.yaml', 'v: [1.10, 012, 0x1F, 1, 1.5]'), ('w.json5', '{v: [1.10, 0x1f, +5, 1, .5]}'), ('w.kdl', 'metadata { v 1.10 1_000 1; }')):
            values = self.value(text, path).get('v') or self.value(text, path)['metadata']['v']
            written = re.findall(r'[-+.\w]+', text.split('v', 1)[1])
            self.assertEqual([getattr(value, 'raw', str(value)) for value in values], written)
            self.assertFalse(hasattr(values[-2 if path == 'w.yaml' else values.index(1)], 'raw'))

    def test_aliases_and_merge_keys_are_resolved(self):
        value = self.value('base: &b {cpus: 1, mem: 2g}\nx:\n  <<: *b\n  mem: 4g\ny: *b\n"<<": kept\n')
        self.assertEqual(value, {'base': {'cpus': 1, 'mem': '2g'}, 'x': {'mem': '4g', 'cpus': 1}, 'y': {'cpus': 1, 'mem': '2g'}, '<<': 'kept'})

    def test_line_ends_and_byte_order_marks_do_not_matter(self):
        for path, text in (('w.yaml', 'a: 1\nb: |\n  x\n  y\n'), ('w.json', '{"a": 1,\n"b": "x\\ny\\n"}'), ('w.json5', '{a: 1,\nb: "x\\ny\\n"}')):
            for changed in (text, text.replace('\n', '\r\n'), '\ufeff' + text):
                self.assertEqual(self.value(changed, path), {'a': 1, 'b': 'x\ny\n'})

    def test_places_survive_merges_tables_and_plain_json(self):
        document = torc.read_document(b'a: &a {x: 1}\nb:\n  <<: *a\n  y: 2\n', 'w.yaml')
        self.assertEqual([document.place(document.value['b'], key) for key in ('y', 'x', 'none')], [(4, 3), (3, 3), (3, 3)])
        document = torc.read_document(b'{"a": [1,\n  {"b": 2}]}', 'w.json')
        self.assertEqual(document.place(document.value['a'][1], 'b'), (2, 4))
        self.assertEqual(document.place({}, 'b'), (0, 0))

    def test_the_format_of_an_unnamed_file_is_found(self):
        for text in ('{"name": "a"}', '{name: "a",}', 'name: a\n', 'name "a"; job "b"'):
            self.assertEqual(self.value(text, 'spec')['name'], 'a')
        self.assertIn("as KDL: 'command' takes one value", self.problem('name "a"\njob "b" {\n command\n}', 'spec').message)

    def test_toml_is_read_where_python_can(self):
        if torc.tomllib is None:
            self.assertIn('TOML needs Python 3.11', self.problem('a = 1', 'w.toml').message)
        else:
            self.assertEqual(self.value('day = 2024-01-01\nv = 1.10\n[a]\nb = [1]', 'w.toml'), {'day': '2024-01-01', 'v': 1.1, 'a': {'b': [1]}})
            self.assertEqual(self.problem('a = 1\nb = = 2', 'w.toml')[1:3], (2, 5))
            self.assertRaises(torc.BadInput, torc.parse_toml, 'a = ' + '[' * 5000)

    # -------- errors --------

    def test_every_mistake_gets_place_and_cure(self):
        for path, text, line, column, message in MISTAKES:
            with self.subTest(text):
                problem = self.problem(text, path)
                self.assertEqual((problem.line, problem.column, problem.path), (line, column, path))
                self.assertIn(message, problem.message)

    def test_a_message_shows_the_line_with_a_caret(self):
        self.assertEqual(str(self.problem('name: a\ncommand: echo\tx: y\n')), 'w.yaml:2:16: a mapping value is not allowed here: put a text that '
                         "contains ': ' in quotes, or check the indentation\n    command: echo x: y\n                   ^")

    def test_hostile_input_is_refused_in_linear_time(self):
        many = 20000
        laughs = 'a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n' + ''.join(f'a{i}: &a{i} [{",".join(["*a%d" % (i - 1)] * 10)}]\n' for i in range(1, 30))
        tower = 'a0: &a0 x\n' + ''.join(f'a{i}: &a{i} {"[" * 40}*a{i - 1}{"]" * 40}\n' for i in range(1, 60))
        texts = [unit * many for unit in ('[', '{', '{a: ', '- ', '? ', '-', ':', ': ', '&a ', '*', '! ', '...\n', '%a\n', '"a\n', "- 'a\n", '/*', '\\\n', 'a {', '/-', '(',
                                          '[ #a\n', '{a,', '//\n', '\r', '\t', 'a:b ', 'a: b ', 'a: b\n', 'a;', 'b=')]
        texts += [start + unit * many for start, unit in (('a: 1', '\n'), ('a: 1', ' '), ('a: "', '\\"'), ("a: '", "''"), ('a: ', '9'), ('{"a": ', '9'), ('a: 1.', '0'),
                                                         ('{a: 0x', 'f'), ('a: |\n', '  x\n'), ('a: >\n', '  x\n\n'), ('a """\n', '\\"'), ('a ', '#'), ('a #"""', '"'), ('a ', '\\'))]
        texts += [laughs, tower, ''.join(' ' * i + 'a:\n' for i in range(500)), 'a: 1' + ' ' * many + 'b', '"' * many]
        for format in ('yaml', 'json5', 'kdl'):
            for text in texts:
                started = time.process_time()
                try:
                    torc.read_document(text.encode(), 'w', format)
                except torc.BadInput as error:
                    self.assertLess(len(error.message), 1000)
                self.assertLess(time.process_time() - started, 4, (format, text[:30]))
        self.assertIn('the aliases stand for more than', self.problem(laughs).message)
        self.assertIn('nested more than 100', self.problem(tower).message)

    def test_what_is_no_text_is_refused_by_name(self):
        for data, message in ((b'', 'the file is empty'), (b' \n ', 'the file is empty'), (b'# c\n', 'holds no value'), (b'\x7fELF\0\1', 'binary file'),
                              ('a: 1'.encode('utf-16'), 'UTF-16'), (b'a: 1\nb: \xc3\xa9\xff', '0xff is not UTF-8'), (b'a: \x01', "'\\x01' is not allowed")):
            self.assertIn(message, self.problem(data).message)
        self.assertEqual(self.problem(b'a: 1\nb: \xc3\xa9\xff')[1:3], (2, 5))

    def test_broken_copies_of_real_files_raise_nothing_but_bad_input(self):
        random.seed(4)
        for name in ('sample_workflow.yaml', 'sample_workflow.kdl', 'hyperparameter_sweep.json5', 'failure_handler_simulation.json'):
            text = read_text(shared('specs/' + name))
            for _ in range(150):
                at, length = random.randrange(len(text)), random.randrange(6)
                broken = text[:at] + random.choice(['', '"', "'", '{', '}', '[', ']', ':', ': ', '\n', '\t', '#', '\\', '&a ', '*a', '- ', '|', '\u2028']) + text[at + length:]
                try:
                    torc.read_document(broken.encode(), name)
                except torc.BadInput as error:
                    self.assertGreater(error.problems[0].line, 0)

    # -------- kdl workflows --------

    def test_kdl_aliases_repeated_nodes_and_many_values_add_up(self):
        job = self.value('job a { depends_on x y; depends_on_job z; blocked_by v; blocked_by_job w; input_files f g; input_file h; output_file o; label gpu }', 'w.kdl')['jobs'][0]
        self.assertEqual(job, {'name': 'a', 'depends_on': ['x', 'y', 'z', 'v', 'w'], 'input_files': ['f', 'g', 'h'], 'output_files': ['o'], 'labels': ['gpu']})

    def test_kdl_can_say_what_torc_s_own_reader_cannot(self):
        value = self.value(KDL_EXTRAS, 'w.kdl')
        self.assertEqual(value['metadata'], {'a': 1, 'b': {'c': [2, 3]}})
        self.assertEqual(value['jobs'], [{'name': 'j', 'priority': 5, 'output_file_regexes': ['o.*'], 'stdio': {'mode': 'none'}, 'parameters': {'i': [1, 2]}}])
        self.assertEqual(value['user_data'], [{'name': 'u', 'data': {'x': [1]}, 'parameters': {'i': '1:3'}}])
        self.assertEqual(value['execution_config'], {'staggered_start': False, 'job_stdio_overrides': {'my job': {'mode': 'none'}}})
        self.assertEqual((value['access_groups'], value['enable_ro_crate'], value['dynamic_jobs']), (['g', 'h'], True, {'max_iterations': 3}))


SAME_WORKFLOW = {
    'yaml': 'name: w\nfiles:\n  - {name: f, path: f.txt}\njobs:\n  - name: a\n    command: |-\n      echo "1"\n      echo 2\n    output_files: [f]\n'
            '  - name: b\n    command: cat\n    depends_on:\n    - a\n    priority: 3\n    parameters: {i: "1:3"}\nuse_pending_failed: true\n',
    'json': '{"name": "w", "files": [{"name": "f", "path": "f.txt"}], "jobs": [{"name": "a", "command": "echo \\"1\\"\\necho 2", "output_files": ["f"]}, '
            '{"name": "b", "command": "cat", "depends_on": ["a"], "priority": 3, "parameters": {"i": "1:3"}}], "use_pending_failed": true}',
    'json5': "{name: 'w', files: [{name: 'f', path: 'f.txt'},], // comment\njobs: [{name: 'a', command: 'echo \"1\"\\necho 2', output_files: ['f']}, "
             "{name: 'b', command: 'cat', depends_on: ['a'], priority: +3, parameters: {i: '1:3'}}], use_pending_failed: true}",
    'kdl': 'name w\nfile f path="f.txt"\njob "a" {\n    command """\n        echo "1"\n        echo 2\n        """\n    output_file f\n}\n'
           'job "b" command=cat { depends_on a; priority 3; parameters { i "1:3"; }; }\nuse_pending_failed #true\n',
}

KDL_EXTRAS = '''
project "p"; metadata { a 1; b { c 2 3; }; }; access_groups "g" "h"; enable_ro_crate true; dynamic_jobs { max_iterations 3; }
user_data "u" { data "{\\"x\\": [1]}"; parameters { i "1:3"; }; }
job "j" { priority 5; output_file_regexes "o.*"; stdio { mode "none"; }; parameters { i 1 2; }; }
execution_config { staggered_start #false; job_stdio_overrides { "my job" { mode "none"; }; }; }
'''

MISTAKES = (
    # file      text                            line, column, part of the message
    ('w.yaml',  'a: {i}_x\n',                   1, 4, 'text that starts with { must be in quotes'),
    ('w.yaml',  'a: *.txt\n',                   1, 4, 'put text that starts with * in quotes'),
    ('w.yaml',  "a: 'it's'\n",                  1, 8, "write '' for a quote inside single quotes"),
    ('w.yaml',  'a: "x" y\n',                   1, 8, 'write \\" for a quote inside double quotes'),
    ('w.yaml',  'a: 1\nb:2\n',                  2, 1, 'a blank is missing after the colon'),
    ('w.yaml',  'a: {a:b}\n',                   1, 5, 'a blank is missing after the colon'),
    ('w.yaml',  'a: [model_{i}]\n',             1, 11, "'{' inside a [list] must be in quotes"),
    ('w.yaml',  'a: echo a: b\n',               1, 10, "put a text that contains ': ' in quotes"),
    ('w.yaml',  'a: "\\d+"\n',                  1, 5, 'write \\\\ for a backslash, or use single quotes'),
    ('w.yaml',  'a:\n\tb: 1\n',                 2, 1, 'use spaces'),
    ('w.yaml',  'a: @x\n',                      1, 4, 'text that starts with @ must be in quotes'),
    ('w.yaml',  'a: 1\r\nb: 2\r\na: 3\r\n',     3, 1, "duplicate key 'a'"),
    ('w.yaml',  'a: {b: 1, b: 2}\n',            1, 11, "duplicate key 'b'"),
    ('w.yaml',  'a: !foo b\n',                  1, 4, 'the tag !foo is not supported'),
    ('w.yaml',  'a: b\n- c\n',                  2, 1, 'cannot follow a mapping entry'),
    ('w.yaml',  'a: [1, 2\nb: 3\n',             2, 1, 'is a bracket missing?'),
    ('w.yaml',  'a: "x\nb: 3\n',                1, 4, 'text in quotes is not closed'),
    ('w.yaml',  'a: 1\n---\nb: 2\n',            2, 4, '2 YAML documents'),
    ('w.yaml',  'a: "\\ud800"\n',               1, 4, 'half of a surrogate pair'),
    ('w.yaml',  'a: &a 1\nb: [!!str *a]\n',    2, 11, 'an alias has a name, but no anchor or tag'),
    ('w.yaml',  'a: !!int "' + '9' * 2000 + '"\n', 1, 4, 'is too long'),
    ('w.yaml',  '<<: 5\n',                      1, 1, "'<<' needs a mapping"),
    ('w.json',  '{a: 1}',                       1, 2, 'name the file .json5'),
    ('w.json',  '{"a": 1,\n "a": 2}',           2, 2, "duplicate key 'a'"),
    ('w.json',  '{"a": 1e999}',                 1, 7, 'too large'),
    ('w.json',  '{"a": "\\ud800"}',             1, 7, 'half of a surrogate pair'),
    ('w.json',  '{"a": [1 2]}',                 1, 10, "expected ',' or ']'"),
    ('w.json5', '{a: text}',                    1, 5, 'text must be in quotes'),
    ('w.json5', '{a: 1 /* x',                   1, 7, 'the comment is not closed'),
    ('w.kdl',   'name "x"\njobb "a"\n',         2, 1, "did you mean 'job'?"),
    ('w.kdl',   'job "a" {\n depends_onn b\n}', 2, 2, "did you mean 'depends_on'?"),
    ('w.kdl',   'job "a" "b"\n',                1, 9, 'takes only its name'),
    ('w.kdl',   'job "a" path="x"\n',           1, 9, "'path' is not known in a job"),
    ('w.kdl',   'name "a"\nname "b"\n',         2, 1, "'name' stands twice"),
    ('w.kdl',   'name 1 2\n',                   1, 8, 'takes one value'),
    ('w.kdl',   'name (u8)5\n',                 1, 1, 'a type such as (u8) has no meaning here'),
    ('w.kdl',   'user_data "a" { data "{x"; }', 1, 22, 'must hold JSON'),
    ('w.kdl',   'job "a" {\n',                  1, 10, "'}' is missing"),
    ('w.kdl',   'job "a" { labels; }',          1, 11, "'labels' needs a value"),
    ('w.kdl',   'name "a\\d"',                  1, 8, 'unknown escape \\d'),
)


# ======== Main: choosing, running and counting ========
#
# One test after another, in the order of the file. A skip is counted by its group, and the last line is the sum.


class Score(unittest.TestResult):
    """Outcomes as they come: a letter for each that did not pass (a line for each with -v); failures in full at the end."""

    def __init__(self, required: Iterable[str], is_verbose: bool) -> None:
        super().__init__()
        self.required = set(required)
        self.is_verbose = is_verbose
        self.passed = self.skips = 0
        self.groups = collections.OrderedDict()     # type: Dict[str, Set[str]]
        self.times = []                             # type: List[Tuple[float, str]]

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.begun, self.word = time.monotonic(), 'ok'

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        took_s = time.monotonic() - self.begun
        self.times.append((took_s, title_of(test)))
        self.passed += self.word == 'ok'
        self.skips += self.word == 'skipped'
        if self.is_verbose:
            print(f'{self.word:8}{took_s:7.2f} s  {title_of(test)}', flush=True)
        elif self.word != 'ok':
            print(self.word[0], end='', flush=True)

    def addError(self, test: unittest.TestCase, error: Any) -> None:
        super().addError(test, error)
        self.word = 'FAILED'

    def addFailure(self, test: unittest.TestCase, error: Any) -> None:
        super().addFailure(test, error)
        self.word = 'FAILED'

    def addSubTest(self, test: unittest.TestCase, subtest: Any, error: Any) -> None:
        super().addSubTest(test, subtest, error)
        if error is not None:
            self.word = 'FAILED'

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        group, _, what = reason.partition(': ')
        if group in self.required:
            self.failures.append((test, f'the group {group!r} is required here: {what}'))
            self.word = 'FAILED'
            return
        self.groups.setdefault(group, set()).add(what)
        self.word = 'skipped' if getattr(self, 'word', 'ok') == 'ok' else self.word
        if not isinstance(test, unittest.TestCase):     # a whole class, told by setUpClass
            self.skips += 1

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self.failures.append((test, 'was expected to fail'))
        self.word = 'FAILED'

    def failed_tests(self) -> Dict[str, List[str]]:
        """Title of each failed test -> what it said, part by part."""
        found = collections.OrderedDict()   # type: Dict[str, List[str]]
        for test, text in self.failures + self.errors:
            case = getattr(test, 'test_case', test)     # a subtest counts with its test
            found.setdefault(title_of(case), []).append(text if case is test else f'{test._subDescription()}\n{text}')
        return found


def title_of(test: Any) -> str:
    """'Class.test_name', or what unittest calls a class that could not be set up."""
    return '.'.join(test.id().split('.')[-2:])


def chosen_tests(patterns: Sequence[str]) -> List[unittest.TestSuite]:
    """All tests of this file in its order, or those whose title holds one of the patterns."""
    loader, found = unittest.TestLoader(), []
    for case in {value for value in globals().values() if isinstance(value, type) and issubclass(value, unittest.TestCase)}:
        names = sorted(loader.getTestCaseNames(case), key=lambda name: line_of(case, name))
        chosen = [name for name in names if not patterns or any(
            fnmatch.fnmatchcase(f'{case.__name__}.{name}'.lower(), f'*{pattern.lower()}*') for pattern in patterns)]
        if chosen:
            found.append((line_of(case, names[0]), unittest.TestSuite(map(case, chosen))))
    return [suite for _, suite in sorted(found, key=operator.itemgetter(0))]


def line_of(case: type, name: str) -> int:
    """Where a test begins."""
    return inspect.unwrap(getattr(case, name)).__code__.co_firstlineno


def run_tests(patterns: Sequence[str], required: Sequence[str], is_verbose: bool) -> int:
    """Run, report, count. 1 if anything failed."""
    warnings.simplefilter('error', ResourceWarning)
    begun = time.monotonic()
    score = Score(required, is_verbose)
    unittest.TestSuite(chosen_tests(patterns)).run(score)
    failed = score.failed_tests()
    print()
    for title, texts in failed.items():
        print('=' * 100, f'FAILED {title}', *texts, sep='\n')
    if is_verbose:
        print('slowest:', *(f'{took:7.2f} s  {title}' for took, title in sorted(score.times, reverse=True)[:15]), sep='\n')
    for title in failed:
        print('FAILED', title)
    for group, reasons in score.groups.items():
        print(f'skipped, group {group}: {"; ".join(sorted(reasons))}')
    print(f'Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, {time.monotonic() - begun:.1f} s')
    print(f'{score.passed} passed, {len(failed)} failed, {score.skips} skipped', flush=True)
    if not score.testsRun and not failed:
        print('no test has a name like that', file=sys.stderr)
    return 1 if failed or not score.testsRun else 0


def main(argv: Sequence[str]) -> int:
    """The door: a subcommand, or the names of tests."""
    parser = argparse.ArgumentParser(description='Tests, measurements and fault injection of torc.py.')
    parser.add_argument('patterns', nargs='*', help="tests to run, or one of: bench, faults, readme")
    parser.add_argument('-v', '--verbose', action='store_true', help='a line per test, and the slowest ones')
    parser.add_argument('--require', default='', metavar='GROUP,...', help='groups whose skip is a failure')
    parser.add_argument('--python', metavar='PATH', help='another interpreter (bench: beside this one)')
    parser.add_argument('--quick', action='store_true', help='bench, faults: small sizes')
    parser.add_argument('--seed', type=int, help='faults: the moments of the kills')
    options = parser.parse_args(argv)
    if options.patterns[:1] == ['bench']:
        return run_bench([sys.executable] + ([options.python] if options.python else []), options.quick, options.patterns[1:])
    if options.python:
        words = [word for word in argv if word not in ('--python', options.python, f'--python={options.python}')]
        return subprocess.call([options.python, os.path.abspath(__file__)] + words)
    if options.patterns[:1] == ['faults']:
        return run_faults(options.quick, options.seed)
    if options.patterns == ['readme']:
        return write_readme()
    return run_tests(options.patterns, [group for group in options.require.split(',') if group], options.verbose)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
