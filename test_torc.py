#!/usr/bin/env python3
"""Tests of torc.py. `python3 test_torc.py` runs everything that this machine can run.

    python3 test_torc.py [-v] [PATTERN...]     tests whose 'Class.test' holds a pattern (* and ? as in file names)
    python3 test_torc.py --fast                without the classes marked @slow
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
import copy
import ctypes
import faulthandler
import fcntl
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
import pydoc
import random
import re
import resource
import select
import shlex
import shutil
import signal
import socket
import sqlite3
import ssl
import stat
import struct
import subprocess
import symtable
import sys
import tempfile
import termios
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
SENT_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

sys.dont_write_bytecode = True      # the tree stays clean
sys.path.insert(0, HERE)

import torc  # noqa: E402: from the directory of this file, wherever it is run


# Group -> what is told of its skipped tests instead of their reasons.
LOSSES = {'shared': 'compares torc.py with recordings that only its developers have; you lose nothing by it'}


def need(group: str, condition: Any, what: str) -> None:
    """Skip the test, by its group's name, unless the condition holds. `what` says what the machine would need."""
    if not condition:
        raise unittest.SkipTest(f'{group}: {what}')


def slow(case: type) -> type:
    """Keep a class out of the fast group: it starts whole programs, and takes more than some seconds to do so."""
    case.is_slow = True
    return case


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


def prepare_process() -> None:
    """Make this process, and what tests start from it, the same in a terminal, under nohup and by cron.

    Standard input is empty, so that nothing can wait for an answer; no standard descriptor is closed.
    """
    for name in list(os.environ):
        if re.match('TORC_|SLURM_|PYTHON(?!HOME)|COLUMNS$|LINES$', name):
            del os.environ[name]
    null = os.open(os.devnull, os.O_RDWR)
    while null <= 2:        # as the lowest number that is free, it is a standard descriptor that was closed
        os.set_inheritable(null, True)
        null = os.dup(null)
    os.dup2(null, 0)
    os.close(null)
    sys.stdin = open(0, closefd=False)
    sys.stdout, sys.stderr = (stream or open(os.devnull, 'w') for stream in (sys.stdout, sys.stderr))
    for number in SENT_SIGNALS:
        if signal.getsignal(number) == signal.SIG_IGN:      # by nohup, or `sh -c '... &'`
            # This process still ignores it; the programs that it starts have the default again (execve(2)).
            signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.umask(0o022)


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

    def __init__(self, argv: Sequence[Union[str, bytes]], directory: str, environment: Dict[str, str],
                 stem: str) -> None:
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
        words = b' '.join(map(os.fsencode, self.argv[1:])).decode('utf-8', 'replace')
        said = f'--- stdout\n{self.out}\n--- stderr\n{self.err}'
        return f'{words} (pid {self.pid}, code {self.process.poll()})\n{said}'


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
        self.environment = dict(os.environ)
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
            self.command(argv, python), cwd=cwd or self.directory, env=dict(self.environment, **(env or {})),
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
    def command(argv: Sequence[Any], python: str = '') -> List[bytes]:
        """Words of a program that is torc.py, in UTF-8 whatever this process's locale is."""
        words = (python or sys.executable, stub_path(), *argv)
        return [str(word).encode('utf-8', 'surrogateescape') for word in words]

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
        environment = dict(self.environment, **(env or {}))
        process = Background(self.command(argv), cwd or self.directory, environment, stem)
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
        state = unittest.mock.patch.dict(os.environ, XDG_STATE_HOME=self.world.environment['XDG_STATE_HOME'])   # servers register there
        state.start()
        self.addCleanup(state.stop)

    def assertExit(self, code: int, outcome: Outcome, *texts: str) -> Outcome:
        """The command ended with this code, and said all this on stdout or stderr."""
        self.assertEqual(code, outcome.code, str(outcome))
        for text in texts:
            self.assertIn(text, outcome.out + outcome.err)
        self.assertNotIn('Traceback', outcome.err)
        return outcome


class HarnessTest(unittest.TestCase):
    """The tests end by themselves, and find the same process, wherever they are started."""

    def test_this_process_has_no_input_and_ignores_no_signal(self):
        self.assertEqual(b'', os.read(0, 1))
        code = ('import os, signal, sys\n'
                'print([word for word in sys.argv[1:] if signal.getsignal(int(word)) == signal.SIG_IGN], '
                'os.read(0, 1), [key for key in os.environ if key.startswith("PYTHON")], oct(os.umask(0)))')
        numbers = [str(int(number)) for number in SENT_SIGNALS]
        said = subprocess.check_output([sys.executable, '-B', '-c', code, *numbers])
        self.assertEqual("[] b'' [] 0o22\n", said.decode())

    def test_they_end_in_a_terminal_under_nohup_without_standard_input_and_without_recordings(self):
        def ignore_signals() -> None:
            os.umask(0o077)
            for number in SENT_SIGNALS:
                signal.signal(number, signal.SIG_IGN)

        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        bare, here = os.path.join(folder, 'clone', 'test_torc.py'), os.path.abspath(__file__)
        os.mkdir(os.path.dirname(bare))
        for name in ('test_torc.py', 'torc.py'):
            os.symlink(os.path.join(HERE, name), os.path.join(os.path.dirname(bare), name))
        program = [sys.executable, '-B', here, 'HarnessTest.test_this', 'test_deleting_asks',
                   'test_the_document_has_torcs_keys']
        odd = {'LC_ALL': 'C', 'COLUMNS': '20', 'PYTHONUNBUFFERED': '1', 'TORC_API_URL': 'http://127.0.0.1:9/'}
        ours, theirs = os.openpty()
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, ours)
            in_terminal = stack.enter_context(subprocess.Popen(
                program[:-1], stdin=theirs, stdout=theirs, stderr=theirs, env=dict(os.environ, **odd),
                preexec_fn=ignore_signals, start_new_session=True))
            os.close(theirs)
            without = stack.enter_context(subprocess.Popen(
                ['sh', '-c', 'exec "$0" "$@" <&-', *(bare if word == here else word for word in program)],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
            stack.callback(in_terminal.kill)
            stack.callback(without.kill)
            said, end = b'', time.monotonic() + 60
            with contextlib.suppress(OSError):      # EIO: the other side has closed (pty(7))
                while select.select([ours], [], [], max(0.0, end - time.monotonic()))[0]:
                    said += os.read(ours, 4096)
            self.assertRegex(said, b'\n2 passed, 0 failed, 0 skipped\r\n$')
            lines = without.communicate(timeout=60)[0].decode().splitlines()
            self.assertEqual([f'skipped, group shared: {LOSSES["shared"]}', '2 passed, 0 failed, 1 skipped'],
                             [lines[-3], lines[-1]])
            self.assertEqual((0, 0), (in_terminal.wait(10), without.wait(10)))


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
        digits = '9' * 5000     # Python from 3.11 on refuses to read so many
        for text in (digits, digits + ':00:00', '1-' + digits):
            self.assertRaisesRegex(ValueError, 'is not a walltime', torc.normalize_walltime, text)

    def check_texts(self, normalize: Callable[[str], str], parse: Callable[[str], float], table: str) -> None:
        """Rows of what people write and what is kept of it; 'same' for Torc's own forms, which stay."""
        for row in rows_of(table):
            with self.subTest(row['text']):
                kept = normalize(row['text'])
                self.assertEqual(row['text'] if row['kept'] == 'same' else row['kept'], kept)
                self.assertGreaterEqual(parse(kept), 0)

    def check_refusals(self, normalize: Callable[[str], Any], table: Dict[str, str]) -> None:
        """Texts and the messages that they get, each after the text itself."""
        for text, message in table.items():
            with self.subTest(text), self.assertRaises(ValueError) as caught:
                normalize(text)
            self.assertEqual(f'{text!r} {message}', str(caught.exception))

    def test_memory_as_people_write_it_becomes_torcs(self):
        self.check_texts(torc.normalize_memory, torc.parse_memory, '''
            text        kept
            8           same
            8g          same
            512M        same
            +3k         same
            8GB         8g
            8gb         8g
            8Gi         8g
            8GiB        8g
            8 GB        8g
            2048 MB     2g
            1.5g        1536m
            0.1g        104858k
            1.2k        2k
            3TB         3t
            100B        100
            100 bytes   100
            ''')
        self.check_refusals(torc.normalize_memory, dict.fromkeys(
            ('8X', '', '-1g', 'GB', '1e3', '8 g b', '1.5'), 'is not an amount of memory: write a number and a unit, such as 512m, 8g or 1.5GB'))
        self.check_refusals(torc.parse_memory, {'9999999999999t': 'is more memory than can be counted'})

    def test_a_bare_number_of_bytes_is_doubted(self):
        for text, doubt in (('8', '8 is 8 bytes: write 8m for megabytes, 8g for gigabytes'), (' +4096', '4096 is 4096 bytes: write 4096m for megabytes, 4096g for gigabytes'),
                            ('0', ''), ('1048576', ''), ('8k', '')):
            self.assertEqual(doubt, torc.doubt_memory(text))

    def test_durations_as_people_write_them_become_torcs(self):
        self.check_texts(torc.normalize_duration, torc.parse_duration, '''
            text          kept
            PT30M         same
            P2W           same
            PT            same
            P1DT12H       same
            30m           PT30M
            90s           PT1M30S
            2h            PT2H
            1d            P1D
            2w            P14D
            1h30m         PT1H30M
            1d 12h        P1DT12H
            1.5h          PT1H30M
            2 hours       PT2H
            45 min        PT45M
            10 Seconds    PT10S
            1:00:00       PT1H
            00:00:45      PT45S
            1-12:00:00    P1DT12H
            1-12          P1DT12H
            pt2h          PT2H
            0s            PT0S
            1.5s          PT1S
            ''')
        wanted = 'is not a duration: write such as 90s, 30m, 1d12h, 1:00:00 or PT30M'
        self.check_refusals(torc.normalize_duration, {
            '45': 'may be seconds, minutes or hours: write 45s, 45m or 45h', '30:00': 'may be hours and minutes or minutes and seconds: write 30:00:00 or 0:30:00',
            'x': wanted, '': wanted, 'P': wanted, 'PT1H30': wanted, '5m3d': wanted, '500ms': wanted, '1 month': wanted, '1:2:3:4': wanted, '-5m': wanted,
            '99999999999999999999d': 'is longer than can be counted'})
        self.assertEqual(0.5, torc.parse_span('0.5s'))

    def test_walltimes_as_people_write_them_become_slurms(self):
        self.check_texts(torc.normalize_walltime, torc.parse_walltime, '''
            text          kept
            45            same
            5:30          same
            01:00:00      same
            1-12:30       same
            45m           00:45:00
            2h            02:00:00
            1d12h         1-12:00:00
            PT30M         00:30:00
            1.5s          00:00:02
            ''')
        for seconds in (0, 1, 3599, 86399, 86400, 129615):
            self.assertEqual(seconds, torc.parse_walltime(torc.format_walltime(seconds)))
        self.check_refusals(torc.normalize_walltime, dict.fromkeys(
            ('much', '', '1:2:3:4', '5m3d'), 'is not a walltime: write HH:MM:SS, D-HH:MM:SS, or such as 30m, 2h or 1d12h'))

    def test_slurms_memory_as_people_write_it_becomes_slurms(self):
        self.check_texts(torc.normalize_slurm_memory, torc.parse_slurm_memory, '''
            text        kept
            0           same
            4096        same
            240G        same
            240GB       same
            8Gi         8G
            240 GB      240G
            1.5G        1536M
            1.5k        2K
            100 bytes   1K
            ''')
        self.assertEqual(8 * 1024 ** 3, torc.parse_slurm_memory(torc.normalize_slurm_memory('8GiB')))
        self.check_refusals(torc.normalize_slurm_memory, {'much': 'is not an amount of memory for Slurm: write such as 240G or 4096 (megabytes)'})

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
        for beyond, shown in ((1e300, '9999-12-31T23:59:59.000Z'), (-1e18, '1000-01-01T00:00:00.000Z')):
            self.assertEqual(shown, torc.format_time(beyond))

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


class ExpressionTest(unittest.TestCase):
    """Regular expressions that wait for their first use."""

    def test_all_of_them_can_be_compiled(self):
        found = [value for value in vars(torc).values() if isinstance(value, torc.Expression)]
        self.assertGreater(len(found), 60)
        self.assertEqual([], [expression.text for expression in found if expression.pattern != expression.text])

    def test_it_is_compiled_at_its_first_use_and_once(self):
        wrong = torc.Expression('(')
        self.assertRaises(re.error, getattr, wrong, 'match')
        expression = torc.Expression('A+', re.IGNORECASE)
        self.assertEqual({'text': 'A+', 'flags': re.IGNORECASE}, vars(expression))
        self.assertEqual(('aA', 'x'), (expression.match('aAb').group(), expression.sub('x', 'aA')))
        self.assertIs(expression.match, vars(expression)['match'])
        self.assertRaises(AttributeError, getattr, expression, 'mach')


class NewFileTest(WorldTest):
    """Files that only one of several may make."""

    def test_of_many_that_make_a_file_one_succeeds_with_hard_links_and_without(self) -> None:
        refused = unittest.mock.patch('os.link', side_effect=PermissionError(1, 'Operation not permitted'))     # as FAT does
        for number, how in enumerate((contextlib.ExitStack(), refused)):
            with self.subTest(number), how:
                path, done = self.world.path(str(number)), []

                def make(name: str) -> None:
                    with contextlib.suppress(FileExistsError):
                        torc.write_atomically(path, name.encode(), is_new=True)
                        done.append(name)
                threads = [threading.Thread(target=make, args=(f'maker {index}',)) for index in range(20)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                self.assertEqual([self.world.read(str(number))], done)
        self.assertEqual(['0', '1'], sorted(os.listdir(self.world.directory)))


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
                text = torc.prepare_yaml(case['yaml'])
                value = plain_keys([torc.YamlReader(text[:part.end]).read(part.start, part.is_inline) for part in torc.split_yaml(text)])
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
                    torc.load_json5(case['text'])
                else:
                    self.assertRaises(torc.BadInput, torc.load_json5, case['text'])

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
                text = torc.normal_text(case['text'])
                if case['expected'] is None:
                    self.assertRaises(torc.BadInput, torc.read_kdl_nodes, text, False)
                else:
                    self.assertEqual(format_kdl(torc.read_kdl_nodes(text, False)).strip(), case['expected'].strip())

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
                self.assertTrue(is_same(torc.load_yaml(f'a: {text}\n')[0], {'a': wanted}))

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
            self.assertRaises(torc.BadInput, torc.load_toml, 'a = ' + '[' * 5000)

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


# ======== 5. Spec: from a document to a plan ========


def plan_of(spec: Any, directory: str = '', **options: Any) -> Any:
    """Plan of a spec, given as YAML text or as a value."""
    text, format = (spec, 'yaml') if isinstance(spec, str) else (json.dumps(spec), 'json')
    return torc.read_plan(torc.read_document(text.encode('utf-8', 'surrogatepass'), format=format), directory, **options)


def problems_of(spec: Any, directory: str = '', **options: Any) -> List[str]:
    """What is wrong with a spec: each problem as 'line:column: message'."""
    try:
        plan_of(spec, directory, **options)
    except torc.BadInput as error:
        return [str(problem) for problem in error.problems]
    return []


def recorded_form(body: Dict[str, Any]) -> Dict[str, Any]:
    """The body of a plan in the form of a .torc.json: names in place of indexes, sorted, without what says nothing."""
    def names(key: str, places: Iterable[int]) -> List[str]:
        return sorted(body[key][place]['name'] for place in places)

    def filled(record: Dict[str, Any]) -> Dict[str, Any]:
        return {key: value for key, value in record.items() if value not in (None, [], {}, ())}

    jobs = [torc.PlannedJob(*row) for row in body['jobs']]

    def recorded_job(job: Any) -> Dict[str, Any]:
        resources, priority, scheduler, labels = body['kinds'][job.kind]
        members = body['dependency_sets'][job.dependencies] if job.dependencies is not None else ()
        return filled({
            'name': job.name, 'command': job.command, 'invocation_script': job.invocation_script,
            'env': {**body['workflow'].get('env', {}), **(job.env or {})}, 'priority': priority, 'labels': labels,
            'cancel_on_blocking_job_failure': job.cancel_on_blocking_job_failure, 'supports_termination': job.supports_termination,
            'resource_requirements': 'default' if resources is None else body['resource_requirements'][resources]['name'],
            'scheduler': None if scheduler is None else body['slurm_schedulers'][scheduler]['name'],
            'failure_handler': None if job.failure_handler is None else body['failure_handlers'][job.failure_handler]['name'],
            'depends_on': sorted(jobs[member].name for member in members),
            'input_files': names('files', job.input_files), 'output_files': names('files', job.output_files),
            'input_user_data': names('user_data', job.input_user_data), 'output_user_data': names('user_data', job.output_user_data)})

    def recorded_action(action: Dict[str, Any]) -> Dict[str, Any]:
        config = dict(action['action_config'])
        if config.get('scheduler') is not None:
            config['scheduler'] = body['slurm_schedulers'][config['scheduler']]['name']
        return {'trigger_type': action['trigger_type'], 'action_type': action['action_type'], 'action_config': config, 'is_recovery': False,
                'jobs': sorted(jobs[place].name for place in action['job_indexes'] or ()), 'persistent': action['persistent']}

    requirements = body['resource_requirements']
    if not any(row['name'] == 'default' for row in requirements):
        requirements = requirements + [torc.DEFAULT_REQUIREMENTS]
    return {
        'workflow': filled(body['workflow']), 'jobs': [recorded_job(job) for job in jobs], 'actions': [recorded_action(row) for row in body['actions']],
        'files': [{key: row[key] for key in ('name', 'path')} for row in body['files']], 'user_data': body['user_data'],
        'resource_requirements': requirements, 'slurm_schedulers': body['slurm_schedulers'], 'failure_handlers': body['failure_handlers']}


# Where what is made of a spec differs from what Torc 1.0.0 stored, on purpose: (file, what, why).
BETTER_ON_PURPOSE = (
    ('hyperparameter_sweep.kdl',    'jobs.depends_on',           'Torc drops the nodes depends_on_job'),
    ('sample_workflow.kdl',         'jobs.depends_on',           'Torc drops the nodes depends_on_job'),
    ('workflow_actions_simple.kdl', 'jobs.depends_on',           'Torc drops the nodes depends_on_job'),
    ('zip_parameter_mode.kdl',      'jobs.depends_on',           'Torc drops the nodes depends_on_job'),
    ('zip_parameter_mode.kdl',      'jobs.input_files',          'Torc drops the nodes input_files'),
    ('zip_parameter_mode.kdl',      'jobs.output_files',         'Torc drops the nodes output_files'),
    ('slurm_dogfood_parent.yaml',   'workflow.execution_config', 'mode: direct is kept, since the default here is auto'),
    ('slurm_in_memory_exec.yaml',   'workflow.execution_config', 'mode: direct is kept, since the default here is auto'),
    ('slurm_job_parallelism.yaml',  'workflow.execution_config', 'mode: direct is kept, since the default here is auto'),
    ('slurm_multi_node_direct.yaml', 'workflow.execution_config', 'mode: direct is kept, since the default here is auto'),
    ('slurm_single_node_basic.yaml', 'workflow.execution_config', 'mode: direct is kept, since the default here is auto'),
)


def recorded_differences(name: str, made: Dict[str, Any], recorded: Dict[str, Any]) -> List[str]:
    """Where a workflow made from a spec is not what Torc stored, but for BETTER_ON_PURPOSE."""
    excused = {what for file, what, _ in BETTER_ON_PURPOSE if file == name}
    found = [f'workflow.{key}: {made["workflow"].get(key)!r} is not {recorded["workflow"].get(key)!r}'
             for key in sorted({**made['workflow'], **recorded['workflow']})
             if made['workflow'].get(key) != recorded['workflow'].get(key) and f'workflow.{key}' not in excused]
    if recorded['job_count'] != len(made['jobs']):
        found.append(f"{len(made['jobs'])} jobs, not {recorded['job_count']}")
    if 'job_names_sha256' in recorded:
        digest = hashlib.sha256('\n'.join(sorted(job['name'] for job in made['jobs'])).encode()).hexdigest()
        found += ['other job names'] if digest != recorded['job_names_sha256'] else []
    for kind in ('jobs', 'files', 'user_data', 'resource_requirements', 'slurm_schedulers', 'failure_handlers'):
        records = {record['name']: record for record in made[kind]}
        wanted = {record['name']: record for record in recorded.get(kind, recorded.get(kind + '_sample'))}
        if kind in recorded and set(records) != set(wanted):
            found.append(f'{kind}: {sorted(set(records) ^ set(wanted))}')
        for title, record in wanted.items():
            keys = sorted({**record, **records.get(title, {})})
            found += [f'{kind} {title}: {key} {records.get(title, {}).get(key)!r} is not {record.get(key)!r}' for key in keys
                      if records.get(title, {}).get(key) != record.get(key) and f'{kind}.{key}' not in excused]
    by_text = functools.partial(json.dumps, sort_keys=True)
    if sorted(made['actions'], key=by_text) != sorted(recorded['actions'], key=by_text):
        found.append(f"actions: {made['actions']} is not {recorded['actions']}")
    return found


def spec_names() -> List[str]:
    """The workflow files of ../shared/specs."""
    return sorted(name for name in os.listdir(shared('specs')) if re.search(r'\.(yaml|json5?|kdl)\Z', name)
                  and not name.endswith(('.expected.json', '.torc.json')))


class SpecFilesTest(unittest.TestCase):
    """Real workflow files."""

    def read(self, name: str) -> Any:
        """Plan of one of them."""
        with open(shared('specs/' + name), 'rb') as file:
            return torc.read_plan(torc.read_document(file.read(), name), shared('specs'))

    def test_what_is_made_of_them_is_what_torc_stored(self):
        for name in spec_names():
            recorded = read_shared(f'specs/{name}.torc.json')
            if 'refused' not in recorded:
                with self.subTest(name):
                    body = json.loads(json.dumps(self.read(name).body))
                    self.assertEqual([], recorded_differences(name, recorded_form(body), recorded))

    def test_those_that_torc_refused_are_refused_with_the_reason(self):
        reasons = {
            'multi_node_parallel_jobs_test_workflow.yaml':
                "30:5: resource_monitor.jobs: granularity must be one of summary, time_series, not 'TimeSeries', did you mean 'time_series'?",
            'timeout_auto_recovery_test_workflow.yaml':
                "55:5: slurm_scheduler 'job_scheduler': unknown field 'num_nodes', did you mean 'nodes'?"}
        refused = [name for name in spec_names() if 'refused' in read_shared(f'specs/{name}.torc.json')]
        self.assertEqual(sorted(reasons), refused)
        for name, reason in reasons.items():
            with self.assertRaises(torc.BadInput) as caught:
                self.read(name)
            self.assertEqual([reason], [str(problem) for problem in caught.exception.problems])

    def test_they_give_no_warnings(self):
        for name in spec_names():
            if 'refused' not in read_shared(f'specs/{name}.torc.json'):
                self.assertEqual([], [str(warning) for warning in self.read(name).warnings], name)


class ParametersTest(unittest.TestCase):
    """Values, formats, combinations: the recorded cases, with what is better here."""

    @classmethod
    def setUpClass(cls):
        cls.cases = read_shared('torc/param_cases.json')

    def test_values_are_those_recorded(self):
        names = {int: 'int', float: 'float', str: 'string'}
        for case in self.cases['parse']:
            with self.subTest(case['input']):
                case = {**case, **case['ours']} if 'ours' in case else case
                if case.get('error') and not ('ours' in case and 'values' in case['ours']):
                    with self.assertRaises(ValueError) as caught:
                        torc.expand_values(case['input'])
                    if 'ours' not in case:
                        self.assertEqual(case['error'], str(caught.exception)[:len(case['error'])] if 'Step' not in case['error'] else 'Step cannot be zero')
                    continue
                values = [[names[type(value)], torc.format_value(value)] for value in torc.expand_values(case['input'])]
                if 'values' in case and not ('first' in case):
                    # Torc adds the step again and again; 0:1:0.1 has its noise, which three cases of the same kind call wrong.
                    wanted = [[kind, re.sub(r'0000000000000\d+$|9999999999\d+$', '~', text)] for kind, text in case['values']]
                    self.assertEqual([row for row, want in zip(values, wanted) if '~' not in want[1]], [row for row in wanted if '~' not in row[1]])
                    self.assertEqual(len(case['values']), len(values))
                else:
                    self.assertEqual((case['count'], case['first'], case['last']), (len(values), values[:len(case['first'])], values[-len(case['last']):]))

    def test_formats_are_those_recorded(self):
        kinds = {'int': int, 'float': float, 'string': str}
        for case in self.cases['format']:
            with self.subTest('{value}:{spec}'.format(**case)):
                value, case = kinds[case['type']](case['value']), {**case, **case.get('ours', {})}
                if case.get('error'):
                    self.assertRaises(ValueError, torc.format_value, value, case['spec'])
                else:
                    self.assertEqual(case['text'], torc.format_value(value, case['spec']))

    def test_templates_are_filled_as_recorded(self):
        for case in self.cases['substitute']:
            with self.subTest(case['template']):
                values = {name: value for name, (_, value) in case['params'].items()}
                ours = case.get('ours', {})
                if ours.get('error'):
                    self.assertRaises(torc.BadInput, torc.substitute, case['template'], values)
                    continue
                wanted = ours.get('text', case['torc_newer'])
                self.assertEqual(wanted, torc.substitute(case['template'], values))
                plan = plan_of({'name': 'w', 'jobs': [{'name': 'x', 'command': case['template'] + ' ', 'parameters': {key: [value] for key, value in values.items()}}],
                                'files': [{'name': 'x', 'path': 'p'}]} if 'files.' not in wanted else {'name': 'w', 'jobs': []})
                self.assertEqual([wanted + ' '] if 'files.' not in wanted else [], [job.command for job in plan.body['jobs']])

    def test_entries_are_expanded_as_recorded(self):
        for case in self.cases['expand']:
            with self.subTest(case):
                kind = 'job' if 'job' in case else 'file'
                spec = self.complete(case[kind], kind)
                if case.get('ours', {}).get('error') or 'error_contains' in case:
                    self.assertIn(case.get('error_contains', ''), '\n'.join(problems_of(spec)) or 'no problem')
                    continue
                body = plan_of(spec).body
                rows = [self.job_record(body, job) for job in body['jobs'] if job.name != 'other'] if kind == 'job' else body['files']
                self.check_rows(case, rows)

    def complete(self, entry: Dict[str, Any], kind: str) -> Dict[str, Any]:
        """A spec around an entry: with whatever it names."""
        spec: Dict[str, Any] = {'name': 'w', 'jobs': [], 'files': [], 'user_data': []}
        spec[kind + 's'].append(entry)
        parameters = {key: entry[key] for key in ('parameters', 'parameter_mode') if key in entry}
        for field, listed in (('input_files', 'files'), ('output_files', 'files'), ('input_user_data', 'user_data'), ('output_user_data', 'user_data')):
            for name in entry.get(field, ()):
                used = {key: value for key, value in parameters.get('parameters', {}).items() if '{' + key in name}
                spec[listed].append(dict({'name': name, 'parameters': used}, **({'path': 'p/' + name} if listed == 'files' else {})))
        for name in entry.get('depends_on', ()):
            spec['jobs'].append(dict({'name': name, 'command': 'c'}, **parameters))
        return spec

    def job_record(self, body: Dict[str, Any], job: Any) -> Dict[str, Any]:
        """A planned job with names."""
        members = body['dependency_sets'][job.dependencies] if job.dependencies is not None else ()
        record = dict(job._asdict(), depends_on=[body['jobs'][member].name for member in members])
        for field, listed in (('input_files', 'files'), ('output_files', 'files'), ('input_user_data', 'user_data'), ('output_user_data', 'user_data')):
            record[field] = [body[listed][place]['name'] for place in record[field]]
        return record

    def check_rows(self, case: Dict[str, Any], rows: List[Dict[str, Any]]) -> None:
        """What a case says of the instances."""
        if case['from'] == 'test:test_job_with_depends_on_names':
            rows = rows[:3]
        names = [row['name'] for row in rows]
        self.assertEqual(case.get('count', len(rows)), len(rows))
        self.assertEqual(case.get('names', names), names)
        self.assertEqual(case.get('commands', [row.get('command') for row in rows]), [row.get('command') for row in rows])
        self.assertEqual(case.get('names_start', []), names[:len(case.get('names_start', []))])
        self.assertEqual(set(), set(case.get('has_names', ())) - set(names))
        wanted = [(rows[0], case.get('first', {})), (rows[-1], case.get('last', {}))]
        if 'contains' in case:
            wanted.append((rows[names.index(case['contains']['name'])], case['contains']))
        for row, part in wanted:
            self.assertEqual(part, {key: row[key] for key in part})

    def test_specs_share_parameters_as_recorded(self):
        for case in self.cases['spec']:
            with self.subTest(case['spec']):
                case = {**case, **case.get('ours', {})}
                if case.get('error'):
                    self.assertTrue(problems_of(case['spec']))
                    continue
                body = plan_of(case['spec']).body
                names = [job.name for job in body['jobs']]
                self.assertEqual(case.get('job_names', names), names)
                self.assertEqual(case.get('job_count', len(names)), len(names))
                self.assertEqual(case.get('file_names', [row['name'] for row in body['files']]), [row['name'] for row in body['files']])

    def test_native_values(self):
        self.assertEqual([1, 2.5, 'a,b', 'true', '007', '1:3'], torc.expand_values([1, 2.5, 'a,b', True, '007', '1:3']))
        for value, message in (([[1]], 'must be made of numbers and text, not a list'), ({'a': 1}, 'must be made of numbers and text, not a mapping'),
                               ([None], 'must be made of numbers and text, not null: put it in quotes if you mean the word'), ([], 'has no values: an empty list makes no instance')):
            with self.assertRaises(ValueError) as caught:
                torc.expand_values(value)
            self.assertEqual(message, str(caught.exception))

    def test_the_last_parameter_changes_fastest(self):
        self.assertEqual([{'a': 1, 'b': 'x'}, {'a': 1, 'b': 'y'}, {'a': 2, 'b': 'x'}, {'a': 2, 'b': 'y'}], torc.expand_parameters({'a': '1:2', 'b': '[x,y]'}))
        self.assertEqual([{'a': 1, 'b': 'x'}, {'a': 2, 'b': 'y'}], torc.expand_parameters({'a': '1:2', 'b': '[x,y]'}, 'zip'))
        self.assertEqual([{}], torc.expand_parameters({}))

    def test_too_many_instances_are_refused_before_they_are_made(self):
        for parameters, count in (({'i': '1:1000000000000'}, '1,000,000,000,000'), ({'i': '1:10000', 'j': '1:10000'}, '100,000,000'), ({'i': '0:1:1e-20'}, '100,000,000,000,000,000,001')):
            found = problems_of({'name': 'w', 'jobs': [{'name': 'j{i}', 'command': 'c', 'parameters': parameters}]})
            self.assertEqual(1, len(found), found)
            self.assertIn(f'would make {count} instances, more than the limit of 1,000,000: use fewer values, or raise the limit with --max-instances', found[0])
        self.assertEqual(5, len(plan_of('{name: w, jobs: [{name: "j{i}", command: c, parameters: {i: "1:5"}}]}', max_instances=5).body['jobs']))
        self.assertEqual(1, len(problems_of('{name: w, jobs: [{name: "j{i}", command: c, parameters: {i: "1:6"}}]}', max_instances=5)))
        two = {'name': 'w', 'jobs': [{'name': letter + '{i}', 'command': 'c', 'parameters': {'i': '1:4'}} for letter in 'ab']}
        self.assertEqual(1, len(problems_of(two, max_instances=5)))

    def test_tables_and_lists(self):
        with tempfile.TemporaryDirectory() as directory:
            files = {'t.csv': 'm, lr \nresnet, 0.10\n"a,b",7\n', 't.json': '[{"m": "x", "n": 1.50, "l": [1]}, {"m": "y", "n": 2, "l": null}]',
                     't.jsonl': '{"m": 1}\n\n{"m": 2}\n', 'list.txt': '# names\n one\n\n2\n3.0\n', 'bad.csv': 'a,a\n1,2\n', 'short.csv': 'a,b\n1\n',
                     'empty.csv': 'a,b\n', 'part.json': '[{"a": 1}, {"b": 2}]', 'bad.json': '[1]'}
            for name, text in files.items():
                with open(os.path.join(directory, name), 'w') as file:
                    file.write(text)

            def commands(job: Dict[str, Any], **workflow: Any) -> List[str]:
                return [row.command for row in plan_of(dict(workflow, name='w', jobs=[job]), directory).body['jobs']]

            def problem(job: Dict[str, Any], **workflow: Any) -> str:
                return '\n'.join(re.sub(r'^[0-9:]+ ', '', found) for found in problems_of(dict(workflow, name='w', jobs=[job]), directory))

            table = {'name': '{m}', 'command': '{m} {lr:.1f}', 'parameters_file': 't.csv'}
            self.assertEqual(['resnet 0.1'], commands(dict(table, parameters_file='one.csv')) if self.write_one(directory) else [])
            self.assertEqual(['resnet 0.1', 'a,b 7'], commands(dict(table, command='{m} {lr}')))
            self.assertEqual(['x 1.5 [1]', 'y 2 null'], commands({'name': '{m}', 'command': '{m} {n} {l}', 'parameters_file': 't.json'}))
            self.assertEqual(['1', '2'], commands({'name': '{m}', 'command': '{m}', 'use_parameters_file': True}, parameters_file='t.jsonl'))
            self.assertEqual(['one', '2', '3'], commands({'name': '{m}', 'command': '{m}', 'parameters': {'m': '@list.txt'}}))
            for job, workflow, message in (
                    ({'parameters_file': 'no.csv'}, {}, "job 'x': 'no.csv' cannot be read: No such file or directory"),
                    ({'parameters_file': 't.txt'}, {}, "job 'x': 't.txt' is not a table: use .csv, .json, .jsonl or .ndjson"),
                    ({'parameters_file': 'bad.csv'}, {}, "job 'x': 'bad.csv': the header must name every column, each once"),
                    ({'parameters_file': 'short.csv'}, {}, "job 'x': 'short.csv': row 1 has 1 fields, the header has 2"),
                    ({'parameters_file': 'empty.csv'}, {}, "job 'x': 'empty.csv' has no rows"),
                    ({'parameters_file': 'bad.json'}, {}, "job 'x': 'bad.json': row 1 must be an object, not 1"),
                    ({'parameters_file': 't.csv', 'parameters': {'a': 1}}, {}, "job 'x': a table cannot be combined with parameters"),
                    ({'parameters_file': 't.csv', 'use_parameters_file': True}, {'parameters_file': 't.csv'}, "job 'x': a table cannot be combined with use_parameters_file"),
                    ({'use_parameters_file': True}, {}, "job 'x': use_parameters_file needs parameters_file in the workflow"),
                    ({}, {'parameters': {'a': 1}, 'parameters_file': 't.csv'}, 'workflow: parameters and parameters_file cannot be combined'),
                    ({'parameters': {'m': '@no.txt'}}, {}, "job 'x': parameter 'm' 'no.txt' cannot be read: No such file or directory")):
                self.assertEqual(message, problem(dict(job, name='x', command='c'), **workflow))
            self.assertIn("parameter 'a' in name: row 2 of the table has no such key", problem({'name': '{a}', 'command': 'c', 'parameters_file': 'part.json'}))

    @staticmethod
    def write_one(directory: str) -> bool:
        """A table of one row, with a byte order mark as spreadsheets write it."""
        with open(os.path.join(directory, 'one.csv'), 'w', encoding='utf-8-sig') as file:
            file.write('m,lr\r\nresnet,0.1\r\n')
        return True


BAD_SPECS = (
    # YAML with {} around it and name: w before it                                              the problems, without places
    ('jobs: [{name: a, command: c, cpus: 1}]',                                                   ["job 'a': unknown field 'cpus'"]),
    ('jobs: [{name: a, command: c, num_cpus: 1}]',                                               ["job 'a': unknown field 'num_cpus', it is a field of resource_requirements"]),
    ('jobs: [{name: a, comand: c}]',                                                             ["job 'a': command is missing", "job 'a': unknown field 'comand', did you mean 'command'?"]),
    ('jobs: [{command: c}]',                                                                     ['job 1: name is missing']),
    ('jobs: [a]',                                                                                ["job 1: must be a mapping, not 'a'"]),
    ('jobs: {name: a}',                                                                          ['workflow: jobs must be a list (each entry begins with "- "), not a mapping']),
    ('slurm_config: {}',                                                                         ["workflow: unknown field 'slurm_config', its fields stand under execution_config now"]),
    ('use_srun: true',                                                                           ["workflow: unknown field 'use_srun', did you mean 'user'?"]),
    ('limit_resources: false',                                                                   ["workflow: unknown field 'limit_resources', it is a field of execution_config"]),
    ('description: true',                                                                        ['workflow: description must be text, not true: put it in quotes ("true") if you mean the word']),
    ('env: {A: null}',                                                                           ['workflow: \'A\' of env must be text, not null: put it in quotes ("null") if you mean the word']),
    ('env: {A-B: x}',                                                                            ["workflow: 'A-B' of env must be a name of letters, digits and _, not 'A-B'"]),
    ('env: [a]',                                                                                 ['workflow: env must be a mapping, not a list']),
    ('jobs: [{name: a, command: c, depends_on: b}]',                                             ["job 'a': depends_on must be a list, such as [b], not 'b'"]),
    ('jobs: [{name: a, command: c, depends_on: [b]}]',                                           ["job 'a': depends_on: there is no job 'b'"]),
    ('jobs: [{name: one, command: c}, {name: a, command: c, depends_on: [oen]}]',                ["job 'a': depends_on: there is no job 'oen', did you mean 'one'?"]),
    ('jobs: [{name: a, command: c, priority: "5"}]',                                             ["job 'a': priority must be a whole number, not '5': write it without quotes"]),
    ('jobs: [{name: a, command: c, priority: -1}]',                                              ["job 'a': priority must be at least 0, not -1"]),
    ('jobs: [{name: a, command: c, priority: 007}]',                                             ["job 'a': priority must be a whole number without leading zeros, not 007"]),
    ('jobs: [{name: a, command: c, priority: 99999999999999999999}]',                            ["job 'a': priority must be at most 9,223,372,036,854,775,807, not 99999999999999999999"]),
    ('jobs: [{name: a, command: c, priority: 1.5}]',                                             ["job 'a': priority must be a whole number, not 1.5"]),
    ('jobs: [{name: a, command: c, cancel_on_blocking_job_failure: yes}]',                       ["job 'a': cancel_on_blocking_job_failure must be true or false, not 'yes'"]),
    ('jobs: [{name: a, command: c}, {name: a, command: d}]',                                     ["job 'a': the name 'a' is taken, in line 2: give each its own"]),
    ('files: [{name: f, path: p}, {name: f, path: q}]',                                          ["file 'f': the name 'f' is taken, in line 2: give each its own"]),
    ('user_data: [{name: u}, {name: u}]',                                                        ["user_data 'u': the name 'u' is taken, in line 2: give each its own"]),
    ('user_data: [{data: 1}]',                                                                   ['user_data 1: name is missing']),
    ('failure_handlers: [{name: h, rules: []}, {name: h, rules: []}]',                           ["failure_handler 'h': the name 'h' is taken, in line 2: give each its own"]),
    ('jobs: [{name: "", command: c}]',                                                           ['job \'\': name must not be empty']),
    ('jobs: [{name: "a\\u0007", command: c}]',                                                   ["job 'a\\x07': name holds the control character '\\x07': remove it"]),
    ('jobs: [{name: a, command: "c\\0"}]',                                                       ["job 'a': command holds the character '\\x00', which cannot be stored: remove it"]),
    ('jobs: [{name: a, command: c, resource_requirements: r}]',                                  ["job 'a': resource_requirements: there is no resource_requirements 'r'"]),
    ('jobs: [{name: a, command: c, failure_handler: h}]',                                        ["job 'a': failure_handler: there is no failure_handler 'h'"]),
    ('jobs: [{name: a, command: c, scheduler: s}]',                                              ["job 'a': scheduler: there is no slurm_scheduler 's'"]),
    ('jobs: [{name: a, command: c, input_files: [f]}]',                                          ["job 'a': input_files: there is no file 'f'"]),
    ('jobs: [{name: a, command: "c ${files.input.f}"}]',                                         ["job 'a': command: there is no file 'f'"]),
    ('jobs: [{name: a, command: "c ${user_data.output.u}"}]',                                    ["job 'a': command: there is no user_data 'u'"]),
    ('{jobs: [{name: a, command: "c ${user_data.input.u}"}], user_data: [{name: u}]}',
     ["job 'a': command: user_data 'u' has no data to put here: list it under input_user_data or output_user_data, and read or write it while the job runs"]),
    ('jobs: [{name: a, command: c, depends_on_regexes: ["("]}]',
     ["job 'a': depends_on_regexes: '(' is not a regular expression: missing ), unterminated subpattern at character 1"]),
    ('jobs: [{name: a, command: c, depends_on_regexes: ["^b"]}]',                                ["job 'a': depends_on_regexes: '^b' did not match any job name"]),
    ('jobs: [{name: a, command: c, depends_on_regexes: ["a"]}]',                                 ["job 'a': waits for itself: a -> a"]),
    ('jobs: [{name: a, command: c, depends_on: [b]}, {name: b, command: c, depends_on: [a]}]',   ["job 'a': waits for itself: a -> b -> a"]),
    ('{jobs: [{name: a, command: c, input_files: [f], output_files: [g]}, {name: b, command: c, input_files: [g], output_files: [f]}], '
     'files: [{name: f, path: f}, {name: g, path: g}]}',                                         ["job 'a': waits for itself: a -> b -> a"]),
    ('{jobs: [{name: a, command: c, input_user_data: [u]}, {name: b, command: c, depends_on: [a], output_user_data: [u]}], user_data: [{name: u}]}',
     ["job 'a': waits for itself: a -> b -> a"]),
    ('{jobs: [{name: a, command: c, input_files: [f], output_files: [f]}], files: [{name: f, path: f}]}', ["job 'a': waits for itself: a -> a"]),
    ('{jobs: [{name: a, command: c, output_files: [f]}, {name: b, command: c, output_files: [f]}], files: [{name: f, path: f}]}',
     ["job 'b': file 'f' is written by both 'a' and 'b': give each its own file"]),
    ('{jobs: [{name: a, command: c, output_files: [f]}, {name: b, command: c, output_files: [g]}], files: [{name: f, path: x}, {name: g, path: x}]}',
     ["job 'b': file 'g' is written by both 'a' and 'b': give each its own file"]),
    ('jobs: [{name: a, command: c, labels: [""]}]',                                              ["job 'a': label '' must be a word without commas and outer blanks"]),
    ('jobs: [{name: a, command: c, labels: ["x,y"]}]',                                           ["job 'a': label 'x,y' must be a word without commas and outer blanks"]),
    ('{jobs: [{name: a, command: c, labels: [x], scheduler: s}], slurm_schedulers: [{name: s, account: z}]}', ["job 'a': a job with labels cannot name a scheduler: remove one"]),
    ('jobs: [{name: a, command: c, stdio: {mode: both}}]',                                       ["job 'a': stdio: mode must be one of separate, combined, no_stdout, no_stderr, none, not 'both'"]),
    ('execution_config: {stdio: {delete_on_success: 1}, job_stdio_overrides: {x: {mod: none}}}',
     ['execution_config: stdio: delete_on_success must be true or false, not 1', "execution_config: stdio 'x': unknown field 'mod', did you mean 'mode'?"]),
    ('failure_handlers: [{name: h, rules: [{exit_codes: [1, 256, x]}, {exit_code: [1]}, [2]]}]',
     ["failure_handler 'h': rule 1: item 2 of exit_codes must be at most 255, not 256", "failure_handler 'h': rule 1: item 3 of exit_codes must be a whole number, not 'x'",
      "failure_handler 'h': rule 2: unknown field 'exit_code', did you mean 'exit_codes'?", "failure_handler 'h': rule 3: must be a mapping, not a list"]),
    ('failure_handlers: [{rules: [{max_retries: true}]}]',
     ['failure_handler 1: name is missing', 'failure_handler 1: rule 1: max_retries must be a whole number, not true']),
    ('resource_requirements: [{name: r, memory: 4X}]',
     ["resource_requirements 'r': memory '4X' is not an amount of memory: write a number and a unit, such as 512m, 8g or 1.5GB"]),
    ('resource_requirements: [{name: r, runtime: 90}]',
     ["resource_requirements 'r': runtime '90' may be seconds, minutes or hours: write 90s, 90m or 90h"]),
    ('resource_requirements: [{name: r, num_cpus: 0, num_gpus: -1, num_nodes: 0}]',
     ["resource_requirements 'r': num_cpus must be at least 1, not 0", "resource_requirements 'r': num_gpus must be at least 0, not -1",
      "resource_requirements 'r': num_nodes must be at least 1, not 0"]),
    ('slurm_schedulers: [{account: a}]',                                                         ['slurm_scheduler 1: name is missing']),
    ('slurm_schedulers: [{name: s}]',                                                            ["slurm_scheduler 's': account is missing"]),
    ('slurm_schedulers: [{name: s, account: a, walltime: long}]',
     ["slurm_scheduler 's': walltime 'long' is not a walltime: write HH:MM:SS, D-HH:MM:SS, or such as 30m, 2h or 1d12h"]),
    ('execution_config: {sigterm_lead_seconds: soon}',
     ["execution_config: sigterm_lead_seconds 'soon' is not a duration: write such as 90s, 30m, 1d12h, 1:00:00 or PT30M"]),
    ('compute_node_wait_for_healthy_database_minutes: 90s',
     ["workflow: compute_node_wait_for_healthy_database_minutes must be a whole number of minutes, not '90s'"]),
    ('compute_node_wait_for_new_jobs_seconds: "90"',
     ["workflow: compute_node_wait_for_new_jobs_seconds must be a whole number, not '90': write it without quotes"]),
    ('slurm_schedulers: [{name: s, account: a, nodes: 0}]',                                      ["slurm_scheduler 's': nodes must be at least 1, not 0"]),
    ('slurm_schedulers: [{name: s, account: a, mem: much}]',
     ["slurm_scheduler 's': mem 'much' is not an amount of memory for Slurm: write such as 240G or 4096 (megabytes)"]),
    ('slurm_defaults: {Partition: x, qos: y}',                                                   ["workflow: slurm_defaults cannot set 'Partition': set it in slurm_schedulers"]),
    ('actions: [{trigger_type: on_start, action_type: run_commands, commands: [x]}]',
     ["action 1: trigger_type must be one of on_workflow_start, on_workflow_complete, on_worker_start, on_worker_complete, on_jobs_ready, on_jobs_complete, not 'on_start', did you mean 'on_worker_start'?"]),
    ('actions: [{trigger_type: on_workflow_start, action_type: run_commands}]',                  ['action 1: run_commands needs commands']),
    ('actions: [{trigger_type: on_jobs_ready, action_type: run_commands, commands: [x]}]',       ['action 1: on_jobs_ready needs jobs or job_name_regexes']),
    ('actions: [{trigger_type: on_jobs_ready, action_type: run_commands, commands: [x], jobs: [ a ]}]', ["action 1: jobs: there is no job 'a'"]),
    ('actions: [{trigger_type: on_workflow_start, action_type: schedule_nodes}]',                ['action 1: schedule_nodes needs scheduler', 'action 1: schedule_nodes needs scheduler_type']),
    ('actions: [{trigger_type: on_workflow_start, action_type: schedule_nodes, scheduler: s, scheduler_type: slurm}]', ["action 1: scheduler: there is no slurm_scheduler 's'"]),
    ('actions: [{trigger_type: on_workflow_start, action_type: schedule_nodes, scheduler: s, scheduler_type: pbs}]',
     ["action 1: scheduler_type must be one of slurm, local, not 'pbs'"]),
    ('execution_config: {mode: slurm, limit_resources: false, oom_exit_code: 137}',
     ['execution_config: limit_resources: false does not go with mode slurm: remove it, or set mode: direct',
      'execution_config: oom_exit_code does not go with mode slurm: remove it, or set mode: direct']),
    ('execution_config: {mode: direct, srun_termination_signal: TERM@60}',
     ['execution_config: srun_termination_signal does not go with mode direct: remove it, or set mode: slurm']),
    ('{execution_config: {termination_signal: SIGUSR1}, slurm_schedulers: [{name: s, account: a}]}',
     ['execution_config: termination_signal does not go with mode auto, which is slurm here: remove it, or set mode: direct']),
    ('execution_config: {termination_signal: SIGFOO}',                                           ["execution_config: termination_signal must be the name of a signal, such as SIGTERM or SIGUSR1, not 'SIGFOO'"]),
    ('execution_config: {srun_mpi: "a b"}',                                                      ["execution_config: srun_mpi must be a kind of MPI such as pmix, not 'a b'"]),
    ('execution_config: {srun_mpi: pmix}',                                                       ['execution_config: srun_mpi needs a schedule_nodes action with start_one_worker_per_node: true']),
    ('dynamic_jobs: {max_iterations: 0}',                                                        ['dynamic_jobs: max_iterations must be at least 1, not 0']),
    ('access_groups: [a, a]',                                                                    ['workflow: access_groups names a group twice']),
    ('resource_monitor: {interval: 1}',                                                          ["resource_monitor: unknown field 'interval'"]),
    ('resource_monitor: {sample_interval_seconds: 0}',                                           ['resource_monitor: sample_interval_seconds must be at least 1, not 0']),
    ('variables: {a: 5}',                                                                        ["workflow: variable 'a' must be text: put it in quotes"]),
    ('variables: {a: "{b}"}',                                                                    ["workflow: variable 'a' holds {b}: it cannot refer to others"]),
    ('{variables: {i: x}, jobs: [{name: "{i}", command: c, parameters: {i: [1]}}]}',             ["workflow: 'i' is both a variable and a parameter: rename one"]),
    ('{parameters: {i: "1:3"}, jobs: [{name: a, command: "echo {i}"}]}',
     ["job 'a': command holds {i}, but 'i' is not used here: add it to use_parameters, or declare it under parameters"]),
    ('jobs: [{name: "j{i}", command: c, parameters: {i: []}}]',                                  ["job 'j{i}': parameter 'i' has no values: an empty list makes no instance"]),
    ('jobs: [{name: "j{i}", command: c, parameters: {i: "5:1"}}]',                               ["job 'j{i}': parameter 'i' '5:1' has no values: the step leads away from the end"]),
    ('jobs: [{name: j, command: c, parameters: {i: "1:2"}}]',
     ["job 'j': parameters make several with the name 'j': put every parameter into the name, or collect with depends_on_regexes or input_file_regexes instead of parameters"]),
    ('jobs: [{name: a, command: c, depends_on: [j1]}, {name: "j{i:03d}", command: c, parameters: {i: "5:1"}}]', ["job 'j{i:03d}': parameter 'i' '5:1' has no values: the step leads away from the end"]),
    ('jobs: [{name: "j{i:03d}", command: c, parameters: {i: [x]}}]',                             ["job 'j{i:03d}': parameter 'i' in name: format '03d' does not suit the text x"]),
    ('jobs: [{name: "j{i}", command: c, parameters: {i: "1:2"}, parameter_mode: zipped}]',       ["job 'j{i}': parameter_mode must be one of product, zip, not 'zipped', did you mean 'zip'?"]),
    ('{parameters: {seed: "1:2"}, jobs: [{name: "j{seed}", command: c, use_parameters: [sed]}]}',
     ["job 'j{seed}': use_parameters names 'sed', which is no parameter of the workflow, did you mean 'seed'?"]),
    ('user_data: [{name: u, data: .nan}]',                                                       ["user_data 'u': data holds NaN or infinity, which JSON cannot: put it in quotes"]),
    ('user_data: [{name: u, data: [99999999999999999999]}]',                                     ["user_data 'u': data holds a number that is too large for 64 bits: put it in quotes"]),
    ('files: [{name: f, path: p, identifier: x}]',                                               ["workflow: file 'f': identifier needs enable_ro_crate: true in the workflow"]),
    ('{enable_ro_crate: true, files: [{name: f, path: p, identifier: x}]}',                      ["workflow: file 'f': identifier is for input files only, and no job reads this one"]),
    ('{enable_ro_crate: true, jobs: [{name: j, command: c, input_files: [f]}], files: [{name: f, path: p, identifier: "#torc-x"}]}',
     ["workflow: file 'f': identifier '#torc-x' is reserved"]),
)

SCHEDULER = 'slurm_schedulers: [{name: s, account: a, walltime: "01:00:00", mem: 8G, gres: "gpu:2"}]'
UNFIT = (
    ('runtime: PT2H',                'runtime PT2H is longer than walltime 01:00:00 of \'s\''),
    ('memory: 16g',                  "memory 16g is more than mem 8G of 's'"),
    ('num_gpus: 4',                  "num_gpus 4 is more than gres gpu:2 of 's'"),
    ('num_nodes: 2',                 "num_nodes 2 is more than nodes 1 of 's'"),
)


class SpecTest(unittest.TestCase):
    """What a spec may say, and what it is told."""

    def test_every_mistake_has_its_message(self):
        for text, wanted in BAD_SPECS:
            with self.subTest(text):
                text = text[1:-1] if text[0] == '{' else text
                jobs = '' if re.search(r'\bjobs: [\[{a](?! a \])', text) else ', jobs: []'
                found = problems_of('{name: w,\n ' + text + jobs + '}')
                self.assertEqual(sorted(wanted), sorted(re.sub(r'^[0-9]+:[0-9]+: ', '', problem) for problem in found))

    def test_all_mistakes_are_told_at_once_with_their_places(self):
        text = 'name: w\njobs:\n  - name: a\n    comand: c\n  - name: b\n    command: c\n    priority: -1\n    depends_on:\n      - a\n      - z\nfoo: 1\n'
        self.assertEqual(["3:5: job 'a': command is missing", "4:5: job 'a': unknown field 'comand', did you mean 'command'?", "7:5: job 'b': priority must be at least 0, not -1",
                          "8:5: job 'b': depends_on: there is no job 'z'", "11:1: workflow: unknown field 'foo'"], problems_of(text))

    def test_a_spec_must_be_a_mapping_with_a_name(self):
        for text, wanted in (('[1]', ['1:1: a workflow must be a mapping with name and jobs, not a list']), ('jobs: []\n', ['1:1: workflow: name is missing']),
                             ('name: w\n', ['1:1: workflow: jobs is missing'])):
            self.assertEqual(wanted, problems_of(text))

    def test_resources_that_fit_no_scheduler_are_refused(self):
        for field, reason in UNFIT:
            with self.subTest(field):
                text = f'{{name: w, jobs: [{{name: a, command: c, resource_requirements: r}}], resource_requirements: [{{name: r, {field}}}], {SCHEDULER}}}'
                self.assertEqual([f"job 'a': fits no scheduler: {reason}: change the one or the other, or use --skip-checks"],
                                 [re.sub(r'^[0-9:]+ ', '', problem) for problem in problems_of(text)])
                plan = plan_of(text, skip_checks=True)
                self.assertEqual(1, len(plan.warnings))
        self.assertEqual([], problems_of(f'{{name: w, jobs: [{{name: a, command: c}}], {SCHEDULER}}}'))

    def test_a_job_needs_one_scheduler_that_fits_in_all_respects(self):
        text = '{name: w, jobs: [{name: a, command: c, resource_requirements: r}], resource_requirements: [{name: r, memory: 16g, runtime: PT2H}], ' \
            'slurm_schedulers: [{name: s, account: a, mem: 8G, walltime: "04:00:00"}, {name: t, account: a, mem: 32G}%s]}'
        self.assertEqual(["1:40: job 'a': fits no scheduler: memory 16g is more than mem 8G of 's'; runtime PT2H is longer than walltime 01:00:00 of 't': "
                          'change the one or the other, or use --skip-checks'], problems_of(text % ''))
        self.assertEqual([], problems_of(text % ', {name: u, account: a, walltime: 1-0}'))

    def test_text_fields_take_the_source_text_of_numbers(self):
        body = plan_of('{name: 1.10, project: 012, jobs: [{name: 007, command: 1e3, env: {A: 0.60}}], files: [{name: 5, path: 1_000}], '
                       'slurm_schedulers: [{name: s, account: 012345, walltime: 60}]}').body
        self.assertEqual(('1.10', '012'), (body['workflow']['name'], body['workflow']['project']))
        self.assertEqual(('007', '1e3', {'A': '0.60'}), (body['jobs'][0].name, body['jobs'][0].command, body['jobs'][0].env))
        self.assertEqual(('5', '1_000'), (body['files'][0]['name'], body['files'][0]['path']))
        self.assertEqual(('012345', '60'), (body['slurm_schedulers'][0]['account'], body['slurm_schedulers'][0]['walltime']))

    def test_units_as_people_write_them_are_kept_in_torcs_forms(self):
        body = plan_of('{name: w, jobs: [], compute_node_wait_for_new_jobs_seconds: 5m, compute_node_wait_for_healthy_database_minutes: 1h, '
                       'execution_config: {mode: direct, sigterm_lead_seconds: 1:00:00, sigkill_headroom_seconds: 90}, resource_monitor: {sample_interval_seconds: 30s}, '
                       'resource_requirements: [{name: r, memory: 8GB, runtime: 1d12h}, {name: s, memory: 512M, runtime: PT90M}], '
                       'slurm_schedulers: [{name: s, account: a, mem: 16 GiB, walltime: 2h}]}').body
        self.assertEqual([('8g', 'P1DT12H'), ('512M', 'PT90M')], [(row['memory'], row['runtime']) for row in body['resource_requirements']])
        self.assertEqual(('16G', '02:00:00'), (body['slurm_schedulers'][0]['mem'], body['slurm_schedulers'][0]['walltime']))
        self.assertEqual((300, 60), (body['workflow']['compute_node_wait_for_new_jobs_seconds'], body['workflow']['compute_node_wait_for_healthy_database_minutes']))
        self.assertEqual({'mode': 'direct', 'sigterm_lead_seconds': 3600, 'sigkill_headroom_seconds': 90}, body['workflow']['execution_config'])
        self.assertEqual(30, body['workflow']['resource_monitor_config']['sample_interval_seconds'])

    def test_memory_in_bare_bytes_gives_a_warning(self):
        plan = plan_of('{name: w, jobs: [], resource_requirements: [{name: r, memory: 8}, {name: s, memory: 8g}]}')
        self.assertEqual(["resource_requirements 'r': memory 8 is 8 bytes: write 8m for megabytes, 8g for gigabytes"], [warning.message for warning in plan.warnings])
        self.assertEqual('8', plan.body['resource_requirements'][0]['memory'])

    def test_names_may_hold_blanks_dots_and_slashes_but_not_be_absurdly_long(self):
        self.assertEqual([], problems_of({'name': 'w', 'jobs': [{'name': 'a b/c.d é', 'command': 'c'}, {'name': 'x' * 1000, 'command': 'c'}]}))
        self.assertIn('is 1,001 characters long: 1,000 are allowed', problems_of({'name': 'w', 'jobs': [{'name': 'x' * 1001, 'command': 'c'}]})[0])
        self.assertIn('is 1,001 characters long: 1,000 are allowed', problems_of({'name': 'w', 'jobs': [{'name': '{i:>600}{i:>401}', 'command': 'c', 'parameters': {'i': '1:2'}}]})[0])

    def test_lone_surrogates_are_refused(self):
        for value in ({'name': 'w', 'jobs': [{'name': 'a', 'command': '\ud800'}]}, {'name': 'w', 'jobs': [], 'user_data': [{'name': 'u', 'data': {'x': '\udfff'}}]}):
            self.assertEqual(1, len(problems_of(value)))

    def test_old_names_are_taken_with_a_warning(self):
        plan = plan_of('{name: w, jobs_sort_method: none, metadata: \'{"a": 1}\', jobs: [{name: a, command: c, label: gpu, supports_termination: true}, '
                       '{name: b, command: c, blocked_by: [a]}], resource_requirements: [{name: r}]}')
        self.assertEqual(["workflow: jobs_sort_method has no effect: jobs are claimed by priority, then GPUs, runtime, memory and CPUs",
                          "job 'a': 'label' is an old name: write 'labels'", "job 'a': supports_termination has no effect: every job is sent the termination signal",
                          "job 'b': 'blocked_by' is an old name: write 'depends_on'"], [warning.message for warning in plan.warnings])
        self.assertEqual([[0]], plan.body['dependency_sets'])
        self.assertEqual([None, 0, None, ['gpu']], plan.body['kinds'][0])
        self.assertEqual({'a': 1}, plan.body['workflow']['metadata'])
        self.assertEqual([{'name': 'r', 'num_cpus': 1, 'num_gpus': 0, 'num_nodes': 1, 'memory': '1m', 'runtime': 'PT1H'}], plan.body['resource_requirements'])

    def test_a_rule_that_never_applies_is_told_with_its_handler(self):
        plan = plan_of('{name: w, jobs: [], failure_handlers: [{name: h, rules: [{exit_codes: [255]}, {max_retries: 2}]}]}')
        self.assertEqual(["failure_handler 'h': rule 2: never applies: give it exit_codes, or match_all_exit_codes: true"], [warning.message for warning in plan.warnings])

    def test_torcs_old_key_metrics_is_taken_with_a_notice(self):
        plan = plan_of('{name: w, jobs: [], resource_monitor: {metrics: [cpu, memory]}}')
        self.assertEqual(['resource_monitor: metrics has no effect: CPU and memory are measured, see jobs and compute_node'], [warning.message for warning in plan.warnings])
        self.assertNotIn('metrics', plan.body['workflow']['resource_monitor_config'])

    def test_what_is_not_carried_out_yet_is_told_at_once(self):
        said = 'accepted, but not in effect in this version: '
        for text, names in (
                ('execution_config: {mode: direct, limit_resources: true, oom_exit_code: 9}', '1:44: execution_config.limit_resources, execution_config.oom_exit_code'),
                ('execution_config: {limit_resources: false, timeout_exit_code: 9}', ''),
                ('resource_monitor: {}', ''), ('resource_monitor: {enabled: false, granularity: time_series}', ''),
                ('resource_monitor: {generate_plots: false, jobs: {granularity: summary}, compute_node: {enabled: false, cpu: true}}', '1:60: resource_monitor'),
                ('execution_config: {mode: slurm}', '1:30: mode: slurm'),
                ('slurm_schedulers: [{name: s, account: a}], actions: [{trigger_type: on_workflow_start, action_type: run_commands, commands: [x]}' +
                 ', {trigger_type: on_workflow_start, action_type: schedule_nodes, scheduler: s, scheduler_type: slurm}' * 2 + ']', '1:175: action_type: schedule_nodes')):
            with self.subTest(text):
                plan = plan_of('{name: w, %s, jobs: []}' % text)
                self.assertEqual(names and names.replace(': ', ': ' + said, 1), ', '.join(map(str, plan.pending)))
                self.assertEqual([], plan.warnings)

    def test_the_manual_marks_what_is_not_carried_out_yet(self):
        marks = {(field.where, field.name): torc.describe_field(field).rpartition('; not in effect yet')[1:] for field in torc.FIELDS}
        for place, mark in ((('workflow', 'resource_monitor'), ''), (('execution_config', 'limit_resources'), ''), (('resource_monitor.jobs', 'granularity'), ''),
                            (('action', 'action_type'), ': schedule_nodes'), (('execution_config', 'mode'), ': slurm')):
            self.assertEqual(('; not in effect yet', mark), marks.pop(place))
        for place in (('workflow', 'execution_config'), ('workflow', 'actions'), ('job', 'command'), ('execution_config', 'timeout_exit_code'), ('resource_monitor', 'metrics')):
            self.assertEqual('', marks[place][0], place)

    def test_tokens_add_relations_and_never_replace_listed_ones(self):
        body = plan_of({'name': 'w', 'files': [{'name': name, 'path': f'dir/{name}'} for name in 'fgh'], 'user_data': [{'name': 'u', 'data': {'k': [1, 'é']}}],
                        'jobs': [{'name': 'a', 'command': 'x ${files.input.g} ${files.input.g} ${files.output.h} ${user_data.input.u} ${HOME}', 'input_files': ['f'],
                                  'invocation_script': 'pre ${files.input.f}'}]}).body
        job = body['jobs'][0]
        self.assertEqual('x dir/g dir/g dir/h {"k":[1,"é"]} ${HOME}', job.command)
        self.assertEqual('pre dir/f', job.invocation_script)
        self.assertEqual(((0, 1), (2,), (0,), ()), (tuple(job.input_files), tuple(job.output_files), tuple(job.input_user_data), tuple(job.output_user_data)))

    def test_everything_is_expanded(self):
        body = plan_of({'name': 'w', 'parameters': {'one': [7], 'many': '1:2'}, 'env': {'A': '{one}', 'B': '{many}', 'C': '{other}'},
                        'files': [{'name': 'f{i}', 'path': '{i}.txt', 'parameters': {'i': '1:2'}}],
                        'user_data': [{'name': 'u{i}', 'data': {'k{i}': ['v{i}', 1, None]}, 'parameters': {'i': '1:2'}}],
                        'resource_requirements': [{'name': 'r1'}, {'name': 'r2'}], 'slurm_schedulers': [{'name': 's1', 'account': 'a'}, {'name': 's2', 'account': 'a'}],
                        'jobs': [{'name': 'p{i}', 'command': '${files.output.f{i}} %s {i:02d}', 'invocation_script': 's{i}', 'env': {'E': 'e{i}', 'F': 'f'}, 'parameters': {'i': '1:2'},
                                  'resource_requirements': 'r{i}', 'scheduler': 's{i}', 'stdio': {'mode': 'none'}},
                                 {'name': 'c{i}', 'command': '${user_data.input.u{i}}', 'depends_on': ['p{i}'], 'input_file_regexes': ['^f{i}$'], 'parameters': {'i': '1:2'},
                                  'labels': ['b', 'l{i}', 'b']}]}).body
        self.assertEqual({'A': '7', 'B': '1:2', 'C': '{other}'}, body['workflow']['env'])
        self.assertEqual([{'name': 'u1', 'data': {'k{i}': ['v1', 1, None]}, 'is_ephemeral': False}, {'name': 'u2', 'data': {'k{i}': ['v2', 1, None]}, 'is_ephemeral': False}], body['user_data'])
        self.assertEqual([('p1', '1.txt %s 01', 's1', {'E': 'e1', 'F': 'f'}), ('p2', '2.txt %s 02', 's2', {'E': 'e2', 'F': 'f'})], [tuple(job[:4]) for job in body['jobs'][:2]])
        self.assertEqual([[0, 0, 0, None], [1, 0, 1, None], [None, 0, None, ['b', 'l1']], [None, 0, None, ['b', 'l2']]], body['kinds'])
        self.assertEqual([[0], [1]], body['dependency_sets'])
        self.assertEqual([(0,), (1,)], [tuple(job.input_files) for job in body['jobs'][2:]])
        self.assertEqual({'p1': {'mode': 'none'}, 'p2': {'mode': 'none'}}, body['workflow']['execution_config']['job_stdio_overrides'])

    def test_values_in_regular_expressions_are_escaped(self):
        spec = {'name': 'w', 'jobs': [{'name': name, 'command': 'c'} for name in ('v1.5', 'v1x5')] +
                [{'name': 'c{v}', 'command': 'c', 'depends_on_regexes': ['^v{v}$'], 'parameters': {'v': [1.5]}}]}
        self.assertEqual([[0]], plan_of(spec).body['dependency_sets'])

    def test_regular_expressions_match_as_pythons_do_whatever_they_begin_with(self):
        names = ['a', 'ab', 'abc', 'b', 'A.b', 'a+b', 'x ab', 'aab']
        for pattern in ('^a', '^ab$', '^ab*', '^ab?', '^ab+', '^a|b', '^(a)', 'b$', '^a\\+b$', '(?i)^a', '^a{2}', '^ab{0}', '^A\\.', '^', '^a.', '\\Aab', '^(?P<x>a)b'):
            jobs = [{'name': name, 'command': 'c'} for name in names] + [{'name': '~', 'command': 'c', 'depends_on_regexes': [pattern]}]
            if re.search(pattern, '~') is None:
                self.assertEqual([[place for place, name in enumerate(names) if re.search(pattern, name)]], plan_of({'name': 'w', 'jobs': jobs}).body['dependency_sets'], pattern)

    def test_what_many_jobs_share_stands_once(self):
        spec = {'name': 'w', 'jobs': [{'name': 'a{i}', 'command': 'c', 'parameters': {'i': '1:300'}}, {'name': 'b{i}', 'command': 'c', 'depends_on_regexes': ['^a'], 'parameters': {'i': '1:300'}}] +
                [{'name': f'c{n}', 'command': 'c', 'depends_on_regexes': ['^a']} for n in range(3)]}
        body = plan_of(spec).body
        self.assertEqual([list(range(300))], body['dependency_sets'])
        self.assertEqual({0}, {job.dependencies for job in body['jobs'][300:]})
        self.assertEqual([[None, 0, None, None]], body['kinds'])

    def test_variables_are_replaced_everywhere_in_one_pass(self):
        body = plan_of('{name: "{site} run", variables: {site: "x{{y", n: "1:2", dir: "${HOME}/d"}, description: "at {site:>9} ${site}", '
                       'jobs: [{name: "j{i}", command: "{dir} {i}", parameters: {i: "{n}"}}], slurm_schedulers: [{name: s, account: "{site}"}], '
                       'user_data: [{name: u, data: {variables: "{site}"}}]}').body
        self.assertEqual(('x{{y run', 'at x{{y ${site}'), (body['workflow']['name'], body['workflow']['description']))
        self.assertEqual(['${HOME}/d 1', '${HOME}/d 2'], [job.command for job in body['jobs']])
        self.assertEqual(('x{{y', {'variables': 'x{{y'}), (body['slurm_schedulers'][0]['account'], body['user_data'][0]['data']))

    def test_braces_that_name_no_parameter_are_left_with_a_warning(self):
        plan = plan_of({'name': 'w', 'jobs': [{'name': 'j{i}', 'command': "awk '{print}' {i} ${x} { y } {a,b} {seed}", 'parameters': {'i': '1:2'}}]})
        self.assertEqual(["job 'j{i}': command holds {print}, which is no parameter and stays as it is", "job 'j{i}': command holds {seed}, which is no parameter and stays as it is"],
                         [warning.message for warning in plan.warnings])
        self.assertEqual("awk '{print}' 1 ${x} { y } {a,b} {seed}", plan.body['jobs'][0].command)

    def test_the_monitor_is_on_unless_it_is_switched_off(self):
        on = {'enabled': True, 'granularity': 'summary', 'jobs': {'enabled': True, 'granularity': 'summary'}, 'compute_node': None, 'sample_interval_seconds': 10,
              'flush_interval_seconds': 300, 'generate_plots': False}
        for text, wanted in (('', on), (', resource_monitor: {}', on), (', resource_monitor: {sample_interval_seconds: 2}', dict(on, sample_interval_seconds=2)),
                             (', resource_monitor: {enabled: false}', dict(on, enabled=False, jobs=None)),
                             (', resource_monitor: {granularity: time_series}', dict(on, granularity='time_series', jobs=None)),
                             (', resource_monitor: {jobs: {enabled: false}}', dict(on, enabled=False, jobs={'enabled': False, 'granularity': 'summary'}))):
            self.assertEqual(wanted, plan_of('{name: w, jobs: []' + text + '}').body['workflow']['resource_monitor_config'], text)

    def test_times_of_inputs_are_asked_of_the_file_system(self):
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, 'f')
            with open(path, 'w'):
                os.utime(path, (5, 5))
            files = [{'name': 'f', 'path': path}, {'name': 'g', 'path': path + 'no'}, {'name': 'h', 'path': path + '2', 'st_mtime': 7}, {'name': 'o', 'path': directory}]
            body = plan_of({'name': 'w', 'jobs': [{'name': 'a', 'command': 'c', 'input_files': ['f', 'g', 'h'], 'output_files': ['o']}], 'files': files}).body
            self.assertEqual([5, None, 7, None], [row.get('st_mtime') for row in body['files']])

    def test_the_summary_has_torcs_keys(self):
        recorded = next(row for row in read_shared('torc/cli_json.json') if row['command'] == 'create SPEC --dry-run')['stdout']['summary']
        plan = plan_of('{name: w, jobs: [{name: "j{i}", command: c, parameters: {i: "1:3"}}]}')
        self.assertEqual(set(recorded), set(plan.summary))
        self.assertEqual((3, 1, ['j1', 'j2', 'j3'], False), tuple(plan.summary[key] for key in ('job_count', 'job_count_before_expansion', 'job_names', 'has_schedule_nodes_action')))
        with self.assertRaises(torc.BadInput) as caught:
            plan_of('{name: w, jobs: [{name: a, command: c}], x: 1}')
        self.assertEqual(1, caught.exception.details['summary']['job_count'])

    def test_a_plan_travels_as_json(self):
        body = plan_of('{name: w, jobs: [{name: "j{i}", command: c, parameters: {i: "1:3"}}]}').body
        self.assertEqual(body['jobs'], [torc.PlannedJob(*row) for row in json.loads(json.dumps(body))['jobs']] and body['jobs'])
        self.assertEqual('j3', torc.PlannedJob(*json.loads(json.dumps(body))['jobs'][2]).name)

    def test_entangled_circles_are_told_once_and_separate_ones_each(self):
        jobs = [{'name': f'{letter}{n}', 'command': 'c', 'depends_on_regexes': [f'^{other}{"" if letter != "s" else n}']} for letter, other in ('ab', 'ba') for n in range(50)]
        self.assertEqual(["1:24: job 'a0': waits for itself: a0 -> b0 -> a0"], problems_of({'name': 'w', 'jobs': jobs}))
        jobs = [{'name': f'x{n}', 'command': 'c', 'depends_on': [f'x{n ^ 1}']} for n in range(4)]
        self.assertEqual(2, len(problems_of({'name': 'w', 'jobs': jobs})))


class ExecutionPlanTest(unittest.TestCase):
    """In which order jobs become ready."""

    def events(self, spec: Any) -> List[Tuple[str, List[str], List[str], List[str]]]:
        """Id, jobs that become ready, events before, schedulers of each event."""
        plan = torc.file_plan(plan_of(spec).body)
        self.assertEqual(plan['total_events'], len(plan['events']))
        return [(event['id'], event['jobs_becoming_ready'], event['depends_on_events'], [row['scheduler'] for row in event['scheduler_allocations']]) for event in plan['events']]

    def test_a_diamond_by_files(self):
        spec = {'name': 'w', 'files': [{'name': name, 'path': name} for name in 'fgh'], 'jobs': [
            {'name': 'pre', 'command': '${files.output.f}'}, {'name': 'work_1', 'command': '${files.input.f} ${files.output.g}'},
            {'name': 'work_2', 'command': '${files.input.f} ${files.output.h}'}, {'name': 'post', 'command': '${files.input.g} ${files.input.h}'}]}
        self.assertEqual([('start', ['pre'], [], []), ('after_pre', ['work_1', 'work_2'], ['start'], []), ('after_work_jobs', ['post'], ['after_pre'], [])], self.events(spec))

    def test_ids_are_unique(self):
        jobs = [{'name': f'job_{n}', 'command': 'c'} for n in range(4)]
        jobs += [{'name': 'x', 'command': 'c', 'depends_on': ['job_0', 'job_1']}, {'name': 'y', 'command': 'c', 'depends_on': ['job_2', 'job_3']},
                 {'name': 'z', 'command': 'c', 'depends_on': ['x', 'job_0', 'y']}]
        self.assertEqual(['start', 'after_job_jobs', 'after_job_jobs_2', 'after_job_0_and_2_more'], [event[0] for event in self.events({'name': 'w', 'jobs': jobs})])

    def test_an_action_fires_when_all_of_its_jobs_are_ready(self):
        spec = {'name': 'w', 'slurm_schedulers': [{'name': name, 'account': 'a'} for name in 'rst'],
                'jobs': [{'name': 'a', 'command': 'c'}, {'name': 'b', 'command': 'c', 'depends_on': ['a']}, {'name': 'c', 'command': 'c', 'depends_on': ['b']}],
                'actions': [{'trigger_type': 'on_workflow_start', 'action_type': 'schedule_nodes', 'scheduler': 'r', 'scheduler_type': 'slurm'},
                            {'trigger_type': 'on_jobs_ready', 'jobs': ['a', 'b'], 'action_type': 'schedule_nodes', 'scheduler': 's', 'scheduler_type': 'slurm'},
                            {'trigger_type': 'on_jobs_complete', 'jobs': ['a'], 'action_type': 'schedule_nodes', 'scheduler': 't', 'scheduler_type': 'slurm'}]}
        self.assertEqual([('start', ['a'], [], ['r']), ('after_a', ['b'], ['start'], ['s']), ('after_b', ['c'], ['after_a'], [])], self.events(spec))

    def test_the_document_has_torcs_keys(self):
        recorded = next(row for row in read_shared('torc/cli_json.json') if row['command'] == 'workflows execution-plan SPEC')['stdout']
        plan = dict(torc.file_plan(plan_of('{name: w, jobs: [{name: a, command: c}]}').body), status='success')
        self.assertEqual(set(recorded), set(plan))
        self.assertEqual(set(recorded['events'][0]), set(plan['events'][0]))
        self.assertEqual(recorded['events'][0]['trigger'], plan['events'][0]['trigger'])

    def test_jobs_of_a_circle_are_in_no_event(self):
        plan = torc.execution_plan(['a', 'b', 'c'], [[], [2], [1]], [])
        self.assertEqual([['a']], [event['jobs_becoming_ready'] for event in plan['events']])

    def test_it_takes_linear_time(self):
        many = 20000
        names = [f'job_{number}' for number in range(2 * many)]
        start, barrier = frozenset(), frozenset(range(many))
        chain = [start] + [frozenset((number - 1, number // 2)) for number in range(1, 2 * many)]
        gates = torc.Allocation('on_jobs_ready', range(many), {'scheduler': 's'})
        for needs, count in (([start] * many + [barrier] * many, 2), (chain, 2 * many)):
            started = time.process_time()
            plan = torc.execution_plan(names, needs, [gates])
            self.assertLess(time.process_time() - started, 10)
            self.assertEqual(count, len({event['id'] for event in plan['events']}))
            made = [row for event in plan['events'] for row in event['scheduler_allocations']]
            self.assertEqual([many if count == 2 else 1], [len(row['job_names']) for row in made])


class FieldsTest(unittest.TestCase):
    """The table of fields and what is made of it."""

    def test_every_row_is_sound(self):
        rows = collections.Counter((field.where, field.name) for field in torc.FIELDS)
        self.assertEqual([], [row for row, count in rows.items() if count > 1])
        for field in torc.FIELDS:
            self.assertIn(field.where, torc.BLOCKS)
            self.assertIn(field.type, torc.TYPES)
            self.assertTrue(field.help)

    def test_defaults_are_those_of_the_vocabulary(self):
        for name, value in torc.WORKFLOW_DEFAULTS.items():
            self.assertEqual(value, torc.FIELDS_OF['workflow'][name].default, name)
        for name, value in torc.EXECUTION_DEFAULTS.items():
            if not isinstance(value, dict):
                self.assertEqual(value, torc.FIELDS_OF['execution_config'][name].default, name)
        self.assertEqual(set(torc.EXECUTION_DEFAULTS), set(torc.FIELDS_OF['execution_config']))
        self.assertEqual(torc.DEFAULT_MAX_RETRIES, torc.FIELDS_OF['rule']['max_retries'].default)

    def test_help_and_reference_name_every_field(self):
        texts = (torc.format_field_help(), format_field_markdown())
        for field in torc.FIELDS:
            for text in texts:
                self.assertIn(field.name, text)
                self.assertIn(field.help.replace('|', '\\|') if text is texts[1] else field.help, text)
        self.assertLess(max(map(len, texts[0].splitlines())), 121)

    def test_parameter_help_says_where_they_work(self):
        text = torc.format_parameter_help()
        for name in ('input_file_regexes', 'data', '--max-instances', '1,000,000'):
            self.assertIn(name, text)


# ======== 7. Store ========

class StoreTest(unittest.TestCase):
    """A database in a directory of its own, and a clock that stands still."""

    def setUp(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="torc's store ")
        self.addCleanup(shutil.rmtree, self.directory)
        self.path = os.path.join(self.directory, 'torc.db')
        self.clock = 1700000000.0

    def open(self) -> Any:
        store = torc.Store(self.path, lambda: self.clock)
        self.addCleanup(store.close)
        return store

    def test_a_new_database_is_private_whatever_the_umask(self):
        before = os.umask(0)
        self.addCleanup(os.umask, before)
        store = self.open()
        with store.transaction():
            store.insert('workflow', {'name': 'w', 'user': 'u', 'timestamp': 't'})
        modes = {name: oct(os.stat(os.path.join(self.directory, name)).st_mode & 0o777) for name in os.listdir(self.directory)}
        self.assertEqual({'0o600'}, set(modes.values()), modes)

    def test_a_database_that_others_may_change_is_refused_and_one_that_they_may_read_made_private(self):
        self.open().close()
        for mode, is_good in ((0o644, True), (0o640, True), (0o622, False), (0o602, False)):
            os.chmod(self.path, mode)
            with self.subTest(mode=oct(mode)):
                if is_good:
                    torc.Store(self.path).close()
                    self.assertEqual(0o600, os.stat(self.path).st_mode & 0o777)
                else:
                    self.assertRaisesRegex(torc.Denied, 'chmod go-w', torc.Store, self.path)
        os.chmod(self.path, 0o600)
        os.link(self.path, self.path + '2')
        self.assertRaisesRegex(torc.Denied, 'hard link', torc.Store, self.path)

    def test_answers_are_on_disk_before_they_are_given(self):
        store = self.open()
        self.assertIn(store.value('PRAGMA trusted_schema'), (0, None))
        self.assertEqual(('wal', 2, 'exclusive'), (store.value('PRAGMA journal_mode'), store.value('PRAGMA synchronous'),
                                                    store.value('PRAGMA locking_mode')))

    def test_a_second_opener_is_refused_while_the_first_lives(self):
        store = self.open()
        with self.assertRaises(torc.Conflict) as caught:
            torc.Store(self.path)
        self.assertIn('in use by another torc.py', caught.exception.message)
        code = 'import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute("BEGIN IMMEDIATE")'
        other = subprocess.run([sys.executable, '-c', code, self.path], stderr=subprocess.PIPE)
        self.assertIn(b'database is locked', other.stderr)      # looking at it did not drop our locks
        store.close()
        torc.Store(self.path).close()

    def test_an_older_database_is_migrated_with_a_copy_kept(self):
        store = self.open()
        with store.transaction():
            store.insert('workflow', {'name': 'old', 'user': 'u', 'timestamp': 't'})
        store.close()
        newer = torc.SCHEMA_VERSION + 1
        with unittest.mock.patch.object(torc, 'SCHEMA_VERSION', newer), \
                unittest.mock.patch.dict(torc.MIGRATIONS, {newer: 'ALTER TABLE workflow ADD COLUMN colour TEXT;'}):
            os.mkdir(f'{self.path}.v{newer - 1}')       # no copy, no migration
            self.assertRaisesRegex(torc.BadInput, 'cannot write .*: Is a directory.* --db', self.open)
            os.rmdir(f'{self.path}.v{newer - 1}')
            store = self.open()
            self.assertIn('colour', [column.name for column in store.columns('workflow')])
            self.assertEqual((newer, ['old']), (store.value('PRAGMA user_version'), store.ids('SELECT name FROM workflow')))
        copy = f'{self.path}.v{newer - 1}'
        self.assertEqual(0o600, os.stat(copy).st_mode & 0o777)
        with contextlib.closing(torc.Store(copy)) as store:
            self.assertEqual(['old'], store.ids('SELECT name FROM workflow'))

    # What MIGRATIONS add, as SCHEMA has it.
    ADDED_SINCE_1 = (r'\n    reason            TEXT,.*', r'\n    is_interrupted    BOOL INTEGER.*',
                     r'(?s)CREATE TABLE identity .*?INSERT INTO identity [^\n]*\n',
                     r'\n    is_declared .*', r',\n    is_run_zero .*\n    spec_path .*',
                     r'\nCREATE INDEX job_by_name .*',
                     r',\n    failure           TEXT .*')

    def open_first_version(self, rows: str) -> Any:
        """A database of the first version with these rows, opened by today's program."""
        old = torc.SCHEMA
        for pattern in self.ADDED_SINCE_1:
            old, count = re.subn(pattern, '', old)
            self.assertGreater(count, 0, pattern)
        with contextlib.closing(sqlite3.connect(self.path)) as connection:
            connection.executescript(old + rows + 'PRAGMA user_version = 1;')
        return self.open()

    def test_the_first_version_migrates_to_what_a_new_database_has(self):
        def described(store: Any) -> Dict[str, Any]:
            names = store.ids("SELECT name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'")
            return {name: {row[1:] for row in store.rows(f'PRAGMA table_info({name})')} for name in names}

        with contextlib.closing(torc.Store(self.path + '.new')) as new:
            self.assertEqual(described(new), described(self.open_first_version('')))

    def test_a_database_of_the_first_version_goes_on_and_keeps_reasons(self):
        store = self.open_first_version('''
            INSERT INTO workflow (name, user, timestamp, run_id) VALUES ('old', 'u', 't', 1);
            INSERT INTO job (workflow_id, name, command, kind_id, status) VALUES (1, 'a', 'false', 1, 6);
            INSERT INTO result (workflow_id, job_id, run_id, compute_node_id, return_code,
                                exec_time_minutes, completion_time, status)
                VALUES (1, 1, 1, 1, 3, 0, 't', 6);
            ''')
        self.assertEqual('return code 3', torc.explain_job(store, 1)['reason'])
        with store.transaction():
            torc.update_row(store, 'result', 1, {'reason': 'no luck'})
        row = torc.read_row(store, 'result', 1)
        self.assertEqual(('no luck', 'a'), (row['reason'], row['job_name']))
        with contextlib.closing(torc.Store(self.path + '.new')) as new:
            self.assertEqual(new.columns('result'), store.columns('result'))

    def test_a_database_of_the_first_version_knows_its_runs_by_one_number(self):
        store = self.open_first_version("INSERT INTO workflow (name, user, timestamp, run_id) VALUES ('begun', 'u', 't', 1), "
                                        "('new', 'u', 't', 0);")
        columns = [column.name for column in store.columns('workflow')]
        with contextlib.closing(torc.Store(os.path.join(self.directory, 'fresh.db'))) as fresh:
            self.assertEqual(columns, [column.name for column in fresh.columns('workflow')])
        with store.transaction():
            torc.initialize_jobs(store, 2)
            states = [torc.workflow_state(store, number) for number in (1, 2)]
            self.assertEqual([(1, False), (1, True)], [(state.run_id, state.is_run_zero) for state in states])

    def test_a_database_and_its_copies_have_one_identity_and_no_other_has_it(self):
        first = self.identity(self.path)
        self.assertRegex(first, r'\A[0-9a-f]{32}\Z')
        with contextlib.closing(torc.Store(self.path)) as store:
            store.copy_to(self.path + '.copy')
            torc.keep_copy(store._db, self.path + '.kept')
        self.assertEqual([first] * 3, [self.identity(path) for path in (self.path, self.path + '.copy', self.path + '.kept')])
        self.assertNotEqual(first, self.identity(self.path + '.new'))

    def test_a_database_without_an_identity_gets_one_and_keeps_it(self):
        self.open_first_version('').close()
        self.assertEqual(1, len({self.identity(self.path) for _ in range(2)}))
        self.assertTrue(os.path.exists(self.path + '.v1'))

    @staticmethod
    def identity(path: str) -> str:
        """What tells a database from others."""
        with contextlib.closing(torc.Store(path)) as store:
            return torc.get_database(store)['id']

    def test_while_it_is_frozen_the_main_file_is_whole_and_stays_as_it_is(self):
        store = self.open()

        def add(count: int) -> None:
            with store.transaction():
                for _ in range(count):
                    store.insert('workflow', {'name': 'x' * 4000, 'user': 'u', 'timestamp': 't'})
        add(3)
        self.assertTrue(store.freeze())
        copy = self.path + '.copy'
        torc.copy_descriptor(store.main_file(), copy)
        before = os.pread(store.main_file(), 10 ** 8, 0)
        for _ in range(6):
            add(1000)           # 6,000 pages of 4 KiB: more than would be checkpointed otherwise
        self.assertEqual(before, os.pread(store.main_file(), 10 ** 8, 0))
        self.assertEqual([('ok', 3)], ask_sqlite(copy, 'SELECT (SELECT * FROM pragma_integrity_check), count(*) FROM workflow'))
        store.thaw()
        add(1)
        self.assertNotEqual(before, os.pread(store.main_file(), 10 ** 8, 0))
        code = 'import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute("BEGIN IMMEDIATE")'
        other = subprocess.run([sys.executable, '-c', code, self.path], stderr=subprocess.PIPE)
        self.assertIn(b'database is locked', other.stderr)      # reading it did not drop our locks

    def test_rows_of_a_database_of_the_first_version_count_as_the_files(self):
        store = self.open_first_version('''
            INSERT INTO workflow (name, user, timestamp) VALUES ('w', 'u', 't');
            INSERT INTO resource_requirements (workflow_id, name, memory_bytes, runtime_s)
                VALUES (1, 'r', 1, 1);
            INSERT INTO slurm_scheduler (workflow_id, account) VALUES (1, 'a');
            INSERT INTO failure_handler (workflow_id, name, rules) VALUES (1, 'h', '[]');
            INSERT INTO job (workflow_id, name, command, kind_id)
                VALUES (1, 'a', 'c', 1), (1, 'spawned', 'c', 1);
            INSERT INTO spawn (job_id, workflow_id, caller_id, lineage, generation) VALUES (2, 1, 1, 'a', 1);
            INSERT INTO file (workflow_id, name, path) VALUES (1, 'f', 'p');
            INSERT INTO user_data (workflow_id, name) VALUES (1, 'd'), (1, '__torc_lineage__a__g000001');
            INSERT INTO workflow_action (workflow_id, trigger_type, action_type, action_config, is_recovery)
                VALUES (1, 'on_workflow_start', 'run_commands', '{}', 0),
                       (1, 'on_workflow_start', 'run_commands', '{}', 1);
            ''')
        tables = ('resource_requirements', 'slurm_scheduler', 'failure_handler', 'job', 'file', 'user_data',
                  'workflow_action')
        declared = {table: store.ids(f'SELECT id FROM {table} WHERE is_declared = 1') for table in tables}
        self.assertEqual(dict.fromkeys(tables, [1]), declared)
        with contextlib.closing(torc.Store(self.path + '.new')) as new:
            for table in ('workflow', *tables):
                self.assertEqual(sorted(new.columns(table)), sorted(store.columns(table)), table)

    def test_a_transaction_happens_whole_or_not_at_all(self):
        store = self.open()
        with self.assertRaises(ZeroDivisionError), store.transaction():
            store.insert('workflow', {'name': 'w', 'user': 'u', 'timestamp': 't'})
            raise ZeroDivisionError
        self.assertEqual(0, store.value('SELECT count(*) FROM workflow'))

    def test_a_savepoint_takes_back_only_its_own_changes(self):
        store = self.open()
        with store.transaction():
            store.insert('workflow', {'name': 'kept', 'user': 'u', 'timestamp': 't'})
            with self.assertRaises(ZeroDivisionError), store.savepoint():
                store.insert('workflow', {'name': 'lost', 'user': 'u', 'timestamp': 't'})
                raise ZeroDivisionError
        self.assertEqual(['kept'], store.ids('SELECT name FROM workflow'))

    def test_declared_types_say_how_values_are_spoken(self):
        store = self.open()
        with store.transaction():
            number = store.insert('workflow', {'name': 'w', 'user': 'u', 'timestamp': 't', 'metadata': {'a': [1, None]}, 'is_canceled': True})
        row = store.select('workflow', 'WHERE id = ?', (number,))[0]
        self.assertEqual(({'a': [1, None]}, True, False), (row['metadata'], row['is_canceled'], row['is_archived']))
        self.assertNotIn('description', row)

    def test_files_that_are_no_databases_of_ours_are_refused(self):
        def text() -> None:
            with open(self.path, 'w') as file:
                file.write('no database ' * 100)

        def table(name: str) -> Callable[[], None]:
            def make() -> None:
                with contextlib.closing(sqlite3.connect(self.path)) as connection:
                    connection.execute(f'CREATE TABLE {name} (x)')
            return make

        def newer() -> None:
            with contextlib.closing(sqlite3.connect(self.path)) as connection:
                connection.execute('PRAGMA user_version = 99')
        for make, message in ((text, 'is not a torc.py database'), (table('stranger'), 'database of another program'),
                              (table('_sqlx_migrations'), "database of Torc's own server"), (newer, 'made by a newer torc.py')):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
            make()
            with open(self.path, 'rb') as file:
                before = file.read()
            with self.subTest(message), self.assertRaises(torc.BadInput) as caught:
                torc.Store(self.path)
            self.assertIn(message, caught.exception.message)
            with open(self.path, 'rb') as file:
                self.assertEqual(len(before), len(file.read()))

    def test_an_empty_file_is_a_new_database(self):
        open(self.path, 'w').close()
        self.assertEqual(torc.SCHEMA_VERSION, self.open().value('PRAGMA user_version'))

    def test_a_file_that_was_removed_or_replaced_takes_no_more(self):
        for change in (os.unlink, lambda path: os.replace(shutil.copy(path, path + '.copy'), path)):
            store = self.open()
            change(self.path)
            with self.assertRaises(torc.Conflict) as caught, store.transaction():
                self.fail('the block must not run')
            self.assertIn('was removed or replaced', caught.exception.message)
            store.close()

    def test_a_missing_directory_is_a_clear_error(self):
        with self.assertRaises(torc.BadInput) as caught:
            torc.Store(os.path.join(self.directory, 'nowhere', 'torc.db'))
        self.assertIn('No such file or directory', caught.exception.message)

    def test_every_table_dies_with_its_workflow(self):
        store = self.open()
        tables = store.ids("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
        own = {'workflow', 'access_group', 'admin_audit_log', 'identity'}      # of the server, not of a workflow
        for table in set(tables) - own:
            parents = {row[2] for row in store.rows(f'PRAGMA foreign_key_list({table})') if row[6] == 'CASCADE'}
            self.assertTrue(parents, table)


# ======== 8. Service ========

@contextlib.contextmanager
def http_connection(url: str) -> Iterator[Any]:
    """Python's own HTTP client, on a server."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
    try:
        yield connection
    finally:
        connection.close()


def silenced(test: unittest.TestCase) -> None:
    """No log lines for the rest of a test."""
    logging.getLogger('torc').setLevel(logging.CRITICAL + 1)
    test.addCleanup(logging.getLogger('torc').setLevel, logging.NOTSET)


class ServiceTest(unittest.TestCase):
    """Verbs on a Store, without sockets or processes; the clock stands still until the test moves it."""

    def setUp(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="torc's service ")
        self.addCleanup(shutil.rmtree, self.directory)
        self.clock = 1700000000.0
        self.store = torc.Store(os.path.join(self.directory, 'torc.db'), lambda: self.clock)
        self.store.caller = 'tester'
        self.addCleanup(self.store.close)

    def call(self, name: str, body: Any = None, **parameters: Any) -> Any:
        with self.store.transaction():
            answer = torc.call_operation(self.store, name, parameters, body)
        if not isinstance(answer, torc.TorcError):
            promised = '@TaskModel' if parameters.get('async') else torc.answer_type(torc.OPERATIONS[name])
            torc.check_value(name, promised, json.loads(json.dumps(answer)))
        return answer

    def ask(self, method: str, path: str, body: Any = None, query: str = '') -> Tuple[int, Any]:
        data = body if isinstance(body, bytes) else b'' if body is None else json.dumps(body).encode()
        with self.store.transaction():
            return torc.answer_request(self.store, method, torc.API_PREFIX + path, query, data, 'tester')

    def create(self, jobs: str, **more: Any) -> int:
        """A workflow from lines 'name: prerequisites'; a name ending in ! does not mind failures. Initialized."""
        names = [line.split(':')[0].strip() for line in jobs.strip().splitlines()]
        needs = [line.partition(':')[2].split() for line in jobs.strip().splitlines()]
        plain = [name.rstrip('!') for name in names]
        sets = [[plain.index(need) for need in row] for row in needs]
        planned = [torc.PlannedJob(
            name.rstrip('!'), more.get('command', 'true'), None, None, 0, place if sets[place] else None, more.get('handler'),
            not name.endswith('!'), False, [], [], [], []) for place, name in enumerate(names)]
        body = {'workflow': dict({'name': 'w', 'user': 'u'}, **more.get('workflow', {})), 'files': [], 'user_data': [], 'resource_requirements': [],
                'slurm_schedulers': [], 'failure_handlers': more.get('handlers', []), 'kinds': [[None, 0, None, None]],
                'dependency_sets': sets, 'jobs': planned, 'actions': more.get('actions', [])}
        workflow_id = self.call('create_workflow_from_spec', body)['workflow_id']
        self.call('initialize_jobs', id=workflow_id)
        return workflow_id

    def node(self, workflow_id: int, **more: Any) -> int:
        body = dict(workflow_id=workflow_id, hostname='h', pid=1, start_time='2026-01-01T00:00:00Z', num_cpus=4, memory_gb=8.0,
                    num_gpus=0, num_nodes=1, compute_node_type='local', is_active=True, lease_s=60.0)
        return self.call('create_compute_node', dict(body, **more))['id']

    def sync(self, workflow_id: int, node_id: int, **more: Any) -> Any:
        run_id = self.call('get_workflow', id=workflow_id)['run_id']
        return self.call('runner_sync', dict({'compute_node_id': node_id, 'run_id': run_id, 'lease_s': 60.0}, **more), id=workflow_id)

    def claim(self, workflow_id: int, node_id: int, limit: int = 100) -> Dict[str, Dict[str, Any]]:
        jobs = self.sync(workflow_id, node_id, want={'strategy': 'queue', 'limit': limit})['jobs']
        return {job['name']: job for job in jobs}

    @staticmethod
    def end(job: Dict[str, Any], status: str = 'completed', code: int = 0, **more: Any) -> Dict[str, Any]:
        return dict({'job_id': job['id'], 'attempt_id': job['attempt_id'], 'return_code': code, 'status': status,
                     'exec_time_minutes': 0.5, 'completion_time': '2026-01-01T00:10:00.000Z'}, **more)

    def statuses(self, workflow_id: int) -> Dict[str, str]:
        return {job['name']: job['status'] for job in self.call('list_jobs', workflow_id=workflow_id)['items']}

    def drive(self, workflow_id: int, ends: Dict[str, str]) -> Dict[str, str]:
        """Run everything that gets ready, each job ending as told (completed if not told); the statuses at the end."""
        node_id = self.node(workflow_id)
        claimed = self.claim(workflow_id, node_id)
        while claimed:
            for name, job in claimed.items():
                status = ends.get(name, 'completed')
                answer = self.sync(workflow_id, node_id, completions=[self.end(job, status, int(status != 'completed'))])
                self.assertEqual([], answer['errors'])
            claimed = self.claim(workflow_id, node_id)
        return self.statuses(workflow_id)

    def assertRefused(self, text: str, name: str, body: Any = None, **parameters: Any) -> None:
        with self.assertRaises(torc.TorcError) as caught:
            self.call(name, body, **parameters)
        self.assertIn(text, caught.exception.message)
        self.assertIn(caught.exception.http, (400, 404, 409, 422))

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """What happens in the block is taken back."""
        transaction = self.store.transaction
        self.store.transaction = self.store.savepoint   # type: ignore
        try:
            with contextlib.suppress(ZeroDivisionError), transaction():
                yield
                raise ZeroDivisionError
        finally:
            self.store.transaction = transaction        # type: ignore

    def dump(self) -> List[str]:
        """Every row of the database as text."""
        tables = self.store.ids("SELECT name FROM sqlite_master WHERE type = 'table'")
        return [f'{table}: {row}' for table in tables for row in self.store.rows(f'SELECT * FROM {table}')]

    def assertUnchanged(self, before: List[str]) -> None:
        """The database is what it was."""
        self.assertEqual([], sorted(set(before) ^ set(self.dump())))

    def assertWhole(self) -> None:
        """The counters agree with what they count."""
        rows = self.store.rows('SELECT id, workflow_id, pending, failed FROM dep_set ORDER BY id')
        with self.store.transaction():
            for workflow_id in {row[1] for row in rows}:
                torc.recount_sets(self.store, workflow_id)
        self.assertEqual(rows, self.store.rows('SELECT id, workflow_id, pending, failed FROM dep_set ORDER BY id'))
        self.assertEqual([], self.store.rows('PRAGMA foreign_key_check'))


class CascadeTest(ServiceTest):
    """What a job's end does to the others."""
    DIAMOND = 'a:\nb: a\nc: a\nd: b c'
    TABLE = '''
        jobs                        ends                outcome
        a: / b: a                   -                   completed completed
        a: / b: a                   a=failed            failed canceled
        a: / b: a                   a=terminated        terminated canceled
        a: / b: a                   a=pending_failed    pending_failed blocked
        a: / b!: a                  a=failed            failed completed
        a: / b: a / c: a / d: b c   a=failed            failed canceled canceled canceled
        a: / b: a / c: a / d: b c   b=failed            completed failed completed canceled
        a: / b: a / c: a / d!: b c  b=failed            completed failed completed completed
        a: / b: / c!: a b / d: c    a=failed            failed completed completed completed
        a: / b: a / c!: b / d: c    a=failed            failed canceled completed completed
        a: / b: a / c: b / d: c     -                   completed completed completed completed
        '''

    def test_every_outcome_follows_from_the_prerequisites(self):
        for row in rows_of(self.TABLE):
            with self.subTest(**row):
                workflow_id = self.create(row['jobs'].replace(' / ', '\n'))
                found = self.drive(workflow_id, dict(item.split('=') for item in row['ends'].split()))
                self.assertEqual(row['outcome'], ' '.join(found.values()))
        self.assertWhole()

    def test_a_barrier_opens_with_the_last_of_its_members(self):
        many = [f'a{i}' for i in range(30)]
        workflow_id = self.create('\n'.join([f'{name}:' for name in many] + [f"b{i}: {' '.join(many)}" for i in range(30)]))
        self.assertEqual(1, self.store.value('SELECT count(*) FROM dep_set'))
        node_id = self.node(workflow_id)
        jobs = list(self.claim(workflow_id, node_id).values())
        self.assertEqual(30, len(jobs))
        self.sync(workflow_id, node_id, completions=[self.end(job) for job in jobs[:-1]])
        self.assertEqual({}, self.claim(workflow_id, node_id))
        self.sync(workflow_id, node_id, completions=[self.end(jobs[-1])])
        self.assertEqual(30, len(self.claim(workflow_id, node_id)))

    def test_a_disabled_job_counts_as_finished_well(self):
        workflow_id = self.call('create_workflow', {'name': 'w', 'user': 'u'})['id']
        first = self.call('create_job', {'workflow_id': workflow_id, 'name': 'a', 'command': 'x'})
        self.call('create_job', {'workflow_id': workflow_id, 'name': 'b', 'command': 'x', 'depends_on_job_ids': [first['id']]})
        self.call('update_job', {'status': 'disabled'}, id=first['id'])
        self.call('initialize_jobs', id=workflow_id)
        self.assertEqual({'a': 'disabled', 'b': 'ready'}, self.statuses(workflow_id))

    def test_files_and_user_data_imply_prerequisites(self):
        workflow_id = self.call('create_workflow', {'name': 'w', 'user': 'u'})['id']
        file_id = self.call('create_file', {'workflow_id': workflow_id, 'name': 'f', 'path': 'f'})['id']
        data_id = self.call('create_user_data', {'workflow_id': workflow_id, 'name': 'd'})['id']
        self.call('create_jobs', {'jobs': [
            {'workflow_id': workflow_id, 'name': 'makes', 'command': 'x', 'output_file_ids': [file_id], 'output_user_data_ids': [data_id]},
            {'workflow_id': workflow_id, 'name': 'reads', 'command': 'x', 'input_file_ids': [file_id]},
            {'workflow_id': workflow_id, 'name': 'asks', 'command': 'x', 'input_user_data_ids': [data_id]}]})
        self.call('initialize_jobs', id=workflow_id)
        self.assertEqual({'makes': 'ready', 'reads': 'blocked', 'asks': 'blocked'}, self.statuses(workflow_id))
        self.assertEqual([('makes', 'reads'), ('makes', 'asks')], [
            (row['depends_on_job_name'], row['job_name']) for row in self.call('list_job_dependencies', id=workflow_id)['items']])

    def test_jobs_that_wait_for_each_other_are_refused_by_name(self):
        workflow_id = self.call('create_workflow', {'name': 'w', 'user': 'u'})['id']
        files = [self.call('create_file', {'workflow_id': workflow_id, 'name': name, 'path': name})['id'] for name in 'fg']
        for name, reads, makes in (('one', 0, 1), ('two', 1, 0)):
            self.call('create_job', {'workflow_id': workflow_id, 'name': name, 'command': 'x', 'input_file_ids': [files[reads]],
                                     'output_file_ids': [files[makes]]})
        self.assertRefused('one -> two -> one', 'initialize_jobs', id=workflow_id)
        self.assertEqual({'one': 'uninitialized', 'two': 'uninitialized'}, self.statuses(workflow_id))


class CompletionTest(ServiceTest):
    """Ends of attempts: once each, of the current run, of what was running."""

    def setUp(self) -> None:
        super().setUp()
        self.workflow_id = self.create('a:\nb: a')
        self.node_id = self.node(self.workflow_id)
        self.job = self.claim(self.workflow_id, self.node_id)['a']

    def finish(self, **more: Any) -> Any:
        return self.sync(self.workflow_id, self.node_id, completions=[dict(self.end(self.job), **more)])

    def test_the_same_end_again_gets_the_same_answer_and_changes_nothing(self):
        for _ in range(3):
            answer = self.finish()
            self.assertEqual(([[self.job['id'], 1, 'completed']], []), (answer['accepted'], answer['errors']))
        self.assertEqual(1, self.call('list_results', workflow_id=self.workflow_id, all_runs=True)['total_count'])
        self.assertWhole()

    def test_another_end_of_an_ended_attempt_is_refused(self):
        self.finish()
        answer = self.finish(status='failed', return_code=3)
        self.assertEqual([], answer['accepted'])
        self.assertIn('is already complete, as completed with return code 0', answer['errors'][0]['message'])
        self.assertEqual('completed', self.statuses(self.workflow_id)['a'])

    def entry(self, job: Dict[str, Any], **more: Any) -> Dict[str, Any]:
        """A line of batch_complete_jobs, as a journal has it."""
        result = dict(dict(self.end(job), workflow_id=self.workflow_id, run_id=1, compute_node_id=self.node_id), **more)
        return {'job_id': job['id'], 'status': result['status'], 'run_id': result['run_id'], 'result': result}

    def post(self, way: str, entry: Dict[str, Any]) -> str:
        """Report an end in one of three ways; '' or why it was refused."""
        if way == 'runner_sync':
            completion = {key: value for key, value in entry['result'].items() if key not in ('workflow_id', 'run_id', 'compute_node_id')}
            body = {'compute_node_id': entry['result']['compute_node_id'], 'run_id': entry['run_id'], 'completions': [completion]}
            errors = self.call('runner_sync', body, id=self.workflow_id)['errors']
        elif way == 'batch_complete_jobs':
            errors = self.call(way, {'completions': [entry]}, id=self.workflow_id)['errors']
        else:
            try:
                self.call(way, entry['result'], job_id=entry['job_id'], status=entry['status'], run_id=entry['run_id'])
                return ''
            except torc.TorcError as error:
                errors = [{'message': error.message}]
        return errors[0]['message'] if errors else ''

    WAYS = ('complete_job', 'batch_complete_jobs', 'runner_sync')

    def test_the_end_of_what_nobody_has_claimed_is_taken_in_once_with_all_that_follows(self):
        self.workflow_id = self.create('a:\nb: a\nc: b\nd: b')
        self.node_id = self.node(self.workflow_id)
        jobs = {job['name']: job for job in self.call('list_jobs', workflow_id=self.workflow_id)['items']}
        action = {'workflow_id': self.workflow_id, 'action_type': 'run_commands', 'action_config': {'commands': ['x']}}
        for trigger in ('on_jobs_ready', 'on_jobs_complete'):
            self.call('create_workflow_action', dict(action, trigger_type=trigger, job_ids=[jobs['b']['id']]), id=self.workflow_id)
        for way in self.WAYS:
            for status, first, then in (
                    ('ready', 'a', {'a': 'completed', 'b': 'ready', 'c': 'blocked', 'd': 'blocked'}),
                    ('blocked', 'b', {'a': 'ready', 'b': 'completed', 'c': 'ready', 'd': 'ready'}),
                    ('uninitialized', 'b', {'a': 'uninitialized', 'b': 'completed', 'c': 'uninitialized', 'd': 'uninitialized'})):
                with self.subTest(way, status=status), self.undone():
                    if status == 'uninitialized':
                        self.call('reset_job_status', id=self.workflow_id)
                    self.assertEqual(status, self.statuses(self.workflow_id)[first])
                    for _ in range(2):
                        self.assertEqual('', self.post(way, self.entry(jobs[first])))
                        self.assertEqual(then, self.statuses(self.workflow_id))
                        self.assertWhole()
                    self.assertIn('is already complete', self.post(way, self.entry(jobs[first], return_code=7)))
                    self.assertEqual(1, self.call('list_results', workflow_id=self.workflow_id, all_runs=True)['total_count'])
                    due = [action['trigger_type'] for action in self.call('get_pending_actions', id=self.workflow_id)]
                    self.assertEqual(['on_jobs_ready', 'on_jobs_complete'] if first == 'b' else ['on_jobs_ready'], due)
                    self.assertNotIn(first, self.claim(self.workflow_id, self.node_id))
        with self.undone():
            self.post('complete_job', self.entry(jobs['b'], status='failed', return_code=1))
            self.assertEqual({'a': 'ready', 'b': 'failed', 'c': 'canceled', 'd': 'canceled'}, self.statuses(self.workflow_id))
            self.call('retry_job', job_id=jobs['b']['id'], run_id=1, max_retries=2)
            self.assertEqual('blocked', self.statuses(self.workflow_id)['b'], 'what it waits for has yet to run')
            self.drive(self.workflow_id, {})
            self.assertEqual({'a': 'completed', 'b': 'completed', 'c': 'canceled', 'd': 'canceled'}, self.statuses(self.workflow_id))

    def test_a_change_after_the_end_of_what_nobody_has_claimed_is_seen(self):
        self.workflow_id = self.create('a:')
        self.node_id = self.node(self.workflow_id)
        job = self.call('list_jobs', workflow_id=self.workflow_id)['items'][0]
        for before in ('ready', 'pending', 'running'):
            with self.subTest(before), self.undone():
                self.call('manage_status_change', id=job['id'], status=before, run_id=1)
                self.assertEqual('', self.post('complete_job', self.entry(job)))
                self.assertEqual([], self.call('process_changed_job_inputs', id=self.workflow_id, dry_run=True)['reinitialized_jobs'])
                self.call('update_job', {'command': 'false'}, id=job['id'])
                self.assertEqual(['a'], self.call('process_changed_job_inputs', id=self.workflow_id, dry_run=True)['reinitialized_jobs'])

    def test_what_another_node_holds_cannot_end(self):
        other = self.node(self.workflow_id)
        for status in ('pending', 'running', 'canceled'):
            if status == 'running':
                self.call('start_job', job_id=self.job['id'], run_id=1, compute_node_id=self.node_id)
            elif status == 'canceled':
                self.call('cancel_workflow', id=self.workflow_id)
            for way in self.WAYS:
                with self.subTest(way, status=status):
                    self.assertEqual(status, self.statuses(self.workflow_id)['a'])
                    self.assertIn(f'in the hands of compute node {self.node_id}', self.post(way, self.entry(self.job, compute_node_id=other)))
                    self.assertEqual(0, self.call('list_results', workflow_id=self.workflow_id, all_runs=True)['total_count'])
                    self.assertEqual(status, self.statuses(self.workflow_id)['a'])

    def test_a_node_that_is_not_at_work_holds_nothing(self):
        described = self.node(self.workflow_id, is_active=False)
        self.store.run('UPDATE job SET compute_node_id = ? WHERE id = ?', (described, self.job['id']))
        self.assertEqual('', self.post('complete_job', self.entry(self.job, status='failed', return_code=-128)))

    def test_what_has_no_attempt_left_cannot_end(self):
        job = self.call('list_jobs', workflow_id=self.workflow_id, status='blocked')['items'][0]
        for status in ('canceled', 'disabled'):
            self.store.run('UPDATE job SET status = ? WHERE id = ?', (torc.STATUS_CODES[status], job['id']))
            for way in self.WAYS:
                with self.subTest(way, status=status):
                    self.assertIn(f'is already complete, as {status}', self.post(way, self.entry(job)))
        self.store.run('UPDATE job SET status = 1, attempt_id = 2 WHERE id = ?', (job['id'],))
        self.assertIn('attempt 1', self.post('runner_sync', self.entry(job)))

    def test_run_zero_is_the_first_run_until_it_is_reset(self):
        with self.undone():
            self.assertEqual('', self.post('batch_complete_jobs', self.entry(self.job, run_id=0)))
            self.assertEqual('', self.post('batch_complete_jobs', self.entry(self.job)), 'one attempt, by two names of its run')
            self.assertEqual([1], [row['run_id'] for row in self.call('list_results', workflow_id=self.workflow_id, all_runs=True)['items']])
        with self.undone():
            self.call('start_job', job_id=self.job['id'], run_id=0, compute_node_id=self.node_id)
            self.call('retry_job', job_id=self.job['id'], run_id=0, max_retries=2)
            self.call('manage_status_change', id=self.job['id'], status='disabled', run_id=0)
        self.assertNotIn('is_run_zero', self.call('get_workflow', id=self.workflow_id))
        self.call('reset_workflow_status', id=self.workflow_id, force=True)
        self.call('initialize_jobs', id=self.workflow_id)
        for run_id in (0, 1):
            self.assertIn(f'run {run_id} of workflow', self.post('batch_complete_jobs', self.entry(self.job, run_id=run_id)))
        self.workflow_id = self.call('create_workflow', {'name': 'w', 'user': 'u'})['id']
        job = self.call('create_job', {'workflow_id': self.workflow_id, 'name': 'a', 'command': 'x'})
        self.node_id = self.node(self.workflow_id)
        with self.undone():
            self.assertEqual('', self.post('complete_job', self.entry(job, run_id=0)), 'before any initialize')
            self.call('initialize_jobs', id=self.workflow_id)
            for way in self.WAYS[:2]:       # runners of ours begin in a run that has begun
                self.assertEqual('', self.post(way, self.entry(job, run_id=0)), 'the same once more')
                other = self.entry(job, status='failed', return_code=1, run_id=0)
                self.assertIn('is already complete', self.post(way, other))
                self.assertEqual({'a': 'ready'}, self.statuses(self.workflow_id), 'of the run that has begun')
        self.call('reset_workflow_status', id=self.workflow_id)
        self.call('initialize_jobs', id=self.workflow_id)
        self.assertIn('run 0 of workflow', self.post('complete_job', self.entry(job, run_id=0)), 'a reset began run 1')

    def test_a_superseded_run_changes_nothing(self):
        self.call('reset_workflow_status', id=self.workflow_id, force=True)
        self.call('initialize_jobs', id=self.workflow_id)
        body = {'compute_node_id': self.node_id, 'run_id': 1, 'completions': [self.end(self.job)]}
        self.assertRefused('run 1 of workflow', 'runner_sync', body, id=self.workflow_id)
        entry = {'job_id': self.job['id'], 'status': 'completed', 'run_id': 1, 'result': dict(
            self.end(self.job), workflow_id=self.workflow_id, run_id=1, compute_node_id=self.node_id)}
        answer = self.call('batch_complete_jobs', {'completions': [entry]}, id=self.workflow_id)
        self.assertEqual(([], 1), (answer['completed'], len(answer['errors'])))
        self.assertEqual(0, self.call('list_results', workflow_id=self.workflow_id, all_runs=True)['total_count'])

    def test_a_batch_is_accepted_entry_by_entry(self):
        entry = {'job_id': self.job['id'], 'status': 'completed', 'run_id': 1, 'result': dict(
            self.end(self.job), workflow_id=self.workflow_id, run_id=1, compute_node_id=self.node_id)}
        wrong = dict(entry, status='running', result=dict(entry['result'], status='running'))
        answer = self.call('batch_complete_jobs', {'completions': [wrong, entry, dict(entry, job_id=999)]}, id=self.workflow_id)
        self.assertEqual([self.job['id']], answer['completed'])
        self.assertEqual(2, len(answer['errors']))

    def test_a_retry_leaves_the_failed_attempts_result_and_makes_the_next_ready(self):
        answer = self.finish(status='failed', return_code=9, retry=True, max_retries=3)
        self.assertEqual([[self.job['id'], 1, 'ready']], answer['accepted'])
        again = self.claim(self.workflow_id, self.node_id)['a']
        self.assertEqual(2, again['attempt_id'])
        self.assertIn('attempt 1', self.sync(self.workflow_id, self.node_id, completions=[self.end(self.job)])['errors'][0]['message'])
        self.sync(self.workflow_id, self.node_id, completions=[self.end(again)])
        rows = self.call('list_results', workflow_id=self.workflow_id, all_runs=True)['items']
        self.assertEqual([(1, 'failed', 9), (2, 'completed', 0)], [(row['attempt_id'], row['status'], row['return_code']) for row in rows])
        self.assertEqual([2], [row['attempt_id'] for row in self.call('list_results', workflow_id=self.workflow_id)['items']])
        self.assertEqual('ready', self.statuses(self.workflow_id)['b'])

    def test_an_attempt_that_was_interrupted_leaves_its_result_and_makes_the_next_ready(self):
        stopped = dict(status='terminated', return_code=143, interrupted=True, reason='stopped: why')
        for _ in range(2):      # its answer was lost
            answer = self.finish(**stopped)
            self.assertEqual(([[self.job['id'], 1, 'ready']], []), (answer['accepted'], answer['errors']))
        self.assertEqual({'a': 'ready', 'b': 'blocked'}, self.statuses(self.workflow_id))
        row, = self.call('list_results', workflow_id=self.workflow_id)['items']
        self.assertEqual((1, 'terminated', 143), (row['attempt_id'], row['status'], row['return_code']))
        self.assertNotIn('is_interrupted', row)
        events = [event['data'] for event in self.call('list_events', workflow_id=self.workflow_id)['items']]
        self.assertIn(('job_terminated', 'a: stopped: why'),
                      [(data['event_type'], data['message']) for data in events])
        again = self.claim(self.workflow_id, self.node(self.workflow_id))['a']      # another runner
        self.assertEqual((2, 1), (again['attempt_id'], again['interruptions']))
        self.assertIn('attempt 1 of job', self.finish(status='completed')['errors'][0]['message'])
        self.assertWhole()

    def test_an_interruption_spends_no_retry(self):
        def finish(**more: Any) -> str:
            self.job = self.claim(self.workflow_id, self.node_id).get('a') or self.job
            return self.finish(**dict({'attempt_id': self.job['attempt_id']}, **more))['accepted'][0][2]
        stopped = dict(status='terminated', return_code=1, interrupted=True)
        failed = dict(status='failed', return_code=1, retry=True, max_retries=2)
        self.assertEqual(['ready', 'ready', 'ready', 'ready', 'failed'],
                         [finish(**more) for more in (stopped, stopped, failed, stopped, failed)])
        self.assertEqual({'a': 'failed', 'b': 'canceled'}, self.statuses(self.workflow_id))
        again = {'job_id': self.job['id'], 'run_id': 1}
        self.assertRefused('has used its 2 attempts', 'retry_job', max_retries=2, **again)
        self.assertEqual(6, self.call('retry_job', max_retries=3, **again)['attempt_id'])

    def test_a_new_run_counts_attempts_from_one_for_what_waits_too(self):
        self.finish(status='terminated', return_code=1, interrupted=True)
        self.call('reset_workflow_status', id=self.workflow_id)
        claimed = self.claim(self.workflow_id, self.node_id)['a']
        self.assertEqual((1, 0), (claimed['attempt_id'], claimed['interruptions']))
        self.job = claimed
        self.assertEqual([[self.job['id'], 1, 'completed']], self.finish()['accepted'])

    def test_what_was_interrupted_but_ended_by_itself_is_judged_as_always(self):
        answer = self.finish(status='failed', return_code=3, interrupted=True)
        self.assertEqual([[self.job['id'], 1, 'failed']], answer['accepted'])
        self.assertEqual({'a': 'failed', 'b': 'canceled'}, self.statuses(self.workflow_id))

    def test_an_interrupted_job_of_a_canceled_workflow_stays_canceled(self):
        self.call('cancel_workflow', id=self.workflow_id)
        answer = self.finish(status='terminated', return_code=143, interrupted=True)
        self.assertEqual([[self.job['id'], 1, 'canceled']], answer['accepted'])
        self.assertEqual({'a': 'canceled', 'b': 'canceled'}, self.statuses(self.workflow_id))

    def test_a_canceled_job_that_ran_gets_its_result(self):
        self.call('cancel_workflow', id=self.workflow_id)
        answer = self.finish(status='terminated', return_code=143)
        self.assertEqual([[self.job['id'], 1, 'canceled']], answer['accepted'])
        self.assertTrue(answer['is_canceled'])
        result = self.call('list_results', workflow_id=self.workflow_id)['items'][0]
        self.assertEqual(('canceled', 143), (result['status'], result['return_code']))
        self.assertEqual({'a': 'canceled', 'b': 'canceled'}, self.statuses(self.workflow_id))

    def test_single_operations_follow_the_same_rules(self):
        self.call('start_job', job_id=self.job['id'], run_id=1, compute_node_id=self.node_id)
        self.call('start_job', job_id=self.job['id'], run_id=1, compute_node_id=self.node_id)
        self.assertEqual('running', self.statuses(self.workflow_id)['a'])
        result = dict(self.end(self.job), workflow_id=self.workflow_id, run_id=1, compute_node_id=self.node_id)
        self.assertRefused('cannot complete as', 'complete_job', result, job_id=self.job['id'], status='ready', run_id=1)
        done = self.call('complete_job', result, job_id=self.job['id'], status='completed', run_id=1)
        self.assertEqual('completed', done['status'])
        self.assertRefused('only a pending one', 'start_job', job_id=self.job['id'], run_id=1, compute_node_id=self.node_id)
        self.assertRefused('only a running, failed or terminated', 'retry_job', job_id=self.job['id'], run_id=1, max_retries=3)


class ClaimTest(ServiceTest):
    """Which jobs a node gets."""

    def make(self, rows: str) -> int:
        """A workflow from a table: name, cpus, memory, gpus, nodes, runtime, priority, labels, scheduler."""
        table = rows_of(rows)
        needs = [{'name': f'r{place}', 'num_cpus': int(row['cpus']), 'memory': row['memory'], 'num_gpus': int(row['gpus'] or 0),
                  'num_nodes': int(row['nodes'] or 1), 'runtime': row['runtime']} for place, row in enumerate(table)]
        kinds = [[place, int(row['priority'] or 0), int(row['scheduler']) if row['scheduler'] else None, row['labels'].split(',') if row['labels'] else None]
                 for place, row in enumerate(table)]
        jobs = [torc.PlannedJob(row['name'], 'x', None, None, place, None, None, True, False, [], [], [], []) for place, row in enumerate(table)]
        body = {'workflow': {'name': 'w', 'user': 'u'}, 'files': [], 'user_data': [], 'resource_requirements': needs,
                'slurm_schedulers': [{'name': name, 'account': 'a'} for name in 'st'], 'failure_handlers': [], 'kinds': kinds,
                'dependency_sets': [], 'jobs': jobs, 'actions': []}
        workflow_id = self.call('create_workflow_from_spec', body)['workflow_id']
        self.call('initialize_jobs', id=workflow_id)
        return workflow_id

    def take(self, workflow_id: int, limit: int = 100, **node: Any) -> str:
        """Names claimed by resources, in order; the reason where there are none."""
        strict = node.pop('strict', False)
        body = dict({'num_cpus': 4, 'memory_gb': 8.0, 'num_gpus': 0, 'num_nodes': 1}, **node)
        answer = self.call('claim_jobs_based_on_resources', body, id=workflow_id, limit=limit, strict_scheduler_match=strict)
        return ' '.join(job['name'] for job in answer['jobs']) or answer['reason']

    TABLE = '''
        name      cpus  memory  gpus  nodes  runtime  priority  labels  scheduler
        small     1     1g      -     1      PT10M    -         -       -
        long      1     1g      -     1      PT2H     -         -       -
        wide      3     1g      -     1      PT10M    -         -       -
        fat       1     7g      -     1      PT10M    -         -       -
        urgent    1     1g      -     1      PT1M     5         -       -
        gpu       1     1g      1     1      PT10M    -         -       -
        two       4     1g      -     2      PT10M    -         -       -
        tagged    1     1g      -     1      PT10M    -         a,b     -
        '''

    def test_order_is_priority_gpus_runtime_memory_cpus_then_id(self):
        workflow_id = self.make(self.TABLE)
        self.assertEqual('urgent gpu long fat wide small', self.take(workflow_id, num_cpus=99, memory_gb=99.0, num_gpus=1))

    def test_only_what_fits_is_taken_and_the_rest_goes_on_to_wait(self):
        workflow_id = self.make(self.TABLE)
        self.assertEqual('urgent long wide', self.take(workflow_id, num_cpus=5, memory_gb=3.5))
        self.assertEqual('fat', self.take(workflow_id, num_cpus=1))
        self.assertEqual('small', self.take(workflow_id, num_cpus=1))

    def test_packing_is_per_node(self):
        workflow_id = self.make(self.TABLE)
        self.assertEqual('urgent long fat wide', self.take(workflow_id, num_nodes=2, num_cpus=3, memory_gb=9.0, time_limit='PT3H'))
        self.assertIn('no ready job fits what is free', self.take(workflow_id, num_nodes=3, num_cpus=0, memory_gb=9.0))

    def test_a_job_of_two_nodes_takes_whole_ones(self):
        workflow_id = self.make(self.TABLE)
        self.assertIn('two', self.take(workflow_id, num_nodes=3, num_cpus=8, memory_gb=64.0))
        self.assertNotIn('two', self.take(self.make(self.TABLE), num_nodes=1, num_cpus=8, memory_gb=64.0))

    def test_remaining_time_bounds_the_runtime(self):
        workflow_id = self.make(self.TABLE)
        self.assertEqual('urgent', self.take(workflow_id, num_cpus=99, memory_gb=99.0, time_limit='PT5M'))
        self.assertEqual('every ready job needs at least PT10M, and only PT9M are left', self.take(workflow_id, time_limit='PT9M'))

    def test_a_node_is_told_whether_jobs_are_left_that_it_may_take(self):
        workflow_id = self.make('''
            name    cpus  memory  gpus  nodes  runtime  priority  labels  scheduler
            plain   1     1g      -     1      PT10M    -         -       -
            tagged  1     1g      -     1      PT10M    -         a,b     -
            ''')
        node = {'workflow_id': workflow_id, 'hostname': 'h', 'pid': 1, 'start_time': '2026-01-01T00:00:00Z', 'num_cpus': 4, 'memory_gb': 8.0, 'num_gpus': 0,
                'num_nodes': 1, 'compute_node_type': 'local', 'is_active': True}
        nodes = [self.call('create_compute_node', dict(node, labels=labels))['id'] for labels in (None, ['b', 'a', 'c'], ['a'])]

        def left() -> List[bool]:
            return [self.call('runner_sync', {'compute_node_id': node_id, 'run_id': 1, 'explain': True}, id=workflow_id)['has_jobs_for_node'] for node_id in nodes]
        self.assertEqual([True, True, False], left())
        plain, tagged = (job['id'] for job in self.call('list_jobs', workflow_id=workflow_id)['items'])
        for job_id, wanted in ((tagged, [True, False, False]), (plain, [False, False, False])):
            self.call('manage_status_change', id=job_id, status='disabled', run_id=1)
            self.assertEqual(wanted, left())

    def test_labels_are_sets(self):
        workflow_id = self.make(self.TABLE)
        self.assertIn("labels that are all among this node's", self.take(workflow_id, labels=['a']))
        self.assertEqual('tagged', self.take(workflow_id, labels=['c', 'b', 'a']))

    def test_a_schedulers_own_jobs_come_first_then_unbound_then_any(self):
        rows = '''
            name   cpus  memory  gpus  nodes  runtime  priority  labels  scheduler
            other  1     1g      -     1      PT1M     9         -       1
            free   1     1g      -     1      PT1M     5         -       -
            mine   1     1g      -     1      PT1M     -         -       0
            '''
        first = self.store.next_id('slurm_scheduler')
        self.assertEqual('mine free other', self.take(self.make(rows), scheduler_config_id=first))
        first = self.store.next_id('slurm_scheduler')
        self.assertEqual('mine free', self.take(self.make(rows), scheduler_config_id=first, strict=True))

    def test_the_queue_goes_by_priority_and_id_alone(self):
        workflow_id = self.make(self.TABLE)
        jobs = self.call('claim_next_jobs', id=workflow_id, limit=3)['jobs']
        self.assertEqual(['urgent', 'small', 'long'], [job['name'] for job in jobs])
        self.assertEqual({'pending'}, {job['status'] for job in jobs})

    def test_jobs_that_need_the_same_go_by_id_whatever_their_requirements_are_called(self):
        rows = '''
            name  cpus  memory  gpus  nodes  runtime  priority  labels  scheduler
            j0    1     1g      -     1      PT1M     -         -       -
            j1    1     1g      -     1      PT1M     -         -       -
            j2    1     1g      -     1      PT1M     -         -       -
            '''
        workflow_id = self.make(rows)
        self.store.run('UPDATE job SET kind_id = (SELECT min(id) FROM job_kind) WHERE name = ?', ('j2',))
        self.assertEqual('j0 j1 j2', self.take(workflow_id))

    def test_rounds_ahead_take_more_than_fits_at_once(self):
        workflow_id = self.create('\n'.join(f'j{i}:' for i in range(20)))
        node_id = self.node(workflow_id)
        want = {'strategy': 'resources', 'limit': 100, 'num_cpus': 1, 'memory_gb': 1.0, 'num_gpus': 0, 'num_nodes': 1, 'depth': 4,
                'total': {'num_cpus': 2, 'memory_gb': 1.0, 'num_gpus': 0}}
        self.assertEqual([f'j{i}' for i in range(7)], [job['name'] for job in self.sync(workflow_id, node_id, want=want)['jobs']])

    def test_no_job_is_handed_out_twice(self):
        workflow_id = self.create('\n'.join(f'j{i}:' for i in range(50)))
        nodes = [self.node(workflow_id) for _ in range(2)]
        seen = [name for turn in range(20) for name in self.claim(workflow_id, nodes[turn % 2], 3)]
        self.assertEqual(50, len(seen))
        self.assertEqual(50, len(set(seen)))

    HEAD = 'name  cpus  memory  gpus  nodes  runtime  priority  labels  scheduler'

    def wants(self, workflow_id: int, node_id: int = 0, **more: Any) -> Any:
        """A runner's turn, on a node of 4 CPUs, 8 GiB and no GPU."""
        size = {'num_cpus': 4, 'memory_gb': 8.0, 'num_gpus': 0}
        want = dict({'strategy': 'resources', 'limit': 9, 'num_nodes': 1, 'total': size}, **size)
        want.update(more)
        return self.sync(workflow_id, node_id or self.node(workflow_id), explain=True, survey=True, want=want)

    def test_what_a_job_needs_and_a_runner_will_never_have_is_told_with_the_option(self):
        rows = rows_of('''
            cpus  memory  gpus  nodes  runtime  labels  what
            5     1g      -     1      PT1M     -       5 CPUs, and this runner has 4 (--num-cpus)
            1     9g      -     1      PT1M     -       9.0GB of memory, and this runner has 8.0GB (MEMORY)
            1     1g      2     1      PT1M     -       2 GPUs, and this runner has 0 (--num-gpus)
            1     1g      -     2      PT1M     -       2 nodes, and this runner has 1
            1     1g      -     1      PT13M    -       a runtime of PT13M, and this runner has PT10M left T
            1     1g      -     1      PT1M     b,a     a runner with --label a,b
            5     1g      1     1      PT1M     -       5 CPUs, and this runner has 4 (--num-cpus); 1 GPUs, 0
            ''')
        long = {'left T': 'left (--time-limit, --end-time)', 'MEMORY': '--memory-gb',
                'GPUs, 0': 'GPUs, and this runner has 0 (--num-gpus)'}
        for row in rows:
            with self.subTest(row['what']):
                needs = [row[key] or '-' for key in ('cpus', 'memory', 'gpus', 'nodes', 'runtime')]
                lines = [self.HEAD, f"odd  {'  '.join(needs)}  -  {row['labels'] or '-'}  -",
                         'fine  1  1g  -  1  PT1M  -  -  -']
                answer = self.wants(self.make('\n'.join(lines)), time_limit='PT12M')
                what = re.sub('|'.join(long), lambda match: long[match.group()], row['what'])
                self.assertEqual((['fine'], [f'jobs such as odd cannot run here: they need {what}']),
                                 ([job['name'] for job in answer['jobs']], answer['notices']))
                alone = self.wants(self.make('\n'.join(lines[:2])), time_limit='PT12M')
                self.assertEqual((alone['notices'][0], False), (alone['reason'], alone['claimable']))

    def test_what_will_not_fit_is_told_before_it_is_ready_and_what_is_done_is_not(self):
        workflow_id = self.create('a:\nb: a')
        for key, value in (('num_gpus', 1), ('name', 'gpu')):
            self.store.run(f'UPDATE resource_requirements SET {key} = ?', (value,))
        self.store.run("UPDATE job SET status = 3 WHERE name = 'a'")
        notice = 'jobs such as b cannot run here: they need 1 GPUs, and this runner has 0 (--num-gpus)'
        self.assertEqual([notice], self.wants(workflow_id)['notices'])
        self.store.run('UPDATE job SET status = 5')
        self.assertEqual([], self.wants(workflow_id)['notices'])

    def test_a_labelled_runner_is_told_of_its_own_jobs_only_and_the_queue_knows_no_sizes(self):
        rows = '''
            name    cpus  memory  gpus  nodes  runtime  priority  labels  scheduler
            plain   9     1g      -     1      PT1M     -         -       -
            tagged  9     1g      -     1      PT1M     -         a       -
            other   9     1g      -     1      PT1M     -         b       -
            '''
        needs = 'cannot run here: they need 9 CPUs, and this runner has 4 (--num-cpus)'
        answer = self.wants(self.make(rows), labels=['a'])
        self.assertEqual([f'jobs such as tagged {needs}'], answer['notices'])
        queue = {'strategy': 'queue', 'limit': 9}
        workflow_id = self.make(rows)
        answer = self.sync(workflow_id, self.node(workflow_id), survey=True, want=queue)
        notices = [f'jobs such as {name} cannot run here: they need a runner with --label {label}'
                   for name, label in (('tagged', 'a'), ('other', 'b'))]
        self.assertEqual((['plain'], notices), ([job['name'] for job in answer['jobs']], answer['notices']))

    def test_there_is_nothing_to_wait_for_when_nobody_can_take_what_is_ready(self):
        workflow_id = self.make(f'{self.HEAD}\nbig  9  1g  -  1  PT1M  -  -  -')
        node_id = self.node(workflow_id)
        self.assertFalse(self.wants(workflow_id, node_id)['claimable'])
        self.assertTrue(self.sync(workflow_id, node_id)['claimable'])       # it has not asked
        other = self.node(workflow_id)
        self.assertTrue(self.wants(workflow_id, node_id)['claimable'])      # which may be larger
        self.call('update_compute_node', {'is_active': False}, id=other)
        self.assertFalse(self.wants(workflow_id, node_id)['claimable'])
        self.call('create_scheduled_compute_node', {
            'workflow_id': workflow_id, 'scheduler_id': 7, 'scheduler_config_id': 0, 'status': 'pending',
            'scheduler_type': 'slurm'})
        self.assertTrue(self.wants(workflow_id, node_id)['claimable'])      # which will come

    def test_every_turn_tells_how_many_jobs_are_in_which_status_whoever_changed_them(self):
        def told() -> Dict[str, int]:
            answer = self.sync(workflow_id, node_id)
            counts = self.call('get_workflow_status', id=workflow_id)['jobs_by_status']
            unfinished = sum(counts[row.name] for row in torc.STATUSES if not row.is_done)
            self.assertEqual(({key: count for key, count in counts.items() if count}, unfinished),
                             (answer['jobs_by_status'], answer['unfinished']))
            return answer['jobs_by_status']
        workflow_id = self.create('a:\nb: a\n' + '\n'.join(f'j{i}:' for i in range(1500)))
        self.create('elsewhere:')
        node_id, other = self.node(workflow_id), self.node(workflow_id)
        self.assertEqual({'ready': 1501, 'blocked': 1}, told())
        jobs = self.claim(workflow_id, other, 3)
        self.sync(workflow_id, other, completions=[self.end(jobs['a'], 'failed', 1), self.end(jobs['j0'])],
                  started=[[jobs['j1']['id'], 1, '2026-01-01T00:00:00Z']])
        self.assertEqual({'ready': 1498, 'running': 1, 'completed': 1, 'failed': 1, 'canceled': 1}, told())
        self.call('spawn_jobs', {'jobs': [{'name': 'more', 'command': 'x'}]}, job_id=jobs['j1']['id'])
        self.assertEqual(1, told()['blocked'])
        with contextlib.suppress(ZeroDivisionError), self.store.transaction():
            torc.cancel_workflow(self.store, workflow_id)
            raise ZeroDivisionError
        self.assertEqual(1498, told()['ready'])
        with self.store.transaction(), self.store.savepoint(keeps=False):
            torc.cancel_workflow(self.store, workflow_id)
        self.assertEqual(1498, told()['ready'])
        names = 'id, workflow_id, name, command, kind_id'
        sql = f"REPLACE INTO job ({names}, status) SELECT {names}, 9 FROM job WHERE name = 'j7'"
        self.call('admin_sql', {'sql': sql, 'write': True})
        self.assertEqual((1497, 1), (told()['ready'], told()['disabled']))
        self.call('delete_job', id=self.store.value("SELECT id FROM job WHERE name = 'j9'"))
        self.assertEqual(1496, told()['ready'])
        self.call('reset_job_status', id=workflow_id, failed_only=True)
        self.assertEqual(2, told()['uninitialized'])
        self.call('cancel_workflow', id=workflow_id)
        self.assertEqual({'canceled': 1498, 'uninitialized': 2, 'completed': 1, 'disabled': 1}, told())

    def test_a_turns_cost_does_not_grow_with_the_jobs_of_the_workflow(self):
        def steps(count: int) -> int:
            workflow_id = self.create('\n'.join(f'j{i}:' for i in range(count)))
            node_id, calls = self.node(workflow_id), []
            job = self.claim(workflow_id, node_id, 1)['j0']
            self.store._db.set_progress_handler(lambda: calls.append(1) and None, 1)
            want = {'strategy': 'queue', 'limit': 1}
            self.sync(workflow_id, node_id, completions=[self.end(job)], want=want, explain=True)
            self.store._db.set_progress_handler(None, 0)
            return len(calls)
        few, many = steps(100), steps(6000)
        self.assertLess(many, few * 1.1)

    def test_a_retrys_cost_does_not_grow_with_what_waits(self):
        def steps(count: int) -> int:
            chain = (f'j{i}: j{i - 1}' for i in range(1, count))
            workflow_id = self.create('\n'.join(['j0:', *chain]))
            node_id, calls = self.node(workflow_id), []
            job = self.claim(workflow_id, node_id, 1)['j0']
            self.store._db.set_progress_handler(lambda: calls.append(1) and None, 1)
            self.sync(workflow_id, node_id, completions=[self.end(job, 'failed', 1, retry=True)])
            self.store._db.set_progress_handler(None, 0)
            self.assertEqual('ready', self.call('get_job', job_id=job['id'])['status'])
            return len(calls)
        few, many = steps(100), steps(3000)
        self.assertLess(many, few * 1.1)

    def test_a_claims_cost_does_not_grow_with_what_is_ready(self):
        def steps(count: int) -> int:
            workflow_id = self.create('\n'.join(f'j{i}:' for i in range(count)))
            node_id, calls = self.node(workflow_id), []
            self.store._db.set_progress_handler(lambda: calls.append(1) and None, 1)
            self.claim(workflow_id, node_id, 5)
            self.store._db.set_progress_handler(None, 0)
            return len(calls)
        few, many = steps(2000), steps(6000)
        self.assertLess(many, few * 1.3)


class NamesOfAttemptsTest(ServiceTest):
    """An attempt is known by (job, run, attempt): the same name never comes twice."""

    def run_again(self, *changes: Callable[[int, int], Any]) -> None:
        workflow_id = self.create('a:')
        node_id = self.node(workflow_id)
        job = self.claim(workflow_id, node_id)['a']
        self.sync(workflow_id, node_id, completions=[self.end(job, 'failed', 1)])
        for change in changes:
            change(workflow_id, job['id'])
        again = self.claim(workflow_id, node_id)['a']
        self.assertEqual(2, again['attempt_id'])
        answer = self.sync(workflow_id, node_id, completions=[self.end(again)])
        self.assertEqual(([[job['id'], 2, 'completed']], []), (answer['accepted'], answer['errors']))

    def test_a_job_set_back_within_a_run_goes_on_counting(self):
        def set_back(workflow_id: int, job_id: int) -> None:
            self.call('manage_status_change', id=job_id, status='uninitialized', run_id=1)

        def initialize_part(workflow_id: int, job_id: int) -> None:
            self.call('initialize_jobs', id=workflow_id, only_uninitialized=True)

        def initialize_all(workflow_id: int, job_id: int) -> None:
            self.call('initialize_jobs', id=workflow_id)

        def make_ready(workflow_id: int, job_id: int) -> None:
            self.call('manage_status_change', id=job_id, status='ready', run_id=1)
        self.run_again(set_back, initialize_part)
        self.run_again(initialize_all)
        self.run_again(make_ready)

    def test_a_new_run_begins_with_attempt_1(self):
        workflow_id = self.create('a:')
        node_id = self.node(workflow_id)
        self.sync(workflow_id, node_id, completions=[self.end(self.claim(workflow_id, node_id)['a'], 'failed', 1)])
        self.call('reset_workflow_status', id=workflow_id)
        self.call('initialize_jobs', id=workflow_id)
        self.assertEqual(1, self.claim(workflow_id, node_id)['a']['attempt_id'])

    def test_an_attempt_taken_from_its_runner_is_not_handed_out_again(self):
        def cancel_and_initialize(workflow_id: int, job_id: int) -> None:
            self.call('cancel_workflow', id=workflow_id)
            self.call('initialize_jobs', id=workflow_id)

        def set_ready(workflow_id: int, job_id: int) -> None:
            self.call('manage_status_change', id=job_id, status='ready', run_id=1)

        def set_back(workflow_id: int, job_id: int) -> None:
            self.call('manage_status_change', id=job_id, status='uninitialized', run_id=1)
            self.call('initialize_jobs', id=workflow_id, only_uninitialized=True)

        def cancel_and_set_back(workflow_id: int, job_id: int) -> None:
            self.call('cancel_workflow', id=workflow_id)
            set_back(workflow_id, job_id)

        def cancel_and_reset_jobs(workflow_id: int, job_id: int) -> None:
            self.call('cancel_workflow', id=workflow_id)
            self.call('reset_job_status', id=workflow_id)
            self.call('initialize_jobs', id=workflow_id)
        for change in (cancel_and_initialize, set_ready, set_back, cancel_and_set_back, cancel_and_reset_jobs):
            with self.subTest(change.__name__):
                workflow_id = self.create('a:')
                node_id = self.node(workflow_id)
                first = self.claim(workflow_id, node_id)['a']
                change(workflow_id, first['id'])
                again = self.claim(workflow_id, node_id)['a']
                self.assertEqual(2, again['attempt_id'])
                answer = self.sync(workflow_id, node_id, completions=[self.end(first), self.end(again)])
                self.assertEqual(([[first['id'], 2, 'completed']], [1]), (answer['accepted'], [error['attempt_id'] for error in answer['errors']]))

    def test_an_attempt_that_was_canceled_in_the_last_run_counts_for_none(self):
        workflow_id = self.create('a:')
        node_id = self.node(workflow_id)
        self.claim(workflow_id, node_id)
        self.call('cancel_workflow', id=workflow_id)
        self.call('reset_workflow_status', id=workflow_id)
        self.call('initialize_jobs', id=workflow_id)
        self.assertEqual(1, self.claim(workflow_id, node_id)['a']['attempt_id'])

    def test_retries_end_where_the_caller_says(self):
        workflow_id = self.create('a:')
        node_id = self.node(workflow_id)
        for attempt, status in ((1, 'ready'), (2, 'failed')):
            end = self.end(self.claim(workflow_id, node_id)['a'], 'failed', 1, retry=True, max_retries=2)
            answer = self.sync(workflow_id, node_id, completions=[end])
            self.assertEqual(status, answer['accepted'][0][2])
            self.assertEqual(status, self.sync(workflow_id, node_id, completions=[end])['accepted'][0][2])

    def test_only_the_node_that_has_a_job_can_end_it(self):
        workflow_id = self.create('a:')
        first, second = self.node(workflow_id), self.node(workflow_id)
        job = self.claim(workflow_id, first)['a']
        self.assertIn('in the hands of compute node', self.sync(workflow_id, second, completions=[self.end(job)])['errors'][0]['message'])
        self.assertEqual([], self.sync(workflow_id, first, completions=[self.end(job)])['errors'])

    def test_jobs_in_hand_are_not_reset_under_their_runner(self):
        workflow_id = self.create('a:')
        self.claim(workflow_id, self.node(workflow_id))
        self.assertRefused('pending or running', 'reset_job_status', id=workflow_id)


class NodeTest(ServiceTest):
    """Nodes that go away."""

    def test_a_silent_nodes_claims_come_back_and_its_running_jobs_are_orphans(self):
        workflow_id = self.create('a:\nb:\nc: a')
        node_id = self.node(workflow_id)
        jobs = self.claim(workflow_id, node_id)
        self.sync(workflow_id, node_id, started=[[jobs['a']['id'], 1, torc.format_time(self.clock)]])
        self.clock += 59
        self.assertEqual([], self.release())
        self.clock += 2
        self.assertEqual([node_id], self.release())
        self.assertEqual({'a': 'failed', 'b': 'ready', 'c': 'canceled'}, self.statuses(workflow_id))
        result = self.call('list_results', workflow_id=workflow_id)['items'][0]
        self.assertEqual((-128, 'failed'), (result['return_code'], result['status']))
        self.assertRefused('was given up', 'runner_sync', {'compute_node_id': node_id, 'run_id': 1}, id=workflow_id)
        self.assertWhole()

    def release(self, alive: bool = True) -> List[int]:
        with self.store.transaction():
            return torc.release_lost_nodes(self.store, lambda hostname, pid, identity: alive)

    def test_only_a_node_that_says_so_is_at_work(self):
        workflow_id = self.create('a:')
        nodes = [self.node(workflow_id, hostname=f'n{place}.cluster', is_active=said) for place, said in enumerate((True, False, None))]
        silent = {key: value for key, value in self.call('get_compute_node', id=nodes[0]).items() if key not in ('id', 'is_active')}
        nodes.append(self.call('create_compute_node', dict(silent, hostname='n3.cluster'))['id'])
        self.assertEqual([True, False, None, None], [self.call('get_compute_node', id=node_id).get('is_active') for node_id in nodes])
        self.assertEqual(1, self.call('get_workflow_status', id=workflow_id)['active_compute_nodes'])
        for query, found in (({'is_active': True}, nodes[:1]), ({'is_active': False}, nodes[1:2]), ({'hostname': 'CLUST'}, nodes), ({'hostname': 'n2'}, nodes[2:3]),
                             ({'hostname': 'cluster', 'is_active': True}, nodes[:1]), ({'hostname': '%'}, [])):
            with self.subTest(query):
                answer = self.call('list_compute_nodes', workflow_id=workflow_id, **query)
                self.assertEqual((found, len(found)), ([item['id'] for item in answer['items']], answer['total_count']))
        self.assertTrue(self.call('update_compute_node', {'is_active': True}, id=nodes[2])['is_active'], 'it has not ended: it begins')
        self.assertRefused('has ended or was given up', 'update_compute_node', {'is_active': True}, id=nodes[1])

    def test_it_is_told_which_ready_jobs_no_allocation_has_time_for(self):
        workflow_id = self.call('create_workflow', {'name': 'w', 'user': 'u'})['id']
        for runtime, labels in (('PT72H', []), ('PT1H', []), ('PT90H', ['gpu'])):
            needs = self.call('create_resource_requirements', {'workflow_id': workflow_id, 'name': runtime, 'runtime': runtime})['id']
            self.call('create_job', {'workflow_id': workflow_id, 'name': runtime, 'command': 'x', 'resource_requirements_id': needs, 'labels': labels})
        self.call('initialize_jobs', id=workflow_id)

        def told() -> Tuple[int, Optional[int], Optional[int]]:
            status = self.call('get_workflow_status', id=workflow_id)
            keys = ('runtime_blocked_ready_jobs', 'longest_ready_runtime_seconds', 'max_allocation_remaining_seconds')
            return tuple(status.get(key) for key in keys)
        day_s = 86400
        self.node(workflow_id, is_active=False)     # only described: it takes nothing
        self.assertEqual((0, None, None), told())
        self.node(workflow_id, end_time=torc.format_time(self.clock + 2 * day_s))
        self.assertEqual((1, 3 * day_s, 2 * day_s), told())
        self.node(workflow_id, end_time=torc.format_time(self.clock + 4 * day_s), labels=['gpu'])       # takes no jobs without labels
        self.assertEqual((1, 3 * day_s, 4 * day_s), told())
        self.clock += 2 * day_s + 5     # the end is over: what the runners' grace covers is all that fits
        self.assertEqual((2, 3 * day_s, 2 * day_s - 5), told())
        last = self.node(workflow_id, end_time=torc.format_time(self.clock + 3 * day_s - torc.CLAIM_GRACE_S))
        self.assertEqual((0, 3 * day_s, 3 * day_s - torc.CLAIM_GRACE_S), told())
        self.call('update_compute_node', {'is_active': False}, id=last)
        self.node(workflow_id)      # without an end
        self.assertEqual((0, None, 2 * day_s - 5), told())

    def test_a_claim_that_a_dead_runner_may_have_started_is_another_attempt(self):
        workflow_id = self.create('a:')
        node_id = self.node(workflow_id)
        self.claim(workflow_id, node_id)
        self.release(alive=False)
        self.assertEqual(2, self.claim(workflow_id, self.node(workflow_id))['a']['attempt_id'])
        self.assertEqual(1, sum(event['data'].get('event_type') == 'job_retried' for event in self.call('list_events', workflow_id=workflow_id)['items']))

    def test_a_dead_runner_is_not_waited_for(self):
        workflow_id = self.create('a:')
        node_id = self.node(workflow_id)
        self.claim(workflow_id, node_id)
        self.assertEqual([node_id], self.release(alive=False))
        self.assertEqual({'a': 'ready'}, self.statuses(workflow_id))

    def test_a_deleted_node_leaves_nothing_running(self):
        workflow_id = self.create('a:\nb:')
        node_id = self.node(workflow_id)
        jobs = self.claim(workflow_id, node_id)
        self.sync(workflow_id, node_id, started=[[jobs['a']['id'], 1, torc.format_time(self.clock)]])
        self.call('delete_compute_node', id=node_id)
        self.assertEqual({'a': 'failed', 'b': 'ready'}, self.statuses(workflow_id))

    def test_a_node_that_leaves_gives_back_what_it_did_not_start(self):
        workflow_id = self.create('a:\nb:')
        node_id = self.node(workflow_id)
        jobs = self.claim(workflow_id, node_id)
        self.sync(workflow_id, node_id, returned=[[jobs['a']['id'], 1]])
        self.assertEqual({'a': 'ready', 'b': 'pending'}, self.statuses(workflow_id))
        self.call('update_compute_node', {'is_active': False, 'duration_seconds': 3.0}, id=node_id)
        self.assertEqual({'a': 'ready', 'b': 'ready'}, self.statuses(workflow_id))

    def test_a_claim_whose_answer_was_lost_comes_back(self):
        workflow_id = self.create('a:\nb:')
        node_id = self.node(workflow_id)
        jobs = self.claim(workflow_id, node_id)
        self.sync(workflow_id, node_id, held=[[jobs['a']['id'], 1]])
        self.assertEqual({'a': 'pending', 'b': 'ready'}, self.statuses(workflow_id))


class ActionTest(ServiceTest):
    """Triggers: counted once for each job, taken once, armed again when the work is to be done again."""

    def action(self, trigger: str, jobs: Optional[List[int]] = None, persistent: bool = False) -> Dict[str, Any]:
        return {'trigger_type': trigger, 'action_type': 'run_commands', 'action_config': {'commands': ['x']}, 'job_indexes': jobs, 'persistent': persistent}

    def due(self, workflow_id: int, node_id: int) -> List[str]:
        return [action['trigger_type'] for action in self.sync(workflow_id, node_id, actions=list(torc.TRIGGERS))['actions']]

    def test_each_trigger_comes_when_its_time_has_come(self):
        workflow_id = self.create('a:\nb: a', actions=[
            self.action('on_workflow_start'), self.action('on_worker_start', None, True), self.action('on_jobs_ready', [1]),
            self.action('on_jobs_complete', [0, 1]), self.action('on_workflow_complete')])
        first, second = self.node(workflow_id), self.node(workflow_id)
        self.assertEqual(['on_workflow_start', 'on_worker_start'], self.due(workflow_id, first))
        self.assertEqual(['on_worker_start'], self.due(workflow_id, second))
        self.assertEqual([], self.due(workflow_id, second))
        self.sync(workflow_id, first, completions=[self.end(self.claim(workflow_id, first)['a'])])
        self.assertEqual(['on_jobs_ready'], self.due(workflow_id, second))
        self.sync(workflow_id, first, completions=[self.end(self.claim(workflow_id, first)['b'])])
        self.assertEqual(['on_jobs_complete', 'on_workflow_complete'], self.due(workflow_id, first))
        self.assertEqual([], self.due(workflow_id, first))

    def test_a_schedule_names_no_scheduler_of_another_workflow(self):
        mine, other = self.create('a:'), self.create('a:')
        scheduler_id = self.call('create_slurm_scheduler', {'workflow_id': other, 'account': 'x', 'nodes': 1, 'walltime': '01:00:00'})['id']
        action = {'trigger_type': 'on_workflow_start', 'action_type': 'schedule_nodes'}
        refused = f'workflow {mine} has no slurm scheduler {scheduler_id}'
        with self.assertRaisesRegex(torc.Refused, refused):
            self.call('create_workflow_action', dict(action, workflow_id=mine, action_config={'scheduler_id': scheduler_id}), workflow_id=mine)
        made = self.call('create_workflow_action', dict(action, workflow_id=mine, action_config={'scheduler_id': 0}), workflow_id=mine)
        with self.assertRaisesRegex(torc.Refused, refused):
            self.call('update_workflow_action', {'scheduler_id': scheduler_id}, workflow_id=mine, action_id=made['id'])
        config = {'scheduler_id': scheduler_id, 'scheduler_type': 'slurm'}
        self.call('create_workflow_action', dict(action, workflow_id=other, action_config=config), workflow_id=other)

    def test_jobs_that_the_cascade_cancels_count_as_ended(self):
        workflow_id = self.create('a:\nb: a\nc: b', actions=[self.action('on_jobs_complete', [2]), self.action('on_workflow_complete')])
        node_id = self.node(workflow_id)
        self.sync(workflow_id, node_id, completions=[self.end(self.claim(workflow_id, node_id)['a'], 'failed', 1)])
        self.assertEqual(['on_jobs_complete', 'on_workflow_complete'], self.due(workflow_id, node_id))

    def test_a_failed_action_tells_why_until_it_is_to_be_executed_again(self):
        def failures() -> List[Optional[str]]:
            return [action.get('failure') for action in self.call('get_workflow_actions', id=workflow_id)]

        workflow_id = self.create('a:', actions=[
            self.action('on_workflow_start'), self.action('on_worker_start', None, True),
            self.action('on_workflow_complete')])
        first, second = self.node(workflow_id), self.node(workflow_id)
        for node_id, results in ((first, [{'action_id': 1, 'success': False, 'message': 'command 1 ended'},
                                          {'action_id': 2, 'success': False}]),
                                 (second, [{'action_id': 2, 'success': True, 'message': 'completed'}])):
            self.due(workflow_id, node_id)
            self.sync(workflow_id, node_id, action_results=results)
        self.assertEqual(['command 1 ended', 'failed', None], failures())   # of one node is enough
        events = self.call('list_events', workflow_id=workflow_id, category='action')['items']
        self.assertEqual([('action_failed', 'error', 'command 1 ended'), ('action_failed', 'error', ''),
                          ('action_completed', None, 'completed')],
                         [tuple(event['data'].get(key) for key in ('event_type', 'level', 'message'))
                          for event in events])
        body = dict(self.action('on_workflow_start'), workflow_id=workflow_id, failure='x')
        del body['job_indexes']
        self.assertNotIn('failure', self.call('create_workflow_action', body, workflow_id=workflow_id))
        self.call('initialize_jobs', id=workflow_id)
        self.assertEqual([None] * 4, failures())

    def test_an_action_of_a_node_that_died_is_due_again(self):
        workflow_id = self.create('a:', actions=[self.action('on_workflow_start')])
        first, second = self.node(workflow_id), self.node(workflow_id)
        self.assertEqual(['on_workflow_start'], self.due(workflow_id, first))
        with self.store.transaction():
            torc.release_node(self.store, first)
        self.assertEqual(['on_workflow_start'], self.due(workflow_id, second))
        action_id = self.call('get_workflow_actions', id=workflow_id)[0]['id']
        self.sync(workflow_id, second, action_results=[{'action_id': action_id, 'success': True}])
        with self.store.transaction():
            torc.release_node(self.store, second)
        self.assertEqual([], self.due(workflow_id, self.node(workflow_id)))

    def test_a_partial_run_repeats_only_what_belongs_to_it(self):
        workflow_id = self.create('a:\nb:', actions=[
            self.action('on_workflow_start'), self.action('on_jobs_complete', [0]), self.action('on_jobs_complete', [1]), self.action('on_workflow_complete')])
        node_id = self.node(workflow_id)
        jobs = self.claim(workflow_id, node_id)
        self.sync(workflow_id, node_id, completions=[self.end(jobs['a']), self.end(jobs['b'], 'failed', 1)])
        self.assertEqual(4, len(self.due(workflow_id, node_id)))
        self.call('reset_workflow_status', id=workflow_id)
        self.call('reset_job_status', id=workflow_id, failed_only=True)
        self.call('initialize_jobs', id=workflow_id, only_uninitialized=True)
        node_id = self.node(workflow_id)
        self.sync(workflow_id, node_id, completions=[self.end(self.claim(workflow_id, node_id)['b'])])
        actions = self.call('get_pending_actions', id=workflow_id)
        self.assertEqual([('on_jobs_complete', [jobs['b']['id']]), ('on_workflow_complete', None)],
                         [(action['trigger_type'], action.get('job_ids')) for action in actions])

    def test_an_action_that_comes_late_looks_at_what_has_been(self):
        workflow_id = self.create('a:\nb: a')
        node_id = self.node(workflow_id)
        job = self.claim(workflow_id, node_id)['a']
        self.sync(workflow_id, node_id, completions=[self.end(job)])
        for trigger, gates in (('on_jobs_complete', [job['id']]), ('on_worker_start', None)):
            self.call('create_workflow_action', {'workflow_id': workflow_id, 'trigger_type': trigger, 'action_type': 'run_commands',
                                                 'action_config': {'commands': ['x']}, 'job_ids': gates}, id=workflow_id)
        self.assertEqual(['on_jobs_complete', 'on_worker_start'], self.due(workflow_id, node_id))

    def test_a_gate_that_is_deleted_is_not_waited_for(self):
        workflow_id = self.create('a:\nb:', actions=[self.action('on_jobs_complete', [0, 1])])
        node_id = self.node(workflow_id)
        jobs = self.claim(workflow_id, node_id)
        self.sync(workflow_id, node_id, completions=[self.end(jobs['a'])])
        self.assertEqual([], self.due(workflow_id, node_id))
        self.assertRefused('wait for its end', 'delete_job', id=jobs['b']['id'])
        self.sync(workflow_id, node_id, returned=[[jobs['b']['id'], 1]])
        self.call('delete_job', id=jobs['b']['id'])
        self.assertEqual(['on_jobs_complete'], self.due(workflow_id, node_id))

    def test_a_persistent_action_lost_with_an_answer_comes_back(self):
        workflow_id = self.create('a:', actions=[self.action('on_worker_start', None, True)])
        node_id = self.node(workflow_id)
        self.assertEqual(['on_worker_start'], self.due(workflow_id, node_id))
        self.sync(workflow_id, node_id, held=[], held_actions=[])
        self.assertEqual(['on_worker_start'], self.due(workflow_id, node_id))

    def test_an_action_that_another_client_claimed_is_not_due_again(self):
        workflow_id = self.create('a:', actions=[self.action('on_workflow_start')])
        node_id = self.node(workflow_id)
        action_id = self.call('get_workflow_actions', id=workflow_id)[0]['id']
        self.call('claim_action', {'compute_node_id': node_id}, id=workflow_id, action_id=action_id)
        self.call('update_compute_node', {'is_active': False}, id=node_id)
        self.assertEqual([], self.due(workflow_id, self.node(workflow_id)))

    def test_a_taken_action_is_a_conflict_for_the_next(self):
        workflow_id = self.create('a:', actions=[self.action('on_workflow_start')])
        action_id = self.call('get_workflow_actions', id=workflow_id)[0]['id']
        self.assertTrue(self.call('claim_action', {'compute_node_id': 1}, id=workflow_id, action_id=action_id)['success'])
        with self.assertRaises(torc.Conflict):
            self.call('claim_action', {'compute_node_id': 2}, id=workflow_id, action_id=action_id)


class JobNameTest(ServiceTest):
    """No way leads to a second job of the same name in a workflow."""

    def setUp(self) -> None:
        super().setUp()
        self.workflow_id = self.create('a:\nb: a')
        self.job = {'workflow_id': self.workflow_id, 'name': 'a', 'command': 'x'}

    def names(self) -> List[str]:
        return [job['name'] for job in self.call('list_jobs', workflow_id=self.workflow_id)['items']]

    def test_every_way_to_a_second_job_of_one_name_is_refused(self):
        taken = f"workflow {self.workflow_id} has a job 'a' already; give another name"
        self.assertRefused(taken, 'create_job', self.job)
        self.assertRefused(taken, 'create_jobs', {'jobs': [dict(self.job, name='new'), self.job]})
        twice = {'jobs': [dict(self.job, name='new')] * 2}
        self.assertRefused("the name 'new' stands twice", 'create_jobs', twice)
        self.assertRefused(taken, 'update_job', {'name': 'a'}, id=2)
        running = self.claim(self.workflow_id, self.node(self.workflow_id))['a']
        jobs = {'jobs': [{'name': 'b', 'command': 'x'}]}
        self.assertRefused("has a job 'b' already", 'spawn_jobs', jobs, id=running['id'])
        columns = 'workflow_id, name, command, kind_id'
        for sql in ("UPDATE job SET name = 'a' WHERE id = 2",
                    f'INSERT INTO job ({columns}) SELECT {columns} FROM job'):
            answer = self.call('admin_sql', {'sql': sql, 'write': True})
            self.assertIn('two jobs of a workflow would have the same name', answer.message)
        self.assertEqual(['a', 'b'], self.names())

    def test_a_plan_that_another_program_made_may_not_hold_a_name_twice(self):
        body = plan_of({'name': 'w', 'jobs': [{'name': name, 'command': 'x'} for name in 'ab']}).body
        body['jobs'] = [job._replace(name='a') for job in body['jobs']]
        self.assertRefused("the name 'a' stands twice among the jobs", 'create_workflow_from_spec', body)

    def test_a_name_is_free_for_its_owner_for_other_workflows_and_after_a_deletion(self):
        self.assertEqual('a', self.call('update_job', {'name': 'a', 'command': 'y'}, id=1)['name'])
        self.call('create_job', dict(self.job, workflow_id=self.create('c:')))
        self.call('delete_job', id=1)
        self.assertEqual('a', self.call('update_job', {'name': 'a'}, id=2)['name'])
        self.call('create_job', dict(self.job, name='b'))
        self.assertEqual(['a', 'b'], self.names())


class GraphTest(ServiceTest):
    """What jobs wait for, as sets that are told once."""

    def test_jobs_that_wait_for_the_same_share_a_set(self):
        workflow_id = self.create('a:\nb:\nc: a b\nd: b a\ne: a\n')
        graph = self.call('get_dependency_graph', id=workflow_id)
        names, numbers, sets = graph['job_names'], graph['set_numbers'], graph['sets']
        self.assertEqual({'a': [], 'b': [], 'c': ['a', 'b'], 'd': ['a', 'b'], 'e': ['a']},
                         {name: [names[job_id - 1] for job_id in sets[number]]
                          for name, number in zip(names, numbers)})
        self.assertEqual((3, numbers[2]), (len(sets), numbers[3]))

    def test_files_and_user_data_count_before_the_workflow_is_initialized(self):
        workflow_id = self.call('create_workflow', {'name': 'w', 'user': 'tester'})['id']
        file_id = self.call('create_file', {'workflow_id': workflow_id, 'name': 'f', 'path': 'f'})['id']
        record_id = self.call('create_user_data', {'workflow_id': workflow_id, 'name': 'u'})['id']
        for name, more in (('a', {'output_file_ids': [file_id]}),
                           ('b', {'output_user_data_ids': [record_id], 'depends_on_job_ids': [1]}),
                           ('c', {'input_file_ids': [file_id], 'input_user_data_ids': [record_id]}),
                           ('d', {'input_file_ids': [file_id], 'depends_on_job_ids': [2]})):
            self.call('create_job', dict(more, workflow_id=workflow_id, name=name, command='true'))
        graph = self.call('get_dependency_graph', id=workflow_id)
        self.assertEqual([1, 2, 3, 4], graph['job_ids'])
        sets = [graph['sets'][number] for number in graph['set_numbers']]
        self.assertEqual([[], [1], [1, 2], [1, 2]], sets)
        empty = self.call('create_workflow', {'name': 'empty', 'user': 'tester'})['id']
        self.assertEqual([], self.call('get_dependency_graph', id=empty)['sets'])


class StateTest(ServiceTest):
    """What each operation makes of a job in each status. '-' in the tables: refused with 422, and nothing changes."""
    COLUMNS = 'uninitialized blocked ready pending running completed failed canceled terminated disabled pending_failed'.split()
    SHORT = {name[:6]: name for name in COLUMNS if name != 'pending_failed'}
    SHORT['undeci'] = 'pending_failed'      # undecided
    OPERATIONS = """
        operation            uninit  blocke  ready   pendin  runnin  comple  failed  cancel  termin  disabl  undeci
        start                -       -       -       runnin  runnin  -       -       -       -       -       -
        complete completed   comple  comple  comple  comple  comple  comple  -       -       -       -       comple
        complete failed      failed  failed  failed  failed  failed  -       failed  -       -       -       failed
        complete terminated  termin  termin  termin  termin  termin  -       -       -       termin  -       termin
        complete pending_failed  undeci  undeci  undeci  undeci  undeci  -   -       -       -       -       undeci
        complete canceled    cancel  cancel  cancel  cancel  cancel  -       -       -       -       -       cancel
        complete ready       -       -       -       -       -       -       -       -       -       -       -
        complete disabled    -       -       -       -       -       -       -       -       -       -       -
        retry                -       -       -       -       ready   -       ready   -       ready   -       -
        manage uninitialized  uninit  uninit  uninit  uninit  uninit  uninit  uninit  uninit  uninit  uninit  uninit
        manage blocked       blocke  blocke  blocke  blocke  blocke  blocke  blocke  blocke  blocke  blocke  blocke
        manage ready         ready   ready   ready   ready   ready   ready   ready   ready   ready   ready   ready
        manage disabled      disabl  disabl  disabl  disabl  disabl  disabl  disabl  disabl  disabl  disabl  disabl
        manage completed     -       -       -       -       -       -       -       -       -       -       -
        manage failed        -       -       -       -       -       -       -       -       -       -       -
        manage pending_failed  -     -       -       -       -       -       -       -       -       -       -
        put disabled         disabl  -       -       -       -       -       -       -       -       disabl  -
        put ready            -       -       ready   -       -       -       -       -       -       -       -
        put completed        -       -       -       -       -       comple  -       -       -       -       -
        put uninitialized    uninit  -       -       -       -       -       -       -       -       -       -
        delete               gone    gone    gone    -       -       gone    gone    gone    gone    gone    gone
        initialize           ready   blocke  ready   -       -       ready   ready   blocke  ready   disabl  ready
        reinitialize         ready   blocke  ready   pendin  runnin  comple  failed  cancel  termin  disabl  ready
        reset                uninit  blocke  ready   -       -       comple  failed  cancel  termin  disabl  undeci
        reset forced         uninit  blocke  ready   uninit  uninit  comple  failed  cancel  termin  disabl  undeci
        reset_jobs           uninit  uninit  uninit  -       -       uninit  uninit  uninit  uninit  disabl  uninit
        reset_jobs failed    uninit  blocke  ready   pendin  runnin  comple  uninit  uninit  uninit  disabl  uninit
        cancel               uninit  cancel  cancel  cancel  cancel  comple  failed  cancel  termin  disabl  undeci
        archive              uninit  blocke  ready   pendin  runnin  comple  failed  cancel  termin  disabl  undeci
        """
    ENDS = {'completed': 0, 'failed': 1, 'terminated': 2, 'pending_failed': 3}      # return codes

    def job_in(self, status: str, begins: str = 'initialize_jobs') -> Tuple[int, int, int]:
        """A job with this status and two that wait for it in turn: ids of workflow, node and job. `begins`: what begins run 1."""
        workflow_id = self.call('create_workflow', {'name': status, 'user': 'u'})['id']
        if begins == 'reset_workflow_status':
            self.call(begins, id=workflow_id)
        waits = []
        if status in ('blocked', 'canceled'):
            waits = [self.call('create_job', {'workflow_id': workflow_id, 'name': 'before', 'command': 'x'})['id']]
        job_id = self.call('create_job', {'workflow_id': workflow_id, 'name': 'job', 'command': 'x', 'depends_on_job_ids': waits})['id']
        child = self.call('create_job', {'workflow_id': workflow_id, 'name': 'child', 'command': 'x', 'depends_on_job_ids': [job_id]})['id']
        self.call('create_job', {'workflow_id': workflow_id, 'name': 'grandchild', 'command': 'x', 'depends_on_job_ids': [child]})
        node_id = self.node(workflow_id)
        if status == 'disabled':
            self.call('update_job', {'status': 'disabled'}, id=job_id)
        if status != 'uninitialized':
            self.call('initialize_jobs', id=workflow_id)
        if status in ('pending', 'running', 'canceled', *self.ENDS):
            job = next(iter(self.claim(workflow_id, node_id).values()))
        if status in ('running', *self.ENDS):
            self.call('start_job', job_id=job_id, run_id=1, compute_node_id=node_id)
        if status == 'canceled':
            self.sync(workflow_id, node_id, completions=[self.end(job, 'failed', 1)])
        if status in self.ENDS:
            self.sync(workflow_id, node_id, completions=[self.end(job, status, self.ENDS[status])])
        self.assertEqual(status, self.call('get_job', id=job_id)['status'])
        with self.store.transaction():
            torc.recount_sets(self.store, workflow_id)      # as initialize does
        return workflow_id, node_id, job_id

    def operate(self, words: str, workflow_id: int, node_id: int, job_id: int, run_id: int = 1) -> Any:
        """Carry out an operation of the table."""
        verb, _, what = words.partition(' ')
        result = {'job_id': job_id, 'workflow_id': workflow_id, 'run_id': run_id, 'compute_node_id': node_id, 'return_code': self.ENDS.get(what, 9),
                  'exec_time_minutes': 1.0, 'completion_time': '2026-01-01T00:00:00Z', 'status': what}
        if verb == 'batch':
            entry = {'job_id': job_id, 'status': what, 'run_id': run_id, 'result': result}
            errors = self.call('batch_complete_jobs', {'completions': [entry]}, id=workflow_id)['errors']
            if errors:
                raise torc.Refused(errors[0]['message'])
            return None
        return {
            'start': lambda: self.call('start_job', job_id=job_id, run_id=run_id, compute_node_id=node_id),
            'complete': lambda: self.call('complete_job', result, job_id=job_id, status=what, run_id=run_id),
            'retry': lambda: self.call('retry_job', job_id=job_id, run_id=run_id, max_retries=3),
            'manage': lambda: self.call('manage_status_change', job_id=job_id, status=what, run_id=run_id),
            'put': lambda: self.call('update_job', {'status': what}, id=job_id),
            'delete': lambda: self.call('delete_job', id=job_id),
            'initialize': lambda: self.call('initialize_jobs', id=workflow_id),
            'reinitialize': lambda: self.call('initialize_jobs', id=workflow_id, only_uninitialized=True),
            'reset': lambda: self.call('reset_workflow_status', id=workflow_id, force=bool(what)),
            'reset_jobs': lambda: self.call('reset_job_status', id=workflow_id, failed_only=bool(what)),
            'cancel': lambda: self.call('cancel_workflow', id=workflow_id),
            'archive': lambda: self.call('archive_workflow', {'is_archived': True}, id=workflow_id),
        }[verb]()

    def outcome(self, words: str, ids: Tuple[int, int, int], **more: Any) -> str:
        """Status of the job after an operation; '' if it was refused, which must change nothing."""
        with self.undone():
            before = self.dump()
            try:
                self.operate(words, *ids, **more)
                found = self.store.value('SELECT status FROM job WHERE id = ?', (ids[2],))
                if found is not None and words != 'put disabled':   # before initialize nothing is counted
                    self.assertWhole()
                return 'gone' if found is None else torc.STATUS_NAMES[found]
            except torc.TorcError as error:
                self.assertEqual(422, error.http)
                self.assertIsNone(torc.RETRY_WORDS.search(error.message), error.message)
            self.assertUnchanged(before)
        return ''

    def test_every_operation_on_every_status(self):
        rows = rows_of(self.OPERATIONS)
        for short, status in self.SHORT.items():
            ids, run_id = self.job_in(status), int(status != 'uninitialized')
            for row in rows:
                words = row['operation']
                with self.subTest(words, status=status):
                    expected = self.SHORT.get(row[short], row[short])
                    self.assertEqual(expected, self.outcome(words, ids, run_id=run_id))
                    if words.startswith('complete'):
                        self.assertEqual(expected, self.outcome(words.replace('complete', 'batch', 1), ids, run_id=run_id))

    def test_what_carries_a_stale_run_changes_nothing(self):
        for status in self.COLUMNS:
            ids = self.job_in(status, begins='reset_workflow_status')
            for run_id in (0, 2, -1, torc.MAX_INTEGER):
                for words in ('start', 'complete completed', 'complete failed', 'complete pending_failed', 'batch completed', 'retry', 'manage uninitialized',
                              'manage ready', 'manage disabled'):
                    if words.split()[-1] == status and words.startswith('manage'):
                        continue    # it says what is so already
                    with self.subTest(words, status=status, run_id=run_id):
                        self.assertEqual('', self.outcome(words, ids, run_id=run_id))

    def test_an_archived_workflow_goes_on_but_does_not_begin_again(self):
        for status, words, expected in (
                ('pending', 'start', 'running'), ('running', 'complete completed', 'completed'), ('failed', 'retry', 'ready'), ('running', 'cancel', 'canceled'),
                ('ready', 'delete', 'gone'), ('uninitialized', 'initialize', ''), ('failed', 'reinitialize', ''), ('failed', 'reset', ''), ('running', 'reset forced', '')):
            ids = self.job_in(status)
            self.call('archive_workflow', {'is_archived': True}, id=ids[0])
            with self.subTest(words):
                self.assertEqual(expected, self.outcome(words, ids))

    def test_a_canceled_workflow_starts_and_retries_nothing(self):
        for status, words, expected in (
                ('pending', 'start', ''), ('failed', 'retry', ''), ('running', 'complete failed', 'canceled'), ('running', 'complete completed', 'canceled'),
                ('ready', 'complete completed', ''), ('running', 'initialize', 'ready'), ('failed', 'reinitialize', 'failed'), ('running', 'cancel', 'canceled')):
            ids = self.job_in(status)
            self.call('cancel_workflow', id=ids[0])
            with self.subTest(words, status=status):
                self.assertEqual(expected, self.outcome(words, ids))
        self.assertEqual({}, self.claim(ids[0], ids[1]))

    def test_what_depends_on_a_job_that_is_set_back_follows_to_the_last_at_the_next_initialize(self):
        for status in ('completed', 'failed', 'terminated', 'canceled', 'disabled'):
            with self.subTest(status):
                workflow_id, node_id, job_id = self.job_in(status)
                apart = self.call('create_job', {'workflow_id': workflow_id, 'name': 'apart', 'command': 'x'})['id']
                self.call('initialize_jobs', id=workflow_id, only_uninitialized=True)
                self.drive(workflow_id, {})
                found = self.statuses(workflow_id)
                self.assertEqual('completed', found['apart'])
                self.call('manage_status_change', id=job_id, status='uninitialized', run_id=1)
                ended, found = found['grandchild'], self.statuses(workflow_id)
                self.assertEqual(['uninitialized'] * 2 + [ended, 'completed'], [found[name] for name in ('job', 'child', 'grandchild', 'apart')])
                self.call('initialize_jobs', id=workflow_id, only_uninitialized=True)
                found = self.statuses(workflow_id)
                wait = 'canceled' if status == 'canceled' else 'blocked'    # what canceled it is still there
                self.assertEqual([wait, wait, 'completed'], [found[name] for name in ('child', 'grandchild', 'apart')])
                current = self.call('list_results', workflow_id=workflow_id)['items']
                self.assertNotIn(job_id, [row['job_id'] for row in current])
                self.assertIn(apart, [row['job_id'] for row in current])
        self.assertWhole()

    def test_a_decision_about_a_failure_goes_on_to_what_waits(self):
        for status, child in (('failed', 'canceled'), ('terminated', 'canceled'), ('completed', 'ready')):
            with self.subTest(status):
                workflow_id, node_id, job_id = self.job_in('pending_failed')
                self.assertFalse(self.call('is_workflow_complete', id=workflow_id)['is_complete'])
                self.operate('complete ' + status, workflow_id, node_id, job_id)
                self.assertEqual((status, child), tuple(self.statuses(workflow_id)[name] for name in ('job', 'child')))
                self.assertEqual([(status, 3)], [(row['status'], row['return_code']) for row in self.call('list_results', workflow_id=workflow_id, all_runs=True)['items']])
        workflow_id, node_id, job_id = self.job_in('pending_failed')
        self.call('reset_workflow_status', id=workflow_id)
        self.assertRefused('no result in run 2', 'complete_job', {
            'job_id': job_id, 'workflow_id': workflow_id, 'run_id': 2, 'compute_node_id': node_id, 'return_code': 3, 'exec_time_minutes': 1.0,
            'completion_time': '2026-01-01T00:00:00Z', 'status': 'failed'}, job_id=job_id, status='failed', run_id=2)

    def test_a_node_that_ended_stays_ended(self):
        workflow_id, node_id, _ = self.job_in('pending')
        self.call('update_compute_node', {'is_active': True, 'pid': 7}, id=node_id)
        self.call('update_compute_node', {'is_active': False}, id=node_id)
        self.assertRefused('register a new one', 'update_compute_node', {'is_active': True}, id=node_id)
        self.call('update_compute_node', {'duration_seconds': 5.0, 'labels': ['x']}, id=node_id)
        self.assertNotIn('labels', self.call('get_compute_node', id=node_id))

    def test_only_the_node_that_claimed_a_job_starts_it(self):
        workflow_id, _, job_id = self.job_in('pending')
        self.assertRefused('in the hands of compute node', 'start_job', job_id=job_id, run_id=1, compute_node_id=self.node(workflow_id))
        stranger = self.node(self.job_in('ready')[0])
        self.assertRefused('has no compute node', 'start_job', job_id=job_id, run_id=1, compute_node_id=stranger)

    def test_labels_are_a_set_and_an_empty_list_takes_them_away(self):
        _, _, job_id = self.job_in('ready')
        for labels, kept in ((['b', 'a', 'b'], ['a', 'b']), (['a', 'b'], ['a', 'b']), (None, ['a', 'b']), ([], None), (['c'], ['c'])):
            self.assertEqual(kept, self.call('update_job', {'labels': labels}, id=job_id).get('labels'))

    def test_ephemeral_user_data_of_what_stays_done_is_kept(self):
        workflow_id = self.call('create_workflow', {'name': 'w', 'user': 'u'})['id']
        kept, cleared, lasting = (self.call('create_user_data', {'workflow_id': workflow_id, 'name': name, 'is_ephemeral': name != 'lasting'})['id']
                                  for name in ('kept', 'cleared', 'lasting'))
        for name, makes in (('good', [kept]), ('bad', [cleared, lasting])):
            self.call('create_job', {'workflow_id': workflow_id, 'name': name, 'command': 'x', 'output_user_data_ids': makes})
        self.call('initialize_jobs', id=workflow_id)
        self.drive(workflow_id, {'bad': 'failed'})

        def data() -> List[Any]:
            return [self.call('get_user_data', id=record).get('data') for record in (kept, cleared, lasting)]
        for record in (kept, cleared, lasting):
            self.call('update_user_data', {'data': 5}, id=record)
        self.call('reset_job_status', id=workflow_id, failed_only=True)
        with self.undone():
            self.call('initialize_jobs', id=workflow_id, only_uninitialized=True, clear_ephemeral_user_data=False)
            self.assertEqual([5, 5, 5], data())
        self.call('initialize_jobs', id=workflow_id, only_uninitialized=True)
        self.assertEqual([5, None, 5], data())

    def test_actions_of_a_workflows_end_wait_for_its_end_again(self):
        action = {'trigger_type': 'on_workflow_complete', 'action_type': 'run_commands', 'action_config': {'commands': ['x']}}
        for words in ('manage uninitialized', 'reset_jobs', 'reset_jobs failed', 'retry'):
            ids = self.job_in('failed')
            self.call('create_workflow_action', dict(action, workflow_id=ids[0]), id=ids[0])
            self.sync(ids[0], ids[1])       # it is complete: the others were canceled
            self.assertEqual(1, len(self.call('get_pending_actions', id=ids[0])))
            with self.subTest(words):
                self.operate(words, *ids)
                self.assertEqual([], self.call('get_pending_actions', id=ids[0]))
                self.sync(ids[0], ids[1])
                self.assertEqual([], self.call('get_pending_actions', id=ids[0]))
        ids = self.job_in('completed')
        self.call('create_workflow_action', dict(action, workflow_id=ids[0]), id=ids[0])
        for job_id in self.call('list_job_ids', id=ids[0])['job_ids'][1:]:
            self.call('manage_status_change', id=job_id, status='disabled', run_id=1)
        self.assertEqual(1, len(self.call('get_pending_actions', id=ids[0])), 'the last open job was switched off')

    def test_a_gate_that_is_switched_off_has_ended(self):
        workflow_id, _, job_id = self.job_in('ready')
        self.call('create_workflow_action', {'workflow_id': workflow_id, 'trigger_type': 'on_jobs_complete', 'action_type': 'run_commands',
                                             'action_config': {'commands': ['x']}, 'job_ids': [job_id]}, id=workflow_id)
        self.assertEqual([], self.call('get_pending_actions', id=workflow_id))
        self.call('manage_status_change', id=job_id, status='disabled', run_id=1)
        self.assertEqual([[job_id]], [action['job_ids'] for action in self.call('get_pending_actions', id=workflow_id)])

    def test_a_whole_initialize_arms_everything_again_and_drops_recovery(self):
        workflow_id, node_id, job_id = self.job_in('completed')
        body = {'workflow_id': workflow_id, 'action_type': 'run_commands', 'action_config': {'commands': ['x']}}
        for trigger, more in (('on_workflow_start', {}), ('on_jobs_complete', {'job_ids': [job_id]}), ('on_workflow_complete', {}), ('on_workflow_start', {'is_recovery': True})):
            made = self.call('create_workflow_action', dict(body, trigger_type=trigger, **more), id=workflow_id)
            self.call('claim_action', {'compute_node_id': node_id}, id=workflow_id, action_id=made['id'])
        for partial, expected in ((True, [True, True, False]), (False, [False, False, False])):
            with self.undone():
                self.call('initialize_jobs', id=workflow_id, only_uninitialized=partial)
                self.assertEqual(expected, [action['executed'] for action in self.call('get_workflow_actions', id=workflow_id)])

    def test_a_result_made_by_hand_is_the_current_one(self):
        workflow_id, node_id, job_id = self.job_in('failed')
        result = dict(self.call('list_results', workflow_id=workflow_id)['items'][0], attempt_id=2, return_code=5)
        made = self.call('create_result', {key: value for key, value in result.items() if key not in ('id', 'job_name')})
        self.assertEqual([made['id']], [row['id'] for row in self.call('list_results', workflow_id=workflow_id)['items']])


class ResetTest(ServiceTest):
    """Initialize, reinitialize, reset, change detection."""

    def test_the_run_grows_with_every_reset(self):
        workflow_id = self.create('a:')
        self.assertEqual(1, self.call('get_workflow', id=workflow_id)['run_id'])
        self.assertEqual(2, self.call('reset_workflow_status', id=workflow_id)['run_id'])

    def test_a_partial_run_keeps_what_is_done_and_repeats_what_depends_on_the_rest(self):
        workflow_id = self.create('a:\nb:\nc: a b\nd: a')
        self.drive(workflow_id, {'b': 'failed'})
        self.call('reset_workflow_status', id=workflow_id)
        self.call('reset_job_status', id=workflow_id, failed_only=True)
        self.call('initialize_jobs', id=workflow_id, only_uninitialized=True)
        self.assertEqual({'a': 'completed', 'b': 'ready', 'c': 'blocked', 'd': 'completed'}, self.statuses(workflow_id))
        self.assertEqual(2, self.call('list_results', workflow_id=workflow_id)['total_count'])
        self.assertEqual('completed', self.drive(workflow_id, {})['c'])
        self.assertWhole()

    def test_running_jobs_forbid_a_reset_unless_forced(self):
        workflow_id = self.create('a:')
        self.claim(workflow_id, self.node(workflow_id))
        self.assertRefused('pending or running', 'reset_workflow_status', id=workflow_id)
        self.assertRefused('pending or running', 'initialize_jobs', id=workflow_id)
        self.call('reset_workflow_status', id=workflow_id, force=True)
        self.call('initialize_jobs', id=workflow_id)
        self.assertEqual({'a': 'ready'}, self.statuses(workflow_id))

    def test_an_archived_workflow_is_left_alone(self):
        workflow_id = self.create('a:')
        self.call('archive_workflow', {'is_archived': True}, id=workflow_id)
        self.assertRefused('is archived', 'initialize_jobs', id=workflow_id)
        self.assertRefused('is archived', 'reset_workflow_status', id=workflow_id, force=True)

    def test_a_canceled_workflow_gives_no_work_until_it_is_reset(self):
        workflow_id = self.create('a:\nb: a')
        self.call('cancel_workflow', id=workflow_id)
        self.assertEqual({}, self.claim(workflow_id, self.node(workflow_id)))
        self.assertEqual({'is_complete': True, 'is_canceled': True}, self.call('is_workflow_complete', id=workflow_id))
        self.call('reset_workflow_status', id=workflow_id)
        self.call('reset_job_status', id=workflow_id)
        self.call('initialize_jobs', id=workflow_id)
        self.assertEqual({'a': 'ready', 'b': 'blocked'}, self.statuses(workflow_id))

    def test_changed_files_inputs_and_missing_outputs_are_found(self):
        workflow_id = self.call('create_workflow', {'name': 'w', 'user': 'u'})['id']
        inp, mid, out = (self.call('create_file', {'workflow_id': workflow_id, 'name': n, 'path': n, 'st_mtime': 5.0})['id'] for n in ('in', 'mid', 'out'))
        data = self.call('create_user_data', {'workflow_id': workflow_id, 'name': 'd', 'data': 1})['id']
        for name, reads, makes, asks in (('one', [inp], [mid], []), ('two', [mid], [out], []), ('three', [], [], [data])):
            self.call('create_job', {'workflow_id': workflow_id, 'name': name, 'command': 'x', 'input_file_ids': reads,
                                     'output_file_ids': makes, 'input_user_data_ids': asks})
        self.call('initialize_jobs', id=workflow_id)
        self.drive(workflow_id, {})

        def changed(**times: Optional[float]) -> Dict[str, str]:
            body = {'files': {str(file_id): times.get(name, 5.0) for name, file_id in (('inp', inp), ('mid', mid), ('out', out))}, 'dry_run': True}
            return {row['job_name']: row['reason'] for row in self.call('check_changes', body, id=workflow_id)['changed']}
        self.assertEqual({}, changed())
        self.assertEqual({}, changed(inp=5.005))
        self.assertEqual({'one': 'its input in changed'}, changed(inp=6.0))
        self.assertEqual({'two': 'its output out is missing'}, changed(out=None))
        self.assertEqual({'one': 'its output mid is missing', 'two': 'its input mid changed'}, changed(mid=None))
        self.call('update_user_data', {'data': 2}, id=data)
        self.assertEqual({'three': 'its command, environment, files or input data changed'}, changed())
        self.assertEqual({'reinitialized_jobs': ['three']}, self.call('process_changed_job_inputs', id=workflow_id, dry_run=True))
        with self.undone():
            self.call('check_changes', {'files': {str(inp): None}}, id=workflow_id)
            self.assertNotIn('st_mtime', self.call('get_file', id=inp))
        self.call('check_changes', {'files': {str(inp): 6.0}}, id=workflow_id)
        self.call('reset_workflow_status', id=workflow_id)
        self.call('initialize_jobs', id=workflow_id, only_uninitialized=True)
        self.assertEqual({'one': 'ready', 'two': 'blocked', 'three': 'ready'}, self.statuses(workflow_id))

    def test_what_follows_from_a_change_is_named_and_is_what_initialize_makes_run_again(self):
        def found(**more: Any) -> Dict[str, Dict[str, str]]:
            answer = self.call('check_changes', dict({'files': {}}, **more), id=workflow_id)
            return {key: {row['job_name']: row['reason'] for row in rows} for key, rows in answer.items()}
        workflow_id = self.create('a:\nb: a\nc: b\nd: b\ne: c d\nother:\nbad:\nafter: bad')
        self.drive(workflow_id, {'bad': 'failed'})
        self.assertEqual({'changed': {}, 'downstream_jobs': {}}, found(dry_run=True))
        self.call('update_job', {'command': 'another'}, id=self.store.value("SELECT min(id) FROM job"))
        downstream = {name: f'it depends on {cause}' for name, cause in ('ba', 'cb', 'db', 'ec')}
        wanted = {'changed': {'a': 'its command, environment, files or input data changed'},
                  'downstream_jobs': downstream}
        before = self.statuses(workflow_id)
        self.assertEqual(wanted, found(dry_run=True))
        self.assertEqual(before, self.statuses(workflow_id))
        self.assertEqual(wanted, found())
        downstream['a'] = 'it was added or set back, and not initialized since'
        self.assertEqual({'changed': {}, 'downstream_jobs': downstream}, found(dry_run=True))
        self.call('reset_workflow_status', id=workflow_id)
        self.call('initialize_jobs', id=workflow_id, only_uninitialized=True)
        after = self.statuses(workflow_id)
        self.assertEqual(set('abcde'), {name for name, status in after.items() if status != before[name]})

    def test_ephemeral_user_data_is_cleared_when_its_maker_runs_again(self):
        workflow_id = self.call('create_workflow', {'name': 'w', 'user': 'u'})['id']
        made, given = (self.call('create_user_data', {'workflow_id': workflow_id, 'name': n, 'is_ephemeral': True, 'data': 1})['id'] for n in ('made', 'given'))
        self.call('create_job', {'workflow_id': workflow_id, 'name': 'a', 'command': 'x', 'output_user_data_ids': [made], 'input_user_data_ids': [given]})
        self.call('initialize_jobs', id=workflow_id)
        self.assertNotIn('data', self.call('get_user_data', id=made))
        self.assertEqual(1, self.call('get_user_data', id=given)['data'])

    def test_required_files_and_user_data_are_told(self):
        workflow_id = self.call('create_workflow', {'name': 'w', 'user': 'u'})['id']
        used, made = (self.call('create_file', {'workflow_id': workflow_id, 'name': n, 'path': n})['id'] for n in ('used', 'made'))
        data = self.call('create_user_data', {'workflow_id': workflow_id, 'name': 'd'})['id']
        self.call('create_job', {'workflow_id': workflow_id, 'name': 'a', 'command': 'x', 'input_file_ids': [used], 'output_file_ids': [made],
                                 'input_user_data_ids': [data]})
        self.call('initialize_jobs', id=workflow_id)
        self.assertEqual({'files': [used]}, self.call('list_required_existing_files', id=workflow_id))
        self.assertEqual({'user_data': [data]}, self.call('list_missing_user_data', id=workflow_id))
        self.drive(workflow_id, {})
        self.assertEqual({'files': [used, made]}, self.call('list_required_existing_files', id=workflow_id))


class ApplySpecTest(ServiceTest):
    """A workflow follows its edited file: what changes, what runs again, and what stays."""

    SPEC = {
        'name': 'study', 'env': {'A': '1', 'B': '2'},
        'files': [{'name': name, 'path': name + '.csv'} for name in ('raw', 'mid', 'end')],
        'user_data': [{'name': 'limits', 'data': {'low': 1, 'high': 2}}, {'name': 'made'}],
        'resource_requirements': [{'name': 'small', 'memory': '1g'}, {'name': 'big', 'num_cpus': 4}],
        'failure_handlers': [{'name': 'again', 'rules': [{'exit_codes': [3], 'max_retries': 2}]}],
        'jobs': [
            {'name': 'prep', 'command': 'prep', 'input_files': ['raw'], 'output_files': ['mid'],
             'resource_requirements': 'small'},
            {'name': 'work_{i}', 'command': 'work {i}', 'input_files': ['mid'], 'parameters': {'i': '1:3'},
             'failure_handler': 'again'},
            {'name': 'collect', 'command': 'collect', 'depends_on_regexes': ['^work_'],
             'output_files': ['end'], 'env': {'C': '3'}},
            {'name': 'aside', 'command': 'aside', 'input_user_data': ['limits'],
             'output_user_data': ['made']},
        ],
        'actions': [{'trigger_type': 'on_jobs_ready', 'action_type': 'run_commands', 'commands': ['x'],
                     'jobs': ['collect']}]}
    WORK = ['work_1', 'work_2', 'work_3']
    CHAIN = ['prep', *WORK, 'collect']

    def spec(self, **changes: Any) -> Dict[str, Any]:
        """SPEC with changes: 'jobs__prep' -> fields of that block (None takes one out); others are fields."""
        spec = copy.deepcopy(self.SPEC)
        for key, value in changes.items():
            block, _, name = key.partition('__')
            home = next(item for item in spec[block] if item['name'].startswith(name)) if name else spec
            home.update(copy.deepcopy(value if name else {key: value}))
            for field in [field for field, wanted in home.items() if wanted is None]:
                del home[field]
        return spec

    def more(self, **job: Any) -> Dict[str, Any]:
        """SPEC with another job."""
        return self.spec(jobs=[*self.SPEC['jobs'], dict({'command': 'c'}, **job)])

    def plan(self, spec: Any = SPEC, **changes: Any) -> Dict[str, Any]:
        """The body of a plan, as it comes by HTTP."""
        body = json.loads(json.dumps(plan_of(spec).body))
        body['workflow'].update(user='u', spec_path='/home/u/study.yaml')
        return dict(body, **changes)

    def begin(self, spec: Any = SPEC) -> int:
        """A workflow of a spec, initialized."""
        workflow_id = self.call('create_workflow_from_spec', self.plan(spec))['workflow_id']
        self.call('initialize_jobs', id=workflow_id)
        return workflow_id

    def make(self, spec: Any = SPEC, **ends: str) -> int:
        """A workflow of a spec that has run, each job ending as told."""
        workflow_id = self.begin(spec)
        self.finish(workflow_id, **ends)
        return workflow_id

    def finish(self, workflow_id: int, **ends: str) -> Set[str]:
        """Run what there is to run; no node is left. The statuses that there are then."""
        statuses = self.drive(workflow_id, ends)
        with self.store.transaction():
            self.store.run('UPDATE compute_node SET is_active = 0')
        return set(statuses.values())

    def apply(self, workflow_id: int, spec: Any, times: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
        """Apply a spec, after a dry run that has said the same and has changed nothing."""
        body, before = self.plan(spec, **({'file_times': times} if times else {})), self.dump()
        told = self.call('apply_spec', body, id=workflow_id, dry_run=True)
        self.assertUnchanged(before)
        done = self.call('apply_spec', body, id=workflow_id)
        self.assertEqual(told, done)
        self.assertWhole()
        return done

    def row(self, table: str, name: str) -> int:
        """Id of the row of this name."""
        return self.store.value(f'SELECT id FROM {table} WHERE name = ?', (name,))

    def jobs(self, workflow_id: int) -> Dict[str, Dict[str, Any]]:
        """Jobs by name."""
        return {job['name']: job for job in self.call('list_jobs', workflow_id=workflow_id)['items']}

    def job_ids(self, workflow_id: int) -> Dict[str, int]:
        """Ids of jobs by name."""
        return {name: job['id'] for name, job in self.jobs(workflow_id).items()}

    @staticmethod
    def changes(answer: Dict[str, Any]) -> Dict[str, List[str]]:
        """'noun change field field' -> names."""
        rows = answer['changes']
        return {' '.join([row['noun'], row['change'], *row['fields']]): row['names'] for row in rows}

    @staticmethod
    def to_run(answer: Dict[str, Any]) -> Dict[str, str]:
        """Job -> why it is to run."""
        return {job['job_name']: job['reason'] for job in answer['to_run']}

    def assertNothing(self, answer: Dict[str, Any]) -> None:
        """Nothing differed, and nothing is to run."""
        self.assertEqual(([], []), (answer['changes'], answer['to_run']))

    def test_a_file_that_did_not_change_changes_nothing(self):
        workflow_id, before = self.make(), self.dump()
        reordered = self.spec(env={'B': '2', 'A': '1'}, user_data__limits={'data': {'high': 2, 'low': 1}})
        for spec in (self.SPEC, reordered):
            answer = self.apply(workflow_id, spec)
            self.assertNothing(answer)
            self.assertEqual((1, 6), (answer['run_id'], answer['job_count']))
            self.assertUnchanged(before)

    OUTCOMES = (    # changes, what is told of them, jobs that run again
        ({'jobs__prep': {'command': 'other'}}, {'job changed command': ['prep']}, CHAIN),
        ({'jobs__work': {'command': 'work {i} -v'}}, {'job changed command': WORK}, CHAIN[1:]),
        ({'jobs__aside': {'invocation_script': 'sh'}}, {'job changed invocation_script': ['aside']},
         ['aside']),
        ({'jobs__collect': {'env': {'C': '4'}}}, {'job changed env': ['collect']}, ['collect']),
        ({'env': {'A': '1', 'B': '3'}},
         {'workflow changed env': ['study'], 'job changed env': [*CHAIN, 'aside']}, [*CHAIN, 'aside']),
        ({'jobs__collect': {'depends_on_regexes': ['^work_[12]']}}, {'job changed depends_on': ['collect']},
         ['collect']),
        ({'jobs__aside': {'depends_on': ['prep']}}, {'job changed depends_on': ['aside']}, ['aside']),
        ({'jobs__aside': {'input_files': ['raw']}}, {'job changed input_files': ['aside']}, ['aside']),
        ({'jobs__collect': {'output_files': None}}, {'job changed output_files': ['collect']}, ['collect']),
        ({'jobs__collect': {'output_files': None}, 'files': SPEC['files'][:2]},
         {'job changed output_files': ['collect'], 'file removed': ['end']}, ['collect']),
        ({'jobs__aside': {'input_user_data': None}, 'user_data': [{'name': 'made'}]},
         {'job changed input_user_data': ['aside'], 'user_data removed': ['limits']}, ['aside']),
        ({'files__raw': {'path': 'new.csv'}}, {'file changed path': ['raw']}, CHAIN),
        ({'user_data__limits': {'data': 3}}, {'user_data changed data': ['limits']}, ['aside']),
        ({'user_data__limits': {'data': {'low': True, 'high': 2}}}, {'user_data changed data': ['limits']},
         ['aside']),    # to Python, that is equal to 1
    )
    NO_OUTCOMES = (     # changes, what is told of them; nothing runs again
        ({'jobs__prep': {'resource_requirements': 'big'}}, {'job changed resource_requirements': ['prep']}),
        ({'jobs__prep': {'resource_requirements': None}, 'resource_requirements': []},
         {'job changed resource_requirements': ['prep'], 'resource_requirements removed': ['small', 'big']}),
        ({'resource_requirements__small': {'memory': '2g'}},
         {'resource_requirements changed memory': ['small']}),
        ({'jobs__prep': {'priority': 5, 'labels': ['x']}}, {'job changed priority labels': ['prep']}),
        ({'jobs__work': {'failure_handler': None}}, {'job changed failure_handler': WORK}),
        ({'jobs__work': {'failure_handler': None}, 'failure_handlers': []},
         {'job changed failure_handler': WORK, 'failure_handler removed': ['again']}),
        ({'failure_handlers__again': {'rules': [{'exit_codes': [4]}]}},
         {'failure_handler changed rules': ['again']}),
        ({'jobs__prep': {'supports_termination': True}}, {'job changed supports_termination': ['prep']}),
        ({'jobs__prep': {'cancel_on_blocking_job_failure': False}},
         {'job changed cancel_on_blocking_job_failure': ['prep']}),
        ({'jobs__prep': {'stdio': {'mode': 'none'}}}, {'workflow changed execution_config': ['study']}),
        ({'description': 'd', 'compute_node_wait_for_new_jobs_seconds': 7},
         {'workflow changed description compute_node_wait_for_new_jobs_seconds': ['study']}),
        ({'slurm_schedulers': [{'name': 's', 'account': 'a'}]}, {'slurm_scheduler added': ['s']}),
        ({'user_data__made': {'is_ephemeral': True}}, {'user_data changed is_ephemeral': ['made']}),
        ({'actions': []}, {'action removed': ['on_jobs_ready run_commands']}),
        ({'files': [*SPEC['files'], {'name': 'new', 'path': 'new'}]}, {'file added': ['new']}),
    )

    def test_what_changes_the_outcome_of_a_completed_job_lets_it_run_again_and_nothing_else(self):
        workflow_id = self.make()
        ids = self.job_ids(workflow_id)
        for changes, told, again in (*self.OUTCOMES, *((*row, []) for row in self.NO_OUTCOMES)):
            with self.subTest(changes=changes), self.undone():
                spec = self.spec(**changes)
                answer = self.apply(workflow_id, spec)
                self.assertEqual((told, again), (self.changes(answer), list(self.to_run(answer))))
                self.assertEqual((2, ids), (answer['run_id'], self.job_ids(workflow_id)))
                done = {name for name, status in self.statuses(workflow_id).items() if status == 'completed'}
                results = self.call('list_results', workflow_id=workflow_id)['items']
                kept = set(ids).difference(again)
                self.assertEqual((kept, kept), (done, {row['job_name'] for row in results}))
                self.assertEqual([], self.apply(workflow_id, spec)['changes'])
                self.assertEqual({'completed'}, self.finish(workflow_id))
                self.assertNothing(self.apply(workflow_id, spec))

    def test_reasons_are_told(self):
        workflow_id = self.make(work_2='failed')
        answer = self.apply(workflow_id, self.SPEC)
        self.assertEqual({'work_2': 'it failed', 'collect': 'it was canceled'}, self.to_run(answer))
        spec = self.more(name='more')
        spec['jobs'][0]['command'] = 'other'
        depends, not_run = 'a job that it depends on runs again', 'it is not done'
        told = self.to_run(self.apply(workflow_id, spec))
        self.assertEqual({'prep': 'its command changed', 'work_1': depends, 'work_2': not_run,
                          'work_3': depends, 'collect': not_run, 'more': 'it is new'}, told)

    def test_failed_jobs_in_the_middle_are_mended_and_the_others_keep_what_they_did(self):
        workflow_id = self.make(work_2='failed')
        before = self.call('list_results', workflow_id=workflow_id)['items']
        answer = self.apply(workflow_id, self.spec(jobs__work={'supports_termination': True}))
        self.assertEqual(['work_2', 'collect'], list(self.to_run(answer)))
        self.assertEqual({'completed'}, self.finish(workflow_id))
        now = {row['job_name']: row for row in self.call('list_results', workflow_id=workflow_id)['items']}
        self.assertEqual((2, 'completed'), (now['work_2']['run_id'], now['work_2']['status']))
        kept = [row for row in before if row['status'] == 'completed']
        self.assertEqual(kept, [now[row['job_name']] for row in kept])

    def test_jobs_come_and_go(self):
        workflow_id = self.make()
        ids = self.job_ids(workflow_id)
        answer = self.apply(workflow_id, self.spec(jobs__work={'parameters': {'i': '2:5'}}))
        self.assertEqual({'job added': ['work_4', 'work_5'], 'job changed depends_on': ['collect'],
                          'job removed': ['work_1']}, self.changes(answer))
        self.assertEqual({'collect': 'its depends_on changed', 'work_4': 'it is new', 'work_5': 'it is new'},
                         self.to_run(answer))
        gone, last = ids.pop('work_1'), max(ids.values())
        self.assertEqual(dict(ids, work_4=last + 1, work_5=last + 2), self.job_ids(workflow_id))
        for table in ('result', 'job_input_file', 'dep_member', 'action_job'):
            self.assertEqual([], self.store.rows(f'SELECT * FROM {table} WHERE job_id = ?', (gone,)), table)
        self.assertEqual({'completed'}, self.finish(workflow_id))

    def make_by_hand(self, workflow_id: int) -> Dict[str, int]:
        """A row of each kind that no file has declared: table -> id."""
        of = {'workflow_id': workflow_id, 'name': 'extra'}
        action = {'trigger_type': 'on_workflow_start', 'action_type': 'run_commands',
                  'action_config': {'commands': ['y']}}
        allocation, aside = dict(of, account='a', nodes=1, walltime='1:00:00'), self.row('job', 'aside')
        rows = {'job': self.call('create_job', dict(of, command='by hand')),
                'file': self.call('create_file', dict(of, path='x')),
                'user_data': self.call('create_user_data', dict(of, data=[1]), producer_job_id=aside),
                'resource_requirements': self.call('create_resource_requirements', dict(of, num_cpus=9)),
                'slurm_scheduler': self.call('create_slurm_scheduler', allocation),
                'failure_handler': self.call('create_failure_handler', dict(of, rules='[]')),
                'workflow_action': self.call('create_workflow_action', dict(action, **of), id=workflow_id)}
        return {table: row['id'] for table, row in rows.items()}

    def test_what_was_made_through_the_interface_stays(self):
        workflow_id = self.make()
        made = self.make_by_hand(workflow_id)
        self.apply(workflow_id, self.SPEC)
        self.finish(workflow_id)
        answer = self.apply(workflow_id, self.spec(jobs__prep={'priority': 1}))
        self.assertEqual({'job changed priority': ['prep']}, self.changes(answer))
        self.assertEqual([], answer['to_run'])
        for table, row_id in made.items():
            found = self.store.value(f'SELECT id FROM {table} WHERE id = ?', (row_id,))
            self.assertEqual(row_id, found, table)
        links = 'SELECT count(*) FROM job_output_user_data WHERE user_data_id = ?'
        self.assertEqual(1, self.store.value(links, (made['user_data'],)))

    def test_a_scheduler_stays_as_long_as_an_action_needs_it(self):
        workflow_id = self.make(self.spec(slurm_schedulers=[{'name': 's', 'account': 'a'}]))
        config = {'scheduler_id': self.row('slurm_scheduler', 's'), 'scheduler_type': 'slurm'}
        action = {'workflow_id': workflow_id, 'trigger_type': 'on_workflow_start',
                  'action_type': 'schedule_nodes', 'action_config': config}
        action_id = self.call('create_workflow_action', action, id=workflow_id)['id']
        self.assertEqual({}, self.changes(self.apply(workflow_id, self.SPEC)))
        self.call('delete_workflow_action', id=workflow_id, action_id=action_id)
        self.assertEqual({'slurm_scheduler removed': ['s']}, self.changes(self.apply(workflow_id, self.SPEC)))

    def test_what_was_made_through_the_interface_and_is_named_by_the_file_is_the_files_from_then_on(self):
        workflow_id = self.make()
        self.make_by_hand(workflow_id)
        answer = self.apply(workflow_id, self.more(name='extra', command='by hand'))
        self.assertEqual([], answer['changes'])
        self.assertEqual({'job removed': ['extra']}, self.changes(self.apply(workflow_id, self.SPEC)))

    def test_what_was_changed_by_hand_becomes_what_the_file_says(self):
        workflow_id = self.make()
        small, prep = self.row('resource_requirements', 'small'), self.row('job', 'prep')
        self.call('update_resource_requirements', {'memory': '9g'}, id=small)
        self.call('update_job', {'command': 'mine'}, id=prep)
        self.call('update_workflow', {'metadata': {'note': 'mine'}, 'name': 'mine'}, id=workflow_id)
        answer = self.apply(workflow_id, self.SPEC)
        self.assertEqual({'resource_requirements changed memory': ['small'], 'job changed command': ['prep'],
                          'workflow changed name': ['mine']}, self.changes(answer))
        self.assertEqual({}, self.to_run(answer))       # it has run with the file's command
        self.assertEqual({'note': 'mine'}, self.call('get_workflow', id=workflow_id)['metadata'])
        memory = self.store.value('SELECT memory_bytes FROM resource_requirements WHERE id = ?', (small,))
        self.assertEqual(1024 ** 3, memory)

    def test_what_jobs_have_written_into_user_data_stays(self):
        workflow_id = self.make()
        made, limits = self.row('user_data', 'made'), self.row('user_data', 'limits')
        self.call('update_user_data', {'data': [7]}, id=made)
        for changes in ({}, {'user_data__made': {'data': [1]}}):
            self.assertNothing(self.apply(workflow_id, self.spec(**changes)))
        self.assertEqual([7], self.call('get_user_data', id=made)['data'])
        spec = self.spec(user_data__limits={'data': None})      # as where it is to be set by hand
        self.assertNothing(self.apply(workflow_id, spec))
        self.assertEqual({'low': 1, 'high': 2}, self.call('get_user_data', id=limits)['data'])

    def test_a_renamed_file_is_the_same_file(self):
        workflow_id, file_id = self.make(), self.row('file', 'raw')
        spec = json.loads(json.dumps(self.SPEC).replace('"raw"', '"source"'))
        answer = self.apply(workflow_id, spec, times={'source': None})
        self.assertEqual(({'file changed name': ['source']}, {}), (self.changes(answer), self.to_run(answer)))
        self.assertEqual('source', self.call('get_file', id=file_id)['name'])

    def test_files_that_changed_on_disk_count_as_at_a_reinit(self):
        workflow_id = self.begin()
        times = {'raw': 5.0, 'mid': 6.0, 'end': 7.0}

        def seen(*names: str) -> None:
            files = {str(self.row('file', name)): times[name] for name in names}
            self.call('set_file_times', {'files': files}, id=workflow_id)
        seen(*times)
        self.finish(workflow_id)
        self.assertNothing(self.apply(workflow_id, self.SPEC, times))
        answer = self.apply(workflow_id, self.SPEC, dict(times, end=None))
        self.assertEqual({'collect': 'its output end.csv is missing'}, self.to_run(answer))
        self.finish(workflow_id)
        seen('end')
        answer = self.apply(workflow_id, self.SPEC, dict(times, raw=9.0))
        self.assertEqual('its input raw.csv changed', self.to_run(answer)['prep'])
        self.assertEqual(9.0, self.call('get_file', id=self.row('file', 'raw'))['st_mtime'])

    def test_actions_that_did_not_change_are_not_executed_again(self):
        workflow_id = self.begin()
        node_id = self.node(workflow_id)
        self.finish(workflow_id)
        first = self.call('get_workflow_actions', id=workflow_id)[0]['id']
        self.call('claim_action', {'compute_node_id': node_id}, id=workflow_id, action_id=first)
        start = {'trigger_type': 'on_workflow_start', 'action_type': 'run_commands', 'commands': ['y']}
        spec = self.spec(actions=[*self.SPEC['actions'], start], jobs__aside={'command': 'other'})
        answer = self.apply(workflow_id, spec)
        self.assertEqual(['on_workflow_start run_commands'], self.changes(answer)['action added'])
        kept, added = self.call('get_workflow_actions', id=workflow_id)
        self.assertEqual((first, True, False), (kept['id'], kept['executed'], added['executed']))
        due = self.call('get_pending_actions', id=workflow_id, trigger_type=['on_workflow_start'])
        self.assertEqual([added['id']], [action['id'] for action in due])

    def begin_spawning(self) -> int:
        """A workflow that has run, in which the job aside has spawned one."""
        workflow_id = self.begin()
        node_id = self.node(workflow_id)
        jobs = self.sync(workflow_id, node_id, want={'strategy': 'queue', 'limit': 9})['jobs']
        aside = next(job for job in jobs if job['name'] == 'aside')
        self.call('spawn_jobs', {'jobs': [{'name': 'child', 'command': 'c'}], 'state': 1}, id=aside['id'])
        self.sync(workflow_id, node_id, completions=[self.end(aside)], held=[])
        self.finish(workflow_id)
        return workflow_id

    def test_spawned_jobs_stay_as_long_as_the_job_that_spawned_them_does_not_start_over(self):
        workflow_id = self.begin_spawning()
        self.assertNothing(self.apply(workflow_id, self.SPEC))
        self.assertEqual('completed', self.statuses(workflow_id)['child'])
        self.apply(workflow_id, self.spec(jobs__aside={'command': 'other'}))
        self.assertNotIn('child', self.statuses(workflow_id))

    def test_spawned_jobs_go_with_the_job_that_spawned_them(self):
        workflow_id = self.begin_spawning()
        answer = self.apply(workflow_id, self.spec(jobs=self.SPEC['jobs'][:-1]))
        self.assertEqual(['aside'], self.changes(answer)['job removed'])
        self.assertNotIn('child', self.statuses(workflow_id))
        left = self.store.ids("SELECT name FROM user_data WHERE name LIKE '__torc_lineage__%'")
        self.assertEqual([], left)

    def test_a_job_cannot_take_the_name_of_a_spawned_one(self):
        workflow_id = self.begin_spawning()
        before, body = self.dump(), self.plan(self.more(name='child'))
        self.assertRefused("another job has spawned a job 'child'", 'apply_spec', body, id=workflow_id)
        self.assertUnchanged(before)

    def test_it_is_refused_while_runners_are_at_work(self):
        workflow_id = self.make()
        node_id, before = self.node(workflow_id), self.dump()
        changed = self.plan(self.spec(jobs__prep={'command': 'other'}))
        for body in (self.plan(), changed):
            self.assertRefused('(1 active, with 0 pending', 'apply_spec', body, id=workflow_id)
            self.assertRefused('torc.py cancel', 'apply_spec', body, id=workflow_id, dry_run=True)
        self.assertUnchanged(before)
        self.call('update_compute_node', {'is_active': False}, id=node_id)
        self.call('apply_spec', changed, id=workflow_id)
        self.call('claim_next_jobs', id=workflow_id)
        self.assertRefused('(0 active, with 1 pending', 'apply_spec', changed, id=workflow_id)

    def test_a_canceled_workflow_goes_on_and_an_archived_one_does_not(self):
        workflow_id = self.make(prep='failed')
        self.call('cancel_workflow', id=workflow_id)
        self.assertIn('prep', self.to_run(self.apply(workflow_id, self.SPEC)))
        self.assertFalse(self.call('get_workflow', id=workflow_id)['is_canceled'])
        self.call('archive_workflow', {'is_archived': True}, id=workflow_id)
        self.assertRefused('is archived', 'apply_spec', self.plan(), id=workflow_id)

    def test_a_disabled_job_stays_disabled(self):
        workflow_id = self.call('create_workflow_from_spec', self.plan())['workflow_id']
        self.call('update_job', {'status': 'disabled'}, id=self.row('job', 'prep'))
        self.call('initialize_jobs', id=workflow_id)
        self.finish(workflow_id)
        self.apply(workflow_id, self.spec(jobs__prep={'command': 'other'}))
        self.assertEqual('disabled', self.statuses(workflow_id)['prep'])

    def test_completions_of_the_run_before_are_stale(self):
        workflow_id, job_id = self.make(work_2='failed'), self.row('job', 'work_2')
        self.apply(workflow_id, self.SPEC)
        result = {'workflow_id': workflow_id, 'job_id': job_id, 'run_id': 1, 'attempt_id': 1,
                  'compute_node_id': 1, 'return_code': 0, 'status': 'completed', 'exec_time_minutes': 1,
                  'completion_time': '2026-01-01T00:00:00Z'}
        self.assertRefused('is over', 'complete_job', result, id=job_id, status='completed', run_id=1)

    def test_a_job_that_no_runner_has_claimed_is_compared_by_its_fields(self):
        workflow_id = self.make()
        with self.store.transaction():
            self.store.run('UPDATE job SET input_hash = NULL')
        spec = self.spec(jobs__aside={'command': 'other'}, jobs__prep={'priority': 4})
        answer = self.apply(workflow_id, spec)
        self.assertEqual({'aside': 'its command changed'}, self.to_run(answer))

    def test_a_bad_plan_changes_nothing(self):
        workflow_id, before = self.make(), self.dump()
        cycle, twice, out = self.plan(), self.plan(), self.plan()
        cycle['jobs'][4][10] = cycle['jobs'][0][9]      # collect writes what prep reads: no name says so
        twice['jobs'][1][0] = 'prep'
        out['jobs'][1][9] = [99]
        needs, files = [{'name': 'small', 'memory': 'much'}], [{'name': 'raw', 'path': 'p'}] * 2
        for body, text in (
                (cycle, 'wait for each other'), (twice, "'prep' stands twice"), (out, 'not a plan'),
                (self.plan(jobs=[[1]]), 'lists of 13'), (self.plan(dependency_sets=[[-1]]), 'no number -1'),
                (self.plan(files=files), "'raw' stands twice"),
                (self.plan(resource_requirements=needs), 'memory'),
                (self.plan(workflow={'name': 'n', 'env': {'not a name': ''}}), 'is not a name'),
                (self.plan(workflow={'name': 'n', 'access_groups': ['nobody']}), 'Unknown access group')):
            with self.subTest(text):
                self.assertRefused(text, 'apply_spec', body, id=workflow_id)
                self.assertUnchanged(before)
        self.assertRefused('no workflow 99', 'apply_spec', self.plan(), id=99)

    def test_a_large_plan_is_taken_by_its_path(self):
        limit = torc.body_limit(torc.API_PREFIX + '/workflows/7/apply_spec')
        self.assertEqual(torc.MAX_BULK_BODY_BYTES, limit)

    def test_groups_of_the_file_are_linked_by_who_may(self):
        self.call('create_access_group', {'name': 'g'})
        workflow_id = self.make()
        self.store.knows_users = self.store.enforces_access = True

        def apply_as(caller: str, spec: Any) -> Tuple[int, Any]:
            path = f'{torc.API_PREFIX}/workflows/{workflow_id}/apply_spec'
            body = json.dumps(self.plan(spec)).encode()
            with self.store.transaction():
                return torc.answer_request(self.store, 'POST', path, '', body, caller, False)
        status, value = apply_as('u', self.spec(access_groups=['g']))
        self.assertEqual((200, {'workflow changed access_groups': ['study']}), (status, self.changes(value)))
        self.assertEqual(['g'], self.call('get_workflow', id=workflow_id)['access_groups'])
        self.assertEqual(403, apply_as('eve', self.SPEC)[0])

    KILLED = """
        import json, os, signal, sys
        sys.path.insert(0, sys.argv[1])
        import torc
        store, seen = torc.Store(sys.argv[2], lambda: 1700000000.0), 0
        store.caller = 'tester'
        def count(*what):
            global seen
            seen += 1
            if seen == int(sys.argv[3]):
                os.kill(os.getpid(), signal.SIGKILL)
        store._db.set_trace_callback(count)
        with store.transaction():
            torc.call_operation(store, 'apply_spec', {'id': int(sys.argv[4])}, json.load(sys.stdin))
        print(seen)
        """

    def test_a_kill_at_any_moment_leaves_all_or_nothing(self):
        workflow_id = self.make(work_2='failed')
        work = {'parameters': {'i': '2:4'}, 'command': 'other {i}'}
        body = self.plan(self.spec(jobs__work=work, env={'A': '2'}))
        path, before = os.path.join(self.directory, 'torc.db'), sorted(self.dump())
        self.store.close()
        saved = shutil.copy(path, path + '.before')

        def killed_at(statement: int) -> str:
            """Apply it, killed before this statement of SQL; its last words."""
            argv = [os.path.dirname(stub_path()), path, str(statement), str(workflow_id)]
            argv = [sys.executable, '-c', textwrap.dedent(self.KILLED), *argv]
            done = subprocess.run(argv, input=json.dumps(body), encoding='utf-8', stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE)
            self.assertEqual(-signal.SIGKILL if statement else 0, done.returncode, done.stderr)
            return done.stdout

        def found() -> List[str]:
            """All rows."""
            self.store = torc.Store(path, lambda: self.clock)
            rows = sorted(self.dump())
            self.store.close()
            return rows
        count = int(killed_at(0))
        self.assertGreater(count, 50)
        self.assertNotEqual(before, found())
        for statement in sorted({2, count // 3, count // 2, 2 * count // 3, count - 10, count}):  # commit
            with self.subTest(statement=statement, of=count):
                shutil.copy(saved, path)
                killed_at(statement)
                self.assertEqual(before, found())

    def random_spec(self, chance: random.Random) -> Dict[str, Any]:
        """A spec of a few names, so that two of them have much in common."""
        def some(names: Sequence[str], most: int) -> List[str]:
            return sorted(chance.sample(names, chance.randint(0, min(most, len(names)))))

        def maybe(value: Any, none: Any = None) -> Any:
            return value if chance.random() < 0.3 else none
        names = [f'j{number}' for number in range(9) if chance.random() < 0.8] or ['j0']
        files, made = [f'f{number}' for number in range(6)], [f'm{number}' for number in range(3)]
        written, jobs = ['given'], []
        for place, name in enumerate(names):
            job = {'name': name, 'command': chance.choice('abc'), 'priority': maybe(1, 0),
                   'env': maybe({'X': chance.choice('12')}, {}), 'depends_on': some(names[:place], 2),
                   'input_files': some(written, 2), 'output_files': [],
                   'input_user_data': some(['d0', 'd1'], 1),
                   'output_user_data': [made.pop()] if made and maybe(True) else [],
                   'resource_requirements': chance.choice(['default', 'r0', 'r1']),
                   'supports_termination': maybe(True, False)}
            job.update(chance.choice([{}, {'scheduler': 's0'}, {'failure_handler': 'h0'}]))
            if len(written) < len(files) and chance.random() < 0.4:
                job['output_files'] = [files[len(written)]]
                written.append(files[len(written)])
            jobs.append(job)
        commands = {'trigger_type': 'on_jobs_complete', 'action_type': 'run_commands'}
        return {
            'name': 'w', 'env': maybe({'W': chance.choice('12')}, {}), 'jobs': jobs,
            'execution_config': {'sigkill_headroom_seconds': chance.randint(1, 2)},
            'actions': [dict(commands, commands=[chance.choice('xy')], jobs=some(names, 3) or names[:1])
                        for _ in range(chance.randint(0, 2))],
            'files': [{'name': name, 'path': name + maybe('.x', '')} for name in ['given', *files]],
            'user_data': [{'name': name, 'data': maybe({'a': 2}, 1)} for name in ('d0', 'd1')]
            + [{'name': f'm{number}'} for number in range(3)],
            'resource_requirements': [{'name': name, 'num_cpus': chance.randint(1, 3)}
                                      for name in ('r0', 'r1')]
            + maybe([{'name': 'default', 'num_cpus': 2}], []),
            'slurm_schedulers': [{'name': 's0', 'account': chance.choice('ab')}],
            'failure_handlers': [{'name': 'h0', 'rules': [{'exit_codes': [chance.randint(1, 2)]}]}]}

    @staticmethod
    def outcome_fields(spec: Dict[str, Any]) -> Dict[str, Any]:
        """Job -> what it is given to run, and the jobs that it waits for."""
        paths = {item['name']: item['path'] for item in spec['files']}
        data = {item['name']: item.get('data') for item in spec['user_data']}
        makers = {file: job['name'] for job in spec['jobs'] for file in job['output_files']}

        def given(job: Dict[str, Any]) -> List[Any]:
            return [job['command'], {**spec['env'], **job['env']}, job['depends_on'],
                    sorted(map(paths.get, job['input_files'])), sorted(map(paths.get, job['output_files'])),
                    [(name, data[name]) for name in job['input_user_data']], job['output_user_data']]
        return {job['name']: (given(job), {*job['depends_on'], *map(makers.get, job['input_files'])})
                for job in spec['jobs']}

    def shape(self, workflow_id: int) -> Dict[str, Any]:
        """A workflow by names."""
        asker = types.SimpleNamespace(
            pages=lambda op, **params: iter(self.call(op, **params)['items']),
            get_workflow=functools.partial(self.call, 'get_workflow'),
            get_workflow_actions=functools.partial(self.call, 'get_workflow_actions'))
        found = stored_shape(asker, workflow_id)
        return dict(found, actions=sorted(found['actions'], key=json.dumps))

    def test_any_edit_makes_the_workflow_that_a_new_one_would_be_and_runs_what_it_must(self):
        """Random pairs of specs: the rows are those of a new workflow; a model says what is to run."""
        for seed in range(25):
            chance = random.Random(seed)
            old, new = self.random_spec(chance), self.random_spec(chance)
            statuses = ['completed'] * 5 + ['failed', 'terminated']
            ends = {job['name']: chance.choice(statuses) for job in old['jobs']}
            with self.subTest(seed=seed), self.undone():
                workflow_id = self.make(old, **ends)
                before = self.jobs(workflow_id)
                answer = self.apply(workflow_id, new)
                self.assertEqual(self.shape(self.begin(new)), self.shape(workflow_id))
                had, has, again = self.outcome_fields(old), self.outcome_fields(new), set()
                for name, (given, prerequisites) in has.items():        # in the order of their prerequisites
                    done = before.get(name, {}).get('status') == 'completed'
                    if not done or had[name][0] != given or again & prerequisites:
                        again.add(name)
                self.assertEqual(again, set(self.to_run(answer)))
                ids = {name: job_id for name, job_id in self.job_ids(workflow_id).items() if name in before}
                self.assertEqual({name: before[name]['id'] for name in ids}, ids)
                self.assertEqual({'completed'}, self.finish(workflow_id))
                self.assertNothing(self.apply(workflow_id, new))


class SpawnTest(ServiceTest):
    """Jobs that running jobs make."""

    def start(self, workflow_id: int, node_id: int) -> Dict[str, Dict[str, Any]]:
        """Claim what is ready and start it."""
        jobs = self.claim(workflow_id, node_id)
        self.sync(workflow_id, node_id, started=[[job['id'], job['attempt_id'], '2026-01-01T00:00:01Z'] for job in jobs.values()])
        return jobs

    def spawn(self, job: Dict[str, Any], *names: str, **more: Any) -> Dict[str, Any]:
        """Spawn jobs 'name: prerequisites' on behalf of a job."""
        rows = [name.partition(':') for name in names]
        jobs = [dict({'name': name, 'command': 'c'}, **({'depends_on': needs.split()} if needs else {})) for name, _, needs in rows]
        return self.call('spawn_jobs', dict({'jobs': jobs}, **more), id=job['id'])

    def finish(self, workflow_id: int, node_id: int, job: Dict[str, Any], status: str = 'completed') -> None:
        """The end of a job."""
        answer = self.sync(workflow_id, node_id, completions=[self.end(job, status, int(status != 'completed'))])
        self.assertEqual([], answer['errors'])

    def named(self, workflow_id: int, name: str) -> Dict[str, Any]:
        """The job of this name."""
        return next(job for job in self.call('list_jobs', workflow_id=workflow_id)['items'] if job['name'] == name)

    def records(self, workflow_id: int) -> Dict[str, Any]:
        """What lineages have left in user data: end of the name -> content."""
        items = self.call('list_user_data', workflow_id=workflow_id)['items']
        self.assertTrue(all(item['is_ephemeral'] and item['name'].startswith('__torc_lineage__') for item in items), items)
        return {item['name'][len('__torc_lineage__'):]: item['data'] for item in items}

    def test_they_wait_for_their_maker_and_for_each_other(self):
        workflow_id = self.create('done:\nmain: done', workflow={'env': {'A': '1'}})
        node_id = self.node(workflow_id)
        self.finish(workflow_id, node_id, self.start(workflow_id, node_id)['done'])
        main = self.start(workflow_id, node_id)['main']
        needs = self.call('create_resource_requirements', {'workflow_id': workflow_id, 'name': 'big', 'num_cpus': 3})['id']
        answer = self.call('spawn_jobs', {'jobs': [
            {'name': 'second', 'command': 'x', 'depends_on': ['first', 'done'], 'cancel_on_blocking_job_failure': False},
            {'name': 'first', 'command': 'y', 'priority': 7, 'resource_requirements': 'big'}]}, id=main['id'])
        second, first = (self.call('get_job', id=job_id) for job_id in answer['spawned_job_ids'])
        self.assertEqual(('second', 'first', 1), (second['name'], first['name'], answer['iteration']))
        self.assertEqual(('blocked', 'spawn', {'A': '1', 'TORC_ORCHESTRATOR_LINEAGE_ID': 'main'}, 7, needs, [main['id']]),
                         (first['status'], first['origin'], first['env'], first['priority'], first['resource_requirements_id'],
                          first['depends_on_job_ids']))
        self.assertEqual([main['id'] - 1, main['id'], first['id']], second['depends_on_job_ids'])
        self.assertFalse(second['cancel_on_blocking_job_failure'])
        self.assertWhole()
        self.finish(workflow_id, node_id, main)
        self.assertEqual({'done': 'completed', 'main': 'completed', 'second': 'blocked', 'first': 'ready'}, self.statuses(workflow_id))
        self.assertEqual('completed', self.drive(workflow_id, {'first': 'failed'})['second'])
        self.assertWhole()

    def test_they_fall_with_their_maker(self):
        workflow_id = self.create('main:')
        node_id = self.node(workflow_id)
        main = self.start(workflow_id, node_id)['main']
        self.spawn(main, 'a', 'b: a')
        self.finish(workflow_id, node_id, main, 'failed')
        self.assertEqual({'main': 'failed', 'a': 'canceled', 'b': 'canceled'}, self.statuses(workflow_id))
        self.assertTrue(self.call('is_workflow_complete', id=workflow_id)['is_complete'])

    def test_a_job_may_be_faster_than_its_runners_word(self):
        workflow_id = self.create('main:\nother:')
        node_id = self.node(workflow_id)
        main = self.claim(workflow_id, node_id, 1)['main']
        self.spawn(main, 'a')
        self.assertEqual(('running', node_id), tuple(self.call('get_job', id=main['id'])[key] for key in ('status', 'compute_node_id')))
        (other,) = self.call('claim_next_jobs', id=workflow_id)['jobs']     # whose client starts nothing without start_job
        self.assertRefused('is pending; only a running job', 'spawn_jobs', {'jobs': []}, id=other['id'])

    def test_the_same_call_again_adds_nothing(self):
        workflow_id = self.create('main:')
        node_id = self.node(workflow_id)
        main = self.start(workflow_id, node_id)['main']
        first = self.spawn(main, 'a', 'b', state={'x': 1})
        second = self.spawn(main, 'c')
        self.assertEqual([1, 2], [first['iteration'], second['iteration']])
        self.assertEqual(first, self.spawn(main, 'a', 'b', state={'x': 2}))
        self.assertEqual(dict(first, spawned_job_ids=first['spawned_job_ids'][::-1]), self.spawn(main, 'b', 'a'))
        self.assertEqual({'main__g000001': {'generation': 1, 'spawn_count': 2, 'state': {'x': 1}},
                          'main__g000002': {'generation': 2, 'spawn_count': 1, 'state': None}}, self.records(workflow_id))
        self.sync(workflow_id, node_id, completions=[self.end(main, 'failed', 1, retry=True, max_retries=3)])
        main = self.start(workflow_id, node_id)['main']
        self.assertEqual(2, main['attempt_id'])
        self.assertEqual(second, self.spawn(main, 'c'))
        self.assertEqual(4, len(self.statuses(workflow_id)))

    def test_generations_are_counted_for_each_lineage_and_capped(self):
        workflow_id = self.create('main:', workflow={'dynamic_jobs': {'max_iterations': 2}})
        main = self.start(workflow_id, self.node(workflow_id))['main']
        self.assertEqual([1, 1, 2], [self.spawn(main, name, lineage=lineage)['iteration'] for name, lineage in (('a', 'L'), ('b', 'M_%__g000007'), ('c', 'L'))])
        self.assertEqual('L', self.named(workflow_id, 'c')['env']['TORC_ORCHESTRATOR_LINEAGE_ID'])
        self.assertRefused("lineage 'L' has spawned 2 times, which is its limit", 'spawn_jobs', {'jobs': [{'name': 'd', 'command': 'x'}], 'lineage': 'L'}, id=main['id'])
        self.assertEqual({'spawned_job_ids': [], 'iteration': 2}, self.spawn(main, lineage='L'))
        self.assertEqual(3, len(self.records(workflow_id)))
        for state in (1, {'end': [None]}):
            self.assertEqual({'spawned_job_ids': [], 'iteration': 2}, self.spawn(main, lineage='L', state=state))
            self.assertEqual({'generation': 2, 'spawn_count': 0, 'final': True, 'state': state}, self.records(workflow_id)['L__final'])
        self.assertEqual(2, self.spawn(main, 'e', lineage='M_%__g000007')['iteration'])
        self.assertIn('L__final', self.records(workflow_id))

    def test_a_new_generation_ends_the_word_of_the_end(self):
        workflow_id = self.create('main:')
        main = self.start(workflow_id, self.node(workflow_id))['main']
        self.spawn(main, state='over')
        self.spawn(main, 'a')
        self.assertEqual(['main__g000001'], list(self.records(workflow_id)))

    def test_what_cannot_be_is_refused_whole(self):
        workflow_id = self.create('main:\ntwin:\nlate: main')
        other = self.call('create_job', {'workflow_id': workflow_id, 'name': 'other', 'command': 'x'})['id']
        self.store.run("UPDATE job SET name = 'twin' WHERE id = ?", (other,))   # the first version let it be
        jobs = self.start(workflow_id, self.node(workflow_id))
        self.spawn(jobs['main'], 'old', 'older')
        before = self.statuses(workflow_id), self.records(workflow_id)
        table = (
            ([{'name': 'a', 'command': 'x'}, {'name': 'a', 'command': 'y'}], "the name 'a' stands twice"),
            ([{'name': 'a', 'command': 'x', 'depends_on': ['b']}, {'name': 'b', 'command': 'x', 'depends_on': ['a']}], 'wait for each other: a, b'),
            ([{'name': 'a', 'command': 'x', 'depends_on': ['a']}], 'wait for each other: a'),
            ([{'name': 'b', 'command': 'x'}, {'name': 'a', 'command': 'x', 'depends_on': ['nobody']}], "depends on 'nobody', which does not exist"),
            ([{'name': 'a', 'command': 'x', 'depends_on': ['twin']}], 'but 2 jobs are called so'),
            ([{'name': 'a', 'command': 'x', 'resource_requirements': 'huge'}], "has no resource requirements 'huge'"),
            ([{'name': 'a', 'command': 'x', 'priority': -1}], 'priority is -1'),
            ([{'name': 'a', 'command': 'x', 'labels': ['a,b']}], 'must not be empty, hold a comma'),
            ([{'name': 'a', 'command': 'x', 'env': {}}], 'there is no field jobs[0].env'),
            ([{'name': 'a', 'command': 'x', 'priorty': 1}], "there is no field jobs[0].priorty, did you mean 'priority'?"),
            ([{'name': 'a'}], 'jobs[0].command is missing'),
            ([{'name': 'late', 'command': 'x'}], "has a job 'late' already, which lineage 'main' did not spawn"),
            ([{'name': 'old', 'command': 'x'}, {'name': 'new', 'command': 'x'}], "has spawned 'old' before, but not all"),
        )
        for jobs_wanted, text in table:
            with self.subTest(text):
                self.assertRefused(text, 'spawn_jobs', {'jobs': jobs_wanted}, id=jobs['main']['id'])
        self.assertRefused('there is no field linage', 'spawn_jobs', {'jobs': [], 'linage': 'x'}, id=jobs['main']['id'])
        self.assertRefused("has a job 'old' already, which lineage 'other'", 'spawn_jobs', {'jobs': [{'name': 'old', 'command': 'x'}], 'lineage': 'other'}, id=jobs['main']['id'])
        self.assertRefused('is blocked; only a running job', 'spawn_jobs', {'jobs': []}, id=jobs['main']['id'] + 2)
        self.assertRefused('there is no job 999', 'spawn_jobs', {'jobs': []}, id=999)
        self.assertEqual(before, (self.statuses(workflow_id), self.records(workflow_id)))
        self.assertWhole()

    def chain(self) -> Tuple[int, int]:
        """A workflow in which main spawned work and next, and next spawned more; all done."""
        workflow_id = self.create('main:\nother:')
        node_id = self.node(workflow_id)
        jobs = self.start(workflow_id, node_id)
        self.spawn(jobs['main'], 'work', 'next')
        self.finish(workflow_id, node_id, jobs['main'])
        jobs = dict(jobs, **self.start(workflow_id, node_id))
        self.spawn(jobs['next'], 'more', lineage='main')
        self.spawn(jobs['next'], lineage='main', state='over')
        self.drive(workflow_id, {})
        for name in ('other', 'work', 'next'):
            self.finish(workflow_id, node_id, jobs[name])
        self.drive(workflow_id, {})
        self.assertEqual(dict.fromkeys(['main', 'other', 'work', 'next', 'more'], 'completed'), self.statuses(workflow_id))
        return workflow_id, node_id

    def test_what_a_job_spawned_goes_when_it_starts_over(self):
        workflow_id, node_id = self.chain()
        self.call('reset_workflow_status', id=workflow_id)
        self.call('initialize_jobs', id=workflow_id)
        self.assertEqual({'main': 'ready', 'other': 'ready'}, self.statuses(workflow_id))
        self.assertEqual({}, self.records(workflow_id))
        self.assertEqual(1, self.spawn(self.start(workflow_id, node_id)['main'], 'work')['iteration'])
        self.assertWhole()

    def test_what_the_others_spawned_stays(self):
        workflow_id, _ = self.chain()
        self.call('manage_status_change', id=self.named(workflow_id, 'next')['id'], status='uninitialized', run_id=1)
        self.call('initialize_jobs', id=workflow_id, only_uninitialized=True)
        self.assertEqual({'main': 'completed', 'other': 'completed', 'work': 'completed', 'next': 'ready'}, self.statuses(workflow_id))
        self.assertEqual(['main__g000001'], list(self.records(workflow_id)))
        self.assertWhole()

    def test_nothing_goes_that_a_runner_has_in_hand(self):
        workflow_id = self.create('main:')
        node_id = self.node(workflow_id)
        main = self.start(workflow_id, node_id)['main']
        self.spawn(main, 'a', 'b')
        self.finish(workflow_id, node_id, main)
        running = self.claim(workflow_id, node_id, 1)
        self.call('manage_status_change', id=main['id'], status='uninitialized', run_id=1)
        self.call('initialize_jobs', id=workflow_id, only_uninitialized=True)
        self.assertEqual(dict({'main': 'ready'}, **dict.fromkeys(running, 'pending')), self.statuses(workflow_id))

    def test_they_survive_a_restart_of_the_server(self):
        workflow_id = self.create('main:')
        main = self.start(workflow_id, self.node(workflow_id))['main']
        answer = self.spawn(main, 'a', 'b: a')
        self.store.close()
        self.store = torc.Store(self.store.path, lambda: self.clock)
        self.addCleanup(self.store.close)
        self.assertEqual(answer, self.spawn(main, 'a', 'b: a'))
        with self.store.transaction():
            torc.record_end(self.store, torc.workflow_state(self.store, workflow_id), self.end(main, run_id=1))
        self.assertEqual({'main': 'completed', 'a': 'ready', 'b': 'blocked'}, self.statuses(workflow_id))


class UnwrittenDataTest(ServiceTest):
    """User data that a job has declared as its output, and not written."""

    def setUp(self) -> None:
        super().setUp()
        self.workflow_id = self.call('create_workflow', {'name': 'w', 'user': 'tester'})['id']
        self.records = [self.call('create_user_data', {'workflow_id': self.workflow_id, 'name': name})['id']
                        for name in 'yxz']
        for name, records in (('a', self.records), ('b', [])):
            self.call('create_job', {'workflow_id': self.workflow_id, 'name': name, 'command': 'c',
                                     'output_user_data_ids': records})
        self.call('initialize_jobs', id=self.workflow_id)

    def warnings(self) -> List[Any]:
        events = self.call('list_events', workflow_id=self.workflow_id, category='user_data')['items']
        return [tuple(event['data'][key] for key in ('level', 'run_id', 'attempt_id', 'message'))
                for event in events]

    def test_it_is_an_event_of_level_warning_and_the_job_stays_completed(self):
        node_id = self.node(self.workflow_id)
        jobs = self.claim(self.workflow_id, node_id)
        self.call('update_user_data', {'data': [1]}, row_id=self.records[2])
        for _ in range(2):      # the same end again is no second event
            self.sync(self.workflow_id, node_id, completions=[self.end(jobs['a']), self.end(jobs['b'])])
        self.assertEqual({'a': 'completed', 'b': 'completed'}, self.statuses(self.workflow_id))
        message = 'job a has completed without writing its output_user_data: x, y'
        self.assertEqual([('warning', 1, 1, message)], self.warnings())

    def test_a_job_that_has_failed_is_not_warned_of_until_somebody_says_that_it_has_completed(self):
        node_id = self.node(self.workflow_id)
        job = self.claim(self.workflow_id, node_id)['a']
        self.sync(self.workflow_id, node_id, completions=[self.end(job, 'pending_failed', 3)])
        self.assertEqual([], self.warnings())
        self.sync(self.workflow_id, node_id, completions=[self.end(job, 'completed', 0)])
        self.assertEqual(1, len(self.warnings()))


class TaskTest(ServiceTest):
    """Operations that go on after their answer."""

    def begin(self, workflow_id: int, **parameters: Any) -> Any:
        """Ask for an initialize as a task."""
        return self.call('initialize_jobs', id=workflow_id, **dict(parameters, **{'async': True}))

    def tend(self) -> None:
        """What a server does by itself."""
        with self.store.transaction():
            torc.tend(self.store)

    def test_a_task_is_queued_then_done(self):
        workflow_id = self.call('create_workflow', {'name': 'w', 'user': 'u'})['id']
        self.call('create_job', {'workflow_id': workflow_id, 'name': 'a', 'command': 'x'})
        task = self.begin(workflow_id)
        self.assertEqual({'id': 1, 'workflow_id': workflow_id, 'operation': 'initialize_jobs', 'status': 'queued', 'created_at_ms': 1700000000000}, task)
        self.assertEqual({'task': task}, self.call('get_active_task_for_workflow', id=workflow_id))
        self.assertEqual({'a': 'uninitialized'}, self.statuses(workflow_id))
        self.clock += 1
        self.tend()
        self.assertEqual(dict(task, status='succeeded', started_at_ms=1700000001000, finished_at_ms=1700000001000), self.call('get_task', id=1))
        self.assertEqual({'task': None}, self.call('get_active_task_for_workflow', id=workflow_id))
        self.assertEqual({'a': 'ready'}, self.statuses(workflow_id))
        event = self.call('list_events', workflow_id=workflow_id, category='tasks')['items'][0]['data']
        self.assertEqual(('task_completed', 1, 'succeeded', 'tester'), (event['event_type'], event['task_id'], event['status'], event['user']))

    def test_a_workflow_has_one_at_a_time(self):
        workflow_id, other = self.create('a:'), self.create('b:')
        task = self.begin(workflow_id)
        self.assertEqual(task, self.begin(workflow_id, only_uninitialized=False))
        with self.assertRaises(torc.Conflict) as caught:
            self.begin(workflow_id, only_uninitialized=True)
        self.assertEqual((409, {'existing_task_id': 1, 'existing_operation': 'initialize_jobs'}), (caught.exception.http, caught.exception.details))
        self.assertEqual(2, self.begin(other)['id'])
        self.tend()
        self.assertEqual(3, self.begin(workflow_id, only_uninitialized=True)['id'])

    def test_a_failure_is_told_and_leaves_nothing(self):
        workflow_id = self.call('create_workflow', {'name': 'w', 'user': 'u'})['id']
        self.call('archive_workflow', {'is_archived': True}, id=workflow_id)
        self.begin(workflow_id)
        self.tend()
        task = self.call('get_task', id=1)
        self.assertEqual(('failed', True), (task['status'], 'is archived; take it back first' in task['error']))
        self.assertEqual(0, self.call('get_workflow', id=workflow_id)['run_id'])
        self.assertRefused('there is no task 2', 'get_task', id=2)

    def test_a_bug_fails_one_task_and_the_next_goes_on(self):
        first, second = self.create('a:'), self.create('b:')
        self.begin(first)
        self.store.run('UPDATE task SET request = ?', ('{"unknown": 1}',))
        self.begin(second)
        with self.assertLogs('torc', 'ERROR'):
            self.tend()
        self.assertEqual(['failed', 'succeeded'], [self.call('get_task', id=number)['status'] for number in (1, 2)])
        self.assertIn('a bug in torc.py', self.call('get_task', id=1)['error'])

    def test_a_task_that_the_database_refuses_is_tried_again_only_if_that_can_help(self):
        workflow_id = self.create('a:')
        for error, status in ((sqlite3.OperationalError('database or disk is full'), 'queued'), (sqlite3.IntegrityError('FOREIGN KEY'), 'failed'),
                              (sqlite3.InterfaceError('type'), 'failed')):
            with self.subTest(error=error), unittest.mock.patch.dict(torc.TASK_VERBS, initialize_jobs=unittest.mock.Mock(side_effect=error)):
                task = self.begin(workflow_id)
                if status == 'queued':
                    self.assertRaises(sqlite3.OperationalError, self.tend)
                else:       # or it would keep lost nodes from being looked for, at each look anew
                    with self.assertLogs('torc', 'ERROR'):
                        self.tend()
                self.assertEqual(status, self.call('get_task', id=task['id'])['status'])

    def test_after_a_restart_unfinished_ones_have_failed(self):
        workflow_id = self.create('a:')
        self.begin(workflow_id)
        self.store.close()
        self.store, lease = torc.hold_database(self.store.path)
        self.addCleanup(self.store.close)
        self.assertIsNone(lease)
        task = self.call('get_task', id=1)
        self.assertEqual(('failed', True), (task['status'], 'the server ended before' in task['error']))
        self.assertEqual(2, self.begin(workflow_id)['id'])


class ProvenanceTest(ServiceTest):
    """RO-Crate entities that the server adds by itself, in the words of Torc's clients."""

    def entities(self, workflow_id: int) -> Dict[str, Any]:
        """@id -> metadata."""
        items = self.call('list_ro_crate_entities', id=workflow_id)['items']
        for item in items:
            self.assertEqual((item['entity_id'], item['entity_type']), (item['metadata']['@id'], item['metadata']['@type'][0]))
        return {item['entity_id']: item['metadata'] for item in items}

    def make(self) -> Tuple[int, Dict[str, int]]:
        """A workflow of a job that reads and writes, and one that does neither: its id, and those of its files."""
        workflow_id = self.call('create_workflow', {'name': 'w', 'user': 'u', 'enable_ro_crate': True})['id']
        files = {name: self.call('create_file', dict({'workflow_id': workflow_id, 'name': name, 'path': 'data/' + name}, **more))['id'] for name, more in (
            ('in.csv', {'st_mtime': 1700000000.5}), ('cited', {'st_mtime': 1.0, 'identifier': 'https://doi.org/1'}), ('absent', {}), ('out.json', {}), ('log', {}))}
        self.call('create_job', {'workflow_id': workflow_id, 'name': 'a', 'command': 'x', 'input_file_ids': [files['in.csv'], files['cited']],
                                 'output_file_ids': [files['out.json'], files['log']]})
        self.call('create_job', {'workflow_id': workflow_id, 'name': 'b', 'command': 'x'})
        return workflow_id, files

    def run_it(self, workflow_id: int, files: Dict[str, int], mtime: float) -> Dict[str, Any]:
        """Run the jobs as a runner of ours; the entities afterwards."""
        node_id = self.node(workflow_id, identity='boot/1')
        jobs = self.claim(workflow_id, node_id)
        times = {str(files['out.json']): mtime, str(files['log']): mtime}
        self.sync(workflow_id, node_id, completions=[dict(self.end(jobs['a']), file_times=times)])
        self.sync(workflow_id, node_id, contents=[[files['out.json'], mtime, 6, 'c0de'], [files['log'], mtime - 1, 7, 'late'], [999, mtime, 1, 'x']])
        found = self.entities(workflow_id)
        self.assertNotIn('endTime', found[f"#torc-run-id-{self.call('get_workflow', id=workflow_id)['run_id']}"])
        self.sync(workflow_id, node_id, completions=[dict(self.end(jobs['b']), file_times={})])
        return self.entities(workflow_id)

    def test_an_initialize_describes_run_program_and_input_files(self):
        workflow_id, files = self.make()
        self.call('set_file_times', {'files': {}, 'contents': [[files['in.csv'], 1700000000.5, 6, 'c0de'], [files['cited'], 7.0, 1, 'old']]}, id=workflow_id)
        self.call('initialize_jobs', id=workflow_id)
        found = self.entities(workflow_id)
        self.assertEqual({'#torc-workflow', '#software-torc-server-run-id-1', '#torc-run-id-1', 'data/in.csv', 'https://doi.org/1'}, set(found))
        self.assertEqual({'@id': 'data/in.csv', '@type': ['File', 'prov:Entity'], 'name': 'in.csv', 'encodingFormat': 'text/csv', 'contentSize': 6, 'sha256': 'c0de',
                          'dateModified': '2023-11-14T22:13:20.500Z'}, found['data/in.csv'])
        self.assertEqual({'@id': 'https://doi.org/1', '@type': ['File', 'prov:Entity'], 'name': 'cited', 'encodingFormat': 'application/octet-stream',
                          'dateModified': '1970-01-01T00:00:01.000Z', 'sameAs': {'@id': 'data/cited'}}, found['https://doi.org/1'])
        self.assertEqual({'@id': '#torc-workflow', '@type': ['SoftwareApplication', 'prov:Plan'], 'name': 'w'}, found['#torc-workflow'])
        agents = [{'@id': '#software-torc-run-id-1'}, {'@id': '#software-torc-server-run-id-1'}]
        self.assertEqual({'@id': '#torc-run-id-1', '@type': ['CreateAction', 'prov:Activity'], 'name': 'w Run 1', 'startTime': torc.format_time(self.clock),
                          'prov:hadPlan': {'@id': '#torc-workflow'}, 'instrument': agents[0], 'prov:wasAssociatedWith': agents}, found['#torc-run-id-1'])
        self.assertEqual(['SoftwareApplication', 'prov:SoftwareAgent'], found['#software-torc-server-run-id-1']['@type'])

    def test_what_others_added_stays_and_the_hash_of_another_content_does_not(self):
        workflow_id, files = self.make()
        self.call('set_file_times', {'files': {}, 'contents': [[files['in.csv'], 1700000000.5, 6, 'c0de']]}, id=workflow_id)
        entity = next(item for item in self.call('list_ro_crate_entities', id=workflow_id)['items'] if item['entity_id'] == 'data/in.csv')
        self.call('update_ro_crate_entity', {'metadata': dict(entity['metadata'], license='CC0')}, id=entity['id'])
        self.call('initialize_jobs', id=workflow_id)
        self.assertEqual(('CC0', 'c0de'), tuple(self.entities(workflow_id)['data/in.csv'][key] for key in ('license', 'sha256')))
        self.call('update_file', {'st_mtime': 1700000001.0}, id=files['in.csv'])
        self.call('initialize_jobs', id=workflow_id)
        found = self.entities(workflow_id)['data/in.csv']
        self.assertEqual(('CC0', '2023-11-14T22:13:21.000Z', None, None), tuple(found.get(key) for key in ('license', 'dateModified', 'sha256', 'contentSize')))

    def test_a_completed_job_describes_what_it_made_and_a_later_run_renews_it(self):
        workflow_id, files = self.make()
        for run_id, mtime in ((1, 1700000100.0), (2, 1700000200.0)):
            self.clock += 50
            if run_id == 2:
                self.call('reset_workflow_status', id=workflow_id)
            self.call('initialize_jobs', id=workflow_id)
            found = self.run_it(workflow_id, files, mtime)
            run, action = {'@id': f'#torc-run-id-{run_id}'}, {'@id': '#job-1-attempt-1'}
            inputs = [{'@id': 'data/in.csv'}, {'@id': 'data/cited'}]
            agents = [{'@id': f'#software-torc-run-id-{run_id}'}, {'@id': f'#software-torc-server-run-id-{run_id}'}]
            made = {'@type': ['File', 'prov:Entity'], 'dateModified': torc.format_time(mtime), 'prov:wasGeneratedBy': action,
                    'prov:wasAttributedTo': run, 'prov:wasDerivedFrom': inputs}
            self.assertEqual(dict(made, **{'@id': 'data/out.json', 'name': 'out.json', 'encodingFormat': 'application/json', 'contentSize': 6, 'sha256': 'c0de'}),
                             found['data/out.json'])
            self.assertEqual(dict(made, **{'@id': 'data/log', 'name': 'log', 'encodingFormat': 'application/octet-stream'}), found['data/log'])
            self.assertEqual({
                '@id': '#job-1-attempt-1', '@type': ['CreateAction', 'prov:Activity'], 'name': 'a', 'isPartOf': run, 'prov:hadPlan': {'@id': '#torc-workflow'},
                'instrument': agents[0], 'prov:wasAssociatedWith': agents, 'object': inputs, 'prov:used': inputs,
                'result': [{'@id': 'data/out.json'}, {'@id': 'data/log'}]}, found['#job-1-attempt-1'])
            self.assertEqual('2026-01-01T00:10:00.000Z', found[run['@id']]['endTime'])
            self.assertEqual(9 + 3 * (run_id - 1), len(found), 'files, plan and action are renewed; runs and programs are added')

    def test_the_same_end_again_keeps_what_is_known(self):
        workflow_id, files = self.make()
        self.call('initialize_jobs', id=workflow_id)
        before = self.run_it(workflow_id, files, 1700000100.0)
        job = self.call('get_job', id=1)
        times = {str(files['out.json']): 1700000100.0, str(files['log']): 1700000100.0}
        self.sync(workflow_id, 1, completions=[dict(self.end(job), file_times=times)])
        self.assertEqual(before, self.entities(workflow_id))

    def test_runners_of_others_describe_their_jobs_themselves(self):
        workflow_id, files = self.make()
        self.call('initialize_jobs', id=workflow_id)
        before = self.entities(workflow_id)
        node_id = self.node(workflow_id)
        for job in self.call('list_jobs', workflow_id=workflow_id)['items']:
            result = dict(self.end(job), workflow_id=workflow_id, run_id=1, compute_node_id=node_id)
            self.call('complete_job', result, job_id=job['id'], status='completed', run_id=1)
        self.assertEqual(dict(before, **{'#torc-run-id-1': dict(before['#torc-run-id-1'], endTime='2026-01-01T00:10:00.000Z')}), self.entities(workflow_id))

    def test_a_file_of_an_absurd_time_stops_no_initialize(self):
        workflow_id = self.call('create_workflow', {'name': 'w', 'user': 'u', 'enable_ro_crate': True})['id']
        for number, time_s in enumerate((1e300, -1e300)):
            self.call('create_file', {'workflow_id': workflow_id, 'name': f'f{number}', 'path': f'f{number}', 'st_mtime': time_s})
        self.call('initialize_jobs', id=workflow_id)
        self.assertEqual('9999-12-31T23:59:59.000Z', self.entities(workflow_id)['f0']['dateModified'])

    def test_nothing_is_added_where_it_is_not_wanted(self):
        workflow_id, files = self.make()
        self.call('update_workflow', {'enable_ro_crate': False}, id=workflow_id)
        self.call('set_file_times', {'files': {}, 'contents': [[files['in.csv'], 1700000000.5, 6, 'c0de']]}, id=workflow_id)
        self.call('initialize_jobs', id=workflow_id)
        self.store.run("INSERT INTO ro_crate_entity (workflow_id, entity_id, entity_type, metadata) VALUES (?, '#torc-run-id-1', 'x', ?)",
                       (workflow_id, '{"@id": "#torc-run-id-1", "@type": ["x"]}'))      # of others
        self.assertEqual({'#torc-run-id-1': {'@id': '#torc-run-id-1', '@type': ['x']}}, self.run_it(workflow_id, files, 1700000100.0))


class PropertyTest(ServiceTest):
    """Random workflows, driven in random order, against a plain model of the rules."""

    def expected(self, needs: List[List[int]], tolerant: List[bool], bad: Set[int], by_hand: Iterable[int] = ()) -> List[str]:
        found = []
        for place, row in enumerate(needs):
            blocked = any(found[need] != 'completed' for need in row) and not tolerant[place] and place not in by_hand
            found.append('canceled' if blocked else 'failed' if place in bad else 'completed')
        return found

    def test_any_graph_ends_as_the_rules_say(self):
        for seed in range(40):
            with self.subTest(seed=seed):
                chance = random.Random(seed)
                count = chance.randrange(2, 25)
                needs = [sorted(chance.sample(range(place), chance.randrange(0, min(place, 4) + 1))) for place in range(count)]
                tolerant = [chance.random() < 0.2 for _ in range(count)]
                bad = {place for place in range(count) if chance.random() < 0.2}
                lines = [f"j{place}{'!' if tolerant[place] else ''}: {' '.join(f'j{need}' for need in row)}" for place, row in enumerate(needs)]
                workflow_id = self.create('\n'.join(lines))
                by_hand = self.end_by_hand(workflow_id, chance.sample(range(count), min(count, 3)) if seed % 2 else [], bad)
                found = self.drive(workflow_id, {f'j{place}': 'failed' for place in bad})
                self.assertEqual(self.expected(needs, tolerant, bad, by_hand), list(found.values()), lines)
                ran = [row['job_id'] for row in self.call('list_results', workflow_id=workflow_id, all_runs=True)['items']]
                self.assertEqual((len(ran), len([status for status in found.values() if status != 'canceled'])), (len(set(ran)), len(ran)))
                self.assertWhole()

    def end_by_hand(self, workflow_id: int, places: List[int], bad: Set[int]) -> List[int]:
        """Report ends of jobs that nobody has claimed; those that were taken in: what was canceled before is refused."""
        jobs, accepted = self.call('list_jobs', workflow_id=workflow_id)['items'], []
        for place in places:
            job, status = jobs[place], 'failed' if place in bad else 'completed'
            result = dict(self.end(job, status, int(place in bad)), workflow_id=workflow_id, run_id=1, compute_node_id=0)
            entry = {'job_id': job['id'], 'status': status, 'run_id': 1, 'result': result}
            answer = self.call('batch_complete_jobs', {'completions': [entry]}, id=workflow_id)
            self.assertTrue(answer['completed'] or 'as canceled' in answer['errors'][0]['message'], answer)
            accepted += [place] * len(answer['completed'])
            self.assertWhole()
        return accepted


class ExplanationTest(ServiceTest):
    """Why a job failed, or does not run."""

    def reasons(self, workflow_id: int) -> Dict[str, Optional[str]]:
        """Name -> why, of all jobs."""
        jobs = self.call('list_jobs', workflow_id=workflow_id)['items']
        return {job['name']: self.call('explain_job', id=job['id']).get('reason') for job in jobs}

    def let_fail(self, workflow_id: int, name: str, node_id: int = 0, status: str = 'failed',
                 **more: Any) -> None:
        """Let a ready job end badly."""
        node_id = node_id or self.node(workflow_id)
        end = self.end(self.claim(workflow_id, node_id)[name], status, 3, **more)
        self.assertEqual([], self.sync(workflow_id, node_id, completions=[end])['errors'])

    def test_what_never_ran_names_the_failure_that_was_the_cause(self):
        workflow_id = self.create('a:\nb: a\nc: b\nd: c\ne:')
        self.let_fail(workflow_id, 'a', reason='no luck')
        self.assertEqual({
            'a': 'no luck',
            'b': 'never ran: its prerequisite a failed: no luck',
            'c': 'never ran: its prerequisite b was canceled, because a failed: no luck',
            'd': 'never ran: its prerequisite c was canceled, because a failed: no luck',
            'e': None}, self.reasons(workflow_id))

    def test_a_failure_without_a_reason_has_its_return_code(self):
        workflow_id = self.create('a:\nb: a')
        self.let_fail(workflow_id, 'a', status='terminated')
        never = 'never ran: its prerequisite a was terminated: return code 3'
        self.assertEqual({'a': 'return code 3', 'b': never}, self.reasons(workflow_id))

    def test_what_waits_says_for_what(self):
        workflow_id = self.create('a:\nb:\nc: a b\nd: c')
        self.let_fail(workflow_id, 'a', status='pending_failed', reason='no luck')
        self.assertEqual({'a': 'no luck', 'b': None, 'c': 'waits for a (pending_failed), b (pending)',
                          'd': 'waits for c (blocked)'}, self.reasons(workflow_id))
        names = [f'a{number}' for number in range(9)]
        lines = [f'{name}:' for name in names] + ['z: ' + ' '.join(names)]
        found = self.reasons(self.create('\n'.join(lines)))
        first = ', '.join(f'{name} (ready)' for name in names[:5])
        self.assertEqual(f'waits for {first} and 4 more', found['z'])
        self.assertEqual('waits for a runner', found['a0'])

    def test_a_canceled_workflow_is_the_reason_of_its_jobs(self):
        workflow_id = self.create('a:\nb: a\nc:')
        node_id = self.node(workflow_id)
        job = self.claim(workflow_id, node_id, 1)['a']
        self.call('cancel_workflow', id=workflow_id)
        never = 'never ran: the workflow was canceled'
        self.assertEqual({'a': 'canceled while it ran', 'b': never, 'c': never}, self.reasons(workflow_id))
        end = self.end(job, 'canceled', 143, reason='the workflow was canceled')
        self.sync(workflow_id, node_id, completions=[end])
        self.assertEqual('the workflow was canceled', self.reasons(workflow_id)['a'])

    def test_an_uninitialized_job_and_an_unknown_one(self):
        workflow_id = self.create('a:')
        self.call('reset_job_status', id=workflow_id)
        self.assertEqual({'a': 'the workflow is not initialized'}, self.reasons(workflow_id))
        self.assertRefused('there is no job 99', 'explain_job', id=99)
        self.assertRefused('there is no workflow 99', 'explain_workflow', id=99)

    def test_a_lost_node_is_the_reason_of_its_jobs(self):
        workflow_id = self.create('a:')
        node_id = self.node(workflow_id)
        job = self.claim(workflow_id, node_id)['a']
        self.sync(workflow_id, node_id, started=[[job['id'], 1, '2026-01-01T00:00:00Z']])
        self.call('delete_compute_node', id=node_id)
        reason = f'compute node {node_id} (h), which ran it, went away'
        self.assertEqual({'a': reason}, self.reasons(workflow_id))

    def test_an_attempt_that_was_taken_from_its_runner_says_so(self):
        workflow_id = self.create('a:')
        job = self.claim(workflow_id, self.node(workflow_id))['a']
        self.call('manage_status_change', id=job['id'], status='uninitialized', run_id=1)
        result, = self.call('list_results', workflow_id=workflow_id, all_runs=True)['items']
        self.assertEqual(('canceled', 'the job was reset while a runner had it'),
                         (result['status'], result['reason']))

    def test_every_failed_attempt_is_an_event_of_level_error(self):
        workflow_id = self.create('a:\nb:\nc:\nd:')
        node_id = self.node(workflow_id)
        self.let_fail(workflow_id, 'a', node_id, reason='first', retry=True)
        self.let_fail(workflow_id, 'a', node_id)
        jobs = {job['name']: job for job in self.call('list_jobs', workflow_id=workflow_id)['items']}
        result = {'job_id': jobs['b']['id'], 'workflow_id': workflow_id, 'run_id': 1,
                  'compute_node_id': node_id, 'return_code': 1, 'exec_time_minutes': 1.0,
                  'completion_time': '2026-01-01T00:00:00Z', 'status': 'terminated'}
        self.call('complete_job', result, id=jobs['b']['id'], status='terminated', run_id=1)
        self.sync(workflow_id, node_id, completions=[self.end(jobs['c'])])
        events = self.call('list_events', workflow_id=workflow_id, category='job')['items']
        keys = ('event_type', 'level', 'job_name', 'attempt_id', 'return_code', 'message')
        self.assertEqual([
            ('job_failed', 'error', 'a', 1, 3, 'a: first'),
            ('job_failed', 'error', 'a', 2, 3, 'a: return code 3'),
            ('job_terminated', 'warning', 'b', 1, 1, 'b: return code 1')],
            [tuple(event['data'][key] for key in keys) for event in events])

    def test_a_reason_is_kept_with_each_attempt_and_bounded(self):
        workflow_id = self.create('a:')
        node_id = self.node(workflow_id)
        self.let_fail(workflow_id, 'a', node_id, reason='x' * 100000, retry=True)
        self.let_fail(workflow_id, 'a', node_id, reason='second')
        rows = self.call('list_results', workflow_id=workflow_id, all_runs=True)['items']
        self.assertEqual(['x' * torc.MAX_REASON_CHARACTERS, 'second'], [row['reason'] for row in rows])

    def test_an_explanation_groups_failures_and_stays_short(self):
        names = [f'a{number}' for number in range(30)]
        lines = [f'{name}:' for name in names] + [f'b{name}: {name}' for name in names]
        workflow_id = self.create('\n'.join(lines + ['run:', 'later: run', 'last: later']))
        node_id = self.node(workflow_id)
        jobs = self.claim(workflow_id, node_id)
        ends = [self.end(jobs[name], 'failed', 1, reason='no numpy' if number > 9 else f'cell {number}')
                for number, name in enumerate(names)]
        started = [[jobs['run']['id'], 1, '2026-01-01T00:00:00Z']]
        self.sync(workflow_id, node_id, completions=ends, started=started)
        found = self.call('explain_workflow', id=workflow_id, limit=3)
        keys = ('job_name', 'count', 'return_code', 'reason')
        self.assertEqual([('a10', 20, 1, 'no numpy'), ('a0', 1, 1, 'cell 0'), ('a1', 1, 1, 'cell 1')],
                         [tuple(group[key] for key in keys) for group in found['failures']])
        never = [f'never ran: its prerequisite a{number} failed: cell {number}' for number in range(3)]
        self.assertEqual(never, [job['reason'] for job in found['canceled']])
        blockers = [(job['job_name'], job['status']) for job in found['blockers']]
        self.assertEqual([('run', 'running')], blockers)
        self.assertEqual(5, len(self.call('explain_workflow', id=workflow_id)['failures']))

    def test_an_explanation_is_bounded_whatever_is_asked_for(self):
        workflow_id = self.create('a:\n' + '\n'.join(f'b{number}: a' for number in range(60)))
        node_id = self.node(workflow_id)
        self.let_fail(workflow_id, 'a', node_id)
        found = self.call('explain_workflow', id=workflow_id, limit=1000)
        self.assertEqual(torc.MOST_EXPLAINED, len(found['canceled']))

    def test_a_workflow_has_a_state_in_one_word(self):
        table = (('a:', {}, 'completed'), ('a:\nb:', {'a': 'failed'}, 'failed'),
                 ('a:', {'a': 'terminated'}, 'failed'), ('a:\nb: a', None, 'ready'),
                 ('a:\nb: a', {'a': 'pending_failed'}, 'pending_failed'))
        wanted = {}
        for jobs, ends, word in table:
            workflow_id = self.create(jobs)
            wanted[workflow_id] = word
            if ends is not None:
                self.drive(workflow_id, ends)
        running, canceled, fresh = (self.create('a:') for _ in range(3))
        self.claim(running, self.node(running))
        self.call('cancel_workflow', id=canceled)
        self.call('reset_job_status', id=fresh)
        empty = self.call('create_workflow', {'name': 'w', 'user': 'u'})['id']
        wanted.update({running: 'running', canceled: 'canceled'})
        wanted.update(dict.fromkeys((fresh, empty), 'uninitialized'))
        found = self.call('list_workflow_statuses', ids=[*wanted, 999])['statuses']
        self.assertEqual({str(number): word for number, word in wanted.items()}, found)

    def test_states_of_workflows_are_shown_to_those_who_may_see_them(self):
        ids = [self.call('create_workflow', {'name': 'w', 'user': user})['id'] for user in ('ann', 'eve')]
        self.store.enforces_access = True
        query = '&'.join(f'ids={workflow_id}' for workflow_id in ids)
        with self.store.transaction():
            for caller, is_owner, seen in (('ann', False, ids[:1]), ('eve', False, ids[1:]),
                                           ('ann', True, ids)):
                path = torc.API_PREFIX + '/workflow_statuses'
                found = torc.answer_request(self.store, 'GET', path, query, b'', caller, is_owner)
                wanted = {str(number): 'uninitialized' for number in seen}
                self.assertEqual((200, {'statuses': wanted}), found)


class NewsTest(ServiceTest):
    """What verbs tell those who listen."""

    def watch(self, workflow_id: int) -> None:
        self.store.watched = {workflow_id}

    def told(self) -> List[Tuple[str, str, Any]]:
        """Type, severity and job's name of all that was announced since the last time."""
        return [(item.event_type, item.severity, item.data.get('job_name')) for item in self.store.take_news()]

    def test_without_a_listener_nothing_is_kept(self):
        workflow_id = self.create('a:\nb: a')
        self.watch(workflow_id + 1)
        self.drive(workflow_id, {'a': 'failed'})
        self.call('cancel_workflow', id=workflow_id)
        self.assertEqual([], self.store.news)

    def test_the_life_of_a_workflow_is_told(self):
        workflow_id = self.create('a:\nb: a\nc:\nd:')
        self.watch(workflow_id)
        self.call('initialize_jobs', id=workflow_id)
        node_id = self.node(workflow_id)
        jobs = self.claim(workflow_id, node_id)
        started = [[jobs['a']['id'], 1, '2026-01-01T00:00:00Z']]
        self.sync(workflow_id, node_id, started=started, completions=[self.end(jobs['c'], 'terminated', 152, retry=True)])
        ends = [self.end(jobs['a'], 'failed', 1, reason='out of luck'), self.end(jobs['d'])]
        self.sync(workflow_id, node_id, started=started, completions=ends)
        self.call('reset_job_status', id=workflow_id)
        self.call('initialize_jobs', id=workflow_id, only_uninitialized=True)
        self.call('cancel_workflow', id=workflow_id)
        self.call('update_compute_node', {'is_active': False, 'duration_seconds': 5.0}, id=node_id)
        self.assertEqual([
            ('workflow_started', 'info', None), ('compute_node_started', 'info', None), ('job_started', 'info', 'c'), ('job_terminated', 'warning', 'c'), ('job_retried', 'info', 'c'),
            ('job_started', 'info', 'a'), ('job_failed', 'error', 'a'), ('job_canceled', 'warning', 'b'), ('job_started', 'info', 'd'),
            ('job_completed', 'info', 'd'), ('user_action', 'info', None), ('workflow_reinitialized', 'info', None), ('workflow_canceled', 'warning', None),
            *[('job_canceled', 'warning', name) for name in 'abcd'], ('compute_node_stopped', 'info', None)], self.told())

    def test_what_is_told_of_jobs_and_nodes_has_the_known_keys(self):
        workflow_id = self.create('a:')
        self.watch(workflow_id)
        node_id = self.node(workflow_id)
        job = self.claim(workflow_id, node_id)['a']
        self.sync(workflow_id, node_id, started=[[job['id'], 1, '2026-01-01T00:00:00Z']])
        self.sync(workflow_id, node_id, completions=[self.end(job, 'failed', 3, reason='why')])
        self.call('delete_compute_node', id=node_id)
        node = {'compute_node_id': node_id, 'hostname': 'h', 'pid': 1, 'compute_node_type': 'local'}
        self.assertEqual([
            ('compute_node_started', dict(node, num_cpus=4, memory_gb=8.0, num_gpus=0)),
            ('job_started', {'job_id': job['id'], 'job_name': 'a', 'compute_node_id': node_id, 'run_id': 1}),
            ('job_failed', {'job_id': job['id'], 'job_name': 'a', 'status': 'failed', 'return_code': 3, 'message': 'why'}),
            ('compute_node_stopped', dict(node, duration_seconds=None))], [(item.event_type, item.data) for item in self.store.take_news()])

    def test_a_lost_node_is_told_once_with_what_it_had(self):
        workflow_id = self.create('a:')
        self.watch(workflow_id)
        node_id = self.node(workflow_id)
        job = self.claim(workflow_id, node_id)['a']
        self.sync(workflow_id, node_id, started=[[job['id'], 1, '2026-01-01T00:00:00Z']])
        self.store.take_news()
        with self.store.transaction():
            torc.release_lost_nodes(self.store, lambda *_: False)
        self.call('delete_compute_node', id=node_id)
        self.assertEqual(['compute_node_stopped', 'job_failed', 'job_orphaned'], [event_type for event_type, _, _ in self.told()])

    def test_the_end_of_a_task_is_told_with_who_asked_for_it(self):
        workflow_id = self.create('a:')
        self.watch(workflow_id)
        self.call('initialize_jobs', id=workflow_id, **{'async': True})
        self.store.caller = 'another'
        with self.store.transaction():
            torc.run_tasks(self.store)
        self.assertEqual([('workflow_started', 'tester'), ('task_completed', 'tester')],
                         [(item.event_type, item.data['user']) for item in self.store.take_news()])

    def test_what_is_rolled_back_is_not_told(self):
        workflow_id = self.create('a:')
        self.watch(workflow_id)
        with self.store.transaction():
            torc.announce(self.store, workflow_id, 'kept', {})
            with contextlib.suppress(torc.Refused), self.store.savepoint():
                torc.announce(self.store, workflow_id, 'undone', {})
                raise torc.Refused('no')
            with self.store.savepoint(keeps=False):
                torc.announce(self.store, workflow_id, 'tried', {})
        self.assertEqual(['kept'], [item.event_type for item in self.store.take_news()])
        with contextlib.suppress(torc.Refused), self.store.transaction():
            torc.announce(self.store, workflow_id, 'undone', {})
            raise torc.Refused('no')
        self.assertEqual([], self.store.take_news())

    def test_a_cascade_over_very_many_jobs_is_counted_not_told_job_by_job(self):
        before, torc.MAX_NEWS = torc.MAX_NEWS, 100
        self.addCleanup(setattr, torc, 'MAX_NEWS', before)
        workflow_id = self.create('first:\n' + '\n'.join(f'j{number}: first' for number in range(5000)))
        self.watch(workflow_id)
        node_id = self.node(workflow_id)
        self.sync(workflow_id, node_id, completions=[self.end(self.claim(workflow_id, node_id)['first'], 'failed', 1)])
        news = self.store.take_news()
        self.assertEqual((100, [workflow_id] * 4903), (len([item for item in news if not isinstance(item, int)]), news[100:]))
        feeds = torc.Feeds()
        feed = feeds.join(workflow_id, None)
        feeds.add_news(news)
        self.assertIn(b'event: warning\ndata: {"dropped":4903}', feed.events[-1][1])


class AdminSqlTest(ServiceTest):
    """An administrator's SQL, and what it must not do."""

    def sql(self, sql: str, **more: Any) -> Any:
        value = self.call('admin_sql', dict({'sql': sql}, **more))
        if isinstance(value, torc.TorcError):
            raise value
        return value

    def write(self, sql: str, **more: Any) -> Any:
        return self.sql(sql, write=True, **more)

    def test_a_query_brings_rows_as_json_can_say_them(self):
        self.create('a:')
        answer = self.sql("SELECT 1 AS n, x'00ff' AS n, 9223372036854775807 AS big, -9e999 AS low, CAST(x'61ff' AS TEXT) AS odd, NULL, 'ü' AS n -- so;\n;")
        row = {'n': 1, 'n_2': '00ff', 'big': 2 ** 63 - 1, 'low': '-inf', 'odd': 'a\ufffd', 'NULL': None, 'n_3': 'ü'}
        self.assertEqual({'columns': list(row), 'items': [row], 'committed': False}, answer)
        self.assertEqual(('ü', str), (self.store.value("SELECT 'ü'"), self.store._db.text_factory))      # as before
        self.assertEqual(['id'], self.sql('SELECT id FROM job WHERE 0')['columns'])
        self.assertEqual([{'column1': 1}, {'column1': 2}], self.sql('VALUES (1), (2)')['items'])

    def test_nothing_is_left_that_would_fail_all_that_comes_after(self):
        self.create('a:')
        for sql in ('UPDATE job SET id = 9223372036854775807 WHERE 1', 'UPDATE job SET id = 0 WHERE 1', "UPDATE workflow SET env = '5' WHERE 1",
                    "UPDATE job_kind SET labels = '{}' WHERE 1", "UPDATE job_kind SET labels = '[1]' WHERE 1", "UPDATE job_kind SET labels = 'null' WHERE 1",
                    "UPDATE job SET env = '[]' WHERE 1",
                    "INSERT INTO event (id, workflow_id, timestamp, data) VALUES (9223372036854775807, 1, 1, '{}')",
                    "INSERT INTO result (workflow_id, job_id, run_id, compute_node_id, return_code, exec_time_minutes, completion_time, status) "
                    "VALUES (1, 1, 1, 1, 0, 1e308, '2026-01-01T00:00:00Z', 5)"):
            with self.subTest(sql):
                self.assertRaisesRegex(torc.Refused, 'would hold what', self.write, sql)
        self.assertEqual(1, self.write("UPDATE job SET env = '{}' WHERE 1")['rows_affected'])

    def test_no_job_loses_what_it_is_listed_and_claimed_by(self):
        workflow_id, other_id = self.create('a:\nb: a'), self.create('c:\nd: c')
        for sql in ('DELETE FROM job_kind WHERE 1', 'UPDATE job SET kind_id = 9 WHERE id = 1',
                    'DELETE FROM dep_set WHERE 1', 'UPDATE job SET dep_set_id = 9 WHERE id = 2',
                    f'UPDATE job SET workflow_id = {other_id} WHERE id = 1'):
            with self.subTest(sql):
                self.assertRaisesRegex(torc.Refused, 'would have a job_kind or dep_set', self.write, sql)
        self.assertEqual({'a': 'ready', 'b': 'blocked'}, self.statuses(workflow_id))
        self.assertEqual(1, self.write(f'DELETE FROM workflow WHERE id = {other_id}')['rows_affected'])

    def test_claims_look_at_the_requirements_that_people_see(self):
        workflow_id = self.create('a:')
        for change in ("memory = 'lots'", "runtime = 'x'", 'num_cpus = -1'):
            name = change.split()[0]
            with self.subTest(change):
                sql = f'UPDATE resource_requirements SET {change} WHERE 1'
                self.assertRaisesRegex(torc.Refused, name, self.write, sql)
        self.write("UPDATE resource_requirements SET memory = '16g', runtime = 'PT2H' WHERE 1")
        free = {'num_cpus': 4, 'memory_gb': 15.0, 'num_gpus': 0, 'num_nodes': 1}
        asked = {'id': workflow_id, 'limit': 1}
        self.assertEqual([], self.call('claim_jobs_based_on_resources', free, **asked)['jobs'])
        free['memory_gb'] = 16.0
        self.assertTrue(self.call('claim_jobs_based_on_resources', free, **asked)['jobs'])

    def test_the_number_of_rows_is_limited(self):
        numbers = 'WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n'
        for limit, count in ((3, 3), (-5, 1), (0, 1), (10 ** 9, 100000)):
            self.assertEqual(count, len(self.sql(numbers, limit=limit)['items']), limit)

    def test_what_only_reads_is_all_that_a_query_can_do(self):
        workflow_id = self.create('a:')
        tables = self.store.rows('SELECT name, sql FROM sqlite_master')
        for sql, text in (
                ('', 'cannot begin a statement'), (' ;; ', 'cannot begin a statement'), ('-- nothing', 'cannot begin a statement'),
                ('DELETE FROM job WHERE 1', 'needs write'), ('/* SELECT */ UPDATE job SET name = 1', 'needs write'),
                ('PRAGMA user_version = 9', 'cannot begin a statement'), ('EXPLAIN SELECT 1', 'cannot begin a statement'),
                ('SELECT 1; DELETE FROM job', 'one statement at a time'), ("SELECT ';' ; ;", 'one statement at a time'),
                ('SELECT * FROM nowhere', 'no such table: nowhere'), ('SELECT', 'incomplete input'), ('SELECT ?', 'bindings'),
                ('WITH x AS (SELECT 1) DELETE FROM job WHERE 1', 'must not write to job'),
                ("SELECT load_extension('x')", 'must not do what it wants with load_extension'),
                ("SELECT * FROM pragma_table_info('job')", 'must not'), ('SELECT 1 /* open', None), ("SELECT 'open", 'SQLite refuses')):
            with self.subTest(sql):
                if text:
                    self.assertRefused(text, 'admin_sql', {'sql': sql})
                else:
                    self.assertEqual(1, len(self.sql(sql)['items']))
        self.assertEqual({'a': 'ready'}, self.statuses(workflow_id))
        self.assertEqual(tables, self.store.rows('SELECT name, sql FROM sqlite_master'))
        self.assertEqual((0, 0), (self.store.value('PRAGMA query_only'), self.store.value('SELECT count(*) FROM admin_audit_log')))

    def test_a_statement_compiled_for_writing_does_not_write_as_a_query(self):
        self.create('a:')
        sql = "WITH x AS (SELECT 1) UPDATE workflow SET description = 'w' WHERE id = 1"
        self.write(sql)
        with self.store.transaction():
            self.store.run("UPDATE workflow SET description = 'ours'")
        with self.assertRaises(torc.Refused):
            self.sql(sql)
        self.assertEqual('ours', self.store.value('SELECT description FROM workflow'))

    def kind(self, body: Dict[str, Any]) -> str:
        """The word for an error."""
        status, value = self.ask('POST', '/admin/sql', body)
        self.assertEqual(422, status, value)
        return value['error']['error']

    def test_tables_of_ones_own_are_made_written_and_put_on_record(self):
        self.create('a:')
        statements = ('CREATE TABLE t_x (id INTEGER PRIMARY KEY AUTOINCREMENT, a UNIQUE, b)', 'CREATE INDEX t_x_by_b ON t_x (b)',
                      "INSERT INTO t_x (a, b) VALUES (1, 'one'), (x'00', 9e999)", 'UPDATE t_x SET b = 0 WHERE a = 1',
                      'create table T_copy as select id, name from job', 'CREATE TABLE t_child (x REFERENCES t_x (id))')
        for sql in statements:
            with self.subTest(sql):
                before = self.store.rows('SELECT * FROM sqlite_master')
                self.assertFalse(self.write(sql, dry_run=True)['committed'])
                self.assertEqual(before, self.store.rows('SELECT * FROM sqlite_master'))
                answer = self.write(sql)
                self.assertEqual((True, {'INSERT': 2, 'UPDATE': 1}.get(sql.split()[0], 0)), (answer['committed'], answer['rows_affected']))
        self.assertEqual([{'a': 1, 'b': 0}, {'a': '00', 'b': 'inf'}], self.sql('SELECT a, b FROM t_x')['items'])
        self.assertEqual([{'name': 'a'}], self.sql('SELECT name FROM t_copy')['items'])
        self.assertEqual(2, self.write('DELETE FROM t_x', allow_full_table=True)['rows_affected'])
        log = self.call('list_admin_audit_log')['items']
        self.assertEqual([*reversed(statements)], [row['sql_text'] for row in log[1:]])
        self.assertEqual({(True, True)}, {(row['committed'], row['success']) for row in log})
        self.store.close()
        self.store = torc.Store(self.store.path, lambda: self.clock)      # and such a database is opened again
        self.addCleanup(self.store.close)
        self.assertEqual(1, self.store.value('SELECT count(*) FROM t_copy'))

    def test_nothing_is_made_that_ties_our_tables(self):
        self.create('a:')
        before = self.dump() + self.store.rows('SELECT name, sql FROM sqlite_master')
        for sql, text in (
                ('CREATE TABLE x (a)', 'must not make x'), ('CREATE TABLE job (a)', 'must not make job'), ('CREATE TABLE IF NOT EXISTS job (a)', 'must not make job'),
                ('CREATE TABLE sqlite_x (a)', 'reserved for internal use'), ('CREATE TEMP TABLE t_x (a)', 'must not make'), ('CREATE TABLE temp.t_x (a)', 'must not make'),
                ('CREATE TEMP TABLE job (a)', 'must not make'), ('CREATE UNIQUE INDEX t_i ON job (name)', 'must not make t_i'), ('CREATE INDEX i ON job (name)', 'must not make i'),
                ('CREATE VIEW t_v AS SELECT * FROM job', 'must not make t_v'), ('CREATE VIRTUAL TABLE t_f USING fts5 (a)', 'must not make t_f'),
                ('CREATE TRIGGER t_t AFTER UPDATE ON job BEGIN SELECT 1; END', 'one statement'), ('CREATE TRIGGER t_t AFTER INSERT ON job BEGIN SELECT 1 END', 'must not make t_t'),
                ('CREATE TABLE t_x (a REFERENCES job (id))', 't_x must not refer to job'), ('CREATE TABLE t_x (a REFERENCES job (id) ON DELETE CASCADE)', 'must not refer'),
                ('CREATE TABLE t_x (a, FOREIGN KEY (a) REFERENCES later (id))', 't_x must not refer to later'), ('CREATE', 'incomplete input'),
                ("CREATE TABLE t_x AS SELECT load_extension('x')", 'must not make'), ('DROP TABLE t_x', 'cannot begin'), ('ALTER TABLE t_x ADD a', 'cannot begin')):
            with self.subTest(sql):
                with self.assertRaises(torc.Refused) as caught:
                    self.write(sql, dry_run=True)
                self.assertIn(text, caught.exception.message)
        self.assertEqual(before, self.dump() + self.store.rows('SELECT name, sql FROM sqlite_master'))
        self.assertEqual({'a': 'ready'}, self.statuses(1))

    def test_errors_have_the_names_of_torc(self):
        for body, kind in (({'sql': 'SELECT * FROM nowhere'}, 'QueryFailed'), ({'sql': 'INSERT INTO nowhere VALUES (1)', 'write': True}, 'ExecutionFailed'),
                           ({'sql': 'DROP TABLE job', 'write': True}, 'InvalidStatement'), ({'sql': 'DELETE FROM job', 'write': True}, 'InvalidStatement'),
                           ({'sql': 'CREATE TABLE t_x (a)'}, 'InvalidStatement'), ({'sql': 'CREATE TABLE x (a)', 'write': True}, 'ExecutionFailed'),
                           ({'sql': 'DELETE FROM nowhere WHERE 1', 'write': True, 'dry_run': True}, 'ExecutionFailed')):
            with self.subTest(body):
                self.assertEqual(kind, self.kind(body))
        unreadable = unittest.mock.Mock(side_effect=torc.BadInput('no user in it'))
        for reload_users, kind in ((None, 'NoAuthFile'), (unreadable, 'ReloadFailed')):
            self.store.reload_users = reload_users
            status, value = self.ask('POST', '/admin/reload-auth')
            self.assertEqual((422, kind), (status, value['error']['error']))

    def test_what_would_break_us_is_refused(self):
        self.create('a:')
        for sql, text in (
                ('SELECT 1', "'SELECT' cannot begin"), ('DROP TABLE job', 'cannot begin'),
                ('ALTER TABLE job ADD x', 'cannot begin'), ('VACUUM', 'cannot begin'), ('REINDEX', 'cannot begin'), ('ANALYZE', 'cannot begin'),
                ('PRAGMA foreign_keys = OFF', 'cannot begin'), ("ATTACH 'x' AS x", 'cannot begin'), ('DETACH x', 'cannot begin'),
                ('BEGIN', 'cannot begin'), ('COMMIT', 'cannot begin'), ('END', 'cannot begin'), ('ROLLBACK', 'cannot begin'),
                ('SAVEPOINT verb', 'cannot begin'), ('RELEASE verb', 'cannot begin'), ('/**/COMMIT', 'cannot begin'),
                ('CREATE TEMP TRIGGER t AFTER DELETE ON job BEGIN SELECT 1; END', 'one statement'), ('TRUNCATE job', 'cannot begin'),
                ("INSERT OR ROLLBACK INTO workflow (id, name, user, timestamp) VALUES (1, 'x', 'x', 'x')", 'OR ROLLBACK'),
                ('UPDATE /* */ OR\n/**/ROLLBACK job SET id = 1 WHERE 1', 'OR ROLLBACK'),
                ("UPDATE sqlite_sequence SET seq = 0 WHERE name = 'job'", 'must not write to sqlite_sequence'),
                ('DELETE FROM sqlite_master WHERE 1', 'SQLite refuses'),
                ("DELETE FROM admin_audit_log WHERE id = 1", 'must not write to admin_audit_log'),
                ("UPDATE identity SET id = 'x' WHERE 1", 'must not write to identity'),
                ('UPDATE job SET name = 1', 'has no WHERE'), ('DELETE FROM job', 'has no WHERE'), ('DELETE FROM job -- WHERE', 'has no WHERE'),
                ("UPDATE job SET name = ' WHERE '", 'has no WHERE'), ('UPDATE job SET name = (SELECT 1 WHERE 1)', 'has no WHERE'),
                ('WITH replace AS (SELECT 1 WHERE 1) DELETE FROM job', 'has no WHERE'), ('WITH a(x) AS (VALUES (1)) UPDATE job SET name = 2', 'has no WHERE'),
                ('UPDATE job SET status = 11 WHERE id = 1', 'job.status would hold'), ("UPDATE job SET status = 'x' WHERE id = 1", 'job.status would hold'),
                ("UPDATE job SET env = '{' WHERE id = 1", 'job.env would hold what cannot be read'), ("UPDATE job SET name = x'00' WHERE id = 1", 'job.name would hold'),
                ("UPDATE job SET name = CAST(x'ff' AS TEXT) WHERE id = 1", 'job.name would hold what cannot be read'),
                ("UPDATE job SET env = '{\"a\": 1e999}' WHERE id = 1", 'job.env would hold what cannot be read'),
                ("UPDATE job SET env = '\"\\ud800\"' WHERE id = 1", 'job.env would hold what cannot be read'),
                ("INSERT INTO file (workflow_id, name, path, st_mtime) VALUES (1, 'f', 'f', 9e999)", 'file.st_mtime would hold'),
                ("UPDATE workflow SET run_id = 'x' WHERE id = 1", 'workflow.run_id would hold'), ('UPDATE job SET id = NULL WHERE id = 1', 'SQLite refuses'),
                ('INSERT INTO job (workflow_id) VALUES (77)', 'SQLite refuses')):
            with self.subTest(sql), self.assertRaises(torc.Refused) as caught:
                self.write(sql)
            self.assertIn(text, caught.exception.message)
        self.assertEqual(('a', 2), self.store.one('SELECT name, status FROM job'))
        self.assertEqual([], self.store.rows('SELECT * FROM sqlite_temp_master'))
        self.assertFalse(self.store._db.in_transaction)

    def test_a_write_says_how_much_it_changed_and_is_put_on_record(self):
        self.create('a:\nb: a')
        answer = self.write("UPDATE job SET supports_termination = 1 WHERE name > ''")
        self.assertEqual({'columns': [], 'items': [], 'committed': True, 'rows_affected': 2}, answer)
        self.assertEqual(0, self.write("UPDATE job SET supports_termination = 1 WHERE name = 'z'")['rows_affected'])
        self.assertEqual(2, self.write('UPDATE job SET supports_termination = 0', allow_full_table=True)['rows_affected'])
        self.assertEqual(1, self.write("WITH x AS (SELECT 'a' AS n) UPDATE job SET supports_termination = 1 WHERE name IN (SELECT n FROM x)")['rows_affected'])
        with self.assertRaises(torc.Refused):
            self.write('UPDATE job SET gone = 1 WHERE 1')
        log = self.call('list_admin_audit_log')
        self.assertEqual((5, [(True, 1), (True, 2), (True, 0), (True, 2)]), (log['total_count'], [(row['success'], row['rows_affected']) for row in log['items'][1:]]))
        self.assertEqual({'id': 5, 'user_name': 'tester', 'timestamp': 1700000000000, 'sql_text': 'UPDATE job SET gone = 1 WHERE 1', 'is_write': True,
                          'allow_full_table': False, 'committed': False, 'success': False, 'error': 'SQLite refuses the statement: no such column: gone'},
                         log['items'][0])
        page = self.call('list_admin_audit_log', limit=2, offset=1)
        self.assertEqual(([4, 3], True), ([row['id'] for row in page['items']], page['has_more']))

    def test_a_dry_run_changes_nothing_and_is_not_put_on_record(self):
        workflow_id = self.create('a:\nb: a')
        answer = self.write("UPDATE job SET status = 6 WHERE name = 'a'", dry_run=True)
        self.assertEqual((1, False), (answer['rows_affected'], answer['committed']))
        self.assertEqual({'a': 'ready', 'b': 'blocked'}, self.statuses(workflow_id))
        self.assertEqual(0, self.call('list_admin_audit_log')['total_count'])

    def test_jobs_that_wait_for_a_changed_one_are_let_go(self):
        workflow_id = self.create('a:\nb: a\nc: b')
        self.write("UPDATE job SET status = 5 WHERE name = 'a'")
        self.assertEqual({'a': 'completed', 'b': 'ready', 'c': 'blocked'}, self.statuses(workflow_id))
        self.write("DELETE FROM job WHERE name = 'b'")
        self.assertEqual({'a': 'completed', 'c': 'ready'}, self.statuses(workflow_id))
        self.assertWhole()

    def test_the_same_words_again_are_looked_at_again(self):
        self.create('x:\ny: x')
        for status in (5, 2, 5, 2, 5):
            self.write(f"UPDATE job SET status = {status} WHERE name = 'x'")
            self.assertEqual([(int(status == 2),)], self.store.rows('SELECT pending FROM dep_set'))
        for _ in range(2):
            with self.assertRaises(torc.Refused):
                self.write("UPDATE job SET env = '[' WHERE name = 'x'")

    def test_a_statement_without_end_is_given_up_and_harms_nobody(self):
        before, torc.FOREIGN_SQL_S = torc.FOREIGN_SQL_S, 0.1
        self.addCleanup(setattr, torc, 'FOREIGN_SQL_S', before)
        workflow_id = self.create('a:')
        endless = 'WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)'
        self.assertRefused('took longer than 0.1 s', 'admin_sql', {'sql': endless + ' SELECT count(*) FROM n'})
        with self.assertRaises(torc.Refused) as caught:     # SQLite ends the whole transaction with it
            self.write(endless + ' UPDATE job SET priority = (SELECT count(*) FROM n) WHERE 1'.replace('priority', 'attempt_id'))
        self.assertIn('took longer', caught.exception.message)
        self.assertEqual(1, self.call('list_admin_audit_log')['total_count'])
        self.assertEqual({'a': 'ready'}, self.statuses(workflow_id))
        self.drive(workflow_id, {})
        self.assertIsNone(self.store.value('SELECT 1 FROM job WHERE attempt_id <> 1'))

    def test_an_answer_too_large_is_refused(self):
        before, torc.MAX_FOREIGN_BYTES = torc.MAX_FOREIGN_BYTES, 1024 ** 2
        self.addCleanup(setattr, torc, 'MAX_FOREIGN_BYTES', before)
        self.assertRefused('the answer has more than 1 MiB', 'admin_sql', {'sql': 'SELECT zeroblob(600000) UNION ALL SELECT zeroblob(600000)'})

    def test_the_words_are_read_in_time_that_grows_with_their_number(self):
        begun = time.process_time()
        for sql in ('SELECT ' + '(' * 200000, 'UPDATE ' + '(a' * 200000 + ')' * 200000, "SELECT '" * 100000, 'SELECT ' + '/*' * 200000, 'WITH x' + '\n' * 300000):
            with self.assertRaises(torc.Refused):
                self.write(sql)
        self.assertLess(time.process_time() - begun, 5)

    def test_administrators_only_and_only_what_the_server_allows(self):
        calls = (('admin_sql', {'sql': 'SELECT 1'}), ('list_admin_audit_log', None), ('get_api_stats', None), ('stream_api_events', None))
        self.store.is_admin = False
        for name, body in calls:
            with self.assertRaises(torc.Denied):
                self.call(name, body)
        self.store.is_admin, self.store.allows_sql_writes = True, False
        self.assertEqual([{'1': 1}], self.sql('SELECT 1')['items'])
        for body in ({'sql': 'DELETE FROM job WHERE 1', 'write': True}, {'sql': 'DELETE FROM job WHERE 1', 'write': True, 'dry_run': True}):
            with self.assertRaises(torc.Denied) as caught:
                self.call('admin_sql', body)
        self.assertEqual((403, 'SQL that writes is switched off on this server'), (caught.exception.http, caught.exception.message))
        self.store.allows_sql = False
        with self.assertRaises(torc.Denied):
            self.sql('SELECT 1')
        self.assertEqual(0, self.call('list_admin_audit_log')['total_count'])


class GroupTest(ServiceTest):
    """Access groups, their members, and the workflows that they may use."""

    def setUp(self) -> None:
        super().setUp()
        self.workflow_id = self.call('create_workflow', {'name': 'w', 'user': 'ann'})['id']
        self.group_id = self.call('create_access_group', {'name': 'chemists', 'description': 'who mix'})['id']

    def as_user(self, user: str) -> None:
        """From now on a user asks, where access is enforced."""
        self.store.caller, self.store.is_admin, self.store.knows_users, self.store.enforces_access = user, False, True, True

    def test_a_group_is_made_listed_and_deleted_and_its_name_is_its_own(self):
        group = self.call('get_access_group', group_id=self.group_id)
        self.assertEqual(('chemists', 'who mix', 2), (group['name'], group['description'], group['id']))
        self.assertNotIn('is_system', group)
        page = self.call('list_access_groups', limit=1)
        self.assertEqual((['admin'], 2, True, 1, 0), ([item['name'] for item in page['items']], page['total_count'], page['has_more'], page['limit'], page['offset']))
        self.assertEqual(['chemists'], [item['name'] for item in self.call('list_access_groups', offset=1)['items']])
        self.assertRefused("there is an access group 'chemists' already", 'create_access_group', {'name': 'chemists'})
        self.assertRefused('at least 0', 'list_access_groups', limit=-1)
        self.assertEqual(group, self.call('delete_access_group', group_id=self.group_id))
        self.assertRefused('no access group', 'get_access_group', group_id=self.group_id)

    def test_members_come_and_go(self):
        member = self.call('add_user_to_group', {'user_name': 'bob', 'group_id': self.group_id, 'role': 'admin'}, group_id=self.group_id)
        self.assertEqual(('bob', 'admin', self.group_id), (member['user_name'], member['role'], member['group_id']))
        self.assertEqual('member', self.call('add_user_to_group', {'user_name': 'cy'}, group_id=self.group_id)['role'])
        self.assertEqual(['bob', 'cy'], [item['user_name'] for item in self.call('list_group_members', group_id=self.group_id)['items']])
        self.assertEqual(['chemists'], [item['name'] for item in self.call('list_user_groups', user_name='bob')['items']])
        for text, body in (('bob is in access group 2 already', {'user_name': 'bob'}), ('one of member, admin', {'user_name': 'x', 'role': 'king'}),
                           ('nobody', {'user_name': 'anonymous'}), ('nobody', {}), ('the path about 2', {'user_name': 'x', 'group_id': 1})):
            with self.subTest(text):
                self.assertRefused(text, 'add_user_to_group', body, group_id=self.group_id)
        self.assertEqual(member, self.call('remove_user_from_group', group_id=self.group_id, user_name='bob'))
        self.assertRefused('bob is not in access group 2', 'remove_user_from_group', group_id=self.group_id, user_name='bob')
        self.assertRefused('no access group 99', 'add_user_to_group', {'user_name': 'bob'}, group_id=99)

    def test_the_administrators_are_those_of_the_options_and_no_others(self):
        for users in (['zoe', 'bob'], ['bob'], []):
            with self.store.transaction():
                torc.set_administrators(self.store, users)
            self.assertEqual(sorted(users), [item['user_name'] for item in self.call('list_group_members', group_id=1)['items']])
        for name, body, more in (('add_user_to_group', {'user_name': 'x'}, {}), ('remove_user_from_group', None, {'user_name': 'bob'}), ('delete_access_group', None, {})):
            with self.subTest(name), self.assertRaises(torc.Denied):
                self.call(name, body, group_id=1, **more)
        self.assertRaises(torc.BadInput, torc.set_administrators, self.store, ['anonymous'])
        self.store.run('DELETE FROM access_group WHERE is_system = 1')      # of a database that had none
        torc.set_administrators(self.store, ['bob'])
        self.assertTrue(torc.is_system_admin(self.store, 'bob'))

    def test_a_group_gets_workflows_when_they_are_made_or_later(self):
        first = self.call('create_workflow', {'name': 'x', 'user': 'ann', 'access_groups': ['chemists']})
        self.assertEqual(['chemists'], first['access_groups'])
        self.assertEqual(first, self.call('update_workflow', {'access_groups': ['chemists'], 'name': 'x'}, id=first['id']))
        link = self.call('add_workflow_to_group', id=self.workflow_id, group_id=self.group_id)
        self.assertEqual((self.workflow_id, self.group_id), (link['workflow_id'], link['group_id']))
        self.assertEqual(['chemists'], [item['name'] for item in self.call('list_workflow_groups', id=self.workflow_id)['items']])
        other = self.call('create_workflow', {'name': 'y', 'user': 'ann'})['id']
        for wanted, names in (([self.workflow_id, first['id']], ['chemists']), ([self.workflow_id, first['id']], ['none', 'chemists']), ([], ['none']),
                              ([self.workflow_id, first['id'], other], [])):
            self.assertEqual(wanted, [item['id'] for item in self.call('list_workflows', access_group=names)['items']])
        self.assertRefused('already', 'add_workflow_to_group', id=self.workflow_id, group_id=self.group_id)
        self.assertRefused('no access group 99', 'add_workflow_to_group', id=self.workflow_id, group_id=99)
        self.assertRefused('cannot be changed', 'update_workflow', {'access_groups': ['admin']}, id=first['id'])
        self.assertEqual(link, self.call('remove_workflow_from_group', id=self.workflow_id, group_id=self.group_id))
        self.assertRefused('has no access', 'remove_workflow_from_group', id=self.workflow_id, group_id=self.group_id)

    def test_a_workflow_for_groups_that_are_not_there_is_not_made(self):
        for names, text in ((['nobody'], "Unknown access group 'nobody'"), (['chemists', 'chemists'], 'twice')):
            self.assertRefused(text, 'create_workflow', {'name': 'x', 'user': 'ann', 'access_groups': names})
        self.assertEqual([self.workflow_id], self.store.ids('SELECT id FROM workflow'))

    def test_it_is_told_who_has_access_and_why(self):
        self.call('add_user_to_group', {'user_name': 'bob'}, group_id=self.group_id)
        self.call('add_workflow_to_group', id=self.workflow_id, group_id=self.group_id)
        torc.set_administrators(self.store, ['root'])
        for user, has_access, reason in (('ann', True, 'owns it'), ('bob', True, 'is in a group'), ('cy', False, 'neither'), ('root', True, 'administrator'),
                                         ('anonymous', False, 'anybody')):
            found = self.call('check_workflow_access', workflow_id=self.workflow_id, user_name=user)
            self.assertEqual((has_access, user, self.workflow_id), (found['has_access'], found['user_name'], found['workflow_id']))
            self.assertIn(reason, found['reason'])
        self.assertRefused('no workflow 99', 'check_workflow_access', workflow_id=99, user_name='ann')
        self.as_user('cy')
        self.assertFalse(self.call('check_workflow_access', workflow_id=99, user_name='cy')['has_access'])

    def test_who_makes_a_workflow_owns_it_and_only_the_owner_gives_it_away(self):
        self.call('add_user_to_group', {'user_name': 'bob', 'role': 'admin'}, group_id=self.group_id)
        self.as_user('ann')
        self.call('add_workflow_to_group', id=self.workflow_id, group_id=self.group_id)     # her own workflow, a group of others
        self.as_user('bob')
        self.assertEqual('bob', self.call('create_workflow', {'name': 'x', 'user': 'ann'})['user'])
        plan = {'workflow': {'name': 'y', 'user': 'ann'}, 'files': [], 'user_data': [], 'resource_requirements': [], 'slurm_schedulers': [],
                'failure_handlers': [], 'kinds': [], 'dependency_sets': [], 'jobs': [], 'actions': []}
        self.assertEqual('bob', self.call('get_workflow', id=self.call('create_workflow_from_spec', plan)['workflow_id'])['user'])
        self.assertEqual('new', self.call('update_workflow', {'user': 'ann', 'description': 'new'}, id=self.workflow_id)['description'])
        with self.assertRaises(torc.Denied):
            self.call('update_workflow', {'user': 'bob'}, id=self.workflow_id)
        self.as_user('ann')
        self.assertEqual('bob', self.call('update_workflow', {'user': 'bob'}, id=self.workflow_id)['user'])
        self.as_user('anonymous')
        self.assertRaises(torc.Denied, self.call, 'create_workflow', {'name': 'x', 'user': 'ann'})

    def test_without_enforcement_groups_are_managed_by_the_owner_or_where_nobody_has_a_name_by_all(self):
        self.store.caller, self.store.is_admin = 'anonymous', False
        self.call('add_user_to_group', {'user_name': 'ann', 'role': 'admin'}, group_id=self.group_id)
        self.store.knows_users, self.store.caller = True, 'bob'
        self.assertEqual('w', self.call('get_workflow', id=self.workflow_id)['name'])
        for name, body, parameters in (('create_access_group', {'name': 'x'}, {}), ('add_user_to_group', {'user_name': 'bob'}, {'group_id': self.group_id}),
                                       ('add_workflow_to_group', None, {'workflow_id': self.workflow_id, 'group_id': self.group_id}),
                                       ('list_user_groups', None, {'user_name': 'ann'}), ('reload_auth', None, {})):
            with self.subTest(name):
                self.assertRaises(torc.Denied, self.call, name, body, **parameters)
        self.store.caller = 'ann'
        self.call('add_user_to_group', {'user_name': 'bob'}, group_id=self.group_id)

    def test_a_runner_cannot_speak_of_another_workflows_jobs_and_actions(self):
        mine, other = self.create('a:'), self.create('b:', actions=[{'trigger_type': 'on_workflow_start', 'action_type': 'run_commands',
                                                                     'action_config': {'commands': ['x']}}])
        node_id = self.node(mine)
        action_id = self.call('get_workflow_actions', id=other)[0]['id']
        job_id = self.call('list_jobs', workflow_id=other)['items'][0]['id']
        before = self.store.rows('SELECT * FROM workflow_action'), self.store.value('SELECT count(*) FROM event')
        self.sync(mine, node_id, action_results=[{'action_id': action_id, 'success': True}])
        self.assertEqual(before, (self.store.rows('SELECT * FROM workflow_action'), self.store.value('SELECT count(*) FROM event')))
        end = {'job_id': job_id, 'attempt_id': 1, 'return_code': 0, 'status': 'completed', 'exec_time_minutes': 0.5, 'completion_time': '2026-01-01T00:10:00Z'}
        self.assertIn(f'workflow {mine} has no job {job_id}', self.sync(mine, node_id, completions=[end])['errors'][0]['message'])
        self.assertEqual({'b': 'ready'}, self.statuses(other))


# ======== 9. API ========

# What the official interface has and ROUTES does not: operations, and query parameters of operations.
MORE_QUERY = {'list_failure_handlers': {'sort_by', 'reverse_sort'}, 'list_jobs': {'resource_requirements_id'}}     # ours only


class ApiTest(ServiceTest):
    """What arrives is checked before a verb sees it; every mistake of a client is a 4xx that names it."""

    def test_mistakes_get_a_clear_4xx(self):
        workflow_id = self.create('a:')
        job = {'workflow_id': workflow_id, 'name': 'n', 'command': 'c'}
        deep = b'[' * 100000
        table = (
            ('GET',  '/nowhere',                 None,                              404, 'nothing at'),
            ('PATCH', '/workflows/1',            None,                              405, 'takes DELETE, GET, PUT'),
            ('GET',  '/workflows/x',             None,                              400, 'must be an integer'),
            ('GET',  '/workflows/99999',         None,                              404, 'no workflow 99999'),
            ('GET',  '/workflows/' + '9' * 19,   None,                              422, 'beyond 64 bits'),
            ('GET',  '/jobs',                    None,                              400, 'workflow_id is missing'),
            ('POST', '/jobs',                    b'{',                              400, 'not JSON'),
            ('POST', '/jobs',                    b'\xff',                           400, 'not JSON'),
            ('POST', '/jobs',                    deep,                              400, 'not JSON: nested too deeply'),
            ('POST', '/jobs',                    b'{"priority": NaN}',              400, 'NaN is not allowed'),
            ('POST', '/jobs',                    b'{"priority": Infinity}',         400, 'Infinity is not allowed'),
            ('POST', '/jobs',                    b'{"priority": ' + b'1' * torc.MAX_BODY_BYTES, 400, 'digits'),
            ('POST', '/events',                  b'{"workflow_id": 1, "data": 1e999}', 422, 'finite'),
            ('GET',  '/workflows/%D9%A1',        None,                              400, 'must be an integer'),     # a digit, in Arabic
            ('POST', '/jobs',                    b'{"name": "a", "name": "b"}',     400, "duplicate key 'name'"),
            ('POST', '/jobs',                    [1],                               422, 'must be an object'),
            ('POST', '/jobs',                    dict(job, name=5),                 422, 'name must be text'),
            ('POST', '/jobs',                    dict(job, name='a\nb'),            422, 'control character'),
            ('POST', '/jobs',                    dict(job, name='x' * 2000),        422, '2000 characters'),
            ('POST', '/jobs',                    dict(job, command='a\0b'),         422, 'cannot be stored'),
            ('POST', '/jobs',                    b'{"workflow_id": 1, "name": "\\ud800", "command": "c"}', 422, 'cannot be stored'),
            ('POST', '/jobs',                    dict(job, priority=2 ** 63),       422, 'beyond 64 bits'),
            ('POST', '/jobs',                    dict(job, priority=True),          422, 'must be an integer'),
            ('POST', '/jobs',                    dict(job, priority=-1),            422, 'at least 0'),
            ('POST', '/jobs',                    dict(job, env={'A': 1}),           422, 'env.A must be text'),
            ('POST', '/jobs',                    dict(job, status='happy'),         422, 'one of uninitialized'),
            ('POST', '/jobs',                    dict(job, labels=['a,b']),         422, 'hold a comma'),
            ('POST', '/jobs',                    dict(job, input_file_ids=[77]),    422, 'has no file 77'),
            ('POST', '/jobs',                    {'workflow_id': 1, 'name': 'n'},   422, 'command is missing'),
            ('POST', '/resource_requirements',   {'workflow_id': 1, 'name': 'r', 'memory': '1.5g'}, 422, 'not an amount of memory'),
            ('POST', '/resource_requirements',   {'workflow_id': 1, 'name': 'r', 'runtime': '1h'},  422, 'not a duration'),
            ('POST', '/workflows/from_spec',     {},                                422, 'workflow is missing'),
            ('POST', '/workflows/from_spec',     b'7',                              422, 'must be an object'),
            ('PUT',  '/jobs/1/manage_status_change/completed/1', None,              422, 'is an end'),
            ('PUT',  '/jobs/1/manage_status_change/gone/1', None,                   422, 'unknown status'),
        )
        for method, path, body, status, text in table:
            with self.subTest(path=path, body=body if body != deep else 'deep'):
                found, value = self.ask(method, path, body)
                self.assertEqual(status, found, value)
                self.assertIn(text, value['error']['message'])
        self.assertEqual({'a': 'ready'}, self.statuses(workflow_id))

    def plan(self, **changes: Any) -> Dict[str, Any]:
        row = ['a', 'true', None, None, 0, None, None, True, False, [], [], [], []]
        body = {'workflow': {'name': 'w'}, 'files': [], 'user_data': [], 'resource_requirements': [], 'slurm_schedulers': [],
                'failure_handlers': [], 'kinds': [[None, 0, None, None]], 'dependency_sets': [], 'jobs': [row], 'actions': []}
        job = changes.pop('job', {})
        for place, value in job.items():
            row[place] = value
        return dict(body, **changes)

    def test_a_plan_of_another_program_is_checked_to_the_last_field(self):
        other = self.create('x:')
        table = (
            (self.plan(job={0: 5}), 'jobs.name must be str'), (self.plan(job={0: 'a\x1b'}), 'control character'), (self.plan(job={0: 'x' * 2000}), '2000 characters'),
            (self.plan(job={1: 'a\0'}), 'cannot be stored'), (self.plan(job={3: {'A': None}}), 'must be text'), (self.plan(job={3: []}), 'jobs.env must be dict'),
            (self.plan(job={4: -1}), 'between 0 and'), (self.plan(job={4: 7}), 'not a plan'), (self.plan(job={4: True}), 'jobs.kind must be int'),
            (self.plan(job={5: 3}), 'not a plan'), (self.plan(job={9: [[1]]}), 'an integer'), (self.plan(job={9: [3]}), 'not a plan'),
            (self.plan(jobs=[[1]]), 'lists of 13'), (self.plan(jobs=7), 'jobs must be a list'), (self.plan(dependency_sets=[[-1]]), 'no number -1'),
            (self.plan(dependency_sets=[['x']]), 'must be an integer'), (self.plan(dependency_sets=[[5]]), 'no number 5'), (self.plan(kinds=[[None, 'x', None, None]]), 'a number'),
            (self.plan(kinds=[[None, 1e400, None, None]]), 'Infinity'), (self.plan(kinds=[[None, 0, None, ['a,b']]]), 'hold a comma'),
            (self.plan(kinds=[[None, 0, None, 'abc']]), 'a list'), (self.plan(files=[{'name': [], 'path': 'p'}]), 'files[0].name must be text'),
            (self.plan(files=[{'name': 'f'}]), 'not a plan'), (self.plan(workflow={'name': 'w', 'execution_config': 'x'}), 'must be an object'),
            (self.plan(workflow={'name': 'w', 'compute_node_wait_for_new_jobs_seconds': 'soon'}), 'must be an integer'),
            (self.plan(failure_handlers=[{'name': 'h', 'rules': 'garbage'}]), 'is not JSON'), (self.plan(actions=[{'trigger_type': 'x', 'action_type': 'y', 'action_config': {}}]), 'unknown trigger_type'),
        )
        for body, text in table:
            with self.subTest(text):
                status, value = self.ask('POST', '/workflows/from_spec', body)
                self.assertIn(status, (400, 422), value)
                self.assertIn(text, json.dumps(value))
        self.assertEqual([other], self.store.ids('SELECT id FROM workflow'))

    def test_jobs_that_wait_for_themselves_are_refused_before_they_start(self):
        status, value = self.ask('POST', '/workflows/from_spec', self.plan(job={5: 0}, dependency_sets=[[0]]))
        self.assertEqual((422, True), (status, 'a -> a' in json.dumps(value)), value)

    def test_what_no_model_knows_is_not_stored(self):
        workflow_id = self.create('a:')
        job = self.call('create_job', {'workflow_id': workflow_id, 'name': 'n', 'command': 'c', 'id': torc.MAX_INTEGER, 'input_hash': 'x', 'kind_id': 99})
        self.assertLess(job['id'], 100)
        self.assertEqual(None, self.store.value('SELECT input_hash FROM job WHERE id = ?', (job['id'],)))
        self.call('create_job', {'workflow_id': workflow_id, 'name': 'm', 'command': 'c'})

    def test_a_runners_words_are_checked_like_all_others(self):
        workflow_id = self.create('a:')
        node_id = self.node(workflow_id)
        job = self.claim(workflow_id, node_id)['a']
        end = self.end(job)
        table = (
            {'started': [[1]]}, {'started': [[job['id'], 1, 'garbage']]}, {'started': [1]}, {'returned': [5]}, {'held': [None]}, {'held': [[{}, 1]]},
            {'want': {'strategy': 'magic', 'limit': 1}}, {'want': {'strategy': 'resources', 'limit': 1}}, {'completions': [dict(end, exec_time_minutes=1e308)]},
            {'want': {'strategy': 'resources', 'limit': 1, 'num_cpus': 1, 'num_gpus': 0, 'memory_gb': 1e308}},
            {'want': {'strategy': 'resources', 'limit': 1, 'num_cpus': 1, 'num_gpus': 0, 'memory_gb': 1.0, 'num_nodes': 3 * 10 ** 8}},
            {'completions': [dict(end, completion_time='soon')]}, {'completions': [dict(end, file_times={'x': 1.0})]}, {'completions': [None]},
        )
        for words in table:
            with self.subTest(**words):
                status, value = self.ask('POST', f'/workflows/{workflow_id}/runner_sync', dict({'compute_node_id': node_id, 'run_id': 1}, **words))
                self.assertTrue(status == 422 or value.get('errors'), value)
        self.assertEqual({'a': 'pending'}, self.statuses(workflow_id))

    def test_labels_filter_as_claims_do(self):
        workflow_id = self.call('create_workflow', {'name': 'w', 'user': 'u'})['id']
        for name, labels in (('plain', []), ('a', ['a']), ('ab', ['b', 'a'])):
            self.call('create_job', {'workflow_id': workflow_id, 'name': name, 'command': 'c', 'labels': labels})
        for query, names in (('labels=', ['plain']), ('labels=a', ['a']), ('labels=a,b,c', ['a', 'ab']), ('labels=b', [])):
            with self.subTest(query):
                self.assertEqual(names, self.names(workflow_id, query))

    def test_a_list_of_ids_in_another_order_is_no_change(self):
        workflow_id = self.create('a:\nb:\nc: a b')
        job = self.ask('GET', '/jobs', None, f'workflow_id={workflow_id}&name=c&include_relationships=true')[1]['items'][0]
        self.call('update_job', {'depends_on_job_ids': job['depends_on_job_ids'][::-1], 'priority': 2}, id=job['id'])
        self.assertEqual(2, self.call('get_job', id=job['id'])['priority'])

    def test_lists_are_paged_sorted_filtered_and_counted(self):
        workflow_id = self.create('\n'.join(f'{name}:' for name in ('pear', 'apple', 'fig', 'apricot')))
        self.assertEqual(['pear', 'apple'], self.names(workflow_id, 'limit=2'))
        self.assertEqual(['fig', 'apricot'], self.names(workflow_id, 'offset=2'))
        self.assertEqual(['apple', 'apricot', 'fig', 'pear'], self.names(workflow_id, 'sort_by=name'))
        self.assertEqual(['apricot', 'fig', 'apple', 'pear'], self.names(workflow_id, 'reverse_sort=true'))
        self.assertEqual(['apple', 'apricot'], self.names(workflow_id, 'name=AP'))
        self.assertEqual([], self.names(workflow_id, 'status=failed'))
        _, page = self.ask('GET', '/jobs', None, f'workflow_id={workflow_id}&limit=1&name=ap')
        self.assertEqual((1, 2, True, 100000), (page['count'], page['total_count'], page['has_more'], page['max_limit']))
        status, value = self.ask('GET', '/jobs', None, f'workflow_id={workflow_id}&sort_by=command;drop')
        self.assertEqual((422, True), (status, 'no field to sort by' in value['error']['message']))

    def names(self, workflow_id: int, query: str) -> List[str]:
        status, value = self.ask('GET', '/jobs', None, f'workflow_id={workflow_id}&{query}')
        self.assertEqual(200, status, value)
        return [job['name'] for job in value['items']]

    def test_a_refused_request_leaves_the_others_of_its_turn_alone(self):
        with self.store.transaction():
            first = torc.answer_request(self.store, 'POST', torc.API_PREFIX + '/workflows', '', b'{"name": "w", "user": "u"}')
            torc.answer_request(self.store, 'POST', torc.API_PREFIX + '/workflows/from_spec', '', b'{"workflow": {"name": "x", "user": "u"}}')
        self.assertEqual(200, first[0])
        self.assertEqual(['w'], self.store.ids('SELECT name FROM workflow'))

    def test_every_operation_of_the_official_interface_has_its_route(self):
        ours = {route.name: route for route in torc.ROUTES}
        absent = set()
        for row in read_shared('torc/api_operations.json'):
            if row['op'] not in ours:
                absent.add(row['op'])
                continue
            with self.subTest(row['op']):
                route = ours[row['op']]
                self.assertEqual((row['method'], re.sub(r'{\w+}', '{}', row['path'])), (route.method, re.sub(r'{\w+}', '{}', route.path)))
                query = set(torc.query_fields(route))
                self.assertEqual(set(), set(row['query']) - query)
                self.assertEqual(MORE_QUERY.get(row['op'], set()), query - set(row['query']))
                self.assertEqual(row['body'] is None, route.body == '')
        self.assertEqual(set(), absent)

    def test_every_route_names_an_operation_of_the_official_interface_or_an_addition(self):
        official = {row['op']: (row['method'], re.sub(r'{\w+}', '{}', row['path'])) for row in read_shared('torc/api_operations.json')}
        additions = {'create_workflow_from_spec', 'apply_spec', 'runner_sync', 'check_changes',
                     'set_file_times', 'stream_workflow_events', 'stream_api_events',
                     'get_api_stats', 'get_openapi', 'explain_job', 'explain_workflow',
                     'list_workflow_statuses', 'get_database', 'snapshot_database',
                     'get_dependency_graph'}
        ours = {route.name: (route.method, re.sub(r'{\w+}', '{}', route.path)) for route in torc.ROUTES}
        self.assertEqual({name: official.get(name) for name in ours if name not in additions},
                         {name: place for name, place in ours.items() if name not in additions})

    def test_every_body_model_is_known_and_every_verb_has_a_docstring(self):
        for route in torc.ROUTES:
            with self.subTest(route.name):
                self.assertTrue(route.verb.__doc__)
                self.assertIn(route.body.lstrip('?') or '-', [*torc.MODELS, '-', '[str]'])

    def test_objects_are_created_read_changed_listed_and_deleted_alike(self):
        workflow_id = self.call('create_workflow', {'name': 'w', 'user': 'u'})['id']
        table = (
            ('file', 'files', {'name': 'f', 'path': 'p'}, {'path': 'q'}),
            ('user_data', 'user_data', {'name': 'd', 'data': {'a': [1]}}, {'data': 2}),
            ('resource_requirements', 'resource_requirements', {'name': 'r', 'memory': '2g'}, {'num_cpus': 3}),
            ('slurm_scheduler', 'slurm_schedulers', {'name': 's', 'account': 'a', 'nodes': 1, 'walltime': '01:00:00'}, {'nodes': 2}),
            ('local_scheduler', 'local_schedulers', {'memory': '1g', 'num_cpus': 2}, {'num_cpus': 4}),
            ('compute_node', 'compute_nodes', {'hostname': 'h', 'pid': 1, 'start_time': '2026-01-01T00:00:00Z', 'num_cpus': 1, 'memory_gb': 1.0, 'num_gpus': 0,
                                               'num_nodes': 1, 'compute_node_type': 'local'}, {'pid': 2}),
            ('scheduled_compute_node', 'scheduled_compute_nodes', {'scheduler_id': 1, 'scheduler_config_id': 1, 'scheduler_type': 'slurm',
                                                                   'status': 'pending'}, {'status': 'active'}),
        )
        for noun, plural, body, change in table:
            with self.subTest(noun):
                made = self.call(f'create_{noun}', dict(body, workflow_id=workflow_id))
                self.assertEqual(made, self.call(f'get_{noun}', id=made['id']))
                changed = self.call(f'update_{noun}', change, id=made['id'])
                self.assertEqual({**made, **change}, changed)
                self.assertIn(changed, self.call(f'list_{plural}', workflow_id=workflow_id)['items'])
                remove = 'delete_resource_requirement' if noun == 'resource_requirements' else f'delete_{noun}'
                self.assertEqual(changed, self.call(remove, id=made['id']))
                self.assertRefused('there is no', f'get_{noun}', id=made['id'])

    def test_a_failure_handlers_name_is_unique(self):
        workflow_id = self.call('create_workflow', {'name': 'w', 'user': 'u'})['id']
        body = {'workflow_id': workflow_id, 'name': 'h', 'rules': '[]'}
        self.call('create_failure_handler', body)
        self.assertRefused('there is such a failure handler already', 'create_failure_handler', body)

    def test_requirements_that_jobs_need_stay(self):
        workflow_id = self.create('a:')
        needs = self.call('list_resource_requirements', workflow_id=workflow_id)['items'][0]
        self.assertRefused('jobs still need these', 'delete_resource_requirement', id=needs['id'])
        self.call('delete_jobs', workflow_id=workflow_id)
        self.assertEqual({'count': 1}, self.call('delete_resource_requirements', workflow_id=workflow_id))

    def test_results_and_events_can_be_listed(self):
        workflow_id = self.create('a:\nb:')
        self.drive(workflow_id, {'b': 'failed'})
        rows = self.call('list_results', workflow_id=workflow_id, return_code=1)['items']
        self.assertEqual(['b'], [row['job_name'] for row in rows])
        self.call('create_event', {'workflow_id': workflow_id, 'data': {'category': 'mine'}})
        self.assertEqual(1, self.call('list_events', workflow_id=workflow_id, category='mine')['total_count'])
        self.assertEqual(0, self.call('list_events', workflow_id=workflow_id, category='min')['total_count'])


class FurtherOperationsTest(ServiceTest):
    """Operations beside the usual ones, by their paths; each answer fits its model."""

    def good(self, method: str, path: str, body: Any = None, query: str = '', status: int = 200) -> Any:
        """The value of an answer that has this status."""
        found, value = self.ask(method, path, body, query)
        self.assertEqual(status, found, value)
        route, _ = torc.find_route(method, torc.API_PREFIX + path)
        if found == 200:
            torc.check_value('answer', torc.answer_type(route), value)
        return value

    def bad(self, status: int, text: str, method: str, path: str, body: Any = None, query: str = '') -> None:
        """An answer that has this status, and says this."""
        found, value = self.ask(method, path, body, query)
        self.assertEqual(status, found, value)
        self.assertIn(text, value['error']['message'])

    def test_a_task_is_answered_with_202(self):
        workflow_id = self.create('a:')
        task = self.good('POST', f'/workflows/{workflow_id}/initialize_jobs', None, 'async=true', 202)
        torc.check_value('answer', '@TaskModel', task)
        self.assertEqual({'task': task}, self.good('GET', f'/workflows/{workflow_id}/active_task'))
        self.assertEqual(task, self.good('GET', '/tasks/1'))
        self.bad(409, 'task 1 (initialize_jobs, with different parameters) of workflow 1 is not done yet', 'POST', f'/workflows/{workflow_id}/initialize_jobs',
                 query='async=true&only_uninitialized=true')

    def test_spawned_jobs_come_by_http(self):
        workflow_id = self.create('main:')
        node_id = self.node(workflow_id)
        job = self.claim(workflow_id, node_id)['main']
        self.good('PUT', f"/jobs/{job['id']}/start_job/1/{node_id}")
        answer = self.good('POST', f"/jobs/{job['id']}/spawn_jobs", {'jobs': [{'name': 'a', 'command': 'x'}], 'lineage': None, 'state': None})
        self.assertEqual(1, answer['iteration'])
        self.bad(422, 'there is no field extra', 'POST', f"/jobs/{job['id']}/spawn_jobs", {'jobs': [], 'extra': 1})
        self.bad(422, 'control character', 'POST', f"/jobs/{job['id']}/spawn_jobs", {'jobs': [], 'lineage': 'a\n'})

    def test_remote_workers_are_words_in_the_path(self):
        workflow_id = self.create('a:')
        path = f'/workflows/{workflow_id}/remote_workers'
        names = ['u@host-b:22', '17', 'host/a', 'ünï', '[::1]:22']
        made = self.good('POST', path, [*names, '17'])
        self.assertEqual(sorted(names), [row['worker'] for row in made])
        self.good('POST', path, ['17', 'z'])
        self.assertEqual(sorted([*names, 'z']), [row['worker'] for row in self.good('GET', path)])
        for name in (*names, 'z'):
            self.assertEqual({'worker': name, 'workflow_id': workflow_id}, self.good('DELETE', path + '/' + urllib.parse.quote(name, safe='')))
        self.assertEqual([], self.good('GET', path))
        self.bad(404, "no remote worker 'z'", 'DELETE', path + '/z')
        self.bad(422, 'cannot be stored', 'DELETE', path + '/%00')
        self.bad(404, 'no workflow 99', 'GET', '/workflows/99/remote_workers')
        for body, text in ((None, 'the body must be a list'), ({}, 'the body must be a list'), ([1], 'the body[0] must be text'), ([''], 'is not a worker'),
                           (['-oProxyCommand=x'], 'is not a worker'), (['u@-x'], 'is not a worker'), (['a b'], 'is not a worker'), (['a\0'], 'cannot be stored')):
            with self.subTest(body=body):
                self.bad(422, text, 'POST', path, body)

    def test_slurm_statistics_are_stored_once_for_each_attempt(self):
        workflow_id, other = self.create('a:\nb:'), self.create('c:')
        jobs = self.call('list_job_ids', id=workflow_id)['job_ids']
        body = {'workflow_id': workflow_id, 'job_id': jobs[0], 'run_id': 1, 'attempt_id': 1, 'slurm_job_id': '77', 'max_rss_bytes': 5, 'ave_cpu_seconds': 1.5}
        made = self.good('POST', '/slurm_stats', body)
        self.good('POST', '/slurm_stats', dict(body, attempt_id=2))
        self.bad(409, 'there is such a slurm stats already', 'POST', '/slurm_stats', body)
        self.bad(422, 'has no job', 'POST', '/slurm_stats', dict(body, workflow_id=other))
        self.assertEqual([made], self.good('GET', '/slurm_stats', None, f'workflow_id={workflow_id}&attempt_id=1')['items'])
        self.assertEqual(0, self.good('GET', '/slurm_stats', None, f'workflow_id={workflow_id}&job_id={jobs[1]}')['total_count'])
        self.assertEqual(0, self.good('GET', '/slurm_stats', None, f'workflow_id={other}')['total_count'])

    def test_an_event_may_say_nothing(self):
        workflow_id = self.call('create_workflow', {'name': 'w', 'user': 'u'})['id']
        event = self.good('POST', '/events', {'workflow_id': workflow_id, 'data': None})
        self.assertEqual((None, int(self.clock * 1000)), (event['data'], event['timestamp']))
        path = f"/events/{event['id']}"
        self.assertEqual(event, self.good('GET', path))
        self.assertEqual(5, self.good('PUT', path, {'data': 5})['data'])
        self.assertEqual(dict(event), self.good('PUT', path, dict(event, data=None)))
        self.assertEqual([event], self.good('GET', '/events', query=f'workflow_id={workflow_id}')['items'])
        self.bad(422, 'data is missing', 'POST', '/events', {'workflow_id': workflow_id})

    def test_a_file_that_is_put_without_its_time_has_none(self):
        workflow_id = self.call('create_workflow', {'name': 'w', 'user': 'u'})['id']
        path = f"/files/{self.call('create_file', {'workflow_id': workflow_id, 'name': 'f', 'path': 'p', 'st_mtime': 5.0})['id']}"
        self.assertEqual(6.0, self.good('PUT', path, {'workflow_id': workflow_id, 'name': 'f', 'path': 'p', 'st_mtime': 6.0})['st_mtime'])
        self.assertNotIn('st_mtime', self.good('PUT', path, {'workflow_id': workflow_id, 'name': 'g', 'path': 'p'}))
        self.assertEqual('g', self.good('GET', path)['name'])

    def test_an_empty_environment_is_none(self):
        made = self.good('POST', '/workflows', {'name': 'w', 'user': 'u', 'env': {}})
        self.assertIsNone(made.get('env'))
        self.assertIsNone(self.good('PUT', f"/workflows/{made['id']}", {'env': {}}).get('env'))

    def test_the_version_names_the_commit_of_its_release(self):
        self.assertEqual(f'v{torc.__version__}', self.good('GET', '/version')['git_hash'])
        self.store.enforces_access = True       # strangers need not know which bugs there are
        self.assertNotIn('git_hash', self.good('GET', '/version'))

    def test_what_is_missing_is_so_for_whoever_may_see_everything(self):
        with self.store.transaction():
            torc.set_administrators(self.store, ['root'])
        self.store.enforces_access = True
        for caller, status in (('root', 404), ('ann', 403)):
            with self.store.transaction():
                answer = torc.answer_request(self.store, 'GET', torc.API_PREFIX + '/files/999', '', b'', caller, False)
            self.assertEqual(status, answer[0], answer)

    def test_deleting_all_user_data_is_answered_as_by_torc(self):
        workflow_id = self.call('create_workflow', {'name': 'w', 'user': 'u'})['id']
        self.call('create_user_data', {'workflow_id': workflow_id, 'name': 'd'})
        answer = self.good('DELETE', '/user_data', query=f'workflow_id={workflow_id}')
        self.assertEqual((1, 'Deleted 1 user data records of workflow 1'), (answer['deleted_count'], answer['message']))

    def test_words_that_clients_look_for_are_said(self):
        workflow_id = self.call('create_workflow', {'name': 'w', 'user': 'u', 'env': {'A': '1'}})['id']
        job = self.call('create_job', {'workflow_id': workflow_id, 'name': 'j', 'command': 'x'})
        for path, body in ((f"/jobs/{job['id']}", dict(job, status='ready')), (f"/jobs/{job['id']}", dict(job, env={'A': '2'})),
                           (f'/workflows/{workflow_id}', {'env': {'B': '2'}})):
            self.bad(422, 'immutable', 'PUT', path, body)
        self.store.reload_users = lambda: 3
        self.assertEqual({'message': 'Auth credentials reloaded successfully', 'user_count': 3}, self.good('POST', '/admin/reload-auth'))
        self.bad(422, "Unknown access group 'none'", 'POST', '/workflows', {'name': 'x', 'user': 'u', 'access_groups': ['none']})

    def test_ro_crate_entities_are_unique_by_name_and_file(self):
        workflow_id, other = self.create('a:'), self.create('b:')
        file_id, foreign = (self.call('create_file', {'workflow_id': number, 'name': 'f', 'path': 'p'})['id'] for number in (workflow_id, other))
        body = {'workflow_id': workflow_id, 'entity_id': 'p', 'entity_type': 'File', 'metadata': {'a': [1]}, 'file_id': file_id}
        made = self.good('POST', '/ro_crate_entities', body)
        path = f"/ro_crate_entities/{made['id']}"
        self.assertEqual(made, self.good('GET', path))
        self.bad(422, 'RO-Crate entity already exists for this workflow/entity_id link', 'POST', '/ro_crate_entities', dict(body, file_id=None))
        self.bad(422, 'RO-Crate entity already exists for this workflow/file link', 'POST', '/ro_crate_entities', dict(body, entity_id='q'))
        self.bad(422, 'has no file', 'POST', '/ro_crate_entities', dict(body, entity_id='q', file_id=foreign))
        self.bad(422, 'metadata must be an object', 'POST', '/ro_crate_entities', dict(body, metadata='{}'))
        second = self.good('POST', '/ro_crate_entities', dict(body, entity_id='q', file_id=None))
        self.bad(422, 'workflow/entity_id link', 'PUT', f"/ro_crate_entities/{second['id']}", {'entity_id': 'p'})
        self.bad(422, 'has no file', 'PUT', f"/ro_crate_entities/{second['id']}", {'file_id': foreign})
        self.assertEqual({'b': 2}, self.good('PUT', path, {'metadata': {'b': 2}})['metadata'])
        everything = f'/workflows/{workflow_id}/ro_crate_entities'
        for query, names in (('', ['p', 'q']), (f'file_id={file_id}', ['p']), ('entity_id=q', ['q']), ('sort_by=entity_id&reverse_sort=true', ['q', 'p'])):
            self.assertEqual(names, [item['entity_id'] for item in self.good('GET', everything, None, query)['items']])
        self.assertEqual({'message': f"Deleted RO-Crate entity {made['id']}"}, self.good('DELETE', path))
        self.bad(404, 'there is no ro crate entity', 'DELETE', path)
        self.assertEqual(1, self.good('DELETE', everything)['deleted_count'])

    def test_actions_are_changed_and_deleted(self):
        workflow_id, other = self.create('a:'), self.create('b:')
        path = f'/workflows/{workflow_id}/actions'
        config = {'scheduler_id': 1, 'scheduler_type': 'slurm', 'num_allocations': 1}
        action = self.good('POST', path, {'workflow_id': workflow_id, 'trigger_type': 'on_workflow_start', 'action_type': 'schedule_nodes', 'action_config': config})
        own = f"{path}/{action['id']}"
        changed = self.good('PUT', own, {'num_allocations': 3, 'start_one_worker_per_node': True})
        self.assertEqual(dict(config, num_allocations=3, start_one_worker_per_node=True), changed['action_config'])
        for body, text in (({}, 'must be an object of the keys'), ([1], 'must be an object of the keys'), ({'num_allocations': 'x'}, 'must be of type int'),
                           ({'num_allocations': True}, 'must be of type int'), ({'nodes': 1}, "has no key 'nodes'"), (None, 'the body must be an object')):
            with self.subTest(body=body):
                self.bad(422, text, 'PUT', own, body)
        self.bad(404, 'has no action', 'PUT', f"/workflows/{other}/actions/{action['id']}", {'num_allocations': 1})
        self.bad(404, 'has no action', 'DELETE', f"/workflows/{other}/actions/{action['id']}")
        self.assertEqual([changed], self.good('GET', path))
        self.good('DELETE', own)
        self.bad(404, 'has no action', 'DELETE', own)
        commands = self.good('POST', path, {'workflow_id': workflow_id, 'trigger_type': 'on_worker_start', 'action_type': 'run_commands', 'action_config': {'commands': ['x']}})
        self.assertEqual({'commands': ['y']}, self.good('PUT', f"{path}/{commands['id']}", {'commands': ['y']})['action_config'])
        self.bad(422, 'takes nothing else', 'PUT', f"{path}/{commands['id']}", {'num_allocations': 1})

    def test_everything_dies_with_its_workflow(self):
        workflow_id = self.call('create_workflow', {'name': 'w', 'user': 'u', 'enable_ro_crate': True})['id']
        self.call('create_job', {'workflow_id': workflow_id, 'name': 'main', 'command': 'x'})
        self.call('initialize_jobs', id=workflow_id)
        job = self.claim(workflow_id, self.node(workflow_id))['main']
        self.call('spawn_jobs', {'jobs': [{'name': 'a', 'command': 'x'}]}, id=job['id'])
        self.call('create_slurm_stats', {'workflow_id': workflow_id, 'job_id': job['id'], 'run_id': 1, 'attempt_id': 1})
        self.call('create_remote_workers', ['host'], id=workflow_id)
        self.call('initialize_jobs', id=workflow_id, **{'async': True})
        tables = [table for table in self.store.ids("SELECT name FROM sqlite_master WHERE type = 'table'")
                  if any(column.name == 'workflow_id' for column in self.store.columns(table))]
        filled = {table for table in tables if self.store.one(f'SELECT 1 FROM {table}')}
        self.assertLessEqual({'spawn', 'slurm_stats', 'remote_worker', 'ro_crate_entity', 'task', 'user_data', 'dep_set'}, filled)
        self.call('delete_workflow', id=workflow_id)
        self.assertEqual([], [table for table in [*tables, 'dep_member'] if self.store.one(f'SELECT 1 FROM {table}')])

    def test_what_ready_jobs_need_is_added_up(self):
        workflow_id = self.call('create_workflow', {'name': 'w', 'user': 'u'})['id']
        path = f'/workflows/{workflow_id}/ready_job_requirements'
        self.assertEqual({'num_jobs': 0, 'num_cpus': 0, 'num_gpus': 0, 'memory_gb': 0.0, 'max_num_nodes': 0, 'max_runtime': 'PT0S'}, self.good('GET', path))
        scheduler = self.call('create_slurm_scheduler', {'workflow_id': workflow_id, 'account': 'a', 'nodes': 1, 'walltime': '01:00:00'})['id']
        for name, needs, more in (('small', {'num_cpus': 2, 'memory': '512m', 'runtime': 'PT10M'}, {}),
                                  ('big', {'num_cpus': 8, 'num_gpus': 1, 'num_nodes': 3, 'memory': '4g', 'runtime': 'P1DT1H'}, {'scheduler_id': scheduler})):
            number = self.call('create_resource_requirements', dict(needs, workflow_id=workflow_id, name=name))['id']
            for place in range(2):
                self.call('create_job', dict(more, workflow_id=workflow_id, name=f'{name}{place}', command='x', resource_requirements_id=number))
        self.call('initialize_jobs', id=workflow_id)
        self.assertEqual({'num_jobs': 4, 'num_cpus': 20, 'num_gpus': 2, 'memory_gb': 9.0, 'max_num_nodes': 3, 'max_runtime': 'P1DT1H'}, self.good('GET', path))
        self.assertEqual({'num_jobs': 2, 'num_cpus': 16, 'num_gpus': 2, 'memory_gb': 8.0, 'max_num_nodes': 3, 'max_runtime': 'P1DT1H'},
                         self.good('GET', path, None, f'scheduler_config_id={scheduler}'))

    def test_jobs_are_told_with_their_slurm_jobs(self):
        workflow_id = self.create('a:\nb:\nc:')
        scheduled = self.call('create_scheduled_compute_node', {'workflow_id': workflow_id, 'scheduler_id': 501, 'scheduler_config_id': 1,
                                                                'scheduler_type': 'slurm', 'status': 'active'})['id']
        nodes = [self.node(workflow_id, scheduler=scheduler) for scheduler in ({'scheduler_id': scheduled}, {'slurm_job_id': 502}, ['odd'], {'scheduler_id': {}})]
        ids = {}
        for node_id in nodes[:3]:
            (job,) = self.claim(workflow_id, node_id, 1).values()
            ids[job['name']] = job['id']
            self.sync(workflow_id, node_id, started=[[job['id'], 1, '2026-01-01T00:00:01Z']])
            if job['name'] == 'a':
                self.sync(workflow_id, node_id, completions=[self.end(job)])
        self.call('create_slurm_stats', {'workflow_id': workflow_id, 'job_id': ids['a'], 'run_id': 1, 'attempt_id': 1, 'slurm_job_id': '501'})
        self.call('create_slurm_stats', {'workflow_id': workflow_id, 'job_id': ids['c'], 'run_id': 1, 'attempt_id': 1, 'slurm_job_id': '503'})
        path = f'/workflows/{workflow_id}/slurm_job_correlations'
        found = self.good('GET', path)
        self.assertEqual([('a', '501'), ('b', '502'), ('c', '503')], [(item['job_name'], item['slurm_job_id']) for item in found['items']])
        page = self.good('GET', path, None, 'offset=1&limit=1')
        self.assertEqual((['b'], 3, True), ([item['job_name'] for item in page['items']], page['total_count'], page['has_more']))
        running = self.good('GET', f'/workflows/{workflow_id}/running_jobs')['items']
        self.assertEqual({'b': '502', 'c': None}, {job['job_name']: job.get('scheduler_job_id') for job in running})
# -------- every route, with live data --------

GOOD_BODIES = {    # model of a body -> one with as many fields as can be; '$noun' is the id of such a thing in the workflow
    'AdminSqlRequest': {'sql': 'SELECT id, name FROM workflow', 'write': False, 'dry_run': False, 'allow_full_table': False, 'limit': 2},
    'ArchiveWorkflowRequest': {'is_archived': True},
    'BatchCompleteJobsRequest': {'completions': [{'job_id': '$running', 'run_id': 1, 'status': 'failed', 'result': '$result_of_running'}]},
    'CheckChangesRequest': {'files': {'$file': 1.5}, 'dry_run': False},
    'ClaimActionRequest': {'compute_node_id': '$compute_node'},
    'ComputeNodeModel': {
        'workflow_id': '$workflow', 'hostname': 'h', 'pid': 7, 'start_time': '2026-01-01T00:00:00Z', 'end_time': '2026-01-02T00:00:00Z', 'duration_seconds': 1.5,
        'is_active': True, 'num_cpus': 4, 'memory_gb': 8, 'num_gpus': 1, 'num_nodes': 1, 'time_limit': 'PT1H', 'scheduler_config_id': '$slurm_scheduler',
        'compute_node_type': 'slurm', 'scheduler': {'scheduler_id': '$scheduled_compute_node'}, 'labels': ['b', 'a'], 'sample_count': 3, 'peak_cpu_percent': 0.0,
        'avg_cpu_percent': 1.5, 'peak_memory_bytes': 10, 'avg_memory_bytes': 5, 'identity': 'x', 'lease_s': 60},
    'ComputeNodesResources': {'num_cpus': 4, 'memory_gb': 8.0, 'num_gpus': 0, 'num_nodes': 1, 'time_limit': 'PT1H', 'scheduler_config_id': '$slurm_scheduler',
                              'id': '$compute_node', 'labels': []},
    'EventModel': {'workflow_id': '$workflow', 'data': {'category': 'mine', 'n': [1, None]}},
    'FailureHandlerModel': {'workflow_id': '$workflow', 'name': 'new', 'rules': '[{"exit_codes": [1]}]'},
    'FileModel': {'workflow_id': '$workflow', 'name': 'new', 'path': 'new.csv', 'st_mtime': 2},
    'FilesModel': {'files': [{'workflow_id': '$workflow', 'name': 'new', 'path': 'new.csv'}]},
    'JobModel': {
        'workflow_id': '$workflow', 'name': 'new', 'command': 'true', 'invocation_script': 'bash', 'env': {'A': '1'}, 'priority': 2, 'labels': ['b', 'a'],
        'resource_requirements_id': '$resource_requirements', 'scheduler_id': '$slurm_scheduler', 'failure_handler_id': '$failure_handler',
        'depends_on_job_ids': ['$done'], 'input_file_ids': ['$file'], 'output_file_ids': ['$made_file'], 'input_user_data_ids': ['$user_data'],
        'output_user_data_ids': ['$made_data'], 'cancel_on_blocking_job_failure': False, 'supports_termination': True},
    'JobsModel': {'jobs': [{'workflow_id': '$workflow', 'name': 'new', 'command': 'true', 'depends_on_job_ids': ['$done']}]},
    'LocalSchedulerModel': {'workflow_id': '$workflow', 'name': 'new', 'memory': '1g', 'num_cpus': 2},
    'PlanModel': {
        'workflow': {'name': 'planned'}, 'files': [{'name': 'f', 'path': 'f'}], 'user_data': [{'name': 'd', 'data': 1}], 'resource_requirements': [{'name': 'r'}],
        'slurm_schedulers': [{'name': 's', 'account': 'a'}], 'failure_handlers': [{'name': 'h', 'rules': '[]'}], 'kinds': [[0, 0, 0, ['a']]],
        'dependency_sets': [[0]], 'jobs': [['a', 'x', None, None, 0, None, 0, True, False, [0], [], [0], []], ['b', 'x', None, None, 0, 0, None, True, False, [], [], [], []]],
        'actions': [{'trigger_type': 'on_jobs_ready', 'action_type': 'run_commands', 'action_config': {'commands': ['x']}, 'job_indexes': [1], 'persistent': False}]},
    'ResourceRequirementsModel': {'workflow_id': '$workflow', 'name': 'new', 'num_cpus': 2, 'num_gpus': 1, 'num_nodes': 1, 'memory': '2g', 'runtime': 'PT2H'},
    'ResultModel': {
        'workflow_id': '$workflow', 'job_id': '$running', 'run_id': 1, 'attempt_id': 1, 'compute_node_id': '$compute_node', 'return_code': 0, 'exec_time_minutes': 0,
        'completion_time': '2026-01-01T00:00:00Z', 'status': 'completed', 'peak_memory_bytes': 5, 'avg_memory_bytes': 4, 'peak_cpu_percent': 99.5, 'avg_cpu_percent': 0.0},
    'RoCrateEntityModel': {'workflow_id': '$workflow', 'entity_id': 'new', 'entity_type': 'File', 'file_id': '$file', 'metadata': {'a': [1, None]}},
    'RunnerSyncRequest': {
        'compute_node_id': '$compute_node', 'run_id': 1, 'lease_s': 60.0, 'started': [['$pending', 1, '2026-01-01T00:00:00Z']], 'returned': [], 'held': [['$pending', 1]],
        'held_actions': [], 'contents': [['$made_file', 1.5, 6, 'c0de']], 'actions': ['on_workflow_start'], 'action_results': [{'action_id': '$action', 'success': True, 'message': 'm'}], 'explain': True,
        'completions': [{'job_id': '$running', 'attempt_id': 1, 'return_code': 1, 'status': 'failed', 'exec_time_minutes': 1.5, 'completion_time': '2026-01-01T00:00:00Z',
                         'peak_memory_bytes': 1, 'avg_memory_bytes': 1, 'peak_cpu_percent': 1.0, 'avg_cpu_percent': 1.0, 'retry': True, 'max_retries': 3,
                         'file_times': {'$made_file': 1.5}, 'reason': 'm'}],
        'want': {'strategy': 'resources', 'limit': 1, 'num_cpus': 4, 'memory_gb': 8.0, 'num_gpus': 0, 'num_nodes': 1, 'depth': 1, 'time_limit': 'PT1H',
                 'total': {'num_cpus': 4, 'memory_gb': 8.0, 'num_gpus': 0}, 'scheduler_config_id': '$slurm_scheduler', 'labels': [], 'strict': False}},
    'ScheduledComputeNodesModel': {'workflow_id': '$workflow', 'scheduler_id': 77, 'scheduler_config_id': '$slurm_scheduler', 'scheduler_type': 'slurm', 'status': 'active'},
    'SetFileTimesRequest': {'files': {'$file': 1.5, '$made_file': None}, 'contents': [['$file', 1.5, 6, 'c0de']]},
    'SlurmSchedulerModel': {'workflow_id': '$workflow', 'name': 'new', 'account': 'a', 'gres': 'gpu:1', 'mem': '1g', 'nodes': 2, 'ntasks_per_node': 1, 'partition': 'p',
                            'qos': 'q', 'tmp': '1g', 'walltime': '01:00:00', 'extra': '-x', 'serialize_allocations': True},
    'SlurmStatsModel': {'workflow_id': '$workflow', 'job_id': '$done', 'run_id': 1, 'attempt_id': 1, 'slurm_job_id': '55', 'max_rss_bytes': 1, 'max_vm_size_bytes': 2,
                        'max_disk_read_bytes': 3, 'max_disk_write_bytes': 4, 'ave_cpu_seconds': 0, 'node_list': 'n[1-2]'},
    'SpawnJobsRequest': {'lineage': 'line', 'state': {'n': 1}, 'jobs': [{
        'name': 'child', 'command': 'x', 'resource_requirements': 'new', 'labels': ['a'], 'priority': 2, 'cancel_on_blocking_job_failure': True, 'depends_on': ['done']}]},
    'UserDataListModel': {'user_data': [{'workflow_id': '$workflow', 'name': 'new', 'data': [1]}]},
    'UserDataModel': {'workflow_id': '$workflow', 'name': 'new', 'data': {'a': [1, 'x', None]}, 'is_ephemeral': True},
    'WorkflowActionModel': {'workflow_id': '$workflow', 'trigger_type': 'on_jobs_complete', 'action_type': 'run_commands', 'action_config': {'commands': ['x']},
                            'job_ids': ['$running'], 'persistent': True, 'is_recovery': False},
    'WorkflowModel': {
        'name': 'new', 'user': 'u', 'description': 'd', 'project': 'p', 'metadata': {'a': [1, {'b': None}]}, 'env': {'A': '1'}, 'submission_directory': '/tmp',
        'use_pending_failed': True, 'enable_ro_crate': False, 'dynamic_jobs': {'max_iterations': 3}, 'slurm_defaults': {'account': 'a'},
        'compute_node_wait_for_new_jobs_seconds': 5, 'compute_node_ignore_workflow_completion': True, 'compute_node_min_time_for_new_jobs_seconds': 5,
        'compute_node_wait_for_healthy_database_minutes': 5, 'compute_node_expiration_buffer_seconds': 5,
        'execution_config': {'mode': 'direct', 'stdio': {'mode': 'combined', 'delete_on_success': True}, 'timeout_exit_code': 152, 'job_stdio_overrides': {'j': {'mode': 'none'}}},
        'resource_monitor_config': {'enabled': True, 'granularity': 'summary', 'jobs': {'enabled': True}, 'compute_node': {'enabled': True}}},
}
GOOD_BODIES.update(AccessGroupModel={'name': 'new', 'description': 'd'}, UserGroupMembershipModel={'user_name': 'new', 'role': 'admin', 'group_id': '$group'})
WORKFLOW_CHANGE = {key: value for key, value in GOOD_BODIES['WorkflowModel'].items() if key not in ('env', 'submission_directory', 'dynamic_jobs')}
REQUESTS = {    # route -> parameters and body that differ from what its path, resource and model say
    'update_workflow': {'body': WORKFLOW_CHANGE}, 'apply_spec': {'workflow_id': '$idle_workflow'},
    'start_job': {'job_id': '$pending'}, 'complete_job': {'job_id': '$running', 'status': 'completed'}, 'retry_job': {'job_id': '$failed', 'max_retries': 3},
    'manage_status_change': {'job_id': '$done', 'status': 'uninitialized'}, 'delete_job': {'job_id': '$ready'},
    'update_job': {'job_id': '$ready', 'body': {'name': 'new', 'command': 'false', 'priority': 5, 'labels': ['x'], 'resource_requirements_id': '$resource_requirements'}},
    'delete_jobs': {'workflow_id': '$idle_workflow'}, 'initialize_jobs': {'workflow_id': '$idle_workflow'}, 'reset_workflow_status': {'force': True},
    'reset_job_status': {'failed_only': True}, 'delete_resource_requirements': {'workflow_id': '$empty_workflow'},
    'create_failure_handler': {'body': dict(GOOD_BODIES['FailureHandlerModel'], name='other')},
    'delete_resource_requirement': {'row_id': '$spare_requirements'},
    'spawn_jobs': {'job_id': '$running'}, 'get_active_task_for_workflow': {'workflow_id': '$tasked_workflow'}, 'update_workflow_action': {'body': {'commands': ['y']}},
    'create_remote_workers': {'body': ['u@host:22', 'other']}, 'delete_remote_worker': {'worker': 'host'},
    'create_result': {'body': dict(GOOD_BODIES['ResultModel'], attempt_id=9)},
    'add_workflow_to_group': {'group_id': '$other_group'}, 'remove_user_from_group': {'user_name': 'mia'}, 'list_user_groups': {'user_name': 'mia'},
    'check_workflow_access': {'user_name': 'mia'}, 'explain_job': {'job_id': '$failed'},
    'list_workflow_statuses': {'ids': ['$workflow', '$idle_workflow']},
    'update_result': {'body': {'return_code': 4, 'exec_time_minutes': 2.5}}, 'update_event': {'body': {'category': 'other'}},
    'list_jobs': {'include_relationships': True}, 'claim_jobs_based_on_resources': {'limit': 5}, 'get_pending_actions': {'trigger_type': ['on_workflow_start']},
}
BASE_TYPES = {'name': 'str', 'time': 'str', 'rules': 'str', 'minutes': 'float', 'gigabytes': 'float', 'nodes': 'int', 'ordinal': 'int'}   # stricter forms of types of the interface
PYTHON_TYPES = {'int': (int,), 'float': (int, float), 'bool': (bool,), 'str': (str,), 'object': (dict,)}


def misfits(place: str, kind: str, value: Any) -> List[str]:
    """Where an answer is not of a type of MODELS, strictly; absent optional fields may be null or left out."""
    kind = BASE_TYPES.get(kind, kind)
    if kind == 'any':
        return []
    if kind in PYTHON_TYPES:
        return [] if type(value) in PYTHON_TYPES[kind] else [f'{place}: {value!r} is no {kind}']
    if kind in torc.SCALAR_CHECKS:      # a row of a certain make
        torc.check_value(place, kind, value)
        return []
    if kind[0] in '[{':
        if type(value) is not {'[': list, '{': dict}[kind[0]]:
            return [f'{place}: {value!r} is no {kind}']
        items = enumerate(value) if kind[0] == '[' else value.items()
        return [text for key, item in items for text in misfits(f'{place}.{key}', kind[1:-1], item)]
    if kind[1:] in torc.ENUMS:
        return [] if value in torc.ENUMS[kind[1:]] else [f'{place}: {value!r} is no {kind}']
    if type(value) is not dict:
        return [f'{place}: {value!r} is no {kind}']
    fields = torc.model_fields(kind[1:])
    found = [f'{place}.{name} is in no model' for name in value if name not in fields]
    for name, field in fields.items():
        if value.get(name) is not None:
            found += misfits(f'{place}.{name}', field.type, value[name])
        elif field.is_required and not (field.type == 'any' and name in value):
            found.append(f'{place}.{name} is missing')
    return found


class LiveTest(ServiceTest):
    """A workflow at work, one that rests, and another with everything in it; and the request that each route takes well."""

    def setUp(self) -> None:
        super().setUp()
        self.ids = self.make('here')
        self.others = self.make('there')

    def make(self, name: str) -> Dict[str, Any]:
        """A workflow with a row of every kind and jobs of several statuses. Noun -> id."""
        ids = {'workflow': self.call('create_workflow', dict(GOOD_BODIES['WorkflowModel'], name=name, description=name))['id']}
        ids['idle_workflow'] = self.call('create_workflow', {'name': name + ' at rest', 'user': 'u'})['id']
        self.call('create_job', {'workflow_id': ids['idle_workflow'], 'name': 'j', 'command': 'x'})
        ids['empty_workflow'] = self.call('create_workflow', {'name': name + ' without jobs', 'user': 'u'})['id']

        def add(noun: str, op: str, body: Any = None, **more: Any) -> None:
            route = torc.OPERATIONS[op]
            body = dict(GOOD_BODIES[route.body] if body is None else body, **more)
            ids[noun] = self.call(op, self.resolve(body, ids), **({'id': ids['workflow']} if op == 'create_workflow_action' else {}))['id']
        for noun in ('resource_requirements', 'file', 'user_data', 'failure_handler', 'slurm_scheduler', 'local_scheduler', 'scheduled_compute_node'):
            add(noun, f'create_{noun}')
        add('spare_requirements', 'create_resource_requirements', name='spare')
        add('made_file', 'create_file', name='made')
        add('made_data', 'create_user_data', name='made')
        add('compute_node', 'create_compute_node')
        add('event', 'create_event')
        add('done', 'create_job', name='done', priority=9, depends_on_job_ids=[], labels=[])
        for job in ('failed', 'running', 'pending', 'ready'):
            add(job, 'create_job', {'workflow_id': '$workflow', 'name': job, 'command': 'x', 'resource_requirements_id': '$resource_requirements'})
        add('blocked', 'create_job', {'workflow_id': '$workflow', 'name': 'blocked', 'command': 'x', 'depends_on_job_ids': ['$running'],
                                      'input_file_ids': ['$made_file'], 'input_user_data_ids': ['$made_data']})
        ids['job'] = ids['done']
        add('slurm_stats', 'create_slurm_stats', job_id='$failed')
        add('ro_crate_entity', 'create_ro_crate_entity', entity_id='old', file_id='$made_file')
        self.call('create_remote_workers', ['host', 'u@host:22'], id=ids['workflow'])
        for noun in ('group', 'other_group'):
            ids[noun] = self.call('create_access_group', {'name': f'{noun} {name}', 'description': 'd'})['id']
            self.call('add_user_to_group', {'user_name': 'mia'}, group_id=ids[noun])
        self.call('add_workflow_to_group', id=ids['workflow'], group_id=ids['group'])
        self.store.reload_users = lambda: 1
        self.call('admin_sql', {'sql': 'UPDATE workflow SET name = name WHERE id = 1', 'write': True})
        ids['tasked_workflow'] = self.call('create_workflow', {'name': name + ' with a task', 'user': 'u'})['id']
        ids['task'] = self.call('initialize_jobs', id=ids['tasked_workflow'], **{'async': True})['id']
        self.call('initialize_jobs', id=ids['workflow'])
        add('action', 'create_workflow_action', trigger_type='on_workflow_start', job_ids=None, persistent=False)
        add('gated_action', 'create_workflow_action')
        self.sync(ids['workflow'], ids['compute_node'], want={'strategy': 'queue', 'limit': 4})
        self.store.run('UPDATE job SET status = 3, compute_node_id = ? WHERE id IN (?, ?, ?, ?)',
                       (ids['compute_node'], ids['done'], ids['failed'], ids['running'], ids['pending']))
        for job in ('done', 'failed', 'running'):
            self.call('start_job', job_id=ids[job], run_id=1, compute_node_id=ids['compute_node'])
        for job, status in (('done', 'completed'), ('failed', 'failed')):
            body = self.resolve(dict(GOOD_BODIES['ResultModel'], job_id=ids[job], status=status, return_code=int(status == 'failed')), ids)
            self.call('complete_job', body, job_id=ids[job], status=status, run_id=1)
        ids['result'] = self.call('list_results', workflow_id=ids['workflow'])['items'][0]['id']
        ids['result_of_running'] = self.resolve(dict(GOOD_BODIES['ResultModel'], status='failed', return_code=1), ids)
        return ids

    def resolve(self, value: Any, ids: Dict[str, Any]) -> Any:
        """A value of GOOD_BODIES with real ids."""
        if isinstance(value, dict):
            return {(str(ids[key[1:]]) if key.startswith('$') else key): self.resolve(item, ids) for key, item in value.items()}
        if isinstance(value, list):
            return [self.resolve(item, ids) for item in value]
        return ids[value[1:]] if isinstance(value, str) and value.startswith('$') else value

    def parameters(self, route: Any) -> Dict[str, Any]:
        """Good path and required query parameters of a route."""
        given = {key: value for key, value in REQUESTS.get(route.name, {}).items() if key != 'body'}
        for name in re.findall(r'{(\w+)}', route.path) + [name for name, field in torc.query_fields(route).items() if field.is_required]:
            known = '$' + {'row_id': route.resource, 'node_id': 'compute_node'}.get(name, name.replace('_id', ''))
            value = 1 if name == 'run_id' else known
            self.assertTrue(name in given or value == 1 or known[1:] in self.ids, f'{route.name}: say in REQUESTS what {name} is')
            given.setdefault(name, value)
        return self.resolve(given, self.ids)

    def body(self, route: Any) -> Any:
        """A good body for a route; None if it takes none."""
        model = route.body.lstrip('?')
        if not model:
            return None
        given = REQUESTS.get(route.name, {}).get('body', GOOD_BODIES.get(model))
        self.assertIsNotNone(given, f'{route.name}: give GOOD_BODIES a {model}, or REQUESTS a body')
        return self.resolve(given, self.ids)

    def request(self, route: Any, parameters: Dict[str, Any], body: Any) -> Tuple[int, Any]:
        """Ask for a route."""
        path = re.sub(r'{(\w+)}', lambda match: urllib.parse.quote(str(parameters[match.group(1)]), safe=''), route.path)
        query = {name: value for name, value in parameters.items() if '{' + name + '}' not in route.path}
        words = urllib.parse.urlencode({name: str(value).lower() if isinstance(value, bool) else value for name, value in query.items()}, doseq=True)
        return self.ask(route.method, path, body, words)

    def error_text(self, value: Any) -> str:
        """What an ErrorResponse says; fails if it is none."""
        self.assertEqual([], misfits('error', '@ErrorResponse', value))
        self.assertIsInstance(value['error']['message'], str)
        return json.dumps(value, ensure_ascii=False)


class AnswerTest(LiveTest):
    """Every answer is what the models say."""

    def test_each_route_answers_as_its_type_says(self):
        for route in torc.ROUTES:
            with self.subTest(route.name), self.undone():
                status, value = self.request(route, self.parameters(route), self.body(route))
                self.assertEqual(200, status, value)
                if torc.answer_type(route) == torc.STREAM:
                    self.assertIsInstance(value, torc.Subscription)
                    continue
                value = json.loads(torc.format_json(value))
                self.assertEqual([], misfits('answer', torc.answer_type(route), value))
                if isinstance(value, dict) and 'items' in value:
                    self.assertTrue(value['items'], 'nothing was checked: the live data lacks such a thing')


    # Keys of ours in answers of the official interface. Torc's clients pass over keys that they do not know, but in the models
    # of REFUSING; and one that they know as another name of a key, beside that key, makes them refuse the answer.
    ADDED = {'ResultModel.reason', 'WorkflowActionModel.failure', 'WorkflowModel.message',
             'WorkflowModel.spec_path'}
    ALIASES = {'ClaimActionResponse.claimed'}
    REFUSING = {'SpawnJobModel', 'SpawnJobsRequest', 'DynamicJobsConfig', 'StdioConfig', 'ExecutionConfig'}

    def extra_keys(self, kind: str, value: Any) -> Set[str]:
        """Model.key of what no model of the official interface has at its place in an answer."""
        if kind[:1] in '[{' and isinstance(value, (list, dict)):
            return {name for item in (value if isinstance(value, list) else value.values()) for name in self.extra_keys(kind[1:-1], item)}
        if not isinstance(value, dict) or not isinstance(self.models.get(kind, [''])[0], dict):
            return set()    # a plain value, an enum, or free JSON
        fields = {row['name']: official_type(row['type']) for row in self.models[kind]}
        inner = {name for key, item in value.items() for name in self.extra_keys(fields.get(key, 'any'), item)}
        return inner | {f'{kind}.{key}' for key in value if key not in fields}

    def test_answers_of_the_official_interface_have_no_keys_but_its_own_and_those_listed(self):
        self.models = read_shared('torc/api_models.json')
        self.store.run("UPDATE result SET reason = 'no luck'")
        self.store.run("UPDATE workflow_action SET failure = 'no luck'")
        self.store.run("UPDATE workflow SET spec_path = '/w.yaml'")
        checked, added = 0, set()
        for row in read_shared('torc/api_operations.json'):
            route = torc.OPERATIONS[row['op']]
            for given in ({}, {'async': True}) if row['op'] == 'initialize_jobs' else ({},):
                with self.subTest(row['op']), self.undone():
                    status, value = self.request(route, dict(self.parameters(route), **given), self.body(route))
                    kind = 'TaskModel' if given else official_type(row['returns'] or 'Any')
                    if not isinstance(value, torc.Subscription):
                        found = self.extra_keys(kind, json.loads(torc.format_json(value)))
                        self.assertEqual(set(), found - self.ADDED)
                        added |= found
                        checked += kind not in ('any', 'object')
        self.assertGreater(checked, 120)
        self.assertEqual((self.ADDED, set()), (added, self.ADDED & self.ALIASES))
        self.assertFalse({name.partition('.')[0] for name in self.ADDED} & self.REFUSING)

    def test_what_is_kept_for_us_is_never_told(self):
        told = {row['name'] for model in read_shared('torc/api_models.json').values() for row in model if isinstance(row, dict)}
        self.assertEqual(set(), told & torc.PRIVATE_COLUMNS)


# -------- what arrives is checked --------

DEEP = functools.reduce(lambda inner, _: [inner], range(torc.MAX_DEPTH + 2), [])    # type: Any
UNTEXT = [5, True, [], {}, 'a\0b', '\ud800']
WRONG = {   # type of MODELS -> values that it must refuse
    'int': ['x', '1', 1.5, True, [], {}, 2 ** 63, -2 ** 63 - 1, 10 ** 4000, float('nan'), float('inf')],
    'float': ['x', '1.5', True, [], {}, 2 ** 64, float('nan'), float('inf'), float('-inf')],
    'bool': [0, 1, 'true', [], {}],
    'str': UNTEXT, 'name': UNTEXT + ['a\nb', '\x1b[31m', 'x' * 1001], 'time': UNTEXT + ['', 'soon', '2026-13-01T00:00:00Z', '2026-01-01', '5'],
    'rules': UNTEXT + ['', 'x', '{}', '[1]', '[', 'NaN', '[{"a": "\\u0000"}]', '[{"a": 1e999}]'],
    'minutes': ['x', True, [], -1, -0.5, 1e300, float('nan')], 'gigabytes': ['x', True, [], -1, 1e300, float('nan')],
    'nodes': ['x', 1.5, True, -1, 10 ** 9, 2 ** 70],
    'ordinal': ['x', 1.5, True, -1, 10 ** 10, 2 ** 63 - 1, 2 ** 70],    # the next one must fit too
    'object': [5, 'x', [], True, {'a': DEEP}, {'a': '\ud800'}, {'a\0': 1}, {'a': 2 ** 64}, {'a': float('nan')}],
    'any': [DEEP, {'a': '\ud800'}, {'\0': 1}, [2 ** 64], 'a\0', float('nan')],
    'start': [[], [1], [1, 1, 'soon'], ['x', 1, '2026-01-01T00:00:00Z'], 5], 'attempt': [[], [1], ['x', 1], [1, None], 5, {}],
    'content': [[], [1], [1, 1, 1], ['x', 1, 1, 'x'], [1, 'x', 1, 'x'], [1, 1, 1.5, 'x'], [1, 1, 1, 5], [1, 1, 1, None], 5, {}],
    'planned_jobs': [5, {}, [[1]], 'x'], 'planned_kind': [5, [], [None, 'x', None, None], 'x'],
}
WRONG_FOR_FIELD = { # field -> further values that it must refuse
    'memory': ['1.5g', '-1g', '', 'x', '9' * 30 + 't', '1gb'], 'runtime': ['1h', '', '5', 'PT-1H', 'P' + '9' * 30 + 'Y'], 'time_limit': ['1h', '', '5'],
    'num_cpus': [0, -1], 'labels': [[''], [' a'], ['a,b']], 'env': [{'1A': 'x'}, {'': 'x'}, {'A=B': 'x'}, {'A B': 'x'}], 'priority': [-1],
    'trigger_type': ['on_monday', ''], 'action_type': ['dance', ''], 'action_config': [5, {}, {'commands': []}, {'commands': [5]}], 'max_iterations': [0, -1],
    'status': ['happy', '', 'COMPLETED'], 'files': [{'x': 1.0}, {'-1': 1.0}, {'': 1.0}],
}
STRICT_FIELDS = {   # further values hold for these models only; elsewhere the field is plain text or a plain number
    'memory': ['ResourceRequirementsModel'], 'runtime': ['ResourceRequirementsModel'], 'time_limit': ['ComputeNodesResources', 'RunnerWant'],
    'num_cpus': ['ResourceRequirementsModel'], 'files': ['CheckChangesRequest', 'SetFileTimesRequest'], 'labels': ['JobModel', 'ComputeNodesResources', 'RunnerWant', 'SpawnJobModel'], 'status': ['JobModel', 'ResultModel', 'RunnerEnd', 'JobCompletionEntry'],
}
WRONG_WORDS = {     # type of a parameter -> texts that it must refuse
    'int': ['x', '1.5', '', ' ', '1 ', '0x1', '1_0', '1e3', '\uff11', '9' * 19, '-' + '9' * 19, '9' * 5000, 'null', 'a\0'],
    'bool': ['maybe', '2', '', 'yes', 'a\0'], 'str': ['a\0b', '\udcff'], '[str]': ['a\0b', '\udcff'],
    '[int]': ['x', '', '1,2', '9' * 19],
}


def with_each_foreign_id(value: Any, place: str = '') -> Iterator[Tuple[str, Any]]:
    """An example with one '$noun' after the other made '$$noun'."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key.startswith('$'):
                yield f'{place}.{key}', {('$' + key if other == key else other): kept for other, kept in value.items()}
            for where, changed in with_each_foreign_id(item, f'{place}.{key}'):
                yield where, dict(value, **{key: changed})
    elif isinstance(value, list):
        for index, item in enumerate(value):
            for where, changed in with_each_foreign_id(item, f'{place}[{index}]'):
                yield where, value[:index] + [changed] + value[index + 1:]
    elif isinstance(value, str) and value.startswith('$'):
        yield place, '$' + value


def mistakes(kind: str, good: Any, path: str, owner: str) -> Iterator[Tuple[str, Any]]:
    """Values that a type of MODELS must refuse, each with the path of the field that is wrong in it."""
    field = path.split('.')[-1].split('[')[0]
    if owner in STRICT_FIELDS.get(field, [owner]):
        yield from ((path, wrong) for wrong in WRONG_FOR_FIELD.get(field, ()))
    if kind in WRONG:
        yield from ((path, wrong) for wrong in WRONG[kind])
    elif kind[0] == '[':
        yield from ((path, wrong) for wrong in (5, 'x', {}, True))
        inner = good[0] if isinstance(good, list) and good else None
        yield from ((place, [wrong]) for place, wrong in mistakes(kind[1:-1], inner, path, owner))
    elif kind[0] == '{':
        yield from ((path, wrong) for wrong in (5, 'x', [], True))
        key, inner = next(iter(good.items())) if isinstance(good, dict) and good else ('5' if field in ('files', 'file_times') else 'A', None)
        yield from ((place, {key: wrong}) for place, wrong in mistakes(kind[1:-1].rstrip('?'), inner, path, owner))
    elif kind[1:] in torc.ENUMS:
        yield from ((path, wrong) for wrong in (5, 'x', [], {}, True))
    else:
        yield from model_mistakes(kind, good, path)


def model_mistakes(kind: str, good: Any, path: str) -> Iterator[Tuple[str, Any]]:
    """The same for a model: each field wrong in each way, or missing."""
    yield from ((path, wrong) for wrong in (5, 'x', [], True))
    good = good if isinstance(good, dict) else {}
    for name, field in torc.model_fields(kind[1:]).items():
        place = f'{path}.{name}'.lstrip('.')
        if field.is_required and kind[0] != '?' and name in good:
            yield place, {key: value for key, value in good.items() if key != name}
            if field.type != 'any':     # null is a value too
                yield place, dict(good, **{name: None})
        for where, wrong in mistakes(field.type, good.get(name), place, kind[1:]):
            yield where, dict(good, **{name: wrong})


@slow
class MistakeTest(LiveTest):
    """Whatever is wrong in a request is answered with a 4xx that names it, and changes nothing."""
    maxDiff = None

    def complaint(self, route: Any, parameters: Dict[str, Any], body: Any, name: str) -> str:
        """'' if a request is refused with a 4xx that names the field; what was answered else. In a batch each entry is refused for itself."""
        status, value = self.request(route, parameters, json.dumps(body).encode())
        if status == 200 and isinstance(value, dict) and value.get('errors') and value.get('completed') in (None, []):
            return ''
        told = f'{route.name} {name}: {status} {value!r:.200} for {body!r:.300}'
        if not 400 <= status < 500:
            return told
        field = name.split('.')[-1].split('[')[0]
        text = self.error_text(value)
        return '' if field in text or status == 400 or 'cannot be changed' in text else told

    def test_each_field_of_each_body_refuses_what_it_cannot_be(self):
        count, complaints = 0, []
        for route in torc.ROUTES:
            kind = '@any' if route.body == '-' else route.body if route.body[:1] in '?[' else '@' + route.body
            if not route.body:
                continue
            parameters, good, before = self.parameters(route), self.body(route), self.dump()
            cases = mistakes('any', good, 'body', '') if route.body == '-' else mistakes(kind, good, '', '')
            for name, body in cases:
                count += 1
                complaints.append(self.complaint(route, parameters, body, name))
            with self.subTest(route.name):
                self.assertUnchanged(before)
        self.assertEqual('', '\n'.join(filter(None, complaints)))
        self.assertGreater(count, 3000)

    def test_each_parameter_refuses_what_it_cannot_be(self):
        before, complaints = self.dump(), []
        for route in torc.ROUTES:
            good, body = self.parameters(route), self.body(route)
            kinds = {name: field.type for name, field in torc.query_fields(route).items()}
            kinds.update({name: 'str' if name in torc.TEXT_PARAMETERS else 'int' for name in re.findall(r'{(\w+)}', route.path)})
            for name, kind in kinds.items():
                in_path = '{' + name + '}' in route.path
                wrong = [word for word in WRONG_WORDS[kind] if word or not in_path]
                if name in ('offset', 'limit') and not in_path:
                    wrong.append('-1')
                if name == 'status' and (in_path or route.resource in ('job', 'result')):
                    wrong.append('happy')
                for word in wrong:
                    with self.undone():
                        status, value = self.words(route, dict(good, **{name: word}), body)
                    if not 400 <= status < 500 or name not in self.error_text(value) and 'nothing at' not in self.error_text(value):
                        complaints.append(f'{route.name} {name}={word!r:.30}: {status} {value!r:.300}')
            for name in good:
                if name in torc.query_fields(route) and torc.query_fields(route)[name].is_required:
                    status, value = self.request(route, {key: item for key, item in good.items() if key != name}, body)
                    complaints += [] if status == 400 and name in self.error_text(value) else [f'{route.name} without {name}: {status} {value!r:.300}']
        self.assertEqual('', '\n'.join(complaints))
        self.assertUnchanged(before)

    def words(self, route: Any, parameters: Dict[str, Any], body: Any) -> Tuple[int, Any]:
        """Ask for a route with text that may be no text at all."""
        def quote(value: Any) -> str:
            return urllib.parse.quote(str(value).encode('utf-8', 'surrogateescape'), safe='')
        path = re.sub(r'{(\w+)}', lambda match: quote(parameters[match.group(1)]), route.path)
        query = '&'.join(f'{name}={quote(value)}' for name, value in parameters.items() if '{' + name + '}' not in route.path)
        return self.ask(route.method, path, body, query)

    def test_a_path_to_what_is_not_there_is_a_404(self):
        for route in torc.ROUTES:
            for name in re.findall(r'{(\w+_id)}', route.path):
                if name in ('run_id', 'compute_node_id'):
                    continue    # tested as states
                with self.subTest(route.name, name=name):
                    status, value = self.request(route, dict(self.parameters(route), **{name: 10 ** 12}), self.body(route))
                    self.assertEqual((404, True), (status, str(10 ** 12) in self.error_text(value)), value)

    def test_ids_of_another_workflow_are_refused_wherever_a_body_names_one(self):
        strangers, before, count = {'$' + noun: item for noun, item in self.others.items()}, self.dump(), 0
        for route in torc.ROUTES:
            parameters = self.parameters(route)
            example = REQUESTS.get(route.name, {}).get('body', GOOD_BODIES.get(route.body.lstrip('?')))
            for place, changed in with_each_foreign_id(example) if route.body else ():
                if place == '.scheduler.scheduler_id' or place.endswith('workflow_id') and route.method == 'POST' and '{' not in route.path:
                    continue    # JSON of somebody else; made over there, or refused for what else it names
                count += 1
                with self.subTest(route.name, place=place), self.undone():
                    rows = self.rows_over_there()
                    status, value = self.request(route, parameters, self.resolve(changed, {**self.ids, **strangers}))
                    if route.name != 'runner_sync':     # passes over single things, for the good of the rest
                        self.assertTrue(400 <= status < 500 or value.get('errors') and not value['completed'], value)
                    self.assertEqual(rows, self.rows_over_there())
        self.assertGreater(count, 40)
        self.assertUnchanged(before)

    def rows_over_there(self) -> List[Any]:
        """All rows of the other workflow."""
        tables = [name for name in self.store.ids("SELECT name FROM sqlite_master WHERE type = 'table'")
                  if any(column.name == 'workflow_id' for column in self.store.columns(name))]
        return [self.store.rows(f'SELECT * FROM {table} WHERE workflow_id = ?', (self.others['workflow'],)) for table in tables]

    def test_a_body_that_is_no_body_of_json_is_refused(self):
        before = self.dump()
        bodies = (b'', b' ', b'{', b'nul', b'\xff\xfe', b'[' * 100000, b'{"a":' * 100000, b'{"a": 1, "a": 2}', b'"\\ud800', b'{"a": Infinity}', b'{"a": -NaN}', b'\x00',
                  b'9' * 2000000, b'[1,]', b"{'a': 1}", b'\xef\xbb\xbf{}')
        for route in torc.ROUTES:
            for body in bodies if route.body else ():
                if (route.name, body.strip()) == ('claim_action', b''):
                    continue    # means: by nobody in particular
                status, value = self.request(route, self.parameters(route), body)
                self.assertIn(status, (400, 422), (route.name, body[:20]))
                self.error_text(value)
        self.assertUnchanged(before)

    def test_a_users_own_names_do_not_make_a_client_repeat_its_request(self):
        words = 'connection timeout network dns resolve unreachable Network_Test'
        for name, body in (('create_jobs', {'jobs': 2 * [{'workflow_id': self.ids['workflow'], 'name': words, 'command': 'x'}]}),
                           ('create_compute_node', dict(self.body(torc.OPERATIONS['create_compute_node']), labels=[words + ','])),
                           ('create_resource_requirements', {'workflow_id': self.ids['workflow'], 'name': 'n', 'memory': words})):
            status, value = self.request(torc.OPERATIONS[name], {}, body)
            self.assertEqual(422, status)
            self.assertIsNone(torc.RETRY_WORDS.search(json.dumps(value)), value)
            with self.assertRaises(torc.TorcError) as caught:
                torc.parse_answer(status, torc.format_json(value).encode())
            self.assertIn(words, caught.exception.message)


class Undone(Exception):
    """Ends a transaction that is to leave nothing."""


class MatrixTest(ServiceTest):
    """Every operation, asked by everybody, where access is enforced."""
    NAMES = {'anonymous': 'anonymous', 'stranger': 'eve', 'member': 'mia', 'group admin': 'gus', 'owner': 'ann', 'administrator': 'root', 'server owner': 'tester'}
    ALL, OWNERS = set(NAMES), {'administrator', 'server owner'}
    # Operations about no workflow, or with rules of their own; all others are for everybody who has access to the workflow.
    WHO = {
        'ping': ALL, 'get_version': ALL, 'get_openapi': ALL, 'get_database': ALL, 'snapshot_database': ALL, 'list_workflows': ALL, 'create_workflow': ALL - {'anonymous'}, 'create_workflow_from_spec': ALL - {'anonymous'},
        'create_access_group': OWNERS, 'list_access_groups': OWNERS, 'delete_access_group': OWNERS, 'reload_auth': OWNERS,
        'get_access_group': OWNERS | {'group admin'}, 'list_group_members': OWNERS | {'group admin'}, 'add_user_to_group': OWNERS | {'group admin'},
        'remove_user_from_group': OWNERS | {'group admin'}, 'list_user_groups': OWNERS | {'member'}, 'check_workflow_access': OWNERS | {'member'},
        'add_workflow_to_group': OWNERS | {'owner', 'group admin'}, 'remove_workflow_from_group': OWNERS | {'owner', 'group admin'},
        'list_workflow_statuses': ALL,      # each caller's own, as list_workflows
    }
    WITH_ACCESS = ALL - {'anonymous', 'stranger'}

    def setUp(self) -> None:
        super().setUp()
        self.workflow_id = self.call('create_workflow', {'name': 'w', 'user': 'ann'})['id']
        self.own_id = self.call('create_workflow', {'name': 'mine', 'user': 'eve'})['id']
        self.group_id = self.call('create_access_group', {'name': 'g'})['id']
        for user, role in (('mia', 'member'), ('gus', 'admin')):
            self.call('add_user_to_group', {'user_name': user, 'role': role}, group_id=self.group_id)
        self.call('add_workflow_to_group', id=self.workflow_id, group_id=self.group_id)
        with self.store.transaction():
            torc.set_administrators(self.store, ['root'])
            for table in sorted({noun.table for noun in torc.RESOURCES.values()} - {'workflow', 'job', 'resource_requirements'} | set(torc.TABLES_BY_PARAMETER.values()) - {'job'}):
                self.fill(table)
        self.call('create_job', {'workflow_id': self.workflow_id, 'name': 'j', 'command': 'c'})
        self.store.knows_users = self.store.enforces_access = True

    def fill(self, table: str) -> None:
        """A row, whatever its columns."""
        columns = [row for row in self.store.rows(f'PRAGMA table_info({table})') if row[3] and not row[4] and row[1] != 'id']
        values = {row[1]: self.workflow_id if row[1] == 'workflow_id' else '[]' if 'JSON' in row[2] else 1 for row in columns}
        if table == 'result':
            values['job_id'] = self.call_inside('create_job', {'workflow_id': self.workflow_id, 'name': 'r', 'command': 'c'})['id']
        marks = ', '.join('?' * len(values))
        self.store.run(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", list(values.values()))

    def call_inside(self, name: str, body: Any) -> Any:
        """An operation, in a transaction that is open already."""
        return torc.call_operation(self.store, name, {}, body)

    def sample(self, model: str, is_partial: bool = False) -> Dict[str, Any]:
        """A body with the required fields of a model, about the workflow."""
        scalars = {'int': 1, 'float': 1.0, 'bool': True, 'str': '1', 'name': 'n', 'object': {}, 'time': '2026-01-01T00:00:00Z', 'minutes': 1.0, 'gigabytes': 1.0,
                   'nodes': 1, 'ordinal': 1, 'rules': '[]', 'any': {}, 'planned_jobs': []}
        body = {name: self.workflow_id if name == 'workflow_id' else self.group_id if name == 'group_id' else scalars[field.type] if field.type in scalars
                else self.sample(field.type[1:]) if field.type[1:] in torc.MODELS else torc.ENUMS[field.type[1:]][0] if field.type[1:] in torc.ENUMS
                else [self.sample(field.type[2:-1])] if field.type[2:-1] in torc.MODELS and model != 'PlanModel' else {} if field.type[0] == '{' else []
                for name, field in torc.model_fields(model).items() if field.is_required}
        body.pop('user', None) if is_partial else None      # an owner's to change
        return dict(body, data='d') if model == 'UserDataModel' else body

    def ask(self, caller: str, route: Any, workflow_id: int, row_id: int = 1) -> Tuple[int, Any]:
        """Ask as somebody; nothing of it stays."""
        values = dict({name: row_id for name in re.findall(r'{(\w+)}', route.path)}, workflow_id=workflow_id, group_id=self.group_id, user_name='mia', status='completed', run_id=1)
        path = torc.API_PREFIX + re.sub(r'{(\w+)}', lambda match: str(values[match.group(1)]), route.path)
        query = '&'.join(f'{name}={workflow_id}' for name, field in torc.query_fields(route).items() if field.is_required)
        body = b'' if not route.body else json.dumps({'-': {}, '[': []}[route.body[0]] if route.body[0] in '-[' else self.sample(route.body.lstrip('?'), route.body[0] == '?')).replace(
            f'"workflow_id": {self.workflow_id}', f'"workflow_id": {workflow_id}').encode()
        with contextlib.suppress(Undone), self.store.transaction():
            answer = torc.answer_request(self.store, route.method, path, query, body, self.NAMES[caller], caller == 'server owner')
            raise Undone
        return answer

    def test_everybody_gets_what_the_rules_say(self):
        silenced(self)
        for route in torc.ROUTES:
            allowed = self.WHO.get(route.name, self.OWNERS if '/admin/' in route.path else self.WITH_ACCESS)
            for caller in self.NAMES:
                with self.subTest(route=route.name, caller=caller):
                    status, value = self.ask(caller, route, self.workflow_id)
                    if caller in allowed:
                        self.assertNotIn(status, (401, 403, 500), value)
                    else:
                        self.assertEqual(404 if '{task_id}' in route.path else 403, status, value)

    def test_what_one_may_not_see_is_answered_like_what_is_not_there(self):
        for route in torc.ROUTES:
            if route.name not in torc.OPEN_OPERATIONS:
                with self.subTest(route=route.name):
                    (status, value), (other, told) = self.ask('stranger', route, self.workflow_id, 1), self.ask('stranger', route, 987654, 987654)
                    self.assertEqual((status, re.sub(r'\d+', 'N', json.dumps(value))), (other, re.sub(r'\d+', 'N', json.dumps(told))))

    def test_lists_hold_what_one_may_see_whatever_is_asked(self):
        route = torc.OPERATIONS['list_workflows']
        for caller, wanted in (('anonymous', []), ('stranger', [self.own_id]), ('member', [self.workflow_id]), ('owner', [self.workflow_id]),
                               ('administrator', [self.workflow_id, self.own_id]), ('server owner', [self.workflow_id, self.own_id])):
            with self.store.transaction():
                found = torc.answer_request(self.store, 'GET', torc.API_PREFIX + route.path, '', b'', self.NAMES[caller], caller == 'server owner')[1]
                self.assertEqual((wanted, len(wanted)), ([item['id'] for item in found['items']], found['total_count']), caller)
                for query in ('user=ann', 'user=eve', 'name=w', 'access_group=g', 'description=', 'is_archived=false', 'sort_by=user&limit=1'):
                    page = torc.answer_request(self.store, 'GET', torc.API_PREFIX + route.path, query, b'', self.NAMES[caller], caller == 'server owner')[1]
                    self.assertLessEqual({item['id'] for item in page['items']}, set(wanted), (caller, query))
                    self.assertLessEqual(page['total_count'], len(wanted))

    def test_nothing_moves_to_or_reaches_into_another_workflow(self):
        file_id, job_id = (self.store.value(f'SELECT min(id) FROM {table}') for table in ('file', 'job'))
        asked = (
            ('PUT', f'/files/{file_id}', {'workflow_id': self.own_id}), ('PUT', f'/jobs/{job_id}', {'workflow_id': self.own_id}),
            ('POST', '/jobs', {'workflow_id': self.workflow_id, 'name': 'x', 'command': 'c', 'input_file_ids': [file_id + 1]}),
            ('POST', '/bulk_files', {'files': [{'workflow_id': self.workflow_id, 'name': 'x', 'path': 'x'}, {'workflow_id': self.own_id, 'name': 'y', 'path': 'y'}]}),
            ('POST', '/bulk_jobs', {'jobs': [{'workflow_id': self.own_id, 'name': 'y', 'command': 'y'}]}),
        )
        with self.store.transaction():
            self.store.insert('file', {'workflow_id': self.own_id, 'name': 'f', 'path': 'p'})
            for method, path, body in asked:
                with self.subTest(path=path):
                    status, value = torc.answer_request(self.store, method, torc.API_PREFIX + path, '', json.dumps(body).encode(), 'ann', False)
                    self.assertIn(status, (403, 422), value)
            body = json.dumps({'workflow_id': self.own_id, 'name': 'x'}).encode()
            for caller, status in (('ann', 403), ('eve', 403), ('root', 422)):      # both workflows count, that of the row and that of the body
                self.assertEqual(status, torc.answer_request(self.store, 'PUT', f'{torc.API_PREFIX}/files/{file_id}', '', body, caller, False)[0], caller)
            self.assertEqual([(file_id, self.workflow_id), (file_id + 1, self.own_id)], self.store.rows('SELECT id, workflow_id FROM file'))


OFFICIAL_TYPES = {'Int': 'integer', 'Str': 'string', 'Bool': 'boolean', 'Float': 'number', 'Object': 'object', 'object': 'object', 'Any': 'any'}
OTHER_ANSWERS = {   # operation -> our answer; the official interface says only 'object', or a part of it
    'cancel_workflow': 'WorkflowModel', 'initialize_jobs': 'MessageResponse', 'reset_workflow_status': 'WorkflowModel',
    'delete_workflow': 'DeletedWorkflow',       # a WorkflowModel with a message
    'delete_events': 'DeleteCountResponse', 'delete_results': 'DeleteCountResponse',
    'delete_all_user_data': 'DeletedUserData', 'delete_resource_requirements': 'DeleteCountResponse',
}
OTHER_FIELDS = {    # model.field -> (official type, ours; ! where required, None where it is not there), because of what
    'WorkflowActionModel.failure': (None, 'string'),            # why a run_commands action failed
    'ComputeNodeModel.identity': (None, 'string'),              # tells runners on one host apart
    'ComputeNodeModel.lease_s': (None, 'number'),               # how long a silent runner is believed alive
    'EventModel.timestamp': ('integer!', 'integer'),            # the server sets it
    'FileModel.identifier': (None, 'string'),                   # of RO-Crate; Torc 1.0's server knows it
    'JobModel.schedule_compute_nodes': ('ComputeNodeSchedule', 'any'),      # kept as it came; nobody reads it
    'ResultModel.reason': (None, 'string'),                     # of a failure, for people
    'UserGroupMembershipModel.role': ('string!', 'GroupRole!'),             # there are two
    'WorkflowModel.spec_path': (None, 'string'),                # finds the workflow of an edited file again
}


def official_type(text: str) -> str:
    """A type of the official interface: 'List[JobModel]' -> '[JobModel]'."""
    match = re.match(r'(List|Dict)\[(?:str, )?(.*)\]\Z', text)
    if match:
        return ('[%s]' if match.group(1) == 'List' else '{%s}') % official_type(match.group(2))
    return OFFICIAL_TYPES.get(text, text)


def schema_type(schema: Dict[str, Any]) -> str:
    """A JSON Schema in the same words."""
    schema = schema.get('anyOf', [schema])[0]
    kind = schema.get('type', 'any')
    kind = kind if isinstance(kind, str) else kind[0]
    if '$ref' in schema:
        return schema['$ref'].rpartition('/')[2]
    if kind == 'array':
        return f"[{schema_type(schema['items'])}]"
    return '{%s}' % schema_type(schema['additionalProperties']) if 'additionalProperties' in schema else kind


class OpenApiTest(ServiceTest):
    """The description of the interface for programs that make clients."""

    def setUp(self) -> None:
        super().setUp()
        self.document = json.loads(json.dumps(self.call('get_openapi')))
        self.operations = {operation['operationId']: (method.upper(), path, operation)
                           for path, methods in self.document['paths'].items() for method, operation in methods.items()}

    def parts(self, value: Any) -> Iterator[Dict[str, Any]]:
        """All objects within a value."""
        if isinstance(value, dict):
            yield value
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from self.parts(item)

    def content(self, part: Dict[str, Any]) -> str:
        """Type of a body or answer."""
        return schema_type(next(iter(part['content'].values()))['schema'])

    def test_it_is_whole(self):
        self.assertEqual(('3.1.0', torc.API_VERSION), (self.document['openapi'], self.document['info']['version']))
        self.assertTrue(self.document['info']['title'])
        self.assertEqual(sorted(torc.OPERATIONS), sorted(self.operations))
        for part in self.parts(self.document):
            target = self.document
            for name in part['$ref'].split('/')[1:] if isinstance(part.get('$ref'), str) else ():
                self.assertIn(name, target)
                target = target[name]
        schemes = self.document['components']['securitySchemes']
        self.assertEqual({'bearer', 'basic'}, {scheme['scheme'] for scheme in schemes.values()})
        self.assertEqual(set(schemes), {name for choice in self.document['security'] for name in choice})

    def test_every_operation_says_what_goes_in_and_out(self):
        for name, (_, path, operation) in self.operations.items():
            in_path = [row['name'] for row in operation['parameters'] if row['in'] == 'path']
            self.assertEqual(re.findall(r'{(\w+)}', path), in_path, name)
            self.assertTrue(all(row['required'] for row in operation['parameters'] if row['in'] == 'path'), name)
            self.assertEqual(len(operation['parameters']), len({row['name'] for row in operation['parameters']}), name)
            self.assertTrue({'200', '4XX', '503'} <= set(operation['responses']), name)
            self.assertTrue(all(answer.get('description') or '$ref' in answer for answer in operation['responses'].values()), name)
            self.assertTrue(operation['description'], name)
            self.assertEqual(bool(torc.OPERATIONS[name].body), 'requestBody' in operation, name)

    def test_every_type_of_the_models_has_a_schema(self):
        self.assertEqual(set(torc.SCALAR_CHECKS), set(torc.SCALAR_SCHEMAS) - {'stream'})
        self.assertEqual(set(torc.MODELS) | set(torc.ENUMS), {name for name in self.document['components']['schemas'] if not name.startswith('Partial')})

    def test_operations_are_the_official_ones(self):
        for official in read_shared('torc/api_operations.json'):
            if official['op'] not in self.operations:
                continue
            method, path, operation = self.operations[official['op']]
            with self.subTest(official['op']):
                self.assertEqual((official['method'], official['path'].replace('{workflow_id}', '{id}'), [official['group']]), (method, path, operation['tags']))
                query = {row['name'] for row in operation['parameters'] if row['in'] == 'query'}
                others = MORE_QUERY.get(official['op'], set())
                self.assertEqual(others, query ^ set(official['query']))
                body = operation.get('requestBody')
                self.assertEqual(official_type(official['body']) if official['body'] else None, self.content(body).replace('Partial', '') if body else None)
                self.assertEqual(OTHER_ANSWERS.get(official['op'], official_type(official['returns'])), self.content(operation['responses']['200']))
                self.assertEqual('202' in official['codes'], '202' in operation['responses'])

    def test_models_are_the_official_ones(self):
        schemas, differences = self.document['components']['schemas'], {}
        for model, rows in read_shared('torc/api_models.json').items():
            if model not in schemas:
                continue
            if 'enum' in schemas[model]:
                self.assertEqual(rows, schemas[model]['enum'])
                continue
            required = schemas[model].get('required', [])
            ours = {name: schema_type(schema) + '!' * (name in required) for name, schema in schemas[model]['properties'].items()}
            theirs = {row['name']: official_type(row['type']) + '!' * row['required'] for row in rows}
            differences.update({f'{model}.{name}': (theirs.get(name), ours.get(name)) for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)})
        self.assertEqual({}, {place: types for place, types in differences.items() if OTHER_FIELDS.get(place) != types})

    def test_what_is_not_required_may_be_null(self):
        job = self.document['components']['schemas']['JobModel']
        self.assertEqual(['command', 'name', 'workflow_id'], sorted(job['required']))
        self.assertEqual((['integer', 'null'], 'integer'), (job['properties']['id']['type'], job['properties']['workflow_id']['type']))
        self.assertEqual([{'$ref': '#/components/schemas/JobStatus'}, {'type': 'null'}], job['properties']['status']['anyOf'])
        self.assertNotIn('required', self.document['components']['schemas']['PartialJobModel'])


# -------- lists --------

def contains(name: str) -> Callable[..., bool]:
    """Filter: a part of a text, in any case of letters."""
    return lambda item, value, world: name in item and value.lower() in item[name].lower()


def relates(field: str) -> Callable[..., bool]:
    """Filter of files and user data: a job has the item among these ids."""
    return lambda item, value, world: item['id'] in world.get(value, {}).get(field, ())


def category_is(item: Dict[str, Any], value: str, world: Any) -> bool:
    """Filter of events."""
    return isinstance(item['data'], dict) and item['data'].get('category') == value


def label_sets_fit(item: Dict[str, Any], value: str, world: Any) -> bool:
    """Filter of jobs: what a runner with these labels may take."""
    labels = set(item.get('labels', ()))
    return labels <= set(value.split(',')) and bool(labels) if value else not labels


FILTERS = {     # (route, parameter) -> whether an item passes; others compare with the field of their name. `world`: job id -> job
    ('list_compute_nodes', 'hostname'): contains('hostname'),
    ('list_workflows', 'description'): contains('description'), ('list_jobs', 'name'): contains('name'), ('list_jobs', 'command'): contains('command'),
    ('list_files', 'path'): contains('path'), ('list_user_data', 'name'): contains('name'), ('list_events', 'category'): category_is,
    ('list_events', 'after_timestamp'): lambda item, value, world: item['timestamp'] > value, ('list_jobs', 'labels'): label_sets_fit,
    ('list_jobs', 'needs_file_id'): lambda item, value, world: value in world[item['id']].get('input_file_ids', ()),
    ('list_jobs', 'upstream_job_id'): lambda item, value, world: value in world[item['id']].get('depends_on_job_ids', ()),
    ('list_jobs', 'active_compute_node_id'): lambda item, value, world: (item['status'], item.get('compute_node_id')) == ('running', value),
    ('list_jobs', 'origin_is_set'): lambda item, value, world: ('origin' in item) == value,
    ('list_jobs', 'include_relationships'): lambda item, value, world: True,
    ('list_files', 'produced_by_job_id'): relates('output_file_ids'),
    ('list_files', 'is_output'): lambda item, value, world: not value or any(item['id'] in job.get('output_file_ids', ()) for job in world.values()),
    ('list_user_data', 'consumer_job_id'): relates('input_user_data_ids'), ('list_user_data', 'producer_job_id'): relates('output_user_data_ids'),
    ('list_resource_requirements', 'job_id'): lambda item, value, world: world.get(value, {}).get('resource_requirements_id') == item['id'],
    ('list_resource_requirements', 'runtime'): lambda item, value, world: value in (item['runtime'], str(torc.parse_duration(item['runtime']))),
    ('list_compute_nodes', 'scheduled_compute_node_id'): lambda item, value, world: item.get('scheduler') == {'scheduler_id': value},
    ('list_results', 'all_runs'): lambda item, value, world: value or item['id'] == max(row['id'] for row in world['results']['rows'] if row['job_id'] == item['job_id']),
}
UNSORTABLE = {  # fields of a model that its lists cannot be sorted by
    'schedule_compute_nodes', 'access_groups', 'input_file_ids', 'output_file_ids', 'input_user_data_ids', 'output_user_data_ids', 'depends_on_job_ids', 'identity',
    'lease_s', 'identifier', 'job_ids'}
ODD_TEXTS = ['', '%', '_', 'a', 'A', "a'b", 'a"b', 'mine', 'PT7200S', '7200', 'ä']


class ListTest(LiveTest):
    """Every list, page by page, in every order and under every filter, is what Python makes of the whole list."""

    def setUp(self) -> None:
        super().setUp()
        workflow_id = self.ids['workflow']
        for route in torc.ROUTES:       # more of everything: the same again, bare, and with other texts and numbers
            if route.method == 'POST' and route.resource and not route.path.startswith('/bulk') and route.name != 'create_result':
                good, fields = self.body(route), torc.model_fields(route.body.lstrip('?'))
                bare = {name: value for name, value in good.items() if fields[name].is_required}
                other = {name: value + 1 if fields[name].type == 'int' and not name.endswith('_id') else value for name, value in good.items()}
                twins = 3 if route.resource == 'job' else 2     # names of jobs are unique
                for place, body in enumerate((good, bare, other)):
                    name = {'name': f"A'{place % twins}\"%_ä"} if 'name' in body else {}
                    self.request(route, {}, dict(body, **name))
        for data in ({'x': {'category': 'mine'}}, {'category': ['mine']}, ['category', 'mine'], {'category': 'a"b'}, {'category': 'ä'}, 'category":"mine', {'category': 5}):
            self.call('create_event', {'workflow_id': workflow_id, 'data': data})
        self.clock += 5
        self.call('create_file', {'workflow_id': workflow_id, 'name': 'x', 'path': 'elsewhere/Apart'})
        second = max(item['id'] for item in self.call('list_slurm_schedulers', workflow_id=workflow_id)['items'])
        body = dict(self.body(torc.OPERATIONS['create_scheduled_compute_node']), scheduler_id=11, scheduler_config_id=second, status='mine')
        self.call('create_scheduled_compute_node', body)
        self.call('create_slurm_stats', self.resolve(dict(GOOD_BODIES['SlurmStatsModel'], run_id=2, attempt_id=2), self.ids))
        self.call('create_ro_crate_entity', {'workflow_id': workflow_id, 'entity_id': 'ä', 'entity_type': 'x', 'metadata': {}})
        node = dict(self.body(torc.OPERATIONS['create_compute_node']), is_active=False, hostname='other')
        for scheduler in ({'a': {'scheduler_id': 1}}, {'scheduler_id': '1'}, {'scheduler_id': 11}, [1]):
            other = self.call('create_compute_node', dict(node, scheduler=scheduler))['id']
        for place, labels in enumerate((['a||b'], ['a', 'b'], ['a'], ['b"]|["a'], [])):
            self.call('create_job', {'workflow_id': workflow_id, 'name': f'J{place}', 'command': '%',
                                     'labels': labels, 'priority': place % 2})
        self.call('retry_job', id=self.ids['failed'], run_id=1, max_retries=5)
        self.call('create_result', self.resolve(dict(GOOD_BODIES['ResultModel'], job_id='$failed', attempt_id=2, return_code=7, run_id=2, compute_node_id=other), self.ids))
        self.call('archive_workflow', {'is_archived': True}, id=self.call('create_workflow', {'name': 'old', 'user': 'somebody'})['id'])
        jobs = self.call('list_jobs', workflow_id=workflow_id, include_relationships=True)['items']
        self.known = {job['id']: job for job in jobs}   # type: Dict[Any, Any]
        self.known['results'] = {'rows': self.call('list_results', workflow_id=workflow_id, all_runs=True)['items']}

    def routes(self) -> List[Any]:
        """Routes that answer page by page."""
        return [route for route in torc.ROUTES if {'offset', 'limit'} <= set(torc.query_fields(route))]

    def ask_list(self, route: Any, **query: Any) -> Dict[str, Any]:
        """A list, of all runs if there are several."""
        parameters = {name: value for name, value in self.parameters(route).items() if name == 'workflow_id' or '{' + name + '}' in route.path}
        if 'all_runs' in torc.query_fields(route):
            query.setdefault('all_runs', True)
        status, value = self.request(route, dict(parameters, **query), None)
        self.assertEqual(200, status, (route.name, query, value))
        return value

    def paged(self, route: Any, **query: Any) -> List[Any]:
        """A list, fetched in pages of one to three items; every page's numbers are right."""
        items, total, size = [], None, itertools.cycle((1, 3, 2))
        while True:
            limit = next(size)
            page = self.ask_list(route, offset=len(items), limit=limit, **query)
            total = page['total_count'] if total is None else total
            numbers = {'offset': len(items), 'total_count': total, 'has_more': len(items) + len(page['items']) < total}
            self.assertEqual(numbers, {name: page[name] for name in numbers})
            self.assertEqual(min(limit, total - len(items)), len(page['items']))
            self.assertEqual(len(page['items']), page.get('count', len(page['items'])))
            items += page['items']
            if not page['has_more']:
                return items

    def sort_key(self, route: Any, field: str) -> Callable[[Dict[str, Any]], Any]:
        """How SQLite orders the values of a column: NULL, numbers, texts by their bytes; JSON as text, a status by its code."""
        view = torc.RESOURCES[route.resource].view if route.verb is not torc.list_relations and route.resource in torc.RESOURCES else ''
        codec = {column.name: column.codec for column in self.store.columns(view)}.get(field) if view else ''

        def key(item: Dict[str, Any]) -> Tuple[int, Any]:
            value = item.get(field)
            if value is None:
                return (0, 0)
            stored = torc.encode_cell(codec, value)
            return (2, stored.encode()) if isinstance(stored, str) else (1, stored)
        return key

    def test_pages_put_together_are_the_whole_list_in_every_order(self):
        for route in self.routes():
            whole = self.ask_list(route)['items']
            with self.subTest(route.name):
                self.assertEqual(whole, self.paged(route))
            model = re.search(r'items:\[@(\w+)\]', torc.MODELS[torc.answer_type(route).lstrip('@')]).group(1)
            fields = [name for name in torc.model_fields(model) if name not in UNSORTABLE] if 'sort_by' in torc.query_fields(route) else []
            for field, reverse in itertools.product(fields, (False, True)):
                with self.subTest(route.name, field=field, reverse=reverse):
                    found = self.paged(route, sort_by=field, reverse_sort=reverse)
                    key = self.sort_key(route, field)
                    self.assertEqual(sorted(map(key, whole), reverse=reverse), list(map(key, found)))
                    if whole and 'id' in whole[0]:      # equals go by id
                        self.assertEqual(sorted(whole, key=lambda item: (key(item), item['id']), reverse=reverse), found)
                    self.assertEqual(found, self.ask_list(route, sort_by=field, reverse_sort=reverse)['items'])

    def test_every_filter_lets_pass_what_it_says(self):
        for route in self.routes():
            whole, names = self.ask_list(route)['items'], set(torc.query_fields(route)) - {'workflow_id', 'offset', 'limit', 'sort_by', 'reverse_sort'}
            passed = collections.Counter()  # type: Dict[str, int]
            for name in sorted(names - set(LIST_FILTERS_OF_OTHERS)):
                passes = FILTERS.get((route.name, name), lambda item, value, world, name=name: item.get(name) == value)
                self.assertTrue((route.name, name) in FILTERS or any(name in item for item in whole), f'{route.name}: FILTERS lacks {name}')
                for value in self.values(route, name, whole):
                    expected = [item for item in whole if passes(item, value, self.known)]
                    passed[name] += 0 < len(expected) < len(whole)     # it tells them apart
                    with self.subTest(route.name, **{name: value}):
                        more = {} if name == 'include_relationships' else {name: value}
                        self.assertEqual(expected, self.paged(route, **more))
                        self.assertEqual(expected[::-1], self.ask_list(route, reverse_sort=True, **more)['items'] if 'reverse_sort' in torc.query_fields(route) else expected[::-1])
            for name in names - set(LIST_FILTERS_OF_OTHERS) - {'include_relationships'}:
                with self.subTest(route.name, name=name):
                    self.assertTrue(passed[name], 'no value was tried that lets some pass and others not')

    def values(self, route: Any, name: str, whole: List[Any]) -> List[Any]:
        """Values to filter by."""
        kind = torc.query_fields(route)[name].type
        if kind == 'bool':
            return [True, False]
        if kind == 'int':
            own = {item.get(name) for item in whole} | {value for value in self.ids.values() if isinstance(value, int)} | {0, -1, 11, 2}
            return sorted(value for value in own if isinstance(value, int)) + ([min(item['timestamp'] for item in whole)] if 'time' in name else [])
        if name == 'status' and route.resource in ('job', 'result'):
            return list(torc.STATUS_CODES)
        if name == 'labels':
            return ['', 'a', 'b', 'a,b', 'b,a,c', 'a||b', 'c', '||', 'b"]|["a']
        return ODD_TEXTS + sorted({item[name] for item in whole if isinstance(item.get(name), str)})

    def test_limits_are_bounded_and_said(self):
        self.assertEqual([0, 7, torc.MAX_LIST_ITEMS], [torc.page_size(3, limit) for limit in (0, 7, torc.MAX_LIST_ITEMS + 1)])
        for route in self.routes():
            with self.subTest(route.name):
                page = self.ask_list(route, limit=torc.MAX_LIST_ITEMS * 5)
                self.assertEqual(torc.MAX_LIST_ITEMS, page.get('max_limit', page.get('limit')))
                self.assertEqual(page['total_count'], len(page['items']))
                self.assertEqual([], self.ask_list(route, limit=0)['items'])
                self.assertEqual(([], False), tuple(self.ask_list(route, offset=10 ** 6)[name] for name in ('items', 'has_more')))
                for wrong in ({'limit': -1}, {'offset': -1}, {'sort_by': 'no_such_field'}):
                    if set(wrong) <= set(torc.query_fields(route)):
                        status, value = self.request(route, dict(self.parameters(route), **wrong), None)
                        self.assertEqual((422, True), (status, next(iter(wrong)) in self.error_text(value)))


LIST_FILTERS_OF_OTHERS = {  # parameter of a list -> where it is tested
    'access_group': 'with the groups',
}


# ======== 10. Server: one selector loop, HTTP framing, state files ========

# A key and three certificates of it that vouch for themselves: for localhost, for another name, and one that has expired. The
# first two are good until 2099. They guard nothing: everybody may read them here.
TLS_KEY = '''\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgIJkSEwqGn8oNPnfA
bcKh5NKEu/5JHH0hc8mXj4IWXlqhRANCAARYzXMGHmlEU0xj2BavS1Df87qjI2Ec
b3bCSYn0U/T+Y/QtcN8W+lEqOohQ1b1KC4NL0kBNV4dZIIAva7ic4ZaC
-----END PRIVATE KEY-----
'''
TLS_CERTIFICATES = {
    'good': '''\
-----BEGIN CERTIFICATE-----
MIIBXTCCAQOgAwIBAgIBATAKBggqhkjOPQQDAjAPMQ0wCwYDVQQDDARnb29kMCAX
DTIwMDEwMTAwMDAwMFoYDzIwOTkwMTAxMDAwMDAwWjAPMQ0wCwYDVQQDDARnb29k
MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEWM1zBh5pRFNMY9gWr0tQ3/O6oyNh
HG92wkmJ9FP0/mP0LXDfFvpRKjqIUNW9SguDS9JATVeHWSCAL2u4nOGWgqNOMEww
GgYDVR0RBBMwEYIJbG9jYWxob3N0hwR/AAABMA8GA1UdEwEB/wQFMAMBAf8wHQYD
VR0OBBYEFPK0Xy720p9UvuaC3jlcL5Vm1I7cMAoGCCqGSM49BAMCA0gAMEUCIQCS
k/EJuSPXbQK/GUVEGAu5GZf1loil1+E8HSXeM5XNpgIgNQf4LYMojNrCEvJudTMA
GlA0KCaF/CocgdmlmOHggzg=
-----END CERTIFICATE-----
''',
    'other': '''\
-----BEGIN CERTIFICATE-----
MIIBXjCCAQOgAwIBAgIBAjAKBggqhkjOPQQDAjAQMQ4wDAYDVQQDDAVvdGhlcjAg
Fw0yMDAxMDEwMDAwMDBaGA8yMDk5MDEwMTAwMDAwMFowEDEOMAwGA1UEAwwFb3Ro
ZXIwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAARYzXMGHmlEU0xj2BavS1Df87qj
I2Ecb3bCSYn0U/T+Y/QtcN8W+lEqOohQ1b1KC4NL0kBNV4dZIIAva7ic4ZaCo0ww
SjAYBgNVHREEETAPgg1vdGhlci5leGFtcGxlMA8GA1UdEwEB/wQFMAMBAf8wHQYD
VR0OBBYEFPK0Xy720p9UvuaC3jlcL5Vm1I7cMAoGCCqGSM49BAMCA0kAMEYCIQD/
RMi34oG82BjxaUSoSNnLZPZy/A8lSJNfL1n0dvvBtAIhAJZCAO6lrCee1fmCla7k
aP4Rl8rcaMCKezIazbfL0yQl
-----END CERTIFICATE-----
''',
    'expired': '''\
-----BEGIN CERTIFICATE-----
MIIBYTCCAQegAwIBAgIBAzAKBggqhkjOPQQDAjASMRAwDgYDVQQDDAdleHBpcmVk
MB4XDTIwMDEwMTAwMDAwMFoXDTIxMDEwMTAwMDAwMFowEjEQMA4GA1UEAwwHZXhw
aXJlZDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABFjNcwYeaURTTGPYFq9LUN/z
uqMjYRxvdsJJifRT9P5j9C1w3xb6USo6iFDVvUoLg0vSQE1Xh1kggC9ruJzhloKj
TjBMMBoGA1UdEQQTMBGCCWxvY2FsaG9zdIcEfwAAATAPBgNVHRMBAf8EBTADAQH/
MB0GA1UdDgQWBBTytF8u9tKfVL7mgt45XC+VZtSO3DAKBggqhkjOPQQDAgNIADBF
AiEAvFi6F4SFkH/xnsX6roqXkgiWQrNKkR1cfwz48JmFfoUCIDjxCBw5Vhksvk44
AD5sK5eMl1wR7PQIpPaVkalgWooI
-----END CERTIFICATE-----
''',
}


class Tls:
    """A server's side and a client's side of TLS, with files in a world."""

    def __init__(self, world: World, name: str = 'good') -> None:
        self.key, self.certificate = world.write('key.pem', TLS_KEY), world.write(f'{name}.pem', TLS_CERTIFICATES[name])
        os.chmod(self.key, 0o600)
        self.server = torc.open_tls(self.certificate, self.key)
        self.client = ssl.create_default_context(cafile=self.certificate)


class ServerThread(threading.Thread):
    """A torc.Server in a thread of the test, on a database of its own."""

    def __init__(self, database: str, token: str = '', enforces_access: bool = False, tls: Optional[Tls] = None, **how: Any) -> None:
        super().__init__(daemon=True)
        self.database, self.token, self.enforces_access, self.how = database, token, enforces_access, how
        self.tls = tls
        self.is_ready = threading.Event()
        self.start()
        assert self.is_ready.wait(20), 'the server did not start'

    def run(self) -> None:
        store = torc.Store(self.database)
        listener = torc.open_listener('127.0.0.1', 0, True)
        store.enforces_access = self.enforces_access
        self.server = torc.Server(store, listener, torc.Admission(self.token, **self.how), tls=self.tls and self.tls.server)
        self.port = listener.getsockname()[1]
        self.is_ready.set()
        try:
            self.server.serve_forever()
        finally:
            self.server.close()
            store.close()

    def stop(self) -> None:
        """End it, if it has not ended."""
        if self.is_alive():
            self.server.stop()
            self.join(10)

    def connect(self) -> socket.socket:
        """A client's socket."""
        return self.wrap(socket.create_connection(('127.0.0.1', self.port), 10))

    def wrap(self, client: socket.socket) -> socket.socket:
        """A connected socket, made to speak TLS if the server does."""
        return self.tls.client.wrap_socket(client, server_hostname='localhost') if self.tls else client

    def ask(self, *parts: bytes) -> bytes:
        """Send parts, one after the other, then read until the server has hung up or all is answered."""
        with self.connect() as client:
            for part in parts:
                client.sendall(part)
            socket.socket.shutdown(client, socket.SHUT_WR)     # of TCP; that of TLS would end the reading, too
            return read_all(client)


def read_all(client: socket.socket) -> bytes:
    """Everything until the other side hangs up, however it does."""
    found = b''
    with contextlib.suppress(ConnectionResetError, ssl.SSLError):
        while True:
            data = client.recv(65536)
            if not data:
                break
            found += data
    return found


def read_answers(client: socket.socket, count: int) -> bytes:
    """So many whole answers."""
    found = b''
    while len(re.findall(rb'(?s)\r\n\r\n', found)) < count or not is_whole(found):
        data = client.recv(65536)
        assert data, found
        found += data
    return found


def is_whole(data: bytes) -> bool:
    """Whether the data ends with the end of an answer."""
    while data:
        head, _, rest = data.partition(b'\r\n\r\n')
        length = re.search(rb'content-length: (\d+)', head)
        size = int(length.group(1)) if length else 0
        if len(rest) < size:
            return False
        data = rest[size:]
    return True


def statuses(data: bytes) -> List[int]:
    """Statuses of all answers in the data."""
    return [int(number) for number in re.findall(rb'HTTP/1\.1 (\d+) ', data)]


def http_request(method: str = 'GET', path: str = '/torc-service/v1/ping', body: bytes = b'', version: str = '1.1', **fields: str) -> bytes:
    """Bytes of a request. Fields by name, _ for -; host is there unless it is given as ''."""
    fields = dict({'host': '127.0.0.1'}, **fields)
    if body:
        fields['content_length'] = str(len(body))
    lines = ''.join(f'{name.replace("_", "-")}: {value}\r\n' for name, value in fields.items() if value)
    return f'{method} {path} HTTP/{version}\r\n{lines}\r\n'.encode('latin-1') + body


class FramingTest(unittest.TestCase):
    """Heads of requests, as pure text."""

    def test_a_head_is_cut_into_its_parts(self) -> None:
        head = torc.parse_head(b'POST /a%20b?x=1&y=2 HTTP/1.1\r\nHost: h:1\r\nX-Odd:\r\nContent-LENGTH:  12 ')
        self.assertEqual(('POST', '/a%20b', 'x=1&y=2', 12, True), (head.method, head.path, head.query, head.length, head.keeps_alive))
        self.assertEqual({'host': 'h:1', 'x-odd': '', 'content-length': '12'}, head.fields)

    def test_who_keeps_the_connection(self) -> None:
        for line, fields, keeps in (('1.1', '', True), ('1.1', 'Connection: close', False), ('1.1', 'Connection: Keep-Alive', True),
                                    ('1.0', '', False), ('1.0', 'Connection: keep-alive', True), ('1.1', 'Connection: Close, TE', False)):
            with self.subTest(line=line, fields=fields):
                data = f'GET / HTTP/{line}' + (f'\r\n{fields}' if fields else '')
                self.assertEqual(keeps, torc.parse_head(data.encode()).keeps_alive)

    def test_what_is_not_plain_http_is_refused_with_its_status(self) -> None:
        cases = (
            (400, 'GET /'), (400, 'GET / HTTP/2.0'), (400, 'get / HTTP/1.1'), (400, 'GET  / HTTP/1.1'), (400, 'GET http://h/ HTTP/1.1'),
            (400, 'GET /\xe9 HTTP/1.1'), (400, 'PRI * HTTP/2.0'), (400, 'OPTIONS * HTTP/1.1'), (400, 'GET / HTTP/1.1 '),
            (400, 'GET / HTTP/1.1\r\nno colon'), (400, 'GET / HTTP/1.1\r\nblank before : 1'), (400, 'GET / HTTP/1.1\r\na: 1\r\n folded'),
            (400, 'GET / HTTP/1.1\r\n: nameless'), (400, 'GET / HTTP/1.1\r\na: nul\0'), (400, 'GET / HTTP/1.1\r\na: bare\ncr: 1'),
            (400, 'GET / HTTP/1.1\r\na: bare\rcr: 1'), (400, 'GET / HTTP/1.1\r\nhost: a\r\nHOST: b'),
            (400, 'GET / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 1'), (400, 'GET / HTTP/1.1\r\ncontent-length: -1'),
            (400, 'GET / HTTP/1.1\r\ncontent-length: +1'), (400, 'GET / HTTP/1.1\r\ncontent-length: 1, 1'),
            (400, 'GET / HTTP/1.1\r\ncontent-length: 0x10'), (400, 'GET / HTTP/1.1\r\ncontent-length: 99999999999'),
            (400, 'GET / HTTP/1.1\r\ncontent-length: \xb2'), (400, 'GET / HTTP/1.1\r\ncontent-length:'),
            (501, 'POST / HTTP/1.1\r\ntransfer-encoding: chunked'), (501, 'POST / HTTP/1.1\r\ncontent-length: 3\r\nTransfer-Encoding: x'),
            (431, 'GET / HTTP/1.1' + '\r\na: 1' * 101))
        for status, text in cases:
            with self.subTest(text=text[:60]), self.assertRaises(torc.BadInput) as caught:
                torc.parse_head(text.encode('latin-1'))
            self.assertEqual(status, caught.exception.http, text[:60])

    def test_an_answer_is_one_piece_and_not_to_be_cached_framed_or_sniffed(self) -> None:
        self.assertEqual(
            b'HTTP/1.1 200 OK\r\nx-content-type-options: nosniff\r\nx-frame-options: DENY\r\ncache-control: no-store\r\n'
            b'content-type: application/json\r\ncontent-length: 2\r\n\r\n{}', torc.format_answer(200, b'{}'))
        self.assertNotIn(b'content-type:', torc.format_answer(200, b''))


class AccessTest(unittest.TestCase):
    """Who may ask, decided on a head alone."""
    TOKEN = 'T' * 43

    def verdict(self, path: str = '/x', token: str = TOKEN, method: str = 'GET', **fields: str) -> int:
        """200, or the status of the refusal."""
        head = torc.parse_head(http_request(method, path, **fields)[:-4])
        try:
            torc.check_access(head, token.encode(), {'127.0.0.1', '::1', 'localhost', 'node1'})
        except torc.TorcError as error:
            return error.http
        return 200

    def test_the_token_opens_as_bearer_and_as_password_of_anybody(self) -> None:
        basic = base64.b64encode(f'anybody:{self.TOKEN}'.encode()).decode()
        for field, status in ((f'Bearer {self.TOKEN}', 200), (f'bearer {self.TOKEN}', 200), (f'Basic {basic}', 200), ('', 401),
                              ('Bearer', 401), (f'Bearer {self.TOKEN}x', 401), (f'Bearer {self.TOKEN[1:]}', 401), ('Basic ???', 401),
                              (f'Digest {self.TOKEN}', 401), ('Basic ' + base64.b64encode(self.TOKEN.encode()).decode(), 401), (self.TOKEN, 401)):
            with self.subTest(field=field):
                self.assertEqual(status, self.verdict(authorization=field))

    def test_every_method_needs_it_and_only_healthz_does_not(self) -> None:
        for method in ('GET', 'HEAD', 'POST', 'PUT', 'DELETE', 'PATCH', 'OPTIONS', 'TRACE', 'CONNECT', 'BREW'):
            self.assertEqual(401, self.verdict(method=method))
            self.assertEqual(200, self.verdict(method=method, token=''))
        self.assertEqual(200, self.verdict('/healthz'))
        for path in ('/healthz/', '/Healthz', '/healthz/..', '//healthz', '/%68ealthz'):
            self.assertEqual(401, self.verdict(path))

    def test_only_our_own_names_are_answered_to(self) -> None:
        for host, status in (('127.0.0.1:8080', 200), ('localhost', 200), ('LOCALHOST.:1', 200), ('[::1]:80', 200), ('node1:9', 200), ('', 400),
                             ('evil.example', 403), ('127.0.0.1.evil.example', 403), ('localhost:port', 400), ('[::1', 400), ('a b', 403),
                             ('127.0.0.2', 403), ('::1', 400)):
            with self.subTest(host=host):
                self.assertEqual(status, self.verdict(host=host, token=''))
                self.assertEqual(status, self.verdict('/healthz', host=host))

    def test_pages_of_other_sites_are_refused(self) -> None:
        for fields, status in (({'origin': 'http://127.0.0.1:80', 'host': '127.0.0.1:80'}, 200), ({'origin': 'http://127.0.0.1:81', 'host': '127.0.0.1:80'}, 403),
                               ({'origin': 'null'}, 403), ({'origin': 'https://127.0.0.1'}, 403), ({'sec_fetch_site': 'same-origin'}, 200),
                               ({'sec_fetch_site': 'none'}, 200), ({'sec_fetch_site': 'cross-site'}, 403), ({'sec_fetch_site': 'same-site'}, 403)):
            with self.subTest(fields=fields):
                self.assertEqual(status, self.verdict(token='', **fields))


class StateFilesTest(WorldTest):
    """Token, connection file, directories."""

    def setUp(self) -> None:
        super().setUp()
        os.chmod(self.world.directory, 0o700)
        self.database = self.world.path('torc.db')

    def test_a_token_is_made_once_and_is_private(self) -> None:
        path = self.database + '.token'
        mask = os.umask(0)
        self.addCleanup(os.umask, mask)
        token = torc.keep_token(path)
        self.assertRegex(token, r'\A[0-9A-Za-z_-]{43}\Z')
        self.assertEqual(0o600, os.stat(path).st_mode & 0o777)
        self.assertEqual(token, torc.keep_token(path))
        self.assertNotEqual(token, torc.keep_token(path, is_new=True))

    def test_a_token_file_that_others_may_know_is_refused(self) -> None:
        path = self.database + '.token'
        torc.keep_token(path)
        os.chmod(path, 0o640)
        self.assertRaisesRegex(torc.Denied, 'not a private file', torc.read_token, path)
        os.chmod(path, 0o600)
        os.link(path, path + '2')
        self.assertRaisesRegex(torc.Denied, 'not a private file', torc.read_token, path)
        os.unlink(path)
        os.symlink(path + '2', path)
        self.assertRaisesRegex(torc.Denied, 'cannot read', torc.read_token, path)
        os.unlink(path)
        os.mkfifo(path, 0o600)
        self.assertRaisesRegex(torc.Denied, 'not a private file', torc.read_token, path)
        self.assertRaisesRegex(torc.Denied, 'no token file', torc.read_token, path + '3')

    def test_a_directory_that_others_may_change_is_refused(self) -> None:
        place = self.world.path('shared', 'torc.db')
        os.mkdir(os.path.dirname(place))
        for mode, is_good in ((0o700, True), (0o755, True), (0o777, False), (0o757, False), (0o1777, True)):
            os.chmod(os.path.dirname(place), mode)
            with self.subTest(mode=oct(mode)):
                if is_good:
                    torc.prepare_database_directory(place)
                else:
                    self.assertRaisesRegex(torc.Denied, 'chmod go-w', torc.prepare_database_directory, place)
        torc.prepare_database_directory(self.world.path('new', 'er', 'torc.db'))
        self.assertEqual(0o700, os.stat(self.world.path('new', 'er')).st_mode & 0o777)
        self.world.write('file', '')
        self.assertRaisesRegex(torc.BadInput, 'cannot make the directory', torc.prepare_database_directory, self.world.path('file', 'torc.db'))

    def test_a_connection_file_counts_while_its_process_lives(self) -> None:
        options = torc.ServerOptions(self.database)
        with torc.connection_file(options, ['http://127.0.0.1:1/torc-service/v1']):
            found = torc.read_connection_file(self.database)
            self.assertEqual(0o600, os.stat(self.database + '.connection').st_mode & 0o777)
            self.assertEqual((os.getpid(), 'http://127.0.0.1:1/torc-service/v1', self.database + '.token'),
                             (found['pid'], found['url'], found['token_file']))
            for change, lives in (({'start_ticks': found['start_ticks'] + 1}, False), ({'boot_id': 'other'}, False), ({'pid': 2 ** 22 + 5}, False),
                                  ({'pid': None}, False), ({'host': 'elsewhere'}, None), ({}, True)):
                self.assertIs(lives, torc.process_lives(dict(found, **change)))
        self.assertIsNone(torc.read_connection_file(self.database))
        self.assertFalse(os.path.exists(self.database + '.connection'))

    def test_only_its_writer_removes_a_connection_file(self) -> None:
        with torc.connection_file(torc.ServerOptions(self.database), ['http://127.0.0.1:1']):
            torc.write_atomically(self.database + '.connection', torc.format_json(
                dict(torc.describe_process(), url='http://127.0.0.1:2', server_id='another')).encode())
        self.assertEqual('another', torc.read_connection_file(self.database)['server_id'])

    def test_a_damaged_connection_file_names_the_cure(self) -> None:
        for text in ('', '{', '[]', '{"url": 1}'):
            torc.write_atomically(self.database + '.connection', text.encode())
            self.assertRaisesRegex(torc.Denied, 'is damaged: remove it', torc.read_connection_file, self.database)

    def test_nobody_but_this_machine_is_let_in_without_a_token(self) -> None:
        self.assertRaisesRegex(torc.BadInput, '--no-auth', torc.open_listener, '0.0.0.0', 0, False)
        torc.open_listener('127.0.0.1', 0, False).close()
        with contextlib.closing(torc.open_listener('127.0.0.1', 0, True)) as listener:
            self.assertFalse(listener.get_inheritable())
            self.assertRaisesRegex(torc.Conflict, '--port 0 takes any free one', torc.open_listener, '127.0.0.1', listener.getsockname()[1], True)
        self.assertRaisesRegex(torc.BadInput, 'no address', torc.open_listener, 'no such name', 0, True)
        self.assertRaises(torc.TorcError, torc.open_listener, '127.0.0.1', 70000, True)


class LeaseTest(WorldTest):
    """The lease beside a database on a network file system."""

    def setUp(self) -> None:
        super().setUp()
        self.database = self.world.path('torc.db')
        self.now = 1000.0

    def lease(self, **changes: Any) -> Any:
        """A lease by the test's clock, of this process or of one described by changes."""
        lease = torc.Lease(self.database, lambda: self.now)
        lease.mine.update(changes)
        return lease

    def test_one_holds_it_until_it_gives_it_back(self) -> None:
        first = self.lease()
        first.take()
        self.assertEqual(0o600, os.stat(self.database + '.lease').st_mode & 0o777)
        self.assertRaisesRegex(torc.Conflict, f'process {os.getpid()} on host', self.lease().take)
        first.release()
        second = self.lease()
        second.take()
        first.release()     # not its own any more
        self.assertEqual(second.mine['id'], second.read()['id'])

    def test_a_dead_process_of_this_host_loses_it_at_once(self) -> None:
        self.lease(start_ticks=1).take()
        heir = self.lease()
        heir.take()
        self.assertEqual((heir.mine['id'], 2), (heir.read()['id'], heir.read()['generation']))
        self.assertFalse(os.path.exists(self.database + '.lease.takeover'))

    def test_another_host_loses_it_after_three_periods_of_silence_by_our_clock(self) -> None:
        holder = self.lease(host='elsewhere')
        holder.take()
        heir, pauses = self.lease(), []
        sleep, torc.time.sleep = torc.time.sleep, lambda pause_s: (pauses.append(pause_s), self.pass_time(holder, len(pauses)))
        self.addCleanup(setattr, torc.time, 'sleep', sleep)
        heir.take(wait_s=60)
        self.assertAlmostEqual(5 + 30, self.now - 1000, delta=1.5)
        self.assertRaisesRegex(torc.Conflict, 'taken the database over', holder.renew)
        heir.renew()

    def pass_time(self, holder: Any, count: int) -> None:
        """A second goes by; in the fifth the holder gives a last sign."""
        self.now += 1
        if count == 5:
            holder.write()

    def test_a_person_may_take_it_over(self) -> None:
        self.lease(host='elsewhere').take()
        self.assertRaises(torc.Conflict, self.lease().take)
        heir = self.lease()
        heir.take(takes_over=True)
        self.assertEqual(heir.mine['id'], heir.read()['id'])

    def test_it_is_renewed_once_a_period(self) -> None:
        lease = self.lease()
        lease.take()
        for seconds, renewals in ((9, 0), (2, 1), (9, 1), (11, 2)):
            self.now += seconds
            lease.renew()
            self.assertEqual(renewals, lease.read()['renewals'])

    def test_a_disk_that_is_full_for_a_moment_does_not_lose_it(self) -> None:
        def fail(*_: Any) -> None:
            raise OSError(28, 'No space left on device')

        lease = self.lease()
        lease.take()
        write, torc.write_atomically = torc.write_atomically, fail
        self.addCleanup(setattr, torc, 'write_atomically', write)
        self.now += 15
        lease.renew()
        self.now += 10
        self.assertRaisesRegex(torc.Conflict, 'could not be renewed.*No space left', lease.renew)

    def test_a_database_on_a_network_file_system_gets_one(self) -> None:
        kind, torc.LOCAL_FILESYSTEMS = torc.LOCAL_FILESYSTEMS, frozenset()
        self.addCleanup(setattr, torc, 'LOCAL_FILESYSTEMS', kind)
        store, lease = torc.hold_database(self.database)
        self.assertTrue(os.path.exists(self.database + '.lease'))
        self.assertRaises(torc.Conflict, torc.hold_database, self.database)
        store.close()
        lease.release()
        self.assertFalse(os.path.exists(self.database + '.lease'))


# What brings servers down, and the tests that show that it does not bring down this one (the first two over TLS too):
#
#   an answer in two packets          ServerTest: a kept-alive POST is answered at once; FramingTest: an answer is one piece
#   slow clients, half requests       ServerTest: hundreds of half requests, bytes one by one, a request that does not arrive,
#                                     a reader that does not read; TlsServerTest: who is slow to shake hands
#   pipelining                        ServerTest: in their order, a flood of them is bounded
#   head bombs, no HTTP at all        ServerTest: rubbish; FramingTest: what is not plain HTTP; TlsServerTest: plain request, hello to a plain port
#   wrong or huge Content-Length      FramingTest: what is not plain HTTP; ServerTest: a body too large
#   chunked bodies                    FramingTest, ServerTest: rubbish
#   many connections at once          ServerTest: many may knock; TurnTest: who never asks makes room
#   no descriptors left               TurnTest: without descriptors
#   client gone before the answer     ServerTest: a client that is gone
#   what JSON can hold                ApiTest: mistakes get a clear 4xx
#   all of it, at random              FaultTest: rubbish of all kinds


class ServerTest(WorldTest):
    """The loop, on real sockets."""
    TOKEN = ''

    def setUp(self) -> None:
        super().setUp()
        self.server = ServerThread(self.world.path('torc.db'), self.TOKEN, tls=self.tls())
        self.addCleanup(self.server.stop)       # before the world's own end
        logging.getLogger('torc').setLevel(logging.CRITICAL)
        self.addCleanup(logging.getLogger('torc').setLevel, logging.NOTSET)

    def tls(self) -> Optional[Tls]:
        """None: plain HTTP."""
        return None

    def set_constant(self, name: str, value: Any) -> None:
        """Another value for a constant of torc, in this test."""
        self.addCleanup(setattr, torc, name, getattr(torc, name))
        setattr(torc, name, value)

    def test_requests_follow_each_other_on_one_connection(self) -> None:
        with self.server.connect() as client:
            for _ in range(3):
                client.sendall(http_request())
                answer = read_answers(client, 1)
                self.assertTrue(answer.startswith(b'HTTP/1.1 200 OK\r\n') and answer.endswith(b'\r\n\r\n{"status":"ok"}'), answer)

    def test_pipelined_requests_are_answered_in_their_order(self) -> None:
        body = b'{"name": "w%d", "user": "u"}'
        data = b''.join(http_request('POST', '/torc-service/v1/workflows', body % number) for number in range(20))
        with self.server.connect() as client:
            client.sendall(data)
            answer = read_answers(client, 20)
        self.assertEqual([b'w%d' % number for number in range(20)], re.findall(rb'"name":"(w\d+)"', answer))

    def test_a_flood_of_pipelined_requests_is_bounded(self) -> None:
        requests, count = http_request() * 500, 10
        with self.server.connect() as client:
            for _ in range(count):
                client.sendall(requests)
            self.assertEqual([200] * 500 * count, statuses(read_answers(client, 500 * count)))
        self.assertTrue(all(len(one.received) < 200000 for one in self.server.server.connections))

    def test_bytes_may_come_one_by_one(self) -> None:
        data = b'\r\n' + http_request('POST', '/torc-service/v1/workflows', b'{"name":"w","user":"u"}')
        answer = self.server.ask(*[data[index:index + 1] for index in range(len(data))])
        self.assertEqual([200], statuses(answer))

    def test_http_1_0_and_close_end_the_connection(self) -> None:
        for request in (http_request(version='1.0'), http_request(connection='close')):
            with self.server.connect() as client:
                client.sendall(request)
                answer = read_all(client)   # until the server hangs up
            self.assertIn(b'\r\nconnection: close\r\n', answer)
            self.assertTrue(answer.endswith(b'{"status":"ok"}'))

    def test_head_answers_without_the_body(self) -> None:
        answer = self.server.ask(http_request('HEAD'))
        self.assertTrue(answer.endswith(b'content-length: 15\r\n\r\n'), answer)

    def test_other_methods_are_4xx(self) -> None:
        for method in ('OPTIONS', 'PATCH', 'TRACE', 'BREW'):
            self.assertEqual([405], statuses(self.server.ask(http_request(method))))
        self.assertEqual([404], statuses(self.server.ask(http_request(path='/nowhere'))))

    def test_who_expects_100_is_told_to_go_on(self) -> None:
        body = b'{"name":"w","user":"u"}'
        request = http_request('POST', '/torc-service/v1/workflows', body, expect='100-continue')
        with self.server.connect() as client:
            client.sendall(request[:-len(body)])
            self.assertEqual(b'HTTP/1.1 100 Continue\r\n\r\n', client.recv(1000))
            client.sendall(body)
            self.assertEqual([200], statuses(read_answers(client, 1)))
        self.assertEqual([417], statuses(self.server.ask(http_request(expect='wonders'))))

    def test_a_body_too_large_is_refused_before_it_comes(self) -> None:
        head = http_request('POST', '/torc-service/v1/workflows', content_length=str(torc.MAX_BODY_BYTES + 1), expect='100-continue')
        with self.server.connect() as client:
            client.sendall(head)
            self.assertEqual([413], statuses(read_all(client)))
        with self.server.connect() as client:   # and one that does not wait for leave still gets to read why
            client.sendall(http_request('POST', '/torc-service/v1/workflows', b'x' * (torc.MAX_BODY_BYTES + 1)))
            self.assertEqual([413], statuses(read_all(client)))

    def test_rubbish_is_answered_and_cut_off(self) -> None:
        for status, data in ((400, b'\x16\x03\x01\x02\x00\x01\x00'), (400, b'\0' * 100), (414, b'GET /' + b'x' * 20000), (400, b'GET / HTTP/1.1\nHost: x\n\r\n\r\n'),
                             (431, b'GET / HTTP/1.1\r\n' + b'a: 1\r\n' * 20000), (431, http_request(path='/', x='y' * 70000)),
                             (501, http_request('POST', '/', transfer_encoding='chunked') + b'5\r\nGET /\r\n0\r\n\r\n')):
            with self.subTest(data=data[:30]):
                with self.server.connect() as client:
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        client.sendall(data)
                    self.assertEqual([status], statuses(read_all(client)))
        self.assertEqual([200], statuses(self.server.ask(http_request())))

    def test_a_kept_alive_post_is_answered_at_once(self) -> None:
        waits = []
        with self.server.connect() as client:
            for _ in range(21):
                begun = time.monotonic()
                client.sendall(http_request('POST', '/torc-service/v1/workflows', b'{"name":"w","user":"u"}'))
                read_answers(client, 1)
                waits.append(time.monotonic() - begun)
        self.assertLess(sorted(waits)[10], 0.035)   # an answer in two packets waits 40 ms for the client's acknowledgement

    def test_hundreds_of_half_requests_hold_up_nobody(self) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                client = stack.enter_context(self.server.connect())
                client.sendall(http_request('POST', '/torc-service/v1/workflows', b'{"name":"w","user":"u"}')[:-5])
            begun = time.monotonic()
            self.assertEqual([200], statuses(self.server.ask(http_request())))
            self.assertLess(time.monotonic() - begun, 2)
            self.world.wait(lambda: len(self.server.server.connections) >= 200, 10, 'all of them')
            self.assertTrue(all(one.deadline < math.inf for one in self.server.server.connections if one.head))

    def test_a_request_that_does_not_arrive_ends_in_time_and_a_quiet_connection_stays(self) -> None:
        self.set_constant('CLIENT_DEADLINE_S', 0.2)
        with self.server.connect() as quiet:
            quiet.sendall(http_request())
            read_answers(quiet, 1)
            for part in (b'GET', http_request()[:-2], http_request('POST', '/', b'body')[:-2]):
                with self.server.connect() as slow:
                    slow.sendall(part)
                    self.assertEqual([408], statuses(read_all(slow)))
            quiet.sendall(http_request())
            self.assertEqual([200], statuses(read_answers(quiet, 1)))

    def test_a_reader_that_does_not_read_is_given_up_and_holds_up_nobody(self) -> None:
        body = torc.format_json({'workflow_id': 1, 'data': {'text': 'x' * 1000000}}).encode()
        self.server.ask(http_request('POST', '/torc-service/v1/workflows', b'{"name":"w","user":"u"}'))
        for _ in range(20):
            self.assertEqual([200], statuses(self.server.ask(http_request('POST', '/torc-service/v1/events', body))))
        self.set_constant('CLIENT_DEADLINE_S', 0.5)
        with contextlib.ExitStack() as stack, socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(('127.0.0.1', self.server.port))
            slow = stack.enter_context(contextlib.closing(self.server.wrap(slow)))
            slow.sendall(http_request(path='/torc-service/v1/events?workflow_id=1') * 2)
            self.assertEqual([200], statuses(self.server.ask(http_request())))
            self.world.wait(lambda: not self.server.server.connections, 20, 'the slow reader to be dropped')

    def test_a_patient_reader_gets_all_of_a_large_answer(self) -> None:
        self.server.ask(http_request('POST', '/torc-service/v1/workflows', b'{"name":"w","user":"u"}'))
        body = torc.format_json({'workflow_id': 1, 'data': {'text': 'x' * 1500000}}).encode()
        for _ in range(4):
            self.server.ask(http_request('POST', '/torc-service/v1/events', body))
        answer = self.server.ask(http_request(path='/torc-service/v1/events?workflow_id=1') + http_request())
        self.assertEqual([200, 200], statuses(answer))
        self.assertGreater(len(answer), 6000000)

    def test_a_client_that_is_gone_before_the_answer_harms_nobody(self) -> None:
        for _ in range(30):
            with self.server.connect() as client:
                client.sendall(http_request() * 3)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))     # a reset, not an end
        self.assertEqual([200], statuses(self.server.ask(http_request())))
        self.world.wait(lambda: not self.server.server.connections, 10, 'the connections to be forgotten')

    def test_many_may_knock_at_once(self) -> None:
        clients = [self.server.connect() for _ in range(300)]
        for client in clients:
            client.sendall(http_request())
        for client in clients:
            self.assertEqual([200], statuses(read_answers(client, 1)))
            client.close()

    def test_a_span_id_comes_back_unless_it_is_odd(self) -> None:
        self.assertIn(b'\r\nx-span-id: ab-12\r\n', self.server.ask(http_request(x_span_id='ab-12')))
        self.assertNotIn(b'x-span-id', self.server.ask(http_request(x_span_id='a b\x80')))


class Reader:
    """Somebody who reads a stream of events on a socket."""

    def __init__(self, port: int, path: str, last_id: str = '', receive_bytes: int = 0, **fields: str) -> None:
        self.socket = socket.socket()
        if receive_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(10)
        self.socket.connect(('127.0.0.1', port))
        self.socket.sendall(http_request('GET', torc.API_PREFIX + path, last_event_id=last_id, **fields))
        self.data = b''
        self.head = self.until(b'\r\n\r\n').decode()

    def until(self, end: bytes) -> bytes:
        """What comes up to an end."""
        while end not in self.data:
            data = self.socket.recv(65536)
            assert data, self.data
            self.data += data
        found, _, self.data = self.data.partition(end)
        return found

    def has_ended(self) -> bool:
        """Whether the server hangs up before long."""
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            if not self.socket.recv(65536):
                return True
        return False

    def event(self) -> Any:
        """The next event; an id alone or a sign of life counts as one."""
        return torc.parse_event(self.until(b'\n\n'))

    def types(self, last: str) -> List[str]:
        """Types of the events up to one that ends it."""
        found = [self.event().type]
        while found[-1] != last:
            found.append(self.event().type)
        return found

    def close(self) -> None:
        """Hang up."""
        self.socket.close()


class StreamTest(WorldTest):
    """Streams of events, on real sockets."""
    set_constant = ServerTest.set_constant

    def setUp(self) -> None:
        super().setUp()
        self.server = ServerThread(self.world.path('torc.db'))
        self.addCleanup(self.server.stop)       # before the world's own end
        logging.getLogger('torc').setLevel(logging.CRITICAL)
        self.addCleanup(logging.getLogger('torc').setLevel, logging.NOTSET)
        self.readers = []       # type: List[Reader]
        self.addCleanup(lambda: [reader.close() for reader in self.readers])
        self.workflow_id = self.json('POST', '/workflows', {'name': 'w', 'user': 'u'})['id']

    def json(self, method: str, path: str, body: Any = None) -> Any:
        """The value of a good answer."""
        answer = self.server.ask(http_request(method, torc.API_PREFIX + path, b'' if body is None else torc.format_json(body).encode()))
        self.assertEqual([200], statuses(answer), answer)
        return json.loads(answer.partition(b'\r\n\r\n')[2].decode())

    def read(self, query: str = '', **how: Any) -> Reader:
        """One more reader of the workflow, which has been let in."""
        reader = Reader(self.server.port, f'/workflows/{self.workflow_id}/events/stream{query}', **how)
        self.readers.append(reader)
        self.assertTrue(reader.head.startswith('HTTP/1.1 200 OK\r\n'), reader.head)
        return reader

    def tell(self, event_type: str, severity: str = 'info', count: int = 1, **data: Any) -> None:
        """Let the server announce something, after the commit of a request's transaction."""
        self.server.server.tick = lambda store: [torc.announce(store, self.workflow_id, event_type, dict(data, n=number), severity) for number in range(count)] and False
        self.server.server.tick_at = 0.0
        self.server.ask(http_request())

    def test_a_stream_ends_when_its_workflow_is_gone(self) -> None:
        self.set_constant('KEEP_ALIVE_S', 0.05)
        reader = self.read()
        reader.until(b':\n\n')     # while it is there
        self.json('DELETE', f'/workflows/{self.workflow_id}')
        self.assertTrue(reader.has_ended())

    def test_a_reader_gets_what_happens_from_now_on(self) -> None:
        self.tell('early')
        reader = self.read()
        self.assertIn('content-type: text/event-stream\r\nconnection: close', reader.head)
        self.assertNotIn('content-length', reader.head)
        self.tell('done', 'error', text='ü\n')
        first, event = reader.event(), reader.event()
        self.assertEqual(('', re.sub('0$', '1', first.id)), (first.type, event.id))
        self.assertEqual('done', event.type)
        self.assertEqual({'workflow_id': self.workflow_id, 'timestamp': event.data['timestamp'], 'event_type': 'done', 'severity': 'error',
                          'data': {'text': 'ü\n', 'n': 0}}, event.data)
        self.assertLess(abs(event.data['timestamp'] / 1000 - time.time()), 60)

    def test_it_ends_with_the_connection_for_old_clients_too(self) -> None:
        with self.server.connect() as client:
            client.sendall(http_request(path=f'{torc.API_PREFIX}/workflows/{self.workflow_id}/events/stream', version='1.0'))
            self.assertIn(b'\r\nconnection: close\r\n\r\n', client.recv(1000))

    def test_a_head_is_answered_and_ends(self) -> None:
        with self.server.connect() as client:
            client.sendall(http_request('HEAD', f'{torc.API_PREFIX}/workflows/{self.workflow_id}/events/stream'))
            answer = read_all(client)
        self.assertTrue(answer.startswith(b'HTTP/1.1 200') and answer.endswith(b'connection: close\r\n\r\n'), answer)
        self.assertEqual({}, self.server.server.feeds.by_subject)

    def test_an_unknown_workflow_is_404(self) -> None:
        self.assertEqual([404], statuses(self.server.ask(http_request(path=torc.API_PREFIX + '/workflows/99/events/stream'))))

    def test_a_level_leaves_out_what_is_below_it(self) -> None:
        readers = {level: self.read(f'?level={level}') for level in ('debug', 'info', 'warning', 'error', 'nonsense', '')}
        for severity in torc.SEVERITIES:
            self.tell(severity + '!', severity)
        self.tell('end', 'error')
        heard = {level: [word.rstrip('!') for word in reader.types('end')[1:-1]] for level, reader in readers.items()}
        self.assertEqual({'debug': list(torc.SEVERITIES), 'info': list(torc.SEVERITIES[1:]), 'warning': ['warning', 'error'], 'error': ['error'],
                          'nonsense': list(torc.SEVERITIES[1:]), '': list(torc.SEVERITIES[1:])}, heard)

    def test_who_comes_back_gets_what_was_missed_once(self) -> None:
        reader = self.read()
        self.tell('a', count=5)
        last_id = [reader.event() for _ in range(4)][-1].id     # the opening and three of them
        reader.close()
        self.world.wait(lambda: not any(one.feed for one in self.server.server.connections), 10, 'the reader to be forgotten')
        self.tell('b', count=2000)      # while nobody reads
        reader = self.read(last_id=last_id)
        self.tell('end')
        events = [reader.event() for _ in range(2003)]
        self.assertEqual(['a'] * 2 + ['b'] * 2000 + ['end'], [event.type for event in events])
        numbers = [int(event.id.partition('-')[2]) for event in events]
        self.assertEqual(list(range(4, 2007)), numbers)
        self.assertEqual(['end'], self.read(last_id=events[-2].id).types('end'))

    def test_who_comes_back_too_late_or_to_another_server_is_told(self) -> None:
        self.set_constant('MAX_FEED_EVENTS', 100)
        epoch = self.read().event().id.partition('-')[0]
        self.tell('a', count=175)
        reader = self.read(last_id=f'{epoch}-10')
        self.assertEqual(('warning', {'dropped': 90}, f'{epoch}-100'), (lambda event: (event.type, event.data, event.id))(reader.event()))
        self.assertEqual(f'{epoch}-101', reader.event().id)
        for last_id in ('0123456789ab-10', f'{epoch}-176', f'{epoch}-x', f'{epoch}--1', f'{epoch}', 'rubbish', '\xff'):
            event = self.read(last_id=last_id).event()
            self.assertEqual(('warning', None, f'{epoch}-175'), (event.type, event.data['dropped'], event.id), last_id)

    def test_a_slow_reader_holds_up_nobody_and_is_told_what_it_missed(self) -> None:
        self.set_constant('MAX_FEED_EVENTS', 200)
        slow, quick = self.read(receive_bytes=4096), self.read()
        server = self.server.server
        for _ in range(100):        # more than the system's buffers take
            self.tell('flood', count=100, text='x' * 1000)
            for _ in range(100):
                quick.event()
        held = [len(one.unsent) for one in server.connections if one.feed]
        self.assertLess(max(held), torc.PIECE_BYTES + 5000)
        self.tell('end')
        events = [slow.event()]
        while events[-1].type != 'end':
            events.append(slow.event())
        dropped = sum(event.data['dropped'] for event in events if event.type == 'warning')
        self.assertGreater(dropped, 1000)
        self.assertEqual(10000, dropped + len([event for event in events if event.type == 'flood']))
        self.assertEqual([200], statuses(self.server.ask(http_request())))

    def test_a_reader_that_takes_nothing_is_cut_off(self) -> None:
        self.set_constant('CLIENT_DEADLINE_S', 0.5)
        self.set_constant('KEEP_ALIVE_S', 0.1)      # signs of life do not make it live longer
        self.read(receive_bytes=4096)
        for _ in range(80):
            self.tell('flood', count=100, text='x' * 1000)
        self.world.wait(lambda: not any(one.feed for one in self.server.server.connections), 10, 'the reader to be cut off')

    def test_a_quiet_stream_gives_signs_of_life(self) -> None:
        self.set_constant('KEEP_ALIVE_S', 0.05)
        reader = self.read()
        self.assertEqual(['', '', ''], [reader.event().type for _ in range(3)])
        self.assertLessEqual(self.server.server.keep_alive_at, time.monotonic() + 1)
        reader.close()
        self.world.wait(lambda: self.server.server.keep_alive_at == math.inf, 10, 'nobody to be left')

    def test_a_thousand_readers(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        need('descriptors', hard == resource.RLIM_INFINITY or hard > 2200, 'the right to open 2,200 files')
        self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2200), hard))
        readers = [self.read('?level=warning' if number % 2 else '') for number in range(1000)]
        self.tell('first', 'info', 3)
        self.tell('last', 'error')
        for number, reader in enumerate(readers):
            self.assertEqual([''] + ['first'] * (0 if number % 2 else 3) + ['last'], reader.types('last'))
            reader.close()
        self.world.wait(lambda: not any(one.feed for one in self.server.server.connections), 20, 'all to be forgotten')

    def test_what_a_reader_sends_is_passed_over(self) -> None:
        reader = self.read()
        for _ in range(20):
            reader.socket.sendall(b'x' * 100000)
        self.tell('end')
        self.assertEqual(['', 'end'], reader.types('end'))
        self.assertEqual([0], [len(one.received) for one in self.server.server.connections if one.feed])

    def test_nothing_is_kept_for_those_who_stay_away(self) -> None:
        feeds = self.server.server.feeds
        self.read().close()
        self.world.wait(lambda: feeds.by_subject and not any(feed.readers for feed in feeds.by_subject.values()), 10, 'the reader to be forgotten')
        self.tell('kept')
        self.assertEqual([1], [len(feed.events) for feed in feeds.by_subject.values()])
        self.set_constant('RESUME_S', 0.0)
        self.tell('late')
        self.assertEqual({}, feeds.by_subject)
        for number in range(50):
            feeds.leave(feeds.join(number, None), None)
        self.assertLessEqual(len(feeds.by_subject), torc.MAX_IDLE_FEEDS)

    def test_a_feed_is_bounded_in_bytes_too(self) -> None:
        feed = torc.Feed(1)
        for _ in range(30):
            feed.add(1, 'large', {'text': 'x' * 1000000})
        self.assertLess(sum(len(text) for _, text in feed.events), torc.MAX_FEED_BYTES)
        self.assertEqual(31, feed.end())

    def test_the_end_of_the_server_is_the_end_of_its_streams(self) -> None:
        reader = self.read()
        self.tell('last')
        self.server.stop()
        self.assertEqual(['', 'last'], reader.types('last'))
        self.assertEqual(b'', reader.socket.recv(10))
        self.assertFalse(self.server.is_alive())

    def test_what_is_not_committed_is_not_sent(self) -> None:
        reader = self.read()
        node = {'workflow_id': self.workflow_id, 'hostname': 'h', 'pid': 1, 'start_time': '2026-01-01T00:00:00Z', 'num_cpus': 4, 'memory_gb': 8.0,
                'num_gpus': 0, 'num_nodes': 1, 'compute_node_type': 'local'}
        store, failures = self.server.server.store, [sqlite3.OperationalError('database or disk is full')]

        class FailingStore:
            """The store, whose next transaction fails at its end."""

            def __getattr__(self, name: str) -> Any:
                return getattr(store, name)

            @contextlib.contextmanager
            def transaction(self) -> Iterator[None]:
                """Fails once."""
                with store.transaction():
                    yield
                    if failures:
                        raise failures.pop()

        self.server.server.store = FailingStore()
        body = torc.format_json(node).encode()
        self.assertEqual([503], statuses(self.server.ask(http_request('POST', torc.API_PREFIX + '/compute_nodes', body))))
        self.json('POST', '/compute_nodes', dict(node, hostname='second'))
        self.assertEqual('second', [reader.event(), reader.event()][1].data['data']['hostname'])


class AdminServerTest(WorldTest):
    """What only the owner is told by a server."""

    def setUp(self) -> None:
        super().setUp()
        self.field = 'Bearer hidden-hidden-hidden-hidden-hidden-hidden'
        self.server = ServerThread(self.world.path('torc.db'), self.field[7:])
        self.addCleanup(self.server.stop)

    def request(self, method: str, path: str, body: Any = None, **fields: str) -> bytes:
        """Bytes of a request of the owner."""
        data = body if isinstance(body, bytes) else b'' if body is None else torc.format_json(body).encode()
        return http_request(method, torc.API_PREFIX + path, data, authorization=self.field, **fields)

    def json(self, path: str) -> Any:
        """The value of a good answer."""
        answer = self.server.ask(self.request('GET', path))
        self.assertEqual([200], statuses(answer), answer)
        return json.loads(answer.partition(b'\r\n\r\n')[2].decode())

    def test_where_everybody_may_ask_nobody_is_an_administrator(self) -> None:
        server = ServerThread(self.world.path('open.db'))
        self.addCleanup(server.stop)
        for method, path, body in (('GET', '/admin/api-stats', b''), ('GET', '/admin/audit-log', b''), ('GET', '/admin/api-events/stream', b''),
                                   ('POST', '/admin/sql', b'{"sql": "SELECT 1"}')):
            answer = server.ask(http_request(method, torc.API_PREFIX + path, body))
            self.assertEqual([403], statuses(answer), answer)

    def test_requests_are_told_without_what_proves_who_asks(self) -> None:
        plain, full = (Reader(self.server.port, '/admin/api-events/stream' + query, authorization=self.field) for query in ('', '?include_bodies=true'))
        self.addCleanup(plain.close)
        self.addCleanup(full.close)
        self.server.ask(self.request('POST', '/workflows?x=1', b'{"name":"secret","user":"u"}', x_span_id='span1', cookie='a=hidden'))
        self.server.ask(self.request('POST', '/workflows', {'name': 'x' * 10000}))
        for reader, has_bodies in ((plain, False), (full, True)):
            while True:
                event = reader.event()
                if event.data and event.data['method'] == 'POST':
                    break
            self.assertEqual(('api', 'POST', torc.API_PREFIX + '/workflows', 'x=1', 200, 'span1'), (
                event.type, *(event.data[key] for key in ('method', 'path', 'query', 'status', 'request_id'))))
            self.assertNotIn('hidden', str(event))
            self.assertEqual(has_bodies, 'secret' in str(event))
            self.assertTrue(0 <= event.data['latency_ms'] < 10000 and event.data['timestamp_ms'])
            event = reader.event()
            self.assertEqual((422, 8192 if has_bodies else 0), (event.data['status'], len(event.data.get('request_body', ''))))

    def test_requests_and_bytes_are_counted(self) -> None:
        before = self.json('/admin/api-stats')['buckets'][0]
        self.server.ask(self.request('GET', '/ping') * 3 + self.request('GET', '/nowhere') + b'rubbish\r\n\r\n')
        answer = self.json('/admin/api-stats?window_seconds=7200&interval_seconds=3600')
        after = answer['buckets'][0]
        self.assertEqual((3600, 3600, 0), (answer['window_seconds'], answer['interval_seconds'], after['start_ms'] % 3600000))
        if after['start_ms'] == before['start_ms'] // 3600000 * 3600000:    # not across a full hour
            self.assertGreaterEqual(after['request_count'], 6)
            self.assertEqual((2, 0), (after['status_4xx'], after['status_5xx']))
            self.assertGreater(after['bytes_in'], 4 * len(http_request()))
            self.assertGreater(after['bytes_out'], 6 * 200)
        self.assertEqual(2, len(self.json('/admin/api-stats?window_seconds=2&interval_seconds=1')['buckets']))

    def test_sql_has_a_transaction_of_its_own(self) -> None:
        workflow = self.request('POST', '/workflows', {'name': 'w', 'user': 'u'})
        sql = self.request('POST', '/admin/sql/', {'sql': "UPDATE workflow SET description = 'd' WHERE id = 1", 'write': True})
        parsed = [torc.Request(torc.parse_head(data.partition(b'\r\n\r\n')[0]), data.partition(b'\r\n\r\n')[2], torc.Caller('tester', True))
                  for data in (workflow, sql, workflow)]
        self.server.stop()
        with contextlib.closing(torc.Store(self.server.database)) as store:
            counting = CountingStore(store)
            server = torc.Server(counting, torc.open_listener('127.0.0.1', 0, True), torc.Admission(self.field[7:]))
            self.addCleanup(server.close)
            self.assertEqual([200] * 3, [status for answer in server.answer_all(parsed) for status in statuses(answer)])
            self.assertEqual(3, counting.writes)


@slow
class TlsServerTest(ServerTest):
    """All of that over TLS, and what is TLS's own."""

    def tls(self) -> Optional[Tls]:
        """A certificate for localhost."""
        return Tls(self.world)

    def plain(self) -> socket.socket:
        """A client that has not yet said hello."""
        return socket.create_connection(('127.0.0.1', self.server.port), 10)

    def test_a_plain_request_is_told_to_say_https(self) -> None:
        with self.plain() as client:
            client.sendall(http_request('POST', '/', b'x' * 100000))
            answer = read_all(client)
        self.assertEqual([400], statuses(answer))
        self.assertIn(b'write https:// in the address', answer)

    def test_a_hello_to_a_plain_port_is_told_to_say_http(self) -> None:
        server = ServerThread(self.world.path('plain.db'))
        self.addCleanup(server.stop)
        self.assertIn(b'write http:// in the address', server.ask(b'\x16\x03\x01\x02\x00\x01\x00'))

    def test_rubbish_instead_of_a_hello_is_cut_off(self) -> None:
        for data in (b'\x16\x03\x01\x00\x05hello', b'\0' * 1000, b'\x80' * 1000):
            with self.plain() as client:
                client.sendall(data)
                self.assertEqual([], statuses(read_all(client)))
        self.assertEqual([200], statuses(self.server.ask(http_request())))

    def test_who_is_slow_to_shake_hands_holds_up_nobody_and_is_cut_off(self) -> None:
        self.set_constant('CLIENT_DEADLINE_S', 0.5)
        with self.plain() as silent, self.plain() as half:
            half.sendall(b'\x16\x03\x01\x02\x00\x01')
            self.assertEqual([200], statuses(self.server.ask(http_request())))
            for client in (silent, half):
                self.assertEqual(b'', read_all(client))

    def test_a_hello_may_come_byte_by_byte(self) -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = self.server.tls.client.wrap_bio(incoming, outgoing, server_hostname='localhost')
        with self.plain() as wire:
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                try:
                    client.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    for byte in outgoing.read():
                        wire.sendall(bytes([byte]))
                    incoming.write(wire.recv(65536))
            client.write(http_request(connection='close'))
            wire.sendall(outgoing.read())
            incoming.write(read_all(wire))
            self.assertEqual([200], statuses(client.read(65536)))
            self.assertEqual(b'', client.read(10))      # the server said in TLS that this is all: no cut, but the end

    def test_old_protocols_are_refused(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            context.options |= ssl.OP_NO_TLSv1_2 | getattr(ssl, 'OP_NO_TLSv1_3', 0)
            if hasattr(context, 'minimum_version'):
                context.minimum_version = ssl.TLSVersion.TLSv1
            context.set_ciphers('ALL:@SECLEVEL=0')
        with self.plain() as client, self.assertRaisesRegex(ssl.SSLError, '(?i)protocol.version|internal.error'):
            context.wrap_socket(client)

    def test_pages_must_come_from_https(self) -> None:
        host = f'127.0.0.1:{self.server.port}'
        for scheme, status in (('https', 200), ('http', 403)):
            self.assertEqual([status], statuses(self.server.ask(http_request(host=host, origin=f'{scheme}://{host}'))))


class TlsFilesTest(WorldTest):
    """Certificates and keys that do not do."""

    def test_what_is_wrong_with_them_is_told(self) -> None:
        good = Tls(self.world)
        for name, text in (('open.pem', TLS_KEY), ('empty.pem', ''), ('both.pem', TLS_KEY + TLS_CERTIFICATES['good'])):
            os.chmod(self.world.write(name, text), 0o604 if name == 'open.pem' else 0o600)
        path = self.world.path
        for certificate, key, kind, text in (
                ('none.pem', 'key.pem', torc.BadInput, 'cannot read .*none.pem.*: No such file'), ('good.pem', 'none.pem', torc.BadInput, 'cannot read .*none.pem: No such file'),
                ('good.pem', 'open.pem', torc.Denied, 'other users can read the key .*chmod o='), ('empty.pem', 'key.pem', torc.BadInput, 'PEM form'),
                ('good.pem', 'empty.pem', torc.BadInput, 'PEM form'), ('key.pem', 'good.pem', torc.BadInput, 'PEM form')):
            if key == 'good.pem':
                os.chmod(good.certificate, 0o600)
            with self.subTest(certificate=certificate, key=key):
                self.assertRaisesRegex(kind, text, torc.open_tls, path(certificate), path(key))
        self.assertRaisesRegex(torc.BadInput, 'no --tls-key', torc.open_tls, good.certificate, '')
        torc.open_tls(path('both.pem'), '')
        self.assertEqual(torc.read_fingerprint(good.certificate), torc.read_fingerprint(path('both.pem')))

    def test_a_key_of_another_certificate_and_an_encrypted_key(self) -> None:
        good = Tls(self.world)
        need('openssl', shutil.which('openssl'), 'openssl, to make keys')
        for name, *words in (('another.pem', 'genpkey', '-algorithm', 'EC', '-pkeyopt', 'ec_paramgen_curve:P-256'),
                             ('secret.pem', 'pkcs8', '-topk8', '-passout', 'pass:secret', '-in', good.key)):
            subprocess.run(['openssl', *words, '-out', self.world.path(name)], check=True, stderr=subprocess.DEVNULL)
            os.chmod(self.world.path(name), 0o600)
        self.assertRaisesRegex(torc.BadInput, 'is not that of the certificate', torc.open_tls, good.certificate, self.world.path('another.pem'))
        self.assertRaisesRegex(torc.BadInput, 'is encrypted: `openssl pkey', torc.open_tls, good.certificate, self.world.path('secret.pem'))


class TokenServerTest(WorldTest):
    """A server with a token."""

    def setUp(self) -> None:
        super().setUp()
        self.token = 'abcdefghijklmnopqrstuvwxyz0123456789ABCDEFG'
        self.server = ServerThread(self.world.path('torc.db'), self.token)
        self.addCleanup(self.server.stop)

    def test_nothing_is_answered_without_it_on_any_route_and_method(self) -> None:
        paths = [torc.API_PREFIX + re.sub(r'\{\w+\}', '1', route.path) for route in torc.ROUTES] + ['/', '/nowhere', torc.API_PREFIX]
        with contextlib.ExitStack() as stack:
            for path in paths:
                for method in ('GET', 'POST', 'PUT', 'DELETE', 'HEAD', 'OPTIONS', 'PATCH'):
                    client = stack.enter_context(self.server.connect())
                    client.sendall(http_request(method, path))
                    answer = read_all(client)
                    self.assertEqual([401], statuses(answer), (method, path))
                    client.close()
        self.assertIn(b'\r\nwww-authenticate: Basic', answer)
        self.assertNotIn(b'access-control', answer.lower())
        self.assertEqual([200], statuses(self.server.ask(http_request(authorization=f'Bearer {self.token}'))))

    def test_the_interface_is_described_at_the_root_and_below_the_prefix(self) -> None:
        for path in ('/openapi.json', torc.API_PREFIX + '/openapi.json'):
            self.assertEqual([401], statuses(self.server.ask(http_request(path=path))))
            answer = self.server.ask(http_request(path=path, authorization=f'Bearer {self.token}'))
            self.assertEqual([200], statuses(answer))
            self.assertEqual(torc.describe_interface(), json.loads(answer.partition(b'\r\n\r\n')[2].decode()))

    def test_a_body_is_not_waited_for_from_a_stranger(self) -> None:
        with self.server.connect() as client:
            client.sendall(http_request('POST', '/torc-service/v1/workflows', content_length='1000'))
            self.assertEqual([401], statuses(read_all(client)))

    def test_healthz_is_free_and_proves_who_it_is(self) -> None:
        self.assertTrue(self.server.ask(http_request(path='/healthz')).endswith(b'\r\n\r\n{"status":"ok"}'))
        answer = self.server.ask(http_request(path='/healthz?challenge=abc', host='127.0.0.1:99'))
        self.assertTrue(answer.endswith(f'"proof":"{torc.prove_token(self.token.encode(), "abc", self.server.port)}"}}'.encode()), answer)
        self.assertNotEqual(torc.prove_token(self.token.encode(), 'abc', 1), torc.prove_token(self.token.encode(), 'abc', 2))


# Lines of password files that other programs made. The password of all but the last is U*U.
BCRYPT_LINES = (
    'plain:$2a$05$CCCCCCCCCCCCCCCCCCCCC.E5YPO9kmyuRGyh0XouQYb4YMJKvyOeW', 'apache:$2y$05$CCCCCCCCCCCCCCCCCCCCC.E5YPO9kmyuRGyh0XouQYb4YMJKvyOeW',
    'rust:$2b$05$CCCCCCCCCCCCCCCCCCCCC.E5YPO9kmyuRGyh0XouQYb4YMJKvyOeW', 'pound:$2b$05$/OK.fbVrR/bpIqNJ5ianF.Sa7shbm4.OzKpvFnX1pQLmQW96oUlCq')


class PasswordFileTest(WorldTest):
    """Lines of password files, and who may change them."""

    def test_bcrypt_of_other_programs_is_checked_by_the_systems_library(self) -> None:
        need('bcrypt', torc.find_bcrypt(), 'a libcrypt that knows bcrypt')
        users = torc.parse_users('# ours\n\n' + '\n'.join(BCRYPT_LINES), 'f')
        self.assertEqual(['plain', 'apache', 'rust', 'pound'], list(users))
        for user, password, is_right in (('plain', b'U*U', True), ('apache', b'U*U', True), ('rust', b'U*U', True), ('rust', b'U*', False), ('rust', b'', False),
                                         ('rust', b'U*U\0more', False), ('rust', b'U*UU', False), ('pound', b'\xa3', True), ('pound', b'\xa4', False)):
            with self.subTest(user=user, password=password):
                self.assertIs(is_right, torc.matches_password(users[user], password))

    def test_scrypt_is_that_of_rfc_7914(self) -> None:
        if not hasattr(hashlib, 'scrypt'):      # then its lines are refused before anybody logs in
            self.assertRegex(torc.explain_hash('$scrypt$ln=14,r=8,p=1$AAAA$AAAA'), 'no scrypt')
            return
        self.assertEqual('7023bdcb3afd7348461c06cd81fd38ebfda8fbba904f8e3ea9b543f6545da1f2d5432955613f0fcf62d49705242a9af9e61e85dc0d651e40dfcf017b45575887',
                         torc.run_scrypt(b'pleaseletmein', b'SodiumChloride', 14, 8, 1, 64).hex())
        stored = torc.hash_password(b'pleaseletmein', 4)
        self.assertRegex(stored, r'\A\$scrypt\$ln=7,r=8,p=1\$')
        self.assertIn('p=4$', torc.hash_password(b'x', 16))     # more work, no more memory

    def test_what_is_made_here_is_known_here_with_or_without_scrypt(self) -> None:
        for scrypt in {getattr(hashlib, 'scrypt', None), None}:
            with unittest.mock.patch.object(torc.hashlib, 'scrypt', scrypt, create=True):
                if scrypt is None:
                    del torc.hashlib.scrypt
                stored = torc.hash_password('gr\u00fc\u00df dich'.encode(), 4)
                self.assertEqual('', torc.explain_hash(stored))
                self.assertTrue(torc.matches_password(stored, 'gr\u00fc\u00df dich'.encode()))
                self.assertFalse(torc.matches_password(stored, b'gruess dich'))
                self.assertNotEqual(stored, torc.hash_password('gr\u00fc\u00df dich'.encode(), 4))
                if scrypt is None:
                    self.assertRaisesRegex(torc.BadInput, 'at most 72 bytes', torc.hash_password, b'x' * 73)
                    torc.hashlib.scrypt = None

    def test_a_line_that_cannot_be_checked_is_told_with_its_place_and_cure(self) -> None:
        good = torc.hash_password(b'open-sesame', 4)
        for text, wanted in (('ann', '1: user .ann.: it is not USER:HASH'), (f'a:{good}\nann:$apr1$x$y', '2: user .ann.: its hash is neither'), ('ann:', 'neither'),
                             (f'a:{good}\na:{good}', '2: user .a.: the user stands in two lines'), ('ann:$scrypt$ln=30,r=8,p=1$AAAA$AAAA', 'too much memory'),
                             ('ann:$scrypt$ln=4,r=8,p=1$A$AAAA', 'malformed'), ('ann:$2y$99$' + 'a' * 53, 'neither'), ('ann:$2y$05$' + 'a' * 52, 'neither'),
                             ('ann:$2a$31$' + 'a' * 53, 'takes too long'), ('ann:$2b$17$' + 'a' * 53, 'takes too long'),
                             ('ann:$scrypt$ln=17,r=8,p=5$AAAA$AAAA', 'takes too long'),
                             ('ann:$scrypt$ln=17,r=16,p=999999$AAAA$AAAA', 'takes too long')):
            with self.subTest(text), self.assertRaises(torc.BadInput) as caught:
                torc.parse_users(text, 'my file')
            self.assertRegex(str(caught.exception.problems[0]), wanted)
            self.assertIn("`torc.py htpasswd add -f 'my file' USER`", caught.exception.message)
        self.assertRaisesRegex(torc.BadInput, 'names no user', torc.parse_users, '# nobody\n', 'f')
        self.assertRaisesRegex(torc.BadInput, 'cannot be a user', torc.parse_users, f'anonymous:{good}', 'f')
        with unittest.mock.patch.object(torc, 'find_bcrypt', lambda: None), self.assertRaises(torc.BadInput) as caught:
            torc.parse_users(BCRYPT_LINES[0], 'f')
        self.assertIn('libcrypt is missing or knows no bcrypt', str(caught.exception.problems[0]))

    def test_a_file_that_others_may_change_lets_nobody_in(self) -> None:
        path = self.world.write('users', 'ann:' + torc.hash_password(b'open-sesame', 4))
        for mode, is_good in ((0o600, True), (0o644, True), (0o622, False), (0o666, False)):
            os.chmod(path, mode)
            with self.subTest(mode=oct(mode)):
                if is_good:
                    self.assertEqual(['ann'], list(torc.read_users(path)))
                else:
                    self.assertRaisesRegex(torc.Denied, 'other users may change', torc.read_users, path)
        self.assertRaisesRegex(torc.BadInput, 'there is no password file', torc.read_users, path + '2')
        os.mkfifo(path + '3', 0o600)
        self.assertRaisesRegex(torc.Denied, 'a file of yours', torc.read_users, path + '3')
        self.assertRaisesRegex(torc.BadInput, 'cannot read', torc.read_users, self.world.write('latin', b'ann\xff:x'))
        self.assertRaises(torc.TorcError, torc.read_users, self.world.directory)

    def test_a_right_password_is_known_until_it_was_not_used_for_a_while(self) -> None:
        users = torc.Users(self.world.write('users', 'ann:' + torc.hash_password(b'open-sesame', 4)), 60.0)
        digest = users.digest('ann', b'open-sesame')
        self.assertNotEqual(digest, users.digest('ann:', b'open-sesame'[1:]))
        self.assertFalse(users.knows(digest, 0.0))
        users.learn(digest, 0.0)
        for now, known in ((59.0, True), (118.0, True), (178.0, False), (179.0, False)):
            self.assertIs(known, users.knows(digest, now), now)
        for number in range(torc.MAX_KNOWN_PASSWORDS + 10):
            users.learn(b'%d' % number, 200.0)
        self.assertEqual((torc.MAX_KNOWN_PASSWORDS, True, False), (len(users.known), users.knows(b'10', 201.0), users.knows(b'9', 201.0)))
        users.learn(b'later', 300.0)
        self.assertEqual([b'later'], list(users.known))     # the others are forgotten, not only overlooked
        users.reload()
        self.assertFalse(users.knows(b'later', 300.0))
        users.known_s = 0.0
        users.learn(digest, 400.0)
        self.assertFalse(users.knows(digest, 400.0))


class PasswordServerTest(WorldTest):
    """A server with a password file beside its token."""
    TOKEN = 'abcdefghijklmnopqrstuvwxyz0123456789ABCDEFG'

    def setUp(self) -> None:
        super().setUp()
        silenced(self)
        self.addCleanup(setattr, torc, 'WRONG_PASSWORD_S', torc.WRONG_PASSWORD_S)
        self.addCleanup(setattr, torc, 'matches_password', torc.matches_password)
        torc.WRONG_PASSWORD_S = 0.05
        self.path = self.world.write('users', ''.join(f'{user}:{torc.hash_password(password, 4)}\n' for user, password in (('ann', b'open-sesame'), ('bob', b'long:enough'))))
        self.start()

    def start(self, known_s: float = 60.0, **how: Any) -> None:
        """Serve."""
        self.server = ServerThread(self.world.path(f'{len(os.listdir(self.world.directory))}.db'), self.TOKEN, users=torc.Users(self.path, known_s), **how)
        self.addCleanup(self.server.stop)

    @staticmethod
    def login(user: str, password: str) -> str:
        """An Authorization field."""
        return 'Basic ' + base64.b64encode(f'{user}:{password}'.encode()).decode()

    def ask(self, authorization: str, method: str = 'GET', path: str = '/torc-service/v1/workflows', body: bytes = b'') -> bytes:
        """The answer to one request."""
        with self.server.connect() as client:
            client.sendall(http_request(method, path, body, authorization=authorization, connection='close'))
            return read_all(client)

    def parked(self) -> int:
        """How many clients wait for what comes of their password."""
        return sum(len(attempt.clients) for attempt in list(self.server.server.attempts.values()))

    def hold_checks(self) -> Any:
        """From now on every check waits for the event that is returned, and is counted in self.checks."""
        gate, check, self.checks = threading.Event(), torc.matches_password, []

        def held(stored: str, password: bytes) -> bool:
            self.checks.append(password)
            gate.wait(20)
            return check(stored, password)
        torc.matches_password = held
        self.addCleanup(gate.set)
        return gate

    def test_who_is_let_in(self) -> None:
        for authorization, status in ((self.login('ann', 'open-sesame'), 200), (self.login('bob', 'long:enough'), 200), (self.login('ann', 'open-sesam'), 401),
                                      (self.login('ann', ''), 401), (self.login('ann', 'open-sesame '), 401), (self.login('Ann', 'open-sesame'), 401),
                                      (self.login('nobody', 'open-sesame'), 401), (self.login('', 'open-sesame'), 401), ('Basic ???', 401), ('', 401),
                                      (f'Bearer {self.TOKEN}', 200), (self.login('x', self.TOKEN), 200), ('Bearer open-sesame', 401), (f'Bearer {self.TOKEN[1:]}', 401),
                                      (self.login('ann', 'open-sesame\0'), 401), ('Basic ' + base64.b64encode(b'\xff:\xff').decode(), 401)):
            with self.subTest(authorization=authorization):
                answer = self.ask(authorization)
                self.assertEqual([status], statuses(answer))
                self.assertEqual(status == 401, b'www-authenticate: Basic' in answer)
        self.assertEqual([200], statuses(self.ask(self.login('ann', 'wrong'), path='/healthz')))

    def test_no_route_and_no_method_is_open(self) -> None:
        paths = [torc.API_PREFIX + re.sub(r'\{\w+\}', '1', route.path) for route in torc.ROUTES] + ['/', '/nowhere']
        for path in paths:
            for method in ('GET', 'POST', 'HEAD', 'OPTIONS', 'BREW'):
                self.assertEqual([401], statuses(self.ask('', method, path)), (method, path))

    def test_workflows_belong_to_who_has_logged_in(self) -> None:
        self.start(enforces_access=True)
        answer = self.ask(self.login('bob', 'long:enough'), 'POST', body=b'{"name":"w","user":"ann"}')
        self.assertIn(b'"user":"bob"', answer)
        self.assertEqual([403], statuses(self.ask(self.login('ann', 'open-sesame'), path='/torc-service/v1/workflows/1')))
        self.assertEqual([200], statuses(self.ask(f'Bearer {self.TOKEN}', path='/torc-service/v1/workflows/1')))
        self.assertEqual([403], statuses(self.ask(self.login('bob', 'long:enough'), 'POST', '/torc-service/v1/admin/reload-auth')))

    def test_a_stream_ends_when_what_let_its_reader_in_was_taken_away(self) -> None:
        self.start(enforces_access=True)
        self.addCleanup(setattr, torc, 'KEEP_ALIVE_S', torc.KEEP_ALIVE_S)
        torc.KEEP_ALIVE_S = 0.05
        owner, bob = f'Bearer {self.TOKEN}', self.login('bob', 'long:enough')

        def ask(method: str, path: str, body: str = '') -> None:
            self.assertEqual([200], statuses(self.ask(owner, method, torc.API_PREFIX + path, body.encode())))
        ask('POST', '/workflows', '{"name":"w","user":"ann"}')
        ask('POST', '/access_groups', '{"name":"g"}')
        ask('POST', '/access_groups/2/members', '{"user_name":"bob"}')
        ask('POST', '/workflows/1/access_groups/2')
        changed = self.world.read('users').replace('bob:', f"bob:{torc.hash_password(b'another one', 4)}\n# ")
        for take in (lambda: self.world.write('users', changed) and ask('POST', '/admin/reload-auth'), lambda: ask('DELETE', '/access_groups/2/members/bob')):
            readers = [Reader(self.server.port, '/workflows/1/events/stream', authorization=field) for field in (owner, bob)]
            for reader in readers:
                self.addCleanup(reader.close)
                reader.until(b':\n\n')
            take()
            self.assertTrue(readers[1].has_ended())
            readers[0].data = b''
            readers[0].until(b':\n\n')     # as before
            bob = self.login('bob', 'another one')

    def test_a_right_password_is_checked_once_and_a_wrong_one_each_time(self) -> None:
        self.hold_checks().set()
        for _ in range(3):
            self.ask(self.login('ann', 'open-sesame'))
            self.ask(self.login('ann', 'wrong'))
        self.assertEqual([b'open-sesame'] + 3 * [b'wrong'], self.checks)
        self.start(known_s=0.0)
        for _ in range(2):
            self.assertEqual([200], statuses(self.ask(self.login('ann', 'open-sesame'))))
        self.assertEqual(6, len(self.checks))

    def test_a_wrong_password_takes_as_long_for_a_stranger_as_for_a_user(self) -> None:
        seen = []
        torc.matches_password = lambda stored, password: seen.append(stored) or False
        torc.WRONG_PASSWORD_S = 0.2
        for user in ('ann', 'nobody', 'nobody', 'somebody'):
            began = time.monotonic()
            self.assertEqual([401], statuses(self.ask(self.login(user, 'wrong'))))
            self.assertGreaterEqual(time.monotonic() - began, 0.19)
        hashes = list(self.server.how['users'].hashes.values())
        self.assertEqual([hashes[0]], seen[:1])
        self.assertLessEqual(set(seen), set(hashes))        # a stranger's is compared too, with the same work
        self.assertEqual(seen[1], seen[2])
        torc.matches_password = lambda stored, password: True
        self.assertEqual([401], statuses(self.ask(self.login('nobody', 'right by chance'))))

    def test_others_are_served_while_passwords_are_checked_and_a_flood_keeps_nobody_out_who_is_known(self) -> None:
        self.assertEqual([200], statuses(self.ask(self.login('bob', 'long:enough'))))
        gate = self.hold_checks()
        attempts = self.server.server.attempts
        with contextlib.ExitStack() as stack:
            flood = [stack.enter_context(self.server.connect()) for _ in range(torc.MAX_ATTEMPTS)]
            for number, client in enumerate(flood):
                client.sendall(http_request(authorization=self.login(f'user{number // torc.MAX_ATTEMPTS_OF_USER}', f'guess {number}')))
                if number == torc.MAX_ATTEMPTS_OF_USER - 1:
                    self.world.wait(lambda: len(attempts) == torc.MAX_ATTEMPTS_OF_USER, 10, 'the first of them')
                    self.assertEqual([429], statuses(self.ask(self.login('user0', 'one more'))))
            self.world.wait(lambda: len(attempts) == torc.MAX_ATTEMPTS, 10, 'the flood')
            answer = self.ask(self.login('ann', 'open-sesame'))
            self.assertEqual(([429], True), (statuses(answer), b'retry-after: 1' in answer))
            for authorization in (self.login('bob', 'long:enough'), f'Bearer {self.TOKEN}'):
                self.assertEqual([200], statuses(self.ask(authorization)))
            self.assertEqual([200], statuses(self.ask('', path='/healthz')))
            gate.set()
            self.assertEqual([[401]] * len(flood), [statuses(read_all(client)) for client in flood])
        self.world.wait(lambda: not attempts, 10, 'the flood to be forgotten')
        self.assertEqual([200], statuses(self.ask(self.login('ann', 'open-sesame'))))

    def test_a_hundred_runners_of_one_user_wait_for_one_check(self) -> None:
        check = torc.matches_password
        for password, status in (('open-sesame', 200), ('wrong', 401)):
            torc.matches_password = check
            gate = self.hold_checks()
            with contextlib.ExitStack() as stack:
                clients = [stack.enter_context(self.server.connect()) for _ in range(100)]
                for client in clients:
                    client.sendall(http_request(authorization=self.login('ann', password)))
                self.world.wait(lambda: self.parked() == 100, 10, 'all of them')
                gate.set()
                self.assertEqual([[status]] * 100, [statuses(read_answers(client, 1)) for client in clients])
            self.assertEqual([password.encode()], self.checks)
            self.world.wait(lambda: not self.server.server.attempts, 10, 'the attempt to be forgotten')

    def test_the_same_wrong_password_again_is_told_with_the_first(self) -> None:
        torc.WRONG_PASSWORD_S = 0.3
        self.hold_checks().set()
        with self.server.connect() as first:
            first.sendall(http_request(authorization=self.login('ann', 'wrong')))
            self.world.wait(lambda: any(attempt.is_wrong for attempt in list(self.server.server.attempts.values())), 10, 'the verdict')
            self.assertEqual([401], statuses(self.ask(self.login('ann', 'wrong'))))
            self.assertEqual([401], statuses(read_all(first)))
        self.assertEqual([b'wrong'], self.checks)

    def test_a_request_goes_on_where_it_was_when_its_password_is_found_right(self) -> None:
        gate = self.hold_checks()
        body = b'{"name":"w","user":"u"}'
        first = http_request('POST', '/torc-service/v1/workflows', body, authorization=self.login('ann', 'open-sesame'))
        with self.server.connect() as whole, self.server.connect() as parts, self.server.connect() as asking:
            whole.sendall(first + http_request(authorization=self.login('ann', 'open-sesame')))     # the next one waits behind it
            parts.sendall(first[:-10])
            asking.sendall(first[:-len(body)].replace(b'\r\n\r\n', b'\r\nexpect: 100-continue\r\n\r\n'))
            self.world.wait(lambda: self.parked() == 3, 10, 'all three')
            gate.set()
            self.assertEqual([200, 200], statuses(read_answers(whole, 2)))
            parts.sendall(first[-10:])
            self.assertEqual([200], statuses(read_answers(parts, 1)))
            self.assertEqual([100], statuses(asking.recv(100)))
            asking.sendall(body)
            self.assertEqual([200], statuses(read_answers(asking, 1)))
        self.assertEqual([b'open-sesame'], self.checks)     # one check for all who wait for it

    def test_a_client_that_goes_or_waits_too_long_is_forgotten(self) -> None:
        self.addCleanup(setattr, torc, 'CLIENT_DEADLINE_S', torc.CLIENT_DEADLINE_S)
        torc.CLIENT_DEADLINE_S = 0.3
        gate = self.hold_checks()
        with self.server.connect() as gone, self.server.connect() as slow:
            for client in (gone, slow):
                client.sendall(http_request(authorization=self.login('ann', 'open-sesame')))
            self.world.wait(lambda: self.parked() == 2, 10, 'both')
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
            gone.close()
            self.assertEqual([408], statuses(read_all(slow)))
        gate.set()
        self.world.wait(lambda: not self.server.server.attempts, 10, 'both to be forgotten')
        self.assertEqual([200], statuses(self.ask(self.login('ann', 'open-sesame'))))

    def test_a_file_that_is_read_again_counts_at_once(self) -> None:
        self.assertEqual([200], statuses(self.ask(self.login('ann', 'open-sesame'))))
        gate = self.hold_checks()
        with self.server.connect() as late:
            late.sendall(http_request(authorization=self.login('bob', 'long:enough')))
            self.world.wait(lambda: self.checks, 10, 'the check')
            self.world.write('users', 'ann:' + torc.hash_password(b'another word', 4))
            answer = self.ask(f'Bearer {self.TOKEN}', 'POST', '/torc-service/v1/admin/reload-auth')
            self.assertIn(b'"user_count":1', answer)
            gate.set()
            self.assertEqual([401], statuses(read_all(late)))       # bob is gone since
        self.assertEqual([401], statuses(self.ask(self.login('ann', 'open-sesame'))))
        self.assertEqual([200], statuses(self.ask(self.login('ann', 'another word'))))
        self.world.write('users', 'ann:nonsense')
        answer = self.ask(f'Bearer {self.TOKEN}', 'POST', '/torc-service/v1/admin/reload-auth')
        self.assertEqual(([422], True), (statuses(answer), b'cannot be used' in answer))
        self.assertEqual([200], statuses(self.ask(self.login('ann', 'another word'))))

    def test_the_anonymous_are_let_in_if_so_told_and_a_wrong_password_is_not_anonymous(self) -> None:
        self.start(lets_anonymous=True, enforces_access=True)
        for authorization, status in (('', 200), (self.login('ann', 'wrong'), 401), ('Bearer wrong', 401), ('Basic ???', 401), (self.login('ann', 'open-sesame'), 200)):
            with self.subTest(authorization=authorization):
                self.assertEqual([status], statuses(self.ask(authorization)))
        self.assertEqual([403], statuses(self.ask('', 'POST', body=b'{"name":"w","user":"ann"}')))
        self.assertEqual([403], statuses(self.ask('', 'POST', '/torc-service/v1/admin/reload-auth')))

    def test_a_check_that_fails_is_a_wrong_password_and_the_next_one_is_made(self) -> None:
        check = torc.matches_password

        def broken(stored: str, password: bytes) -> bool:
            raise MemoryError
        torc.matches_password = broken
        self.assertEqual([401], statuses(self.ask(self.login('ann', 'open-sesame'))))
        torc.matches_password = check
        self.assertEqual([200], statuses(self.ask(self.login('ann', 'open-sesame'))))

    def test_refusals_are_counted_in_the_log(self) -> None:
        logging.getLogger('torc').setLevel(logging.NOTSET)
        with self.assertLogs('torc', 'WARNING') as caught:
            for _ in range(3):
                self.ask('')
            self.server.server.refusals_told_at = -math.inf
            self.ask('Bearer wrong')
        self.assertEqual(['1 requests without the right token or password', '3 requests without the right token or password'],
                         [record.getMessage() for record in caught.records])


class CountingStore:
    """A store that counts its transactions, and may fail at their ends."""

    def __init__(self, store: Any) -> None:
        self.store, self.writes, self.reads, self.failures = store, 0, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """As the store's, but failures go first."""
        with self.store.transaction():
            yield
            self.writes += 1
            if self.failures:
                self.failures -= 1
                raise sqlite3.OperationalError('database or disk is full')

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """As the store's."""
        with self.store.reading():
            yield
            self.reads += 1


class TurnTest(WorldTest):
    """Turns of the loop, one by one."""

    def setUp(self) -> None:
        super().setUp()
        self.store = CountingStore(torc.Store(self.world.path('torc.db')))
        self.server = torc.Server(self.store, torc.open_listener('127.0.0.1', 0, True), tick=lambda store: False)
        self.addCleanup(self.store.close)
        self.addCleanup(self.server.close)
        self.server.on_clock(time.monotonic() + 1)    # the first tick
        self.store.writes = 0
        self.clients = [socket.create_connection(self.server.listener.getsockname(), 10) for _ in range(10)]
        for client in self.clients:
            self.addCleanup(client.close)
        self.server.on_accept(0)
        logging.getLogger('torc').setLevel(logging.CRITICAL)
        self.addCleanup(logging.getLogger('torc').setLevel, logging.NOTSET)

    def ask_all(self, request: bytes) -> List[int]:
        """Statuses of answers to the same request from every client, sent before one turn."""
        for client in self.clients:
            client.sendall(request)
        self.server.turn()
        return [status for client in self.clients for status in statuses(read_answers(client, 1))]

    def test_requests_of_one_turn_share_a_transaction(self) -> None:
        self.assertEqual([200] * 10, self.ask_all(http_request('POST', '/torc-service/v1/workflows', b'{"name":"w","user":"u"}')))
        self.assertEqual((1, 0), (self.store.writes, self.store.reads))
        self.assertEqual(10, self.store.value('SELECT count(*) FROM workflow'))

    def test_a_turn_of_readers_writes_nothing(self) -> None:
        self.assertEqual([200] * 10, self.ask_all(http_request()))
        self.assertEqual((0, 1), (self.store.writes, self.store.reads))

    def test_a_bad_request_leaves_the_others_alone(self) -> None:
        self.clients[0].sendall(http_request('POST', '/torc-service/v1/workflows', b'{"name":1}'))
        self.clients[1].sendall(http_request('POST', '/torc-service/v1/workflows', b'{"name":"w","user":"u"}'))
        self.server.turn()
        self.assertEqual([[422], [200]], [statuses(read_answers(client, 1)) for client in self.clients[:2]])
        self.assertEqual(1, self.store.writes)

    def begin_task(self) -> Any:
        """Make a workflow, ask for its initialize as a task, and let the server turn once; the answer."""
        self.ask_all(http_request('POST', '/torc-service/v1/workflows', b'{"name":"w","user":"u"}'))
        self.clients[0].sendall(http_request('POST', '/torc-service/v1/workflows/1/initialize_jobs?async=true'))
        self.server.turn()
        answer = read_answers(self.clients[0], 1)
        self.assertEqual([202], statuses(answer))
        return json.loads(answer.partition(b'\r\n\r\n')[2].decode())

    def task_status(self) -> str:
        """State of the task in the database."""
        return self.store.value('SELECT status FROM task')

    def test_a_task_is_done_right_after_its_answer_was_sent(self) -> None:
        self.server.tick = torc.tend
        self.assertEqual('queued', self.begin_task()['status'])
        self.assertEqual('succeeded', self.task_status())
        self.assertEqual(1, self.store.value('SELECT run_id FROM workflow WHERE id = 1'))

    def test_a_task_that_could_not_be_stored_is_tried_again(self) -> None:
        def fail_once(store: Any) -> bool:
            self.store.failures, self.server.tick = 1, torc.tend
            return torc.tend(store)
        self.server.tick = fail_once
        self.begin_task()
        self.assertEqual('queued', self.task_status())
        self.server.on_clock(time.monotonic() + 1)
        self.assertEqual('queued', self.task_status())
        self.server.on_clock(time.monotonic() + torc.TICK_S + 1)
        self.assertEqual('succeeded', self.task_status())

    def test_when_a_commit_fails_nobody_is_told_that_it_is_done(self) -> None:
        self.store.failures = 100
        self.assertEqual([503] * 10, self.ask_all(http_request('POST', '/torc-service/v1/workflows', b'{"name":"w","user":"u"}')))
        self.assertEqual(0, self.store.value('SELECT count(*) FROM workflow'))

    def test_requests_that_cannot_be_done_together_are_tried_alone(self) -> None:
        self.store.failures = 2
        self.assertEqual([200] * 9 + [503], sorted(self.ask_all(http_request('POST', '/torc-service/v1/workflows', b'{"name":"w","user":"u"}'))))
        self.assertEqual(9, self.store.value('SELECT count(*) FROM workflow'))

    def test_the_loop_sleeps_when_there_is_nothing_to_do(self) -> None:
        self.ask_all(http_request())                    # who has asked may stay quiet for ever
        self.server.on_clock(time.monotonic() + torc.CLIENT_DEADLINE_S + 1)
        self.assertIsNone(self.server.wait_s())
        self.ask_all(http_request())
        self.assertGreater(self.server.wait_s(), 4)     # the service looks at its clock 5 s after a request
        self.clients[0].sendall(b'GET')
        self.server.turn()
        self.assertLess(self.server.sweep_at, time.monotonic() + torc.CLIENT_DEADLINE_S)

    def test_who_never_asks_makes_room_and_is_not_waited_for_for_ever(self) -> None:
        for client in self.clients[:4]:
            client.sendall(http_request())
        self.server.turn()
        limit, torc.MAX_STRANGERS = torc.MAX_STRANGERS, 6
        self.addCleanup(setattr, torc, 'MAX_STRANGERS', limit)
        with socket.create_connection(self.server.listener.getsockname(), 10) as late:
            self.world.wait(lambda: self.server.turn() or len(self.server.strangers) == 6, 10, 'the late one')
            self.assertEqual(b'', self.clients[4].recv(10))     # the oldest of those that never asked
            late.sendall(http_request())
            self.server.turn()
            self.assertEqual([200], statuses(read_answers(late, 1)))
        self.server.on_clock(time.monotonic() + torc.CLIENT_DEADLINE_S + 1)
        self.assertEqual([b''] * 5, [client.recv(10) for client in self.clients[5:]])
        self.assertEqual([200] * 4, [statuses(read_answers(client, 1))[0] for client in self.clients[:4]])

    def test_without_descriptors_it_neither_ends_nor_spins(self) -> None:
        self.ask_all(http_request())
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        late = [socket.socket() for _ in range(3)]
        for client in late:
            self.addCleanup(client.close)
        lowest = os.dup(0)
        os.close(lowest)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        for client in late:
            client.connect(self.server.listener.getsockname())
        self.server.turn()
        self.assertEqual(b'', late[0].recv(10))         # refused, not left to wait
        self.assertGreater(self.server.wait_s(), 0)     # the other two knock on, unheard
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        late[1].sendall(http_request())
        self.world.wait(lambda: self.server.turn() or len(self.server.connections) == 12, 10, 'the others to be let in')


@slow
class ServeTest(WorldTest):
    """`torc.py serve`, from outside."""

    def test_it_says_one_line_and_ends_cleanly_with_a_signal(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            url = self.world.serve('--db', 'my.db')
            self.assertEqual([f'torc: serving {url}', f'TORC_SERVER_PORT={torc.parse_url(url).port}'], self.world.server.lines())
            self.assertEqual(url, torc.read_connection_file(self.world.path('my.db'))['url'])
            self.world.server.send(number)
            outcome = self.assertExit(0, self.world.server.finish(10))
            self.assertEqual(2, outcome.out.count('\n'))
            self.assertEqual({'my.db', 'my.db.token'}, set(os.listdir(self.world.directory)))

    def test_a_second_one_is_refused_and_one_after_a_kill_is_not(self) -> None:
        self.world.serve('--db', 'my.db')
        port = torc.parse_url(self.world.url).port
        self.assertExit(4, self.world.cli('serve', '--db', 'my.db', '--port', 0), 'in use by another torc.py')
        self.assertExit(4, self.world.cli('serve', '--db', 'your.db', '--port', port), '--port 0 takes any free one')
        self.world.server.kill()
        self.assertIsNone(torc.read_connection_file(self.world.path('my.db')))
        self.world.serve('--db', 'my.db', '--port', port)

    def test_the_token_stays_unless_a_new_one_is_wanted(self) -> None:
        tokens = []
        for flags in ((), (), ('--new-token',)):
            self.world.serve('--db', 'my.db', *flags)
            tokens.append(torc.read_token(self.world.path('my.db.token')))
            self.world.server.send(signal.SIGTERM)
            self.world.server.finish(10)
        self.assertEqual(tokens[0], tokens[1])
        self.assertNotEqual(tokens[1], tokens[2])

    def test_without_a_token_on_this_machine_only(self) -> None:
        self.assertExit(2, self.world.cli('serve', '--no-auth', '--host', '0.0.0.0', '--port', 0), '--no-auth would let everybody')
        self.world.serve('--no-auth', '--db', 'my.db')
        client = self.world.connect(database=self.world.path('my.db'))
        self.assertEqual({'status': 'ok'}, client.ping())
        client.close()

    def test_a_script_that_starts_torcs_own_server_can_start_this_one(self) -> None:
        program = self.world.write('torc-server', f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(stub_path())} serve "$@"\n')
        os.chmod(program, 0o755)
        self.world.write('empty.db', '')
        words = [program, 'run', '--host', '127.0.0.1', '--port', '0', '--database', 'empty.db', '--shutdown-on-stdin-eof']
        with open(self.world.path('err'), 'wb') as err:
            process = subprocess.Popen(words, cwd=self.world.directory, env=self.world.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err)
        with process.stdout:
            lines = iter(process.stdout.readline, b'')
            port = next(int(line.partition(b'=')[2]) for line in lines if line.startswith(b'TORC_SERVER_PORT='))
            token = torc.read_token(self.world.path('empty.db.token'))
            client = http.client.HTTPConnection('127.0.0.1', port, timeout=10)
            password = base64.b64encode(f'tester:{token}'.encode()).decode()
            client.request('GET', '/torc-service/v1/ping', headers={'Authorization': 'Basic ' + password})
            self.assertEqual({'status': 'ok'}, json.loads(client.getresponse().read().decode()))
            process.stdin.close()       # as Torc's client ends the server that it has started; its own connection is still open
            self.assertEqual(0, process.wait(10))
            client.close()
        self.assertEqual(0o600, os.stat(self.world.path('empty.db')).st_mode & 0o777)
        self.assertFalse(os.path.exists(self.world.path('empty.db.connection')))

    def test_it_takes_the_flags_and_variables_of_torcs_server(self) -> None:
        for words, env, name in (
                (('-d', 'a.db'), {}, 'a.db'), ((), {'DATABASE_URL': 'sqlite:b.db'}, 'b.db'), ((), {'DATABASE_URL': 'sqlite://c%20d.db?mode=rwc'}, 'c d.db'),
                ((), {'DATABASE_URL': f'sqlite://{self.world.path("e.db")}'}, 'e.db'), (('--database', 'sqlite:f.db'), {'DATABASE_URL': 'sqlite:g.db'}, 'f.db'),
                ((), {'DATABASE_URL': 'postgres://h/x'}, os.path.join('..', 'home', 'state', 'torc', 'torc.db'))):
            server = self.world.start('serve', 'run', '-u', 'localhost', '-p', 0, '-t', 4, '-c', '0.5', '-l', 'WARN', *words,
                                      env=dict(env, TORC_COMPLETION_CHECK_INTERVAL_SECS='5'))
            self.world.wait(lambda: 'TORC_SERVER_PORT=' in server.out, 20, 'the server', [server])
            self.assertIsNotNone(torc.read_connection_file(self.world.path(name)), words)
            server.send(signal.SIGTERM)
            self.assertEqual('', self.assertExit(0, server.finish(10)).err)
        for words, env, text in ((('service', 'install'), {}, "'service' is not there"), (('export',), {}, "'export' is not there"), (('--https',), {}, '--tls-cert FILE'),
                                 (('--tls-key', 'x'), {}, '--tls-cert FILE'), (('--daemon', '-d', ':memory:'), {}, '--log-dir'),
                                 ((), {'TORC_SERVER_SNAPSHOT_KEEP': 'x'}, 'from 1'), (('--pid-file', 'no/such/place', '-d', 'a.db', '-p', 0), {}, '--pid-file'),
                                 (('--log-dir', 'a.db'), {}, '--log-dir')):
            self.assertExit(2, self.world.cli('serve', *words, env=env), text)

    def test_a_database_in_memory_is_copied_when_wanted_and_gone_at_the_end(self) -> None:
        copies, database = self.world.path('copy.db'), ''
        server = self.world.start('serve', '-d', ':memory:', '--no-auth', '-p', 0, env={'TORC_SERVER_SNAPSHOT_PATH': 'copy.db', 'TORC_SERVER_SNAPSHOT_KEEP': '3'})
        url = self.world.wait(lambda: re.search(r'serving (http\S+)\n', server.out), 20, 'the server', [server]).group(1)
        database = re.search(r'serving (\S+/torc\.db) at', server.err).group(1)
        with self.world.inside():
            client = torc.Client.connect(url=url)
        for number in range(4):
            client.create_workflow({'name': f'w{number}', 'user': 'u'})
            server.send(signal.SIGUSR1)
            self.world.wait(lambda: server.out.count(f'TORC_SNAPSHOT_DONE={copies}\n') > number, 10, 'a copy', [server])
        client.close()
        server.send(signal.SIGTERM)
        self.assertExit(0, server.finish(10))
        self.assertEqual({'copy.db', 'copy.db.1', 'copy.db.2'}, set(os.listdir(self.world.directory)))
        for name, count in (('copy.db', 4), ('copy.db.1', 3), ('copy.db.2', 2)):
            self.assertEqual([(count,)], ask_sqlite(self.world.path(name), 'SELECT count(*) FROM workflow'))
            self.assertEqual(0o600, os.stat(self.world.path(name)).st_mode & 0o777)
        self.assertFalse(os.path.exists(os.path.dirname(database)))
        self.world.serve('-d', 'copy.db')       # it is a database like any other

    def test_old_sqlite_copies_too(self) -> None:
        with contextlib.closing(torc.Store(self.world.path('torc.db'))) as store:
            with store.transaction():
                store.insert('workflow', {'name': 'w', 'user': 'u', 'timestamp': 'now'})
            version, torc.sqlite3.sqlite_version_info = torc.sqlite3.sqlite_version_info, (3, 26, 0)
            self.addCleanup(setattr, torc.sqlite3, 'sqlite_version_info', version)
            store.copy_to(self.world.path('copy.db'))
        with contextlib.closing(torc.Store(self.world.path('copy.db'))) as store:
            self.assertEqual(['w'], store.ids('SELECT name FROM workflow'))

    def test_a_daemon_answers_before_its_command_returns_and_leaves_nothing_but_its_log(self) -> None:
        outcome = self.assertExit(0, self.world.cli('serve', '-d', 'my.db', '-p', 0, '--daemon', '--pid-file', 'my.pid', '--log-dir', 'logs', '--json-logs'))
        pid = int(self.world.read('my.pid'))
        found = torc.read_connection_file(self.world.path('my.db'))
        self.assertEqual((pid, f"torc: serving {found['url']}\nTORC_SERVER_PORT={torc.parse_url(found['url']).port}\n"), (found['pid'], outcome.out))
        self.assertExit(4, self.world.cli('serve', '-d', 'my.db', '-p', 0, '--daemon'), 'in use by another torc.py')
        self.assertExit(3, self.world.cli('serve', '-d', 'your.db', '-p', 0, '--daemon', '--pid-file', 'no/such/place'), 'did not start', 'with --pid-file')
        for name in ('your.db', 'your.db.log', 'your.db.token'):
            os.unlink(self.world.path(name))
        os.kill(pid, signal.SIGTERM)
        self.world.wait(lambda: not torc.process_lives(found), 10, 'it to end')
        self.assertEqual({'my.db', 'my.db.token', 'my.db.log', 'logs'}, set(os.listdir(self.world.directory)))
        lines = [json.loads(line) for line in self.world.read('logs/torc-server.log').splitlines()]
        self.assertEqual({'INFO'}, {line['level'] for line in lines})
        self.assertIn('ending: SIGTERM', [line['fields']['message'] for line in lines])
        self.assertEqual(0o600, os.stat(self.world.path('logs', 'torc-server.log')).st_mode & 0o777)

    def test_a_log_that_cannot_begin_anew_goes_on(self) -> None:
        os.mkdir(self.world.path('logs'))
        handler = torc.LogFile(self.world.path('logs/x.log'), 10, 3)
        with contextlib.closing(handler), open(os.dup(handler.stream.fileno()), 'rb') as written:
            shutil.rmtree(self.world.path('logs'))
            for number in range(3):
                handler.handle(logging.LogRecord('torc', logging.INFO, '', 0, 'a line of some length', (), None))
            self.assertEqual(3, os.fstat(written.fileno()).st_size // len('a line of some length\n'))

    def test_a_log_makes_room_for_a_new_one(self) -> None:
        handler = torc.LogFile(self.world.path('x.log'), 100, 3)
        handler.setFormatter(torc.JsonLines())
        for number in range(8):
            handler.emit(logging.makeLogRecord({'msg': f'{number} \ud800' + 'x' * 100, 'levelname': 'INFO'}))
        handler.close()
        found = {name: json.loads(self.world.read(name))['fields']['message'][0] for name in sorted(os.listdir(self.world.directory))}
        self.assertEqual({'x.log': '7', 'x.log.1': '6', 'x.log.2': '5'}, found)

    def test_other_machines_reach_it_by_its_names(self) -> None:
        self.world.serve('--host', '0.0.0.0', '--db', 'my.db')
        found = torc.read_connection_file(self.world.path('my.db'))
        self.assertIn(socket.gethostname(), found['url'])
        port = torc.parse_url(found['url']).port
        for host, status in ((socket.gethostname(), 200), ('evil.example', 403), ('localhost', 200)):
            with socket.create_connection(('127.0.0.1', port), 10) as client:
                client.sendall(http_request(path='/healthz', host=f'{host}:{port}', connection='close'))
                self.assertEqual([status], statuses(read_all(client)), host)


class RegistrationTest(WorldTest):
    """The files by which commands find lasting servers."""

    def register(self, name: str, **more: Any) -> str:
        """Register a server as a server would; the path of its file."""
        database = self.world.write(name, '')
        server = dict(torc.describe_process(), url='http://127.0.0.1:1', server_id=name, database=database, **more)
        return torc.register_server(server)

    def test_each_server_has_a_private_file_that_a_new_start_replaces(self) -> None:
        path = self.register('a.db', start=1)
        self.assertEqual((0o600, 0o700), (os.stat(path).st_mode & 0o777, os.stat(os.path.dirname(path)).st_mode & 0o777))
        self.assertEqual(path, self.register('a.db', start=2))
        other = self.register('b.db')
        self.assertEqual({path: 2, other: None}, {path: server.get('start') for path, server in torc.list_registrations().items()})
        torc.unregister_server(path, {'server_id': 'another'})
        torc.unregister_server(other, {'server_id': 'b.db'})
        self.assertEqual([path], list(torc.list_registrations()))

    def test_a_database_on_a_network_file_system_is_registered_once_whichever_host_serves_it(self) -> None:
        for is_network, count in ((False, 2), (True, 1)):
            with self.subTest(is_network), unittest.mock.patch.object(torc, 'is_network_path', lambda path: is_network):
                with unittest.mock.patch('socket.gethostname', lambda: 'login2'):
                    self.register('a.db')
                self.register('a.db')
                self.assertEqual(count, len(torc.list_registrations()))

    def test_files_of_another_user_are_passed_over_and_damaged_ones_are_not(self) -> None:
        path = self.register('a.db')
        with unittest.mock.patch('os.geteuid', lambda: 12345):
            self.assertEqual({}, torc.list_registrations())
        torc.write_atomically(path, b'{')
        self.assertRaisesRegex(torc.Denied, 'is damaged: remove it', torc.list_registrations)

    def test_the_state_of_another_user_is_passed_over(self) -> None:
        path = self.register('a.db')
        default = torc.default_database() + '.connection'
        torc.write_atomically(default, torc.format_json(torc.read_server_file(path)).encode())
        embedded = (os.path.abspath(torc.EMBEDDED_DATABASE), '')
        with unittest.mock.patch('os.geteuid', lambda: 12345):
            self.assertEqual(embedded, torc.find_database())
        os.unlink(default)
        with unittest.mock.patch('os.listdir', side_effect=PermissionError), \
                unittest.mock.patch('os.scandir', side_effect=PermissionError):
            self.assertEqual(embedded, torc.find_database())

    def test_a_registration_in_a_read_only_home_is_no_error(self) -> None:
        path = self.register('a.db', start_ticks=1)
        os.unlink(self.world.path('a.db'))
        with unittest.mock.patch('os.unlink', side_effect=PermissionError):
            torc.forget_server(self.world.path('a.db'))
            self.assertEqual((os.path.abspath(torc.EMBEDDED_DATABASE), ''), torc.find_database())
        self.assertTrue(os.path.exists(path))

    def test_a_server_that_ends_while_one_looks_hides_no_other(self) -> None:
        kept, gone = sorted([self.register('a.db'), self.register('b.db')])

        def end_a_server() -> int:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(gone)
            return own
        own = os.geteuid()
        with unittest.mock.patch('os.geteuid', end_a_server):
            self.assertEqual([kept], torc.registration_files())

    def test_a_server_that_cannot_be_registered_serves_all_the_same(self) -> None:
        os.makedirs(torc.state_directory())
        with open(os.path.join(torc.state_directory(), 'servers'), 'w'):
            pass
        self.world.serve('-d', 'my.db')
        self.assertIn('commands find it only with --url or --db', self.world.server.err)
        self.assertExit(0, self.world.cli('--db', 'my.db', 'ping'))
        self.assertExit(4, self.world.cli('ping'), 'there is no server')


@slow
class MemoryDatabaseTest(WorldTest):
    """--in-memory: the live database in memory, a copy in its file."""

    def setUp(self) -> None:
        super().setUp()
        self.database = self.world.path('my.db')

    def count(self) -> int:
        """Events in the copy, which is whole whenever one looks."""
        copy = self.world.path('looked at')
        shutil.copy(self.database, copy)
        self.assertEqual([('ok',)], ask_sqlite(copy, 'PRAGMA integrity_check'))
        return ask_sqlite(copy, 'SELECT count(*) FROM event')[0][0]

    def live(self) -> str:
        """Path of the database in memory."""
        return json.loads(self.world.read('my.db.memory'))['path']

    def add_events(self, count: int) -> None:
        """Change something, through the server."""
        client = self.world.connect(database=self.database)
        with contextlib.closing(client):
            self.assertFalse(client.is_direct)
            number = (client.list_workflows()['items'] or [client.create_workflow({'name': 'w', 'user': 'u'})])[0]['id']
            for _ in range(count):
                client.create_event({'workflow_id': number, 'data': {'x': 'y' * 100}})

    def end(self, number: int = signal.SIGTERM) -> None:
        """End the server."""
        self.world.server.send(number)
        self.world.server.process.wait(20)

    def test_its_file_is_a_whole_copy_at_every_end_and_nothing_is_left(self) -> None:
        for number, total in ((signal.SIGTERM, 5), (signal.SIGINT, 10), (signal.SIGHUP, 15)):
            self.world.serve('-d', 'my.db', '--in-memory')
            directory = os.path.dirname(self.live())
            self.assertEqual((0o700, 0o600), (os.stat(directory).st_mode & 0o777, os.stat(self.live()).st_mode & 0o777))
            self.add_events(5)
            self.assertEqual(total - 5, self.count())
            self.end(number)
            self.assertEqual(total, self.count())
            self.assertFalse(os.path.exists(directory))
            self.assertEqual({'my.db', 'my.db.token', 'looked at'}, set(os.listdir(self.world.directory)))
        self.assertEqual(0o600, os.stat(self.database).st_mode & 0o777)

    def test_it_is_copied_at_intervals_and_when_asked_while_requests_go_on(self) -> None:
        self.world.serve('-d', 'my.db', '--in-memory', '--snapshot-interval-seconds', 1)
        client = self.world.connect(database=self.database)
        self.addCleanup(client.close)
        number = client.create_workflow({'name': 'w', 'user': 'u'})['id']
        counts = []
        while len(set(counts)) < 3:
            client.create_event({'workflow_id': number, 'data': {'x': 'y' * 1000}})
            counts.append(self.count())
        self.assertEqual(sorted(counts), counts)
        self.end()
        self.world.serve('-d', 'my.db', '--in-memory')
        before = self.count()
        self.add_events(1)
        self.world.server.send(signal.SIGUSR1)
        self.world.wait(lambda: f'TORC_SNAPSHOT_DONE={self.database}\n' in self.world.server.out, 20, 'the copy', [self.world.server])
        self.assertEqual(before + 1, self.count())

    def test_after_a_kill_the_next_start_goes_on_with_what_is_in_memory(self) -> None:
        self.world.serve('-d', 'my.db', '--in-memory')
        for total in (3, 6, 9):
            self.add_events(3)
            live = self.live()
            self.world.server.kill()
            self.assertEqual(0, self.count())
            self.world.serve('-d', 'my.db', '--in-memory')
            self.assertEqual(live, self.live())
        self.world.server.kill()
        outcome = self.assertExit(0, self.world.cli('--db', 'my.db', '-f', 'json', 'events', 'list', 1), 'its changes were written back')
        self.assertEqual((9, 9), (len(outcome.json()['items']), self.count()))
        self.assertFalse(os.path.exists(os.path.dirname(live)) or os.path.exists(self.database + '.memory'))

    def test_a_file_is_replaced_only_with_an_empty_log_beside_it(self) -> None:
        live, sizes, replace = self.leave_behind(), [], torc.replace_database
        newer = torc.SCHEMA_VERSION + 1     # which writes to the old file before it is replaced

        def look_and_replace(descriptor: int, database: str) -> None:
            sizes.append(os.path.getsize(database + '-wal'))
            replace(descriptor, database)
        with unittest.mock.patch.object(torc, 'SCHEMA_VERSION', newer), \
                unittest.mock.patch.dict(torc.MIGRATIONS, {newer: 'CREATE TABLE later (id INTEGER);'}), \
                unittest.mock.patch.object(torc, 'replace_database', look_and_replace):
            torc.open_on_disk(self.database).close()
        self.assertEqual(([0], False), (sizes, os.path.exists(live)))

    def test_while_its_server_lives_nobody_uses_the_copy(self) -> None:
        self.world.serve('-d', 'my.db', '--in-memory')
        os.unlink(self.database + '.connection')
        self.assertExit(4, self.world.cli('serve', '-d', 'my.db', '-p', 0), 'in use by another torc.py (process ')
        with self.assertRaisesRegex(torc.Conflict, 'in use by another torc.py'):
            torc.Client(database=self.database).reconnect(0)

    def leave_behind(self, **change: Any) -> str:
        """A server with a change in memory, killed; and what its file says, changed."""
        self.world.serve('-d', 'my.db', '--in-memory')
        self.add_events(1)
        self.world.server.kill()
        found = dict(json.loads(self.world.read('my.db.memory')), **change)
        torc.write_atomically(self.database + '.memory', json.dumps(found).encode())
        return found['path']

    def test_what_was_lost_with_the_memory_is_told(self) -> None:
        shutil.rmtree(os.path.dirname(self.leave_behind(boot_id='another')))
        self.assertExit(0, self.world.cli('--db', 'my.db', 'workflows', 'list'), 'was in memory, which was lost with its server: changes after', 'No workflows found')
        self.assertEqual('', self.assertExit(0, self.world.cli('--db', 'my.db', 'workflows', 'list')).err)

    def test_what_is_in_another_hosts_memory_is_not_given_up_unasked(self) -> None:
        directory = os.path.dirname(self.leave_behind(host='node7'))
        self.addCleanup(shutil.rmtree, directory)
        outcome = self.assertExit(4, self.world.cli('--db', 'my.db', 'workflows', 'list'), 'is in the memory of host node7')
        self.assertExit(4, self.world.cli('serve', '-d', 'my.db', '-p', 0, '--in-memory'), 'is in the memory of host node7')
        os.unlink(shlex.split(outcome.err.rpartition(': rm ')[2])[0])
        self.assertExit(0, self.world.cli('--db', 'my.db', 'workflows', 'list'))

    def test_a_copy_that_cannot_be_written_leaves_everything_in_memory(self) -> None:
        self.world.serve('-d', 'my.db', '--in-memory')
        os.mkdir(self.database + '.new')       # in the way
        self.add_events(2)
        self.world.server.send(signal.SIGUSR1)
        self.world.wait(lambda: 'could not be written: ' in self.world.server.err, 20, 'the failure', [self.world.server])
        self.add_events(2)
        self.end()
        self.assertIn('stays in /', self.world.server.err)
        self.assertEqual(0, self.count())
        os.rmdir(self.database + '.new')
        self.assertExit(0, self.world.cli('--db', 'my.db', 'workflows', 'list'))
        self.assertEqual(4, self.count())

    def test_a_file_that_is_removed_from_memory_is_copied_all_the_same(self) -> None:
        self.world.serve('-d', 'my.db', '--in-memory')
        self.add_events(2)
        with contextlib.closing(self.world.connect(database=self.database)) as client:
            shutil.rmtree(os.path.dirname(self.live()))     # as systemd does when a user logs out (logind.conf(5), RemoveIPC)
            self.assertRaises(torc.Unreachable, client.call, 'ping', deadline_s=0.2)
        self.assertExit(4, self.world.server.finish(20), 'was removed or replaced')
        self.assertEqual(2, self.count())

    def test_the_file_of_a_run_is_whole_when_its_command_returns(self) -> None:
        database = self.world.path('torc_output', 'torc.db')
        for number in (1, 2):
            self.assertExit(0, self.world.cli('-s', '--in-memory', '--torc-server-bin', 'none', 'exec', '-c', 'true'))
            self.assertFalse(os.path.exists(database + '.memory'))
            self.assertEqual([(number,)], ask_sqlite(database, 'SELECT count(*) FROM result'))
        second = self.world.start('-s', '--in-memory', 'exec', '-c', 'while [ ! -e go ]; do sleep 0.05; done')
        self.world.wait(lambda: self.statuses(database).count(torc.RUNNING), 20, 'the other run', [second])
        self.assertExit(0, self.world.cli('-s', 'exec', '-c', 'true'))      # joins it, and does not wait for its end
        copy = self.world.path('copy')
        shutil.copy(database, copy)
        self.assertEqual([(3,)], ask_sqlite(copy, 'SELECT count(*) FROM result'))
        self.world.write('go', '')
        self.assertExit(0, second.finish())
        self.assertEqual([(4,)], ask_sqlite(database, 'SELECT count(*) FROM result'))

    def test_a_command_that_only_reads_waits_for_no_snapshot(self) -> None:
        database = self.world.path('torc_output', 'torc.db')
        run = self.world.start('-s', '--in-memory', 'exec', '-c', 'while [ ! -e go ]; do sleep 0.05; done')
        self.world.wait(lambda: self.statuses(database).count(torc.RUNNING), 20, 'the run', [run])
        before = os.stat(database)
        self.assertExit(0, self.world.cli('-s', 'status', 1), '1 running')
        found = os.stat(database)
        self.assertEqual((before.st_ino, before.st_mtime_ns), (found.st_ino, found.st_mtime_ns))
        self.world.write('go', '')
        self.assertExit(0, run.finish())

    def statuses(self, database: str) -> List[int]:
        """Statuses of jobs in a database in memory."""
        try:
            with open(database + '.memory') as file:
                path = json.load(file)['path']
            with self.world.connect(database=database) as client:
                return [torc.STATUS_CODES[job['status']] for workflow in client.list_workflows()['items']
                        for job in client.list_jobs(workflow_id=workflow['id'])['items']] if os.path.exists(path) else []
        except (FileNotFoundError, torc.TorcError):
            return []

    def test_a_killed_server_of_a_run_is_replaced_without_a_loss(self) -> None:
        database = self.world.path('torc_output', 'torc.db')
        run = self.world.start('-s', '--in-memory', 'exec', '-c', 'touch started; while [ ! -e go ]; do sleep 0.05; done; echo done')
        self.world.wait(lambda: os.path.exists(self.world.path('started')), 20, 'the job', [run])
        for _ in range(2):
            found = self.world.wait(lambda: torc.read_connection_file(database), 20, 'the server', [run])
            os.kill(found['pid'], signal.SIGKILL)
            self.world.wait(lambda: torc.process_lives(found) is False, 10, 'its end')
        self.world.write('go', '')
        self.assertExit(0, run.finish())
        self.assertEqual([(0, 'completed')], [(item['return_code'], item['status']) for item in
                                              self.assertExit(0, self.world.cli('-f', 'json', 'results', 'list', 1)).json()['items']])

    def test_its_options_are_refused_where_they_do_nothing(self) -> None:
        for words, text in ((('-s', '--in-memory', 'jobs', 'list', 1), '--in-memory is for run, exec, serve'), (('--in-memory', 'exec', '-c', 'true'), 'goes with -s'),
                            (('-s', '--snapshot-interval-seconds', 5, 'exec', '-c', 'true'), 'goes with --in-memory'),
                            (('serve', '-d', ':memory:', '--in-memory'), 'give one with -d FILE'), (('-s', '--snapshot-interval-seconds', 0, 'run', 'x'), 'less than 1')):
            self.assertExit(2, self.world.cli(*words), text)
        self.world.serve('-d', 'my.db')
        self.assertExit(0, self.world.cli('--db', 'my.db', '--in-memory', 'exec', '-c', 'true'), 'is served already, and not from memory')

    def test_there_must_be_room_for_it(self) -> None:
        with self.assertRaisesRegex(torc.BadInput, 'has room for a database of 1024.0TB'):
            torc.make_memory_directory(2 ** 50)
        with unittest.mock.patch('os.statvfs', side_effect=[OSError(2, 'no /dev/shm'), os.statvfs('/')]):
            path = torc.make_memory_directory(0)
        self.addCleanup(os.rmdir, path)
        self.assertEqual(tempfile.gettempdir(), os.path.dirname(path))


class EmbeddedTest(WorldTest):
    """Servers that are forked by the first who needs one."""

    def setUp(self) -> None:
        super().setUp()
        os.chmod(self.world.directory, 0o755)
        self.database = self.world.path('torc_output', 'torc.db')
        self.addCleanup(self.end_server)

    def end_server(self) -> None:
        """Nothing is left, whatever happened."""
        found = torc.read_connection_file(self.database)
        if found:
            os.kill(found['pid'], signal.SIGTERM)
            self.world.wait(lambda: not torc.process_lives(found), 10, 'the embedded server to end')

    def start_server(self) -> Dict[str, Any]:
        """Start one; what its connection file says."""
        self.assertTrue(torc.start_embedded_server(self.database))
        return torc.read_connection_file(self.database)

    def hold(self, found: Dict[str, Any]) -> socket.socket:
        """A connection that keeps it."""
        address = torc.parse_url(found['url'])
        client = socket.create_connection((address.host, address.port), 10)
        self.addCleanup(client.close)
        client.sendall(http_request(path='/healthz'))
        read_answers(client, 1)
        return client

    def test_it_lets_go_of_everything_that_was_the_callers(self) -> None:
        reader, writer = os.pipe()
        os.set_inheritable(writer, True)
        found = self.start_server()
        os.close(writer)
        readable, _, _ = select.select([reader], [], [], 10)
        self.assertTrue(readable and os.read(reader, 1) == b'', 'it holds a pipe of the caller')
        os.close(reader)
        proc = f'/proc/{found["pid"]}'
        need('proc', os.path.isdir(proc), 'looks into /proc')
        self.assertNotEqual(os.getsid(0), os.getsid(found['pid']))
        self.assertNotEqual(os.getpid(), int(read_text(proc + '/stat').rpartition(')')[2].split()[1]))
        self.assertEqual('/', os.readlink(proc + '/cwd'))
        places = {int(number): os.readlink(f'{proc}/fd/{number}') for number in os.listdir(proc + '/fd')}
        self.assertEqual(['/dev/null', '/dev/null', self.database + '.log'], [places[number] for number in range(3)])
        known = ('/dev/null', 'socket:', 'anon_inode:', self.database)
        self.assertEqual([], [place for place in places.values() if not place.startswith(known)])

    def test_its_files_are_private_and_hold_the_token_in_one_place(self) -> None:
        self.start_server()
        self.assertEqual(0o700, os.stat(os.path.dirname(self.database)).st_mode & 0o777)
        token = torc.read_token(self.database + '.token')
        for name in os.listdir(os.path.dirname(self.database)):
            path = os.path.join(os.path.dirname(self.database), name)
            self.assertEqual(0o600, os.stat(path).st_mode & 0o777, name)
            with open(path, 'rb') as file:
                self.assertEqual(name.endswith('.token'), token.encode() in file.read(), name)

    def test_it_leaves_when_its_last_client_has_left(self) -> None:
        found = self.start_server()
        first, second = self.hold(found), self.hold(found)
        first.close()
        select.select([], [], [], 2 * torc.EMBEDDED_GRACE_S)
        self.assertTrue(torc.process_lives(found))
        second.close()
        self.world.wait(lambda: torc.process_lives(found) is False, 5, 'it to leave')
        self.assertEqual({'torc.db', 'torc.db.log', 'torc.db.token'}, set(os.listdir(os.path.dirname(self.database))))

    def test_a_signal_ends_it_cleanly(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            found = self.start_server()
            self.hold(found)
            os.kill(found['pid'], number)
            self.world.wait(lambda: torc.process_lives(found) is False, 5, 'it to leave')
            self.assertEqual({'torc.db', 'torc.db.log', 'torc.db.token'}, set(os.listdir(os.path.dirname(self.database))))

    def test_one_that_was_killed_is_replaced(self) -> None:
        found = self.start_server()
        token = torc.read_token(found['token_file'])
        os.kill(found['pid'], signal.SIGKILL)
        self.world.wait(lambda: torc.process_lives(found) is False, 5, 'it to die')
        self.assertTrue(os.path.exists(self.database + '.connection'))
        self.assertIsNone(torc.read_connection_file(self.database))
        self.assertNotEqual(found['pid'], self.start_server()['pid'])
        self.assertEqual(token, torc.read_token(found['token_file']))

    def test_a_second_one_is_not_needed(self) -> None:
        found = self.start_server()
        self.assertFalse(torc.start_embedded_server(self.database))
        self.assertEqual(found['pid'], torc.read_connection_file(self.database)['pid'])
        self.assertNotIn('Traceback', read_text(self.database + '.log'))

    def test_why_it_did_not_start_is_told(self) -> None:
        os.mkdir(os.path.dirname(self.database), 0o700)
        with open(self.database, 'w') as file:
            file.write('this is no database\n' * 100)
        with self.assertRaisesRegex(torc.Unreachable, 'is not a torc.py database'):
            torc.start_embedded_server(self.database)

    def test_its_clients_ctrl_c_does_not_reach_it(self) -> None:
        script = ("import sys, os, signal; sys.path.insert(0, sys.argv[1]); import torc; torc.start_embedded_server(sys.argv[2]);"
                  "os.killpg(0, signal.SIGINT)")
        process = subprocess.Popen([sys.executable, '-B', '-c', script, HERE, self.database], start_new_session=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.communicate(timeout=30)     # returns, for nobody holds the pipes any more
        found = torc.read_connection_file(self.database)
        self.assertTrue(torc.process_lives(found))
        self.hold(found)


# ======== 11. Client: the verbs of the service from anywhere ========

class Impostor(threading.Thread):
    """Somebody who listens and answers as the test says, and writes down what was sent."""

    def __init__(self, *answers: bytes) -> None:
        super().__init__(daemon=True)
        self.answers, self.heard = list(answers), b''
        self.listener = socket.create_server(('127.0.0.1', 0)) if hasattr(socket, 'create_server') else self.listen()
        self.port = self.listener.getsockname()[1]
        self.url = f'http://127.0.0.1:{self.port}/torc-service/v1'
        self.start()

    @staticmethod
    def listen() -> socket.socket:
        """A listening socket, on Python 3.6."""
        listener = socket.socket()
        listener.bind(('127.0.0.1', 0))
        listener.listen(5)
        return listener

    def run(self) -> None:
        for answer in self.answers:
            client, _ = self.listener.accept()
            with client:
                self.heard += client.recv(65536)
                for part in answer if isinstance(answer, list) else [answer]:
                    client.sendall(part)

    def stop(self) -> None:
        """Hang up for good."""
        self.join(10)
        self.listener.close()


class WireTest(unittest.TestCase):
    """Answers as they come over the wire, of servers and proxies of all sorts."""

    def ask(self, answer: Any) -> Tuple[int, bytes]:
        """What the wire makes of an answer."""
        impostor = Impostor(answer)
        self.addCleanup(impostor.stop)
        wire = torc.Wire(torc.parse_url(impostor.url))
        self.addCleanup(wire.close)
        return wire.ask('GET', '/x', deadline_s=5)

    def test_answers_of_all_shapes_are_understood(self) -> None:
        whole = b'HTTP/1.1 404 Not Found\r\nServer: x\r\nContent-Length: 4\r\n\r\nbody'
        for answer in (whole, [whole[index:index + 1] for index in range(len(whole))], b'HTTP/1.1 100 Continue\r\n\r\n' + whole,
                       b'HTTP/1.0 404 X\r\ncontent-length:4\r\nConnection: close\r\n\r\nbody'):
            with self.subTest(answer=answer):
                self.assertEqual((404, b'body'), self.ask(answer))

    def test_what_is_no_answer_is_an_error(self) -> None:
        for answer in (b'', b'SSH-2.0-OpenSSH_9.2\r\n\r\n', b'HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort', b'HTTP/1.1 200 OK\r\n\r\n',
                       b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n'):
            with self.subTest(answer=answer), self.assertRaises((OSError, ValueError)):
                self.ask(answer)

    def test_addresses(self) -> None:
        for url, parts in (('http://h:8080/torc-service/v1', (False, 'h', 8080, '/torc-service/v1')), ('http://h', (False, 'h', 80, '/torc-service/v1')),
                           ('https://[::1]:9/proxy/x/', (True, '::1', 9, '/proxy/x'))):
            self.assertEqual(parts, torc.parse_url(url)[1:])
        for url in ('', 'h:8080', 'ftp://h', 'http://', 'http://h:x', 'http://h:99999', 'http://u:secret@h', 'http://h/a b', 'http://h/\n'):
            with self.subTest(url=url):
                self.assertRaisesRegex(torc.BadInput, 'write http://HOST:PORT', torc.parse_url, url)

    def test_errors_come_back_as_what_they_were(self) -> None:
        for status, body, kind, text in (
                (404, b'{"error":{"error":"NotFound","message":"no job 1"}}', torc.NotFound, 'no job 1'), (409, b'{"error":{"message":"m"}}', torc.Conflict, 'm'),
                (422, b'{"error":{"error":"BadInput","message":"m","field":"f"}}', torc.BadInput, 'm'), (422, b'{"error":{"message":"m"}}', torc.Refused, 'm'),
                (422, b'{"error":{"error":"Refused","message":"m"}}', torc.Refused, 'm'), (401, b'Unauthorized', torc.Denied, 'answered 401 Unauthorized'),
                (403, b'', torc.Denied, '403'), (400, b'{"error":"text"}', torc.BadInput, 'text'), (503, b'{"error":{"message":"full"}}', torc.Unreachable, 'full'),
                (500, b'<html>', torc.Unreachable, '500'), (200, b'<html>', torc.Unreachable, '502'), (302, b'', torc.Refused, '302')):
            with self.subTest(status=status, body=body), self.assertRaisesRegex(kind, text) as caught:
                torc.parse_answer(status, body)
            self.assertIs(kind, type(caught.exception))
        self.assertIsNone(torc.parse_answer(200, b''))


class AddressTest(WorldTest):
    """Whether an address is that of a server, in whatever words."""

    def test_a_server_is_known_by_every_name_of_its_host_and_no_other_port(self) -> None:
        own = socket.gethostname()
        here = dict(torc.describe_process(), candidates=['http://127.0.0.1:8080/torc-service/v1'])
        there = dict(here, host='login2', candidates=['http://login2:8080/torc-service/v1', 'http://10.0.0.7:8080/torc-service/v1'])
        for server, url, expected in (
                (here, 'http://127.0.0.1:8080/torc-service/v1', True), (here, 'http://127.0.0.1:8080/torc-service/v1/', True),
                (here, 'http://127.0.0.1:8080', True), (here, 'http://localhost:8080/torc-service/v1', True), (here, 'http://LOCALHOST:8080/', True),
                (here, 'http://[::1]:8080', True), (here, f'http://{own}:8080/torc-service/v1', True), (here, 'http://127.0.0.1:8081', False),
                (here, 'https://127.0.0.1:8080', False), (here, 'http://192.0.2.1:8080', False), (here, 'http://no-such-host.invalid:8080', False),
                (there, 'http://login2:8080', True), (there, 'http://10.0.0.7:8080/', True), (there, 'http://localhost:8080', False)):
            with self.subTest(url, host=server['host']):
                self.assertEqual(expected, torc.serves_address(server, torc.parse_url(url)))

    def test_an_exported_address_needs_no_token_file_whichever_name_it_has(self) -> None:
        url = self.world.serve('-d', 'my.db')
        port = torc.parse_url(url).port
        for address in (f'http://localhost:{port}/torc-service/v1', f'http://localhost:{port}/torc-service/v1/', f'http://127.0.0.1:{port}'):
            self.assertExit(0, self.world.cli('workflows', 'list', env={'TORC_API_URL': address}))
        self.assertExit(0, self.world.cli('exec', '-c', f'{shlex.quote(sys.executable)} {shlex.quote(stub_path())} workflows list',
                                          env={'TORC_API_URL': f'http://localhost:{port}/'}))

    def test_whoever_answers_under_another_name_gets_no_token(self) -> None:
        database = self.world.path('my.db')
        token = torc.keep_token(database + '.token')
        answer = torc.format_answer(200, b'{"proof":"%s"}' % (b'0' * 64))
        impostor = Impostor(answer)
        port = torc.parse_url(impostor.url).port
        with torc.connection_file(torc.ServerOptions(database), [f'http://127.0.0.1:{port}{torc.API_PREFIX}']):
            found = torc.find_server_file(f'http://localhost:{port}')
            self.assertEqual(database + '.token', found['token_file'])
            self.assertRaises(torc.Unreachable, torc.Client(url=f'http://localhost:{port}', token_file=found['token_file']).reconnect, wait_s=0)
        impostor.stop()
        self.assertIn(b'GET /healthz?challenge=', impostor.heard)
        self.assertNotIn(token.encode(), impostor.heard)


@slow
class FindServerTest(WorldTest):
    """Which database a command uses when none is named."""
    HELLO = 'name: hello\njobs: [{name: a, command: "echo of $TORC_WORKFLOW_ID"}]\n'

    def setUp(self) -> None:
        super().setUp()
        os.mkdir(self.world.path('elsewhere'))
        self.world.write('w.yaml', self.HELLO)

    def cli(self, *words: Any, **how: Any) -> Outcome:
        """A command in another directory than that of the server's database."""
        return self.world.cli(*words, cwd=self.world.path('elsewhere'), **how)

    def names(self, *words: str) -> List[str]:
        """Workflows that a command sees."""
        return [item['name'] for item in self.assertExit(0, self.cli('-f', 'json', *words, 'workflows', 'list')).json()['items']]

    def test_a_server_is_found_from_anywhere_until_it_ends(self) -> None:
        url = self.world.serve('-d', 'my.db')
        outcome = self.assertExit(0, self.cli('run', '../w.yaml'))
        self.assertIn(f"Workflow 1 (hello) is stored in the database {self.world.path('my.db')} (served at {url})\n", outcome.err)
        self.assertFalse(os.path.exists(self.world.path('elsewhere', 'torc_output', 'torc.db')))
        self.assertEqual(['hello'], self.names())
        self.world.server.send(signal.SIGTERM)
        self.world.server.finish(10)
        self.assertExit(4, self.cli('workflows', 'list'), 'there is no server and no database')
        outcome = self.assertExit(0, self.cli('run', '../w.yaml', '-o', 'more'))
        self.assertNotIn('is stored in', outcome.err)

    def test_where_a_workflow_is_stored_is_told_unless_that_is_usual(self) -> None:
        for words, text in ((('--db', 'my.db', '-o', 'a'), f"the database {self.world.path('elsewhere', 'my.db')}\n"), (('--db', 'my.db', '-q', '-o', 'a'), ''), (('-s',), '')):
            self.assertEqual(f'Workflow 1 (hello) is stored in {text}' if text else '',
                             ''.join(re.findall('.*is stored in.*\n', self.assertExit(0, self.cli('run', '../w.yaml', *words)).err)))

    def test_commands_that_are_named_find_the_same_database_and_output(self) -> None:
        self.world.write('w.yaml', 'name: hello\njobs:\n- {name: a, command: "echo this; exit 3"}\n- {name: b, command: echo, depends_on: [a]}\n')
        self.assertExit(1, self.cli('run', '../w.yaml'))
        said = self.assertExit(1, self.cli('--db', 'my.db', 'run', '../w.yaml', '-o', 'mine')).err
        for verb in ('logs 1 a', 'logs 1', 'run 1 --retry-failed'):
            self.assertIn(f'torc.py --db my.db {verb} -o mine', said)
        self.assertIn('this', self.assertExit(0, self.cli('--db', 'my.db', 'logs', 1, 'a', '-o', 'mine')).out)
        said = self.assertExit(1, self.cli('--db', 'my.db', 'run', 1, '-o', 'mine')).err
        self.assertIn('torc.py --db my.db run 1 --retry-failed -o mine\n', said)
        self.assertIn('before `torc.py --db my.db run 1 -o mine`:\n', said)
        for words, hint in ((('logs', 1, '-o', 'mine'), 'status 1'),
                            (('jobs', 'reset-status', 1, '--no-prompts'), 'run 1'),
                            (('workflows', 'init', 1, '--no-prompts'), 'run 1'),
                            (('workflows', 'init', 1, '--no-prompts', '--async'), 'tasks wait 2'),
                            (('status', 1), 'run 1')):
            outcome = self.assertExit(0, self.cli('--db', 'my.db', *words))
            self.assertIn(f'torc.py --db my.db {hint}', outcome.out + outcome.err)
            self.assertNotIn(f'torc.py {hint}', outcome.out + outcome.err)

    def test_output_of_a_run_elsewhere_is_found_by_the_command_that_is_named(self) -> None:
        self.world.serve('-d', 'my.db')
        self.assertExit(0, self.world.cli('create', 'w.yaml'))
        directory = self.world.path('elsewhere', 'torc_output')
        said = self.assertExit(0, self.cli('run', 1)).err
        self.assertIn(f'Output: torc_output/job_stdio (torc.py logs 1 -o {shlex.quote(directory)})\n', said)
        self.assertIn('of 1', self.assertExit(0, self.cli('logs', 1, '-o', directory)).out)

    def test_of_several_servers_one_is_to_be_chosen(self) -> None:
        first, url = self.world.serve('-d', 'a.db'), self.world.serve('-d', 'b.db')
        self.assertExit(0, self.cli('--db', '../a.db', 'workflows', 'new', '-n', 'of a'))
        outcome = self.assertExit(2, self.cli('delete', 1, '--no-prompts'), 'several servers are registered', '--url URL', 'TORC_API_URL', '--db FILE', '-s:')
        self.assertEqual({f"  {first}  {self.world.path('a.db')}", f"  {url}  {self.world.path('b.db')}"}, set(outcome.err.splitlines()[1:]))
        self.assertEqual([['of a'], ['of a'], [], []], [self.names(*words) for words in (
            ('--db', '../a.db'), ('--url', first), ('--url', url), ('--db', '../b.db'))])
        self.assertExit(0, self.cli('workflows', 'list', env={'TORC_API_URL': url}))
        self.assertExit(0, self.cli('-s', 'workflows', 'new', '-n', 'of none'))
        self.assertEqual(['of none'], self.names('-s'))

    def kill(self) -> None:
        """A database with a workflow here and one elsewhere; then the server of the first is killed."""
        self.assertExit(0, self.cli('-s', 'workflows', 'new', '-n', 'local'))
        self.world.serve('-d', 'my.db')
        self.assertExit(0, self.cli('workflows', 'new', '-n', 'served'))
        self.world.server.kill()

    def test_a_killed_server_is_an_error_that_names_the_ways_and_changes_nothing(self) -> None:
        self.kill()
        database = shlex.quote(self.world.path('my.db'))
        for words in (('delete', 1, '--no-prompts'), ('cancel', 1, '--no-prompts'), ('workflows', 'list'), ('run', '../w.yaml'), ('ping',)):
            outcome = self.assertExit(3, self.cli(*words), f' torc.py serve -d {database}\n', f' --db {database}\n', ' -s\n', ' rm ')
        self.assertEqual(['local'], self.names('-s'))
        os.unlink(shlex.split(outcome.err.rpartition(' rm ')[2])[0])
        self.assertEqual(['local'], self.names())

    def test_a_killed_server_is_in_nobodys_way_who_names_another_place(self) -> None:
        self.kill()
        url = self.world.serve('-d', 'other.db')
        self.assertEqual([[], [], ['local']], [self.names(*words) for words in (('--url', url), ('--db', '../other.db'), ('-s',))])
        self.assertExit(0, self.cli('workflows', 'list', env={'TORC_API_URL': url}))
        self.assertExit(2, self.cli('workflows', 'list'), 'my.db (killed; to remove it: rm ', f'{url}  ')

    def test_a_killed_server_that_is_started_again_is_found_again(self) -> None:
        self.kill()
        self.world.serve('-d', 'my.db')
        self.assertEqual(['served'], self.names())

    def test_who_uses_the_database_of_a_killed_server_is_told_that_it_is_forgotten(self) -> None:
        for words in (('workflows', 'list'), ('exec', '-c', 'true', '-o', 'x')):
            self.kill()
            self.assertExit(0, self.cli('--db', '../my.db', *words), 'was killed earlier and is no longer registered')
            self.assertEqual('', self.assertExit(0, self.cli('--db', '../my.db', 'workflows', 'list')).err)
            self.assertIn('local', self.names())

    def test_a_killed_server_whose_database_was_deleted_is_forgotten(self) -> None:
        self.kill()
        os.unlink(self.world.path('my.db'))
        self.assertEqual(['local'], [item['name'] for item in self.assertExit(
            0, self.cli('-f', 'json', 'workflows', 'list'), 'was killed and the database deleted: it is no longer registered').json()['items']])
        self.assertEqual('', self.assertExit(0, self.cli('workflows', 'list')).err)

    def test_a_killed_server_whose_directory_is_not_there_is_not_forgotten(self) -> None:
        self.kill()
        (path, server), = torc.list_registrations().items()
        torc.write_atomically(path, json.dumps(dict(server, database=self.world.path('unmounted', 'my.db'))).encode())
        self.assertExit(3, self.cli('workflows', 'list'), 'was killed, or the machine was restarted')

    def test_a_server_of_another_host_is_not_judged_by_our_processes_and_not_replaced(self) -> None:
        self.kill()
        (path, server), = torc.list_registrations().items()
        for url, text in ((server['url'], 'runs on host login2 and answers there only'), ('http://192.0.2.1:1/x', 'cannot be reached (http://192.0.2.1')):
            torc.write_atomically(path, json.dumps(dict(server, host='login2', url=url, candidates=[url])).encode())
            script = 'import sys, torc; torc.FIND_DEADLINE_S = torc.CONNECT_DEADLINE_S = 0.1; sys.exit(torc.main(sys.argv[1:]))'
            done = subprocess.run([sys.executable, '-c', script, 'delete', '1', '--no-prompts'], cwd=self.world.path('elsewhere'), stderr=subprocess.PIPE,
                                  env=dict(self.world.environment, PYTHONPATH=HERE), encoding='utf-8')
            self.assertEqual(3, done.returncode, done.stderr)
            for words in (text, 'to forget the server:  ', ' --db '):
                self.assertIn(words, done.stderr)
        self.assertEqual(['local'], self.names('-s'))

    def test_a_server_that_an_older_torc_started_is_found_where_it_always_was(self) -> None:
        self.world.serve()
        for path in torc.registration_files():
            os.unlink(path)
        self.assertExit(0, self.cli('ping'))

    def test_what_changes_or_was_changed_is_named_with_its_place(self) -> None:
        url = self.world.serve('-d', 'my.db')
        self.assertExit(0, self.cli('run', '../w.yaml'))
        place = f"workflow 1 (hello) of the database {self.world.path('my.db')} (served at {url})"
        for words, text in ((('cancel', 1), f'Cancel {place}?'), (('workflows', 'init', 1), f'Forget all results of {place}, and start it again?'),
                            (('delete', 1), f"Delete workflow 1 (hello) of the database {self.world.path('my.db')} (served at {url}) with all jobs and results?"),
                            (('workflows', 'reset-status', 1), f'Reset the status of all jobs of {place}?'), (('jobs', 'delete-all', 1), f'Delete all jobs of {place}?'),
                            (('jobs', 'reset-status', 1), f'Reset the status of 1 jobs of {place}?'), (('user-data', 'delete-all', 1), f'Delete all user data of {place}?')):
            self.assertExit(2, self.cli(*words), f'this asks "{text}"')
        self.assertIn(f'workflow 1 (hello) of the server {url}?"', self.cli('--url', url, 'cancel', 1).err)
        self.assertExit(0, self.cli('cancel', 1, '--no-prompts'), f'Canceled {place}. ')
        self.assertExit(4, self.cli('delete', 1, 2, '--no-prompts'), f'Deleted {place}\n', 'there is no workflow 2')


@slow
class TlsClientTest(WorldTest):
    """https, from the client's side."""

    def serve(self, name: str, *flags: Any) -> str:
        """A server with one of the certificates."""
        tls = Tls(self.world, name)
        return self.world.serve('--tls-cert', tls.certificate, '--tls-key', tls.key, *flags)

    def test_commands_of_the_account_believe_the_server_that_was_started_here_and_jobs_reach_it_too(self) -> None:
        url = self.serve('other')       # a name that nobody can check
        self.assertTrue(url.startswith('https://127.0.0.1:'))
        self.assertExit(0, self.world.cli('exec', '-c', f'{shlex.quote(sys.executable)} {shlex.quote(stub_path())} jobs list $TORC_WORKFLOW_ID; echo at $TORC_API_URL'))
        self.assertExit(0, self.world.cli('logs', 1, 1), f'at {url}', 'job1')
        self.assertExit(0, self.world.cli('--url', url, 'ping'))

    def test_another_certificate_at_its_address_is_not_believed(self) -> None:
        self.serve('other', '--db', 'my.db')
        path = self.world.path('my.db.connection')
        found = json.loads(read_text(path))
        torc.write_atomically(path, torc.format_json(dict(found, fingerprint='0' * 64)).encode())
        with self.assertRaisesRegex(torc.Unreachable, 'is not that of the server that was started here'):
            torc.Client(database=self.world.path('my.db')).reconnect(0)

    def test_certificates_are_believed_as_told(self) -> None:
        knows_why = sys.version_info >= (3, 7)      # before, OpenSSL's reason does not reach Python
        for name, text in (('good', ''), ('other', 'is for another'), ('expired', 'has expired')):
            url = self.serve(name, '--db', f'{name}.db', '--no-auth')
            os.rename(self.world.path(f'{name}.db.connection'), self.world.path('hidden'))      # a client from elsewhere
            with self.assertRaisesRegex(torc.Unreachable, 'not one that is believed here: give that of its authority with --tls-ca-cert FILE'):
                torc.Client(url=url).reconnect(0)
            certificate = self.world.path(f'{name}.pem')
            client = torc.Client(url=url, trust=torc.Trust(certificate))
            self.addCleanup(client.close)
            with self.assertRaisesRegex(torc.Unreachable, text) if text and knows_why else contextlib.suppress(torc.Unreachable if text else ()):
                client.reconnect(0)
            for words, env in ((('--tls-insecure',), {}), ((), {'TORC_TLS_INSECURE': 'true'})):
                self.assertExit(0, self.world.cli('--url', url, *words, 'ping', env=env))
            if not text:
                self.assertExit(0, self.world.cli('--url', url, '--tls-ca-cert', certificate, 'ping'))
                self.assertExit(0, self.world.cli('--url', url, 'ping', env={'TORC_TLS_CA_CERT': certificate, 'TORC_TLS_INSECURE': '0'}))
            self.world.server.send(signal.SIGTERM)
            self.world.server.finish(10)

    def test_a_job_gets_what_its_runner_believes(self) -> None:
        url = self.serve('good', '--no-auth', '--db', 'my.db')
        os.rename(self.world.path('my.db.connection'), self.world.path('hidden'))
        command = f'{shlex.quote(sys.executable)} {shlex.quote(stub_path())} ping; echo $TORC_TLS_CA_CERT'
        self.assertExit(0, self.world.cli('--url', url, '--tls-ca-cert', 'good.pem', 'exec', '-c', command))
        self.assertEqual(f'Server is running\n{self.world.path("good.pem")}\n', self.world.read('torc_output/job_stdio/job_wf1_j1_r1_a1.o'))

    def test_the_wrong_scheme_is_told(self) -> None:
        url = self.serve('good', '--db', 'my.db')
        self.assertExit(2, self.world.cli('--url', url.replace('https', 'http'), 'ping', env={'TORC_TOKEN_FILE': self.world.path('my.db.token')}),
                        'write https:// in the address')
        url = self.world.serve('--db', 'your.db')
        self.assertExit(3, self.world.cli('--url', url.replace('http', 'https'), 'ping'), 'write http:// in the address')
        self.assertExit(2, self.world.cli('--url', url.replace('http', 'https'), '--tls-ca-cert', 'none.pem', 'ping'), 'cannot use the certificates in none.pem')

    def test_large_bodies_and_streams_pass(self) -> None:
        self.serve('good', '--db', 'my.db')
        writer, reader = (self.world.connect(database=self.world.path('my.db')) for _ in range(2))
        self.addCleanup(writer.close)
        self.addCleanup(reader.close)
        workflow_id = writer.create_workflow({'name': 'w', 'user': 'u'})['id']
        writer.create_event({'workflow_id': workflow_id, 'data': {'text': 'x' * 1500000}})
        self.assertEqual(1500000, len(writer.list_events(workflow_id=workflow_id)['items'][0]['data']['text']))
        writer.create_job({'workflow_id': workflow_id, 'name': 'j', 'command': 'true'})
        is_heard = threading.Event()

        def announce() -> None:     # again and again: a reader hears what happens from when it was let in
            while not is_heard.wait(0.05):
                writer.initialize_jobs(id=workflow_id)
        announcer = threading.Thread(target=announce, daemon=True)
        announcer.start()
        events = reader.stream('stream_workflow_events', time.monotonic() + 10, workflow_id=workflow_id)
        self.assertEqual(['workflow_started'], [event.type for event in itertools.islice(events, 1)])
        is_heard.set()
        announcer.join(10)
        events.close()

    def test_what_tls_says_between_two_requests_is_not_the_end(self) -> None:
        tls = Tls(self.world)
        server = ServerThread(self.world.path('torc.db'), tls=tls)
        self.addCleanup(server.stop)
        wire = torc.Wire(torc.parse_url(f'https://127.0.0.1:{server.port}'), torc.Trust(tls.certificate))
        self.addCleanup(wire.close)
        # TLS 1.3 sends tickets when the handshake is done; before that there is nothing to be read
        self.world.wait(lambda: torc.select_readable(wire.socket) or wire.socket.version() != 'TLSv1.3', 10, 'the tickets')
        self.assertTrue(wire.is_alive())
        self.assertEqual((200, b'{"status":"ok"}'), wire.ask('GET', '/torc-service/v1/ping'))
        self.assertTrue(wire.is_alive())
        server.stop()
        self.world.wait(lambda: not wire.is_alive(), 10, 'the end to be seen')


class ClientTest(WorldTest):
    """Finding a server or a database, and calling."""

    def setUp(self) -> None:
        super().setUp()
        inside = self.world.inside()
        inside.__enter__()
        self.addCleanup(inside.__exit__, None, None, None)
        self.addCleanup(self.end_servers)
        self.clients = []       # type: List[Any]

    def end_servers(self) -> None:
        """Close all clients, and see their servers end."""
        for client in self.clients:
            client.close()
        for database in (torc.default_database(), os.path.abspath(torc.EMBEDDED_DATABASE)):
            found = torc.read_connection_file(database)
            if found and found['pid'] != os.getpid():
                os.kill(found['pid'], signal.SIGTERM)
                self.world.wait(lambda: not torc.process_lives(found), 10, 'the server to end')

    def connect(self, **how: Any) -> Any:
        """A client that is closed at the end."""
        client = torc.Client.connect(**how)
        self.clients.append(client)
        return client

    def test_without_a_server_the_verbs_are_called_directly(self) -> None:
        client = self.connect()
        self.assertEqual((True, '', os.path.abspath('torc_output/torc.db')), (client.is_direct, client.url, client.database))
        workflow = client.create_workflow({'name': 'w', 'user': 'u'})
        self.assertEqual('w', client.get_workflow(id=workflow['id'])['name'])
        self.assertIsNone(torc.read_connection_file(client.database))

    def test_direct_and_http_give_the_same(self) -> None:
        client = self.connect()
        number = client.create_workflow({'name': 'w', 'user': 'u', 'env': {'A': 'ü\n'}})['id']
        client.create_job({'workflow_id': number, 'name': 'j', 'command': 'true'})
        client.create_file({'workflow_id': number, 'name': 'f', 'path': '/x', 'st_mtime': 1.5})
        client.create_event({'workflow_id': number, 'data': {'a': [1, 2.0, None, True, {'b': 'c'}]}})
        client.initialize_jobs(id=number)
        calls = [(route.name, {name: 1 for name in re.findall(r'{(\w+)}', route.path)}) for route in torc.ROUTES if route.method == 'GET' and route.name != 'get_api_stats']     # a server's own
        calls = [(name, dict(params, **({'workflow_id': number} if 'workflow_id' in torc.query_fields(torc.OPERATIONS[name]) else {}))) for name, params in calls]
        direct = [self.outcome(client, name, params) for name, params in calls]
        self.assertTrue(client.is_direct)
        client.need_server()
        self.assertFalse(client.is_direct)
        for (name, params), wanted in zip(calls, direct):
            with self.subTest(name=name):
                found = self.outcome(client, name, params)
                self.assertEqual(wanted, found)
                self.assertEqual(json.dumps(wanted), json.dumps(found))     # tuples, keys and booleans as well
        self.assertGreater(sum('NotFound' not in value for value in direct), 20)

    @staticmethod
    def outcome(client: Any, name: str, params: Dict[str, Any]) -> Any:
        """A value, or the kind and message of the error."""
        try:
            return client.call(name, **params)
        except torc.TorcError as error:
            return [type(error).__name__, error.message, error.http]

    def test_without_a_server_a_task_is_done_at_once(self) -> None:
        client = self.connect()
        number = client.create_workflow({'name': 'w', 'user': 'u'})['id']
        self.assertEqual('succeeded', client.initialize_jobs(id=number, **{'async': True})['status'])
        self.assertTrue(client.is_direct)
        client.need_server()
        task = client.initialize_jobs(id=number, **{'async': True})
        self.assertEqual(('queued', 2), (task['status'], task['id']))
        self.assertEqual('succeeded', client.get_task(id=2)['status'])

    def test_every_operation_is_a_method_that_explains_itself(self) -> None:
        client = self.connect()
        self.assertEqual(set(), set(torc.OPERATIONS) - set(dir(client)))
        text = pydoc.render_doc(client, renderer=pydoc.plaintext)
        self.assertEqual([], [name for name in torc.OPERATIONS if f' {name}(' not in text])
        words = client.update_file.__doc__.split()
        self.assertEqual([], [word for word in ('PUT', '/files/{row_id}', '?FileModel', 'path:str!', '@FileModel') if word not in words])
        self.assertIn('workflow_id:int!', client.list_files.__doc__.split())

    def test_values_without_a_name_are_the_paths_and_then_the_body(self) -> None:
        client = self.connect()
        number = client.create_workflow({'name': 'w', 'user': 'u'})['id']
        job = client.create_job(body={'workflow_id': number, 'name': 'j', 'command': 'true'})['id']
        for answer in (client.update_job(job, {'priority': 1}), client.update_job({'priority': 1}, id=job), client.update_job({'priority': 1}, job_id=job),
                       client.update_job(job, body={'priority': 1})):
            self.assertEqual((job, 1), (answer['id'], answer['priority']))
        self.assertEqual('disabled', client.manage_status_change(job, 'disabled', 0)['status'])
        self.assertEqual('w', client.get_workflow(number)['name'])
        self.assertRaisesRegex(torc.BadInput, 'get_workflow takes at most 1 values without a name: workflow_id', client.get_workflow, number, 5)
        self.assertRaisesRegex(torc.BadInput, 'ping takes at most 0 values without a name', client.ping, 1)

    def test_wrong_parameters_are_refused_alike_at_both_doors(self) -> None:
        client = self.connect()
        number = client.create_workflow({'name': 'w', 'user': 'u'})['id']
        calls = [('get_workflow', {'id': 'x'}), ('get_workflow', {'id': {}}), ('list_jobs', {'workflow_id': number, 'limit': 'few'}),
                 ('list_jobs', {'workflow_id': str(number), 'limit': '5'}), ('list_files', {'workflow_id': number, 'is_output': 'maybe'}),
                 ('list_files', {'workflow_id': number, 'name': 5}), ('get_job', {'id': 2 ** 70}), ('list_jobs', {'workflow_id': True}),
                 ('get_pending_actions', {'id': number, 'trigger_type': 'on_jobs_ready'})]
        direct = [self.outcome(client, name, params) for name, params in calls]
        client.need_server()
        self.assertEqual(direct, [self.outcome(client, name, params) for name, params in calls])
        self.assertEqual("workflow_id must be an integer, not 'x'", direct[0][1])

    def test_the_end_of_a_with_statement_gives_the_database_back(self) -> None:
        with self.connect(database='w.db') as client:
            client.create_workflow({'name': 'w', 'user': 'u'})
            self.assertRaises(torc.Conflict, torc.Client(database=client.database).reconnect, wait_s=0)
        with self.connect(database='w.db') as other:
            self.assertEqual(1, other.list_workflows()['count'])

    def test_a_server_may_be_named_with_the_path_of_its_token(self) -> None:
        found = self.start_lasting(self.world.path('other.db'))
        os.environ['XDG_STATE_HOME'] = self.world.path('elsewhere')     # where no server is registered
        self.assertRaises(torc.Denied, self.connect(url=found['url']).list_workflows)
        with self.connect(url=found['url'], token_file=found['token_file']) as client:
            with self.assertRaises(torc.NotFound) as caught:
                client.get_workflow(77)
        self.assertEqual((404, 4, 'there is no workflow 77'), (caught.exception.http, caught.exception.exit, caught.exception.message))

    def test_slips_are_answered_at_once(self) -> None:
        client = self.connect(needs_server=True)
        self.assertRaisesRegex(torc.BadInput, "did you mean 'list_jobs'", client.call, 'list_job')
        self.assertRaisesRegex(AttributeError, "did you mean 'list_jobs'", getattr, client, 'list_job')
        self.assertRaisesRegex(torc.BadInput, 'get_workflow needs', client.get_workflow)
        self.assertRaisesRegex(torc.BadInput, 'cannot be sent as JSON', client.create_workflow, {'name': float('nan')})
        self.assertRaisesRegex(torc.BadInput, 'cannot be sent as JSON', client.create_workflow, {'name': '\ud800'})
        self.assertRaisesRegex(torc.BadInput, 'cannot be sent as JSON', client.create_workflow, {'name': object()})
        self.assertRaises(torc.NotFound, client.get_workflow, id=77)
        self.assertRaises(torc.BadInput, client.create_workflow, {})

    def test_all_items_come_page_by_page(self) -> None:
        client = self.connect()
        number = client.create_workflow({'name': 'w', 'user': 'u'})['id']
        for index in range(7):
            client.create_event({'workflow_id': number, 'data': {'index': index}})
        self.assertEqual(list(range(7)), [item['data']['index'] for item in client.pages('list_events', workflow_id=number, limit=3)])

    def test_a_reader_makes_no_database(self) -> None:
        self.assertRaisesRegex(torc.NotFound, 'no server and no database', self.connect, is_reading=True)
        self.assertFalse(os.path.exists('torc_output'))

    def test_the_order_in_which_servers_are_found(self) -> None:
        lasting = self.start_lasting(torc.default_database())
        embedded = self.connect(database=torc.EMBEDDED_DATABASE, needs_server=True)
        self.assertTrue(torc.read_connection_file(embedded.database)['is_embedded'])
        self.assertEqual(lasting['url'], self.connect().url)
        self.assertEqual(lasting['token_file'], self.connect().token_file)
        other = self.start_lasting(self.world.path('other.db'))
        self.assertRaisesRegex(torc.BadInput, 'several servers are registered', self.connect)
        self.assertEqual(embedded.url, self.connect(database=torc.EMBEDDED_DATABASE).url)
        self.assertEqual(other['url'], self.connect(database='other.db').url)
        os.environ['TORC_API_URL'], os.environ['TORC_TOKEN_FILE'] = other['url'], other['token_file']
        self.assertEqual(other['url'], self.connect().url)
        self.assertEqual('ok', self.connect().ping()['status'])
        self.assertEqual(embedded.url, self.connect(database=torc.EMBEDDED_DATABASE).url)
        del os.environ['TORC_TOKEN_FILE']
        for found in (lasting, other):
            self.assertEqual('ok', self.connect(url=found['url']).ping()['status'])    # its token file is found by its address

    def start_lasting(self, database: str) -> Dict[str, Any]:
        """A server that stays; what its connection file says."""
        script = ('import sys; sys.path.insert(0, sys.argv[1]); import torc; '
                  'torc.serve_database(torc.ServerOptions(sys.argv[2], port=0), lambda url: None)')
        process = Background([sys.executable, '-B', '-c', script, HERE, database], self.world.directory, self.world.environment,
                             os.path.join(self.world.root, 'logs', str(len(self.world.started))))
        self.world.started.append(process)
        return self.world.wait(lambda: torc.read_connection_file(database), 20, 'the server', [process])

    def test_a_lasting_server_that_died_is_waited_for_and_not_replaced(self) -> None:
        database = self.world.path('torc.db')
        self.start_lasting(database)
        client = self.connect(database=database, needs_server=True)
        number = client.create_workflow({'name': 'w', 'user': 'u'})['id']
        self.world.started[-1].kill()
        self.assertRaisesRegex(torc.Unreachable, 'start it again with `torc.py serve -d', client.reconnect, wait_s=0.1)
        self.start_lasting(database)
        self.assertEqual('w', client.get_workflow(id=number)['name'])

    def test_an_embedded_server_that_died_is_started_again(self) -> None:
        client = self.connect(needs_server=True)
        number = client.create_workflow({'name': 'w', 'user': 'u'})['id']
        for _ in range(3):
            os.kill(torc.read_connection_file(client.database)['pid'], signal.SIGKILL)
            self.assertEqual('w', client.get_workflow(id=number)['name'])

    def test_a_guest_of_an_embedded_server_that_died_goes_on_directly(self) -> None:
        host = self.connect(needs_server=True)
        host.create_workflow({'name': 'w', 'user': 'u'})
        guest = self.connect()
        self.assertEqual((False, host.url), (guest.is_direct, guest.url))
        os.kill(torc.read_connection_file(host.database)['pid'], signal.SIGKILL)
        self.assertEqual(1, guest.list_workflows()['count'])
        self.assertTrue(guest.is_direct)

    def test_a_body_that_is_too_large_is_told_as_such(self) -> None:
        client = self.connect(needs_server=True)
        with self.assertRaisesRegex(torc.BadInput, 'bytes; 2097152 are allowed here'):
            client.create_workflow({'name': 'w', 'user': 'u', 'description': 'x' * 20000000})
        self.assertEqual('ok', client.ping()['status'])

    def test_a_closed_client_opens_again_with_the_next_call(self) -> None:
        client = self.connect()
        client.create_workflow({'name': 'w', 'user': 'u'})
        client.close()
        other = self.connect()      # the database is free
        other.close()
        self.assertEqual(1, client.list_workflows()['count'])

    def test_a_command_waits_for_another_one_to_give_the_database_back(self) -> None:
        first = self.connect()
        first.ping()
        with self.assertRaisesRegex(torc.Conflict, 'in use by another torc.py'):
            torc.Client(database=first.database).reconnect(wait_s=0.1)
        script = ("import sys; sys.path.insert(0, sys.argv[1]); import torc\n"
                  "client = torc.Client(database=sys.argv[2])\n"
                  "print(flush=True)\n"
                  "client.reconnect()\n"
                  "print(client.is_direct)\n")
        process = subprocess.Popen([sys.executable, '-B', '-c', script, HERE, first.database], stdout=subprocess.PIPE, encoding='utf-8')
        process.stdout.readline()
        first.close()
        self.assertEqual('True\n', process.communicate(timeout=20)[0])

    def test_whoever_took_the_port_does_not_get_the_token(self) -> None:
        database = self.world.path('torc.db')
        token = torc.keep_token(database + '.token')
        for answer in (torc.format_answer(200, b'{"status":"ok"}'), torc.format_answer(200, b'{"proof":"%s"}' % (b'0' * 64)), b'', b'SSH-2.0-x\r\n\r\n',
                       torc.format_answer(200, b'[]')):
            impostor = Impostor(answer, answer)
            with torc.connection_file(torc.ServerOptions(database), [impostor.url]):
                self.assertRaises(torc.Unreachable, torc.Client(database=database).reconnect, wait_s=0)
            self.assertRaises(torc.Unreachable, torc.Client(url=impostor.url, token_file=database + '.token').reconnect, wait_s=0)
            impostor.stop()
            self.assertIn(b'GET /healthz?challenge=', impostor.heard)
            self.assertNotIn(token.encode(), impostor.heard)

    def test_a_password_is_shown_to_the_server_that_was_named_and_to_no_other(self) -> None:
        os.environ.update(TORC_PASSWORD='open-sesame', TORC_COOKIE_HEADER='gate=1', USER='ann')
        answer = torc.format_answer(200, b'{"status":"ok"}')
        shown = base64.b64encode(b'ann:open-sesame')
        impostor = Impostor(answer)
        self.assertEqual('ok', self.connect(url=impostor.url).ping()['status'])
        impostor.stop()
        self.assertIn(b'authorization: Basic ' + shown + b'\r\ncookie: gate=1\r\n', impostor.heard)
        database = self.world.path('torc.db')
        torc.keep_token(database + '.token')
        impostor = Impostor(answer)
        with torc.connection_file(torc.ServerOptions(database), [impostor.url]):
            self.assertRaises(torc.Unreachable, torc.Client(database=database, credentials=torc.Credentials('open-sesame', 'gate=1')).reconnect, wait_s=0)
        impostor.stop()
        self.assertIn(b'GET /healthz', impostor.heard)
        self.assertNotIn(shown, impostor.heard)
        self.assertNotIn(b'gate=1', impostor.heard)
        self.assertRaisesRegex(torc.BadInput, 'give --url too', torc.Client.connect, database=database, credentials=torc.Credentials('secret'))
        os.environ['TORC_API_URL'] = impostor.url
        self.assertRaisesRegex(torc.BadInput, 'no header field', torc.Client.connect, credentials=torc.Credentials('', 'a\r\nb: c'))
        os.environ['USER'] = 'a:b'
        self.assertRaisesRegex(torc.BadInput, 'holds no colon', torc.Client.connect)

    def test_a_server_that_has_too_much_to_do_is_asked_again_later(self) -> None:
        impostor = Impostor(torc.format_answer(429, b'{"error":{"message":"too many passwords"}}'))
        with self.assertRaisesRegex(torc.Unreachable, 'too many passwords'):
            self.connect(url=impostor.url).ping()
        impostor.stop()

    def test_what_may_have_been_done_is_not_sent_again(self) -> None:
        answer = torc.format_answer(200, b'{"status":"ok"}')
        impostor = Impostor(b'', b'', answer)
        client = self.connect(url=impostor.url)
        self.assertRaisesRegex(torc.Unreachable, 'no answer from', client.create_workflow, {'name': 'w', 'user': 'u'})
        self.assertEqual({'status': 'ok'}, client.ping() if client.reconnect() is None else None)
        impostor.stop()
        self.assertEqual(1, impostor.heard.count(b'POST '))

    def test_a_slow_server_is_not_waited_for_longer_than_the_deadline(self) -> None:
        with contextlib.closing(Impostor.listen()) as listener:
            client = self.connect(url=f'http://127.0.0.1:{listener.getsockname()[1]}')
            begun = time.monotonic()
            with self.assertRaisesRegex(torc.Unreachable, 'too slow'):
                client.call('create_workflow', {'name': 'w', 'user': 'u'}, deadline_s=0.2)
            self.assertLess(time.monotonic() - begun, 2)
            client.close()

    def test_nobody_there_is_told_soon(self) -> None:
        with contextlib.closing(Impostor.listen()) as listener:
            url = f'http://127.0.0.1:{listener.getsockname()[1]}/torc-service/v1'
        os.environ['http_proxy'] = 'http://127.0.0.1:9'
        with self.assertRaisesRegex(torc.Unreachable, 'does not answer: Connection refused; is the server running'):
            torc.Client.connect(url=url)

    def test_five_at_once_share_one_embedded_server(self) -> None:
        script = ("import sys; sys.path.insert(0, sys.argv[1]); import torc\n"
                  "client = torc.Client.connect(needs_server=True)\n"
                  "for number in range(20): client.create_workflow({'name': 'w', 'user': 'u'})\n"
                  "print(client.url, flush=True)\n"
                  "client.close() if len(sys.argv) > 2 else sys.stdin.read()\n")
        processes = [subprocess.Popen([sys.executable, '-B', '-c', script, HERE], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                      stderr=subprocess.PIPE, encoding='utf-8') for _ in range(5)]
        urls = {process.stdout.readline() for process in processes}
        outcomes = [process.communicate('')[1] for process in processes]
        self.assertEqual([''] * 5, outcomes)
        self.assertEqual(1, len(urls))
        client = self.connect()
        self.assertEqual(100, client.list_workflows()['count'])

    def test_coming_while_the_server_leaves_is_no_error(self) -> None:
        script = ("import sys, time; sys.path.insert(0, sys.argv[1]); import torc\n"
                  "torc.EMBEDDED_GRACE_S = 0.0\n"
                  "for number in range(40):\n"
                  "    client = torc.Client.connect(needs_server=True)\n"
                  "    client.create_workflow({'name': 'w', 'user': 'u'})\n"
                  "    client.close()\n")
        processes = [subprocess.Popen([sys.executable, '-B', '-c', script, HERE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding='utf-8')
                     for _ in range(3)]
        self.assertEqual([('', '')] * 3, [process.communicate(timeout=60) for process in processes])
        self.world.wait(lambda: not torc.read_connection_file(os.path.abspath(torc.EMBEDDED_DATABASE)), 10, 'the last server to leave')
        self.assertEqual(120, self.connect().list_workflows()['count'])


class ClientStreamTest(WorldTest):
    """Streams of events through a client."""
    set_constant = ServerTest.set_constant
    tell = StreamTest.tell

    def setUp(self) -> None:
        super().setUp()
        self.set_constant('STREAM_PAUSE_S', 0.01)

    def serve(self) -> Any:
        """A server in this process, and a client of it that has made a workflow."""
        self.server = ServerThread(self.world.path('torc.db'))
        self.addCleanup(self.server.stop)
        client = torc.Client.connect(url=f'http://127.0.0.1:{self.server.port}')
        self.addCleanup(client.close)
        self.workflow_id = client.create_workflow({'name': 'w', 'user': 'u'})['id']
        return client

    def stream(self, client: Any, **more: Any) -> Iterator[Any]:
        """The events of that workflow, from now on."""
        events = client.stream('stream_workflow_events', workflow_id=self.workflow_id, **more)
        self.addCleanup(events.close)
        found = []
        reader = threading.Thread(target=lambda: found.append(next(events)), daemon=True)      # it is let in while it waits for the first
        reader.start()
        self.world.wait(lambda: any(one.feed for one in self.server.server.connections), 10, 'the reader to be let in')
        self.tell('opened')
        reader.join(10)
        self.assertEqual('opened', found[0].type)
        return events

    def test_a_lost_connection_is_made_good_without_loss(self) -> None:
        client = self.serve()
        events = self.stream(client)
        for round in range(5):
            self.tell('a', count=3)
            self.assertEqual([('a', number) for number in range(3)], [(event.type, event.data['data']['n']) for event in itertools.islice(events, 3)])
            server = self.server.server
            server.tick = lambda store: [server.drop(one) for one in list(server.connections) if one.feed] and False
            server.tick_at = 0.0
            self.server.ask(http_request())
            self.tell('b', count=3)
            self.assertEqual([('b', number) for number in range(3)], [(event.type, event.data['data']['n']) for event in itertools.islice(events, 3)])
            self.assertEqual({'status': 'ok'}, client.ping())       # a stream has a connection of its own

    def test_it_ends_when_its_time_is_over(self) -> None:
        client, begun = self.serve(), time.monotonic()
        self.assertEqual([], list(client.stream('stream_workflow_events', begun + 0.2, workflow_id=self.workflow_id)))
        self.assertTrue(0.2 <= time.monotonic() - begun < 5)

    def test_an_error_is_that_of_the_verb(self) -> None:
        client = self.serve()
        with self.assertRaises(torc.NotFound) as caught:
            next(client.stream('stream_workflow_events', workflow_id=77))
        self.assertEqual('there is no workflow 77', caught.exception.message)
        with self.assertRaises(torc.BadInput) as caught:
            client.stream_workflow_events(workflow_id=1)
        self.assertIn("client.stream('stream_workflow_events', ...)", caught.exception.message)

    def test_events_are_read_as_browsers_read_them(self) -> None:
        self.assertEqual(('7-1', 'note', {'a': 1}), tuple(torc.parse_event(b': words\nid: 7-1\nevent:note\ndata: {"a":\ndata:1}\nretry: 5')))
        self.assertEqual(('', '', None), tuple(torc.parse_event(b':')))
        self.assertEqual(('', 'message', [1]), tuple(torc.parse_event(b'data: [1]')))
        with self.assertRaises(ConnectionError):
            torc.parse_event(b'data: {')

    def test_what_is_no_stream_is_an_error_and_not_waited_for(self) -> None:
        for answer, kind in ((b'HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}', torc.Unreachable), (b'HTTP/1.1 403 No\r\ncontent-length: 0\r\n\r\n', torc.Denied)):
            other = Impostor(answer)
            self.addCleanup(other.stop)
            with contextlib.closing(torc.Client.connect(url=other.url)) as client, self.assertRaises(kind):
                next(client.stream('stream_api_events'))

    def test_an_embedded_server_is_started_for_it_and_replaced_when_it_dies(self) -> None:
        with contextlib.closing(self.world.connect()) as other:
            self.workflow_id = other.create_workflow({'name': 'w', 'user': 'u'})['id']
            self.assertTrue(other.is_direct)
        client = self.world.connect(needs_server=True)
        self.addCleanup(client.close)
        events = client.stream('stream_workflow_events', workflow_id=self.workflow_id)
        self.addCleanup(events.close)
        found, errors = [], []

        def read() -> None:
            try:
                for event in events:
                    found.append((event.type, event.data.get('dropped', '')))
                    if ('warning', None) in found[:-1]:     # the new server's first news after its greeting
                        return
            except torc.TorcError as error:
                errors.append(error)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        database = self.world.path('torc_output', 'torc.db')
        first = self.world.wait(lambda: torc.read_connection_file(database), 10, 'the server')

        def act_until(is_enough: Callable[[], bool]) -> None:
            with contextlib.closing(self.world.connect()) as other:
                while not is_enough() and not errors:       # the reader may not have been let in yet
                    other.archive_workflow({'is_archived': False}, workflow_id=self.workflow_id)
        act_until(lambda: bool(found))
        os.kill(first['pid'], signal.SIGKILL)
        self.world.wait(lambda: ('warning', None) in found or errors, 20, 'the reader to be told', state=lambda: found)
        act_until(lambda: not reader.is_alive())
        reader.join(10)
        self.assertEqual(([], {('user_action', ''), ('warning', None)}), (errors, set(found)))
        self.assertNotEqual(first['pid'], torc.read_connection_file(database)['pid'])


# ======== 13. Launcher ========


class LauncherTest(WorldTest):
    """Real processes: how they start, end, and take what they have left behind with them."""

    def setUp(self) -> None:
        super().setUp()
        with self.world.inside():
            self.launcher = torc.Launcher(self.world.directory)
        self.addCleanup(self.launcher.close)    # before the world's own: last in, first out

    def start(self, command: str, name: str = '1-1', **variables: str) -> Any:
        """Start a command whose output goes to the files out and err."""
        outputs = [torc.open_output(self.world.path(stem)) for stem in ('out', 'err')]
        try:
            with self.world.inside():
                return self.launcher.start(command, dict(variables, HERE=self.world.directory), outputs, name)
        finally:
            for descriptor in outputs:
                os.close(descriptor)

    def end_of(self, process: Any, deadline_s: float = 20) -> Any:
        """Wait until nothing of a process lives."""
        self.world.wait(lambda: self.look() and process in self.ended, deadline_s, 'the end of a process')
        return process.end

    def look(self) -> bool:
        """One turn of a loop that owns the launcher."""
        self.ended = getattr(self, 'ended', [])
        self.launcher.kill_due()
        self.ended += self.launcher.poll()
        return True

    def pid_in(self, name: str) -> int:
        """A pid that a job has written to a file."""
        return int(self.world.wait(lambda: self.world.read(name).strip(), 10, name))

    def assertGone(self, *names: str) -> None:
        """Processes whose pids stand in these files do not live."""
        for name in names:
            self.world.wait(lambda: not torc.read_process_start_ticks(self.pid_in(name)), 10, f'the end of {name}')

    HIDDEN = '(setsid env -i /bin/sh -c "echo \\$\\$ > hidden; exec /bin/sleep 1000" &) ; '

    def test_what_hides_its_origin_ends_with_the_jobs_that_it_can_be_from(self):
        other = self.start('echo $$ > other; exec sleep 1000', '2-1')
        job = self.start('cd "$HERE"; ' + self.HIDDEN + 'while [ ! -s hidden ]; do /bin/sleep 0.01; done; /bin/sleep 0.1')
        self.end_of(job)
        self.launcher.stop(other, signal.SIGKILL, 0)
        self.end_of(other)
        self.world.wait(lambda: self.look() and not torc.read_process_start_ticks(self.pid_in('hidden')), 10, 'the end of the hidden process')
        self.assertTrue(self.pid_in('hidden'))

    def test_nothing_that_hides_its_origin_outlives_the_launcher(self):
        with self.world.inside():
            first, self.launcher = self.launcher, torc.Launcher(self.world.directory)
        self.start('cd "$HERE"; exec env -i setsid /bin/sh -c "echo \\$\\$ > shell; /bin/sh -c \'echo \\$\\$ > hidden; /bin/sleep 1000; true\'; true"')
        self.pid_in('hidden')
        self.launcher.close()
        self.launcher = first
        self.assertGone('shell', 'hidden')

    def test_a_guardian_that_was_killed_is_replaced(self):
        first = self.launcher.guardian
        os.kill(first, signal.SIGKILL)
        self.world.wait(lambda: os.waitpid(first, os.WNOHANG)[0] == first, 10, 'the end of the guardian')
        self.assertEqual(0, self.end_of(self.start('true')).return_code)
        self.assertNotEqual(first, self.launcher.guardian)
        self.assertTrue(torc.read_process_start_ticks(self.launcher.guardian))

    def test_a_guardian_that_is_stopped_is_not_waited_for_for_ever(self):
        os.kill(self.launcher.guardian, signal.SIGSTOP)
        guardian, began = self.launcher.guardian, time.monotonic()
        self.launcher.dismiss_guardian()
        self.assertLess(time.monotonic() - began, 10)
        self.assertFalse(torc.read_process_start_ticks(guardian))
        with self.world.inside():
            self.launcher.guardian, self.launcher.pipe = torc.start_guardian(b'x')

    def test_a_command_gets_its_environment_and_its_exit_code_is_told(self):
        process = self.start('echo "$GREETING"; echo oops >&2; exit 7', GREETING="it's $HOME")
        end = self.end_of(process)
        self.assertEqual((7, 0), (end.return_code, end.signal_number))
        self.assertEqual(("it's $HOME\n", 'oops\n'), (self.world.read('out'), self.world.read('err')))

    def test_a_signal_is_told_as_128_plus_its_number(self):
        self.assertEqual(128 + 9, self.end_of(self.start('kill -KILL $$')).return_code)

    def test_an_unknown_command_ends_with_127_and_says_so(self):
        self.assertEqual(127, self.end_of(self.start('no-such-command-here')).return_code)
        self.assertIn('no-such-command-here', self.world.read('err'))

    def test_a_job_is_a_session_of_its_own_without_input_and_with_default_signals(self):
        self.end_of(self.start('cat; ps -o sid= -p $$ >/dev/null 2>&1; echo $$; cut -d" " -f6 /proc/$$/stat; grep SigIgn /proc/$$/status'))
        pid, session, ignored = self.world.read('out').split('\n')[:3]
        self.assertEqual(pid, session)
        self.assertEqual(0, int(ignored.split()[1], 16) & 0x7fffffff)   # 32 and 33 are the C library's own

    def test_a_job_inherits_no_descriptor(self):
        reader, writer = os.pipe()
        os.set_inheritable(writer, True)
        try:
            self.launcher.seal_inherited_descriptors()
            self.end_of(self.start('ls -l /proc/self/fd > fds'))
        finally:
            os.close(reader)
            os.close(writer)
        self.assertIn('/dev/null', self.world.read('fds'))
        self.assertNotIn('pipe:', self.world.read('fds'))

    def test_a_pipe_that_lies_where_output_goes_holds_up_nobody(self):
        path = self.world.path('pipe')
        os.mkfifo(path)
        self.assertRaises(OSError, torc.open_output, path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, reader)
        self.assertRaises(FileExistsError, torc.open_output, path)

    def test_a_command_longer_than_an_argument_may_be_runs_from_a_private_file(self):
        process = self.start('# ' + 'x' * 300000 + '\necho ran; exit 3')
        self.assertEqual(0o600, stat.S_IMODE(os.stat(process.script).st_mode))
        self.assertEqual(3, self.end_of(process).return_code)
        self.assertEqual('ran\n', self.world.read('out'))
        self.assertFalse(os.path.exists(process.script))

    def test_what_cannot_be_said_to_the_system_is_an_error(self):
        for command, variables in (('echo \0', {}), ('true', {'A': 'b\0c'}), ('true', {'A=B': 'c'}), ('echo \ud800', {})):
            with self.subTest(command), self.assertRaises(ValueError):
                self.start(command, **variables)
        with self.assertRaises(OSError):
            self.start('true', A='x' * 200000)

    def test_an_output_file_is_emptied_and_never_reached_through_a_link(self):
        self.world.write('out', 'old')
        os.symlink(self.world.write('precious', 'kept'), self.world.path('link'))
        with self.assertRaises(OSError):
            torc.open_output(self.world.path('link'))
        self.assertEqual('kept', self.world.read('precious'))
        self.end_of(self.start('echo new'))
        self.assertEqual('new\n', self.world.read('out'))

    def test_without_posix_spawn_popen_does_the_same(self):
        self.launcher.spawn.close()
        self.launcher.spawn = torc.PopenSpawner()
        self.assertEqual(5, self.end_of(self.start('echo $A $$; cut -d" " -f6 /proc/$$/stat; exit 5', A='yes')).return_code)
        pid, session = self.world.read('out').split()[1:]
        self.assertEqual(pid, session)

    def test_background_children_of_a_job_do_not_outlive_it(self):
        self.end_of(self.start('sleep 1000 & echo $! > a'))
        self.assertFalse(torc.read_process_start_ticks(self.pid_in('a')))

    def test_a_daemon_in_a_session_of_its_own_does_not_outlive_its_job(self):
        self.end_of(self.start("setsid sh -c 'echo $$ > a; sleep 1000 & echo $! > b; wait' & until test -s b; do sleep 0.01; done"))
        self.assertFalse(torc.read_process_start_ticks(self.pid_in('a')))
        self.assertFalse(torc.read_process_start_ticks(self.pid_in('b')))

    def test_what_ignores_sigterm_is_killed(self):
        torc_term, torc.LEFTOVER_TERM_S = torc.LEFTOVER_TERM_S, 0.2
        try:
            self.end_of(self.start("setsid sh -c 'trap \"\" TERM; echo $$ > a; while :; do sleep 0.1; done' & until test -s a; do sleep 0.01; done"))
        finally:
            torc.LEFTOVER_TERM_S = torc_term
        self.assertFalse(torc.read_process_start_ticks(self.pid_in('a')))

    def test_the_end_of_one_job_leaves_the_daemons_of_another_alone(self):
        other = self.start("setsid sh -c 'echo $$ > a; exec sleep 1000' & sleep 1000", '2-1')
        daemon = self.pid_in('a')
        self.end_of(self.start('true', '1-1'))
        self.assertTrue(torc.read_process_start_ticks(daemon))
        self.launcher.stop(other, signal.SIGTERM, 5)
        self.assertEqual(143, self.end_of(other).return_code)
        self.assertFalse(torc.read_process_start_ticks(daemon))

    def test_a_stopped_job_may_clean_up_and_exit_as_it_likes(self):
        process = self.start("trap 'echo saved; exit 42' TERM; echo > ready; while :; do sleep 0.05; done")
        self.world.wait(lambda: os.path.exists(self.world.path('ready')), 10, 'the trap')
        self.launcher.stop(process, signal.SIGTERM, 20)
        self.assertEqual((42, 0), self.end_of(process)[:2])
        self.assertEqual('saved\n', self.world.read('out'))

    def test_a_frozen_job_is_continued_so_that_it_can_end(self):
        process = self.start('kill -STOP $$; sleep 60')
        self.world.wait(lambda: ') T ' in read_text(f'/proc/{process.pid}/stat'), 10, 'the job to be frozen')
        self.launcher.stop(process, signal.SIGTERM, 20)
        self.assertEqual(143, self.end_of(process).return_code)

    def test_a_job_that_ignores_the_signal_is_killed_when_its_time_is_over(self):
        process = self.start("trap '' TERM; echo > ready; while :; do sleep 0.05; done")
        self.world.wait(lambda: os.path.exists(self.world.path('ready')), 10, 'the trap')
        self.launcher.stop(process, signal.SIGTERM, 0.2)
        self.assertLessEqual(self.launcher.next_deadline(), time.monotonic() + 0.2)
        self.assertEqual(137, self.end_of(process).return_code)

    def test_closing_kills_everything_even_what_has_hidden_its_origin(self):
        self.start("(env -i setsid sh -c 'echo $$ > a; exec sleep 1000' &) ; echo $$ > b; exec sleep 1000")
        self.pid_in('a'), self.pid_in('b')
        self.launcher.close()
        self.addCleanup(self.revive)
        self.assertGone('a', 'b')

    def revive(self) -> None:
        """A fresh launcher for tearDown to close."""
        self.launcher.__init__(self.world.directory)

    def test_peak_memory_is_told_where_it_is_known(self):
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024     # what a child's figure begins with
        size = own + (100 << 20)
        end = self.end_of(self.start(f"exec {shlex.quote(sys.executable)} -S -c 'x = bytearray({size})'"))
        self.assertGreater(end.peak_memory_bytes, size)
        self.assertLess(end.peak_memory_bytes, size + (100 << 20))
        self.assertGreater(end.cpu_s, 0)


class GuardianTest(WorldTest):
    """What happens when a runner dies without a word."""

    def run_and_die(self, command: str, *pid_files: str) -> None:
        """A process that owns a launcher starts a command, and is killed when the command has written its pids."""
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                os.chdir(self.world.directory)
                os.environ[MARK] = self.world.mark
                launcher = torc.Launcher(self.world.directory)
                null = os.open(os.devnull, os.O_WRONLY)
                launcher.start(command, {}, (null, null), '1-1')
                while True:
                    launcher.poll()
                    select.select([], [], [], 0.01)
            finally:
                os._exit(1)
        try:
            self.pids = [int(self.world.wait(lambda: self.world.read(name).strip(), 10, name)) for name in pid_files]
            self.world.wait(self.is_settled, 10, 'the guardian to look')
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for child in self.pids:
            self.world.wait(lambda: not torc.read_process_start_ticks(child), 10, f'the end of {child}')

    def is_settled(self) -> bool:
        """Nothing to wait for, as a rule."""
        return True

    def test_a_killed_runner_leaves_no_job_behind(self):
        self.run_and_die('echo $$ > a; sleep 1000 & echo $! > b; wait', 'a', 'b')

    def test_a_killed_runner_leaves_no_daemon_behind(self):
        self.run_and_die("echo $$ > a; setsid sh -c 'trap \"\" TERM HUP; (sleep 1000 & echo $! > c); echo $$ > b; sleep 1000' & wait", 'a', 'b', 'c')

    def test_a_killed_runner_leaves_nothing_behind_that_has_hidden_its_origin(self):
        began = time.monotonic()
        self.is_settled = lambda: time.monotonic() > began + 2 * torc.GUARD_INTERVAL_S + 0.5    # it looks once a second
        self.run_and_die("echo $$ > a; (env -i setsid sh -c 'echo $$ > b; exec sleep 1000' &); sleep 1000", 'a', 'b')


class EndTest(unittest.TestCase):
    """How a process ended, in words."""

    def test_a_core_dump_is_told_from_the_wait_status(self):
        usage = resource.getrusage(resource.RUSAGE_SELF)
        for status, text in ((signal.SIGSEGV | 0x80, 'killed by SIGSEGV (core dumped)'),
                             (signal.SIGSEGV, 'killed by SIGSEGV'), (3 << 8, '')):
            process = torc.Process(1, b'mark', None)
            process.close(int(status), usage)
            self.assertEqual(text, torc.explain_end(process.end, None, None))


class CommandTextTest(unittest.TestCase):
    """What the shell gets."""

    def test_an_invocation_script_wraps_or_precedes_the_command(self):
        for script, text in ((None, 'run x'), ('  ', 'run x'), ('time ', 'time run x'), ('module load a\nexport B=1\n\n', 'module load a\nexport B=1\nrun x')):
            with self.subTest(script):
                self.assertEqual(text, torc.compose_command(script, 'run x'))

    def test_gpus_are_shown_under_every_name(self):
        self.assertEqual({}, torc.gpu_environment(()))
        self.assertEqual({'2,0'}, set(torc.gpu_environment(('2', '0')).values()))
        self.assertIn('CUDA_VISIBLE_DEVICES', torc.gpu_environment(('1',)))

    def test_the_last_line_is_the_last_that_says_something(self):
        with tempfile.NamedTemporaryFile() as file:
            file.write(b'first\n10%\r100% done \x1b[0m\n \n\n')
            file.flush()
            self.assertEqual('100% done \\x1b[0m', torc.read_last_line(file.name))
        self.assertEqual('', torc.read_last_line('/no/such/file'))
        self.assertEqual('', torc.read_last_line(None))


# ======== 16. Runner ========


class StoreClient:
    """The verbs on a store of our own, as the runner's client; `faults` says what happens to each request instead."""
    url, token_file, servers_started = 'http://127.0.0.1:1/torc-service/v1', '/secret/token', 0
    trust = torc.Trust()

    def __init__(self, path: str) -> None:
        self.store = torc.Store(path)
        self.requests = []      # type: List[Dict[str, Any]]
        self.before = lambda number: None   # type: Callable[[int], None]
        self.after = lambda number: None    # type: Callable[[int], None]

    def call(self, op: str, body: Any = None, deadline_s: Optional[float] = None, **params: Any) -> Any:
        """Carry out an operation as a server would."""
        if op == 'runner_sync':
            self.requests.append(json.loads(json.dumps(body)))
            self.before(len(self.requests))
        with self.store.transaction():
            answer = torc.call_operation(self.store, op, params, body)
        if op == 'runner_sync':
            self.after(len(self.requests))
        return answer

    def begin(self, op: str, body: Any = None, deadline_s: float = 0, **params: Any) -> Any:
        """The same in two steps; what fails, fails when the answer is fetched."""
        pending = torc.Pending()
        try:
            pending.value = self.call(op, body, deadline_s, **params)
        except torc.Unreachable as error:
            pending.finish = functools.partial(self.fail, error)
        return pending

    @staticmethod
    def fail(error: Exception, *_: Any) -> None:
        """No answer."""
        raise error

    def reconnect(self, wait_s: float = 0) -> None:
        """Nothing can be done."""

    def rows(self, op: str, **params: Any) -> List[Dict[str, Any]]:
        """Items of a list."""
        return self.call(op, **params)['items']


class Watcher:
    """Progress that remembers."""

    def __init__(self) -> None:
        self.failed, self.messages, self.counts = [], [], {}    # type: List[Tuple[str, int, str]], List[str], Dict[str, int]
        self.first = {}     # type: Dict[str, int]

    def on_turn(self, counts: Dict[str, int]) -> None:
        """Remember the first and the last."""
        self.first = self.first or counts
        self.counts = counts

    def on_failed_job(self, name: str, return_code: int, last_line: str = '') -> None:
        """Remember all."""
        self.failed.append((name, return_code, last_line))

    def on_message(self, text: str) -> None:
        """Remember all."""
        self.messages.append(text)


class RunnerTest(WorldTest):
    """Whole lives of a runner in this process, on a real store, with real jobs."""

    def setUp(self) -> None:
        super().setUp()
        self.client = StoreClient(self.world.path('torc.db'))
        self.addCleanup(self.client.store.close)
        self.progress = Watcher()

    def create(self, *jobs: Any, **fields: Any) -> int:
        """A workflow of jobs given as fields or commands; the first is named j1."""
        listed = [dict({'name': f'j{number}'}, **(job if isinstance(job, dict) else {'command': job})) for number, job in enumerate(jobs, 1)]
        document = torc.read_document(json.dumps(dict({'name': 'w', 'jobs': listed}, **fields)).encode(), '', 'json')
        with self.world.inside():
            plan = torc.read_plan(document, self.world.directory)
        workflow_id = self.client.call('create_workflow_from_spec', json.loads(json.dumps(plan.body)))['workflow_id']
        self.client.call('initialize_jobs', workflow_id=workflow_id)
        return workflow_id

    def run_it(self, workflow_id: int = 1, env: Optional[Dict[str, str]] = None, **options: Any) -> Any:
        """Run a workflow here, to the runner's end."""
        with self.world.inside(env):
            options = dict({'num_cpus': 2, 'memory_gb': 4.0, 'num_gpus': 0, 'poll_interval_s': 0.2}, **options)
            return torc.run_workflow(self.client, workflow_id, torc.RunnerOptions(output_dir='out', **options), self.progress)

    def statuses(self) -> Dict[str, str]:
        """Name -> status of all jobs of workflow 1."""
        return {job['name']: job['status'] for job in self.client.rows('list_jobs', workflow_id=1)}

    def results(self) -> List[Tuple[int, int, int, str]]:
        """(job, attempt, return code, status) of all results."""
        rows = self.client.rows('list_results', workflow_id=1, all_runs=True)
        return sorted((row['job_id'], row['attempt_id'], row['return_code'], row['status']) for row in rows)

    def stdio(self, job_id: int = 1, end: str = 'o', attempt_id: int = 1) -> str:
        """A job's output."""
        return self.world.read(f'out/job_stdio/job_wf1_j{job_id}_r1_a{attempt_id}.{end}')

    def log(self) -> str:
        """The runner's log."""
        return ''.join(read_text(path) for path in glob.glob(glob.escape(self.world.path('out')) + '/job_runner_*_wf1_r1.log'))

    def test_a_diamond_runs_in_order_and_is_reported(self):
        self.create('echo a >> order', {'command': 'echo b >> order', 'depends_on': ['j1']}, {'command': 'echo b >> order', 'depends_on': ['j1']},
                    {'command': 'echo c >> order', 'depends_on': ['j2', 'j3']})
        outcome = self.run_it()
        self.assertEqual((4, 0, True, 'complete'), (outcome.completed, outcome.failed, outcome.is_complete, outcome.reason))
        self.assertEqual('a\nb\nb\nc\n', self.world.read('order'))
        self.assertEqual({'completed'}, set(self.statuses().values()))
        self.assertEqual([False], [node['is_active'] for node in self.client.rows('list_compute_nodes', workflow_id=1)])
        self.assertLess(outcome.wall_s, 3)

    def test_the_log_has_the_words_of_the_pages_and_is_private(self):
        self.create('exit 3')
        self.run_it()
        for words in ('Job runner starting workflow_id=1 ', ' execution_mode=Direct limit_resources=true', 'Job started workflow_id=1 job_id=1 run_id=1 ',
                      'Job completed workflow_id=1 job_id=1 run_id=1 attempt_id=1 return_code=3 status=failed ', 'Workflow complete workflow_id=1'):
            self.assertIn(words, self.log())
        path, = glob.glob(glob.escape(self.world.path('out')) + '/job_runner_*')
        self.assertEqual(0o600, stat.S_IMODE(os.stat(path).st_mode))

    def test_a_job_sees_its_variables_and_never_a_token(self):
        self.create({'command': 'env', 'env': {'MINE': 'job', 'TORC_JOB_ID': 'mine'}}, env={'SHARED': 'all', 'MINE': 'workflow'})
        self.run_it(env={'TORC_PASSWORD': 'sesame', 'OUTER': 'yes'})
        found = dict(line.split('=', 1) for line in self.stdio().splitlines() if '=' in line)
        wanted = {'MINE': 'job', 'SHARED': 'all', 'OUTER': 'yes', 'TORC_WORKFLOW_ID': '1', 'TORC_JOB_ID': '1', 'TORC_JOB_NAME': 'j1', 'TORC_RUN_ID': '1',
                  'TORC_ATTEMPT_ID': '1', 'TORC_API_URL': StoreClient.url, 'TORC_TOKEN_FILE': StoreClient.token_file,
                  'TORC_OUTPUT_DIR': self.world.path('out')}
        self.assertEqual(wanted, {name: found.get(name) for name in wanted})
        self.assertNotIn('sesame', self.stdio())
        self.assertFalse([name for name in found if 'VISIBLE_DEVICES' in name])

    def test_a_failed_job_is_named_with_its_last_words(self):
        self.create("echo 'no luck' >&2; exit 4")
        outcome = self.run_it()
        self.assertEqual([(1, 'j1', 4, 'no luck')], outcome.failed_jobs)
        self.assertEqual([('j1', 4, 'no luck')], self.progress.failed)

    def test_the_reason_of_a_failure_is_kept_with_its_result(self):
        rows = rows_of('''
            command                                             reason
            echo out; echo 'no luck' >&2; echo ' ' >&2; exit 3  no luck
            echo 'Fatal: no licence'; exit 4                    Fatal: no licence
            exit 5                                              -
            kill -9 $$                                          killed by SIGKILL
            echo 'what(): bad_alloc' >&2; kill -ABRT $$         killed by SIGABRT: what(): bad_alloc
            kill -40 $$                                         killed by signal 40
            exit 139                                            killed by SIGSEGV, judging by its return code
            ''')
        self.create(*('ulimit -c 0; ' + row['command'] for row in rows))
        self.run_it()
        wanted = {f'j{number}': row['reason'] for number, row in enumerate(rows, 1)}
        results = self.client.rows('list_results', workflow_id=1)
        self.assertEqual(wanted, {row['job_name']: row.get('reason', '') for row in results})
        self.assertEqual(wanted, {name: reason for name, _, reason in self.progress.failed})

    def test_reasons_of_all_attempts_are_kept(self):
        rule = {'match_all_exit_codes': True, 'max_retries': 2}
        self.create({'command': 'echo attempt $TORC_ATTEMPT_ID >&2; exit 1', 'failure_handler': 'fix'},
                    failure_handlers=[{'name': 'fix', 'rules': [rule]}])
        self.run_it()
        results = self.client.rows('list_results', workflow_id=1, all_runs=True)
        self.assertEqual(['attempt 1', 'attempt 2'], [row['reason'] for row in results])
        events = [event['data'] for event in self.client.rows('list_events', workflow_id=1, category='job')]
        self.assertEqual([('error', 'j1: attempt 1'), ('error', 'j1: attempt 2')],
                         [(data['level'], data['message']) for data in events])

    def test_a_reason_can_be_stored_whatever_a_job_writes(self):
        self.create("printf 'bad \\xff\\x1b[2J\\0\\u2028end' >&2; exit 1")
        self.run_it()
        reason, = (row['reason'] for row in self.client.rows('list_results', workflow_id=1))
        self.assertRegex(reason, r'\Abad .*end\Z')
        self.assertEqual(torc.printable(reason), reason)

    def test_many_missing_files_are_named_in_short(self):
        names = [f'f{number}' for number in range(30)]
        self.create({'command': 'true', 'output_files': names},
                    files=[{'name': name, 'path': name + '.txt'} for name in names])
        self.assertRegex(self.run_it().failed_jobs[0][3],
                         r'\Adeclared output files are missing: (\S+\.txt, ){9}\S+\.txt and 20 more\Z')

    def test_stdio_modes_make_these_files(self):
        rows = rows_of('''
            mode       files
            separate   job_wf1_j1_r1_a1.e job_wf1_j1_r1_a1.o
            combined   job_wf1_j1_r1_a1.log
            no_stdout  job_wf1_j1_r1_a1.e
            no_stderr  job_wf1_j1_r1_a1.o
            none       -
            ''')
        modes = {f'm{number}': row['mode'] for number, row in enumerate(rows)}
        self.create(*({'name': name, 'command': 'echo out; echo err >&2'} for name in modes),
                    execution_config={'job_stdio_overrides': {name: {'mode': mode} for name, mode in modes.items()}})
        self.run_it()
        files = sorted(os.listdir(self.world.path('out', 'job_stdio')))
        for number, row in enumerate(rows, 1):
            with self.subTest(row['mode']):
                self.assertEqual(row['files'].replace('_j1_', f'_j{number}_').split(), [name for name in files if f'_j{number}_' in name])
        self.assertEqual('out\nerr\n', self.world.read('out/job_stdio/job_wf1_j2_r1_a1.log'))

    def test_output_is_deleted_after_success_only(self):
        self.create('echo a', 'echo b; exit 1', execution_config={'stdio': {'mode': 'separate', 'delete_on_success': True}})
        self.run_it()
        self.assertEqual(['job_wf1_j2_r1_a1.e', 'job_wf1_j2_r1_a1.o'], sorted(os.listdir(self.world.path('out', 'job_stdio'))))

    def test_a_jobs_own_stdio_inherits_nothing(self):
        self.create(*({'command': 'echo a', 'stdio': own} for own in ({'mode': 'separate'}, {}, {'delete_on_success': False})), 'echo b',
                    execution_config={'stdio': {'mode': 'combined', 'delete_on_success': True}})
        self.run_it()
        self.assertEqual([f'job_wf1_j{number}_r1_a1.{end}' for number in (1, 2, 3) for end in 'eo'], sorted(os.listdir(self.world.path('out', 'job_stdio'))))

    def test_a_missing_output_file_fails_the_job_by_name(self):
        self.create({'command': 'true', 'output_files': ['f']}, {'command': 'true', 'input_files': ['f']},
                    {'command': 'echo > made.txt', 'output_files': ['g']},
                    files=[{'name': 'f', 'path': 'missing.txt'}, {'name': 'g', 'path': 'made.txt'}])
        outcome = self.run_it()
        self.assertEqual({'j1': 'failed', 'j2': 'canceled', 'j3': 'completed'}, self.statuses())
        self.assertEqual((1, 'declared output files are missing: missing.txt'), outcome.failed_jobs[0][2:])
        times = {row['name']: row.get('st_mtime') for row in self.client.rows('list_files', workflow_id=1)}
        self.assertEqual({'f': None, 'g': os.stat(self.world.path('made.txt')).st_mtime}, times)

    def test_a_persistent_runner_leaves_when_no_job_of_its_labels_is_left(self):
        self.create({'command': 'true', 'labels': ['big']}, {'command': 'true', 'depends_on': ['j1'], 'labels': ['big']}, 'true',
                    compute_node_wait_for_new_jobs_seconds=1, execution_config={'mode': 'direct', 'sigterm_lead_seconds': 0, 'sigkill_headroom_seconds': 0})
        outcome = self.run_it(labels=['big', 'more'], is_persistent=True, end_time=time.time() + 30)
        self.assertEqual((2, False, 'idle'), (outcome.completed, outcome.is_complete, outcome.reason))
        self.assertEqual({'j1': 'completed', 'j2': 'completed', 'j3': 'ready'}, self.statuses())
        outcome = self.run_it(is_persistent=True)
        self.assertEqual((1, True, 'complete'), (outcome.completed, outcome.is_complete, outcome.reason))

    def test_gpus_are_given_by_index_and_never_twice(self):
        command = 'test -z "$(mkdir gpu_$CUDA_VISIBLE_DEVICES 2>&1)" && echo $TORC_GPU_VISIBLE_DEVICES && sleep 0.1 && rmdir gpu_$CUDA_VISIBLE_DEVICES'
        self.create(*[{'command': command, 'resource_requirements': 'gpu'}] * 6,
                    resource_requirements=[{'name': 'gpu', 'num_cpus': 1, 'num_gpus': 1, 'memory': '1m', 'runtime': 'PT1M'}])
        self.run_it(num_gpus=None, num_cpus=4, env={'CUDA_VISIBLE_DEVICES': '5,7'})
        self.assertEqual({'completed'}, set(self.statuses().values()))
        self.assertEqual({'5\n', '7\n'}, {self.stdio(number) for number in range(1, 7)})

    def test_resources_are_never_oversubscribed(self):
        job = {'command': 'mkdir lock_$$ && test $(ls -d lock_* | wc -l) -le 2 && sleep 0.05 && rmdir lock_$$', 'resource_requirements': 'big'}
        self.create(*[job] * 8, resource_requirements=[{'name': 'big', 'num_cpus': 2, 'memory': '1g', 'runtime': 'PT1M'}])
        self.assertEqual(8, self.run_it(num_cpus=4, memory_gb=8.0).completed)

    def test_the_queue_strategy_counts_jobs_only(self):
        job = {'command': 'mkdir lock_$$; sleep 0.3; ls -d lock_* | wc -l', 'resource_requirements': 'big'}
        self.create(*[job] * 4, resource_requirements=[{'name': 'big', 'num_cpus': 1, 'memory': '3g', 'runtime': 'PT1M'}])
        self.assertEqual(4, self.run_it(num_cpus=1, max_parallel_jobs=4).completed)
        self.assertEqual('4\n', self.stdio(4))

    def test_a_failure_handler_retries_after_its_recovery_script(self):
        self.create({'command': 'test -e mended || exit 10', 'failure_handler': 'fix'},
                    failure_handlers=[{'name': 'fix', 'rules': [{'exit_codes': [10], 'max_retries': 3, 'recovery_script': 'echo $TORC_RETURN_CODE > mended'}]}])
        self.assertEqual(1, self.run_it().completed)
        self.assertEqual([(1, 1, 10, 'failed'), (1, 2, 0, 'completed')], self.results())
        self.assertEqual('10\n', self.world.read('mended'))

    def test_a_recovery_script_that_fails_vetoes_the_retry_and_is_named(self):
        self.create({'command': 'exit 10', 'failure_handler': 'fix'},
                    failure_handlers=[{'name': 'fix', 'rules': [{'match_all_exit_codes': True, 'recovery_script': 'exit 5'}]}])
        outcome = self.run_it()
        self.assertEqual([(1, 1, 10, 'failed')], self.results())
        self.assertIn('the recovery script ended with return code 5', outcome.failed_jobs[0][3])

    def test_max_retries_counts_attempts(self):
        self.create({'command': 'exit 1', 'failure_handler': 'fix'}, failure_handlers=[{'name': 'fix', 'rules': [{'match_all_exit_codes': True}]}])
        self.assertEqual(1, self.run_it().failed)
        self.assertEqual([1, 2, 3], [row[1] for row in self.results()])

    def test_a_failure_without_a_rule_may_wait_for_a_decision(self):
        self.create('exit 1', {'command': 'true', 'depends_on': ['j1']}, use_pending_failed=True, compute_node_wait_for_new_jobs_seconds=1)
        outcome = self.run_it()
        self.assertEqual({'j1': 'pending_failed', 'j2': 'blocked'}, self.statuses())
        self.assertFalse(outcome.is_complete)

    def test_actions_of_all_six_triggers_run_in_their_order(self):
        triggers = ('on_workflow_start', 'on_worker_start', 'on_jobs_ready', 'on_jobs_complete', 'on_workflow_complete', 'on_worker_complete')
        actions = [dict({'trigger_type': trigger, 'action_type': 'run_commands', 'commands': [f'echo {trigger} >> order', 'pwd >> where']},
                        **({'jobs': ['j2']} if 'jobs' in trigger else {})) for trigger in triggers]
        self.create('echo job >> out/order', {'command': 'echo job >> out/order', 'depends_on': ['j1']}, actions=actions)
        self.run_it()
        lines = self.world.read('out/order').split()
        self.assertEqual(sorted(triggers), sorted(line for line in lines if line != 'job'))
        self.assertEqual(list(triggers[:2]), lines[:2])
        self.assertEqual(list(triggers[-2:]), lines[-2:])
        self.assertEqual({self.world.path('out')}, set(self.world.read('out/where').splitlines()))

    def test_jobs_start_after_the_actions_that_come_with_them(self):
        self.create('true', {'command': 'test -e out/made', 'depends_on': ['j1']},
                    actions=[{'trigger_type': 'on_jobs_ready', 'action_type': 'run_commands', 'commands': ['sleep 0.3; echo > made'], 'jobs': ['j2']}])
        self.assertEqual(2, self.run_it().completed)

    def test_an_action_stops_at_its_first_failure_and_says_so(self):
        self.create('true', actions=[{'trigger_type': 'on_workflow_start', 'action_type': 'run_commands', 'commands': ['echo a', 'exit 3', 'echo > never']}])
        self.assertEqual(1, self.run_it().completed)
        self.assertFalse(os.path.exists(self.world.path('out', 'never')))
        self.assertTrue(any('command 2 ended with return code 3: exit 3' in text for text in self.progress.messages), self.progress.messages)
        self.assertEqual('a\n', self.world.read('out/actions_wf1_r1.log'))

    def test_mode_slurm_without_an_allocation_is_refused(self):
        self.create('true', execution_config={'mode': 'slurm'})
        with self.assertRaises(torc.Refused) as caught:
            self.run_it()
        self.assertIn("use mode 'auto' or 'direct'", str(caught.exception))

    # -------- outages --------

    def test_lost_answers_change_nothing(self):
        self.create(*['echo $TORC_JOB_ID >> ran'] * 20)

        def lose(number: int) -> None:
            if number % 2:
                raise torc.Unreachable('lost')
        self.client.after = lose
        self.assertEqual(20, self.run_it().completed)
        self.assertEqual(sorted(map(str, range(1, 21))), sorted(self.world.read('ran').split()))
        self.assertTrue(any('held' in request for request in self.client.requests))

    def test_a_server_that_stays_away_is_given_up_when_all_has_ended(self):
        self.create('true', 'sleep 0.5; echo > ended', compute_node_wait_for_healthy_database_minutes=0)

        def fail(number: int) -> None:
            if number > 2:
                raise torc.Unreachable('nobody there')
        self.client.before = fail
        with self.assertRaises(torc.Unreachable) as caught:
            self.run_it()
        self.assertIn('2 ended jobs could not be reported: j1, j2', str(caught.exception))
        self.assertTrue(os.path.exists(self.world.path('ended')))

    def test_a_deleted_output_directory_fails_the_job_with_the_reason(self):
        self.create('rm -rf out', {'command': 'true', 'depends_on': ['j1']})
        outcome = self.run_it()
        self.assertEqual({'j1': 'completed', 'j2': 'failed'}, self.statuses())
        self.assertIn('No such file or directory', outcome.failed_jobs[0][3])

    def test_without_room_for_processes_jobs_are_given_back_and_tried_again(self):
        self.create('true')
        real, calls = torc.Launcher.start, []

        def start(launcher: Any, *arguments: Any) -> Any:
            calls.append(arguments)
            if len(calls) == 1:
                raise OSError(errno_of('EAGAIN'), 'Resource temporarily unavailable')
            return real(launcher, *arguments)
        torc.Launcher.start = start
        try:
            self.assertEqual(1, self.run_it().completed)
        finally:
            torc.Launcher.start = real
        self.assertEqual([(1, 1, 0, 'completed')], self.results())

    # -------- leaving --------

    BIG = {'resource_requirements': [{'name': 'big', 'num_cpus': 64, 'memory': '1m', 'runtime': 'PT1M'}]}
    BIG_JOB = {'command': 'true', 'resource_requirements': 'big'}

    def add_node(self) -> None:
        """Another runner, as far as the server knows."""
        self.client.call('create_compute_node', {
            'workflow_id': 1, 'hostname': 'h', 'pid': 1, 'start_time': '2026-01-01T00:00:00Z', 'num_cpus': 99,
            'memory_gb': 9.0, 'num_gpus': 0, 'num_nodes': 1, 'compute_node_type': 'local', 'is_active': True})

    def test_an_idle_runner_leaves_after_its_limit(self):
        self.create(self.BIG_JOB, compute_node_wait_for_new_jobs_seconds=1, **self.BIG)
        self.add_node()     # which may take the job, so that others get ready
        outcome = self.run_it()
        self.assertEqual(('idle', False), (outcome.reason, outcome.is_complete))
        self.assertGreaterEqual(outcome.wall_s, 1)

    def test_a_runner_for_which_nothing_is_left_says_what_is_lacking_and_leaves_at_once(self):
        self.create('true', dict(self.BIG_JOB, depends_on=['j1']), **self.BIG)
        outcome = self.run_it(poll_interval_s=60)
        self.assertEqual((1, 'stuck', False, {'completed': 1, 'ready': 1}),
                         (outcome.completed, outcome.reason, outcome.is_complete, outcome.jobs_by_status))
        lacks = 'they need 64 CPUs, and this runner has 2 (--num-cpus)'
        self.assertEqual([f'jobs such as j2 cannot run here: {lacks}',
                          'leaving: of the jobs that are left (1) none can run here'], self.progress.messages)
        self.assertLess(outcome.wall_s, 10)

    def test_why_nothing_is_claimed_is_said_once_though_the_time_left_changes(self):
        needs = [{'name': 'long', 'num_cpus': 1, 'memory': '1m', 'runtime': 'PT1H'}]
        self.create({'command': 'true', 'resource_requirements': 'long'}, resource_requirements=needs,
                    compute_node_wait_for_new_jobs_seconds=2)
        self.add_node()
        outcome = self.run_it(end_time=time.time() + 600, poll_interval_s=0.1)
        self.assertEqual('idle', outcome.reason)
        self.assertGreater(len(self.client.requests), 10)
        message, = [text for text in self.progress.messages if 'claimed: ' in text or 'cannot run' in text]
        self.assertRegex(message, 'such as j1 cannot .* runtime of PT1H, and this runner has PT9M.*S left')

    def test_with_the_queue_strategy_the_last_minutes_are_not_waited_for(self):
        self.create('sleep 1', 'true', compute_node_min_time_for_new_jobs_seconds=3600)
        outcome = self.run_it(max_parallel_jobs=1, end_time=time.time() + 3600.5)
        self.assertEqual(('deadline', {'completed': 1, 'ready': 1}), (outcome.reason, outcome.jobs_by_status))
        self.assertIn('leaving: no job is started when less than 3600 s are left', self.progress.messages)

    def test_progress_is_that_of_the_whole_workflow_after_a_resume_too(self):
        self.create('true', 'exit 1', *['test -e go || sleep 1000'] * 3)
        killed = []     # type: List[int]

        def interrupt(number: int) -> None:
            if self.progress.counts.get('done') == 2 and not killed:
                killed.append(number)
                os.kill(os.getpid(), signal.SIGTERM)
        self.client.before = interrupt
        self.run_it(num_cpus=2, poll_interval_s=0.05)
        self.world.write('go', '')
        self.progress = Watcher()
        self.run_it()
        self.assertEqual((5, 2), (self.progress.first['total'], self.progress.first['done']))
        self.assertEqual({'total': 5, 'done': 5, 'running': 0, 'failed': 1, 'canceled': 0, 'unfinished': 0,
                          'completed': 4}, self.progress.counts)

    def test_a_canceled_workflow_stops_its_jobs(self):
        self.create('sleep 1000')
        self.client.before = lambda number: self.client.call('cancel_workflow', workflow_id=1) if number == 3 else None
        outcome = self.run_it()
        self.assertEqual((1, True, 'cancel'), (outcome.canceled, outcome.is_canceled, outcome.reason))
        self.assertLess(outcome.wall_s, 10)

    def test_ends_by_the_deadline_are_told_apart(self):
        wait = 'while :; do sleep 0.02; done'
        self.create(f"trap 'exit 0' TERM; {wait}", f"trap 'exit 42' TERM; {wait}", wait, f"trap '' TERM; {wait}", 'sleep 1000 & wait',
                    execution_config={'sigkill_headroom_seconds': 1, 'sigterm_lead_seconds': 1},
                    resource_requirements=[{'name': 'short', 'num_cpus': 1, 'memory': '1m', 'runtime': 'PT1S'}])
        outcome = self.run_it(num_cpus=5, end_time=time.time() + 3.5)
        self.assertEqual([(1, 1, 0, 'completed'), (2, 1, 42, 'terminated'), (3, 1, 152, 'terminated'), (4, 1, 152, 'terminated'),
                          (5, 1, 152, 'terminated')], self.results())
        self.assertEqual('deadline', outcome.reason)
        self.assertLess(outcome.wall_s, 3.5)

    def test_a_signal_stops_the_jobs_reports_them_and_gives_claims_back(self):
        self.create('echo > ready; sleep 1000', *['true'] * 3)
        self.client.after = lambda number: os.kill(os.getpid(), signal.SIGTERM) if os.path.exists(self.world.path('ready')) and \
            not self.progress.messages else None
        outcome = self.run_it(num_cpus=1, poll_interval_s=0.05)
        self.assertEqual((signal.SIGTERM, 1), (outcome.interrupted_by, outcome.terminated))
        self.assertEqual([(1, 1, 143, 'terminated')], self.results())
        self.assertEqual({'j1': 'ready', 'j2': 'ready', 'j3': 'ready', 'j4': 'ready'}, self.statuses())
        events = [event['data'] for event in self.client.rows('list_events', workflow_id=1)]
        self.assertEqual(['j1: stopped: the runner was interrupted by SIGTERM'],
                         [data['message'] for data in events if data.get('event_type') == 'job_terminated'])

    def interrupt_when(self, path: str) -> None:
        """SIGINT, as soon as a file is there and the server has answered."""
        def interrupt(number: int) -> None:
            if os.path.exists(self.world.path(path)) and not self.progress.messages:
                os.kill(os.getpid(), signal.SIGINT)
        self.client.after = interrupt

    def test_what_was_interrupted_runs_again_with_all_of_its_retries(self):
        command = 'echo $TORC_ATTEMPT_ID >> ran; test -e again && exit 10; echo > ready; sleep 1000'
        self.create({'command': command, 'failure_handler': 'fix'}, {'command': 'true', 'depends_on': ['j1']},
                    failure_handlers=[{'name': 'fix', 'rules': [{'exit_codes': [10], 'max_retries': 2}]}])
        self.interrupt_when('ready')
        outcome = self.run_it(poll_interval_s=0.05)
        self.assertEqual((signal.SIGINT, 1), (outcome.interrupted_by, outcome.terminated))
        self.assertEqual([], outcome.failed_jobs)
        self.assertEqual({'j1': 'ready', 'j2': 'blocked'}, self.statuses())
        self.world.write('again', '')
        self.client.after = lambda number: None
        self.assertEqual(1, self.run_it().failed)
        self.assertEqual('1\n2\n3\n', self.world.read('ran'))
        self.assertEqual({'j1': 'failed', 'j2': 'canceled'}, self.statuses())

    def test_what_ended_by_itself_before_the_interruption_has_failed(self):
        wait = 'do sleep 0.01; done'
        left_behind = (f'trap "" TERM; : > trapped; while kill -0 $1 2>/dev/null; {wait}; '
                       f': > ready; while :; {wait}')
        self.create(f"bash -c '{left_behind}' - $$ & while test ! -e trapped; {wait}; exit 3",
                    {'command': 'true', 'depends_on': ['j1']})
        self.interrupt_when('ready')    # the job is over; of it only what it has left behind lives
        outcome = self.run_it(poll_interval_s=0.05, claim_backoff_max_s=0.05)
        self.assertEqual((signal.SIGINT, 1), (outcome.interrupted_by, outcome.failed))
        self.assertEqual([(1, 1, 3, 'failed')], self.results())
        self.assertEqual({'j1': 'failed', 'j2': 'canceled'}, self.statuses())

    def test_contents_of_many_files_are_reported_before_the_next_poll(self):
        names = [f'f{number}' for number in range(9)]
        self.create({'command': f"touch {' '.join(names)}", 'output_files': names},
                    files=[{'name': name, 'path': name} for name in names], enable_ro_crate=True)
        with unittest.mock.patch.object(torc, 'MAX_CONTENTS', 2):
            outcome = self.run_it(poll_interval_s=30.0)
        entities = self.client.call('list_ro_crate_entities', workflow_id=1)['items']
        self.assertEqual(9, sum('sha256' in entity['metadata'] for entity in entities))
        self.assertLess(outcome.wall_s, 15)

    def test_a_second_signal_kills_at_once(self):
        self.create("trap '' TERM INT; echo > ready; while :; do sleep 0.02; done")
        sent = []

        def interrupt(number: int) -> None:
            if os.path.exists(self.world.path('ready')) and not sent:
                sent.extend(os.kill(os.getpid(), signal.SIGINT) or 1 for _ in range(2))
        self.client.after = interrupt
        outcome = self.run_it(poll_interval_s=0.05)
        self.assertEqual([(1, 1, 137, 'terminated')], self.results())
        self.assertLess(outcome.wall_s, 10)

    def test_signals_are_as_they_were_afterwards(self):
        before = [signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        self.create('true')
        self.run_it()
        self.assertEqual(before, [signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)])


def errno_of(name: str) -> int:
    """Number of an errno by its name."""
    return getattr(torc.errno, name)


class RunnerRulesTest(unittest.TestCase):
    """The runner's arithmetic."""

    def kind(self, cpus: int = 1, memory: int = 0, gpus: int = 0, **more: Any) -> Dict[str, Any]:
        """Requirements."""
        return dict({'num_cpus': cpus, 'memory_bytes': memory, 'num_gpus': gpus}, **more)

    def test_files_are_read_a_piece_at_a_time(self):
        directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, directory)
        contents = {'big': os.urandom(3 * torc.DIGEST_PIECE_BYTES + 5), 'empty': b'', 'after': b'x'}
        for name, content in contents.items():
            with open(os.path.join(directory, name), 'wb') as file:
                file.write(content)
        os.mkfifo(os.path.join(directory, 'pipe'))      # nobody will write to it
        names = ['absent', 'big', 'pipe', 'empty', '.', 'nul\0', 'after']
        digests = torc.Digests()
        digests.waiting.extend((number, os.path.join(directory, name)) for number, name in enumerate(names))
        turns, rows = 0, []
        while digests.is_busy:
            turns, rows = turns + 1, rows + digests.work(1e-9)
        self.assertGreater(turns, 4)
        self.assertEqual([(names.index(name), len(content), hashlib.sha256(content).hexdigest()) for name, content in contents.items()],
                         [(number, size, digest) for number, _, size, digest in rows])
        self.assertEqual(os.stat(os.path.join(directory, 'big')).st_mtime, rows[0][1])
        digests.waiting.extend([(0, directory), (1, os.path.join(directory, 'big'))])
        digests.work(1e-9)
        digests.drop()
        self.assertFalse(digests.is_busy)

    def test_gpus_are_handed_out_least_recently_used_first(self):
        ledger = torc.Ledger(torc.NodeSize(8, 1 << 30, ('0', '1', '2')), None)
        first = ledger.take(self.kind(gpus=2))
        ledger.release(first)
        self.assertEqual((('0', '1'), ('2', '0')), (first.devices, ledger.take(self.kind(gpus=2)).devices))
        self.assertIsNone(ledger.take(self.kind(gpus=2)))

    def test_gpus_are_shared_in_turn_by_the_queue_strategy(self):
        ledger = torc.Ledger(torc.NodeSize(1, 1, ('0', '1', '2')), 10)
        grants = [ledger.take(self.kind(gpus=count)) for count in (3, 2, 2)]
        self.assertEqual([('0', '1', '2'), ('0', '1'), ('2', '0')], [grant.devices for grant in grants])
        for grant in grants:
            ledger.release(grant)
        self.assertEqual(3, len(ledger.devices))

    def test_the_placeholder_requirements_are_no_limit_of_memory(self):
        ledger = torc.Ledger(torc.NodeSize(2, 10, ()), None)
        self.assertIsNone(ledger.take(self.kind(memory=1 << 20)))
        self.assertIsNotNone(ledger.take(self.kind(memory=1 << 20, is_implicit=True)))

    def test_short_jobs_are_claimed_ahead_and_long_ones_are_not(self):
        appetite = torc.Appetite(torc.RunnerOptions(), torc.Ledger(torc.NodeSize(2, 1 << 30, ()), None), 300)
        for mean_s, rounds in ((math.inf, 1), (10.0, 1), (0.2, 1), (0.029, 5), (0.0059, 25), (0.0, 64)):
            appetite.mean_s = mean_s
            self.assertEqual((rounds, 2 * rounds), (appetite.rounds(), appetite.want(math.inf)['limit']))

    def test_a_claim_states_the_time_left_with_the_grace(self):
        appetite = torc.Appetite(torc.RunnerOptions(), torc.Ledger(torc.NodeSize(2, 1 << 30, ()), None), 300)
        self.assertIsNone(appetite.want(math.inf)['time_limit'])
        self.assertEqual('PT1H', appetite.want(3480.0)['time_limit'])

    def test_the_queue_strategy_claims_nothing_near_the_end(self):
        appetite = torc.Appetite(torc.RunnerOptions(), torc.Ledger(torc.NodeSize(2, 1 << 30, ()), 4), 300)
        self.assertEqual(4, appetite.want(301.0)['limit'])
        self.assertIsNone(appetite.want(299.0))

    def test_waits_double_without_progress_and_are_short_without_children(self):
        runner = torc.Runner.__new__(torc.Runner)
        runner.options = torc.RunnerOptions(poll_interval_s=5, claim_backoff_max_s=300)
        runner.owners, runner.has_progressed, runner.backoff_s = {1: 1}, True, 5
        waits = []
        for _ in range(9):
            runner.plan_poll(True)
            waits.append(round(runner.poll_at - time.monotonic()))
        self.assertEqual([5, 5, 10, 20, 40, 80, 160, 300, 300], waits)
        runner.owners, runner.options = {}, torc.RunnerOptions(poll_interval_s=60)
        runner.plan_poll(True)
        self.assertEqual(30, round(runner.poll_at - time.monotonic()))

    def test_the_first_rule_that_names_the_code_wins_then_the_first_for_all(self):
        rules = [{'match_all_exit_codes': True, 'max_retries': 1}, {'exit_codes': [3], 'max_retries': 2}, {'exit_codes': [3], 'max_retries': 9}]
        self.assertEqual(2, torc.find_rule(rules, 3)['max_retries'])
        self.assertEqual(1, torc.find_rule(rules, 4)['max_retries'])
        self.assertIsNone(torc.find_rule(rules[1:], 4))

    def test_signals_have_names_with_and_without_sig(self):
        for name, number in (('SIGINT', 2), ('int', 2), ('USR1', signal.SIGUSR1), ('nonsense', 15), ('SIG_IGN', 15)):
            self.assertEqual(number, torc.parse_signal(name))


# ======== 19. Rendering ========
#
# Tables, CSV and lines as whole texts; Progress with a clock and a stream of its own.

UNICODE = torc.Style(is_unicode=True, is_terminal=False, has_colour=False, width=0)
TERMINAL = torc.Style(is_unicode=True, is_terminal=True, has_colour=True, width=60)


def status_of(**counts: int) -> Dict[str, Any]:
    """An answer of get_workflow_status."""
    by_status = {row.name: counts.get(row.name, 0) for row in torc.STATUSES}
    is_complete = not any(by_status[row.name] for row in torc.STATUSES if not row.is_done)
    return {'workflow_id': 1, 'workflow_name': 'w', 'workflow_user': 'u', 'total_jobs': sum(counts.values()), 'jobs_by_status': by_status,
            'total_exec_time_minutes': 0.1, 'walltime_seconds': 70.0, 'is_complete': is_complete, 'is_canceled': False,
            'active_compute_nodes': 1, 'active_scheduled_nodes': 0, 'pending_scheduled_nodes': 0}


class WidthTest(unittest.TestCase):
    """Columns that a text takes."""

    def test_wide_and_combining_characters_count_as_a_terminal_shows_them(self):
        for text, width in (('abc', 3), ('\u65e5\u672c', 4), ('e\u0301', 1), ('\u200b', 0), ('\U0001f600', 2), ('', 0)):
            self.assertEqual(width, torc.text_width(text), ascii(text))

    def test_a_text_is_cut_at_its_width_and_says_so(self):
        self.assertEqual('abcdef', torc.cut('abcdef', 6))
        self.assertEqual('abcd…', torc.cut('abcdef', 5))
        self.assertEqual('日…', torc.cut('日本語', 4))
        self.assertEqual('ab~', torc.cut('abcdef', 3, '~'))


class TableTest(unittest.TestCase):
    """Lists for people and for programs."""
    maxDiff = None

    def test_a_table_is_boxed_with_numbers_on_the_right(self):
        expected = ('╭────┬──────╮\n'
                    '│ ID │ Name │\n'
                    '├────┼──────┤\n'
                    '│  1 │ 日本 │\n'
                    '│ 10 │ b    │\n'
                    '╰────┴──────╯\n')
        self.assertEqual(expected, torc.format_table(['ID', 'Name'], [[1, '日本'], [10, 'b']], UNICODE))

    def test_without_unicode_it_is_drawn_in_ascii(self):
        expected = '+---+\n| A |\n+---+\n| x |\n+---+\n'
        self.assertEqual(expected, torc.format_table(['A'], [['x']]))

    def test_a_table_without_rows_has_its_header(self):
        self.assertIn('| A |', torc.format_table(['A'], []))

    def test_what_could_move_the_cursor_is_escaped(self):
        text = torc.format_table(['A'], [['x\x1b[2J\ny\u202e']])
        self.assertIn(r'x\x1b[2J\ny\u202e', text)
        self.assertEqual(5, text.count('\n'))

    def test_on_a_terminal_the_widest_column_is_cut_until_the_table_fits(self):
        text = torc.format_table(['ID', 'Command'], [[1, 'c' * 200], [2, 'x']], TERMINAL)
        self.assertGreaterEqual({60}, {torc.text_width(re.sub(r'\x1b\[\w+m', '', line)) for line in text.splitlines()})
        self.assertIn('…', text)

    def test_two_wide_columns_share_the_room_and_none_becomes_too_narrow(self):
        self.assertEqual([2, 25, 25], torc.column_widths([['ID', 'a' * 90, 'b' * 50]], 63))
        self.assertEqual([8, 8], torc.column_widths([['a' * 90, 'b' * 50]], 10))

    def test_columns_that_do_not_fit_are_dropped_by_rank_the_empty_ones_first(self):
        headers = ['ID', 'Name', 'Empty', 'Needed', 'Spare', 'Text']
        row = [1, 'n' * 10, '', 'x' * 10, 'y' * 10, 'z' * 90]
        for width, words in ((0, 'ID Name Empty Needed Spare Text'), (76, 'ID Name Empty Needed Spare Text'),
                             (75, 'ID Name Needed Spare Text'), (68, 'ID Name Needed Spare Text'),
                             (67, 'ID Name Needed Text'), (54, 'ID Name Text'), (20, 'ID Name Text')):
            titles = words.split()
            text = torc.format_table(headers, [row], UNICODE._replace(width=width), [0, 0, 0, 1, 2, 0])
            lines = text.splitlines()
            self.assertEqual(titles, [title.strip() for title in lines[1].strip('│').split('│')], width)
            hidden = len(headers) - len(titles)
            self.assertEqual(hidden > 0, lines[-1].startswith(f'{hidden} more column'))
            if width > 40:
                self.assertGreaterEqual(width, max(map(torc.text_width, lines)))

    def test_times_are_not_cut_and_lose_their_zone_on_a_terminal(self):
        rows = [['2026-11-21 10:28:54 +0100', 'x' * 90, 'y' * 90], ['', 'x', 'y']]
        text = torc.format_table(['Time', 'A', 'B'], rows, UNICODE._replace(width=60))
        self.assertIn('│ 2026-11-21 10:28:54 │ ', text)
        self.assertGreaterEqual(60, max(map(torc.text_width, text.splitlines())))
        self.assertIn('2026-11-21 10:28:54 +0100 | ' + 'x' * 90, torc.format_table(['Time', 'A', 'B'], rows))

    def test_headings_are_read_from_text(self):
        found = torc.headings_of('ID=id, Peak CPU %=peak_cpu_percent:8, Slurm=(slurm job):3, +Reason=reason')
        wanted = [('ID', 'id', 0, False), ('Peak CPU %', 'peak_cpu_percent', 8, False),
                  ('Slurm', '', 3, False), ('Reason', 'reason', 0, True)]
        self.assertEqual(wanted, [(heading.title, heading.key, heading.rank, heading.is_ours)
                                  for heading in found])

    def test_statuses_are_coloured_where_there_are_colours(self):
        self.assertIn('\x1b[31mfailed\x1b[0m', torc.format_table(['Status'], [['failed']], TERMINAL))
        self.assertNotIn('\x1b', torc.format_table(['Status'], [['failed']], UNICODE))

    def test_csv_has_a_header_always_and_leaves_values_alone(self):
        self.assertEqual('A,B\n', torc.format_csv(['A', 'B'], []))
        self.assertEqual('A,B\n=1+1,"x,""y"""\ntrue,\n', torc.format_csv(['A', 'B'], [['=1+1', 'x,"y"'], [True, None]]))

    def test_cells_are_one_line_each(self):
        for value, text in ((None, ''), (True, 'true'), (False, 'false'), (1.25, '1.25'), ({'a': 1}, '{"a":1}'), ([1, 2], '[1,2]'), ('x', 'x')):
            self.assertEqual(text, torc.format_cell(value))

    def test_a_record_leaves_out_what_is_empty(self):
        self.assertEqual('id:   1\nname: a\\x07\n', torc.format_record({'id': 1, 'env': None, 'name': 'a\x07'}))
        self.assertEqual('', torc.format_record({}))

    def test_json_is_indented_and_ascii_only_where_it_must_be(self):
        self.assertEqual('{\n  "a": "é"\n}\n', torc.format_json_document({'a': 'é'}))
        self.assertEqual('{\n  "a": "\\u00e9"\n}\n', torc.format_json_document({'a': 'é'}, True))

    def test_help_in_two_columns_gives_a_long_word_its_own_line(self):
        self.assertEqual('  a    x\n  bcd  y\n  much too long\n       z\n', torc.format_rows([('a', 'x'), ('bcd', 'y'), ('much too long', 'z')], limit=3))

    def test_times_are_shown_in_local_time_and_other_texts_as_they_are(self):
        self.assertRegex(torc.format_local_time('2026-11-21T09:28:54.436Z'), r'\A2026-11-2[012] \d\d:\d\d:54 [-+]\d{4}\Z')
        self.assertEqual(['soon', ''], [torc.format_local_time('soon'), torc.format_local_time(None)])

    def test_small_formats(self):
        self.assertEqual(['6.7s', '1m 10s'], [torc.format_seconds(6.71), torc.format_seconds(70)])
        self.assertEqual(['99.5%', ''], [torc.format_percent(99.49999), torc.format_percent(None)])
        self.assertEqual(['1.0MB', ''], [torc.format_memory_cell(1 << 20), torc.format_memory_cell(None)])


class StatusReportTest(unittest.TestCase):
    """What `status` says."""
    maxDiff = None

    def test_the_report_counts_and_judges(self):
        expected = ('Workflow 1: w (user u)\n'
                    '\n'
                    '  completed            3  ' + '+' * 22 + '\n'
                    '  failed               1  ' + 'x' * 8 + '\n'
                    '  total                4\n'
                    '\n'
                    '  Wall time 1m 10s, execution time 6.0s\n'
                    '  1 compute nodes at work\n'
                    '\n'
                    'x Workflow ended: 3 completed, 1 failed\n')
        self.assertEqual(expected, torc.format_status(status_of(completed=3, failed=1)))

    EXPLANATION = {
        'failures': [{'job_name': f'sim_{number}', 'status': 'failed', 'return_code': 1,
                      'reason': 'no\tluck ' * 50, 'count': 1 if number else 99000} for number in range(5)],
        'canceled': [{'job_name': f'post_{number}', 'status': 'canceled',
                      'reason': 'never ran: its prerequisite sim_0 failed'} for number in range(5)],
        'blockers': [{'job_name': f'b{number}', 'status': 'running'} for number in range(5)]}

    def test_reasons_fit_a_screen_whatever_went_wrong(self):
        status = status_of(failed=100000, canceled=5000, blocked=3, running=5, ready=2)
        status['explanation'] = self.EXPLANATION
        lines = torc.format_status(status, UNICODE._replace(width=80)).splitlines()
        self.assertLess(len(lines), 24)
        self.assertGreaterEqual(80, max(map(torc.text_width, lines[:-1])))
        text = '\n'.join(lines)
        for wanted in ('  x sim_0 and 98999 more (return code 1): no luck ', '  x sim_3 (return code 1)',
                       '  x 997 more: torc.py results list 1 --failed\n',
                       '  - post_1: never ran: its prerequisite sim_0 failed\n',
                       '  - 4998 more: torc.py jobs list 1 --status canceled\n',
                       '  | 3 blocked wait for b0 (running), b1 (running), b2 (running) and others\n'):
            self.assertIn(wanted, text)
        self.assertNotIn('wait for a runner', text)
        self.assertIn('no luck ' * 50, torc.format_status(status))

    def test_ready_jobs_without_a_runner_say_how_to_start_one(self):
        status = dict(status_of(ready=2), active_compute_nodes=0)
        self.assertIn('  o 2 ready wait for a runner: torc.py run 1\n', torc.format_status(status))

    def test_a_canceled_workflow_explains_no_cancellations(self):
        status = dict(status_of(canceled=5, failed=99005), explanation=self.EXPLANATION, is_canceled=True)
        text = torc.format_status(status)
        self.assertIn('sim_0', text)
        self.assertNotIn('post_0', text)

    def test_the_verdict_follows_from_the_counts(self):
        table = ((status_of(completed=2), 'complete'), (status_of(completed=1, canceled=1), 'failed'), (status_of(ready=1), 'running'),
                 (status_of(uninitialized=1), 'running'), (dict(status_of(ready=1), is_canceled=True), 'canceled'), (status_of(), 'complete'))
        for status, kind in table:
            self.assertEqual(kind, torc.verdict_of(status)[0], status)

    def test_a_report_of_a_new_workflow_has_no_wall_time(self):
        status = status_of(uninitialized=2)
        del status['walltime_seconds']
        text = torc.format_status(status, UNICODE)
        self.assertIn('  Execution time 6.0s\n', text)
        self.assertTrue(text.endswith('◷ Workflow has not been started\n'))

    def test_names_in_it_are_made_safe(self):
        self.assertIn(r'\x1b', torc.format_status(dict(status_of(ready=1), workflow_name='\x1b[2J')))


class ProgressTest(unittest.TestCase):
    """What `run` shows while jobs run."""

    def setUp(self) -> None:
        self.now = 0.0
        self.stream = io.StringIO()

    def progress(self, style: Any = torc.PLAIN, is_quiet: bool = False) -> Any:
        """A Progress on our stream and clock."""
        return torc.Progress(self.stream, style, is_quiet, lambda: self.now)

    def turn(self, progress: Any, now: float, done: int, failed: int = 0) -> None:
        """One turn of a runner at a time."""
        self.now = now
        progress.on_turn({'total': 10, 'done': done, 'running': 2, 'failed': failed})

    def test_without_a_terminal_a_line_comes_at_the_start_and_every_ten_seconds(self):
        progress = self.progress()
        for now, done in ((0, 0), (1, 1), (9.9, 3), (10, 4), (15, 5), (20.5, 8)):
            self.turn(progress, now, done)
        self.assertEqual(['0/10 done (0%), 2 running, 0s',
                          '4/10 done (40%), 2 running, 0.4 jobs/s, 10s, 15s left',
                          '8/10 done (80%), 2 running, 0.4 jobs/s, 20s, 5s left'],
                         self.stream.getvalue().splitlines())

    def test_a_failed_job_is_told_at_once_with_its_last_words_made_safe(self):
        progress = self.progress()
        self.turn(progress, 0, 0)
        progress.on_failed_job('bad', 3, 'oops\x1b[2J')
        self.assertEqual('failed bad (return code 3): oops\\x1b[2J', self.stream.getvalue().splitlines()[1])

    def test_on_a_terminal_one_line_is_written_again_and_again_and_cleared(self):
        progress = self.progress(TERMINAL)
        self.turn(progress, 0, 0)
        self.turn(progress, 0.05, 1)    # too soon
        self.turn(progress, 0.2, 5)
        progress.finish()
        self.assertEqual('\r[....................] 0/10 done (0%), 2 running, 0s\x1b[K'
                         '\r[##########..........] 5/10 done (50%), 2 running, 0s\x1b[K\r\x1b[K',
                         self.stream.getvalue())

    def test_where_the_terminal_is_too_narrow_the_bar_is_left_out_first(self):
        progress = self.progress(TERMINAL)
        self.turn(progress, 0.2, 5, failed=1)
        self.assertEqual('\r5/10 done (50%), 2 running, 1 failed, 0s\x1b[K', self.stream.getvalue())

    def test_the_rate_has_the_unit_in_which_it_can_be_read(self):
        self.assertEqual(['96.4 jobs/s', '0.1 jobs/s', '3.0 jobs/min', '0.5 jobs/h'],
                         [torc.format_rate(*pair) for pair in ((964, 10), (1, 10), (1, 20), (1, 7200))])

    def test_the_time_left_follows_from_the_rate_and_ends_with_the_work(self):
        counts = {'total': 100000, 'done': 48210, 'running': 8, 'failed': 12, 'canceled': 3}
        self.assertEqual('48210/100000 done (48%), 8 running, 12 failed, 3 canceled, 80.3 jobs/s, 10m 00s, '
                         '10m 44s left', torc.format_progress(counts, 48210, 600, torc.PLAIN))
        for done, finished in ((10, 10), (3, 0), (3, -2)):  # all done; none since the start; jobs were reset
            line = torc.format_progress({'total': 10, 'done': done}, finished, 60, torc.PLAIN)
            self.assertNotIn('left', line)
        self.assertEqual('0/0 done (0%), 0 running, 0s', torc.format_progress({}, 0, 0, torc.PLAIN))

    def test_what_was_done_before_is_no_part_of_the_rate(self):
        progress = self.progress()
        self.turn(progress, 0, 6)
        self.turn(progress, 10, 8)
        self.assertIn('8/10 done (80%), 2 running, 0.2 jobs/s, 10s, 10s left', self.stream.getvalue())

    def test_a_quiet_one_says_nothing(self):
        progress = self.progress(is_quiet=True)
        self.turn(progress, 0, 0)
        progress.on_failed_job('bad', 3)
        progress.on_message('x')
        progress.finish()
        self.assertEqual('', self.stream.getvalue())

    def test_a_stream_that_is_closed_does_not_end_the_run(self):
        progress = self.progress()
        self.stream.close()
        self.turn(progress, 0, 0)
        self.assertTrue(progress.is_quiet)


class StyleTest(unittest.TestCase):
    """What a stream can show."""

    def test_a_pipe_gets_the_whole_text_without_colours(self):
        style = torc.style_of(io.TextIOWrapper(io.BytesIO(), encoding='utf-8'), {})
        self.assertEqual((True, False, False, 0), style)

    def test_a_terminal_gets_colours_unless_told_otherwise(self):
        class Terminal(io.StringIO):
            encoding = 'latin-1'

            def isatty(self) -> bool:
                return True

        self.assertTrue(torc.style_of(Terminal(), {}).has_colour)
        for environ in ({'NO_COLOR': '1'}, {'TERM': 'dumb'}):
            self.assertFalse(torc.style_of(Terminal(), environ).has_colour)
        self.assertFalse(torc.style_of(Terminal(), {}).is_unicode)
        self.assertGreater(torc.style_of(Terminal(), {}).width, 0)
        with unittest.mock.patch.object(torc.shutil, 'get_terminal_size', lambda: os.terminal_size((0, 0))):
            self.assertEqual(80, torc.style_of(Terminal(), {}).width)       # of `script` under cron


# ======== 20. Commands ========
#
# Most enter through main() on an embedded database in the world's directory. What Torc 1.0 was recorded to print in JSON and
# CSV is compared key by key.

SAMPLE = '''
    name: sample
    description: one of each
    project: p1
    metadata: {k: 1}
    env: {A: "1"}
    enable_ro_crate: true
    resource_monitor: {sample_interval_seconds: 1, jobs: {enabled: true, granularity: time_series}, compute_node: {enabled: true}}
    files: [{name: inp, path: in.txt}, {name: outp, path: out.txt}]
    user_data: [{name: cfg, data: {a: 1}}]
    resource_requirements: [{name: small, num_cpus: 1, memory: 100m, runtime: PT10M}]
    failure_handlers: [{name: fh, rules: [{exit_codes: [9], max_retries: 2}]}]
    slurm_schedulers: [{name: sch, account: acct, nodes: 1, walltime: "01:00:00"}]
    actions:
      - {trigger_type: on_workflow_complete, action_type: run_commands, commands: [echo done]}
      - {trigger_type: on_jobs_ready, action_type: schedule_nodes, jobs: [tail], scheduler: sch, scheduler_type: slurm, num_allocations: 1}
    jobs:
      - {name: prep, command: "echo prep; echo x > in.txt", output_files: [inp], resource_requirements: small, priority: 5, scheduler: sch}
      - {name: work, command: "cat in.txt > out.txt", input_files: [inp], output_files: [outp], resource_requirements: small}
      - {name: gen, command: "true", input_user_data: [cfg], resource_requirements: small}
      - {name: bad, command: "echo oops >&2; exit 3", depends_on: [prep], resource_requirements: small, failure_handler: fh}
      - {name: tail, command: "true", depends_on: [bad], resource_requirements: small}
'''
# Recorded command -> ours, after a run of SAMPLE as workflow 1. Ids are those that the sample gets.
RECORDED = (
    ('status WF', 'status 1'),
    ('workflows get WF', 'workflows get 1'),
    ('workflows list', 'workflows list'),
    ('workflows list --all-users', 'workflows list --all-users'),
    ('workflows is-complete WF (done)', 'workflows is-complete 1'),
    ('workflows execution-plan WF', 'workflows execution-plan 1'),
    ('workflows execution-plan SPEC', 'workflows execution-plan w.yaml'),
    ('workflows list-actions WF', 'workflows list-actions 1'),
    ('workflows update-action WF2 ID --num-allocations 2', 'workflows update-action 1 2 --num-allocations 2'),
    ('workflows delete-action WF2 ID --no-prompts', 'workflows delete-action 1 2 --no-prompts'),
    ('jobs list WF', 'jobs list 1'),
    ('jobs list WF --include-relationships', 'jobs list 1 --include-relationships'),
    ('jobs list WF -x command (csv)', 'jobs list 1 -x command'),
    ('jobs get J', 'jobs get 4'),
    ('jobs running WF (before)', 'jobs running 1'),
    ('jobs list-resource-requirements WF', 'jobs list-resource-requirements 1'),
    ('files list WF', 'files list 1'),
    ('files get ID', 'files get 1'),
    ('files list-required-existing WF', 'files list-required-existing 1'),
    ('user-data list WF', 'user-data list 1'),
    ('user-data get ID', 'user-data get 1'),
    ('user-data list-missing WF', 'user-data list-missing 1'),
    ('resource-requirements list WF', 'resource-requirements list 1'),
    ('resource-requirements get ID', 'resource-requirements get 1'),
    ('failure-handlers list WF', 'failure-handlers list 1'),
    ('failure-handlers get ID', 'failure-handlers get 1'),
    ('results list WF --include-logs -o DIR', 'results list 1 --include-logs'),
    ('events list WF', 'events list 1'),
    ('job-dependencies job-job WF', 'job-dependencies job-job 1'),
    ('job-dependencies job-file WF', 'job-dependencies job-file 1'),
    ('job-dependencies job-user-data WF', 'job-dependencies job-user-data 1'),
    ('create SPEC --dry-run', 'create w.yaml --dry-run'),
    ('files create WF -n f9 -p p9', 'files create 1 -n f9 -p p9'),
    ('user-data create WF -n u9 -d JSON', "user-data create 1 -n u9 -d '{\"b\": 2}'"),
    ('user-data update ID -n u10', 'user-data update 2 -n u10'),
    ('user-data delete ID', 'user-data delete 2'),
    ('resource-requirements create WF -n rr9 --num-cpus 2', 'resource-requirements create 1 -n rr9 --num-cpus 2'),
    ('resource-requirements update ID --memory 2g', 'resource-requirements update 3 --memory 2g'),
    ('resource-requirements delete ID', 'resource-requirements delete 3'),
    ('jobs create WF -n extra -c true', 'jobs create 1 -n extra -c true'),
    ('jobs update J --priority 3', 'jobs update 6 --priority 3'),
    ('jobs reset-status J --dry-run', 'jobs reset-status 4 --dry-run'),
    ('events create WF -d JSON', "events create 1 -d '{\"category\": \"x\", \"n\": 1}'"),
    ('events get-latest-event WF', 'events get-latest-event 1'),
    ('workflows reinit WF --dry-run', 'workflows reinit 1 --dry-run'),
    ('jobs reset-status --return-code 3 --workflow-id WF --no-prompts --reinit', 'jobs reset-status --return-code 3 --workflow-id 1 --no-prompts --reinit'),
    ('jobs delete J', 'jobs delete 6'),
    ('workflows reinit WF', 'workflows reinit 1'),
    ('workflows reset-status WF --failed-only --no-prompts', 'workflows reset-status 1 --failed-only --no-prompts'),
    ('workflows reset-status WF -r --no-prompts', 'workflows reset-status 1 -r --no-prompts'),
    ('workflows init WF --dry-run', 'workflows init 1 --dry-run'),
    ('workflows init WF', 'workflows init 1'),
    ('workflows init WF --async', 'workflows init 1 --async'),
    ('workflows reinit WF --async', 'workflows reinit 1 --async'),
    ('tasks wait ID', 'tasks wait 1'),
    ('workflows update WF -d d', 'workflows update 1 -d d'),
    ('workflows archive true WF', 'workflows archive true 1'),
    ('workflows archive false WF', 'workflows archive false 1'),
    ('cancel WF', 'cancel 1'),
    ('user-data delete-all WF2 --no-prompts', 'user-data delete-all 1 --no-prompts'),
    ('jobs delete-all WF2 --no-prompts', 'jobs delete-all 1 --no-prompts'),
    ('create SPEC', 'create w.yaml'),
    ('workflows new -n fresh', 'workflows new -n fresh'),
    ('admin sql SELECT', "admin sql 'SELECT id, name FROM workflow'"),
    ('admin sql --write --yes', 'admin sql --write --yes "UPDATE workflow SET description = \'z\' WHERE id = 1"'),
    ('admin list-audit-log', 'admin list-audit-log'),
    ('admin api-stats --window 120', 'admin api-stats --window 120'),
    ('access-groups create g1', 'access-groups create g1 -d x'),
    ('access-groups list', 'access-groups list'),
    ('access-groups get ID', 'access-groups get 2'),
    ('access-groups add-user ID v', 'access-groups add-user 2 v'),
    ('access-groups list-members ID', 'access-groups list-members 2'),
    ('access-groups list-user-groups v', 'access-groups list-user-groups v'),
    ('access-groups add-workflow WF ID', 'access-groups add-workflow 1 2'),
    ('access-groups list-workflow-groups WF', 'access-groups list-workflow-groups 1'),
    ('access-groups remove-workflow WF ID', 'access-groups remove-workflow 1 2'),
    ('access-groups remove-user ID v', 'access-groups remove-user 2 v'),
    ('access-groups delete ID', 'access-groups delete 2'),
    ('delete WF WF2 99999999', 'delete 1 2'),
)
# Keys that are not asked for: a job's and node's measurements need a monitor; ro_crate and the like come with their sections.
NOT_YET = {'peak_memory_bytes', 'avg_memory_bytes', 'peak_cpu_percent', 'avg_cpu_percent', 'compute_node_id', 'executed_at', 'executed_by',
           'st_mtime', 'access_groups', 'producer_job_id', 'producer_job_name', 'consumer_job_id', 'consumer_job_name', 'wait_for_new_jobs'}


def missing_keys(recorded: Any, ours: Any, place: str = '') -> List[str]:
    """Keys of a recorded document that ours has not, by their path. Of lists the first items are compared."""
    if isinstance(recorded, dict) and isinstance(ours, dict):
        if place.endswith(('.data', '.env', '.metadata', '.action_config', '.trigger')):
            return []
        found = [f'{place}.{key}' for key in recorded if key not in ours and key not in NOT_YET]
        return found + [path for key in recorded if key in ours for path in missing_keys(recorded[key], ours[key], f'{place}.{key}')]
    if isinstance(recorded, list) and isinstance(ours, list):
        return missing_keys(recorded[0], ours[0], place + '[]') if recorded and ours else []
    return [] if isinstance(recorded, dict) == isinstance(ours, dict) and isinstance(recorded, list) == isinstance(ours, list) else [place + ' (kind)']


class CommandTest(WorldTest):
    """A world with commands."""

    def make(self, text: str = SAMPLE) -> None:
        """Create a workflow in the embedded database."""
        self.world.write('w.yaml', text)
        self.assertExit(0, self.world.main('create', 'w.yaml'))

    def json(self, line: str, code: int = 0) -> Any:
        """A command's JSON."""
        return self.assertExit(code, self.world.main('-f', 'json', *shlex.split(line))).json()

    def text(self, line: str, code: int = 0) -> str:
        """A command's text."""
        return self.assertExit(code, self.world.main(*shlex.split(line))).out


class RecordedJsonTest(CommandTest):
    """Scripts written for Torc 1.0 find its keys and columns."""

    def test_json_has_the_recorded_keys_and_csv_the_recorded_columns(self):
        recorded = {row['command']: row for row in read_shared('torc/cli_json.json')}
        self.world.write('w.yaml', SAMPLE)
        self.assertExit(1, self.world.cli('run', 'w.yaml'))
        for name, line in RECORDED:
            with self.subTest(line):
                if str(recorded[name].get('csv', 'exit 1')).split(' ')[0] not in ('exit', 'no'):
                    outcome = self.assertExit(0, self.world.main('-f', 'csv', *shlex.split(line)))
                    self.assertEqual(recorded[name]['csv'], outcome.out.splitlines()[0])
                self.assertEqual([], missing_keys(recorded[name]['stdout'], self.json(line)))

    def test_commands_that_are_named_find_the_same_database(self):
        self.world.write('w.yaml', 'name: w\njobs: [{name: a, command: "true"}]\n')
        self.assertExit(0, self.world.cli('--db', 'my.db', 'create', 'w.yaml'))
        for line, named in (('workflows init 1', 'torc.py --db my.db run 1\n'),
                            ('workflows init 1 --async --no-prompts', 'torc.py --db my.db tasks wait '),
                            ('status 1', 'wait for a runner: torc.py --db my.db run 1\n'),
                            ('logs 1', '`torc.py --db my.db status 1`')):
            with self.subTest(line):
                self.assertExit(0, self.world.cli('--db', 'my.db', *line.split()), named)

    def test_run_and_exec_print_one_line_for_scripts(self):
        self.world.write('w.yaml', 'name: w\njobs: [{name: a, command: "true"}]\n')
        outcome = self.assertExit(0, self.world.cli('-f', 'json', 'run', 'w.yaml'))
        self.assertEqual('{"workflow_id":1,"message":"Created workflow 1"}\n', outcome.out)
        outcome = self.assertExit(1, self.world.cli('exec', '-c', 'exit 2', '-f', 'json'))
        self.assertEqual('{"workflow_id":2,"status":"failed","had_failures":true,"had_terminations":false}\n', outcome.out)


class TerminalText(io.StringIO):
    """A stream that says it is a terminal."""
    encoding = 'utf-8'

    def isatty(self) -> bool:
        """It is."""
        return True


@slow
class ReasonTest(CommandTest):
    """Why jobs failed or do not run, wherever people look."""
    MISSING = 'declared output files are missing: out.txt'

    def setUp(self) -> None:
        super().setUp()
        self.world.write('w.yaml', '''
            name: w
            files: [{name: out, path: out.txt}]
            failure_handlers: [{name: fh, rules: [{exit_codes: [9], max_retries: 2}]}]
            jobs:
              - {name: good, command: "echo fine"}
              - {name: missing, command: "true", output_files: [out]}
              - {name: killed, command: "ulimit -c 0; echo last words; kill -9 $$"}
              - {name: flaky, command: "echo attempt $TORC_ATTEMPT_ID >&2; exit 9", failure_handler: fh}
              - {name: silent, command: "exit 5"}
              - {name: after, command: "cat out.txt", input_files: [out]}
              - {name: later, command: "true", depends_on: [after]}
        ''')
        self.assertExit(1, self.world.cli('run', 'w.yaml'),
                        'killed ended with return code 137: killed by SIGKILL\n')

    def on_terminal(self, line: str, width: int = 80) -> str:
        """What a command shows on a terminal of so many columns."""
        out = TerminalText()
        with self.world.inside({'COLUMNS': str(width)}):
            self.assertEqual(0, torc.main(shlex.split(line), out))
        return out.getvalue()

    def test_status_names_failures_and_what_they_canceled(self):
        text = self.text('status 1')
        for wanted in (f'  x missing (return code 1): {self.MISSING}\n',
                       '  x killed (return code 137): killed by SIGKILL\n',
                       '  x flaky (return code 9): attempt 2\n',
                       '  x silent: return code 5\n',
                       f'  - after: never ran: its prerequisite missing failed: {self.MISSING}\n',
                       '  - later: never ran: its prerequisite after was canceled, because missing failed: '):
            self.assertIn(wanted, text)
        explanation = self.json('status 1')['explanation']
        self.assertEqual((['missing', 'killed', 'flaky', 'silent'], ['after', 'later'], []), tuple(
            [job['job_name'] for job in explanation[key]] for key in ('failures', 'canceled', 'blockers')))

    def assertLines(self, text: str, *patterns: str) -> None:
        """A text has lines that match these."""
        for pattern in patterns:
            self.assertRegex(text, f'(?m)^{pattern}$')

    def test_jobs_get_names_everything_that_a_job_is_related_to(self):
        self.assertLines(self.text('jobs get 6'),
                         r'input_files: +out \(out.txt\)', r'depends_on: +missing \(failed\)',
                         f'reason: +never ran: its prerequisite missing failed: {self.MISSING}')
        self.json('jobs update 3 --label gpu,big')
        self.assertLines(self.text('jobs get 3'),
                         'labels: +big, gpu', 'return_code: +137', 'reason: +killed by SIGKILL',
                         r'start_time: +20\d\d-\d\d-\d\d \d\d:\d\d:\d\d .*')
        job = self.json('jobs get 3')
        self.assertEqual(('killed by SIGKILL', 137), (job['reason'], job['result']['return_code']))
        self.assertNotIn('reason', self.json('jobs get 1'))

    def test_a_job_with_many_relations_names_some(self):
        names = [f'p{number}' for number in range(15)]
        jobs = [{'name': name, 'command': 'true'} for name in names]
        jobs.append({'name': 'z', 'command': 'true', 'depends_on': names})
        self.make(json.dumps({'name': 'w', 'jobs': jobs}))
        last = self.json('jobs list 2')['items'][-1]['id']
        self.assertLines(self.text(f'jobs get {last}'),
                         r'depends_on: +p0 \(uninitialized\), .*, p9 \(uninitialized\) and 5 more')

    def test_results_have_reasons_of_all_attempts(self):
        results = self.json('results list 1 -j 4 --all-runs')['items']
        self.assertEqual(['attempt 1', 'attempt 2'], [row['reason'] for row in results])
        self.assertIn(f'│ {self.MISSING} │', self.text('results list 1 --failed'))
        self.assertLines(self.text(f"results get {results[0]['id']}"), 'reason: +attempt 1')

    def test_failed_attempts_are_events_of_level_error(self):
        lines = [line for line in self.text('-f csv events list 1').splitlines() if 'job_failed' in line]
        self.assertEqual([['error', 'job job_failed']] * 5, [line.split(',')[1:3] for line in lines])
        self.assertIn('flaky: attempt 1', self.on_terminal('events list 1'))

    def test_lists_of_jobs_and_workflows_say_how_it_went(self):
        jobs = {job['name']: job for job in self.json('jobs list 1')['items']}
        codes = [jobs[name].get('return_code') for name in ('good', 'killed', 'after')]
        self.assertEqual([0, 137, None], codes)
        self.assertRegex(self.text('jobs list 1'), r'│ killed  +│ failed  +│  137 │ .* │  +0\.\ds │')
        with unittest.mock.patch.object(torc, 'OUTCOMES_ASKED', 1):
            self.assertEqual(list(jobs.values()), self.json('jobs list 1')['items'])
        self.assertEqual('failed', self.json('workflows list')['items'][0]['status'])
        self.assertIn('│ failed │', self.text('workflows list'))

    def test_every_list_fits_a_terminal_and_a_pipe_has_all_columns(self):
        words = 'a description that goes on and on and on until nobody reads it any more'
        self.world.write('long.yaml', SAMPLE.replace('one of each', words))
        self.assertExit(1, self.world.cli('run', 'long.yaml'))
        for line in (
                'workflows list', 'workflows list -a', 'jobs list 1', 'jobs list 2', 'files list 2',
                'user-data list 2', 'resource-requirements list 2', 'failure-handlers list 2',
                'results list 2', 'results list 1 --failed', 'events list 1', 'compute-nodes list 2',
                'job-dependencies job-job 2', 'job-dependencies job-file 2',
                'job-dependencies job-user-data 2', 'workflows list-actions 2',
                'jobs list-resource-requirements 2', 'jobs list-failure-handlers 2', 'access-groups list',
                'status 1', 'status 2'):
            with self.subTest(line):
                shown = self.on_terminal(line).splitlines()
                self.assertEqual([], [text for text in shown if torc.text_width(text) > 80])
        titles = self.text('-f csv results list 1').splitlines()[0].split(',') + ['Reason']
        self.assertEqual(titles, self.titles(self.text('results list 1')))

    @staticmethod
    def titles(table: str) -> List[str]:
        """Titles of a table."""
        return [title.strip() for title in table.splitlines()[1].strip('│').split('│')]

    def test_on_a_real_terminal_of_80_columns(self):
        ours, theirs = os.openpty()
        self.addCleanup(os.close, ours)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 80, 0, 0))
        process = subprocess.Popen(
            [sys.executable, stub_path(), 'results', 'list', '1'], cwd=self.world.directory,
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env=dict(self.world.environment, TERM='xterm'))
        os.close(theirs)
        said = b''
        with contextlib.suppress(OSError):      # EIO: the other side has closed (pty(7))
            while True:
                said += os.read(ours, 4096)
        self.assertEqual(0, process.wait(10))
        text = said.decode()
        self.assertEqual(['ID', 'Job Name', 'Return Code', 'Exec Time', 'Status', 'Reason'],
                         self.titles(text))
        self.assertEqual(80, max(map(len, text.splitlines())))

    def test_a_server_without_explanations_will_do(self):
        def call(session: Any, op: str, body: Any = None, **params: Any) -> Any:
            if op in ('explain_job', 'explain_workflow', 'list_workflow_statuses', 'get_database'):
                raise torc.NotFound('there is nothing at ' + op)
            return session.client.call(op, body, **params)
        with unittest.mock.patch.object(torc.Session, 'call', call):
            self.assertIn('Workflow ended: 1 completed, 4 failed, 2 canceled', self.text('status 1'))
            self.assertIn('depends_on: ', self.text('jobs get 6'))
            self.assertIn('│ w    │', self.text('workflows list'))
            self.assertExit(4, self.world.main('logs', 1, 'after'), 'has left no output')
            self.assertExit(4, self.world.main('exec', '-c', 'true'), 'is not served by this version of torc.py')

    # -------- logs --------

    def test_logs_says_why_there_is_nothing(self):
        outcome = self.assertExit(4, self.world.main('logs', 1, 'after'))
        why = f'never ran: its prerequisite missing failed: {self.MISSING}'
        self.assertEqual(f'torc: job after (canceled) has left no output: {why}\n', outcome.err)
        outcome = self.assertExit(0, self.world.main('logs', 1, 'missing'))
        self.assertEqual(f'torc: job missing has written nothing; failed: {self.MISSING}\n', outcome.err)
        self.assertEqual((0, 'last words\n', 'torc: job killed failed: killed by SIGKILL\n'),
                         self.world.main('logs', 1, 'killed'))
        self.assertEqual((0, 'attempt 2\n', ''), self.world.main('logs', 1, 'flaky'))
        self.assertExit(4, self.world.main('logs', 1, 'good', '-o', 'nowhere'), 'nowhere; name the directory')

    FAILED = (f'==> missing (failed): {MISSING} <==\n==> killed (failed): killed by SIGKILL <==\nlast words\n'
              '==> flaky (failed): attempt 2 <==\nattempt 2\n==> silent (failed): return code 5 <==\n')

    def test_logs_of_all_jobs_and_of_those_that_failed(self):
        outcome = self.assertExit(0, self.world.main('logs', 1))
        self.assertEqual('==> good (completed) <==\nfine\n' + self.FAILED, outcome.out)
        self.assertEqual('torc: 2 jobs have not run; `torc.py status 1` says why\n', outcome.err)
        self.assertEqual((0, self.FAILED, ''), self.world.main('logs', 1, '--failed'))
        self.assertIn('==> flaky (failed): attempt 1 <==\nattempt 1\n',
                      self.text('logs 1 --attempt-id 1 --stderr'))
        self.assertNotIn('last words', self.text('logs 1 --stderr'))
        self.assertIn('job_wf1_j4_r1_a2.e', self.json('logs 1')['items'][3]['job_stderr'])
        for words, text in ((('--run-id', 9), 'nothing in workflow 1 is what the options ask for'),
                            (('-o', 'nowhere'), '5 of 5 jobs have left no output in ')):
            self.assertExit(0, self.world.main('logs', 1, *words), text)

    def test_logs_of_several_jobs_have_titles(self):
        self.assertEqual('==> good (completed) <==\nfine\n==> flaky (failed): attempt 2 <==\nattempt 2\n',
                         self.text('logs 1 good 4'))
        self.assertEqual('fine\n', self.text('logs 1 good 1'))
        self.assertExit(4, self.world.main('logs', 1, 'good', 'later'), 'never ran')

    def test_logs_that_cannot_be_read_are_told(self):
        path = self.world.path('torc_output', 'job_stdio', 'job_wf1_j1_r1_a1.o')
        os.unlink(path)
        os.mkdir(path)
        self.assertExit(0, self.world.main('logs', 1, 'good'), f'torc: cannot read {path}: Is a directory')

    def test_logs_keeps_words_for_later(self):
        for word in ('bundle', 'analyze'):
            self.assertExit(2, self.world.main('logs', word, 1), f'`logs {word}` is not there yet: `')
        self.assertExit(4, self.world.main('logs', 1, 'good', '-f', 'json'), 'write `torc.py -f json logs`')
        self.assertExit(2, self.world.main('-f', 'json', 'logs', 1, '-f'), '--follow has no JSON form')

    def test_what_a_job_writes_cannot_move_the_cursor(self):
        self.assertExit(0, self.world.cli('exec', '-c', r"printf 'x\033[2Jy'"))
        self.assertEqual('x\\x1b[2Jy', self.on_terminal('logs 2 job1'))
        self.assertEqual('x\x1b[2Jy', self.text('logs 2 job1'))


@slow
class FollowTest(CommandTest):
    """logs --follow."""

    def test_output_is_shown_as_it_is_written_until_the_jobs_have_ended(self):
        self.world.write('slow', '''
            echo one
            until test -e go; do sleep 0.05; done
            printf '\\303'; sleep 0.7; printf '\\244\\n'     # a character in two pieces
        ''')
        self.make('''
            name: w
            jobs:
              - {name: first, command: . ./slow}
              - {name: second, command: "echo two; exit 3", depends_on: [first]}
              - {name: third, command: echo three, depends_on: [second]}
        ''')
        every, one, failed = (self.world.start('logs', 1, *words) for words in (
            ('-f',), ('first', '--follow'), ('--failed', '-f')))
        self.world.wait(lambda: 'waiting for jobs to start' in every.err, 20, 'the follower', [every])
        waiting = 'waiting for job first (uninitialized): the workflow is not initialized'
        self.world.wait(lambda: waiting in one.err, 20, 'the follower of one', [one])
        run = self.world.start('run', 1)
        self.world.wait(lambda: 'one\n' in every.out and 'one\n' in one.out, 20, 'the first line',
                        [every, one, run])
        self.world.write('go', '')
        stem = self.world.path('torc_output', 'job_stdio', 'job_wf1_j')
        second = f'==> second: {stem}2_r1_a1.o <==\ntwo\n'
        first = f'==> first: {stem}1_r1_a1.o <==\none\nä\n'
        self.assertEqual(first + second, self.assertExit(0, every.finish(20)).out)
        self.assertEqual('one\nä\n', self.assertExit(0, one.finish(20)).out)
        self.assertEqual(second, self.assertExit(0, failed.finish(20)).out)
        self.assertExit(1, run.finish(20))

    def test_what_has_ended_is_shown_and_that_is_all(self):
        self.assertExit(0, self.world.cli('exec', '-c', 'echo a; echo b >&2'))
        self.assertEqual(self.world.main('logs', 1, 'job1'), self.world.main('logs', 1, 'job1', '-f'))
        self.assertIn('a\n', self.text('logs 1 -f'))

    def test_what_never_ran_and_what_wrote_nothing_is_told_as_without_it(self):
        self.world.write('w.yaml', '''
            name: w
            jobs:
              - {name: first, command: exit 3}
              - {name: second, command: "true", depends_on: [first]}
        ''')
        self.assertExit(1, self.world.cli('run', 'w.yaml'))
        self.assertExit(4, self.world.main('logs', 1, 'second', '-f'), 'never ran: its prerequisite first failed')
        self.assertEqual('==> first (failed): return code 3 <==\n', self.text('logs 1 -f --failed'))

    def test_an_interrupt_ends_it(self):
        self.make('name: w\njobs: [{name: a, command: "true"}]\n')
        follower = self.world.start('logs', 1, '-f')
        self.world.wait(lambda: 'Ctrl-C ends this' in follower.err, 20, 'the follower', [follower])
        follower.send(signal.SIGINT)
        self.assertExit(130, follower.finish(20))


class TaskCommandTest(CommandTest):
    """Commands that begin tasks or wait for them, with a server that carries them out, or does not."""

    def setUp(self) -> None:
        super().setUp()
        self.server = ServerThread(self.world.path('served.db'))
        self.addCleanup(self.server.stop)
        self.world.environment['TORC_API_URL'] = f'http://127.0.0.1:{self.server.port}/torc-service/v1'
        self.make('name: w\njobs: [{name: a, command: "true"}]\n')

    def work(self, does: bool) -> None:
        """Whether the server carries out tasks."""
        self.server.server.tick = torc.tend if does else lambda store: False
        self.server.server.tick_at = 0.0        # with the next request

    def run_id(self) -> int:
        """The workflow's run generation."""
        return self.json('workflows get 1')['run_id']

    def test_init_waits_for_its_task_or_does_not(self):
        self.assertEqual({'error': None, 'message': 'Initializing task completed', 'status': 'success', 'task_id': 1, 'task_operation': 'initialize_jobs',
                          'task_status': 'succeeded', 'workflow_id': 1}, self.json('workflows init 1'))
        self.assertEqual({'message': 'Reinitialize task created', 'status': 'success', 'task_id': 2, 'task_operation': 'initialize_jobs',
                          'task_status': 'queued', 'workflow_id': 1}, self.json('workflows reinit 1 --async'))
        self.assertEqual('succeeded', self.json('tasks wait 2 --timeout 10 --poll-fallback-interval 0.1')['status'])
        self.assertEqual('Task 2 (initialize_jobs of workflow 1): succeeded\n', self.text('tasks wait 2'))

    def test_a_task_at_work_is_not_doubled(self):
        self.work(False)
        self.assertEqual('Task 1 initializes workflow 1; wait for it with: torc.py tasks wait 1\n', self.text('workflows init 1 --async'))
        run_id = self.run_id()
        for line in ('workflows init 1 --async', 'workflows reinit 1 --async'):
            self.assertEqual(1, self.json(line)['task_id'])
        self.assertEqual(run_id, self.run_id())
        answer = self.json('workflows reinit 1 --wait-timeout 0.05', 1)
        self.assertEqual(('error', 'queued', True), (answer['status'], answer['task_status'], 'is still queued: wait on with' in answer['error']))
        outcome = self.assertExit(1, self.world.main('-f', 'json', 'tasks', 'wait', 1, '--timeout', '0.05'), 'torc: task 1 is still queued')
        self.assertEqual('queued', outcome.json()['status'])
        self.work(True)
        self.assertEqual('succeeded', self.json('tasks wait 1')['status'])

    def test_a_task_that_failed_is_exit_1_with_its_reason(self):
        client = self.world.connect()
        self.addCleanup(client.close)
        file_id = client.create_file({'workflow_id': 1, 'name': 'f', 'path': 'f'})['id']
        client.create_job({'workflow_id': 1, 'name': 'snake', 'command': 'x', 'input_file_ids': [file_id], 'output_file_ids': [file_id]})
        answer = self.json('workflows init 1', 1)
        self.assertEqual(('error', 'failed', 'Initializing task failed', 'these jobs wait for each other: snake -> snake'),
                         (answer['status'], answer['task_status'], answer['message'], answer['error']))
        self.assertExit(1, self.world.main('workflows', 'init', 1, '--no-prompts'), 'torc: these jobs wait for each other: snake -> snake')
        self.assertExit(1, self.world.main('tasks', 'wait', 1), 'torc: these jobs wait for each other: snake -> snake')
        self.assertExit(4, self.world.main('tasks', 'wait', 9), 'there is no task 9')


class ActionCommandTest(CommandTest):
    """Changing and deleting actions."""

    def test_options_win_over_json_and_the_rest_stays(self):
        self.make()
        answer = self.json("workflows update-action 1 2 --num-allocations 4 --start-one-worker-per-node yes --json '{\"num_allocations\": 9, \"max_parallel_jobs\": 3}'")
        config = answer['action_config']
        self.assertEqual((4, True, 3, 'slurm'), tuple(config[key] for key in ('num_allocations', 'start_one_worker_per_node', 'max_parallel_jobs', 'scheduler_type')))
        self.assertEqual('Updated action 2\n', self.text('workflows update-action 1 2 --scheduler-type slurm'))
        self.assertExit(2, self.world.main('workflows', 'update-action', 1, 2), 'nothing to change: give one of --scheduler-id')
        self.assertExit(2, self.world.main('workflows', 'update-action', 1, 2, '--json', '[1]'), '--json wants an object')
        self.assertExit(4, self.world.main('workflows', 'update-action', 1, 2, '--json', '{"x": 1}'), "has no key 'x'")
        self.assertExit(4, self.world.main('workflows', 'update-action', 1, 9, '--num-allocations', 1), 'workflow 1 has no action 9')

    def test_deleting_asks(self):
        self.make()
        self.assertExit(2, self.world.main('workflows', 'delete-action', 1, 2), 'Delete action 2 of workflow 1 (sample) of the database ')
        self.assertEqual('Deleted action 2\n', self.text('workflows delete-action 1 2 --no-prompts'))
        self.assertExit(4, self.world.main('workflows', 'delete-action', 1, 2, '--no-prompts'), 'has no action 2')


class WhichWorkflowTest(CommandTest):
    """Ids that are not given, and questions."""

    def test_without_an_id_and_a_terminal_the_candidates_are_told(self):
        self.assertExit(4, self.world.main('status'), 'there is no server and no database')
        self.make()
        self.make()
        outcome = self.assertExit(2, self.world.main('status'))
        self.assertEqual('torc: a workflow id is required when there is no terminal: 1 (sample), 2 (sample)\n', outcome.err)

    def session(self, typed: str, **options: Any) -> Any:
        """A session with somebody at a terminal who types this."""
        terminal = io.StringIO(typed)
        terminal.isatty = lambda: True
        parsed = torc.parse_command_line(['status'])
        session = torc.Session(dict(parsed.options, db=self.world.path('torc_output', 'torc.db'), **options), io.StringIO(), io.StringIO(), terminal)
        session.command = parsed.command
        self.addCleanup(session.close)
        return session

    def test_on_a_terminal_one_workflow_is_taken_and_of_several_one_is_chosen(self):
        self.make()
        with self.world.inside():
            session = self.session('')
            self.assertEqual(1, torc.choose_workflow(session, {'workflow_id': None}))
            session.close()
            self.world.main('workflows', 'new', '-n', 'second')
            session = self.session('2\n')
            self.assertEqual(2, torc.choose_workflow(session, {'workflow_id': None}))
            self.assertIn('second', session.err.getvalue())
            session.close()
            with self.assertRaises(torc.BadInput):
                torc.choose_workflow(self.session('7\n'), {'workflow_id': None})

    def test_a_question_needs_a_terminal_or_its_flag(self):
        self.make()
        for line in ('cancel 1', 'delete 1', 'workflows reset-status 1', 'jobs delete-all 1', 'jobs reset-status 1', 'user-data delete-all 1'):
            outcome = self.assertExit(2, self.world.main(*line.split()), '--no-prompts')
            self.assertEqual('', outcome.out)
        self.assertEqual(1, len(self.json('workflows list')['items']))
        self.assertEqual(5, len(self.json('jobs list 1')['items']))

    def test_no_is_the_answer_unless_yes_is_typed(self):
        for typed, expected in (('y\n', True), ('YES\n', True), ('n\n', False), ('\n', False), ('', False)):
            self.assertEqual(expected, self.session(typed).confirm('Sure?'), typed)
        self.assertTrue(self.session('', no_prompts=True).confirm('Sure?'))
        self.assertTrue(self.session('', format='json').confirm('Sure?'))


class ObjectTest(CommandTest):
    """Lists, and one function for many kinds of objects."""

    def test_lists_are_limited_sorted_and_filtered(self):
        self.make()
        self.assertEqual(['work', 'gen'], [job['name'] for job in self.json('jobs list 1 -l 2 --offset 1')['items']])
        self.assertEqual(['tail', 'bad'], [job['name'] for job in self.json('jobs list 1 --sort-by id --reverse-sort --limit 2')['items']])
        self.assertEqual([], self.json('jobs list 1 -s failed')['items'])
        self.assertEqual('No jobs found\n', self.text('jobs list 1 -s failed'))
        self.assertEqual(['bad'], [job['name'] for job in self.json('jobs list 1 --upstream-job-id 1')['items'] if job['name'] == 'bad'])

    def test_a_column_may_be_left_out(self):
        self.make()
        self.assertEqual('ID,Name,Status,Priority,Elapsed', self.text('-f csv jobs list 1 -x command -x "compute node"').splitlines()[0])

    def test_what_is_not_given_stays(self):
        self.make()
        self.json('files update 1 -p elsewhere.txt')
        record = self.json('files get 1')
        self.assertEqual(('inp', 'elsewhere.txt'), (record['name'], record['path']))
        outcome = self.assertExit(2, self.world.main('files', 'update', 1))
        self.assertEqual('torc: nothing to change: give one of --name, --path\n', outcome.err)

    def test_user_data_may_be_false_or_null_and_is_kept(self):
        self.make()
        for text in ('false', '0', '[]', '""'):
            number = self.json(f"user-data create 1 -n x{text.strip('[]')} -d '{text}'")['id']
            self.assertEqual(json.loads(text), self.json(f'user-data get {number}')['data'])

    def test_an_unknown_id_is_exit_4(self):
        self.make()
        for line in ('jobs get 99', 'files get 99', 'results delete 99', 'workflows get 99', 'cancel 99 --no-prompts', 'logs 99 a', 'logs 1 nope', 'run 99'):
            self.assertExit(4, self.world.main(*line.split()))

    def test_labels_and_priority_of_a_job_change(self):
        self.make()
        self.assertEqual(['a', 'b'], self.json('jobs update 1 --label a,b --priority 7')['labels'])
        job = self.json('jobs update 1 --clear-labels')
        self.assertEqual((None, 7), (job.get('labels') or None, job['priority']))

    def test_a_jobs_runtime_is_that_of_its_requirements(self):
        self.make()
        self.json('jobs update 1 --runtime PT2H')
        self.assertEqual('PT2H', self.json('jobs list-resource-requirements 1 -j 1')[0]['runtime'])

    def test_a_job_gets_other_requirements_and_their_runtime_changes_for_all_that_share_them(self):
        self.make()
        number = self.json('resource-requirements create 1 -n big -m 8GB -r 30m')['id']
        self.json(f'jobs update 2 --resource-requirements-id {number}')
        outcome = self.assertExit(0, self.world.main('jobs', 'update', 1, '--runtime', '2h', '--resource-requirements-id', number))
        self.assertEqual(f'the runtime of resource requirements {number} (big) is PT2H now; 2 jobs share them\n', outcome.err)
        self.assertEqual([('big', '8g', 'PT2H')] * 2 + [('small', '100m', 'PT10M')],
                         [(row['rr_name'], row['memory'], row['runtime']) for row in self.json('jobs list-resource-requirements 1')[:3]])

    def test_memory_in_bare_bytes_is_doubted(self):
        self.make()
        outcome = self.assertExit(0, self.world.main('resource-requirements', 'create', 1, '-n', 'tiny', '-m', '8'))
        self.assertEqual('warning: --memory: 8 is 8 bytes: write 8m for megabytes, 8g for gigabytes\n', outcome.err)

    def test_jobs_are_deleted_all_or_none(self):
        self.make()
        self.assertExit(4, self.world.main('jobs', 'delete', 1, 2, 99), 'there is no job 99')
        self.assertEqual(5, len(self.json('jobs list 1')['items']))
        client = self.world.connect()
        self.addCleanup(client.close)
        client.initialize_jobs(workflow_id=1)
        client.claim_next_jobs(workflow_id=1, limit=1)
        client.close()
        self.assertExit(4, self.world.main('jobs', 'delete', 2, 1), 'jobs are pending or running: prep; wait for their end, or cancel the workflow')
        self.assertEqual(5, len(self.json('jobs list 1')['items']))
        self.assertEqual([2, 3], [job['id'] for job in self.json('jobs delete 2 3 2')['items']])

    def test_jobs_come_from_a_file_of_commands(self):
        self.make()
        self.world.write('commands.txt', '# two\necho 1\n\n  echo 2\n')
        self.assertEqual(2, self.json('jobs create-from-file 1 commands.txt --memory-per-job 2g')['jobs_created'])
        self.assertEqual([('job6', 'echo 1'), ('job7', 'echo 2')], [(job['name'], job['command']) for job in self.json('jobs list 1 --offset 5')['items']])
        self.world.write('empty.txt', '# none\n')
        self.assertExit(2, self.world.main('jobs', 'create-from-file', 1, 'empty.txt'), 'holds no command')

    def test_no_command_makes_a_second_job_of_one_name(self):
        self.make()
        for words in (('update', 2, '-n', 'prep'), ('create', 1, '-n', 'prep', '-c', 'x')):
            self.assertExit(4, self.world.main('jobs', *words), "workflow 1 has a job 'prep' already")
        self.world.write('commands.txt', 'x\ny\n')
        for line in ('create-from-file 1 commands.txt', 'delete 6', 'create-from-file 1 commands.txt'):
            self.assertExit(0, self.world.main('jobs', *line.split(), '--no-prompts'))
        names = [job['name'] for job in self.json('jobs list 1')['items']]
        self.assertEqual(['job7', 'job8', 'job9'], names[5:])

    def test_failure_handlers_are_listed_of_the_jobs_that_have_one(self):
        self.make()
        self.assertEqual(['bad'], [row['job_name'] for row in self.json('jobs list-failure-handlers 1')])

    def test_the_newest_event_may_be_none(self):
        self.make()
        self.assertIsNone(self.json('events get-latest-event 1'))
        self.json("events create 1 -d '{\"category\": \"note\", \"level\": \"warning\"}'")
        self.assertEqual('note', self.json('events get-latest-event 1')['data']['category'])
        self.assertIn(',warning,note,', self.text('-f csv events list 1'))


class MonitorTest(CommandTest):
    """Commands that go on until they are interrupted."""

    def events(self, text: str) -> List[Tuple[str, Any]]:
        """Type and job of JSON documents that follow each other."""
        found, place, decoder = [], 0, json.JSONDecoder()
        while text[place:].strip():
            value, place = decoder.raw_decode(text, place + len(text[place:]) - len(text[place:].lstrip()))
            found.append((value.get('event_type') or value['method'], value.get('data', {}).get('job_name') or value.get('path')))
        return found

    def start_monitor(self, *words: Any) -> Background:
        """A monitor that has been let in: it has shown something."""
        monitor = self.world.start('events', 'monitor', 1, *words)

        def is_in() -> bool:
            self.assertExit(0, self.world.main('workflows', 'archive', 'false', 1))
            return bool(monitor.lines())
        self.world.wait(is_in, 20, 'the monitor', [monitor])
        return monitor

    def test_what_happens_is_shown_and_written_to_a_file(self):
        self.world.write('w.yaml', 'name: w\njobs: [{name: a, command: "true"}, {name: b, command: exit 3, depends_on: [a]}, {name: c, command: "true", depends_on: [b]}]')
        self.assertExit(0, self.world.main('create', 'w.yaml'))
        self.world.write('events.jsonl', 'kept\n')
        monitor = self.start_monitor('--filename', 'events.jsonl')     # a server is started for it
        self.assertExit(1, self.world.cli('run', 1))
        wanted = [('workflow_started', None), ('compute_node_started', None), ('job_started', 'a'), ('job_completed', 'a'), ('job_started', 'b'),
                  ('job_failed', 'b'), ('job_canceled', 'c'), ('compute_node_stopped', None)]
        self.world.wait(lambda: wanted[-1] in self.events('\n'.join(monitor.lines())), 10, 'the end of the run', [monitor])
        monitor.send(signal.SIGINT)
        outcome = self.assertExit(130, monitor.finish())
        self.assertEqual('Interrupted\n', outcome.err)
        self.assertEqual(wanted, [event for event in self.events(outcome.out) if event[0] != 'user_action'])
        self.assertIn('"Initialized workflow 1"', outcome.out)     # the first time is no second one
        first, *lines = self.world.read('events.jsonl').splitlines()
        self.assertEqual(('kept', self.events(outcome.out)), (first, self.events('\n'.join(lines))))

    def test_a_server_that_was_killed_is_found_again_and_the_gap_is_told(self):
        self.world.serve('--db', 'my.db')
        port = torc.parse_url(self.world.url).port
        with self.world.inside(), contextlib.closing(torc.Client.connect(database=self.world.path('my.db'))) as client:
            client.create_workflow({'name': 'w', 'user': 'u'})
            monitor = self.world.start('--db', 'my.db', 'events', 'monitor', 1)
            self.world.wait(lambda: client.archive_workflow({'is_archived': False}, workflow_id=1) and monitor.lines(), 20, 'the monitor', [monitor])
            self.world.server.kill()
            self.world.serve('--db', 'my.db', '--port', port)
            self.world.wait(lambda: 'missed while the server was away' in monitor.err, 20, 'the monitor to notice', [monitor])
            before = len(monitor.lines())
            self.world.wait(lambda: client.archive_workflow({'is_archived': False}, workflow_id=1) and len(monitor.lines()) > before, 20, 'more', [monitor])
        monitor.send(signal.SIGTERM)
        monitor.finish()

    def test_it_ends_after_its_time(self):
        self.make()
        self.assertExit(0, self.world.main('events', 'monitor', 1, '-d', '0.002', '--level', 'error'))
        self.assertExit(4, self.world.main('events', 'monitor', 9, '-d', '1'), 'there is no workflow 9')
        self.assertExit(2, self.world.main('events', 'monitor', 1, '--level', 'loud'), 'debug, info, warning')
        self.assertExit(2, self.world.main('events', 'monitor', 1, '--filename', '/nowhere/x'), 'cannot write to /nowhere/x')

    def test_requests_are_shown_one_a_line(self):
        self.world.serve('--db', 'my.db')
        tail = self.world.start('--db', 'my.db', 'admin', 'tail-api', '--include-bodies')
        self.world.wait(lambda: self.assertExit(0, self.world.main('--db', 'my.db', 'workflows', 'new', '-n', 'mine')) and 'mine' in '\n'.join(tail.lines()), 20, 'a request', [tail])
        tail.send(signal.SIGINT)
        outcome = self.assertExit(130, tail.finish())
        values = [json.loads(line) for line in outcome.out.splitlines()]
        self.assertTrue(any('"mine"' in value.get('request_body', '') for value in values if value['method'] == 'POST'), outcome)
        token = torc.read_token(self.world.path('my.db.token'))
        self.assertNotIn(token, outcome.out)


class AdminCommandTest(CommandTest):
    """admin ..."""

    def test_rows_are_shown_in_every_format(self):
        self.make()
        sql = "SELECT id, name AS \"\", id AS id FROM workflow"
        self.assertEqual([{'id': 1, '': 'sample', 'id_2': 1}], self.json(f'admin sql {shlex.quote(sql)}')['items'])
        self.assertEqual('id,,id_2\n1,sample,1\n', self.assertExit(0, self.world.main('-f', 'csv', 'admin', 'sql', sql)).out)
        self.assertExit(0, self.world.main('admin', 'sql', 'SELECT 5 AS five WHERE 0'), 'No rows found')
        self.assertEqual(1, len(self.json("admin sql 'VALUES (1), (2)' --limit 1")['items']))
        self.assertExit(4, self.world.main('admin', 'sql', 'SELECT x'), 'no such column: x')

    def test_a_change_is_asked_for(self):
        self.make()
        sql = "UPDATE workflow SET description = 'new' WHERE id = 1"
        outcome = self.assertExit(2, self.world.main('admin', 'sql', '--write', sql), 'give -y')
        self.assertEqual('', outcome.out)
        self.assertExit(2, self.world.main('-f', 'json', 'admin', 'sql', '--write', sql), 'give -y')
        for typed, expected, code in (('n\n', 'one of each', 0), ('y\n', 'new', 0)):
            with self.world.inside(), contextlib.closing(self.session(typed)) as session:
                args = {'sql': sql, 'write': True, 'allow_full_table': None, 'yes': None, 'limit': None}
                self.assertEqual(code, torc.cmd_admin_sql(session, args))
                self.assertIn('1 rows would change', session.err.getvalue())
            self.assertEqual(expected, self.json('workflows get 1').get('description'))
        self.assertExit(0, self.world.main('--no-prompts', 'admin', 'sql', '--write', 'DELETE FROM event WHERE 0'), '0 rows changed')
        self.assertExit(4, self.world.main('admin', 'sql', '--write', '-y', 'UPDATE workflow SET description = 1'), 'has no WHERE')
        self.assertExit(0, self.world.main('admin', 'sql', '--write', '-y', '--allow-full-table', 'UPDATE workflow SET description = 1'), '1 rows changed')
        self.assertExit(4, self.world.main('admin', 'sql', '--write', '-y', 'UPDATE workflow SET user = NULL WHERE 1'), 'NOT NULL')
        log = self.json('admin list-audit-log')
        self.assertEqual([False, True, True, True], [row['success'] for row in log['items']])
        self.assertIn('4 entries', self.assertExit(0, self.world.main('admin', 'list-audit-log')).out)

    session = WhichWorkflowTest.session

    def test_a_server_can_do_without(self):
        self.world.serve('--db', 'my.db', '--disable-admin-sql-writes')
        self.assertExit(0, self.world.main('--db', 'my.db', 'admin', 'sql', 'SELECT 1'))
        self.assertExit(4, self.world.main('--db', 'my.db', 'admin', 'sql', '--write', '-y', 'DELETE FROM job WHERE 1'), 'SQL that writes is switched off')
        self.assertIn('request', self.assertExit(0, self.world.main('--db', 'my.db', 'admin', 'api-stats')).out)
        self.world.server.send(signal.SIGTERM)
        self.world.server.finish(10)
        self.world.serve('--db', 'my.db', '--disable-admin-sql')
        self.assertExit(4, self.world.main('--db', 'my.db', 'admin', 'sql', 'SELECT 1'), 'SQL is switched off')
        self.assertExit(0, self.world.main('--db', 'my.db', 'admin', 'list-audit-log'), 'No entries')


class WorkflowTest(CommandTest):
    """What happens to whole workflows."""

    def test_a_workflow_of_another_user_is_not_deleted(self):
        self.make()
        outcome = self.assertExit(4, self.world.main('delete', 1, 7, '--no-prompts', env={'TORC_USERNAME': 'other'}), 'belongs to tester')
        self.assertIn('there is no workflow 7', outcome.err)
        self.assertExit(0, self.world.main('delete', 1, '--force'), 'Deleted workflow 1')

    def test_a_deletion_says_so_through_the_interface_and_the_command_shows_the_workflow_alone(self):
        self.make()
        workflow = self.json('workflows get 1')
        self.assertEqual([workflow], self.json('delete 1 --no-prompts'))
        self.make()
        client = torc.Client(database=self.world.path('torc_output/torc.db'))
        deleted = client.call('delete_workflow', workflow_id=2)
        self.assertEqual(('Deleted workflow 2', 2), (deleted['message'], deleted['id']))

    def test_archived_workflows_are_listed_when_asked_for(self):
        self.make()
        self.make()
        self.assertEqual([1], self.json('workflows archive true 1')['updated_workflows'])
        for flags, ids in (('', [2]), ('--include-archived', [1, 2]), ('--archived-only', [1]), ('-a', [2])):
            self.assertEqual(ids, [item['id'] for item in self.json(f'workflows list {flags}')['items']], flags)
        answer = self.json('workflows archive false 1 9', 4)
        self.assertEqual(('partial_success', [1]), (answer['status'], answer['updated_workflows']))

    def test_a_dry_run_of_init_tells_what_is_missing_and_changes_nothing(self):
        self.make('name: w\nfiles: [{name: f, path: f.txt}]\njobs: [{name: a, command: "true", input_files: [f]}]\n')
        answer = self.json('workflows init 1 --dry-run', 4)
        self.assertEqual((['f.txt'], False), (answer['missing_input_files'], answer['safe']))
        outcome = self.assertExit(4, self.world.main('workflows', 'init', 1))
        self.assertEqual('torc: 1 input files that no job makes are missing: f.txt; make them, or give --force to go on without them\n', outcome.err)
        self.assertExit(0, self.world.main('workflows', 'init', 1, '--force'), 'warning: 1 input files')
        self.assertEqual(1, self.json('status 1')['jobs_by_status']['ready'])

    def test_a_second_init_asks_first_and_begins_a_new_run(self):
        self.make()
        self.text('workflows init 1')
        first = self.json('workflows get 1')['run_id']
        self.assertExit(2, self.world.main('workflows', 'init', 1), 'Forget all results of workflow 1 (sample) of the database ')
        self.text('workflows init 1 --no-prompts')
        self.assertEqual(first + 1, self.json('workflows get 1')['run_id'])

    def test_run_refuses_missing_inputs_before_it_creates_anything(self):
        self.world.write('w.yaml', 'name: w\nfiles: [{name: f, path: f.txt}]\njobs: [{name: a, command: "true", input_files: [f]}]\n')
        self.assertExit(4, self.world.main('run', 'w.yaml'), 'f.txt')
        self.assertEqual([], self.json('workflows list')['items'] if os.path.exists(self.world.path('torc_output', 'torc.db')) else [])

    def test_reinit_says_what_would_run_again_and_why(self):
        self.world.write('f.txt', 'one')
        self.world.write('w.yaml', '''
            name: w
            files: [{name: f, path: f.txt}, {name: g, path: g.txt}]
            jobs:
              - {name: a, command: cp f.txt g.txt, input_files: [f], output_files: [g]}
              - {name: b, command: cat g.txt, input_files: [g]}
              - {name: c, command: "true"}
        ''')
        self.assertExit(0, self.world.cli('run', 'w.yaml'))
        os.utime(self.world.path('f.txt'), (1, 1))
        before = self.json('status 1')
        answer = self.json('workflows reinit 1 --dry-run')
        self.assertEqual(['a'], [change['job_name'] for change in answer['changed']])
        self.assertEqual('existing output: g.txt\nwould run again: a (its input f.txt changed)\n'
                         'would run again: b (it depends on a)\n2 jobs would run again\n',
                         self.text('workflows reinit 1 --dry-run'))
        self.assertEqual(['b'], [change['job_name'] for change in answer['downstream_jobs']])
        os.unlink(self.world.path('g.txt'))
        self.assertNotRegex(self.text('workflows reinit 1 --dry-run'), '(?s)missing.*Safe')
        self.world.write('g.txt', 'one')
        self.assertEqual(before, self.json('status 1'))
        outcome = self.world.main('workflows', 'reinit', 1)
        self.assertExit(0, outcome, 'a will run again: ', 'b will run again: ')
        self.assertEqual({'completed': 1, 'ready': 1, 'blocked': 1}, {key: count for key, count in self.json('status 1')['jobs_by_status'].items() if count})

    def test_chosen_jobs_are_reset_and_what_waits_for_them_is_told(self):
        self.world.write('w.yaml', SAMPLE)
        self.assertExit(1, self.world.cli('run', 'w.yaml'))
        answer = self.json('jobs reset-status --status failed --workflow-id 1 --dry-run')
        self.assertEqual((['bad'], ['tail']), ([job['name'] for job in answer['jobs']], [job['name'] for job in answer['downstream_jobs']]))
        answer = self.json('jobs reset-status 4 --reinit')
        self.assertEqual(([4], True), (answer['reset_job_ids'], answer['reinit']['applied']))
        self.assertEqual(1, self.json('status 1')['jobs_by_status']['ready'])
        answer = self.json('jobs reset-status --status terminated --workflow-id 1', 4)
        self.assertEqual(('No jobs in workflow 1 match status in [terminated].', 0), (answer['error'], answer['reset_count']))
        self.assertExit(2, self.world.main('jobs', 'reset-status', 4, '--return-code', 3), 'give either')

    def test_chosen_jobs_are_of_one_workflow(self):
        self.make()
        self.make()
        for words, owners in ((('6', '2', '1'), 'job 2 is of workflow 1, job 6 is of workflow 2: name jobs of one workflow'),
                              (('1', '--workflow-id', '2'), 'job 1 is of workflow 1: name jobs of workflow 2')):
            self.assertExit(4, self.world.main('jobs', 'reset-status', *words, '--no-prompts'), owners)
        self.assertEqual([1, 2], self.json('jobs reset-status 1 2 1 --workflow-id 1')['reset_job_ids'])

    def test_statuses_of_several_options_add_up(self):
        self.world.write('w.yaml', SAMPLE)
        self.assertExit(1, self.world.cli('run', 'w.yaml'))
        answer = self.json('jobs reset-status --status failed --status canceled,failed --workflow-id 1 --dry-run')
        self.assertEqual(['bad', 'tail'], [job['name'] for job in answer['jobs']])

    def test_jobs_of_a_workflow_at_work_are_reset_only_by_force(self):
        self.world.write('w.yaml', SAMPLE)
        self.assertExit(1, self.world.cli('run', 'w.yaml'))
        client = self.world.connect()
        self.addCleanup(client.close)
        node = {'workflow_id': 1, 'hostname': 'h', 'pid': 1, 'start_time': '2026-01-01T00:00:00Z', 'num_cpus': 1, 'memory_gb': 1.0, 'num_gpus': 0, 'num_nodes': 1,
                'compute_node_type': 'local', 'is_active': True}
        client.create_compute_node(node)
        client.close()
        self.assertExit(4, self.world.main('jobs', 'reset-status', 4, '--no-prompts'), 'workflow 1 is at work (1 compute nodes at work)')
        self.assertExit(0, self.world.main('jobs', 'reset-status', 4, '--no-prompts', '--force'))

    def test_a_finished_workflow_is_not_run_again_unasked(self):
        self.world.write('w.yaml', 'name: w\njobs: [{name: a, command: "exit 5"}]\n')
        self.assertExit(1, self.world.cli('run', 'w.yaml'))
        outcome = self.assertExit(1, self.world.cli('run', 1), 'Workflow 1 has nothing left to do: 1 failed', 'reset-status 1 --failed-only -r')
        self.assertEqual('', outcome.out)
        self.assertExit(0, self.world.main('workflows', 'reset-status', 1, '--failed-only', '--no-prompts'))
        self.assertExit(1, self.world.cli('run', 1), '1 failed')    # reset, not initialized: run does it

    def test_an_execution_plan_is_the_same_before_and_after_creation(self):
        self.make()
        before, after = self.json('workflows execution-plan w.yaml'), self.json('workflows execution-plan 1')
        self.assertEqual(before['events'], after['events'])
        self.assertEqual(('spec_file', 'database', 5), (before['source'], after['source'], after['total_jobs']))
        self.assertIn("after_prep: 'prep' completes\n    starts work, bad\n", self.text('workflows execution-plan 1'))

    def test_ping_tells_a_server_from_a_database(self):
        self.make()
        self.assertExit(3, self.world.main('ping'), 'no server is running')
        self.assertEqual({'status': 'error'}, {key: value for key, value in self.json('ping', 3).items() if key == 'status'})
        self.world.serve()
        self.assertEqual({'status': 'Server is running'}, self.json('ping'))


class RunTest(CommandTest):
    """run and exec."""

    def test_the_summary_names_failed_jobs_with_their_last_line(self):
        self.world.write('w.yaml', SAMPLE)
        outcome = self.assertExit(1, self.world.cli('run', 'w.yaml'))
        self.assertEqual('', outcome.out)
        self.assertRegex(outcome.err, r'Workflow 1 \(sample\) has ended after [0-9.]+s: 3 completed, 1 failed, 1 canceled\n'
                                      r'  bad ended with return code 3: oops\n'
                                      r'  canceled: tail\n'
                                      r'See more: torc\.py logs 1 bad; torc\.py results list 1 --failed\n'
                                      r'Output: torc_output/job_stdio \(torc\.py logs 1\)\n'
                                      r'To go on from here: torc\.py run 1 --retry-failed\n'
                                      r'After an edit of its file: torc\.py run --resume w\.yaml\n\Z')

    def test_a_quiet_run_that_went_well_says_nothing(self):
        self.world.write('w.yaml', 'name: w\njobs: [{name: a, command: "true"}]\n')
        self.assertEqual((0, '', ''), self.world.cli('-q', 'run', 'w.yaml'))

    def test_logs_prints_what_a_job_wrote_by_id_or_name(self):
        self.world.write('w.yaml', SAMPLE)
        self.assertExit(1, self.world.cli('run', 'w.yaml'))
        self.assertEqual('prep\n', self.text('logs 1 prep'))
        self.assertEqual('oops\n', self.text('logs 1 4'))
        self.assertEqual('', self.text('logs 1 bad --stdout'))
        self.assertExit(0, self.world.main('logs', 1, 'gen'), 'job gen has written nothing')
        answer = self.json('logs 1 bad')
        self.assertEqual(('bad', 1, 1), (answer['job_name'], answer['run_id'], answer['attempt_id']))
        self.assertTrue(answer['job_stderr'].endswith('job_wf1_j4_r1_a1.e'))
        self.assertExit(4, self.world.main('logs', 1, 'tail'), 'has left no output')
        self.assertExit(4, self.world.main('logs', 1, 'perp'), "did you mean 'prep'?")

    def test_a_job_with_both_outputs_gets_headlines(self):
        self.assertExit(0, self.world.cli('exec', '-c', 'echo out; echo err >&2'))
        self.assertRegex(self.text('logs 1 job1'), r'\A==> \S.*a1\.o <==\nout\n==> .*a1\.e <==\nerr\n\Z')

    def test_exec_multiplies_commands_by_parameters(self):
        table = (
            ("-c 'echo {i}' --param i=1:2 --dry-run", ['echo 1', 'echo 2']),
            ("-c 'a {i} {j}' --param i=1:2 --param 'j=[x,y]' --dry-run", ['a 1 x', 'a 1 y', 'a 2 x', 'a 2 y']),
            ("-c 'a {i} {j}' --param i=1:2 --param 'j=[x,y]' --link zip --dry-run", ['a 1 x', 'a 2 y']),
            ("-c one -c two --dry-run", ['one', 'two']),
            ("--dry-run -- echo 'a b'", ["echo 'a b'"]),
            ("-C commands.txt --dry-run", ["awk '{print}'"]),
        )
        self.world.write('commands.txt', "# comment\nawk '{print}'\n")
        for line, commands in table:
            spec = self.json(f'exec {line}')
            self.assertEqual(commands, [job['command'] for job in spec['jobs']], line)
            self.assertRegex(spec['name'], r'\Aexec_\d{8}_\d{6}\Z')
        self.assertFalse(os.path.exists(self.world.path('torc_output')))

    def test_exec_tells_what_it_cannot_do(self):
        table = (('exec', 'nothing to run'), ('exec -c a --param i', 'write NAME=VALUE'), ('exec -c a --param i=1 --param i=2', 'stands twice'),
                 ('exec -c a --param i=1:2 --param j=1:3 --link zip', ''), ('exec w.yaml', "'w.yaml' is a workflow file: run it with `torc.py run w.yaml`"), ('exec echo a', "'echo' is no option: a command stands behind -c, in one word, or behind --"),
                 ('exec -c a b.KDL -- c', 'torc.py run b.KDL'), ('exec -c a --generate-plots', 'time-series'),
                 ('exec -c a --param i=@nope', 'nope'), ('exec -C nope', 'cannot read nope'))
        for line, text in table:
            self.assertExit(2, self.world.main(*line.split()), text)

    def test_an_empty_command_is_named(self):
        wanted = "torc: -c '' is an empty command: give one, such as -c 'echo {i}', or leave the option out\n"
        for command in ('', '  '):
            self.assertEqual(wanted, self.assertExit(2, self.world.main('exec', '-c', 'echo a', '-c', command)).err)
        outcome = self.assertExit(2, self.world.main('exec', '-c', '{x}', '--param', "x=['']"))
        self.assertEqual("error: job 'job1': command must not be empty: write true for a job that does nothing\n", outcome.err)

    def test_names_in_braces_that_no_parameter_has_are_told_once(self):
        outcome = self.assertExit(0, self.world.main('exec', '--dry-run', '-c', 'echo {i} {seed}', '-c', 'echo {i} ${HOME} {a,b}', '--param', 'seeds=1:2'))
        self.assertEqual('warning: {i} is no parameter and stays as it is; for a parameter give --param i=VALUES\n'
                         "warning: {seed} is no parameter and stays as it is, did you mean 'seeds'?\n", outcome.err)
        self.assertEqual('', self.assertExit(0, self.world.main('exec', '--dry-run', '-c', 'echo {i:03d}', '--param', 'i=1:2')).err)

    def test_exec_knows_torcs_names_of_options(self):
        self.world.write('commands.txt', 'echo 1\n')
        spec = self.json('exec --commands-file commands.txt --sample-interval-seconds 30s --dry-run')
        self.assertEqual((['echo 1'], 30), ([job['command'] for job in spec['jobs']], spec['resource_monitor']['sample_interval_seconds']))
        self.assertEqual(spec['jobs'], self.json('exec --command-file commands.txt --sample-interval 5 --dry-run')['jobs'])

    def test_options_that_are_not_carried_out_yet_are_told_at_once(self):
        for line, names in (('--monitor time-series --generate-plots -i 5', '--monitor, --generate-plots, --sample-interval-seconds'),
                            ('--monitor-compute-node summary', '--monitor-compute-node'), ('--monitor off --monitor-compute-node off', ''), ('', '')):
            outcome = self.assertExit(0, self.world.main('exec', '-c', 'true', '--dry-run', *line.split()))
            self.assertEqual(names and f'warning: accepted, but not in effect in this version: {names}\n', outcome.err, line)
        self.assertIn('draw what was measured; not in effect yet\n', self.text('exec -h'))

    def test_a_run_tells_once_what_is_not_carried_out_yet(self):
        said = 'warning: {}accepted, but not in effect in this version: {}\n'
        self.world.write('w.yaml', 'name: w\nexecution_config: {oom_exit_code: 9}\nresource_monitor: {jobs: {enabled: true, granularity: time_series}}\n'
                                   'jobs: [{name: a, command: "true"}]\nslurm_schedulers: []\nactions: []\n')
        names = 'execution_config.oom_exit_code, resource_monitor'
        first = self.assertExit(0, self.world.cli('run', 'w.yaml')).err
        self.assertEqual([said.format('w.yaml:2:20: ', names)], [line for line in first.splitlines(True) if 'warning' in line])
        self.assertEqual(['w.yaml:2:20: ' + said.format('', names)[9:-1]], self.json('create --dry-run w.yaml')['warnings'])
        self.assertEqual(said.format('w.yaml:2:20: ', names), self.assertExit(0, self.world.main('create', 'w.yaml')).err)
        again = self.assertExit(0, self.world.cli('run', 2)).err
        self.assertEqual([said.format('', names)], [line for line in again.splitlines(True) if 'warning' in line])
        self.world.write('plain.yaml', 'name: w\njobs: [{name: a, command: "true"}]\n')
        self.assertEqual('', self.assertExit(0, self.world.main('create', 'plain.yaml')).err)
        self.assertNotIn('warning', self.assertExit(0, self.world.cli('run', 3)).err)

    def test_a_stored_action_that_is_not_carried_out_yet_is_told_by_run(self):
        self.make()
        self.assertIn('warning: accepted, but not in effect in this version: resource_monitor, action_type: schedule_nodes\n', self.assertExit(1, self.world.cli('run', 1)).err)

    def test_a_dry_run_of_create_tells_everything_and_creates_nothing(self):
        self.world.write('bad.yaml', 'name: w\njobs: [{name: a, comand: x}, {name: a, command: y, depends_on: [zz]}]\n')
        answer = self.json('create --dry-run bad.yaml', 2)
        self.assertFalse(answer['valid'])
        self.assertGreaterEqual(len(answer['errors']), 2)
        self.assertEqual(0, answer['summary']['job_count'])
        self.world.write('w.yaml', SAMPLE)
        self.assertIn('Validation: PASSED', self.text('create --dry-run w.yaml'))
        self.assertFalse(os.path.exists(self.world.path('torc_output')))

    def test_a_spec_comes_from_stdin_and_without_monitoring(self):
        outcome = self.world.cli('create', '-', '--no-resource-monitoring', stdin='name: piped\njobs: [{name: a, command: "true"}]\n')
        self.assertExit(0, outcome, 'Created workflow 1')
        self.assertFalse(self.json('workflows get 1')['resource_monitor_config']['enabled'])

    def test_a_file_that_cannot_be_read_is_exit_2(self):
        os.mkdir(self.world.path('folder'))
        for name, text in (('nope.yaml', 'cannot read nope.yaml: No such file or directory'), ('folder', 'Is a directory')):
            self.assertExit(2, self.world.main('run', name), text)

    def test_runner_options_come_from_the_command_line(self):
        args = torc.parse_command_line(shlex.split(
            'run 1 -o out -p 1 --num-cpus 2 --memory-gb 1.5 --num-gpus 0 --max-parallel-jobs 3 --claim-backoff-max-secs 9 --time-limit PT1M --label a,b '
            '--persistent')).args
        options = torc.runner_options(args)
        self.assertEqual(('out', 1.0, 2, 1.5, 0, 3, ['a', 'b'], True, 9.0), (
            options.output_dir, options.poll_interval_s, options.num_cpus, options.memory_gb, options.num_gpus, options.max_parallel_jobs,
            list(options.labels), options.is_persistent, options.claim_backoff_max_s))
        self.assertLess(abs(options.end_time - time.time() - 60), 5)

    def test_the_exit_code_follows_from_what_was_run(self):
        good = torc.RunOutcome(1, 0, 0, 0, [], True, False, None, '', 1.0)
        for changes, code in (({}, 0), ({'failed': 1}, 1), ({'terminated': 1}, 1), ({'canceled': 1}, 1), ({'is_canceled': True}, 1), ({'interrupted_by': 2}, 130)):
            self.assertEqual(code, torc.outcome_exit(good._replace(**changes)), changes)

    def test_the_exit_code_follows_from_all_jobs_of_the_workflow_whoever_ran_them(self):
        rows = rows_of('''
            status          exit  go on
            completed       0     no
            disabled        0     no
            failed          1     --retry-failed
            canceled        1     --retry-failed
            terminated      1     --retry-failed
            pending_failed  1     --retry-failed
            uninitialized   1     -
            ready           1     -
            pending         1     -
            running         1     -
            ''')
        for row in rows:
            counts = {'completed': 2, row['status']: 1}
            outcome = torc.RunOutcome(1, 0, 0, 0, [], True, False, None, '', 1.0, counts)
            with self.subTest(row['status']):
                self.assertEqual(int(row['exit']), torc.outcome_exit(outcome))
                words = torc.words_to_go_on(outcome)
                self.assertEqual(row['go on'], 'no' if words is None else ' '.join(words))
                self.assertEqual(130, torc.outcome_exit(outcome._replace(interrupted_by=2)))
        never_alone = {'blocked'}
        self.assertEqual(set(torc.STATUS_CODES) - never_alone, {row['status'] for row in rows})

    def test_what_failed_is_run_again_with_the_rest_unless_that_was_interrupted_or_is_at_work(self):
        counts = {'failed': 1, 'ready': 1}
        ended = torc.RunOutcome(1, 1, 0, 0, [], False, False, None, 'deadline', 1.0, counts)
        self.assertEqual(['--retry-failed'], torc.words_to_go_on(ended))
        self.assertEqual([], torc.words_to_go_on(ended._replace(interrupted_by=2)))
        self.assertEqual([], torc.words_to_go_on(ended._replace(jobs_by_status={'failed': 1, 'running': 1})))
        canceled = ended._replace(interrupted_by=2, is_canceled=True)
        self.assertEqual(['--retry-failed'], torc.words_to_go_on(canceled))

    def test_a_time_limit_in_which_nothing_could_start_is_refused_with_both_numbers(self):
        self.world.write('w.yaml', """
            name: w
            execution_config: {sigterm_lead_seconds: 5}
            jobs: [{name: a, command: "true"}]
            """)
        text = 'the time limit leaves 65 s, but jobs are stopped 65 s before its end'
        for line, *texts in (
                ('run w.yaml --time-limit PT65S', text, 'lead_seconds (5)', 'headroom_seconds (60)'),
                ('exec -c true --time-limit PT1M', 'the time limit leaves 60 s', '90 s before'),
                ('exec -c true --end-time 2020-01-01T00:00:00Z', 'the time limit leaves 0 s'),
                ('run w.yaml -j 2 --time-limit PT2M', 'leaves 120 s', 'less than 300 s are left')):
            self.assertExit(2, self.world.main(*line.split()), *texts)
        self.assertFalse(os.path.exists(self.world.path('torc_output', 'torc.db')))
        self.assertExit(0, self.world.main('create', 'w.yaml'))
        self.assertExit(2, self.world.main('run', 1, '--time-limit', 'PT65S'), text)
        self.assertEqual(1, self.json('status 1')['jobs_by_status']['uninitialized'])
        self.assertExit(0, self.world.cli('run', 1, '--time-limit', 'PT5M'))


class PasswordCommandTest(CommandTest):
    """htpasswd: files of passwords."""

    def lines(self) -> List[str]:
        """Lines of the file, with hashes shortened."""
        return [re.sub(r':\$.*', ':HASH', line) for line in self.world.read('users').splitlines()]

    def feed(self, password: str, *argv: str) -> Outcome:
        """A command with a line on stdin."""
        return self.world.cli('htpasswd', *argv, stdin=password + '\n')

    def test_a_file_of_something_else_and_names_of_no_encoding_are_left_alone(self):
        for text in ('root:x:0:0:root:/root:/bin/bash\n', 'just words\n', '# fine\nann:realm:0123\n'):
            self.world.write('users', text)
            self.assertExit(2, self.feed('open-sesame', 'add', '-f', 'users', '-c', '4', 'ann'), 'users is no password file')
            self.assertEqual(text, self.world.read('users'))
        self.world.write('users', '')
        self.assertExit(2, self.feed('open-sesame', 'add', '-f', 'users', '-c', '4', 'b\udcff'), 'is no user name')     # nobody could read the file again
        self.assertEqual('', self.world.read('users'))
        self.world.write('users', f"\ufeffann:{torc.hash_password(b'open-sesame', 4)}\r\n")      # by an editor on Windows
        self.assertExit(0, self.feed('open-sesame', 'verify', '-f', 'users', 'ann'))

    def test_users_are_added_changed_and_removed_and_all_else_stays(self):
        self.world.write('users', '# of the group\nzoe:$apr1$kept$asitis\n\n')
        self.assertExit(0, self.feed('open-sesame', 'add', '-f', 'users', '-c', '4', 'ann'), 'Added user ann in users')
        self.assertExit(0, self.feed('long enough', 'add', '-f', 'users', '-c', '4', 'bob'))
        before = self.world.read('users')
        self.assertExit(0, self.feed('Open-Sesame', 'add', '-f', 'users', '-c', '4', 'ann'), 'Changed user ann')
        self.assertEqual(['# of the group', 'zoe:HASH', '', 'ann:HASH', 'bob:HASH'], self.lines())
        self.assertIn('zoe:$apr1$kept$asitis\n', self.world.read('users'))
        self.assertNotEqual(before, self.world.read('users'))
        self.assertEqual(0o600, stat.S_IMODE(os.stat(self.world.path('users')).st_mode))
        self.assertExit(2, self.world.main('htpasswd', 'list', '-f', 'users'), 'users:2: user \'zoe\': its hash is neither bcrypt nor scrypt')
        self.assertExit(0, self.world.main('htpasswd', 'remove', '-f', 'users', 'zoe'))
        self.assertEqual(['ann', 'bob'], self.json('htpasswd list -f users')['items'])
        self.assertEqual('ann\nbob\n', self.text('htpasswd list -f users'))
        self.assertExit(0, self.feed('Open-Sesame', 'verify', '-f', 'users', 'ann'))
        for password, user in (('open-sesame', 'ann'), ('Open-Sesame', 'bob'), ('Open-Sesame', 'eve'), ('', 'ann')):
            self.assertExit(4, self.feed(password, 'verify', '-f', 'users', user))
        self.assertExit(4, self.world.main('htpasswd', 'remove', '-f', 'users', 'eve'), "has no user 'eve'")
        self.assertEqual(['# of the group', '', 'ann:HASH', 'bob:HASH'], self.lines())

    def test_a_line_alone_can_be_had(self):
        for words, wanted in (((), r'\A\$\S+\n\Z'), (('ann',), r'\Aann:\$\S+\n\Z')):
            self.assertRegex(self.feed('open-sesame', 'hash', '-c', '4', *words).out, wanted)

    def test_what_cannot_be_a_user_or_a_password_is_refused(self):
        for password, user, text in (('short', 'ann', 'at least 8 characters'), ('open-sesame', 'a:b', 'no user name'), ('open-sesame', '#a', 'no user name'),
                                     ('open-sesame', 'a\x1bb', 'no user name'), ('open-sesame', '', 'no user name'), ('open-sesame', 'anonymous', 'cannot be a user')):
            self.assertExit(2, self.feed(password, 'add', '-f', 'users', '-c', '4', user), text)
        self.assertExit(2, self.feed('open-sesame', 'add', '-f', 'users', '-c', '3', 'ann'), 'not between 4 and 16')
        self.assertExit(2, self.feed('open-sesame', 'add', '-f', 'no/users', '-c', '4', 'ann'), 'cannot write no/users')
        self.assertFalse(os.path.exists(self.world.path('users')))

    def test_a_password_on_the_command_line_is_warned_of(self):
        outcome = self.assertExit(0, self.world.main('htpasswd', 'add', '-f', 'users', '-p', 'open-sesame', '-c', 4, 'ann'))
        self.assertIn('warning: others on this machine can see a password', outcome.err)
        self.assertNotIn('open-sesame', self.world.read('users') + outcome.out + outcome.err)

    def test_on_a_terminal_it_is_asked_for_twice_and_not_shown(self):
        for typed, code, text in (('open-sesame\nopen-sesame\n', 0, 'Added user ann'), ('open-sesame\nopen-sesama\n', 2, 'the two passwords differ'),
                                  ('\x04', 2, 'no password was given')):
            ours, theirs = os.openpty()
            with contextlib.ExitStack() as stack:
                stack.callback(os.close, ours)
                process = subprocess.Popen([sys.executable, stub_path(), 'htpasswd', 'add', '-f', 'users', '-c', '4', 'ann'], cwd=self.world.directory, stdin=theirs,
                                           stdout=theirs, stderr=theirs, env=self.world.environment, start_new_session=True)
                os.close(theirs)
                said = b''
                for line in typed.splitlines(True):
                    while not said.endswith(b': '):
                        said += os.read(ours, 1000)
                    os.write(ours, line.encode())
                    said += b'\n'
                with contextlib.suppress(OSError):      # EIO: the other side has closed (pty(7))
                    while True:
                        said += os.read(ours, 1000)
                self.assertEqual((code, True), (process.wait(10), text.encode() in said), said)
            self.assertNotIn(b'open-sesam', said)
        self.assertEqual(['ann:HASH'], self.lines())


@slow
class PasswordServeTest(CommandTest):
    """`serve` with a password file."""

    def setUp(self) -> None:
        super().setUp()
        for user in ('ann', 'bob'):
            self.assertExit(0, self.world.main('htpasswd', 'add', '-f', 'users', '-p', f'word of {user}', '-c', 4, user))

    def as_user(self, user: str, *argv: Any, **env: str) -> Outcome:
        """A command of a user who has named the server."""
        return self.world.cli(*argv, env=dict(TORC_API_URL=self.world.url, TORC_USERNAME=user, TORC_PASSWORD=f'word of {user}', **env))

    def test_users_work_on_workflows_of_their_own_and_of_their_groups(self):
        self.world.serve('--auth-file', 'users', '--enforce-access-control', '--admin-user', 'bob', '--require-auth')
        spec = self.world.write('w.yaml', "name: ann's\njobs:\n  - {name: a, command: 'echo \"[$TORC_PASSWORD]\"; env > seen'}\n  - {name: b, command: 'true', depends_on: [a]}\n")
        self.assertExit(0, self.as_user('ann', 'run', spec))
        self.assertEqual('[]\n', self.world.read('torc_output/job_stdio/job_wf1_j1_r1_a1.o'))
        self.assertNotIn('word of ann', self.world.read('seen'))
        self.assertExit(0, self.as_user('bob', 'access-groups', 'create', 'chemists'))
        self.assertExit(4, self.as_user('ann', 'access-groups', 'create', 'alchemists'), 'managed by administrators')
        self.assertExit(0, self.world.main('htpasswd', 'add', '-f', 'users', '-p', 'word of cy', '-c', 4, 'cy'))
        self.assertExit(4, self.as_user('cy', 'status', 1), 'user or password is wrong')
        reload = self.world.cli('htpasswd', 'remove', '-f', 'users', 'nobody', '--reload-auth')
        self.assertExit(4, reload, 'has no user')
        self.assertExit(0, self.world.cli('htpasswd', 'add', '-f', 'users', '-p', 'word of dan', '-c', '4', 'dan', '--reload-auth', '--url', self.world.url,
                                          '--server-password', 'word of bob', env={'TORC_USERNAME': 'bob'}), '4 users')
        self.assertExit(4, self.as_user('cy', 'status', 1), 'cy has no access to workflow 1')
        self.assertExit(0, self.as_user('bob', 'access-groups', 'add-user', 2, 'cy'))
        self.assertExit(0, self.as_user('ann', 'access-groups', 'add-workflow', 1, 2))
        self.assertExit(0, self.as_user('cy', 'status', 1))
        outcome = self.as_user('cy', 'workflows', 'list', '-g', 'chemists', '-f', 'csv')
        self.assertEqual(['ann'], [row.split(',')[1] for row in outcome.out.splitlines()[1:]])
        self.assertExit(0, self.world.cli('status', 1))     # the owner of the server, by its token

    def test_flags_and_variables_say_the_same(self):
        self.world.environment.update(TORC_AUTH_FILE='users', TORC_ADMIN_USERS='ann, cy,,', TORC_CREDENTIAL_CACHE_TTL_SECS='0')
        self.world.serve('--admin-user', 'bob', '--admin-user', 'ann')
        self.assertEqual({'ann', 'bob', 'cy'}, {row['user_name'] for row in self.json('access-groups list-members 1')['items']})
        self.world.server.send(signal.SIGTERM)
        self.world.server.finish(10)
        self.world.environment.update(TORC_ADMIN_USERS='')
        self.world.serve()
        self.assertEqual([], self.json('access-groups list-members 1')['items'])
        self.assertExit(2, self.world.main('serve', '--port', 0, env={'TORC_CREDENTIAL_CACHE_TTL_SECS': 'soon'}), "TORC_CREDENTIAL_CACHE_TTL_SECS is 'soon'")
        self.assertExit(2, self.world.main('serve', '--require-auth', '--no-auth'), 'contradict each other')
        self.assertExit(2, self.world.main('serve', '--auth-file', 'nousers', '--port', 0), 'there is no password file nousers')
        self.assertExit(2, self.world.main('serve', '--db', 'x.db', '--auth-file', 'users', '--no-auth', '--host', '0.0.0.0', '--port', 0), '--no-auth would let everybody')
        self.assertExit(2, self.world.main('serve', '--admin-user', 'a:b', '--port', 0), 'no user name')

    def test_beside_a_password_file_no_auth_lets_the_anonymous_in(self):
        self.world.serve('--auth-file', 'users', '--no-auth')
        as_anybody = {'TORC_API_URL': self.world.url, 'TORC_TOKEN_FILE': ''}
        with http_connection(self.world.url) as connection:
            for field, status in (('', 200), ('Basic ' + base64.b64encode(b'ann:word of ann').decode(), 200), ('Basic ' + base64.b64encode(b'ann:x').decode(), 401)):
                connection.request('GET', '/torc-service/v1/workflows', headers={'Authorization': field} if field else {})
                answer = connection.getresponse()
                self.assertEqual((status, True), (answer.status, bool(answer.read())))
        self.assertExit(0, self.world.cli('workflows', 'list', env=as_anybody))

    def test_the_password_can_be_asked_for(self):
        self.world.serve('--auth-file', 'users')
        env = {'TORC_USERNAME': 'ann'}
        self.assertExit(0, self.world.cli('--url', self.world.url, '--prompt-password', 'ping', stdin='word of ann\n', env=env))
        self.assertExit(4, self.world.cli('--url', self.world.url, '--prompt-password', 'ping', stdin='word of bob\n', env=env))
        self.assertExit(0, self.world.cli('--url', self.world.url, '--password', 'word of ann', 'ping', env=env), 'others on this machine can see')
        self.assertExit(2, self.world.cli('--password', 'word of ann', 'status', 1, env=env), 'give --url too')


# ======== 21. Main ========
#
# The parser as a table of command lines, its errors word for word, and the border: what becomes which exit code.

def parsed_name(line: str) -> str:
    """Name of the command that a command line means."""
    return torc.parse_command_line(shlex.split(line)).command.name


class ParserTest(unittest.TestCase):
    """Words to commands."""
    maxDiff = None

    def parse(self, line: str) -> Any:
        """A command line, parsed."""
        return torc.parse_command_line(shlex.split(line))

    def test_options_and_words_come_in_any_order(self):
        wanted = {'workflow_id': 5, 'status': 'failed', 'limit': 3, 'reverse_sort': True}
        for line in ('jobs list 5 -s failed -l 3 --reverse-sort', 'jobs list -s failed --reverse-sort 5 -l3',
                     'jobs list --status=failed -l 3 --reverse-sort 5', 'jobs list --limit=3 -sfailed 5 --reverse-sort'):
            args = self.parse(line).args
            self.assertEqual(wanted, {key: args[key] for key in wanted}, line)

    def test_options_of_all_commands_stand_before_between_or_after(self):
        for line in ('-f json jobs list 5', 'jobs -f json list 5', 'jobs list -f json 5', 'jobs list 5 --format=json'):
            parsed = self.parse(line)
            self.assertEqual(('jobs list', 'json', 5), (parsed.command.name, parsed.options['format'], parsed.args['workflow_id']), line)

    def test_after_the_command_its_own_short_option_wins(self):
        parsed = self.parse('-s jobs list 5 -s ready')
        self.assertEqual((True, 'ready'), (parsed.options['standalone'], parsed.args['status']))
        parsed = self.parse('-s status 5 -s')
        self.assertTrue(parsed.options['standalone'])

    def test_forms_of_words_and_options(self):
        table = (
            ('delete 1 --no-prompts 2 3', 'workflow_ids', [1, 2, 3]),
            ('run spec.yaml', 'target', 'spec.yaml'),
            ('run -', 'target', '-'),
            ('run 5 --label a,b --label c', 'label', ['a', 'b', 'c']),
            ('run 5 --time-limit PT2H', 'time_limit', 7200),
            ('run 5 --end-time 1970-01-01T00:01:00Z', 'end_time', 60.0),
            ('run 5 -p0.5', 'poll_interval', 0.5),
            ('run 5', 'poll_interval', 5.0),
            ('exec -c "-x y"', 'command', ['-x y']),
            ('exec -c a -c b', 'command', ['a', 'b']),
            ('exec -- ls -l "a b"', 'words', ['ls', '-l', 'a b']),
            ('results list 1 --return-code -15', 'return_code', -15),
            ('jobs create 1 -n x -c true -b 1 2,3 -i 4', 'depends_on_job_ids', [1, 2, 3]),
            ('jobs reset-status 4 5', 'job_ids', [4, 5]),
            ('jobs reset-status --status failed,canceled --reinit', 'status', ['failed', 'canceled']),
            ('jobs reset-status 4 --reinitialize', 'reinit', True),
            ('workflows archive yes', 'is_archived', True),
            ('user-data create 1 -n x -d \'{"a": 1}\'', 'data', {'a': 1}),
            ('serve run -d x.db', 'db', 'x.db'),
            ('serve --db x.db', 'db', 'x.db'),
            ('help jobs list', 'topic', ['jobs', 'list']),
            ('events list 1 --type x', 'category', 'x'),
        )
        for line, key, value in table:
            self.assertEqual(value, self.parse(line).args[key], line)

    def test_amounts_may_say_their_unit(self):
        table = (
            ('run 1 --time-limit PT2H', 'time_limit', 7200), ('run 1 --time-limit 2h30m', 'time_limit', 9000), ('run 1 --time-limit 1:00:00', 'time_limit', 3600),
            ('run 1 -p 5', 'poll_interval', 5.0), ('run 1 -p 0.5s', 'poll_interval', 0.5), ('run 1 --claim-backoff-max-secs 5m', 'claim_backoff_max_secs', 300.0),
            ('run 1 --memory-gb 1.5', 'memory_gb', 1.5), ('run 1 --memory-gb 512MB', 'memory_gb', 0.5), ('tasks wait 1 --timeout 2m', 'timeout', 120.0),
            ('events monitor 1 -d 2', 'duration', 2.0), ('events monitor 1 -d 90s', 'duration', 1.5), ('admin api-stats --window 1h', 'window', 3600),
            ('resource-requirements update 1 -m 8GB -r 30m', 'memory', '8g'), ('resource-requirements update 1 -m 8GB -r 30m', 'runtime', 'PT30M'),
            ('jobs create-from-file 1 f --memory-per-job 8GiB --runtime-per-job 1d', 'memory_per_job', '8g'), ('jobs update 1 --runtime 2h', 'runtime', 'PT2H'))
        for line, key, value in table:
            self.assertEqual(value, self.parse(line).args[key], line)

    def test_several_switches_may_be_put_together(self):
        parsed = self.parse('workflows reset-status 5 -rq')
        self.assertEqual((True, True), (parsed.args['reinitialize'], parsed.options['quiet']))

    def test_force_of_delete_is_no_prompts(self):
        self.assertTrue(self.parse('delete 1 --force').options['no_prompts'])
        self.assertFalse(self.parse('delete 1').options['no_prompts'])

    def test_mistakes_are_told_with_the_nearest_right_word(self):
        table = (
            ('jobz', "there is no command 'jobz', did you mean 'jobs'? (see: torc.py help)"),
            ('events lst', "there is no command 'events lst', did you mean 'list'? (events has: create, list, get-latest-event, monitor, delete)"),
            ('events', '`events` wants one of: create, list, get-latest-event, monitor, delete'),
            ('status 1 --qiet', "there is no option --qiet, did you mean '--quiet'?"),
            ('status -z', 'there is no option -z'),
            ('-f jsno status', "-f: 'jsno' is none of table, json, csv, did you mean 'json'?"),
            ('status x', "'x' is not an id: ids are whole numbers from 1; usage: torc.py status [WF]"),
            ('status 0', "'0' is not an id: ids are whole numbers from 1; usage: torc.py status [WF]"),
            ('status 1 2', "'2' is one word too many; usage: torc.py status [WF]"),
            ('status 1 -- 2', "'2' is one word too many; usage: torc.py status [WF]"),
            ('access-groups get', 'GROUP is missing; usage: torc.py access-groups get GROUP'),
            ('delete', 'WF is missing; usage: torc.py delete WF... [options]'),
            ('jobs create 1 -n x', '--command CMD is missing; usage: torc.py jobs create [WF] [options]'),
            ('run 1 --num-cpus', '--num-cpus wants a value: --num-cpus N'),
            ('run 1 --num-cpus two', "--num-cpus: 'two' is not a whole number"),
            ('run 1 --num-cpus 0', '--num-cpus: 0 is less than 1'),
            ('run 1 -p inf', "-p: 'inf' is not a duration: write such as 90s, 30m, 1d12h, 1:00:00 or PT30M"),
            ('admin api-stats --window 1.5', "--window: '1.5' is not a whole number of seconds"),
            ('run 1 --memory-gb much', "--memory-gb: 'much' is not an amount of memory: write a number and a unit, such as 512m, 8g or 1.5GB"),
            ('run 1 -p -1', '-p: -1 is less than 0.01'),
            ('run 1 --memory-gb 1e308', "--memory-gb: '1e308' is more than can be counted"),
            ('run 1 -p 1e300', "-p: '1e300' is more than can be counted"),
            ('run 1 --time-limit 45', "--time-limit: '45' may be seconds, minutes or hours: write 45s, 45m or 45h"),
            ('run 1 --label "a, b"', "--label: 'a, b': a label is not empty and has no blanks around it"),
            ('run 1 --force=yes', '--force takes no value'),
            ('jobs list 1 -s faild', "-s: 'faild' is none of uninitialized, blocked, ready, pending, running, completed, failed, canceled, terminated, "
                                     "disabled, pending_failed, did you mean 'failed'?"),
            ('workflows archive perhaps 1', "'perhaps' is neither true nor false; usage: torc.py workflows archive TRUTH [WF...]"),
            ('user-data create 1 -n x -d "{"', '-d: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)'),
        )
        for line, message in table:
            with self.subTest(line), self.assertRaises(torc.BadInput) as caught:
                self.parse(line)
            self.assertEqual(message, caught.exception.message)

    def test_no_two_arguments_of_a_command_share_a_key_or_a_spelling(self):
        for command in torc.COMMANDS:
            keys = [torc.key_of(argument) for argument in command.arguments]
            names = [name for argument in command.arguments for name in argument.names.split() if name.startswith('-')]
            self.assertEqual(sorted(set(keys)), sorted(keys), command.name)
            self.assertEqual(sorted(set(names)), sorted(names), command.name)

    def test_every_example_is_of_its_command(self):
        for command in torc.COMMANDS:
            self.assertEqual(command.name, parsed_name(command.example))


class BorderTest(WorldTest):
    """Errors to exit codes."""

    def main(self, *words: str, **how: Any) -> Tuple[int, str, str]:
        """main() on streams of our own."""
        out, err = io.StringIO(), io.StringIO()
        with self.world.inside():
            code = torc.main(list(words), how.get('out', out), err)
        return code, out.getvalue(), err.getvalue()

    def test_nothing_at_all_is_wrong_usage_and_shows_the_commands(self):
        code, out, err = self.main()
        self.assertEqual((2, ''), (code, out))
        self.assertIn('run FILE', err)

    def test_help_and_version_are_results(self):
        for words, text in ((('--help',), 'Commands:'), (('-h',), 'Groups:'), (('help',), 'Manual:'), (('--version',), f'torc {torc.__version__}'),
                            (('jobs', 'list', '--help'), 'Usage: torc.py jobs list [WF] [options]'), (('jobs', '-h'), 'Commands of jobs:'),
                            (('logs', '-h'), 'ids or names of jobs')):
            code, out, err = self.main(*words)
            self.assertEqual((0, ''), (code, err), words)
            self.assertIn(text, out)

    def test_a_users_error_is_a_message_and_its_exit(self):
        self.assertEqual((2, '', "torc: there is no command 'sttus', did you mean 'status'? (see: torc.py help)\n"), self.main('sttus'))
        code, _, err = self.main('status', '7')
        self.assertEqual(4, code)
        self.assertEqual(1, err.count('\n'))

    def test_csv_where_there_is_none_is_refused_before_anything_is_done(self):
        self.world.write('w.yaml', 'name: w\njobs: [{name: a, command: "true"}]\n')
        code, out, err = self.main('-f', 'csv', 'create', 'w.yaml')
        self.assertEqual((2, '', 'torc: `create` has no CSV form: give -f table or -f json\n'), (code, out, err))
        self.assertFalse(os.path.exists(self.world.path('torc_output')))

    def test_a_bug_is_told_with_its_traceback_and_exit_70(self):
        session = types.SimpleNamespace(write=lambda text: 1 / 0, flush=lambda: None, isatty=lambda: False, encoding='utf-8')
        code, _, err = self.main('help', out=session)
        self.assertEqual(70, code)
        self.assertIn('ZeroDivisionError', err)
        self.assertIn('please report', err)

    def test_a_reader_that_leaves_is_exit_141_without_a_word(self):
        words = [sys.executable, TORC, 'help', 'spec']
        reader, writer = os.pipe()
        os.close(reader)
        try:
            done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, env=self.world.environment, cwd=self.world.directory)
        finally:
            os.close(writer)
        self.assertEqual((141, b''), (done.returncode, done.stderr))

    def test_an_interrupt_is_exit_130(self):
        def interrupt(text: str) -> None:
            raise KeyboardInterrupt

        out = types.SimpleNamespace(write=interrupt, flush=lambda: None, isatty=lambda: False, encoding='utf-8')
        self.assertEqual((130, '', 'Interrupted\n'), self.main('help', out=out))

    def test_many_problems_are_told_up_to_a_limit(self):
        jobs = ''.join(f'  - {{name: j{number}, comand: x}}\n' for number in range(30))
        self.world.write('w.yaml', f'name: w\njobs:\n{jobs}')
        code, _, err = self.main('create', 'w.yaml')
        self.assertEqual(2, code)
        self.assertEqual(torc.PROBLEMS_SHOWN, err.count('error: '))
        self.assertRegex(err, r'and \d+ more')

    def test_under_json_some_errors_are_documents_too(self):
        code, out, err = self.main('-f', 'json', 'workflows', 'init', '9', '--db', 'x.db')
        self.assertEqual(4, code)
        answer = json.loads(out)
        self.assertEqual(('error', answer['message']), (answer['status'], answer['error']))

    def test_log_lines_go_to_stderr_only_while_a_command_runs(self):
        handlers = torc.log.handlers[:]
        self.main('--log-level', 'debug', 'help')
        self.assertEqual(handlers, torc.log.handlers)

    def test_a_locale_without_unicode_gets_escapes(self):
        self.world.write('w.yaml', 'name: "é日"\njobs: [{name: a, command: "true"}]\n')
        self.assertExit(0, self.world.cli('create', 'w.yaml'))
        outcome = self.world.cli('workflows', 'list', env={'PYTHONIOENCODING': 'ascii', 'LC_ALL': 'C'})
        self.assertExit(0, outcome, r'\xe9\u65e5')
        answer = self.world.cli('-f', 'json', 'workflows', 'list', env={'PYTHONIOENCODING': 'ascii', 'LC_ALL': 'C'}).json()
        self.assertEqual('é日', answer['items'][0]['name'])


class HelpTest(unittest.TestCase):
    """The manual travels in the file."""

    def test_every_command_and_topic_has_a_page(self):
        for command in torc.COMMANDS:
            text = torc.format_command_help(command.name)
            self.assertTrue(text.startswith(f'Usage: torc.py {command.name}'), text)
            for argument in command.arguments:
                self.assertIn(argument.meaning, text)
        for name, topic in torc.TOPICS.items():
            self.assertGreater(len(topic.show()), 400, name)

    def test_groups_are_pages_too(self):
        self.assertIn('results list [WF] [options]', torc.format_command_help('results'))

    def test_an_unknown_topic_is_told_with_the_nearest(self):
        with self.assertRaises(torc.BadInput) as caught:
            torc.format_command_help('enviroment')
        self.assertEqual("there is no help on 'enviroment', did you mean 'environment'? (see: torc.py help)", caught.exception.message)

    def test_the_environment_page_has_every_variable_and_exit_code(self):
        text = torc.format_environment()
        for row in torc.ENVIRONMENT:
            self.assertIn(row.name, text)
        for row in torc.EXITS:
            self.assertIn(row.meaning, text)


# ======== End to end: real files, real programs, from a spec to results ========
#
# These tests enter through the program's front door and look at what a user would see: exit codes, statuses, files.
# Each has a directory of its own, so that ids start at 1.

LONG_JOBS = '''
    name: long
    jobs:
      - name: long_{i}
        command: echo $$ > pid_{i}; exec sleep 1000
        parameters: {i: "1:2"}
    '''


class FlowTest(WorldTest):
    """A world with short words for what every end-to-end test asks."""

    def ask_json(self, *argv: Any) -> Any:
        """JSON that a command answers."""
        return self.assertExit(0, self.world.main('-f', 'json', *argv)).json()

    def statuses(self, workflow_id: int = 1) -> Dict[str, str]:
        """Name -> status of every job."""
        return {job['name']: job['status'] for job in self.ask_json('jobs', 'list', workflow_id)['items']}

    def results(self, workflow_id: int = 1, *flags: str) -> List[Tuple[str, int, int, int, str]]:
        """(job, run, attempt, return code, status) of every result, in order."""
        names = {job['id']: job['name'] for job in self.ask_json('jobs', 'list', workflow_id)['items']}
        rows = self.ask_json('results', 'list', workflow_id, '--all-runs', *flags)['items']
        return sorted((names[row['job_id']], row['run_id'], row['attempt_id'], row['return_code'], row['status']) for row in rows)

    def run_text(self, text: str, *flags: Any, code: int = 0) -> Outcome:
        """Run a workflow given as YAML text."""
        return self.assertExit(code, self.world.cli('run', *(flags + (self.world.write('spec.yaml', text),))))

    def start_long(self) -> Background:
        """Two jobs that would run for ever, running."""
        runner = self.world.start('run', '-p', 0.5, '--num-cpus', 2, self.world.write('long.yaml', LONG_JOBS))
        self.world.wait(lambda: self.world.read('pid_1').strip() and self.world.read('pid_2').strip(), 20, 'both jobs', [runner])
        return runner

    def assertDead(self, *names: str) -> None:
        """The processes whose pids stand in these files are gone."""
        for name in names:
            pid = int(self.world.read(name))
            self.world.wait(lambda: not torc.read_process_start_ticks(pid), 10, f'the end of {name}')


class OutcomeTest(FlowTest):
    """How a run ends."""

    def test_a_diamond_whose_first_job_fails_ends_with_the_rest_canceled(self):
        outcome = self.run_text('''
            name: diamond
            jobs:
              - {name: top, command: "echo no luck >&2; exit 3"}
              - {name: left, command: "true", depends_on: [top]}
              - {name: right, command: "true", depends_on: [top]}
              - {name: bottom, command: "true", depends_on: [left, right]}
            ''', code=1)
        self.assertIn('top', outcome.out + outcome.err)
        self.assertIn('no luck', outcome.out + outcome.err)
        self.assertEqual({'top': 'failed', 'left': 'canceled', 'right': 'canceled', 'bottom': 'canceled'}, self.statuses())
        self.assertEqual([('top', 1, 1, 3, 'failed')], self.results())

    def test_user_data_that_was_declared_and_not_written_is_told_at_the_end_of_the_run(self):
        text = '''
            name: forgetful
            user_data: [{name: "u{i}", parameters: {i: "1:12"}}]
            jobs:
              - {name: "job{i}", command: "true", output_user_data: ["u{i}"], parameters: {i: "1:12"}}
              - {name: last, command: "true", depends_on_regexes: [job]}
            '''
        lines = self.run_text(text).err.splitlines()
        told = [line for line in lines if line.startswith('warning: job job')]
        self.assertEqual(lines[-len(told) - 2:-2], told)
        rest = 'and {} more: torc.py events list 1 --category user_data'
        self.assertEqual((10, rest.format(2)), (len(told), lines[-2]))
        self.assertIn('warning: job job1 has completed without writing its output_user_data: u1', told)
        self.assertEqual(13, len(self.statuses()))
        self.assertEqual('', self.run_text(text, '-q').err)
        self.assertExit(0, self.world.main('user-data', 'update', 1, '-d', '5'))
        self.assertExit(0, self.world.main('workflows', 'init', 1, '--no-prompts'))
        err = self.assertExit(0, self.world.cli('run', 1)).err      # of this run, not of the one before
        self.assertEqual((10, rest.format(1)), (err.count('warning: job job'), err.splitlines()[-2]))

    def test_a_job_that_says_so_runs_though_its_prerequisite_failed(self):
        self.run_text('''
            name: anyway
            jobs:
              - {name: first, command: "false"}
              - {name: clean, command: touch cleaned, depends_on: [first], cancel_on_blocking_job_failure: false}
            ''', code=1)
        self.assertEqual({'first': 'failed', 'clean': 'completed'}, self.statuses())
        self.assertTrue(os.path.exists(self.world.path('cleaned')))

    def test_a_command_that_does_not_exist_fails_with_127_and_its_stderr(self):
        outcome = self.run_text('''
            name: absent
            jobs:
              - {name: lost, command: no_such_program_here --flag}
            ''', code=1)
        self.assertEqual([('lost', 1, 1, 127, 'failed')], self.results())
        self.assertIn('no_such_program_here', self.world.read('torc_output/job_stdio/job_wf1_j1_r1_a1.e'))
        self.assertIn('no_such_program_here', outcome.out + outcome.err)

    def test_a_job_killed_by_a_signal_has_128_more_than_its_number(self):
        self.run_text('''
            name: killed
            jobs:
              - {name: victim, command: kill -KILL $$}
            ''', code=1)
        self.assertEqual([('victim', 1, 1, 137, 'failed')], self.results())

    def test_a_declared_output_that_is_missing_fails_its_job_with_the_reason(self):
        outcome = self.run_text('''
            name: liar
            files: [{name: f, path: never_written.txt}]
            jobs:
              - {name: writer, command: "true", output_files: [f]}
              - {name: reader, command: "true", input_files: [f]}
            ''', code=1)
        self.assertEqual({'writer': 'failed', 'reader': 'canceled'}, self.statuses())
        self.assertIn('never_written.txt', outcome.out + outcome.err)

    def test_names_may_hold_blanks_dots_slashes_and_any_letter(self):
        self.run_text('''
            name: "a/b c.d"
            jobs:
              - {name: "../up and/away.x", command: "printf %s \\"$TORC_JOB_NAME\\" > name"}
              - {name: "über 漢字 'quoted' $HOME", command: "true", depends_on: ["../up and/away.x"]}
            ''')
        self.assertEqual('../up and/away.x', self.world.read('name'))
        self.assertEqual(['completed'] * 2, list(self.statuses().values()))

    def test_a_job_sees_who_it_is(self):
        self.run_text('''
            name: who
            env: {SHARED_WORD: "of the workflow", OWN_WORD: "of the workflow"}
            jobs:
              - name: me
                command: env > seen; pwd > where
                env: {OWN_WORD: "of the job"}
            ''', '-o', 'out')
        seen = dict(line.split('=', 1) for line in self.world.read('seen').splitlines() if '=' in line)
        wanted = {'TORC_WORKFLOW_ID': '1', 'TORC_JOB_ID': '1', 'TORC_JOB_NAME': 'me', 'TORC_RUN_ID': '1', 'TORC_ATTEMPT_ID': '1',
                  'TORC_OUTPUT_DIR': self.world.path('out'), 'TORC_WORKFLOW_SUBMISSION_DIR': self.world.directory,
                  'SHARED_WORD': 'of the workflow', 'OWN_WORD': 'of the job'}
        self.assertEqual(wanted, {name: seen.get(name) for name in wanted})
        self.assertEqual(self.world.directory, self.world.read('where').strip())
        self.assertRegex(seen['TORC_API_URL'], r'^http://127\.0\.0\.1:\d+/torc-service/v1$')
        self.assertTrue(os.path.isfile(seen['TORC_TOKEN_FILE']) or not processes_with(self.world.mark))
        self.assertFalse([name for name in seen if name in ('TORC_TOKEN', 'TORC_PASSWORD')])

    def test_a_deleted_output_directory_does_not_end_the_runner(self):
        outcome = self.world.cli('run', '-o', 'out', self.world.write('spec.yaml', '''
            name: vandal
            jobs:
              - {name: vandal, command: "rm -rf \\"$TORC_OUTPUT_DIR\\""}
              - {name: next, command: "echo next", depends_on: [vandal]}
            '''))
        self.assertIn(outcome.code, (0, 1), str(outcome))
        self.assertNotIn('Traceback', outcome.err)
        self.assertEqual('completed', self.statuses()['vandal'])
        self.assertEqual({0: 'completed', 1: 'failed'}[outcome.code], self.statuses()['next'])

    def test_an_output_file_that_cannot_be_opened_fails_its_job_with_the_reason(self):
        outcome = self.run_text('''
            name: wall
            jobs:
              - {name: wall, command: "mkdir -p out/job_stdio/job_wf1_j2_r1_a1.o"}
              - {name: stuck, command: "echo never", depends_on: [wall]}
              - {name: other, command: "echo fine", depends_on: [wall]}
            ''', '-o', 'out', code=1)
        self.assertEqual({'wall': 'completed', 'stuck': 'failed', 'other': 'completed'}, self.statuses())
        self.assertIn('job_wf1_j2_r1_a1.o', outcome.out + outcome.err)

    def test_a_full_disk_fails_the_jobs_that_meet_it_and_not_the_runner(self):
        small = self.world.path('small')
        os.mkdir(small)
        mounted = subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=64k,nr_inodes=12', 'tmpfs', small], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) \
            if shutil.which('mount') else None
        need('mount', mounted and mounted.returncode == 0, 'root, and a kernel that mounts a small tmpfs')
        self.addCleanup(subprocess.check_call, ['umount', small])
        outcome = self.assertExit(1, self.world.cli('exec', '-o', small + '/out', '-c', 'head -c 20000 /dev/zero; echo {i}', '--param', 'i=1:10'))
        self.assertIn('No space left on device', outcome.err)
        counts = collections.Counter(self.statuses().values())
        self.assertEqual({'completed', 'failed'}, set(counts))
        self.assertEqual(10, sum(counts.values()))

    def test_a_failure_handler_retries_and_every_attempt_leaves_its_result(self):
        self.run_text('''
            name: stubborn
            failure_handlers:
              - name: again
                rules:
                  - {exit_codes: [7], recovery_script: 'echo "$TORC_JOB_NAME $TORC_ATTEMPT_ID $TORC_RETURN_CODE" >> recovered', max_retries: 3}
            jobs:
              - {name: third_time, command: 'test $TORC_ATTEMPT_ID = 3 || exit 7', failure_handler: again}
              - {name: never, command: 'exit 7', failure_handler: again}
              - {name: other_code, command: 'exit 8', failure_handler: again}
            ''', code=1)
        self.assertEqual([
            ('never', 1, 1, 7, 'failed'), ('never', 1, 2, 7, 'failed'), ('never', 1, 3, 7, 'failed'), ('other_code', 1, 1, 8, 'failed'),
            ('third_time', 1, 1, 7, 'failed'), ('third_time', 1, 2, 7, 'failed'), ('third_time', 1, 3, 0, 'completed')], self.results())
        self.assertEqual({'third_time': 'completed', 'never': 'failed', 'other_code': 'failed'}, self.statuses())
        self.assertEqual(['never 1 7', 'never 2 7', 'third_time 1 7', 'third_time 2 7'], sorted(self.world.read('recovered').splitlines()))

    def test_a_recovery_script_that_fails_vetoes_the_retry(self):
        self.run_text('''
            name: veto
            failure_handlers:
              - {name: again, rules: [{match_all_exit_codes: true, recovery_script: "exit 1"}]}
            jobs:
              - {name: hopeless, command: "exit 9", failure_handler: again}
            ''', code=1)
        self.assertEqual([('hopeless', 1, 1, 9, 'failed')], self.results())

    def test_stdio_modes_leave_the_files_that_they_name(self):
        modes = ('separate', 'combined', 'no_stdout', 'no_stderr', 'none')
        jobs = ''.join(f'  - {{name: {mode}, command: "echo o; echo e >&2", stdio: {{mode: {mode}}}}}\n' for mode in modes)
        jobs += '  - {name: gone, command: "echo o", stdio: {mode: separate, delete_on_success: true}}\n'
        jobs += '  - {name: kept, command: "echo o; exit 1", stdio: {mode: separate, delete_on_success: true}}\n'
        self.run_text(f'name: modes\njobs:\n{jobs}', code=1)
        ids = {job['name']: job['id'] for job in self.ask_json('jobs', 'list', 1)['items']}
        found = sorted(os.listdir(self.world.path('torc_output', 'job_stdio')))
        wanted = {'separate': ('.o', '.e'), 'combined': ('.log',), 'no_stdout': ('.e',), 'no_stderr': ('.o',), 'kept': ('.o', '.e')}
        self.assertEqual(sorted(f'job_wf1_j{ids[name]}_r1_a1{end}' for name, ends in wanted.items() for end in ends), found)


class TriggerTest(FlowTest):
    """Commands that the runner executes at the six triggers."""

    def test_actions_of_all_six_triggers_run_once_in_their_order(self):
        actions = ''.join(f'''
              - {{trigger_type: {trigger}, action_type: run_commands, commands: ["echo {trigger} >> \\"$TORC_WORKFLOW_SUBMISSION_DIR/log\\""]{more}}}'''
                          for trigger, more in (('on_workflow_start', ''), ('on_worker_start', ''), ('on_jobs_ready', ', jobs: [second]'),
                                                ('on_jobs_complete', ', jobs: [first, second]'), ('on_worker_complete', ''), ('on_workflow_complete', '')))
        self.run_text(f'''
            name: triggers
            jobs:
              - {{name: first, command: echo first >> log}}
              - {{name: second, command: echo second >> log, depends_on: [first]}}
              - {{name: third, command: echo third >> log, depends_on: [second]}}
            actions:{actions}
            ''')
        log = self.world.read('log').split()
        self.assertEqual(sorted(torc.TRIGGERS + ('first', 'second', 'third')), sorted(log))
        order = {word: log.index(word) for word in log}
        for before, after in (('on_workflow_start', 'first'), ('on_worker_start', 'first'), ('first', 'on_jobs_ready'), ('on_jobs_ready', 'on_jobs_complete'),
                              ('second', 'on_jobs_complete'), ('third', 'on_workflow_complete'), ('third', 'on_worker_complete')):
            self.assertLess(order[before], order[after], f'{before} before {after}: {log}')
        self.assertTrue(all(action['executed'] for action in self.ask_json('workflows', 'list-actions', 1)['actions']))

    def test_an_action_that_fails_stops_at_its_first_failing_command_and_the_workflow_goes_on(self):
        touch = 'touch "$TORC_WORKFLOW_SUBMISSION_DIR/{}"'.format
        self.run_text(f'''
            name: broken action
            jobs: [{{name: only, command: touch ran}}, {{name: more, command: "true", depends_on: [only]}}]
            actions:
              - trigger_type: on_workflow_start
                action_type: run_commands
                commands: ['{touch('one')}', 'false', '{touch('two')}']
              - {{trigger_type: on_workflow_complete, action_type: run_commands, commands: ['true']}}
              - trigger_type: on_jobs_complete
                jobs: [more]
                action_type: schedule_nodes
                scheduler_type: local
                scheduler: s
            ''')
        lines = self.world.main('-f', 'csv', 'workflows', 'list-actions', 1).out.splitlines()
        self.assertEqual(['Status', 'failed', 'executed', 'waiting'], [line.split(',')[5] for line in lines])
        action = self.ask_json('workflows', 'list-actions', 1)['actions'][0]
        self.assertEqual('command 2 ended with return code 1: false', action['failure'])
        self.assertIn(',error,action action_failed,', self.world.main('-f', 'csv', 'events', 'list', 1).out)
        self.assertEqual([True, False, True], [os.path.exists(self.world.path(name)) for name in ('one', 'two', 'ran')])


    def test_actions_run_in_the_output_directory_and_jobs_where_the_runner_was_started(self):
        self.run_text('''
            name: places
            jobs: [{name: only, command: pwd > job}]
            actions: [{trigger_type: on_workflow_start, action_type: run_commands, commands: [pwd > action]}]
            ''', '-o', 'out put')
        self.assertEqual([self.world.path('out put') + '\n', self.world.directory + '\n'],
                         [self.world.read('out put/action'), self.world.read('job')])


@slow
class AgainTest(FlowTest):
    """Running again: reinit, reset, continue."""

    CHAIN = '''
        name: chain
        files: [{name: raw, path: raw.txt}, {name: mid, path: mid.txt}, {name: end, path: end.txt}]
        jobs:
          - {name: one, command: "cat ${files.input.raw} > ${files.output.mid}"}
          - {name: two, command: "cat ${files.input.mid} > ${files.output.end}"}
          - {name: aside, command: "true"}
        '''

    def test_a_finished_workflow_has_nothing_to_do(self):
        self.world.write('raw.txt', '1')
        self.run_text(self.CHAIN)
        before = self.results()
        self.assertExit(0, self.world.cli('run', 1))
        self.assertEqual(before, self.results())

    def test_reinit_runs_again_what_a_changed_file_touches(self):
        self.world.write('raw.txt', '1')
        self.run_text(self.CHAIN)
        dry = self.ask_json('workflows', 'reinit', 1, '--dry-run')
        self.assertEqual({'completed'}, set(self.statuses().values()), dry)
        os.utime(self.world.write('raw.txt', '2'), (2e9, 2e9))
        self.ask_json('workflows', 'reinit', 1)
        self.assertEqual({'one': 'ready', 'two': 'blocked', 'aside': 'completed'}, self.statuses())
        self.assertExit(0, self.world.cli('run', 1))
        self.assertEqual('2', self.world.read('end.txt'))
        self.assertEqual({('one', 1), ('two', 1), ('aside', 1), ('one', 2), ('two', 2)}, {row[:2] for row in self.results()})

    def test_a_run_records_the_provenance_of_its_files(self):
        self.world.write('raw.txt', '1')
        self.run_text('enable_ro_crate: true\n' + textwrap.dedent(self.CHAIN))
        self.assertEqual({name: ('1', 1) for name in ('raw.txt', 'mid.txt', 'end.txt')}, self.recorded())
        os.utime(self.world.write('raw.txt', '22'), (2e9, 2e9))
        self.ask_json('workflows', 'reinit', 1)
        self.assertExit(0, self.world.cli('run', 1))
        self.assertEqual({name: ('22', 2) for name in ('raw.txt', 'mid.txt', 'end.txt')}, self.recorded())

    def recorded(self) -> Dict[str, Tuple[str, int]]:
        """Path -> contents by size and hash, and the run that the entities end with."""
        known = {(len(text), hashlib.sha256(text.encode()).hexdigest()): text for text in ('1', '22')}
        with contextlib.closing(self.world.connect()) as client:
            found = {item['entity_id']: item['metadata'] for item in client.list_ro_crate_entities(1)['items']}
        runs = [int(name[len('#torc-run-id-'):]) for name, metadata in found.items() if name.startswith('#torc-run-id-') and 'endTime' in metadata]
        self.assertEqual({'@id': f'#torc-run-id-{max(runs)}'}, found['end.txt']['prov:wasAttributedTo'])
        return {name: (known[metadata['contentSize'], metadata['sha256']], max(runs)) for name, metadata in found.items() if metadata['@type'][0] == 'File'}

    def test_reinit_makes_a_missing_output_again(self):
        self.world.write('raw.txt', '1')
        self.run_text(self.CHAIN)
        os.unlink(self.world.path('end.txt'))
        self.ask_json('workflows', 'reinit', 1)
        self.assertEqual({'one': 'completed', 'two': 'ready', 'aside': 'completed'}, self.statuses())
        self.assertExit(0, self.world.cli('run', 1))
        self.assertEqual('1', self.world.read('end.txt'))

    def test_failed_jobs_and_what_waited_for_them_run_again_after_a_reset(self):
        text = '''
            name: mend
            jobs:
              - {name: good, command: "true"}
              - {name: bad, command: test -e mended}
              - {name: after, command: "true", depends_on: [bad]}
            '''
        self.run_text(text, code=1)
        self.assertEqual({'good': 'completed', 'bad': 'failed', 'after': 'canceled'}, self.statuses())
        self.world.write('mended', '')
        self.ask_json('--no-prompts', 'workflows', 'reset-status', 1, '--failed-only', '--reinitialize')
        self.assertExit(0, self.world.cli('run', 1))
        self.assertEqual({'completed'}, set(self.statuses().values()))
        self.assertEqual([('after', 2), ('bad', 1), ('bad', 2), ('good', 1)], [row[:2] for row in self.results()])

    def test_a_missing_input_is_told_before_anything_runs(self):
        outcome = self.world.cli('run', self.world.write('spec.yaml', self.CHAIN))
        self.assertIn(outcome.code, (2, 4), str(outcome))
        self.assertIn('raw.txt', outcome.err)
        self.assertNotIn('Traceback', outcome.err)


@slow
class GoOnTest(FlowTest):
    """The summary of a run tells the command that goes on from there, and it does."""
    JOBS = '''
        name: w
        jobs:
          - {name: first, command: echo first >> ran}
          - name: slow
            command: "echo slow >> ran; test -e go || { : > started; sleep 1000; }"
            depends_on: [first]
          - {name: last, command: echo last >> ran, depends_on: [slow]}
        '''

    def start(self, *flags: Any) -> Background:
        """A run whose second job would run for ever."""
        runner = self.world.start('run', '-p', 0.5, *flags, self.world.write('w.yaml', self.JOBS))
        self.world.wait(lambda: os.path.exists(self.world.path('started')), 20, 'the job', [runner])
        return runner

    def go_on(self, outcome: Outcome, code: int = 0) -> Outcome:
        """Do what a run said at its end."""
        line, = re.findall(r'^To go on.*: torc.py (.*)$', outcome.err, re.MULTILINE)
        self.world.write('go', '')
        return self.assertExit(code, self.world.cli(*shlex.split(line)))

    def test_a_recovery_script_that_is_stopped_with_its_runner_refuses_no_retry(self):
        spec = self.world.write('w.yaml', '''
            name: w
            execution_config: {sigterm_lead_seconds: 1, sigkill_headroom_seconds: 1}
            failure_handlers:
              - name: mend
                rules:
                  - {exit_codes: [7], max_retries: 2, recovery_script: "test -e mended || { : > started; sleep 1000; }"}
            jobs:
              - {name: a, command: "test $TORC_ATTEMPT_ID -ge 3 || exit 7", failure_handler: mend}
              - {name: last, command: echo last >> ran, depends_on: [a]}
            ''')
        runner = self.world.start('run', '-p', 0.5, spec)
        self.world.wait(lambda: os.path.exists(self.world.path('started')), 20, 'the script', [runner])
        runner.send(signal.SIGTERM)
        outcome = self.assertExit(130, runner.finish(20), '1 blocked, 1 ready')
        self.assertEqual([('terminated', 7, 'the recovery script was stopped with the runner')], [
            (row['status'], row['return_code'], row['reason'])
            for row in self.world.cli('-f', 'json', 'results', 'list', 1, '--all-runs').json()['items']])
        self.world.write('mended', '')      # the second attempt fails, is mended and retried, though max_retries is 2
        self.go_on(outcome)
        self.assertEqual('last\n', self.world.read('ran'))

    def test_after_ctrl_c_it_goes_on_with_what_was_stopped_and_what_waits_for_it(self):
        runner = self.start()
        runner.send(signal.SIGINT)
        outcome = runner.finish(30)
        self.assertExit(130, outcome, 'was interrupted', '1 blocked, 1 ready, 1 completed',
                        '  blocked: last\n  ready: slow\n')
        self.assertIn('1/3 done (33%)', self.go_on(outcome).err)
        self.assertEqual('first\nslow\nslow\nlast\n', self.world.read('ran'))
        self.assertEqual([('first', 1, 1, 0, 'completed'), ('last', 1, 1, 0, 'completed'),
                          ('slow', 1, 1, 143, 'terminated'), ('slow', 1, 2, 0, 'completed')], self.results())

    def test_after_cancel_it_runs_again_what_was_canceled_and_nothing_else(self):
        runner = self.start()
        canceled = self.world.cli('--no-prompts', 'cancel', 1)
        self.assertExit(0, canceled, 'torc.py run 1 --retry-failed',
                        'workflows reset-status 1 --failed-only -r')
        outcome = self.assertExit(1, runner.finish(30), 'was canceled', '  canceled: slow, last\n')
        again = self.assertExit(1, self.world.cli('run', 1), 'reset-status 1 --failed-only -r')
        self.assertNotIn('init 1', canceled.out + outcome.err + again.err)
        for said in (outcome, again):
            self.assertIn('To go on from here: torc.py run 1 --retry-failed\n', said.err)
        self.go_on(outcome)
        self.assertEqual('first\nslow\nslow\nlast\n', self.world.read('ran'))

    def test_after_a_failure_it_runs_again_what_failed_in_one_command_on_the_same_database(self):
        self.world.write('w.yaml', '''
            name: w
            jobs:
              - {name: a, command: echo a >> ran}
              - {name: b, command: test -e go}
              - {name: c, command: "true", depends_on: [b]}
            ''')
        outcome = self.assertExit(1, self.world.cli('--db', "it's.db", 'run', '-o', 'my out', 'w.yaml'))
        self.assertIn("here: torc.py --db 'it'\"'\"'s.db' run 1 --retry-failed -o 'my out'\n", outcome.err)
        self.assertNotIn('-128', outcome.err)
        self.assertIn('2 jobs run again', self.go_on(outcome).err)
        self.assertEqual('a\n', self.world.read('ran'))
        again = self.world.cli('--db', "it's.db", 'run', 1, '--retry-failed')
        self.assertExit(0, again, 'has no jobs that failed', 'has nothing left to do')

    def test_what_failed_is_not_run_again_while_runners_are_at_work_and_needs_an_id(self):
        self.run_text('name: w\njobs: [{name: a, command: "false"}]\n', code=1)
        with contextlib.closing(self.world.connect()) as client:
            client.create_compute_node({
                'workflow_id': 1, 'hostname': 'h', 'pid': 1, 'start_time': '2026-01-01T00:00:00Z',
                'num_cpus': 1, 'memory_gb': 1.0, 'num_gpus': 0, 'num_nodes': 1, 'compute_node_type': 'local',
                'is_active': True})
        self.assertExit(4, self.world.cli('run', 1, '--retry-failed'), 'is at work (1 compute nodes at work)')
        self.assertEqual({'a': 'failed'}, self.statuses())
        self.assertExit(2, self.world.cli('run', 'spec.yaml', '--retry-failed'), 'give its id in place')

    def test_a_failure_of_an_earlier_run_is_told_and_makes_the_exit_code(self):
        self.run_text('name: w\njobs: [{name: a, command: exit 3}, {name: b, command: "true"}]\n', code=1)
        self.assertExit(0, self.world.main('jobs', 'reset-status', 2, '--reinit', '--no-prompts'))
        outcome = self.assertExit(1, self.world.cli('run', 1), 'has ended after',
                                  '1 completed, 1 failed\n  failed: a\nOutput: ', 'To go on from here')
        self.assertNotIn('-128', outcome.err)

    def test_a_job_that_was_lost_with_another_runner_is_told(self):
        self.world.serve()
        runner = self.start()
        self.world.wait(lambda: self.statuses()['slow'] == 'running', 20, 'the report of its start', [runner])
        runner.kill()
        outcome = self.world.cli('run', '-p', 0.2, 1)
        self.assertExit(1, outcome, '  failed: slow\n', '  canceled: last\n',
                        'Jobs of other runners were lost with them (return code -128): 1\n')
        self.go_on(outcome)


@slow
class EditedFileTest(FlowTest):
    """Edit the file, run it again."""

    STUDY = '''
        name: study
        jobs:
          - {name: prep, command: "echo prep >> ran; date +%N > prep.txt", output_files: [prep]}
          - {name: "work_{i}", command: "echo work_{i} >> ran; test {i} -ne 2", parameters: {i: "1:3"},
             input_files: [prep]}
          - {name: collect, command: echo collect >> ran, depends_on_regexes: ["^work_"]}
        files: [{name: prep, path: prep.txt}]
        '''
    SAME = 'Workflow 1 (study) and its file do not differ\n'

    def edit(self, old: str = '-ne 2', new: str = '-ne 7', name: str = 'study.yaml') -> None:
        """Replace text in the workflow file; if not told otherwise, what lets a job fail."""
        text = self.world.read(name)
        self.assertIn(old, text)
        self.world.write(name, text.replace(old, new))

    def ran(self) -> List[str]:
        """The jobs that have run since the last look."""
        names = sorted(self.world.read('ran').split())
        self.world.write('ran', '')
        return names

    def make(self, *flags: str) -> Outcome:
        """Run the study, in which a job in the middle fails."""
        outcome = self.world.cli('run', self.world.write('study.yaml', self.STUDY), *flags)
        self.assertEqual(['prep', 'work_1', 'work_2', 'work_3'], self.ran())
        return self.assertExit(1, outcome)

    def resume(self, code: int, *texts: str, path: str = 'study.yaml', flags: Sequence[str] = ()) -> Outcome:
        """run --resume FILE, which ends so and says so."""
        return self.assertExit(code, self.world.cli('run', '--resume', path, *flags), *texts)

    def test_new_actions_of_a_finished_workflow_are_executed_and_no_others(self):
        action = '  - {trigger_type: %s, action_type: run_commands, commands: [echo %s >> ../ran]}\n'
        start, end = (action % row for row in (('on_workflow_start', 'start'), ('on_workflow_complete', 'end')))
        text = 'name: w\njobs: [{name: a, command: "true"}]\nactions:\n' + end
        self.assertExit(0, self.world.cli('run', self.world.write('w.yaml', text)))
        self.assertEqual(['end'], self.ran())
        self.world.write('w.yaml', 'description: d\n' + text)
        self.resume(0, '0 of 1 jobs are to run', 'nothing left to do', path='w.yaml')
        self.world.write('w.yaml', text + start)
        self.resume(0, '0 of 1 jobs are to run', 'Workflow 1 (w) is complete', path='w.yaml')
        self.assertEqual(['start'], self.ran())
        self.edit('echo end', 'echo other', 'w.yaml')
        self.resume(0, 'Workflow 1 (w) is complete', path='w.yaml')
        self.assertEqual(['other'], self.ran())
        self.resume(0, 'do not differ', 'nothing left to do', path='w.yaml')

    def test_actions_that_a_killed_runner_has_not_ended_are_executed_by_the_next_one(self):
        self.world.write('w.yaml', """
            name: w
            jobs: [{name: a, command: "true"}]
            actions:
              - trigger_type: on_workflow_complete
                action_type: run_commands
                commands: [echo $$ >> ../begun; until test -e ../go; do sleep 0.02; done; echo end >> ../ran]
            """)
        runner = self.world.start('run', 'w.yaml')
        begun = self.world.path('begun')
        self.world.wait(lambda: os.path.exists(begun) and read_text(begun), 20, 'the action', [runner])
        runner.kill()
        pid = int(read_text(begun))
        self.world.wait(lambda: pid not in processes_with(self.world.mark), 20, 'the end of the action')
        self.world.wait(lambda: not self.ask_json('status', 1)['active_compute_nodes'], 20, 'the loss')
        self.world.write('go', '')
        self.assertExit(0, self.world.cli('run', 1), 'Workflow 1 (w) is complete')
        self.assertEqual(['end'], self.ran())
        self.assertExit(0, self.world.cli('run', 1), 'nothing left to do')

    def job_ids(self) -> Dict[str, int]:
        """Ids of jobs by name."""
        return {job['name']: job['id'] for job in self.ask_json('jobs', 'list', 1)['items']}

    def written(self) -> Dict[str, float]:
        """Files of the jobs' output, and when they were written."""
        directory = self.world.path('torc_output', 'job_stdio')
        return {name: os.stat(os.path.join(directory, name)).st_mtime for name in os.listdir(directory)}

    def workflow_ids(self) -> List[int]:
        """Ids of all workflows."""
        return [item['id'] for item in self.ask_json('workflows', 'list')['items']]

    def test_two_commands_mend_a_job_in_the_middle(self):
        self.make()
        ids, output = self.job_ids(), self.written()
        self.edit()
        self.resume(0, 'Workflow 1 (study) and its file differed; the workflow follows:\n'
                    '  jobs changed (command): 3 (work_1, work_2, work_3)\n4 of 5 jobs are to run:\n'
                    '  its command changed: 3 (work_1, work_2, work_3)\n  it was canceled: collect\n')
        self.assertEqual(['collect', 'work_1', 'work_2', 'work_3'], self.ran())
        self.assertEqual({'completed'}, set(self.statuses().values()))
        self.assertEqual((ids, [1]), (self.job_ids(), self.workflow_ids()))
        self.assertLessEqual(set(output.items()), set(self.written().items()))

    def test_a_run_with_failures_says_what_to_do_after_an_edit(self):
        for flags in ((), ('-o', 'my out')):
            told = self.make(*flags).err
            hint = re.search('^After an edit of its file: torc.py (.*)$', told, re.MULTILINE).group(1)
            self.assertEqual(['run', '--resume', 'study.yaml', *flags], shlex.split(hint))
            self.edit()
            self.assertExit(0, self.world.cli(*shlex.split(hint)), '4 of 5 jobs are to run')
            self.ran()
        again = self.assertExit(0, self.world.cli('run', 1), 'has nothing left to do')
        self.assertNotIn('After an edit', again.err)

    def test_without_an_edit_it_is_a_retry_and_then_nothing(self):
        self.make()
        self.resume(1, self.SAME + '2 of 5 jobs are to run:\n', '  it failed: work_2\n')
        self.assertEqual(['work_2'], self.ran())
        self.edit()
        self.resume(0)
        self.ran()
        results = self.results()
        self.resume(0, self.SAME + '0 of 5 jobs are to run\n', 'has nothing left to do: 5 completed')
        self.assertEqual(([], results), (self.ran(), self.results()))

    def test_a_dry_run_shows_it_and_changes_nothing(self):
        self.make()
        self.edit()
        self.edit('1:3', '1:4')
        before = (self.statuses(), self.results(), self.ask_json('workflows', 'get', 1))
        for command in ('run', 'create'):
            outcome = self.assertExit(0, self.world.cli(command, '--resume', '--dry-run', 'study.yaml'))
            self.assertEqual('Workflow 1 (study) and its file differ:\n  jobs added: work_4\n'
                             '  jobs changed (command): 3 (work_1, work_2, work_3)\n'
                             '  jobs changed (depends_on): collect\n5 of 6 jobs would run:\n'
                             '  its command changed: 3 (work_1, work_2, work_3)\n  it was canceled: collect\n'
                             '  it is new: work_4\n', outcome.out)
            value = self.ask_json(command, '--resume', '--dry-run', 'study.yaml')
            self.assertEqual((1, 2, 6), tuple(value[key] for key in ('workflow_id', 'run_id', 'job_count')))
            self.assertEqual(['work_4'], value['changes'][0]['names'])
        self.assertEqual(before, (self.statuses(), self.results(), self.ask_json('workflows', 'get', 1)))
        self.assertEqual([], self.ran())

    def test_without_resume_each_run_makes_a_new_workflow(self):
        self.make()
        self.assertExit(1, self.world.cli('run', 'study.yaml'), 'Created workflow 2')
        self.edit()
        self.resume(0, 'Workflow 2 (study)')    # the latest
        self.assertEqual('failed', self.statuses(1)['work_2'])

    def test_what_was_made_from_another_file_is_another_workflow(self):
        self.make()
        self.world.write('other/study.yaml', self.STUDY.replace('-ne 2', '-ne 7'))
        outcome = self.resume(0, 'A new one would have 5 jobs', path='other/study.yaml', flags=['--dry-run'])
        self.assertIn("No workflow 'study' was made from ", outcome.err)
        self.resume(0, 'No workflow', 'Created workflow 2', path='other/study.yaml')
        self.edit('name: study', 'name: renamed')
        self.resume(1, 'Created workflow 3')
        os.symlink(self.world.directory, self.world.path('link'))
        self.resume(1, 'Workflow 3 (renamed) and its file do not differ', path='link/study.yaml')

    def test_a_workflow_follows_its_file_to_another_place_when_told_so(self):
        self.make()
        os.rename(self.world.path('study.yaml'), self.world.path('moved.yaml'))
        outcome = self.resume(0, 'A new one would have 5 jobs', path='moved.yaml', flags=['--dry-run'])
        hint = re.search(r'if that is now this one: torc.py (.*)', outcome.err).group(1)
        self.assertExit(0, self.world.cli(*shlex.split(hint)))
        self.resume(1, self.SAME, path='moved.yaml')

    def test_a_workflow_that_does_not_say_its_file_is_asked_about(self):
        self.world.write('study.yaml', self.STUDY)
        self.assertExit(1, self.world.cli('run', '-', stdin=self.world.read('study.yaml')))
        outcome = self.world.cli('run', '--resume', '-', stdin=self.world.read('study.yaml'))
        self.assertExit(2, outcome, '--resume needs a workflow file')
        self.resume(2, 'Workflow 1 has this name and directory', '--no-prompts')
        self.assertEqual([1], self.workflow_ids())
        self.resume(1, self.SAME, flags=['--no-prompts'])
        self.resume(1, self.SAME)       # now it says so
        self.assertEqual(self.world.path('study.yaml'), self.ask_json('workflows', 'get', 1)['spec_path'])

    def test_relative_paths_start_where_the_workflow_was_made(self):
        self.make()
        self.edit()
        os.mkdir(self.world.path('elsewhere'))
        outcome = self.assertExit(0, self.world.cli(
            'run', '--resume', '--dry-run', '../study.yaml', '--db', '../torc_output/torc.db',
            cwd=self.world.path('elsewhere')))
        self.assertNotIn('missing', outcome.out)
        self.assertIn('4 of 5 jobs would run', outcome.out)

    def test_a_missing_input_is_told_before_anything_changes(self):
        self.make()
        before = self.ask_json('workflows', 'get', 1)
        self.edit('files: [{', 'files: [{name: raw, path: raw.csv}, {')
        self.edit('output_files: [prep]', 'output_files: [prep], input_files: [raw]')
        for flags in ((), ('--dry-run',)):
            self.resume(4, 'raw.csv', '--force', flags=flags)
        self.assertEqual(before, self.ask_json('workflows', 'get', 1))
        self.resume(1, 'files added: raw', flags=['--force'])

    def test_an_output_that_is_gone_is_made_again(self):
        self.make()
        os.unlink(self.world.path('prep.txt'))
        self.resume(1, 'its output prep.txt is missing: prep')
        self.assertEqual(['prep', 'work_1', 'work_2', 'work_3'], self.ran())

    def test_it_is_refused_while_a_runner_is_at_work_and_not_after_it_was_killed(self):
        runner = self.start_long()
        self.edit('exec sleep 1000', 'true', 'long.yaml')
        self.resume(4, 'runners are at work on workflow 1 (1 active, with 2 pending or running jobs)',
                    'torc.py cancel 1', path='long.yaml')
        self.assertLessEqual(set(self.statuses().values()), {'pending', 'running'})
        runner.kill()
        again = ('run', '--resume', 'long.yaml')
        self.world.wait(lambda: self.world.cli(*again).code == 0, 30, 'the end of the runner to be noticed')
        self.assertEqual({'completed'}, set(self.statuses().values()))

    def test_create_changes_a_workflow_for_runners_that_come_later(self):
        self.make()
        self.edit()
        value = self.ask_json('create', '--resume', 'study.yaml')
        self.assertEqual((1, 2), (value['workflow_id'], value['run_id']))
        names = [job['job_name'] for job in value['to_run']]
        self.assertEqual(['work_1', 'work_2', 'work_3', 'collect'], names)
        self.assertEqual([], self.ran())
        self.assertExit(0, self.world.cli('run', 1))
        self.assertEqual(['collect', 'work_1', 'work_2', 'work_3'], self.ran())

    def test_scripts_read_what_is_resumed_from_stdout(self):
        self.make()
        outcome = self.assertExit(1, self.world.cli('-f', 'json', 'run', '--resume', 'study.yaml'))
        value = json.loads(outcome.out.splitlines()[0])
        self.assertEqual((1, 'Resuming workflow 1'), (value['workflow_id'], value['message']))
        self.assertEqual(['it failed', 'it was canceled'], [job['reason'] for job in value['to_run']])

    def test_words_that_do_not_go_together(self):
        self.world.write('study.yaml', self.STUDY)
        self.assertExit(2, self.world.cli('run', '--dry-run', 'study.yaml'), '--dry-run goes with --resume')
        self.assertExit(2, self.world.cli('run', '--resume', 1), '--resume takes the workflow file')
        self.resume(4, 'there is no server and no database', flags=['--dry-run'])
        self.assertFalse(os.path.exists(self.world.path('torc_output')))

    def test_long_lists_are_cut(self):
        job = '{name: "j{i:04}", command: a, parameters: {i: "1:2000"}}'
        self.world.write('study.yaml', f'name: many\njobs: [{job}]\n')
        self.assertExit(0, self.world.cli('create', 'study.yaml'))
        self.edit('command: a', 'command: b')
        outcome = self.assertExit(0, self.world.cli('create', '--resume', 'study.yaml'),
                                  'jobs changed (command): 2000 (j0001, j0002,', 'and 1990 more)\n')
        self.assertLess(len(outcome.out), 600)


@slow
class InterruptTest(FlowTest):
    """A run that somebody stops."""

    def test_ctrl_c_stops_the_jobs_and_says_so(self):
        runner = self.start_long()
        runner.send(signal.SIGINT)
        outcome = runner.finish(30)
        self.assertExit(130, outcome)
        self.assertDead('pid_1', 'pid_2')
        self.assertFalse(set(self.statuses().values()) & {'running', 'pending', 'completed'}, self.statuses())

    def test_a_runner_that_is_told_to_end_ends_its_jobs(self):
        runner = self.start_long()
        runner.send(signal.SIGTERM)
        outcome = runner.finish(30)
        self.assertNotEqual(0, outcome.code, str(outcome))
        self.assertDead('pid_1', 'pid_2')
        self.assertFalse(set(self.statuses().values()) & {'running', 'pending', 'completed'}, self.statuses())

    def test_a_runner_that_is_killed_takes_its_jobs_along(self):
        runner = self.start_long()
        runner.kill()
        self.assertDead('pid_1', 'pid_2')
        self.assertEqual({}, self.world.leave())

    def test_cancel_from_another_terminal_ends_the_run(self):
        runner = self.start_long()
        self.assertExit(0, self.world.cli('--no-prompts', 'cancel', 1))
        outcome = runner.finish(30)
        self.assertExit(1, outcome)
        self.assertDead('pid_1', 'pid_2')
        self.assertEqual({'long_1': 'canceled', 'long_2': 'canceled'}, self.statuses())

    def test_status_answers_while_a_run_goes_on(self):
        runner = self.start_long()
        status = self.world.wait(lambda: self.running_status(), 20, 'the report of both starts', [runner])
        self.assertIn('2 running', status)
        self.assertEqual({'long_1': 'running', 'long_2': 'running'}, {
            job['name']: job['status'] for job in self.world.cli('-f', 'json', 'jobs', 'list', 1).json()['items']})
        self.assertFalse(runner.has_ended())

    def server_pid(self) -> int:
        """Pid of the embedded server; 0 while there is none."""
        found = torc.read_connection_file(self.world.path('torc_output', 'torc.db'))
        return found['pid'] if found else 0

    def test_a_server_that_a_runner_has_started_anew_is_not_taken_for_a_jobs_leftover(self):
        jobs = 'name: w\njobs:\n' + ''.join(
            '  - {name: %s, command: "until test -e %s; do sleep 0.02; done"}\n' % (name, name) for name in ('one', 'two'))
        runner = self.world.start('run', '-p', 0.2, '--claim-backoff-max-secs', 0.2, '--num-cpus', 2, self.world.write('spec.yaml', jobs))
        self.world.wait(lambda: os.path.exists(self.world.path('torc_output', 'job_stdio', 'job_wf1_j2_r1_a1.o')), 20, 'both jobs', [runner])
        first = self.server_pid()
        os.kill(first, signal.SIGKILL)
        self.world.wait(lambda: self.server_pid() not in (0, first), 20, 'a new server', [runner])
        second = self.server_pid()
        self.world.write('one', '')
        self.world.wait(lambda: 'completed' in self.statuses().values(), 20, 'the end of the first job', [runner])
        self.world.write('two', '')
        self.assertExit(0, runner.finish())
        log = read_text(self.world.path('torc_output', 'torc.db.log'))
        self.assertEqual(2, len(re.findall(r'INFO serving ', log)), log)
        self.assertNotEqual(first, second)

    def running_status(self) -> str:
        """What `status` says, once it knows of both jobs: a start is reported a moment after it."""
        outcome = self.assertExit(0, self.world.cli('status', 1))
        return outcome.out if re.search(r'running +2 ', outcome.out) else ''

    def test_a_second_runner_in_the_same_directory_joins_the_first_ones_server(self):
        jobs = 'name: both\njobs:\n  - {name: gate, command: "until test -e go; do sleep 0.05; done"}\n'
        jobs += '  - {name: "j{i}", command: "true", depends_on: [gate], parameters: {i: "1:20"}}\n'
        first = self.world.start('run', '-p', 0.5, self.world.write('spec.yaml', jobs))
        self.world.wait(lambda: os.path.exists(self.world.path('torc_output', 'job_stdio', 'job_wf1_j1_r1_a1.o')), 20, 'the gate', [first])
        second = self.world.start('run', '-p', 0.5, 1)
        self.world.wait(lambda: len(self.ask_json('compute-nodes', 'list', 1)['items']) == 2, 20, 'the second runner', [first, second])
        self.world.write('go', '')
        self.assertExit(0, first.finish())
        self.assertExit(0, second.finish())
        self.assertEqual({'completed'}, set(self.statuses().values()))
        self.assertEqual(21, len(self.results()))


@slow
class ServedTest(FlowTest):
    """A lasting server, and commands that find it."""

    def test_a_workflows_life_on_a_server(self):
        self.world.serve()
        spec = self.world.write('spec.yaml', 'name: life\njobs:\n  - {name: a, command: echo out; echo err >&2; exit 2}\n  - {name: b, command: "true"}\n')
        created = self.ask_json('create', spec)
        self.assertEqual(1, created['workflow_id'])
        elsewhere = os.path.join(self.world.root, 'home')
        self.assertExit(1, self.world.cli('run', 1, cwd=elsewhere))
        self.assertTrue(os.path.isdir(os.path.join(elsewhere, 'torc_output', 'job_stdio')))
        self.assertFalse(os.path.exists(self.world.path('torc_output', 'torc.db')))
        self.assertEqual(['a'], [job['name'] for job in self.ask_json('jobs', 'list', 1, '--status', 'failed')['items']])
        self.assertTrue(self.ask_json('workflows', 'is-complete', 1)['is_complete'])
        self.assertExit(0, self.world.cli('--no-prompts', 'delete', 1))
        self.assertEqual([], self.ask_json('workflows', 'list')['items'])
        self.assertExit(4, self.world.cli('status', 1))

    def test_a_job_calls_back_with_the_file_that_holds_the_token(self):
        self.world.serve()
        self.world.write('call.py', '''
            import http.client, os, urllib.parse
            url = urllib.parse.urlsplit(os.environ['TORC_API_URL'])
            connection = http.client.HTTPConnection(url.hostname, url.port)
            token = open(os.environ['TORC_TOKEN_FILE']).read().strip()
            path = url.path + '/workflows/' + os.environ['TORC_WORKFLOW_ID']
            connection.request('GET', path, headers={'Authorization': 'Bearer ' + token})
            answer = connection.getresponse()
            print(answer.status, answer.read().decode())
            ''')
        self.run_text(f'name: caller\njobs: [{{name: call, command: "{sys.executable} call.py"}}]\n')
        self.assertRegex(self.world.read('torc_output/job_stdio/job_wf1_j1_r1_a1.o'), r'^200 \{.*"name": ?"caller"')

    def test_a_loop_of_jobs_that_make_jobs_runs_to_its_end_each_time_anew(self):
        self.world.write('loop.py', f"""
            import os, sys
            sys.path.insert(0, {os.path.dirname(stub_path())!r})
            import torc
            client = torc.Client.connect()
            lineage = os.environ.get('TORC_ORCHESTRATOR_LINEAGE_ID', 'case')
            names = [item['name'] for item in client.list_user_data(workflow_id=int(os.environ['TORC_WORKFLOW_ID']))['items']]
            step = sum(name.startswith('__torc_lineage__case__g') for name in names)
            jobs = [{{'name': f'work_{{step}}', 'command': 'echo x >> worked'}},
                    {{'name': f'loop_{{step}}', 'command': sys.executable + ' loop.py', 'depends_on': [f'work_{{step}}']}}]
            answer = client.spawn_jobs({{'jobs': jobs if step < 3 else [], 'lineage': lineage, 'state': step}}, id=int(os.environ['TORC_JOB_ID']))
            assert answer['iteration'] == min(step + 1, 3), answer
            client.close()
            """)
        self.run_text(f'name: loop\njobs: [{{name: loop, command: "{sys.executable} loop.py"}}]\n')
        done = dict.fromkeys(['loop', 'work_0', 'loop_0', 'work_1', 'loop_1', 'work_2', 'loop_2'], 'completed')
        self.assertEqual(done, self.statuses())
        self.assertExit(0, self.world.main('workflows', 'init', 1, '--no-prompts'))
        self.assertEqual({'loop': 'ready'}, self.statuses())
        self.assertExit(0, self.world.cli('run', 1))
        self.assertEqual(done, self.statuses())
        self.assertEqual('x\n' * 6, self.world.read('worked'))

    def test_nothing_is_answered_without_the_token(self):
        url = self.world.serve()
        parts = urllib.parse.urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
        connection.request('GET', parts.path + '/workflows')
        self.assertEqual(401, connection.getresponse().status)
        connection.close()

    def test_an_unreachable_server_is_exit_3(self):
        with socket.socket() as listener:
            listener.bind(('127.0.0.1', 0))
            port = listener.getsockname()[1]
        outcome = self.world.cli('--url', f'http://127.0.0.1:{port}/torc-service/v1', 'status', 1)
        self.assertExit(3, outcome, str(port))

    def test_exec_runs_commands_without_a_spec(self):
        outcome = self.world.cli('-f', 'json', 'exec', '-c', 'echo {i} > got_{i}', '--param', 'i=1:12')
        self.assertExit(0, outcome)
        self.assertEqual(['1', '12'], [self.world.read(f'got_{number}').strip() for number in (1, 12)])
        self.assertExit(1, self.world.cli('exec', '-c', 'exit 4'))


class SecretsTest(FlowTest):
    """What must not be known is in one file, and nowhere else."""

    def artefacts(self) -> Dict[str, bytes]:
        """Everything that lies in the world or is told of its processes: place -> content."""
        found = {}
        for directory, _, names in os.walk(self.world.root):
            for path in (os.path.join(directory, name) for name in names):
                with contextlib.suppress(FileNotFoundError), open(path, 'rb') as file:
                    found[path] = file.read()
        for pid in processes_with(self.world.mark):
            for name in ('cmdline', 'environ'):
                with contextlib.suppress(OSError), open(f'/proc/{pid}/{name}', 'rb') as file:
                    found[f'/proc/{pid}/{name}'] = file.read()
        return found

    def test_the_token_is_in_its_file_and_nowhere_else_during_and_after_a_run(self):
        mask = os.umask(0)
        self.addCleanup(os.umask, mask)
        self.world.serve('--log-level', 'debug')
        os.umask(mask)
        state = os.path.join(self.world.environment['XDG_STATE_HOME'], 'torc')
        token = torc.read_token(os.path.join(state, 'torc.db.token')).encode()
        spec = self.world.write('w.yaml', '''
            name: nosy
            actions: [{trigger_type: on_workflow_start, action_type: run_commands, commands: [env > action_environment]}]
            jobs:
              - name: nosy
                command: "env; cat /proc/*/cmdline /proc/*/environ 2>/dev/null; touch there; while [ ! -e go ]; do sleep 0.05; done; exit 3"
            ''')
        runner = self.world.start('--log-level', 'debug', 'run', '-p', 0.2, spec)
        self.world.wait(lambda: os.path.exists(self.world.path('there')), 20, 'the job', [runner])
        during = self.artefacts()
        self.world.write('go', '')
        self.assertExit(1, runner.finish())
        self.assertExit(0, self.world.cli('--log-level', 'debug', '-f', 'json', 'jobs', 'list', 1))
        for found in (during, self.artefacts()):
            self.assertEqual([os.path.join(state, 'torc.db.token')], [place for place, content in found.items() if token in content])
        self.assertGreater(len([place for place in during if place.startswith('/proc/')]), 5)
        self.assertEqual({'0o700'}, {oct(os.stat(path).st_mode & 0o777) for path in (state,)})
        modes = {os.path.basename(path): oct(os.stat(path).st_mode & 0o777) for path in glob.glob(state + '/*') + glob.glob(state + '/servers/*')}
        self.assertEqual('0o700', modes.pop('servers'))
        self.assertEqual(({'0o600'}, 5), (set(modes.values()), len(modes)), modes)
        self.assertLessEqual({'torc.db', 'torc.db-wal', 'torc.db.token', 'torc.db.connection'}, set(modes))

    def test_a_password_reaches_neither_files_nor_jobs(self):
        self.world.serve('--auth-file', self.password_file(), '--log-level', 'debug')
        spec = self.world.write('w.yaml', 'name: w\njobs: [{name: a, command: "env; cat /proc/$$/environ /proc/$$/cmdline"}, {name: b, command: "exit 3"}]\n')
        outcome = self.world.cli('--log-level', 'debug', 'run', '-p', 0.2, spec, env={
            'TORC_API_URL': self.world.url, 'TORC_USERNAME': 'ann', 'TORC_PASSWORD': 'open-sesame', 'TORC_COOKIE_HEADER': 'gate=shibboleth'})
        self.assertExit(1, outcome)
        words = [b'open-sesame', b'shibboleth', base64.b64encode(b'ann:open-sesame')]
        found = dict(self.artefacts(), out=outcome.out.encode(), err=outcome.err.encode())
        self.assertEqual([], [place for place, content in found.items() if any(word in content for word in words)])

    def password_file(self) -> str:
        """Of one user."""
        return self.world.write('users', 'ann:' + torc.hash_password(b'open-sesame', 4) + '\n')

    def test_it_is_said_who_can_reach_the_server(self):
        for flags, text in (((), 'for this machine only'), (('--host', '0.0.0.0'), 'for everybody who reaches this machine and has a token or password')):
            self.world.serve('--db', 'x.db', *flags)
            self.assertIn(text, self.world.server.err)
            self.assertIn(f':{torc.parse_url(self.world.url).port}/', self.world.server.err)
            self.world.server.send(signal.SIGTERM)
            self.world.server.finish(10)


class WrongInputTest(FlowTest):
    """Wrong input: a clear error, exit 2, and no half-made workflow."""

    JOB = 'name: w\njobs:\n  - {name: a, command: "true"'
    CASES = (
        # file, content, what is said about it
        ('missing.yaml', None, ['missing.yaml']),
        ('empty.yaml', '', ['empty']),
        ('blank.json', ' \n', ['empty']),
        ('binary.yaml', bytes(range(256)), ['binary.yaml']),
        ('picture.json', b'\x89PNG\r\n\x1a\n\0\0\0\rIHDR', ['picture.json']),
        ('yaml.json', 'name: w\njobs: []\n', ['yaml.json', '1']),
        ('json.kdl', '{"name": "w"}', ['json.kdl']),
        ('list.yaml', '- 1\n- 2\n', ['list.yaml']),
        ('text.yaml', 'just words', ['text.yaml']),
        ('syntax.yaml', 'name: w\njobs: [\n', ['syntax.yaml']),
        ('twice.yaml', 'name: w\nname: v\njobs: []\n', ['2', 'name']),
        ('field.yaml', 'name: w\njobs:\n  - {name: a, comand: x}\n', ['3', 'comand', "did you mean 'command'?"]),
        ('type.yaml', 'name: w\njobs: 5\n', ['2', 'jobs']),
        ('nojobs.yaml', 'name: w\n', ['jobs']),
        ('noname.yaml', 'jobs: []\n', ['name']),
        ('unknown.yaml', JOB + ', depends_on: [nope]}\n', ['nope']),
        ('requirement.yaml', JOB + ', resource_requirements: big}\n', ['big']),
        ('self.yaml', JOB + ', depends_on: [a]}\n', ['a']),
        ('cycle.yaml', JOB + ', depends_on: [b]}\n  - {name: b, command: x, depends_on: [a]}\n', ['waits for itself', 'a -> b -> a']),
        ('filecycle.yaml', 'name: w\nfiles: [{name: f, path: f}, {name: g, path: g}]\njobs:\n  - {name: left, command: x, input_files: [f], output_files: [g]}\n'
         '  - {name: right, command: x, input_files: [g], output_files: [f]}\n', ['waits for itself', 'left -> right -> left']),
        ('producers.yaml', 'name: w\nfiles: [{name: f, path: f}]\njobs:\n  - {name: left, command: x, output_files: [f]}\n'
         '  - {name: right, command: x, output_files: [f]}\n', ['left', 'right']),
        ('cpus.yaml', 'name: w\nresource_requirements: [{name: r, num_cpus: 0, memory: 1g}]\njobs: []\n', ['num_cpus']),
        ('memory.yaml', 'name: w\nresource_requirements: [{name: r, num_cpus: 1, memory: 1.5x}]\njobs: []\n', ['1.5x', '512m']),
        ('runtime.yaml', 'name: w\nresource_requirements: [{name: r, num_cpus: 1, memory: 1g, runtime: 120}]\njobs: []\n', ['120', '120m']),
        ('million.yaml', 'name: w\njobs: [{name: "a{i}", command: x, parameters: {i: "1:2000000"}}]\n', ['2,000,000', '--max-instances']),
        ('control.json', '{"name": "w", "jobs": [{"name": "a\\u0007b", "command": "x"}]}', ['\\x07']),
        ('long.json', json.dumps({'name': 'w', 'jobs': [{'name': 'n' * 100000, 'command': 'x'}]}), ['1,000']),
        ('nan.yaml', JOB + ', priority: .nan}\n', ['priority']),
        ('huge.yaml', JOB + ', priority: 99999999999999999999}\n', ['priority']),
        ('negative.yaml', JOB + ', priority: -1}\n', ['priority']),
        ('surrogate.json', '{"name": "w", "jobs": [{"name": "a\\ud800", "command": "x"}]}', ['surrogate.json']),
        ('deep.json', '[' * 100000, ['deep']),
        ('deep.yaml', 'name: w\njobs: ' + '[' * 100000, ['deep']),
        ('bomb.yaml', 'a: &a [x, x, x, x, x, x, x, x, x]\n' + ''.join(
            f'{chr(98 + number)}: &{chr(98 + number)} [{", ".join("*" + chr(97 + number) for _ in range(9))}]\n' for number in range(20)), ['bomb.yaml']),
        ('token.yaml', 'name: w\njobs: [{name: a, command: "cat ${files.input.nope}"}]\n', ['nope']),
        ('duplicate.yaml', JOB + '}\n  - {name: a, command: x}\n', ["'a'"]),
    )

    def test_each_is_told_with_its_place_and_leaves_nothing(self):
        for name, content, texts in self.CASES:
            with self.subTest(name):
                path = self.world.path(name) if content is None else self.world.write(name, content)
                outcome = self.world.main('create', path)
                self.assertExit(2, outcome, *texts)
                self.assertEqual('', outcome.out)
                self.assertLess(len(outcome.err), 20000)
        self.assertFalse(os.path.exists(self.world.path('torc_output')))

    def test_a_directory_is_no_spec(self):
        os.mkdir(self.world.path('folder.yaml'))
        self.assertExit(2, self.world.main('run', self.world.path('folder.yaml')), 'folder.yaml')

    def test_all_that_is_wrong_is_told_at_once_with_line_and_column(self):
        path = self.world.write('spec.yaml', '''\
            name: w
            jobs:
              - {name: a, comand: x}
              - {name: b, command: x, depends_on: [zzz]}
              - {name: b, command: x, priority: high}
            ''')
        outcome = self.assertExit(2, self.world.main('create', '--dry-run', path), 'comand', 'zzz', 'priority', 'spec.yaml:3:', 'spec.yaml:4:', 'spec.yaml:5:')
        self.assertFalse(os.path.exists(self.world.path('torc_output')), str(outcome))
        answer = self.world.main('-f', 'json', 'create', '--dry-run', path)
        self.assertEqual(2, answer.code)
        self.assertFalse(answer.json()['valid'])
        self.assertGreaterEqual(len(answer.json()['errors']), 3)

    def test_usage_errors_are_exit_2(self):
        for argv in (['no-such-command'], ['run'], ['jobs', 'list', 'one'], ['run', '--num-cpus', 'many', '1'], ['-f', 'xml', 'status'], ['run', '-p', '-1', '1']):
            self.assertExit(2, self.world.main(*argv))

    def test_unknown_ids_are_exit_4(self):
        for argv in (['run', 99], ['status', 99], ['jobs', 'get', 99], ['--no-prompts', 'cancel', 99], ['workflows', 'init', 99]):
            outcome = self.assertExit(4, self.world.main(*argv))
            self.assertIn('99', outcome.err)

    def test_standard_input_may_hold_a_spec(self):
        self.assertExit(0, self.world.cli('run', '-', stdin='name: piped\njobs: [{name: a, command: touch ran}]\n'))
        self.assertTrue(os.path.exists(self.world.path('ran')))
        self.assertExit(2, self.world.cli('run', '-', stdin=''))


# -------- the recorded specs --------

@slow
class RecordedSpecTest(FlowTest):
    """Every recorded spec that needs no Slurm runs to its end; what it creates is what Torc stored."""

    LABELS = {'labeled_jobs.yaml': 'windows,gpu'}      # what the second runner has
    KDL_LOSSES = {'hyperparameter_sweep.kdl', 'sample_workflow.kdl', 'workflow_actions_simple.kdl', 'zip_parameter_mode.kdl'}
    ABSOLUTE = re.compile(r'''(?<![\w./}])/(workspace|results|models|data|scripts|Users)\b''')     # paths that this machine has not

    def setUp(self) -> None:
        super().setUp()
        self.folder = os.path.dirname(shared('specs/README.md'))
        self.names = [name for name in sorted(os.listdir(self.folder)) if name.endswith(('.yaml', '.json', '.json5', '.kdl')) and not
                      name.endswith(('.expected.json', '.torc.json'))]

    def stored(self, name: str) -> Any:
        """What Torc stored."""
        return read_shared(f'specs/{name}.torc.json')

    def local_names(self) -> List[str]:
        """Specs that need no Slurm, and are not refused."""
        found = []
        for name in self.names:
            stored = self.stored(name)
            if not stored.get('refused') and all(action['action_type'] == 'run_commands' for action in stored['actions']):
                found.append(name)
        return found

    def test_all_of_them_run_to_their_end(self):
        names = self.local_names()
        self.assertGreaterEqual(len(names), 30)
        bin_directory = self.make_programs()
        self.world.environment['PATH'] = bin_directory + os.pathsep + self.world.environment['PATH']
        self.world.serve()
        waiting, running = list(names), collections.OrderedDict()
        while waiting or running:
            while waiting and len(running) < 2:
                name = waiting.pop(0)
                running[name] = self.start_spec(name)
            self.world.wait(lambda: any(all(runner.has_ended() for runner in runners) for runners in running.values()), 60, ', '.join(running))
            for name in [name for name, runners in running.items() if all(runner.has_ended() for runner in runners)]:
                for runner in running.pop(name):
                    self.assertEqual(0, runner.finish().code, f'{name}: {runner}')
        listed = self.ask_json('workflows', 'list')['items']
        self.assertEqual(len(names), len(listed))
        for workflow in listed:
            counts = collections.Counter(self.statuses(workflow['id']).values())
            self.assertEqual(['completed'], list(counts), workflow['name'])

    def test_what_is_created_from_them_is_what_torc_stored(self):
        for name in self.names:
            with self.subTest(name):
                wanted = self.stored(name)
                outcome = self.world.main('-f', 'json', 'create', os.path.join(self.folder, name))
                if wanted.get('refused'):
                    self.assertExit(2, outcome)
                    continue
                self.assertExit(0, outcome)
                client = self.world.connect()
                try:
                    found = stored_shape(client, outcome.json()['workflow_id'])
                finally:
                    client.close()
                self.check_stored(wanted, self.without_what_is_better(name, wanted, found))

    def without_what_is_better(self, name: str, wanted: Any, found: Any) -> Any:
        """What was created, less what Torc loses: nodes of a KDL file; the mode direct where our default is another."""
        if name in self.KDL_LOSSES:
            recorded = {job['name']: job for job in wanted['jobs']}
            for job in found['jobs']:
                for key in ('depends_on', 'input_files', 'output_files'):
                    if job.get(key) and key not in recorded[job['name']]:
                        del job[key]
        if found['workflow'].get('execution_config') == {'mode': 'direct'}:
            del found['workflow']['execution_config']
        return found

    def check_stored(self, wanted: Any, found: Any) -> None:
        """The created workflow has all that was recorded; where only a sample was recorded, that."""
        self.assertEqual(wanted['job_count'], len(found['jobs']))
        for key, value in wanted.items():
            if key.endswith('_sample'):
                sample = {item['name']: item for item in found[key[:-7]]}
                self.assertEqual(value, [sample[item['name']] for item in value], key)
            elif key == 'job_names_sha256':
                names = '\n'.join(sorted(job['name'] for job in found['jobs']))
                self.assertEqual(value, hashlib.sha256(names.encode()).hexdigest())
            elif key == 'files_count':
                self.assertEqual(value, len(found['files']))
            elif key in found:
                self.assertEqual(value, found[key], key)

    def start_spec(self, name: str) -> List[Background]:
        """Run one spec in a directory of its own, on a node that is large enough for it."""
        with open(os.path.join(self.folder, name), encoding='utf-8') as file:
            text = self.ABSOLUTE.sub(r'top/\1', file.read())
        folder = self.world.path('specs', name)
        shutil.copytree(os.path.join(self.folder, 'examples'), os.path.join(folder, 'examples'))
        with open(os.path.join(folder, name), 'w', encoding='utf-8') as file:
            file.write(text)
        self.make_scripts(folder, name)
        size = ('-p', 0.2, '--num-cpus', 128, '--memory-gb', 1024, '--num-gpus', 8)
        if name not in self.LABELS:
            return [self.world.start('run', *size, name, cwd=folder)]
        created = self.world.cli('-f', 'json', 'create', name, cwd=folder).json()['workflow_id']
        return [self.world.start('run', *size, *flags, created, cwd=folder) for flags in (('--persistent',), ('--label', self.LABELS[name], '--persistent'))]

    def make_programs(self) -> str:
        """Programs that specs call and this machine may lack, and a sleep that takes no time."""
        folder = os.path.join(self.world.root, 'bin')
        os.mkdir(folder)
        texts = {'sleep': '#!/bin/sh\nexit 0\n', 'wget': '#!/bin/sh\nfor last; do :; done\n: > "$last"\n'}
        texts.update((name, f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n') for name in ('python', 'python3'))
        for name, text in texts.items():
            path = os.path.join(folder, name)
            with open(path, 'w') as file:
                file.write(text)
            os.chmod(path, 0o755)
        return folder

    def make_scripts(self, folder: str, name: str) -> None:
        """Stubs for the scripts that a spec's commands call: each makes the declared outputs of the job that calls it. And the inputs."""
        with open(os.path.join(folder, name), 'rb') as file:
            body = torc.read_plan(torc.read_document(file.read(), name), folder).body
        jobs = [torc.PlannedJob(*job) for job in body['jobs']]
        paths = [item['path'] for item in body['files']]
        made = {index for job in jobs for index in job.output_files}
        for job in jobs:
            self.write_in(folder, f'stubs/{job.name}', ''.join(paths[index] + '\n' for index in job.output_files))
            scripts = re.findall(r'[\w./-]+\.(?:sh|py)\b', f'{job.command} {job.invocation_script or ""}')
            # sample_workflow.kdl has \\n for a line break: its invocation script turns the command into a comment
            does_nothing = not scripts or (job.invocation_script or '').startswith('#!/bin/bash\\n')
            for path in [paths[index] for index in job.output_files] if does_nothing else ():
                self.write_in(folder, path, 'an output that its job only speaks of')
            for script in scripts:
                self.write_in(folder, script, PYTHON_STUB if script.endswith('.py') else WRAPPER_STUB if script == 'scripts/conda_setup.sh' else SHELL_STUB)
        for index in {index for job in jobs for index in job.input_files} - made:
            self.write_in(folder, paths[index], 'input')
        rules = [rule for handler in body['failure_handlers'] for rule in json.loads(handler['rules'])]
        for script in {rule['recovery_script'] for rule in rules if rule.get('recovery_script')}:
            self.write_in(folder, script, '#!/bin/sh\nexit 0\n')

    @staticmethod
    def write_in(folder: str, name: str, text: str) -> None:
        """Write a file unless it is there."""
        assert not os.path.isabs(name), name
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if not os.path.exists(path):
            with open(path, 'w') as file:
                file.write(text)
            os.chmod(path, 0o755)


def stored_shape(client: Any, workflow_id: int) -> Dict[str, Any]:
    """A workflow as the list operations tell it, in the shape of the recorded ones: names in place of ids, nothing that says nothing."""
    def items(op: str, **params: Any) -> List[Dict[str, Any]]:
        return list(client.pages(op, **dict({'workflow_id': workflow_id}, **params)))

    kinds = {'files': 'list_files', 'user_data': 'list_user_data', 'resource_requirements': 'list_resource_requirements',
             'slurm_schedulers': 'list_slurm_schedulers'}
    found = {kind: items(op) for kind, op in kinds.items()}
    found['jobs'] = items('list_jobs', include_relationships=True)
    found['failure_handlers'] = list(client.pages('list_failure_handlers', id=workflow_id))
    names = {kind: {item['id']: item['name'] for item in rows} for kind, rows in found.items()}
    relations = (('depends_on', 'depends_on_job_ids', 'jobs'), ('input_files', 'input_file_ids', 'files'), ('output_files', 'output_file_ids', 'files'),
                 ('input_user_data', 'input_user_data_ids', 'user_data'), ('output_user_data', 'output_user_data_ids', 'user_data'),
                 ('resource_requirements', 'resource_requirements_id', 'resource_requirements'), ('scheduler', 'scheduler_id', 'slurm_schedulers'),
                 ('failure_handler', 'failure_handler_id', 'failure_handlers'))
    for job in found['jobs']:
        for name, key, kind in relations:
            value = job.pop(key, None)
            job[name] = sorted(names[kind][number] for number in value) if isinstance(value, list) else names[kind].get(value)
    for handler in found['failure_handlers']:
        handler['rules'] = json.dumps(json.loads(handler['rules']), separators=(',', ':'))
    drop = {'id', 'workflow_id', 'status', 'attempt_id', 'st_mtime', 'run_id', 'timestamp', 'user',
            'submission_directory', 'spec_path', 'is_canceled', 'is_archived'}
    said = {kind: sorted(({key: value for key, value in item.items() if key not in drop and value not in (None, [], '')} for item in rows),
                         key=lambda item: item['name']) for kind, rows in found.items()}
    workflow = client.get_workflow(id=workflow_id)
    said['workflow'] = {key: value for key, value in workflow.items() if key not in drop and value is not None}
    said['actions'] = [action_shape(action, names) for action in client.get_workflow_actions(id=workflow_id)]
    return said


def action_shape(action: Dict[str, Any], names: Dict[str, Dict[int, str]]) -> Dict[str, Any]:
    """An action as it is recorded."""
    config = dict(action['action_config'])
    if config.get('scheduler_id'):
        config['scheduler'] = names['slurm_schedulers'][config.pop('scheduler_id')]
    said = {key: action[key] for key in ('action_type', 'trigger_type', 'persistent', 'is_recovery')}
    return dict(said, action_config=config, jobs=sorted(names['jobs'][number] for number in action.get('job_ids') or []))


SHELL_STUB = r'''#!/bin/bash
# makes the outputs of the job that calls it; where there may be a retry, the first attempt fails
case "$0" in *failure_demo_job.sh) test "$TORC_ATTEMPT_ID" -gt 1 || exit 10 ;; esac
while IFS= read -r path; do mkdir -p "$(dirname "$path")"; : > "$path"; done < "stubs/$TORC_JOB_NAME"
'''
PYTHON_STUB = r'''# makes the outputs of the job that calls it
import os
for path in open('stubs/' + os.environ['TORC_JOB_NAME']).read().splitlines():
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    open(path, 'w').close()
'''
WRAPPER_STUB = 'exec "$@"\n'


@slow
class SurroundingsTest(FlowTest):
    """What is around the program may be as bad as it likes."""
    ONE = 'name: one\njobs: [{name: a, command: echo hello}]\n'

    def shell(self, line: str) -> Outcome:
        """A line of sh, in which $TORC is the program."""
        environment = dict(self.world.environment, TORC=f'{shlex.quote(sys.executable)} {shlex.quote(TORC)}')
        done = subprocess.run(['sh', '-c', line.replace('$TORC', environment['TORC'])], cwd=self.world.directory, env=environment,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding='utf-8', timeout=60)
        return Outcome(done.returncode, done.stdout, done.stderr)

    def test_an_output_directory_that_cannot_be_used_is_told_before_anything_is_created(self):
        spec = self.world.write('spec.yaml', self.ONE)
        self.world.write('file', '')
        for words in (('run', '-o', 'file', spec), ('run', '-o', '/dev/null/x', spec), ('exec', '-o', 'file', '-c', 'true')):
            self.assertExit(2, self.world.main(*words), 'cannot write to the output directory', '--output-dir')
        self.assertFalse(os.path.exists(self.world.path('torc_output', 'torc.db')))

    def test_a_file_of_its_own_that_cannot_be_made_is_told_with_the_option_that_names_another_place(self):
        spec = self.world.write('spec.yaml', self.ONE)
        self.world.write('file', '')
        runner_log = f'out/job_runner_{socket.gethostname()}_wf1_r1.log'
        for directory in ('directory', runner_log, 'logs/torc-server.log', 'torc.db.token'):
            os.makedirs(self.world.path(directory))
        table = (       # /proc takes no file, whoever asks; what a runner has created before stays
            (2, ('serve', '-p', 0, '--db', '/proc/x.db'),
             'cannot write /proc/x.db.lease: No such file or directory; give another place with --db'),
            (2, ('--db', '/proc/x.db', 'create', spec), 'cannot write /proc/x.db.lease'),
            (2, ('--db', '/proc/x.db', 'run', spec), 'cannot write /proc/x.db.lease'),
            (3, ('serve', '-p', 0, '--db', '/proc/x.db', '--daemon'),
             'the log /proc/x.db.log: No such file or directory; give another place with --log-dir or --db'),
            (2, ('serve', '-p', 0, '--db', 'directory'), 'not a regular file; give another place with --db'),
            (2, ('--db', 'file/x.db', 'create', spec), 'cannot make the directory'),
            (2, ('serve', '-p', 0, '--db', 'a.db', '--log-dir', 'logs'),
             'torc-server.log: Is a directory; give another place with --log-dir'),
            (2, ('serve', '-p', 0, '--db', 'a.db', '--pid-file', 'directory'),
             'directory: Is a directory; give another place with --pid-file'),
            (4, ('serve', '-p', 0, '--db', 'torc.db'), 'torc.db.token is not a private file of yours'),
            (2, ('run', '-o', 'out', spec), '_r1.log: Is a directory; give another place with --output-dir'))
        for code, words, text in table:
            with self.subTest(words):
                self.assertExit(code, self.world.cli(*words), text)
        path = self.world.path('file', 'token')
        self.assertRaisesRegex(torc.Denied, 'there is no token file', torc.read_token, path)

    def test_no_device_nor_pipe_is_replaced_by_a_file(self):
        path, said = self.world.path('pipe'), []
        os.mkfifo(path)
        # With root's rights a file could be put in the place of /dev/null.
        self.assertRaisesRegex(OSError, 'Is not a regular file', torc.write_atomically, path, b'1')
        self.assertExit(2, self.world.cli('serve', '-p', 0, '--db', 'a.db', '--pid-file', path),
                        'Is not a regular file; give another place with --pid-file')
        store = torc.Store(self.world.path('torc.db'))
        self.addCleanup(store.close)
        with self.assertLogs('torc', 'ERROR') as logged:
            torc.keep_snapshot(store, torc.ServerOptions(store.path, snapshot=path), said.append)
        self.assertEqual(('could not be copied' in logged.output[0], []), (True, said))
        self.assertTrue(stat.S_ISFIFO(os.stat(path).st_mode))

    def test_streams_that_are_closed_or_full_stop_no_run(self):
        self.world.write('spec.yaml', self.ONE)
        for line, code in (('$TORC run spec.yaml >&-', 0), ('$TORC run spec.yaml 2>&-', 0), ('$TORC run spec.yaml 2>/dev/full', 0),
                           ('$TORC status 1 >&-', 0), ('$TORC status 99 2>&-', 4), ('$TORC run nosuch.yaml 2>/dev/full', 2),
                           ('$TORC status 1 >/dev/full', 2), ('$TORC status 99 >/dev/full 2>&1', 4),
                           ('$TORC exec >/dev/full 2>/dev/full', 2), ('$TORC create --dry-run - <&-', 2)):
            with self.subTest(line):
                self.assertExit(code, self.shell(line))
        self.assertEqual({'a': 'completed'}, self.statuses(3))

    def test_own_files_are_private_and_usable_under_any_umask(self):
        self.world.write('spec.yaml', self.ONE)
        for mask in ('000', '277', '777'):
            self.assertExit(0, self.shell(f'umask {mask}; $TORC --db m{mask}/x.db create spec.yaml'))
            found = {name: oct(os.stat(self.world.path('m' + mask, name)).st_mode & 0o777) for name in ('', 'x.db')}
            self.assertEqual({'': '0o700', 'x.db': '0o600'}, found)
            self.assertExit(0, self.world.main('--db', f'm{mask}/x.db', 'status', 1))

    def test_text_is_utf_8_whatever_the_locale(self):
        spec = self.world.write('spec.yaml', 'name: one\njobs: [{name: caf\u00e9, command: "echo \u00fc > out"}]\n')
        self.assertExit(0, self.world.cli('run', spec, env={'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'}))
        self.assertEqual('\u00fc\n', self.world.read('out'))
        self.assertExit(0, self.world.cli('logs', 1, 'caf\u00e9', env={'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'}))

    def test_words_that_are_no_text_are_refused(self):
        self.run_text(self.ONE)
        self.assertExit(2, self.shell("$TORC logs 1 \"$(printf '\\377')\""))
        self.assertExit(2, self.world.main('run', 2 ** 63), 'is not an id')
        self.assertExit(2, self.world.main('create', '/dev/zero'), 'no workflow file')

    def test_it_is_said_why_no_job_is_taken(self):
        outcome = self.run_text('''
            name: large
            compute_node_wait_for_new_jobs_seconds: 1
            resource_requirements:
              - {name: big, num_cpus: 64, memory: 1m}
              - {name: long, num_cpus: 1, memory: 1m, runtime: PT5H}
            jobs:
              - {name: a, command: "true", resource_requirements: big}
              - {name: b, command: "true", resource_requirements: long}
            ''', '-p', 1, '--num-cpus', 1, '--time-limit', '1h', code=1)
        for start in ('jobs such as a cannot run here: they need 64 CPUs, and this runner has 1 (--num-cpus)',
                      'jobs such as b cannot run here: they need a runtime of PT5H, and this runner has PT'):
            self.assertEqual(1, outcome.err.count(start), outcome.err)
        self.assertIn('  ready: a, b\nOutput: ', outcome.err)
        self.assertIn('To go on, where the rest can run: torc.py run 1\n', outcome.err)

    def test_a_job_set_back_in_its_run_runs_again_and_ends(self):
        self.run_text('name: w\njobs: [{name: a, command: "true"}, {name: b, command: exit 1}]\n', code=1)
        self.assertExit(0, self.world.main('jobs', 'reset-status', 1, 2, '--no-prompts'))
        self.assertExit(1, self.world.cli('run', 1))
        self.assertEqual([('a', 1, 1, 0, 'completed'), ('a', 1, 2, 0, 'completed'), ('b', 1, 1, 1, 'failed'), ('b', 1, 2, 1, 'failed')], self.results(1))

    def test_a_database_that_is_removed_under_its_server_ends_it_loudly(self):
        self.world.serve()
        spec = self.world.write('spec.yaml', self.ONE)
        self.assertExit(0, self.world.main('create', spec))
        database = os.path.join(self.world.environment['XDG_STATE_HOME'], 'torc', 'torc.db')
        os.unlink(database)
        url = {'TORC_API_URL': self.world.url, 'TORC_TOKEN_FILE': database + '.token'}
        self.assertExit(3, self.world.main('create', spec, env=url))
        self.assertExit(4, self.world.server.finish(), 'was removed or replaced')


# ======== Faults: programs killed in the middle of their work ========
#
# Every job makes a file that must not exist yet (O_EXCL), named by its run and attempt: a job that runs twice for one
# attempt fails, and is seen. `python3 test_torc.py faults` does the same with more jobs and more kills, at moments that
# its seed decides; the seed is printed.

LEDGER_SPEC = '''
name: ledger
jobs:
  - {{name: gate, command: "until test -e go; do sleep 0.02; done"}}
  - name: entry_{{i}}
    command: |
      set -C; sleep 0.01; : > "ledger/${{TORC_JOB_ID}}_${{TORC_RUN_ID}}_${{TORC_ATTEMPT_ID}}"
    depends_on: [gate]
    parameters: {{i: "1:{count}"}}
'''


class Ledger:
    """A workflow whose jobs leave a trace each, in a world."""

    def __init__(self, world: World, count: int) -> None:
        self.world, self.count = world, count
        os.mkdir(world.path('ledger'))
        self.spec = world.write('ledger.yaml', LEDGER_SPEC.format(count=count))

    def done(self) -> int:
        """How many jobs have left their trace."""
        return len(os.listdir(self.world.path('ledger')))

    def open_gate(self) -> None:
        """Let the jobs begin."""
        self.world.write('go', '')

    def kill_servers(self, kills: int, chance: random.Random, kill: Callable[[], None], runners: Sequence[Background]) -> None:
        """Kill the server at moments spread over the run."""
        for number in range(kills):
            low, high = (self.count * part // (kills + 1) for part in (number + 0.3, number + 0.9))
            moment = chance.randint(int(low) + 1, int(high) + 1)
            self.world.wait(lambda: self.done() >= moment, 120, f'{moment} jobs', runners, self.done)
            kill()

    def check(self, database: str, **how: Any) -> None:
        """All jobs completed, each once per attempt; the database is whole."""
        client = self.world.connect(**how)
        try:
            statuses = collections.Counter(job['status'] for job in client.pages('list_jobs', workflow_id=1))
            results = list(client.pages('list_results', workflow_id=1, all_runs=True))
        finally:
            client.close()
        assert statuses == {'completed': self.count + 1}, statuses
        keys = collections.Counter((row['job_id'], row['run_id'], row['attempt_id']) for row in results)
        assert set(keys.values()) == {1}, [key for key, times in keys.items() if times > 1]
        assert {(row['return_code'], row['status']) for row in results} == {(0, 'completed')}, [row for row in results if row['return_code']]
        assert len(results) == self.count + 1 == self.done() + 1, (len(results), self.done())
        for process in self.world.started:
            if not process.has_ended():
                process.send(signal.SIGTERM)
                process.finish(20)
        self.world.leave()
        assert ask_sqlite(database, 'PRAGMA integrity_check') == [('ok',)]
        assert ask_sqlite(database, 'PRAGMA foreign_key_check') == []


def ask_sqlite(path: str, statement: str) -> List[Tuple[Any, ...]]:
    """Rows of a database that nobody has open."""
    connection = sqlite3.connect(path)
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


def kill_lasting_server(world: World, count: int, kills: int, seed: int) -> None:
    """`serve` is killed and started again on its database and port; two runners go on."""
    url = world.serve()
    port = urllib.parse.urlsplit(url).port
    ledger = Ledger(world, count)
    first = world.start('run', '-p', '0.5', ledger.spec)
    world.wait(lambda: os.path.exists(world.path('torc_output', 'job_stdio', 'job_wf1_j1_r1_a1.o')), 20, 'the gate', [first])
    runners = [first, start_second(world)]

    def kill() -> None:
        world.server.kill()
        world.serve('--port', port)

    ledger.open_gate()
    ledger.kill_servers(kills, random.Random(seed), kill, runners)
    for runner in runners:
        outcome = runner.finish(180)
        assert outcome.code == 0, str(outcome)
    ledger.check(os.path.join(world.root, 'home', 'state', 'torc', 'torc.db'))


def start_second(world: World) -> Background:
    """A second runner of the same workflow, at work."""
    second = world.start('run', '-p', '0.1', 1)

    def is_there() -> bool:
        client = world.connect()
        try:
            return len(client.list_compute_nodes(workflow_id=1)['items']) == 2
        finally:
            client.close()
    world.wait(is_there, 20, 'the second runner', [second])
    return second


def kill_embedded_server(world: World, count: int, kills: int, seed: int) -> None:
    """The embedded server is killed; the runner starts another and goes on."""
    ledger = Ledger(world, count)
    runner = world.start('run', '-p', '0.5', ledger.spec)
    connection = world.path('torc_output', 'torc.db.connection')
    world.wait(lambda: os.path.exists(world.path('torc_output', 'job_stdio', 'job_wf1_j1_r1_a1.o')), 20, 'the gate', [runner])
    killed = set()

    def kill() -> None:
        pid = world.wait(lambda: living_server(connection, killed), 20, 'a new server', [runner], lambda: read_text(connection))
        killed.add(pid)
        os.kill(pid, signal.SIGKILL)

    ledger.open_gate()
    ledger.kill_servers(kills, random.Random(seed), kill, [runner])
    outcome = runner.finish(180)
    assert outcome.code == 0, str(outcome)
    assert len(killed) == kills
    ledger.check(world.path('torc_output', 'torc.db'))


def living_server(connection: str, killed: Set[int]) -> int:
    """Pid that a connection file names, 0 if it is one of those that were killed."""
    try:
        pid = json.loads(read_text(connection) or '{}').get('pid', 0)
    except ValueError:      # it is being written
        return 0
    return 0 if pid in killed or not torc.read_process_start_ticks(pid) else pid


def share_jobs(world: World, count: int) -> None:
    """Two runners on one server share the jobs, none of which runs twice."""
    world.serve()
    ledger = Ledger(world, count)
    first = world.start('run', '-p', '0.5', ledger.spec)
    world.wait(lambda: os.path.exists(world.path('torc_output', 'job_stdio', 'job_wf1_j1_r1_a1.o')), 20, 'the gate', [first])
    runners = [first, start_second(world)]
    ledger.open_gate()
    for runner in runners:
        outcome = runner.finish(180)
        assert outcome.code == 0, str(outcome)
    client = world.connect()
    shares = collections.Counter(row['compute_node_id'] for row in client.pages('list_results', workflow_id=1))
    client.close()
    assert len(shares) == 2 and min(shares.values()) >= count // 20, shares
    ledger.check(os.path.join(world.root, 'home', 'state', 'torc', 'torc.db'))


# -------- a server that is killed again and again, under clients that retry --------

class Nursery:
    """A process that has loaded torc.py and forks servers from itself, so that a killed one is back within milliseconds."""

    CODE = ('import os, sys; sys.path.insert(0, sys.argv[1]); import torc\n'
            'for line in iter(sys.stdin.readline, ""):\n'
            '    pid = os.fork()\n'
            '    if pid == 0:\n'
            '        os._exit(torc.main(line.split()))\n'
            '    os.write(1, b"child %d\\n" % pid)\n'      # one write each: the server writes there, too
            '    os.write(1, b"over %d\\n" % os.waitpid(pid, 0)[1])\n')

    def __init__(self, world: World, *flags: Any) -> None:
        self.flags, self.pid = ['serve', '--db', 'torc.db', *map(str, flags)], 0
        self.log = open(os.path.join(world.root, 'logs', 'nursery'), 'wb')
        self.process = subprocess.Popen([sys.executable, '-B', '-c', self.CODE, os.path.dirname(stub_path())], cwd=world.directory, env=world.environment,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log)

    def start(self, port: int = 0) -> None:
        """Fork a server; wait_for('TORC_SERVER_PORT=') tells when it answers."""
        self.process.stdin.write(' '.join(self.flags + ['--port', str(port)]).encode() + b'\n')
        self.process.stdin.flush()
        self.pid = int(self.wait_for('child '))

    def wait_for(self, word: str) -> str:
        """The rest of the next line that begins with a word."""
        for line in iter(self.process.stdout.readline, b''):
            if line.startswith(word.encode()):
                return line[len(word):].decode().strip()
        raise AssertionError(f'the nursery has ended:\n{read_text(self.log.name)}')

    def end(self, number: int) -> None:
        """End the server by a signal."""
        os.kill(self.pid, number)
        self.wait_for('over ')

    def close(self) -> None:
        """End all of it."""
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()
        self.log.close()


class Book:
    """What the clients of a killed server were told, and what they said: the oracle. Shared by threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.claimed = {}       # type: Dict[int, str]  # job id -> who was told that it is his
        self.said = {}          # type: Dict[Tuple[int, int], int]  # (job id, attempt) -> return code of the completion that was sent
        self.told = {}          # type: Dict[Tuple[int, int], int]  # ... and acknowledged
        self.names = set()      # type: Set[str]  # of jobs whose completion was sent
        self.retries = 0
        self.wrong = []         # type: List[str]

    def claim(self, who: str, jobs: Iterable[Dict[str, Any]]) -> None:
        """These jobs were given to a client."""
        with self.lock:
            for job in jobs:
                if job['id'] in self.claimed:
                    self.wrong.append(f'job {job["id"]} was given to {self.claimed[job["id"]]} and to {who}')
                first = job['name'].replace('second', 'first')
                if first != job['name'] and first not in self.names:
                    self.wrong.append(f'{job["name"]} was given to {who} before {first} had ended')
                self.claimed[job['id']] = who

    def say(self, job: Dict[str, Any], return_code: int) -> None:
        """A completion is about to be sent."""
        with self.lock:
            self.said[job['id'], job['attempt_id']] = return_code
            self.names.add(job['name'])

    def tell(self, job: Dict[str, Any]) -> None:
        """It was acknowledged."""
        with self.lock:
            self.told[job['id'], job['attempt_id']] = self.said[job['id'], job['attempt_id']]


class Clerk(threading.Thread):
    """A client that claims, starts and completes jobs without running them, by one of three ways, and retries as real ones do."""

    def __init__(self, url: str, token_file: str, workflow_id: int, way: str, number: int, book: Book, seed: int) -> None:
        super().__init__(name=f'{way} {number}', daemon=True)
        self.client = torc.Client(url=url, token_file=token_file)
        self.workflow_id, self.way, self.book, self.chance = workflow_id, way, book, random.Random(f'{seed} {way} {number}')
        self.is_leaving = threading.Event()
        self.failure = ''

    def run(self) -> None:
        try:
            self.node_id = self.register()
            while not self.is_leaving.is_set():
                getattr(self, f'work_by_{self.way}')()
        except Exception:   # whatever it is, the main thread must hear of it
            self.failure = f'{self.name}: {traceback.format_exc()}'
        finally:
            self.client.close()

    def insist(self, op: str, body: Any = None, **params: Any) -> Any:
        """An operation, until it is answered."""
        while True:
            try:
                return self.client.call(op, body, 20, **params)
            except torc.Unreachable:
                with self.book.lock:
                    self.book.retries += 1

    def register(self) -> int:
        """Become a compute node."""
        return self.insist('create_compute_node', {
            'workflow_id': self.workflow_id, 'hostname': 'clerk', 'pid': os.getpid(), 'start_time': '2026-11-21T12:00:00.000Z', 'num_cpus': 64, 'memory_gb': 64.0,
            'num_gpus': 0, 'num_nodes': 1, 'compute_node_type': 'local', 'is_active': True})['id']

    def claim(self) -> List[Dict[str, Any]]:
        """Some jobs. When none is left, those that an unheard answer gave us come back by giving the node up."""
        body = {'id': self.node_id, 'num_cpus': 64, 'memory_gb': 64.0, 'num_gpus': 0, 'num_nodes': 1}
        jobs = self.insist('claim_jobs_based_on_resources', body, workflow_id=self.workflow_id, limit=self.chance.randint(1, 6))['jobs']
        self.book.claim(self.name, jobs)
        if not jobs:
            self.insist('update_compute_node', dict(body, is_active=False, workflow_id=self.workflow_id), id=self.node_id)
            self.node_id = self.register()
            self.is_leaving.wait(0.02)
        return [dict(job, attempt_id=job.get('attempt_id', 1)) for job in jobs]

    def end_of(self, job: Dict[str, Any]) -> Dict[str, Any]:
        """A result, by its job; the return code is chance's."""
        return_code = self.chance.choice([0, 0, self.chance.randint(1, 255)])
        self.book.say(job, return_code)
        return dict(completion_of(job['id'], self.workflow_id, self.node_id), attempt_id=job['attempt_id'], return_code=return_code,
                    status='failed' if return_code else 'completed')

    def work_by_ones(self) -> None:
        """Each job by itself."""
        for job in self.claim():
            self.insist('start_job', job_id=job['id'], run_id=1, compute_node_id=self.node_id)
            end = self.end_of(job)
            self.insist('complete_job', end, job_id=job['id'], status=end['status'], run_id=1)
            self.book.tell(job)

    def work_by_batches(self) -> None:
        """All at once."""
        jobs = self.claim()
        entries = [{'job_id': end['job_id'], 'status': end['status'], 'run_id': 1, 'result': end} for end in map(self.end_of, jobs)]
        answer = self.insist('batch_complete_jobs', {'completions': entries}, workflow_id=self.workflow_id)
        assert sorted(answer['completed']) == sorted(job['id'] for job in jobs) and not answer['errors'], answer
        for job in jobs:
            self.book.tell(job)

    def work_by_turns(self) -> None:
        """As torc.py's own runner: all in one request, the ends of the last jobs with the claim of the next."""
        held = []   # type: List[Dict[str, Any]]
        while held or not self.is_leaving.is_set():
            keys = ('job_id', 'attempt_id', 'return_code', 'status', 'exec_time_minutes', 'completion_time')
            ends = [{key: value for key, value in self.end_of(job).items() if key in keys} for job in held]
            body = {'compute_node_id': self.node_id, 'run_id': 1, 'completions': ends, 'held': [],
                    'started': [[job['id'], job['attempt_id'], '2026-11-21T12:00:00.000Z'] for job in held]}
            if not self.is_leaving.is_set():
                body['want'] = {'strategy': 'resources', 'limit': self.chance.randint(1, 6), 'num_cpus': 64, 'memory_gb': 64.0, 'num_gpus': 0, 'num_nodes': 1}
            answer = self.insist('runner_sync', body, workflow_id=self.workflow_id)
            assert not answer['errors'] and len(answer['accepted']) == len(held), answer
            for job in held:
                self.book.tell(job)
            held = answer['jobs']
            self.book.claim(self.name, held)
            self.is_leaving.wait(0 if held else 0.02)


PAIRS_SPEC = """
name: pairs
jobs:
  - {{name: "first_{{i}}", command: "true", parameters: {{i: "1:{count}"}}}}
  - {{name: "second_{{i}}", command: "true", depends_on: ["first_{{i}}"], cancel_on_blocking_job_failure: false, parameters: {{i: "1:{count}"}}}}
"""


def kill_under_clerks(world: World, kills: int, seed: int) -> str:
    """kill -9 of the server at random moments, in its start too, while six clients claim, start and complete. What was seen."""
    nursery, chance, book = Nursery(world), random.Random(seed), Book()
    nursery.start()
    port = int(nursery.wait_for('TORC_SERVER_PORT='))
    url, token_file = f'http://127.0.0.1:{port}/torc-service/v1', world.path('torc.db.token')
    client = torc.Client(url=url, token_file=token_file)
    plan = torc.read_plan(torc.read_document(PAIRS_SPEC.format(count=1000 + 60 * kills).encode(), 'pairs.yaml'), '.').body
    workflow_id = client.create_workflow_from_spec(plan)['workflow_id']
    client.initialize_jobs(id=workflow_id)
    client.close()
    clerks = [Clerk(url, token_file, workflow_id, way, number, book, seed) for way in ('ones', 'batches', 'turns') for number in range(2)]
    for clerk in clerks:
        clerk.start()
    for _ in range(kills):
        if chance.random() < 0.8:
            pause_s = chance.uniform(0, 0.12)
        else:   # not even up
            nursery.end(signal.SIGKILL)
            nursery.start(port)
            pause_s = chance.uniform(0, 0.04)
        select.select([], [], [], pause_s)
        nursery.end(signal.SIGKILL)
        nursery.start(port)
        if chance.random() < 0.9:
            nursery.wait_for('TORC_SERVER_PORT=')
    for clerk in clerks:
        clerk.is_leaving.set()
    for clerk in clerks:
        clerk.join(60)
        assert not clerk.is_alive() and not clerk.failure, clerk.failure or f'{clerk.name} hangs'
    said = check_book(client, workflow_id, book)
    client.close()
    nursery.end(signal.SIGTERM)
    nursery.close()
    assert ask_sqlite(world.path('torc.db'), 'PRAGMA integrity_check') == [('ok',)]
    assert ask_sqlite(world.path('torc.db'), 'PRAGMA foreign_key_check') == []
    return said


def check_book(client: Any, workflow_id: int, book: Book) -> str:
    """Compare what the clients know with what the server has."""
    assert not book.wrong, book.wrong[:10]
    results = collections.Counter((row['job_id'], row['attempt_id'], row['return_code'])
                                  for row in client.pages('list_results', workflow_id=workflow_id, all_runs=True))
    lost = [key + (code,) for key, code in book.told.items() if results[key + (code,)] != 1]
    assert not lost, f'lost or doubled: {lost[:10]}'
    keys = collections.Counter(key[:2] for key in results.elements())
    assert set(keys.values()) <= {1}, [key for key, count in keys.items() if count > 1][:10]
    invented = [key for key in results if book.said.get(key[:2]) != key[2]]
    assert not invented, f'nobody has said: {invented[:10]}'
    codes = {key[0]: key[2] for key in results}
    for job in client.pages('list_jobs', workflow_id=workflow_id):
        is_over = job['status'] in ('completed', 'failed')
        assert is_over == (job['id'] in codes), (job, codes.get(job['id']))
        assert not is_over or (job['status'] == 'failed') == bool(codes[job['id']]), job
    return f'{len(book.told):,} completions acknowledged, {len(results):,} stored, {len(book.claimed):,} claims, {book.retries:,} retries'


# -------- a server that is sent rubbish --------

EVIL_VALUES = (
    None, True, False, 0, -1, 1, 3, 2 ** 31, 2 ** 63 - 1, 2 ** 63, -2 ** 63 - 1, 10 ** 40, 1.5, -0.5, 1e308, float('nan'), float('inf'), '', ' ', 'x', '\0', '\ud800', '\x1b[2J',
    'A' * 3000, '\u0663', '-1', '1e3', 'true', 'null', '2026-11-21T12:00:00Z', '0000-00-00T99:99:99Z', 'P1Y', 'PT99999999999H', '1k', '-5g', '../../etc/passwd',
    "'; DROP TABLE job; --", '%s%n{0}', [], [[]], [None], [1, 'a'], ['x'] * 500, {}, {'': None}, {'id': 1}, {'a': {'b': [{}]}}, 'ready', 'completed', '*', '(' * 50)
EVIL_TEXTS = ('', '0', '-1', '1', '+1', '1.0', '9223372036854775807', '9223372036854775808', '%00', '%zz', '%ff%fe', '%ED%A0%80', '..', '%2e%2e%2f', '%2F', 'A' * 1000, 'ab' * 6000, 'true', 'yes', 'null',
              '%D9%A3', "'%22%3B--", 'ready', 'name', 'id', 'a=b=c', '[]', '%5B1%5D', '1,2', '1%0d%0aX:y')
EVIL_BODIES = (
    b'{', b'[', b'nul', b'{"a":1,"a":2}', b'NaN', b'[1e999]', b'-Infinity', b'\xff\xfe{}', b'\xef\xbb\xbf{}', '{"name":"x"}'.encode('utf-16'), b'"\\ud800"', b'{"\\u0000":1}', b'\0', b'[' * 100000,
    b'{"a":' * 5000, b'1' * 5000, b'"' + b'x' * 100000 + b'"', b'{"name":"\xff"}', b'0x1', b"{'a':1}", b'{} {}', b'// {}', b'[]', b'""', b'0', b'true', b'null', b' ', b'{}')
EVIL_FIELDS = ('Transfer-Encoding: chunked', 'Content-Length: -1', 'Content-Length: 99999999999', 'Content-Length: 5\r\nContent-Length: 6', 'Content-Length: 0x10', 'Expect: wonders',
               'Host: evil.example', 'Connection: close', 'Connection: upgrade\r\nUpgrade: websocket', 'no colon', ' folded: 1', 'X: ' + 'y' * 70000, 'Origin: http://evil.example',
               'Authorization: Basic ???', 'Authorization: Bearer wrong', 'Last-Event-ID: x', 'Range: bytes=0-1', 'Content-Type: text/plain', 'Accept: text/event-stream',
               '\r\n'.join(f'x{number}: 1' for number in range(120)), 'X-Span-Id: \x01', 'Content-Encoding: gzip')
FAIR_VALUES = {     # of the types of MODELS
    'int': 1, 'float': 1.0, 'bool': True, 'str': 'text', 'any': {'a': 1}, 'object': {'a': 1}, 'name': 'name', 'time': '2026-11-21T12:00:00.000Z', 'minutes': 1.0, 'gigabytes': 4.0, 'nodes': 1,
    'rules': [{'exit_codes': [9]}], 'attempt': [1, 1], 'start': [1, 1, '2026-11-21T12:00:00.000Z']}
FUZZ_SPEC = """
name: fuzz
files: [{name: data, path: data.csv}, {name: made, path: made.csv}]
user_data: [{name: limits, data: {low: 1}}, {name: empty}]
resource_requirements: [{name: big, num_cpus: 1, memory: 1m}]
failure_handlers: [{name: again, rules: [{exit_codes: [9]}]}]
actions: [{trigger_type: on_workflow_complete, action_type: run_commands, commands: [echo]}]
jobs:
  - {name: greet, command: echo, resource_requirements: big, failure_handler: again, input_files: [data], output_files: [made], input_user_data: [limits]}
  - {name: bad, command: exit 1, depends_on: [greet]}
  - {name: "many_{i}", command: "true", parameters: {i: "1:5"}}
"""


class Fuzzer:
    """Makes malformed requests from the tables of torc.py, and sends them to a server."""

    def __init__(self, port: int, token: str, seed: int) -> None:
        self.port, self.token, self.chance = port, token, random.Random(seed)
        self.socket = None          # type: Optional[socket.socket]  # kept alive, while the server keeps it
        self.ids = {}               # type: Dict[str, List[int]]  # of what is there, by resource
        self.statuses = collections.Counter()   # type: Dict[str, int]
        self.by_route = collections.Counter()   # type: Dict[str, int]
        self.wrong = []             # type: List[str]

    # -------- making --------

    def chosen(self, *weighted: Tuple[float, Any]) -> Any:
        """One of several, by weight."""
        return self.chance.choices([value for _, value in weighted], [weight for weight, _ in weighted])[0]

    def fair(self, kind: str, name: str = '', depth: int = 0) -> Any:
        """A value that a type of MODELS allows, more or less."""
        if name.rstrip('s').endswith('_id') and kind == 'int':
            return self.some_id(name)
        if kind in FAIR_VALUES:
            return copy.deepcopy(FAIR_VALUES[kind])
        if kind[0] == '[':
            return [self.fair(kind[1:-1], name, depth + 1) for _ in range(self.chance.randint(0, 2))]
        if kind[0] == '{':
            return {'key': self.fair(kind[1:-1].rstrip('?'), name, depth + 1)}
        if kind[1:] in torc.ENUMS:
            return self.chance.choice(torc.ENUMS[kind[1:]])
        if kind[1:] not in torc.MODELS or depth > 4:
            return copy.deepcopy(self.chance.choice(EVIL_VALUES))
        return {field: self.fair(wanted.type, field, depth + 1) for field, wanted in torc.model_fields(kind[1:]).items()
                if wanted.is_required or self.chance.random() < 0.4}

    def some_id(self, name: str) -> int:
        """An id for a parameter or field, mostly of something that is there."""
        found = [ids for resource, ids in self.ids.items() if name.rstrip('s').endswith(f'{resource}_id')] or list(self.ids.values())
        return self.chance.choice(self.chance.choice(found) or [1]) if self.chance.random() < 0.95 else self.chance.randint(1, 9)

    def spoil(self, value: Any) -> Any:
        """The value, with one thing in it replaced, left out or added."""
        if not isinstance(value, (dict, list)) or not value or self.chance.random() < 0.1:
            return copy.deepcopy(self.chance.choice(EVIL_VALUES))
        key = self.chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if self.chance.random() < 0.15:
            del value[key]
        elif isinstance(value[key], (dict, list)) and self.chance.random() < 0.7:
            value[key] = self.spoil(value[key])
        else:
            value[key] = copy.deepcopy(self.chance.choice(EVIL_VALUES))
        return value

    def path_of(self, route: Any, is_spoilt: bool) -> str:
        """Path of a route with parameters."""
        def fill(match: Any) -> str:
            name = match.group(1)
            if is_spoilt and self.chance.random() < 0.7:
                return self.chance.choice(EVIL_TEXTS)
            fixed = {'run_id': 1, 'limit': 1, 'status': 'completed'}
            return str(fixed.get(name) or self.some_id(f'{route.resource}_id' if name == 'row_id' else name))
        return torc.API_PREFIX + re.sub(r'\{(\w+)\}', fill, route.path)

    def query_of(self, route: Any, is_spoilt: bool) -> str:
        """Query of a route."""
        pairs = []
        for name, field in torc.query_fields(route).items():
            if name == 'workflow_id' and (not is_spoilt or self.chance.random() < 0.5):
                pairs.append(f"workflow_id={self.some_id('workflow_id')}")
            elif is_spoilt and self.chance.random() < 0.4 or field.is_required:
                pairs.append(f'{name}={self.chance.choice(EVIL_TEXTS)}')
        return '?' + '&'.join(pairs) if pairs else ''

    def body_of(self, route: Any, what: str) -> bytes:
        """Body for a route."""
        if what == 'text':
            return self.chance.choice(EVIL_BODIES)
        if not route.body:
            return b'' if self.chance.random() < 0.8 else self.chance.choice(EVIL_BODIES)
        body = self.fair('@' + route.body.lstrip('?-'), '', 0) if route.body.lstrip('?-') else copy.deepcopy(self.chance.choice(EVIL_VALUES))
        for _ in range({'fair': 0, 'body': self.chance.randint(1, 2)}.get(what, 0)):
            body = self.spoil(body)
        return json.dumps(body).encode()

    def request(self, route: Any) -> Tuple[bytes, bool]:
        """Bytes of a request to a route, and whether its framing is right."""
        what = self.chosen((40, 'body'), (12, 'path'), (14, 'query'), (10, 'text'), (4, 'method'), (10, 'frame'), (10, 'fair'))
        method = self.chance.choice(['GET', 'POST', 'PUT', 'DELETE', 'PATCH', 'OPTIONS', 'HEAD', 'TRACE', 'BREW']) if what == 'method' else route.method
        target = self.path_of(route, what == 'path') + self.query_of(route, what == 'query')
        body = self.body_of(route, what)
        fields = [f'Host: 127.0.0.1:{self.port}', f'Authorization: Bearer {self.token}', f'Content-Length: {len(body)}']
        if what == 'frame':
            return self.broken(f'{method} {target} HTTP/1.1', fields, body), False
        return f'{method} {target} HTTP/1.1\r\n'.encode('latin-1') + '\r\n'.join(fields + ['', '']).encode() + body, method != 'HEAD'

    def broken(self, line: str, fields: List[str], body: bytes) -> bytes:
        """A request whose bytes are wrong."""
        if self.chance.random() < 0.5:
            fields.insert(self.chance.randint(0, len(fields)), self.chance.choice(EVIL_FIELDS))
        data = bytearray('\r\n'.join([line, *fields, '', '']).encode('latin-1') + body)
        for _ in range(self.chance.choice([0, 1, 3])):
            place = self.chance.randrange(len(data))
            data[place:place + self.chance.choice([0, 1, 1, 20])] = bytes(self.chance.randrange(256) for _ in range(self.chance.choice([0, 1, 2])))
        return bytes(data[:self.chance.choice([len(data), self.chance.randint(1, len(data))])])

    # -------- sending --------

    def send(self, data: bytes, is_framed: bool) -> None:
        """Send a request and judge the answer: none at all is right only for what is no whole request."""
        client = self.socket if is_framed and self.socket else socket.create_connection(('127.0.0.1', self.port), 10)
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                client.sendall(data)
                if not is_framed:
                    client.shutdown(socket.SHUT_WR)
            answer, stays = self.read(client) if is_framed else (read_all(client), False)
        except socket.timeout:
            answer, stays = b'', False
            self.wrong.append(f'no answer within 10 s: {data[:300]!r}')
        if is_framed:
            self.socket = client if stays else None
        if not stays:
            client.close()
        for status in statuses(answer) or [0]:
            self.statuses[str(status or 'closed')] += 1
            if status >= 500 and not (status == 501 and b'transfer-encoding' in data.lower()) or not status and is_framed:
                self.wrong.append(f'{status}: {data[:2000]!r} -> {answer[:500]!r}')

    @staticmethod
    def read(client: socket.socket) -> Tuple[bytes, bool]:
        """One answer, and whether the connection goes on. An answer that never ends is left."""
        found = b''
        while b'\r\n\r\n' not in found or not is_whole(found):
            data = client.recv(65536)
            found += data
            if not data or b'text/event-stream' in found.partition(b'\r\n\r\n')[0]:
                return found, False
        return found, b'\r\nconnection: close' not in found.partition(b'\r\n\r\n')[0].lower()


class Polite(threading.Thread):
    """A client that behaves, and notes how long it waits for its answers."""

    def __init__(self, url: str, token_file: str) -> None:
        super().__init__(daemon=True)
        self.client, self.waits, self.is_leaving = torc.Client(url=url, token_file=token_file), [], threading.Event()     # type: Any, List[float], Any

    def run(self) -> None:
        while not self.is_leaving.wait(0.005):
            begun = time.perf_counter()
            self.client.ping()
            self.waits.append(time.perf_counter() - begun)
        self.client.close()


def fuzz(world: World, count: int, seed: int) -> str:
    """Send so many malformed requests, spread over all routes. What was seen."""
    url = world.serve('--db', 'fuzz.db')
    port, token_file = urllib.parse.urlsplit(url).port, world.path('fuzz.db.token')
    client, polite = torc.Client(url=url, token_file=token_file), Polite(url, token_file)
    fuzzer = Fuzzer(port, torc.read_token(token_file), seed)
    routes = list(torc.ROUTES)
    plan = torc.read_plan(torc.read_document(FUZZ_SPEC.encode(), 'fuzz.yaml'), '.').body
    polite.start()
    resident_kb = 0
    for number in range(count):
        if number % 60 == 0:
            renew_prey(client, plan, fuzzer)
        if number == count // 5:
            resident_kb = resident_kb_of(world.server.pid)
        if number % len(routes) == 0:
            fuzzer.chance.shuffle(routes)
        route = routes[number % len(routes)]
        fuzzer.by_route[f'{route.method} {route.path}'] += 1
        fuzzer.send(*fuzzer.request(route))
        assert len(fuzzer.wrong) < 10, '\n'.join(fuzzer.wrong)
    grown_kb = resident_kb_of(world.server.pid) - resident_kb
    polite.is_leaving.set()
    polite.join(20)
    client.close()
    if fuzzer.socket:
        fuzzer.socket.close()
    assert not fuzzer.wrong, '\n'.join(fuzzer.wrong)
    assert 'Traceback' not in world.server.err and 'bug' not in world.server.err, world.server.err[-3000:]
    assert min(fuzzer.by_route.values()) >= count // len(routes) and len(fuzzer.by_route) == len({(route.method, route.path) for route in routes})
    waits = sorted(polite.waits)
    assert len(waits) > count / 1000 and waits[-1] < 5, waits[-5:]
    assert grown_kb < 32 * 1024, f'the server has grown by {grown_kb} kB'
    world.server.send(signal.SIGTERM)
    assert world.server.finish(20).code == 0
    assert ask_sqlite(world.path('fuzz.db'), 'PRAGMA integrity_check') == [('ok',)]
    told = ', '.join(f'{status}: {times:,}' for status, times in sorted(fuzzer.statuses.items()))
    return (f'{count:,} requests over {len(fuzzer.by_route)} routes; answers {told}; memory {resident_kb // 1024} MB, then {grown_kb / 1024:+.1f} MB; '
            f'{len(waits):,} pings beside them: median {waits[len(waits) // 2] * 1e3:.1f} ms, p99 {waits[int(len(waits) * 0.99)] * 1e3:.1f} ms, worst {waits[-1] * 1e3:.0f} ms')


def renew_prey(client: Any, plan: Any, fuzzer: Fuzzer) -> None:
    """A workflow at work, for the next requests to spoil; what earlier ones have made is deleted."""
    for workflow in list(client.pages('list_workflows')):
        with contextlib.suppress(torc.NotFound):
            client.delete_workflow(id=workflow['id'])
    workflow_id = client.create_workflow_from_spec(plan)['workflow_id']
    client.initialize_jobs(id=workflow_id)
    node = {'workflow_id': workflow_id, 'hostname': 'h', 'pid': 1, 'start_time': '2026-11-21T12:00:00.000Z', 'num_cpus': 2, 'memory_gb': 8.0, 'num_gpus': 0, 'num_nodes': 1}
    node_id = client.create_compute_node(dict(node, compute_node_type='local', is_active=True))['id']
    first, second, *_ = (job['id'] for job in client.claim_next_jobs(id=workflow_id, limit=3)['jobs'])
    client.start_job(job_id=second, run_id=1, compute_node_id=node_id)
    client.complete_job(completion_of(first, workflow_id, node_id), job_id=first, status='completed', run_id=1)
    fuzzer.ids = {'workflow': [workflow_id], 'compute_node': [node_id]}
    for route in torc.ROUTES:
        if route.name.startswith('create_') and route.body in torc.MODELS and 'workflow_id' in torc.model_fields(route.body):
            with contextlib.suppress(torc.TorcError):
                client.call(route.name, fuzzer.fair('@' + route.body))
    for route in torc.ROUTES:
        if route.name.startswith('list_') and route.resource and 'workflow_id' in torc.query_fields(route) and 'workflow_id' not in route.path:
            fuzzer.ids[route.resource] = [item['id'] for item in client.call(route.name, workflow_id=workflow_id)['items'] if 'id' in item]


def resident_kb_of(pid: int) -> int:
    """Memory that a process holds (proc(5), status)."""
    return int(re.search(r'VmRSS:\s*(\d+) kB', read_text(f'/proc/{pid}/status')).group(1))


@slow
class OutputOwnerTest(WorldTest):
    """An output directory belongs to one database."""
    SPEC = 'name: {0}\njobs: [{{name: greet, command: "echo from {0}"}}]\n'

    def setUp(self) -> None:
        super().setUp()
        for name in 'ab':
            self.world.write(f'{name}.yaml', self.SPEC.format(name))

    def text(self) -> str:
        """What the job of the first workflow wrote."""
        return self.world.read('torc_output/job_stdio/job_wf1_j1_r1_a1.o')

    def test_a_runner_of_another_database_is_refused_before_anything_is_created(self) -> None:
        self.assertExit(0, self.world.cli('run', 'a.yaml'))
        for words in (('run', 'b.yaml'), ('exec', '-c', 'echo from b')):
            outcome = self.assertExit(4, self.world.cli('--db', 'b.db', *words), f"belongs to another database, {self.world.path('torc_output', 'torc.db')}; ",
                                      f"this one is {self.world.path('b.db')}: give another directory with -o DIR")
            self.assertNotIn('Created', outcome.err)
        self.assertExit(0, self.world.cli('--db', 'b.db', 'create', 'b.yaml'))
        self.assertExit(4, self.world.cli('--db', 'b.db', 'run', 1), 'belongs to another database')
        self.assertEqual({'uninitialized'}, {job['status'] for job in self.world.cli('--db', 'b.db', '-f', 'json', 'jobs', 'list', 1).json()['items']})
        self.assertEqual('from a\n', self.text())
        self.assertExit(0, self.world.cli('--db', 'b.db', 'run', 1, '-o', 'of_b'))
        self.assertExit(0, self.world.cli('run', 'a.yaml'))
        self.assertEqual('from b\n', self.assertExit(0, self.world.cli('--db', 'b.db', 'logs', 1, 'greet', '-o', 'of_b')).out)

    def test_another_databases_text_is_not_shown(self) -> None:
        self.assertExit(0, self.world.cli('run', 'a.yaml'))
        self.assertExit(0, self.world.cli('--db', 'b.db', 'run', 'b.yaml', '-o', 'of_b'))
        for words in (('logs', 1, 'greet'), ('results', 'list', 1, '--include-logs')):
            outcome = self.assertExit(4, self.world.cli('--db', 'b.db', *words), 'belongs to another database', '-o DIR')
            self.assertEqual('', outcome.out)
            self.assertExit(0, self.world.cli(*words))
            self.assertExit(0, self.world.cli('--db', 'b.db', *words, '-o', 'of_b'))

    def test_who_deletes_the_database_starts_over_in_its_directory(self) -> None:
        self.assertExit(0, self.world.cli('run', 'a.yaml'))
        database = self.world.path('torc_output', 'torc.db')
        self.world.wait(lambda: not torc.read_connection_file(database), 10, 'the server to leave')
        os.unlink(database)
        outcome = self.assertExit(0, self.world.cli('run', 'b.yaml'))
        self.assertEqual(1, outcome.err.count(f'belonged to the database {database}, which no longer exists; it now belongs to {database}\n'))
        self.assertEqual('from b\n', self.text())
        self.assertNotIn('belonged', self.assertExit(0, self.world.cli('run', 'b.yaml')).err)
        self.world.wait(lambda: not torc.read_connection_file(database), 10, 'the server to leave')
        os.unlink(database)
        self.assertExit(0, self.world.cli('--db', 'b.db', 'run', 'a.yaml'), 'it now belongs to ' + self.world.path('b.db'))
        self.assertNotIn('belonged', self.assertExit(0, self.world.cli('-q', '--db', 'b.db', 'run', 'b.yaml')).err)

    def test_a_directory_of_before_is_that_of_whoever_comes_first(self) -> None:
        self.assertExit(0, self.world.cli('run', 'a.yaml'))
        os.unlink(self.world.path('torc_output', '.torc_database.1'))
        self.assertExit(0, self.world.cli('logs', 1, 'greet'))
        self.assertExit(0, self.world.cli('run', 'a.yaml'))
        self.assertExit(4, self.world.cli('--db', 'b.db', 'run', 'b.yaml'), 'belongs to another database')

    def test_runners_of_one_database_share_a_directory_and_move_it_together(self) -> None:
        self.world.serve('-d', 'a.db')
        runs = [self.world.start('run', 'a.yaml') for _ in range(4)]
        for run in runs:
            self.assertExit(0, run.finish())
        self.assertEqual(['.torc_database.1'], [name for name in os.listdir(self.world.path('torc_output')) if name[0] == '.'])

    def database(self, name: str, **more: Any) -> Dict[str, Any]:
        """A database as its server describes it."""
        return dict({'id': name, 'path': self.world.write(name, ''), 'host': socket.gethostname()}, **more)

    def take(self, database: Dict[str, Any], name: str = 'out') -> Optional[str]:
        """Take a directory; None if it is refused."""
        os.makedirs(self.world.path(name), exist_ok=True)
        try:
            return torc.take_output_dir(self.world.path(name), database)
        except torc.Refused:
            return None

    def test_whether_the_database_of_a_directory_still_exists(self) -> None:
        ours, there = self.database('ours.db'), {'host': 'node7'}
        gone = self.world.path('gone.db')
        local = unittest.mock.patch.object(torc, 'is_network_path', lambda path: False)
        network = unittest.mock.patch.object(torc, 'is_network_path', lambda path: True)
        for number, (where, theirs, expected) in enumerate((
                (local, self.database('theirs.db'), None),
                (local, dict(ours, id='x', path=gone), gone),
                (local, dict(ours, id='x', path=self.world.path('unmounted', 'x.db')), None),
                (local, dict(ours, id='x'), ours['path']),                      # ours has taken its place
                (local, dict(ours, id='x', path=gone, **there), None),          # that host may have it
                (network, dict(ours, id='x', path=gone, **there), gone),        # all hosts would see it
                (network, self.database('theirs.db', **there), None),
                (local, dict(ours, id='x', **there), None),                     # the same path on another host is another file
                (network, dict(ours, id='x', **there), ours['path']),           # the same file
                (local, dict(ours, id='x', path=self.world.path('out8', 'torc.db')), self.world.path('out8', 'torc.db')))):
            with self.subTest(number), where:
                self.assertEqual('', self.take(theirs, f'out{number - 1}'))
                self.assertEqual(expected, self.take(ours, f'out{number - 1}'))
                self.assertEqual('' if expected else None, self.take(ours, f'out{number - 1}'))

    def test_a_directory_that_was_moved_with_its_database_is_still_its_own(self) -> None:
        os.mkdir(self.world.path('old'))
        theirs = self.database('old/torc.db')
        self.assertEqual('', self.take(theirs, 'old'))
        os.rename(self.world.path('old'), self.world.path('kept'))
        os.mkdir(self.world.path('old'))
        ours = dict(self.database('old/torc.db'), id='another')
        self.assertEqual([None, ''], [self.take(ours, 'kept'), self.take(ours, 'old')])
        self.assertEqual('', self.take(dict(theirs, path=self.world.path('kept', 'torc.db')), 'kept'))

    def test_a_database_that_was_moved_is_found_at_its_new_place(self) -> None:
        first = self.database('a.db')
        self.take(first)
        os.rename(first['path'], self.world.path('b.db'))
        self.assertEqual('', self.take(dict(first, path=self.world.path('b.db'))))
        self.assertIsNone(self.take(self.database('c.db')))

    def test_a_copy_of_a_database_is_another_one(self) -> None:
        self.assertExit(0, self.world.cli('run', 'a.yaml'))
        database = self.world.path('torc_output', 'torc.db')
        self.world.wait(lambda: not torc.read_connection_file(database), 10, 'the server to leave')
        shutil.copy(database, self.world.path('copy.db'))
        for words in (('run', 'b.yaml'), ('logs', 1)):
            self.assertExit(4, self.world.cli('--db', 'copy.db', *words), f"{database}; this one is {self.world.path('copy.db')}")
        self.assertExit(0, self.world.cli('--db', 'copy.db', 'run', 'b.yaml', '-o', 'of_copy'))
        self.assertExit(0, self.world.cli('run', 'a.yaml'))
        self.world.wait(lambda: not torc.read_connection_file(database), 10, 'the server to leave')
        os.link(database, self.world.path('same.db'))
        first = torc.read_output_record(self.world.path('torc_output'))[1]
        self.assertEqual('', self.take(dict(first, path=self.world.path('same.db')), 'torc_output'))
        os.unlink(database)
        os.unlink(self.world.path('same.db'))
        self.assertExit(0, self.world.cli('--db', 'copy.db', 'run', 'b.yaml'))

    def test_of_several_that_come_at_once_exactly_one_gets_a_directory(self) -> None:
        candidates = [self.database(f'{number}.db') for number in range(12)]
        for round in range(5):      # the first time it is nobody's, then that of the last winner, which was deleted
            answers = {}            # type: Dict[str, Optional[str]]
            threads = [threading.Thread(target=lambda one: answers.update({one['id']: self.take(one)}), args=(one,)) for one in candidates]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            winners = [name for name, answer in answers.items() if answer is not None]
            self.assertEqual((1, 12 - round), (len(winners), len(answers)))
            self.assertEqual((round + 1, winners[0]), (lambda number, record: (number, record['id']))(*torc.read_output_record(self.world.path('out'))))
            os.unlink(self.world.path(winners[0]))
            candidates = [one for one in candidates if one['id'] != winners[0]]

    def test_a_record_is_read_by_whoever_may_read_the_directory_and_a_damaged_one_names_the_cure(self) -> None:
        for mode, expected in ((0o755, 0o644), (0o750, 0o640), (0o700, 0o600)):
            os.mkdir(self.world.path(oct(mode)), mode)
            self.take(self.database('a.db'), oct(mode))
            self.assertEqual(expected, os.stat(self.world.path(oct(mode), '.torc_database.1')).st_mode & 0o777)
        for text in ('', '{', '[]', '{"id": 1}'):
            path = self.world.write('out/.torc_database.1', text)
            self.assertRaisesRegex(torc.Denied, 'remove it, or give another directory with -o DIR', torc.read_output_record, self.world.path('out'))
        os.unlink(path)
        os.symlink(self.world.write('target', '{}'), path)
        self.assertRaises(torc.Denied, torc.read_output_record, self.world.path('out'))


@slow
class FaultTest(WorldTest):
    """Small versions of what `faults` does at length."""

    def test_a_server_that_is_killed_under_many_clients_loses_nothing_and_doubles_nothing(self):
        said = kill_under_clerks(self.world, 6, 3)
        self.assertRegex(said, r'^[\d,]{3,} completions acknowledged')

    def test_rubbish_of_all_kinds_is_answered_with_4xx_and_nothing_is_harmed(self):
        need('proc', os.path.isdir('/proc/self'), 'looks into /proc')
        self.assertIn('422: ', fuzz(self.world, 1000, 4))

    def test_a_killed_server_that_is_started_again_has_lost_nothing(self):
        kill_lasting_server(self.world, 100, 1, 1)
        self.assertEqual(101, len(os.listdir(self.world.path('ledger'))) + 1)

    def test_an_embedded_server_that_is_killed_comes_back_and_has_lost_nothing(self):
        kill_embedded_server(self.world, 100, 1, 2)
        self.assertEqual(101, len(os.listdir(self.world.path('ledger'))) + 1)

    def test_two_runners_share_the_jobs_of_one_server_and_none_runs_twice(self):
        share_jobs(self.world, 150)
        self.assertEqual(151, len(os.listdir(self.world.path('ledger'))) + 1)


def run_faults(is_quick: bool, seed: Optional[int], parts: Sequence[str] = ()) -> int:
    """`test_torc.py faults [PART...]`: every fault in a world of its own; parts are words of their titles. 1 if one did harm."""
    seed = random.SystemRandom().randrange(10 ** 9) if seed is None else seed
    print(f'seed {seed}: repeat with --seed {seed}')
    count, kills, many, requests = (200, 2, 20, 2000) if is_quick else (1000, 5, 300, 20000)
    works = ((f'kill -9 of serve, {kills} times in {count} jobs of two runners', lambda world: kill_lasting_server(world, count, kills, seed)),
             (f'kill -9 of an embedded server, {kills} times in {count} jobs', lambda world: kill_embedded_server(world, count, kills, seed)),
             (f'two runners share {count} jobs', lambda world: share_jobs(world, count)),
             (f'kill -9 of serve, {many} times under six clients', lambda world: kill_under_clerks(world, many, seed)),
             (f'{requests:,} malformed requests', lambda world: fuzz(world, requests, seed)))
    works = [row for row in works if not parts or any(part in row[0] for part in parts)]
    failed = 0
    for title, work in works:
        world, begun = World(), time.monotonic()
        try:
            said = work(world)
            world.close()
            print(f'ok      {time.monotonic() - begun:6.1f} s  {title}' + (f'\n        {said}' if said else ''), flush=True)
        except Exception:   # whatever it is: the other faults still have their turn
            failed += 1
            print(f'FAILED  {time.monotonic() - begun:6.1f} s  {title}\n{traceback.format_exc()}', flush=True)
            with contextlib.suppress(AssertionError):
                world.close()
    print(f'{len(works) - failed} passed, {failed} failed, 0 skipped')
    return 1 if failed else 0


# ======== Laws: what must hold for the whole file, whoever changes it ========
#
# The laws read torc.py, this file, README.md and the examples as text and syntax trees. What they allow by exception is
# listed here, with the reason; a list that names something which is gone is a failure too.

RULER = re.compile(r'# =+ +(?:(\w+)\. )?(\S.*?)(?:: (.*?))? +=+\s*$')
SQL_SECTIONS = {'Schema', 'Store', 'Monitor', 'Journal'}    # the last two own small files of their own
PRINT_SECTIONS = {'Commands', 'Main'}
TOP_LEVEL = {'torc.py', 'test_torc.py', 'examples', 'README.md', 'LICENSE'}
APPENDICES = {'PAGE'}       # a constant that may stand below its users, so that Python reads on without it

# Functions that may say `except Exception`: borders between a bug and the rest of a long-lived process.
BORDERS = {
    'answer_request': 'a bug in one request becomes a 500, the other requests of the turn go on',
    'run_task': 'a bug fails one task, whose waiter is told; the server goes on',
    'Server.attempt': 'a bug costs one connection, not the server',
    'Server.on_tick': 'a bug costs one look at the clock',
    'SnapshotWriter.work': 'a bug costs one snapshot; finish() reports it',
    'Users.work': 'a bug costs one look at a password, not all later ones',
    'run_detached_server': 'the last line of a forked process: nothing of its parent may run below it',
    'main': 'a bug becomes a traceback and exit 70',
}

# Words that belong to no file of this project: where it is made, and by whose tools. Split, so that this list is not found.
FOREIGN_WORDS = ['py' + 'pi.org', 'crates' + '.io', 'npm' + 'js', 'deb.deb' + 'ian', 'proxy.go' + 'lang', 'mav' + 'en.org', 'anth' + 'ropic', 'open' + 'ai',
                 'chat' + 'gpt', 'co' + 'pilot', '/wo' + 'rk/', '/.lib' + 'rary', 'CONTR' + 'ACT.md', 'DEVELO' + 'PERS.md', 'DES' + 'IGN.md', 'STY' + 'LE.md', 'farm-' + 'bench', 'farm-' + 'studio', 'BUGS' + '.md']


class Ruler(NamedTuple):
    """One section's headline."""
    line: int
    number: str
    name: str


class Source:
    """A Python file as text, tree and sections."""

    def __init__(self, path: str) -> None:
        with open(path, encoding='utf-8') as file:
            self.text = file.read()
        self.path, self.lines = path, self.text.splitlines()
        self.tree = ast.parse(self.text)
        found = [(number, RULER.match(line)) for number, line in enumerate(self.lines, 1)]
        self.rulers = [Ruler(number, match.group(1) or '', match.group(2)) for number, match in found if match and line_is_top(self.lines[number - 1])]
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                child.parent = node     # type: ignore

    def section(self, line: int) -> str:
        """Name of the section that holds a line."""
        names = [ruler.name for ruler in self.rulers if ruler.line <= line]
        return names[-1] if names else 'Head'

    def floor(self, line: int) -> int:
        """Rank of the section that holds a line."""
        return sum(ruler.line <= line for ruler in self.rulers)

    def walk(self, *kinds: Any) -> Iterator[Any]:
        """All nodes of these kinds."""
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))

    def owner(self, node: Any) -> str:
        """'Class.method' or 'function' that holds a node; '' at top level."""
        names = []
        while hasattr(node, 'parent'):
            node = node.parent
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.insert(0, node.name)
        return '.'.join(names)

    def place(self, node: Any) -> str:
        """'torc.py:12 Class.method', for messages."""
        return f'{os.path.basename(self.path)}:{node.lineno} {self.owner(node) or "(top level)"}'

    def listed_sections(self) -> List[Tuple[str, str]]:
        """Sections that the docstring lists: (number, name)."""
        return re.findall(r'^    (\w+)\. (\S.*)$', (ast.get_docstring(self.tree, clean=False) or '').partition('Sections')[2], re.MULTILINE)


def line_is_top(line: str) -> bool:
    """Whether a ruler is a section's (double strokes), not a part's."""
    return line.startswith('# ==')


def uses_down_the_page(source: Source) -> List[str]:
    """Uses of a top-level name that is defined in a later section."""
    home = {}
    for node in source.tree.body:
        names = [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else [
            leaf.id for target in getattr(node, 'targets', [getattr(node, 'target', None)]) if target is not None
            for leaf in ast.walk(target) if isinstance(leaf, ast.Name)]
        for name in names:
            home.setdefault(name, node.lineno)

    def globals_of(table: Any) -> Set[str]:
        own = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced() and symbol.is_global()}
        return own.union(*(globals_of(child) for child in table.get_children()))

    tables = symtable.symtable(source.text, source.path, 'exec').get_children()
    return [f'{table.get_name()} ({source.section(table.get_lineno())}) uses {name} ({source.section(home[name])})'
            for table in tables for name in sorted(globals_of(table))
            if name in home and name not in APPENDICES and source.floor(home[name]) > source.floor(table.get_lineno())]


def project_files() -> Dict[str, str]:
    """Name -> text of every file of the project, dot files too."""
    if os.path.isdir(os.path.join(HERE, '.git')) and shutil.which('git'):
        words = ['git', '-C', HERE, 'ls-files', '-z', '--cached', '--others', '--exclude-standard']
        names = subprocess.run(words, stdout=subprocess.PIPE, check=True, encoding='utf-8').stdout.split('\0')
        names = [name for name in names if name and os.path.exists(os.path.join(HERE, name))]
    else:
        names = sorted(TOP_LEVEL - {'examples'}) + ['.ci/run', '.gitignore'] + ['examples/' + name for name in os.listdir(EXAMPLES)]
    return {name: read_text(os.path.join(HERE, name)) for name in names}


class CodeLaws(unittest.TestCase):
    """What torc.py's text obeys."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.torc = Source(TORC)
        cls.tests = Source(os.path.abspath(__file__))

    def test_the_docstrings_list_the_sections(self):
        for source in (self.torc, self.tests):
            self.assertEqual([(ruler.number, ruler.name) for ruler in source.rulers if ruler.number], source.listed_sections(), source.path)

    def test_sections_stand_in_the_order_of_their_numbers(self):
        for source in (self.torc, self.tests):
            numbers = [int(ruler.number) for ruler in source.rulers if ruler.number.isdigit()]
            self.assertEqual(sorted(set(numbers)), numbers, source.path)

    def test_sections_of_the_tests_have_the_names_of_the_sections_they_test(self):
        names = {ruler.number: ruler.name for ruler in self.torc.rulers}
        for ruler in self.tests.rulers:
            if ruler.number.isdigit() and ruler.number != '0':
                self.assertEqual(names.get(ruler.number), ruler.name)

    def test_every_section_opens_with_a_preface(self):
        for ruler in self.torc.rulers[1:]:
            rest = self.torc.lines[ruler.line:]
            lines = list(itertools.takewhile(lambda line: line.startswith('#'), rest))
            self.assertTrue(2 <= len([line for line in lines if len(line) > 2]) <= 80, f'{ruler.name}: {len(lines)} lines of preface')

    def test_names_look_only_up_the_page(self):
        self.assertEqual([], uses_down_the_page(self.torc))

    def test_the_law_of_names_sees_a_breach(self):
        text = '# ==== 1. A: a ====\ndef first() -> None:\n    second()\n# ==== 2. B: b ====\ndef second() -> None:\n    first()\n'
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, 'breach.py')
            with open(path, 'w') as file:
                file.write(text)
            self.assertEqual(['first (A) uses second (B)'], uses_down_the_page(Source(path)))

    def test_no_top_level_name_is_defined_twice(self):
        for source in (self.torc, self.tests):
            names = [node.name for node in source.tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
            names += [target.id for node in source.tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))
                      for target in getattr(node, 'targets', [getattr(node, 'target', None)]) if isinstance(target, ast.Name)]
            self.assertEqual([], [name for name, count in collections.Counter(names).items() if count > 1], source.path)

    def test_no_global_and_no_bare_except(self):
        bad = [self.torc.place(node) for node in self.torc.walk(ast.Global)]
        bad += [self.torc.place(node) for node in self.torc.walk(ast.ExceptHandler) if node.type is None]
        self.assertEqual([], bad)

    def test_broad_handlers_stand_at_listed_borders_with_their_reason(self):
        found = set()
        for node in self.torc.walk(ast.ExceptHandler):
            names = {leaf.id for leaf in ast.walk(node.type) if isinstance(leaf, ast.Name)}
            last = node.body[-1]
            passes_on = isinstance(last, ast.Raise) and last.exc is None
            if names & {'Exception', 'BaseException'} and not passes_on:
                found.add(self.torc.owner(node))
                self.assertIn('#', self.torc.lines[node.lineno - 1], self.torc.place(node) + ': say why, beside it')
        self.assertEqual(set(BORDERS), found)

    def test_a_silent_handler_says_why(self):
        silent = [node for node in self.torc.walk(ast.ExceptHandler) if all(isinstance(part, ast.Pass) for part in node.body)]
        bare = [node for node in silent if not any('#' in line for line in self.torc.lines[node.lineno - 1:node.body[-1].lineno])]
        self.assertEqual([], [self.torc.place(node) for node in bare])

    def test_only_commands_print(self):
        calls = [node for node in self.torc.walk(ast.Call) if isinstance(node.func, ast.Name) and node.func.id == 'print']
        self.assertEqual([], [self.torc.place(node) for node in calls if self.torc.section(node.lineno) not in PRINT_SECTIONS])

    def test_text_never_becomes_code_nor_a_shells_words(self):
        names = {'eval', 'exec', 'compile', '__import__', 'pickle', 'marshal', 'shelve', 'load_extension', 'enable_load_extension', 'system', 'popen', 'getoutput'}
        bad = [node for node in self.torc.walk(ast.Call) if getattr(node.func, 'id', '') in names or
               getattr(node.func, 'attr', '') in names and getattr(getattr(node.func, 'value', None), 'id', '') != 're']
        bad += [node for node in self.torc.walk(ast.Import) if names & {alias.name for alias in node.names}]
        bad += [node for node in self.torc.walk(ast.keyword) if node.arg == 'shell']
        self.assertEqual([], [getattr(node, 'lineno', node) for node in bad])

    def test_secrets_are_compared_in_constant_time(self):
        secret = {'token', 'offered', 'password', 'proof', 'stored', 'wanted_proof'}
        found = []
        for node in self.torc.walk(ast.Compare):
            names = {getattr(side, 'id', getattr(side, 'attr', '')) for side in [node.left, *node.comparators]}
            if self.torc.section(node.lineno) in ('Server', 'Client', 'API') and names & secret and isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
                found.append(self.torc.place(node))
        # not compared with what somebody offers, but with the file as it is now
        self.assertEqual(['Users.is_valid'], [place.split()[-1] for place in found])
        calls = [node for node in self.torc.walk(ast.Attribute) if node.attr == 'compare_digest']
        self.assertGreaterEqual(len(calls), 3)

    def test_only_the_store_speaks_sql(self):
        calls = [node for node in self.torc.walk(ast.Call)
                 if isinstance(node.func, ast.Attribute) and node.func.attr in ('execute', 'executemany', 'executescript')]
        self.assertEqual([], [self.torc.place(node) for node in calls if self.torc.section(node.lineno) not in SQL_SECTIONS])
        self.assertTrue(calls)

    def test_nothing_below_main_ends_the_program(self):
        calls = [node for node in self.torc.walk(ast.Attribute, ast.Name)
                 if getattr(node, 'id', '') == 'SystemExit' or getattr(node, 'attr', '') == 'exit' and getattr(node.value, 'id', '') == 'sys']
        self.assertEqual([], [self.torc.place(node) for node in calls if self.torc.section(node.lineno) != 'Main'])

    def test_the_standard_library_is_enough(self):
        known = getattr(sys, 'stdlib_module_names', None)
        for source in (self.torc, self.tests):
            names = {alias.name for node in source.walk(ast.Import) for alias in node.names} | {node.module for node in source.walk(ast.ImportFrom)}
            for name in sorted(names - {'torc', 'tomllib'}):
                module = sys.modules[name]
                self.assertNotIn('site-packages', getattr(module, '__file__', None) or '', name)
                self.assertTrue(known is None or name.split('.')[0] in known, name)

    def test_imports_stand_at_the_top_one_a_line(self):
        for node in self.torc.walk(ast.Import, ast.ImportFrom):
            self.assertEqual('Head', self.torc.section(node.lineno), self.torc.place(node))
            self.assertTrue(len(node.names) == 1 or node.module == 'typing', self.torc.place(node))

    def test_every_import_is_used(self):
        for source in (self.torc, self.tests):
            used = {node.id for node in source.walk(ast.Name)}
            imported = {(alias.asname or alias.name).split('.')[0] for node in source.walk(ast.Import, ast.ImportFrom) for alias in node.names}
            comments = ' '.join(re.findall(r'# type: (.*)', source.text))
            self.assertEqual([], sorted(name for name in imported - used if name not in comments), source.path)

    def test_every_public_name_has_a_docstring(self):
        bare = []
        for node in self.torc.walk(ast.FunctionDef, ast.ClassDef):
            is_local = isinstance(node.parent, ast.FunctionDef) or not isinstance(node.parent, (ast.Module, ast.ClassDef))
            if not is_local and not node.name.startswith('_') and not ast.get_docstring(node):
                bare.append(self.torc.place(node) + ' ' + node.name)
        self.assertEqual([], bare)

    def test_every_function_is_annotated(self):
        bare = []
        for node in self.torc.walk(ast.FunctionDef):
            arguments = [argument for argument in node.args.args + node.args.kwonlyargs + [node.args.vararg, node.args.kwarg] if argument]
            wanted = [argument for argument in arguments if argument.arg not in ('self', 'cls')]
            if node.returns is None or any(argument.annotation is None for argument in wanted):
                bare.append(self.torc.place(node) + ' ' + node.name)
        self.assertEqual([], bare)

    def test_no_name_is_a_word_that_says_nothing(self):
        words = re.compile(r'(manager|helper|util)s?(_|$)|_(manager|helper|util)', re.IGNORECASE)
        names = [node.name for node in self.torc.walk(ast.FunctionDef, ast.ClassDef)]
        self.assertEqual([], [name for name in names if words.search(name)])

    def test_what_is_listed_as_public_exists(self):
        for name in torc.__all__:
            self.assertTrue(inspect.getdoc(getattr(torc, name)), name)

    def test_it_compiles_on_the_floor(self):
        found = [sys.executable] if sys.version_info < (3, 7) else sorted(glob.glob(
            os.path.join(os.environ.get('PYENV_ROOT') or os.path.expanduser('~/.pyenv'), 'versions', '3.6.*', 'bin', 'python3')))
        need('python36', found, 'a Python 3.6 below PYENV_ROOT or ~/.pyenv')
        for path in (TORC, os.path.abspath(__file__)):
            code = 'import sys; compile(sys.stdin.buffer.read(), sys.argv[1], "exec")'
            with open(path, 'rb') as source:
                done = subprocess.run([found[0], '-W', 'error', '-c', code, path], stdin=source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding='utf-8')
            self.assertEqual((0, ''), (done.returncode, done.stdout))

    def test_importing_does_nothing(self):
        code = textwrap.dedent('''
            import logging, os, signal, sys, threading
            def look():
                return ([str(signal.getsignal(number)) for number in range(1, 32)], dict(os.environ), os.getcwd(), sorted(os.listdir('.')),
                        logging.getLogger().handlers[:], threading.active_count(), sys.excepthook, sorted(os.listdir('/proc/self/fd')))
            sys.path.insert(0, sys.argv[1])
            before = look()
            import torc
            assert look() == before, (before, look())
            assert not set(sys.modules) & {'asyncio', 'concurrent.futures', 'unittest'}, 'it costs time at every start'
            ''')
        with tempfile.TemporaryDirectory() as directory:
            done = subprocess.run([sys.executable, '-B', '-W', 'error', '-c', code, HERE], cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  encoding='utf-8')
        self.assertEqual((0, ''), (done.returncode, done.stdout))


@slow
class ProjectLaws(unittest.TestCase):
    """What the files around torc.py obey."""

    def test_the_top_level_holds_the_listed_names(self):
        names = {name.split('/')[0] for name in project_files()}
        self.assertEqual(TOP_LEVEL, {name for name in names if not name.startswith('.')})

    def test_no_file_speaks_of_the_place_where_it_is_made(self):
        for name, text in project_files().items():
            low = text.lower()
            self.assertEqual([], [word for word in FOREIGN_WORDS if word.lower() in low], name)
        self.assertNotIn('sha' + 'red/', read_text(TORC))
        self.assertIsNone(re.search(r'\bissues? #?\d', read_text(TORC)))

    def test_every_test_asserts_something(self):
        source = Source(os.path.abspath(__file__))
        calls, asserting = {}, set()    # a name is enough: two functions of one name are both looked at
        for node in source.walk(ast.FunctionDef):
            names = {getattr(call.func, 'attr', getattr(call.func, 'id', '')) for call in ast.walk(node) if isinstance(call, ast.Call)}
            calls.setdefault(node.name, set()).update(names)
            if any(isinstance(part, (ast.Assert, ast.Raise)) for part in ast.walk(node)) or any(re.match('assert[A-Z]|fail$', name) for name in names):
                asserting.add(node.name)
        grown = True
        while grown:
            more = {name for name, used in calls.items() if name not in asserting and used & asserting}
            asserting |= more
            grown = bool(more)
        self.assertEqual([], sorted(name for name in calls if name.startswith('test_') and name not in asserting))
        self.assertGreater(len([name for name in calls if name.startswith('test_')]), 50)

    def test_no_two_tests_of_a_class_have_one_name(self):
        for node in Source(os.path.abspath(__file__)).walk(ast.ClassDef):
            names = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
            twice = [name for name, count in collections.Counter(names).items() if count > 1 and name != 'setUp']
            self.assertEqual([], [name for name in twice if name.startswith('test_')], node.name)

    def test_tests_wait_for_conditions(self):
        calls = [node for node in Source(os.path.abspath(__file__)).walk(ast.Attribute) if node.attr == 'sleep' and getattr(node.value, 'id', '') == 'time']
        self.assertEqual([], [node.lineno for node in calls])


# -------- README --------

def format_field_markdown() -> str:
    """Tables of the fields of a workflow file."""
    lines = []
    for where, title in torc.BLOCKS.items():
        lines += [f'#### {title}', '', '| field | type | default | {} | meaning |', '|---|---|---|---|---|']
        for field in torc.FIELDS_OF[where].values():
            is_template = 'yes' if field.is_template else ''
            cells = (f'`{field.name}`', torc.TYPES[field.type].words, torc.format_default(field), is_template, torc.describe_field(field))
            lines.append('| ' + ' | '.join(cell.replace('|', '\\|') for cell in cells) + ' |')
        lines.append('')
    return '\n'.join(lines)


def table_markdown(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [list(headers), ['---'] * len(headers)] + [[str(cell).replace('|', '\\|') for cell in row] for row in rows]
    return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)


def reference_parts() -> Dict[str, str]:
    """What stands between README's markers, made from torc.py's tables."""
    return {
        'fields': format_field_markdown().strip(),
        'commands': table_markdown(('command', 'what it does', 'example'), (
            (f'`{row.name}`', row.help, f'`torc.py {row.example}`') for row in torc.COMMANDS)),
        'environment': table_markdown(('variable', 'set by', 'meaning'), ((f'`{row.name}`', row.set_by, row.meaning) for row in torc.ENVIRONMENT)),
        'exits': table_markdown(('code', 'meaning'), ((row.code, row.meaning) for row in torc.EXITS)),
        'statuses': table_markdown(('status', 'meaning'), ((f'`{row.name}`', row.meaning) for row in torc.STATUSES)),
    }


def made_readme(text: str) -> str:
    """README with its reference parts made anew."""
    for name, part in reference_parts().items():
        begin, end = f'<!-- begin: {name} -->', f'<!-- end: {name} -->'
        before, found, rest = text.partition(begin)
        assert found and end in rest, f'README.md wants the lines {begin} and {end}'
        text = before + begin + '\n' + part + '\n' + end + rest.partition(end)[2]
    return text


def write_readme() -> int:
    """`test_torc.py readme`."""
    path = os.path.join(HERE, 'README.md')
    old = read_text(path)
    new = made_readme(old)
    if new != old:
        with open(path, 'w', encoding='utf-8') as file:
            file.write(new)
    print('README.md: ' + ('written' if new != old else 'as it was'))
    return 0


@slow
class ReadmeLaws(unittest.TestCase):
    """README.md tells the truth."""
    maxDiff = None

    def setUp(self) -> None:
        self.text = read_text(os.path.join(HERE, 'README.md'))

    def test_its_reference_is_what_the_tables_make(self):
        self.assertTrue(made_readme(self.text) == self.text, 'it is out of date; run: python3 test_torc.py readme')

    def test_every_command_that_it_shows_exists(self):
        names = {row.name for row in torc.COMMANDS}
        groups = {name.split()[0] for name in names}
        for line in re.findall(r'(?:^|`)(?:\$ )?(?:python3 )?torc\.py ((?:-f \w+ )?[a-z][-a-z]*(?: [a-z][-a-z]*)?)', self.text, re.MULTILINE):
            words = re.sub(r'^-f \w+ ', '', line).split()
            self.assertIn(words[0], groups, line)
            self.assertTrue(words[0] in names or ' '.join(words[:2]) in names, line)

    def test_every_command_has_help_and_an_example_that_parses(self):
        for row in torc.COMMANDS:
            self.assertTrue(row.help and row.example, row.name)
            self.assertTrue(row.example.startswith(row.name), row.name)
            self.assertEqual(row.name, torc.parse_command_line(shlex.split(row.example)).command.name, row.example)

    def test_its_lines_for_the_client_of_torc_show_the_token(self):
        lines = re.findall(r'(?:^    .*\n)+', self.text.partition("**A job that calls back**")[2], re.MULTILINE)[0]
        self.assertEqual(3, lines.count('\n'))
        with tempfile.NamedTemporaryFile('w') as file, \
                unittest.mock.patch.dict(os.environ, {'TORC_API_URL': 'http://here', 'TORC_TOKEN_FILE': file.name}):
            file.write('T' * 43 + '\n')
            file.flush()
            module = unittest.mock.Mock()       # in the place of theirs: we depend on nothing
            with unittest.mock.patch.dict(sys.modules, {'torc': module, 'torc.api': module}), warnings.catch_warnings():
                warnings.simplefilter('ignore', ResourceWarning)    # the lines leave it to Python to close the file
                exec(textwrap.dedent(lines), {'os': os})
        module.make_api.assert_called_once_with('http://here')
        (name, value), _ = module.make_api.return_value.api_client.set_default_header.call_args
        head = torc.parse_head(http_request('GET', '/x', **{name.lower(): value})[:-4])
        torc.check_access(head, b'T' * 43, {'127.0.0.1', 'localhost'})

    def type(self, words: str, world: World) -> str:
        """What a command leaves on a terminal of 80x24: progress is wiped out by what follows."""
        ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 80, 0, 0))
        environment = dict(world.environment, USER='you', TERM='xterm')
        environment.pop('COLUMNS', None)
        said, end = b'', time.monotonic() + 60
        with subprocess.Popen(['sh', '-c', words], cwd=world.directory, env=environment, stdin=theirs, stdout=theirs,
                              stderr=theirs, start_new_session=True) as process:
            os.close(theirs)
            with contextlib.suppress(OSError):      # EIO: the other side has closed (pty(7))
                while select.select([ours], [], [], max(0.0, end - time.monotonic()))[0]:
                    said += os.read(ours, 4096)
            process.kill()
        os.close(ours)
        text = re.sub('[^\n]*\x1b\\[K', '', said.decode().replace('\r\n', '\n'))
        self.assertLessEqual(max(map(len, text.split('\n'))), 80)
        return text

    def test_its_start_does_what_it_shows(self):
        block = re.search(r'```console\n(.*?)```', self.text, re.DOTALL).group(1)
        world = World()
        self.addCleanup(world.close)
        os.symlink(TORC, world.path('torc.py'))
        os.symlink(EXAMPLES, world.path('examples'))
        said = []
        for command in re.findall(r'^\$ (.*)$', block, re.MULTILINE):
            words = command.replace('python3 ', shlex.quote(sys.executable) + ' ')
            said.append(f'$ {command}\n' + self.type(words, world))

        def less_times(text: str) -> List[str]:
            return [line.rstrip() for line in re.sub(r'\b\d+(\.\d+)?s\b', 'TIME', text).splitlines()]
        self.assertEqual(less_times(block), less_times(''.join(said)))

    def test_its_python_does_what_it_says(self):
        script = re.search(r'```python\n(.*?)```', self.text, re.DOTALL).group(1)
        world = World()
        self.addCleanup(world.close)
        world.write('example.py', script)
        environment = dict(world.environment, PYTHONPATH=HERE, PYTHONDONTWRITEBYTECODE='1')
        done = subprocess.run([sys.executable, 'example.py'], cwd=world.directory, env=environment, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding='utf-8', timeout=60)
        said = re.findall(r'^# prints: (.*)$', script, re.MULTILINE)
        self.assertEqual((0, said), (done.returncode, done.stdout.splitlines()), done.stderr)
        self.assertGreater(len(said), 2)

    def test_installed_as_it_says_it_is_compiled_once(self):
        world = World()
        self.addCleanup(world.close)
        lines = re.search(r'((?:    .*\n)+?)\n', self.text.partition('**Install** as a command')[2]).group(1)
        script = world.write('bin/torc', textwrap.dedent(lines))
        shutil.copy(TORC, os.path.join(os.path.dirname(script), 'torc.py'))
        environment = {name: value for name, value in world.environment.items() if name != 'PYTHONDONTWRITEBYTECODE'}
        os.symlink(script, world.path('link'))
        for command in (script, world.path('link')):
            done = subprocess.run([sys.executable, command, 'exec', '-c', 'true'], cwd=world.directory, env=environment, stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding='utf-8', timeout=60)
            self.assertEqual(0, done.returncode, done.stderr)
            self.assertIn('1 completed', done.stdout + done.stderr)
        self.assertEqual(1, len(os.listdir(os.path.join(os.path.dirname(script), '__pycache__'))))

    def test_files_that_it_names_exist(self):
        for name in re.findall(r'\bexamples/[\w./]+\w', self.text):
            self.assertTrue(os.path.exists(os.path.join(HERE, name)), name)


@slow
class CommandExampleLaws(WorldTest):
    """Every example of the commands' table runs."""

    SPEC = """
        name: everything
        files: [{name: data, path: data.csv}]
        user_data: [{name: limits, data: {low: 1}}, {name: empty}]
        resource_requirements: [{name: spare, num_cpus: 1, memory: 1m}, {name: big, num_cpus: 1, memory: 1m}]
        failure_handlers: [{name: again, rules: [{exit_codes: [9]}]}]
        slurm_schedulers: [{name: sched, account: acct, nodes: 1, walltime: "01:00:00"}]
        actions: [{trigger_type: on_workflow_start, action_type: schedule_nodes, scheduler: sched, scheduler_type: slurm, num_allocations: 1}]
        jobs:
          - {name: greet, command: echo hello, resource_requirements: big, failure_handler: again, input_files: [data], input_user_data: [limits]}
          - {name: bad, command: exit 1, depends_on: [greet]}
        """
    SERVED = ('serve', 'ping', 'admin tail-api', 'admin reload-auth')      # run by other tests: they need, or are, a server

    def test_each_runs_on_a_finished_workflow(self):
        self.world.write('data.csv', '1')
        self.world.write('commands.txt', 'echo 1\necho 2\n')
        os.symlink(EXAMPLES, self.world.path('examples'))
        self.assertExit(1, self.world.cli('run', self.world.write('spec.yaml', self.SPEC)))
        self.assertExit(0, self.world.main('workflows', 'reinit', 1, '--async'))    # a task to wait for
        for line in ("events create 1 -d '{}'", 'access-groups create physicists', 'access-groups add-user 2 you', 'access-groups add-workflow 1 2',
                     'access-groups create geologists', 'htpasswd add -f users.htpasswd -p open-sesame -c 4 you'):
            self.assertExit(0, self.world.main(*shlex.split(line)))
        self.assertEqual({}, self.world.leave())      # the database is whole when its server has left
        shutil.copytree(self.world.path('torc_output'), self.world.path('kept'))
        for row in torc.COMMANDS:
            if row.name not in self.SERVED:
                with self.subTest(row.name):
                    self.world.leave()
                    shutil.rmtree(self.world.path('torc_output'))
                    shutil.copytree(self.world.path('kept'), self.world.path('torc_output'))
                    run = self.world.cli if row.name in ('run', 'exec') else self.world.main
                    self.assertExit(0, run(*shlex.split(row.example)))


# -------- examples --------

EXAMPLE_HEAD = re.compile(r'(?:#|//) shows:  (?P<shows>\S.*)\n(?:#|//) run:    python3 torc\.py run (?P<run>.*)\n(?:#|//) expect: (?P<expect>.*)\n')


@slow
class ExampleLaws(WorldTest):
    """Every example says what it shows, and does what it says."""

    def setUp(self) -> None:
        super().setUp()
        self.names = sorted(os.listdir(EXAMPLES))

    def head(self, name: str) -> Any:
        """The three comment lines that an example opens with."""
        match = EXAMPLE_HEAD.match(read_text(os.path.join(EXAMPLES, name)))
        self.assertTrue(match, f'{name}: three comment lines are wanted: shows, run, expect')
        return match

    def test_each_opens_with_three_lines_and_names_itself(self):
        self.assertGreaterEqual(len(self.names), 10)
        for name in self.names:
            self.assertTrue(self.head(name)['run'].endswith('examples/' + name), name)

    def test_each_is_right_without_a_warning(self):
        for name in self.names:
            self.assertEqual([], self.plan(name).warnings, name)

    def test_those_in_several_formats_are_the_same_workflow(self):
        stems = collections.Counter(os.path.splitext(name)[0] for name in self.names)
        several = sorted(stem for stem, count in stems.items() if count > 1)
        self.assertEqual(['diamond', 'sweep'], several)
        for stem in several:
            first, *others = [self.plan(name).body for name in self.names if os.path.splitext(name)[0] == stem]
            for other in others:
                self.assertEqual(json.loads(json.dumps(first)), json.loads(json.dumps(other)), stem)

    def plan(self, name: str) -> Any:
        """An example, read."""
        path = os.path.join(EXAMPLES, name)
        with open(path, 'rb') as file:
            return torc.read_plan(torc.read_document(file.read(), path), self.world.directory)

    def test_each_runs_to_its_end_twice_as_it_says(self):
        for name in self.names:
            words = shlex.split(self.head(name)['run'])
            for attempt in range(2 if name.endswith('.yaml') and name in ('diamond.yaml', 'retry.yaml') else 1):
                outcome = self.world.cli('-f', 'json', 'run', *(words[:-1] + [os.path.join(EXAMPLES, name)]))
                self.assertExit(0, outcome)
        client = self.world.connect()
        try:
            self.check_statuses(client)
        finally:
            client.close()

    def check_statuses(self, client: Any) -> None:
        """What each workflow has left is what its example says."""
        expected = {os.path.splitext(name)[0]: self.head(name)['expect'] for name in self.names}
        workflows = client.list_workflows()['items']
        self.assertEqual(set(expected), {workflow['name'] for workflow in workflows})
        for workflow in workflows:
            counts = collections.Counter(job['status'] for job in client.list_jobs(workflow_id=workflow['id'])['items'])
            told = ', '.join(f'{count} {status}' for status, count in sorted(counts.items()))
            self.assertEqual(expected[workflow['name']], told, workflow['name'])


# ======== Bench: how long things take, beside xargs and make on the same machine ========
#
# Machines differ and are noisy: contestants take turns within a round, and medians over rounds are compared. Wall time is
# from a program's start to its exit. CPU time is that of everything it started, the embedded server too: this process
# makes itself the one that inherits orphans (prctl(2), PR_SET_CHILD_SUBREAPER), so that their usage reaches it.

PR_SET_CHILD_SUBREAPER = 36


class Sample(NamedTuple):
    """One run of one contestant."""
    wall_s: float
    cpu_s: float


class Contestant(NamedTuple):
    """One way of doing a work."""
    name: str
    commands: Callable[[str], List[List[str]]]      # prepares a directory, returns what to run there, one after the other


class Contest(NamedTuple):
    """One work, the ways of doing it, and how often each has its turn. Ratios are to the first contestant."""
    title: str
    count: int          # of jobs
    rounds: int
    contestants: List[Contestant]


def become_subreaper() -> None:
    """Let orphaned descendants become children of this process, where the kernel knows how (Linux 3.4)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def bench_environment(directory: str) -> Dict[str, str]:
    """Environment of a measured program: no settings of this user."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith('TORC_')}
    environment.update(HOME=directory, XDG_STATE_HOME=os.path.join(directory, 'state'), PYTHONDONTWRITEBYTECODE='1')
    return environment


def measured(argv: Sequence[str], directory: str, codes: Sequence[int] = (0,)) -> Tuple[Sample, str]:
    """Run a program to its end, then wait for its orphans. Returns its times and its stdout."""
    with tempfile.TemporaryFile() as out:
        begun = time.perf_counter()
        process = subprocess.Popen(argv, cwd=directory, env=bench_environment(directory), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - begun
        process.returncode = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
        cpu_s = usage.ru_utime + usage.ru_stime
        with contextlib.suppress(ChildProcessError):
            while True:
                usage = os.wait4(-1, 0)[2]
                cpu_s += usage.ru_utime + usage.ru_stime
        out.seek(0)
        text = out.read().decode('utf-8', 'replace')
    if process.returncode not in codes:
        raise SystemExit(f'{" ".join(argv)}: exit {process.returncode}\n{text[-3000:]}')
    return Sample(wall_s, cpu_s), text


def write_file(directory: str, name: str, text: str) -> str:
    """Write a file and return its path."""
    path = os.path.join(directory, name)
    with open(path, 'w') as file:
        file.write(text)
    return path


# -------- the works --------

def torc_runs(python: str, text: str, *flags: str) -> Callable[[str], List[List[str]]]:
    """`torc.py run` of a workflow, two jobs at a time."""
    def commands(directory: str) -> List[List[str]]:
        return [[python, TORC, 'run', '--num-cpus', '2', '--memory-gb', '16', *flags, write_file(directory, 'spec.yaml', text)]]
    return commands


def xargs_runs(counts: Sequence[int], line: str) -> Callable[[str], List[List[str]]]:
    """xargs, two at a time: as many calls of it as there are stages."""
    def commands(directory: str) -> List[List[str]]:
        os.mkdir(os.path.join(directory, 'out'))
        stages = ' && '.join(f'seq -f s{stage}_%g {count} | xargs -P2 -I@ {line}' for stage, count in enumerate(counts))
        return [['sh', '-c', stages]]
    return commands


def make_runs(counts: Sequence[int], recipe: str) -> Callable[[str], List[List[str]]]:
    """make -j2 with a phony target a job; a stage waits for the one before."""
    def commands(directory: str) -> List[List[str]]:
        os.mkdir(os.path.join(directory, 'out'))
        lines = ['all: ' + ' '.join(f'stage{stage}' for stage in range(len(counts)))]
        for stage, count in enumerate(counts):
            names = ' '.join(f's{stage}_{number}' for number in range(1, count + 1))
            lines += [f'stage{stage}: {names}', f'{names}: {f"stage{stage - 1}" if stage else ""}', f'\t{recipe}', f'.PHONY: stage{stage} {names}']
        write_file(directory, 'Makefile', '\n'.join(lines) + '\n')
        return [['make', '-s', '-j2', 'all']]
    return commands


def staged_spec(counts: Sequence[int]) -> str:
    """A workflow of `true` in stages with barriers."""
    lines = ['name: bench', 'jobs:']
    for stage, count in enumerate(counts):
        lines += [f'  - name: s{stage}_{{i}}', '    command: "true"', f'    parameters: {{i: "1:{count}"}}']
        lines += [f'    depends_on_regexes: ["^s{stage - 1}_"]'] if stage else []
    return '\n'.join(lines) + '\n'


def contest_of(title: str, counts: Sequence[int], rounds: int, pythons: Dict[str, str]) -> Contest:
    """The same jobs by xargs, make and torc.py."""
    files = "sh -c 'true >out/@.o 2>out/@.e'"
    rivals = [Contestant('xargs -P2, output files', xargs_runs(counts, files)), Contestant('xargs -P2, no files', xargs_runs(counts, 'true')),
              Contestant('make -j2, output files', make_runs(counts, '@true >out/$@.o 2>out/$@.e'))]
    ours = [Contestant(f'torc.py {name}', torc_runs(python, staged_spec(counts))) for name, python in pythons.items()]
    return Contest(title, sum(counts), rounds, rivals + ours)


def creation_contest(count: int, rounds: int, pythons: Dict[str, str]) -> Contest:
    """Creating and initializing many jobs, two programs from start to exit."""
    def commands_of(python: str) -> Callable[[str], List[List[str]]]:
        def commands(directory: str) -> List[List[str]]:
            path = write_file(directory, 'spec.yaml', staged_spec([count]))
            return [[python, TORC, 'create', path], [python, TORC, 'workflows', 'init', '1']]
        return commands
    return Contest(f'create, then initialize {count:,} jobs', count, rounds,
                   [Contestant(f'torc.py {name}', commands_of(python)) for name, python in pythons.items()])


def barrier_contest(width: int, rounds: int, name: str, python: str) -> Contest:
    """A barrier, created, initialized and passed; first as many jobs without it."""
    ways = (('no barrier', [2 * width]), ('barrier', [width, width]))
    return Contest(f'{width:,} x {width:,} barrier, {name}', 2 * width, rounds,
                   [Contestant(f'torc.py {name}, {what}', torc_runs(python, staged_spec(counts))) for what, counts in ways])


def contests(pythons: Dict[str, str], is_quick: bool) -> List[Contest]:
    """All works that are whole programs."""
    scale, rounds = (10, 1) if is_quick else (1, 5)
    return [
        contest_of('1 job', [1], rounds * 2, pythons),
        contest_of(f'{1000 // scale:,} jobs of true', [1000 // scale], rounds, pythons),
        contest_of(f'ten stages of {100 // scale}', [100 // scale] * 10, rounds, pythons),
        contest_of(f'{10000 // scale:,} jobs of true', [10000 // scale], min(rounds, 3), pythons),
        creation_contest(100000 // scale, min(rounds, 3), pythons),
    ] + [barrier_contest(1000 // scale, min(rounds, 3), name, python) for name, python in pythons.items()]


# -------- the server's work, seen from inside and over HTTP --------

def store_figures(is_quick: bool) -> List[Tuple[str, str]]:
    """Claims from many and few ready jobs, in this process: each its own transaction, on disk when it returns."""
    rows = []
    for count in (1000, 10000 if is_quick else 100000):
        with tempfile.TemporaryDirectory() as directory:
            store = torc.Store(os.path.join(directory, 'torc.db'))
            workflow_id = ready_workflow(lambda op, params, body: call_in_transaction(store, op, params, body), count)
            free = {'num_cpus': 10, 'num_gpus': 0, 'num_nodes': 1, 'memory_gb': 10.0}
            calls = (('by resources', 'claim_jobs_based_on_resources', {'id': workflow_id, 'limit': 10}, free),
                     ('by queue', 'claim_next_jobs', {'id': workflow_id, 'limit': 10}, None))
            for what, op, params, body in calls:
                times = []
                for _ in range(40):
                    begun = time.perf_counter()
                    answer = call_in_transaction(store, op, dict(params), body)
                    times.append((time.perf_counter() - begun) * 1000)
                    assert len(answer['jobs']) == 10, answer
                times.sort()
                rows.append((f'claim 10 of {count:,} ready jobs, {what}', f'{times[len(times) // 2]:.2f} ms (p95 {times[-2]:.2f})'))
            rows += apply_figures(store, count)
            store.close()
    return rows


def apply_figures(store: Any, count: int) -> List[Tuple[str, str]]:
    """Let a workflow of as many jobs follow its file: as it is, and with another command for every job."""
    rows = []
    workflow_id = ready_workflow(lambda op, params, body: call_in_transaction(store, op, params, body), count)
    for what, command in (('as it is', ''), ('edited everywhere', ' ')):
        body = json.loads(json.dumps(plan_body(count)))
        for job in body['jobs']:
            job[1] += command
        begun = time.perf_counter()
        answer = call_in_transaction(store, 'apply_spec', {'id': workflow_id}, body)
        rows.append((f'apply a file of {count:,} jobs, {what}', f'{time.perf_counter() - begun:.2f} s'))
        assert (len(answer['to_run']), bool(answer['changes'])) == (count, bool(command)), answer
    return rows


def call_in_transaction(store: Any, op: str, params: Dict[str, Any], body: Any) -> Any:
    """One operation in a transaction of its own."""
    with store.transaction():
        return torc.call_operation(store, op, params, body)


def ready_workflow(call: Callable[[str, Dict[str, Any], Any], Any], count: int) -> int:
    """Create and initialize a workflow of as many jobs."""
    text = staged_spec([count])
    plan = torc.read_plan(torc.read_document(text.encode(), 'spec.yaml'), '.')
    workflow_id = call('create_workflow_from_spec', {}, json.loads(json.dumps(plan.body)))['workflow_id']
    call('initialize_jobs', {'id': workflow_id}, None)
    return workflow_id


class Wire:
    """A kept-alive connection that speaks just enough HTTP, so that the client's share of a measurement is small."""

    def __init__(self, url: str, token: str, client: Optional[socket.socket] = None) -> None:
        parts = urllib.parse.urlsplit(url)
        self.prefix, self.host = parts.path, parts.netloc
        self.socket = client or socket.create_connection((parts.hostname, parts.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.file = self.socket.makefile('rb')
        self.token = token

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """One request; its answer's JSON."""
        data = b'' if body is None else json.dumps(body).encode()
        head = f'{method} {self.prefix}{path} HTTP/1.1\r\nHost: {self.host}\r\nAuthorization: Bearer {self.token}\r\n'
        self.socket.sendall((head + f'Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n').encode() + data)
        status = int(self.file.readline().split()[1])
        length = 0
        for line in iter(self.file.readline, b'\r\n'):
            if line.lower().startswith(b'content-length:'):
                length = int(line.split(b':')[1])
        text = self.file.read(length)
        assert status == 200, (status, text[:500])
        return json.loads(text.decode()) if text else None

    def close(self) -> None:
        """Hang up."""
        self.file.close()
        self.socket.close()


def completion_of(job_id: int, workflow_id: int, node_id: int) -> Dict[str, Any]:
    """A result as runners post it."""
    return {'job_id': job_id, 'workflow_id': workflow_id, 'run_id': 1, 'attempt_id': 1, 'compute_node_id': node_id, 'return_code': 0,
            'exec_time_minutes': 0.01, 'completion_time': '2026-11-21T12:00:00.000Z', 'status': 'completed'}


def server_figures(python: str, is_quick: bool) -> List[Tuple[str, str]]:
    """Completions over HTTP by one client, on disk before they are answered; memory with many jobs stored."""
    count, stored = (400, 30000) if is_quick else (4000, 300000)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        stem = os.path.join(directory, 'serve')
        server = Background([python, TORC, 'serve', '--port', '0', '--db', os.path.join(directory, 'torc.db')], directory, bench_environment(directory), stem)
        try:
            url = wait_for_line(server)
            with open(glob.glob(os.path.join(directory, '*.token'))[0]) as file:
                wire = Wire(url, file.read().strip())
            rows += completion_figures(wire, server, count)
            workflow_id = wire.ask('POST', '/workflows/from_spec', plan_body(stored - 3 * count))['workflow_id']
            wire.ask('POST', f'/workflows/{workflow_id}/initialize_jobs')
            wire.close()
            status = read_text(f'/proc/{server.pid}/status')
            peak, now = (int(re.search(name + r':\s*(\d+) kB', status).group(1)) // 1024 for name in ('VmHWM', 'VmRSS'))
            rows.append((f"server's memory with {stored:,} jobs stored", f'{now} MB (peak {peak} MB)'))
        finally:
            server.send(signal.SIGTERM)
            server.finish(20)
    return rows


def plan_body(count: int) -> Any:
    """Request that creates as many jobs."""
    return torc.read_plan(torc.read_document(staged_spec([count]).encode(), 'spec.yaml'), '.').body


def completion_figures(wire: Wire, server: Background, count: int) -> List[Tuple[str, str]]:
    """Completions a second: one a request, then a hundred a request."""
    workflow_id = wire.ask('POST', '/workflows/from_spec', plan_body(3 * count))['workflow_id']
    wire.ask('POST', f'/workflows/{workflow_id}/initialize_jobs')
    node = wire.ask('POST', '/compute_nodes', {
        'workflow_id': workflow_id, 'hostname': 'bench', 'pid': os.getpid(), 'start_time': '2026-11-21T12:00:00.000Z', 'is_active': True,
        'num_cpus': 2, 'memory_gb': 8.0, 'num_gpus': 0, 'num_nodes': 1, 'compute_node_type': 'local'})['id']
    jobs = []
    while len(jobs) < 3 * count:
        jobs += [job['id'] for job in wire.ask('POST', f'/workflows/{workflow_id}/claim_next_jobs?limit=1000')['jobs']]
    rows = []
    singles, batched = jobs[:count], jobs[count:]
    begun, used = time.perf_counter(), cpu_of(server.pid)
    for job_id in singles:
        wire.ask('POST', f'/jobs/{job_id}/complete_job/completed/1', completion_of(job_id, workflow_id, node))
    rows.append(rate_row('completions, one a request', count, begun, cpu_of(server.pid) - used))
    begun, used = time.perf_counter(), cpu_of(server.pid)
    for start in range(0, len(batched), 100):
        entries = [{'job_id': job_id, 'status': 'completed', 'run_id': 1, 'result': completion_of(job_id, workflow_id, node)}
                   for job_id in batched[start:start + 100]]
        wire.ask('POST', f'/workflows/{workflow_id}/batch_complete_jobs', {'completions': entries})
    rows.append(rate_row('completions, a hundred a request', len(batched), begun, cpu_of(server.pid) - used))
    return rows


def rate_row(title: str, count: int, begun: float, cpu_s: float) -> Tuple[str, str]:
    """'5,000 a second', and what the server's CPU spent on each."""
    wall_s = time.perf_counter() - begun
    return title, f'{count / wall_s:,.0f}/s (server CPU {cpu_s / count * 1e6:.0f} us each)'


def cpu_of(pid: int) -> float:
    """CPU seconds that a process has used (proc(5), stat, fields 14 and 15)."""
    fields = read_text(f'/proc/{pid}/stat').rpartition(')')[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')


def wait_for_line(server: Background) -> str:
    """URL of a server that has just been started."""
    end = time.monotonic() + 20
    while time.monotonic() < end and not server.has_ended():
        found = re.search(r'^torc: serving (http\S+)$', server.out, re.MULTILINE)
        if found:
            return found.group(1)
        select.select([], [], [], 0.005)
    raise AssertionError(f'no server: {server}')


# -------- many connections --------
#
# One loop with epoll holds all connections, each with one request under way: as soon as it is answered the next one goes out. Its own
# CPU time for a request is told beside the server's: the server is what is measured while that is the smaller one (two cores).

CONNECTIONS = (1, 16, 256, 1000)
LOAD_S = 3.0


class Caller:
    """One kept-alive connection of a load. `kind` is a row of LOADS."""

    def __init__(self, client: socket.socket, load: 'Load', number: int) -> None:
        self.socket, self.load, self.number = client, load, number
        self.node_id = 0            # of the compute node that it plays, for those that need one
        self.jobs = []              # type: List[int]  # claimed, not yet completed
        self.received = b''
        self.sent_at = 0.0

    def send(self, method: str, path: str, body: Any = None) -> None:
        """Let a request go out."""
        data = b'' if body is None else json.dumps(body).encode()
        head = f'{method} {self.load.prefix}{path} HTTP/1.1\r\n{self.load.fields}Content-Length: {len(data)}\r\n\r\n'
        self.sent_at = time.perf_counter()
        self.socket.sendall(head.encode() + data)

    def receive(self) -> Optional[bytes]:
        """Body of the answer, once it is whole."""
        self.received += self.socket.recv(65536)
        head, found, body = self.received.partition(b'\r\n\r\n')
        if not found or len(body) < int(head[head.index(b'content-length: ') + 16:].split(b'\r', 1)[0]):
            return None
        assert head.startswith(b'HTTP/1.1 200'), self.received[:1000]
        self.received = b''
        return body

    def ask_ping(self, answer: bytes) -> None:
        """The least that can be asked."""
        self.send('GET', '/ping')

    def ask_pair(self, answer: bytes) -> None:
        """A claim, then a completion: two requests."""
        if self.jobs:
            end = completion_of(self.jobs.pop(), self.load.workflow_id, self.load.node_id)
            self.send('POST', f'/jobs/{end["job_id"]}/complete_job/completed/1', end)
        elif self.is_claiming:
            self.jobs = [job['id'] for job in json.loads(answer.decode())['jobs']]
            assert self.jobs, 'no jobs are left'
            self.is_claiming = False
            self.ask_pair(b'')
        else:
            self.is_claiming = True
            self.send('POST', f'/workflows/{self.load.workflow_id}/claim_next_jobs?limit=1')

    is_claiming = False

    def ask_sync(self, answer: bytes) -> None:
        """A runner's turn: the end of one job, and the claim of the next."""
        if answer:
            self.jobs = [job['id'] for job in json.loads(answer.decode())['jobs']]
            assert self.jobs, 'no jobs are left'
        moment = '2026-11-21T12:00:00.000Z'
        ends = [{'job_id': job_id, 'attempt_id': 1, 'return_code': 0, 'status': 'completed', 'exec_time_minutes': 0.01, 'completion_time': moment} for job_id in self.jobs]
        want = {'strategy': 'resources', 'limit': 1, 'num_cpus': 2, 'memory_gb': 8.0, 'num_gpus': 0, 'num_nodes': 1}
        self.send('POST', f'/workflows/{self.load.workflow_id}/runner_sync', {
            'compute_node_id': self.load.node_id, 'run_id': 1, 'completions': ends, 'started': [[job_id, 1, moment] for job_id in self.jobs], 'want': want})


LOADS = (('GET /ping', Caller.ask_ping), ('claim, then complete', Caller.ask_pair), ('runner_sync: one end, one claim', Caller.ask_sync))


class Load:
    """A server, and connections that keep it busy."""

    def __init__(self, url: str, token: str, tls: Any = None) -> None:
        self.url, self.token, self.tls = urllib.parse.urlsplit(url), token, tls
        self.prefix = self.url.path
        self.fields = f'Host: {self.url.netloc}\r\nAuthorization: Bearer {token}\r\n'
        self.workflow_id = self.node_id = 0

    def connect(self) -> socket.socket:
        """One connection."""
        client = socket.create_connection((self.url.hostname, self.url.port))
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self.tls.wrap_socket(client, server_hostname='localhost') if self.tls else client

    def prepare(self, count: int) -> None:
        """Jobs to be claimed, and a node that claims them."""
        wire = Wire(self.url.geturl(), self.token, self.connect())
        self.workflow_id = wire.ask('POST', '/workflows/from_spec', plan_body(count))['workflow_id']
        wire.ask('POST', f'/workflows/{self.workflow_id}/initialize_jobs')
        self.node_id = wire.ask('POST', '/compute_nodes', {
            'workflow_id': self.workflow_id, 'hostname': 'bench', 'pid': os.getpid(), 'start_time': '2026-11-21T12:00:00.000Z', 'is_active': True,
            'num_cpus': 2, 'memory_gb': 8.0, 'num_gpus': 0, 'num_nodes': 1, 'compute_node_type': 'local'})['id']
        wire.close()

    def run(self, ask: Callable[[Caller, bytes], None], connections: int, seconds: float, server_pid: int) -> str:
        """Keep so many connections busy for a while; what came of it."""
        callers = {}    # type: Dict[int, Caller]
        poll = select.epoll()
        for number in range(connections):
            caller = Caller(self.connect(), self, number)
            callers[caller.socket.fileno()] = caller
            poll.register(caller.socket.fileno(), select.EPOLLIN)
        waits, begun = [], time.perf_counter()      # type: List[float], float
        own_s, server_s = time.process_time(), cpu_of(server_pid)
        for caller in callers.values():
            ask(caller, b'')
        while time.perf_counter() - begun < seconds:
            for number, _ in poll.poll(1):
                caller = callers[number]
                answer = caller.receive()
                if answer is not None:
                    waits.append(time.perf_counter() - caller.sent_at)
                    ask(caller, answer)
        wall_s, own_s, server_s = time.perf_counter() - begun, time.process_time() - own_s, cpu_of(server_pid) - server_s
        for caller in callers.values():
            caller.socket.close()
        poll.close()
        waits.sort()
        return (f'{len(waits) / wall_s:,.0f}/s, {waits[len(waits) // 2] * 1e3:.2f} / {waits[int(len(waits) * 0.99)] * 1e3:.2f} ms, '
                f'CPU {server_s / len(waits) * 1e6:.0f} + {own_s / len(waits) * 1e6:.0f} us')


def load_figures(python: str, is_tls: bool, is_quick: bool) -> List[Tuple[str, str]]:
    """All loads with all numbers of connections on one server: title, figures."""
    rows, seconds = [], 0.5 if is_quick else LOAD_S
    with tempfile.TemporaryDirectory() as directory:
        flags, tls = [], None
        if is_tls:
            key, certificate = write_file(directory, 'key.pem', TLS_KEY), write_file(directory, 'good.pem', TLS_CERTIFICATES['good'])
            os.chmod(key, 0o600)
            flags, tls = ['--tls-cert', certificate, '--tls-key', key], ssl.create_default_context(cafile=certificate)
        server = Background([python, TORC, 'serve', '--port', '0', '--db', os.path.join(directory, 'torc.db'), *flags], directory, bench_environment(directory),
                            os.path.join(directory, 'serve'))
        try:
            url = wait_for_line(server)
            load = Load(url, read_text(os.path.join(directory, 'torc.db.token')).strip(), tls)
            for title, ask in LOADS:
                for connections in CONNECTIONS:
                    if ask is not Caller.ask_ping:
                        load.prepare(int(seconds * 6000) + connections)
                    rows.append((f'{title}; {connections:,} open', load.run(ask, connections, seconds, server.pid)))
                    print(f'{python_name(python)}{" TLS" if is_tls else ""}: {rows[-1]}', file=sys.stderr)
        finally:
            server.send(signal.SIGTERM)
            server.finish(20)
    return rows


def load_table(names: Dict[str, str], is_quick: bool) -> str:
    """Requests a second, by number of connections, transport and interpreter."""
    torc.raise_descriptor_limit()
    columns = [(name, load_figures(python, False, is_quick)) for name, python in names.items()]
    first, python = list(names.items())[0]
    columns.insert(1, (f'{first}, TLS', load_figures(python, True, is_quick)))
    rows = [[titles[0][0]] + [figure for _, figure in titles] for titles in zip(*(rows for _, rows in columns))]
    return table_markdown(['kept-alive connections: requests/s, median / p99, CPU of server + client for a request'] + [name for name, _ in columns], rows)


# -------- the report --------

def run_bench(pythons: Sequence[str], is_quick: bool, parts: Sequence[str]) -> int:
    """`test_torc.py bench [PART...]`: parts are words of the works' titles, or `server`."""
    if list(parts) == ['store-figures']:        # asked of another interpreter, below
        print(json.dumps(store_figures(is_quick)))
        return 0
    become_subreaper()
    names = {python_name(python): python for python in pythons}
    chosen = [contest for contest in contests(names, is_quick) if not parts or any(part in contest.title for part in parts)]
    samples = collections.defaultdict(list)     # type: Dict[Tuple[str, str], List[Sample]]
    for number in range(max([contest.rounds for contest in chosen] or [0])):
        for contest in chosen:
            for contestant in contest.contestants if number < contest.rounds else ():
                samples[contest.title, contestant.name].append(one_turn(contestant))
                print(f'round {number + 1}: {contest.title}: {contestant.name}: {samples[contest.title, contestant.name][-1].wall_s:.3f} s', file=sys.stderr)
    print(f'{os.cpu_count()} CPUs, {platform.system()} {platform.release()}; medians, least in brackets\n')
    rows = []
    for contest in chosen:
        rows += contest_rows(contest, [samples[contest.title, contestant.name] for contestant in contest.contestants])
    print(table_markdown(('work', 'who', 'wall s', 'CPU s', 'jobs/s', 'wall ratio', 'CPU ratio'), rows))
    if not parts or 'server' in parts:
        print('\n' + table_markdown(['server'] + list(names), figures_by_name(names, is_quick)))
        print('\n' + load_table(names, is_quick))
    return 0


def python_name(python: str) -> str:
    """'3.11.7' for an interpreter."""
    return subprocess.run([python, '-c', 'import platform; print(platform.python_version())'], stdout=subprocess.PIPE, check=True,
                          encoding='utf-8').stdout.strip()


def one_turn(contestant: Contestant) -> Sample:
    """One run in a fresh directory."""
    with tempfile.TemporaryDirectory() as directory:
        samples = [measured(argv, directory)[0] for argv in contestant.commands(directory)]
    return Sample(sum(sample.wall_s for sample in samples), sum(sample.cpu_s for sample in samples))


def contest_rows(contest: Contest, results: Sequence[Sequence[Sample]]) -> List[List[str]]:
    """The report's lines of one work."""
    def median(values: Iterable[float]) -> float:
        ordered = sorted(values)
        return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2

    rows, first = [], None
    for contestant, samples in zip(contest.contestants, results):
        wall_s, cpu_s = median(sample.wall_s for sample in samples), median(sample.cpu_s for sample in samples)
        first = first or (wall_s, cpu_s)
        rows.append([contest.title, contestant.name, f'{wall_s:.3f} ({min(sample.wall_s for sample in samples):.3f})', f'{cpu_s:.2f}',
                     f'{contest.count / wall_s:,.0f}', f'{wall_s / first[0]:.2f}', f'{cpu_s / max(first[1], 0.001):.2f}'])
    return rows


def figures_by_name(names: Dict[str, str], is_quick: bool) -> List[List[str]]:
    """Claims, completions and memory: a line each, a column for each interpreter."""
    columns = []
    for python in names.values():
        argv = [python, os.path.abspath(__file__), 'bench', 'store-figures'] + (['--quick'] if is_quick else [])
        inside = subprocess.run(argv, stdout=subprocess.PIPE, check=True, encoding='utf-8').stdout
        columns.append([tuple(row) for row in json.loads(inside)] + server_figures(python, is_quick))
    return [[titles[0][0]] + [figure for _, figure in titles] for titles in zip(*columns)]


# ======== Main: choosing, running and counting ========
#
# One test after another, in the order of the file. A skip is counted by its group, and the last line is the sum.

TEST_LIMIT_S = 300      # a test that takes longer hangs: where is shown, and the run ends


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
        faulthandler.dump_traceback_later(TEST_LIMIT_S, exit=True)
        self.begun, self.word = time.monotonic(), 'ok'

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        faulthandler.cancel_dump_traceback_later()
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


def chosen_tests(patterns: Sequence[str], is_fast: bool) -> List[unittest.TestSuite]:
    """All tests of this file in its order, or those whose title holds one of the patterns; none marked @slow if fast."""
    loader, found = unittest.TestLoader(), []
    for case in {value for value in globals().values() if isinstance(value, type) and issubclass(value, unittest.TestCase)}:
        if is_fast and 'is_slow' in vars(case):
            continue
        names = sorted(loader.getTestCaseNames(case), key=lambda name: line_of(case, name))
        chosen = [name for name in names if not patterns or any(
            fnmatch.fnmatchcase(f'{case.__name__}.{name}'.lower(), f'*{pattern.lower()}*') for pattern in patterns)]
        if chosen:
            found.append((line_of(case, names[0]), unittest.TestSuite(map(case, chosen))))
    return [suite for _, suite in sorted(found, key=operator.itemgetter(0))]


def line_of(case: type, name: str) -> int:
    """Where a test begins."""
    return inspect.unwrap(getattr(case, name)).__code__.co_firstlineno


def run_tests(patterns: Sequence[str], required: Sequence[str], is_fast: bool, is_verbose: bool) -> int:
    """Run, report, count. 1 if anything failed."""
    warnings.simplefilter('error', ResourceWarning)
    begun = time.monotonic()
    score = Score(required, is_verbose)
    unittest.TestSuite(chosen_tests(patterns, is_fast)).run(score)
    failed = score.failed_tests()
    print()
    for title, texts in failed.items():
        print('=' * 100, f'FAILED {title}', *texts, sep='\n')
    if is_verbose:
        print('slowest:', *(f'{took:7.2f} s  {title}' for took, title in sorted(score.times, reverse=True)[:15]), sep='\n')
    for title in failed:
        print('FAILED', title)
    for group, reasons in score.groups.items():
        print(f'skipped, group {group}: {LOSSES.get(group) or "; ".join(sorted(reasons))}')
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
    parser.add_argument('--fast', action='store_true', help='only tests that are quick: about a third of the time')
    parser.add_argument('--python', metavar='PATH', help='another interpreter (bench: beside this one)')
    parser.add_argument('--quick', action='store_true', help='bench, faults: small sizes')
    parser.add_argument('--seed', type=int, help='faults: the moments of the kills')
    options = parser.parse_args(argv)
    prepare_process()
    if options.patterns[:1] == ['bench']:
        return run_bench([sys.executable] + ([options.python] if options.python else []), options.quick, options.patterns[1:])
    if options.python:
        words = [word for word in argv if word not in ('--python', options.python, f'--python={options.python}')]
        return subprocess.call([options.python, os.path.abspath(__file__)] + words)
    if options.patterns[:1] == ['faults']:
        return run_faults(options.quick, options.seed, options.patterns[1:])
    if options.patterns == ['readme']:
        return write_readme()
    required = [group for group in options.require.split(',') if group]
    return run_tests(options.patterns, required, options.fast, options.verbose)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
