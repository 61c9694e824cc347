"""The examples of docs/extending.md, as a reader would copy them into files."""

import re

from tests.support.runs import ROOT


def example(path):
    """The code whose first line is '# PATH'."""
    text = (ROOT / 'docs/extending.md').read_text()
    code = []
    for line in text.partition(f'    # {path}\n')[2].splitlines():
        if line and not line.startswith('    '):
            break
        code.append(re.sub('^    ', '', line))
    lines = '\n'.join(code)
    return lines.partition('\npython -m ')[0]


def load_example(path, module):
    """Runs the example in a module."""
    exec(example(path), vars(module))
