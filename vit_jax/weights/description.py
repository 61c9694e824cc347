"""How images are prepared and what classes are called: from weights, command line or defaults."""

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

# Layouts of programs that resize photos by Pillow, or as it does: in none of them can a file say
# that fractions are kept.
_RESIZE_UINT8 = ('timm', 'torchvision', 'huggingface')


def described(
    loaded: Weights,
    preprocess: Sequence[str] = (),
    classes: str | None = None,
    loss: str | None = None,
) -> Weights:
    """The weights with the fields of --preprocess, the names in the file of --classes, and --loss.

    `preprocess` is, for example, ['resize=bicubic', 'mean=0.485,0.456,0.406']; it may have
    image_size, where position embeddings do not tell it. A fit of torchvision or transformers sets
    uint8_resize, and what Pillow cannot do, antialias=False and resize=area, unsets it, unless it
    is given.

    Raises UserError if a field or value is impossible, or there are not as many names as classes.
    """
    if preprocess:
        values = parse_preprocess(preprocess)
        before, grid = loaded, loaded.grid()
        stated = (loaded.preprocess or {}) | values
        if 'uint8_resize' not in values:
            stated |= _implied_uint8_resize(values, stated)
        config.check_uint8_resize(stated, f'--preprocess of {loaded.source}')
        loaded = dataclasses.replace(loaded, preprocess=stated)
        # As many patches in other rows and columns would have the positions of one another.
        other = grid and grid == before.stated_grid() != loaded.stated_grid()
        if 'image_size' in values:
            size = as_pair(values['image_size'])
            found = (before if other else loaded).image_size()
            if found != size:
                raise UserError(
                    '--preprocess image_size={},{}: {} is for images of {},{}. Fine-tuning '
                    'makes it one for others.'.format(*size, loaded.source, *found)
                )
    if classes:
        names = read_names(classes)
        if len(names) != loaded.num_classes:
            raise UserError(
                f'--classes={classes} has {len(names)} names; {loaded.source} has '
                f'{loaded.num_classes} classes.'
            )
        loaded = dataclasses.replace(loaded, classes=names)
    if loss:
        check_choice('--loss', loss, config.FIELDS['loss.name'].values.choices)
        loaded = dataclasses.replace(loaded, loss=loss)
    return loaded


def with_image_size(loaded: Weights, size: Sequence[int], field: str) -> Weights:
    """The weights with the size of the images that their position embeddings are for.

    Args:
      loaded: the weights, which may not say it.
      size: (height, width) in pixels.
      field: where the size is from, for messages.

    Raises UserError if the embeddings do not have as many patches, or the weights say another size.
    """
    given = dataclasses.replace(
        loaded, preprocess=(loaded.preprocess or {}) | {'image_size': as_pair(size)}
    )
    grid, stated = loaded.grid(), loaded.stated_grid()
    if grid and grid == stated and given.stated_grid() != grid:
        raise UserError(
            f'{field} is {size[0]},{size[1]}, and {loaded.source} says that its position '
            'embeddings are for images of {},{}: leave the field out.'.format(*loaded.image_size())
        )
    if given.stated_grid() is None or given.grid() != given.stated_grid():
        raise UserError(
            f'{field} is {size[0]},{size[1]}: {loaded.source} has no position embeddings of as '
            f'many patches as such images have. Expected the size of the images that it was '
            'trained on.'
        )
    return given


def log_assumed_grid(loaded: Weights, grid: tuple[int, int], remedy: str) -> None:
    """Says of which grid position embeddings are taken to be, if the weights do not say it.

    Args:
      loaded: the weights.
      grid: (rows, columns) of patches of the images that they are used for.
      remedy: what to do if another grid is right.
    """
    assumed = loaded.grid()
    if assumed is None or assumed == loaded.stated_grid():
        return
    doubtful = assumed != grid and math.prod(assumed) == math.prod(grid)
    log.log(
        logging.WARNING if doubtful else logging.INFO,
        '%s does not say for which images its position embeddings are: they are taken to be of '
        '%dx%d patches and %s. If they are of other rows and columns, %s.',
        loaded.source,
        *assumed,
        'not resized' if assumed == grid else 'resized to {}x{}'.format(*grid),
        remedy,
    )


def _implied_uint8_resize(given, stated):
    """What the fields that are given imply for uint8_resize; `stated` are all."""
    if stated.get('antialias') is False or stated.get('resize') == 'area':
        return {'uint8_resize': False}
    if given.get('fit') in ('torchvision', 'transformers'):
        return {'uint8_resize': True}
    return {}


def class_names(loaded: Weights) -> list[str]:
    """A name for each class: from the weights, else ImageNet-1k's for 1000, else 'class 0', ...

    A warning says that names are taken from ImageNet-1k.
    """
    if loaded.classes:
        return loaded.classes
    if loaded.num_classes != 1000:
        return [f'class {k}' for k in range(loaded.num_classes)]
    log.warning(
        '%s does not name its 1000 classes: they are taken for those of ImageNet-1k. If '
        'they are others, add --classes=FILE.',
        loaded.source,
    )
    text = importlib.resources.files('vit_jax.weights').joinpath('imagenet1k.txt').read_text()
    return [line for line in text.splitlines() if not line.startswith('#')]


def unique_names(names: Sequence[str]) -> list[str]:
    """The names; those that several classes have, as ImageNet's 'crane', with the class's number.

    The number is in parentheses behind the name.
    """
    counts = collections.Counter(names)
    return [name if counts[name] == 1 else f'{name} ({k})' for k, name in enumerate(names)]


def names_tell(loaded: Weights, names: Sequence[str]) -> bool:
    """Whether the classes of the weights are named as those of some data are.

    Names do not tell if one occurs twice, as ImageNet's 'crane' and 'maillot' do in many weights.
    """
    unique = set(map(composed, loaded.classes or ()))
    return len(unique) == loaded.num_classes > 0 and (
        loaded.layout in ('workdir', 'vit_jax') or not unique.isdisjoint(map(composed, names))
    )


def check_classes(loaded: Weights, names: Sequence[str], data: str) -> None:
    """Raises UserError unless `names`, the classes of `data`, are those of the weights.

    Where names do not tell, their order is trusted, and a warning says so. Names that differ in
    Unicode normalisation only are the same.
    """
    if len(names) != loaded.num_classes:
        raise UserError(
            f'{loaded.source} has {loaded.num_classes} classes and {data} has '
            f'{len(names)}: take the data set that the head was trained for, or '
            'fine-tune on this one first (configs/finetune.py).'
        )
    classes = loaded.classes or names
    forms = [composed(str(name)) for name in names]
    known = [composed(str(name)) for name in classes]
    differing = [k for k, name in enumerate(forms) if name != known[k]]
    if differing:
        unique = set(known)
        k = next((k for k in differing if forms[k] in unique), differing[0])
        text = f'class {k} is {classes[k]!r} in {loaded.source} and {names[k]!r} in {data}'
        if names_tell(loaded, names) or forms[k] in unique:
            raise UserError(f'{text}: they are not the same classes in the same order.')
        log.warning('%s: the order is taken to be the same', text)


def check_rgb(loaded: Weights) -> None:
    """Raises UserError unless the model takes the RGB images that are read from files."""
    if loaded.channels() != 3:
        raise UserError(
            f'{loaded.source} takes images of {loaded.channels()} channels; image '
            'files are read as the 3 of RGB. Take weights of a model of RGB images.'
        )


def complete_preprocess(loaded: Weights) -> dict:
    """All fields of `preprocess`; warns of the defaults of those that the weights do not state.

    Raises UserError if `fit` or `resize` is not one of the known methods, or the fields do not fit
    together.
    """
    defaults, stated = dict(config.base().preprocess), loaded.preprocess or {}
    defaults['uint8_resize'] = loaded.layout in _RESIZE_UINT8
    if missing := sorted(defaults.keys() - stated.keys()):
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

    Both are as complete_preprocess and class_names give them, with their warnings. A model of other
    images than RGB keeps what it says of images.
    """
    preprocess, classes = loaded.preprocess, loaded.classes
    if loaded.channels() == 3:
        preprocess = {'image_size': loaded.image_size(), **complete_preprocess(loaded)}
    if loaded.num_classes:
        classes = class_names(loaded)
    return dataclasses.replace(loaded, preprocess=preprocess, classes=classes)


def log_other_pixels(weights: Weights, fit: str) -> None:
    """Warns of what a program that prepares images as `fit` says, or squashes them, does not do."""
    given = weights.preprocess or {}
    if given.get('antialias') is False:
        log.warning(
            'preprocess.antialias is False, and there images are resized with it: large '
            'photos look smoother.'
        )
    elif given.get('uint8_resize') is False and given.get('resize') in ('bicubic', 'lanczos3'):
        log.warning(
            'preprocess.uint8_resize is False, and there each pass of resizing rounds and cuts '
            'off at 0 and 255: photos with hard edges may look a little different.'
        )
    if given.get('resize') == 'area':
        log.warning(
            "preprocess.resize is 'area', and there whole pixels are averaged (box): "
            'photos may look a little different.'
        )
    if given.get('fit', fit) not in (fit, 'squash'):
        log.warning(
            'preprocess.fit is %r, there it is %r: photos may be cut a pixel aside.',
            given['fit'],
            fit,
        )


# The fields of the model that arrays do not show; models.build checks how they fit.
_OF_MODEL = ('num_heads', 'layer_norm_epsilon', 'gelu')


def parse_preprocess(given: Sequence[str]) -> dict:
    """Fields of `preprocess` from ['crop_ratio=1,resize=bicubic', 'mean=0,0,0']; the last counts.

    Raises UserError if a field is unknown or cannot have the value.
    """
    table = {name: f'preprocess.{name}' for name in config.base().preprocess}
    return _read_options('--preprocess', given, table | {'image_size': 'image_size'})


def parse_model(given: Sequence[str]) -> dict:
    """Fields of the model for weights.load from ['num_heads=3,gelu=erf']; the last counts.

    Raises UserError if a field is unknown or cannot have the value.
    """
    return _read_options('--model', given, {name: f'model.{name}' for name in _OF_MODEL})


def _read_options(option, given, table):
    """The values of NAME=VALUE,... by name; `table` has the field of the config for each name."""
    declared = config.all_fields()
    found = {}
    for name, text in fields.assignments(given).items():
        check_choice(f'the field of {option}', name, table)
        found[name] = fields.read(f'{option} {name}', declared[table[name]].values, text)
    return found


def read_names(path: str) -> list[str]:
    """Names of classes from a file with one per line, or a JSON array.

    Lines may be cells of a table, see data/table_cells.py.
    """
    try:
        text = read_text(path).removeprefix('\ufeff').strip()  # of Windows' editors
        if text.startswith(('[', '{')):
            names = json.loads(text)
        else:
            names = [table_cells.text_of(line) for line in text.splitlines()]
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f'--classes={path} cannot be read: {error}') from error
    if not isinstance(names, list):
        raise UserError(
            f'--classes={path} is a JSON object: expected an array, or a name per '
            'line, class 0 first.'
        )
    return [str(name) for name in names]
