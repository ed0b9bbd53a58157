"""Replay of recordings: the bytes, the order and the time that come out of the file."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

rclpy = pytest.importorskip('rclpy')
pytest.importorskip('rosbags')

from rclpy.qos import DurabilityPolicy, QoSProfile  # noqa: E402
from rclpy.serialization import deserialize_message  # noqa: E402

from oxygen_ros.evaluation.bag_player import BagPlayer, main, shift_stamp  # noqa: E402
from oxygen_ros.evaluation.recording import BagError, Recording, message_class  # noqa: E402

PLAYABLE = (
    'derived_amber_640x480',  # sqlite3
    'amber_soccer_goal_12',  # mcap, compressed per message, the old spelling of the type
    'derived_camera_joint',
    'parquet_base_msgs',  # recorded as latched
    'rosbag2_talker_mcap',  # metadata.yaml and the file disagree on QoS
)
CLOCK = '/clock'
DEEP = QoSProfile(depth=1000)


class Listener:
    """Keeps what arrives, as bytes, by topic."""

    def __init__(self, graph: Any, recording: Recording) -> None:
        self.received: dict[str, list[bytes]] = {name: [] for name in recording.topics}
        self.clock_ns: list[int] = []
        for name, topic in recording.topics.items():
            graph.node.create_subscription(
                message_class(topic.type_name), name, self._keep(name), DEEP, raw=True
            )
        clock = message_class('rosgraph_msgs/msg/Clock')
        graph.node.create_subscription(clock, CLOCK, self._tick, DEEP)

    def _keep(self, name: str) -> Callable[[bytes], None]:
        return self.received[name].append

    def _tick(self, message: Any) -> None:
        self.clock_ns.append(message.clock.sec * 10**9 + message.clock.nanosec)

    @property
    def count(self) -> int:
        return sum(map(len, self.received.values()))


def recorded(recording: Recording) -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = {name: [] for name in recording.topics}
    for name, _, data in recording.messages(list(recording.topics)):
        found[name].append(data)
    return found


def play(graph: Any, recording: Recording, **options: Any) -> tuple[Listener, float]:
    """Play it once to a listener; returns that and how long it took [s]."""
    listener = Listener(graph, recording)
    player = BagPlayer(graph.node, recording, **options)
    try:
        graph.spin_until(lambda: not player.wait_for_subscribers(0), 'subscriptions')
        started = time.monotonic()
        player.start()
        graph.spin_until(lambda: not player.is_playing, 'the end of the recording')
        took_s = time.monotonic() - started
        graph.spin_until(lambda: listener.count == player.num_published, 'the last message')
    finally:
        player.stop()
    assert player.error is None
    return listener, took_s


@pytest.mark.parametrize('name', PLAYABLE)
def test_the_bytes_that_arrive_are_the_bytes_in_the_file_in_their_order(
    name: str, bags: Path, graph: Any
) -> None:
    recording = Recording(bags / name)
    listener, _ = play(graph, recording, rate=4.0)
    assert listener.count > 0
    assert listener.received == recorded(recording)


@pytest.mark.case(28)
@pytest.mark.parametrize('rate', [4.0, 0.5])
def test_another_rate_changes_only_how_long_it_takes(rate: float, bags: Path, graph: Any) -> None:
    recording = Recording(bags / 'derived_camera_joint')
    listener, took_s = play(graph, recording, rate=rate, duration_s=0.5)
    within_ns = recording.start_ns + 500_000_000
    expected = [data for _, t, data in recording.messages(['/joint_states']) if t <= within_ns]
    assert listener.received['/joint_states'] == expected
    assert took_s >= 0.5 / rate


def test_the_clock_follows_the_log_time_and_never_goes_back(bags: Path, graph: Any) -> None:
    recording = Recording(bags / 'derived_camera_joint')
    listener, _ = play(graph, recording, clock_hz=100.0)
    assert listener.clock_ns == sorted(listener.clock_ns)
    assert listener.clock_ns[0] >= recording.start_ns
    assert listener.clock_ns[-1] <= recording.end_ns
    # Ticks may be lost to a busy machine, but the clock may not stand still for long.
    steps = [b - a for a, b in pairwise(listener.clock_ns)]
    assert len(listener.clock_ns) > 50
    assert max(steps) < 500_000_000


def test_a_message_never_arrives_at_a_clock_that_is_ahead_of_it(bags: Path, graph: Any) -> None:
    recording = Recording(bags / 'derived_camera_joint')
    player = BagPlayer(graph.node, recording, rate=1000.0, clock_hz=1000.0)
    ticks: list[tuple[int, int]] = []
    clock = player._clock
    assert clock is not None
    clock.tick = lambda ns: ticks.append((ns, player.num_published))  # type: ignore[method-assign]
    player.play()
    times = [t for _, t, _ in recording.messages(list(recording.topics))]
    assert all(ns <= times[done] for ns, done in ticks if done < len(times))


def test_a_loop_back_repeats_the_bytes_and_the_clock_jumps_back(bags: Path, graph: Any) -> None:
    recording = Recording(bags / 'derived_amber_640x480')
    listener = Listener(graph, recording)
    player = BagPlayer(graph.node, recording, loop='back', clock_hz=200.0)
    graph.spin_until(lambda: not player.wait_for_subscribers(0), 'subscriptions')
    player.start()
    graph.spin_until(lambda: listener.count >= 6, 'three repetitions')
    player.stop()
    images = listener.received['/camera/image_raw']
    assert images[:2] == images[2:4] == recorded(recording)['/camera/image_raw']
    assert listener.clock_ns != sorted(listener.clock_ns)
    assert min(listener.clock_ns) >= recording.start_ns


def test_a_loop_onward_shifts_stamps_and_lets_time_go_on(bags: Path, graph: Any) -> None:
    recording = Recording(bags / 'derived_amber_640x480')
    listener = Listener(graph, recording)
    player = BagPlayer(graph.node, recording, loop='onward', clock_hz=200.0)
    graph.spin_until(lambda: not player.wait_for_subscribers(0), 'subscriptions')
    player.start()
    graph.spin_until(lambda: listener.count >= 6, 'three repetitions')
    player.stop()
    images = listener.received['/camera/image_raw'][:6]
    stamps = [stamp_of(image) for image in images]
    gap = stamps[1] - stamps[0]
    # As regular over the seam as within the recording (to a nanosecond of rounding).
    assert all(abs(b - a - gap) < 10 for a, b in pairwise(stamps))
    assert images[2][12:] == images[0][12:]
    assert listener.clock_ns == sorted(listener.clock_ns)


def stamp_of(image: bytes) -> int:
    stamp = deserialize_message(image, message_class('sensor_msgs/msg/Image')).header.stamp
    return int(stamp.sec * 10**9 + stamp.nanosec)


@pytest.mark.parametrize(('mark', 'order'), [(b'\x00\x01', '<'), (b'\x00\x00', '>')])
def test_a_shifted_stamp_is_the_old_one_plus_the_shift_in_either_byte_order(
    mark: bytes, order: str
) -> None:
    data = mark + b'\x00\x00' + struct.pack(f'{order}iI', 7, 900_000_000) + b'rest'
    shifted = shift_stamp(data, 200_000_000)
    assert shifted == mark + b'\x00\x00' + struct.pack(f'{order}iI', 8, 100_000_000) + b'rest'


def test_a_stamp_of_zero_means_no_stamp_and_stays() -> None:
    data = b'\x00\x01\x00\x00' + bytes(8) + b'rest'
    assert shift_stamp(data, 10**9) == data


def test_a_topic_recorded_as_latched_reaches_whoever_comes_late(bags: Path, graph: Any) -> None:
    recording = Recording(bags / 'parquet_base_msgs')
    player = BagPlayer(graph.node, recording, {'/one_shot/string': '/renamed'}, rate=10.0)
    player.play()
    late: list[bytes] = []
    latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
    string = message_class('std_msgs/msg/String')
    graph.node.create_subscription(string, '/renamed', late.append, latched, raw=True)
    graph.spin_until(lambda: late, 'the latched message')
    assert late == recorded(recording)['/one_shot/string']


def test_topics_nobody_listens_to_are_named_after_the_wait(bags: Path, graph: Any) -> None:
    recording = Recording(bags / 'derived_camera_joint')
    graph.node.create_subscription(
        message_class('std_msgs/msg/String'), '/instruction', lambda _: None, 10
    )
    player = BagPlayer(
        graph.node, recording, {'/instruction': '/instruction', '/joint_states': '/j'}
    )
    graph.spin_until(lambda: len(player.wait_for_subscribers(0)) == 1, 'one subscription')
    assert player.wait_for_subscribers(0.1) == ['/joint_states']


# ---- the program


def test_the_program_remaps_and_selects_topics(bags: Path, graph: Any) -> None:
    received: list[bytes] = []
    string = message_class('std_msgs/msg/String')
    graph.node.create_subscription(string, '/said', received.append, DEEP, raw=True)
    bag = bags / 'rosbag2_talker_mcap'
    command = [sys.executable, '-m', 'oxygen_ros.evaluation.bag_player', str(bag)]
    arguments = ['--topics', '/topic', '--remap', 'topic:=/said', '--rate', '10', '--wait', '30']
    process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)
    try:
        graph.spin_until(lambda: process.poll() is not None, 'the end of the program')
        graph.spin_until(lambda: len(received) == 10, 'ten messages')
    finally:
        process.kill()
        _, errors = process.communicate()
    assert process.returncode == 0
    assert '10 messages on 1 topics' in errors
    assert received == recorded(Recording(bag))['/topic']


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the program, expect exit code 2, return the one line it says."""
    assert main([*arguments, '--wait', '0']) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_another_serialization_format_is_refused_in_one_line(
    bags: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, str(bags / 'rosbag2_wrong_rmw_sqlite3'))
    assert 'wrong_format' in line


def test_what_is_no_recording_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / 'notes.txt').write_text('no bag')
    (tmp_path / 'empty.db3').write_bytes(b'')
    assert 'metadata.yaml' in refusal(capsys, str(tmp_path))
    assert 'notes.txt' in refusal(capsys, str(tmp_path / 'notes.txt'))
    assert 'empty.db3' in refusal(capsys, str(tmp_path / 'empty.db3'))
    assert 'no such file' in refusal(capsys, str(tmp_path / 'missing'))


@pytest.mark.parametrize('flag', [('--topics', '/nope'), ('--remap', '/nope:=/new')])
def test_a_topic_that_is_not_recorded_is_refused_and_those_that_are_named(
    flag: tuple[str, str], bags: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, str(bags / 'derived_camera_joint'), *flag)
    assert '/nope' in line
    assert '/joint_states' in line


def test_a_name_that_is_no_topic_is_refused_in_one_line(
    bags: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bag = str(bags / 'derived_camera_joint')
    assert '--remap' in refusal(capsys, bag, '--remap', '/instruction:=/0 bad')
    assert '--remap' in refusal(capsys, bag, '--remap', '/instruction')


@pytest.mark.parametrize('name', ['derived_camera_joint', 'geocam_mcap'])
def test_a_truncated_file_is_refused_in_one_line(
    name: str, bags: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / name
    shutil.copytree(bags / name, copy)
    file = next(path for path in copy.iterdir() if path.suffix in ('.db3', '.mcap'))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(BagError, match=name) as caught:
        list(Recording(copy).messages(list(Recording(copy).topics)))
    assert '\n' not in str(caught.value)


def test_a_type_that_is_not_installed_is_skipped_in_one_line_and_the_rest_is_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_bag(tmp_path / 'bag')
    assert main([str(tmp_path / 'bag'), '--wait', '0']) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if 'skipping' in line] == [
        'skipping /thing: made_up_msgs/msg/Thing is not installed here'
    ]
    assert '1 messages on 1 topics' in lines[-1]


def write_bag(path: Path) -> None:
    from rosbags.rosbag2 import Writer
    from rosbags.typesys import Stores, get_types_from_msg, get_typestore

    store = get_typestore(Stores.ROS2_HUMBLE)
    store.register(get_types_from_msg('string data', 'made_up_msgs/msg/Thing'))
    with Writer(path, version=9) as writer:
        for topic, kind in (('/thing', 'made_up_msgs/msg/Thing'), ('/text', 'std_msgs/msg/String')):
            connection = writer.add_connection(topic, kind, typestore=store)
            data = store.serialize_cdr(store.types[kind](data='hello'), kind)
            writer.write(connection, 10**9, data)


@pytest.mark.parametrize('mode', ['NONE', 'FILE', 'MESSAGE'])
@pytest.mark.parametrize('storage', ['SQLITE3', 'MCAP'])
def test_a_compressed_recording_gives_the_bytes_that_were_written(
    storage: str, mode: str, tmp_path: Path
) -> None:
    from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin, Writer
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.ROS2_HUMBLE)
    texts = [b'\x00\x01\x00\x00' + bytes([i]) * 100 for i in range(5)]
    writer = Writer(tmp_path / 'bag', version=9, storage_plugin=StoragePlugin[storage])
    writer.set_compression(CompressionMode[mode], CompressionFormat.ZSTD)
    with writer:
        connection = writer.add_connection('/text', 'std_msgs/msg/String', typestore=store)
        for i, text in enumerate(texts):
            writer.write(connection, 10**9 + i, text)
    played = list(Recording(tmp_path / 'bag').messages(['/text']))
    assert played == [('/text', 10**9 + i, text) for i, text in enumerate(texts)]
