"""The examples of the guides to extensions, docs/how-to/add-a-*.md, as files of a reader."""

from tests.support import documentation
from tests.support.runs import ROOT

PAGES = sorted((ROOT / 'docs/how-to').glob('add-a-*.md'))


def example(path):
    """The code block whose first line is '# PATH'."""
    codes = [code for page in PAGES for code in documentation.blocks(page.read_text(), 'python')]
    (code,) = [code for code in codes if code.startswith(f'# {path}\n')]
    return code


def load_example(path, module):
    """Runs the example in a module."""
    exec(example(path), vars(module))
