"""The model card: README.md of a repository on the Hugging Face Hub."""

import re
from collections.abc import Sequence
from typing import Any

import jax

from vit_jax.errors import counted, one_line
from vit_jax.models import variants
from vit_jax.publishing import usage
from vit_jax.publishing.facts import Data, Evaluation, Facts
from vit_jax.weights import Weights, description

FILE = 'README.md'
_MOST_ROWS = 100  # of the table of classes
_MOST_NAMES = 200  # names of classes in the text
_LIBRARIES = {'huggingface': 'transformers', 'timm': 'timm'}
_LOCAL_DATA = 'imagefolder'  # the Hub's name for a data set of one's own photos


def make(repository: str, original: Weights, written: Weights, layout: str, facts: Facts) -> str:
    """The text of the card, with metadata in YAML and a body in Markdown.

    Args:
      repository: ORG/NAME on the Hub.
      original: the weights that `facts` describe.
      written: the weights of the folder, with all fields of `preprocess`.
      layout: 'huggingface' or 'timm'.
      facts: the recorded facts about the weights.
    """
    from huggingface_hub import ModelCard  # importing it takes 0.5 s

    parts = [
        f'# {repository.partition("/")[2]}',
        _summary(written),
        _licence(facts),
        _data(facts),
        _accuracy(facts.evaluation, _changes(original, written)),
        _classes(written),
        _preprocessing(written),
        _use(repository, written, layout),
    ]
    body = '\n\n'.join(part for part in parts if part)
    metadata = _metadata(repository, written, layout, facts).to_yaml()
    card = ModelCard(f'---\n{metadata}\n---\n\n{body}\n')  # raises an error if the YAML is wrong
    return card.content


def _metadata(repository, weights, layout, facts):
    from huggingface_hub import ModelCardData

    task = 'image-classification' if weights.num_classes else 'image-feature-extraction'
    evaluation = facts.evaluation
    scores: dict[str, Any] = {}
    if evaluation:
        scores = {
            'metrics': [name for name, _ in _metrics(evaluation)],
            'model_name': repository.partition('/')[2],
            'eval_results': _eval_results(evaluation),
        }
    return ModelCardData(
        library_name=_LIBRARIES[layout],
        pipeline_tag=task,
        tags=[task, 'vision', 'vit' if 'hidden_size' in weights.model else 'resnet', 'vit_jax'],
        base_model=facts.base or None,
        **scores,
    )


def _metrics(evaluation: Evaluation) -> list[tuple[str, float]]:
    """(the Hub's name, value) of each score of the whole split."""
    values = [('accuracy', evaluation.accuracy)]
    if evaluation.mean_average_precision is not None:
        values.append(('mean_average_precision', evaluation.mean_average_precision))
    return values


def _eval_results(evaluation):
    from huggingface_hub import EvalResult

    data = evaluation.data
    return [
        EvalResult(
            task_type='image-classification',
            dataset_type=_LOCAL_DATA if data.is_local else data.name,
            dataset_name=data.name,
            dataset_split=evaluation.split,
            metric_type=name,
            metric_name=name.replace('_', ' '),
            metric_value=value,
        )
        for name, value in _metrics(evaluation)
    ]


def _summary(weights):
    arrays = jax.tree.leaves(weights.params)
    height, width = weights.image_size()
    name = variants.name_of(weights.model)
    kind = 'Vision Transformer' if 'hidden_size' in weights.model else 'BiT ResNet'
    named = f' `{name}`' if name else ''
    purpose = 'computes features of photos'
    if weights.num_classes:
        classes = counted(weights.num_classes, 'class', 'classes')
        purpose = f'classifies photos into {classes}'
    if weights.num_classes and weights.loss == 'sigmoid':
        purpose += ', which are independent of each other'
    return (
        f'A {kind}{named} that {purpose}. It has {sum(x.size for x in arrays):,} parameters '
        f'and reads photos of {height}x{width} pixels. vit_jax wrote this card.'
    )


def _licence(facts):
    limits = 'The licence of the photos may limit the choice.'
    if facts.base:
        limits = f'The licences of the photos and of `{facts.base}` may limit the choice.'
    return (
        '## Licence\n\n'
        'The author has not chosen a licence yet. To choose one, add a line such as '
        '`license: apache-2.0` to the block at the top of this file, and replace this section. '
        f'{limits}'
    )


def _data(facts):
    lines = ['## Data', '']
    if facts.data is None:
        lines.append('The training data is not recorded. The author should describe it here.')
    else:
        lines += _data_lines(facts.data)
    if facts.base:
        lines += [
            '',
            f'The weights come from [{facts.base}](https://huggingface.co/{facts.base}).',
        ]
    return '\n'.join(lines)


def _data_lines(data: Data) -> list[str]:
    name = _escaped(data.name)
    if not data.splits:
        return [f'The model was trained on {name}. The number of photos is not recorded.']
    total = counted(sum(data.splits.values()), 'photo')
    rows = [(_escaped(split), f'{count:,}') for split, count in data.splits.items()]
    return [f'The data set is {name}, with {total}.', '', *_table(('split', 'photos'), rows)]


def _accuracy(evaluation, changes):
    if evaluation is None:
        return '## Accuracy\n\nNo accuracy is recorded.'
    data = f'{_escaped(evaluation.split)} of {_escaped(evaluation.data.name)}'
    photos = counted(evaluation.num_images, 'photo')
    role = ', which did not train the model' if evaluation.is_held_out else ''
    rows = [('accuracy', _percent(evaluation.accuracy))]
    if evaluation.interval:
        low, high = evaluation.interval
        rows.append(('95 % confidence interval', f'{_percent(low)} to {_percent(high)}'))
    if evaluation.mean_average_precision is not None:
        rows.append(('mean average precision', _percent(evaluation.mean_average_precision)))
    if evaluation.calibration_error is not None:
        rows.append(('calibration error', _percent(evaluation.calibration_error)))
    lines = [
        '## Accuracy',
        '',
        f'On {photos} of the split {data}{role}:',
        '',
        *_table(('measure', 'value'), rows),
    ]
    if evaluation.chose_model:
        lines += ['', 'The same split chose the checkpoint, so new photos may give a lower value.']
    if changes:
        lines += ['', f'The values are from the original weights. {changes}']
    if evaluation.classes:
        lines += ['', *_class_lines(evaluation)]
    return '\n'.join(lines)


def _class_lines(evaluation):
    is_precision = evaluation.mean_average_precision is not None
    measure = 'average precision' if is_precision else 'accuracy'
    shown = evaluation.classes[:_MOST_ROWS]
    lines = ['### Classes, the worst first', '']
    if len(shown) < len(evaluation.classes):
        lines += [f'The {len(shown)} worst of {len(evaluation.classes)} classes:', '']
    rows = [(_escaped(name), _percent(value), f'{count:,}') for name, value, count in shown]
    return lines + _table(('class', measure, 'photos'), rows)


def _changes(original, written):
    """A sentence about how the written weights differ from the original ones, or ''."""
    changes = []
    dtypes = _dtypes(written)
    if dtypes != _dtypes(original):
        changes.append(f'stores them as {" and ".join(dtypes)}')
    if written.model != original.model:
        changes.append('computes them with another GELU or epsilon')
    if not changes:
        return ''
    return f'This folder {" and ".join(changes)}.'


def _dtypes(weights):
    return sorted({str(x.dtype) for x in jax.tree.leaves(weights.params)})


def _classes(weights):
    if not weights.num_classes:
        return ''
    if not weights.classes:
        return (
            '## Class names\n\nThe weights do not name their '
            f'{counted(weights.num_classes, "class", "classes")}. The author should list them here.'
        )
    shown = weights.classes[:_MOST_NAMES]
    text = ', '.join(_escaped(name) for name in shown)
    if len(shown) < len(weights.classes):
        text += f'. `config.json` has all {len(weights.classes):,} names'
    return f'## Class names\n\nClass 0 is first: {text}.'


def _preprocessing(weights):
    height, width = weights.image_size()
    rows = [('image_size', f'{height}, {width}')]
    for name, value in sorted(description.complete_preprocess(weights).items()):
        is_list = isinstance(value, tuple | list)
        rows.append((name, ', '.join(map(str, value)) if is_list else str(value)))
    return '\n'.join(['## Preprocessing', '', *_table(('field', 'value'), rows)])


def _use(repository, weights, layout):
    parts = ['## Use']
    for program, code in usage.sections(repository, weights, layout):
        parts += [f'### {program}', code]
    return '\n\n'.join(parts)


def _percent(value):
    return f'{100 * value:.2f} %'


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    lines = [header, ['---'] * len(header), *rows]
    return [f'| {" | ".join(cells)} |' for cells in lines]


def _escaped(text):
    """A name of the user's as Markdown shows it."""
    return re.sub(r'([\\`*_{}\[\]<>|#~])', r'\\\1', one_line(text))
