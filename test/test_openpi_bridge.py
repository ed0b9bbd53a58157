"""The bridge to openpi, against a stand-in that has what the bridge reads of openpi.

The stand-in's transforms follow openpi's interfaces (dicts in, dicts out, read from right to left)
with our arithmetic, so that openpi's own golden outputs judge the bridge: the order, the keys, the
absent cameras, the state behind deltas. With the real openpi installed, its own transforms run too.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import golden_transforms as golden
import numpy as np
import pytest
from golden_transforms import assert_equal_up_to_arcsin, assert_identical

from oxygen_ros.engine.factory import EngineOptions, build_engine
from oxygen_ros.model import openpi_bridge, transforms
from oxygen_ros.model.config import PRESETS
from oxygen_ros.model.openpi_bridge import (
    OpenpiError,
    OpenpiPolicy,
    OpenpiProcessor,
    load_policy,
    robot_keys,
)
from oxygen_ros.model.prompt import ByteTokenizer, prompt_tokens
from oxygen_ros.model.transforms import (
    Adapter,
    GripperAdapter,
    GripperMap,
    load_norm_stats,
    make_adapter,
    pad_to_dim,
)
from oxygen_ros.observation import Observation
from oxygen_ros.profile import ProfileError, load_profile

CONFIG = Path(__file__).parents[1] / 'config'
Data = dict[str, Any]
SLOTS = ('base_0_rgb', 'left_wrist_0_rgb', 'right_wrist_0_rgb')
ROBOTS = {'aloha': (14, 14), 'droid': (8, 8), 'libero': (8, 7)}
ALOHA_DELTAS = ((True,) * 6 + (False,)) * 2
CHAINS = {
    chain['name']: chain
    for chain in golden.CONTENT['chains']
    if chain['name'] in ('chain_aloha', 'chain_droid', 'chain_libero', 'chain_libero_no_state')
}


# --- a stand-in for openpi ------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    inputs: Sequence[Callable[[Data], Data]] = ()
    outputs: Sequence[Callable[[Data], Data]] = ()


def compose(steps: Sequence[Callable[[Data], Data]]) -> Callable[[Data], Data]:
    def run(data: Data) -> Data:
        for step in steps:
            data = step(data)
        return data

    return run


@dataclass(frozen=True)
class Normalize:
    stats: Any
    use_quantiles: bool

    def __call__(self, data: Data) -> Data:
        kind = 'quantile' if self.use_quantiles else 'mean_std'
        state = transforms.normalize(data['state'], self.stats.state, kind)
        if 'actions' in data:
            actions = transforms.normalize(data['actions'], self.stats.actions, kind)
            data = {**data, 'actions': actions}
        return {**data, 'state': state}


@dataclass(frozen=True)
class Unnormalize:
    stats: Any
    use_quantiles: bool

    def __call__(self, data: Data) -> Data:
        kind = 'quantile' if self.use_quantiles else 'mean_std'
        return {
            'state': transforms.unnormalize(data['state'], self.stats.state, kind),
            'actions': transforms.unnormalize(data['actions'], self.stats.actions, kind),
        }


def robot_inputs(robot: str) -> Callable[[Data], Data]:
    """What openpi's DroidInputs, LiberoInputs and AlohaInputs take and give."""

    def pictures(data: Data) -> dict[str, np.ndarray]:
        if robot == 'aloha':
            images = {name: np.moveaxis(image, 0, -1) for name, image in data['images'].items()}
            return {
                'base_0_rgb': images['cam_high'],
                'left_wrist_0_rgb': images['cam_left_wrist'],
                'right_wrist_0_rgb': images['cam_right_wrist'],
            }
        names = {
            'droid': ('exterior_image_1_left', 'wrist_image_left'),
            'libero': ('image', 'wrist_image'),
        }[robot]
        found = [data[f'observation/{name}'] for name in names]
        return dict(zip(SLOTS, [*found, np.zeros_like(found[0])], strict=True))

    def state(data: Data) -> np.ndarray:
        if robot == 'droid':
            parts = ('observation/joint_position', 'observation/gripper_position')
            assert [len(data[part]) for part in parts] == [7, 1]
            return np.concatenate([data[part] for part in parts])
        if robot == 'libero':
            return data['observation/state']
        return make_adapter('aloha', 14, 14).encode_state(data['state'])

    def step(data: Data) -> Data:
        present = dict.fromkeys(SLOTS, True) | {SLOTS[2]: robot == 'aloha'}
        given = {
            'image': pictures(data),
            'image_mask': {slot: np.bool_(is_there) for slot, is_there in present.items()},
            'state': state(data),
            'prompt': data['prompt'],
        }
        if 'actions' in data:
            given['actions'] = make_adapter(robot, *ROBOTS[robot]).encode_actions(data['actions'])
            if robot == 'aloha':
                given['actions'] = transforms.delta_actions(
                    given['actions'], given['state'], ALOHA_DELTAS
                )
        return given

    return step


def robot_outputs(robot: str) -> Callable[[Data], Data]:
    adapter = make_adapter(robot, *ROBOTS[robot])

    def step(data: Data) -> Data:
        actions = data['actions']
        if robot == 'aloha':
            actions = transforms.absolute_actions(actions, data['state'], ALOHA_DELTAS)
        return {'actions': adapter.decode_actions(actions)}

    return step


def model_inputs(max_len: int, with_state: bool) -> list[Callable[[Data], Data]]:
    def resize(data: Data) -> Data:
        fitted = {k: transforms.resize_with_pad(v, 224) for k, v in data['image'].items()}
        return {**data, 'image': fitted}

    def tokenize(data: Data) -> Data:
        form = 'state' if with_state else 'plain'
        tokens = prompt_tokens(form, data['prompt'], data['state'], ByteTokenizer())[:max_len]
        padded = np.zeros(max_len, np.int64)
        padded[: len(tokens)] = tokens
        mask = np.arange(max_len) < len(tokens)
        return {**data, 'tokenized_prompt': padded, 'tokenized_prompt_mask': mask}

    def pad(data: Data) -> Data:
        vectors = {key: data[key] for key in ('state', 'actions') if key in data}
        return {**data, **{key: pad_to_dim(value, 32) for key, value in vectors.items()}}

    return [resize, tokenize, pad]


@dataclass(frozen=True)
class FakeAssets:
    assets_dir: str
    asset_id: str


@dataclass(frozen=True)
class FakeData:
    assets: FakeAssets
    robot: str

    def create(self, assets_dirs: Path, model: Any) -> Any:
        assert '://' not in self.assets.assets_dir, 'nothing may be fetched from the network'
        name = self.assets.asset_id
        return SimpleNamespace(
            asset_id=name,
            use_quantile_norm=True,
            data_transforms=Group([robot_inputs(self.robot)], [robot_outputs(self.robot)]),
            model_transforms=Group(model_inputs(200, not name.endswith('no_state'))),
        )


class FakeTrainConfig:
    """An openpi TrainConfig, as far as the bridge reads it."""

    def __init__(self, name: str, **model: Any) -> None:
        robot = name.split('_')[1]
        self.assets_dirs = Path('assets')
        self.model = SimpleNamespace(
            pi05=True,
            paligemma_variant='gemma_2b',
            action_expert_variant='gemma_300m',
            action_dim=32,
            action_horizon=10,
            max_token_len=200,
            **model,
        )
        self.data = FakeData(FakeAssets('gs://far/away', name), robot)


def gemma_config(variant: str) -> Any:
    preset = PRESETS['pi05']
    return {'gemma_2b': preset.vlm, 'gemma_300m': preset.expert}[variant]


def get_config(name: str) -> FakeTrainConfig:
    if name == 'pi0_droid':
        config = FakeTrainConfig('chain_droid')
        config.model.pi05 = False
        return config
    if name not in CHAINS:
        raise ValueError(f"Config '{name}' not found. Did you mean 'chain_droid'? ")
    return FakeTrainConfig(name)


@pytest.fixture
def openpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-in where openpi would be."""
    contents: dict[str, dict[str, Any]] = {
        'openpi': {'__file__': '/openpi/src/openpi/__init__.py'},
        'openpi.models': {},
        'openpi.shared': {},
        'openpi.training': {},
        'openpi.transforms': {
            'compose': compose, 'Normalize': Normalize, 'Unnormalize': Unnormalize,
        },
        'openpi.models.gemma': {'get_config': gemma_config, 'PALIGEMMA_VOCAB_SIZE': 257_152},
        'openpi.shared.download': {
            'maybe_download': lambda url, gs: Path('/cache', url.rpartition('/')[2])
        },
        'openpi.shared.normalize': {
            'load': lambda folder: load_norm_stats(
                golden.GOLDEN / f'transforms.{folder.name}.norm_stats.json'
            )
        },
        'openpi.training.config': {'get_config': get_config},
    }  # fmt: skip
    for name, content in contents.items():
        module = ModuleType(name)
        module.__dict__.update(content, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition('.')
        if parent:
            setattr(sys.modules[parent], child, module)


# --- what comes out -------------------------------------------------------------------------------


def bridged(name: str, adapter: Adapter | None = None, **keys: Any) -> OpenpiProcessor:
    robot = name.split('_')[1]
    arguments = {'adapter': robot, 'cameras': {}, 'joints': '', **keys}
    return OpenpiProcessor(
        load_policy(name, Path('checkpoint')),
        robot_keys(**arguments),
        adapter or make_adapter('identity', *ROBOTS[robot]),
        ByteTokenizer(),
    )


def observation(name: str) -> Observation:
    inputs = golden.fields(f'{name}/in')
    images, state = golden.images(inputs), golden.state(inputs)
    if name == 'chain_aloha':
        images = {slot: np.moveaxis(image, 0, -1) for slot, image in images.items()}
    instruction = CHAINS[name]['inputs'][f'{name}/in/prompt']['str']
    for array in (state, *images.values()):
        array.setflags(write=False)  # as ObservationBuffer hands them out
    return Observation(0, 0, 0, images, state, instruction)


@pytest.mark.parametrize('name', CHAINS)
@pytest.mark.usefixtures('openpi')
def test_an_observation_becomes_openpis_model_input(name: str) -> None:
    chain, expected = CHAINS[name], golden.fields(f'{name}/model_input')
    seen = bridged(name).encode(observation(name))
    text = chain['prompt_string'] or ''.join(text for text, _ in chain['encode_calls'])
    assert seen.tokens == [ByteTokenizer.bos_id, *ByteTokenizer().encode(text)]
    assert seen.truncated_tokens == 0
    assert list(seen.images) == [slot for slot in SLOTS if expected[f'image_mask/{slot}']]
    for slot, image in seen.images.items():
        record = chain['model_input'][f'{name}/model_input/image/{slot}']
        assert hashlib.sha256(image.tobytes()).hexdigest() == record['sha256']


@pytest.mark.parametrize('name', CHAINS)
@pytest.mark.usefixtures('openpi')
def test_model_actions_become_openpis_commands(name: str) -> None:
    commands = bridged(name).decode(golden.ARRAYS[f'{name}/model_actions'], observation(name))
    assert_identical(commands, golden.ARRAYS[f'{name}/out/actions'])


@pytest.mark.parametrize('name', CHAINS)
@pytest.mark.usefixtures('openpi')
def test_commands_go_back_to_what_the_model_put_out(name: str) -> None:
    assert_actions_come_back(bridged(name), name)


def assert_actions_come_back(processor: OpenpiProcessor, name: str) -> None:
    """What `rtc` blending needs: planned commands in the units of the model."""
    actions, seen = golden.ARRAYS[f'{name}/model_actions'], observation(name)
    width = ROBOTS[name.split('_')[1]][1]
    again = processor.encode_actions(processor.decode(actions, seen), seen)
    assert again.dtype == np.float32
    np.testing.assert_allclose(again[:, :width], actions[:, :width], atol=2e-6)
    assert not again[:, width:].any()


@pytest.mark.usefixtures('openpi')
def test_sizes_are_those_of_the_training_config() -> None:
    config = load_policy('chain_droid', Path('checkpoint')).config
    assert config == replace(PRESETS['pi05'], action_horizon=10)


@pytest.mark.usefixtures('openpi')
def test_a_camera_that_is_absent_is_black_to_the_transforms_and_nothing_to_the_model() -> None:
    whole = observation('chain_droid')
    base_only = replace(whole, images={SLOTS[0]: whole.images[SLOTS[0]]})
    assert list(bridged('chain_droid').encode(base_only).images) == [SLOTS[0]]


@pytest.mark.usefixtures('openpi')
def test_a_prompt_that_openpi_had_to_cut_is_told() -> None:
    wordy = replace(observation('chain_droid'), instruction='on and ' * 100)
    assert bridged('chain_droid').encode(wordy).truncated_tokens


@pytest.mark.usefixtures('openpi')
def test_a_gripper_of_another_unit_is_mapped_around_openpi() -> None:
    table = GripperMap(7, 7, (0.0, 1.0), (0.8, 0.0))
    adapter = GripperAdapter(8, 8, Adapter(8, 8), (table,))
    seen = observation('chain_droid')
    state = seen.state.astype(np.float64)
    state[7] = table.to_robot(state[7])
    robot = replace(seen, state=state)
    mapped, plain = bridged('chain_droid', adapter), bridged('chain_droid')
    assert mapped.encode(robot).tokens == plain.encode(seen).tokens
    actions = golden.ARRAYS['chain_droid/model_actions']
    commands, expected = mapped.decode(actions, robot), plain.decode(actions, seen)
    assert_identical(commands[:, :7], expected[:, :7])
    np.testing.assert_allclose(commands[:, 7], table.to_robot(expected[:, 7]), atol=1e-12)


@pytest.mark.usefixtures('openpi')
def test_own_keys_reach_the_transforms() -> None:
    cameras = {SLOTS[0]: 'observation/image', SLOTS[1]: 'observation/wrist_image'}
    own = bridged('chain_libero', adapter=None, cameras=cameras, joints='observation/state')
    name = 'chain_libero'
    assert own.encode(observation(name)).tokens == bridged(name).encode(observation(name)).tokens


@pytest.mark.parametrize(
    'keys', [{'joints': 'proprio'}, {'cameras': {SLOTS[0]: 'front', SLOTS[1]: 'side'}}]
)
@pytest.mark.usefixtures('openpi')
def test_keys_that_the_config_does_not_know_are_told_at_the_start(keys: dict[str, Any]) -> None:
    with pytest.raises(OpenpiError, match=r'KeyError: .observation/.*set openpi_key'):
        bridged('chain_libero', **keys)


def test_a_camera_without_a_key_is_named() -> None:
    with pytest.raises(OpenpiError, match='expected an openpi_key for right_wrist_0_rgb'):
        robot_keys('droid', {SLOTS[0]: '', SLOTS[2]: ''}, '')


@pytest.mark.usefixtures('openpi')
def test_commands_of_another_width_than_the_profiles_are_refused() -> None:
    with pytest.raises(OpenpiError, match=r'command\.names\) \(10, 6\), got \(10, 7\)'):
        bridged('chain_libero', make_adapter('identity', 8, 6))


@pytest.mark.parametrize('vector', ['state', 'actions'])
@pytest.mark.usefixtures('openpi')
def test_statistics_with_nan_are_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, vector: str
) -> None:
    def load(folder: Path) -> Any:
        stats = load_norm_stats(golden.GOLDEN / f'transforms.{folder.name}.norm_stats.json')
        sound = getattr(stats, vector)
        return replace(stats, **{vector: replace(sound, q99=np.full_like(sound.q99, np.nan))})

    monkeypatch.setattr(sys.modules['openpi.shared.normalize'], 'load', load)
    with pytest.raises(OpenpiError, match=r'chain_droid.*are there any in the checkpoint'):
        bridged('chain_droid')


@pytest.mark.usefixtures('openpi')
def test_a_config_that_does_not_exist_is_refused_in_openpis_words() -> None:
    with pytest.raises(OpenpiError, match=r"'pi05_drod' not found\. Did you mean"):
        load_policy('pi05_drod', Path('checkpoint'))


@pytest.mark.usefixtures('openpi')
def test_a_config_of_pi0_is_refused() -> None:
    with pytest.raises(OpenpiError, match=r'expected a config of pi0\.5'):
        load_policy('pi0_droid', Path('checkpoint'))


@pytest.mark.usefixtures('openpi')
def test_the_tokenizer_is_the_one_openpi_caches() -> None:
    assert openpi_bridge.tokenizer_path() == Path('/cache/paligemma_tokenizer.model')


@pytest.mark.parametrize('missing', ['openpi', 'openpi.training'])
def test_without_openpi_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, openpi: None, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)  # type: ignore[arg-type]
    if missing == 'openpi.training':  # the empty package of that name on PyPI
        monkeypatch.delattr(sys.modules['openpi'], 'training')
        monkeypatch.setitem(sys.modules, 'openpi.training.config', None)  # type: ignore[arg-type]
    with pytest.raises(OpenpiError) as error:
        load_policy('pi05_droid', Path('checkpoint'))
    message = str(error.value)
    assert 'git clone https://github.com/Physical-Intelligence/openpi' in message
    assert '-e openpi/packages/openpi-client -e openpi' in message
    assert message.startswith("parameter 'openpi_config': openpi is not installed")
    assert 'or leave openpi_config empty' in message


def test_an_openpi_that_lacks_a_dependency_is_told_from_none(
    monkeypatch: pytest.MonkeyPatch, openpi: None
) -> None:
    """As `pip install --no-deps` leaves it."""

    class Broken(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise ModuleNotFoundError("No module named 'orbax'", name='orbax.checkpoint')

    monkeypatch.setitem(sys.modules, 'openpi.shared', Broken('openpi.shared'))
    with pytest.raises(OpenpiError, match='openpi is installed, but orbax, which it needs,'):
        load_policy('pi05_droid', Path('checkpoint'))


# --- from the node's parameter --------------------------------------------------------------------


def build(profile_name: str, horizon: int, **options: Any) -> None:
    profile = load_profile(profile_name, CONFIG)
    profile = replace(profile, model=replace(profile.model, action_horizon=horizon))
    build_engine(
        profile,
        EngineOptions(openpi_config='chain_droid', **options),
        on_chunk=lambda chunk: None,
        on_text=lambda update: None,
    )


@pytest.mark.usefixtures('openpi')
def test_the_factory_asks_openpi_for_the_tokenizer_where_none_is_beside_the_weights(
    tmp_path: Path,
) -> None:
    with pytest.raises(FileNotFoundError, match=r'no tokenizer at /cache/paligemma_tokenizer'):
        build('droid', 10, checkpoint=str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r'no tokenizer at /my/tokenizer'):
        build('droid', 10, checkpoint=str(tmp_path), tokenizer='/my/tokenizer')


@pytest.mark.usefixtures('openpi')
def test_a_horizon_that_is_not_the_training_configs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match='expected 0 or 10, that of chain_droid, got 15'):
        build('droid', 15, checkpoint=str(tmp_path))


def test_notes_cannot_be_fed_into_prompts_that_openpi_makes(tmp_path: Path) -> None:
    profile = load_profile('dummy', CONFIG)
    profile = replace(profile, memory=replace(profile.memory, feed_back=3))
    with pytest.raises(ProfileError, match=r'memory.feed_back: expected 0 .*, got 3'):
        build_engine(
            profile,
            EngineOptions(openpi_config='chain_droid', checkpoint=str(tmp_path)),
            on_chunk=lambda chunk: None,
            on_text=lambda update: None,
        )


def test_an_openpi_config_without_a_checkpoint_is_refused() -> None:
    with pytest.raises(ProfileError, match="expected parameter 'checkpoint'"):
        build('dummy', 0)


@pytest.mark.usefixtures('openpi')
def test_the_profile_check_takes_all_from_the_training_config(tmp_path: Path) -> None:
    from oxygen_ros.evaluation.profile_findings import openpi_findings

    profile = load_profile('droid', CONFIG)
    profile = replace(profile, model=replace(profile.model, action_horizon=0))
    tokenizer = CONFIG.parent / 'resource' / 'tabletop' / 'tokenizer.model'
    options = EngineOptions(str(tmp_path), str(tokenizer), openpi_config='chain_droid')
    positions = dict.fromkeys(profile.joints.names, 57.3)  # degrees
    found = [
        (finding.kind, finding.text) for finding in openpi_findings(profile, options, positions)
    ]
    assert ('ok', 'openpi config chain_droid: fits the profile') in found
    problems = [text for kind, text in found if kind == 'problem']
    assert any('expected model.safetensors' in text for text in problems)
    assert any('far outside the training data' in text for text in problems)


@pytest.mark.usefixtures('openpi')
def test_the_profile_check_tells_an_openpi_config_that_does_not_exist(tmp_path: Path) -> None:
    from oxygen_ros.evaluation.profile_findings import openpi_findings

    options = EngineOptions(str(tmp_path), openpi_config='chain_drod')
    (finding,) = openpi_findings(load_profile('droid', CONFIG), options, {})
    assert finding.kind == 'problem'
    assert "Did you mean 'chain_droid'?" in finding.text


# --- the real one ---------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec('openpi') is None, reason='openpi is not installed')
@pytest.mark.parametrize(
    ('config', 'name'),
    [
        ('pi05_aloha_pen_uncap', 'chain_aloha'),
        ('pi05_droid', 'chain_droid'),
        ('pi05_libero', 'chain_libero_no_state'),
    ],
)
def test_openpis_own_transforms_give_the_golden_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, name: str
) -> None:
    policy = real_policy(config, name, tmp_path, monkeypatch)
    robot = name.split('_')[1]
    policy = replace(policy, config=replace(policy.config, action_horizon=10))
    processor = OpenpiProcessor(
        policy,
        robot_keys(robot, {}, ''),
        make_adapter('identity', *ROBOTS[robot]),
        ByteTokenizer(),
    )
    chain, seen = CHAINS[name], processor.encode(observation(name))
    text = chain['prompt_string'] or ''.join(text for text, _ in chain['encode_calls'])
    assert seen.tokens == [ByteTokenizer.bos_id, *ByteTokenizer().encode(text)]
    for slot, image in seen.images.items():
        record = chain['model_input'][f'{name}/model_input/image/{slot}']
        assert hashlib.sha256(image.tobytes()).hexdigest() == record['sha256']
    commands = processor.decode(golden.ARRAYS[f'{name}/model_actions'], observation(name))
    assert_equal_up_to_arcsin(commands, golden.ARRAYS[f'{name}/out/actions'])
    assert_actions_come_back(processor, name)


class Words:
    """SentencePiece's interface over our bytes: PaliGemma's model is not ours to ship."""

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        return [ByteTokenizer.bos_id] * add_bos + ByteTokenizer().encode(text)


def real_policy(
    config: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> OpenpiPolicy:
    from openpi.models import tokenizer
    from openpi.training import config as configs

    def build(self: Any, max_len: int = 48) -> None:
        self._max_len, self._tokenizer = max_len, Words()

    monkeypatch.setattr(tokenizer.PaligemmaTokenizer, '__init__', build)
    data = configs.get_config(config).data
    stats = folder / 'assets' / (data.assets.asset_id or data.repo_id) / 'norm_stats.json'
    stats.parent.mkdir(parents=True)
    source = golden.GOLDEN / f'transforms.{name}.norm_stats.json'
    stats.write_bytes(source.read_bytes())
    return load_policy(config, folder)
