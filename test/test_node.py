"""The node as a process on a real graph over DDS: what a robot publishes and what it then hears."""

from __future__ import annotations

import signal
from itertools import pairwise

import numpy as np
import pytest
from robot import JOINTS, Lifecycle, Robot, hold_of, nanoseconds, write_profile

pytest.importorskip('rclpy')


@pytest.fixture
def robot(graph, tmp_path):
    made = Robot(graph, tmp_path)
    yield made
    made.close()


STEP = 1.0 / 50  # max_velocity / rate_hz of the dummy profile


def last_is_a_hold(robot) -> bool:
    """Whether the last command leads from the one before it, in one step, to where the arm is."""
    before, last = (np.array(m.position) for m in robot.heard['joint_command'][-2:])
    way = np.clip(np.array(hold_of(robot)) - before, -STEP, STEP)
    return np.allclose(last, before + way, atol=1e-9)


def test_cameras_joints_and_an_instruction_become_commands_text_notes_and_numbers(robot):
    process = robot.start()
    robot.run_until(lambda: len(robot.heard['memory']) >= 2, 'two notes')
    robot.run_until(lambda: sum(m.final for m in robot.heard['text']) >= 3, 'three whole texts')
    stats = robot.run_for(5, 'stats')[-1]

    chunks = robot.heard['actions']
    assert [m.frame for m in chunks] == list(range(chunks[0].frame, chunks[0].frame + len(chunks)))
    assert all(tuple(m.joint_names) == JOINTS for m in chunks)
    assert all(len(m.values) == m.horizon * len(JOINTS) for m in chunks)
    stamps = {m.frame: nanoseconds(m.header.stamp) for m in chunks}
    assert set(stamps.values()) <= robot.image_stamps

    for name in ('text', 'memory'):
        for message in robot.heard[name]:
            assert nanoseconds(message.header.stamp) == stamps[message.frame]
    first = robot.heard['text'][0].frame
    pieces = [m for m in robot.heard['text'] if m.frame == first]
    assert ''.join(m.delta for m in pieces) == pieces[-1].text
    assert [m.final for m in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].reason == 'length'
    assert all(m.reason == 'length' and m.text for m in robot.heard['memory'])

    commands = robot.heard['joint_command']
    assert all(tuple(m.name) == JOINTS for m in commands)
    positions = np.array([m.position for m in commands])
    assert np.isfinite(positions).all()
    assert (np.abs(positions) <= 3.14).all()
    # One step from the command before, or, where the arm was held meanwhile, from the arm itself.
    one_step = np.abs(np.diff(positions, axis=0)) <= STEP + 1e-9
    at_the_arm = np.abs(positions[1:] - hold_of(robot)) <= STEP + 1e-9
    assert (one_step | at_the_arm).all()
    assert len({tuple(p) for p in positions.tolist()}) > 10  # the arm moves

    assert stats.prefills == stats.frames == stats.chunks
    assert stats.texts >= 3
    assert stats.notes >= 2
    assert stats.tokens > 0
    assert stats.slots_total == 8
    for name in ('command_hz', 'chunk_hz', 'action_hz', 'prefill_ms', 'denoise_ms'):
        assert getattr(stats, name) > 0, name
    assert process.interrupt() == 0


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_node_with_code_0_and_a_last_hold(robot, number):
    process = robot.start()
    robot.run_until_active()
    robot.run_for(10, 'joint_command')
    process.process.send_signal(number)
    robot.run_until(lambda: process.process.poll() is not None, 'the end of the node')
    assert process.wait() == 0
    robot.run_until(lambda: last_is_a_hold(robot), 'the last hold')
    assert 'inactive: hold was the last command' in process.log


def test_a_signal_while_the_model_loads_ends_the_node_with_code_0(robot):
    process = robot.start()
    process.wait_for_log('loading dummy')
    assert process.interrupt() == 0


def test_the_lifecycle_walks_and_no_command_leaves_while_inactive(robot):
    from lifecycle_msgs.msg import State, Transition

    process = robot.start(autostart=False)
    lifecycle = Lifecycle(robot)
    assert lifecycle.state() == State.PRIMARY_STATE_UNCONFIGURED
    assert lifecycle.change(Transition.TRANSITION_CONFIGURE)
    assert lifecycle.state() == State.PRIMARY_STATE_INACTIVE
    for _ in range(2):
        robot.run_for(5, 'stats')
        assert robot.heard['joint_command'] == []
        assert lifecycle.change(Transition.TRANSITION_ACTIVATE)
        robot.run_until_active()
        robot.run_for(10, 'joint_command')
        assert lifecycle.change(Transition.TRANSITION_DEACTIVATE)
        robot.run_for(5, 'stats')
        assert last_is_a_hold(robot)
        assert robot.heard['stats'][-1].command_hz == 0
        for key in ('joint_command', 'actions'):
            robot.heard[key].clear()
    assert lifecycle.change(Transition.TRANSITION_CLEANUP)
    assert lifecycle.state() == State.PRIMARY_STATE_UNCONFIGURED
    assert lifecycle.change(Transition.TRANSITION_CONFIGURE)
    lifecycle.change(Transition.TRANSITION_INACTIVE_SHUTDOWN)
    assert process.wait() == 0


# --- bad input on the running node ----------------------------------------------------------------


@pytest.mark.case(2)
def test_broken_images_are_refused_by_name_and_good_ones_go_on(robot):
    robot.start()
    robot.run_until_active()
    robot.cameras['base'] = False
    bad = {
        'image_encoding': {'encoding': 'plaid8'},
        'image_size': {'width': 0},
        'image_truncated': {'data': b'\x00' * 30},
        'image_depth': {'encoding': '32FC1'},
    }

    def refused():
        for changes in bad.values():
            robot.image_publishers['base'].publish(robot.image(**changes))
        return robot.drops().keys() >= bad.keys()

    def told():
        refused()  # on and on: what is told is the newest trouble, and silence would be one, too
        status = robot.status('camera base_0_rgb')
        return status is not None and 'camera/base/image_raw: expected' in status.message

    robot.run_until(refused, 'all four reasons')
    robot.run_until(told, 'the reason in the diagnostics')
    assert robot.status('camera base_0_rgb').level == b'\x01'
    robot.cameras['base'] = True
    robot.run_until_status('camera base_0_rgb', 'Hz')
    robot.run_for(3, 'actions')


def test_padded_rows_and_another_size_are_no_mistake(robot):
    robot.start()
    robot.run_until_active()
    robot.cameras['base'] = False
    padded = np.zeros((30, 200), np.uint8).tobytes()
    chunks = len(robot.heard['actions'])

    def seen():
        robot.image_publishers['base'].publish(
            robot.image(height=30, width=50, step=200, data=padded)
        )
        return len(robot.heard['actions']) >= chunks + 5

    robot.run_until(seen, 'chunks from padded images')
    assert 'image_size' not in robot.drops()


def test_without_its_required_camera_the_robot_holds_and_says_why(robot):
    robot.cameras['base'] = False
    robot.start()
    robot.run_until_status('engine', 'no frame: camera base_0_rgb: no image on')
    commands = robot.run_for(20, 'joint_command')
    assert all(list(m.position) == hold_of(robot) for m in commands)
    assert robot.heard['actions'] == []
    robot.cameras['base'] = True
    robot.run_until_active()
    robot.cameras['base'] = False
    robot.run_until_status('engine', 'limit 0.5 s')
    robot.run_until_status('commands', 'no fresh action: hold')


def test_a_lost_optional_camera_costs_its_tokens_and_nothing_else(robot):
    robot.start()
    robot.run_until_active()
    robot.cameras['wrist'] = False
    robot.run_until_status('camera left_wrist_0_rgb', 'any more')
    robot.run_for(5, 'actions')
    robot.heard['diagnostics'].clear()
    robot.run_until(
        lambda: (status := robot.status('engine')) and status.level == b'\x00',
        'an engine with nothing to complain of',
    )


@pytest.mark.case(32)
def test_a_joint_that_is_missing_or_nan_stops_the_frames_and_never_becomes_a_command(robot):
    robot.start()
    robot.run_until_active()
    robot.positions['joint_3'] = float('nan')
    robot.run_until_status('engine', 'joint joint_3: last position on joint_states is')
    robot.positions['joint_3'] = 0.25
    robot.run_for(3, 'actions')
    del robot.positions['joint_5']
    robot.run_until_status('engine', 'joint joint_5')
    robot.positions['joint_5'] = 0.25
    robot.run_for(3, 'actions')
    positions = np.array([m.position for m in robot.heard['joint_command']])
    assert np.isfinite(positions).all()


@pytest.mark.case(14)
def test_an_instruction_may_be_latched_or_volatile_changes_once_and_an_unusable_one_holds(robot):
    from rclpy.qos import DurabilityPolicy, QoSProfile
    from std_msgs.msg import String

    latched = robot.node.create_publisher(
        String,
        'instruction',
        QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL),
    )
    latched.publish(String(data='pick the cup'))  # before the node exists
    process = robot.start()
    robot.run_until(lambda: "instruction: 'pick the cup'" in process.log, 'the latched one')
    robot.run_until_active()
    robot.instruct(' wave ')
    robot.run_until(lambda: "instruction: 'wave'" in process.log, 'the volatile one')
    robot.instruct('wave')
    robot.instruct('stop waving')  # the sentinel: what came before it has been heard
    robot.run_until(lambda: "instruction: 'stop waving'" in process.log, 'the sentinel')
    assert process.log.count("instruction: 'wave'") == 1
    assert process.log.count("instruction: 'pick the cup'") == 1

    robot.instruct('x' * 5000)
    robot.run_until_status('engine', 'no frame: no instruction')
    assert 'expected at most 1000 characters, got 5000' in process.log
    robot.instruct('many words ' * 20)
    robot.run_until_status('engine', 'tokens too long for the model')
    robot.run_until_status('commands', 'no fresh action: hold')
    robot.instruct('wave')
    robot.run_for(3, 'actions')
    robot.instruct('')
    robot.run_until_status('engine', 'no frame: no instruction')


def test_the_annotated_picture_comes_while_somebody_looks(robot):
    from sensor_msgs.msg import Image

    robot.start(annotated_rate_hz=5.0)
    robot.run_until_active()
    robot.hear('oxygen/annotated', Image, 'annotated', 1)
    picture = robot.run_for(2, 'annotated')[-1]
    assert (picture.encoding, picture.step) == ('rgb8', 3 * picture.width)
    pixels = np.frombuffer(picture.data, np.uint8).reshape(picture.height, picture.width, 3)
    assert pixels[:240].std() > 20  # the camera's noise
    assert nanoseconds(picture.header.stamp) > 0


# --- parameters, profiles, checkpoints ------------------------------------------------------------


def test_a_profile_or_checkpoint_that_cannot_be_used_ends_the_start_with_a_clear_error(robot):
    from golden_pi05 import CHECKPOINT

    trained = ('random_weights: true', 'random_weights: false')
    cases = [
        ({'profile': 'r2d2'}, "no profile 'r2d2'"),
        (
            {'profile': write_profile(robot, ('frame_rate_hz:', 'frame_rate:'))},
            "frame_rate: unknown key, did you mean 'frame_rate_hz'",
        ),
        ({'checkpoint': robot.folder / 'nowhere'}, 'nowhere'),
        ({'device': 'tpu'}, "parameter 'device': expected auto, cpu or cuda[:N], got 'tpu'"),
    ]
    processes = [(robot.start(**parameters), complaint) for parameters, complaint in cases]
    for process, complaint in processes:
        assert process.wait() == 1
        assert 'configure failed' in process.log
        assert complaint in process.log
        assert 'Traceback' not in process.log

    untrained = write_profile(robot, trained)
    process = robot.start(profile=untrained)
    assert process.wait() == 1
    assert "expected parameter 'checkpoint'" in process.log

    tokenizer = tiny_tokenizer(robot.folder)
    process = robot.start(profile=untrained, checkpoint=CHECKPOINT, tokenizer=tokenizer)
    robot.run_until_active()  # the golden checkpoint has the dummy preset's sizes
    assert process.interrupt() == 0
    robot.heard['actions'].clear()
    other_size = write_profile(robot, trained, ('preset: dummy', 'preset: mid'))
    process = robot.start(profile=other_size, checkpoint=CHECKPOINT, tokenizer=tokenizer)
    assert process.wait() == 1
    assert 'wrong shape: paligemma_with_expert.paligemma' in process.log
    assert robot.heard['actions'] == []


def tiny_tokenizer(folder):
    import sentencepiece

    words = folder / 'words.txt'
    words.write_text('\n'.join(f'move the arm {i} to the red block' for i in range(256)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(words), model_prefix=str(folder / 'tokenizer'), vocab_size=400,
        byte_fallback=True, pad_id=0, eos_id=1, bos_id=2, unk_id=3, minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    return folder / 'tokenizer.model'


@pytest.mark.case(49)
def test_parameters_take_an_int_for_a_double_and_refuse_what_makes_no_sense(robot):
    from rcl_interfaces.srv import SetParameters
    from rclpy.parameter import Parameter

    process = robot.start(frame_rate_hz=5, command_rate_hz=20)
    robot.run_until_active()
    robot.run_until(lambda: 15 < robot.heard['stats'][-1].command_hz < 25, '20 Hz of commands')
    client = robot.node.create_client(SetParameters, 'oxygen/set_parameters')
    robot.run_until(client.service_is_ready, 'the parameter service')

    def set_parameter(name, value):
        request = SetParameters.Request(
            parameters=[Parameter(name, value=value).to_parameter_msg()]
        )
        future = client.call_async(request)
        robot.run_until(future.done, 'the answer')
        return future.result().results[0]

    refused = set_parameter('device', 'cuda')
    assert not refused.successful
    assert "'device' can only be set before configure" in refused.reason
    assert not set_parameter('seed', -1).successful
    assert set_parameter('instruction', 'wave').successful
    robot.run_until(lambda: "instruction: 'wave'" in process.log, 'the new instruction')
    assert process.interrupt() == 0

    refused = robot.start(num_slots=1)
    assert refused.wait() == 2
    assert 'num_slots' in refused.log
    assert 'Traceback' not in refused.log


# --- command interfaces ---------------------------------------------------------------------------


def test_a_trajectory_carries_the_rest_of_the_chunk(robot):
    from trajectory_msgs.msg import JointTrajectory

    robot.hear('joint_trajectory', JointTrajectory, 'trajectory')
    profile = write_profile(
        robot,
        ('interface: joint_state  ', 'interface: joint_trajectory  '),
        ('topic: joint_command', 'topic: joint_trajectory'),
    )
    robot.start(profile=profile)
    robot.run_until(
        lambda: any(len(m.points) > 5 for m in robot.heard['trajectory']), 'a long trajectory'
    )
    for message in robot.heard['trajectory']:
        assert tuple(message.joint_names) == JOINTS
        assert nanoseconds(message.header.stamp) == 0
        times = [nanoseconds(point.time_from_start) for point in message.points]
        assert times[0] > 0
        assert all(a < b for a, b in pairwise(times))
    assert robot.heard['joint_command'] == []


@pytest.mark.parametrize('blending', ['rtc', 'rtc_identity'])
def test_a_chunk_begins_with_what_the_one_before_has_left(robot, blending):
    process = robot.start(
        profile=write_profile(robot, ('blending: replace', f'blending: {blending}'))
    )
    robot.run_for(3, 'actions')  # a delay is known from the second on
    gaps, jumps = [], []
    for before, chunk in pairwise(robot.run_for(12, 'actions')):
        elapsed_s = (nanoseconds(chunk.header.stamp) - nanoseconds(before.header.stamp)) / 1e9
        old, new = (np.reshape(m.values, (m.horizon, -1)) for m in (before, chunk))
        row = elapsed_s / before.period_s
        if row <= len(old) - 1:
            left = [np.interp(row, np.arange(len(old)), joint) for joint in old.T]
            gaps.append(np.abs(new[0] - left).max())
            jumps.append(np.abs(np.diff(old, axis=0)).max())
    assert len(gaps) >= 3
    assert np.median(gaps) < 0.05 * np.median(jumps)
    assert process.interrupt() == 0


def test_a_forward_command_is_an_array_in_joint_order(robot):
    from std_msgs.msg import Float64MultiArray

    robot.positions = {name: 0.1 * i for i, name in enumerate(JOINTS)}
    robot.cameras['base'] = False  # so it holds
    robot.hear('commands', Float64MultiArray, 'array')
    profile = write_profile(
        robot,
        ('interface: joint_state  ', 'interface: forward_command  '),
        ('topic: joint_command', 'topic: commands'),
    )
    robot.start(profile=profile)
    robot.run_for(5, 'array')
    assert all(list(m.data) == hold_of(robot) for m in robot.heard['array'])


def test_a_dry_run_moves_nothing(robot):
    from sensor_msgs.msg import JointState

    robot.hear('oxygen/would_be_command', JointState, 'would_be')
    robot.start(dry_run=True)
    robot.run_until_active()
    robot.run_for(20, 'would_be')
    assert robot.heard['joint_command'] == []
    assert robot.node.count_publishers('joint_command') == 0


# --- clocks and namespaces ------------------------------------------------------------------------


class SimulatedTime:
    """The test's hand on /clock."""

    def __init__(self, robot, start_s: float):
        from rosgraph_msgs.msg import Clock

        self._publisher = robot.node.create_publisher(Clock, '/clock', 10)
        self._robot, self.now_s = robot, start_s
        robot.stamp = self.stamp

    def stamp(self):
        from builtin_interfaces.msg import Time

        return Time(sec=int(self.now_s), nanosec=int(self.now_s % 1 * 1e9))

    def advance(self, seconds: float) -> None:
        from rosgraph_msgs.msg import Clock

        self.now_s += seconds
        self._publisher.publish(Clock(clock=self.stamp()))


@pytest.mark.case(28)
def test_simulated_time_sets_the_pace_and_a_jump_back_begins_anew(robot):
    process = robot.start(use_sim_time=True)
    clock = SimulatedTime(robot, 100.0)
    robot.run_until_status('clock', 'waiting for /clock')
    assert robot.heard['actions'] == []

    def chunks(count):
        before = len(robot.heard['actions'])

        def grown():
            clock.advance(0.02)
            return len(robot.heard['actions']) >= before + count

        robot.run_until(grown, f'{count} chunks')

    chunks(5)
    assert all(m.header.stamp.sec >= 100 for m in robot.heard['actions'])
    clock.now_s = 50.0  # the bag begins again
    robot.heard['actions'].clear()
    chunks(5)
    assert 'the clock jumped by -' in process.log
    assert 50 <= robot.heard['actions'][-1].header.stamp.sec < 100
    # A standing clock means standing frames, while commands go on.
    robot.run_for(10, 'joint_command')
    assert process.interrupt() == 0


@pytest.mark.case(50)
def test_two_robots_in_two_namespaces_do_not_hear_each_other(graph, tmp_path):
    robots = [Robot(graph, tmp_path, namespace) for namespace in ('/left', '/right')]
    left, right = robots
    try:
        processes = [robot.start() for robot in robots]
        right.positions = dict.fromkeys(JOINTS, -0.5)
        for robot in robots:
            robot.run_until(
                lambda: all(r.publish() or r.heard['actions'] for r in robots), 'both to act'
            )
        left.instruct('only you')
        left.run_until(lambda: "instruction: 'only you'" in processes[0].log, 'the instruction')
        assert 'only you' not in processes[1].log
        left.cameras = right.cameras = dict.fromkeys(left.cameras, False)
        left.run_until(
            lambda: (
                right.publish()
                or all(
                    robot.heard['joint_command']
                    and list(robot.heard['joint_command'][-1].position) == hold_of(robot)
                    for robot in robots
                )
            ),
            'each to hold its own pose',
        )
    finally:
        for robot in robots:
            robot.close()
