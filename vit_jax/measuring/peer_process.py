"""The process of a peer, which trains or applies a model of another project on request.

    python -m vit_jax.measuring.peer_process

The first line on stdin is {"peer", "config", "dtype", "compiled"}. Each further line is a request:
[whether to train, number of steps], or null for the peak memory. Each line on stdout is a response:
seconds, bytes, or {"error"}. The process does not import JAX, because JAX would use memory and
processors.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from vit_jax.workdir import memory


def main() -> None:
    """Responds to requests until stdin ends."""
    responses = os.fdopen(os.dup(sys.stdout.fileno()), 'w', buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print to stdout
    try:
        seconds_of_steps = _prepare(**json.loads(sys.stdin.readline()))
        for line in sys.stdin:
            request = json.loads(line)
            response = _peak_memory() if request is None else seconds_of_steps(*request)
            print(json.dumps(response), file=responses)
    except Exception as error:  # another project's code may raise anything
        message = f'{type(error).__name__}: {error}'.splitlines()[0]
        print(json.dumps({'error': message}), file=responses)


def _prepare(peer, config, dtype, compiled) -> Callable[[bool, int], float]:
    """Returns a function (whether to train, number of steps) -> seconds."""
    import torch

    has_gpu = torch.cuda.is_available()
    device = 'cuda' if has_gpu else 'cpu'
    torch.manual_seed(0)
    model = {'timm': _timm, 'transformers': _transformers}[peer](config).to(device)
    images = torch.randn(config['batch_size'], 3, *config['image_size'], device=device)
    labels = torch.randint(config['dataset']['num_classes'], (len(images),), device=device)
    if has_gpu:
        model = model.to(memory_format=torch.channels_last)
        images = images.to(memory_format=torch.channels_last)
        torch.set_float32_matmul_precision('high')
        torch.backends.cudnn.benchmark = True  # as in timm's own benchmark
    optimizer = _optimizer(model, config['optimizer'])
    clip_norm = config['optimizer']['clip_norm']
    loss_of = _loss(config)
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

    def seconds_of_steps(training, count):
        step = train if training else infer
        model.train(training)
        start = time.perf_counter()
        for _ in range(count):
            step()
        if has_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return seconds_of_steps


def _logits(output):
    return getattr(output, 'logits', output)


def _loss(config):
    import torch.nn.functional as F  # noqa: N812 - its usual name

    def softmax(logits, labels):
        smoothing = config['loss']['label_smoothing']
        return F.cross_entropy(logits, labels, label_smoothing=smoothing)

    def sigmoid(logits, labels):
        targets = F.one_hot(labels, logits.shape[1]).float()
        total = F.binary_cross_entropy_with_logits(logits, targets, reduction='sum')
        return total / len(logits)

    return softmax if config['loss']['name'] == 'softmax' else sigmoid


def _optimizer(model, fields: dict[str, Any]):
    import torch

    learning_rate = fields['learning_rate']
    weight_decay = fields['weight_decay']
    if fields['name'] == 'adam':
        return torch.optim.AdamW(
            model.parameters(),
            learning_rate,
            (fields['b1'], fields['b2']),
            weight_decay=weight_decay,
            fused=torch.cuda.is_available() or None,
        )
    return torch.optim.SGD(
        model.parameters(), learning_rate, fields['momentum'], weight_decay=weight_decay
    )


def _timm(config):
    from timm.models.vision_transformer import VisionTransformer

    model = config['model']
    has_class_token = model['pool'] == 'cls'
    return VisionTransformer(
        config['image_size'],
        tuple(model['patch_size']),
        embed_dim=model['hidden_size'],
        depth=model['num_layers'],
        num_heads=model['num_heads'],
        mlp_ratio=model['mlp_dim'] / model['hidden_size'],
        class_token=has_class_token,
        global_pool='token' if has_class_token else 'avg',
        fc_norm=False,
        num_classes=config['dataset']['num_classes'],
        pos_drop_rate=model['dropout_rate'],
        proj_drop_rate=model['dropout_rate'],
        attn_drop_rate=model['attention_dropout_rate'],
        drop_path_rate=model['stochastic_depth_rate'],
        init_values=model['layer_scale_init'] or None,
    )


def _hide_broken_torchvision():
    """Hides torchvision from transformers if its build does not fit torch's.

    ViT does not need torchvision's image processors, but transformers fails if the import does.
    """
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        for name in list(sys.modules):
            if name.partition('.')[0] == 'torchvision':
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
            raise ValueError(f"transformers' ViT does not support model.{field}: set it to 0")
    height, width = config['image_size']
    patch_height, patch_width = model['patch_size']
    if height != width or patch_height != patch_width:
        raise ValueError("transformers' ViT supports only square images and patches")
    vit_config = ViTConfig(
        image_size=height,
        patch_size=patch_height,
        hidden_size=model['hidden_size'],
        num_hidden_layers=model['num_layers'],
        num_attention_heads=model['num_heads'],
        intermediate_size=model['mlp_dim'],
        hidden_dropout_prob=model['dropout_rate'],
        num_labels=config['dataset']['num_classes'],
        attention_probs_dropout_prob=model['attention_dropout_rate'],
    )
    return ViTForImageClassification(vit_config)


def _peak_memory():
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return memory.peak_resident()


if __name__ == '__main__':
    main()
