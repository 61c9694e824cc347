"""The process of vision_transformer, which trains or applies its model on request.

The protocol is in measuring/peer_process.py. vision_transformer's package is also named vit_jax; in
this process the name means the package of the clone. Its train.py imports modules for data,
checkpoints and text models, which need further packages. Empty modules replace them.
"""

import json
import os
import resource
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax


def prepare(clone, config):
    """Returns a function (whether to train, number of steps) -> seconds."""
    sys.path[0] = clone
    for name in ('checkpoint', 'input_pipeline', 'models'):
        sys.modules[f'vit_jax.{name}'] = types.ModuleType(name)
    import ml_collections

    from vit_jax import models_vit, train

    model = make_model(models_vit.VisionTransformer, ml_collections.ConfigDict, config)
    batch = make_batch(config, model.num_classes)
    first_image = batch['image'][0, :1]
    params = jax.jit(lambda: model.init(jax.random.key(0), first_image, train=False))()['params']
    tx = make_optimizer(config['optimizer'])
    update = train.make_update_fn(apply_fn=model.apply, accum_steps=1, tx=tx)
    infer = jax.pmap(lambda params, images: model.apply({'params': params}, images, train=False))
    state = (params, tx.init(params), jax.random.PRNGKey(0))
    # The arrays of pmap have an axis for the devices, of which there is one.
    weights, state = jax.tree.map(lambda x: jnp.asarray(x)[None], (params, state))
    batch = jax.device_put(batch)

    def train_steps(count):
        nonlocal state
        for _ in range(count):
            params, opt_state, rng = state
            params, opt_state, loss, rng = update(params, opt_state, batch, rng)
            state = (params, opt_state, rng)
        jax.block_until_ready((loss, state))

    def infer_steps(count):
        for _ in range(count):
            logits = infer(weights, batch['image'])
        jax.block_until_ready(logits)

    def seconds_of_steps(training, count):
        start = time.perf_counter()
        if training:
            train_steps(count)
        else:
            infer_steps(count)
        return time.perf_counter() - start

    return seconds_of_steps


def make_model(model_class, config_class, config):
    """Returns vision_transformer's model with the sizes of a config."""
    fields = config['model']
    names = ('num_layers', 'num_heads', 'mlp_dim', 'dropout_rate', 'attention_dropout_rate')
    return model_class(
        num_classes=config['dataset']['num_classes'],
        hidden_size=fields['hidden_size'],
        patches=config_class({'size': tuple(fields['patch_size'])}),
        transformer={name: fields[name] for name in names},
        classifier={'cls': 'token', 'gap': 'gap'}[fields['pool']],
    )


def make_batch(config, num_classes):
    """Returns a batch of noise with random labels, with an axis for one device."""
    batch_size = config['batch_size']
    rng = np.random.default_rng(0)
    images = rng.standard_normal((1, batch_size, *config['image_size'], 3), np.float32)
    one_hot = np.eye(num_classes, dtype=np.float32)
    labels = one_hot[rng.integers(0, num_classes, batch_size)]
    return {'image': images, 'label': labels[None]}


def make_optimizer(fields):
    """Returns the optimizer of a config, with a constant learning rate and without weight decay.

    vision_transformer's training step has no weight decay. Both take negligible time.
    """
    clip = optax.identity()
    if fields['clip_norm']:
        clip = optax.clip_by_global_norm(fields['clip_norm'])
    learning_rate = fields['learning_rate']
    if fields['name'] == 'adam':
        update = optax.adam(learning_rate, fields['b1'], fields['b2'])
    else:
        update = optax.sgd(learning_rate, fields['momentum'])
    return optax.chain(clip, update)


def main():
    """Responds to requests until stdin ends."""
    responses = os.fdopen(os.dup(sys.stdout.fileno()), 'w', buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print to stdout
    try:
        seconds_of_steps = prepare(**json.loads(sys.stdin.readline()))
        for line in sys.stdin:
            request = json.loads(line)
            if request is None:
                response = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            else:
                response = seconds_of_steps(*request)
            print(json.dumps(response), file=responses)
    except Exception as error:  # of any kind, because the code is another project's
        message = f'{type(error).__name__}: {error}'.splitlines()[0]
        print(json.dumps({'error': message}), file=responses)


if __name__ == '__main__':
    main()
