"""The training loop: from a config and a workdir to checkpoints, metrics and curves."""

import contextlib
import dataclasses
import logging
import math
import os
import sys
import time
import zlib

import jax
import jax.numpy as jnp
from clu import metric_writers, parameter_overview
from ml_collections import ConfigDict
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from vit_jax import config as config_lib
from vit_jax.data import pipeline, sources
from vit_jax.errors import DivergedError, UserError
from vit_jax.evaluators import classification
from vit_jax.processes import hosts
from vit_jax.training import accumulation, optimizer, pretrained, sharding
from vit_jax.training.program import Program
from vit_jax.workdir import checkpoint, curves, logs, metrics, progress
from vit_jax.workdir import record as workdir
from vit_jax.workdir.interrupts import Interrupts

log = logging.getLogger(__name__)

LOOKAHEAD = 1  # batches on the devices before they are needed


def run(config: ConfigDict, directory: str) -> int:
    """Trains, or goes on where the workdir's newest checkpoint stands.

    Args:
      config: see vit_jax/config.py.
      directory: the workdir; made when missing.

    Returns:
      0 when the run is complete; 128 + signal number when SIGTERM or SIGINT came, saved, also
      when it came too late to stop the run. With several processes, what stops one of them stops
      all, at the same step.

    Raises:
      UserError: the config, the data or the workdir cannot be used.
      DivergedError: the loss, the gradient or the update is not finite.
    """
    with (Interrupts() as interrupts, contextlib.ExitStack() as stack,
          hosts.together(lambda: workdir.where_to_go_on(directory))):
        hosts.check_equal('the config', config_lib.flatten(config) | {
            '--workdir': directory, 'version of jax': jax.__version__})
        config_lib.check(config)
        stack.enter_context(workdir.lock(directory))
        trainer = Trainer(config, directory, interrupts, stack)
        stack.enter_context(logging_redirect_tqdm([logs.LOGGER]))
        trainer.train()
        received = hosts.agree(interrupts.received or 0, max)  # also after the last step
    received = received or interrupts.received  # while the files were being closed
    return 128 + received if received else 0


class Trainer:
    """A run that is set up: state, compiled steps, data at the right place, open files.

    Attributes:
      step: updates done.
      num_steps: updates of the whole run.
    """

    def __init__(self, config: ConfigDict, directory: str, interrupts: Interrupts,
                 stack: contextlib.ExitStack):
        self._directory, self._interrupts = directory, interrupts
        self._mesh = sharding.make_mesh(config.mesh)
        config, self._pretrained = pretrained.take_fields(config, directory)
        sharding.check_batch(config.batch_size, config.accum_steps, self._mesh)
        sharding.check_model(config.model, self._mesh)
        train_split, eval_split = config.dataset.train_split, config.dataset.eval_split
        self._train_source = sources.open_source(config.dataset, train_split)
        names = self._train_source.class_names
        self._eval_source = sources.open_source(config.dataset, eval_split, class_names=names)
        hosts.check_equal('the data', {
            'training images': self._train_source.num_examples,
            'evaluation images': self._eval_source.num_examples, 'classes': len(names),
            'checksum of their names': zlib.crc32('\n'.join(names).encode())})
        config = config_lib.settle(config, self._train_source.num_examples, len(names))
        self._config = config = workdir.claim(directory, config, names)
        self._program = Program(config, self._mesh)
        self.num_steps = self._program.num_steps
        self._checkpointer = checkpoint.Checkpointer(
            workdir.checkpoint_directory(directory), config.keep_checkpoints, config.keep_best)
        stack.callback(self._checkpointer.close)
        self._state = self._initial_or_restored_state()
        self.step = int(self._state.step)
        if self.step > self.num_steps:
            raise UserError(f'{directory} is at step {self.step} already and the config asks for '
                            f'{self.num_steps}. Raise num_steps or num_epochs, or take another '
                            '--workdir.')
        workdir.record(directory, config, names)
        writer = metric_writers.SummaryWriter(directory) if hosts.is_main() else None
        self._eval_batches = pipeline.eval_batches(self._eval_source, config,
                                               *sharding.data_share(self._mesh))
        self._metrics = metrics.MetricsLog(directory, self.step, writer)
        stack.callback(self._metrics.close)

    @property
    def complete(self) -> bool:
        """Whether all steps and the last evaluation are done."""
        return self.step == self.num_steps and self._metrics.has(self.step, 'eval/loss')

    def train(self) -> None:
        """Runs what remains; returns early, saved, when interrupted."""
        self._announce()
        if self.complete:
            log.info('the run is complete at step %d: to go on, raise num_steps or num_epochs. '
                     'Checkpoints: %s', self.step, self._checkpointer.directory)
            return
        if self._due('eval', self.step) and not self._metrics.has(self.step, 'eval/loss'):
            self._evaluate()  # the interruption came before this evaluation
        if self.step < self.num_steps:
            self._train_steps()
        self._conclude()

    def _train_steps(self):
        train_step = self._compile()
        meter = progress.Meter(self._config.batch_size, self._program.flops_per_step(),
                               self.num_steps)
        batches = self._on_device(meter.timed(pipeline.train_batches(
            self._train_source, self._config, self.step, *sharding.data_share(self._mesh))))
        meter.start(self.step)
        bar = tqdm(total=self.num_steps, initial=self.step, unit='step',
                   disable=not (hosts.is_main() and sys.stderr.isatty()))
        values = evaluated = None  # of the newest step
        while self.step < self.num_steps and not self._interrupts.anywhere():
            before = values
            self._state, values = train_step(self._state, next(batches))
            self.step += 1
            bar.update()
            if before is not None:  # read while the devices work on the step after it
                self._require_finite(self.step - 1, before)
            if self._due('log', self.step):
                self._log(values, meter)
            evaluated = None
            if self._due('eval', self.step):
                self._require_finite(self.step, values)  # or metrics.jsonl would have NaN
                start = time.perf_counter()
                evaluated = self._evaluate()
                meter.pause(time.perf_counter() - start)
            best = evaluated is not None and self._config.keep_best
            if self._due('checkpoint', self.step) or best:
                self._save(values, evaluated)
        bar.close()
        if values is not None:  # a signal may come at any time: save what the loop did not
            self._save(values, evaluated)

    def _initial_or_restored_state(self):
        state = self._checkpointer.restore_latest(self._program.abstract_state)
        if state is None:
            state = self._program.initial_state()
            if self._pretrained is not None:
                state = self._start_from_pretrained(state)
        self._pretrained = None  # the host needs them no longer
        return state

    def _start_from_pretrained(self, state):
        loaded = pretrained.initial_params(self._pretrained, self._config,
                                           self._program.abstract_state.params)
        params = pretrained.replace_params(state.params, loaded)
        average = state.ema_params and jax.tree.map(jnp.copy, params)  # both are donated
        return dataclasses.replace(state, params=params, ema_params=average)

    def _announce(self):
        config = self._config
        if self.step == 0:
            log.info('%s', parameter_overview.get_parameter_overview(
                self._state.params, include_stats=False))
        log.info('%s%d training images, %d evaluation images, %d classes, %d %s, workdir %s',
                 f'{config.recipe}: ' if config.recipe else '', self._train_source.num_examples,
                 self._eval_source.num_examples, config.dataset.num_classes, jax.device_count(),
                 jax.devices()[0].device_kind, self._directory)
        if config.optimizer.lr_factors:
            factors = optimizer.lr_factors(self._state.params, config.optimizer.lr_factors)
            sizes = [x.size for x in jax.tree.leaves(self._state.params)]
            trained = sum(size for size, factor in zip(sizes, jax.tree.leaves(factors), strict=True)
                          if factor)
            log.info('training %s of %s parameters', f'{trained:,}', f'{sum(sizes):,}')
        initial = (config.ema_decay or 0) ** self.num_steps  # its share of the average at the end
        if initial > 0.1:
            log.warning('ema_decay %g is much for %d steps: at the end %.0f %% of the average, '
                        'which is what is evaluated, will be the initial weights. Try %.4g, or 0 '
                        'for no average.', config.ema_decay, self.num_steps, 100 * initial,
                        max(0, 1 - 10 / self.num_steps))
        for name in sharding.unsplit(self._state.params, self._mesh):
            log.warning('mesh.fsdp %d divides no axis of %s: every device holds it whole',
                        self._mesh.shape['fsdp'], name)
        if 0 < self.step < self.num_steps:
            log.info('continuing from the checkpoint of step %d of %d', self.step, self.num_steps)

    def _compile(self):
        """The compiled training step; cuts the batch when accum_steps is to be chosen."""
        config = self._config

        def compile_step(accum_steps):
            return self._program.lower_train_step(accum_steps).compile()

        start = time.perf_counter()
        if config.accum_steps:
            compiled = compile_step(config.accum_steps)
        else:
            parts = sharding.batch_parts(self._mesh)
            pixels = math.prod(self._program.abstract_batch['image'].shape)
            under_way = LOOKAHEAD + 1
            if jax.default_backend() == 'cpu':  # where the input pipeline has no memory of its own
                under_way += pipeline.BATCHES_IN_MEMORY
            config.accum_steps, compiled = accumulation.choose(
                compile_step, config.batch_size, parts, under_way * 4 * pixels / parts)  # float32
            # A continued run must sum in the same order.
            workdir.record(self._directory, config, self._train_source.class_names)
        log.info('compiled the training step in %.1f s', time.perf_counter() - start)
        return compiled

    def _on_device(self, batches):
        """The same batches as arrays on the mesh, LOOKAHEAD of them under way."""
        by_example = sharding.batch_sharding(self._mesh)
        ahead = []
        for batch in batches:
            ahead.append(sharding.shard_batch(batch, by_example))
            if len(ahead) > LOOKAHEAD:
                yield ahead.pop(0)
        yield from ahead

    def _due(self, what, step):
        every = self._config[f'{what}_every']
        return step > 0 and (step == self.num_steps or (every > 0 and step % every == 0))

    def _require_finite(self, step, values):
        loss, grad_norm, update_norm = (
            float(values[name]) for name in ('loss', 'grad_norm', 'update_norm'))
        if not all(map(math.isfinite, (loss, grad_norm, update_norm))):
            self._checkpointer.wait()
            last = self._checkpointer.latest_step()
            kept = ('No checkpoint had been written yet.' if last is None else
                    f'The last good checkpoint, of step {last}, is in '
                    f'{self._checkpointer.directory}.')
            raise DivergedError(f'the loss is {loss}, the gradient norm {grad_norm} and the update '
                                f'norm {update_norm} at step {step}. {kept} With another '
                                '--workdir, lower optimizer.learning_rate, lengthen '
                                'optimizer.warmup_steps, or set optimizer.clip_norm.')

    def _log(self, values, meter):
        self._require_finite(self.step, values)  # waits for the step, so that the time is right
        values = {name: float(value) for name, value in values.items()} | meter.report(self.step)
        self._metrics.write(self.step, {f'train/{name}': value for name, value in values.items()})
        log.info('%s', progress.describe(self.step, self.num_steps, values))

    def _evaluate(self):
        """Evaluates and draws the curves; None when a signal came in the middle."""
        start = time.perf_counter()
        params = self._state.params if self._state.ema_params is None else self._state.ema_params
        values = classification.evaluate(self._program.eval_step, params,
                                         self._on_device(self._eval_batches),
                                         self._interrupts.anywhere)
        if values is not None:
            seconds = time.perf_counter() - start
            self._metrics.write(self.step, values | {'eval/seconds': seconds})
            if hosts.is_main():
                curves.draw(self._metrics.rows, self._curves_path)
            log.info('step %d/%d  eval accuracy %.2f %%  top-5 %.2f %%  loss %.4f  on %d images in '
                     '%.1f s', self.step, self.num_steps, 100 * values['eval/accuracy'],
                     100 * values['eval/accuracy_top5'], values['eval/loss'],
                     values['eval/num_examples'], seconds)
        return values

    @property
    def _curves_path(self):
        return os.path.join(self._directory, 'curves.png')

    def _save(self, values, evaluated):
        self._require_finite(self.step, values)
        self._metrics.sync()
        self._checkpointer.save(self.step, self._state, evaluated)

    def _conclude(self):
        self._checkpointer.wait()
        if not self.complete:
            saved = ('and saved' if self._checkpointer.latest_step() == self.step
                     else 'before there was anything to save')
            log.warning('stopped by %s after step %d of %d %s. To continue, run the same command '
                        'again.', self._interrupts.received.name, self.step, self.num_steps, saved)
            return
        log.info('done: %d steps\n  curves      %s\n  checkpoint  %s\n  metrics     %s',
                 self.step, self._curves_path,
                 os.path.join(self._checkpointer.directory, str(self.step)),
                 os.path.join(self._directory, 'metrics.jsonl'))
