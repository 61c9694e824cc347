import subprocess
import sys

from vit_jax.processes import last_words

# Sets a line; each test adds the end of the process.
PROGRAM = """
import os, signal
from vit_jax.processes.last_words import LastWords
words = LastWords()
words.set_line('first words')
words.set_line({words!r})
"""


def stderr(words, end):
    """Runs the program and returns the stderr of the process and its companion."""
    process = subprocess.run(
        [sys.executable, '-c', PROGRAM.format(words=words) + end],
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert not process.stdout
    return process.stderr


def test_line_of_a_killed_process_is_printed():
    assert stderr('error: killed', 'os.kill(os.getpid(), signal.SIGKILL)') == 'error: killed\n'


def test_companion_outlives_a_signal_to_the_process_group():
    end = 'os.setpgrp() if os.getpgrp() != os.getpid() else 0\nos.killpg(0, signal.SIGTERM)'
    assert stderr('error: ended', end) == 'error: ended\n'


def test_print_now_prints_the_line_immediately():
    end = "words.print_now()\nprint('afterwards', file=__import__('sys').stderr)"
    assert stderr('error: now', end) == 'error: now\nafterwards\n'


def test_empty_line_is_not_printed():
    assert stderr('', '') == ''


def test_line_after_the_end_of_the_companion_is_ignored():
    """The watchdog and the command may both end the companion."""
    words = last_words.LastWords()
    words.drop()
    words.set_line('late')
    words.drop()
