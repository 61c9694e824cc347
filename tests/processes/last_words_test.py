import subprocess
import sys

from vit_jax.processes import last_words

# Ends with words set; what the process does next is added.
PROGRAM = """
import os, signal
from vit_jax.processes.last_words import LastWords
words = LastWords()
words.will_be('first words')
words.will_be({words!r})
"""


def stderr(words, end):
    """What a process prints on stderr, its companion included."""
    process = subprocess.run(
        [sys.executable, '-c', PROGRAM.format(words=words) + end],
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert not process.stdout
    return process.stderr


def test_the_words_of_a_killed_process_are_said():
    assert stderr('error: killed', 'os.kill(os.getpid(), signal.SIGKILL)') == 'error: killed\n'


def test_the_companion_outlives_the_signals_of_its_process_and_its_group():
    end = 'os.setpgrp() if os.getpgrp() != os.getpid() else 0\nos.killpg(0, signal.SIGTERM)'
    assert stderr('error: ended', end) == 'error: ended\n'


def test_words_may_be_said_at_once():
    end = "words.say()\nprint('afterwards', file=__import__('sys').stderr)"
    assert stderr('error: now', end) == 'error: now\nafterwards\n'


def test_nothing_is_said_at_a_regular_end():
    assert stderr('', '') == ''


def test_words_after_the_end_are_no_error():
    """Two threads may end the companion: the watchdog and the command."""
    words = last_words.LastWords()
    words.drop()
    words.will_be('late')
    words.drop()
