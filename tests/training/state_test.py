import jax
import numpy as np

from tests.support.steps import setup


def test_initial_state_depends_on_the_seed_and_has_arrays_only():
    a, b, c = (setup.__wrapped__(seed=s)[0] for s in (3, 3, 4))  # none is remembered
    same = jax.tree.map(np.array_equal, a, b)
    assert all(jax.tree.leaves(same))
    assert not np.array_equal(a.params['embedding']['kernel'], c.params['embedding']['kernel'])
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(a))
    assert a.ema_params is None
    assert int(a.step) == 0


def test_average_starts_at_the_parameters():
    state = setup(ema=True)[0]
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, state.params, state.ema_params)))
