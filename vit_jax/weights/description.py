"""The preparation of images and the names of classes: from weights, command line or defaults."""

import collections
import dataclasses
import importlib.resources
import json
import logging
import math
from collections.abc import Sequence

from vit_jax import config, fields
from vit_jax.data import table_cells
from vit_jax.errors import UserError, check_choice
from vit_jax.files import composed, read_text
from vit_jax.models.vit import as_pair
from vit_jax.weights import published
from vit_jax.weights.model import Weights

log = logging.getLogger(__name__)

# Layouts of programs that resize photos as Pillow does. Files of these layouts cannot state that
# fractions are kept.
_RESIZE_UINT8 = ('timm', 'torchvision', 'huggingface')


def described(
    loaded: Weights,
    preprocess: Sequence[str] = (),
    classes: str | None = None,
    loss: str | None = None,
) -> Weights:
    """The weights, completed or corrected by the options --preprocess, --classes and --loss.

    Args:
      loaded: the weights.
      preprocess: for example ['resize=bicubic', 'mean=0.485,0.456,0.406']. It may set image_size if
        position embeddings do not determine it. Unless uint8_resize is given, fit=torchvision and
        fit=transformers set it, and antialias=False and resize=area, which Pillow cannot do, unset
        it.
      classes: a file with the names of the classes.
      loss: 'softmax' or 'sigmoid'.

    Raises:
      UserError: a field or value is impossible, or the file has more or fewer names than classes.
    """
    if preprocess:
        loaded = _with_preprocess(loaded, parse_preprocess(preprocess))
    if classes:
        loaded = _with_class_names(loaded, classes)
    if loss:
        check_choice('--loss', loss, config.FIELDS['loss.name'].values.choices)
        loaded = dataclasses.replace(loaded, loss=loss)
    return loaded


def _with_preprocess(loaded, values):
    stated = (loaded.preprocess or {}) | values
    if 'uint8_resize' not in values:
        stated |= _implied_uint8_resize(values, stated)
    config.check_uint8_resize(stated, f'--preprocess of {loaded.source}')
    changed = dataclasses.replace(loaded, preprocess=stated)
    if 'image_size' in values:
        _check_image_size(loaded, changed, as_pair(values['image_size']))
    return changed


def _check_image_size(loaded, changed, size):
    """Raises UserError unless `size`, the new size in `changed`, fits the position embeddings."""
    grid = loaded.grid()
    # In a grid with other rows and columns, patches would get the positions of other patches.
    is_other_grid = grid and grid == loaded.stated_grid() and grid != changed.stated_grid()
    expected = loaded.image_size() if is_other_grid else changed.image_size()
    if expected != size:
        raise UserError(
            f'--preprocess image_size is {size[0]},{size[1]}: {loaded.source} is for images of '
            f'{expected[0]},{expected[1]}. Fine-tune it on images of another size.',
            kind='value',
            field='--preprocess image_size',
            file=loaded.source,
            value=size,
        )


def _implied_uint8_resize(values, stated):
    """{'uint8_resize': value} as the new values imply it, else {}; `stated` has all fields."""
    if stated.get('antialias') is False or stated.get('resize') == 'area':
        return {'uint8_resize': False}
    if values.get('fit') in ('torchvision', 'transformers'):
        return {'uint8_resize': True}
    return {}


def _with_class_names(loaded, path):
    names = read_names(path)
    if len(names) != loaded.num_classes:
        raise UserError(
            f'--classes={path} has {len(names)} names: expected {loaded.num_classes}, one for each '
            f'class of {loaded.source}.',
            kind='value',
            field='--classes',
            file=path,
            value=len(names),
        )
    return dataclasses.replace(loaded, classes=names)


def with_image_size(loaded: Weights, size: Sequence[int], field: str) -> Weights:
    """Returns the weights with `size` as the size of the images of their position embeddings.

    Args:
      loaded: the weights, which may not state the size.
      size: (height, width) in pixels.
      field: the origin of the size, for messages.

    Raises:
      UserError: the embeddings have another number of patches, or the weights state another size.
    """
    changed = dataclasses.replace(
        loaded, preprocess=(loaded.preprocess or {}) | {'image_size': as_pair(size)}
    )
    grid = loaded.grid()
    if grid and grid == loaded.stated_grid() and changed.stated_grid() != grid:
        height, width = loaded.image_size()
        raise UserError(
            f'{field} is {size[0]},{size[1]}, and {loaded.source} states that its position '
            f'embeddings are for images of {height},{width}: leave the field out.',
            kind='value',
            field=field,
            value=size,
        )
    if changed.stated_grid() is None or changed.grid() != changed.stated_grid():
        raise UserError(
            f'{field} is {size[0]},{size[1]}: {loaded.source} has no position embeddings of as '
            f'many patches as such images have. Expected the size of the images that it was '
            'trained on.',
            kind='value',
            field=field,
            value=size,
        )
    return changed


def log_assumed_grid(loaded: Weights, grid: tuple[int, int], remedy: str) -> None:
    """Logs the grid that position embeddings are assumed to have, if the weights do not state it.

    Args:
      loaded: the weights.
      grid: (rows, columns) of patches of the images that the weights are used for.
      remedy: what to do if another grid is right.
    """
    assumed = loaded.grid()
    if assumed is None or assumed == loaded.stated_grid():
        return
    action = 'not resized' if assumed == grid else f'resized to {grid[0]}x{grid[1]}'
    is_doubtful = assumed != grid and math.prod(assumed) == math.prod(grid)
    log.log(
        logging.WARNING if is_doubtful else logging.INFO,
        '%s does not say for which images its position embeddings are. They are assumed to have '
        '%dx%d patches, and are %s. If they have other rows and columns, %s.',
        loaded.source,
        *assumed,
        action,
        remedy,
    )


def class_names(loaded: Weights) -> list[str]:
    """A name for each class: from the weights, else ImageNet-1k's for 1000, else 'class 0', ...

    A warning reports names that are assumed from ImageNet-1k.
    """
    if loaded.classes:
        return loaded.classes
    if loaded.num_classes != 1000:
        return [f'class {k}' for k in range(loaded.num_classes)]
    log.warning(
        '%s does not name its 1000 classes: the names of ImageNet-1k are used. If the classes are '
        'others, add --classes=FILE.',
        loaded.source,
    )
    text = importlib.resources.files('vit_jax.weights').joinpath('imagenet1k.txt').read_text()
    return [line for line in text.splitlines() if not line.startswith('#')]


def unique_names(names: Sequence[str]) -> list[str]:
    """The names, made unique: a name of several classes, such as 'crane', gets the class number.

    The number follows the name, in parentheses.
    """
    counts = collections.Counter(names)
    unique = list(names)
    for k, name in enumerate(names):
        if counts[name] > 1:
            unique[k] = f'{name} ({k})'
    return unique


def names_tell(loaded: Weights, names: Sequence[str]) -> bool:
    """Whether the class names of the weights are reliable and comparable with `names`.

    They are not if a name occurs twice, as ImageNet's 'crane' and 'maillot' do in many weights, or
    if weights of another program share no name with `names`.
    """
    unique = set(map(composed, loaded.classes or ()))
    if not unique or len(unique) != loaded.num_classes:
        return False
    is_own = loaded.layout in ('workdir', 'vit_jax')
    return is_own or not unique.isdisjoint(map(composed, names))


def check_classes(loaded: Weights, names: Sequence[str], data: str) -> None:
    """Raises UserError unless `names`, the classes of `data`, are the classes of the weights.

    If names are not comparable (see names_tell), a warning says that the same order is assumed.
    Names that differ only in Unicode normalisation are equal.
    """
    if len(names) != loaded.num_classes:
        raise UserError(
            f'{loaded.source} has {loaded.num_classes} classes and {data} has '
            f'{len(names)}: choose the data set that the head was trained for, or '
            'fine-tune on this one first (configs/finetune.py).',
            kind='value',
            field='num_classes',
            file=loaded.source,
            value=len(names),
        )
    classes = loaded.classes or names
    data_names = [composed(str(name)) for name in names]
    weights_names = [composed(str(name)) for name in classes]
    differing = [k for k in range(len(names)) if data_names[k] != weights_names[k]]
    if not differing:
        return
    known = set(weights_names)
    moved = [k for k in differing if data_names[k] in known]  # classes with another number
    k = (moved or differing)[0]
    difference = f'class {k} is {classes[k]!r} in {loaded.source} and {names[k]!r} in {data}'
    if moved or names_tell(loaded, names):
        raise UserError(
            f'{difference}: they are not the same classes in the same order.',
            kind='value',
            field='classes',
            file=loaded.source,
            value=names[k],
        )
    log.warning('%s: the same order is assumed', difference)


def check_rgb(loaded: Weights) -> None:
    """Raises UserError unless the model accepts RGB images, the format in which files are read."""
    channels = loaded.channels()
    if channels != 3:
        raise UserError(
            f'{loaded.source} takes images of {channels} channels; image files have 3 (RGB). '
            'Choose weights of a model of RGB images.',
            kind='inapplicable',
            file=loaded.source,
            value=channels,
        )


def complete_preprocess(loaded: Weights) -> dict:
    """All fields of `preprocess`; a warning lists the defaults of fields that are not stated.

    Raises UserError if `fit` or `resize` is unknown, or if the fields do not fit together.
    """
    stated = loaded.preprocess or {}
    defaults = dict(config.base().preprocess)
    defaults['uint8_resize'] = loaded.layout in _RESIZE_UINT8
    missing = sorted(defaults.keys() - stated.keys())
    if missing:
        log.warning(
            '%s does not say %s of images: the defaults %s are used. To change that, add '
            '--preprocess FIELD=VALUE; from Python: weights.described(w, [...]).%s',
            loaded.source,
            ', '.join(missing),
            ' '.join(f'{name}={defaults[name]}' for name in missing),
            published.hint(loaded) if loaded.layout == 'timm' else '',
        )
    complete = defaults | {name: value for name, value in stated.items() if name in defaults}
    for name in ('fit', 'resize'):
        check_choice(
            f'preprocess.{name} of {loaded.source}, which --preprocess {name}=VALUE changes,',
            complete[name],
            config.FIELDS[f'preprocess.{name}'].values.choices,
        )
    config.check_uint8_resize(complete, loaded.source)
    return complete


def completed(loaded: Weights) -> Weights:
    """The weights with all fields of `preprocess` and a name for each class.

    Both are from complete_preprocess and class_names, with their warnings. A model for other images
    than RGB keeps its `preprocess`.
    """
    preprocess = loaded.preprocess
    classes = loaded.classes
    if loaded.channels() == 3:
        preprocess = {'image_size': loaded.image_size(), **complete_preprocess(loaded)}
    if loaded.num_classes:
        classes = class_names(loaded)
    return dataclasses.replace(loaded, preprocess=preprocess, classes=classes)


def log_other_pixels(weights: Weights, fit: str) -> None:
    """Warns of fields in which a program prepares photos differently from the weights.

    Args:
      weights: the weights.
      fit: the value of preprocess.fit that describes the program, unless it squashes photos.
    """
    preprocess = weights.preprocess or {}
    has_overshoot = preprocess.get('resize') in ('bicubic', 'lanczos3')
    if preprocess.get('antialias') is False:
        log.warning(
            'preprocess.antialias is False, but the program resizes with antialiasing: large '
            'photos look smoother.'
        )
    elif preprocess.get('uint8_resize') is False and has_overshoot:
        log.warning(
            'preprocess.uint8_resize is False, but the program rounds and cuts off at 0 and 255 '
            'after each pass of resizing: photos with hard edges may look a little different.'
        )
    if preprocess.get('resize') == 'area':
        log.warning(
            "preprocess.resize is 'area', but the program averages whole pixels (box): "
            'photos may look a little different.'
        )
    if preprocess.get('fit', fit) not in (fit, 'squash'):
        log.warning(
            'preprocess.fit is %r, but the program has %r: photos may be cropped one pixel aside.',
            preprocess['fit'],
            fit,
        )


# The fields of the model that arrays do not show; models.build checks whether they fit.
_OF_MODEL = ('num_heads', 'layer_norm_epsilon', 'gelu')


def parse_preprocess(options: Sequence[str]) -> dict:
    """Fields of `preprocess` from ['crop_ratio=1,resize=bicubic', 'mean=0,0,0'].

    The last value of a field counts. Raises UserError if a field or value is impossible.
    """
    config_fields = {name: f'preprocess.{name}' for name in config.base().preprocess}
    return _read_options('--preprocess', options, config_fields | {'image_size': 'image_size'})


def parse_model(options: Sequence[str]) -> dict:
    """Fields of the model for weights.load from ['num_heads=3,gelu=erf'].

    The last value of a field counts. Raises UserError if a field or value is impossible.
    """
    return _read_options('--model', options, {name: f'model.{name}' for name in _OF_MODEL})


def _read_options(name_of_option, options, config_fields):
    """Values by name from texts NAME=VALUE,...; `config_fields` has the declared fields by name."""
    declared = config.all_fields()
    values = {}
    for name, text in fields.assignments(options).items():
        check_choice(f'the field of {name_of_option}', name, config_fields)
        field = declared[config_fields[name]]
        values[name] = fields.read(f'{name_of_option} {name}', field.values, text)
    return values


def read_names(path: str) -> list[str]:
    """Class names from a file with one per line, or with a JSON array; class 0 is first.

    A line may be a cell of a table, see data/table_cells.py.
    """
    try:
        text = read_text(path).removeprefix('\ufeff').strip()  # a mark of editors on Windows
        if text.startswith(('[', '{')):
            names = json.loads(text)
        else:
            names = [table_cells.text_of(line) for line in text.splitlines()]
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f'--classes={path} cannot be read: {error}',
            kind='unreadable',
            field='--classes',
            file=path,
        ) from error
    if not isinstance(names, list):
        raise UserError(
            f'--classes={path} is a JSON object: expected an array, or a name per '
            'line, class 0 first.',
            kind='content',
            field='--classes',
            file=path,
        )
    return [str(name) for name in names]
