import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.functional.jitted_functions import F


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 9), st.lists(st.booleans(), min_size=5, max_size=5))
def test_a_ring_keeps_the_latest_of_what_was_put_in(num_slots, start, valid):
    """Against a dictionary that the entries are written to one after the other."""
    valid = np.asarray(valid)
    positions = start + np.cumsum(valid) - 1
    slots = F.ring_buffer_slots(np.asarray(positions), np.asarray(valid), num_slots)
    taken = slots[slots < num_slots]
    assert len(set(taken)) == len(taken)  # where two write to one, a GPU may keep either
    ring = F.write_slots(np.full(num_slots, -1), np.asarray(positions), slots)
    expected = np.full(num_slots, -1)
    for position, real in zip(positions, valid, strict=True):
        if real:
            expected[position % num_slots] = position
    np.testing.assert_array_equal(ring, expected)


def test_rows_have_slots_of_their_own_and_any_axes_behind():
    buffer, new = np.zeros((2, 4, 3)), 1.0 + np.arange(12.0).reshape(2, 2, 3)
    slots = np.asarray([[3, 0], [4, 2]])  # 4 is outside
    y = F.write_slots(buffer, new, slots)
    expected = np.zeros((2, 4, 3))
    expected[0, 3], expected[0, 0], expected[1, 2] = new[0, 0], new[0, 1], new[1, 1]
    np.testing.assert_array_equal(y, expected)
    rows = [F.write_slots(buffer[i], new[i], slots[i]) for i in range(2)]
    np.testing.assert_array_equal(y, np.stack(rows))
    np.testing.assert_array_equal(jax.jit(jax.vmap(F.write_slots))(buffer, new, slots), y)


def test_of_several_buffers_one_is_written_to():
    buffers = np.random.default_rng(0).normal(size=(3, 2, 4, 5)).astype(np.float32)
    new, slots = np.ones((2, 2, 5), np.float32), np.asarray([[3, 0], [4, 2]])
    actual = F.write_slots(buffers, new, slots, layer_index=np.int32(1))
    np.testing.assert_array_equal(actual[1], F.write_slots(buffers[1], new, slots))
    np.testing.assert_array_equal(actual[::2], buffers[::2])


def test_a_slot_outside_the_buffer_drops_its_entry():
    for outside in (-1, -3, -4, 3, 4):
        y = F.write_slots(np.zeros(3), np.asarray([7.0, 8.0]), np.asarray([outside, 1]))
        np.testing.assert_array_equal(y, [0, 8, 0])


def test_the_buffer_keeps_its_dtype_and_passes_gradients_to_what_is_in_it():
    buffer, new = np.zeros(3, jnp.bfloat16), np.asarray([1.5, 2.5])
    slots = np.asarray([2, 3])
    assert F.write_slots(buffer, new, slots).dtype == jnp.bfloat16
    gradient = jax.grad(lambda x: F.write_slots(np.zeros(3), x, slots).sum())(new)
    np.testing.assert_array_equal(gradient, [1, 0])


def test_length_mask_marks_the_first_places():
    mask = F.length_mask(np.asarray([[0, 2], [3, 1]]), 3)
    np.testing.assert_array_equal(mask.sum(-1), [[0, 2], [3, 1]])
    np.testing.assert_array_equal(mask[0, 1], [True, True, False])


def test_no_entries_go_nowhere():
    slots = F.ring_buffer_slots(np.zeros((2, 0), int), np.zeros((2, 0), bool), 3)
    np.testing.assert_array_equal(F.write_slots(np.ones((2, 3)), np.ones((2, 0)), slots), 1)
