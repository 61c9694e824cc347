"""The examples of docs/how-to/extend.md, as files of a reader."""

import re

from tests.support.runs import ROOT

PAGE = ROOT / 'docs/how-to/extend.md'


def example(path):
    """The code block whose first line is '# PATH'."""
    blocks = re.findall(r'^```python\n(.*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (code,) = [block for block in blocks if block.startswith(f'# {path}\n')]
    return code


def load_example(path, module):
    """Runs the example in a module."""
    exec(example(path), vars(module))
