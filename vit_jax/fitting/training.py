"""The second stage of a fit: short runs choose the learning rate, and a long one trains."""

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.errors import counted
from vit_jax.fitting import budget, probe, tries
from vit_jax.fitting.collect import TRAIN, VALIDATION
from vit_jax.fitting.preparation import Data
from vit_jax.fitting.record import TABLE, Record, Settings
from vit_jax.fitting.tries import Score, Setup
from vit_jax.weights import Weights

log = logging.getLogger(__name__)

_RESERVED = 0.1  # of the time, for the scores at the end


def make_setup(
    settings: Settings,
    folder: str,
    data: Data,
    probed: Weights,
    recipe: Callable[[str], ConfigDict],
) -> Setup:
    """The settings of all runs of a fit.

    Args:
      settings: the settings of the command.
      folder: of the fit.
      data: the photos.
      probed: the model of the linear probe, from which runs start.
      recipe: gives the config of tries.RECIPE for an argument.
    """
    argument = tries.recipe_argument(probed)
    return Setup(
        recipe=recipe(argument),
        recipe_argument=argument,
        weights=os.path.abspath(os.path.join(folder, probe.FILE)),
        model=probed.model,
        table=os.path.abspath(os.path.join(folder, TABLE)),
        multi_label=data.multi_label,
        balanced=data.balanced,
        seed=settings.seed,
    )


def make_plan(
    record: Record, setup: Setup, data: Data, probed: Weights, seconds: float
) -> budget.Plan:
    """The runs for some seconds; the plan of a resumed fit stays."""
    if not record.has('plan'):
        num_train = len(data.part(TRAIN))
        batch_size = budget.batch_size_for(num_train, jax.default_backend(), jax.device_count())
        step = budget.Step(probed.image_size(), batch_size)
        changes = tries.fields(setup, step, 100, budget.RATES[0], 10, is_augmented=False)
        changes |= {'dataset.num_examples': num_train, 'pretrained': '', 'transfer.take': ()}
        changes |= {'dataset.num_classes': len(data.class_names), 'transfer.keep_head': False}
        config = config_lib.changed(setup.recipe, changes)
        plan = budget.make_plan(
            config, seconds * (1 - _RESERVED), num_train, len(data.part(VALIDATION)), data.side
        )
        record.write('plan', plan.as_json())
    plan = budget.from_json(record['plan'])
    _report_plan(plan, len(data.part(TRAIN)))
    return plan


def _report_plan(plan, num_train):
    if not plan.run_steps:
        log.info('There is no time for fine-tuning: the linear probe is the model')
        return
    log.info(
        'A step of %d images of %dx%d px takes %.2f s here',
        plan.batch_size,
        *plan.image_size,
        plan.seconds_per_step,
    )
    first = f'uses the learning rate {plan.rates[0]:g} without tries'
    if plan.try_steps:
        first = f'tries {counted(len(plan.rates), "learning rate")} for {plan.try_steps} steps each'
    log.info(
        'Fine-tuning %s, then trains for %d steps (%.1f epochs): about %.0f minutes',
        first,
        plan.run_steps,
        plan.run_steps * plan.batch_size / num_train,
        plan.seconds() / 60,
    )


def _steps_of_run(record, plan, end):
    """Steps of the long run that end in time: the plan's, or fewer if the tries took longer."""
    if not record.has('run_steps'):
        seconds = (1 - _RESERVED) * (end - time.monotonic())
        record.write('run_steps', budget.steps_in(plan, seconds))
    return record['run_steps']


def train(
    folder: str,
    record: Record,
    setup: Setup,
    plan: budget.Plan,
    data: Data,
    probe_score: Score,
    end: float,
) -> tuple[int, str]:
    """Train the tries and the long run, or resume them.

    Args:
      folder: of the fit.
      record: the finished stages.
      setup: the settings of all runs.
      plan: the planned runs.
      data: the photos.
      probe_score: the score of the linear probe.
      end: time.monotonic() at which the fit should end.

    Returns:
      0 and the path of the best model, or the exit code after a signal and ''.
    """
    candidates = {os.path.join(folder, probe.FILE): probe_score}
    if not plan.run_steps:
        return 0, os.path.join(folder, probe.FILE)
    epoch_steps = max(1, len(data.part(TRAIN)) // plan.batch_size)
    scores: dict[str, Any] = {}
    done: set[str] = set()
    chosen = None
    while True:
        remaining = [t for t in tries.plan_of_tries(plan, scores) if t[0] not in done]
        if not remaining:
            break
        name, rate, is_augmented = remaining[0]
        changes = tries.fields(
            setup,
            plan.step(),
            plan.try_steps,
            rate,
            epoch_steps,
            is_augmented,
            tries.EVALUATIONS_OF_A_TRY,
        )
        changes['report'] = False
        workdir = os.path.join(folder, 'tries', name)
        code, score = _trained(record, setup, changes, workdir, f'try {name}')
        if code:
            return code, ''
        done.add(name)
        scores[name] = score
        if score is not None:
            candidates[workdir] = score
            is_better = chosen is None or score.goodness() > chosen[0].goodness()
            chosen = (score, rate, is_augmented) if is_better else chosen
    run_steps = _steps_of_run(record, plan, end)
    if not plan.try_steps:
        chosen = (None, plan.rates[0], False)
    if chosen is not None and run_steps:
        _, rate, is_augmented = chosen
        changes = tries.fields(setup, plan.step(), run_steps, rate, epoch_steps, is_augmented)
        workdir = os.path.join(folder, 'run')
        log.info('The same run by hand:\n  %s', tries.command(setup, changes, workdir))
        code, score = _trained(record, setup, changes, workdir, 'run')
        if code:
            return code, ''
        if score is not None:
            candidates[workdir] = score
    best = max(candidates, key=lambda path: candidates[path].goodness())
    log.info(
        'The best model on %s is %s: %.2f %%', VALIDATION, best, 100 * candidates[best].accuracy
    )
    return 0, best


def _trained(record, setup, changes, workdir, stage):
    """The exit code and the score of a run, which is trained unless it is recorded."""
    if not record.has(stage):
        code, score = tries.train(setup, changes, workdir)
        if code:
            return code, None
        record.write(stage, score)
        if score is not None:
            log.info('%s: %.2f %% on %s', stage, 100 * score.accuracy, VALIDATION)
    score = record[stage]
    return 0, None if score is None else Score(*score)
