"""Commands, fields, links, tables and snippets of the README and of every page in docs/."""

import ast
import importlib
import re
import shlex
import sys

import numpy as np
import pytest

from tests.support import documentation, small
from tests.support.datasets import write_images
from tests.support.documentation import PAGES, WRITTEN, name_of
from tests.support.extending import example
from tests.support.parameters import apply, randomised
from tests.support.runs import ROOT
from tests.support.vit import SMALL, random_images
from vit_jax import cli, models, vtab, weights
from vit_jax import config as config_lib

NAME = 'vit_tiny_patch16_224.safetensors'
MOST_COLUMNS = 5
MOST_WORDS = 15  # of a cell
by_page = pytest.mark.parametrize('page', WRITTEN, ids=name_of)


class Parsed(BaseException):
    """Ends a command as soon as its own parser has accepted the arguments."""


@pytest.fixture(scope='module')
def my_lab(tmp_path_factory):
    """The package that readers of the guides to extensions write."""
    root = tmp_path_factory.mktemp('outside')
    (root / 'my_lab').mkdir()
    for name in ('focal', 'balanced', 'norms', 'blocks'):
        (root / 'my_lab' / f'{name}.py').write_text(example(f'my_lab/{name}.py'))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root))
        yield
    for name in [name for name in sys.modules if name.partition('.')[0] == 'my_lab']:
        del sys.modules[name]


@pytest.fixture
def stop_after_parsing(monkeypatch, my_lab):
    """Makes commands raise Parsed after parsing and, if they have a config, checking it."""
    parse_args, parse_with_config = cli.Parser.parse_args, cli.parse_with_config

    def stop(parse):
        def parse_and_stop(*args, **kwargs):
            parse(*args, **kwargs)
            raise Parsed

        return parse_and_stop

    monkeypatch.setattr(cli.Parser, 'parse_args', stop(parse_args))
    monkeypatch.setattr(cli, 'parse_with_config', stop(parse_with_config))
    monkeypatch.setattr(vtab, 'read_tasks', stop(vtab.read_tasks))
    monkeypatch.chdir(ROOT)


def commands_of(pages):
    for page in pages:
        for module, arguments in documentation.commands(page.read_text()):
            yield pytest.param(module, arguments, id=f'{name_of(page)}: {shlex.join(arguments)}')


@pytest.mark.parametrize(('module', 'arguments'), list(commands_of(WRITTEN)))
def test_every_command_parses_and_its_config_is_valid(module, arguments, stop_after_parsing):
    """Readers replace capital words such as WEIGHTS and DATA."""
    if arguments == ['--help']:
        return
    with pytest.raises(Parsed):
        importlib.import_module(module).main(arguments)


def test_the_readme_has_seven_commands_and_every_tool_has_a_page():
    readme = documentation.commands((ROOT / 'README.md').read_text())
    assert len([module for module, _ in readme]) == 7
    shown = {module for page in WRITTEN for module, _ in documentation.commands(page.read_text())}
    tools = 'main fit evaluate predict convert sweep vtab plan figures report benchmark'
    assert {f'vit_jax.{tool}' for tool in tools.split()} <= shown


@by_page
def test_config_files_and_fields_in_the_text_exist(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    known = config_lib.flatten(config_lib.base('r50x1')) | config_lib.flatten(config_lib.base())
    sections = {field.partition('.')[0] for field in known if '.' in field}
    for code in documentation.inline_code(page.read_text()):
        file = re.fullmatch(r'(?:--config=)?(configs/\w+\.py(?::[\w,]+)?)', code)
        if file and not re.search('[A-Z]{3}', file[1]):
            config_lib.checked(cli.read_config_file(file[1]))
        option = re.match(r'--config\.([a-z0-9_.]+)=', code)
        field = re.fullmatch(r'([a-z_]+\.[a-z0-9_.]+)(=.*)?', code)
        is_file = re.search(r'\.(py|json|onnx|safetensors)$', code)
        if option or (field and field[1].partition('.')[0] in sections and not is_file):
            name = (option or field)[1]
            is_known = name in known or any(each.startswith(f'{name}.') for each in known)
            assert is_known or re.fullmatch(r'evals\.\w+\.\w+', name), code


@pytest.mark.parametrize('page', PAGES, ids=name_of)
def test_links_and_anchors_resolve(page):
    for target in documentation.links(page.read_text()):
        path, _, anchor = target.partition('#')
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            assert anchor in documentation.anchors(linked), target


@by_page
def test_tables_are_narrow(page):
    for row in documentation.tables(page.read_text()):
        assert len(row) <= MOST_COLUMNS, row
        for cell in row:
            assert len(cell.split()) <= MOST_WORDS, cell


def snippets(name):
    return documentation.blocks((ROOT / name).read_text(), 'python')


def test_snippet_of_the_readme(tmp_path):
    (code,) = snippets('README.md')
    names = {}
    exec(code.replace('224, 224', '32, 32').replace("'b16'", "'ti16'"), names)
    assert names['logits'].shape == (1, 1000)


@pytest.fixture
def released(tmp_path, monkeypatch):
    """A small model in a file named like the released ViT-Ti/16, in the current directory."""
    monkeypatch.chdir(tmp_path)
    given = small.make('vit', gelu='erf', hidden_size=192, num_heads=3)
    weights.save(given, NAME, 'timm')
    return given


def test_snippets_of_the_python_tutorial(tmp_path, released):
    """They run in order and give the shapes that they state."""
    write_images(tmp_path, ['x'], 2, size=(20, 30))
    files = [str(path) for path in sorted(tmp_path.glob('x/*'))]
    code = ''.join(snippets('docs/tutorials/python.md')).replace('224, 224', '16, 16')
    names = {}
    exec(code.replace("['a.jpg', 'b.png']", repr(files)), names)
    assert names['batch'].shape == names['mine'].shape == (2, 16, 16, 3)
    assert (names['features'].shape, names['probabilities'].shape) == ((2, 192), (2, 7))
    assert names['outputs']['attention'].shape == (2, 2, 3, 5, 5)
    weights.predictor(names['w'])(names['mine'])
    assert weights.load('ti16').preprocess['resize'] == 'bicubic'
    np.testing.assert_array_equal(
        weights.load('ti16.safetensors').params['cls'], released.params['cls']
    )


def test_snippet_of_the_tour_of_a_model(tmp_path, released):
    write_images(tmp_path, ['x'], 1, size=(20, 30))
    (file,) = tmp_path.glob('x/*')
    (code,) = snippets('docs/tutorials/look-inside.md')
    names = {}
    exec(code.replace("['cat.jpg']", repr([str(file)])), names)
    assert names['seen'].weights.shape == (2, 1, 3, 5, 5)
    assert names['maps'].rollout(names['seen']).shape == (1, 2, 2)


def test_snippet_that_writes_a_table_of_classes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'result.json').write_text(
        '{"classes": {"ant": {"accuracy": 0.5, "num_examples": 4}}}'
    )
    (code,) = snippets('docs/how-to/evaluate.md')
    exec(code, {})
    assert (tmp_path / 'classes.csv').read_text().split() == ['class,accuracy,images', 'ant,0.5,4']


def test_the_block_of_the_guide_equals_the_one_of_the_project(my_lab):
    images = random_images(2, 8, 12, 3)
    ours = models.build(SMALL, 5, block='parallel')
    theirs = models.build(SMALL, 5, block='my_lab.blocks:ParallelBlock')
    params = {'params': randomised(ours, images)}
    np.testing.assert_allclose(
        apply(theirs, params, images), apply(ours, params, images), rtol=1e-5, atol=1e-6
    )


def texts_of_the_program():
    """The text of every string in vit_jax/; a formatted value is a line break."""
    for path in (ROOT / 'vit_jax').rglob('*.py'):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                parts = [getattr(value, 'value', '\n') for value in node.values]
                yield ''.join(part if isinstance(part, str) else '\n' for part in parts)


def test_messages_of_the_troubleshooting_pages_are_those_of_the_program():
    program = '\0'.join(texts_of_the_program())
    others = {'message', '`RESOURCE_EXHAUSTED`', '`Killed`, without a message'}
    rows = []
    for page in sorted((ROOT / 'docs/how-to').glob('errors-*.md')):
        rows += [row for row in documentation.tables(page.read_text()) if len(row) == 3]
    assert len(rows) > 30
    for message, *_ in rows:
        if message not in others:
            assert re.match('`([^`]+)`', message)[1] in program, message
