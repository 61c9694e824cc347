"""The process of a peer: a model of another project, trained or applied for as many steps as asked.

    python -m vit_jax.measuring.peer_process

The first line on stdin is {"peer", "config", "dtype", "compiled"}, each further one [whether to
train, steps], or null for the peak of memory; the lines on stdout are seconds, bytes, or
{"error"}. JAX is not imported, so that memory and processors are the peer's own.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from vit_jax.workdir import memory


def main() -> None:
    """Answers until stdin ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), 'w', buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # for what the libraries print
    try:
        timed = _prepare(**json.loads(sys.stdin.readline()))
        for line in sys.stdin:
            question = json.loads(line)
            print(
                json.dumps(_peak_memory() if question is None else timed(*question)), file=answers
            )
    except Exception as error:  # of any kind, in code that is not ours
        print(
            json.dumps({'error': f'{type(error).__name__}: {error}'.splitlines()[0]}), file=answers
        )


def _prepare(peer, config, dtype, compiled) -> Callable[[bool, int], float]:
    """The function (whether to train, how many steps) -> seconds."""
    import torch

    device = 'cuda' if (cuda := torch.cuda.is_available()) else 'cpu'
    torch.manual_seed(0)
    model = {'timm': _timm, 'transformers': _transformers}[peer](config).to(device)
    images = torch.randn(config['batch_size'], 3, *config['image_size'], device=device)
    labels = torch.randint(config['dataset']['num_classes'], (len(images),), device=device)
    if cuda:
        model = model.to(memory_format=torch.channels_last)
        images = images.to(memory_format=torch.channels_last)
        torch.set_float32_matmul_precision('high')
        torch.backends.cudnn.benchmark = True  # as timm's own benchmark has it
    optimizer = _optimizer(model, config['optimizer'])
    clip_norm, loss_of = config['optimizer']['clip_norm'], _loss(config)
    forward = torch.compile(model) if compiled else model
    autocast = torch.autocast(device, torch.bfloat16, enabled=dtype == 'bfloat16')

    def train():
        optimizer.zero_grad(set_to_none=True)
        with autocast:
            loss = loss_of(_logits(forward(images)).float(), labels)
        loss.backward()
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()

    def infer():
        with torch.inference_mode(), autocast:
            _logits(forward(images))

    def timed(training, count):
        model.train(training)
        start = time.perf_counter()
        for _ in range(count):
            train() if training else infer()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return timed


def _logits(output):
    return getattr(output, 'logits', output)


def _loss(config):
    import torch.nn.functional as F  # noqa: N812 - its usual name

    smoothing = config['loss']['label_smoothing']
    if config['loss']['name'] == 'softmax':
        return lambda logits, labels: F.cross_entropy(logits, labels, label_smoothing=smoothing)
    return lambda logits, labels: (
        F.binary_cross_entropy_with_logits(
            logits, F.one_hot(labels, logits.shape[1]).float(), reduction='sum'
        )
        / len(logits)
    )


def _optimizer(model, fields: dict[str, Any]):
    import torch

    rate, decay = fields['learning_rate'], fields['weight_decay']
    if fields['name'] == 'adam':
        return torch.optim.AdamW(
            model.parameters(),
            rate,
            (fields['b1'], fields['b2']),
            weight_decay=decay,
            fused=torch.cuda.is_available() or None,
        )
    return torch.optim.SGD(model.parameters(), rate, fields['momentum'], weight_decay=decay)


def _timm(config):
    from timm.models.vision_transformer import VisionTransformer

    model = config['model']
    cls = model['pool'] == 'cls'
    return VisionTransformer(
        config['image_size'],
        tuple(model['patch_size']),
        embed_dim=model['hidden_size'],
        depth=model['num_layers'],
        num_heads=model['num_heads'],
        mlp_ratio=model['mlp_dim'] / model['hidden_size'],
        class_token=cls,
        global_pool='token' if cls else 'avg',
        fc_norm=False,
        num_classes=config['dataset']['num_classes'],
        pos_drop_rate=model['dropout_rate'],
        proj_drop_rate=model['dropout_rate'],
        attn_drop_rate=model['attention_dropout_rate'],
        drop_path_rate=model['stochastic_depth_rate'],
        init_values=model['layer_scale_init'] or None,
    )


def _hide_broken_torchvision():
    """Lets transformers go without torchvision where its build does not fit that of torch.

    ViT needs no image processor of torchvision, but an import that fails would end in an error.
    """
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.partition('.')[0] == 'torchvision']:
            del sys.modules[name]
        sys.modules['torchvision'] = None


def _transformers(config):
    _hide_broken_torchvision()
    from transformers import ViTConfig, ViTForImageClassification

    model = config['model']
    if model['pool'] != 'cls':
        raise ValueError("transformers' ViT reads the class token: set model.pool=cls")
    for field in ('layer_scale_init', 'stochastic_depth_rate'):
        if model[field]:
            raise ValueError(f"transformers' ViT has none: set model.{field}=0")
    (height, width), (rows, columns) = config['image_size'], model['patch_size']
    if height != width or rows != columns:
        raise ValueError("transformers' ViT takes square images and patches")
    return ViTForImageClassification(
        ViTConfig(
            image_size=height,
            patch_size=rows,
            hidden_size=model['hidden_size'],
            num_hidden_layers=model['num_layers'],
            num_attention_heads=model['num_heads'],
            intermediate_size=model['mlp_dim'],
            hidden_dropout_prob=model['dropout_rate'],
            num_labels=config['dataset']['num_classes'],
            attention_probs_dropout_prob=model['attention_dropout_rate'],
        )
    )


def _peak_memory():
    import torch

    return (
        torch.cuda.max_memory_allocated() if torch.cuda.is_available() else (memory.peak_resident())
    )


if __name__ == '__main__':
    main()
