"""The faults of a soak: what is done to the robot, and what the node must say of it meanwhile.

Owns the list `FAULTS`. A fault is a context: it begins, lasts while `soak.py` looks at the node,
and is undone. Knows nothing of when it comes and of how the node is judged.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from oxygen_ros.conversions import ns_to_stamp, stamp_to_ns
from oxygen_ros.evaluation.measurements import resolve
from oxygen_ros.evaluation.node_process import NodeProcess
from oxygen_ros.evaluation.soak_camera import noise
from oxygen_ros.evaluation.soak_operator import SoakError, SoakOperator
from oxygen_ros.evaluation.soak_robot import Hook, SoakRobot, unchanged
from oxygen_ros.evaluation.soak_witness import SoakWitness

NUM_FLOOD = 300
NUM_CHURN = 10
NUM_PARAMETERS = 20


@dataclass
class World:
    """Everything that a fault may touch."""

    process: NodeProcess
    robot: SoakRobot
    operator: SoakOperator
    witness: SoakWitness
    excused: list[tuple[int, int]] = field(default_factory=list)
    """When we kept the node itself from running [ns, steady clock]."""


@dataclass(frozen=True)
class Fault:
    name: str
    act: Callable[[World, random.Random], AbstractContextManager[None]]
    told: tuple[str, str] | None = None
    """Part of the diagnostics, and words that must stand there while the fault lasts."""
    goes_on: bool = False
    """Whether chunks must keep coming meanwhile."""


@contextmanager
def _images(world: World, hook: Hook) -> Iterator[None]:
    world.robot.on_image = hook
    yield
    world.robot.on_image = unchanged


@contextmanager
def _joints(world: World, hook: Hook) -> Iterator[None]:
    world.robot.on_joints = hook
    yield
    world.robot.on_joints = unchanged


def camera_dies(world: World, rng: random.Random) -> AbstractContextManager[None]:
    return _images(world, lambda message: None)


def camera_freezes(world: World, rng: random.Random) -> AbstractContextManager[None]:
    """The driver goes on, with one picture and one stamp."""
    stamp = ns_to_stamp(time.time_ns())

    def freeze(message: Any) -> Any:
        message.header.stamp = stamp
        return message

    return _images(world, freeze)


def camera_garbles(world: World, rng: random.Random) -> AbstractContextManager[None]:
    def garble(message: Any) -> Any:
        kind = rng.randrange(4)
        if kind == 0:
            message.data = message.data[: rng.randrange(len(message.data))]
        elif kind == 1:
            message.encoding = rng.choice(['', 'plaid8', '32FC1', 'π'])
        elif kind == 2:
            message.step = rng.randrange(3 * message.width)
            message.step += message.step == 0
        else:
            message.width = rng.choice([0, 2**32 - 1])
        return message

    return _images(world, garble)


def camera_resizes(world: World, rng: random.Random) -> AbstractContextManager[None]:
    def resize(message: Any) -> Any:
        message.height, message.width = rng.randrange(16, 200), rng.randrange(16, 200)
        message.step = 3 * message.width
        message.data = noise(0, message.height, message.width)
        return message

    return _images(world, resize)


def stamps_skew(world: World, rng: random.Random) -> AbstractContextManager[None]:
    """Another machine's clock: years off, or not set at all."""
    skew_s = rng.choice([3600, -86_400, None])

    def skew(message: Any) -> Any:
        stamp_ns = stamp_to_ns(message.header.stamp)
        message.header.stamp = ns_to_stamp(0 if skew_s is None else stamp_ns + skew_s * 10**9)
        return message

    return _images(world, skew)


def joints_stop(world: World, rng: random.Random) -> AbstractContextManager[None]:
    return _joints(world, lambda message: None)


def joint_is_nan(world: World, rng: random.Random) -> AbstractContextManager[None]:
    value = rng.choice([float('nan'), float('inf')])

    def spoil(message: Any) -> Any:
        message.position[-1] = value
        return message

    return _joints(world, spoil)


def joints_disagree_in_length(world: World, rng: random.Random) -> AbstractContextManager[None]:
    def cut(message: Any) -> Any:
        message.position = message.position[:-1]
        return message

    return _joints(world, cut)


@contextmanager
def instructions_flood(world: World, rng: random.Random) -> Iterator[None]:
    for i in range(NUM_FLOOD):
        text = rng.choice(['wave', 'π' * 3000, f'take block {i}', '', '🤖\t\n', 'a\x07b'])
        world.robot.instruct(text)
    world.robot.instruct('move the arm to the blue block')
    yield


@contextmanager
def subscribers_come_and_go(world: World, rng: random.Random) -> Iterator[None]:
    """In a context of their own, as separate programs: participants come and go with them."""
    import rclpy

    from oxygen_ros.msg import ActionChunk, EngineStats, Note, Text

    kinds = {'actions': ActionChunk, 'stats': EngineStats, 'memory': Note, 'text': Text}
    for _ in range(NUM_CHURN):
        context = rclpy.Context()
        rclpy.init(args=[], context=context)
        node = rclpy.create_node('onlooker', context=context)
        for name, kind in kinds.items():
            node.create_subscription(kind, resolve(f'~/{name}'), lambda message: None, 1)
        time.sleep(rng.uniform(0.0, 0.2))
        node.destroy_node()
        rclpy.shutdown(context=context)
    yield


@contextmanager
def parameters_storm(world: World, rng: random.Random) -> Iterator[None]:
    settings = [
        ('instruction', 'dance', True),
        ('instruction', 'x' * 5000, True),  # taken, and then no instruction at all
        ('instruction', 7, False),
        ('seed', 3, False),
        ('command_rate_hz', float('nan'), False),
        ('nonsense', 1, False),
    ]
    for _ in range(NUM_PARAMETERS):
        name, value, expected = rng.choice(settings)
        if world.operator.set_parameter(name, value) != expected:
            raise SoakError(f'{name} = {value!r:.40}: expected taken = {expected}')
    world.operator.set_parameter('instruction', 'move the arm to the red block')
    yield


@contextmanager
def deactivated(world: World, rng: random.Random) -> Iterator[None]:
    world.operator.change('deactivate')
    yield
    world.operator.change('activate')


@contextmanager
def cleaned_up(world: World, rng: random.Random) -> Iterator[None]:
    world.operator.change('deactivate')
    world.operator.change('cleanup')
    yield
    world.operator.change('configure')
    world.operator.change('activate')


@contextmanager
def node_stops(world: World, rng: random.Random) -> Iterator[None]:
    """As under a debugger, or on a machine that swaps."""
    began_ns = time.monotonic_ns()
    os.kill(world.process.pid, signal.SIGSTOP)
    time.sleep(rng.uniform(0.1, 1.0))
    os.kill(world.process.pid, signal.SIGCONT)
    world.excused.append((began_ns, time.monotonic_ns()))
    yield


@contextmanager
def engine_is_killed(world: World, rng: random.Random) -> Iterator[None]:
    for pid in world.process.children():
        os.kill(pid, signal.SIGKILL)
    yield


@contextmanager
def wrist_camera_hangs(world: World, rng: random.Random) -> Iterator[None]:
    assert world.robot.wrist_camera is not None
    os.kill(world.robot.wrist_camera.pid, signal.SIGSTOP)
    yield
    os.kill(world.robot.wrist_camera.pid, signal.SIGCONT)


@contextmanager
def wrist_camera_is_killed(world: World, rng: random.Random) -> Iterator[None]:
    assert world.robot.wrist_camera is not None
    world.robot.wrist_camera.kill()
    yield
    world.robot.start_wrist_camera()


_WRIST_IS_MISSED = ('camera left_wrist_0_rgb', 'any more')

FAULTS = (
    Fault('camera dies', camera_dies, ('engine', 'last image on camera/base/image_raw')),
    Fault('camera freezes', camera_freezes, ('engine', 'last image on camera/base/image_raw')),
    Fault('camera garbles', camera_garbles, ('camera base_0_rgb', 'expected')),
    Fault('camera resizes', camera_resizes, goes_on=True),
    Fault('stamps skew', stamps_skew, goes_on=True),
    Fault('joints stop', joints_stop, ('engine', 'last position on joint_states')),
    Fault('joint is nan', joint_is_nan, ('engine', 'last position on joint_states')),
    Fault('joints disagree', joints_disagree_in_length, ('joint states', 'expected 6 positions')),
    Fault('instruction flood', instructions_flood, goes_on=True),
    Fault('subscriber churn', subscribers_come_and_go, goes_on=True),
    Fault('parameter storm', parameters_storm, goes_on=True),
    Fault('deactivated', deactivated, ('commands', 'inactive')),
    Fault('cleaned up', cleaned_up, ('engine', 'not configured')),
    Fault('node stops', node_stops, goes_on=True),
    Fault('engine is killed', engine_is_killed, ('engine', 'the engine process')),
    Fault('wrist hangs', wrist_camera_hangs, _WRIST_IS_MISSED, goes_on=True),
    Fault('wrist is killed', wrist_camera_is_killed, _WRIST_IS_MISSED, goes_on=True),
)
