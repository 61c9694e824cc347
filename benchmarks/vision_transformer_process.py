"""vision_transformer's model and training step, timed when asked as measuring/peer_process.py is.

Its package has the name of ours: here `vit_jax` is the one of the clone. The modules that its
train.py imports for other work (data, checkpoints, text models) need packages that nothing here
uses, and are empty.
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
    """The function (whether to train, how many steps) -> seconds."""
    sys.path[0] = clone
    for name in ('checkpoint', 'input_pipeline', 'models'):
        sys.modules[f'vit_jax.{name}'] = types.ModuleType(name)
    import ml_collections

    from vit_jax import models_vit, train

    fields, rates = config['model'], ('dropout_rate', 'attention_dropout_rate')
    model = models_vit.VisionTransformer(
        num_classes=config['dataset']['num_classes'],
        hidden_size=fields['hidden_size'],
        patches=ml_collections.ConfigDict({'size': tuple(fields['patch_size'])}),
        transformer={name: fields[name] for name in ('num_layers', 'num_heads', 'mlp_dim', *rates)},
        classifier={'cls': 'token', 'gap': 'gap'}[fields['pool']],
    )
    rng, count = np.random.default_rng(0), config['batch_size']
    images = rng.standard_normal((1, count, *config['image_size'], 3), np.float32)
    labels = np.eye(model.num_classes, dtype=np.float32)[rng.integers(0, model.num_classes, count)]
    batch = {'image': images, 'label': labels[None]}
    params = jax.jit(lambda: model.init(jax.random.key(0), images[0, :1], train=False))()['params']
    optimizer = of_config(config['optimizer'])
    update = train.make_update_fn(apply_fn=model.apply, accum_steps=1, tx=optimizer)
    infer = jax.pmap(lambda params, images: model.apply({'params': params}, images, train=False))
    weights, *state = jax.tree.map(
        lambda x: jnp.asarray(x)[None],
        (  # of one device
            params,
            params,
            optimizer.init(params),
            jax.random.PRNGKey(0),
        ),
    )
    batch = jax.device_put(batch)

    def timed(training, steps):
        start = time.perf_counter()
        for _ in range(steps):
            if training:
                state[0], state[1], found, state[2] = update(state[0], state[1], batch, state[2])
            else:
                found = infer(weights, batch['image'])
        jax.block_until_ready((found, state))
        return time.perf_counter() - start

    return timed


def of_config(fields):
    """The optimizer of a config, without what costs next to nothing: its schedule and weight decay.

    The training step has no place for the decay.
    """
    clip = (
        optax.clip_by_global_norm(fields['clip_norm'])
        if fields['clip_norm']
        else (optax.identity())
    )
    rate = fields['learning_rate']
    return optax.chain(
        clip,
        optax.adam(rate, fields['b1'], fields['b2'])
        if fields['name'] == 'adam'
        else optax.sgd(rate, fields['momentum']),
    )


def main():
    """Answers until stdin ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), 'w', buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # for what the libraries print
    try:
        timed = prepare(**json.loads(sys.stdin.readline()))
        for line in sys.stdin:
            question = json.loads(line)
            print(
                json.dumps(
                    resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                    if question is None
                    else timed(*question)
                ),
                file=answers,
            )
    except Exception as error:  # of any kind, in code that is not ours
        print(
            json.dumps({'error': f'{type(error).__name__}: {error}'.splitlines()[0]}), file=answers
        )


if __name__ == '__main__':
    main()
