"""The rules on imports between the packages of vit_jax, and of libraries.

docs/explanation/architecture.md describes them. The tests read the source files, including the
imports inside of functions, and import nothing.
"""

import ast
import graphlib
import pathlib
import re

import pytest

from tests.support.runs import ROOT

# Each room (a package or module) and the rooms that it may import, from the bottom to the top.
MAY_IMPORT = {
    'errors': '',
    'files': 'errors',
    'fields': 'errors',
    'plugins': 'errors',
    'options': 'errors',
    'machine': 'errors files',
    'parallel': 'errors',
    'models': 'errors fields plugins',
    'config_fields': 'fields models',
    'config': 'errors fields models config_fields',
    'processes': 'errors machine',
    'data': 'errors files',
    'evaluators': 'errors options plugins parallel models',
    'workdir': 'errors files config processes evaluators',
    'weights': 'errors files fields parallel models config data workdir',
    'inspection': 'errors files models workdir weights',
    'objectives': 'errors plugins options models config processes weights evaluators',
    'training': 'errors files machine options parallel models config processes data workdir '
    'weights evaluators objectives',
    'scoring': 'errors files fields options parallel models config_fields config processes data '
    'workdir weights evaluators objectives training',
    'reporting': 'errors files models config processes data workdir weights evaluators '
    'inspection training scoring',
    'campaigns': 'errors files config data workdir training reporting',
    'web': 'errors files data workdir weights reporting',
    'planning': 'errors parallel models config workdir objectives training',
    'measuring': 'errors parallel models config workdir training',
    'fitting': 'errors files models config data evaluators parallel workdir weights training '
    'measuring reporting',
    'publishing': 'errors files data models evaluators workdir weights fitting',
    'drawing': 'errors',
    'terminal': 'errors processes',
    'recipes': '',
    'cli': 'errors machine terminal recipes config processes weights',
}
# Commands, such as main and evaluate, may import everything but each other.
COMMAND = ' '.join(MAY_IMPORT)
# A library or a part of it, and the rooms that may import it. () means that no room may.
ONLY_IN = {
    'tensorflow': ('data',),
    'tensorflow_datasets': ('data',),
    'array_record': ('data',),
    'clu.metric_writers': ('workdir',),
    'orbax': ('workdir',),
    'jinja2': ('reporting',),
    'vl_convert': ('reporting',),
    'matplotlib': ('workdir', 'drawing', 'campaigns'),
    'jax._src': (),
    'unittest': (),
    'ctypes': ('machine',),
}
# Documented names that start with an underscore.
PUBLIC = {'_exit', '_replace', '_asdict', '_fields'}
# Modules without a test file of their name, and the file that tests them.
TESTED_ELSEWHERE = {
    'scoring/fewshot.py': 'a part of one command: tests/evaluate_test.py',
    'workdir/memory.py': 'read by progress.py: tests/workdir/progress_test.py',
    **{
        f'measuring/{name}.py': 'parts of one command: tests/benchmark_test.py'
        for name in ('peer_process', 'peers', 'profile', 'report', 'workloads')
    },
    **{
        f'{name}.py': 'parts of one command: tests/figures_test.py'
        for name in (
            'drawing/canvas',
            'drawing/models',
            'drawing/photos',
            'drawing/runs',
            'inspection/arrays',
            'inspection/subject',
        )
    },
    **{
        f'reporting/{name}.py': 'parts of one page: tests/report_test.py'
        for name in ('attempts', 'data', 'explorer', 'model', 'predictions')
    },
    'evaluators/batches.py': 'only defines a type',
    'evaluators/evaluator.py': 'types: tests/evaluators/classification_test.py',
    'evaluators/context.py': 'used by tests/evaluators/registry_test.py',
    'evaluators/frozen.py': 'in runs: tests/training/evaluation_test.py',
    'plugins.py': 'with objectives: tests/objectives/registry_test.py',
    'objectives/objective.py': 'types: tests/objectives/registry_test.py',
    'objectives/labels.py': 'as an example: tests/objectives/registry_test.py',
    'objectives/distillation.py': 'with a teacher: tests/objectives/teacher_test.py',
    **{
        f'models/backends/{name}.py': 'compared: tests/models/backends/backend_test.py'
        for name in ('cpu', 'gpu', 'layers', 'xla')
    },
    'config_fields.py': 'a table: tests/config_test.py',
    'data/host_tensorflow.py': 'only sets a flag of TensorFlow: tests/isolation_test.py',
}

PACKAGE = ROOT / 'vit_jax'
FILES = {path.relative_to(PACKAGE): path.read_text() for path in sorted(PACKAGE.rglob('*.py'))}


def room_of(path):
    """'models' for models/vit.py, 'cli' for cli.py."""
    return path.parts[0].removesuffix('.py')


def imports(source):
    """Yields (line, full name) of every imported name, including imports inside of functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f'{node.module}.{alias.name}') for alias in node.names)


def is_part_of(name, package):
    return name == package or name.startswith(f'{package}.')


def wrong_imports(path, source):
    """Yields the lines that import a room or a library against the rules."""
    room = room_of(path)
    allowed = MAY_IMPORT.get(room, COMMAND).split()
    for line, name in imports(source):
        other = name.split('.')[1] if name.startswith('vit_jax.') else room
        if other != room and other not in allowed:
            yield f'{path}:{line}: {room} imports {name}'
        for library, rooms in ONLY_IN.items():
            if is_part_of(name, library) and room not in rooms:
                yield f'{path}:{line}: {name} outside of {rooms or "everything"}'


def private_names(path, source):
    """Yields the lines that use a private name of another module."""
    tree = ast.parse(source)
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules |= {(alias.asname or alias.name).split('.')[0] for alias in node.names}
    for line, name in imports(source):
        if any(is_private(part) for part in name.split('.')):
            yield f'{path}:{line}: {name} is private'
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in modules:
                yield f'{path}:{node.lineno}: {ast.unparse(node)} is private'


def is_private(name):
    return name.startswith('_') and not name.startswith('__') and name not in PUBLIC


@pytest.mark.parametrize('rule', [wrong_imports, private_names])
def test_sources_obey_the_rule(rule):
    problems = []
    for path, source in FILES.items():
        problems += rule(path, source)
    assert not problems, '\n'.join(['', *problems])


def test_rooms_import_only_from_below():
    rooms = list(MAY_IMPORT)
    for k, room in enumerate(rooms):
        assert set(MAY_IMPORT[room].split()) <= set(rooms[:k]), room


def imported_modules(source, modules):
    """Yields the modules of the package that a module imports."""
    for _, name in imports(source):
        while name and name not in modules:  # the name of a function, without its last part
            name = name.rpartition('.')[0]
        if name:
            yield name


def circle(files):
    """A circle of modules that import each other, with the first one repeated; [] if none."""
    modules = {
        '.'.join(('vit_jax', *path.with_suffix('').parts)).removesuffix('.__init__'): source
        for path, source in files.items()
    }
    graph = {
        name: set(imported_modules(source, modules)) - {name} for name, source in modules.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_each_other():
    assert circle(FILES) == []


def test_circle_of_imports_inside_of_functions_is_detected():
    files = {
        pathlib.PurePath('data/a.py'): 'from vit_jax.data import b',
        pathlib.PurePath('data/b.py'): 'def f():\n    from vit_jax.data.a import g',
        pathlib.PurePath('data/c.py'): 'import vit_jax.data.a',
    }
    assert set(circle(files)) == {'vit_jax.data.a', 'vit_jax.data.b'}


def test_every_room_is_in_the_table():
    packages = {path.parts[0] for path in FILES if len(path.parts) > 1}
    assert packages <= set(MAY_IMPORT)
    assert set(MAY_IMPORT) <= {room_of(path) for path in FILES}


def test_docstring_of_every_package_states_its_contract():
    """It names the inputs, the outputs and the allowed imports."""
    incomplete = []
    for path, source in FILES.items():
        if path.name == '__init__.py' and len(path.parts) > 1:
            text = ast.get_docstring(ast.parse(source)) or ''
            words = (r'\bin\b', r'\bout\b', r'\bimports?\b')
            has_all_words = all(re.search(word, text, re.IGNORECASE) for word in words)
            if not has_all_words or len(text.splitlines()) < 3:
                incomplete.append(str(path))
    assert not incomplete


def test_every_module_has_a_test_file_of_its_name():
    def test_file(path):
        return ROOT / 'tests' / path.with_name(f'{path.stem}_test.py')

    modules = [path for path in FILES if path.name != '__init__.py']
    untested = {str(path) for path in modules if not test_file(path).exists()}
    assert untested == set(TESTED_ELSEWHERE)


WRONG = """
import os
import jax
import tensorflow as tf
from clu import metric_writers
from jax._src import distributed
from unittest import mock

def f(x):
    from vit_jax import config, errors
    from vit_jax.training.loop import train
    os._exit(jax._private.thing(errors._hidden, x._own, x._replace()))
"""


@pytest.mark.parametrize(
    ('rule', 'expected'),
    [
        (
            wrong_imports,
            [
                'models/x.py:4: tensorflow',
                'models/x.py:5: clu.metric_writers',
                'models/x.py:6: jax._src',
                'models/x.py:7: unittest.mock',
                'models/x.py:10: models imports vit_jax.config',
                'models/x.py:11: models imports vit_jax.training.loop.train',
            ],
        ),
        (
            private_names,
            [
                'models/x.py:6: jax._src',
                'models/x.py:12: jax._private',
                'models/x.py:12: errors._hidden',
            ],
        ),
    ],
    ids=['imports', 'names'],
)
def test_wrong_source_is_detected(rule, expected):
    problems = list(rule(pathlib.PurePath('models/x.py'), WRONG))
    assert len(problems) == len(expected), problems
    for start in expected:
        assert any(problem.startswith(start) for problem in problems), (start, problems)
