"""A run at the simulated table, recorded and evaluated offline: the same, or what changed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip('rclpy')
pytest.importorskip('rosbags')
if find_spec('mujoco') is None:  # imported here, it would look for a screen
    pytest.skip('MuJoCo is not installed', allow_module_level=True)
pytest.importorskip('oxygen_ros.msg', reason='messages not built: ./run build')

from made_bags import Message, write_bag
from rclpy.qos import QoSProfile
from rclpy.serialization import serialize_message
from rich.console import Console
from robot import nanoseconds
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import Float64MultiArray, String
from test_offline import Keeper, compared, plan_of, replayed, results, run

from oxygen_ros.evaluation import episodes, offline
from oxygen_ros.evaluation.eval_report import JSON_FILE
from oxygen_ros.evaluation.lockstep import TICK_DELAY_NS, LockStep, Look
from oxygen_ros.evaluation.lockstep_profile import lockstep_profile
from oxygen_ros.evaluation.node_process import NodeProcess
from oxygen_ros.evaluation.offline_engine import OfflineEngine
from oxygen_ros.evaluation.run_folder import RunFolder
from oxygen_ros.evaluation.tabletop_profile import shipped_checkpoint
from oxygen_ros.sim.tabletop import TabletopRobot
from oxygen_ros.sim.world import CONTROL_HZ, JOINTS, TabletopWorld

ROOT = Path(__file__).resolve().parents[1]
SEED = 10_003
LENGTH_S = 8.0


class Recorder:
    """Keeps what the table publishes, logged at the simulated time of its stamp."""

    def __init__(self, node: Any) -> None:
        self.messages: list[Message] = []
        deep = QoSProfile(depth=1000)
        for topic, kind in (
            ('/camera/base/image_raw', Image),
            ('/camera/side/image_raw', Image),
            ('/joint_states', JointState),
        ):
            node.create_subscription(kind, topic, self._keeper(topic), deep)

    def _keeper(self, topic: str) -> Any:
        return lambda message: self.add(topic, message, nanoseconds(message.header.stamp))

    def add(self, topic: str, message: Any, log_ns: int) -> None:
        package = type(message).__module__.partition('.')[0]
        kind = f'{package}/msg/{type(message).__name__}'
        self.messages.append((topic, kind, log_ns, bytes(serialize_message(message))))


@dataclass
class LiveRun:
    """What the live node did, and the recording of it."""

    bag: Path
    profile: Path
    looks: list[Look] = field(default_factory=list)
    endings: dict[tuple[str, int], str] = field(default_factory=dict)
    """Texts and notes by task and stamp."""


@pytest.fixture(scope='module')
def live(ros_domain: int, tmp_path_factory: pytest.TempPathFactory) -> LiveRun:
    """One episode of the trained model in the live node, in lock-step."""
    folder = tmp_path_factory.mktemp('live')
    options = episodes._parse(['--out', str(folder)])
    setting = episodes.make_setting(
        options, lambda base, written: lockstep_profile(base, written, frame_rate_hz=2.0)
    )
    made = LiveRun(folder / 'bag', folder / 'evaluated.yaml')
    instruction = episodes.play_of(SEED).instruction
    process = NodeProcess(
        setting.node_parameters('unified', use_sim_time=True), folder / 'node.log'
    )
    world = TabletopWorld()
    try:
        with episodes.ros_node('tabletop') as (node, executor):
            robot = TabletopRobot(node, world)
            recorder = Recorder(node)
            lockstep = LockStep(node, executor, robot, setting.profile, process, setting.cameras)
            lockstep.wait_until_active(instruction)
            recorder.messages.clear()
            robot.reset(SEED)
            lockstep.begin(SEED, instruction)
            while world.time_s < LENGTH_S - 1e-6:
                made.looks.append(lockstep.look())
                for row, command in enumerate(lockstep.act(lambda: False)):
                    at_ns = made.looks[-1].stamp_ns + row * 1_000_000_000 // CONTROL_HZ
                    message = Float64MultiArray(data=command.tolist())
                    recorder.add('/joint_commands', message, at_ns)
            lockstep.finish_texts()
            made.endings = {key: one.text for key, one in lockstep.heard.endings.items()}
            assert process.stop() == 0
    finally:
        process.kill()
        world.close()
    # The recording begins a frame period before the node's first tick, so that its ticks are those
    # of a replay.
    begin_ns = made.looks[0].stamp_ns + TICK_DELAY_NS - 500_000_000
    recorder.add('/instruction', String(data=instruction), begin_ns)
    write_bag(made.bag, recorder.messages)
    _write_profile(setting.profile_path, made.profile)
    return made


def _write_profile(lockstep: Path, written: Path) -> None:
    """The profile of the run, with a command per control step as the world obeyed them."""
    raw = yaml.safe_load(lockstep.read_text())
    limits = raw['command']['limits']
    scale = CONTROL_HZ / raw['command']['rate_hz']
    limits['max_velocity'] = [scale * one for one in limits['max_velocity']]
    raw['command']['rate_hz'] = CONTROL_HZ
    written.write_text(yaml.safe_dump(raw))


@pytest.fixture(scope='module')
def again(live: LiveRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording evaluated in the setting of the live run."""
    out = tmp_path_factory.mktemp('runs') / 'again'
    assert evaluate(live, out) == 0
    return out


def evaluate(live: LiveRun, out: Path, *options: str) -> int:
    return run(out, live.profile, [live.bag], '--checkpoint', str(shipped_checkpoint()), *options)


def summary(out: Path) -> dict[str, Any]:
    return results(out)['bag'].summary


def test_a_recorded_run_replays_to_the_chunks_texts_and_notes_of_the_live_node(
    live: LiveRun,
) -> None:
    plan = plan_of(live.profile, '--checkpoint', str(shipped_checkpoint()))
    engine = OfflineEngine(plan.profile, plan.engine, realtime=False)
    keeper: Keeper = replayed(engine, live.profile, live.bag)
    assert [done.chunk.stamp_ns for done in keeper.frames] == [look.stamp_ns for look in live.looks]
    for done, look in zip(keeper.frames, live.looks, strict=True):
        np.testing.assert_array_equal(done.chunk.values, look.chunk)
    texts = {(u.task, u.stamp_ns): u.text for u in keeper.texts if u.reason is not None}
    assert len(texts) == 2 * len(live.looks)
    assert {key: live.endings[key] for key in texts} == texts


def test_in_the_same_setting_the_error_against_the_recorded_commands_is_nothing(
    live: LiveRun, again: Path
) -> None:
    found = summary(again)
    assert found['frames'] == len(live.looks)
    # All commands but the last, which a replay sends after the end of the recording.
    assert found['sent_error']['compared'] == (len(live.looks) * 5 - 1) * len(JOINTS)
    # The live node was asked one microsecond earlier than a replayed tick.
    assert found['sent_error']['mae'] < 1e-5
    assert found['shift']['best_ms'] == 0


def injected(live: LiveRun, out: Path, change: Any) -> Path:
    """Evaluate with a change that no option makes."""
    plan = plan_of(live.profile, '--checkpoint', str(shipped_checkpoint()))
    folder = RunFolder(out)
    folder.begin(plan.setting(), {}, resume=False)
    offline.evaluate(plan, [live.bag], folder, Console(quiet=True), change=change)
    return out


def test_a_biased_joint_stands_first_among_the_changes(
    live: LiveRun, again: Path, tmp_path: Path
) -> None:
    def bias(engine: OfflineEngine) -> None:
        decode = engine.engine.processor.decode
        offset = np.where(np.array(JOINTS) == 'elbow', 0.1, 0.0)
        engine.engine.processor.decode = (  # type: ignore[method-assign]
            lambda actions, observation: decode(actions, observation) + offset
        )

    out = injected(live, tmp_path / 'biased', bias)
    assert 'action of 1 of 4 joints (elbow)' in compared(out, again).changed()
    errors = summary(out)['sent_error']['per_joint']
    assert errors['elbow']['bias'] == pytest.approx(0.1, abs=0.03)
    assert max(errors[joint]['mae'] for joint in JOINTS if joint != 'elbow') < 1e-5


def test_half_the_denoise_steps_show_in_setting_and_actions(
    live: LiveRun, again: Path, tmp_path: Path
) -> None:
    out = tmp_path / 'fewer'
    assert evaluate(live, out, '--num-denoise-steps', '5', '--compare', str(again)) == 0
    found = json.loads((out / JSON_FILE).read_text())['comparison']
    assert found['settings'] == {'profile.model.num_denoise_steps': ['5', '10']}
    assert compared(out, again).changed()
    assert summary(out)['sent_error']['mae'] > 100 * summary(again)['sent_error']['mae']


def test_a_dropped_camera_shows_in_setting_cameras_and_actions(
    live: LiveRun, again: Path, tmp_path: Path
) -> None:
    out = tmp_path / 'dropped'
    options = ('--drop-camera', 'left_wrist_0_rgb', '--compare', str(again))
    assert evaluate(live, out, *options) == 0
    found = json.loads((out / JSON_FILE).read_text())['comparison']
    assert found['settings']['dropped_cameras'] == ['left_wrist_0_rgb', '']
    assert 'cameras per frame' in compared(out, again).changed()
    assert summary(out)['sent_error']['mae'] > 100 * summary(again)['sent_error']['mae']
