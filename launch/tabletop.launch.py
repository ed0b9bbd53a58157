"""The simulated table and the policy that plays it: `ros2 launch oxygen_ros tabletop.launch.py`.

Starts the world (a robot like any other), the node with the profile and the trained weights of the
table, and rqt where it is installed. Give it something to do:
`ros2 topic pub --once /instruction std_msgs/msg/String '{data: touch the blue block}'`.
"""

from __future__ import annotations

from ament_index_python.packages import PackageNotFoundError, get_package_prefix
from launch import LaunchContext, LaunchDescription
from launch.actions import DeclareLaunchArgument, IncludeLaunchDescription, OpaqueFunction
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue
from launch_ros.substitutions import FindPackageShare

SHARE = FindPackageShare('oxygen_ros')


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments; start the world and the node, and rqt if that is wanted."""
    return LaunchDescription(
        [
            DeclareLaunchArgument(
                'seed', default_value='0', description='layout of the blocks and pose of the arm'
            ),
            DeclareLaunchArgument(
                'instruction',
                default_value='',
                description='what to do until the instruction topic says otherwise; empty takes '
                'the profile',
            ),
            DeclareLaunchArgument(
                'checkpoint',
                default_value=PathJoinSubstitution([SHARE, 'resource', 'tabletop']),
                description='folder of the weights; the default is the one that ships',
            ),
            DeclareLaunchArgument(
                'device',
                default_value='cpu',
                description='where the model runs: auto, cpu, cuda or cuda:N',
            ),
            DeclareLaunchArgument(
                'rqt',
                default_value='auto',
                choices=['auto', 'true', 'false'],
                description='start rqt beside it; auto: where it is installed',
            ),
            Node(
                package='oxygen_ros',
                executable='oxygen_tabletop',
                name='tabletop',
                parameters=[{'seed': ParameterValue(LaunchConfiguration('seed'), value_type=int)}],
                output='screen',
                emulate_tty=True,
            ),
            IncludeLaunchDescription(
                PythonLaunchDescriptionSource(
                    PathJoinSubstitution([SHARE, 'launch', 'oxygen.launch.py'])
                ),
                launch_arguments={
                    'profile': 'tabletop',
                    'checkpoint': LaunchConfiguration('checkpoint'),
                    'device': LaunchConfiguration('device'),
                    'instruction': LaunchConfiguration('instruction'),
                }.items(),
            ),
            OpaqueFunction(function=start_rqt),
        ]
    )


def start_rqt(context: LaunchContext) -> list[Node]:
    """Return rqt if it was asked for, or if nobody said no and it is there."""
    wanted = LaunchConfiguration('rqt').perform(context)
    if wanted == 'false' or (wanted == 'auto' and not is_installed('rqt_gui')):
        return []
    return [Node(package='rqt_gui', executable='rqt_gui', name='rqt', output='screen')]


def is_installed(package: str) -> bool:
    """Return whether ROS knows a package."""
    try:
        get_package_prefix(package)
    except PackageNotFoundError:
        return False
    return True
