"""Distillation: the images of the teacher, the loss of the student, and refused teachers."""

import dataclasses
import functools
import shutil

import jax
import numpy as np
import pytest
import scipy.special
from PIL import Image

from tests.support import small
from tests.support.errors import refused
from tests.support.parameters import randomised
from tests.support.programs import MESHES, program_on, small_config
from tests.support.runs import TIMED, TINY, load
from tests.support.steps import assert_close, random_batch, setup
from vit_jax import config as config_lib
from vit_jax import evaluate, models, weights
from vit_jax.models import cost
from vit_jax.objectives import registry
from vit_jax.objectives import teacher as teacher_lib
from vit_jax.objectives.teacher import Teacher
from vit_jax.parallel import feeding
from vit_jax.training import loop, mixup
from vit_jax.training import run as run_lib
from vit_jax.weights import adapt
from vit_jax.workdir import metrics, record

DIGITS = [str(k) for k in range(10)]


def saved(path, name='vit', classes=None, **change):
    """The path of a file with small random weights, and the weights."""
    made = small.make(name)
    if classes:
        made = small.with_classes(made, classes)
    made = dataclasses.replace(made, **change)
    path = str(path / 'teacher.safetensors')
    weights.save(made, path, 'vit_jax')
    return path, made


def config_of(path, image_size=(16, 16), **fields):
    return config_lib.changed(
        small_config(),
        {'teacher.weights': path, 'image_size': image_size, 'dataset.num_classes': 7} | fields,
    )


def normalised(pixels, of):
    return ((pixels - np.array(of['mean'])) / np.array(of['std'])).astype(np.float32)


def pixels_of(height, width, number=3):
    return np.random.default_rng(4).uniform(0, 1, (number, height, width, 3))


def logits_of(teacher, params, pixels, config):
    return np.asarray(jax.jit(teacher.logits)(params, normalised(pixels, config.preprocess)))


@pytest.mark.parametrize(
    'name', ['vit', *(pytest.param(name, marks=pytest.mark.slow) for name in ('bit', 'hybrid'))]
)
def test_the_teacher_has_the_same_pixels_in_its_own_normalisation(name, tmp_path):
    path, made = saved(tmp_path, name)
    size = made.image_size()
    config = config_of(path, size, **{'preprocess.mean': (0.2, 0.5, 0.7)})
    teacher = teacher_lib.load(config, small.CLASSES)
    params = teacher.params
    pixels = pixels_of(*size)
    small.assert_close(
        logits_of(teacher, params, pixels, config),
        small.logits(made, normalised(pixels, made.preprocess)),
    )


@pytest.mark.nightly
@pytest.mark.parametrize('size', [(8, 24), pytest.param((32, 32), marks=pytest.mark.slow)])
def test_images_are_resized_to_the_size_of_the_weights(size, tmp_path):
    """The pixels equal Pillow with floats: linear, and antialiased where the image shrinks."""
    path, made = saved(tmp_path)
    teacher = teacher_lib.load(config_of(path, size), small.CLASSES)
    params = teacher.params
    pixels = pixels_of(*size)
    resized = np.stack(
        [
            np.stack(
                [
                    np.asarray(
                        Image.fromarray(channel.astype(np.float32)).resize(
                            (16, 16), Image.Resampling.BILINEAR
                        )
                    )
                    for channel in image.transpose(2, 0, 1)
                ],
                -1,
            )
            for image in pixels
        ]
    )
    small.assert_close(
        logits_of(teacher, params, pixels, config_of(path)),
        small.logits(made, normalised(resized, made.preprocess)),
    )


@pytest.mark.slow
def test_another_image_size_adapts_the_position_embeddings(tmp_path):
    path, made = saved(tmp_path)
    config = config_of(path, (32, 24), **{'teacher.image_size': (32, 24)})
    teacher = teacher_lib.load(config, small.CLASSES)
    params = teacher.params
    embedding = made.params['position']['embedding']
    patches = adapt.resize_grid(embedding[:, 1:].reshape(1, 2, 2, 128), (4, 3), 'bilinear')
    position = np.concatenate([embedding[:, :1], patches.reshape(1, 12, 128)], 1)
    expected = dataclasses.replace(made, params=made.params | {'position': {'embedding': position}})
    pixels = pixels_of(32, 24)
    small.assert_close(
        logits_of(teacher, params, pixels, config),
        small.logits(expected, normalised(pixels, made.preprocess)),
    )


def test_weights_without_preprocessing_use_the_images_of_the_student(tmp_path, caplog):
    path, _ = saved(tmp_path, 'no-position', preprocess=None)
    config = config_of(
        path, (48, 40), **{'preprocess.std': (0.2, 0.3, 0.4), 'model.dtype': 'bfloat16'}
    )
    teacher = teacher_lib.load(config)
    params = teacher.params
    assert teacher.image_size == (48, 40)
    assert (teacher.scale.tolist(), teacher.offset.tolist()) == ([1] * 3, [0] * 3)
    assert 'does not state mean and std of its images' in caplog.text
    assert teacher.model.fields.dtype == 'bfloat16'
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(np.float32)}


def test_a_config_without_a_teacher():
    assert teacher_lib.load(small_config()) is None


@pytest.mark.parametrize(
    ('change', 'kind', 'field'),
    [
        ({'classes': DIGITS}, 'value', 'num_classes'),
        ({'classes': [*small.CLASSES[1:], 'ant']}, 'value', 'classes'),
        ({'loss': 'sigmoid'}, 'value', 'teacher.weights'),
        ({'name': 'headless'}, 'value', 'num_classes'),
        ({'name': 'rectangle'}, 'inapplicable', 'teacher.weights'),
    ],
    ids=str,
)
def test_unusable_teachers_are_refused(change, kind, field, tmp_path):
    path, _ = saved(tmp_path, **change)
    with refused(kind, field=field) as error:
        teacher_lib.load(config_of(path), small.CLASSES)
    assert path in str(error.value)


@pytest.mark.parametrize(
    ('field', 'value'), [('teacher.image_size', (20, 16)), ('teacher.checksum', 5)]
)
def test_fields_that_do_not_fit_the_teacher_are_refused(field, value, tmp_path):
    path, _ = saved(tmp_path)
    with refused('value', field=field, value=value):
        teacher_lib.load(config_of(path, **{field: value}), small.CLASSES)


def test_a_teacher_that_is_missing_is_named_by_its_field(tmp_path):
    path = str(tmp_path / 'gone.npz')
    with refused('missing', field='teacher.weights', file=path):
        teacher_lib.load(config_of(path), small.CLASSES)


def test_the_checksum_depends_on_everything_that_decides_the_logits(tmp_path):
    path, made = saved(tmp_path)
    checksums = [teacher_lib.load(config_of(path)).checksum for _ in range(2)]
    for change in (
        {'params': made.params | {'cls': made.params['cls'] + 1e-7}},
        {'model': made.model | {'gelu': 'erf'}},
    ):
        checksums.append(teacher_lib.load(config_of(saved(tmp_path, **change)[0])).checksum)
    checksums.append(
        teacher_lib.load(
            config_of(saved(tmp_path)[0], **{'preprocess.mean': (0.1, 0.2, 0.3)})
        ).checksum
    )
    assert checksums[0] == checksums[1]
    assert len(set(checksums)) == 4


@functools.cache
def taught(temperature=3.0, share=1.0):
    """(state, step, teacher_params) of the model and the step of tests/support/steps.py.

    Parameters of both are random and different.
    """
    state, step, model, _ = setup()
    mine, its = (randomised(model, np.zeros((1, 8, 8, 3)), k) for k in (0, 1))
    teacher = Teacher(model, {}, its, 0, (8, 8), np.ones(3), np.zeros(3), temperature, share)
    config = config_lib.base()
    config.teacher.weights = 'given'
    objective = registry.build(config, model, teacher)
    return (
        state.replace(params=mine),
        jax.jit(
            functools.partial(step, objective=objective), static_argnames=('mixup', 'accum_steps')
        ),
        its,
    )


@pytest.mark.parametrize(
    ('temperature', 'share'), [(3.0, 1.0), pytest.param(2.0, 0.7, marks=pytest.mark.slow)]
)
def test_the_loss_of_a_step_equals_numpy(temperature, share):
    state, step, params = taught(temperature, share)
    batch = random_batch(6)
    new, values = step(state, batch, params)

    @jax.jit
    def forward_and_backward(params, by_logits):
        logits, backward = jax.vjp(
            lambda x: setup()[2].apply({'params': x}, batch['image']), params
        )
        return logits, *backward(by_logits)

    mine, its = (
        np.asarray(forward_and_backward(x, np.zeros((6, 3), np.float32))[0], np.float64)
        for x in (state.params, params)
    )
    p, q = (scipy.special.softmax(x / temperature, -1) for x in (its, mine))
    of_labels = -scipy.special.log_softmax(mine, -1)[np.arange(6), batch['label']]
    expected = share * temperature**2 * (p * np.log(p / q)).sum(-1) + (1 - share) * of_labels
    np.testing.assert_allclose(values['loss'], expected.mean(), rtol=1e-5)
    np.testing.assert_allclose(values['agreement'], (mine.argmax(-1) == its.argmax(-1)).mean())
    # State and gradient depend on the logits of the teacher only.
    assert jax.tree.structure(new) == jax.tree.structure(state)
    by_logits = share * temperature * (q - p) + (1 - share) * (
        scipy.special.softmax(mine, -1) - np.eye(3)[batch['label']]
    )
    _, grads = forward_and_backward(state.params, np.float32(by_logits / 6))
    assert_close(new.params, jax.tree.map(lambda x, g: x - 0.1 * g, state.params, grads))


def test_a_model_that_is_its_own_teacher_has_no_gradient():
    state, step, params = taught()
    new, values = step(state.replace(params=params), random_batch(6), params)
    assert abs(values['loss']) < 1e-6
    assert values['grad_norm'] < 1e-5
    assert values['agreement'] == 1
    assert_close(new.params, params, 1e-6)


@pytest.mark.nightly
@pytest.mark.slow
def test_student_and_teacher_have_the_same_mixed_images_in_parts():
    state, step, params = taught()
    batch = random_batch(12)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0), mixup.STREAM)
    expected = step(state, mixup.mix(batch, 0.4, key, 3), params)
    for parts in (1, 3):
        found = step(state, batch, params, mixup=0.4, accum_steps=parts)
        assert_close((found[0].params, found[1]), (expected[0].params, expected[1]))


@pytest.mark.slow
def test_a_mesh_equals_one_device(tmp_path):
    path, _ = saved(tmp_path)
    results = []
    for mesh in (dict(data=1, fsdp=1, tensor=1), MESHES['mixed']):
        config = config_of(path, (24, 24), **{'augment.mixup': 0.5, 'accum_steps': 2})
        program = program_on(config, teacher=teacher_lib.load(config), **mesh)
        (placed,) = program.placed_constants()
        kernel = placed['blocks']['mlp']['dense1']['kernel']
        assert (
            kernel.nbytes
            == kernel.addressable_shards[0].data.nbytes * mesh['fsdp'] * (mesh['tensor'])
        )
        state, values = program.initial_state(), []
        for k in range(3):
            batch = random_batch(16, k) | {
                'image': normalised(pixels_of(24, 24, 16), {'mean': 0.5, 'std': 0.5})
            }
            state, metrics_of_step = program.train_step(
                state, next(feeding.feed(iter([batch]), program.mesh)), placed
            )
            values.append(metrics_of_step)
        results.append(jax.device_get((state.params, values)))
    assert_close(*results)


@pytest.mark.slow
def test_flops_and_memory_of_a_step_with_a_teacher(tmp_path):
    path, made = saved(tmp_path)
    teacher = teacher_lib.load(config_of(path))
    one = dict(data=1, fsdp=1, tensor=1)
    without = program_on(config_of(''), **one)
    program = program_on(config_of(path), teacher=teacher, **one)
    its = cost.of_model(models.build(made.model, 7), (16, 16)).flops * program.config.batch_size
    assert program.flops_of_train_step() == without.flops_of_train_step() + its
    assert program.flops_per_step() == without.flops_per_step() + its


def test_impossible_programs_are_refused(tmp_path):
    path, _ = saved(tmp_path)
    teacher = teacher_lib.load(config_of(path))
    with refused('missing', field='teacher.weights', value=path):
        program_on(config_of(path), **MESHES['mixed'])
    with refused('value', field='teacher.num_heads', value=2):
        program_on(config_of(path), teacher=teacher, **MESHES['tensor'])


def digits_config(path, **fields):
    config = load('quickstart').get_config()
    config.update_from_flattened_dict(
        TINY
        | {
            'num_epochs': 0.0,
            'num_steps': 4,
            'eval_every': 100,
            'teacher.weights': path,
            'optimizer.warmup_steps': 1,
        }
        | fields
    )
    return config


def test_a_run_resumes_with_the_same_teacher_only(tmp_path):
    path, _ = saved(tmp_path, classes=DIGITS)
    run, _ = run_lib.resolve(digits_config(path), str(tmp_path / 'run'))
    assert run.config.teacher.checksum > 0
    (tmp_path / 'run' / 'checkpoints' / '2').mkdir(parents=True)
    record.write(str(tmp_path / 'run'), run.config, run.train_data.class_names)
    (tmp_path / 'moved').mkdir()
    moved, made = saved(tmp_path / 'moved', classes=DIGITS)
    again, _ = run_lib.resolve(digits_config(moved), str(tmp_path / 'run'))
    assert again.config.teacher.checksum == run.config.teacher.checksum
    saved(tmp_path / 'moved', classes=DIGITS, params=made.params | {'cls': made.params['cls'] + 1})
    for weights_now in (moved, ''):
        with refused('conflict', file=tmp_path / 'run') as error:
            run_lib.resolve(digits_config(weights_now), str(tmp_path / 'run'))
        (difference,) = error.value.value
        assert difference.startswith(f'teacher.checksum: {run.config.teacher.checksum} ')


@pytest.mark.slow
def test_resumed_run_is_bit_identical(tmp_path, caplog):
    """The run has eight devices, MixUp and parts. Checkpoints do not contain the teacher."""
    path, _ = saved(tmp_path, classes=DIGITS)
    config = digits_config(
        path,
        checkpoint_every=2,
        keep_checkpoints=2,
        accum_steps=2,
        **{'augment.mixup': 0.5, 'teacher.temperature': 2.0, 'model.dropout_rate': 0.2},
    )
    assert loop.train(config, str(tmp_path / 'whole')) == 0
    shutil.copytree(tmp_path / 'whole', tmp_path / 'parts')
    shutil.rmtree(tmp_path / 'parts' / 'checkpoints' / '4')  # the run ended before
    assert loop.train(config, str(tmp_path / 'parts')) == 0
    assert 'continuing from the checkpoint of step 2 of 4' in caplog.text
    whole, parts = (
        [
            {k: v for k, v in row.items() if k not in TIMED}
            for row in metrics.read(tmp_path / name)
            if 'train/loss' in row
        ]
        for name in ('whole', 'parts')
    )
    assert whole == parts
    assert len(whole) == 4
    assert all(0 <= row['train/agreement'] <= 1 for row in whole)
    loaded = weights.load(str(tmp_path / 'parts'))
    assert loaded.params['blocks']['mlp']['dense1']['kernel'].shape == (2, 16, 32)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_distilled_student_agrees_with_its_teacher(run_main, tmp_path):
    """On other images it agrees far more than a student that learns labels with the same seed."""
    fields = TINY | {
        'num_steps': 400,
        'eval_every': 0,
        'log_every': 50,
        'batch_size': 64,
        'checkpoint_every': 0,
        'model.hidden_size': 32,
        'model.mlp_dim': 64,
        'model.num_heads': 4,
        'optimizer.learning_rate': 0.003,
    }
    found = {}
    for name, more in (
        ('teacher', {}),
        ('other', {'seed': 1}),
        ('student', {'seed': 1, 'teacher.weights': tmp_path / 'teacher'}),
    ):
        result = run_main(tmp_path / name, fields=fields | more, optimized=True)
        assert result.returncode == 0, result.stderr
        file = tmp_path / f'{name}.npz'
        assert evaluate.main([f'--workdir={tmp_path / name}', f'--save={file}']) == 0
        found[name] = scipy.special.softmax(np.load(file)['logits'].astype(np.float64), -1)
    divergence = {
        name: scipy.special.rel_entr(found['teacher'], x).sum(-1).mean()
        for name, x in found.items()
    }
    assert divergence['student'] < divergence['other'] / 2
    agreement = {
        name: (found['teacher'].argmax(-1) == x.argmax(-1)).mean() for name, x in found.items()
    }
    assert agreement['student'] > agreement['other']
    assert metrics.read(tmp_path / 'student')[-2]['train/agreement'] > 0.8
