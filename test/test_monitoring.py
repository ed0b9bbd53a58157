"""What watches the node: rqt perspective, Foxglove layout, aggregator, and their launch files."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

pytest.importorskip('rosbags')

from oxygen_ros import monitor
from oxygen_ros.evaluation import launching
from oxygen_ros.evaluation.launching import (
    full_name,
    perspective_for,
    player_command,
    recorded_topics,
    recorder_command,
    replayed_topics,
)
from oxygen_ros.evaluation.recording import BagError
from oxygen_ros.neighbours import Neighbours
from oxygen_ros.observation import SourceStatus
from oxygen_ros.profile import RobotProfile, load_profile

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / 'config'
PERSPECTIVE = CONFIG / 'oxygen.perspective'
NUMBER = re.compile(r'^(?:float|u?int)\d+ (\w+)', re.MULTILINE)


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files under test are those of the source tree, whatever is installed."""
    monkeypatch.setattr(launching, 'share_folder', lambda: ROOT)


def numbers_of(message: str) -> set[str]:
    return set(NUMBER.findall((ROOT / 'msg' / f'{message}.msg').read_text()))


def fields_of(message: str) -> set[str]:
    text = (ROOT / 'msg' / f'{message}.msg').read_text()
    return set(re.findall(r'^[\w/]+(?:\[\])? (\w+)', text, re.MULTILINE))


def dummy() -> RobotProfile:
    return load_profile('dummy', CONFIG)


# ---- rqt


def quoted_values(node: Any) -> Iterator[Any]:
    """Every value of a perspective as rqt reads it: evaluated, and only literals."""
    for entry in node['keys'].values():
        assert set(entry) == {'repr', 'type'}
        assert entry['type'] == 'repr'
        yield ast.literal_eval(entry['repr'])
    for group in node['groups'].values():
        yield from quoted_values(group)


def plugins(path: Path) -> tuple[dict[str, list[int]], dict[str, Any]]:
    pluginmanager = json.loads(path.read_text())['groups']['pluginmanager']
    running = ast.literal_eval(pluginmanager['keys']['running-plugins']['repr'])
    return running, pluginmanager['groups']


def plotted(path: Path) -> list[str]:
    _, groups = plugins(path)
    return [
        topic
        for name, group in groups.items()
        if name.startswith('plugin__rqt_plot__Plot__')
        for topic in ast.literal_eval(group['groups']['plugin']['keys']['topics']['repr'])
    ]


@pytest.mark.case(51)
def test_every_value_of_the_perspective_is_a_quoted_literal() -> None:
    assert len(list(quoted_values(json.loads(PERSPECTIVE.read_text())))) == 11


def test_every_running_plugin_has_its_settings_and_no_other_does() -> None:
    running, groups = plugins(PERSPECTIVE)
    expected = {
        f'plugin__{name.replace("/", "__")}__{number}'
        for name, numbers in running.items()
        for number in numbers
    }
    assert set(groups) == expected
    assert {'rqt_topic/TopicPlugin', 'rqt_runtime_monitor/RuntimeMonitor'} <= set(running)


@pytest.mark.case(51)
def test_the_plotted_topics_are_plain_numbers_of_the_nodes_statistics() -> None:
    topics = plotted(PERSPECTIVE)
    assert all(topic.startswith('/oxygen/stats/') for topic in topics)
    fields = {topic.rpartition('/')[2] for topic in topics}
    assert fields <= numbers_of('EngineStats')
    assert {'command_hz', 'chunk_hz', 'lateness_p99_ms', 'tokens_per_s'} <= fields


@pytest.mark.parametrize(
    ('namespace', 'node'),
    [('', '/oxygen'), ('left', '/left/oxygen'), ('/a/b/', '/a/b/oxygen')],
)
def test_a_node_in_a_namespace_gets_a_perspective_of_its_own(namespace: str, node: str) -> None:
    assert full_name(namespace) == node
    path = perspective_for(node)
    try:
        assert plotted(path) == [
            topic.replace('/oxygen/', f'{node}/', 1) for topic in plotted(PERSPECTIVE)
        ]
    finally:
        if node != '/oxygen':
            path.unlink()


# ---- Foxglove


def panels_of(layout: Any) -> Iterator[str]:
    if isinstance(layout, str):
        yield layout
    else:
        yield from panels_of(layout['first'])
        yield from panels_of(layout['second'])


def test_the_foxglove_layout_shows_each_of_its_panels_once() -> None:
    content = json.loads((CONFIG / 'foxglove.json').read_text())
    assert sorted(panels_of(content['layout'])) == sorted(content['configById'])


def test_the_foxglove_layout_reads_topics_and_fields_that_the_node_publishes() -> None:
    content = json.loads((CONFIG / 'foxglove.json').read_text())['configById']
    fields = {'/oxygen/stats': fields_of('EngineStats')}
    for task in dummy().tasks:
        kind = 'Note' if task.kind == 'memory' else 'Text'
        fields[task.topic.replace('~', '/oxygen')] = fields_of(kind)
    paths = [path['value'] for panel in content.values() for path in panel.get('paths', [])]
    paths += [panel['topicPath'] for panel in content.values() if 'topicPath' in panel]
    for path in paths:
        topic, _, field = path.partition('.')
        assert topic in fields
        assert not field or field in fields[topic]
    topics = {panel['topicToRender'] for panel in content.values() if 'topicToRender' in panel}
    assert topics == {'/diagnostics'}


# ---- diagnostics


@pytest.mark.parametrize('node', ['/oxygen', '/left/oxygen'])
def test_every_part_that_the_node_reports_on_falls_into_one_analyzer(node: str) -> None:
    parameters = yaml.safe_load((CONFIG / 'diagnostics.yaml').read_text())['/**']['ros__parameters']
    analyzers = [value for value in parameters.values() if isinstance(value, dict)]
    watched = monitor.Monitor(dummy(), monitor.Thresholds())
    sources = [camera.slot for camera in dummy().cameras] + ['joints']
    statuses = [
        monitor.ClockWatch().status(False, 0, 0),
        monitor.interlock_status({}, 0, 0),
        Neighbours().status([], None),
        watched.middleware_status([], {}),
        watched.command_status(False, None, 0.0),
        watched.engine_status(
            False, None, not_ready=(), last_error='', broken=False, away='', drops={}
        ),
        watched.gripper_status({}),
        *(watched.source_status(SourceStatus(s, 't', 0, 0, 0, None, 0.0, '')) for s in sources),
    ]
    assert len(statuses) == 10
    for status in statuses:
        name = f'{node}: {status.name}'
        found = [a['path'] for a in analyzers if any(part in name for part in a['contains'])]
        assert len(found) == 1, name


# ---- replay


def test_only_what_the_node_hears_is_played_and_under_its_names(bags: Path, tmp_path: Path) -> None:
    raw = yaml.safe_load((CONFIG / 'dummy.yaml').read_text())
    raw['cameras'] = [raw['cameras'][0] | {'topic': 'base/image_raw'}]
    raw['joints']['names'] = ['elbow', 'wrist_1']
    raw['command'].pop('names', None)
    profile = tmp_path / 'arm.yaml'
    profile.write_text(yaml.safe_dump(raw))
    assert replayed_topics(str(bags / 'derived_camera_joint'), str(profile)) == {
        '/base/image_raw': '/base/image_raw',
        '/joint_states': '/joint_states',
        '/instruction': '/instruction',
    }
    raw['cameras'][0]['topic'] = 'wrist/image_raw'  # recorded compressed
    profile.write_text(yaml.safe_dump(raw))
    with pytest.raises(BagError, match='is compressed, the profile expects raw'):
        replayed_topics(str(bags / 'derived_camera_joint'), str(profile))


@pytest.mark.parametrize(('has_ros2bag', 'start'), [(True, 'ros2 bag play'), (False, '/bin/play')])
def test_both_players_are_told_the_same(has_ros2bag: bool, start: str) -> None:
    command = player_command(
        'bag',
        {'/robot/joint_states': '/joint_states', '/image': '/image'},
        rate='0.5',
        loop=True,
        has_ros2bag=has_ros2bag,
        oxygen_play='/bin/play',
    )
    assert ' '.join(command) == (
        f'{start} bag --rate 0.5 --clock 100 --topics /robot/joint_states /image '
        '--remap /robot/joint_states:=/joint_states --loop'
    )


def test_our_player_understands_its_command_line() -> None:
    from oxygen_ros.evaluation import bag_player

    command = player_command(
        'bag', {'/a': '/b'}, rate='2.0', loop=True, has_ros2bag=False, oxygen_play='play'
    )
    options = bag_player._parse(command[1:])
    assert (options.rate, options.clock, options.loop) == (2.0, 100.0, 'back')
    assert (options.topics, options.remap) == (['/a'], ['/a:=/b'])


# ---- recording


def test_what_is_recorded_is_all_that_an_evaluation_matches() -> None:
    topics = recorded_topics('dummy', 'left')
    assert topics == [
        '/left/camera/base/image_raw', '/left/camera/wrist/image_raw', '/left/joint_states',
        '/left/instruction', '/left/joint_command', '/left/oxygen/would_be_command',
        '/left/oxygen/actions', '/left/oxygen/text', '/left/oxygen/memory', '/left/oxygen/stats',
        '/diagnostics',
    ]  # fmt: skip
    assert '/oxygen/actions' in recorded_topics('dummy', '')


@pytest.mark.parametrize(
    ('ros_distro', 'expected'),
    [
        ('humble', 'ros2 bag record --output day_1 --use-sim-time /a /b'),
        ('jazzy', 'ros2 bag record --output day_1 --use-sim-time --topics /a /b'),
    ],
)
def test_the_recorder_is_told_in_the_words_of_its_distribution(
    ros_distro: str, expected: str
) -> None:
    command = recorder_command(['/a', '/b'], bag='day_1', use_sim_time=True, ros_distro=ros_distro)
    assert ' '.join(command) == expected
    plain = recorder_command(['/a'], bag='', use_sim_time=False, ros_distro=ros_distro)
    assert '--output' not in plain
    assert '--use-sim-time' not in plain


# ---- the launch files, run with stand-ins that write down what they were given


class Written:
    """Stands for any class of launch and launch_ros."""

    kind = ''

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs

    def perform(self, context: dict[str, str]) -> str:
        return context[self.args[0]]


class Module(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        return type(name, (Written,), {'kind': name})


MODULES = (
    'launch', 'launch.actions', 'launch.conditions', 'launch.event_handlers',
    'launch.launch_description_sources', 'launch.substitutions', 'launch_ros',
    'launch_ros.actions', 'launch_ros.event_handlers', 'launch_ros.substitutions',
)  # fmt: skip


@pytest.fixture
def launch_file(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, Module(name))
    packages = types.ModuleType('ament_index_python.packages')
    packages.get_package_prefix = lambda name: f'/opt/{name}'  # type: ignore[attr-defined]
    packages.PackageNotFoundError = KeyError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, 'ament_index_python.packages', packages)

    def load(name: str) -> Any:
        path = ROOT / 'launch' / f'{name}.launch.py'
        spec = importlib.util.spec_from_file_location(f'{name}_launch', path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def all_of(entities: Any, kind: str) -> list[Written]:
    """Every stand-in of that class, however deep."""
    found = []
    if isinstance(entities, Written):
        found += [entities] if entities.kind == kind else []
        found += all_of([entities.args, list(entities.kwargs.values())], kind)
    elif isinstance(entities, (list, tuple)):
        for entity in entities:
            found += all_of(entity, kind)
    return found


@pytest.mark.parametrize(
    ('name', 'arguments'),
    [
        ('monitor', {'namespace', 'aggregator'}),
        ('record', {'profile', 'namespace', 'bag', 'use_sim_time'}),
        (
            'replay',
            {'bag', 'rate', 'loop', 'player', 'profile', 'checkpoint', 'device', 'instruction'},
        ),
    ],
)
def test_a_launch_file_declares_its_arguments_each_described(
    name: str, arguments: set[str], launch_file: Any
) -> None:
    declared = all_of(launch_file(name).generate_launch_description(), 'DeclareLaunchArgument')
    assert {one.args[0] for one in declared} == arguments
    assert all(one.kwargs['description'] for one in declared)


def test_a_recording_takes_the_topics_of_the_profile(launch_file: Any) -> None:
    context = {'profile': 'dummy', 'namespace': '', 'bag': 'day_1', 'use_sim_time': 'false'}
    (recorder,) = launch_file('record').record(context)
    command = recorder.kwargs['cmd']
    assert command[:5] == ['ros2', 'bag', 'record', '--output', 'day_1']
    assert command[-11:] == recorded_topics('dummy', '')


def test_rqt_waits_for_the_statistics_of_the_node_it_shows(launch_file: Any) -> None:
    entities = launch_file('monitor').start_rqt({'namespace': 'left'})
    (handler,) = all_of(entities, 'OnProcessExit')
    waiting = handler.kwargs['target_action']
    assert '/left/oxygen/stats' in waiting.kwargs['cmd']
    assert waiting in entities
    (rqt,) = all_of(handler.kwargs['on_exit'], 'Node')
    option, path = rqt.kwargs['arguments']
    assert option == '--perspective-file'
    assert plotted(Path(path))[0].startswith('/left/oxygen/stats/')
    Path(path).unlink()


def test_a_replay_plays_when_the_node_is_active_and_never_moves_a_robot(
    launch_file: Any, bags: Path, tmp_path: Path
) -> None:
    raw = yaml.safe_load((CONFIG / 'dummy.yaml').read_text())
    raw['cameras'][0]['topic'] = 'base/image_raw'
    raw['joints']['names'] = ['elbow']
    profile = tmp_path / 'arm.yaml'
    profile.write_text(yaml.safe_dump(raw))
    context = {
        'bag': str(bags / 'derived_camera_joint'),
        'rate': '1.0',
        'loop': 'false',
        'player': 'auto',
        'profile': str(profile),
        'checkpoint': '',
        'device': 'cpu',
        'instruction': '',
    }
    entities = launch_file('replay').replay(context)
    (handler,) = all_of(entities, 'OnStateTransition')
    assert handler.kwargs['goal_state'] == 'active'
    (player,) = all_of(handler.kwargs['entities'], 'ExecuteProcess')
    assert player.kwargs['cmd'][:3] == ['ros2', 'bag', 'play']
    assert '/joint_command' not in player.kwargs['cmd']
    assert all_of(player.kwargs['on_exit'], 'Shutdown')
    (node,) = all_of(entities, 'IncludeLaunchDescription')
    handed = dict(node.kwargs['launch_arguments'])
    assert (handed['use_sim_time'], handed['dry_run']) == ('true', 'true')
    assert handed['profile'] == str(profile)
