"""The code of a model card: how each program loads the model and classifies a photo."""

from vit_jax.weights import Weights
from vit_jax.weights.layouts import huggingface

_PHOTO = "photo = ImageOps.exif_transpose(Image.open('photo.jpg')).convert('RGB')"
_TOP = 5  # classes that the code prints


def sections(repository: str, weights: Weights, layout: str) -> list[tuple[str, str]]:
    """(program, Markdown) for each program that reads the folder.

    Args:
      repository: ORG/NAME on the Hub.
      weights: the weights of the folder, with all fields of `preprocess`.
      layout: 'huggingface' or 'timm'.
    """
    if layout == 'timm':
        programs = [('timm', _python(_timm(repository, weights)))]
    else:
        programs = [('transformers', _transformers(repository, weights))]
        programs.append(('timm', _convert_for_timm(repository)))
    programs.append(('vit_jax', _vit_jax(repository, weights, layout)))
    return programs


def _python(lines):
    return '\n'.join(['```python', *lines, '```'])


def _transformers(repository, weights):
    if huggingface.has_processor(weights):
        return _python(_transformers_photo(repository, weights))
    code = [
        'from transformers import AutoModelForImageClassification',
        '',
        f"model = AutoModelForImageClassification.from_pretrained('{repository}').eval()",
    ]
    if not weights.num_classes:
        code = [line.replace('AutoModelForImageClassification', 'AutoModel') for line in code]
    return (
        'transformers has no processor for these photos. Prepare them as listed under '
        f'Preprocessing.\n\n{_python(code)}'
    )


def _transformers_photo(repository, weights):
    model_class = 'AutoModelForImageClassification' if weights.num_classes else 'AutoModel'
    arguments = f"'{repository}'"
    if not weights.num_classes and not weights.model['representation_size']:
        arguments += ', add_pooling_layer=False'
    lines = [
        'import torch',
        'from PIL import Image, ImageOps',
        f'from transformers import AutoImageProcessor, {model_class}',
        '',
        f"processor = AutoImageProcessor.from_pretrained('{repository}')",
        f'model = {model_class}.from_pretrained({arguments}).eval()',
        _PHOTO,
        'with torch.inference_mode():',
        "    outputs = model(**processor(photo, return_tensors='pt'))",
    ]
    if weights.num_classes:
        lines.append('logits = outputs.logits[0]')
        return lines + _probabilities(weights, 'model.config.id2label')
    if weights.model['representation_size']:
        return [*lines, 'features = outputs.pooler_output[0]']
    return [*lines, 'features = outputs.last_hidden_state[0, 0]']


def _timm(repository, weights):
    lines = [
        'import timm',
        'import torch',
        'from PIL import Image, ImageOps',
        '',
        f"model = timm.create_model('hf-hub:{repository}', pretrained=True).eval()",
        'config = timm.data.resolve_model_data_config(model)',
        'transform = timm.data.create_transform(**config, is_training=False)',
        _PHOTO,
        'with torch.inference_mode():',
        '    outputs = model(transform(photo)[None])',
    ]
    if not weights.num_classes:
        return [*lines, 'features = outputs[0]']
    names = "model.pretrained_cfg['label_names']" if weights.classes else ''
    return [*lines, 'logits = outputs[0]', *_probabilities(weights, names)]


def _probabilities(weights, names):
    """Lines that compute `probabilities` and print the best; `names`: an expression, or ''."""
    function = 'sigmoid()' if weights.loss == 'sigmoid' else 'softmax(-1)'
    name = f'{names}[k]' if names else 'k'
    return [
        f'probabilities = logits.{function}',
        f'for k in probabilities.topk({min(_TOP, weights.num_classes)}).indices.tolist():',
        f"    print(f'{{probabilities[k]:.1%}}', {name})",
    ]


def _convert_for_timm(repository):
    return '\n'.join(
        [
            'timm reads another layout, which vit_jax writes:',
            '',
            '```sh',
            f'python -m vit_jax.convert hf:{repository} timm_model --to=timm',
            '```',
            '',
            _python(
                [
                    'import timm',
                    "model = timm.create_model('local-dir:timm_model', pretrained=True)",
                ]
            ),
        ]
    )


def _vit_jax(repository, weights, layout):
    if not weights.num_classes:
        return _python(
            [
                'from vit_jax import weights',
                '',
                f"w = weights.load('hf:{repository}')",
                "features, _ = weights.predictor(w)(weights.prepare(w, ['photo.jpg']))",
            ]
        )
    option = ''
    load = f"weights.load('hf:{repository}')"
    if weights.loss == 'sigmoid' and layout == 'timm':  # which does not state it
        option = ' --loss=sigmoid'
        load = f"weights.described({load}, loss='sigmoid')"
    return '\n'.join(
        [
            '```sh',
            f'python -m vit_jax.predict --pretrained=hf:{repository}{option} photo.jpg',
            '```',
            '',
            _python(
                [
                    'from vit_jax import weights',
                    '',
                    f'w = {load}',
                    "images = weights.prepare(w, ['photo.jpg'])",
                    'features, probabilities = weights.predictor(w)(images)',
                ]
            ),
        ]
    )
