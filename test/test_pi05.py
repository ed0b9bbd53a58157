"""The model against openpi's and OxyGen's own outputs, tensor by tensor (golden/SPEC limits)."""

from __future__ import annotations

import golden_pi05 as golden
import pytest
import torch
from golden_pi05 import VARIANTS, Prefilled, Variant

from oxygen_ros.model.pi05 import euler_times

pytestmark = pytest.mark.usefixtures('no_grad')


@pytest.fixture
def no_grad():
    with torch.inference_mode():
        yield


@pytest.fixture(params=VARIANTS)
def variant(request) -> Variant:
    return Variant(request.param)


def assert_near(ours: torch.Tensor, reference: torch.Tensor, limit: float) -> None:
    torch.testing.assert_close(ours.float(), reference.float(), atol=limit, rtol=0)


def test_the_vision_tower_gives_openpis_image_tokens(variant):
    pi05 = golden.model()
    masks = [i for i, slot in enumerate(golden.CAMERA_SLOTS) if slot in variant.pixels]
    encoded = pi05.vision.encode(variant.images)
    projected = pi05.vision(variant.images)
    for row, i in enumerate(masks):
        assert_near(encoded[row], variant.io(f'siglip_out.{i}'), 1e-4)
        assert_near(projected[row], variant.io(f'image_embs.{i}'), 1e-4)


def test_the_packed_prefix_has_the_valid_rows_of_openpis_padded_one(variant):
    prefilled = Prefilled(golden.model(), variant.images, variant.tokens)
    valid = variant.valid
    assert prefilled.length == int(valid.sum())
    assert_near(prefilled.prefix, variant.io('prefix_embs')[valid], 1e-4)
    assert_near(prefilled.hidden, variant.io('prefix_out')[valid], 1e-4)
    for layer in range(4):
        for name, ours in (('k', prefilled.k), ('v', prefilled.v)):
            reference = variant.io(f'prefix_kv.{layer}.{name}')[:, valid]
            assert_near(ours[layer, :, : prefilled.length], reference, 1e-4)


def test_the_positions_of_a_packed_prefix_are_openpis(variant):
    positions = variant.io('prefix_position_ids')[variant.valid]
    assert positions.tolist() == list(range(int(variant.valid.sum())))


def test_computing_only_the_last_row_of_the_last_layer_changes_nothing(variant):
    pi05 = golden.model()
    every = Prefilled(pi05, variant.images, variant.tokens, last_only=False)
    last = Prefilled(pi05, variant.images, variant.tokens, last_only=True)
    assert torch.equal(every.k, last.k)
    assert torch.equal(every.v, last.v)
    assert_near(last.hidden, every.hidden[-1:], 1e-5)


def test_the_time_condition_is_openpis():
    pi05 = golden.model()
    for time in (1.0, 0.5):
        times = torch.tensor([time])
        reference = Variant('a')
        assert_near(pi05.time_embedding(times)[0], reference.io(f'time_sincos.t{time}'), 1e-6)
        assert_near(pi05.condition(times)[0], reference.io(f'adarms_cond.t{time}'), 1e-6)


def test_modulations_of_all_denoise_times_at_once_equal_those_of_each_time():
    pi05, times = golden.model(), torch.from_numpy(euler_times(10))
    together = pi05.modulations(times)
    for i, time in enumerate(times):
        (alone,) = pi05.modulations(time[None])
        for ours, theirs in zip(together[i], alone, strict=True):
            assert_near(torch.stack(ours), torch.stack(theirs), 1e-6)


def test_all_cameras_in_one_batch_equal_one_by_one():
    pi05, images = golden.model(), Variant('b').images
    together = pi05.vision(images)
    for i in range(len(images)):
        assert_near(together[i], pi05.vision(images[i : i + 1])[0], 1e-5)


def test_the_largest_raw_logit_is_the_most_likely_token(variant):
    pi05 = golden.model('causal')
    hidden = Prefilled(pi05, variant.images, variant.tokens).hidden
    likely = pi05.logits(hidden).log_softmax(-1).argmax(-1)
    assert torch.equal(pi05.greedy_tokens(hidden), likely)


def test_the_velocities_are_openpis(variant):
    pi05 = golden.model()
    prefilled = Prefilled(pi05, variant.images, variant.tokens)
    noise = variant.io('in.noise')
    end = prefilled.length + len(noise)
    for time in (1.0, 0.5):
        velocity = pi05.velocity(
            noise,
            pi05.modulations(torch.tensor([time]))[0],
            prefilled.rotary[prefilled.length : end],
            prefilled.k[:, :, :end],
            prefilled.v[:, :, :end],
        )
        assert_near(velocity, variant.io(f'v_t.t{time}'), 5e-5)


def test_ten_euler_steps_give_openpis_actions(variant):
    pi05 = golden.model()
    prefilled = Prefilled(pi05, variant.images, variant.tokens)
    assert_near(prefilled.denoise(pi05, variant.io('in.noise')), variant.io('actions'), 5e-5)


def test_the_euler_times_accumulate_like_openpis():
    assert torch.equal(torch.from_numpy(euler_times(10)), Variant('a').io('euler_times'))


def test_the_causal_prefix_gives_oxygens_kv_and_actions(variant):
    pi05 = golden.model('causal')
    prefilled = Prefilled(pi05, variant.images, variant.tokens)
    valid = variant.valid
    assert_near(prefilled.hidden, variant.text('prefix_out')[valid], 1e-4)
    for layer in range(4):
        for name, ours in (('k', prefilled.k), ('v', prefilled.v)):
            reference = variant.text(f'prefix_kv.{layer}.{name}')[:, valid]
            assert_near(ours[layer, :, : prefilled.length], reference, 1e-4)
    assert_near(prefilled.denoise(pi05, variant.io('in.noise')), variant.text('actions'), 5e-5)


def test_the_first_text_logits_come_from_the_last_valid_row(variant):
    """OxyGen reads row sum(mask) - 1 of the padded prefix: a masked camera's row in variant a."""
    pi05 = golden.model('causal')
    hidden = Prefilled(pi05, variant.images, variant.tokens, last_only=True).hidden
    logits = torch.nn.functional.linear(hidden, pi05.embedding.weight)[0]
    assert_near(logits, variant.text('fixed_gather.logits_raw'), 1e-4)
    assert int(pi05.greedy_tokens(hidden)) == int(variant.text('fixed_gather.tokens')[0])


@pytest.mark.parametrize('num_steps, cost', [(5, 0.05), (20, 0.02)])
def test_another_number_of_euler_steps_is_another_result(num_steps, cost):
    """Guards the goldens: the tolerance above could not hide a wrong step count."""
    pi05, variant = golden.model(), Variant('a')
    prefilled = Prefilled(pi05, variant.images, variant.tokens)
    actions = prefilled.denoise(pi05, variant.io('in.noise'), num_steps)
    assert (actions - variant.io('actions')).abs().max() > cost


def test_bfloat16_stays_as_near_to_float32_as_openpis_own_bfloat16(variant):
    """bfloat16 rounds wherever a kernel likes to, so the judge is openpi's own distance."""
    pi05 = golden.model(dtype=torch.bfloat16)
    prefilled = Prefilled(pi05, variant.images, variant.tokens)
    actions = prefilled.denoise(pi05, variant.io('in.noise'))
    exact = variant.io('actions')
    openpis = (variant.io('bf16.actions') - exact).abs()
    ours = (actions - exact).abs()
    assert actions.dtype == torch.float32
    assert ours.max() < 2.0 * openpis.max()
    assert ours.mean() < 1.5 * openpis.mean()


def test_a_camera_more_or_less_moves_only_what_it_should():
    """Variant c masks the middle camera although it holds real pixels: using it is visible."""
    pi05, variant = golden.model(), Variant('c')
    every = torch.stack([variant.io(f'in.image_uint8.{slot}') for slot in golden.CAMERA_SLOTS])
    images = (every.float() / 255.0 * 2.0 - 1.0).permute(0, 3, 1, 2)
    prefilled = Prefilled(pi05, images, variant.tokens)
    actions = prefilled.denoise(pi05, variant.io('in.noise'))
    assert (actions - variant.io('actions')).abs().max() > 0.1
