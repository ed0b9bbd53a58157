"""Records a robot for `oxygen_eval`: `ros2 launch oxygen_ros record.launch.py profile:=aloha`.

Runs `ros2 bag record` on what the profile names: cameras, joint states, instruction and commands,
which an evaluation needs, and what the node sent and said, to compare with. Ctrl-C ends it.
"""

from __future__ import annotations

import os

from launch import LaunchContext, LaunchDescription
from launch.actions import DeclareLaunchArgument, ExecuteProcess, OpaqueFunction
from launch.substitutions import LaunchConfiguration

from oxygen_ros.evaluation.launching import recorded_topics, recorder_command


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments; record."""
    return LaunchDescription(
        [
            DeclareLaunchArgument(
                'profile', description='robot profile: a name in config/ or a file'
            ),
            DeclareLaunchArgument(
                'namespace', default_value='', description='namespace of the node'
            ),
            DeclareLaunchArgument(
                'bag', default_value='', description='folder to make; empty: named by the time'
            ),
            DeclareLaunchArgument(
                'use_sim_time',
                default_value='false',
                choices=['true', 'false'],
                description='true: log by /clock, as the node does in simulation',
            ),
            OpaqueFunction(function=record),
        ]
    )


def record(context: LaunchContext) -> list[ExecuteProcess]:
    """Start the recorder once the arguments are known."""
    given = {
        name: LaunchConfiguration(name).perform(context)
        for name in ('profile', 'namespace', 'bag', 'use_sim_time')
    }
    command = recorder_command(
        recorded_topics(given['profile'], given['namespace']),
        bag=given['bag'],
        use_sim_time=given['use_sim_time'] == 'true',
        ros_distro=os.environ.get('ROS_DISTRO', ''),
    )
    return [ExecuteProcess(cmd=command, output='screen')]
