"""The recipe: its parts, the whole of it in a minute, and the checkpoint that it left behind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip('torch')
if find_spec('mujoco') is None:  # imported here, it would look for a screen
    pytest.skip('MuJoCo is not installed', allow_module_level=True)

from oxygen_ros.model.checkpoints import CheckpointError  # noqa: E402
from oxygen_ros.model.config import preset  # noqa: E402
from oxygen_ros.model.processor import Processor  # noqa: E402
from oxygen_ros.model.prompt import SentencePieceTokenizer  # noqa: E402
from oxygen_ros.model.weights import load_model  # noqa: E402
from oxygen_ros.observation import Observation  # noqa: E402
from oxygen_ros.profile import RobotProfile, load_profile  # noqa: E402
from oxygen_ros.sim import train  # noqa: E402
from oxygen_ros.sim.dataset import Moments, Recorder, random_moment, write_norm_stats  # noqa: E402
from oxygen_ros.sim.model_card import sha256  # noqa: E402
from oxygen_ros.sim.rollout import Pilot, evaluate, wilson  # noqa: E402
from oxygen_ros.sim.world import CAMERAS, COLOURS, INSTRUCTIONS, TabletopWorld  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / 'resource' / 'tabletop'
CPU = torch.device('cpu')


@pytest.fixture(scope='module', autouse=True)
def one_thread() -> Iterator[None]:
    """On cores that others use, a second thread makes small tensors many times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope='module')
def profile() -> RobotProfile:
    return load_profile('tabletop', ROOT / 'config')


@pytest.fixture(scope='module')
def world() -> Iterator[TabletopWorld]:
    made = TabletopWorld()
    yield made
    made.close()


@pytest.fixture(scope='module')
def moments(world: TabletopWorld) -> Moments:
    recorder = Recorder(world, horizon=10)
    for seed in range(24):
        random_moment(world, np.random.default_rng((4, seed)))
        recorder.record()
    return recorder.moments()


@pytest.fixture(scope='module')
def folder(
    profile: RobotProfile, moments: Moments, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A checkpoint folder that lacks only the weights."""
    made = tmp_path_factory.mktemp('tabletop')
    train.train_tokenizer(profile, 704, made / 'tokenizer.model')
    write_norm_stats(moments, made / 'assets' / 'tabletop' / 'norm_stats.json')
    return made


@pytest.fixture(scope='module')
def processor(profile: RobotProfile, folder: Path) -> Processor:
    config = preset('tabletop', prefix_attention='bidirectional')
    return train.make_processor(profile, config, folder)


# --- tokenizer and batches ------------------------------------------------------------------------


def test_every_state_bin_is_one_token_and_every_sentence_comes_back(folder: Path) -> None:
    tokenizer = SentencePieceTokenizer(folder / 'tokenizer.model')
    assert all(len(tokenizer.encode(str(number))) == 1 for number in range(-1, 256))
    sentences = [
        'moving to the green block, near middle',
        'touching the blue block',
        'red near left, green far left, blue far middle',
        *(phrase.format('red') for phrase in INSTRUCTIONS),
    ]
    for sentence in sentences:
        assert tokenizer.decode(tokenizer.encode(sentence)) == sentence
    assert (folder / 'tokenizer.model').stat().st_size < 20_000


def test_encoded_actions_are_what_the_processor_decodes(
    processor: Processor, moments: Moments
) -> None:
    for i in range(5):
        observation = Observation(0, 0, 0, {}, moments.joints[i], 'touch the red block')
        target = train.encode_actions(processor, moments.chunks[i, 1], moments.joints[i])
        assert target.shape == (10, 8)
        decoded = processor.decode(target, observation)
        np.testing.assert_allclose(decoded, moments.chunks[i, 1], atol=1e-5)


def test_only_the_text_and_its_end_are_counted() -> None:
    batch = train.text_batch([7, 8], [[10, 11, 12], [20]], eos_id=1)
    assert batch.tokens.tolist() == [[7, 8, 10, 11, 12], [7, 8, 20, 0, 0]]
    counted = [batch.targets[i][batch.counted[i]].tolist() for i in range(2)]
    assert counted == [[10, 11, 12, 1], [20, 1]]


def test_batches_lose_a_camera_now_and_then(
    profile: RobotProfile, processor: Processor, moments: Moments
) -> None:
    recipe = replace(train.quick_recipe(0), batch_size=2)
    batches = train.Batches(profile, processor, recipe, moments, None)
    stage = recipe.stages[1]
    drawn = [batches.draw(stage, np.random.default_rng(i)) for i in range(40)]
    seen = {
        (batch.images.shape[1], float(points[0, 0, 0, 0]) in moments.points[:, 0, 0, 0])
        for batch, points, _ in drawn
    }
    assert seen == {(2, True), (1, True), (1, False)}  # both, base alone, side alone


def test_the_pointer_learns_where_things_are() -> None:
    torch.manual_seed(0)
    pointer = train.Pointer(width=36, num_marks=1, patches_per_side=6)
    points = torch.rand(64, 1, 1, 2)
    patch = (points * 6).long()
    tokens = torch.zeros(64, 1, 36, 36)
    tokens[torch.arange(64), 0, (patch[..., 1] * 6 + patch[..., 0])[:, 0, 0], 0] = 5.0
    optimizer = torch.optim.Adam(pointer.parameters(), lr=0.05)
    for _ in range(50):
        loss, found = pointer.loss(tokens, points)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert found == 1.0


# --- training -------------------------------------------------------------------------------------


def make_trainer(processor: Processor, moments: Moments, checkpoint: Path) -> train.Trainer:
    config = preset('tabletop', prefix_attention='bidirectional')
    images = moments.images[:4].reshape(-1, 96, 96, 3)
    model = train.new_model(config, processor.tokenizer, images, seed=2)
    recipe = replace(train.quick_recipe(0), batch_size=4)
    return train.Trainer(model, recipe, checkpoint)


def test_interrupted_training_ends_in_the_same_weights(
    profile: RobotProfile, processor: Processor, moments: Moments, tmp_path: Path
) -> None:
    stage = train.Stage('joint', 4, 1e-3, 0.5)
    whole = make_trainer(processor, moments, tmp_path / 'whole.safetensors')
    batches = train.Batches(profile, processor, whole.recipe, moments, None)
    list(whole.run(stage, batches))

    interrupted = make_trainer(processor, moments, tmp_path / 'cut.safetensors')
    run = interrupted.run(stage, batches)
    next(run), next(run)
    interrupted.save()
    del interrupted, run
    resumed = make_trainer(processor, moments, tmp_path / 'cut.safetensors')
    assert resumed.resume()
    assert resumed.step == 2
    list(resumed.run(stage, batches))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


@pytest.mark.slow
def test_the_quick_recipe_goes_all_the_way_and_learns(
    profile: RobotProfile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, cache = tmp_path / 'out', tmp_path / 'cache'
    recipe = replace(train.quick_recipe(3), num_moments=60, num_episodes=1)
    train.train(recipe, profile, output, cache, resume=False)
    text = capsys.readouterr().out.replace('\n', ' ')
    assert float(re.search(r'joint .*?flow ([\d.]+)', text)[1]) < 1.0  # untrained it is above 2
    load_model(
        preset('tabletop', prefix_attention='bidirectional'),
        output,
        device=CPU,
        dtype=torch.float32,
    )
    card = (output / 'MODEL_CARD.md').read_text()
    assert sha256(output / 'model.safetensors') in card

    train.train(recipe, profile, output, cache, resume=True)  # nothing is left to do
    assert 'joint 30/30' not in capsys.readouterr().out
    assert sha256(output / 'model.safetensors') in card


def test_the_interval_of_a_rate() -> None:
    rate, low, high = wilson([True] * 90 + [False] * 10)
    assert (rate, round(low, 3), round(high, 3)) == (0.9, 0.826, 0.945)
    assert wilson([True] * 100)[1] == pytest.approx(0.963, abs=1e-3)


# --- what ships -----------------------------------------------------------------------------------


def test_the_model_card_describes_the_files_beside_it() -> None:
    card = (SHIPPED / 'MODEL_CARD.md').read_text(encoding='utf-8')
    rows = re.findall(r'\| (\S+) \| (\d+) \| ([0-9a-f]{64}) \|', card)
    assert {name for name, _, _ in rows} == {
        'model.safetensors',
        'tokenizer.model',
        'assets/tabletop/norm_stats.json',
    }
    for name, size, digest in rows:
        assert (SHIPPED / name).stat().st_size == int(size)
        assert sha256(SHIPPED / name) == digest, name
    assert 2e6 < (SHIPPED / 'model.safetensors').stat().st_size < 4e6


def test_the_shipped_numbers_are_good_enough_to_ship() -> None:
    numbers = json.loads((SHIPPED / 'evaluation.json').read_text(encoding='utf-8'))
    for setting, text in (('both cameras', 0.95), ('base camera only', 0.85)):
        assert numbers[setting]['episodes'] >= 100
        assert numbers[setting]['success'][0] >= 0.95
        assert numbers[setting]['text'][0] >= text
        assert numbers[setting]['note'][0] >= 0.99
    _, low, high = numbers['random other instruction']['success']
    assert low < 1 / 3 < high


def test_a_corrupt_checkpoint_is_named(profile: RobotProfile, tmp_path: Path) -> None:
    whole = (SHIPPED / 'model.safetensors').read_bytes()
    (tmp_path / 'model.safetensors').write_bytes(whole[: len(whole) // 2])
    config = preset('tabletop', prefix_attention='bidirectional')
    with pytest.raises(CheckpointError, match=r'model\.safetensors'):
        load_model(config, tmp_path, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize('cameras', [CAMERAS, CAMERAS[:1]])
def test_the_shipped_model_plays(
    profile: RobotProfile, world: TabletopWorld, cameras: tuple[str, ...]
) -> None:
    pilot = Pilot(profile, SHIPPED)
    torch.set_num_threads(1)
    score = evaluate(pilot, world, range(900, 910), cameras=cameras)
    assert sum(score.success) >= 9
    assert np.mean(score.narration) >= 0.8
    assert np.mean(score.memory) >= 0.95


def test_the_shipped_model_answers_alike_every_time(
    profile: RobotProfile, world: TabletopWorld
) -> None:
    answers = []
    for _ in range(2):
        pilot = Pilot(profile, SHIPPED)
        torch.set_num_threads(1)
        world.reset(901)
        answers.append(pilot.look(world, f'touch the {COLOURS[0]} block', CAMERAS, stamp_ns=5))
    assert np.array_equal(answers[0][0], answers[1][0])
    assert answers[0][1] == answers[1][1]
