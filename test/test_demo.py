"""The demo: its parts one by one, then the whole of it, with the node in a process of its own."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip('rclpy')
pytest.importorskip('rosbags')
pytest.importorskip('rich')
pytest.importorskip('matplotlib')
pytest.importorskip('skimage')

import cv2
from PIL import Image
from rich.console import Console

from oxygen_ros.conversions import command_message, decode_image, ns_to_stamp
from oxygen_ros.evaluation import stage
from oxygen_ros.evaluation.bag_profile import RecordedRobot, profile_for
from oxygen_ros.evaluation.dashboard import (
    Setting,
    live_view,
    plain_line,
    printable,
    summary,
)
from oxygen_ros.evaluation.demo import main
from oxygen_ros.evaluation.episode_report import Verdict
from oxygen_ros.evaluation.film import MAX_FRAMES, MAX_GIF_BYTES, Caption, Film
from oxygen_ros.evaluation.measurements import Measurements, Sample, resolve
from oxygen_ros.evaluation.plots import save_plot
from oxygen_ros.evaluation.recording import BagError, Recording, message_class
from oxygen_ros.evaluation.sim_robot import (
    PHOTOGRAPHS,
    PICTURE_HEIGHT,
    PICTURE_WIDTH,
    PanningCamera,
    SimRobot,
    command_type,
    fill_picture,
    photograph,
    read_command,
)
from oxygen_ros.evaluation.table_score import (
    CAMERA_PERIOD_NS,
    HOLD_S,
    LIMIT_S,
    UNSETTLED_NS,
    TableScore,
    TruthLog,
    instructions,
)
from oxygen_ros.profile import CameraProfile, RobotProfile, load_profile
from oxygen_ros.sim.world import COLOURS, TOUCH_S, named_colour

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / 'config'
SHIPPED = ROOT / 'resource' / 'tabletop'
SETTING = Setting(
    profile='dummy',
    preset='dummy',
    device='cpu',
    cores=2,
    source='photographs',
    random_weights=True,
    due_hz=50.0,
    seconds=10.0,
)


@pytest.fixture
def profile() -> RobotProfile:
    return load_profile('dummy', CONFIG)


# ---- the simulated robot


def test_joints_approach_the_command_and_never_pass_it(profile: RobotProfile) -> None:
    robot = SimRobot(profile)
    robot.obey({'joint_1': 0.5})
    path = [robot.step(0.01)['joint_1'] for _ in range(100)]
    assert path == sorted(path)
    assert path[0] < 0.1
    assert path[-1] == pytest.approx(0.5, abs=1e-3)


def test_joints_without_a_command_stay_where_they_are(profile: RobotProfile) -> None:
    robot = SimRobot(profile)
    robot.obey({'joint_1': 0.5, 'a joint of another robot': 1.0})
    positions = [robot.step(0.01) for _ in range(10)][-1]
    assert all(positions[name] == 0.0 for name in profile.joints.names if name != 'joint_1')


def test_joints_stop_at_their_limits(profile: RobotProfile) -> None:
    robot = SimRobot(profile)
    robot.obey({'joint_1': 100.0})
    assert [robot.step(0.1)['joint_1'] for _ in range(50)][-1] == profile.command.upper[0]


def test_a_velocity_is_integrated_until_the_next_one(profile: RobotProfile) -> None:
    quantity = ('velocity',) * len(profile.command.names)
    robot = SimRobot(replace(profile, command=replace(profile.command, quantity=quantity)))
    robot.obey({'joint_1': 0.2})
    assert [robot.step(0.1)['joint_1'] for _ in range(10)][-1] == pytest.approx(0.2)
    robot.obey({'joint_1': 0.0})
    assert robot.step(1.0)['joint_1'] == pytest.approx(0.2)


@pytest.mark.parametrize('interface', ['joint_state', 'joint_trajectory', 'forward_command'])
def test_the_robot_reads_the_command_that_the_node_writes(
    interface: Any, profile: RobotProfile
) -> None:
    command = replace(profile.command, interface=interface)
    row = np.linspace(-1.0, 1.0, len(command.names))
    message = command_message(command, row[np.newaxis], 0.02)
    assert isinstance(message, command_type(command))
    assert read_command(message, command) == dict(zip(command.names, row, strict=True))


# ---- the cameras


@pytest.mark.parametrize('number', range(len(PHOTOGRAPHS)))
def test_every_picture_is_a_window_of_the_photograph_and_windows_differ(number: int) -> None:
    camera = PanningCamera(photograph(number))
    pictures = [camera.picture(time_s) for time_s in (0.0, 1.0, 2.0)]
    assert {picture.shape for picture in pictures} == {(PICTURE_HEIGHT, PICTURE_WIDTH, 3)}
    assert not np.array_equal(pictures[0], pictures[1])
    assert not np.array_equal(pictures[1], pictures[2])


def test_a_photograph_smaller_than_the_window_is_scaled_up() -> None:
    small = np.arange(10 * 10 * 3, dtype=np.uint8).reshape(10, 10, 3)
    assert PanningCamera(small).picture(3.0).shape == (PICTURE_HEIGHT, PICTURE_WIDTH, 3)


@pytest.mark.parametrize(('transport', 'most_wrong'), [('raw', 0.0), ('compressed', 3.0)])
def test_the_node_decodes_the_picture_that_the_camera_took(
    transport: Any, most_wrong: float
) -> None:
    camera = CameraProfile(slot='base_0_rgb', topic='camera', transport=transport, max_age_s=1.0)
    name = {'raw': 'Image', 'compressed': 'CompressedImage'}[transport]
    message = message_class(f'sensor_msgs/msg/{name}')()
    picture = PanningCamera(photograph(0)).picture(1.0)
    fill_picture(message, picture, camera)
    decoded = decode_image(message, camera)
    assert decoded.shape == picture.shape
    assert np.abs(decoded.astype(int) - picture).mean() <= most_wrong


# ---- the profile of a recording


def choose(bag: Path, tmp_path: Path, cameras: dict[str, str] | None = None) -> RecordedRobot:
    return profile_for(
        Recording(bag),
        CONFIG / 'dummy.yaml',
        tmp_path / 'profile.yaml',
        cameras=cameras or {},
        joints='',
    )


def test_cameras_joints_and_instruction_of_a_recording_are_found(
    bags: Path, tmp_path: Path
) -> None:
    robot = choose(bags / 'derived_camera_joint', tmp_path)
    cameras = {camera.slot: camera for camera in robot.profile.cameras}
    assert cameras['base_0_rgb'].topic == '/base/image_raw'
    assert cameras['base_0_rgb'].transport == 'raw'
    assert cameras['left_wrist_0_rgb'].topic == '/wrist/image_raw/compressed'
    assert cameras['left_wrist_0_rgb'].transport == 'compressed'
    assert robot.has_joints and robot.has_instruction
    assert robot.profile.joints.topic == '/joint_states'
    assert robot.profile.command.names == robot.profile.joints.names
    assert len(robot.profile.joints.names) == 8
    assert robot.profile == load_profile(str(robot.profile_path), CONFIG)


def test_a_recording_without_joints_leaves_them_to_the_simulated_robot(
    bags: Path, profile: RobotProfile, tmp_path: Path
) -> None:
    robot = choose(bags / 'amber_soccer_goal_12', tmp_path)
    assert robot.topics == ('/camera/image_raw',)
    assert not robot.has_joints
    assert robot.profile.joints == profile.joints


def test_cameras_can_be_named(bags: Path, tmp_path: Path) -> None:
    chosen = {'base_0_rgb': '/raw/bgr8', 'left_wrist_0_rgb': '/comp/jpeg'}
    robot = choose(bags / 'derived_odd_encodings', tmp_path, chosen)
    assert {camera.slot: camera.topic for camera in robot.profile.cameras} == chosen
    assert set(robot.topics) == set(chosen.values())


@pytest.mark.parametrize(
    ('bag', 'cameras'),
    [
        ('geocam_mcap', {}),
        ('geocam_sqlite3', {'base_0_rgb': '/test/sensor_msgs/image'}),
        ('rosbag2_talker_mcap', {}),
        ('derived_odd_encodings', {'base_0_rgb': '/raw/32FC1'}),
        ('derived_camera_joint', {'base_0_rgb': '/joint_states'}),
    ],
)
def test_a_recording_without_a_usable_picture_is_refused_and_says_so(
    bag: str, cameras: dict[str, str], bags: Path, tmp_path: Path
) -> None:
    with pytest.raises(BagError, match=r'no image .*could be used') as caught:
        choose(bags / bag, tmp_path, cameras)
    assert '\n' not in str(caught.value)


# ---- what is shown


def stats_message(**changes: Any) -> Any:
    numbers = {
        'command_hz': 50.0,
        'lateness_p50_ms': 0.2,
        'lateness_p99_ms': 1.0,
        'lateness_max_ms': 30.0,
        'chunk_hz': 10.0,
        'action_hz': 200.0,
        'tokens_per_s': 80.0,
        'drops': 3,
    }
    message = message_class('oxygen_ros/msg/EngineStats')(**{**numbers, **changes})
    message.drop_reasons, message.drop_counts = ['chunk_late'], [3]
    return message


def seen(**changes: Any) -> Any:
    """What Measurements would hold after a run."""
    samples = [Sample(0.2 * i, 50.0, 10 * i, stats_message()) for i in range(1, 20)]
    values = {
        'elapsed_s': 4.0,
        'command_hz': lambda: 50.0,
        'num_commands': 190,
        'num_chunks': 40,
        'num_notes': 1,
        'num_texts': 2,
        'num_text_messages': 9,
        'samples': samples,
        'stats': samples[-1].stats,
        'text': None,
        'notes': [],
        'instruction': 'wave',
        'instruction_changes_s': [2.0],
    }
    return SimpleNamespace(**{**values, **changes})


def rendered(view: Any) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(view)
    written = console.file
    assert isinstance(written, io.StringIO)
    return written.getvalue()


def test_text_that_would_play_with_the_terminal_is_escaped() -> None:
    assert printable('\x1b[2Jwave\n\x07 größer 机器') == '\\x1b[2Jwave\\n\\x07 größer 机器'
    text = message_class('oxygen_ros/msg/Text')(frame=7, text='[red]\x1b[2J', num_tokens=3)
    note = message_class('oxygen_ros/msg/Note')(frame=5, text='[bold]\x07')
    view = rendered(live_view(SETTING, seen(text=text, notes=[note], instruction='\x1b[5m')))
    assert '\x1b' not in view and '\x07' not in view
    assert '[red]\\x1b[2J' in view
    assert 'text of frame 7, 3 tokens, streaming' in view
    assert 'frame 5: [bold]\\x07' in view


def test_random_weights_are_confessed_and_others_are_not() -> None:
    assert 'the text is noise' in rendered(live_view(SETTING, seen()))
    trained = replace(SETTING, random_weights=False)
    assert 'the text is noise' not in rendered(live_view(trained, seen()))


def test_the_views_hold_before_anything_has_arrived() -> None:
    nothing = seen(stats=None, samples=[], command_hz=lambda: 0.0)
    assert 'none yet' in rendered(live_view(SETTING, nothing))
    assert 'no statistics yet' in plain_line(SETTING, nothing)


def test_the_summary_tells_the_mean_rate_over_the_samples_alone() -> None:
    # 10 commands per sample and 0.2 s, whatever came before and after.
    text = rendered(summary(SETTING, seen(num_commands=1000)))
    assert '190 received, 50.0 Hz on average, 50 Hz due' in text
    assert 'chunk_late 3' in text


@pytest.mark.parametrize('changes_s', [[], [1.0, 2.0]])
@pytest.mark.parametrize('max_ms', [0.3, 300.0])
def test_the_plot_is_a_picture_with_all_its_curves(
    max_ms: float, changes_s: list[float], tmp_path: Path
) -> None:
    samples = [Sample(0.2 * i, 50.0, 10 * i, stats_message(lateness_max_ms=max_ms)) for i in (1, 2)]
    path = tmp_path / 'demo.png'
    save_plot(
        path,
        samples,
        title='t',
        setting='s',
        due_hz=50.0,
        instruction_changes_s=changes_s,
        touches_s=changes_s,
    )
    picture = cv2.imread(str(path))
    assert picture is not None
    assert min(picture.shape[:2]) > 500
    blue = np.all(np.abs(picture.astype(int) - (0xB2, 0x72, 0x00)) < 8, axis=-1)
    assert blue.sum() > 100  # the measured rate and p50


# ---- the score at the table


def said(stamp_ns: int, text: str, reason: str = 'eos') -> Any:
    header = message_class('std_msgs/msg/Header')(stamp=ns_to_stamp(stamp_ns))
    return message_class('oxygen_ros/msg/Note')(header=header, text=text, reason=reason)


@pytest.fixture
def score() -> TableScore:
    """One that was told long ago to go to the blue block, and knows the truth of two moments."""
    made = TableScore()
    made.instruct('blue', 'go to the blue block', 2.0)
    for kind in made.truths:
        made.truths[kind].put(1_000, f'{kind} at 1')
        made.truths[kind].put(1_000 + CAMERA_PERIOD_NS, f'{kind} at 2')
    return made


def test_all_blocks_come_in_turn_and_never_one_twice_in_a_row() -> None:
    for seed in range(20):
        source = instructions(seed)
        named = [next(source) for _ in range(30)]
        assert all(named_colour(instruction) == colour for colour, instruction in named)
        colours = [colour for colour, _ in named]
        assert all(set(colours[i : i + 3]) == set(COLOURS) for i in range(0, 30, 3))
        assert all(one != next_one for one, next_one in pairwise(colours))


def test_the_order_depends_on_the_seed_alone() -> None:
    orders = [[next(source) for _ in range(9)] for source in map(instructions, (1, 1, 2))]
    assert orders[0] == orders[1] != orders[2]


def test_only_the_named_block_counts_and_only_if_there_was_time_to_touch_it(
    score: TableScore,
) -> None:
    score.touch(['blue'], 2.0 + 0.9 * TOUCH_S)  # told of the instruction before
    score.touch(['red', 'green'], 4.0)
    assert score.touches_s == []
    score.touch(['red', 'blue'], 5.0)
    score.touch(['blue'], 6.0)
    assert score.touches_s == [5.0]
    assert score.attempts[0].took_s == 3.0


def test_an_instruction_is_over_when_touched_and_held_or_when_its_time_is_up(
    score: TableScore,
) -> None:
    attempt = score.attempts[0]
    assert not attempt.is_over(2.0 + 0.99 * LIMIT_S)
    assert attempt.is_over(2.0 + LIMIT_S)
    score.touch(['blue'], 5.0)
    assert not attempt.is_over(5.0 + 0.9 * HOLD_S)
    assert attempt.is_over(5.0 + HOLD_S)


def test_an_instruction_under_way_is_neither_fulfilled_nor_missed(score: TableScore) -> None:
    assert score.finished(3.0) == []
    assert score.finished(2.0 + LIMIT_S) == score.attempts
    score.instruct('red', 'touch the red block', 13.0)
    assert score.finished(14.0) == score.attempts[:1]


@pytest.mark.parametrize(
    ('stamp_ns', 'expected'),
    [(100, 'a'), (101, 'b'), (300, 'b'), (299 - 50, None), (301, None)],
)
def test_a_truth_belongs_to_the_picture_before_it_and_to_no_earlier_one(
    stamp_ns: int, expected: str | None
) -> None:
    log = TruthLog(50 if expected is None else 1_000)
    log.put(100, 'a')
    log.put(300, 'b')
    assert log.find(stamp_ns) == expected


@pytest.mark.parametrize('kind', ['text', 'memory'])
def test_what_is_said_live_is_compared_with_the_truth_at_its_stamp(
    kind: str, score: TableScore
) -> None:
    right = score.hear(said(900, f'{kind} at 1'), kind)
    wrong = score.hear(said(1_100, f'{kind} at 1'), kind)
    assert right is not None and right.exact
    assert wrong is not None and not wrong.exact and wrong.truth == f'{kind} at 2'
    assert (score.exact(kind).hits, score.exact(kind).total) == (1, 2)
    assert score.num_not_compared == 0


def test_what_was_given_up_is_not_compared(score: TableScore) -> None:
    assert score.hear(said(900, 'text', 'cancelled'), 'text') is None
    assert score.exact('text').total == 0


def test_a_text_without_a_truth_or_from_between_two_instructions_is_not_compared(
    score: TableScore,
) -> None:
    assert score.hear(said(5_000 + CAMERA_PERIOD_NS, 'too late'), 'text') is None
    score.instruct('red', 'touch the red block', 5.0)
    now_ns = time.time_ns()
    for kind in score.truths:
        score.truths[kind].put(now_ns, kind)
        score.truths[kind].put(now_ns + 2 * UNSETTLED_NS[1], kind)
    assert score.hear(said(now_ns, 'text'), 'text') is None
    assert score.num_not_compared == 2
    assert score.hear(said(now_ns, 'memory'), 'memory') is not None  # blocks do not move
    assert score.hear(said(now_ns + 2 * UNSETTLED_NS[1], 'text'), 'text') is not None


def test_the_score_is_shown_live_in_a_line_and_at_the_end(score: TableScore) -> None:
    score.touch(['blue'], 5.5)
    score.instruct('red', 'touch the [red] block', 7.0)
    score.hear(said(900, 'text at 1'), 'text')
    score.hear(said(900, 'a lie'), 'memory')
    text = message_class('oxygen_ros/msg/Text')(text='text at 1')
    note = message_class('oxygen_ros/msg/Note')(text='a lie')
    now = seen(text=text, notes=[note])
    live = rendered(live_view(SETTING, now, score))
    for view in (live, rendered(summary(SETTING, now, score))):
        assert '1 of 1' in view and '0 of 1' in view and '3.5 s' in view
    assert '1 of 1 exact, the newest is right' in live
    assert '0 of 1 exact, the newest is wrong, truth: memory at 1' in live
    assert len(live.splitlines()) < 24  # the height of an ordinary terminal
    line = plain_line(SETTING, now, score)
    assert 'touched 1/1  text right 1 of 1  notes right 0 of 1' in line


# ---- the film


def shade(level: int) -> np.ndarray:
    return np.full((96, 96, 3), level, np.uint8)


def test_a_text_is_put_below_the_picture_that_it_is_about(tmp_path: Path) -> None:
    film = Film()
    for number in range(5):
        film.add(100 * number, shade(50 * number), Caption(0.1 * number, 'go', touched=False))
    film.say(Verdict('memory', 100, 'note', 'note'))
    film.say(Verdict('text', 250, 'truth', 'a lie'))  # stamped by another camera
    (moment,) = film._moments
    assert moment.stamp_ns == 200
    assert moment.text is not None and moment.text.text == 'a lie'
    assert moment.note is not None and moment.note.exact
    film.save(tmp_path / 'sheet.png', tmp_path / 'film.gif')
    sheet = np.array(Image.open(tmp_path / 'sheet.png').convert('RGB'))
    assert (sheet == 100).all(axis=-1).mean() > 0.3  # that picture, and no other one
    assert not (sheet == 200).all(axis=-1).any()


def test_a_film_plays_at_the_pace_of_the_run_and_stays_small(tmp_path: Path) -> None:
    film, rng = Film(), np.random.default_rng(0)
    for number in range(300):
        noise = rng.integers(256, size=(96, 96, 3), dtype=np.uint8)  # cannot be compressed
        film.add(number, noise, Caption(0.1 * number, 'go', touched=number > 200))
    assert film.save(tmp_path / 'sheet.png', tmp_path / 'film.gif') == [tmp_path / 'film.gif']
    assert (tmp_path / 'film.gif').stat().st_size <= MAX_GIF_BYTES
    with Image.open(tmp_path / 'film.gif') as gif:
        assert gif.n_frames > 4
        assert gif.n_frames * gif.info['duration'] == pytest.approx(30_000, rel=0.2)


def test_a_long_run_is_kept_evenly_and_not_whole() -> None:
    film = Film()
    for number in range(10 * MAX_FRAMES):
        film.add(number, shade(0), Caption(0.1 * number, 'go', touched=False))
    stamps = [shot.stamp_ns for shot in film._frames]
    assert MAX_FRAMES / 2 <= len(stamps) <= MAX_FRAMES
    assert len(set(np.diff(stamps))) == 1
    assert stamps[0] == 0 and stamps[-1] > 9.9 * MAX_FRAMES


# ---- the graph


@pytest.mark.parametrize(
    ('topic', 'expected'),
    [('~/text', '/oxygen/text'), ('joint_states', '/joint_states'), ('/a/b', '/a/b')],
)
def test_topics_are_resolved_as_the_node_does(topic: str, expected: str) -> None:
    assert resolve(topic) == expected


def test_a_domain_that_somebody_listens_in_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('random.sample', lambda *_: [87, 88])
    monkeypatch.delenv('ROS_DOMAIN_ID')
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(('', 7400 + 250 * 87 + 10))
        stage.isolate_graph()
    assert os.environ['ROS_DOMAIN_ID'] == '88'


def test_what_arrives_is_counted_and_rates_fall_when_it_stops(
    graph: Any, profile: RobotProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Measurements(graph.node, profile, command_type(profile.command))
    commands = graph.node.create_publisher(command_type(profile.command), profile.command.topic, 10)
    notes = graph.node.create_publisher(message_class('oxygen_ros/msg/Note'), '/oxygen/memory', 10)
    graph.spin_until(
        lambda: commands.get_subscription_count() and notes.get_subscription_count(), 'discovery'
    )
    for number in range(1, 4):
        commands.publish(command_type(profile.command)())
        graph.spin_until(lambda n=number: measured.num_commands == n, 'a command')
    notes.publish(message_class('oxygen_ros/msg/Note')(frame=3))
    graph.spin_until(lambda: measured.num_notes == 1, 'a note')
    assert measured.command_hz() == 3.0
    later_s = time.monotonic() + 5.0
    monkeypatch.setattr(time, 'monotonic', lambda: later_s)
    assert measured.command_hz() == 0.0


# ---- all of it


def demo(*arguments: str | Path, out: Path) -> tuple[int, str]:
    """Run the demo to its end; returns exit code and everything it printed."""
    with started(*arguments, out=out) as process:
        output, _ = process.communicate(timeout=120)
    assert not is_running(node_of(output)), output
    return process.returncode, output


PHOTOGRAPHS_WORLD = ('--world', 'photographs')


@contextmanager
def started(*arguments: str | Path, out: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, '-m', 'oxygen_ros.evaluation.demo', '--out', str(out)]
    process = subprocess.Popen(
        [*command, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, 'PYTHONUNBUFFERED': '1'},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def node_of(output: str) -> int | None:
    found = re.search(r'process (\d+)', output)
    return int(found.group(1)) if found else None


def is_running(pid: int | None) -> bool:
    """Whether a process is there and not just waiting to be buried."""
    if pid is None:
        return False
    try:
        status = Path(f'/proc/{pid}/stat').read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(')')[2].split()[0] != 'Z'


def wait_for_line(process: subprocess.Popen[str], part: str) -> str:
    """Read until a line holds `part`; returns everything read."""
    assert process.stdout is not None
    read = ''
    while part not in read:
        line = process.stdout.readline()
        assert line, f'the demo ended without saying {part!r}:\n{read}'
        read += line
    return read


@pytest.mark.slow
def test_photographs_and_the_simulated_robot_make_the_node_act_talk_and_remember(
    tmp_path: Path,
) -> None:
    code, output = demo(*PHOTOGRAPHS_WORLD, '--seconds', '6', out=tmp_path)
    assert code == 0, output
    assert 'the text is noise' in output
    assert 'commands, chunks, text and notes arrived, and the node ended well' in output
    assert 'cleared_instruction 1' in output  # the instruction changed half way
    assert (tmp_path / 'demo.png').stat().st_size > 10_000
    assert 'inactive' in (tmp_path / 'node.log').read_text()  # it ended in its safe behaviour


@pytest.mark.slow
@pytest.mark.skipif(not SHIPPED.is_dir(), reason='no trained weights in resource/tabletop')
def test_at_the_table_the_shipped_model_does_what_it_is_told_and_says_so(tmp_path: Path) -> None:
    code, output = demo('--seconds', '20', out=tmp_path)
    assert code == 0, output
    assert 'instructions were fulfilled' in output
    exact = re.findall(r'(text|notes) exact *│ (\d+) of (\d+)', output)
    assert [kind for kind, _, _ in exact] == ['text', 'notes']
    assert all(int(hits) > int(total) / 2 for _, hits, total in exact), output
    sheet = cv2.imread(str(tmp_path / 'contact_sheet.png'))
    assert sheet is not None and min(sheet.shape[:2]) > 500 and sheet.std() > 20
    with Image.open(tmp_path / 'demo.gif') as gif:
        assert gif.n_frames > 20
    assert 10_000 < (tmp_path / 'demo.gif').stat().st_size <= MAX_GIF_BYTES


def test_without_graphics_the_demo_names_the_package_and_another_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('MUJOCO_GL', 'no such backend')
    # Weights are not looked at before the table stands.
    random = (CONFIG / 'tabletop.yaml').read_text()
    profile = tmp_path / 'random.yaml'
    profile.write_text(
        random.replace('preset: tabletop', 'preset: tabletop\n  random_weights: true')
    )
    code, output = demo('--profile', profile, out=tmp_path)
    assert code == 1
    assert len(output.splitlines()) == 1
    assert 'apt install libosmesa6' in output
    assert '--world photographs' in output


def test_a_profile_of_another_robot_is_refused_at_the_table(tmp_path: Path) -> None:
    code, output = demo('--profile', 'aloha', out=tmp_path)
    assert code == 1
    assert output.startswith('oxygen_demo: aloha: joints.')


@pytest.mark.parametrize(
    'arguments',
    [
        ['--bag', 'some', '--world', 'tabletop'],
        ['--seed', '-1'],
        ['--seconds', '0'],
        ['--rate', '2'],
    ],
)
def test_arguments_that_make_no_sense_together_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ('bag', 'arguments'),
    [
        ('derived_amber_640x480', []),  # two pictures, 33 ms
        ('amber_soccer_goal_12', ['--rate', '0.5']),
        ('derived_camera_joint', []),  # with its own joints and instruction
        ('derived_odd_encodings', ['--camera', 'base_0_rgb=/raw/bgr8']),
    ],
)
def test_a_recording_makes_the_node_act_talk_and_remember(
    bag: str, arguments: list[str], bags: Path, tmp_path: Path
) -> None:
    code, output = demo('--seconds', '4', '--bag', bags / bag, *arguments, out=tmp_path)
    assert code == 0, output
    assert (tmp_path / 'demo.png').is_file()


@pytest.mark.parametrize('bag', ['geocam_mcap', 'rosbag2_wrong_rmw_sqlite3', 'README.md'])
def test_a_recording_that_cannot_be_used_ends_the_demo_in_one_line(
    bag: str, bags: Path, tmp_path: Path
) -> None:
    code, output = demo('--bag', bags / bag, out=tmp_path)
    assert code == 1
    assert len(output.splitlines()) == 1
    assert output.startswith('oxygen_demo: ')


def test_a_bad_profile_ends_the_demo_with_the_reason(tmp_path: Path) -> None:
    bad = tmp_path / 'bad.yaml'
    bad.write_text((CONFIG / 'dummy.yaml').read_text().replace('frame_rate_hz: 10.0', ''))
    code, output = demo(*PHOTOGRAPHS_WORLD, '--profile', bad, out=tmp_path)
    assert code == 1
    assert 'frame_rate_hz' in output
    assert 'Traceback' not in output


@pytest.mark.slow
def test_a_node_that_cannot_start_ends_the_demo_with_what_the_node_said(tmp_path: Path) -> None:
    code, output = demo(*PHOTOGRAPHS_WORLD, '--checkpoint', tmp_path / 'no_weights', out=tmp_path)
    assert code == 1
    assert 'the node ended by itself with exit code 1' in output
    assert 'configure failed' in output


@pytest.mark.slow
def test_ctrl_c_ends_the_demo_and_its_node(tmp_path: Path) -> None:
    with started(*PHOTOGRAPHS_WORLD, '--seconds', '600', out=tmp_path) as process:
        read = wait_for_line(process, ' Hz')
        assert is_running(node_of(read))
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert 'the node has ended with exit code 0' in output
    assert not is_running(node_of(read))


@pytest.mark.slow
def test_a_demo_that_is_killed_outright_takes_its_node_along(tmp_path: Path) -> None:
    with started(*PHOTOGRAPHS_WORLD, '--seconds', '600', out=tmp_path) as process:
        node = node_of(wait_for_line(process, 'is ready'))
        assert is_running(node)
        process.kill()
        process.wait()
    limit = time.monotonic() + 10.0
    while is_running(node):
        assert time.monotonic() < limit, f'the node {node} outlived the demo'
        os.sched_yield()
