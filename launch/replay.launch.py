"""A recording into the node: `ros2 launch oxygen_ros replay.launch.py bag:=DIR profile:=aloha`.

The node follows the time of the recording (use_sim_time) and sends its commands to
~/would_be_command only. `ros2 bag play --clock` plays where rosbag2 is installed, else oxygen_play;
it starts when the node is active, and its end ends everything. Only what the node listens to is
played. `oxygen_eval` does the same offline and measures.
"""

from __future__ import annotations

from pathlib import Path

from ament_index_python.packages import get_package_prefix
from launch import LaunchContext, LaunchDescription
from launch.actions import (
    DeclareLaunchArgument,
    ExecuteProcess,
    IncludeLaunchDescription,
    OpaqueFunction,
    RegisterEventHandler,
    Shutdown,
)
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.event_handlers import OnStateTransition
from launch_ros.substitutions import FindPackageShare

from oxygen_ros.evaluation.launching import is_installed, player_command, replayed_topics

# Arguments that are handed on to oxygen.launch.py.
NODE_ARGUMENTS = {
    'profile': ('dummy', 'robot profile: a name in config/ or a file'),
    'checkpoint': ('', 'folder of the checkpoint; empty only with random weights'),
    'device': ('auto', 'where the model runs: auto, cpu, cuda or cuda:N'),
    'instruction': ('', 'what to do until the recording says otherwise; empty takes the profile'),
}


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments; start the node, and the player when the node is active."""
    return LaunchDescription(
        [
            DeclareLaunchArgument('bag', description='folder of the rosbag2 recording'),
            DeclareLaunchArgument(
                'rate', default_value='1.0', description='seconds of the recording per second'
            ),
            DeclareLaunchArgument(
                'loop',
                default_value='false',
                choices=['true', 'false'],
                description='true: begin again at the end; the node forgets when the clock jumps',
            ),
            DeclareLaunchArgument(
                'player',
                default_value='auto',
                choices=['auto', 'ros2bag', 'oxygen_play'],
                description='who plays; auto: ros2 bag play where it is installed',
            ),
            *(
                DeclareLaunchArgument(name, default_value=default, description=description)
                for name, (default, description) in NODE_ARGUMENTS.items()
            ),
            OpaqueFunction(function=replay),
        ]
    )


def replay(
    context: LaunchContext,
) -> list[IncludeLaunchDescription | RegisterEventHandler]:
    """Build node and player once the arguments are known."""
    given = {
        name: LaunchConfiguration(name).perform(context)
        for name in ('bag', 'rate', 'loop', 'player', *NODE_ARGUMENTS)
    }
    has_ros2bag = given['player'] == 'ros2bag' or (
        given['player'] == 'auto' and is_installed('ros2bag')
    )
    command = player_command(
        given['bag'],
        replayed_topics(given['bag'], given['profile']),
        rate=given['rate'],
        loop=given['loop'] == 'true',
        has_ros2bag=has_ros2bag,
        oxygen_play=str(Path(get_package_prefix('oxygen_ros'), 'lib/oxygen_ros/oxygen_play')),
    )
    player = ExecuteProcess(
        cmd=command, output='screen', on_exit=[Shutdown(reason='the recording is over')]
    )
    node = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(
            PathJoinSubstitution([FindPackageShare('oxygen_ros'), 'launch', 'oxygen.launch.py'])
        ),
        launch_arguments={
            **{name: given[name] for name in NODE_ARGUMENTS},
            'use_sim_time': 'true',
            'dry_run': 'true',
        }.items(),
    )
    return [
        RegisterEventHandler(OnStateTransition(goal_state='active', entities=[player])),
        node,
    ]
