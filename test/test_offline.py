"""oxygen_eval on recordings: determinism, resuming, comparing, and what the report shows."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip('rosbags')
pytest.importorskip('torch')

from made_bags import (
    changed,
    messages_of,
    renamed,
    write_bag,
    write_split_bag,
)
from rich.console import Console
from rosbags.highlevel import AnyReader
from rosbags.rosbag2 import CompressionMode, StoragePlugin

from oxygen_ros.actions import ActionBuffer
from oxygen_ros.engine.engine import TextUpdate
from oxygen_ros.evaluation import offline
from oxygen_ros.evaluation.bag_evaluation import Plan, evaluate_bag
from oxygen_ros.evaluation.bag_result import OUTPUT_BAG, BagResult, read_result
from oxygen_ros.evaluation.bag_source import BagSource
from oxygen_ros.evaluation.eval_report import HTML_FILE, JSON_FILE, write_report
from oxygen_ros.evaluation.offline_engine import OfflineEngine
from oxygen_ros.evaluation.recording import Recording
from oxygen_ros.evaluation.replay import FrameDone, Replay
from oxygen_ros.evaluation.run_comparison import RunComparison, compare_runs
from oxygen_ros.evaluation.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]
JOINTS = ['shoulder_pan', 'shoulder_lift', 'elbow', 'wrist_1', 'wrist_2', 'wrist_3']
CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser')


@pytest.fixture(scope='module')
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dummy robot with the topics and joints of derived_camera_joint."""
    raw = yaml.safe_load((ROOT / 'config' / 'dummy.yaml').read_text())
    raw['cameras'][0]['topic'] = 'base/image_raw'
    raw['cameras'][1]['topic'] = 'wrist/image_raw'  # recorded as .../compressed
    raw['joints']['names'] = JOINTS
    path = tmp_path_factory.mktemp('profile') / 'arm.yaml'
    path.write_text(yaml.safe_dump(raw))
    return path


def run(out: Path, profile: Path, bags: list[Path], *options: str) -> int:
    return offline.main([*map(str, bags), '--profile', str(profile), '--out', str(out), *options])


def plan_of(profile: Path, *options: str) -> Plan:
    return offline.make_plan(offline._parse(['bag', '--profile', str(profile), *options]))


def results(out: Path) -> dict[str, BagResult]:
    return {result.name: result for result in RunFolder(out).results()}


def compared(out: Path, other: Path) -> RunComparison:
    ours, theirs = RunFolder(out), RunFolder(other)
    return compare_runs(ours.results(), theirs.results(), ours.setting, theirs.setting)


def difference(found: RunComparison, column: str) -> Any:
    return next(one for one in found.differences if one.column == column)


@pytest.fixture(scope='module')
def first(profile: Path, bags: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over the recording as it is; nothing in it was commanded."""
    out = tmp_path_factory.mktemp('runs') / 'first'
    assert run(out, profile, [bags / 'derived_camera_joint']) == 0
    return out


@pytest.fixture(scope='module')
def robot_bag(first: Path, bags: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same recording of a robot that was commanded by the same model."""
    sent = messages_of(first / 'bags' / 'derived_camera_joint' / OUTPUT_BAG)
    messages = messages_of(bags / 'derived_camera_joint')
    messages += renamed(sent, '/oxygen/would_be_command', '/joint_command')
    return write_bag(tmp_path_factory.mktemp('bags') / 'robot', messages)


@pytest.fixture(scope='module')
def again(robot_bag: Path, profile: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over the recording with commands, in the same setting."""
    out = tmp_path_factory.mktemp('runs') / 'again'
    assert run(out, profile, [robot_bag]) == 0
    return out


@pytest.fixture(scope='module')
def engine(profile: Path) -> OfflineEngine:
    plan = plan_of(profile)
    return OfflineEngine(plan.profile, plan.engine, realtime=False)


# ---- the numbers


def test_the_same_setting_on_the_same_recording_repeats_every_command(
    first: Path, again: Path
) -> None:
    before, after = results(first)['derived_camera_joint'], results(again)['robot']
    assert after.summary['digest'] == before.summary['digest']
    assert after.summary['sent_error']['mae'] == 0.0
    assert after.summary['sent_error']['compared'] == 95 * len(JOINTS)
    # Whole chunks reach beyond the moment when the next one takes over.
    assert after.summary['error']['mae'] > 0.0


def test_without_recorded_commands_the_report_says_how_to_name_them(first: Path) -> None:
    summary = results(first)['derived_camera_joint'].summary
    assert summary['error'] is None
    (remark,) = [text for text in summary['remarks'] if text.startswith('commands')]
    assert '/joint_command' in remark
    assert '--commands TOPIC' in remark


def test_a_camera_that_was_recorded_compressed_is_found(first: Path) -> None:
    topics = results(first)['derived_camera_joint'].summary['topics']
    assert topics['camera left_wrist_0_rgb'] == '/wrist/image_raw/compressed'


def test_frames_stop_with_the_required_camera_and_defects_are_counted(first: Path) -> None:
    """The base camera dies after 20 frames, one wrist picture is stamped 200 ms early."""
    summary = results(first)['derived_camera_joint'].summary
    assert (summary['frames'], summary['ticks']) == (17, 19)
    (reason,) = summary['not_ready']
    assert '/base/image_raw' in reason
    assert summary['drops'] == {'cleared_instruction': 1, 'image_older': 1}


def evaluated(engine: OfflineEngine, profile: Path, bag: Path, folder: Path) -> BagResult:
    folder.mkdir(parents=True)
    evaluate_bag(plan_of(profile), bag, engine, folder, lambda share, words: None)
    result = read_result(folder)
    assert result is not None
    return result


def test_any_storage_gives_the_same_result(
    again: Path, engine: OfflineEngine, robot_bag: Path, profile: Path, tmp_path: Path
) -> None:
    messages = messages_of(robot_bag)
    bags = [
        write_bag(tmp_path / 'mcap', messages, plugin=StoragePlugin.MCAP),
        write_bag(tmp_path / 'file', messages, compression=CompressionMode.FILE),
        write_bag(tmp_path / 'message', messages, compression=CompressionMode.MESSAGE),
        write_split_bag(tmp_path / 'split', messages),
    ]
    expected = results(again)['robot'].summary['digest']
    for bag in bags:
        found = evaluated(engine, profile, bag, tmp_path / 'results' / bag.name)
        assert found.summary['digest'] == expected, bag.name


def test_at_the_pace_of_the_recording_a_run_is_no_faster_than_it(
    robot_bag: Path, profile: Path, tmp_path: Path
) -> None:
    assert run(tmp_path / 'out', profile, [robot_bag], '--rate', 'recorded') == 0
    summary = results(tmp_path / 'out')['robot'].summary
    assert summary['wall_s'] >= 0.9 * summary['duration_s']
    assert summary['frames'] + summary['drops'].get('tick_skipped', 0) <= summary['ticks']


class Keeper:
    """Listens to a replay and keeps it."""

    def __init__(self) -> None:
        self.frames: list[FrameDone] = []
        self.sources: list[tuple[int, str]] = []
        self.texts: list[TextUpdate] = []

    def on_frame(self, done: FrameDone) -> None:
        self.frames.append(done)

    def on_takeover(self, *_: Any) -> None: ...

    def on_command(self, time_ns: int, row: np.ndarray | None, source: str) -> None:
        self.sources.append((time_ns, source))

    def on_text(self, time_ns: int, update: TextUpdate) -> None:
        self.texts.append(update)


def replayed(engine: OfflineEngine, profile: Path, bag: Path, **options: Any) -> Keeper:
    plan, keeper = plan_of(profile), Keeper()
    source = BagSource(Recording(bag), plan.profile, plan.given)
    settings = {'instruction': '', 'latency_ns': 0, 'realtime': False} | options
    Replay(source, engine, keeper, **settings).run(lambda now_ns: None)
    return keeper


def test_a_chunk_takes_over_when_its_latency_has_passed(
    engine: OfflineEngine, profile: Path, robot_bag: Path
) -> None:
    keeper = replayed(engine, profile, robot_bag, latency_ns=150_000_000)
    first_ns = next(time_ns for time_ns, source in keeper.sources if source == 'chunk')
    command_period_ns = 20_000_000
    waited_ns = first_ns - keeper.frames[0].tick_ns
    assert 150_000_000 <= waited_ns < 150_000_000 + command_period_ns


def test_an_instruction_grows_old_on_the_time_of_the_recording(
    engine: OfflineEngine, profile: Path, bags: Path, tmp_path: Path
) -> None:
    raw = yaml.safe_load(profile.read_text())
    raw['instruction']['max_age_s'] = 0.55
    path = tmp_path / 'forgetful.yaml'
    path.write_text(yaml.safe_dump(raw))
    bag = bags / 'derived_camera_joint'
    remembered, forgotten = (replayed(engine, one, bag).frames for one in (profile, path))
    missing = {done.tick_ns for done in remembered} - {done.tick_ns for done in forgotten}
    assert missing
    assert min(missing) > forgotten[0].tick_ns + 550_000_000


def test_every_text_ends_whatever_the_machine_and_describes_its_own_frame(
    engine: OfflineEngine, profile: Path, robot_bag: Path
) -> None:
    keeper = replayed(engine, profile, robot_bag)
    ended = [update for update in keeper.texts if update.reason is not None]
    due = [done for done in keeper.frames if done.observation.frame % 5 == 0]
    texts = [update for update in ended if update.task == 'text']
    assert [update.stamp_ns for update in texts] == [done.chunk.stamp_ns for done in due]
    assert {update.reason.value for update in ended if update.reason} <= {'eos', 'length'}


def test_damaged_messages_are_counted_and_the_rest_is_evaluated(
    engine: OfflineEngine, profile: Path, robot_bag: Path, tmp_path: Path
) -> None:
    messages = messages_of(robot_bag)
    for number, (topic, type_name, log_ns, data) in enumerate(messages):
        if topic == '/joint_states' and number % 3 == 0:
            messages[number] = (topic, type_name, log_ns, data[:20])
    bag = write_bag(tmp_path / 'damaged', messages)
    result = evaluated(engine, profile, bag, tmp_path / 'result')
    assert result.summary['drops']['message_damaged'] > 10
    assert result.summary['frames'] == 17


def test_a_recording_written_by_a_python_program_is_read(
    again: Path, engine: OfflineEngine, profile: Path, robot_bag: Path, tmp_path: Path
) -> None:
    """rclpy's serialize_message leaves bytes of no meaning behind every empty array of doubles."""
    messages = [
        (topic, type_name, log_ns, data + b'\xd0\xa5\x47\xcb' * 2)
        if topic in ('/joint_states', '/joint_command')
        else (topic, type_name, log_ns, data)
        for topic, type_name, log_ns, data in messages_of(robot_bag)
    ]
    result = evaluated(engine, profile, write_bag(tmp_path / 'bag', messages), tmp_path / 'result')
    assert 'message_damaged' not in result.summary['drops']
    assert result.summary['digest'] == results(again)['robot'].summary['digest']
    assert result.summary['sent_error']['mae'] == 0.0


def test_chunks_continue_each_other_offline_as_the_profile_says(
    profile: Path, robot_bag: Path, tmp_path: Path
) -> None:
    raw = yaml.safe_load(profile.read_text())
    raw['action']['blending'] = 'rtc_identity'
    path = tmp_path / 'rtc.yaml'
    path.write_text(yaml.safe_dump(raw))
    plan = plan_of(path)
    engine = OfflineEngine(plan.profile, plan.engine, realtime=False)
    keepers = [replayed(engine, path, robot_bag, latency_ns=40_000_000) for _ in range(2)]
    continued = 0
    for before, after in pairwise(done.chunk for done in keepers[0].frames):
        played = ActionBuffer(len(JOINTS), 'linear')
        played.put(before, after.time_ns)
        row = played.rows(after.time_ns, period_ns=after.period_ns, count=1)
        continued += np.allclose(row, after.values[:1], rtol=0, atol=1e-9)
    assert continued >= 10
    for one, two in zip(*(keeper.frames for keeper in keepers), strict=True):
        np.testing.assert_array_equal(one.chunk.values, two.chunk.values)


# ---- what is missing


@pytest.mark.parametrize(
    ('name', 'said'),
    [
        ('rosbag2_talker_mcap', 'recorded as Image or CompressedImage: none'),
        ('geocam_sqlite3', '/test/sensor_msgs/compressed_image, /test/sensor_msgs/image'),
        ('derived_amber_640x480', '--camera base_0_rgb=TOPIC'),
        ('amber_soccer_goal_12', '/camera/image_raw; say --camera base_0_rgb=TOPIC'),
        ('amber_soccer_goal_12', 'And joint states: has no topic /joint_states; recorded as Joint'),
        ('geocam_mcap', '/test/sensor_msgs/joint_state; say --joints TOPIC'),
        ('derived_odd_encodings', 'and 33 more'),
        ('parquet_array_msgs', 'recorded as Image or CompressedImage: none'),
        ('rosbag2_wrong_rmw_sqlite3', 'wrong_format'),
        ('nowhere', 'no such file or folder'),
    ],
)
def test_a_recording_without_the_topics_is_told_in_one_line_and_the_next_goes_on(
    name: str, said: str, bags: Path, profile: Path, first: Path, tmp_path: Path
) -> None:
    out = tmp_path / 'out'
    shutil.copytree(first, out)  # the good one has its result already
    wanted = [bags / name, bags / 'derived_camera_joint']
    reported = Console(record=True, width=1000)
    plan = plan_of(profile)
    offline.evaluate(plan, wanted, RunFolder(out), reported)
    found = results(out)
    assert said in found[name].failed
    assert '\n' not in found[name].failed
    assert found[name].failed in reported.export_text()
    assert not found['derived_camera_joint'].failed


def test_exit_codes_tell_whether_all_some_or_nothing_could_be_done(
    bags: Path, profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / 'out'
    assert run(out, profile, [bags / 'rosbag2_talker_mcap']) == 1
    assert (out / HTML_FILE).is_file()
    assert run(tmp_path / 'other', Path('no_such_profile'), [bags / 'geocam_mcap']) == 2
    assert 'no_such_profile' in capsys.readouterr().err
    assert run(out, profile, [bags / 'geocam_mcap'], '--compare', str(tmp_path)) == 2
    assert 'is no run of oxygen_eval' in capsys.readouterr().err


# ---- resuming


def test_a_resumed_run_does_only_what_is_left_with_the_same_result(
    robot_bag: Path, bags: Path, profile: Path, tmp_path: Path
) -> None:
    out, wanted = tmp_path / 'out', [robot_bag, bags / 'derived_camera_joint']
    assert run(out, profile, wanted) == 0
    before = {name: one.summary for name, one in results(out).items()}
    # As a run leaves it that was killed in the middle of the second recording.
    (out / 'bags' / 'derived_camera_joint' / 'result.json').unlink()
    kept = (out / 'bags' / 'robot' / 'result.json').stat().st_mtime_ns
    assert run(out, profile, wanted, '--resume') == 0
    after = {name: one.summary for name, one in results(out).items()}
    assert (out / 'bags' / 'robot' / 'result.json').stat().st_mtime_ns == kept
    for name in ('robot', 'derived_camera_joint'):
        assert after[name]['digest'] == before[name]['digest']


def test_a_run_is_neither_overwritten_nor_mixed_with_another(
    again: Path,
    robot_bag: Path,
    profile: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = (again / 'bags' / 'robot' / 'result.json').read_bytes()
    assert run(again, profile, [robot_bag]) == 2
    assert '--resume goes on' in capsys.readouterr().err
    assert run(again, profile, [robot_bag], '--resume', '--seed', '7') == 2
    assert 'seed = 0, now it is 7' in capsys.readouterr().err
    assert (again / 'bags' / 'robot' / 'result.json').read_bytes() == before


# ---- A/B


@pytest.fixture(scope='module')
def biased(robot_bag: Path, profile: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which the elbow is commanded 0.1 rad too far."""
    out = RunFolder(tmp_path_factory.mktemp('runs') / 'biased')
    plan = plan_of(profile)
    out.begin(plan.setting(), {}, resume=False)

    def bias(engine: OfflineEngine) -> None:
        decode = engine.engine.processor.decode
        offset = np.where(np.array(JOINTS) == 'elbow', 0.1, 0.0)
        engine.engine.processor.decode = (  # type: ignore[method-assign]
            lambda actions, observation: decode(actions, observation) + offset
        )

    offline.evaluate(plan, [robot_bag], out, Console(quiet=True), change=bias)
    return out.path


def test_a_biased_joint_is_the_one_that_changed_and_by_how_much(biased: Path, again: Path) -> None:
    found = compared(biased, again)
    assert not found.settings
    assert difference(found, 'action:elbow').mean == pytest.approx(0.1, abs=1e-6)
    changed = {d.column for d in found.differences if d.column.startswith('action:') and d.changed}
    assert changed == {'action:elbow'}
    assert 'action of 1 of 6 joints (elbow)' in found.changed()
    errors = results(biased)['robot'].summary['sent_error']['per_joint']
    assert errors['elbow']['mae'] > 0.01
    assert errors['wrist_3']['mae'] == 0.0


def test_fewer_denoise_steps_show_as_setting_and_in_the_actions(
    again: Path, robot_bag: Path, profile: Path, tmp_path: Path
) -> None:
    out, options = tmp_path / 'out', ('--num-denoise-steps', '5', '--compare', str(again))
    assert run(out, profile, [robot_bag], *options) == 0
    found = json.loads((out / JSON_FILE).read_text())['comparison']
    assert found['settings'] == {'profile.model.num_denoise_steps': ['5', '10']}
    assert not found['bit_for_bit']
    changed = {one['column'] for one in found['differences'] if one['changed']}
    assert changed & {f'action:{joint}' for joint in JOINTS}
    assert results(out)['robot'].summary['sent_error']['mae'] > 0.0


def test_a_dropped_camera_shows_as_setting_in_every_frame_and_in_the_actions(
    again: Path, robot_bag: Path, profile: Path, tmp_path: Path
) -> None:
    out = tmp_path / 'out'
    assert run(out, profile, [robot_bag], '--drop-camera', 'left_wrist_0_rgb') == 0
    found = compared(out, again)
    assert found.settings['dropped_cameras'] == ('left_wrist_0_rgb', '')
    cameras = difference(found, 'cameras')
    assert (cameras.this, cameras.other, cameras.changed) == (1.0, 2.0, True)
    assert any(d.changed for d in found.differences if d.column.startswith('action:'))


def test_a_run_compared_with_itself_is_the_same_bit_for_bit(again: Path) -> None:
    found = compared(again, again)
    assert found.bit_for_bit
    assert found.paired_texts == found.equal_texts > 0
    assert not found.changed()


# ---- files


def test_the_output_bag_reads_back_as_what_was_done_and_said(again: Path) -> None:
    folder = again / 'bags' / 'robot'
    result = read_result(folder)
    assert result is not None
    # Without any type store: the definitions of our messages are in the file.
    with AnyReader([folder / OUTPUT_BAG]) as reader:
        read: dict[str, list[tuple[int, Any]]] = {}
        for connection, log_ns, data in reader.messages():
            message = reader.deserialize(data, connection.msgtype)
            read.setdefault(connection.topic, []).append((log_ns, message))
    chunks = [message for _, message in read['/oxygen/actions']]
    assert [chunk.frame for chunk in chunks] == result.frames['frame'].tolist()
    means = [np.reshape(c.values, (c.horizon, -1))[:, 2].mean() for c in chunks]
    np.testing.assert_allclose(means, result.frames['action:elbow'], rtol=1e-6)
    ended = [m.text for _, m in read['/oxygen/text'] if m.final]
    assert ended == [text['text'] for text in result.texts if text['kind'] == 'text']
    assert [m.text for _, m in read['/oxygen/memory']] == [
        text['text'] for text in result.texts if text['kind'] == 'memory'
    ]
    assert read['/oxygen/stats'][-1][1].chunks == result.summary['frames']
    commands = read['/oxygen/would_be_command']
    assert len(commands) == result.summary['commands']['sent']
    assert commands[0][1].name == JOINTS


def test_json_and_csv_beside_the_page_hold_the_same_numbers(again: Path) -> None:
    report = json.loads((again / JSON_FILE).read_text())
    with (again / 'report.csv').open(newline='') as file:
        rows = {(row['quantity'], row['joint'], row['row']): row for row in csv.DictReader(file)}
    (bag,) = report['bags']
    error = bag['error']
    assert float(rows['error_mae', 'elbow', '']['value']) == error['per_joint']['elbow']['mae']
    assert float(rows['error_mae', 'wrist_1', '3']['value']) == error['per_step_joint_mae'][3][3]
    assert report['overall']['error_mae'] == pytest.approx(error['mae'])
    assert report['overall']['frames'] == 17


def test_the_page_needs_no_other_file_and_no_network(again: Path) -> None:
    page = (again / HTML_FILE).read_text()
    assert re.findall(r'src="(?!data:image/png;base64,)', page) == []
    assert not re.search(r'<script|<link|@import|url\(|https?://', page)
    assert page.count('<img') == 4


def test_what_a_model_writes_cannot_become_part_of_the_page(again: Path, tmp_path: Path) -> None:
    result = results(again)['robot']
    result.texts[0]['text'] = '<script>alert(1)</script>\x1b[2J'
    folder = RunFolder(again)
    page = write_report(tmp_path, folder.setting, folder.machine, [result]).read_text()
    assert '<script' not in page
    assert '&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[2J' in page


def test_a_browser_shows_the_page_with_its_pictures(
    biased: Path, again: Path, tmp_path: Path
) -> None:
    if CHROMIUM is None:
        pytest.skip('no chromium: apt-get install chromium')
    from PIL import Image

    ours, theirs = RunFolder(biased), RunFolder(again)
    found = compared(biased, again)
    page = write_report(
        tmp_path, ours.setting, ours.machine, ours.results(), found, theirs.results()
    )
    picture = tmp_path / 'page.png'
    subprocess.run(
        [
            CHROMIUM, '--headless', '--no-sandbox', '--disable-gpu', '--hide-scrollbars',
            f'--user-data-dir={tmp_path / "browser"}', '--window-size=1200,4000',
            f'--screenshot={picture}', page.as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )  # fmt: skip
    pixels = np.asarray(Image.open(picture).convert('RGB')).astype(int)

    def rows_with(red: int, green: int, blue: int) -> int:
        near = np.abs(pixels - (red, green, blue)).sum(axis=2) < 24
        return int(near.any(axis=1).sum())

    assert rows_with(0, 114, 178) > 300  # this run, in the plots
    assert rows_with(230, 159, 0) > 300  # the other run
    assert rows_with(253, 238, 230) > 20  # the table's line of the joint that changed
    # The end of a page that is this long is reached: nothing in between failed to lay out.
    assert rows_with(28, 33, 38) > 300


def test_a_changed_recording_is_seen_by_the_digest(
    again: Path, engine: OfflineEngine, profile: Path, robot_bag: Path, tmp_path: Path
) -> None:
    """Evidence that equal digests mean something."""

    def move(message: Any) -> None:
        message.position = np.asarray(message.position) + 0.3

    bag = write_bag(tmp_path / 'bag', list(changed(messages_of(robot_bag), '/joint_states', move)))
    result = evaluated(engine, profile, bag, tmp_path / 'result')
    assert result.summary['digest'] != results(again)['robot'].summary['digest']


def test_a_machine_without_ros_can_evaluate() -> None:
    blocked = ('rclpy', 'sensor_msgs', 'std_msgs', 'ament_index_python', 'oxygen_ros.msg')
    program = (
        'import sys\n'
        f'sys.modules.update(dict.fromkeys({blocked!r}))\n'
        'from oxygen_ros.evaluation import offline\n'
        "sys.exit(offline.main(['nowhere', '--profile', 'aloha', '--out', sys.argv[1]]))\n"
    )
    result = subprocess.run(
        [sys.executable, '-c', program, '/dev/null/out'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    # It gets as far as making the folder, and says in one line that it cannot.
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith('oxygen_eval: ')
    assert result.stderr.count('\n') == 1
