"""What the launch files of monitoring, recording and replay decide: perspective, topics, programs.

Owns these decisions as plain functions, so that they are tested where no launch is installed. Knows
nothing of launch; `launch/monitor.launch.py`, `record.launch.py` and `replay.launch.py` call it.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from oxygen_ros.profile import load_profile, share_folder

DEFAULT_NODE = '/oxygen'
PERSPECTIVE = 'oxygen.perspective'


def full_name(namespace: str, node: str = 'oxygen') -> str:
    """Return the absolute name of a node, whichever way its namespace is written."""
    parts = [*namespace.split('/'), node]
    return '/' + '/'.join(part for part in parts if part)


def perspective_for(node: str) -> Path:
    """Return a perspective file for the node of that full name.

    Topic names in a perspective are absolute, so that for any other node a copy is made.
    """
    path = share_folder() / 'config' / PERSPECTIVE
    if node == DEFAULT_NODE:
        return path
    text = path.read_text(encoding='utf-8').replace(f"'{DEFAULT_NODE}/", f"'{node}/")
    json.loads(text)
    with tempfile.NamedTemporaryFile(
        'w', prefix='oxygen_', suffix='.perspective', delete=False, encoding='utf-8'
    ) as file:
        file.write(text)
    return Path(file.name)


def replayed_topics(bag: str, profile: str) -> dict[str, str]:
    """Return the recorded topics that the node listens to -> the names it listens to.

    Nothing else is played: neither recorded commands, which would move a robot, nor what another
    node once wrote to our topics.

    Raises:
        BagError: the recording lacks what the profile requires, or has it in another form.
        ProfileError: no such profile.
    """
    from oxygen_ros.evaluation.bag_source import BagSource, Given
    from oxygen_ros.evaluation.recording import Recording

    loaded = load_profile(profile, share_folder() / 'config')
    return BagSource(Recording(Path(bag).expanduser()), loaded, Given()).inputs(loaded)


def player_command(
    bag: str, topics: dict[str, str], *, rate: str, loop: bool, has_ros2bag: bool, oxygen_play: str
) -> list[str]:
    """Return the command line that plays a recording with /clock, by rosbag2 where it is there.

    Args:
        topics: recorded name -> published name.
        oxygen_play: path of our own player.
    """
    remaps = [f'{old}:={new}' for old, new in topics.items() if old != new]
    command = ['ros2', 'bag', 'play', bag] if has_ros2bag else [oxygen_play, bag]
    command += ['--rate', rate, '--clock', '100', '--topics', *topics]
    if remaps:
        command += ['--remap', *remaps]
    if loop:
        command += ['--loop']
    return command


def recorded_topics(profile: str, namespace: str) -> list[str]:
    """Return what makes a useful evaluation later: all that the node hears, sends and says.

    Raises ProfileError: no such profile.
    """
    loaded = load_profile(profile, share_folder() / 'config')
    heard = [*(camera.topic for camera in loaded.cameras), loaded.joints.topic]
    sent = [loaded.command.topic, '~/would_be_command', '~/actions']
    said = [*(task.topic for task in loaded.tasks), '~/stats', '/diagnostics']
    topics = [*heard, loaded.instruction.topic, *sent, *said]
    return [_full_topic(topic, namespace) for topic in topics]


def _full_topic(topic: str, namespace: str) -> str:
    if topic.startswith('/'):
        return topic
    if topic.startswith('~/'):
        return f'{full_name(namespace)}/{topic.removeprefix("~/")}'
    return full_name(namespace, topic)


def recorder_command(
    topics: list[str], *, bag: str, use_sim_time: bool, ros_distro: str
) -> list[str]:
    """Return the command line that records topics with rosbag2.

    Args:
        bag: folder to make; '' leaves its name to rosbag2.
    """
    command = ['ros2', 'bag', 'record']
    if bag:
        command += ['--output', bag]
    if use_sim_time:
        command += ['--use-sim-time']
    # Humble knows them as plain arguments only, its successors warn about those.
    return [*command, *([] if ros_distro == 'humble' else ['--topics']), *topics]


def is_installed(package: str) -> bool:
    """Return whether ROS knows a package."""
    from ament_index_python.packages import PackageNotFoundError, get_package_prefix

    try:
        get_package_prefix(package)
    except PackageNotFoundError:
        return False
    return True
