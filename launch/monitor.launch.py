"""rqt on a running node: `ros2 launch oxygen_ros monitor.launch.py namespace:=left`.

Opens the plots (command Hz, chunk Hz, tokens/s; lateness and age), the topic monitor and the
runtime monitor. rqt drops plotted topics that do not exist yet, so it starts with the node's first
statistics. `aggregator:=true` runs diagnostic_aggregator beside it, for rqt_robot_monitor.
"""

from __future__ import annotations

from launch import LaunchContext, LaunchDescription
from launch.actions import (
    DeclareLaunchArgument,
    ExecuteProcess,
    LogInfo,
    OpaqueFunction,
    RegisterEventHandler,
)
from launch.conditions import IfCondition
from launch.event_handlers import OnProcessExit
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import Node
from launch_ros.substitutions import FindPackageShare

from oxygen_ros.evaluation.launching import full_name, perspective_for


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments; wait for the node, then start rqt."""
    return LaunchDescription(
        [
            DeclareLaunchArgument(
                'namespace', default_value='', description='namespace of the node to watch'
            ),
            DeclareLaunchArgument(
                'aggregator',
                default_value='false',
                choices=['true', 'false'],
                description='true: group /diagnostics into /diagnostics_agg',
            ),
            Node(
                package='diagnostic_aggregator',
                executable='aggregator_node',
                name='diagnostic_aggregator',
                parameters=[
                    PathJoinSubstitution(
                        [FindPackageShare('oxygen_ros'), 'config', 'diagnostics.yaml']
                    )
                ],
                condition=IfCondition(LaunchConfiguration('aggregator')),
            ),
            OpaqueFunction(function=start_rqt),
        ]
    )


def start_rqt(context: LaunchContext) -> list[ExecuteProcess | LogInfo | RegisterEventHandler]:
    """Wait for one message of the node's statistics, then open its perspective."""
    node = full_name(LaunchConfiguration('namespace').perform(context))
    first_stats = ExecuteProcess(
        cmd=['ros2', 'topic', 'echo', '--once', f'{node}/stats', 'oxygen_ros/msg/EngineStats'],
        output='log',
    )
    rqt = Node(
        package='rqt_gui',
        executable='rqt_gui',
        name='rqt_oxygen',
        arguments=['--perspective-file', str(perspective_for(node))],
        output='screen',
    )
    return [
        LogInfo(msg=f'waiting for {node}/stats'),
        RegisterEventHandler(OnProcessExit(target_action=first_stats, on_exit=[rqt])),
        first_stats,
    ]
